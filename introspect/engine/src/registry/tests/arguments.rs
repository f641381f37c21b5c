//! Fetch arguments, from their definitions to their values at a hit.

mod filters;
mod syscalls;

use hvprobe_arch::regs::{Gpr, RegisterSet};
use hvprobe_fixtures::{DATA_VIRT, STACK};
use hvprobe_hit::event::{Event, EventKind};
use hvprobe_spec::shape::ShapeKind;
use hvprobe_spec::{Argument, Bits, Common, Item, Read, Source, TextHeader};

use super::*;

/// Address of the data that the tests' pointers lead to: in the first page of the stack.
const HERE: Gva = Gva(STACK.0 + 0x100);

/// Returns the value of an argument; `None` if it could not be read.
fn value(event: &Event, info: &ProbeInfo, argument: &Argument) -> Option<Vec<u8>> {
    let size = usize::try_from(argument.shape.size).unwrap();
    let mut bytes = match &argument.source {
        Source::Registers { registers, entry } => {
            let regs = match (&event.kind, entry) {
                (EventKind::Return(call), true) => &call.entry,
                _ => &event.regs,
            };
            let bytes = registers.iter().flat_map(|it| regs.get(*it).to_le_bytes());
            bytes.collect()
        }
        Source::Item(index) => return item(event, info, *index),
        Source::Constant(bytes) => return Some(bytes.clone()),
        Source::Common(Common::Comm) => {
            let comm = event.task.expect("a task runs").comm;
            return Some(comm.split(|byte| *byte == 0).next().unwrap().to_vec());
        }
        Source::Common(Common::Ip) => event.regs.rip.to_le_bytes().to_vec(),
        Source::Common(Common::Flags) => event.regs.rflags.to_le_bytes().to_vec(),
        Source::Common(Common::Retval) => event.regs.rax.to_le_bytes().to_vec(),
    };
    bytes.truncate(size);
    Some(bytes)
}

/// Returns the captured item at a position; for a text, its characters.
fn item(event: &Event, info: &ProbeInfo, wanted: usize) -> Option<Vec<u8>> {
    let mut rest = event.captured.bytes();
    let items = info
        .actions
        .capture
        .iter()
        .chain(&info.actions.capture_at_return);
    for (index, item) in items.enumerate() {
        let (len, head) = match item {
            Item::Fetched(fetched) if matches!(fetched.read, Read::Text(_)) => {
                let header = TextHeader::from_bytes(*rest.first_chunk().unwrap());
                (2 + usize::from(header.len), 2)
            }
            item => (item.len(), 0),
        };
        let (this, behind) = rest.split_at(len);
        if index == wanted {
            return (!event.captured.is_unreadable(index)).then(|| this[head..].to_vec());
        }
        rest = behind;
    }
    panic!("no item {wanted}");
}

/// Returns the name, the type and the value of each argument.
pub(super) fn values(event: &Event, info: &ProbeInfo) -> Vec<(String, String, Option<Vec<u8>>)> {
    let arguments = info.shown.arguments.iter();
    arguments
        .map(|it| {
            (
                it.name.clone(),
                it.shape.name.clone(),
                value(event, info, it),
            )
        })
        .collect()
}

/// Returns the values of one hit of `definition`, after `prepare` has set up the function's entry.
fn hit(
    definition: &str,
    prepare: impl FnOnce(&TestGuest, &mut Cpu),
) -> Vec<(String, Option<Vec<u8>>)> {
    let mut rig = Rig::live();
    let id = rig.one(definition);
    let mut cpu = Cpu::new(&rig);
    prepare(&rig.guest, &mut cpu);
    assert_eq!(cpu.hit(rig.addr(id)), RESUME);
    let events = cpu.events();
    let arguments = values(&events[0], &rig.info(id)).into_iter();
    arguments.map(|(name, _, value)| (name, value)).collect()
}

/// As [`hit`], for a definition with one argument: returns its value.
fn only(definition: &str, prepare: impl FnOnce(&TestGuest, &mut Cpu)) -> Option<Vec<u8>> {
    let [(_, value)] = <[_; 1]>::try_from(hit(definition, prepare)).expect("one");
    value
}

fn word(value: u64) -> Option<Vec<u8>> {
    Some(value.to_le_bytes().to_vec())
}

