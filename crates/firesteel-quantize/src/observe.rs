use serde::{Deserialize, Serialize};
use std::fmt;

/// How a range is chosen from what was seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Method {
    /// For 8 bits, whose steps are so coarse that some saturation pays, half way from the smallest
    /// and the largest value to the range of least error, because other texts reach further; for
    /// more bits the smallest and the largest value.
    #[default]
    Auto,
    /// The smallest and the largest value.
    MinMax,
    /// Without the outermost values, one in 20,000 on either side.
    Percentile,
    /// The least mean squared error of rounding and saturation together.
    Mse,
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Auto => "auto",
            Self::MinMax => "minmax",
            Self::Percentile => "percentile",
            Self::Mse => "mse",
        })
    }
}

/// Share of the values that [`Method::Percentile`] leaves out on either side.
const TAIL: f64 = 5e-5;

/// Bins on either side of zero.
const HALF: usize = 2048;

/// Steps by which [`Method::Mse`] narrows a side.
const STEPS: usize = 64;

/// Statistics of one value. Its memory depends on the value's channels, not on how much it sees,
/// and what it holds does not depend on how the elements come in parts.
#[derive(Debug, Clone)]
pub struct RangeObserver {
    min: f64,
    max: f64,
    count: u64,
    finite: bool,
    largest_row_square: f64,
    histogram: Histogram,
    /// Largest magnitude of each channel; empty when they are not kept apart.
    channels: Vec<f32>,
    /// Σx² of each channel.
    squares: Vec<f64>,
}

/// Counts of equally wide bins over [−2^e, 2^e). A wider one is made by joining neighbours, so the
/// result is that of the last width from the start.
#[derive(Debug, Clone)]
struct Histogram {
    exponent: i32,
    counts: Vec<u64>,
}

impl RangeObserver {
    /// An observer that keeps `channels` apart: those of the last axis, or of the last axis in each
    /// of the equally large parts that the rows fall into, such as heads; 0 for none.
    pub fn new(channels: usize) -> Self {
        Self {
            min: f64::INFINITY,
            max: f64::NEG_INFINITY,
            count: 0,
            finite: true,
            largest_row_square: 0.0,
            histogram: Histogram { exponent: -24, counts: vec![0; 2 * HALF] },
            channels: vec![0.0; channels],
            squares: vec![0.0; channels],
        }
    }

    /// Adds the elements of a value whose rows have `width` elements. Elements below `floor` are
    /// left out: they are masked.
    pub fn add(&mut self, values: &[f64], width: usize, floor: f64) {
        let width = width.max(1);
        let parts = (self.channels.len() / width).max(1);
        let rows = (values.len() / width).div_ceil(parts).max(1);
        for (row, elements) in values.chunks(width).enumerate() {
            let square: f64 = elements.iter().filter(|x| **x >= floor).map(|x| x * x).sum();
            self.largest_row_square = self.largest_row_square.max(square);
            let first = row / rows * width;
            let magnitudes = self.channels.iter_mut().zip(&mut self.squares).skip(first);
            for ((magnitude, sum), x) in magnitudes.zip(elements) {
                *magnitude = magnitude.max(x.abs() as f32);
                *sum += x * x;
            }
        }
        for &x in values.iter().filter(|x| **x >= floor || x.is_nan()) {
            if !x.is_finite() {
                self.finite = false;
                continue;
            }
            self.min = self.min.min(x);
            self.max = self.max.max(x);
            self.count += 1;
            self.histogram.add(x);
        }
    }

    /// Smallest and largest value; `None` when nothing was seen.
    pub fn extremes(&self) -> Option<[f64; 2]> {
        (self.count > 0).then_some([self.min, self.max])
    }

    /// Values seen.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Whether every value was finite.
    pub fn finite(&self) -> bool {
        self.finite
    }

    /// Largest Σx² of a row: what half precision must hold where it squares.
    pub fn largest_row_square(&self) -> f64 {
        self.largest_row_square
    }

    /// Largest magnitude of each channel.
    pub fn channels(&self) -> &[f32] {
        &self.channels
    }

    /// Σx² of each channel.
    pub fn channel_squares(&self) -> &[f64] {
        &self.squares
    }

    /// The range that `method` chooses for integers of `bits` bits; it contains 0.
    pub fn range(&self, method: Method, bits: u32) -> [f64; 2] {
        let Some([min, max]) = self.extremes() else { return [0.0, 0.0] };
        let (low, high) = (min.min(0.0), max.max(0.0));
        match method {
            Method::Auto if bits > 8 => [low, high],
            Method::MinMax => [low, high],
            Method::Percentile => {
                let skipped = (self.count as f64 * TAIL) as u64;
                let lower = self.histogram.quantile(skipped, false);
                let upper = self.histogram.quantile(skipped, true);
                [lower.clamp(low, 0.0), upper.clamp(0.0, high)]
            }
            Method::Mse => self.least_error([low, high], bits),
            Method::Auto => {
                let [lower, upper] = self.least_error([low, high], bits);
                [(low + lower) / 2.0, (high + upper) / 2.0]
            }
        }
    }

