//! Work of a machine when the kernel's text is final: it determines how to read the kernel, finds the kernel's #BP
//! entry in `idt-gate`, and plants the pending probes.

use hvprobe_arch::mem::PhysMemory;
use hvprobe_arch::paging::PageTables;
use hvprobe_arch::{Gpa, Gva};
use hvprobe_engine::{Refused, StopError};
use hvprobe_hit::KernelView;
use hvprobe_linux::image::{KernelImage, TaskLayout};
use hvprobe_spec::ProbeId;
use hvprobe_vm::CatchMode;
use kvm_bindings::kvm_sregs;
use tracing::{error, info, warn};

use crate::crash::tables;
use crate::gate::Gate;
use crate::guest::Guest;
use crate::machine::Machine;
use crate::tripwire::Tripwire;

impl Machine {
    /// Plants the pending probes, and releases the held `vcpu`, which hit the tripwire. Returns the reason if the
    /// machine cannot continue.
    pub(crate) fn text_final(&self, vcpu: usize, sregs: &kvm_sregs) -> Result<(), String> {
        let Some(tripwire) = &self.shared.tripwire else {
            return Ok(());
        };
        let ram = &*self.shared.ram;
        let view = view(&self.image, tripwire, vcpu, sregs, ram)?;
        let mut head = None;
        if self.mode == CatchMode::IdtGate {
            let gate = Gate::find(view.tables, sregs, ram)
                .map_err(|error| format!("breakpoints cannot be caught on this host: {error}"))?;
            head = Some(gate.head);
            // The gate is set once, because the tripwire fires once.
            let _ = self.shared.gate.set(gate);
        }
        self.shared.control.set_view(view);
        let planted = self.registry().go_live(view, head, &Guest(&self.shared));
        match planted {
            Ok(refused) => self.report_refused(refused),
            Err(StopError::Ended) => return Ok(()),
            Err(error) => return Err(format!("probes cannot be planted: {error}")),
        }
        info!(machine = self.config.name, "kernel text is final");
        self.life().live = true;
        self.changed.notify_all();
        self.shared.control.release(vcpu);
        Ok(())
    }

    /// Notes that the guest has replaced its kernel, and forgets the view of the old one. The other kernel cannot
    /// be read.
    pub(crate) fn kernel_replaced(&self) {
        let before = std::mem::replace(&mut self.life().kernel_replaced, true);
        if !before {
            self.shared.control.forget_view();
            warn!(
                machine = self.config.name,
                "the guest runs another kernel now: its probes are gone"
            );
            self.changed.notify_all();
        }
    }

    /// Logs the probes that were refused when they were to be planted.
    pub(crate) fn report_refused(&self, refused: Vec<(ProbeId, Refused)>) {
        for (id, why) in refused {
            error!(machine = self.config.name, probe = %id, %why, "probe refused");
        }
    }
}

/// Returns the view of the kernel. `sregs` are the system registers of vCPU `vcpu`, which has hit the tripwire.
fn view(
    image: &KernelImage,
    tripwire: &Tripwire,
    vcpu: usize,
    sregs: &kvm_sregs,
    mem: &dyn PhysMemory,
) -> Result<KernelView, String> {
    let tables = own_tables(image, tripwire, tables(sregs.cr3, sregs.cr4), mem).ok_or(
        "the kernel's own page tables cannot be distinguished from those of its processes",
    )?;
    let task = TaskLayout::of_guest(image, tables, mem, sregs.gs.base);
    if let Err(why) = &task {
        warn!(%why, "events will not name the task, and return probes are refused");
    }
    let cpu_number = image.cpu_number().filter(|offset| {
        let mut number = [0; 4];
        let at = Gva(sregs.gs.base.wrapping_add(*offset));
        let read = tables.read(mem, at, &mut number);
        let is_right = read.is_ok() && usize::try_from(u32::from_le_bytes(number)) == Ok(vcpu);
        if !is_right {
            warn!(
                vcpu,
                "the number of a processor is not where the kernel should have it"
            );
        }
        is_right
    });
    Ok(KernelView {
        tables,
        task,
        cpu_number,
        idt: Gva(sregs.idt.base),
    })
}

/// Returns the kernel's own page tables, while a vCPU uses `current`. If the image has a symbol for them, returns
/// the tables at that symbol if they map the tripwire to the place where it was set, and otherwise `current`. If
/// the image has no data symbols, returns `current` if its top-level table is in the kernel image. Otherwise
/// `current` belongs to a process and has a copy of the kernel half: searches the image for the original, and
/// returns `None` if it is not found.
fn own_tables(
    image: &KernelImage,
    tripwire: &Tripwire,
    current: PageTables,
    mem: &dyn PhysMemory,
) -> Option<PageTables> {
    let right = |tables: &PageTables| {
        tables
            .translate(mem, tripwire.at())
            .is_ok_and(|mapping| mapping.gpa == tripwire.gpa())
    };
    if let Some(root) = image.init_top_pgt() {
        let own = PageTables { root, ..current };
        return Some(Some(own).filter(right).unwrap_or(current));
    }
    const PAGE: u64 = 4096;
    let extent = image.extent();
    let phys = |at: Gva| at.0.wrapping_sub(image.virt_to_phys_offset());
    let place = phys(extent.start)..phys(extent.end);
    if place.contains(&current.root.0) {
        return Some(current);
    }
    let process = kernel_half(current.root, mem)?;
    let pages = place.step_by(4096).map(|at| at - at % PAGE);
    let own = pages.map(Gpa).find(|root| {
        kernel_half(*root, mem).is_some_and(|own| {
            let mut pairs = own.iter().zip(&process);
            own.last() == process.last() && pairs.all(|(own, copy)| *own == 0 || own == copy)
        })
    });
    let own = own.map(|root| PageTables { root, ..current });
    own.filter(right)
}

/// Returns the entries of the top-level page table at `root` that map the kernel half.
fn kernel_half(root: Gpa, mem: &dyn PhysMemory) -> Option<Vec<u64>> {
    const HALF: u64 = 2048;
    let words = (0..HALF).step_by(8).map(|at| {
        let at = root.wrapping_add(HALF + at);
        mem.read_u64(at).ok()
    });
    words.collect()
}
