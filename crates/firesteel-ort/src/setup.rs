use crate::OrtError;
use fs_err as fs;
use sha2::{Digest, Sha256};
use std::fs::TryLockError;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The version that [`setup_ort`] installs.
pub const ONNX_RUNTIME_VERSION: &str = "1.32.0";

/// The version that [`setup_qnn`] installs. It holds QNN SDK [`QNN_SDK_VERSION`].
pub const QNN_VERSION: &str = "2.7.0";

/// The version of Qualcomm's libraries in the wheel of [`QNN_VERSION`].
pub const QNN_SDK_VERSION: &str = "2.51.0";

/// A wheel of the package index, and what is kept of it.
struct Package {
    /// What a person calls it.
    title: &'static str,
    /// Name in the index.
    name: &'static str,
    /// The version that is installed.
    version: &'static str,
    /// The files that are kept, the library first.
    kept: &'static [Kept],
    /// What to do where the index has no wheel for the system.
    elsewhere: &'static str,
}

/// A file of a wheel that is kept.
struct Kept {
    /// Path in the wheel.
    source: &'static str,
    /// Path in the installed folder.
    target: &'static str,
    /// SHA-256, where the wheel is the same for every system that has one.
    sha256: Option<&'static str>,
}

const fn kept(source: &'static str, target: &'static str) -> Kept {
    Kept { source, target, sha256: None }
}

const fn hashed(source: &'static str, target: &'static str, sha256: &'static str) -> Kept {
    Kept { source, target, sha256: Some(sha256) }
}

/// The library needs nothing beside it to run on the CPU; the licence goes with it.
const ONNX_RUNTIME: Package = Package {
    title: "ONNX Runtime",
    name: "onnxruntime",
    version: ONNX_RUNTIME_VERSION,
    kept: &[
        kept("onnxruntime/capi/libonnxruntime.so.1.32.0", "libonnxruntime.so.1.32.0"),
        kept("onnxruntime/LICENSE", "LICENSE"),
        kept("onnxruntime/ThirdPartyNotices.txt", "ThirdPartyNotices.txt"),
    ],
    elsewhere: "point FIRESTEEL_ORT at a libonnxruntime.so",
};

/// The plugin, the compiler with its emulator, and what these two need. The libraries look for
/// each other from their own folder, so the folders of the wheel stay.
const QNN: Package = Package {
    title: "ONNX Runtime's QNN plugin",
    name: "onnxruntime-qnn",
    version: QNN_VERSION,
    kept: &[
        hashed(
            "onnxruntime_qnn/libonnxruntime_providers_qnn.so",
            QNN_PLUGIN,
            "629dfc151fc842bf9aa6ecdba89c0a864cd50e90fda960f9631e234fed5fc457",
        ),
        hashed(
            "onnxruntime_qnn/libQnnHtp.so",
            QNN_BACKEND,
            "66fbcc1a97b3ca186c0170123e03978f2351222d59b2e9ceb0202e4a9b0116c0",
        ),
        hashed(
            "onnxruntime_qnn/libQnnSystem.so",
            "onnxruntime_qnn/libQnnSystem.so",
            "a5441fe0307cfb10478d18f6de16053f3b111eaa01ff3975a54b10afdfa33a38",
        ),
        hashed(
            "onnxruntime_qnn.libs/libc++-71bc274c.so.1.0",
            "onnxruntime_qnn.libs/libc++-71bc274c.so.1.0",
            "46cee8e5f62e9b4a79b863b058879c5e9d4f41841650841df6f6669ebef2e2e2",
        ),
        hashed(
            "onnxruntime_qnn.libs/libc++abi-0539aa51.so.1.0",
            "onnxruntime_qnn.libs/libc++abi-0539aa51.so.1.0",
            "2cb6d3e6acc815575d5a76acb45f99ae4ed5a4fcc04febaa8cd8981e07b89a47",
        ),
        hashed(
            "onnxruntime_qnn.libs/libunwind-6b740a46.so.1.0",
            "onnxruntime_qnn.libs/libunwind-6b740a46.so.1.0",
            "a00822cc6221850754a491cbafa2b2e2fefac06f61f108cc8e80f0869fe5f724",
        ),
        kept("onnxruntime_qnn/LICENSE", "LICENSE"),
        kept("onnxruntime_qnn/Qualcomm_LICENSE.pdf", "Qualcomm_LICENSE.pdf"),
        kept("onnxruntime_qnn/ThirdPartyNotices.txt", "ThirdPartyNotices.txt"),
    ],
    elsewhere: "Qualcomm's compiler is published for Linux on x86-64 with glibc 2.35 or newer; \
                compile on such a machine and copy the folder that `compile` writes",
};

/// The plugin below the installed folder.
pub(crate) const QNN_PLUGIN: &str = "onnxruntime_qnn/libonnxruntime_providers_qnn.so";

/// The HTP back end below the installed folder.
pub(crate) const QNN_BACKEND: &str = "onnxruntime_qnn/libQnnHtp.so";

/// The wheels of all Python versions hold the same library, so any Python with pip can fetch the
/// one for this version.
const WHEEL_PYTHON: &str = "3.13";

/// Lines of pip's error output that an error repeats.
const OUTPUT_LINES: usize = 20;

/// Where and how to install a library.
#[derive(Debug, Clone)]
pub struct SetupOptions {
    /// The cache folder, usually [`cache_root`](firesteel_checkpoint::cache_root); made if it does not exist.
    pub cache: PathBuf,
    /// The Python whose pip is run; `python3` on the PATH by default.
    pub python: Option<PathBuf>,
    /// Install again what is installed already.
    pub force: bool,
}

