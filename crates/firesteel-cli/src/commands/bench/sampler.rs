use super::median;
use crate::printer::{Printer, table};
use anyhow::{Context as _, bail};
use clap::Args;
use firesteel_generate::{PromptLookup, Sampler, SamplingOptions};
use serde::Serialize;
use std::process::ExitCode;
use std::time::Instant;

/// Picking a token, and proposing some, against the time of a step.
#[derive(Debug, Args)]
pub(super) struct BenchSampler {
    /// Ids in the vocabulary
    #[arg(long, value_name = "N", default_value_t = 131_072)]
    vocabulary: usize,
    /// Tokens that came before
    #[arg(long, value_name = "N", default_value_t = 32_768)]
    history: usize,
    /// Time of a step to compare with
    #[arg(long, value_name = "MS", default_value_t = 50.0)]
    step_ms: f64,
    /// Picks of each kind; the median counts
    #[arg(long, default_value_t = 51)]
    runs: usize,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Timing {
    /// Shape of the logits, or of the sequence.
    over: &'static str,
    what: &'static str,
    milliseconds: f64,
    of_step: f64,
}

/// Largest vocabulary and longest history.
const LIMIT: usize = 1 << 24;

/// Uniform numbers from 0 to 1 (an LCG of Knuth's).
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> f32 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f32 / (1 << 24) as f32
    }

    /// Near a normal variable of variance 1.
    fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.next()).sum::<f32>() - 6.0
    }
}

impl BenchSampler {
    pub(super) fn run(self, printer: &mut Printer) -> anyhow::Result<ExitCode> {
        for (name, value) in [("--vocabulary", self.vocabulary), ("--history", self.history)] {
            if !(1..=LIMIT).contains(&value) {
                bail!("{name} is {value}, but 1 to {LIMIT} is accepted");
            }
        }
        if self.step_ms.is_nan() || self.step_ms <= 0.0 {
            bail!("--step-ms is {}, but a number above 0 is accepted", self.step_ms);
        }
        let mut timings = Vec::new();
        for (over, logits) in self.logits() {
            for (what, options) in kinds() {
                let seconds = self.sample(options, &logits)?;
                timings.push(self.timing(over, what, seconds));
            }
            let seconds = self.logprobs(&logits)?;
            timings.push(self.timing(over, "20 log-probabilities", seconds));
        }
        for (over, ids) in self.histories() {
            let lookup = PromptLookup::default();
            let seconds = self.time(|| Ok(std::hint::black_box(lookup.propose(&ids)).len()))?;
            timings.push(self.timing(over, "prompt lookup", seconds));
        }
        if self.json {
            printer.json(&timings)?;
            return Ok(ExitCode::SUCCESS);
        }
        let head = ["over", "what", "ms", "% of a step"].map(str::to_owned).to_vec();
        let rows = timings.iter().map(|timing| {
            vec![
                timing.over.to_owned(),
                timing.what.to_owned(),
                format!("{:.3}", timing.milliseconds),
                format!("{:.2}", 100.0 * timing.of_step),
            ]
        });
        for line in table(&std::iter::once(head).chain(rows).collect::<Vec<_>>()) {
            printer.line(line)?;
        }
        Ok(ExitCode::SUCCESS)
    }

    fn timing(&self, over: &'static str, what: &'static str, seconds: f64) -> Timing {
        let milliseconds = seconds * 1e3;
        Timing { over, what, milliseconds, of_step: milliseconds / self.step_ms }
    }

    /// Rows of logits, from the easiest to the hardest.
    fn logits(&self) -> [(&'static str, Vec<f32>); 3] {
        let mut noise = Noise(1);
        let ids = 0..self.vocabulary;
        let peaked = ids.clone().map(|id| {
            let bonus = if id % 4099 == 17 { 10.0 } else { 0.0 };
            2.0 * noise.normal() + bonus
        });
        let peaked = peaked.collect();
        let flat = ids.map(|_| 0.3 * noise.normal()).collect();
        [("a few likely ids", peaked), ("flat", flat), ("equal", vec![0.5; self.vocabulary])]
    }

    /// Sequences that prompt lookup has to search: with nothing to find, and with much that is
    /// nearly right.
    fn histories(&self) -> [(&'static str, Vec<u32>); 2] {
        let mut noise = Noise(2);
        let mut ids = |most: f32| (0..self.history).map(|_| (noise.next() * most) as u32).collect();
        [("a text", ids(1e5)), ("two ids in turn", ids(2.0))]
    }

    fn sample(&self, options: SamplingOptions, logits: &[f32]) -> anyhow::Result<f64> {
        let mut noise = Noise(3);
        let prompt = (0..self.history).map(|_| (noise.next() * self.vocabulary as f32) as u32);
        let prompt: Vec<u32> = prompt.filter(|&id| (id as usize) < self.vocabulary).collect();
        let mut sampler = Sampler::new(options, self.vocabulary)?
            .with_allowed(&vec![true; self.vocabulary])?
            .with_prompt(&prompt);
        self.time(|| Ok(sampler.sample(logits)? as usize))
    }

    fn logprobs(&self, logits: &[f32]) -> anyhow::Result<f64> {
        let mut sampler = Sampler::new(SamplingOptions::GREEDY, self.vocabulary)?;
        self.time(|| Ok(sampler.logprobs(logits, 0, 20)?.top.len()))
    }

    /// Median seconds of `act`.
    fn time(&self, mut act: impl FnMut() -> anyhow::Result<usize>) -> anyhow::Result<f64> {
        let mut seconds = Vec::new();
        // The first one fills buffers and is not counted.
        for run in 0..=self.runs {
            let start = Instant::now();
            std::hint::black_box(act()?);
            if run > 0 {
                seconds.push(start.elapsed().as_secs_f64());
            }
        }
        median(&mut seconds).context("--runs 0: at least one is needed")
    }
}

/// The options whose time is measured.
fn kinds() -> Vec<(&'static str, SamplingOptions)> {
    let greedy = SamplingOptions::GREEDY;
    let warm = SamplingOptions { temperature: 1.0, ..greedy.clone() };
    let penalties = SamplingOptions {
        repetition_penalty: 1.1,
        presence_penalty: 0.1,
        frequency_penalty: 0.1,
        top_p: 0.95,
        ..warm.clone()
    };
    vec![
        ("greedy", greedy),
        ("temperature", warm.clone()),
        ("top-k 50", SamplingOptions { top_k: 50, ..warm.clone() }),
        ("top-k 20000", SamplingOptions { top_k: 20_000, ..warm.clone() }),
        ("top-p 0.5", SamplingOptions { top_p: 0.5, ..warm.clone() }),
        ("top-p 0.95", SamplingOptions { top_p: 0.95, ..warm.clone() }),
        ("top-k 50, top-p 0.95", SamplingOptions { top_k: 50, top_p: 0.95, ..warm.clone() }),
        ("min-p 0.05", SamplingOptions { min_p: 0.05, ..warm }),
        ("penalties, top-p 0.95", penalties),
    ]
}
