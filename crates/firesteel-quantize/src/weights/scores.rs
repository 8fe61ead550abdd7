//! Rounds the matrix of queries, keys and values for the scores of attention.

use super::output_error::{Form, Full, PANEL, block};
use super::round::{Reach, Row, TOGETHER, candidates, code, joined, round_rows, search, stored};
use super::{OutputError, QuantizedMatrix, WeightBits, WeightError, check, round_for_output};
use firesteel_checkpoint::{Checkpoint, LayerKind, LayerWeights, Rope, Slot};
use firesteel_graph::{Part, Tag};
use firesteel_step::{StepSpec, rope_frequencies};
use ndarray::Array2;
use rayon::prelude::*;
use std::ops::Range;

/// Distances of a query and a key over which what they do to each other is averaged.
const DISTANCES: usize = 64;
/// Largest distance where no window says one.
const FARTHEST: usize = 4096;
/// Share of the mean that is added to what the dimensions of a head meet.
const ISOTROPIC: f64 = 0.02;

/// Where the rows of queries, keys and values lie in a matrix, and how they meet.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScoreRows {
    /// Heads of queries, whose rows come first.
    query_heads: usize,
    /// Heads of keys, whose rows come next, and of values.
    kv_heads: usize,
    /// Rows of a head.
    head_dim: usize,
    rope: Option<Rope>,
    /// Largest distance of a query and a key.
    max_distance: usize,
}

impl ScoreRows {
    /// Those of the matrix `name` of `model`; `None` when it does not make queries, keys and values, or
    /// when a norm stands between its rows and the scores (QK-norm): a norm divides the error by the
    /// length of the head, which differs from token to token, and takes away what is along the head, so
    /// that what an error of the rows does is not the product that is measured here.
    pub fn of(model: &Checkpoint, name: &str) -> Option<Self> {
        let config = model.config();
        let fused = |layer: &LayerWeights| {
            layer.get(Slot::QueryKeyValue).is_some_and(|weight| weight.name() == name)
        };
        let index = model.layers().iter().position(fused)?;
        if config.family.block().attention.qk_norm {
            return None;
        }
        let kind = *config.layer_types.get(index)?;
        let window = config.sliding_window.filter(|_| kind == LayerKind::Sliding);
        let rope = config.rope(kind);
        Some(Self {
            query_heads: config.num_attention_heads,
            kv_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
            rope,
            max_distance: window.unwrap_or(FARTHEST),
        })
    }

    /// Those of the matrix of a node of a graph of `spec`; `None` when it is not the one of queries,
    /// keys and values. Behind a matrix that makes them all stands no norm of heads.
    pub fn of_node(tag: Tag, spec: &StepSpec) -> Option<Self> {
        if tag.part != Part::QueryKeyValue {
            return None;
        }
        let layer = tag.layer?.checked_sub(spec.first_layer)?;
        let kind = spec.layers.get(layer)?.kind;
        let (rope, window) = match kind {
            LayerKind::Sliding => (spec.rope_sliding, spec.sliding_window),
            LayerKind::Full => (spec.rope_full, None),
        };
        Some(Self {
            query_heads: spec.num_attention_heads,
            kv_heads: spec.num_key_value_heads,
            head_dim: spec.head_dim,
            rope,
            max_distance: window.unwrap_or(FARTHEST),
        })
    }

