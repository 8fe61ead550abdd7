use super::check::{CheckArgs, check_and_print};
use crate::printer::{Printer, mebibytes};
use crate::progress::Progress;
use firesteel_model::Model;

use anyhow::bail;
use clap::{Args, Parser, ValueEnum};
use firesteel_artifact::{ExportRequest, HeadSource, Manifest, export};
use firesteel_check::CheckReport;
use firesteel_checkpoint::{Checkpoint, LayerKind, ModelConfig, RandomWeights};
use firesteel_export::{Dialect, ExportOptions, Gelu, Precision};
use firesteel_step::{CacheLayoutChoice, KvBytes, Logits};
use firesteel_tensor::DType;
use serde::Serialize;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

/// Write the static decode-step graph of a checkpoint.
///
/// The output folder has model.onnx with external data, manifest.json with every name, shape and
/// type, and the tokenizer. It appears complete or not at all.
#[derive(Debug, Args)]
pub(crate) struct Export {
    /// Checkpoint folder or GGUF file; with --random-weights also a config.json or a preset's name
    checkpoint: PathBuf,
    /// Folder to write
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    #[command(flatten)]
    step: StepArgs,
    /// Number format of weights, activations, inputs and outputs
    #[arg(long, value_enum, default_value_t = Format::Fp32)]
    precision: Format,
    /// Who reads the graph: portable (opset 18, decomposed) or qnn (opset 23, fused spellings)
    #[arg(long, value_enum, default_value_t = Reader::Portable)]
    dialect: Reader,
    /// Random weights of the config's shape, for profiling
    #[arg(long)]
    random_weights: bool,
    /// Start of the random weights
    #[arg(long, default_value_t = 0, requires = "random_weights")]
    seed: u64,
    /// Also write the embedding table as a raw file for hosts
    #[arg(long)]
    embedding: bool,
    /// Replace an existing artifact
    #[arg(long)]
    force: bool,
    /// Check what was written against the checkpoint with the runners that are compiled in
    #[arg(long)]
    check: bool,
    /// Print a JSON report
    #[arg(long)]
    json: bool,
}

/// Which step of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub(crate) struct StepArgs {
    /// Entries of a full-attention layer's cache
    #[arg(long, value_name = "N", default_value_t = 1024)]
    pub(crate) context: usize,
    /// Layers: all, sliding or full (the first layer of that type), or A:B
    #[arg(long, value_name = "all|sliding|full|A:B", default_value = "all")]
    pub(crate) layers: String,
    /// Leave out the final norm and the vocabulary projection; the output is `hidden`
    #[arg(long, conflicts_with = "logits")]
    pub(crate) no_lm_head: bool,
    /// How sliding layers keep their window; auto is ring for sliding and roll for full layers
    #[arg(long, value_enum, default_value_t = Layout::Auto)]
    cache_layout: Layout,
    /// Form of the GELU activation; the checkpoints were trained with exact
    #[arg(long, value_enum, default_value_t = GeluForm::Exact)]
    pub(crate) gelu: GeluForm,
    /// Tokens of a step: 1 decodes, more prefill
    #[arg(long, value_name = "T", default_value_t = 1)]
    tokens: usize,
    /// Logits of the last token or of all tokens of a step
    #[arg(long, value_enum, default_value_t = LogitsOf::Last)]
    logits: LogitsOf,
    /// Write the vocabulary projection as N graphs of their own
    #[arg(long, value_name = "N", default_value_t = 1)]
    head_shards: usize,
}

impl Default for StepArgs {
    /// What an empty command line gives.
    fn default() -> Self {
        #[derive(Parser)]
        struct Alone {
            #[command(flatten)]
            step: StepArgs,
        }
        Alone::parse_from(["step"]).step
    }
}

