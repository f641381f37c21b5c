//! `serve --config` and `--print-config` with good and bad files.

use super::place::Place;

#[test]
fn a_server_keeps_to_the_limits_of_its_file() {
    let place = Place::new();
    let file = place.file("limits.toml", b"[limits]\nmachines = 0\n");
    let kernel = place.file("kernel", b"no matter");
    let (server, _) = place.serve_with(&["--config", &file]);
    let boot = place.run(&["vm", "boot", "--kernel", &kernel]);
    let stderr = String::from_utf8(boot.stderr).unwrap();
    assert_eq!(boot.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("there are 0 machines already"), "{stderr}");
    assert_eq!(server.terminate(), Some(0));
}

#[test]
fn what_is_printed_is_read_again_and_a_mistake_is_reported() {
    let place = Place::new();
    let print = |file: &str| {
        let output = place.run(&["serve", "--config", file, "--print-config"]);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(0), "{stderr}");
        String::from_utf8(output.stdout).unwrap()
    };
    let few = place.file(
        "few.toml",
        b"[limits]\nmachines = 7\nevent_bytes = \"3K\"\n",
    );
    let printed = print(&few);
    for line in ["machines = 7 ", "event_bytes = \"3K\" "] {
        assert!(printed.contains(line), "{printed}");
    }
    let again = place.file("again.toml", printed.as_bytes());
    assert_eq!(print(&again), printed);

    let bad = place.file("bad.toml", b"[limits]\nmachine = 7\n");
    let output = place.run(&["serve", "--config", &bad]);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("unknown field `machine`"), "{stderr}");
}
