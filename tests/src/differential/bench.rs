//! A virtual CPU that runs one instruction at a time, from anywhere in a kernel's text.
//!
//! Invariant: before each run the registers, the system registers, the arena and, on request, the extended
//! state are set in full, so no run depends on an earlier one. A run ends at a planted [stop](Bench::plant), at
//! an int3, in an exception, or when KVM cannot continue. There are no interrupt controllers: nothing
//! interrupts a run.
//!
//! Every exception goes through the bench's IDT to `out VECTOR, al`, on a separate stack. An int3 does so only on
//! hosts whose KVM does not report it to the program; the program sees the same end in both cases.

use std::fmt;
use std::time::Duration;

use hvprobe_arch::mem::{OutOfRange, PhysMemory};
use hvprobe_arch::paging::PageTables;
use hvprobe_arch::regs::{Regs, rflags};
use hvprobe_arch::{Gpa, Gva};
use hvprobe_vm::memory::{GuestRam, MemoryError};
use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, kvm_regs, kvm_sregs, kvm_xsave};
use kvm_ioctls::{Cap, Kvm, SyncReg, VcpuExit, VcpuFd, VmFd};

use super::layout::{self, Spaces};
use super::start::{Extended, Host, Start};
use super::system::{STUB, has_error_code, set_pat, set_registers, write_pages};
use super::text::Text;
use super::watchdog::Watchdog;

/// Port to which the planted stops write. The kernel's text never writes to it with an immediate port number.
const STOP_PORT: u8 = 0xb7;
/// `KVM_INTERNAL_ERROR_EMULATION` (include/uapi/linux/kvm.h).
const SUBERROR_EMULATION: u32 = 1;
/// `KVM_INTERNAL_ERROR_EMULATION_FLAG_INSTRUCTION_BYTES` (include/uapi/linux/kvm.h).
const INSTRUCTION_BYTES: u64 = 1;
/// Maximum number of port accesses in a run; more than any instruction makes, because `rep` counts are small here.
const MAX_PORTS: usize = 256;
/// Time limit of a run, far more than an instruction takes on any host.
const LIMIT: Duration = Duration::from_secs(20);

/// #BP.
const BP: u8 = 3;
/// #PF.
pub(super) const PF: u8 = 14;

/// Reason why no bench could be made.
#[derive(Debug)]
pub enum BenchError {
    /// KVM is missing, or refused the named step.
    Kvm(&'static str, kvm_ioctls::Error),
    /// The guest's memory could not be allocated or registered.
    Memory(MemoryError),
    /// The kernel's text does not fit.
    Text(OutOfRange),
    /// KVM cannot pass registers in shared memory.
    NoSyncRegs,
}

impl fmt::Display for BenchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kvm(what, error) => write!(f, "kvm failed to {what}: {error}"),
            Self::Memory(error) => write!(f, "{error}"),
            Self::Text(error) => write!(f, "the kernel's text does not fit: {error}"),
            Self::NoSyncRegs => f.write_str("kvm lacks KVM_CAP_SYNC_REGS"),
        }
    }
}

impl std::error::Error for BenchError {}

impl From<OutOfRange> for BenchError {
    fn from(error: OutOfRange) -> Self {
        Self::Text(error)
    }
}

fn kvm(what: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> BenchError {
    move |error| BenchError::Kvm(what, error)
}

/// Returns the state without `XSTATE_BV`, for comparisons. While a component is in its initial state, the processor
/// may clear its bit there at any time (SDM vol. 1, 13.6); KVM returns the component's values in both cases.
fn values(mut state: [u32; 1024]) -> [u32; 1024] {
    const XSTATE_BV: usize = 128;
    state[XSTATE_BV] = 0;
    state[XSTATE_BV + 1] = 0;
    state
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// At a planted stop, or at an int3.
    At(Gva),
    /// In an exception.
    Exception {
        /// Its vector.
        vector: u8,
        /// The error code, if it has one.
        error: Option<u64>,
        /// CR2, if it is a page fault.
        cr2: Option<u64>,
        /// The RIP in its frame.
        rip: Gva,
    },
    /// KVM cannot emulate the instruction with these bytes.
    CannotEmulate(Vec<u8>),
    /// Anything else, as KVM reports it.
    Other(String),
}

/// A port access by the instruction itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortAccess {
    /// The port.
    pub port: u16,
    /// Bytes written; `None` for a read.
    pub written: Option<Vec<u8>>,
    /// Number of bytes.
    pub len: usize,
}

