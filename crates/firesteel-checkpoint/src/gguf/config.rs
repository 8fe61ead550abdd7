//! The model's config from the metadata of a GGUF file, as strict as for config.json.

use super::{Gguf, GgufValue};
use crate::config::{
    EPSILONS, FACTORS, MAGNITUDES, MATHS, MAX_SIZE, ROTATIONS, STRETCHED_THETAS, Spelling, THETAS,
    TokenIds, describe, show_counts, show_range,
};
use crate::family::{Count, RopeSpelling};
use crate::json::shorten;
use crate::{CheckpointError, Family, LayerKind, ModelConfig, Rope, Yarn};
use firesteel_tensor::DType;
use std::ops::RangeInclusive;

pub(crate) const ARCHITECTURE: &str = "general.architecture";
pub(crate) const FILE_TYPE: &str = "general.file_type";
pub(crate) const BOS: &str = "tokenizer.ggml.bos_token_id";
pub(crate) const EOS: &str = "tokenizer.ggml.eos_token_id";
pub(crate) const PADDING: &str = "tokenizer.ggml.padding_token_id";
/// Ids that end a turn or a message; generation ends there as at the end of a sequence.
pub(crate) const OTHER_ENDS: [&str; 2] =
    ["tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"];

/// The keys of a family, behind its architecture.
#[derive(Debug, Clone, Copy)]
pub(super) struct Keys(pub(super) Family);

impl Keys {
    /// Parts of [`Keys::scaling`]: the rotations of a pair.
    pub(super) const BETAS: [&str; 2] = ["yarn_beta_fast", "yarn_beta_slow"];
    /// Part of [`Keys::scaling`]: cosines and sines are this times what yarn makes them.
    pub(super) const MAGNITUDE: &str = "attn_factor";
    /// Part of [`Keys::scaling`]: what cosines and sines are multiplied with in the checkpoint that the
    /// public converter read. llama.cpp does not read it for these architectures.
    const CONVERTED_MAGNITUDE: &str = "yarn_attn_factor";
    /// Part of [`Keys::scaling`]: tells of the training and changes nothing.
    const FINETUNED: &str = "finetuned";

    fn of(self, key: &str) -> String {
        format!("{}.{key}", self.0.architecture())
    }

    pub(super) fn count(self, count: Count) -> String {
        self.of(count.gguf_key())
    }

    pub(super) fn value_length(self) -> String {
        self.of("attention.value_length")
    }

    pub(super) fn epsilon(self) -> String {
        self.of("attention.layer_norm_rms_epsilon")
    }

    pub(super) fn window_pattern(self) -> String {
        self.of("attention.sliding_window_pattern")
    }

    pub(super) fn rope_base(self, kind: LayerKind) -> String {
        self.of(match kind {
            LayerKind::Sliding => "rope.freq_base_swa",
            LayerKind::Full => "rope.freq_base",
        })
    }

    pub(super) fn rope_dims(self, kind: LayerKind) -> String {
        self.of(match kind {
            LayerKind::Sliding => "rope.dimension_count_swa",
            LayerKind::Full => "rope.dimension_count",
        })
    }

    pub(super) fn scaling(self, part: &str) -> String {
        self.of(&format!("rope.scaling.{part}"))
    }

    fn causal(self) -> String {
        self.of("attention.causal")
    }

    /// Keys that are read.
    fn read(self) -> Vec<String> {
        use Count::{
            HeadDim, Heads, Hidden, Intermediate, KeyValueHeads, Layers, Positions, Vocabulary,
            Window,
        };
        let counts = [Hidden, Intermediate, Layers, Heads, KeyValueHeads, HeadDim, Vocabulary];
        let mut read: Vec<String> = counts.into_iter().map(|count| self.count(count)).collect();
        read.extend([self.count(Positions), self.value_length(), self.epsilon(), self.causal()]);
        read.extend([self.rope_base(LayerKind::Full), self.rope_dims(LayerKind::Full)]);
        if self.0.description().window_pattern {
            read.extend([self.count(Window), self.window_pattern()]);
            read.extend([self.rope_base(LayerKind::Sliding), self.rope_dims(LayerKind::Sliding)]);
        }
        if self.knows_yarn() {
            let parts = ["type", "factor", "original_context_length", Self::FINETUNED];
            let parts = parts.into_iter().chain(Self::BETAS);
            let parts = parts.chain([Self::MAGNITUDE, Self::CONVERTED_MAGNITUDE]);
            read.extend(parts.map(|part| self.scaling(part)));
        }
        read
    }

