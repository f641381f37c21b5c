//! Guests that work against the probes in them: whatever they do to our patches, our hidden memory,
//! their tables and stacks, the host goes on, and probes can be taken out and machines be stopped. On
//! whatever KVM there is.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hvprobe_arch::Gva;
use hvprobe_introspect::probe::spec::Hold;
use hvprobe_tests::micro::host::{build, catch_mode, hangs_not, result, run, symbol, within_limit};
use hvprobe_tests::micro::recorder::{FULL, Record, records};
use hvprobe_tests::micro::{
    Asm, IDT_BASE, MicroKernel, OWN_BREAKPOINTS, PMD, UNEXPECTED_EXCEPTION, UNMAPPED, WINDOW,
};
use hvprobe_tests::rig::{Running, probe};
use hvprobe_vmm::CatchMode;
use hvprobe_vmm::machine::{
    EndReason, Ending, Event, Machine, MachineConfig, Mechanism, ProbeSpec, ProbeState, State,
};
use iced_x86::code_asm::{CodeAssembler, CodeLabel, byte_ptr, ptr, qword_ptr, registers::*};

/// Where things lie in the hidden region, which these guests know too well.
const STUBS: u64 = 0x1000;
const TRAMPOLINE: u64 = 0x1440;
const IDT_PAGE: u64 = 0x2000;
const SLOTS: u64 = 0x3000;
const SLOT: u64 = 32;

/// Where a guest that has found the hidden region maps it, to write to it.
const WRITABLE: u64 = WINDOW + (33 << 21);

/// The statuses guests end with.
const DONE: u8 = 42;

fn with(definition: &str, mechanism: Mechanism) -> ProbeSpec {
    ProbeSpec {
        mechanism: Some(mechanism),
        ..probe(definition)
    }
}

/// One probe of each kind: `emulated`, `boosted` in slot 0, `stepped` in slot 1.
fn one_each() -> Vec<ProbeSpec> {
    vec![
        with("p emulated+5", Mechanism::Emulated),
        with("p boosted+5", Mechanism::Boosted),
        with("p stepped+5", Mechanism::Stepped),
    ]
}

/// The functions that [`one_each`] probes.
struct Probed {
    emulated: CodeLabel,
    boosted: CodeLabel,
    stepped: CodeLabel,
}

impl Probed {
    fn new(kernel: &mut MicroKernel) -> Self {
        Self {
            emulated: kernel.label(),
            boosted: kernel.label(),
            stepped: kernel.label(),
        }
    }

    fn call(&self, a: &mut CodeAssembler) -> Asm<()> {
        a.call(self.emulated)?;
        a.call(self.boosted)?;
        a.call(self.stepped)
    }

    /// `push rbx`, which is emulated, and a multiplication, which is not.
    fn define(&self, kernel: &mut MicroKernel) -> Asm<()> {
        kernel.function("emulated", self.emulated)?;
        kernel.asm().push(rbx)?;
        kernel.asm().pop(rbx)?;
        kernel.asm().ret()?;
        for (name, label) in [("boosted", self.boosted), ("stepped", self.stepped)] {
            kernel.function(name, label)?;
            kernel.asm().imul_2(rax, rbx)?;
            kernel.asm().nop()?;
            kernel.asm().ret()?;
        }
        Ok(())
    }
}

fn done(a: &mut CodeAssembler) -> Asm<()> {
    a.mov(al, u32::from(DONE))?;
    a.ret()
}

/// `checkpoint` is where the guest waits for the host; its probe is the last.
fn checkpoint(kernel: &mut MicroKernel, label: CodeLabel) -> Asm<()> {
    kernel.function("checkpoint", label)?;
    kernel.asm().nop()?;
    kernel.asm().ret()
}

fn holding() -> ProbeSpec {
    let mut spec = probe("p checkpoint+5");
    spec.actions.hold = Some(Hold::Stop);
    spec
}

/// Waits until the guest has come to its checkpoint, or has ended.
fn at_checkpoint(machine: &Arc<Machine>) -> State {
    let machine = Arc::clone(machine);
    within_limit("the way to the checkpoint", move || {
        let mut status = machine.status();
        while !(matches!(status.state, State::Stopped(_)) || status.stopped_at.is_some()) {
            status = machine.wait_change(&status);
        }
        status.state
    })
}

