//! The validated shape of a model, and the one place that validates it. config.json and the metadata
//! of a GGUF file are two [`Spelling`]s of it.

mod json;

use crate::family::{Count, RopeSpelling};
use crate::json::{parse_object, read_bounded};
use crate::{CheckpointError, Family, folder};
use firesteel_tensor::DType;
use json::{DTYPES, Reader};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::fmt;
use std::ops::RangeInclusive;
use std::path::Path;

/// Name of the config file of a folder.
pub(crate) const CONFIG_FILE: &str = "config.json";
const GENERATION_CONFIG_FILE: &str = "generation_config.json";
/// Longest config file, in bytes.
pub(crate) const MAX_CONFIG_BYTES: u64 = 1 << 20;
/// Largest count that a config may give.
pub(crate) const MAX_SIZE: u64 = 1 << 31;
/// Most layers; bounds the work that a config alone can cause.
const MAX_LAYERS: u64 = 512;
/// Epsilons of RMSNorm that are accepted: neither lost in f32 nor larger than what it guards.
pub(crate) const EPSILONS: RangeInclusive<f64> = 1e-12..=1.0;
/// Bases of rotary embeddings that are accepted: below, frequencies would grow; above, they are
/// no longer apart from 0 in f32 at any position.
pub(crate) const THETAS: RangeInclusive<f64> = 1.0..=1e12;
/// Bases of embeddings whose frequencies are stretched: the ramp is found by the logarithm.
pub(crate) const STRETCHED_THETAS: RangeInclusive<f64> = 2.0..=1e12;
/// Factors by which a context may be stretched, numbers of rotations, and factors of cosines and sines.
pub(crate) const FACTORS: RangeInclusive<f64> = 1.0..=1024.0;
pub(crate) const ROTATIONS: RangeInclusive<f64> = 1e-3..=1e6;
pub(crate) const MAGNITUDES: RangeInclusive<f64> = 0.1..=10.0;

/// Parts of a key's name that tell of other maths. An unknown key with one of them is refused
/// unless its value is null, false or the neutral number beside it; any other unknown key is
/// ignored with a warning.
pub(crate) const MATHS: &[(&str, f64)] = &[
    ("act", 0.0),
    ("alibi", 0.0),
    ("attn", 0.0),
    ("attention", 0.0),
    ("bias", 0.0),
    ("cap", 0.0),
    ("clip", 0.0),
    ("expert", 0.0),
    ("gate", 0.0),
    ("lora", 0.0),
    ("moe", 0.0),
    ("mtp", 0.0),
    ("multiplier", 1.0),
    ("mup", 0.0),
    ("nextn", 0.0),
    ("norm", 0.0),
    ("quant", 0.0),
    ("rope", 0.0),
    ("rotary", 0.0),
    ("scal", 1.0),
    ("shared", 0.0),
    ("sink", 0.0),
    ("sparse", 0.0),
    ("window", 0.0),
];

/// Kind of attention of a layer, spelled as in `layer_types` of config.json.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum LayerKind {
    /// Sees the current token and the `sliding_window - 1` before it.
    #[serde(rename = "sliding_attention")]
    Sliding,
    /// Sees every earlier token.
    #[serde(rename = "full_attention")]
    Full,
}

impl LayerKind {
    /// Both kinds, in the order of the step contract.
    pub const ALL: [LayerKind; 2] = [LayerKind::Sliding, LayerKind::Full];

    /// Spelling in config.json.
    pub const fn name(self) -> &'static str {
        match self {
            LayerKind::Sliding => "sliding_attention",
            LayerKind::Full => "full_attention",
        }
    }
}

impl fmt::Display for LayerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Rotary embedding of one kind of layer, resolved.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Rope {
    /// Base of the angles: frequency of pair j is `theta^(-2j/dims)`.
    pub theta: f64,
    /// Leading dimensions of each head that rotate; even, at most `head_dim`.
    pub dims: usize,
    /// How frequencies are stretched for a longer context than the model was trained with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub yarn: Option<Yarn>,
}

impl Rope {
    /// One that is not stretched.
    pub const fn plain(theta: f64, dims: usize) -> Self {
        Self { theta, dims, yarn: None }
    }

