//! A program that does not outlive the code that measures it.

use std::process::Child;

/// A child process, killed on drop.
#[derive(Debug)]
pub struct Running(pub Child);

impl Drop for Running {
    fn drop(&mut self) {
        // The program may have ended by itself, so errors are ignored. Nothing is lost if it is killed.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
