//! How much work a guest can cause the reader by writing nonsense and ringing the doorbell again and again.

use hvprobe_fixtures::work;

use super::*;

const MANY: u32 = 2048;
const RING: RingPlace = RingPlace {
    capacity: MANY,
    watermark: MANY / 4,
    ..PLACE
};
/// Time between two rings of the doorbell.
const BETWEEN: Duration = Duration::from_micros(2);
/// Time that the test covers.
const LASTS: Duration = Duration::from_millis(50);
/// Maximum number of accesses to memory in a pass that finds little, or that the reader skips because it rests.
const PASS: u64 = 12;
/// Maximum number of further accesses per microsecond: a cell takes up to two, and the reader rests 0.4 µs for it.
const MICROSECOND: u64 = 6;

fn cell(number: u64) -> Gpa {
    CELLS.wrapping_add(number % u64::from(MANY) * CELL as u64)
}

/// Lets a guest call `forge` and ring the doorbell, again and again. Returns the rig after that, the number of
/// accesses by the reader, and the number of rings.
fn accesses(forge: impl Fn(&Memory, u64)) -> (Rig, u64, u64) {
    let mut rig = Rig::new();
    rig.reader = Reader::new(RING, rig.reader.sources.clone());
    let (limit, bell) = RING.initial();
    RING.publish(&rig.mem, limit, bell).expect("in memory");
    let until = rig.now + LASTS;
    let (mut made, mut rung) = (0, 0);
    while rig.now < until {
        forge(&rig.mem, rung);
        rung += 1;
        rig.now += BETWEEN;
        let before = work();
        rig.read(99);
        made += work() - before;
    }
    (rig, made, rung)
}

/// Checks that the reader still reads a record of the form that detours write, without a long wait.
fn serves(mut rig: Rig) {
    rig.pass_ms(20);
    rig.read(usize::MAX);
    rig.pass_ms(20);
    rig.read(usize::MAX);
    let hits = rig.counters.sum().hits;
    let head = rig.mem.read_u64(HEAD).expect("in memory");
    assert!(head < rig.published()[0], "no room is left");
    let mark = u64::from(PROBE.0 | 1 << 24) << 32 | (head + 1) & 0xffff_ffff;
    rig.mem.write_u64(cell(head), mark).expect("in memory");
    rig.mem.write_u64(HEAD, head + 1).expect("in memory");
    rig.pass_ms(20);
    rig.read(99);
    rig.pass_ms(20);
    rig.read(99);
    assert_eq!(rig.counters.sum().hits, hits + 1);
}

/// What a hostile guest writes: a name, and the function that writes it.
type Forge<'a> = (&'a str, &'a dyn Fn(&Memory, u64));

#[test]
fn nonsense_with_doorbells_costs_no_more_the_more_often_it_rings() {
    let head_anywhere = |mem: &Memory, round: u64| {
        let head = round.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mem.write_u64(HEAD, head).expect("in memory");
    };
    // All of the ring is reserved, and nothing is finished.
    let all_unfinished = |mem: &Memory, _: u64| {
        let limit = mem.read_u64(LIMIT).expect("in memory");
        mem.write_u64(HEAD, limit).expect("in memory");
    };
    // Every mark of the ring is nonsense.
    let all_malformed = |mem: &Memory, _: u64| {
        for number in 0..u64::from(MANY) {
            mem.write_u64(cell(number), u64::MAX).expect("in memory");
        }
        all_unfinished(mem, 0);
    };
    // Every other cell has a record of no source.
    let every_other = |mem: &Memory, _: u64| {
        let head = mem.read_u64(HEAD).expect("in memory");
        for position in (head..head + u64::from(MANY) / 2).step_by(2) {
            let mark = u64::from(99_u32 | 1 << 24) << 32 | (position + 1) & 0xffff_ffff;
            mem.write_u64(cell(position), mark).expect("in memory");
        }
        let limit = mem.read_u64(LIMIT).expect("in memory");
        let to = limit.min(head + u64::from(MANY) / 2);
        mem.write_u64(HEAD, to).expect("in memory");
    };
    let forges: [Forge<'_>; 4] = [
        ("head anywhere", &head_anywhere),
        ("all unfinished", &all_unfinished),
        ("all malformed", &all_malformed),
        ("every other", &every_other),
    ];
    for (what, forge) in forges {
        let (rig, made, rung) = accesses(forge);
        let microseconds = u64::try_from(LASTS.as_micros()).expect("a short time");
        let bound = rung * PASS + microseconds * MICROSECOND;
        assert!(made <= bound, "{what}: {made} accesses, at most {bound}");
        // `every other` leaves no two free cells in a row, so the ring cannot be used any more until the guest
        // ends.
        if what != "every other" {
            serves(rig);
        }
    }
}
