//! Lookup of names for addresses before they are printed.

use std::time::Duration;

use hvprobe_proto::v1::{ListSymbolsRequest, Symbol, SymbolKind};

use tokio::time::timeout;

use crate::client::Client;
use crate::output;
use crate::output::values::names::Names;

/// Maximum time that the output waits for names of addresses. Addresses whose names have not arrived by then are
/// printed as numbers.
const PATIENCE: Duration = Duration::from_secs(1);
/// Time after which a message says that the program waits for the names of all functions.
const SOON: Duration = Duration::from_secs(2);
/// Maximum time that the program waits after that message. If the guest keeps all processors of a host busy, the
/// names may take minutes, and no hit would be printed meanwhile.
const LATE: Duration = Duration::from_secs(20);

/// Looks up the names of `addresses` and adds them to `names`.
pub(crate) async fn look_up(
    names: &mut Names,
    client: &mut Client,
    machine: &str,
    addresses: Vec<u64>,
) {
    let missing = names.missing(addresses);
    let asked = async {
        for address in missing {
            // An address whose lookup fails is not looked up again.
            let symbol = symbol_at(client, machine, address).await.unwrap_or(None);
            let build_id = symbol.as_ref().and_then(|it| it.module_build_id.clone());
            let symbol = symbol.as_ref().map(|it| (it.name.as_str(), it.address));
            names.insert_of_build(address, symbol, build_id);
        }
    };
    // After a timeout the remaining addresses stay numbers.
    let _in_time = timeout(PATIENCE, asked).await;
}

/// Adds the source lines, if the client has any, and all functions of the kernel to `names`. Skips the functions if
/// `names` has them already, or if they take too long.
pub(crate) async fn know_functions(names: &mut Names, client: &mut Client, machine: &str) {
    names.set_lines(client.lines.clone());
    if names.has_functions() {
        return;
    }
    // Without the functions, addresses are looked up one by one.
    if let Some(functions) = in_time(functions(client, machine), SOON, LATE).await {
        names.know(functions);
    }
}

/// Returns the output of `names`, or `None` if that is an error. Prints a message if the output takes longer than
/// `soon`. After a further wait of `late`, prints another message and returns `None`.
async fn in_time<T>(
    names: impl Future<Output = Result<T, tonic::Status>>,
    soon: Duration,
    late: Duration,
) -> Option<T> {
    tokio::pin!(names);
    if let Ok(names) = timeout(soon, &mut names).await {
        return names.ok();
    }
    output::notice(format_args!(
        "waiting for the names of the kernel's functions, by which stacks are printed"
    ));
    match timeout(late, names).await {
        Ok(names) => names.ok(),
        Err(_) => {
            output::notice(format_args!(
                "the names of the kernel's functions take too long: what has no name in time is printed as a number"
            ));
            None
        }
    }
}

/// Returns the address, the size and the name of each function.
async fn functions(
    client: &mut Client,
    machine: &str,
) -> Result<Vec<(u64, u64, String)>, tonic::Status> {
    let request = ListSymbolsRequest {
        machine: machine.to_owned(),
        pattern: "*".to_owned(),
        ..Default::default()
    };
    let mut pieces = client.symbols.list_symbols(request).await?.into_inner();
    let mut functions = Vec::new();
    while let Some(piece) = pieces.message().await? {
        let text = |symbol: &Symbol| symbol.kind() == SymbolKind::Text;
        let found = piece.symbols.into_iter().filter(text);
        functions.extend(found.map(|it| (it.address, it.size, it.name)));
    }
    Ok(functions)
}

