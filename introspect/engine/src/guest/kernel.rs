//! The guest's kernel, as far as it tells what can be probed: its image, and its modules as they were
//! when they were last read.

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

/// What is known of the kernel.
#[derive(Debug)]
pub(crate) struct GuestKernel {
    pub(crate) image: Arc<KernelImage>,
    /// How to read the guest's modules, if its type information tells.
    pub(crate) module_reader: Result<ModuleReader, ModuleError>,
    /// The guest's modules, as they were when last read.
    modules: Option<ModuleList>,
    /// Whether detours can read memory, as far as the image tells.
    readable: bool,
    /// Where modules are whose text became final while we watched, though they are not live yet.
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

    /// What there is to be probed.
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

    /// Whether the image does not tell where `spec` is to go.
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

    /// Return addresses, behind the beginning of each range and as far as its end, that say that not all calls of a task
    /// can be found on its stack: of the function with which the kernel leaves the stack of a task that has gone wrong, to
    /// end the task, and what its own tracers put there (arch/x86/entry/entry_64.S, where the second is the name before
    /// 5.17, and [`hvprobe_linux::unwind`]).
    pub(crate) fn ask_all(&self) -> Vec<Range<Gva>> {
        let symbols = self.image.symbols();
        // The call is the last that it does: it would return to its end.
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

    /// What follows its stacks, if it has tables for that.
    pub(crate) fn unwinder(&self) -> Option<Unwinder> {
        let orc = self.image.orc().ok()?;
        let reader = self.module_reader.as_ref().ok();
        let modules = reader.and_then(ModuleReader::unwind_tables);
        Some(Unwinder::new(Arc::clone(orc), modules))
    }

    /// Reads the types of `module`, one of those that were last read, unless that was done.
    pub(crate) fn read_types(&self, module: &Module, tables: &PageTables, mem: &dyn PhysMemory) {
        if let Ok(reader) = &self.module_reader
            && let Some(modules) = &self.modules
            && let Ok(kernel) = self.image.types()
        {
            reader.read_types(modules, module, kernel, tables, mem);
        }
    }

    /// The module whose `struct module` is at `formed` has just got its final text.
    pub(crate) fn note_formed(&mut self, formed: Option<Gva>) {
        self.formed.extend(formed);
    }

    /// Whether `at`, which is in no image's text, is in no module's either, or in one that leaves.
    pub(crate) fn is_unloaded(&self, at: Gva) -> bool {
        let modules = self.modules.as_ref();
        let module = modules.and_then(|modules| modules.containing(at));
        module.is_none_or(|module| {
            matches!(module.state(), ModuleState::Going | ModuleState::Unformed)
        })
    }

    /// Another kernel runs: nothing is known of its modules.
    pub(crate) fn forget_modules(&mut self) {
        self.modules = None;
        self.formed.clear();
    }
}
