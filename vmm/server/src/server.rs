//! The gRPC service: `hvprobe.v1` for the machines of this process.
//!
//! Handlers validate, convert and hand over; there is no logic of machines or probes here. What is
//! kept true:
//!
//! - No asynchronous thread waits for a machine: calls into one run on threads that may block.
//! - What a client asks for is bounded before it is worked on: names, texts, batches, messages.
//! - A panic ends the request or the stream that it came of, which says so.
//! - A client that vanishes takes its streams with it, and its sessions with what they have, and nothing
//!   else. Machines, and what was asked for without a session, belong to the server and stay.
//! - When the server has stopped, so have all its machines, with their guests' text restored.

use std::future::Future;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use hvprobe_hit::event::Sink;
use hvprobe_proto::FILE_DESCRIPTOR_SET;
use hvprobe_proto::v1::decisions_server::DecisionsServer;
use hvprobe_proto::v1::histograms_server::HistogramsServer;
use hvprobe_proto::v1::host_server::HostServer;
use hvprobe_proto::v1::machines_server::MachinesServer;
use hvprobe_proto::v1::probes_server::ProbesServer;
use hvprobe_proto::v1::sessions_server::SessionsServer;
use hvprobe_proto::v1::symbols_server::SymbolsServer;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::oneshot;
use tokio_stream::{Stream, StreamExt as _};
use tonic::service::InterceptorLayer;

use crate::events::published::Published;
use crate::fleet::Fleet;
use crate::limits;
use crate::listen::connection::{self, Connection};
use crate::listen::doors::Doors;
use crate::listen::socket::Listener;
use crate::listen::tcp::Loopback;
use crate::panics;
use crate::services::events::EventsServer;
use crate::services::{decisions, events, histograms, host, machines, probes, sessions, symbols};
use crate::sessions::keeper::Sessions;

/// How long connections may go on after the machines have ended, so that clients get their last
/// messages. Streams that have nothing to do with machines would never end by themselves.
const FAREWELL: Duration = Duration::from_secs(2);
/// How long a connection may be silent before it is asked whether anybody is there, and how long the
/// answer may take. Of a client that is gone without a word (its host, or a frozen process) the
/// connection ends, and its streams with it.
const SILENCE: Duration = Duration::from_secs(30);
const ANSWER: Duration = Duration::from_secs(30);
/// Calls that one connection may have under way.
const CALLS_PER_CONNECTION: u32 = 256;

