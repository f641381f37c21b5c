//! KVM's samples of a guest's clocks. A sample is the value of a vCPU's counter at a time of kvmclock (`struct
//! pvclock_vcpu_time_info` of the kernel, Documentation/virt/kvm/x86/msr.rst).
//!
//! Invariant: a sample is read as a whole. KVM makes its version odd before it writes the sample, and even again
//! afterwards.

use std::sync::atomic::{AtomicU32, Ordering, fence};

use hvprobe_arch::Gpa;
use hvprobe_arch::mem::PhysMemory;

/// Maximum number of attempts of the collector to read a sample while KVM writes it. Writing takes a few stores,
/// unless the host's processor runs something else in between.
const LOOKS: usize = 10_000;

/// A sample: the counter had the value `tsc` when kvmclock was at `ns` nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KvmSample {
    /// Version of the sample. It grows by two with each sample.
    pub(super) version: u32,
    pub(super) tsc: u64,
    pub(super) ns: u64,
}

impl KvmSample {
    /// Reads the sample at `at`. Returns `None` while KVM writes it, and before KVM has written the first.
    pub(super) fn read(mem: &impl PhysMemory, at: Gpa) -> Option<Self> {
        const TSC: u64 = 8;
        const NS: u64 = 16;
        let before = version(mem, at)?;
        fence(Ordering::Acquire);
        let tsc = mem.read_u64(at.wrapping_add(TSC)).ok()?;
        let ns = mem.read_u64(at.wrapping_add(NS)).ok()?;
        fence(Ordering::Acquire);
        let is_whole = before > 0 && before & 1 == 0 && version(mem, at)? == before;
        is_whole.then_some(Self {
            version: before,
            tsc,
            ns,
        })
    }

    /// Like [`KvmSample::read`], but tries again while KVM writes. If a write does not end, stores its version in
    /// `in_vain`, and later calls do not wait for that write.
    pub(super) fn read_soon(mem: &impl PhysMemory, at: Gpa, in_vain: &AtomicU32) -> Option<Self> {
        let mut seen = 0;
        for _ in 0..LOOKS {
            if let Some(sample) = Self::read(mem, at) {
                return Some(sample);
            }
            seen = version(mem, at).filter(|version| *version > 0)?;
            if seen == in_vain.load(Ordering::Relaxed) {
                return None;
            }
        }
        in_vain.store(seen, Ordering::Relaxed);
        None
    }

    /// Returns the value by which [`Relation`](super::relation::Relation) recognises the sample.
    pub(super) fn noted(self) -> u64 {
        1 << 32 | u64::from(self.version)
    }
}

/// Returns the version; zero before KVM has written a sample.
fn version(mem: &impl PhysMemory, at: Gpa) -> Option<u32> {
    let word = mem.read_u64(at).ok()?;
    u32::try_from(word & u64::from(u32::MAX)).ok()
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use hvprobe_arch::mem::OutOfRange;
    use hvprobe_vm::memory::GuestRam;

    use super::*;

    const AT: Gpa = Gpa(0x1000);

    fn sample(version: u32) -> KvmSample {
        let value = u64::from(version);
        KvmSample {
            version,
            tsc: value * 10,
            ns: value * 100,
        }
    }

    /// Memory that KVM writes to between reads. `version` returns the current version for the number of words read
    /// so far.
    struct Written<F> {
        words: Cell<usize>,
        version: F,
    }

    impl<F: Fn(usize) -> u32> Written<F> {
        fn new(version: F) -> Self {
            let words = Cell::new(0);
            Self { words, version }
        }
    }

    impl<F: Fn(usize) -> u32> PhysMemory for Written<F> {
        fn read(&self, at: Gpa, into: &mut [u8]) -> Result<(), OutOfRange> {
            let sample = sample((self.version)(self.words.replace(self.words.get() + 1)));
            let word = match at.0 - AT.0 {
                0 => u64::from(sample.version),
                8 => sample.tsc,
                16 => sample.ns,
                other => panic!("there is nothing at {other}"),
            };
            into.copy_from_slice(&word.to_le_bytes());
            Ok(())
        }

        fn write(&self, _: Gpa, _: &[u8]) -> Result<(), OutOfRange> {
            unreachable!("what KVM reports is only read")
        }
    }

    fn soon(mem: &impl PhysMemory, at: Gpa) -> Option<KvmSample> {
        KvmSample::read_soon(mem, at, &AtomicU32::new(0))
    }

    #[test]
    fn what_kvm_is_about_to_write_is_not_read() {
        let is_read = |version| KvmSample::read(&Written::new(move |_| version), AT);
        assert_eq!([0, 7, 8].map(is_read), [None, None, Some(sample(8))]);
        let ram = GuestRam::new(64 << 20).unwrap();
        assert_eq!(KvmSample::read(&ram, Gpa(!7)), None);
        assert_eq!(soon(&ram, Gpa(!7)), None);
    }

    /// The reader loses its processor between two of its reads, for as long as KVM takes to write another
    /// sample.
    #[test]
    fn what_kvm_writes_as_a_whole_between_two_looks_is_read_soon() {
        for change in 1..4 {
            let changes = |words| if words < change { 4 } else { 6 };
            assert_eq!(
                KvmSample::read(&Written::new(changes), AT),
                None,
                "{change}"
            );
            let soon = soon(&Written::new(changes), AT);
            assert_eq!(soon, Some(sample(6)), "{change}");
        }
    }

    #[test]
    fn what_is_being_written_is_waited_for_but_not_for_ever() {
        let done = |words| if words < 1000 { 5 } else { 6 };
        assert_eq!(soon(&Written::new(done), AT), Some(sample(6)));
        let never = Written::new(|words| if words < 2 { 4 } else { 5 });
        let in_vain = AtomicU32::new(0);
        assert_eq!(KvmSample::read_soon(&never, AT, &in_vain), None);
        let looks = never.words.get();
        assert!((LOOKS..=10 * LOOKS).contains(&looks), "{looks}");
        // The guest may have written such a version itself. It must not make every record wait.
        assert_eq!(KvmSample::read_soon(&never, AT, &in_vain), None);
        assert!(never.words.get() < looks + 10);
        let done = Written::new(|_| 6);
        assert_eq!(KvmSample::read_soon(&done, AT, &in_vain), Some(sample(6)));
        let nothing = Written::new(|_| 0);
        assert_eq!(soon(&nothing, AT), None);
        assert!(nothing.words.get() < 10);
    }
}
