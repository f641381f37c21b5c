//! Requests that a client can repeat, and that are carried out only once.
//!
//! ```text
//!   waits ──its turn──► under way ──done──► kept ──too many, too long, the machine has ended──► forgotten
//!     │                     └──failed──► forgotten, as nothing was done
//!     └──its client is gone──► forgotten
//! ```
//! Invariants: each machine has at most one request with an id under way. A request under way continues, and its
//! answer is kept, even if its client is gone, because such a client repeats its request. A waiting request ends
//! with its client's call, because nothing else holds it. The last answers are kept: at most [`KEPT`] of them, with
//! at most [`BYTES`] bytes in total, but always the last one.

use std::collections::VecDeque;
use std::future::Future;
use std::sync::Arc;

use hvprobe_proto::v1::{RegisterRequest, RegisterResponse};
use prost::Message as _;
use tokio::sync::Mutex;
use tonic::Status;

use super::identity::{hash, request_id, reused};
use crate::status::broken;

/// Maximum number of answers that are kept.
const KEPT: usize = 256;
/// Maximum encoded bytes of the answers that are kept.
const BYTES: usize = 1 << 20;

/// Answers to the requests of one machine.
#[derive(Debug, Default)]
pub(crate) struct Requests(Arc<Mutex<Answers>>);

#[derive(Debug, Default)]
struct Answers {
    kept: VecDeque<Answered>,
    bytes: usize,
}

#[derive(Debug)]
struct Answered {
    id: String,
    /// Hash of the whole request.
    hash: u64,
    answer: RegisterResponse,
}

impl Answered {
    fn bytes(&self) -> usize {
        self.id.len() + self.answer.encoded_len()
    }
}

impl Answers {
    /// Keeps `answered`, and drops the oldest answers to make room.
    fn push(&mut self, answered: Answered) {
        self.bytes += answered.bytes();
        self.kept.push_back(answered);
        while (self.kept.len() > KEPT || self.bytes > BYTES)
            && self.kept.len() > 1
            && let Some(oldest) = self.kept.pop_front()
        {
            self.bytes -= oldest.bytes();
        }
    }
}

impl Requests {
    /// Drops all answers, once the request under way is done. Blocks.
    pub(crate) fn forget(&self) {
        *self.0.blocking_lock() = Answers::default();
    }

    /// Carries out `request` by calling `done`, and returns the answer. If the answer to the same request is kept,
    /// returns that instead.
    pub(crate) async fn once<F>(
        &self,
        request: RegisterRequest,
        done: impl FnOnce(RegisterRequest) -> F + Send + 'static,
    ) -> Result<RegisterResponse, Status>
    where
        F: Future<Output = Result<RegisterResponse, Status>> + Send,
    {
        if request.request_id.is_empty() {
            return done(request).await;
        }
        request_id(&request.request_id)?;
        let id = request.request_id.clone();
        let hash = hash(&request);
        let mut answers = Arc::clone(&self.0).lock_owned().await;
        if let Some(known) = answers.kept.iter().find(|known| known.id == id) {
            if known.hash != hash {
                return Err(reused(&id));
            }
            return Ok(known.answer.clone());
        }
        let doing = tokio::spawn(async move {
            let answer = done(request).await?;
            answers.push(Answered {
                id,
                hash,
                answer: answer.clone(),
            });
            Ok(answer)
        });
        doing.await.map_err(|_| broken("a registration"))?
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::pin::Pin;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::task::Poll;
    use std::time::Duration;

    use tokio::sync::oneshot;
    use tonic::Code;

    use super::*;

    /// Polls `future` once.
    async fn poll<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
        poll_fn(|cx| Poll::Ready(Pin::new(&mut *future).poll(cx))).await
    }

    fn request(id: &str, machine: &str) -> RegisterRequest {
        RegisterRequest {
            request_id: id.to_owned(),
            machine: machine.to_owned(),
            ..Default::default()
        }
    }

    #[tokio::test]
    async fn what_is_repeated_is_done_once_and_answered_as_before() {
        let (requests, done) = (Requests::default(), Arc::new(AtomicU32::new(0)));
        let ask = async |id: &str, machine: &str| {
            let done = Arc::clone(&done);
            let answer = requests.once(request(id, machine), |request| async move {
                if request.machine == "fails" {
                    return Err(Status::internal("it fails"));
                }
                Ok(RegisterResponse {
                    ids: vec![done.fetch_add(1, Ordering::Relaxed)],
                    ..Default::default()
                })
            });
            answer
                .await
                .map(|answer| answer.ids)
                .map_err(|status| status.code())
        };
        assert_eq!(ask("a", "m").await, Ok(vec![0]));
        assert_eq!(ask("a", "m").await, Ok(vec![0]));
        assert_eq!(ask("b", "m").await, Ok(vec![1]));
        assert_eq!(ask("a", "other").await, Err(Code::InvalidArgument));
        assert_eq!(ask("", "m").await, Ok(vec![2]));
        assert_eq!(ask("", "m").await, Ok(vec![3]));
        // A request that failed can be tried again.
        assert_eq!(ask("c", "fails").await, Err(Code::Internal));
        assert_eq!(ask("c", "m").await, Ok(vec![4]));
        // Old answers are dropped.
        for number in 0..KEPT {
            assert!(ask(&format!("n{number}"), "m").await.is_ok());
        }
        let again = ask("a", "m").await.unwrap();
        assert_ne!(again, [0]);
    }

