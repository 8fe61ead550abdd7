//! What a model family is: the weights of its layers, its maths, and how its files spell both.
//!
//! A family is one file in this folder that fills a [`Description`], and a line in [`FAMILIES`].
//! Everything that goes over the weights of a model goes over [`SlotSpec`]s, and only the forwards
//! look at the [`Block`]. No other source file of the checkpoint names a family.

mod pre_tokenizers;
mod qwen3;
mod spark;

pub use pre_tokenizers::PreTokenizer;

use crate::{LayerKind, ModelConfig};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::fmt;

/// All families, in the order in which messages list them.
static FAMILIES: &[&Description] = &[&spark::SPARK, &qwen3::QWEN3];

/// A model family.
#[derive(Clone, Copy)]
pub struct Family(&'static Description);

/// What one file of this folder says.
pub(crate) struct Description {
    /// Name for people.
    pub(crate) name: &'static str,
    /// `model_type` of config.json.
    pub(crate) model_type: &'static str,
    /// The entry of `architectures` in config.json.
    pub(crate) class: &'static str,
    /// `general.architecture` of a GGUF file, which is the prefix of its keys too.
    pub(crate) architecture: &'static str,
    /// The embedding, the last norm and the head.
    pub(crate) outer: OuterNames,
    /// The weights of a layer, in the order in which a token meets them.
    pub(crate) slots: &'static [SlotSpec],
    pub(crate) block: Block,
    pub(crate) config: ConfigSpelling,
    /// Whether a GGUF file says of each layer whether it slides.
    pub(crate) window_pattern: bool,
    pub(crate) presets: &'static [Preset],
}

/// Names of the weights that belong to no layer.
pub(crate) struct OuterNames {
    pub(crate) embedding: Names,
    pub(crate) final_norm: Names,
    pub(crate) head: Names,
}

/// A weight as files call it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Names {
    /// In a Hugging Face folder.
    pub(crate) hugging_face: &'static str,
    /// In a GGUF file.
    pub(crate) gguf: &'static str,
}

/// How config.json says what the family has of its own.
pub(crate) struct ConfigSpelling {
    /// Value of `hidden_act`.
    pub(crate) activation: &'static str,
    /// Keys that have one accepted value.
    pub(crate) fixed: &'static [Fixed],
    /// Keys that do not change what is computed, besides those that do so for no family.
    pub(crate) ignored: &'static [&'static str],
    /// Counts that the reference assumes where their key is missing.
    pub(crate) assumed: &'static [(Count, usize)],
    /// The layer types of a config that does not list them, and their description.
    pub(crate) layer_types: fn(usize) -> Vec<LayerKind>,
    /// What a missing `layer_types` is taken for; without it is the only form that there is.
    pub(crate) layer_types_assumed: Option<&'static str>,
    /// Where the rotary embeddings are.
    pub(crate) rope: RopeSpelling,
}

/// A key with one accepted value.
pub(crate) struct Fixed {
    pub(crate) key: &'static str,
    pub(crate) value: FixedValue,
    /// Whether a config without the key is worth a warning.
    pub(crate) expected: bool,
    /// Why nothing else is accepted, with a leading separator; may be empty.
    pub(crate) why: &'static str,
}

/// A value of a key.
pub(crate) enum FixedValue {
    Flag(bool),
    Text(&'static str),
}

/// Where config.json has the rotary embeddings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RopeSpelling {
    /// `rope_parameters` with one object for each layer type; no scaling.
    ByLayerType,
    /// `rope_theta` and `rope_scaling`, or one `rope_parameters` with both; yarn is known.
    Flat,
}

/// A published shape.
pub(crate) struct Preset {
    pub(crate) name: &'static str,
    pub(crate) config: fn() -> ModelConfig,
}

/// A count that a model's config gives under one key, whatever the spelling.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Count {
    Hidden,
    Intermediate,
    Layers,
    Heads,
    KeyValueHeads,
    HeadDim,
    Vocabulary,
    Window,
    Positions,
}

impl Count {
    /// The key in config.json.
    pub(crate) const fn key(self) -> &'static str {
        match self {
            Self::Hidden => "hidden_size",
            Self::Intermediate => "intermediate_size",
            Self::Layers => "num_hidden_layers",
            Self::Heads => "num_attention_heads",
            Self::KeyValueHeads => "num_key_value_heads",
            Self::HeadDim => "head_dim",
            Self::Vocabulary => "vocab_size",
            Self::Window => "sliding_window",
            Self::Positions => "max_position_embeddings",
        }
    }

    /// The key in a GGUF file, behind the architecture.
    pub(crate) const fn gguf_key(self) -> &'static str {
        match self {
            Self::Hidden => "embedding_length",
            Self::Intermediate => "feed_forward_length",
            Self::Layers => "block_count",
            Self::Heads => "attention.head_count",
            Self::KeyValueHeads => "attention.head_count_kv",
            Self::HeadDim => "attention.key_length",
            Self::Vocabulary => "vocab_size",
            Self::Window => "attention.sliding_window",
            Self::Positions => "context_length",
        }
    }
}