    fn knows_yarn(self) -> bool {
        self.0.description().config.rope == RopeSpelling::Flat
    }
}

/// Values of `general.file_type` whose matrices are numbers.
pub(crate) const FLOAT_FILE_TYPES: &[(u64, DType)] =
    &[(0, DType::F32), (1, DType::F16), (32, DType::BF16)];

/// The config of a file, and warnings. The embedding is the head where there is no other.
pub(crate) fn read_config(gguf: &Gguf) -> Result<(ModelConfig, Vec<String>), CheckpointError> {
    let reader = Reader { gguf };
    let family = reader.family()?;
    let mut described = Described { reader, keys: Keys(family), warnings: Vec::new() };
    described.refuse_other_maths()?;
    let config = describe(family, &mut described)?;
    let value_length = described.keys.value_length();
    let value = described.reader.get(&value_length);
    if value.is_some_and(|value| value.as_u64() != Some(config.head_dim as u64)) {
        let accepted = format!("{}, as {} is", config.head_dim, described.key(Count::HeadDim));
        return Err(described.error(&value_length, accepted));
    }
    Ok((config, described.warnings))
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

    fn family(&self) -> Result<Family, CheckpointError> {
        let known = Family::known(Family::architecture);
        let Some(value) = self.get(ARCHITECTURE) else {
            return Err(self.error(ARCHITECTURE, known));
        };
        let Some(family) = value.as_str().and_then(Family::of_architecture) else {
            return Err(CheckpointError::ModelType {
                file: self.gguf.path().into(),
                key: ARCHITECTURE,
                value: value.to_string(),
                known,
                version: env!("CARGO_PKG_VERSION"),
            });
        };
        if self.get("split.count").is_some_and(|count| !matches!(count.as_u64(), Some(0 | 1))) {
            let accepted = "1 or absent: merge the parts of a split file into one";
            return Err(self.error("split.count", accepted.into()));
        }
        Ok(family)
    }

    fn number(&self, key: &str, accepted: &RangeInclusive<f64>) -> Result<f64, CheckpointError> {
        let number = self.get(key).and_then(|value| value.as_f64());
        number
            .filter(|number| accepted.contains(number))
            .ok_or_else(|| self.error(key, show_range(accepted)))
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

/// The metadata of a file as a description of a model.
struct Described<'a> {
    reader: Reader<'a>,
    keys: Keys,
    warnings: Vec<String>,
}

impl Described<'_> {
    /// Checks every key of the architecture that is not known, by the rule of config.json.
    fn refuse_other_maths(&mut self) -> Result<(), CheckpointError> {
        let causal = self.keys.causal();
        if self.reader.get(&causal).is_some_and(|value| value.as_bool() != Some(true)) {
            let accepted = "true or absent: models whose tokens see later ones are not read";
            return Err(self.error(&causal, accepted.into()));
        }
        let (prefix, read) = (self.keys.of(""), self.keys.read());
        for (key, value) in self.reader.gguf.metadata() {
            let Some(rest) = key.strip_prefix(&prefix) else { continue };
            if read.iter().any(|known| known == key) || value.as_bool() == Some(false) {
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
            self.warn(format!("key {:?} is not known and is ignored", shorten(key)));
        }
        Ok(())
    }

    /// The size given, or the number of tokens; they agree where both are there.
    fn vocab_size(&self) -> Result<usize, CheckpointError> {
        let key = self.key(Count::Vocabulary);
        let tokens = self.reader.get(super::tokenizer::TOKENS).and_then(|value| value.as_array());
        let size = match (self.reader.get(&key), tokens) {
            (None, Some(tokens)) if !tokens.is_empty() => tokens.len(),
            _ => self.whole(&key, 1..=MAX_SIZE, "")?,
        };
        match tokens {
            Some(tokens) if tokens.len() != size => {
                let accepted = format!("{}, the length of tokenizer.ggml.tokens", tokens.len());
                Err(self.error(&key, accepted))
            }
            _ => Ok(size),
        }
    }

    fn whole(
        &self,
        key: &str,
        accepted: RangeInclusive<u64>,
        why: &str,
    ) -> Result<usize, CheckpointError> {
        let size = self.reader.get(key).and_then(|value| value.as_u64());
        size.filter(|size| accepted.contains(size))
            .and_then(|size| usize::try_from(size).ok())
            .ok_or_else(|| self.error(key, show_counts(&accepted, why)))
    }

    /// How frequencies are stretched.
    fn yarn(&self) -> Result<Option<Yarn>, CheckpointError> {
        let key = |part: &str| self.keys.scaling(part);
        let kind = self.reader.get(&key("type"));
        match kind.and_then(|kind| kind.as_str()) {
            Some("yarn") => {}
            None | Some("none") if kind.is_none_or(|kind| kind.as_str().is_some()) => {
                // Both numbers are in use for none.
                for part in ["factor", Keys::MAGNITUDE, Keys::CONVERTED_MAGNITUDE] {
                    let value = self.reader.get(&key(part));
                    if value.is_some_and(|value| !matches!(value.as_f64(), Some(0.0 | 1.0))) {
                        let accepted = format!("absent without {}", key("type"));
                        return Err(self.error(&key(part), accepted));
                    }
                }
                return Ok(None);
            }
            _ => {
                let accepted = "\"yarn\", \"none\" or absent: no other scaling is known";
                return Err(self.error(&key("type"), accepted.into()));
            }
        }
        let factor = self.reader.number(&key("factor"), &FACTORS)?;
        let original = key("original_context_length");
        let original_positions = match self.reader.get(&original) {
            Some(_) => self.whole(&original, 1..=MAX_SIZE, "")?,
            None => self.count(Count::Positions, 1..=MAX_SIZE, "")?,
        };
        let mut betas = Yarn::BETAS;
        for (beta, part) in betas.iter_mut().zip(Keys::BETAS) {
            if self.reader.get(&key(part)).is_some() {
                *beta = self.reader.number(&key(part), &ROTATIONS)?;
            }
        }
        let [beta_fast, beta_slow] = betas;
        if beta_slow >= beta_fast {
            return Err(self.error(&key(Keys::BETAS[1]), format!("a number below {beta_fast}")));
        }
        let attention_factor = self.magnitude(factor)?;
        Ok(Some(Yarn { factor, original_positions, beta_fast, beta_slow, attention_factor }))
    }

    /// What cosines and sines of frequencies that are stretched by `factor` are multiplied with.
    fn magnitude(&self, factor: f64) -> Result<f64, CheckpointError> {
        let usual = Yarn::attention_factor_of(factor);
        let converted = self.keys.scaling(Keys::CONVERTED_MAGNITUDE);
        if self.reader.get(&converted).is_some() {
            let value = self.reader.number(&converted, &MAGNITUDES)?;
            // Numbers of a file are f32.
            if value != 1.0 && (value / usual - 1.0).abs() > 1e-6 {
                let accepted = format!("1, {usual} or absent, since its readers compute {usual}");
                return Err(self.error(&converted, accepted));
            }
        }
        let relative = self.keys.scaling(Keys::MAGNITUDE);
        if self.reader.get(&relative).is_none() {
            return Ok(usual);
        }
        let magnitude = usual * self.reader.number(&relative, &MAGNITUDES)?;
        // The share has the precision of f32, and so has what follows from it.
        Ok(GgufValue::F32(magnitude as f32).as_f64().unwrap_or(magnitude))
    }
}

impl Spelling for Described<'_> {
    fn key(&self, count: Count) -> String {
        self.keys.count(count)
    }

    fn has(&self, count: Count) -> bool {
        self.reader.get(&self.key(count)).is_some()
    }

    fn count(
        &self,
        count: Count,
        accepted: RangeInclusive<u64>,
        why: &str,
    ) -> Result<usize, CheckpointError> {
        let key = self.key(count);
        let by_layer = matches!(count, Count::Intermediate | Count::Heads | Count::KeyValueHeads);
        let array = self.reader.get(&key).and_then(|value| value.as_array());
        match array.filter(|_| by_layer) {
            // A size that may be given for each layer, if it is the same for all.
            Some(array) => {
                let mut sizes = array.iter().map(|value| value.as_u64());
                let first = sizes.next().flatten().filter(|size| accepted.contains(size));
                first
                    .filter(|first| sizes.all(|size| size == Some(*first)))
                    .and_then(|size| usize::try_from(size).ok())
                    .ok_or_else(|| self.error(&key, show_counts(&accepted, "equal in all layers")))
            }
            None if count == Count::Vocabulary => self.vocab_size(),
            None => self.whole(&key, accepted, why),
        }
    }

    fn assumed(&self, _: Count) -> Option<usize> {
        None
    }

    fn error(&self, key: &str, accepted: String) -> CheckpointError {
        self.reader.error(key, accepted)
    }

    fn warn(&mut self, warning: String) {
        self.warnings.push(format!("{}: {warning}", self.reader.gguf.path().display()));
    }

    /// Of a truth value a layer, or of a number n, by which every n-th layer is full.
    fn layer_types(&mut self, layers: usize) -> Result<Vec<LayerKind>, CheckpointError> {
        if !self.keys.0.description().window_pattern {
            return Ok((self.keys.0.description().config.layer_types)(layers));
        }
        let kind = |sliding| if sliding { LayerKind::Sliding } else { LayerKind::Full };
        let key = self.keys.window_pattern();
        let value = self.reader.get(&key);
        if let Some(period) = value.and_then(|value| value.as_u64()).filter(|n| *n > 0) {
            return Ok((1..=layers as u64).map(|n| kind(!n.is_multiple_of(period))).collect());
        }
        let array = value.and_then(|value| value.as_array()).filter(|a| a.len() == layers);
        array
            .and_then(|array| array.iter().map(|value| value.as_bool().map(kind)).collect())
            .ok_or_else(|| {
                let count = self.key(Count::Layers);
                let accepted = format!(
                    "an array of {layers} bools, as {count} says, true for sliding layers; \
                     or a number n for which every n-th layer is full"
                );
                self.error(&key, accepted)
            })
    }

    fn check_windows(&self) -> Result<(), CheckpointError> {
        Ok(())
    }

    fn rope(
        &mut self,
        kind: LayerKind,
        needed: bool,
        head_dim: usize,
    ) -> Result<Option<Rope>, CheckpointError> {
        if !needed {
            return Ok(None);
        }
        let theta = self.reader.number(&self.keys.rope_base(kind), &THETAS)?;
        let key = self.keys.rope_dims(kind);
        let whole_heads = self.keys.0.description().config.rope == RopeSpelling::Flat;
        let count = match self.reader.get(&key) {
            None if whole_heads => Some(head_dim),
            value => value.and_then(|value| usize::try_from(value.as_u64()?).ok()),
        };
        let even = count.filter(|n| (2..=head_dim).contains(n) && n.is_multiple_of(2));
        let dims = even.filter(|n| !whole_heads || *n == head_dim).ok_or_else(|| {
            let (least, of) = (if whole_heads { head_dim } else { 2 }, self.key(Count::HeadDim));
            self.error(&key, format!("an even number from {least} to {of} {head_dim}"))
        })?;
        let yarn = if self.keys.knows_yarn() { self.yarn()? } else { None };
        if yarn.is_some() {
            self.reader.number(&self.keys.rope_base(kind), &STRETCHED_THETAS)?;
        }
        Ok(Some(Rope { yarn, ..Rope::plain(theta, dims) }))
    }

    fn epsilon(&self) -> Result<f64, CheckpointError> {
        self.reader.number(&self.keys.epsilon(), &EPSILONS)
    }

    fn token_ids(&self, vocab_size: usize) -> Result<TokenIds, CheckpointError> {
        let mut eos: Vec<u32> = Vec::new();
        for key in [EOS].into_iter().chain(OTHER_ENDS) {
            let id = self.reader.token_id(key, vocab_size)?;
            eos.extend(id.filter(|id| !eos.contains(id)));
        }
        let bos = self.reader.token_id(BOS, vocab_size)?;
        let pad = self.reader.token_id(PADDING, vocab_size)?;
        Ok(TokenIds { eos, bos, pad })
    }

    fn is_tied(&self) -> Result<bool, CheckpointError> {
        let head = self.keys.0.description().outer.head.gguf;
        Ok(self.reader.gguf.tensors().iter().all(|tensor| tensor.name != head))
    }

    fn dtype(&mut self) -> Result<Option<DType>, CheckpointError> {
        let file_type = self.reader.get(FILE_TYPE).and_then(|value| value.as_u64());
        let dtype = FLOAT_FILE_TYPES.iter().find(|(code, _)| Some(*code) == file_type);
        Ok(dtype.map(|(_, dtype)| *dtype))
    }
}
