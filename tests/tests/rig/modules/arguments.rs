//! Tests that arguments of functions of modules are shown with the modules' own types.

use hvprobe_tests::names;
use hvprobe_tests::program::{hvprobe, ok};
use hvprobe_tests::rig::rig;
use serde_json::Value;

/// Creates a device of the module, sets its MTU to a unique value, and makes the kernel ask the module for the
/// device's statistics once.
const GUEST: &str = "insmod /lib/modules/dummy.ko && echo 1234 >/sys/class/net/dummy0/mtu && \
     cat /proc/net/dev >/tmp/stats";
/// A function of the module that has the device as argument.
const ASKED: &str = "dummy:dummy_get_stats64";
/// A function of the module that returns an integer.
const MADE: &str = "dummy:dummy_dev_init";

/// Returns the events called `name` among the lines of JSON that `hvprobe` prints.
fn events<'a>(lines: &'a [Value], name: &str) -> Vec<&'a Value> {
    let named = |line: &&Value| line["type"] == "event" && line["event"] == name;
    lines.iter().filter(named).collect()
}

#[test]
fn functions_of_modules_show_their_arguments_by_the_modules_types() {
    if rig("arguments of modules' functions").is_none() {
        return;
    }
    let asked = format!("p:asked {ASKED}");
    let members = format!(
        "p:members {ASKED} name=dev->name:string mtu=dev->mtu type=dev->type if comm == \"cat\""
    );
    let made = format!("r:made {MADE}");
    let typed = names::keeps_types_of_modules();
    let mut probes = vec!["-p", &asked, "-p", &made];
    if typed {
        probes.extend(["-p", &members]);
    }
    let run = ok(&[&["run", "--json"], &probes[..], &["--", "sh", "-c", GUEST]].concat());
    let lines = run.iter().map(|line| serde_json::from_str(line));
    let lines: Vec<Value> = lines.map(|line| line.expect("JSON")).collect();

    let (asked, made) = (events(&lines, "asked"), events(&lines, "made"));
    assert!(!asked.is_empty() && made.len() == 1, "{lines:#?}");
    if !typed {
        eprintln!("the guest's kernel keeps no types of modules: registers are shown");
        let plain =
            |event: &&&Value| event["args"].is_null() && event["registers"]["rdi"].is_string();
        assert!(
            asked.iter().chain(&made).all(|event| plain(&event)),
            "{lines:#?}"
        );
        let refused = hvprobe(&["run", "-p", &members, "--", "true"]);
        let why = refused.err.join("\n");
        assert_ne!(refused.status, Some(0), "{why}");
        assert!(why.contains("keeps no types of modules"), "{why}");
        return;
    }
    let members = events(&lines, "members");
    assert_eq!(members.len(), 1, "{lines:#?}");
    let said = &members[0]["args"];
    assert_eq!(
        (&said["name"], &said["mtu"], &said["type"]),
        (&"dummy0".into(), &1234.into(), &1.into())
    );
    for event in asked {
        let names: Vec<_> = event["args"]
            .as_object()
            .expect("arguments")
            .keys()
            .collect();
        assert_eq!(names, ["dev", "stats"], "{event}");
    }
    assert_eq!(made[0]["args"]["retval"], 0, "{}", made[0]);
}

#[test]
fn histograms_and_stacks_wait_with_the_probes_of_a_module() {
    if rig("histograms of modules' functions").is_none() {
        return;
    }
    if !names::keeps_types_of_modules() {
        eprintln!("the guest's kernel keeps no types of modules: their arguments have no names");
        return;
    }
    let asked =
        format!("p:asked {ASKED} name=dev->name:string mtu=dev->mtu:u32 if comm == \"cat\"");
    let count = |histogram: &str| {
        let run = ["run", "--json", "-p", &asked, "--hist", histogram];
        hvprobe(&[&run[..], &["--", "sh", "-c", GUEST]].concat())
    };
    let counted = count("keys=name:vals=mtu");
    assert_eq!(counted.status, Some(0), "{:#?}", counted.err);
    let lines = counted.out.iter().map(|line| serde_json::from_str(line));
    let lines: Vec<Value> = lines.map(|line| line.expect("JSON")).collect();
    let of = |line: &&Value| line["type"] == "entry";
    let entries: Vec<_> = lines.iter().filter(of).collect();
    assert_eq!(entries.len(), 1, "{lines:#?}");
    let [keys, hits, values] = ["keys", "hits", "values"].map(|part| &entries[0][part]);
    assert_eq!(
        (&keys["name"], hits, &values["mtu"]),
        (&"dummy0".into(), &1.into(), &1234.into()),
        "{lines:#?}"
    );
    let wrong = count("keys=cpu,name,length");
    let why = wrong.err.join("\n");
    assert_ne!(wrong.status, Some(0), "{why}");
    assert!(
        why.contains("Field not found; there are name, mtu"),
        "{why}"
    );
    assert!(why.contains("of probe `asked`"), "{why}");

    let made = format!("r:made {MADE}");
    let run = ["run", "--json", "--stack", "-p", &made];
    let run = ok(&[&run[..], &["--", "sh", "-c", GUEST]].concat());
    let lines = run.iter().map(|line| serde_json::from_str(line));
    let lines: Vec<Value> = lines.map(|line| line.expect("JSON")).collect();
    let made = events(&lines, "made");
    assert_eq!(made.len(), 1, "{lines:#?}");
    assert_eq!(made[0]["args"]["retval"], 0, "{}", made[0]);
    assert!(made[0]["args"]["dev"].is_string(), "{}", made[0]);
    println!("{}", made[0]);
}
