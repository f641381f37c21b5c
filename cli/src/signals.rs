//! Ctrl-C and SIGTERM: the first asks to end in order, the second ends at once.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;

use crate::{failure::INTERRUPTED, terminal};

/// Tells when the user wants the program to end.
#[derive(Clone, Debug)]
pub(crate) struct Interrupt(watch::Receiver<bool>);

impl Interrupt {
    /// Takes over SIGINT and SIGTERM for the rest of the program. Needs a tokio runtime.
    pub(crate) fn install() -> io::Result<Self> {
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        let (asked, receiver) = watch::channel(false);
        tokio::spawn(async move {
            either(&mut interrupt, &mut terminate).await;
            asked.send_replace(true);
            either(&mut interrupt, &mut terminate).await;
            terminal::restore();
            std::process::exit(INTERRUPTED.into());
        });
        Ok(Self(receiver))
    }

    /// Returns when the user has asked once, at once if that was before.
    pub(crate) async fn asked(&mut self) {
        if self.0.wait_for(|asked| *asked).await.is_err() {
            // The watcher lives as long as the runtime; without it nobody can ask.
            std::future::pending::<()>().await;
        }
    }
}

async fn either(one: &mut Signal, other: &mut Signal) {
    tokio::select! {
        _ = one.recv() => {}
        _ = other.recv() => {}
    }
}
