use crate::CheckpointError;
use crate::json::require_regular;
use firesteel_tensor::SharedBytes;
use std::os::unix::fs::MetadataExt;
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
    identity: FileIdentity,
}

/// What tells a file from others and from its own earlier contents, as long as nobody sets clocks
/// back: whoever writes to it changes the times.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FileIdentity {
    /// Number of the device.
    pub device: u64,
    /// Number of the file on it.
    pub inode: u64,
    /// Bytes.
    pub size: u64,
    /// When its contents were written last, in nanoseconds of Unix time.
    pub modified: i128,
    /// When the file was changed last, its name and permissions included, in the same unit.
    pub changed: i128,
}

impl FileIdentity {
    fn of(file: &std::fs::File) -> std::io::Result<Self> {
        let metadata = file.metadata()?;
        let time = |seconds: i64, rest: i64| i128::from(seconds) * 1_000_000_000 + i128::from(rest);
        Ok(Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            size: metadata.len(),
            modified: time(metadata.mtime(), metadata.mtime_nsec()),
            changed: time(metadata.ctime(), metadata.ctime_nsec()),
        })
    }
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
        Ok(Self { bytes: SharedBytes::new(bytes), identity: FileIdentity::of(file.file())? })
    }

    /// Which file it was when it was mapped.
    pub fn identity(&self) -> FileIdentity {
        self.identity
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
