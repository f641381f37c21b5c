//! Flow-control settings that a client should ask for on its connection.

use tonic::transport::Endpoint;

/// Flow-control window of one stream, in bytes: room for several messages of events. With HTTP/2's default of
/// 64 KiB one message of events takes several round trips.
const STREAM: u32 = 2 << 20;
/// Flow-control window of all streams of a connection together, in bytes.
const CONNECTION: u32 = 8 << 20;
/// Largest frame, in bytes: a message of events fits into one frame instead of sixteen.
const FRAME: u32 = 1 << 20;

/// Returns `endpoint` with windows and frames large enough for streams of events. Streams of events work with
/// smaller ones too, at the cost of more system calls.
#[must_use]
pub fn roomy(endpoint: Endpoint) -> Endpoint {
    endpoint
        .initial_stream_window_size(STREAM)
        .initial_connection_window_size(CONNECTION)
        .max_frame_size(FRAME)
}
