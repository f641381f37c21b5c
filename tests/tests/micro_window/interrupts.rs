//! Tests interrupts and NMIs around a stepped copy, and after an emulated `sti`.

use hvprobe_hit::event::EventKind;
use hvprobe_machine::Mechanism;
use hvprobe_tests::micro::host::{build, catch_mode, symbol};
use hvprobe_tests::micro::recorder::{RECORDS, Record, records};
use hvprobe_tests::micro::{APIC, Asm, IDT_BASE, MicroKernel, WINDOW};
use hvprobe_vm::host::{self, Verdict};
use iced_x86::code_asm::registers::*;
use iced_x86::code_asm::{CodeAssembler, dword_ptr, qword_ptr};

use super::*;

/// Returns whether the record shows an address of code of ours, which a guest must never see.
fn is_hidden(record: &Record) -> bool {
    (WINDOW..WINDOW + (16 << 20)).contains(&record.rip)
}

/// Interrupt command register: writing EAX to it sends this processor an interrupt or NMI (SDM vol. 3, 11.6.1).
const ICR: i32 = 0x300;

const SELF_INTERRUPT: u32 = 1 << 18 | 1 << 14 | 0x40;

/// NMI to the processor with id 0, which is the destination in the upper half of the register after a reset.
const SELF_NMI: u32 = 1 << 14 | 4 << 8;

/// Causes an exit: hosts that emulate the guest check for interrupts only then.
fn exit(a: &mut CodeAssembler) -> Asm<()> {
    a.out(0x80, al)?;
    a.nop()
}

/// Makes `main` send `command` to its own processor twice: by the instruction at `plain+5`, in place, and by the
/// one at `probed+5`, displaced.
fn sends(kernel: &mut MicroKernel, command: u32, flags: u64) -> Asm<()> {
    kernel.start_recording()?;
    let (plain, function) = (kernel.label(), kernel.label());
    for function in [plain, function] {
        let a = kernel.asm();
        a.mov(rbx, APIC)?;
        a.mov(eax, command)?;
        a.push(i32::try_from(flags).expect("few bits"))?;
        a.popfq()?;
        a.call(function)?;
        exit(a)?;
        a.cli()?;
    }
    kernel.asm().mov(al, 42)?;
    kernel.asm().ret()?;
    probed(kernel, function, |a| a.mov(dword_ptr(rbx + ICR), eax))?;
    kernel.function("plain", plain)?;
    let a = kernel.asm();
    a.mov(dword_ptr(rbx + ICR), eax)?;
    a.ret()?;
    kernel.record(&[2, 0x40], true)
}

#[test]
fn what_a_stepped_copy_sends_its_own_processor_comes_right_after_it() {
    if catch_mode("interrupts").is_none() {
        return;
    }
    for (command, flags) in [
        (SELF_INTERRUPT, 0x2 | IF),
        (SELF_NMI, 0x2 | IF),
        (SELF_NMI, 0x2),
    ] {
        let (_folder, mut config) = build(|kernel| sends(kernel, command, flags));
        config.probes = vec![stepped("p probed+5")];
        let (machine, events) = finished(config);
        let records = records(&machine);
        let [plain, displaced] = records[..] else {
            panic!("{command:#x}: {records:#x?}")
        };
        let offset = |record: &Record, name| record.rip.wrapping_sub(symbol(&machine, name));
        assert!(!is_hidden(&displaced), "{displaced:#x?}");
        assert_eq!(displaced.idt, IDT_BASE);
        assert_eq!(displaced.rflags & IF, flags & IF);
        // The interrupt is compared only if it came right after the instruction in place. Hosts that emulate the
        // guest may deliver it later.
        if offset(&plain, "plain") == 11 {
            assert_eq!(offset(&displaced, "probed"), 11, "{records:#x?}");
            let same = Record {
                rip: plain.rip,
                ..displaced
            };
            assert_eq!(plain, same, "{command:#x}: {records:#x?}");
        }
        assert_eq!(kinds(&events), [EventKind::Hit, EventKind::Post]);
        assert_eq!(events[1].regs.rip, symbol(&machine, "probed") + 11);
        assert_eq!(events[1].regs.rflags & IF, flags & IF);
        assert_eq!(machine.probes()[0].counts.faults, 0);
    }
}

