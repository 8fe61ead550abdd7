//! The model's config from the metadata of a GGUF file, as strict as for config.json.

use super::{Gguf, GgufValue};
use crate::config::{
    EPSILONS, MATHS, MAX_LAYERS, MAX_SIZE, MODEL_TYPE, THETAS, show_range, unaddressable,
};
use crate::json::shorten;
use crate::{CheckpointError, LayerKind, ModelConfig, Rope};
use firesteel_tensor::DType;
use std::ops::RangeInclusive;

pub(crate) const ARCHITECTURE: &str = "general.architecture";
pub(crate) const FILE_TYPE: &str = "general.file_type";
pub(crate) const BLOCK_COUNT: &str = "spark2_5.block_count";
pub(crate) const CONTEXT_LENGTH: &str = "spark2_5.context_length";
pub(crate) const EMBEDDING_LENGTH: &str = "spark2_5.embedding_length";
pub(crate) const FEED_FORWARD_LENGTH: &str = "spark2_5.feed_forward_length";
pub(crate) const VOCAB_SIZE: &str = "spark2_5.vocab_size";
pub(crate) const HEAD_COUNT: &str = "spark2_5.attention.head_count";
pub(crate) const HEAD_COUNT_KV: &str = "spark2_5.attention.head_count_kv";
pub(crate) const KEY_LENGTH: &str = "spark2_5.attention.key_length";
pub(crate) const VALUE_LENGTH: &str = "spark2_5.attention.value_length";
pub(crate) const RMS_EPSILON: &str = "spark2_5.attention.layer_norm_rms_epsilon";
pub(crate) const SLIDING_WINDOW: &str = "spark2_5.attention.sliding_window";
pub(crate) const SLIDING_WINDOW_PATTERN: &str = "spark2_5.attention.sliding_window_pattern";
pub(crate) const ROPE_BASE: [&str; 2] = ["spark2_5.rope.freq_base_swa", "spark2_5.rope.freq_base"];
pub(crate) const ROPE_DIMS: [&str; 2] =
    ["spark2_5.rope.dimension_count_swa", "spark2_5.rope.dimension_count"];
pub(crate) const BOS: &str = "tokenizer.ggml.bos_token_id";
pub(crate) const EOS: &str = "tokenizer.ggml.eos_token_id";
pub(crate) const PADDING: &str = "tokenizer.ggml.padding_token_id";
/// Ids that end a turn or a message; generation ends there as at the end of a sequence.
pub(crate) const OTHER_ENDS: [&str; 2] =
    ["tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"];

/// Keys of the architecture that are read.
const READ: &[&str] = &[
    BLOCK_COUNT,
    CONTEXT_LENGTH,
    EMBEDDING_LENGTH,
    FEED_FORWARD_LENGTH,
    VOCAB_SIZE,
    HEAD_COUNT,
    HEAD_COUNT_KV,
    KEY_LENGTH,
    VALUE_LENGTH,
    RMS_EPSILON,
    SLIDING_WINDOW,
    SLIDING_WINDOW_PATTERN,
    ROPE_BASE[0],
    ROPE_BASE[1],
    ROPE_DIMS[0],
    ROPE_DIMS[1],
];

/// Values of `general.file_type` whose matrices are numbers.
pub(crate) const FLOAT_FILE_TYPES: &[(u64, DType)] =
    &[(0, DType::F32), (1, DType::F16), (32, DType::BF16)];

