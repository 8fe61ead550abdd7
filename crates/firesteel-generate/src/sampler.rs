use crate::options::check_ids;
use crate::race::{Noise, Race, RaceBuffers};
use crate::row::{BLOCK, Place, Row, Scale};
use crate::{GenerateError, SamplingOptions};
use firesteel_kernels::Isa;
use serde::Serialize;
use std::ops::Range;

/// An id with its log-probability.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Logprob {
    /// The id.
    pub id: u32,
    /// Natural logarithm of its probability.
    pub logprob: f32,
}

/// Log-probabilities of one step: the log-softmax of the logits as the model made them, over the
/// ids that may be picked at all; before bias, penalties and temperature, as in the OpenAI
/// interface and vLLM.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TokenLogprobs {
    /// The picked id.
    pub picked: Logprob,
    /// The most probable ids, the most probable one first and the lowest id first of equal ones.
    pub top: Vec<Logprob>,
}

/// Picks ids from logits, for one sequence.
///
/// The options act in this order:
///
/// 1. ids that are not allowed are left out;
/// 2. logit bias;
/// 3. bad words: the id that would complete one is left out;
/// 4. end ids are left out of the first `min_tokens` picks;
/// 5. the repetition penalty, over prompt and output, then the frequency and presence penalties,
///    over the output;
/// 6. with temperature 0, the largest logit is picked; else the logits are divided by it;
/// 7. `top_k`;
/// 8. `top_p`, of the probabilities of what `top_k` left;
/// 9. `min_p`;
/// 10. one of the ids that are left is drawn in proportion to its probability.
///
/// This is the order of vLLM up to the penalties, which it applies before the temperature as all
/// do, so that they act on the scale of the logits. It is the order of Hugging Face transformers
/// from the temperature on; llama.cpp also has `top_k`, `top_p`, `min_p`, but lets temperature
/// come last, which would have `top_p` mean another set than in the model's own advice.
///
/// An id is drawn by the exponential race: id i wins when p_i / e_i is largest, where the e_i are
/// independent exponential variables; it does so with probability p_i / Σp. The noise is a
/// function of seed, step and id alone, so a sequence does not depend on what else runs beside
/// it, and the same seed on two runners whose logits differ by rounding picks the same id except
/// where two race scores are within that rounding. Of equal logits the lowest id counts as
/// larger.
#[derive(Debug, Clone)]
pub struct Sampler {
    options: SamplingOptions,
    vocab_size: usize,
    /// Ids that are never picked.
    forbidden: Vec<Range<usize>>,
    end_ids: Vec<u32>,
    /// Prompt and output.
    history: Vec<u32>,
    /// How often an id is in the output, for each id in prompt or output, in order of the ids;
    /// empty without penalties.
    counts: Vec<(u32, f32)>,
    picked: usize,
    row: Row,
    track: RaceBuffers,
}

impl Sampler {
    /// A sampler of ids below `vocab_size`.
    ///
    /// # Errors
    /// When an option is out of its range; the error names the range. When FIRESTEEL_ISA names an
    /// instruction set that this CPU lacks.
    pub fn new(options: SamplingOptions, vocab_size: usize) -> Result<Self, GenerateError> {
        options.check(vocab_size)?;
        Ok(Self {
            options,
            vocab_size,
            forbidden: Vec::new(),
            end_ids: Vec::new(),
            history: Vec::new(),
            counts: Vec::new(),
            picked: 0,
            row: Row::default(),
            track: RaceBuffers::new(Isa::detect()?),
        })
    }

    /// Only ids with `allowed[id]` are picked.
    ///
    /// # Errors
    /// When there are more or fewer than ids in the vocabulary.
    pub fn with_allowed(mut self, allowed: &[bool]) -> Result<Self, GenerateError> {
        if allowed.len() != self.vocab_size {
            let accepted = format!("the vocabulary has {} ids", self.vocab_size);
            return Err(GenerateError::option("the length of the mask", allowed.len(), accepted));
        }
        self.forbidden.clear();
        let mut start = 0;
        for run in allowed.chunk_by(|a, b| a == b) {
            let end = start + run.len();
            if run.first() == Some(&false) {
                self.forbidden.push(start..end);
            }
            start = end;
        }
        Ok(self)
    }

