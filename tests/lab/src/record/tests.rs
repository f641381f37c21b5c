use super::*;

use std::ffi::OsString;

use tempfile::TempDir;

use crate::job::Group;

const PAGE: &str = "# Hosts\n\n<!-- verified: begin -->\n\n| *tcg* | 6.1-cloud | 6.12-cloud |\n|---|---|---|\n\
    | `rig::hist` | 9 passed, 0123456789 | 8 passed, 0123456789 |\n\n<!-- verified: end -->\n";

/// A repository with the page and one more file, all of it committed.
struct Repository(TempDir);

impl Repository {
    /// Returns `None`, and prints that the test is skipped, if there is no git.
    fn new() -> Option<Self> {
        let repository = Self(tempfile::tempdir().unwrap());
        if let Err(error) = git(repository.root(), &["init", "--quiet"]) {
            println!("skipped: {error:#}");
            return None;
        }
        repository.write(HOSTS, PAGE);
        repository.write("src/a.rs", "");
        repository.write(".gitignore", "target\n");
        repository.commit();
        Some(repository)
    }

    fn root(&self) -> &Path {
        self.0.path()
    }

    fn write(&self, file: &str, text: &str) {
        let file = self.root().join(file);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, text).unwrap();
    }

    fn commit(&self) {
        let user = ["-c", "user.name=lab", "-c", "user.email=lab@localhost"];
        git(self.root(), &["add", "--all"]).unwrap();
        let commit = ["commit", "--quiet", "--no-gpg-sign", "-m", "x"];
        git(self.root(), &[&user[..], &commit].concat()).unwrap();
    }

    fn recorder(&self) -> Result<Recorder> {
        Recorder::of(self.root(), &self.root().join("target"), None)
    }

    fn refused(&self) -> String {
        format!("{:#}", self.recorder().unwrap_err())
    }

    /// Returns the rows of the page's table.
    fn rows(&self) -> Vec<String> {
        let page = fs::read_to_string(self.root().join(HOSTS)).unwrap();
        let rows = page.lines().filter(|line| line.starts_with("| "));
        rows.map(str::to_owned).collect()
    }
}

fn counts([passed, failed, skipped]: [u64; 3]) -> Option<Counts> {
    Some(Counts {
        passed,
        failed,
        skipped,
    })
}

fn key(tests: &str, kernel: &str) -> Option<Key> {
    Some(Key {
        host: "tcg".to_owned(),
        tests: tests.to_owned(),
        kernel: kernel.to_owned(),
    })
}

#[test]
fn a_tree_with_changes_is_refused_with_their_names() {
    let Some(repository) = Repository::new() else {
        return;
    };
    repository.recorder().unwrap();
    repository.write("src/a.rs", "fn f() {}");
    let why = repository.refused();
    assert!(
        why.contains("the tree has changes (src/a.rs)") && why.contains("commit or remove"),
        "{why}"
    );
    repository.commit();
    repository.recorder().unwrap();
    for file in ["src/b.rs", "src/c.rs", "src/d.rs", "src/e.rs"] {
        repository.write(file, "");
    }
    let why = repository.refused();
    assert!(why.contains("(src/b.rs, src/c.rs, src/d.rs, ...)"), "{why}");
}

#[test]
fn the_page_and_what_is_ignored_are_no_changes() {
    let Some(repository) = Repository::new() else {
        return;
    };
    repository.write(HOSTS, &format!("{PAGE}More."));
    repository.write("target/x", "");
    repository.recorder().unwrap();
}

#[test]
fn what_is_no_repository_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let recorder = Recorder::of(folder.path(), folder.path(), None);
    let why = format!("{:#}", recorder.unwrap_err());
    assert!(
        why.starts_with("--record: cannot find out the commit"),
        "{why}"
    );
}

#[test]
fn what_failed_or_was_skipped_is_recorded_as_such_and_the_rest_stays() {
    let Some(repository) = Repository::new() else {
        return;
    };
    let mut recorder = repository.recorder().unwrap();
    let cells = vec![
        key("rig::hist", "6.12-cloud"),
        key("rig::boot", "6.12-cloud"),
        None,
        key("rig::boot", "6.12-cloud"),
        key("rig::nmi", "6.12-cloud"),
    ];
    let results = [
        counts([3, 1, 0]),
        counts([1, 0, 2]),
        counts([7, 7, 7]),
        counts([1, 0, 0]),
        None,
    ];
    recorder.see(cells, &results);
    recorder.write().unwrap();
    let at = commit(repository.root()).unwrap();
    let expected = [
        "| *tcg* | 6.1-cloud | 6.12-cloud |".to_owned(),
        format!("| `rig::boot` | | 2 passed, 2 skipped, {at} |"),
        format!("| `rig::hist` | 9 passed, 0123456789 | 3 passed, 1 failed, {at} |"),
    ];
    assert_eq!(repository.rows(), expected);
    // Another run, on another kernel, after the page has changed.
    let mut recorder = repository.recorder().unwrap();
    recorder.see(vec![key("rig::boot", "5.10-cloud")], &[counts([4, 0, 0])]);
    recorder.write().unwrap();
    let expected = [
        "| *tcg* | 5.10-cloud | 6.1-cloud | 6.12-cloud |".to_owned(),
        format!("| `rig::boot` | 4 passed, {at} | | 2 passed, 2 skipped, {at} |"),
        format!("| `rig::hist` | | 9 passed, 0123456789 | 3 passed, 1 failed, {at} |"),
    ];
    assert_eq!(repository.rows(), expected);
}

