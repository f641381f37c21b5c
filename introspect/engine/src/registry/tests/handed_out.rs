//! What is handed out is taken back, however often.

use super::*;

#[test]
fn return_probes_come_and_go_without_end() {
    /// Of as many instances as there may be: more than there are numbers for stubs.
    const TIMES: u32 = (1 << 23) / 4096 + 10;
    let mut rig = Rig::optimizing();
    for time in 0..TIMES {
        let id = rig.one("r4096 filler_000");
        assert_eq!(rig.info(id).unoptimized, None, "{time}");
        rig.unregister(&[id]).unwrap();
    }
}