    /// None of `ids` is picked while fewer than `min_tokens` are.
    ///
    /// # Errors
    /// When one is not in the vocabulary.
    pub fn with_end_ids(
        mut self,
        ids: impl IntoIterator<Item = u32>,
    ) -> Result<Self, GenerateError> {
        self.end_ids = ids.into_iter().collect();
        check_ids("an end id", &self.end_ids, self.vocab_size)?;
        Ok(self)
    }

    /// What is picked follows `prompt`; to be said before the first pick.
    #[must_use]
    pub fn with_prompt(mut self, prompt: &[u32]) -> Self {
        self.history = prompt.to_vec();
        if self.options.has_penalties() {
            let mut ids = prompt.to_vec();
            ids.sort_unstable();
            ids.dedup();
            self.counts = ids.into_iter().map(|id| (id, 0.0)).collect();
        }
        self
    }

    /// The prompt and what was picked after it.
    pub(crate) fn history(&self) -> &[u32] {
        &self.history
    }

    /// Picks an id from one row of logits, `[V]`. Logits of −∞ are never picked.
    ///
    /// # Errors
    /// When a logit that counts is NaN or +∞, none is left, or there are more or fewer logits
    /// than ids. The sampler is then as before.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32, GenerateError> {
        self.load(logits)?;
        self.adjust();
        let largest = self.scan()?;
        let id = if self.options.temperature == 0.0 {
            self.row.first_of(largest)
        } else {
            self.draw(largest)
        };
        let id = id.ok_or_else(none_left)?;
        self.picked += 1;
        self.history.push(id);
        if self.options.has_penalties() {
            match self.counts.binary_search_by_key(&id, |&(id, _)| id) {
                Ok(index) => self.counts[index].1 += 1.0,
                Err(index) => self.counts.insert(index, (id, 1.0)),
            }
        }
        Ok(id)
    }

    /// Log-probabilities of `picked` and of the `top` most probable ids in a row of logits, `[V]`.
    /// An id that cannot be picked has the log-probability −∞ and is not among the top.
    ///
    /// # Errors
    /// As those of [`Sampler::sample`].
    pub fn logprobs(
        &mut self,
        logits: &[f32],
        picked: u32,
        top: usize,
    ) -> Result<TokenLogprobs, GenerateError> {
        self.load(logits)?;
        let largest = self.scan()?;
        let scale = Scale { largest, temperature: 1.0 };
        self.track.weights.clear();
        let total = self.track.weights.total(&self.row, scale, f32::MIN);
        let log_total = f64::from(largest) + total.ln();
        let of = |id: u32, logit: f32| Logprob {
            id,
            logprob: (f64::from(logit) - log_total).min(0.0) as f32,
        };
        let logit = self.row.logits.get(picked as usize).copied().unwrap_or(f32::NEG_INFINITY);
        let mut most = Vec::new();
        if top > 0 {
            self.row.keep(top);
            let mut places: Vec<Place> = self.row.places().collect();
            // The ids are in order, and the sort is stable.
            places.sort_by(|a, b| (b.logit + 0.0).total_cmp(&(a.logit + 0.0)));
            most.extend(places.into_iter().map(|place| of(place.id, place.logit)));
        }
        Ok(TokenLogprobs { picked: of(picked, logit), top: most })
    }

    /// Takes a copy of the logits with −∞ for ids that are not allowed.
    fn load(&mut self, logits: &[f32]) -> Result<(), GenerateError> {
        if logits.len() != self.vocab_size {
            let message = format!("there are {}, but {} ids", logits.len(), self.vocab_size);
            return Err(GenerateError::Logits { message });
        }
        self.row.load(logits);
        for range in &self.forbidden {
            if let Some(logits) = self.row.logits.get_mut(range.clone()) {
                logits.fill(f32::NEG_INFINITY);
            }
        }
        Ok(())
    }

    /// The largest logit, which is finite.
    fn scan(&mut self) -> Result<f32, GenerateError> {
        match self.row.scan() {
            Ok(f32::NEG_INFINITY) => Err(none_left()),
            Ok(largest) => Ok(largest),
            Err(id) => {
                let logit = self.row.logits.get(id).copied().unwrap_or(f32::NAN);
                let message = format!("the one of id {id} is {logit}");
                Err(GenerateError::Logits { message })
            }
        }
    }

    /// Bias, bad words, end ids and penalties.
    fn adjust(&mut self) {
        let options = &self.options;
        let logits = &mut self.row.logits;
        for (&id, &bias) in &options.logit_bias {
            change(logits, id, |logit| logit + bias);
        }
        for word in &options.bad_words {
            if let Some((&last, before)) = word.split_last()
                && self.history.ends_with(before)
            {
                forbid(logits, last);
            }
        }
        if self.picked < options.min_tokens {
            for &id in &self.end_ids {
                forbid(logits, id);
            }
        }
        let penalty = options.repetition_penalty;
        let mut changed = [0.0; BLOCK];
        for counts in self.counts.chunks(BLOCK) {
            for (changed, &(id, _)) in changed.iter_mut().zip(counts) {
                *changed = logits.get(id as usize).copied().unwrap_or(f32::NEG_INFINITY);
            }
            // A loop of its own, without branches, so that it runs in vector registers.
            for (changed, &(_, count)) in changed.iter_mut().zip(counts) {
                let logit = *changed;
                // One summand is zero.
                let repeated = logit.max(0.0) / penalty + logit.min(0.0) * penalty;
                let presence = if count > 0.0 { options.presence_penalty } else { 0.0 };
                let penalized = repeated - options.frequency_penalty * count - presence;
                *changed = if logit.is_finite() { within_finite(penalized) } else { logit };
            }
            for (&changed, &(id, _)) in changed.iter().zip(counts) {
                if let Some(logit) = logits.get_mut(id as usize) {
                    *logit = changed;
                }
            }
        }
    }

    /// Temperature, `top_k`, `top_p`, `min_p` and the draw.
    fn draw(&mut self, largest: f32) -> Option<u32> {
        let SamplingOptions { temperature, top_k, top_p, min_p, seed, .. } = self.options;
        self.row.keep(top_k);
        let race = Race {
            row: &self.row,
            scale: Scale { largest, temperature },
            noise: Noise::new(seed, self.picked),
            min_p,
            top_p: f64::from(top_p),
        };
        race.run(&mut self.track)
    }
}

