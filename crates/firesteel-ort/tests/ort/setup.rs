//! Installing, with stand-ins for Python.

use firesteel_ort::{OrtError, SetupOptions, setup_ort, setup_qnn};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

fn python(name: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data")).join(name)
}

fn run(cache: &Path, python: PathBuf, force: bool) -> (Result<PathBuf, OrtError>, Vec<String>) {
    let mut lines = Vec::new();
    let options = SetupOptions { cache: cache.to_owned(), python: Some(python), force };
    let result = setup_ort(options, &mut |line| lines.push(line.to_owned()));
    (result, lines)
}

fn runs(cache: &Path) -> usize {
    fs_err::read_to_string(cache.join("runs")).map_or(0, |text| text.lines().count())
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs_err::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn installs_once_and_again_when_forced() {
    let folder = TempDir::new().unwrap();
    let cache = folder.path().join("not/there/yet");
    let (library, lines) = run(&cache, python("python-works"), false);
    let library = library.unwrap();
    assert_eq!(library, cache.join("onnxruntime-1.32.0/libonnxruntime.so.1.32.0"));
    assert_eq!(
        names(library.parent().unwrap()),
        ["LICENSE", "ThirdPartyNotices.txt", "libonnxruntime.so.1.32.0"]
    );
    assert!(lines[0].starts_with("installing ONNX Runtime 1.32.0 with"), "{lines:?}");
    assert!(lines[1].starts_with("installed "), "{lines:?}");

    // The second run needs no Python.
    let (again, lines) = run(&cache, python("missing"), false);
    assert_eq!(again.unwrap(), library);
    assert!(lines[0].contains(" is at "), "{lines:?}");
    assert_eq!(runs(&cache), 1);

    fs_err::write(&library, "damaged").unwrap();
    run(&cache, python("python-works"), true).0.unwrap();
    assert_eq!(fs_err::read_to_string(&library).unwrap(), "library\n");
    assert_eq!(names(&cache), ["onnxruntime-1.32.0", "onnxruntime-1.32.0.lock", "runs"]);
}

#[test]
fn failures_say_why_and_leave_nothing() {
    let cases: [(&str, &[&str]); 4] = [
        ("missing", &["cannot be run", "install Python 3 with pip"]),
        ("python-without-pip", &["No module named pip", "install pip", "exit status: 1"]),
        (
            "python-offline",
            &["Retrying 40", "No matching distribution", "PIP_INDEX_URL", "a connection to PyPI"],
        ),
        ("python-other-wheel", &["has no onnxruntime/capi/libonnxruntime.so.1.32.0"]),
    ];
    for (name, parts) in cases {
        let cache = TempDir::new().unwrap();
        let error = run(cache.path(), python(name), false).0.unwrap_err();
        let text = error.to_string();
        for part in parts {
            assert!(text.contains(part), "{name}: {part:?} is not in {text}");
        }
        assert!(!text.contains("Retrying 20:"), "only the last lines belong here: {text}");
        assert_eq!(names(cache.path()), ["onnxruntime-1.32.0.lock"], "{name}");
    }
}

#[test]
fn a_failed_forced_install_keeps_the_old_one() {
    let cache = TempDir::new().unwrap();
    let library = run(cache.path(), python("python-works"), false).0.unwrap();
    assert!(run(cache.path(), python("python-offline"), true).0.is_err());
    assert!(library.is_file());
}

#[test]
fn leftovers_of_a_killed_process_are_cleared() {
    let cache = TempDir::new().unwrap();
    for suffix in ["wheel", "part", "old"] {
        let folder = cache.path().join(format!("onnxruntime-1.32.0.{suffix}/deep"));
        fs_err::create_dir_all(&folder).unwrap();
        fs_err::write(folder.join("LICENSE"), "half").unwrap();
    }
    run(cache.path(), python("python-works"), false).0.unwrap();
    assert_eq!(names(cache.path()), ["onnxruntime-1.32.0", "onnxruntime-1.32.0.lock", "runs"]);
}

#[test]
fn of_several_at_once_one_installs() {
    let cache = TempDir::new().unwrap();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|_| scope.spawn(|| run(cache.path(), python("python-works"), false).0))
            .collect();
        for thread in threads {
            assert!(thread.join().unwrap().unwrap().is_file());
        }
    });
    assert_eq!(runs(cache.path()), 1);
}

#[test]
fn another_qnn_library_than_the_pinned_one_is_refused() {
    let cache = TempDir::new().unwrap();
    for (name, parts) in [
        (
            "python-other-qnn",
            &["libonnxruntime_providers_qnn.so has SHA-256", "629dfc15", "--force"][..],
        ),
        ("python-works", &["onnxruntime-qnn 2.7.0 for this system has no", "Linux on x86-64"]),
    ] {
        let (cache, python) = (cache.path().to_owned(), Some(python(name)));
        let options = SetupOptions { cache: cache.clone(), python, force: false };
        let text = setup_qnn(options, &mut |_| {}).unwrap_err().to_string();
        for part in parts {
            assert!(text.contains(part), "{name}: {part:?} is not in {text}");
        }
        assert!(!cache.join("onnxruntime-qnn-2.7.0").exists(), "{name}");
    }
}
