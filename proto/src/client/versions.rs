//! Errors for calls that the server does not know because its version differs from this program's. They say which
//! of the two is older.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tonic::body::Body;
use tonic::codegen::http::header::AUTHORIZATION;
use tonic::codegen::http::{HeaderValue, Request, Response};
use tonic::metadata::MetadataValue;
use tonic::transport::{Channel, Error};
use tonic::{Code, Status};
use tower::Service;

use crate::v1::ReportRequest;
use crate::v1::host_client::HostClient;

/// Version of this program.
const OURS: &str = env!("CARGO_PKG_VERSION");
/// Timeout of the call that returns the server's version. The server examines its host before it answers.
const PATIENCE: Duration = Duration::from_secs(10);
/// Call that returns the server's version.
const REPORT: &str = "/hvprobe.v1.Host/Report";

/// Channel that explains the failure of calls that the server does not know.
#[derive(Clone, Debug)]
pub struct ExplainingChannel(pub(super) Channel);

impl Service<Request<Body>> for ExplainingChannel {
    type Response = Response<Body>;
    type Error = Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let channel = self.0.clone();
        let path = request.uri().path().to_owned();
        let shown = request.headers().get(AUTHORIZATION).cloned();
        let answer = self.0.call(request);
        Box::pin(async move {
            let mut response = answer.await?;
            let status = Status::from_header_map(response.headers());
            let is_unknown = status.is_some_and(|status| status.code() == Code::Unimplemented);
            if is_unknown && path != REPORT {
                let theirs = version(channel, shown).await;
                let status = Status::unimplemented(explain(&path, theirs.as_deref()));
                // Text that is no valid header value is left out.
                let _ = status.add_header(response.headers_mut());
            }
            Ok(response)
        })
    }
}

/// Returns the version of the server, if it answers.
async fn version(channel: Channel, shown: Option<HeaderValue>) -> Option<String> {
    let mut request = tonic::Request::new(ReportRequest {});
    if let Some(shown) = shown {
        let shown = MetadataValue::try_from(shown.as_bytes()).ok()?;
        request.metadata_mut().insert("authorization", shown);
    }
    let mut host = HostClient::new(channel);
    let answer = tokio::time::timeout(PATIENCE, host.report(request)).await;
    let version = answer.ok()?.ok()?.into_inner().version;
    // The text is foreign and is printed, so shorten it and replace control characters.
    let printable = |c: char| match c {
        char::REPLACEMENT_CHARACTER => '?',
        c if c.is_control() => '?',
        c => c,
    };
    let version: String = version.chars().take(40).map(printable).collect();
    (!version.is_empty()).then_some(version)
}

/// Returns the message about a call that a server of version `theirs` does not know.
fn explain(path: &str, theirs: Option<&str>) -> String {
    let call = path
        .rsplit_once("hvprobe.v1.")
        .map_or(path, |(_, call)| call);
    let call = call.replace('/', ".");
    let Some(theirs) = theirs else {
        return format!(
            "the server does not know {call}, and reports no version: it is not hvprobe, or far from \
             version {OURS} of this program"
        );
    };
    match (numbers(theirs), numbers(OURS)) {
        (Some(server), Some(ours)) if server < ours => format!(
            "the server is too old: its version {theirs} does not know {call}; start it again with \
             version {OURS}, which this program has"
        ),
        (Some(server), Some(ours)) if server > ours => format!(
            "the server is too new: its version {theirs} does not know {call} any more; use that \
             version of this program, which has {OURS}"
        ),
        _ => format!("the server, of version {theirs}, does not know {call}"),
    }
}

/// Returns the numbers of a version, for comparison; `None` if a part is not a number.
fn numbers(version: &str) -> Option<Vec<u64>> {
    let numbers = version.split(['-', '+']).next().unwrap_or(version);
    numbers
        .split('.')
        .map(|number| number.parse().ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_number_by_number() {
        assert!(numbers("0.9.0") < numbers("0.10.0"));
        assert_eq!(numbers("0.9.0-rc1"), numbers("0.9.0"));
        assert_eq!(numbers("of mine"), None);
        let explanation = explain("/hvprobe.v1.Host/X", Some("of mine"));
        assert_eq!(
            explanation,
            "the server, of version of mine, does not know Host.X"
        );
    }
}
