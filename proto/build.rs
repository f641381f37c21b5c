//! Compiles the `.proto` files with protox, so that no `protoc` is needed.

use std::{env, error::Error, fs, path::PathBuf};

use prost::Message as _;

const FILES: [&str; 11] = [
    "hvprobe/v1/actions.proto",
    "hvprobe/v1/decisions.proto",
    "hvprobe/v1/error.proto",
    "hvprobe/v1/events.proto",
    "hvprobe/v1/histograms.proto",
    "hvprobe/v1/host.proto",
    "hvprobe/v1/machines.proto",
    "hvprobe/v1/probes.proto",
    "hvprobe/v1/sessions.proto",
    "hvprobe/v1/sources.proto",
    "hvprobe/v1/symbols.proto",
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=hvprobe");
    let descriptors = protox::compile(FILES, ["."])?;
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    fs::write(out.join("hvprobe.v1.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure()
        .codec_path("crate::codec::Whole")
        // `call` is half of an event's size, and most events have none.
        .boxed("hvprobe.v1.Event.call")
        // These fields are slices of the received message, so that a client allocates nothing for an event.
        .bytes(".hvprobe.v1.Event.captured")
        .bytes(".hvprobe.v1.Task.comm")
        .compile_fds(descriptors)?;
    Ok(())
}
