//! Prints how much of a kernel's text the instruction policy covers.

use std::path::PathBuf;
use std::process::ExitCode;

use hvprobe_tests::differential::coverage::Coverage;
use hvprobe_tests::differential::text::{Text, stock_kernel};

fn main() -> ExitCode {
    let named = std::env::args_os().nth(1).map(PathBuf::from);
    let Some(path) = named.or_else(stock_kernel) else {
        eprintln!("coverage: give the path of a kernel: a vmlinux or bzImage");
        return ExitCode::from(2);
    };
    match Text::open(&path) {
        Ok(kernel) => {
            print!("{}", Coverage::of(&kernel));
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("coverage: {}: {error}", path.display());
            ExitCode::FAILURE
        }
    }
}
