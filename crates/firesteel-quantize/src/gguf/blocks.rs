//! Numbers to blocks, with a search for the scales.
//!
//! The error of a block is the sum of w × (x − x̂)², where w is the importance of the column: the
//! mean square of the activation that it meets makes this the expected squared error of the
//! product. Every candidate scale is judged by the error at the best scale for the codes that it
//! gives, which needs two sums; the winner is rounded to what the format stores, and codes and
//! scale are fitted in turn while the true error falls. The scale that plain rounding takes is
//! always a candidate, so the error is never above that of plain rounding.

use firesteel_checkpoint::WeightFormat;
use firesteel_checkpoint::blocks::{BlockLayout, BlockQ4_0, BlockQ4K, BlockQ6K, BlockQ8_0};
use half::f16;

/// Formats that can be written.
pub(super) const WRITTEN: &str = "f32, f16, bf16, q8_0, q4_0, q4_k, q6_k";

/// Whether [`quantize`] knows `format`.
pub(super) const fn can_quantize(format: WeightFormat) -> bool {
    use WeightFormat::{Q4_0, Q4K, Q6K, Q8_0};
    matches!(format, Q8_0 | Q4_0 | Q4K | Q6K)
}

/// Quantizes whole blocks of finite `values` into `out`, which has room for exactly those.
/// `importance` has one non-negative weight for each value; a format that is not known leaves
/// `out` as it is.
pub(super) fn quantize(format: WeightFormat, values: &[f32], importance: &[f32], out: &mut [u8]) {
    match format {
        WeightFormat::Q8_0 => each(values, importance, out, q8_0),
        WeightFormat::Q4_0 => each(values, importance, out, q4_0),
        WeightFormat::Q4K => each(values, importance, out, q4_k),
        WeightFormat::Q6K => each(values, importance, out, q6_k),
        _ => {}
    }
}

fn each<const N: usize, B: BlockLayout>(
    values: &[f32],
    importance: &[f32],
    out: &mut [u8],
    quantize_block: fn(&[f32; N], &[f32; N]) -> B,
) {
    let (values, _) = values.as_chunks::<N>();
    let (importance, _) = importance.as_chunks::<N>();
    let blocks = values.iter().zip(importance).map(|(x, w)| quantize_block(x, w));
    for (block, out) in blocks.zip(out.chunks_exact_mut(size_of::<B>())) {
        out.copy_from_slice(bytemuck::bytes_of(&block));
    }
}

/// The nearest whole number, ties to even; exact for magnitudes below 2²².
#[inline(always)]
fn nearest(value: f32) -> f32 {
    const SHIFT: f32 = 12_582_912.0;
    (value + SHIFT) - SHIFT
}

/// What binary16 makes of a scale; a scale that it cannot hold becomes the largest that it can.
fn to_half(scale: f32) -> f16 {
    f16::from_f32(scale.clamp(-65504.0, 65504.0))
}

/// One over a scale; 0 for 0 and for scales so small that there is none.
fn inverse(scale: f32) -> f32 {
    let inverse = 1.0 / scale;
    if inverse.is_finite() { inverse } else { 0.0 }
}

/// Sums the terms of each pair (x, w) in eight interleaved parts, an order that vector units can
/// follow.
#[inline(always)]
fn sum<const N: usize, const S: usize>(
    x: &[f32; N],
    w: &[f32; N],
    term: impl Fn(f32, f32) -> [f32; S],
) -> [f32; S] {
    let mut parts = [[0f32; 8]; S];
    for (x, w) in x.as_chunks::<8>().0.iter().zip(w.as_chunks::<8>().0) {
        let mut terms = [[0f32; 8]; S];
        for lane in 0..8 {
            for (terms, term) in terms.iter_mut().zip(term(x[lane], w[lane])) {
                terms[lane] = term;
            }
        }
        for (part, terms) in parts.iter_mut().zip(&terms) {
            for (part, term) in part.iter_mut().zip(terms) {
                *part += term;
            }
        }
    }
    parts.map(|part| part.iter().sum())
}

/// Codes of x with one scale: whole numbers from `low` to `high`.
struct Linear {
    low: f32,
    high: f32,
    /// Codes that the value of largest magnitude may get; plain rounding gives it the first. In a
    /// symmetric range one sign is enough.
    limits: &'static [f32],
    /// Candidates: the value of largest magnitude becomes a limit plus one of these.
    steps: &'static [f32],
}

