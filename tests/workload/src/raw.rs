//! One system call with any arguments, and what it returned.

use std::error::Error;
use std::io;

use libc::c_long;

/// Room for what a call reads or writes.
const BUFFER: usize = 1 << 16;

/// Makes the call with this number. Arguments are numbers or `buffer`, zeroed memory of ours that
/// nothing has touched yet. Prints what the call returned, an error as a negative number.
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
    // SAFETY: memory the call writes to is a buffer of ours, or, if a test passes an address in the
    // hope that there is nothing, at the worst this program's own.
    let result = unsafe { libc::syscall(number, a, b, c, d, e, f) };
    let result = if result == -1 {
        -c_long::from(io::Error::last_os_error().raw_os_error().unwrap_or(0))
    } else {
        result
    };
    println!("result: {result}");
    Ok(())
}

/// The address of a new buffer.
fn fresh() -> io::Result<c_long> {
    // SAFETY: asks for new memory; it is never given back.
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

/// A decimal number, or a hexadecimal one after `0x`.
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
