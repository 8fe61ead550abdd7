//! Writes a checkpoint as a GGUF file in the standard types.

use super::config::{ARCHITECTURE, BOS, EOS, FILE_TYPE, Keys, OTHER_ENDS, PADDING};
use super::sampling::{Advice, SAMPLING, SamplingAdvice};
use super::tokenizer::{
    ADD_BOS, CHAT_TEMPLATE, Described, MERGES, MODEL, NO_TOKENIZER, PRE, TOKEN_TYPES, TOKENS,
};
use super::{ALIGNMENT_KEY, DEFAULT_ALIGNMENT, FORMATS, Gguf, GgufTokenizer, MAGIC, Type};
use crate::blocks::dequantize;
use crate::family::Count;
use crate::quantize::{WRITTEN, can_quantize, quantize};
use crate::staged::StagedFile;
use crate::{
    Checkpoint, CheckpointError, Head, LayerKind, ModelConfig, Progress, SlotKind, Weight,
    WeightFormat, Yarn,
};
use firesteel_tensor::DType;
use rayon::prelude::*;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// The importance of each column of a matrix by the name of the weight: the mean square of what
/// the column is multiplied with, or anything proportional to it.
pub type Importance<'a> = &'a (dyn Fn(&str) -> Option<Vec<f32>> + Sync);

/// The format of a matrix by the name of the weight; `None` for that of the options.
pub type Formats<'a> = &'a (dyn Fn(&str) -> Option<WeightFormat> + Sync);

/// How [`write_gguf`] writes.
#[derive(Clone, Copy)]
pub struct GgufOptions<'a> {
    /// Format of the matrices: f32, f16, bf16, q8_0, q4_0, q4_k or q6_k. Norms are f32. The
    /// head-wise gate is as the matrices where they are numbers and f32 where they are blocks.
    pub format: WeightFormat,
    /// Format of the embedding and of a stored head; `None` for that of the matrices.
    pub head: Option<WeightFormat>,
    /// Formats of single matrices. Norms are not asked for, and the gate is.
    pub formats: Option<Formats<'a>>,
    /// Importance of the columns for quantizing; where there is none, all are equal.
    pub importance: Option<Importance<'a>>,
    /// Name of the model in the metadata.
    pub name: Option<&'a str>,
    /// Whether an existing GGUF file is replaced. Any other existing file is an error.
    pub replace: bool,
}

impl GgufOptions<'_> {
    /// Matrices, embedding and head in `format`, no importance, no name, nothing replaced.
    pub fn new(format: WeightFormat) -> Self {
        Self { format, head: None, formats: None, importance: None, name: None, replace: false }
    }
}

impl fmt::Debug for GgufOptions<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GgufOptions")
            .field("format", &self.format)
            .field("head", &self.head)
            .field("formats", &self.formats.is_some())
            .field("importance", &self.importance.is_some())
            .field("name", &self.name)
            .field("replace", &self.replace)
            .finish()
    }
}

/// What [`write_gguf`] wrote.
#[derive(Debug, Clone, PartialEq)]
pub struct GgufReport {
    /// The tensors in the order of the file.
    pub tensors: Vec<QuantizedTensor>,
    /// Bytes of the file.
    pub bytes: u64,
    /// What the checkpoint says and the file has no place for, as name and value.
    pub warnings: Vec<String>,
}

/// A tensor that was written.
#[derive(Debug, Clone, PartialEq)]
pub struct QuantizedTensor {
    /// Name of the weight.
    pub name: String,
    /// How it was written.
    pub format: WeightFormat,
    /// Its elements.
    pub elements: u64,
    /// Its bytes.
    pub bytes: u64,
    /// √(Σ(x − x̂)² / Σx²), unweighted; 0 when nothing was lost.
    pub relative_rms: f64,
    /// √(Σ w(x − x̂)² / Σ w x²), w being the importance of the column: the error of the product as
    /// a share of it, if the inputs of different columns have nothing to do with each other.
    /// `None` without importance or where the format is that of the weight or numbers.
    pub weighted_rms: Option<f64>,
}

