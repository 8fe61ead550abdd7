use firesteel_checkpoint::{CheckpointError, Weight};
use ndarray::Array2;
use rayon::prelude::*;
use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_PI};

/// Form of the feed-forward activation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum GeluKind {
    /// x/2 · (1 + erf(x/√2)), the form the model was trained with.
    #[default]
    Exact,
    /// x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))) (Hendrycks and Gimpel, 2016).
    Tanh,
    /// x · sigmoid(1.702 x) (same source).
    Sigmoid,
}

impl GeluKind {
    /// The lower-case name, as in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Tanh => "tanh",
            Self::Sigmoid => "sigmoid",
        }
    }

    /// The activation of `x`.
    pub(crate) fn apply(self, x: f64) -> f64 {
        match self {
            // 1 + erf(y) = erfc(-y), which does not cancel for negative y.
            Self::Exact => 0.5 * x * libm::erfc(-x * FRAC_1_SQRT_2),
            Self::Tanh => {
                0.5 * x * (1.0 + libm::tanh(FRAC_2_PI.sqrt() * (x + 0.044715 * x * x * x)))
            }
            Self::Sigmoid => x * sigmoid(1.702 * x),
        }
    }
}

/// x / (1 + e^(−x)).
pub(crate) fn silu(x: f64) -> f64 {
    x / (1.0 + libm::exp(-x))
}

/// 1 / (1 + e^(−x)).
pub(crate) fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + libm::exp(-x))
}

/// Weight rows that one task widens and multiplies at once.
const BLOCK_ROWS: usize = 32;

/// Tokens from which on arranging weights for products of matrices pays.
const MANY: usize = 8;

/// Independent sums of a dot product: enough to hide the latency of an addition.
const LANES: usize = 8;

/// Dot product of `weights` and `values`, summed in a fixed order. The products are exact.
pub(crate) fn dot<T: Copy + Into<f64>>(weights: &[T], values: &[f64]) -> f64 {
    let mut sums = [0f64; LANES];
    let mut weight_blocks = weights.chunks_exact(LANES);
    let mut value_blocks = values.chunks_exact(LANES);
    for (weights, values) in (&mut weight_blocks).zip(&mut value_blocks) {
        for lane in 0..LANES {
            sums[lane] += weights[lane].into() * values[lane];
        }
    }
    let rest = weight_blocks.remainder().iter().zip(value_blocks.remainder());
    sums.iter().sum::<f64>() + rest.map(|(w, v)| (*w).into() * v).sum::<f64>()
}

/// `input` `[tokens, K]` times the transpose of `weight` `[N, K]`: `[tokens, N]`.
pub(crate) fn project(
    weight: &Weight,
    input: &[f64],
    tokens: usize,
) -> Result<Vec<f64>, CheckpointError> {
    let columns = input.len() / tokens;
    let rows = weight.element_count() / columns;
    let many = (tokens >= MANY)
        .then(|| Array2::from_shape_fn((columns, tokens), |(k, token)| input[token * columns + k]));
    let mut by_row = vec![0f64; rows * tokens];
    by_row.par_chunks_mut(BLOCK_ROWS * tokens).enumerate().try_for_each_init(
        || vec![0f32; BLOCK_ROWS * columns],
        |scratch, (block, out)| {
            let rows = out.len() / tokens;
            let weights = &mut scratch[..rows * columns];
            weight.read_f32(block * BLOCK_ROWS * columns, weights)?;
            if let Some(input) = &many {
                let weights = Array2::from_shape_fn((rows, columns), |(row, k)| {
                    f64::from(weights[row * columns + k])
                });
                out.iter_mut().zip(&weights.dot(input)).for_each(|(out, product)| *out = *product);
            } else {
                for (out, weights) in out.chunks_mut(tokens).zip(weights.chunks_exact(columns)) {
                    for (out, values) in out.iter_mut().zip(input.chunks_exact(columns)) {
                        *out = dot(weights, values);
                    }
                }
            }
            Ok::<(), CheckpointError>(())
        },
    )?;
    if tokens == 1 {
        return Ok(by_row);
    }
    let mut by_token = vec![0f64; rows * tokens];
    for (token, out) in by_token.chunks_exact_mut(rows).enumerate() {
        for (value, of_row) in out.iter_mut().zip(by_row.chunks_exact(tokens)) {
            *value = of_row[token];
        }
    }
    Ok(by_token)
}

/// The gains of a norm.
pub(crate) struct NormGain(Vec<f32>);

impl NormGain {
    pub(crate) fn read(weight: &Weight) -> Result<Self, CheckpointError> {
        let mut gains = vec![0f32; weight.element_count()];
        weight.read_f32(0, &mut gains)?;
        Ok(Self(gains))
    }