pub(super) fn defaults(definition: &str) -> ProbeSpec {
    ProbeSpec {
        default_arguments: true,
        ..spec(definition)
    }
}

/// Returns the column and the message with which a definition is refused.
fn refused(rig: &mut Rig, definition: &str) -> (usize, String) {
    let refused = rig.changes_nothing(|rig| refusal(rig.try_register(&[spec(definition)])));
    match refused {
        (0, Refused::Argument(error)) => (error.column, error.message),
        other => panic!("{definition}: {other:?}"),
    }
}

/// Asserts that `definition` is refused at `column`, with an error that begins with `words`.
fn check_refused(rig: &mut Rig, definition: &str, column: usize, words: &str) {
    let (at, message) = refused(rig, definition);
    assert_eq!(at, column, "{definition}: {message}");
    assert!(message.starts_with(words), "{definition}: {message}");
}

#[test]
fn a_function_shows_its_own_arguments_from_registers_and_records_no_others() {
    let mut rig = Rig::live();
    let id = rig.register(&[defaults("p vfs_read")])[0];
    let info = rig.info(id);
    assert!(info.shown.call);
    assert_eq!(info.shown.registers, RegisterSet::from_iter([]));
    let four = [Gpr::Rdi, Gpr::Rsi, Gpr::Rdx, Gpr::Rcx];
    assert_eq!(info.actions.registers, RegisterSet::from_iter(four));
    assert!(info.actions.capture.is_empty());
    let mut cpu = Cpu::new(&rig);
    cpu.regs.rdx = 832;
    assert_eq!(cpu.hit(rig.addr(id)), RESUME);
    let regs = cpu.regs;
    let events = cpu.events();
    let named = |name: &str, ty: &str, value| (name.to_owned(), ty.to_owned(), word(value));
    assert_eq!(
        values(&events[0], &info),
        [
            named("file", "struct file *", regs.rdi),
            named("buf", "char *", regs.rsi),
            named("count", "unsigned long", 832),
            named("pos", "long *", regs.rcx),
        ]
    );
}

#[test]
fn registers_stay_where_no_types_describe_a_function() {
    let mut rig = Rig::live();
    for definition in ["p filler_004", "p vfs_read+9", "r filler_004"] {
        let id = rig.register(&[defaults(definition)])[0];
        let info = rig.info(id);
        assert_eq!(info.shown, std::sync::Arc::default(), "{definition}");
        assert_eq!(info.actions.registers, RegisterSet::default());
    }
    // No arguments were requested.
    let id = rig.one("p vfs_read");
    assert!(rig.info(id).shown.arguments.is_empty());
}

#[test]
fn registers_that_were_chosen_are_shown_beside_the_arguments() {
    let mut rig = Rig::live();
    let mut wanted = defaults("p vfs_read");
    wanted.actions.registers = RegisterSet::from_iter([Gpr::Rbp]);
    let id = rig.register(&[wanted])[0];
    let info = rig.info(id);
    assert!(info.shown.call);
    assert_eq!(info.shown.registers, RegisterSet::from_iter([Gpr::Rbp]));
    let all = [Gpr::Rbp, Gpr::Rdi, Gpr::Rsi, Gpr::Rdx, Gpr::Rcx];
    assert_eq!(info.actions.registers, RegisterSet::from_iter(all));
}

#[test]
fn parameters_beyond_the_registers_are_read_from_the_stack() {
    let mut rig = Rig::live();
    let id = rig.register(&[defaults("p filler_000")])[0];
    let mut cpu = Cpu::new(&rig);
    for n in 0..8_u64 {
        let at = Gva(STACK.0 + n * 8);
        rig.guest.write(at, &(0x1000 + n).to_le_bytes());
    }
    cpu.regs.rsp = STACK.0;
    cpu.regs.rdi = 0xffff_ffff_ffff_ff9c;
    assert_eq!(cpu.hit(rig.addr(id)), RESUME);
    let events = cpu.events();
    let arguments = values(&events[0], &rig.info(id));
    assert_eq!(arguments.len(), 9);
    // The upper half of the register is not part of an int.
    assert_eq!(arguments[0].2, Some((-100_i32).to_le_bytes().to_vec()));
    assert_eq!((&*arguments[6].0, &arguments[6].1[..]), ("seventh", "int"));
    let seventh = arguments[6].2.as_deref().map(|bytes| bytes[..4].to_vec());
    assert_eq!(seventh, Some(0x1001_u32.to_le_bytes().to_vec()));
    let pair = [0x1002_u64.to_le_bytes(), 0x1003_u64.to_le_bytes()].concat();
    assert_eq!((&*arguments[7].0, &arguments[7].2), ("path", &Some(pair)));
    assert_eq!(
        (&*arguments[8].0, &arguments[8].2),
        ("eighth", &word(0x1004))
    );
}