    #[tokio::test]
    async fn answers_are_kept_within_bounds_and_until_the_machine_has_ended() {
        /// Two answers of this length are within the bound, three are not.
        const IDS: usize = 90_000;
        let requests = Requests::default();
        // A probe's id takes five bytes.
        let ask = async |id: &str, length: usize| {
            let answer = requests.once(request(id, "m"), move |_| async move {
                let ids = vec![u32::MAX; length];
                Ok(RegisterResponse {
                    ids,
                    ..Default::default()
                })
            });
            assert_eq!(answer.await.unwrap().ids.len() % IDS, 0);
            let answers = requests.0.lock().await;
            let bytes: usize = answers.kept.iter().map(Answered::bytes).sum();
            assert_eq!(bytes, answers.bytes);
            let ids: Vec<_> = answers.kept.iter().map(|known| known.id.clone()).collect();
            (ids.join(""), bytes)
        };
        ask("a", IDS).await;
        let (kept, bytes) = ask("b", IDS).await;
        assert!(kept == "ab" && bytes > 10 * IDS, "{kept}: {bytes}");
        assert_eq!(ask("c", IDS).await.0, "bc");
        // The last answer is kept even if it exceeds the limit.
        let (kept, bytes) = ask("d", 4 * IDS).await;
        assert!(kept == "d" && bytes > BYTES, "{kept}: {bytes}");
        assert_eq!(ask("d", 0).await.0, "d");
        assert_eq!(ask("e", 0).await.0, "e");
        let ended = Requests(Arc::clone(&requests.0));
        let forgetting = tokio::task::spawn_blocking(move || ended.forget());
        forgetting.await.unwrap();
        let answers = requests.0.lock().await;
        assert!(answers.kept.is_empty() && answers.bytes == 0, "{answers:?}");
    }

    #[tokio::test]
    async fn what_its_client_did_not_wait_for_is_done_and_answered_when_it_asks_again() {
        let requests = Requests::default();
        let done = Arc::new(AtomicU32::new(0));
        let (begun, has_begun) = oneshot::channel();
        let (go, may_go) = oneshot::channel::<()>();
        let first = requests.once(request("a", "m"), {
            let done = Arc::clone(&done);
            |_| async move {
                begun.send(()).unwrap();
                may_go.await.unwrap();
                done.fetch_add(1, Ordering::Relaxed);
                Ok(RegisterResponse::default())
            }
        });
        // The client disconnects while its request is carried out.
        tokio::select! {
            _ = first => panic!("it waits for nobody"),
            begun = has_begun => begun.unwrap(),
        }
        go.send(()).unwrap();
        let again = requests.once(request("a", "m"), |_| async { panic!("it is done twice") });
        let answer = tokio::time::timeout(Duration::from_mins(1), again).await;
        assert_eq!(
            answer.expect("an answer").unwrap(),
            RegisterResponse::default()
        );
        assert_eq!(done.load(Ordering::Relaxed), 1);
    }
    #[tokio::test]
    async fn what_its_client_did_not_wait_for_before_it_was_begun_is_not_done() {
        let requests = Requests::default();
        let (go, may_go) = oneshot::channel::<()>();
        let mut first = std::pin::pin!(requests.once(request("first", "m"), |_| async {
            may_go.await.unwrap();
            Ok(RegisterResponse::default())
        }));
        assert!(poll(&mut first).await.is_pending());
        let tasks = tokio::runtime::Handle::current().metrics();
        let before = tasks.num_alive_tasks();
        for number in 0..1000 {
            let id = format!("left-{number}");
            let mut left = std::pin::pin!(requests.once(request(&id, "m"), |_| async {
                panic!("nobody waits for it")
            }));
            assert!(poll(&mut left).await.is_pending());
        }
        assert_eq!(tasks.num_alive_tasks(), before);
        go.send(()).unwrap();
        first.await.unwrap();
        let next = requests.once(request("left-1", "m"), |_| async {
            Ok(RegisterResponse::default())
        });
        next.await.unwrap();
    }
}
