use super::WeightError;
use firesteel_checkpoint::{Checkpoint, FedBy, Half, LayerWeights, SlotKind, Weight};
use rayon::prelude::*;
use std::collections::BTreeMap;

/// What columns of matrices are divided by, and what makes their inputs is multiplied with: by the
/// name of a norm for the matrices after it, else by the name of the matrix.
pub type ColumnSizes = BTreeMap<String, Vec<f32>>;

/// The mean square of each column of what matrices are multiplied with, by the name of that value in
/// the ranges.
pub type Importance = BTreeMap<String, Vec<f32>>;

/// Matrices that are multiplied with the same value, and its producer: an equalization group (Nagel et
/// al., Data-free quantization, 2019).
struct Group<'a> {
    /// The name for its sizes.
    name: &'a str,
    /// The value by its name in the step's graph.
    value: String,
    producer: Producer<'a>,
    /// Matrices whose size counts, and others.
    sized: Vec<&'a Weight>,
    others: Vec<&'a Weight>,
}

/// What is multiplied where columns are divided: the gains of a norm, or the rows of a matrix. The
/// values of the attention are none of them, because a host sees them in its cache.
enum Producer<'a> {
    Gains(&'a Weight),
    Rows(&'a Weight),
}

impl<'a> Group<'a> {
    /// The matrices of a layer that are fed by `fed_by`; `None` where there are none.
    fn of(layer: &'a LayerWeights, index: usize, fed_by: FedBy) -> Option<Self> {
        let of_kind = |kind| {
            let of_kind =
                layer.iter().filter(move |(spec, _)| spec.fed_by == fed_by && spec.kind == kind);
            of_kind.map(|(_, weight)| weight).collect::<Vec<_>>()
        };
        let (sized, others) = (of_kind(SlotKind::Matrix), of_kind(SlotKind::SmallMatrix));
        let first = sized.first()?;
        let (name, value, producer) = match fed_by {
            FedBy::Norm(slot) => {
                let gains = layer.get(slot)?;
                let value = match slot.half() {
                    Half::Attention => "attention.norm",
                    Half::FeedForward => "mlp.norm",
                };
                (gains.name(), value, Producer::Gains(gains))
            }
            FedBy::Product(slot) => (first.name(), "mlp.product", Producer::Rows(layer.get(slot)?)),
            FedBy::Stream | FedBy::Attention => return None,
        };
        Some(Self { name, value: format!("layers.{index}.{value}"), producer, sized, others })
    }
}

fn equalization_groups(checkpoint: &Checkpoint) -> Vec<Group<'_>> {
    let mut all = Vec::new();
    for (index, layer) in checkpoint.layers().iter().enumerate() {
        let mut seen = Vec::new();
        for (spec, _) in layer.iter() {
            if !seen.contains(&spec.fed_by) {
                seen.push(spec.fed_by);
                all.extend(Group::of(layer, index, spec.fed_by));
            }
        }
    }
    all.push(Group {
        name: checkpoint.final_norm().name(),
        value: "head.norm".into(),
        producer: Producer::Gains(checkpoint.final_norm()),
        sized: vec![checkpoint.head_weight()],
        others: Vec::new(),
    });
    all
}

/// The sizes by which the columns of matrices are best divided, so that one scale a row fits them.
///
/// After a norm a column's size is its root mean square over the rows of all matrices, each row
/// taken relative to its own. Where `importance` has what they are multiplied with, a column that
/// meets more than others is left larger, because the error of its weights counts more: by a power
/// of what it meets, as in activation-aware quantization (Lin et al., AWQ, 2024). Of a few powers the
/// one is taken with which rounding to nearest makes the least noise in the matrices' outputs. The
/// down projection is sized, by way of the up projection, only where it is known what it meets.
///
/// # Errors
/// When a weight cannot be read.
pub fn column_sizes(
    checkpoint: &Checkpoint,
    importance: &Importance,
) -> Result<ColumnSizes, WeightError> {
    let mut columns = ColumnSizes::new();
    for Group { name, value, producer, sized, .. } in equalization_groups(checkpoint) {
        let met = importance.get(&value);
        if met.is_none() && matches!(producer, Producer::Rows(_)) {
            continue;
        }
        let mut sizes = sizes(&sized)?;
        if let Some(met) = met.filter(|met| met.len() == sizes.len()) {
            let favours = favours(&sized, &sizes, met)?;
            sizes.iter_mut().zip(favours).for_each(|(size, favour)| *size /= favour);
        }
        columns.insert(name.to_owned(), sizes);
    }
    Ok(columns)
}

