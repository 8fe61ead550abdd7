use super::memory::{MemoryWatch, rss_anon};
use super::{BANDWIDTH_BYTES, median, threads};
use crate::printer::{Printer, mebibytes};
use crate::source::{self};
use anyhow::{Context as _, bail};
use clap::Args;
use firesteel_engine::{CpuModel, CpuSequence, KvFormat, SequenceOptions};
use firesteel_kernels::{Pool, measure::read_bandwidth};
use firesteel_model::Model;
use firesteel_step::{Decoder, Wanted};
use serde::Serialize;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

/// Prompt and decoding speed of a checkpoint, the time to its first token, and its memory.
///
/// Tokens are spread over the vocabulary; sampling is not part of it. Prompt and decoding both start
/// at --position, behind tokens whose keys and values are arbitrary numbers.
#[derive(Debug, Args)]
pub(super) struct BenchDecode {
    /// Checkpoint folder or GGUF file
    checkpoint: PathBuf,
    /// Tokens of the prompt
    #[arg(long, value_name = "N", default_value_t = 64)]
    prompt: usize,
    /// Tokens to decode
    #[arg(long, value_name = "N", default_value_t = 32)]
    tokens: usize,
    /// Prompt tokens in one step [default: as many as the engine takes best]
    #[arg(long, value_name = "N")]
    chunk: Option<usize>,
    /// Tokens that are in the cache before prompt and decoding
    #[arg(long, value_name = "N", default_value_t = 0)]
    position: usize,
    /// Context of the sequence [default: what is measured]
    #[arg(long, value_name = "N")]
    context: Option<usize>,
    /// Keys and values are stored in this format: f32, f16 or q8
    #[arg(long, value_name = "FORMAT", default_value_t = KvFormat::F16)]
    kv: KvFormat,
    /// Threads [default: the cores]
    #[arg(long)]
    threads: Option<usize>,
    /// Repetitions; the median counts
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    isa: String,
    threads: usize,
    kv: &'static str,
    context: usize,
    position: usize,
    prompt_tokens: usize,
    prompt_chunk: usize,
    decode_tokens: usize,
    runs: usize,
    /// Opening the checkpoint.
    open_seconds: f64,
    /// Making it ready for the kernels.
    prepare_seconds: f64,
    /// Both.
    load_seconds: f64,
    /// Where the weights in the kernels' layout are: none, memory, written or found.
    packed_weights: &'static str,
    first_token: FirstToken,
    /// Medians over the runs.
    prompt_tokens_per_second: Option<f64>,
    decode_tokens_per_second: f64,
    /// All runs.
    prompt_runs: Vec<f64>,
    decode_runs: Vec<f64>,
    weight_bytes: u64,
    /// Weights and, in the middle of the decoded tokens, keys and values.
    bytes_per_token: u64,
    read_bandwidth_bytes_per_second: f64,
    /// Bytes that decoding reads a second, over the read bandwidth.
    of_bandwidth: f64,
    /// What is allocated for keys and values of the whole context, as `inspect` says.
    kv_bytes: usize,
    /// Anonymous resident memory after everything was run.
    rss_anon_bytes: Option<u64>,
    /// Largest anonymous resident memory while loading.
    peak_load_rss_anon_bytes: Option<u64>,
    /// Largest anonymous resident memory until the end of a first run that is not counted.
    peak_rss_anon_bytes: Option<u64>,
}

/// Time to the first token of a short prompt.
#[derive(Debug, Serialize)]
struct FirstToken {
    prompt_tokens: usize,
    /// From the start of this command to the logits.
    seconds: f64,
    /// The same prompt again, when everything is in place: the median of some.
    compute_seconds: f64,
    /// The difference.
    less_compute_seconds: f64,
}

/// Tokens of the prompt that the first token is measured with.
const FIRST_PROMPT: usize = 16;
/// How often its computation is repeated.
const FIRST_RUNS: usize = 5;

/// Ids, spread over the vocabulary.
struct Ids {
    state: u32,
    vocabulary: u32,
}

impl Ids {
    fn next(&mut self, count: usize) -> Vec<u32> {
        let ids = (0..count).map(|_| {
            self.state = self.state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (self.state >> 8) % self.vocabulary
        });
        ids.collect()
    }
}

/// Runs tokens and keeps them.
fn advance(
    sequence: &mut CpuSequence,
    ids: &[u32],
    wanted: Wanted,
    logits: &mut Vec<f32>,
) -> anyhow::Result<()> {
    sequence.forward(ids, wanted, logits)?;
    Ok(sequence.commit(ids.len())?)
}

