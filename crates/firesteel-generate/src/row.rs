//! One row of logits at a time: scanning, weighing, and selection without sorting.

/// Logits that share an entry in [`Row::maxima`].
const BLOCK: usize = 64;

/// Independent accumulators, so that the compiler can use vector registers.
const LANES: usize = 8;

/// The logits of a step, by id.
#[derive(Debug, Clone, Default)]
pub(crate) struct Row {
    pub(crate) logits: Vec<f32>,
    /// The largest logit of each block.
    maxima: Vec<f32>,
    /// Reused by [`Row::bound_of_count`].
    scratch: Vec<f32>,
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
        Ok(self.maxima.iter().copied().fold(f32::NEG_INFINITY, f32::max))
    }

    /// The ids whose logits are `bound` or more, and some others.
    pub(crate) fn candidates(&self, bound: f32) -> impl Iterator<Item = Candidates<'_>> + Clone {
        let blocks = self.logits.chunks(BLOCK).zip(&self.maxima);
        let blocks = (0u32..).step_by(BLOCK).zip(blocks);
        blocks
            .filter(move |(_, (_, largest))| **largest >= bound)
            .map(|(first, (logits, _))| Candidates { first, ids: &[], logits })
    }

    /// The lowest id whose logit is `logit`, which is the largest.
    pub(crate) fn first_of(&self, logit: f32) -> Option<u32> {
        let block = self.maxima.iter().position(|&largest| largest == logit)? * BLOCK;
        let within = self.logits.iter().skip(block).position(|&other| other == logit)?;
        u32::try_from(block + within).ok()
    }

    /// A logit that at least `count` logits reach, near the largest such one: the `count`-th
    /// largest of the maxima of blocks.
    pub(crate) fn bound_of_count(&mut self, count: usize) -> f32 {
        if count == 0 || count > self.maxima.len() {
            return f32::NEG_INFINITY;
        }
        self.scratch.clear();
        self.scratch.extend_from_slice(&self.maxima);
        *self.scratch.select_nth_unstable_by(count - 1, |a, b| b.total_cmp(a)).1
    }
}

/// Some ids with their logits, in order of the ids.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Candidates<'a> {
    /// The id of the first one, where `ids` is empty because they follow one another.
    pub(crate) first: u32,
    pub(crate) ids: &'a [u32],
    pub(crate) logits: &'a [f32],
}

impl Candidates<'_> {
    #[inline(always)]
    pub(crate) fn id(&self, index: usize) -> u32 {
        self.ids.get(index).copied().unwrap_or(self.first.wrapping_add(index as u32))
    }

    /// How many have an id below `id`.
    fn below(&self, id: u32) -> usize {
        if self.ids.is_empty() {
            (id.saturating_sub(self.first) as usize).min(self.logits.len())
        } else {
            self.ids.partition_point(|&other| other < id)
        }
    }
}

/// Weights e^((logit − largest) / temperature): the largest logit weighs exactly 1, and −∞
/// weighs 0.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scale {
    pub(crate) largest: f32,
    pub(crate) temperature: f32,
}

impl Scale {
    #[inline(always)]
    pub(crate) fn weight(self, logit: f32) -> f32 {
        exp_of_negative((logit - self.largest) / self.temperature)
    }

    /// Weight of all `candidates`, and of those that come before an id, in order of logit, then
    /// id.
    pub(crate) fn sums<'c>(
        self,
        candidates: impl Iterator<Item = Candidates<'c>>,
        (logit, id): (f32, u32),
    ) -> Sums {
        let mut sums = Sums::default();
        for candidates in candidates {
            let (lower_ids, others) = candidates.logits.split_at(candidates.below(id));
            for (logits, tied) in [(lower_ids, true), (others, false)] {
                if !logits.is_empty() {
                    let before = |other: f32| other > logit || (tied && other == logit);
                    sums += self.sums_where(logits, before);
                }
            }
        }
        sums
    }

    /// Weight of all `logits`, and of those that are `before`.
    #[inline(always)]
    fn sums_where(self, logits: &[f32], before: impl Fn(f32) -> bool) -> Sums {
        let mut sums = [Sums::default(); LANES];
        let (groups, rest) = logits.as_chunks::<LANES>();
        let mut take = |logits: &[f32]| {
            for (sum, &logit) in sums.iter_mut().zip(logits) {
                let weight = f64::from(self.weight(logit));
                sum.total += weight;
                sum.before += if before(logit) { weight } else { 0.0 };
            }
        };
        for group in groups {
            take(group);
        }
        take(rest);
        sums.into_iter().fold(Sums::default(), |mut all, sum| {
            all += sum;
            all
        })
    }

    /// Weight of all `logits`.
    pub(crate) fn total(self, logits: &[f32]) -> f64 {
        let mut sums = [0f64; LANES];
        let mut weights = [0f32; BLOCK];
        for block in logits.chunks(BLOCK) {
            // One thing at a time, so that each runs in vector registers.
            for (weight, &logit) in weights.iter_mut().zip(block) {
                *weight = self.weight(logit);
            }
            for group in weights[..block.len()].chunks(LANES) {
                for (sum, &weight) in sums.iter_mut().zip(group) {
                    *sum += f64::from(weight);
                }
            }
        }
        sums.iter().sum()
    }
}

