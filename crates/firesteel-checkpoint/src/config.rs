use crate::json::{parse_object, read_bounded, shorten};
use crate::{CheckpointError, folder};
use firesteel_tensor::DType;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::fmt;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

/// The `model_type` of this architecture.
pub(crate) const MODEL_TYPE: &str = "spark2_5";
/// Name of the config file of a folder.
pub(crate) const CONFIG_FILE: &str = "config.json";
const GENERATION_CONFIG_FILE: &str = "generation_config.json";
/// Longest config file, in bytes.
pub(crate) const MAX_CONFIG_BYTES: u64 = 1 << 20;
/// Largest count that a config may give.
pub(crate) const MAX_SIZE: u64 = 1 << 31;
/// Most layers; bounds the work that a config alone can cause.
pub(crate) const MAX_LAYERS: u64 = 512;
/// Epsilons of RMSNorm that are accepted: neither lost in f32 nor larger than what it guards.
pub(crate) const EPSILONS: RangeInclusive<f64> = 1e-12..=1.0;
/// Bases of rotary embeddings that are accepted: below, frequencies would grow; above, they are
/// no longer apart from 0 in f32 at any position.
pub(crate) const THETAS: RangeInclusive<f64> = 1.0..=1e12;
/// Context of a config without `max_position_embeddings`, as in the reference config class.
const DEFAULT_MAX_POSITIONS: usize = 8192;

/// Keys that are read.
const READ: &[&str] = &[
    "attention_bias",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "gate_attn_act_mode",
    "head_dim",
    "headwise_attn_output_gate",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "mlp_bias",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "pad_token_id",
    "partial_rotary_factor",
    "quantization_config",
    "rms_norm_eps",
    "rope_parameters",
    "rope_theta",
    "sliding_window",
    "tie_word_embeddings",
    "torch_dtype",
    "use_sliding_window",
    "vocab_size",
];

/// Keys that do not change what a forward pass computes and are ignored.
const IGNORED: &[&str] = &[
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "auto_map",
    "chunk_size_feed_forward",
    "hidden_dropout",
    "id2label",
    "initializer_range",
    "is_decoder",
    "is_encoder_decoder",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "pretraining_tp",
    "return_dict",
    "tokenizer_class",
    "transformers_version",
    "use_cache",
];

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

    /// The layer types of a config that does not list them: three sliding, one full.
    pub(crate) fn pattern(layers: usize) -> Vec<LayerKind> {
        let kind = |layer: usize| match layer % 4 {
            3 => LayerKind::Full,
            _ => LayerKind::Sliding,
        };
        (0..layers).map(kind).collect()
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
}

/// The validated shape of a Spark-X2.5 model. Every count is positive and every product of two
/// counts that the model needs fits in `usize`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelConfig {
    /// `model_type` of config.json.
    pub model_type: String,
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
    /// A missing `layer_types` is three sliding and one full layer in turn, missing gate keys are
    /// the only gate there is, a missing `max_position_embeddings` is 8192 (each with a warning),
    /// and a missing `tie_word_embeddings` is false. An unknown key is refused when its name tells
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
        let config = reader.config()?;
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
            let ids = reader.token_ids("eos_token_id", self.vocab_size)?;
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
        let mut rope_parameters = Map::new();
        for kind in LayerKind::ALL {
            if let Some(rope) = self.rope(kind) {
                let factor = rope.dims as f64 / self.head_dim as f64;
                let entry = json!({
                    "partial_rotary_factor": factor,
                    "rope_theta": rope.theta,
                    "rope_type": "default",
                });
                rope_parameters.insert(kind.name().to_owned(), entry);
            }
        }
        let eos_token_id = match self.eos_token_ids.as_slice() {
            [] => Value::Null,
            [id] => json!(id),
            ids => json!(ids),
        };
        let dtype = self.dtype.and_then(|dtype| {
            DTYPES.iter().find(|(_, known)| *known == dtype).map(|(name, _)| *name)
        });
        let config = json!({
            "architectures": ["Spark2_5ForCausalLM"],
            "model_type": self.model_type,
            "dtype": dtype,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers(),
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "sliding_window": self.sliding_window,
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "hidden_act": "gelu",
            "gate_attn_act_mode": "sigmoid",
            "headwise_attn_output_gate": true,
            "attention_bias": false,
            "mlp_bias": false,
            "attention_dropout": 0.0,
            "tie_word_embeddings": self.tie_word_embeddings,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos_token_id,
            "pad_token_id": self.pad_token_id,
            "layer_types": self.layer_types,
            "rope_parameters": rope_parameters,
        });
        format!("{config:#}\n")
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

