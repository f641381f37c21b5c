//! A report as one text for pasting: Markdown, with tables that are readable as plain text.

use std::fmt::Write as _;

use hvprobe_proto::v1::{Fact, ReportResponse};

use super::private::Names;
use super::smoke::{Row, Smoke};
use crate::output::table;

/// Returns the report as text, without data that identifies this machine.
pub(super) fn text(host: &ReportResponse, smoke: &Smoke, names: &Names) -> String {
    let mut out = String::from("# hvprobe doctor\n\n");
    line(&mut out, "hvprobe", &host.version);
    for of in ["processor", "KVM", "kernel"] {
        let facts: Vec<&Fact> = host.facts.iter().filter(|fact| fact.of == of).collect();
        if !facts.is_empty() {
            heading(&mut out, of);
        }
        for fact in facts {
            line(&mut out, &fact.name, &fact.value);
        }
    }
    heading(&mut out, "self-check");
    block(&mut out, &table::findings_in_full(&host.findings));
    let verdict = match host.guests_can_run {
        true => "Linux guests can run here.",
        false => "Linux guests cannot run here.",
    };
    out.push_str(verdict);
    out.push('\n');
    heading(&mut out, "smoke run");
    push_smoke(&mut out, smoke);
    names.without(&out)
}

fn heading(out: &mut String, text: &str) {
    // Writing to a string does not fail.
    let _ = writeln!(out, "\n## {text}\n");
}

fn line(out: &mut String, name: &str, value: &str) {
    let _ = writeln!(out, "- {name}: {value}");
}

fn block(out: &mut String, text: &str) {
    let _ = writeln!(out, "```\n{}\n```\n", text.trim_end());
}

fn push_smoke(out: &mut String, smoke: &Smoke) {
    let (kernel, up, call_ns, rows, failure) = match smoke {
        Smoke::NotTried(why) => {
            let _ = writeln!(out, "Not tried: {why}.");
            return;
        }
        Smoke::Tried {
            kernel,
            up,
            call_ns,
            rows,
            failure,
        } => (kernel, up, call_ns, rows, failure),
    };
    line(out, "kernel", kernel);
    if let Some(up) = up {
        let up = format!("{:.2} s", up.as_secs_f64());
        line(out, "until its first process", &up);
    }
    if let Some(ns) = call_ns {
        line(out, "a call without a probe", &format!("{ns:.0} ns"));
    }
    if !rows.is_empty() {
        out.push('\n');
        block(out, &costs(rows));
    }
    match failure {
        None => out.push_str("All probes have left, and the function is as it was before each.\n"),
        Some((why, lines)) => {
            let _ = writeln!(out, "\nIt went no further: {why}.");
            if !lines.is_empty() {
                out.push_str("\nThe guest's last words:\n\n");
                block(out, &lines.join("\n"));
            }
        }
    }
}

