//! Words for the values of enums in messages. The same words are used in text, in JSON and on the command line.

use hvprobe_proto::v1::{
    self, CatchMode, EndReason, EventKind, MachineState, ProbeKind, ProbeState, SymbolKind, Verdict,
};
use hvprobe_proto::wire::WireEnum as _;
use hvprobe_spec::Mechanism;

/// A value that is shown as a word.
pub(crate) trait Word: Sized {
    /// Returns the word; `None` for a value that this program does not know.
    fn word(self) -> Option<&'static str>;

    /// Returns the word, or `unknown` for a value that this program does not know.
    fn or_unknown(self) -> &'static str {
        self.word().unwrap_or("unknown")
    }
}

/// Defines the words of enums.
macro_rules! words {
    ($($of:ident: $($value:ident $word:literal),+;)+) => {$(
        impl Word for $of {
            fn word(self) -> Option<&'static str> {
                match self {
                    Self::Unspecified => None,
                    $(Self::$value => Some($word)),+
                }
            }
        }
    )+};
}

words! {
    CatchMode: DebugExit "debug-exit", EmulationExit "emulation-exit", IdtGate "idt-gate";
    EndReason: Shutdown "shutdown", Reset "reset", Stopped "stopped", TripleFault "triple fault", Crash "crash";
    EventKind: Hit "hit", Post "post", Fault "fault", Return "return";
    MachineState: Booting "booting", Running "running", Paused "paused", Stopped "ended";
    ProbeKind: Probe "probe", Return "return";
    ProbeState: Pending "pending", Placed "placed", Refused "refused", Gone "gone";
    SymbolKind: Text "text", Data "data", Absolute "absolute";
    Verdict: Good "ok", Limited "limited", Bad "bad";
}

impl Word for v1::Mechanism {
    fn word(self) -> Option<&'static str> {
        Mechanism::of(self).map(Mechanism::name)
    }
}
