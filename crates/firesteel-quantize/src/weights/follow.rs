//! Rounds the matrices of a model in the order in which a text meets them, each for what the
//! matrices before it have become.

use super::model::{groups, read};
use super::scores::round_of_model;
use super::{Gram, OutputError, QuantizedMatrix, WeightBits, WeightError};
use firesteel_checkpoint::{Checkpoint, Weight};
use firesteel_engine::{Calibration, CheckpointEmbedding, EngineError};
use firesteel_step::Embedding;
use ndarray::{Array2, Axis};
use rayon::prelude::*;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

/// Share of the errors before a matrix that it makes up for: what it learns from a text about them
/// does not all hold for other texts.
const SHARE: f64 = 0.5;

/// Rows of a matrix that are changed together.
const TOGETHER: usize = 128;

/// Groups of matrices of a layer that have the same inputs.
const STAGES: usize = 4;

/// The text on its way through the model: the residual stream `[T, H]` of the floats and of the
/// integers.
struct Streams {
    float: Vec<f32>,
    quantized: Vec<f32>,
}

/// Which matrices are rounded, and over what.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerOptions {
    /// Tokens of the sequences that the calibration text is cut into.
    pub sequence: usize,
    /// Layers whose matrices are rounded. Those before them only read the text.
    pub layers: Range<usize>,
    /// Whether the head is rounded too, which needs all layers.
    pub head: bool,
    /// Whether each matrix is rounded for what the matrices before it have become, and makes up for
    /// a part of their errors. It takes a few times as long.
    pub follow: bool,
}

/// The matrices of some layers of `model` with the widths that `width` says by their names: each is
/// rounded with the Gram matrix of its inputs. To follow is to take the inputs that it meets behind
/// the matrices before it, which are integers already, and to change it first so that its output
/// comes nearer to the one that it has behind the floats (Li et al., GPTAQ, 2025). `progress` is
/// told the name of each matrix that is done.
///
/// Takes memory for one Gram matrix and the text's residual stream.
///
/// # Errors
/// When the text cannot be run, there are no such layers, or a weight is not finite.
pub fn round_layers(
    model: &Arc<Checkpoint>,
    ids: &[u32],
    options: &LayerOptions,
    width: &dyn Fn(&str) -> WeightBits,
    progress: &mut dyn FnMut(&str),
) -> Result<BTreeMap<String, QuantizedMatrix>, WeightError> {
    if ids.is_empty() {
        return Err(EngineError::Calibration { reason: "the text has no tokens".into() }.into());
    }
    let embedding = CheckpointEmbedding::new(Arc::clone(model));
    let mut float = vec![0.0; ids.len().saturating_mul(embedding.hidden_size())];
    embedding.lookup(ids, &mut float)?;
    let mut streams = Streams { quantized: Vec::new(), float };
    let mut matrices = BTreeMap::new();
    let mut changed = Arc::clone(model);
    let groups = groups(model);
    let mut of_layers = groups.iter();
    for layer in 0..options.layers.end {
        let stages: Vec<&Vec<&Weight>> = of_layers.by_ref().take(STAGES).collect();
        if layer < options.layers.start {
            streams.float = inputs(model, layer, &streams.float, options.sequence, &[])?.0;
            continue;
        }
        if layer == options.layers.start {
            streams.quantized = streams.float.clone();
        }
        let names: Vec<&str> =
            stages.iter().filter_map(|group| group.first()).map(|weight| weight.name()).collect();
        let (after, wanted) = inputs(model, layer, &streams.float, options.sequence, &names)?;
        for (stage, name) in stages.into_iter().zip(&names) {
            if !options.follow {
                if let Some(met) = wanted.get(*name) {
                    quantize(model, stage, (None, met), width, &mut matrices)?;
                    stage.iter().for_each(|weight| progress(weight.name()));
                }
                continue;
            }
            let (_, met) = inputs(&changed, layer, &streams.quantized, options.sequence, &[name])?;
            let (Some(wanted), Some(met)) = (wanted.get(*name), met.get(*name)) else { continue };
            changed = quantize(&changed, stage, (Some(wanted), met), width, &mut matrices)?;
            stage.iter().for_each(|weight| progress(weight.name()));
        }
        if options.follow {
            streams.quantized =
                inputs(&changed, layer, &streams.quantized, options.sequence, &[])?.0;
        }
        streams.float = after;
    }
    if let Some(head) = of_layers.next().filter(|_| options.head) {
        let wanted = normed(model, &streams.float)?;
        match options.follow {
            false => quantize(model, head, (None, &wanted), width, &mut matrices)?,
            true => {
                let met = normed(model, &streams.quantized)?;
                quantize(&changed, head, (Some(&wanted), &met), width, &mut matrices)?
            }
        };
        head.iter().for_each(|weight| progress(weight.name()));
    }
    Ok(matrices)
}

