//! The parts of the kernel that can be probed, and the owner of an address.

use std::collections::BTreeSet;

use hvprobe_arch::Gva;
use hvprobe_hit::region::KERNEL_WINDOW;
use hvprobe_linux::image::{Forbidden, KernelImage};
use hvprobe_linux::modules::{Module, ModuleList, ModuleState};
use hvprobe_linux::symbols::Symbols;
use hvprobe_spec::ProbeSpec;

use crate::refusal::Refused;

/// The parts of the kernel that can be probed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Probeable<'a> {
    pub(crate) image: &'a KernelImage,
    /// The guest's modules; `None` if they cannot be read.
    pub(crate) modules: Option<&'a ModuleList>,
    /// Addresses of the `struct module` of modules that may not be live yet, but whose text is final.
    pub(crate) formed: &'a BTreeSet<Gva>,
    /// Whether the kernel keeps the types of its modules.
    pub(crate) keeps_module_types: bool,
    /// Whether detours can read memory, according to the image.
    pub(crate) readable: bool,
}

impl<'a> Probeable<'a> {
    /// Refuses a kernel that overlaps the window for our own code. The window ends 16 MiB after
    /// `__START_KERNEL_map`. Kernels begin there, unless they are configured to begin lower (`LOAD_PHYSICAL_ADDR`
    /// in arch/x86/include/asm/page_types.h).
    pub(crate) fn check_window(&self) -> Result<(), Refused> {
        let extent = self.image.extent();
        let (at, end) = (extent.start, KERNEL_WINDOW.end);
        match at < end && extent.end > KERNEL_WINDOW.start {
            true => Err(Refused::LinkedLow { at, end }),
            false => Ok(()),
        }
    }

    /// Refuses `spec` if it records stacks and the kernel has no tables to unwind them.
    pub(crate) fn check_stacks(&self, spec: &ProbeSpec) -> Result<(), Refused> {
        match self.image.orc() {
            Err(why) if spec.actions.record_stacks() => Err(Refused::NoStacks(why)),
            _ => Ok(()),
        }
    }

    /// Returns whether the text of `module` is there and final, and stays until a hook reports its removal.
    pub(crate) fn is_loaded(&self, module: &Module) -> bool {
        match module.state() {
            ModuleState::Live => true,
            ModuleState::Coming => self.formed.contains(&module.address()),
            ModuleState::Going | ModuleState::Unformed => false,
        }
    }

    pub(crate) fn module_at(&self, at: Gva) -> Option<&'a Module> {
        let module = self.modules?.containing(at)?;
        self.is_loaded(module).then_some(module)
    }
}

/// The owner of a text address.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Owner<'a> {
    Image(&'a KernelImage),
    Module(&'a Module),
}

impl<'a> Owner<'a> {
    pub(crate) fn is_text(self, at: Gva) -> bool {
        match self {
            Self::Image(image) => image.is_text(at),
            Self::Module(module) => module.text().contains(&at),
        }
    }

    pub(crate) fn is_init_text(self, at: Gva) -> bool {
        match self {
            Self::Image(image) => image.is_init_text(at),
            Self::Module(module) => module.init_text().is_some_and(|text| text.contains(&at)),
        }
    }

    pub(crate) fn symbols(self) -> &'a Symbols {
        match self {
            Self::Image(image) => image.symbols(),
            Self::Module(module) => module.symbols(),
        }
    }

    pub(crate) fn forbidden(self, at: Gva) -> Option<Forbidden> {
        match self {
            Self::Image(image) => image.forbidden(at),
            Self::Module(module) => module.forbidden(at),
        }
    }

    pub(crate) fn forbidden_as_is(self, at: Gva, first: u8) -> Option<Forbidden> {
        match self {
            Self::Image(image) => image.forbidden_as_is(at, first),
            Self::Module(module) => module.forbidden_as_is(at, first),
        }
    }

    pub(crate) fn has_fixup(self, at: Gva) -> bool {
        match self {
            Self::Image(image) => image.has_fixup(at),
            Self::Module(module) => module.has_fixup(at),
        }
    }

    pub(crate) fn is_ftrace_site(self, at: Gva) -> bool {
        match self {
            Self::Image(image) => image.is_ftrace_site(at),
            Self::Module(module) => module.is_ftrace_site(at),
        }
    }
}