#[test]
fn interrupts_of_a_timer_never_show_a_stepped_copy() {
    if catch_mode("timer").is_none() {
        return;
    }
    /// Number of interrupts after which the guest ends.
    const ENOUGH: u8 = 3;
    /// Number of hits after which the guest ends if the timer never fires.
    const MOST: u32 = 20_000;
    let (_folder, mut config) = build(|kernel| {
        kernel.start_recording()?;
        let (function, mut again) = (kernel.label(), kernel.label());
        let mut over = kernel.label();
        let a = kernel.asm();
        // Starts the timer: periodic, vector 0x40, 1/16 of the bus frequency (SDM vol. 3, 11.5.4).
        a.mov(rbx, APIC)?;
        a.mov(dword_ptr(rbx + 0x3e0), 3)?;
        a.mov(dword_ptr(rbx + 0x320), 1 << 17 | 0x40)?;
        a.mov(dword_ptr(rbx + 0x380), 200_000)?;
        a.mov(r12d, MOST)?;
        a.mov(r13, RECORDS)?;
        a.set_label(&mut again)?;
        a.sti()?;
        a.call(function)?;
        a.cmp(qword_ptr(r13), i32::from(ENOUGH))?;
        a.jae(over)?;
        a.dec(r12d)?;
        a.jnz(again)?;
        a.set_label(&mut over)?;
        a.cli()?;
        a.mov(al, 42)?;
        a.ret()?;
        probed(kernel, function, |a| a.imul_2(rax, rbx))?;
        kernel.record(&[0x40], true)
    });
    config.probes = vec![stepped("p probed+5")];
    let (machine, events) = finished(config);
    let records = records(&machine);
    let fired = records.len();
    assert!(
        fired >= usize::from(ENOUGH),
        "the timer fired {fired} times"
    );
    for record in &records {
        assert!(!is_hidden(record) && record.idt == IDT_BASE, "{record:#x?}");
    }
    let counts = machine.probes()[0].counts;
    // The guest counts its calls down from `MOST` in R12.
    let left = events.last().expect("a hit").regs.r12;
    let calls = u64::from(MOST) - left + 1;
    assert_eq!((counts.hits, counts.missed), (calls, 0));
    assert_eq!(events.len() as u64, 2 * calls);
    assert!(events.iter().all(|event| event.regs.rflags & IF != 0));
}

#[test]
fn an_emulated_sti_holds_interrupts_off_for_one_instruction() {
    if catch_mode("sti").is_none() {
        return;
    }
    let report = host::check().expect("it has just run");
    let holds_off = report
        .items
        .iter()
        .any(|item| item.what == "interrupts held off after sti" && item.verdict == Verdict::Good);
    // First without and then with a probe on the instruction after `sti`.
    for more in [&[][..], &["p probed+6"]] {
        let (_folder, mut config) = build(|kernel| {
            kernel.start_recording()?;
            let (plain, function) = (kernel.label(), kernel.label());
            for function in [plain, function] {
                let a = kernel.asm();
                a.cli()?;
                a.mov(rbx, APIC)?;
                a.mov(dword_ptr(rbx + ICR), SELF_INTERRUPT)?;
                a.call(function)?;
                exit(a)?;
                a.cli()?;
            }
            kernel.asm().mov(al, 42)?;
            kernel.asm().ret()?;
            for (name, label) in [("plain", plain), ("probed", function)] {
                kernel.function(name, label)?;
                let a = kernel.asm();
                a.sti()?;
                a.imul_2(rax, rbx)?;
                a.nop()?;
                a.nop()?;
                a.ret()?;
            }
            kernel.record(&[0x40], true)
        });
        config.probes = vec![with_faults("p probed+5", Mechanism::Emulated)];
        config.probes.extend(more.iter().map(|text| stepped(text)));
        let (machine, _) = finished(config);
        let records = records(&machine);
        let [plain, displaced] = records[..] else {
            panic!("{records:#x?}")
        };
        // The interrupt comes after `sti` and the next instruction, or later on hosts that emulate the guest.
        let [plain, displaced] = [(plain, "plain"), (displaced, "probed")]
            .map(|(record, name)| record.rip.wrapping_sub(symbol(&machine, name)));
        if plain == 10 && holds_off {
            assert_eq!(displaced, 10, "{more:?} {records:#x?}");
        }
        assert!(displaced >= 6, "{more:?} {records:#x?}");
    }
}
