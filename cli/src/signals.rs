//! Ctrl-C and SIGTERM: the first asks to end in order, the second ends at once. A server goes on at what else ends
//! programs by default and may be sent to one in error.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;

use crate::{failure::INTERRUPTED, output, terminal};

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

/// Has the program say so and go on when it is sent a signal that means nothing to it, for the rest of it: those at
/// which other servers read their configuration anew, or write their statistics. Needs a tokio runtime.
pub(crate) fn outlive_others() -> io::Result<()> {
    for (name, kind) in [
        ("SIGHUP", SignalKind::hangup()),
        ("SIGUSR1", SignalKind::user_defined1()),
        ("SIGUSR2", SignalKind::user_defined2()),
        ("SIGALRM", SignalKind::alarm()),
    ] {
        let mut sent = signal(kind)?;
        tokio::spawn(async move {
            while sent.recv().await.is_some() {
                // Nobody need read it.
                let _told = tokio::task::spawn_blocking(move || {
                    output::tell(format_args!("{name} does nothing; SIGTERM ends the server"));
                })
                .await;
            }
        });
    }
    Ok(())
}

async fn either(one: &mut Signal, other: &mut Signal) {
    tokio::select! {
        _ = one.recv() => {}
        _ = other.recv() => {}
    }
}
