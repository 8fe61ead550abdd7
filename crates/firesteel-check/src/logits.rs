use serde::{Deserialize, Serialize};
use std::cmp::Ordering;

/// How the logits of one token differ.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LogitsDifference {
    /// Most probable token of the reference.
    pub reference_top: u32,
    /// Most probable token of the test.
    pub test_top: u32,
    /// Reference logit of its best token minus that of its second best.
    pub reference_gap: f64,
    /// Share of the reference's five best tokens among the test's five best.
    pub top5: f64,
    /// KL divergence of the test from the reference, Σ p·(ln p − ln q), in nats.
    pub kl: f64,
    /// Largest |ln p − ln q| over the reference's twenty best tokens.
    pub top20_logprob: f64,
}

/// Compares the logits of one token. Both slices have the same length, at least 1.
pub fn compare_logits(reference: &[f32], test: &[f32]) -> LogitsDifference {
    let (p, q) = (log_softmax(reference), log_softmax(test));
    let (best, test_best) = (largest(reference, 20), largest(test, 5));
    let five = &best[..best.len().min(5)];
    let shared = five.iter().filter(|id| test_best.contains(id)).count();
    let gap = match best[..] {
        [first, second, ..] => f64::from(reference[first]) - f64::from(reference[second]),
        _ => f64::INFINITY,
    };
    // Terms with p = 0 vanish in the limit.
    let term = |(p, q): (&f64, &f64)| if p.exp() == 0.0 { 0.0 } else { p.exp() * (p - q) };
    LogitsDifference {
        reference_top: best.first().map_or(0, |id| *id as u32),
        test_top: test_best.first().map_or(0, |id| *id as u32),
        reference_gap: gap,
        top5: shared as f64 / five.len().max(1) as f64,
        kl: p.iter().zip(&q).map(term).sum::<f64>().max(0.0),
        top20_logprob: best.iter().map(|id| (p[*id] - q[*id]).abs()).fold(0.0, f64::max),
    }
}

/// The most probable token; the lowest id of equals. `None` for no logits.
pub fn greedy_choice(logits: &[f32]) -> Option<u32> {
    largest(logits, 1).first().map(|id| *id as u32)
}

/// Indices of the `count` largest values, largest first; lower indices first among equals.
fn largest(values: &[f32], count: usize) -> Vec<usize> {
    let order =
        |a: &usize, b: &usize| -> Ordering { values[*b].total_cmp(&values[*a]).then(a.cmp(b)) };
    let mut ids: Vec<usize> = (0..values.len()).collect();
    if count < ids.len() {
        ids.select_nth_unstable_by(count, order);
        ids.truncate(count);
    }
    ids.sort_by(order);
    ids
}

/// ln of the probability of `id`, which is below the number of logits.
pub(crate) fn log_probability(logits: &[f32], id: usize) -> f64 {
    let maximum = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let total = logits.iter().map(|v| (f64::from(*v) - maximum).exp()).sum::<f64>().ln();
    logits.get(id).map_or(f64::NEG_INFINITY, |logit| f64::from(*logit) - maximum - total)
}

/// ln softmax, in f64.
fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let maximum = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let shifted: Vec<f64> = logits.iter().map(|v| f64::from(*v) - f64::from(maximum)).collect();
    let total = shifted.iter().map(|v| v.exp()).sum::<f64>().ln();
    shifted.into_iter().map(|v| v - total).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_distributions() {
        // p = (1/2, 1/4, 1/4), q = (1/4, 1/2, 1/4): KL = ln 2 / 4.
        let p = [2f32.ln(), 0.0, 0.0];
        let q = [0.0, 2f32.ln(), 0.0];
        let difference = compare_logits(&p, &q);
        assert!((difference.kl - 2f64.ln() / 4.0).abs() < 1e-7);
        assert_eq!((difference.reference_top, difference.test_top), (0, 1));
        assert!((difference.top20_logprob - 2f64.ln()).abs() < 1e-6);
        assert_eq!(difference.top5, 1.0);
        assert!((difference.reference_gap - 2f64.ln()).abs() < 1e-7);
    }

    #[test]
    fn equals_take_the_lowest_id() {
        assert_eq!(greedy_choice(&[1.0, 3.0, 3.0]), Some(1));
        assert_eq!(greedy_choice(&[]), None);
        assert_eq!(largest(&[0.0, 5.0, 4.0, 5.0], 3), [1, 3, 2]);
    }
}
