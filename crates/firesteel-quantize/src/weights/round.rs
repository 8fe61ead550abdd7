use super::output_error::{Form, Full};
use super::{OutputError, QuantizedMatrix, WeightBits, WeightError, check};
use rayon::prelude::*;

/// Sums that are made at once.
const LANES: usize = 8;
/// Scales that a row is rounded with to choose one.
const CANDIDATES: usize = 4;
/// Rows whose candidates fill the lanes.
const TOGETHER: usize = LANES / CANDIDATES;
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
    let round_rows = |block: &[f32]| -> Vec<Row> {
        match &error.form {
            Form::Diagonal(sums) => block
                .chunks(columns.max(1))
                .map(|row| {
                    let weights: Vec<f64> = row.iter().copied().map(f64::from).collect();
                    let scale = search(&weights, sums, bits, Reach::apart(bits));
                    Row { codes: rounded(&weights, scale, bits), scale }
                })
                .collect(),
            Form::Full(full) => compensated(block, full, bits),
        }
    };
    let blocks: Vec<Vec<Row>> =
        values.par_chunks(LANES.saturating_mul(columns).max(1)).map(round_rows).collect();
    let mut codes = Vec::with_capacity(values.len());
    let mut scales = Vec::with_capacity(rows);
    for row in blocks.into_iter().flatten() {
        codes.extend_from_slice(&row.codes);
        scales.push(row.scale);
    }
    // Rows without columns have scales too.
    scales.resize(rows, f32::MIN_POSITIVE);
    Ok(QuantizedMatrix { bits, rows, columns, codes, scales })
}

/// A rounded row.
struct Row {
    codes: Vec<i8>,
    scale: f32,
}

/// The whole number next to `value` within the range of codes, ties to even.
#[inline(always)]
fn code(value: f64, largest: f64) -> f64 {
    // Adding it leaves no bits behind the point.
    const SHIFT: f64 = 6_755_399_441_055_744.0;
    (value.clamp(-largest, largest) + SHIFT) - SHIFT
}

/// What becomes of a scale that is stored.
fn stored(scale: f64) -> f32 {
    (scale as f32).clamp(f32::MIN_POSITIVE, f32::MAX)
}

fn rounded(weights: &[f64], scale: f32, bits: WeightBits) -> Vec<i8> {
    let (inverse, largest) = (1.0 / f64::from(scale), f64::from(bits.largest()));
    weights.iter().map(|weight| code(weight * inverse, largest) as i8).collect()
}

