use crate::os::{exchange, free_space, is_same_file, rename_new, sync_folder};
use fs_err as fs;
use std::ffi::{OsStr, OsString};
use std::fs::TryLockError;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// An output folder that appears complete or not at all.
///
/// It is written beside its target under a hidden name and renamed at the end. Dropped without
/// [`StagedFolder::commit`], it is removed; what a killed process leaves behind is removed by the
/// next one with the same target.
#[derive(Debug)]
pub struct StagedFolder {
    path: PathBuf,
    target: PathBuf,
    replace: bool,
    /// Holds the lock that tells a folder in use from one left behind.
    _lock: fs::File,
}

/// Whether an existing target may be replaced.
#[derive(Clone, Copy)]
pub enum Replace<'a> {
    /// An existing target is an error.
    Never,
    /// A folder that is empty, or that this accepts, is replaced; any other is an error, so that
    /// a mistyped path costs nobody a folder of something else. It says why it refuses.
    If(&'a dyn Fn(&Path) -> Result<(), String>),
}

/// How often a hidden name is looked for, when others take away what was just made.
const ATTEMPTS: usize = 1000;

/// Files and folders that are being written.
static STAGED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Removes every file and folder that is being written, for a program that is about to end early.
pub fn remove_staged() {
    let mut staged = STAGED.lock().unwrap_or_else(PoisonError::into_inner);
    for path in staged.drain(..) {
        // Nothing can be done about an error here; the next process tries again.
        let _ = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    }
}

fn register(path: &Path) {
    STAGED.lock().unwrap_or_else(PoisonError::into_inner).push(path.to_owned());
}

fn unregister(path: &Path) {
    STAGED.lock().unwrap_or_else(PoisonError::into_inner).retain(|staged| staged != path);
}

/// An output file that appears complete or not at all, in the way of [`StagedFolder`].
#[derive(Debug)]
pub struct StagedFile {
    path: PathBuf,
    target: PathBuf,
    replace: bool,
    /// Open for writing, and locked.
    file: fs::File,
}

impl StagedFile {
    /// A new file beside `target`, whose parents are created. An existing target is an error
    /// unless `replace` says whether this one may be replaced.
    ///
    /// # Errors
    /// When the target exists and may not be replaced, or the file cannot be made.
    pub fn create(
        target: &Path,
        replace: Option<fn(&Path) -> io::Result<bool>>,
    ) -> io::Result<Self> {
        let (target, parent, prefix) = hidden_prefix(target)?;
        if fs::symlink_metadata(&target).is_ok() {
            let shown = target.display();
            let message = match replace {
                None => format!("{shown} exists already; choose another name"),
                Some(ours) if ours(&target)? => String::new(),
                Some(_) => format!("{shown} exists and is another kind of file; not replaced"),
            };
            if !message.is_empty() {
                return Err(io::Error::new(io::ErrorKind::AlreadyExists, message));
            }
        }
        fs::create_dir_all(&parent)?;
        remove_abandoned(&parent, &prefix);
        for _ in 0..ATTEMPTS {
            let path = parent.join(hidden_name(&prefix));
            let file = match fs::File::create_new(&path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                created => created?,
            };
            if is_kept(&file, &path)? {
                register(&path);
                return Ok(Self { path, target, replace: replace.is_some(), file });
            }
        }
        Err(io::Error::other(format!("cannot create a file beside {}", target.display())))
    }

    /// Where to write.
    pub fn file(&self) -> &fs::File {
        &self.file
    }

    /// Refuses to begin what cannot end: `bytes` bytes on a file system that has less.
    ///
    /// # Errors
    /// When fewer bytes are free; the message says both numbers.
    pub fn require_space(&self, bytes: u64) -> io::Result<()> {
        require_space(&self.path, &self.target, bytes)
    }

    /// Writes everything to disk and renames the file to its target.
    ///
    /// # Errors
    /// When something cannot be written, or the target appeared in the meantime and may not be
    /// replaced.
    pub fn commit(self) -> io::Result<()> {
        self.file.sync_all()?;
        if self.replace {
            fs::rename(&self.path, &self.target)?;
        } else {
            rename_new(&self.path, &self.target)?;
        }
        sync_parent(&self.target)
    }
}

