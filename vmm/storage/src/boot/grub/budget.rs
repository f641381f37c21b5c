//! Limits of what running one `grub.cfg` may cost, with all entries of its menu.

/// Maximum number of statements.
const STEPS: u32 = 100_000;
/// Maximum number of conditions that are unknown: each one copies the state.
const UNKNOWN: u32 = 500;
/// Maximum number of commands that look at the disk.
const LOOKUPS: u32 = 2_000;
/// Maximum number of bytes in the arguments of all commands, and in all files.
const BYTES: usize = 4 << 20;

/// What may still be spent.
#[derive(Debug)]
pub(super) struct Budget {
    steps: u32,
    unknown: u32,
    lookups: u32,
    bytes: usize,
}

impl Budget {
    pub(super) fn new() -> Self {
        Self {
            steps: STEPS,
            unknown: UNKNOWN,
            lookups: LOOKUPS,
            bytes: BYTES,
        }
    }

    pub(super) fn step(&mut self) -> Result<(), String> {
        let error = || format!("it takes more than {STEPS} steps");
        self.steps = self.steps.checked_sub(1).ok_or_else(error)?;
        Ok(())
    }

    pub(super) fn unknown(&mut self) -> Result<(), String> {
        let error = || format!("it has more than {UNKNOWN} unknown conditions");
        self.unknown = self.unknown.checked_sub(1).ok_or_else(error)?;
        Ok(())
    }

    pub(super) fn lookup(&mut self) -> Result<(), String> {
        let error = || format!("it looks at the disk more than {LOOKUPS} times");
        self.lookups = self.lookups.checked_sub(1).ok_or_else(error)?;
        Ok(())
    }

    pub(super) fn bytes(&mut self, bytes: usize) -> Result<(), String> {
        let error = || format!("its commands have more than {} MiB", BYTES >> 20);
        self.bytes = self.bytes.checked_sub(bytes).ok_or_else(error)?;
        Ok(())
    }
}
