//! A client that follows all machines.
//!
//! Invariant: at most one message waits for the client, and the next one is made only when there is room for it. So
//! a slow client gets the latest state of each machine, in the order of their last changes.

use std::collections::{BTreeMap, HashMap};

use hvprobe_proto::v1::watch_machines_response::What;
use hvprobe_proto::v1::{AllTold, MachineGone, WatchMachinesResponse};
use tokio::sync::mpsc;
use tonic::Status;

use crate::machines::{Fleet, Handle};
use crate::wire::mask::Mask;

type ToClient = mpsc::Sender<Result<WatchMachinesResponse, Status>>;

/// The client is gone.
#[derive(Debug)]
struct Gone;

/// What the client knows of one machine.
#[derive(Debug)]
struct Known {
    name: String,
    /// Number of the last change that the client was sent.
    changed: u64,
}

/// Reports all machines to one client.
#[derive(Debug)]
pub(crate) struct Watcher {
    fleet: Fleet,
    labels: BTreeMap<String, String>,
    mask: Mask,
    to_client: ToClient,
    /// What the client knows of each machine, by UUID.
    known: HashMap<String, Known>,
}

impl Watcher {
    pub(crate) fn new(
        fleet: &Fleet,
        labels: BTreeMap<String, String>,
        mask: Mask,
        to_client: ToClient,
    ) -> Self {
        Self {
            fleet: fleet.clone(),
            labels,
            mask,
            to_client,
            known: HashMap::new(),
        }
    }

    /// Runs until the client is gone, or until the last machine of a stopping server has ended.
    pub(crate) async fn run(mut self) {
        // A client that is gone is no error, and nobody is left to report it to.
        let _gone = self.watch().await;
    }

    async fn watch(&mut self) -> Result<(), Gone> {
        let mut changes = self.fleet.follow();
        changes.mark_unchanged();
        while self.send_next().await? {}
        self.send(What::AllTold(AllTold {})).await?;
        while !self.fleet.is_over() {
            tokio::select! {
                // Cannot fail: `self.fleet` has the sender.
                _ = changes.changed() => {}
                () = self.to_client.closed() => return Err(Gone),
            }
            while self.send_next().await? {}
        }
        // Sends the changes that came with the end.
        while self.send_next().await? {}
        Ok(())
    }

    /// Sends the next change that the client does not know; returns whether there was one.
    async fn send_next(&mut self) -> Result<bool, Gone> {
        let to_client = self.to_client.clone();
        let room = to_client.reserve().await.map_err(|_| Gone)?;
        let Some(what) = self.next() else {
            return Ok(false);
        };
        room.send(Ok(WatchMachinesResponse { what: Some(what) }));
        Ok(true)
    }

    /// Returns the next change: a machine that is gone. If none is gone, returns one of the machines with a change
    /// that the client does not know: the one whose last change is the oldest.
    fn next(&mut self) -> Option<What> {
        let mut all = self.fleet.all();
        all.retain(|handle| handle.has(&self.labels));
        let is_there = |uid: &str| all.iter().any(|handle| handle.identity.uid() == uid);
        let gone = self.known.keys().find(|uid| !is_there(uid)).cloned();
        if let Some((uid, Known { name, .. })) = gone.and_then(|uid| self.known.remove_entry(&uid))
        {
            return Some(What::Gone(MachineGone { name, uid }));
        }
        let is_new = |handle: &&Handle| {
            let known = self.known.get(handle.identity.uid());
            known.is_none_or(|known| known.changed < handle.changed())
        };
        let handle = all
            .iter()
            .filter(is_new)
            .min_by_key(|handle| handle.changed())?;
        // Read before the state, so that a change in between is sent next time.
        let changed = handle.changed();
        let name = handle.name().to_owned();
        let known = Known { name, changed };
        self.known.insert(handle.identity.uid().to_owned(), known);
        Some(What::Machine(self.mask.of(handle.describe())))
    }

