//! `quantize graph`: a step's graph in integers.

use super::{SEQUENCE, calibration_texts, sequences};
use crate::commands::check::{Spread, spread_ids};
use crate::commands::export::{StepArgs, layer_range, threads};
use crate::printer::{Printer, mebibytes, table};
use crate::progress::Progress;
use crate::source::{self};
use crate::texts::text_ids;
use anyhow::{Context as _, bail};
use clap::{Args, ValueEnum};
use firesteel_artifact::{
    Artifact, Draft, EmbeddingEntry, GraphRole, Manifest, Quantization, Write, checkpoint_hashes,
    sha256, write_artifact,
};
use firesteel_check::{Snr, SnrMeter};
use firesteel_checkpoint::{Checkpoint, Family, ModelConfig, SlotKind, Weight};
use firesteel_export::{Dialect, ExportOptions, HeadGraph, Precision, StepGraphs, build};
use firesteel_generate::AddedTokens;
use firesteel_model::Model;
use firesteel_quantize::weights::{
    Budget, LayerOptions, ModelOptions, OutputError, QuantizedMatrix, WeightBits, Widths,
    equalized, quantize_model, round_for_output, round_for_scores, round_layers, round_nearest,
    with_columns,
};
use firesteel_quantize::{
    KvFormat, MatrixPlan, Pair, Quantized, RangeSource, Ranges, Scheme, SchemeOptions, WeightWidth,
    compare, plan, quantize, stored_matrices,
};
use firesteel_tensor::DType;
use glob::Pattern;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

/// Write a step's graph in integers, as the Hexagon compiler takes it.
///
/// The output is an artifact in the qnn dialect whose operators stand between DequantizeLinear and
/// QuantizeLinear. The ranges of its values come from `firesteel calibrate`. It appears complete or
/// not at all.
#[derive(Debug, Args)]
pub(crate) struct QuantizeGraph {
    /// Checkpoint folder, GGUF file, or an artifact in floats
    checkpoint: PathBuf,
    /// Number formats of the step's graph: weights and activations
    #[arg(long, value_enum)]
    scheme: SchemeName,
    /// Bits for each weight that 8-bit matrices of --scheme mixed may fill
    #[arg(long, value_name = "BITS")]
    bits: Option<f64>,
    /// Ranges that `firesteel calibrate` wrote
    #[arg(long, value_name = "FILE")]
    ranges: Option<PathBuf>,
    /// Make the ranges up: for measuring time, the numbers are wrong
    #[arg(long, conflicts_with = "ranges")]
    uncalibrated: bool,
    /// Number format of keys and values [default: s16; u8 for w8a8]
    #[arg(long, value_enum)]
    kv: Option<Kv>,
    /// Another width for the matrices with a name like GLOB: fp16, w16, w8 or w4; may be repeated,
    /// and the last that fits counts
    #[arg(long, value_name = "GLOB=WIDTH", value_parser = kept)]
    keep: Vec<(Pattern, WeightWidth)>,
    /// Text files, or conversations where they end in .jsonl, that the model reads to round its
    /// weights for what they meet together [default: the scale of each row is searched for what
    /// --ranges say that its columns meet]
    #[arg(long, value_name = "FILE", num_args = 1..)]
    text: Vec<PathBuf>,
    /// N ids all over the vocabulary instead of --text, for models without a tokenizer
    #[arg(long, value_name = "N", conflicts_with_all = ["text", "text_tokens"])]
    spread: Option<usize>,
    /// Take the integers of a quantized artifact of the same model and ranges, such as another step
    #[arg(long, value_name = "ARTIFACT", requires = "ranges",
          conflicts_with_all = ["text", "spread", "quick", "bits", "budget_db"])]
    weights: Option<PathBuf>,
    /// Most tokens of --text; of more, some all over the texts are taken [default: 8192]
    #[arg(long, value_name = "N", requires = "text")]
    text_tokens: Option<usize>,
    /// Round each matrix by itself, and estimate the noise of each for mixed: for large models
    #[arg(long)]
    quick: bool,
    /// Signal to noise of the output in dB that --scheme mixed must reach with as few 8-bit matrices
    /// as possible, all else in floats
    #[arg(long, value_name = "DB", conflicts_with = "bits")]
    budget_db: Option<f64>,
    /// Text or conversations (.jsonl), as far as the context goes, on which every value is compared
    /// with the one in floats, and what is clipped is counted; not those of the calibration
    #[arg(long, value_name = "FILE")]
    check_text: Option<PathBuf>,
    /// Most tokens of --check-text [default: 128]
    #[arg(long, value_name = "N", requires = "check_text")]
    check_tokens: Option<usize>,
    /// Also write the embedding table as a raw file for hosts
    #[arg(long)]
    embedding: bool,
    #[command(flatten)]
    step: StepArgs,
    /// Folder of the artifact to write
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Replace an existing artifact
    #[arg(long)]
    force: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum SchemeName {
    /// 8-bit weights, 16-bit activations
    W8a16,
    /// 4-bit weights, 16-bit activations
    W4a16,
    /// 8-bit weights and activations
    W8a8,
    /// 16-bit weights and activations
    W16a16,
    /// 4-bit weights and 8-bit ones where they are worth it, 16-bit activations
    Mixed,
}

