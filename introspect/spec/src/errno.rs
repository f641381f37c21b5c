//! Names of the kernel's error numbers, which functions return as negative values.

/// Names of the errors from 1 on (include/uapi/asm-generic/errno-base.h and errno.h); `-` for a number without
/// a name.
const NAMES: &str = "\
    EPERM ENOENT ESRCH EINTR EIO ENXIO E2BIG ENOEXEC EBADF ECHILD EAGAIN ENOMEM EACCES EFAULT \
    ENOTBLK EBUSY EEXIST EXDEV ENODEV ENOTDIR EISDIR EINVAL ENFILE EMFILE ENOTTY ETXTBSY EFBIG \
    ENOSPC ESPIPE EROFS EMLINK EPIPE EDOM ERANGE EDEADLK ENAMETOOLONG ENOLCK ENOSYS ENOTEMPTY \
    ELOOP - ENOMSG EIDRM ECHRNG EL2NSYNC EL3HLT EL3RST ELNRNG EUNATCH ENOCSI EL2HLT EBADE EBADR \
    EXFULL ENOANO EBADRQC EBADSLT - EBFONT ENOSTR ENODATA ETIME ENOSR ENONET ENOPKG EREMOTE \
    ENOLINK EADV ESRMNT ECOMM EPROTO EMULTIHOP EDOTDOT EBADMSG EOVERFLOW ENOTUNIQ EBADFD EREMCHG \
    ELIBACC ELIBBAD ELIBSCN ELIBMAX ELIBEXEC EILSEQ ERESTART ESTRPIPE EUSERS ENOTSOCK \
    EDESTADDRREQ EMSGSIZE EPROTOTYPE ENOPROTOOPT EPROTONOSUPPORT ESOCKTNOSUPPORT EOPNOTSUPP \
    EPFNOSUPPORT EAFNOSUPPORT EADDRINUSE EADDRNOTAVAIL ENETDOWN ENETUNREACH ENETRESET \
    ECONNABORTED ECONNRESET ENOBUFS EISCONN ENOTCONN ESHUTDOWN ETOOMANYREFS ETIMEDOUT \
    ECONNREFUSED EHOSTDOWN EHOSTUNREACH EALREADY EINPROGRESS ESTALE EUCLEAN ENOTNAM ENAVAIL \
    EISNAM EREMOTEIO EDQUOT ENOMEDIUM EMEDIUMTYPE ECANCELED ENOKEY EKEYEXPIRED EKEYREVOKED \
    EKEYREJECTED EOWNERDEAD ENOTRECOVERABLE ERFKILL EHWPOISON";

/// Returns the names of all errors.
pub fn names() -> impl Iterator<Item = &'static str> {
    NAMES.split_ascii_whitespace().filter(|name| *name != "-")
}

/// Returns the number of the error called `name`.
#[must_use]
pub fn number(name: &str) -> Option<u32> {
    (1..)
        .zip(NAMES.split_ascii_whitespace())
        .find(|(_, known)| *known == name && name != "-")
        .map(|(number, _)| number)
}

/// Returns the name of the error that `value` stands for, if it is a negative error number in 64 bits.
#[must_use]
pub fn name(value: u64) -> Option<&'static str> {
    let number = usize::try_from(value.wrapping_neg()).ok()?;
    let name = NAMES.split_ascii_whitespace().nth(number.checked_sub(1)?)?;
    (name != "-").then_some(name)
}

/// Like [`name`], but `value` may also be a register that holds an `int` in its lower half. The upper half of the
/// register is not part of the `int`; it is zero after a 32-bit instruction.
#[must_use]
pub fn returned(value: u64) -> Option<&'static str> {
    let int = u32::try_from(value).map(|value| i64::from(value.cast_signed()).cast_unsigned());
    name(value).or_else(|| name(int.ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_have_the_numbers_of_the_kernel() {
        for (text, value) in [
            ("EPERM", 1),
            ("ENOMEM", 12),
            ("EDEADLK", 35),
            ("ENOMSG", 42),
            ("EBFONT", 59),
            ("ETIMEDOUT", 110),
            ("EHWPOISON", 133),
        ] {
            assert_eq!(number(text), Some(value), "{text}");
            assert_eq!(name(u64::from(value).wrapping_neg()), Some(text));
        }
        assert_eq!((number("-"), number("ENOTHING")), (None, None));
        for value in [
            0,
            1,
            12,
            41_u64.wrapping_neg(),
            134_u64.wrapping_neg(),
            1 << 63,
        ] {
            assert_eq!(name(value), None, "{value:#x}");
        }
        assert_eq!(returned(9_u64.wrapping_neg()), Some("EBADF"));
        assert_eq!(returned(0xffff_fff7), Some("EBADF"));
        for value in [0, 9, 0x7fff_fff7, 0x1_ffff_fff7] {
            assert_eq!(returned(value), None, "{value:#x}");
        }
    }
}
