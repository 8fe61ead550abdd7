use super::output_error::{Form, Full, PANEL, block};
use super::{OutputError, QuantizedMatrix, WeightBits, WeightError, check};
use ndarray::{Array2, ArrayView1, ArrayView2, Axis};
use rayon::prelude::*;

/// Rows that are rounded together, so that the form is read less often.
pub(super) const TOGETHER: usize = 128;
/// Scales that a row is rounded with to choose one.
const CANDIDATES: usize = 4;
/// Changes of a row's codes within a panel that are made one by one.
const FEW: usize = 8;
/// How often the scale is fitted and the codes are gone through again.
const FITS: usize = 2;
/// How often all codes of a row are gone through with one scale.
const SWEEPS: usize = 4;

/// Rounds so that the error of the output, as `error` measures it, becomes small.
///
/// With a measure from a Gram matrix the columns are rounded one after the other, those that meet
/// most first, and each makes up for the errors of those before it (Frantar et al., GPTQ, 2022; the
/// same as Babai's nearest plane). A few scales are tried so for each row. The codes of the best
/// one are then changed one by one as long as that lowers the error, in turn with the scale. With
/// a measure from importances the scale alone is searched. A row depends on nothing but itself, so
/// the result is the same on any number of threads.
///
/// # Errors
/// When the values are not `rows` × `columns` many, not all finite, or `error` is of another
/// number of columns.
pub fn round_for_output(
    values: &[f32],
    rows: usize,
    columns: usize,
    bits: WeightBits,
    error: &OutputError,
) -> Result<QuantizedMatrix, WeightError> {
    check(values, rows, columns)?;
    if error.columns() != columns {
        return Err(WeightError::Columns { columns, measured: error.columns() });
    }
    let blocks: Vec<Vec<Row>> = values
        .par_chunks(TOGETHER.saturating_mul(columns).max(1))
        .map(|block| round_rows(block, bits, error))
        .collect();
    Ok(joined(blocks, rows, columns, bits))
}

/// The matrix of rounded rows, of which there are `rows`, or none of rows without columns.
pub(super) fn joined(
    blocks: Vec<Vec<Row>>,
    rows: usize,
    columns: usize,
    bits: WeightBits,
) -> QuantizedMatrix {
    let mut codes = Vec::with_capacity(rows.saturating_mul(columns));
    let mut scales = Vec::with_capacity(rows);
    for row in blocks.into_iter().flatten() {
        codes.extend_from_slice(&row.codes);
        scales.push(row.scale);
    }
    // Rows without columns have scales too.
    scales.resize(rows, f32::MIN_POSITIVE);
    QuantizedMatrix { bits, rows, columns, codes, scales }
}

/// A rounded row.
pub(super) struct Row {
    pub(super) codes: Vec<i8>,
    pub(super) scale: f32,
}

/// Rounds some rows, each by itself.
pub(super) fn round_rows(values: &[f32], bits: WeightBits, error: &OutputError) -> Vec<Row> {
    match &error.form {
        Form::Diagonal(sums) => values
            .chunks(sums.len().max(1))
            .map(|row| {
                let weights: Vec<f64> = row.iter().copied().map(f64::from).collect();
                let scale = search(&weights, sums, bits, Reach::apart(bits));
                Row { codes: rounded(&weights, scale, bits), scale }
            })
            .collect(),
        Form::Full(full) => compensated(values, full, bits),
    }
}

/// The whole number next to `value` within the range of codes, ties to even.
#[inline(always)]
pub(super) fn code(value: f64, [least, largest]: [f64; 2]) -> f64 {
    // Adding it leaves no bits behind the point.
    const SHIFT: f64 = 6_755_399_441_055_744.0;
    (value.clamp(least, largest) + SHIFT) - SHIFT
}

/// What becomes of a scale that is stored: its product with every code is finite.
pub(super) fn stored(scale: f64, [_, largest]: [f64; 2]) -> f32 {
    (scale as f32).clamp(f32::MIN_POSITIVE, (f64::from(f32::MAX) / (largest + 1.0)) as f32)
}

