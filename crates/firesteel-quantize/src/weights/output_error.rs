use super::{Gram, WeightError};
use ndarray::{Array2, ArrayView2, Axis, Slice};
use rayon::prelude::*;
use std::ops::Range;

/// The most that the products of columns may owe to chance for them to be used.
const MOST_CHANCE: f64 = 0.5;

/// The share of the squared correlations of columns that is chance: with N rows a correlation r has
/// the variance (1 − r²)² / N, and the share is Σ (1 − r²)² / N Σ r² (Schäfer and Strimmer, 2005).
fn chance(gram: &Gram, sums: &[f64]) -> f64 {
    let rows = gram.rows() as f64;
    let lines: Vec<[f64; 2]> = (0..sums.len())
        .into_par_iter()
        .map(|i| {
            let (mut expected, mut found) = (0.0, 0.0);
            for (j, sum) in sums.iter().enumerate().skip(i + 1) {
                let both = sums[i] * sum;
                if both > 0.0 {
                    let square = (gram.at(i, j).powi(2) / both).min(1.0);
                    expected += (1.0 - square).powi(2) / rows;
                    found += square;
                }
            }
            [expected, found]
        })
        .collect();
    let [expected, found] =
        lines.iter().fold([0.0, 0.0], |[a, b], [expected, found]| [a + expected, b + found]);
    if found > 0.0 { (expected / found).clamp(0.0, 1.0) } else { 0.0 }
}

/// What is added to the diagonal, as a share of each column's own sum: inputs that were not in the
/// text go together less than those that were.
const DAMPING: f64 = 0.02;
/// And as a share of the mean of all columns, so that one that was always zero still counts.
const FLOOR: f64 = 1e-9;
/// Columns that are computed together.
pub(super) const PANEL: usize = 64;
/// Columns of the rest that are updated while they stay in the first-level cache.
const TILE: usize = 512;

/// The squared error that a change of a row of weights makes in a matrix's output, as a quadratic
/// form of the change, up to a common factor.
#[derive(Debug, Clone)]
pub struct OutputError {
    pub(super) form: Form,
    /// What the sums of the inputs' products were divided by.
    pub(super) unit: f64,
}

#[derive(Debug, Clone)]
pub(super) enum Form {
    /// Σ d_i e_i².
    Diagonal(Vec<f64>),
    /// e M eᵀ.
    Full(Full),
}

/// e M eᵀ for M = R Rᵀ, with the columns in the order in which they are rounded.
#[derive(Debug, Clone)]
pub(super) struct Full {
    /// Columns of the matrix, those that meet most first.
    pub(super) order: Vec<usize>,
    /// M, all K × K of it.
    pub(super) matrix: Array2<f64>,
    /// F_ji = R_ij for all i ≤ j, and undefined numbers above the diagonal: with it the error is
    /// Σ_j (Σ_{i ≤ j} e_i F_ji)².
    pub(super) factor: Array2<f64>,
}

/// Some rows and columns of a matrix.
pub(super) fn block(
    matrix: &Array2<f64>,
    rows: Range<usize>,
    columns: Range<usize>,
) -> ArrayView2<'_, f64> {
    let mut view = matrix.view();
    view.slice_axis_inplace(Axis(0), Slice::from(rows));
    view.slice_axis_inplace(Axis(1), Slice::from(columns));
    view
}

impl Full {
    /// The form of the products `of` columns divided by `unit`, damped. `sums` are those of each
    /// column with itself.
    pub(super) fn new(
        sums: &[f64],
        unit: f64,
        of: &(dyn Fn(usize, usize) -> f64 + Sync),
    ) -> Result<Self, WeightError> {
        let columns = sums.len();
        let mut order: Vec<usize> = (0..columns).collect();
        order.sort_by(|a, b| sums[*b].total_cmp(&sums[*a]).then(a.cmp(b)));
        let damped = |i: usize, j: usize| {
            let sum = of(i, j) / unit;
            if i == j { sum * (1.0 + DAMPING) + FLOOR } else { sum }
        };
        let mut matrix = vec![0.0; columns * columns];
        // The Cholesky factor of M with its rows and columns reversed is R, reversed.
        let mut lower = vec![0.0; columns * columns];
        let width = columns.max(1);
        let rows = matrix.par_chunks_mut(width).zip(lower.par_chunks_mut(width).rev());
        rows.zip(&order).for_each(|((row, reversed), &i)| {
            for (j, value) in order.iter().zip(row.iter_mut()) {
                *value = damped(i, *j);
            }
            for (reversed, value) in reversed.iter_mut().rev().zip(row.iter()) {
                *reversed = *value;
            }
        });
        cholesky(&mut lower, columns).map_err(|column| WeightError::NotPositive {
            column: order.iter().rev().nth(column).copied().unwrap_or_default(),
        })?;
        let shaped = |values: Vec<f64>| {
            Array2::from_shape_vec((columns, columns), values)
                .map_err(|_| WeightError::TooManyColumns { columns, most: columns })
        };
        let lower = shaped(lower)?;
        let mut factor = Array2::zeros((columns, columns));
        let mut reversed = lower.view();
        reversed.invert_axis(Axis(0));
        reversed.invert_axis(Axis(1));
        factor.assign(&reversed.t());
        Ok(Self { order, matrix: shaped(matrix)?, factor })
    }

