use crate::{GenerateError, SamplingOptions};
use firesteel_checkpoint::{Gguf, GgufValue, file_in};
use serde::Deserialize as _;
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// An optional JSON object file: empty when the file does not exist.
pub(crate) struct JsonFile {
    pub(crate) path: PathBuf,
    pub(crate) map: Map<String, Value>,
}

impl JsonFile {
    pub(crate) fn open_if_present(folder: &Path, name: &str) -> Result<Self, GenerateError> {
        let path = folder.join(name);
        let Some(file) = file_in(folder, name)? else { return Ok(Self { path, map: Map::new() }) };
        match serde_json::from_slice(&fs_err::read(file)?) {
            Ok(map) => Ok(Self { path, map }),
            Err(source) => Err(GenerateError::Json { path, source }),
        }
    }

    /// The value of `key`; `None` when it is absent or null.
    pub(crate) fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    pub(crate) fn error(&self, key: &str, value: &Value, accepted: &'static str) -> GenerateError {
        GenerateError::Value {
            path: self.path.clone(),
            key: key.into(),
            value: value.to_string(),
            accepted,
        }
    }

    fn number(&self, key: &str, default: f64) -> Result<f64, GenerateError> {
        let Some(value) = self.get(key) else { return Ok(default) };
        value.as_f64().ok_or_else(|| self.error(key, value, "a number is accepted"))
    }

    /// Ids under `key`: none, one, or a list.
    fn ids(&self, key: &str) -> Result<Vec<u32>, GenerateError> {
        let Some(value) = self.get(key) else { return Ok(Vec::new()) };
        let values = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
        let ids = values.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok()));
        ids.collect::<Option<_>>()
            .ok_or_else(|| self.error(key, value, "an id or a list of ids is accepted"))
    }

    /// Lists of ids under `key`.
    fn id_lists(&self, key: &str) -> Result<Vec<Vec<u32>>, GenerateError> {
        let Some(value) = self.get(key) else { return Ok(Vec::new()) };
        Vec::deserialize(value)
            .map_err(|_| self.error(key, value, "a list of lists of ids is accepted"))
    }
}

/// The special tokens of tokenizer_config.json by key, such as `bos_token`: plain strings, or
/// objects with a `content`.
pub(crate) fn special_tokens(file: &JsonFile) -> impl Iterator<Item = (&str, &str)> {
    file.map.iter().filter(|(key, _)| key.ends_with("_token")).filter_map(|(key, value)| {
        let text = value.as_str().or_else(|| value.get("content")?.as_str())?;
        Some((key.as_str(), text))
    })
}

/// What generation_config.json or the metadata of a GGUF file says.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct GenerationConfig {
    /// Ids that end a sequence.
    pub eos_token_ids: Vec<u32>,
    /// The advice on sampling; greedy unless `do_sample` is true. Penalties, bad words and least
    /// tokens count either way. The seed is 0.
    pub sampling: SamplingOptions,
    /// Sampling settings that are not supported and would change the result, as `key = value` with
    /// where they are from.
    pub unsupported: Vec<String>,
}

/// Settings of transformers that change sampling and are not implemented here, with the value at
/// which they do nothing.
const NEUTRAL: [(&str, f64); 6] = [
    ("encoder_repetition_penalty", 1.0),
    ("typical_p", 1.0),
    ("num_beams", 1.0),
    ("epsilon_cutoff", 0.0),
    ("eta_cutoff", 0.0),
    ("no_repeat_ngram_size", 0.0),
];

impl GenerationConfig {
    /// Reads generation_config.json of `folder`; the default when there is none.
    ///
    /// # Errors
    /// When the file cannot be read or a value has the wrong type or range; the error names the
    /// key.
    pub fn open(folder: &Path) -> Result<Self, GenerateError> {
        let file = JsonFile::open_if_present(folder, "generation_config.json")?;
        let sample = match file.get("do_sample") {
            None => false,
            Some(Value::Bool(sample)) => *sample,
            Some(other) => {
                return Err(file.error("do_sample", other, "true or false is accepted"));
            }
        };
        let top_k = file.number("top_k", 0.0)?;
        let sampling = SamplingOptions {
            temperature: if sample { file.number("temperature", 1.0)? as f32 } else { 0.0 },
            // Both −1 and 0 are in use for "all"; the cast saturates.
            top_k: top_k as usize,
            top_p: file.number("top_p", 1.0)? as f32,
            min_p: file.number("min_p", 0.0)? as f32,
            repetition_penalty: file.number("repetition_penalty", 1.0)? as f32,
            bad_words: file.id_lists("bad_words_ids")?,
            min_tokens: file.number("min_new_tokens", 0.0)? as usize,
            ..SamplingOptions::GREEDY
        };
        let mut unsupported = Vec::new();
        for (key, neutral) in NEUTRAL {
            let value = file.number(key, neutral)?;
            if value != neutral {
                unsupported.push(format!("generation_config.json: {key} = {value}"));
            }
        }
        Ok(Self { eos_token_ids: file.ids("eos_token_id")?, sampling, unsupported })
    }

