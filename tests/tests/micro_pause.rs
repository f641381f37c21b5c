//! Tests that kvmclock notifies a guest that it was stopped for long. Uses a micro-kernel, on any KVM.

use std::time::Duration;

use hvprobe_machine::{EndReason, Machine, ProbeSpec, State};
use hvprobe_spec::{Actions, Decision, Hold};
use hvprobe_tests::micro::{MicroKernel, RESULTS};
use hvprobe_tests::rig::probe;
use hvprobe_vm::host;
use iced_x86::code_asm::byte_ptr;
use iced_x86::code_asm::registers::*;

/// `MSR_KVM_SYSTEM_TIME_NEW` (Documentation/virt/kvm/x86/msr.rst in the kernel).
const SYSTEM_TIME: u32 = 0x4b56_4d01;
/// Offset of the flags in the `struct pvclock_vcpu_time_info` that KVM writes to the address in that MSR.
const FLAGS: u64 = 29;
/// Flag for a guest that was stopped (`PVCLOCK_GUEST_STOPPED`).
const STOPPED: u32 = 1 << 1;
/// Offset from the kernel's physical to its virtual addresses.
const VIRT_TO_PHYS: u64 = 0xffff_ffff_8000_0000;

/// Holds the guest at a hit for `stood`. Returns the flag that the guest reads afterwards, or `None` without a
/// suitable KVM.
fn flags_after(hold: Hold, stood: Duration) -> Option<u8> {
    match host::catch_mode() {
        Ok(Some(_)) => {}
        Ok(None) | Err(_) => {
            eprintln!("skipped: needs a KVM that lets int3 be caught");
            return None;
        }
    }
    let asks = matches!(hold, Hold::Ask { .. });
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut config = MicroKernel::assemble(|kernel| {
        let spot = kernel.asm().create_label();
        let asm = kernel.asm();
        let clock = RESULTS - VIRT_TO_PHYS;
        asm.mov(ecx, SYSTEM_TIME)?;
        asm.mov(rax, clock | 1)?;
        asm.xor(edx, edx)?;
        asm.wrmsr()?;
        asm.call(spot)?;
        asm.mov(rbx, RESULTS + FLAGS)?;
        asm.mov(al, byte_ptr(rbx))?;
        asm.and(eax, STOPPED)?;
        asm.ret()?;
        kernel.function("spot", spot)?;
        kernel.asm().ret()
    })
    .expect("the code assembles")
    .build(folder.path())
    .expect("the micro-kernel can be written");
    config.paused = true;
    config.probes = vec![ProbeSpec {
        actions: Actions {
            hold: Some(hold),
            ..Actions::default()
        },
        ..probe("p spot")
    }];
    let machine = Machine::boot(config).expect("it boots");
    let mut client = machine.decisions().attach(Vec::new());
    machine.resume().expect("it runs");
    if asks {
        let question = client.blocking_next().expect("the call");
        std::thread::sleep(stood);
        client
            .answer(question.token, Decision::default())
            .expect("it is open");
    } else {
        let mut status = machine.status();
        while status.stopped_at.is_none() {
            assert!(!matches!(status.state, State::Stopped(_)), "{status:?}");
            status = machine.wait_change(&status);
        }
        std::thread::sleep(stood);
        machine.resume().expect("it stands");
    }
    let ending = machine.wait();
    assert_eq!(ending.reason, EndReason::Reset);
    ending.guest_status
}

#[test]
fn a_guest_that_stood_still_for_long_is_notified() {
    for hold in [
        Hold::Stop,
        Hold::Ask {
            deadline: Duration::from_secs(60),
            default: Decision::default(),
        },
    ] {
        let what = format!("{hold:?}");
        if let Some(flags) = flags_after(hold, Duration::from_millis(900)) {
            assert_eq!(u32::from(flags), STOPPED, "{what}");
        }
    }
}
