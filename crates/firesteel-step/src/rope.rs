use firesteel_checkpoint::Rope;

/// The angle that each pair of dims turns by from one position to the next, in radians.
///
/// That of pair j is theta^(−2j/dims) (Su et al., RoFormer). With YaRN (Peng et al., 2023) a pair that
/// turns less than `beta_slow` times over the original positions is divided by the factor, one that turns
/// more than `beta_fast` times stays as it is, and between the two pairs, rounded outwards, lies a linear
/// ramp, as in the transformers library.
pub fn rope_frequencies(rope: Rope) -> Vec<f64> {
    let dims = rope.dims as f64;
    let plain = (0..rope.dims / 2).map(|j| rope.theta.powf(-2.0 * j as f64 / dims));
    let Some(yarn) = rope.yarn else { return plain.collect() };
    // The pair, not rounded, that turns so many times.
    let pair = |turns: f64| {
        let positions = yarn.original_positions as f64 / (turns * std::f64::consts::TAU);
        dims * positions.ln() / (2.0 * rope.theta.ln())
    };
    let first = pair(yarn.beta_fast).floor().max(0.0);
    let last = pair(yarn.beta_slow).ceil().min(dims - 1.0);
    // As the reference has it where both are the same pair.
    let width = if first == last { 0.001 } else { last - first };
    plain
        .enumerate()
        .map(|(j, frequency)| {
            let stretched = ((j as f64 - first) / width).clamp(0.0, 1.0);
            frequency / yarn.factor * stretched + frequency * (1.0 - stretched)
        })
        .collect()
}

/// Cosines and sines of `tokens` positions from `first_position` on, each `[tokens, dims]` with
/// the second half of the dims repeating the first, as the half-split rotation wants them, times the
/// embedding's magnitude, which is 1 but for YaRN.
///
/// The angle of pair j at position p is p times its [frequency](rope_frequencies); it is computed
/// in f64 and rounded once, so that late positions lose nothing.
pub fn rope_tables(rope: Rope, first_position: usize, tokens: usize) -> (Vec<f32>, Vec<f32>) {
    let (frequencies, magnitude) = (rope_frequencies(rope), rope.magnitude());
    let mut cos = Vec::with_capacity(tokens * rope.dims);
    let mut sin = Vec::with_capacity(tokens * rope.dims);
    for position in first_position..first_position + tokens {
        for _ in 0..2 {
            for frequency in &frequencies {
                let angle = position as f64 * frequency;
                cos.push((magnitude * angle.cos()) as f32);
                sin.push((magnitude * angle.sin()) as f32);
            }
        }
    }
    (cos, sin)
}

#[cfg(test)]
mod tests {
    use super::*;
    use firesteel_checkpoint::Yarn;

    #[test]
    fn stretched_frequencies_are_those_of_the_reference() {
        let yarn = Yarn {
            factor: 4.0,
            original_positions: 32_768,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: 0.1 * 4f64.ln() + 1.0,
        };
        let rope = Rope { yarn: Some(yarn), ..Rope::plain(1e6, 128) };
        let (plain, stretched) = (rope_frequencies(Rope::plain(1e6, 128)), rope_frequencies(rope));
        // The reference computes 23.59… and 39.65… for the two ends of the ramp and rounds outwards.
        for (j, (plain, stretched)) in plain.iter().zip(&stretched).enumerate() {
            let share = ((j as f64 - 23.0) / 17.0).clamp(0.0, 1.0);
            let expected = plain * (1.0 - share) + plain / 4.0 * share;
            assert!((stretched / expected - 1.0).abs() < 1e-12, "pair {j}: {stretched} {expected}");
        }
        let (cos, sin) = rope_tables(rope, 0, 1);
        assert!(cos.iter().all(|cos| (cos - 1.138_629_4).abs() < 1e-6), "{cos:?}");
        assert!(sin.iter().all(|sin| *sin == 0.0));
    }
}