    /// Reads `general.sampling.*` of a GGUF file, where llama.cpp keeps the model's advice; the
    /// default when there is none. With one of `temp`, `top_k`, `top_p` and `min_p` it advises to
    /// sample, at temperature 1 unless it says another. The end ids come with the tokenizer.
    ///
    /// # Errors
    /// When a value has the wrong type; the error names the key.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self, GenerateError> {
        let number = |name: &str| -> Result<Option<f64>, GenerateError> {
            let key = format!("general.sampling.{name}");
            let Some(value) = gguf.get(&key) else { return Ok(None) };
            let number = match value {
                GgufValue::I32(value) => Some(f64::from(value)),
                value => value.as_f64().or_else(|| value.as_u64().map(|value| value as f64)),
            };
            let wrong = || GenerateError::Value {
                path: gguf.path().into(),
                key: key.clone(),
                value: format!("{value:?}"),
                accepted: "a number is accepted",
            };
            number.map(Some).ok_or_else(wrong)
        };
        let [temperature, top_k, top_p, min_p] =
            [number("temp")?, number("top_k")?, number("top_p")?, number("min_p")?];
        let samples = [temperature, top_k, top_p, min_p].iter().any(Option::is_some);
        let default = if samples { 1.0 } else { 0.0 };
        let repetition_penalty = number("penalty_repeat")?.unwrap_or(1.0);
        let sampling = SamplingOptions {
            // There, all from 0 down is greedy.
            temperature: temperature.unwrap_or(default).max(0.0) as f32,
            // All from 0 down keeps every id; the cast saturates.
            top_k: top_k.unwrap_or(0.0) as usize,
            top_p: top_p.unwrap_or(1.0) as f32,
            min_p: min_p.unwrap_or(0.0) as f32,
            repetition_penalty: repetition_penalty as f32,
            ..SamplingOptions::GREEDY
        };
        let mut unsupported = Vec::new();
        for (name, neutral) in
            [("xtc_probability", 0.0), ("mirostat", 0.0), ("penalty_last_n", -1.0)]
        {
            let value = number(name)?.unwrap_or(neutral);
            // How far a penalty looks back means nothing without one.
            let acts = name != "penalty_last_n" || repetition_penalty != 1.0;
            if value != neutral && acts {
                unsupported.push(format!("general.sampling.{name} = {value}"));
            }
        }
        if let Some(value) = gguf.get("general.sampling.sequence") {
            unsupported.push(format!("general.sampling.sequence = {value:?}"));
        }
        Ok(Self { eos_token_ids: Vec::new(), sampling, unsupported })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<GenerationConfig, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("generation_config.json");
        fs_err::write(&path, text).unwrap();
        GenerationConfig::open(folder.path())
            .map_err(|error| error.to_string().replace(&path.display().to_string(), "FILE"))
    }

    #[test]
    fn values_are_read() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(GenerationConfig::open(folder.path()).unwrap(), GenerationConfig::default());
        let config = read(
            r#"{"eos_token_id": [1, 7], "do_sample": true, "temperature": 0.5, "top_p": 0.75,
                "top_k": -1, "repetition_penalty": 1.5, "min_p": 0.25, "num_beams": 1,
                "bad_words_ids": [[3], [4, 5]], "min_new_tokens": 2, "typical_p": 0.5}"#,
        );
        let sampling = SamplingOptions {
            temperature: 0.5,
            top_p: 0.75,
            min_p: 0.25,
            repetition_penalty: 1.5,
            bad_words: vec![vec![3], vec![4, 5]],
            min_tokens: 2,
            ..SamplingOptions::GREEDY
        };
        let unsupported = vec!["generation_config.json: typical_p = 0.5".to_owned()];
        let expected = GenerationConfig { eos_token_ids: vec![1, 7], sampling, unsupported };
        assert_eq!(config.unwrap(), expected);
        assert_eq!(read(r#"{"eos_token_id": 3}"#).unwrap().eos_token_ids, [3]);
        assert_eq!(read(r#"{"temperature": 0.7}"#).unwrap().sampling.temperature, 0.0);
    }

    #[test]
    fn wrong_values_are_named() {
        let cases = [
            (
                r#"{"eos_token_id": -1}"#,
                "FILE: eos_token_id is -1, but an id or a list of ids is accepted",
            ),
            (
                r#"{"eos_token_id": [1, "x"]}"#,
                "FILE: eos_token_id is [1,\"x\"], but an id or a list of ids is accepted",
            ),
            (
                r#"{"eos_token_id": 4294967296}"#,
                "FILE: eos_token_id is 4294967296, but an id or a list of ids is accepted",
            ),
            (
                r#"{"bad_words_ids": [3]}"#,
                "FILE: bad_words_ids is [3], but a list of lists of ids is accepted",
            ),
            (r#"{"do_sample": 1}"#, "FILE: do_sample is 1, but true or false is accepted"),
            (r#"{"top_p": "1"}"#, "FILE: top_p is \"1\", but a number is accepted"),
            (
                "[]",
                "FILE: not valid JSON: invalid type: sequence, expected a map at line 1 column 0",
            ),
        ];
        for (text, expected) in cases {
            assert_eq!(read(text).unwrap_err(), expected);
        }
    }
}
