//! Facts about the guest's kernel that decide what can be probed: its image, and its modules as last read.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use hvprobe_arch::Gva;
use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::paging::PageTables;
use hvprobe_linux::image::KernelImage;
use hvprobe_linux::modules::{Module, ModuleError, ModuleList, ModuleReader, ModuleState};
use hvprobe_linux::unwind::Unwinder;
use hvprobe_spec::ProbeSpec;
use hvprobe_spec::definition::Target;
use tracing::warn;

use crate::guest::readers::KernelReaders;
use crate::plan::kernel::Probeable;

/// Facts about the kernel.
#[derive(Debug)]
pub(crate) struct GuestKernel {
    pub(crate) image: Arc<KernelImage>,
    /// Reader of the guest's modules, or why the type information does not suffice for one.
    pub(crate) module_reader: Result<ModuleReader, ModuleError>,
    /// The guest's modules as last read; `None` if they have not been read or cannot be read.
    modules: Option<ModuleList>,
    /// Whether detours can read memory, according to the image.
    readable: bool,
    /// Addresses of the `struct module` of modules whose text became final while we watched. Needed until the
    /// modules are live.
    formed: BTreeSet<Gva>,
}

impl GuestKernel {
    pub(crate) fn new(image: Arc<KernelImage>) -> Self {
        let module_reader = ModuleReader::new(&image);
        if let Err(error) = &module_reader {
            warn!(%error, "modules cannot be probed");
        }
        Self {
            readable: KernelReaders::may_be_in(&image),
            image,
            module_reader,
            modules: None,
            formed: BTreeSet::new(),
        }
    }

    /// Returns what can be probed.
    pub(crate) fn probeable(&self) -> Probeable<'_> {
        Probeable {
            image: &self.image,
            modules: self.modules.as_ref(),
            formed: &self.formed,
            keeps_module_types: self
                .module_reader
                .as_ref()
                .is_ok_and(ModuleReader::has_types),
            readable: self.readable,
        }
    }

    /// Returns whether the target of `spec` may be in a module: whether it is a pattern, or is not in the image.
    pub(crate) fn may_be_of_a_module(&self, spec: &ProbeSpec) -> bool {
        match &spec.definition.target {
            Target::Address(at) => !self.image.is_text(*at),
            Target::Functions { .. }
            | Target::Symbol {
                module: Some(_), ..
            } => true,
            Target::Symbol { name, .. } => self.image.symbols().candidates(name).is_empty(),
        }
    }

    /// Reads the guest's modules.
    pub(crate) fn read_modules(&mut self, tables: &PageTables, mem: &dyn PhysMemory) {
        let Ok(reader) = &self.module_reader else {
            return;
        };
        match reader.read(tables, mem) {
            Ok(modules) => {
                self.formed
                    .retain(|at| modules.iter().any(|module| module.address() == *at));
                self.modules = Some(modules);
            }
            Err(error) => {
                warn!(%error, "the guest's modules cannot be read");
                self.modules = None;
            }
        }
    }

    /// Returns ranges of return addresses (start excluded, end included). If a task's stack contains one of these
    /// addresses, not all calls of the task can be found on that stack. The ranges are:
    ///
    /// - `rewind_stack_and_make_dead` (`rewind_stack_do_exit` before 5.17), with which the kernel leaves the stack
    ///   of a task that it ends after an error (arch/x86/entry/entry_64.S);
    /// - the trampolines of the kernel's own tracers ([`hvprobe_linux::unwind`]).
    pub(crate) fn ask_all(&self) -> Vec<Range<Gva>> {
        let symbols = self.image.symbols();
        // The call is the function's last instruction, so its return address is the function's end.
        let left = ["rewind_stack_and_make_dead", "rewind_stack_do_exit"].into_iter();
        let left = left.filter_map(|name| symbols.lookup(name).ok());
        let left = left.map(|it| it.addr..it.addr.wrapping_add(it.size));
        let taken = [
            "return_to_handler",
            "arch_rethook_trampoline",
            "__kretprobe_trampoline",
            "kretprobe_trampoline",
        ];
        let taken = taken
            .into_iter()
            .filter_map(|name| symbols.address_of(name));
        left.chain(taken.map(|at| at.wrapping_sub(1)..at)).collect()
    }

    /// Returns an unwinder for the kernel's stacks, if the kernel has the tables.
    pub(crate) fn unwinder(&self) -> Option<Unwinder> {
        let orc = self.image.orc().ok()?;
        let reader = self.module_reader.as_ref().ok();
        let modules = reader.and_then(ModuleReader::unwind_tables);
        Some(Unwinder::new(Arc::clone(orc), modules))
    }

    /// Reads the types of `module`, unless they have been read. `module` is one of the modules as last read.
    pub(crate) fn read_types(&self, module: &Module, tables: &PageTables, mem: &dyn PhysMemory) {
        if let Ok(reader) = &self.module_reader
            && let Some(modules) = &self.modules
            && let Ok(kernel) = self.image.types()
        {
            reader.read_types(modules, module, kernel, tables, mem);
        }
    }

    /// Returns the build id of the loaded `module`, if the guest's kernel keeps it.
    pub(crate) fn build_id(
        &self,
        module: &Module,
        tables: &PageTables,
        mem: &dyn PhysMemory,
    ) -> Option<Vec<u8>> {
        let reader = self.module_reader.as_ref().ok()?;
        reader.build_id(module, tables, mem)
    }

    /// Notes that the module whose `struct module` is at `formed` has just got its final text.
    pub(crate) fn note_formed(&mut self, formed: Option<Gva>) {
        self.formed.extend(formed);
    }

    /// Returns whether no formed module contains `at`: it is in no module, or in one that is being unloaded or not
    /// formed yet. `at` must be outside the image's text.
    pub(crate) fn is_unloaded(&self, at: Gva) -> bool {
        let modules = self.modules.as_ref();
        let module = modules.and_then(|modules| modules.containing(at));
        module.is_none_or(|module| {
            matches!(module.state(), ModuleState::Going | ModuleState::Unformed)
        })
    }

    /// Forgets the modules, because another kernel runs.
    pub(crate) fn forget_modules(&mut self) {
        self.modules = None;
        self.formed.clear();
    }
}
