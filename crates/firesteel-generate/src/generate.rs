use crate::options::check_ids;
use crate::{
    GenerateError, MODEL_FORWARD_MS, MODEL_SAMPLE_MS, Released, Sampler, SamplingOptions,
    StepRecord, StepStats, StopStrings, TextStream, TokenLogprobs, Tokenizer,
};
use firesteel_checkpoint::ModelConfig;
use firesteel_step::{Embedding, KvState, Logits, Role, Runner, StepSpec};
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
    /// Tokens generated, an end token included.
    pub generated_tokens: usize,
    /// Steps that ran the prompt; with a prefill runner fewer than its tokens.
    pub prefill_steps: usize,
    /// Steps that ran generated tokens; each but the first generated token needs one.
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
    /// Prompt tokens a second; `None` without a measurable time.
    pub fn prefill_tokens_per_second(&self) -> Option<f64> {
        rate(self.prompt_tokens, self.prefill_seconds)
    }

    /// Decode steps a second, each of which makes one token; `None` without a step.
    pub fn decode_tokens_per_second(&self) -> Option<f64> {
        rate(self.decode_steps, self.decode_seconds)
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

/// A runner with its contract.
struct Stage<'a> {
    runner: &'a mut dyn Runner,
    spec: StepSpec,
}

/// Generates token by token on a runner.
pub struct Generator<'a> {
    decode: Stage<'a>,
    prefill: Option<Stage<'a>>,
    embedding: &'a dyn Embedding,
    tokenizer: Option<&'a Tokenizer>,
    end_ids: BTreeSet<u32>,
    state: KvState,
    step_stats: Option<&'a mut StepStats>,
    /// Embeddings of the step at hand; reused between steps.
    x: Vec<f32>,
}

impl<'a> Generator<'a> {
    /// A generator on `decode`, which runs all layers of `config` and the head for one token a
    /// step. It stops at the end ids of `config`.
    ///
    /// # Errors
    /// When the runner's steps are otherwise, or the caches do not fit in memory arithmetic.
    pub fn new(
        config: &ModelConfig,
        decode: &'a mut dyn Runner,
        embedding: &'a dyn Embedding,
    ) -> Result<Self, GenerateError> {
        let spec = decode.spec().clone();
        let layers = spec.first_layer..spec.first_layer.saturating_add(spec.layers.len());
        require(decode, "the tokens of a step", spec.tokens, 1)?;
        require(decode, "the range of layers", layers, 0..config.num_layers())?;
        require(decode, "the vocabulary", spec.vocab_size, config.vocab_size)?;
        require(decode, "the hidden size", spec.hidden_size, embedding.hidden_size())?;
        if spec.logits == Logits::Hidden {
            return Err(unusable(decode, "the output", "the hidden state", "logits"));
        }
        let state = KvState::new(&spec)?;
        Ok(Self {
            decode: Stage { runner: decode, spec },
            prefill: None,
            embedding,
            tokenizer: None,
            end_ids: config.eos_token_ids.iter().copied().collect(),
            state,
            step_stats: None,
            x: Vec::new(),
        })
    }

