//! `hvprobe.v1.Host`.

use hvprobe_machine::host;
use hvprobe_proto::v1::{self, ReportRequest, ReportResponse, host_server};
use tonic::{Request, Response, Status};

use crate::status::chain;
use crate::threads::Lane;
use crate::wire::convert;

/// The service.
#[derive(Debug)]
pub(crate) struct Service {
    /// One look at the host at a time: each runs a guest.
    looks: Lane,
}

impl Service {
    pub(crate) fn new() -> Self {
        Self {
            looks: Lane::new("the self-check", 1),
        }
    }
}

#[tonic::async_trait]
impl host_server::Host for Service {
    async fn report(
        &self,
        _request: Request<ReportRequest>,
    ) -> Result<Response<ReportResponse>, Status> {
        let looked = || (host::check(), host::facts());
        let (report, facts) = self.looks.run(looked).await?;
        let facts = facts.into_iter().map(convert::fact).collect();
        let version = env!("CARGO_PKG_VERSION").to_owned();
        Ok(Response::new(match report {
            Ok(report) => ReportResponse {
                guests_can_run: report.can_run_linux,
                catch_mode: report
                    .catch_mode
                    .map_or(v1::CatchMode::Unspecified, convert::catch_mode)
                    .into(),
                findings: report.items.into_iter().map(convert::finding).collect(),
                version,
                facts,
            },
            // A host without KVM is a finding, too.
            Err(error) => ReportResponse {
                guests_can_run: false,
                catch_mode: v1::CatchMode::Unspecified.into(),
                findings: vec![v1::Finding {
                    what: "KVM".to_owned(),
                    seen: chain(&error),
                    meaning: "no guest can run here".to_owned(),
                    verdict: v1::Verdict::Bad.into(),
                }],
                version,
                facts,
            },
        }))
    }
}