fn rounded(weights: &[f64], scale: f32, bits: WeightBits) -> Vec<i8> {
    let (inverse, codes) = (1.0 / f64::from(scale), bits.codes().map(f64::from));
    weights.iter().map(|weight| code(weight * inverse, codes) as i8).collect()
}

/// The scale of least Σ d (w − ŵ)² among some around the one that plain rounding takes, that one
/// included, and then fitted to its codes as long as the error falls.
pub(super) fn search(weights: &[f64], sums: &[f64], bits: WeightBits, reach: Reach) -> f32 {
    let codes = bits.codes().map(f64::from);
    let plain = weights.iter().fold(0f64, |most, weight| most.max(weight.abs())) / codes[1];
    // The error, and the scale that fits the codes best.
    let judge = |scale: f32| {
        let (scale, inverse) = (f64::from(scale), 1.0 / f64::from(scale));
        let (mut error, mut product, mut square) = (0.0, 0.0, 0.0);
        for (weight, sum) in weights.iter().zip(sums) {
            let code = code(weight * inverse, codes);
            error += sum * (weight - code * scale).powi(2);
            product += sum * weight * code;
            square += sum * code * code;
        }
        (error, if product > 0.0 { stored(product / square, codes) } else { stored(scale, codes) })
    };
    let mut best = stored(plain, codes);
    let (mut error, mut fitted) = judge(best);
    for step in 0..reach.steps {
        let share = step as f64 / reach.steps as f64;
        let scale = stored(plain * (reach.first + (reach.last - reach.first) * share), codes);
        let (other, fit) = judge(scale);
        if other < error {
            (best, error, fitted) = (scale, other, fit);
        }
    }
    for _ in 0..SWEEPS {
        let (other, fit) = judge(fitted);
        if other >= error {
            break;
        }
        (best, error, fitted) = (fitted, other, fit);
    }
    best
}

/// Scales that are tried, as factors of the one that plain rounding takes.
#[derive(Clone, Copy)]
pub(super) struct Reach {
    first: f64,
    last: f64,
    steps: usize,
}

impl Reach {
    /// Where each column is rounded to nearest. Clipping pays where a step is coarse. Where it is
    /// fine, the columns that count most can fall next to codes, above as well as below.
    fn apart(bits: WeightBits) -> Self {
        match bits {
            WeightBits::Four => Self { first: 1.0, last: 0.4, steps: 64 },
            WeightBits::Eight => Self { first: 1.25, last: 0.95, steps: 96 },
        }
    }

    /// Where columns make up for each other, and none falls where it would alone.
    pub(super) fn together(bits: WeightBits) -> Self {
        match bits {
            WeightBits::Four => Self { first: 1.0, last: 0.4, steps: 32 },
            WeightBits::Eight => Self { first: 1.0, last: 0.8, steps: 32 },
        }
    }
}

/// Factors of the scale that is best for the columns apart.
pub(super) fn candidates(bits: WeightBits) -> [f64; CANDIDATES] {
    match bits {
        WeightBits::Four => [0.88, 0.96, 1.04, 1.12],
        WeightBits::Eight => [0.96, 0.99, 1.0, 1.02],
    }
}

/// Rounds some rows.
fn compensated(values: &[f32], full: &Full, bits: WeightBits) -> Vec<Row> {
    let columns = full.order.len();
    // From here on the columns are in the order of the form.
    let weights = Array2::from_shape_fn((values.len() / columns.max(1), columns), |(row, i)| {
        f64::from(values[row * columns + full.order[i]])
    });
    let (codes, scales) = nearest_planes(&weights, full, bits);
    let mut rows = Fitted {
        full,
        weights_by_form: weights.dot(&full.matrix),
        codes_by_form: codes.dot(&full.matrix),
        codes,
        scales,
    };
    rows.settle(bits.codes().map(f64::from));
    let row = |(codes, scale): (ArrayView1<'_, f64>, &f32)| {
        let mut row = Row { codes: vec![0; columns], scale: *scale };
        for (&column, code) in full.order.iter().zip(codes) {
            row.codes[column] = *code as i8;
        }
        row
    };
    rows.codes.outer_iter().zip(&rows.scales).map(row).collect()
}

