//! What a kernel's debug information says of its sources. No machine is needed.
//!
//! Invariant: a place is named by a symbol of the kernel that was given, so a definition can have it as it is.

use std::path::Path;

use hvprobe_arch::Gva;
use hvprobe_linux::debug_info::{DebugError, DebugFile, DebugInfo, FunctionLines, Variable};
use hvprobe_linux::image::{ImageError, KernelImage};
use hvprobe_machine::Kernel;
use hvprobe_spec::ParseError;
use hvprobe_spec::point::Point;

/// A kernel with its debug information.
#[derive(Debug)]
pub struct Sources {
    image: KernelImage,
    file: DebugFile,
}

/// Why nothing is said of sources.
#[derive(Debug, thiserror::Error)]
pub enum SourcesError {
    /// The kernel cannot be read.
    #[error("the kernel cannot be read")]
    Image(#[from] ImageError),
    /// The debug information does not answer.
    #[error(transparent)]
    Debug(#[from] DebugError),
    /// A definition asks for what is not there.
    #[error(transparent)]
    Definition(ParseError),
}

/// A place that a point stands for, and what there is.
#[derive(Debug)]
pub struct SourcePlace {
    /// Its address, as linked.
    pub at: Gva,
    /// The function that was inlined there, if the point is in one.
    pub inlined: Option<String>,
    /// The variables there.
    pub variables: Vec<Variable>,
}

impl Sources {
    /// The debug information in the file at `path`, for `kernel`.
    ///
    /// # Errors
    /// When one of them cannot be read, or the file is that of another kernel.
    pub fn open(kernel: &Kernel, path: &Path) -> Result<Self, SourcesError> {
        let image = KernelImage::parse(kernel.elf())?;
        let file = DebugFile::open(path)?;
        let sources = Self { image, file };
        sources.info()?;
        Ok(sources)
    }

    /// The build id that the kernel and its debug information share.
    #[must_use]
    pub fn build_id(&self) -> &[u8] {
        self.image.build_id().unwrap_or_default()
    }

    pub(crate) fn image(&self) -> &KernelImage {
        &self.image
    }

    pub(crate) fn info(&self) -> Result<DebugInfo<'_>, DebugError> {
        DebugInfo::new(&self.file, self.image.build_id())
    }

    /// The lines that take a probe of the functions called `name`, in files that end with `file` if that is
    /// given.
    ///
    /// # Errors
    /// When there is no such function, or the debug information is damaged.
    pub fn lines(
        &self,
        name: &str,
        file: Option<&str>,
    ) -> Result<Vec<FunctionLines>, SourcesError> {
        Ok(self.info()?.lines(name, file)?)
    }

    /// All places that `point` stands for, with the variables there.
    ///
    /// # Errors
    /// When there are none, or the debug information is damaged.
    pub fn variables(&self, point: &Point) -> Result<Vec<SourcePlace>, SourcesError> {
        let info = self.info()?;
        let places = info.places(point)?.into_iter().map(|place| {
            Ok(SourcePlace {
                variables: info.variables(&place)?,
                at: place.at,
                inlined: place.inlined,
            })
        });
        places.collect()
    }

    /// An address as definitions name it: `SYMBOL+0x10`, or by itself if no symbol is there.
    #[must_use]
    pub fn named(&self, at: Gva) -> String {
        match self.image.symbols().containing(at) {
            Some((symbol, 0)) => symbol.name.to_owned(),
            Some((symbol, offset)) => format!("{}+{offset:#x}", symbol.name),
            None => at.to_string(),
        }
    }
}
