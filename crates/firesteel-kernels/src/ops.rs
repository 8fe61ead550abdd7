//! Kernels over rows. All give the same bytes on every instruction set.

use crate::isa::Isa;
use crate::math::{erf, exp};
use crate::simd::{Kernel, Simd};
use crate::{KernelError, area, check_length};

/// `out[r][i] = x[r][i] · w[i] / √(mean(x[r]²) + epsilon)`, rows of `weights.len()` elements. The mean
/// is taken in f64, so it neither overflows nor loses digits.
///
/// # Errors
///
/// `x` is not whole rows, or `out` has not its length.
pub fn rms_norm(
    x: &[f32],
    weights: &[f32],
    epsilon: f32,
    out: &mut [f32],
) -> Result<(), KernelError> {
    check_length("the output of rms_norm", x.len(), out.len())?;
    if weights.is_empty() {
        return check_length("rows of rms_norm", 0, x.len());
    }
    check_length("rows of rms_norm", x.len() / weights.len() * weights.len(), x.len())?;
    for (x, out) in x.chunks_exact(weights.len()).zip(out.chunks_exact_mut(weights.len())) {
        let mut lanes = [0.0_f64; 8];
        let (chunks, rest) = x.as_chunks::<8>();
        for chunk in chunks {
            for (lane, value) in lanes.iter_mut().zip(chunk) {
                *lane += f64::from(*value) * f64::from(*value);
            }
        }
        for (lane, value) in lanes.iter_mut().zip(rest) {
            *lane += f64::from(*value) * f64::from(*value);
        }
        let mean = lanes.iter().sum::<f64>() / x.len() as f64;
        let scale = (1.0 / (mean + f64::from(epsilon)).sqrt()) as f32;
        for ((out, x), w) in out.iter_mut().zip(x).zip(weights) {
            *out = x * scale * w;
        }
    }
    Ok(())
}

/// Rotates the leading dimensions of every head in place, halves against each other. With R = 2 ·
/// `cos.len()` and `(a, b) = (h[i], h[i + R/2])`, the pair becomes
/// `(a·cos[i] − b·sin[i], b·cos[i] + a·sin[i])`. `heads` is `[heads, head_dim]` of one token.
///
/// # Errors
///
/// `cos` and `sin` differ in length, R exceeds the head, or `heads` is not whole heads.
pub fn rope(
    heads: &mut [f32],
    head_dim: usize,
    cos: &[f32],
    sin: &[f32],
) -> Result<(), KernelError> {
    check_length("the sines of a rotation", cos.len(), sin.len())?;
    let half = cos.len();
    if half > head_dim / 2 || head_dim == 0 {
        return Err(KernelError::Rotary { rotary: half.saturating_mul(2), head_dim });
    }
    check_length("heads", heads.len() / head_dim * head_dim, heads.len())?;
    for head in heads.chunks_exact_mut(head_dim) {
        let (first, rest) = head.split_at_mut(half);
        for (((a, b), cos), sin) in first.iter_mut().zip(rest).zip(cos).zip(sin) {
            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
        }
    }
    Ok(())
}

/// `gate[i] = gelu(gate[i]) · up[i]` with the exact form, gelu(x) = x/2 · (1 + erf(x/√2)); erf within
/// 5e-7.
///
/// # Errors
///
/// The lengths differ.
pub fn gated_gelu(isa: Isa, gate: &mut [f32], up: &[f32]) -> Result<(), KernelError> {
    check_length("the up half of a gated GELU", gate.len(), up.len())?;
    isa.dispatch(GatedGelu { gate, up });
    Ok(())
}

struct GatedGelu<'a> {
    gate: &'a mut [f32],
    up: &'a [f32],
}

impl Kernel for GatedGelu<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (gate, up) in self.gate.iter_mut().zip(self.up) {
            let x = *gate;
            *gate = 0.5 * x * (1.0 + erf(x * std::f32::consts::FRAC_1_SQRT_2)) * up;
        }
    }
}

/// `gate[i] = silu(gate[i]) · up[i]`, silu(x) = x / (1 + exp(−x)).
///
/// # Errors
///
/// The lengths differ.
pub fn gated_silu(isa: Isa, gate: &mut [f32], up: &[f32]) -> Result<(), KernelError> {
    check_length("the up half of a gated SiLU", gate.len(), up.len())?;
    isa.dispatch(GatedSilu { gate, up });
    Ok(())
}

struct GatedSilu<'a> {
    gate: &'a mut [f32],
    up: &'a [f32],
}

impl Kernel for GatedSilu<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (gate, up) in self.gate.iter_mut().zip(self.up) {
            let x = *gate;
            *gate = x / (1.0 + exp(-x)) * up;
        }
    }
}

