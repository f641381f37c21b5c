//! Tests with a synthetic kernel whose file also has its debug information.

use std::fs;

use hvprobe_fixtures::dwarf::{self, BUILD_ID};
use hvprobe_proto::v1::ErrorDetail;
use tempfile::TempDir;
use tokio::sync::mpsc;
use tokio::time::sleep;
use tokio_stream::wrappers::ReceiverStream;

use super::*;

fn image() -> Arc<KernelImage> {
    Arc::new(KernelImage::parse(&dwarf::file()).unwrap())
}

fn by_build_id(folder: &Path) -> PathBuf {
    places_of(Some(BUILD_ID), None, folder).remove(0)
}

/// Creates a folder of debug information in which `file` is the kernel's file.
fn folder(file: &[u8]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let path = by_build_id(folder.path());
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, file).unwrap();
    folder
}

fn point(text: &str) -> Result<Point, Status> {
    read("the point", text, Point::parse)
}

fn range(text: &str) -> Result<LineRange, Status> {
    read("the lines", text, LineRange::parse)
}

fn status_parts(failure: Failure) -> (Code, ErrorKind, ErrorDetail, String) {
    let status = Status::from(failure);
    let detail = crate::status::tests::detail(&status);
    let message = status.message().to_owned();
    (status.code(), detail.kind(), detail, message)
}

#[test]
fn debug_information_is_found_by_the_build_id() {
    let sources = open(
        &image(),
        folder(&dwarf::file()).path(),
        None,
        &Arc::default(),
    )
    .unwrap();
    let found = sources
        .lines(&range("vfs_test").unwrap())
        .unwrap()
        .functions;
    let [function] = found.as_slice() else {
        panic!("{found:?}");
    };
    assert_eq!((function.name.as_str(), function.first), ("vfs_test", 10));
    let places = |number| {
        let line = function.lines.iter().find(|line| line.number == number);
        line.map(|line| line.places.clone()).unwrap_or_default()
    };
    assert_eq!(places(1), ["vfs_test+0x4", "vfs_test+0x38"]);

    let found = sources
        .variables(&point("vfs_test:1").unwrap())
        .unwrap()
        .places;
    assert_eq!(found[0].place, "vfs_test+0x4");
    for variable in found.iter().flat_map(|place| &place.variables) {
        assert_ne!(
            variable.fetch.is_empty(),
            variable.unreadable.is_empty(),
            "{variable:?}"
        );
    }
    assert!(
        found[0].variables.iter().any(|it| it.parameter),
        "{found:?}"
    );
}

#[test]
fn what_there_is_not_is_reported_with_what_there_is() {
    let folder = folder(&dwarf::file());
    let sources = open(&image(), folder.path(), None, &Arc::default()).unwrap();
    let error = sources
        .lines(&range("vfs_test@other.c").unwrap())
        .unwrap_err();
    let (code, kind, detail, message) = status_parts(failed(&error));
    assert_eq!(
        (code, kind),
        (Code::NotFound, ErrorKind::NotInSources),
        "{message}"
    );
    assert!(detail.candidates[0].contains("fs/test.c"), "{detail:?}");
    let none = sources.variables(&point("vfs_test:999").unwrap());
    let (code, kind, ..) = status_parts(failed(&none.unwrap_err()));
    assert_eq!((code, kind), (Code::NotFound, ErrorKind::NotInSources));
    let none = sources.lines(&range("vfs_test:999+3").unwrap());
    let (code, kind, detail, _) = status_parts(failed(&none.unwrap_err()));
    assert_eq!((code, kind), (Code::NotFound, ErrorKind::NotInSources));
    assert_eq!(detail.candidates, ["line 5"]);
    for bad in [point("vfs_test:x").map(drop), range("vfs_test:").map(drop)] {
        let bad = bad.unwrap_err();
        assert_eq!(bad.code(), Code::InvalidArgument);
        assert_eq!(crate::status::tests::detail(&bad).column, Some(9));
    }
}

