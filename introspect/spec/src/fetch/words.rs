//! Messages of the kernel's errors (`ERRORS` in kernel/trace/trace_probe.h), which people know and look up. Our
//! additions follow after `; `.

pub(super) const ARG_NAME_TOO_LONG: &str = "Argument name is too long";
pub(super) const NO_ARG_NAME: &str = "Argument name is not specified";
pub(super) const BAD_ARG_NAME: &str = "Argument name must follow the same rules as C identifiers";
/// Two arguments have the same name.
pub const USED_ARG_NAME: &str = "This argument name is already used";
pub(super) const ARG_TOO_LONG: &str = "Argument expression is too long";
pub(super) const NO_ARG_BODY: &str = "No argument expression";
pub(super) const TOO_MANY_ARGS: &str = "Too many arguments are specified";
pub(super) const DOUBLE_ARGS: &str = "$arg* can be used only once in the parameters";
pub(super) const BAD_VAR_ARGS: &str = "$arg* must be an independent parameter without name etc.";
/// A function's arguments are requested at a place other than its entry or exit.
pub const NOFENTRY_ARGS: &str = "$arg* can be used only on function entry or exit";

pub(super) const ARRAY_NO_CLOSE: &str = "Array is not closed";
pub(super) const BAD_ARRAY_SUFFIX: &str = "Array has wrong suffix";
pub(super) const BAD_ARRAY_NUM: &str = "Invalid array size";
pub(super) const ARRAY_TOO_BIG: &str = "Array number is too big";
pub(super) const BAD_TYPE: &str = "Unknown type is specified";
pub(super) const NEED_STRING_TYPE: &str = "$comm and immediate-string only accepts string type";
/// A text is requested from a value that is no address, or an array from a value that is not in memory.
pub const BAD_STRING: &str = "String accepts only memory argument";
pub(super) const BAD_SYMSTRING: &str = "Symbol String doesn't accept data/userdata";
pub(super) const BAD_BITFIELD: &str = "Invalid bitfield";

pub(super) const BAD_VAR: &str = "Invalid $-variable specified";
pub(super) const RETVAL_ON_PROBE: &str = "$retval is not available on probe";
pub(super) const BAD_STACK_NUM: &str = "Invalid stack number";
pub(super) const BAD_ARG_NUM: &str = "Invalid argument number";
pub(super) const BAD_REG_NAME: &str = "Invalid register name";
pub(super) const BAD_MEM_ADDR: &str = "Invalid memory address";
pub(super) const FILE_ON_KPROBE: &str = "File offset is not available with kprobe";
pub(super) const BAD_IMM: &str = "Invalid immediate value";
pub(super) const IMMSTR_NO_CLOSE: &str = "String is not closed with '\"'";
pub(super) const TOO_MANY_OPS: &str = "Dereference is too much nested";
pub(super) const DEREF_NEED_BRACE: &str = "Dereference needs a brace";
pub(super) const BAD_DEREF_OFFS: &str = "Invalid dereference offset";
pub(super) const DEREF_OPEN_BRACE: &str = "Dereference brace is not closed";
pub(super) const COMM_CANT_DEREF: &str = "$comm can not be dereferenced";
/// The value cannot be fetched.
pub const BAD_FETCH_ARG: &str = "Invalid fetch argument";

/// The type information lacks the function.
pub const NO_BTF_ENTRY: &str = "No BTF entry for this probe point";
/// There is no type information.
pub const NOSUP_BTFARG: &str = "BTF is not available or not supported";
/// The function has no result.
pub const NO_RETVAL: &str = "This function returns 'void' type";
/// The function has no such parameter.
pub const NO_BTFARG: &str = "This variable is not found at this probe point";
/// The structure has no such member.
pub const NO_BTF_FIELD: &str = "This field is not found.";
/// The expression accesses a member of a structure that is not in memory.
pub const NOSUP_DAT_ARG: &str = "Non pointer structure/union argument is not supported.";
pub(super) const BAD_HYPHEN: &str = "Failed to parse single hyphen. Forgot '>'?";
/// The expression accesses a member through a value that does not point to a structure.
pub const NO_PTR_STRCT: &str = "This is not a pointer to union/structure.";
pub(super) const TYPECAST_REQ_FIELD: &str = "Typecast requires a field access";
pub(super) const TYPECAST_SYM_OFFSET: &str = "@SYM+/-OFFSET with typecast needs parentheses";
pub(super) const TYPECAST_BAD_ARROW: &str = "Typecast field option does not support -> operator";
pub(super) const TOO_MANY_NESTED: &str = "Too many nested typecasts/dereferences";

/// Messages of errors in filters (kernel/trace/trace_events_filter.c).
pub mod filter {
    pub(in super::super) const INVALID_OP: &str = "Invalid operator";
    pub(in super::super) const TOO_MANY_OPEN: &str = "Too many '('";
    pub(in super::super) const TOO_MANY_CLOSE: &str = "Too few '('";
    pub(in super::super) const MISSING_QUOTE: &str = "Missing matching quote";
    pub(in super::super) const OPERAND_TOO_LONG: &str = "Operand too long";
    /// A number is compared as a text, or a text as a number.
    pub const ILLEGAL_FIELD_OP: &str = "Illegal operation for field type";
    /// Neither an argument nor a common field has that name.
    pub const FIELD_NOT_FOUND: &str = "Field not found";
    pub(in super::super) const ILLEGAL_INTVAL: &str = "Illegal integer value";
    pub(in super::super) const TOO_MANY_PREDS: &str = "Too many terms in predicate expression";
    pub(in super::super) const INVALID_CPULIST: &str = "Invalid cpulist";
    /// The field cannot have the value.
    pub const INVALID_VALUE: &str = "Invalid value (did you forget quotes)?";
    pub(in super::super) const NO_FILTER: &str = "No filter found";
}
