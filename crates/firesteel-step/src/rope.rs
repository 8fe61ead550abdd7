use firesteel_checkpoint::Rope;

/// Cosines and sines of `tokens` positions from `first_position` on, each `[tokens, dims]` with
/// the second half of the dims repeating the first, as the half-split rotation wants them.
///
/// The angle of pair j at position p is p · theta^(−2j/dims) (Su et al., RoFormer); it is computed
/// in f64 and rounded once, so that late positions lose nothing.
pub fn rope_tables(rope: Rope, first_position: usize, tokens: usize) -> (Vec<f32>, Vec<f32>) {
    let half = rope.dims / 2;
    let frequencies: Vec<f64> =
        (0..half).map(|j| rope.theta.powf(-2.0 * j as f64 / rope.dims as f64)).collect();
    let mut cos = Vec::with_capacity(tokens * rope.dims);
    let mut sin = Vec::with_capacity(tokens * rope.dims);
    for position in first_position..first_position + tokens {
        for _ in 0..2 {
            for frequency in &frequencies {
                let angle = position as f64 * frequency;
                cos.push(angle.cos() as f32);
                sin.push(angle.sin() as f32);
            }
        }
    }
    (cos, sin)
}
