//! The TCP port the server listens on, for clients that cannot use a unix socket.
//!
//! What is kept true: it is one of this machine's own addresses, as nothing is encrypted; every local
//! user reaches it, so calls over it show a token; and however many connections they make, those on
//! the unix socket are accepted as ever.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use tokio::net::{TcpListener, TcpStream};

use super::token::Token;

/// Why a port cannot be listened on.
#[derive(Debug, thiserror::Error)]
pub enum LoopbackError {
    /// Others than this machine's users could reach it.
    #[error(
        "{} is not an address of this machine alone: listen on 127.0.0.1 or [::1], as there is no \
         TLS yet",
        .0.ip()
    )]
    NotLoopback(SocketAddr),
    /// The network layer refused.
    #[error("cannot listen on {address}")]
    Io {
        /// Where.
        address: SocketAddr,
        /// The system's answer.
        source: io::Error,
    },
}

/// A TCP port of this machine that takes calls with a token.
#[derive(Debug)]
pub struct Loopback {
    listener: TcpListener,
    address: SocketAddr,
    token: Arc<Token>,
}

impl Loopback {
    /// Listens on `address`, or on a port of the system's choice if that is 0, for who has `token`.
    ///
    /// # Errors
    /// When the address is reached from elsewhere, or when the system refuses.
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

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What its clients have to show.
    pub(crate) fn token(&self) -> Arc<Token> {
        Arc::clone(&self.token)
    }

    /// The next connection.
    pub(crate) async fn accept(&self) -> io::Result<TcpStream> {
        let (stream, _) = self.listener.accept().await?;
        // Answers are small, and waited for. A client that has gone is found out soon enough.
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "a connection ended before it was accepted");
        }
        Ok(stream)
    }
}

#[cfg(test)]
mod tests {
    use super::super::token::tests::token;
    use super::*;

    async fn bind(address: &str) -> Result<Loopback, LoopbackError> {
        Loopback::bind(address.parse().unwrap(), token("0123456789abcdef")).await
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
            let told = bind(other).await;
            assert!(matches!(told, Err(LoopbackError::NotLoopback(_))));
        }
        let chosen = bind("127.0.0.1:0").await.unwrap().address();
        assert!(chosen.ip().is_loopback());
        assert_ne!(chosen.port(), 0);
    }

    #[tokio::test]
    async fn port_of_another_server_is_refused() {
        let first = bind("127.0.0.1:0").await.unwrap();
        let told = bind(&first.address().to_string()).await;
        assert!(matches!(told, Err(LoopbackError::Io { .. })));
    }
}
