//! Debian's kernels, which are fetched once and unpacked into the cache. Rigs and guests use the same kernel by
//! default; guests may be given another one ([`Choice`]).
//!
//! A folder under the cache's `kernel` is complete if its name has no leading dot. The file `current` beside the
//! folders contains the name of one folder: that with the kernel of this machine's Debian. A file `current-NAME`
//! contains the name of the folder with the kernel NAME.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use lzma_rust2::XzReader;

use crate::built::{BUILT, Built};
use crate::packages::Archives;
use crate::place::{Cache, files_below, replace_if_different};
use crate::progress;

/// Debian's metapackage for the kernel that clouds boot.
const METAPACKAGE: &str = "linux-image-cloud-amd64";

/// A Debian kernel that the user can choose for guests by name.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Named {
    pub(crate) name: &'static str,
    suite: &'static str,
    metapackage: &'static str,
}

/// All Debian kernels with a name. The first is the default for rigs and guests on Debian 12.
pub(crate) const NAMED: [Named; 8] = [
    Named::new("6.1-cloud", "bookworm", METAPACKAGE),
    Named::new("5.10-cloud", "bullseye", METAPACKAGE),
    Named::new("6.1", "bookworm", "linux-image-amd64"),
    Named::new("6.1-rt", "bookworm", "linux-image-rt-amd64"),
    Named::new("6.12-cloud", "trixie", METAPACKAGE),
    Named::new("6.12-rt", "trixie", "linux-image-rt-amd64"),
    Named::new("7.2-cloud", "sid", METAPACKAGE),
    Named::new("7.2-rt", "sid", "linux-image-rt-amd64"),
];

impl Named {
    const fn new(name: &'static str, suite: &'static str, metapackage: &'static str) -> Self {
        Self {
            name,
            suite,
            metapackage,
        }
    }

    /// Returns the package archives of the kernel's suite.
    pub(crate) fn archives(&self, cache: &Cache) -> Result<Archives> {
        Archives::of_suite(self.suite, &cache.suite(self.suite))
    }

    /// Returns the version in the name, without the flavour.
    fn version(&self) -> &str {
        self.name.split('-').next().unwrap_or(self.name)
    }
}

/// Choice of the guests' kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Choice {
    Named(&'static Named),
    Built(&'static Built),
    /// An image, without modules.
    File(PathBuf),
}

impl Choice {
    /// Parses the user's choice: the name of a kernel, or a file.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        if let Some(named) = NAMED.iter().find(|named| named.name == text) {
            return Ok(Self::Named(named));
        }
        if let Some(built) = BUILT.iter().find(|built| built.name == text) {
            return Ok(Self::Built(built));
        }
        if Path::new(text).is_file() {
            return Ok(Self::File(std::path::absolute(text)?));
        }
        let built = BUILT.iter().map(|built| built.name);
        let names: Vec<&str> = NAMED.iter().map(|named| named.name).chain(built).collect();
        bail!("neither a file nor one of {}", names.join(", "))
    }

    /// Returns the name of the folder for guests with this kernel. Each choice has its own.
    pub(crate) fn folder_name(&self) -> String {
        match self {
            Self::Named(named) => named.name.to_owned(),
            Self::Built(built) => built.name.to_owned(),
            Self::File(path) => path.display().to_string().replace('/', "%"),
        }
    }
}

/// An unpacked kernel package.
#[derive(Clone, Debug)]
pub(crate) struct Kernel {
    image: PathBuf,
    modules: PathBuf,
    release: String,
}

impl Kernel {
    /// Returns the stock kernel from the cache. Fetches Debian's current one if there is none yet, or if `update`.
    pub(crate) fn obtain(cache: &Cache, update: bool) -> Result<Self> {
        let current = cache.kernels().join("current");
        if !update && let Some(kernel) = Self::present(cache, &current) {
            return Ok(kernel);
        }
        Self::fetch(cache, &current, &Archives::of_machine(), METAPACKAGE)
    }

    /// Returns the kernel `named` from the cache. Fetches it from its suite if it is not there.
    pub(crate) fn named(cache: &Cache, named: &Named) -> Result<Self> {
        let current = cache.kernels().join(format!("current-{}", named.name));
        if let Some(kernel) = Self::present(cache, &current) {
            return Ok(kernel);
        }
        let archives = named.archives(cache)?;
        let kernel = Self::fetch(cache, &current, &archives, named.metapackage)?;
        if let Err(why) = kernel.require(named) {
            progress::note(&why.to_string());
        }
        Ok(kernel)
    }

    /// Checks that this kernel has the version in the name of `named`. In Debian unstable the version changes.
    pub(crate) fn require(&self, named: &Named) -> Result<()> {
        ensure!(
            self.release.starts_with(&format!("{}.", named.version())),
            "{} of Debian's {} is {} by now",
            named.name,
            named.suite,
            self.release
        );
        Ok(())
    }

