//! Source lines and variables of a kernel or a module, from its debug information. Needs no machine.
//!
//! Invariant: a place is named by a symbol of the given kernel or module, so a definition can use the name as it
//! is, wherever the kernel or module is loaded.

use std::path::Path;
use std::sync::{Arc, LazyLock};

use hvprobe_arch::Gva;
use hvprobe_linux::debug_info::{
    DebugError, DebugFile, DebugInfo, Index, Line, Location, ModuleFile, PointPlace, Variable,
    is_module_name,
};
use hvprobe_linux::image::{ImageError, KernelImage};
use hvprobe_linux::symbols::{SymbolKind, Symbols};
use hvprobe_proto::v1;
use hvprobe_spec::ParseError;
use hvprobe_spec::definition::BEGINNINGS;
use hvprobe_spec::line_range::LineRange;
use hvprobe_spec::point::Point;
use hvprobe_vmlinux::Kernel;

use super::indexes::Indexes;

/// Why a variable in a module's own memory cannot be read.
pub(crate) const OF_MODULE: &str = "in the module's own memory, which a definition cannot name";

/// A kernel or a module with its debug information.
#[derive(Debug)]
pub struct Sources {
    of: Of,
    file: DebugFile,
}

#[derive(Debug)]
enum Of {
    Kernel(Arc<KernelImage>),
    /// The module of that name. Everything else about it is in the file.
    Module(String),
}

/// Why the sources cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum SourcesError {
    /// The kernel cannot be read.
    #[error("the kernel cannot be read")]
    Image(#[from] ImageError),
    /// The debug information cannot be used, or does not contain what was asked for.
    #[error(transparent)]
    Debug(#[from] DebugError),
    /// Neither the content of a module's file nor its file name gives a valid module name.
    #[error(
        "no module can be called `{0}`, as the file is: name it as its module is called, with .ko"
    )]
    Unnamed(String),
    /// A definition asks for something that does not exist.
    #[error(transparent)]
    Definition(ParseError),
}

/// Why no definition can name an address.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unnameable {
    /// No symbol contains the address.
    #[error("{0} belongs to no symbol")]
    Nowhere(Gva),
    /// Several symbols have the name of the symbol that contains the address.
    #[error(
        "several symbols are called {name}, and a definition cannot say which of them is meant"
    )]
    Shared {
        /// The name that the symbols share.
        name: String,
        /// The address, written with that name.
        place: String,
    },
}

impl Sources {
    /// Opens the debug information in the file at `path`, for `kernel`. Its index is taken from `indexes`; if there
    /// is none, it is built and kept there.
    ///
    /// # Errors
    /// When the kernel or the file cannot be read, or the file belongs to another kernel.
    pub fn open(
        kernel: &Kernel,
        path: &Path,
        indexes: Option<&Indexes>,
    ) -> Result<Self, SourcesError> {
        let image = KernelImage::parse(kernel.elf())?;
        let file = DebugFile::open(path)?;
        Ok(Self::indexed(Arc::new(image), file, indexes)?)
    }

    /// Opens the debug information of a module, in its file at `path`. The module's name is taken from the file's
    /// content or, if it is not there, from the file's name (`ext4.ko`, `ext4.ko.debug`). Returns `None` if the
    /// file is not an object file; a kernel's file is not one.
    ///
    /// # Errors
    /// When the file cannot be read, or does not say which build of which module it belongs to.
    pub fn open_module(path: &Path) -> Result<Option<Self>, SourcesError> {
        if !DebugFile::is_unlinked(path)? {
            return Ok(None);
        }
        let file = DebugFile::open(path)?;
        let Some(module) = file.module() else {
            return Ok(None);
        };
        let name = match module.name() {
            Some(name) => name.to_owned(),
            None => {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                let (first, _) = name.split_once(".ko").unwrap_or((&name, ""));
                is_module_name(first)
                    .then(|| first.replace('-', "_"))
                    .ok_or_else(|| SourcesError::Unnamed(first.to_owned()))?
            }
        };
        if file.build_id().is_none() {
            return Err(DebugError::NoBuildId.into());
        }
        let of = Of::Module(name);
        let sources = Self { of, file };
        sources.info()?;
        Ok(Some(sources))
    }