/// State at the end of a run.
#[derive(Clone)]
pub struct Left {
    /// How the run ended.
    pub end: End,
    /// Registers. RIP is that of `end`, or 0. RF is cleared.
    pub regs: Regs,
    /// System registers, without the changes made by the delivery of an exception.
    pub system: kvm_sregs,
    /// Content of the arena.
    pub arena: Vec<u8>,
    /// Extended state, if it was requested.
    pub extended: Option<Extended>,
    /// Port accesses of the instruction itself, in order.
    pub ports: Vec<PortAccess>,
}

impl fmt::Debug for Left {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Left")
            .field("end", &self.end)
            .field("regs", &self.regs)
            .finish_non_exhaustive()
    }
}

/// Copies general registers from one structure to another.
macro_rules! registers {
    ($from:expr => $to:ident) => {{
        let from = $from;
        $to {
            rax: from.rax,
            rbx: from.rbx,
            rcx: from.rcx,
            rdx: from.rdx,
            rsi: from.rsi,
            rdi: from.rdi,
            rsp: from.rsp,
            rbp: from.rbp,
            r8: from.r8,
            r9: from.r9,
            r10: from.r10,
            r11: from.r11,
            r12: from.r12,
            r13: from.r13,
            r14: from.r14,
            r15: from.r15,
            rip: from.rip,
            rflags: from.rflags,
        }
    }};
}

/// Virtual machine with one virtual CPU.
#[derive(Debug)]
pub struct Bench {
    vcpu: VcpuFd,
    // Dropped after the vCPU. The memory unregisters itself from KVM before it is unmapped.
    ram: GuestRam,
    _vm: VmFd,
    spaces: Spaces,
    system: kvm_sregs,
    extended: Extended,
    /// Original bytes under the planted stops.
    planted: Vec<(Gva, Vec<u8>)>,
    watchdog: Watchdog,
}

impl Bench {
    /// Creates a bench with the text of `kernel`.
    ///
    /// # Errors
    /// When KVM is missing or refuses a step, or there is not enough memory.
    pub fn new(kernel: &Text) -> Result<Self, BenchError> {
        let (start, end) = kernel.bounds();
        let kvm_fd = Kvm::new().map_err(kvm("open /dev/kvm"))?;
        if !kvm_fd.check_extension(Cap::SyncRegs) {
            return Err(BenchError::NoSyncRegs);
        }
        let vm = kvm_fd.create_vm().map_err(kvm("create a machine"))?;
        let size = (end.0 - layout::MAP).next_multiple_of(2 << 20) + (2 << 20);
        let ram = GuestRam::new(size).map_err(BenchError::Memory)?;
        ram.register(&vm).map_err(BenchError::Memory)?;
        let text = usize::try_from(end.0 - start.0)
            .ok()
            .and_then(|len| kernel.image().bytes_at(start, len))
            .unwrap_or_default();
        ram.write(Gpa(start.0 - layout::MAP), text)?;
        write_pages(&ram)?;
        let spaces = layout::write_page_tables(&ram, (start.0, end.0))?;

        let vcpu = vm.create_vcpu(0).map_err(kvm("create a vCPU"))?;
        let cpuid = kvm_fd
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .map_err(kvm("list CPUID"))?;
        let leaf = |number| {
            cpuid
                .as_slice()
                .iter()
                .find(move |leaf| leaf.function == number && leaf.index == 0)
        };
        let has_xsave = leaf(1).is_some_and(|leaf| leaf.ecx & 1 << 26 != 0);
        let has_fsgsbase = leaf(7).is_some_and(|leaf| leaf.ebx & 1 != 0);
        vcpu.set_cpuid2(&cpuid).map_err(kvm("set CPUID"))?;
        let mut system = vcpu.get_sregs().map_err(kvm("read system registers"))?;
        set_registers(&mut system, &spaces, has_xsave, has_fsgsbase);
        vcpu.set_sregs(&system)
            .map_err(kvm("set system registers"))?;
        set_pat(&vcpu).map_err(kvm("set an MSR"))?;
        let extended = vcpu.get_xsave().map_err(kvm("read extended state"))?.region;
        let mut bench = Self {
            vcpu,
            ram,
            _vm: vm,
            spaces,
            system,
            extended: Box::new(extended),
            planted: Vec::new(),
            watchdog: Watchdog::new(),
        };
        bench.vcpu.set_sync_valid_reg(SyncReg::Register);
        bench.vcpu.set_sync_valid_reg(SyncReg::SystemRegister);
        // The values as KVM returns them, for comparisons.
        bench.system = bench
            .vcpu
            .get_sregs()
            .map_err(kvm("read system registers"))?;
        Ok(bench)
    }

