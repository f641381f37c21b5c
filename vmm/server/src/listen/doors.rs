//! All that a server listens on, as one.
//!
//! What is kept true: there are never more connections than may be. When all of the unix socket's are taken, a
//! few more are accepted whose calls are told so; beyond those, and on the TCP port, whoever comes waits.

use std::future::pending;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::authority::Named;
use super::connection::Connection;
use super::socket::Listener;
use super::tcp::Loopback;
use crate::totals::Totals;

/// How long a server that has run out of file descriptors waits for some to come free.
const EXHAUSTED: Duration = Duration::from_millis(100);
/// Connections to the unix socket that are accepted only to be told that there are too many.
const REFUSED: usize = 16;

/// A unix socket, and a TCP port if there is to be one.
#[derive(Debug)]
pub(crate) struct Doors {
    socket: Listener,
    loopback: Option<Loopback>,
    totals: Arc<Totals>,
    refused: Arc<Semaphore>,
}

impl Doors {
    /// What `totals` has room for is accepted.
    pub(crate) fn new(
        socket: Listener,
        mut loopback: Option<Loopback>,
        totals: Arc<Totals>,
    ) -> Self {
        if let Some(loopback) = &mut loopback {
            loopback.allow(totals.limits().tcp_connections);
        }
        Self {
            socket,
            loopback,
            totals,
            refused: Arc::new(Semaphore::new(REFUSED)),
        }
    }

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
        let place = self.place().await;
        let stream = self.socket.accept().await?;
        let stream = Named::new(stream);
        Ok(match place {
            Place::Free(place) => Connection::known(stream).with_place(place),
            // One may have come free while nobody came.
            Place::Refused(refused) => match self.totals.connections.take() {
                Ok(place) => Connection::known(stream).with_place(place),
                Err(why) => Connection::refused(stream, why.into()).with_place(refused),
            },
        })
    }

    /// A place for the next connection to the unix socket.
    async fn place(&self) -> Place {
        let refused = async {
            match Arc::clone(&self.refused).acquire_owned().await {
                Ok(place) => place,
                // It is closed by nobody.
                Err(_) => pending().await,
            }
        };
        tokio::select! {
            biased;
            free = self.totals.connections.wait() => Place::Free(free),
            refused = refused => Place::Refused(refused),
        }
    }

    async fn unknown(&self) -> io::Result<Connection> {
        let Some(loopback) = &self.loopback else {
            return pending().await;
        };
        let (stream, place) = loopback.accept().await?;
        let stream = Named::new(stream);
        Ok(Connection::with_token(stream, loopback.token()).with_place(place))
    }
}

/// What a connection is given.
enum Place {
    /// One of those there are.
    Free(OwnedSemaphorePermit),
    /// One for who is to be told that there are no more.
    Refused(OwnedSemaphorePermit),
}
