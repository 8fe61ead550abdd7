//! From a checkpoint to the step graph.
//!
//! [`build`] writes the graph node by node from the configuration; nothing is traced. The same step
//! is spelled for different readers ([`Dialect`]), and [`lint`] proves that a graph holds nothing
//! that its reader rejects: before it is written, and again on what was read back.
//!
//! # Dialects
//!
//! | | portable | qnn |
//! |---|---|---|
//! | opset | 18 | 23 |
//! | RMSNorm | decomposed; in f16 divided by the row's largest magnitude first | RMSNormalization |
//! | QK-norm | the same over the rows of each head | RMSNormalization, one operator for all heads |
//! | GELU | Erf, or the tanh chain | Gelu |
//! | SiLU | Sigmoid, Mul | the same; in f16 x/2 · (1 + tanh(x/2)) |
//! | linear | Gemm with a rank-2 weight \[out, in\] | the same |
//! | sigmoid of a head's gate | Sigmoid | in f16 through Tanh |
//!
//! In the qnn dialect [`lint`] also knows what a compiler for integers silently computes in floats:
//! operators of mixed types, products without an integer form, weights with other scales than one a
//! row.
//!
//! # SiLU and sigmoid on the HTP
//!
//! No processor has SiLU as one operator: the compiler for the HTP takes QuickGelu, and opset 24's
//! Swish, apart into Sigmoid and Mul. So these two are the fewest operators and bytes, in integers
//! as in half precision. But the HTP's own sigmoid in half precision is right to 2^-11 of 1 and not
//! of the result, which keeps few bits where it is nearly closed and costs a layer of Qwen3-1.7B's
//! shape 6 dB of its output. Its tanh is right to 2^-11 of the result, so in half precision SiLU
//! goes through that: two operators more (a fifth more once the compiler has cut them up), and 1 %
//! more bytes between operators, none of memory. The sum x/2 + x/2 · tanh(x/2) is as many
//! operators, less right where the gate is nearly closed, and planned with many more.
//!
//! # Weights and half precision
//!
//! Weights keep the checkpoint's row order (\[out, in\], `transB = 1`), so they stream without a
//! transpose and a tied head is the embedding table itself. Queries are scaled before the scores,
//! which keeps half precision in range. No tensor of an f16 graph stays in f32; the manifest says
//! why none has to ([`WideTensors`]). With QK-norm a head is normed, then rotated, then (of
//! queries) scaled. Queries of one key/value head are folded into their own axis (GQA), so keys and
//! values are never expanded.

mod lint;
mod options;
mod step;
mod weights;

pub use lint::{LintFinding, linear_weight, lint};
pub use options::{Dialect, ExportOptions, Gelu, Precision};
pub use step::{HeadGraph, StepGraphs, WideTensors, build, head_rows, weight_of_shard};
pub use weights::WeightSource;

use firesteel_checkpoint::CheckpointError;
use firesteel_graph::GraphError;
use firesteel_step::StepError;

/// Why a graph could not be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// The options do not fit each other or the model.
    #[error("{option} {value}: {problem}")]
    Option {
        /// The option, as on the command line.
        option: &'static str,
        /// Its value.
        value: String,
        /// Why it cannot be used, and what can.
        problem: String,
    },
    /// The step contract refuses the options.
    #[error(transparent)]
    Step(#[from] StepError),
    /// The graph does not fit together.
    #[error(transparent)]
    Graph(#[from] GraphError),
    /// The model lacks a weight.
    #[error(transparent)]
    Checkpoint(Box<CheckpointError>),
    /// The graph holds something its reader rejects.
    #[error("the graph breaks {count} rules of the {dialect} dialect, first {first}")]
    Lint {
        /// Number of findings.
        count: usize,
        /// The dialect.
        dialect: Dialect,
        /// The first finding.
        first: LintFinding,
    },
}

impl From<CheckpointError> for ExportError {
    fn from(error: CheckpointError) -> Self {
        Self::Checkpoint(Box::new(error))
    }
}