fn none_left() -> GenerateError {
    GenerateError::Logits { message: "no id is left to pick".into() }
}

/// Changes a logit that is finite into another finite one.
fn change(logits: &mut [f32], id: u32, change: impl Fn(f32) -> f32) {
    if let Some(logit) = logits.get_mut(id as usize).filter(|logit| logit.is_finite()) {
        *logit = within_finite(change(*logit));
    }
}

fn within_finite(logit: f32) -> f32 {
    logit.clamp(f32::MIN, f32::MAX)
}

fn forbid(logits: &mut [f32], id: u32) {
    if let Some(logit) = logits.get_mut(id as usize) {
        *logit = f32::NEG_INFINITY;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::{BTreeMap, BTreeSet};

    fn sampler(options: SamplingOptions, vocab_size: usize) -> Sampler {
        Sampler::new(options, vocab_size).unwrap()
    }

    fn warm() -> SamplingOptions {
        SamplingOptions { temperature: 1.0, ..SamplingOptions::GREEDY }
    }

    /// Relative frequency of each id over `draws` samples.
    fn frequencies(options: SamplingOptions, logits: &[f32], draws: u32) -> Vec<f64> {
        let mut sampler = sampler(options, logits.len());
        let mut counts = vec![0f64; logits.len()];
        for _ in 0..draws {
            counts[sampler.sample(logits).unwrap() as usize] += 1.0 / f64::from(draws);
        }
        counts
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
            let mut sampler = sampler(SamplingOptions::GREEDY, logits.len());
            assert_eq!(sampler.sample(logits).unwrap(), expected);
        }
    }

    #[test]
    fn ids_that_are_not_allowed_are_never_picked() {
        let allowed = vec![false, true, false, true, false];
        let logits = [9.0, 1.0, f32::NAN, 0.5, f32::INFINITY];
        let mut greedy = sampler(SamplingOptions::GREEDY, 5).with_allowed(&allowed).unwrap();
        assert_eq!(greedy.sample(&logits).unwrap(), 1);
        let hot = SamplingOptions { temperature: 50.0, ..SamplingOptions::GREEDY };
        let mut hot = sampler(hot, 5).with_allowed(&allowed).unwrap();
        for _ in 0..500 {
            assert!([1, 3].contains(&hot.sample(&logits).unwrap()));
        }
        let error = sampler(warm(), 5).with_allowed(&[true; 4]).unwrap_err().to_string();
        assert_eq!(error, "the length of the mask is 4, but the vocabulary has 5 ids");
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
                let mut sampler = sampler(options, 2);
                let error = sampler.sample(logits).unwrap_err().to_string();
                assert_eq!(error, format!("the logits cannot be sampled: {expected}"));
            }
        }
        assert!(sampler(SamplingOptions::GREEDY, 0).sample(&[]).is_err());
    }

    #[test]
    fn options_out_of_range_are_errors() {
        let (nan, infinity) = (f32::NAN, f32::INFINITY);
        type Set = fn(&mut SamplingOptions, f32);
        let penalty = "a number from -2 to 2 is accepted";
        // (option, how it is set, values out of range, values in it, what is accepted)
        type Case<'a> = (&'a str, Set, &'a [f32], &'a [f32], &'a str);
        let cases: [Case<'_>; 7] = [
            (
                "temperature",
                |o, value| o.temperature = value,
                &[-0.1, nan, infinity],
                &[0.0, 0.5, f32::MAX],
                "a finite number from 0 is accepted",
            ),
            (
                "top_p",
                |o, value| o.top_p = value,
                &[0.0, -1.0, 1.01, nan],
                &[1e-9, 1.0],
                "a number above 0 and at most 1 is accepted",
            ),
            (
                "min_p",
                |o, value| o.min_p = value,
                &[-0.1, 1.01, nan],
                &[0.0, 1.0],
                "a number from 0 to 1 is accepted",
            ),
            (
                "repetition_penalty",
                |o, value| o.repetition_penalty = value,
                &[0.0, -1.0, nan, infinity],
                &[0.1, 1.0, 10.0],
                "a finite number above 0 is accepted",
            ),
            (
                "presence_penalty",
                |o, value| o.presence_penalty = value,
                &[-2.1, 2.1, nan],
                &[-2.0, 2.0],
                penalty,
            ),
            (
                "frequency_penalty",
                |o, value| o.frequency_penalty = value,
                &[-2.1, 2.1, nan],
                &[-2.0, 2.0],
                penalty,
            ),
            (
                "logit_bias",
                |o, value| o.logit_bias = BTreeMap::from([(3, value)]),
                &[-100.5, 101.0, nan],
                &[-100.0, 0.0, 100.0],
                "a number from -100 to 100 is accepted",
            ),
        ];
        for (what, set, refused, taken, accepted) in cases {
            let mut options = SamplingOptions::GREEDY;
            for &value in refused {
                set(&mut options, value);
                let error = Sampler::new(options.clone(), 4).unwrap_err().to_string();
                let id = if what == "logit_bias" { " for id 3" } else { "" };
                assert_eq!(error, format!("{what} is {value}{id}, but {accepted}"));
            }
            for &value in taken {
                set(&mut options, value);
                assert!(Sampler::new(options.clone(), 4).is_ok(), "{what} {value}");
            }
        }
        let refused = |options: SamplingOptions| Sampler::new(options, 4).unwrap_err().to_string();
        let known = "but ids below 4, the size of the vocabulary, are accepted";
        let logit_bias = BTreeMap::from([(4, 1.0)]);
        assert_eq!(
            refused(SamplingOptions { logit_bias, ..SamplingOptions::GREEDY }),
            format!("an id of logit_bias is 4, {known}")
        );
        let bad_words = vec![vec![3, 9]];
        assert_eq!(
            refused(SamplingOptions { bad_words, ..SamplingOptions::GREEDY }),
            format!("an id of bad_words is 9, {known}")
        );
        let bad_words = vec![vec![3], vec![]];
        assert_eq!(
            refused(SamplingOptions { bad_words, ..SamplingOptions::GREEDY }),
            "a sequence of bad_words is empty, but at least one id is needed"
        );
        let error = sampler(warm(), 4).with_end_ids([4]).unwrap_err().to_string();
        assert_eq!(error, format!("an end id is 4, {known}"));
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
    fn top_k_top_p_and_min_p_keep_the_right_ids() {
        let logits = [0.1f32, 0.4, 0.2, 0.3].map(f32::ln);
        // (top_k, top_p, min_p, kept)
        let cases: [(usize, f32, f32, &[usize]); 14] = [
            (0, 1.0, 0.0, &[0, 1, 2, 3]),
            (2, 1.0, 0.0, &[1, 3]),
            (9, 1.0, 0.0, &[0, 1, 2, 3]),
            (0, 0.65, 0.0, &[1, 3]),
            (0, 0.75, 0.0, &[1, 2, 3]),
            (0, 1e-6, 0.0, &[1]),
            // Of the two kept ones, renormalized to 4/7 and 3/7, the first reaches 0.55.
            (2, 0.55, 0.0, &[1]),
            // A share of the most probable one, not of all.
            (0, 1.0, 0.3, &[1, 2, 3]),
            (0, 1.0, 0.6, &[1, 3]),
            (0, 1.0, 1.0, &[1]),
            (2, 1.0, 0.3, &[1, 3]),
            (3, 1.0, 0.6, &[1, 3]),
            // What min_p leaves out counts for top_p: without it, 0.4 of 0.7 would reach 0.5.
            (0, 0.5, 0.6, &[1, 3]),
            (3, 0.5, 0.6, &[1, 3]),
        ];
        for (top_k, top_p, min_p, kept) in cases {
            let options = SamplingOptions { top_k, top_p, min_p, seed: 3, ..warm() };
            let seen = frequencies(options, &logits, 2000);
            let seen: Vec<usize> = (0..4).filter(|&id| seen[id] > 0.0).collect();
            assert_eq!(seen, kept, "top_k {top_k} top_p {top_p} min_p {min_p}");
        }
    }

    #[test]
    fn temperature_comes_before_top_p() {
        // At temperature 1 the first two reach 0.9; at 100 all are nearly equal and all are kept.
        let logits = [0.5f32, 0.4, 0.06, 0.04].map(f32::ln);
        let kept = |temperature| {
            let options = SamplingOptions { temperature, top_p: 0.89, ..warm() };
            frequencies(options, &logits, 2000).iter().filter(|&&f| f > 0.0).count()
        };
        assert_eq!((kept(1.0), kept(100.0)), (2, 4));
    }

    #[test]
    fn top_p_over_a_flat_large_vocabulary_keeps_its_share() {
        let logits = vec![0.0f32; 10_000];
        let mut sampler = sampler(SamplingOptions { top_p: 0.5, ..warm() }, 10_000);
        for _ in 0..200 {
            assert!(sampler.sample(&logits).unwrap() < 5001);
        }
        // The last ids of the share are drawn too.
        let drawn = |_| sampler.sample(&logits).unwrap();
        assert!((0..2000).map(drawn).any(|id| id > 4900));
    }

    #[test]
    fn the_seed_decides() {
        let logits: Vec<f32> = (0..100).map(|i| (i as f32 * 0.37).sin()).collect();
        let draw = |seed, noise: f32| {
            let options = SamplingOptions { seed, ..warm() };
            let mut sampler = sampler(options, 100);
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
        assert_eq!(sampler(options, 3).sample(&[1.0, 3.0, 2.9]).unwrap(), 1);
    }

    #[test]
    fn bias_bad_words_and_least_tokens_act() {
        let logits = [0.0, 3.0, 2.0, 1.0];
        let picks = |options: SamplingOptions, prompt: &[u32]| {
            let mut sampler = sampler(options, 4).with_prompt(prompt).with_end_ids([1, 2]).unwrap();
            [(); 3].map(|()| sampler.sample(&logits).unwrap())
        };
        let greedy = SamplingOptions::GREEDY;
        assert_eq!(picks(greedy.clone(), &[]), [1, 1, 1]);
        let logit_bias = BTreeMap::from([(1, -2.5), (3, 1.5)]);
        assert_eq!(picks(SamplingOptions { logit_bias, ..greedy.clone() }, &[]), [3, 3, 3]);
        let min_tokens = 2;
        assert_eq!(picks(SamplingOptions { min_tokens, ..greedy.clone() }, &[]), [3, 3, 1]);
        // (bad words, prompt, picks)
        type Case<'a> = (&'a [&'a [u32]], &'a [u32], [u32; 3]);
        let cases: [Case<'_>; 5] = [
            (&[&[1]], &[], [2, 2, 2]),
            (&[&[1], &[2]], &[], [3, 3, 3]),
            (&[&[1, 1]], &[], [1, 2, 1]),
            // The prompt counts.
            (&[&[1, 1]], &[1], [2, 1, 2]),
            (&[&[0, 1, 1]], &[0], [1, 2, 1]),
        ];
        for (words, prompt, expected) in cases {
            let bad_words = words.iter().map(|word| word.to_vec()).collect();
            let options = SamplingOptions { bad_words, ..greedy.clone() };
            assert_eq!(picks(options, prompt), expected, "{words:?} {prompt:?}");
        }
        // A bias does not bring back what may not be picked, and too much of it is no infinity.
        let logit_bias = BTreeMap::from([(0, 100.0), (1, 100.0), (2, -100.0)]);
        let mut sampler = sampler(SamplingOptions { logit_bias, ..greedy.clone() }, 3);
        assert_eq!(sampler.sample(&[f32::NEG_INFINITY, f32::MAX, f32::MAX]).unwrap(), 1);
        let bad_words = vec![vec![0], vec![1]];
        let mut sampler = Sampler::new(SamplingOptions { bad_words, ..greedy }, 2).unwrap();
        assert!(sampler.sample(&[1.0, 2.0]).is_err());
    }

    #[test]
    fn a_failed_pick_changes_nothing() {
        let options = SamplingOptions { frequency_penalty: 1.0, ..warm() };
        let mut failing = sampler(options.clone(), 3);
        let mut plain = sampler(options, 3);
        for _ in 0..20 {
            assert!(failing.sample(&[0.0, f32::NAN, 0.0]).is_err());
            let logits = [0.1, 0.2, 0.3];
            assert_eq!(failing.sample(&logits).unwrap(), plain.sample(&logits).unwrap());
        }
    }

    #[test]
    fn log_probabilities_are_of_the_logits_as_they_come() {
        let probabilities = [0.5f32, 0.25, 0.125, 0.125];
        let logits = [3.0, probabilities[0].ln(), probabilities[1].ln(), -2.0794415, -2.0794415];
        let logit_bias = BTreeMap::from([(4, 9.0)]);
        let options = SamplingOptions { temperature: 0.1, logit_bias, ..warm() };
        let mut sampler =
            sampler(options, 5).with_allowed(&[false, true, true, true, true]).unwrap();
        let picked = sampler.sample(&logits).unwrap();
        assert_eq!(picked, 4);
        let near = |logprob: &Logprob, id: u32, probability: f32| {
            assert_eq!(logprob.id, id);
            assert!((logprob.logprob - probability.ln()).abs() < 1e-6, "{logprob:?}");
        };
        let result = sampler.logprobs(&logits, picked, 3).unwrap();
        near(&result.picked, 4, 0.125);
        let expected = [(1, 0.5), (2, 0.25), (3, 0.125)];
        assert_eq!(result.top.len(), 3);
        for (logprob, (id, probability)) in result.top.iter().zip(expected) {
            near(logprob, id, probability);
        }
        assert_eq!(sampler.logprobs(&logits, 4, 0).unwrap().top, []);
        assert_eq!(sampler.logprobs(&logits, 4, 99).unwrap().top.len(), 4);
        let never = sampler.logprobs(&logits, 0, 1).unwrap().picked;
        assert_eq!((never.id, never.logprob), (0, f32::NEG_INFINITY));
    }

    /// Expected counts against seen ones: χ² of a fixed seed with 15 degrees of freedom, whose
    /// 99.9th percentile is 37.7.
    #[test]
    fn draws_follow_the_probabilities() {
        let logits: Vec<f32> = (0..16).map(|i| (i as f32 * 1.7).sin() * 1.5).collect();
        let total: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
        let draws = 100_000;
        for seed in [1, 2, u64::MAX] {
            // With and without truncation, which here keeps all.
            for min_p in [0.0, 1e-6] {
                let options = SamplingOptions { seed, min_p, ..warm() };
                let seen = frequencies(options, &logits, draws);
                let chi_squared: f64 = seen
                    .iter()
                    .zip(&logits)
                    .map(|(seen, &logit)| {
                        let expected = f64::from(logit).exp() / total;
                        (seen - expected).powi(2) / expected * f64::from(draws)
                    })
                    .sum();
                assert!(chi_squared < 37.7, "seed {seed}: {chi_squared}");
            }
        }
    }

    /// As before, over ids of many blocks, so that most blocks are never looked into: a heavy id in
    /// 50, and each option that leaves ids out. What is left is grouped by 50 ids: 29 degrees of
    /// freedom, whose 99.9th percentile is 58.3.
    #[test]
    fn draws_of_a_large_vocabulary_follow_the_probabilities() {
        const IDS: usize = 1500;
        const GROUP: usize = 50;
        let logit = |id: usize| (id as f32 * 0.7).sin() + if id % 50 == 7 { 4.0 } else { 0.0 };
        let logits: Vec<f32> = (0..IDS).map(logit).collect();
        let cases = [
            warm(),
            SamplingOptions { temperature: 2.0, ..warm() },
            SamplingOptions { top_k: 500, ..warm() },
            SamplingOptions { top_p: 0.7, ..warm() },
            SamplingOptions { top_k: 1000, top_p: 0.7, ..warm() },
            SamplingOptions { min_p: 0.01, ..warm() },
        ];
        let draws = 20_000;
        for options in cases {
            let ids = reference_ids(&options, &logits, 1e-6).unwrap();
            let weight = |id: u32| f64::from(logits[id as usize] / options.temperature).exp();
            let total: f64 = ids.iter().map(|&id| weight(id)).sum();
            let mut expected = [0f64; IDS / GROUP];
            for &id in &ids {
                expected[id as usize / GROUP] += weight(id) / total;
            }
            let seen = frequencies(SamplingOptions { seed: 9, ..options.clone() }, &logits, draws);
            assert!((0u32..).zip(&seen).all(|(id, &seen)| seen == 0.0 || ids.contains(&id)));
            let chi_squared: f64 = seen
                .chunks(GROUP)
                .zip(expected)
                .map(|(seen, expected)| {
                    (seen.iter().sum::<f64>() - expected).powi(2) / expected * f64::from(draws)
                })
                .sum();
            assert!(chi_squared < 58.3, "{options:?}: {chi_squared}");
        }
    }

    #[test]
    fn ids_that_cannot_be_picked_change_nothing() {
        let logits: Vec<f32> = (0..300).map(|i| (i as f32 * 0.37).sin() * 3.0).collect();
        for options in [
            warm(),
            SamplingOptions { top_p: 0.8, ..warm() },
            SamplingOptions { top_k: 20, min_p: 0.1, ..warm() },
        ] {
            let mut short = sampler(options.clone(), 300);
            let mut long = sampler(options, 1000);
            let padded = [logits.as_slice(), &[f32::NEG_INFINITY; 700]].concat();
            for _ in 0..200 {
                assert_eq!(short.sample(&logits).unwrap(), long.sample(&padded).unwrap());
            }
        }
    }

    #[test]
    fn steps_are_independent() {
        // The joint frequency of two picks in a row is the product of the single ones.
        let logits = [0.5f32, 0.3, 0.2].map(f32::ln);
        let mut sampler = sampler(SamplingOptions { seed: 11, ..warm() }, 3);
        let picks: Vec<usize> =
            (0..60_000).map(|_| sampler.sample(&logits).unwrap() as usize).collect();
        for (a, &p) in [0.5, 0.3, 0.2].iter().enumerate() {
            for (b, &q) in [0.5, 0.3, 0.2].iter().enumerate() {
                let pairs = picks.windows(2).filter(|pair| *pair == [a, b]).count();
                let seen = pairs as f64 / (picks.len() - 1) as f64;
                assert!((seen - p * q).abs() < 0.01, "{a} {b}: {seen}");
            }
        }
    }

    /// Plain text of what [`Sampler`] documents: the logits after the penalties, in order.
    fn reference_logits(
        options: &SamplingOptions,
        prompt: &[u32],
        output: &[u32],
        logits: &[f32],
    ) -> Vec<f32> {
        let both: Vec<u32> = prompt.iter().chain(output).copied().collect();
        let mut logits = logits.to_vec();
        for (id, logit) in logits.iter_mut().enumerate() {
            let id = id as u32;
            *logit += options.logit_bias.get(&id).copied().unwrap_or(0.0);
            let completes = |word: &Vec<u32>| [both.as_slice(), &[id]].concat().ends_with(word);
            if options.bad_words.iter().any(completes) {
                *logit = f32::NEG_INFINITY;
            }
            if both.contains(&id) {
                if *logit > 0.0 {
                    *logit /= options.repetition_penalty;
                } else {
                    *logit *= options.repetition_penalty;
                }
            }
            let count = output.iter().filter(|&&other| other == id).count();
            *logit -= options.frequency_penalty * count as f32;
            *logit -= if count > 0 { options.presence_penalty } else { 0.0 };
        }
        logits
    }

    /// The ids that are left, by sorting; `None` when one is so close to a bound that it may be
    /// either way.
    fn reference_ids(
        options: &SamplingOptions,
        logits: &[f32],
        close: f64,
    ) -> Option<BTreeSet<u32>> {
        let mut left: Vec<(u32, f64)> = (0..)
            .zip(logits)
            .filter(|(_, logit)| logit.is_finite())
            .map(|(id, &logit)| (id, f64::from(logit) / f64::from(options.temperature)))
            .collect();
        left.sort_by(|(a, x), (b, y)| y.total_cmp(x).then(a.cmp(b)));
        if options.top_k > 0 {
            left.truncate(options.top_k);
        }
        let largest = left.first()?.1;
        let total: f64 = left.iter().map(|(_, x)| (x - largest).exp()).sum();
        let mut sum = 0.0;
        let mut kept = BTreeSet::new();
        for (id, x) in left {
            let weight = (x - largest).exp();
            let missing = f64::from(options.top_p) - sum / total;
            let excess = weight - f64::from(options.min_p);
            if options.top_p < 1.0 && missing.abs() < close || excess.abs() < close {
                return None;
            }
            if (options.top_p >= 1.0 || missing > 0.0) && excess > 0.0 {
                kept.insert(id);
            }
            sum += weight;
        }
        Some(kept)
    }

    fn options() -> impl Strategy<Value = SamplingOptions> {
        let sets = (
            prop_oneof![Just(0usize), 1usize..90],
            prop_oneof![Just(1.0f32), 0.05f32..1.0],
            prop_oneof![Just(0.0f32), 0.001f32..1.0],
            prop_oneof![Just(1.0f32), 0.2f32..3.0],
            any::<u64>(),
        );
        let changes = (
            prop_oneof![Just(1.0f32), 0.5f32..2.0],
            prop_oneof![Just(0.0f32), -2.0f32..2.0],
            prop_oneof![Just(0.0f32), -2.0f32..2.0],
            proptest::collection::btree_map(0u32..80, -5.0f32..5.0, 0..4),
            proptest::collection::vec(proptest::collection::vec(0u32..80, 1..3), 0..4),
        );
        (sets, changes).prop_map(|((top_k, top_p, min_p, temperature, seed), changes)| {
            let (repetition_penalty, presence_penalty, frequency_penalty, logit_bias, bad_words) =
                changes;
            SamplingOptions {
                temperature,
                top_k,
                top_p,
                min_p,
                repetition_penalty,
                presence_penalty,
                frequency_penalty,
                logit_bias,
                bad_words,
                min_tokens: 0,
                seed,
            }
        })
    }

    proptest! {
        #[test]
        fn sampling_is_as_documented(
            options in options(),
            prompt in proptest::collection::vec(0u32..80, 0..6),
            logits in proptest::collection::vec(-6.0f32..6.0, 80),
        ) {
            let mut sampler = sampler(options.clone(), 80).with_prompt(&prompt);
            let mut greedy_sampler =
                Sampler::new(SamplingOptions { temperature: 0.0, ..options.clone() }, 80)
                    .unwrap()
                    .with_prompt(&prompt);
            let (mut output, mut greedy_output) = (Vec::new(), Vec::new());
            for step in 0..6 {
                let expected = reference_logits(&options, &prompt, &output, &logits);
                let mut adjusted = sampler.clone();
                adjusted.load(&logits).unwrap();
                adjusted.adjust();
                for (&got, &want) in adjusted.row.logits.iter().zip(&expected) {
                    prop_assert!(got == want || (got - want).abs() < 1e-5, "{} {}", got, want);
                }
                let picked = sampler.sample(&logits).unwrap();
                let Some(ids) = reference_ids(&options, &expected, 1e-5) else { return Ok(()) };
                let noise = Noise::new(options.seed, step);
                let noise: BTreeMap<u32, f64> = (0..2)
                    .flat_map(|block| {
                        let id = move |position| (block * BLOCK + position) as u32;
                        noise.ascending(block).map(move |(position, e)| (id(position), e))
                    })
                    .collect();
                let score = |id: u32| {
                    let logit = f64::from(expected[id as usize]);
                    (logit / f64::from(options.temperature)).exp() / noise[&id]
                };
                let winner = ids.iter().copied().max_by(|&a, &b| score(a).total_cmp(&score(b)));
                prop_assert_eq!(Some(picked), winner);
                output.push(picked);

                let expected = reference_logits(&options, &prompt, &greedy_output, &logits);
                let picked = greedy_sampler.sample(&logits).unwrap();
                let largest = expected.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                prop_assert!(expected[picked as usize] >= largest - 1e-5);
                greedy_output.push(picked);
            }
        }
    }
}
