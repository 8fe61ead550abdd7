/// 10 · log10(Σ reference² / Σ (reference − test)²) in dB, infinite for equal values.
///
/// # Panics
/// When there are not as many of both.
pub fn snr(reference: &[f64], test: &[f32]) -> f64 {
    assert_eq!(reference.len(), test.len());
    let pairs = reference.iter().zip(test).map(|(&r, &t)| (r, f64::from(t)));
    let (signal, noise) =
        pairs.fold((0.0, 0.0), |(s, n), (r, t)| (s + r * r, n + (r - t) * (r - t)));
    10.0 * (signal / noise).log10()
}

/// `values` in f64.
pub fn widened(values: &[f32]) -> Vec<f64> {
    values.iter().copied().map(f64::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hundredth_of_the_energy_is_twenty_decibels() {
        assert!((snr(&[10.0, 0.0], &[9.0, 0.0]) - 20.0).abs() < 1e-12);
        assert!(snr(&widened(&[0.1, -3.0]), &[0.1, -3.0]).is_infinite());
    }
}