/// What [`Scale::sums`] adds up.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Sums {
    pub(crate) total: f64,
    pub(crate) before: f64,
}

impl std::ops::AddAssign for Sums {
    fn add_assign(&mut self, other: Self) {
        self.total += other.total;
        self.before += other.before;
    }
}

/// Ids with their logits, in order of the ids.
#[derive(Debug, Clone, Default)]
pub(crate) struct Pool {
    pub(crate) ids: Vec<u32>,
    pub(crate) logits: Vec<f32>,
    /// Reused by [`Pool::keep`]: keys of the range in question, and how many there are by distance
    /// from the largest key.
    range: Vec<i32>,
    histogram: Vec<usize>,
}

const HISTOGRAM_BITS: u32 = 11;

impl Pool {
    /// Takes the ids whose logits are `bound` or more, but not −∞.
    pub(crate) fn gather(&mut self, row: &Row, bound: f32) {
        self.ids.clear();
        self.logits.clear();
        for Candidates { first, logits: block, .. } in row.candidates(bound) {
            // Written without branches, which could not be predicted.
            let (mut ids, mut logits) = ([0; BLOCK], [0.0; BLOCK]);
            let mut count = 0;
            for (id, &logit) in (first..).zip(block) {
                ids[count % BLOCK] = id;
                logits[count % BLOCK] = logit;
                count += usize::from(logit >= bound && logit != f32::NEG_INFINITY);
            }
            self.ids.extend_from_slice(&ids[..count]);
            self.logits.extend_from_slice(&logits[..count]);
        }
    }

    /// Keeps the `needed` largest logits; of equal ones the lowest ids.
    ///
    /// The logits, as integers of the same order, are counted into a histogram over their range,
    /// and the bucket in which the count is reached is divided further. Every pass takes
    /// [`HISTOGRAM_BITS`] off the range, so there are at most three, whatever the logits, and all
    /// but the first are short unless many logits are nearly equal.
    pub(crate) fn keep(&mut self, mut needed: usize) {
        if needed >= self.ids.len() {
            return;
        }
        let (mut low, mut high) = (i32::MAX, i32::MIN);
        for &logit in &self.logits {
            low = low.min(key(logit));
            high = high.max(key(logit));
        }
        self.range.clear();
        if low < high {
            self.range.extend(self.logits.iter().map(|&logit| key(logit)));
        }
        while low < high {
            // Differences of keys fit in 32 bits without a sign.
            let distance = |key: i32| high.wrapping_sub(key) as u32;
            let bits = u32::BITS - distance(low).leading_zeros();
            let shift = bits.saturating_sub(HISTOGRAM_BITS);
            self.histogram.clear();
            self.histogram.resize(1 << HISTOGRAM_BITS, 0);
            let histogram = self.histogram.as_mut_slice();
            for &key in &self.range {
                if let Some(bucket) = histogram.get_mut((distance(key) >> shift) as usize) {
                    *bucket += 1;
                }
            }
            let mut above = 0;
            let reached = (0u32..).zip(&self.histogram).find(|(_, count)| {
                let reached = above + **count >= needed;
                above += if reached { 0 } else { **count };
                reached
            });
            // All of them are more than are needed.
            let Some((bucket, _)) = reached else { break };
            needed -= above;
            high = high.wrapping_sub((bucket << shift) as i32);
            low = low.max(high.saturating_sub((1 << shift) - 1));
            // One comparison, since two that each go either way could not be predicted.
            let span = high.wrapping_sub(low) as u32;
            self.range.retain(|&key| high.wrapping_sub(key) as u32 <= span);
        }
        let mut tied = needed;
        self.retain(|logit| {
            let key = key(logit);
            let kept = key > low || (key == low && tied > 0);
            tied = tied.saturating_sub(usize::from(key == low));
            kept
        });
    }

    /// Keeps what `keep` says of a logit.
    fn retain(&mut self, mut keep: impl FnMut(f32) -> bool) {
        let mut kept = 0;
        // Slices of their own, whose ends stay in registers while the elements are written.
        let (ids, logits) = (self.ids.as_mut_slice(), self.logits.as_mut_slice());
        for index in 0..ids.len() {
            let logit = logits[index];
            // Written without a branch, which could not be predicted.
            ids[kept] = ids[index];
            logits[kept] = logit;
            kept += usize::from(keep(logit));
        }
        self.ids.truncate(kept);
        self.logits.truncate(kept);
    }
}

