//! Rounds a matrix to integers with one scale a row (an output channel) and zero points of 0.
//!
//! [`round_nearest`] is the plain way. [`round_for_output`] makes the error of the matrix's output
//! small, which an [`OutputError`] measures: from the importance of each column, or from a
//! [`Gram`] of what the matrix is multiplied with. [`with_columns`] prepares a model for it without
//! changing what it computes, [`plan`] says which matrices get 8 bits, [`quantize_model`] does that
//! and rounds them all, and [`round_layers`] those of some layers.

mod equalize;
mod follow;
mod gram;
mod model;
mod output_error;
mod plan;
mod round;
mod scores;
mod texts;

pub use equalize::{ColumnSizes, Importance, column_sizes, equalized, with_columns};
pub use follow::{LayerOptions, round_layers};
pub use gram::Gram;
pub use model::{ModelOptions, QuantizedModel, Widths, quantize_model};
pub use output_error::OutputError;
pub use plan::{Budget, Choice, WidthPlan, plan};
pub use round::round_for_output;
pub use scores::{ScoreRows, round_for_scores};
pub use texts::spread_over;

use firesteel_checkpoint::CheckpointError;
use firesteel_engine::EngineError;
use firesteel_step::RunnerError;
use thiserror::Error;

/// Why a matrix cannot be quantized.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum WeightError {
    /// The values are not `rows` × `columns` many.
    #[error("a matrix of {rows} × {columns} has {values} values")]
    Shape {
        /// Rows that were asked for.
        rows: usize,
        /// Columns that were asked for.
        columns: usize,
        /// Values that are there.
        values: usize,
    },
    /// A value is infinite or not a number.
    #[error(
        "the value at row {row}, column {column} is {value}: only finite weights can be quantized"
    )]
    NotFinite {
        /// Its row.
        row: usize,
        /// Its column.
        column: usize,
        /// The value.
        value: f32,
    },
    /// What a matrix is multiplied with is infinite or not a number.
    #[error(
        "the input at row {row}, column {column} is {value}: only finite inputs can be counted"
    )]
    InputNotFinite {
        /// Its row among those that were given.
        row: usize,
        /// Its column.
        column: usize,
        /// The value.
        value: f32,
    },
    /// There are too many columns to count how each goes with each.
    #[error(
        "the products of {columns} columns with each other take too much memory; accepted: {most} \
         columns at most, or the importance of each column"
    )]
    TooManyColumns {
        /// The columns.
        columns: usize,
        /// The most that are accepted.
        most: usize,
    },
    /// The measure of the error is one of another number of columns.
    #[error("the matrix has {columns} columns, but the measure of its error has {measured}")]
    Columns {
        /// Columns of the matrix.
        columns: usize,
        /// Columns of the measure.
        measured: usize,
    },
    /// An importance is negative, infinite or not a number.
    #[error("the importance of column {column} is {value}; accepted: finite numbers from 0 on")]
    Importance {
        /// The column.
        column: usize,
        /// Its importance.
        value: f32,
    },
    /// The sums of the inputs' products are too large or contradict each other.
    #[error(
        "the products of the inputs give no measure of the error at column {column}; use the \
         importance of each column instead"
    )]
    NotPositive {
        /// The column.
        column: usize,
    },
    /// The sizes of columns are those of another model.
    #[error("{norm} has {columns} columns, and there are sizes for {sizes}; calibrate again")]
    ColumnSizes {
        /// The norm or matrix.
        norm: String,
        /// Its columns.
        columns: usize,
        /// The sizes.
        sizes: usize,
    },
    /// The sizes of columns are for a norm or matrix that the model does not have.
    #[error(
        "the model has no norm or matrix {norm}, for which there are column sizes; calibrate again"
    )]
    NoNorm {
        /// The norm.
        norm: String,
    },
    /// No plan meets the budget.
    #[error("{asked} cannot be met: with {extreme} it is {reached:.3}")]
    Budget {
        /// What was asked for, with its unit.
        asked: String,
        /// The plan that comes nearest.
        extreme: &'static str,
        /// What that plan has.
        reached: f64,
    },
    /// A weight cannot be read or replaced.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The calibration text cannot be run.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The model cannot be run to measure the noise.
    #[error(transparent)]
    Runner(#[from] RunnerError),
}

