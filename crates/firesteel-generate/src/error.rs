use firesteel_checkpoint::CheckpointError;
use firesteel_step::{RunnerError, SequenceId};
use std::path::PathBuf;

/// What can go wrong between text and text.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GenerateError {
    /// A file cannot be read; the message names it.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// A file of the folder is none that is read; the message names it.
    #[error(transparent)]
    File(#[from] CheckpointError),
    /// The kernels cannot run on this CPU.
    #[error(transparent)]
    Kernels(#[from] firesteel_kernels::KernelError),
    /// A file is not JSON.
    #[error("{}: not valid JSON: {source}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// What the parser says.
        source: serde_json::Error,
    },
    /// A value in a file is not what the key takes.
    #[error("{}: {key} is {value}, but {accepted}", path.display())]
    Value {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// Its value.
        value: String,
        /// What is accepted.
        accepted: &'static str,
    },
    /// The tokenizer of a file cannot be used.
    #[error("{}: {message}", path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        message: String,
    },
    /// The tokenizer fails on a text.
    #[error("the text cannot be tokenized: {message}")]
    Encode {
        /// What the tokenizer says.
        message: String,
    },
    /// The folder or file has no chat template.
    #[error("{} has no chat template: {places}; give a plain prompt instead", path.display())]
    NoTemplate {
        /// The folder or file.
        path: PathBuf,
        /// Where none was found.
        places: &'static str,
    },
    /// The chat template does not parse, fails or raises.
    #[error("{origin}: {message}")]
    Template {
        /// Where the template comes from.
        origin: String,
        /// What happened, with the line.
        message: String,
    },
    /// A message of a conversation cannot be rendered.
    #[error("messages[{index}]: {message}")]
    Message {
        /// Number of the message, from 0.
        index: usize,
        /// What is wrong, and what is accepted.
        message: String,
    },
    /// A conversation uses every character that could mark user text.
    #[error(
        "the conversation contains all noncharacters U+FDD0 to U+FDEF, one of which is needed \
         to keep its text apart from the template's; remove one of them"
    )]
    NoGuard,
    /// An option of the sampler or the loop is out of range.
    #[error("{what} is {value}, but {accepted}")]
    Option {
        /// The option.
        what: &'static str,
        /// Its value.
        value: String,
        /// What is accepted.
        accepted: String,
    },
    /// The logits of a step cannot be sampled.
    #[error("the logits cannot be sampled: {message}")]
    Logits {
        /// What is wrong with them.
        message: String,
    },
    /// The prompt has no tokens.
    #[error("the prompt is empty: at least one token is needed")]
    EmptyPrompt,
    /// The prompt is longer than the context.
    #[error(
        "the prompt has {prompt} tokens, but the context holds {context}; shorten the prompt or \
         use a larger context"
    )]
    PromptTooLong {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens that fit.
        context: usize,
    },
    /// A prompt id has no row in the embedding.
    #[error("prompt[{index}] is id {id}, but the embedding has {rows} rows")]
    TokenOutOfRange {
        /// Number of the token, from 0.
        index: usize,
        /// The id.
        id: u32,
        /// Rows of the embedding.
        rows: usize,
    },
    /// A sequence takes one request after the other.
    #[error("{sequence} runs a request already; wait for its end, cancel it, or add a sequence")]
    Busy {
        /// The sequence.
        sequence: SequenceId,
    },
    /// A step failed, or the decoder cannot be used for generation.
    #[error(transparent)]
    Runner(#[from] RunnerError),
}

impl GenerateError {
    /// The error of an option out of range.
    pub(crate) fn option(
        what: &'static str,
        value: impl ToString,
        accepted: impl Into<String>,
    ) -> Self {
        Self::Option { what, value: value.to_string(), accepted: accepted.into() }
    }
}
