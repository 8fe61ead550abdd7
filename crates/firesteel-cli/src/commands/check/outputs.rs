//! `check outputs`: what a device computed from the inputs of a kit.

use super::decibels;
use super::step::logits_line;
use crate::kit::{Form, Kit, KitPart, KitTensor, Meaning, step_folder};
use crate::printer::{Printer, table};
use anyhow::{Context as _, bail};
use clap::Args;
use firesteel_check::{LogitsReport, Snr, SnrMeter, StepReport, compare_logits};
use fs_err as fs;
use serde::Serialize;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Compare what a device computed with what its kit expects.
///
/// Exit code 1 when something is below its bar.
#[derive(Debug, Args)]
pub(crate) struct CheckOutputs {
    /// Folder that `firesteel profile phone-kit` wrote
    kit: PathBuf,
    /// What a device computed from its inputs, as qnn-net-run writes it: GRAPH/Result_N/TENSOR.raw
    outputs: PathBuf,
    /// SNR in dB that logits and entries must reach, each over all steps [default: that of the kit]
    #[arg(long, value_name = "DB", allow_negative_numbers = true)]
    min_snr: Option<f64>,
    /// Logit gap below which the most probable tokens are a tie
    #[arg(long, value_name = "GAP", default_value_t = 1e-3)]
    tie_margin: f64,
    /// Print a JSON report
    #[arg(long)]
    json: bool,
}

impl CheckOutputs {
    pub(crate) fn run(self, printer: &mut Printer) -> anyhow::Result<ExitCode> {
        let report = compare_outputs(&self)?;
        match self.json {
            true => printer.json(&report)?,
            false => print(&report, printer)?,
        }
        Ok(ExitCode::from(u8::from(!report.passed)))
    }
}

/// What a device computed, against what its kit expects.
#[derive(Debug, Serialize)]
struct OutputsReport {
    /// The runner whose outputs are expected.
    reference: String,
    soc: Option<String>,
    tokens: usize,
    tokens_per_step: usize,
    min_snr: f64,
    /// The logits, or without a head the last hidden state, over all steps.
    output: Snr,
    /// New keys and values over all steps and layers.
    entries: Snr,
    logits: Option<LogitsReport>,
    /// Every output of every graph, over all steps.
    tensors: Vec<TensorReport>,
    steps: Vec<StepReport>,
    passed: bool,
}

#[derive(Debug, Serialize)]
struct TensorReport {
    graph: String,
    name: String,
    meaning: Meaning,
    snr: Snr,
    /// The first step below the bar.
    first_bad: Option<usize>,
}