/// Takes all probes out, one by one, and stops the machine.
fn dismantle(machine: &Arc<Machine>) -> Ending {
    let machine = Arc::clone(machine);
    hangs_not("taking probes out and stopping", move || {
        for probe in machine.probes() {
            // The machine may have ended.
            let _ = machine.unregister(&[probe.id]);
        }
        machine.stop()
    })
}

/// The guest has mapped the hidden region at [`WRITABLE`] after this. Changes RAX and RBX.
fn find_hidden(a: &mut CodeAssembler) -> Asm<()> {
    a.mov(rbx, PMD)?;
    a.mov(rax, qword_ptr(rbx))?;
    a.or(rax, 0x83)?;
    a.mov(qword_ptr(rbx + 33 * 8), rax)
}

/// Forgets what the processor knows of the tables. Changes RAX.
fn flush(a: &mut CodeAssembler) -> Asm<()> {
    a.mov(rax, cr3)?;
    a.mov(cr3, rax)
}

/// Boots, waits for the end the guest makes of itself, and checks that nobody else did.
fn ended(config: MachineConfig) -> (Arc<Machine>, Ending, Vec<Event>) {
    let (machine, ending, events) = run(config);
    if let EndReason::Crash(report) = &ending.reason {
        assert!(!report.contains("panicked"), "{report}");
    }
    // What has ended can still be told to.
    assert_eq!(dismantle(&machine), ending);
    (machine, ending, events)
}

fn is_done(ending: &Ending) -> bool {
    (&ending.reason, ending.guest_status) == (&EndReason::Reset, Some(DONE))
}

#[test]
fn text_that_the_guest_rewrites_is_left_to_it() {
    if catch_mode("rewritten text").is_none() {
        return;
    }
    let (_folder, mut config) = build(|kernel| {
        let (probed, here) = (Probed::new(kernel), kernel.label());
        let a = kernel.asm();
        probed.call(a)?;
        // Other instructions: `inc ebx; nop…`; `stepped` gets the int3 that is there already.
        for function in [probed.emulated, probed.boosted] {
            a.lea(rcx, ptr(function))?;
            a.mov(byte_ptr(rcx + 5), 0xf8)?;
        }
        a.lea(rcx, ptr(probed.stepped))?;
        a.mov(byte_ptr(rcx + 5), 0xcc)?;
        a.call(here)?;
        a.call(probed.stepped)?;
        done(a)?;
        probed.define(kernel)?;
        checkpoint(kernel, here)
    });
    config.probes = one_each();
    config.probes.push(holding());
    let running = Running::boot(config);
    let machine = running.machine.clone();
    assert_eq!(at_checkpoint(&machine), State::Paused);
    let probes = machine.probes();
    let states: Vec<_> = probes.iter().map(|probe| probe.state.clone()).collect();
    assert_eq!(
        states,
        [
            ProbeState::Gone,
            ProbeState::Gone,
            ProbeState::Placed,
            ProbeState::Placed
        ]
    );
    let enabled = machine
        .disable(&[probes[0].id])
        .and_then(|()| machine.enable(&[probes[0].id]));
    assert!(enabled.is_err(), "armed over what the guest wrote");
    let taken = machine.register(&[probe("p emulated+5")]);
    assert!(taken.is_err(), "{taken:?}");
    let ids: Vec<_> = probes.iter().map(|probe| probe.id).collect();
    machine
        .unregister(&ids[..3])
        .expect("they can be taken out");
    let byte = |name: &str| {
        let mut byte = [0];
        let at = Gva(symbol(&machine, name) + 5);
        machine.read_kernel(at, &mut byte).expect("text is mapped");
        byte[0]
    };
    assert_eq!(
        [byte("emulated"), byte("boosted"), byte("stepped")],
        [0xf8, 0xf8, 0x48]
    );
    machine.resume().expect("it goes on");
    let (ending, ..) = within_limit("the guest", || running.finish());
    assert!(is_done(&ending), "{ending:?}");
    assert_eq!(result(&machine, OWN_BREAKPOINTS), 0);
}

