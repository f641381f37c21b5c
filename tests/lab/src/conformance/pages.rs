//! Cases from pages of the kernel's documentation: `echo` commands, definitions, filters, and triggers in the
//! format in which the kernel prints them.
//!
//! A page is not a script, so only lines whose meaning is clear are read. The commands `echo` and `cd`, with or
//! without a prompt before them, are read as in a script.

use super::cases::{Expected, Found};
use super::script::{Script, joined};

/// Fields, each with an event that has the field. For filters that a page shows without their event.
const FIELDS: [(&str, &str); 9] = [
    ("call_site", "kmem/kmalloc"),
    ("comm", "sched/sched_wakeup"),
    ("common_pid", "sched/sched_wakeup"),
    ("common_preempt_count", "sched/sched_wakeup"),
    ("cpu", "sched/sched_wakeup"),
    ("filename", "sched/sched_process_exec"),
    ("prev_comm", "sched/sched_switch"),
    ("prev_pid", "sched/sched_switch"),
    ("target_cpu", "sched/sched_wakeup"),
];

/// Comparison operators of filters.
const OPERATORS: [&str; 8] = ["==", "!=", "<=", ">=", "~", "<", ">", "&"];

/// Reads the page `name`, whose contents are `text`.
pub(super) fn read(name: &str, text: &str, found: &mut Found) {
    let lines: Vec<_> = text.lines().collect();
    // The event that the page named last. A trigger in the format in which the kernel prints it does not name its
    // event.
    let mut event = None;
    let mut script = Script::new(found);
    for (at, line) in lines.iter().enumerate() {
        let origin = format!("{name}:{}", at + 1);
        event = event_of(line).or(event);
        if let Some(command) = command(line) {
            let mut rest = vec![command];
            rest.extend(&lines[at + 1..]);
            script.line_at(origin, &joined(&rest).0);
        } else if let Some((trigger, event)) = printed(line).zip(event) {
            let file = format!("events/{event}/trigger");
            script
                .found()
                .written(&file, Ok(trigger), Expected::Nothing, &origin);
        } else if is_definition(line) {
            let text = line.trim();
            let file = match text.starts_with('f') {
                true => "dynamic_events",
                false => "kprobe_events",
            };
            script
                .found()
                .written(file, Ok(text), Expected::Nothing, &origin);
        } else if let Some(field) = compared(line) {
            let of = FIELDS.iter().find(|(known, _)| *known == field);
            match of {
                Some((_, event)) => {
                    let file = format!("events/{event}/filter");
                    script
                        .found()
                        .written(&file, Ok(line.trim()), Expected::Nothing, &origin);
                }
                None => {
                    let why = "is a filter of an event that is not named";
                    script.found().leave(why, &origin, line.trim());
                }
            }
        }
    }
}

/// Returns the command in a line, without the prompt, if it is `echo` or `cd`.
fn command(line: &str) -> Option<&str> {
    let line = line.trim_start();
    let rest = line.trim_start_matches(['#', '$', '~', ' ']);
    let is_known = |word: &str| rest.starts_with(word);
    ["echo ", "cd "].into_iter().any(is_known).then_some(rest)
}

/// Returns the event whose files a line names.
fn event_of(line: &str) -> Option<&str> {
    let (_, path) = line.split_once("/events/")?;
    let end = path
        .find(|c: char| c.is_whitespace() || c == '\'')
        .unwrap_or(path.len());
    let path = path[..end]
        .strip_suffix("/hist")
        .or(path[..end].strip_suffix("/trigger"))?;
    (path.split('/').count() == 2 && !path.contains('*')).then_some(path)
}

/// Returns the trigger in a line that has the format in which the kernel prints triggers.
fn printed(line: &str) -> Option<&str> {
    let line = line.trim();
    let line = line.strip_prefix("# trigger info: ").unwrap_or(line);
    let end = line.find(" [active]").or_else(|| line.find(" [paused]"))?;
    line.starts_with("hist:").then_some(&line[..end])
}

