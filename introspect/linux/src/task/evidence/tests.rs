use hvprobe_fixtures::{MODULE_FRAMES, MODULE_PAGES, MODULE_VIRT, Mapper, Memory, tables};

use super::*;

const SIZE: u64 = 0x400;
/// Offset in a task of its link on the list of tasks.
const LINK: u64 = 0x48;
/// Offset in a task of its two numbers.
const PID: u64 = 0x80;
/// Offset in a task of its name.
const COMM: u64 = 0x100;
/// Offset in per-CPU data of the pointer to the current task.
const CURRENT: u64 = 0x20;
const PER_CPU: Gva = Gva(MODULE_VIRT.0 + (MODULE_PAGES - 1) * 4096);
const CLUES: TaskClues = TaskClues {
    current_task: CURRENT,
    init_task: MODULE_VIRT,
    comm: COMM,
};

fn task(n: u64) -> Gva {
    MODULE_VIRT.wrapping_add(SIZE * n)
}

/// A guest that has tasks with given names and numbers. The second one is the current task.
struct Tasks(Memory);

impl Tasks {
    fn new(tasks: &[(&str, i32)]) -> Self {
        let mem = Memory::new(0);
        let mut mapper = Mapper::new(&mem);
        for n in 0..MODULE_PAGES {
            let page = n * 4096;
            mapper.map(
                MODULE_VIRT.wrapping_add(page),
                MODULE_FRAMES.wrapping_add(page),
            );
        }
        let guest = Self(mem);
        let link = |n: u64| task(n).wrapping_add(LINK);
        let count = tasks.len() as u64;
        for (n, (name, pid)) in (0..).zip(tasks) {
            guest.write(task(n), LINK, &link((n + 1) % count).0.to_le_bytes());
            guest.write(
                task(n),
                LINK + 8,
                &link((n + count - 1) % count).0.to_le_bytes(),
            );
            guest.write(task(n), PID, &pid.to_le_bytes());
            guest.write(task(n), PID + 4, &pid.to_le_bytes());
            guest.write(task(n), COMM, name.as_bytes());
            // An empty list, which is not the list of tasks.
            guest.write(task(n), 0x20, &task(n).wrapping_add(0x20).0.to_le_bytes());
            guest.write(task(n), 0x28, &task(n).wrapping_add(0x20).0.to_le_bytes());
        }
        guest.write(PER_CPU, CURRENT, &task(1).0.to_le_bytes());
        guest
    }

    fn booted() -> Self {
        Self::new(&[
            ("swapper/0", 0),
            ("swapper/0", 1),
            ("kthreadd", 2),
            ("rcu_gp", 3),
            ("kworker/0:0", 7),
        ])
    }

    fn write(&self, task: Gva, field: u64, bytes: &[u8]) {
        tables()
            .write(&self.0, task.wrapping_add(field), bytes)
            .unwrap();
    }

    fn look(&self) -> Guest<'_, Memory> {
        Guest {
            walker: Walker::new(tables()),
            mem: &self.0,
        }
    }
}

const LAYOUT: TaskLayout = TaskLayout {
    current_task: CURRENT,
    pid: PID,
    tgid: PID + 4,
    comm: COMM,
};

#[test]
fn tasks_show_where_they_have_their_numbers() {
    let guest = Tasks::booted();
    assert_eq!(guest.look().shows(CLUES), Ok(LAYOUT));
    assert!(guest.look().confirms(LAYOUT, PER_CPU.0));
}

#[test]
fn two_tasks_made_at_once_may_be_in_any_order() {
    let guest = Tasks::new(&[
        ("swapper/0", 0),
        ("swapper/0", 1),
        ("b", 9),
        ("kthreadd", 2),
    ]);
    assert_eq!(guest.look().shows(CLUES), Ok(LAYOUT));
}

#[test]
fn what_is_no_list_of_tasks_is_no_evidence() {
    let unknown = |what| Err(TaskUnknown::NoEvidence(what));
    // Too few tasks; a task without a name; a list that does not return to its head; a list that leads nowhere.
    let few = Tasks::new(&[("swapper/0", 0), ("init", 1), ("kthreadd", 2)]);
    assert_eq!(few.look().shows(CLUES), unknown("list"));
    let unnamed = Tasks::booted();
    unnamed.write(task(3), COMM, &[0; 16]);
    assert_eq!(unnamed.look().shows(CLUES), unknown("list"));
    let broken = Tasks::booted();
    broken.write(task(4), LINK, &task(2).wrapping_add(LINK).0.to_le_bytes());
    assert_eq!(broken.look().shows(CLUES), unknown("list"));
    let nowhere = Tasks::booted();
    nowhere.write(task(4), LINK, &1_u64.to_le_bytes());
    assert_eq!(nowhere.look().shows(CLUES), unknown("list"));
}

#[test]
fn numbers_that_may_be_others_are_no_evidence() {
    let unknown = Err(TaskUnknown::NoEvidence("numbers"));
    let twice = Tasks::booted();
    for n in 0..5 {
        let both = u64::from_le_bytes(twice.bytes(task(n).wrapping_add(PID)));
        twice.write(task(n), 0xc0, &both.to_le_bytes());
    }
    assert_eq!(twice.look().shows(CLUES), unknown);
    let same = Tasks::new(&[("swapper/0", 0), ("swapper/0", 1), ("a", 2), ("b", 2)]);
    assert_eq!(same.look().shows(CLUES), unknown);
    let thread = Tasks::booted();
    thread.write(task(3), PID + 4, &2_i32.to_le_bytes());
    assert_eq!(thread.look().shows(CLUES), unknown);
}

impl Tasks {
    fn bytes<const N: usize>(&self, at: Gva) -> [u8; N] {
        let mut bytes = [0; N];
        tables().read(&self.0, at, &mut bytes).unwrap();
        bytes
    }
}

#[test]
fn layout_that_does_not_find_the_first_process_does_not_fit() {
    let guest = Tasks::booted();
    for layout in [
        TaskLayout {
            current_task: CURRENT + 8,
            ..LAYOUT
        },
        TaskLayout {
            pid: PID - 4,
            ..LAYOUT
        },
        TaskLayout {
            tgid: PID + 8,
            ..LAYOUT
        },
        TaskLayout {
            comm: COMM + 8,
            ..LAYOUT
        },
    ] {
        assert!(!guest.look().confirms(layout, PER_CPU.0), "{layout:?}");
    }
    // The process has begun to run a program.
    guest.write(task(1), COMM, b"init\0\0\0\0\0");
    assert!(!guest.look().confirms(LAYOUT, PER_CPU.0));
}
