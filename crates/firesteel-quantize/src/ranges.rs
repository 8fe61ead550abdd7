use crate::MatrixPlan;
use crate::weights::{ColumnSizes, Importance};
use crate::{Method, QuantizeError};
use firesteel_artifact::FileHash;
use firesteel_export::Gelu;
use fs_err as fs;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

/// Version of the file's layout that is written and read.
pub const RANGES_VERSION: u32 = 3;

/// Value of the file's first key.
const FORMAT: &str = "firesteel-ranges";

/// Largest file that is read.
const LIMIT: u64 = 64 << 20;

/// Channels that a file may list for one tensor.
const CHANNEL_LIMIT: usize = 64;

/// What the values of a model's step were on a text.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Ranges {
    /// Version of the program that wrote it.
    pub tool_version: String,
    /// Files with the checkpoint's weights.
    pub checkpoint: Vec<FileHash>,
    /// The ranges are of the model whose matrices have their columns divided by these sizes
    /// ([`with_columns`](crate::weights::with_columns)); empty for the model as it is.
    pub columns: ColumnSizes,
    /// What matrices are multiplied with; empty when their weights are not to be rounded for it.
    pub importance: Importance,
    /// The texts; none when the ids came from nowhere.
    pub texts: Vec<TextHash>,
    /// Form of the activation that was run.
    pub gelu: Gelu,
    /// Tokens that were run.
    pub tokens: u64,
    /// Most tokens of a sequence, each of which begins with empty caches.
    pub sequence: u64,
    /// How ranges were chosen.
    pub observer: Method,
    /// The values, by name.
    pub tensors: BTreeMap<String, TensorRange>,
}

/// A text that was run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TextHash {
    /// Bare name of the file.
    pub name: String,
    /// SHA-256, in hexadecimal.
    pub sha256: String,
}

/// One value.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TensorRange {
    /// Smallest element.
    pub min: f64,
    /// Largest element.
    pub max: f64,
    /// Elements seen.
    pub count: u64,
    /// The range that the observer chose for 8 bits; it contains 0.
    pub range8: [f64; 2],
    /// The range that the observer chose for 16 bits; it contains 0.
    pub range16: [f64; 2],
    /// Largest Σx² of a row.
    pub largest_row_square: f64,
    /// Median over the channels of their largest magnitude; 0 where channels were not kept apart.
    pub median_channel: f64,
    /// The channels with the largest magnitudes, in falling order.
    pub channels: Vec<ChannelPeak>,
}

/// A channel and its largest magnitude.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct ChannelPeak {
    /// Index in the last axis; of keys and values head · head_dim + dimension.
    pub channel: u64,
    /// max |x|.
    pub magnitude: f64,
}

impl Ranges {
    /// The mean square of each column of what `matrix` is multiplied with, where it is known.
    pub fn importance(&self, matrix: &MatrixPlan) -> Option<&[f32]> {
        self.importance.get(&matrix.input_key).map(Vec::as_slice)
    }