/// Compares the raw files of a device with those of the kit.
fn compare_outputs(args: &CheckOutputs) -> anyhow::Result<OutputsReport> {
    let (folder, outputs) = (&*args.kit, &*args.outputs);
    if !Kit::is_in(folder) {
        bail!(
            "{} is no kit; accepted: the folder that `firesteel profile phone-kit` wrote",
            folder.display()
        );
    }
    let kit = Kit::read(folder)?;
    let bar = args.min_snr.unwrap_or(kit.min_snr);
    if !bar.is_finite() || !args.tie_margin.is_finite() {
        bail!("--min-snr {bar}, --tie-margin {}: finite numbers are accepted", args.tie_margin);
    }
    let results: Vec<PathBuf> =
        kit.parts.iter().map(|part| results(&kit, part, outputs)).collect::<Result<_, _>>()?;
    let mut meters: Vec<Vec<(SnrMeter, Option<usize>)>> =
        kit.parts.iter().map(|part| vec![Default::default(); part.outputs.len()]).collect();
    let (mut output, mut entries) = (SnrMeter::default(), SnrMeter::default());
    let (mut differences, mut steps) = (Vec::new(), Vec::new());
    for step in 0..kit.steps {
        let mut joined = Joined::default();
        let mut hidden = SnrMeter::default();
        for ((part, results), meters) in kit.parts.iter().zip(&results).zip(&mut meters) {
            let result = results.join(format!("Result_{step}"));
            let files = files(&result, &part.outputs)?;
            let expected = folder.join(&part.name).join("expected").join(step_folder(step));
            for ((tensor, file), meter) in part.outputs.iter().zip(&files).zip(meters) {
                let left = expected.join(format!("{}.raw", tensor.name));
                let left = values(tensor, &left, Form::Float)?;
                let right = values(tensor, &file.0, file.1)?;
                let mut seen = SnrMeter::default();
                seen.add(&left, &right);
                meter.0.merge(&seen);
                if meter.1.is_none() && !seen.snr().reaches(bar) {
                    meter.1 = Some(step);
                }
                match tensor.meaning {
                    Meaning::Entry => entries.merge(&seen),
                    // Of several graphs the last one's counts.
                    Meaning::Hidden => hidden = seen,
                    Meaning::Logits => joined.add(left, right),
                    Meaning::Input => {}
                }
            }
        }
        let mut last = None;
        let mut seen = hidden;
        if !joined.parts.is_empty() {
            seen = SnrMeter::default();
            let rows = if kit.all_logits { kit.tokens } else { 1 };
            for (left, right) in joined.tokens(rows, kit.vocab_size)? {
                seen.add(&left, &right);
                let difference = compare_logits(&left, &right);
                differences.push(difference);
                last = Some(difference);
            }
        }
        output.merge(&seen);
        let position = step.saturating_mul(kit.tokens);
        steps.push(StepReport { position, output: seen.snr(), logits: last });
    }
    let mut reports = Vec::new();
    for (part, meters) in kit.parts.iter().zip(&meters) {
        for (tensor, (meter, first_bad)) in part.outputs.iter().zip(meters) {
            reports.push(TensorReport {
                graph: part.name.clone(),
                name: tensor.name.clone(),
                meaning: tensor.meaning,
                snr: meter.snr(),
                first_bad: *first_bad,
            });
        }
    }
    let (output, entries) = (output.snr(), entries.snr());
    Ok(OutputsReport {
        reference: kit.reference,
        soc: kit.soc,
        tokens: kit.steps.saturating_mul(kit.tokens),
        tokens_per_step: kit.tokens,
        min_snr: bar,
        passed: reports.iter().all(|report| report.snr.reaches(bar)),
        output,
        entries,
        logits: LogitsReport::of(&differences, args.tie_margin),
        tensors: reports,
        steps,
    })
}

/// The folder with the `Result_N` of a part, which has one for every step and no other.
fn results(kit: &Kit, part: &KitPart, outputs: &Path) -> anyhow::Result<PathBuf> {
    let own = outputs.join(&part.name);
    let folder = if own.is_dir() || kit.parts.len() > 1 { own } else { outputs.to_owned() };
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(&folder)? {
        let name = entry?.file_name();
        // Logs of the program that ran the graph lie beside the results.
        let Some(step) = name.to_str().and_then(|name| name.strip_prefix("Result_")) else {
            continue;
        };
        let step = step.parse::<usize>().ok().filter(|step| *step < kit.steps);
        let Some(step) = step else {
            bail!(
                "{}: {} is no step of the kit, which has {}",
                folder.display(),
                name.display(),
                kit.steps
            );
        };
        found.insert(step);
    }
    match (0..kit.steps).find(|step| !found.contains(step)) {
        None => Ok(folder),
        Some(step) => {
            bail!("{}: Result_{step} is missing; the kit has {} steps", folder.display(), kit.steps)
        }
    }
}

/// The file of each output in the folder of a step; there is one for each and no other.
fn files(result: &Path, outputs: &[KitTensor]) -> anyhow::Result<Vec<(PathBuf, Form)>> {
    let mut left = BTreeSet::new();
    for entry in fs::read_dir(result)? {
        left.insert(entry?.file_name().to_string_lossy().into_owned());
    }
    let mut files = Vec::new();
    for tensor in outputs {
        let float = format!("{}.raw", tensor.name);
        let native = format!("{}_native.raw", tensor.name);
        files.push(match (left.remove(&float), left.remove(&native)) {
            (true, false) => (result.join(float), Form::Float),
            (false, true) => (result.join(native), Form::Native),
            (false, false) => bail!("{}: {float} or {native} is missing", result.display()),
            (true, true) => bail!("{}: both {float} and {native}; keep one", result.display()),
        });
    }
    match left.first() {
        None => Ok(files),
        Some(name) => bail!("{}: {name:?} is no output of the graph", result.display()),
    }
}

