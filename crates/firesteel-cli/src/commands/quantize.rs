//! `quantize`: a model in integers, for the CPU or for the phone.

mod gguf;
mod graph;

use crate::printer::Printer;
use crate::texts::text_ids;
use clap::{Args, Subcommand};
use firesteel_checkpoint::ModelConfig;
use firesteel_generate::{AddedTokens, Tokenizer};
use firesteel_model::Model;
use firesteel_quantize::weights::spread_over;
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

/// Tokens of a sequence that the calibration is cut into.
const SEQUENCE: usize = 512;

/// The ids of texts and conversations for which weights are rounded.
fn calibration_texts(
    files: &[PathBuf],
    source: &Model,
    tokenizer: &Tokenizer,
) -> anyhow::Result<Vec<Vec<u32>>> {
    let mut texts = Vec::new();
    for file in files {
        texts.extend(text_ids(file, &[source], tokenizer, AddedTokens::Parse)?);
    }
    Ok(texts)
}

/// Sequences of at most `length` tokens from all over `texts`, with at most `tokens` tokens together.
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