impl Linear {
    #[inline(always)]
    fn code(&self, x: f32, inverse: f32) -> f32 {
        nearest((x * inverse).clamp(self.low, self.high))
    }

    /// Σ w (x − scale × code)².
    fn error<const N: usize>(&self, x: &[f32; N], w: &[f32; N], scale: f32) -> f32 {
        let inverse = inverse(scale);
        let [error] = sum(x, w, |x, w| {
            let difference = x - scale * self.code(x, inverse);
            [w * difference * difference]
        });
        error
    }

    /// The best scale for the codes that the scale 1 / `inverse` gives, and by how much it lowers
    /// the error from Σ w x².
    fn fit<const N: usize>(&self, x: &[f32; N], w: &[f32; N], inverse: f32) -> (f32, f32) {
        let [xq, qq] = sum(x, w, |x, w| {
            let code = self.code(x, inverse);
            [w * x * code, w * code * code]
        });
        if qq > 0.0 { (xq / qq, xq * xq / qq) } else { (0.0, 0.0) }
    }

    /// The scale of least error among those that `round` can give.
    fn scale<const N: usize>(&self, x: &[f32; N], w: &[f32; N], round: impl Fn(f32) -> f32) -> f32 {
        let largest = x.iter().fold(0f32, |a, b| if b.abs() > a.abs() { *b } else { a });
        if largest == 0.0 {
            return 0.0;
        }
        let (mut best, mut gain) = (0.0, 0.0);
        for limit in self.limits {
            for step in self.steps {
                let (scale, gained) = self.fit(x, w, (limit + step) / largest);
                if gained > gain {
                    (best, gain) = (scale, gained);
                }
            }
        }
        let plain = round(largest / self.limits[0]);
        let mut best = round(best);
        let mut error = self.error(x, w, best);
        let plain_error = self.error(x, w, plain);
        if plain_error < error {
            (best, error) = (plain, plain_error);
        }
        for _ in 0..4 {
            let next = round(self.fit(x, w, inverse(best)).0);
            let next_error = self.error(x, w, next);
            if next_error >= error {
                break;
            }
            (best, error) = (next, next_error);
        }
        best
    }
}

/// Q8_0 takes −127 to 127: without −128 a product with another byte has room in 15 bits.
const EIGHT_BITS: Linear = Linear {
    low: -127.0,
    high: 127.0,
    limits: &[127.0],
    steps: &[-2.0, -1.5, -1.0, -0.5, 0.0, 0.5],
};
const SIX_BITS: Linear = Linear {
    low: -32.0,
    high: 31.0,
    limits: &[-32.0, 31.0],
    steps: &[-2.0, -1.6, -1.2, -0.8, -0.4, 0.0, 0.4, 0.8, 1.2],
};
const FOUR_BITS: Linear = Linear {
    low: -8.0,
    high: 7.0,
    limits: &[-8.0, 7.0],
    steps: &[-1.4, -1.2, -1.0, -0.8, -0.6, -0.4, -0.2, 0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 1.6],
};

fn q8_0(x: &[f32; 32], w: &[f32; 32]) -> BlockQ8_0 {
    let d = EIGHT_BITS.scale(x, w, |scale| to_half(scale).to_f32());
    let inverse = inverse(d);
    BlockQ8_0 {
        d: to_half(d).to_le_bytes(),
        codes: std::array::from_fn(|i| EIGHT_BITS.code(x[i], inverse) as i8),
    }
}

fn q4_0(x: &[f32; 32], w: &[f32; 32]) -> BlockQ4_0 {
    let d = FOUR_BITS.scale(x, w, |scale| to_half(scale).to_f32());
    let inverse = inverse(d);
    let code = |i: usize| (FOUR_BITS.code(x[i], inverse) + 8.0) as u8;
    BlockQ4_0 {
        d: to_half(d).to_le_bytes(),
        nibbles: std::array::from_fn(|i| code(i) | code(i + 16) << 4),
    }
}

