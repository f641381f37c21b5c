//! Loads and unloads a kernel module repeatedly.

use std::error::Error;
use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::path::Path;

use crate::files;
use crate::sys::checked;

/// Loads and unloads the module at `path`, `count` times. While the module is loaded, reads `file` if there is one.
/// Prints the number of loads.
pub(crate) fn run(path: &str, count: u64, file: Option<&str>) -> Result<(), Box<dyn Error>> {
    let name = name(path).ok_or_else(|| format!("{path} has no module's name"))?;
    for _ in 0..count {
        load(path)?;
        let read = file.map_or(Ok(()), |file| {
            let mut contents = Vec::new();
            File::open(file)
                .and_then(|mut open| open.read_to_end(&mut contents))
                .map_err(|error| files::named(file, &error))
                .map(drop)
        });
        unload(&name)?;
        read?;
    }
    println!("loads: {count}");
    Ok(())
}

fn load(path: &str) -> io::Result<()> {
    let file = File::open(path).map_err(|error| files::named(path, &error))?;
    let parameters = c"";
    // SAFETY: the descriptor is open, the parameters end with their NUL.
    checked(unsafe {
        libc::syscall(
            libc::SYS_finit_module,
            file.as_raw_fd(),
            parameters.as_ptr(),
            0,
        )
    })
    .map(drop)
    .map_err(|error| files::named(path, &error))
}

fn unload(name: &CString) -> io::Result<()> {
    // SAFETY: the name ends with its NUL.
    checked(unsafe { libc::syscall(libc::SYS_delete_module, name.as_ptr(), libc::O_NONBLOCK) })
        .map(drop)
        .map_err(|error| files::named("delete_module", &error))
}

/// Returns the kernel's name for the module in a file: dashes become underscores.
fn name(path: &str) -> Option<CString> {
    let stem = Path::new(path).file_stem()?.to_str()?;
    CString::new(stem.replace('-', "_")).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_is_the_kernels() {
        assert_eq!(name("/lib/crc-itu-t.ko").unwrap().as_c_str(), c"crc_itu_t");
        assert_eq!(name("dummy.ko").unwrap().as_c_str(), c"dummy");
        assert_eq!(name("/"), None);
    }
}
