//! `hvprobe decide`: decides about hits while the guest waits.
//!
//! Questions are put to the user one at a time, in the order of their arrival. A question whose deadline passes
//! while it waits, or while the user types, is dropped: the server has resumed the guest by then.

use std::collections::VecDeque;
use std::io::{self, BufRead as _, IsTerminal as _};
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use anyhow::bail;
use hvprobe_proto::v1::{
    self, Answer, DecideFor, DecideRequest, DecideResponse, Question, actions, decide_request,
    decide_response,
};
use hvprobe_proto::wire::Wire as _;
use hvprobe_spec::{Decision, language};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use crate::client::{self, Client, clock};
use crate::failure::{DONE, INTERRUPTED, Refused, WrongUsage, answered, typed};
use crate::follow::optional_future::or_never;
use crate::options::command_line::Decide;
use crate::output;
use crate::output::events::times::Times;
use crate::output::events::{self, Labels};
use crate::output::values::names::Names;
use crate::terminal::signals::Interrupt;

/// Capacity of the queue of answers to the server.
const ANSWERS: usize = 16;

pub(crate) async fn decide(args: Decide) -> anyhow::Result<ExitCode> {
    let always = match args.answer.as_deref() {
        Some(text) => {
            let read = language::decision(text);
            Some(read.map_err(|error| typed::bad_option("answer", text, &error))?)
        }
        None if io::stdin().is_terminal() => None,
        None => {
            let message = "there is no terminal to ask at: say what to decide with --answer";
            return Err(WrongUsage(message.to_owned()).into());
        }
    };
    let mut interrupt = Interrupt::install()?;
    let (mut client, machine) = Client::on_machine(&args.on).await?;
    let known = client.list_probes(&machine).await?;
    let probes = match args.probes.as_slice() {
        [] => asking(&known),
        chosen => client::choose(&known, chosen)?,
    };
    if probes.is_empty() {
        bail!("no probe of {machine} asks; `hvprobe probe add --ask` registers one that does");
    }

    let (to_server, answers) = mpsc::channel(ANSWERS);
    let decide_for = DecideFor {
        machine,
        probes,
        ..Default::default()
    };
    let first = DecideRequest {
        what: Some(decide_request::What::DecideFor(decide_for)),
    };
    // The queue is empty, so it has room for this message.
    let _room = to_server.try_send(first);
    let mut questions = answered(client.decisions.decide(ReceiverStream::new(answers)).await)?;

    let mut lines = always.is_none().then(keyboard);
    let mut desk = Desk {
        always,
        left: args.hits,
        labels: Labels::default(),
        headed: false,
        open: VecDeque::new(),
        to_server,
    };
    let status = loop {
        let next = tokio::select! {
            message = questions.message() => match message.map_err(Refused::from)? {
                Some(message) => desk.take(message).await?,
                // The machine ended.
                None => Next::Done,
            },
            line = or_never(lines.as_mut().map(mpsc::Receiver::recv)) => match line {
                Some(line) => desk.typed(&line).await,
                None => Next::Done,
            },
            () = desk.expiry() => desk.expired(),
            () = interrupt.asked() => break ExitCode::from(INTERRUPTED),
        };
        if next == Next::Done {
            break DONE;
        }
    };
    // The server ends the stream when it has received all answers.
    drop(desk);
    tokio::select! {
        () = async { while let Ok(Some(_)) = questions.message().await {} } => {}
        () = interrupt.asked() => {}
    }
    Ok(status)
}

/// Returns the ids of the probes in `probes` that ask for decisions.
fn asking(probes: &[v1::Probe]) -> Vec<u32> {
    let asks = |probe: &&v1::Probe| {
        let hold = probe.actions.as_ref().and_then(|all| all.hold.as_ref());
        matches!(hold, Some(actions::Hold::Ask(_)))
    };
    probes.iter().filter(asks).map(|probe| probe.id).collect()
}

/// Result of a step: whether there is more to decide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    More,
    Done,
}

/// Queue of open questions.
#[derive(Debug)]
struct Desk {
    /// Decision for every hit, from `--answer`; `None` to ask the user.
    always: Option<Decision>,
    /// Number of hits that are still to be decided; `None` for no limit.
    left: Option<u64>,
    labels: Labels,
    headed: bool,
    /// Questions of the server that are not answered yet. The first one is on the screen.
    open: VecDeque<Question>,
    to_server: mpsc::Sender<DecideRequest>,
}

impl Desk {
    async fn take(&mut self, message: DecideResponse) -> anyhow::Result<Next> {
        self.labels.learn(&message.probes);
        match message.what {
            None => {
                output::notice(format_args!("deciding for {} probes", message.probes.len()));
                Ok(Next::More)
            }
            Some(decide_response::What::TooLate(_)) => {
                output::notice(format_args!("too late: the default was done"));
                Ok(Next::More)
            }
            Some(decide_response::What::Question(question)) => match self.always.clone() {
                Some(decision) => {
                    self.show(&question)?;
                    Ok(self.answer(&question, decision).await)
                }
                None => {
                    self.open.push_back(question);
                    if self.open.len() == 1 {
                        self.prompt()?;
                    }
                    Ok(Next::More)
                }
            },
        }
    }

    /// Prints the hit that `question` is about.
    fn show(&mut self, question: &Question) -> io::Result<()> {
        let event = question.event.clone().unwrap_or_default();
        if !std::mem::replace(&mut self.headed, true) {
            output::print(&Times::default().header())?;
        }
        let label = self.labels.of(event.probe);
        // The guest waits, so addresses are not resolved to names.
        let time = Times::default().text(event.host_ns);
        output::print(&events::line(&event, &time, &label, &Names::default()))
    }

