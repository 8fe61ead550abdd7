//! The exponential race: noise for every id, and the id that wins.

use crate::row::{BLOCK, Block, Place, Row, Scale, Weights};
use firesteel_kernels::Isa;

/// The noise of one step: an exponential variable for each id, a function of seed, step and id.
///
/// It is drawn by blocks of ids, the smallest variable first. In order of size, the gaps between n
/// exponential variables, starting with that from 0, are independent exponential variables
/// divided by n, n − 1, …, 1, and whose turn it is is a random permutation independent of them
/// (Rényi 1953). So what cannot win is never drawn.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Noise {
    stream: u64,
}

impl Noise {
    pub(crate) fn new(seed: u64, step: usize) -> Self {
        Self { stream: mix(seed.wrapping_add(GOLDEN.wrapping_mul((step as u64).wrapping_add(1)))) }
    }

    /// The variables of a block of [`BLOCK`] ids from the smallest to the largest, each with the
    /// position of its id.
    pub(crate) fn ascending(self, block: usize) -> impl Iterator<Item = (usize, f64)> {
        let mut order: [usize; BLOCK] = std::array::from_fn(|position| position);
        let mut value = 0.0;
        (0..BLOCK).map(move |turn| {
            value += self.gap(block, turn);
            // A step of the shuffle of Fisher and Yates: any of those whose turn it was not yet.
            let left = (BLOCK - turn) as u128;
            let chosen = (u128::from(self.bits(block, turn, 1)) * left) >> u64::BITS;
            order.swap(turn, turn + chosen as usize);
            (order[turn], value)
        })
    }

    /// The smallest variable of a block, which is the first that [`Noise::ascending`] gives.
    fn smallest(self, block: usize) -> f64 {
        self.gap(block, 0)
    }

    /// From the variable that was drawn before to that of this turn.
    fn gap(self, block: usize, turn: usize) -> f64 {
        let bits = self.bits(block, turn, 0);
        // Strictly between 0 and 1. From a signed integer, which is one instruction; the top bit
        // is 0.
        let uniform = ((bits >> 12) as i64 as f64 + 0.5) / (1u64 << 52) as f64;
        -uniform.ln() / (BLOCK - turn) as f64
    }

    /// One of two outputs of the SplitMix64 stream for a turn.
    fn bits(self, block: usize, turn: usize, which: u64) -> u64 {
        let number = 2 * (block * BLOCK + turn) as u64 + which;
        mix(self.stream.wrapping_add(GOLDEN.wrapping_mul(number + 1)))
    }
}

/// Step of the SplitMix64 counter: 2^64 divided by the golden ratio.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Output function of SplitMix64 (Steele, Lea, Flood 2014).
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The race of one step.
#[derive(Debug)]
pub(crate) struct Race<'r> {
    pub(crate) row: &'r Row,
    pub(crate) scale: Scale,
    pub(crate) noise: Noise,
    /// min-p: ids of less weight, as a share of that of the most probable one, take no part.
    pub(crate) min_p: f32,
    /// top-p: the share of the weight that the nucleus has, the fewest most probable ids that take part
    /// (Holtzman et al., The Curious Case of Neural Text Degeneration, 2020).
    pub(crate) top_p: f64,
}

/// What a race needs room for, to be used again.
#[derive(Debug, Clone)]
pub(crate) struct RaceBuffers {
    /// For each block, a score that none of its ids exceeds; −∞ if none takes part.
    limits: Vec<f64>,
    pub(crate) weights: Weights,
}

impl RaceBuffers {
    pub(crate) fn new(isa: Isa) -> Self {
        Self { limits: Vec::new(), weights: Weights::new(isa) }
    }
}

