use super::{BANDWIDTH_BYTES, cores, median};
use crate::printer::{Printer, mebibytes};
use crate::source::Source;
use anyhow::{Context as _, bail};
use clap::Args;
use firesteel_engine::{CheckpointEmbedding, CpuModel, CpuRunner};
use firesteel_kernels::{Pool, measure::read_bandwidth};
use firesteel_step::{Embedding, KvState, Logits, Runner, StepOptions, StepSpec};
use firesteel_tensor::DType;
use serde::Serialize;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

/// Prompt and decoding speed of a checkpoint, against the read bandwidth.
///
/// Tokens are spread over the vocabulary; sampling is not part of it.
#[derive(Debug, Args)]
pub(super) struct BenchDecode {
    /// Checkpoint folder or GGUF file
    checkpoint: PathBuf,
    /// Tokens of the prompt
    #[arg(long, value_name = "N", default_value_t = 64)]
    prompt: usize,
    /// Tokens to decode after it
    #[arg(long, value_name = "N", default_value_t = 32)]
    tokens: usize,
    /// Prompt tokens in one step
    #[arg(long, value_name = "N", default_value_t = 64)]
    chunk: usize,
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
    threads: usize,
    load_seconds: f64,
    weight_bytes: u64,
    /// Median over the runs.
    prompt_tokens_per_second: Option<f64>,
    /// Median over the runs.
    decode_tokens_per_second: f64,
    read_bandwidth_bytes_per_second: f64,
    /// Bytes of weights that decoding reads a second, over the read bandwidth.
    of_bandwidth: f64,
}

struct Session {
    decode: CpuRunner,
    prompt: CpuRunner,
    state: KvState,
    embedding: CheckpointEmbedding,
    next: u32,
    vocabulary: u32,
}

impl Session {
    fn step(&mut self, chunked: bool) -> anyhow::Result<()> {
        let runner = if chunked { &mut self.prompt } else { &mut self.decode };
        let spec = runner.spec().clone();
        let ids: Vec<u32> = (0..spec.tokens)
            .map(|_| {
                self.next = self.next.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (self.next >> 8) % self.vocabulary
            })
            .collect();
        let mut x = vec![0.0; ids.len() * spec.hidden_size];
        self.embedding.lookup(&ids, &mut x)?;
        let step = self.state.prepare(&spec, &x)?;
        let outputs = runner.step(&self.state.inputs(&spec, &step)?)?;
        Ok(self.state.commit(&spec, step, &outputs)?)
    }
}

impl BenchDecode {
    pub(super) fn run(self, printer: &mut Printer) -> anyhow::Result<ExitCode> {
        if self.tokens == 0 || self.chunk == 0 || self.runs == 0 {
            bail!("--tokens, --chunk and --runs: 1 or more is accepted");
        }
        let Source::Checkpoint(checkpoint) = Source::open(&self.checkpoint, printer)? else {
            bail!(
                "{} is an artifact; the CPU's kernels run checkpoints",
                self.checkpoint.display()
            );
        };
        let config = checkpoint.config().clone();
        let start = Instant::now();
        let model = CpuModel::new(Arc::clone(&checkpoint), self.threads)?;
        let load_seconds = start.elapsed().as_secs_f64();
        let length = self.prompt.checked_add(self.tokens).context("--prompt is too large")?;
        let spec = StepSpec::new(
            &config,
            &StepOptions {
                tokens: 1,
                context: length.max(self.chunk),
                layers: 0..config.num_layers(),
                cache_layout: Default::default(),
                logits: Logits::Last,
                dtype: DType::F32,
            },
        )?;
        let mut session = Session {
            decode: model.runner(spec.clone())?,
            prompt: model.runner(spec.with_tokens(self.chunk)?)?,
            state: KvState::new(&spec)?,
            embedding: CheckpointEmbedding::new(Arc::clone(&checkpoint)),
            next: 1,
            vocabulary: u32::try_from(config.vocab_size)?,
        };
        let (mut prompt, mut decode) = (Vec::new(), Vec::new());
        // The first run reads the weights into memory and is not counted.
        for run in 0..=self.runs {
            session.state.clear();
            let start = Instant::now();
            while session.state.position() < self.prompt {
                let left = self.prompt - session.state.position();
                session.step(left >= self.chunk)?;
            }
            let prompt_seconds = start.elapsed().as_secs_f64();
            let start = Instant::now();
            for _ in 0..self.tokens {
                session.step(false)?;
            }
            if run > 0 {
                decode.push(self.tokens as f64 / start.elapsed().as_secs_f64());
                if self.prompt > 0 {
                    prompt.push(self.prompt as f64 / prompt_seconds);
                }
            }
        }
        let weight_bytes = model.weight_bytes();
        let threads = self.threads.unwrap_or_else(cores);
        drop((session, model));
        let bandwidth = read_bandwidth(&Pool::new(threads)?, BANDWIDTH_BYTES)?;
        let rate = median(&mut decode).context("no run")?;
        let report = Report {
            threads,
            load_seconds,
            weight_bytes,
            prompt_tokens_per_second: median(&mut prompt),
            decode_tokens_per_second: rate,
            read_bandwidth_bytes_per_second: bandwidth,
            of_bandwidth: rate * weight_bytes as f64 / bandwidth,
        };
        if self.json {
            printer.json(&report)?;
            return Ok(ExitCode::SUCCESS);
        }
        printer.line(format!(
            "{} of weights a token, {threads} threads; of this run on this machine:",
            mebibytes(weight_bytes)
        ))?;
        printer.line(format!(
            "decode {rate:.2} tokens/s at {:.0} % of the read bandwidth",
            100.0 * report.of_bandwidth
        ))?;
        if let Some(prompt) = report.prompt_tokens_per_second {
            printer.line(format!("prompt {prompt:.1} tokens/s in steps of {}", self.chunk))?;
        }
        printer.line(format!("ready after {load_seconds:.2} s"))?;
        Ok(ExitCode::SUCCESS)
    }
}
