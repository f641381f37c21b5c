//! `hvprobe serve`: serves clients that connect to a unix socket or a TCP port.

mod config;

use std::process::ExitCode;
use std::time::Duration;

use hvprobe_proto::Token;
use hvprobe_server::{Limits, Listener, Loopback, Server};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::client::socket_path;
use crate::definitions::debug_info;
use crate::failure::DONE;
use crate::options::server::{Serve, Url};
use crate::output;
use crate::terminal::signals::{self, Interrupt};

/// Maximum time that the shutdown waits until its message is written to standard error.
const PATIENCE: Duration = Duration::from_millis(500);

pub(crate) async fn serve(args: Serve) -> anyhow::Result<ExitCode> {
    let limits = match &args.config {
        Some(file) => config::read(file)?,
        None => Limits::of_host(),
    };
    if args.print_config {
        output::print(config::text(&limits).trim_end())?;
        return Ok(DONE);
    }
    let mut interrupt = Interrupt::install()?;
    signals::outlive_others()?;
    raise_descriptors();
    let mut server = Server::new().with_limits(limits);
    if let Some(folder) = args.debug_dir {
        server = server.with_debug_dir(folder);
    }
    if let Some(indexes) = debug_info::indexes() {
        server = server.with_indexes(indexes);
    }
    let listener = Listener::bind(&socket_path(&args.at))?;
    let mut also = None;
    if let (Some(address), Some(file)) = (args.listen, &args.token_file) {
        let token = Token::read_or_create(file)?;
        let loopback = Loopback::bind(address, token).await?;
        also = Some(format!(
            "listening on {} for who has the token in {}",
            Url(loopback.address()),
            file.display()
        ));
        server.listen_too(loopback);
    }
    output::notice(format_args!("listening on {}", listener.path().display()));
    if let Some(also) = also {
        output::notice(format_args!("{also}"));
    }
    let stop = async move {
        interrupt.asked().await;
        // The message must not delay the shutdown if nothing reads it.
        let printing = tokio::task::spawn_blocking(|| output::notice(format_args!("stopping")));
        let _in_time = tokio::time::timeout(PATIENCE, printing).await;
    };
    server.serve(listener, stop).await?;
    Ok(DONE)
}

/// Raises the limit of file descriptors to its maximum. Connections, machines and uploads have their own
/// limits, which together exceed the usual default of 1,024 descriptors.
fn raise_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, "the limit of descriptors stays as it is");
    }
}
