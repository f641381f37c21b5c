//! Return probes are registered and unregistered in any order. Meanwhile calls are in flight, are interrupted at
//! the entry and at the return, and return. Everything that is left of a probe is released as soon as possible.

use std::sync::Arc;

use hvprobe_arch::detour::{Instance, InstanceLayout, STUB, StackWords};
use hvprobe_hit::record::{NESTED_MAX, RecordSource};
use proptest::prelude::*;

use super::half::{reading, trapped};
use super::*;
use crate::code::keep::Keep;

const TASKS: usize = 2;
const FUNCTIONS: [&str; 3] = ["filler_000", "filler_002", "filler_004"];
/// Maximum depth of a task's calls.
const DEPTH: usize = 4;

#[derive(Clone, Copy, Debug)]
enum Step {
    Register {
        function: usize,
        followed: bool,
    },
    Unregister(usize),
    Toggle(usize),
    Optimize(bool),
    Call {
        task: usize,
        function: usize,
    },
    /// The function ends with a tail call of another.
    Tail {
        task: usize,
        function: usize,
    },
    Return(usize),
    /// The detour of the `source`th return probe runs for the task's top frame. It is interrupted before it has
    /// replaced the return address with its stub.
    HalfCall {
        task: usize,
        source: usize,
    },
    /// The function has returned to a stub, and was interrupted there.
    HalfReturn(usize),
    GoOn(usize),
    Die(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let (task, function) = (0..TASKS, 0..FUNCTIONS.len());
    prop_oneof![
        4 => (function.clone(), prop::bool::weighted(0.8))
            .prop_map(|(function, followed)| Step::Register { function, followed }),
        4 => (0..8_usize).prop_map(Step::Unregister),
        1 => (0..8_usize).prop_map(Step::Toggle),
        1 => any::<bool>().prop_map(Step::Optimize),
        6 => (task.clone(), function.clone())
            .prop_map(|(task, function)| Step::Call { task, function }),
        2 => (task.clone(), function).prop_map(|(task, function)| Step::Tail { task, function }),
        4 => task.clone().prop_map(Step::Return),
        2 => (task.clone(), 0..8_usize)
            .prop_map(|(task, source)| Step::HalfCall { task, source }),
        2 => task.clone().prop_map(Step::HalfReturn),
        3 => task.clone().prop_map(Step::GoOn),
        1 => task.prop_map(Step::Die),
    ]
}

/// Where a task was interrupted in code of ours.
enum Interrupted {
    /// It is about to replace the return address with `stub`, which belongs to `source`.
    Entering {
        source: Arc<RecordSource>,
        stub: Gva,
    },
    /// The task is at this stub.
    Leaving(Gva),
}

struct Task {
    cpu: Cpu,
    /// The real return addresses of its frames.
    frames: Vec<Gva>,
    interrupted: Option<Interrupted>,
    /// Address of its outermost frame's return address.
    stack: Gva,
    /// Address of the word that has a saved register while the task is interrupted.
    saved: Gva,
    current: Gva,
}

impl Task {
    fn slot(&self, depth: usize) -> Gva {
        Gva(self.stack.0 - 0x20 * depth as u64)
    }

    fn top(&self) -> Option<Gva> {
        Some(self.slot(self.frames.len().checked_sub(1)?))
    }
}

struct Model {
    rig: Rig,
    probes: Vec<ProbeId>,
    tasks: Vec<Task>,
    calls: u64,
}

impl Model {
    fn new() -> Self {
        let mut rig = Rig::optimizing();
        rig.registry.code.keep = Keep::NOTHING;
        let second = rig.second_task();
        let tasks = [rig.guest.gs_base(), second].into_iter().enumerate();
        let tasks = tasks.map(|(n, gs_base)| {
            let vcpu = u32::try_from(n).expect("small");
            let mut cpu = Cpu::numbered(&rig, vcpu);
            cpu.gs_base = gs_base;
            let offset = 0x200 * n as u64;
            Task {
                cpu,
                frames: Vec::new(),
                interrupted: None,
                stack: Gva(STACK.0 - offset),
                saved: Gva(STACK.0 + 0x100 + 8 * n as u64),
                current: DATA_VIRT.wrapping_add(0x100 * (1 + n as u64)),
            }
        });
        Self {
            tasks: tasks.collect(),
            rig,
            probes: Vec::new(),
            calls: 0,
        }
    }

    /// Returns the owner of the code at `stub`.
    fn owner(&self, stub: Gva) -> Arc<RecordSource> {
        let registry = &self.rig.registry;
        let ghosts = registry.code.ghost_sources.iter().cloned();
        let mut all = registry.code.sources.iter().chain(ghosts);
        let owns = |source: &Arc<RecordSource>| {
            let calls = source.followed();
            calls.is_some_and(|calls| calls.return_address(stub, &self.rig.guest.mem).is_some())
        };
        let owner = all.find(owns);
        owner.unwrap_or_else(|| panic!("a task goes on at {stub}, which belongs to nobody"))
    }

