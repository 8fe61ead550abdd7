//! What Unix and Windows do in different ways.

use fs_err as fs;
use std::fs::File;
use std::io;
use std::path::Path;

/// Writes all of `bytes` from `offset` on, wherever the cursor of `file` is. Threads may write to
/// different places of a file at the same time.
///
/// # Errors
/// When not all of them can be written.
#[cfg(unix)]
pub fn write_all_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(file, bytes, offset)
}

/// Writes all of `bytes` from `offset` on. Threads may write to different places of a file at the same
/// time.
///
/// # Errors
/// When not all of them can be written.
#[cfg(windows)]
pub fn write_all_at(file: &File, mut bytes: &[u8], mut offset: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        match std::os::windows::fs::FileExt::seek_write(file, bytes, offset) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => {
                bytes = bytes.get(written..).unwrap_or_default();
                offset = offset.saturating_add(written as u64);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Bytes that are free for us on the file system of `place`; `None` where that is not told.
#[cfg(unix)]
pub(crate) fn free_space(place: &Path) -> Option<u64> {
    let system = rustix::fs::statvfs(place).ok()?;
    // Some file systems tell nothing but zeros.
    (system.f_blocks > 0).then(|| system.f_bavail.saturating_mul(system.f_frsize))
}

/// Bytes that are free for us on the file system of `place`; `None` where that is not told.
#[cfg(not(unix))]
pub(crate) fn free_space(_: &Path) -> Option<u64> {
    None
}

/// Renames to a name that nothing has, where the file system can promise it.
#[cfg(unix)]
pub(crate) fn rename_new(path: &Path, target: &Path) -> io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    use rustix::io::Errno;
    match renameat_with(CWD, path, CWD, target, RenameFlags::NOREPLACE) {
        Err(Errno::INVAL | Errno::NOSYS) => fs::rename(path, target),
        renamed => renamed.map_err(|error| named(target, error.into())),
    }
}

/// Renames to a name that nothing had a moment ago: the system cannot promise more.
#[cfg(not(unix))]
pub(crate) fn rename_new(path: &Path, target: &Path) -> io::Result<()> {
    match fs::symlink_metadata(target) {
        Ok(_) => Err(named(target, io::ErrorKind::AlreadyExists.into())),
        Err(_) => fs::rename(path, target),
    }
}

/// Gives each of two folders the name of the other at once.
#[cfg(unix)]
pub(crate) fn exchange(path: &Path, target: &Path) -> io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    renameat_with(CWD, path, CWD, target, RenameFlags::EXCHANGE)
        .map_err(|error| named(target, error.into()))
}

/// Gives each of two folders the name of the other, one after the other.
#[cfg(not(unix))]
pub(crate) fn exchange(path: &Path, target: &Path) -> io::Result<()> {
    let aside = path.with_extension("aside");
    fs::rename(target, &aside)?;
    if let Err(error) = fs::rename(path, target) {
        // What was there comes back; nothing is left to do about an error of that.
        let _ = fs::rename(&aside, target);
        return Err(error);
    }
    fs::rename(&aside, path)
}

/// Has the names in `folder` stored, where a system tells files from names.
pub(crate) fn sync_folder(folder: &Path) -> io::Result<()> {
    match cfg!(unix) {
        true => fs::File::open(folder)?.sync_all(),
        false => Ok(()),
    }
}

/// Whether two descriptions are of the same file.
#[cfg(unix)]
pub(crate) fn is_same_file(a: &std::fs::Metadata, b: &std::fs::Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    a.ino() == b.ino() && a.dev() == b.dev()
}

/// Whether two descriptions may be of the same file: files have no numbers here.
#[cfg(not(unix))]
pub(crate) fn is_same_file(a: &std::fs::Metadata, b: &std::fs::Metadata) -> bool {
    a.created().ok() == b.created().ok()
}

/// An error with the path that it is about.
pub(crate) fn named(path: &Path, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}
