//! Accepts connections on all sockets of a server.
//!
//! Invariant: the unix socket and the TCP port each have at most their limit of connections. At the limit, a new
//! connection takes the permit of a [silent](super::silent) one. If none is silent, up to [`REFUSED`] more
//! connections are accepted, whose calls are answered with an error; further ones wait in the backlog.

use std::future::pending;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::Status;

use super::authority::Named;
use super::connection::Connection;
use super::silent::{Beginning, Silent};
use super::socket::Listener;
use super::tcp::Loopback;
use crate::bounds::totals::{Places, Totals};

/// Delay after a failed attempt to accept a connection, for example if no file descriptor is free.
const EXHAUSTED: Duration = Duration::from_millis(100);
/// Maximum number of connections per socket that are accepted only to refuse their calls.
const REFUSED: usize = 16;

/// A unix socket and an optional TCP port.
#[derive(Debug)]
pub(crate) struct Acceptor {
    socket: Listener,
    loopback: Option<Loopback>,
    totals: Arc<Totals>,
    known: Kind,
    unknown: Kind,
}

/// For one of the sockets: its connections that may still lose their permits, and the permits for connections whose
/// calls are refused.
#[derive(Debug)]
struct Kind {
    silent: Silent,
    refused: Arc<Semaphore>,
    silent_refused: Silent,
}

impl Default for Kind {
    fn default() -> Self {
        Self {
            silent: Silent::default(),
            refused: Arc::new(Semaphore::new(REFUSED)),
            silent_refused: Silent::default(),
        }
    }
}

impl Acceptor {
    /// Creates the acceptor; `totals` has the permits.
    pub(crate) fn new(socket: Listener, loopback: Option<Loopback>, totals: Arc<Totals>) -> Self {
        Self {
            socket,
            loopback,
            totals,
            known: Kind::default(),
            unknown: Kind::default(),
        }
    }

    /// Accepts the next connection.
    pub(crate) async fn accept(&self) -> Connection {
        loop {
            // Both are cancel safe.
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
        let place = Place::of(places, &self.known.refused).await;
        let stream = Named::new(self.socket.accept().await?);
        Ok(match place.settle(places, &self.known) {
            Ok(begun) => Connection::known(stream).beginning(begun),
            Err((why, begun)) => Connection::refused(stream, why).beginning(begun),
        })
    }

    async fn unknown(&self) -> io::Result<Connection> {
        let Some(loopback) = &self.loopback else {
            return pending().await;
        };
        let places = &self.totals.tcp_connections;
        let place = Place::of(places, &self.unknown.refused).await;
        let stream = Named::new(loopback.accept().await?);
        Ok(match place.settle(places, &self.unknown) {
            Ok(begun) => Connection::with_token(stream, loopback.token()).beginning(begun),
            Err((why, begun)) => Connection::refused(stream, why).beginning(begun),
        })
    }
}

/// The permit of a new connection.
enum Place {
    /// A regular one.
    Free(OwnedSemaphorePermit),
    /// One for a connection whose calls are refused.
    Refused(OwnedSemaphorePermit),
}

impl Place {
    /// Waits for a permit for the next connection: one of `places` or, if all of them are taken, one of `refused`.
    async fn of(places: &Places, refused: &Arc<Semaphore>) -> Self {
        let refused = async {
            match Arc::clone(refused).acquire_owned().await {
                Ok(place) => place,
                // Nothing closes the semaphore.
                Err(_) => pending().await,
            }
        };
        tokio::select! {
            biased;
            free = places.wait() => Self::Free(free),
            refused = refused => Self::Refused(refused),
        }
    }

    /// Returns the state in which an accepted connection begins and, if its calls are to be refused, the reason.
    fn settle(self, places: &Places, kind: &Kind) -> Result<Beginning, (Status, Beginning)> {
        let refused = match self {
            Self::Free(place) => return Ok(kind.silent.lend(place)),
            Self::Refused(refused) => refused,
        };
        // A permit may have been returned since.
        let taken = places.take();
        match taken.or_else(|why| kind.silent.take().ok_or(why)) {
            Ok(place) => Ok(kind.silent.lend(place)),
            Err(why) => Err((why.into(), kind.silent_refused.lend(refused))),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::path::Path;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpStream;
    use tokio::time::timeout;
    use tonic::transport::server::Connected as _;

    use super::super::connection::Admission;
    use super::super::silent::LEAST;
    use super::*;
    use crate::bounds::server_limits::Limits;

    const PATIENCE: Duration = Duration::from_secs(30);
    const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

    /// Returns an acceptor whose TCP port takes one connection, and the port's address.
    async fn acceptor(folder: &Path) -> (Acceptor, SocketAddr) {
        let socket = Listener::bind(&folder.join("socket")).unwrap();
        let address = "127.0.0.1:0".parse().unwrap();
        let loopback = Loopback::bind(address, "0123456789abcdef".parse().unwrap()).await;
        let loopback = loopback.unwrap();
        let address = loopback.address();
        let totals = Totals::new(Limits {
            tcp_connections: 1,
            ..Limits::default()
        });
        let acceptor = Acceptor::new(socket, Some(loopback), Arc::new(totals));
        (acceptor, address)
    }

    /// Sends the preface and waits until the server has read it.
    async fn begin(client: &mut TcpStream, served: &mut Connection) {
        client.write_all(PREFACE).await.unwrap();
        let mut begun = vec![0; PREFACE.len()];
        served.read_exact(&mut begun).await.unwrap();
    }

    #[tokio::test]
    async fn tcp_connections_beyond_the_limit_and_those_refused_wait_for_one_to_end() {
        let folder = tempfile::tempdir().unwrap();
        let (acceptor, address) = acceptor(folder.path()).await;
        let (mut clients, mut served) = (Vec::new(), Vec::new());
        for _ in 0..=REFUSED {
            let mut client = TcpStream::connect(address).await.unwrap();
            let mut one = timeout(PATIENCE, acceptor.accept()).await.unwrap();
            begin(&mut client, &mut one).await;
            clients.push(client);
            served.push(one);
        }
        clients.push(TcpStream::connect(address).await.unwrap());
        let soon = Duration::from_millis(50);
        assert!(timeout(soon, acceptor.accept()).await.is_err());
        drop(served.pop());
        timeout(PATIENCE, acceptor.accept())
            .await
            .expect("the next");
    }

    #[tokio::test]
    async fn connections_that_say_nothing_keep_nobody_out() {
        let folder = tempfile::tempdir().unwrap();
        let (acceptor, address) = acceptor(folder.path()).await;
        let (mut clients, mut served) = (Vec::new(), Vec::new());
        for _ in 0..3 * REFUSED {
            clients.push(TcpStream::connect(address).await.unwrap());
            served.push(timeout(PATIENCE, acceptor.accept()).await.unwrap());
            // Connections that have been silent for this long may lose their permits.
            tokio::time::pause();
            tokio::time::advance(LEAST).await;
            tokio::time::resume();
        }
        let mut last = served.pop().unwrap();
        begin(clients.last_mut().unwrap(), &mut last).await;
        assert!(matches!(last.connect_info().admission, Admission::Token(_)));
        for mut silent in served {
            let over = silent.read_u8().await.unwrap_err();
            assert_eq!(over.kind(), io::ErrorKind::TimedOut);
        }
        // A connection with a preface keeps its permit.
        clients.push(TcpStream::connect(address).await.unwrap());
        let next = timeout(PATIENCE, acceptor.accept()).await.unwrap();
        assert!(matches!(
            next.connect_info().admission,
            Admission::Refused(_)
        ));
    }
}
