//! Parser for the rig's console: boot messages, marks, and the output of the steps.
//!
//! A mark is `RS "hvprobe-lab:" NONCE ":" WHAT RS` (RS is the record separator, 0x1e). The reader is either inside
//! a step or outside. Only bytes inside a step are output. They are passed on unchanged, as soon as it is clear
//! that they are not the start of a mark.

/// Byte that begins and ends a mark.
const SEPARATOR: u8 = 0x1e;
/// Maximum length of a mark's text. If the end does not come by then, the bytes are no mark.
const LONGEST_MARK: usize = 200;

/// Event on the console.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Heard {
    /// The step with this number starts.
    Begin(usize),
    /// Bytes that the running step printed.
    Output(Vec<u8>),
    /// The step ended with this exit status.
    End(usize, u8),
    /// A kernel module did not load, or another part of the rig's setup failed.
    ModuleFailed(String),
    /// All steps are over.
    Done,
}

/// Splits the console's bytes into events.
#[derive(Debug)]
pub(crate) struct Reader {
    opening: Vec<u8>,
    unread: Vec<u8>,
    in_step: bool,
}

impl Reader {
    /// Creates a reader for the console of the run with this nonce.
    pub(crate) fn new(nonce: &str) -> Self {
        let mut opening = vec![SEPARATOR];
        opening.extend_from_slice(format!("hvprobe-lab:{nonce}:").as_bytes());
        Self {
            opening,
            unread: Vec::new(),
            in_step: false,
        }
    }

    /// Returns whether a step is running.
    pub(crate) fn in_step(&self) -> bool {
        self.in_step
    }

    /// Takes the next bytes, and returns the events that are complete with them.
    pub(crate) fn read(&mut self, bytes: &[u8]) -> Vec<Heard> {
        self.unread.extend_from_slice(bytes);
        let mut heard = Vec::new();
        loop {
            let plain = self
                .unread
                .iter()
                .position(|&byte| byte == SEPARATOR)
                .unwrap_or(self.unread.len());
            self.pass(plain, &mut heard);
            if self.unread.is_empty() {
                return heard;
            }
            if !self.unread.starts_with(&self.opening) {
                if self.opening.starts_with(&self.unread) {
                    return heard;
                }
                self.pass(1, &mut heard);
                continue;
            }
            let text = &self.unread[self.opening.len()..];
            match text.iter().position(|&byte| byte == SEPARATOR) {
                Some(length) => match parse(&text[..length]) {
                    Some(mark) => {
                        self.unread.drain(..self.opening.len() + length + 1);
                        self.in_step = match mark {
                            Heard::Begin(_) => true,
                            Heard::End(..) => false,
                            _ => self.in_step,
                        };
                        heard.push(mark);
                    }
                    None => self.pass(1, &mut heard),
                },
                None if text.len() > LONGEST_MARK => self.pass(1, &mut heard),
                None => return heard,
            }
        }
    }

    /// Consumes `length` bytes, as output if a step is running.
    fn pass(&mut self, length: usize, heard: &mut Vec<Heard>) {
        if length == 0 {
            return;
        }
        let bytes: Vec<u8> = self.unread.drain(..length).collect();
        if self.in_step {
            match heard.last_mut() {
                Some(Heard::Output(output)) => output.extend_from_slice(&bytes),
                _ => heard.push(Heard::Output(bytes)),
            }
        }
    }
}

/// Parses a mark's text.
fn parse(text: &[u8]) -> Option<Heard> {
    let text = std::str::from_utf8(text).ok()?;
    if text == "done" {
        return Some(Heard::Done);
    }
    let (what, rest) = text.split_once(':')?;
    match what {
        "begin" => Some(Heard::Begin(rest.parse().ok()?)),
        "end" => {
            let (step, status) = rest.split_once(':')?;
            Some(Heard::End(step.parse().ok()?, status.parse().ok()?))
        }
        "fail" => Some(Heard::ModuleFailed(rest.to_owned())),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads `console` in pieces of `size` bytes. Joins successive outputs.
    fn read_in_pieces(console: &[u8], size: usize) -> Vec<Heard> {
        let mut reader = Reader::new("n1");
        let mut all: Vec<Heard> = Vec::new();
        for piece in console.chunks(size) {
            for heard in reader.read(piece) {
                match (all.last_mut(), heard) {
                    (Some(Heard::Output(before)), Heard::Output(more)) => before.extend(more),
                    (_, heard) => all.push(heard),
                }
            }
        }
        all
    }

    fn check(console: &[u8], expected: &[Heard]) {
        for size in 1..=console.len() {
            assert_eq!(read_in_pieces(console, size), expected, "pieces of {size}");
        }
    }

    #[test]
    fn boot_messages_are_dropped_and_output_kept_byte_for_byte() {
        check(
            b"[    0.1] kernel says\r\n\x1ehvprobe-lab:n1:begin:0\x1ea\nb\xff\0no newline\
              \x1ehvprobe-lab:n1:end:0:7\x1e[ 3.0] more\n\x1ehvprobe-lab:n1:done\x1e",
            &[
                Heard::Begin(0),
                Heard::Output(b"a\nb\xff\0no newline".to_vec()),
                Heard::End(0, 7),
                Heard::Done,
            ],
        );
    }

    #[test]
    fn marks_of_another_run_and_stray_separators_are_output() {
        check(
            b"\x1ehvprobe-lab:n1:begin:3\x1e\x1e\x1ehvprobe-lab:other:done\x1e\
              \x1ehvprobe-lab:n1:nonsense\x1e\x1ehvprobe-lab:n1:end:3:0\x1e",
            &[
                Heard::Begin(3),
                Heard::Output(
                    b"\x1e\x1ehvprobe-lab:other:done\x1e\x1ehvprobe-lab:n1:nonsense\x1e".to_vec(),
                ),
                Heard::End(3, 0),
            ],
        );
    }

    #[test]
    fn module_that_does_not_load_is_heard() {
        check(
            b"\x1ehvprobe-lab:n1:fail:kvm-amd.ko\x1e",
            &[Heard::ModuleFailed("kvm-amd.ko".into())],
        );
    }

    #[test]
    fn opening_without_end_does_not_hold_output_back_for_ever() {
        let mut console = b"\x1ehvprobe-lab:n1:begin:0\x1e\x1ehvprobe-lab:n1:".to_vec();
        console.resize(console.len() + 400, b'x');
        let heard = read_in_pieces(&console, 64);
        let [Heard::Begin(0), Heard::Output(output)] = heard.as_slice() else {
            panic!("{heard:?}");
        };
        assert!(output.len() > 400);
    }
}