    /// What cosines and sines are multiplied with.
    pub fn magnitude(&self) -> f64 {
        self.yarn.map_or(1.0, |yarn| yarn.attention_factor)
    }
}

/// YaRN (Peng et al., 2023) with a static factor, as the transformers library computes it: pairs that
/// rotate fast keep their frequency, those that rotate slowly are divided by the factor, and between
/// them lies a ramp.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Yarn {
    /// By how much the context is longer.
    pub factor: f64,
    /// Positions that the model was trained with.
    pub original_positions: usize,
    /// Rotations over the original positions from which on a pair keeps its frequency.
    pub beta_fast: f64,
    /// Rotations up to which a pair's frequency is divided by the factor.
    pub beta_slow: f64,
    /// What cosines and sines are multiplied with.
    pub attention_factor: f64,
}

impl Yarn {
    /// The rotations that are used where none are given.
    pub(crate) const BETAS: [f64; 2] = [32.0, 1.0];

    /// The factor of cosines and sines where none is given: 0.1 · ln(factor) + 1.
    pub(crate) fn attention_factor_of(factor: f64) -> f64 {
        0.1 * factor.ln() + 1.0
    }
}

/// The validated shape of a model. Every count is positive and every product of two
/// counts that the model needs fits in `usize`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelConfig {
    /// The family that it is of; `model_type` in config.json.
    #[serde(rename = "model_type")]
    pub family: Family,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the feed-forward layer.
    pub intermediate_size: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads; divides the query heads.
    pub num_key_value_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Tokens that a sliding layer sees, the current one included; `None` without such layers.
    pub sliding_window: Option<usize>,
    /// Longest context the model claims.
    pub max_position_embeddings: usize,
    /// Epsilon of every RMSNorm.
    pub rms_norm_eps: f64,
    /// Kind of each layer, first to last.
    pub layer_types: Vec<LayerKind>,
    /// Rotary embedding of sliding layers; present when there are such layers.
    pub rope_sliding: Option<Rope>,
    /// Rotary embedding of full layers; present when there are such layers.
    pub rope_full: Option<Rope>,
    /// The flag of config.json; the data decide (see `Checkpoint::head`).
    pub tie_word_embeddings: bool,
    /// Element type that config.json names (`dtype` or `torch_dtype`), if any.
    pub dtype: Option<DType>,
    /// Ids that end a sequence: of config.json, replaced by generation_config.json where given.
    pub eos_token_ids: Vec<u32>,
    /// Id that begins a sequence.
    pub bos_token_id: Option<u32>,
    /// Id that pads a sequence.
    pub pad_token_id: Option<u32>,
}

impl ModelConfig {
    /// Number of layers.
    pub fn num_layers(&self) -> usize {
        self.layer_types.len()
    }

    /// Query heads that share one key/value head.
    pub fn group_size(&self) -> usize {
        self.num_attention_heads / self.num_key_value_heads
    }

