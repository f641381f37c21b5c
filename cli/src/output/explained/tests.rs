use expect_test::{Expect, expect};
use hvprobe_spec::language::{self, Capture};
use hvprobe_spec::shape::{Shape, ShapeKind};
use hvprobe_spec::{Actions, Base, Bits, Fetched, Memory, Pointer, RegisterSet};

use super::{Argument, Common, Explained, Item, Mechanism, Read, Shown, Source, text};

/// Returns the explanation of a probe with this `definition` in `vfs_read`.
fn explained(definition: &str) -> Explained {
    Explained {
        definition: definition.to_owned(),
        event: "kprobes/p_vfs_read_0".to_owned(),
        at: language::address("0xffffffff81000000").unwrap(),
        symbol: ("vfs_read".to_owned(), 0x10),
        code: vec![0x90],
        instruction: "nop".to_owned(),
        exit: None,
        provided: vec!["optimization is on", "no task stands there"],
        with_exits: Mechanism::Emulated,
        ftrace: true,
        shown: hvprobe_sources::Shown::default(),
        actions: Actions::default(),
    }
}

fn argument(name: &str, source: Source) -> Argument {
    Argument {
        name: name.to_owned(),
        source,
        bits: None,
        shape: Shape {
            name: "u64".to_owned(),
            size: 8,
            kind: ShapeKind::Unsigned,
        },
    }
}

fn registers(names: &[&str], entry: bool) -> Source {
    let named = names.iter().map(|name| match language::capture(name) {
        Ok(Capture::Register(register)) => register,
        other => panic!("no register: {other:?}"),
    });
    Source::Registers {
        registers: named.collect(),
        entry,
    }
}

fn fetched(read: Read) -> Item {
    let pointer = |offset, memory| Pointer { offset, memory };
    Item::Fetched(Box::new(Fetched {
        base: match language::capture("%di") {
            Ok(Capture::Register(register)) => Base::Register(register),
            other => panic!("no register: {other:?}"),
        },
        pointers: vec![pointer(8, Memory::Kernel), pointer(-4, Memory::User)],
        read,
    }))
}

fn check(explained: &Explained, expected: Expect) {
    expected.assert_eq(&text(explained));
}

#[test]
fn a_probe_without_exits_says_what_it_takes() {
    check(
        &explained("p vfs_read+0x10"),
        expect![[r#"
        p vfs_read+0x10
          event        kprobes/p_vfs_read_0
          at           vfs_read+0x10 0xffffffff81000000
          instruction  nop
          hits         optimized, no exit; if not, emulated, one exit
          provided     that optimization is on
                       that no task stands there
          never        while the guest's ftrace traces this function, which is then [GONE]
          registers    %ax %cx %dx %bx %sp %bp %si %di %r8 %r9 %r10 %r11 %r12 %r13 %r14 %r15"#]],
    );
}

#[test]
fn arguments_are_printed_with_their_places() {
    let mut explained = explained("r vfs_read if x > 1 && comm == \"a\"");
    explained.exit = Some("it reads memory when the function returns".to_owned());
    explained.provided.clear();
    explained.with_exits = Mechanism::Stepped;
    explained.ftrace = false;
    let mut bits = argument("bits", registers(&["%si", "%dx"], false));
    bits.bits = Some(Bits {
        offset: 3,
        width: 2,
    });
    explained.shown.registers = RegisterSet::from_iter([]);
    explained.shown.arguments = vec![
        argument("x", registers(&["%si", "%dx"], true)),
        bits,
        argument("number", Source::Item(0)),
        argument("text", Source::Item(1)),
        argument("constant", Source::Constant(vec![1])),
        argument("comm", Source::Common(Common::Comm)),
    ];
    explained.actions.capture = vec![fetched(Read::Bytes(8))];
    explained.actions.capture_at_return = vec![fetched(Read::Text(64))];
    check(
        &explained,
        expect![[r#"
        r vfs_read if x > 1 && comm == "a"
          event        kprobes/p_vfs_read_0
          at           vfs_read+0x10 0xffffffff81000000
          instruction  nop
          hits         stepped, two exits: it reads memory when the function returns
          argument     x: u64, %si:%dx at the entry
                       bits: u64, %si:%dx, 2 bits from 3
                       number: u64, -u4(+8(%di)), 8 bytes at the entry
                       text: u64, -u4(+8(%di)), up to 64 bytes at the return
                       constant: u64, always the same
                       comm: u64, $comm
          filter       x > 1 && comm == "a", before anything is recorded"#]],
    );
    expect![[r#"
        {
          "definition": "r vfs_read if x > 1 && comm == \"a\"",
          "event": "kprobes/p_vfs_read_0",
          "address": "0xffffffff81000000",
          "symbol": "vfs_read",
          "offset": 16,
          "bytes": "90",
          "instruction": "nop",
          "mechanism": "stepped",
          "exit": "it reads memory when the function returns",
          "provided": [],
          "with_exits": "stepped",
          "ftrace": false,
          "arguments": [
            {
              "name": "x",
              "type": "u64",
              "size": 8,
              "place": "%si:%dx at the entry"
            },
            {
              "name": "bits",
              "type": "u64",
              "size": 8,
              "place": "%si:%dx, 2 bits from 3"
            },
            {
              "name": "number",
              "type": "u64",
              "size": 8,
              "place": "-u4(+8(%di)), 8 bytes at the entry"
            },
            {
              "name": "text",
              "type": "u64",
              "size": 8,
              "place": "-u4(+8(%di)), up to 64 bytes at the return"
            },
            {
              "name": "constant",
              "type": "u64",
              "size": 8,
              "place": "always the same"
            },
            {
              "name": "comm",
              "type": "u64",
              "size": 8,
              "place": "$comm"
            }
          ],
          "registers": [],
          "filter": "x > 1 && comm == \"a\"",
          "filter_when": "before anything is recorded"
        }"#]]
    .assert_eq(&serde_json::to_string_pretty(&Shown(&explained)).unwrap());
}
