//! Tests clients that decide at hits, with a micro-kernel, on any KVM.

use std::time::Duration;

use hvprobe_arch::Gva;
use hvprobe_arch::regs::Gpr;
use hvprobe_machine::{DecisionCounts, EndReason, Machine, ProbeSpec};
use hvprobe_spec::{Actions, Change, Decision, Hold, Then};
use hvprobe_tests::micro::{MicroKernel, RESULTS};
use hvprobe_tests::rig::probe;
use hvprobe_vm::host;
use iced_x86::code_asm::qword_ptr;
use iced_x86::code_asm::registers::*;

fn returning(value: u64) -> Decision {
    Decision {
        then: Then::Return(value),
        ..Decision::default()
    }
}

#[test]
fn clients_decide_while_the_machine_is_paused_changed_and_left() {
    match host::catch_mode() {
        Ok(Some(_)) => {}
        Ok(None) | Err(_) => {
            eprintln!("skipped: needs a KVM that lets int3 be caught");
            return;
        }
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut config = MicroKernel::assemble(|kernel| {
        let (function, other) = {
            let asm = kernel.asm();
            (asm.create_label(), asm.create_label())
        };
        let asm = kernel.asm();
        asm.mov(r12, RESULTS)?;
        for call in 0..4 {
            asm.mov(rbx, 5_u64)?;
            asm.call(function)?;
            asm.add(rax, rbx)?;
            asm.mov(qword_ptr(r12 + call * 8), rax)?;
        }
        asm.call(other)?;
        asm.xor(eax, eax)?;
        asm.ret()?;
        kernel.function("asked", function)?;
        kernel.asm().mov(eax, 1)?;
        kernel.asm().ret()?;
        kernel.function("other", other)?;
        kernel.asm().ret()
    })
    .expect("the code assembles")
    .build(folder.path())
    .expect("the micro-kernel can be written");
    config.paused = true;
    config.probes = vec![ProbeSpec {
        actions: Actions {
            hold: Some(Hold::Ask {
                deadline: Duration::from_secs(60),
                default: returning(70),
            }),
            ..Actions::default()
        },
        ..probe("p asked")
    }];

    let machine = Machine::boot(config).expect("it boots");
    let mut first = machine.decisions().attach(Vec::new());
    let mut second = machine.decisions().attach(Vec::new());
    machine.resume().expect("it runs");

    // A decision that changes a register.
    let question = first.blocking_next().expect("the first call");
    assert_eq!(question.event.regs.rbx, 5);
    let decision = Decision {
        changes: vec![Change::Register {
            register: Gpr::Rbx,
            value: 2,
        }],
        then: Then::Return(40),
    };
    first.answer(question.token, decision).expect("it is open");

    // A decision after the machine was paused and its text was changed.
    let question = second.blocking_next().expect("the second call");
    machine
        .pause()
        .expect("a vCPU that waits for us can be paused");
    let added = machine.register(&[probe("p other")]).expect("a probe");
    machine.resume().expect("it runs");
    second
        .answer(question.token, returning(50))
        .expect("it is still open");

    // No decision, because the client leaves.
    first.blocking_next().expect("the third call");
    drop(first);

    // No decision, because the probe is unregistered.
    let question = second.blocking_next().expect("the fourth call");
    let asking = question.event.probe;
    machine
        .unregister(&[asking])
        .expect("it can be unregistered");

    assert_eq!(second.blocking_next(), None, "the machine has ended");
    let late = second.answer(question.token, returning(9));
    assert!(late.is_err());
    let ending = machine.wait();
    assert_eq!(
        (ending.reason, ending.guest_status),
        (EndReason::Reset, Some(0))
    );
    let results = [0, 1, 2, 3].map(|call| {
        let mut raw = [0; 8];
        machine
            .read_kernel(Gva(RESULTS + call * 8), &mut raw)
            .expect("results are mapped");
        u64::from_le_bytes(raw)
    });
    assert_eq!(results, [42, 55, 75, 6]);
    let counts = DecisionCounts {
        answered: 2,
        expired: 0,
        unattended: 1,
    };
    assert_eq!(machine.decisions().counts(), counts);
    let probes = machine.probes();
    let other = probes
        .iter()
        .find(|info| info.id == added[0])
        .expect("listed");
    assert_eq!(other.counts.hits, 1);
}
