//! The files of a checkpoint folder, resolved without ever leaving it.
//!
//! A file is a regular file in the folder. A symbolic link is followed only in the Hugging Face
//! cache, whose snapshot folders hold links to `../../blobs/HASH`.

use crate::json::{MAX_INDEX_BYTES, members, read_bounded, shorten};
use crate::mistaken::{instead_of_weights, mistaken_file, unfinished_download};
use crate::safetensors::{self, MAX_TENSORS, StoredTensor};
use crate::{CheckpointError, CheckpointFile, MappedFile, WeightFormat};
use ::safetensors::Dtype;
use firesteel_tensor::{DType, SharedBytes};
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub(crate) const SINGLE: &str = "model.safetensors";
pub(crate) const INDEX: &str = "model.safetensors.index.json";

/// A tensor with the file that holds it.
#[derive(Debug)]
pub(crate) struct Found {
    /// Name of the file in the folder.
    pub(crate) file: Arc<str>,
    /// How it is stored, or the type that is not read as the file spells it.
    pub(crate) format: Result<WeightFormat, Dtype>,
    pub(crate) shape: Vec<usize>,
    /// Offset of the first byte in the file.
    pub(crate) offset: usize,
    pub(crate) bytes: SharedBytes,
}

impl Found {
    fn new(file: &Arc<str>, tensor: StoredTensor) -> Self {
        let StoredTensor { dtype, shape, offset, bytes, .. } = tensor;
        let format = match dtype {
            Dtype::F32 => Ok(WeightFormat::Float(DType::F32)),
            Dtype::F16 => Ok(WeightFormat::Float(DType::F16)),
            Dtype::BF16 => Ok(WeightFormat::Float(DType::BF16)),
            other => Err(other),
        };
        Self { file: Arc::clone(file), format, shape, offset, bytes }
    }
}

/// All tensors of a folder by name, and the mapped files.
#[derive(Debug)]
pub(crate) struct Tensors {
    pub(crate) by_name: HashMap<String, Found>,
    pub(crate) files: Vec<CheckpointFile>,
    pub(crate) warnings: Vec<String>,
}

/// Maps and reads every safetensors file of `folder`.
///
/// A single model.safetensors wins over an index beside it, as in the transformers library, with
/// a warning.
pub(crate) fn read_tensors(folder: &Path) -> Result<Tensors, CheckpointError> {
    let has_index = exists(&folder.join(INDEX))?;
    let mut tensors = Tensors { by_name: HashMap::new(), files: Vec::new(), warnings: Vec::new() };
    if exists(&folder.join(SINGLE))? {
        if has_index {
            let path = folder.join(INDEX);
            tensors.warnings.push(format!(
                "{}: ignored, because {SINGLE} is present beside it",
                path.display()
            ));
        }
        let path = resolve(folder, SINGLE).map_err(|e| e.into_error(folder, SINGLE))?;
        let file: Arc<str> = SINGLE.into();
        for tensor in tensors.map_file(&file, &path, &folder.join(SINGLE))? {
            tensors.by_name.insert(tensor.name.clone(), Found::new(&file, tensor));
        }
    } else if has_index {
        tensors.read_shards(folder)?;
    } else {
        let reason = format!(
            "neither {SINGLE} nor {INDEX} is here; accepted: a Hugging Face folder with \
             safetensors weights{}",
            instead_of_weights(folder)
        );
        return Err(CheckpointError::Path { path: folder.into(), reason });
    }
    Ok(tensors)
}

/// Path of the file `name` of `folder`, to be read instead of it; `None` when there is none. Every file
/// of a model is looked up so: a symbolic link is followed where the Hugging Face cache has it, from
/// snapshots/REVISION to ../../blobs/HASH, and refused everywhere else, because it could lead
/// anywhere.
///
/// # Errors
/// When it is not a regular file or such a link.
pub fn file_in(folder: &Path, name: &str) -> Result<Option<PathBuf>, CheckpointError> {
    match exists(&folder.join(name))? {
        true => file_path(folder, name).map(Some),
        false => Ok(None),
    }
}

