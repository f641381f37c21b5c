//! Checks [`Book`] against a model of machines, with steps in random order.

use proptest::prelude::*;

use super::*;

/// A step. Numbers choose among the existing items.
#[derive(Clone, Debug)]
enum Step {
    Open {
        keep: bool,
        take_over: Vec<usize>,
    },
    /// A request on a machine arrives.
    Begin {
        session: usize,
        machine: u64,
    },
    /// A request is done, or refused.
    Finish {
        which: usize,
        done: bool,
    },
    /// The client is gone, or has not renewed the session in time.
    End {
        session: usize,
    },
    /// A machine is cleaned up, or its clean-up fails.
    Release {
        which: usize,
        done: bool,
    },
    MachineEnds {
        machine: u64,
    },
    Sweep,
}

fn step() -> impl Strategy<Value = Step> {
    let one = 0..8_usize;
    prop_oneof![
        3 => (any::<bool>(), prop::collection::vec(one.clone(), 0..3))
            .prop_map(|(keep, take_over)| Step::Open { keep, take_over }),
        5 => (one.clone(), 0..3_u64)
            .prop_map(|(session, machine)| Step::Begin { session, machine }),
        5 => (one.clone(), any::<bool>()).prop_map(|(which, done)| Step::Finish { which, done }),
        2 => one.clone().prop_map(|session| Step::End { session }),
        4 => (one, any::<bool>()).prop_map(|(which, done)| Step::Release { which, done }),
        1 => (0..3_u64).prop_map(|machine| Step::MachineEnds { machine }),
        1 => Just(Step::Sweep),
    ]
}

/// Maximum number of sessions.
const SESSIONS: usize = 100;

impl Default for Book<()> {
    fn default() -> Self {
        Self::new(SESSIONS)
    }
}

/// The book, and a model of the rest.
#[derive(Default)]
struct World {
    book: Book<()>,
    opened: usize,
    /// Each thing that a machine has: the machine, and the owner of the thing.
    things: BTreeSet<(u64, Owner)>,
    ended: BTreeSet<u64>,
    /// Session of each owner, according to the answers of the book alone.
    sessions: BTreeMap<Owner, String>,
    requests: Vec<(u64, u64, Owner)>,
    releases: Vec<(u64, Vec<Owner>)>,
}

impl World {
    fn id(&self, number: usize) -> String {
        format!("s{}", number % self.opened.max(1))
    }

    fn open(&mut self, keep: bool, take_over: &[String]) -> Result<String, Unopened> {
        let id = format!("s{}", self.opened);
        let things = &self.things;
        let has = |machine, owner| things.contains(&(machine, owner));
        let owners = self.book.open(&id, (), keep, take_over, has)?;
        self.opened += 1;
        for other in self.sessions.values_mut() {
            if take_over.contains(other) {
                other.clone_from(&id);
            }
        }
        for owner in owners {
            let before = self.sessions.insert(owner, id.clone());
            assert!(
                before.is_none_or(|before| before == id),
                "{owner:?} was another's"
            );
        }
        Ok(id)
    }

    /// Cleans up `machine` for `owners`.
    fn let_go(&mut self, machine: u64, owners: &[Owner]) {
        for owner in owners {
            let id = &self.sessions[owner];
            let stage = self.book.get(id).map(|session| session.stage);
            assert_eq!(stage, Some(Stage::Ending), "{id} has not ended");
            self.things.remove(&(machine, *owner));
        }
        self.book.released(machine, owners);
    }