    /// Width of all query heads together.
    pub fn query_size(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// Width of all key heads together (values have the same).
    pub fn key_value_size(&self) -> usize {
        self.num_key_value_heads * self.head_dim
    }

    /// Rotary embedding of layers of `kind`.
    pub fn rope(&self, kind: LayerKind) -> Option<Rope> {
        match kind {
            LayerKind::Sliding => self.rope_sliding,
            LayerKind::Full => self.rope_full,
        }
    }

    /// Reads the config.json with contents `text`; `file` is its name in messages. Also returns
    /// warnings.
    ///
    /// What the family's reference assumes for a missing key is assumed with a warning, and a missing
    /// `tie_word_embeddings` is false. An unknown key is refused when its name tells
    /// of other maths and its value does not switch that off; otherwise it is ignored with a
    /// warning.
    ///
    /// # Errors
    /// For any key that is missing, malformed or asks for maths that this architecture does not
    /// have; the message names file, key, value and what is accepted.
    pub fn from_json(file: &Path, text: &[u8]) -> Result<(Self, Vec<String>), CheckpointError> {
        if text.len() as u64 > MAX_CONFIG_BYTES {
            let length = text.len();
            let reason = format!("{length} bytes long; accepted: at most {MAX_CONFIG_BYTES}");
            return Err(CheckpointError::Json { file: file.into(), reason });
        }
        let map = parse_object(file, text)?;
        let mut reader = Reader { file: file.into(), map, warnings: Vec::new() };
        let family = reader.family()?;
        reader.refuse_other_maths(family)?;
        let config = describe(family, &mut reader)?;
        Ok((config, reader.warnings))
    }

    /// Reads the config of a folder, or a config.json itself, with the end-of-sequence ids of the
    /// generation_config.json beside it. Also returns warnings.
    ///
    /// # Errors
    /// As [`ModelConfig::from_json`], and when a file cannot be read.
    pub fn open(dir_or_config_json: &Path) -> Result<(Self, Vec<String>), CheckpointError> {
        if fs_err::metadata(dir_or_config_json)?.is_dir() {
            let text = read_config(dir_or_config_json)?;
            return Self::from_folder(dir_or_config_json, &text);
        }
        let text = read_bounded(dir_or_config_json, MAX_CONFIG_BYTES)?;
        let folder = match dir_or_config_json.parent() {
            Some(parent) if parent != Path::new("") => parent,
            _ => Path::new("."),
        };
        Self::from_json(dir_or_config_json, &text)
            .and_then(|(config, warnings)| config.with_generation_config(folder, warnings))
    }

    /// The config of `folder`, whose config.json has contents `text`.
    pub(crate) fn from_folder(
        folder: &Path,
        text: &[u8],
    ) -> Result<(Self, Vec<String>), CheckpointError> {
        Self::from_json(&folder.join(CONFIG_FILE), text)
            .and_then(|(config, warnings)| config.with_generation_config(folder, warnings))
    }

    fn with_generation_config(
        mut self,
        folder: &Path,
        mut warnings: Vec<String>,
    ) -> Result<(Self, Vec<String>), CheckpointError> {
        if folder::exists(&folder.join(GENERATION_CONFIG_FILE))? {
            let path = folder::file_path(folder, GENERATION_CONFIG_FILE)?;
            let file = folder.join(GENERATION_CONFIG_FILE);
            let map = parse_object(&file, &read_bounded(&path, MAX_CONFIG_BYTES)?)?;
            let reader = Reader { file, map, warnings: Vec::new() };
            let ids = reader.ids("eos_token_id", self.vocab_size)?;
            if !ids.is_empty() {
                self.eos_token_ids = ids;
            }
            warnings.extend(reader.warnings);
        }
        Ok((self, warnings))
    }

    /// The model of the first `layers` layers.
    ///
    /// # Errors
    /// When `layers` is 0 or more than the model has.
    pub fn with_layers(mut self, layers: usize) -> Result<Self, CheckpointError> {
        let available = self.num_layers();
        if layers == 0 || layers > available {
            return Err(CheckpointError::Layers { requested: layers, available });
        }
        self.layer_types.truncate(layers);
        if !self.layer_types.contains(&LayerKind::Sliding) {
            self.sliding_window = None;
        }
        Ok(self)
    }

    /// A config.json that reads back as this config.
    pub fn to_json(&self) -> String {
        let description = self.family.description();
        let spelling = &description.config;
        let eos_token_id = match self.eos_token_ids.as_slice() {
            [] => Value::Null,
            [id] => json!(id),
            ids => json!(ids),
        };
        let dtype = self.dtype.and_then(|dtype| {
            DTYPES.iter().find(|(_, known)| *known == dtype).map(|(name, _)| *name)
        });
        let mut config = Map::new();
        let mut put = |key: &str, value: Value| config.insert(key.to_owned(), value);
        put("architectures", json!([description.class]));
        put("model_type", json!(self.family));
        put("dtype", json!(dtype));
        put("hidden_size", json!(self.hidden_size));
        put("intermediate_size", json!(self.intermediate_size));
        put("num_hidden_layers", json!(self.num_layers()));
        put("num_attention_heads", json!(self.num_attention_heads));
        put("num_key_value_heads", json!(self.num_key_value_heads));
        put("head_dim", json!(self.head_dim));
        put("vocab_size", json!(self.vocab_size));
        put("sliding_window", json!(self.sliding_window));
        put("max_position_embeddings", json!(self.max_position_embeddings));
        put("rms_norm_eps", json!(self.rms_norm_eps));
        put("hidden_act", json!(spelling.activation));
        for fixed in spelling.fixed {
            put(fixed.key, fixed.value.json());
        }
        put("attention_dropout", json!(0.0));
        put("tie_word_embeddings", json!(self.tie_word_embeddings));
        put("bos_token_id", json!(self.bos_token_id));
        put("eos_token_id", eos_token_id);
        put("pad_token_id", json!(self.pad_token_id));
        put("layer_types", json!(self.layer_types));
        match spelling.rope {
            RopeSpelling::ByLayerType => {
                put("rope_parameters", self.rope_parameters());
            }
            RopeSpelling::Flat => {
                put("rope_theta", json!(self.rope_full.map(|rope| rope.theta)));
                put(
                    "rope_scaling",
                    json!(self.rope_full.and_then(|rope| rope.yarn).map(yarn_json)),
                );
            }
        }
        format!("{:#}\n", Value::Object(config))
    }

    /// The rotary embeddings with an entry for each layer type.
    fn rope_parameters(&self) -> Value {
        let mut parameters = Map::new();
        for kind in LayerKind::ALL {
            if let Some(rope) = self.rope(kind) {
                let factor = rope.dims as f64 / self.head_dim as f64;
                let entry = json!({
                    "partial_rotary_factor": factor,
                    "rope_theta": rope.theta,
                    "rope_type": "default",
                });
                parameters.insert(kind.name().to_owned(), entry);
            }
        }
        Value::Object(parameters)
    }
}

fn yarn_json(yarn: Yarn) -> Value {
    json!({
        "rope_type": "yarn",
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_positions,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "attention_factor": yarn.attention_factor,
    })
}

/// One way to write a config down. Errors name the file, the key as it is spelled there, and the value.
pub(crate) trait Spelling {
    /// The key of a count.
    fn key(&self, count: Count) -> String;

