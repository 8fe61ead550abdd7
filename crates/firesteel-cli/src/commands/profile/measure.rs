use super::row::{NewRow, RowArgs, missing, times_line};
use crate::commands::export::layer_range;
use crate::printer::{Printer, table};
use crate::source::{self, OrtArgs, runner_names};
use anyhow::{Context as _, bail};
use clap::Args;
use firesteel_artifact::Manifest;
use firesteel_checkpoint::{LayerKind, ModelConfig};
use firesteel_export::{Dialect, Gelu, Precision};
use firesteel_model::{Model, RunnerKind, ort_runner};
use firesteel_ort::Optimization;
use firesteel_profile::{Measurement, Origin, PartKind, RunTimes};
use firesteel_step::{KvState, Logits, Runner, StepOptions, StepSpec};
use firesteel_tensor::Tensor;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

/// Time the step of an artifact or a checkpoint on this machine.
///
/// One step is run again and again, with caches that hold arbitrary numbers and without what the
/// host does between steps. The median counts. `ort` runs an artifact with all its optimizations,
/// `cpu` and `engine` run a checkpoint. The evaluator and the emulator of the HTP are refused: they
/// compute on a host what a device would compute, and their time is nobody's. With --out the time
/// becomes a row of a table for `profile compose`.
#[derive(Debug, Args)]
pub(crate) struct Measure {
    /// Artifact (ort) or checkpoint (cpu, engine)
    path: PathBuf,
    /// Who executes the step
    #[arg(long, value_parser = runner_names())]
    runner: RunnerKind,
    /// Runs that are not counted
    #[arg(long, value_name = "N", default_value_t = 3)]
    warmup: usize,
    /// Runs that are
    #[arg(long, value_name = "N", default_value_t = 20)]
    runs: usize,
    /// Tokens in the cache before the step [default: as many as fit]
    #[arg(long, value_name = "N")]
    context_fill: Option<usize>,
    #[command(flatten)]
    step: CheckpointStep,
    #[command(flatten)]
    ort: OrtArgs,
    #[command(flatten)]
    row: RowArgs,
    /// Name of this machine in the table [default: that of its processor]
    #[arg(long, value_name = "NAME")]
    device: Option<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The step of a checkpoint; an artifact has its own.
#[derive(Debug, Args)]
struct CheckpointStep {
    /// Layers of a checkpoint: all, sliding or full (the first layer of that type), or A:B
    #[arg(long, value_name = "all|sliding|full|A:B")]
    layers: Option<String>,
    /// Entries of a full layer's cache, of a checkpoint [default: 1024]
    #[arg(long, value_name = "N")]
    context: Option<usize>,
    /// Tokens of a step of a checkpoint [default: 1]
    #[arg(long, value_name = "T")]
    tokens: Option<usize>,
    /// Leave out the head of a checkpoint
    #[arg(long)]
    no_lm_head: bool,
}

/// Context of a checkpoint's step when none is given.
const CONTEXT: usize = 1024;
/// Most runs, counted or not.
const MAX_RUNS: usize = 1_000_000;

/// The times and what they are of.
#[derive(Debug, Serialize)]
struct Report {
    device: String,
    soc: String,
    runtime: String,
    settings: Vec<(String, String)>,
    layers: Vec<LayerKind>,
    first_layer: usize,
    head: bool,
    tokens: usize,
    context: usize,
    context_fill: usize,
    warmup: usize,
    times: RunTimes,
    row: Option<Measurement>,
}

impl Measure {
    pub(crate) fn run(self, printer: &mut Printer) -> anyhow::Result<ExitCode> {
        let runtime = match self.runner {
            RunnerKind::Cpu => "firesteel-cpu",
            RunnerKind::Engine => "firesteel-engine",
            RunnerKind::Ort => "ort-cpu",
            RunnerKind::Evaluator => bail!(
                "--runner evaluator: it computes in 64 bits what the graph writes down, node by \
                 node, so its time is no device's; measure with ort, cpu or engine"
            ),
            RunnerKind::Htp => bail!(
                "--runner htp: the emulator takes the host's time, which says nothing about a \
                 device; run a `profile phone-kit` on the device and `profile import` its report"
            ),
        };
        for (option, value, least) in [("--runs", self.runs, 1), ("--warmup", self.warmup, 0)] {
            if value < least || value > MAX_RUNS {
                bail!("{option} {value}: {least} to {MAX_RUNS} is accepted");
            }
        }
        let source = source::open(&self.path, printer)?;
        let mut runner = self.open(&source)?;
        let spec = runner.spec().clone();
        let fill = self.context_fill.unwrap_or(spec.context.saturating_sub(spec.tokens));
        if fill.checked_add(spec.tokens).is_none_or(|end| end > spec.context) {
            bail!(
                "--context-fill {fill}: a step of {} behind it has to fit in the context of {}",
                spec.tokens,
                spec.context
            );
        }
        let times = self.measure(runner.as_mut(), &spec, fill)?;
        let device = match &self.device {
            Some(device) => device.clone(),
            None => processor().context("the processor has no name here; give --device")?,
        };
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let mut report = Report {
            device,
            soc: format!("{}, {cores} threads", std::env::consts::ARCH),
            runtime: runtime.to_owned(),
            settings: runner.settings(),
            layers: spec.layers.iter().map(|layer| layer.kind).collect(),
            first_layer: spec.first_layer,
            head: spec.logits != Logits::Hidden,
            tokens: spec.tokens,
            context: spec.context,
            context_fill: fill,
            warmup: self.warmup,
            times,
            row: None,
        };
        if let Some(out) = &self.row.out {
            report.row = Some(self.write_row(out, &source, &spec, &report, printer)?);
        }
        if self.json {
            printer.json(&report)?;
        } else {
            report.print(printer)?;
        }
        Ok(ExitCode::SUCCESS)
    }

