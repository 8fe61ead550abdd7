use crate::ProfileError;
use firesteel_checkpoint::{Family, LayerKind, ModelConfig, mistaken_file};
use firesteel_step::CacheLayout;
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::fmt;
use std::path::Path;

/// Value of `format` in a table.
const FORMAT: &str = "firesteel-layer-times";
/// The version of the format that is read.
const VERSION: u64 = 1;
/// Longest table, in bytes.
const MAX_BYTES: usize = 4 << 20;
/// Most sources and most measurements of a table.
const MAX_ROWS: usize = 10_000;
/// Longest name, in bytes.
const MAX_NAME: usize = 64;
/// Longest text or note, in bytes.
const MAX_TEXT: usize = 1000;
/// Largest context and number of tokens, as in a step.
const MAX_LENGTH: usize = 1 << 24;
/// Longest time, in ms.
const MAX_MS: f64 = 1e9;

/// Times of single layers of one model on one device.
///
/// The file is one JSON object; keys that are not named here are refused, and a key that may be
/// null may be left out:
///
/// ```
/// let text = r#"{
///   "format": "firesteel-layer-times",
///   "version": 1,
///   "device": "a phone",
///   "soc": "its chip",
///   "model": {
///     "model_type": "spark2_5", "hidden_size": 2048, "intermediate_size": 6656, "num_attention_heads": 8,
///     "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 131072, "sliding_window": 512,
///     "rotary_dims_sliding": 256, "rotary_dims_full": 64
///   },
///   "sources": [{"id": "lab", "origin": "measured", "text": "who measured, how and when"}],
///   "measurements": [
///     {"runtime": "qnn-npu", "precision": "w8a16", "dialect": "qnn", "kind": "full_attention",
///      "layout": "roll", "context": 1024, "tokens": 1, "variant": null, "ms": 0.95,
///      "statistic": "median", "low": 0.93, "high": 0.99, "n": 200, "snr_db": 37.0,
///      "timing_only": false, "source": "lab", "note": null}
///   ]
/// }"#;
/// let table = firesteel_profile::Table::from_json("phone.json".as_ref(), text.as_bytes())?;
/// assert_eq!(table.measurements[0].n, Some(200));
/// # Ok::<(), firesteel_profile::ProfileError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Table {
    format: String,
    version: u64,
    /// The device that was measured.
    pub device: String,
    /// Its system on a chip.
    pub soc: String,
    /// Shape of the layers.
    pub model: LayerShape,
    /// Where the times come from.
    pub sources: Vec<Source>,
    /// The times.
    pub measurements: Vec<Measurement>,
}

/// Shape of the layers that were measured, with the names of config.json.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerShape {
    /// Family of the model, which says what its layers compute.
    #[serde(rename = "model_type")]
    pub family: Family,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the feed-forward layer.
    pub intermediate_size: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads.
    pub num_key_value_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Rows of the head.
    pub vocab_size: usize,
    /// Tokens that a sliding layer sees; null when none were measured.
    pub sliding_window: Option<usize>,
    /// Leading dimensions of a head that sliding layers rotate; null when none were measured.
    pub rotary_dims_sliding: Option<usize>,
    /// Leading dimensions of a head that full layers rotate; null when none were measured.
    pub rotary_dims_full: Option<usize>,
}

/// How far a number can be traced. Estimates have no place in a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// Measured by whoever wrote the table.
    Measured,
    /// Measured by others, who published the number.
    Published,
    /// Read from the report of another tool.
    Imported,
}

impl Origin {
    /// Spelling in a table.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Measured => "measured",
            Self::Published => "published",
            Self::Imported => "imported",
        }
    }
}

/// Where times come from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// Name within the table.
    pub id: String,
    /// How far the numbers can be traced.
    pub origin: Origin,
    /// Who measured what, how and when.
    pub text: String,
}

/// What was measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum PartKind {
    /// A sliding layer with a full window. Its time does not depend on the context, which is null.
    #[serde(rename = "sliding_attention")]
    Sliding,
    /// A full layer; has a context.
    #[serde(rename = "full_attention")]
    Full,
    /// The head; has neither layout nor context.
    #[serde(rename = "head")]
    Head,
    /// Several layers in one graph, which the variant names; never part of a composition.
    #[serde(rename = "block")]
    Block,
}

impl PartKind {
    /// Spelling in a table.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sliding => LayerKind::Sliding.name(),
            Self::Full => LayerKind::Full.name(),
            Self::Head => "head",
            Self::Block => "block",
        }
    }
}

