use std::collections::BTreeMap;

use expect_test::{Expect, expect};
use proptest::prelude::*;

use super::super::world::Key;
use super::*;
use crate::filesystem::tree::{Kind, Stat};

const DEBIAN: &str = include_str!("debian.cfg");
const UUID: &str = "7e3d2b6a-0c5f-4c5e-9a57-1f0f5e1d7a11";

/// A disk whose second partition has these files and [`UUID`].
#[derive(Default)]
struct Made(BTreeMap<&'static str, &'static str>);

impl World for Made {
    fn find(&self, key: Key, value: &str) -> Option<String> {
        let found = match key {
            Key::Uuid => value == UUID,
            Key::File => self.0.contains_key(value),
            _ => false,
        };
        found.then(|| "hd0,2".to_owned())
    }

    fn is_seen(&self, device: &str) -> bool {
        device == "hd0,2"
    }

    fn stat(&self, device: &str, path: &str) -> Option<Stat> {
        let size = self.0.get(path).filter(|_| self.is_seen(device))?.len() as u64;
        let kind = Kind::File;
        Some(Stat { kind, size })
    }

    fn read(&self, device: &str, path: &str) -> Option<Vec<u8>> {
        let content = self.0.get(path).filter(|_| self.is_seen(device))?;
        Some(content.as_bytes().to_vec())
    }
}

/// Lists the entries of a script's menu, and its default.
fn shown(script: &str, world: &Made) -> String {
    let menu = match run(script, "hd0,2", "/boot/grub", world) {
        Ok(menu) => menu,
        Err(why) => return format!("{why}\n"),
    };
    let mut text = String::new();
    list(&menu.nodes, "", &mut text);
    match menu.default() {
        Ok((at, why)) => text.push_str(&format!("default {at:?}: {why}\n")),
        Err(why) => text.push_str(&format!("no default: {why}\n")),
    }
    if menu.uses_bls {
        text.push_str("and entries of the Boot Loader Specification\n");
    }
    text
}

fn list(nodes: &[Node], indent: &str, text: &mut String) {
    for node in nodes {
        let title = node.title.as_deref().unwrap_or("?");
        let unsure = if node.is_unsure { " (unsure)" } else { "" };
        text.push_str(&format!("{indent}{title}{unsure}\n"));
        match &node.content {
            Content::Submenu(inner) => list(inner, &format!("{indent}  "), text),
            Content::Entry(Ok(load)) => {
                for loaded in load.kernel.iter().chain(&load.initrds) {
                    text.push_str(&format!("{indent}  ({}){}\n", loaded.device, loaded.path));
                }
                if !load.options.is_empty() {
                    text.push_str(&format!("{indent}  {}\n", load.options));
                }
                if let Some(trouble) = &load.trouble {
                    text.push_str(&format!("{indent}  but {trouble}\n"));
                }
            }
            Content::Entry(Err(why)) => text.push_str(&format!("{indent}  {why}\n")),
        }
    }
}

fn check(script: &str, expected: Expect) {
    expected.assert_eq(&shown(script, &Made::default()));
}

