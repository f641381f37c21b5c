use expect_test::expect;
use hvprobe_fixtures::disk::{ESP, LINUX, fat, gpt, uki};

use super::made::{BOOT, ROOT, ext4, shown};

const GRUB2: &[u8] = b"
if [ -f ${config_directory}/grubenv ]; then
  load_env -f ${config_directory}/grubenv
elif [ -s $prefix/grubenv ]; then
  load_env
fi
set default=\"${saved_entry}\"
insmod part_gpt
insmod ext2
set root='hd0,gpt1'
if [ -z \"${kernelopts}\" ]; then
  set kernelopts=\"root=/dev/sda2 ro \"
fi
insmod blscfg
blscfg
";

fn fedora(version: &str) -> String {
    format!(
        "title Fedora Linux ({version})
version {version}
linux /vmlinuz-{version}
initrd /initramfs-{version}.img $tuned_initrd
options $kernelopts $tuned_params
grub_class fedora"
    )
}

#[test]
fn fedora_boots_the_saved_entry_with_variables_of_grub() {
    let (old, new) = (fedora("6.9.9-200.fc40"), fedora("6.11.4-301.fc41"));
    let boot = |grubenv: &'static [u8]| {
        ext4(
            BOOT,
            &[
                ("/grub2/grub.cfg", GRUB2),
                ("/grub2/grubenv", grubenv),
                ("/loader/entries/abc-6.9.9-200.fc40.conf", old.as_bytes()),
                ("/loader/entries/abc-6.11.4-301.fc41.conf", new.as_bytes()),
                ("/loader/entries/README", b"linux /no"),
                ("/vmlinuz-6.9.9-200.fc40", b"old kernel"),
                ("/initramfs-6.9.9-200.fc40.img", b"old initrd"),
                ("/vmlinuz-6.11.4-301.fc41", b"new kernel"),
                ("/initramfs-6.11.4-301.fc41.img", b"new initrd"),
            ],
        )
    };
    let Some(disk) = boot(
        b"# GRUB Environment Block\nsaved_entry=abc-6.9.9-200.fc40\nkernelopts=root=UUID=1 ro quiet\n#",
    ) else {
        return;
    };
    let expected = expect![[r#"
        Gpt
        1 ext4 "a label" 11111111-2222-3333-4444-555555555555
        1 BLS "Fedora Linux (6.11.4-301.fc41)"
        1 BLS "Fedora Linux (6.9.9-200.fc40)"
        1 fallback "/vmlinuz-6.11.4-301.fc41": no root file system was found
        1 fallback "/vmlinuz-6.9.9-200.fc40": no root file system was found
        boots "Fedora Linux (6.9.9-200.fc40)": GRUB: `default` is `abc-6.9.9-200.fc40`
          /vmlinuz-6.9.9-200.fc40
          /initramfs-6.9.9-200.fc40.img
          root=UUID=1 ro quiet
          old kernel + old initrd
    "#]];
    expected.assert_eq(&shown(gpt(&[(LINUX, "", &disk)])));

    let Some(disk) = boot(b"") else {
        return;
    };
    let shown = shown(gpt(&[(LINUX, "", &disk)]));
    let expected = "boots \"Fedora Linux (6.11.4-301.fc41)\": GRUB: it is the first entry";
    assert!(shown.contains(expected), "{shown}");
    assert!(shown.contains("\n  root=/dev/sda2 ro\n"), "{shown}");
}

#[test]
fn entries_in_boot_of_the_root_file_system_have_paths_of_either() {
    let with_prefix = b"linux /boot/linux-1\noptions a";
    let without = b"linux /linux-1\noptions b";
    let files: [(&str, &[u8]); 4] = [
        ("/etc/fstab", b""),
        ("/boot/loader/entries/x-1.conf", without),
        ("/boot/loader/entries/x-2.conf", with_prefix),
        ("/boot/linux-1", b"kernel"),
    ];
    let Some(root) = ext4(ROOT, &files) else {
        return;
    };
    let expected = expect![[r#"
        None
        disk ext4 "a label" 7e3d2b6a-0c5f-4c5e-9a57-1f0f5e1d7a11
        disk BLS "x-2"
        disk BLS "x-1"
        boots "x-2": boot entries: it is the first entry
          /boot/linux-1
          a
          kernel
    "#]];
    expected.assert_eq(&shown(root));
}

#[test]
fn systemd_boot_on_an_efi_partition_chooses_by_pattern() {
    let image = uki(&[
        (
            ".osrel",
            b"ID=x\nPRETTY_NAME=\"Some Linux 1\"\nVERSION_ID=1\n",
        ),
        (".uname", b"6.10.1"),
        (".cmdline", b"root=LABEL=x quiet\n\0"),
        (".initrd", b"initrd of the UKI"),
        (".linux", b"kernel of the UKI"),
    ]);
    let entry = b"title Other\nlinux /other/linux\ninitrd other/initrd\noptions b";
    let files = |config: &'static [u8]| {
        let volume = fat(&[
            ("/EFI/Linux/some-6.10.1.efi", &image),
            ("/EFI/Linux/broken-7.efi", b"MZ"),
            ("/loader/entries/other.conf", entry),
            ("/loader/loader.conf", config),
            ("/other/linux", b"kernel"),
            ("/other/initrd", b"initrd"),
        ]);
        shown(gpt(&[(ESP, "EFI", &volume)]))
    };
    let expected = expect![[r#"
        Gpt
        1 FAT "-" 1234-5678
        1 BLS "Other"
        1 UKI "Some Linux 1"
        1 UKI "broken-7.efi": it is not an EFI program for x86-64
        boots "Some Linux 1": boot entries: `default` of loader.conf is `some-*`
          /EFI/Linux/some-6.10.1.efi(.linux)
          /EFI/Linux/some-6.10.1.efi(.initrd)
          root=LABEL=x quiet
          kernel of the UKI + initrd of the UKI
    "#]];
    expected.assert_eq(&files(b"timeout 3\ndefault some-*\n"));
    let shown = files(b"# nothing");
    assert!(shown.contains("boots \"Other\": boot entries: it is the first entry\n  /other/linux\n  /other/initrd\n  b\n  kernel + initrd\n"), "{shown}");
    // An entry that cannot be used is passed over.
    let shown = files(b"default broken*");
    assert!(
        shown.contains("the default entry cannot be used (it is not an EFI program"),
        "{shown}"
    );
    assert!(shown.contains("boots \"Other\""), "{shown}");
}

#[test]
fn of_several_profiles_the_first_is_booted() {
    let image = uki(&[
        (".linux", b"kernel"),
        (".cmdline", b"shared"),
        (".profile", b"ID=first"),
        (".cmdline", b"first"),
        (".profile", b"ID=second"),
        (".cmdline", b"second"),
    ]);
    let volume = fat(&[("/EFI/Linux/a.efi", &image)]);
    let shown = shown(gpt(&[(ESP, "EFI", &volume)]));
    assert!(
        shown.ends_with("  /EFI/Linux/a.efi(.linux)\n  first\n  kernel\n"),
        "{shown}"
    );
}
