//! Arguments of system calls, at the entry functions of the calls (`__x64_sys_*`).
//!
//! Such a function has one parameter: a pointer to the registers of the process, which contain the arguments of the
//! call (`SC_X86_64_REGS_TO_ARGS` in arch/x86/include/asm/syscall_wrapper.h). Invariant: the arguments of the call
//! are resolved only for a function with exactly that parameter, and with the names and types that the kernel keeps
//! for its own events.

use hvprobe_arch::regs::Gpr;
use hvprobe_linux::image::CallParameter;
use hvprobe_linux::types::{Kind, Place, TypeId, Types};
use hvprobe_spec::shape::{Shape, ShapeKind};

use super::flags;
use super::parameter::Parameter;
use super::types;

/// Offsets of the arguments of a system call in `pt_regs`, in order: di, si, dx, r10, r8, r9
/// (arch/x86/include/uapi/asm/ptrace.h, which never changes).
const REGISTERS: [i64; 6] = [112, 104, 96, 56, 72, 64];

/// A system call.
pub(super) struct Call {
    /// Register that points to the registers of the process.
    pub(super) registers: Gpr,
    pub(super) parameters: Vec<CallArgument>,
    /// Whether the call replaces the registers of the process.
    pub(super) replaces: bool,
}

/// An argument of a system call.
pub(super) struct CallArgument {
    pub(super) name: String,
    /// Offset in `pt_regs`.
    pub(super) offset: i64,
    /// Type; `None` for pointers, and if the kernel's types do not contain it.
    pub(super) ty: Option<TypeId>,
    /// Whether it points to characters.
    pub(super) characters: bool,
    /// Whether it points to a text: to constant characters whose number is not the next argument.
    pub(super) text: bool,
    /// Shape in which it is shown.
    pub(super) shape: Shape,
}

impl Call {
    /// Returns the system call whose entry is `function`. `known` are the parameters of the call, `taken` those of
    /// the function.
    pub(super) fn at(
        function: &str,
        known: &[CallParameter],
        taken: &[Parameter],
        types: &Types,
    ) -> Option<Self> {
        let [
            Parameter {
                ty,
                place: Place::Register(registers),
                ..
            },
        ] = taken
        else {
            return None;
        };
        let of = types.name(types.pointee(*ty)?);
        (of.trim_start_matches("const ") == "struct pt_regs").then_some(())?;
        let call = function.trim_start_matches("__x64_sys_");
        let parameters = known.iter().zip(REGISTERS).enumerate();
        let parameters = parameters.map(|(number, (it, offset))| {
            let counts = |next: &CallParameter| {
                type_named(types, &next.ty).is_some_and(|ty| types::is_size(types, ty))
            };
            let ty = type_named(types, &it.ty);
            let characters = is_characters(&it.ty);
            CallArgument {
                text: characters
                    && it.ty.starts_with("const ")
                    && !known.get(number + 1).is_some_and(counts),
                shape: shape(types, ty, it, flags::of(call, &it.name)),
                name: it.name.clone(),
                offset,
                ty,
                characters,
            }
        });
        Some(Self {
            // After these calls the registers are those with which a program starts.
            replaces: matches!(call, "execve" | "execveat"),
            registers: *registers,
            parameters: parameters.collect(),
        })
    }

    pub(super) fn by_name(&self, name: &str) -> Option<&CallArgument> {
        self.parameters.iter().find(|it| it.name == name)
    }
}

/// Returns the shape of an argument of type `ty`. `flags` is the kind of its shape if it consists of flags.
fn shape(
    types: &Types,
    ty: Option<TypeId>,
    parameter: &CallParameter,
    flags: Option<ShapeKind>,
) -> Shape {
    let known = ty.and_then(|ty| types::shape(types, ty));
    let known = known.filter(|shape| (1..=8).contains(&shape.size));
    let (size, kind) = match (known, parameter.ty.contains('*')) {
        (Some(known), _) => (known.size, known.kind),
        (None, true) => (8, ShapeKind::Pointer),
        (None, false) => (8, ShapeKind::Hex),
    };
    Shape {
        name: parameter.ty.clone(),
        size,
        kind: flags.unwrap_or(kind),
    }
}

/// Returns whether the type `written`, in the spelling of the source, is a pointer to characters.
fn is_characters(written: &str) -> bool {
    let words = written.split(|c: char| c.is_whitespace() || c == '*');
    let words = words.filter(|word| !word.is_empty() && *word != "const");
    words.eq(["char"]) && written.matches('*').count() == 1
}

/// Returns the type with the source's spelling `written`, if it is not a pointer and the types contain it.
fn type_named(types: &Types, written: &str) -> Option<TypeId> {
    let name = match written.trim_start_matches("const ") {
        pointer if pointer.contains('*') => return None,
        // The types have the spellings of the compiler.
        "unsigned" => "unsigned int",
        "long" => "long int",
        "unsigned long" => "long unsigned int",
        "long long" => "long long int",
        "unsigned long long" => "long long unsigned int",
        "short" => "short int",
        "unsigned short" => "short unsigned int",
        name => name,
    };
    let plain = |id: &TypeId| matches!(types.kind(*id), Some(Kind::Int(_) | Kind::Typedef(_)));
    types.named(name).find(plain)
}
