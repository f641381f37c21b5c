//! Passes TCP connections on, from one address of a machine to another of its own.

use std::error::Error;
use std::io;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::thread;

/// Connects whoever comes to `from` with `to`, for as long as the machine runs.
pub(crate) fn run(from: &str, to: &str) -> Result<(), Box<dyn Error>> {
    let listener = TcpListener::bind(from)?;
    for client in listener.incoming() {
        let to = to.to_owned();
        // Those that cannot be served are closed.
        thread::spawn(move || client.and_then(|client| connect(&client, &to)));
    }
    Ok(())
}

fn connect(client: &TcpStream, to: &str) -> io::Result<()> {
    let server = TcpStream::connect(to)?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    thread::scope(|scope| {
        let back = scope.spawn(|| pass(&server, client));
        pass(client, &server);
        // It has told by then what there is to tell.
        let _done = back.join();
    });
    Ok(())
}

/// Passes bytes on until there are no more, and tells that.
fn pass(mut from: &TcpStream, mut to: &TcpStream) {
    // However it ends, it has ended.
    let _ended = io::copy(&mut from, &mut to);
    let _ended = to.shutdown(Shutdown::Write);
}
