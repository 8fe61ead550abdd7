use crate::lookup::Speculation;
use crate::options::check_ids;
use crate::{
    GenerateError, MODEL_FORWARD_MS, MODEL_SAMPLE_MS, PromptLookup, Released, Sampler,
    SamplingOptions, StepRecord, StepStats, StopStrings, TextStream, TokenLogprobs, Tokenizer,
};
use firesteel_checkpoint::ModelConfig;
use firesteel_step::{Decoder, RunnerError, Wanted};
use serde::Serialize;
use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

/// When to stop and how to sample.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct GenerateOptions {
    /// Most tokens to generate; `None` stops only at an end token or when the context is full.
    pub max_tokens: Option<usize>,
    /// How tokens are picked.
    pub sampling: SamplingOptions,
    /// Text ends before the first of these that comes up, as [`StopStrings`] has it. Not looked
    /// for in the text of the first `min_tokens` tokens. They need a tokenizer.
    pub stop: Vec<String>,
    /// Ids that end the sequence, besides the model's end ids; they have no text.
    pub stop_ids: Vec<u32>,
    /// With a number, each token comes with its log-probability and those of this many most
    /// probable tokens.
    pub top_logprobs: Option<usize>,
    /// Runs several tokens at once where the sequence repeats itself. It makes no other text: a
    /// proposed token stays only where the same token is sampled.
    pub prompt_lookup: Option<PromptLookup>,
}

/// What happens while generating, in order: `Prefill` events, then one `Token` a token, then at
/// most one `Tail`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Event<'a> {
    /// Some of the prompt is in the cache.
    Prefill {
        /// Tokens of the prompt so far.
        done: usize,
        /// Tokens of the prompt.
        total: usize,
    },
    /// A token was picked.
    Token {
        /// Its id.
        id: u32,
        /// The text that it completes; empty for an end token or without a tokenizer, for tokens
        /// that end within a character, and for text that could begin a stop string.
        text: &'a str,
        /// Its log-probabilities, if they were asked for.
        logprobs: Option<&'a TokenLogprobs>,
    },
    /// Text after the last token: what could have begun a stop string, and U+FFFD where the
    /// sequence stops within a character.
    Tail {
        /// The text.
        text: &'a str,
    },
}

/// Why generation stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StopReason {
    /// The model picked an end token.
    EndOfSequence,
    /// One of the stop ids was picked: this one.
    StopId(u32),
    /// The text came to one of the stop strings: the one of this number, from 0.
    StopString(usize),
    /// As many tokens as asked for.
    MaxTokens,
    /// The cache is full. The last token was picked but has not been run.
    ContextFull,
    /// The caller broke off.
    Cancelled,
}

/// Counts and times of one generation.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Stats {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Those of them that an earlier generation had run already.
    pub cached_tokens: usize,
    /// Tokens generated, an end token included.
    pub generated_tokens: usize,
    /// Tokens that prompt lookup proposed and a step ran.
    pub proposed_tokens: usize,
    /// Those of them that were sampled too.
    pub accepted_tokens: usize,
    /// Steps that ran the prompt; fewer than its tokens where a step takes several.
    pub prefill_steps: usize,
    /// Steps that ran generated tokens; each but the first generated token needs one, and the
    /// accepted ones none.
    pub decode_steps: usize,
    /// Time of the prompt's steps.
    pub prefill_seconds: f64,
    /// Time from the first generated token to the last, sampling included, callbacks excluded.
    pub decode_seconds: f64,
    /// Time from the call to the first generated token, `None` if there is none.
    pub time_to_first_token_seconds: Option<f64>,
    /// Time of the slowest decode step, sampling included.
    pub slowest_decode_step_seconds: f64,
}

impl Stats {
    /// Prompt tokens that were run, a second; `None` without a measurable time.
    pub fn prefill_tokens_per_second(&self) -> Option<f64> {
        rate(self.prompt_tokens.saturating_sub(self.cached_tokens), self.prefill_seconds)
    }

