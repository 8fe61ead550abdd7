//! Tokenizer, templates and generation: on a script, on the engine, and against golden texts.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod answers;
mod batch;
mod chat;
mod decoder;
mod generate;
mod gguf;
mod session;
mod support;
mod template_limits;
