use fs_err as fs;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Replace {
    /// An existing target is an error.
    Never,
    /// A target that is empty or holds this file is replaced; any other is an error, so that a
    /// mistyped path costs nobody a folder of something else.
    IfItHolds(&'static str),
}

impl StagedFolder {
    /// A new folder beside `target`, whose parents are created.
    ///
    /// # Errors
    /// When the target exists and may not be replaced, or the folder cannot be made.
    pub fn create(target: &Path, replace: Replace) -> io::Result<Self> {
        let target = std::path::absolute(target)?;
        let (Some(parent), Some(name)) = (target.parent(), target.file_name()) else {
            return Err(invalid(format!("{} is no name for a new folder", target.display())));
        };
        may_replace(&target, replace)?;
        fs::create_dir_all(parent)?;
        let mut prefix = OsString::from(".");
        prefix.push(name);
        prefix.push(".partial-");
        remove_abandoned(parent, &prefix)?;
        for attempt in 0..1000u32 {
            let mut name = prefix.clone();
            name.push(format!("{}-{attempt}", std::process::id()));
            let path = parent.join(name);
            match fs::create_dir(&path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                created => created?,
            }
            // Between creation and lock another process may have taken it for abandoned.
            if let Some(lock) = lock_folder(&path)? {
                let replace = replace != Replace::Never;
                return Ok(Self { path, target, replace, _lock: lock });
            }
        }
        Err(io::Error::other(format!("cannot create a folder beside {}", target.display())))
    }

    /// Where to write.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes everything to disk and renames the folder to its target.
    ///
    /// # Errors
    /// When something cannot be written or the target appeared in the meantime. The target is
    /// then what it was.
    pub fn commit(self) -> io::Result<PathBuf> {
        sync_tree(&self.path)?;
        let rename = |flags| renameat_with(CWD, &self.path, CWD, &self.target, flags);
        let exists = fs::symlink_metadata(&self.target).is_ok();
        if exists && self.replace {
            // The old folder takes the hidden name, under which `drop` removes it.
            rename(RenameFlags::EXCHANGE)?;
        } else {
            match rename(RenameFlags::NOREPLACE) {
                Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => {
                    fs::rename(&self.path, &self.target)?;
                }
                renamed => renamed.map_err(|error| {
                    let error = io::Error::from(error);
                    io::Error::new(error.kind(), format!("{}: {error}", self.target.display()))
                })?,
            }
        }
        if let Some(parent) = self.target.parent() {
            fs::File::open(parent)?.sync_all()?;
        }
        Ok(self.target.clone())
    }
}

impl Drop for StagedFolder {
    fn drop(&mut self) {
        // Nothing is left to do about an error here; the next process tries again.
        let _ = fs::remove_dir_all(&self.path);
    }
}

fn invalid(message: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, message)
}

fn may_replace(target: &Path, replace: Replace) -> io::Result<()> {
    let metadata = match fs::symlink_metadata(target) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        metadata => metadata?,
    };
    let shown = target.display();
    let exists = |message| Err(io::Error::new(io::ErrorKind::AlreadyExists, message));
    match replace {
        Replace::Never => exists(format!("{shown} exists already; choose another name")),
        Replace::IfItHolds(_) if !metadata.is_dir() => {
            exists(format!("{shown} exists and is no folder; it is not replaced"))
        }
        Replace::IfItHolds(file) => {
            let ours = target.join(file).is_file() || fs::read_dir(target)?.next().is_none();
            if ours {
                return Ok(());
            }
            exists(format!("{shown} exists and holds no {file}; it is not replaced"))
        }
    }
}

/// Locks a folder that still bears its name; `None` when another process holds or removed it.
fn lock_folder(path: &Path) -> io::Result<Option<fs::File>> {
    let missing = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
    let folder = match fs::File::open(path) {
        Err(error) if missing(&error) => return Ok(None),
        folder => folder?,
    };
    if folder.file().try_lock().is_err() {
        return Ok(None);
    }
    match fs::symlink_metadata(path) {
        Err(error) if missing(&error) => Ok(None),
        named => Ok((named?.ino() == folder.metadata()?.ino()).then_some(folder)),
    }
}

fn remove_abandoned(parent: &Path, prefix: &OsStr) -> io::Result<()> {
    for entry in fs::read_dir(parent)? {
        let entry = entry?;
        let name = entry.file_name();
        let ours = name.as_encoded_bytes().starts_with(prefix.as_encoded_bytes());
        if ours && entry.file_type()?.is_dir() && lock_folder(&entry.path())?.is_some() {
            fs::remove_dir_all(entry.path())?;
        }
    }
    Ok(())
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
    fs::File::open(folder)?.sync_all()
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
    fn replaces_only_what_is_ours() {
        let parent = tempfile::tempdir().unwrap();
        let target = parent.path().join("out");
        fs::create_dir(&target).unwrap();
        fs::write(target.join("precious"), "x").unwrap();
        let force = Replace::IfItHolds("manifest.json");
        let error = StagedFolder::create(&target, force).unwrap_err().to_string();
        assert!(error.ends_with("out exists and holds no manifest.json; it is not replaced"));
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