    /// Whether the count is given.
    fn has(&self, count: Count) -> bool;

    /// A count of the `accepted` numbers; `why` says where they come from, if there is more to say.
    fn count(
        &self,
        count: Count,
        accepted: RangeInclusive<u64>,
        why: &str,
    ) -> Result<usize, CheckpointError>;

    /// What is assumed where a count is not given; a warning says so.
    fn assumed(&self, count: Count) -> Option<usize>;

    /// Refuses the value of a key.
    fn error(&self, key: &str, accepted: String) -> CheckpointError;

    /// Keeps a warning; the name of the file is put before it.
    fn warn(&mut self, warning: String);

    /// The kind of each of so many layers.
    fn layer_types(&mut self, layers: usize) -> Result<Vec<LayerKind>, CheckpointError>;

    /// Refuses what says that no layer slides, though some do.
    fn check_windows(&self) -> Result<(), CheckpointError>;

    /// The rotary embedding of layers of `kind`, which is `needed` when there are such layers.
    fn rope(
        &mut self,
        kind: LayerKind,
        needed: bool,
        head_dim: usize,
    ) -> Result<Option<Rope>, CheckpointError>;

    /// Epsilon of the norms.
    fn epsilon(&self) -> Result<f64, CheckpointError>;

    /// Ids that end a sequence, begin one, and pad one.
    fn token_ids(&self, vocab_size: usize) -> Result<TokenIds, CheckpointError>;

    /// Whether the embedding is said to be the head.
    fn is_tied(&self) -> Result<bool, CheckpointError>;

