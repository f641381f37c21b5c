//! Audience for a rig's console: writes the log, calls the listener, and ends the watch when the job is over.

use std::fs::File;
use std::io::Write;
use std::ops::ControlFlow;

use anyhow::{Context, Result};

use crate::outcome::{Finish, Listener};
use crate::process::Audience;
use crate::progress::Waiting;
use crate::serial::{Heard, Reader};

/// The audience of an emulated machine's serial port.
pub(super) struct Console<'a> {
    reader: Reader,
    log: File,
    listener: &'a mut dyn Listener,
    booting: Waiting,
    /// Exit status of each step; `None` for a step that has not ended.
    pub(super) statuses: Vec<Option<u8>>,
    /// The step that begins next. If another step begins, the machine has restarted.
    next: usize,
    /// How the job ended; `None` until it has.
    pub(super) finish: Option<Finish>,
}

impl<'a> Console<'a> {
    pub(super) fn new(
        nonce: &str,
        steps: usize,
        log: File,
        listener: &'a mut dyn Listener,
        booting: Waiting,
    ) -> Self {
        Self {
            reader: Reader::new(nonce),
            log,
            listener,
            booting,
            statuses: vec![None; steps],
            next: 0,
            finish: None,
        }
    }

    fn hear(&mut self, heard: Heard) -> Result<()> {
        match heard {
            Heard::Output(bytes) => self.listener.output(&bytes)?,
            Heard::Begin(step) if step == self.next => {
                self.booting.finish();
                self.next += 1;
                self.listener.begin(step);
            }
            Heard::Begin(_) => self.break_off("the rig's kernel restarted"),
            Heard::End(step, status) => {
                if let Some(slot) = self.statuses.get_mut(step) {
                    *slot = Some(status);
                }
                self.listener.end(step, status);
            }
            Heard::ModuleFailed(module) => {
                self.break_off(&format!("the rig's kernel did not load {module}"));
            }
            Heard::Done => self.finish = Some(Finish::Complete),
        }
        Ok(())
    }

    fn break_off(&mut self, reason: &str) {
        self.finish = Some(Finish::Broken(reason.to_owned()));
    }
}

impl Audience for Console<'_> {
    fn output(&mut self, bytes: &[u8]) -> Result<ControlFlow<()>> {
        self.log
            .write_all(bytes)
            .context("cannot write the serial log")?;
        for heard in self.reader.read(bytes) {
            self.hear(heard)?;
            if self.finish.is_some() {
                return Ok(ControlFlow::Break(()));
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    fn wants_input(&self) -> bool {
        self.reader.in_step()
    }
}
