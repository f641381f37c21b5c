//! Reads which events a client wants.

use hvprobe_engine::on_any_event;
use hvprobe_proto::Failure;
use hvprobe_proto::v1::{ErrorKind, EventKind, SubscribeRequest};
use hvprobe_spec::fetch::read_filter;
use hvprobe_spec::predicate::Predicate;
use tonic::Status;

use crate::bounds::limits;
use crate::events::wanted::Wanted;

/// Reads the selection of events in `request`.
pub(crate) fn wanted(request: &mut SubscribeRequest) -> Result<Wanted, Status> {
    let lengths = [
        ("the number of probes", request.probes.len()),
        ("the number of threads", request.pids.len()),
        ("the number of processes", request.tgids.len()),
        ("the number of names of tasks", request.comms.len()),
        ("the number of kinds", request.kinds.len()),
    ];
    for (what, length) in lengths {
        limits::at_most(what, length, limits::BATCH)?;
    }
    limits::at_most("the filter", request.filter.len(), limits::DEFINITION)?;
    for comm in &request.comms {
        limits::at_most("the name of a task", comm.len(), limits::COMM)?;
    }
    let is_kind =
        |kind: &i32| EventKind::try_from(*kind).is_ok_and(|kind| kind != EventKind::Unspecified);
    if let Some(kind) = request.kinds.iter().find(|kind| !is_kind(kind)) {
        let message = format!("no event is of the kind {kind}");
        return Err(Failure::invalid(ErrorKind::Filter, message).into());
    }
    let filter = match request.filter.as_str() {
        "" => None,
        text => Some(filter(text)?),
    };
    Ok(Wanted {
        probes: request.probes.drain(..).collect(),
        pids: request.pids.drain(..).collect(),
        tgids: request.tgids.drain(..).collect(),
        comms: request.comms.drain(..).collect(),
        kinds: request.kinds.drain(..).collect(),
        filter,
        room: Vec::new(),
    })
}

fn filter(text: &str) -> Result<Predicate, Status> {
    let read = read_filter(text).and_then(|filter| on_any_event(&filter));
    read.map_err(|error| {
        Failure::invalid(ErrorKind::Filter, format!("bad filter: {error}"))
            .at_column(error.column)
            .into()
    })
}

#[cfg(test)]
mod tests {
    use hvprobe_arch::Regs;
    use hvprobe_hit::event::{Captured, Event, EventKind as Kind};
    use hvprobe_linux::task::Task;
    use hvprobe_proto::v1;
    use hvprobe_spec::{ProbeId, RegisterSet};
    use prost::Message as _;
    use tonic::Code;

    use super::*;
    use crate::events::wanted::Facts;
    use crate::status::tests::detail;

    fn event(pid: i32, comm: &[u8], kind: Kind) -> Event {
        let mut padded = [0; 16];
        padded[..comm.len()].copy_from_slice(comm);
        Event {
            kind,
            shown: RegisterSet::default(),
            captured: Captured::nothing(),
            seq: 0,
            probe: ProbeId(1),
            vcpu: 3,
            host_ns: 0,
            guest_tsc: 0,
            regs: Regs::default(),
            task: Some(Task {
                pid,
                tgid: pid / 10 * 10,
                comm: padded,
            }),
            cost_ns: 0,
        }
    }

    /// Returns which of some events `request` selects. Checks that the facts of an event are the same after
    /// decoding.
    fn chosen(mut request: SubscribeRequest) -> Vec<usize> {
        let wanted = wanted(&mut request).expect("a good request");
        let events = [
            event(11, b"dd", Kind::Hit),
            event(12, b"sshd", Kind::Post),
            event(21, b"0123456789abcdef", Kind::Hit),
            Event {
                task: None,
                ..event(0, b"", Kind::Hit)
            },
        ];
        let mut chosen = Vec::new();
        for (index, event) in events.iter().enumerate() {
            let made = wanted.has(&Facts::from(event));
            let mut bytes = Vec::new();
            crate::wire::event::event(event, &mut bytes);
            let read = v1::SubscribeResponse::decode(&bytes[..]).expect("a message");
            assert_eq!(Facts::from(&read.events[0]), Facts::from(event));
            if made {
                chosen.push(index);
            }
        }
        chosen
    }

    #[test]
    fn each_list_that_is_not_empty_has_to_have_the_events_own() {
        let all = SubscribeRequest::default;
        assert_eq!(chosen(all()), [0, 1, 2, 3]);
        let pids = vec![12, 21];
        assert_eq!(chosen(SubscribeRequest { pids, ..all() }), [1, 2]);
        let tgids = vec![10];
        assert_eq!(chosen(SubscribeRequest { tgids, ..all() }), [0, 1]);
        let comms = vec![b"dd".to_vec(), b"0123456789abcdef".to_vec()];
        assert_eq!(chosen(SubscribeRequest { comms, ..all() }), [0, 2]);
        let kinds = vec![EventKind::Post.into()];
        assert_eq!(chosen(SubscribeRequest { kinds, ..all() }), [1]);
        let both = SubscribeRequest {
            tgids: vec![10],
            comms: vec![b"sshd".to_vec()],
            ..all()
        };
        assert_eq!(chosen(both), [1]);
    }

    #[test]
    fn an_expression_is_that_of_definitions() {
        let by = |filter: &str| {
            chosen(SubscribeRequest {
                filter: filter.to_owned(),
                ..Default::default()
            })
        };
        assert_eq!(by("comm ~ \"*d\" && pid < 20"), [0, 1]);
        assert_eq!(by("comm == \"0123456789abcdef\" || tgid == 99"), [2]);
        assert_eq!(by("cpu & 2 && !(pid >= 12)"), [0, 3]);
    }

    #[test]
    fn what_is_wrong_with_an_expression_is_reported_with_its_column() {
        let refused = |filter: &str| {
            let mut request = SubscribeRequest {
                filter: filter.to_owned(),
                ..Default::default()
            };
            let status = wanted(&mut request).expect_err("a bad filter");
            assert_eq!(status.code(), Code::InvalidArgument);
            let detail = detail(&status);
            assert_eq!(detail.kind(), ErrorKind::Filter);
            detail.column
        };
        assert_eq!(refused("pid == 1 &&"), Some(11));
        assert_eq!(refused("pid == 1 && count > 3"), Some(12));
        assert_eq!(refused("comm == 7"), Some(0));
        assert_eq!(refused("pid == \u{e4}"), Some(7));
    }

    #[test]
    fn kinds_and_names_that_no_event_has_are_refused() {
        let mut no_kind = SubscribeRequest {
            kinds: vec![0],
            ..Default::default()
        };
        assert!(wanted(&mut no_kind).is_err());
        let mut long = SubscribeRequest {
            comms: vec![vec![b'x'; 17]],
            ..Default::default()
        };
        let status = wanted(&mut long).expect_err("too long a name");
        assert_eq!(detail(&status).kind(), ErrorKind::TooLarge);
    }
}
