//! One row of logits at a time: scanning, weighing, and selection without sorting.
//!
//! The loops over a block have neither branches nor calls, so that they run in vector registers.

use firesteel_kernels::{Isa, ops};
use std::cmp::Ordering;

/// Logits that share an entry in [`Row::maxima`].
pub(crate) const BLOCK: usize = 64;

/// Independent accumulators, so that the compiler can use vector registers.
const LANES: usize = 8;

/// An id and its logit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Place {
    pub(crate) logit: f32,
    pub(crate) id: u32,
}

impl Place {
    /// Whether it comes before another one: the larger logit, of equal ones the lower id.
    pub(crate) fn is_before(self, other: Self) -> bool {
        self.logit > other.logit || (self.logit == other.logit && self.id < other.id)
    }
}

/// The logits of a step, by id.
#[derive(Debug, Clone, Default)]
pub(crate) struct Row {
    pub(crate) logits: Vec<f32>,
    /// The largest logit of each block.
    maxima: Vec<f32>,
    /// Reused by [`Row::nth_largest`].
    scratch: Vec<f32>,
}

/// Some ids that follow one another.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Block<'r> {
    pub(crate) index: usize,
    pub(crate) largest: f32,
    pub(crate) logits: &'r [f32],
}

impl<'r> Block<'r> {
    /// The largest logit with the first id: no id of the block comes before it.
    pub(crate) fn front(&self) -> Place {
        Place { logit: self.largest, id: self.id(0) }
    }

    pub(crate) fn id(&self, position: usize) -> u32 {
        // The vocabulary's ids fit in 32 bits.
        (self.index * BLOCK + position) as u32
    }

    /// Splits what belongs to the ids, `[BLOCK]` at most, before an id.
    fn split<'v, T>(&self, values: &'v [T], id: u32) -> (&'v [T], &'v [T]) {
        values.split_at((id.saturating_sub(self.id(0)) as usize).min(values.len()))
    }
}

impl Row {
    /// Takes a copy of `logits`. [`Row::scan`] has to follow.
    pub(crate) fn load(&mut self, logits: &[f32]) {
        self.logits.clear();
        self.logits.extend_from_slice(logits);
    }

    /// Finds the largest logit. The error is the first id whose logit is NaN or +∞.
    pub(crate) fn scan(&mut self) -> Result<f32, usize> {
        self.maxima.clear();
        let mut bad = false;
        for block in self.logits.chunks(BLOCK) {
            let mut largest = [f32::NEG_INFINITY; LANES];
            let mut below = [1u32; LANES];
            let mut groups = block.chunks_exact(LANES);
            let mut take = |group: &[f32]| {
                for ((largest, below), &logit) in largest.iter_mut().zip(&mut below).zip(group) {
                    *largest = if logit > *largest { logit } else { *largest };
                    // Neither +∞ nor NaN is.
                    *below &= u32::from(logit < f32::INFINITY);
                }
            };
            groups.by_ref().for_each(&mut take);
            take(groups.remainder());
            bad |= below.contains(&0);
            self.maxima.push(largest.into_iter().fold(f32::NEG_INFINITY, f32::max));
        }
        let is_bad = |logit: &f32| logit.is_nan() || *logit == f32::INFINITY;
        if bad && let Some(id) = self.logits.iter().position(is_bad) {
            return Err(id);
        }
        Ok(self.largest())
    }

    pub(crate) fn block_count(&self) -> usize {
        self.maxima.len()
    }

    fn largest(&self) -> f32 {
        self.maxima.iter().copied().fold(f32::NEG_INFINITY, f32::max)
    }