/// Element types as config.json spells them.
const DTYPES: &[(&str, DType)] =
    &[("float32", DType::F32), ("float16", DType::F16), ("bfloat16", DType::BF16)];

/// The object of one file and what is said about it.
struct Reader {
    file: PathBuf,
    map: Map<String, Value>,
    warnings: Vec<String>,
}

impl Reader {
    fn config(&mut self) -> Result<ModelConfig, CheckpointError> {
        match self.get("model_type") {
            Some(Value::String(known)) if known == MODEL_TYPE => {}
            value => {
                return Err(CheckpointError::ModelType {
                    file: self.file.clone(),
                    key: "model_type",
                    value: show(value),
                    known: "\"spark2_5\"",
                    version: env!("CARGO_PKG_VERSION"),
                });
            }
        }
        self.refuse_other_maths()?;

        let hidden_size = self.size("hidden_size", MAX_SIZE)?;
        let intermediate_size = self.size("intermediate_size", MAX_SIZE)?;
        let num_attention_heads = self.size("num_attention_heads", MAX_SIZE)?;
        let num_key_value_heads = self.size("num_key_value_heads", MAX_SIZE)?;
        let head_dim = self.size("head_dim", MAX_SIZE)?;
        let vocab_size = self.size("vocab_size", MAX_SIZE)?;
        if !num_attention_heads.is_multiple_of(num_key_value_heads) {
            return Err(self.error(
                "num_attention_heads",
                format!("a multiple of num_key_value_heads, which is {num_key_value_heads}"),
            ));
        }
        if let Some((key, other)) = unaddressable(&[
            ("vocab_size", vocab_size, "hidden_size", hidden_size),
            ("intermediate_size", intermediate_size, "hidden_size", hidden_size),
            ("num_attention_heads", num_attention_heads.saturating_mul(3), "head_dim", head_dim),
            (
                "num_attention_heads",
                num_attention_heads.saturating_mul(3).saturating_mul(head_dim),
                "hidden_size",
                hidden_size,
            ),
        ]) {
            let accepted = format!("a number whose product with {other} can be addressed");
            return Err(self.error(key, accepted));
        }

        let layer_types = self.layer_types()?;
        let has = |kind| layer_types.contains(&kind);
        let sliding_window = if has(LayerKind::Sliding) {
            if self.flag("use_sliding_window")? == Some(false) {
                return Err(self.error(
                    "use_sliding_window",
                    "true or absent, since there are sliding_attention layers".into(),
                ));
            }
            let accepted = format!(
                "a whole number from 2 to {MAX_SIZE}, since there are sliding_attention layers"
            );
            Some(self.size_from("sliding_window", 2, MAX_SIZE, &accepted)?)
        } else {
            None
        };
        for key in ["rope_theta", "partial_rotary_factor"] {
            if self.get(key).is_some() && self.get("rope_parameters").is_some() {
                self.warn(format!("{key} is ignored; rope_parameters has it for each layer type"));
            }
        }
        let rope_sliding = self.rope(LayerKind::Sliding, has(LayerKind::Sliding), head_dim)?;
        let rope_full = self.rope(LayerKind::Full, has(LayerKind::Full), head_dim)?;

        let max_position_embeddings = if self.get("max_position_embeddings").is_some() {
            self.size("max_position_embeddings", MAX_SIZE)?
        } else {
            self.warn(format!(
                "max_position_embeddings is missing; {DEFAULT_MAX_POSITIONS} is assumed"
            ));
            DEFAULT_MAX_POSITIONS
        };
        let rms_norm_eps = self.number(self.get("rms_norm_eps"), "rms_norm_eps", &EPSILONS)?;
        Ok(ModelConfig {
            model_type: MODEL_TYPE.to_owned(),
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
            tie_word_embeddings: self.flag("tie_word_embeddings")?.unwrap_or(false),
            dtype: self.dtype()?,
            eos_token_ids: self.token_ids("eos_token_id", vocab_size)?,
            bos_token_id: self.token_ids("bos_token_id", vocab_size)?.first().copied(),
            pad_token_id: self.token_ids("pad_token_id", vocab_size)?.first().copied(),
        })
    }

