//! `hvprobe.v1.Symbols`: symbols and types.

use std::collections::BTreeMap;
use std::sync::Arc;

use hvprobe_arch::Gva;
use hvprobe_linux::image::KernelImage;
use hvprobe_linux::symbols::{PatternError, Symbol, SymbolKind, Symbols};
use hvprobe_proto::Failure;
use hvprobe_proto::v1::{
    self, DescribeTypesRequest, DescribeTypesResponse, ErrorKind, ListSymbolsRequest,
    ListSymbolsResponse,
    symbols_server::{self, SymbolsServer},
};
use hvprobe_sources::refused;
use hvprobe_spec::chain;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Response, Status};

use crate::bounds::limits;
use crate::bounds::threads::Lane;
use crate::calls::panics;
use crate::machines::Fleet;
use crate::wire::{convert, types};

/// Maximum number of symbols in one message.
const SYMBOLS_PER_MESSAGE: usize = 1024;
/// Capacity of the queue of messages between the look-up and the client's connection.
const MESSAGES: usize = 1;

/// Maximum number of look-ups that run at a time, for all clients together; further ones wait.
const LOOKUPS: usize = 8;

#[derive(Debug)]
pub(crate) struct Service {
    fleet: Fleet,
    lookups: Arc<Lane>,
}

impl Service {
    /// Returns the service for the gRPC server.
    pub(crate) fn server(fleet: Fleet) -> SymbolsServer<Self> {
        let lookups = Arc::new(Lane::new("a look-up", LOOKUPS));
        SymbolsServer::new(Self { fleet, lookups }).max_decoding_message_size(limits::MESSAGE)
    }
}

type Responses = ReceiverStream<Result<ListSymbolsResponse, Status>>;

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
            address,
        } = request.into_inner();
        limits::at_most("the pattern", pattern.len(), limits::DEFINITION)?;
        // The stream holds only the image: a stream that nobody reads does not keep the memory of its machine.
        let handle = self.fleet.get(&machine)?;
        let image = handle.port()?.image();
        if let Some(address) = address.map(Gva) {
            let found = containing(image.symbols(), address, &pattern)?;
            let found = match found.map(|found| symbol(&image, &found)) {
                Some(found) => Some(found),
                None => handle.port()?.module_symbol(address).await?,
            };
            return Ok(Response::new(one(found)));
        }
        let limit = match limit {
            0 => usize::MAX,
            limit => usize::try_from(limit).unwrap_or(usize::MAX),
        };
        let find = move |first, most| {
            let matching = image.symbols().glob_from(&pattern, first)?;
            let symbols = matching.take(most);
            let symbols = symbols.map(|(position, found)| (position, symbol(&image, &found)));
            Ok(symbols.collect())
        };
        Ok(Response::new(stream(&self.lookups, limit, find)))
    }

    async fn describe_types(
        &self,
        request: Request<DescribeTypesRequest>,
    ) -> Result<Response<DescribeTypesResponse>, Status> {
        let DescribeTypesRequest { machine, names } = request.into_inner();
        limits::at_most("the list of names", names.len(), limits::TYPES)?;
        for name in &names {
            limits::at_most("a name", name.len(), limits::DEFINITION)?;
        }
        let handle = self.fleet.get(&machine)?;
        let image = handle.port()?.image();
        let of = |(index, name): (usize, &String)| Some((index, types::split(name).0?.to_owned()));
        let wanted: Vec<_> = names.iter().enumerate().filter_map(of).collect();
        let mut modules = BTreeMap::new();
        if !wanted.is_empty() {
            let found = handle.port()?.module_types(wanted).await?;
            modules = found.map_err(|(index, why)| refused(chain(&why), &why).at_index(index))?;
        }
        let describe = move || {
            let kernel = image.types().map_err(|error| {
                let (code, kind) = (Code::FailedPrecondition, ErrorKind::NoTypes);
                Failure::new(code, kind, chain(&error))
            })?;
            let modules = &modules;
            let known = types::Known { kernel, modules };
            types::describe(known, |name| image.symbols().near(name), &names)
        };
        let types = self.lookups.run(describe).await??;
        Ok(Response::new(DescribeTypesResponse { types }))
    }
}

/// Converts `found`, with the reason if no probe can be planted there.
fn symbol(image: &KernelImage, found: &Symbol<'_>) -> v1::Symbol {
    convert::symbol(found, |at| image.forbidden(at))
}

/// Returns the symbol that contains `address`. `pattern` has to be empty, because it would contradict the
/// address.
fn containing<'a>(
    symbols: &'a Symbols,
    address: Gva,
    pattern: &str,
) -> Result<Option<Symbol<'a>>, Failure> {
    if !pattern.is_empty() {
        let why = "both a pattern and an address: give one of them";
        return Err(Failure::invalid(ErrorKind::BadPattern, why));
    }
    let found = symbols.containing(address).map(|(symbol, _)| symbol);
    // An absolute symbol is a number and no address, so it contains nothing.
    Ok(found.filter(|symbol| symbol.kind != SymbolKind::Absolute))
}

/// Returns a stream of at most one symbol.
fn one(symbol: Option<v1::Symbol>) -> Responses {
    let (to_client, messages) = mpsc::channel(MESSAGES);
    if let Some(symbol) = symbol {
        let symbols = vec![symbol];
        // There is room for one message.
        let _room = to_client.try_send(Ok(ListSymbolsResponse { symbols }));
    }
    ReceiverStream::new(messages)
}