/// Returns whether `line` is a definition: it is indented, and begins like a probe with a name.
fn is_definition(line: &str) -> bool {
    let text = line.trim_start();
    let rest = text.strip_prefix(['p', 'r', 'f']);
    let rest = rest.map(|rest| rest.trim_start_matches(|c: char| c.is_ascii_digit()));
    let named = rest.and_then(|rest| rest.strip_prefix(':'));
    let named = named.and_then(|rest| rest.split_once(' '));
    let is_name = |name: &str| {
        name.chars()
            .all(|c| c == '_' || c == '/' || c.is_ascii_alphanumeric())
    };
    text.len() < line.len() && named.is_some_and(|(name, rest)| is_name(name) && !rest.is_empty())
}

/// Returns the field that `line` compares with a value, if the line is indented and a filter.
fn compared(line: &str) -> Option<&str> {
    let text = line.trim();
    if !line.starts_with([' ', '\t']) {
        return None;
    }
    let end = text.find(|c: char| c != '_' && !c.is_ascii_alphanumeric())?;
    let (field, rest) = text.split_at(end);
    let rest = match rest.strip_prefix('.') {
        Some(rest) => rest.trim_start_matches(|c: char| c.is_ascii_lowercase()),
        None => rest,
    };
    let mut words = rest.strip_prefix(' ')?.split(' ');
    let (operator, value) = (words.next()?, words.next()?);
    let is_value = value.starts_with(['"', '\'', '-'])
        || value.starts_with("CPUS{")
        || value.chars().all(|c| c == '_' || c.is_ascii_alphanumeric());
    // The value is one word. After it the line ends, or another comparison follows.
    let goes_on = words.next().is_none_or(|word| matches!(word, "&&" | "||"));
    let is_one = OPERATORS.contains(&operator) && is_value && goes_on;
    (is_one && field.starts_with(|c: char| c.is_ascii_lowercase())).then_some(field)
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::super::cases::Case;
    use super::*;

    #[test]
    fn lines_are_read_that_can_be_nothing_else() {
        let page = "\
Filters
=======

A filter is like this, and x == 1 is none here::

\tprev_comm ~ \"*sh\"
\tfilename.ustring ~ \"password\"
\tstrange == 1

  # echo 'hist:keys=pid if \\
    comm==\"x\"' > \\
    /sys/kernel/debug/tracing/events/sched/sched_wakeup/trigger
  # cat /sys/kernel/debug/tracing/events/sched/sched_wakeup/hist
  # trigger info: hist:keys=pid:vals=hitcount:sort=hitcount:size=2048 [active]

  p:mine vfs_read $arg1
  f:fprobes/x vfs_read
  p[:[GRP/]EVENT] SYM

\t# cd /sys/kernel/debug/tracing/events/signal/signal_generate
\t# echo \"sig >= 10\" > filter
";
        let mut found = Found::default();
        read("a.rst", page, &mut found);
        let cases: Vec<_> = found.cases.iter().map(Case::to_string).collect();
        expect![[r#"
            events/sched/sched_switch/filter - a.rst:6 prev_comm ~ "*sh"
            events/sched/sched_process_exec/filter - a.rst:7 filename.ustring ~ "password"
            events/sched/sched_wakeup/trigger - a.rst:10 hist:keys=pid if comm=="x"
            events/sched/sched_wakeup/trigger - a.rst:14 hist:keys=pid:vals=hitcount:sort=hitcount:size=2048
            kprobe_events - a.rst:16 p:mine vfs_read $arg1
            dynamic_events - a.rst:17 f:fprobes/x vfs_read
            events/signal/signal_generate/filter - a.rst:21 sig >= 10
            left out, as it is a filter of an event that is not named: 1
              strange == 1  (a.rst:8)
        "#]]
        .assert_eq(&format!("{}\n{}", cases.join("\n"), found.left_out()));
    }
}
