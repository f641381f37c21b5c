//! Boots a micro-kernel that calls one function a given number of times, with probes on the function. Serves to
//! count the instructions that this program executes for each hit, on any KVM.
//!
//! The function `probed` has a nop of five bytes at +0, `push rbx` at +5, `mov rax, [rip+x]` at +6,
//! `pop rbx` at +13 and `ret` at +14.
//!
//! ```text
//! cargo build --release --package hvprobe-tests --example micro_hits
//! valgrind --tool=callgrind --callgrind-out-file=/dev/null \
//!     --collect-atstart=no --toggle-collect='*vcpu::run::Vcpu::run*' \
//!     target/release/examples/micro_hits 1000 'p probed+5'
//! ```
//!
//! The number after `Collected :` is the number of instructions that the virtual CPU's thread executed from the
//! guest's start to its end, without the kernel's part. Measure it for a number of calls and for twice as many:
//! the difference, divided by the number of calls, is the cost of the hits of one call.

use anyhow::{Context as _, ensure};
use hvprobe_tests::micro::{MicroKernel, RESULTS};
use hvprobe_tests::rig::{Running, probe};
use iced_x86::code_asm::{qword_ptr, registers::*};

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let calls = arguments
        .next()
        .and_then(|number| number.parse::<u32>().ok())
        .filter(|number| *number > 0)
        .context("usage: micro_hits CALLS [DEFINITION]...")?;
    let definitions: Vec<_> = arguments.collect();

    let folder = tempfile::tempdir()?;
    let kernel = MicroKernel::assemble(|kernel| {
        let function = kernel.asm().create_label();
        let mut again = kernel.asm().create_label();
        let a = kernel.asm();
        a.mov(r12d, calls)?;
        a.set_label(&mut again)?;
        a.call(function)?;
        a.dec(r12d)?;
        a.jnz(again)?;
        a.mov(al, 42)?;
        a.ret()?;
        kernel.function("probed", function)?;
        let a = kernel.asm();
        a.push(rbx)?;
        a.mov(rax, qword_ptr(RESULTS))?;
        a.pop(rbx)?;
        a.ret()
    })?;
    let mut config = kernel
        .build(folder.path())
        .map_err(|error| anyhow::anyhow!("{error}"))?;
    config.probes = definitions.iter().map(|text| probe(text)).collect();
    let mut running = Running::boot(config);
    let machine = running.machine.clone();
    let (ending, _) = running.end();
    ensure!(ending.guest_status == Some(42), "{ending:?}");
    for probe in machine.probes() {
        let counts = probe.counts;
        println!(
            "{:?}: {} hits, {} missed, {} faults",
            probe.mechanism, counts.hits, counts.missed, counts.faults
        );
        ensure!(counts.hits == u64::from(calls), "hits were lost");
    }
    Ok(())
}
