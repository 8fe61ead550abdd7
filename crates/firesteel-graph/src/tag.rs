//! What a node is there for.

use serde::{Deserialize, Serialize};

/// What a node of a step is there for. Names are for people; whoever has to know what a node is asks
/// for its tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Tag {
    /// Number of the layer in the model; `None` outside of the layers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer: Option<usize>,
    /// The part of the layer or of the step.
    pub part: Part,
}

/// Parts of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Part {
    /// What the step takes and returns, in the shape of its rows.
    Border,
    /// The norm before attention.
    AttentionNorm,
    /// The projection to queries, keys and values in one, and its parts.
    QueryKeyValue,
    /// The projection to queries.
    Query,
    /// The projection to keys.
    Key,
    /// The projection to values.
    Value,
    /// The norms of the heads of queries and keys.
    HeadNorm,
    /// The rotation of queries and keys, and their heads in order.
    Rotation,
    /// Joining, cutting and transposing caches.
    Cache,
    /// New keys and values as the step returns them.
    Entry,
    /// Queries times keys.
    Scores,
    /// Scaling, mask and softmax, and the order of what the heads attended to.
    Attention,
    /// Weights times values.
    Mix,
    /// The projection to the gates of the heads.
    HeadGateProjection,
    /// The gates of the heads.
    HeadGate,
    /// The projection back to the residual stream.
    AttentionOut,
    /// The residual stream behind attention.
    AttentionResidual,
    /// The norm before the feed-forward part.
    MlpNorm,
    /// The projection that the activation takes.
    MlpGate,
    /// The activation.
    Activation,
    /// The projection that the activated gate is multiplied with.
    MlpUp,
    /// That product.
    MlpProduct,
    /// The projection back to the residual stream.
    MlpDown,
    /// The residual stream behind the layer.
    MlpResidual,
    /// The row of the last token, of which alone logits are made.
    LastToken,
    /// The norm before the vocabulary projection.
    FinalNorm,
    /// The vocabulary projection.
    Vocabulary,
    /// A change of the element type.
    Conversion,
}

impl Part {
    /// Whether it is the residual stream, to which errors of all layers add up.
    pub const fn is_residual(self) -> bool {
        matches!(self, Self::AttentionResidual | Self::MlpResidual)
    }
}