    /// Creates the sources of the kernel with this `image`, from the debug information in `file`.
    ///
    /// # Errors
    /// When the file has no debug information, or that of another kernel.
    pub fn of(image: Arc<KernelImage>, file: DebugFile) -> Result<Self, DebugError> {
        let of = Of::Kernel(image);
        let sources = Self { of, file };
        sources.info()?;
        Ok(sources)
    }

    /// Like [`Sources::of`], but takes the index from `indexes`; if there is none, builds it and keeps it there.
    ///
    /// # Errors
    /// As [`Sources::of`].
    pub fn indexed(
        image: Arc<KernelImage>,
        file: DebugFile,
        indexes: Option<&Indexes>,
    ) -> Result<Self, DebugError> {
        let is_known = indexes.is_none_or(|indexes| indexes.find(&file));
        let sources = Self::of(image, file)?;
        if let Some(indexes) = indexes.filter(|_| !is_known) {
            indexes.keep(&sources.file, sources.file.index()?);
        }
        Ok(sources)
    }

    /// Returns the index of the debug information: the functions, source files and code of each unit.
    ///
    /// # Errors
    /// When the debug information is damaged.
    pub fn index(&self) -> Result<&Arc<Index>, DebugError> {
        self.file.index()
    }

    /// Returns the build id that the kernel or the module shares with its debug information.
    #[must_use]
    pub fn build_id(&self) -> &[u8] {
        self.file.build_id().unwrap_or_default()
    }

    /// Returns the name of the module, unless this is a kernel.
    #[must_use]
    pub fn module(&self) -> Option<&str> {
        match &self.of {
            Of::Kernel(_) => None,
            Of::Module(name) => Some(name),
        }
    }

    /// Returns the symbols by which places are named. Their names do not include the module's name.
    pub(crate) fn symbols(&self) -> &Symbols {
        /// Never returned: the file of a module always has a [`ModuleFile`].
        static NONE: LazyLock<Symbols> = LazyLock::new(Symbols::default);
        match &self.of {
            Of::Kernel(image) => image.symbols(),
            Of::Module(_) => self.file.module().map_or(&NONE, ModuleFile::symbols),
        }
    }

    /// Returns the address at which `at`, an address of the debug information, is in the guest.
    fn loaded(&self, at: Gva) -> Gva {
        at.wrapping_add(self.offset())
    }

    /// Returns the address that `at`, an address of a symbol, has in the debug information.
    pub(crate) fn linked(&self, at: Gva) -> Gva {
        Gva(at.0.wrapping_sub(self.offset()))
    }

    /// Returns the places in the debug information that `point` stands for. Its address, if it is one, is that of a
    /// symbol.
    pub(crate) fn places_of(
        &self,
        info: &DebugInfo<'_>,
        point: &Point,
    ) -> Result<Vec<PointPlace>, DebugError> {
        match point {
            Point::Address(at) => info.places(&Point::Address(self.linked(*at))),
            point => info.places(point),
        }
    }

    /// Returns how far the symbols are from their addresses in the debug information, in bytes.
    fn offset(&self) -> u64 {
        match &self.of {
            Of::Kernel(image) => image.offset().unwrap_or(0),
            Of::Module(_) => 0,
        }
    }

