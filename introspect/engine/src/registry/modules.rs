//! Facts about the guest's modules for clients: their types, and which module an address is in.

use std::collections::BTreeMap;
use std::sync::Arc;

use hvprobe_arch::Gva;
use hvprobe_arch::mem::PhysMemory;
use hvprobe_linux::modules::Module;
use hvprobe_linux::types::Types;

use crate::refusal::Refused;
use crate::registry::state::Registry;

impl Registry {
    /// Returns the types of the `wanted` modules, as they are loaded now, by module name. Each wanted module comes
    /// with its position in the request. The types of all modules together are read within one budget of bytes.
    ///
    /// # Errors
    /// The position of the first module that is not loaded or whose types are not known, and the reason.
    pub fn module_types(
        &mut self,
        wanted: &[(usize, String)],
        mem: &dyn PhysMemory,
    ) -> Result<BTreeMap<String, Arc<Types>>, (usize, Refused)> {
        self.read_modules(mem);
        let types = |(position, name): &(usize, String)| {
            let types = self.types_of(name, mem);
            let types = types.map_err(|why| (*position, why))?;
            Ok((name.clone(), types))
        };
        wanted.iter().map(types).collect()
    }

    /// Returns the types of the module `name`, one of the modules as last read.
    fn types_of(&self, name: &str, mem: &dyn PhysMemory) -> Result<Arc<Types>, Refused> {
        let module = name.to_owned();
        let kernel = self.kernel.probeable();
        let loaded = kernel.modules.and_then(|modules| modules.get(name));
        let loaded = loaded.filter(|module| kernel.is_loaded(module));
        let (Some(live), Some(found)) = (&self.live, loaded) else {
            return Err(match &self.kernel.module_reader {
                Ok(_) => Refused::ModuleNotLoaded { module },
                Err(why) => Refused::ModulesHidden {
                    module,
                    why: why.clone(),
                },
            });
        };
        self.kernel.read_types(found, &live.view.tables, mem);
        let types = found.types().map(Arc::clone);
        types.map_err(|why| Refused::NoModuleTypes {
            module,
            why: Box::new(why),
        })
    }

    /// Returns the build id of the loaded `module`, if the guest's kernel keeps it.
    #[must_use]
    pub fn build_id(&self, module: &Module, mem: &dyn PhysMemory) -> Option<Vec<u8>> {
        let live = self.live.as_ref()?;
        self.kernel.build_id(module, &live.view.tables, mem)
    }

    /// Returns the module whose memory contains `at` now; `None` also if the modules cannot be read.
    #[must_use]
    pub fn module_at(&self, at: Gva, mem: &dyn PhysMemory) -> Option<Module> {
        let (Some(live), Ok(reader)) = (&self.live, &self.kernel.module_reader) else {
            return None;
        };
        reader.containing(at, &live.view.tables, mem).ok().flatten()
    }
}
