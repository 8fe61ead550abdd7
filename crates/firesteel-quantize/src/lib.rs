//! Integer number formats of weights and activations, chosen from calibration.
//!
//! [`pipeline`] is the whole of it: [`pipeline::calibrate`] learns [`Ranges`] from token ids,
//! [`pipeline::quantize_step`] makes integers of a step's graph with them, and
//! [`pipeline::quantize_file`] writes a GGUF file. Their parts: [`Calibrator`] runs a step's graph
//! over a text and watches every value; [`plan`] says how many bits each matrix gets, [`quantize`]
//! rewrites a graph, and [`compare`] shows what became of every value, beside the one in floats and
//! beside what its integers hold. [`weights`] rounds matrices to one scale a row, [`gguf`] to
//! blocks.
//!
//! # Graphs in integers
//!
//! [`quantize`] writes the QDQ form: every operator stands between `DequantizeLinear` and
//! `QuantizeLinear`, one reader each, in the spellings that the Hexagon compiler keeps as one op.
//! What only moves elements keeps the encoding of its input. A cache and its new entries have one
//! encoding. Where a reader wants another type than the value has, one is converted to the other
//! explicitly. A matrix that is kept in floats stands between casts to half precision, without
//! which ONNX Runtime's QNN provider makes integers of it.
//!
//! The residual stream, norms and the gate of the heads have 16 bits in every scheme. Mask and
//! masked scores have fixed ranges, which are widened only where scores are extreme. On equal
//! inputs the integers of every operator are those of ONNX Runtime on the CPU: at most one in a
//! thousand differs, by one step, where a number lies between two integers (f64 here, f32 there).
//!
//! # Ranges
//!
//! [`Calibrator`] runs the qnn graph on the evaluator, which is on every machine and gives the same
//! sums on any number of threads. Ranges have names that do not depend on slice, tokens, layout or
//! head graphs, so one calibration serves all graphs of a model. 16-bit ranges are the extremes and
//! get a quarter of headroom; 8-bit ones lie half way from the extremes to the least squared error
//! ([`Method`] has others).
//!
//! # Equalization and AWQ scales
//!
//! Before matrices are rounded their columns are sized ([`weights::column_sizes`]): divided by a
//! size, with which the producer of what they are multiplied with is multiplied, so that the model
//! computes the same. That is an equalization group of cross-layer equalization (Nagel et al.,
//! 2019). Here the producer is a norm's gains or the up projection; the values of attention are
//! none, because a host sees them in its cache. The paper balances the ranges of both sides. Here
//! only the columns are made equally large, by their root mean square over rows that each count
//! relative to themselves, because the gains have 16 bits and rows have scales of their own.
//!
//! A column that meets much more than others is left larger, as in activation-aware weight
//! quantization (Lin et al., AWQ, 2024): errors of keys and queries grow in the softmax. As there,
//! the factor is a power of what the column meets, and of a few powers the best is taken. Here it
//! is the mean square that is raised to a power, relative to the median and after the sizing, and
//! the noise of rounding to nearest is estimated from the largest weight of each row instead of
//! measured. A rotation of the residual stream, as in QuaRot (Ashkboos et al., 2024), gains no more
//! and would reach every weight.
//!
//! The model that is calibrated and quantized from a checkpoint is the one with sized columns. The
//! ranges hold the sizes, and what columns meet, for which scales are searched where there is no
//! text.
//!
//! # Rounding: Gram matrix, GPTQ, GPTAQ
//!
//! [`weights::round_for_output`] makes the error of a matrix's output small, with all sixteen codes
//! of 4 bits. The error is e G eᵀ for a change e of a row, where the [Gram matrix](weights::Gram) G
//! of the inputs is what GPTQ calls the Hessian, up to a factor of 2. Columns are rounded one after
//! the other, those that meet most first, each making up for those before it: GPTQ (Frantar et al.,
//! 2022), which is Babai's nearest plane. It goes in panels, so that nearly all of it is products
//! of matrices. Other than in the paper, each row is rounded with a few scales, of which the best
//! is kept; its codes are then changed one by one where that lowers the error, in turn with the
//! scale; and the damping is a share of each column's own sum instead of the mean's. A text that is
//! too short to tell correlations from chance (by the measure of Schäfer and Strimmer, 2005) counts
//! each column by itself.
//!
//! [`weights::round_layers`] rounds the matrices in the order in which a token meets them, each by
//! itself (for large models) or with the inputs that it has behind those that are integers already.
//! Behind integers it also makes up for a part of the errors in these inputs: the asymmetric
//! calibration of GPTAQ (Li et al., 2025). The paper has a term for that in the update of every
//! column. Here half of the least-squares change of the weights is made before they are rounded;
//! half, because what a text says of the errors does not all hold for others.
//!
//! Where the whole model is rounded, a token counts the more the less certain the model is of its
//! successor, because an error changes the more probabilities there: an error δ of the logits makes
//! a KL divergence of δᵀ(diag p − p pᵀ)δ / 2 in the second order, and 1 − Σp² is the trace of that
//! matrix. Without it conversations full of what is certain take the weights from the rest.
//!
//! The rows of a head of queries or keys are rounded together for the scores
//! ([`weights::round_for_scores`]), to which each dimension adds what it meets in the other: the
//! product of a form of the columns and one of the dimensions, as in BoA (Kim et al., 2024),
//! averaged over the rotations by which a query and a key are apart. Not where a norm stands
//! between rows and scores (QK-norm), because it divides errors by the length of the head and takes
//! away what lies along it.
//!
//! # Widths: greedy bit allocation
//!
//! Of mixed widths, that matrix is raised next whose harm falls most for its cost, until the budget
//! is reached; harms are taken to add up. For a graph the harm of a matrix is how much of the harm
//! of a model of 4 bits everywhere goes away when it has 8, so that what the matrices behind it
//! make up for counts less and the head counts in full. It is measured on a held-out split, one
//! sequence in eight, which weights are not rounded for until then. The harm is the noise of the
//! logits, and for a budget of bits the KL divergence as much. A budget of decibels is then
//! measured with all widths together, until it holds. For large models the harm can be estimated
//! instead, from the error of each matrix's output.
//!
//! `cargo run --release -p firesteel-quantize --example weights` prints how near the models are.
//!
//! # GGUF files
//!
//! [`gguf::quantize_gguf`] writes the standard block types, which llama.cpp reads as well. The
//! scales of a block are searched for the least error weighted by the importance of the columns,
//! the mean square of what they meet, which llama.cpp calls an importance matrix.
//! [`gguf::allocate`] is the same greedy allocation over larger types, with the harm that the
//! reference engine estimates over a text
//! ([`Calibration::effects`](firesteel_engine::Calibration::effects)).

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
pub use observe::{Method, RangeObserver};
pub use plan::{
    Activations, GraphKv, MatrixName, MatrixPlan, Rounding, Scheme, SchemeOptions, ValueFormats,
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