impl Race<'_> {
    /// The winner among the nucleus: the fewest first ids, in order of logit, then id, that together
    /// have the share `top_p` of the weight.
    ///
    /// An id is among them if those before it weigh less. So the race goes over all ids: where the
    /// winner is one of them, it is their winner too. Where it is not, neither is any that comes
    /// after it, and the others race again, with the same noise: 1 − ln `top_p` times on average,
    /// and no set has to be selected. Where few ids weigh most, those near the winner are enough to
    /// know, whatever the others weigh.
    pub(crate) fn run(&self, buffers: &mut RaceBuffers) -> Option<u32> {
        let bound = self.lowest();
        buffers.limits.clear();
        buffers.limits.resize(self.row.block_count(), f64::NEG_INFINITY);
        for block in self.row.blocks(bound) {
            if let Some(limit) = buffers.limits.get_mut(block.index) {
                *limit = self.score(block.largest, self.noise.smallest(block.index));
            }
        }
        buffers.weights.clear();
        let mut end = None;
        loop {
            let winner = self.winner(bound, end, &buffers.limits)?;
            if self.top_p >= 1.0 {
                return Some(winner.id);
            }
            let (row, scale, weights) = (self.row, self.scale, &mut buffers.weights);
            let near = weights.total(row, scale, winner.logit);
            let before = weights.before(row, winner);
            if before < self.top_p * near
                || before < self.top_p * weights.total(row, scale, f32::MIN)
            {
                return Some(winner.id);
            }
            end = Some(winner);
        }
    }

    /// A logit such that all lower ones are lighter than the lightest that takes part.
    fn lowest(&self) -> f32 {
        /// More than the relative error of a weight, which is that of the rounded quotient in the
        /// exponent and of the exponential.
        const WEIGHT_ERROR: f64 = 1e-4;
        let exponent = f64::from(self.min_p).ln() - WEIGHT_ERROR;
        let lowest = f64::from(self.scale.largest) + f64::from(self.scale.temperature) * exponent;
        (lowest as f32).next_down().max(f32::MIN)
    }

    /// The logarithm of p / e but for a summand that all ids share. It never decreases with the
    /// logit nor increases with `e`, rounding included.
    fn score(&self, logit: f32, e: f64) -> f64 {
        let distance = f64::from(logit) - f64::from(self.scale.largest);
        distance / f64::from(self.scale.temperature) - e.ln()
    }

    /// The id with the largest score of those that come before `end`; of equal scores the first.
    /// `bound` is the lowest logit that takes part.
    fn winner(&self, bound: f32, end: Option<Place>, limits: &[f64]) -> Option<Place> {
        let takes_part = |place: Place| end.is_none_or(|end| place.is_before(end));
        let blocks = self.row.blocks(bound).filter(|block| takes_part(block.front()));
        let limit = |block: &Block<'_>| limits.get(block.index).copied().unwrap_or(f64::INFINITY);
        // With a good score to beat, the other blocks hardly take time.
        let promising = blocks.clone().max_by(|a, b| limit(a).total_cmp(&limit(b)));
        let mut best: Option<(f64, Place)> = None;
        for block in promising.into_iter().chain(blocks) {
            if best.is_some_and(|(score, _)| limit(&block) < score) {
                continue;
            }
            for (position, e) in self.noise.ascending(block.index) {
                if best.is_some_and(|(score, _)| self.score(block.largest, e) < score) {
                    break;
                }
                let Some(&logit) = block.logits.get(position) else { continue };
                let place = Place { logit, id: block.id(position) };
                if logit < bound || !takes_part(place) || self.scale.weight(logit) < self.min_p {
                    continue;
                }
                let score = self.score(logit, e);
                if best.is_none_or(|(other, first)| {
                    score > other || (score == other && place.is_before(first))
                }) {
                    best = Some((score, place));
                }
            }
        }
        best.map(|(_, place)| place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// χ² of counts that are expected to be equal, less its degrees of freedom, over its standard
    /// deviation.
    fn deviation(counts: &[u32]) -> f64 {
        let expected = f64::from(counts.iter().sum::<u32>()) / counts.len() as f64;
        let sum: f64 = counts.iter().map(|&n| (f64::from(n) - expected).powi(2) / expected).sum();
        let freedom = (counts.len() - 1) as f64;
        (sum - freedom) / (2.0 * freedom).sqrt()
    }

    /// Variables of a block by position.
    fn block(noise: Noise, block: usize) -> [f64; BLOCK] {
        let mut values = [f64::NAN; BLOCK];
        for (position, e) in noise.ascending(block) {
            assert!(values[position].is_nan(), "position {position} comes twice");
            values[position] = e;
        }
        values
    }

    #[test]
    fn mix_is_splitmix64() {
        // First outputs of the reference implementation for seed 1234567.
        let outputs: Vec<u64> =
            (1..=3).map(|n| mix(1_234_567u64.wrapping_add(GOLDEN.wrapping_mul(n)))).collect();
        let expected = [6457827717110365317, 3203168211198807973, 9817491932198370423];
        assert_eq!(outputs, expected);
    }

    #[test]
    fn noise_of_a_block_ascends_and_starts_with_the_smallest() {
        for seed in [0, 1, u64::MAX] {
            for step in [0, 1, 900, usize::MAX] {
                let noise = Noise::new(seed, step);
                for block in [0, 1, 2047] {
                    let values: Vec<f64> = noise.ascending(block).map(|(_, e)| e).collect();
                    assert_eq!(values.len(), BLOCK);
                    assert_eq!(values[0], noise.smallest(block));
                    assert!(values[0] > 0.0 && values.is_sorted(), "{seed} {step} {block}");
                }
            }
        }
    }

    /// Every position has an exponential variable, and those of two positions, blocks, steps or
    /// seeds are independent: uniform after e^−x, in all cells of their joint distribution.
    #[test]
    fn noise_is_exponential_and_independent() {
        const CELLS: usize = 8;
        let cell = |e: f64| (((-e).exp() * CELLS as f64) as usize).min(CELLS - 1);
        let mut single = vec![[0u32; 256]; BLOCK];
        let pairs = ["position", "half a block", "ends", "block", "step", "seed"];
        let mut joint = vec![[0u32; CELLS * CELLS]; pairs.len()];
        for seed in 0..4 {
            for step in 0..25 {
                let noise = Noise::new(seed, step);
                for index in 0..100 {
                    let here = block(noise, index);
                    let next = block(noise, index + 1);
                    let later = block(Noise::new(seed, step + 1), index);
                    let other = block(Noise::new(seed + 1, step), index);
                    for (position, &e) in here.iter().enumerate() {
                        single[position][((-e).exp() * 256.0) as usize] += 1;
                        let partners = [
                            here[(position + 1) % BLOCK],
                            here[(position + BLOCK / 2) % BLOCK],
                            here[BLOCK - 1 - position],
                            next[position],
                            later[position],
                            other[position],
                        ];
                        for (joint, partner) in joint.iter_mut().zip(partners) {
                            joint[cell(e) * CELLS + cell(partner)] += 1;
                        }
                    }
                }
            }
        }
        for (position, counts) in single.iter().enumerate() {
            assert!(deviation(counts) < 4.0, "{position}: {}", deviation(counts));
        }
        for (what, counts) in pairs.iter().zip(&joint) {
            assert!(deviation(counts) < 4.0, "{what}: {}", deviation(counts));
        }
    }

    /// The smallest of a block is anywhere in it with the same probability, and the second
    /// smallest anywhere else.
    #[test]
    fn the_order_is_a_random_permutation() {
        let mut first = vec![0u32; BLOCK];
        let mut second = vec![0u32; BLOCK * BLOCK];
        for step in 0..2000 {
            for block in 0..40 {
                let mut order = Noise::new(5, step).ascending(block);
                let (a, b) = (order.next().unwrap().0, order.next().unwrap().0);
                first[a] += 1;
                second[a * BLOCK + b] += 1;
            }
        }
        assert!(deviation(&first) < 4.0, "{}", deviation(&first));
        let possible: Vec<u32> =
            (0..BLOCK * BLOCK).filter(|at| at / BLOCK != at % BLOCK).map(|at| second[at]).collect();
        assert!(deviation(&possible) < 4.0, "{}", deviation(&possible));
        assert_eq!(possible.iter().sum::<u32>(), 80_000);
    }

    /// Against all scores, for rows that end within a block, logits far from each other and
    /// blocks without an id.
    #[test]
    fn the_winner_has_the_largest_score() {
        for ids in [1usize, 63, 64, 65, 500, 5000] {
            let rows: [&dyn Fn(usize) -> f32; 4] = [
                &|_| 0.0,
                &|id| (id as f32 * 1.7).sin() * 4.0,
                &|id| if id % 97 == 0 { 9.0 } else { (id as f32).cos() },
                &|id| if id & BLOCK == 0 { id as f32 * 1e-3 } else { f32::NEG_INFINITY },
            ];
            for logit in rows {
                let logits: Vec<f32> = (0..ids).map(logit).collect();
                let mut row = Row::default();
                row.load(&logits);
                let scale = Scale { largest: row.scan().unwrap(), temperature: 0.8 };
                for step in 0..40 {
                    let noise = Noise::new(1, step);
                    let race = Race { row: &row, scale, noise, min_p: 0.0, top_p: 1.0 };
                    let scores = logits.chunks(BLOCK).enumerate().flat_map(|(index, logits)| {
                        let noise = block(noise, index);
                        let scores = logits.iter().zip(noise);
                        scores.map(|(&logit, e)| race.score(logit, e)).collect::<Vec<_>>()
                    });
                    let expected = scores.enumerate().max_by(|(_, a), (_, b)| a.total_cmp(b));
                    let expected = expected.map(|(id, _)| id as u32);
                    assert_eq!(
                        race.run(&mut RaceBuffers::new(Isa::named(None).unwrap())),
                        expected,
                        "{ids} {step}"
                    );
                }
            }
        }
    }
}