/// The codes of each row with the best of the candidates for its scale, and that scale.
fn nearest_planes(weights: &Array2<f64>, full: &Full, bits: WeightBits) -> (Array2<f64>, Vec<f32>) {
    let (rows, columns) = weights.dim();
    let range = bits.codes().map(f64::from);
    let sums: Vec<f64> = full.matrix.diag().to_vec();
    let factors = candidates(bits);
    let mut scales = Vec::with_capacity(rows * CANDIDATES);
    for row in weights.outer_iter() {
        let base = search(&row.to_vec(), &sums, bits, Reach::together(bits));
        scales.extend(factors.map(|factor| stored(f64::from(base) * factor, range)));
    }
    // One line for each row and candidate.
    let lines = scales.len();
    let mut changes = Array2::<f64>::zeros((lines, columns));
    let mut codes = Array2::<f64>::zeros((lines, columns));
    let mut errors = vec![0f64; lines];
    let mut factor: Vec<f64> = Vec::new();
    for start in (0..columns).step_by(PANEL) {
        let end = columns.min(start + PANEL);
        let width = end - start;
        // What the columns before the panel leave to those in it.
        let before = block(&full.factor, start..end, 0..start);
        let mut carried = block(&changes, 0..lines, 0..start).dot(&before.t());
        // Row j holds what column j of the panel leaves to the others.
        factor.clear();
        factor.extend(block(&full.factor, start..end, start..end).t().iter());
        for (line, mut carried) in carried.outer_iter_mut().enumerate() {
            let step = f64::from(scales[line]);
            for j in 0..width {
                let (left, own) = (carried[j], factor[j * width + j]);
                let weight = weights[[line / CANDIDATES, start + j]];
                let code = code((weight + left / own) / step, range);
                let change = weight - code * step;
                errors[line] += (left + change * own).powi(2);
                codes[[line, start + j]] = code;
                changes[[line, start + j]] = change;
                let others = &factor[j * width..][..width];
                for (carried, factor) in carried.iter_mut().zip(others).skip(j + 1) {
                    *carried += change * factor;
                }
            }
        }
    }
    let best = |row: usize| {
        let lines = row * CANDIDATES..(row + 1) * CANDIDATES;
        lines.reduce(|best, line| if errors[line] < errors[best] { line } else { best })
    };
    let chosen: Vec<usize> = (0..rows).filter_map(best).collect();
    (codes.select(Axis(0), &chosen), chosen.iter().map(|line| scales[*line]).collect())
}

/// Rows while their codes are changed, in the order of the form M.
struct Fitted<'a> {
    full: &'a Full,
    codes: Array2<f64>,
    scales: Vec<f32>,
    /// w M for the weights w.
    weights_by_form: Array2<f64>,
    /// q M for the codes q.
    codes_by_form: Array2<f64>,
}

