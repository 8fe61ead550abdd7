use super::{SEQUENCE, Subject, request, sequences};
use crate::weights::{
    Budget, LayerOptions, ModelOptions, OutputError, QuantizedMatrix, WeightBits, WeightError,
    Widths, equalized, quantize_model, round_for_output, round_for_scores, round_layers,
    round_nearest, with_columns,
};
use crate::{
    GraphKv, MatrixName, MatrixPlan, Pair, QuantizeError, Quantized, RangeSource, Ranges, Scheme,
    SchemeOptions, WeightWidth, compare, plan, quantize, stored_matrices,
};
use firesteel_artifact::{
    Artifact, Draft, EmbeddingEntry, GraphRole, Manifest, Quantization, Write, write_artifact,
};
use firesteel_check::{Snr, SnrMeter};
use firesteel_checkpoint::{Checkpoint, ModelConfig, Progress, SlotKind, Weight};
use firesteel_export::{Dialect, ExportOptions, HeadGraph, Precision, StepGraphs, build};
use firesteel_step::{Embedding, Logits};
use firesteel_tensor::DType;
use glob::Pattern;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// The width of some matrices, where it is not to be the scheme's.
#[derive(Debug, Clone)]
pub struct Keep {
    /// Their names.
    pub pattern: Pattern,
    /// Their width.
    pub width: WeightWidth,
}

impl Keep {
    /// Whether it is for a matrix. A head that is the embedding table has the name of a head too, so
    /// that it does not matter whether its columns were sized, which parts the two.
    fn fits(&self, name: MatrixName<'_>) -> bool {
        let part = name.name.strip_prefix(name.weight).unwrap_or_default();
        self.pattern.matches(name.name)
            || name.head && self.pattern.matches(&format!("{}{part}", Checkpoint::HEAD))
    }
}

/// Where the integers of matrices come from.
#[derive(Debug, Clone, Copy)]
pub enum IntegerSource<'a> {
    /// Scales searched for what the ranges say that columns meet, or plain rounding without ranges.
    Scales,
    /// Rounded for what the model meets in texts.
    Texts {
        /// Token ids of the texts.
        ids: &'a [Vec<u32>],
        /// Most tokens of them; of more, some all over the texts are taken.
        tokens: usize,
        /// Whether each matrix is rounded by itself, and the noise of each estimated for mixed
        /// widths: for large models.
        quick: bool,
    },
    /// Taken over from a quantized artifact of the same model and ranges.
    Artifact(&'a Artifact),
}

/// A step's graph to be made of integers.
pub struct GraphRequest<'a> {
    /// What is quantized.
    pub subject: Subject<'a>,
    /// The step of a checkpoint; an artifact has its own.
    pub export: Option<ExportOptions>,
    /// Number formats.
    pub scheme: Scheme,
    /// Number format of keys and values; that of the scheme by default.
    pub kv: Option<GraphKv>,
    /// Other widths; the last that fits counts.
    pub keep: &'a [Keep],
    /// What the 8-bit matrices of mixed widths have to keep to.
    pub budget: Option<Budget>,
    /// Ranges of the values; without them they are made up and the numbers are wrong.
    pub ranges: Option<&'a Ranges>,
    /// SHA-256 of the file of the ranges, in hexadecimal.
    pub ranges_sha256: Option<&'a str>,
    /// Where the integers of matrices come from.
    pub weights: IntegerSource<'a>,
}

/// In how many sequences there is one by which it is measured what each matrix costs, for mixed
/// widths. Weights are not rounded for it before that.
const HELD_OUT_EVERY: usize = 8;

/// File of the report in the artifact.
const REPORT: &str = "report.json";

