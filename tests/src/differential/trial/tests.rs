//! Tests that the comparison covers every part of the state after a run.

use expect_test::{Expect, expect};
use kvm_bindings::kvm_sregs;

use super::super::bench::PortAccess;
use super::*;
use hvprobe_arch::regs::Gpr;

fn left() -> Left {
    Left {
        end: End::At(Gva(0x1003)),
        regs: Regs {
            rip: 0x1003,
            ..Regs::default()
        },
        system: kvm_sregs::default(),
        arena: vec![0; 64],
        extended: Some(Box::new([0; 1024])),
        ports: Vec::new(),
    }
}

fn check(exactness: Exactness, change: impl FnOnce(&mut Left), expected: Expect) {
    let mut changed = left();
    change(&mut changed);
    let what = differences(&left(), &changed, exactness);
    expected.assert_eq(what.split(" registers: ").next().unwrap_or_default().trim());
}

fn check_exact(change: impl FnOnce(&mut Left), expected: Expect) {
    check(Exactness::Exact, change, expected);
}

#[test]
fn every_part_is_compared() {
    check_exact(|_| {}, expect![""]);
    check_exact(
        |left| left.end = End::At(Gva(0x1004)),
        expect!["end: At(Gva(0x1004)) instead of At(Gva(0x1003))"],
    );
    check_exact(|left| left.regs.r15 = 1, expect!["R15: 0x1 instead of 0x0"]);
    check_exact(
        |left| left.regs.rip = 0x1004,
        expect!["RIP: 0x1004 instead of 0x1003"],
    );
    check_exact(
        |left| left.regs.rflags = rflags::CF,
        expect!["RFLAGS: 0x1 instead of 0x0"],
    );
    check_exact(|left| left.system.cr2 = 1, expect!["system"]);
    check_exact(|left| left.system.gs.base = 1, expect!["system"]);
    check_exact(
        |left| left.arena[7] = 5,
        expect!["memory: at 0x7 of the arena 0x5 instead of 0x0"],
    );
    check_exact(
        |left| {
            left.extended = left.extended.take().map(|mut state| {
                state[40] = 1;
                state
            });
        },
        expect!["extended state: word 40 is 0x1 instead of 0x0"],
    );
    check_exact(
        |left| {
            left.ports.push(PortAccess {
                port: 0x80,
                written: None,
                len: 1,
            });
        },
        expect!["ports: [PortAccess { port: 80, written: None, len: 1 }] instead of []"],
    );
}

#[test]
fn what_is_not_determined_is_not_compared_and_the_rest_is() {
    let clock = |left: &mut Left| (left.regs.rax, left.regs.rdx) = (5, 6);
    check(Exactness::Clock, clock, expect![""]);
    let upper = |left: &mut Left| left.regs.rax = 1 << 32;
    check(
        Exactness::Clock,
        upper,
        expect!["Rax: 0x100000000 instead of 0x0"],
    );
    let random = |left: &mut Left| {
        left.regs.rbx = 5;
        left.regs.rflags = rflags::CF;
    };
    check(Exactness::Random(Gpr::Rbx), random, expect![""]);
    check(
        Exactness::Random(Gpr::Rcx),
        random,
        expect!["Rbx: 0x5 instead of 0x0"],
    );
}

/// Memory that is entirely absent, or entirely writable.
struct Ram {
    is_there: bool,
}

impl Memory for Ram {
    fn read_u64(&mut self, at: Gva) -> Result<u64, MemoryFault> {
        self.write_u64(at, 0).map(|()| 0)
    }

    fn write_u64(&mut self, at: Gva, _: u64) -> Result<(), MemoryFault> {
        let cause = WalkError::NotPresent { at, level: 1 };
        self.is_there.then_some(()).ok_or(MemoryFault { at, cause })
    }
}

#[test]
fn a_call_that_can_neither_push_nor_arrive_may_fault_for_either() {
    let regs = Regs {
        rip: 0x1000,
        rsp: 0x8008,
        ..Regs::default()
    };
    let at = Gva(0x8000_0000_0000_0000);
    let nowhere = MemoryFault {
        at,
        cause: WalkError::NonCanonical { at },
    };
    let absent = MemoryFault {
        at,
        cause: WalkError::NotPresent { at, level: 1 },
    };
    let page_fault = |cr2| End::Exception {
        vector: PF,
        error: Some(2),
        cr2: Some(cr2),
        rip: Gva(regs.rip),
    };
    let check = |end: &End, fault: &MemoryFault, is_there| {
        is_fault_of_push(end, fault, &regs, &mut Ram { is_there })
    };
    assert!(check(&page_fault(0x8000), &nowhere, false));
    assert!(!check(&page_fault(0x8000), &nowhere, true));
    assert!(!check(&page_fault(0x9000), &nowhere, false));
    assert!(!check(&page_fault(0x8000), &absent, false));
    assert!(!check(&End::At(Gva(0x8000)), &nowhere, false));
}