    /// Tokens after the first, a second; `None` without a second one.
    pub fn decode_tokens_per_second(&self) -> Option<f64> {
        rate(self.generated_tokens.saturating_sub(1), self.decode_seconds)
    }
}

fn rate(count: usize, seconds: f64) -> Option<f64> {
    (count > 0 && seconds > 0.0).then(|| count as f64 / seconds)
}

/// The result of one generation.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Generation {
    /// Generated ids, an end token and the tokens of a stop string included.
    pub ids: Vec<u32>,
    /// Their text without the end token or the stop string; `None` without a tokenizer.
    pub text: Option<String>,
    /// Log-probabilities for each of `ids`, if they were asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<Vec<TokenLogprobs>>,
    /// Why it stopped.
    pub stop: StopReason,
    /// Counts and times.
    pub stats: Stats,
}

/// Generates token by token on a decoder.
///
/// With [`with_prompt_cache`](Self::with_prompt_cache) it is a session: a prompt that begins as
/// what was run before runs only what is new.
pub struct Generator<'a> {
    decoder: Box<dyn Decoder + 'a>,
    tokenizer: Option<&'a Tokenizer>,
    end_ids: BTreeSet<u32>,
    step_stats: Option<&'a mut StepStats>,
    prompt_cache: bool,
    /// The tokens in the decoder's caches.
    tokens: Vec<u32>,
    /// Logits of the step at hand; reused between steps.
    logits: Vec<f32>,
}

