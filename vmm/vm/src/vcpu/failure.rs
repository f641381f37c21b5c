//! Data that KVM returns with an internal error.

use kvm_ioctls::VcpuFd;

/// `KVM_INTERNAL_ERROR_EMULATION` (include/uapi/linux/kvm.h).
pub(crate) const EMULATION: u32 = 1;
/// `KVM_INTERNAL_ERROR_EMULATION_FLAG_INSTRUCTION_BYTES` (include/uapi/linux/kvm.h).
const INSTRUCTION_BYTES: u64 = 1;

/// Data of a `KVM_EXIT_INTERNAL_ERROR`.
pub(crate) struct InternalError {
    /// KVM's reason.
    pub(crate) suberror: u32,
    /// Bytes of the instruction that could not be emulated, and the number of valid bytes; `None` if KVM does not
    /// report them.
    pub(crate) bytes: Option<([u8; 15], u8)>,
}

impl InternalError {
    /// Returns the data of the last exit of `fd`, which must be an internal error.
    pub(crate) fn of(fd: &mut VcpuFd) -> Self {
        // SAFETY: all members of the union are plain integers, so any bytes are valid; KVM filled
        // `internal` if the exit is of this kind.
        let internal = unsafe { fd.get_kvm_run().__bindgen_anon_1.internal };
        let data = internal.data;
        let known = internal.suberror == EMULATION
            && internal.ndata >= 4
            && data[0] & INSTRUCTION_BYTES != 0;
        // Layout of `emulation_failure` (KVM API, KVM_EXIT_INTERNAL_ERROR): flags, then one byte
        // of size and fifteen bytes of instruction.
        let bytes = known.then(|| {
            let mut raw = [0; 16];
            raw[..8].copy_from_slice(&data[1].to_le_bytes());
            raw[8..].copy_from_slice(&data[2].to_le_bytes());
            let mut code = [0; 15];
            code.copy_from_slice(&raw[1..]);
            (code, raw[0].min(15))
        });
        Self {
            suberror: internal.suberror,
            bytes,
        }
    }
}
