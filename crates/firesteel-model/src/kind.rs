use crate::ModelError;
use firesteel_artifact::Artifact;
use firesteel_checkpoint::{Gguf, mistaken_file};
use firesteel_compile::CompiledManifest;
use std::io::Read as _;
use std::path::Path;

/// What a path is, told by what is there and not by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PathKind {
    /// A folder with config.json and weights, as on Hugging Face.
    Checkpoint,
    /// A GGUF file.
    Gguf,
    /// A file of JSON, such as a config.json alone.
    Config,
    /// A folder that `export` or `quantize graph` wrote.
    Artifact,
    /// A folder that `compile` wrote.
    Compiled,
}

/// Bytes of a file by which it is told what it is.
const START: u64 = 512;

impl PathKind {
    /// What `path` is. A folder without the manifest of an artifact is taken for a checkpoint.
    ///
    /// # Errors
    /// When nothing is there, it cannot be read, or it is a file of another kind; the message says
    /// which, as far as it is a usual mistake.
    pub fn of(path: &Path) -> Result<Self, ModelError> {
        if fs_err::metadata(path)?.is_dir() {
            return Ok(if CompiledManifest::is_in(path) {
                Self::Compiled
            } else if Artifact::is_artifact(path) {
                Self::Artifact
            } else {
                Self::Checkpoint
            });
        }
        if Gguf::is_gguf(path)? {
            return Ok(Self::Gguf);
        }
        let mut start = Vec::new();
        if fs_err::metadata(path)?.is_file() {
            fs_err::File::open(path)?.take(START).read_to_end(&mut start)?;
        }
        let text = start.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&start).trim_ascii_start();
        if text.first() == Some(&b'{') {
            return Ok(Self::Config);
        }
        let reason = match mistaken_file(&start).filter(|_| path.is_file()) {
            Some(reason) => reason.to_owned(),
            None if is_safetensors(&start) => {
                "the weights alone, in safetensors; give the folder that holds config.json too"
                    .into()
            }
            None => "neither a folder, a GGUF file nor a config.json; accepted: a Hugging Face \
                     folder, a GGUF file, or a folder that firesteel wrote"
                .into(),
        };
        Err(ModelError::Path { path: path.into(), reason })
    }
}

/// Whether a file begins as one of safetensors does: the length of a header in JSON, and that.
fn is_safetensors(start: &[u8]) -> bool {
    let Some((length, rest)) = start.split_first_chunk::<8>() else { return false };
    rest.first() == Some(&b'{') && (2..100_000_000).contains(&u64::from_le_bytes(*length))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_told_apart_by_what_they_hold() {
        let folder = tempfile::tempdir().unwrap();
        let of = |bytes: &[u8]| {
            let path = folder.path().join("model.bin");
            std::fs::write(&path, bytes).unwrap();
            PathKind::of(&path).map_err(|error| error.to_string())
        };
        assert_eq!(of(b"GGUF\x03\0\0\0"), Ok(PathKind::Gguf));
        assert_eq!(of(b"{}"), Ok(PathKind::Config));
        assert_eq!(of(b"\xef\xbb\xbf \n{\"model_type\": 1}"), Ok(PathKind::Config));
        assert_eq!(PathKind::of(folder.path()).unwrap(), PathKind::Checkpoint);
        let header = b"{\"a\":{}}";
        let weights = [&(header.len() as u64).to_le_bytes(), &header[..]].concat();
        for (bytes, reason) in [
            (&weights[..], "in safetensors; give the folder"),
            (b"", "the file is empty"),
            (b"PK\x03\x04", "PyTorch"),
            (b"version https://git-lfs.github.com/spec/v1", "Git LFS pointer"),
            (b"<!DOCTYPE html>", "a web page"),
            (b"\x01\x02\x03", "neither a folder, a GGUF file nor a config.json"),
        ] {
            let error = of(bytes).unwrap_err();
            assert!(error.contains("model.bin: ") && error.contains(reason), "{error}");
        }
        assert!(PathKind::of(&folder.path().join("none")).is_err());
    }
}