impl Drop for StagedFile {
    fn drop(&mut self) {
        unregister(&self.path);
        // After a commit there is none. About an error nothing is left to do.
        let _ = fs::remove_file(&self.path);
    }
}

impl StagedFolder {
    /// A new folder beside `target`, whose parents are created.
    ///
    /// # Errors
    /// When the target exists and may not be replaced, or the folder cannot be made.
    pub fn create(target: &Path, replace: Replace<'_>) -> io::Result<Self> {
        let (target, parent, prefix) = hidden_prefix(target)?;
        may_replace(&target, replace)?;
        fs::create_dir_all(&parent)?;
        remove_abandoned(&parent, &prefix);
        for _ in 0..ATTEMPTS {
            let path = parent.join(hidden_name(&prefix));
            match fs::create_dir(&path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                created => created?,
            }
            let lock = match fs::File::open(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                opened => opened?,
            };
            if is_kept(&lock, &path)? {
                let replace = matches!(replace, Replace::If(_));
                register(&path);
                return Ok(Self { path, target, replace, _lock: lock });
            }
        }
        Err(io::Error::other(format!("cannot create a folder beside {}", target.display())))
    }

    /// Where to write.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Refuses to begin what cannot end: `bytes` bytes in a folder whose file system has less.
    ///
    /// # Errors
    /// When fewer bytes are free; the message says both numbers.
    pub fn require_space(&self, bytes: u64) -> io::Result<()> {
        require_space(&self.path, &self.target, bytes)
    }

    /// Writes everything to disk and renames the folder to its target.
    ///
    /// # Errors
    /// When something cannot be written or the target appeared in the meantime. The target is
    /// then what it was.
    pub fn commit(self) -> io::Result<PathBuf> {
        sync_tree(&self.path)?;
        let exists = fs::symlink_metadata(&self.target).is_ok();
        if exists && self.replace {
            // The old folder takes the hidden name, under which `drop` removes it.
            exchange(&self.path, &self.target)?;
        } else {
            rename_new(&self.path, &self.target)?;
        }
        sync_parent(&self.target)?;
        Ok(self.target.clone())
    }
}

impl Drop for StagedFolder {
    fn drop(&mut self) {
        unregister(&self.path);
        // Nothing is left to do about an error here; the next process tries again.
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// Refuses to write `bytes` bytes for `target` where the file system of `place` has less.
pub(crate) fn require_space(place: &Path, target: &Path, bytes: u64) -> io::Result<()> {
    let Some(free) = free_space(place).filter(|free| bytes > *free) else { return Ok(()) };
    let message = format!(
        "{}: {bytes} bytes are needed, but only {free} are free on its file system; free some or \
         choose another place",
        target.display()
    );
    Err(io::Error::new(io::ErrorKind::StorageFull, message))
}

/// The absolute target, its folder, and what hidden names beside it begin with.
fn hidden_prefix(target: &Path) -> io::Result<(PathBuf, PathBuf, OsString)> {
    let target = std::path::absolute(target)?;
    let (Some(parent), Some(name)) = (target.parent(), target.file_name()) else {
        return Err(invalid(format!("{} is no name for something new", target.display())));
    };
    let mut prefix = OsString::from(".");
    prefix.push(name);
    prefix.push(".partial-");
    // Without a trailing slash, which would follow a link.
    Ok((parent.join(name), parent.to_owned(), prefix))
}

/// A name that nothing had before. A commit frees it, and what is dropped after that removes what
/// bears it, which must not be what another thread or process has begun since then.
fn hidden_name(prefix: &OsStr) -> OsString {
    let mut name = prefix.to_owned();
    let process = std::process::id();
    // Each state has random keys of its own.
    name.push(format!("{process}-{:016x}", RandomState::new().hash_one(process)));
    name
}

fn sync_parent(target: &Path) -> io::Result<()> {
    match target.parent() {
        Some(parent) => sync_folder(parent),
        None => Ok(()),
    }
}

fn invalid(message: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, message)
}

fn may_replace(target: &Path, replace: Replace<'_>) -> io::Result<()> {
    let metadata = match fs::symlink_metadata(target) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        metadata => metadata?,
    };
    let shown = target.display();
    let exists = |message| Err(io::Error::new(io::ErrorKind::AlreadyExists, message));
    match replace {
        Replace::Never => exists(format!("{shown} exists already; choose another name")),
        Replace::If(_) if !metadata.is_dir() => {
            exists(format!("{shown} exists and is no folder; it is not replaced"))
        }
        Replace::If(accept) => {
            if fs::read_dir(target)?.next().is_none() {
                return Ok(());
            }
            accept(target).or_else(|reason| {
                exists(format!("{shown} exists and {reason}; it is not replaced"))
            })
        }
    }
}