/// The config of a file, and warnings. `tied` says whether there is no output head.
pub(crate) fn read_config(
    gguf: &Gguf,
    tied: bool,
) -> Result<(ModelConfig, Vec<String>), CheckpointError> {
    let reader = Reader { gguf };
    reader.check_model_type()?;
    let warnings = reader.refuse_other_maths()?;

    let hidden_size = reader.size(EMBEDDING_LENGTH, MAX_SIZE)?;
    let layers = reader.size(BLOCK_COUNT, MAX_LAYERS)?;
    let intermediate_size = reader.layer_size(FEED_FORWARD_LENGTH)?;
    let num_attention_heads = reader.layer_size(HEAD_COUNT)?;
    let num_key_value_heads = reader.layer_size(HEAD_COUNT_KV)?;
    let head_dim = reader.size(KEY_LENGTH, MAX_SIZE)?;
    if reader.get(VALUE_LENGTH).is_some_and(|value| value.as_u64() != Some(head_dim as u64)) {
        let accepted = format!("{head_dim}, as {KEY_LENGTH} is");
        return Err(reader.error(VALUE_LENGTH, accepted));
    }
    if !num_attention_heads.is_multiple_of(num_key_value_heads) {
        let accepted = format!("a multiple of {HEAD_COUNT_KV}, which is {num_key_value_heads}");
        return Err(reader.error(HEAD_COUNT, accepted));
    }
    let vocab_size = reader.vocab_size()?;
    let heads = num_attention_heads.saturating_mul(3);
    if let Some((key, other)) = unaddressable(&[
        (VOCAB_SIZE, vocab_size, EMBEDDING_LENGTH, hidden_size),
        (FEED_FORWARD_LENGTH, intermediate_size, EMBEDDING_LENGTH, hidden_size),
        (HEAD_COUNT, heads, KEY_LENGTH, head_dim),
        (HEAD_COUNT, heads.saturating_mul(head_dim), EMBEDDING_LENGTH, hidden_size),
    ]) {
        let accepted = format!("a number whose product with {other} can be addressed");
        return Err(reader.error(key, accepted));
    }

    let layer_types = reader.layer_types(layers)?;
    let has = |kind| layer_types.contains(&kind);
    let sliding_window = match has(LayerKind::Sliding) {
        true => Some(reader.size_from(SLIDING_WINDOW, 2, MAX_SIZE)?),
        false => None,
    };
    let mut ropes = [None, None];
    for ((rope, kind), (base, dims)) in
        ropes.iter_mut().zip(LayerKind::ALL).zip(ROPE_BASE.into_iter().zip(ROPE_DIMS))
    {
        if has(kind) {
            *rope = Some(reader.rope(base, dims, head_dim)?);
        }
    }
    let [rope_sliding, rope_full] = ropes;

    let mut eos_token_ids: Vec<u32> = Vec::new();
    for key in [EOS].into_iter().chain(OTHER_ENDS) {
        let id = reader.token_id(key, vocab_size)?;
        eos_token_ids.extend(id.filter(|id| !eos_token_ids.contains(id)));
    }
    let file_type = reader.get(FILE_TYPE).and_then(|value| value.as_u64());
    let dtype = FLOAT_FILE_TYPES.iter().find(|(code, _)| Some(*code) == file_type);
    let config = ModelConfig {
        model_type: MODEL_TYPE.to_owned(),
        hidden_size,
        intermediate_size,
        num_attention_heads,
        num_key_value_heads,
        head_dim,
        vocab_size,
        sliding_window,
        max_position_embeddings: reader.size(CONTEXT_LENGTH, MAX_SIZE)?,
        rms_norm_eps: reader.number(RMS_EPSILON, &EPSILONS)?,
        layer_types,
        rope_sliding,
        rope_full,
        tie_word_embeddings: tied,
        dtype: dtype.map(|(_, dtype)| *dtype),
        eos_token_ids,
        bos_token_id: reader.token_id(BOS, vocab_size)?,
        pad_token_id: reader.token_id(PADDING, vocab_size)?,
    };
    Ok((config, warnings))
}

/// Reads typed values, with errors that name file and key.
pub(super) struct Reader<'a> {
    pub(super) gguf: &'a Gguf,
}

