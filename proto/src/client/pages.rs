//! Lists that arrive page by page.
//!
//! Invariant: reading a list ends, even if the server is faulty: no token leads to itself, and a list has at most
//! as many pages as the longest list of a correct server, and at most [`LIST`] bytes.

use tonic::Status;

use crate::limits;

/// Maximum size in bytes of a list: enough for all probes that a machine can reasonably have, with their actions.
pub(super) const LIST: usize = 256 << 20;

/// Counts the pages of a list that have been read.
#[derive(Debug, Default)]
pub(super) struct Pages {
    /// Token of the page that was read last; empty for the first page.
    token: String,
    count: usize,
    bytes: usize,
}

impl Pages {
    /// Counts a page of `bytes` bytes that names `next` as the token of the next page. Returns that token; `None`
    /// if this was the last page.
    ///
    /// # Errors
    /// When the page leads to itself, or the list has more than [`limits::PAGES`] pages or more than [`LIST`]
    /// bytes.
    pub(super) fn after(&mut self, bytes: usize, next: String) -> Result<Option<String>, Status> {
        self.count += 1;
        self.bytes = self.bytes.saturating_add(bytes);
        if next.is_empty() {
            return Ok(None);
        }
        if next == self.token {
            let why = "the server's list does not end: a page of it leads to itself";
            return Err(Status::internal(why));
        }
        if self.count >= limits::PAGES {
            let most = limits::PAGES;
            let why = format!("the server's list does not end: it has more than {most} pages");
            return Err(Status::internal(why));
        }
        if self.bytes > LIST {
            let why = format!("the server's list is larger than {} MiB", LIST >> 20);
            return Err(Status::resource_exhausted(why));
        }
        self.token.clone_from(&next);
        Ok(Some(next))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads the pages that these tokens lead to. Returns the number of pages, or the error.
    fn read(bytes: usize, tokens: impl IntoIterator<Item = String>) -> Result<usize, String> {
        let mut pages = Pages::default();
        for next in tokens {
            let after = pages.after(bytes, next);
            if after.map_err(|why| why.message().to_owned())?.is_none() {
                return Ok(pages.count);
            }
        }
        panic!("{pages:?} are not all")
    }

    fn tokens(count: usize) -> impl Iterator<Item = String> {
        let tokens = (1..count).map(|page| page.to_string());
        tokens.chain([String::new()])
    }

    #[test]
    fn pages_end_with_an_empty_token() {
        assert_eq!(read(0, tokens(1)), Ok(1));
        assert_eq!(read(LIST / 3, tokens(3)), Ok(3));
        // A server without pages sends all at once.
        assert_eq!(read(LIST, tokens(1)), Ok(1));
        assert_eq!(read(1, tokens(limits::PAGES)), Ok(limits::PAGES));
    }

    #[test]
    fn lists_that_do_not_end_are_errors() {
        let same = || Some("a".to_owned());
        assert_eq!(
            read(1, std::iter::from_fn(same)).unwrap_err(),
            "the server's list does not end: a page of it leads to itself"
        );
        assert_eq!(
            read(1, tokens(usize::MAX)).unwrap_err(),
            "the server's list does not end: it has more than 65536 pages"
        );
        assert_eq!(
            read(LIST / 2, tokens(usize::MAX)).unwrap_err(),
            "the server's list is larger than 256 MiB"
        );
    }
}