    /// Checks every key that is only accepted with one meaning, and every key that is not known.
    fn refuse_other_maths(&mut self) -> Result<(), CheckpointError> {
        if self.get("quantization_config").is_some() {
            return Err(self.error(
                "quantization_config",
                "absent: quantized checkpoints (FP8, INT8 and others) are not read, use the \
                 float release"
                    .into(),
            ));
        }
        match self.get("hidden_act") {
            Some(Value::String(act)) if act == "gelu" => {}
            _ => return Err(self.error("hidden_act", "\"gelu\"".into())),
        }
        match self.get("gate_attn_act_mode") {
            Some(Value::String(mode)) if mode == "sigmoid" => {}
            None => self.warn("gate_attn_act_mode is missing; \"sigmoid\" is assumed".into()),
            Some(_) => return Err(self.error("gate_attn_act_mode", "\"sigmoid\"".into())),
        }
        match self.flag("headwise_attn_output_gate")? {
            Some(true) => {}
            None => self.warn("headwise_attn_output_gate is missing; true is assumed".into()),
            Some(false) => return Err(self.error("headwise_attn_output_gate", "true".into())),
        }
        for key in ["attention_bias", "mlp_bias"] {
            if self.flag(key)? == Some(true) {
                return Err(self.error(key, "false: the architecture has no biases".into()));
            }
        }
        let mut warnings = Vec::new();
        for (key, value) in &self.map {
            let known = |list: &[&str]| list.contains(&key.as_str());
            if known(READ) || known(IGNORED) || is_neutral(value, 0.0) && !value.is_number() {
                continue;
            }
            let lower = key.to_ascii_lowercase();
            let maths = MATHS.iter().filter(|(part, _)| lower.contains(part));
            if maths.clone().any(|(_, neutral)| is_neutral(value, *neutral)) {
                continue;
            }
            if maths.count() > 0 {
                return Err(self.error(
                    key,
                    "absent or null: the key is not known, and its name tells of maths that this \
                     architecture does not have"
                        .into(),
                ));
            }
            warnings.push(format!("key {:?} is not known and is ignored", shorten(key)));
        }
        warnings.into_iter().for_each(|warning| self.warn(warning));
        Ok(())
    }

    fn layer_types(&mut self) -> Result<Vec<LayerKind>, CheckpointError> {
        let layers = self.size("num_hidden_layers", MAX_LAYERS)?;
        let accepted = "a list of \"sliding_attention\" and \"full_attention\"";
        let listed = match self.get("layer_types") {
            None => {
                self.warn(
                    "layer_types is missing; three sliding and one full layer in turn are assumed"
                        .into(),
                );
                return Ok(LayerKind::pattern(layers));
            }
            Some(Value::Array(listed)) => listed,
            Some(_) => return Err(self.error("layer_types", accepted.into())),
        };
        if listed.len() != layers {
            return Err(CheckpointError::Config {
                file: self.file.clone(),
                key: "layer_types".into(),
                value: format!("a list of {} entries", listed.len()),
                accepted: format!("{layers} entries, as num_hidden_layers says"),
            });
        }
        let mut kinds = Vec::new();
        for (layer, value) in listed.iter().enumerate() {
            let kind = LayerKind::ALL.into_iter().find(|kind| value.as_str() == Some(kind.name()));
            kinds.push(kind.ok_or_else(|| {
                self.error_at(
                    &format!("layer_types[{layer}]"),
                    Some(value),
                    "\"sliding_attention\" or \"full_attention\"".into(),
                )
            })?);
        }
        Ok(kinds)
    }

