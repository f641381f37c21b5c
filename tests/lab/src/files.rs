//! Files of this machine for a program in a rig: `--file HOST[:RIG]`.
//!
//! The program runs only if every file is in its place. A file is refused, with the reason, if it cannot be read,
//! is not a regular file, or would be put where the rig has its own files.

use std::fs::File;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, bail};

/// Folder in which programs in a rig start.
const WORKING_FOLDER: &str = "root";

/// Folders at the root of a rig that no given file may be in: the rig's own files and mount points.
const OWN: [&str; 13] = [
    "bin", "dev", "guest", "init", "lab", "lib", "lib64", "proc", "run", "sbin", "sys", "tmp",
    "usr",
];

/// A file of this machine and its place in the rig.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Given {
    source: PathBuf,
    /// Path from the rig's root, without the leading slash.
    name: String,
}

impl Given {
    /// Parses `HOST[:RIG]`. If the whole text is the path of an existing file, a colon in it is part of the file's
    /// name.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let (source, place) = match text.rsplit_once(':') {
            Some((source, place)) if !Path::new(text).exists() => (source, Some(place)),
            _ => (text, None),
        };
        let source = Path::new(source);
        let name = match place {
            Some(place) => name(place)?,
            None => {
                let name = source.file_name().and_then(|name| name.to_str());
                let name = name.with_context(|| format!("`{text}` has no usable file name"))?;
                format!("{WORKING_FOLDER}/{name}")
            }
        };
        Ok(Self {
            source: std::path::absolute(source)?,
            name,
        })
    }

    fn check(&self) -> Result<()> {
        let shown = self.source.display();
        let file =
            File::open(&self.source).with_context(|| format!("cannot give the rig {shown}"))?;
        if !file.metadata()?.is_file() {
            bail!("{shown} is no file: a rig is given files only");
        }
        Ok(())
    }
}

/// Returns the path, from the rig's root, of the `place` that the user gave.
fn name(place: &str) -> Result<String> {
    if place.is_empty() || place.ends_with('/') {
        bail!("`{place}` is no place for a file in the rig: give its name, too");
    }
    let whole = Path::new("/").join(WORKING_FOLDER).join(place);
    let mut words = Vec::new();
    for component in whole.components() {
        match component {
            Component::RootDir | Component::CurDir => {}
            Component::Normal(word) => words.extend(word.to_str()),
            Component::ParentDir | Component::Prefix(_) => {
                bail!("`{place}` is no place in the rig: there must be no `..` in it")
            }
        }
    }
    match words.as_slice() {
        [] => bail!("`{place}` is no place for a file in the rig: give its name, too"),
        [first, ..] if OWN.contains(first) => {
            bail!("`{place}` is no place for a file in the rig: /{first} is its own")
        }
        [WORKING_FOLDER] => bail!("`{place}` is a folder in the rig: give the file's name, too"),
        words => Ok(words.join("/")),
    }
}

/// Checks that all files can be read, and that their places do not conflict. Returns them in the form of
/// [`Job::files`](crate::job::Job::files).
pub(crate) fn by_name(given: &[Given]) -> Result<Vec<(String, PathBuf)>> {
    for (n, one) in given.iter().enumerate() {
        one.check()?;
        let below = format!("{}/", one.name);
        for other in given.iter().take(n).chain(given.iter().skip(n + 1)) {
            if other.name == one.name {
                bail!(
                    "{} and {} would both be /{} in the rig",
                    one.source.display(),
                    other.source.display(),
                    one.name
                );
            }
            if other.name.starts_with(&below) {
                bail!(
                    "/{} cannot be a file in the rig and a folder, too",
                    one.name
                );
            }
        }
    }
    let pair = |given: &Given| (given.name.clone(), given.source.clone());
    Ok(given.iter().map(pair).collect())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn file(folder: &Path, name: &str) -> String {
        let path = folder.join(name);
        fs::write(&path, name).unwrap();
        path.to_str().unwrap().to_owned()
    }

    fn refused(text: &str) -> String {
        let given = Given::parse(text).and_then(|given| by_name(&[given]));
        format!("{:#}", given.unwrap_err())
    }

    #[test]
    fn file_has_its_own_name_in_the_working_folder_unless_another_is_given() {
        let folder = tempfile::tempdir().unwrap();
        let image = file(folder.path(), "vmlinuz");
        for (place, expected) in [
            ("", "root/vmlinuz"),
            (":kernel", "root/kernel"),
            (":./a//kernel", "root/a/kernel"),
            (":/boot/vmlinuz-7.2", "boot/vmlinuz-7.2"),
        ] {
            let given = Given::parse(&format!("{image}{place}")).unwrap();
            assert_eq!(given.name, expected);
            assert_eq!(given.source, Path::new(&image));
        }
    }

    #[test]
    fn file_may_have_a_colon_in_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let odd = file(folder.path(), "a:b");
        assert_eq!(Given::parse(&odd).unwrap().name, "root/a:b");
        assert_eq!(Given::parse(&format!("{odd}:c")).unwrap().name, "root/c");
    }

    #[test]
    fn what_is_no_file_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let missing = folder.path().join("nothing");
        let why = refused(missing.to_str().unwrap());
        assert!(
            why.contains("nothing") && why.contains("No such file"),
            "{why}"
        );
        let why = refused(&format!("{}:x", folder.path().display()));
        assert!(why.contains("is no file"), "{why}");
        assert!(refused("/").contains("no usable file name"));
    }

    #[test]
    fn places_outside_or_of_the_rigs_own_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let image = file(folder.path(), "vmlinuz");
        for (place, reason) in [
            ("", "give its name, too"),
            ("/", "give its name, too"),
            ("/opt/", "give its name, too"),
            ("/root", "is a folder"),
            ("../etc/x", "`..`"),
            ("/opt/../bin/hvprobe", "`..`"),
            ("/bin/hvprobe", "/bin is its own"),
            ("/tmp/x", "/tmp is its own"),
            ("/init", "/init is its own"),
        ] {
            let why = refused(&format!("{image}:{place}"));
            assert!(why.contains(reason), "{place}: {why}");
        }
    }

    #[test]
    fn two_files_of_one_name_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let [one, other] = ["one", "other"].map(|name| file(folder.path(), name));
        let given = |texts: &[String]| {
            let all: Vec<Given> = texts.iter().map(|it| Given::parse(it).unwrap()).collect();
            by_name(&all)
        };
        let both = given(&[one.clone(), other.clone()]).unwrap();
        assert_eq!(both.len(), 2);
        let why = given(&[one.clone(), format!("{other}:one")]).unwrap_err();
        assert!(why.to_string().contains("would both be /root/one"), "{why}");
        let why = given(&[one, format!("{other}:one/more")]).unwrap_err();
        assert!(why.to_string().contains("a folder, too"), "{why}");
    }
}
