//! The gRPC service: `hvprobe.v1` for the machines of this process.
//!
//! Handlers validate, convert and delegate; they contain no logic of machines or probes. Invariants:
//!
//! - No runtime thread waits for a machine: calls into machines run on blocking threads, and each machine and each
//!   class of calls has its own ([`threads`](crate::bounds::threads)).
//! - Sizes in a request are checked before the request is carried out: names, strings, batches, messages.
//! - A panic ends only the request or the stream that caused it, with an error.
//! - When a client disappears, its streams and its sessions end, with the sessions' probes and pauses. Machines,
//!   and probes without a session, belong to the server and stay.
//! - A server stops after all its machines have ended, and the text of their guests has been restored. It does not
//!   wait for machines that hang in the host.

use std::future::Future;
use std::io;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use hvprobe_hit::event::Sink;
use hvprobe_proto::FILE_DESCRIPTOR_SET;
use hvprobe_proto::v1::{
    decisions_server, events_server, histograms_server, host_server, machines_server,
    probes_server, sessions_server, sources_server, symbols_server,
};
use hvprobe_sources::Indexes;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio_stream::{Stream, StreamExt as _};
use tonic::service::InterceptorLayer;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use crate::bounds::limits;
use crate::bounds::server_limits::Limits;
use crate::calls::deadline::DeadlineLayer;
use crate::calls::interface::Interface;
use crate::calls::large::LargeLayer;
use crate::calls::panics;
use crate::calls::streams::StreamsLayer;
use crate::events::broadcast::Broadcast;
use crate::events::published::Published;
use crate::listen::acceptor::Acceptor;
use crate::listen::connection::{self, Connection};
use crate::listen::socket::Listener;
use crate::listen::tcp::Loopback;
use crate::machines::Fleet;
use crate::services::events::EventsServer;
use crate::services::{
    decisions, events, histograms, host, machines, probes, sessions, sources, symbols,
};
use crate::sessions::keeper::Sessions;

/// How long connections stay open after the machines have ended, so that clients get their last messages. Streams
/// that do not depend on machines would not end by themselves.
const FAREWELL: Duration = Duration::from_secs(2);
/// Interval of HTTP/2 keepalive pings. They end the connections of clients that disappeared without closing them: a
/// lost host, or a frozen process.
const SILENCE: Duration = Duration::from_secs(30);
/// Timeout of the answer to a keepalive ping.
const ANSWER: Duration = Duration::from_secs(30);
/// Flow-control window of one call: maximum number of bytes that a client may send before the server reads them.
const STREAM_WINDOW: u32 = 256 << 10;
/// Flow-control window of all calls of a connection together, in bytes. It is as large as the windows of many
/// calls, so that a few calls that wait for room do not keep the others from being received.
const CONNECTION_WINDOW: u32 = 4 << 20;