impl BenchDecode {
    pub(super) fn run(self, printer: &mut Printer) -> anyhow::Result<ExitCode> {
        if self.tokens == 0 || self.chunk == Some(0) || self.runs == 0 {
            bail!("--tokens, --chunk and --runs: 1 or more is accepted");
        }
        let needed = self.prompt.max(self.tokens).checked_add(self.position);
        let needed = needed.context("--position is too large")?.max(FIRST_PROMPT);
        let context = self.context.unwrap_or(needed);
        if context < needed {
            bail!("--context {context}: {needed} tokens are measured, and have to fit");
        }

        let threads = threads(self.threads)?;
        let memory = MemoryWatch::start();
        let start = Instant::now();
        let Model::Checkpoint(checkpoint) = source::open(&self.checkpoint, printer)? else {
            bail!(
                "{} is an artifact; the CPU's kernels run checkpoints",
                self.checkpoint.display()
            );
        };
        let open_seconds = start.elapsed().as_secs_f64();
        let model = CpuModel::new(Arc::clone(&checkpoint), Some(threads))?;
        let load_seconds = start.elapsed().as_secs_f64();
        let peak_load_rss_anon_bytes = memory.stop();
        for warning in model.warnings() {
            printer.warn(warning);
        }
        let vocabulary = u32::try_from(checkpoint.config().vocab_size)?;
        let mut ids = Ids { state: 1, vocabulary };
        let mut sequence = model.sequence(SequenceOptions { context, kv: self.kv })?;
        let mut logits = Vec::new();
        let prompt = ids.next(FIRST_PROMPT);
        sequence.forward(&prompt, Wanted::Last, &mut logits)?;
        let seconds = start.elapsed().as_secs_f64();
        let mut again = Vec::new();
        for _ in 0..FIRST_RUNS {
            let start = Instant::now();
            sequence.forward(&prompt, Wanted::Last, &mut logits)?;
            again.push(start.elapsed().as_secs_f64());
        }
        let compute_seconds = median(&mut again).context("no run")?;
        let first_token = FirstToken {
            prompt_tokens: FIRST_PROMPT,
            seconds,
            compute_seconds,
            less_compute_seconds: seconds - compute_seconds,
        };

        let chunk = self.chunk.unwrap_or_else(|| sequence.chunk(self.prompt.max(1)));
        let (mut prompt, mut decode) = (Vec::new(), Vec::new());
        let mut memory = Some(MemoryWatch::start());
        let mut peak_rss_anon_bytes = peak_load_rss_anon_bytes;
        // The first run is not counted.
        for run in 0..=self.runs {
            sequence.fill(self.position)?;
            let all = ids.next(self.prompt);
            let start = Instant::now();
            let chunks = all.chunks(chunk);
            let last = chunks.len().saturating_sub(1);
            for (i, chunk) in chunks.enumerate() {
                let wanted = if i == last { Wanted::Last } else { Wanted::Nothing };
                advance(&mut sequence, chunk, wanted, &mut logits)?;
            }
            let prompt_seconds = start.elapsed().as_secs_f64();
            sequence.fill(self.position)?;
            let all = ids.next(self.tokens);
            let start = Instant::now();
            for id in all.chunks(1) {
                advance(&mut sequence, id, Wanted::Last, &mut logits)?;
            }
            let decode_seconds = start.elapsed().as_secs_f64();
            // Watching takes time, so it ends before the runs that count.
            if let Some(memory) = memory.take() {
                peak_rss_anon_bytes = peak_rss_anon_bytes.max(memory.stop());
            }
            if run > 0 {
                decode.push(self.tokens as f64 / decode_seconds);
                if self.prompt > 0 {
                    prompt.push(self.prompt as f64 / prompt_seconds);
                }
            }
        }
        let rss_anon_bytes = rss_anon();
        let weight_bytes = model.weight_bytes();
        let seen = sequence.bytes_seen(self.position + self.tokens / 2);
        let bytes_per_token = weight_bytes + seen as u64;
        let threads = model.threads();
        let isa = sequence.settings().into_iter().find(|(name, _)| name == "isa");
        let kv_bytes = sequence.cache_bytes();
        let packed_weights = model.packed_weights().name();
        drop((sequence, model));
        let bandwidth = read_bandwidth(&Pool::new(threads)?, BANDWIDTH_BYTES)?;
        let (prompt_runs, decode_runs) = (prompt.clone(), decode.clone());
        let rate = median(&mut decode).context("no run")?;
        let report = Report {
            isa: isa.map(|(_, isa)| isa).unwrap_or_default(),
            threads,
            kv: self.kv.name(),
            context,
            position: self.position,
            prompt_tokens: self.prompt,
            prompt_chunk: chunk,
            decode_tokens: self.tokens,
            runs: self.runs,
            open_seconds,
            prepare_seconds: load_seconds - open_seconds,
            load_seconds,
            packed_weights,
            first_token,
            prompt_tokens_per_second: median(&mut prompt),
            decode_tokens_per_second: rate,
            prompt_runs,
            decode_runs,
            weight_bytes,
            bytes_per_token,
            read_bandwidth_bytes_per_second: bandwidth,
            of_bandwidth: rate * bytes_per_token as f64 / bandwidth,
            kv_bytes,
            rss_anon_bytes,
            peak_load_rss_anon_bytes,
            peak_rss_anon_bytes,
        };
        if self.json {
            printer.json(&report)?;
        } else {
            report.print(printer)?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

impl Report {
    fn print(&self, printer: &mut Printer) -> anyhow::Result<()> {
        printer.line(format!(
            "{} a token at position {}, {} threads, {}; of this run on this machine:",
            mebibytes(self.bytes_per_token),
            self.position,
            self.threads,
            self.isa
        ))?;
        printer.line(format!(
            "decode {:.2} tokens/s at {:.0} % of the read bandwidth",
            self.decode_tokens_per_second,
            100.0 * self.of_bandwidth
        ))?;
        if let Some(prompt) = self.prompt_tokens_per_second {
            printer
                .line(format!("prompt {prompt:.1} tokens/s in steps of {}", self.prompt_chunk))?;
        }
        printer.line(format!(
            "ready after {:.3} s (packed weights: {}); first token of {} after {:.3} s, of which \
             {:.3} s are not computing",
            self.load_seconds,
            self.packed_weights,
            self.first_token.prompt_tokens,
            self.first_token.seconds,
            self.first_token.less_compute_seconds
        ))?;
        let anonymous = |bytes: Option<u64>| {
            bytes.map_or_else(|| "not known on this system".to_owned(), mebibytes)
        };
        printer.line(format!(
            "keys and values of {} tokens in {}: {}; anonymous memory: {}, at most {}",
            self.context,
            self.kv,
            mebibytes(self.kv_bytes as u64),
            anonymous(self.rss_anon_bytes),
            anonymous(self.peak_rss_anon_bytes)
        ))?;
        Ok(())
    }
}
