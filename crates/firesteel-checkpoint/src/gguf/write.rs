//! Writes a checkpoint as a GGUF file in the standard types.

use super::config::{ARCHITECTURE, BOS, EOS, FILE_TYPE, Keys, OTHER_ENDS, PADDING};
use super::sampling::{Advice, SAMPLING, SamplingAdvice};
use super::tokenizer::{
    ADD_BOS, CHAT_TEMPLATE, Described, MERGES, MODEL, NO_TOKENIZER, PRE, TOKEN_TYPES, TOKENS,
};
use super::{ALIGNMENT_KEY, DEFAULT_ALIGNMENT, FORMATS, Gguf, GgufTokenizer, MAGIC, Type};
use crate::family::Count;
use crate::os::write_all_at;
use crate::staged::StagedFile;
use crate::{
    Checkpoint, CheckpointError, LayerKind, ModelConfig, Progress, Weight, WeightFormat, Yarn,
};
use firesteel_tensor::DType;
use rayon::prelude::*;
use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// A weight and the format in which it stands in the file.
#[derive(Debug, Clone)]
pub struct GgufEntry {
    /// The weight.
    pub weight: Weight,
    /// Its format in the file.
    pub format: WeightFormat,
}

impl GgufEntry {
    /// Bytes of the tensor in the file.
    ///
    /// # Errors
    /// When the rows of the weight are not whole blocks of the format, or the size overflows.
    pub fn bytes(&self) -> Result<usize, CheckpointError> {
        let refuse = |reason: String| CheckpointError::Format {
            tensor: self.weight.name().to_owned(),
            format: self.format,
            reason,
        };
        let (columns, block) = (self.columns(), self.format.block_elements());
        if !columns.is_multiple_of(block) {
            return Err(refuse(format!(
                "its rows of {columns} are not whole blocks of {block}; accepted: a format whose \
                 blocks divide them, such as q8_0, q4_0 or f16"
            )));
        }
        let bytes = self.format.byte_count(self.weight.element_count());
        bytes.ok_or_else(|| refuse("its size overflows".into()))
    }

    /// Elements of a row.
    pub fn columns(&self) -> usize {
        self.weight.shape().last().copied().unwrap_or(1).max(1)
    }
}

/// What a GGUF file holds besides what the checkpoint says.
#[derive(Debug, Clone, Copy)]
pub struct GgufLayout<'a> {
    /// The tensors in the order of the file.
    pub tensors: &'a [GgufEntry],
    /// Format of most matrices, which gives `general.file_type`.
    pub format: WeightFormat,
    /// Whether single matrices have larger formats in blocks than that: Q4_K_M and not Q4_K_S.
    pub raised: bool,
    /// Name of the model in the metadata.
    pub name: Option<&'a str>,
    /// Whether an existing GGUF file is replaced. Any other existing file is an error.
    pub replace: bool,
}

/// Whole rows of a tensor of a layout.
#[derive(Debug, Clone, Copy)]
pub struct GgufRows {
    /// Index of the tensor in the layout.
    pub tensor: usize,
    /// First element, which begins a row.
    pub first: usize,
    /// Elements.
    pub count: usize,
}

/// Makes the bytes of tensors.
pub trait EncodeRows: Sync {
    /// Room that is kept between calls.
    type Room: Default;
    /// What is told of the rows, such as what was lost.
    type Told: Send;
    /// Why rows cannot be encoded, or the file not be written.
    type Error: From<CheckpointError> + Send;

    /// Writes the bytes of `rows` to `out`, which has room for exactly those.
    ///
    /// # Errors
    /// When a weight cannot be read or not be written in its format.
    fn encode(
        &self,
        rows: GgufRows,
        room: &mut Self::Room,
        out: &mut [u8],
    ) -> Result<Self::Told, Self::Error>;
}

/// What [`write_gguf`] wrote.
#[derive(Debug, Clone, PartialEq)]
pub struct GgufWritten<T> {
    /// What was told of rows, in the order of the file, with the index of their tensor.
    pub told: Vec<(usize, T)>,
    /// Bytes of the file.
    pub bytes: u64,
    /// What the checkpoint says and the file has no place for, as name and value.
    pub warnings: Vec<String>,
}

/// Elements that a thread encodes and writes at once, at most, unless a row is longer.
const CHUNK: usize = 1 << 19;
/// Version of the block formats, which files with blocks name.
const QUANTIZATION_VERSION: u32 = 2;
const QUANTIZATION: &str = "general.quantization_version";