/// A weight of a layer, by what it is there for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Slot {
    /// Gain of the norm before attention.
    InputNorm,
    /// Queries, keys and values in one matrix.
    QueryKeyValue,
    /// Queries.
    Query,
    /// Keys.
    Key,
    /// Values.
    Value,
    /// Gain of the norm of each head of queries, before the rotation.
    QueryNorm,
    /// Gain of the norm of each head of keys, before the rotation.
    KeyNorm,
    /// One gate a head for what it attended to.
    HeadGate,
    /// From what the heads attended to, back to the residual stream.
    AttentionOut,
    /// Gain of the norm before the feed-forward part.
    PostAttentionNorm,
    /// What goes through the activation.
    MlpGate,
    /// What the activated gate is multiplied with.
    MlpUp,
    /// From the product, back to the residual stream.
    MlpDown,
}

impl Slot {
    /// The half of the layer that it belongs to.
    pub const fn half(self) -> Half {
        match self {
            Self::PostAttentionNorm | Self::MlpGate | Self::MlpUp | Self::MlpDown => {
                Half::FeedForward
            }
            _ => Half::Attention,
        }
    }
}

/// A half of a layer; each adds to the residual stream once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Half {
    /// Attention.
    Attention,
    /// The feed-forward part.
    FeedForward,
}

impl Half {
    /// Both, in the order of a layer.
    pub const ALL: [Self; 2] = [Self::Attention, Self::FeedForward];
}

/// What kind of weight a slot holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SlotKind {
    /// Gains of a norm, one a channel; always numbers.
    Norm,
    /// A matrix that number formats and budgets are about.
    Matrix,
    /// A matrix that is small and whose outputs must be exact: it stays in numbers.
    SmallMatrix,
}

/// What a matrix is multiplied with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FedBy {
    /// The residual stream, or a head, as it is: gains of norms.
    Stream,
    /// What the norm of this slot makes.
    Norm(Slot),
    /// What the heads attended to.
    Attention,
    /// The activated gate times what the matrix of this slot makes.
    Product(Slot),
}

/// Where the result of a slot goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Feeds {
    /// The matrices behind a norm.
    Matrices,
    /// Scores, values and gates of attention.
    Attention,
    /// The product of the feed-forward part.
    Product,
    /// The residual stream.
    Residual,
}

/// A number of rows or columns in terms of the config.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Size {
    /// Width of the residual stream.
    Hidden,
    /// Width of the feed-forward part.
    Intermediate,
    /// Query heads.
    Heads,
    /// Width of a head.
    HeadDim,
    /// All query heads together.
    Query,
    /// All key heads together, or all value heads.
    KeyValue,
    /// Queries, keys and values together.
    QueryKeyValue,
}

impl Size {
    /// The number in a model of `config`.
    pub fn of(self, config: &ModelConfig) -> usize {
        match self {
            Self::Hidden => config.hidden_size,
            Self::Intermediate => config.intermediate_size,
            Self::Heads => config.num_attention_heads,
            Self::HeadDim => config.head_dim,
            Self::Query => config.query_size(),
            Self::KeyValue => config.key_value_size(),
            Self::QueryKeyValue => config.query_size() + 2 * config.key_value_size(),
        }
    }

    /// The number in keys of config.json.
    const fn meaning(self) -> &'static str {
        match self {
            Self::Hidden => "hidden_size",
            Self::Intermediate => "intermediate_size",
            Self::Heads => "num_attention_heads",
            Self::HeadDim => "head_dim",
            Self::Query => "num_attention_heads * head_dim",
            Self::KeyValue => "num_key_value_heads * head_dim",
            Self::QueryKeyValue => "(num_attention_heads + 2 * num_key_value_heads) * head_dim",
        }
    }

    /// A shape in keys of config.json.
    pub(crate) fn meanings(shape: &[Self]) -> String {
        let meanings: Vec<&str> = shape.iter().map(|size| size.meaning()).collect();
        format!("[{}]", meanings.join(", "))
    }
}

/// A weight that every layer of a family has.
#[derive(Debug, Clone, Copy)]
pub struct SlotSpec {
    /// What it is there for.
    pub slot: Slot,
    /// What kind of weight it is.
    pub kind: SlotKind,
    /// Rows and columns, or the length of a gain.
    pub shape: &'static [Size],
    /// What it is multiplied with.
    pub fed_by: FedBy,
    /// Where its result goes.
    pub feeds: Feeds,
    /// Its name within a layer, without `.weight`.
    pub(crate) names: Names,
    /// What may be stored in its place in a folder: rows of it under other names, first to last.
    pub(crate) pieces: &'static [PieceName],
}

