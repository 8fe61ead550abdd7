use super::{Subject, request};
use crate::weights::{ColumnSizes, Importance, column_sizes, with_columns};
use crate::{Calibrator, Method, QuantizeError, Ranges, TensorRange, TextHash};
use firesteel_checkpoint::{Checkpoint, ModelConfig};
use firesteel_export::{Dialect, ExportOptions, Gelu, Precision, build};
use firesteel_step::{CacheLayoutChoice, Embedding, Logits, StepSpec};
use serde::Serialize;
use std::collections::BTreeSet;
use std::ops::Range;

/// Ranges to be learned.
pub struct CalibrateRequest<'a> {
    /// What they are of.
    pub subject: Subject<'a>,
    /// The model's config.
    pub config: &'a ModelConfig,
    /// Its embedding table.
    pub embedding: &'a dyn Embedding,
    /// Token ids of the texts.
    pub texts: &'a [Vec<u32>],
    /// Which texts they are; none for ids from nowhere.
    pub hashes: Vec<TextHash>,
    /// Most sequences; of more, some all over the texts are taken.
    pub samples: usize,
    /// Most tokens of a sequence, see [`sequence_length`].
    pub tokens: Option<usize>,
    /// Entries of a full-attention layer's cache; those of the longest sequence by default.
    pub context: Option<usize>,
    /// Layers of a checkpoint, from 0 on.
    pub layers: Range<usize>,
    /// Form of the activation of a checkpoint's graph.
    pub gelu: Gelu,
    /// Whether columns stay as they are and are rounded to nearest, for comparisons.
    pub plain: bool,
    /// How ranges are chosen.
    pub method: Method,
}

/// What was learned.
#[derive(Debug)]
pub struct LearnedRanges {
    /// The ranges.
    pub ranges: Ranges,
    /// Sequences that were run.
    pub sequences: usize,
    /// Whether one was longer than the sliding window.
    pub past_window: bool,
    /// Names of the values that norms square.
    squared: BTreeSet<String>,
}

/// A value that half precision cannot hold, or that a norm squares and whose squares it cannot add
/// where the norm is decomposed.
#[derive(Debug, Clone, Serialize)]
pub struct Overflow {
    /// Its name.
    pub name: String,
    /// Largest magnitude.
    pub magnitude: f64,
    /// Largest sum of the squares of a row.
    pub row_square: f64,
}

/// A value with a channel far above the others.
#[derive(Debug, Clone, Serialize)]
pub struct Outlier {
    /// Its name.
    pub name: String,
    /// The channel.
    pub channel: u64,
    /// Its largest magnitude.
    pub magnitude: f64,
    /// The median of those of all channels.
    pub median_channel: f64,
}

/// Tokens of a step.
const CHUNK: usize = 64;
/// Least tokens of a sequence, unless said otherwise.
const SEQUENCE: usize = 256;
/// Largest number of half precision.
const HALF_LIMIT: f64 = 65504.0;
/// How far above the median a channel must be to be listed.
const OUTLIER: f64 = 10.0;
/// Sequences, and tokens of each, from which the sizes of columns are learned.
const SIZED: usize = 8;
const SIZED_TOKENS: usize = 128;

/// Tokens of a sequence, and of the steps that it is run in.
struct Lengths {
    sequence: usize,
    step: usize,
}

fn lengths(
    subject: Subject<'_>,
    config: &ModelConfig,
    tokens: Option<usize>,
) -> Result<Lengths, QuantizeError> {
    let twice = config.sliding_window.map_or(0, |window| window.saturating_mul(2));
    let wanted = tokens.unwrap_or(twice.max(SEQUENCE)).min(config.max_position_embeddings);
    if wanted == 0 {
        return Err(request("--tokens and --samples: 1 or more is accepted"));
    }
    match subject {
        Subject::Checkpoint(_) => Ok(Lengths { sequence: wanted, step: CHUNK.min(wanted) }),
        Subject::Artifact(artifact) => {
            let spec = &artifact.manifest().step;
            let whole = wanted.min(spec.context) / spec.tokens * spec.tokens;
            Ok(Lengths { sequence: whole.max(spec.tokens), step: spec.tokens })
        }
    }
}

