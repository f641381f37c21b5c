//! Pages of lists.
//!
//! A token names the last item of the previous page. Invariants: a client that follows the tokens gets each item
//! that exists throughout exactly once; no message is larger than what every client accepts, unless a single item
//! is.

use std::str::FromStr;

use hvprobe_proto::Failure;
use hvprobe_proto::v1::{self, ErrorKind};
use prost::Message;

use crate::bounds::limits;

/// Maximum number of bytes of the items in one message: half of what clients accept, which leaves room for
/// everything else.
const PAGE: usize = 2 << 20;

// A client reads at most `PAGES` pages. Each has at least one probe, so they are enough for all probes.
const _: () = assert!(hvprobe_engine::PROBES_MAX <= hvprobe_proto::limits::PAGES);

fn bad_token() -> Failure {
    let why = "bad page token: take it from the answer before";
    Failure::invalid(ErrorKind::BadPage, why).on("page_token")
}

/// Returns the number of the last item of the previous page, if `token` names one.
///
/// # Errors
/// When `token` is no token of such a list.
pub(crate) fn last<N: FromStr>(token: &str) -> Result<Option<N>, Failure> {
    let number = (!token.is_empty()).then(|| token.parse());
    number.transpose().map_err(|_| bad_token())
}

/// Checks `token` and returns it: it is the name of the last machine of the previous page, and empty for the first
/// page.
///
/// # Errors
/// When `token` is no token of such a list.
pub(crate) fn last_name(token: String) -> Result<String, Failure> {
    if !token.is_empty() {
        limits::machine_name(&token).map_err(|_| bad_token())?;
    }
    Ok(token)
}

/// Returns the first page of `items`, and the token for the next page. The page has at most `most` items, or as
/// many as fit if `most` is 0. An item that is larger than any page gets a page of its own.
pub(crate) fn first<K: ToString, T: Message>(
    items: impl IntoIterator<Item = (K, T)>,
    most: u32,
) -> (Vec<T>, String) {
    let most = match most {
        0 => usize::MAX,
        most => usize::try_from(most).unwrap_or(usize::MAX),
    };
    let (mut page, mut bytes, mut last) = (Vec::new(), 0_usize, None);
    for (key, item) in items {
        bytes = bytes.saturating_add(item.encoded_len());
        if page.len() == most || (bytes > PAGE && !page.is_empty()) {
            return (page, last.as_ref().map_or_else(String::new, K::to_string));
        }
        page.push(item);
        last = Some(key);
    }
    (page, String::new())
}

/// Returns the page of `items` that begins after the item that `token` names, and the token for the next page. The
/// items are in the order of their numbers.
pub(crate) fn of_numbered<N: Copy + Ord + FromStr + ToString, T: Message>(
    items: Vec<(N, T)>,
    most: u32,
    token: &str,
) -> Result<(Vec<T>, String), Failure> {
    let last = last::<N>(token)?;
    let items = items.into_iter();
    let following = items.filter(|(number, _)| last.is_none_or(|last| *number > last));
    Ok(first(following, most))
}

/// Returns the page of `probes` that begins after the probe that `token` names, and the token for the next page.
/// The probes are in the order of their ids.
pub(crate) fn of_probes(
    probes: Vec<v1::Probe>,
    most: u32,
    token: &str,
) -> Result<(Vec<v1::Probe>, String), Failure> {
    let numbered = probes.into_iter().map(|probe| (probe.id, probe));
    of_numbered(numbered.collect(), most, token)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn probe(id: u32, size: usize) -> v1::Probe {
        v1::Probe {
            id,
            name: "x".repeat(size),
            ..Default::default()
        }
    }

    /// Returns all pages, as a client that follows the tokens gets them.
    fn all(probes: &[v1::Probe], most: u32) -> Vec<Vec<u32>> {
        let (mut pages, mut token) = (Vec::new(), String::new());
        loop {
            let (page, next) = of_probes(probes.to_vec(), most, &token).unwrap();
            pages.push(page.iter().map(|probe| probe.id).collect());
            if next.is_empty() {
                return pages;
            }
            token = next;
        }
    }

    #[test]
    fn what_fits_is_one_page_and_nothing_is_one_too() {
        assert_eq!(all(&[], 0), [[0_u32; 0]]);
        let probes: Vec<_> = (1..=600).map(|id| probe(id, 100)).collect();
        assert_eq!(all(&probes, 0).len(), 1);
        assert_eq!(all(&probes[..5], 2), [vec![1, 2], vec![3, 4], vec![5]]);
    }

    #[test]
    fn a_probe_larger_than_a_page_is_listed_alone() {
        let probes = [probe(1, 10), probe(2, 3 << 20), probe(9, 10)];
        assert_eq!(all(&probes, 0), [[1], [2], [9]]);
    }

    #[test]
    fn a_token_that_is_none_is_refused() {
        for token in ["-1", "one", "4294967296", " 1"] {
            assert!(of_probes(vec![probe(1, 1)], 0, token).is_err(), "{token}");
        }
        for token in ["a b", "-", "\n", "ä"] {
            assert!(last_name(token.to_owned()).is_err(), "{token}");
        }
    }

    /// Returns all pages of machines with reports of these sizes.
    fn machines(sizes: &[usize], most: u32) -> Vec<Vec<String>> {
        let (mut pages, mut token) = (Vec::new(), String::new());
        loop {
            let last = last_name(token).unwrap();
            let named = sizes.iter().enumerate();
            let named = named.map(|(number, size)| (format!("vm{number:03}"), size));
            let following = named.filter(|(name, _)| *name > last).map(|(name, size)| {
                let ending = v1::Ending {
                    report: "x".repeat(*size),
                    ..Default::default()
                };
                let machine = v1::Machine {
                    name: name.clone(),
                    ending: Some(ending),
                    ..Default::default()
                };
                (name, machine)
            });
            let (listed, next) = first(following, most);
            pages.push(listed.into_iter().map(|machine| machine.name).collect());
            if next.is_empty() {
                return pages;
            }
            token = next;
        }
    }

    proptest! {
        #[test]
        fn pages_put_together_are_the_list_and_none_is_too_large(
            sizes in prop::collection::vec(0..700_000_usize, 0..20),
            most in 0..6_u32,
        ) {
            let ids = (1..).map(|n: u32| n * 3);
            let probes: Vec<_> = ids.zip(&sizes).map(|(id, size)| probe(id, *size)).collect();
            let pages = all(&probes, most);
            let listed: Vec<u32> = pages.concat();
            prop_assert_eq!(listed, probes.iter().map(|probe| probe.id).collect::<Vec<_>>());
            for page in pages {
                let size = |id: &u32| sizes[usize::try_from(id / 3 - 1).unwrap()];
                prop_assert!(page.iter().map(size).sum::<usize>() <= PAGE);
                prop_assert!(most == 0 || page.len() <= usize::try_from(most).unwrap());
            }
        }

        #[test]
        fn machines_are_listed_once_each_too(
            sizes in prop::collection::vec(0..700_000_usize, 0..20),
            most in 0..6_u32,
        ) {
            let pages = machines(&sizes, most);
            let names: Vec<_> = (0..sizes.len()).map(|number| format!("vm{number:03}")).collect();
            prop_assert_eq!(pages.concat(), names);
            for page in pages {
                let size = |name: &String| sizes[name[2..].parse::<usize>().unwrap()];
                prop_assert!(page.iter().map(size).sum::<usize>() <= PAGE);
                prop_assert!(most == 0 || page.len() <= usize::try_from(most).unwrap());
            }
        }
    }
}
