//! All that a server listens on, as one.
//!
//! What is kept true: there are never more connections than may be, on the unix socket and on the TCP port
//! each. When all of one are taken, a few more are accepted there whose calls are told so, whatever they show;
//! beyond those, whoever comes waits.

use std::future::pending;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::Status;

use super::authority::Named;
use super::connection::Connection;
use super::socket::Listener;
use super::tcp::Loopback;
use crate::totals::{Places, Totals};

/// How long a server that has run out of file descriptors waits for some to come free.
const EXHAUSTED: Duration = Duration::from_millis(100);
/// Connections to each that are accepted only to be told that there are too many.
const REFUSED: usize = 16;

/// A unix socket, and a TCP port if there is to be one.
#[derive(Debug)]
pub(crate) struct Doors {
    socket: Listener,
    loopback: Option<Loopback>,
    totals: Arc<Totals>,
    refused_known: Arc<Semaphore>,
    refused_unknown: Arc<Semaphore>,
}

impl Doors {
    /// What `totals` has room for is accepted.
    pub(crate) fn new(socket: Listener, loopback: Option<Loopback>, totals: Arc<Totals>) -> Self {
        Self {
            socket,
            loopback,
            totals,
            refused_known: Arc::new(Semaphore::new(REFUSED)),
            refused_unknown: Arc::new(Semaphore::new(REFUSED)),
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
        let places = &self.totals.connections;
        let place = Place::of(places, &self.refused_known).await;
        let stream = Named::new(self.socket.accept().await?);
        Ok(match place.settle(places) {
            Ok(place) => Connection::known(stream).with_place(place),
            Err((why, refused)) => Connection::refused(stream, why).with_place(refused),
        })
    }

    async fn unknown(&self) -> io::Result<Connection> {
        let Some(loopback) = &self.loopback else {
            return pending().await;
        };
        let places = &self.totals.tcp_connections;
        let place = Place::of(places, &self.refused_unknown).await;
        let stream = Named::new(loopback.accept().await?);
        Ok(match place.settle(places) {
            Ok(place) => Connection::with_token(stream, loopback.token()).with_place(place),
            Err((why, refused)) => Connection::refused(stream, why).with_place(refused),
        })
    }
}

/// What a connection is given.
enum Place {
    /// One of those there are.
    Free(OwnedSemaphorePermit),
    /// One for who is to be told that there are no more.
    Refused(OwnedSemaphorePermit),
}

impl Place {
    /// For the next connection: one of `places`, or of `refused`.
    async fn of(places: &Places, refused: &Arc<Semaphore>) -> Self {
        let refused = async {
            match Arc::clone(refused).acquire_owned().await {
                Ok(place) => place,
                // It is closed by nobody.
                Err(_) => pending().await,
            }
        };
        tokio::select! {
            biased;
            free = places.wait() => Self::Free(free),
            refused = refused => Self::Refused(refused),
        }
    }

    /// What the connection gets that has come, or why it is refused.
    fn settle(
        self,
        places: &Places,
    ) -> Result<OwnedSemaphorePermit, (Status, OwnedSemaphorePermit)> {
        match self {
            Self::Free(place) => Ok(place),
            // One may have come free while nobody came.
            Self::Refused(refused) => places.take().map_err(|why| (why.into(), refused)),
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpStream;
    use tokio::time::timeout;

    use super::super::token::tests::token;
    use super::*;
    use crate::allowed::Limits;

    #[tokio::test]
    async fn tcp_connections_beyond_the_limit_and_those_told_so_wait_for_one_to_end() {
        let folder = tempfile::tempdir().unwrap();
        let socket = Listener::bind(&folder.path().join("socket")).unwrap();
        let address = "127.0.0.1:0".parse().unwrap();
        let loopback = Loopback::bind(address, token("0123456789abcdef")).await;
        let loopback = loopback.unwrap();
        let address = loopback.address();
        let totals = Totals::new(Limits {
            tcp_connections: 1,
            ..Limits::default()
        });
        let doors = Doors::new(socket, Some(loopback), Arc::new(totals));
        let patience = Duration::from_secs(30);
        let (mut clients, mut served) = (Vec::new(), Vec::new());
        for _ in 0..=REFUSED {
            clients.push(TcpStream::connect(address).await.unwrap());
            served.push(timeout(patience, doors.accept()).await.unwrap());
        }
        clients.push(TcpStream::connect(address).await.unwrap());
        let soon = Duration::from_millis(50);
        assert!(timeout(soon, doors.accept()).await.is_err());
        drop(served.pop());
        timeout(patience, doors.accept()).await.expect("the next");
    }
}