    /// The file's text.
    ///
    /// # Errors
    /// None that can happen: every key is a string and every number finite.
    pub fn to_json(&self) -> Result<Vec<u8>, QuantizeError> {
        #[derive(Serialize)]
        struct File<'a> {
            format: &'a str,
            version: u32,
            #[serde(flatten)]
            ranges: &'a Ranges,
        }
        let file = File { format: FORMAT, version: RANGES_VERSION, ranges: self };
        Ok(serde_json::to_vec_pretty(&file).map_err(std::io::Error::other)?)
    }

    /// Reads and checks a file.
    ///
    /// # Errors
    /// When it cannot be read, is too large, of another format or version, or has a key that is
    /// missing, unknown, given twice or impossible; the error names it.
    pub fn read(file: &Path) -> Result<Self, QuantizeError> {
        let problem = |problem: String| QuantizeError::Ranges { file: file.into(), problem };
        if !fs::metadata(file)?.is_file() {
            return Err(problem("is not a regular file".into()));
        }
        let mut text = Vec::new();
        fs::File::open(file)?.take(LIMIT + 1).read_to_end(&mut text)?;
        if text.len() as u64 > LIMIT {
            return Err(problem(format!("is larger than {LIMIT} bytes")));
        }
        Self::parse(&text).map_err(problem)
    }

    fn parse(text: &[u8]) -> Result<Self, String> {
        let Unique(json) = serde_json::from_slice(text).map_err(|error| error.to_string())?;
        let mut keys = Keys::new("", json)?;
        let format = keys.string("format")?;
        if format != FORMAT {
            return Err(format!("format is {format:?}; {FORMAT:?} is read"));
        }
        let version = keys.count("version")?;
        if version != u64::from(RANGES_VERSION) {
            return Err(format!(
                "version is {version}; this program reads {RANGES_VERSION}; calibrate again"
            ));
        }
        let tool_version = keys.string("tool_version")?;
        let checkpoint = keys.value("checkpoint")?;
        let checkpoint: Vec<FileHash> =
            serde_json::from_value(checkpoint).map_err(|error| format!("checkpoint: {error}"))?;
        let texts: Vec<TextHash> = serde_json::from_value(keys.value("texts")?)
            .map_err(|error| format!("texts: {error}"))?;
        let gelu: Gelu = serde_json::from_value(keys.value("gelu")?)
            .map_err(|error| format!("gelu: {error}"))?;
        let columns = lists("columns", keys.value("columns")?, [1.0 / SIZE_LIMIT, SIZE_LIMIT])?;
        let importance = lists("importance", keys.value("importance")?, [0.0, f32::MAX])?;
        let (tokens, sequence) = (keys.count("tokens")?, keys.count("sequence")?);
        let observer: Method = serde_json::from_value(keys.value("observer")?)
            .map_err(|error| format!("observer: {error}"))?;
        let Value::Object(list) = keys.value("tensors")? else {
            return Err("tensors is not an object".into());
        };
        keys.finish()?;
        let mut tensors = BTreeMap::new();
        for (name, tensor) in list {
            let range = TensorRange::parse(&name, tensor)?;
            tensors.insert(name, range);
        }
        Ok(Self {
            tool_version,
            checkpoint,
            columns,
            importance,
            texts,
            gelu,
            tokens,
            sequence,
            observer,
            tensors,
        })
    }
}

impl TensorRange {
    fn parse(name: &str, json: Value) -> Result<Self, String> {
        let mut keys = Keys::new(&format!("tensors.{name}"), json)?;
        let range = Self {
            min: keys.number("min")?,
            max: keys.number("max")?,
            count: keys.count("count")?,
            range8: keys.pair("range8")?,
            range16: keys.pair("range16")?,
            largest_row_square: keys.number("largest_row_square")?,
            median_channel: keys.number("median_channel")?,
            channels: keys.channels()?,
        };
        let at = |key: &str| format!("tensors.{name}.{key}");
        keys.finish()?;
        if range.min > range.max {
            return Err(format!("{} is {}, above max {}", at("min"), range.min, range.max));
        }
        for (key, value) in [
            ("largest_row_square", range.largest_row_square),
            ("median_channel", range.median_channel),
        ] {
            if value < 0.0 {
                return Err(format!("{} is {value}; 0 or more is accepted", at(key)));
            }
        }
        for (key, [low, high]) in [("range8", range.range8), ("range16", range.range16)] {
            if low > 0.0 || high < 0.0 {
                return Err(format!("{} is {low} to {high}; a range with 0 is accepted", at(key)));
            }
        }
        Ok(range)
    }
}

/// Lists of numbers in a range, by name.
fn lists(
    key: &str,
    json: Value,
    [least, most]: [f32; 2],
) -> Result<BTreeMap<String, Vec<f32>>, String> {
    let Value::Object(list) = json else { return Err(format!("{key} is not an object")) };
    let number = |value: &Value| {
        let number = value.as_f64().map(|number| number as f32);
        number.filter(|number| (least..=most).contains(number))
    };
    let entry = |(name, numbers): (String, Value)| {
        let numbers = numbers.as_array().map(|list| list.iter().map(number).collect());
        match numbers {
            Some(Some(numbers)) => Ok((name, numbers)),
            _ => Err(format!("{key}.{name} is no list of numbers from {least:e} to {most:e}")),
        }
    };
    list.into_iter().map(entry).collect()
}

/// Largest size of a column, and one over the smallest.
const SIZE_LIMIT: f32 = 65536.0;

/// Magnitude that no range may exceed: its square is still a number.
const MAGNITUDE_LIMIT: f64 = 1e150;