impl Fitted<'_> {
    /// Changes scales and codes in turn.
    fn settle(&mut self, range: [f64; 2]) {
        for _ in 0..FITS {
            self.fit(range);
            let mut changing: Vec<usize> = (0..self.scales.len()).collect();
            for _ in 0..SWEEPS {
                changing = self.sweep(&changing, range);
            }
        }
        self.fit(range);
    }

    /// The scale of least error for the codes of each row: w M qᵀ / q M qᵀ.
    fn fit(&mut self, range: [f64; 2]) {
        for (row, scale) in self.scales.iter_mut().enumerate() {
            let codes = self.codes.row(row);
            let product = self.weights_by_form.row(row).dot(&codes);
            let square = self.codes_by_form.row(row).dot(&codes);
            if product > 0.0 && square > 0.0 {
                *scale = stored(product / square, range);
            }
        }
    }

    /// Takes each code of the `rows` to its best value for the others, one after the other; the rows
    /// in which one has changed.
    fn sweep(&mut self, rows: &[usize], range: [f64; 2]) -> Vec<usize> {
        let matrix = &self.full.matrix;
        let columns = matrix.ncols();
        let mut any = vec![false; rows.len()];
        let mut gradient = [0f64; PANEL];
        // Rows with many changes in a panel, and the changes.
        let (mut many, mut changes) = (Vec::new(), Vec::new());
        for start in (0..columns).step_by(PANEL) {
            let end = columns.min(start + PANEL);
            let width = end - start;
            let own = block(matrix, start..end, start..end);
            many.clear();
            changes.clear();
            for (&row, any) in rows.iter().zip(&mut any) {
                let scale = f64::from(self.scales[row]);
                let of_weights = block(&self.weights_by_form, row..row + 1, start..end);
                let of_codes = block(&self.codes_by_form, row..row + 1, start..end);
                for ((gradient, weight), code) in gradient.iter_mut().zip(of_weights).zip(of_codes)
                {
                    *gradient = weight - scale * code;
                }
                let mut changed = [0f64; PANEL];
                let mut count = 0;
                for j in 0..width {
                    let old = self.codes[[row, start + j]];
                    let best = code(old + gradient[j] / (scale * own[[j, j]]), range);
                    let change = best - old;
                    if change != 0.0 {
                        self.codes[[row, start + j]] = best;
                        changed[j] = change;
                        count += 1;
                        for (gradient, value) in gradient.iter_mut().zip(own.row(j)) {
                            *gradient -= scale * change * value;
                        }
                    }
                }
                *any |= count > 0;
                if count > FEW {
                    many.push(row);
                    changes.extend_from_slice(&changed[..width]);
                    continue;
                }
                let mut by_form = self.codes_by_form.row_mut(row);
                for (j, change) in changed.iter().enumerate().filter(|(_, change)| **change != 0.0)
                {
                    by_form.scaled_add(*change, &matrix.row(start + j));
                }
            }
            let panel = block(matrix, start..end, 0..columns);
            if let Ok(changes) = ArrayView2::from_shape((many.len(), width), &changes) {
                for (row, change) in many.iter().zip(changes.dot(&panel).outer_iter()) {
                    self.codes_by_form.row_mut(*row).scaled_add(1.0, &change);
                }
            }
        }
        rows.iter().zip(any).filter_map(|(row, any)| any.then_some(*row)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Gram, numbers, round_nearest};
    use super::*;

    /// Inputs whose columns go together and differ in size.
    fn gram(columns: usize) -> Gram {
        let hidden = columns / 2 + 1;
        let mixing = numbers(columns * hidden, 3);
        let mut gram = Gram::new(columns).unwrap();
        for row in numbers(4 * columns * hidden, 4).chunks(hidden) {
            let inputs: Vec<f32> = mixing
                .chunks(hidden)
                .enumerate()
                .map(|(column, mixing)| {
                    let sum: f32 = mixing.iter().zip(row).map(|(a, b)| a * b).sum();
                    sum * (1.0 + (column % 5) as f32)
                })
                .collect();
            gram.observe(&inputs).unwrap();
        }
        gram
    }

    fn lost(gram: &Gram, values: &[f32], matrix: &QuantizedMatrix) -> f64 {
        let error: Vec<f32> = values.iter().zip(matrix.values()).map(|(a, b)| a - b).collect();
        gram.output_square(&error).unwrap()
    }

    #[test]
    fn each_way_is_better_than_the_plainer_one() {
        for (rows, columns) in [(1, 40), (2, 64), (9, 65), (19, 130)] {
            for bits in [WeightBits::Four, WeightBits::Eight] {
                let gram = gram(columns);
                let values = numbers(rows * columns, 5);
                let round = |error: &OutputError| {
                    let matrix = round_for_output(&values, rows, columns, bits, error).unwrap();
                    let [least, largest] = bits.codes();
                    assert!(matrix.codes.iter().all(|code| (least..=largest).contains(code)));
                    matrix
                };
                let importance: Vec<f32> = gram.diagonal().iter().map(|v| *v as f32).collect();
                let apart = |matrix: &QuantizedMatrix| -> f64 {
                    let errors = values.iter().zip(matrix.values()).map(|(a, b)| a - b);
                    let weighted = errors.zip(importance.iter().cycle());
                    weighted.map(|(error, d)| f64::from(d * error * error)).sum()
                };
                let plain = round_nearest(&values, rows, columns, bits).unwrap();
                let searched = round(&OutputError::of_importance(&importance).unwrap());
                let full = round(&OutputError::of_gram(&gram).unwrap());
                let [of_plain, of_searched] = [&plain, &searched].map(apart);
                let [together, least] = [&searched, &full].map(|m| lost(&gram, &values, m));
                let case = format!("{rows} × {columns} {bits:?}");
                assert!(of_searched <= of_plain, "{case}: {of_searched} {of_plain}");
                assert!(least < 0.5 * together, "{case}: {least} {together}");
            }
        }
    }

    #[test]
    fn all_codes_are_used() {
        // Fifteen of sixteen codes would not do.
        let columns = 40;
        let codes: Vec<i8> = (0..columns).map(|column| (column * 7 % 16) as i8 - 8).collect();
        let values: Vec<f32> = codes.iter().map(|code| 0.25 * f32::from(*code)).collect();
        let round =
            |error| round_for_output(&values, 1, columns, WeightBits::Four, &error).unwrap();
        let matrix = round(OutputError::of_importance(&[1.0; 40]).unwrap());
        assert_eq!(matrix.codes, codes);
        assert!((matrix.scales[0] - 0.25).abs() < 1e-6, "{}", matrix.scales[0]);
        // Columns that go together make up for each other, and are not what each would be alone.
        let full = OutputError::of_gram(&gram(columns)).unwrap();
        assert!(matches!(full.form, Form::Full(_)));
        let matrix = round(full);
        assert!(matrix.codes.contains(&-8) && matrix.codes.contains(&7), "{:?}", matrix.codes);
    }

    #[test]
    fn threads_and_neighbours_do_not_matter() {
        let (rows, columns) = (21, 33);
        let error = OutputError::of_gram(&gram(columns)).unwrap();
        let values = numbers(rows * columns, 6);
        let whole = round_for_output(&values, rows, columns, WeightBits::Four, &error).unwrap();
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        let alone = || round_for_output(&values, rows, columns, WeightBits::Four, &error).unwrap();
        assert_eq!(pool.install(alone), whole);
        for row in 0..rows {
            let of_row = &values[row * columns..][..columns];
            let one = round_for_output(of_row, 1, columns, WeightBits::Four, &error).unwrap();
            assert_eq!(one.codes, whole.codes[row * columns..][..columns]);
            assert_eq!(one.scales, [whole.scales[row]]);
        }
    }

    #[test]
    fn odd_matrices_have_a_result_or_an_error() {
        let full = OutputError::of_gram(&gram(3)).unwrap();
        let flat = OutputError::of_importance(&[1.0; 3]).unwrap();
        for error in [&full, &flat] {
            let extremes = [0.0, 0.0, 0.0, 1e-45, 0.0, 0.0, f32::MAX, -f32::MAX, 1.0];
            for bits in [WeightBits::Four, WeightBits::Eight] {
                let plain = round_nearest(&extremes, 3, 3, bits).unwrap();
                for matrix in [plain, round_for_output(&extremes, 3, 3, bits, error).unwrap()] {
                    assert!(matrix.values().iter().all(|value| value.is_finite()));
                    assert_eq!(matrix.codes[..3], [0; 3]);
                    assert!(matrix.scales.iter().all(|scale| *scale > 0.0));
                }
            }
            let round = |values: &[f32], rows, columns| {
                round_for_output(values, rows, columns, WeightBits::Four, error)
            };
            assert!(matches!(round(&[1.0; 4], 2, 3), Err(WeightError::Shape { .. })));
            assert!(matches!(
                round(&[1.0; 4], 2, 2),
                Err(WeightError::Columns { measured: 3, .. })
            ));
            assert!(matches!(round(&[f32::NAN; 3], 1, 3), Err(WeightError::NotFinite { .. })));
            assert!(round(&[], 0, 3).unwrap().scales.is_empty());
        }
    }
}
