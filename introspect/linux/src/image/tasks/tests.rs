use hvprobe_arch::Gva;
use hvprobe_fixtures::kernel::{self, Layout, NOTHING_FORBIDDEN, Section, TEXT};

use super::super::KernelImage;
use super::{TaskClues, TaskLayout};

const DATA: u64 = 0xffff_ffff_82a0_0000;
const INIT_TASK: u64 = DATA + 0x100;
const COMM: u64 = 0x3a0;
const CURRENT: u64 = 0x1fb80;
const CPU: u64 = 0x1fb88;

/// Returns a kernel without types and without data symbols. The three system calls load from the given per-CPU
/// offsets.
fn image(getpid: u64, gettid: u64, getcpu: u64) -> KernelImage {
    let (_, mut sections) = kernel::kernel(Layout::Offsets61);
    sections.retain(|section| section.name != ".BTF");
    for section in &mut sections {
        let mut write = |at: u64, bytes: &[u8]| {
            let at = usize::try_from(at - section.at).unwrap();
            section.data[at..at + bytes.len()].copy_from_slice(bytes);
        };
        match section.name {
            ".text" => {
                // mov rdi, gs:[...]; mov eax, gs:[...]
                for (at, code, place) in [
                    (0x200, &[0x65, 0x48, 0x8b, 0x3c, 0x25][..], getpid),
                    (0x210, &[0x65, 0x48, 0x8b, 0x3c, 0x25], gettid),
                    (0x220, &[0x65, 0x8b, 0x04, 0x25], getcpu),
                ] {
                    let place = &place.to_le_bytes()[..4];
                    write(TEXT + at, &[code, place, &[0xc3]].concat());
                }
            }
            ".data" => write(INIT_TASK + COMM, b"swapper\0"),
            _ => {}
        }
    }
    let mut data = vec![0; 0x1000];
    data[0xb80..0xb88].copy_from_slice(&INIT_TASK.to_le_bytes());
    sections.push(Section {
        name: ".data..percpu",
        at: 0x1f000,
        exec: false,
        data,
    });
    let symbols = [
        ("_stext", TEXT, 0, true),
        ("__x64_sys_getpid", TEXT + 0x200, 0x10, true),
        ("__x64_sys_gettid", TEXT + 0x210, 0x10, true),
        ("__x64_sys_getcpu", TEXT + 0x220, 0x10, true),
        ("_etext", TEXT + 0x4000, 0, true),
    ];
    let symbols = [&symbols[..], &NOTHING_FORBIDDEN].concat();
    KernelImage::parse(&kernel::elf(&sections, &symbols)).unwrap()
}

#[test]
fn code_shows_where_the_current_task_is_and_data_which_is_the_first() {
    let image = image(CURRENT, CURRENT, CPU);
    let clues = TaskClues {
        current_task: CURRENT,
        init_task: Gva(INIT_TASK),
        comm: COMM,
    };
    assert!(image.task_layout().is_err());
    assert_eq!(image.task_clues(), Some(clues));
    assert_eq!(image.cpu_number(), Some(CPU));
}

#[test]
fn functions_that_disagree_prove_nothing() {
    assert_eq!(image(CURRENT, CURRENT + 8, CPU).task_clues(), None);
    // There is no task at these offsets.
    assert_eq!(image(CPU, CPU, CPU).task_clues(), None);
    assert_eq!(image(0x100, 0x100, CPU).task_clues(), None);
}

/// Checks that types and code agree on a kernel that has both.
#[test]
fn real_kernels_code_shows_what_its_types_do() {
    let Some(path) = std::env::var_os("HVPROBE_TEST_VMLINUX") else {
        eprintln!("skipped: HVPROBE_TEST_VMLINUX does not name a vmlinux");
        return;
    };
    let bytes = std::fs::read(path).unwrap();
    let image = KernelImage::parse(&bytes).unwrap();
    let TaskLayout {
        current_task, comm, ..
    } = image.task_layout().unwrap();
    let init_task = image.symbols().address_of("init_task").unwrap();
    let clues = TaskClues {
        current_task,
        init_task,
        comm,
    };
    assert_eq!(image.task_clues(), Some(clues));
    let elf = super::Elf::parse(&bytes).unwrap();
    let number = super::loaded(&elf, image.symbols(), &super::OF_CPU, 4);
    assert_eq!(number, image.cpu_number());
}