/// Rows of a slot that are stored by themselves.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PieceName {
    /// Name within a layer in a Hugging Face folder, without `.weight`.
    pub(crate) hugging_face: &'static str,
    pub(crate) rows: Size,
}

impl SlotSpec {
    /// A gain of `size` channels.
    const fn norm(slot: Slot, size: &'static [Size], feeds: Feeds, names: Names) -> Self {
        let (kind, fed_by) = (SlotKind::Norm, FedBy::Stream);
        Self { slot, kind, shape: size, fed_by, feeds, names, pieces: &[] }
    }

    /// A matrix, `[rows, columns]`.
    const fn matrix(
        slot: Slot,
        shape: &'static [Size],
        fed_by: FedBy,
        feeds: Feeds,
        names: Names,
    ) -> Self {
        Self { slot, kind: SlotKind::Matrix, shape, fed_by, feeds, names, pieces: &[] }
    }

    /// The shape in a model of `config`.
    pub fn shape_in(&self, config: &ModelConfig) -> Vec<usize> {
        self.shape.iter().map(|size| size.of(config)).collect()
    }

    /// The name in the Hugging Face folder of the weight in a layer.
    pub fn name(&self, layer: usize) -> String {
        layer_name(layer, self.names.hugging_face)
    }
}

/// The name in a Hugging Face folder of `part` of a layer.
pub(crate) fn layer_name(layer: usize, part: &str) -> String {
    format!("model.layers.{layer}.{part}.weight")
}

/// The maths of a layer. What differs between layers is in the config: windows and rotations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// Its attention.
    pub attention: AttentionBlock,
    /// Its feed-forward part.
    pub mlp: MlpBlock,
}

/// The maths of attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionBlock {
    /// Whether each head of queries and keys goes through a norm before the rotation, with the
    /// gains of [`Slot::QueryNorm`] and [`Slot::KeyNorm`].
    pub qk_norm: bool,
    /// Whether what each head attended to is multiplied with a sigmoid of [`Slot::HeadGate`].
    pub head_gate: bool,
}

/// The maths of the feed-forward part: down(activation(gate(x)) · up(x)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MlpBlock {
    /// What the gate goes through.
    pub activation: Activation,
}

/// An activation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Activation {
    /// x/2 · (1 + erf(x/√2)) (Hendrycks and Gimpel, 2016); artifacts may have an approximation.
    Gelu,
    /// x · sigmoid(x) (Elfwing et al., 2017; SwiGLU: Shazeer, 2020).
    Silu,
}

impl Activation {
    /// Name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gelu => "gelu",
            Self::Silu => "silu",
        }
    }
}

impl Family {
    /// All families.
    pub fn all() -> impl Iterator<Item = Self> {
        FAMILIES.iter().map(|description| Self(description))
    }

    /// The family of a `model_type` of config.json.
    pub fn of_model_type(model_type: &str) -> Option<Self> {
        Self::all().find(|family| family.0.model_type == model_type)
    }

    /// The family of a `general.architecture` of a GGUF file.
    pub fn of_architecture(architecture: &str) -> Option<Self> {
        Self::all().find(|family| family.0.architecture == architecture)
    }

    /// Name for people.
    pub fn name(self) -> &'static str {
        self.0.name
    }

    /// `model_type` of config.json.
    pub fn model_type(self) -> &'static str {
        self.0.model_type
    }

    /// `general.architecture` of a GGUF file.
    pub fn architecture(self) -> &'static str {
        self.0.architecture
    }

    /// The weights of a layer, in the order in which a token meets them.
    pub fn slots(self) -> &'static [SlotSpec] {
        self.0.slots
    }

    /// The weight of a layer that is there for `slot`; `None` where the family has none.
    pub fn slot(self, slot: Slot) -> Option<&'static SlotSpec> {
        self.0.slots.iter().find(|spec| spec.slot == slot)
    }

    /// The maths of a layer.
    pub fn block(self) -> Block {
        self.0.block
    }

    pub(crate) fn description(self) -> &'static Description {
        self.0
    }

    /// The name of the embedding table in a Hugging Face folder.
    pub fn embedding_name(self) -> &'static str {
        self.0.outer.embedding.hugging_face
    }

    /// The name in a GGUF file of a tensor of the family; other names are returned unchanged.
    pub(crate) fn gguf_name(self, name: &str) -> String {
        let OuterNames { embedding, final_norm, head } = &self.0.outer;
        if let Some(outer) =
            [embedding, final_norm, head].into_iter().find(|names| names.hugging_face == name)
        {
            return outer.gguf.to_owned();
        }
        let of_layer = || {
            let rest = name.strip_prefix("model.layers.")?.strip_suffix(".weight")?;
            let (layer, part) = rest.split_once('.')?;
            let spec = self.0.slots.iter().find(|spec| spec.names.hugging_face == part)?;
            Some(format!("blk.{layer}.{}.weight", spec.names.gguf))
        };
        of_layer().unwrap_or_else(|| name.to_owned())
    }

    /// What the families are called under a key, for messages: `model_type` or the architecture.
    pub(crate) fn known(name: fn(Self) -> &'static str) -> String {
        let names: Vec<String> = Self::all().map(|family| format!("{:?}", name(family))).collect();
        names.join(" and ")
    }
}

