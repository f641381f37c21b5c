//! What a client should ask of its connection.

use tonic::transport::Endpoint;

/// Bytes that a server may send of one stream before the client says that it has taken them: some messages
/// of events. HTTP/2's default is 64 KiB, of which a message of events takes several round trips.
const STREAM: u32 = 2 << 20;
/// The same of all streams of a connection together.
const CONNECTION: u32 = 8 << 20;
/// The largest frame: a message of events in one, and not in sixteen.
const FRAME: u32 = 1 << 20;

/// A connection with room for streams of events. They come through any other, too, at the price of more
/// system calls.
#[must_use]
pub fn roomy(endpoint: Endpoint) -> Endpoint {
    endpoint
        .initial_stream_window_size(STREAM)
        .initial_connection_window_size(CONNECTION)
        .max_frame_size(FRAME)
}
