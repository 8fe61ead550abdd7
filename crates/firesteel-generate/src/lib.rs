//! From text to text: tokenizer, chat template, sampler, and the generation loop on any
//! [`Decoder`](firesteel_step::Decoder).
//!
//! A [`Tokenizer`] turns text into ids and ids into bytes, a [`ChatTemplate`] turns a
//! [`Conversation`] into the ids of a prompt, a [`Sampler`] picks the next id from logits, and a
//! [`Request`] is a generation that is advanced: a [`Batch`] advances many, a [`Generator`] one at
//! a time. Each works without the others; requests without a tokenizer work on ids alone. So do
//! [`StopStrings`], which end a text, [`PromptLookup`], which guesses how it goes on, and
//! [`StepStats`], which writes down what the steps cost. An [`AnswerStream`] takes the text of an
//! answer apart by the [`Syntax`] of the model's family.
//!
//! # Chat templates
//!
//! What a user writes can never become a special token. A template is a stranger's program: fuel
//! bounds its instructions, texts and lists, what namespaces keep is copied to trees of bounded
//! depth, and its tokens are counted before it is parsed on a stack that suffices for as many. One
//! thing has no hook in the template engine and is not bounded: a list of the same value many times
//! over, which is small until it is compared or turned into text other than JSON.
//!
//! # Sampling
//!
//! The order of the options is in [`Sampler`]'s documentation; `top_p` is nucleus sampling
//! (Holtzman et al., 2020) over what `top_k` left. Ids without a token are never sampled. An id is
//! drawn by an exponential race (the Gumbel-max trick in other words). Its noise is a function of
//! seed, step and id, and of it only what can win is drawn.
//!
//! [`PromptLookup`] is prompt lookup decoding (Saxena, 2023). Instead of the rejection rule of
//! speculative sampling a proposed token stays exactly where the sampler picks the same one, which
//! it can because its noise does not depend on what else is run. So no text depends on what was
//! proposed.
//!
//! # Requests
//!
//! A [`Request`] says what it wants to run next and takes the logits of that. The one loop is
//! [`Batch`], which runs many, a pass at a time: requests join and leave at any step, and each runs
//! the same steps as alone, so it comes to the same bytes.
//!
//! With a prompt cache a sequence is a session: it goes back to where its tokens and the next
//! prompt part, and runs only the rest. It marks the beginning of a turn, the end of its prompt and
//! 16 tokens before that, as many marks as every decoder keeps ([`MARKS`](firesteel_step::MARKS)).

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
