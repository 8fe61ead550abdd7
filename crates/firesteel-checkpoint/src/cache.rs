use crate::CheckpointError;
use std::ffi::OsString;
use std::path::PathBuf;

/// The folder of everything that Firesteel keeps for later and can make or fetch again: the
/// environment variable FIRESTEEL_CACHE, else `firesteel` in XDG_CACHE_HOME, else `.cache/firesteel`
/// in HOME.
///
/// # Errors
/// When none of the three is set, or the current directory cannot be read to resolve a relative
/// one.
pub fn cache_root() -> Result<PathBuf, CheckpointError> {
    cache_root_of(&|name| std::env::var_os(name))
}

/// [`cache_root`] with other environment variables; an empty one counts as unset.
///
/// # Errors
/// As [`cache_root`].
pub fn cache_root_of(
    variables: &dyn Fn(&str) -> Option<OsString>,
) -> Result<PathBuf, CheckpointError> {
    let set = |name| variables(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let root = set("FIRESTEEL_CACHE")
        // The XDG specification has relative paths ignored.
        .or_else(|| set("XDG_CACHE_HOME").filter(|p| p.is_absolute()).map(|p| p.join("firesteel")))
        .or_else(|| set("HOME").map(|p| p.join(".cache").join("firesteel")))
        .ok_or(CheckpointError::NoCache)?;
    Ok(std::path::absolute(root)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn cache_root_order() {
        let (a, b, c) = (Path::new("/a"), Path::new("/b"), Path::new("/c"));
        let all = [("FIRESTEEL_CACHE", a), ("XDG_CACHE_HOME", b), ("HOME", c)];
        let relative = [("XDG_CACHE_HOME", Path::new("b")), ("HOME", c)];
        let empty = [("FIRESTEEL_CACHE", Path::new("")), ("HOME", c)];
        let cases: [(&[(&str, &Path)], &str); 5] = [
            (&all, "/a"),
            (&all[1..], "/b/firesteel"),
            (&all[2..], "/c/.cache/firesteel"),
            (&relative, "/c/.cache/firesteel"),
            (&empty, "/c/.cache/firesteel"),
        ];
        let root = |set: &[(&str, &Path)]| {
            cache_root_of(&|name| {
                set.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).into())
            })
        };
        for (set, expected) in cases {
            assert_eq!(root(set).unwrap(), Path::new(expected), "{set:?}");
        }
        assert!(matches!(root(&[]), Err(CheckpointError::NoCache)));
    }
}