/// Why a server stopped when it was not asked to.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The transport failed.
    #[error("the gRPC server failed")]
    Transport(#[from] tonic::transport::Error),
    /// Reflection cannot be offered.
    #[error("the interface's own description is damaged")]
    Reflection(#[from] tonic_reflection::server::Error),
}

/// A server with its machines.
#[derive(Debug, Default)]
pub struct Server {
    fleet: Fleet,
    published: Published,
    loopback: Option<Loopback>,
}

impl Server {
    /// A server that has no machines yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Offers what comes into the sink to clients that subscribe to the events of a machine called
    /// `name`, though there is none: to measure or to test the way that events go. The streams end
    /// when the sink goes.
    pub fn publish(&mut self, name: &str) -> Sink {
        self.published.add(name)
    }

    /// Serves whoever connects to `loopback` and shows its token, too, when the server
    /// [serves](Server::serve).
    pub fn listen_too(&mut self, loopback: Loopback) {
        self.loopback = Some(loopback);
    }

    /// Serves whoever connects to `socket` until `stop` completes; then ends all machines, closes
    /// the connections and removes the socket.
    ///
    /// # Errors
    /// When the server cannot go on. The machines are ended then, too.
    pub async fn serve(
        mut self,
        socket: Listener,
        stop: impl Future<Output = ()> + Send + 'static,
    ) -> Result<(), ServeError> {
        let loopback = self.loopback.take();
        let doors = Arc::new(Doors { socket, loopback });
        let connections = tokio_stream::iter(std::iter::repeat(doors))
            .then(|doors| async move { doors.accept().await });
        self.serve_all(connections, stop).await
    }

    /// Serves one client over `stream`, which need not be a socket, until `stop` completes; then
    /// ends all machines.
    ///
    /// # Errors
    /// As [`Server::serve`].
    pub async fn serve_connection(
        self,
        stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
        stop: impl Future<Output = ()> + Send + 'static,
    ) -> Result<(), ServeError> {
        let only = tokio_stream::once(Connection::known(stream)).chain(tokio_stream::pending());
        self.serve_all(only, stop).await
    }

    async fn serve_all(
        self,
        connections: impl Stream<Item = Connection>,
        stop: impl Future<Output = ()> + Send + 'static,
    ) -> Result<(), ServeError> {
        let fleet = self.fleet;
        let held = Sessions::new(fleet.owners().clone());
        let (health_reporter, health) = tonic_health::server::health_reporter();
        health_reporter
            .set_serving::<MachinesServer<machines::Service>>()
            .await;
        health_reporter
            .set_serving::<ProbesServer<probes::Service>>()
            .await;
        health_reporter.set_serving::<EventsServer>().await;
        health_reporter
            .set_serving::<DecisionsServer<decisions::Service>>()
            .await;
        health_reporter
            .set_serving::<HistogramsServer<histograms::Service>>()
            .await;
        health_reporter
            .set_serving::<SessionsServer<sessions::Service>>()
            .await;
        health_reporter
            .set_serving::<SymbolsServer<symbols::Service>>()
            .await;
        health_reporter
            .set_serving::<HostServer<host::Service>>()
            .await;
        let reflection = || {
            tonic_reflection::server::Builder::configure()
                .register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET)
                .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        };

        let (ended, has_ended) = oneshot::channel();
        let closing = {
            let (fleet, held) = (fleet.clone(), held.clone());
            async move {
                stop.await;
                fleet.close().await;
                held.close();
                // The receiver lives until the server has returned.
                let _listening = ended.send(());
            }
        };
        let server = tonic::transport::Server::builder()
            .http2_keepalive_interval(Some(SILENCE))
            .http2_keepalive_timeout(Some(ANSWER))
            // A call counts until the last message of its stream has been taken.
            .max_concurrent_streams(CALLS_PER_CONNECTION)
            .concurrency_limit_per_connection(CALLS_PER_CONNECTION as usize)
            .layer(panics::layer())
            .layer(InterceptorLayer::new(connection::admit))
            .add_service(health)
            .add_service(reflection().build_v1()?)
            // What Python's library asks for.
            .add_service(reflection().build_v1alpha()?)
            .add_service(
                MachinesServer::new(machines::Service::new(fleet.clone(), held.clone()))
                    .max_decoding_message_size(limits::MESSAGE),
            )
            .add_service(
                ProbesServer::new(probes::Service::new(fleet.clone(), held.clone()))
                    .max_decoding_message_size(limits::MESSAGE),
            )
            .add_service(EventsServer::new(events::Service::new(
                fleet.clone(),
                self.published,
            )))
            .add_service(
                DecisionsServer::new(decisions::Service::new(fleet.clone(), held.clone()))
                    .max_decoding_message_size(limits::MESSAGE),
            )
            .add_service(
                HistogramsServer::new(histograms::Service::new(fleet.clone()))
                    .max_decoding_message_size(limits::MESSAGE),
            )
            .add_service(
                SessionsServer::new(sessions::Service::new(held.clone()))
                    .max_decoding_message_size(limits::MESSAGE),
            )
            .add_service(
                SymbolsServer::new(symbols::Service::new(fleet.clone()))
                    .max_decoding_message_size(limits::MESSAGE),
            )
            .add_service(HostServer::new(host::Service).max_decoding_message_size(limits::MESSAGE))
            .serve_with_incoming_shutdown(connections.map(Ok::<_, io::Error>), closing);
        let served = tokio::select! {
            served = server => served,
            () = farewell(has_ended) => Ok(()),
        };
        // After a failure the machines are still there; after an orderly stop this finds none.
        fleet.close().await;
        Ok(served?)
    }
}

/// Returns some time after the machines have ended.
async fn farewell(has_ended: oneshot::Receiver<()>) {
    match has_ended.await {
        Ok(()) => tokio::time::sleep(FAREWELL).await,
        // The server has failed and will say so itself.
        Err(_) => std::future::pending().await,
    }
}
