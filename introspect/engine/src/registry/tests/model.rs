//! Random changes by the user and the guest, and random hits, compared with a model of the memory and the
//! counters.

mod place;

use std::collections::BTreeMap;

use hvprobe_arch::trap::GATE_PORT;
use hvprobe_arch::{Gva, Regs};
use hvprobe_fixtures::{DATA_VIRT, STACK};
use proptest::prelude::*;

use super::*;
use crate::testing::regs;
use place::{Flavour, Place, Probe, REWRITTEN, SPOTS, Spot};

/// Maximum number of calls of a function that are followed at a time.
const MAXACTIVE: usize = 2;
/// Maximum depth of calls.
const DEPTH: usize = 5;

#[derive(Clone, Debug)]
enum Step {
    /// Spots, the kinds of probes there, and whether they are disabled.
    Register(Vec<(usize, Flavour, bool)>),
    /// Positions in the list of registered probes, modulo its length.
    Unregister(Vec<usize>),
    SetEnabled(Vec<usize>, bool),
    Switch(bool),
    Watch,
    /// The guest writes the first byte of a spot: its own code, or another byte.
    GuestWrites(usize, bool),
    /// The guest reaches a spot; if that is an entry, the function is called.
    Hit(usize),
    /// The function that was called last returns.
    Return,
    /// The task exits with all its calls.
    Die,
    /// The next stop is refused.
    Unstoppable,
}

fn step() -> impl Strategy<Value = Step> {
    let chosen = || prop::collection::vec(any::<usize>(), 1..4);
    let flavour = prop_oneof![
        Just(Flavour::Hits),
        Just(Flavour::HitsAndPost),
        Just(Flavour::Returns)
    ];
    let probe = (0..SPOTS.len(), flavour, any::<bool>());
    prop_oneof![
        5 => prop::collection::vec(probe, 1..5).prop_map(Step::Register),
        2 => chosen().prop_map(Step::Unregister),
        3 => (chosen(), any::<bool>()).prop_map(|(which, on)| Step::SetEnabled(which, on)),
        1 => any::<bool>().prop_map(Step::Switch),
        1 => Just(Step::Watch),
        1 => (0..SPOTS.len(), any::<bool>()).prop_map(|(at, own)| Step::GuestWrites(at, own)),
        8 => (0..SPOTS.len()).prop_map(Step::Hit),
        5 => Just(Step::Return),
        1 => Just(Step::Die),
        1 => Just(Step::Unstoppable),
    ]
}

/// A function that was called and has not returned.
#[derive(Clone, Debug)]
struct Frame {
    ret: Gva,
    /// Return probes that were hit at the entry, in the order of their registration.
    seen: Vec<ProbeId>,
}

struct Model {
    rig: Rig,
    cpu: Cpu,
    original: Vec<u8>,
    gate: GateHead,
    places: Vec<Place>,
    switched_on: bool,
    frames: Vec<Frame>,
    /// Number of calls so far.
    calls: u64,
    /// Whether there has been an armed boosted site or a return probe. A task may still return to their code, so
    /// our pages may stay mapped.
    pinned: bool,
}

/// Returns the address of the return address of the `n`th frame.
fn slot(n: usize) -> Gva {
    Gva(STACK.0 - 0x20 * n as u64)
}

impl Model {
    fn new() -> Self {
        let rig = Rig::with_gate();
        let places = SPOTS.iter().map(|spot| {
            let at = rig.at(spot.symbol, spot.offset);
            let built = rig.byte(at);
            Place {
                spot,
                at,
                built,
                own: built,
                planned: built,
                probes: BTreeMap::new(),
                armed: false,
                overwritten: false,
                gone: false,
            }
        });
        Self {
            places: places.collect(),
            original: rig.visible(),
            gate: rig.gate(),
            cpu: Cpu::new(&rig),
            rig,
            switched_on: true,
            frames: Vec::new(),
            calls: 0,
            pinned: false,
        }
    }

    fn probes(&self) -> impl Iterator<Item = (ProbeId, &Probe)> {
        let probes = self.places.iter().flat_map(|place| &place.probes);
        probes.map(|(id, probe)| (*id, probe))
    }

