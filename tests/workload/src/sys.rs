//! System calls without additions of the C library: each function here enters the kernel once, through the call
//! it names.
//!
//! So the workload's counts are exact. The Rust runtime and busybox do not add to them, because they do not use the
//! calls that are counted: they use `clock_nanosleep` instead of `nanosleep`, `clone` instead of `fork`,
//! `newfstatat` or `statx` instead of `stat`, and `wait4` instead of `waitid`.

use std::arch::asm;
use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::AtomicU32;

use libc::{c_int, c_long};

/// Returns the result of a call, or the error that it set.
pub(crate) fn checked<T: Default + PartialOrd>(result: T) -> io::Result<T> {
    if result < T::default() {
        return Err(io::Error::last_os_error());
    }
    Ok(result)
}

/// Makes a call that takes at most one integer and touches no memory of ours.
pub(crate) fn plain(number: c_long, argument: c_int) -> io::Result<()> {
    // SAFETY: the callers' calls take integers only.
    checked(unsafe { libc::syscall(number, argument) }).map(drop)
}

/// Calls `getpgid(2)` with any number and ignores the result.
pub(crate) fn getpgid(number: u64) {
    // SAFETY: the call takes an integer only.
    unsafe { libc::syscall(libc::SYS_getpgid, number) };
}

/// Calls `getpgid(2)` with a number that is no process's id.
pub(crate) fn getpgid_of_nobody(number: usize) -> io::Result<()> {
    // SAFETY: the call takes an integer only.
    match checked(unsafe { libc::syscall(libc::SYS_getpgid, number) }) {
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(()),
        Err(error) => Err(error),
        Ok(_) => Err(io::Error::other("somebody has this id")),
    }
}

/// Calls `nanosleep(2)` for less than a second.
pub(crate) fn nanosleep(nanoseconds: u32) -> io::Result<()> {
    let time = libc::timespec {
        tv_sec: 0,
        tv_nsec: c_long::from(nanoseconds.min(999_999_999)),
    };
    let none = std::ptr::null_mut::<libc::timespec>();
    // SAFETY: the first pointer is to a timespec of ours, the second may be null.
    checked(unsafe { libc::syscall(libc::SYS_nanosleep, &raw const time, none) }).map(drop)
}

/// Mounts the file system of type `kind`, which needs no device, on `at`.
pub(crate) fn mount(kind: &CStr, at: &CStr) -> io::Result<()> {
    // SAFETY: strings with their NULs; this type of file system takes no data.
    checked(unsafe {
        libc::mount(
            kind.as_ptr(),
            at.as_ptr(),
            kind.as_ptr(),
            0,
            std::ptr::null(),
        )
    })
    .map(drop)
}

/// Blocks for a moment without any of the sleeping calls that are counted.
pub(crate) fn moment() {
    // SAFETY: no descriptors are passed.
    unsafe { libc::poll(std::ptr::null_mut(), 0, 1) };
}

/// Calls `futex(2)` with `FUTEX_WAIT`: blocks while `word` is `value`. May also wake up spuriously.
pub(crate) fn futex_wait(word: &AtomicU32, value: u32) {
    let forever = std::ptr::null::<libc::timespec>();
    // SAFETY: the word outlives the call; a null timeout means for ever.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAIT,
            value,
            forever,
        )
    };
}

/// Calls `futex(2)` with `FUTEX_WAKE`: wakes all waiters for `word`.
pub(crate) fn futex_wake(word: &AtomicU32) {
    // SAFETY: the word outlives the call.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, c_int::MAX) };
}

/// Calls `futex(2)` with `FUTEX_WAKE_OP`, an operation that nothing else uses: wakes no waiter and adds 0 to
/// `word`.
pub(crate) fn futex_wake_op(word: &AtomicU32) -> io::Result<()> {
    const ADD: c_int = 1;
    // SAFETY: the word outlives the call; the operation adds 0 to it.
    checked(unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAKE_OP | libc::FUTEX_PRIVATE_FLAG,
            0,
            0_usize,
            word.as_ptr(),
            ADD << 28,
        )
    })
    .map(drop)
}

/// Calls the old `stat(2)`.
pub(crate) fn stat(path: &CStr) -> io::Result<()> {
    // SAFETY: all-zero bytes are a valid stat.
    let mut status: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: a path with its NUL, and room for the answer.
    checked(unsafe { libc::syscall(libc::SYS_stat, path.as_ptr(), &raw mut status) }).map(drop)
}

/// Calls the old `fork(2)`; returns 0 in the child.
///
/// # Safety
/// In a process with several threads the child may only make system calls, since a lock that another thread
/// holds stays locked for ever.
pub(crate) unsafe fn fork() -> io::Result<c_int> {
    // SAFETY: the caller keeps to the rule above.
    let pid = checked(unsafe { libc::syscall(libc::SYS_fork) })?;
    c_int::try_from(pid).map_err(io::Error::other)
}

/// Ends this process immediately.
pub(crate) fn exit(status: c_int) -> ! {
    // SAFETY: has no preconditions.
    unsafe { libc::_exit(status) }
}

/// Calls `waitid(2)` for the end of the child `pid`.
pub(crate) fn wait_end(pid: c_int) -> io::Result<()> {
    let nothing = std::ptr::null_mut::<libc::siginfo_t>();
    let none = std::ptr::null_mut::<libc::rusage>();
    // SAFETY: both pointers may be null.
    checked(unsafe {
        libc::syscall(
            libc::SYS_waitid,
            libc::P_PID,
            pid,
            nothing,
            libc::WEXITED,
            none,
        )
    })
    .map(drop)
}

