//! The files that a boot reads, before it takes any resource of the host but memory.

use std::io::Read as _;
use std::path::Path;
use std::sync::Arc;

use hvprobe_vm::loader;
use hvprobe_vmlinux::open_file;

use super::error::BootError;
use crate::config::MachineConfig;
use crate::kernel_file::KernelFile;

/// Maximum size of an initramfs, which has to lie below the hole under 4 GiB.
const MAX_INITRD: u64 = 3 << 30;

/// Files of a configuration.
pub(super) struct Files {
    pub(super) kernel: Arc<KernelFile>,
    /// Archives that the kernel unpacks one after the other.
    pub(super) initrd: Vec<Vec<u8>>,
}

impl Files {
    /// Reads the files of `config`. If `kernel` is given, uses it instead of the kernel's file.
    pub(super) fn read(
        config: &MachineConfig,
        kernel: Option<Arc<KernelFile>>,
    ) -> Result<Self, BootError> {
        let kernel = match kernel {
            Some(kernel) => kernel,
            None => Arc::new(KernelFile::open(&config.kernel)?),
        };
        let mut initrd = Vec::new();
        if let Some(path) = &config.initrd {
            initrd.push(archive(path, config.memory.min(MAX_INITRD))?);
        }
        if !config.command.is_empty() {
            initrd.push(loader::command_archive(&config.command)?);
        }
        Ok(Self { kernel, initrd })
    }
}

/// Reads the initramfs at `path`. If the file has more than `most` bytes, reads `most` + 1 bytes, which suffices
/// for the loader to refuse it.
fn archive(path: &Path, most: u64) -> Result<Vec<u8>, BootError> {
    let source = |source| BootError::Initrd {
        path: path.to_owned(),
        source,
    };
    let mut archive = Vec::new();
    open_file(path)
        .and_then(|file| file.take(most + 1).read_to_end(&mut archive))
        .map_err(source)?;
    Ok(archive)
}
