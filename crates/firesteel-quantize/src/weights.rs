//! Rounds a matrix to integers with one symmetric scale a row (an output channel).

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
}

/// Width of a quantized weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightBits {
    /// −7 to 7.
    Four,
    /// −127 to 127.
    Eight,
}

impl WeightBits {
    /// The largest magnitude of a code; the range is symmetric.
    pub fn largest(self) -> i8 {
        match self {
            Self::Four => 7,
            Self::Eight => 127,
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

/// Rounds to nearest with the scale that the largest magnitude of each row needs.
///
/// # Errors
/// When the values are not `rows` × `columns` many, or not all finite.
pub fn round_nearest(
    values: &[f32],
    rows: usize,
    columns: usize,
    bits: WeightBits,
) -> Result<QuantizedMatrix, WeightError> {
    if rows.checked_mul(columns) != Some(values.len()) {
        return Err(WeightError::Shape { rows, columns, values: values.len() });
    }
    let largest = f32::from(bits.largest());
    let mut codes = Vec::with_capacity(values.len());
    let mut scales = Vec::with_capacity(rows);
    for (row, weights) in values.chunks(columns.max(1)).enumerate() {
        if let Some((column, &value)) = weights.iter().enumerate().find(|(_, w)| !w.is_finite()) {
            return Err(WeightError::NotFinite { row, column, value });
        }
        let magnitude = weights.iter().fold(0f32, |most, w| most.max(w.abs()));
        // A row of zeros, or of values too small for a scale, becomes zeros.
        let scale = (magnitude / largest).max(f32::MIN_POSITIVE);
        codes.extend(
            weights.iter().map(|w| (w / scale).round_ties_even().clamp(-largest, largest) as i8),
        );
        scales.push(scale);
    }
    Ok(QuantizedMatrix { bits, rows, columns, codes, scales })
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
