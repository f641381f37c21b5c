//! The parameters and local variables at an address, and their locations.
//!
//! Invariants: a name stands for one variable, the innermost of that name. A location holds only for the one
//! address that was asked for, because the compiler moves variables from instruction to instruction.

use std::cell::OnceCell;

use gimli::{
    AttributeValue, BaseAddresses, CfaRule, DebugFrame, LittleEndian, UnitOffset, UnwindContext,
    UnwindSection as _, constants as dw,
};

use super::error::DebugError;
use super::info::{DebugInfo, Entry, Reader, Unit};
use super::location::{Frame, Location, Sum, constant, location, sum};
use super::points::PointPlace;
use super::scopes::Scopes;
use super::typename::reference;

/// Maximum number of steps from a variable to the entry with its name.
const MOST_STEPS: usize = 8;
/// Maximum number of variables at one address.
const MOST_VARIABLES: usize = 4096;

/// A parameter or a local variable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Variable {
    /// The name of the variable.
    pub name: String,
    /// Its declaration in C.
    pub declaration: String,
    /// Whether it is a parameter of its function.
    pub is_parameter: bool,
    /// Location of the value.
    pub location: Location,
    pub(super) unit: usize,
    pub(super) ty: Option<UnitOffset>,
}

/// Name and type of a variable, from its own entry or from its abstract origin.
struct Described<'f> {
    name: &'f [u8],
    ty: Option<UnitOffset>,
}

impl<'f> DebugInfo<'f> {
    /// Returns the variables at a place, in the order in which they are declared.
    ///
    /// # Errors
    /// If the debug information is damaged.
    pub fn variables(&self, place: &PointPlace) -> Result<Vec<Variable>, DebugError> {
        self.budget.begin();
        let unit = self.unit(place.unit)?;
        let Some(start) = place.scope else {
            return Ok(Vec::new());
        };
        let at = place.at.0;
        let wrong = |source| unit.damaged(".debug_info", source);
        let own = unit.own_code(start)?;
        let read = OnceCell::new();
        let cfa = || {
            let cfa = read.get_or_init(|| unit.cfa(at));
            cfa.as_ref().ok().cloned().flatten()
        };
        let no_base = || None;
        let outer = Frame {
            base: &no_base,
            cfa: &cfa,
            is_entry: false,
        };
        let base = || {
            let base = own.as_ref()?.attr_value(dw::DW_AT_frame_base)?;
            let expression = unit.expression(base, at).ok()??;
            sum(expression, unit.own.encoding(), &outer)
        };
        let begins = match &own {
            Some(own) => unit.ranges(own)?.first().map(|it| it.start),
            None => None,
        };
        let frame = Frame {
            base: &base,
            cfa: &cfa,
            is_entry: begins == Some(at),
        };
        let mut found: Vec<(isize, Variable)> = Vec::new();
        let mut entries = unit.own.entries_raw(Some(start)).map_err(wrong)?;
        let mut entry = Entry::null();
        // Depth of the entry whose children are skipped.
        let mut skipped = None;
        loop {
            let depth = entries.next_depth();
            if entries.is_empty() || (entry.offset() != UnitOffset(0) && depth <= 0) {
                break;
            }
            let is_entry = entries.read_entry(&mut entry).map_err(wrong)?;
            self.budget.spend(entry.attrs().len() + 1)?;
            if !is_entry || skipped.is_some_and(|outer| depth > outer) {
                continue;
            }
            skipped = None;
            if depth == 0 {
                if !entry.has_children() {
                    break;
                }
                continue;
            }
            match entry.tag() {
                dw::DW_TAG_lexical_block => {
                    let block = unit.ranges(&entry)?;
                    if !block.iter().any(|range| range.contains(&at)) {
                        skipped = Some(depth);
                    }
                }
                dw::DW_TAG_formal_parameter | dw::DW_TAG_variable => {
                    skipped = Some(depth);
                    if found.len() == MOST_VARIABLES {
                        return Err(DebugError::TooMuch);
                    }
                    if let Some(one) = unit.variable(&entry, at, &frame)? {
                        let same = |(_, other): &(isize, Variable)| other.name == one.name;
                        match found.iter().position(same) {
                            Some(known) if found[known].0 < depth => found[known] = (depth, one),
                            Some(_) => {}
                            None => found.push((depth, one)),
                        }
                    }
                }
                _ => skipped = Some(depth),
            }
        }
        // Fails if the frame table could not be read: no location is reliable then.
        read.into_inner().transpose()?;
        Ok(found.into_iter().map(|(_, variable)| variable).collect())
    }
}

