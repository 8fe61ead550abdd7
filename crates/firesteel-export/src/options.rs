use firesteel_step::{CacheLayoutChoice, Logits};
use firesteel_tensor::DType;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Range;

/// Who reads the graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dialect {
    /// Opset 18, RMSNorm and GELU decomposed: ONNX Runtime anywhere, AI Hub, TFLite converters.
    #[default]
    Portable,
    /// Opset 23 with the spellings that the Hexagon compiler keeps as one op.
    Qnn,
}

impl Dialect {
    /// ONNX opset of the dialect.
    pub const fn opset(self) -> i64 {
        match self {
            Dialect::Portable => 18,
            Dialect::Qnn => 23,
        }
    }
}

impl fmt::Display for Dialect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Dialect::Portable => "portable",
            Dialect::Qnn => "qnn",
        })
    }
}

/// Form of the feed-forward activation. The checkpoints were trained with the exact one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Gelu {
    /// x·Φ(x).
    #[default]
    Exact,
    /// The tanh approximation.
    Tanh,
    /// x·sigmoid(1.702·x).
    Sigmoid,
}

/// Number format of weights, activations and the step's inputs and outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// binary32.
    #[default]
    Fp32,
    /// binary16.
    Fp16,
}

impl Precision {
    /// Element type of the precision.
    pub const fn dtype(self) -> DType {
        match self {
            Precision::Fp32 => DType::F32,
            Precision::Fp16 => DType::F16,
        }
    }
}

/// What to export.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportOptions {
    /// Tokens of a step: 1 decodes, more prefill.
    pub tokens: usize,
    /// Entries of a full layer's cache.
    pub context: usize,
    /// Layers, as a range over the model's layers.
    pub layers: Range<usize>,
    /// Cache layout.
    pub cache_layout: CacheLayoutChoice,
    /// First output.
    pub logits: Logits,
    /// Activation form.
    pub gelu: Gelu,
    /// Number format.
    pub precision: Precision,
    /// Reader of the graph.
    pub dialect: Dialect,
    /// Graphs that the vocabulary projection is cut into; 1 keeps it in the step's graph.
    pub head_shards: usize,
}