/// Elements that a thread converts and writes at once, at most, unless a row is longer.
const CHUNK: usize = 1 << 19;
/// Version of the block formats, which files with blocks name.
const QUANTIZATION_VERSION: u32 = 2;
const QUANTIZATION: &str = "general.quantization_version";

/// Writes `checkpoint` as a GGUF file that llama.cpp reads as well, with the tokenizer of
/// [`GgufTokenizer::of_checkpoint`] and the advice on sampling of generation_config.json; what a GGUF
/// file says of its origin, such as author and licence, is taken over. What has no place in the
/// format, such as a fourth end-of-sequence id, is left out, and the report says so.
/// Weights are converted in parallel and never held as a whole; equal inputs give equal bytes on any
/// number of threads.
///
/// The file appears complete or not at all.
///
/// # Errors
/// When `out_file` exists and may not be replaced, its file system has too little room, it cannot
/// be written, a weight cannot be read, or a weight cannot be written in its format: it has a value
/// that is not finite or too large, or its rows are not whole blocks. When the tokenizer is another
/// than the file would say.
pub fn write_gguf(
    checkpoint: &Checkpoint,
    options: GgufOptions<'_>,
    out_file: &Path,
    progress: Progress<'_>,
) -> Result<GgufReport, CheckpointError> {
    let tensors = planned(checkpoint, &options)?;
    let Header { bytes: header, warnings } = header(checkpoint, &options, &tensors)?;
    let ours: fn(&Path) -> std::io::Result<bool> = Gguf::is_gguf;
    let staged = StagedFile::create(out_file, options.replace.then_some(ours))?;
    let file = staged.file().file();

    let mut jobs = Vec::new();
    let mut end = header.len() as u64;
    for (index, tensor) in tensors.iter().enumerate() {
        let offset = end.next_multiple_of(DEFAULT_ALIGNMENT as u64);
        let rows = (CHUNK / tensor.columns()).max(1) * tensor.columns();
        let elements = tensor.weight.element_count();
        for first in (0..elements).step_by(rows) {
            jobs.push(Job { index, first, count: rows.min(elements - first), offset });
        }
        end = offset + tensor.bytes as u64;
    }
    let total = end.next_multiple_of(DEFAULT_ALIGNMENT as u64);
    staged.require_space(total)?;
    file.set_len(total)?;
    file.write_all_at(&header, 0)?;

    let weight_bytes = tensors.iter().map(|tensor| tensor.bytes as u64).sum();
    let done = AtomicU64::new(0);
    let errors: Vec<SquareError> = jobs
        .par_iter()
        .map_init(Buffers::default, |buffers, job| {
            let error = job.run(&tensors[job.index], buffers, file)?;
            let bytes = buffers.out.len() as u64;
            progress(done.fetch_add(bytes, Ordering::Relaxed) + bytes, weight_bytes);
            Ok(error)
        })
        .collect::<Result<_, CheckpointError>>()?;
    staged.commit()?;

    let mut sums = vec![SquareError::default(); tensors.len()];
    for (job, error) in jobs.iter().zip(errors) {
        sums[job.index].add(error);
    }
    let share = |lost: f64, all: f64| if lost > 0.0 { (lost / all).sqrt() } else { 0.0 };
    let tensors = tensors.into_iter().zip(sums).map(|(tensor, sum)| QuantizedTensor {
        name: tensor.weight.name().to_owned(),
        format: tensor.format,
        elements: tensor.weight.element_count() as u64,
        bytes: tensor.bytes as u64,
        relative_rms: share(sum.lost, sum.all),
        weighted_rms: (!tensor.importance.is_empty())
            .then(|| share(sum.weighted_lost, sum.weighted_all)),
    });
    Ok(GgufReport { tensors: tensors.collect(), bytes: total, warnings })
}