/// Tokens of a sequence of which at most `tokens` are wanted: by default twice the sliding window, at
/// least 256; no more than the model or the artifact's context takes.
///
/// # Errors
/// When none are wanted.
pub fn sequence_length(
    subject: Subject<'_>,
    config: &ModelConfig,
    tokens: Option<usize>,
) -> Result<usize, QuantizeError> {
    lengths(subject, config, tokens).map(|lengths| lengths.sequence)
}

/// Learns the ranges of a step's values: sizes the columns of a checkpoint's matrices for what they
/// meet in a part of the texts, then runs the graph over all of them. `progress` is told the tokens
/// that were run and how many there are. `warn` is told what is odd before that takes its
/// time.
///
/// # Errors
/// When the request does not fit the model, the texts have no tokens, or a step cannot be run.
pub fn calibrate(
    wanted: &CalibrateRequest<'_>,
    warn: &mut dyn FnMut(&str),
    progress: &mut dyn FnMut(u64, u64),
) -> Result<LearnedRanges, QuantizeError> {
    if wanted.samples == 0 {
        return Err(request("--tokens and --samples: 1 or more is accepted"));
    }
    if let Subject::Artifact(artifact) = wanted.subject {
        let manifest = artifact.manifest();
        let (dialect, graphs) = (manifest.options.dialect, manifest.graphs.len());
        if dialect != Dialect::Qnn || graphs > 1 {
            return Err(request(format!(
                "the artifact is in the {dialect} dialect with {graphs} graphs; one in the qnn \
                 dialect with one graph is calibrated, or its checkpoint"
            )));
        }
        if manifest.quantization.is_some() || manifest.step.first_layer > 0 {
            return Err(request(
                "the artifact is quantized or a later slice; calibrate its checkpoint",
            ));
        }
    }
    let lengths = lengths(wanted.subject, wanted.config, wanted.tokens)?;
    let sequences = chosen(wanted, &lengths);
    let longest = sequences.iter().map(|ids| ids.len()).max().unwrap_or(0);
    if longest == 0 {
        return Err(request("the texts have no tokens"));
    }
    let past_window = wanted.config.sliding_window.is_none_or(|window| longest > window);
    if !past_window {
        warn("no sequence is longer than the sliding window; give more --tokens");
    }
    let context = wanted.context.unwrap_or(longest);
    if context < longest {
        return Err(request(format!("--context {context}: sequences have up to {longest} tokens")));
    }
    let make = |model: Option<&Checkpoint>, tokens: usize| match wanted.subject {
        Subject::Checkpoint(checkpoint) => {
            let whole = wanted.layers.end == checkpoint.config().num_layers();
            let options = ExportOptions {
                tokens,
                context,
                layers: wanted.layers.clone(),
                cache_layout: CacheLayoutChoice::default(),
                logits: if whole { Logits::All } else { Logits::Hidden },
                gelu: wanted.gelu,
                precision: Precision::Fp32,
                dialect: Dialect::Qnn,
                head_shards: 1,
            };
            let built = build(model.unwrap_or(checkpoint), &options)?;
            Ok((built.graph, built.spec))
        }
        Subject::Artifact(artifact) => {
            let entry = artifact.manifest().graphs.first();
            let entry = entry.ok_or_else(|| request("the manifest names no graph"))?;
            let spec: StepSpec = artifact.step_spec(false);
            Ok((artifact.read_graph(entry)?, spec))
        }
    };
    let gelu = match wanted.subject {
        Subject::Artifact(artifact) => artifact.manifest().options.gelu,
        Subject::Checkpoint(_) => wanted.gelu,
    };
    let (mut columns, mut model) = (ColumnSizes::new(), None);
    if let (Subject::Checkpoint(checkpoint), false) = (wanted.subject, wanted.plain) {
        let make = |tokens| make(None, tokens);
        let mut calibrator = Calibrator::new(&make, wanted.embedding, lengths.step);
        for ids in parts_of(&sequences) {
            calibrator.run(ids, &mut |_| ())?;
        }
        columns = column_sizes(checkpoint, &calibrator.importance())?;
        model = Some(with_columns(checkpoint, &columns)?);
    }
    let make = |tokens| make(model.as_ref(), tokens);
    let total = sequences.iter().map(|ids| ids.len() as u64).sum();
    let mut calibrator = Calibrator::new(&make, wanted.embedding, lengths.step);
    for ids in &sequences {
        calibrator.run(ids, &mut |done| progress(done, total))?;
    }
    let ranges = Ranges {
        tool_version: env!("CARGO_PKG_VERSION").into(),
        checkpoint: wanted.subject.hashes(),
        columns,
        importance: if wanted.plain { Importance::new() } else { calibrator.importance() },
        texts: wanted.hashes.clone(),
        gelu,
        tokens: calibrator.tokens(),
        sequence: longest as u64,
        observer: wanted.method,
        tensors: calibrator.ranges(wanted.method)?,
    };
    let squared = calibrator.squared().clone();
    Ok(LearnedRanges { ranges, sequences: sequences.len(), past_window, squared })
}

