//! Writes a checkpoint as a Hugging Face folder.

use crate::config::CONFIG_FILE;
use crate::family::{SlotKind, layer_name};
use crate::folder::{INDEX, SINGLE};
use crate::os::write_all_at;
use crate::{
    Checkpoint, CheckpointError, Head, ModelConfig, RandomWeights, Replace, StagedFolder, Weight,
};
use firesteel_tensor::DType;
use rayon::prelude::*;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde_json::{Map, json};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// What [`write_synthetic`] writes.
#[derive(Debug, Clone)]
pub struct SyntheticOptions {
    /// Shape of the model.
    pub config: ModelConfig,
    /// How its weights are made.
    pub weights: RandomWeights,
}

/// How [`write_checkpoint`] lays a checkpoint out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WriteOptions {
    /// Most bytes of tensors in one file; a larger tensor is alone in its file. With more than one
    /// file there is an index.
    pub shard_bytes: u64,
    /// Whether the fused projection of a layer is written as q_proj, k_proj and v_proj.
    pub separate_qkv: bool,
}

impl Default for WriteOptions {
    fn default() -> Self {
        Self { shard_bytes: 5_000_000_000, separate_qkv: false }
    }
}

/// Told the bytes of weights written so far and in total, from any thread.
pub type Progress<'a> = &'a (dyn Fn(u64, u64) + Sync);

/// Elements converted and written at once by a thread.
const CHUNK: usize = 1 << 20;

/// Writes a folder with random weights of a real shape: config.json and safetensors, sharded at
/// 5 GB. Equal options write equal bytes, on any number of threads.
///
/// # Errors
/// As [`write_checkpoint`].
pub fn write_synthetic(
    options: SyntheticOptions,
    out_dir: &Path,
    progress: Progress<'_>,
) -> Result<(), CheckpointError> {
    let SyntheticOptions { mut config, weights } = options;
    config.dtype = Some(weights.dtype);
    let checkpoint = Checkpoint::random(config, weights);
    write_checkpoint(&checkpoint, WriteOptions::default(), out_dir, progress)
}

/// Writes `checkpoint` as a folder of config.json and safetensors files in the element types of
/// its weights. Weights are converted in parallel and never held as a whole.
///
/// The folder appears complete or not at all, as [`StagedFolder`] says.
///
/// # Errors
/// When `out_dir` exists or cannot be written, or a weight cannot be read.
pub fn write_checkpoint(
    checkpoint: &Checkpoint,
    options: WriteOptions,
    out_dir: &Path,
    progress: Progress<'_>,
) -> Result<(), CheckpointError> {
    let staged = StagedFolder::create(out_dir, Replace::Never)?;
    let folder = staged.path();
    let shards = shards(stored_tensors(checkpoint, options)?, options.shard_bytes);
    let total = shards.iter().fold(0u64, |sum, shard| sum.saturating_add(shard.bytes));
    staged.require_space(total)?;
    let done = AtomicU64::new(0);
    let report = |bytes: u64| progress(done.fetch_add(bytes, Ordering::Relaxed) + bytes, total);

    fs_err::write(folder.join(CONFIG_FILE), checkpoint.config().to_json())?;
    let mut weight_map = BTreeMap::new();
    for (number, shard) in shards.iter().enumerate() {
        let file_name = match shards.len() {
            1 => SINGLE.to_owned(),
            count => format!("model-{:05}-of-{count:05}.safetensors", number + 1),
        };
        shard.write(&folder.join(&file_name), &report)?;
        for tensor in &shard.tensors {
            weight_map.insert(tensor.name.clone(), file_name.clone());
        }
    }
    if shards.len() > 1 {
        let weight_map: Map<_, _> =
            weight_map.into_iter().map(|(tensor, file)| (tensor, json!(file))).collect();
        let index = json!({"metadata": {"total_size": total}, "weight_map": weight_map});
        fs_err::write(folder.join(INDEX), format!("{index:#}\n"))?;
    }
    staged.commit()?;
    Ok(())
}

/// A tensor as it is stored.
struct StoredTensor {
    name: String,
    weight: Weight,
    bytes: u64,
}