    pub(crate) fn info(&self) -> Result<DebugInfo<'_>, DebugError> {
        let build_id = match &self.of {
            Of::Kernel(image) => image.build_id(),
            Of::Module(_) => self.file.build_id(),
        };
        DebugInfo::new(&self.file, build_id)
    }

    /// Returns whether the kernel or module has the function, file or address of `point`.
    ///
    /// # Errors
    /// When the debug information is damaged.
    pub fn knows(&self, point: &Point) -> Result<bool, SourcesError> {
        let info = self.info()?;
        if let Some(pattern) = point.pattern() {
            return Ok(self.matching(pattern).next().is_some());
        }
        let found = match point {
            Point::Address(at) => return Ok(self.symbols().containing(*at).is_some()),
            Point::Function { name, file, .. } => info.lines(name, file.as_deref()).map(drop),
            Point::Line { file, .. } | Point::Text { file, .. } => info.files(file).map(drop),
        };
        match found {
            Ok(()) => Ok(true),
            Err(DebugError::NoFunction { name, .. }) => Ok(self.symbols().lookup(&name).is_ok()),
            Err(DebugError::NoFile(_)) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns the functions whose names match `pattern`. Parts and clones that the compiler has made of
    /// functions match only if the pattern has a dot.
    pub(crate) fn matching(&self, pattern: &str) -> impl Iterator<Item = &str> {
        let with_parts = pattern.contains('.');
        // The pattern of a parsed point is valid.
        let all = self.symbols().glob(pattern).into_iter().flatten();
        all.filter(move |it| it.kind == SymbolKind::Text && (with_parts || !it.name.contains('.')))
            .map(|it| it.name)
    }

    /// Returns the lines in `range` that can be probed.
    ///
    /// # Errors
    /// When there are none, there is no such function, or the debug information is damaged.
    pub fn lines(&self, range: &LineRange) -> Result<v1::ListLinesResponse, SourcesError> {
        let functions = self.info()?.lines_within(range)?;
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

    /// Returns all places that `point` stands for, with the variables there.
    ///
    /// # Errors
    /// When there are none, or the debug information is damaged.
    pub fn variables(&self, point: &Point) -> Result<v1::ListVariablesResponse, SourcesError> {
        let info = self.info()?;
        let places = self.places_of(&info, point)?.into_iter().map(|place| {
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
            Location::Static(_) if self.module().is_some() => (String::new(), OF_MODULE),
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

    /// Returns an address of the debug information as [`address`](Self::address) does. If no definition can name it,
    /// returns the bare address, or a name that several symbols share.
    pub(crate) fn named(&self, at: Gva) -> String {
        self.address(at).unwrap_or_else(|why| match why {
            Unnameable::Nowhere(at) => at.to_string(),
            Unnameable::Shared { place, .. } => place,
        })
    }

    /// Returns an address of the debug information in the syntax of definitions: `SYMBOL+0x10`, `MODULE:SYMBOL+0x10`, or `_stext+0x1234`
    /// if several symbols of the kernel have the name of the symbol that contains it.
    ///
    /// # Errors
    /// When no definition can name it.
    pub(crate) fn address(&self, at: Gva) -> Result<String, Unnameable> {
        let at = self.loaded(at);
        let symbols = self.symbols();
        let (symbol, offset) = symbols.containing(at).ok_or(Unnameable::Nowhere(at))?;
        let is_alone = symbols
            .lookup(symbol.name)
            .is_ok_and(|it| it.addr == symbol.addr);
        let beginning = BEGINNINGS
            .into_iter()
            .filter(|_| !is_alone && self.module().is_none())
            .find_map(|name| {
                let offset = at.0.checked_sub(symbols.lookup(name).ok()?.addr.0)?;
                Some(format!("{name}+{offset:#x}"))
            });
        if let Some(place) = beginning {
            return Ok(place);
        }
        let name = self.qualified(symbol.name);
        let place = match offset {
            0 => name,
            _ => format!("{name}+{offset:#x}"),
        };
        match is_alone {
            true => Ok(place),
            false => Err(Unnameable::Shared {
                name: symbol.name.to_owned(),
                place,
            }),
        }
    }

    /// Returns `symbol` with the name of its module, if it has one.
    pub(crate) fn qualified(&self, symbol: &str) -> String {
        match self.module() {
            Some(module) => format!("{module}:{symbol}"),
            None => symbol.to_owned(),
        }
    }
}