    /// The runner, and for a checkpoint its step.
    fn open(&self, source: &Model) -> anyhow::Result<Box<dyn Runner>> {
        let CheckpointStep { layers, context, tokens, no_lm_head } = &self.step;
        let options = self.ort.options()?;
        match source {
            Model::Checkpoint(checkpoint) => {
                let config = checkpoint.config();
                let context = context.unwrap_or(CONTEXT.min(config.max_position_embeddings));
                let step = StepOptions {
                    tokens: tokens.unwrap_or(1),
                    layers: layer_range(layers.as_deref().unwrap_or("all"), config)?,
                    logits: if *no_lm_head { Logits::Hidden } else { Logits::Last },
                    ..StepOptions::decode(config, context)
                };
                let spec = StepSpec::new(config, &step)?;
                Ok(source.runner(self.runner, Some(&spec), false, &options)?)
            }
            Model::Artifact(_) | Model::Compiled(_)
                if layers.is_some() || context.is_some() || tokens.is_some() || *no_lm_head =>
            {
                bail!("--layers, --context, --tokens and --no-lm-head are for checkpoints")
            }
            Model::Artifact(artifact) if self.runner == RunnerKind::Ort => {
                Ok(ort_runner(artifact, false, Optimization::All, &options)?)
            }
            _ => Ok(source.runner(self.runner, None, false, &options)?),
        }
    }

    /// The step behind `fill` tokens of arbitrary keys and values.
    fn measure(
        &self,
        runner: &mut dyn Runner,
        spec: &StepSpec,
        fill: usize,
    ) -> anyhow::Result<RunTimes> {
        let mut numbers = Numbers(1);
        let mut state = KvState::new(spec)?;
        let shape = vec![1, spec.num_key_value_heads, fill, spec.head_dim];
        let count = firesteel_tensor::element_count(&shape).context("the cache is too large")?;
        let entries = Tensor::from_f32_as(spec.dtype, shape, numbers.next(count))?;
        if fill > 0 {
            state.seed(&vec![(entries.view(), entries.view()); spec.layers.len()])?;
        }
        let prepared = state.prepare(spec, &numbers.next(spec.tokens * spec.hidden_size))?;
        let inputs = state.inputs(spec, &prepared)?;
        let mut times = Vec::with_capacity(self.runs);
        for run in 0..self.warmup + self.runs {
            let start = Instant::now();
            runner.step(&inputs)?;
            let elapsed = start.elapsed().as_secs_f64();
            if run >= self.warmup {
                times.push(1000.0 * elapsed);
            }
        }
        RunTimes::of_runs(&times).context("no run was counted")
    }

