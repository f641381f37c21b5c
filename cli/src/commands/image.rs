//! `hvprobe image`: shows what is in a disk image.

use std::process::ExitCode;

use hvprobe_storage::{Format, Image as DiskImage};

use crate::failure::{DONE, FAILED};
use crate::options::image::{Image, Inspect};
use crate::output::{self, harmless, image, json};

pub(crate) fn image(command: &Image) -> anyhow::Result<ExitCode> {
    match command {
        Image::Inspect(args) => inspect(args),
    }
}

fn inspect(args: &Inspect) -> anyhow::Result<ExitCode> {
    let format = args.format.unwrap_or_else(|| Format::of_name(&args.image));
    let found = DiskImage::open(&args.image, format)?.inspect()?;
    if args.json {
        json::print(&json::Shown(&found))?;
    } else {
        output::print(&image::text(&found))?;
    }
    match found.chosen() {
        Ok(_) => Ok(DONE),
        Err(error) => {
            // In JSON it is a member.
            if !args.json {
                // It has text from the image.
                let message = harmless(error.to_string().as_bytes());
                output::error(format_args!("{message}"));
            }
            Ok(ExitCode::from(FAILED))
        }
    }
}