#[test]
fn a_return_shows_the_arguments_of_the_entry_and_the_typed_result() {
    let mut rig = Rig::live();
    let ids = rig.register(&[defaults("r filler_000"), defaults("r filler_002")]);
    rig.guest.write(Gva(STACK.0 + 8), &7_u64.to_le_bytes());
    let info = rig.info(ids[0]);
    assert!(info.shown.call);
    let names: Vec<_> = info.shown.arguments.iter().map(|it| &*it.name).collect();
    assert_eq!(names[..2], ["a", "b"]);
    let result = info.shown.arguments.last().unwrap();
    assert_eq!(result.source, Source::Common(Common::Retval));
    assert_eq!(result.shape.kind, ShapeKind::Signed);
    let first = Source::Registers {
        registers: vec![Gpr::Rdi],
        entry: true,
    };
    assert_eq!(info.shown.arguments[0].source, first);
    // A parameter on the stack is read at the entry.
    assert_eq!(info.shown.arguments[6].source, Source::Item(0));
    assert_eq!(info.actions.capture[0], Item::Stack(1));
    // A function that returns nothing shows no result.
    let arguments = &rig.info(ids[1]).shown.arguments;
    let [kind] = arguments.as_slice() else {
        panic!("{arguments:?}");
    };
    assert!(matches!(kind.shape.kind, ShapeKind::Enum { .. }));
}

#[test]
fn a_result_beyond_one_register_is_whole() {
    let mut rig = Rig::live();
    let ids = rig.register(&[
        defaults("r filler_014"),
        spec("r filler_014 r=$retval first=$retval:x64"),
        defaults("r filler_016"),
        spec("r filler_016 $retval"),
    ]);
    let shown = |probe: usize, at: usize| {
        let argument = rig.info(ids[probe]).shown.arguments[at].clone();
        let size = argument.shape.size;
        (argument.shape.name, size, argument.source)
    };
    let both = Source::Registers {
        registers: vec![Gpr::Rax, Gpr::Rdx],
        entry: false,
    };
    let whole = || ("struct path".to_owned(), 16, both.clone());
    assert_eq!([shown(0, 1), shown(1, 0)], [whole(), whole()]);
    let recorded = rig.info(ids[0]).actions.registers;
    assert!(recorded.iter().any(|it| it == Gpr::Rdx), "{recorded:?}");
    // As the kernel shows it, from RAX.
    let rax = || ("x64".to_owned(), 8, Source::Common(Common::Retval));
    assert_eq!(shown(1, 1), rax());
    // Memory is read only if the definition asks for that.
    assert_eq!(shown(2, 1), rax());
    let read = ("struct dentry".to_owned(), 48, Source::Item(0));
    assert_eq!(shown(3, 0), read);
    assert_eq!(rig.info(ids[3]).actions.capture_at_return.len(), 1);
}

#[test]
fn registers_numbers_and_texts_of_the_definition_are_shown() {
    let pairs = hit(
        r#"p vfs_read+9 a=%si:u16 b=$stack c=$comm d=\5 e=\"five" f=%ip g=%flags h=%cs %ss:x8"#,
        |_, cpu| cpu.regs.rsi = 0x1_2345,
    );
    let text = |text: &str| Some(text.as_bytes().to_vec());
    let named = |name: &str, value| (name.to_owned(), value);
    let rsp = pairs[1].1.clone();
    assert_eq!(
        pairs,
        [
            named("a", Some(vec![0x45, 0x23])),
            named("b", rsp),
            named("c", text("worker")),
            named("d", word(5)),
            named("e", text("five")),
            named("f", word(0xffff_ffff_8100_0109)),
            named("g", pairs[6].1.clone()),
            named("h", word(0x10)),
            named("arg9", word(0x18)),
        ]
    );
}