    /// Runs whole chunks of the prompt on `runner`, whose steps are those of the decode runner
    /// but for the number of tokens and the output. A runner without a head never gets the last
    /// token.
    ///
    /// # Errors
    /// When its steps do not continue the same caches.
    pub fn with_prefill(mut self, runner: &'a mut dyn Runner) -> Result<Self, GenerateError> {
        let spec = runner.spec().clone();
        let decode = &self.decode.spec;
        require(runner, "the context", spec.context, decode.context)?;
        require(runner, "the first layer", spec.first_layer, decode.first_layer)?;
        if spec.rope_sliding != decode.rope_sliding || spec.rope_full != decode.rope_full {
            return Err(unusable(runner, "the rotary embedding", "another", "the decode runner's"));
        }
        if spec.vocab_size != decode.vocab_size && spec.logits != Logits::Hidden {
            require(runner, "the vocabulary", spec.vocab_size, decode.vocab_size)?;
        }
        let expected = decode.with_tokens(spec.tokens)?.inputs;
        require(runner, "the number of inputs", spec.inputs.len(), expected.len())?;
        for (input, expected) in spec.inputs.iter().zip(&expected) {
            let show =
                |t: &firesteel_step::TensorSpec| format!("{} {} {:?}", t.name, t.dtype, t.shape);
            require(runner, "an input", show(input), show(expected))?;
        }
        self.prefill = Some(Stage { runner, spec });
        Ok(self)
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

    /// Runs `prompt` and generates after it, from an empty cache. `on_event` is told what happens
    /// and can break off.
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
        let mut sampler = self.sampler(prompt, options)?;
        let mut text = match self.tokenizer {
            Some(tokenizer) => Some(Text::new(tokenizer, &options.stop)?),
            None => None,
        };
        let mut ids = Vec::new();
        let mut logprobs = options.top_logprobs.map(|_| Vec::new());
        let mut stats = Stats { prompt_tokens: prompt.len(), ..Stats::default() };
        self.state.clear();

        let mut logits = Vec::new();
        let mut done = 0;
        let mut stop = None;
        // The step whose logits are next to be sampled, until it is recorded.
        let mut forward = None;
        while done < prompt.len() && stop.is_none() {
            self.record(forward.take(), None);
            let step_start = Instant::now();
            let tokens = self.prefill_step(&prompt[done..], &mut logits)?;
            let elapsed = step_start.elapsed();
            forward = Some(Forward { time: elapsed, tokens, position: done });
            done += tokens;
            stats.prefill_seconds += elapsed.as_secs_f64();
            stats.prefill_steps += 1;
            if on_event(Event::Prefill { done, total: prompt.len() }).is_break() {
                stop = Some(StopReason::Cancelled);
            }
        }
        if options.max_tokens == Some(0) {
            stop = stop.or(Some(StopReason::MaxTokens));
        }

        let mut decode_time = Duration::ZERO;
        let stop = loop {
            if let Some(stop) = stop {
                break stop;
            }
            let step_start = Instant::now();
            let mut sample_start = step_start;
            if let Some(&last) = ids.last() {
                let position = self.state.position();
                if position >= self.state.context() {
                    break StopReason::ContextFull;
                }
                self.step(StageName::Decode, &[last], Some(&mut logits))?;
                stats.decode_steps += 1;
                if self.step_stats.is_some() {
                    sample_start = Instant::now();
                    let time = sample_start.duration_since(step_start);
                    forward = Some(Forward { time, tokens: 1, position });
                }
            }
            let id = sampler.sample(&logits)?;
            if let (Some(all), Some(top)) = (&mut logprobs, options.top_logprobs) {
                all.push(sampler.logprobs(&logits, id, top)?);
            }
            let elapsed = step_start.elapsed();
            if ids.is_empty() {
                stats.time_to_first_token_seconds = Some(start.elapsed().as_secs_f64());
            } else {
                decode_time += elapsed;
                stats.slowest_decode_step_seconds =
                    stats.slowest_decode_step_seconds.max(elapsed.as_secs_f64());
            }
            let before_sample = sample_start.duration_since(step_start);
            self.record(forward.take(), Some(elapsed.saturating_sub(before_sample)));
            ids.push(id);
            let ended = if self.end_ids.contains(&id) {
                Some(StopReason::EndOfSequence)
            } else {
                options.stop_ids.contains(&id).then_some(StopReason::StopId(id))
            };
            let released = match &mut text {
                Some(text) if ended.is_none() => {
                    text.push(id, ids.len() > options.sampling.min_tokens)
                }
                _ => Released { text: String::new(), stop: None },
            };
            let logprobs = logprobs.as_ref().and_then(|all| all.last());
            let flow = on_event(Event::Token { id, text: &released.text, logprobs });
            stop = if ended.is_some() {
                ended
            } else if let Some(number) = released.stop {
                Some(StopReason::StopString(number))
            } else if flow.is_break() {
                Some(StopReason::Cancelled)
            } else if options.max_tokens == Some(ids.len()) {
                Some(StopReason::MaxTokens)
            } else {
                None
            };
        };
        self.record(forward, None);
        stats.generated_tokens = ids.len();
        stats.decode_seconds = decode_time.as_secs_f64();
        let text = text.map(|mut text| {
            if !matches!(stop, StopReason::StopString(_)) {
                let tail = text.finish();
                if !tail.is_empty() {
                    // Nothing is left to break off.
                    let _ = on_event(Event::Tail { text: &tail });
                }
            }
            text.whole
        });
        Ok(Generation { ids, text, logprobs, stop, stats })
    }