    /// Replaces each row by row M⁻¹, columns in the order of the matrix.
    fn solve(&self, rows: &mut Array2<f64>) {
        let columns = self.order.len();
        let mut ordered = rows.select(Axis(1), &self.order);
        let panels: Vec<(usize, usize)> =
            (0..columns).step_by(PANEL).map(|start| (start, columns.min(start + PANEL))).collect();
        // First z with z Rᵀ = row, from the last to the first, then y with y R = z.
        for &(start, end) in panels.iter().rev() {
            let own = block(&self.factor, start..end, start..end);
            let (mut before, rest) = ordered.view_mut().split_at(Axis(1), start);
            let (mut panel, _) = rest.split_at(Axis(1), end - start);
            for mut row in panel.outer_iter_mut() {
                for j in (0..end - start).rev() {
                    let value = row[j] / own[[j, j]];
                    row[j] = value;
                    for i in 0..j {
                        row[i] -= value * own[[j, i]];
                    }
                }
            }
            before -= &panel.dot(&block(&self.factor, start..end, 0..start));
        }
        for &(start, end) in &panels {
            let own = block(&self.factor, start..end, start..end);
            let (before, rest) = ordered.view_mut().split_at(Axis(1), start);
            let (mut panel, _) = rest.split_at(Axis(1), end - start);
            panel -= &before.dot(&block(&self.factor, start..end, 0..start).t());
            for mut row in panel.outer_iter_mut() {
                for j in 0..end - start {
                    let sum: f64 = (0..j).map(|i| row[i] * own[[j, i]]).sum();
                    row[j] = (row[j] - sum) / own[[j, j]];
                }
            }
        }
        for (i, &column) in self.order.iter().enumerate() {
            rows.column_mut(column).assign(&ordered.column(i));
        }
    }
}

impl OutputError {
    /// From the importance of each column, the mean square of what it meets, as if no two columns
    /// went together. All columns count alike if none has any importance.
    ///
    /// # Errors
    /// When one is not a finite number from 0 on.
    pub fn of_importance(importance: &[f32]) -> Result<Self, WeightError> {
        let bad = |value: &f32| !value.is_finite() || *value < 0.0;
        if let Some(column) = importance.iter().position(bad) {
            let value = importance.get(column).copied().unwrap_or_default();
            return Err(WeightError::Importance { column, value });
        }
        Ok(Self::diagonal(importance.iter().copied().map(f64::from).collect()))
    }

    fn diagonal(mut sums: Vec<f64>) -> Self {
        if sums.iter().all(|sum| *sum == 0.0) {
            sums.fill(1.0);
        }
        Self { form: Form::Diagonal(sums), unit: 1.0 }
    }

    /// From what the matrix is multiplied with. When too few rows were counted to tell from
    /// chance how columns go together, each counts by itself. Takes memory for six times the
    /// numbers of the Gram matrix.
    ///
    /// # Errors
    /// When the sums are so large that they cannot be computed with.
    pub fn of_gram(gram: &Gram) -> Result<Self, WeightError> {
        let columns = gram.columns();
        let sums = gram.diagonal();
        let mean = sums.iter().sum::<f64>() / columns.max(1) as f64;
        if mean == 0.0 {
            return Ok(Self::diagonal(sums));
        }
        if chance(gram, &sums) > MOST_CHANCE {
            return Ok(Self::diagonal(sums));
        }
        let full = Full::new(&sums, mean, &|i, j| gram.at(i, j))?;
        Ok(Self { form: Form::Full(full), unit: mean })
    }

