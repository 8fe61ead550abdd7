//! What a model says of each token of the texts that its weights are rounded for.

use super::WeightError;
use firesteel_checkpoint::Checkpoint;
use firesteel_engine::{CpuModel, CpuOptions, KvFormat, PackedCache, SequenceOptions};
use firesteel_step::{Decoder, Wanted};
use std::sync::Arc;

/// Weight of a token whose successor is certain, against 1 of one whose successor can be anything:
/// later tokens see it by way of attention.
const LEAST: f64 = 0.1;

/// Texts from all over `texts` with `tokens` tokens together, or all of them; of one that is too long
/// its beginning.
pub fn spread_over<'a>(texts: &[&'a [u32]], tokens: usize) -> Vec<&'a [u32]> {
    let lengths = texts.iter().map(|text| text.len().min(tokens));
    let all = lengths.clone().fold(0u128, |sum, length| sum + length as u128);
    let most = (tokens as u128).min(all);
    let mut taken = vec![0; texts.len()];
    let (mut seen, mut sum) = (0, 0);
    for (length, taken) in lengths.clone().zip(&mut taken) {
        seen += length as u128;
        // Half of it is in its share of what is taken.
        if (2 * sum + length as u128) * all <= 2 * most * seen {
            *taken = length.min(usize::try_from(most - sum).unwrap_or(usize::MAX));
            sum += *taken as u128;
        }
    }
    for (length, taken) in lengths.zip(&mut taken).filter(|(_, taken)| **taken == 0) {
        *taken = length.min(usize::try_from(most - sum).unwrap_or(usize::MAX));
        sum += *taken as u128;
    }
    let chosen = texts.iter().zip(taken).map(|(text, taken)| &text[..taken]);
    chosen.filter(|text| !text.is_empty()).collect()
}

/// How much an error at each token of `texts` counts, in the order of the texts; 1 in the mean.
///
/// Errors δ of the logits change the probabilities p by a KL divergence of δᵀ(diag p − p pᵀ)δ / 2 in
/// the second order. For independent errors of equal size that is the trace of the matrix,
/// 1 − Σ p², times their square: next to nothing where the model is certain.
pub(super) fn token_weights(model: &Checkpoint, texts: &[&[u32]]) -> Result<Vec<f32>, WeightError> {
    let mut weights = Vec::new();
    logits(model, texts, &mut |logits| {
        let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let (mut sum, mut squares) = (0.0, 0.0);
        for logit in logits {
            let share = f64::from(logit - most).exp();
            sum += share;
            squares += share * share;
        }
        let spread = 1.0 - squares / (sum * sum);
        let spread = if spread.is_finite() { spread } else { 1.0 };
        weights.push((LEAST + (1.0 - LEAST) * spread) as f32);
    })?;
    let mean = weights.iter().copied().map(f64::from).sum::<f64>() / weights.len().max(1) as f64;
    weights.iter_mut().for_each(|weight| *weight = (f64::from(*weight) / mean) as f32);
    Ok(weights)
}

/// Scales the rows of `inputs`, one for each token, so that squares of them count as `weights` say.
pub(super) fn weigh(inputs: &mut [f32], weights: &[f32]) {
    let width = (inputs.len() / weights.len().max(1)).max(1);
    for (row, weight) in inputs.chunks_mut(width).zip(weights) {
        let factor = weight.sqrt();
        row.iter_mut().for_each(|value| *value *= factor);
    }
}

/// Shows `each` the logits of every token of `texts`, on the kernels.
pub(super) fn logits(
    model: &Checkpoint,
    texts: &[&[u32]],
    each: &mut dyn FnMut(&[f32]),
) -> Result<(), WeightError> {
    let Some(context) = texts.iter().map(|text| text.len()).max().filter(|most| *most > 0) else {
        return Ok(());
    };
    let options = CpuOptions { packed: PackedCache::Disabled, ..CpuOptions::default() };
    let vocabulary = model.config().vocab_size.max(1);
    let model = CpuModel::with_options(Arc::new(model.with_weights(Vec::new())?), &options)?;
    let mut decoder = model.sequence(SequenceOptions { context, kv: KvFormat::F32 })?;
    let mut part = Vec::new();
    for text in texts {
        decoder.clear();
        let mut rest = *text;
        while !rest.is_empty() {
            let (now, later) = rest.split_at(decoder.chunk(rest.len()).min(rest.len()));
            decoder.forward(now, Wanted::All, &mut part)?;
            decoder.commit(now.len())?;
            part.chunks(vocabulary).for_each(&mut *each);
            rest = later;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_taken_from_all_over() {
        let ids: Vec<u32> = (0..100).collect();
        let texts: Vec<&[u32]> = ids.chunks(10).collect();
        let firsts = |tokens| -> Vec<u32> {
            spread_over(&texts, tokens).iter().filter_map(|text| text.first().copied()).collect()
        };
        assert_eq!(firsts(100), [0, 10, 20, 30, 40, 50, 60, 70, 80, 90]);
        assert_eq!(firsts(usize::MAX), firsts(100));
        assert_eq!(firsts(30), [10, 40, 80]);
        assert_eq!(spread_over(&texts, 99).concat(), ids[..99]);
        assert_eq!(spread_over(&texts, 3), [&[40, 41, 42][..]]);
        assert!(firsts(0).is_empty() && spread_over(&[], 5).is_empty());
        let uneven = [&ids[..70], &ids[70..75], &ids[75..80], &ids[80..]];
        assert_eq!(spread_over(&uneven, 30), [&ids[..30]]);
        assert_eq!(spread_over(&uneven[1..], 25), [&ids[70..75], &ids[75..80], &ids[80..95]]);
        // What is left of the number comes from the first that have not been taken.
        for tokens in 0..=110 {
            let taken = spread_over(&uneven, tokens).concat();
            assert_eq!(taken.len(), tokens.min(100), "{tokens}");
        }
    }

    #[test]
    fn squares_count_as_the_weights_say() {
        let mut inputs = [1.0, 2.0, 3.0, 4.0];
        weigh(&mut inputs, &[0.25, 4.0]);
        assert_eq!(inputs, [0.5, 1.0, 6.0, 8.0]);
        weigh(&mut [], &[]);
    }
}
