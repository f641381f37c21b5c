//! Mistakes in arguments: the kernel's messages, at the kernel's columns.

use super::*;

#[test]
fn names_are_checked() {
    let long = format!("{}=%di", "a".repeat(33));
    refused(&long, 0, "Argument name is too long; at most 32 characters");
    assert!(parse(&format!("p f {}", &long[1..])).is_ok());
    refused("=%di", 0, "Argument name is not specified");
    refused(
        "1a=%di",
        0,
        "Argument name must follow the same rules as C identifiers",
    );
    refused(
        "a-b=%di",
        0,
        "Argument name must follow the same rules as C identifiers",
    );
    refused(
        "->0=%di",
        0,
        "Argument name must follow the same rules as C identifiers",
    );
    refused("a=", 2, "No argument expression");
    for taken in [
        "common_pid=%di",
        "__probe_ip=%di",
        "a=%di a=%si",
        "%di arg1=%si",
        "arg2=%di %si",
        "x x",
    ] {
        let column = taken.find(' ').map_or(0, |at| at + 1);
        refused(taken, column, "This argument name is already used");
    }
    let long = format!("x=+0(%di):{}", "a".repeat(248));
    refused(
        &long,
        2,
        "Argument expression is too long; at most 255 characters",
    );
    let many = "%di ".repeat(129);
    refused(&many, 0, "Too many arguments are specified; at most 128");
    assert_eq!(arguments(&format!("p f {}", "%di ".repeat(128))).len(), 128);
}

#[test]
fn variables_are_checked() {
    refused("%rdi", 0, "Invalid register name; write `%di`");
    refused("a=%bar", 2, "Invalid register name");
    refused("%", 0, "Invalid register name");
    refused("$bar", 0, "Invalid $-variable specified");
    refused("$", 0, "Invalid $-variable specified");
    refused("$stack1a", 0, "Invalid $-variable specified");
    refused("$stackx", 0, "Invalid $-variable specified");
    refused("$stack2049", 0, "Invalid stack number");
    refused(
        "$stack99999999999999999999",
        0,
        "Invalid $-variable specified",
    );
    refused("$arg0", 0, "Invalid argument number; the first is `$arg1`");
    refused(
        "$arg2049",
        0,
        "Invalid argument number; the first is `$arg1`",
    );
    refused("$arg", 0, "Invalid $-variable specified");
    refused("$arg1->f", 0, "Invalid $-variable specified");
    refused("$comm2", 0, "Invalid $-variable specified");
    refused("$currents", 0, "Invalid $-variable specified");
    refused("$retval", 0, "$retval is not available on probe");
    refused_of(
        "r f ",
        "$retvals",
        0,
        "This variable is not found at this probe point",
    );
    refused_of(
        "p f+8 ",
        "$arg1",
        0,
        "$arg* can be used only on function entry or exit",
    );
    refused_of(
        "p f+8 ",
        "$argx",
        0,
        "$arg* can be used only on function entry or exit",
    );
    refused_of("p f+8 ", "x=$argx", 2, "Invalid $-variable specified");
    refused_of(
        "p f+8 ",
        "$arg*",
        0,
        "$arg* can be used only on function entry or exit",
    );
    refused_of(
        "p f+8 ",
        "+0(count)",
        3,
        "BTF is not available or not supported; arguments have names at a function's entry only",
    );
    refused_of(
        "p f+8 ",
        "(s)%di->a",
        0,
        "BTF is not available or not supported",
    );
    refused(
        "$arg* %di $arg*",
        10,
        "$arg* can be used only once in the parameters",
    );
    refused(
        "$arg*:u8",
        0,
        "$arg* must be an independent parameter without name etc.",
    );
    let alone = "Invalid $-variable specified; `$arg*` stands alone, without a name or a type";
    refused("x=$arg*", 2, alone);
    refused("+0($arg*)", 3, alone);
}