    /// Prints the first open question.
    fn prompt(&mut self) -> io::Result<()> {
        if let Some(question) = self.open.front().cloned() {
            self.show(&question)?;
            let seconds = until(question.deadline_ns).as_secs_f64();
            output::eprint(format_args!(
                "  {seconds:.1} s to decide: Enter to proceed, return=VALUE, jump=ADDRESS, %ax=VALUE, …"
            ));
        }
        Ok(())
    }

    /// Handles a `line` that the user typed.
    async fn typed(&mut self, line: &str) -> Next {
        if self.open.is_empty() {
            return Next::More;
        }
        let decision = match line.trim() {
            "" => Decision::default(),
            _ => match language::decision(line) {
                Ok(decision) => decision,
                Err(error) => {
                    output::eprint(format_args!("{}\n{error}", error.render(line)));
                    return Next::More;
                }
            },
        };
        let Some(question) = self.open.pop_front() else {
            return Next::More;
        };
        match self.answer(&question, decision).await {
            Next::More => self.next_question(),
            Next::Done => Next::Done,
        }
    }

    async fn answer(&mut self, question: &Question, decision: Decision) -> Next {
        output::eprint(format_args!("  {}", language::text::decision(&decision)));
        let answer = Answer {
            token: question.token,
            decision: Some(decision.to_wire()),
        };
        let request = DecideRequest {
            what: Some(decide_request::What::Answer(answer)),
        };
        if self.to_server.send(request).await.is_err() {
            return Next::Done;
        }
        match &mut self.left {
            None => Next::More,
            Some(left) => {
                *left = left.saturating_sub(1);
                if *left == 0 { Next::Done } else { Next::More }
            }
        }
    }

    /// Waits until the deadline of the first open question; forever if no question is open.
    async fn expiry(&self) {
        let first = self.open.front();
        or_never(first.map(|question| tokio::time::sleep(until(question.deadline_ns)))).await;
    }

    fn expired(&mut self) -> Next {
        output::eprint(format_args!("  too late: the default was done"));
        self.open.pop_front();
        self.next_question()
    }

    fn next_question(&mut self) -> Next {
        match self.prompt() {
            Ok(()) => Next::More,
            // The terminal is gone, so nobody can read the questions.
            Err(_) => Next::Done,
        }
    }
}

/// Returns the time until `ns` of the server's clock, which is also the client's: the server runs on the same
/// host.
fn until(ns: u64) -> Duration {
    Duration::from_nanos(ns.saturating_sub(clock::now()))
}

/// Reads lines on a separate thread, because a read from a terminal cannot be cancelled. The thread ends with
/// the process.
fn keyboard() -> mpsc::Receiver<String> {
    let (sender, receiver) = mpsc::channel(1);
    thread::spawn(move || {
        for line in io::stdin().lock().lines().map_while(Result::ok) {
            if sender.blocking_send(line).is_err() {
                return;
            }
        }
    });
    receiver
}

#[cfg(test)]
mod tests {
    use super::*;

    fn desk(left: Option<u64>) -> (Desk, mpsc::Receiver<DecideRequest>) {
        let (to_server, answers) = mpsc::channel(ANSWERS);
        let desk = Desk {
            always: None,
            left,
            labels: Labels::default(),
            headed: false,
            open: VecDeque::new(),
            to_server,
        };
        (desk, answers)
    }

    fn question(token: u64, deadline_ns: u64) -> DecideResponse {
        DecideResponse {
            what: Some(decide_response::What::Question(Question {
                token,
                event: None,
                deadline_ns,
            })),
            ..Default::default()
        }
    }

    /// Returns the token and the decision of the next answer.
    fn answered(answers: &mut mpsc::Receiver<DecideRequest>) -> (u64, String) {
        match answers.try_recv().unwrap().what {
            Some(decide_request::What::Answer(answer)) => (
                answer.token,
                language::text::decision(&Decision::from_wire(answer.decision.unwrap()).unwrap()),
            ),
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn questions_are_answered_in_order_and_mistakes_can_be_corrected() {
        let (mut desk, mut answers) = desk(Some(2));
        assert_eq!(desk.typed("return=1").await, Next::More);
        for token in [5, 6] {
            let next = desk.take(question(token, u64::MAX)).await;
            assert_eq!(next.unwrap(), Next::More);
        }
        assert_eq!(desk.typed("retrun=1").await, Next::More);
        assert!(answers.try_recv().is_err());
        assert_eq!(desk.typed(" return=-EIO ").await, Next::More);
        assert_eq!(answered(&mut answers), (5, "return=-EIO".to_owned()));
        assert_eq!(desk.typed("").await, Next::Done);
        assert_eq!(answered(&mut answers), (6, "proceed".to_owned()));
    }

    #[tokio::test]
    async fn expired_question_is_dropped_and_the_next_one_put() {
        let (mut desk, mut answers) = desk(None);
        for (token, deadline) in [(1, 0), (2, u64::MAX)] {
            desk.take(question(token, deadline)).await.unwrap();
        }
        desk.expiry().await;
        assert_eq!(desk.expired(), Next::More);
        assert_eq!(desk.typed("jump=0x10").await, Next::More);
        assert_eq!(answered(&mut answers), (2, "jump=0x10".to_owned()));
    }

    #[tokio::test]
    async fn same_answer_is_given_every_time() {
        let (mut desk, mut answers) = desk(None);
        desk.always = Some(language::decision("%ax=1").unwrap());
        desk.take(question(9, u64::MAX)).await.unwrap();
        assert_eq!(answered(&mut answers), (9, "%ax=0x1".to_owned()));
    }
}
