use serde::{Deserialize, Serialize};

/// Accumulates signal and noise of a test against a reference.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SnrMeter {
    signal: f64,
    noise: f64,
    max_abs: f64,
    count: u64,
}

/// A signal-to-noise ratio.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Snr {
    /// 10·log10(Σref² / Σ(ref − test)²) in dB; `None` when the two are identical or nothing was
    /// compared. Negative infinity (a reference of zeros) is reported as −999.
    pub db: Option<f64>,
    /// Largest |ref − test|.
    pub max_abs: f64,
    /// Whether every compared value is equal.
    pub identical: bool,
    /// Values compared.
    pub count: u64,
}

impl SnrMeter {
    /// Adds pairs of values; the slices have equal length. A test value that is not finite counts
    /// as infinite noise.
    pub fn add(&mut self, reference: &[f32], test: &[f32]) {
        for (r, t) in reference.iter().zip(test) {
            let (r, t) = (f64::from(*r), f64::from(*t));
            let difference = if r == t { 0.0 } else { (r - t).abs() };
            let difference = if difference.is_nan() { f64::INFINITY } else { difference };
            self.signal += r * r;
            self.noise += difference * difference;
            self.max_abs = self.max_abs.max(difference);
        }
        self.count += reference.len().min(test.len()) as u64;
    }

    /// Adds what another meter has seen.
    pub fn merge(&mut self, other: &SnrMeter) {
        self.signal += other.signal;
        self.noise += other.noise;
        self.max_abs = self.max_abs.max(other.max_abs);
        self.count += other.count;
    }

    /// The ratio so far.
    pub fn snr(&self) -> Snr {
        let identical = self.noise == 0.0 && self.count > 0;
        let db = 10.0 * (self.signal / self.noise).log10();
        let db = match db {
            _ if self.noise == 0.0 => None,
            db if db.is_finite() => Some(db),
            _ => Some(-999.0),
        };
        Snr { db, max_abs: self.max_abs, identical, count: self.count }
    }
}

impl Snr {
    /// Whether the ratio reaches `minimum` dB; identical values reach any.
    pub fn reaches(&self, minimum: f64) -> bool {
        self.identical || self.db.is_some_and(|db| db >= minimum)
    }

    /// The ratio to order by: +∞ when identical, NaN-free.
    pub fn order(&self) -> f64 {
        self.db.unwrap_or(if self.identical { f64::INFINITY } else { f64::NEG_INFINITY })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratio_of_known_noise() {
        let mut meter = SnrMeter::default();
        meter.add(&[10.0, 0.0], &[9.0, 0.0]);
        let snr = meter.snr();
        assert!((snr.db.unwrap() - 20.0).abs() < 1e-12);
        assert_eq!(snr.max_abs, 1.0);
        assert!(snr.reaches(20.0 - 1e-9) && !snr.reaches(20.1));
    }

    #[test]
    fn identical_silent_and_broken_values() {
        let mut meter = SnrMeter::default();
        assert!(!meter.snr().reaches(0.0), "nothing compared reaches nothing");
        meter.add(&[1.0], &[1.0]);
        assert!(meter.snr().identical && meter.snr().reaches(1e9));
        meter.add(&[1.0], &[f32::NAN]);
        assert!(!meter.snr().reaches(-100.0));
        let mut silent = SnrMeter::default();
        silent.add(&[0.0], &[1.0]);
        assert_eq!(silent.snr().db, Some(-999.0));
    }
}
