use crate::GenerateError;
use std::cmp::Ordering;

/// How the next id is picked.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplingOptions {
    /// Divides the logits; 0 always takes the largest one.
    pub temperature: f32,
    /// Keeps this many of the largest logits; 0 keeps all.
    pub top_k: usize,
    /// Keeps the fewest most probable ids whose probabilities add up to this; 1 keeps all.
    pub top_p: f32,
    /// Start of the random numbers: the same seed, options and logits give the same ids.
    pub seed: u64,
}

impl SamplingOptions {
    /// Always the largest logit.
    pub const GREEDY: Self = Self { temperature: 0.0, top_k: 0, top_p: 1.0, seed: 0 };
}

impl Default for SamplingOptions {
    fn default() -> Self {
        Self::GREEDY
    }
}

/// Picks ids from logits.
///
/// Ids that are not allowed are left out first. Then, as in Hugging Face transformers: the logits
/// are divided by the temperature, the `top_k` largest are kept, and of those the fewest whose
/// probabilities reach `top_p`. One of the kept ids is drawn by the exponential race: id i wins
/// when p_i / e_i is largest, where the e_i are independent exponential variables; it does so with
/// probability p_i / Σp. The noise is a function of seed, step and id alone, so the same seed on
/// two runners whose logits differ by rounding picks the same id except where two race scores
/// are within that rounding. Of equal logits the lowest id counts as larger.
#[derive(Debug, Clone)]
pub struct Sampler {
    options: SamplingOptions,
    allowed: Option<Vec<bool>>,
    step: u64,
    /// Reused between steps.
    candidates: Vec<Candidate>,
}

#[derive(Debug, Clone, Copy)]
struct Candidate {
    id: u32,
    logit: f32,
}

impl Candidate {
    /// Largest logit first, then lowest id.
    fn order(&self, other: &Self) -> Ordering {
        other.logit.total_cmp(&self.logit).then(self.id.cmp(&other.id))
    }
}

/// Candidates that are sorted at first in search of `top_p`; four times as many when they are
/// not enough.
const FIRST_SORTED: usize = 256;

impl Sampler {
    /// A sampler that picks among the ids with `allowed[id]`, or among all.
    ///
    /// # Errors
    /// When the temperature is negative or not finite, or `top_p` is not above 0 and at most 1.
    pub fn new(
        options: SamplingOptions,
        allowed: Option<Vec<bool>>,
    ) -> Result<Self, GenerateError> {
        let SamplingOptions { temperature, top_p, .. } = options;
        if !(temperature.is_finite() && temperature >= 0.0) {
            return Err(GenerateError::Option {
                what: "temperature",
                value: temperature.to_string(),
                accepted: "a finite number from 0 is accepted",
            });
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return Err(GenerateError::Option {
                what: "top_p",
                value: top_p.to_string(),
                accepted: "a number above 0 and at most 1 is accepted",
            });
        }
        Ok(Self { options, allowed, step: 0, candidates: Vec::new() })
    }

    /// Picks an id from one row of logits, `[V]`. Logits of −∞ are never picked.
    ///
    /// # Errors
    /// When an allowed logit is NaN or +∞, none is left, or there are more or fewer logits than
    /// ids in the mask.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32, GenerateError> {
        self.collect(logits)?;
        let step = self.step;
        self.step = self.step.wrapping_add(1);
        if self.options.temperature == 0.0 {
            let best = self.candidates.iter().min_by(|a, b| a.order(b));
            return best.map(|best| best.id).ok_or_else(none_left);
        }
        self.keep_top_k();
        self.keep_top_p();
        let temperature = f64::from(self.options.temperature);
        let stream = mix(self.options.seed.wrapping_add(GOLDEN.wrapping_mul(step.wrapping_add(1))));
        let score =
            |c: &Candidate| f64::from(c.logit) / temperature - exponential(stream, c.id).ln();
        let scored = self.candidates.iter().map(|c| (score(c), c));
        let winner = scored.min_by(|(a, x), (b, y)| b.total_cmp(a).then(x.order(y)));
        winner.map(|(_, c)| c.id).ok_or_else(none_left)
    }

    fn collect(&mut self, logits: &[f32]) -> Result<(), GenerateError> {
        let failed = |message| Err(GenerateError::Logits { message });
        if let Some(allowed) = &self.allowed
            && allowed.len() != logits.len()
        {
            return failed(format!("there are {}, but {} ids", logits.len(), allowed.len()));
        }
        self.candidates.clear();
        for (id, &logit) in (0u32..).zip(logits) {
            if let Some(allowed) = &self.allowed
                && !allowed.get(id as usize).is_some_and(|&allowed| allowed)
            {
                continue;
            }
            if logit.is_nan() || logit == f32::INFINITY {
                return failed(format!("the one of id {id} is {logit}"));
            }
            if logit != f32::NEG_INFINITY {
                // Adding 0 turns −0 into 0, which is a tie and not a smaller logit.
                self.candidates.push(Candidate { id, logit: logit + 0.0 });
            }
        }
        if self.candidates.is_empty() { Err(none_left()) } else { Ok(()) }
    }

    fn keep_top_k(&mut self) {
        let k = self.options.top_k;
        if k > 0 && k < self.candidates.len() {
            self.candidates.select_nth_unstable_by(k - 1, Candidate::order);
            self.candidates.truncate(k);
        }
    }

    fn keep_top_p(&mut self) {
        if self.options.top_p >= 1.0 {
            return;
        }
        let temperature = f64::from(self.options.temperature);
        let largest = self.candidates.iter().map(|c| c.logit).fold(f32::NEG_INFINITY, f32::max);
        let weight =
            |c: &Candidate| ((f64::from(c.logit) - f64::from(largest)) / temperature).exp();
        let needed =
            f64::from(self.options.top_p) * self.candidates.iter().map(weight).sum::<f64>();
        let mut sorted = FIRST_SORTED;
        loop {
            sorted = sorted.min(self.candidates.len());
            if sorted < self.candidates.len() {
                self.candidates.select_nth_unstable_by(sorted, Candidate::order);
            }
            let head = &mut self.candidates[..sorted];
            head.sort_unstable_by(Candidate::order);
            let mut sum = 0.0;
            let reached = head.iter().position(|c| {
                sum += weight(c);
                sum >= needed
            });
            if let Some(last) = reached {
                self.candidates.truncate(last + 1);
                return;
            }
            if sorted == self.candidates.len() {
                return;
            }
            sorted = sorted.saturating_mul(4);
        }
    }
}