    /// A sampler for what follows `prompt`; the options are checked.
    fn sampler(&self, prompt: &[u32], options: &GenerateOptions) -> Result<Sampler, GenerateError> {
        let vocab_size = self.decode.spec.vocab_size;
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
            position: forward.position,
            cache_bytes: self.state.bytes(),
        });
    }

    fn check_prompt(&self, prompt: &[u32]) -> Result<(), GenerateError> {
        if prompt.is_empty() {
            return Err(GenerateError::EmptyPrompt);
        }
        let context = self.state.context();
        if prompt.len() > context {
            return Err(GenerateError::PromptTooLong { prompt: prompt.len(), context });
        }
        let rows = self.embedding.rows();
        match prompt.iter().position(|&id| id as usize >= rows) {
            Some(index) => Err(GenerateError::TokenOutOfRange { index, id: prompt[index], rows }),
            None => Ok(()),
        }
    }

    /// Runs the beginning of `prompt`: a whole chunk if there is a prefill runner and enough is
    /// left, else one token. Fills `logits` when that was all of it. Returns the tokens run.
    fn prefill_step(
        &mut self,
        prompt: &[u32],
        logits: &mut Vec<f32>,
    ) -> Result<usize, GenerateError> {
        let chunk = self.prefill.as_ref().map(|stage| &stage.spec).filter(|spec| {
            let headless = spec.logits == Logits::Hidden;
            prompt.len() >= spec.tokens.saturating_add(usize::from(headless))
        });
        let (name, tokens) = match chunk {
            Some(spec) => (StageName::Prefill, spec.tokens),
            None => (StageName::Decode, 1),
        };
        let is_last = tokens == prompt.len();
        self.step(name, &prompt[..tokens], is_last.then_some(logits))?;
        Ok(tokens)
    }

    /// Runs one step, and copies the logits of its last token if they are wanted.
    fn step(
        &mut self,
        name: StageName,
        ids: &[u32],
        logits: Option<&mut Vec<f32>>,
    ) -> Result<(), GenerateError> {
        let stage = match (name, &mut self.prefill) {
            (StageName::Prefill, Some(stage)) => stage,
            _ => &mut self.decode,
        };
        let spec = &stage.spec;
        self.x.resize(ids.len().saturating_mul(spec.hidden_size), 0.0);
        self.embedding.lookup(ids, &mut self.x)?;
        let step = self.state.prepare(spec, &self.x)?;
        let outputs = stage.runner.step(&self.state.inputs(spec, &step)?)?;
        self.state.commit(spec, step, &outputs)?;
        if let Some(logits) = logits {
            let missing = || GenerateError::Logits { message: "the step has none".into() };
            let tensor = outputs.get(spec, Role::Logits).ok_or_else(missing)?;
            let values = tensor.view().to_f32()?;
            let row = values.len().checked_sub(spec.vocab_size).ok_or_else(missing)?;
            logits.clear();
            logits.extend_from_slice(&values[row..]);
        }
        Ok(())
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
}

#[derive(Clone, Copy)]
enum StageName {
    Prefill,
    Decode,
}

fn unusable(
    runner: &dyn Runner,
    what: &'static str,
    actual: impl Into<String>,
    expected: impl Into<String>,
) -> GenerateError {
    GenerateError::Unusable {
        runner: runner.name().into(),
        what,
        actual: actual.into(),
        expected: expected.into(),
    }
}

fn require<T: PartialEq + std::fmt::Debug>(
    runner: &dyn Runner,
    what: &'static str,
    actual: T,
    expected: T,
) -> Result<(), GenerateError> {
    if actual == expected {
        Ok(())
    } else {
        Err(unusable(runner, what, format!("{actual:?}"), format!("{expected:?}")))
    }
}
