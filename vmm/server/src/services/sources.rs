//! `hvprobe.v1.Sources`.
//!
//! Invariants: at most one request about each machine is answered at a time, and at most [`LOOKS`] in total. So at
//! most [`LOOKS`] files with debug information are in memory, and none while there are no requests. A request ends
//! when its client is gone, but an index that it has begun is completed and kept, so that the next request finds
//! it. An upload is written to a file as it arrives.

mod uploads;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hvprobe_linux::debug_info::{DebugError, DebugFile};
use hvprobe_linux::image::KernelImage;
use hvprobe_proto::Failure;
use hvprobe_proto::v1::{
    ErrorKind, ListLinesRequest, ListLinesResponse, ListVariablesRequest, ListVariablesResponse,
    UploadDebugInfoRequest, UploadDebugInfoResponse,
    sources_server::{self, SourcesServer},
};
use hvprobe_sources::{Indexes, Sources, SourcesError};
use hvprobe_spec::language::text::hex;
use hvprobe_spec::line_range::LineRange;
use hvprobe_spec::point::Point;
use hvprobe_spec::{ParseError, chain};
use prost::Message;
use tokio::time::{Instant, timeout_at};
use tokio_stream::{Stream, StreamExt as _};
use tonic::{Code, Request, Response, Status, Streaming};

use self::uploads::{Upload, Uploads};
use crate::bounds::limits;
use crate::bounds::threads::Lane;
use crate::machines::Fleet;
use crate::status::out_of_order;

/// Maximum bytes of a kernel's release (`__NEW_UTS_LEN`).
const RELEASE_MAX: usize = 64;

/// Maximum number of machines whose debug information is read at a time.
const LOOKS: usize = 4;

/// Maximum time that the server waits for the next part of an upload.
const SILENCE: Duration = Duration::from_secs(60);
/// Maximum duration of an upload.
const LONGEST: Duration = Duration::from_secs(3600);

#[derive(Debug)]
pub(crate) struct Service {
    fleet: Fleet,
    /// Folder of debug information.
    folder: Arc<Path>,
    indexes: Option<Indexes>,
    uploads: Arc<Uploads>,
    looks: Lane,
    writes: Lane,
}

impl Service {
    /// Returns the service for the gRPC server.
    pub(crate) fn server(
        fleet: Fleet,
        folder: PathBuf,
        indexes: Option<Indexes>,
    ) -> SourcesServer<Self> {
        let service = Self {
            fleet,
            folder: folder.into(),
            indexes,
            uploads: Arc::default(),
            looks: Lane::new("a look at sources", LOOKS),
            writes: Lane::new("an upload", limits::UPLOADS_AT_ONCE),
        };
        SourcesServer::new(service).max_decoding_message_size(limits::MESSAGE)
    }

    /// Returns the answer of `ask` about the sources of `machine`'s kernel.
    async fn of<T: Message + 'static>(
        &self,
        machine: &str,
        ask: impl FnOnce(&Sources) -> Result<T, SourcesError> + Send + 'static,
    ) -> Result<Response<T>, Status> {
        let handle = self.fleet.get(machine)?;
        let image = handle.port()?.image();
        let turn = handle.turn_to_look().await?;
        let folder = Arc::clone(&self.folder);
        let indexes = self.indexes.clone();
        let uploads = Arc::clone(&self.uploads);
        let answered = look(&self.looks, move |abandoned| {
            let _turn = turn;
            let sources = match uploads.of(&image) {
                Some(upload) => upload
                    .sources(&image, abandoned)
                    .map_err(|why| unusable(&why))?,
                None => open(&image, &folder, indexes.as_ref(), abandoned)?,
            };
            ask(&sources).map_err(|error| failed(&error))
        });
        let answer = answered.await??;
        let length = answer.encoded_len();
        if length > limits::MESSAGE {
            let message = format!("the answer has {length} bytes, at most {}", limits::MESSAGE);
            let (code, kind) = (Code::ResourceExhausted, ErrorKind::TooLarge);
            return Err(Failure::new(code, kind, message).into());
        }
        Ok(Response::new(answer))
    }
}

#[tonic::async_trait]
impl sources_server::Sources for Service {
    async fn list_lines(
        &self,
        request: Request<ListLinesRequest>,
    ) -> Result<Response<ListLinesResponse>, Status> {
        let ListLinesRequest { machine, function } = request.into_inner();
        let range = read("the function", &function, LineRange::parse)?;
        let ask = move |sources: &Sources| sources.lines(&range);
        self.of(&machine, ask).await
    }