/// Returns the symbol that contains `address`.
async fn symbol_at(
    client: &mut Client,
    machine: &str,
    address: u64,
) -> Result<Option<Symbol>, tonic::Status> {
    let request = ListSymbolsRequest {
        machine: machine.to_owned(),
        address: Some(address),
        ..Default::default()
    };
    let mut pieces = client.symbols.list_symbols(request).await?.into_inner();
    let piece = pieces.message().await?;
    Ok(piece.and_then(|piece| piece.symbols.into_iter().next()))
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use hvprobe_proto::v1::symbols_server::{Symbols, SymbolsServer};
    use hvprobe_proto::v1::{DescribeTypesRequest, DescribeTypesResponse, ListSymbolsResponse};
    use tonic::{Request, Response, Status};

    use super::*;

    /// Server that knows one symbol of 16 bytes, and never answers for one address.
    #[derive(Clone, Debug, Default)]
    struct Server {
        asked: Arc<Mutex<Vec<u64>>>,
    }

    const READ: u64 = 0xffff_ffff_8100_0000;
    const SILENT: u64 = 7;

    #[tonic::async_trait]
    impl Symbols for Server {
        type ListSymbolsStream =
            tokio_stream::wrappers::ReceiverStream<Result<ListSymbolsResponse, Status>>;

        async fn list_symbols(
            &self,
            request: Request<ListSymbolsRequest>,
        ) -> Result<Response<Self::ListSymbolsStream>, Status> {
            let request = request.into_inner();
            let address = request.address.unwrap();
            assert_eq!((request.machine.as_str(), request.limit), ("vm0", 0));
            self.asked.lock().unwrap().push(address);
            let (sender, stream) = tokio::sync::mpsc::channel(1);
            match address {
                SILENT => std::future::pending().await,
                0 => return Err(Status::failed_precondition("the machine has ended")),
                READ..=0xffff_ffff_8100_000f => {
                    let symbols = vec![Symbol {
                        name: "vfs_read".into(),
                        address: READ,
                        ..Default::default()
                    }];
                    sender
                        .send(Ok(ListSymbolsResponse { symbols }))
                        .await
                        .unwrap();
                }
                _ => {}
            }
            Ok(Response::new(stream.into()))
        }

        async fn describe_types(
            &self,
            _: Request<DescribeTypesRequest>,
        ) -> Result<Response<DescribeTypesResponse>, Status> {
            Err(Status::unimplemented(""))
        }
    }

    async fn client(server: Server) -> Client {
        let (ours, theirs) = tokio::io::duplex(1 << 16);
        let connections = tokio_stream::once(Ok::<_, std::io::Error>(theirs));
        tokio::spawn(
            tonic::transport::Server::builder()
                .add_service(SymbolsServer::new(server))
                .serve_with_incoming(connections),
        );
        let services = hvprobe_proto::Client::over(ours, None).await;
        services.unwrap().into()
    }

    #[tokio::test]
    async fn names_are_asked_for_once_and_others_stay_numbers() {
        let server = Server::default();
        let mut client = client(server.clone()).await;
        let mut names = Names::default();
        for _ in 0..2 {
            let addresses = vec![READ + 1, 0, READ, 0x10, READ + 1];
            look_up(&mut names, &mut client, "vm0", addresses).await;
            assert_eq!(
                [READ, READ + 1, 0x10, 0].map(|address| names.of(address)),
                ["vfs_read+0x0", "vfs_read+0x1", "0x10", "0x0"]
            );
        }
        assert_eq!(*server.asked.lock().unwrap(), [0, 0x10, READ, READ + 1]);
    }

    #[tokio::test]
    async fn names_of_all_functions_are_not_waited_for_without_end() {
        let at_once = Duration::ZERO;
        let never = std::future::pending::<Result<u8, Status>>();
        assert_eq!(in_time(never, at_once, at_once).await, None);
        let late = async {
            tokio::time::sleep(Duration::from_millis(1)).await;
            Ok(3)
        };
        assert_eq!(in_time(late, at_once, 60 * PATIENCE).await, Some(3));
        let refused = std::future::ready(Err::<u8, _>(Status::unimplemented("")));
        assert_eq!(in_time(refused, 60 * PATIENCE, at_once).await, None);
    }

    #[tokio::test]
    async fn server_that_does_not_answer_is_not_waited_for_long() {
        let mut client = client(Server::default()).await;
        let mut names = Names::default();
        let asked = look_up(&mut names, &mut client, "vm0", vec![READ, SILENT]);
        let answered = timeout(60 * PATIENCE, asked).await;
        assert!(answered.is_ok(), "still waiting after {:?}", 60 * PATIENCE);
        assert_eq!(names.of(SILENT), "0x7");
    }
}
