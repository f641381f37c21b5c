//! Tests stops of virtual CPUs that have just accessed a device, with a micro-kernel, on any KVM. KVM completes
//! such an instruction only when the virtual CPU runs again, but a stop must find it completed.

use std::path::Path;
use std::time::{Duration, Instant};

use hvprobe_arch::Gva;
use hvprobe_machine::{Machine, MachineConfig, Mechanism, State};
use hvprobe_tests::micro::MicroKernel;
use hvprobe_tests::rig::probe;
use hvprobe_vm::host;
use iced_x86::IcedError;
use iced_x86::code_asm::registers::*;

/// Maximum time for the guest to make progress.
const PATIENCE: Duration = Duration::from_secs(60);
/// Port of the console's output.
const CONSOLE: u32 = 0x3f8;
/// A port without a device.
const NOBODY: i32 = 0x10;

/// Returns the configuration of a machine whose kernel runs the code that `body` assembles, or `None` without a
/// suitable KVM.
fn build(
    folder: &Path,
    body: impl FnOnce(&mut MicroKernel) -> Result<(), IcedError>,
) -> Option<MachineConfig> {
    match host::catch_mode() {
        Ok(Some(_)) => {}
        Ok(None) | Err(_) => {
            eprintln!("skipped: needs a KVM that lets int3 be caught");
            return None;
        }
    }
    let kernel = MicroKernel::assemble(body).expect("the code assembles");
    Some(kernel.build(folder).expect("it can be written"))
}

#[test]
fn a_virtual_cpu_that_stands_has_gone_on_behind_what_it_has_written_to_a_port() {
    const STOPS: usize = 200;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let config = build(folder.path(), |kernel| {
        let mut again = kernel.asm().create_label();
        let spot = kernel.asm().create_label();
        let a = kernel.asm();
        a.mov(edx, CONSOLE)?;
        a.xor(eax, eax)?;
        a.set_label(&mut again)?;
        a.inc(eax)?;
        a.call(spot)?;
        a.jmp(again)?;
        kernel.function("spot", spot)?;
        kernel.asm().out(dx, al)?;
        kernel.asm().ret()
    });
    let Some(config) = config else { return };
    let machine = Machine::boot(config).expect("it boots");
    let _ = machine.wait_live();
    let spot = machine.image().symbols().lookup("spot").expect("defined");
    let out = spot.addr.wrapping_add(5);
    let (mut before, mut behind) = (0, 0);
    let mut last = None;
    for _ in 0..STOPS {
        let since = Instant::now();
        while machine.console_kept().last().copied() == last {
            assert!(since.elapsed() < PATIENCE, "the guest prints nothing");
            std::thread::yield_now();
        }
        machine.pause().expect("it stops");
        let standings = machine.standings().expect("it stands");
        let [standing] = standings[..] else {
            panic!("{standings:?}");
        };
        let printed = machine.console_kept().last().copied();
        let [value, ..] = standing.regs.rax.to_le_bytes();
        if standing.rip() == out {
            before += 1;
            assert_ne!(printed, Some(value), "{standing:x?}");
        } else if standing.rip() == out.wrapping_add(1) {
            behind += 1;
            assert_eq!(printed, Some(value), "{standing:x?}");
        }
        last = printed;
        machine.resume().expect("it goes on");
    }
    println!("stood before the access {before} times, and behind it {behind} times");
    assert!(behind > 0, "{before} of {STOPS} before");
    let _ = machine.stop();
}

#[test]
fn no_jump_is_planted_over_where_a_read_of_a_port_goes_on() {
    const ROUNDS: usize = 60;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let config = build(folder.path(), |kernel| {
        let mut again = kernel.asm().create_label();
        let spot = kernel.asm().create_label();
        let a = kernel.asm();
        a.xor(eax, eax)?;
        a.set_label(&mut again)?;
        a.call(spot)?;
        a.jmp(again)?;
        kernel.function("spot", spot)?;
        // A jump here also covers the next instruction, which begins at a byte of the jump that cannot be an int3.
        let a = kernel.asm();
        a.in_(ax, NOBODY)?;
        a.xor(ebx, ebx)?;
        a.ret()
    });
    let Some(config) = config else { return };
    let config = MachineConfig {
        optimize: true,
        ..config
    };
    let machine = Machine::boot(config).expect("it boots");
    let _ = machine.wait_live();
    let mut jumps = 0;
    for round in 0..ROUNDS {
        let registered = machine.register(&[probe("p spot+5")]);
        let ids = registered.unwrap_or_else(|error| panic!("round {round}: {error:?}"));
        let probes = machine.probes();
        jumps += usize::from(probes[0].mechanism == Some(Mechanism::Optimized));
        machine.unregister(&ids).expect("it leaves");
        let mut byte = [0];
        let spot = machine.image().symbols().lookup("spot").expect("defined");
        let read = machine.read_kernel(Gva(spot.addr.0 + 5), &mut byte);
        assert_eq!((read.is_ok(), byte), (true, [0x66]), "round {round}");
    }
    println!("{jumps} of {ROUNDS} were jumps");
    let status = machine.status();
    assert!(!matches!(status.state, State::Stopped(_)), "{status:?}");
    let _ = machine.stop();
}
