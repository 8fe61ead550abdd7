//! A quantization from its options to the file: what is learned from which text, in which order
//! things are rounded, which texts are held out and what a budget of bits is spent on.
//!
//! [`calibrate`] learns [`Ranges`](crate::Ranges), [`quantize_step`] makes integers of a step's
//! graph with them, and [`quantize_file`] writes a GGUF file. They take token ids: which text they
//! come from, and how it was read, is the caller's affair.

mod calibrate;
mod file;
mod graph;

pub use calibrate::{
    CalibrateRequest, LearnedRanges, Outlier, Overflow, calibrate, sequence_length,
};
pub use file::{FileBits, FileRequest, QuantizedFile, quantize_file};
pub use graph::{
    GraphReport, GraphRequest, GraphWrite, IntegerSource, Keep, QuantizedStep, ValueReport,
    quantize_step,
};

use crate::weights::spread_over;
use crate::{QuantizeError, TextHash};
use firesteel_artifact::{Artifact, checkpoint_hashes};
use firesteel_checkpoint::{Checkpoint, ModelConfig};
use std::sync::Arc;

/// What is calibrated or quantized.
#[derive(Debug, Clone, Copy)]
pub enum Subject<'a> {
    /// A model.
    Checkpoint(&'a Arc<Checkpoint>),
    /// A step's graphs in floats.
    Artifact(&'a Artifact),
}

impl Subject<'_> {
    /// The checkpoint of an artifact, or this one, by the hashes of its files.
    fn hashes(self) -> Vec<firesteel_artifact::FileHash> {
        match self {
            Self::Checkpoint(checkpoint) => checkpoint_hashes(checkpoint),
            Self::Artifact(artifact) => artifact.manifest().model.checkpoint.clone(),
        }
    }
}

/// Tokens of a sequence that texts are cut into to round weights for them.
const SEQUENCE: usize = 512;

/// Sequences of at most `length` tokens, and of 512, from all over `texts`, with at most `tokens`
/// tokens together.
fn sequences<'a>(
    texts: &'a [Vec<u32>],
    length: usize,
    config: &ModelConfig,
    tokens: usize,
) -> Vec<&'a [u32]> {
    let length = length.min(SEQUENCE).min(config.max_position_embeddings).max(1);
    let all: Vec<&[u32]> = texts.iter().flat_map(|ids| ids.chunks(length)).collect();
    spread_over(&all, tokens)
}

/// Refuses to measure a model on a text of `known`, from which something was learned.
///
/// # Errors
/// When it is one of them.
pub fn refuse_seen<'a>(
    text: &TextHash,
    known: impl IntoIterator<Item = &'a TextHash>,
) -> Result<(), QuantizeError> {
    if known.into_iter().all(|other| other.sha256 != text.sha256) {
        return Ok(());
    }
    Err(QuantizeError::Request {
        problem: format!(
            "{}: the model was calibrated with this text; give one that it has not seen",
            text.name
        ),
    })
}

fn request(problem: impl Into<String>) -> QuantizeError {
    QuantizeError::Request { problem: problem.into() }
}
