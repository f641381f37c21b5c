//! Stops a run at any instruction of generated code: an int3 there makes the run leave the bench. The run can be
//! continued with the registers that it had at the int3.

use hvprobe_arch::Gva;
use hvprobe_arch::trap::INT3;
use hvprobe_tests::detour::arena::Arena;
use hvprobe_tests::detour::bench::{Bench, Left, State};
use hvprobe_tests::detour::traps;
use iced_x86::{Decoder, DecoderOptions, Instruction};

/// Runs the code at `at` with `state` until it leaves the bench. At `stop`, it leaves the bench by `exit`.
pub(crate) fn run_until(bench: &Bench<'_>, at: Gva, state: &State, stop: Gva, exit: u64) -> Left {
    let arena = bench.arena();
    let original = arena.read(stop, 1);
    arena.write(stop, &[INT3]);
    let known = traps::know(stop, bench.exit(exit));
    let left = bench.run(at, state);
    drop(known);
    arena.write(stop, &original);
    left
}

/// Returns the instructions from `at` on, up to the first one that `wanted` does not accept.
pub(crate) fn instructions(
    arena: &Arena,
    at: Gva,
    wanted: impl Fn(&Instruction) -> bool,
) -> Vec<Instruction> {
    let code = arena.read(at, 4096);
    let decoder = Decoder::with_ip(64, &code, at.0, DecoderOptions::NONE);
    decoder.into_iter().take_while(wanted).collect()
}