/// A tensor and how it will be written.
pub(super) struct Planned {
    pub(super) weight: Weight,
    pub(super) format: WeightFormat,
    pub(super) bytes: usize,
    /// One weight a column, 1 in the mean; empty when all are equal.
    importance: Vec<f32>,
    /// What the given importance is in the mean; 1 when none was given.
    pub(super) mean_importance: f64,
}

impl Planned {
    pub(super) fn new(
        weight: &Weight,
        format: WeightFormat,
        options: &GgufOptions<'_>,
    ) -> Result<Self, CheckpointError> {
        let refuse = |reason: String| CheckpointError::Quantize {
            tensor: weight.name().to_owned(),
            format,
            reason,
        };
        let float = WeightFormat::Float;
        let known = matches!(format, WeightFormat::Float(DType::F32 | DType::F16 | DType::BF16));
        if !known && !can_quantize(format) {
            return Err(refuse(format!("this format is not written; accepted: {WRITTEN}")));
        }
        let columns = weight.shape().last().copied().unwrap_or(1);
        if !columns.is_multiple_of(format.block_elements()) {
            return Err(refuse(format!(
                "its rows of {columns} are not whole blocks of {}; accepted: a format whose blocks \
                 divide them, such as q8_0, q4_0 or f16",
                format.block_elements()
            )));
        }
        let bytes = format.byte_count(weight.element_count());
        let bytes = bytes.ok_or_else(|| refuse("its size overflows".into()))?;
        let (mut importance, mut mean_importance) = (Vec::new(), 1.0);
        if format != float(weight.dtype())
            && format.is_quantized()
            && let Some(given) = options.importance.and_then(|of| of(weight.name()))
        {
            (importance, mean_importance) = checked_importance(given, columns).map_err(refuse)?;
        }
        Ok(Self { weight: weight.clone(), format, bytes, importance, mean_importance })
    }

    pub(super) fn columns(&self) -> usize {
        self.weight.shape().last().copied().unwrap_or(1).max(1)
    }
}

/// Importance scaled to a mean of 1, and its mean before. No column counts for nothing, so that a column which the
/// calibration never saw keeps a meaning.
fn checked_importance(given: Vec<f32>, columns: usize) -> Result<(Vec<f32>, f64), String> {
    const LEAST: f64 = 1e-4;
    if given.len() != columns {
        let length = given.len();
        return Err(format!(
            "its importance has {length} entries; accepted: {columns}, its columns"
        ));
    }
    if let Some(wrong) = given.iter().find(|w| !w.is_finite() || **w < 0.0) {
        return Err(format!("its importance has an entry {wrong}; accepted: numbers from 0"));
    }
    let mean = given.iter().map(|w| f64::from(*w)).sum::<f64>() / columns as f64;
    if mean == 0.0 {
        return Ok((Vec::new(), 1.0));
    }
    Ok((given.iter().map(|w| (f64::from(*w) / mean).max(LEAST) as f32).collect(), mean))
}

/// All tensors in the order of the model.
pub(super) fn planned(
    checkpoint: &Checkpoint,
    options: &GgufOptions<'_>,
) -> Result<Vec<Planned>, CheckpointError> {
    let plan = |weight: &Weight, format: WeightFormat| {
        let own = options.formats.filter(|_| weight.shape().len() > 1);
        let own = own.and_then(|of| of(weight.name()));
        Planned::new(weight, own.unwrap_or(format), options)
    };
    let all_values = WeightFormat::Float(DType::F32);
    let head = options.head.unwrap_or(options.format);
    let small = if options.format.is_quantized() { all_values } else { options.format };
    let mut planned = vec![plan(checkpoint.embedding(), head)?];
    for layer in checkpoint.layers() {
        for (spec, weight) in layer.iter() {
            let format = match spec.kind {
                SlotKind::Norm => all_values,
                SlotKind::Matrix => options.format,
                SlotKind::SmallMatrix => small,
            };
            planned.push(plan(weight, format)?);
        }
    }
    planned.push(plan(checkpoint.final_norm(), all_values)?);
    if let Head::Stored(weight) = checkpoint.head() {
        planned.push(plan(weight, head)?);
    }
    Ok(planned)
}

