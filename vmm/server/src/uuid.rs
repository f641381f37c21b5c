//! UUIDs (RFC 9562).

use std::io;

use hvprobe_spec::language::text::hex;
use rustix::rand::{GetRandomFlags, getrandom};

/// Length of a UUID, in bytes.
const LENGTH: usize = 16;

/// Returns a random UUID (version 4).
///
/// # Errors
/// When the host returns no random numbers.
pub(crate) fn random() -> io::Result<String> {
    let mut bytes = [0; LENGTH];
    // The kernel returns so few bytes completely or not at all (getrandom(2)).
    if getrandom(&mut bytes, GetRandomFlags::empty())? != LENGTH {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let parts = [0..4, 4..6, 6..8, 8..10, 10..LENGTH];
    Ok(parts.map(|part| hex(&bytes[part])).join("-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuids_are_random_and_say_so() {
        let (one, other) = (random().unwrap(), random().unwrap());
        assert_ne!(one, other);
        let parts: Vec<_> = one.split('-').map(str::len).collect();
        assert_eq!(parts, [8, 4, 4, 4, 12]);
        assert_eq!(one.as_bytes()[14], b'4');
        assert!(b"89ab".contains(&one.as_bytes()[19]), "{one}");
    }
}
