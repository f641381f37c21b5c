//! Tests histograms that clients open.

use hvprobe_proto::v1::aggregate_request::What as Ask;
use hvprobe_proto::v1::aggregate_response::What as Answer;
use hvprobe_proto::v1::{
    AggregateFor, AggregateRequest, AggregateResponse, ConsoleWriteRequest, ErrorKind,
    HistogramCommand, HistogramPart, StopRequest,
};
use hvprobe_tests::rig::rig;
use hvprobe_tests::wait;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};
use tonic_types::StatusExt as _;

use super::client::{Client, Running, detail};

/// Histogram of a client, open while its stream exists.
struct Histogram {
    to: mpsc::Sender<AggregateRequest>,
    answers: Streaming<AggregateResponse>,
}

impl Histogram {
    async fn answer(&mut self) -> Result<Answer, Status> {
        Ok(self.answers.message().await?.unwrap().what.unwrap())
    }

    async fn ask(&mut self, ask: Ask) -> Result<Answer, Status> {
        self.to.send(asked(ask)).await.unwrap();
        self.answer().await
    }

    async fn read(&mut self) -> HistogramPart {
        match self.ask(command(HistogramCommand::Read)).await {
            Ok(Answer::Part(part)) => part,
            other => panic!("{other:?}"),
        }
    }
}

fn asked(what: Ask) -> AggregateRequest {
    AggregateRequest { what: Some(what) }
}

fn command(command: HistogramCommand) -> Ask {
    Ask::Command(command.into())
}

/// Opens a histogram with the request `first`.
async fn aggregate(client: &mut Client, first: Ask) -> Result<Histogram, Status> {
    let (to, requests) = mpsc::channel(4);
    to.send(asked(first)).await.unwrap();
    let answers = client.histograms.aggregate(ReceiverStream::new(requests));
    let answers = answers.await?.into_inner();
    let mut histogram = Histogram { to, answers };
    match histogram.answer().await? {
        Answer::Schema(_) => Ok(histogram),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn histograms_count_for_as_long_as_their_streams_live() {
    const CALLS: u64 = 500;
    const MOST: usize = 64;
    if rig("api: histograms").is_none() {
        return;
    }
    let server = Running::start();
    let mut client = server.client().await;
    let script = "echo ready; read line; workload calls getpgid 500; echo finished; read line";
    let probes = &["p __x64_sys_getpgid"];
    let machine = client.boot(&["sh", "-c", script], probes).await.name;
    let id = client.list(&machine).await[0].id;
    let wanted = |machine: &str, probes: &[u32], histogram: &str| {
        Ask::AggregateFor(AggregateFor {
            machine: machine.into(),
            probes: probes.into(),
            histogram: histogram.into(),
        })
    };
    for (first, code, kind, column) in [
        (
            command(HistogramCommand::Read),
            Code::InvalidArgument,
            ErrorKind::BadStream,
            None,
        ),
        (
            wanted("nobody", &[id], "keys=comm"),
            Code::NotFound,
            ErrorKind::NoSuchMachine,
            None,
        ),
        (
            wanted(&machine, &[], "keys=comm"),
            Code::InvalidArgument,
            ErrorKind::NoSuchProbe,
            None,
        ),
        (
            wanted(&machine, &[id, 99], "keys=comm"),
            Code::NotFound,
            ErrorKind::NoSuchProbe,
            None,
        ),
        (
            wanted(&machine, &[id], "keys=,"),
            Code::InvalidArgument,
            ErrorKind::Definition,
            Some(5),
        ),
        (
            wanted(&machine, &[id], "keys=no"),
            Code::InvalidArgument,
            ErrorKind::Definition,
            Some(5),
        ),
    ] {
        let error = aggregate(&mut client, first).await.err().unwrap();
        let detail = detail(&error);
        assert_eq!(
            (error.code(), detail.kind(), detail.column),
            (code, kind, column),
            "{error}"
        );
    }
    let unknown = aggregate(&mut client, wanted(&machine, &[id], "keys=no")).await;
    let message = unknown.err().unwrap().message().to_owned();
    assert!(
        message.starts_with("of probe `p___x64_sys_getpgid_0`: "),
        "{message}"
    );
    assert_eq!(message.matches("Field not found").count(), 1, "{message}");
    let keys = wanted(&machine, &[id], "keys=comm:vals=common_pid.max");
    let mut histograms = Vec::new();
    for _ in 0..MOST {
        histograms.push(aggregate(&mut client, keys.clone()).await.unwrap());
    }
    let error = aggregate(&mut client, keys.clone()).await.err().unwrap();
    assert_eq!(error.code(), Code::ResourceExhausted);
    let info = error.get_details_error_info().unwrap();
    let metadata = ["limit", "most", "left"].map(|name| info.metadata[name].as_str());
    assert_eq!(metadata, ["histograms_per_machine", "64", "0"]);
    // A histogram whose stream has ended makes room for another once the server has noticed the end.
    histograms.truncate(2);
    let room = async {
        while let Err(error) = aggregate(&mut client, keys.clone()).await {
            assert_eq!(detail(&error).kind(), ErrorKind::TooManyHistograms);
            tokio::task::yield_now().await;
        }
    };
    let made = tokio::time::timeout(wait::LIMIT, room).await;
    made.expect("no room though histograms are gone");
    client.wait_printed(&machine, "ready").await;
    let request = ConsoleWriteRequest {
        machine: machine.clone(),
        data: b"\n".to_vec(),
    };
    client.machines.console_write(request).await.unwrap();
    client.wait_printed(&machine, "finished").await;
    let [histogram, other] = &mut histograms[..] else {
        unreachable!()
    };
    let part = histogram.read().await;
    let (totals, entry) = (part.totals.unwrap(), &part.entries[0]);
    assert_eq!((totals.hits + totals.lost, totals.entries), (CALLS, 1));
    assert_eq!(
        (entry.comm.as_slice(), entry.hits),
        (&b"workload"[..], totals.hits)
    );
    assert!(entry.values[0].greatest > 1, "{entry:?}");
    let cleared = histogram
        .ask(command(HistogramCommand::Clear))
        .await
        .unwrap();
    assert!(matches!(cleared, Answer::Changed(_)), "{cleared:?}");
    assert_eq!(histogram.read().await.totals.unwrap().hits, 0);
    let error = histogram.ask(keys).await.unwrap_err();
    assert_eq!(detail(&error).kind(), ErrorKind::BadStream);
    let request = StopRequest { machine };
    client.machines.stop(request).await.unwrap();
    assert_eq!(other.read().await.totals, part.totals);
    server.stop().await;
}
