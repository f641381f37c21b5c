//! Random changes of inputs, determined by the seed.

/// Values for which decoders are prone to errors.
const EDGES: [u64; 10] = [
    0,
    1,
    0x7f,
    0xff,
    0x7fff,
    0xffff,
    0x7fff_ffff,
    0xffff_ffff,
    1 << 63,
    u64::MAX,
];
/// Maximum length of a mutation.
const LONGEST: usize = 1 << 16;

/// Random numbers: SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators").
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// Returns a number below `limit`, which must not be zero.
    fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.next() % limit as u64).expect("below a usize")
    }

    fn bytes(&mut self) -> [u8; 8] {
        self.next().to_le_bytes()
    }
}

/// Returns one of `inputs` with a few random changes.
pub(crate) fn mutation(random: &mut Random, inputs: &[Vec<u8>]) -> Vec<u8> {
    let mut data = inputs[random.below(inputs.len())].clone();
    let changes = 1 << random.below(6);
    for _ in 0..changes {
        change(random, &mut data, inputs);
    }
    data.truncate(LONGEST);
    data
}

fn change(random: &mut Random, data: &mut Vec<u8>, inputs: &[Vec<u8>]) {
    if data.is_empty() {
        data.extend(random.bytes());
    }
    let at = random.below(data.len());
    let width = 1 << random.below(4);
    let range = at..data.len().min(at + width);
    match random.below(8) {
        0 | 1 => data[at] ^= 1 << random.below(8),
        2 => {
            let len = range.len();
            data[range].copy_from_slice(&random.bytes()[..len]);
        }
        3 => {
            let edge = EDGES[random.below(EDGES.len())].to_le_bytes();
            let len = range.len();
            data[range].copy_from_slice(&edge[..len]);
        }
        // Adds a small number to the word of `width` bytes at `at`, or subtracts it.
        4 => {
            let mut word = [0; 8];
            word[..range.len()].copy_from_slice(&data[range.clone()]);
            let by = (random.next() % 65).wrapping_sub(32);
            let word = u64::from_le_bytes(word).wrapping_add(by).to_le_bytes();
            let len = range.len();
            data[range].copy_from_slice(&word[..len]);
        }
        5 => {
            let bytes = random.bytes();
            data.splice(at..at, bytes.into_iter().take(width));
        }
        6 => {
            data.drain(range);
        }
        // Copies a piece of an input into `data`: inserts it, or replaces the same number of bytes.
        _ => {
            let other = &inputs[random.below(inputs.len())];
            let from = random.below(other.len().max(1));
            let len = random.below(64);
            let piece: Vec<u8> = other.iter().skip(from).take(len).copied().collect();
            let end = if random.below(2) == 0 {
                at
            } else {
                data.len().min(at + piece.len())
            };
            data.splice(at..end, piece);
        }
    }
}
