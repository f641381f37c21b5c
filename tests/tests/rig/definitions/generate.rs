//! Generates the same definitions every time: valid ones by the grammar, and invalid ones by changing valid ones.

/// Number of generated definitions, in addition to those in `written.txt`.
pub(super) const MADE_UP: usize = 1700;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// Returns a random number below `limit`, which must not be zero.
    fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.next() % limit as u64).expect("below a usize")
    }

    fn one<'a>(&mut self, of: &[&'a str]) -> &'a str {
        of[self.below(of.len())]
    }

    /// Returns `true` with a probability of one in `times`.
    fn once_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }
}

/// Arguments for the corner cases of the parser.
const WRITTEN: &str = include_str!("written.txt");

const REGISTERS: [&str; 12] = [
    "%di", "%si", "%dx", "%cx", "%ax", "%bx", "%bp", "%sp", "%r8", "%r15", "%ip", "%flags",
];
const OFFSETS: [&str; 8] = ["0", "8", "16", "0x10", "0xfff8", "010", "1", "2147483648"];

/// Kind of an expression, which decides the types it can have.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sort {
    Number,
    Memory,
    UserMemory,
    Text,
}

fn expression(random: &mut Random, returns: bool, depth: usize) -> (String, Sort) {
    match random.below(if depth == 0 { 7 } else { 12 }) {
        0 | 1 => (random.one(&REGISTERS).to_owned(), Sort::Number),
        2 => (format!("$stack{}", random.below(2049)), Sort::Number),
        3 if returns => ("$retval".to_owned(), Sort::Number),
        3 => (format!("$arg{}", 1 + random.below(6)), Sort::Number),
        4 => {
            let symbol = random.one(&["jiffies", "init_task", "init_task+8", "init_task-0x8"]);
            (format!("@{symbol}"), Sort::Memory)
        }
        5 => (
            format!("\\{}", random.one(&["0", "5", "-1", "0x7f", "+3"])),
            Sort::Text,
        ),
        6 => (
            random.one(&["$comm", "\\\"abc\"", "$stack"]).to_owned(),
            Sort::Text,
        ),
        _ => {
            let sign = random.one(&["+", "+", "-"]);
            let user = random.once_in(4);
            let offset = random.one(&OFFSETS);
            let inner = match expression(random, returns, depth - 1) {
                (_, Sort::Text) => random.one(&REGISTERS).to_owned(),
                (inner, _) => inner,
            };
            let (user, sort) = match user {
                true => ("u", Sort::UserMemory),
                false => ("", Sort::Memory),
            };
            (format!("{sign}{user}{offset}({inner})"), sort)
        }
    }
}

fn scalar(random: &mut Random) -> String {
    match random.below(5) {
        0 => {
            let size = 8 << random.below(4);
            let width = 1 + random.below(size);
            format!("b{width}@{}/{size}", random.below(size - width + 1))
        }
        1 => "symbol".to_owned(),
        _ => format!(
            "{}{}",
            random.one(&["u", "s", "x"]),
            random.one(&["8", "16", "32", "64"])
        ),
    }
}

/// Generates an argument that the kernel takes.
fn argument(random: &mut Random, returns: bool) -> String {
    let depth = random.below(5);
    let (expression, sort) = expression(random, returns, depth);
    let ty = match sort {
        _ if random.once_in(3) => String::new(),
        Sort::Text => String::new(),
        Sort::Number => match random.once_in(6) {
            true if !expression.ends_with("$stack") => ":symstr".to_owned(),
            _ => format!(":{}", scalar(random)),
        },
        Sort::Memory | Sort::UserMemory => match random.below(4) {
            0 => format!(
                ":{}",
                random.one(&["string", "ustring", "string[2]", "ustring[64]"])
            ),
            1 if sort == Sort::Memory => format!(":{}[{}]", scalar(random), 1 + random.below(64)),
            2 if sort == Sort::Memory => ":symstr".to_owned(),
            _ => format!(":{}", scalar(random)),
        },
    };
    expression + &ty
}

/// Texts that [`changed`] inserts into an argument, or puts in place of a character.
const PIECES: [&str; 38] = [
    "%",
    "$",
    "@",
    "+",
    "-",
    "u",
    "(",
    ")",
    "\\",
    "\"",
    ":",
    "[",
    "]",
    "=",
    ",",
    ".",
    "->",
    "0",
    "8",
    "9",
    "x",
    "a",
    "b",
    "s",
    "/",
    "_",
    "+0(",
    "%di",
    "$comm",
    "$arg1",
    "$retval",
    "$stack",
    ":string",
    ":u8",
    "[2]",
    "[65]",
    "99999999999999999999",
    "?",
];

/// Makes one or two changes to `argument`.
fn changed(random: &mut Random, argument: &str) -> String {
    let mut text = argument.to_owned();
    for _ in 0..=random.below(2) {
        let at = random.below(text.len() + 1);
        let len = usize::from(at < text.len());
        match random.below(4) {
            0 => text.replace_range(at..at + len, ""),
            1 => text.truncate(at),
            2 => text.replace_range(at..at + len, random.one(&PIECES)),
            _ => text.insert_str(at, random.one(&PIECES)),
        }
    }
    text
}

/// Returns definitions of probes of `function`, which has an instruction boundary at `inside`. First come those
/// with the arguments of `written.txt`: all at the entry, and those with `$arg` or `$ret` also at the return and at
/// `inside`. Then come some with long arguments or many of them, and `made_up` generated ones.
pub(crate) fn definitions(function: &str, inside: u64, made_up: usize) -> Vec<String> {
    let mut random = Random(14);
    let places = [
        format!("p:e {function}"),
        format!("r:e {function}"),
        format!("p:e {function}+{inside}"),
    ];
    let mut all = Vec::new();
    for argument in WRITTEN.lines() {
        all.push(format!("{} {argument}", places[0]));
        if argument.contains("$ret") || argument.contains("$arg") {
            all.push(format!("{} {argument}", places[1]));
            all.push(format!("{} {argument}", places[2]));
        }
    }
    let long = "x".repeat(58);
    for length in [62, 63, 64] {
        all.push(format!("{} \\\"{}\"", places[0], "x".repeat(length - 3)));
    }
    all.push(format!("{} y=+0(%di):{long}", places[0]));
    all.push(format!("{}{}", places[0], " %di".repeat(128)));
    all.push(format!("{}{}", places[0], " %di".repeat(129)));
    for _ in 0..made_up {
        let place = random.below(places.len());
        let mut text = places[place].clone();
        let count = 1 + random.below(3);
        // In half of the definitions one argument is changed.
        let change = random.below(2 * count);
        for number in 0..count {
            let mut argument = argument(&mut random, place == 1);
            if place == 2 {
                argument = argument.replace("$arg", "$stack");
            }
            if random.once_in(2) {
                argument = format!("a{number}={argument}");
            }
            if number == change {
                argument = changed(&mut random, &argument);
            }
            if !argument.is_empty() {
                text = format!("{text} {argument}");
            }
        }
        all.push(text);
    }
    all
}
