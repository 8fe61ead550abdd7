//! Loading the library. One test in a binary of its own, because a process loads one library and keeps
//! it.

use firesteel_ort::{OrtError, find_library, load};
use std::path::Path;

#[test]
fn one_library_is_loaded_and_kept() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("missing.so");
    let error = load(Some(&missing)).unwrap_err();
    assert!(matches!(error, OrtError::LibraryPath { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("missing.so (from --ort): no such file or folder"), "{text}");
    assert!(text.contains("firesteel setup ort"), "{text}");

    let text_file = folder.path().join("libonnxruntime.so.1");
    fs_err::write(&text_file, "not a library").unwrap();
    for path in [&*text_file, folder.path()] {
        let text = load(Some(path)).unwrap_err().to_string();
        assert!(text.contains("libonnxruntime.so.1 cannot be loaded as ONNX Runtime"), "{text}");
        // The reason of the system's loader.
        assert!(text.contains("file too short") || text.contains("invalid ELF header"), "{text}");
    }
    let libc = ["/lib/x86_64-linux-gnu/libm.so.6", "/lib64/libm.so.6", "/usr/lib/libm.so.6"];
    if let Some(path) = libc.iter().map(Path::new).find(|path| path.exists()) {
        let text = load(Some(path)).unwrap_err().to_string();
        assert!(text.contains("does not export OrtGetApiBase"), "{text}");
    }

    // A failure does not stand in the way of the right one.
    let path = find_library(None).unwrap_or_else(|error| {
        panic!("{error}\nThe test script of the project installs it before it runs the tests")
    });
    let library = load(Some(&path)).unwrap();
    assert_eq!(library.path(), path);
    let version = library.version().unwrap();
    assert_eq!(version.split('.').count(), 3, "{version}");
    assert!(library.build().contains("build type="), "{}", library.build());

    let link = folder.path().join("libonnxruntime.so");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    for same in [None, Some(path.as_path()), Some(&link), path.parent()] {
        assert!(std::ptr::eq(load(same).unwrap(), library), "{same:?}");
    }
    let error = load(Some(&text_file)).unwrap_err();
    assert!(matches!(error, OrtError::OtherLoaded { .. }), "{error}");
}
