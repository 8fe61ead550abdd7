//! Rounds the matrices of a model in the order in which a text meets them, each for what the
//! matrices before it have become.

use super::model::{ModelOptions, groups, read};
use super::{Gram, OutputError, QuantizedMatrix, WeightBits, WeightError, round_for_output};
use firesteel_checkpoint::{Checkpoint, Weight};
use firesteel_engine::{Calibration, CheckpointEmbedding, EngineError};
use firesteel_step::Embedding;
use rayon::prelude::*;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// Share of the errors before a matrix that it makes up for: what it learns from a text about them
/// does not all hold for other texts.
const SHARE: f64 = 0.5;

/// The text on its way through the model: the residual stream `[T, H]` of the floats and of the
/// integers.
struct Streams {
    float: Vec<f32>,
    quantized: Vec<f32>,
}

/// The matrices of `model` with the widths that `widths` says, 4 bits where it says nothing.
///
/// Each is rounded for the inputs that it meets behind the integers, after a change by which its
/// output comes nearer to the one that it has behind the floats (Li et al., GPTAQ, 2025).
pub(super) fn follow(
    model: &Arc<Checkpoint>,
    ids: &[u32],
    options: &ModelOptions,
    widths: &HashMap<String, WeightBits>,
    progress: &mut dyn FnMut(&str),
) -> Result<BTreeMap<String, QuantizedMatrix>, WeightError> {
    let embedding = CheckpointEmbedding::new(Arc::clone(model));
    let mut float = vec![0.0; ids.len().saturating_mul(embedding.hidden_size())];
    embedding.lookup(ids, &mut float)?;
    let mut streams = Streams { quantized: float.clone(), float };
    let mut matrices = BTreeMap::new();
    let mut changed = Arc::clone(model);
    let groups = groups(model);
    let mut of_layers = groups.iter();
    for layer in 0..model.layers().len() {
        let stages: Vec<&Vec<&Weight>> = of_layers.by_ref().take(4).collect();
        let names: Vec<&str> =
            stages.iter().filter_map(|group| group.first()).map(|weight| weight.name()).collect();
        let (after, wanted) = inputs(model, layer, &streams.float, options.sequence, &names)?;
        for (stage, name) in stages.into_iter().zip(&names) {
            let (_, met) = inputs(&changed, layer, &streams.quantized, options.sequence, &[name])?;
            let (Some(wanted), Some(met)) = (wanted.get(*name), met.get(*name)) else { continue };
            changed = quantize(&changed, stage, [wanted, met], widths, &mut matrices)?;
            stage.iter().for_each(|weight| progress(weight.name()));
        }
        streams.quantized = inputs(&changed, layer, &streams.quantized, options.sequence, &[])?.0;
        streams.float = after;
    }
    if let Some(head) = of_layers.next() {
        let normed = |stream: &[f32]| normed(model, stream);
        let (wanted, met) = (normed(&streams.float)?, normed(&streams.quantized)?);
        quantize(&changed, head, [&wanted, &met], widths, &mut matrices)?;
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

/// Rounds the matrices of a stage into `matrices`; returns the model that has them.
fn quantize(
    model: &Checkpoint,
    stage: &[&Weight],
    [wanted, met]: [&[f32]; 2],
    widths: &HashMap<String, WeightBits>,
    matrices: &mut BTreeMap<String, QuantizedMatrix>,
) -> Result<Arc<Checkpoint>, WeightError> {
    let columns = stage.first().and_then(|weight| weight.shape().last()).copied();
    let columns = columns.unwrap_or_default();
    let mut gram = Gram::new(columns)?;
    gram.observe(met)?;
    let error = OutputError::of_gram(&gram)?;
    let lost = cross(wanted, met, columns);
    let mut changed = Vec::with_capacity(stage.len());
    for weight in stage {
        let (rows, _, mut values) = read(weight)?;
        values.par_chunks_mut(columns.max(1)).for_each(|row| {
            // What the row loses of the products of its output with the inputs.
            let mut change = vec![0f64; columns];
            for (weight, lost) in row.iter().zip(lost.chunks_exact(columns)) {
                for (change, lost) in change.iter_mut().zip(lost) {
                    *change += f64::from(*weight) * lost;
                }
            }
            error.solve(&mut change);
            for (weight, change) in row.iter_mut().zip(change) {
                *weight += (SHARE * change) as f32;
            }
        });
        let bits = widths.get(weight.name()).copied().unwrap_or(WeightBits::Four);
        let matrix = round_for_output(&values, rows, columns, bits, &error)?;
        changed.push(Weight::from_f32(weight.name(), vec![rows, columns], matrix.values())?);
        matrices.insert(weight.name().to_owned(), matrix);
    }
    Ok(Arc::new(model.with_weights(changed)?))
}

/// Σ (w − m)ᵀ m over the rows w of `wanted` and m of `met`, `[columns, columns]`.
fn cross(wanted: &[f32], met: &[f32], columns: usize) -> Vec<f64> {
    let mut sums = vec![0f64; columns * columns];
    sums.par_chunks_mut(columns.max(1)).enumerate().for_each(|(column, sums)| {
        for (wanted, met) in wanted.chunks_exact(columns).zip(met.chunks_exact(columns)) {
            let lost = f64::from(wanted[column]) - f64::from(met[column]);
            for (sum, met) in sums.iter_mut().zip(met) {
                *sum += lost * f64::from(*met);
            }
        }
    });
    sums
}
