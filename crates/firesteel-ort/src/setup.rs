use crate::OrtError;
use fs_err as fs;
use std::fs::TryLockError;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The version that [`setup_ort`] installs.
pub const ONNX_RUNTIME_VERSION: &str = "1.32.0";

/// What is kept of the wheel: the library, which needs nothing beside it to run on the CPU, and
/// the texts of its licence.
const KEPT: [&str; 3] = [
    "onnxruntime/capi/libonnxruntime.so.1.32.0",
    "onnxruntime/LICENSE",
    "onnxruntime/ThirdPartyNotices.txt",
];

/// The wheels of all Python versions hold the same library, so any Python with pip can fetch the
/// one for this version.
const WHEEL_PYTHON: &str = "3.13";

/// Lines of pip's error output that an error repeats.
const OUTPUT_LINES: usize = 20;

/// Where and how to install ONNX Runtime.
#[derive(Debug, Clone)]
pub struct SetupOptions {
    /// The cache folder, usually [`cache_root`](firesteel_checkpoint::cache_root); made if it does not exist.
    pub cache: PathBuf,
    /// The Python whose pip is run; `python3` on the PATH by default.
    pub python: Option<PathBuf>,
    /// Install again what is installed already.
    pub force: bool,
}

/// The folder of the library below the cache folder.
pub(crate) fn installed_folder(cache: &Path) -> PathBuf {
    cache.join(format!("onnxruntime-{ONNX_RUNTIME_VERSION}"))
}

/// Installs the pinned ONNX Runtime from PyPI into the cache folder and returns the path of its
/// library. Does nothing when it is there, unless forced. `log` receives lines for a person.
///
/// The folder is complete or absent at any time, and several processes may call this at once: the
/// first installs, the others wait and find it done.
///
/// # Errors
/// When there is no Python or no pip, pip fails (its last lines are part of the error), the wheel
/// is not of the known form, or a file operation fails.
pub fn setup_ort(options: SetupOptions, log: &mut dyn FnMut(&str)) -> Result<PathBuf, OrtError> {
    let cache = std::path::absolute(&options.cache)?;
    let target = installed_folder(&cache);
    let library = target.join(file_name(KEPT[0]));
    let present = || {
        (!options.force && library.is_file())
            .then(|| format!("ONNX Runtime {ONNX_RUNTIME_VERSION} is at {}", library.display()))
    };
    if let Some(line) = present() {
        log(&line);
        return Ok(library);
    }

    fs::create_dir_all(&cache)?;
    // The lock is released when the file is closed, also by the end of a killed process.
    let lock = fs::File::create(target.with_added_extension("lock"))?;
    match lock.file().try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            log("waiting for another process that installs ONNX Runtime");
            lock.file().lock()?;
            if let Some(line) = present() {
                log(&line);
                return Ok(library);
            }
        }
        Err(TryLockError::Error(error)) => return Err(error.into()),
    }

    // Whoever holds the lock owns these folders; what is in them is left from a killed process.
    let wheel = target.with_added_extension("wheel");
    let part = target.with_added_extension("part");
    let old = target.with_added_extension("old");
    for folder in [&wheel, &part, &old] {
        remove(folder)?;
    }
    let python = options.python.unwrap_or_else(|| "python3".into());
    log(&format!(
        "installing ONNX Runtime {ONNX_RUNTIME_VERSION} with {} -m pip into {}",
        python.display(),
        target.display()
    ));
    let installed = install(&python, &wheel, &part);
    remove(&wheel)?;
    if let Err(error) = installed {
        remove(&part)?;
        return Err(error);
    }
    if target.exists() {
        fs::rename(&target, &old)?;
    }
    fs::rename(&part, &target)?;
    remove(&old)?;
    log(&format!("installed {}", library.display()));
    Ok(library)
}

/// Unpacks the wheel into `wheel` and moves the files that are kept into `part`.
fn install(python: &Path, wheel: &Path, part: &Path) -> Result<(), OrtError> {
    let output = Command::new(python)
        .args(["-m", "pip", "install", "--no-deps", "--only-binary", ":all:"])
        .args(["--python-version", WHEEL_PYTHON, "--no-compile", "--no-input", "--quiet"])
        .args(["--disable-pip-version-check", "--target"])
        .arg(wheel)
        .arg(format!("onnxruntime=={ONNX_RUNTIME_VERSION}"))
        // Configured user installs do not go together with --target.
        .env("PIP_USER", "0")
        .output()
        .map_err(|error| OrtError::Setup {
            reason: format!("{} cannot be run: {error}", python.display()),
            advice: "install Python 3 with pip, name another Python, or point FIRESTEEL_ORT at a \
                     libonnxruntime.so",
            output: String::new(),
        })?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        return Err(OrtError::Setup {
            reason: format!("{} -m pip ended with {}", python.display(), output.status),
            advice: advice(&text),
            output: tail(&text),
        });
    }
    fs::create_dir_all(part)?;
    for name in KEPT {
        let source = wheel.join(name);
        if !source.is_file() {
            return Err(OrtError::Setup {
                reason: format!(
                    "pip succeeded, but the wheel of onnxruntime {ONNX_RUNTIME_VERSION} for this \
                     system has no {name}"
                ),
                advice: "point FIRESTEEL_ORT at a libonnxruntime.so",
                output: tail(&String::from_utf8_lossy(&output.stderr)),
            });
        }
        fs::rename(source, part.join(file_name(name)))?;
    }
    Ok(())
}

fn file_name(path: &str) -> &str {
    path.rsplit_once('/').map_or(path, |(_, name)| name)
}

fn remove(folder: &Path) -> Result<(), OrtError> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
        _ => Ok(()),
    }
}

fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    let first = lines.len().saturating_sub(OUTPUT_LINES);
    lines.get(first..).unwrap_or_default().join("\n")
}

/// The way out of a failure of pip, from what it wrote.
fn advice(text: &str) -> &'static str {
    let has = |parts: &[&str]| parts.iter().any(|part| text.contains(part));
    if has(&["No module named pip"]) {
        "install pip for this Python (Debian and Ubuntu: apt install python3-pip)"
    } else if has(&["Failed to establish", "Connection", "name resolution", "timed out", "Proxy"]) {
        "a connection to PyPI is needed, or a mirror in the environment variable PIP_INDEX_URL"
    } else if has(&["No matching distribution"]) {
        "the index has no wheel for this system: point FIRESTEEL_ORT at a libonnxruntime.so"
    } else {
        "see the output of pip"
    }
}
