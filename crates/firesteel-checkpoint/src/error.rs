use crate::{Family, Slot, WeightFormat};
use firesteel_tensor::TensorError;
use std::path::PathBuf;

/// What can be wrong with a checkpoint, or with reading or writing one.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The operating system refused; the message of the source names the path.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// There is no cache folder.
    #[error(
        "no cache folder: FIRESTEEL_CACHE, XDG_CACHE_HOME and HOME are all unset; set \
         FIRESTEEL_CACHE to a folder"
    )]
    NoCache,
    /// A path cannot be used as what it was given for.
    #[error("{path}: {reason}")]
    Path {
        /// The path.
        path: PathBuf,
        /// What is wrong and the way out.
        reason: String,
    },
    /// A JSON file is not JSON, has a key twice, or is too large.
    #[error("{file}: {reason}")]
    Json {
        /// The file.
        file: PathBuf,
        /// What the parser says.
        reason: String,
    },
    /// The architecture is not one that this version reads.
    #[error(
        "{file}: {key} is {value}, which firesteel {version} does not know; it knows {known}; \
         if this is a newer architecture, update firesteel"
    )]
    ModelType {
        /// The file.
        file: PathBuf,
        /// The key.
        key: &'static str,
        /// The value found, as JSON.
        value: String,
        /// The architectures of this version.
        known: String,
        /// This version.
        version: &'static str,
    },
    /// A key of a JSON or GGUF file has a value that cannot be used.
    #[error("{file}: {key} is {value}; accepted: {accepted}")]
    Config {
        /// The file.
        file: PathBuf,
        /// The key, with dots between the levels.
        key: String,
        /// The value found, as JSON, or `missing`.
        value: String,
        /// What would be accepted.
        accepted: String,
    },
    /// A file breaks the safetensors format.
    #[error("{file}: not a valid safetensors file: {reason}")]
    SafeTensors {
        /// The file.
        file: PathBuf,
        /// The rule that is broken, with the tensor where there is one.
        reason: String,
    },
    /// A file breaks the GGUF format.
    #[error("{file}: not a valid GGUF file: {reason}")]
    Gguf {
        /// The file.
        file: PathBuf,
        /// The rule that is broken, with the key or tensor where there is one.
        reason: String,
    },
    /// An entry of the index cannot be followed.
    #[error("{file}: entry {tensor:?}: {shard:?} is refused: {reason}")]
    Shard {
        /// The index file.
        file: PathBuf,
        /// Tensor of the entry.
        tensor: String,
        /// Shard name of the entry, shortened when very long.
        shard: String,
        /// What is wrong and what is accepted.
        reason: String,
    },
    /// A tensor has another shape than the config implies.
    #[error("{file}: {tensor} has shape {actual:?}; accepted: {expected:?} = {meaning}")]
    Shape {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its shape.
        actual: Vec<usize>,
        /// The shape needed.
        expected: Vec<usize>,
        /// The needed shape in keys of config.json.
        meaning: Box<str>,
    },
    /// A tensor that the model needs has an element type that cannot be read.
    #[error("{file}: {tensor} has dtype {dtype}; accepted: F32, F16, BF16{hint}")]
    DType {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its type, as the file spells it.
        dtype: String,
        /// The way out, with a leading separator; may be empty.
        hint: &'static str,
    },
    /// The head-wise gate of a layer does not fit the number of heads.
    #[error(
        "{file}: layer {layer}: {tensor} has {rows} rows, but num_attention_heads is {heads}; \
         accepted: one row a head"
    )]
    GateRows {
        /// The file.
        file: PathBuf,
        /// The layer.
        layer: usize,
        /// The tensor.
        tensor: String,
        /// Its rows.
        rows: usize,
        /// Query heads of config.json.
        heads: usize,
    },
    /// A layer has the fused projection and separate ones.
    #[error(
        "{folder}: layer {layer} has both {fused} and {separate}; \
         accepted: the fused tensor or q_proj, k_proj and v_proj, not both"
    )]
    FusedAndSeparate {
        /// The checkpoint.
        folder: PathBuf,
        /// The layer.
        layer: usize,
        /// The fused tensor, within the layer.
        fused: String,
        /// The first separate tensor.
        separate: String,
    },
    /// Tensors that the model needs are not there.
    #[error("{folder}: missing tensors ({count}): {shown}{unexpected}")]
    Missing {
        /// The checkpoint.
        folder: PathBuf,
        /// How many are missing.
        count: usize,
        /// The first few.
        shown: String,
        /// The first few that are there and should not be, with a leading separator; may be empty.
        unexpected: String,
    },
    /// The output head is absent although the config says that it is not shared.
    #[error(
        "{folder}: lm_head.weight is missing and tie_word_embeddings is not true; accepted: a stored \
         lm_head.weight, or tie_word_embeddings true to use the embedding as the head"
    )]
    HeadMissing {
        /// The checkpoint.
        folder: PathBuf,
    },
    /// There are tensors that the architecture does not have.
    #[error("{folder}: unexpected tensors ({count}): {shown}; {reason}")]
    Unexpected {
        /// The checkpoint.
        folder: PathBuf,
        /// How many are unexpected.
        count: usize,
        /// The first few.
        shown: String,
        /// What the first one means, and the way out.
        reason: String,
    },
    /// Elements outside a weight were asked for.
    #[error("{tensor}: elements {first}..{first}+{count} are not inside its {available}")]
    Range {
        /// The weight.
        tensor: String,
        /// First element asked for.
        first: usize,
        /// Number of elements asked for.
        count: usize,
        /// Elements there are.
        available: usize,
    },
    /// Elements of a weight cannot be converted.
    #[error("{tensor}: {source}")]
    Convert {
        /// The weight.
        tensor: String,
        /// The reason.
        source: TensorError,
    },
    /// A weight cannot be written in a format.
    #[error("{tensor}: cannot be written as {format}: {reason}")]
    Format {
        /// The weight.
        tensor: String,
        /// The format.
        format: WeightFormat,
        /// What is wrong and the way out.
        reason: String,
    },
    /// A weight that is to replace another has no counterpart.
    #[error(
        "{tensor} of shape {shape:?} has no place in the model; accepted: a weight of the model in its shape"
    )]
    NoPlace {
        /// The weight.
        tensor: String,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// A weight that the family of the model does not have.
    #[error("layers of {family} have no {slot:?}; accepted: the weights of the family")]
    NoSlot {
        /// The family.
        family: Family,
        /// What the weight would be there for.
        slot: Slot,
    },
    /// A number of layers that the model cannot be cut to.
    #[error("cannot cut the model to {requested} layers; accepted: 1 to {available}")]
    Layers {
        /// Layers asked for.
        requested: usize,
        /// Layers of the model.
        available: usize,
    },
}
