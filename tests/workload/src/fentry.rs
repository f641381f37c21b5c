//! Attaches a BPF program to the entry of a kernel function, as tracers in the guest do (fentry): the
//! function's entry nop becomes a call of the program's trampoline.
//!
//! The program does nothing; the kernel counts its runs if that is enabled.

use std::error::Error;
use std::ffi::CStr;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use libc::c_int;

use crate::calls::{self, Call};
use crate::files;
use crate::sys::checked;

/// Makes `count` calls of getpgid three times: before a program is attached to the entry of `function`, while it is
/// attached, and after it is detached. Before the second time, prints `attached` and waits for a line on stdin.
/// After the second time, prints `runs: N`, the number of runs of the program.
pub(crate) fn run(function: &str, count: u64) -> Result<(), Box<dyn Error>> {
    files::write("/proc/sys/kernel/bpf_stats_enabled", "1")?;
    let types = fs::read("/sys/kernel/btf/vmlinux")?;
    let id =
        function_id(&types, function).ok_or("the kernel's types do not contain the function")?;
    calls::repeat(Call::Getpgid, count)?;
    let program = load(id)?;
    let link = attach(&program)?;
    println!("attached");
    io::stdin().read_line(&mut String::new())?;
    calls::repeat(Call::Getpgid, count)?;
    let runs = runs(&program)?;
    drop((link, program));
    println!("runs: {runs}");
    calls::repeat(Call::Getpgid, count)
}

/// Returns how often the program ran (kernel/bpf/syscall.c, `bpf_prog_show_fdinfo`).
fn runs(program: &OwnedFd) -> Result<u64, Box<dyn Error>> {
    let info = files::read(&format!("/proc/self/fdinfo/{}", program.as_raw_fd()))?;
    let line = info.lines().find_map(|line| line.strip_prefix("run_cnt:"));
    Ok(line.ok_or("the kernel counts no runs")?.trim().parse()?)
}

/// Returns the type id of `function` (Documentation/bpf/btf.rst).
fn function_id(btf: &[u8], function: &str) -> Option<u32> {
    const KIND_FUNC: u32 = 12;
    let word = |at: usize| {
        let bytes = btf.get(at..at.checked_add(4)?)?;
        Some(u32::from_le_bytes(bytes.try_into().ok()?))
    };
    let offset = |at: usize| usize::try_from(word(at)?).ok();
    let header = offset(4)?;
    let (mut at, strings) = (header + offset(8)?, header + offset(16)?);
    let end = at + offset(12)?;
    let mut id = 1;
    while at < end {
        let (name, info) = (strings + offset(at)?, word(at + 4)?);
        let (kind, count) = (info >> 24 & 0x1f, usize::try_from(info & 0xffff).ok()?);
        if kind == KIND_FUNC {
            let rest = btf.get(name..)?;
            if CStr::from_bytes_until_nul(rest).ok()?.to_bytes() == function.as_bytes() {
                return Some(id);
            }
        }
        at += 12
            + match kind {
                // Integers, variables, declaration tags.
                1 | 14 | 17 => 4,
                // Arrays.
                3 => 12,
                // Structures, unions, data sections, 64-bit enumerations: three words for each part.
                4 | 5 | 15 | 19 => 12 * count,
                // Enumerations, parameters.
                6 | 13 => 8 * count,
                _ => 0,
            };
        id += 1;
    }
    None
}

/// `union bpf_attr` for `BPF_PROG_LOAD` (include/uapi/linux/bpf.h).
#[repr(C)]
#[derive(Default)]
struct LoadAttributes {
    prog_type: u32,
    insn_cnt: u32,
    insns: u64,
    license: u64,
    log: [u32; 4],
    kern_version: u32,
    prog_flags: u32,
    prog_name: [u8; 16],
    prog_ifindex: u32,
    expected_attach_type: u32,
    prog_btf_fd: u32,
    func_info_rec_size: u32,
    func_info: u64,
    func_info_cnt: u32,
    line_info_rec_size: u32,
    line_info: u64,
    line_info_cnt: u32,
    attach_btf_id: u32,
}

/// `union bpf_attr` for `BPF_RAW_TRACEPOINT_OPEN`.
#[repr(C)]
struct AttachAttributes {
    name: u64,
    prog_fd: u32,
    padding: u32,
}

fn load(function: u32) -> io::Result<OwnedFd> {
    const PROG_LOAD: c_int = 5;
    const PROG_TYPE_TRACING: u32 = 26;
    const TRACE_FENTRY: u32 = 24;
    // r0 = 0; exit
    let program: [u64; 2] = [0xb7, 0x95];
    let license = c"GPL";
    let attributes = LoadAttributes {
        prog_type: PROG_TYPE_TRACING,
        insn_cnt: 2,
        insns: program.as_ptr() as u64,
        license: license.as_ptr() as u64,
        expected_attach_type: TRACE_FENTRY,
        attach_btf_id: function,
        ..LoadAttributes::default()
    };
    bpf(PROG_LOAD, &attributes)
}

fn attach(program: &OwnedFd) -> io::Result<OwnedFd> {
    const RAW_TRACEPOINT_OPEN: c_int = 17;
    let attributes = AttachAttributes {
        name: 0,
        prog_fd: program.as_raw_fd().cast_unsigned(),
        padding: 0,
    };
    bpf(RAW_TRACEPOINT_OPEN, &attributes)
}

/// Makes the system call `bpf(2)` with a command that returns a descriptor.
fn bpf<T>(command: c_int, attributes: &T) -> io::Result<OwnedFd> {
    let (at, size) = (std::ptr::from_ref(attributes), size_of::<T>());
    // SAFETY: the attributes belong to the command and have this size; what they point to outlives the call.
    let made = checked(unsafe { libc::syscall(libc::SYS_bpf, command, at, size) })?;
    let descriptor = c_int::try_from(made).map_err(io::Error::other)?;
    // SAFETY: the call has just created the descriptor, and nothing else uses it.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Builds BTF. Each type is given by the word for its name, the word for its kind and number of parts, and the
    /// number of bytes after its three words.
    fn btf(types: &[(u32, u32, usize)], strings: &[u8]) -> Vec<u8> {
        let mut body = Vec::new();
        for (name, info, more) in types {
            body.extend([*name, *info, 0].map(u32::to_le_bytes).as_flattened());
            body.resize(body.len() + more, 0);
        }
        let [length, of_strings] = [body.len(), strings.len()].map(|it| u32::try_from(it).unwrap());
        let header = [0x1_eb9f, 24, 0, length, length, of_strings];
        let header = header.map(u32::to_le_bytes);
        [header.as_flattened(), &body, strings].concat()
    }

    #[test]
    fn function_is_found_by_its_name_among_all_kinds_of_types() {
        let strings = b"\0one\0two\0";
        let types = btf(
            &[
                (5, 1 << 24, 4),
                (1, 4 << 24 | 2, 24),
                (0, 13 << 24 | 3, 24),
                (1, 12 << 24, 0),
                (5, 12 << 24, 0),
            ],
            strings,
        );
        assert_eq!(function_id(&types, "one"), Some(4));
        assert_eq!(function_id(&types, "two"), Some(5));
        assert_eq!(function_id(&types, "three"), None);
        assert_eq!(function_id(&types[..60], "two"), None);
        assert_eq!(function_id(&[], "one"), None);
    }
}