impl StepArgs {
    /// The options of a step of a model with `config`. Doubtful ones are warned about.
    pub(crate) fn options(
        &self,
        config: &ModelConfig,
        precision: Precision,
        dialect: Dialect,
        printer: &mut Printer,
    ) -> anyhow::Result<ExportOptions> {
        let layers = layer_range(&self.layers, config)?;
        if self.context > config.max_position_embeddings {
            printer.warn(&format!(
                "--context {} is beyond the {} positions that the model claims",
                self.context, config.max_position_embeddings
            ));
        }
        let logits = match (self.no_lm_head, self.logits) {
            (true, _) => Logits::Hidden,
            (false, LogitsOf::Last) => Logits::Last,
            (false, LogitsOf::All) => Logits::All,
        };
        if logits != Logits::Hidden && layers != (0..config.num_layers()) {
            printer.warn(&format!(
                "the logits of layers {}:{} alone are not the model's; --no-lm-head leaves them out",
                layers.start, layers.end
            ));
        }
        Ok(ExportOptions {
            tokens: self.tokens,
            context: self.context,
            layers,
            cache_layout: self.cache_layout.choice(),
            logits,
            gelu: self.gelu.gelu(),
            precision,
            dialect,
            head_shards: self.head_shards,
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Layout {
    Auto,
    Ring,
    Roll,
}

impl Layout {
    pub(crate) fn choice(self) -> CacheLayoutChoice {
        match self {
            Self::Auto => CacheLayoutChoice::Auto,
            Self::Ring => CacheLayoutChoice::Ring,
            Self::Roll => CacheLayoutChoice::Roll,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum GeluForm {
    Exact,
    Tanh,
    Sigmoid,
}

impl GeluForm {
    pub(crate) fn gelu(self) -> Gelu {
        match self {
            Self::Exact => Gelu::Exact,
            Self::Tanh => Gelu::Tanh,
            Self::Sigmoid => Gelu::Sigmoid,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    Fp32,
    Fp16,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Reader {
    Portable,
    Qnn,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum LogitsOf {
    Last,
    All,
}

/// The report on stdout.
#[derive(Debug, Serialize)]
struct Report {
    path: String,
    context: usize,
    tokens: usize,
    layers: usize,
    first_layer: usize,
    layer_types: Vec<LayerKind>,
    include_lm_head: bool,
    head: Option<HeadSource>,
    tensors_read: usize,
    dialect: Dialect,
    opset: i64,
    dtype: DType,
    op_counts: BTreeMap<String, BTreeMap<String, usize>>,
    data_bytes: u64,
    kv_bytes: KvBytes,
    kv_bytes_per_element: usize,
    unused_inputs: Vec<String>,
    wide: String,
    check: Option<CheckReport>,
}

impl Export {
    pub(crate) fn run(self, printer: &mut Printer) -> anyhow::Result<ExitCode> {
        let (checkpoint, random_seed) = self.open(printer)?;
        let precision = match self.precision {
            Format::Fp32 => Precision::Fp32,
            Format::Fp16 => Precision::Fp16,
        };
        let dialect = match self.dialect {
            Reader::Portable => Dialect::Portable,
            Reader::Qnn => Dialect::Qnn,
        };
        let options = self.step.options(checkpoint.config(), precision, dialect, printer)?;
        let bar = Progress::new("exporting");
        let request = ExportRequest {
            checkpoint: &checkpoint,
            options,
            embedding: self.embedding,
            random_seed,
            force: self.force,
            threads: threads(),
        };
        let progress = |done, total| bar.set(done, total);
        let artifact = export(&request, &self.out, &progress).map_err(|error| {
            let hint = if self.force || !self.out.exists() {
                ""
            } else {
                " (--force replaces an artifact)"
            };
            anyhow::Error::from(error)
                .context(format!("{} was not written{hint}", self.out.display()))
        })?;
        drop(bar);
        let mut report = report(&self.out, artifact.manifest());
        if !self.json {
            print(&report, printer)?;
        }
        if self.check {
            let test = Model::Artifact(Box::new(artifact));
            let reference = Model::Checkpoint(Arc::new(checkpoint));
            let result =
                check_and_print(&test, &reference, &CheckArgs::default(), !self.json, printer)?;
            report.check = Some(result);
        }
        if self.json {
            printer.json(&report)?;
        }
        let failed = report.check.as_ref().is_some_and(|check| !check.passed);
        Ok(ExitCode::from(u8::from(failed)))
    }

    fn open(&self, printer: &mut Printer) -> anyhow::Result<(Checkpoint, Option<u64>)> {
        if !self.random_weights {
            let checkpoint = Checkpoint::open(&self.checkpoint)?;
            for warning in checkpoint.warnings() {
                printer.warn(warning);
            }
            return Ok((checkpoint, None));
        }
        let preset = self.checkpoint.to_str().and_then(firesteel_checkpoint::preset);
        let config = match preset {
            Some(config) => config,
            None => {
                let (config, warnings) = ModelConfig::open(&self.checkpoint)?;
                warnings.iter().for_each(|warning| printer.warn(warning));
                config
            }
        };
        let dtype = config.dtype.unwrap_or(DType::BF16);
        let weights = RandomWeights { dtype, seed: self.seed, outliers: false };
        Ok((Checkpoint::random(config, weights), Some(self.seed)))
    }
}

/// Threads that convert and write.
pub(crate) fn threads() -> usize {
    std::thread::available_parallelism().map_or(2, usize::from).clamp(1, 8)
}

/// The layers that `--layers` names.
pub(crate) fn layer_range(text: &str, config: &ModelConfig) -> anyhow::Result<Range<usize>> {
    let first = |kind: LayerKind| match config.layer_types.iter().position(|k| *k == kind) {
        Some(layer) => Ok(layer..layer + 1),
        None => bail!("--layers {text}: the model has no {kind} layer"),
    };
    match text {
        "all" => Ok(0..config.num_layers()),
        "sliding" => first(LayerKind::Sliding),
        "full" => first(LayerKind::Full),
        range => {
            let parsed = range
                .split_once(':')
                .and_then(|(start, end)| Some(start.parse().ok()?..end.parse().ok()?));
            match parsed {
                Some(range) if range.start < range.end && range.end <= config.num_layers() => {
                    Ok(range)
                }
                _ => bail!(
                    "--layers {text}: all, sliding, full or A:B with A < B <= {} is accepted",
                    config.num_layers()
                ),
            }
        }
    }
}

fn report(path: &Path, manifest: &Manifest) -> Report {
    let kv = &manifest.kv_bytes;
    Report {
        path: path.display().to_string(),
        context: manifest.step.context,
        tokens: manifest.step.tokens,
        layers: manifest.step.layers.len(),
        first_layer: manifest.step.first_layer,
        layer_types: manifest.layer_types.clone(),
        include_lm_head: manifest.has_head(),
        head: manifest.head,
        tensors_read: manifest.model.tensors_read,
        dialect: manifest.options.dialect,
        opset: manifest.opset,
        dtype: manifest.step.dtype,
        op_counts: manifest
            .graphs
            .iter()
            .map(|graph| (graph.file.clone(), graph.op_counts.clone()))
            .collect(),
        data_bytes: manifest.data.iter().map(|data| data.bytes).sum(),
        kv_bytes: KvBytes { hybrid: kv.hybrid, uniform: kv.uniform, saved: kv.saved },
        kv_bytes_per_element: kv.bytes_per_element,
        unused_inputs: manifest.unused_inputs.clone(),
        wide: manifest.wide.reason.clone(),
        check: None,
    }
}

fn print(report: &Report, printer: &mut Printer) -> anyhow::Result<()> {
    printer.line(format!("wrote {}", report.path))?;
    printer.line(format!(
        "{} layers from {}, context {}, {} token{} a step, {} dialect, opset {}, {}",
        report.layers,
        report.first_layer,
        report.context,
        report.tokens,
        if report.tokens == 1 { "" } else { "s" },
        report.dialect,
        report.opset,
        report.dtype,
    ))?;
    for (file, counts) in &report.op_counts {
        let nodes: usize = counts.values().sum();
        let list: Vec<String> = counts.iter().map(|(op, count)| format!("{count} {op}")).collect();
        printer.line(format!("{file}: {nodes} nodes, {}", list.join(", ")))?;
    }
    printer.line(format!(
        "{} tensors, {} of data; KV at 16 bits {} instead of {}",
        report.tensors_read,
        mebibytes(report.data_bytes),
        mebibytes(report.kv_bytes.hybrid),
        mebibytes(report.kv_bytes.uniform),
    ))?;
    if !report.unused_inputs.is_empty() {
        printer.line(format!("not in this slice: {}", report.unused_inputs.join(", ")))?;
    }
    Ok(())
}