/// The sequences that are run, spread evenly, so that every text has its share.
fn chosen<'a>(wanted: &CalibrateRequest<'a>, lengths: &Lengths) -> Vec<&'a [u32]> {
    let chunks = |ids: &'a Vec<u32>| ids.chunks(lengths.sequence);
    let all: Vec<&[u32]> = wanted.texts.iter().flat_map(chunks).collect();
    let (count, samples) = (all.len(), wanted.samples.min(all.len()));
    let chosen = (0..samples).map(|index| index as u128 * count as u128 / samples.max(1) as u128);
    let chosen = chosen.filter_map(|index| all.get(usize::try_from(index).ok()?).copied());
    let whole = |ids: &'a [u32]| match wanted.subject {
        Subject::Checkpoint(_) => ids,
        // An artifact runs whole steps.
        Subject::Artifact(_) => &ids[..ids.len() / lengths.step * lengths.step],
    };
    chosen.map(whole).filter(|ids| !ids.is_empty()).collect()
}

/// A few tokens of sequences all over the texts: enough to see how large channels are.
fn parts_of<'a>(sequences: &[&'a [u32]]) -> Vec<&'a [u32]> {
    let every = sequences.len().div_ceil(SIZED).max(1);
    let chosen = sequences.iter().step_by(every);
    chosen.map(|ids| ids.get(..SIZED_TOKENS).unwrap_or(ids)).collect()
}

fn magnitude(range: &TensorRange) -> f64 {
    range.max.max(-range.min)
}

impl LearnedRanges {
    /// The values that half precision cannot hold, the largest first.
    pub fn overflow(&self) -> Vec<Overflow> {
        let beyond = self.ranges.tensors.iter().filter(|(name, range)| {
            let squares = self.squared.contains(*name) && range.largest_row_square > HALF_LIMIT;
            magnitude(range) > HALF_LIMIT || squares
        });
        let entry = |(name, range): (&String, &TensorRange)| Overflow {
            name: name.clone(),
            magnitude: magnitude(range),
            row_square: range.largest_row_square,
        };
        let mut list: Vec<Overflow> = beyond.map(entry).collect();
        list.sort_by(|a, b| b.row_square.total_cmp(&a.row_square));
        list
    }

    /// The values with a channel ten times the median or more, the farthest first.
    pub fn outliers(&self) -> Vec<Outlier> {
        let entry = |(name, range): (&String, &TensorRange)| {
            let peak = range.channels.first()?;
            Some(Outlier {
                name: name.clone(),
                channel: peak.channel,
                magnitude: peak.magnitude,
                median_channel: range.median_channel,
            })
        };
        let mut list: Vec<Outlier> = self
            .ranges
            .tensors
            .iter()
            .filter_map(entry)
            .filter(|outlier| outlier.magnitude > OUTLIER * outlier.median_channel)
            .collect();
        let ratio = |outlier: &Outlier| outlier.magnitude / outlier.median_channel.max(1e-30);
        list.sort_by(|a, b| ratio(b).total_cmp(&ratio(a)));
        list
    }
}
