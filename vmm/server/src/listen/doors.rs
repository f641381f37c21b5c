//! All that a server listens on, as one.

use std::future::pending;
use std::io;
use std::time::Duration;

use super::authority::Named;
use super::connection::Connection;
use super::socket::Listener;
use super::tcp::Loopback;

/// How long a server that has run out of file descriptors waits for some to come free.
const EXHAUSTED: Duration = Duration::from_millis(100);

/// A unix socket, and a TCP port if there is to be one.
#[derive(Debug)]
pub(crate) struct Doors {
    pub(crate) socket: Listener,
    pub(crate) loopback: Option<Loopback>,
}

impl Doors {
    /// The next connection.
    pub(crate) async fn accept(&self) -> Connection {
        loop {
            // Neither loses a connection when it is dropped while it waits.
            let accepted = tokio::select! {
                known = self.known() => known,
                unknown = self.unknown() => unknown,
            };
            match accepted {
                Ok(connection) => return connection,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(EXHAUSTED).await;
                }
            }
        }
    }

    async fn known(&self) -> io::Result<Connection> {
        let stream = self.socket.accept().await?;
        Ok(Connection::known(Named::new(stream)))
    }

    async fn unknown(&self) -> io::Result<Connection> {
        let Some(loopback) = &self.loopback else {
            return pending().await;
        };
        let (stream, place) = loopback.accept().await?;
        let stream = Named::new(stream);
        Ok(Connection::with_token(stream, loopback.token(), place))
    }
}