/// The keys of an object that nobody has asked for yet.
struct Keys {
    at: String,
    map: Map<String, Value>,
}

impl Keys {
    fn new(at: &str, json: Value) -> Result<Self, String> {
        match json {
            Value::Object(map) => Ok(Self { at: at.to_owned(), map }),
            _ => Err(format!("{} is not an object", if at.is_empty() { "the file" } else { at })),
        }
    }

    fn place(&self, key: &str) -> String {
        if self.at.is_empty() { key.to_owned() } else { format!("{}.{key}", self.at) }
    }

    fn value(&mut self, key: &str) -> Result<Value, String> {
        self.map.shift_remove(key).ok_or_else(|| format!("{} is missing", self.place(key)))
    }

    fn string(&mut self, key: &str) -> Result<String, String> {
        match self.value(key)? {
            Value::String(text) => Ok(text),
            _ => Err(format!("{} is not a string", self.place(key))),
        }
    }

    fn count(&mut self, key: &str) -> Result<u64, String> {
        let value = self.value(key)?;
        value.as_u64().ok_or_else(|| format!("{} is {value}; a count is needed", self.place(key)))
    }

    fn number(&mut self, key: &str) -> Result<f64, String> {
        let value = self.value(key)?;
        finite(&value).ok_or_else(|| format!("{} is {value}; a number is needed", self.place(key)))
    }

    fn pair(&mut self, key: &str) -> Result<[f64; 2], String> {
        let value = self.value(key)?;
        let numbers = value.as_array().map(|list| list.iter().map(finite).collect::<Vec<_>>());
        match numbers.as_deref() {
            Some(&[Some(low), Some(high)]) => Ok([low, high]),
            _ => Err(format!("{} is {value}; two numbers are needed", self.place(key))),
        }
    }

    fn channels(&mut self) -> Result<Vec<ChannelPeak>, String> {
        let Value::Array(list) = self.value("channels")? else {
            return Err(format!("{} is not a list", self.place("channels")));
        };
        if list.len() > CHANNEL_LIMIT {
            let place = self.place("channels");
            return Err(format!("{place} has {} entries; {CHANNEL_LIMIT} are read", list.len()));
        }
        let read = |(index, json)| {
            let mut keys = Keys::new(&format!("{}[{index}]", self.place("channels")), json)?;
            let peak = ChannelPeak {
                channel: keys.count("channel")?,
                magnitude: keys.number("magnitude")?,
            };
            keys.finish()?;
            Ok(peak)
        };
        list.into_iter().enumerate().map(read).collect()
    }

    fn finish(self) -> Result<(), String> {
        match self.map.keys().next() {
            None => Ok(()),
            Some(key) => Err(format!("{} is not a key of this version", self.place(key))),
        }
    }
}

fn finite(value: &Value) -> Option<f64> {
    value.as_f64().filter(|number| number.abs() <= MAGNITUDE_LIMIT)
}

/// Any JSON whose objects have no key twice.
struct Unique(Value);

impl<'de> Deserialize<'de> for Unique {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(UniqueVisitor).map(Self)
    }
}

struct UniqueVisitor;