/// What the matrices `names` are multiplied with, `[T, K]`.
type Met = HashMap<String, Vec<f32>>;

/// The residual stream after a layer, and what some of its matrices meet.
fn inputs(
    model: &Arc<Checkpoint>,
    layer: usize,
    hidden: &[f32],
    sequence: usize,
    names: &[&str],
) -> Result<(Vec<f32>, Met), EngineError> {
    let mut met = Met::new();
    let mut watch = |weight: &Weight, inputs: &[f64]| {
        if names.contains(&weight.name()) {
            let all = met.entry(weight.name().to_owned()).or_default();
            all.extend(inputs.iter().map(|value| *value as f32));
        }
    };
    let after = Calibration::run_layer(model, layer, hidden, sequence, &mut watch)?;
    Ok((after, met))
}

/// What the head meets.
fn normed(model: &Checkpoint, stream: &[f32]) -> Result<Vec<f32>, WeightError> {
    let mut gains = vec![0f32; model.final_norm().element_count()];
    model.final_norm().read_f32(0, &mut gains)?;
    let mut normed = Vec::with_capacity(stream.len());
    for row in stream.chunks(gains.len().max(1)) {
        let square = row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / row.len() as f64;
        let inverse = 1.0 / (square + model.config().rms_norm_eps).sqrt();
        let scaled = |(x, gain): (&f32, &f32)| (f64::from(*x) * inverse * f64::from(*gain)) as f32;
        normed.extend(row.iter().zip(&gains).map(scaled));
    }
    Ok(normed)
}

/// Rounds the matrices of a stage, which meet `met`, into `matrices`; returns the model that has
/// them. Where it is known, they make up for what is lost of the inputs `wanted`.
fn quantize(
    model: &Checkpoint,
    stage: &[&Weight],
    (wanted, met): (Option<&[f32]>, &[f32]),
    width: &dyn Fn(&str) -> WeightBits,
    matrices: &mut BTreeMap<String, QuantizedMatrix>,
) -> Result<Arc<Checkpoint>, WeightError> {
    let columns = stage.first().and_then(|weight| weight.shape().last()).copied();
    let columns = columns.unwrap_or_default();
    let mut gram = Gram::new(columns)?;
    gram.observe(met)?;
    let error = OutputError::of_gram(&gram)?;
    let lost = wanted.map(|wanted| cross(wanted, met, columns));
    let mut changed = Vec::with_capacity(stage.len());
    for weight in stage {
        let (rows, _, mut values) = read(weight)?;
        if let Some(lost) = &lost {
            values.par_chunks_mut(TOGETHER * columns.max(1)).for_each(|block| {
                // What the rows lose of the products of their outputs with the inputs.
                let shape = (block.len() / columns.max(1), columns);
                let weights = Array2::from_shape_fn(shape, |(row, column)| {
                    f64::from(block[row * columns + column])
                });
                let mut change = weights.dot(lost);
                error.solve(&mut change);
                for (weight, change) in block.iter_mut().zip(&change) {
                    *weight += (SHARE * change) as f32;
                }
            });
        }
        let bits = width(weight.name());
        let matrix = round_of_model(model, weight.name(), &values, columns, bits, &error)?;
        changed.push(Weight::from_f32(weight.name(), vec![rows, columns], matrix.values())?);
        matrices.insert(weight.name().to_owned(), matrix);
    }
    Ok(Arc::new(model.with_weights(changed)?))
}

/// Σ (w − m)ᵀ m over the rows w of `wanted` and m of `met`, `[columns, columns]`.
fn cross(wanted: &[f32], met: &[f32], columns: usize) -> Array2<f64> {
    let rows = met.len() / columns.max(1);
    let widened = |values: &[f32], first: usize, count: usize| {
        Array2::from_shape_fn((rows, count), |(row, column)| {
            values.get(row * columns + first + column).copied().map_or(0.0, f64::from)
        })
    };
    let all = widened(met, 0, columns);
    let mut sums = Array2::zeros((columns, columns));
    sums.axis_chunks_iter_mut(Axis(0), TOGETHER).into_par_iter().enumerate().for_each(
        |(index, mut sums)| {
            let (first, count) = (index * TOGETHER, sums.nrows());
            let lost = widened(wanted, first, count) - widened(met, first, count);
            sums.assign(&lost.t().dot(&all));
        },
    );
    sums
}