impl<'f> Unit<'_, 'f> {
    /// Returns the canonical frame address at `at`: the stack pointer before the call of the function.
    fn cfa(&self, at: u64) -> Result<Option<Sum>, DebugError> {
        let bytes = self.info.file.frame()?;
        self.info.budget.spend(bytes.len())?;
        let frame = DebugFrame::new(bytes, LittleEndian);
        let (bases, mut context) = (BaseAddresses::default(), UnwindContext::new());
        let cie = DebugFrame::cie_from_offset;
        match frame.unwind_info_for_address(&bases, &mut context, at, cie) {
            Ok(row) => Ok(match row.cfa() {
                CfaRule::RegisterAndOffset { register, offset } => Sum::new(*register, *offset),
                CfaRule::Expression(_) => None,
            }),
            Err(gimli::Error::NoUnwindInfoForAddress) => Ok(None),
            Err(source) => Err(self.damaged(".debug_frame", source)),
        }
    }

    /// Returns the entry of the outermost function around the scope at `start`: the one that was not inlined.
    fn own_code(&self, start: UnitOffset) -> Result<Option<Entry<'f>>, DebugError> {
        let scopes = Scopes::read(self)?;
        let number = scopes.list.iter().position(|scope| scope.at == start);
        let outer = number.and_then(|number| scopes.list.get(scopes.outermost(number)));
        outer.map(|outer| self.entry(outer.at)).transpose()
    }

    fn variable(
        &self,
        entry: &Entry<'f>,
        at: u64,
        frame: &Frame<'_>,
    ) -> Result<Option<Variable>, DebugError> {
        if entry.has_attr(dw::DW_AT_declaration) {
            return Ok(None);
        }
        let Some(described) = self.described(entry)? else {
            return Ok(None);
        };
        let name = String::from_utf8_lossy(described.name).into_owned();
        let location = match entry.attr_value(dw::DW_AT_location) {
            Some(value) => match self.expression(value, at)? {
                Some(expression) => {
                    let (location, steps) = location(expression, self.own.encoding(), frame);
                    self.info.budget.spend(steps)?;
                    location
                }
                None => Location::Nowhere("not kept here"),
            },
            None => match entry.attr_value(dw::DW_AT_const_value) {
                Some(value) => constant_value(&value),
                None => Location::Nowhere("optimised out"),
            },
        };
        Ok(Some(Variable {
            declaration: self.declaration(described.ty, &name)?,
            unit: self.index,
            ty: described.ty,
            name,
            is_parameter: entry.tag() == dw::DW_TAG_formal_parameter,
            location,
        }))
    }

    /// Returns the name and type of a variable. They may come from the abstract origins of `entry`.
    fn described(&self, entry: &Entry<'f>) -> Result<Option<Described<'f>>, DebugError> {
        let (mut name, mut ty) = (None, None);
        let mut next = None;
        for _ in 0..MOST_STEPS {
            let entry = next.as_ref().unwrap_or(entry);
            name = name.or_else(|| self.text(entry.attr_value(dw::DW_AT_name)?));
            ty = ty.or_else(|| reference(entry.attr_value(dw::DW_AT_type)));
            let origin = entry.attr_value(dw::DW_AT_abstract_origin);
            let Some(origin) = reference(origin) else {
                break;
            };
            next = Some(self.entry(origin)?);
        }
        Ok(name.map(|name| Described { name, ty }))
    }

    /// Returns the expression that applies at `at`; `None` if there is none. `value` is a single expression or a
    /// location list.
    fn expression(
        &self,
        value: AttributeValue<Reader<'f>>,
        at: u64,
    ) -> Result<Option<gimli::Expression<Reader<'f>>>, DebugError> {
        if let AttributeValue::Exprloc(expression) = value {
            return Ok(Some(expression));
        }
        let wrong = |source| self.damaged(".debug_loclists", source);
        let dwarf = self.info.with_locations()?;
        let list = dwarf.attr_locations(&self.own, value).map_err(wrong)?;
        let Some(mut list) = list else {
            return Ok(None);
        };
        while let Some(entry) = list.next().map_err(wrong)? {
            self.info.budget.spend(1)?;
            if (entry.range.begin..entry.range.end).contains(&at) {
                return Ok(Some(entry.data));
            }
        }
        Ok(None)
    }
}

fn constant_value(value: &AttributeValue<Reader<'_>>) -> Location {
    match value {
        AttributeValue::Block(bytes) => constant(bytes.slice()),
        value => match (value.sdata_value(), value.udata_value()) {
            (_, Some(value)) => Location::Constant(value.cast_signed()),
            (Some(value), None) => Location::Constant(value),
            (None, None) => Location::Nowhere("a constant that is no number"),
        },
    }
}
