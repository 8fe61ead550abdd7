use crate::{Measurement, Statistic};
use serde::Serialize;

/// The times of some runs of one graph, in ms.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct RunTimes {
    /// The one number.
    pub ms: f64,
    /// What it stands for.
    pub statistic: Statistic,
    /// The shortest run.
    pub low: Option<f64>,
    /// A tenth of the runs is at most this long.
    pub p10: Option<f64>,
    /// Nine tenths of the runs are at most this long.
    pub p90: Option<f64>,
    /// The longest run.
    pub high: Option<f64>,
    /// The median of the distances from the median.
    pub median_deviation: Option<f64>,
    /// Number of runs.
    pub n: Option<u64>,
}

impl RunTimes {
    /// The median and the spread of `runs`, in ms; `None` of none. Quantiles are the nearest rank:
    /// each one is the time of a run.
    pub fn of_runs(runs: &[f64]) -> Option<Self> {
        let mut runs = runs.to_vec();
        runs.sort_by(f64::total_cmp);
        let ms = median(&runs)?;
        let mut distances: Vec<f64> = runs.iter().map(|run| (run - ms).abs()).collect();
        distances.sort_by(f64::total_cmp);
        let rank = |tenths: usize| {
            let rank = runs.len().saturating_mul(tenths).div_ceil(10).max(1);
            runs.get(rank - 1).copied()
        };
        Some(Self {
            ms,
            statistic: Statistic::Median,
            low: runs.first().copied(),
            p10: rank(1),
            p90: rank(9),
            high: runs.last().copied(),
            median_deviation: median(&distances),
            n: Some(runs.len() as u64),
        })
    }

    /// A number of which only the number is known.
    pub fn unstated(ms: f64) -> Self {
        Self {
            ms,
            statistic: Statistic::Unstated,
            low: None,
            p10: None,
            p90: None,
            high: None,
            median_deviation: None,
            n: None,
        }
    }

    /// These times in the place of those of `row`.
    pub fn fill(&self, row: Measurement) -> Measurement {
        Measurement {
            ms: self.ms,
            statistic: self.statistic,
            low: self.low,
            high: self.high,
            n: self.n,
            ..row
        }
    }
}

/// The middle of sorted values, or the mean of the two in the middle; `None` of none.
pub(crate) fn median(sorted: &[f64]) -> Option<f64> {
    let half = sorted.len() / 2;
    let upper = *sorted.get(half)?;
    if sorted.len() % 2 == 1 {
        return Some(upper);
    }
    let lower = *sorted.get(half.checked_sub(1)?)?;
    Some(lower + (upper - lower) / 2.0)
}