fn none_left() -> GenerateError {
    GenerateError::Logits { message: "no id is left to pick".into() }
}

/// Step of the SplitMix64 counter: 2^64 divided by the golden ratio.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Output function of SplitMix64 (Steele, Lea, Flood 2014).
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Exponential variable of mean 1: output number `id` of the SplitMix64 stream that starts at
/// `stream`, as a uniform variable strictly between 0 and 1, through −ln.
fn exponential(stream: u64, id: u32) -> f64 {
    let bits = mix(stream.wrapping_add(GOLDEN.wrapping_mul(u64::from(id) + 1)));
    let uniform = ((bits >> 12) as f64 + 0.5) / (1u64 << 52) as f64;
    -uniform.ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampler(options: SamplingOptions) -> Sampler {
        Sampler::new(options, None).unwrap()
    }

    /// Relative frequency of each id over `draws` samples.
    fn frequencies(options: SamplingOptions, logits: &[f32], draws: usize) -> Vec<f64> {
        let mut sampler = sampler(options);
        let mut counts = vec![0f64; logits.len()];
        for _ in 0..draws {
            counts[sampler.sample(logits).unwrap() as usize] += 1.0 / draws as f64;
        }
        counts
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
    fn greedy_takes_the_largest_and_the_lowest_id_of_a_tie() {
        let cases: [(&[f32], u32); 5] = [
            (&[1.0, 3.0, 2.0], 1),
            (&[1.0, 3.0, 3.0], 1),
            (&[-0.0, 0.0], 0),
            (&[0.0, -0.0], 0),
            (&[f32::NEG_INFINITY, -1e30], 1),
        ];
        for (logits, expected) in cases {
            assert_eq!(sampler(SamplingOptions::GREEDY).sample(logits).unwrap(), expected);
        }
    }

    #[test]
    fn ids_that_are_not_allowed_are_never_picked() {
        let allowed = vec![false, true, false, true, false];
        let logits = [9.0, 1.0, f32::NAN, 0.5, f32::INFINITY];
        let mut greedy = Sampler::new(SamplingOptions::GREEDY, Some(allowed.clone())).unwrap();
        assert_eq!(greedy.sample(&logits).unwrap(), 1);
        let hot = SamplingOptions { temperature: 50.0, ..SamplingOptions::GREEDY };
        let mut hot = Sampler::new(hot, Some(allowed)).unwrap();
        for _ in 0..500 {
            assert!([1, 3].contains(&hot.sample(&logits).unwrap()));
        }
    }

    #[test]
    fn logits_that_mean_nothing_are_errors() {
        let cases: [(&[f32], &str); 4] = [
            (&[1.0, f32::NAN], "the one of id 1 is NaN"),
            (&[f32::INFINITY, 1.0], "the one of id 0 is inf"),
            (&[f32::NEG_INFINITY; 2], "no id is left to pick"),
            (&[0.0; 3], "there are 3, but 2 ids"),
        ];
        for (logits, expected) in cases {
            for temperature in [0.0, 1.0] {
                let options = SamplingOptions { temperature, ..SamplingOptions::GREEDY };
                let mut sampler = Sampler::new(options, Some(vec![true; 2])).unwrap();
                let error = sampler.sample(logits).unwrap_err().to_string();
                assert_eq!(error, format!("the logits cannot be sampled: {expected}"));
            }
        }
        assert!(sampler(SamplingOptions::GREEDY).sample(&[]).is_err());
    }

    #[test]
    fn options_out_of_range_are_errors() {
        for temperature in [-0.1, f32::NAN, f32::INFINITY] {
            let options = SamplingOptions { temperature, ..SamplingOptions::GREEDY };
            let error = Sampler::new(options, None).unwrap_err().to_string();
            assert!(error.starts_with(&format!("temperature is {temperature}")), "{error}");
        }
        for top_p in [0.0, -1.0, 1.01, f32::NAN] {
            let options = SamplingOptions { top_p, ..SamplingOptions::GREEDY };
            let error = Sampler::new(options, None).unwrap_err().to_string();
            assert!(error.starts_with(&format!("top_p is {top_p}")), "{error}");
        }
    }

    #[test]
    fn frequencies_are_the_probabilities_at_the_temperature() {
        let probabilities = [0.5f32, 0.3, 0.15, 0.05];
        let logits = probabilities.map(f32::ln);
        let cold: f64 = probabilities.iter().map(|&p| f64::from(p).powi(2)).sum();
        for (temperature, expected) in [
            (1.0, probabilities.map(f64::from)),
            (0.5, probabilities.map(|p| f64::from(p).powi(2) / cold)),
        ] {
            let options = SamplingOptions { temperature, seed: 7, ..SamplingOptions::GREEDY };
            for (got, want) in frequencies(options, &logits, 40_000).iter().zip(expected) {
                assert!((got - want).abs() < 0.01, "temperature {temperature}: {got} {want}");
            }
        }
    }

    #[test]
    fn top_k_and_top_p_keep_the_right_ids() {
        let logits = [0.1f32, 0.4, 0.2, 0.3].map(f32::ln);
        // (top_k, top_p, kept)
        let cases: [(usize, f32, &[usize]); 7] = [
            (0, 1.0, &[0, 1, 2, 3]),
            (2, 1.0, &[1, 3]),
            (9, 1.0, &[0, 1, 2, 3]),
            (0, 0.65, &[1, 3]),
            (0, 0.75, &[1, 2, 3]),
            (0, 1e-6, &[1]),
            // Of the two kept ones, renormalized to 4/7 and 3/7, the first reaches 0.55.
            (2, 0.55, &[1]),
        ];
        for (top_k, top_p, kept) in cases {
            let options = SamplingOptions { temperature: 1.0, top_k, top_p, seed: 3 };
            let seen = frequencies(options, &logits, 2000);
            let seen: Vec<usize> = (0..4).filter(|&id| seen[id] > 0.0).collect();
            assert_eq!(seen, kept, "top_k {top_k} top_p {top_p}");
        }
    }

    #[test]
    fn temperature_comes_before_top_p() {
        // At temperature 1 the first two reach 0.9; at 100 all are nearly equal and all are kept.
        let logits = [0.5f32, 0.4, 0.06, 0.04].map(f32::ln);
        let kept = |temperature| {
            let options = SamplingOptions { temperature, top_k: 0, top_p: 0.89, seed: 1 };
            frequencies(options, &logits, 2000).iter().filter(|&&f| f > 0.0).count()
        };
        assert_eq!((kept(1.0), kept(100.0)), (2, 4));
    }

    #[test]
    fn top_p_over_a_flat_large_vocabulary_keeps_its_share() {
        // More than the ids that are sorted at first, so the search has to widen.
        let logits = vec![0.0f32; 10_000];
        let options = SamplingOptions { temperature: 1.0, top_k: 0, top_p: 0.5, seed: 0 };
        let mut sampler = sampler(options);
        for _ in 0..200 {
            assert!(sampler.sample(&logits).unwrap() < 5001);
        }
        assert!((5000..=5001).contains(&sampler.candidates.len()));
    }

    #[test]
    fn the_seed_decides() {
        let logits: Vec<f32> = (0..100).map(|i| (i as f32 * 0.37).sin()).collect();
        let draw = |seed, noise: f32| {
            let options = SamplingOptions { temperature: 1.0, seed, ..SamplingOptions::GREEDY };
            let mut sampler = sampler(options);
            let logits: Vec<f32> =
                logits.iter().enumerate().map(|(i, l)| l + noise * (i as f32).cos()).collect();
            (0..50).map(|_| sampler.sample(&logits).unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(draw(1, 0.0), draw(1, 0.0));
        assert_ne!(draw(1, 0.0), draw(2, 0.0));
        // Rounding noise does not change the draw.
        assert_eq!(draw(1, 0.0), draw(1, 1e-6));
    }

    #[test]
    fn a_tiny_temperature_is_greedy() {
        let options = SamplingOptions {
            temperature: f32::MIN_POSITIVE,
            top_p: 0.9,
            ..SamplingOptions::GREEDY
        };
        assert_eq!(sampler(options).sample(&[1.0, 3.0, 2.9]).unwrap(), 1);
    }
}
