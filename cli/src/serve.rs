//! `hvprobe serve`: machines for clients that connect to a unix socket.

use std::process::ExitCode;

use hvprobe_server::{Listener, Server};

use crate::args::ServerAt;
use crate::client::socket_path;
use crate::failure::DONE;
use crate::output;
use crate::signals::Interrupt;

pub(crate) async fn serve(at: &ServerAt) -> anyhow::Result<ExitCode> {
    let mut interrupt = Interrupt::install()?;
    let listener = Listener::bind(&socket_path(at))?;
    output::tell(format_args!("listening on {}", listener.path().display()));
    let stop = async move {
        interrupt.asked().await;
        output::tell(format_args!("stopping"));
    };
    Server::new().serve(listener, stop).await?;
    Ok(DONE)
}