#[test]
fn the_menu_of_debian_is_read() {
    let expected = expect![[r#"
        Debian GNU/Linux
          (hd0,2)/boot/vmlinuz-6.1.0-18-cloud-amd64
          (hd0,2)/boot/initrd.img-6.1.0-18-cloud-amd64
          root=UUID=7e3d2b6a-0c5f-4c5e-9a57-1f0f5e1d7a11 ro console=tty0 console=ttyS0,115200 earlyprintk=ttyS0,115200 consoleblank=0
        Advanced options for Debian GNU/Linux
          Debian GNU/Linux, with Linux 6.1.0-18-cloud-amd64
            (hd0,2)/boot/vmlinuz-6.1.0-18-cloud-amd64
            (hd0,2)/boot/initrd.img-6.1.0-18-cloud-amd64
            root=UUID=7e3d2b6a-0c5f-4c5e-9a57-1f0f5e1d7a11 ro console=tty0 console=ttyS0,115200
          Debian GNU/Linux, with Linux 6.1.0-18-cloud-amd64 (recovery mode)
            (hd0,2)/boot/vmlinuz-6.1.0-18-cloud-amd64
            (hd0,2)/boot/initrd.img-6.1.0-18-cloud-amd64
            root=UUID=7e3d2b6a-0c5f-4c5e-9a57-1f0f5e1d7a11 ro single
        UEFI Firmware Settings (unsure)
        default [0]: `default` is `0`
    "#]];
    check(DEBIAN, expected);
}

#[test]
fn the_default_may_be_in_the_environment_block() {
    let with = |line: &'static str| {
        let world = Made(BTreeMap::from([("/boot/grub/grubenv", line)]));
        let shown = shown(DEBIAN, &world);
        shown.lines().last().unwrap_or_default().to_owned()
    };
    for (line, expected) in [
        (
            "# GRUB Environment Block\nnext_entry=1>1\n###",
            "default [1, 1]: `default` is `1>1`",
        ),
        (
            "# GRUB Environment Block\nnext_entry=gnulinux-advanced-7e3d2b6a-0c5f-4c5e-9a57-1f0f5e1d7a11>gnulinux-6.1.0-18-cloud-amd64-recovery-7e3d2b6a-0c5f-4c5e-9a57-1f0f5e1d7a11\n",
            "default [1, 1]: `default` is `gnulinux-advanced-7e3d2b6a-0c5f-4c5e-9a57-1f0f5e1d7a11>gnulinux-6.1.0-18-cloud-amd64-recovery-7e3d2b6a-0c5f-4c5e-9a57-1f0f5e1d7a11`",
        ),
        (
            "# GRUB Environment Block\nnext_entry=Debian GNU/Linux\n",
            "default [0]: `default` is `Debian GNU/Linux`",
        ),
        (
            "# GRUB Environment Block\nnext_entry=gone\n",
            "default [0]: `default` is `gone`, which is no entry, so the first one counts",
        ),
        (
            "# GRUB Environment Block\nnext_entry=1\n",
            "no default: its default is a submenu",
        ),
        (
            "# GRUB Environment Block\nnext_entry=2\n",
            "no default: its default depends on a condition that only the machine can decide",
        ),
    ] {
        assert_eq!(with(line), expected);
    }
}

#[test]
fn what_depends_on_the_machine_makes_entries_unusable() {
    check(
        r#"
        set who="a b"
        set copy="$grub_platform"
        if keystatus --shift; then set key=1; fi
        menuentry one { linux /k "x=$who" y=$who z=$undefined; initrd /a /b; }
        menuentry two { linux /k platform=$copy }
        menuentry three { if [ $key = 1 ]; then linux /k 1; else linux /k 2; fi }
        menuentry four { set root=$grub_cpu; linux /k }
        menuentry five { linux ($root)/k; linux16 (lvm/vg-root)/k }
        menuentry six { configfile /other.cfg }
        menuentry seven { for x in a b; do linux /$x; done }
        while sleep 1; do set a=$b; set b=$c; set c=x; done
        menuentry loop { linux /k $a }
        menuentry "$grub_platform" --id seven { linux /k }
        set default=seven
        "#,
        expect![[r#"
            one
              (hd0,2)/k
              (hd0,2)/a
              (hd0,2)/b
              "x=a b" y=a b z=
            two
              but it needs $copy, whose value only the machine can tell
            three
              (hd0,2)/k
              1
              but what it boots depends on a condition that only the machine can decide
            four
              but it needs $root, whose value only the machine can tell
            five
              (lvm/vg-root)/k
            six
              but it uses `configfile`, which is not followed
            seven
              but it needs $x, whose value only the machine can tell
            loop
              but it needs $a, whose value only the machine can tell
            ?
              (hd0,2)/k
            default [6]: `default` is `seven`
        "#]],
    );
}

#[test]
fn submenus_see_exported_variables_only() {
    check(
        r#"
        set a=1; set b=2; export b
        function load { linux /k $a $b; }
        menuentry out { load }
        submenu sub { menuentry in { load } }
        set default="sub>0"
        "#,
        expect![[r#"
            out
              (hd0,2)/k
              1 2
            sub
              in
                (hd0,2)/k
                2
            default [1, 0]: `default` is `sub>0`
        "#]],
    );
}

#[test]
fn functions_have_arguments() {
    check(
        r#"
        function gfxmode {
          set gfxpayload="${1}"
          if [ "${1}" = "keep" ]; then set vt_handoff=vt.handoff=7; else set vt_handoff=; fi
        }
        function outer { gfxmode "$2"; linux /k $1 $2 "$3" $vt_handoff; }
        menuentry 'with splash' { outer a keep }
        menuentry 'without' { outer a b c }
        menuentry 'of the machine' { gfxmode $grub_platform; linux /k quiet $vt_handoff }
        menuentry 'no function' { linux /k $1 }
        "#,
        expect![[r#"
            with splash
              (hd0,2)/k
              a keep  vt.handoff=7
            without
              (hd0,2)/k
              a b c
            of the machine
              but it needs $vt_handoff, whose value only the machine can tell
            no function
              but it needs $1, whose value only the machine can tell
            default [0]: it is the first entry, and `default` is not set
        "#]],
    );
}

#[test]
fn fedora_leaves_its_menu_to_the_boot_loader_specification() {
    check(
        r#"
        set default="${saved_entry}"
        if [ -z "${kernelopts}" ]; then
          set kernelopts="root=UUID=1 ro "
        fi
        insmod blscfg
        blscfg
        "#,
        expect![[r#"
            no default: its menu is empty
            and entries of the Boot Loader Specification
        "#]],
    );
}

#[test]
fn invalid_scripts_are_refused_with_the_reason() {
    for (script, expected) in [
        ("if true; then", "there is no `fi` where one is needed"),
        ("fi", "a `fi` without its beginning"),
        ("}", "a `}` or keyword without its beginning"),
        ("menuentry a {", "a `{` that is not closed"),
        ("function f", "there is no `{` where one is needed"),
        ("menuentry a { } b", "a `{` or word where the line must end"),
        ("a && b", "`&` without quotes"),
        (
            "function f { f; }; f",
            "functions are nested more than 8 deep",
        ),
    ] {
        assert_eq!(
            shown(script, &Made::default()).trim_end(),
            expected,
            "{script}"
        );
    }
    let deep = format!("{}{}", "if true; then ".repeat(100), "fi; ".repeat(100));
    assert!(shown(&deep, &Made::default()).starts_with("blocks are nested"));
}

#[test]
fn running_a_script_is_bounded() {
    for (script, expected) in [
        // Each variable is twice as long as the one before.
        (
            format!("set a=0123456789abcdef; {}", "set a=$a$a; ".repeat(40)),
            "no default: its menu is empty",
        ),
        (
            format!("set a={}; {}", "x".repeat(60_000), "echo $a; ".repeat(100)),
            "its commands have more than 4 MiB",
        ),
        (
            format!(
                "{} g",
                (0..8)
                    .map(|n| {
                        let next = if n == 0 {
                            "true; ".to_owned()
                        } else {
                            format!("f{}; ", n - 1)
                        };
                        format!("function f{n} {{ {} }}; ", next.repeat(10))
                    })
                    .collect::<String>()
                    + "function g { f6; f6; }; "
            ),
            "it takes more than 100000 steps",
        ),
        (
            "if sleep 1; then set a=1; fi; ".repeat(1000),
            "it has more than 500 unknown conditions",
        ),
        (
            "[ -f /a ]; ".repeat(3000),
            "it looks at the disk more than 2000 times",
        ),
        (
            "menuentry a { }; ".repeat(300),
            "its menu has more than 256 entries",
        ),
    ] {
        let shown = shown(&script, &Made::default());
        assert_eq!(shown.trim_end(), expected);
    }
    let nested = format!("{}{}", "submenu a { ".repeat(6), "} ".repeat(6));
    assert_eq!(
        shown(&nested, &Made::default()),
        "submenus are nested more than 4 deep\n"
    );
}

proptest! {
    #[test]
    fn no_script_makes_the_reader_panic(
        words in prop::collection::vec(prop::sample::select(vec![
            "if", "then", "elif", "else", "fi", "for", "in", "do", "done", "while", "function", "menuentry",
            "submenu", "{", "}", ";", "\n", "[", "]", "-a", "-o", "!", "-f", "=", "set", "a=b", "a=$a", "$a", "\"$a\"",
            "'", "\"", "\\", "$", "${", "linux", "initrd", "/k", "($root)/k", "search", "--set=root", "--fs-uuid",
            "load_env", "source", "export", "default=1>0", "--id", "a", "b", "#", "f", "$grub_platform",
        ]), 0..60),
    ) {
        let _ = shown(&words.join(" "), &Made::default());
    }

    #[test]
    fn no_text_makes_the_reader_panic(text in "\\PC{0,200}") {
        let _ = shown(&text, &Made::default());
    }
}
