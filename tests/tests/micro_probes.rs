//! Tests probes on a micro-kernel, on any KVM. An instruction must have the same effect in place and displaced by a
//! probe, and int3s that are not ours must reach the guest.

use hvprobe_arch::Gva;
use hvprobe_machine::{EndReason, Event, Machine, MachineConfig, Mechanism, ProbeSpec};
use hvprobe_tests::micro::{LAST_BREAKPOINT, MicroKernel, OWN_BREAKPOINTS, RESULTS};
use hvprobe_tests::rig::{Running, probe};
use hvprobe_vm::{CatchMode, host};
use iced_x86::code_asm::{
    AsmRegister64, CodeAssembler, asm_traits::CodeAsmMov, ptr, qword_ptr, registers::*,
};

type Asm = Result<(), iced_x86::IcedError>;

/// Returns how int3s leave the guest on this host. Without a suitable KVM, prints that the test is skipped and
/// returns `None`.
fn kvm(test: &str) -> Option<CatchMode> {
    match host::check() {
        Ok(report) if report.catch_mode.is_some() => report.catch_mode,
        Ok(_) => {
            eprintln!("skipped: {test} needs a KVM that lets int3 be caught");
            None
        }
        Err(error) => {
            eprintln!("skipped: {test} needs KVM: {error}");
            None
        }
    }
}

fn build(body: impl FnOnce(&mut MicroKernel) -> Asm) -> (tempfile::TempDir, MachineConfig) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let config = MicroKernel::assemble(body)
        .expect("the code assembles")
        .build(folder.path())
        .expect("the micro-kernel can be written");
    (folder, config)
}

fn word(machine: &Machine, offset: u64) -> u64 {
    let mut raw = [0; 8];
    machine
        .read_kernel(Gva(RESULTS + offset), &mut raw)
        .expect("results are mapped");
    u64::from_le_bytes(raw)
}

/// Registers that are set before an instruction and compared after it. RAX is stored separately, and RSP points at
/// the stack.
const COMPARED: [AsmRegister64; 13] = [
    rbx, rcx, rdx, rsi, rdi, rbp, r8, r9, r10, r11, r12, r13, r14,
];
/// Number of words stored for each run of an instruction: [`COMPARED`], then RAX, RSP and RFLAGS.
const WORDS: u64 = COMPARED.len() as u64 + 3;