    /// Returns the kernel that the file `current` names, if it is there.
    fn present(cache: &Cache, current: &Path) -> Option<Self> {
        let name = fs::read_to_string(current).ok()?;
        Self::in_folder(&cache.kernels().join(name)).ok()
    }

    /// Fetches the kernel that `archives` have at present, and writes the name of its folder into the file
    /// `current`.
    fn fetch(
        cache: &Cache,
        current: &Path,
        archives: &Archives,
        metapackage: &str,
    ) -> Result<Self> {
        let looking = format!("looking up {metapackage} in {archives}");
        let packages = progress::step(&looking, || archives.kernel(metapackage))?;
        let folder = archives.unpacked(&packages, &cache.kernels())?;
        let kernel = Self::in_folder(&folder)?;
        let name = folder.file_name().context("kernel folder has no name")?;
        replace_if_different(current, name.as_encoded_bytes())?;
        Ok(kernel)
    }

    /// Finds the kernel in the folder of its unpacked packages. The image is in `boot`, or beside the modules:
    /// since 7.1, image and modules are in separate packages.
    fn in_folder(folder: &Path) -> Result<Self> {
        let describe = || format!("no kernel in {}", folder.display());
        let modules = ["usr/lib/modules", "lib/modules"]
            .iter()
            .find_map(|modules| fs::read_dir(folder.join(modules)).ok())
            .with_context(describe)?
            .find_map(|entry| Some(entry.ok()?.path()))
            .with_context(describe)?;
        let release = modules.file_name().and_then(OsStr::to_str);
        let release = release.with_context(describe)?.to_owned();
        let image = [
            folder.join("boot").join(format!("vmlinuz-{release}")),
            modules.join("vmlinuz"),
        ]
        .into_iter()
        .find(|image| image.is_file())
        .with_context(describe)?;
        Ok(Self {
            image,
            modules: modules.join("kernel"),
            release,
        })
    }

    /// Returns whether this kernel, which must be the stock kernel, is the kernel `named`.
    pub(crate) fn is(&self, named: &Named) -> bool {
        let version = format!("{}.", named.version());
        named.metapackage == METAPACKAGE && self.release.starts_with(&version)
    }

    /// Returns the name of the guests' kernel: that of `choice`, or without a choice that of this kernel, which
    /// must be the stock kernel.
    ///
    /// # Errors
    ///
    /// If the kernel has no name by which others could choose the same kernel.
    pub(crate) fn name_of_guests(&self, choice: Option<&Choice>) -> Result<String> {
        match choice {
            Some(Choice::File(file)) => bail!(
                "the kernel in {} has no name that others know; give one that the lab has",
                file.display()
            ),
            Some(choice) => Ok(choice.folder_name()),
            None => {
                let named = NAMED.iter().find(|named| self.is(named));
                let named = named.map(|named| named.name.to_owned());
                named.with_context(|| {
                    let release = &self.release;
                    format!("the lab has no name for this Debian's kernel, {release}; give one with --kernel")
                })
            }
        }
    }

    /// Returns the kernel's release, as `uname -r` prints it.
    pub(crate) fn release(&self) -> &str {
        &self.release
    }

    /// Returns the path of the `bzImage`.
    pub(crate) fn image(&self) -> &Path {
        &self.image
    }

    /// Returns the contents of the module file `name`, uncompressed. `-` and `_` in names count as equal. All
    /// folders are searched, because the folder of a module depends on the kernel's version.
    pub(crate) fn module(&self, name: &str) -> Result<Vec<u8>> {
        let wanted = name.replace('-', "_");
        for path in files_below(&self.modules)? {
            let file_name = path.file_name().unwrap_or_default().to_string_lossy();
            let file_name = file_name.replace('-', "_");
            if file_name.strip_suffix(".xz").unwrap_or(&file_name) == wanted {
                let describe = || format!("cannot read {}", path.display());
                let bytes = fs::read(&path).with_context(describe)?;
                return match file_name == wanted {
                    true => Ok(bytes),
                    false => unpack_xz(&bytes).with_context(describe),
                };
            }
        }
        bail!("kernel {} has no module {name}", self.release)
    }
}