    fn sweep(&mut self) {
        let (things, ended) = (&self.things, &self.ended);
        let gone = self.book.sweep(
            |machine| !ended.contains(&machine),
            |machine, owner| things.contains(&(machine, owner)),
        );
        for Gone { id, owners } in gone {
            let left = things.iter().find(|(_, owner)| owners.contains(owner));
            assert_eq!(left, None, "{id} is gone");
            let coming = self.requests.iter().find(|it| owners.contains(&it.2));
            assert_eq!(coming, None, "{id} is gone");
        }
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::Open { keep, take_over } => {
                let take_over: Vec<_> = take_over.iter().map(|it| self.id(*it)).collect();
                // A session that takes over an unknown one is refused.
                let _opened = self.open(keep, &take_over);
            }
            Step::Begin { session, machine } => {
                let id = self.id(session);
                let begun = self.book.begin(&id, machine);
                let held = self.book.get(&id).is_some_and(|it| it.stage == Stage::Held);
                assert_eq!(begun.is_some(), held);
                if let Some((ticket, owner)) = begun {
                    self.requests.push((ticket, machine, owner));
                }
            }
            Step::Finish { which, done } => {
                if let Some(which) = which.checked_rem(self.requests.len()) {
                    self.finish(which, done);
                }
            }
            Step::End { session } => {
                let id = self.id(session);
                self.book.end(&id);
            }
            Step::Release { which, done } => {
                if let Some(which) = which.checked_rem(self.releases.len()) {
                    let (machine, owners) = self.releases.swap_remove(which);
                    if done {
                        self.let_go(machine, &owners);
                    } else {
                        let again = self.book.due_on(machine);
                        assert!(owners.iter().all(|owner| again.contains(owner)));
                        self.releases.push((machine, again));
                    }
                }
            }
            Step::MachineEnds { machine } => {
                self.things.retain(|(on, _)| *on != machine);
                self.ended.insert(machine);
            }
            Step::Sweep => self.sweep(),
        }
        self.releases.extend(self.book.due());
        let machines: BTreeSet<u64> = self.releases.iter().map(|(machine, _)| *machine).collect();
        assert_eq!(machines.len(), self.releases.len(), "one at a time");
    }

    fn finish(&mut self, which: usize, done: bool) {
        let (ticket, machine, owner) = self.requests.swap_remove(which);
        if done && !self.ended.contains(&machine) {
            self.things.insert((machine, owner));
        }
        self.book.finish(ticket);
    }

    /// Ends all sessions, and everything that is under way.
    fn close(&mut self) {
        let ids = |world: &Self, stage: Stage| -> Vec<String> {
            let all = world.book.all().into_iter();
            let these = all.filter(|(_, session)| session.stage == stage);
            these.map(|(id, _)| id.clone()).collect()
        };
        for id in ids(self, Stage::Held) {
            self.book.end(&id);
        }
        self.sweep();
        for id in ids(self, Stage::Kept) {
            let heir = self.open(false, &[id]).unwrap();
            assert_eq!(self.book.end(&heir), Some(Stage::Ending));
        }
        while !self.requests.is_empty() {
            self.finish(0, true);
        }
        self.releases.extend(self.book.due());
        while let Some((machine, owners)) = self.releases.pop() {
            self.let_go(machine, &owners);
            self.releases.extend(self.book.due());
        }
        self.sweep();
    }
}

proptest! {
    #[test]
    fn what_ends_leaves_nothing_and_what_is_held_or_kept_loses_nothing(
        steps in prop::collection::vec(step(), 0..80),
    ) {
        let mut world = World::default();
        for step in steps {
            world.take(step);
        }
        world.close();
        prop_assert!(world.things.is_empty(), "left: {:?}", world.things);
        prop_assert!(world.book.all().is_empty(), "{:?}", world.book);
        prop_assert!(!(0..3).any(|machine| world.book.knows(machine)));
    }
}

#[test]
fn what_lands_after_the_end_is_let_go_of() {
    let mut world = World::default();
    let id = world.open(false, &[]).unwrap();
    let (ticket, owner) = world.book.begin(&id, 1).unwrap();
    assert_eq!(world.book.end(&id), Some(Stage::Ending));
    assert_eq!(world.book.due(), [], "something is under way");
    assert_eq!(world.book.begin(&id, 1), None);
    world.things.insert((1, owner));
    world.book.finish(ticket);
    assert_eq!(world.book.due(), [(1, vec![owner])]);
    assert_eq!(world.book.due(), [], "it is told once");
    world.let_go(1, &[owner]);
    world.sweep();
    assert!(world.book.get(&id).is_none());
}

#[test]
fn what_lands_after_it_was_taken_over_is_the_heirs() {
    let mut world = World::default();
    let id = world.open(false, &[]).unwrap();
    let (ticket, owner) = world.book.begin(&id, 1).unwrap();
    let heir = world.open(false, std::slice::from_ref(&id)).unwrap();
    assert_eq!(world.book.end(&id), None, "it is gone");
    world.things.insert((1, owner));
    world.book.finish(ticket);
    assert_eq!(world.book.due(), [], "its heir is held");
    assert_eq!(world.book.end(&heir), Some(Stage::Ending));
    let due = world.book.due();
    assert!(due.len() == 1 && due[0].1.contains(&owner), "{due:?}");
}

#[test]
fn sessions_are_bounded_and_those_taken_over_make_room() {
    let mut world = World::default();
    for _ in 0..SESSIONS {
        world.open(false, &[]).unwrap();
    }
    assert_eq!(world.open(false, &[]), Err(Unopened::TooMany));
    let first = "s0".to_owned();
    world.open(false, &[first.clone(), first.clone()]).unwrap();
    assert_eq!(world.open(false, &[first]), Err(Unopened::NoSuch(0)));
}

#[test]
fn a_client_that_comes_back_again_and_again_does_not_grow() {
    let mut world = World::default();
    let mut id = world.open(true, &[]).unwrap();
    for _ in 0..100 {
        let (ticket, owner) = world.book.begin(&id, 1).unwrap();
        world.book.finish(ticket);
        world.things.clear();
        world.things.insert((1, owner));
        world.book.end(&id);
        id = world.open(true, &[id]).unwrap();
        assert!(world.book.get(&id).unwrap().owners.len() <= 2);
    }
}