    /// Returns the page tables of a run that begins with `start`.
    #[must_use]
    pub fn tables(&self, start: &Start) -> PageTables {
        if start.is_full {
            self.spaces.full
        } else {
            self.spaces.bare
        }
    }

    /// Returns the guest's memory.
    #[must_use]
    pub fn ram(&self) -> &GuestRam {
        &self.ram
    }

    /// Returns the properties of the bench that a start state depends on.
    #[must_use]
    pub fn host(&self, text: &Text) -> Host {
        Host {
            cr0: self.system.cr0,
            cr3: self.system.cr3,
            cr4: self.system.cr4,
            extended: self.extended.clone(),
            text: text.bounds(),
        }
    }

    /// Makes a run end when it reaches one of `stops`, none of which may be inside the instruction at `at`.
    /// Removes the stops that were planted before.
    ///
    /// # Panics
    /// When a stop lies outside the mapped memory.
    pub fn plant(&mut self, stops: &[Gva], at: Gva) {
        const OUT: [u8; 2] = [0xe6, STOP_PORT];
        self.clear();
        let mut stops = stops.to_vec();
        stops.sort_unstable();
        stops.dedup();
        for stop in &stops {
            // `out` exits within microseconds, where an int3 may take a thousand times longer. But `out` has
            // two bytes: the second must not overwrite the instruction or another stop. And hosts differ in
            // whether RIP at the exit is already after it, so the address after it must not be that of
            // another stop.
            let (second, behind) = (stop.wrapping_add(1), stop.wrapping_add(2));
            let needs_int3 = second == at || stops.contains(&second) || stops.contains(&behind);
            let bytes: &[u8] = if needs_int3 { &[0xcc] } else { &OUT };
            let mut before = vec![0; bytes.len()];
            let tables = self.spaces.full;
            tables
                .read(&self.ram, *stop, &mut before)
                .and_then(|()| tables.write(&self.ram, *stop, bytes))
                .unwrap_or_else(|error| panic!("no stop at {stop}: {error}"));
            self.planted.push((*stop, before));
        }
    }

    /// Removes all stops.
    pub fn clear(&mut self) {
        while let Some((at, before)) = self.planted.pop() {
            let written = self.spaces.full.write(&self.ram, at, &before);
            debug_assert!(written.is_ok());
        }
    }

    /// Writes `code` to `at`.
    ///
    /// # Panics
    /// When `at` lies outside the mapped memory.
    pub fn write(&self, at: Gva, code: &[u8]) {
        if let Err(error) = self.spaces.full.write(&self.ram, at, code) {
            panic!("cannot write code at {at}: {error}");
        }
    }

