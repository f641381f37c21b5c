//! The files that a boot reads, before it takes any resource of the host but memory.

use std::io::Read as _;
use std::path::Path;
use std::sync::Arc;

use hvprobe_vm::loader::{self, Room};
use hvprobe_vm::memory::GuestRam;
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
    /// Reads the files of `config`. If `kernel` is given, uses it instead of the kernel's file. A kernel that is read
    /// here is placed at random in `ram`, unless the command line has `nokaslr`.
    pub(super) fn read(
        config: &MachineConfig,
        kernel: Option<Arc<KernelFile>>,
        ram: &GuestRam,
    ) -> Result<Self, BootError> {
        let kernel = match kernel {
            Some(kernel) => Source::Given(kernel),
            None => Source::Read(KernelFile::open(&config.kernel)?),
        };
        let mut initrd = Vec::new();
        if let Some(path) = &config.initrd {
            initrd.push(archive(path, config.memory.min(MAX_INITRD))?);
        }
        if !config.command.is_empty() {
            initrd.push(loader::command_archive(&config.command)?);
        }
        let kernel = match kernel {
            Source::Given(kernel) => kernel,
            Source::Read(file) if is_fixed(&config.cmdline) => Arc::new(file),
            Source::Read(file) => Arc::new(file.randomize(Room {
                ram,
                initrd: &initrd.iter().map(Vec::as_slice).collect::<Vec<_>>(),
                cmdline: &config.cmdline,
            })?),
        };
        Ok(Self { kernel, initrd })
    }
}

/// Kernel of a boot.
enum Source {
    /// Shared with other machines, at a place that it already has.
    Given(Arc<KernelFile>),
    Read(KernelFile),
}

/// Returns whether the command line says that the kernel stays where it is linked.
fn is_fixed(cmdline: &str) -> bool {
    let mut words = cmdline.split_ascii_whitespace();
    words.any(|word| word == "nokaslr")
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

#[cfg(test)]
mod tests {
    use super::is_fixed;

    #[test]
    fn only_the_word_nokaslr_fixes_a_kernel() {
        for (cmdline, expected) in [
            ("quiet nokaslr panic=-1", true),
            ("nokaslr", true),
            ("", false),
            ("kaslr", false),
            ("nokaslr=1 init=/nokaslr", false),
        ] {
            assert_eq!(is_fixed(cmdline), expected, "{cmdline}");
        }
    }
}
