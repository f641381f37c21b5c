//! Requests that a client can repeat without having them done twice.
//!
//! Invariant: while one of an id is under way, another one of that id waits for its answer; it goes on, and its
//! answer is kept, if the client that sent it is gone, as that is when it is sent again. As many answers are
//! kept as [`KEPT`]. What failed is not kept, as nothing was done.

use std::collections::VecDeque;
use std::future::Future;
use std::sync::Arc;

use hvprobe_proto::v1::{RegisterRequest, RegisterResponse};
use tokio::sync::Mutex;
use tonic::Status;

use crate::identity::{hash, request_id, reused};
use crate::status::broken;

/// The most answers that are kept.
const KEPT: usize = 256;

/// The answers to requests of one machine.
#[derive(Debug, Default)]
pub(crate) struct Requests(Mutex<VecDeque<Answered>>);

#[derive(Debug)]
struct Answered {
    id: String,
    /// Of all that the request said.
    hash: u64,
    answer: RegisterResponse,
}

impl Requests {
    /// Has `request` done, unless it has been.
    pub(crate) async fn once<F>(
        self: Arc<Self>,
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
        let doing = tokio::spawn(async move { self.do_once(request, done).await });
        doing.await.map_err(|_| broken("a registration"))?
    }

    async fn do_once<F>(
        &self,
        request: RegisterRequest,
        done: impl FnOnce(RegisterRequest) -> F,
    ) -> Result<RegisterResponse, Status>
    where
        F: Future<Output = Result<RegisterResponse, Status>>,
    {
        let id = request.request_id.clone();
        let hash = hash(&request);
        let mut answers = self.0.lock().await;
        if let Some(known) = answers.iter().find(|known| known.id == id) {
            if known.hash != hash {
                return Err(reused(&id));
            }
            return Ok(known.answer.clone());
        }
        let answer = done(request).await?;
        if answers.len() == KEPT {
            answers.pop_front();
        }
        let kept = answer.clone();
        answers.push_back(Answered {
            id,
            hash,
            answer: kept,
        });
        Ok(answer)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;

    use tokio::sync::oneshot;
    use tonic::Code;

    use super::*;

    fn request(id: &str, machine: &str) -> RegisterRequest {
        RegisterRequest {
            request_id: id.to_owned(),
            machine: machine.to_owned(),
            ..Default::default()
        }
    }

    #[tokio::test]
    async fn what_is_repeated_is_done_once_and_answered_as_before() {
        let (requests, done) = (Arc::<Requests>::default(), Arc::new(AtomicU32::new(0)));
        let ask = async |id: &str, machine: &str| {
            let done = Arc::clone(&done);
            let answer = Arc::clone(&requests).once(request(id, machine), |request| async move {
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
        // What failed can be tried again.
        assert_eq!(ask("c", "fails").await, Err(Code::Internal));
        assert_eq!(ask("c", "m").await, Ok(vec![4]));
        // In the end it is forgotten.
        for number in 0..KEPT {
            assert!(ask(&format!("n{number}"), "m").await.is_ok());
        }
        let again = ask("a", "m").await.unwrap();
        assert_ne!(again, [0]);
    }

    #[tokio::test]
    async fn what_its_client_did_not_wait_for_is_done_and_answered_when_it_asks_again() {
        let requests = Arc::<Requests>::default();
        let done = Arc::new(AtomicU32::new(0));
        let (begun, has_begun) = oneshot::channel();
        let (go, may_go) = oneshot::channel::<()>();
        let first = Arc::clone(&requests).once(request("a", "m"), {
            let done = Arc::clone(&done);
            |_| async move {
                begun.send(()).unwrap();
                may_go.await.unwrap();
                done.fetch_add(1, Ordering::Relaxed);
                Ok(RegisterResponse::default())
            }
        });
        // The client is gone in the middle of it.
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
}
