//! `hvprobe.v1.Histograms`.
//!
//! ```text
//!   opened ──(AggregateFor)──► counting ──(the client ends the stream, or sends what is no command)──► over
//! ```
//! Invariants: a histogram counts as long as its stream exists, and is dropped with it; counts are sent after the
//! schema that describes them.

use hvprobe_machine::Aggregation;
use hvprobe_proto::Failure;
use hvprobe_proto::v1::{
    AggregateFor, AggregateRequest, AggregateResponse, ErrorKind, HistogramChanged,
    HistogramCommand, HistogramSchema, aggregate_request, aggregate_response,
    histograms_server::{self, HistogramsServer},
};
use hvprobe_spec::ProbeId;
use hvprobe_spec::histogram::read_histogram;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use crate::bounds::limits;
use crate::calls::panics;
use crate::machines::{Fleet, Handle};
use crate::status::{aggregate_error, out_of_order};
use crate::wire::histogram;

/// Capacity of the queue of messages to one client.
const MESSAGES: usize = 4;

#[derive(Debug)]
pub(crate) struct Service {
    fleet: Fleet,
}

impl Service {
    /// Returns the service for the gRPC server.
    pub(crate) fn server(fleet: Fleet) -> HistogramsServer<Self> {
        HistogramsServer::new(Self { fleet }).max_decoding_message_size(limits::MESSAGE)
    }
}

type Responses = ReceiverStream<Result<AggregateResponse, Status>>;

#[tonic::async_trait]
impl histograms_server::Histograms for Service {
    type AggregateStream = Responses;

    async fn aggregate(
        &self,
        request: Request<Streaming<AggregateRequest>>,
    ) -> Result<Response<Responses>, Status> {
        let mut commands = request.into_inner();
        let first = commands.message().await?.and_then(|first| first.what);
        let Some(aggregate_request::What::AggregateFor(wanted)) = first else {
            return Err(out_of_order("the first message has to say what to count"));
        };
        let handle = self.fleet.get(&wanted.machine)?;
        let aggregation = begin(&handle, wanted).await?;
        let count = |to_client| {
            let counting = Counting {
                handle,
                aggregation,
                commands,
                to_client,
                schema: HistogramSchema::default(),
            };
            counting.run()
        };
        Ok(Response::new(panics::stream(MESSAGES, count)))
    }
}

/// Creates the histogram that is `wanted`.
async fn begin(handle: &Handle, wanted: AggregateFor) -> Result<Aggregation, Status> {
    let AggregateFor {
        probes, histogram, ..
    } = wanted;
    limits::at_most("the number of probes", probes.len(), limits::BATCH)?;
    limits::at_most("the histogram", histogram.len(), limits::DEFINITION)?;
    if probes.is_empty() {
        let message = "name the probes to count";
        return Err(Failure::invalid(ErrorKind::NoSuchProbe, message).into());
    }
    let histogram = read_histogram(&histogram).map_err(|error| {
        let message = format!("bad histogram: {error}");
        Failure::invalid(ErrorKind::Definition, message).at_column(error.column)
    })?;
    let ids: Vec<_> = probes.into_iter().map(ProbeId).collect();
    handle.port()?.aggregate(ids, histogram).await
}

/// A client's histogram.
struct Counting {
    handle: Handle,
    aggregation: Aggregation,
    commands: Streaming<AggregateRequest>,
    to_client: mpsc::Sender<Result<AggregateResponse, Status>>,
    /// Schema that was sent last.
    schema: HistogramSchema,
}

/// Why the stream ends.
enum Over {
    /// The client is gone, or done.
    Gone,
    /// The client is sent this error.
    Because(Status),
}

impl Counting {
    async fn run(mut self) {
        if let Err(Over::Because(status)) = self.serve().await {
            // A client that is gone needs no reason.
            let _gone = self.to_client.send(Err(status)).await;
        }
    }

    async fn serve(&mut self) -> Result<(), Over> {
        self.send_schema().await?;
        loop {
            let request = tokio::select! {
                request = self.commands.message() => request,
                () = self.to_client.closed() => return Err(Over::Gone),
            };
            match request {
                Ok(Some(request)) => self.obey(request).await?,
                Ok(None) | Err(_) => return Err(Over::Gone),
            }
        }
    }

    /// Sends the schema, unless the client has it already.
    async fn send_schema(&mut self) -> Result<(), Over> {
        let what = self.aggregation.what();
        let what = what.map_err(|error| Over::Because(aggregate_error(&error)))?;
        let schema = histogram::schema(&self.aggregation.histogram(), what.as_ref());
        if schema == self.schema {
            return Ok(());
        }
        self.schema.clone_from(&schema);
        self.send(aggregate_response::What::Schema(schema)).await
    }

    async fn obey(&mut self, request: AggregateRequest) -> Result<(), Over> {
        let Some(aggregate_request::What::Command(command)) = request.what else {
            let message = "only commands can follow the first message";
            return Err(Over::Because(out_of_order(message)));
        };
        match HistogramCommand::try_from(command) {
            Ok(HistogramCommand::Read) => return self.read().await,
            Ok(HistogramCommand::Clear) => self.aggregation.clear(),
            Ok(HistogramCommand::Pause) => self.aggregation.pause(true),
            Ok(HistogramCommand::Resume) => self.aggregation.pause(false),
            Ok(HistogramCommand::Unspecified) | Err(_) => {
                let message = format!("there is no command {command}");
                return Err(Over::Because(out_of_order(&message)));
            }
        }
        let changed = aggregate_response::What::Changed(HistogramChanged {});
        self.send(changed).await
    }

    async fn read(&mut self) -> Result<(), Over> {
        let flushed = match self.handle.port() {
            Ok(port) => port.flush_events().await,
            Err(ended) => Err(ended),
        };
        // A machine that has ended has passed on all its events.
        let is_whole = flushed.unwrap_or_else(|_| self.handle.remains().is_some());
        let aggregation = self.aggregation.clone();
        let read = self.handle.aside(move || {
            aggregation
                .read()
                .map(|read| histogram::parts(read, is_whole))
        });
        let parts = read.await.map_err(Over::Because)?;
        let parts = parts.map_err(|error| Over::Because(aggregate_error(&error)))?;
        // The schema of everything that was counted is known by now.
        self.send_schema().await?;
        for part in parts {
            self.send(aggregate_response::What::Part(part)).await?;
        }
        Ok(())
    }

    async fn send(&self, what: aggregate_response::What) -> Result<(), Over> {
        let message = AggregateResponse { what: Some(what) };
        let sent = self.to_client.send(Ok(message)).await;
        sent.map_err(|_| Over::Gone)
    }
}