    async fn send(&self, what: What) -> Result<(), Gone> {
        let message = WatchMachinesResponse { what: Some(what) };
        self.to_client.send(Ok(message)).await.map_err(|_| Gone)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use hvprobe_proto::v1::Machine;
    use tokio::time::timeout;

    use super::*;
    use crate::machines::fleet::tests::add_ended;

    const PATIENCE: Duration = Duration::from_secs(60);

    type Responses = mpsc::Receiver<Result<WatchMachinesResponse, Status>>;

    fn watch(fleet: &Fleet) -> Responses {
        let (to_client, responses) = mpsc::channel(1);
        let mask = Mask::new(None).unwrap();
        let watcher = Watcher::new(fleet, BTreeMap::new(), mask, to_client);
        tokio::spawn(watcher.run());
        responses
    }

    async fn next(responses: &mut Responses) -> What {
        let next = timeout(PATIENCE, responses.recv()).await;
        let response = next.expect("something is told").expect("it goes on");
        response.unwrap().what.unwrap()
    }

    /// Returns the next message as a word: `+name` for a machine, `-name` for one that is gone.
    async fn word(responses: &mut Responses) -> String {
        match next(responses).await {
            What::Machine(Machine { name, uid, .. }) => {
                assert!(uid.is_empty() || uid.len() == 36, "{uid}");
                format!("+{name}")
            }
            What::Gone(gone) => format!("-{}", gone.name),
            What::AllTold(AllTold {}) => "all".to_owned(),
        }
    }

    #[tokio::test]
    async fn all_that_are_there_are_sent_and_then_who_comes_changes_and_goes() {
        let fleet = Fleet::default();
        add_ended(&fleet, "b", "", b"");
        let first = add_ended(&fleet, "a", "", b"");
        let mut responses = watch(&fleet);
        for expected in ["+b", "+a", "all"] {
            assert_eq!(word(&mut responses).await, expected);
        }
        add_ended(&fleet, "c", "", b"");
        assert_eq!(word(&mut responses).await, "+c");
        first.touch();
        assert_eq!(word(&mut responses).await, "+a");
        fleet.forget("b").unwrap();
        assert_eq!(word(&mut responses).await, "-b");
        // A name that is used again belongs to another machine.
        let uid = first.identity.uid().to_owned();
        add_ended(&fleet, "a", "", b"");
        match next(&mut responses).await {
            What::Gone(gone) => assert_eq!((gone.name.as_str(), gone.uid), ("a", uid)),
            other => panic!("{other:?}"),
        }
        assert_eq!(word(&mut responses).await, "+a");
    }

    #[tokio::test]
    async fn slow_client_gets_the_latest_of_each_and_nothing_twice() {
        let fleet = Fleet::default();
        let machine = add_ended(&fleet, "a", "", b"");
        let mut responses = watch(&fleet);
        assert_eq!(word(&mut responses).await, "+a");
        assert_eq!(word(&mut responses).await, "all");
        // Far more changes than messages that may wait for the client.
        for _ in 0..10_000 {
            machine.touch();
        }
        add_ended(&fleet, "b", "", b"");
        add_ended(&fleet, "short", "", b"");
        fleet.forget("short").unwrap();
        tokio::task::yield_now().await;
        machine.touch();
        let mut seen = Vec::new();
        while seen.last().map(String::as_str) != Some("+last") {
            if seen.is_empty() {
                add_ended(&fleet, "last", "", b"");
            }
            seen.push(word(&mut responses).await);
            assert!(seen.len() < 10, "{seen:?}");
        }
        assert!(seen.contains(&"+a".to_owned()) && seen.contains(&"+b".to_owned()));
        assert!(!seen.contains(&"-short".to_owned()) || seen.contains(&"+short".to_owned()));
        assert!(responses.try_recv().is_err());
    }

    #[tokio::test]
    async fn watcher_ends_with_the_last_machine_of_a_server_that_stops() {
        let fleet = Fleet::default();
        add_ended(&fleet, "a", "", b"");
        let mut responses = watch(&fleet);
        for expected in ["+a", "all"] {
            assert_eq!(word(&mut responses).await, expected);
        }
        fleet.close().await;
        let end = timeout(PATIENCE, responses.recv()).await.expect("it ends");
        assert!(end.is_none(), "{end:?}");
    }

    #[tokio::test]
    async fn watcher_goes_with_its_client() {
        let fleet = Fleet::default();
        let (to_client, responses) = mpsc::channel(1);
        let mask = Mask::new(None).unwrap();
        let watcher = Watcher::new(&fleet, BTreeMap::new(), mask, to_client);
        let running = tokio::spawn(watcher.run());
        drop(responses);
        timeout(PATIENCE, running).await.expect("it ends").unwrap();
    }
}
