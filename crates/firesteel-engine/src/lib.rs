//! CPU inference from the checkpoint: an implementation of the model that shares nothing with the
//! step graph, so that one can be checked against the other.
//!
//! An [`Engine`] holds a shared [`Checkpoint`]; an [`EngineRunner`] executes the steps of one
//! [`StepSpec`] on it. Weights stay where the checkpoint keeps them and are widened some rows at a
//! time. Activations and sums are f64; only the tensors of the contract are rounded, each once, to
//! the element type that the contract names. The result does not depend on the number of threads:
//! every value is computed by one task in one fixed order.
//!
//! # On the kernels
//!
//! A [`CpuModel`] is the same model for the CPU's kernels, in f32 and with quantized products where
//! the weights are quantized. Float weights stay in the mapped files; quantized ones, and what a
//! folder has in pieces or at odd offsets, are packed once into a file of the cache folder, keyed
//! by their contents, and mapped from then on ([`PackedCache`]). Blocks without a kernel (Q4_1,
//! Q5_K) become f16 with a warning; the gate of the heads is always floats.
//!
//! Its [`CpuSequence`]s are what generates. They have caches of their own, rings and growing ones
//! in f32, f16 or q8, alone or in a [`CpuBatch`]. The logits are the same bytes however a text is
//! split into forwards, whatever else is in the batch, and on any number of threads.
//!
//! Its [`CpuRunner`]s take the steps of the contract, as the other runners do. The kernels know no
//! masks: a mask becomes the visible range of each token, as positions, so it has to be one in
//! which tokens lose sight of the cache and never regain it (a causal mask, with a window or
//! without), and others are refused. Runners and sequences run the same layers, but add the keys of
//! a token in another order.
//!
//! # What matrices meet
//!
//! A [`Calibration`] watches the engine read a text. It has the mean square of every column of a
//! matrix's input (llama.cpp's importance matrix), and what an error of each matrix does to the
//! residual stream. It shows the inputs to others, of the whole model or layer by layer.
//!
//! [`Checkpoint`]: firesteel_checkpoint::Checkpoint
//! [`StepSpec`]: firesteel_step::StepSpec

mod attention;
mod calibrate;
mod cpu;
mod embedding;
mod engine;
mod fit;
mod math;

pub use calibrate::Calibration;
pub use cpu::{
    BatchEntry, CpuBatch, CpuModel, CpuOptions, CpuRunner, CpuSequence, KvFormat, KvMemory,
    PackedCache, PackedWeights, SequenceOptions,
};
pub use embedding::CheckpointEmbedding;
pub use engine::{Engine, EngineOptions, EngineRunner};
pub use math::GeluKind;

use firesteel_checkpoint::{CheckpointError, LayerKind, WeightFormat};
use firesteel_kernels::KernelError;
use firesteel_step::{Role, RunnerError, StepError};
use firesteel_tensor::TensorError;

/// Name of the runner in reports and errors.
const NAME: &str = "engine";

/// What can go wrong in the engine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The step was made for another model.
    #[error("{what} of the step is {step}, but {model} makes it {expected}")]
    Mismatch {
        /// What differs.
        what: String,
        /// Value in the step.
        step: String,
        /// Where the checkpoint is.
        model: String,
        /// Value that the checkpoint's config makes.
        expected: String,
    },
    /// The step lacks a tensor that the model computes with or returns.
    #[error("the step has no tensor for {role:?}")]
    Missing {
        /// What the tensor would be.
        role: Role,
    },
    /// The inputs, the outputs or the step itself break the contract.
    #[error(transparent)]
    Step(#[from] StepError),
    /// A weight cannot be read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A mask is no causal one, which the kernels need.
    #[error(
        "the mask of {kind} layers lets token {token} of the step see what a causal mask does not; \
         use the engine runner for such masks"
    )]
    Mask {
        /// Layers that the mask is for.
        kind: LayerKind,
        /// Token of the step.
        token: usize,
    },
    /// A token id beyond the embedding table.
    #[error("{tensor}: token id {id} has no row, 0 to {last} are accepted")]
    TokenId {
        /// The table.
        tensor: String,
        /// The id.
        id: u32,
        /// The last row.
        last: usize,
    },
    /// Room for another number of embeddings.
    #[error("{tensor}: {ids} ids of width {width} do not fill {values} values")]
    EmbeddingLength {
        /// The table.
        tensor: String,
        /// Ids given.
        ids: usize,
        /// Width of a row.
        width: usize,
        /// Values there is room for.
        values: usize,
    },
    /// A sequence in a batch of another model.
    #[error("a sequence of the batch was made by another model; run it on that one")]
    OtherModel,
    /// A key or a value is not finite, or not in the format of the caches.
    #[error(
        "layer {layer}, position {position}: a key or value is not a finite number in {format}{hint}",
        hint = if *format == KvFormat::F32 { "" } else { "; use f32 caches" }
    )]
    KeyValueRange {
        /// The layer.
        layer: usize,
        /// The position.
        position: usize,
        /// How the caches store keys and values.
        format: KvFormat,
    },
    /// Blocks of a format that the kernels lack, with values that do not fit the numbers that are
    /// computed with instead.
    #[error(
        "{tensor}: {count} values of its {format} blocks are too large for f16, in which {format} is \
         computed with; quantize the original weights to q8_0, q6_k, q4_k or q4_0"
    )]
    BlockRange {
        /// The weight.
        tensor: String,
        /// How it is stored.
        format: WeightFormat,
        /// Values that do not fit, of those that were read.
        count: u64,
    },
    /// The operating system refused; the message of the source names the path.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// A text cannot be calibrated with.
    #[error("the calibration cannot be run: {reason}")]
    Calibration {
        /// Why.
        reason: String,
    },
    /// A kernel refuses a shape, or its threads failed.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A tensor has the wrong type or length.
    #[error(transparent)]
    Tensor(#[from] TensorError),
}

impl From<EngineError> for RunnerError {
    fn from(error: EngineError) -> Self {
        match error {
            EngineError::Step(error) => Self::Step(error),
            error => Self::Failed { runner: NAME.into(), message: error.to_string() },
        }
    }
}
