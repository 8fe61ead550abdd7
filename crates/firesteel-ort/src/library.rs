use crate::OrtError;
use crate::log::environment_logger;
use crate::setup::installed_folder;
use firesteel_checkpoint::cache_root_of;
use fs_err as fs;
use ort::LoadDynamicError;
use ort::environment::Environment;
use ort::logging::LogLevel;
use std::cmp::Reverse;
use std::ffi::OsString;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

/// Beginning of the library's file name; a version follows in most packages.
const LIBRARY_NAME: &str = "libonnxruntime.so";

/// Where packages keep the library, below their own folder.
const SUBFOLDERS: [&str; 3] = ["", "lib", "capi"];

/// The ONNX Runtime of this process.
#[derive(Debug)]
pub struct OrtLibrary {
    path: PathBuf,
    version: Option<String>,
    environment: Environment,
}

impl OrtLibrary {
    /// The file, without symbolic links.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Version of the library, such as `1.32.0`; `None` when the file does not carry one.
    pub fn version(&self) -> Option<&str> {
        self.version.as_deref()
    }

    /// How the library was built, in its own words: commit and build type.
    pub fn build(&self) -> &'static str {
        ort::info()
    }

    pub(crate) fn environment(&self) -> &Environment {
        &self.environment
    }
}

/// The path that was opened, also when the steps after opening failed: the `ort` crate keeps the
/// first library it opens.
static OPENED: Mutex<Option<PathBuf>> = Mutex::new(None);
static LIBRARY: OnceLock<OrtLibrary> = OnceLock::new();

/// Loads ONNX Runtime, or returns the one that this process has loaded. Telemetry is off.
///
/// Looked up in this order: `explicit` (a file, or a folder that holds one), the environment
/// variable FIRESTEEL_ORT, the folder that [`setup_ort`](crate::setup_ort) fills. Without
/// `explicit`, a library that is loaded already is taken as it is.
///
/// # Errors
/// When nothing is found, the file is no ONNX Runtime or an old one, or another one is loaded.
pub fn load(explicit: Option<&Path>) -> Result<&'static OrtLibrary, OrtError> {
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    if explicit.is_none()
        && let Some(library) = LIBRARY.get()
    {
        return Ok(library);
    }
    let path = find_library(explicit)?;
    match opened.as_ref() {
        Some(loaded) if *loaded != path => {
            return Err(OrtError::OtherLoaded { loaded: loaded.clone(), asked: path });
        }
        _ => {}
    }
    if let Some(library) = LIBRARY.get() {
        return Ok(library);
    }
    let builder = ort::init_from(&path).map_err(|error| refused(&path, error))?;
    *opened = Some(path.clone());
    let environment = builder
        .with_name("firesteel")
        .with_telemetry(false)
        .with_logger(environment_logger())
        .build()
        .map_err(|error| OrtError::Load { path: path.clone(), reason: error.to_string() })?;
    // An environment with its own logger starts at the most verbose level.
    environment.set_log_level(LogLevel::Warning);
    let version = library_version(&path);
    tracing::debug!(path = %path.display(), version, build = ort::info(), "loaded ONNX Runtime");
    Ok(LIBRARY.get_or_init(|| OrtLibrary { path, version, environment }))
}

/// The library that [`load`] would load, as an absolute path without symbolic links.
///
/// # Errors
/// When there is none; a path that was given but holds no library is not passed over.
pub fn find_library(explicit: Option<&Path>) -> Result<PathBuf, OrtError> {
    find(explicit, &|name| std::env::var_os(name))
}

type Variables<'a> = &'a dyn Fn(&str) -> Option<OsString>;

