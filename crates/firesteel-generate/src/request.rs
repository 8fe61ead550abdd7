use crate::lookup::Speculation;
use crate::options::check_ids;
use crate::{
    GenerateError, MODEL_FORWARD_MS, MODEL_SAMPLE_MS, PromptLookup, Released, Sampler,
    SamplingOptions, StepRecord, StopStrings, TextStream, TokenLogprobs, Tokenizer,
};
use firesteel_checkpoint::ModelConfig;
use firesteel_step::{BatchPart, Decoder, RunnerError, SequenceId, Wanted};
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
    /// Time of the prompt's steps; in a batch, that of the passes that they were part of.
    pub prefill_seconds: f64,
    /// Time from the first generated token to the last, sampling included, callbacks excluded; in a
    /// batch, that of the passes that this request was part of, and of its own sampling.
    pub decode_seconds: f64,
    /// Time from the making of the request to the first generated token, `None` if there is none.
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

/// What the ids of a model mean to its requests: how many there are, which of them end a sequence,
/// and what text they have.
#[derive(Clone)]
pub struct Vocabulary<'t> {
    size: usize,
    end_ids: BTreeSet<u32>,
    tokenizer: Option<&'t Tokenizer>,
}

impl<'t> Vocabulary<'t> {
    /// The ids of a model with `config`, which end at its end ids and have no text.
    pub fn new(config: &ModelConfig) -> Self {
        let end_ids = config.eos_token_ids.iter().copied().collect();
        Self { size: config.vocab_size, end_ids, tokenizer: None }
    }

    /// Turns ids into text with `tokenizer`, samples only ids that have a token, and stops at its
    /// end tokens too.
    #[must_use]
    pub fn with_tokenizer(mut self, tokenizer: &'t Tokenizer) -> Self {
        self.end_ids.extend(tokenizer.eos_token_id());
        self.end_ids.extend(&tokenizer.generation_config().eos_token_ids);
        self.tokenizer = Some(tokenizer);
        self
    }

    /// The ids that end a sequence.
    pub fn end_ids(&self) -> &BTreeSet<u32> {
        &self.end_ids
    }

    /// A sampler for what follows `prompt`; the options are checked.
    fn sampler(&self, prompt: &[u32], options: &GenerateOptions) -> Result<Sampler, GenerateError> {
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
        check_ids("an id of stop_ids", &options.stop_ids, self.size)?;
        let end_ids = self.end_ids.iter().chain(&options.stop_ids).copied();
        let end_ids = end_ids.filter(|&id| (id as usize) < self.size);
        let sampler = Sampler::new(options.sampling.clone(), self.size)?
            .with_end_ids(end_ids)?
            .with_prompt(prompt);
        match self.tokenizer {
            Some(tokenizer) => sampler.with_allowed(&tokenizer.allowed_ids(self.size)),
            None => Ok(sampler),
        }
    }
}

/// A generation that is advanced: it says what it wants to run next, and takes the logits of that,
/// which become tokens, text and at last a [`Generation`]. It has no decoder and no loop; a
/// [`Batch`](crate::Batch) has.
pub struct Request<'t> {
    prompt: Vec<u32>,
    options: GenerateOptions,
    vocabulary: Vocabulary<'t>,
    sampler: Sampler,
    text: Option<Text<'t>>,
    speculation: Option<Speculation>,
    ids: Vec<u32>,
    logprobs: Option<Vec<TokenLogprobs>>,
    stats: Stats,
    made: Instant,
    decode_time: Duration,
    /// Tokens of the prompt in the caches.
    done: usize,
    /// What is to run next: tokens of the prompt, or the last token and those that are proposed
    /// after it.
    step: Vec<u32>,
    wanted: Wanted,
    logits: Vec<f32>,
}

/// A sequence, with the tokens in its caches.
pub(crate) struct Track<'s> {
    pub(crate) decoder: &'s mut dyn Decoder,
    pub(crate) tokens: &'s mut Vec<u32>,
    /// Whether the caches are kept from one request to the next.
    pub(crate) prompt_cache: bool,
}

