//! Rounds the matrices of a model in the order in which a text meets them, each for what the
//! matrices before it have become.

use super::model::read;
use super::scores::round_of_model;
use super::texts::{token_weights, weigh};
use super::{Gram, OutputError, QuantizedMatrix, WeightBits, WeightError};
use firesteel_checkpoint::{Checkpoint, Weight};
use firesteel_engine::{Calibration, CheckpointEmbedding, EngineError};
use firesteel_step::Embedding;
use ndarray::{Array2, Axis};
use rayon::prelude::*;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

/// Share of the errors before a matrix that it makes up for (1 in GPTAQ): what it learns from a text
/// about them does not all hold for other texts.
const COMPENSATED_SHARE: f64 = 0.5;

/// Rows of a matrix that are changed together.
const ROWS_TOGETHER: usize = 128;

/// The text on its way through the model: the residual stream `[T, H]` of the floats and of the
/// integers.
struct Streams {
    float: Vec<f32>,
    quantized: Vec<f32>,
}

/// Which matrices are rounded, and over what.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerOptions {
    /// Layers whose matrices are rounded. Those before them only read the text.
    pub layers: Range<usize>,
    /// Whether the head is rounded too, which needs all layers.
    pub head: bool,
    /// Whether each matrix is rounded for what the matrices before it have become, and makes up for
    /// a part of their errors. It takes a few times as long.
    pub follow: bool,
}

/// The matrices of some layers of `model` with the widths that `width` says by their names: each is
/// rounded with the Gram matrix of its inputs in `texts`, each of which begins with an empty cache.
/// To follow is to take the inputs that it meets behind the matrices before it, which are integers
/// already, and to change it first so that its output comes nearer to the one that it has behind the
/// floats (Li et al., GPTAQ, 2025). With the head, a token counts the more the less certain the model
/// is of its successor, because an error changes the more probabilities there. `progress` is told the
/// name of each matrix that is done.
///
/// Takes memory for one Gram matrix and the texts' residual stream.
///
/// # Errors
/// When the texts cannot be run, there are no such layers, or a weight is not finite.
pub fn round_layers(
    model: &Arc<Checkpoint>,
    texts: &[&[u32]],
    options: &LayerOptions,
    width: &dyn Fn(&str) -> WeightBits,
    progress: &mut dyn FnMut(&str),
) -> Result<BTreeMap<String, QuantizedMatrix>, WeightError> {
    let weights = options.head.then(|| token_weights(model, texts)).transpose()?;
    let texts = Texts { texts, weights: weights.as_deref() };
    let mut done = |weight: &Weight, _: &QuantizedMatrix, _: &Gram, _: &OutputError| {
        progress(weight.name());
        Ok(())
    };
    round(model, texts, options, &|name| Some(width(name)), &mut done)
}

/// What the matrices are rounded for: texts and how much each of their tokens counts.
#[derive(Clone, Copy)]
pub(super) struct Texts<'a> {
    pub(super) texts: &'a [&'a [u32]],
    /// All alike if there are none.
    pub(super) weights: Option<&'a [f32]>,
}

impl Texts<'_> {
    fn weigh(&self, inputs: &mut [f32]) {
        if let Some(weights) = self.weights {
            weigh(inputs, weights);
        }
    }
}

/// Told each matrix that is done, its integers, the Gram matrix of its inputs and the measure made of
/// that.
pub(super) type Done<'a> =
    dyn FnMut(&Weight, &QuantizedMatrix, &Gram, &OutputError) -> Result<(), WeightError> + 'a;

