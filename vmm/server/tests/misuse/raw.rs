//! Connections that send bytes that are not HTTP/2, are only its beginning, or are nearly HTTP/2.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use hvprobe_fixtures::messages::Messages;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;

/// Connection preface (RFC 9113, section 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// `:method: POST`, `:scheme: http`, `:path: /`, of HPACK's static table.
const HEADERS: [u8; 3] = [0x83, 0x86, 0x84];
/// How long to listen to the server.
const LISTEN: Duration = Duration::from_millis(5);
/// How long the server may take to read what is written.
const WRITE: Duration = Duration::from_secs(5);

/// Appends a frame whose header says that its payload has `len` bytes.
fn frame(into: &mut Vec<u8>, len: usize, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
    let [_, high, middle, low] = u32::try_from(len).unwrap().to_be_bytes();
    into.extend([high, middle, low, kind, flags]);
    into.extend(stream.to_be_bytes());
    into.extend(payload);
}

/// Returns the bytes that one connection sends.
fn bytes(messages: &mut Messages) -> Vec<u8> {
    let len = messages.index(400);
    if messages.one_in(5) {
        return messages.bytes(len);
    }
    let mut bytes = PREFACE.to_vec();
    if messages.one_in(5) {
        bytes.truncate(messages.index(bytes.len()));
        return bytes;
    }
    frame(&mut bytes, 0, 4, 0, 0, &[]);
    match messages.below(4) {
        // Streams that are opened and reset, again and again.
        0 => {
            for number in 0..1 + messages.below(300) {
                let stream = u32::try_from(2 * number + 1).unwrap();
                frame(&mut bytes, HEADERS.len(), 1, 4, stream, &HEADERS);
                frame(&mut bytes, 4, 3, 0, stream, &[0, 0, 0, 8]);
            }
        }
        // Headers that never end.
        1 => {
            frame(&mut bytes, HEADERS.len(), 1, 0, 1, &HEADERS);
            for _ in 0..messages.below(300) {
                frame(&mut bytes, HEADERS.len(), 9, 0, 1, &HEADERS);
            }
        }
        _ => {
            for _ in 0..messages.below(12) {
                let payload = messages.index(60);
                let payload = messages.bytes(payload);
                let len = match messages.below(4) {
                    0 => (1 << 24) - 1,
                    1 => messages.index(1 << 24),
                    _ => payload.len(),
                };
                let [kind, flags] = [12, 256].map(|end| u8::try_from(messages.below(end)).unwrap());
                let stream = u32::try_from(messages.below(6)).unwrap();
                frame(&mut bytes, len, kind, flags, stream, &payload);
            }
        }
    }
    bytes
}

/// Sends `bytes`, listens for a moment, and disconnects.
async fn send(mut stream: impl AsyncRead + AsyncWrite + Unpin, bytes: Vec<u8>) {
    // A server that has had enough closes the connection.
    let written = timeout(WRITE, stream.write_all(&bytes)).await;
    let _refused = written.expect("the server reads, or closes");
    let mut said = [0; 4096];
    while let Ok(Ok(some)) = timeout(LISTEN, stream.read(&mut said)).await {
        if some == 0 {
            break;
        }
    }
}

/// Makes `count` connections, to the socket and to the port.
pub(crate) async fn connections(
    socket: &Path,
    address: SocketAddr,
    messages: &mut Messages,
    count: u64,
) {
    for _ in 0..count {
        let bytes = bytes(messages);
        if messages.one_in(2) {
            send(UnixStream::connect(socket).await.unwrap(), bytes).await;
        } else {
            send(TcpStream::connect(address).await.unwrap(), bytes).await;
        }
    }
}