    /// Writes `content` to the arena.
    ///
    /// # Panics
    /// When it is longer than the arena.
    pub fn fill_arena(&self, content: &[u8]) {
        assert!(content.len() as u64 <= layout::ARENA_SIZE);
        if let Err(error) = self.ram.write(layout::ARENA_FRAMES, content) {
            panic!("cannot fill the arena: {error}");
        }
    }

    /// Returns the content of the arena.
    ///
    /// # Panics
    /// Never.
    #[must_use]
    pub fn arena(&self) -> Vec<u8> {
        let mut arena = vec![0; usize::try_from(layout::ARENA_SIZE).unwrap_or(0)];
        if let Err(error) = self.ram.read(layout::ARENA_FRAMES, &mut arena) {
            panic!("cannot read the arena: {error}");
        }
        arena
    }

    /// Runs from `start` on. If `extended` is given, sets this extended state before the run, and reads the state
    /// afterwards.
    pub fn run(&mut self, start: &Start, extended: Option<&Extended>) -> Left {
        let mut ports = Vec::new();
        let end = match self.enter(start, extended) {
            Ok(()) => self.until_end(&mut ports),
            Err(error) => End::Other(error.to_string()),
        };
        self.leave(end, extended.is_some(), ports)
    }

    fn enter(&mut self, start: &Start, extended: Option<&Extended>) -> Result<(), BenchError> {
        if let Some(state) = extended {
            let state = kvm_xsave {
                region: **state,
                ..Default::default()
            };
            // SAFETY: this program never requests for its guests, by `arch_prctl`, a feature whose state takes more
            // than the 4 KiB of `kvm_xsave`.
            unsafe { self.vcpu.set_xsave(&state) }.map_err(kvm("set extended state"))?;
        }
        let mut system = self.system;
        system.cr2 = 0;
        system.cr3 = self.tables(start).root.0;
        system.fs.base = start.fs_base;
        system.gs.base = start.gs_base;
        let sync = self.vcpu.sync_regs_mut();
        sync.regs = registers!(start.regs => kvm_regs);
        sync.sregs = system;
        self.vcpu.set_sync_dirty_reg(SyncReg::Register);
        self.vcpu.set_sync_dirty_reg(SyncReg::SystemRegister);
        Ok(())
    }

    fn until_end(&mut self, ports: &mut Vec<PortAccess>) -> End {
        loop {
            let (exit, expired) = self.watchdog.watch(LIMIT, || self.vcpu.run());
            let access = match exit {
                Err(error) if error.errno() == libc::EINTR && !expired => continue,
                Err(_) if expired => return End::Other(format!("no end after {LIMIT:?}")),
                Err(error) => return End::Other(format!("KVM_RUN: {error}")),
                Ok(VcpuExit::InternalError) => return self.internal_error(),
                Ok(VcpuExit::IoOut(port, data)) => PortAccess {
                    port,
                    len: data.len(),
                    written: Some(data.to_vec()),
                },
                Ok(VcpuExit::IoIn(port, data)) => {
                    for (index, byte) in (0..).zip(data.iter_mut()) {
                        let at = u8::try_from(ports.len() & 0xff).unwrap_or(0);
                        *byte = 0xa5_u8
                            .wrapping_add(at)
                            .wrapping_mul(31)
                            .wrapping_add(index);
                    }
                    PortAccess {
                        port,
                        len: data.len(),
                        written: None,
                    }
                }
                Ok(other) => return End::Other(format!("{other:?}")),
            };
            let rip = self.vcpu.sync_regs().regs.rip;
            if let Some(end) = self.known(&access, rip) {
                self.complete();
                return end;
            }
            ports.push(access);
            if ports.len() > MAX_PORTS {
                return End::Other("port access without end".to_owned());
            }
        }
    }

    /// Lets KVM complete a port access. Otherwise, if the next run begins at the instruction that made the access,
    /// KVM would skip that instruction (KVM API, 5, the note on `KVM_EXIT_IO`).
    fn complete(&mut self) {
        self.vcpu.set_kvm_immediate_exit(1);
        // Returns EINTR.
        let _ = self.vcpu.run();
        self.vcpu.set_kvm_immediate_exit(0);
    }

