//! What a host does for detours, done by signal handlers: goes on elsewhere after an int3 that it
//! knows, and takes note when a doorbell rings. And what a guest's kernel does for loads of its own: goes
//! on elsewhere when one that it knows faults, maybe after having called a function first.
//!
//! Everything the handlers look at is an atomic in a static table, so they may run at any time, and in
//! each other.

use std::io;
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

use hvprobe_arch::Gva;

/// One int3, or a load that may fault.
struct Trap {
    at: AtomicU64,
    to: AtomicU64,
    hits: AtomicU64,
    /// What is called at each hit, with a number that grows; or zero.
    function: AtomicU64,
    argument: AtomicU64,
}

/// How many may be known at a time.
const TRAPS: usize = 256;
/// Room for signals in signals, each of which takes almost 4 KiB.
const SIGNAL_STACK: usize = 256 << 10;
/// Marks an entry that is being filled in: no int3 is there.
const TAKEN: u64 = u64::MAX;

static TABLE: [Trap; TRAPS] = [const {
    Trap {
        at: AtomicU64::new(0),
        to: AtomicU64::new(0),
        hits: AtomicU64::new(0),
        function: AtomicU64::new(0),
        argument: AtomicU64::new(0),
    }
}; TRAPS];
static DOORBELLS: [AtomicU64; 256] = [const { AtomicU64::new(0) }; 256];
static INSTALL: Once = Once::new();

/// `out imm8, al`.
const OUT_IMM8: u8 = 0xe6;

/// An int3, or a load that may fault, that this process goes on from.
#[derive(Debug)]
pub struct Known(usize);

/// What a handler may call.
pub type Function = extern "C" fn(u64) -> u64;

impl Known {
    /// From now on each hit calls `function` first, with `argument` and the numbers that follow. The
    /// thread needs [room](SignalStack) for that.
    pub fn calls(&self, function: Function, argument: u64) {
        let trap = &TABLE[self.0];
        trap.argument.store(argument, Ordering::SeqCst);
        let function = function as *const () as u64;
        trap.function.store(function, Ordering::SeqCst);
    }

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

/// From now on the int3 at `at`, or a fault of the load there, leads to `to`.
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
    let index = TABLE.iter().position(take).expect("room in the table");
    TABLE[index].to.store(to.0, Ordering::SeqCst);
    TABLE[index].hits.store(0, Ordering::SeqCst);
    TABLE[index].function.store(0, Ordering::SeqCst);
    TABLE[index].at.store(at.0, Ordering::SeqCst);
    Known(index)
}

/// How often the doorbell at `port` rang.
#[must_use]
pub fn doorbells(port: u8) -> u64 {
    DOORBELLS[usize::from(port)].load(Ordering::SeqCst)
}

impl Trap {
    fn call(&self) {
        let function = self.function.load(Ordering::SeqCst);
        if let Ok(function @ 1..) = usize::try_from(function) {
            let function = std::ptr::with_exposed_provenance::<()>(function);
            // SAFETY: what `Known::calls` was given.
            let function: Function = unsafe { std::mem::transmute(function) };
            function(self.argument.fetch_add(1, Ordering::SeqCst));
        }
    }
}

/// Room for signals in signals of the thread that made it, until dropped there.
pub struct SignalStack {
    before: libc::stack_t,
    /// Its own, which signals are handled on.
    _memory: Vec<u8>,
}

impl SignalStack {
    /// Makes room.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn new() -> io::Result<Self> {
        let mut memory = vec![0; SIGNAL_STACK];
        let stack = libc::stack_t {
            ss_sp: memory.as_mut_ptr().cast(),
            ss_flags: 0,
            ss_size: memory.len(),
        };
        // SAFETY: all zeroes is valid.
        let mut before: libc::stack_t = unsafe { std::mem::zeroed() };
        // SAFETY: the memory stays until this is dropped, and nothing else refers to it.
        match unsafe { libc::sigaltstack(&raw const stack, &raw mut before) } {
            0 => Ok(Self {
                before,
                _memory: memory,
            }),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl std::fmt::Debug for SignalStack {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SignalStack").finish_non_exhaustive()
    }
}

impl Drop for SignalStack {
    fn drop(&mut self) {
        // SAFETY: what the thread had before, which it still has. Raw pointers keep this from another
        // thread.
        unsafe { libc::sigaltstack(&raw const self.before, std::ptr::null_mut()) };
    }
}

/// Installs the handlers.
pub fn install() {
    INSTALL.call_once(|| {
        for signal in [libc::SIGTRAP, libc::SIGSEGV] {
            // In each other, too: what is called at a fault may fault.
            handle_with(signal, trapped, libc::SA_NODEFER).expect("a signal handler");
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
    handle_with(signal, handler, 0)
}

fn handle_with(signal: libc::c_int, handler: Handler, flags: libc::c_int) -> io::Result<()> {
    // SAFETY: all zeroes is an empty action.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART | flags;
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
    // Behind an int3, and before what faults.
    let here = at.wrapping_sub(u64::from(signal == libc::SIGTRAP));
    let is_here = |trap: &&Trap| trap.at.load(Ordering::SeqCst) == here;
    if let Some(trap) = TABLE.iter().find(is_here) {
        trap.hits.fetch_add(1, Ordering::SeqCst);
        trap.call();
        *rip = trap.to.load(Ordering::SeqCst).cast_signed();
        return;
    }
    if signal == libc::SIGSEGV && (0x1000_0000..0x8000_0000).contains(&at) {
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