#[test]
fn pointers_are_followed_at_the_hit() {
    let prepare = |guest: &TestGuest, cpu: &mut Cpu| {
        guest.write(HERE, &HERE.wrapping_add(0x40).0.to_le_bytes());
        guest.write(
            HERE.wrapping_add(0x48),
            &0x1122_3344_5566_7788_u64.to_le_bytes(),
        );
        cpu.regs.rdi = HERE.0 - 0x10;
        cpu.regs.rsp = STACK.0;
        guest.write(STACK.wrapping_add(16), &HERE.0.to_le_bytes());
    };
    let value = word(0x1122_3344_5566_7788);
    assert_eq!(only("p vfs_read +8(+16(%di))", prepare), value);
    assert_eq!(only("p vfs_read +8(+0($stack2))", prepare), value);
    assert_eq!(only("p vfs_read $stack2", prepare), word(HERE.0));
    assert_eq!(
        only("p vfs_read +8(+16(%di)):u16", prepare),
        Some(vec![0x88, 0x77])
    );
    assert_eq!(
        only("p vfs_read +8(+16(%di)):x8[3]", prepare),
        Some(vec![0x88, 0x77, 0x66])
    );
    let absolute = format!("p vfs_read @{:#x}", HERE.0 + 0x48);
    assert_eq!(only(&absolute, prepare), value);
}

#[test]
fn what_is_not_there_or_not_in_that_memory_is_a_fault() {
    let nothing = |_: &TestGuest, cpu: &mut Cpu| cpu.regs.rdi = 0xffff_c900_0000_0000;
    assert_eq!(only("p vfs_read +0(%di)", nothing), None);
    assert_eq!(only("p vfs_read +0(%di):string", nothing), None);
    assert_eq!(only("p vfs_read +0(+0(%di)):u8", nothing), None);
    let null = |_: &TestGuest, cpu: &mut Cpu| cpu.regs.rdi = 0;
    assert_eq!(only("p vfs_read +0(%di)", null), None);
    // Kernel memory is not user memory.
    let here = |guest: &TestGuest, cpu: &mut Cpu| {
        guest.write(HERE, b"text\0");
        cpu.regs.rdi = HERE.0;
    };
    assert_eq!(only("p vfs_read +u0(%di):u8", here), None);
    assert_eq!(only("p vfs_read +u0(%di):ustring", here), None);
    assert_eq!(
        only("p vfs_read +0(%di):string", here),
        Some(b"text".to_vec())
    );
}

#[test]
fn a_fault_leaves_the_values_behind_it_where_they_are() {
    let pairs = hit(
        "p vfs_read +0(%si):string +0(%di):string +0(%si):u32 +2(%di):u16",
        |guest, cpu| {
            guest.write(HERE, b"abcd\0");
            cpu.regs.rdi = HERE.0;
            cpu.regs.rsi = 8;
        },
    );
    let values: Vec<_> = pairs.into_iter().map(|(_, value)| value).collect();
    let text = Some(b"abcd".to_vec());
    assert_eq!(values, [None, text, None, Some(b"cd".to_vec())]);
}

#[test]
fn texts_share_what_an_event_has_left_and_say_where_they_were_cut() {
    let mut rig = Rig::live();
    let id = rig.one("p vfs_read +0(%di):string %si +0(%si):string +0(%si):x64");
    let long = [b'x'; 300];
    let mut cpu = Cpu::new(&rig);
    rig.guest.write(HERE, &long);
    cpu.regs.rdi = HERE.0;
    cpu.regs.rsi = HERE.0 + 0x200;
    rig.guest.write(Gva(cpu.regs.rsi), b"12345678\0");
    assert_eq!(cpu.hit(rig.addr(id)), RESUME);
    let events = cpu.events();
    // 8 bytes for the number, 2 for each header, and the rest in halves.
    let bytes = events[0].captured.bytes();
    let header = TextHeader::from_bytes(*bytes.first_chunk().unwrap());
    let half = TextHeader {
        len: 118,
        truncated: true,
    };
    assert_eq!(header, half);
    let arguments = values(&events[0], &rig.info(id));
    assert_eq!(arguments[0].2, Some(vec![b'x'; 118]));
    assert_eq!(arguments[2].2, Some(b"12345678".to_vec()));
    // A text that just fits is complete.
    rig.guest.write(HERE.wrapping_add(118), &[0]);
    let mut cpu = Cpu::new(&rig);
    (cpu.regs.rdi, cpu.regs.rsi) = (HERE.0, HERE.0);
    assert_eq!(cpu.hit(rig.addr(id)), RESUME);
    let events = cpu.events();
    let bytes = events[0].captured.bytes();
    let header = TextHeader::from_bytes(*bytes.first_chunk().unwrap());
    assert!(!header.truncated && header.len == 118);
}

