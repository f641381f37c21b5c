//! A client of QEMU's gdbstub that does what gdb does for a breakpoint with automatic continue.
//!
//! A hit is handled as gdb handles it: stop, remove the breakpoint, make one step, insert the breakpoint again,
//! continue ("Debugging with GDB", appendix E, Remote Serial Protocol).

use std::io::{BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// Time limit for one answer; the guest may take this long to reach a breakpoint.
const PATIENCE: Duration = Duration::from_secs(120);
/// Maximum length of a packet. QEMU's packets are shorter.
const PACKET: usize = 1 << 16;

/// A connection to a stub whose machine is stopped.
#[derive(Debug)]
pub(crate) struct Gdb {
    from: BufReader<UnixStream>,
    to: UnixStream,
}

impl Gdb {
    /// Connects, which stops the machine.
    pub(crate) fn connect(stream: UnixStream) -> Result<Self> {
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut gdb = Self {
            from: BufReader::new(stream.try_clone()?),
            to: stream,
        };
        gdb.send("qSupported:swbreak+;hwbreak+")?;
        // The connection stops the machine. The stub reports that on its own, before its first answer.
        while stopped(&gdb.receive()?) {}
        let state = gdb.ask("?")?;
        if !stopped(&state) {
            bail!("QEMU's gdbstub does not say that it stopped: {state:?}");
        }
        Ok(gdb)
    }

    /// Sets a software breakpoint at `at` and lets the machine run into it `hits` times, then removes the
    /// breakpoint and detaches. Calls `ready` when the machine runs for the first time. Returns the times from
    /// each hit to the next.
    pub(crate) fn count(
        mut self,
        at: u64,
        hits: u32,
        ready: impl FnOnce() -> Result<()>,
    ) -> Result<Vec<Duration>> {
        let (insert, remove) = (format!("Z0,{at:x},1"), format!("z0,{at:x},1"));
        self.expect_ok(&insert)?;
        self.send("c")?;
        ready()?;
        self.expect_stop()?;
        let mut times = Vec::new();
        let mut last = Instant::now();
        for _ in 1..hits {
            self.expect_ok(&remove)?;
            self.send("s")?;
            self.expect_stop()?;
            self.expect_ok(&insert)?;
            self.send("c")?;
            self.expect_stop()?;
            let now = Instant::now();
            times.push(now - last);
            last = now;
        }
        self.expect_ok(&remove)?;
        self.expect_ok("D")?;
        Ok(times)
    }

    fn expect_ok(&mut self, command: &str) -> Result<()> {
        match self.ask(command)?.as_str() {
            "OK" => Ok(()),
            answer => bail!("QEMU's gdbstub answered {answer:?} to {command}"),
        }
    }

    fn expect_stop(&mut self) -> Result<()> {
        let answer = self.receive()?;
        if !stopped(&answer) {
            bail!("QEMU's gdbstub said {answer:?} instead of stopping");
        }
        Ok(())
    }

    fn ask(&mut self, command: &str) -> Result<String> {
        self.send(command)?;
        self.receive()
    }

    fn send(&mut self, command: &str) -> Result<()> {
        self.to
            .write_all(packet(command).as_bytes())
            .context("cannot write to QEMU's gdbstub")
    }

    /// Reads the next packet and acknowledges it.
    fn receive(&mut self) -> Result<String> {
        let body = read_packet(&mut self.from)?;
        self.to
            .write_all(b"+")
            .context("cannot write to QEMU's gdbstub")?;
        Ok(body)
    }
}

/// Returns whether an answer says that the machine stopped by a signal.
fn stopped(answer: &str) -> bool {
    answer.starts_with('T') || answer.starts_with('S')
}

fn packet(body: &str) -> String {
    let sum = body.bytes().fold(0_u8, u8::wrapping_add);
    format!("${body}#{sum:02x}")
}

/// Skips acknowledgements, and reads the next packet. Returns its body.
fn read_packet(from: &mut impl Read) -> Result<String> {
    let mut next = || -> Result<u8> {
        let mut byte = [0];
        from.read_exact(&mut byte)
            .context("QEMU's gdbstub does not answer")?;
        Ok(byte[0])
    };
    loop {
        match next()? {
            b'$' => break,
            b'-' => bail!("QEMU's gdbstub did not understand"),
            _ => {}
        }
    }
    let mut body = Vec::new();
    loop {
        match next()? {
            b'#' => break,
            byte if body.len() < PACKET => body.push(byte),
            _ => bail!("QEMU's gdbstub sent an endless packet"),
        }
    }
    let sum = [next()?, next()?];
    let body = String::from_utf8(body).context("a packet of QEMU's gdbstub is no text")?;
    if !packet(&body).as_bytes().ends_with(&sum) {
        bail!("a packet of QEMU's gdbstub is damaged: {body:?}");
    }
    Ok(body)
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn packets_carry_their_sum() {
        assert_eq!(packet("OK"), "$OK#9a");
        assert_eq!(read_packet(&mut &b"++$OK#9a"[..]).unwrap(), "OK");
        assert!(read_packet(&mut &b"$OK#9b"[..]).is_err());
        assert!(read_packet(&mut &b"$OK"[..]).is_err());
        assert!(read_packet(&mut &b"-"[..]).is_err());
    }

    /// Serves as a stub whose machine stops again as soon as it continues. Returns the commands that the stub
    /// received.
    fn stub(mut stream: UnixStream) -> Vec<String> {
        let mut asked = Vec::new();
        stream
            .write_all(packet("T02thread:01;").as_bytes())
            .unwrap();
        let mut from = stream.try_clone().unwrap();
        while let Ok(command) = read_packet(&mut from) {
            let answer = match command.as_str() {
                "c" | "s" => "T05thread:01;",
                "?" => "S05",
                command if command.starts_with("qSupported") => "PacketSize=1000",
                _ => "OK",
            };
            stream.write_all(b"+").unwrap();
            stream.write_all(packet(answer).as_bytes()).unwrap();
            asked.push(command);
        }
        asked
    }

    #[test]
    fn every_hit_is_stepped_over() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let stub = thread::spawn(|| stub(theirs));
        let gdb = Gdb::connect(ours).unwrap();
        let mut ready = false;
        let counted = gdb.count(0x1000, 3, || {
            ready = true;
            Ok(())
        });
        assert_eq!(counted.unwrap().len(), 2);
        assert!(ready);
        let asked = stub.join().unwrap();
        let cycle = ["z0,1000,1", "s", "Z0,1000,1", "c"];
        let expected = [&["Z0,1000,1", "c"][..], &cycle, &cycle, &["z0,1000,1", "D"]].concat();
        assert_eq!(asked[2..], expected);
    }
}
