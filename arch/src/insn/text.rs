//! Instructions as text, for messages.

use super::decode::{MAX_LEN, decode};
use crate::Gva;
use iced_x86::{Formatter, IntelFormatter};

/// Returns the first instruction of `code`, which is at `at`, in Intel syntax; if the bytes are no instruction,
/// returns the bytes.
#[must_use]
pub fn text(code: &[u8], at: Gva) -> String {
    let Ok((instruction, _)) = decode(code, at) else {
        let bytes = code.iter().take(MAX_LEN);
        let hex: Vec<String> = bytes.map(|byte| format!("{byte:02x}")).collect();
        return format!("(bad) {}", hex.join(" ")).trim_end().to_owned();
    };
    let mut formatter = IntelFormatter::new();
    let options = formatter.options_mut();
    options.set_hex_prefix("0x");
    options.set_hex_suffix("");
    options.set_uppercase_hex(false);
    options.set_branch_leading_zeros(false);
    options.set_show_branch_size(false);
    options.set_space_after_operand_separator(true);
    let mut output = String::new();
    formatter.format(&instruction, &mut output);
    output
}

#[cfg(test)]
mod tests {
    use super::super::testing::{AT, bytes};
    use super::*;
    use expect_test::{Expect, expect};

    fn check(hex: &str, expected: Expect) {
        expected.assert_eq(&text(&bytes(hex), AT));
    }

    #[test]
    fn instructions_are_written_with_absolute_targets() {
        check("55", expect!["push rbp"]);
        check("4883ec28", expect!["sub rsp, 0x28"]);
        check("0f1f440000", expect!["nop [rax+rax]"]);
        check("e8fbffffff", expect!["call 0xffffffff81234567"]);
        check("7410", expect!["je 0xffffffff81234579"]);
        check("488b05f0ffffff", expect!["mov rax, [0xffffffff8123455e]"]);
        check("65488b042500ad0100", expect!["mov rax, gs:[0x1ad00]"]);
        check("f0480fb10f", expect!["lock cmpxchg [rdi], rcx"]);
        check("f348ab", expect!["rep stosq [rdi]"]);
    }

    #[test]
    fn bytes_that_are_no_instruction_are_shown() {
        check("06", expect!["(bad) 06"]);
        check("e800", expect!["(bad) e8 00"]);
        check("", expect!["(bad)"]);
    }
}
