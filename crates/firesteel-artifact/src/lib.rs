//! The artifact: a folder with the step's graphs, their weights, a tokenizer and a manifest that
//! says what they are.
//!
//! [`export`] writes one from a checkpoint, [`write_artifact`] one from other graphs, complete or
//! not at all: what was written is read back first, and the weights of quantized graphs are
//! compared with the manifest's list. [`Artifact::open`] reads and checks a folder and runs it on
//! the graph evaluator. It finds the embedding table, and joins a vocabulary projection that was
//! cut into graphs of its own. The manifest keeps the tags of the graphs' nodes, by name. A
//! checkpoint's hashes are taken while its pages are warm.

mod document;
mod evaluator;
mod export;
mod manifest;
mod open;
mod sharded;

pub use document::JsonFormat;
pub use evaluator::EvaluatorRunner;
pub use export::{Draft, ExportRequest, Write, checkpoint_hashes, export, write_artifact};
pub use manifest::{
    DataEntry, EmbeddingEntry, FORMAT_VERSION, FileHash, GraphEntry, GraphRole, HeadSource,
    KvBytesEntry, MANIFEST, Manifest, ModelEntry, Quantization, QuantizedWeight, TaggedNodes,
};
pub use open::{Artifact, ArtifactEmbedding, sha256, xxh3};
pub use sharded::{HeadRunner, ShardedRunner};

use firesteel_checkpoint::CheckpointError;
use firesteel_export::ExportError;
use firesteel_graph::GraphError;
use firesteel_onnx::OnnxError;
use firesteel_step::StepError;
use std::path::PathBuf;

/// What can go wrong with an artifact.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ArtifactError {
    /// A file could not be read or written; the message names it.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// The checkpoint cannot be read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The graph cannot be made.
    #[error(transparent)]
    Export(#[from] ExportError),
    /// A model file cannot be written or read.
    #[error(transparent)]
    Onnx(#[from] OnnxError),
    /// The options or the manifest make no step.
    #[error(transparent)]
    Step(#[from] StepError),
    /// The manifest is not understood.
    #[error("{}: {problem}", file.display())]
    Manifest {
        /// The manifest.
        file: PathBuf,
        /// What is wrong, and what is accepted.
        problem: String,
    },
    /// A file of the folder is not what the manifest says.
    #[error("{}: {problem}", file.display())]
    Content {
        /// The file.
        file: PathBuf,
        /// What differs.
        problem: String,
    },
    /// The graph in a file is not valid.
    #[error("{}: {source}", file.display())]
    Graph {
        /// The model file.
        file: PathBuf,
        /// The violation.
        source: Box<GraphError>,
    },
}
