//! From text to text: tokenizer, chat template, sampler, and the generation loop on any
//! [`Decoder`](firesteel_step::Decoder).
//!
//! A [`Tokenizer`] turns text into ids and ids into bytes, a [`ChatTemplate`] turns a
//! [`Conversation`] into the ids of a prompt, a [`Sampler`] picks the next id from logits, and a
//! [`Request`] is a generation that is advanced: a [`Batch`] advances many, a [`Generator`] one at a
//! time. Each works without the others; requests without a tokenizer work on ids alone. So do
//! [`StopStrings`], which end a text, [`PromptLookup`], which guesses how it goes on, and
//! [`StepStats`], which writes down what the steps cost. An [`AnswerStream`] takes the text of an
//! answer apart by the [`Syntax`] of the model's family.

mod answer;
mod batch;
mod chat;
mod error;
mod files;
mod generate;
mod gguf;
mod guard;
mod limits;
mod lookup;
mod options;
mod python;
mod race;
mod request;
mod row;
mod sampler;
mod step_stats;
mod stop;
mod strftime;
mod syntax;
mod tokenizer;
mod utf8;
mod words;

pub use answer::{Answer, AnswerEvent, AnswerFlag, AnswerOptions, AnswerStream, ToolCall};
pub use batch::{Batch, Finished};
pub use chat::{
    ChatTemplate, Content, ContentPart, Conversation, FunctionCall, Message, MessageRole,
    MessageToolCall,
};
pub use error::GenerateError;
pub use files::GenerationConfig;
pub use generate::Generator;
pub use lookup::PromptLookup;
pub use options::SamplingOptions;
pub use request::{
    Event, GenerateOptions, Generation, Observer, Request, Stats, StopReason, Vocabulary,
};
pub use sampler::{Logprob, Sampler, TokenLogprobs};
pub use step_stats::{
    MODEL_FORWARD_MS, MODEL_SAMPLE_MS, StepRecord, StepStats, StepSummary, TimeSummary,
};
pub use stop::{Released, StopStrings};
pub use strftime::LocalTime;
pub use syntax::{CallFlag, Syntax, Tags};
pub use tokenizer::{AddedTokens, TextStream, Tokenizer};
pub use utf8::Utf8Stream;
