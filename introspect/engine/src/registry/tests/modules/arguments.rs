//! Arguments of functions of modules, from the modules' own types.

use hvprobe_arch::regs::RegisterSet;
use hvprobe_fixtures::btf::Btf;
use hvprobe_spec::Item;
use hvprobe_spec::histogram::read_histogram;

use super::super::arguments::{defaults, values};
use super::*;

impl Loader {
    /// As [`Loader::load`], with types: `enter(device, count)`, and the structure of a device.
    fn load_typed(&mut self, name: &str, state: u32) -> Loaded {
        let kernel = types(Age::V64);
        let mut own = Btf::behind(&kernel);
        let long = own.int("long", 8, 1);
        let device = own.structure("device", 0x40, &[("number", long, 0x80)]);
        let device = own.pointer(device);
        own.function("enter", long, &[("device", device), ("count", long)]);
        let made = self.modules.add(name, state);
        let made = made.code(0, &[0x90; 0x100]).code(0, &ENTER);
        let made = made.symbols(SYMBOLS).types(&own.bytes());
        Loaded {
            base: made.base,
            at: made.at,
        }
    }

    /// Returns the names, types and values of the arguments at a hit of `id`, with the given registers.
    fn hit(&mut self, id: ProbeId, rdi: u64, rsi: u64) -> Vec<(String, String, u64)> {
        let mut cpu = Cpu::new(&self.rig);
        (cpu.regs.rdi, cpu.regs.rsi) = (rdi, rsi);
        assert_eq!(cpu.hit(self.rig.addr(id)), RESUME);
        let events = cpu.events();
        let arguments = values(&events[0], &self.rig.info(id)).into_iter();
        let number = |value: Option<Vec<u8>>| {
            let bytes = value.expect("it can be read");
            u64::from_le_bytes(bytes.try_into().expect("eight bytes"))
        };
        arguments
            .map(|(name, ty, value)| (name, ty, number(value)))
            .collect()
    }
}

fn argument(name: &str, ty: &str, value: u64) -> (String, String, u64) {
    (name.to_owned(), ty.to_owned(), value)
}

/// Returns the message with which a probe was refused at `column` of its definition.
fn said(refused: &Refused, column: usize) -> &str {
    match refused {
        Refused::Argument(error) if error.column == column => &error.message,
        other => panic!("{other:?}"),
    }
}

#[test]
fn function_of_a_loaded_module_shows_its_own_arguments() {
    let mut loader = Loader::live();
    let module = loader.load_typed("m", 0);
    let device = module.base.wrapping_add(0x1800);
    loader
        .rig
        .guest
        .write(device.wrapping_add(0x10), &77_u64.to_le_bytes());
    let id = loader.rig.register(&[defaults("p m:enter")])[0];
    assert!(loader.rig.info(id).shown.call);
    let whole = [
        argument("device", "struct device *", device.0),
        argument("count", "long", 5),
    ];
    assert_eq!(loader.hit(id, device.0, 5), whole);
    loader.rig.unregister(&[id]).unwrap();
    let id = loader
        .rig
        .one("p m:enter n=device->number cast=(device)%di->number second=$arg2");
    let expected = [
        argument("n", "long", 77),
        argument("cast", "long", 77),
        argument("second", "long", 5),
    ];
    assert_eq!(loader.hit(id, device.0, 5), expected);
}

#[test]
fn arguments_of_a_pending_probe_are_found_when_its_module_comes() {
    let mut loader = Loader::live();
    let ids = loader.rig.register(&[
        defaults("p m:enter"),
        spec("p m:enter n=device->number:u64"),
        spec("p m:enter n=%si"),
        defaults("p m:enter if count > 5"),
    ]);
    for id in [ids[0], ids[1], ids[3]] {
        assert!(loader.rig.info(id).shown.arguments.is_empty());
    }
    let module = loader.load_typed("m", COMING);
    assert_eq!(loader.changed(Some(module)), []);
    let device = module.base.wrapping_add(0x1800);
    let number = device.wrapping_add(0x10);
    loader.rig.guest.write(number, &77_u64.to_le_bytes());
    assert_eq!(
        loader.hit(ids[0], device.0, 5),
        [
            argument("device", "struct device *", device.0),
            argument("count", "long", 5)
        ]
    );
    let info = loader.rig.info(ids[0]);
    assert_eq!(info.shown.registers, RegisterSet::from_iter([]));
    let counts = |loader: &Loader| [0, 1, 2, 3].map(|n: usize| loader.rig.counts(ids[n]).hits);
    assert_eq!(counts(&loader), [1, 1, 1, 0]);
    let arguments = |n: usize| loader.rig.info(ids[n]).shown.arguments.clone();
    let names = |n| {
        arguments(n)
            .into_iter()
            .map(|it| it.name)
            .collect::<Vec<_>>()
    };
    assert_eq!(
        [names(1), names(2), names(3)],
        [
            vec!["n".to_owned()],
            vec!["n".to_owned()],
            vec!["device".to_owned(), "count".to_owned()]
        ]
    );
    let mut cpu = Cpu::new(&loader.rig);
    cpu.regs.rsi = 6;
    assert_eq!(cpu.hit(module.base), RESUME);
    assert_eq!(counts(&loader), [2, 2, 2, 1]);
}

