//! Choice of probes of a machine, by the numbers or names that the user gives.

use anyhow::bail;
use hvprobe_proto::v1;
use hvprobe_spec::bounded;

/// Returns the ids of the probes that `chosen` names, by number or by name.
pub(crate) fn choose(probes: &[v1::Probe], chosen: &[String]) -> anyhow::Result<Vec<u32>> {
    let mut ids = Vec::with_capacity(chosen.len());
    for wanted in chosen {
        let by_id = wanted
            .parse::<u32>()
            .ok()
            .and_then(|id| probes.iter().find(|probe| probe.id == id));
        let mut named = probes.iter().filter(|probe| probe.name == *wanted);
        let id = match (by_id, named.next(), named.next()) {
            (Some(probe), _, _) | (None, Some(probe), None) => probe.id,
            (None, Some(_), Some(_)) => {
                let wanted = bounded(wanted);
                bail!("several probes are called {wanted}; give their numbers instead")
            }
            (None, None, _) => {
                let wanted = bounded(wanted);
                bail!("there is no probe {wanted}; `hvprobe probe list` shows them")
            }
        };
        if !ids.contains(&id) {
            ids.push(id);
        }
    }
    Ok(ids)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn probes() -> Vec<v1::Probe> {
        [(1, "a"), (2, "b"), (3, "b")]
            .map(|(id, name)| v1::Probe {
                id,
                name: name.into(),
                ..Default::default()
            })
            .into()
    }

    fn chosen(words: &[&str]) -> Result<Vec<u32>, String> {
        let words: Vec<String> = words.iter().map(|&word| word.to_owned()).collect();
        choose(&probes(), &words).map_err(|error| error.to_string())
    }

    #[test]
    fn probes_are_chosen_once_by_number_or_name() {
        assert_eq!(chosen(&["3", "a", "1"]), Ok(vec![3, 1]));
        assert_eq!(chosen(&[]), Ok(vec![]));
    }

    #[test]
    fn unknown_and_ambiguous_names_are_refused() {
        assert!(chosen(&["b"]).unwrap_err().contains("several"));
        assert!(chosen(&["7"]).unwrap_err().contains("no probe 7"));
    }
}