/// What was made, and what became of the values.
#[derive(Debug, Clone, Serialize)]
pub struct GraphReport {
    /// Number formats.
    pub scheme: String,
    /// That of keys and values.
    pub kv: String,
    /// Whether the ranges were learned.
    pub calibrated: bool,
    /// Texts that the ranges come from; none when they come from ids from nowhere.
    pub calibration_texts: Vec<String>,
    /// Bits of a weight in the mean, scales included.
    pub bits_per_weight: f64,
    /// Matrices by element type.
    pub matrices: BTreeMap<String, usize>,
    /// Tokens that weights were rounded for; 0 when they were rounded to nearest.
    pub rounding_tokens: usize,
    /// Matrices that have 8 bits because of the budget.
    pub raised: Vec<String>,
    /// Signal to noise of the output that mixed widths were expected to have, in dB, where they were
    /// chosen by it alone.
    pub predicted_db: Option<f64>,
    /// The one that the model has with them, all else in floats, over texts that were held out; for
    /// a budget of decibels.
    pub measured_db: Option<f64>,
    /// Tokens that were compared; 0 before [`QuantizedStep::compare`].
    pub compared_tokens: usize,
    /// Residual stream after each layer against that in floats, worst first.
    pub layers: Vec<ValueReport>,
    /// Every value that was compared, worst first.
    pub values: Vec<ValueReport>,
}

/// A value in integers against the one in floats.
#[derive(Debug, Clone, Serialize)]
pub struct ValueReport {
    /// Its name in the graph.
    pub name: String,
    /// How near it is.
    pub snr: Snr,
    /// Share of the numbers in floats that are clipped.
    pub clipped: f64,
    /// By how much the farthest of them is beyond the range of the integers, as a share of that.
    pub beyond: f64,
}

/// A step in integers, beside the one in floats.
#[derive(Debug)]
pub struct QuantizedStep<'a> {
    /// What was quantized.
    subject: Subject<'a>,
    config: &'a ModelConfig,
    /// The graphs in floats.
    pub float: StepGraphs,
    /// The options that made them.
    pub export: ExportOptions,
    /// The graphs in integers.
    pub quantized: Quantized,
    /// What is said of them.
    pub report: GraphReport,
    /// What is odd about the request.
    pub warnings: Vec<String>,
    ranges_sha256: Option<String>,
}

/// How a quantized step is written.
#[derive(Debug, Clone, Copy)]
pub struct GraphWrite {
    /// Whether the embedding table is written as a raw file for hosts.
    pub embedding: bool,
    /// Threads, and whether an artifact is replaced.
    pub how: Write,
}

