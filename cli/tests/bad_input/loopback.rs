//! A server on a TCP port, and the token that protects it.

use std::fs::{self, Permissions};
use std::net::TcpListener;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};

use expect_test::expect;

use crate::place::Place;

/// Token that no server accepts.
const WRONG: &[u8] = b"0123456789abcdef\n";

/// Writes `bytes` as a token into a file that only its owner can read.
fn token(place: &Place, name: &str, bytes: &[u8]) -> String {
    let file = place.file(name, bytes);
    fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
    file
}

#[test]
fn only_who_has_the_token_is_served() {
    let place = Place::new();
    let file = place.path("token").into_os_string().into_string().unwrap();
    let listen = ["--listen", "127.0.0.1:0", "--token-file", &file];
    let (server, lines) = place.serve_with(&listen);
    assert_eq!(fs::metadata(&file).unwrap().mode() & 0o7777, 0o600);
    let words: Vec<_> = lines[1].split_whitespace().collect();
    let url = words[3];
    assert!(
        url.starts_with("http://127.0.0.1:") && !url.ends_with(":0"),
        "{lines:?}"
    );
    assert_eq!(
        words[4..].join(" "),
        format!("for who has the token in {file}")
    );

    let list = |more: &[&str]| place.run(&[&["vm", "list"], more].concat());
    assert!(
        list(&["--connect", url, "--token-file", &file])
            .status
            .success()
    );
    assert!(list(&[]).status.success(), "the socket needs no token");
    let wrong = token(&place, "wrong", WRONG);
    place.check(
        &["vm", "list", "--connect", url, "--token-file", &wrong],
        expect![[r#"
            hvprobe: this is not the token of this server
            status 1
        "#]],
    );
    let read = fs::read(&file).unwrap();
    assert_eq!(server.terminate(), Some(0));

    // The next server accepts the same token.
    let again = ["--listen", "[::1]:0", "--token-file", &file];
    let (server, lines) = place.serve_with(&again);
    assert_eq!(fs::read(&file).unwrap(), read);
    let url = lines[1].split_whitespace().nth(3).unwrap();
    assert!(url.starts_with("http://[::1]:"), "{lines:?}");
    assert!(
        list(&["--connect", url, "--token-file", &file])
            .status
            .success()
    );
    assert_eq!(server.terminate(), Some(0));
}

#[test]
fn port_that_others_could_reach_is_not_listened_on() {
    let place = Place::new();
    let file = token(&place, "token", WRONG);
    for (address, expected) in [
        (
            "0.0.0.0:50051",
            expect![[r#"
            hvprobe: 0.0.0.0 is not an address of this machine alone: listen on 127.0.0.1 or [::1], as there is no TLS yet
            status 1
        "#]],
        ),
        (
            "192.0.2.1:0",
            expect![[r#"
            hvprobe: 192.0.2.1 is not an address of this machine alone: listen on 127.0.0.1 or [::1], as there is no TLS yet
            status 1
        "#]],
        ),
        (
            "[::]:0",
            expect![[r#"
            hvprobe: :: is not an address of this machine alone: listen on 127.0.0.1 or [::1], as there is no TLS yet
            status 1
        "#]],
        ),
        (
            "localhost:0",
            expect![[r#"
            error: invalid value 'localhost:0' for '--listen <ADDRESS>': write 127.0.0.1:PORT or [::1]:PORT

            For more information, try '--help'.
            status 2
        "#]],
        ),
        (
            "127.0.0.1",
            expect![[r#"
            error: invalid value '127.0.0.1' for '--listen <ADDRESS>': write 127.0.0.1:PORT or [::1]:PORT

            For more information, try '--help'.
            status 2
        "#]],
        ),
    ] {
        place.check(
            &["serve", "--listen", address, "--token-file", &file],
            expected,
        );
    }
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let output = place.run(&["serve", "--listen", &address, "--token-file", &file]);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(
        stderr.replace(&address, "ADDRESS"),
        "hvprobe: cannot listen on ADDRESS: Address already in use (os error 98)\n"
    );
    assert_eq!(output.status.code(), Some(1));
    assert!(!place.path("hvprobe.sock").exists());
}

#[test]
fn port_without_a_good_token_is_not_listened_on() {
    let place = Place::new();
    place.check(
        &["serve", "--listen", "127.0.0.1:0"],
        expect![[r#"
        error: the following required arguments were not provided:
          --token-file <FILE>

        Usage: hvprobe serve --listen <ADDRESS> --token-file <FILE>

        For more information, try '--help'.
        status 2
    "#]],
    );
    let exposed = place.file("exposed", WRONG);
    fs::set_permissions(&exposed, Permissions::from_mode(0o640)).unwrap();
    let folder = place.path("folder");
    fs::create_dir(&folder).unwrap();
    for (file, expected) in [
        (
            exposed.as_str(),
            expect![[r#"
            hvprobe: $PLACE/exposed can be read or changed by other users (mode 0640): make a new one, or `chmod 600` it if none has
            status 1
        "#]],
        ),
        (
            &token(&place, "empty", b"\n"),
            expect![[r#"
            hvprobe: $PLACE/empty is empty: `hvprobe serve` makes a token if there is no file
            status 1
        "#]],
        ),
        (
            &token(&place, "short", b"1234"),
            expect![[r#"
            hvprobe: $PLACE/short holds no token: one line of 16 to 4096 ASCII characters without spaces
            status 1
        "#]],
        ),
        (
            folder.to_str().unwrap(),
            expect![[r#"
            hvprobe: $PLACE/folder is not a regular file
            status 1
        "#]],
        ),
        (
            place.path("no/folder").to_str().unwrap(),
            expect![[r#"
            hvprobe: cannot create $PLACE/no/folder: No such file or directory (os error 2)
            status 1
        "#]],
        ),
    ] {
        place.check(
            &["serve", "--listen", "127.0.0.1:0", "--token-file", file],
            expected,
        );
    }
    assert_eq!(fs::read(&exposed).unwrap(), WRONG);
}

#[test]
fn servers_are_named_by_what_can_be_connected_to() {
    let place = Place::new();
    let file = token(&place, "token", WRONG);
    for (url, expected) in [
        (
            "https://127.0.0.1:50051",
            expect![[r#"
            error: invalid value 'https://127.0.0.1:50051' for '--connect <URL>': there is no TLS yet: write http://127.0.0.1:PORT

            For more information, try '--help'.
            status 2
        "#]],
        ),
        (
            "http://192.0.2.1:50051",
            expect![[r#"
            error: invalid value 'http://192.0.2.1:50051' for '--connect <URL>': there is no TLS yet, so the token is sent to this machine only: write http://127.0.0.1:PORT; `ssh -L` brings a port of another machine here

            For more information, try '--help'.
            status 2
        "#]],
        ),
        (
            "127.0.0.1:50051",
            expect![[r#"
            error: invalid value '127.0.0.1:50051' for '--connect <URL>': write http://127.0.0.1:PORT

            For more information, try '--help'.
            status 2
        "#]],
        ),
    ] {
        place.check(
            &["vm", "list", "--connect", url, "--token-file", &file],
            expected,
        );
    }
    place.check(
        &["trace", "--connect", "http://127.0.0.1:1"],
        expect![[r#"
            error: the following required arguments were not provided:
              --token-file <FILE>

            Usage: hvprobe trace --connect <URL> --token-file <FILE>

            For more information, try '--help'.
            status 2
        "#]],
    );
    place.check(
        &["vm", "list", "--token-file", &file],
        expect![[r#"
        error: the following required arguments were not provided:
          --connect <URL>

        Usage: hvprobe vm list --token-file <FILE> --connect <URL>

        For more information, try '--help'.
        status 2
    "#]],
    );
    let both = ["--socket", "socket", "--connect", "http://127.0.0.1:1"];
    place.check(
        &[&["vm", "list"], &both[..], &["--token-file", &file]].concat(),
        expect![[r#"
            error: the argument '--socket <PATH>' cannot be used with '--connect <URL>'

            Usage: hvprobe vm list --socket <PATH> --token-file <FILE>

            For more information, try '--help'.
            status 2
        "#]],
    );
    place.check(
        &[
            "vm",
            "list",
            "--connect",
            "http://127.0.0.1:1",
            "--token-file",
            place.path("missing").to_str().unwrap(),
        ],
        expect![[r#"
            hvprobe: cannot open $PLACE/missing: No such file or directory (os error 2)
            status 1
        "#]],
    );
    // After the drop no process listens on the port.
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", free.local_addr().unwrap());
    drop(free);
    let output = place.run(&["doctor", "--connect", &url, "--token-file", &file]);
    let stderr = String::from_utf8(output.stderr).unwrap();
    let address = &url["http://".len()..];
    assert_eq!(
        stderr,
        format!(
            "hvprobe: no server listens on {url}; start one with `hvprobe serve --listen {address} \
             --token-file {file}`\n"
        )
    );
}
