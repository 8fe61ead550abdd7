//! `check`: what two runners, or a runner and a device, say to the same tokens.

mod fidelity;
mod outputs;
mod step;

pub(crate) use self::step::{CheckArgs, check_and_print, default_bar, feed, token_ids};

use crate::printer::{Printer, mebibytes};
use crate::source::{self, OrtArgs, runner_names};
use anyhow::bail;
use clap::{Args, Subcommand};
use firesteel_check::Snr;
use firesteel_model::{CompiledStep, Model, RunnerKind};
use firesteel_step::StepSpec;
use firesteel_tensor::DType;
use serde::Serialize;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Check the numbers: tensors step by step, what a text and prompts become, what a device computed.
#[derive(Debug, Args)]
pub(crate) struct Check {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    Step(step::CheckStep),
    Fidelity(fidelity::CheckFidelity),
    Outputs(outputs::CheckOutputs),
}

impl Check {
    pub(crate) fn run(self, printer: &mut Printer) -> anyhow::Result<ExitCode> {
        match self.verb {
            Verb::Step(command) => command.run(printer),
            Verb::Fidelity(command) => command.run(printer),
            Verb::Outputs(command) => command.run(printer),
        }
    }
}

/// What is compared.
#[derive(Debug, Args)]
struct Sides {
    /// Artifact (or checkpoint) to check
    path: PathBuf,
    /// Checkpoint (or artifact) that is right
    #[arg(long, value_name = "CHECKPOINT|ARTIFACT")]
    against: PathBuf,
    /// The step of a compiled artifact: decode, prefill-T [default: its first]
    #[arg(long, value_name = "NAME")]
    graph: Option<String>,
    /// Print a JSON report
    #[arg(long)]
    json: bool,
}

impl Sides {
    /// What is checked, and what is right.
    fn open(&self, printer: &mut Printer) -> anyhow::Result<(Model, Model)> {
        let mut test = source::open(&self.path, printer)?;
        if let Some(name) = &self.graph {
            let Model::Compiled(step) = &mut test else {
                bail!("--graph goes with a compiled artifact");
            };
            step.step.clone_from(&step.compiled.step(Some(name))?.name);
        }
        Ok((test, source::open(&self.against, printer)?))
    }
}

/// Who executes each side.
#[derive(Debug, Clone, Args)]
struct Runners {
    /// Who executes what is checked [default: evaluator for an artifact, engine for a checkpoint,
    /// htp for what is compiled]
    #[arg(long, value_parser = runner_names())]
    runner: Option<RunnerKind>,
    /// Who executes what is right [default: engine for a checkpoint, evaluator for an artifact]
    #[arg(long, value_parser = runner_names())]
    against_runner: Option<RunnerKind>,
    #[command(flatten)]
    ort: OrtArgs,
}

impl Runners {
    /// Those of what is checked and of what is right.
    fn kinds(&self, [test, reference]: [&Model; 2]) -> anyhow::Result<[RunnerKind; 2]> {
        let kinds = [
            self.runner.unwrap_or(test.default_runner(false)),
            self.against_runner.unwrap_or(reference.default_runner(false)),
        ];
        self.ort.refuse_unused(&kinds)?;
        Ok(kinds)
    }
}

/// A comparison, and what follows from it where a compiled step is checked.
#[derive(Debug, Serialize)]
struct Judged<T> {
    #[serde(skip_serializing_if = "Option::is_none")]
    verdicts: Option<Verdicts>,
    #[serde(flatten)]
    report: T,
}

/// Four questions that have nothing to do with each other, and never one answer.
#[derive(Debug, Serialize)]
struct Verdicts {
    compiled: String,
    placed: String,
    numerically_right: String,
    speed: String,
}