/// Why a server stopped without being asked to.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The transport failed.
    #[error("the gRPC server failed")]
    Transport(#[from] tonic::transport::Error),
    /// The descriptors for reflection are invalid.
    #[error("the interface's own description is damaged")]
    Reflection(#[from] tonic_reflection::server::Error),
}

type Connections = Pin<Box<dyn Stream<Item = Connection> + Send>>;
type Boxed<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Debian's folder for debug information.
const DEBUG_DIR: &str = "/usr/lib/debug";

/// A server with its machines.
#[derive(Debug, Default)]
pub struct Server {
    fleet: Fleet,
    published: Published,
    loopback: Option<Loopback>,
    debug_dir: Option<PathBuf>,
    indexes: Option<Indexes>,
}

impl Server {
    /// Creates a server that has no machines yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the limits. The server must have no machines yet.
    #[must_use]
    pub fn with_limits(mut self, limits: Limits) -> Self {
        self.fleet = Fleet::new(limits);
        self
    }

    /// Sets the folder in which the server looks for debug information, by build id and by kernel release, instead
    /// of `/usr/lib/debug`.
    #[must_use]
    pub fn with_debug_dir(mut self, folder: PathBuf) -> Self {
        self.debug_dir = Some(folder);
        self
    }

    /// Sets the cache for indexes of debug information.
    #[must_use]
    pub fn with_indexes(mut self, indexes: Indexes) -> Self {
        self.indexes = Some(indexes);
        self
    }

    /// Returns a sink whose events go to the subscribers of a machine called `name`, which need not exist. For
    /// tests and benchmarks of event streams. Dropping the sink ends the streams.
    pub fn publish(&mut self, name: &str) -> Sink {
        let pool = self.fleet.totals().events.clone();
        self.published.add(name, Broadcast::within(pool))
    }

    /// Makes the server listen on a TCP port, besides the socket that it [serves](Server::serve). The port's
    /// clients must send its token.
    pub fn listen_too(&mut self, loopback: Loopback) {
        self.loopback = Some(loopback);
    }

    /// Serves the clients of `socket` until `stop` completes; then ends all machines, closes the connections and
    /// removes the socket.
    ///
    /// # Errors
    /// When the transport fails. Even then, all machines are ended first.
    pub async fn serve(
        mut self,
        socket: Listener,
        stop: impl Future<Output = ()> + Send + 'static,
    ) -> Result<(), ServeError> {
        let totals = Arc::clone(self.fleet.totals());
        let acceptor = Arc::new(Acceptor::new(socket, self.loopback.take(), totals));
        let connections = tokio_stream::iter(std::iter::repeat(acceptor))
            .then(|acceptor| async move { acceptor.accept().await });
        self.serve_all(Box::pin(connections), Box::pin(stop)).await
    }

    /// Serves one client over `stream`, which need not be a socket, until `stop` completes; then ends all machines.
    ///
    /// # Errors
    /// As [`Server::serve`].
    pub async fn serve_connection(
        self,
        stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
        stop: impl Future<Output = ()> + Send + 'static,
    ) -> Result<(), ServeError> {
        let only = tokio_stream::once(Connection::known(stream)).chain(tokio_stream::pending());
        self.serve_all(Box::pin(only), Box::pin(stop)).await
    }

    /// Serves `connections` until `stop` completes; then ends all machines. Boxes instead of generics make sure
    /// that the services are compiled once, in this crate, and not in every program that serves.
    fn serve_all(self, connections: Connections, stop: Boxed<()>) -> Boxed<Result<(), ServeError>> {
        Box::pin(self.serve_each(connections, stop))
    }

    async fn serve_each(self, connections: Connections, stop: Boxed<()>) -> Result<(), ServeError> {
        let fleet = self.fleet;
        let totals = Arc::clone(fleet.totals());
        let held = Sessions::new(
            totals.limits().sessions,
            fleet.owners().clone(),
            Handle::current(),
        );
        let (health, health_server) = tonic_health::server::health_reporter();
        report(&health, ServingStatus::Serving).await;
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
                report(&health, ServingStatus::NotServing).await;
                fleet.close().await;
                held.close();
                // The receiver lives until the server has returned.
                let _listening = ended.send(());
            }
        };
        let calls = totals.limits().calls_per_connection;
        let interface = Arc::new(Interface::new());
        let debug_dir = self.debug_dir.unwrap_or_else(|| DEBUG_DIR.into());
        let server = tonic::transport::Server::builder()
            .http2_keepalive_interval(Some(SILENCE))
            .http2_keepalive_timeout(Some(ANSWER))
            // A call counts until the client has received its last message.
            .max_concurrent_streams(calls)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .concurrency_limit_per_connection(usize::try_from(calls).unwrap_or(usize::MAX))
            .layer(panics::layer())
            .layer(InterceptorLayer::new(connection::admit))
            // Outside of `StreamsLayer`, so that a stream releases its permit at its deadline.
            .layer(DeadlineLayer)
            .layer(StreamsLayer::new(
                Arc::clone(&totals),
                Arc::clone(&interface),
            ))
            .layer(LargeLayer::new(totals, interface))
            .add_service(health_server)
            .add_service(
                reflection()
                    .build_v1()?
                    .max_decoding_message_size(limits::REFLECTED),
            )
            // For Python's gRPC, which asks for this version.
            .add_service(
                reflection()
                    .build_v1alpha()?
                    .max_decoding_message_size(limits::REFLECTED),
            )
            .add_service(machines::Service::server(fleet.clone(), held.clone()))
            .add_service(probes::Service::server(fleet.clone(), held.clone()))
            .add_service(EventsServer::new(events::Service::new(
                fleet.clone(),
                self.published,
            )))
            .add_service(decisions::Service::server(fleet.clone(), held.clone()))
            .add_service(histograms::Service::server(fleet.clone()))
            .add_service(sessions::Service::server(held.clone()))
            .add_service(symbols::Service::server(fleet.clone()))
            .add_service(sources::Service::server(
                fleet.clone(),
                debug_dir,
                self.indexes,
            ))
            .add_service(host::Service::server())
            .serve_with_incoming_shutdown(connections.map(Ok::<_, io::Error>), closing);
        let served = tokio::select! {
            served = server => served,
            () = farewell(has_ended) => Ok(()),
        };
        // After a failure there may still be machines; after an orderly stop there are none.
        fleet.close().await;
        Ok(served?)
    }
}

/// Services with a health status; the empty name stands for the whole server.
const SERVICES: [&str; 10] = [
    "",
    machines_server::SERVICE_NAME,
    probes_server::SERVICE_NAME,
    events_server::SERVICE_NAME,
    decisions_server::SERVICE_NAME,
    histograms_server::SERVICE_NAME,
    sources_server::SERVICE_NAME,
    symbols_server::SERVICE_NAME,
    host_server::SERVICE_NAME,
    sessions_server::SERVICE_NAME,
];

/// Sets the health status of all services.
async fn report(health: &HealthReporter, status: ServingStatus) {
    for service in SERVICES {
        health.set_service_status(service, status).await;
    }
}

/// Waits until the machines have ended, and then for [`FAREWELL`].
async fn farewell(has_ended: oneshot::Receiver<()>) {
    match has_ended.await {
        Ok(()) => tokio::time::sleep(FAREWELL).await,
        // The server has failed; its own future returns the error.
        Err(_) => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests;