/// The path of a file of `folder`, after the rules for links.
pub(crate) fn file_path(folder: &Path, name: &str) -> Result<PathBuf, CheckpointError> {
    resolve(folder, name).map_err(|e| e.into_error(folder, name))
}

/// Whether something, be it a dangling link, has this path.
pub(crate) fn exists(path: &Path) -> Result<bool, CheckpointError> {
    match fs_err::symlink_metadata(path) {
        Ok(_) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(e.into()),
    }
}

impl Tensors {
    fn map_file(
        &mut self,
        name: &Arc<str>,
        path: &Path,
        shown: &Path,
    ) -> Result<Vec<StoredTensor>, CheckpointError> {
        let bytes = MappedFile::open(path)?.bytes();
        let tensors = safetensors::read(shown, &bytes)?;
        self.files.push(CheckpointFile { name: name.to_string(), bytes });
        Ok(tensors)
    }

    fn read_shards(&mut self, folder: &Path) -> Result<(), CheckpointError> {
        let index_path = folder.join(INDEX);
        let text = read_bounded(&file_path(folder, INDEX)?, MAX_INDEX_BYTES)?;
        let weight_map = parse_index(&text)
            .map_err(|reason| CheckpointError::Json { file: index_path.clone(), reason })?;
        let refuse = |tensor: &str, shard: &str, reason: String| CheckpointError::Shard {
            file: index_path.clone(),
            tensor: shorten(tensor).into_owned(),
            shard: shorten(shard).into_owned(),
            reason,
        };

        // Every name is checked before any file is opened.
        let mut shards: BTreeMap<&str, (&str, usize)> = BTreeMap::new();
        for (tensor, shard) in &weight_map {
            if let Err(reason) = check_plain(shard) {
                return Err(refuse(tensor, shard, reason));
            }
            shards.entry(shard).or_insert((tensor, 0)).1 += 1;
        }
        let promised: HashMap<&str, &str> =
            weight_map.iter().map(|(tensor, shard)| (&**tensor, &**shard)).collect();
        for (&shard, &(first, expected)) in &shards {
            let path = match resolve(folder, shard) {
                Ok(path) => path,
                Err(Refusal::Io(e)) if e.kind() != io::ErrorKind::NotFound => return Err(e.into()),
                Err(refusal) => {
                    let unfinished = unfinished_download(folder).map_or(String::new(), |name| {
                        format!("; {name} is a download that did not finish, start it again")
                    });
                    return Err(refuse(first, shard, refusal.reason() + &unfinished));
                }
            };
            let file: Arc<str> = shard.into();
            let mut found = 0;
            for tensor in self.map_file(&file, &path, &folder.join(shard))? {
                match promised.get(&*tensor.name) {
                    Some(&owner) if owner == shard => found += 1,
                    Some(&owner) => {
                        let reason = format!("{shard} has a tensor of this name too");
                        return Err(refuse(&tensor.name, owner, reason));
                    }
                    None => {
                        let reason = "the shard holds this tensor, but the index does not list it";
                        return Err(refuse(&tensor.name, shard, reason.into()));
                    }
                }
                self.by_name.insert(tensor.name.clone(), Found::new(&file, tensor));
            }
            if found != expected {
                let lacking = weight_map.iter().find(|(tensor, owner)| {
                    owner == shard && !self.by_name.contains_key(&**tensor)
                });
                let tensor = lacking.map_or(first, |(tensor, _)| tensor);
                return Err(refuse(tensor, shard, "the shard lacks this tensor".into()));
            }
        }
        Ok(())
    }
}

type Pair<'a> = (Cow<'a, str>, Cow<'a, str>);

