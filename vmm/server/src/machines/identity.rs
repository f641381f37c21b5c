//! Identity of a machine: its UUID, which no other machine of its name has, and the request that created it.

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::sync::OnceLock;

use hvprobe_proto::Failure;
use hvprobe_proto::v1::{self, ErrorKind};
use prost::Message;
use tonic::Status;

use crate::bounds::limits;
use crate::uuid;
use crate::wire::anchor;

/// Maximum number of labels of a machine.
const LABELS: usize = 64;
/// Maximum length of a request's id, in bytes.
const REQUEST_ID: usize = 128;

/// What a client says about a machine besides its configuration. Two values are equal only if the requests are
/// equal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Asked {
    /// Id of the request, chosen by the client; empty if it has none.
    pub(crate) request_id: String,
    pub(crate) labels: BTreeMap<String, String>,
    /// Hash of everything else in the request.
    pub(crate) hash: u64,
}

impl Asked {
    /// Checks the id and the labels of a request; `rest` is everything else in it.
    pub(crate) fn new(
        request_id: String,
        labels: impl IntoIterator<Item = (String, String)>,
        rest: &impl Message,
    ) -> Result<Self, Status> {
        let labels: BTreeMap<_, _> = labels.into_iter().collect();
        bounded(&request_id, labels.len())?;
        for (key, value) in &labels {
            label(key)?;
            if !value.is_empty() {
                label(value)?;
            }
        }
        Ok(Self {
            request_id,
            labels,
            hash: hash(rest),
        })
    }
}

/// Checks the length of a request's id and the number of its labels.
pub(crate) fn bounded(request_id: &str, labels: usize) -> Result<(), Status> {
    self::request_id(request_id)?;
    limits::at_most("the number of labels", labels, LABELS).map_err(Status::from)
}

/// Hashes all of `request`. The message must not contain maps, because they have no order.
pub(crate) fn hash(request: &impl Message) -> u64 {
    let mut hasher = DefaultHasher::new();
    request.encode_to_vec().hash(&mut hasher);
    hasher.finish()
}

/// Checks the `labels` of a search: they may be as many and as long as those of a machine.
pub(crate) fn few_labels(
    labels: HashMap<String, String>,
) -> Result<BTreeMap<String, String>, Status> {
    limits::at_most("the number of labels", labels.len(), LABELS)?;
    for text in labels.iter().flat_map(|(name, value)| [name, value]) {
        limits::at_most("a label", text.len(), limits::NAME)?;
    }
    Ok(labels.into_iter().collect())
}

/// Returns the error for an id that was used for another request.
pub(crate) fn reused(request_id: &str) -> Status {
    let message = format!("the request's id {request_id:?} was used for another request");
    Failure::invalid(ErrorKind::RequestIdReused, message)
        .on("request_id")
        .into()
}

/// Checks that `id` can be the id of a request.
pub(crate) fn request_id(id: &str) -> Result<(), Status> {
    limits::at_most("the request's id", id.len(), REQUEST_ID).map_err(Status::from)
}

/// Checks that `text` can be in a label.
fn label(text: &str) -> Result<(), Status> {
    limits::machine_name(text).map_err(|_| {
        let message = format!(
            "bad label {text:?}: its name, and what is not empty of its value, are made as the name of a \
             machine is"
        );
        Failure::invalid(ErrorKind::BadName, message).into()
    })
}

/// Identity of a machine.
#[derive(Debug)]
pub(crate) struct Identity {
    uid: String,
    asked: Asked,
    created_ns: u64,
    ended_ns: OnceLock<u64>,
}

impl Identity {
    /// Creates the identity of a machine that is created now.
    ///
    /// # Errors
    /// When the host returns no random numbers.
    pub(crate) fn new(asked: Asked) -> io::Result<Self> {
        Ok(Self {
            uid: uuid::random()?,
            asked,
            created_ns: anchor::now().monotonic_ns,
            ended_ns: OnceLock::new(),
        })
    }

    /// Returns the UUID of the machine.
    pub(crate) fn uid(&self) -> &str {
        &self.uid
    }

    /// Sets the time of the end to now, unless it is set.
    pub(crate) fn end(&self) {
        self.ended_ns.get_or_init(|| anchor::now().monotonic_ns);
    }

    /// Returns what the client asked for.
    pub(crate) fn asked(&self) -> &Asked {
        &self.asked
    }

    /// Whether the machine has all of these labels, which [`few_labels`] has checked.
    pub(crate) fn has(&self, labels: &BTreeMap<String, String>) -> bool {
        let has = |(key, value)| self.asked.labels.get(key) == Some(value);
        labels.iter().all(has)
    }

    /// Sets the identity in the description of the machine.
    pub(crate) fn fill(&self, machine: &mut v1::Machine) {
        machine.uid.clone_from(&self.uid);
        machine.labels = self.asked.labels.clone().into_iter().collect();
        machine.create_ns = self.created_ns;
        machine.end_ns = self.ended_ns.get().copied();
    }
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;

    #[test]
    fn labels_are_short_and_plain_and_few() {
        let asked = |labels: &[(&str, &str)]| {
            let labels = labels
                .iter()
                .map(|(key, value)| (key.to_string(), value.to_string()));
            Asked::new(String::new(), labels, &())
        };
        assert!(asked(&[("team", "kernel"), ("ci", "")]).is_ok());
        for bad in [("", "x"), ("a b", "x"), ("a", "b\n"), ("a", "-")] {
            let error = asked(&[bad]).unwrap_err();
            assert_eq!(error.code(), Code::InvalidArgument, "{bad:?}");
            assert!(error.message().contains("bad label"), "{error}");
        }
        let many = (0..=LABELS).map(|number| (format!("l{number}"), String::new()));
        assert!(Asked::new(String::new(), many, &()).is_err());
        assert!(Asked::new("x".repeat(REQUEST_ID + 1), [], &()).is_err());
    }

    #[test]
    fn labels_that_no_machine_can_have_are_not_kept_by_who_looks_for_them() {
        let few = |count: usize, length: usize| {
            let labels = (0..count).map(|number| (format!("l{number}"), "x".repeat(length)));
            few_labels(labels.collect()).map(|few| few.len())
        };
        assert_eq!(few(LABELS, limits::NAME).unwrap(), LABELS);
        for (count, length) in [(LABELS + 1, 0), (1, limits::NAME + 1)] {
            let error = few(count, length).unwrap_err();
            assert_eq!(error.code(), Code::InvalidArgument, "{error}");
        }
    }

    #[test]
    fn machines_are_found_by_labels() {
        let labels = [
            ("a".to_owned(), "1".to_owned()),
            ("b".to_owned(), String::new()),
        ];
        let asked = Asked::new(String::new(), labels, &()).unwrap();
        let identity = Identity::new(asked).unwrap();
        let has = |labels: &[(&str, &str)]| {
            let labels = labels
                .iter()
                .map(|(key, value)| (key.to_string(), value.to_string()));
            identity.has(&labels.collect())
        };
        assert!(has(&[]) && has(&[("a", "1")]) && has(&[("a", "1"), ("b", "")]));
        assert!(!has(&[("a", "2")]) && !has(&[("c", "")]));
        identity.end();
        let mut description = v1::Machine::default();
        identity.fill(&mut description);
        assert_eq!(description.labels.len(), 2);
        assert!(
            description.end_ns >= Some(description.create_ns),
            "{description:?}"
        );
    }
}
