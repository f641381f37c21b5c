//! What a host does for detours, done by signal handlers: goes on elsewhere after an int3 that it
//! knows, and takes note when a doorbell rings.
//!
//! Everything the handlers look at is an atomic in a static table, so they may run at any time.

use std::io;
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

use hvprobe_arch::Gva;

/// One int3.
struct Trap {
    at: AtomicU64,
    to: AtomicU64,
    hits: AtomicU64,
}

/// How many may be known at a time.
const TRAPS: usize = 64;
/// Marks an entry that is being filled in: no int3 is there.
const TAKEN: u64 = u64::MAX;

static TABLE: [Trap; TRAPS] = [const {
    Trap {
        at: AtomicU64::new(0),
        to: AtomicU64::new(0),
        hits: AtomicU64::new(0),
    }
}; TRAPS];
static DOORBELLS: [AtomicU64; 256] = [const { AtomicU64::new(0) }; 256];
static INSTALL: Once = Once::new();

/// `out imm8, al`.
const OUT_IMM8: u8 = 0xe6;

/// An int3 that this process goes on from.
#[derive(Debug)]
pub struct Known(usize);

impl Known {
    /// How often it was hit.
    #[must_use]
    pub fn hits(&self) -> u64 {
        TABLE[self.0].hits.load(Ordering::SeqCst)
    }
}

impl Drop for Known {
    fn drop(&mut self) {
        TABLE[self.0].at.store(0, Ordering::SeqCst);
    }
}

/// From now on the int3 at `at` leads to `to`.
///
/// # Panics
/// When there are too many.
#[must_use]
pub fn know(at: Gva, to: Gva) -> Known {
    install();
    let take = |trap: &Trap| {
        let (order, failed) = (Ordering::SeqCst, Ordering::SeqCst);
        trap.at.compare_exchange(0, TAKEN, order, failed).is_ok()
    };
    let index = TABLE
        .iter()
        .position(take)
        .expect("room in the table of int3s");
    TABLE[index].to.store(to.0, Ordering::SeqCst);
    TABLE[index].hits.store(0, Ordering::SeqCst);
    TABLE[index].at.store(at.0, Ordering::SeqCst);
    Known(index)
}

/// How often the doorbell at `port` rang.
#[must_use]
pub fn doorbells(port: u8) -> u64 {
    DOORBELLS[usize::from(port)].load(Ordering::SeqCst)
}

/// Installs the handlers.
pub fn install() {
    INSTALL.call_once(|| {
        for signal in [libc::SIGTRAP, libc::SIGSEGV] {
            handle(signal, trapped).expect("a signal handler");
        }
    });
}

/// A signal's handler.
pub type Handler = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);

/// Makes `handler` the handler of `signal`, on the thread's alternate stack if it has one.
///
/// # Errors
/// When the system refuses.
pub fn handle(signal: libc::c_int, handler: Handler) -> io::Result<()> {
    // SAFETY: all zeroes is an empty action.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;
    // SAFETY: the handlers here only touch atomics and their own arguments.
    match unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Where the signal interrupted the thread.
///
/// # Safety
/// `context` is what a handler got as its third argument, and the handler has not returned.
pub unsafe fn interrupted<'a>(context: *mut libc::c_void) -> &'a mut i64 {
    // SAFETY: the kernel passes a `ucontext_t` on the handler's stack (sigaction(2)).
    let context = unsafe { &mut *context.cast::<libc::ucontext_t>() };
    &mut context.uc_mcontext.gregs[libc::REG_RIP as usize]
}

extern "C" fn trapped(signal: libc::c_int, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the context is this handler's.
    let rip = unsafe { interrupted(context) };
    let at = rip.cast_unsigned();
    if signal == libc::SIGTRAP {
        let known = TABLE
            .iter()
            .find(|trap| trap.at.load(Ordering::SeqCst) == at.wrapping_sub(1));
        if let Some(trap) = known {
            trap.hits.fetch_add(1, Ordering::SeqCst);
            *rip = trap.to.load(Ordering::SeqCst).cast_signed();
            return;
        }
    } else if (0x1000_0000..0x8000_0000).contains(&at) {
        let code = std::ptr::with_exposed_provenance::<u8>(usize::try_from(at).unwrap_or(0));
        // SAFETY: the processor has fetched from there: an arena, which holds code and more behind.
        let (opcode, port) = unsafe { (code.read_volatile(), code.add(1).read_volatile()) };
        if opcode == OUT_IMM8 {
            DOORBELLS[usize::from(port)].fetch_add(1, Ordering::SeqCst);
            *rip += 2;
            return;
        }
    }
    // Nobody's: end as without a handler, when the instruction is tried again.
    // SAFETY: restoring the default is allowed in a handler.
    unsafe { libc::signal(signal, libc::SIG_DFL) };
}