#[test]
fn nothing_is_recorded_of_a_tree_that_changed_meanwhile() {
    let Some(repository) = Repository::new() else {
        return;
    };
    let (root, target) = (repository.root(), repository.root().join("target"));
    let mut recorder = Recorder::of(root, &target, Some("bench hits")).unwrap();
    recorder.see_one(Kind::Tcg, false);
    // A failed property leaves a file with its input.
    repository.write("a/proptest-regressions/b.txt", "");
    // That file does not keep later runs from recording.
    Recorder::of(root, &target, Some("bench hits")).unwrap();
    repository.write("src/a.rs", "fn f() {}");
    let why = format!("{:#}", recorder.write().unwrap_err());
    assert!(
        why.contains("the tree changed") && why.ends_with("src/a.rs"),
        "{why}"
    );
    repository.write("src/a.rs", "");
    recorder.write().unwrap();
    let at = commit(root).unwrap();
    let expected = [
        "| *tcg* | no Linux | 6.1-cloud | 6.12-cloud |".to_owned(),
        format!("| `bench hits` | 1 failed, {at} | | |"),
    ];
    assert_eq!(repository.rows()[..2], expected);
}

/// Returns a job in which this test program stands in for the programs of a rig and of a package.
fn job(package: &str, program: &str, steps: &[&[&str]], group: bool) -> Job {
    let mut job = Job::new(&[], std::time::Duration::ZERO);
    let path = std::env::current_exe().unwrap();
    let program = format!("{program}-0a1b");
    job.programs.push((program.clone(), path.clone()));
    for words in steps {
        let arguments: Vec<OsString> = words.iter().map(Into::into).collect();
        let tests = libtest::list(&path, &arguments).unwrap();
        let group = group.then(|| Group {
            name: String::new(),
            tests,
            is_alone: false,
        });
        job.steps.push(Step {
            package: Some(Path::new("/w").join(package)),
            group,
            ..Step::new(&program, arguments)
        });
    }
    job
}

fn cells(job: &Job, row: Option<&str>) -> Vec<Option<Key>> {
    try_cells(job, row).unwrap()
}

fn try_cells(job: &Job, row: Option<&str>) -> Result<Vec<Option<Key>>> {
    let recorder = Recorder {
        root: "/w".into(),
        lock: PathBuf::new(),
        commit: String::new(),
        row: row.map(str::to_owned),
        kernel: "6.1-cloud".to_owned(),
        seen: BTreeMap::new(),
    };
    recorder.cells(job, Kind::Tcg)
}

#[test]
fn a_module_of_the_rig_is_a_row_if_all_of_its_tests_run() {
    let steps: [&[&str]; 3] = [
        &["record::"],
        &["retry::"],
        &["libtest::tests::output_without_result_counts_nothing"],
    ];
    let job = job("tests", "rig", &steps, true);
    let expected = [
        key("rig::record", "6.1-cloud"),
        key("rig::retry", "6.1-cloud"),
        None,
    ];
    assert_eq!(cells(&job, None), expected);
    let soak = key("soak", "6.1-cloud");
    assert_eq!(
        cells(&job, Some("soak")),
        [soak.clone(), soak.clone(), soak]
    );
    let why = try_cells(&job, Some("rig::retry")).unwrap_err().to_string();
    assert!(why.contains("rig::retry is the row of a group"), "{why}");
}

#[test]
fn tests_of_other_programs_and_packages_are_a_row_without_a_kernel() {
    let whole = job("tests", "micro_ports", &[&[]], false);
    assert_eq!(cells(&whole, None), [key("micro_ports", NO_LINUX)]);
    let halves = job(
        "vmm/vm",
        "hvprobe_vm",
        &[&["record::"], &["--skip", "record::"]],
        false,
    );
    let row = key("vmm/vm", NO_LINUX);
    assert_eq!(cells(&halves, None), [row.clone(), row]);
    let part = job(
        "vmm/vm",
        "hvprobe_vm",
        &[&["record::"], &["nothing"]],
        false,
    );
    assert_eq!(cells(&part, None), [None, None]);
}

#[test]
fn what_is_no_test_is_no_row() {
    let mut job = job("", CARGO, &[], false);
    job.steps.push(Step::new(CARGO, ["test"]));
    job.steps.push(Step::new(crate::job::LAB, ["bench"]));
    assert_eq!(cells(&job, None), [None, None]);
}
