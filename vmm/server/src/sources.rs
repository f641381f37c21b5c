//! What a kernel's debug information says of its sources. No machine is needed.
//!
//! Invariant: a place is named by a symbol of the kernel that was given, so a definition can have it as it is.

use std::path::Path;
use std::sync::Arc;

use hvprobe_arch::Gva;
use hvprobe_linux::debug_info::{DebugError, DebugFile, DebugInfo, Line, Location, Variable};
use hvprobe_linux::image::{ImageError, KernelImage};
use hvprobe_machine::Kernel;
use hvprobe_proto::v1;
use hvprobe_spec::ParseError;
use hvprobe_spec::point::{At, Point};

/// A kernel with its debug information.
#[derive(Debug)]
pub struct Sources {
    image: Arc<KernelImage>,
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

impl Sources {
    /// The debug information in the file at `path`, for `kernel`.
    ///
    /// # Errors
    /// When one of them cannot be read, or the file is that of another kernel.
    pub fn open(kernel: &Kernel, path: &Path) -> Result<Self, SourcesError> {
        let image = KernelImage::parse(kernel.elf())?;
        Ok(Self::of(Arc::new(image), DebugFile::open(path)?)?)
    }

    /// The debug information in `file`, for the kernel whose image that is.
    pub(crate) fn of(image: Arc<KernelImage>, file: DebugFile) -> Result<Self, DebugError> {
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

    /// The lines that take a probe of the functions that `point` stands for.
    ///
    /// # Errors
    /// When it stands for anything else, there is no such function, or the debug information is damaged.
    pub fn lines(&self, point: &Point) -> Result<v1::ListLinesResponse, SourcesError> {
        let Point::Function {
            name,
            file,
            at: At::Entry,
        } = point
        else {
            return Err(SourcesError::Definition(ParseError {
                column: 0,
                message: "lines are told of a whole function: FUNC or FUNC@SRC".to_owned(),
            }));
        };
        let functions = self.info()?.lines(name, file.as_deref())?;
        let functions = functions.into_iter().map(|function| v1::FunctionLines {
            lines: function.lines.iter().map(|line| self.line(line)).collect(),
            name: function.name,
            file: function.file,
            first: function.first,
        });
        Ok(v1::ListLinesResponse {
            functions: functions.collect(),
        })
    }

    fn line(&self, line: &Line) -> v1::SourceLine {
        v1::SourceLine {
            number: line.number,
            places: line.places.iter().map(|at| self.named(*at)).collect(),
        }
    }

    /// All places that `point` stands for, with the variables there.
    ///
    /// # Errors
    /// When there are none, or the debug information is damaged.
    pub fn variables(&self, point: &Point) -> Result<v1::ListVariablesResponse, SourcesError> {
        let info = self.info()?;
        let places = info.places(point)?.into_iter().map(|place| {
            let variables = info.variables(&place)?.into_iter();
            Ok(v1::SourcePlace {
                place: self.named(place.at),
                inlined: place.inlined.unwrap_or_default(),
                variables: variables.map(|it| self.variable(it)).collect(),
            })
        });
        Ok(v1::ListVariablesResponse {
            places: places.collect::<Result<_, SourcesError>>()?,
        })
    }

    fn variable(&self, variable: Variable) -> v1::Variable {
        let (fetch, unreadable) = match variable.location {
            Location::Fetch(fetch) => (fetch.to_string(), ""),
            Location::Static(at) => (format!("@{}", self.named(at)), ""),
            Location::Constant(value) => (format!("\\{value}"), ""),
            Location::Nowhere(why) => (String::new(), why),
        };
        v1::Variable {
            name: variable.name,
            declaration: variable.declaration,
            parameter: variable.is_parameter,
            fetch,
            unreadable: unreadable.to_owned(),
        }
    }

    /// An address as definitions name it: `SYMBOL+0x10`, or by itself if no symbol is there.
    pub(crate) fn named(&self, at: Gva) -> String {
        match self.image.symbols().containing(at) {
            Some((symbol, 0)) => symbol.name.to_owned(),
            Some((symbol, offset)) => format!("{}+{offset:#x}", symbol.name),
            None => at.to_string(),
        }
    }
}
