//! Description of a histogram's keys and values.
//!
//! Invariants: a type is converted once, when the server describes it, and not for each number. No name contains
//! control characters for a terminal.

use hvprobe_proto::v1::{self, HistogramField, HistogramForm};
use hvprobe_proto::wire::Wire as _;
use hvprobe_spec::shape::{Shape, ShapeKind};

use crate::output::printable::harmless;

/// Description of a histogram.
#[derive(Debug, Default)]
pub(crate) struct Schema {
    /// The histogram with all defaults filled in.
    pub(crate) histogram: String,
    /// Keys.
    pub(crate) keys: Vec<Key>,
    /// Summed fields.
    pub(crate) values: Vec<HistogramField>,
}

/// Key of a histogram.
#[derive(Debug)]
pub(crate) struct Key {
    /// Name of the field.
    pub(crate) name: String,
    /// How the field becomes a key.
    pub(crate) form: HistogramForm,
    /// Width of a bucket.
    pub(crate) width: u64,
    /// Type of the field; `None` if it is unknown.
    pub(crate) shape: Option<Shape>,
}

impl From<v1::HistogramSchema> for Schema {
    fn from(wire: v1::HistogramSchema) -> Self {
        let values = wire.values.into_iter().map(|field| HistogramField {
            name: harmless(field.name.as_bytes()),
            ..field
        });
        Self {
            histogram: harmless(wire.histogram.as_bytes()),
            keys: wire.keys.into_iter().map(Key::from).collect(),
            values: values.collect(),
        }
    }
}

/// Shape for an invalid type. Values of this shape are shown as unknown.
const UNKNOWN: Shape = Shape {
    name: String::new(),
    size: 0,
    kind: ShapeKind::Unknown,
};

impl From<v1::HistogramKey> for Key {
    fn from(wire: v1::HistogramKey) -> Self {
        Self {
            name: harmless(wire.name.as_bytes()),
            form: wire.form(),
            width: wire.width,
            shape: wire
                .r#type
                .map(|ty| Shape::from_wire(ty).unwrap_or(UNKNOWN)),
        }
    }
}

impl Key {
    /// Returns whether the values of the key are addresses that are shown as symbols.
    pub(crate) fn is_symbol(&self) -> bool {
        matches!(
            self.form,
            HistogramForm::Symbol | HistogramForm::SymbolOffset
        )
    }
}