/// Returns a table of the cost of a hit for each probe.
fn costs(rows: &[Row]) -> String {
    let columns = [
        ("PROBE", false),
        ("AT", false),
        ("RESULT", false),
        ("HITS", true),
        ("NS PER HIT", true),
        ("EXITS PER HIT", true),
        ("WHY", false),
    ];
    table::table(
        &columns,
        rows.iter().map(|row| {
            let mut cells = vec![row.what.to_owned(), row.place.clone()];
            cells.extend(match &row.outcome {
                Ok(cost) => [
                    "ok".to_owned(),
                    cost.hits.to_string(),
                    format!("{:.0}", cost.ns),
                    format!("{:.2}", cost.exits),
                    String::new(),
                ],
                Err(why) => ["failed", "-", "-", "-", why].map(str::to_owned),
            });
            cells
        }),
    )
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use expect_test::expect;
    use hvprobe_proto::v1::{Finding, Verdict};

    use super::super::smoke::Cost;
    use super::*;

    fn host() -> ReportResponse {
        let fact = |of: &str, name: &str, value: &str| Fact {
            of: of.to_owned(),
            name: name.to_owned(),
            value: value.to_owned(),
        };
        ReportResponse {
            guests_can_run: true,
            findings: vec![Finding {
                what: "int3 in the guest's kernel".to_owned(),
                seen: "debug-exit".to_owned(),
                meaning: "probes are caught by KVM itself".to_owned(),
                verdict: Verdict::Good.into(),
            }],
            version: "0.1.0".to_owned(),
            facts: vec![
                fact("processor", "vendor", "GenuineIntel"),
                fact("KVM", "parameters of kvm_intel", "ept=Y nested=Y"),
                fact("kernel", "release", "6.1.0-9-amd64"),
            ],
            ..ReportResponse::default()
        }
    }

    fn row(what: &'static str, outcome: Result<Cost, String>) -> Row {
        Row {
            what,
            place: "__x64_sys_getpgid".to_owned(),
            outcome,
        }
    }

    fn tried() -> Smoke {
        let cost = |ns, exits| Cost {
            hits: 15_000,
            ns,
            exits,
        };
        Smoke::Tried {
            kernel: "vmlinuz-6.1.0-9-amd64".to_owned(),
            up: Some(Duration::from_millis(345)),
            call_ns: Some(98.4),
            rows: vec![
                row("kprobe, optimized", Ok(cost(21.3, 0.0))),
                row("kprobe, emulated", Ok(cost(1180.6, 1.0))),
                row("kprobe, boosted", Err("it is emulated there".to_owned())),
            ],
            failure: None,
        }
    }

    #[test]
    fn report_has_the_host_its_checks_the_smoke_run_and_costs() {
        expect![[r#"
            # hvprobe doctor

            - hvprobe: 0.1.0

            ## processor

            - vendor: GenuineIntel

            ## KVM

            - parameters of kvm_intel: ept=Y nested=Y

            ## kernel

            - release: 6.1.0-9-amd64

            ## self-check

            ```
            CHECK                       RESULT  SEEN        WHAT IT MEANS
            int3 in the guest's kernel  ok      debug-exit  probes are caught by KVM itself
            ```

            Linux guests can run here.

            ## smoke run

            - kernel: vmlinuz-6.1.0-9-amd64
            - until its first process: 0.34 s
            - a call without a probe: 98 ns

            ```
            PROBE              AT                 RESULT   HITS  NS PER HIT  EXITS PER HIT  WHY
            kprobe, optimized  __x64_sys_getpgid  ok      15000          21           0.00
            kprobe, emulated   __x64_sys_getpgid  ok      15000        1181           1.00
            kprobe, boosted    __x64_sys_getpgid  failed      -           -              -  it is emulated there
            ```

            All probes have left, and the function is as it was before each.
        "#]].assert_eq(&text(&host(), &tried(), &Names::default()));
    }

    #[test]
    fn report_says_why_there_was_no_smoke_run() {
        let smoke = Smoke::NotTried("no kernel is installed".to_owned());
        let text = text(&host(), &smoke, &Names::default());
        assert!(
            text.ends_with("Not tried: no kernel is installed.\n"),
            "{text}"
        );
    }

    #[test]
    fn report_of_a_guest_that_failed_has_its_last_words_without_its_addresses() {
        let smoke = Smoke::Tried {
            kernel: "vmlinuz".to_owned(),
            up: None,
            call_ns: None,
            rows: Vec::new(),
            failure: Some((
                "the guest ended: reset".to_owned(),
                vec!["Kernel panic at 0xffffffff81000000 (52:54:00:12:34:56)".to_owned()],
            )),
        };
        let text = text(&host(), &smoke, &Names::default());
        assert!(
            text.contains("It went no further: the guest ended: reset."),
            "{text}"
        );
        assert!(
            text.contains("Kernel panic at [kernel address] ([hardware address])"),
            "{text}"
        );
    }
}