/// As [`round_layers`]; matrices without a width stay as they are.
pub(super) fn round(
    model: &Arc<Checkpoint>,
    texts: Texts<'_>,
    options: &LayerOptions,
    width: &dyn Fn(&str) -> Option<WeightBits>,
    done: &mut Done<'_>,
) -> Result<BTreeMap<String, QuantizedMatrix>, WeightError> {
    let ids = texts.texts.concat();
    if ids.is_empty() {
        return Err(EngineError::Calibration { reason: "the texts have no tokens".into() }.into());
    }
    let embedding = CheckpointEmbedding::new(Arc::clone(model));
    let mut float = vec![0.0; ids.len().saturating_mul(embedding.hidden_size())];
    embedding.lookup(&ids, &mut float)?;
    let mut streams = Streams { quantized: Vec::new(), float };
    let mut matrices = BTreeMap::new();
    let mut changed = Arc::clone(model);
    for layer in 0..options.layers.end {
        let weights = model.layers().get(layer).ok_or_else(|| EngineError::Calibration {
            reason: format!("the model has no layer {layer}"),
        })?;
        if layer < options.layers.start {
            streams.float = run_layer(model, layer, &streams.float, texts, &[])?.after;
            continue;
        }
        if layer == options.layers.start {
            streams.quantized = streams.float.clone();
        }
        let wide = |stage: &Vec<&Weight>| stage.iter().any(|weight| width(weight.name()).is_some());
        let stages: Vec<Vec<&Weight>> = weights.groups().into_iter().filter(wide).collect();
        let names: Vec<&str> =
            stages.iter().filter_map(|group| group.first()).map(|weight| weight.name()).collect();
        let float = run_layer(model, layer, &streams.float, texts, &names)?;
        for (stage, name) in stages.iter().zip(&names) {
            if !options.follow {
                if let Some(quantized) = float.inputs.get(*name) {
                    let inputs = StageInputs { float: None, quantized };
                    quantize(model, stage, inputs, width, &mut matrices, done)?;
                }
                continue;
            }
            let behind = run_layer(&changed, layer, &streams.quantized, texts, &[name])?;
            let both = (float.inputs.get(*name), behind.inputs.get(*name));
            let (Some(float), Some(quantized)) = both else { continue };
            let inputs = StageInputs { float: Some(float), quantized };
            changed = quantize(&changed, stage, inputs, width, &mut matrices, done)?;
        }
        if options.follow {
            let behind = run_layer(&changed, layer, &streams.quantized, texts, &[])?;
            streams.quantized = behind.after;
        }
        streams.float = float.after;
    }
    if options.head {
        let head = &[model.head_weight()];
        let float = normed(model, &streams.float, texts)?;
        match options.follow {
            false => {
                let inputs = StageInputs { float: None, quantized: &float };
                quantize(model, head, inputs, width, &mut matrices, done)?
            }
            true => {
                let quantized = normed(model, &streams.quantized, texts)?;
                let inputs = StageInputs { float: Some(&float), quantized: &quantized };
                quantize(&changed, head, inputs, width, &mut matrices, done)?
            }
        };
    }
    Ok(matrices)
}

/// A layer that was run over the texts.
struct LayerRun {
    /// The residual stream after it, `[T, H]`.
    after: Vec<f32>,
    /// What some of its matrices are multiplied with, weighed, `[T, K]`, by the name of the matrix.
    inputs: HashMap<String, Vec<f32>>,
}

/// What the matrices of a stage are multiplied with, `[T, K]`.
#[derive(Clone, Copy)]
struct StageInputs<'a> {
    /// Behind floats, where the difference is made up for.
    float: Option<&'a [f32]>,
    /// Behind what is rounded already.
    quantized: &'a [f32],
}

/// Runs a layer over the texts and watches the matrices `names`.
fn run_layer(
    model: &Arc<Checkpoint>,
    layer: usize,
    hidden: &[f32],
    texts: Texts<'_>,
    names: &[&str],
) -> Result<LayerRun, EngineError> {
    let mut inputs = HashMap::<String, Vec<f32>>::new();
    let mut watch = |weight: &Weight, rows: &[f64]| {
        if names.contains(&weight.name()) {
            let all = inputs.entry(weight.name().to_owned()).or_default();
            all.extend(rows.iter().map(|value| *value as f32));
        }
    };
    let lengths: Vec<usize> = texts.texts.iter().map(|text| text.len()).collect();
    let after = Calibration::run_layer(model, layer, hidden, &lengths, &mut watch)?;
    inputs.values_mut().for_each(|rows| texts.weigh(rows));
    Ok(LayerRun { after, inputs })
}