/// The scale of least Σ d (w − ŵ)² among some around the one that plain rounding takes, that one
/// included, and then fitted to its codes as long as the error falls.
fn search(weights: &[f64], sums: &[f64], bits: WeightBits, reach: Reach) -> f32 {
    let largest = f64::from(bits.largest());
    let plain = weights.iter().fold(0f64, |most, weight| most.max(weight.abs())) / largest;
    // The error, and the scale that fits the codes best.
    let judge = |scale: f32| {
        let (scale, inverse) = (f64::from(scale), 1.0 / f64::from(scale));
        let (mut error, mut product, mut square) = (0.0, 0.0, 0.0);
        for (weight, sum) in weights.iter().zip(sums) {
            let code = code(weight * inverse, largest);
            error += sum * (weight - code * scale).powi(2);
            product += sum * weight * code;
            square += sum * code * code;
        }
        (error, if product > 0.0 { stored(product / square) } else { stored(scale) })
    };
    let mut best = stored(plain);
    let (mut error, mut fitted) = judge(best);
    for step in 0..reach.steps {
        let share = step as f64 / reach.steps as f64;
        let scale = stored(plain * (reach.first + (reach.last - reach.first) * share));
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
struct Reach {
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
    fn together(bits: WeightBits) -> Self {
        match bits {
            WeightBits::Four => Self { first: 1.0, last: 0.4, steps: 32 },
            WeightBits::Eight => Self { first: 1.0, last: 0.8, steps: 32 },
        }
    }
}

/// Factors of the scale that is best for the columns apart.
fn candidates(bits: WeightBits) -> [f64; CANDIDATES] {
    match bits {
        WeightBits::Four => [0.88, 0.96, 1.04, 1.12],
        WeightBits::Eight => [0.96, 0.99, 1.0, 1.02],
    }
}

/// Σ_i row_i × lanes_i of every lane.
#[inline(always)]
fn dot(row: &[f64], lanes: &[[f64; LANES]]) -> [f64; LANES] {
    let mut sums = [0f64; LANES];
    for (value, lanes) in row.iter().zip(lanes) {
        for (sum, lane) in sums.iter_mut().zip(lanes) {
            *sum += value * lane;
        }
    }
    sums
}

/// Rounds up to as many rows as there are lanes.
fn compensated(block: &[f32], full: &Full, bits: WeightBits) -> Vec<Row> {
    let columns = full.order.len();
    // From here on the columns are in the order of the form.
    let ordered: Vec<Vec<f64>> = block
        .chunks(columns)
        .map(|row| full.order.iter().map(|&column| f64::from(row[column])).collect())
        .collect();
    let sums: Vec<f64> = (0..columns).map(|i| full.matrix_row(i)[i]).collect();
    let mut rows: Vec<Fitted<'_>> = Vec::with_capacity(ordered.len());
    for pair in ordered.chunks(TOGETHER) {
        rows.extend(nearest_planes(pair, &sums, full, bits));
    }
    let lanes = |value: &dyn Fn(&Fitted<'_>, usize) -> f64| -> Vec<[f64; LANES]> {
        (0..columns)
            .map(|i| std::array::from_fn(|lane| rows.get(lane).map_or(0.0, |row| value(row, i))))
            .collect()
    };
    let (weights, codes) = (lanes(&|row, i| row.weights[i]), lanes(&|row, i| row.codes[i]));
    for i in 0..columns {
        let row_of_form = full.matrix_row(i);
        let (of_weights, of_codes) = (dot(row_of_form, &weights), dot(row_of_form, &codes));
        for (row, (weight, code)) in rows.iter_mut().zip(of_weights.into_iter().zip(of_codes)) {
            row.weights_by_form.push(weight);
            row.codes_by_form.push(code);
        }
    }
    rows.into_iter().map(|row| row.finish(full, bits)).collect()
}

/// The best of the candidates for each row of `pair`.
fn nearest_planes<'a>(
    pair: &'a [Vec<f64>],
    sums: &[f64],
    full: &Full,
    bits: WeightBits,
) -> Vec<Fitted<'a>> {
    let largest = f64::from(bits.largest());
    let factors = candidates(bits);
    let bases: Vec<f32> =
        pair.iter().map(|weights| search(weights, sums, bits, Reach::together(bits))).collect();
    let scales: [f32; LANES] = std::array::from_fn(|lane| {
        let base = bases.get(lane / CANDIDATES).copied().unwrap_or(f32::MIN_POSITIVE);
        stored(f64::from(base) * factors[lane % CANDIDATES])
    });
    let steps = scales.map(f64::from);
    let mut errors = [0f64; LANES];
    let mut changes: Vec<[f64; LANES]> = Vec::with_capacity(full.order.len());
    let mut codes: Vec<[f64; LANES]> = Vec::with_capacity(full.order.len());
    for j in 0..full.order.len() {
        let row = full.factor_row(j);
        let carried = dot(row, &changes);
        let own = row[j];
        let (mut change, mut chosen) = ([0f64; LANES], [0f64; LANES]);
        for lane in 0..LANES {
            let weight = pair.get(lane / CANDIDATES).map_or(0.0, |weights| weights[j]);
            chosen[lane] = code((weight + carried[lane] / own) / steps[lane], largest);
            change[lane] = weight - chosen[lane] * steps[lane];
            errors[lane] += (carried[lane] + change[lane] * own).powi(2);
        }
        changes.push(change);
        codes.push(chosen);
    }
    let best = |first: usize| {
        let lanes = first..first + CANDIDATES;
        lanes.reduce(|best, lane| if errors[lane] < errors[best] { lane } else { best })
    };
    pair.iter()
        .enumerate()
        .map(|(index, weights)| {
            let lane = best(index * CANDIDATES).unwrap_or_default();
            Fitted {
                weights,
                codes: codes.iter().map(|codes| codes[lane]).collect(),
                scale: scales[lane],
                weights_by_form: Vec::with_capacity(weights.len()),
                codes_by_form: Vec::with_capacity(weights.len()),
            }
        })
        .collect()
}