    /// The blocks that have a logit of `bound` or more.
    pub(crate) fn blocks(&self, bound: f32) -> impl Iterator<Item = Block<'_>> + Clone {
        let blocks = self.logits.chunks(BLOCK).zip(&self.maxima).enumerate();
        blocks
            .map(|(index, (logits, &largest))| Block { index, largest, logits })
            .filter(move |block| block.largest >= bound)
    }

    /// The lowest id whose logit is `logit`, which is the largest.
    pub(crate) fn first_of(&self, logit: f32) -> Option<u32> {
        let block = self.blocks(logit).next()?;
        block.logits.iter().position(|&other| other == logit).map(|position| block.id(position))
    }

    /// The ids whose logits are not −∞.
    pub(crate) fn places(&self) -> impl Iterator<Item = Place> {
        let blocks = self.blocks(f32::MIN);
        let places = blocks.flat_map(|block| {
            let logits = block.logits.iter().enumerate();
            logits.map(move |(position, &logit)| Place { logit, id: block.id(position) })
        });
        places.filter(|place| place.logit >= f32::MIN)
    }

    /// Makes all but the first `count` ids, in order of logit, then id, −∞.
    pub(crate) fn keep(&mut self, count: usize) {
        if count == 0 || count >= self.logits.len() {
            return;
        }
        let lowest = self.nth_largest(count);
        let tied = count - self.count(lowest, |logit| logit > lowest);
        let last = self.nth_equal(lowest, tied);
        for (index, (logits, largest)) in
            self.logits.chunks_mut(BLOCK).zip(&mut self.maxima).enumerate()
        {
            let first = (index * BLOCK) as u32;
            if last.is_before(Place { logit: *largest, id: first }) {
                logits.fill(f32::NEG_INFINITY);
                *largest = f32::NEG_INFINITY;
                continue;
            }
            let ties = (last.id + 1).saturating_sub(first) as usize;
            let (ties, others) = logits.split_at_mut(ties.min(logits.len()));
            for logit in ties {
                *logit = if *logit >= lowest { *logit } else { f32::NEG_INFINITY };
            }
            for logit in others {
                *logit = if *logit > lowest { *logit } else { f32::NEG_INFINITY };
            }
        }
    }

    /// How many logits `is_counted` of those that are `bound` or more.
    fn count(&self, bound: f32, is_counted: impl Fn(f32) -> bool) -> usize {
        let count = |block: Block<'_>| {
            block.logits.iter().map(|&logit| u32::from(is_counted(logit))).sum::<u32>() as usize
        };
        self.blocks(bound).map(count).sum()
    }

    /// The `n`-th id whose logit is `logit`, counted from 1.
    fn nth_equal(&self, logit: f32, n: usize) -> Place {
        let mut left = n;
        for block in self.blocks(logit) {
            let equal = block.logits.iter().map(|&other| u32::from(other == logit)).sum::<u32>();
            if left > equal as usize {
                left -= equal as usize;
                continue;
            }
            let mut positions = (0..block.logits.len()).filter(|&at| block.logits[at] == logit);
            if let Some(position) = positions.nth(left.saturating_sub(1)) {
                return Place { logit, id: block.id(position) };
            }
        }
        Place { logit, id: u32::MAX - 1 }
    }

    /// The `count`-th largest logit, of 1 to all of them.
    ///
    /// A sample says between which two logits it most likely lies, and only what lies there is
    /// selected from; where the sample misleads, all logits are.
    fn nth_largest(&mut self, count: usize) -> f32 {
        let whole = (f32::NEG_INFINITY, self.largest());
        let guess = self.bracket(count);
        for (low, high) in [guess, whole] {
            let above = self.count(low, |logit| logit > high);
            let reached = self.count(low, |logit| logit >= low);
            if !(above < count && count <= reached) {
                continue;
            }
            if low == high {
                return low;
            }
            // One more than are found, since each is written before it is known whether it counts.
            self.scratch.clear();
            self.scratch.resize(reached - above + 1, 0.0);
            let mut found = 0;
            let (logits, maxima) = (&self.logits, &self.maxima);
            for (block, _) in logits.chunks(BLOCK).zip(maxima).filter(|(_, max)| **max >= low) {
                for &logit in block {
                    if let Some(next) = self.scratch.get_mut(found) {
                        *next = logit;
                    }
                    found += usize::from(logit >= low && logit <= high);
                }
            }
            self.scratch.truncate(reached - above);
            return *self.scratch.select_nth_unstable_by(count - above - 1, descending).1;
        }
        f32::NEG_INFINITY
    }

    /// Two logits between which, both included, the `count`-th largest one lies if one logit of
    /// each block is a fair sample: four standard deviations of its rank on both sides of it.
    fn bracket(&mut self, count: usize) -> (f32, f32) {
        let largest = self.largest();
        self.scratch.clear();
        // Another position in each block, so that what recurs in the vocabulary is not missed.
        let sample = self.logits.chunks(BLOCK).enumerate();
        self.scratch.extend(sample.filter_map(|(index, block)| block.get(index * 37 % BLOCK)));
        let share = count as f64 / self.logits.len().max(1) as f64;
        let rank = share * self.scratch.len() as f64;
        let margin = 4.0 * (rank * (1.0 - share)).sqrt() + 4.0;
        let (first, last) = (rank - margin, rank + margin);
        let sample = self.scratch.as_mut_slice();
        let low = if last >= sample.len() as f64 {
            f32::NEG_INFINITY
        } else {
            *sample.select_nth_unstable_by(last as usize, descending).1
        };
        let high = if first < 0.0 {
            largest
        } else {
            *sample.select_nth_unstable_by(first as usize, descending).1
        };
        (low, high)
    }
}

