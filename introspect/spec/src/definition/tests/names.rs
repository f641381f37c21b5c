//! Names of events, groups and modules, and the carets of errors in them.

use super::*;

#[test]
fn names_are_as_long_as_in_the_kernel_at_most() {
    let column = |text: String| parse(&text).map_err(|error| error.column);
    assert!(column(format!("p:{} x", "a".repeat(63))).is_ok());
    assert_eq!(column(format!("p:{} x", "a".repeat(64))), Err(65));
    assert!(column(format!("p {}", "a".repeat(511))).is_ok());
    assert_eq!(column(format!("p {}", "a".repeat(512))), Err(513));
}

#[test]
fn names_are_checked() {
    check(
        "p: vfs_read",
        expect![[r#"
        p: vfs_read
          ^
        missing name after `:`; leave out the `:` or name it"#]],
    );
    check(
        "p:1x vfs_read",
        expect![[r#"
        p:1x vfs_read
          ^
        `1` cannot be here: a name has letters, digits and `_`, and starts with no digit"#]],
    );
    check(
        "p:a-b vfs_read",
        expect![[r#"
        p:a-b vfs_read
           ^
        `-` cannot be here: a name has letters, digits and `_`, and starts with no digit"#]],
    );
    check("p:a/ vfs_read", expect!["p:a/ vfs_read"]);
    check(
        "p:/b vfs_read",
        expect![[r#"
        p:/b vfs_read
          ^
        missing name after `:`; leave out the `:` or name it"#]],
    );
    check(
        "p:a/b/c vfs_read",
        expect![[r#"
            p:a/b/c vfs_read
                 ^
            a name is EVENT, GROUP/EVENT or GROUP/"#]],
    );
}

#[test]
fn names_of_modules_are_checked() {
    check(
        "p kvm: kvm_read",
        expect![[r#"
        p kvm: kvm_read
              ^
        missing symbol after the module's name"#]],
    );
    check(
        "p :kvm_read",
        expect![[r#"
        p :kvm_read
          ^
        missing module before `:`; leave out the `:` or name it"#]],
    );
    check(
        "p kvm-intel:vmx_vcpu_run",
        expect![[r#"
        p kvm-intel:vmx_vcpu_run
             ^
        the kernel has `_` where the file of a module has `-`"#]],
    );
    check(
        "p kprobe:vfs_read",
        expect![[r#"
        p kprobe:vfs_read
          ^
        `kprobe:` is of scripts (-e); here a function's entry is `p FUNCTION`, its return `r FUNCTION`"#]],
    );
    check(
        "p ffffffff81349800",
        expect![[r#"
        p ffffffff81349800
          ^
        an address begins with 0x: write 0xffffffff81349800"#]],
    );
    check(
        "r:x ffffffff81349800+4 %di",
        expect![[r#"
        r:x ffffffff81349800+4 %di
            ^
        an address begins with 0x: write 0xffffffff81349800"#]],
    );
    check(
        "kr:vfs_read",
        expect![[r#"
        kr:vfs_read
        ^
        `kr:` is of scripts (-e); here a function's entry is `p FUNCTION`, its return `r FUNCTION`"#]],
    );
    check(
        "tracepoint:syscalls:sys_enter_openat",
        expect![[r#"
        tracepoint:syscalls:sys_enter_openat
        ^
        not supported: tracepoint probes (`t`); write `p SYMBOL` or `r SYMBOL`"#]],
    );
    check(
        "uprobe:/bin/sh:readline",
        expect![[r#"
        uprobe:/bin/sh:readline
        ^
        not supported: user-space probes (`u`); write `p SYMBOL` or `r SYMBOL`"#]],
    );
    check(
        "p /bin/ls:0x1234",
        expect![[r#"
        p /bin/ls:0x1234
          ^
        `/` cannot be part of a module's name"#]],
    );
    check(
        "p kvm:kvm:kvm_read",
        expect![[r#"
        p kvm:kvm:kvm_read
                 ^
        `:` cannot be part of a symbol"#]],
    );
    check(
        "p kvm:0x1234",
        expect![[r#"
        p kvm:0x1234
              ^
        a symbol starts with no digit, an address with 0x"#]],
    );
    let column = |text: String| parse(&text).map_err(|error| error.column);
    assert!(column(format!("p {}:x", "a".repeat(55))).is_ok());
    assert_eq!(column(format!("p {}:x", "a".repeat(56))), Err(57));
}
