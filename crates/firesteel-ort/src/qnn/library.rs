use crate::OrtError;
use crate::setup::{QNN_BACKEND, QNN_PLUGIN, installed_qnn_folder};
use firesteel_checkpoint::cache_root;
use fs_err as fs;
use std::path::PathBuf;

/// The installed QNN plugin.
#[derive(Debug, Clone)]
pub struct QnnLibrary {
    /// The plugin that ONNX Runtime loads.
    pub plugin: PathBuf,
    /// The compiler and emulator that the plugin loads.
    pub backend: PathBuf,
}

/// The plugin that [`setup_qnn`](crate::setup_qnn) has installed; only the pinned version is used,
/// because binaries and messages are those of a version.
///
/// # Errors
/// When it is not there.
pub fn find_qnn() -> Result<QnnLibrary, OrtError> {
    let missing = |cache: String| OrtError::NoQnn { cache };
    let folder = match cache_root() {
        Ok(root) => installed_qnn_folder(&root),
        Err(error) => return Err(missing(format!("the cache ({error})"))),
    };
    // The loader wants absolute paths without symbolic links.
    let folder = fs::canonicalize(&folder).map_err(|_| missing(folder.display().to_string()))?;
    let library = QnnLibrary { plugin: folder.join(QNN_PLUGIN), backend: folder.join(QNN_BACKEND) };
    if library.plugin.is_file() && library.backend.is_file() {
        Ok(library)
    } else {
        Err(missing(folder.display().to_string()))
    }
}
