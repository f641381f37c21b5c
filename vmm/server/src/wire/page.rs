//! Lists, a page at a time.
//!
//! A token names the last probe of the page before. Invariant: whoever follows the tokens is told each
//! probe that is there all the time exactly once, and no message is larger than every client accepts.

use hvprobe_proto::v1::{self, ErrorKind};
use prost::Message as _;
use tonic::Code;

use crate::status::Failure;

/// Bytes of the probes in one message: half of what clients accept, so that there is room for the rest.
const PAGE: usize = 2 << 20;

/// The page of `probes`, which are in the order of their ids, behind the one that ended with `token`; with
/// the token for the next.
pub(crate) fn of_probes(
    mut probes: Vec<v1::Probe>,
    most: u32,
    token: &str,
) -> Result<(Vec<v1::Probe>, String), Failure> {
    if !token.is_empty() {
        let last: u32 = token.parse().map_err(|_| {
            let why = "bad page token: take it from the answer before";
            Failure::new(Code::InvalidArgument, ErrorKind::BadPage, why)
        })?;
        probes.retain(|probe| probe.id > last);
    }
    let most = match most {
        0 => usize::MAX,
        most => usize::try_from(most).unwrap_or(usize::MAX),
    };
    let mut bytes = 0;
    let fits = probes.iter().take(most).take_while(|probe| {
        bytes += probe.encoded_len();
        bytes <= PAGE
    });
    // One that is larger than any page still has to be told.
    let len = fits.count().max(1).min(probes.len());
    let more = len < probes.len();
    probes.truncate(len);
    let next = probes.last().filter(|_| more);
    let next = next.map_or_else(String::new, |probe| probe.id.to_string());
    Ok((probes, next))
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

    /// All pages, as whoever follows the tokens gets them.
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
    fn a_probe_larger_than_a_page_is_told_alone() {
        let probes = [probe(1, 10), probe(2, 3 << 20), probe(9, 10)];
        assert_eq!(all(&probes, 0), [[1], [2], [9]]);
    }

    #[test]
    fn a_token_that_is_none_is_refused() {
        for token in ["-1", "one", "4294967296", " 1"] {
            assert!(of_probes(vec![probe(1, 1)], 0, token).is_err(), "{token}");
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
            let told: Vec<u32> = pages.concat();
            prop_assert_eq!(told, probes.iter().map(|probe| probe.id).collect::<Vec<_>>());
            for page in pages {
                let size = |id: &u32| sizes[usize::try_from(id / 3 - 1).unwrap()];
                prop_assert!(page.iter().map(size).sum::<usize>() <= PAGE);
                prop_assert!(most == 0 || page.len() <= usize::try_from(most).unwrap());
            }
        }
    }
}
