//! The model's advice on sampling, as metadata.

use super::GgufValue;
use crate::json::{parse_object, read_bounded};
use crate::{Checkpoint, CheckpointError};
use serde_json::Value;

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

/// A value of the metadata.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Advice {
    Integer(i32),
    Number(f32),
}

/// What generation_config.json says of sampling, or the metadata of a GGUF file, by the key that
/// GGUF files have for it; empty when they say nothing. Without `do_sample` the temperature is 0:
/// the most probable token is taken.
///
/// # Errors
/// When generation_config.json cannot be read or a value is of another type.
pub(super) fn sampling_advice(
    checkpoint: &Checkpoint,
) -> Result<Vec<(&'static str, Advice)>, CheckpointError> {
    if let Some(gguf) = checkpoint.gguf() {
        let keys = [TEMPERATURE].into_iter().chain(NUMBERS.map(|(_, key)| key));
        let numbers = keys.filter_map(|key| match gguf.get(key)? {
            GgufValue::F32(value) => Some((key, Advice::Number(value))),
            _ => None,
        });
        let integers =
            [TOP_K, PENALTY_RANGE].into_iter().filter_map(|key| match gguf.get(key)? {
                GgufValue::I32(value) => Some((key, Advice::Integer(value))),
                _ => None,
            });
        return Ok(numbers.chain(integers).collect());
    }
    let Some(path) = checkpoint.side_file(FILE)? else { return Ok(Vec::new()) };
    let fail = |reason: String| CheckpointError::Json { file: path.clone(), reason };
    let json = parse_object(&path, &read_bounded(&path, MAX_FILE_BYTES)?)?;
    let number = |key: &str| match json.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => value
            .as_f64()
            .map(Some)
            .ok_or_else(|| fail(format!("{key} is {value}; a number is accepted"))),
    };
    let sample = json.get("do_sample").and_then(Value::as_bool).unwrap_or(false);
    let temperature = if sample { number("temperature")?.unwrap_or(1.0) } else { 0.0 };
    let mut advice = vec![(TEMPERATURE, Advice::Number(temperature as f32))];
    if let Some(count) = number("top_k")? {
        // Both −1 and 0 are in use for all tokens; the cast saturates.
        advice.push((TOP_K, Advice::Integer((count as i32).max(0))));
    }
    for (name, key) in NUMBERS {
        if let Some(value) = number(name)? {
            advice.push((key, Advice::Number(value as f32)));
        }
    }
    if number("repetition_penalty")?.is_some_and(|penalty| penalty != 1.0) {
        // The whole context counts, as where the advice comes from.
        advice.push((PENALTY_RANGE, Advice::Integer(-1)));
    }
    Ok(advice)
}
