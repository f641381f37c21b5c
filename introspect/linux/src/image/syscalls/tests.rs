use hvprobe_fixtures::kernel::{self, Layout};

use super::super::KernelImage;
use super::*;

fn as_pairs(parameters: &[CallParameter]) -> Vec<(&str, &str)> {
    let pairs = parameters.iter().map(|it| (&*it.ty, &*it.name));
    pairs.collect()
}

const OPENAT: [(&str, &str); 4] = [
    ("int", "dfd"),
    ("const char *", "filename"),
    ("int", "flags"),
    ("umode_t", "mode"),
];

#[test]
fn what_a_call_takes_is_known_of_the_kernels_entry_of_it_alone() {
    for layout in Layout::ALL {
        let image = KernelImage::parse(&kernel::vmlinux(layout)).unwrap();
        let openat = image.system_call("__x64_sys_openat").unwrap();
        assert_eq!(as_pairs(openat), OPENAT);
        for other in ["__x64_sys_open", "__ia32_sys_openat", "openat", ""] {
            assert_eq!(image.system_call(other), None, "{other}");
        }
    }
}

/// Changes the first four words of the metadata of `openat` in the image. Returns the number of parameters then
/// found.
fn changed(change: impl Fn(&mut [u64; 4])) -> Option<usize> {
    let (_, mut sections) = kernel::kernel(Layout::Offsets64);
    let data = sections.iter_mut().find(|it| it.name == ".data").unwrap();
    let at = usize::try_from(kernel::SYSCALL - data.at).unwrap();
    let mut words = [0, 8, 16, 24].map(|word| u64_at(&data.data, at + word).unwrap());
    change(&mut words);
    data.data[at..][..32].copy_from_slice(&words.map(u64::to_le_bytes).concat());
    let image = KernelImage::parse(&kernel::elf(&sections, &[])).unwrap();
    image.system_call("__x64_sys_openat").map(<[_]>::len)
}

#[test]
fn what_makes_no_sense_is_not_reported() {
    assert_eq!(changed(|_| ()), Some(4));
    assert_eq!(changed(|words| words[1] = 2 << 32), Some(2));
    // The bits above the field belong to other members.
    assert_eq!(changed(|words| words[1] |= 0xffff_ff80 << 32), Some(4));
    // A call without arguments has no lists.
    assert_eq!(changed(|words| *words = [words[0], 0, 0, 0]), Some(0));
    assert_eq!(changed(|words| words[1] = 7 << 32), None);
    assert_eq!(changed(|words| words[1] = u64::MAX), None);
    for word in [0, 2, 3] {
        for nowhere in [0, 8, u64::MAX, u64::MAX - 15] {
            assert_eq!(
                changed(|words| words[word] = nowhere),
                None,
                "{word} {nowhere:#x}"
            );
        }
    }
    // The name is that of another call.
    assert_eq!(changed(|words| words[0] += 1), None);
}

/// Checks the system calls of a real kernel. Runs only if `HVPROBE_TEST_VMLINUX` names one with
/// `CONFIG_FTRACE_SYSCALLS`.
#[test]
fn real_kernel_describes_its_calls_when_one_is_given() {
    let Some(path) = std::env::var_os("HVPROBE_TEST_VMLINUX") else {
        eprintln!("skipped: HVPROBE_TEST_VMLINUX does not name a vmlinux");
        return;
    };
    let image = KernelImage::parse(&std::fs::read(path).unwrap()).unwrap();
    assert_eq!(
        as_pairs(image.system_call("__x64_sys_openat").unwrap()),
        OPENAT
    );
    assert_eq!(image.system_call("__x64_sys_getpid"), Some(&[][..]));
    let entries = image.symbols().glob("__x64_sys_*").unwrap();
    let (known, unknown): (Vec<_>, Vec<_>) = entries
        .map(|symbol| symbol.name)
        .partition(|name| image.system_call(name).is_some());
    eprintln!("{} calls, nothing of {unknown:?}", known.len());
    assert!(known.len() > 300 && unknown.len() < known.len() / 10);
}