/// What a guest does to the entry that maps the hidden region.
#[derive(Clone, Copy, Debug)]
enum Entry {
    Cleared,
    /// Maps other memory, which is full of zeros.
    Redirected,
    /// Leads to a table that is none.
    Wild,
}

#[test]
fn a_guest_that_unmaps_the_slots_gets_the_faults_and_no_more() {
    let Some(mode) = catch_mode("unmapped slots") else {
        return;
    };
    for entry in [Entry::Cleared, Entry::Redirected, Entry::Wild] {
        for way in ["boosted", "stepped"] {
            let (_folder, mut config) = build(|kernel| {
                kernel.start_recording()?;
                let (probed, mut after) = (Probed::new(kernel), kernel.label());
                let a = kernel.asm();
                probed.call(a)?;
                a.mov(rbx, PMD)?;
                let value: u64 = match entry {
                    Entry::Cleared => 0,
                    Entry::Redirected => 24 << 20 | 0x83,
                    Entry::Wild => 0x000f_ffff_ffff_f003,
                };
                a.mov(rax, value)?;
                a.mov(qword_ptr(rbx), rax)?;
                flush(a)?;
                a.call(probed.emulated)?;
                a.lea(r15, ptr(after))?;
                a.mov(rbx, UNMAPPED)?;
                a.mov(rax, UNMAPPED)?;
                a.call(if way == "boosted" {
                    probed.boosted
                } else {
                    probed.stepped
                })?;
                a.set_label(&mut after)?;
                done(a)?;
                probed.define(kernel)?;
                kernel.record(&[6, 13, 14], true)
            });
            config.probes = one_each();
            let (machine, ending, _) = ended(config);
            let what = format!("{entry:?}, {way}, {mode:?}: {ending:?}");
            let counts: Vec<_> = machine.probes().iter().map(|p| p.counts.hits).collect();
            let hits = if way == "boosted" {
                [2, 2, 1]
            } else {
                [2, 1, 2]
            };
            assert_eq!(counts, hits, "{what}");
            match (way, &ending.reason) {
                // The fault is the guest's to handle.
                ("boosted", EndReason::Reset) => {
                    assert_eq!(ending.guest_status, Some(DONE), "{what}");
                    let seen: Vec<Record> = records(&machine);
                    assert!(seen.iter().any(|r| r.vector == 14), "{what} {seen:#x?}");
                }
                // So it is in the window, whose table has gone too.
                (_, EndReason::TripleFault(_) | EndReason::Crash(_) | EndReason::Reset) => {}
                _ => panic!("{what}"),
            }
        }
    }
}

#[test]
fn guests_whose_steps_never_end_can_be_stopped() {
    if catch_mode("endless steps").is_none() {
        return;
    }
    // `jmp .` instead of the copy.
    const FOREVER: u32 = 0xfeeb;
    for removed_first in [true, false] {
        let (_folder, mut config) = build(|kernel| {
            let probed = Probed::new(kernel);
            let a = kernel.asm();
            probed.call(a)?;
            find_hidden(a)?;
            a.mov(rbx, WRITABLE + SLOTS + SLOT)?;
            a.mov(iced_x86::code_asm::word_ptr(rbx), FOREVER)?;
            flush(a)?;
            a.call(probed.stepped)?;
            done(a)?;
            probed.define(kernel)
        });
        config.probes = one_each();
        let running = Running::boot(config);
        let machine = running.machine.clone();
        within_limit("the second hit", move || {
            let mut running = running;
            running.wait_for_events(4);
        });
        let since = Instant::now();
        if removed_first {
            let taken = Arc::clone(&machine);
            hangs_not("taking the probe out", move || {
                let ids: Vec<_> = taken.probes().iter().map(|probe| probe.id).collect();
                taken.unregister(&ids).expect("it can be taken out");
            });
        }
        let ending = hangs_not("stopping", move || machine.stop());
        assert!(since.elapsed() < Duration::from_secs(20), "{ending:?}");
        // Without the probe the guest goes on where the copy was.
        let went_on = is_done(&ending);
        assert!(went_on || ending.reason == EndReason::Stopped, "{ending:?}");
    }
}

