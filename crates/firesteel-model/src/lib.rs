//! Opens whatever holds a model as something that runs.
//!
//! [`Model::open`] takes a Hugging Face folder, a GGUF file, an artifact or a compiled artifact, told
//! apart by what they hold ([`PathKind`]), and has what a program needs of it: the config, the
//! tokenizer, the chat template, the embedding, and a [`Decoder`](firesteel_step::Decoder) or
//! [`Runner`](firesteel_step::Runner) on any of the [`RunnerKind`]s.
//!
//! Text after a prompt, as it comes:
//!
//! ```
//! use firesteel_model::generate::{AddedTokens, Event, GenerateOptions};
//! use firesteel_model::{Model, RunnerOptions};
//! use std::ops::ControlFlow;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # std::env::set_current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))?;
//! let model = Model::open("models/spark-tiny".as_ref())?;
//! let tokenizer = model.tokenizer()?.ok_or("the model has no tokenizer")?;
//! let prompt = tokenizer.encode("The Jargon File is", AddedTokens::Parse)?;
//! let mut generator = model.generator(&tokenizer, prompt.len() + 8, &RunnerOptions::default())?;
//! let options = GenerateOptions { max_tokens: Some(8), ..GenerateOptions::default() };
//! generator.generate(&prompt, &options, &mut |event| {
//!     if let Event::Token { text, .. } | Event::Tail { text } = event {
//!         print!("{text}");
//!     }
//!     ControlFlow::Continue(())
//! })?;
//! # Ok(())
//! # }
//! ```
//!
//! The prompt of a conversation, for [`Generator::generate`](generate::Generator::generate) as above:
//!
//! ```
//! use firesteel_model::Model;
//! use firesteel_model::generate::{Conversation, Message, MessageRole};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # std::env::set_current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))?;
//! let model = Model::open("models/spark-tiny".as_ref())?;
//! let tokenizer = model.tokenizer()?.ok_or("the model has no tokenizer")?;
//! let chat = Conversation {
//!     messages: vec![Message::text(MessageRole::User, "What is a hacker?")],
//!     add_generation_prompt: true,
//!     ..Conversation::default()
//! };
//! let prompt = model.chat_template()?.encode(&chat, &tokenizer)?;
//! assert!(tokenizer.decode(&prompt).contains("What is a hacker?"));
//! # Ok(())
//! # }
//! ```

mod kind;
mod model;
mod runner;
mod shape;

pub use firesteel_generate as generate;
pub use kind::PathKind;
pub use model::{CompiledStep, Model};
pub use runner::{DecoderOptions, RunnerKind, RunnerOptions, SequenceDecoder, ort_runner};
pub use shape::ModelShape;

use firesteel_artifact::ArtifactError;
use firesteel_checkpoint::CheckpointError;
use firesteel_compile::CompileError;
use firesteel_engine::EngineError;
use firesteel_generate::GenerateError;
use firesteel_onnx::OnnxError;
use firesteel_ort::OrtError;
use firesteel_step::{RunnerError, StepError};
use std::path::PathBuf;

/// Why a model cannot be opened or run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// A file could not be read; the message names it.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// A path holds no model.
    #[error("{}: {reason}", path.display())]
    Path {
        /// The path.
        path: PathBuf,
        /// What it is and what is accepted.
        reason: String,
    },
    /// A name is neither a path nor a published shape.
    #[error("{name} is neither a file or folder nor a known shape ({known})")]
    Name {
        /// The name.
        name: String,
        /// The published shapes.
        known: String,
    },
    /// The model cannot be run like that.
    #[error("{problem}")]
    Runner {
        /// Why, and what can be done.
        problem: String,
    },
    /// The checkpoint cannot be read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The artifact cannot be read.
    #[error(transparent)]
    Artifact(#[from] ArtifactError),
    /// The compiled artifact cannot be read.
    #[error(transparent)]
    Compile(Box<CompileError>),
    /// The engine refuses.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// ONNX Runtime refuses.
    #[error(transparent)]
    Ort(#[from] OrtError),
    /// A model file cannot be read.
    #[error(transparent)]
    Onnx(#[from] OnnxError),
    /// The tokenizer or the chat template cannot be read.
    #[error(transparent)]
    Generate(#[from] GenerateError),
    /// The step is impossible.
    #[error(transparent)]
    Step(#[from] StepError),
    /// The runner refuses.
    #[error(transparent)]
    Run(#[from] RunnerError),
}

impl From<CompileError> for ModelError {
    fn from(error: CompileError) -> Self {
        Self::Compile(Box::new(error))
    }
}
