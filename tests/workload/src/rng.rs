//! Repeatable random numbers.

/// SplitMix64 (Steele, Lea and Flood, 2014): equal seeds give equal sequences.
#[derive(Clone, Debug)]
pub(crate) struct Rng(u64);

impl Rng {
    /// Creates a generator. Different `stream`s of one seed give unrelated sequences.
    pub(crate) fn new(seed: u64, stream: u64) -> Self {
        let mut rng = Self(seed);
        Self(rng.next() ^ stream.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number below `bound`, which must not be zero.
    pub(crate) fn below(&mut self, bound: u32) -> u32 {
        let high = ((self.next() >> 32) * u64::from(bound)) >> 32;
        u32::try_from(high).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequence_is_splitmix64_and_streams_differ() {
        let mut rng = Rng(1_234_567);
        assert_eq!(rng.next(), 6_457_827_717_110_365_317);
        assert_ne!(Rng::new(1, 0).next(), Rng::new(1, 1).next());
        assert_eq!(Rng::new(3, 2).next(), Rng::new(3, 2).next());
    }

    #[test]
    fn numbers_stay_below_their_bound_and_reach_it() {
        let mut rng = Rng::new(7, 0);
        let numbers: Vec<u32> = (0..1000).map(|_| rng.below(10)).collect();
        assert_eq!(numbers.iter().max(), Some(&9));
        assert_eq!(numbers.iter().min(), Some(&0));
    }
}
