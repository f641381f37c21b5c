//! Probes at source points, and ranges of lines, as a user types them.

use hvprobe_spec::definition;
use hvprobe_spec::line_range::LineRange;
use hvprobe_spec::perf_probe::{PerfProbe, PerfValue, is_perf_probe};
use hvprobe_spec::point::Point;

use super::definition::assert_shown;

/// Checks that the parts of a probe are in the text at the reported columns, that an error has a position in the
/// text, and that no valid line of kprobe_events is taken for such a probe. Returns whether the text is a probe at
/// a source point.
pub fn perf_probe(data: &[u8]) -> bool {
    let text = String::from_utf8_lossy(data);
    match LineRange::parse(&text) {
        Ok(range) => assert!(text.starts_with(&range.function)),
        Err(error) => assert_shown(&text, &error),
    }
    match Point::parse(&text) {
        Ok(point) => assert_eq!(Point::parse(&point.to_string()).as_ref(), Ok(&point)),
        Err(error) => assert_shown(&text, &error),
    }
    if definition::parse(&text).is_ok() {
        assert!(!is_perf_probe(&text));
    }
    match PerfProbe::parse(&text) {
        Ok(probe) => {
            check(&text, &probe);
            true
        }
        Err(error) => {
            assert_shown(&text, &error);
            false
        }
    }
}

fn check(text: &str, probe: &PerfProbe) {
    let behind = |column: usize| text.chars().skip(column).collect::<String>();
    let point = behind(probe.column.0);
    let point = point.split([' ', '\t']).next().unwrap_or_default();
    assert_eq!(Point::parse(point).as_ref(), Ok(&probe.point));
    for argument in &probe.arguments {
        let written = behind(argument.column.0);
        let expected = match &argument.value {
            PerfValue::Variable { name, .. } => name,
            PerfValue::Parameters => "$params",
            PerfValue::Variables => "$vars",
            PerfValue::Fetched(fetched) => fetched,
        };
        assert!(written.starts_with(expected), "{argument:?}");
    }
    if let Some(filter) = &probe.filter {
        assert!(text.contains(filter));
    }
}
