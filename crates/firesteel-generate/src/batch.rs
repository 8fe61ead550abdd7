use crate::request::{Observer, Told, Track};
use crate::{GenerateError, Generation, Request, StopReason};
use firesteel_step::{BatchDecoder, BatchPart, Decoder, RunnerError, SequenceId};
use std::collections::BTreeMap;
use std::time::Instant;

/// Requests that are advanced together, one pass at a time, on the sequences of one
/// [`BatchDecoder`].
///
/// Every sequence takes one request after the other. A request begins and ends at any step, and
/// neither its ids nor its text, log-probabilities or stop reason depend on the others: it runs the
/// same steps as it would alone, only not in every pass. One that fails ends none of the others.
///
/// At most [`rows`](Self::with_rows) tokens of prompts and as many generated or proposed ones run in
/// one pass, so that a long prompt does not keep others waiting for their next token. Requests that
/// have waited longest go first, and a step that is longer by itself runs as the only one of its kind.
///
/// ```
/// use firesteel_checkpoint::Checkpoint;
/// use firesteel_engine::{CpuBatch, CpuModel, KvFormat};
/// use firesteel_generate::*;
/// use firesteel_step::SequenceId;
/// use std::{ops::ControlFlow, path::Path, sync::Arc};
///
/// struct Printer;
///
/// impl Observer for Printer {
///     fn event(&mut self, sequence: SequenceId, event: Event<'_>) -> ControlFlow<()> {
///         if let Event::Token { text, .. } | Event::Tail { text } = event {
///             println!("{sequence}: {text}");
///         }
///         ControlFlow::Continue(())
///     }
/// }
///
/// # let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/spark-tiny"));
/// let checkpoint = Arc::new(Checkpoint::open(folder)?);
/// let tokenizer = Tokenizer::open(folder)?;
/// let vocabulary = Vocabulary::new(checkpoint.config()).with_tokenizer(&tokenizer);
/// let model = CpuModel::new(Arc::clone(&checkpoint), None)?;
/// let mut batch = Batch::new(Box::new(CpuBatch::new(model, KvFormat::F16)));
/// let options = GenerateOptions { max_tokens: Some(8), ..GenerateOptions::default() };
/// for text in ["One night", "A good tool"] {
///     let prompt = tokenizer.encode(text, AddedTokens::Parse)?;
///     let sequence = batch.add(128)?;
///     batch.start(sequence, Request::new(&vocabulary, &prompt, &options)?)?;
/// }
/// while !batch.is_idle() {
///     for finished in batch.advance(&mut Printer) {
///         assert!(finished.outcome?.ids.len() <= 8);
///         batch.remove(finished.sequence);
///     }
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Batch<'a> {
    decoder: Box<dyn BatchDecoder + 'a>,
    rows: usize,
    prompt_cache: bool,
    /// The tokens in the caches of each sequence.
    tokens: BTreeMap<SequenceId, Vec<u32>>,
    /// In the order in which they joined.
    running: Vec<Running<'a>>,
    passes: u64,
}

/// A request on its sequence.
struct Running<'a> {
    sequence: SequenceId,
    request: Request<'a>,
    /// The pass that it was last part of, or the one before it joined.
    served: u64,
    /// Tokens of its next step, once that is planned; a step that has to wait is not planned anew.
    planned: Option<usize>,
}

/// A request that is over.
#[derive(Debug)]
pub struct Finished {
    /// The sequence it ran on, which is free for another.
    pub sequence: SequenceId,
    /// What it came to.
    pub outcome: Result<Generation, GenerateError>,
}

/// Tokens of each kind that a pass takes where nothing else is said.
const ROWS: usize = 64;

impl<'a> Batch<'a> {
    /// No request yet, on the sequences of `decoder`.
    pub fn new(decoder: Box<dyn BatchDecoder + 'a>) -> Self {
        Self {
            decoder,
            rows: ROWS,
            prompt_cache: false,
            tokens: BTreeMap::new(),
            running: Vec::new(),
            passes: 0,
        }
    }

    /// Takes `rows` tokens of prompts and as many generated ones in a pass, at least 1; 64 where
    /// nothing is said. Prompts are cut to that where the decoder splits freely.
    #[must_use]
    pub fn with_rows(mut self, rows: usize) -> Self {
        self.rows = rows.max(1);
        self
    }

    /// Keeps the caches of a sequence from one request to the next. Where a prompt begins as the
    /// sequence before it, at most its last token and what the decoder cannot have again is run
    /// anew. The decoder keeps copies of its sliding windows for that.
    #[must_use]
    pub fn with_prompt_cache(mut self) -> Self {
        self.prompt_cache = true;
        self
    }

    /// Adds a sequence with room for `context` tokens or more.
    ///
    /// # Errors
    /// When none of that context can be had.
    pub fn add(&mut self, context: usize) -> Result<SequenceId, GenerateError> {
        Ok(self.decoder.add(context)?)
    }

    /// Drops a sequence with its caches, and the request on it without a word.
    pub fn remove(&mut self, sequence: SequenceId) -> bool {
        self.running.retain(|running| running.sequence != sequence);
        self.tokens.remove(&sequence);
        self.decoder.remove(sequence)
    }