/// Streams at most `limit` symbols. `find` takes a position and a number, at most [`SYMBOLS_PER_MESSAGE`], and
/// returns at most that many symbols from the position on. A client that does not read takes no thread: further
/// symbols are looked up when the stream has room for them.
fn stream<F>(lookups: &Arc<Lane>, limit: usize, find: F) -> Responses
where
    F: Fn(usize, usize) -> Result<Vec<(usize, v1::Symbol)>, PatternError> + Send + Sync + 'static,
{
    let (find, lookups) = (Arc::new(find), Arc::clone(lookups));
    panics::stream(MESSAGES, |to_client| async move {
        let (mut first, mut left) = (0, limit);
        while left > 0
            // A client that is gone needs no more symbols.
            && let Ok(room) = to_client.reserve().await
        {
            let most = left.min(SYMBOLS_PER_MESSAGE);
            let find = Arc::clone(&find);
            let found = match lookups.run(move || find(first, most)).await {
                Ok(Ok(found)) => found,
                Ok(Err(error)) => {
                    let bad = Failure::invalid(ErrorKind::BadPattern, chain(&error));
                    return room.send(Err(bad.into()));
                }
                Err(error) => return room.send(Err(error)),
            };
            let Some((last, _)) = found.last() else {
                return;
            };
            first = last.saturating_add(1);
            left = match found.len() {
                whole if whole == most => left - most,
                _ => 0,
            };
            let symbols = found.into_iter().map(|(_, symbol)| symbol).collect();
            room.send(Ok(ListSymbolsResponse { symbols }));
        }
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use hvprobe_linux::symbols::RawSymbol;
    use tokio_stream::StreamExt as _;

    use super::*;

    #[test]
    fn symbols_are_found_by_the_addresses_in_them() {
        let raw = |name, at, kind| RawSymbol {
            name,
            addr: Gva(at),
            size: Some(0x10),
            kind,
        };
        let symbols = Symbols::new(
            [
                raw("current_task", 0x100, SymbolKind::Absolute),
                raw("vfs_read", 0x1000, SymbolKind::Text),
                raw("state", 0x2000, SymbolKind::Data),
            ],
            &[],
        );
        let at = |address| containing(&symbols, Gva(address), "").unwrap();
        let name = |address| at(address).map(|symbol| symbol.name);
        assert_eq!(name(0x1000), Some("vfs_read"));
        assert_eq!(name(0x100f), Some("vfs_read"));
        assert_eq!(name(0x2008), Some("state"));
        for none in [0, 0xfff, 0x1010, 0x108, u64::MAX] {
            assert_eq!(name(none), None, "{none:#x}");
        }
        let both = containing(&symbols, Gva(0x1000), "vfs_*").unwrap_err();
        assert_eq!(Status::from(both).code(), Code::InvalidArgument);
    }

    #[tokio::test]
    async fn one_symbol_is_one_message_and_none_is_none() {
        for symbol in [None, Some(v1::Symbol::default())] {
            let count = usize::from(symbol.is_some());
            let messages: Vec<_> = one(symbol).collect().await;
            assert_eq!(messages.len(), count);
        }
    }

    /// Returns a function that finds every third of `all` numbers, with the numbers as names.
    fn thirds(
        all: usize,
    ) -> impl Fn(usize, usize) -> Result<Vec<(usize, v1::Symbol)>, PatternError> + Send + Sync {
        move |first, most| {
            let matching = (first..all).filter(|number| number % 3 == 0).take(most);
            let symbol = |number: usize| v1::Symbol {
                name: number.to_string(),
                ..Default::default()
            };
            Ok(matching.map(|number| (number, symbol(number))).collect())
        }
    }

    #[tokio::test]
    async fn all_are_sent_up_to_the_limit() {
        for (all, limit) in [
            (0, 5),
            (10_000, usize::MAX),
            (3 * SYMBOLS_PER_MESSAGE, usize::MAX),
            (10_000, 1),
            (10_000, SYMBOLS_PER_MESSAGE + 1),
            (10_000, 0),
        ] {
            let lookups = Arc::new(Lane::new("a look-up", 1));
            let messages: Vec<_> = stream(&lookups, limit, thirds(all)).collect().await;
            let names: Vec<_> = messages
                .into_iter()
                .flat_map(|message| message.unwrap().symbols)
                .map(|symbol| symbol.name)
                .collect();
            let expected = (0..all).step_by(3).take(limit);
            let expected: Vec<_> = expected.map(|number| number.to_string()).collect();
            assert_eq!(names, expected, "{limit} of {all}");
        }
    }

    #[tokio::test]
    async fn streams_that_nobody_reads_hold_no_place() {
        let lookups = Arc::new(Lane::new("a look-up", 2));
        let _unread: Vec<_> = (0..50)
            .map(|_| stream(&lookups, usize::MAX, thirds(1_000_000)))
            .collect();
        let others = async {
            for number in 0..10 {
                assert_eq!(lookups.run(move || number).await.unwrap(), number);
            }
        };
        let others = tokio::time::timeout(Duration::from_mins(1), others);
        others.await.expect("all places are taken");
    }
}