/// Who is told what the requests of a batch do.
pub trait Observer {
    /// Something happened to the request on `sequence`. A break ends it with
    /// [`StopReason::Cancelled`].
    fn event(&mut self, sequence: SequenceId, event: Event<'_>) -> ControlFlow<()>;

    /// A step of the request on `sequence` is over. Its forward took the time of the pass that it
    /// was part of.
    fn step(&mut self, sequence: SequenceId, step: &StepRecord<'_>) {
        let _ = (sequence, step);
    }
}

/// An observer of one request.
pub(crate) struct Told<'o> {
    pub(crate) sequence: SequenceId,
    pub(crate) observer: &'o mut dyn Observer,
}

/// Tokens at the end of a prompt that are run by themselves in a session, so that a next prompt
/// can branch off within them: templates begin the answer there with what they leave out once it
/// is an earlier one, such as the mark that begins a thought.
const BRANCH: usize = 16;

impl<'t> Request<'t> {
    /// A request for what follows `prompt`. Its clock runs from now on.
    ///
    /// # Errors
    /// When the prompt is empty, or an option is out of its range.
    pub fn new(
        vocabulary: &Vocabulary<'t>,
        prompt: &[u32],
        options: &GenerateOptions,
    ) -> Result<Self, GenerateError> {
        let made = Instant::now();
        if prompt.is_empty() {
            return Err(GenerateError::EmptyPrompt);
        }
        Ok(Self {
            sampler: vocabulary.sampler(prompt, options)?,
            text: match vocabulary.tokenizer {
                Some(tokenizer) => Some(Text::new(tokenizer, &options.stop)?),
                None => None,
            },
            speculation: options.prompt_lookup.map(Speculation::new).transpose()?,
            ids: Vec::new(),
            logprobs: options.top_logprobs.map(|_| Vec::new()),
            stats: Stats { prompt_tokens: prompt.len(), ..Stats::default() },
            made,
            decode_time: Duration::ZERO,
            done: 0,
            step: Vec::new(),
            wanted: Wanted::Nothing,
            logits: Vec::new(),
            prompt: prompt.to_vec(),
            options: options.clone(),
            vocabulary: vocabulary.clone(),
        })
    }

    /// Whether the request can run on `decoder`.
    pub(crate) fn check(&self, decoder: &dyn Decoder) -> Result<(), GenerateError> {
        check_vocabulary(decoder, self.vocabulary.size)?;
        let (prompt, context) = (self.prompt.len(), decoder.context());
        if prompt > context {
            return Err(GenerateError::PromptTooLong { prompt, context });
        }
        let rows = decoder.embedding_rows();
        match self.prompt.iter().position(|&id| id as usize >= rows) {
            Some(index) => {
                Err(GenerateError::TokenOutOfRange { index, id: self.prompt[index], rows })
            }
            None => Ok(()),
        }
    }

    /// Begins on a sequence, which goes back to where it and the prompt part.
    pub(crate) fn begin(&mut self, track: &mut Track<'_>) {
        self.done = track.rewind(&self.prompt);
        self.stats.cached_tokens = self.done;
        track.mark();
    }

    /// Whether what is next is a part of the prompt.
    pub(crate) fn in_prompt(&self) -> bool {
        self.done < self.prompt.len()
    }

    /// Decides what is to run next, and returns how many tokens that are. Of a prompt they are at
    /// most `rows` where the decoder splits freely, else what it takes best.
    pub(crate) fn plan(&mut self, decoder: &dyn Decoder, prompt_cache: bool, rows: usize) -> usize {
        self.step.clear();
        if self.in_prompt() {
            let branch = self.branch();
            let cut = prompt_cache && self.done < branch;
            let left = if cut { branch } else { self.prompt.len() } - self.done;
            let most = if decoder.splits_freely() { left.min(rows.max(1)) } else { left };
            let end = self.done + decoder.chunk(most).clamp(1, most);
            self.step.extend_from_slice(&self.prompt[self.done..end]);
            self.wanted = if end == self.prompt.len() { Wanted::Last } else { Wanted::Nothing };
        } else if let Some(&last) = self.ids.last() {
            self.step.push(last);
            let room = decoder.context().saturating_sub(decoder.position() + 1);
            let left = self
                .options
                .max_tokens
                .map_or(room, |most| most.saturating_sub(self.ids.len() + 1));
            if let Some(speculation) = &mut self.speculation {
                let proposal = speculation.propose(self.sampler.history(), room.min(left));
                let runs = |tokens: &usize| decoder.gives_all_logits(tokens + 1);
                let tokens = (1..=proposal.len()).rev().find(runs).unwrap_or(0);
                self.step.extend_from_slice(&proposal[..tokens]);
            }
            self.wanted = if self.step.len() > 1 { Wanted::All } else { Wanted::Last };
        }
        self.step.len()
    }

