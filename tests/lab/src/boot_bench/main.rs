//! `boot-bench`: hvprobe and QEMU boot the same guest, one after the other, and are compared.
//!
//! Runs inside a rig, started by `cargo lab bench`. Each round boots every VMM once, so that all VMMs are affected
//! alike when the machine is slow. The table shows medians.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Result, bail};
use clap::Parser;

mod boot;
mod smaps;
mod table;
mod trace;
mod vmm;

use boot::Boot;
use trace::FirstEntry;
use vmm::{Guest, Vmm};

/// Boot the same guest under hvprobe and QEMU, and print a table of times and memory
#[derive(Debug, Parser)]
struct Options {
    /// Number of boots of each VMM
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    runs: u32,
    /// Memory of the guest in MiB
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(64..=65536))]
    memory: u32,
    /// Folder with the guest's `kernel` and `initrd.cpio`
    #[arg(long, default_value = "/guest")]
    guest: PathBuf,
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("boot-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<()> {
    let guest = Guest {
        kernel: options.guest.join("kernel"),
        vmlinux: std::env::temp_dir().join("vmlinux"),
        initrd: options.guest.join("initrd.cpio"),
        memory: options.memory,
    };
    if !Path::new("/dev/kvm").exists() {
        bail!("there is no /dev/kvm");
    }
    let tracer = match FirstEntry::new() {
        Ok(tracer) => Some(tracer),
        Err(error) => {
            eprintln!("boot-bench: QEMU's first guest instruction cannot be seen: {error:#}");
            None
        }
    };
    let unpacked = Command::new("hvprobe")
        .arg("unpack")
        .args([&guest.kernel, &guest.vmlinux])
        .status()?;
    if !unpacked.success() {
        bail!("the kernel cannot be unpacked: {unpacked}");
    }
    let mut boots = Vec::new();
    for round in 1..=options.runs {
        for vmm in Vmm::ALL {
            let boot = Boot::measure(vmm, &guest, tracer.as_ref())?;
            eprintln!("{round}/{}  {vmm}: {boot}", options.runs);
            boots.push((vmm, boot));
        }
    }
    println!();
    println!(
        "stock kernel, 1 vCPU, {} MiB, {} boots each, medians",
        options.memory, options.runs
    );
    print!("{}", table::render(&boots));
    Ok(())
}
