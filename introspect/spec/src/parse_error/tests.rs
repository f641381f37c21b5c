//! Tests of the text that is shown with an error: a bounded part of the refused text, with the caret at the
//! mistake.

use super::*;
use crate::definition::{parse, parse_file};
use crate::fetch::read_filter;
use crate::histogram::read_histogram;
use crate::language;
use crate::line_range::LineRange;
use crate::perf_probe::PerfProbe;
use crate::point::Point;
use crate::script::{compile, read_script};

#[test]
fn of_a_long_text_what_is_around_the_column_is_shown() {
    let text = format!("{}\t!{}", "a".repeat(5000), "b".repeat(100_000));
    let error = ParseError {
        column: 5001,
        message: String::new(),
    };
    let picture = error.render(&text);
    let (shown, caret) = picture.split_once('\n').unwrap();
    let expected = format!("…{}\t!{}…", "a".repeat(99), "b".repeat(99));
    assert_eq!(shown, expected);
    assert_eq!(caret, format!("{}\t^", " ".repeat(100)));
}

#[test]
fn of_a_long_word_the_beginning_is_repeated() {
    assert_eq!(bounded("a\u{1b}b").to_string(), "a?b");
    let fits = "é".repeat(WORD);
    assert_eq!(bounded(&fits).to_string(), fits);
    assert_eq!(
        quoted(&(fits.clone() + "é")).to_string(),
        format!("`{fits}…`")
    );
}

/// Parses a text. Returns the line with the mistake and the error, or `None` if there is no mistake.
type Reader = fn(&str) -> Option<(String, ParseError)>;

fn of<T>(text: &str, read: Result<T, ParseError>) -> Option<(String, ParseError)> {
    Some((text.to_owned(), read.err()?))
}

fn script(text: &str) -> Option<(String, ParseError)> {
    let compiled = read_script(text).and_then(|script| compile(text, &script));
    compiled.err().map(|error| (error.text, error.source))
}

fn file(text: &str) -> Option<(String, ParseError)> {
    parse_file(text)
        .err()
        .map(|error| (error.text, error.source))
}

