//! Options of `hvprobe image`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueHint};
use hvprobe_storage::Format;

use super::one_of::one_of;

/// Formats, with their help.
const FORMATS: [(Format, &str); 2] = [
    (Format::Raw, "The file's bytes are the disk's bytes"),
    (
        Format::Qcow2,
        "QEMU's format; backing files must be in the image's folder, or below it",
    ),
];

#[derive(Debug, Subcommand)]
pub(crate) enum Image {
    /// Show the partitions of a disk image, its boot entries, and which of them would be booted
    Inspect(Inspect),
}

/// Which image.
#[derive(Debug, Args)]
#[command(after_help = "\
Reads GPT and MBR, ext4 and FAT, and in them entries of the Boot Loader Specification, grub.cfg, unified
kernel images, and kernels in /boot. The exit status is 1 when there is nothing to boot.

Examples:
  hvprobe image inspect debian-12-genericcloud-amd64.qcow2
  hvprobe image inspect --json disk.img | jq .entries")]
pub(crate) struct Inspect {
    /// Disk image
    #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) image: PathBuf,

    /// Format of the file; its content is not looked at for that [default: qcow2 for *.qcow2, raw for all others]
    #[arg(long, value_name = "FORMAT", value_parser = one_of(&FORMATS, Format::name))]
    pub(crate) format: Option<Format>,

    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}
