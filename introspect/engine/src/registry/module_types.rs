//! The types of modules, for who wants to see them.

use std::sync::Arc;

use hvprobe_arch::mem::PhysMemory;
use hvprobe_linux::types::Types;

use crate::refusal::Refused;
use crate::registry::state::Registry;

impl Registry {
    /// The types of the module called `name`, as the guest has it loaded now.
    ///
    /// # Errors
    /// When it is not loaded, or nothing tells of its types.
    pub fn module_types(
        &mut self,
        name: &str,
        mem: &dyn PhysMemory,
    ) -> Result<Arc<Types>, Refused> {
        self.read_modules(mem);
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
}
