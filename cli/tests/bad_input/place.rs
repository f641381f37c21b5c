//! Folder for the files of a test, and commands that run with it.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};

use expect_test::Expect;
use tempfile::TempDir;

/// Folder for one test's files, empty at first.
pub(crate) struct Place(pub(crate) TempDir);

impl Place {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn file(&self, name: &str, bytes: &[u8]) -> String {
        let path = self.path(name);
        fs::write(&path, bytes).unwrap();
        path.into_os_string().into_string().unwrap()
    }

    /// Returns a command that runs the program under `timeout`. If the program hangs, `timeout` ends it, and the
    /// exit status is 124. With `--foreground`, `timeout` forwards a signal once. Otherwise it would send the
    /// signal to its child and then to its group, and a second signal ends hvprobe at once.
    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new("timeout");
        command
            .args([
                "--foreground",
                "--kill-after=5",
                "60",
                env!("CARGO_BIN_EXE_hvprobe"),
            ])
            .args(args)
            .env("HVPROBE_CACHE", self.path("cache"))
            .env("XDG_RUNTIME_DIR", self.0.path())
            .env_remove("HVPROBE_SOCKET")
            .stdin(Stdio::null());
        command
    }

    pub(crate) fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    /// Runs the program, and compares its text on standard error and its exit status with `expected`. In the text,
    /// the path of this folder becomes `$PLACE`.
    pub(crate) fn check(&self, args: &[&str], expected: Expect) {
        let output = self.run(args);
        let stderr = String::from_utf8(output.stderr).unwrap();
        let stderr = stderr.replace(self.0.path().to_str().unwrap(), "$PLACE");
        let status = output.status.code().unwrap();
        expected.assert_eq(&format!("{stderr}status {status}\n"));
    }

    /// Starts a server, and waits until it listens.
    pub(crate) fn serve(&self) -> Server {
        self.serve_with(&[]).0
    }

    /// Starts a server with additional options, and waits until it listens. Also returns its messages about where
    /// it listens.
    pub(crate) fn serve_with(&self, more: &[&str]) -> (Server, Vec<String>) {
        let mut child = self
            .command(&[&["serve"], more].concat())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let mut lines = Vec::new();
        for _ in 0..if more.contains(&"--listen") { 2 } else { 1 } {
            let mut line = String::new();
            stderr.read_line(&mut line).unwrap();
            assert!(line.starts_with("hvprobe: listening on "), "{line}");
            lines.push(line);
        }
        (Server { child }, lines)
    }
}

/// Running `hvprobe serve` under `timeout`, which forwards signals.
pub(crate) struct Server {
    child: Child,
}

impl Server {
    /// Ends the server with SIGTERM and returns its exit status.
    pub(crate) fn terminate(mut self) -> Option<i32> {
        self.signal("TERM");
        self.child.wait().unwrap().code()
    }

    /// Kills the server, so that it cannot clean up.
    pub(crate) fn kill(mut self) {
        // Killing `timeout` would leave the server running, so kill the child of `timeout`.
        let children = format!("/proc/{0}/task/{0}/children", self.child.id());
        let children = fs::read_to_string(children).unwrap();
        let status = Command::new("kill")
            .arg("-KILL")
            .args(children.split_whitespace())
            .status();
        assert!(status.unwrap().success());
        self.child.wait().unwrap();
    }

    fn signal(&self, signal: &str) {
        let status = Command::new("kill")
            .args([format!("-{signal}"), self.child.id().to_string()])
            .status();
        assert!(status.unwrap().success());
    }
}
