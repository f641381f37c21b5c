//! Compares the output of `hvprobe explain` for definitions with the probes in a guest that has the same kernel.

use std::process::{Command, Stdio};

use hvprobe_tests::names;
use hvprobe_tests::rig::{is_short, quickly, rig};
use serde_json::Value;

/// Options in addition to the definitions, and whether return probes support them.
const OPTIONS: [(&[&str], bool); 3] = [
    (&[], true),
    (&["--mechanism", "emulated"], true),
    (&["--post"], false),
];

/// Returns the definitions, each with a name.
fn definitions() -> Vec<String> {
    let inside = |function: &str| format!("{function}+{}", names::behind_entry(function));
    vec![
        "p:entry vfs_read".to_owned(),
        format!("p:inside {}", inside("ksys_read")),
        format!("p:other {}", inside("vfs_write")),
        "p:read do_sys_openat2 name=+0(%si):ustring".to_owned(),
        "p:filtered __x64_sys_getpgid if comm == \"sh\" && cpu < 9".to_owned(),
        "r:back ksys_write".to_owned(),
        "r:memory vfs_open path=+0(%di):x64".to_owned(),
    ]
}

/// Returns the lines of JSON that `hvprobe` prints.
fn lines(words: &[&str]) -> Vec<Value> {
    let output = Command::new("hvprobe")
        .args(words)
        .stdin(Stdio::null())
        .output()
        .expect("hvprobe is there");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{words:?}: {stderr}");
    let printed = String::from_utf8_lossy(&output.stdout);
    let lines = printed.lines();
    lines
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect()
}

fn text<'a>(line: &'a Value, key: &str) -> &'a str {
    line[key]
        .as_str()
        .unwrap_or_else(|| panic!("{key}: {line}"))
}

#[test]
fn probes_become_what_was_said_of_them() {
    if rig("explanations held against probes").is_none() {
        return;
    }
    let mut optimized = 0;
    for (options, returns) in OPTIONS.into_iter().take(if is_short() { 2 } else { 3 }) {
        let mut definitions = definitions();
        definitions.retain(|it| returns || it.starts_with('p'));
        let definitions: Vec<_> = definitions.iter().map(String::as_str).collect();
        let said = lines(&[&["explain", "--json"], options, &definitions].concat());
        assert_eq!(said.len(), definitions.len());
        let probes = definitions.iter().flat_map(|it| ["-p", it]);
        let probes: Vec<_> = probes.collect();
        let ran = lines(
            &[
                &["run"],
                &quickly()[..],
                &["--json"],
                options,
                &probes,
                &["--", "true"],
            ]
            .concat(),
        );
        for said in &said {
            let event = text(said, "event").strip_prefix("kprobes/");
            let is = ran
                .iter()
                .find(|line| line["type"] == "summary" && line["event"].as_str() == event)
                .unwrap_or_else(|| panic!("{said}: {ran:?}"));
            let (mechanism, with_exits) = (text(said, "mechanism"), text(said, "with_exits"));
            // Only the guest shows whether a task stands under the jump, so the explanation names two mechanisms.
            let provided = said["provided"].to_string().contains("no task stands");
            let may_be = |it| it == mechanism || provided && it == with_exits;
            assert!(may_be(text(is, "mechanism")), "{said}\n{is}");
            assert_eq!(said["exit"].is_null(), mechanism == "optimized", "{said}");
            optimized += usize::from(is["mechanism"] == "optimized");
            let at = match said["offset"].as_u64() {
                Some(0) => text(said, "symbol").to_owned(),
                offset => format!("{}+{:#x}", text(said, "symbol"), offset.unwrap_or_default()),
            };
            assert_eq!(text(is, "at"), at, "{said}\n{is}");
        }
    }
    assert!(optimized > 3, "{optimized} of all are optimized");
}

#[test]
fn what_is_refused_is_pointed_at_and_the_rest_explained() {
    if rig("explanations of what is refused").is_none() {
        return;
    }
    let output = Command::new("hvprobe")
        .args(["explain", "p vfs_read", "p vfs_read nothing", "p exc_int3"])
        .stdin(Stdio::null())
        .output()
        .expect("hvprobe is there");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(
        printed.starts_with("p vfs_read\n  event        kprobes/p_vfs_read_0\n"),
        "{printed}"
    );
    let lines: Vec<_> = stderr.lines().collect();
    assert!(
        lines[0].starts_with("hvprobe: bad definition: "),
        "{stderr}"
    );
    assert_eq!(lines[1], "  p vfs_read nothing", "{stderr}");
    assert_eq!(lines[2].trim(), "^", "{stderr}");
    assert!(lines[3].starts_with("hvprobe: p exc_int3: "), "{stderr}");
}