/// Width of a quantized weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightBits {
    /// −8 to 7.
    Four,
    /// −127 to 127.
    Eight,
}

impl WeightBits {
    /// Bits of a code.
    pub fn count(self) -> u32 {
        match self {
            Self::Four => 4,
            Self::Eight => 8,
        }
    }

    /// The least and the largest code. Of 4 bits all are used, of 8 bits those that are symmetric.
    pub fn codes(self) -> [i8; 2] {
        match self {
            Self::Four => [-8, 7],
            Self::Eight => [-127, 127],
        }
    }
}

/// A matrix [rows, columns] as integers; a value is `code × scale` of its row.
#[derive(Clone, Debug, PartialEq)]
pub struct QuantizedMatrix {
    /// Width of a code.
    pub bits: WeightBits,
    /// Output channels.
    pub rows: usize,
    /// Input channels.
    pub columns: usize,
    /// Row-major codes.
    pub codes: Vec<i8>,
    /// One positive scale a row.
    pub scales: Vec<f32>,
}

impl QuantizedMatrix {
    /// The values `code × scale`, row by row.
    pub fn values(&self) -> Vec<f32> {
        let rows = self.codes.chunks(self.columns.max(1)).zip(&self.scales);
        rows.flat_map(|(codes, scale)| codes.iter().map(move |code| f32::from(*code) * scale))
            .collect()
    }
}

/// Whether `values` are `rows` × `columns` finite numbers.
fn check(values: &[f32], rows: usize, columns: usize) -> Result<(), WeightError> {
    if rows.checked_mul(columns) != Some(values.len()) {
        return Err(WeightError::Shape { rows, columns, values: values.len() });
    }
    match values.iter().position(|value| !value.is_finite()) {
        Some(index) => {
            let value = values.get(index).copied().unwrap_or_default();
            Err(WeightError::NotFinite { row: index / columns, column: index % columns, value })
        }
        None => Ok(()),
    }
}

/// Rounds to nearest with the scale that the largest magnitude of each row needs; of 4 bits −7 to 7
/// are used.
///
/// # Errors
/// When the values are not `rows` × `columns` many, or not all finite.
pub fn round_nearest(
    values: &[f32],
    rows: usize,
    columns: usize,
    bits: WeightBits,
) -> Result<QuantizedMatrix, WeightError> {
    check(values, rows, columns)?;
    let range = bits.codes().map(f64::from);
    let largest = f32::from(bits.codes()[1]);
    let mut codes = Vec::with_capacity(values.len());
    let mut scales = Vec::with_capacity(rows);
    for weights in values.chunks(columns.max(1)) {
        let magnitude = weights.iter().fold(0f32, |most, w| most.max(w.abs()));
        // A row of zeros, or of values too small for a scale, becomes zeros.
        let scale = round::stored(f64::from(magnitude / largest), range);
        codes.extend(
            weights.iter().map(|w| (w / scale).round_ties_even().clamp(-largest, largest) as i8),
        );
        scales.push(scale);
    }
    Ok(QuantizedMatrix { bits, rows, columns, codes, scales })
}

/// Numbers that look random and nearly normal, around 0; equal seeds make equal ones.
#[cfg(test)]
fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut uniform = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    (0..count).map(|_| uniform() + uniform() + uniform()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_scales_of_their_own() {
        let matrix =
            round_nearest(&[1.0, -7.0, 3.4, 0.0, 0.0, 0.0], 2, 3, WeightBits::Four).unwrap();
        assert_eq!(matrix.codes, [1, -7, 3, 0, 0, 0]);
        assert_eq!(matrix.scales[0], 1.0);
        assert!(matrix.scales[1] > 0.0);
    }

    #[test]
    fn wrong_shapes_and_infinities_are_errors() {
        assert!(matches!(
            round_nearest(&[1.0; 5], 2, 3, WeightBits::Eight),
            Err(WeightError::Shape { values: 5, .. })
        ));
        assert!(matches!(
            round_nearest(&[1.0, f32::NAN], 1, 2, WeightBits::Eight),
            Err(WeightError::NotFinite { column: 1, .. })
        ));
    }
}
