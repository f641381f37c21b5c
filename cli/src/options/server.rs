//! Options for the address of a server, and for the addresses it listens on.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, ValueHint};
use tonic::transport::Uri;

/// A unix socket of a server.
#[derive(Debug, Default, Args)]
pub(crate) struct SocketAt {
    /// Socket of the server [default: $HVPROBE_SOCKET, $XDG_RUNTIME_DIR/hvprobe.sock, or
    /// /run/hvprobe.sock]
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub(crate) socket: Option<PathBuf>,
}

/// Where the server is.
#[derive(Debug, Default, Args)]
pub(crate) struct ServerAt {
    #[command(flatten)]
    pub(crate) at: SocketAt,

    /// Server on a TCP port, `http://127.0.0.1:PORT`, instead of a socket
    #[arg(
        long,
        value_name = "URL",
        requires = "token_file",
        conflicts_with = "socket"
    )]
    pub(crate) connect: Option<Url>,

    /// File with the token of that server
    #[arg(long, value_name = "FILE", requires = "connect", value_hint = ValueHint::FilePath)]
    pub(crate) token_file: Option<PathBuf>,
}

/// Where a server listens.
#[derive(Debug, Args)]
#[command(after_help = "\
Clients over TCP must present the token, as every user of this machine can reach that port:
  hvprobe serve --listen 127.0.0.1:50051 --token-file token
  hvprobe vm list --connect http://127.0.0.1:50051 --token-file token

Limits on what all machines and clients may use together are in a file; --print-config prints one:
  hvprobe serve --print-config > hvprobe.toml
  hvprobe serve --config hvprobe.toml")]
pub(crate) struct Serve {
    #[command(flatten)]
    pub(crate) at: SocketAt,

    /// Also listen on this TCP port, `127.0.0.1:PORT` or `[::1]:PORT`; with port 0, choose one and print it
    #[arg(long, value_name = "ADDRESS", requires = "token_file", value_parser = address)]
    pub(crate) listen: Option<SocketAddr>,

    /// File with the token for that port; created with mode 0600 if it does not exist
    #[arg(long, value_name = "FILE", requires = "listen", value_hint = ValueHint::FilePath)]
    pub(crate) token_file: Option<PathBuf>,

    /// Folder with debug information of guest kernels, found by build id
    /// (DIR/.build-id/NN/NNNN.debug) or release (DIR/boot/vmlinux-RELEASE) [default: /usr/lib/debug]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) debug_dir: Option<PathBuf>,

    /// TOML file with limits on what all machines and clients may use together
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) config: Option<PathBuf>,

    /// Print a configuration file with the current limits, and exit
    #[arg(long)]
    pub(crate) print_config: bool,
}

fn address(text: &str) -> Result<SocketAddr, &'static str> {
    text.parse()
        .map_err(|_| "write 127.0.0.1:PORT or [::1]:PORT")
}

/// Server on a TCP port of this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Url(pub(crate) SocketAddr);

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "http://{}", self.0)
    }
}

/// Reason why a URL is refused.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BadUrl {
    #[error("write http://127.0.0.1:PORT")]
    Form,
    #[error("there is no TLS yet: write http://127.0.0.1:PORT")]
    Tls,
    #[error(
        "there is no TLS yet, so the token is sent to this machine only: write \
         http://127.0.0.1:PORT; `ssh -L` brings a port of another machine here"
    )]
    Elsewhere,
}

impl FromStr for Url {
    type Err = BadUrl;

    fn from_str(text: &str) -> Result<Self, BadUrl> {
        let url: Uri = text.parse().map_err(|_| BadUrl::Form)?;
        match url.scheme_str() {
            Some("http") if matches!(url.path(), "" | "/") && url.query().is_none() => {}
            Some("https") => return Err(BadUrl::Tls),
            _ => return Err(BadUrl::Form),
        }
        let (Some(host), Some(port)) = (url.host(), url.port_u16()) else {
            return Err(BadUrl::Form);
        };
        let address = if host.eq_ignore_ascii_case("localhost") {
            SocketAddr::from((Ipv4Addr::LOCALHOST, port))
        } else {
            // Only a numeric address is accepted: with a name, the resolver would decide where the token is sent.
            let address = format!("{host}:{port}");
            address.parse().map_err(|_| BadUrl::Elsewhere)?
        };
        if !address.ip().is_loopback() {
            return Err(BadUrl::Elsewhere);
        }
        Ok(Self(address))
    }
}

/// Which machine of the server.
#[derive(Debug, Args)]
pub(crate) struct OnMachine {
    #[command(flatten)]
    pub(crate) server: ServerAt,

    /// Machine [default: the only one that runs]
    #[arg(long, value_name = "NAME")]
    pub(crate) vm: Option<String>,
}

impl OnMachine {
    /// Returns whether the user chose a machine or server, instead of the defaults.
    pub(crate) fn is_said(&self) -> bool {
        self.vm.is_some() || self.server.at.socket.is_some() || self.server.connect.is_some()
    }
}

/// The machine a `vm` command is about.
#[derive(Debug, Args)]
pub(crate) struct NamedMachine {
    #[command(flatten)]
    pub(crate) server: ServerAt,

    /// Machine [default: the only one that runs]
    #[arg(value_name = "NAME")]
    pub(crate) vm: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<String, BadUrl> {
        text.parse::<Url>().map(|url| url.to_string())
    }

    #[test]
    fn urls_of_this_machine_are_taken() {
        for (text, meant) in [
            ("http://127.0.0.1:50051", "http://127.0.0.1:50051"),
            ("http://127.0.0.1:1/", "http://127.0.0.1:1"),
            ("http://127.9.9.9:1", "http://127.9.9.9:1"),
            ("http://[::1]:50051", "http://[::1]:50051"),
            ("http://localhost:50051", "http://127.0.0.1:50051"),
        ] {
            assert_eq!(parsed(text).as_deref(), Ok(meant), "{text}");
        }
    }

    #[test]
    fn other_urls_are_refused_with_the_reason() {
        for (text, why) in [
            ("", BadUrl::Form),
            ("127.0.0.1:50051", BadUrl::Form),
            ("http://127.0.0.1", BadUrl::Form),
            ("http://127.0.0.1:99999", BadUrl::Form),
            ("http://127.0.0.1:1/path", BadUrl::Form),
            ("http://127.0.0.1:1?query", BadUrl::Form),
            ("unix:/run/hvprobe.sock", BadUrl::Form),
            ("https://127.0.0.1:50051", BadUrl::Tls),
            ("http://192.0.2.1:50051", BadUrl::Elsewhere),
            ("http://0.0.0.0:50051", BadUrl::Elsewhere),
            ("http://example.org:50051", BadUrl::Elsewhere),
            ("http://127.0.0.1.example.org:50051", BadUrl::Elsewhere),
            ("http://localhost@192.0.2.1:50051", BadUrl::Elsewhere),
        ] {
            assert_eq!(parsed(text), Err(why), "{text}");
        }
    }
}