fn unpack_xz(packed: &[u8]) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    std::io::Read::read_to_end(&mut XzReader::new(packed, true), &mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::place::replace_if_different as write;

    /// Output of `printf module | xz`.
    const PACKED: &[u8] = include_bytes!("../testdata/module.xz");

    #[test]
    fn kernel_of_one_package_is_found_with_its_modules() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        write(&at("boot/vmlinuz-6.1.0-9"), b"image").unwrap();
        write(
            &at("lib/modules/6.1.0-9/kernel/drivers/net/dummy.ko"),
            b"module",
        )
        .unwrap();
        let kernel = Kernel::in_folder(folder.path()).unwrap();
        assert_eq!(kernel.release(), "6.1.0-9");
        assert_eq!(kernel.image(), at("boot/vmlinuz-6.1.0-9"));
        assert_eq!(kernel.module("dummy.ko").unwrap(), b"module");
        let error = kernel.module("nothing.ko").unwrap_err();
        assert_eq!(error.to_string(), "kernel 6.1.0-9 has no module nothing.ko");
    }

    #[test]
    fn kernel_of_split_packages_is_found_and_its_packed_modules_are_unpacked() {
        let folder = tempfile::tempdir().unwrap();
        let release = folder.path().join("usr/lib/modules/7.2.1");
        write(&release.join("vmlinuz"), b"image").unwrap();
        write(&release.join("kernel/lib/crc/crc-itu-t.ko.xz"), PACKED).unwrap();
        let kernel = Kernel::in_folder(folder.path()).unwrap();
        assert_eq!(kernel.release(), "7.2.1");
        assert_eq!(kernel.image(), release.join("vmlinuz"));
        for name in ["crc-itu-t.ko", "crc_itu_t.ko"] {
            assert_eq!(kernel.module(name).unwrap(), b"module");
        }
    }

    #[test]
    fn kernel_of_each_debian_is_the_one_that_guests_have_by_its_name() {
        for (release, name) in [
            ("6.1.0-48-cloud-amd64", "6.1-cloud"),
            ("6.12.107+deb13-cloud-amd64", "6.12-cloud"),
            ("7.2.13+deb14-cloud-amd64", "7.2-cloud"),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let modules = folder.path().join("usr/lib/modules").join(release);
            write(&modules.join("vmlinuz"), b"image").unwrap();
            let stock = Kernel::in_folder(folder.path()).unwrap();
            let same = NAMED.iter().filter(|named| stock.is(named));
            assert_eq!(same.count(), 1, "{release}");
            assert_eq!(stock.name_of_guests(None).unwrap(), name);
        }
    }

    #[test]
    fn kernel_of_another_version_than_its_name_says_is_not_that_kernel() {
        let folder = tempfile::tempdir().unwrap();
        let named = NAMED.iter().find(|named| named.name == "7.2-rt").unwrap();
        let modules = folder.path().join("usr/lib/modules");
        write(&modules.join("7.20.1-rt-amd64/vmlinuz"), b"image").unwrap();
        let kernel = Kernel::in_folder(folder.path()).unwrap();
        let error = kernel.require(named).unwrap_err().to_string();
        assert_eq!(error, "7.2-rt of Debian's sid is 7.20.1-rt-amd64 by now");
        fs::rename(
            modules.join("7.20.1-rt-amd64"),
            modules.join("7.2.13-rt-amd64"),
        )
        .unwrap();
        let kernel = Kernel::in_folder(folder.path()).unwrap();
        kernel.require(named).unwrap();
    }

    #[test]
    fn kernel_of_guests_has_the_name_that_others_ask_for_it_by() {
        let folder = tempfile::tempdir().unwrap();
        let modules = folder.path().join("lib/modules/9.9.9-amd64");
        write(&modules.join("vmlinuz"), b"image").unwrap();
        let stock = Kernel::in_folder(folder.path()).unwrap();
        let name = |choice: &str| stock.name_of_guests(Some(&Choice::parse(choice)?));
        assert_eq!(name("7.2-rt").unwrap(), "7.2-rt");
        assert_eq!(name("6.1-stripped").unwrap(), "6.1-stripped");
        let file = modules.join("vmlinuz");
        let error = name(file.to_str().unwrap()).unwrap_err().to_string();
        assert!(error.ends_with("has no name that others know; give one that the lab has"));
        let error = stock.name_of_guests(None).unwrap_err().to_string();
        assert!(
            error.contains("9.9.9-amd64; give one with --kernel"),
            "{error}"
        );
    }

    #[test]
    fn folder_without_an_image_is_no_kernel() {
        let folder = tempfile::tempdir().unwrap();
        assert!(Kernel::in_folder(folder.path()).is_err());
        write(&folder.path().join("lib/modules/6.1/kernel/a.ko"), b"").unwrap();
        assert!(Kernel::in_folder(folder.path()).is_err());
    }

    #[test]
    fn choice_is_a_name_or_a_file() {
        let names = NAMED.iter().map(|named| named.name);
        for name in names {
            let Choice::Named(named) = Choice::parse(name).unwrap() else {
                panic!("{name} is no name");
            };
            assert_eq!(named.name, name);
        }
        let [built] = &BUILT;
        assert_eq!(Choice::parse(built.name).unwrap(), Choice::Built(built));
        let file = tempfile::NamedTempFile::new().unwrap();
        let choice = Choice::parse(file.path().to_str().unwrap()).unwrap();
        assert_eq!(choice, Choice::File(file.path().to_path_buf()));
        assert!(!choice.folder_name().contains('/'));
        let error = Choice::parse("2.6").unwrap_err().to_string();
        assert!(error.contains("6.12-rt"), "{error}");
    }
}