impl<'de> serde::de::Visitor<'de> for UniqueVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("JSON")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut list: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(Unique(value)) = list.next_element()? {
            values.push(value);
        }
        Ok(Value::Array(values))
    }

    fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut values = Map::new();
        while let Some(key) = map.next_key::<String>()? {
            let Unique(value) = map.next_value()?;
            if values.contains_key(&key) {
                return Err(serde::de::Error::custom(format!("{key} is given twice")));
            }
            values.insert(key, value);
        }
        Ok(Value::Object(values))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> Value {
        serde_json::json!({
            "format": "firesteel-ranges", "version": 3, "tool_version": "0", "checkpoint": [],
            "columns": {"norm": [0.25, 3.0]}, "importance": {"x": [0.0, 2.0]},
            "texts": [{"name": "a.txt", "sha256": "00"}], "gelu": "exact", "tokens": 3,
            "sequence": 3, "observer": "minmax",
            "tensors": {"x": {
                "min": -1.0, "max": 2.0, "count": 12, "range8": [-1.0, 2.0],
                "range16": [-1.0, 2.0], "largest_row_square": 5.0, "median_channel": 1.0,
                "channels": [{"channel": 1, "magnitude": 2.0}],
            }},
        })
    }

    #[test]
    fn what_is_written_is_read() {
        let ranges = Ranges::parse(good().to_string().as_bytes()).unwrap();
        assert_eq!(ranges.tensors["x"].range16, [-1.0, 2.0]);
        assert_eq!(ranges.columns["norm"], [0.25, 3.0]);
        assert_eq!(ranges.importance["x"], [0.0, 2.0]);
        let again = Ranges::parse(&ranges.to_json().unwrap()).unwrap();
        assert_eq!(again, ranges);
    }

    #[test]
    fn hostile_files_are_refused_by_key() {
        let huge = vec![serde_json::json!({"channel": 0, "magnitude": 0.0}); CHANNEL_LIMIT + 1];
        let cases: Vec<(&str, Value, &str)> = vec![
            ("/format", "other".into(), "format is \"other\""),
            ("/version", 2.into(), "version is 2; this program reads 3; calibrate again"),
            ("/columns", true.into(), "columns is not an object"),
            ("/columns/norm", 3.into(), "columns.norm is no list of numbers from 1.5"),
            ("/columns/norm/1", 0.into(), "columns.norm is no list of numbers from 1.5"),
            ("/columns/norm/1", 1e9.into(), "columns.norm is no list of numbers from 1.5"),
            ("/importance/x/0", (-1).into(), "importance.x is no list of numbers from 0e0"),
            ("/observer", "best".into(), "observer: unknown variant `best`"),
            ("/gelu", "best".into(), "gelu: unknown variant `best`"),
            ("/texts/0/name", 3.into(), "texts: invalid type"),
            ("/tokens", (-1).into(), "tokens is -1; a count is needed"),
            ("/tensors", Value::Null, "tensors is not an object"),
            ("/tensors/x", 1.into(), "tensors.x is not an object"),
            ("/tensors/x/min", "low".into(), "tensors.x.min is \"low\"; a number is needed"),
            ("/tensors/x/min", 5.into(), "tensors.x.min is 5, above max 2"),
            ("/tensors/x/max", 1e200.into(), "tensors.x.max is 1e+200; a number is needed"),
            ("/tensors/x/count", 1.5.into(), "tensors.x.count is 1.5; a count is needed"),
            ("/tensors/x/range8", vec![1.0].into(), "tensors.x.range8 is [1.0]; two numbers"),
            ("/tensors/x/range16", vec![1.0, 2.0].into(), "tensors.x.range16 is 1 to 2; a range"),
            ("/tensors/x/largest_row_square", (-1).into(), "tensors.x.largest_row_square is -1"),
            ("/tensors/x/channels", huge.into(), "tensors.x.channels has 65 entries; 64 are read"),
            ("/tensors/x/channels/0/channel", Value::Null, "tensors.x.channels[0].channel is null"),
        ];
        let mut failures = Vec::new();
        for (pointer, value, expected) in cases {
            let mut json = good();
            *json.pointer_mut(pointer).unwrap() = value;
            let error = Ranges::parse(json.to_string().as_bytes()).unwrap_err();
            if !error.starts_with(expected) {
                failures.push(format!("{pointer}: {error}"));
            }
        }
        for (json, expected) in [
            ("[]", "the file is not an object"),
            ("{}", "format is missing"),
            ("{\"format\": 1, \"format\": 2}", "format is given twice"),
            (&"[".repeat(100_000), "recursion limit exceeded"),
        ] {
            let error = Ranges::parse(json.as_bytes()).unwrap_err();
            if !error.starts_with(expected) {
                failures.push(format!("{json:.20}: {error}"));
            }
        }
        let mut json = good();
        json["tensors"]["x"]["more"] = 1.into();
        let error = Ranges::parse(json.to_string().as_bytes()).unwrap_err();
        assert_eq!(error, "tensors.x.more is not a key of this version");
        assert!(failures.is_empty(), "{}", failures.join("\n"));
    }

    #[test]
    fn files_that_are_none_are_refused() {
        let folder = std::env::temp_dir();
        assert!(Ranges::read(&folder).unwrap_err().to_string().ends_with("is not a regular file"));
        assert!(Ranges::read(&folder.join("no such file")).is_err());
    }
}