/// The same model with the columns of its matrices divided by `columns`, and the gains of the norms
/// and the rows of the matrices that make their inputs multiplied with them. A step costs the same
/// as before. The head is apart from the embedding afterwards. Nothing is copied: weights are scaled
/// when they are read, and are f32.
///
/// # Errors
/// When `columns` names a norm or matrix that the model does not have, or has another number of
/// columns.
pub fn with_columns(
    checkpoint: &Checkpoint,
    columns: &ColumnSizes,
) -> Result<Checkpoint, WeightError> {
    let all = equalization_groups(checkpoint);
    if let Some(name) = columns.keys().find(|name| !all.iter().any(|group| group.name == **name)) {
        return Err(WeightError::NoNorm { norm: name.clone() });
    }
    // By the names that they have in the checkpoint.
    let mut changed: BTreeMap<&str, Weight> = BTreeMap::new();
    for Group { name, producer, sized, others, .. } in &all {
        let Some(sizes) = columns.get(*name) else { continue };
        let wrong = || WeightError::ColumnSizes {
            norm: (*name).to_owned(),
            columns: sized.first().and_then(|weight| weight.shape().last()).copied().unwrap_or(0),
            sizes: sizes.len(),
        };
        let inverse: Vec<f32> = sizes.iter().map(|size| 1.0 / size).collect();
        for weight in sized.iter().chain(others) {
            // The table keeps its values when it is the head too.
            let is_head = std::ptr::eq(*weight, checkpoint.head_weight());
            let new = if is_head { Checkpoint::HEAD } else { weight.name() };
            let own = changed.get(weight.name()).unwrap_or(weight);
            let scaled = own.with_scaled_columns(new, &inverse).ok_or_else(wrong)?;
            changed.insert(weight.name(), scaled);
        }
        match producer {
            Producer::Gains(norm) => {
                let scaled = norm.with_scaled_columns(norm.name(), sizes).ok_or_else(wrong)?;
                changed.insert(norm.name(), scaled);
            }
            Producer::Rows(matrix) => {
                let own = changed.get(matrix.name()).unwrap_or(matrix);
                let scaled = own.with_scaled_rows(matrix.name(), sizes).ok_or_else(wrong)?;
                changed.insert(matrix.name(), scaled);
            }
        }
    }
    Ok(checkpoint.with_weights(changed.into_values().collect())?)
}

/// The model with equally large columns: [`with_columns`] of [`column_sizes`] without a text.
///
/// # Errors
/// When a weight cannot be read.
pub fn equalized(checkpoint: &Checkpoint) -> Result<Checkpoint, WeightError> {
    with_columns(checkpoint, &column_sizes(checkpoint, &BTreeMap::new())?)
}

/// The size of each column.
fn sizes(weights: &[&Weight]) -> Result<Vec<f32>, WeightError> {
    let mut sums: Vec<f64> = Vec::new();
    let mut rows = 0usize;
    for weight in weights {
        let &[count, columns] = weight.shape() else { continue };
        sums.resize(columns, 0.0);
        let mut row = vec![0f32; columns];
        for index in 0..count {
            weight.read_f32(index.saturating_mul(columns), &mut row)?;
            let square = row.iter().map(|w| f64::from(*w).powi(2)).sum::<f64>() / columns as f64;
            if square > 0.0 {
                rows += 1;
                for (sum, weight) in sums.iter_mut().zip(&row) {
                    *sum += f64::from(*weight).powi(2) / square;
                }
            }
        }
    }
    let size = |sum: &f64| {
        let size = (sum / rows.max(1) as f64).sqrt() as f32;
        // A column that is almost empty is not blown up beyond all others.
        if size.is_finite() { size.clamp(SMALLEST, LARGEST) } else { 1.0 }
    };
    Ok(sums.iter().map(size).collect())
}