/// `values[i] = 1 / (1 + exp(−values[i]))`.
pub fn sigmoid(isa: Isa, values: &mut [f32]) {
    isa.dispatch(Sigmoid(values));
}

struct Sigmoid<'a>(&'a mut [f32]);

impl Kernel for Sigmoid<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for value in self.0 {
            *value = 1.0 / (1.0 + exp(-*value));
        }
    }
}

/// Turns each row of `columns` elements into exp(v − max) / Σ exp(v − max). −∞ becomes 0; a row of
/// nothing else becomes zeros.
///
/// # Errors
///
/// `values` is not whole rows.
pub fn softmax(isa: Isa, values: &mut [f32], columns: usize) -> Result<(), KernelError> {
    let rows = values.len().checked_div(columns).unwrap_or(0);
    check_length("rows of softmax", area("rows of softmax", rows, columns)?, values.len())?;
    for row in values.chunks_exact_mut(columns.max(1)) {
        let (largest, sum) = isa.dispatch(Exponentials(row));
        if largest > f32::NEG_INFINITY {
            scale(row, 1.0 / sum);
        } else if sum == 0.0 {
            row.fill(0.0);
        }
    }
    Ok(())
}

/// Replaces values by exp(v − max); returns the maximum and the sum of the results, added in eight
/// lanes. If the maximum is −∞ the results are zeros.
pub(crate) struct Exponentials<'a>(pub(crate) &'a mut [f32]);

impl Kernel for Exponentials<'_> {
    type Output = (f32, f32);

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> (f32, f32) {
        let mut lanes = [f32::NEG_INFINITY; 8];
        let (chunks, rest) = self.0.as_chunks_mut::<8>();
        for chunk in &*chunks {
            for (lane, value) in lanes.iter_mut().zip(chunk) {
                *lane = if *value > *lane { *value } else { *lane };
            }
        }
        let mut largest = f32::NEG_INFINITY;
        for value in lanes.iter().chain(&*rest) {
            largest = if *value > largest { *value } else { largest };
        }
        // With −∞ taken from itself the results would be NaN.
        let from = if largest == f32::NEG_INFINITY { 0.0 } else { largest };
        let mut sums = [0.0_f32; 8];
        for chunk in chunks {
            for (sum, value) in sums.iter_mut().zip(chunk) {
                *value = exp(*value - from);
                *sum += *value;
            }
        }
        for (sum, value) in sums.iter_mut().zip(rest) {
            *value = exp(*value - from);
            *sum += *value;
        }
        (largest, sums.iter().sum())
    }
}

/// `weights[i] = exp((logits[i] − largest) / temperature)`, for as many as both have; the largest logit
/// weighs 1 and −∞ nothing. Returns the sum of the weights, taken in f64.
pub fn weigh(isa: Isa, logits: &[f32], largest: f32, temperature: f32, weights: &mut [f32]) -> f64 {
    isa.dispatch(Weigh { logits, largest, temperature, weights })
}

/// The weight of one logit, in the bytes that [`weigh`] gives it.
#[must_use]
pub fn weight(logit: f32, largest: f32, temperature: f32) -> f32 {
    exp((logit - largest) / temperature)
}

struct Weigh<'a> {
    logits: &'a [f32],
    largest: f32,
    temperature: f32,
    weights: &'a mut [f32],
}

impl Kernel for Weigh<'_> {
    type Output = f64;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> f64 {
        let count = self.logits.len().min(self.weights.len());
        let weights = &mut self.weights[..count];
        for (weight, logit) in weights.iter_mut().zip(self.logits) {
            *weight = exp((logit - self.largest) / self.temperature);
        }
        // A loop of its own: with the sums of wider numbers in it the first one would not become
        // vectors.
        let mut sums = [0.0_f64; 8];
        let (groups, rest) = weights.as_chunks::<8>();
        for group in groups {
            for (sum, weight) in sums.iter_mut().zip(group) {
                *sum += f64::from(*weight);
            }
        }
        for (sum, weight) in sums.iter_mut().zip(rest) {
            *sum += f64::from(*weight);
        }
        sums.iter().sum()
    }
}

/// `to[i] += values[i]`.
///
/// # Errors
///
/// The lengths differ.
pub fn add(to: &mut [f32], values: &[f32]) -> Result<(), KernelError> {
    check_length("the addend", to.len(), values.len())?;
    to.iter_mut().zip(values).for_each(|(to, value)| *to += value);
    Ok(())
}

/// `values[i] *= factor`.
pub fn scale(values: &mut [f32], factor: f32) {
    values.iter_mut().for_each(|value| *value *= factor);
}