impl SchemeName {
    fn scheme(self) -> Scheme {
        match self {
            Self::W8a16 => Scheme::W8A16,
            Self::W4a16 => Scheme::W4A16,
            Self::W8a8 => Scheme::W8A8,
            Self::W16a16 => Scheme::W16A16,
            Self::Mixed => Scheme::Mixed,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Kv {
    /// Signed 16-bit integers
    S16,
    /// Signed 8-bit integers
    S8,
    /// Unsigned 8-bit integers
    U8,
    /// Floats, half precision on the processor
    F16,
}

impl Kv {
    fn format(self) -> KvFormat {
        match self {
            Self::S16 => KvFormat::S16,
            Self::S8 => KvFormat::S8,
            Self::U8 => KvFormat::U8,
            Self::F16 => KvFormat::F16,
        }
    }
}

fn kept(text: &str) -> Result<(Pattern, WeightWidth), String> {
    let accepted =
        "a name with * and ?, =, and fp16, w16, w8 or w4 are accepted, such as *lm_head*=w8";
    let (glob, width) = text.rsplit_once('=').ok_or(accepted)?;
    let pattern = Pattern::new(glob).map_err(|error| format!("{error}; {accepted}"))?;
    let width = match width {
        "fp16" => WeightWidth::Float,
        "w16" => WeightWidth::Sixteen,
        "w8" => WeightWidth::Eight,
        "w4" => WeightWidth::Four,
        _ => return Err(format!("{width:?} is no width; {accepted}")),
    };
    Ok((pattern, width))
}

/// Tokens of --text and --check-text, unless said otherwise.
const TEXT_TOKENS: usize = 8192;
const CHECK_TOKENS: usize = 128;

/// In how many sequences there is one by which it is measured what each matrix costs, for mixed widths.
/// Weights are not rounded for it before that.
const ASIDE: usize = 8;

/// File of the report in the artifact.
const REPORT: &str = "report.json";

/// Values that the text report lists.
const WORST: usize = 8;

#[derive(Debug, Serialize)]
struct Report {
    scheme: String,
    kv: String,
    calibrated: bool,
    /// Texts that the ranges come from; none when they come from ids from nowhere.
    calibration_texts: Vec<String>,
    bits_per_weight: f64,
    /// Matrices by element type.
    matrices: BTreeMap<String, usize>,
    /// Tokens that weights were rounded for; 0 when they were rounded to nearest.
    rounding_tokens: usize,
    /// Matrices that have 8 bits because of --bits or --budget-db.
    raised: Vec<String>,
    /// Signal to noise of the output that the widths of --scheme mixed were expected to have, in dB,
    /// where they were chosen by it alone.
    predicted_db: Option<f64>,
    /// The one that the model has with them, all else in floats, over texts that were set aside; for
    /// --budget-db.
    measured_db: Option<f64>,
    /// Tokens that were compared; 0 without --check-text.
    compared_tokens: usize,
    /// Residual stream after each layer against that in floats, worst first.
    layers: Vec<ValueReport>,
    /// Every value that was compared, worst first.
    values: Vec<ValueReport>,
}

#[derive(Debug, Clone, Serialize)]
struct ValueReport {
    name: String,
    snr: Snr,
    /// Share of the numbers in floats that are clipped.
    clipped: f64,
    /// By how much the farthest of them is beyond the range of the integers, as a share of that.
    beyond: f64,
}

/// Numbers beyond the range of integers.
#[derive(Debug, Clone, Copy, Default)]
struct Clipping {
    numbers: u64,
    clipped: u64,
    beyond: f64,
}

impl Clipping {
    fn add(&mut self, numbers: &[f32], held: Option<[f32; 2]>) {
        self.numbers += numbers.len() as u64;
        let Some([low, high]) = held.map(|held| held.map(f64::from)) else { return };
        for number in numbers {
            let number = f64::from(*number);
            let beyond = (low - number).max(number - high);
            if beyond > 0.0 {
                self.clipped += 1;
                self.beyond = self.beyond.max(beyond / (high - low)).min(f64::MAX);
            }
        }
    }

    fn share(&self) -> f64 {
        self.clipped as f64 / self.numbers.max(1) as f64
    }
}

impl QuantizeGraph {
    /// What --keep says of a matrix.
    fn kept(&self, name: &str) -> Option<WeightWidth> {
        let mut fitting = self.keep.iter().rev().filter(|(glob, _)| fits(glob, name));
        fitting.next().map(|(_, width)| *width)
    }

    pub(crate) fn run(self, printer: &mut Printer) -> anyhow::Result<ExitCode> {
        let source = &source::open(&self.checkpoint, printer)?;
        let args = &self;
        let scheme = self.scheme.scheme();
        let ranges = match (&args.ranges, args.uncalibrated) {
            (Some(file), _) => Some(Ranges::read(file)?),
            (None, true) => None,
            (None, false) => bail!(
                "--scheme {scheme} needs the ranges of the activations: give --ranges, which \
                 `firesteel calibrate` writes; --uncalibrated makes them up, for measuring time only"
            ),
        };
        if let Model::Artifact(artifact) = source {
            can_quantize(artifact.manifest(), &args.step)?;
        }
        if let Some(ranges) = &ranges {
            same_model(ranges, source)?;
        }
        if let Some(text) = &args.check_text {
            self.held_out(text, ranges.as_ref())?;
        }
        let config = source.config()?;
        let rounded = self.round(scheme, ranges.as_ref(), source, printer)?;
        let (step, export) = self.step(source, rounded.model.as_deref(), printer)?;
        if let Some(ranges) = &ranges {
            if ranges.gelu != export.gelu {
                bail!("the ranges were learned with another form of --gelu; calibrate with that");
            }
            if ranges.sequence < export.context as u64 {
                printer.warn(&format!(
                    "a context of {} holds more than the ranges have seen, sequences of {}; \
                     calibrate with more --tokens",
                    export.context, ranges.sequence
                ));
            }
        }
        let width = |name: &str| {
            args.kept(name)
                .or_else(|| rounded.raised.contains(whole_name(name)).then_some(WeightWidth::Eight))
        };
        let options = SchemeOptions { scheme, kv: args.kv.map(Kv::format), width: &width };
        let kv = options.kv()?;
        let plan = plan(&step, &options)?;
        check_patterns(&args.keep, &plan)?;
        if let Some(folder) = &args.weights {
            let narrow = |width| matches!(width, WeightWidth::Four | WeightWidth::Eight);
            let absent = plan.iter().find(|matrix| {
                narrow(matrix.width) && !rounded.matrices.contains_key(whole_name(&matrix.name))
            });
            if let Some(matrix) = absent {
                bail!("{}: has no integers for {}", folder.display(), matrix.name);
            }
        }
        let known = match &ranges {
            Some(ranges) => RangeSource::Calibrated(ranges),
            None => RangeSource::Uncalibrated,
        };
        let rounding = |matrix: &MatrixPlan, values: &[f32], bits| {
            let whole = rounded.matrices.get(whole_name(&matrix.name));
            let part = matrix.graph.checked_sub(1).and_then(|head| step.heads.get(head));
            let rows = part.map_or(0..matrix.rows, |head| head.rows.clone());
            match whole.filter(|whole| whole.bits == bits).and_then(|whole| slice(whole, rows)) {
                Some(part) if part.columns == matrix.columns => return Ok(part),
                _ => {}
            }
            let (rows, columns) = (matrix.rows, matrix.columns);
            let met = ranges.as_ref().and_then(|known| known.importance(matrix));
            match met.filter(|met| met.len() == columns) {
                Some(met) => {
                    let error = OutputError::of_importance(met)?;
                    match &matrix.scores {
                        Some(scores) => round_for_scores(values, columns, bits, &error, scores),
                        None => round_for_output(values, rows, columns, bits, &error),
                    }
                }
                None => round_nearest(values, rows, columns, bits),
            }
        };
        let formats = (scheme.activations(), kv);
        let quantized = quantize(&step, &plan, known, formats, &rounding)?;
        let mut matrices = BTreeMap::new();
        for weight in &quantized.weights {
            *matrices.entry(weight.dtype.to_string()).or_insert(0) += 1;
        }
        // The bits are those of the whole model, of which a slice may have the larger part.
        let whole = export.layers == (0..config.num_layers()) && !args.step.no_lm_head;
        let beyond = |most: &f64| whole && quantized.bits_per_weight > most + 0.005;
        if let Some(most) = self.bits.filter(beyond) {
            let why = if args.keep.is_empty() { "the model" } else { "the model with its --keep" };
            bail!("--bits {most}: {why} takes {:.3} bits a weight", quantized.bits_per_weight);
        }
        let raised = rounded
            .raised
            .iter()
            .filter(|name| plan.iter().any(|matrix| whole_name(&matrix.name) == name.as_str()));
        let mut report = Report {
            scheme: scheme.to_string(),
            kv: kv.to_string(),
            calibrated: ranges.is_some(),
            calibration_texts: ranges
                .iter()
                .flat_map(|r| &r.texts)
                .map(|t| t.name.clone())
                .collect(),
            bits_per_weight: quantized.bits_per_weight,
            matrices,
            rounding_tokens: rounded.tokens,
            raised: raised.cloned().collect(),
            predicted_db: rounded.predicted_db,
            measured_db: rounded.measured_db,
            compared_tokens: 0,
            layers: Vec::new(),
            values: Vec::new(),
        };
        if let Some(text) = &args.check_text {
            self.compare(text, source, &step, &quantized, &mut report)?;
        }
        let ranges_sha256 = match &args.ranges {
            Some(file) => Some(sha256(&fs_err::read(file)?)),
            None => None,
        };
        let artifact =
            self.write(source, (&config, &export), &quantized, &report, ranges_sha256)?;
        if !report.calibrated {
            printer.warn("uncalibrated: the numbers are wrong, only times mean something");
        }
        match self.json {
            true => printer.json(&report)?,
            false => print(&report, &artifact, printer)?,
        }
        Ok(ExitCode::SUCCESS)
    }

    /// The model to quantize and its matrices, as far as a text says how to round them.
    fn round(
        &self,
        scheme: Scheme,
        ranges: Option<&Ranges>,
        source: &Model,
        printer: &mut Printer,
    ) -> anyhow::Result<Rounded> {
        let args = self;
        let budget = match (scheme, self.bits, args.budget_db) {
            (Scheme::Mixed, Some(bits), _) => Some(Budget::Bits(bits)),
            (Scheme::Mixed, None, Some(decibels)) => Some(Budget::Decibels(decibels)),
            (Scheme::Mixed, None, None) if args.weights.is_some() => None,
            (Scheme::Mixed, None, None) => bail!("--scheme mixed needs --bits or --budget-db"),
            (_, None, None) => None,
            _ => bail!("--bits and --budget-db go with --scheme mixed, not with {scheme}"),
        };
        let mut rounded = Rounded::default();
        let rounds = !args.text.is_empty() || args.spread.is_some();
        let Model::Checkpoint(checkpoint) = source else {
            if ranges.is_some_and(|ranges| !ranges.columns.is_empty()) {
                bail!("the ranges are of the checkpoint; calibrate the artifact, or quantize that");
            }
            if rounds || budget.is_some() || args.weights.is_some() {
                bail!(
                    "--text, --spread, --weights and --scheme mixed need the checkpoint, and this \
                     is an artifact"
                );
            }
            return Ok(rounded);
        };
        let model = Arc::new(match ranges {
            Some(ranges) => with_columns(checkpoint, &ranges.columns)?,
            None => equalized(checkpoint)?,
        });
        rounded.model = Some(Arc::clone(&model));
        if let Some(folder) = &args.weights {
            let artifact = Artifact::open(folder)?;
            (rounded.matrices, rounded.raised) = self
                .matrices_of(&artifact, scheme)
                .with_context(|| folder.display().to_string())?;
            return Ok(rounded);
        }
        if !rounds {
            if args.quick {
                bail!("--quick goes with --text or --spread");
            }
            if budget.is_some() {
                bail!("--scheme mixed needs --text, to learn which matrices make most noise");
            }
            if scheme.weights() == WeightWidth::Four {
                printer.warn("--text makes better weights of 4 bits than a search of scales");
            }
            return Ok(rounded);
        }
        let bits = match scheme.weights() {
            WeightWidth::Four => WeightBits::Four,
            WeightWidth::Eight => WeightBits::Eight,
            _ => bail!("--text rounds weights of 4 and 8 bits, and {scheme} has none"),
        };
        let texts = self.texts(source, checkpoint.config().vocab_size)?;
        let most = match (args.text_tokens, args.spread) {
            (Some(most), _) => most,
            (None, Some(_)) => usize::MAX,
            (None, None) => TEXT_TOKENS,
        };
        let measures = budget.is_some() && !args.quick;
        let tokens: usize = texts.iter().map(|ids| ids.len()).sum();
        let length = if measures { tokens.min(most).div_ceil(ASIDE) } else { SEQUENCE };
        let texts = sequences(&texts, length, checkpoint.config(), most);
        let (texts, aside) = if measures { set_aside(&texts) } else { (texts, Vec::new()) };
        let rounds_aside = matches!(budget, Some(Budget::Bits(_)));
        let counted = texts.iter().chain(aside.iter().filter(|_| rounds_aside));
        rounded.tokens = counted.map(|ids| ids.len()).sum();
        let bar = Progress::new("rounding");
        let mut done = 0;
        let mut progress = |_: &str| {
            done += 1;
            bar.set(done, done);
        };
        let Some(budget) = budget else {
            let layers = layer_range(&args.step.layers, checkpoint.config())?;
            let whole = layers == (0..checkpoint.config().num_layers());
            let head = whole && !args.step.no_lm_head;
            let options = LayerOptions { layers, head, follow: !args.quick };
            let width = |name: &str| match args.kept(name) {
                Some(WeightWidth::Four) => WeightBits::Four,
                Some(WeightWidth::Eight) => WeightBits::Eight,
                _ => bits,
            };
            rounded.matrices = round_layers(&model, &texts, &options, &width, &mut progress)?;
            return Ok(rounded);
        };
        let options = ModelOptions {
            widths: Widths::Mixed(match budget {
                Budget::Bits(bits) => Budget::Bits(without_small(bits, checkpoint)),
                Budget::Decibels(_) => budget,
            }),
            measured: &aside,
            follow: !args.quick,
        };
        let known = quantize_model(&model, &texts, &options, &mut progress);
        let known = known.with_context(|| match budget {
            Budget::Bits(bits) => format!("--bits {bits}, of which the gates take 16 for theirs"),
            Budget::Decibels(decibels) => format!("--budget-db {decibels}"),
        })?;
        rounded.predicted_db = known.expected;
        rounded.measured_db = known.measured;
        let raised = known.plan.widths.iter().filter(|(_, bits)| **bits == WeightBits::Eight);
        rounded.raised = raised.map(|(name, _)| name.clone()).collect();
        rounded.matrices = known.matrices;
        Ok(rounded)
    }

    /// What the weights are rounded for.
    fn texts(&self, source: &Model, vocabulary: usize) -> anyhow::Result<Vec<Vec<u32>>> {
        let args = self;
        if let Some(count) = args.spread {
            return Ok(vec![spread_ids(Spread::Calibration, count, vocabulary)?]);
        }
        let tokenizer = source.tokenizer()?;
        let tokenizer = tokenizer.context("--text needs the model's tokenizer; see --spread")?;
        calibration_texts(&args.text, source, &tokenizer)
    }

    /// The matrices of 4 and 8 bits of `artifact`, and those that have more than the scheme says.
    fn matrices_of(
        &self,
        artifact: &Artifact,
        scheme: Scheme,
    ) -> anyhow::Result<(BTreeMap<String, QuantizedMatrix>, BTreeSet<String>)> {
        let manifest = artifact.manifest();
        let ranges = match &self.ranges {
            Some(file) => Some(sha256(&fs_err::read(file)?)),
            None => None,
        };
        match &manifest.quantization {
            Some(known) if known.scheme == scheme.to_string() && known.ranges_sha256 == ranges => {}
            Some(known) => bail!(
                "is of scheme {} with {} ranges; what is taken over is of the same scheme and \
                 ranges",
                known.scheme,
                if known.ranges_sha256 == ranges { "the same" } else { "other" }
            ),
            None => bail!("is not quantized; --weights takes over integers"),
        }
        let [entry] = &manifest.graphs[..] else {
            bail!(
                "has {} graphs; one with its head in the step is taken over",
                manifest.graphs.len()
            )
        };
        artifact.verify()?;
        let graph = artifact.read_graph(entry)?;
        let (mut matrices, mut raised) = (BTreeMap::new(), BTreeSet::new());
        let own = scheme.weights().dtype();
        for (name, matrix) in stored_matrices(&graph)? {
            if scheme == Scheme::Mixed && matrix.bits == WeightBits::Eight && own != DType::I8 {
                raised.insert(name.clone());
            }
            matrices.insert(name, matrix);
        }
        Ok((matrices, raised))
    }

    /// The graphs in floats and the options that made them.
    fn step(
        &self,
        source: &Model,
        model: Option<&Checkpoint>,
        printer: &mut Printer,
    ) -> anyhow::Result<(StepGraphs, ExportOptions)> {
        let step = &self.step;
        let artifact = match source {
            Model::Checkpoint(checkpoint) => {
                let config = checkpoint.config();
                let options = step.options(config, Precision::Fp32, Dialect::Qnn, printer)?;
                return Ok((build(model.unwrap_or(checkpoint), &options)?, options));
            }
            Model::Artifact(artifact) => artifact,
            Model::Compiled(_) => bail!("it is compiled already; quantize its checkpoint"),
        };
        let manifest = artifact.manifest();
        artifact.verify()?;
        let mut graphs = manifest.graphs.iter();
        let first = graphs.next().context("the manifest names no graph")?;
        let mut heads = Vec::new();
        for entry in graphs {
            let GraphRole::Head { rows } = &entry.role else { bail!("{} is no head", entry.file) };
            heads.push(HeadGraph { graph: artifact.read_graph(entry)?, rows: rows.clone() });
        }
        let graphs = StepGraphs {
            spec: artifact.step_spec(false),
            graph: artifact.read_graph(first)?,
            heads,
            layer_hidden: first.layer_hidden.clone(),
            wide: manifest.wide.clone(),
            tensors_read: manifest.model.tensors_read,
        };
        let options = ExportOptions { precision: Precision::Fp32, ..manifest.options.clone() };
        Ok((graphs, options))
    }

    /// Refuses a text that the ranges or the weights were learned from.
    fn held_out(&self, text: &Path, ranges: Option<&Ranges>) -> anyhow::Result<()> {
        let hash = |file: &Path| anyhow::Ok(sha256(&fs_err::read(file)?));
        let own = hash(text)?;
        let mut known: Vec<String> = ranges
            .iter()
            .flat_map(|ranges| &ranges.texts)
            .map(|text| text.sha256.clone())
            .collect();
        for file in &self.text {
            known.push(hash(file)?);
        }
        if known.contains(&own) {
            bail!(
                "--check-text {}: the model was calibrated with this text; give one that it has not \
                 seen",
                text.display()
            );
        }
        Ok(())
    }

    /// Fills the report from a text.
    fn compare(
        &self,
        file: &Path,
        source: &Model,
        step: &StepGraphs,
        quantized: &Quantized,
        report: &mut Report,
    ) -> anyhow::Result<()> {
        let tokenizer = source.tokenizer()?.context("--check-text needs the model's tokenizer")?;
        let texts = text_ids(file, &[source], &tokenizer, AddedTokens::AsText)?;
        let most = self.check_tokens.unwrap_or(CHECK_TOKENS);
        let (tokens, mut left) = (step.spec.tokens, most);
        let mut parts = Vec::new();
        for ids in &texts {
            let steps = ids.len().min(left).min(step.spec.context) / tokens;
            parts.push(&ids[..steps * tokens]);
            left -= steps * tokens;
        }
        parts.retain(|part| !part.is_empty());
        report.compared_tokens = parts.iter().map(|part| part.len()).sum();
        if report.compared_tokens == 0 {
            bail!(
                "--check-text {}: a step takes {tokens} tokens, and there are not so many one after \
                 the other among the first {most}; give a longer text or more --check-tokens",
                file.display()
            );
        }
        let embedding = source.embedding()?.context(
            "--check-text needs the embedding table, which the artifact has not; quantize its \
             checkpoint",
        )?;
        let mut meters: BTreeMap<String, (SnrMeter, Clipping)> = BTreeMap::new();
        let pair = Pair { float: step, quantized };
        compare(pair, embedding.as_ref(), &parts, &mut |value| {
            let (meter, clipping) = meters.entry(value.name.to_owned()).or_default();
            meter.add(value.float, value.quantized);
            clipping.add(value.float, value.held);
        })?;
        let value = |(name, (meter, clipping)): (&String, &(SnrMeter, Clipping))| ValueReport {
            name: name.clone(),
            snr: meter.snr(),
            clipped: clipping.share(),
            beyond: clipping.beyond,
        };
        report.values = meters.iter().map(value).collect();
        report.values.sort_by(|a, b| a.snr.order().total_cmp(&b.snr.order()));
        let layers = report.values.iter().filter(|value| step.layer_hidden.contains(&value.name));
        report.layers = layers.cloned().collect();
        Ok(())
    }

    fn write(
        &self,
        source: &Model,
        (config, options): (&ModelConfig, &ExportOptions),
        quantized: &Quantized,
        report: &Report,
        ranges_sha256: Option<String>,
    ) -> anyhow::Result<Artifact> {
        let embedding = self.embedding;
        let graphs = &quantized.graphs;
        let mut draft = match source {
            Model::Checkpoint(checkpoint) => {
                // A host reads rows of it; half precision holds what a checkpoint of bf16 says.
                Draft::of_checkpoint(checkpoint, options, graphs, embedding.then_some(DType::F16))?
            }
            Model::Artifact(artifact) => Draft::of_artifact(artifact, config, graphs, embedding)?,
            Model::Compiled(_) => bail!("it is compiled already; quantize its checkpoint"),
        };
        draft.options = options.clone();
        // A tied head is a matrix of integers now, and no table of embeddings.
        if matches!(draft.embedding, Some(EmbeddingEntry::Initializer { .. })) {
            draft.embedding = None;
        }
        draft.quantization = Some(Quantization {
            scheme: report.scheme.clone(),
            kv: report.kv.clone(),
            calibrated: report.calibrated,
            calibration_texts: report.calibration_texts.clone(),
            ranges_sha256,
            ports: quantized.ports.clone(),
            weights: quantized.weights.clone(),
            bits_per_weight: quantized.bits_per_weight,
        });
        draft.side_files.push((REPORT.into(), serde_json::to_vec_pretty(report)?));
        let bar = Progress::new("writing");
        let how = Write { force: self.force, threads: threads() };
        let progress = |done, total| bar.set(done, total);
        write_artifact(&draft, &self.out, how, &progress).map_err(|error| {
            let exists = !self.force && self.out.exists();
            let hint = if exists { " (--force replaces an artifact)" } else { "" };
            anyhow::Error::from(error)
                .context(format!("{} was not written{hint}", self.out.display()))
        })
    }
}

/// What a text says of the weights.
#[derive(Default)]
struct Rounded {
    /// The model to quantize, where it is not the checkpoint as it is.
    model: Option<Arc<Checkpoint>>,
    /// Its matrices, by name; those that are not here are rounded to nearest.
    matrices: BTreeMap<String, QuantizedMatrix>,
    /// Matrices with 8 bits where the others have 4.
    raised: BTreeSet<String>,
    /// Tokens of the text.
    tokens: usize,
    /// Signal to noise of mixed widths in dB, as it was expected and as it is.
    predicted_db: Option<f64>,
    measured_db: Option<f64>,
}

/// The sequences that weights are rounded for, and those that are set aside.
fn set_aside<'a>(texts: &[&'a [u32]]) -> (Vec<&'a [u32]>, Vec<&'a [u32]>) {
    let (mut rounded, mut aside) = (Vec::new(), Vec::new());
    for (index, ids) in texts.iter().enumerate() {
        match index % ASIDE == ASIDE / 2 {
            true => aside.push(*ids),
            false => rounded.push(*ids),
        }
    }
    (rounded, aside)
}

/// The name of the matrix of which `name` may be a part in a graph of its own.
fn whole_name(name: &str) -> &str {
    match name.rsplit_once('.') {
        Some((whole, part)) if part.bytes().all(|byte| byte.is_ascii_digit()) => whole,
        _ => name,
    }
}

/// Rows of a matrix.
fn slice(matrix: &QuantizedMatrix, rows: Range<usize>) -> Option<QuantizedMatrix> {
    let codes = matrix.codes.get(rows.start * matrix.columns..rows.end * matrix.columns)?;
    let scales = matrix.scales.get(rows.clone())?;
    let (codes, scales) = (codes.to_vec(), scales.to_vec());
    Some(QuantizedMatrix { rows: rows.len(), codes, scales, ..*matrix })
}

/// The bits that are left for each weight of the other matrices when the small ones have 16.
fn without_small(bits: f64, checkpoint: &Checkpoint) -> f64 {
    let elements = |weight: &Weight| weight.element_count() as f64;
    let of_kind = |kind| checkpoint.layers().iter().flat_map(move |layer| layer.of_kind(kind));
    let small: f64 = of_kind(SlotKind::SmallMatrix).map(elements).sum();
    let others: f64 =
        of_kind(SlotKind::Matrix).chain([checkpoint.head_weight()]).map(elements).sum();
    // One scale each.
    let scales = 32.0 * of_kind(SlotKind::SmallMatrix).count() as f64;
    (bits * (small + others) - 16.0 * small - scales) / others.max(1.0)
}

/// Refuses artifacts that are no graphs in floats in the dialect of the integers.
fn can_quantize(manifest: &Manifest, step: &StepArgs) -> anyhow::Result<()> {
    let options = &manifest.options;
    let what = match &manifest.quantization {
        Some(known) => format!("quantized already ({})", known.scheme),
        None if options.dialect != Dialect::Qnn => format!("in the {} dialect", options.dialect),
        None if options.precision != Precision::Fp32 => "in half precision".to_owned(),
        None if *step != StepArgs::default() => {
            bail!("the step is that of the artifact; options of the step go with a checkpoint")
        }
        None => return Ok(()),
    };
    bail!(
        "the artifact is {what}; one in f32 in the qnn dialect is quantized (export --dialect \
         qnn), or a checkpoint"
    );
}

/// Refuses ranges of another model.
fn same_model(ranges: &Ranges, source: &Model) -> anyhow::Result<()> {
    let own = match source {
        Model::Checkpoint(checkpoint) => checkpoint_hashes(checkpoint),
        Model::Artifact(artifact) => artifact.manifest().model.checkpoint.clone(),
        Model::Compiled(_) => bail!("it is compiled already; quantize its checkpoint"),
    };
    if own != ranges.checkpoint {
        bail!("the ranges were learned from other weights; calibrate this checkpoint");
    }
    Ok(())
}

/// Whether a pattern is for a matrix. A head that is the embedding table has the name of a head too,
/// so that it does not matter whether its columns were sized, which parts the two.
fn fits(glob: &Pattern, name: &str) -> bool {
    let part = name.strip_prefix(whole_name(name)).unwrap_or_default();
    let head = Family::all().any(|family| whole_name(name) == family.embedding_name());
    glob.matches(name) || head && glob.matches(&format!("{}{part}", Checkpoint::HEAD))
}

/// Each --keep is there for something.
fn check_patterns(keep: &[(Pattern, WeightWidth)], plan: &[MatrixPlan]) -> anyhow::Result<()> {
    for (glob, _) in keep {
        if !plan.iter().any(|matrix| fits(glob, &matrix.name)) {
            let some: Vec<&str> = plan.iter().take(6).map(|matrix| &*matrix.name).collect();
            bail!("--keep {glob}: no matrix has such a name; some are {}", some.join(", "));
        }
    }
    Ok(())
}

fn print(report: &Report, artifact: &Artifact, printer: &mut Printer) -> anyhow::Result<()> {
    let bytes = artifact.manifest().data.iter().map(|data| data.bytes).sum();
    printer.line(format!(
        "wrote {}: {} with {} keys and values{}, {} of data, {:.2} bits a weight",
        artifact.folder().display(),
        report.scheme,
        report.kv,
        match (report.calibrated, report.calibration_texts.is_empty()) {
            (false, _) => ", UNCALIBRATED",
            (true, true) => ", calibrated on ids without a text",
            (true, false) => "",
        },
        mebibytes(bytes),
        report.bits_per_weight,
    ))?;
    let list = report.matrices.iter().map(|(dtype, count)| format!("{count} in {dtype}"));
    printer.line(format!("matrices: {}", list.collect::<Vec<_>>().join(", ")))?;
    if report.rounding_tokens > 0 {
        printer.line(format!("weights rounded for {} tokens", report.rounding_tokens))?;
    }
    for name in &report.raised {
        printer.line(format!("8 bits: {name}"))?;
    }
    let expected = report.predicted_db.map(|db| format!("{db:.1} dB expected"));
    let measured = report.measured_db.map(|db| format!("{db:.1} dB over texts set aside"));
    let known: Vec<String> = expected.into_iter().chain(measured).collect();
    if !known.is_empty() {
        let known = known.join(", ");
        printer.line(format!("output with these widths: {known}, all else in floats"))?;
    }
    if report.compared_tokens == 0 {
        return Ok(());
    }
    printer.line(format!("against floats over {} tokens", report.compared_tokens))?;
    let worst = report.values.iter().take(WORST);
    for (title, values) in
        [("layer", report.layers.iter().collect::<Vec<_>>()), ("worst values", worst.collect())]
    {
        let mut rows = vec![vec![title.to_owned(), "SNR".to_owned()]];
        rows.extend(
            values.into_iter().map(|value| {
                vec![value.name.clone(), crate::commands::check::decibels(&value.snr)]
            }),
        );
        table(&rows).iter().try_for_each(|line| printer.line(line))?;
    }
    let mut clipped: Vec<&ValueReport> =
        report.values.iter().filter(|value| value.clipped > 0.0).collect();
    if clipped.is_empty() {
        return Ok(());
    }
    clipped.sort_by(|a, b| b.beyond.total_cmp(&a.beyond));
    printer.line(format!(
        "{} of {} values are clipped somewhere; the farthest:",
        clipped.len(),
        report.values.len()
    ))?;
    let mut rows = vec![["value", "clipped", "beyond, of the range"].map(str::to_owned).to_vec()];
    rows.extend(clipped.iter().take(WORST).map(|value| {
        let percent = |share: f64| format!("{:.3} %", 100.0 * share);
        vec![value.name.clone(), percent(value.clipped), percent(value.beyond)]
    }));
    table(&rows).iter().try_for_each(|line| printer.line(line))?;
    Ok(())
}