fn q6_k(x: &[f32; 256], w: &[f32; 256]) -> BlockQ6K {
    let (xs, _) = x.as_chunks::<16>();
    let (ws, _) = w.as_chunks::<16>();
    let mut wanted = [0f32; 16];
    for ((scale, x), w) in wanted.iter_mut().zip(xs).zip(ws) {
        *scale = SIX_BITS.scale(x, w, |scale| scale);
    }
    let largest = wanted.iter().fold(0f32, |a, b| if b.abs() > a.abs() { *b } else { a });
    let half = to_half(largest / -128.0);
    let d = half.to_f32();
    let mut scales = [0i8; 16];
    for (i, scale) in scales.iter_mut().enumerate() {
        let near = (wanted[i] * inverse(d)).clamp(-127.0, 126.0).round();
        let candidates = [near, near - 1.0, near + 1.0];
        *scale = least(candidates, |s| SIX_BITS.error(&xs[i], &ws[i], d * s)) as i8;
    }
    let mut block = BlockQ6K { low: [0; 128], high: [0; 64], scales, d: half.to_le_bytes() };
    for (i, x) in x.iter().enumerate() {
        let scale = d * f32::from(scales[i / 16]);
        let code = (SIX_BITS.code(*x, inverse(scale)) + 32.0) as u8;
        let (half, k, j) = (i / 128, i % 128 / 32, i % 32);
        block.low[64 * half + 32 * (k % 2) + j] |= (code & 15) << (4 * (k / 2));
        block.high[32 * half + j] |= code >> 4 << (2 * k);
    }
    block
}

/// The candidate of least error; the first among equals.
fn least<const N: usize, T: Copy>(candidates: [T; N], error: impl Fn(T) -> f32) -> T {
    let mut best = candidates[0];
    let mut least = f32::INFINITY;
    for candidate in candidates {
        let error = error(candidate);
        if error < least {
            (best, least) = (candidate, error);
        }
    }
    best
}

/// Code of x = scale × code − minimum, from 0 to 15.
#[inline(always)]
fn offset_code(x: f32, inverse: f32, minimum: f32) -> f32 {
    nearest(((x + minimum) * inverse).clamp(0.0, 15.0))
}

fn offset_error(x: &[f32; 32], w: &[f32; 32], (scale, minimum): (f32, f32)) -> f32 {
    let inverse = inverse(scale);
    let [error] = sum(x, w, |x, w| {
        let difference = x - (scale * offset_code(x, inverse, minimum) - minimum);
        [w * difference * difference]
    });
    error
}

/// Scale and minimum, both at least 0, of least error for a sub-block.
fn offset_fit(x: &[f32; 32], w: &[f32; 32]) -> (f32, f32) {
    let low = x.iter().copied().fold(0f32, f32::min);
    let high = x.iter().copied().fold(f32::MIN, f32::max);
    if high <= low {
        return (0.0, -low);
    }
    let mut best = ((high - low) / 15.0, -low);
    let mut error = offset_error(x, w, best);
    let [all, sum_x] = sum(x, w, |x, w| [w, w * x]);
    for step in -8..=10 {
        let inverse = (15.0 + 0.15 * step as f32) / (high - low);
        let [q, qq, xq] = sum(x, w, |x, w| {
            let code = offset_code(x, inverse, -low);
            [w * code, w * code * code, w * x * code]
        });
        // The least squares of x = scale × code − minimum.
        let determinant = all * qq - q * q;
        let mut scale = (all * xq - q * sum_x) / determinant;
        let mut minimum = (q * xq - qq * sum_x) / determinant;
        if minimum.is_nan() || minimum < 0.0 {
            (scale, minimum) = (xq / qq, 0.0);
        }
        if scale.is_finite() && scale > 0.0 && minimum.is_finite() {
            let fitted = offset_error(x, w, (scale, minimum));
            if fitted < error {
                (best, error) = ((scale, minimum), fitted);
            }
        }
    }
    best
}

