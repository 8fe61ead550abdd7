//! `quantize`: a model in integers, for the CPU or for the phone.

mod gguf;
mod graph;

use crate::printer::Printer;
use crate::texts::text_ids;
use anyhow::Context as _;
use clap::{Args, Subcommand};
use firesteel_generate::AddedTokens;
use firesteel_model::Model;
use std::path::PathBuf;
use std::process::ExitCode;

/// Write a model quantized: as a GGUF file, or as a step's graph in integers.
#[derive(Debug, Args)]
pub(crate) struct Quantize {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    Gguf(gguf::QuantizeGguf),
    Graph(Box<graph::QuantizeGraph>),
}

impl Quantize {
    pub(crate) fn run(self, printer: &mut Printer) -> anyhow::Result<ExitCode> {
        match self.verb {
            Verb::Gguf(command) => command.run(printer),
            Verb::Graph(command) => command.run(printer),
        }
    }
}

/// The ids of texts and conversations for which weights are rounded; `tokenizer` says who needs one.
fn texts_of(
    files: &[PathBuf],
    source: &Model,
    tokenizer: &'static str,
) -> anyhow::Result<Vec<Vec<u32>>> {
    let mut texts = Vec::new();
    if !files.is_empty() {
        let tokenizer = source.tokenizer()?.context(tokenizer)?;
        for file in files {
            texts.extend(text_ids(file, &[source], &tokenizer, AddedTokens::Parse)?);
        }
    }
    Ok(texts)
}