    fn ids(&self) -> Vec<ProbeId> {
        let mut ids: Vec<_> = self.probes().map(|(id, _)| id).collect();
        ids.sort();
        ids
    }

    fn has_return_probes(&self) -> bool {
        self.probes()
            .any(|(_, probe)| probe.flavour == Flavour::Returns)
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

    /// Marks as gone the places that the guest has rewritten, as a check of the text does.
    fn watched(&mut self) {
        for place in &mut self.places {
            place.gone |= !place.probes.is_empty() && place.is_gone();
        }
    }

    /// Returns the places after a change, or `None` if one of them refuses it.
    fn settled(&self, places: &[Place], switched_on: bool) -> Option<Vec<Place>> {
        let places = places.iter().cloned();
        places.map(|place| place.settle(switched_on)).collect()
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
                self.places = self
                    .settled(&places, self.switched_on)
                    .expect("nothing is armed");
            }
            Step::SetEnabled(which, on) => self.set_enabled(&self.pick(which), *on),
            Step::Switch(on) => {
                self.rig
                    .registry
                    .set_armed(*on, &*self.rig.guest)
                    .expect("what has changed is left alone");
                self.watched();
                self.places = self.settled(&self.places, *on).expect("all are known");
                self.switched_on = *on;
            }
            Step::Watch => {
                self.rig.registry.check_text(&*self.rig.guest);
                self.watched();
            }
            Step::GuestWrites(at, own) => {
                let place = &mut self.places[*at];
                place.own = if *own { place.built } else { REWRITTEN };
                place.overwritten = place.armed;
                self.rig.guest.write(place.at, &[place.own]);
            }
            Step::Hit(at) => self.hit(*at),
            Step::Return => self.ret(),
            Step::Die => self.die(),
            Step::Unstoppable => self.unstoppable(),
        }
        self.pinned |= self.has_return_probes()
            || self
                .places
                .iter()
                .any(|place| place.armed && place.mechanism() == Mechanism::Boosted);
    }

    fn register(&mut self, batch: &[(usize, Flavour, bool)]) {
        let flavour_at = |place: usize, flavour| match flavour {
            Flavour::Returns if !SPOTS[place].is_entry() => Flavour::Hits,
            flavour => flavour,
        };
        let specs: Vec<_> = batch
            .iter()
            .map(|&(place, flavour, disabled)| {
                let Spot { symbol, offset, .. } = &SPOTS[place];
                let spec = match flavour_at(place, flavour) {
                    Flavour::Hits => spec(&format!("p {symbol}+{offset}")),
                    Flavour::HitsAndPost => post(&format!("p {symbol}+{offset}")),
                    Flavour::Returns => spec(&format!("r{MAXACTIVE} {symbol}")),
                };
                ProbeSpec { disabled, ..spec }
            })
            .collect();
        let blocked = |(place, _, _): &(usize, Flavour, bool)| {
            let place = &self.places[*place];
            !place.probes.is_empty() && place.is_gone()
        };
        let first = batch.iter().position(blocked);
        let result = self.rig.try_register(&specs);
        if let Some(first) = first {
            let at = self.places[batch[first].0].at;
            assert_eq!(refusal(result), (first, Refused::Rewritten { at }));
            return;
        }
        let mut places = self.places.clone();
        for (&(place, flavour, disabled), id) in batch.iter().zip(result.expect("legal")) {
            let flavour = flavour_at(place, flavour);
            let place = &mut places[place];
            if place.probes.is_empty() {
                place.planned = place.own;
            }
            let probe = Probe {
                flavour,
                disabled,
                counts: Counts::default(),
            };
            place.probes.insert(id, probe);
        }
        let settled = self.settled(&places, self.switched_on);
        self.places = settled.expect("the text has just been looked at");
    }

    fn set_enabled(&mut self, ids: &[ProbeId], on: bool) {
        let mut places = self.places.clone();
        let mut refused = false;
        for place in &mut places {
            let is_gone = place.is_gone();
            for (_, probe) in place.probes.iter_mut().filter(|(id, _)| ids.contains(id)) {
                probe.disabled = !on;
                refused |= on && is_gone;
            }
        }
        let guest = &*self.rig.guest;
        let result = self.rig.registry.set_enabled(ids, on, guest);
        match self.settled(&places, self.switched_on) {
            Some(places) if !refused => {
                result.expect("legal");
                self.places = places;
            }
            _ => {
                result.expect_err("a place has changed");
            }
        }
    }

    fn unstoppable(&mut self) {
        let ids = self.ids();
        self.rig.guest.refuse_stops(true);
        self.rig.unregister(&ids).expect_err("it does not stop");
        self.rig.disable(&ids).expect_err("it does not stop");
        self.rig.enable(&ids).expect_err("it does not stop");
        let registry = &mut self.rig.registry;
        registry
            .set_armed(!self.switched_on, &*self.rig.guest)
            .expect_err("it does not stop");
        // The registry has checked the text before the stop.
        self.watched();
        self.rig
            .try_register(&specs(["p filler_100", "p filler_101", "r filler_102"]))
            .expect_err("it does not stop");
        self.rig.guest.refuse_stops(false);
    }

    fn hit(&mut self, at: usize) {
        let is_call = SPOTS[at].is_entry();
        let depth = self.frames.len();
        if self.places[at].byte() != INT3 || is_call && depth == DEPTH {
            return;
        }
        let (pc, next) = (self.places[at].at, self.places[at].next());
        let ret = self.rig.at("filler_300", self.calls % 16);
        // A call has its frame below all others; any other hit touches no frame.
        let top = if is_call {
            slot(depth)
        } else {
            slot(DEPTH + 5)
        };
        self.rig.guest.write(top, &ret.0.to_le_bytes());
        self.cpu.regs = Regs {
            rsp: top.0,
            ..regs()
        };
        assert_eq!(self.cpu.hit(pc), RESUME);
        let rip = Gva(self.cpu.regs.rip);
        match self.places[at].mechanism() {
            Mechanism::Emulated => assert_eq!(rip, next),
            mechanism => {
                let len = next.0 - pc.0;
                let copy = self.rig.guest.read::<4>(rip);
                assert_eq!(copy, [0x48, 0x8b, 0x47, 0x08]);
                let stepped = mechanism == Mechanism::Stepped;
                assert_eq!(self.cpu.handler.is_stepping(), stepped);
                if stepped {
                    assert_eq!(self.cpu.hit(rip.wrapping_add(len)), RESUME);
                    assert_eq!(self.cpu.regs.rip, next.0);
                }
            }
        }
        assert!(!self.cpu.handler.is_stepping());
        let in_flight = |id: &ProbeId| {
            let frames = self.frames.iter();
            frames.filter(|frame| frame.seen.contains(id)).count()
        };
        let mut seen = Vec::new();
        for (id, probe) in &mut self.places[at].probes {
            if probe.disabled {
                continue;
            }
            if probe.flavour != Flavour::Returns {
                probe.counts.hits += 1;
            } else if in_flight(id) == MAXACTIVE {
                probe.counts.missed += 1;
            } else {
                seen.push(*id);
            }
        }
        if is_call {
            self.calls += 1;
            self.frames.push(Frame { ret, seen });
        }
    }

    fn probe(&mut self, id: ProbeId) -> Option<&mut Probe> {
        self.places
            .iter_mut()
            .find_map(|place| place.probes.get_mut(&id))
    }

    /// Returns whether any probe still follows the `n`th frame.
    fn is_followed(&self, n: usize) -> bool {
        let ids = self.ids();
        self.frames[n].seen.iter().any(|id| ids.contains(id))
    }

    fn ret(&mut self) {
        let Some(top) = self.frames.len().checked_sub(1) else {
            return;
        };
        let followed = self.is_followed(top);
        let Frame { ret, seen } = self.frames.remove(top);
        let found = u64::from_le_bytes(self.rig.guest.read(slot(top)));
        assert_eq!(found == ret.0, !followed);
        if followed {
            self.cpu.regs = Regs {
                rsp: slot(top).0 + 8,
                rip: found,
                ..regs()
            };
            assert_eq!(self.cpu.hit(Gva(found)), RESUME);
            let back = Regs {
                rsp: slot(top).0 + 8,
                rip: ret.0,
                ..regs()
            };
            assert_eq!(self.cpu.regs, back);
        }
        let on = self.switched_on;
        for id in seen {
            match self.probe(id) {
                Some(probe) if on && !probe.disabled => probe.counts.hits += 1,
                Some(probe) => probe.counts.missed += 1,
                None => {}
            }
        }
    }

    fn die(&mut self) {
        if !self.has_return_probes() || !self.switched_on {
            return;
        }
        self.cpu.regs = regs();
        let at = self.rig.at("do_task_dead", 0);
        assert_eq!(self.cpu.hit(at), RESUME);
        for frame in std::mem::take(&mut self.frames) {
            for id in frame.seen {
                if let Some(probe) = self.probe(id) {
                    probe.counts.orphans += 1;
                }
            }
        }
    }

    fn check(&mut self) {
        let mut expected = self.original.clone();
        let mut found = self.rig.visible();
        let tables = self.rig.guest.view().tables;
        let offset = |at: Gva| {
            let mapping = tables.translate(&self.rig.guest.mem, at).expect("mapped");
            usize::try_from(mapping.gpa.0).expect("small")
        };
        let mut put = |at: Gva, bytes: &[u8]| {
            expected[offset(at)..][..bytes.len()].copy_from_slice(bytes);
        };
        for place in &self.places {
            put(place.at, &[place.byte()]);
        }
        let watched = self.has_return_probes() && self.switched_on;
        if watched {
            put(self.rig.at("do_task_dead", 0), &[INT3]);
        }
        let may_fault = |place: &Place| {
            let mut probes = place.probes.values();
            place.mechanism() != Mechanism::Emulated && probes.any(|probe| !probe.disabled)
        };
        let faults = self.switched_on && self.places.iter().any(may_fault);
        if faults {
            put(self.rig.at("fixup_exception", 0), &[INT3]);
            put(self.rig.at("page_fault_oops", 0), &[INT3]);
        }
        let mut probes = self.places.iter().flat_map(|place| place.probes.values());
        let planted = self.switched_on && probes.any(|probe| !probe.disabled);
        if planted {
            put(self.rig.at("machine_kexec", 0), &[INT3]);
        }
        let patch = GateHead::patch(GATE_PORT);
        if watched || planted || self.places.iter().any(|place| place.armed) {
            put(self.gate.at(), &patch);
        }
        // The stack belongs to the guest, except the return addresses.
        for bytes in [&mut expected, &mut found] {
            bytes[offset(DATA_VIRT.wrapping_add(0x400))..][..0x500].fill(0);
        }
        assert!(found == expected, "memory is not what it must be");
        for (n, frame) in self.frames.iter().enumerate() {
            let found = u64::from_le_bytes(self.rig.guest.read(slot(n)));
            assert_eq!(found == frame.ret.0, !self.is_followed(n));
        }

        let table = self.rig.guest.table();
        for place in &self.places {
            let site = table.find(place.at).and_then(|index| table.site(index));
            assert_eq!(site.is_some(), place.armed);
            let enabled = place.probes.iter().filter(|(_, probe)| !probe.disabled);
            if let Some(site) = site {
                let members = site.members.iter().map(|member| member.id);
                assert!(members.eq(enabled.map(|(id, _)| *id)));
            }
            for (id, probe) in &place.probes {
                let info = self.rig.info(*id);
                assert_eq!(info.disabled, probe.disabled);
                assert_eq!(info.counts, probe.counts);
                assert_eq!(info.state == ProbeState::Gone, place.is_gone());
                assert_eq!(info.mechanism, Some(place.mechanism()));
            }
        }
        let listed: Vec<_> = self.rig.list().iter().map(|info| info.id).collect();
        assert_eq!(listed, self.ids());
        assert_eq!(self.rig.registry.is_armed(), self.switched_on);
    }
}

proptest! {
    #[test]
    fn memory_is_the_guests_own_but_for_armed_sites_and_every_hit_is_counted(
        steps in prop::collection::vec(step(), 1..60)
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
        let settled = model.settled(&model.places, model.switched_on);
        model.places = settled.expect("nothing is armed");
        model.check();
        if !model.pinned {
            prop_assert!(!model.rig.is_mapped());
        }
        // All functions that are still running return.
        while !model.frames.is_empty() {
            model.ret();
        }
        let unmatched = &model.rig.registry.shared.returns.unmatched;
        prop_assert_eq!(unmatched.load(std::sync::atomic::Ordering::Relaxed), 0);
    }
}