fn q4_k(x: &[f32; 256], w: &[f32; 256]) -> BlockQ4K {
    let (xs, _) = x.as_chunks::<32>();
    let (ws, _) = w.as_chunks::<32>();
    let mut wanted = [(0f32, 0f32); 8];
    for ((pair, x), w) in wanted.iter_mut().zip(xs).zip(ws) {
        *pair = offset_fit(x, w);
    }
    let largest = wanted.iter().fold((0f32, 0f32), |(s, m), pair| (s.max(pair.0), m.max(pair.1)));
    let mut halves = (to_half(largest.0 / 63.0), to_half(largest.1 / 63.0));
    let (mut pairs, mut error) = q4_k_pairs(xs, ws, &wanted, halves);
    // The two outer scales of least squares for the codes at hand.
    for _ in 0..2 {
        let next = q4_k_outer(xs, ws, &pairs, halves);
        let (next_pairs, next_error) = q4_k_pairs(xs, ws, &wanted, next);
        if next_error >= error {
            break;
        }
        (halves, pairs, error) = (next, next_pairs, next_error);
    }
    let (d, dmin) = (halves.0.to_f32(), halves.1.to_f32());
    let mut nibbles = [0u8; 128];
    for (i, x) in x.iter().enumerate() {
        let (s, m) = pairs[i / 32];
        let (scale, minimum) = (d * f32::from(s), dmin * f32::from(m));
        let code = offset_code(*x, inverse(scale), minimum) as u8;
        nibbles[i / 64 * 32 + i % 32] |= code << (4 * (i / 32 % 2));
    }
    BlockQ4K {
        d: halves.0.to_le_bytes(),
        dmin: halves.1.to_le_bytes(),
        scales: pack_scales(&pairs),
        nibbles,
    }
}

/// The 6-bit pairs of least error near the wanted scales and minimums, and their error.
fn q4_k_pairs(
    xs: &[[f32; 32]],
    ws: &[[f32; 32]],
    wanted: &[(f32, f32); 8],
    halves: (f16, f16),
) -> ([(u8, u8); 8], f32) {
    let (d, dmin) = (halves.0.to_f32(), halves.1.to_f32());
    let mut pairs = [(0u8, 0u8); 8];
    let mut total = 0.0;
    for (i, pair) in pairs.iter_mut().enumerate() {
        let near = |wanted: f32, d: f32| (wanted * inverse(d)).clamp(0.0, 63.0).round();
        let (s, m) = (near(wanted[i].0, d), near(wanted[i].1, dmin));
        let candidates: [(f32, f32); 9] = std::array::from_fn(|k| {
            let shift = |k: usize| [0.0, -1.0, 1.0][k];
            ((s + shift(k / 3)).clamp(0.0, 63.0), (m + shift(k % 3)).clamp(0.0, 63.0))
        });
        let error = |(s, m)| offset_error(&xs[i], &ws[i], (d * s, dmin * m));
        let best = least(candidates, error);
        total += error(best);
        *pair = (best.0 as u8, best.1 as u8);
    }
    (pairs, total)
}

/// The outer scales of least squares for the codes that `pairs` give.
fn q4_k_outer(
    xs: &[[f32; 32]],
    ws: &[[f32; 32]],
    pairs: &[(u8, u8); 8],
    halves: (f16, f16),
) -> (f16, f16) {
    let (d, dmin) = (halves.0.to_f32(), halves.1.to_f32());
    let mut sums = [0f32; 5];
    for ((x, w), (s, m)) in xs.iter().zip(ws).zip(pairs) {
        let (s, m) = (f32::from(*s), f32::from(*m));
        let inverse = inverse(d * s);
        let part = sum(x, w, |x, w| {
            let a = s * offset_code(x, inverse, dmin * m);
            [w * a * a, w * a * m, w * m * m, w * x * a, w * x * m]
        });
        sums.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
    }
    let [aa, am, mm, xa, xm] = sums;
    let determinant = aa * mm - am * am;
    let (d, dmin) = ((mm * xa - am * xm) / determinant, (am * xa - aa * xm) / determinant);
    match d.is_finite() && dmin.is_finite() && d > 0.0 && dmin >= 0.0 {
        true => (to_half(d), to_half(dmin)),
        false => halves,
    }
}

