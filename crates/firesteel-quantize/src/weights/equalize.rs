use super::WeightError;
use firesteel_checkpoint::{Checkpoint, Weight};

/// The same model with the columns of its matrices made equally large, where a norm is before them
/// and takes up the difference: the norm's gain for a column is multiplied with what the column is
/// divided by. Scales of rows then fit all columns, and a step costs the same as before. The head
/// is apart from the embedding afterwards.
///
/// A column's size is its root mean square over the rows of all matrices after the norm, each row
/// taken relative to its own. Nothing is copied: weights are scaled when they are read, and are f32.
///
/// # Errors
/// When a weight cannot be read.
pub fn equalized(checkpoint: &Checkpoint) -> Result<Checkpoint, WeightError> {
    let mut replaced = Vec::new();
    let mut add = |norm: &Weight, sized: &[&Weight], others: &[&Weight]| {
        let sizes = sizes(sized)?;
        let inverse: Vec<f32> = sizes.iter().map(|size| 1.0 / size).collect();
        replaced.extend(norm.with_scaled_columns(norm.name(), &sizes));
        for weight in sized.iter().chain(others) {
            // The table keeps its values when it is the head too.
            let is_head = std::ptr::eq(*weight, checkpoint.head_weight());
            let name = if is_head { Checkpoint::HEAD } else { weight.name() };
            replaced.extend(weight.with_scaled_columns(name, &inverse));
        }
        Ok::<(), WeightError>(())
    };
    for layer in checkpoint.layers() {
        add(&layer.input_norm, &[&layer.qkv], &[&layer.head_gate])?;
        add(&layer.post_attention_norm, &[&layer.mlp_gate, &layer.mlp_up], &[])?;
    }
    add(checkpoint.final_norm(), &[checkpoint.head_weight()], &[])?;
    Ok(checkpoint.with_weights(replaced)?)
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

/// Bounds of a column's size relative to the others; gains stay in the range of half precision.
const SMALLEST: f32 = 1.0 / 64.0;
const LARGEST: f32 = 64.0;