/// The numbers of a file, which has the tensor's length.
fn values(tensor: &KitTensor, file: &Path, form: Form) -> anyhow::Result<Vec<f32>> {
    let expected = tensor.bytes(tensor.dtype_in(form))? as u64;
    let bytes = fs::metadata(file)?.len();
    let named = || file.display().to_string();
    // Before a long file is read.
    if bytes > expected {
        bail!("{}: has {bytes} bytes; {:?} has {expected}", named(), tensor.shape);
    }
    tensor.decode(&fs::read(file)?, form).with_context(named)
}

/// Logits of the parts of a head, expected and computed.
#[derive(Default)]
struct Joined {
    parts: Vec<(Vec<f32>, Vec<f32>)>,
}

impl Joined {
    fn add(&mut self, left: Vec<f32>, right: Vec<f32>) {
        self.parts.push((left, right));
    }

    /// The whole rows of each of `tokens` tokens.
    fn tokens(
        &self,
        tokens: usize,
        vocabulary: usize,
    ) -> anyhow::Result<Vec<(Vec<f32>, Vec<f32>)>> {
        // Nothing is made for more tokens than there are values.
        if self.parts.iter().any(|(left, _)| left.len() < tokens) {
            bail!("the logits of the kit's graphs are not those of {tokens} tokens");
        }
        let mut rows = vec![(Vec::new(), Vec::new()); tokens];
        for (left, right) in &self.parts {
            let width = (left.len() / tokens.max(1)).max(1);
            let parts = left.chunks(width).zip(right.chunks(width));
            for (row, (left, right)) in rows.iter_mut().zip(parts) {
                row.0.extend_from_slice(left);
                row.1.extend_from_slice(right);
            }
        }
        if rows.iter().any(|row| row.0.len() != vocabulary || row.1.len() != vocabulary) {
            bail!("the logits of the kit's graphs do not make rows of {vocabulary}");
        }
        Ok(rows)
    }
}

fn print(report: &OutputsReport, printer: &mut Printer) -> anyhow::Result<()> {
    printer.line(format!(
        "a device{} against {}: {} tokens in steps of {}",
        report.soc.as_ref().map_or(String::new(), |soc| format!(" ({soc})")),
        report.reference,
        report.tokens,
        report.tokens_per_step
    ))?;
    let mut rows = vec![["", "SNR", "max difference"].map(str::to_owned).to_vec()];
    let mut row = |name: String, snr: &Snr| {
        rows.push(vec![name, decibels(snr), format!("{:.3e}", snr.max_abs)]);
    };
    let graphs: BTreeSet<&str> = report.tensors.iter().map(|t| t.graph.as_str()).collect();
    for tensor in &report.tensors {
        // What a single graph returns first has a line of its own.
        let first = graphs.len() == 1 && tensor.meaning != Meaning::Entry;
        if !first && (tensor.meaning != Meaning::Entry || !tensor.snr.reaches(report.min_snr)) {
            row(format!("{} {}", tensor.graph, tensor.name), &tensor.snr);
        }
    }
    row("new keys and values".into(), &report.entries);
    row(if report.logits.is_some() { "logits" } else { "hidden" }.into(), &report.output);
    for line in table(&rows) {
        printer.line(line)?;
    }
    if let Some(logits) = &report.logits {
        printer.line(logits_line(logits))?;
    }
    for tensor in &report.tensors {
        if let Some(step) = tensor.first_bad {
            printer.line(format!(
                "{} {} is first below the bar in step {step}",
                tensor.graph, tensor.name
            ))?;
        }
    }
    let verdict = if report.passed { "passed" } else { "FAILED" };
    printer.line(format!("{verdict}: the bar over all steps is {} dB", report.min_snr))?;
    Ok(())
}