    /// Narrows one side, then the other, then the first again.
    fn least_error(&self, [low, high]: [f64; 2], bits: u32) -> [f64; 2] {
        let levels = f64::from(bits.min(31)).exp2() - 1.0;
        let bins: Vec<(f64, f64)> = self.histogram.bins().collect();
        let error = |low: f64, high: f64| -> f64 {
            let rounding = ((high - low) / levels).powi(2) / 12.0;
            let beyond = |x: f64| (low - x).max(x - high).max(0.0);
            bins.iter().map(|(x, n)| n * (rounding + beyond(*x).powi(2))).sum()
        };
        let narrow = |full: f64, error: &dyn Fn(f64) -> f64| {
            let sides = (0..STEPS).map(|step| full * (1.0 - step as f64 / STEPS as f64));
            let errors = sides.map(|side| (error(side), side));
            let best = errors.reduce(|best, next| if next.0 < best.0 { next } else { best });
            best.map_or(full, |(_, side)| side)
        };
        let upper = narrow(high, &|high| error(low, high));
        let lower = narrow(low, &|low| error(low, upper));
        [lower, narrow(high, &|high| error(lower, high))]
    }
}

impl Histogram {
    fn width(&self) -> f64 {
        f64::from(self.exponent).exp2() / HALF as f64
    }

    fn add(&mut self, x: f64) {
        while x.abs() >= f64::from(self.exponent).exp2() {
            let joined = self.counts.chunks_exact(2).map(|pair| pair[0] + pair[1]);
            let mut counts = vec![0; HALF / 2];
            counts.extend(joined);
            counts.resize(2 * HALF, 0);
            self.counts = counts;
            self.exponent += 1;
        }
        let index = (x / self.width()).floor() + HALF as f64;
        if let Some(count) = self.counts.get_mut(index as usize) {
            *count += 1;
        }
    }

    /// Middle and count of each bin that has any.
    fn bins(&self) -> impl Iterator<Item = (f64, f64)> {
        let width = self.width();
        let middle = move |index: usize| (index as f64 - HALF as f64 + 0.5) * width;
        let bins = self.counts.iter().enumerate().filter(|(_, count)| **count > 0);
        bins.map(move |(index, count)| (middle(index), *count as f64))
    }

    /// The outer edge of the bin of the first value after `skipped` ones, from below or above.
    fn quantile(&self, skipped: u64, from_above: bool) -> f64 {
        let edge = |index: usize| (index as f64 - HALF as f64) * self.width();
        let mut seen = 0;
        let mut passes = |count: u64| {
            seen += count;
            seen > skipped
        };
        if from_above {
            let found = (0..self.counts.len()).rev().find(|index| passes(self.counts[*index]));
            edge(found.map_or(HALF, |index| index + 1))
        } else {
            let found = (0..self.counts.len()).find(|index| passes(self.counts[*index]));
            edge(found.unwrap_or(HALF))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers all over [−1, 1], and two far away.
    fn observed(parts: usize) -> RangeObserver {
        let mut values: Vec<f64> = (0..40_000).map(|i| f64::from(i) / 20_000.0 - 1.0).collect();
        values.insert(7, -1000.0);
        values.insert(30_000, 500.0);
        let mut observer = RangeObserver::new(0);
        for part in values.chunks(parts) {
            observer.add(part, part.len(), f64::NEG_INFINITY);
        }
        observer
    }

    #[test]
    fn every_method_gives_the_range_of_its_definition() {
        let observer = observed(100);
        assert_eq!(observer.range(Method::MinMax, 8), [-1000.0, 500.0]);
        assert_eq!(observer.range(Method::Auto, 16), [-1000.0, 500.0]);
        let [low, high] = observer.range(Method::Mse, 2);
        let half = [(low - 1000.0) / 2.0, (high + 500.0) / 2.0];
        assert_eq!(observer.range(Method::Auto, 2), half);
        let [low, high] = observer.range(Method::Percentile, 8);
        // One bin of [−1024, 1024) is half a unit wide.
        assert!((-1.5..=-1.0).contains(&low) && (1.0..=1.5).contains(&high), "{low} {high}");
        // With 16 bits the two are worth their step; with 2 they are not.
        let [low, high] = observer.range(Method::Mse, 16);
        assert!(low < -950.0 && high > 450.0, "{low} {high}");
        let [low, high] = observer.range(Method::Mse, 2);
        assert!(low > -600.0 && high < 500.0, "{low} {high}");
    }

    #[test]
    fn parts_do_not_matter() {
        let (one, other) = (observed(1), observed(40_002));
        assert_eq!(one.histogram.counts, other.histogram.counts);
        assert_eq!(one.count(), 40_002);
        assert_eq!(one.extremes(), other.extremes());
    }

    #[test]
    fn heads_have_channels_of_their_own() {
        // Two heads of two dimensions, first over three tokens and then over one.
        let mut observer = RangeObserver::new(4);
        let values = [1.0, -2.0, 3.0, 0.0, -1.0, 1.0, 10.0, 0.5, -20.0, 0.0, 5.0, -0.25];
        observer.add(&values, 2, f64::NEG_INFINITY);
        observer.add(&[0.0, 4.0, 1.0, 1.0], 2, f64::NEG_INFINITY);
        assert_eq!(observer.channels(), [3.0, 4.0, 20.0, 1.0]);
        assert_eq!(observer.channel_squares(), [11.0, 21.0, 526.0, 1.3125]);
        // Without heads every row has the same channels.
        let mut observer = RangeObserver::new(2);
        observer.add(&values, 2, f64::NEG_INFINITY);
        assert_eq!(observer.channels(), [20.0, 2.0]);
    }

    #[test]
    fn masked_scores_and_broken_numbers_are_kept_apart() {
        let mut observer = RangeObserver::new(2);
        observer.add(&[-10_000.0, 3.0, -4.0, -9_999.0], 2, -5000.0);
        assert_eq!(observer.extremes(), Some([-4.0, 3.0]));
        assert_eq!(observer.largest_row_square(), 16.0);
        assert!(observer.finite());
        observer.add(&[f64::NAN, 0.0], 2, -5000.0);
        assert!(!observer.finite());
    }
}
