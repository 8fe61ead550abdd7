//! Integer number formats of weights and activations, chosen from calibration.
//!
//! [`Calibrator`] runs a step's graph over a text and watches every value; [`Ranges`] is what
//! comes out, as a file. [`plan`] says how many bits each matrix gets, and [`quantize`] writes
//! `QuantizeLinear` and `DequantizeLinear` around every operator, in the spellings that the Hexagon
//! compiler keeps as one op. [`compare`] shows what became of every value.

mod calibrate;
mod compare;
pub mod gguf;
mod greedy;
mod names;
mod observe;
pub mod pipeline;
mod plan;
mod ranges;
mod rewrite;
pub mod weights;

pub use calibrate::{Calibrator, MakeStep};
pub use compare::{Compared, Pair, compare};
pub use observe::{Method, Observer};
pub use plan::{
    Activations, KvFormat, MatrixName, MatrixPlan, Rounding, Scheme, SchemeOptions, ValueFormats,
    WeightWidth, plan,
};
pub use ranges::{ChannelPeak, RANGES_VERSION, Ranges, TensorRange, TextHash};
pub use rewrite::{Quantized, RangeSource, quantize, stored_matrices};

use firesteel_artifact::ArtifactError;
use firesteel_checkpoint::CheckpointError;
use firesteel_engine::EngineError;
use firesteel_export::ExportError;
use firesteel_graph::GraphError;
use firesteel_step::{RunnerError, StepError};
use firesteel_tensor::TensorError;
use std::path::PathBuf;

/// Why a graph cannot be calibrated or quantized.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QuantizeError {
    /// A file could not be read or written; the message names it.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// The ranges are not understood.
    #[error("{}: {problem}", file.display())]
    Ranges {
        /// The file.
        file: PathBuf,
        /// The key, what is wrong with it and what is accepted.
        problem: String,
    },
    /// A value has no range.
    #[error(
        "the ranges have no {key} (for {value}); calibrate the same model, with the layers that \
         are quantized"
    )]
    NoRange {
        /// Key in the ranges.
        key: String,
        /// Name of the value in the graph.
        value: String,
    },
    /// A value is not finite on the calibration text.
    #[error("{name} is not finite on the text; nothing can be said about its range")]
    NonFinite {
        /// Name of the value.
        name: String,
    },
    /// The options do not fit each other or the graph.
    #[error("{option} {value}: {problem}")]
    Option {
        /// The option, as on the command line.
        option: &'static str,
        /// Its value.
        value: String,
        /// Why it cannot be used, and what can.
        problem: String,
    },
    /// The graph has something that cannot be written with integers.
    #[error("{node}: {problem}")]
    Graph {
        /// Name of the node or value.
        node: String,
        /// What is wrong.
        problem: String,
    },
    /// A matrix cannot be rounded.
    #[error("{name}: {source}")]
    Weight {
        /// Name of the matrix.
        name: String,
        /// Why.
        source: Box<weights::WeightError>,
    },
    /// The smallest formats need more bits than there are.
    #[error(
        "{bits} bits for each weight are too few: the formats asked for need {least:.3}; accepted: \
         that many or more"
    )]
    Budget {
        /// Bits asked for.
        bits: f64,
        /// Bits needed.
        least: f64,
    },
    /// What is asked for does not fit together, or does nothing.
    #[error("{problem}")]
    Request {
        /// What is wrong, and the way out.
        problem: String,
    },
    /// A matrix or a text cannot be worked on.
    #[error(transparent)]
    Weights(#[from] weights::WeightError),
    /// A text cannot be run.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The plan and the graph have other matrices.
    #[error("{name}: {problem}")]
    Plan {
        /// Name of the matrix.
        name: String,
        /// What differs.
        problem: String,
    },
    /// The checkpoint cannot be read, or the file not be written.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The graph does not fit together.
    #[error(transparent)]
    Evaluate(#[from] GraphError),
    /// The step contract refuses.
    #[error(transparent)]
    Step(#[from] StepError),
    /// Embeddings cannot be looked up.
    #[error(transparent)]
    Runner(#[from] RunnerError),
    /// The graph cannot be made.
    #[error(transparent)]
    Export(#[from] ExportError),
    /// The artifact cannot be read.
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
    /// Bad tensor arithmetic.
    #[error(transparent)]
    Tensor(#[from] TensorError),
}
