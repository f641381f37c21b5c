//! Connections to clients that have disappeared silently.

use std::future::pending;
use std::time::Duration;

use hvprobe_server::Server;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};
use tokio::time::timeout;

/// Connection preface and an empty SETTINGS frame (RFC 9113, 3.4 and 6.5).
const HELLO: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
/// Type of a PING frame (RFC 9113, 6.7).
const PING: u8 = 6;

/// Returns the types of the frames in `bytes`.
fn types(mut bytes: &[u8]) -> Vec<u8> {
    let mut types = Vec::new();
    while let Some(([a, b, c, kind, ..], _)) = bytes.split_first_chunk::<9>() {
        types.push(*kind);
        let len = usize::from(*a) << 16 | usize::from(*b) << 8 | usize::from(*c);
        bytes = bytes.get(9 + len..).unwrap_or_default();
    }
    types
}

// The clock is paused, and advances by itself when everything waits.
#[tokio::test(start_paused = true)]
async fn a_client_that_answers_nothing_is_asked_and_then_let_go() {
    let (mut client, server) = duplex(1 << 16);
    tokio::spawn(Server::new().serve_connection(server, pending()));
    client.write_all(HELLO).await.unwrap();
    let mut received = Vec::new();
    let closed = timeout(Duration::from_secs(600), client.read_to_end(&mut received)).await;
    closed.expect("the connection ends").unwrap();
    assert!(types(&received).contains(&PING), "{:?}", types(&received));
}