#[test]
fn a_text_at_the_end_of_what_is_mapped_needs_nothing_behind_it() {
    let end = |guest: &TestGuest, cpu: &mut Cpu| {
        let mut at = DATA_VIRT;
        while guest.view().tables.read(&guest.mem, at, &mut [0]).is_ok() {
            at = at.wrapping_add(4096);
        }
        cpu.regs.rdi = at.0 - 4;
        guest.write(Gva(cpu.regs.rdi), b"end\0");
    };
    assert_eq!(
        only("p vfs_read +0(%di):string", end),
        Some(b"end".to_vec())
    );
    let open = |guest: &TestGuest, cpu: &mut Cpu| {
        end(guest, cpu);
        guest.write(Gva(cpu.regs.rdi), b"open");
    };
    assert_eq!(only("p vfs_read +0(%di):string", open), None);
}

#[test]
fn arguments_are_found_by_name_and_their_members_by_type() {
    let mut rig = Rig::live();
    let id = rig.one(
        "p vfs_read count file->f_mode busy=file->busy file->kind name=file->f_path.dentry->d_name.name:string \
         file->label buf:string $arg4 file:%pD file->f_path.dentry:%pd $current->pid (file)%di->f_mode:x32 \
         (file,f_path.dentry)+0($stack)->f_mode",
    );
    let info = rig.info(id);
    let mut cpu = Cpu::new(&rig);
    let (file, dentry, name) = (HERE, HERE.wrapping_add(0x100), HERE.wrapping_add(0x180));
    rig.guest.write(file, &[0x1d, 0x80, 0, 0, 0b1_0100]);
    rig.guest.write(file.wrapping_add(8), &3_u32.to_le_bytes());
    rig.guest.write(file.wrapping_add(16), b"labelled");
    rig.guest
        .write(file.wrapping_add(40), &dentry.0.to_le_bytes());
    rig.guest
        .write(dentry.wrapping_add(40), &name.0.to_le_bytes());
    rig.guest.write(name, b"passwd\0");
    cpu.regs.rdi = file.0;
    cpu.regs.rsi = name.0 + 4;
    (cpu.regs.rdx, cpu.regs.rcx) = (99, 7);
    cpu.regs.rsp = STACK.0;
    rig.guest
        .write(STACK, &file.wrapping_add(40).0.to_le_bytes());
    assert_eq!(cpu.hit(rig.addr(id)), RESUME);
    let events = cpu.events();
    let arguments = values(&events[0], &info);
    let names: Vec<_> = arguments.iter().map(|(name, ..)| name.as_str()).collect();
    let expected = [
        "count", "arg2", "busy", "arg4", "name", "arg6", "buf", "pos", "arg9", "arg10", "arg11",
        "arg12", "arg13",
    ];
    assert_eq!(names, expected);
    let bytes = |at: usize| arguments[at].2.clone().expect("readable");
    assert_eq!(arguments[0].2, word(99));
    assert_eq!(bytes(1), 0x801d_u32.to_le_bytes());
    let busy = &info.shown.arguments[2];
    assert_eq!(
        busy.bits,
        Some(Bits {
            offset: 2,
            width: 3
        })
    );
    assert_eq!(bytes(2)[0] >> 2 & 7, 5);
    assert!(matches!(
        info.shown.arguments[3].shape.kind,
        ShapeKind::Enum { .. }
    ));
    assert_eq!(bytes(3), 3_u32.to_le_bytes());
    assert_eq!(bytes(4), b"passwd");
    assert_eq!(bytes(5), b"labelled");
    assert_eq!(bytes(6), b"wd");
    assert_eq!(arguments[7].2, word(7));
    assert_eq!([bytes(8), bytes(9)], [b"passwd"; 2]);
    assert_eq!(bytes(10), 77_u32.to_le_bytes());
    assert_eq!(bytes(11), 0x801d_u32.to_le_bytes());
    // A structure is found from the address of its member.
    assert_eq!(bytes(12), 0x801d_u32.to_le_bytes());
}