/// Whole rows of a tensor.
struct Job {
    index: usize,
    first: usize,
    count: usize,
    /// Where in the file the tensor begins.
    offset: u64,
}

/// Room for converting.
#[derive(Default)]
pub(super) struct Buffers {
    values: Vec<f32>,
    read_back: Vec<f32>,
    importance: Vec<f32>,
    out: Vec<u8>,
}

/// Σ(x − x̂)² and Σx², as they are and weighted by the importance of the columns.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct SquareError {
    lost: f64,
    all: f64,
    pub(super) weighted_lost: f64,
    pub(super) weighted_all: f64,
}

impl Job {
    fn run(
        &self,
        tensor: &Planned,
        buffers: &mut Buffers,
        file: &std::fs::File,
    ) -> Result<SquareError, CheckpointError> {
        let error = tensor.convert(self.first, self.count, buffers)?;
        let before = tensor.format.byte_count(self.first).unwrap_or_default();
        file.write_all_at(&buffers.out, self.offset + before as u64)?;
        Ok(error)
    }
}

impl Planned {
    /// Makes the bytes of `count` elements from `first` on, which are whole rows of the tensor.
    pub(super) fn convert(
        &self,
        first: usize,
        count: usize,
        buffers: &mut Buffers,
    ) -> Result<SquareError, CheckpointError> {
        let Self { weight, format, importance, .. } = self;
        let Buffers { values, read_back, importance: weights, out } = buffers;
        let refuse = |reason: String| CheckpointError::Quantize {
            tensor: weight.name().to_owned(),
            format: *format,
            reason,
        };
        let bytes = |count: usize| format.byte_count(count).unwrap_or_default();
        out.resize(bytes(count), 0);
        values.resize(count, 0.0);
        read_back.resize(count, 0.0);
        let mut error = SquareError::default();
        let unchanged = weight.format() == *format;
        if let (true, Some(blocks)) = (unchanged, weight.blocks()) {
            // Blocks that are in this format already lose nothing.
            let start = bytes(first);
            let part = blocks.get(start..start + out.len());
            out.copy_from_slice(part.ok_or_else(|| refuse("its blocks are not there".into()))?);
        } else if let WeightFormat::Float(dtype) = *format {
            let report = weight.convert(first, dtype, out)?;
            if report.overflowed > 0 {
                let count = report.overflowed;
                return Err(refuse(format!(
                    "{count} values are too large for it; accepted: bf16, f32 or a block format"
                )));
            }
            if !unchanged && dtype != DType::F32 {
                weight.read_f32(first, values)?;
                let converted = firesteel_tensor::read_f32(dtype, out, read_back);
                converted.map_err(|source| CheckpointError::Convert {
                    tensor: weight.name().to_owned(),
                    source,
                })?;
                error.add_values(values, read_back, &[]);
            }
        } else {
            weight.read_f32(first, values)?;
            if let Some(index) = values.iter().position(|value| !value.is_finite()) {
                let (value, index) = (values[index], first + index);
                return Err(refuse(format!(
                    "element {index} is {value}; accepted: finite numbers"
                )));
            }
            weights.clear();
            match importance.as_slice() {
                [] => weights.resize(count, 1.0),
                columns => weights.extend(columns.iter().cycle().take(count)),
            }
            quantize(*format, values, weights, out);
            dequantize(*format, out, 0, read_back).map_err(|error| refuse(error.to_string()))?;
            error.add_values(values, read_back, weights);
        }
        Ok(error)
    }
}