/// All parsers of texts that users write, each with texts that it accepts and texts with each kind of mistake.
#[rustfmt::skip]
const READERS: &[(&str, Reader, &[&str])] = &[
    ("definition", |text| of(text, parse(text)), &[
        "p", "vfs_read", "0x1", "vfs_*", "q vfs_read", "t sched_switch", "u:a /bin/ls:0x1", "k:vfs_read",
        "p:g/e vfs_read+0x10 %di", "r20:e mod:vfs_read", "f:e vfs_read%return", "p vfs_[a-z]*",
        "p 0xffffffff81000000 x", "p vfs_read a=%di:x64 b=$arg2 +0(%si):string @jiffies+8 \\\"text\"",
        "p vfs_read (task)%si->pid $current->a.b", "p vfs_read a=+0(%di):u8[4] b3@2/8 if a == 1",
        "p a if pid == 7 && comm ~ \"a*[b]\" || !(cpu != 3)", "p a if b.function == c",
    ]),
    ("filter", |text| of(text, read_filter(text)), &[
        "pid == 7", "comm == \"a\" || b", "flags & O_RDWR|O_CREAT", "a == -EAGAIN", "cpu & CPUS{0,2-4}",
        "a.function == b", "(a", "a ~ 1",
    ]),
    ("histogram", |text| of(text, read_histogram(text)), &[
        "hist:keys=a.hex,b/7.log2:vals=c.avg:sort=c.descending:size=7 if a == 1", "keys=a:sort=b",
        "keys=a:foo=b", "foo", "keys=a.foo", "keys=a:keys=b", "onmatch:a", "keys=a.buckets=0",
        "keys=a:vals=b.foo", "keys=a:size=0",
    ]),
    ("script", script, &[
        "kprobe:vfs_read /arg0 == 1 && comm == \"a\"/ { @[pid, str(arg1)] = hist(arg2); }",
        "k:a { printf(\"%d %s\", pid, comm); }", "foo:bar { }", "struct foo { }", "config = { foo = bar }",
        "interval:foo:5 { }", "k:a { foo(); }", "k:a { foo = 1; }", "k:a { @x = foo(arg0); }",
        "k:a { @x[foo] = count(); }", "k:a { @x[foo()] = count(); }", "k:a { @x[args.foo->bar] = count(); }",
        "k:a /foo/ { }", "k:a /arg0 == foo/ { }", "k:a /args.foo == (A|foo)/ { }", "k:a /args.foo == -foo/ { }",
        "k:a { @s[tid] = nsecs; } kr:b { @ = hist(nsecs - @s[tid]); }", "k:a { print(@foo); }",
        "END { print(@foo); }", "k:foo+1bar { }", "#ifdef foo\nk:a { }", "k:a { time(\"%Q\"); }",
        "k:a { @x = lhist(arg0, 1, 2, 3); }", "k:a { printf(\"%f\", foo); }",
    ]),
    ("file", file, &[
        "p:e vfs_read a=%di", "p:e vfs_read\nevents/kprobes/e/filter:pid == 7",
        "p:e a\nevents/kprobes/foo/filter:pid == 7", "p:e a\necho 'hist:keys=pid' > events/kprobes/e/trigger",
        "p:e a\necho foo > /dev/null", "p:e a\nevents/kprobes/e/foo:x",
    ]),
    ("perf probe", |text| of(text, PerfProbe::parse(text)), &[
        "vfs_read:12 count file->f_pos", "e=vfs_read%return $retval:s64", "1e=vfs_read", "g:e=a@b.c:3 a=b",
        "vfs_read 1a=b", "vfs_read a=$params", "vfs_read %di@user", "vfs_read a[1].b", "fs/a.c;text*",
        "vfs_read+foo",
    ]),
    ("point", |text| of(text, Point::parse(text)), &[
        "vfs_read:12", "fs/a.c:12", "0xffffffff81000000", "vfs_read@fs/a.c%return", "vfs_read%foo",
    ]),
    ("lines", |text| of(text, LineRange::parse(text)), &[
        "vfs_read:6-12", "vfs_read:6+7", "vfs_read:foo", "foo",
    ]),
    ("capture", |text| of(text, language::capture(text)), &[
        "%di", "+16(%di):32", "$stack3", "%foo", "+1(%foo)", "foo", "%di foo",
    ]),
    ("change", |text| of(text, language::change(text)), &[
        "%ax=-ENOMEM", "+8(%di)=u32:5", "@0x10=hex:0011", "%ax=-EFOO", "%ax=5foo", "+8(%di)=foo:5",
        "@0x10=hex:0g",
    ]),
    ("condition", |text| of(text, language::condition(text)), &[
        "%di==0x10", "%di&7", "%foo==1", "%di=1", "%di==foo",
    ]),
    ("decision", |text| of(text, language::decision(text)), &[
        "proceed", "return=-EPERM,%di=1", "jump=0x10", "foo", "return=EPERM",
    ]),
    ("ask", |text| of(text, language::ask(text)), &["5s,proceed", "100ms,return=-EIO", "5foo,proceed", "5s,foo"]),
    ("value", |text| of(text, language::value(text)), &["-5", "0x10", "-ENOMEM", "ENOMEM", "-EFOO", "5 foo"]),
    ("address", |text| of(text, language::address(text)), &["0x10", "foo"]),
    ("rate", |text| of(text, language::rate(text)), &["1000/s", "foo"]),
    ("share", |text| of(text, language::share(text)), &["5%", "foo"]),
];

/// Returns variants of `text` in which a long text replaces a word or stands between two characters.
fn lengthened(text: &str) -> Vec<String> {
    const LONG: usize = 1500;
    let is_of_word = |c: char| c == '_' || c.is_ascii_alphanumeric();
    let mut all = Vec::new();
    let mut behind = 0;
    while let Some(found) = text[behind..].find(is_of_word) {
        let start = behind + found;
        let length = text[start..].find(|c| !is_of_word(c));
        behind = length.map_or(text.len(), |length| start + length);
        let word = &text[start..behind];
        for long in [
            word.repeat(LONG / word.len()),
            "x".repeat(LONG),
            "7".repeat(LONG),
        ] {
            all.push(format!("{}{long}{}", &text[..start], &text[behind..]));
        }
    }
    for (at, _) in text.char_indices().chain([(text.len(), ' ')]) {
        for long in ["z", "?", "&&a", "é\t"] {
            let long = long.repeat(LONG);
            all.push(format!("{}{long}{}", &text[..at], &text[at..]));
        }
    }
    all
}

#[test]
fn however_long_a_text_is_little_of_it_is_shown_with_the_caret_where_it_is_wrong() {
    const MESSAGE: usize = 400;
    let mut refused = 0;
    for (name, read, texts) in READERS {
        for text in *texts {
            for long in lengthened(text) {
                let Some((line, error)) = read(&long) else {
                    continue;
                };
                refused += 1;
                let what = || format!("{name}, `{text}`: {}", bounded(&error.message));
                assert!(error.message.chars().count() < MESSAGE, "{}", what());
                let picture = error.render(&line);
                let (shown, caret) = picture.split_once('\n').unwrap();
                assert!(shown.chars().count() <= LONGEST, "{}", what());
                assert!(caret.trim_start() == "^", "{}", what());
                let meant = line.chars().nth(error.column).map(pictured);
                let pointed = shown.chars().nth(caret.chars().count() - 1);
                assert_eq!(pointed, meant, "{}", what());
            }
        }
    }
    assert!(refused > 5000, "{refused}");
}