    /// The sums of products of the outputs of `rows` `[n, K]`, `[n, n]`, up to the factor.
    pub(super) fn products(&self, rows: &Array2<f64>) -> Array2<f64> {
        match &self.form {
            Form::Diagonal(sums) => {
                let mut weighed = rows.clone();
                for mut row in weighed.outer_iter_mut() {
                    row.iter_mut().zip(sums).for_each(|(value, sum)| *value *= sum);
                }
                weighed.dot(&rows.t())
            }
            Form::Full(full) => {
                let ordered = rows.select(Axis(1), &full.order);
                ordered.dot(&full.matrix).dot(&ordered.t())
            }
        }
    }

    /// Replaces each of `rows` `[n, K]` by row G⁻¹, where G is the Gram matrix, damped.
    pub(super) fn solve(&self, rows: &mut Array2<f64>) {
        *rows /= self.unit;
        match &self.form {
            Form::Diagonal(sums) => {
                for mut row in rows.outer_iter_mut() {
                    for (value, sum) in row.iter_mut().zip(sums) {
                        *value = if *sum > 0.0 { *value / sum } else { 0.0 };
                    }
                }
            }
            Form::Full(full) => full.solve(rows),
        }
    }

    /// Columns of the matrices that it measures.
    pub fn columns(&self) -> usize {
        match &self.form {
            Form::Diagonal(sums) => sums.len(),
            Form::Full(full) => full.order.len(),
        }
    }
}