impl Verdicts {
    fn new(step: &CompiledStep, numerically_right: String) -> anyhow::Result<Self> {
        let (manifest, parts) = (step.compiled.manifest(), &step.entry()?.parts);
        let bytes: u64 = parts.iter().map(|part| part.binary_bytes).sum();
        let ops: usize = parts.iter().map(|part| part.audit.qnn_ops.values().sum::<usize>()).sum();
        let findings: usize = parts.iter().map(|part| part.audit.findings.len()).sum();
        let s = if parts.len() == 1 { "" } else { "s" };
        Ok(Self {
            compiled: format!(
                "for {}, {} part{s}, {}, by QNN SDK {}",
                manifest.target.soc,
                parts.len(),
                mebibytes(bytes),
                manifest.libraries.qnn_sdk
            ),
            placed: match findings {
                0 => format!("all of {ops} ops on the HTP, each what the graph says"),
                _ => format!("{ops} ops on the HTP, {findings} findings of the audit allowed"),
            },
            numerically_right,
            speed: "unknown here: the emulator's time says nothing about a device".into(),
        })
    }

    fn print(&self, printer: &mut Printer) -> anyhow::Result<()> {
        let lines = [
            ("compiled", &self.compiled),
            ("placed", &self.placed),
            ("numerically right", &self.numerically_right),
            ("speed", &self.speed),
        ];
        for (name, verdict) in lines {
            printer.line(format!("{name}: {verdict}"))?;
        }
        Ok(())
    }
}

/// Says how long `steps` steps will take when one took `one`, and refuses what is beyond `limit`.
fn announce(
    one: Duration,
    steps: usize,
    limit: Duration,
    fewer: &str,
    printer: &mut Printer,
) -> anyhow::Result<()> {
    let all = one.saturating_mul(u32::try_from(steps).unwrap_or(u32::MAX));
    let seconds = |time: Duration| format!("{} s", time.as_secs_f64().ceil());
    let text = format!(
        "emulating {steps} steps takes about {}, the limit is {}",
        seconds(all),
        seconds(limit)
    );
    if all > limit {
        bail!("{text}; give fewer {fewer}, or a larger --time-limit");
    }
    printer.talk(&text);
    Ok(())
}

/// The same step with f32 inputs and outputs.
fn as_f32(spec: &StepSpec) -> anyhow::Result<StepSpec> {
    Ok(StepSpec { dtype: DType::F32, ..spec.clone() }.with_tokens(spec.tokens)?)
}

/// What ids all over the vocabulary are for: nothing is checked on what it was calibrated with.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Spread {
    Check,
    Calibration,
}

/// Ids all over the vocabulary, for models without a tokenizer.
///
/// # Errors
/// When they are more than any comparison or calibration takes.
pub(crate) fn spread_ids(
    what: Spread,
    count: usize,
    vocabulary: usize,
) -> anyhow::Result<Vec<u32>> {
    if count > MOST_SPREAD {
        bail!("{count} ids all over the vocabulary are too many; up to {MOST_SPREAD} are accepted");
    }
    let first: u64 = match what {
        Spread::Check => 1,
        Spread::Calibration => 1_000_003,
    };
    // A multiplicative hash (Knuth) of the index.
    let id = |i: u64| {
        let hash = i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        (hash % vocabulary.max(1) as u64) as u32
    };
    Ok((first..first + count as u64).map(id).collect())
}

/// Most ids all over the vocabulary; those of a check and of a calibration stay apart.
const MOST_SPREAD: usize = 1_000_000;

pub(crate) fn decibels(snr: &Snr) -> String {
    match snr.db {
        Some(db) => format!("{db:.1} dB"),
        None if snr.identical => "identical".into(),
        None => "-".into(),
    }
}

fn print_settings(
    runner: &str,
    settings: &[(String, String)],
    printer: &mut Printer,
) -> anyhow::Result<()> {
    if !settings.is_empty() {
        let list: Vec<String> =
            settings.iter().map(|(key, value)| format!("{key} {value}")).collect();
        printer.line(format!("{runner}: {}", list.join(", ")))?;
    }
    Ok(())
}
