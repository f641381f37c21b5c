//! KVM's dirty log: the pages of RAM that the guest writes.
//!
//! ```text
//!   not noted ──note_writes(true)──► noted ──written──► noted from now on
//!       ▲                              │
//!       └─────note_writes(false)───────┘
//! ```
//! The log does not contain the host's writes through [`GuestRam`]. While it is on, the first write to each
//! page costs the guest an exit that KVM handles.

use std::io;
use std::os::fd::AsFd;

use hvprobe_arch::Gpa;
use kvm_bindings::{KVM_MEM_LOG_DIRTY_PAGES, KVMIO, kvm_dirty_log, kvm_dirty_log__bindgen_ty_1};
use vmm_sys_util::ioctl::ioctl_with_ref;
use vmm_sys_util::ioctl_iow_nr;

use super::ram::{GuestRam, done};

const PAGE: u64 = 4096;
// Request number from the KVM API.
ioctl_iow_nr!(KVM_GET_DIRTY_LOG, KVMIO, 0x42, kvm_dirty_log);

impl GuestRam {
    /// Turns KVM's dirty log of RAM on or off. The log contains the guest's writes, not the host's writes
    /// through this value.
    ///
    /// # Errors
    /// When KVM refuses. If turning the log on fails, it is off.
    pub fn note_writes(&self, on: bool) -> io::Result<()> {
        let flags = if on { KVM_MEM_LOG_DIRTY_PAGES } else { 0 };
        for (number, slot) in self.ram() {
            if let Err(error) = self.change_slot(number, slot, slot.len(), flags) {
                if on {
                    // Turn the log off again for the slots where it is on. If that fails for a slot, it only costs
                    // time.
                    let _ = self.note_writes(false);
                }
                return Err(error);
            }
        }
        Ok(())
    }

    /// Returns the pages of RAM that the guest has written since the last call, or since the log was turned on.
    ///
    /// # Errors
    /// When the log is off, or the memory is not registered.
    pub fn written(&self) -> io::Result<Vec<Gpa>> {
        let mut pages = Vec::new();
        for (number, slot) in self.ram() {
            // KVM's bitmap has a bit for each page, and is a whole number of words.
            let words = slot.len().div_ceil(PAGE * 64);
            let mut bits = vec![0_u64; usize::try_from(words).unwrap_or(0)];
            self.dirty_log(number, &mut bits)?;
            for (word, first) in bits.iter().zip((0..).step_by(64)) {
                let mut word = *word;
                while word != 0 {
                    let page = first + u64::from(word.trailing_zeros());
                    word &= word - 1;
                    pages.push(Gpa(slot.start + page * PAGE));
                }
            }
        }
        Ok(pages)
    }

    fn dirty_log(&self, number: u32, bits: &mut [u64]) -> io::Result<()> {
        let vm = self.vm.get().ok_or(io::ErrorKind::NotConnected)?;
        let log = kvm_dirty_log {
            slot: number,
            padding1: 0,
            __bindgen_anon_1: kvm_dirty_log__bindgen_ty_1 {
                dirty_bitmap: bits.as_mut_ptr().cast(),
            },
        };
        // SAFETY: the request takes exactly this structure, and writes a bit for each page of the slot, in
        // whole words (KVM API, KVM_GET_DIRTY_LOG); `bits` was made for that length.
        done(unsafe { ioctl_with_ref(&vm.as_fd(), KVM_GET_DIRTY_LOG(), &log) })
    }
}