/// The inverse of how blocks of Q4_K are read.
fn pack_scales(pairs: &[(u8, u8); 8]) -> [u8; 12] {
    std::array::from_fn(|i| match i {
        0..4 => pairs[i].0 | pairs[i + 4].0 >> 4 << 6,
        4..8 => pairs[i - 4].1 | pairs[i].1 >> 4 << 6,
        _ => pairs[i - 4].0 & 15 | pairs[i - 4].1 << 4,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use firesteel_checkpoint::blocks::dequantize;
    use proptest::prelude::*;

    const FORMATS: [WeightFormat; 4] =
        [WeightFormat::Q8_0, WeightFormat::Q4_0, WeightFormat::Q4K, WeightFormat::Q6K];

    fn round_trip(format: WeightFormat, values: &[f32], importance: &[f32]) -> Vec<f32> {
        let mut bytes = vec![0; format.byte_count(values.len()).unwrap()];
        quantize(format, values, importance, &mut bytes);
        let mut read = vec![0.0; values.len()];
        dequantize(format, &bytes, 0, &mut read).unwrap();
        read
    }

    fn error(values: &[f32], read: &[f32], importance: &[f32]) -> f64 {
        let terms = values.iter().zip(read).zip(importance);
        terms.map(|((x, y), w)| f64::from(*w) * f64::from(x - y).powi(2)).sum()
    }

    /// Numbers that a format holds exactly come back exactly.
    #[test]
    fn what_a_format_holds_it_keeps() {
        let ones = [1.0; 256];
        let q4_0: Vec<f32> = (0..256).map(|i| 0.25 * ((i * 7 % 16) as f32 - 8.0)).collect();
        let q8_0: Vec<f32> =
            (0..256).map(|i| if i % 32 == 0 { -127.0 } else { (i % 101) as f32 }).collect();
        let q6_k: Vec<f32> =
            (0..256).map(|i| if i % 16 == 0 { -64.0 } else { 2.0 * (i % 32) as f32 }).collect();
        let q4_k: Vec<f32> = (0..256).map(|i| (i % 16) as f32 * 63.0 - 63.0).collect();
        for (format, values) in [
            (WeightFormat::Q4_0, q4_0),
            (WeightFormat::Q8_0, q8_0),
            (WeightFormat::Q6K, q6_k),
            (WeightFormat::Q4K, q4_k),
        ] {
            assert_eq!(round_trip(format, &values, &ones), values, "{format}");
        }
        for format in FORMATS {
            assert_eq!(round_trip(format, &[0.0; 256], &ones), [0.0; 256], "{format}");
        }
    }

    #[test]
    fn the_positive_limit_is_used_as_well_as_the_negative() {
        for sign in [1.0, -1.0] {
            let mut values = [0f32; 32];
            values[3] = 8.0 * sign;
            values[4] = -7.0 * sign;
            assert_eq!(round_trip(WeightFormat::Q4_0, &values, &[1.0; 32]), values);
        }
    }

    #[test]
    fn important_columns_have_the_smaller_error() {
        let values: Vec<f32> = (0..256).map(|i| ((i * 37 % 101) as f32 - 50.0) / 13.0).collect();
        let plain = [1.0; 256];
        let mut importance = [0.01; 256];
        importance.iter_mut().step_by(5).for_each(|w| *w = 10.0);
        for format in FORMATS {
            let weighted = error(&values, &round_trip(format, &values, &importance), &importance);
            let unweighted = error(&values, &round_trip(format, &values, &plain), &importance);
            assert!(weighted < unweighted, "{format}: {weighted} {unweighted}");
        }
    }

    proptest! {
        #[test]
        fn any_finite_values_give_finite_values_near_them(
            values in prop::collection::vec(prop_oneof![
                3 => -1f32..1.0,
                1 => -1e4f32..1e4,
                1 => -1e-7f32..1e-7,
                1 => Just(0.0),
            ], 256),
            importance in prop::collection::vec(prop_oneof![0f32..1.0, Just(0.0)], 256),
        ) {
            let ones = [1.0; 256];
            let energy = error(&values, &[0.0; 256], &ones);
            for (format, bound) in FORMATS.into_iter().zip([1e-4, 2e-2, 2e-2, 1e-3]) {
                let read = round_trip(format, &values, &ones);
                prop_assert!(error(&values, &read, &ones) <= bound * energy, "{}", format);
                let read = round_trip(format, &values, &importance);
                prop_assert!(read.iter().all(|value| value.is_finite()), "{}", format);
            }
        }

        #[test]
        fn extreme_values_give_finite_values(
            values in prop::collection::vec(any::<f32>().prop_filter("finite", |v| v.is_finite()), 256),
        ) {
            for format in FORMATS {
                let read = round_trip(format, &values, &[1.0; 256]);
                prop_assert!(read.iter().all(|value| value.is_finite()), "{}", format);
            }
        }
    }
}