    async fn list_variables(
        &self,
        request: Request<ListVariablesRequest>,
    ) -> Result<Response<ListVariablesResponse>, Status> {
        let ListVariablesRequest { machine, point } = request.into_inner();
        let point = read("the point", &point, Point::parse)?;
        let ask = move |sources: &Sources| sources.variables(&point);
        self.of(&machine, ask).await
    }

    async fn upload_debug_info(
        &self,
        request: Request<Streaming<UploadDebugInfoRequest>>,
    ) -> Result<Response<UploadDebugInfoResponse>, Status> {
        let mut parts = Parts::of(request.into_inner());
        let Some((machine, mut data)) = parts.next().await? else {
            return Err(out_of_order("the first message names the machine"));
        };
        let handle = self.fleet.get(&machine)?;
        let image = handle.port()?.image();
        let uploads = Arc::clone(&self.uploads);
        let begun = self.writes.run(move || uploads.begin());
        let mut upload = begun.await??;
        loop {
            let written = self.writes.run(move || {
                upload.append(&data)?;
                Ok::<Upload, Failure>(upload)
            });
            upload = written.await??;
            match parts.next().await? {
                None => break,
                Some((machine, next)) if machine.is_empty() => data = next,
                Some(_) => return Err(out_of_order("only the first message names a machine")),
            }
        }
        upload.complete();
        let length = upload.length();
        let uploads = Arc::clone(&self.uploads);
        let turn = handle.turn_to_look().await?;
        let kept = look(&self.looks, move |abandoned| {
            let _turn = turn;
            uploads.keep(upload, &image, abandoned)
        });
        let build_id = kept.await?.map_err(|why| unusable(&why))?;
        Ok(Response::new(UploadDebugInfoResponse { build_id, length }))
    }
}

/// Runs `work` once there is a permit in `looks`. `work` gets a flag that is set when nobody waits for its result
/// any more.
async fn look<T: Send + 'static>(
    looks: &Lane,
    work: impl FnOnce(&Arc<AtomicBool>) -> T + Send + 'static,
) -> Result<T, Status> {
    let waiting = Waiting::default();
    let abandoned = Arc::clone(&waiting.0);
    looks.run(move || work(&abandoned)).await
}

/// Belongs to a call that waits for an answer. Dropping it sets the flag.
#[derive(Debug, Default)]
struct Waiting(Arc<AtomicBool>);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Parts of a file as they arrive.
struct Parts<S> {
    stream: S,
    /// Deadline of the next part.
    next: Instant,
    /// Deadline of the whole file.
    all: Instant,
}

impl<S> Parts<S>
where
    S: Stream<Item = Result<UploadDebugInfoRequest, Status>> + Unpin,
{
    fn of(stream: S) -> Self {
        let now = Instant::now();
        Self {
            stream,
            next: now + SILENCE,
            all: now + LONGEST,
        }
    }

    /// Returns the next part, and the machine if the part names one; `None` after the last part. Skips parts
    /// with neither data nor a machine.
    async fn next(&mut self) -> Result<Option<(String, Vec<u8>)>, Status> {
        // The time for processing the previous part does not count.
        self.next = Instant::now() + SILENCE;
        loop {
            let until = self.next.min(self.all);
            // `timeout_at` would return a part that is available at once, however late it is.
            let next = match until > Instant::now() {
                true => timeout_at(until, self.stream.next()).await.ok(),
                false => None,
            };
            let Some(next) = next else {
                return Err(self.late());
            };
            let Some(UploadDebugInfoRequest { machine, data }) = next.transpose()? else {
                return Ok(None);
            };
            if !data.is_empty() || !machine.is_empty() {
                return Ok(Some((machine, data)));
            }
        }
    }

    fn late(&self) -> Status {
        let message = if self.next < self.all {
            format!("nothing came for {} seconds", SILENCE.as_secs())
        } else {
            format!("the file is not whole after {} seconds", LONGEST.as_secs())
        };
        Failure::new(Code::DeadlineExceeded, ErrorKind::DeadlineExceeded, message).into()
    }
}

/// Converts the error of an upload that cannot be used.
fn unusable(why: &DebugError) -> Failure {
    let message = format!("cannot use what was uploaded: {}", chain(why));
    Failure::new(Code::FailedPrecondition, ErrorKind::NoDebugInfo, message)
}