#[test]
fn a_file_that_is_not_there_or_of_another_kernel_is_named() {
    let empty = tempfile::tempdir().unwrap();
    let path = by_build_id(empty.path());
    let (code, kind, _, message) =
        status_parts(open(&image(), empty.path(), None, &Arc::default()).unwrap_err());
    assert_eq!(
        (code, kind),
        (Code::FailedPrecondition, ErrorKind::NoDebugInfo)
    );
    assert!(message.contains(path.to_str().unwrap()), "{message}");
    for (file, words) in [
        (dwarf::file_of(b"another build"), "of another kernel"),
        (b"no file of that kind".to_vec(), "ELF"),
    ] {
        let (code, kind, _, message) =
            status_parts(open(&image(), folder(&file).path(), None, &Arc::default()).unwrap_err());
        assert_eq!(
            (code, kind),
            (Code::FailedPrecondition, ErrorKind::NoDebugInfo)
        );
        assert!(message.contains(words), "{message}");
    }
}

#[test]
fn a_kernel_leads_to_no_file_outside_the_folder() {
    let folder = Path::new("/d");
    let places = |id: &[u8], release| {
        let places = places_of(Some(id), release, folder);
        let places = places.iter().map(|path| path.to_str().unwrap().to_owned());
        places.collect::<Vec<_>>()
    };
    assert_eq!(
        places(&[0xab, 1, 0x2f], Some("6.1.0-56-cloud-amd64")),
        [
            "/d/.build-id/ab/012f.debug",
            "/d/boot/vmlinux-6.1.0-56-cloud-amd64",
            "/d/lib/modules/6.1.0-56-cloud-amd64/vmlinux"
        ]
    );
    let long = "6".repeat(65);
    for release in [
        "",
        "..",
        "../6.1",
        "6.1/../..",
        "6.1\0",
        "6 1",
        "/etc",
        &long,
    ] {
        assert_eq!(places(b"", Some(release)), [""; 0], "{release:?}");
    }
    for id in [&b""[..], b"a", &[7; 66]] {
        assert_eq!(places(id, None), [""; 0]);
    }
}

#[tokio::test]
async fn a_look_ends_when_its_client_has_gone() {
    const PATIENCE: Duration = Duration::from_secs(60);
    let looks = Lane::new("a look", 1);
    let (begun, has_begun) = tokio::sync::oneshot::channel();
    let left = look(&looks, move |abandoned| {
        begun.send(()).unwrap();
        let file = dwarf::file();
        let since = std::time::Instant::now();
        // Repeated until nobody waits.
        loop {
            let file = DebugFile::parse(&file).unwrap().until(abandoned);
            if let Err(why) = file.index() {
                assert!(matches!(why, DebugError::Abandoned), "{why}");
                return;
            }
            assert!(since.elapsed() < PATIENCE, "it goes on for nobody");
        }
    });
    tokio::select! {
        _ = left => panic!("it ended by itself"),
        begun = has_begun => begun.unwrap(),
    }
    let next = tokio::time::timeout(PATIENCE, look(&looks, |_| 7));
    assert_eq!(next.await.expect("its place is free").unwrap(), 7);
}

/// Receives from a client that sends `part` every `every` seconds for ever. Returns after how many seconds it
/// is refused, and the message.
async fn sending(part: &UploadDebugInfoRequest, every: u64) -> (u64, String) {
    let (to, parts) = mpsc::channel(1);
    let part = part.clone();
    tokio::spawn(async move {
        while to.send(Ok(part.clone())).await.is_ok() {
            sleep(Duration::from_secs(every)).await;
        }
    });
    let mut parts = Parts::of(ReceiverStream::new(parts));
    let since = Instant::now();
    loop {
        match parts.next().await {
            Ok(part) => assert!(part.is_some()),
            Err(status) => {
                assert_eq!(status.code(), Code::DeadlineExceeded);
                return (since.elapsed().as_secs(), status.message().to_owned());
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_file_that_does_not_come_is_not_waited_for() {
    let [empty, mut part] = [(); 2].map(|()| UploadDebugInfoRequest::default());
    part.data = vec![1];
    let (after, why) = sending(&empty, 1).await;
    assert_eq!(after, SILENCE.as_secs(), "{why}");
    assert!(why.contains("nothing came"), "{why}");
    let (after, why) = sending(&part, 61).await;
    assert_eq!(after, SILENCE.as_secs(), "{why}");
    let (after, why) = sending(&part, 59).await;
    assert_eq!(after, LONGEST.as_secs(), "{why}");
    assert!(why.contains("not whole"), "{why}");
}
