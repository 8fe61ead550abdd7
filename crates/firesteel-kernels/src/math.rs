//! Elementary functions without branches, so that loops over them become vectors. Nothing is fused,
//! so the results are the same on every instruction set.

/// exp, within 2 units in the last place where the result is normal; below −87.3 it is 0, above 88.7
/// infinite.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    /// Adding it leaves the nearest integer in the low bits.
    const ROUND: f32 = 12_582_912.0;
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    let clamped = x.clamp(-87.3, 88.7);
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = clamped - n * LN_2_HIGH - n * LN_2_LOW;
    // The Taylor polynomial: |r| ≤ ln 2 / 2, so the first term left out is below 2⁻²⁷.
    let mut p = 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    let p = p * r * r + r + 1.0;
    // 2ⁿ in two factors: n may be 128.
    let low = shifted.to_bits().wrapping_sub(ROUND.to_bits()).cast_signed();
    let half = low >> 1;
    let power = |n: i32| f32::from_bits((n + 127).cast_unsigned() << 23);
    let result = p * power(half) * power(low - half);
    let result = if x < -87.3 { 0.0 } else { result };
    if x > 88.7 { f32::INFINITY } else { result }
}

/// erf, within 5e-7: x · P(x²) / Q(x²) below 3.925, a minimax fit of the relative error, and ±1 from
/// there, where 1 − erf is less than half a unit in the last place.
#[inline(always)]
pub(crate) fn erf(x: f32) -> f32 {
    const LIMIT: f32 = 3.925;
    let z = x.clamp(-LIMIT, LIMIT);
    let t = z * z;
    let mut p = 2.046_02e-6;
    p = p * t + 2.848_450_6e-4;
    p = p * t + 3.772_608_8e-3;
    p = p * t + 5.276_948e-2;
    p = p * t + 0.190_595_1;
    p = p * t + std::f32::consts::FRAC_2_SQRT_PI;
    let mut q = 3.804_778e-5;
    q = q * t + 1.163_872_4e-3;
    q = q * t + 1.498_331_5e-2;
    q = q * t + 0.114_183_28;
    q = q * t + 0.502_243_2;
    q = q * t + 1.0;
    let inside = (z * p / q).clamp(-1.0, 1.0);
    let outside = 1.0_f32.copysign(x);
    if x.abs() >= LIMIT { outside } else { inside }
}