#[test]
fn an_argument_by_number_leaves_its_name_to_those_that_ask_for_it() {
    let mut rig = Rig::live();
    let mut names = |definition: &str| {
        let id = rig.one(definition);
        let arguments = rig.info(id).shown.arguments.clone();
        arguments.into_iter().map(|it| it.name).collect::<Vec<_>>()
    };
    assert_eq!(names("p vfs_read $arg1 $arg3"), ["file", "count"]);
    assert_eq!(names("p vfs_read $arg1 file"), ["arg1", "file"]);
    assert_eq!(names("p vfs_read $arg1 $arg1"), ["file", "arg2"]);
    assert_eq!(
        names("p vfs_read $arg3 file=%di count=%si"),
        ["arg1", "file", "count"]
    );
}

#[test]
fn what_a_function_has_not_is_refused_at_its_column() {
    let mut rig = Rig::live();
    let mut check = |definition, column, words| check_refused(&mut rig, definition, column, words);
    let no_variable = "This variable is not found at this probe point";
    check("p vfs_read nosuch", 11, no_variable);
    check("p vfs_read a=nosuch", 13, no_variable);
    check("p vfs_read file->nosuch", 17, "This field is not found.");
    check(
        "p vfs_read count->x",
        18,
        "This is not a pointer to union/structure.",
    );
    check(
        "p filler_004 $arg*",
        13,
        "No BTF entry for this probe point",
    );
    check(
        "p filler_004 count",
        13,
        "No BTF entry for this probe point",
    );
    check(
        "p vfs_read count $arg*",
        17,
        "This argument name is already used",
    );
    // Arguments and return values that the types exclude.
    for definition in ["p vfs_read $arg5", "r vfs_read $arg5", "p vfs_read $arg16"] {
        check(definition, 11, no_variable);
    }
    check("p vfs_read a=+8($arg5):x32", 16, no_variable);
    let nothing = "This function returns 'void' type";
    check("r filler_002 $retval", 13, nothing);
    check("r filler_002 a=+8($retval):string", 18, nothing);
    check("p vfs_read @nosuch_symbol", 11, "unknown symbol");
    check(
        "p vfs_read file->f_path:u32 file->f_path.dentry.d_name",
        48,
        "This is not a pointer",
    );
    check(
        "p vfs_read (nosuch)%di->x",
        11,
        "the kernel has no structure",
    );
    let many = ["+0(%di):x64[31]"; 2].join(" ");
    let refused = refusal(rig.try_register(&[spec(&format!("p vfs_read {many}"))]));
    assert!(matches!(refused.1, Refused::Arguments(_)), "{refused:?}");
}

#[test]
fn where_no_types_describe_a_function_there_may_be_any_argument_and_a_result() {
    let mut rig = Rig::live();
    for definition in ["p filler_004 $arg9 $arg16", "r filler_004 $retval"] {
        rig.one(definition);
    }
}

#[test]
fn numbers_are_as_wide_as_their_own_types() {
    let mut rig = Rig::live();
    let shapes = |rig: &mut Rig, definition: &str| {
        let id = rig.one(definition);
        let shown = rig.info(id).shown.arguments.clone();
        let shapes = shown
            .iter()
            .map(|it| (it.shape.name.clone(), it.shape.size));
        shapes.collect::<Vec<_>>()
    };
    let found = shapes(
        &mut rig,
        "p vfs_read a=count:s b=count:d c=file:d d=file:x e=file->f_mode:d f=file->f_mode:s g=%di:u h=%di:d",
    );
    let expected = [
        ("s64", 8),
        ("s64", 8),
        ("s64", 8),
        ("x64", 8),
        ("u32", 4),
        ("s32", 4),
        ("u64", 8),
        ("s64", 8),
    ];
    assert_eq!(found, expected.map(|(name, size)| (name.to_owned(), size)));
}