impl Package {
    fn folder(&self, cache: &Path) -> PathBuf {
        cache.join(format!("{}-{}", self.name, self.version))
    }

    /// Compares what is in `folder` with the hashes of the pinned version.
    fn verify(&self, folder: &Path) -> Result<(), OrtError> {
        for kept in self.kept {
            let file = folder.join(kept.target);
            let Some(expected) = kept.sha256 else { continue };
            let mut hasher = Sha256::new();
            std::io::copy(&mut fs::File::open(&file)?, &mut Hash(&mut hasher))?;
            let actual = hex(&hasher.finalize());
            if actual != expected {
                return Err(OrtError::Setup {
                    package: self.title,
                    reason: format!(
                        "{} has SHA-256 {actual}, the file of version {} has {expected}",
                        file.display(),
                        self.version
                    ),
                    advice: "the index or a mirror gave another file; check the index that pip \
                             uses, then run it again with --force",
                    output: String::new(),
                });
            }
        }
        Ok(())
    }
}

/// A hasher as a sink.
struct Hash<'a>(&'a mut Sha256);

impl std::io::Write for Hash<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The folder of ONNX Runtime below the cache folder.
pub(crate) fn installed_folder(cache: &Path) -> PathBuf {
    ONNX_RUNTIME.folder(cache)
}

/// The folder of the QNN plugin below the cache folder.
pub(crate) fn installed_qnn_folder(cache: &Path) -> PathBuf {
    QNN.folder(cache)
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
    setup(&ONNX_RUNTIME, options, log)
}

/// Installs the pinned QNN plugin with Qualcomm's HTP compiler and emulator from PyPI, in the way
/// of [`setup_ort`], and returns the path of the plugin. It is under Qualcomm's licence, which is
/// kept beside it. The libraries' hashes are compared with those of the pinned version, also when
/// they are there already.
///
/// # Errors
/// As [`setup_ort`]; also when a library is not the pinned one.
pub fn setup_qnn(options: SetupOptions, log: &mut dyn FnMut(&str)) -> Result<PathBuf, OrtError> {
    let folder = QNN.folder(&std::path::absolute(&options.cache)?);
    let plugin = setup(&QNN, options, log)?;
    QNN.verify(&folder)?;
    Ok(plugin)
}

fn setup(
    package: &Package,
    options: SetupOptions,
    log: &mut dyn FnMut(&str),
) -> Result<PathBuf, OrtError> {
    let cache = std::path::absolute(&options.cache)?;
    let target = package.folder(&cache);
    let (title, version) = (package.title, package.version);
    let library = target.join(package.kept.first().map_or("", |kept| kept.target));
    let present = || {
        (!options.force && library.is_file())
            .then(|| format!("{title} {version} is at {}", library.display()))
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
            log(&format!("waiting for another process that installs {title}"));
            lock.file().lock()?;
        }
        Err(TryLockError::Error(error)) => return Err(error.into()),
    }
    // Another may have ended between the first look and the lock.
    if let Some(line) = present() {
        log(&line);
        return Ok(library);
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
        "installing {title} {version} with {} -m pip into {}",
        python.display(),
        target.display()
    ));
    let installed = install(package, &python, &wheel, &part);
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
fn install(package: &Package, python: &Path, wheel: &Path, part: &Path) -> Result<(), OrtError> {
    let output = Command::new(python)
        .args(["-m", "pip", "install", "--no-deps", "--only-binary", ":all:"])
        .args(["--python-version", WHEEL_PYTHON, "--no-compile", "--no-input", "--quiet"])
        .args(["--disable-pip-version-check", "--target"])
        .arg(wheel)
        .arg(format!("{}=={}", package.name, package.version))
        // Configured user installs do not go together with --target.
        .env("PIP_USER", "0")
        .output()
        .map_err(|error| OrtError::Setup {
            package: package.title,
            reason: format!("{} cannot be run: {error}", python.display()),
            advice: "install Python 3 with pip, or name another Python with --python",
            output: String::new(),
        })?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        return Err(OrtError::Setup {
            package: package.title,
            reason: format!("{} -m pip ended with {}", python.display(), output.status),
            advice: advice(package, &text),
            output: tail(&text),
        });
    }
    fs::create_dir_all(part)?;
    for kept in package.kept {
        let source = wheel.join(kept.source);
        if !source.is_file() {
            return Err(OrtError::Setup {
                package: package.title,
                reason: format!(
                    "pip succeeded, but the wheel of {} {} for this system has no {}",
                    package.name, package.version, kept.source
                ),
                advice: package.elsewhere,
                output: tail(&String::from_utf8_lossy(&output.stderr)),
            });
        }
        let target = part.join(kept.target);
        if let Some(folder) = target.parent() {
            fs::create_dir_all(folder)?;
        }
        fs::rename(source, target)?;
    }
    package.verify(part)
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
fn advice(package: &Package, text: &str) -> &'static str {
    let has = |parts: &[&str]| parts.iter().any(|part| text.contains(part));
    if has(&["No module named pip"]) {
        "install pip for this Python (Debian and Ubuntu: apt install python3-pip)"
    } else if has(&["Failed to establish", "Connection", "name resolution", "timed out", "Proxy"]) {
        "a connection to PyPI is needed, or a mirror in the environment variable PIP_INDEX_URL"
    } else if has(&["No matching distribution"]) {
        package.elsewhere
    } else {
        "see the output of pip"
    }
}