    /// RMSNorm of `row`: x / √(mean(x²) + ε) · gain.
    pub(crate) fn apply(&self, epsilon: f64, row: &mut [f64]) {
        let mean_square = row.iter().map(|x| *x * *x).sum::<f64>() / row.len() as f64;
        let inverse = 1.0 / (mean_square + epsilon).sqrt();
        for (x, gain) in row.iter_mut().zip(&self.0) {
            *x = *x * inverse * f64::from(*gain);
        }
    }
}

/// RMSNorm of each row of `input` `[tokens, H]` with `weight` `[H]`.
pub(crate) fn rms_norm(
    weight: &Weight,
    epsilon: f64,
    input: &[f64],
) -> Result<Vec<f64>, CheckpointError> {
    let gain = NormGain::read(weight)?;
    let mut output = input.to_vec();
    output.chunks_exact_mut(gain.0.len().max(1)).for_each(|row| gain.apply(epsilon, row));
    Ok(output)
}

/// Rotates the leading dimensions of `head`, as many as `cos` and `sin` have: dimension j of the
/// first half of them pairs with dimension j of the second half.
pub(crate) fn rotate(head: &mut [f64], cos: &[f32], sin: &[f32]) {
    let half = cos.len() / 2;
    let (cos_low, cos_high) = cos.split_at(half);
    let (sin_low, sin_high) = sin.split_at(half);
    let (low, high) = head[..cos.len()].split_at_mut(half);
    for j in 0..half {
        let (x, y) = (low[j], high[j]);
        low[j] = x * f64::from(cos_low[j]) - y * f64::from(sin_low[j]);
        high[j] = y * f64::from(cos_high[j]) + x * f64::from(sin_high[j]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gelu_forms_have_their_known_values() {
        let cases = [
            (GeluKind::Exact, 1.0, 0.841_344_746_068_542_9),
            (GeluKind::Exact, -3.0, -0.004_049_694_098_126_998),
            (GeluKind::Exact, -40.0, 0.0),
            (GeluKind::Tanh, 1.0, 0.841_191_990_608_276_2),
            (GeluKind::Tanh, -40.0, 0.0),
            (GeluKind::Sigmoid, 1.0, 0.845_795_765_961_361_4),
            (GeluKind::Sigmoid, -1000.0, 0.0),
        ];
        for (gelu, x, expected) in cases {
            let actual = gelu.apply(x);
            assert!((actual - expected).abs() < 1e-10, "{gelu:?}({x}) = {actual}");
        }
    }

    #[test]
    fn dot_products_cover_every_length() {
        for length in [0, 1, LANES - 1, LANES, LANES + 1, 3 * LANES + 5] {
            let weights: Vec<f32> = (0..length).map(|i| i as f32 - 3.0).collect();
            let values: Vec<f64> = (0..length).map(|i| 0.5 * i as f64).collect();
            let expected: f64 = (0..length).map(|i| (i as f64 - 3.0) * 0.5 * i as f64).sum();
            assert_eq!(dot(&weights, &values), expected, "length {length}");
        }
    }

    #[test]
    fn products_of_few_and_of_many_tokens_are_sums_of_products() {
        let (rows, columns) = (2 * BLOCK_ROWS + 3, 19);
        let number = |index: usize| ((index * 37 + 11) % 101) as f32 - 50.0;
        let values: Vec<f32> = (0..rows * columns).map(number).collect();
        let weight = Weight::from_f32("w", vec![rows, columns], values.clone()).unwrap();
        for tokens in [1, MANY - 1, MANY, 3 * MANY + 1] {
            let input: Vec<f64> =
                (0..tokens * columns).map(|index| f64::from(number(index * 5 + 2))).collect();
            let product = project(&weight, &input, tokens).unwrap();
            assert_eq!(product.len(), tokens * rows);
            for (index, product) in product.iter().enumerate() {
                let (token, row) = (index / rows, index % rows);
                let of_row = values[row * columns..][..columns].iter();
                let of_token = input[token * columns..][..columns].iter();
                let sum: f64 = of_row.zip(of_token).map(|(w, x)| f64::from(*w) * x).sum();
                // Whole numbers are exact in any order.
                assert_eq!(*product, sum, "{tokens} tokens, {token}, {row}");
            }
        }
    }

    #[test]
    fn rotation_pairs_halves_and_leaves_the_rest() {
        let mut head = [1.0, 2.0, 3.0, 4.0, 5.0];
        rotate(&mut head, &[0.0, 1.0, 0.0, 1.0], &[1.0, 0.0, 1.0, 0.0]);
        assert_eq!(head, [-3.0, 2.0, 1.0, 4.0, 5.0]);
    }
}