    /// The rotary embedding of layers of `kind`, which is `needed` when there are such layers.
    ///
    /// Theta and factor are those of the nested entry alone. A factor that the entry leaves out
    /// is 1, unless the config has one at the top level too: then it is not clear whether that
    /// one is meant, and the config is refused.
    fn rope(
        &self,
        kind: LayerKind,
        needed: bool,
        head_dim: usize,
    ) -> Result<Option<Rope>, CheckpointError> {
        let name = kind.name();
        let entry_key = format!("rope_parameters.{name}");
        let shape = "an object with rope_theta and partial_rotary_factor";
        let parameters = match self.get("rope_parameters") {
            Some(Value::Object(parameters)) => Some(parameters),
            None => None,
            Some(_) => {
                return Err(self.error(
                    "rope_parameters",
                    "an object with one entry for each layer type in use".into(),
                ));
            }
        };
        for (key, value) in parameters.into_iter().flatten() {
            if !LayerKind::ALL.iter().any(|kind| kind.name() == key) && !value.is_null() {
                return Err(self.error_at(
                    &format!("rope_parameters.{}", shorten(key)),
                    Some(value),
                    "entries \"sliding_attention\" and \"full_attention\" only; values for both \
                     layer types at once are not taken"
                        .into(),
                ));
            }
        }
        let entry = match parameters.and_then(|parameters| parameters.get(name)) {
            Some(Value::Object(entry)) => entry,
            None | Some(Value::Null) if !needed => return Ok(None),
            None | Some(Value::Null) => {
                let flat = match self.get("rope_theta") {
                    Some(theta) => format!(
                        "; the flat rope_theta {} is not taken for the layer types, which have \
                         different ones",
                        show(Some(theta))
                    ),
                    None => String::new(),
                };
                return Err(self.error_at(&entry_key, None, format!("{shape}{flat}")));
            }
            value => return Err(self.error_at(&entry_key, value, shape.into())),
        };
        for (key, value) in entry {
            let (known, accepted) = match key.as_str() {
                "rope_theta" | "partial_rotary_factor" => continue,
                "rope_type" | "type" => (value.as_str() == Some("default"), "\"default\""),
                _ => (false, "absent: no scaling of the rotary embedding is known"),
            };
            if !known && !value.is_null() {
                let key = format!("{entry_key}.{}", shorten(key));
                return Err(self.error_at(&key, Some(value), accepted.into()));
            }
        }
        let theta_key = format!("{entry_key}.rope_theta");
        let theta = self.number(entry.get("rope_theta"), &theta_key, &THETAS)?;
        let factor_key = format!("{entry_key}.partial_rotary_factor");
        let factor = match entry.get("partial_rotary_factor").filter(|value| !value.is_null()) {
            Some(value) => self.number(Some(value), &factor_key, &(0.0..=1.0))?,
            None => match self.get("partial_rotary_factor") {
                None => 1.0,
                Some(outer) => {
                    return Err(self.error_at(
                        &factor_key,
                        None,
                        format!(
                            "a number, since partial_rotary_factor {} at the top level may or may \
                             not be meant for this layer type",
                            show(Some(outer))
                        ),
                    ));
                }
            },
        };
        let dims = head_dim as f64 * factor;
        let rounded = dims.round();
        let is_even_count = (dims - rounded).abs() < 1e-6
            && rounded >= 2.0
            && rounded <= head_dim as f64
            && rounded % 2.0 == 0.0;
        if !is_even_count {
            return Err(self.error_at(
                &factor_key,
                Some(&json!(factor)),
                format!(
                    "a factor that makes an even number of rotary dims from 2 to head_dim; of \
                     head_dim {head_dim} it makes {dims}"
                ),
            ));
        }
        Ok(Some(Rope { theta, dims: rounded as usize }))
    }

