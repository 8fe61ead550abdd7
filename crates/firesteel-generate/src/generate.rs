use crate::request::check_vocabulary;
use crate::{
    Batch, Event, GenerateError, GenerateOptions, Generation, Observer, Request, StepRecord,
    StepStats, Tokenizer, Vocabulary,
};
use firesteel_checkpoint::ModelConfig;
use firesteel_step::{Decoder, RunnerError, SequenceId, TurnTaking};
use std::collections::BTreeSet;
use std::ops::ControlFlow;

/// Generates token by token on a decoder: a [`Batch`] of one request at a time.
///
/// With [`with_prompt_cache`](Self::with_prompt_cache) it is a session: a prompt that begins as
/// what was run before runs only what is new.
pub struct Generator<'a> {
    batch: Batch<'a>,
    sequence: SequenceId,
    vocabulary: Vocabulary<'a>,
    step_stats: Option<&'a mut StepStats>,
}

impl<'a> Generator<'a> {
    /// A generator on `decoder`, whose sequence is its own from now on. It stops at the end ids of
    /// `config`.
    ///
    /// # Errors
    /// When the decoder has another vocabulary than `config`.
    pub fn new(
        config: &ModelConfig,
        decoder: Box<dyn Decoder + 'a>,
    ) -> Result<Self, GenerateError> {
        check_vocabulary(&*decoder, config.vocab_size)?;
        let (decoder, sequence) = TurnTaking::of_one(decoder);
        Ok(Self {
            // Nobody waits for another.
            batch: Batch::new(Box::new(decoder)).with_rows(usize::MAX),
            sequence,
            vocabulary: Vocabulary::new(config),
            step_stats: None,
        })
    }

    /// Keeps the caches from one generation to the next, as [`Batch::with_prompt_cache`] does.
    #[must_use]
    pub fn with_prompt_cache(mut self) -> Self {
        self.batch = self.batch.with_prompt_cache();
        self
    }

    /// Turns ids into text with `tokenizer`, samples only ids that have a token, and stops at its
    /// end tokens too.
    #[must_use]
    pub fn with_tokenizer(mut self, tokenizer: &'a Tokenizer) -> Self {
        self.vocabulary = self.vocabulary.with_tokenizer(tokenizer);
        self
    }

    /// Records every step in `stats`.
    #[must_use]
    pub fn with_step_stats(mut self, stats: &'a mut StepStats) -> Self {
        self.step_stats = Some(stats);
        self
    }

    /// The ids that end a sequence.
    pub fn end_ids(&self) -> &BTreeSet<u32> {
        self.vocabulary.end_ids()
    }

    /// Tokens that fit into the sequence.
    pub fn context(&self) -> usize {
        self.batch.sequence(self.sequence).map_or(0, |decoder| decoder.context())
    }

    /// Runs `prompt` and generates after it. `on_event` is told what happens and can break off.
    ///
    /// # Errors
    /// When the prompt is empty, longer than the context or has an id without an embedding, an
    /// option is out of its range, or a step fails.
    pub fn generate(
        &mut self,
        prompt: &[u32],
        options: &GenerateOptions,
        on_event: &mut dyn FnMut(Event<'_>) -> ControlFlow<()>,
    ) -> Result<Generation, GenerateError> {
        let request = Request::new(&self.vocabulary, prompt, options)?;
        self.batch.start(self.sequence, request)?;
        let mut listener = Listener { on_event, step_stats: self.step_stats.as_deref_mut() };
        while self.batch.is_running(self.sequence) {
            if let Some(finished) = self.batch.advance(&mut listener).pop() {
                return finished.outcome;
            }
        }
        Err(RunnerError::NoSequence { sequence: self.sequence }.into())
    }
}

/// Who hears of the one request.
struct Listener<'l> {
    on_event: &'l mut dyn FnMut(Event<'_>) -> ControlFlow<()>,
    step_stats: Option<&'l mut StepStats>,
}

impl Observer for Listener<'_> {
    fn event(&mut self, _: SequenceId, event: Event<'_>) -> ControlFlow<()> {
        (self.on_event)(event)
    }

    fn step(&mut self, _: SequenceId, step: &StepRecord<'_>) {
        if let Some(stats) = &mut self.step_stats {
            stats.record(step);
        }
    }
}