fn variable(variables: Variables<'_>, name: &str) -> Option<PathBuf> {
    variables(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

fn find(explicit: Option<&Path>, variables: Variables<'_>) -> Result<PathBuf, OrtError> {
    let given = match explicit {
        Some(path) => Some(("--ort", path.to_owned())),
        None => variable(variables, "FIRESTEEL_ORT").map(|path| ("FIRESTEEL_ORT", path)),
    };
    if let Some((origin, path)) = given {
        let found = resolve(&path);
        return found.map_err(|reason| OrtError::LibraryPath { origin, path, reason });
    }
    let folder = match cache_root_of(variables) {
        Ok(root) => installed_folder(&root),
        Err(error) => return Err(OrtError::NoLibrary { cache: format!("the cache ({error})") }),
    };
    resolve(&folder).map_err(|_| OrtError::NoLibrary { cache: folder.display().to_string() })
}

/// The library at `path`, a file or a folder.
fn resolve(path: &Path) -> Result<PathBuf, String> {
    // These messages are shown behind the path, so they do not repeat it.
    let plain = |error: std::io::Error| match error.kind() {
        std::io::ErrorKind::NotFound => "no such file or folder".to_owned(),
        _ => error.to_string(),
    };
    let path = fs::canonicalize(path).map_err(plain)?;
    if path.is_file() {
        return Ok(path);
    }
    for subfolder in SUBFOLDERS {
        let folder = path.join(subfolder);
        if !folder.is_dir() {
            continue;
        }
        let mut libraries = Vec::new();
        for entry in fs::read_dir(&folder).map_err(plain)? {
            let entry = entry.map_err(plain)?;
            let name = entry.file_name();
            if let Some(version) = name.to_str().and_then(|n| n.strip_prefix(LIBRARY_NAME))
                && let Some(key) = version_key(version)
                && entry.path().is_file()
            {
                libraries.push((Reverse(key), entry.path()));
            }
        }
        libraries.sort();
        if let Some((_, library)) = libraries.first() {
            return fs::canonicalize(library).map_err(plain);
        }
    }
    Err(format!("no {LIBRARY_NAME}* in this folder or in its lib or capi folder"))
}

/// The numbers of a suffix such as `.1.32.0`, to put the newest first; `None` for another suffix.
fn version_key(suffix: &str) -> Option<Vec<u64>> {
    if suffix.is_empty() {
        return Some(Vec::new());
    }
    suffix.strip_prefix('.')?.split('.').map(|part| part.parse().ok()).collect()
}

/// The version of the library at `path`, which its symbols carry (`VERS_1.32.0`); `None` when they
/// do not. The `ort` crate checks the version that the library reports, but does not show it.
pub fn library_version(path: &Path) -> Option<String> {
    const MARK: &[u8] = b"VERS_";
    // The dynamic string table comes before the code.
    const HEAD: u64 = 8 << 20;
    let mut head = Vec::new();
    fs::File::open(path).ok()?.take(HEAD).read_to_end(&mut head).ok()?;
    let start = head.windows(MARK.len()).position(|window| window == MARK)? + MARK.len();
    let version: Vec<u8> = head
        .get(start..)?
        .iter()
        .copied()
        .take(32)
        .take_while(|byte| byte.is_ascii_digit() || *byte == b'.')
        .collect();
    String::from_utf8(version).ok().filter(|version| !version.is_empty())
}

fn refused(path: &Path, error: LoadDynamicError) -> OrtError {
    let path = path.to_owned();
    match error {
        LoadDynamicError::BadVersion { version_str, .. } => OrtError::TooOld {
            path,
            version: version_str,
            needed: format!("1.{}", ort::MINOR_VERSION),
        },
        LoadDynamicError::MissingApi { .. } => OrtError::Load {
            path,
            reason: "it is a library, but does not export OrtGetApiBase".into(),
        },
        // Only the debug form holds the loader's reason.
        other => OrtError::Load { path, reason: format!("{other:?}") },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with<'a>(set: &'a [(&'a str, &'a Path)]) -> impl Fn(&str) -> Option<OsString> + 'a {
        move |name| set.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).into())
    }

    #[test]
    fn lookup_order_and_messages() {
        let root = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(root.path()).unwrap();
        let place = |folder: &str| {
            let folder = root.join(folder);
            fs::create_dir_all(&folder).unwrap();
            let file = folder.join("libonnxruntime.so.1.32.0");
            fs::write(&file, "").unwrap();
            (folder, file)
        };
        let (explicit, explicit_file) = place("explicit");
        let (variable, variable_file) = place("variable/lib");
        let cache = root.join("cache");
        let set = [("FIRESTEEL_ORT", variable.parent().unwrap()), ("FIRESTEEL_CACHE", &*cache)];

        assert_eq!(find(Some(&explicit), &with(&set)).unwrap(), explicit_file);
        assert_eq!(find(Some(&explicit_file), &with(&set)).unwrap(), explicit_file);
        assert_eq!(find(None, &with(&set)).unwrap(), variable_file);

        let error = find(None, &with(&set[1..])).unwrap_err().to_string();
        for part in ["--ort", "FIRESTEEL_ORT", &*cache.to_string_lossy(), "firesteel setup ort"] {
            assert!(error.contains(part), "{error}");
        }
        let error = find(None, &with(&[])).unwrap_err().to_string();
        assert!(error.contains("FIRESTEEL_CACHE, XDG_CACHE_HOME and HOME"), "{error}");

        let installed = installed_folder(&cache).join("libonnxruntime.so.1.32.0");
        fs::create_dir_all(installed.parent().unwrap()).unwrap();
        fs::write(&installed, "").unwrap();
        assert_eq!(find(None, &with(&set[1..])).unwrap(), installed);

        // What was given is not passed over for the cache.
        let missing = root.join("missing");
        let error = find(Some(&missing), &with(&set)).unwrap_err().to_string();
        assert!(error.contains("missing (from --ort): no such file or folder"), "{error}");
        let bare = [("FIRESTEEL_ORT", &*root), set[1]];
        let error = find(None, &with(&bare)).unwrap_err().to_string();
        assert!(error.contains("(from FIRESTEEL_ORT): no libonnxruntime.so* in"), "{error}");
    }

    #[test]
    fn the_newest_library_of_a_folder_is_taken() {
        let folder = tempfile::tempdir().unwrap();
        let folder = fs::canonicalize(folder.path()).unwrap();
        let names =
            ["libonnxruntime.so.1.9.0", "libonnxruntime.so.1.32.0", "libonnxruntime.so.bak"];
        for name in names {
            fs::write(folder.join(name), "").unwrap();
        }
        fs::create_dir(folder.join("libonnxruntime.so.2")).unwrap();
        assert_eq!(resolve(&folder).unwrap(), folder.join(names[1]));
    }

    #[test]
    fn version_comes_from_the_symbols() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for (bytes, expected) in [
            (&b"\x7fELF\0VERS_1.32.0\0libm.so"[..], Some("1.32.0")),
            (b"no mark", None),
            (b"VERS_", None),
        ] {
            fs::write(file.path(), bytes).unwrap();
            assert_eq!(library_version(file.path()).as_deref(), expected);
        }
    }
}
