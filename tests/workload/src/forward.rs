//! Forwards TCP connections from one address of a machine to another address of the same machine.

use std::error::Error;
use std::io;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::thread;

/// Forwards each connection to `from` to the address `to`, for as long as the machine runs.
pub(crate) fn run(from: &str, to: &str) -> Result<(), Box<dyn Error>> {
    let listener = TcpListener::bind(from)?;
    for client in listener.incoming() {
        let to = to.to_owned();
        // Connections that cannot be served are closed.
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
        // Waits until all bytes of the other direction, and their end, have been passed on. The result could only
        // report a panic.
        let _done = back.join();
    });
    Ok(())
}

/// Copies bytes until there are no more, and then shuts down the write side of `to`.
fn pass(mut from: &TcpStream, mut to: &TcpStream) {
    // An error also ends the copy.
    let _ended = io::copy(&mut from, &mut to);
    let _ended = to.shutdown(Shutdown::Write);
}