impl<'a> Reader<'a> {
    pub(super) fn get(&self, key: &str) -> Option<GgufValue<'a>> {
        self.gguf.get(key)
    }

    pub(super) fn error(&self, key: &str, accepted: String) -> CheckpointError {
        let value = self.get(key).map_or_else(|| "missing".to_owned(), |v| v.to_string());
        let key = shorten(key).into_owned();
        CheckpointError::Config { file: self.gguf.path().into(), key, value, accepted }
    }

    fn check_model_type(&self) -> Result<(), CheckpointError> {
        let Some(value) = self.get(ARCHITECTURE) else {
            return Err(self.error(ARCHITECTURE, format!("{MODEL_TYPE:?}")));
        };
        if value.as_str() != Some(MODEL_TYPE) {
            return Err(CheckpointError::ModelType {
                file: self.gguf.path().into(),
                key: ARCHITECTURE,
                value: value.to_string(),
                known: "\"spark2_5\"",
                version: env!("CARGO_PKG_VERSION"),
            });
        }
        if self.get("split.count").is_some_and(|count| !matches!(count.as_u64(), Some(0 | 1))) {
            let accepted = "1 or absent: merge the parts of a split file into one";
            return Err(self.error("split.count", accepted.into()));
        }
        Ok(())
    }

    /// Checks every key of the architecture that is not known, by the rule of config.json.
    fn refuse_other_maths(&self) -> Result<Vec<String>, CheckpointError> {
        let mut warnings = Vec::new();
        for (key, value) in self.gguf.metadata() {
            let Some(rest) = key.strip_prefix("spark2_5.") else { continue };
            if READ.contains(&key) || value.as_bool() == Some(false) {
                continue;
            }
            let number = value.as_u64().map(|number| number as f64).or(value.as_f64());
            let lower = rest.to_ascii_lowercase();
            let maths = MATHS.iter().filter(|(part, _)| lower.contains(part));
            if value.as_str() == Some("none") || maths.clone().any(|(_, n)| number == Some(*n)) {
                continue;
            }
            if maths.count() > 0 {
                let accepted = "absent: the key is not known, and its name tells of maths that \
                                this architecture does not have";
                return Err(self.error(key, accepted.into()));
            }
            let file = self.gguf.path().display();
            warnings.push(format!("{file}: key {:?} is not known and is ignored", shorten(key)));
        }
        Ok(warnings)
    }

    fn size(&self, key: &str, limit: u64) -> Result<usize, CheckpointError> {
        self.size_from(key, 1, limit)
    }

    fn size_from(&self, key: &str, least: u64, limit: u64) -> Result<usize, CheckpointError> {
        let size = self.get(key).and_then(|value| value.as_u64());
        size.filter(|size| (least..=limit).contains(size))
            .and_then(|size| usize::try_from(size).ok())
            .ok_or_else(|| self.error(key, format!("a whole number from {least} to {limit}")))
    }

    /// A size that may be given for each layer, if it is the same for all.
    fn layer_size(&self, key: &str) -> Result<usize, CheckpointError> {
        let Some(array) = self.get(key).and_then(|value| value.as_array()) else {
            return self.size(key, MAX_SIZE);
        };
        let mut sizes = array.iter().map(|value| value.as_u64());
        let first = sizes.next().flatten().filter(|size| (1..=MAX_SIZE).contains(size));
        first
            .filter(|first| sizes.all(|size| size == Some(*first)))
            .and_then(|size| usize::try_from(size).ok())
            .ok_or_else(|| {
                let accepted = format!("a whole number from 1 to {MAX_SIZE}, equal in all layers");
                self.error(key, accepted)
            })
    }

    fn number(&self, key: &str, accepted: &RangeInclusive<f64>) -> Result<f64, CheckpointError> {
        let number = self.get(key).and_then(|value| value.as_f64());
        number
            .filter(|number| accepted.contains(number))
            .ok_or_else(|| self.error(key, show_range(accepted)))
    }

    /// The size given, or the number of tokens; they agree where both are there.
    fn vocab_size(&self) -> Result<usize, CheckpointError> {
        let tokens = self.get(super::tokenizer::TOKENS).and_then(|value| value.as_array());
        let size = match (self.get(VOCAB_SIZE), tokens) {
            (None, Some(tokens)) if !tokens.is_empty() => tokens.len(),
            _ => self.size(VOCAB_SIZE, MAX_SIZE)?,
        };
        match tokens {
            Some(tokens) if tokens.len() != size => {
                let accepted = format!("{}, the length of tokenizer.ggml.tokens", tokens.len());
                Err(self.error(VOCAB_SIZE, accepted))
            }
            _ => Ok(size),
        }
    }

    /// The kind of each layer: of a truth value a layer, or of a number n, by which every n-th
    /// layer is full.
    fn layer_types(&self, layers: usize) -> Result<Vec<LayerKind>, CheckpointError> {
        let kind = |sliding| if sliding { LayerKind::Sliding } else { LayerKind::Full };
        let value = self.get(SLIDING_WINDOW_PATTERN);
        if let Some(period) = value.and_then(|value| value.as_u64()).filter(|n| *n > 0) {
            return Ok((1..=layers as u64).map(|n| kind(!n.is_multiple_of(period))).collect());
        }
        let array = value.and_then(|value| value.as_array()).filter(|a| a.len() == layers);
        array
            .and_then(|array| array.iter().map(|value| value.as_bool().map(kind)).collect())
            .ok_or_else(|| {
                let accepted = format!(
                    "an array of {layers} bools, as {BLOCK_COUNT} says, true for sliding layers; \
                     or a number n for which every n-th layer is full"
                );
                self.error(SLIDING_WINDOW_PATTERN, accepted)
            })
    }

    fn rope(&self, base: &str, dims: &str, head_dim: usize) -> Result<Rope, CheckpointError> {
        let theta = self.number(base, &THETAS)?;
        let count = self.get(dims).and_then(|value| value.as_u64());
        let count = count.and_then(|count| usize::try_from(count).ok());
        let even = count.filter(|n| (2..=head_dim).contains(n) && n.is_multiple_of(2));
        let dims = even.ok_or_else(|| {
            self.error(dims, format!("an even number from 2 to {KEY_LENGTH} {head_dim}"))
        })?;
        Ok(Rope { theta, dims })
    }

    pub(super) fn token_id(
        &self,
        key: &str,
        vocab_size: usize,
    ) -> Result<Option<u32>, CheckpointError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let id = value.as_u64().filter(|id| *id < vocab_size as u64);
        match id.and_then(|id| u32::try_from(id).ok()) {
            Some(id) => Ok(Some(id)),
            None => Err(self.error(key, format!("a token id below {vocab_size}"))),
        }
    }
}
