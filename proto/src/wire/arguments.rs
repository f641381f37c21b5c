//! The arguments of a probe: what each hit shows.

use hvprobe_spec::shape::Shape;
use hvprobe_spec::{Argument, Bits, Common, Source};

use super::enums::WireEnum as _;
use super::meaningless::Meaningless;
use super::registers::register;
use super::value::{Wire, small};
use crate::v1::{self, argument};

impl Wire for Argument {
    type Message = v1::Argument;

    fn to_wire(&self) -> v1::Argument {
        v1::Argument {
            name: self.name.clone(),
            source: Some(self.source.to_wire()),
            bits: self.bits.as_ref().map(Wire::to_wire),
            r#type: Some(self.shape.to_wire()),
        }
    }

    fn from_wire(wire: v1::Argument) -> Result<Self, Meaningless> {
        let source = wire.source;
        let source = source.ok_or(Meaningless::Missing("the source of an argument"))?;
        let ty = wire.r#type;
        let ty = ty.ok_or(Meaningless::Missing("the type of an argument"))?;
        Ok(Self {
            name: wire.name,
            source: Source::from_wire(source)?,
            bits: wire.bits.map(Bits::from_wire).transpose()?,
            shape: Shape::from_wire(ty)?,
        })
    }
}

impl Wire for Source {
    type Message = argument::Source;

    fn to_wire(&self) -> argument::Source {
        match self {
            Self::Registers { registers, entry } => {
                argument::Source::Registers(v1::ArgumentRegisters {
                    registers: registers.iter().map(|register| register.number()).collect(),
                    entry: *entry,
                })
            }
            // There are far fewer items than a `u32` can count.
            Self::Item(index) => argument::Source::Item(u32::try_from(*index).unwrap_or(u32::MAX)),
            Self::Constant(bytes) => argument::Source::Constant(bytes.clone()),
            Self::Common(common) => argument::Source::Field(common.number()),
        }
    }

    fn from_wire(wire: argument::Source) -> Result<Self, Meaningless> {
        Ok(match wire {
            argument::Source::Registers(wire) => Self::Registers {
                registers: wire
                    .registers
                    .into_iter()
                    .map(register)
                    .collect::<Result<_, _>>()?,
                entry: wire.entry,
            },
            argument::Source::Item(index) => Self::Item(small("an item", index)?),
            argument::Source::Constant(bytes) => Self::Constant(bytes),
            argument::Source::Field(number) => {
                let common = Common::numbered(number)?;
                Self::Common(common.ok_or(Meaningless::Missing("a field of an event"))?)
            }
        })
    }
}

impl Wire for Bits {
    type Message = v1::Bits;

    fn to_wire(&self) -> v1::Bits {
        v1::Bits {
            offset: self.offset.into(),
            width: self.width.into(),
        }
    }

    fn from_wire(wire: v1::Bits) -> Result<Self, Meaningless> {
        Ok(Self {
            offset: small("the offset of bits", wire.offset)?,
            width: small("a number of bits", wire.width)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use hvprobe_arch::regs::Gpr;
    use proptest::collection::vec;
    use proptest::option;
    use proptest::prelude::*;
    use proptest::sample::select;

    use super::*;
    use crate::wire::enums::WireEnum;
    use crate::wire::shapes::tests::any_shape;

    fn any_source() -> impl Strategy<Value = Source> {
        prop_oneof![
            (vec(select(Gpr::VALUES), 0..4), any::<bool>())
                .prop_map(|(registers, entry)| Source::Registers { registers, entry }),
            any::<u32>().prop_map(|index| Source::Item(usize::try_from(index).unwrap())),
            vec(any::<u8>(), 0..9).prop_map(Source::Constant),
            select(Common::VALUES).prop_map(Source::Common),
        ]
    }

    proptest! {
        #[test]
        fn arguments_come_back_as_they_went_out(
            name in ".{0,8}",
            source in any_source(),
            bits in option::of((any::<u8>(), any::<u8>())),
            shape in any_shape(),
        ) {
            let bits = bits.map(|(offset, width)| Bits { offset, width });
            let out = Argument { name, source, bits, shape };
            prop_assert_eq!(Argument::from_wire(out.to_wire()), Ok(out));
        }
    }

    #[test]
    fn what_means_nothing_is_refused_by_name() {
        let refused = |wire| Argument::from_wire(wire).unwrap_err().to_string();
        let good = v1::Argument {
            source: Some(argument::Source::Item(0)),
            r#type: Some(v1::Type::default()),
            ..Default::default()
        };
        Argument::from_wire(good.clone()).unwrap();
        let with = |source| v1::Argument {
            source,
            ..good.clone()
        };
        assert_eq!(refused(with(None)), "the source of an argument is missing");
        let field = |number| Some(argument::Source::Field(number));
        assert_eq!(refused(with(field(0))), "a field of an event is missing");
        assert_eq!(refused(with(field(9))), "9 is no field of an event");
        let registers = vec![1, 0];
        let registers = v1::ArgumentRegisters {
            registers,
            entry: false,
        };
        let registers = argument::Source::Registers(registers);
        assert_eq!(refused(with(Some(registers))), "a register is missing");
        let bits = v1::Bits {
            offset: 256,
            width: 1,
        };
        let wire = v1::Argument {
            bits: Some(bits),
            ..good.clone()
        };
        assert_eq!(refused(wire), "the offset of bits of 256 is too large");
        let wire = v1::Argument {
            r#type: None,
            ..good
        };
        assert_eq!(refused(wire), "the type of an argument is missing");
    }
}