    fn rows(&self) -> usize {
        (self.query_heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Query heads that share a head of keys.
    fn group(&self) -> usize {
        (self.query_heads / self.kv_heads.max(1)).max(1)
    }

    /// The mean of R Q Rᵀ over the rotations R by which a query and a key are apart: what an error
    /// in the dimensions of one of them does to the score when the products of the other's are
    /// `met`.
    fn averaged_over_rotations(&self, met: &Array2<f64>, forwards: bool) -> Array2<f64> {
        let Some(rope) = self.rope else { return met.clone() };
        let half = rope.dims / 2;
        let frequencies = rope_frequencies(rope);
        let mut mean = Array2::<f64>::zeros(met.dim());
        for index in 0..DISTANCES {
            // The golden ratio spreads them without a period.
            let distance =
                (index as f64 * 0.618_033_988_749_894_9).fract() * self.max_distance as f64;
            let sign = if forwards { 1.0 } else { -1.0 };
            let mut turned = met.clone();
            for (pair, frequency) in frequencies.iter().enumerate() {
                let angle = sign * distance * frequency;
                let (sin, cos) = angle.sin_cos();
                let (a, b) = (pair, pair + half);
                for i in 0..self.head_dim {
                    let (x, y) = (turned[[a, i]], turned[[b, i]]);
                    (turned[[a, i]], turned[[b, i]]) = (x * cos - y * sin, y * cos + x * sin);
                }
                for i in 0..self.head_dim {
                    let (x, y) = (turned[[i, a]], turned[[i, b]]);
                    (turned[[i, a]], turned[[i, b]]) = (x * cos - y * sin, y * cos + x * sin);
                }
            }
            mean += &turned;
        }
        mean / DISTANCES as f64
    }
}

/// Rounds the matrix `name` of `model`, whose values may have been changed: that of queries, keys and
/// values for the scores, the others for their outputs.
pub(super) fn round_of_model(
    model: &Checkpoint,
    name: &str,
    values: &[f32],
    columns: usize,
    bits: WeightBits,
    error: &OutputError,
) -> Result<QuantizedMatrix, WeightError> {
    match ScoreRows::of(model, name) {
        Some(scores) => round_for_scores(values, columns, bits, error, &scores),
        None => round_for_output(values, values.len() / columns.max(1), columns, bits, error),
    }
}

/// As [`round_for_output`](super::round_for_output) for the matrix of queries, keys and values: the
/// rows of a head of queries or keys are rounded together, so that the error of the scores becomes
/// small, to which each dimension adds what it meets in the other. The measure is the product of that
/// of the columns and that of the dimensions (as in attention-aware quantization: Kim et al., BoA,
/// 2024), and a number makes up for those of other columns and of other dimensions.
///
/// # Errors
/// As [`round_for_output`](super::round_for_output), and when there are other rows than `scores` says.
pub fn round_for_scores(
    values: &[f32],
    columns: usize,
    bits: WeightBits,
    error: &OutputError,
    scores: &ScoreRows,
) -> Result<QuantizedMatrix, WeightError> {
    let rows = scores.rows();
    check(values, rows, columns)?;
    if error.columns() != columns {
        return Err(WeightError::Columns { columns, measured: error.columns() });
    }
    let of_rows = |rows: Range<usize>| &values[rows.start * columns..rows.end * columns];
    let head = |index: usize| index * scores.head_dim..(index + 1) * scores.head_dim;
    let products: Vec<Array2<f64>> = (0..scores.query_heads + scores.kv_heads)
        .into_par_iter()
        .map(|index| {
            let rows = of_rows(head(index));
            error.products(&Array2::from_shape_fn((scores.head_dim, columns), |(row, column)| {
                f64::from(rows[row * columns + column])
            }))
        })
        .collect();
    let group = scores.group();
    let blocks: Vec<Vec<Row>> = (0..scores.query_heads + scores.kv_heads)
        .into_par_iter()
        .map(|index| {
            let met = match index.checked_sub(scores.query_heads) {
                None => products[scores.query_heads + index / group].clone(),
                Some(pair) => {
                    let mut sum = Array2::zeros((scores.head_dim, scores.head_dim));
                    products[pair * group..(pair + 1) * group].iter().for_each(|of| sum += of);
                    sum
                }
            };
            let mut met = scores.averaged_over_rotations(&met, index >= scores.query_heads);
            let mean = met.diag().sum() / scores.head_dim as f64;
            met.diag_mut().iter_mut().for_each(|value| *value += ISOTROPIC * mean);
            let rows = of_rows(head(index));
            match mean > 0.0 && mean.is_finite() {
                true => {
                    let sums = met.diag().to_vec();
                    let dimensions = Full::new(&sums, mean, &|i, j| met[[i, j]])?;
                    // By themselves rows can have scales that suit them better.
                    let both = round_head_rows(rows, error, &dimensions, bits);
                    let apart = round_rows(rows, bits, error);
                    let [of_both, of_apart] =
                        [&both, &apart].map(|made| score_error(rows, made, error, &dimensions));
                    Ok(if of_both <= of_apart { both } else { apart })
                }
                false => Ok(round_rows(rows, bits, error)),
            }
        })
        .collect::<Result<_, WeightError>>()?;
    let first = (scores.query_heads + scores.kv_heads) * scores.head_dim;
    let others = of_rows(first..rows)
        .par_chunks(TOGETHER.saturating_mul(columns).max(1))
        .map(|block| round_rows(block, bits, error));
    let others: Vec<Vec<Row>> = others.collect();
    Ok(joined(blocks.into_iter().chain(others).collect(), rows, columns, bits))
}

/// The error of scores that `rows` in the place of `values` make, up to a factor.
fn score_error(values: &[f32], rows: &[Row], error: &OutputError, dimensions: &Full) -> f64 {
    let columns = error.columns();
    let off = Array2::from_shape_fn((rows.len(), columns), |(row, column)| {
        let rounded = f64::from(rows[row].codes[column]) * f64::from(rows[row].scale);
        f64::from(values[row * columns + column]) - rounded
    });
    let products = error.products(&off);
    let pairs = dimensions.matrix.indexed_iter();
    pairs.map(|((i, j), met)| met * products[[dimensions.order[i], dimensions.order[j]]]).sum()
}

/// Rounds rows whose errors meet as `dimensions` says.
fn round_head_rows(
    values: &[f32],
    error: &OutputError,
    dimensions: &Full,
    bits: WeightBits,
) -> Vec<Row> {
    let columns = error.columns();
    let rows = dimensions.order.len();
    let (order, sums, full): (Vec<usize>, Vec<f64>, _) = match &error.form {
        Form::Diagonal(sums) => ((0..columns).collect(), sums.clone(), None),
        Form::Full(full) => (full.order.clone(), full.matrix.diag().to_vec(), Some(full)),
    };
    let mean = sums.iter().sum::<f64>() / columns.max(1) as f64;
    // Columns in the order of the one form, rows in that of the other.
    let weights = Array2::from_shape_fn((rows, columns), |(row, i)| {
        f64::from(values[dimensions.order[row] * columns + order[i]])
    });
    let range = bits.codes().map(f64::from);
    let bases: Vec<f32> = weights
        .outer_iter()
        .map(|row| search(&row.to_vec(), &sums, bits, Reach::together(bits)))
        .collect();
    // Row r holds what dimension r leaves to the others.
    let leaves: Vec<f64> = dimensions.factor.t().iter().copied().collect();
    let mut best: Option<(f64, Array2<f64>, Vec<f32>)> = None;
    for factor in candidates(bits) {
        let scales: Vec<f32> =
            bases.iter().map(|base| stored(f64::from(*base) * factor, range)).collect();
        let mut codes = Array2::<f64>::zeros((rows, columns));
        let mut changes = Array2::<f64>::zeros((rows, columns));
        let mut lost = 0.0;
        for start in (0..columns).step_by(PANEL) {
            let end = columns.min(start + PANEL);
            let width = end - start;
            let (mut carried, within) = match full {
                Some(full) => {
                    let before = block(&full.factor, start..end, 0..start);
                    let own = block(&full.factor, start..end, start..end);
                    let carried = block(&changes, 0..rows, 0..start).dot(&before.t());
                    (carried, own.t().iter().copied().collect())
                }
                None => (Array2::zeros((rows, width)), Vec::new()),
            };
            for j in 0..width {
                // The error of a column that meets nothing counts a little.
                let own = match full {
                    Some(_) => within[j * width + j],
                    None => (sums[start + j] + 1e-9 * mean).max(f64::MIN_POSITIVE).sqrt(),
                };
                let mut met = vec![0f64; rows];
                for row in 0..rows {
                    let (left, step) = (carried[[row, j]], f64::from(scales[row]));
                    let (weight, mine) = (weights[[row, start + j]], leaves[row * rows + row]);
                    let target = weight + left / own + met[row] / (mine * own);
                    let chosen = code(target / step, range);
                    let change = weight - chosen * step;
                    let off = left + change * own;
                    lost += (met[row] + mine * off).powi(2);
                    codes[[row, start + j]] = chosen;
                    changes[[row, start + j]] = change;
                    let others = &leaves[row * rows..][..rows];
                    for (met, leaves) in met.iter_mut().zip(others).skip(row + 1) {
                        *met += leaves * off;
                    }
                    if full.is_some() {
                        let factors = &within[j * width..][..width];
                        let mut carried = carried.row_mut(row);
                        for (carried, factor) in carried.iter_mut().zip(factors).skip(j + 1) {
                            *carried += change * factor;
                        }
                    }
                }
            }
        }
        if best.as_ref().is_none_or(|(least, ..)| lost < *least) {
            best = Some((lost, codes, scales));
        }
    }
    let Some((_, codes, scales)) = best else { return Vec::new() };
    let mut rounded: Vec<Row> =
        scales.iter().map(|scale| Row { codes: vec![0; columns], scale: *scale }).collect();
    for (row, codes) in codes.outer_iter().enumerate() {
        let to = &mut rounded[dimensions.order[row]];
        to.scale = scales[row];
        for (&column, code) in order.iter().zip(codes) {
            to.codes[column] = *code as i8;
        }
    }
    rounded
}

#[cfg(test)]
mod tests {
    use super::super::numbers;
    use super::*;

    const SCORES: ScoreRows = ScoreRows {
        query_heads: 4,
        kv_heads: 2,
        head_dim: 48,
        rope: Some(Rope::plain(1e4, 8)),
        max_distance: 64,
    };
    const COLUMNS: usize = 192;

    /// What columns meet: a few of them far more than the others.
    fn met() -> Vec<f32> {
        (0..COLUMNS).map(|column| if column % 31 == 3 { 30.0 } else { 1.0 }).collect()
    }

    /// Queries or keys of a head for `inputs`, turned by `distance`.
    fn head(values: &[f32], index: usize, inputs: &[f32], distance: f64) -> Vec<f64> {
        let rows =
            values[index * SCORES.head_dim * COLUMNS..].chunks(COLUMNS).take(SCORES.head_dim);
        let product = |row: &[f32]| -> f64 {
            row.iter().zip(inputs).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum()
        };
        let mut made: Vec<f64> = rows.map(product).collect();
        let rope = SCORES.rope.unwrap();
        let half = rope.dims / 2;
        for pair in 0..half {
            let angle = distance * rope.theta.powf(-(pair as f64) / half as f64);
            let (x, y) = (made[pair], made[pair + half]);
            made[pair] = x * angle.cos() - y * angle.sin();
            made[pair + half] = y * angle.cos() + x * angle.sin();
        }
        made
    }

    /// Σ of the squared errors of scores on inputs of the kind that was met.
    fn error_of_scores(values: &[f32], rounded: &[f32]) -> f64 {
        let sizes: Vec<f32> = met().iter().map(|met| met.sqrt()).collect();
        let noise = numbers(48 * COLUMNS, 900);
        let tokens: Vec<Vec<f32>> = noise
            .chunks(COLUMNS)
            .map(|noise| noise.iter().zip(&sizes).map(|(noise, size)| noise * size).collect())
            .collect();
        let mut sum = 0.0;
        for index in 0..SCORES.query_heads {
            let pair = SCORES.query_heads + index / SCORES.group();
            for (m, query) in tokens.iter().enumerate() {
                for (n, key) in tokens.iter().enumerate().take(m) {
                    let distance = (m - n) as f64 * 1.3;
                    let score = |values: &[f32]| -> f64 {
                        let query = head(values, index, query, distance);
                        query.iter().zip(head(values, pair, key, 0.0)).map(|(a, b)| a * b).sum()
                    };
                    sum += (score(values) - score(rounded)).powi(2);
                }
            }
        }
        sum
    }

    #[test]
    fn scores_are_nearer_than_with_rows_by_themselves() {
        let rows = SCORES.rows();
        let values = numbers(rows * COLUMNS, 7);
        let error = OutputError::of_importance(&met()).unwrap();
        for bits in [WeightBits::Four, WeightBits::Eight] {
            let alone = round_for_output(&values, rows, COLUMNS, bits, &error).unwrap();
            let both = round_for_scores(&values, COLUMNS, bits, &error, &SCORES).unwrap();
            let [least, largest] = bits.codes();
            assert!(both.codes.iter().all(|code| (least..=largest).contains(code)));
            let [alone_lost, both_lost] =
                [&alone, &both].map(|m| error_of_scores(&values, &m.values()));
            assert!(both_lost < 0.8 * alone_lost, "{bits:?}: {both_lost} {alone_lost}");
            // Values are rounded as ever.
            let first = (SCORES.query_heads + SCORES.kv_heads) * SCORES.head_dim;
            assert_eq!(both.scales[first..], alone.scales[first..]);
            assert_eq!(both.codes[first * COLUMNS..], alone.codes[first * COLUMNS..]);
            let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
            let again =
                pool.install(|| round_for_scores(&values, COLUMNS, bits, &error, &SCORES)).unwrap();
            assert_eq!(again, both);
        }
        let wrong = round_for_scores(&values[1..], COLUMNS, WeightBits::Four, &error, &SCORES);
        assert!(matches!(wrong, Err(WeightError::Shape { .. })));
    }

    #[test]
    fn what_is_met_is_averaged_over_distances() {
        let scores = ScoreRows { head_dim: 16, ..SCORES };
        let products = Array2::from_shape_fn((16, 16), |(i, j)| if i == j { 2.0 } else { 1.0 });
        let mean = scores.averaged_over_rotations(&products, true);
        // What turns fast loses its direction, what does not turn keeps it.
        assert!(mean[[0, 8]].abs() < 0.1, "{}", mean[[0, 8]]);
        assert!((mean[[8, 9]] - 1.0).abs() < 1e-9 && (mean[[15, 15]] - 2.0).abs() < 1e-9);
        assert!((mean.diag().sum() - 32.0).abs() < 1e-9);
        for i in 0..16 {
            for j in 0..16 {
                assert!((mean[[i, j]] - mean[[j, i]]).abs() < 1e-9);
            }
        }
        let none = ScoreRows { rope: None, ..scores };
        assert_eq!(none.averaged_over_rotations(&products, false), products);
    }
}