    fn dtype(&mut self) -> Result<Option<DType>, CheckpointError> {
        let mut found = Vec::new();
        for key in ["dtype", "torch_dtype"] {
            if let Some(value) = self.get(key) {
                let known = DTYPES.iter().find(|(name, _)| value.as_str() == Some(name));
                let Some((_, dtype)) = known else {
                    let accepted = "\"float32\", \"float16\" or \"bfloat16\"";
                    return Err(self.error(key, accepted.into()));
                };
                found.push(*dtype);
            }
        }
        if let [dtype, other] = *found
            && dtype != other
        {
            self.warn(format!("dtype {dtype} and torch_dtype {other} disagree; {dtype} is used"));
        }
        Ok(found.first().copied())
    }

    /// Token ids of a key that holds one, a list of them or none.
    fn token_ids(&self, key: &str, vocab_size: usize) -> Result<Vec<u32>, CheckpointError> {
        let values = match self.get(key) {
            None => &[],
            Some(Value::Array(values)) if key == "eos_token_id" => values.as_slice(),
            Some(value) => std::slice::from_ref(value),
        };
        let mut ids = Vec::new();
        for value in values {
            let id = value.as_u64().filter(|&id| id < vocab_size as u64);
            let Some(id) = id.and_then(|id| u32::try_from(id).ok()) else {
                let list = if key == "eos_token_id" { ", or a list of such" } else { "" };
                return Err(
                    self.error(key, format!("a token id below vocab_size {vocab_size}{list}"))
                );
            };
            if !ids.contains(&id) {
                ids.push(id);
            }
        }
        Ok(ids)
    }

    fn size(&self, key: &str, limit: u64) -> Result<usize, CheckpointError> {
        self.size_from(key, 1, limit, &format!("a whole number from 1 to {limit}"))
    }

    fn size_from(
        &self,
        key: &str,
        least: u64,
        limit: u64,
        accepted: &str,
    ) -> Result<usize, CheckpointError> {
        self.get(key)
            .and_then(Value::as_u64)
            .filter(|size| (least..=limit).contains(size))
            .and_then(|size| usize::try_from(size).ok())
            .ok_or_else(|| self.error(key, accepted.to_owned()))
    }

    fn flag(&self, key: &str) -> Result<Option<bool>, CheckpointError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(_) => Err(self.error(key, "true or false".into())),
        }
    }

    fn number(
        &self,
        value: Option<&Value>,
        key: &str,
        accepted: &RangeInclusive<f64>,
    ) -> Result<f64, CheckpointError> {
        value
            .and_then(Value::as_f64)
            .filter(|number| accepted.contains(number))
            .ok_or_else(|| self.error_at(key, value, show_range(accepted)))
    }

    /// The value of a key; null counts as missing.
    fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    fn warn(&mut self, warning: String) {
        self.warnings.push(format!("{}: {warning}", self.file.display()));
    }

    fn error(&self, key: &str, accepted: String) -> CheckpointError {
        self.error_at(key, self.map.get(key), accepted)
    }

    fn error_at(&self, key: &str, value: Option<&Value>, accepted: String) -> CheckpointError {
        let key = shorten(key).into_owned();
        CheckpointError::Config { file: self.file.clone(), key, value: show(value), accepted }
    }
}

/// What a number in `range` is called in messages.
pub(crate) fn show_range(range: &RangeInclusive<f64>) -> String {
    format!("a number from {:?} to {:?}", range.start(), range.end())
}

/// The keys of the first two counts whose product, as bytes of f32, cannot be addressed.
pub(crate) fn unaddressable<'a>(
    products: &[(&'a str, usize, &'a str, usize)],
) -> Option<(&'a str, &'a str)> {
    let found = products.iter().find(|(_, count, _, other)| {
        let bytes = count.checked_mul(*other).and_then(|product| product.checked_mul(4));
        bytes.is_none_or(|bytes| bytes > isize::MAX as usize)
    });
    found.map(|&(key, _, other, _)| (key, other))
}

/// Whether a value of an unknown key says that its feature is off.
fn is_neutral(value: &Value, number: f64) -> bool {
    value.is_null() || *value == Value::Bool(false) || value.as_f64() == Some(number)
}

/// A value as JSON, shortened when very long.
fn show(value: Option<&Value>) -> String {
    match value {
        None => "missing".into(),
        Some(value) => shorten(&value.to_string()).into_owned(),
    }
}
