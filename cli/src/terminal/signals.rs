//! Ctrl-C and SIGTERM: the first one asks for an orderly end, the second one ends the program at once. A server
//! ignores some other signals, which would end it by default and may be sent to it in error.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;

use super::raw;
use crate::failure::INTERRUPTED;
#[cfg(feature = "vmm")]
use crate::output;

/// Notification that the user wants to end the program.
#[derive(Clone, Debug)]
pub(crate) struct Interrupt(watch::Receiver<bool>);

impl Interrupt {
    /// Takes over SIGINT and SIGTERM until the program ends. Needs a tokio runtime.
    pub(crate) fn install() -> io::Result<Self> {
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        let (asked, receiver) = watch::channel(false);
        tokio::spawn(async move {
            either(&mut interrupt, &mut terminate).await;
            asked.send_replace(true);
            either(&mut interrupt, &mut terminate).await;
            raw::restore();
            std::process::exit(INTERRUPTED.into());
        });
        Ok(Self(receiver))
    }

    /// Waits until the user asks for the end of the program. Returns at once if the user has already asked.
    pub(crate) async fn asked(&mut self) {
        if self.0.wait_for(|asked| *asked).await.is_err() {
            // The sender lives as long as the runtime. Without it no request can arrive.
            std::future::pending::<()>().await;
        }
    }
}

/// Ignores signals that mean nothing to the program but make other servers reread their configuration or write
/// statistics. Prints a message at each. Needs a tokio runtime.
#[cfg(feature = "vmm")]
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
                // It does not matter whether the message can be written.
                let _printed = tokio::task::spawn_blocking(move || {
                    output::notice(format_args!("{name} does nothing; SIGTERM ends the server"));
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
