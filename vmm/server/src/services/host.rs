//! `hvprobe.v1.Host`.

use hvprobe_machine::host;
use hvprobe_proto::v1::{
    self, ReportRequest, ReportResponse,
    host_server::{self, HostServer},
};
use hvprobe_spec::chain;
use tonic::{Request, Response, Status};

use crate::bounds::limits;
use crate::bounds::threads::Lane;
use crate::wire::convert;

#[derive(Debug)]
pub(crate) struct Service {
    /// One self-check at a time: each runs a guest.
    looks: Lane,
}

impl Service {
    /// Returns the service for the gRPC server.
    pub(crate) fn server() -> HostServer<Self> {
        let looks = Lane::new("the self-check", 1);
        HostServer::new(Self { looks }).max_decoding_message_size(limits::MESSAGE)
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
        let (guests_can_run, catch_mode, findings) = match report {
            Ok(report) => (
                report.can_run_linux,
                report.catch_mode.map(convert::catch_mode),
                report.items.into_iter().map(convert::finding).collect(),
            ),
            // The lack of KVM is reported as a finding.
            Err(error) => {
                let finding = v1::Finding {
                    what: "KVM".to_owned(),
                    seen: chain(&error),
                    meaning: "no guest can run here".to_owned(),
                    verdict: v1::Verdict::Bad.into(),
                };
                (false, None, vec![finding])
            }
        };
        Ok(Response::new(ReportResponse {
            guests_can_run,
            catch_mode: catch_mode.unwrap_or_default().into(),
            findings,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            facts,
        }))
    }
}
