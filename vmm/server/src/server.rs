//! The gRPC service: `hvprobe.v1` for the machines of this process.
//!
//! Handlers validate, convert and hand over; there is no logic of machines or probes here. What is
//! kept true:
//!
//! - No asynchronous thread waits for a machine: calls into one run on threads that may block, of which
//!   each machine, and each class of calls, has its own ([`threads`](crate::threads)).
//! - What a client asks for is bounded before it is worked on: names, texts, batches, messages.
//! - A panic ends the request or the stream that it came of, which says so.
//! - A client that vanishes takes its streams with it, and its sessions with what they have, and nothing
//!   else. Machines, and what was asked for without a session, belong to the server and stay.
//! - When the server has stopped, so have all its machines, with their guests' text restored.

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
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio_stream::{Stream, StreamExt as _};
use tonic::service::InterceptorLayer;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use crate::allowed::Limits;
use crate::events::broadcast::Broadcast;
use crate::events::published::Published;
use crate::fleet::Fleet;
use crate::indexes::Indexes;
use crate::limits;
use crate::listen::connection::{self, Connection};
use crate::listen::deadline::DeadlineLayer;
use crate::listen::doors::Doors;
use crate::listen::socket::Listener;
use crate::listen::streams::StreamsLayer;
use crate::listen::tcp::Loopback;
use crate::panics;
use crate::services::events::EventsServer;
use crate::services::{
    decisions, events, histograms, host, machines, probes, sessions, sources, symbols,
};
use crate::sessions::keeper::Sessions;

/// How long connections may go on after the machines have ended, so that clients get their last
/// messages. Streams that have nothing to do with machines would never end by themselves.
const FAREWELL: Duration = Duration::from_secs(2);
/// How long a connection may be silent before it is asked whether anybody is there, and how long the
/// answer may take. Of a client that is gone without a word (its host, or a frozen process) the
/// connection ends, and its streams with it.
const SILENCE: Duration = Duration::from_secs(30);
const ANSWER: Duration = Duration::from_secs(30);

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

type Connections = Pin<Box<dyn Stream<Item = Connection> + Send>>;
type Boxed<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Where Linux has debug information.
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
    /// A server that has no machines yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The same server, with no machines yet, which may take so much in all.
    #[must_use]
    pub fn with_limits(mut self, limits: Limits) -> Self {
        self.fleet = Fleet::new(limits);
        self
    }

    /// The same server, which looks for debug information in that folder, by build ids and releases of
    /// kernels, and not in `/usr/lib/debug`.
    #[must_use]
    pub fn with_debug_dir(mut self, folder: PathBuf) -> Self {
        self.debug_dir = Some(folder);
        self
    }

    /// The same server, which keeps the indexes of the debug information that it finds there.
    #[must_use]
    pub fn with_indexes(mut self, indexes: Indexes) -> Self {
        self.indexes = Some(indexes);
        self
    }

    /// Offers what comes into the sink to clients that subscribe to the events of a machine called
    /// `name`, though there is none: to measure or to test the way that events go. The streams end
    /// when the sink goes.
    pub fn publish(&mut self, name: &str) -> Sink {
        let pool = self.fleet.totals().events.clone();
        self.published.add(name, Broadcast::within(pool))
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
        let totals = Arc::clone(self.fleet.totals());
        let doors = Arc::new(Doors::new(socket, self.loopback.take(), totals));
        let connections = tokio_stream::iter(std::iter::repeat(doors))
            .then(|doors| async move { doors.accept().await });
        self.serve_all(Box::pin(connections), Box::pin(stop)).await
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
        self.serve_all(Box::pin(only), Box::pin(stop)).await
    }

    /// Nothing of it is generic and its future is boxed, so that the services are compiled here, once,
    /// and not again in every program that serves.
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
        let debug_dir = self.debug_dir.unwrap_or_else(|| DEBUG_DIR.into());
        let server = tonic::transport::Server::builder()
            .http2_keepalive_interval(Some(SILENCE))
            .http2_keepalive_timeout(Some(ANSWER))
            // A call counts until the last message of its stream has been taken.
            .max_concurrent_streams(calls)
            .concurrency_limit_per_connection(usize::try_from(calls).unwrap_or(usize::MAX))
            .layer(panics::layer())
            .layer(InterceptorLayer::new(connection::admit))
            // Around what counts streams: one that is over has no place any more.
            .layer(DeadlineLayer)
            .layer(StreamsLayer::new(totals))
            .add_service(health_server)
            .add_service(
                reflection()
                    .build_v1()?
                    .max_decoding_message_size(limits::REFLECTED),
            )
            // What Python's library asks for.
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
        // After a failure the machines are still there; after an orderly stop this finds none.
        fleet.close().await;
        Ok(served?)
    }
}

/// The services whose health is told; the empty one is the server as a whole.
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

/// Tells who asks for the health of any service that it is this.
async fn report(health: &HealthReporter, status: ServingStatus) {
    for service in SERVICES {
        health.set_service_status(service, status).await;
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

#[cfg(test)]
mod tests;