    /// A sequence, if it is there.
    pub fn sequence(&self, sequence: SequenceId) -> Option<&dyn Decoder> {
        self.decoder.sequence(sequence)
    }

    /// How many tokens of `prompt` a request on a free `sequence` would find in its caches at best;
    /// 0 where caches are not kept.
    pub fn shared(&self, sequence: SequenceId, prompt: &[u32]) -> usize {
        let tokens = self.tokens.get(&sequence).filter(|_| self.prompt_cache);
        let shared =
            |tokens: &Vec<u32>| tokens.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        tokens.map_or(0, shared)
    }

    /// Whether a request runs on `sequence`.
    pub fn is_running(&self, sequence: SequenceId) -> bool {
        self.running.iter().any(|running| running.sequence == sequence)
    }

    /// Whether no request runs.
    pub fn is_idle(&self) -> bool {
        self.running.is_empty()
    }

    /// Lets `request` join on a free sequence; the next pass may be its first.
    ///
    /// # Errors
    /// When there is no such sequence or it is not free, its vocabulary is another than the
    /// request's, or the prompt is longer than its context or has an id without an embedding.
    pub fn start(
        &mut self,
        sequence: SequenceId,
        mut request: Request<'a>,
    ) -> Result<(), GenerateError> {
        if self.is_running(sequence) {
            return Err(GenerateError::Busy { sequence });
        }
        let Some(decoder) = self.decoder.sequence_mut(sequence) else {
            return Err(RunnerError::NoSequence { sequence }.into());
        };
        request.check(decoder)?;
        let tokens = self.tokens.entry(sequence).or_default();
        request.begin(&mut Track { decoder, tokens, prompt_cache: self.prompt_cache });
        let served = self.passes;
        self.running.push(Running { sequence, request, served, planned: None });
        Ok(())
    }

    /// Ends the request on `sequence` and returns what it has made; `None` if there is none. What it
    /// has run stays in the caches.
    pub fn cancel(&mut self, sequence: SequenceId) -> Option<Generation> {
        let index = self.running.iter().position(|running| running.sequence == sequence)?;
        Some(self.running.remove(index).request.finish(StopReason::Cancelled, None))
    }

    /// Runs one pass: the next steps of as many requests as it takes. `observer` is told what
    /// happens; the requests that are over then are returned. Without a request nothing is done.
    pub fn advance(&mut self, observer: &mut dyn Observer) -> Vec<Finished> {
        let start = Instant::now();
        self.passes += 1;
        self.plan();
        let mut chosen: Vec<&mut Running<'a>> =
            self.running.iter_mut().filter(|running| running.served == self.passes).collect();
        let mut parts: Vec<BatchPart<'_>> =
            chosen.iter_mut().map(|running| running.request.part(running.sequence)).collect();
        let results = self.decoder.forward(&mut parts);
        let time = start.elapsed();
        let mut results = results.into_iter();
        let mut ended = BTreeMap::new();
        for running in chosen {
            running.planned = None;
            let sequence = running.sequence;
            let told = &mut Told { sequence, observer };
            let outcome = match (results.next(), self.decoder.sequence_mut(sequence)) {
                (Some(Ok(())), Some(decoder)) => {
                    let tokens = self.tokens.entry(sequence).or_default();
                    let track = &mut Track { decoder, tokens, prompt_cache: self.prompt_cache };
                    running.request.take(track, time, told)
                }
                (Some(Err(error)), _) => Err(error.into()),
                (_, _) => Err(RunnerError::NoSequence { sequence }.into()),
            };
            if let Some(outcome) = outcome.transpose() {
                ended.insert(sequence, outcome);
            }
        }
        let mut finished = Vec::with_capacity(ended.len());
        let over = |running: &mut Running<'a>| ended.contains_key(&running.sequence);
        for Running { sequence, request, .. } in
            self.running.extract_if(.., over).collect::<Vec<_>>()
        {
            if let Some(outcome) = ended.remove(&sequence) {
                let told = &mut Told { sequence, observer };
                let outcome = outcome.map(|stop| request.finish(stop, Some(told)));
                finished.push(Finished { sequence, outcome });
            }
        }
        finished
    }

    /// Chooses who is part of this pass.
    fn plan(&mut self) {
        let mut waiting: Vec<&mut Running<'a>> = self.running.iter_mut().collect();
        waiting.sort_by_key(|running| running.served);
        let (mut prompts, mut generated) = (0usize, 0usize);
        for running in waiting {
            let taken = if running.request.in_prompt() { &mut prompts } else { &mut generated };
            // A step has one token at least, so none has to be planned to know that it does not fit.
            if *taken > 0 && *taken >= self.rows {
                continue;
            }
            let tokens = match (running.planned, self.decoder.sequence(running.sequence)) {
                (Some(tokens), _) => tokens,
                (None, Some(decoder)) => {
                    running.request.plan(decoder, self.prompt_cache, self.rows)
                }
                (None, None) => 1,
            };
            running.planned = Some(tokens);
            if *taken == 0 || taken.saturating_add(tokens) <= self.rows {
                *taken = taken.saturating_add(tokens);
                running.served = self.passes;
            }
        }
    }
}
