//! Choice of the kernel for a report: the newest readable kernel of this machine.

use std::cmp::Ordering;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// Where distributions put their kernels.
pub(super) const BOOT: &str = "/boot";

/// Returns the newest readable kernel in `folder`, by the version in its name, or the reason why there is none.
pub(super) fn newest(folder: &Path) -> Result<PathBuf, String> {
    let shown = folder.display();
    let entries =
        fs::read_dir(folder).map_err(|error| format!("cannot look into {shown}: {error}"))?;
    let mut kernels: Vec<(String, PathBuf)> = entries
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            let version = path.file_name()?.to_str()?.strip_prefix("vmlinuz-")?;
            // Fedora's rescue kernel, a copy of another kernel.
            let rescue = version.contains("rescue");
            (!rescue && path.is_file()).then(|| (version.to_owned(), path.clone()))
        })
        .collect();
    kernels.sort_by(|(one, _), (other, _)| compare(other, one));
    let count = kernels.len();
    let readable = kernels
        .into_iter()
        .find(|(_, path)| File::open(path).is_ok());
    readable.map(|(_, path)| path).ok_or_else(|| match count {
        0 => format!("there is no kernel in {shown}; give one with --kernel"),
        _ => format!(
            "none of the kernels in {shown} can be read; try as root, or give one with --kernel"
        ),
    })
}

/// Compares versions by their numbers and words from left to right, so that 6.12 is greater than 6.1. A version
/// is greater than its own prefixes.
fn compare(one: &str, other: &str) -> Ordering {
    parts(one).cmp(&parts(other))
}

/// Part of a version. Words sort before numbers: `6.1-rc` before `6.1.1`.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Part<'a> {
    Word(&'a str),
    Number(u64),
}

fn parts(version: &str) -> Vec<Part<'_>> {
    let mut parts = Vec::new();
    for piece in version.split(['.', '-', '+', '_', '~']) {
        let mut rest = piece;
        while let Some(first) = rest.chars().next() {
            let digits = first.is_ascii_digit();
            let end = rest
                .find(|c: char| c.is_ascii_digit() != digits)
                .unwrap_or(rest.len());
            let (part, after) = rest.split_at(end);
            parts.push(part.parse().map_or(Part::Word(part), Part::Number));
            rest = after;
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_by_their_numbers() {
        let in_order = [
            "5.10.0-32-amd64",
            "6.1.0-9-amd64",
            "6.1.0-48-amd64",
            "6.1.0-48-cloud-amd64",
            "6.12.107+deb13-amd64",
            "7.2.13+deb14-cloud-amd64",
        ];
        assert!(in_order.is_sorted_by(|one, other| compare(one, other) == Ordering::Less));
        assert_eq!(compare("6.1.0", "6.1.0"), Ordering::Equal);
        assert_eq!(compare("6.1-rc7", "6.1.1"), Ordering::Less);
    }

    #[test]
    fn newest_kernel_is_taken_and_a_rescue_kernel_never() {
        let folder = tempfile::tempdir().unwrap();
        for name in [
            "vmlinuz-6.1.0-9-amd64",
            "vmlinuz-6.12.1",
            "vmlinuz-0-rescue-99ffff",
            "vmlinuz",
            "initrd.img-7.0",
        ] {
            fs::write(folder.path().join(name), b"").unwrap();
        }
        fs::create_dir(folder.path().join("vmlinuz-9.9")).unwrap();
        let newest = newest(folder.path()).unwrap();
        assert_eq!(newest, folder.path().join("vmlinuz-6.12.1"));
    }

    #[test]
    fn folder_without_kernels_says_so() {
        let folder = tempfile::tempdir().unwrap();
        let why = newest(folder.path()).unwrap_err();
        assert!(
            why.contains("no kernel") && why.contains("--kernel"),
            "{why}"
        );
        let why = newest(&folder.path().join("nothing")).unwrap_err();
        assert!(why.contains("cannot look"), "{why}");
    }
}
