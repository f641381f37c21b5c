//! The bus: finds the device that answers at an address.
//!
//! Invariants: no claim is empty or leaves its address space, and no two claims overlap, so at most one device
//! answers an access. No claim contains a port at which probes answer. Claims are made before the guest runs and do
//! not change, so a look-up takes no lock and allocates nothing.

use std::sync::Arc;

use hvprobe_arch::trap;

use super::address::{AddressRange, Space};
use super::device::Device;

/// Error of a claim: a device cannot have these addresses.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a device cannot have {range}: {why}")]
pub struct ClaimError {
    range: AddressRange,
    why: &'static str,
}

/// Addresses, and the device that answers there.
#[derive(Debug)]
struct Claim {
    space: Space,
    first: u64,
    last: u64,
    device: Arc<dyn Device>,
}

/// The claims of a machine's devices, by space and address.
#[derive(Debug, Default)]
pub(crate) struct Bus(Vec<Claim>);

impl Bus {
    /// Adds the ranges of `device`.
    ///
    /// # Errors
    /// When a range is empty, leaves its space, overlaps a range claimed before, or contains a port of probes.
    pub(crate) fn claim(&mut self, device: &Arc<dyn Device>) -> Result<(), ClaimError> {
        for range in device.ranges() {
            let AddressRange { space, first, .. } = range;
            let refused = |why| ClaimError { range, why };
            let Some(last) = range.last() else {
                return Err(refused("it is empty or leaves its address space"));
            };
            let mut of_probes = trap::PORTS.map(u64::from).into_iter();
            if space == Space::Port && of_probes.any(|port| (first..=last).contains(&port)) {
                return Err(refused("probes answer at a part of it"));
            }
            let next = self.after(space, last);
            if let Some(before) = next.checked_sub(1).and_then(|at| self.0.get(at))
                && before.space == space
                && before.last >= first
            {
                return Err(refused("another device has a part of it"));
            }
            let claim = Claim {
                space,
                first,
                last,
                device: Arc::clone(device),
            };
            self.0.insert(next, claim);
        }
        Ok(())
    }

    /// Returns the device that answers an access to `len` bytes at `at`, and the offset of `at` from the start of
    /// its range. An access to memory that leaves the range has no device. An access to ports belongs to the device
    /// at its first port, because all values of a string instruction go to the same port, and KVM reports them
    /// together.
    pub(crate) fn find(&self, space: Space, at: u64, len: usize) -> Option<(&dyn Device, u64)> {
        let claim = &self.0[self.after(space, at).checked_sub(1)?];
        if claim.space != space {
            return None;
        }
        let behind = claim.last.checked_sub(at)?;
        let fits = match space {
            Space::Port => true,
            Space::Memory => len.saturating_sub(1) as u64 <= behind,
        };
        fits.then(|| (&*claim.device, at - claim.first))
    }

    /// Returns the position of the first claim that begins after `at` in `space`. Claims are in the order of spaces
    /// and addresses.
    fn after(&self, space: Space, at: u64) -> usize {
        self.0
            .partition_point(|claim| (claim.space, claim.first) <= (space, at))
    }
}

#[cfg(test)]
mod tests;
