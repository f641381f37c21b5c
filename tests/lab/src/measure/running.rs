//! A program that never outlives what measures it.

use std::process::Child;

/// A child process, killed on drop.
#[derive(Debug)]
pub struct Running(pub Child);

impl Drop for Running {
    fn drop(&mut self) {
        // The program may have ended by itself, and it has nothing to lose.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