/// Tokens at the end of a prompt that are run by themselves in a session, so that a next prompt
/// can branch off within them: templates begin the answer there with what they leave out once it
/// is an earlier one, such as the mark that begins a thought.
const BRANCH: usize = 16;

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
        if decoder.vocab_size() != config.vocab_size {
            return Err(GenerateError::Runner(RunnerError::Unusable {
                runner: decoder.name().into(),
                what: "the vocabulary",
                actual: decoder.vocab_size().to_string(),
                expected: config.vocab_size.to_string(),
            }));
        }
        Ok(Self {
            decoder,
            tokenizer: None,
            end_ids: config.eos_token_ids.iter().copied().collect(),
            step_stats: None,
            prompt_cache: false,
            tokens: Vec::new(),
            logits: Vec::new(),
        })
    }

    /// Keeps the caches from one generation to the next. Where a prompt begins as the sequence
    /// before it, at most its last token and what the decoder cannot have again is run anew. The
    /// decoder keeps copies of its sliding windows for that.
    #[must_use]
    pub fn with_prompt_cache(mut self) -> Self {
        self.prompt_cache = true;
        self
    }

    /// Turns ids into text with `tokenizer`, samples only ids that have a token, and stops at its
    /// end tokens too.
    #[must_use]
    pub fn with_tokenizer(mut self, tokenizer: &'a Tokenizer) -> Self {
        self.end_ids.extend(tokenizer.eos_token_id());
        self.end_ids.extend(&tokenizer.generation_config().eos_token_ids);
        self.tokenizer = Some(tokenizer);
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
        &self.end_ids
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
        let start = Instant::now();
        self.check_prompt(prompt)?;
        let mut output = Output {
            sampler: self.sampler(prompt, options)?,
            text: match self.tokenizer {
                Some(tokenizer) => Some(Text::new(tokenizer, &options.stop)?),
                None => None,
            },
            ids: Vec::new(),
            logprobs: options.top_logprobs.map(|_| Vec::new()),
        };
        let mut speculation = options.prompt_lookup.map(Speculation::new).transpose()?;
        let mut stats = Stats { prompt_tokens: prompt.len(), ..Stats::default() };
        // The step whose logits are next to be sampled, until it is recorded.
        let (mut forward, mut stop) = self.prefill(prompt, &mut stats, on_event)?;
        if options.max_tokens == Some(0) {
            stop = stop.or(Some(StopReason::MaxTokens));
        }

        let mut decode_time = Duration::ZERO;
        // The last token and those that are proposed after it.
        let mut step = Vec::new();
        let stop = loop {
            if let Some(stop) = stop {
                break stop;
            }
            let step_start = Instant::now();
            if let Some(&last) = output.ids.last() {
                let position = self.decoder.position();
                let Some(room) = self.decoder.context().checked_sub(position + 1) else {
                    break StopReason::ContextFull;
                };
                let left = options.max_tokens.map_or(room, |most| most - output.ids.len() - 1);
                step.clear();
                step.push(last);
                if let Some(speculation) = &mut speculation {
                    let proposal = speculation.propose(output.sampler.history(), room.min(left));
                    let runs = |tokens: &usize| self.decoder.gives_all_logits(tokens + 1);
                    let tokens = (1..=proposal.len()).rev().find(runs).unwrap_or(0);
                    step.extend_from_slice(&proposal[..tokens]);
                }
                let wanted = if step.len() > 1 { Wanted::All } else { Wanted::Last };
                self.decoder.forward(&step, wanted, &mut self.logits)?;
                stats.decode_steps += 1;
                let (time, tokens) = (step_start.elapsed(), step.len());
                forward = Some(Forward { time, tokens, position, accepted: None });
            }
            let mut elapsed = step_start.elapsed();
            let mut sample_time = Duration::ZERO;
            // Rows of logits that came to a token.
            let mut rows = 0;
            for logits in self.logits.chunks_exact(self.decoder.vocab_size()) {
                let sample_start = Instant::now();
                let id = output.pick(logits, options)?;
                sample_time += sample_start.elapsed();
                if output.ids.len() == 1 {
                    stats.time_to_first_token_seconds = Some(start.elapsed().as_secs_f64());
                }
                rows += 1;
                stop = output.show(id, &self.end_ids, options, on_event);
                if stop.is_some() || step.get(rows) != Some(&id) {
                    break;
                }
            }
            if rows == 0 {
                return Err(GenerateError::Logits { message: "the step has none".into() });
            }
            if let Some(proposed) = step.len().checked_sub(1) {
                let commit_start = Instant::now();
                self.commit(&step[..rows])?;
                elapsed += sample_time + commit_start.elapsed();
                decode_time += elapsed;
                stats.slowest_decode_step_seconds =
                    stats.slowest_decode_step_seconds.max(elapsed.as_secs_f64());
                stats.proposed_tokens += proposed;
                stats.accepted_tokens += rows - 1;
                if let (Some(speculation), Some(forward), 1..) =
                    (&mut speculation, &mut forward, proposed)
                {
                    speculation.record(proposed, rows - 1);
                    forward.accepted = Some(rows - 1);
                }
            }
            self.record(forward.take(), Some(sample_time));
        };
        self.record(forward, None);
        stats.generated_tokens = output.ids.len();
        stats.decode_seconds = decode_time.as_secs_f64();
        let text = output.text.map(|mut text| {
            if !matches!(stop, StopReason::StopString(_)) {
                let tail = text.finish();
                if !tail.is_empty() {
                    // Nothing is left to break off.
                    let _ = on_event(Event::Tail { text: &tail });
                }
            }
            text.whole
        });
        Ok(Generation { ids: output.ids, text, logprobs: output.logprobs, stop, stats })
    }

    /// Runs what is new of `prompt`, and leaves the logits of its last token. Returns the last
    /// step, which is not recorded yet, and whether the caller broke off.
    fn prefill(
        &mut self,
        prompt: &[u32],
        stats: &mut Stats,
        on_event: &mut dyn FnMut(Event<'_>) -> ControlFlow<()>,
    ) -> Result<(Option<Forward>, Option<StopReason>), GenerateError> {
        let mut done = self.rewind(prompt);
        stats.cached_tokens = done;
        let branch = prompt.len().saturating_sub(BRANCH);
        let mut forward = None;
        self.mark();
        while done < prompt.len() {
            self.record(forward.take(), None);
            let step_start = Instant::now();
            let end = if self.prompt_cache && done < branch { branch } else { prompt.len() };
            let tokens = self.decoder.chunk(end - done).clamp(1, end - done);
            let ids = &prompt[done..done + tokens];
            let last = done + tokens == prompt.len();
            let wanted = if last { Wanted::Last } else { Wanted::Nothing };
            self.decoder.forward(ids, wanted, &mut self.logits)?;
            self.commit(ids)?;
            let time = step_start.elapsed();
            forward = Some(Forward { time, tokens, position: done, accepted: None });
            done += tokens;
            stats.prefill_seconds += time.as_secs_f64();
            stats.prefill_steps += 1;
            if done == branch || last {
                self.mark();
            }
            if on_event(Event::Prefill { done, total: prompt.len() }).is_break() {
                return Ok((forward, Some(StopReason::Cancelled)));
            }
        }
        Ok((forward, None))
    }

    /// Goes back to where the decoder's sequence and `prompt` part, or before, and returns the
    /// tokens that they share. One token of the prompt is left at least, for its logits.
    fn rewind(&mut self, prompt: &[u32]) -> usize {
        if !self.prompt_cache {
            self.decoder.clear();
            self.tokens.clear();
            return 0;
        }
        let shared = self.tokens.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        let position = self.decoder.rewind(shared.min(prompt.len().saturating_sub(1)));
        self.tokens.truncate(position);
        position
    }

    /// Has the decoder remember where it is, in a session.
    fn mark(&mut self) {
        if self.prompt_cache && !self.tokens.is_empty() {
            self.decoder.mark();
        }
    }

    /// Keeps `ids`, the first ones of the last forward.
    fn commit(&mut self, ids: &[u32]) -> Result<(), GenerateError> {
        self.decoder.commit(ids.len())?;
        self.tokens.extend_from_slice(ids);
        Ok(())
    }

    /// A sampler for what follows `prompt`; the options are checked.
    fn sampler(&self, prompt: &[u32], options: &GenerateOptions) -> Result<Sampler, GenerateError> {
        let vocab_size = self.decoder.vocab_size();
        let min_tokens = options.sampling.min_tokens;
        if let Some(max_tokens) = options.max_tokens.filter(|&most| most < min_tokens) {
            let accepted = format!("at most max_tokens, {max_tokens}, is accepted");
            return Err(GenerateError::option("min_tokens", min_tokens, accepted));
        }
        if self.tokenizer.is_none()
            && let Some(text) = options.stop.first()
        {
            let accepted = "without a tokenizer there is no text; use stop_ids";
            return Err(GenerateError::option("a stop string", format!("{text:?}"), accepted));
        }
        check_ids("an id of stop_ids", &options.stop_ids, vocab_size)?;
        let end_ids = self.end_ids.iter().chain(&options.stop_ids).copied();
        let end_ids = end_ids.filter(|&id| (id as usize) < vocab_size);
        let sampler = Sampler::new(options.sampling.clone(), vocab_size)?
            .with_end_ids(end_ids)?
            .with_prompt(prompt);
        match self.tokenizer {
            Some(tokenizer) => sampler.with_allowed(&tokenizer.allowed_ids(vocab_size)),
            None => Ok(sampler),
        }
    }

    /// Records a step, if there is one and steps are recorded.
    fn record(&mut self, forward: Option<Forward>, sample: Option<Duration>) {
        let (Some(stats), Some(forward)) = (&mut self.step_stats, forward) else { return };
        let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
        let forward_time = (MODEL_FORWARD_MS, milliseconds(forward.time));
        let both;
        let times = match sample {
            Some(sample) => {
                both = [forward_time, (MODEL_SAMPLE_MS, milliseconds(sample))];
                both.as_slice()
            }
            None => &[forward_time],
        };
        stats.record(&StepRecord {
            times,
            tokens: forward.tokens,
            accepted: forward.accepted,
            position: forward.position,
            cache_bytes: self.decoder.cache_bytes(),
        });
    }

    fn check_prompt(&self, prompt: &[u32]) -> Result<(), GenerateError> {
        if prompt.is_empty() {
            return Err(GenerateError::EmptyPrompt);
        }
        let context = self.decoder.context();
        if prompt.len() > context {
            return Err(GenerateError::PromptTooLong { prompt: prompt.len(), context });
        }
        let rows = self.decoder.embedding_rows();
        match prompt.iter().position(|&id| id as usize >= rows) {
            Some(index) => Err(GenerateError::TokenOutOfRange { index, id: prompt[index], rows }),
            None => Ok(()),
        }
    }
}