/// Makes integers of a step: rounds the weights, spends the budget, and rewrites the graphs. `config`
/// is the model's, and `rounded` is told the matrices that were rounded.
///
/// # Errors
/// When parts of the request do not fit each other, the model or the ranges, a budget cannot be met, or
/// something cannot be read.
pub fn quantize_step<'a>(
    wanted: &GraphRequest<'a>,
    config: &'a ModelConfig,
    rounded: &mut dyn FnMut(u64),
) -> Result<QuantizedStep<'a>, QuantizeError> {
    let GraphRequest { subject, scheme, ranges, .. } = *wanted;
    if let Subject::Artifact(artifact) = subject {
        can_quantize(artifact.manifest(), wanted.export.is_some())?;
    }
    if ranges.is_some_and(|ranges| ranges.checkpoint != subject.hashes()) {
        return Err(request(
            "the ranges were learned from other weights; calibrate this checkpoint",
        ));
    }
    wanted.check()?;
    let model = wanted.model()?;
    let (float, export) = wanted.floats(model.as_deref())?;
    wanted.check_keep(&float)?;
    let known = wanted.rounded(config, model.as_ref(), rounded)?;
    let mut warnings = Vec::new();
    if let Some(ranges) = ranges {
        if ranges.gelu != export.gelu {
            return Err(request(
                "the ranges were learned with another form of --gelu; calibrate with that",
            ));
        }
        if ranges.sequence < export.context as u64 {
            warnings.push(format!(
                "a context of {} holds more than the ranges have seen, sequences of {}; calibrate \
                 with more --tokens",
                export.context, ranges.sequence
            ));
        }
    }
    let width = |name: MatrixName<'_>| {
        wanted
            .kept(name)
            .or_else(|| known.raised.contains(name.weight).then_some(WeightWidth::Eight))
    };
    let options = SchemeOptions { scheme, kv: wanted.kv, width: &width };
    let formats = options.formats()?;
    let plan = plan(&float, &options)?;
    if let IntegerSource::Artifact(artifact) = wanted.weights {
        let narrow = |width| matches!(width, WeightWidth::Four | WeightWidth::Eight);
        let absent = plan
            .iter()
            .find(|matrix| narrow(matrix.width) && !known.matrices.contains_key(&matrix.weight));
        if let Some(matrix) = absent {
            let folder = artifact.folder().display();
            return Err(request(format!("{folder}: has no integers for {}", matrix.name)));
        }
    }
    let rounding = |matrix: &MatrixPlan, values: &[f32], bits| {
        let whole = known.matrices.get(&matrix.weight);
        let part = matrix.graph.checked_sub(1).and_then(|head| float.heads.get(head));
        let rows = part.map_or(0..matrix.rows, |head| head.rows.clone());
        match whole.filter(|whole| whole.bits == bits).and_then(|whole| slice(whole, rows)) {
            Some(part) if part.columns == matrix.columns => Ok(part),
            _ => round_alone(matrix, values, bits, ranges),
        }
    };
    let source = ranges.map_or(RangeSource::Uncalibrated, RangeSource::Calibrated);
    let quantized = quantize(&float, &plan, source, formats, &rounding)?;
    // The bits are those of the whole model, of which a slice may have the larger part.
    let whole = export.layers == (0..config.num_layers()) && export.logits != Logits::Hidden;
    if let Some(Budget::Bits(most)) = wanted.budget
        && whole
        && quantized.bits_per_weight > most + 0.005
    {
        let why = if wanted.keep.is_empty() { "the model" } else { "the model with its --keep" };
        let bits = quantized.bits_per_weight;
        return Err(request(format!("--bits {most}: {why} takes {bits:.3} bits a weight")));
    }
    let mut matrices = BTreeMap::new();
    for weight in &quantized.weights {
        *matrices.entry(weight.dtype.to_string()).or_insert(0) += 1;
    }
    let there = |name: &&String| plan.iter().any(|matrix| matrix.weight == **name);
    let texts = ranges.iter().flat_map(|ranges| &ranges.texts);
    let report = GraphReport {
        scheme: scheme.to_string(),
        kv: formats.kv.to_string(),
        calibrated: ranges.is_some(),
        calibration_texts: texts.map(|text| text.name.clone()).collect(),
        bits_per_weight: quantized.bits_per_weight,
        matrices,
        rounding_tokens: known.tokens,
        raised: known.raised.iter().filter(there).cloned().collect(),
        predicted_db: known.predicted_db,
        measured_db: known.measured_db,
        compared_tokens: 0,
        layers: Vec::new(),
        values: Vec::new(),
    };
    let ranges_sha256 = wanted.ranges_sha256.map(str::to_owned);
    let made = QuantizedStep {
        subject,
        config,
        float,
        export,
        quantized,
        report,
        warnings,
        ranges_sha256,
    };
    Ok(made)
}

/// Rounds a matrix of which nothing is known but the ranges.
fn round_alone(
    matrix: &MatrixPlan,
    values: &[f32],
    bits: WeightBits,
    ranges: Option<&Ranges>,
) -> Result<QuantizedMatrix, WeightError> {
    let (rows, columns) = (matrix.rows, matrix.columns);
    let met = ranges.and_then(|known| known.importance(matrix));
    let Some(met) = met.filter(|met| met.len() == columns) else {
        return round_nearest(values, rows, columns, bits);
    };
    let error = OutputError::of_importance(met)?;
    match &matrix.scores {
        Some(scores) => round_for_scores(values, columns, bits, &error, scores),
        None => round_for_output(values, rows, columns, bits, &error),
    }
}

