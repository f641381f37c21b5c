//! Random numbers determined by a seed.

/// SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators").
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Creates a generator determined by all of `seeds`.
    #[must_use]
    pub fn new(seeds: &[u64]) -> Self {
        let mut random = Self(0);
        for seed in seeds {
            random.0 ^= seed;
            random.0 = random.next();
        }
        random
    }

    /// Returns a random number.
    #[expect(clippy::should_implement_trait, reason = "it never ends")]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// Returns a number below `bound`, which must not be zero.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// Returns true with a probability of `percent`.
    pub fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// Returns one of `choices`, which must not be empty.
    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        let index = self.below(choices.len() as u64);
        choices[usize::try_from(index).unwrap_or(0)]
    }

    /// Returns a number as programs use them: often small, or at an edge.
    pub fn value(&mut self) -> u64 {
        match self.below(8) {
            0 => self.below(16),
            1 => self.below(0x1_0000),
            2 => self.next() >> 32,
            3 => self.pick(&[0, 1, 0x7f, 0x80, 0xff, 0x7fff, 0x8000, 0xffff]),
            4 => self.pick(&[
                0x7fff_ffff,
                0x8000_0000,
                0xffff_ffff,
                u64::MAX >> 1,
                1 << 63,
                u64::MAX,
            ]),
            5 => self.below(16).wrapping_neg(),
            _ => self.next(),
        }
    }
}