    /// Returns the end that a port access stands for, if it was made by an `out` of the bench itself. Hosts differ
    /// in whether RIP at the exit is already after the `out`.
    fn known(&self, access: &PortAccess, rip: u64) -> Option<End> {
        let stubs = layout::system(layout::STUBS).0;
        if (stubs..stubs + layout::PAGE).contains(&rip) {
            let vector = u8::try_from(access.port).ok()?;
            return Some(self.exception(vector));
        }
        if access.port != u16::from(STOP_PORT) {
            return None;
        }
        self.planted
            .iter()
            .filter(|(_, before)| before.len() == 2)
            .find(|(at, _)| rip == at.0 || rip == at.0 + 2)
            .map(|(at, _)| End::At(*at))
    }

    /// Reads the frame of the exception that was taken.
    fn exception(&self, vector: u8) -> End {
        let [rip, _, _, _, error] = self.frame(vector);
        if vector == BP {
            return End::At(Gva(rip.wrapping_sub(1)));
        }
        End::Exception {
            vector,
            error: has_error_code(vector).then_some(error),
            cr2: (vector == PF).then(|| self.vcpu.sync_regs().sregs.cr2),
            rip: Gva(rip),
        }
    }

    /// Returns RIP, RFLAGS, RSP and SS of the exception frame, and the error code or 0.
    fn frame(&self, vector: u8) -> [u64; 5] {
        let word = |below: u64| {
            self.ram
                .read_u64(layout::EXCEPTION_STACK.wrapping_sub(below))
                .unwrap_or(0)
        };
        let error = if has_error_code(vector) { word(48) } else { 0 };
        [word(40), word(24), word(16), word(8), error]
    }

    fn internal_error(&mut self) -> End {
        // SAFETY: the last exit was an internal error, for which KVM fills this member of the union. Its fields
        // are integers, so any bytes are valid.
        let failure = unsafe { self.vcpu.get_kvm_run().__bindgen_anon_1.emulation_failure };
        if failure.suberror != SUBERROR_EMULATION {
            return End::Other(format!("internal error {}", failure.suberror));
        }
        let mut bytes = Vec::new();
        // KVM counts the 64-bit words it has filled in; the first is the flags.
        if failure.ndata > 0 && failure.flags & INSTRUCTION_BYTES != 0 {
            // SAFETY: as above; the flag says that these words are filled.
            let instruction = unsafe { failure.__bindgen_anon_1.__bindgen_anon_1 };
            let len = usize::from(instruction.insn_size).min(instruction.insn_bytes.len());
            bytes.extend_from_slice(&instruction.insn_bytes[..len]);
        }
        if bytes.first() == Some(&0xcc) {
            End::At(Gva(self.vcpu.sync_regs().regs.rip))
        } else {
            End::CannotEmulate(bytes)
        }
    }

    fn leave(&mut self, end: End, with_extended: bool, ports: Vec<PortAccess>) -> Left {
        let sync = self.vcpu.sync_regs();
        let mut regs = registers!(sync.regs => Regs);
        let stubs = layout::system(layout::STUBS).0;
        if (stubs..stubs + layout::PAGE).contains(&regs.rip) {
            let vector = u8::try_from((regs.rip - stubs) / STUB).unwrap_or(0);
            let [_, flags, rsp, ..] = self.frame(vector);
            regs.rflags = flags;
            regs.rsp = rsp;
        }
        regs.rip = match end {
            End::At(at) | End::Exception { rip: at, .. } => at.0,
            _ => 0,
        };
        regs.rflags &= !rflags::RF;
        let mut system = sync.sregs;
        // Both depend on whether an exception was taken; no instruction under test changes them.
        system.cs = self.system.cs;
        system.ss = self.system.ss;
        Left {
            end,
            regs,
            system,
            arena: self.arena(),
            extended: with_extended
                .then(|| self.vcpu.get_xsave().ok())
                .flatten()
                .map(|state| Box::new(values(state.region))),
            ports,
        }
    }
}