#[test]
fn memory_and_numbers_are_checked() {
    refused("@0xg", 0, "Invalid memory address");
    refused("@12z", 0, "Invalid memory address");
    refused("@+5", 0, "File offset is not available with kprobe");
    refused(
        "@",
        1,
        "Invalid memory address; a symbol or an address belongs here",
    );
    refused(
        "@a*b",
        2,
        "Invalid memory address; a symbol or an address belongs here",
    );
    refused("@a+", 2, "Invalid memory address; bad offset of the symbol");
    refused(
        "@a+b",
        2,
        "Invalid memory address; bad offset of the symbol",
    );
    refused("\\", 1, "Invalid immediate value");
    refused("\\x", 1, "Invalid immediate value");
    refused("\\1x", 1, "Invalid immediate value");
    refused("\\--1", 1, "Invalid immediate value");
    refused("a=\\\"abc", 7, "String is not closed with '\"'");
    refused("\\\"", 2, "String is not closed with '\"'");
    refused("?", 0, "Invalid fetch argument");
    refused("1", 0, "Invalid fetch argument");
    refused(":u8", 0, "Invalid fetch argument");
}

#[test]
fn dereferences_are_checked_from_the_outside_in() {
    refused(
        "+8",
        0,
        "Dereference needs a brace; an offset follows the symbol without a blank",
    );
    refused("a=+8%di", 2, "Dereference needs a brace");
    refused("+x(%di)", 0, "Invalid dereference offset");
    refused("+(%di)", 0, "Invalid dereference offset");
    refused("+uu8(%di)", 0, "Invalid dereference offset");
    refused("+9223372036854775808(%di)", 0, "Invalid dereference offset");
    refused("+8(%di", 6, "Dereference brace is not closed");
    refused("+8(-4(%di)", 9, "Dereference brace is not closed");
    refused("+8()", 3, "Invalid fetch argument");
    refused("+8(%foo)", 3, "Invalid register name");
    refused("x=-u8(+4(%foo))", 9, "Invalid register name");
    refused("+0($comm)", 3, "$comm can not be dereferenced");
    refused("+0(\\\"a\")", 3, "$comm can not be dereferenced");
    refused("this_cpu_read(%foo)", 14, "Invalid register name");
    refused("this_cpu_ptr(%di", 16, "Dereference brace is not closed");
    refused(
        "+0(%di)x:u8",
        7,
        "Invalid fetch argument; nothing but a type can follow the last `)`",
    );
    let nested = |levels: usize, inner: &str| {
        format!("{}{inner}{}", "+0(".repeat(levels), ")".repeat(levels))
    };
    assert!(parse(&format!("p f {}", nested(14, "%di"))).is_ok());
    refused(&nested(15, "%di"), 3, "Dereference is too much nested");
    refused(&nested(13, "@a"), 3, "Dereference is too much nested");
    refused(
        &format!("{}:string[2]", nested(14, "%di")),
        0,
        "Dereference is too much nested",
    );
    refused(
        &format!("{}:b1@0/8", nested(14, "%di")),
        60,
        "Invalid bitfield",
    );
}

#[test]
fn members_and_casts_are_checked() {
    refused("a-b", 1, "Failed to parse single hyphen. Forgot '>'?");
    refused("a->b-c", 4, "Failed to parse single hyphen. Forgot '>'?");
    refused(
        "a.b",
        2,
        "Non pointer structure/union argument is not supported.",
    );
    refused("a->", 3, "This field is not found.");
    refused("a->b..c", 5, "This field is not found.");
    refused("a->b*", 3, "This field is not found.");
    refused("a*b", 0, "This variable is not found at this probe point");
    refused_of(
        "r f ",
        "$retval.x",
        8,
        "Non pointer structure/union argument is not supported.",
    );
    refused("(s", 2, "Dereference brace is not closed");
    refused("(s)", 3, "Typecast requires a field access");
    refused("(s)a", 4, "Typecast requires a field access");
    refused("(s)a-b->c", 9, "Typecast requires a field access");
    refused("(s)(a", 3, "Dereference brace is not closed");
    refused("(s)(a)", 6, "Typecast requires a field access");
    refused("(s)+8(a)", 8, "Typecast requires a field access");
    refused("(s)+8->f", 3, "Dereference needs a brace");
    refused("(s)+8(a->f", 10, "Dereference brace is not closed");
    refused(
        "(s)@a-8->f",
        3,
        "@SYM+/-OFFSET with typecast needs parentheses",
    );
    assert!(parse("p f (s)(@a-8)->f").is_ok());
    refused(
        "(s,a->b)%di->f",
        4,
        "Typecast field option does not support -> operator",
    );
    refused(
        "(s*)%di->f",
        1,
        "This is not a pointer to union/structure.; write the name of the structure alone: `(task_struct)`",
    );
    refused("(s,)%di->f", 3, "This field is not found.");
    let casts = |levels: usize| format!("{}%di{}", "(s)(".repeat(levels), ")->f".repeat(levels));
    assert!(parse(&format!("p f {}", casts(8))).is_ok());
    refused(&casts(9), 32, "Too many nested typecasts/dereferences");
}