impl SquareError {
    /// Adds elements with their weights; without weights all have the same.
    fn add_values(&mut self, values: &[f32], read_back: &[f32], weights: &[f32]) {
        let weights = weights.iter().copied().chain(std::iter::repeat(1.0));
        for ((value, back), weight) in values.iter().zip(read_back).zip(weights) {
            let lost = f64::from(value - back).powi(2);
            let all = f64::from(*value).powi(2);
            self.lost += lost;
            self.all += all;
            self.weighted_lost += f64::from(weight) * lost;
            self.weighted_all += f64::from(weight) * all;
        }
    }

    pub(super) fn add(&mut self, other: Self) {
        self.lost += other.lost;
        self.all += other.all;
        self.weighted_lost += other.weighted_lost;
        self.weighted_all += other.weighted_all;
    }
}

/// Everything before the first tensor's data.
struct Header {
    bytes: Vec<u8>,
    /// What has no place in it.
    warnings: Vec<String>,
}

fn header(
    checkpoint: &Checkpoint,
    options: &GgufOptions<'_>,
    tensors: &[Planned],
) -> Result<Header, CheckpointError> {
    let mut metadata = Metadata::default();
    metadata.string(ARCHITECTURE, checkpoint.config().family.architecture());
    if let Some(name) = options.name {
        metadata.string("general.name", name);
    }
    let mut warnings = metadata.model(checkpoint.config());
    metadata.u32(FILE_TYPE, file_type(options, tensors));
    if tensors.iter().any(|tensor| tensor.format.is_quantized()) {
        metadata.u32(QUANTIZATION, QUANTIZATION_VERSION);
    }
    warnings.extend(metadata.ids(checkpoint.config()));
    let sampling = SamplingAdvice::of_checkpoint(checkpoint)?;
    for (key, advice) in sampling.values {
        match advice {
            Advice::Integer(value) => metadata.i32(&key, value),
            Advice::Number(value) => metadata.f32(&key, value.into()),
            Advice::Text(text) => metadata.string(&key, &text),
        }
    }
    warnings.extend(sampling.warnings);
    match Described::of_checkpoint(checkpoint)? {
        Some(described) => {
            metadata.tokenizer(&described.tokenizer);
            warnings.extend(described.warnings);
        }
        None => metadata.string(MODEL, NO_TOKENIZER[0]),
    }
    if let Some(gguf) = checkpoint.gguf() {
        metadata.about(gguf);
        warnings.extend(metadata.missing(gguf));
    }

    let mut header = MAGIC.to_vec();
    header.extend(3u32.to_le_bytes());
    header.extend((tensors.len() as u64).to_le_bytes());
    header.extend(metadata.count.to_le_bytes());
    header.append(&mut metadata.bytes);
    let mut offset = 0;
    let codes: HashMap<WeightFormat, u32> = FORMATS.iter().map(|(code, f)| (*f, *code)).collect();
    for tensor in tensors {
        push_string(&mut header, &checkpoint.config().family.gguf_name(tensor.weight.name()));
        header.extend((tensor.weight.shape().len() as u32).to_le_bytes());
        for dim in tensor.weight.shape().iter().rev() {
            header.extend((*dim as u64).to_le_bytes());
        }
        header.extend(codes.get(&tensor.format).copied().unwrap_or_default().to_le_bytes());
        header.extend((offset as u64).to_le_bytes());
        offset = (offset + tensor.bytes).next_multiple_of(DEFAULT_ALIGNMENT);
    }
    header.resize(header.len().next_multiple_of(DEFAULT_ALIGNMENT), 0);
    Ok(Header { bytes: header, warnings })
}