impl fmt::Display for PartKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl From<LayerKind> for PartKind {
    fn from(kind: LayerKind) -> Self {
        match kind {
            LayerKind::Sliding => Self::Sliding,
            LayerKind::Full => Self::Full,
        }
    }
}

/// What the one number stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Statistic {
    /// The median of n runs.
    Median,
    /// The mean of n runs.
    Mean,
    /// The source does not say.
    Unstated,
}

/// The time of one part of a step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measurement {
    /// Runtime and unit, as `qnn-npu`.
    pub runtime: String,
    /// Number format of weights and activations, as `fp16` or `w8a16`.
    pub precision: String,
    /// Spelling of the graph; null when the source does not say.
    pub dialect: Option<String>,
    /// The part.
    pub kind: PartKind,
    /// Cache layout of a layer.
    pub layout: Option<CacheLayout>,
    /// Entries of a full layer's cache.
    pub context: Option<usize>,
    /// Tokens of the step.
    pub tokens: usize,
    /// In what the graph differs from the plain one; such rows are never part of a composition.
    pub variant: Option<String>,
    /// The time in ms.
    pub ms: f64,
    /// What it stands for.
    pub statistic: Statistic,
    /// Shortest time in ms.
    pub low: Option<f64>,
    /// Longest time in ms.
    pub high: Option<f64>,
    /// Number of runs.
    pub n: Option<u64>,
    /// SNR of the part's output in dB, as the source gives it.
    pub snr_db: Option<f64>,
    /// Whether only the time is right: the build computes something else than the layer.
    pub timing_only: bool,
    /// Id of the source.
    pub source: String,
    /// What the source says of this number.
    pub note: Option<String>,
}

/// What of a measurement may occur only once in a table.
#[derive(PartialEq, Eq, Hash)]
struct Key<'a> {
    names: (&'a str, &'a str, Option<&'a str>, Option<&'a str>),
    part: (PartKind, Option<CacheLayout>),
    lengths: (Option<usize>, usize),
    timing_only: bool,
}

impl Measurement {
    fn key(&self) -> Key<'_> {
        Key {
            names: (
                &self.runtime,
                &self.precision,
                self.dialect.as_deref(),
                self.variant.as_deref(),
            ),
            part: (self.kind, self.layout),
            lengths: (self.context, self.tokens),
            timing_only: self.timing_only,
        }
    }
}

impl Table {
    /// The published times of a Galaxy S25, with the model that they are of.
    ///
    /// # Errors
    /// None that a caller could cause: the file is a part of the program.
    pub fn galaxy_s25() -> Result<Self, ProfileError> {
        let text = include_bytes!("../tables/galaxy-s25.json");
        Self::from_json(Path::new("galaxy-s25.json"), text)
    }

    /// Reads a table with contents `text`; `file` is its name in messages.
    ///
    /// # Errors
    /// When the text is no table, with the first value that is not accepted.
    pub fn from_json(file: &Path, text: &[u8]) -> Result<Self, ProfileError> {
        let error = |reason: String| ProfileError::Table { file: file.into(), reason };
        if text.len() > MAX_BYTES {
            let length = text.len();
            return Err(error(format!("{length} bytes long; accepted: at most {MAX_BYTES}")));
        }
        if let Some(mistake) = mistaken_file(text) {
            return Err(error(mistake.into()));
        }
        let table: Self = serde_json::from_slice(text)
            .map_err(|e| error(format!("no table of layer times: {e}")))?;
        table.validate(file)?;
        Ok(table)
    }

    /// A table of nothing yet, for [`add`](Self::add): one without measurements is not accepted
    /// when it is read.
    pub fn new(device: String, soc: String, model: LayerShape) -> Self {
        Self {
            format: FORMAT.to_owned(),
            version: VERSION,
            device,
            soc,
            model,
            sources: Vec::new(),
            measurements: Vec::new(),
        }
    }

    /// Adds `row`, whose source becomes the one with this origin and text; `file` is the table's
    /// name in messages.
    ///
    /// # Errors
    /// When the table with that row would not be accepted, as when it has such a row already.
    pub fn add(
        mut self,
        file: &Path,
        (origin, text): (Origin, String),
        row: Measurement,
    ) -> Result<Self, ProfileError> {
        let same = |source: &&Source| source.origin == origin && source.text == text;
        let source = match self.sources.iter().find(same) {
            Some(source) => source.id.clone(),
            None => {
                let known: HashSet<&str> =
                    self.sources.iter().map(|source| source.id.as_str()).collect();
                let name = |number: usize| format!("{}-{number}", origin.name());
                let mut number = 1;
                while known.contains(name(number).as_str()) {
                    number += 1;
                }
                let id = name(number);
                self.sources.push(Source { id: id.clone(), origin, text });
                id
            }
        };
        self.measurements.push(Measurement { source, ..row });
        self.validate(file)?;
        Ok(self)
    }

