//! Random changes, by the user and by the guest, against a model of what must be in memory.

use std::collections::BTreeMap;

use hvprobe_arch::Gva;
use proptest::prelude::*;

use super::super::patch::GATE_PORT;
use super::*;

const PLACES: [&str; 6] = [
    "p filler_000",
    "p filler_001",
    "p filler_002",
    "p vfs_read+9",
    "p vfs_read+0xd",
    "p filler_003",
];
/// What the guest writes over its own code.
const REWRITTEN: u8 = 0x90;

#[derive(Clone, Debug)]
enum Step {
    /// Places, and whether disabled.
    Register(Vec<(usize, bool)>),
    /// Positions in the list of what is registered, modulo its length.
    Unregister(Vec<usize>),
    SetEnabled(Vec<usize>, bool),
    /// The guest writes the first byte of a place: its own code, or something else.
    GuestWrites(usize, bool),
    /// The next stop is refused.
    Unstoppable,
}

fn step() -> impl Strategy<Value = Step> {
    let chosen = || prop::collection::vec(any::<usize>(), 1..4);
    prop_oneof![
        4 => prop::collection::vec((0..PLACES.len(), any::<bool>()), 1..5).prop_map(Step::Register),
        2 => chosen().prop_map(Step::Unregister),
        3 => (chosen(), any::<bool>()).prop_map(|(which, on)| Step::SetEnabled(which, on)),
        1 => (0..PLACES.len(), any::<bool>()).prop_map(|(at, own)| Step::GuestWrites(at, own)),
        1 => Just(Step::Unstoppable),
    ]
}

/// One place: the guest's code and the probes there.
#[derive(Clone, Default)]
struct Place {
    at: Gva,
    /// The first byte of the guest's own code as it was built, and as it is now.
    built: u8,
    own: u8,
    /// The first byte when the first of the probes was registered.
    planned: u8,
    /// Whether each probe is disabled.
    probes: BTreeMap<ProbeId, bool>,
    armed: bool,
    /// The guest wrote over our int3.
    overwritten: bool,
    gone: bool,
}

impl Place {
    fn byte(&self) -> u8 {
        if self.armed && !self.overwritten {
            INT3
        } else {
            self.own
        }
    }

    fn is_gone(&self) -> bool {
        let as_left = if self.armed {
            !self.overwritten
        } else {
            self.own == self.planned
        };
        self.gone || !as_left
    }

    /// Arms or disarms; `None` when it has to be armed and cannot.
    fn settle(mut self) -> Option<Self> {
        let wanted = self.probes.values().any(|disabled| !disabled);
        if wanted && !self.armed && !self.gone {
            if self.own != self.planned {
                return None;
            }
            self.armed = true;
            self.overwritten = false;
        } else if !wanted && self.armed {
            self.armed = false;
            self.gone = self.overwritten;
        }
        if self.probes.is_empty() {
            self.gone = false;
        }
        Some(self)
    }
}

/// All places after a change, or `None` if one of them refuses it.
fn settled(places: Vec<Place>) -> Option<Vec<Place>> {
    places.into_iter().map(Place::settle).collect()
}

struct Model {
    rig: Rig,
    original: Vec<u8>,
    gate: GateHead,
    places: Vec<Place>,
}

impl Model {
    fn new() -> Self {
        let rig = Rig::with_gate();
        let places = PLACES.map(|definition| {
            let at = match definition.split_once("+") {
                Some(("p vfs_read", "9")) => rig.at("vfs_read", 9),
                Some(_) => rig.at("vfs_read", 0xd),
                None => rig.at(&definition[2..], 0),
            };
            let built = rig.byte(at);
            Place {
                at,
                built,
                own: built,
                ..Place::default()
            }
        });
        Self {
            original: rig.guest.mem.visible(),
            gate: rig.gate(),
            rig,
            places: places.into(),
        }
    }

    fn ids(&self) -> Vec<ProbeId> {
        let probes = self.places.iter().flat_map(|place| place.probes.keys());
        let mut ids: Vec<_> = probes.copied().collect();
        ids.sort();
        ids
    }

    fn pick(&self, which: &[usize]) -> Vec<ProbeId> {
        let ids = self.ids();
        let mut picked: Vec<_> = which
            .iter()
            .filter_map(|n| ids.get(n.checked_rem(ids.len())?).copied())
            .collect();
        picked.sort();
        picked.dedup();
        picked
    }