/// Locks what was just made as `path`; false when another process took it for abandoned before
/// that. Where the file system has no locks, nobody takes anything.
fn is_kept(file: &fs::File, path: &Path) -> io::Result<bool> {
    let held = matches!(file.file().try_lock(), Err(TryLockError::WouldBlock));
    Ok(!held && is_named(file, path)?)
}

/// Locks what still bears its name; `None` when another process holds or removed it.
fn lock_abandoned(path: &Path) -> io::Result<Option<fs::File>> {
    let file = fs::File::open(path)?;
    let locked = file.file().try_lock().is_ok() && is_named(&file, path)?;
    Ok(locked.then_some(file))
}

/// Whether `path` is still the name of `file`.
fn is_named(file: &fs::File, path: &Path) -> io::Result<bool> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        named => Ok(is_same_file(&named?, &file.metadata()?)),
    }
}

/// Removes what killed processes left. What cannot be removed, or is being removed by another
/// process, stays for the next one.
fn remove_abandoned(parent: &Path, prefix: &OsStr) {
    let Ok(entries) = fs::read_dir(parent) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let ours = name.as_encoded_bytes().starts_with(prefix.as_encoded_bytes());
        let Ok(kind) = entry.file_type() else { continue };
        if !ours || !(kind.is_dir() || kind.is_file()) {
            continue;
        }
        let path = entry.path();
        if let Ok(Some(_lock)) = lock_abandoned(&path) {
            let _ = if kind.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
        }
    }
}