/// What a generation has made so far.
struct Output<'t> {
    sampler: Sampler,
    text: Option<Text<'t>>,
    ids: Vec<u32>,
    logprobs: Option<Vec<TokenLogprobs>>,
}

impl Output<'_> {
    /// Picks the next token.
    fn pick(&mut self, logits: &[f32], options: &GenerateOptions) -> Result<u32, GenerateError> {
        let id = self.sampler.sample(logits)?;
        if let (Some(all), Some(top)) = (&mut self.logprobs, options.top_logprobs) {
            all.push(self.sampler.logprobs(logits, id, top)?);
        }
        self.ids.push(id);
        Ok(id)
    }

    /// Tells of the token that was picked, and whether it is the last.
    fn show(
        &mut self,
        id: u32,
        end_ids: &BTreeSet<u32>,
        options: &GenerateOptions,
        on_event: &mut dyn FnMut(Event<'_>) -> ControlFlow<()>,
    ) -> Option<StopReason> {
        let ended = if end_ids.contains(&id) {
            Some(StopReason::EndOfSequence)
        } else {
            options.stop_ids.contains(&id).then_some(StopReason::StopId(id))
        };
        let released = match &mut self.text {
            Some(text) if ended.is_none() => {
                text.push(id, self.ids.len() > options.sampling.min_tokens)
            }
            _ => Released { text: String::new(), stop: None },
        };
        let logprobs = self.logprobs.as_ref().and_then(|all| all.last());
        let flow = on_event(Event::Token { id, text: &released.text, logprobs });
        if ended.is_some() {
            ended
        } else if let Some(number) = released.stop {
            Some(StopReason::StopString(number))
        } else if flow.is_break() {
            Some(StopReason::Cancelled)
        } else {
            (options.max_tokens == Some(self.ids.len())).then_some(StopReason::MaxTokens)
        }
    }
}

/// The text of a generation as it comes.
struct Text<'t> {
    stream: TextStream<'t>,
    stops: StopStrings,
    /// All that was released.
    whole: String,
}

impl<'t> Text<'t> {
    fn new(tokenizer: &'t Tokenizer, stop: &[String]) -> Result<Self, GenerateError> {
        let stops = StopStrings::new(stop)?;
        Ok(Self { stream: TextStream::new(tokenizer), stops, whole: String::new() })
    }

    /// Takes a token, and looks for stop strings if it is time for them.
    fn push(&mut self, id: u32, search: bool) -> Released {
        let text = self.stream.push(id);
        let released = if search { self.stops.push(&text) } else { Released { text, stop: None } };
        self.whole.push_str(&released.text);
        released
    }

    /// What is left when no token follows.
    fn finish(&mut self) -> String {
        let Released { mut text, stop } = self.stops.push(self.stream.finish());
        if stop.is_none() {
            text.push_str(&self.stops.finish());
        }
        self.whole.push_str(&text);
        text
    }
}

/// A step that is not recorded yet.
struct Forward {
    time: Duration,
    tokens: usize,
    position: usize,
    /// Proposed tokens that were sampled too; `None` when none was proposed.
    accepted: Option<usize>,
}