fn descending(a: &f32, b: &f32) -> Ordering {
    b.total_cmp(a)
}

/// Weights e^((logit − largest) / temperature): the largest logit weighs exactly 1, and −∞
/// weighs 0.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scale {
    pub(crate) largest: f32,
    pub(crate) temperature: f32,
}

impl Scale {
    pub(crate) fn weight(self, logit: f32) -> f32 {
        ops::weight(logit, self.largest, self.temperature)
    }
}

/// Weights of a row, taken block by block and once a step.
#[derive(Debug, Clone)]
pub(crate) struct Weights {
    isa: Isa,
    /// By id, of the blocks that are weighed.
    weights: Vec<f32>,
    /// Of each block that is weighed.
    totals: Vec<Option<f64>>,
}

impl Weights {
    /// None yet; they are the same on every instruction set.
    pub(crate) fn new(isa: Isa) -> Self {
        Self { isa, weights: Vec::new(), totals: Vec::new() }
    }

    /// Forgets the last row.
    pub(crate) fn clear(&mut self) {
        self.totals.clear();
    }

    /// Weight of all ids of the blocks that have a logit of `bound` or more.
    pub(crate) fn total(&mut self, row: &Row, scale: Scale, bound: f32) -> f64 {
        self.weights.resize(row.logits.len(), 0.0);
        self.totals.resize(row.maxima.len(), None);
        let mut sum = 0.0;
        for block in row.blocks(bound) {
            let weights = self.weights.chunks_mut(BLOCK).nth(block.index);
            let (Some(weights), Some(total)) = (weights, self.totals.get_mut(block.index)) else {
                continue;
            };
            sum += *total.get_or_insert_with(|| {
                ops::weigh(self.isa, block.logits, scale.largest, scale.temperature, weights)
            });
        }
        sum
    }

    /// Weight of the ids that come before one. The total of the blocks that have its logit is
    /// taken before.
    pub(crate) fn before(&self, row: &Row, place: Place) -> f64 {
        let mut sum = 0.0;
        for block in row.blocks(place.logit) {
            let Some(weights) = self.weights.chunks(BLOCK).nth(block.index) else { continue };
            let (lower, others) = block.split(block.logits, place.id);
            let (lower_weights, other_weights) = block.split(weights, place.id);
            let mut counted = [0.0; BLOCK];
            for ((counted, &logit), &weight) in counted.iter_mut().zip(lower).zip(lower_weights) {
                *counted = if logit >= place.logit { weight } else { 0.0 };
            }
            sum += sum_of(&counted[..lower.len()]);
            for ((counted, &logit), &weight) in counted.iter_mut().zip(others).zip(other_weights) {
                *counted = if logit > place.logit { weight } else { 0.0 };
            }
            sum += sum_of(&counted[..others.len()]);
        }
        sum
    }
}

