//! Signal handlers that do what a host does for detours: continue elsewhere after a known int3, and count a
//! doorbell's rings. They also do what a guest's kernel does for its own loads: continue elsewhere after a fault of
//! a known load. If the test asks for it, they call a function before they continue.
//!
//! Everything the handlers access is an atomic in a static table, so they may run at any time, and nested.

use std::io;
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

use hvprobe_arch::Gva;

/// An int3 or a load that may fault.
struct Trap {
    at: AtomicU64,
    to: AtomicU64,
    hits: AtomicU64,
    /// Function called at each hit, or zero. Its argument grows by one from call to call.
    function: AtomicU64,
    argument: AtomicU64,
}

/// Maximum number of traps at a time.
const TRAPS: usize = 256;
/// Size of a stack for nested signals, each of which takes almost 4 KiB.
const SIGNAL_STACK: usize = 256 << 10;
/// Marks an entry that is being filled in: no address matches it.
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

/// Registration of an int3, or of a load that may fault, after which the handlers continue elsewhere. Ends when
/// dropped.
#[derive(Debug)]
pub struct Known(usize);

/// Function that a handler may call.
pub type Function = extern "C" fn(u64) -> u64;

impl Known {
    /// Makes each hit call `function` before the handler continues elsewhere. The first call has the argument
    /// `argument`, each further call the next number. The thread needs a [`SignalStack`] for that.
    pub fn calls(&self, function: Function, argument: u64) {
        let trap = &TABLE[self.0];
        trap.argument.store(argument, Ordering::SeqCst);
        let function = function as *const () as u64;
        trap.function.store(function, Ordering::SeqCst);
    }

    /// Returns the number of hits.
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

/// Registers the int3 or the load at `at`. After its hit or fault, execution continues at `to`.
///
/// # Panics
/// When the table is full.
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

/// Returns how often the doorbell at `port` rang.
#[must_use]
pub fn doorbells(port: u8) -> u64 {
    DOORBELLS[usize::from(port)].load(Ordering::SeqCst)
}

impl Trap {
    fn call(&self) {
        let function = self.function.load(Ordering::SeqCst);
        if let Ok(function @ 1..) = usize::try_from(function) {
            let function = std::ptr::with_exposed_provenance::<()>(function);
            // SAFETY: the value is the function pointer given to `Known::calls`.
            let function: Function = unsafe { std::mem::transmute(function) };
            function(self.argument.fetch_add(1, Ordering::SeqCst));
        }
    }
}

/// Alternate stack of the current thread, with room for nested signals. Must be dropped on that thread.
pub struct SignalStack {
    before: libc::stack_t,
    /// Memory of the alternate stack.
    _memory: Vec<u8>,
}

impl SignalStack {
    /// Allocates and installs the stack.
    ///
    /// # Errors
    /// When the system call fails.
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
        // SAFETY: the thread's previous stack, which is still there. The raw pointers in `before` keep this
        // value on its thread.
        unsafe { libc::sigaltstack(&raw const self.before, std::ptr::null_mut()) };
    }
}

/// Installs the handlers.
pub fn install() {
    INSTALL.call_once(|| {
        for signal in [libc::SIGTRAP, libc::SIGSEGV] {
            // `SA_NODEFER`, because the function called at a fault may fault itself.
            handle_with(signal, trapped, libc::SA_NODEFER).expect("a signal handler");
        }
    });
}

/// Handler of a signal.
pub type Handler = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);

/// Makes `handler` the handler of `signal`, on the thread's alternate stack if it has one.
///
/// # Errors
/// When the system call fails.
pub fn handle(signal: libc::c_int, handler: Handler) -> io::Result<()> {
    handle_with(signal, handler, 0)
}

fn handle_with(signal: libc::c_int, handler: Handler, flags: libc::c_int) -> io::Result<()> {
    // SAFETY: all zeroes is an empty action.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART | flags;
    // SAFETY: the handlers access only atomics, statically initialised variables of their thread, and their
    // arguments.
    match unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Returns the saved RIP of the interrupted thread.
///
/// # Safety
/// `context` must be the third argument of a handler that has not returned yet.
pub unsafe fn interrupted<'a>(context: *mut libc::c_void) -> &'a mut i64 {
    // SAFETY: the kernel passes a `ucontext_t` on the handler's stack (sigaction(2)).
    let context = unsafe { &mut *context.cast::<libc::ucontext_t>() };
    &mut context.uc_mcontext.gregs[libc::REG_RIP as usize]
}

extern "C" fn trapped(signal: libc::c_int, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the context is this handler's.
    let rip = unsafe { interrupted(context) };
    let at = rip.cast_unsigned();
    // RIP is after an int3, but at an instruction that faults.
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
        // SAFETY: the processor has fetched from there. It is in an arena, where readable memory follows the code.
        let (opcode, port) = unsafe { (code.read_volatile(), code.add(1).read_volatile()) };
        if opcode == OUT_IMM8 {
            DOORBELLS[usize::from(port)].fetch_add(1, Ordering::SeqCst);
            *rip += 2;
            return;
        }
    }
    // The signal has no known cause: without the handler, the process dies when the instruction runs again.
    // SAFETY: restoring the default is allowed in a handler.
    unsafe { libc::signal(signal, libc::SIG_DFL) };
}
