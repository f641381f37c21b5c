//! Decodes messages that arrive on a connection.
//!
//! Invariant: each message is taken from the connection's buffer whole, without a copy, before it is decoded. A
//! decoder that reads through the buffer itself pays for the buffer's bookkeeping at each field, and a batch of
//! events has a hundred thousand fields.

use std::marker::PhantomData;

use prost::Message;
use prost::bytes::Buf as _;
use tonic::Status;
use tonic::codec::{BufferSettings, Codec, DecodeBuf, Decoder};
use tonic_prost::{ProstCodec, ProstEncoder};

/// Encodes messages as `tonic_prost` does, and decodes each message from one contiguous buffer.
#[derive(Clone, Debug)]
pub struct Whole<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for Whole<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T, U> Codec for Whole<T, U>
where
    T: Message + Send + 'static,
    U: Message + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = ProstEncoder<T>;
    type Decoder = WholeDecoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstCodec::<T, U>::raw_encoder(BufferSettings::default())
    }

    fn decoder(&mut self) -> Self::Decoder {
        WholeDecoder(PhantomData)
    }
}

/// Decoder of [`Whole`].
#[derive(Clone, Debug)]
pub struct WholeDecoder<U>(PhantomData<U>);

impl<U: Message + Default> Decoder for WholeDecoder<U> {
    type Item = U;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        let whole = from.copy_to_bytes(from.remaining());
        U::decode(whole)
            .map(Some)
            .map_err(|error| Status::internal(error.to_string()))
    }
}