fn read<T>(
    what: &str,
    text: &str,
    parse: impl FnOnce(&str) -> Result<T, ParseError>,
) -> Result<T, Status> {
    limits::at_most(what, text.len(), limits::DEFINITION)?;
    let read = parse(text);
    Ok(read.map_err(|ParseError { column, message }| wrong(message).at_column(column))?)
}

fn wrong(message: impl Into<String>) -> Failure {
    Failure::invalid(ErrorKind::Definition, message)
}

/// Opens the debug information of the kernel with this image, which is in `folder`.
fn open(
    image: &Arc<KernelImage>,
    folder: &Path,
    indexes: Option<&Indexes>,
    abandoned: &Arc<AtomicBool>,
) -> Result<Sources, Failure> {
    let none = |message| Failure::new(Code::FailedPrecondition, ErrorKind::NoDebugInfo, message);
    let places = places_of(image.build_id(), image.release(), folder);
    for path in &places {
        let opened = DebugFile::open(path);
        let opened = opened.map(|file| file.until(abandoned));
        match opened.and_then(|file| Sources::indexed(Arc::clone(image), file, indexes)) {
            Ok(sources) => return Ok(sources),
            Err(DebugError::Read(why)) if why.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                return Err(none(format!(
                    "cannot use {}: {}",
                    path.display(),
                    chain(&error)
                )));
            }
        }
    }
    let places: Vec<_> = places
        .iter()
        .map(|path| path.display().to_string())
        .collect();
    Err(none(format!(
        "the server has no debug information of this kernel: there is no {}; install it, upload it, or see `hvprobe \
         serve --debug-dir`",
        places.join(", nor ")
    )))
}

/// Returns the paths that may have the debug information of a kernel, from the build id and the release that
/// the kernel itself states: the path of the build id (GDB manual, "Debugging Information in Separate Files"),
/// and the paths where distributions put a vmlinux (tools/perf/util/symbol.c, `vmlinux_paths`).
fn places_of(build_id: Option<&[u8]>, release: Option<&str>, folder: &Path) -> Vec<PathBuf> {
    let mut places = Vec::new();
    if let Some((first, rest)) = build_id.and_then(<[u8]>::split_first)
        && (1..limits::BUILD_ID).contains(&rest.len())
    {
        let folder = folder.join(".build-id").join(format!("{first:02x}"));
        places.push(folder.join(format!("{}.debug", hex(rest))));
    }
    // Only a release that cannot lead out of the folder.
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.+~".contains(c);
    if let Some(release) = release
        && release.len() <= RELEASE_MAX
        && release.chars().all(plain)
        && release.starts_with(|c: char| c.is_ascii_digit())
    {
        places.push(folder.join(format!("boot/vmlinux-{release}")));
        places.push(folder.join(format!("lib/modules/{release}/vmlinux")));
    }
    places
}

/// Converts an error: either the request names something that does not exist, or the file cannot be used.
fn failed(error: &SourcesError) -> Failure {
    let message = chain(error);
    let debug = match error {
        SourcesError::Debug(debug) => debug,
        SourcesError::Definition(at) => return wrong(message).at_column(at.column),
        SourcesError::Image(_) | SourcesError::Unnamed(_) => {
            return Failure::new(Code::FailedPrecondition, ErrorKind::NoSymbols, message);
        }
    };
    let absent = || Failure::new(Code::NotFound, ErrorKind::NotInSources, message.clone());
    match debug {
        DebugError::NoFunction { near, .. }
        | DebugError::NoLine { near, .. }
        | DebugError::Member { near, .. } => absent().offering(near.iter().cloned()),
        DebugError::NoFile(_) | DebugError::OnlyInlined(..) | DebugError::Offset { .. } => absent(),
        DebugError::Pattern => wrong(message),
        DebugError::Read(_)
        | DebugError::NotElf(_)
        | DebugError::Machine(_)
        | DebugError::Unlinked
        | DebugError::Relocation { .. }
        | DebugError::NoBuildId
        | DebugError::Overlap
        | DebugError::Cut(_)
        | DebugError::Compressed(_)
        | DebugError::None
        | DebugError::Split(_)
        | DebugError::OtherKernel { .. }
        | DebugError::Damaged { .. }
        | DebugError::TooMuch
        // No client waits for this error.
        | DebugError::Abandoned => {
            Failure::new(Code::FailedPrecondition, ErrorKind::NoDebugInfo, message)
        }
    }
}

#[cfg(test)]
mod tests;
