//! Which fields of a machine a client wants to read (AIP-157).

use std::collections::BTreeSet;

use hvprobe_proto::Failure;
use hvprobe_proto::v1::{Ending, ErrorKind, Machine};
use prost_types::FieldMask;

use crate::bounds::limits;

/// Maximum number of paths in a mask: far more than there are fields.
const PATHS: usize = 256;

/// Function that moves a field from the second machine to the first.
type Take = fn(&mut Machine, &mut Machine);

/// Makes the table of a message's fields, by name.
macro_rules! fields {
    ($($name:ident),+ $(,)?) => {
        [$((stringify!($name), (|to, from| to.$name = std::mem::take(&mut from.$name)) as Take)),+]
    };
}

/// Makes the table of the fields of a machine's ending, by name.
macro_rules! of_ending {
    ($($name:ident),+ $(,)?) => {
        [$((concat!("ending.", stringify!($name)), (|to, from| {
            if let Some(from) = &mut from.ending {
                let ending = to.ending.get_or_insert_with(Ending::default);
                ending.$name = std::mem::take(&mut from.$name);
            }
        }) as Take)),+]
    };
}

const FIELDS: [(&str, Take); 23] = fields![
    name,
    state,
    catch_mode,
    kernel,
    cpus,
    memory,
    ending,
    first_entry_ns,
    stopped_at,
    disarmed,
    skipped,
    probe_ids,
    probe_entries,
    kernel_replaced,
    kernel_build_id,
    kernel_offset,
    anchor,
    runs,
    uid,
    labels,
    create_ns,
    end_ns,
    paused_by,
];

const OF_ENDING: [(&str, Take); 3] = of_ending![reason, guest_status, report];

/// Fields of each machine that a client wants to read.
#[derive(Clone, Debug)]
pub(crate) struct Mask {
    /// `None` for all fields.
    fields: Option<BTreeSet<String>>,
}

impl Mask {
    /// Reads the mask of a request.
    ///
    /// # Errors
    /// When it has too many paths, or names an unknown field.
    pub(crate) fn new(mask: Option<FieldMask>) -> Result<Self, Failure> {
        let bad = |why: String| Failure::invalid(ErrorKind::BadReadMask, why).on("read_mask");
        let Some(FieldMask { paths }) = mask.filter(|mask| !mask.paths.is_empty()) else {
            return Ok(Self { fields: None });
        };
        if paths.len() > PATHS {
            return Err(bad(format!(
                "the read mask is too large: {} paths, at most {PATHS}",
                paths.len()
            )));
        }
        if paths == ["*"] {
            return Ok(Self { fields: None });
        }
        for path in &paths {
            let mut known = FIELDS.iter().chain(&OF_ENDING);
            if !known.any(|(name, _)| name == path) {
                // A name may be as long as a message, so only its beginning is shown.
                let shown: String = path.chars().take(limits::SHOWN).collect();
                return Err(bad(format!("a machine has no field {shown:?}")));
            }
        }
        Ok(Self {
            fields: Some(paths.into_iter().collect()),
        })
    }

    /// Adds these fields.
    pub(crate) fn with<const N: usize>(mut self, names: [&str; N]) -> Self {
        if let Some(fields) = &mut self.fields {
            fields.extend(names.map(str::to_owned));
        }
        self
    }

    /// Returns `machine` with only the wanted fields.
    pub(crate) fn of(&self, mut machine: Machine) -> Machine {
        let Some(wanted) = &self.fields else {
            return machine;
        };
        let mut masked = Machine::default();
        // Parts of the ending are moved only if it is not wanted as a whole.
        for (_, take) in OF_ENDING.iter().filter(|(name, _)| wanted.contains(*name)) {
            if !wanted.contains("ending") {
                take(&mut masked, &mut machine);
            }
        }
        for (_, take) in FIELDS.iter().filter(|(name, _)| wanted.contains(*name)) {
            take(&mut masked, &mut machine);
        }
        masked
    }
}

#[cfg(test)]
mod tests {
    use hvprobe_proto::FILE_DESCRIPTOR_SET;
    use hvprobe_proto::v1::{EndReason, MachineState};
    use prost::Message as _;
    use prost_types::FileDescriptorSet;
    use tonic::Code;
    use tonic::Status;

    use super::*;
    use crate::status::tests::detail;

    fn mask(paths: &[&str]) -> Result<Mask, Failure> {
        let paths = paths.iter().map(|path| path.to_string()).collect();
        Mask::new(Some(FieldMask { paths }))
    }

    fn machine() -> Machine {
        Machine {
            name: "web".into(),
            state: MachineState::Stopped.into(),
            uid: "u".into(),
            ending: Some(Ending {
                reason: EndReason::Crash.into(),
                guest_status: Some(3),
                report: "long".into(),
            }),
            ..Default::default()
        }
    }

    #[test]
    fn every_field_can_be_named() {
        let files = FileDescriptorSet::decode(FILE_DESCRIPTOR_SET).unwrap();
        let fields = |message: &str| {
            let mut all = files.file.iter().flat_map(|file| &file.message_type);
            let found = all.find(|found| found.name() == message).unwrap();
            let names = found.field.iter().map(|field| field.name().to_owned());
            names.collect::<BTreeSet<_>>()
        };
        let known = FIELDS.iter().map(|(name, _)| name.to_string());
        assert_eq!(known.collect::<BTreeSet<_>>(), fields("Machine"));
        let known = OF_ENDING.iter().map(|(name, _)| name.to_string());
        let parts = fields("Ending")
            .into_iter()
            .map(|name| format!("ending.{name}"));
        assert_eq!(known.collect::<BTreeSet<_>>(), parts.collect());
    }

    #[test]
    fn what_is_not_wanted_is_not_sent() {
        for all in [Mask::new(None), mask(&[]), mask(&["*"])] {
            assert_eq!(all.unwrap().of(machine()), machine());
        }
        let masked = mask(&["name", "ending.reason"]).unwrap().of(machine());
        let ending = Ending {
            reason: EndReason::Crash.into(),
            ..Default::default()
        };
        let expected = Machine {
            name: "web".into(),
            ending: Some(ending),
            ..Default::default()
        };
        assert_eq!(masked, expected);
        let masked = mask(&["ending.report", "ending"]).unwrap().of(machine());
        assert_eq!(masked.ending, machine().ending);
        let masked = mask(&["state"])
            .unwrap()
            .with(["name", "uid"])
            .of(machine());
        assert_eq!((masked.name.as_str(), masked.uid.as_str()), ("web", "u"));
        assert_eq!(masked.ending, None);
        // A machine that has not ended has no ending to return a part of.
        let masked = mask(&["ending.report"]).unwrap().of(Machine::default());
        assert_eq!(masked.ending, None);
    }

    #[test]
    fn a_mask_that_makes_no_sense_is_refused() {
        let many = vec!["name"; PATHS + 1];
        for bad in [&["nmae"][..], &["ending.x"], &["name", "*"], &[""], &many] {
            let status = Status::from(mask(bad).unwrap_err());
            assert_eq!(status.code(), Code::InvalidArgument, "{bad:?}");
            assert_eq!(detail(&status).kind(), ErrorKind::BadReadMask);
        }
    }
}
