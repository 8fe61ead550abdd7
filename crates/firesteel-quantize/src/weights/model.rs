use super::follow::{LayerOptions, round_layers};
use super::scores::round_of_model;
use super::{
    Budget, Choice, Gram, OutputError, Plan, QuantizedMatrix, ScoreRows, WeightBits, WeightError,
    plan, round_for_output, round_nearest,
};
use firesteel_checkpoint::{Checkpoint, Weight};
use firesteel_engine::{Calibration, CpuModel, CpuOptions, KvFormat, PackedCache, SequenceOptions};
use firesteel_step::{Decoder, Wanted};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// How the weights of a model are quantized.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ModelOptions {
    /// Tokens of the sequences that the calibration text is cut into.
    pub sequence: usize,
    /// Which matrices get 8 bits.
    pub widths: Widths,
    /// Tokens of the text by which the noise of each matrix is measured for mixed widths: the model
    /// reads them once for each matrix, and is in memory as f32. With 0 the noise is estimated from
    /// the error of the matrix's output, which is quick, but does not know how an error spreads.
    pub measured_tokens: usize,
    /// Whether each matrix is rounded for what the matrices before it have become, and makes up for
    /// a part of their errors. The text is read six times as often.
    pub follow: bool,
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
    /// Signal to noise of the logits in dB that they have, for a budget of decibels with
    /// [`ModelOptions::measured_tokens`].
    pub measured: Option<f64>,
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