fn sync_tree(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            sync_tree(&entry.path())?;
        } else {
            fs::File::open(entry.path())?.sync_all()?;
        }
    }
    sync_folder(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<String> =
            entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn appears_whole_and_leaves_nothing_behind() {
        let parent = tempfile::tempdir().unwrap();
        let target = parent.path().join("a/b");
        let staged = StagedFolder::create(&target, Replace::Never).unwrap();
        fs::write(staged.path().join("manifest.json"), "1").unwrap();
        assert!(!target.exists());
        staged.commit().unwrap();
        assert_eq!(names(&parent.path().join("a")), ["b"]);
        drop(StagedFolder::create(&parent.path().join("a/c"), Replace::Never).unwrap());
        assert_eq!(names(&parent.path().join("a")), ["b"]);
    }

    #[test]
    fn files_appear_whole_and_replace_only_their_kind() {
        let parent = tempfile::tempdir().unwrap();
        let target = parent.path().join("a/b");
        fs::create_dir(parent.path().join("a")).unwrap();
        fs::write(parent.path().join("a/.b.partial-1-0"), "left behind").unwrap();
        let write = |text: &str, replace| {
            let staged = StagedFile::create(&target, replace)?;
            fs::write(&staged.path, text)?;
            staged.commit()
        };
        drop(StagedFile::create(&target, None).unwrap());
        assert_eq!(names(&parent.path().join("a")), [] as [&str; 0]);
        write("1", None).unwrap();
        assert!(write("2", None).unwrap_err().to_string().ends_with("choose another name"));
        write("3", Some(|_| Ok(true))).unwrap();
        let error = write("4", Some(|_| Ok(false))).unwrap_err().to_string();
        assert!(error.ends_with("b exists and is another kind of file; not replaced"));
        assert_eq!(fs::read_to_string(&target).unwrap(), "3");
        let staged = StagedFile::create(&parent.path().join("a/large"), None).unwrap();
        staged.require_space(0).unwrap();
        let error = staged.require_space(u64::MAX).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        assert!(error.to_string().contains("large: 18446744073709551615 bytes are needed"));
        drop(staged);
        assert_eq!(names(&parent.path().join("a")), ["b"]);
    }

    #[test]
    fn whoever_is_done_takes_nothing_from_who_is_not() {
        let parent = tempfile::tempdir().unwrap();
        let (file, folder) = (parent.path().join("file"), parent.path().join("folder"));
        let any = |_: &Path| Ok(());
        // Between the renaming of a commit and its end, another begins.
        let done = StagedFile::create(&file, Some(|_| Ok(true))).unwrap();
        fs::rename(&done.path, &done.target).unwrap();
        let begun = StagedFile::create(&file, Some(|_| Ok(true))).unwrap();
        drop(done);
        begun.commit().unwrap();
        let done = StagedFolder::create(&folder, Replace::Never).unwrap();
        fs::rename(&done.path, &done.target).unwrap();
        let begun = StagedFolder::create(&folder, Replace::If(&any)).unwrap();
        fs::write(begun.path().join("new"), "").unwrap();
        drop(done);
        begun.commit().unwrap();
        assert_eq!(names(parent.path()), ["file", "folder"]);
        assert_eq!(names(&folder), ["new"]);
    }

    #[test]
    fn many_at_once_lose_nothing() {
        let parent = tempfile::tempdir().unwrap();
        let (file, folder) = (parent.path().join("file"), parent.path().join("folder"));
        fs::create_dir(&folder).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        let staged = StagedFile::create(&file, Some(|_| Ok(true))).unwrap();
                        fs::write(&staged.path, "whole").unwrap();
                        staged.commit().unwrap();
                        let any = |_: &Path| Ok(());
                        let staged = StagedFolder::create(&folder, Replace::If(&any)).unwrap();
                        fs::write(staged.path().join("whole"), "").unwrap();
                        staged.commit().unwrap();
                    }
                });
            }
        });
        assert_eq!(fs::read_to_string(&file).unwrap(), "whole");
        assert_eq!(names(parent.path()), ["file", "folder"]);
        assert_eq!(names(&folder), ["whole"]);
    }

    #[test]
    fn replaces_only_what_is_ours() {
        let parent = tempfile::tempdir().unwrap();
        let target = parent.path().join("out");
        fs::create_dir(&target).unwrap();
        fs::write(target.join("precious"), "x").unwrap();
        let accept = |folder: &Path| match names(folder).as_slice() {
            [only] if only == "manifest.json" => Ok(()),
            _ => Err("holds something else".to_owned()),
        };
        let force = Replace::If(&accept);
        let error = StagedFolder::create(&target, force).unwrap_err().to_string();
        assert!(error.ends_with("out exists and holds something else; it is not replaced"));
        fs::remove_file(target.join("precious")).unwrap();
        fs::write(target.join("manifest.json"), "old").unwrap();
        assert!(StagedFolder::create(&target, Replace::Never).is_err());
        let staged = StagedFolder::create(&target, force).unwrap();
        fs::write(staged.path().join("manifest.json"), "new").unwrap();
        staged.commit().unwrap();
        assert_eq!(fs::read_to_string(target.join("manifest.json")).unwrap(), "new");
        assert_eq!(names(parent.path()), ["out"]);
        assert_eq!(names(&target), ["manifest.json"]);
    }

    #[test]
    fn abandoned_folders_are_removed_and_living_ones_are_not() {
        let parent = tempfile::tempdir().unwrap();
        let target = parent.path().join("out");
        fs::create_dir(parent.path().join(".out.partial-1-0")).unwrap();
        let living = StagedFolder::create(&target, Replace::Never).unwrap();
        let second = StagedFolder::create(&target, Replace::Never).unwrap();
        assert_eq!(names(parent.path()).len(), 2);
        living.commit().unwrap();
        let error = second.commit().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(names(parent.path()), ["out"]);
    }
}
