use crate::GenerateError;
use std::collections::BTreeMap;

/// How the next id is picked; [`Sampler`](crate::Sampler) documents the order in which the
/// options act.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingOptions {
    /// Divides the logits; 0 always takes the largest one.
    pub temperature: f32,
    /// Keeps this many of the largest logits; 0 keeps all.
    pub top_k: usize,
    /// Keeps the fewest most probable ids whose probabilities add up to this; 1 keeps all.
    pub top_p: f32,
    /// Keeps the ids that are at least this times as probable as the most probable one; 0 keeps
    /// all.
    pub min_p: f32,
    /// Divides the positive logits of ids in the prompt or the output and multiplies the negative
    /// ones, as Keskar et al. 2019 do; 1 changes nothing.
    pub repetition_penalty: f32,
    /// Is taken from the logits of ids in the output, as in the OpenAI interface.
    pub presence_penalty: f32,
    /// Is taken from a logit once for each time that its id is in the output, as in the OpenAI
    /// interface.
    pub frequency_penalty: f32,
    /// Is added to the logits of these ids.
    pub logit_bias: BTreeMap<u32, f32>,
    /// Sequences of ids that the prompt and the output together never come to end in.
    pub bad_words: Vec<Vec<u32>>,
    /// The first tokens, this many, are no end ids and no stop ids.
    pub min_tokens: usize,
    /// Start of the random numbers: the same seed, options and logits give the same ids.
    pub seed: u64,
}

impl SamplingOptions {
    /// Always the largest logit.
    pub const GREEDY: Self = Self {
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        repetition_penalty: 1.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        logit_bias: BTreeMap::new(),
        bad_words: Vec::new(),
        min_tokens: 0,
        seed: 0,
    };

    /// Whether the logits depend on which ids came before.
    pub(crate) fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0
            || self.presence_penalty != 0.0
            || self.frequency_penalty != 0.0
    }

    /// Checks every option against its range, and ids against a vocabulary of `vocab_size`.
    pub(crate) fn check(&self, vocab_size: usize) -> Result<(), GenerateError> {
        let positive = |value: f32| value > 0.0 && value.is_finite();
        let penalty = -2.0..=2.0f32;
        let numbers = [
            (
                "temperature",
                self.temperature,
                self.temperature == 0.0 || positive(self.temperature),
                "a finite number from 0 is accepted",
            ),
            (
                "top_p",
                self.top_p,
                self.top_p > 0.0 && self.top_p <= 1.0,
                "a number above 0 and at most 1 is accepted",
            ),
            (
                "min_p",
                self.min_p,
                (0.0..=1.0).contains(&self.min_p),
                "a number from 0 to 1 is accepted",
            ),
            (
                "repetition_penalty",
                self.repetition_penalty,
                positive(self.repetition_penalty),
                "a finite number above 0 is accepted",
            ),
            (
                "presence_penalty",
                self.presence_penalty,
                penalty.contains(&self.presence_penalty),
                "a number from -2 to 2 is accepted",
            ),
            (
                "frequency_penalty",
                self.frequency_penalty,
                penalty.contains(&self.frequency_penalty),
                "a number from -2 to 2 is accepted",
            ),
        ];
        for (what, value, valid, accepted) in numbers {
            if !valid {
                return Err(GenerateError::option(what, value, accepted));
            }
        }
        for (&id, &bias) in &self.logit_bias {
            if !(-100.0..=100.0).contains(&bias) {
                let value = format!("{bias} for id {id}");
                let accepted = "a number from -100 to 100 is accepted";
                return Err(GenerateError::option("logit_bias", value, accepted));
            }
        }
        check_ids("an id of logit_bias", self.logit_bias.keys(), vocab_size)?;
        for word in &self.bad_words {
            if word.is_empty() {
                let accepted = "at least one id is needed";
                return Err(GenerateError::option("a sequence of bad_words", "empty", accepted));
            }
            check_ids("an id of bad_words", word, vocab_size)?;
        }
        Ok(())
    }
}

impl Default for SamplingOptions {
    fn default() -> Self {
        Self::GREEDY
    }
}

/// Checks that each of `ids` is below `vocab_size`.
pub(crate) fn check_ids<'a>(
    what: &'static str,
    ids: impl IntoIterator<Item = &'a u32>,
    vocab_size: usize,
) -> Result<(), GenerateError> {
    match ids.into_iter().find(|&&id| id as usize >= vocab_size) {
        None => Ok(()),
        Some(id) => {
            let accepted =
                format!("ids below {vocab_size}, the size of the vocabulary, are accepted");
            Err(GenerateError::option(what, id, accepted))
        }
    }
}
