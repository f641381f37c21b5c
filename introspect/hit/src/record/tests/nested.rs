//! A function that another one jumps to: its return probe finds the stub of the other's probe on the stack.

use hvprobe_arch::detour::{BY_HOST, Call, EntryCapture, InstanceLayout, Instances, StackWords};

use hvprobe_arch::Regs;

use super::*;
use crate::followed::Followed;
use crate::region::KERNEL_WINDOW;

const CALLER: Gva = Gva(0xffff_ffff_8100_0123);
const INSTANCES: Gpa = Gpa(0x800);
/// Time at which the first probe saw the call.
const TSC: u64 = 1000;

/// Returns a machine in which the first instance of the first probe belongs to a call that began at `tsc`, by
/// the clock of `cpu`.
fn machine(tsc: u64, cpu: u32) -> (Memory, RecordSources) {
    let mem = Memory::new(0x1000);
    let entry = EntryCapture {
        registers: RegisterSet::from_iter([]),
        stack: Vec::new(),
        current: None,
        cpu: Some(0),
    };
    let layout = InstanceLayout::new(&entry).unwrap();
    for (offset, word) in [
        (InstanceLayout::RETURN, CALLER.0),
        (InstanceLayout::ENTRY_TSC, tsc),
        (InstanceLayout::ENTRY_CPU, u64::from(cpu) << 32),
    ] {
        mem.write_u64(INSTANCES.wrapping_add(offset), word).unwrap();
    }
    let followed = Followed {
        instances: Instances {
            at: Gva(0),
            count: 1,
            free: Gva(0),
        },
        layout,
        at: INSTANCES,
        free: INSTANCES,
        stubs: KERNEL_WINDOW.start,
        code_len: 16,
    };
    let what = What {
        at: AT,
        number: 1,
        capture: Capture::default(),
        followed: Some((entry, Arc::new(followed))),
    };
    let tallies = Tallies {
        lost: LOST,
        vetoed: VETOED,
        missed: MISSED,
    };
    let counters = Arc::new(Counters::new(1));
    let words = CounterPlace(Gva(0));
    let source = RecordSource::new(ProbeId(1), what, Arc::default(), counters, words, tallies);
    let sources = RecordSources::default();
    sources.add(Arc::new(source.unwrap()));
    (mem, sources)
}

/// Returns the real return address of a call that the second probe saw at `tsc`, by the clock of `cpu`, and that
/// found `found` on its stack.
fn caller((mem, sources): &(Memory, RecordSources), found: Gva, tsc: u64, cpu: u32) -> Gva {
    let call = Call {
        id: 1,
        return_address: found,
        tsc,
        cpu: Some(cpu),
        regs: Regs::default(),
        stack: StackWords::default(),
    };
    sources.now().return_address(&call, mem)
}

#[test]
fn a_stub_that_leaves_leaves_the_caller() {
    let stub = KERNEL_WINDOW.start;
    let (mem, sources) = machine(TSC, 0);
    // The call found the stub of another function's probe in place of its return address.
    for word in [InstanceLayout::RETURN, InstanceLayout::CALLER] {
        mem.write_u64(INSTANCES.wrapping_add(word), stub.0).unwrap();
    }
    let slot = INSTANCES.wrapping_add(InstanceLayout::SLOT);
    mem.write_u64(slot, 0xffff_c900_0000_0000).unwrap();
    let source = sources.get(ProbeId(1)).unwrap();
    let beyond = |to| if to == stub { CALLER } else { to };
    source.followed().unwrap().redirect(&mem, beyond);
    for word in [InstanceLayout::RETURN, InstanceLayout::CALLER] {
        assert_eq!(mem.read_u64(INSTANCES.wrapping_add(word)), Ok(CALLER.0));
    }
}

#[test]
fn the_caller_is_that_of_the_call_or_nobody() {
    let stub = KERNEL_WINDOW.start;
    for cpu in [0, BY_HOST] {
        let there = machine(TSC, cpu);
        for tsc in [TSC, TSC + 5] {
            assert_eq!(caller(&there, stub, tsc, cpu), CALLER);
        }
        // Another call has the instance by now.
        assert_eq!(caller(&there, stub, TSC - 1, cpu), Gva(0));
        // The two times are from different clocks.
        let other = if cpu == 0 { BY_HOST } else { 0 };
        assert_eq!(caller(&there, stub, TSC + 5, other), Gva(0));
        // A stub of no probe, and no stub at all.
        assert_eq!(caller(&there, stub.wrapping_add(64), TSC, cpu), Gva(0));
        assert_eq!(caller(&there, AT, TSC, cpu), AT);
    }
}
