//! Two runners, the same inputs: how far apart are they, and where does it begin?
//!
//! [`compare`] runs both with teacher forcing and tells SNR = 10·log10(Σref² / Σ(ref − test)²),
//! top-1 without ties, top-5, KL divergence, log-probabilities, greedy agreement along the
//! reference's continuation, and the earliest layer of the earliest step below the bar.
//! [`compare_text`] and [`compare_prompts`] take two decoders, each with its own embedding and
//! caches: KL divergence and perplexity over a text, kept prefixes of greedy continuations.
//!
//! [`audit`] compares the list of operators that Qualcomm's compiler was given with the graph, node
//! by node, and reads its plan for the device.
//!
//! Nothing here knows who wrote a graph or where ids come from.

pub mod audit;
mod compare;
mod fidelity;
mod logits;
mod snr;

pub use compare::{
    CheckOptions, CheckReport, Feed, FirstBad, GreedyReport, LayerReport, LogitsReport, StepReport,
    compare,
};
pub use fidelity::{PromptOptions, PromptsReport, TextReport, compare_prompts, compare_text};
pub use logits::{LogitsDifference, compare_logits, greedy_choice};
pub use snr::{Snr, SnrMeter};

use firesteel_step::{RunnerError, StepError};

/// Why a comparison could not be made. A bad result is no error; see [`CheckReport`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckError {
    /// The two contracts cannot be compared.
    #[error("the {what} of {reference} and {test} differ: {reference_value} against {test_value}")]
    Contract {
        /// What differs.
        what: &'static str,
        /// Name of the reference runner.
        reference: String,
        /// Name of the other runner.
        test: String,
        /// Value in the reference.
        reference_value: String,
        /// Value in the other.
        test_value: String,
    },
    /// There are not enough tokens for one step, or too many for the context.
    #[error("{count} tokens given, but {problem}")]
    Tokens {
        /// Tokens given.
        count: usize,
        /// What is wrong with that.
        problem: String,
    },
    /// A runner returned something that is not finite, or broke the contract.
    #[error("{runner} at position {position}: {source}")]
    Runner {
        /// Name of the runner.
        runner: String,
        /// Position of the step's first token.
        position: usize,
        /// What happened.
        source: RunnerError,
    },
    /// The contract was broken outside a runner.
    #[error(transparent)]
    Step(#[from] StepError),
}
