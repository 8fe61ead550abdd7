//! Files that are something else than their name says, as downloads that went wrong leave them.

use fs_err as fs;
use std::path::Path;

/// What a file with contents `bytes` is instead of a model's file, with the way out; `None` when
/// it does not look like a mistake.
pub fn mistaken_file(bytes: &[u8]) -> Option<&'static str> {
    let start = &bytes[..bytes.len().min(512)];
    if start.is_empty() {
        return Some("the file is empty; download it again");
    }
    if start.starts_with(b"version https://git-lfs.github.com/spec/") {
        return Some(
            "it is a Git LFS pointer, not the file itself; run git lfs pull in its repository, or \
             download the file",
        );
    }
    let text = start.trim_ascii_start().to_ascii_lowercase();
    if text.starts_with(b"<!doctype") || text.starts_with(b"<html") {
        return Some(
            "it is a web page, as a download without access gives; sign in where the model is \
             published and download the file again",
        );
    }
    if start.starts_with(b"PK\x03\x04") {
        return Some("it is a zip or PyTorch file; download the safetensors file");
    }
    None
}

/// What `folder` holds instead of safetensors files, with a leading separator; may be empty.
pub(crate) fn instead_of_weights(folder: &Path) -> String {
    if let Some(name) = unfinished_download(folder) {
        return format!("; {name} is a download that did not finish, start it again");
    }
    let names = names(folder);
    let first = |wanted: fn(&str) -> bool| names.iter().find(|name| wanted(name));
    let pickled = |name: &str| [".bin", ".pt", ".pth", ".ckpt"].iter().any(|e| name.ends_with(e));
    if let Some(name) = first(pickled) {
        return format!(
            "; {name} is a PyTorch file, which is not read: download the safetensors files, or \
             save the model again with save_pretrained"
        );
    }
    match first(|name| name.ends_with(".gguf")) {
        Some(name) => format!("; give {name} itself to use that file"),
        None => String::new(),
    }
}

/// Name of a file that a download program has left unfinished for `folder`: in it, or where the
/// Hugging Face client keeps them.
pub(crate) fn unfinished_download(folder: &Path) -> Option<String> {
    let places = [folder.to_owned(), folder.join(".cache/huggingface/download")];
    let cached = folder.parent().filter(|parent| parent.ends_with("snapshots"));
    let blobs = cached.and_then(Path::parent).map(|cache| cache.join("blobs"));
    let unfinished = |name: &String| {
        [".incomplete", ".part", ".partial", ".crdownload", ".aria2"]
            .iter()
            .any(|ending| name.ends_with(ending))
    };
    places.iter().chain(&blobs).find_map(|place| names(place).into_iter().find(unfinished))
}

/// Names in `folder` in order, at most so many as a model has files; none when it cannot be read.
fn names(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let names = entries.flatten().take(10_000).map(|entry| entry.file_name());
    let mut names: Vec<String> = names.filter_map(|name| name.into_string().ok()).collect();
    names.sort_unstable();
    names
}