/// Restricts the thread `thread` (0: this one) to `cpu`.
pub(crate) fn pin(thread: c_int, cpu: usize) -> io::Result<()> {
    // SAFETY: all-zero bytes are a valid, empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the set is ours; CPU_SET checks the index against the set's size.
    unsafe { libc::CPU_SET(cpu, &mut set) };
    // SAFETY: the pointer and the size describe `set`.
    checked(unsafe { libc::sched_setaffinity(thread, size_of_val(&set), &raw const set) }).map(drop)
}

/// Makes this thread give way only to threads of a higher priority (`SCHED_FIFO`).
pub(crate) fn keep_processor() -> io::Result<()> {
    // The kernel's `struct sched_param` is just the priority (include/uapi/linux/sched/types.h). Some C
    // libraries lack the function for this call.
    let (this, lowest): (c_int, c_int) = (0, 1);
    // SAFETY: the kernel reads one integer, which outlives the call.
    checked(unsafe {
        libc::syscall(
            libc::SYS_sched_setscheduler,
            this,
            libc::SCHED_FIFO,
            &raw const lowest,
        )
    })
    .map(drop)
}

/// Returns the id of this thread.
pub(crate) fn thread_id() -> c_int {
    // SAFETY: has no preconditions.
    unsafe { libc::gettid() }
}

/// Returns the number of CPUs that this process may run on.
pub(crate) fn available_cpus() -> io::Result<usize> {
    std::thread::available_parallelism().map(usize::from)
}

/// Creates an epoll instance.
pub(crate) fn epoll() -> io::Result<OwnedFd> {
    // SAFETY: touches no memory.
    let fd = checked(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
    // SAFETY: the descriptor is new, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Makes `epoll` watch `watched` for these events.
pub(crate) fn epoll_add(
    epoll: BorrowedFd<'_>,
    watched: BorrowedFd<'_>,
    events: c_int,
) -> io::Result<()> {
    let mut event = libc::epoll_event {
        events: events.cast_unsigned(),
        u64: 0,
    };
    // SAFETY: both descriptors are open; the event is ours.
    checked(unsafe {
        libc::epoll_ctl(
            epoll.as_raw_fd(),
            libc::EPOLL_CTL_ADD,
            watched.as_raw_fd(),
            &raw mut event,
        )
    })
    .map(drop)
}

/// Calls `epoll_wait(2)` for an event that is ready, without waiting.
pub(crate) fn epoll_wait(epoll: BorrowedFd<'_>) -> io::Result<()> {
    let mut event = libc::epoll_event { events: 0, u64: 0 };
    // SAFETY: there is room for one event, which lives until the call has returned.
    match checked(unsafe { libc::epoll_wait(epoll.as_raw_fd(), &raw mut event, 1, 0) })? {
        0 => Err(io::ErrorKind::WouldBlock.into()),
        _ => Ok(()),
    }
}

/// Lets this thread, and the threads that it starts, use one port.
pub(crate) fn grant_port(port: u16) -> io::Result<()> {
    // SAFETY: only grants access to a port; the code that writes there is responsible for its effect.
    match unsafe { libc::ioperm(libc::c_ulong::from(port), 1, 1) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Writes a byte to a port that was granted. Only for devices made to be written to, and for ports without a
/// device.
pub(crate) fn write_port(port: u16, byte: u8) {
    // SAFETY: without access the instruction faults and the program ends; with it, a byte goes to a
    // port and no memory is touched.
    unsafe {
        asm!("out dx, al", in("dx") port, in("al") byte, options(nomem, nostack, preserves_flags));
    }
}

/// Reads a byte from a port that was granted.
pub(crate) fn read_port(port: u16) -> u8 {
    let byte;
    // SAFETY: without access the instruction faults and the program ends; with it, a byte comes from a port and no
    // memory is touched.
    unsafe {
        asm!("in al, dx", in("dx") port, out("al") byte, options(nomem, nostack, preserves_flags));
    }
    byte
}

/// Writes bytes to a port that was granted, in order.
pub(crate) fn write_port_string(port: u16, bytes: &[u8]) {
    // SAFETY: as above; the instruction reads `bytes.len()` bytes from `bytes` on, upwards, as the direction
    // flag is clear at calls of functions (System V ABI for AMD64, section 3.2.2).
    unsafe {
        asm!(
            "rep outsb",
            in("dx") port,
            inout("rsi") bytes.as_ptr() => _,
            inout("rcx") bytes.len() => _,
            options(readonly, nostack, preserves_flags),
        );
    }
}

/// Waits until all bytes that were written to `terminal` have left it.
pub(crate) fn drain(terminal: &impl AsFd) -> io::Result<()> {
    // SAFETY: takes a descriptor, which is open as long as it is borrowed.
    checked(unsafe { libc::tcdrain(terminal.as_fd().as_raw_fd()) }).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forked_child_is_waited_for() {
        // SAFETY: the child only makes a system call.
        let child = unsafe { fork() }.unwrap();
        if child == 0 {
            exit(7);
        }
        wait_end(child).unwrap();
        assert!(wait_end(child).is_err());
    }

    #[test]
    fn wake_op_leaves_the_word() {
        let word = AtomicU32::new(5);
        futex_wake_op(&word).unwrap();
        assert_eq!(word.into_inner(), 5);
    }

    #[test]
    fn missing_file_has_no_status() {
        let error = stat(c"/nowhere/at/all").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