    /// The type of the elements that is said.
    fn dtype(&mut self) -> Result<Option<DType>, CheckpointError>;
}

/// The ids of a config.
pub(crate) struct TokenIds {
    pub(crate) eos: Vec<u32>,
    pub(crate) bos: Option<u32>,
    pub(crate) pad: Option<u32>,
}

/// The config of a model of `family`, whatever it is written in.
pub(crate) fn describe(
    family: Family,
    spelling: &mut dyn Spelling,
) -> Result<ModelConfig, CheckpointError> {
    let hidden_size = size(spelling, Count::Hidden)?;
    let layers = spelling.count(Count::Layers, 1..=MAX_LAYERS, "")?;
    let intermediate_size = size(spelling, Count::Intermediate)?;
    let num_attention_heads = size(spelling, Count::Heads)?;
    let num_key_value_heads = size(spelling, Count::KeyValueHeads)?;
    let head_dim = size(spelling, Count::HeadDim)?;
    let vocab_size = size(spelling, Count::Vocabulary)?;
    if !num_attention_heads.is_multiple_of(num_key_value_heads) {
        let other = spelling.key(Count::KeyValueHeads);
        return Err(spelling.error(
            &spelling.key(Count::Heads),
            format!("a multiple of {other}, which is {num_key_value_heads}"),
        ));
    }
    let heads = num_attention_heads.saturating_mul(3);
    for (count, number, other, factor) in [
        (Count::Vocabulary, vocab_size, Count::Hidden, hidden_size),
        (Count::Intermediate, intermediate_size, Count::Hidden, hidden_size),
        (Count::Heads, heads, Count::HeadDim, head_dim),
        (Count::Heads, heads.saturating_mul(head_dim), Count::Hidden, hidden_size),
    ] {
        // As bytes of f32.
        let bytes = number.checked_mul(factor).and_then(|product| product.checked_mul(4));
        if bytes.is_none_or(|bytes| bytes > isize::MAX as usize) {
            let other = spelling.key(other);
            let accepted = format!("a number whose product with {other} can be addressed");
            return Err(spelling.error(&spelling.key(count), accepted));
        }
    }
    let layer_types = spelling.layer_types(layers)?;
    let has = |kind| layer_types.contains(&kind);
    let sliding_window = if has(LayerKind::Sliding) {
        spelling.check_windows()?;
        let why = "since there are sliding_attention layers";
        Some(spelling.count(Count::Window, 2..=MAX_SIZE, why)?)
    } else {
        None
    };
    let rope_sliding = spelling.rope(LayerKind::Sliding, has(LayerKind::Sliding), head_dim)?;
    let rope_full = spelling.rope(LayerKind::Full, has(LayerKind::Full), head_dim)?;
    let max_position_embeddings = size(spelling, Count::Positions)?;
    let rms_norm_eps = spelling.epsilon()?;
    let tie_word_embeddings = spelling.is_tied()?;
    let dtype = spelling.dtype()?;
    let TokenIds { eos, bos, pad } = spelling.token_ids(vocab_size)?;
    Ok(ModelConfig {
        family,
        hidden_size,
        intermediate_size,
        num_attention_heads,
        num_key_value_heads,
        head_dim,
        vocab_size,
        sliding_window,
        max_position_embeddings,
        rms_norm_eps,
        layer_types,
        rope_sliding,
        rope_full,
        tie_word_embeddings,
        dtype,
        eos_token_ids: eos,
        bos_token_id: bos,
        pad_token_id: pad,
    })
}

/// A count from 1 on, or what is assumed for it.
fn size(spelling: &mut dyn Spelling, count: Count) -> Result<usize, CheckpointError> {
    match spelling.assumed(count) {
        Some(assumed) if !spelling.has(count) => {
            spelling.warn(format!("{} is missing; {assumed} is assumed", spelling.key(count)));
            Ok(assumed)
        }
        _ => spelling.count(count, 1..=MAX_SIZE, ""),
    }
}

/// The bytes of the config.json of `folder`.
pub(crate) fn read_config(folder: &Path) -> Result<Vec<u8>, CheckpointError> {
    if !folder::exists(&folder.join(CONFIG_FILE))? {
        let reason =
            format!("no {CONFIG_FILE} is here; accepted: a Hugging Face checkpoint folder");
        return Err(CheckpointError::Path { path: folder.into(), reason });
    }
    read_bounded(&folder::file_path(folder, CONFIG_FILE)?, MAX_CONFIG_BYTES)
}

/// What a number in `range` is called in messages.
pub(crate) fn show_range(range: &RangeInclusive<f64>) -> String {
    format!("a number from {:?} to {:?}", range.start(), range.end())
}

/// What a whole number in `range` is called in messages, with the reason if there is one.
pub(crate) fn show_counts(range: &RangeInclusive<u64>, why: &str) -> String {
    let separator = if why.is_empty() { "" } else { ", " };
    format!("a whole number from {} to {}{separator}{why}", range.start(), range.end())
}