    /// Continues from `at`, to which the top frame of `task` has returned, until the real return address is
    /// reached.
    fn go_home(&mut self, task: usize, mut at: Gva) {
        let slot = self.tasks[task].top().expect("a frame");
        let real = self.tasks[task].frames.pop().expect("a frame");
        for _ in 0..2 * NESTED_MAX {
            if at == real {
                return;
            }
            if at == self.rig.trampoline() {
                let cpu = &mut self.tasks[task].cpu;
                cpu.regs.rsp = slot.0 + 8;
                cpu.regs.rip = at.0;
                assert_eq!(cpu.hit(at), RESUME);
                at = Gva(cpu.regs.rip);
                continue;
            }
            // Do what a stub does: call the code after all the stubs.
            assert_eq!(self.rig.byte(at), 0xe8, "no stub at {at}");
            let owner = self.owner(at);
            let calls = owner.followed().expect("a return probe");
            let to = calls.return_address(at, &self.rig.guest.mem);
            calls.release(at, &self.rig.guest.mem);
            at = to.expect("its instance");
            // That code returns by way of the slot.
            self.rig.guest.write(slot, &at.0.to_le_bytes());
        }
        panic!("a task goes round and round at {at}");
    }

    fn call(&mut self, task: usize, function: usize, tail: bool) {
        let entry = self.rig.at(FUNCTIONS[function], 0);
        let this = &mut self.tasks[task];
        if this.interrupted.is_some() {
            return;
        }
        if tail {
            let Some(slot) = this.top() else { return };
            if self.rig.byte(entry) == INT3 {
                assert_eq!(this.cpu.jump(entry, slot), RESUME);
            }
        } else if this.frames.len() < DEPTH {
            let real = caller(&self.rig, self.calls);
            self.calls += 1;
            let slot = this.slot(this.frames.len());
            this.frames.push(real);
            if self.rig.byte(entry) == INT3 {
                assert_eq!(this.cpu.call(&self.rig, entry, slot, real), RESUME);
            } else {
                self.rig.guest.write(slot, &real.0.to_le_bytes());
            }
        }
    }

    /// Returns the address of the word in which the instance of `stub` stores the slot of its frame.
    fn slot_word(source: &RecordSource, stub: Gva) -> hvprobe_arch::Gpa {
        let calls = source.followed().expect("a return probe");
        let index = stub.offset_from(calls.stubs).expect("a stub") / u64::from(STUB);
        let stride = calls.layout.stride() as u64;
        calls.at.wrapping_add(index * stride + InstanceLayout::SLOT)
    }

    fn half_call(&mut self, task: usize, source: usize) {
        let mut sources: Vec<_> = self.rig.registry.code.sources.iter().collect();
        sources.sort_by_key(|source| source.probe);
        let this = &mut self.tasks[task];
        if this.interrupted.is_some() || sources.is_empty() {
            return;
        }
        let source = sources.swap_remove(source % sources.len());
        let (Some(calls), Some(slot)) = (source.followed(), this.top()) else {
            return;
        };
        let mem = &self.rig.guest.mem;
        let entry = Instance {
            caller: self.rig.word(slot),
            generation: 0,
            return_address: self.rig.word(slot),
            slot,
            task: this.current,
            tsc: 1,
            cpu: Some(0),
            regs: regs(),
            stack: StackWords::default(),
        };
        // A frame that returns through the trampoline must not get a stub, and vice versa.
        let to = calls.enter(&entry, mem).filter(|stub| {
            let apart = entry.return_address != self.rig.trampoline();
            if !apart {
                calls.release(*stub, mem);
            }
            apart
        });
        if let Some(stub) = to {
            let word = Self::slot_word(&source, stub);
            hvprobe_arch::mem::PhysMemory::write_u64(mem, word, 0).expect("in memory");
            // The stub's address on the stack stands for an address in the task's detour, which leads to the
            // instances.
            self.rig.guest.write(this.saved, &stub.0.to_le_bytes());
            this.interrupted = Some(Interrupted::Entering { source, stub });
        }
    }

    fn half_return(&mut self, task: usize) {
        let this = &mut self.tasks[task];
        let Some(slot) = this.top() else { return };
        let at = self.rig.word(slot);
        let is_stub = at >= hvprobe_hit::region::KERNEL_WINDOW.start
            && at < hvprobe_hit::region::KERNEL_WINDOW.end;
        if this.interrupted.is_none() && is_stub && at != self.rig.trampoline() {
            // The interrupt's frame overwrites the slot.
            self.rig.guest.write(slot, &0x18_u64.to_le_bytes());
            self.rig.guest.write(this.saved, &at.0.to_le_bytes());
            this.interrupted = Some(Interrupted::Leaving(at));
        }
    }

    fn go_on(&mut self, task: usize) {
        let this = &mut self.tasks[task];
        let Some(interrupted) = this.interrupted.take() else {
            return;
        };
        self.rig.guest.write(this.saved, &[0; 8]);
        match interrupted {
            Interrupted::Entering { source, stub } => {
                let (word, slot) = (Self::slot_word(&source, stub), this.top().expect("a frame"));
                hvprobe_arch::mem::PhysMemory::write_u64(&self.rig.guest.mem, word, slot.0)
                    .expect("in memory");
                self.rig.guest.write(slot, &stub.0.to_le_bytes());
            }
            Interrupted::Leaving(at) => self.go_home(task, at),
        }
    }