    fn write_row(
        &self,
        out: &Path,
        source: &Model,
        spec: &StepSpec,
        report: &Report,
        printer: &mut Printer,
    ) -> anyhow::Result<Measurement> {
        if report.head {
            bail!(
                "a row of {} is of layers, and this step has the head too; leave it out with \
                 --no-lm-head (of export for an artifact)",
                out.display()
            );
        }
        let config: ModelConfig = source.config()?;
        let sliding = spec.layers.iter().find(|layer| layer.kind == LayerKind::Sliding);
        let window = spec.sliding_window.unwrap_or(0).saturating_sub(1);
        if sliding.is_some() && report.context_fill < window {
            bail!(
                "a row of {} is of sliding layers with a full window; --context-fill {} leaves it \
                 partly empty",
                out.display(),
                report.context_fill
            );
        }
        let (kind, mut variant) = match spec.layers.as_slice() {
            [layer] => (PartKind::from(layer.kind), None),
            layers => {
                let count = |kind| layers.iter().filter(|layer| layer.kind == kind).count();
                let kinds = LayerKind::ALL.into_iter().map(|kind| (count(kind), kind));
                let names: Vec<String> = kinds
                    .filter(|(count, _)| *count > 0)
                    .map(|(count, kind)| format!("{count} {kind}"))
                    .collect();
                (PartKind::Block, Some(names.join(", ")))
            }
        };
        let manifest = source.manifest();
        if let Some(manifest) = manifest
            && manifest.options.gelu != Gelu::Exact
            && variant.is_none()
        {
            variant = Some("gelu-tanh".into());
        }
        let settings: Vec<String> =
            report.settings.iter().map(|(name, value)| format!("{name} {value}")).collect();
        let n = report.times.n.unwrap_or(0);
        let text = format!(
            "firesteel {} on {} ({}): the step alone, {n} runs after a warm-up of {}",
            env!("CARGO_PKG_VERSION"),
            report.runtime,
            settings.join(", "),
            report.warmup,
        );
        let new = NewRow {
            config: &config,
            device: report.device.clone(),
            soc: report.soc.clone(),
            runtime: report.runtime.clone(),
            precision: match (manifest, self.runner) {
                (Some(manifest), _) => Some(precision(manifest)),
                (None, RunnerKind::Engine) => Some("fp64".into()),
                // Which of the formats of a checkpoint its matrices have is its author's to say.
                (None, _) if self.row.precision.is_none() => bail!(missing(out, "--precision")),
                (None, _) => None,
            },
            dialect: manifest.map(|manifest| match manifest.options.dialect {
                Dialect::Portable => "portable".into(),
                Dialect::Qnn => "qnn".into(),
            }),
            kind,
            layout: sliding.or(spec.layers.first()).map(|layer| layer.layout),
            context: (kind != PartKind::Sliding).then_some(spec.context),
            tokens: spec.tokens,
            variant,
            timing_only: manifest.is_some_and(|manifest| {
                manifest.model.random_seed.is_some()
                    || manifest.quantization.as_ref().is_some_and(|known| !known.calibrated)
            }),
            runs: &report.times,
            origin: Origin::Measured,
            text,
        };
        self.row.write(out, new, printer)
    }
}

/// Name of an artifact's number format, as tables have it.
fn precision(manifest: &Manifest) -> String {
    match (&manifest.quantization, manifest.options.precision) {
        (Some(known), _) => known.scheme.clone(),
        (None, Precision::Fp32) => "fp32".into(),
        (None, Precision::Fp16) => "fp16".into(),
    }
}

/// The processor's name, where the system tells it.
fn processor() -> Option<String> {
    let text = fs_err::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    let (_, name) = line.split_once(':')?;
    // A table's names are short.
    Some(name.trim().chars().take(60).collect()).filter(|name: &String| !name.is_empty())
}

/// Numbers between −1 and 1, always the same (a linear congruential generator, Knuth's MMIX).
struct Numbers(u64);

impl Numbers {
    fn next(&mut self, count: usize) -> Vec<f32> {
        let numbers = (0..count).map(|_| {
            self.0 = self
                .0
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        });
        numbers.collect()
    }
}

impl Report {
    fn print(&self, printer: &mut Printer) -> anyhow::Result<()> {
        printer.line(format!("{}, {}, {}: the step alone", self.device, self.soc, self.runtime))?;
        let end = self.first_layer + self.layers.len();
        let mut rows = vec![vec![
            "layers".to_owned(),
            format!("{}:{end}{}", self.first_layer, if self.head { " and head" } else { "" }),
        ]];
        for (name, value) in [
            ("tokens", self.tokens),
            ("context", self.context),
            ("in the cache", self.context_fill),
            ("warm-up", self.warmup),
        ] {
            rows.push(vec![name.to_owned(), value.to_string()]);
        }
        rows.extend(self.settings.iter().map(|(name, value)| vec![name.clone(), value.clone()]));
        for line in table(&rows) {
            printer.line(line)?;
        }
        printer.line(times_line(&self.times))?;
        Ok(())
    }
}