/// A row while its codes are changed, in the order of the form M.
struct Fitted<'a> {
    weights: &'a [f64],
    codes: Vec<f64>,
    scale: f32,
    /// w M.
    weights_by_form: Vec<f64>,
    /// q M for the codes q.
    codes_by_form: Vec<f64>,
}

impl Fitted<'_> {
    /// The scale of least error for the codes: w M qᵀ / q M qᵀ.
    fn fit(&mut self) {
        let by_codes = |values: &[f64]| -> f64 {
            self.codes.iter().zip(values).map(|(code, value)| code * value).sum()
        };
        let (product, square) = (by_codes(&self.weights_by_form), by_codes(&self.codes_by_form));
        if product > 0.0 && square > 0.0 {
            self.scale = stored(product / square);
        }
    }

    /// Takes each code to its best value for the others; says whether one has changed.
    fn sweep(&mut self, full: &Full, largest: f64) -> bool {
        let scale = f64::from(self.scale);
        let mut changed = false;
        for j in 0..self.codes.len() {
            let row = full.matrix_row(j);
            let gradient = self.weights_by_form[j] - scale * self.codes_by_form[j];
            let best = code(self.codes[j] + gradient / (scale * row[j]), largest);
            let change = best - self.codes[j];
            if change != 0.0 {
                changed = true;
                self.codes[j] = best;
                for (sum, value) in self.codes_by_form.iter_mut().zip(row) {
                    *sum += change * value;
                }
            }
        }
        changed
    }

    fn finish(mut self, full: &Full, bits: WeightBits) -> Row {
        let largest = f64::from(bits.largest());
        for _ in 0..FITS {
            self.fit();
            for _ in 0..SWEEPS {
                if !self.sweep(full, largest) {
                    break;
                }
            }
        }
        self.fit();
        let mut codes = vec![0; self.codes.len()];
        for (&column, code) in full.order.iter().zip(&self.codes) {
            codes[column] = *code as i8;
        }
        Row { codes, scale: self.scale }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Gram, round_nearest};
    use super::*;

    /// Rows of normal-like numbers.
    fn matrix(rows: usize, columns: usize, seed: u64) -> Vec<f32> {
        let mut state = seed;
        let mut uniform = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
        };
        (0..rows * columns).map(|_| uniform() + uniform() + uniform()).collect()
    }

    /// Inputs whose columns go together and differ in size.
    fn gram(columns: usize) -> Gram {
        let hidden = columns / 2 + 1;
        let mixing = matrix(columns, hidden, 3);
        let mut gram = Gram::new(columns).unwrap();
        for row in matrix(4 * columns, hidden, 4).chunks(hidden) {
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
                let values = matrix(rows, columns, 5);
                let round = |error: &OutputError| {
                    let matrix = round_for_output(&values, rows, columns, bits, error).unwrap();
                    let most = matrix.codes.iter().map(|code| code.unsigned_abs()).max();
                    assert!(most <= Some(bits.largest().unsigned_abs()));
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
    fn threads_and_neighbours_do_not_matter() {
        let (rows, columns) = (21, 33);
        let error = OutputError::of_gram(&gram(columns)).unwrap();
        let values = matrix(rows, columns, 6);
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
            let matrix = round_for_output(&extremes, 3, 3, WeightBits::Four, error).unwrap();
            assert!(matrix.values().iter().all(|value| value.is_finite()));
            assert_eq!(matrix.codes[..3], [0; 3]);
            assert!(matrix.scales.iter().all(|scale| *scale > 0.0));
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
