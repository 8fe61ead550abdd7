//! What commands make, once for all tests: calibrated ranges, quantized and compiled artifacts.
//!
//! Equal inputs give equal bytes, so a test that only reads what a command makes may take what another
//! test, or an earlier run, had made by the same command. It lies in a folder that is named after all
//! that it depends on: the bytes of the program, the arguments, and the files that they name. A test
//! that runs alone finds nothing there and makes it itself.

use crate::support::{ROOT, argument, copy_folder, golden_path, names, spark_tiny, stdout};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::time::Duration;

/// A file or folder that a command made, which nobody may change, and what the command printed.
pub(crate) struct Made {
    pub(crate) path: PathBuf,
    pub(crate) printed: String,
}

impl Made {
    /// The path as an argument.
    pub(crate) fn argument(&self) -> &str {
        self.path.to_str().unwrap()
    }

    /// The report of a command that was given `--json`.
    pub(crate) fn report(&self) -> Value {
        serde_json::from_str(&self.printed).unwrap()
    }
}

/// Folders of other programs than this one are removed once they are so old.
const KEPT: Duration = Duration::from_secs(24 * 60 * 60);

/// The folder of what this program makes.
static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
    let mut hash = Sha256::new();
    add(&mut hash, Path::new(env!("CARGO_BIN_EXE_firesteel")));
    let all = Path::new(env!("CARGO_TARGET_TMPDIR")).join("made");
    let own = all.join(name(hash));
    if !own.is_dir() {
        std::fs::create_dir_all(&own).unwrap();
        for other in names(&all) {
            let path = all.join(other);
            let age = path.metadata().and_then(|it| it.modified()).map(|time| time.elapsed());
            if path != own && age.is_ok_and(|age| age.is_ok_and(|age| age > KEPT)) {
                // Another process may be doing the same.
                let _ = std::fs::remove_dir_all(path);
            }
        }
    }
    own
});

/// The first half of a hash in hexadecimal digits.
fn name(hash: Sha256) -> String {
    hash.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}

/// Adds the content of a file, or names and contents of a folder's entries.
fn add(hash: &mut Sha256, path: &Path) {
    if path.is_dir() {
        for name in names(path) {
            hash.update(name.as_bytes());
            add(hash, &path.join(name));
        }
    } else {
        let bytes = std::fs::read(path).unwrap();
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    }
}

/// Runs a command of the program, which writes where `--out` says and must succeed, unless that was
/// done before. `arguments` are those without `--out`.
pub(crate) fn made(arguments: &[&str]) -> Made {
    let mut hash = Sha256::new();
    for argument in arguments {
        let path = Path::new(ROOT).join(argument);
        hash.update((argument.len() as u64).to_le_bytes());
        hash.update(argument.as_bytes());
        if path.exists() {
            add(&mut hash, &path);
        }
    }
    let folder = FOLDER.join(name(hash));
    let (path, printed) = (folder.join("out"), folder.join("printed"));
    // Whoever comes second waits for the first.
    let lock = File::create(folder.with_extension("lock")).unwrap();
    lock.lock().unwrap();
    if !printed.is_file() {
        if folder.exists() {
            std::fs::remove_dir_all(&folder).unwrap();
        }
        std::fs::create_dir(&folder).unwrap();
        let text = stdout(&[arguments, &["--out", path.to_str().unwrap()]].concat());
        // Written last, so that it stands for the whole.
        std::fs::write(folder.join("printing"), text).unwrap();
        std::fs::rename(folder.join("printing"), &printed).unwrap();
    }
    Made { path, printed: std::fs::read_to_string(printed).unwrap() }
}

/// A text that the trained model wrote, for calibration.
pub(crate) const CALIBRATION: &str = "tests/golden/spark-tiny/calibration.txt";

/// Ranges of spark-tiny over a few sequences.
pub(crate) static RANGES: LazyLock<Made> = LazyLock::new(|| calibrated(&["--samples", "8"]));

/// Ranges of spark-tiny over the text for calibration.
pub(crate) fn calibrated(options: &[&str]) -> Made {
    let tiny = spark_tiny();
    let command = ["calibrate", argument(&tiny), "--text", CALIBRATION, "--json"];
    let ranges = made(&[&command[..], options].concat());
    assert_eq!(ranges.report()["past_window"], true);
    ranges
}

#[test]
fn what_was_made_is_taken_by_the_same_command_alone() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    copy_folder(&golden_path("spark/mini"), &model);
    let file = |format| made(&["quantize", "gguf", argument(&model), "--format", format]);
    let first = file("f32");
    let time = |made: &Made| made.path.metadata().unwrap().modified().unwrap();
    let again = file("f32");
    assert_eq!((&first.path, time(&first)), (&again.path, time(&again)));
    assert_eq!((&first.printed, first.printed.is_empty()), (&again.printed, false));
    assert_ne!(file("f16").path, first.path);
    // The same command over another model makes another file.
    let config = model.join("config.json");
    let text = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, text.replace("1e-06", "1e-05")).unwrap();
    let other = file("f32");
    assert_ne!(other.path, first.path);
    assert_ne!(std::fs::read(&other.path).unwrap(), std::fs::read(&first.path).unwrap());
}
