//! The model's advice on sampling, as metadata.

use super::{Gguf, GgufValue};
use crate::json::{parse_object, read_bounded, shorten};
use crate::{Checkpoint, CheckpointError};
use serde_json::{Map, Value};
use std::path::Path;

/// What the keys of the advice begin with.
pub(super) const SAMPLING: &str = "general.sampling.";
const TEMPERATURE: &str = "general.sampling.temp";
const TOP_K: &str = "general.sampling.top_k";
const PENALTY_RANGE: &str = "general.sampling.penalty_last_n";
/// Keys of numbers: in generation_config.json and in a GGUF file.
const NUMBERS: [(&str, &str); 3] = [
    ("top_p", "general.sampling.top_p"),
    ("min_p", "general.sampling.min_p"),
    ("repetition_penalty", "general.sampling.penalty_repeat"),
];
const FILE: &str = "generation_config.json";
/// Longest file, in bytes.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// Other keys of generation_config.json that need no warning: those with a place in the metadata,
/// and those that change no text.
const PLACED: [&str; 9] = [
    "_from_model_config",
    "bos_token_id",
    "do_sample",
    "eos_token_id",
    "pad_token_id",
    "temperature",
    "top_k",
    "transformers_version",
    "use_cache",
];
/// Keys of transformers at which 1 changes nothing.
const NEUTRAL_AT_ONE: [&str; 6] = [
    "encoder_repetition_penalty",
    "length_penalty",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "typical_p",
];

/// A value of the metadata.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Advice {
    Integer(i32),
    Number(f32),
    Text(String),
}

/// The advice by the key that GGUF files have for it, and what they have no key for.
#[derive(Debug, Default)]
pub(super) struct SamplingAdvice {
    pub(super) values: Vec<(String, Advice)>,
    pub(super) warnings: Vec<String>,
}

impl SamplingAdvice {
    /// What generation_config.json says of sampling, or the metadata of a GGUF file; empty when
    /// they say nothing. Without `do_sample` the temperature is 0: the most probable token is taken.
    ///
    /// # Errors
    /// When generation_config.json cannot be read or a value is of another type.
    pub(super) fn of_checkpoint(checkpoint: &Checkpoint) -> Result<Self, CheckpointError> {
        if let Some(gguf) = checkpoint.gguf() {
            return Ok(Self { values: of_gguf(gguf), warnings: Vec::new() });
        }
        let Some(path) = checkpoint.side_file(FILE)? else { return Ok(Self::default()) };
        let json = parse_object(&path, &read_bounded(&path, MAX_FILE_BYTES)?)?;
        Ok(Self { values: of_config(&path, &json)?, warnings: unplaced(&json).collect() })
    }
}

/// The advice of a file, in the types that the format has for it.
fn of_gguf(gguf: &Gguf) -> Vec<(String, Advice)> {
    let own = gguf.metadata().filter(|(key, _)| key.starts_with(SAMPLING));
    let values = own.filter_map(|(key, value)| {
        let advice = match value {
            GgufValue::F32(value) => Advice::Number(value),
            GgufValue::I32(value) => Advice::Integer(value),
            GgufValue::String(text) => Advice::Text(text.to_owned()),
            _ => return None,
        };
        Some((key.to_owned(), advice))
    });
    values.collect()
}

fn of_config(
    path: &Path,
    json: &Map<String, Value>,
) -> Result<Vec<(String, Advice)>, CheckpointError> {
    let fail = |reason: String| CheckpointError::Json { file: path.into(), reason };
    let number = |key: &str| match json.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => value
            .as_f64()
            .map(Some)
            .ok_or_else(|| fail(format!("{key} is {value}; a number is accepted"))),
    };
    let sample = json.get("do_sample").and_then(Value::as_bool).unwrap_or(false);
    let temperature = if sample { number("temperature")?.unwrap_or(1.0) } else { 0.0 };
    let mut advice = vec![(TEMPERATURE.to_owned(), Advice::Number(temperature as f32))];
    if let Some(count) = number("top_k")? {
        // Both −1 and 0 are in use for all tokens; the cast saturates.
        advice.push((TOP_K.into(), Advice::Integer((count as i32).max(0))));
    }
    for (name, key) in NUMBERS {
        if let Some(value) = number(name)? {
            advice.push((key.into(), Advice::Number(value as f32)));
        }
    }
    if number("repetition_penalty")?.is_some_and(|penalty| penalty != 1.0) {
        // The whole context counts, as where the advice comes from.
        advice.push((PENALTY_RANGE.into(), Advice::Integer(-1)));
    }
    Ok(advice)
}

/// The settings that have no key in a GGUF file, as far as they do anything.
fn unplaced(json: &Map<String, Value>) -> impl Iterator<Item = String> {
    let neutral = |key: &str, value: &Value| match value {
        Value::Null | Value::Bool(false) => true,
        Value::Bool(true) => false,
        Value::Number(number) => {
            let one = NEUTRAL_AT_ONE.contains(&key);
            number.as_f64() == Some(if one { 1.0 } else { 0.0 })
        }
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
    };
    let placed = |key: &str| PLACED.contains(&key) || NUMBERS.iter().any(|(name, _)| *name == key);
    let left = json.iter().filter(move |(key, value)| !placed(key) && !neutral(key, value));
    left.map(|(key, value)| {
        let (key, value) = (shorten(key), value.to_string());
        format!("{FILE}: {key} = {} has no place in a GGUF file", shorten(&value))
    })
}
