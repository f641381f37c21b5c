use clap::CommandFactory as _;
use clap::error::ErrorKind;
use hvprobe_lab::documented;

use super::*;
use crate::options::size::Size;

fn parse(words: &[&str]) -> Result<Command, clap::Error> {
    Cli::try_parse_from(std::iter::once(&"hvprobe").chain(words)).map(|cli| cli.command)
}

#[test]
fn command_line_is_consistent() {
    Cli::command().debug_assert();
}

#[test]
fn a_command_without_dashes_gets_a_hint_where_to_write_it() {
    for (words, hint) in [
        (&["run", "-p", "p vfs_read", "ls"][..], true),
        (&["run", "-p", "p vfs_read", "ls", "/"], true),
        (&["run", "--no-such"], false),
        (&["doctor", "ls"], false),
    ] {
        let message = with_way_out(parse(words).unwrap_err()).to_string();
        assert_eq!(
            message.contains("behind `--`, as in `-- ls`"),
            hint,
            "{message}"
        );
    }
}

#[test]
fn of_a_long_word_the_beginning_is_repeated() {
    let long = "x".repeat(100_000);
    let option = format!("--{long}");
    for words in [
        &[&*long][..],
        &["run", &long],
        &["run", &option],
        &["doctor", &option],
        &["run", "--cpus", &long],
        &["run", "--memory", &long],
    ] {
        let error = shortened(parse(words).unwrap_err());
        let message = with_way_out(error).to_string();
        assert!(
            message.len() < 1000 && message.contains("xxx…"),
            "{message}"
        );
    }
}

#[test]
fn documented_commands_can_be_typed() {
    let mut examples = 0;
    for name in documented::PAGES {
        let page = documented::page(name).unwrap();
        for shown in documented::commands(&page, "hvprobe") {
            examples += usize::from(shown.example);
            match Cli::try_parse_from(&shown.words) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::DisplayHelp => {}
                // Inline commands in a sentence may be incomplete, or contain placeholders.
                Err(error)
                    if !shown.example
                        && matches!(
                            error.kind(),
                            ErrorKind::MissingSubcommand
                                | ErrorKind::MissingRequiredArgument
                                | ErrorKind::InvalidValue
                                | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
                        ) => {}
                Err(error) => panic!("{name}:{}: {error}", shown.line),
            }
        }
    }
    assert!(examples > 10, "only {examples} examples");
}

/// Returns the long options of a command and all its subcommands.
fn longs(command: &clap::Command) -> Vec<String> {
    let own = command.get_arguments().filter_map(|it| it.get_long());
    let own = own.map(str::to_owned);
    own.chain(command.get_subcommands().flat_map(longs))
        .collect()
}

#[test]
fn documented_options_exist() {
    let known = longs(&Cli::command());
    let sections = [
        ("README.md", "## A tour", 5),
        ("docs/reference.md", "# Reference", 20),
    ];
    for (name, heading, least) in sections {
        let options = documented::options(&documented::page(name).unwrap(), heading);
        assert!(options.len() >= least, "{name}: {options:?}");
        for option in options {
            assert!(known.contains(&option), "{name}: --{option}");
        }
    }
}

#[test]
fn run_takes_probes_and_a_guest_command() {
    let words = [
        "run",
        "-p",
        "p vfs_read",
        "--probe",
        "p:w vfs_write",
        "--cpus",
        "2",
        "-m",
        "1G",
        "--hits",
        "3",
        "--",
        "ls",
        "-l",
    ];
    let Command::Run(run) = parse(&words).unwrap() else {
        panic!("not a run");
    };
    assert_eq!(run.guest.probes, ["p vfs_read", "p:w vfs_write"]);
    assert_eq!(run.guest.command, ["ls", "-l"]);
    assert_eq!((run.guest.cpus, run.guest.memory), (2, Size(1 << 30)));
    assert_eq!(run.hits, Some(3));
}

#[test]
fn scripts_are_typed_and_come_from_files() {
    for command in ["run", "trace"] {
        let words = [
            command,
            "-e",
            "x",
            "--script",
            "a",
            "-e",
            "y",
            "--skip-refused",
        ];
        assert!(parse(&words).is_ok(), "{command}");
    }
}

#[test]
fn probes_to_add_come_from_files_too() {
    let words = [
        "probe",
        "add",
        "--events",
        "a",
        "--events",
        "b",
        "p vfs_read",
    ];
    let Command::Probe(Probe::Add(add)) = parse(&words).unwrap() else {
        panic!("no probes to add");
    };
    assert_eq!(add.events, [PathBuf::from("a"), PathBuf::from("b")]);
    assert_eq!(add.definitions, ["p vfs_read"]);
    assert!(parse(&words[..4]).is_ok());
}

#[test]
fn contradictions_and_impossible_numbers_are_refused() {
    for words in [
        &["run", "--json", "--console"][..],
        &["run", "--cpus", "0"],
        &["run", "--cpus", "99999999999"],
        &["run", "--memory", "12Q"],
        &["run", "--memory", "99999999T"],
        &["run", "--hits", "0"],
        &["run", "-e", "x", "-p", "p a"],
        &["run", "-e", "x", "--hist", "keys=comm"],
        &["run", "--script", "x", "--json"],
        &["trace", "-e", "x", "-p", "p a"],
        &["trace", "-e", "x", "--probe", "3"],
        &["trace", "--script", "x", "--comm", "dd"],
        &["vm", "boot", "-e", "x"],
        &["probe", "remove"],
        &["probe", "remove", "--all", "3"],
        &["probe", "add"],
        &["run", "--stop"],
        &["probe", "arm-all", "3"],
        &["syms"],
        &["types"],
        &["vm"],
    ] {
        assert!(parse(words).is_err(), "{words:?}");
    }
}
