//! The spelling of config.json.

use super::{
    EPSILONS, FACTORS, LayerKind, MAGNITUDES, MATHS, MAX_SIZE, ROTATIONS, Rope, STRETCHED_THETAS,
    Spelling, THETAS, TokenIds, Yarn, show_counts, show_range,
};
use crate::family::{Count, FixedValue, RopeSpelling};
use crate::json::shorten;
use crate::{CheckpointError, Family};
use firesteel_tensor::DType;
use serde_json::{Map, Value, json};
use std::ops::RangeInclusive;
use std::path::PathBuf;

/// Keys that are read, besides those of the family.
const READ: &[&str] = &[
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
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

/// Element types as config.json spells them.
pub(super) const DTYPES: &[(&str, DType)] =
    &[("float32", DType::F32), ("float16", DType::F16), ("bfloat16", DType::BF16)];

/// The object of one file and what is said about it.
pub(super) struct Reader {
    pub(super) file: PathBuf,
    pub(super) map: Map<String, Value>,
    pub(super) warnings: Vec<String>,
}

impl FixedValue {
    pub(super) fn json(&self) -> Value {
        match self {
            Self::Flag(flag) => json!(flag),
            Self::Text(text) => json!(text),
        }
    }
}

impl Reader {
    /// The family that `model_type` names.
    pub(super) fn family(&self) -> Result<Family, CheckpointError> {
        let value = self.get("model_type");
        let family = value.and_then(Value::as_str).and_then(Family::of_model_type);
        family.ok_or_else(|| CheckpointError::ModelType {
            file: self.file.clone(),
            key: "model_type",
            value: show(value),
            known: Family::known(Family::model_type),
            version: env!("CARGO_PKG_VERSION"),
        })
    }

    /// Checks every key that is only accepted with one meaning, and every key that is not known.
    pub(super) fn refuse_other_maths(&mut self, family: Family) -> Result<(), CheckpointError> {
        let spelling = &family.description().config;
        if self.get("quantization_config").is_some() {
            return Err(self.error(
                "quantization_config",
                "absent: quantized checkpoints (FP8, INT8 and others) are not read, use the \
                 float release"
                    .into(),
            ));
        }
        if self.get("hidden_act").and_then(Value::as_str) != Some(spelling.activation) {
            return Err(self.error("hidden_act", format!("{:?}", spelling.activation)));
        }
        for fixed in spelling.fixed {
            let accepted = fixed.value.json();
            let given = match fixed.value {
                FixedValue::Flag(_) => self.flag(fixed.key)?.map(Value::Bool),
                FixedValue::Text(_) => self.get(fixed.key).cloned(),
            };
            match given {
                Some(given) if given == accepted => {}
                None if fixed.expected => {
                    self.warn(format!("{} is missing; {accepted} is assumed", fixed.key));
                }
                None => {}
                Some(_) => return Err(self.error(fixed.key, format!("{accepted}{}", fixed.why))),
            }
        }
        let mut warnings = Vec::new();
        for (key, value) in &self.map {
            let known = |list: &[&str]| list.contains(&key.as_str());
            let of_family = known(spelling.ignored)
                || spelling.fixed.iter().any(|fixed| fixed.key == key)
                || spelling.rope == RopeSpelling::Flat && key == SCALING;
            if known(READ) || known(IGNORED) || of_family || key == SCALING && is_unscaled(value) {
                continue;
            }
            if is_neutral(value, 0.0) && !value.is_number() {
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

    /// The rotary embedding of layers of `kind` in an object with an entry for each layer type.
    ///
    /// Theta and factor are those of the nested entry alone. A factor that the entry leaves out
    /// is 1, unless the config has one at the top level too: then it is not clear whether that
    /// one is meant, and the config is refused.
    fn rope_of_type(
        &mut self,
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
        Ok(Some(Rope::plain(theta, rounded as usize)))
    }

    /// The rotary embedding of all layers, which turns whole heads.
    fn flat_rope(&mut self, head_dim: usize) -> Result<Rope, CheckpointError> {
        if !head_dim.is_multiple_of(2) {
            return Err(self.error("head_dim", "an even number, since whole heads rotate".into()));
        }
        let parameters = match self.get(PARAMETERS) {
            Some(Value::Object(parameters)) => Some(parameters.clone()),
            None => None,
            Some(_) => {
                let accepted = "an object with rope_theta and rope_type";
                return Err(self.error(PARAMETERS, accepted.into()));
            }
        };
        let scaling = match self.get(SCALING) {
            Some(Value::Object(scaling)) => Some(scaling.clone()),
            None => None,
            Some(_) => return Err(self.error(SCALING, ACCEPTED_SCALING.into())),
        };
        // The newer form has everything in one object.
        for key in ["rope_theta", SCALING] {
            if parameters.is_some() && self.get(key).is_some() {
                self.warn(format!("{key} is ignored; {PARAMETERS} is read in its place"));
            }
        }
        let (theta, theta_key) = match &parameters {
            Some(parameters) => (parameters.get("rope_theta"), format!("{PARAMETERS}.rope_theta")),
            None => (self.get("rope_theta"), "rope_theta".to_owned()),
        };
        let theta = self.number(theta.filter(|theta| !theta.is_null()), &theta_key, &THETAS)?;
        let (scaling, place) = match &parameters {
            Some(parameters) => (Some(parameters), PARAMETERS),
            None => (scaling.as_ref(), SCALING),
        };
        let inner = scaling.and_then(|scaling| scaling.get("partial_rotary_factor"));
        for value in [inner, self.get("partial_rotary_factor")].into_iter().flatten() {
            if !value.is_null() && value.as_f64() != Some(1.0) {
                let accepted = "1 or absent, since whole heads rotate";
                return Err(self.error_at("partial_rotary_factor", Some(value), accepted.into()));
            }
        }
        let yarn = scaling.map(|scaling| self.yarn(scaling, place)).transpose()?.flatten();
        if yarn.is_some() && !STRETCHED_THETAS.contains(&theta) {
            let accepted = show_range(&STRETCHED_THETAS);
            return Err(self.error_at(&theta_key, Some(&json!(theta)), accepted));
        }
        Ok(Rope { yarn, ..Rope::plain(theta, head_dim) })
    }

    /// What an object with `rope_type` says of a longer context; `None` when it says that there is none.
    fn yarn(
        &self,
        scaling: &Map<String, Value>,
        place: &str,
    ) -> Result<Option<Yarn>, CheckpointError> {
        let key = |key: &str| format!("{place}.{}", shorten(key));
        let get = |key: &str| scaling.get(key).filter(|value| !value.is_null());
        let kinds = ["rope_type", "type"].map(|key| (key, get(key)));
        for (name, kind) in kinds {
            let known = kind.is_none_or(|kind| matches!(kind.as_str(), Some("default" | "yarn")));
            if !known {
                return Err(self.error_at(&key(name), kind, ACCEPTED_SCALING.into()));
            }
        }
        if let [(_, Some(first)), (name, Some(other))] = kinds
            && first != other
        {
            let accepted = format!("{first}, as rope_type is");
            return Err(self.error_at(&key(name), Some(other), accepted));
        }
        let kind = kinds.iter().find_map(|(_, kind)| *kind);
        let is_yarn = kind.and_then(Value::as_str) == Some("yarn");
        // In an object that has nothing else to say, everything is about scaling.
        if kind.is_none() && place == SCALING && !scaling.is_empty() {
            return Err(self.error_at(&key("rope_type"), None, ACCEPTED_SCALING.into()));
        }
        for (name, value) in scaling {
            let known = match name.as_str() {
                "rope_type" | "type" | "partial_rotary_factor" => true,
                "rope_theta" => place == PARAMETERS,
                "factor"
                | "original_max_position_embeddings"
                | "beta_fast"
                | "beta_slow"
                | "attention_factor" => is_yarn,
                "truncate" => is_yarn && *value == json!(true),
                _ => false,
            };
            if !known && !value.is_null() {
                let accepted = match is_yarn {
                    true => {
                        "absent: yarn is known with factor, original_max_position_embeddings, \
                             beta_fast, beta_slow and attention_factor"
                    }
                    false => "absent, since rope_type is \"default\"",
                };
                return Err(self.error_at(&key(name), Some(value), accepted.into()));
            }
        }
        if !is_yarn {
            return Ok(None);
        }
        let number = |name: &str, accepted: &RangeInclusive<f64>, otherwise: f64| {
            get(name).map_or(Ok(otherwise), |value| self.number(Some(value), &key(name), accepted))
        };
        let factor = self.number(get("factor"), &key("factor"), &FACTORS)?;
        let positions = "original_max_position_embeddings";
        let original = match get(positions) {
            Some(value) => {
                let counts = 1..=MAX_SIZE;
                let count = value.as_u64().filter(|count| counts.contains(count));
                count.and_then(|count| usize::try_from(count).ok()).ok_or_else(|| {
                    self.error_at(&key(positions), Some(value), show_counts(&counts, ""))
                })?
            }
            // As in the reference.
            None => self.count(Count::Positions, 1..=MAX_SIZE, "")?,
        };
        let [fast, slow] = Yarn::BETAS;
        let yarn = Yarn {
            factor,
            original_positions: original,
            beta_fast: number("beta_fast", &ROTATIONS, fast)?,
            beta_slow: number("beta_slow", &ROTATIONS, slow)?,
            attention_factor: number(
                "attention_factor",
                &MAGNITUDES,
                Yarn::attention_factor_of(factor),
            )?,
        };
        if yarn.beta_slow >= yarn.beta_fast {
            let accepted = format!("a number below beta_fast, which is {}", yarn.beta_fast);
            return Err(self.error_at(&key("beta_slow"), get("beta_slow"), accepted));
        }
        Ok(Some(yarn))
    }

    /// Token ids of a key that holds one, a list of them or none.
    pub(super) fn ids(&self, key: &str, vocab_size: usize) -> Result<Vec<u32>, CheckpointError> {
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

    fn error_at(&self, key: &str, value: Option<&Value>, accepted: String) -> CheckpointError {
        let key = shorten(key).into_owned();
        CheckpointError::Config { file: self.file.clone(), key, value: show(value), accepted }
    }
}

const PARAMETERS: &str = "rope_parameters";
const SCALING: &str = "rope_scaling";
const ACCEPTED_SCALING: &str =
    "null, or an object whose rope_type is \"default\" or \"yarn\": no other scaling is known";

impl Spelling for Reader {
    fn key(&self, count: Count) -> String {
        count.key().to_owned()
    }

    fn has(&self, count: Count) -> bool {
        self.get(count.key()).is_some()
    }

    fn count(
        &self,
        count: Count,
        accepted: RangeInclusive<u64>,
        why: &str,
    ) -> Result<usize, CheckpointError> {
        self.get(count.key())
            .and_then(Value::as_u64)
            .filter(|size| accepted.contains(size))
            .and_then(|size| usize::try_from(size).ok())
            .ok_or_else(|| self.error(count.key(), show_counts(&accepted, why)))
    }

    fn assumed(&self, count: Count) -> Option<usize> {
        let assumed = self.family().ok()?.description().config.assumed;
        assumed.iter().find(|(known, _)| *known == count).map(|(_, number)| *number)
    }

    fn error(&self, key: &str, accepted: String) -> CheckpointError {
        self.error_at(key, self.map.get(key), accepted)
    }

    fn warn(&mut self, warning: String) {
        self.warnings.push(format!("{}: {warning}", self.file.display()));
    }

    fn layer_types(&mut self, layers: usize) -> Result<Vec<LayerKind>, CheckpointError> {
        let spelling = &self.family()?.description().config;
        let own = (spelling.layer_types)(layers);
        let accepted = "a list of \"sliding_attention\" and \"full_attention\"";
        let listed = match self.get("layer_types") {
            None => {
                if let Some(assumed) = spelling.layer_types_assumed {
                    self.warn(format!("layer_types is missing; {assumed} are assumed"));
                }
                return Ok(own);
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
        for (layer, (value, own)) in listed.iter().zip(own).enumerate() {
            let kind = LayerKind::ALL.into_iter().find(|kind| value.as_str() == Some(kind.name()));
            // Without a choice there is one form.
            let kind = kind.filter(|kind| spelling.layer_types_assumed.is_some() || *kind == own);
            kinds.push(kind.ok_or_else(|| {
                let accepted = match spelling.layer_types_assumed {
                    Some(_) => "\"sliding_attention\" or \"full_attention\"".to_owned(),
                    None => format!("{:?}: models with other layers are not read", own.name()),
                };
                self.error_at(&format!("layer_types[{layer}]"), Some(value), accepted)
            })?);
        }
        Ok(kinds)
    }

    fn check_windows(&self) -> Result<(), CheckpointError> {
        match self.flag("use_sliding_window")? {
            Some(false) => Err(self.error(
                "use_sliding_window",
                "true or absent, since there are sliding_attention layers".into(),
            )),
            _ => Ok(()),
        }
    }

    fn rope(
        &mut self,
        kind: LayerKind,
        needed: bool,
        head_dim: usize,
    ) -> Result<Option<Rope>, CheckpointError> {
        match self.family()?.description().config.rope {
            RopeSpelling::Flat if needed => self.flat_rope(head_dim).map(Some),
            RopeSpelling::Flat => Ok(None),
            RopeSpelling::ByLayerType => {
                // Said once for both kinds.
                for key in ["rope_theta", "partial_rotary_factor"] {
                    let both = self.get(key).is_some() && self.get(PARAMETERS).is_some();
                    if both && kind == LayerKind::Sliding {
                        self.warn(format!(
                            "{key} is ignored; rope_parameters has it for each layer type"
                        ));
                    }
                }
                self.rope_of_type(kind, needed, head_dim)
            }
        }
    }

    fn epsilon(&self) -> Result<f64, CheckpointError> {
        self.number(self.get("rms_norm_eps"), "rms_norm_eps", &EPSILONS)
    }

    fn token_ids(&self, vocab_size: usize) -> Result<TokenIds, CheckpointError> {
        Ok(TokenIds {
            eos: self.ids("eos_token_id", vocab_size)?,
            bos: self.ids("bos_token_id", vocab_size)?.first().copied(),
            pad: self.ids("pad_token_id", vocab_size)?.first().copied(),
        })
    }

    fn is_tied(&self) -> Result<bool, CheckpointError> {
        Ok(self.flag("tie_word_embeddings")?.unwrap_or(false))
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
}

/// Whether a value of an unknown key says that its feature is off.
fn is_neutral(value: &Value, number: f64) -> bool {
    value.is_null() || *value == Value::Bool(false) || value.as_f64() == Some(number)
}

/// Whether a value of `rope_scaling` says that nothing is scaled and says no more.
fn is_unscaled(value: &Value) -> bool {
    let entries = value.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null());
    let mut kinds = entries.map(|(key, value)| {
        matches!(key.as_str(), "rope_type" | "type") && value.as_str() == Some("default")
    });
    value.is_object() && kinds.all(|is_default| is_default)
}

/// A value as JSON, shortened when very long.
fn show(value: Option<&Value>) -> String {
    match value {
        None => "missing".into(),
        Some(value) => shorten(&value.to_string()).into_owned(),
    }
}
