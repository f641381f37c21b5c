use expect_test::expect;
use hvprobe_fixtures::disk::{LINUX, gpt, mbr};

use super::made::{BOOT, ROOT, ext4, shown};

const DEBIAN: &[u8] = include_bytes!("../boot/grub/menu/debian.cfg");

#[test]
fn debian_boots_the_first_entry_of_its_grub_cfg() {
    let Some(root) = ext4(
        ROOT,
        &[
            ("/etc/os-release", b"ID=debian"),
            ("/boot/vmlinuz-6.1.0-18-cloud-amd64", b"kernel"),
            ("/boot/initrd.img-6.1.0-18-cloud-amd64", b"initrd"),
            ("/vmlinuz", b"-> boot/vmlinuz-6.1.0-18-cloud-amd64"),
            ("/boot/grub/grub.cfg", DEBIAN),
            ("/boot/grub/grubenv", b"# GRUB Environment Block\n####"),
        ],
    ) else {
        return;
    };
    let expected = expect![[r#"
        Gpt
        1 ext4 "a label" 7e3d2b6a-0c5f-4c5e-9a57-1f0f5e1d7a11
        1 GRUB 0 "Debian GNU/Linux"
        1 GRUB 1>0 "Debian GNU/Linux, with Linux 6.1.0-18-cloud-amd64"
        1 GRUB 1>1 "Debian GNU/Linux, with Linux 6.1.0-18-cloud-amd64 (recovery mode)"
        1 GRUB 2 "UEFI Firmware Settings": it loads no Linux kernel
        1 fallback "/boot/vmlinuz-6.1.0-18-cloud-amd64"
        boots "Debian GNU/Linux": GRUB: `default` is `0`
          /boot/vmlinuz-6.1.0-18-cloud-amd64
          /boot/initrd.img-6.1.0-18-cloud-amd64
          root=UUID=7e3d2b6a-0c5f-4c5e-9a57-1f0f5e1d7a11 ro console=tty0 console=ttyS0,115200 earlyprintk=ttyS0,115200 consoleblank=0
          kernel + initrd
    "#]];
    expected.assert_eq(&shown(gpt(&[(LINUX, "root", &root)])));
}

#[test]
fn paths_in_grub_cfg_are_those_of_the_boot_partition() {
    let config = format!(
        "set default=0
        menuentry Linux {{
            search --no-floppy --fs-uuid --set=root {BOOT}
            linux /vmlinuz-6.8 root=PARTUUID=12345678-02 ro
            initrd /initrd.img-6.8
        }}
        menuentry Elsewhere {{ set root='lvm/vg-root'; linux /vmlinuz }}"
    );
    let boot = ext4(
        BOOT,
        &[
            ("/vmlinuz-6.8", b"kernel"),
            ("/initrd.img-6.8", b"initrd"),
            ("/grub/grub.cfg", config.as_bytes()),
        ],
    );
    let (Some(boot), Some(root)) = (boot, ext4(ROOT, &[("/etc/fstab", b"#")])) else {
        return;
    };
    let expected = expect![[r#"
        Mbr
        1 ext4 "a label" 11111111-2222-3333-4444-555555555555
        2 ext4 "a label" 7e3d2b6a-0c5f-4c5e-9a57-1f0f5e1d7a11
        1 GRUB 0 "Linux"
        1 GRUB 1 "Elsewhere": /vmlinuz is on GRUB's device lvm/vg-root, which cannot be read in this image
        1 fallback "/vmlinuz-6.8"
        boots "Linux": GRUB: `default` is `0`
          /vmlinuz-6.8
          /initrd.img-6.8
          root=PARTUUID=12345678-02 ro
          kernel + initrd
    "#]];
    expected.assert_eq(&shown(mbr(&[(0x83, &boot), (0x83, &root)])));
}

#[test]
fn without_entries_the_newest_kernel_is_booted() {
    let files: [(&str, &[u8]); 6] = [
        ("/usr/lib/os-release", b""),
        ("/etc/os-release", b"-> ../usr/lib/os-release"),
        ("/boot/vmlinuz-6.1.0-9-amd64", b"old kernel"),
        ("/boot/initrd.img-6.1.0-9-amd64", b"old initrd"),
        ("/boot/vmlinuz-6.1.0-18-amd64", b"new kernel"),
        ("/boot/initrd.img-6.1.0-18-amd64", b"new initrd"),
    ];
    let Some(root) = ext4(ROOT, &files) else {
        return;
    };
    let expected = expect![[r#"
        None
        disk ext4 "a label" 7e3d2b6a-0c5f-4c5e-9a57-1f0f5e1d7a11
        disk fallback "/boot/vmlinuz-6.1.0-18-amd64"
        disk fallback "/boot/vmlinuz-6.1.0-9-amd64"
        boots "/boot/vmlinuz-6.1.0-18-amd64": kernels: no boot entry was found, and this is the newest kernel in /boot (fallback)
          /boot/vmlinuz-6.1.0-18-amd64
          /boot/initrd.img-6.1.0-18-amd64
          root=UUID=7e3d2b6a-0c5f-4c5e-9a57-1f0f5e1d7a11 ro
          new kernel + new initrd
    "#]];
    expected.assert_eq(&shown(root));

    // The kernel of a boot partition finds its root on the other partition, without an initial ramdisk by PARTUUID.
    let boot = ext4(BOOT, &[("/vmlinuz-6.2", b"kernel")]);
    let (Some(boot), Some(root)) = (boot, ext4(ROOT, &[("/etc/fstab", b"#")])) else {
        return;
    };
    let shown = shown(gpt(&[(LINUX, "", &boot), (LINUX, "", &root)]));
    let uuid = "root=PARTUUID=02020202-0202-0202-0202-020202020202 ro";
    assert!(shown.contains(uuid), "{shown}");
}

#[test]
fn linked_kernels_are_found() {
    let files: [(&str, &[u8]); 5] = [
        ("/etc/fstab", b""),
        ("/images/linux", b"kernel"),
        ("/images/ramdisk", b"initrd"),
        ("/vmlinuz", b"-> /etc/../images/linux"),
        ("/initrd.img", b"-> images/ramdisk"),
    ];
    let Some(root) = ext4(ROOT, &files) else {
        return;
    };
    let shown = shown(root);
    assert!(shown.contains("boots \"/vmlinuz\""), "{shown}");
    assert!(shown.ends_with("  kernel + initrd\n"), "{shown}");
}

#[test]
fn file_systems_that_are_not_read_are_named() {
    let mut xfs = vec![0; 1 << 20];
    xfs[..4].copy_from_slice(b"XFSB");
    let Some(boot) = ext4(BOOT, &[("/empty", b"")]) else {
        return;
    };
    let expected = expect![[r#"
        Gpt
        1 ext4 "a label" 11111111-2222-3333-4444-555555555555
        2 xfs "-" -
        found nothing to boot in the disk image: there is no boot entry and no kernel in /boot; partition 2 has xfs, which is not read on the host; give --kernel and --initrd
    "#]];
    expected.assert_eq(&shown(gpt(&[(LINUX, "", &boot), (LINUX, "", &xfs)])));

    // Cut short: the second partition lies outside of the image.
    let Some(root) = ext4(ROOT, &[]) else {
        return;
    };
    let mut disk = mbr(&[(0x83, &boot), (0x83, &root)]);
    disk.truncate(disk.len() - 4096);
    let expected = expect![[r#"
        Mbr
        1 ext4 "a label" 11111111-2222-3333-4444-555555555555
        2 ext4 "a label" 7e3d2b6a-0c5f-4c5e-9a57-1f0f5e1d7a11: the file system is damaged: it is larger than its partition; is the image cut short?
        note: partition 2 ends after the end of the image; is the image cut short?
        found nothing to boot in the disk image: there is no boot entry and no kernel in /boot; the ext4 file system on partition 2 was not read: the file system is damaged: it is larger than its partition; is the image cut short?; partition 2 ends after the end of the image; is the image cut short?; give --kernel and --initrd
    "#]];
    expected.assert_eq(&shown(disk));
}
