use super::WeightError;
use firesteel_checkpoint::{Checkpoint, Weight};
use rayon::prelude::*;
use std::collections::BTreeMap;

/// What the gains of norms are multiplied with, by the norm's name; the columns of the matrices
/// after a norm are divided by it.
pub type ColumnSizes = BTreeMap<String, Vec<f32>>;

/// The mean square of each column of what matrices are multiplied with, by the name of that value in
/// the ranges.
pub type Importance = BTreeMap<String, Vec<f32>>;

/// A norm, what it gives by its name in the step's graph, and the matrices that it is multiplied
/// with: those whose size counts, and others.
struct Normed<'a> {
    norm: &'a Weight,
    value: String,
    sized: Vec<&'a Weight>,
    others: Vec<&'a Weight>,
}

fn normed(checkpoint: &Checkpoint) -> Vec<Normed<'_>> {
    let mut all = Vec::new();
    for (index, layer) in checkpoint.layers().iter().enumerate() {
        all.push(Normed {
            norm: &layer.input_norm,
            value: format!("layers.{index}.attention.norm"),
            sized: vec![&layer.qkv],
            others: vec![&layer.head_gate],
        });
        all.push(Normed {
            norm: &layer.post_attention_norm,
            value: format!("layers.{index}.mlp.norm"),
            sized: vec![&layer.mlp_gate, &layer.mlp_up],
            others: Vec::new(),
        });
    }
    all.push(Normed {
        norm: checkpoint.final_norm(),
        value: "head.norm".into(),
        sized: vec![checkpoint.head_weight()],
        others: Vec::new(),
    });
    all
}

/// The sizes by which the columns of the matrices after each norm are best divided, so that one
/// scale a row fits them.
///
/// A column's size is its root mean square over the rows of all matrices after the norm, each row
/// taken relative to its own. Where `importance` has what a norm gives, a column that meets more than others is left larger, because the error
/// of its weights counts more: by a power of what it meets, as in activation-aware quantization
/// (Lin et al., AWQ, 2024). Of a few powers the one is taken with which rounding to nearest makes
/// the least noise in the matrices' outputs.
///
/// # Errors
/// When a weight cannot be read.
pub fn column_sizes(
    checkpoint: &Checkpoint,
    importance: &Importance,
) -> Result<ColumnSizes, WeightError> {
    let mut columns = ColumnSizes::new();
    for Normed { norm, value, sized, .. } in normed(checkpoint) {
        let mut sizes = sizes(&sized)?;
        let met = importance.get(&value).filter(|met| met.len() == sizes.len());
        if let Some(met) = met {
            let favours = favours(&sized, &sizes, met)?;
            sizes.iter_mut().zip(favours).for_each(|(size, favour)| *size /= favour);
        }
        columns.insert(norm.name().to_owned(), sizes);
    }
    Ok(columns)
}

/// The same model with `columns` multiplied into the gains of its norms, and the columns of the
/// matrices after them divided by it. A step costs the same as before. The head is apart from the
/// embedding afterwards. Nothing is copied: weights are scaled when they are read, and are f32.
///
/// # Errors
/// When `columns` names a norm that the model does not have, or has another number of columns.
pub fn with_columns(
    checkpoint: &Checkpoint,
    columns: &ColumnSizes,
) -> Result<Checkpoint, WeightError> {
    let mut replaced = Vec::new();
    let mut used = 0;
    for Normed { norm, sized, others, .. } in normed(checkpoint) {
        let Some(sizes) = columns.get(norm.name()) else { continue };
        let wrong = || WeightError::ColumnSizes {
            norm: norm.name().to_owned(),
            columns: norm.element_count(),
            sizes: sizes.len(),
        };
        used += 1;
        let inverse: Vec<f32> = sizes.iter().map(|size| 1.0 / size).collect();
        replaced.push(norm.with_scaled_columns(norm.name(), sizes).ok_or_else(wrong)?);
        for weight in sized.iter().chain(&others) {
            // The table keeps its values when it is the head too.
            let is_head = std::ptr::eq(*weight, checkpoint.head_weight());
            let name = if is_head { Checkpoint::HEAD } else { weight.name() };
            replaced.push(weight.with_scaled_columns(name, &inverse).ok_or_else(wrong)?);
        }
    }
    if used < columns.len() {
        let known: Vec<&str> = normed(checkpoint).iter().map(|normed| normed.norm.name()).collect();
        let norm = columns.keys().find(|name| !known.contains(&name.as_str()));
        return Err(WeightError::NoNorm { norm: norm.cloned().unwrap_or_default() });
    }
    Ok(checkpoint.with_weights(replaced)?)
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
    use firesteel_checkpoint::{RandomWeights, preset};
    use firesteel_tensor::DType;

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
        let (mut gains, mut values) = (vec![0f32; columns], vec![0f32; layer.qkv.element_count()]);
        layer.input_norm.read_f32(0, &mut gains).unwrap();
        layer.qkv.read_f32(0, &mut values).unwrap();
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
        model.layers()[0].input_norm.read_f32(0, &mut gains).unwrap();
        let behind: Vec<f32> =
            met.iter().zip(&gains).map(|(met, gain)| met * gain * gain).collect();
        let importance = Importance::from([("layers.0.attention.norm".to_owned(), behind)]);
        let columns = column_sizes(&model, &importance).unwrap();
        assert_eq!(columns.len(), 3);
        let sizes = &columns[model.layers()[0].input_norm.name()];
        let others = sizes[8];
        assert!(sizes[7] < 0.8 * others && sizes[100] < sizes[7], "{} {}", sizes[7], sizes[100]);
        let sized = noise(&with_columns(&model, &columns).unwrap(), &met);
        let equal = noise(&equalized(&model).unwrap(), &met);
        assert!(sized < 0.6 * equal, "{sized} {equal}");
    }

    #[test]
    fn sizes_of_another_model_are_refused() {
        let model = model();
        let norm = model.layers()[0].input_norm.name().to_owned();
        let error = |columns: ColumnSizes| with_columns(&model, &columns).unwrap_err().to_string();
        assert_eq!(
            error([(norm.clone(), vec![1.0; 3])].into()),
            format!("{norm} has 256 columns, and there are sizes for 3; calibrate again")
        );
        assert_eq!(
            error([("other".to_owned(), vec![1.0; 256])].into()),
            "the model has no norm other, for which there are column sizes; calibrate again"
        );
    }
}