    /// What is to run next, as it was planned.
    pub(crate) fn part(&mut self, sequence: SequenceId) -> BatchPart<'_> {
        let Self { step, wanted, logits, .. } = self;
        BatchPart { sequence, ids: step, wanted: *wanted, logits }
    }

    /// Takes what came of the step that was planned, which ran for `time`: keeps its tokens, samples
    /// what follows, and tells of it. Returns why the request is over, if it is.
    pub(crate) fn take(
        &mut self,
        track: &mut Track<'_>,
        time: Duration,
        told: &mut Told<'_>,
    ) -> Result<Option<StopReason>, GenerateError> {
        let position = track.tokens.len();
        let mut forward = Forward { time, tokens: self.step.len(), position, accepted: None };
        let prompt = self.in_prompt();
        if prompt {
            let stop = self.take_prompt(track, &mut forward, told)?;
            if stop.is_some() || self.in_prompt() {
                told.step(&forward, None, &*track.decoder);
                return Ok(stop);
            }
        }
        let proposed = if prompt { 0 } else { self.step.len().saturating_sub(1) };
        let mut sample_time = Duration::ZERO;
        let mut stop = None;
        // Rows of logits that came to a token.
        let mut rows = 0;
        let logits = std::mem::take(&mut self.logits);
        for row in logits.chunks_exact(self.vocabulary.size.max(1)) {
            let sample_start = Instant::now();
            let id = self.pick(row)?;
            sample_time += sample_start.elapsed();
            if self.ids.len() == 1 {
                self.stats.time_to_first_token_seconds = Some(self.made.elapsed().as_secs_f64());
            }
            rows += 1;
            stop = self.show(id, told);
            if stop.is_some() || rows > proposed || self.step.get(rows) != Some(&id) {
                break;
            }
        }
        self.logits = logits;
        if rows == 0 {
            return Err(GenerateError::Logits { message: "the step has none".into() });
        }
        if !prompt {
            let commit_start = Instant::now();
            track.commit(self.step.get(..rows).unwrap_or(&self.step))?;
            let elapsed = time + sample_time + commit_start.elapsed();
            self.decode_time += elapsed;
            let stats = &mut self.stats;
            stats.decode_steps += 1;
            stats.slowest_decode_step_seconds =
                stats.slowest_decode_step_seconds.max(elapsed.as_secs_f64());
            stats.proposed_tokens += proposed;
            stats.accepted_tokens += rows - 1;
            if let (Some(speculation), 1..) = (&mut self.speculation, proposed) {
                speculation.record(proposed, rows - 1);
                forward.accepted = Some(rows - 1);
            }
        }
        told.step(&forward, Some(sample_time), &*track.decoder);
        let full = track.decoder.position() >= track.decoder.context();
        Ok(stop.or(full.then_some(StopReason::ContextFull)))
    }

    /// Keeps a part of the prompt.
    fn take_prompt(
        &mut self,
        track: &mut Track<'_>,
        forward: &mut Forward,
        told: &mut Told<'_>,
    ) -> Result<Option<StopReason>, GenerateError> {
        let commit_start = Instant::now();
        track.commit(&self.step)?;
        forward.time += commit_start.elapsed();
        self.done += self.step.len();
        self.stats.prefill_seconds += forward.time.as_secs_f64();
        self.stats.prefill_steps += 1;
        if self.done == self.branch() || !self.in_prompt() {
            track.mark();
        }
        let (done, total) = (self.done, self.prompt.len());
        if told.event(Event::Prefill { done, total }).is_break() {
            return Ok(Some(StopReason::Cancelled));
        }
        let nothing = !self.in_prompt() && self.options.max_tokens == Some(0);
        Ok(nothing.then_some(StopReason::MaxTokens))
    }

    /// The position from which on the prompt is run by itself in a session.
    fn branch(&self) -> usize {
        self.prompt.len().saturating_sub(BRANCH)
    }

    /// Picks the next token.
    fn pick(&mut self, logits: &[f32]) -> Result<u32, GenerateError> {
        let id = self.sampler.sample(logits)?;
        if let (Some(all), Some(top)) = (&mut self.logprobs, self.options.top_logprobs) {
            all.push(self.sampler.logprobs(logits, id, top)?);
        }
        self.ids.push(id);
        Ok(id)
    }

    /// Tells of the token that was picked, and whether it is the last.
    fn show(&mut self, id: u32, told: &mut Told<'_>) -> Option<StopReason> {
        let ended = if self.vocabulary.end_ids.contains(&id) {
            Some(StopReason::EndOfSequence)
        } else {
            self.options.stop_ids.contains(&id).then_some(StopReason::StopId(id))
        };
        let released = match &mut self.text {
            Some(text) if ended.is_none() => {
                text.push(id, self.ids.len() > self.options.sampling.min_tokens)
            }
            _ => Released { text: String::new(), stop: None },
        };
        let logprobs = self.logprobs.as_ref().and_then(|all| all.last());
        let flow = told.event(Event::Token { id, text: &released.text, logprobs });
        if ended.is_some() {
            ended
        } else if let Some(number) = released.stop {
            Some(StopReason::StopString(number))
        } else if flow.is_break() {
            Some(StopReason::Cancelled)
        } else {
            (self.options.max_tokens == Some(self.ids.len())).then_some(StopReason::MaxTokens)
        }
    }

    /// Ends the request, and tells of text that is left.
    pub(crate) fn finish(self, stop: StopReason, told: Option<&mut Told<'_>>) -> Generation {
        let mut stats = self.stats;
        stats.generated_tokens = self.ids.len();
        stats.decode_seconds = self.decode_time.as_secs_f64();
        let text = self.text.map(|mut text| {
            if !matches!(stop, StopReason::StopString(_)) {
                let tail = text.finish();
                if let (false, Some(told)) = (tail.is_empty(), told) {
                    // Nothing is left to break off.
                    let _ = told.event(Event::Tail { text: &tail });
                }
            }
            text.whole
        });
        Generation { ids: self.ids, text, logprobs: self.logprobs, stop, stats }
    }
}