/// The weight map of an index: tensor and shard names.
fn parse_index(text: &[u8]) -> Result<Vec<Pair<'_>>, String> {
    if let Some(mistake) = mistaken_file(text) {
        return Err(mistake.into());
    }
    let text = std::str::from_utf8(text).map_err(|e| e.to_string())?;
    let mut weight_map = None;
    for (key, raw) in members(text, MAX_TENSORS)? {
        match &*key {
            "weight_map" => weight_map = Some(raw.get()),
            // Its total_size is wrong in many files, and nothing else in it is needed.
            "metadata" => {}
            _ => {
                return Err(format!(
                    "key {:?} is not known; accepted: metadata, weight_map",
                    shorten(&key)
                ));
            }
        }
    }
    let weight_map = weight_map.ok_or("weight_map is missing")?;
    let entries = members(weight_map, MAX_TENSORS).map_err(|e| format!("weight_map: {e}"))?;
    entries
        .into_iter()
        .map(|(tensor, raw)| match crate::json::name(raw) {
            Ok(shard) => Ok((tensor, shard)),
            Err(e) => Err(format!("weight_map: {:?}: {e}", shorten(&tensor))),
        })
        .collect()
}

/// A shard name must be one plain component that means the same on every system.
fn check_plain(name: &str) -> Result<(), String> {
    let reason = if name.is_empty() {
        "an empty name"
    } else if name == "." || name == ".." {
        "not a file name"
    } else if name.contains(['/', '\\', ':']) {
        "a separator in the name"
    } else if name.contains(char::is_control) {
        "a control character in the name"
    } else if name.len() > 255 {
        "longer than 255 bytes"
    } else if !name.ends_with(".safetensors") {
        "not a .safetensors file"
    } else {
        return Ok(());
    };
    Err(format!("{reason}; accepted: the plain name of a .safetensors file in the same folder"))
}

/// Why a file of the folder is not opened.
enum Refusal {
    Io(io::Error),
    Kind,
    Link(PathBuf),
}

impl Refusal {
    fn reason(self) -> String {
        match self {
            Refusal::Io(e) => e.to_string(),
            Refusal::Kind => "not a regular file; only regular files are read".into(),
            Refusal::Link(target) => format!(
                "a symbolic link to {}; links are followed only in the Hugging Face cache, from \
                 snapshots/REVISION to ../../blobs/HASH",
                target.display()
            ),
        }
    }

    fn into_error(self, folder: &Path, name: &str) -> CheckpointError {
        match self {
            Refusal::Io(e) => e.into(),
            refusal => CheckpointError::Path { path: folder.join(name), reason: refusal.reason() },
        }
    }
}

fn resolve(folder: &Path, name: &str) -> Result<PathBuf, Refusal> {
    let path = folder.join(name);
    let kind = fs_err::symlink_metadata(&path).map_err(Refusal::Io)?.file_type();
    if kind.is_file() {
        return Ok(path);
    }
    if !kind.is_symlink() {
        return Err(Refusal::Kind);
    }
    let target = fs_err::read_link(&path).map_err(Refusal::Io)?;
    let blob = blob_path(&fs_err::canonicalize(folder).map_err(Refusal::Io)?, &target);
    let Some(blob) = blob else {
        return Err(Refusal::Link(target));
    };
    // A blob is a file itself: a second link could lead anywhere.
    match fs_err::symlink_metadata(&blob) {
        Ok(metadata) if metadata.is_file() => Ok(blob),
        Ok(_) => Err(Refusal::Link(target)),
        Err(e) => Err(Refusal::Io(e)),
    }
}

/// The blob that `target`, the text of a link in `folder`, names in the layout of the Hugging Face
/// cache: `models--x--y/snapshots/REVISION/name -> ../../blobs/HASH`.
fn blob_path(folder: &Path, target: &Path) -> Option<PathBuf> {
    let snapshots = folder.parent()?;
    if snapshots.file_name()? != "snapshots" {
        return None;
    }
    let hash = target.to_str()?.strip_prefix("../../blobs/")?;
    let is_hash = matches!(hash.len(), 40 | 64) && hash.bytes().all(|b| b.is_ascii_hexdigit());
    is_hash.then(|| snapshots.parent().map(|cache| cache.join("blobs").join(hash))).flatten()
}
