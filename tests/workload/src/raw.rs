//! Makes one system call with any arguments, and prints its result.

use std::error::Error;
use std::io;

use libc::c_long;

/// Length in bytes of the buffer for a call.
const BUFFER: usize = 1 << 16;

/// Makes the call with this number. An argument is a number, or `buffer`, which stands for the address of zeroed
/// memory that was not touched yet. Prints the result; for an error, the negated error number.
pub(crate) fn call(number: &str, arguments: &[&str]) -> Result<(), Box<dyn Error>> {
    let number: c_long = number.parse()?;
    let mut words = [0; 6];
    if arguments.len() > words.len() {
        return Err("a system call has at most six arguments".into());
    }
    for (word, argument) in words.iter_mut().zip(arguments) {
        *word = match *argument {
            "buffer" => fresh()?,
            number => integer(number).ok_or_else(|| format!("`{number}` is not a number"))?,
        };
    }
    let [a, b, c, d, e, f] = words;
    // SAFETY: the call writes only to a buffer of ours or, if a test passes an address that should be unmapped,
    // at worst to this program's own memory.
    let result = unsafe { libc::syscall(number, a, b, c, d, e, f) };
    let result = if result == -1 {
        -c_long::from(io::Error::last_os_error().raw_os_error().unwrap_or(0))
    } else {
        result
    };
    println!("result: {result}");
    Ok(())
}

/// Returns the address of a new buffer.
fn fresh() -> io::Result<c_long> {
    // SAFETY: asks for new memory, which is never unmapped.
    let at = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            BUFFER,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if at == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    c_long::try_from(at.expose_provenance()).map_err(io::Error::other)
}

/// Parses a decimal number, or a hexadecimal one after `0x`.
fn integer(text: &str) -> Option<c_long> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok().map(u64::cast_signed),
        None => text.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read() {
        assert_eq!(integer("-3"), Some(-3));
        assert_eq!(integer("0xffffffffffffffff"), Some(-1));
        assert_eq!(integer("x"), None);
    }

    #[test]
    fn calls_are_made() {
        call("39", &[]).unwrap();
        call("318", &["buffer", "8", "0"]).unwrap();
        assert!(call("39", &["0"; 7]).is_err());
    }
}