/// Whether `decoder` has a vocabulary of `size`.
pub(crate) fn check_vocabulary(decoder: &dyn Decoder, size: usize) -> Result<(), GenerateError> {
    if decoder.vocab_size() == size {
        return Ok(());
    }
    Err(GenerateError::Runner(RunnerError::Unusable {
        runner: decoder.name().into(),
        what: "the vocabulary",
        actual: decoder.vocab_size().to_string(),
        expected: size.to_string(),
    }))
}

impl Track<'_> {
    /// Goes back to where the sequence and `prompt` part, or before, and returns the tokens that
    /// they share. One token of the prompt is left at least, for its logits.
    fn rewind(&mut self, prompt: &[u32]) -> usize {
        if !self.prompt_cache || self.decoder.position() != self.tokens.len() {
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
}

impl Told<'_> {
    fn event(&mut self, event: Event<'_>) -> ControlFlow<()> {
        self.observer.event(self.sequence, event)
    }

    fn step(&mut self, forward: &Forward, sample: Option<Duration>, decoder: &dyn Decoder) {
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
        let record = StepRecord {
            times,
            tokens: forward.tokens,
            accepted: forward.accepted,
            position: forward.position,
            cache_bytes: decoder.cache_bytes(),
        };
        self.observer.step(self.sequence, &record);
    }
}

/// A step that was run.
struct Forward {
    time: Duration,
    tokens: usize,
    position: usize,
    /// Proposed tokens that were sampled too; `None` when none was proposed.
    accepted: Option<usize>,
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
