use crate::CheckpointError;
use crate::json::require_regular;
use firesteel_tensor::SharedBytes;
use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;

/// A regular file mapped read-only into memory. Pages are read when they are touched and belong
/// to the page cache, so a mapped file costs no anonymous memory.
///
/// The file must not be changed or shortened by anyone while it is mapped. No caller can hold
/// others to that, and no system offers a map that nobody can change, so [`MappedFile::open`] is
/// safe by decision and not by proof. Bytes that change under a shared slice are undefined
/// behaviour by the letter of the language. What is meant to follow is changed values: the bytes
/// are only read, and as numbers for which every bit pattern is valid. Reading past a new end stops the process with SIGBUS, about which [`watch_lost_pages`] has
/// something said.
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
    #[cfg(unix)]
    fn of(file: &std::fs::File) -> io::Result<Self> {
        use std::os::unix::fs::MetadataExt;
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

    /// Files have no numbers here; when they were made stands for them.
    #[cfg(not(unix))]
    fn of(file: &std::fs::File) -> io::Result<Self> {
        let metadata = file.metadata()?;
        let time = |time: std::time::SystemTime| {
            let since = time.duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
            i128::try_from(since.as_nanos()).unwrap_or(i128::MAX)
        };
        let made = time(metadata.created()?);
        Ok(Self {
            device: 0,
            inode: (made & i128::from(u64::MAX)) as u64,
            size: metadata.len(),
            modified: time(metadata.modified()?),
            changed: made,
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
            .map_err(|e| io::Error::new(e.kind(), format!("cannot map {path:?}: {e}")))?;
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
fn map(file: &std::fs::File) -> io::Result<Arc<memmap2::Mmap>> {
    // SAFETY: the map is private to this process, read-only and only seen as bytes, for which
    // every bit pattern is valid. What remains is that another process changes the file; the
    // contract of `MappedFile` excludes it and says what is left of that when nobody keeps it.
    unsafe { memmap2::Mmap::map(file) }.map(Arc::new)
}

/// Has `end` called, in a thread of its own, when a page of a mapped file cannot be read any more:
/// the file became shorter, or its disk failed. The thread that touched the page stops for good,
/// so `end` must end the process and use no lock under which mapped bytes are read. Meant for
/// programs, once; elsewhere than on Linux nothing is watched.
///
/// # Errors
/// When the thread, its pipe or the signal's handler cannot be had; nothing is watched then.
pub fn watch_lost_pages(end: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let (mut told, tell) = io::pipe()?;
    std::thread::Builder::new().name("lost pages".into()).spawn(move || {
        // An error or an early end means that the handler could not be set.
        if matches!(told.read(&mut [0]), Ok(1)) {
            end();
        }
    })?;
    lost_pages::install(tell)
}

#[cfg(any(target_os = "linux", target_os = "android"))]
#[expect(unsafe_code, reason = "a signal is handled by a function of the C interface")]
mod lost_pages {
    use std::io::{self, PipeWriter};
    use std::os::fd::IntoRawFd;
    use std::sync::atomic::{AtomicI32, Ordering};

    /// Where the handler tells; it is never closed.
    static TELL: AtomicI32 = AtomicI32::new(-1);

    pub(super) fn install(tell: PipeWriter) -> io::Result<()> {
        TELL.store(tell.into_raw_fd(), Ordering::Release);
        // SAFETY: all zeros is a valid sigaction: an empty mask, no flags and the default handler.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) = handle;
        action.sa_sigaction = handler as libc::sighandler_t;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: the action is initialised and its handler calls nothing but functions that are
        // safe in signal handlers.
        match unsafe { libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut()) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    extern "C" fn handle(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
        // SAFETY: with SA_SIGINFO the system passes a valid siginfo_t. sigaction, write, pause
        // and raise are safe in signal handlers, and the byte written lives on this stack.
        unsafe {
            let lost = (*info).si_code == libc::BUS_ADRERR;
            let byte = 1u8;
            let fd = TELL.load(Ordering::Acquire);
            if lost && libc::write(fd, std::ptr::from_ref(&byte).cast(), 1) == 1 {
                // Going on would touch the page again.
                loop {
                    libc::pause();
                }
            }
            // Something else, or nobody can be told: what the signal does by default, on return.
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = libc::SIG_DFL;
            libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut());
            libc::raise(libc::SIGBUS);
        }
    }
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
mod lost_pages {
    pub(super) fn install(_: std::io::PipeWriter) -> std::io::Result<()> {
        Ok(())
    }
}