    fn take(&mut self, step: &Step) {
        match step {
            Step::Register(batch) => self.register(batch),
            Step::Unregister(which) => {
                let ids = self.pick(which);
                let mut places = self.places.clone();
                for place in &mut places {
                    place.probes.retain(|id, _| !ids.contains(id));
                }
                self.rig.unregister(&ids).expect("they exist");
                self.places = settled(places).expect("nothing is armed");
            }
            Step::SetEnabled(which, on) => {
                let ids = self.pick(which);
                let mut places = self.places.clone();
                for place in &mut places {
                    for (id, disabled) in &mut place.probes {
                        *disabled = if ids.contains(id) { !on } else { *disabled };
                    }
                }
                let guest = &*self.rig.guest;
                let result = self.rig.registry.set_enabled(&ids, *on, guest);
                match settled(places) {
                    Some(places) => {
                        result.expect("legal");
                        self.places = places;
                    }
                    None => {
                        result.expect_err("a place has changed");
                    }
                }
            }
            Step::GuestWrites(at, own) => {
                let place = &mut self.places[*at];
                place.own = if *own { place.built } else { REWRITTEN };
                place.overwritten = place.armed;
                self.rig.guest.write(place.at, &[place.own]);
            }
            Step::Unstoppable => {
                let ids = self.ids();
                self.rig.guest.refuse_stops(true);
                self.rig.unregister(&ids).expect_err("it does not stop");
                self.rig.disable(&ids).expect_err("it does not stop");
                self.rig.enable(&ids).expect_err("it does not stop");
                self.rig
                    .try_register(&specs(["p filler_100", "p filler_101"]))
                    .expect_err("it does not stop");
                self.rig.guest.refuse_stops(false);
            }
        }
    }

    fn register(&mut self, batch: &[(usize, bool)]) {
        let specs: Vec<_> = batch
            .iter()
            .map(|&(place, disabled)| ProbeSpec {
                disabled,
                ..spec(PLACES[place])
            })
            .collect();
        let blocked = |&(place, _): &(usize, bool)| {
            let place: &Place = &self.places[place];
            !place.probes.is_empty() && place.is_gone()
        };
        let first = batch.iter().position(blocked);
        let result = self.rig.try_register(&specs);
        if let Some(first) = first {
            let at = self.places[batch[first].0].at;
            assert_eq!(refusal(result), (first, Refused::Rewritten { at }));
            return;
        }
        for (&(place, disabled), id) in batch.iter().zip(result.expect("legal")) {
            let place = &mut self.places[place];
            if place.probes.is_empty() {
                place.planned = place.own;
            }
            place.probes.insert(id, disabled);
        }
        self.places = settled(self.places.clone()).expect("the text has just been looked at");
    }

    fn check(&self) {
        let mut expected = self.original.clone();
        let tables = self.rig.guest.view().tables;
        let mut put = |at: Gva, bytes: &[u8]| {
            let mapping = tables.translate(&self.rig.guest.mem, at).expect("mapped");
            let at = usize::try_from(mapping.gpa.0).expect("small");
            expected[at..][..bytes.len()].copy_from_slice(bytes);
        };
        for place in &self.places {
            put(place.at, &[place.byte()]);
        }
        if self.places.iter().any(|place| place.armed) {
            put(self.gate.at(), &GateHead::patch(GATE_PORT));
        }
        // The entry of the hidden region.
        let window = crate::hidden::KERNEL_WINDOW.start;
        let (entry, value) = tables
            .entry_at(&self.rig.guest.mem, window, 2)
            .expect("in memory");
        let entry = usize::try_from(entry.0).expect("small");
        if !self.ids().is_empty() {
            expected[entry..][..8].copy_from_slice(&value.to_le_bytes());
        }
        assert!(self.rig.guest.mem.visible() == expected);

        let table = self.rig.guest.table();
        for place in &self.places {
            let site = table.find(place.at).and_then(|index| table.site(index));
            assert_eq!(site.is_some(), place.armed);
            let enabled = place.probes.iter().filter(|(_, disabled)| !**disabled);
            if let Some(site) = site {
                let members = site.members.iter().map(|member| member.id);
                assert!(members.eq(enabled.map(|(id, _)| *id)));
            }
            for (id, disabled) in &place.probes {
                let info = self.rig.info(*id);
                assert_eq!(info.disabled, *disabled);
                assert_eq!(info.state == ProbeState::Gone, place.is_gone());
            }
        }
        let listed: Vec<_> = self.rig.list().iter().map(|info| info.id).collect();
        assert_eq!(listed, self.ids());
    }
}

proptest! {
    #[test]
    fn memory_is_the_guests_own_but_for_the_int3s_of_armed_sites(
        steps in prop::collection::vec(step(), 1..40)
    ) {
        let mut model = Model::new();
        for step in &steps {
            model.take(step);
            model.check();
        }
        model.rig.registry.unregister_all(&*model.rig.guest).expect("it stops");
        for place in &mut model.places {
            place.probes.clear();
        }
        model.places = settled(model.places.clone()).expect("nothing is armed");
        model.check();
    }
}
