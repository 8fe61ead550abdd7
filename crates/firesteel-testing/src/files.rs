use std::path::{Path, PathBuf};

/// The root of the repository.
pub fn repository() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

/// Folder of the small trained model, with tokenizer and chat template.
pub fn spark_tiny_path() -> PathBuf {
    repository().join("models/spark-tiny")
}

/// A file or folder of the golden vectors.
pub fn golden_path(name: &str) -> PathBuf {
    repository().join("tests/golden").join(name)
}

/// Names of the entries of a folder, sorted, hidden ones included.
///
/// # Panics
/// When the folder cannot be read or a name is no UTF-8.
pub fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Name and content of every file of a folder, sorted by name.
///
/// # Panics
/// When the folder or one of its entries cannot be read, as a folder cannot.
pub fn contents(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let read = |name: String| (name.clone(), std::fs::read(folder.join(&name)).unwrap());
    names(folder).into_iter().map(read).collect()
}

/// Copies the files of a folder into a new one.
///
/// # Panics
/// When `to` exists, or something cannot be read or written.
pub fn copy_folder(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for name in names(from) {
        std::fs::copy(from.join(&name), to.join(&name)).unwrap();
    }
}