    fn ret(&mut self, task: usize) {
        let this = &self.tasks[task];
        if let (None, Some(slot)) = (&this.interrupted, this.top()) {
            let at = self.rig.word(slot);
            self.go_home(task, at);
        }
    }

    fn die(&mut self, task: usize) {
        let at = self.rig.at("do_task_dead", 0);
        let this = &mut self.tasks[task];
        if this.interrupted.is_some() || self.rig.byte(at) != INT3 {
            return;
        }
        this.cpu.regs = regs();
        this.cpu.regs.rsp = this.slot(DEPTH + 1).0;
        assert_eq!(this.cpu.hit(at), RESUME);
        this.frames.clear();
    }

    fn take(&mut self, step: &Step) {
        let pick = |n: usize, probes: &[ProbeId]| probes.get(n % probes.len().max(1)).copied();
        match *step {
            Step::Register { function, followed } => {
                if self.probes.len() < 8 {
                    let definition = format!("r2 {}", FUNCTIONS[function]);
                    let spec = if followed {
                        trapped(&definition)
                    } else {
                        reading(&definition)
                    };
                    let ids = self.rig.register(&[spec]);
                    self.probes.extend(ids);
                }
            }
            Step::Unregister(n) => {
                if let Some(id) = pick(n, &self.probes) {
                    self.rig.unregister(&[id]).expect("it stops");
                    self.probes.retain(|probe| *probe != id);
                }
            }
            Step::Toggle(n) => {
                if let Some(id) = pick(n, &self.probes) {
                    let on = self.rig.info(id).disabled;
                    let guest = &*self.rig.guest;
                    let result = self.rig.registry.set_enabled(&[id], on, guest);
                    result.expect("it stops");
                }
            }
            Step::Optimize(on) => {
                let result = self.rig.registry.set_optimization(on, &*self.rig.guest);
                result.expect("it stops");
            }
            Step::Call { task, function } => self.call(task, function, false),
            Step::Tail { task, function } => self.call(task, function, true),
            Step::Return(task) => self.ret(task),
            Step::HalfCall { task, source } => self.half_call(task, source),
            Step::HalfReturn(task) => self.half_return(task),
            Step::GoOn(task) => self.go_on(task),
            Step::Die(task) => self.die(task),
        }
    }
}

fn run(steps: &[Step]) {
    let mut model = Model::new();
    for step in steps {
        model.take(step);
    }
    for task in 0..TASKS {
        model.go_on(task);
        while !model.tasks[task].frames.is_empty() {
            model.ret(task);
        }
    }
    let guest = Rc::clone(&model.rig.guest);
    model
        .rig
        .registry
        .unregister_all(&*guest)
        .expect("it stops");
    // No task is in our code any more, and nothing is kept.
    guest.write(DATA_VIRT.wrapping_add(0x400), &[0; 0x800]);
    let last = model.rig.one("p filler_010");
    model.rig.unregister(&[last]).expect("it stops");
    let last = model.rig.one("p filler_010");
    let registry = &model.rig.registry;
    assert!(
        registry.code.ghost_sources.is_empty(),
        "what nobody can come to is kept"
    );
    assert_eq!(registry.shared.returns.unmatched.load(Ordering::Relaxed), 0);
    model.rig.unregister(&[last]).expect("it stops");
}

proptest! {
    #[test]
    fn every_call_comes_home_whatever_comes_and_goes(steps in prop::collection::vec(step(), 1..80)) {
        run(&steps);
    }
}

#[test]
fn a_call_that_is_seen_only_through_another_probes_instance_comes_home() {
    // The second probe's detour has read the first one's stub from the stack, and done nothing more.
    run(&[
        Step::Register {
            function: 0,
            followed: true,
        },
        Step::Call {
            task: 0,
            function: 0,
        },
        Step::Register {
            function: 0,
            followed: true,
        },
        Step::HalfCall { task: 0, source: 1 },
        Step::Unregister(0),
        Step::Register {
            function: 1,
            followed: true,
        },
        Step::Register {
            function: 2,
            followed: true,
        },
        Step::GoOn(0),
        Step::Return(0),
    ]);
}

#[test]
fn a_call_that_is_sent_on_to_code_of_a_probe_that_has_left_comes_home() {
    // The call was to return through the trampoline to the stub of a probe, but that probe leaves before.
    run(&[
        Step::Call {
            task: 0,
            function: 0,
        },
        Step::Register {
            function: 2,
            followed: false,
        },
        Step::Register {
            function: 0,
            followed: true,
        },
        Step::HalfCall { task: 0, source: 0 },
        Step::GoOn(0),
        Step::Tail {
            task: 0,
            function: 2,
        },
        Step::Unregister(1),
        Step::Register {
            function: 0,
            followed: false,
        },
        Step::Unregister(0),
    ]);
}
