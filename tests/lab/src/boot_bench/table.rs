//! The comparison as a table with a row per quantity. Beside each of QEMU's values is its ratio to hvprobe's.

use std::fmt::Write;

use hvprobe_lab::measure::median;

use crate::boot::Boot;
use crate::vmm::Vmm;

/// A quantity: its name with the unit, and its value in one boot.
type Row = (&'static str, fn(&Boot) -> Option<f64>);

const ROWS: [Row; 3] = [
    ("start to first guest instruction, ms", |boot| {
        boot.first_instruction.map(|time| time.as_secs_f64() * 1e3)
    }),
    ("start to /init, ms", |boot| {
        Some(boot.init.as_secs_f64() * 1e3)
    }),
    ("memory beyond guest RAM, MiB", |boot| {
        u32::try_from(boot.overhead)
            .ok()
            .map(|kib| f64::from(kib) / 1024.0)
    }),
];

/// Renders the medians of all boots. A ratio above 1 means that hvprobe needs less.
pub(crate) fn render(boots: &[(Vmm, Boot)]) -> String {
    let mut table = format!("{:<38}{:>10}", "", Vmm::Hvprobe);
    let others = &Vmm::ALL[1..];
    for vmm in others {
        let _ = write!(table, "{vmm:>14}{:>8}", "ratio");
    }
    table.push('\n');
    for (name, value) in ROWS {
        let of = |vmm: Vmm| {
            median(
                boots
                    .iter()
                    .filter(|(booted, _)| *booted == vmm)
                    .filter_map(|(_, boot)| value(boot))
                    .collect(),
            )
        };
        let ours = of(Vmm::Hvprobe);
        let _ = write!(table, "{name:<38}{:>10}", number(ours));
        for vmm in others {
            let theirs = of(*vmm);
            let ratio = theirs.zip(ours).map(|(theirs, ours)| theirs / ours);
            let _ = write!(table, "{:>14}{:>8}", number(theirs), number(ratio));
        }
        table.push('\n');
    }
    table
}

fn number(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.2}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::time::Duration;

    use expect_test::expect;
    use hvprobe_lab::documented;

    fn boot(first: Option<u64>, init: u64, overhead: u64) -> Boot {
        Boot {
            first_instruction: first.map(Duration::from_millis),
            init: Duration::from_millis(init),
            overhead,
        }
    }

    #[test]
    fn table_shows_medians_ratios_and_what_is_missing() {
        let boots = [
            (Vmm::Hvprobe, boot(Some(10), 100, 2048)),
            (Vmm::Hvprobe, boot(Some(30), 300, 2048)),
            (Vmm::Hvprobe, boot(Some(20), 200, 2048)),
            (Vmm::HvprobeBzImage, boot(Some(40), 240, 2048)),
            (Vmm::Microvm, boot(Some(50), 400, 8192)),
            (Vmm::Q35, boot(None, 1000, 10240)),
        ];
        expect![[r#"
                                                     hvprobe   its bzImage   ratio  qemu microvm   ratio      qemu q35   ratio
            start to first guest instruction, ms       20.00         40.00    2.00         50.00    2.50             -       -
            start to /init, ms                        200.00        240.00    1.20        400.00    2.00       1000.00    5.00
            memory beyond guest RAM, MiB                2.00          2.00    1.00          8.00    4.00         10.00    5.00
        "#]]
        .assert_eq(&render(&boots));
    }

    #[test]
    fn the_page_of_figures_shows_this_table() {
        let page = documented::page(documented::PERFORMANCE).unwrap();
        let shown = &documented::headings(&page, "boot")["boot"];
        let table = render(&[]);
        let printed: Vec<_> = table.lines().filter_map(documented::heading).collect();
        assert_eq!(*shown, printed);
    }
}
