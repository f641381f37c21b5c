//! Terminals: the lab's own, as raw input for a rig, and one that a program uses as its screen.

use std::fs::{File, OpenOptions};
use std::io::{self, IsTerminal, Read, stdin};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use anyhow::{Context, Result};

/// Ctrl-], which leaves an interactive rig.
const LEAVE: u8 = 0x1d;
/// Ctrl-D, the end of input on a terminal.
const END_OF_INPUT: u8 = 0x04;

/// The lab's stdin as input for a rig. A terminal is raw while this exists.
#[derive(Debug)]
pub(crate) struct Keyboard {
    input: File,
    cooked: Option<libc::termios>,
    ended: bool,
}

impl Keyboard {
    pub(crate) fn open() -> Result<Self> {
        let input = File::from(stdin().as_fd().try_clone_to_owned()?);
        let cooked = if input.is_terminal() {
            Some(make_raw(&input).context("cannot make the terminal raw")?)
        } else {
            None
        };
        Ok(Self {
            input,
            cooked,
            ended: false,
        })
    }

    /// Reads the next bytes for the rig. Returns `None` if the user wants to leave. The end of a file or pipe
    /// becomes Ctrl-D.
    pub(crate) fn read<'a>(&mut self, buffer: &'a mut [u8]) -> Result<Option<&'a [u8]>> {
        let length = self.input.read(buffer)?;
        if length == 0 {
            self.ended = true;
            // Two of them, because the first only completes an unfinished line if there is one.
            buffer[..2].fill(END_OF_INPUT);
            return Ok(Some(&buffer[..2]));
        }
        let bytes = &buffer[..length];
        Ok((self.cooked.is_none() || !bytes.contains(&LEAVE)).then_some(bytes))
    }

    /// Returns whether there is nothing more to read.
    pub(crate) fn ended(&self) -> bool {
        self.ended
    }
}

impl AsFd for Keyboard {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.input.as_fd()
    }
}

impl Drop for Keyboard {
    fn drop(&mut self) {
        if let Some(cooked) = &self.cooked {
            // SAFETY: the descriptor is ours and the pointer is to a whole termios.
            unsafe { libc::tcsetattr(self.input.as_raw_fd(), libc::TCSANOW, cooked) };
        }
    }
}

/// Makes a terminal raw and returns its previous settings.
fn make_raw(terminal: &File) -> io::Result<libc::termios> {
    let mut cooked = MaybeUninit::<libc::termios>::uninit();
    // SAFETY: the pointer is to room for a termios.
    if unsafe { libc::tcgetattr(terminal.as_raw_fd(), cooked.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call above succeeded, so it has written the settings.
    let cooked = unsafe { cooked.assume_init() };
    let mut raw = cooked;
    // SAFETY: cfmakeraw changes the termios it is given.
    unsafe { libc::cfmakeraw(&raw mut raw) };
    // SAFETY: the descriptor is open and the pointer is to a whole termios.
    if unsafe { libc::tcsetattr(terminal.as_raw_fd(), libc::TCSANOW, &raw const raw) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(cooked)
}

/// Opens the terminal at `path`, to read what the program on its other side shows. Makes it raw, so that the output
/// is not echoed to the program as if it were typed.
pub(crate) fn screen(path: &Path) -> io::Result<File> {
    let screen = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NOCTTY)
        .open(path)?;
    make_raw(&screen)?;
    Ok(screen)
}

/// Returns the rows and columns of the terminal on stdout, or `None` if stdout is no terminal.
pub(crate) fn size() -> Option<(u16, u16)> {
    let mut size = MaybeUninit::<libc::winsize>::uninit();
    // SAFETY: TIOCGWINSZ writes a winsize to the pointer.
    if unsafe { libc::ioctl(1, libc::TIOCGWINSZ, size.as_mut_ptr()) } != 0 {
        return None;
    }
    // SAFETY: the call above succeeded, so it has written the size.
    let size = unsafe { size.assume_init() };
    (size.ws_row > 0 && size.ws_col > 0).then_some((size.ws_row, size.ws_col))
}