/// All tensors in the order of the model.
fn stored_tensors(
    checkpoint: &Checkpoint,
    options: WriteOptions,
) -> Result<Vec<StoredTensor>, CheckpointError> {
    let mut weights =
        vec![(checkpoint.embedding().name().to_owned(), checkpoint.embedding().clone())];
    let config = checkpoint.config();
    for (number, layer) in checkpoint.layers().iter().enumerate() {
        // Gains come first in a layer.
        let (gains, matrices): (Vec<_>, Vec<_>) =
            layer.iter().partition(|(spec, _)| spec.kind == SlotKind::Norm);
        let mut pieces = Vec::new();
        for (spec, weight) in gains.into_iter().chain(matrices) {
            if !options.separate_qkv || spec.pieces.is_empty() {
                weights.push((weight.name().to_owned(), weight.clone()));
                continue;
            }
            let mut start = 0;
            for piece in spec.pieces {
                let end = start + piece.rows.of(config);
                let name = layer_name(number, piece.hugging_face);
                pieces.extend(weight.rows(start..end).map(|part| (name, part)));
                start = end;
            }
        }
        weights.append(&mut pieces);
    }
    weights.push((checkpoint.final_norm().name().to_owned(), checkpoint.final_norm().clone()));
    if let Head::Stored(head) = checkpoint.head() {
        weights.push((head.name().to_owned(), head.clone()));
    }
    weights
        .into_iter()
        .map(|(name, weight)| {
            let Some(bytes) = weight.dtype().byte_count(weight.shape()) else {
                return Err(CheckpointError::Convert {
                    tensor: name,
                    source: firesteel_tensor::TensorError::TooLarge {
                        shape: weight.shape().to_vec(),
                        dtype: weight.dtype(),
                    },
                });
            };
            Ok(StoredTensor { name, weight, bytes: bytes as u64 })
        })
        .collect()
}

/// The tensors of one file.
struct Shard {
    tensors: Vec<StoredTensor>,
    bytes: u64,
}

fn shards(tensors: Vec<StoredTensor>, shard_bytes: u64) -> Vec<Shard> {
    let mut shards: Vec<Shard> = Vec::new();
    for tensor in tensors {
        match shards.last_mut() {
            Some(shard) if shard.bytes.saturating_add(tensor.bytes) <= shard_bytes => {
                shard.bytes += tensor.bytes;
                shard.tensors.push(tensor);
            }
            _ => shards.push(Shard { bytes: tensor.bytes, tensors: vec![tensor] }),
        }
    }
    shards
}

/// A part of a tensor and where in the file it goes.
struct Job<'a> {
    weight: &'a Weight,
    first: usize,
    count: usize,
    offset: u64,
}

impl Shard {
    fn write(&self, path: &Path, report: &(dyn Fn(u64) + Sync)) -> Result<(), CheckpointError> {
        let header = self.header(path)?;
        let mut offset = header.len() as u64;
        let mut jobs = Vec::new();
        for StoredTensor { weight, bytes, .. } in &self.tensors {
            let size = weight.dtype().size() as u64;
            let elements = weight.element_count();
            for first in (0..elements).step_by(CHUNK) {
                let count = CHUNK.min(elements - first);
                jobs.push(Job { weight, first, count, offset: offset + first as u64 * size });
            }
            offset += bytes;
        }
        let file = fs_err::File::create_new(path)?;
        file.set_len(offset)?;
        let raw = file.file();
        let named = |e: std::io::Error| {
            std::io::Error::new(e.kind(), format!("{}: failed to write: {e}", path.display()))
        };
        write_all_at(raw, &header, 0).map_err(named)?;
        // Positioned writes make the bytes independent of who writes them when.
        jobs.par_iter().try_for_each_init(Vec::new, |buffer: &mut Vec<u8>, job| {
            buffer.resize(job.count * job.weight.dtype().size(), 0);
            job.weight.convert(job.first, job.weight.dtype(), buffer)?;
            write_all_at(raw, buffer, job.offset).map_err(named)?;
            report(buffer.len() as u64);
            Ok::<(), CheckpointError>(())
        })?;
        Ok(())
    }

    /// Length, header and padding, so that the data start at a multiple of 8.
    fn header(&self, path: &Path) -> Result<Vec<u8>, CheckpointError> {
        let refuse = |reason: String| CheckpointError::SafeTensors { file: path.into(), reason };
        let mut start = 0;
        let mut entries = Vec::new();
        for StoredTensor { name, weight, bytes } in &self.tensors {
            let dtype = match weight.dtype() {
                DType::F32 => Dtype::F32,
                DType::F16 => Dtype::F16,
                DType::BF16 => Dtype::BF16,
                dtype => {
                    let reason = format!("{name}: dtype {dtype}; accepted: f32, f16, bf16");
                    return Err(refuse(reason));
                }
            };
            let end = start + *bytes as usize;
            let shape = weight.shape().to_vec();
            entries.push((name.clone(), TensorInfo { dtype, shape, data_offsets: (start, end) }));
            start = end;
        }
        let format = HashMap::from([("format".to_owned(), "pt".to_owned())]);
        let metadata = Metadata::new(Some(format), entries).map_err(|e| refuse(e.to_string()))?;
        let mut text = serde_json::to_vec(&metadata).map_err(|e| refuse(e.to_string()))?;
        text.resize(text.len().next_multiple_of(8), b' ');
        let mut header = (text.len() as u64).to_le_bytes().to_vec();
        header.append(&mut text);
        Ok(header)
    }
}