    /// The table as a file.
    ///
    /// # Errors
    /// None: a table is plain values.
    pub fn to_json(&self) -> Result<String, serde_json::Error> {
        serde_json::to_string_pretty(self).map(|text| text + "\n")
    }

    fn validate(&self, file: &Path) -> Result<(), ProfileError> {
        let top = Place { file, place: "the table".into() };
        if self.format != FORMAT {
            return Err(top.value("format", show(&self.format), format!("{FORMAT:?}")));
        }
        if self.version != VERSION {
            return Err(top.value("version", self.version.to_string(), VERSION.to_string()));
        }
        top.name("device", &self.device)?;
        top.name("soc", &self.soc)?;
        for (key, length) in
            [("sources", self.sources.len()), ("measurements", self.measurements.len())]
        {
            if length == 0 || length > MAX_ROWS {
                let value = format!("a list of {length}");
                return Err(top.value(key, value, format!("1 to {MAX_ROWS} entries")));
            }
        }
        let shape = Place { file, place: "model".into() };
        for (key, value) in self.model.values() {
            shape.count(key, value)?;
        }
        let mut ids = HashSet::new();
        for (index, source) in self.sources.iter().enumerate() {
            let place = Place { file, place: format!("sources[{index}]") };
            place.name("id", &source.id)?;
            place.text("text", &source.text)?;
            if !ids.insert(source.id.as_str()) {
                return Err(place.value("id", show(&source.id), "each id once".into()));
            }
        }
        let mut keys = HashSet::new();
        for (index, row) in self.measurements.iter().enumerate() {
            let place = Place { file, place: format!("measurements[{index}]") };
            self.validate_row(row, &place)?;
            if !ids.contains(row.source.as_str()) {
                return Err(place.value("source", show(&row.source), "the id of a source".into()));
            }
            if !keys.insert(row.key()) {
                let accepted = "each part of a step once; a variant tells graphs apart".into();
                return Err(place.value("ms", row.ms.to_string(), accepted));
            }
        }
        Ok(())
    }

    fn validate_row(&self, row: &Measurement, place: &Place<'_>) -> Result<(), ProfileError> {
        place.name("runtime", &row.runtime)?;
        place.name("precision", &row.precision)?;
        for (key, name) in [("dialect", &row.dialect), ("variant", &row.variant)] {
            if let Some(name) = name {
                place.name(key, name)?;
            }
        }
        if let Some(note) = &row.note {
            place.text("note", note)?;
        }
        // Which keys a part has: layout, context, variant.
        let [layout, context, variant] = match row.kind {
            PartKind::Sliding => [true, false, row.variant.is_some()],
            PartKind::Full => [true, true, row.variant.is_some()],
            PartKind::Head => [false, false, row.variant.is_some()],
            PartKind::Block => [true, true, true],
        };
        let has = [
            ("layout", row.layout.is_some(), layout),
            ("context", row.context.is_some(), context),
            ("variant", row.variant.is_some(), variant),
        ];
        for (key, found, needed) in has {
            if found != needed {
                let value = if found { "given" } else { "null" };
                let accepted = if needed { "a value" } else { "null" };
                return Err(place.value(key, value.into(), format!("{accepted} for {}", row.kind)));
            }
        }
        let shape = &self.model;
        let measured = match row.kind {
            PartKind::Sliding => shape.sliding_window.and(shape.rotary_dims_sliding),
            PartKind::Full => shape.rotary_dims_full,
            PartKind::Head | PartKind::Block => Some(0),
        };
        if measured.is_none() {
            let accepted = "a kind whose window and rotary dims the model has".into();
            return Err(place.value("kind", row.kind.to_string(), accepted));
        }
        for (key, length) in [("context", row.context), ("tokens", Some(row.tokens))] {
            if let Some(length) = length
                && (length == 0 || length > MAX_LENGTH)
            {
                return Err(place.value(key, length.to_string(), format!("1 to {MAX_LENGTH}")));
            }
        }
        for (key, ms) in [("ms", Some(row.ms)), ("low", row.low), ("high", row.high)] {
            if let Some(ms) = ms
                && !(ms > 0.0 && ms <= MAX_MS)
            {
                return Err(place.value(key, ms.to_string(), format!("above 0, to {MAX_MS}")));
            }
        }
        if row.low.is_some_and(|low| low > row.ms) || row.high.is_some_and(|high| high < row.ms) {
            let accepted = "a time between low and high".into();
            return Err(place.value("ms", row.ms.to_string(), accepted));
        }
        if row.n == Some(0) {
            return Err(place.value("n", "0".into(), "1 or more, or null".into()));
        }
        Ok(())
    }