/// What a guest writes over the hidden region.
type Vandal = (&'static str, fn(&mut CodeAssembler) -> Asm<()>);

/// Fills `count` words from `at` on with `value`. Changes RAX, RCX, RDI.
fn fill(a: &mut CodeAssembler, at: u64, count: u64, value: u64) -> Asm<()> {
    let mut again = a.create_label();
    a.mov(rdi, at)?;
    a.mov(rcx, count)?;
    a.mov(rax, value)?;
    a.set_label(&mut again)?;
    a.mov(qword_ptr(rdi), rax)?;
    a.add(rdi, 8)?;
    a.dec(rcx)?;
    a.jnz(again)
}

const VANDALS: &[Vandal] = &[
    ("slots of zeros", |a| fill(a, WRITABLE + SLOTS, 16, 0)),
    ("slots of ud2", |a| {
        fill(a, WRITABLE + SLOTS, 16, 0x0b0f_0b0f_0b0f_0b0f)
    }),
    ("slots of int3", |a| {
        fill(a, WRITABLE + SLOTS, 16, 0xcccc_cccc_cccc_cccc)
    }),
    ("slots of our port", |a| {
        fill(a, WRITABLE + SLOTS, 16, 0x90e6_90e6_90e6_90e6)
    }),
    // `push rax; jmp .-1`: until the stack has gone.
    ("slots that eat the stack", |a| {
        fill(a, WRITABLE + SLOTS, 16, 0x9090_9090_90fd_eb50)
    }),
    ("stubs of ud2", |a| {
        fill(a, WRITABLE + STUBS, 128, 0x0b0f_0b0f_0b0f_0b0f)
    }),
    ("stubs of nops and int3", |a| {
        fill(a, WRITABLE + STUBS, 128, 0xcc90_9090_cc90_9090)
    }),
    ("no window's table", |a| fill(a, WRITABLE + IDT_PAGE, 64, 0)),
    ("a wild table", |a| {
        fill(a, WRITABLE + IDT_PAGE, 64, 0xffff_8e00_0010_1234)
    }),
    ("no page table", |a| fill(a, WRITABLE, 16, 0)),
    ("a wild page table", |a| {
        fill(a, WRITABLE, 16, 0x000f_ffff_ffff_f003)
    }),
    ("a page table of itself", |a| {
        a.mov(rbx, PMD)?;
        a.mov(rax, qword_ptr(rbx))?;
        for page in 1..16 {
            a.mov(rdi, WRITABLE + page * 8)?;
            a.mov(qword_ptr(rdi), rax)?;
        }
        Ok(())
    }),
];

#[test]
fn guests_that_overwrite_the_hidden_region_harm_only_themselves() {
    let Some(mode) = catch_mode("vandals") else {
        return;
    };
    for (name, vandal) in VANDALS {
        for way in ["boosted", "stepped", "faulting"] {
            eprintln!("{name}, {way}");
            let (_folder, mut config) = build(|kernel| {
                kernel.start_recording()?;
                let (probed, mut after) = (Probed::new(kernel), kernel.label());
                let faulting = kernel.label();
                let a = kernel.asm();
                probed.call(a)?;
                find_hidden(a)?;
                vandal(a)?;
                flush(a)?;
                a.lea(r15, ptr(after))?;
                a.mov(rbx, UNMAPPED)?;
                a.mov(rax, UNMAPPED)?;
                a.call(match way {
                    "boosted" => probed.boosted,
                    "stepped" => probed.stepped,
                    _ => faulting,
                })?;
                a.set_label(&mut after)?;
                done(a)?;
                probed.define(kernel)?;
                kernel.function("faulting", faulting)?;
                kernel.asm().mov(rax, qword_ptr(rbx))?;
                kernel.asm().ret()?;
                kernel.record(&[0, 6, 13, 14], false)
            });
            config.probes = one_each();
            config.probes.push(with("p faulting+5", Mechanism::Stepped));
            let (_, ending, _) = ended(config);
            eprintln!("  {mode:?}: {}", first_line(&ending));
        }
    }
}

fn first_line(ending: &Ending) -> String {
    let text = format!("{} {:?}", ending.reason, ending.guest_status);
    text.lines().next().unwrap_or_default().to_owned()
}

#[test]
fn guests_that_jump_into_the_hidden_region_harm_only_themselves() {
    let Some(mode) = catch_mode("jumps") else {
        return;
    };
    for (name, offset) in [
        ("the page table", 0),
        ("a stub", STUBS + 14 * 4),
        ("behind the out of a stub", STUBS + 14 * 4 + 2),
        ("the middle of an out", STUBS + 14 * 4 + 1),
        ("the trampoline", TRAMPOLINE),
        ("the window's table", IDT_PAGE),
        ("a boosted slot", SLOTS),
        ("the middle of a boosted copy", SLOTS + 1),
        ("the jump of a boosted slot", SLOTS + 4),
        ("the end of a boosted slot", SLOTS + 31),
        ("a stepped slot", SLOTS + SLOT),
        ("the middle of a stepped copy", SLOTS + SLOT + 2),
        ("the int3 of a stepped slot", SLOTS + SLOT + 4),
        ("behind the int3 of a stepped slot", SLOTS + SLOT + 5),
        (
            "the middle of the int3s of a stepped slot",
            SLOTS + SLOT + 20,
        ),
        ("a slot that is free", SLOTS + 5 * SLOT),
        ("the last byte of the slots", SLOTS + 0xfff),
        ("a page that is not there", SLOTS + 0x1000),
        ("the end of the region", (2 << 20) - 1),
    ] {
        eprintln!("{name}");
        let (_folder, mut config) = build(|kernel| {
            kernel.start_recording()?;
            let (probed, mut after) = (Probed::new(kernel), kernel.label());
            let a = kernel.asm();
            probed.call(a)?;
            a.lea(r15, ptr(after))?;
            // Where the functions whose slots these are return to.
            a.push(r15)?;
            a.push(r15)?;
            a.mov(rax, WINDOW + offset)?;
            a.jmp(rax)?;
            a.set_label(&mut after)?;
            done(a)?;
            probed.define(kernel)?;
            kernel.record(&[0, 6, 13, 14], true)
        });
        config.probes = one_each();
        let (_, ending, _) = ended(config);
        eprintln!("  {mode:?}: {}", first_line(&ending));
        let wild = [DONE, UNEXPECTED_EXCEPTION, FULL]
            .map(Some)
            .contains(&ending.guest_status);
        assert!(
            wild || matches!(
                ending.reason,
                EndReason::TripleFault(_) | EndReason::Crash(_)
            ),
            "{name}: {ending:?}"
        );
    }
}

#[test]
fn hits_need_no_tables_of_the_guests() {
    let Some(mode) = catch_mode("bad tables") else {
        return;
    };
    let (_folder, mut config) = build(|kernel| {
        kernel.start_recording()?;
        let (probed, mut own, mut bad) = (Probed::new(kernel), kernel.label(), kernel.label());
        let a = kernel.asm();
        probed.call(a)?;
        a.lidt(ptr(bad))?;
        a.lgdt(ptr(bad))?;
        a.mov(r13, rsp)?;
        probed.call(a)?;
        a.lidt(ptr(own))?;
        done(a)?;
        a.set_label(&mut own)?;
        a.dw(&[0xfff])?;
        a.dq(&[IDT_BASE])?;
        a.set_label(&mut bad)?;
        a.dw(&[0xfff])?;
        a.dq(&[UNMAPPED])?;
        probed.define(kernel)
    });
    config.probes = one_each();
    let (_, ending, events) = ended(config);
    if mode == CatchMode::IdtGate {
        // No int3 arrives without a table.
        assert!(
            matches!(ending.reason, EndReason::TripleFault(_)),
            "{ending:?}"
        );
    } else {
        assert!(is_done(&ending), "{ending:?}");
        assert_eq!(events.len(), 6);
    }
}

#[test]
fn a_stepped_copy_that_faults_without_a_table_ends_the_guest_as_in_its_place() {
    if catch_mode("faults without a table").is_none() {
        return;
    }
    let (_folder, mut config) = build(|kernel| {
        let (faulting, mut bad) = (kernel.label(), kernel.label());
        let a = kernel.asm();
        a.mov(rbx, UNMAPPED)?;
        a.lidt(ptr(bad))?;
        a.call(faulting)?;
        done(a)?;
        a.set_label(&mut bad)?;
        a.dw(&[0xfff])?;
        a.dq(&[UNMAPPED])?;
        kernel.function("faulting", faulting)?;
        kernel.asm().mov(rax, qword_ptr(rbx))?;
        kernel.asm().ret()
    });
    config.probes = vec![with("p faulting+5", Mechanism::Stepped)];
    let (_, ending, _) = ended(config);
    assert!(
        matches!(ending.reason, EndReason::TripleFault(_)),
        "{ending:?}"
    );
}

#[test]
fn stacks_that_are_not_there_are_the_guests_own_trouble() {
    let Some(mode) = catch_mode("bad stacks") else {
        return;
    };
    for stack in [UNMAPPED, 0x8000_0000_0000_0000, 0] {
        for way in ["boosted", "stepped", "faulting", "emulated"] {
            let (_folder, mut config) = build(|kernel| {
                let (mut back, function) = (kernel.label(), kernel.label());
                let a = kernel.asm();
                a.mov(rbx, UNMAPPED)?;
                a.mov(r12, rsp)?;
                a.mov(rsp, stack)?;
                a.jmp(function)?;
                a.set_label(&mut back)?;
                a.mov(rsp, r12)?;
                done(a)?;
                kernel.function("probed", function)?;
                let a = kernel.asm();
                match way {
                    "emulated" => a.push(rbx)?,
                    "faulting" => a.mov(rax, qword_ptr(rbx))?,
                    _ => a.imul_2(rax, rbx)?,
                }
                a.jmp(back)
            });
            config.probes = vec![with(
                "p probed+5",
                match way {
                    "emulated" => Mechanism::Emulated,
                    "boosted" => Mechanism::Boosted,
                    _ => Mechanism::Stepped,
                },
            )];
            let (_, ending, _) = ended(config);
            let harmless = matches!(way, "boosted" | "stepped") && mode != CatchMode::IdtGate;
            if harmless {
                assert!(is_done(&ending), "{stack:#x}, {way}: {ending:?}");
            } else {
                assert!(
                    matches!(ending.reason, EndReason::TripleFault(_)),
                    "{stack:#x}, {way}: {ending:?}"
                );
            }
        }
    }
}

/// Copies the tables that map the kernel to 8 MiB into RAM, the one of 2 MiB pages last, and loads
/// them once `change` has been made to that. Changes all but R12 to R15.
fn other_tables(
    a: &mut CodeAssembler,
    change: impl FnOnce(&mut CodeAssembler) -> Asm<()>,
) -> Asm<()> {
    const VIRT: u64 = 0xffff_ffff_8100_0000;
    const PHYS: u64 = 0x100_0000;
    const AT: u64 = 0x80_0000;
    for (page, table) in [(0_u64, 0_u64), (1, 1), (2, 2)] {
        let mut again = a.create_label();
        a.mov(rsi, VIRT + table * 0x1000)?;
        a.mov(rdi, VIRT + AT + page * 0x1000)?;
        a.mov(ecx, 512)?;
        a.set_label(&mut again)?;
        a.mov(rax, qword_ptr(rsi))?;
        a.mov(qword_ptr(rdi), rax)?;
        a.add(rsi, 8)?;
        a.add(rdi, 8)?;
        a.dec(ecx)?;
        a.jnz(again)?;
    }
    a.mov(rdi, VIRT + AT)?;
    a.mov(rax, PHYS + AT + 0x1003)?;
    a.mov(qword_ptr(rdi + 511 * 8), rax)?;
    a.mov(rax, PHYS + AT + 0x2003)?;
    a.mov(qword_ptr(rdi + 0x1000 + 510 * 8), rax)?;
    a.add(rdi, 0x2000)?;
    change(a)?;
    a.mov(rax, PHYS + AT)?;
    a.mov(cr3, rax)
}

#[test]
fn hits_under_other_page_tables_go_by_what_the_kernel_maps() {
    let Some(mode) = catch_mode("other page tables") else {
        return;
    };
    for way in ["emulated", "boosted", "stepped"] {
        let (_folder, mut config) = build(|kernel| {
            kernel.start_recording()?;
            let (probed, mut after) = (Probed::new(kernel), kernel.label());
            let a = kernel.asm();
            probed.call(a)?;
            // The kernel, without the hidden region.
            other_tables(a, |a| a.mov(qword_ptr(rdi), 0))?;
            a.lea(r15, ptr(after))?;
            a.call(match way {
                "emulated" => probed.emulated,
                "boosted" => probed.boosted,
                _ => probed.stepped,
            })?;
            a.set_label(&mut after)?;
            done(a)?;
            probed.define(kernel)?;
            kernel.record(&[13, 14], true)
        });
        config.probes = one_each();
        let (machine, ending, events) = ended(config);
        match way {
            "emulated" => {
                assert!(is_done(&ending), "{ending:?}");
                assert_eq!(events.len(), 4);
            }
            "boosted" => {
                assert!(is_done(&ending), "{mode:?} {ending:?}");
                let seen = records(&machine);
                assert!(seen.iter().any(|r| r.rip == WINDOW + SLOTS), "{seen:#x?}");
            }
            _ => assert!(
                matches!(ending.reason, EndReason::TripleFault(_)),
                "{ending:?}"
            ),
        }
    }
}

#[test]
fn a_fault_on_a_stack_the_kernel_does_not_map_leaves_nobody_hanging() {
    if catch_mode("a stack of another page table").is_none() {
        return;
    }
    let (_folder, mut config) = build(|kernel| {
        let (probed, faulting) = (Probed::new(kernel), kernel.label());
        let a = kernel.asm();
        probed.call(a)?;
        other_tables(a, |a| {
            a.mov(rax, 0x83_u64 | 24 << 20)?;
            a.mov(qword_ptr(rdi + 40 * 8), rax)
        })?;
        a.mov(rsp, WINDOW + (41 << 21))?;
        a.mov(rbx, UNMAPPED)?;
        a.call(faulting)?;
        done(a)?;
        probed.define(kernel)?;
        kernel.function("faulting", faulting)?;
        kernel.asm().mov(rax, qword_ptr(rbx))?;
        kernel.asm().ret()
    });
    config.probes = one_each();
    config.probes.push(with("p faulting+5", Mechanism::Stepped));
    let (_, ending, _) = ended(config);
    eprintln!("{}", first_line(&ending));
}

#[test]
fn probes_come_and_go_while_the_guest_rewrites_the_text_around_them() {
    if catch_mode("self-modifying code").is_none() {
        return;
    }
    let (_folder, config) = build(|kernel| {
        let (probed, mut again) = (Probed::new(kernel), kernel.label());
        let a = kernel.asm();
        a.xor(r12d, r12d)?;
        a.set_label(&mut again)?;
        probed.call(a)?;
        // The entry nop and its neighbour, and now and then the probepoint itself.
        a.inc(r12d)?;
        for function in [probed.emulated, probed.boosted, probed.stepped] {
            let mut not_now = a.create_label();
            a.lea(rcx, ptr(function))?;
            a.mov(byte_ptr(rcx + 4), r12b)?;
            a.mov(byte_ptr(rcx + 9), 0x90)?;
            a.test(r12d, 0x1f)?;
            a.jnz(not_now)?;
            // A probepoint's first byte, over whatever is there.
            a.mov(al, byte_ptr(rcx + 5))?;
            a.mov(byte_ptr(rcx + 5), al)?;
            a.set_label(&mut not_now)?;
        }
        a.jmp(again)?;
        probed.define(kernel)
    });
    let running = Running::boot(config);
    running.wait_live();
    let machine = running.machine.clone();
    let busy = Arc::clone(&machine);
    hangs_not("a hundred changes", move || {
        for round in 0..100 {
            let registered = busy.register(&one_each());
            let Ok(ids) = registered else {
                // The text may have changed in between, or be none any more.
                continue;
            };
            if round % 3 == 0 {
                busy.disable(&ids).expect("probes can be disabled");
                // Not where the guest has just put the int3 back.
                let _ = busy.enable(&ids);
            }
            busy.unregister(&ids).expect("probes can be taken out");
        }
    });
    let ending = dismantle(&machine);
    assert!(
        matches!(
            ending.reason,
            EndReason::Stopped | EndReason::Reset | EndReason::TripleFault(_)
        ),
        "{ending:?}"
    );
}