/// An integer that orders as the logit does; −0 and 0 have the same.
fn key(logit: f32) -> i32 {
    let bits = (logit + 0.0).to_bits() as i32;
    // Of negative numbers, larger ones have smaller magnitudes.
    bits ^ ((bits >> 31) & i32::MAX)
}

/// Below it, e^x is smaller than the normal numbers.
const SMALLEST_EXPONENT: f32 = -87.0;

/// e^x for x up to 0, to within 3e-7 of the value; 0 below −87 and for NaN. It has no branches
/// and calls nothing, so it runs in vector registers, and gives the same on every machine.
///
/// With n the integer nearest to x / ln 2, e^x is 2^n times e^(x − n ln 2), whose argument is
/// at most ln 2 / 2 in magnitude, where seven terms of the Taylor series are enough.
#[inline(always)]
fn exp_of_negative(x: f32) -> f32 {
    /// 1.5 · 2^23: added to a small number, it leaves the nearest integer in the low bits.
    const ROUND: f32 = 12_582_912.0;
    /// ln 2 in two parts, the first with so few bits that products with n are exact.
    const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
    let in_range = x >= SMALLEST_EXPONENT;
    let x = if in_range { x } else { SMALLEST_EXPONENT };
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * LN_2[0]) - n * LN_2[1];
    // In pairs of terms, which do not wait for each other (Estrin's scheme).
    let square = r * r;
    let low = (1.0 + r) + square * (0.5 + r * (1.0 / 6.0));
    let high = (1.0 / 24.0 + r * (1.0 / 120.0)) + square * (1.0 / 720.0 + r * (1.0 / 5040.0));
    let series = low + square * square * high;
    let exponent = shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127);
    if in_range { series * f32::from_bits(exponent << 23) } else { 0.0 }
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
    fn the_exponential_is_right() {
        for step in 0..=870_000 {
            let x = -(step as f32) * 1e-4;
            let (got, exact) = (f64::from(exp_of_negative(x)), f64::from(x).exp());
            assert!((got / exact - 1.0).abs() < 3e-7, "{x}: {got} {exact}");
        }
        assert_eq!(exp_of_negative(0.0), 1.0);
        for x in [-87.1, -1e9, f32::NEG_INFINITY, f32::NAN] {
            assert_eq!(exp_of_negative(x), 0.0);
        }
    }

    #[test]
    fn keys_order_as_logits() {
        let logits = [f32::MIN, -1.0, -f32::MIN_POSITIVE, -0.0, f32::MIN_POSITIVE, 2.0, f32::MAX];
        assert!(logits.map(key).is_sorted());
        assert_eq!(key(-0.0), key(0.0));
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

    proptest! {
        #[test]
        fn keeping_a_count_is_the_head_of_the_sorted_logits(
            logits in logits(),
            count in 1usize..320,
        ) {
            let mut row = row(&logits);
            let bound = row.bound_of_count(count);
            prop_assert!(logits.iter().filter(|&&l| l >= bound).count() >= count.min(logits.len()));
            let mut pool = Pool::default();
            pool.gather(&row, bound);
            pool.keep(count);
            let mut expected = sorted(&logits);
            expected.truncate(count);
            expected.sort_unstable();
            let ids: Vec<usize> = pool.ids.iter().map(|&id| id as usize).collect();
            prop_assert_eq!(ids, expected);
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
            let logit = logits[id as usize];
            let row = row(&logits);
            let sums = scale.sums(row.candidates(f32::NEG_INFINITY), (logit, id));
            // The same, of ids that do not follow one another.
            let ids: Vec<u32> = (0..logits.len() as u32).map(|id| 3 * id).collect();
            let candidates = Candidates { first: 0, ids: &ids, logits: &logits };
            let spread = scale.sums(std::iter::once(candidates), (logit, 3 * id));
            let (mut total, mut before) = (0.0, 0.0);
            let order = sorted(&logits);
            let place = order.iter().position(|&other| other == id as usize).unwrap();
            for (index, &other) in order.iter().enumerate() {
                let logit = logits[other];
                let exact = ((f64::from(logit) - f64::from(largest)) / f64::from(temperature)).exp();
                // The quotient is rounded, which counts as much as its size.
                prop_assert!((f64::from(scale.weight(logit)) - exact).abs() <= 1e-5 * exact + 1e-37);
                let weight = f64::from(scale.weight(logit));
                total += weight;
                before += if index < place { weight } else { 0.0 };
            }
            for sums in [sums, spread] {
                prop_assert!((sums.total / total - 1.0).abs() < 1e-12);
                prop_assert!((sums.before - before).abs() <= 1e-12 * before);
            }
            prop_assert!((scale.total(&logits) / total - 1.0).abs() < 1e-12);
        }
    }
}