impl PartialEq for Family {
    fn eq(&self, other: &Self) -> bool {
        self.0.model_type == other.0.model_type
    }
}

impl Eq for Family {}

impl fmt::Debug for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.model_type)
    }
}

/// The name for people.
impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.0.name)
    }
}

/// As its `model_type`.
impl Serialize for Family {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.0.model_type)
    }
}

impl<'de> Deserialize<'de> for Family {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        Self::of_model_type(&name).ok_or_else(|| {
            let known = Self::known(Self::model_type);
            de::Error::custom(format!("the model type {name:?} is not known; known are {known}"))
        })
    }
}

/// Names of the published shapes that [`preset`] knows.
pub fn presets() -> Vec<&'static str> {
    let all = FAMILIES.iter().flat_map(|family| family.presets);
    all.map(|preset| preset.name).collect()
}

/// The config of a published model.
///
/// ```
/// let config = firesteel_checkpoint::preset("spark-x2.5-1.7b").unwrap();
/// assert_eq!((config.num_layers(), config.hidden_size), (28, 2048));
/// assert!(firesteel_checkpoint::preset("spark-x2.5-7b").is_none());
/// ```
pub fn preset(name: &str) -> Option<ModelConfig> {
    let mut all = FAMILIES.iter().flat_map(|family| family.presets);
    all.find(|preset| preset.name == name).map(|preset| (preset.config)())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn descriptions_fit_together() {
        for family in Family::all() {
            let slots = family.slots();
            let names: HashSet<_> = slots.iter().map(|spec| spec.names.hugging_face).collect();
            let stored: HashSet<_> = slots.iter().map(|spec| spec.names.gguf).collect();
            let kinds: HashSet<_> = slots.iter().map(|spec| spec.slot).collect();
            assert_eq!(names.len(), slots.len(), "{family}");
            assert_eq!(stored.len(), slots.len(), "{family}");
            assert_eq!(kinds.len(), slots.len(), "{family}");
            for spec in slots {
                let dimensions = if spec.kind == SlotKind::Norm { 1 } else { 2 };
                assert_eq!(spec.shape.len(), dimensions, "{family}: {:?}", spec.slot);
                let before = match spec.fed_by {
                    FedBy::Norm(slot) | FedBy::Product(slot) => Some(slot),
                    FedBy::Stream | FedBy::Attention => None,
                };
                // What makes the input has as many channels as the matrix has columns.
                if let Some(maker) = before.map(|slot| family.slot(slot).unwrap()) {
                    assert_eq!(maker.shape.first(), spec.shape.last(), "{family}: {:?}", spec.slot);
                }
            }
            for half in Half::ALL {
                let last = slots
                    .iter()
                    .filter(|spec| spec.slot.half() == half && spec.feeds == Feeds::Residual);
                assert_eq!(last.count(), 1, "{family}: {half:?}");
            }
            let attention = family.block().attention;
            let has = |slot| family.slot(slot).is_some();
            assert_eq!(attention.qk_norm, has(Slot::QueryNorm) && has(Slot::KeyNorm));
            assert_eq!(attention.head_gate, has(Slot::HeadGate));
            assert_ne!(has(Slot::QueryKeyValue), has(Slot::Query));
            assert_eq!(Family::of_model_type(family.model_type()), Some(family));
            assert_eq!(Family::of_architecture(family.architecture()), Some(family));
            let text = serde_json::to_string(&family).unwrap();
            assert_eq!(serde_json::from_str::<Family>(&text).unwrap(), family);
        }
        let error = serde_json::from_str::<Family>("\"llama\"").unwrap_err().to_string();
        assert!(error.contains("\"llama\" is not known; known are \"spark2_5\" and"), "{error}");
    }

    #[test]
    fn presets_are_of_their_family() {
        for name in presets() {
            let config = preset(name).unwrap();
            let (read, warnings) =
                ModelConfig::from_json("config.json".as_ref(), config.to_json().as_bytes())
                    .unwrap();
            assert_eq!(read, config, "{name}");
            assert!(warnings.is_empty(), "{name}: {warnings:?}");
        }
    }
}