#[test]
fn arguments_that_the_module_does_not_have_are_refused_when_it_comes() {
    let mut loader = Loader::live();
    let ids = loader.rig.register(&specs([
        "p m:enter",
        "p m:enter device->nobody",
        "p m:work count",
    ]));
    let module = loader.load_typed("m", COMING);
    let refused = loader.changed(Some(module));
    let [(first, no_member), (second, no_function)] = &refused[..] else {
        panic!("{refused:?}");
    };
    assert_eq!([*first, *second], [ids[1], ids[2]]);
    let no_member = said(no_member, 18);
    assert!(
        no_member.contains("it is no member of struct device"),
        "{no_member}"
    );
    let no_function = said(no_function, 9);
    assert!(
        no_function.contains("do not contain a function `work`"),
        "{no_function}"
    );
    assert!(matches!(loader.rig.state(ids[1]), ProbeState::Refused(_)));
    assert_eq!(loader.rig.byte(module.base), INT3);
}

#[test]
fn what_no_module_would_mend_is_refused_while_it_is_not_loaded() {
    let mut loader = Loader::live();
    let mut refused = |spec: ProbeSpec, words: &str| {
        let result = loader.rig.changes_nothing(|rig| rig.try_register(&[spec]));
        let (_, why) = refusal(result);
        assert!(why.to_string().contains(words), "{why}");
    };
    refused(spec("p m:enter @no_such_symbol"), "no_such_symbol");
    refused(spec("p m:enter +0(%ip)"), "cannot be followed");
}

#[test]
fn what_histograms_count_is_resolved_when_the_module_comes() {
    let mut loader = Loader::live();
    let mut captures = defaults("p m:enter");
    captures.actions.capture = vec![Item::Stack(0)];
    let ids = loader.rig.register(&[
        captures,
        spec("p m:enter device->nobody"),
        spec("p m:enter"),
    ]);
    let infos = ids.clone().into_iter().map(|id| loader.rig.info(id));
    let [waits, wrong, needs_nothing] = infos.collect::<Vec<_>>().try_into().unwrap();
    let by = |keys: &str| read_histogram(keys).unwrap();
    assert_eq!(waits.resolved(), None);
    assert!(waits.aggregate(&by("keys=count")).is_err());
    assert_eq!(needs_nothing.resolved(), Some(needs_nothing));

    let module = loader.load_typed("m", COMING);
    let refused = loader.changed(Some(module));
    assert_eq!(refused.len(), 1, "{refused:?}");
    assert_eq!(wrong.resolved(), None, "it was refused");
    let resolved = waits.resolved().expect("its module has come");
    let now = loader.rig.info(ids[0]);
    assert_eq!(
        (&resolved.actions, &resolved.shown),
        (&now.actions, &now.shown)
    );
    assert!(resolved.aggregate(&by("keys=device:vals=count")).is_ok());
    let why = resolved.aggregate(&by("keys=cpu,size")).unwrap_err();
    assert_eq!(why.column, 9, "{why}");
    assert_eq!(resolved.actions.capture[0], Item::Stack(0));
}

#[test]
fn module_without_types_shows_registers_and_says_why() {
    let mut loader = Loader::live();
    let ids = loader
        .rig
        .register(&[defaults("p m:enter"), spec("p m:enter count")]);
    let module = loader.load("m", COMING);
    let refused = loader.changed(Some(module));
    assert_eq!(refused.len(), 1);
    assert_eq!(refused[0].0, ids[1]);
    let why = said(&refused[0].1, 10);
    assert!(
        why.contains("no type information that the kernel took"),
        "{why}"
    );
    let info = loader.rig.info(ids[0]);
    assert!(info.shown.arguments.is_empty());
    assert_eq!(info.actions.registers, RegisterSet::default());
    assert_eq!(loader.rig.byte(module.base), INT3);
}

#[test]
fn where_no_module_has_types_nobody_waits_for_them() {
    let mut loader = Loader::of_kernel(false);
    loader.rig.go_live(None);
    let rig = &mut loader.rig;
    let (_, why) = refusal(rig.changes_nothing(|rig| rig.try_register(&specs(["p m:enter dev"]))));
    let why = said(&why, 10);
    assert!(
        why.contains("this kernel keeps no types of modules"),
        "{why}"
    );
    let id = rig.register(&[defaults("p m:enter")])[0];
    let module = loader.load("m", COMING);
    assert_eq!(loader.changed(Some(module)), []);
    assert_eq!(
        loader.rig.info(id).actions.registers,
        RegisterSet::default()
    );
}