/// An instruction to compare: its name, whether it can be emulated or needs a copy, and its code. Code after the
/// instruction may store in R14 where execution continued.
type Sample = (&'static str, Mechanism, fn(&mut CodeAssembler) -> Asm);

const SAMPLES: &[Sample] = &[
    ("nop", Mechanism::Emulated, |a| a.nop()),
    ("push rbx", Mechanism::Emulated, |a| a.push(rbx)),
    ("push rsp", Mechanism::Emulated, |a| a.push(rsp)),
    ("pop rdx", Mechanism::Emulated, |a| {
        // The popped value is the address in R10, which differs between the two runs by design.
        a.pop(rdx)?;
        a.sub(rdx, r10)
    }),
    ("mov rcx, rbx", Mechanism::Emulated, |a| a.mov(rcx, rbx)),
    ("mov ecx, ebx", Mechanism::Emulated, |a| a.mov(ecx, ebx)),
    ("sub rsp, 0x28", Mechanism::Emulated, |a| a.sub(rsp, 0x28)),
    ("add rsp, 8", Mechanism::Emulated, |a| a.add(rsp, 8)),
    ("pushfq", Mechanism::Emulated, |a| a.pushfq()),
    ("lea rax, [rip+x]", Mechanism::Emulated, |a| {
        a.lea(rax, ptr(RESULTS + 0x100))
    }),
    ("mov rax, [rip+x]", Mechanism::Boosted, |a| {
        a.mov(rax, qword_ptr(RESULTS + 0xfe0))
    }),
    ("mov [rip+x], rbx", Mechanism::Boosted, |a| {
        a.mov(qword_ptr(RESULTS + 0xfe8), rbx)
    }),
    ("add rax, rbx", Mechanism::Emulated, |a| a.add(rax, rbx)),
    ("adc rcx, 5", Mechanism::Boosted, |a| a.adc(rcx, 5)),
    ("imul rdx, rbx", Mechanism::Boosted, |a| a.imul_2(rdx, rbx)),
    ("shl rbx, 7", Mechanism::Boosted, |a| a.shl(rbx, 7)),
    ("xchg rax, rbx", Mechanism::Boosted, |a| a.xchg(rax, rbx)),
    ("movzx ecx, bl", Mechanism::Boosted, |a| a.movzx(ecx, bl)),
    ("bswap rdx", Mechanism::Boosted, |a| a.bswap(rdx)),
    ("cmove rdi, rsi", Mechanism::Boosted, |a| a.cmove(rdi, rsi)),
    ("lock xadd [rip+x], rcx", Mechanism::Boosted, |a| {
        a.lock().xadd(qword_ptr(RESULTS + 0xfd8), rcx)
    }),
    ("mov [rsp-8], rbp", Mechanism::Boosted, |a| {
        a.mov(qword_ptr(rsp - 8), rbp)
    }),
    ("je, taken or not", Mechanism::Emulated, |a| {
        leads(a, |a, to| a.je(to))
    }),
    ("jne, taken or not", Mechanism::Emulated, |a| {
        leads(a, |a, to| a.jne(to))
    }),
    ("jc, taken or not", Mechanism::Emulated, |a| {
        leads(a, |a, to| a.jc(to))
    }),
    ("jmp", Mechanism::Emulated, |a| leads(a, |a, to| a.jmp(to))),
    ("call", Mechanism::Emulated, called),
    ("call r10", Mechanism::Emulated, called_indirectly),
    ("ret", Mechanism::Emulated, returned),
    ("jmp r10", Mechanism::Emulated, |a| {
        let mut to = a.create_label();
        a.jmp(r10)?;
        a.mov(r14d, 1)?;
        a.set_label(&mut to)?;
        a.nop()
    }),
];

/// Assembles `jump`, and after it code that stores 1 in R14 if the jump is not taken.
fn leads(
    a: &mut CodeAssembler,
    jump: fn(&mut CodeAssembler, iced_x86::code_asm::CodeLabel) -> Asm,
) -> Asm {
    let mut to = a.create_label();
    jump(a, to)?;
    a.mov(r14d, 1)?;
    a.set_label(&mut to)?;
    a.nop()
}

/// Assembles a call. Stores in R14 the distance from the code after the call to the return address that it pushed.
fn called(a: &mut CodeAssembler) -> Asm {
    let (mut callee, mut after) = (a.create_label(), a.create_label());
    a.call(callee)?;
    a.set_label(&mut after)?;
    a.nop()?;
    a.set_label(&mut callee)?;
    a.pop(r14)?;
    a.lea(r13, ptr(after))?;
    a.sub(r14, r13)?;
    a.mov(r13d, 0)
}

/// Assembles a call of the address in R10, and after it code that changes R14. The address is after that code, so
/// R14 changes only if the call goes wrong.
fn called_indirectly(a: &mut CodeAssembler) -> Asm {
    let mut after = a.create_label();
    a.call(r10)?;
    a.set_label(&mut after)?;
    a.mov(r14d, 1)?;
    a.nop()?;
    a.pop(r14)?;
    a.lea(r13, ptr(after))?;
    a.sub(r14, r13)?;
    a.mov(r13d, 0)
}

/// Assembles a return. The return address is after the code that stores 1 in R14, so R14 changes only if the return
/// goes wrong.
fn returned(a: &mut CodeAssembler) -> Asm {
    a.ret()?;
    a.mov(r14d, 1)?;
    a.nop()
}

/// Makes `main` run every sample twice, as `plain_N` and as `probed_N`, from the same state, and store the
/// resulting state.
fn sampled(kernel: &mut MicroKernel, first: usize, samples: &[Sample], flags: u64) -> Asm {
    let mut results = RESULTS;
    for (n, (_, _, instruction)) in samples.iter().enumerate() {
        for kind in ["plain", "probed"] {
            let mut landing = kernel.asm().create_label();
            let a = kernel.asm();
            a.mov(r15, rsp)?;
            for (value, register) in (1_u64..).zip(COMPARED) {
                CodeAsmMov::mov(a, register, value.wrapping_mul(0x9e37_79b9_7f4a_7c15))?;
            }
            // Sets the content of memory operands. Puts the address after the sample's code in R10 and on the
            // stack: indirect jumps and calls, and returns, go there.
            a.mov(rax, 0x1122_3344_5566_7788_u64)?;
            a.mov(qword_ptr(RESULTS + 0xfe0), rax)?;
            a.mov(qword_ptr(RESULTS + 0xfd8), rax)?;
            a.lea(r10, ptr(landing))?;
            a.push(r10)?;
            a.mov(rax, flags)?;
            a.push(rax)?;
            a.popfq()?;
            a.mov(rax, 0x0123_4567_89ab_cdef_u64)?;
            let function = kernel.asm().create_label();
            kernel.asm().jmp(function)?;
            kernel.function(&format!("{kind}_{}", first + n), function)?;
            instruction(kernel.asm())?;
            let a = kernel.asm();
            a.set_label(&mut landing)?;
            a.nop()?;
            a.mov(qword_ptr(results + 8 * (WORDS - 3)), rax)?;
            for (word, register) in (0_u64..).zip(COMPARED) {
                // R10 has an address that differs between the two runs by design.
                if register != r10 {
                    a.mov(qword_ptr(results + 8 * word), register)?;
                }
            }
            a.pushfq()?;
            a.pop(rax)?;
            a.mov(qword_ptr(results + 8 * (WORDS - 1)), rax)?;
            a.mov(rax, r15)?;
            a.sub(rax, rsp)?;
            a.mov(qword_ptr(results + 8 * (WORDS - 2)), rax)?;
            a.mov(rsp, r15)?;
            results += 8 * WORDS;
        }
    }
    kernel.asm().mov(al, 42)?;
    kernel.asm().ret()
}

/// Instructions that can only be emulated: they save or use an address or flags that would be wrong in a copy.
const NO_COPY: [&str; 6] = ["pushfq", "jmp", "jmp r10", "call", "call r10", "ret"];

fn same_in_place_and_displaced(flags: u64) {
    for way in [Mechanism::Emulated, Mechanism::Boosted, Mechanism::Stepped] {
        let can = |sample: &Sample| way == Mechanism::Emulated || !NO_COPY.contains(&sample.0);
        let samples: Vec<Sample> = SAMPLES.iter().copied().filter(can).collect();
        same_one_way(flags, way, &samples);
    }
}

fn same_one_way(flags: u64, way: Mechanism, samples: &[Sample]) {
    if kvm("in place = out of line").is_none() {
        return;
    }
    // Twelve samples at a time, so that the results of a run fit into the page of results.
    for (batch, samples) in samples.chunks(12).enumerate() {
        let first = batch * 12;
        let (_folder, mut config) = build(|kernel| sampled(kernel, first, samples, flags));
        config.probes = (0..samples.len())
            .map(|n| ProbeSpec {
                mechanism: Some(way),
                ..probe(&format!("p probed_{}+5", first + n))
            })
            .collect();
        let mut running = Running::boot(config);
        let machine = running.machine.clone();
        let (_, events, _) = running.finish();
        let ending = machine.wait();
        assert_eq!(
            (ending.reason, ending.guest_status),
            (EndReason::Reset, Some(42))
        );
        let probes = machine.probes();
        for (n, (name, mechanism, _)) in samples.iter().enumerate() {
            let at = 16 * n as u64 * WORDS;
            let left = |start: u64| -> Vec<u64> {
                (0..WORDS).map(|w| word(&machine, start + 8 * w)).collect()
            };
            assert_eq!(
                left(at),
                left(at + 8 * WORDS),
                "{name} with flags {flags:#x}"
            );
            assert_eq!(probes[n].mechanism, Some(way.max(*mechanism)), "{name}");
            assert_eq!(probes[n].counts.hits, 1, "{name}");
            let hits: Vec<&Event> = events.iter().filter(|e| e.probe == probes[n].id).collect();
            let [hit] = hits[..] else {
                panic!("{name}: {} events", hits.len())
            };
            assert_eq!(Some(Gva(hit.regs.rip)), probes[n].addr, "{name}");
            assert_eq!(hit.regs.rax, 0x0123_4567_89ab_cdef, "{name}");
            assert_eq!(hit.regs.rflags & 0xcd5, flags & 0xcd5, "{name}");
        }
    }
}

#[test]
fn displaced_instructions_do_the_same_as_in_place_with_flags_clear() {
    same_in_place_and_displaced(0x2);
}

#[test]
fn displaced_instructions_do_the_same_as_in_place_with_flags_set() {
    same_in_place_and_displaced(0x8d7);
}

#[test]
fn an_int3_of_the_guests_own_reaches_its_handler_unchanged() {
    let Some(mode) = kvm("foreign int3") else {
        return;
    };
    let (_folder, mut config) = build(|kernel| {
        let own = kernel.asm().create_label();
        let ours = kernel.asm().create_label();
        let a = kernel.asm();
        a.call(ours)?;
        a.call(own)?;
        a.call(ours)?;
        a.call(own)?;
        a.mov(al, 42)?;
        a.ret()?;
        for (name, label, breaks) in [("own", own, true), ("ours", ours, false)] {
            kernel.function(name, label)?;
            if breaks {
                kernel.asm().int3()?;
            }
            kernel.asm().push(rbx)?;
            kernel.asm().pop(rbx)?;
            kernel.asm().ret()?;
        }
        Ok(())
    });
    config.probes = vec![probe("p ours"), probe("p ours+5"), probe("p ours+6")];
    let mut running = Running::boot(config);
    let machine = running.machine.clone();
    let (_, events, _) = running.finish();
    let ending = machine.wait();
    assert_eq!(
        (ending.reason, ending.guest_status),
        (EndReason::Reset, Some(42)),
        "{mode:?}"
    );
    assert_eq!(word(&machine, OWN_BREAKPOINTS), 2, "{mode:?}");
    let own = machine
        .image()
        .symbols()
        .lookup("own")
        .expect("defined")
        .addr;
    assert_eq!(word(&machine, LAST_BREAKPOINT), own.0 + 6, "{mode:?}");
    assert_eq!(events.len(), 6);
}

/// Maximum number of attempts to get an undisturbed run.
const RUNS: usize = 10;

#[test]
fn int3s_of_the_guests_own_cost_no_ioctl_but_the_run() {
    let Some(mode) = kvm("own int3s") else { return };
    let other_ioctls = |int3s: u32, probes: &[&str]| {
        let (_folder, mut config) = build(|kernel| {
            let elsewhere = kernel.asm().create_label();
            let mut again = kernel.asm().create_label();
            let a = kernel.asm();
            a.call(elsewhere)?;
            a.mov(r12d, int3s)?;
            a.set_label(&mut again)?;
            a.int3()?;
            a.dec(r12d)?;
            a.jnz(again)?;
            a.mov(al, 42)?;
            a.ret()?;
            kernel.function("elsewhere", elsewhere)?;
            kernel.asm().ret()
        });
        config.probes = probes.iter().map(|text| probe(text)).collect();
        let mut running = Running::boot(config);
        let machine = running.machine.clone();
        let _ = running.finish();
        let ending = machine.wait();
        assert_eq!(ending.guest_status, Some(42), "{mode:?} {ending:?}");
        assert_eq!(word(&machine, OWN_BREAKPOINTS), u64::from(int3s));
        machine.ioctls()[0].other
    };
    for probes in [&[][..], &["p elsewhere"]] {
        let few = other_ioctls(2, probes);
        // Other events may cost ioctls as well, such as a stop on a busy host, which reads the clocks
        // repeatedly. The cost of an int3 is part of every run, so the least disturbed run counts.
        let mut many = Vec::new();
        while many.len() < RUNS && many.iter().all(|cost| *cost > few + 20) {
            many.push(other_ioctls(400, probes));
        }
        assert!(
            many.iter().any(|cost| *cost <= few + 20),
            "{mode:?} {probes:?}: {few} for 2, {many:?} for 400"
        );
    }
}

#[test]
fn a_guest_without_probes_keeps_its_text_and_its_int3s() {
    let Some(mode) = kvm("no probes") else { return };
    let (_folder, config) = build(|kernel| {
        kernel.asm().int3()?;
        kernel.asm().mov(al, 42)?;
        kernel.asm().ret()
    });
    let mut running = Running::boot(config);
    let machine = running.machine.clone();
    let _ = running.finish();
    let ending = machine.wait();
    assert_eq!(
        ending.guest_status,
        Some(42),
        "{mode:?} {:?}",
        ending.reason
    );
    assert_eq!(word(&machine, OWN_BREAKPOINTS), 1, "{mode:?}");
}

#[test]
fn a_triple_fault_is_reported_with_registers_and_code() {
    if kvm("triple fault").is_none() {
        return;
    }
    let (_folder, config) = build(|kernel| {
        let a = kernel.asm();
        a.mov(rbx, 0x1234_5678_u64)?;
        a.xor(eax, eax)?;
        a.push(rax)?;
        a.push(rax)?;
        a.lidt(ptr(rsp))?;
        a.ud2()?;
        a.ret()
    });
    let (ending, _, _) = Running::boot(config).finish();
    let Some(EndReason::TripleFault(report)) = &ending.reason else {
        panic!("{ending:?}");
    };
    // kvm_amd loses the registers, and the report says so.
    let shown = report.contains("0000000012345678") && report.contains("code");
    assert!(shown || report.contains("registers are lost"), "{report}");
    assert!(report.contains("entered last at "), "{report}");
}