impl GraphRequest<'_> {
    /// What --keep says of a matrix.
    fn kept(&self, name: MatrixName<'_>) -> Option<WeightWidth> {
        self.keep.iter().rev().find(|keep| keep.fits(name)).map(|keep| keep.width)
    }

    /// Each --keep is there for something.
    fn check_keep(&self, step: &StepGraphs) -> Result<(), QuantizeError> {
        let options = SchemeOptions { scheme: self.scheme, kv: self.kv, width: &|_| None };
        let plan = plan(step, &options)?;
        for keep in self.keep {
            if !plan.iter().any(|matrix| keep.fits(matrix.matrix_name())) {
                let some: Vec<&str> = plan.iter().take(6).map(|matrix| &*matrix.name).collect();
                return Err(QuantizeError::Option {
                    option: "--keep",
                    value: keep.pattern.to_string(),
                    problem: format!("no matrix has such a name; some are {}", some.join(", ")),
                });
            }
        }
        Ok(())
    }

    /// Refuses what does not fit together.
    fn check(&self) -> Result<(), QuantizeError> {
        let Self { scheme, ranges, budget, weights, .. } = *self;
        match (scheme, budget) {
            (Scheme::Mixed, None) if !matches!(weights, IntegerSource::Artifact(_)) => {
                return Err(request("--scheme mixed needs --bits or --budget-db"));
            }
            (Scheme::Mixed, _) | (_, None) => {}
            _ => {
                return Err(request(format!(
                    "--bits and --budget-db go with --scheme mixed, not with {scheme}"
                )));
            }
        }
        match (self.subject, weights) {
            (Subject::Artifact(_), _) if ranges.is_some_and(|known| !known.columns.is_empty()) => {
                Err(request(
                    "the ranges are of the checkpoint; calibrate the artifact, or quantize that",
                ))
            }
            (Subject::Artifact(_), IntegerSource::Scales) if budget.is_none() => Ok(()),
            (Subject::Artifact(_), _) => Err(request(
                "--text, --spread, --weights and --scheme mixed need the checkpoint, and this is \
                 an artifact",
            )),
            (Subject::Checkpoint(_), IntegerSource::Scales) if budget.is_some() => {
                Err(request("--scheme mixed needs --text, to learn which matrices make most noise"))
            }
            (Subject::Checkpoint(_), _) => Ok(()),
        }
    }

    /// The model with sized columns; `None` for an artifact, whose weights are as they are.
    fn model(&self) -> Result<Option<Arc<Checkpoint>>, QuantizeError> {
        let Subject::Checkpoint(checkpoint) = self.subject else { return Ok(None) };
        Ok(Some(Arc::new(match self.ranges {
            Some(ranges) => with_columns(checkpoint, &ranges.columns)?,
            None => equalized(checkpoint)?,
        })))
    }

    /// The matrices of `model`, as far as texts or an artifact say how to round them.
    fn rounded(
        &self,
        config: &ModelConfig,
        model: Option<&Arc<Checkpoint>>,
        rounded: &mut dyn FnMut(u64),
    ) -> Result<Rounded, QuantizeError> {
        let Self { scheme, budget, weights, .. } = *self;
        let mut known = Rounded::default();
        let Some(model) = model else { return Ok(known) };
        let (ids, most, quick) = match weights {
            IntegerSource::Scales => return Ok(known),
            IntegerSource::Artifact(artifact) => {
                self.take_over(artifact, &mut known)?;
                return Ok(known);
            }
            IntegerSource::Texts { ids, tokens, quick } => (ids, tokens, quick),
        };
        let bits = match scheme.weights() {
            WeightWidth::Four => WeightBits::Four,
            WeightWidth::Eight => WeightBits::Eight,
            _ => {
                return Err(request(format!(
                    "--text rounds weights of 4 and 8 bits, and {scheme} has none"
                )));
            }
        };
        let measures = budget.is_some() && !quick;
        let tokens: usize = ids.iter().map(|ids| ids.len()).sum();
        let length = if measures { tokens.min(most).div_ceil(HELD_OUT_EVERY) } else { SEQUENCE };
        let texts = sequences(ids, length, config, most);
        let split =
            if measures { held_out(&texts) } else { Split { rounded: texts, held: vec![] } };
        let rounds_held = matches!(budget, Some(Budget::Bits(_)));
        let counted = split.rounded.iter().chain(split.held.iter().filter(|_| rounds_held));
        known.tokens = counted.map(|ids| ids.len()).sum();
        let mut done = 0;
        let mut progress = |_: &str| {
            done += 1;
            rounded(done);
        };
        let Some(budget) = budget else {
            let layers = self.export.as_ref().map_or(0..config.num_layers(), |e| e.layers.clone());
            let last = self.export.as_ref().is_none_or(|e| e.logits != Logits::Hidden);
            let head = layers == (0..config.num_layers()) && last;
            let options = LayerOptions { layers, head, follow: !quick };
            let head = model.head_weight().name();
            let width =
                |name: &str| match self.kept(MatrixName { name, weight: name, head: name == head })
                {
                    Some(WeightWidth::Four) => WeightBits::Four,
                    Some(WeightWidth::Eight) => WeightBits::Eight,
                    _ => bits,
                };
            known.matrices = round_layers(model, &split.rounded, &options, &width, &mut progress)?;
            return Ok(known);
        };
        let options = ModelOptions {
            widths: Widths::Mixed(match budget {
                Budget::Bits(bits) => Budget::Bits(without_small(bits, model)),
                Budget::Decibels(_) => budget,
            }),
            measured: &split.held,
            follow: !quick,
        };
        let made = quantize_model(model, &split.rounded, &options, &mut progress);
        let made = made.map_err(|source| QuantizeError::Weight {
            name: match budget {
                Budget::Bits(bits) => {
                    format!("--bits {bits}, of which the gates take 16 for theirs")
                }
                Budget::Decibels(decibels) => format!("--budget-db {decibels}"),
            },
            source: Box::new(source),
        })?;
        known.predicted_db = made.expected;
        known.measured_db = made.measured;
        let raised = made.plan.widths.iter().filter(|(_, bits)| **bits == WeightBits::Eight);
        known.raised = raised.map(|(name, _)| name.clone()).collect();
        known.matrices = made.matrices;
        Ok(known)
    }

    /// Takes over the matrices of 4 and 8 bits of `artifact`, and which have more than the scheme says.
    fn take_over(&self, artifact: &Artifact, known: &mut Rounded) -> Result<(), QuantizeError> {
        let folder = artifact.folder().display();
        let (manifest, scheme) = (artifact.manifest(), self.scheme);
        let same_ranges =
            |known: &Quantization| known.ranges_sha256.as_deref() == self.ranges_sha256;
        match &manifest.quantization {
            Some(other) if other.scheme == scheme.to_string() && same_ranges(other) => {}
            Some(other) => {
                return Err(request(format!(
                    "{folder}: is of scheme {} with {} ranges; what is taken over is of the same \
                     scheme and ranges",
                    other.scheme,
                    if same_ranges(other) { "the same" } else { "other" }
                )));
            }
            None => {
                return Err(request(format!(
                    "{folder}: is not quantized; --weights takes over integers"
                )));
            }
        }
        let [entry] = &manifest.graphs[..] else {
            return Err(request(format!(
                "{folder}: has {} graphs; one with its head in the step is taken over",
                manifest.graphs.len()
            )));
        };
        artifact.verify()?;
        let own = scheme.weights().dtype();
        for (name, matrix) in stored_matrices(&artifact.read_graph(entry)?)? {
            if scheme == Scheme::Mixed && matrix.bits == WeightBits::Eight && own != DType::I8 {
                known.raised.insert(name.clone());
            }
            known.matrices.insert(name, matrix);
        }
        Ok(())
    }

    /// The graphs in floats and the options that made them.
    fn floats(
        &self,
        model: Option<&Checkpoint>,
    ) -> Result<(StepGraphs, ExportOptions), QuantizeError> {
        let artifact = match (self.subject, &self.export) {
            (Subject::Checkpoint(checkpoint), Some(export)) => {
                let graphs = build(model.unwrap_or(checkpoint), export)?;
                return Ok((graphs, export.clone()));
            }
            (Subject::Checkpoint(_), None) => {
                return Err(request("a checkpoint needs the options of a step"));
            }
            (Subject::Artifact(artifact), _) => artifact,
        };
        let manifest = artifact.manifest();
        artifact.verify()?;
        let Some((first, parts)) = manifest.graphs.split_first() else {
            return Err(request("the manifest names no graph"));
        };
        let mut heads = Vec::new();
        for entry in parts {
            let GraphRole::Head { rows } = &entry.role else {
                return Err(request(format!("{} is no head", entry.file)));
            };
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
}

impl QuantizedStep<'_> {
    /// Compares every value with the one in floats on at most `tokens` tokens of `texts`, as far as
    /// the context goes, and fills the report.
    ///
    /// # Errors
    /// When no text is as long as a step, or a graph cannot be run.
    pub fn compare(
        &mut self,
        embedding: &dyn Embedding,
        texts: &[Vec<u32>],
        tokens: usize,
    ) -> Result<(), QuantizeError> {
        let (step, mut left) = (self.float.spec.tokens, tokens);
        let mut parts = Vec::new();
        for ids in texts {
            let steps = ids.len().min(left).min(self.float.spec.context) / step;
            parts.push(&ids[..steps * step]);
            left -= steps * step;
        }
        parts.retain(|part| !part.is_empty());
        if parts.is_empty() {
            return Err(request(format!(
                "a step takes {step} tokens, and there are not so many one after the other among \
                 the first {tokens}; give a longer text or more --check-tokens"
            )));
        }
        let mut meters: BTreeMap<String, (SnrMeter, Clipping)> = BTreeMap::new();
        let pair = Pair { float: &self.float, quantized: &self.quantized };
        compare(pair, embedding, &parts, &mut |value| {
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
        let report = &mut self.report;
        report.compared_tokens = parts.iter().map(|part| part.len()).sum();
        report.values = meters.iter().map(value).collect();
        report.values.sort_by(|a, b| a.snr.order().total_cmp(&b.snr.order()));
        let of_layer = |value: &&ValueReport| self.float.layer_hidden.contains(&value.name);
        report.layers = report.values.iter().filter(of_layer).cloned().collect();
        Ok(())
    }

    /// Writes an artifact with the report in it. `progress` is told the bytes.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(
        &self,
        folder: &Path,
        write: GraphWrite,
        progress: Progress<'_>,
    ) -> Result<Artifact, QuantizeError> {
        let (graphs, report) = (&self.quantized.graphs, &self.report);
        let mut draft = match self.subject {
            Subject::Checkpoint(checkpoint) => {
                // A host reads rows of it; half precision holds what a checkpoint of bf16 says.
                let embedding = write.embedding.then_some(DType::F16);
                Draft::of_checkpoint(checkpoint, &self.export, graphs, embedding)?
            }
            Subject::Artifact(artifact) => {
                Draft::of_artifact(artifact, self.config, graphs, write.embedding)?
            }
        };
        draft.options = self.export.clone();
        // A tied head is a matrix of integers now, and no table of embeddings.
        if matches!(draft.embedding, Some(EmbeddingEntry::Initializer { .. })) {
            draft.embedding = None;
        }
        draft.quantization = Some(Quantization {
            scheme: report.scheme.clone(),
            kv: report.kv.clone(),
            calibrated: report.calibrated,
            calibration_texts: report.calibration_texts.clone(),
            ranges_sha256: self.ranges_sha256.clone(),
            ports: self.quantized.ports.clone(),
            weights: self.quantized.weights.clone(),
            bits_per_weight: self.quantized.bits_per_weight,
        });
        let text = serde_json::to_vec_pretty(report).map_err(std::io::Error::other)?;
        draft.side_files.push((REPORT.into(), text));
        Ok(write_artifact(&draft, folder, write.how, progress)?)
    }
}

/// What texts or an artifact say of the weights.
#[derive(Default)]
struct Rounded {
    /// The matrices, by name; those that are not here are rounded by themselves.
    matrices: BTreeMap<String, QuantizedMatrix>,
    /// Matrices with 8 bits where the others have 4.
    raised: BTreeSet<String>,
    /// Tokens of the texts.
    tokens: usize,
    /// Signal to noise of mixed widths in dB, as it was expected and as it is.
    predicted_db: Option<f64>,
    measured_db: Option<f64>,
}

/// A held-out split.
struct Split<'a> {
    /// Sequences that weights are rounded for.
    rounded: Vec<&'a [u32]>,
    /// Those by which it is measured what matrices cost.
    held: Vec<&'a [u32]>,
}

fn held_out<'a>(texts: &[&'a [u32]]) -> Split<'a> {
    let mut split = Split { rounded: Vec::new(), held: Vec::new() };
    for (index, ids) in texts.iter().enumerate() {
        match index % HELD_OUT_EVERY == HELD_OUT_EVERY / 2 {
            true => split.held.push(ids),
            false => split.rounded.push(ids),
        }
    }
    split
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
fn can_quantize(manifest: &Manifest, has_step: bool) -> Result<(), QuantizeError> {
    let options = &manifest.options;
    let what = match &manifest.quantization {
        Some(known) => format!("quantized already ({})", known.scheme),
        None if options.dialect != Dialect::Qnn => format!("in the {} dialect", options.dialect),
        None if options.precision != Precision::Fp32 => "in half precision".to_owned(),
        None if has_step => {
            return Err(request(
                "the step is that of the artifact; options of the step go with a checkpoint",
            ));
        }
        None => return Ok(()),
    };
    Err(request(format!(
        "the artifact is {what}; one in f32 in the qnn dialect is quantized (export --dialect \
         qnn), or a checkpoint"
    )))
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