    /// Refuses a model whose layers are not those that were measured; the number of layers does
    /// not matter.
    ///
    /// # Errors
    /// The first value that differs.
    pub fn require_shape(&self, config: &ModelConfig) -> Result<(), ProfileError> {
        let model = LayerShape::of(config);
        if self.model.family != model.family {
            return Err(ProfileError::Shape {
                key: "model_type",
                table: self.model.family.model_type().into(),
                model: model.family.model_type().into(),
            });
        }
        for ((key, table), (_, model)) in self.model.values().into_iter().zip(model.values()) {
            // What only one kind of layer needs does not matter to a model without that kind.
            let Some(model) = model else { continue };
            if table != Some(model) {
                return Err(ProfileError::Shape {
                    key,
                    table: table.map_or_else(|| "null".into(), |value| value.to_string()),
                    model: model.to_string(),
                });
            }
        }
        Ok(())
    }
}

impl LayerShape {
    /// The shape of a model's layers.
    pub fn of(config: &ModelConfig) -> Self {
        let rotary = |kind| {
            let used = config.layer_types.contains(&kind);
            config.rope(kind).filter(|_| used).map(|rope| rope.dims)
        };
        Self {
            family: config.family,
            hidden_size: config.hidden_size,
            intermediate_size: config.intermediate_size,
            num_attention_heads: config.num_attention_heads,
            num_key_value_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
            vocab_size: config.vocab_size,
            sliding_window: config.sliding_window,
            rotary_dims_sliding: rotary(LayerKind::Sliding),
            rotary_dims_full: rotary(LayerKind::Full),
        }
    }

    fn values(&self) -> [(&'static str, Option<usize>); 9] {
        [
            ("hidden_size", Some(self.hidden_size)),
            ("intermediate_size", Some(self.intermediate_size)),
            ("num_attention_heads", Some(self.num_attention_heads)),
            ("num_key_value_heads", Some(self.num_key_value_heads)),
            ("head_dim", Some(self.head_dim)),
            ("vocab_size", Some(self.vocab_size)),
            ("sliding_window", self.sliding_window),
            ("rotary_dims_sliding", self.rotary_dims_sliding),
            ("rotary_dims_full", self.rotary_dims_full),
        ]
    }
}

/// A part of a file, for messages.
struct Place<'a> {
    file: &'a Path,
    place: String,
}

impl Place<'_> {
    fn value(&self, key: &'static str, value: String, accepted: String) -> ProfileError {
        let Self { file, place } = self;
        ProfileError::Value { file: (*file).into(), place: place.clone(), key, value, accepted }
    }

    fn name(&self, key: &'static str, value: &str) -> Result<(), ProfileError> {
        self.bounded(key, value, MAX_NAME)
    }

    fn text(&self, key: &'static str, value: &str) -> Result<(), ProfileError> {
        self.bounded(key, value, MAX_TEXT)
    }

    fn bounded(&self, key: &'static str, value: &str, limit: usize) -> Result<(), ProfileError> {
        if !is_plain(value, limit) {
            let accepted = format!("1 to {limit} bytes without control characters");
            return Err(self.value(key, show(value), accepted));
        }
        Ok(())
    }

    fn count(&self, key: &'static str, value: Option<usize>) -> Result<(), ProfileError> {
        match value {
            Some(value) if value == 0 || value > 1 << 31 => {
                Err(self.value(key, value.to_string(), "1 to 2^31".into()))
            }
            _ => Ok(()),
        }
    }
}

/// Whether a text can be printed in a line: 1 to `limit` bytes, nothing that would act on a terminal
/// or reorder the line.
pub(crate) fn is_plain(value: &str, limit: usize) -> bool {
    let acts =
        |c: char| c.is_control() || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    !value.trim().is_empty() && value.len() <= limit && !value.chars().any(acts)
}

/// The beginning of a text that may be long, quoted.
fn show(text: &str) -> String {
    match text.char_indices().nth(MAX_NAME) {
        Some((end, _)) => format!("{:?}…", &text[..end]),
        None => format!("{text:?}"),
    }
}

/// Refuses a context or a number of tokens that no step has.
pub(crate) fn require_length(what: &'static str, length: usize) -> Result<(), ProfileError> {
    if length == 0 || length > MAX_LENGTH {
        return Err(ProfileError::Choice {
            what,
            value: length.to_string(),
            accepted: format!("1 to {MAX_LENGTH}"),
        });
    }
    Ok(())
}
