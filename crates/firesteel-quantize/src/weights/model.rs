use super::{
    Budget, Choice, Gram, OutputError, Plan, QuantizedMatrix, WeightBits, WeightError, equalized,
    plan, round_for_output, round_nearest,
};
use firesteel_checkpoint::{Checkpoint, Weight};
use firesteel_engine::Calibration;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// How the weights of a model are quantized.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ModelOptions {
    /// Tokens of the sequences that the calibration text is cut into.
    pub sequence: usize,
    /// Which matrices get 8 bits.
    pub widths: Widths,
}

/// Which matrices get 8 bits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Widths {
    /// All have the same width.
    Same(WeightBits),
    /// Those that make most noise.
    Mixed(Budget),
}

/// A model's matrices as integers.
#[derive(Debug, Clone)]
pub struct QuantizedModel {
    /// The model in floats whose matrices they are: it computes what the original one does, but
    /// its weights are not the same.
    pub model: Arc<Checkpoint>,
    /// By the names in `model`: the matrices of all layers but the head-wise gates, and the head.
    pub matrices: BTreeMap<String, QuantizedMatrix>,
    /// Their widths, and the noise that is expected of them.
    pub plan: Plan,
}

impl QuantizedModel {
    /// The model with the values of the integers in f32. The embedding and the head-wise gates keep
    /// theirs.
    ///
    /// # Errors
    /// When the matrices are not those of the model.
    pub fn widened(&self) -> Result<Checkpoint, WeightError> {
        let mut weights = Vec::with_capacity(self.matrices.len());
        for (name, matrix) in &self.matrices {
            weights.push(Weight::from_f32(
                name,
                vec![matrix.rows, matrix.columns],
                matrix.values(),
            )?);
        }
        Ok(self.model.with_weights(weights)?)
    }
}

/// Quantizes the matrices of `checkpoint` for what they meet while it reads `ids`: columns are made
/// equally large by way of the norms ([`equalized`]), each matrix is rounded with the Gram matrix of
/// its inputs ([`round_for_output`]), and widths follow from the noise that the errors of the
/// matrices make ([`plan`]). The result is the same on any number of threads. `progress` is told
/// the name of each matrix that is done.
///
/// Takes memory for a Gram matrix of every kind of input in every layer.
///
/// # Errors
/// When the text cannot be run, a weight is not finite, or the budget cannot be met.
pub fn quantize_model(
    checkpoint: &Checkpoint,
    ids: &[u32],
    options: &ModelOptions,
    progress: &mut dyn FnMut(&str),
) -> Result<QuantizedModel, WeightError> {
    let model = Arc::new(equalized(checkpoint)?);
    let groups = groups(&model);
    let (grams, calibration) = grams(&model, &groups, ids, options.sequence)?;
    let effects = calibration.effects(&model);
    let mut matrices = BTreeMap::new();
    let mut choices = Vec::new();
    let first = match options.widths {
        Widths::Same(bits) => bits,
        Widths::Mixed(_) => WeightBits::Four,
    };
    for group in &groups {
        let Some((gram, error)) = measure(&grams, group)? else { continue };
        for weight in group {
            let (rows, columns, values) = read(weight)?;
            let effect = effects.get(weight.name()).copied().unwrap_or(1.0);
            let noise = |matrix: &QuantizedMatrix| {
                let error: Vec<f32> =
                    values.iter().zip(matrix.values()).map(|(a, b)| a - b).collect();
                let square = gram.output_square(&error).unwrap_or(f64::INFINITY);
                effect * square / gram.rows().max(1) as f64
            };
            let matrix = round_for_output(&values, rows, columns, first, &error)?;
            let eight = match first {
                WeightBits::Four => {
                    noise(&round_nearest(&values, rows, columns, WeightBits::Eight)?)
                }
                WeightBits::Eight => noise(&matrix),
            };
            choices.push(Choice {
                name: weight.name().to_owned(),
                rows,
                columns,
                noise: [noise(&matrix), eight],
            });
            matrices.insert(weight.name().to_owned(), matrix);
            progress(weight.name());
        }
    }
    let budget = match options.widths {
        Widths::Same(WeightBits::Four) => Budget::Decibels(f64::NEG_INFINITY),
        Widths::Same(WeightBits::Eight) => Budget::Bits(f64::INFINITY),
        Widths::Mixed(budget) => budget,
    };
    let plan = plan(&choices, budget)?;
    for group in &groups {
        let raised = |weight: &&&Weight| {
            let width = |bits: &WeightBits| *bits != first;
            plan.widths.get(weight.name()).is_some_and(width)
        };
        let raised: Vec<&&Weight> = group.iter().filter(raised).collect();
        if raised.is_empty() {
            continue;
        }
        let Some((_, error)) = measure(&grams, group)? else { continue };
        for weight in raised {
            let (rows, columns, values) = read(weight)?;
            let matrix = round_for_output(&values, rows, columns, WeightBits::Eight, &error)?;
            matrices.insert(weight.name().to_owned(), matrix);
            progress(weight.name());
        }
    }
    Ok(QuantizedModel { model, matrices, plan })
}

/// Matrices that are multiplied with the same inputs.
fn groups(model: &Checkpoint) -> Vec<Vec<&Weight>> {
    let mut groups = Vec::new();
    for layer in model.layers() {
        groups.push(vec![&layer.qkv]);
        groups.push(vec![&layer.attention_out]);
        groups.push(vec![&layer.mlp_gate, &layer.mlp_up]);
        groups.push(vec![&layer.mlp_down]);
    }
    groups.push(vec![model.head_weight()]);
    groups
}

/// A Gram matrix for each group, by the name of its first matrix.
fn grams(
    model: &Arc<Checkpoint>,
    groups: &[Vec<&Weight>],
    ids: &[u32],
    sequence: usize,
) -> Result<(HashMap<String, Gram>, Calibration), WeightError> {
    let mut grams = HashMap::new();
    for weight in groups.iter().filter_map(|group| group.first()) {
        let columns = weight.shape().last().copied().unwrap_or_default();
        grams.insert(weight.name().to_owned(), Gram::new(columns)?);
    }
    let mut failed = None;
    let mut narrow = Vec::new();
    let mut watch = |weight: &Weight, inputs: &[f64]| {
        if let Some(gram) = grams.get_mut(weight.name()) {
            narrow.clear();
            narrow.extend(inputs.iter().map(|value| *value as f32));
            if let Err(error) = gram.observe(&narrow) {
                failed.get_or_insert(error);
            }
        }
    };
    let calibration = Calibration::run_watched(model, ids, sequence, &mut watch, &mut |_| {})?;
    match failed {
        Some(error) => Err(error),
        None => Ok((grams, calibration)),
    }
}

/// The Gram matrix of a group and the measure made of it.
fn measure<'a>(
    grams: &'a HashMap<String, Gram>,
    group: &[&Weight],
) -> Result<Option<(&'a Gram, OutputError)>, WeightError> {
    let gram = group.first().and_then(|weight| grams.get(weight.name()));
    gram.map(|gram| Ok((gram, OutputError::of_gram(gram)?))).transpose()
}

/// Rows, columns and values of a matrix.
fn read(weight: &Weight) -> Result<(usize, usize, Vec<f32>), WeightError> {
    let mut values = vec![0.0; weight.element_count()];
    weight.read_f32(0, &mut values)?;
    let columns = weight.shape().last().copied().unwrap_or_default();
    Ok((values.len() / columns.max(1), columns, values))
}
