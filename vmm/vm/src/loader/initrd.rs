//! The extra initramfs that brings a command into the guest.

use std::io::{self, Write};

use cpio::newc::{self, ModeFileType};

use super::error::LoadError;

/// Maximum length of the script in bytes. A kernel takes arguments of only a fraction of this.
const MAX_SCRIPT: usize = 8 << 20;

/// Returns a cpio archive (newc) that contains the directory `hvprobe` and the executable `hvprobe/command`: a
/// shell script that executes `command`. Each word is quoted, so the shell passes it on unchanged.
///
/// The kernel unpacks the archive over the content of earlier archives.
///
/// # Errors
/// When the command is empty, longer than any guest could run, or has a zero byte in it.
pub fn command_archive(command: &[String]) -> Result<Vec<u8>, LoadError> {
    if command.is_empty() {
        return Err(LoadError::Command("is empty"));
    }
    let mut script = String::from("#!/bin/sh\nexec");
    for word in command {
        if word.contains('\0') {
            return Err(LoadError::Command("contains a zero byte"));
        }
        script.push_str(" '");
        // Within single quotes only the closing one is special.
        script.push_str(&word.replace('\'', r"'\''"));
        script.push('\'');
        if script.len() > MAX_SCRIPT {
            return Err(LoadError::Command("is longer than 8 MiB"));
        }
    }
    script.push('\n');
    // Writing to memory fails only for a file that is too long for the format. The script is not.
    archive(script.as_bytes()).map_err(|_| LoadError::Command("does not fit an archive"))
}

fn archive(script: &[u8]) -> io::Result<Vec<u8>> {
    let directory = newc::Builder::new("hvprobe")
        .ino(1)
        .nlink(2)
        .mode(0o755)
        .set_mode_file_type(ModeFileType::Directory);
    let file = newc::Builder::new("hvprobe/command")
        .ino(2)
        .nlink(1)
        .mode(0o755)
        .set_mode_file_type(ModeFileType::Regular);
    let archive = directory.write(Vec::new(), 0).finish()?;
    let size = u32::try_from(script.len()).map_err(io::Error::other)?;
    let mut file = file.write(archive, size);
    file.write_all(script)?;
    newc::trailer(file.finish()?)
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use expect_test::{Expect, expect};

    use super::*;

    fn check(command: &[&str], expected: Expect) {
        let command: Vec<_> = command.iter().map(ToString::to_string).collect();
        let archive = command_archive(&command).unwrap();
        assert!(archive.len().is_multiple_of(4));
        let mut listing = String::new();
        let mut rest = archive.as_slice();
        loop {
            let mut entry = newc::Reader::new(rest).unwrap();
            if entry.entry().is_trailer() {
                break;
            }
            let head = format!("{} {:o}\n", entry.entry().name(), entry.entry().mode());
            listing.push_str(&head);
            entry.read_to_string(&mut listing).unwrap();
            rest = entry.finish().unwrap();
        }
        expected.assert_eq(&listing);
    }

    #[test]
    fn words_are_quoted_for_the_shell() {
        check(
            &["ls", "-l", "/a b", "it's", "$HOME", ""],
            expect![[r#"
            hvprobe 40755
            hvprobe/command 100755
            #!/bin/sh
            exec 'ls' '-l' '/a b' 'it'\''s' '$HOME' ''
        "#]],
        );
        check(
            &["a\nb"],
            expect![[r#"
            hvprobe 40755
            hvprobe/command 100755
            #!/bin/sh
            exec 'a
            b'
        "#]],
        );
    }

    #[test]
    fn commands_that_cannot_run_are_refused() {
        assert!(command_archive(&[]).is_err());
        assert!(command_archive(&["a\0b".to_owned()]).is_err());
        assert!(command_archive(&["x".repeat(MAX_SCRIPT)]).is_err());
    }
}