/// Writes `checkpoint` as a GGUF file that llama.cpp reads as well, with the tokenizer of
/// [`GgufTokenizer::of_checkpoint`] and the advice on sampling of generation_config.json; what a GGUF
/// file says of its origin, such as author and licence, is taken over. What has no place in the
/// format, such as a fourth end-of-sequence id, is left out, and the result says so.
/// Rows are encoded in parallel and tensors never held as a whole; where equal rows give equal
/// bytes, so do equal inputs on any number of threads.
///
/// The file appears complete or not at all.
///
/// # Errors
/// When `out_file` exists and may not be replaced, its file system has too little room, it cannot
/// be written, rows cannot be encoded, or are not whole blocks. When the tokenizer is another than the
/// file would say.
pub fn write_gguf<E: EncodeRows>(
    checkpoint: &Checkpoint,
    layout: GgufLayout<'_>,
    encoder: &E,
    out_file: &Path,
    progress: Progress<'_>,
) -> Result<GgufWritten<E::Told>, E::Error> {
    let io = |error: std::io::Error| E::Error::from(CheckpointError::from(error));
    let sizes: Vec<usize> =
        layout.tensors.iter().map(GgufEntry::bytes).collect::<Result<_, _>>()?;
    let Header { bytes: header, warnings } = header(checkpoint, &layout, &sizes)?;
    let ours: fn(&Path) -> std::io::Result<bool> = Gguf::is_gguf;
    let staged = StagedFile::create(out_file, layout.replace.then_some(ours)).map_err(io)?;
    let file = staged.file().file();

    let mut jobs = Vec::new();
    let mut end = header.len() as u64;
    for (index, (tensor, bytes)) in layout.tensors.iter().zip(&sizes).enumerate() {
        let offset = end.next_multiple_of(DEFAULT_ALIGNMENT as u64);
        let rows = (CHUNK / tensor.columns()).max(1) * tensor.columns();
        let elements = tensor.weight.element_count();
        for first in (0..elements).step_by(rows) {
            let rows = GgufRows { tensor: index, first, count: rows.min(elements - first) };
            let before = tensor.format.byte_count(first).unwrap_or_default();
            let length = tensor.format.byte_count(rows.count).unwrap_or_default();
            jobs.push(Job { rows, offset: offset + before as u64, length });
        }
        end = offset + *bytes as u64;
    }
    let total = end.next_multiple_of(DEFAULT_ALIGNMENT as u64);
    staged.require_space(total).map_err(io)?;
    file.set_len(total).map_err(io)?;
    write_all_at(file, &header, 0).map_err(io)?;

    let weight_bytes = sizes.iter().map(|bytes| *bytes as u64).sum();
    let done = AtomicU64::new(0);
    let told = jobs
        .par_iter()
        .map_init(<(E::Room, Vec<u8>)>::default, |(room, out), job| {
            out.resize(job.length, 0);
            let told = encoder.encode(job.rows, room, out)?;
            write_all_at(file, out, job.offset).map_err(io)?;
            let bytes = job.length as u64;
            progress(done.fetch_add(bytes, Ordering::Relaxed) + bytes, weight_bytes);
            Ok((job.rows.tensor, told))
        })
        .collect::<Result<_, E::Error>>()?;
    staged.commit().map_err(io)?;
    Ok(GgufWritten { told, bytes: total, warnings })
}

/// Rows to encode and write.
struct Job {
    rows: GgufRows,
    /// Where in the file they begin.
    offset: u64,
    /// Their bytes.
    length: usize,
}

/// Everything before the first tensor's data.
struct Header {
    bytes: Vec<u8>,
    /// What has no place in it.
    warnings: Vec<String>,
}

fn header(
    checkpoint: &Checkpoint,
    layout: &GgufLayout<'_>,
    sizes: &[usize],
) -> Result<Header, CheckpointError> {
    let mut metadata = Metadata::default();
    metadata.string(ARCHITECTURE, checkpoint.config().family.architecture());
    if let Some(name) = layout.name {
        metadata.string("general.name", name);
    }
    let mut warnings = metadata.model(checkpoint.config());
    metadata.u32(FILE_TYPE, file_type(layout));
    if layout.tensors.iter().any(|tensor| tensor.format.is_quantized()) {
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
    header.extend((layout.tensors.len() as u64).to_le_bytes());
    header.extend(metadata.count.to_le_bytes());
    header.append(&mut metadata.bytes);
    let mut offset = 0;
    let codes: HashMap<WeightFormat, u32> = FORMATS.iter().map(|(code, f)| (*f, *code)).collect();
    for (tensor, bytes) in layout.tensors.iter().zip(sizes) {
        push_string(&mut header, &checkpoint.config().family.gguf_name(tensor.weight.name()));
        header.extend((tensor.weight.shape().len() as u32).to_le_bytes());
        for dim in tensor.weight.shape().iter().rev() {
            header.extend((*dim as u64).to_le_bytes());
        }
        header.extend(codes.get(&tensor.format).copied().unwrap_or_default().to_le_bytes());
        header.extend((offset as u64).to_le_bytes());
        offset = (offset + bytes).next_multiple_of(DEFAULT_ALIGNMENT);
    }
    header.resize(header.len().next_multiple_of(DEFAULT_ALIGNMENT), 0);
    Ok(Header { bytes: header, warnings })
}

/// The value of `general.file_type`: what most matrices are, and for q4_k whether single ones have
/// larger formats in blocks (Q4_K_M) or none (Q4_K_S).
fn file_type(layout: &GgufLayout<'_>) -> u32 {
    match layout.format {
        WeightFormat::Float(DType::F32) => 0,
        WeightFormat::Float(DType::BF16) => 32,
        WeightFormat::Float(_) => 1,
        WeightFormat::Q4_0 => 2,
        WeightFormat::Q4_1 => 3,
        WeightFormat::Q8_0 => 7,
        WeightFormat::Q4K if layout.raised => 15,
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
