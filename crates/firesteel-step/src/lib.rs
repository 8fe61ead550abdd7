//! The step contract: one autoregressive step of T tokens with explicit KV cache tensors.
//!
//! [`StepSpec`] names every input and output with shape, element type and [`Role`]; a [`Runner`]
//! executes steps; [`KvState`] keeps the caches between steps and is the only code that knows how
//! ring, rolled and growing caches are filled. ARCHITECTURE.md has the contract as a table.
//!
//! # Caches
//!
//! A step is prepared, run, and committed once at most; a commit checks every output before
//! anything is written. It can keep a part of the step's tokens, which is what speculative decoding
//! needs. A sequence goes back to any position that the caches and the marks, copies of the sliding
//! windows, together reach.
//!
//! # Sequences
//!
//! A [`Decoder`] is the seam to generation: a sequence whose tokens stay pending until they are
//! kept. [`StepDecoder`] is one on any runners. A [`BatchDecoder`] runs the next tokens of many
//! sequences in one pass, each of which is a [`Decoder`] itself, and [`TurnTaking`] is one on any
//! decoders.
//!
//! # Integers
//!
//! An [`EncodedRunner`] is a runner on a graph whose cache inputs and new entries are integers: the
//! one place that converts, for every runner, and the integers survive the way through floats.
//!
//! # Positions
//!
//! [`rope_tables`] makes the cosines and sines that the host hands to a step, in f64 and rounded
//! once: rotary embeddings (Su et al., RoFormer, 2021) in the half-split form, and YaRN (Peng et
//! al., 2023) with a static factor.

mod batch;
mod bytes;
mod decoder;
mod encoding;
mod kv;
mod rope;
mod runner;
mod spec;
mod step_decoder;

pub use batch::{BatchDecoder, BatchPart, SequenceId, Sequences, TurnTaking};
pub use bytes::{KvBytes, kv_bytes};
pub use decoder::{Decoder, MARKS, Wanted};
pub use encoding::{EncodedRunner, Encoding, PortEncoding};
pub use kv::{KvState, PreparedStep};
pub use rope::{rope_frequencies, rope_tables};
pub use runner::{Embedding, Runner, RunnerError, StepInputs, StepOutputs};
pub use spec::{
    CacheLayout, CacheLayoutChoice, LayerSpec, Logits, Role, StepOptions, StepSpec, TensorSpec,
};
pub use step_decoder::StepDecoder;

use firesteel_tensor::{DType, TensorError};

/// What can go wrong around a step.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StepError {
    /// The options cannot make a step of this model.
    #[error("{what} is {value}, but {accepted}")]
    Option {
        /// The option.
        what: &'static str,
        /// Its value.
        value: String,
        /// What would be accepted.
        accepted: String,
    },
    /// The context is used up.
    #[error(
        "{tokens} more tokens at position {position} do not fit in a context of {context}; \
         use a larger context or clear the cache"
    )]
    ContextFull {
        /// Tokens already in the cache.
        position: usize,
        /// Tokens of the step.
        tokens: usize,
        /// Entries of a full layer's cache.
        context: usize,
    },
    /// A prepared step was committed twice, or after the cache moved on.
    #[error(
        "the step was prepared for position {prepared}, but the cache is at {current}: \
         each prepared step commits once, before any other"
    )]
    Stale {
        /// Position the step was prepared for.
        prepared: usize,
        /// Position of the cache.
        current: usize,
    },
    /// A part of a step's tokens cannot be kept.
    #[error(
        "{kept} of {tokens} tokens of a step cannot be kept: at most all of them can, and fewer \
         only in steps no longer than the window of every rolled layer"
    )]
    PartOfStep {
        /// Tokens that were to be kept.
        kept: usize,
        /// Tokens of the step.
        tokens: usize,
    },
    /// A tensor does not have the shape or type of the contract.
    #[error("{name}: expected {expected_dtype} {expected:?}, got {actual_dtype} {actual:?}")]
    Shape {
        /// Name in the contract.
        name: String,
        /// Element type of the contract.
        expected_dtype: DType,
        /// Shape of the contract.
        expected: Vec<usize>,
        /// Element type found.
        actual_dtype: DType,
        /// Shape found.
        actual: Vec<usize>,
    },
    /// The number of tensors is not that of the contract.
    #[error("expected {expected} {what}, got {actual}")]
    Count {
        /// Inputs or outputs.
        what: &'static str,
        /// Number in the contract.
        expected: usize,
        /// Number found.
        actual: usize,
    },
    /// An output holds NaN or infinity.
    #[error("{name} is not finite at element {index}; nothing was written to the cache")]
    NonFinite {
        /// Name in the contract.
        name: String,
        /// Flat index of the first such value.
        index: usize,
    },
    /// The step's cache layout is not the one of this state.
    #[error("the step's {what} differs from the cache's: {step} against {cache}")]
    Incompatible {
        /// What differs.
        what: &'static str,
        /// Value in the step.
        step: String,
        /// Value in the cache.
        cache: String,
    },
    /// Bad tensor arithmetic.
    #[error(transparent)]
    Tensor(#[from] TensorError),
}