/// What the head meets, weighed.
fn normed(model: &Checkpoint, stream: &[f32], texts: Texts<'_>) -> Result<Vec<f32>, WeightError> {
    let mut gains = vec![0f32; model.final_norm().element_count()];
    model.final_norm().read_f32(0, &mut gains)?;
    let mut normed = Vec::with_capacity(stream.len());
    for row in stream.chunks(gains.len().max(1)) {
        let square = row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / row.len() as f64;
        let inverse = 1.0 / (square + model.config().rms_norm_eps).sqrt();
        let scaled = |(x, gain): (&f32, &f32)| (f64::from(*x) * inverse * f64::from(*gain)) as f32;
        normed.extend(row.iter().zip(&gains).map(scaled));
    }
    texts.weigh(&mut normed);
    Ok(normed)
}

/// Rounds the matrices of a stage for their inputs into `matrices`; returns the model that has them.
/// Where the inputs behind floats are known, they make up for a part of what is lost of them.
fn quantize(
    model: &Checkpoint,
    stage: &[&Weight],
    inputs: StageInputs<'_>,
    width: &dyn Fn(&str) -> Option<WeightBits>,
    matrices: &mut BTreeMap<String, QuantizedMatrix>,
    done: &mut Done<'_>,
) -> Result<Arc<Checkpoint>, WeightError> {
    let columns = stage.first().and_then(|weight| weight.shape().last()).copied();
    let columns = columns.unwrap_or_default();
    let mut gram = Gram::new(columns)?;
    gram.observe(inputs.quantized)?;
    let error = OutputError::of_gram(&gram)?;
    let lost = inputs.float.map(|float| cross(float, inputs.quantized, columns));
    let mut changed = Vec::with_capacity(stage.len());
    for weight in stage {
        let Some(bits) = width(weight.name()) else { continue };
        let (rows, _, mut values) = read(weight)?;
        if let Some(lost) = &lost {
            values.par_chunks_mut(ROWS_TOGETHER * columns.max(1)).for_each(|block| {
                // What the rows lose of the products of their outputs with the inputs.
                let shape = (block.len() / columns.max(1), columns);
                let weights = Array2::from_shape_fn(shape, |(row, column)| {
                    f64::from(block[row * columns + column])
                });
                let mut change = weights.dot(lost);
                error.solve(&mut change);
                for (weight, change) in block.iter_mut().zip(&change) {
                    *weight += (COMPENSATED_SHARE * change) as f32;
                }
            });
        }
        let matrix = round_of_model(model, weight.name(), &values, columns, bits, &error)?;
        changed.push(Weight::from_f32(weight.name(), vec![rows, columns], matrix.values())?);
        done(weight, &matrix, &gram, &error)?;
        matrices.insert(weight.name().to_owned(), matrix);
    }
    Ok(Arc::new(model.with_weights(changed)?))
}

/// Σ (f − q)ᵀ q over the rows f of `float` and q of `quantized`, `[columns, columns]`.
fn cross(float: &[f32], quantized: &[f32], columns: usize) -> Array2<f64> {
    let rows = quantized.len() / columns.max(1);
    let widened = |values: &[f32], first: usize, count: usize| {
        Array2::from_shape_fn((rows, count), |(row, column)| {
            values.get(row * columns + first + column).copied().map_or(0.0, f64::from)
        })
    };
    let all = widened(quantized, 0, columns);
    let mut sums = Array2::zeros((columns, columns));
    sums.axis_chunks_iter_mut(Axis(0), ROWS_TOGETHER).into_par_iter().enumerate().for_each(
        |(index, mut sums)| {
            let (first, count) = (index * ROWS_TOGETHER, sums.nrows());
            let lost = widened(float, first, count) - widened(quantized, first, count);
            sums.assign(&lost.t().dot(&all));
        },
    );
    sums
}