/// The value of `general.file_type`: what most matrices are, and for q4_k whether single ones have
/// larger formats in blocks (Q4_K_M) or none (Q4_K_S).
fn file_type(options: &GgufOptions<'_>, tensors: &[Planned]) -> u32 {
    let larger = |tensor: &Planned| {
        let own = options.formats.and_then(|of| of(tensor.weight.name()));
        own == Some(tensor.format)
            && tensor.format.is_quantized()
            && WeightFormat::Q4K.byte_count(tensor.weight.element_count()) < Some(tensor.bytes)
    };
    match options.format {
        WeightFormat::Float(DType::F32) => 0,
        WeightFormat::Float(DType::BF16) => 32,
        WeightFormat::Float(_) => 1,
        WeightFormat::Q4_0 => 2,
        WeightFormat::Q4_1 => 3,
        WeightFormat::Q8_0 => 7,
        WeightFormat::Q4K if tensors.iter().any(larger) => 15,
        WeightFormat::Q4K => 14,
        WeightFormat::Q5K => 16,
        WeightFormat::Q6K => 18,
    }
}

#[derive(Default)]
struct Metadata {
    count: u64,
    bytes: Vec<u8>,
    keys: HashSet<String>,
}

impl Metadata {
    fn key(&mut self, key: &str, kind: Type) {
        self.count += 1;
        self.keys.insert(key.to_owned());
        push_string(&mut self.bytes, key);
        self.bytes.extend((kind as u32).to_le_bytes());
    }

    fn u32(&mut self, key: &str, value: u32) {
        self.key(key, Type::U32);
        self.bytes.extend(value.to_le_bytes());
    }

    fn i32(&mut self, key: &str, value: i32) {
        self.key(key, Type::I32);
        self.bytes.extend(value.to_le_bytes());
    }

    /// Counts of a validated config are below 2³².
    fn size(&mut self, key: &str, value: usize) {
        self.u32(key, u32::try_from(value).unwrap_or(u32::MAX));
    }

    fn f32(&mut self, key: &str, value: f64) {
        self.key(key, Type::F32);
        self.bytes.extend((value as f32).to_le_bytes());
    }

    fn bool(&mut self, key: &str, value: bool) {
        self.key(key, Type::Bool);
        self.bytes.push(value.into());
    }

    fn string(&mut self, key: &str, value: &str) {
        self.key(key, Type::String);
        push_string(&mut self.bytes, value);
    }

    fn array(&mut self, key: &str, element: Type, length: usize) {
        self.key(key, Type::Array);
        self.bytes.extend((element as u32).to_le_bytes());
        self.bytes.extend((length as u64).to_le_bytes());
    }

    fn strings(&mut self, key: &str, values: &[String]) {
        self.array(key, Type::String, values.len());
        values.iter().for_each(|value| push_string(&mut self.bytes, value));
    }

    /// Writes what the config says of the shape; the result names what has no place.
    fn model(&mut self, config: &ModelConfig) -> Vec<String> {
        let keys = Keys(config.family);
        self.size(&keys.count(Count::Positions), config.max_position_embeddings);
        self.size(&keys.count(Count::Hidden), config.hidden_size);
        self.size(&keys.count(Count::Layers), config.num_layers());
        self.size(&keys.count(Count::Intermediate), config.intermediate_size);
        self.size(&keys.count(Count::Heads), config.num_attention_heads);
        self.size(&keys.count(Count::KeyValueHeads), config.num_key_value_heads);
        self.size(&keys.count(Count::HeadDim), config.head_dim);
        self.size(&keys.value_length(), config.head_dim);
        self.f32(&keys.epsilon(), config.rms_norm_eps);
        self.size(&keys.count(Count::Vocabulary), config.vocab_size);
        if let Some(window) = config.sliding_window {
            self.size(&keys.count(Count::Window), window);
        }
        if config.family.description().window_pattern {
            self.array(&keys.window_pattern(), Type::Bool, config.num_layers());
            let sliding = |kind: &LayerKind| u8::from(*kind == LayerKind::Sliding);
            self.bytes.extend(config.layer_types.iter().map(sliding));
        }
        let mut warnings = Vec::new();
        for kind in LayerKind::ALL {
            if let Some(rope) = config.rope(kind) {
                self.f32(&keys.rope_base(kind), rope.theta);
                self.size(&keys.rope_dims(kind), rope.dims);
                if let Some(yarn) = rope.yarn {
                    warnings.extend(self.yarn(&keys, yarn));
                }
            }
        }
        warnings
    }

