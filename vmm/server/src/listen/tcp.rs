//! The TCP port the server listens on, for clients that cannot use a unix socket.
//!
//! Invariants: the address cannot be reached from other machines, because nothing is encrypted; calls have to show
//! a token, because every local user can reach the address; connections on the port never keep connections on the
//! unix socket from being accepted.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use hvprobe_proto::Token;
use tokio::net::{TcpListener, TcpStream};

/// Why a port cannot be listened on.
#[derive(Debug, thiserror::Error)]
pub enum LoopbackError {
    /// The address can be reached from other machines.
    #[error(
        "{} is not an address of this machine alone: listen on 127.0.0.1 or [::1], as there is no \
         TLS yet",
        .0.ip()
    )]
    NotLoopback(SocketAddr),
    /// The network layer refused.
    #[error("cannot listen on {address}")]
    Io {
        /// Address that was used.
        address: SocketAddr,
        /// Error of the system.
        source: io::Error,
    },
}

/// A TCP port on a loopback address. Calls over it need a token.
#[derive(Debug)]
pub struct Loopback {
    listener: TcpListener,
    address: SocketAddr,
    token: Arc<Token>,
}

impl Loopback {
    /// Listens on `address`, for clients that have `token`. If the port in `address` is 0, the system chooses one.
    ///
    /// # Errors
    /// When the address can be reached from other machines, or when the system refuses.
    pub async fn bind(address: SocketAddr, token: Token) -> Result<Self, LoopbackError> {
        if !address.ip().is_loopback() {
            return Err(LoopbackError::NotLoopback(address));
        }
        let io = |source| LoopbackError::Io { address, source };
        let listener = TcpListener::bind(address).await.map_err(io)?;
        Ok(Self {
            address: listener.local_addr().map_err(io)?,
            listener,
            token: Arc::new(token),
        })
    }

    /// Returns the address that it listens on.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the token that its clients have to show.
    pub(crate) fn token(&self) -> Arc<Token> {
        Arc::clone(&self.token)
    }

    /// Accepts the next connection.
    pub(crate) async fn accept(&self) -> io::Result<TcpStream> {
        let (stream, _) = self.listener.accept().await?;
        // Small answers are sent without delay, because clients wait for them. This fails if the client has
        // disconnected, which is detected later.
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "a connection ended before it was accepted");
        }
        Ok(stream)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn bind(address: &str) -> Result<Loopback, LoopbackError> {
        let token = "0123456789abcdef".parse().unwrap();
        Loopback::bind(address.parse().unwrap(), token).await
    }

    #[tokio::test]
    async fn only_own_addresses_are_listened_on() {
        for other in [
            "0.0.0.0:0",
            "[::]:0",
            "10.0.0.1:0",
            "192.0.2.1:50051",
            "[::ffff:127.0.0.1]:0",
        ] {
            let result = bind(other).await;
            assert!(matches!(result, Err(LoopbackError::NotLoopback(_))));
        }
        let chosen = bind("127.0.0.1:0").await.unwrap().address();
        assert!(chosen.ip().is_loopback());
        assert_ne!(chosen.port(), 0);
    }

    #[tokio::test]
    async fn port_of_another_server_is_refused() {
        let first = bind("127.0.0.1:0").await.unwrap();
        let result = bind(&first.address().to_string()).await;
        assert!(matches!(result, Err(LoopbackError::Io { .. })));
    }
}
