use crate::CheckpointError;
use crate::json::require_regular;
use firesteel_tensor::SharedBytes;
use std::path::Path;
use std::sync::Arc;

/// A regular file mapped read-only into memory. Pages are read when they are touched and belong
/// to the page cache, so a mapped file costs no anonymous memory.
///
/// The file must not be changed or shortened by anyone while it is mapped: a changed file gives
/// changed values, and reading past a new end stops the process with SIGBUS.
#[derive(Debug, Clone)]
pub struct MappedFile {
    bytes: SharedBytes,
}

impl MappedFile {
    /// Maps `path`, following symbolic links.
    ///
    /// # Errors
    /// When `path` is not a regular file or cannot be opened or mapped.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        require_regular(path)?;
        let file = fs_err::File::open(path)?;
        let bytes = map(file.file())
            .map_err(|e| std::io::Error::new(e.kind(), format!("cannot map {path:?}: {e}")))?;
        Ok(Self { bytes: SharedBytes::new(bytes) })
    }

    /// The bytes of the file; they keep it mapped.
    pub fn bytes(&self) -> SharedBytes {
        self.bytes.clone()
    }
}

#[expect(unsafe_code, reason = "mapping is the only way to read weights without a copy")]
fn map(file: &std::fs::File) -> std::io::Result<Arc<memmap2::Mmap>> {
    // SAFETY: the map is private to this process, read-only and only seen as bytes, for which
    // every bit pattern is valid. What remains is that another process changes the file; the
    // contract of `MappedFile` excludes it, as every program that maps weights must.
    unsafe { memmap2::Mmap::map(file) }.map(Arc::new)
}