/// Quantizes the matrices of `model` for what they meet while it reads `ids`: each is rounded with
/// the Gram matrix of its inputs ([`round_for_output`], and
/// [`round_for_scores`](super::round_for_scores) for queries and keys), and widths follow from the
/// noise that the errors of the matrices make ([`plan`]). A budget of decibels is measured with all
/// widths together, and more matrices are raised until it holds. Columns that are equally large come
/// out best, see [`with_columns`](super::with_columns). The result is the same on any number of threads.
/// `progress` is told the name of each matrix that is done.
///
/// Takes memory for a Gram matrix of every kind of input in every layer.
///
/// # Errors
/// When the text cannot be run, a weight is not finite, or the budget cannot be met.
pub fn quantize_model(
    model: &Arc<Checkpoint>,
    ids: &[u32],
    options: &ModelOptions,
    progress: &mut dyn FnMut(&str),
) -> Result<QuantizedModel, WeightError> {
    let groups = groups(model);
    let (grams, calibration) = grams(model, &groups, ids, options.sequence)?;
    let effects = calibration.effects(model);
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
            let matrix = round_of_model(model, weight.name(), &values, columns, first, &error)?;
            // Scores that are near leave outputs that are not so near.
            let by_rows = ScoreRows::of(model, weight.name())
                .map(|_| round_for_output(&values, rows, columns, first, &error))
                .transpose()?;
            let of_first = noise(by_rows.as_ref().unwrap_or(&matrix));
            let eight = match first {
                WeightBits::Four => {
                    noise(&round_nearest(&values, rows, columns, WeightBits::Eight)?)
                }
                WeightBits::Eight => of_first,
            };
            choices.push(Choice {
                name: weight.name().to_owned(),
                rows,
                columns,
                noise: [of_first, eight],
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
    if let Widths::Mixed(_) = options.widths
        && options.measured_tokens > 0
    {
        let ids = ids.get(..options.measured_tokens).unwrap_or(ids);
        measure_noise(model, &matrices, ids, options.sequence, &mut choices)?;
    }
    let mut found = plan(&choices, budget)?;
    // Noises that are measured one by one add up only nearly.
    let asked = match options.widths {
        Widths::Mixed(Budget::Decibels(decibels)) if options.measured_tokens > 0 => Some(decibels),
        _ => None,
    };
    let mut eights = BTreeMap::new();
    loop {
        let matrices = match options.follow {
            true => followed(model, ids, options, &found, progress)?,
            false => {
                raise(model, &grams, &groups, &found, first, &mut eights, progress)?;
                let eight = |name: &String| found.widths.get(name) == Some(&WeightBits::Eight);
                let matrix = |(name, matrix): (&String, &QuantizedMatrix)| {
                    let raised = eights.get(name).filter(|_| eight(name)).unwrap_or(matrix);
                    (name.clone(), raised.clone())
                };
                matrices.iter().map(matrix).collect()
            }
        };
        let mut result =
            QuantizedModel { model: Arc::clone(model), matrices, plan: found, measured: None };
        let Some(asked) = asked else { return Ok(result) };
        let ids = ids.get(..options.measured_tokens).unwrap_or(ids);
        let reached = decibels(model, &result.widened()?, ids, options.sequence)?;
        result.measured = Some(reached);
        if reached >= asked {
            return Ok(result);
        }
        if result.plan.widths.values().all(|bits| *bits == WeightBits::Eight) {
            let extreme = "8 bits everywhere";
            return Err(WeightError::Budget { asked: format!("{asked} dB"), extreme, reached });
        }
        let goal = Budget::Decibels(result.plan.decibels.max(asked) + (asked - reached).max(0.1));
        found = match plan(&choices, goal) {
            Ok(more) if more.bits > result.plan.bits => more,
            _ => plan(&choices, Budget::Bits(f64::INFINITY))?,
        };
    }
}

/// Rounds all matrices, each behind those before it.
fn followed(
    model: &Arc<Checkpoint>,
    ids: &[u32],
    options: &ModelOptions,
    plan: &Plan,
    progress: &mut dyn FnMut(&str),
) -> Result<BTreeMap<String, QuantizedMatrix>, WeightError> {
    let layers = LayerOptions {
        sequence: options.sequence,
        layers: 0..model.layers().len(),
        head: true,
        follow: true,
    };
    let width = |name: &str| plan.widths.get(name).copied().unwrap_or(WeightBits::Four);
    round_layers(model, ids, &layers, &width, progress)
}

/// Rounds those matrices to 8 bits that have them by `plan`, where the others have `first`, and that
/// are not among the `eights` yet.
fn raise(
    model: &Checkpoint,
    grams: &HashMap<String, Gram>,
    groups: &[Vec<&Weight>],
    plan: &Plan,
    first: WeightBits,
    eights: &mut BTreeMap<String, QuantizedMatrix>,
    progress: &mut dyn FnMut(&str),
) -> Result<(), WeightError> {
    for group in groups {
        let wanted = |weight: &&&Weight| {
            let width = plan.widths.get(weight.name()).copied().unwrap_or(first);
            width != first && !eights.contains_key(weight.name())
        };
        let raised: Vec<&&Weight> = group.iter().filter(wanted).collect();
        if raised.is_empty() {
            continue;
        }
        let Some((_, error)) = measure(grams, group)? else { continue };
        for weight in raised {
            let (_, columns, values) = read(weight)?;
            let (name, bits) = (weight.name(), WeightBits::Eight);
            let matrix = round_of_model(model, name, &values, columns, bits, &error)?;
            eights.insert(weight.name().to_owned(), matrix);
            progress(weight.name());
        }
    }
    Ok(())
}

/// Signal to noise of the logits of `test` over `ids` against those of `model`, in dB.
fn decibels(
    model: &Checkpoint,
    test: &Checkpoint,
    ids: &[u32],
    sequence: usize,
) -> Result<f64, WeightError> {
    let (reference, test) = (logits(model, ids, sequence)?, logits(test, ids, sequence)?);
    let (mut signal, mut noise) = (0.0, 0.0);
    for (a, b) in reference.iter().zip(&test) {
        signal += f64::from(*a).powi(2);
        noise += (f64::from(*a) - f64::from(*b)).powi(2);
    }
    Ok(10.0 * (signal / noise).log10())
}

/// Replaces the estimated noise of each choice by what its matrix of 4 bits alone does to the
/// model's logits over `ids`. That of 8 bits changes in the same proportion.
fn measure_noise(
    model: &Checkpoint,
    matrices: &BTreeMap<String, QuantizedMatrix>,
    ids: &[u32],
    sequence: usize,
    choices: &mut [Choice],
) -> Result<(), WeightError> {
    let mut floats = Vec::new();
    for weight in groups(model).into_iter().flatten() {
        let (_, _, values) = read(weight)?;
        floats.push(Weight::from_f32(weight.name(), weight.shape().to_vec(), values)?);
    }
    let floats = model.with_weights(floats)?;
    let reference = logits(&floats, ids, sequence)?;
    let square =
        |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>();
    let signal = square(&mut reference.iter().copied().map(f64::from));
    for choice in choices {
        let Some(matrix) = matrices.get(&choice.name) else { continue };
        let shape = vec![matrix.rows, matrix.columns];
        let changed = Weight::from_f32(&choice.name, shape, matrix.values())?;
        let test = logits(&floats.with_weights(vec![changed])?, ids, sequence)?;
        let pairs = reference.iter().zip(&test);
        let lost = square(&mut pairs.map(|(a, b)| f64::from(*a) - f64::from(*b)));
        let measured = lost / signal;
        let [four, eight] = choice.noise;
        if measured.is_finite() {
            let ratio = if four > 0.0 { (eight / four).min(1.0) } else { 1.0 };
            choice.noise = [measured, measured * ratio];
        }
    }
    Ok(())
}

/// The logits of every token of `ids`, on the kernels in f32.
fn logits(model: &Checkpoint, ids: &[u32], sequence: usize) -> Result<Vec<f32>, WeightError> {
    let options = CpuOptions { packed: PackedCache::Disabled, ..CpuOptions::default() };
    let model = CpuModel::with_options(Arc::new(model.with_weights(Vec::new())?), &options)?;
    let context = sequence.min(ids.len()).max(1);
    let mut decoder = model.sequence(SequenceOptions { context, kv: KvFormat::F32 })?;
    let (mut all, mut part) = (Vec::new(), Vec::new());
    for mut sequence in ids.chunks(context) {
        decoder.clear();
        while !sequence.is_empty() {
            let (now, later) = sequence.split_at(decoder.chunk(sequence.len()).min(sequence.len()));
            decoder.forward(now, Wanted::All, &mut part)?;
            decoder.commit(now.len())?;
            all.extend_from_slice(&part);
            sequence = later;
        }
    }
    Ok(all)
}

/// Matrices that are multiplied with the same inputs.
pub(super) fn groups(model: &Checkpoint) -> Vec<Vec<&Weight>> {
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
pub(super) fn read(weight: &Weight) -> Result<(usize, usize, Vec<f32>), WeightError> {
    let mut values = vec![0.0; weight.element_count()];
    weight.read_f32(0, &mut values)?;
    let columns = weight.shape().last().copied().unwrap_or_default();
    Ok((values.len() / columns.max(1), columns, values))
}