/// By how much larger than the others each column is best left, when it meets a mean square of `met` and
/// all are divided by their `sizes` first.
fn favours(weights: &[&Weight], sizes: &[f32], met: &[f32]) -> Result<Vec<f32>, WeightError> {
    // What the columns meet once they are equally large.
    let met: Vec<f64> = met
        .iter()
        .zip(sizes)
        .map(|(met, size)| f64::from(*met) * f64::from(*size).powi(2))
        .collect();
    let mut sorted = met.clone();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.get(sorted.len() / 2).copied().unwrap_or_default();
    if middle <= 0.0 || !sorted.iter().all(|met| met.is_finite()) {
        return Ok(vec![1.0; met.len()]);
    }
    let powers: Vec<Vec<f32>> = (0..POWERS)
        .map(|power| {
            let power = 0.5 * power as f64 / (POWERS - 1) as f64;
            let favour = |met: &f64| (met / middle).powf(power) as f32;
            met.iter().map(|met| favour(met).clamp(SMALLEST, LARGEST)).collect()
        })
        .collect();
    let mut noise = vec![0f64; POWERS];
    for weight in weights {
        let &[rows, columns] = weight.shape() else { continue };
        let every = rows.div_ceil(ROWS).max(1);
        let lines: Vec<usize> = (0..rows).step_by(every).collect();
        let steps = lines.par_iter().map(|row| -> Result<_, WeightError> {
            let mut values = vec![0f32; columns];
            weight.read_f32(row.saturating_mul(columns), &mut values)?;
            values.iter_mut().zip(sizes).for_each(|(value, size)| *value /= size);
            let signal: f64 =
                values.iter().zip(&met).map(|(w, met)| f64::from(*w).powi(2) * met).sum();
            // The scale of a row follows its largest weight.
            let largest = powers.iter().map(|favours| {
                let each = values.iter().zip(favours);
                let largest = each.fold(0f32, |most, (w, favour)| most.max((w * favour).abs()));
                f64::from(largest).powi(2)
            });
            Ok((signal, largest.collect::<Vec<f64>>()))
        });
        let steps: Vec<(f64, Vec<f64>)> = steps.collect::<Result<_, _>>()?;
        let signal: f64 = steps.iter().map(|(signal, _)| signal).sum();
        if signal > 0.0 {
            for (power, noise) in noise.iter_mut().enumerate() {
                let sum: f64 = steps.iter().filter_map(|(_, steps)| steps.get(power)).sum();
                *noise += sum / signal;
            }
        }
    }
    let mut best: Option<(f64, Vec<f32>)> = None;
    for (favours, noise) in powers.into_iter().zip(noise) {
        let each = met.iter().zip(&favours);
        let noise = noise * each.map(|(met, favour)| met / f64::from(*favour).powi(2)).sum::<f64>();
        if best.as_ref().is_none_or(|(least, _)| noise < *least) {
            best = Some((noise, favours));
        }
    }
    Ok(best.map_or_else(|| vec![1.0; met.len()], |(_, favours)| favours))
}

/// Bounds of a column's size relative to the others; gains stay in the range of half precision.
const SMALLEST: f32 = 1.0 / 64.0;
const LARGEST: f32 = 64.0;

/// Powers that are tried, from none to the square root of what a column meets.
const POWERS: usize = 17;

