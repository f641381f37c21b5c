//! Source lines from debug information on the client's side, for the machine whose kernel it describes.

use std::sync::Arc;

use anyhow::bail;
use hvprobe_spec::language::text::hex;

use super::connection::Client;
use crate::definitions::debug_info::{TheirKernel, Theirs};

impl Client {
    /// Uses the source lines of the debug information `theirs` for stacks. If it describes a kernel, checks first
    /// that `machine` runs this kernel.
    pub(crate) async fn use_debug_info(
        &mut self,
        theirs: Theirs,
        machine: &str,
    ) -> anyhow::Result<()> {
        if let Some(kernel) = theirs.kernel {
            self.check_kernel(&kernel, machine).await?;
        }
        self.lines = theirs.lines.map(Arc::new);
        Ok(())
    }

    /// Returns an error unless `machine` runs `kernel`.
    async fn check_kernel(&mut self, kernel: &TheirKernel, machine: &str) -> anyhow::Result<()> {
        let shown = self.get_machine(machine.to_owned()).await?;
        match shown.kernel_build_id {
            Some(own) if own == kernel.build_id => Ok(()),
            Some(own) => bail!(
                "cannot use {}: its build id is {}, that of {machine}'s kernel {}",
                kernel.file.display(),
                hex(&kernel.build_id),
                hex(&own)
            ),
            None => bail!(
                "cannot use {}: {machine} does not report its kernel's build id",
                kernel.file.display()
            ),
        }
    }
}
