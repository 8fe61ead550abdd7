//! From a checkpoint to the step graph.
//!
//! [`build`] writes the graph node by node from the configuration; nothing is traced. The same
//! step is spelled for different readers ([`Dialect`]), and [`lint`] proves that a graph holds
//! nothing that its reader rejects.

mod lint;
mod options;
mod step;
mod weights;

pub use lint::{Finding, linear_weight, lint};
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
        first: Finding,
    },
}

impl From<CheckpointError> for ExportError {
    fn from(error: CheckpointError) -> Self {
        Self::Checkpoint(Box::new(error))
    }
}
