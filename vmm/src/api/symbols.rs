//! `hvprobe.v1.Symbols`.

use std::pin::Pin;

use hvprobe_introspect::symbols::SymbolKind;
use hvprobe_proto::v1::{ErrorKind, ListSymbolsRequest, ListSymbolsResponse, symbols_server};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Response, Status};

use super::error::{Failure, chain};
use super::fleet::Fleet;
use super::{convert, limits};
use crate::machine::Machine;

/// Symbols in one message.
const SYMBOLS_PER_MESSAGE: usize = 1024;
/// Messages between the look-up and the client's connection.
const MESSAGES: usize = 4;

/// The service.
#[derive(Debug)]
pub(super) struct Service {
    fleet: Fleet,
}

impl Service {
    pub(super) fn new(fleet: Fleet) -> Self {
        Self { fleet }
    }
}

type Responses = Pin<Box<ReceiverStream<Result<ListSymbolsResponse, Status>>>>;

#[tonic::async_trait]
impl symbols_server::Symbols for Service {
    type ListSymbolsStream = Responses;

    async fn list_symbols(
        &self,
        request: Request<ListSymbolsRequest>,
    ) -> Result<Response<Responses>, Status> {
        let ListSymbolsRequest {
            machine,
            pattern,
            limit,
        } = request.into_inner();
        limits::at_most("the pattern", pattern.len(), limits::DEFINITION)?;
        let machine = self.fleet.get(&machine)?.machine()?;
        let limit = match limit {
            0 => usize::MAX,
            limit => usize::try_from(limit).unwrap_or(usize::MAX),
        };
        let (to_client, messages) = mpsc::channel(MESSAGES);
        tokio::task::spawn_blocking(move || {
            if let Err(refusal) = look_up(&machine, &pattern, limit, &to_client) {
                // A client that is gone needs no answer.
                let _gone = to_client.blocking_send(Err(refusal));
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(messages))))
    }
}

/// Sends the symbols that match until all are sent or the client is gone.
fn look_up(
    machine: &Machine,
    pattern: &str,
    limit: usize,
    to_client: &mpsc::Sender<Result<ListSymbolsResponse, Status>>,
) -> Result<(), Status> {
    let image = machine.image();
    let matching = image.symbols().glob(pattern).map_err(|error| {
        Failure::new(Code::InvalidArgument, ErrorKind::BadPattern, chain(&error))
    })?;
    let mut matching = matching
        .take(limit)
        .map(|symbol| {
            let forbidden = (symbol.kind == SymbolKind::Text)
                .then(|| image.forbidden(symbol.addr))
                .flatten();
            convert::symbol(&symbol, forbidden.map(|why| why.to_string()))
        })
        .peekable();
    while matching.peek().is_some() {
        let symbols = matching.by_ref().take(SYMBOLS_PER_MESSAGE).collect();
        if to_client
            .blocking_send(Ok(ListSymbolsResponse { symbols }))
            .is_err()
        {
            break;
        }
    }
    Ok(())
}