fn sum_of(weights: &[f32]) -> f64 {
    let mut sums = [0f64; LANES];
    let (groups, rest) = weights.as_chunks::<LANES>();
    for group in groups {
        for (sum, &weight) in sums.iter_mut().zip(group) {
            *sum += f64::from(weight);
        }
    }
    sums.iter().sum::<f64>() + rest.iter().copied().map(f64::from).sum::<f64>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn row(logits: &[f32]) -> Row {
        let mut row = Row::default();
        row.load(logits);
        row.scan().unwrap();
        row
    }

    #[test]
    fn scanning_finds_the_largest_and_the_first_bad_logit() {
        for length in [1, 15, 16, 17, 63, 64, 65, 200] {
            for at in 0..length {
                let mut logits = vec![-1.0; length];
                logits[at] = 2.0;
                let mut row = row(&logits);
                assert_eq!((row.scan(), row.first_of(2.0)), (Ok(2.0), Some(at as u32)));
                for bad in [f32::NAN, f32::INFINITY] {
                    logits[at] = bad;
                    logits[length - 1] = bad;
                    row.load(&logits);
                    assert_eq!(row.scan(), Err(at));
                }
            }
        }
        assert_eq!(Row::default().scan(), Ok(f32::NEG_INFINITY));
    }

    /// Positions in order of logit, then position.
    fn sorted(logits: &[f32]) -> Vec<usize> {
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[b].partial_cmp(&logits[a]).unwrap().then(a.cmp(&b)));
        order
    }

    /// Logits of which many are equal, close, or of either sign.
    fn logits() -> impl Strategy<Value = Vec<f32>> {
        let logit = prop_oneof![
            (-3i32..3).prop_map(|x| x as f32),
            (0i32..50).prop_map(|x| 1.0 + x as f32 * f32::EPSILON),
            -30.0f32..30.0,
            Just(-0.0f32),
            Just(f32::MIN),
        ];
        proptest::collection::vec(logit, 1..300)
    }

    fn check_keep(what: &str, logits: &[f32], count: usize) {
        let mut row = row(logits);
        row.keep(count);
        let mut expected = sorted(logits);
        if count > 0 {
            expected.truncate(count);
        }
        expected.retain(|&at| logits[at] > f32::NEG_INFINITY);
        expected.sort_unstable();
        let kept: Vec<usize> = row.places().map(|place| place.id as usize).collect();
        assert_eq!(kept, expected, "{what}: {count} of {}", logits.len());
        for place in row.places() {
            assert_eq!(place.logit.to_bits(), logits[place.id as usize].to_bits());
        }
        let maxima = logits_by_block(&row).map(|block| block.fold(f32::NEG_INFINITY, f32::max));
        assert_eq!(maxima.collect::<Vec<_>>(), row.maxima);
    }

    fn logits_by_block(row: &Row) -> impl Iterator<Item = impl Iterator<Item = f32>> {
        row.logits.chunks(BLOCK).map(|block| block.iter().copied())
    }

    /// Rows in which the sample is worth something, in which it misleads, and in which it is worth
    /// nothing because many logits are equal.
    #[test]
    fn keeping_a_count_of_a_large_row_is_the_head_of_the_sorted_logits() {
        const IDS: usize = 40_000;
        let noise = |id: usize| ((id as f64 * 0.618_033_988_75).fract() as f32 - 0.5) * 20.0;
        let is_sampled = |id: usize| id % BLOCK == (id / BLOCK) * 37 % BLOCK;
        let rows: [(&str, &dyn Fn(usize) -> f32); 8] = [
            ("spread", &noise),
            ("rising", &|id| id as f32),
            ("falling", &|id| -(id as f32)),
            ("equal", &|_| 0.5),
            ("two values", &|id| (id % 2) as f32),
            ("few values", &|id| noise(id).round()),
            ("the sample is too high", &|id| noise(id) + if is_sampled(id) { 100.0 } else { 0.0 }),
            ("half is left out", &|id| if id & 1 == 0 { noise(id) } else { f32::NEG_INFINITY }),
        ];
        for (what, logit) in rows {
            let logits: Vec<f32> = (0..IDS).map(logit).collect();
            for count in [1, 2, 50, 625, 3000, 20_000, 20_001, 39_000, IDS - 1, IDS, IDS + 1] {
                check_keep(what, &logits, count);
            }
        }
    }

    proptest! {
        #[test]
        fn keeping_a_count_is_the_head_of_the_sorted_logits(
            logits in logits(),
            count in 0usize..320,
        ) {
            check_keep("any", &logits, count);
        }

        #[test]
        fn weights_are_exponentials(
            logits in logits(),
            temperature in 0.01f32..50.0,
            id in 0u32..300,
        ) {
            let largest = logits.iter().copied().fold(f32::MIN, f32::max);
            let scale = Scale { largest, temperature };
            let id = id % logits.len() as u32;
            let row = row(&logits);
            let place = Place { logit: logits[id as usize], id };
            let (mut total, mut before, mut near) = (0.0, 0.0, 0.0);
            let order = sorted(&logits);
            let turn = order.iter().position(|&other| other == id as usize).unwrap();
            for (index, &other) in order.iter().enumerate() {
                let logit = logits[other];
                let exact = ((f64::from(logit) - f64::from(largest)) / f64::from(temperature)).exp();
                // The quotient is rounded, which counts as much as its size.
                prop_assert!((f64::from(scale.weight(logit)) - exact).abs() <= 1e-5 * exact + 1e-37);
                let weight = f64::from(scale.weight(logit));
                total += weight;
                before += if index < turn { weight } else { 0.0 };
                let block = &logits[other / BLOCK * BLOCK..];
                let is_near = block[..BLOCK.min(block.len())].iter().any(|&l| l >= place.logit);
                near += if is_near { weight } else { 0.0 };
            }
            let mut weights = Weights::new(Isa::named(None).unwrap());
            // Again after a step of other logits, so that nothing of it is left.
            for _ in 0..2 {
                prop_assert!((weights.total(&row, scale, place.logit) / near - 1.0).abs() < 1e-12);
                prop_assert!((weights.before(&row, place) - before).abs() <= 1e-12 * before);
                prop_assert!((weights.total(&row, scale, f32::MIN) / total - 1.0).abs() < 1e-12);
                prop_assert!((weights.before(&row, place) - before).abs() <= 1e-12 * before);
                weights.clear();
                let other = Scale { largest: largest + 1.0, temperature };
                weights.total(&row, other, f32::MIN);
                weights.clear();
            }
        }
    }
}