    /// Writes how frequencies are stretched; the result names what llama.cpp does not take over. The
    /// factor of cosines and sines is written as a share of what readers compute from the other one.
    fn yarn(&mut self, keys: &Keys, yarn: Yarn) -> Vec<String> {
        let mut warnings = Vec::new();
        self.string(&keys.scaling("type"), "yarn");
        self.f32(&keys.scaling("factor"), yarn.factor);
        self.size(&keys.scaling("original_context_length"), yarn.original_positions);
        let betas = [yarn.beta_fast, yarn.beta_slow];
        for ((key, beta), usual) in Keys::BETAS.into_iter().zip(betas).zip(Yarn::BETAS) {
            if beta != usual {
                let key = keys.scaling(key);
                self.f32(&key, beta);
                warnings.push(format!("{key} {beta} is in the file, but llama.cpp takes {usual}"));
            }
        }
        let share = yarn.attention_factor / Yarn::attention_factor_of(yarn.factor);
        if share != 1.0 {
            self.f32(&keys.scaling(Keys::MAGNITUDE), share);
        }
        warnings
    }

    /// Writes the ids that have a place; the result names those that have none.
    fn ids(&mut self, config: &ModelConfig) -> Option<String> {
        let mut all = config.eos_token_ids.iter().copied();
        let ends: Vec<_> = [EOS].into_iter().chain(OTHER_ENDS).zip(all.by_ref()).collect();
        let begin = config.bos_token_id.map(|id| (BOS, id));
        let padding = config.pad_token_id.map(|id| (PADDING, id));
        for (key, id) in begin.into_iter().chain(ends).chain(padding) {
            self.u32(key, id);
        }
        let left: Vec<String> = all.map(|id| id.to_string()).collect();
        (!left.is_empty()).then(|| {
            format!(
                "eos_token_id {} is not in the file, which has places for {} ids; a text does not \
                 end there",
                left.join(", "),
                1 + OTHER_ENDS.len()
            )
        })
    }

    /// What a file says of its origin: author, licence, what it was made of. The advice on sampling
    /// has been taken over, and the layout of the old data is gone.
    fn about(&mut self, gguf: &Gguf) {
        for (key, stored) in gguf.stored_metadata() {
            let layout = [ALIGNMENT_KEY, QUANTIZATION].contains(&key);
            let about = key.starts_with("general.") && !key.starts_with(SAMPLING) && !layout;
            if about && self.keys.insert(key.to_owned()) {
                self.count += 1;
                push_string(&mut self.bytes, key);
                self.bytes.extend(stored);
            }
        }
    }

    /// What a file says of tokens and sampling and this metadata does not.
    fn missing<'a>(&'a self, gguf: &'a Gguf) -> impl Iterator<Item = String> + 'a {
        let told = |key: &str| key.starts_with("tokenizer.") || key.starts_with(SAMPLING);
        let left = gguf.metadata().filter(move |(key, _)| told(key) && !self.keys.contains(*key));
        left.map(|(key, value)| format!("{key} = {value} is not in the file"))
    }

    fn tokenizer(&mut self, tokenizer: &GgufTokenizer) {
        self.string(MODEL, &tokenizer.model);
        if let Some(pre) = &tokenizer.pre {
            self.string(PRE, pre);
        }
        self.strings(TOKENS, &tokenizer.tokens);
        self.array(TOKEN_TYPES, Type::I32, tokenizer.token_types.len());
        let types = tokenizer.token_types.iter();
        self.bytes.extend(types.flat_map(|kind| kind.to_le_bytes()));
        self.strings(MERGES, &tokenizer.merges);
        self.bool(ADD_BOS, tokenizer.add_bos);
        if let Some(template) = &tokenizer.chat_template {
            self.string(CHAT_TEMPLATE, template);
        }
    }
}

fn push_string(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
}