#[test]
fn types_are_checked() {
    refused(
        "%di:",
        4,
        "Unknown type is specified; leave out the `:` or name a type",
    );
    refused("a=%di:u128", 6, "Unknown type is specified");
    refused("%di:d[2]", 4, "Unknown type is specified");
    refused("%di:d8", 4, "Unknown type is specified");
    refused("%di:b1@1", 4, "Unknown type is specified");
    refused("%di:b1@1/12", 4, "Unknown type is specified");
    refused("%di:u8:u8", 4, "Unknown type is specified");
    refused("%di:%pd[2]", 4, "Unknown type is specified");
    let bad = "Invalid bitfield; write bWIDTH@OFFSET/SIZE, within SIZE bits";
    for field in [
        "b0@1/8",
        "b@1/8",
        "b1/8",
        "b1@/8",
        "b1@1x/8",
        "b4@5/8",
        "b1@99999999999999999999/8",
    ] {
        refused(&format!("%di:{field}"), 4, bad);
    }
    refused("%di:u8[", 7, "Array is not closed");
    refused("a=%di:u8[12", 11, "Array is not closed");
    refused("%di:u8[2]x", 9, "Array has wrong suffix");
    refused("%di:u8[]", 7, "Invalid array size");
    refused("%di:u8[0]", 7, "Invalid array size");
    refused("%di:u8[-1]", 7, "Invalid array size");
    refused("%di:u8[4294967296]", 7, "Invalid array size");
    refused(
        "+0(%di):u8[65]",
        11,
        "Array number is too big; at most 64 elements",
    );
    refused("%di:u8[2]", 4, "String accepts only memory argument");
    refused("+u0(%di):u8[2]", 9, "String accepts only memory argument");
    let address = "String accepts only memory argument; write `+0(...)` around an address";
    refused("%di:string", 4, address);
    refused("$stack:ustring", 7, address);
    refused(
        "\\5:symstr",
        3,
        "Symbol String doesn't accept data/userdata",
    );
    refused(
        "+u0(%di):symstr",
        9,
        "Symbol String doesn't accept data/userdata",
    );
    refused(
        "+0(%di):symstr[2]",
        8,
        "String accepts only memory argument",
    );
    let text = "$comm and immediate-string only accepts string type";
    refused("$comm:u8", 6, text);
    refused("$comm:string[2]", 6, text);
    refused("\\\"a\":ustring", 5, text);
    refused("\\\"a:b\"", 4, text);
    for good in [
        "$comm:string",
        "\\\"a\":string",
        "\\5:string[2]",
        "$arg1:string",
        "a:string",
        "+u0(%di):string[2]",
        "a->b:u8[3]",
    ] {
        assert!(parse(&format!("p f {good}")).is_ok(), "{good}");
    }
}

#[test]
fn the_first_of_several_errors_is_reported_as_by_the_kernel() {
    // Order of the checks: the form of the type, its name, the expression, the numbers of a bit field, the
    // array.
    refused("%foo:bar[", 9, "Array is not closed");
    refused("%foo:bar", 5, "Unknown type is specified");
    refused("%foo:b9@9/8", 0, "Invalid register name");
    refused(
        "%di:b9@9/8[2]",
        4,
        "Invalid bitfield; write bWIDTH@OFFSET/SIZE, within SIZE bits",
    );
}
