use super::WeightError;
use rayon::prelude::*;

/// Columns whose pairs still fit a memory.
const MOST_COLUMNS: usize = 1 << 15;
/// Rows that are widened at once while they are counted.
const CHUNK: usize = 64;

/// Sum of xᵀx over the rows x that a matrix is multiplied with: the squared error that a change e
/// of a row of weights makes in its output is e G eᵀ.
///
/// Memory is half of K² numbers for K columns, however many rows there are. Every element is
/// summed in the order of the rows, so the sums depend neither on the number of threads nor on how
/// the rows are cut into chunks.
#[derive(Debug, Clone, PartialEq)]
pub struct Gram {
    columns: usize,
    rows: u64,
    /// Row i of the upper triangle, from its diagonal on, one after the other.
    triangle: Vec<f64>,
}

impl Gram {
    /// Nothing seen yet.
    ///
    /// # Errors
    /// When there are more columns than the sums of pairs are kept for.
    pub fn new(columns: usize) -> Result<Self, WeightError> {
        if columns > MOST_COLUMNS {
            return Err(WeightError::TooManyColumns { columns, most: MOST_COLUMNS });
        }
        let count = columns * (columns + 1) / 2;
        Ok(Self { columns, rows: 0, triangle: vec![0.0; count] })
    }

    /// Counts the rows `inputs` `[n, columns]`.
    ///
    /// # Errors
    /// When that is not a whole number of rows, or not all of it is finite. Nothing is counted then.
    pub fn observe(&mut self, inputs: &[f32]) -> Result<(), WeightError> {
        let columns = self.columns;
        if columns == 0 || !inputs.len().is_multiple_of(columns) {
            let (rows, values) = (inputs.len() / columns.max(1), inputs.len());
            return Err(WeightError::Shape { rows, columns, values });
        }
        if let Some(index) = inputs.iter().position(|value| !value.is_finite()) {
            let value = inputs.get(index).copied().unwrap_or_default();
            let (row, column) = (index / columns, index % columns);
            return Err(WeightError::InputNotFinite { row, column, value });
        }
        for inputs in inputs.chunks(CHUNK * columns) {
            let wide: Vec<f64> = inputs.iter().copied().map(f64::from).collect();
            let mut parts: Vec<(usize, &mut [f64])> = Vec::with_capacity(columns);
            let mut rest = &mut self.triangle[..];
            for first in 0..columns {
                let (part, behind) = rest.split_at_mut(columns - first);
                parts.push((first, part));
                rest = behind;
            }
            parts.into_par_iter().with_min_len(8).for_each(|(first, sums)| {
                for row in wide.chunks_exact(columns) {
                    let row = &row[first..];
                    let factor = row[0];
                    for (sum, value) in sums.iter_mut().zip(row) {
                        *sum += factor * value;
                    }
                }
            });
        }
        self.rows += (inputs.len() / columns) as u64;
        Ok(())
    }

    /// Columns of the matrix.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Rows that were counted.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// The sums Σ x² of each column.
    pub fn diagonal(&self) -> Vec<f64> {
        (0..self.columns).map(|column| self.at(column, column)).collect()
    }

    /// Σ (ŵ x)² over the rows x that were counted and the rows ŵ of `matrix` `[n, columns]`: of the
    /// difference of two matrices it is the squared error that one makes in the place of the other.
    /// `None` when that is not a whole number of rows.
    pub fn output_square(&self, matrix: &[f32]) -> Option<f64> {
        let columns = self.columns;
        if columns == 0 || !matrix.len().is_multiple_of(columns) {
            return None;
        }
        let squares: Vec<f64> = matrix
            .par_chunks(columns)
            .map(|row| {
                let row: Vec<f64> = row.iter().copied().map(f64::from).collect();
                let mut sums = &self.triangle[..];
                let mut total = 0.0;
                for (first, value) in row.iter().enumerate() {
                    let (own, rest) = sums.split_at(columns - first);
                    let others = own.iter().zip(&row[first..]).skip(1);
                    let pairs: f64 = others.map(|(sum, other)| sum * other).sum();
                    total += value * (value * own[0] + 2.0 * pairs);
                    sums = rest;
                }
                total
            })
            .collect();
        Some(squares.iter().sum())
    }

    /// Σ x_i x_j of two columns.
    pub(super) fn at(&self, i: usize, j: usize) -> f64 {
        let (first, second) = (i.min(j), i.max(j));
        self.triangle[first * (2 * self.columns + 1 - first) / 2 + second - first]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_right_and_independent_of_chunks_and_threads() {
        let columns = 7;
        let inputs: Vec<f32> = (0..columns * 150).map(|i| ((i * 37 % 101) as f32) - 50.5).collect();
        let mut whole = Gram::new(columns).unwrap();
        whole.observe(&inputs).unwrap();
        for i in 0..columns {
            for j in 0..columns {
                let rows = inputs.chunks(columns);
                let sum: f64 = rows.map(|row| f64::from(row[i]) * f64::from(row[j])).sum();
                assert_eq!(whole.at(i, j), sum, "{i} {j}");
            }
        }
        assert_eq!(whole.rows(), 150);
        let matrix = [1.5, 0.0, -2.0, 1.0, 0.25, 3.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0];
        let product = |weights: &[f32], row: &[f32]| -> f64 {
            weights.iter().zip(row).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum()
        };
        let rows = matrix.chunks(columns);
        let squares =
            |w: &[f32]| -> f64 { inputs.chunks(columns).map(|row| product(w, row).powi(2)).sum() };
        let expected: f64 = rows.map(squares).sum();
        let square = whole.output_square(&matrix).unwrap();
        assert!((square - expected).abs() < 1e-9 * expected);
        assert_eq!(whole.output_square(&matrix[1..]), None);
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        let mut parts = Gram::new(columns).unwrap();
        pool.install(|| {
            inputs.chunks(columns * 11).for_each(|part| parts.observe(part).unwrap());
        });
        assert_eq!(parts, whole);
    }

    #[test]
    fn what_cannot_be_counted_is_refused() {
        assert!(matches!(Gram::new(usize::MAX), Err(WeightError::TooManyColumns { .. })));
        assert!(matches!(Gram::new(MOST_COLUMNS + 1), Err(WeightError::TooManyColumns { .. })));
        let mut gram = Gram::new(2).unwrap();
        assert!(matches!(gram.observe(&[1.0; 3]), Err(WeightError::Shape { values: 3, .. })));
        let broken = gram.observe(&[1.0, 2.0, 3.0, f32::INFINITY]).unwrap_err();
        assert!(matches!(broken, WeightError::InputNotFinite { row: 1, column: 1, .. }));
        assert_eq!(gram, Gram::new(2).unwrap());
        assert!(Gram::new(0).unwrap().observe(&[1.0]).is_err());
    }
}