/// Rows of a matrix that decide.
const ROWS: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weights::{WeightBits, round_nearest};
    use firesteel_checkpoint::{RandomWeights, Slot, preset};
    use firesteel_engine::Calibration;
    use firesteel_tensor::DType;
    use std::sync::Arc;

    fn model() -> Checkpoint {
        let mut config = preset("spark-x2.5-1.7b").unwrap().with_layers(1).unwrap();
        (config.hidden_size, config.intermediate_size, config.vocab_size) = (256, 64, 64);
        let weights = RandomWeights { dtype: DType::F32, seed: 3, outliers: false };
        Checkpoint::random(config, weights)
    }

    /// Noise of the rounded matrix in its output over the signal, when columns meet `met`.
    fn noise(model: &Checkpoint, met: &[f32]) -> f64 {
        let layer = &model.layers()[0];
        let columns = met.len();
        let (mut gains, mut values) = (
            vec![0f32; columns],
            vec![0f32; layer.weight(Slot::QueryKeyValue).unwrap().element_count()],
        );
        layer.weight(Slot::InputNorm).unwrap().read_f32(0, &mut gains).unwrap();
        layer.weight(Slot::QueryKeyValue).unwrap().read_f32(0, &mut values).unwrap();
        let rows = values.len() / columns;
        let rounded = round_nearest(&values, rows, columns, WeightBits::Eight).unwrap().values();
        let output = |of: &dyn Fn(usize) -> f32| -> f64 {
            let element = |i: usize| {
                f64::from(of(i) * gains[i % columns]).powi(2) * f64::from(met[i % columns])
            };
            (0..values.len()).map(element).sum()
        };
        output(&|i| values[i] - rounded[i]) / output(&|i| values[i])
    }

    #[test]
    fn columns_that_meet_more_are_rounded_finer() {
        let model = model();
        // Before the gains of the norm, and behind them.
        let mut met = vec![1f32; 256];
        (met[7], met[100]) = (900.0, 2500.0);
        let mut gains = vec![0f32; 256];
        model.layers()[0].weight(Slot::InputNorm).unwrap().read_f32(0, &mut gains).unwrap();
        let behind: Vec<f32> =
            met.iter().zip(&gains).map(|(met, gain)| met * gain * gain).collect();
        let importance = Importance::from([("layers.0.attention.norm".to_owned(), behind)]);
        let columns = column_sizes(&model, &importance).unwrap();
        // Of what the other matrices meet nothing is known.
        assert_eq!(columns.len(), 3);
        let sizes = &columns[model.layers()[0].weight(Slot::InputNorm).unwrap().name()];
        let others = sizes[8];
        assert!(sizes[7] < 0.8 * others && sizes[100] < sizes[7], "{} {}", sizes[7], sizes[100]);
        let sized = noise(&with_columns(&model, &columns).unwrap(), &met);
        let equal = noise(&equalized(&model).unwrap(), &met);
        assert!(sized < 0.6 * equal, "{sized} {equal}");
    }

    #[test]
    fn what_makes_the_inputs_of_sized_columns_makes_up_for_it() {
        let mut config = preset("spark-x2.5-1.7b").unwrap().with_layers(2).unwrap();
        (config.hidden_size, config.intermediate_size, config.vocab_size) = (64, 96, 64);
        for rope in [&mut config.rope_sliding, &mut config.rope_full].into_iter().flatten() {
            rope.dims = 16;
        }
        let weights = RandomWeights { dtype: DType::F32, seed: 5, outliers: true };
        let model = Arc::new(Checkpoint::random(config, weights));
        // Some columns meet far more than the others.
        let met: Vec<f32> =
            (0..96).map(|i| if i % 29 == 5 { 400.0 } else { 1.0 + (i % 7) as f32 }).collect();
        let value = |layer: usize| (format!("layers.{layer}.mlp.product"), met.clone());
        let columns = column_sizes(&model, &Importance::from([value(0), value(1)])).unwrap();
        assert_eq!(columns.len(), 2 * 3 + 1);
        let down = &columns[model.layers()[1].weight(Slot::MlpDown).unwrap().name()];
        assert!(down[5] < 0.8 * down[6], "{} {}", down[5], down[6]);
        let sized = Arc::new(with_columns(&model, &columns).unwrap());
        let streams = |model: &Arc<Checkpoint>| {
            let hidden: Vec<f32> =
                (0..64 * 9).map(|i| ((i * 37 % 101) as f32 - 50.0) / 30.0).collect();
            let first = Calibration::run_layer(model, 0, &hidden, &[9], &mut |_, _| ()).unwrap();
            Calibration::run_layer(model, 1, &first, &[9], &mut |_, _| ()).unwrap()
        };
        let (mut signal, mut noise) = (0.0, 0.0);
        for (a, b) in streams(&model).iter().zip(streams(&sized)) {
            signal += f64::from(*a).powi(2);
            noise += f64::from(a - b).powi(2);
        }
        // What is left is the rounding of scaled weights to f32.
        assert!(noise < 1e-11 * signal, "{}", 10.0 * (signal / noise).log10());
    }

    #[test]
    fn sizes_of_another_model_are_refused() {
        let model = model();
        let norm = model.layers()[0].weight(Slot::InputNorm).unwrap().name().to_owned();
        let error = |columns: ColumnSizes| with_columns(&model, &columns).unwrap_err().to_string();
        assert_eq!(
            error([(norm.clone(), vec![1.0; 3])].into()),
            format!("{norm} has 256 columns, and there are sizes for 3; calibrate again")
        );
        assert_eq!(
            error([("other".to_owned(), vec![1.0; 256])].into()),
            "the model has no norm or matrix other, for which there are column sizes; calibrate again"
        );
    }
}