/// Replaces the lower triangle of the symmetric matrix `a` `[n, n]` by its Cholesky factor L with
/// a = L Lᵀ; what is above the diagonal is left undefined. Every element is computed in one fixed
/// order. The error is the column where the matrix is not positive.
fn cholesky(a: &mut [f64], n: usize) -> Result<(), usize> {
    let mut transposed = Vec::new();
    for start in (0..n).step_by(PANEL) {
        let width = PANEL.min(n - start);
        let (above, below) = a.split_at_mut((start + width) * n);
        let square = &mut above[start * n..];
        for i in 0..width {
            for j in 0..=i {
                let (row, other) = (i * n + start, j * n + start);
                let sum: f64 = (0..j).map(|k| square[row + k] * square[other + k]).sum();
                let rest = square[row + j] - sum;
                square[row + j] = if i > j {
                    rest / square[other + j]
                } else if rest > 0.0 && rest.is_finite() {
                    rest.sqrt()
                } else {
                    return Err(start + i);
                };
            }
        }
        let square = &*square;
        below.par_chunks_mut(n).for_each(|row| {
            let row = &mut row[start..start + width];
            for j in 0..width {
                let other = &square[j * n + start..][..j + 1];
                let sum: f64 = row.iter().zip(&other[..j]).map(|(a, b)| a * b).sum();
                row[j] = (row[j] - sum) / other[j];
            }
        });
        // The rest loses the product of these columns with themselves.
        let first = start + width;
        let rest = n - first;
        transposed.clear();
        transposed.resize(width * rest, 0.0);
        transposed.par_chunks_mut(rest.max(1)).enumerate().for_each(|(k, out)| {
            for (out, row) in out.iter_mut().zip(below.chunks_exact(n)) {
                *out = row[start + k];
            }
        });
        let transposed = &transposed;
        below.par_chunks_mut(n * 8).enumerate().for_each(|(block, rows)| {
            let count = rows.len() / n;
            let last = block * 8 + count;
            for tile in (0..last).step_by(TILE) {
                for (index, row) in rows.chunks_exact_mut(n).enumerate() {
                    let end = (block * 8 + index + 1).min(tile + TILE);
                    if tile >= end {
                        continue;
                    }
                    let (done, changed) = row.split_at_mut(first);
                    let factors = &done[start..];
                    let changed = &mut changed[tile..end];
                    let column = |k: usize| &transposed[k * rest + tile..][..end - tile];
                    // Only the last panel is no multiple of four, and nothing is below it.
                    for k in (0..width).step_by(4) {
                        let [a, b, c, d] = [0, 1, 2, 3].map(|i| column(k + i));
                        let [e, f, g, h] = [0, 1, 2, 3].map(|i| factors[k + i]);
                        for (i, value) in changed.iter_mut().enumerate() {
                            *value -= e * a[i] + f * b[i] + g * c[i] + h * d[i];
                        }
                    }
                }
            }
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Inputs of which a part is `shared` by the columns of a row.
    fn gram(columns: usize, rows: usize, shared: f32) -> Gram {
        let mut gram = Gram::new(columns).unwrap();
        let values = firesteel_testing::Numbers::new(1).units((columns + 1) * rows);
        let (own, common) = values.split_at(columns * rows);
        let own = own.chunks(columns).zip(common);
        let inputs: Vec<f32> = own
            .flat_map(|(row, common)| row.iter().map(move |own| own + shared * common))
            .collect();
        gram.observe(&inputs).unwrap();
        gram
    }

    #[test]
    fn what_may_be_chance_is_not_believed() {
        let diagonal = |columns, rows, shared| {
            let error = OutputError::of_gram(&gram(columns, rows, shared)).unwrap();
            matches!(error.form, Form::Diagonal(_))
        };
        assert!(diagonal(96, 48, 0.0), "half as many rows as columns tell nothing of chance");
        assert!(diagonal(96, 960, 0.0));
        assert!(!diagonal(96, 960, 0.5));
        assert!(!diagonal(96, 48, 1.0));
        let share = |rows, shared| {
            let gram = gram(96, rows, shared);
            chance(&gram, &gram.diagonal())
        };
        assert!(share(48, 0.0) > 0.9, "{}", share(48, 0.0));
        assert!(share(48, 1.0) < 0.1, "{}", share(48, 1.0));
        assert!(share(960, 0.3) < 0.5 * share(96, 0.3));
    }

    #[test]
    fn the_factor_gives_the_form_back() {
        for columns in [1, 2, PANEL - 1, PANEL, PANEL + 1, 2 * PANEL + 3, TILE + PANEL + 70] {
            let gram = gram(columns, 2 * columns + 2, 2.0);
            let error = OutputError::of_gram(&gram).unwrap();
            assert_eq!(error.columns(), columns);
            let Form::Full(full) = &error.form else { unreachable!() };
            let sums: Vec<f64> = full.order.iter().map(|&i| gram.at(i, i)).collect();
            assert!(sums.is_sorted_by(|a, b| a >= b));
            let change: Vec<f64> = (0..columns).map(|i| ((i * 31 % 17) as f64) - 8.0).collect();
            let direct: f64 = (0..columns)
                .map(|i| {
                    let row = full.matrix.row(i);
                    change[i] * row.iter().zip(&change).map(|(m, e)| m * e).sum::<f64>()
                })
                .sum();
            let factored: f64 = (0..columns)
                .map(|j| {
                    let row = full.factor.row(j);
                    row.iter().zip(&change).take(j + 1).map(|(r, e)| r * e).sum::<f64>().powi(2)
                })
                .sum();
            let mut solved = Array2::zeros((2, columns));
            for (i, &column) in full.order.iter().enumerate() {
                let row = full.matrix.row(i);
                let product: f64 = row.iter().zip(&change).map(|(m, e)| m * e).sum();
                solved[[0, column]] = error.unit * product;
                solved[[1, column]] = -2.0 * error.unit * product;
            }
            error.solve(&mut solved);
            for (&column, change) in full.order.iter().zip(&change) {
                assert!((solved[[0, column]] - change).abs() < 1e-6, "{columns}");
                assert!((solved[[1, column]] + 2.0 * change).abs() < 1e-6, "{columns}");
            }
            assert!((direct - factored).abs() < 1e-9 * direct, "{columns}: {direct} {factored}");
        }
    }

    #[test]
    fn columns_without_inputs_and_no_inputs_at_all_have_a_measure() {
        let mut gram = Gram::new(3).unwrap();
        assert!(matches!(
            OutputError::of_gram(&gram).unwrap().form,
            Form::Diagonal(sums) if sums == [1.0; 3]
        ));
        gram.observe(&[1.0, 0.0, 2.0]).unwrap();
        let Form::Full(full) = OutputError::of_gram(&gram).unwrap().form else { unreachable!() };
        assert_eq!(full.order, [2, 0, 1]);
        assert!(full.factor.iter().all(|value| value.is_finite()));
    }

    #[test]
    fn importances_that_are_none_are_refused() {
        for value in [-1.0, f32::NAN, f32::INFINITY] {
            let error = OutputError::of_importance(&[1.0, value]).unwrap_err();
            assert!(matches!(error, WeightError::Importance { column: 1, .. }));
        }
    }
}
