//! Servers of other versions, which do not know a call of this program. Needs no KVM.

#![allow(
    clippy::unwrap_used,
    reason = "a helper that cannot go on fails its test"
)]

use std::path::Path;
use std::process::Command;

use expect_test::{Expect, expect};
use hvprobe_proto::v1::host_server::{Host, HostServer};
use hvprobe_proto::v1::machines_server::SERVICE_NAME;
use hvprobe_proto::v1::{ReportRequest, ReportResponse};
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

/// Server that knows only the call for its version; if it has no version, it knows no call.
struct Other(Option<&'static str>);

#[tonic::async_trait]
impl Host for Other {
    async fn report(&self, _: Request<ReportRequest>) -> Result<Response<ReportResponse>, Status> {
        let version = self.0.ok_or_else(|| Status::unimplemented(""))?.to_owned();
        Ok(Response::new(ReportResponse {
            version,
            ..Default::default()
        }))
    }
}

async fn list(socket: &Path) -> String {
    let mut command = Command::new("timeout");
    command
        .args(["--kill-after=5", "60", env!("CARGO_BIN_EXE_hvprobe")])
        .args(["vm", "list", "--socket"])
        .arg(socket);
    let output = tokio::task::spawn_blocking(move || command.output()).await;
    let output = output.unwrap().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    format!("{stderr}status {}\n", output.status.code().unwrap())
}

async fn check(version: Option<&'static str>, expected: Expect) {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let listener = UnixListenerStream::new(UnixListener::bind(&socket).unwrap());
    let server = Server::builder()
        .add_service(HostServer::new(Other(version)))
        .serve_with_incoming(listener);
    let printed = tokio::select! {
        printed = list(&socket) => printed,
        ended = server => panic!("the server has ended: {ended:?}"),
    };
    let printed = printed.replace(env!("CARGO_PKG_VERSION"), "$OURS");
    expected.assert_eq(&printed);
}

#[tokio::test]
async fn calls_that_the_server_does_not_know_say_which_of_the_two_is_older() {
    assert_eq!(SERVICE_NAME, "hvprobe.v1.Machines");
    check(
        Some("0.0.9"),
        expect![[r#"
            hvprobe: the server is too old: its version 0.0.9 does not know Machines.ListMachines; start it again with version $OURS, which this program has
            status 1
        "#]],
    )
    .await;
    check(
        Some("77.0.0"),
        expect![[r#"
            hvprobe: the server is too new: its version 77.0.0 does not know Machines.ListMachines any more; use that version of this program, which has $OURS
            status 1
        "#]],
    )
    .await;
    check(
        Some("of\u{1b}mine"),
        expect![[r#"
            hvprobe: the server, of version of?mine, does not know Machines.ListMachines
            status 1
        "#]],
    )
    .await;
    check(
        None,
        expect![[r#"
            hvprobe: the server does not know Machines.ListMachines, and reports no version: it is not hvprobe, or far from version $OURS of this program
            status 1
        "#]],
    )
    .await;
}
