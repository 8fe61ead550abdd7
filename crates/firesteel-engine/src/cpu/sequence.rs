//! Sequences with caches of their own, one or several in a forward.

use super::cache::{BLOCK, Geometry, KvFormat, LayerCache};
use super::forward::{Forward, Part};
use super::{CpuModel, NAME, failed};
use crate::{EngineError, embedding, fit};
use firesteel_checkpoint::{LayerKind, ModelConfig};
use firesteel_kernels::Segment;
use firesteel_step::{
    CacheLayoutChoice, Decoder, MARKS, RunnerError, StepError, StepOptions, StepSpec, Wanted,
    rope_tables,
};
use firesteel_tensor::Buffer;
use std::ops::Range;
use std::sync::{Arc, PoisonError};

/// Tokens of a prompt that one forward takes.
const CHUNK: usize = 64;

/// The caches of a [`CpuSequence`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequenceOptions {
    /// Tokens that fit.
    pub context: usize,
    /// How keys and values are stored.
    pub kv: KvFormat,
}

impl SequenceOptions {
    /// What a sequence of `config` with these options allocates; `None` when its heads do not fit
    /// the format, or the bytes cannot be counted.
    pub fn memory(self, config: &ModelConfig) -> Option<KvMemory> {
        let Self { context, kv } = self;
        kv.check(config).ok()?;
        let count = |kind| config.layer_types.iter().filter(|known| **known == kind).count();
        let slots = ring_slots(config.sliding_window, context, CHUNK);
        let seen = match config.sliding_window {
            Some(window) if slots < context => window.saturating_sub(1),
            _ => 0,
        };
        let sliding = |slots: usize| slots.checked_mul(count(LayerKind::Sliding));
        let entries = context.checked_mul(count(LayerKind::Full))?.checked_add(sliding(slots)?)?;
        let entry = Geometry::new(config, kv).entry();
        let bytes = |entries: usize| entries.checked_mul(entry)?.checked_mul(2);
        let marked = sliding(seen)?.checked_mul(MARKS)?;
        Some(KvMemory { caches: bytes(entries)?, marks: bytes(marked)? })
    }
}

/// Bytes that a [`CpuSequence`] allocates for keys and values. Pages that were never written are not
/// in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvMemory {
    /// The caches, allocated from the start. A full layer has room for the context, and a sliding
    /// one a ring with room for window − 1 entries and a forward of 64 tokens, rounded up to a
    /// multiple of 64, but not for more than the context. A forward of more tokens makes rings
    /// longer.
    pub caches: usize,
    /// [`MARKS`] marks of the whole window, which is the most that a conversation adds; 0 when the
    /// rings hold the context.
    pub marks: usize,
}

/// One sequence on a [`CpuModel`], with caches of its own.
///
/// A full layer holds the context, and a sliding layer a ring of min(context, window − 1) entries
/// and room for the tokens of a forward, which lie there until they are committed. [`KvMemory`] has
/// the bytes.
///
/// The logits of a token depend on the tokens before it and on the format of keys and values, and
/// on nothing else: the same bytes come out however the sequence is split into forwards, whatever
/// else is in the batch, and on any number of threads.
///
/// At most [`MARKS`] marks are kept; each costs as much as the windows. Without a mark a sequence can go
/// back as far as its rings have not been written over: to any position as long as a ring was never
/// full, else over a few of the last tokens.
pub struct CpuSequence {
    model: Arc<CpuModel>,
    geometry: Geometry,
    context: usize,
    window: Option<usize>,
    layers: Vec<(LayerKind, LayerCache)>,
    /// Slots of a ring.
    slots: usize,
    position: usize,
    pending: usize,
    /// All positions from this one to the present are in the rings.
    kept_from: usize,
    marks: Vec<Mark>,
    step: Step,
}

/// A position to come back to.
#[derive(Debug)]
struct Mark {
    position: usize,
    /// Of each sliding layer, what its tokens can see; empty if nothing can be written over.
    rings: Vec<[Buffer; 2]>,
}

/// What belongs to the forward that runs.
#[derive(Debug, Default)]
struct Step {
    tokens: usize,
    needed: Range<usize>,
    sliding: Kind,
    full: Kind,
}

/// What layers of one kind share.
#[derive(Debug, Default)]
struct Kind {
    cos: Vec<f32>,
    sin: Vec<f32>,
    visible: Vec<Range<usize>>,
}

/// One sequence of a batch.
pub struct BatchEntry<'a> {
    /// The sequence, of the same model as the others.
    pub sequence: &'a mut CpuSequence,
    /// Its next tokens, at least one.
    pub ids: &'a [u32],
    /// The logits that are wanted.
    pub wanted: Wanted,
    /// Becomes the wanted rows of logits, one after the other.
    pub logits: &'a mut Vec<f32>,
}

impl CpuModel {
    /// Runs the next tokens of several sequences in one pass over the weights. The tokens are
    /// pending then, as after [`Decoder::forward`], and each sequence commits its own. What a
    /// sequence gets does not depend on the others.
    ///
    /// # Errors
    /// As [`Decoder::forward`], and when a sequence is one of another model. Every sequence is as
    /// before then, and has nothing pending.
    pub fn forward_batch(&self, entries: &mut [BatchEntry<'_>]) -> Result<(), EngineError> {
        for entry in &mut *entries {
            entry.sequence.pending = 0;
            entry.logits.clear();
        }
        let mut rows = 0usize;
        for entry in &*entries {
            self.check_entry(entry)?;
            rows = rows.saturating_add(entry.ids.len());
        }
        fit::check_activations(self.checkpoint.config(), rows)?;
        for BatchEntry { sequence, ids, wanted, .. } in &mut *entries {
            sequence.begin(ids.len(), *wanted);
        }
        let mut scratch =
            std::mem::take(&mut *self.scratch.lock().unwrap_or_else(PoisonError::into_inner));
        let mut forward = Forward { model: self, scratch: &mut scratch };
        let result = forward.sequences(entries);
        *self.scratch.lock().unwrap_or_else(PoisonError::into_inner) = scratch;
        if result.is_err() {
            entries.iter_mut().for_each(|entry| entry.logits.clear());
            return result;
        }
        for BatchEntry { sequence, ids, .. } in entries {
            sequence.pending = ids.len();
        }
        Ok(())
    }

    fn check_entry(&self, entry: &BatchEntry<'_>) -> Result<(), EngineError> {
        let sequence = &*entry.sequence;
        if !std::ptr::eq(Arc::as_ptr(&sequence.model), self) {
            return Err(EngineError::OtherModel);
        }
        let (position, tokens, context) = (sequence.position, entry.ids.len(), sequence.context);
        if tokens == 0 {
            return Err(StepError::Option {
                what: "number of tokens",
                value: "0".into(),
                accepted: "a forward takes one or more".into(),
            }
            .into());
        }
        if tokens > context - position {
            return Err(StepError::ContextFull { position, tokens, context }.into());
        }
        Ok(())
    }
}

impl Forward<'_> {
    /// Runs sequences that have begun a step.
    fn sequences(&mut self, entries: &mut [BatchEntry<'_>]) -> Result<(), EngineError> {
        let model = self.model;
        let config = model.checkpoint.config();
        let hidden = &mut self.scratch.hidden;
        hidden.clear();
        for entry in &*entries {
            let start = hidden.len();
            hidden.resize(start + entry.ids.len() * config.hidden_size, 0.0);
            embedding::lookup(&model.checkpoint, entry.ids, &mut hidden[start..])?;
        }
        let mut parts: Vec<&mut CpuSequence> =
            entries.iter_mut().map(|entry| &mut *entry.sequence).collect();
        for index in 0..model.layers.len() {
            self.layer(index, &mut parts)?;
        }
        let needed: Vec<usize> = parts.iter().map(|part| part.needed().len()).collect();
        let rows = needed.iter().sum();
        if rows == 0 {
            return Ok(());
        }
        if let [entry] = entries {
            self.head(0..rows, entry.logits)?;
            return check_logits(entry.logits);
        }
        let mut logits = std::mem::take(&mut self.scratch.logits);
        let result = self.head(0..rows, &mut logits).and_then(|()| check_logits(&logits));
        let mut rows = logits.chunks_exact(config.vocab_size);
        for (entry, count) in entries.iter_mut().zip(needed) {
            rows.by_ref().take(count).for_each(|row| entry.logits.extend_from_slice(row));
        }
        self.scratch.logits = logits;
        result
    }
}

fn check_logits(logits: &[f32]) -> Result<(), EngineError> {
    match logits.iter().position(|value| !value.is_finite()) {
        Some(index) => Err(StepError::NonFinite { name: "logits".into(), index }.into()),
        None => Ok(()),
    }
}

impl CpuSequence {
    pub(super) fn new(model: Arc<CpuModel>, options: SequenceOptions) -> Result<Self, EngineError> {
        let config = model.checkpoint.config();
        let SequenceOptions { context, kv } = options;
        kv.check(config)?;
        // The contract's limits for the context, and what the layers hold.
        let options = StepOptions {
            cache_layout: CacheLayoutChoice::Ring,
            ..StepOptions::decode(config, context)
        };
        let spec = StepSpec::new(config, &options)?;
        let geometry = Geometry::new(config, kv);
        let slots = ring_slots(spec.sliding_window, context, CHUNK);
        let layers = spec.layers.iter().map(|layer| {
            let cache = match layer.kind {
                LayerKind::Sliding => LayerCache::ring(geometry, slots),
                LayerKind::Full => LayerCache::full(geometry, context),
            };
            (layer.kind, cache)
        });
        Ok(Self {
            layers: layers.collect(),
            geometry,
            context,
            window: spec.sliding_window,
            slots,
            position: 0,
            pending: 0,
            kept_from: 0,
            marks: Vec::new(),
            step: Step::default(),
            model,
        })
    }

    /// The model that runs it.
    pub fn model(&self) -> &Arc<CpuModel> {
        &self.model
    }

    /// How keys and values are stored.
    pub fn kv_format(&self) -> KvFormat {
        self.geometry.format
    }

    /// Bytes of keys and values that a token at `position` attends to, its own included.
    pub fn bytes_seen(&self, position: usize) -> usize {
        let sliding = self.window.unwrap_or(usize::MAX).min(position + 1);
        let entries = self.layers.iter().map(|(kind, _)| match kind {
            LayerKind::Sliding => sliding,
            LayerKind::Full => position + 1,
        });
        2 * self.geometry.entry() * entries.sum::<usize>()
    }

    /// For measurements: makes it a sequence of `position` tokens whose keys and values are small
    /// arbitrary numbers, at the cost of writing them.
    ///
    /// # Errors
    /// When the context is smaller.
    pub fn fill(&mut self, position: usize) -> Result<(), EngineError> {
        self.clear();
        let context = self.context;
        if position > context {
            return Err(StepError::ContextFull { position: 0, tokens: position, context }.into());
        }
        let visible_from = position.saturating_sub(self.reach());
        let mut state = 1u32;
        let mut entry = vec![0.0; 2 * self.geometry.heads * self.geometry.head_dim];
        for (kind, cache) in &mut self.layers {
            let first = if *kind == LayerKind::Sliding { visible_from } else { 0 };
            for position in first..position {
                for value in &mut entry {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    *value = (state >> 8) as f32 / (1 << 24) as f32 - 0.5;
                }
                let (keys, values) = entry.split_at(entry.len() / 2);
                cache.store(position, keys, values)?;
            }
        }
        self.position = position;
        if self.window.is_some() {
            self.kept_from = visible_from;
        }
        Ok(())
    }

    /// Earlier entries that a token of a sliding layer sees.
    fn reach(&self) -> usize {
        self.window.map_or(0, |window| window - 1)
    }

    /// Prepares for a forward of `tokens` tokens, which fit.
    fn begin(&mut self, tokens: usize, wanted: Wanted) {
        let slots = ring_slots(self.window, self.context, tokens);
        if slots > self.slots {
            // Only what can still be seen is worth keeping.
            self.kept_from = self.kept_from.max(self.position.saturating_sub(self.reach()));
            let kept = self.kept_from..self.position;
            for (kind, cache) in &mut self.layers {
                if *kind == LayerKind::Sliding {
                    let entries = cache.read(kept.clone());
                    *cache = LayerCache::ring(self.geometry, slots);
                    cache.write(kept.start, &entries);
                }
            }
            self.slots = slots;
        }
        let (start, end) = (self.position, self.position + tokens);
        if self.window.is_some() {
            self.kept_from = self.kept_from.max(end.saturating_sub(self.slots));
        }
        let config = self.model.checkpoint.config();
        let kind = |kind| Kind::new(config, kind, self.window, start..end);
        self.step = Step {
            tokens,
            needed: match wanted {
                Wanted::Nothing => tokens..tokens,
                Wanted::Last => tokens - 1..tokens,
                Wanted::All => 0..tokens,
            },
            sliding: kind(LayerKind::Sliding),
            full: kind(LayerKind::Full),
        };
    }

    /// The last position up to `position` that needs no mark.
    fn reachable(&self, position: usize) -> Option<usize> {
        let position = position.min(self.position);
        let seen_from = position.saturating_sub(self.reach());
        (self.kept_from <= seen_from || position == self.position).then_some(position)
    }
}

impl Kind {
    fn new(
        config: &ModelConfig,
        kind: LayerKind,
        window: Option<usize>,
        positions: Range<usize>,
    ) -> Self {
        let (rope, window) = match kind {
            LayerKind::Sliding => (config.rope_sliding, window.unwrap_or(usize::MAX)),
            LayerKind::Full => (config.rope_full, usize::MAX),
        };
        let Some(rope) = rope else { return Self::default() };
        let (cos, sin) = rope_tables(rope, positions.start, positions.len());
        let visible = positions.map(|position| {
            let end = position + 1;
            end.saturating_sub(window)..end
        });
        Self { cos, sin, visible: visible.collect() }
    }
}

/// Slots of a ring with room for what a token sees before it and for `tokens` new ones.
fn ring_slots(window: Option<usize>, context: usize, tokens: usize) -> usize {
    let Some(window) = window else { return 0 };
    let needed = window.saturating_sub(1).saturating_add(tokens);
    needed.checked_next_multiple_of(BLOCK).unwrap_or(needed).min(context)
}

impl Step {
    fn kind(&self, kind: LayerKind) -> &Kind {
        match kind {
            LayerKind::Sliding => &self.sliding,
            LayerKind::Full => &self.full,
        }
    }
}

impl Part for &mut CpuSequence {
    fn tokens(&self) -> usize {
        self.step.tokens
    }

    fn needed(&self) -> Range<usize> {
        self.step.needed.clone()
    }

    fn rotary(&self, kind: LayerKind) -> (&[f32], &[f32]) {
        let kind = self.step.kind(kind);
        (&kind.cos, &kind.sin)
    }

    fn store(
        &mut self,
        layer: usize,
        token: usize,
        keys: &[f32],
        values: &[f32],
    ) -> Result<(), EngineError> {
        let position = self.position + token;
        let format = self.geometry.format;
        let Some((_, cache)) = self.layers.get_mut(layer) else { return Ok(()) };
        if cache.store(position, keys, values)? {
            return Ok(());
        }
        Err(EngineError::KeyValueRange { layer, position, format })
    }

    fn segments(&self, layer: usize) -> Result<Vec<Segment<'_>>, EngineError> {
        let Some((kind, cache)) = self.layers.get(layer) else { return Ok(Vec::new()) };
        let visible = &self.step.kind(*kind).visible;
        let start = visible.first().map_or(0, |range| range.start);
        Ok(cache.segments(start..self.position + self.step.tokens))
    }

    fn visible(&self, kind: LayerKind) -> &[Range<usize>] {
        &self.step.kind(kind).visible
    }
}

impl Decoder for CpuSequence {
    fn name(&self) -> &str {
        NAME
    }

    fn settings(&self) -> Vec<(String, String)> {
        let mut settings = self.model.settings();
        settings.push(("kv".into(), self.geometry.format.name().into()));
        settings
    }

    fn vocab_size(&self) -> usize {
        self.model.checkpoint.config().vocab_size
    }

    fn embedding_rows(&self) -> usize {
        self.model.checkpoint.config().vocab_size
    }

    fn context(&self) -> usize {
        self.context
    }

    fn position(&self) -> usize {
        self.position
    }

    /// Bytes of the buffers that are allocated now, those of the marks included.
    fn cache_bytes(&self) -> usize {
        let caches = self.layers.iter().map(|(_, cache)| cache.bytes());
        let marks = self.marks.iter().flat_map(|mark| mark.rings.iter().flatten());
        caches.sum::<usize>() + marks.map(Buffer::len).sum::<usize>()
    }

    fn chunk(&self, left: usize) -> usize {
        left.min(CHUNK)
    }

    fn splits_freely(&self) -> bool {
        true
    }

    fn gives_all_logits(&self, _: usize) -> bool {
        true
    }

    fn forward(
        &mut self,
        ids: &[u32],
        wanted: Wanted,
        logits: &mut Vec<f32>,
    ) -> Result<(), RunnerError> {
        let model = Arc::clone(&self.model);
        let entry = BatchEntry { sequence: self, ids, wanted, logits };
        model.forward_batch(&mut [entry]).map_err(failed)
    }

    fn commit(&mut self, tokens: usize) -> Result<(), RunnerError> {
        if tokens > self.pending {
            return Err(StepError::Option {
                what: "number of tokens to keep",
                value: tokens.to_string(),
                accepted: format!("{} are pending", self.pending),
            }
            .into());
        }
        self.position += tokens;
        self.pending = 0;
        Ok(())
    }

    fn clear(&mut self) {
        self.position = 0;
        self.pending = 0;
        self.kept_from = 0;
        self.marks.clear();
    }

    fn mark(&mut self) {
        self.marks.retain(|mark| mark.position != self.position);
        if self.marks.len() == MARKS {
            self.marks.remove(0);
        }
        // A ring that holds the whole context is never written over.
        let seen_from = match self.slots == self.context {
            true => self.position,
            false => self.position.saturating_sub(self.reach()),
        };
        let sliding = self.layers.iter().filter(|(kind, _)| *kind == LayerKind::Sliding);
        let rings = sliding.map(|(_, cache)| cache.read(seen_from..self.position)).collect();
        self.marks.push(Mark { position: self.position, rings });
    }

    fn rewind(&mut self, position: usize) -> usize {
        self.pending = 0;
        if let Some(position) = self.reachable(position) {
            self.position = position;
        } else if let Some(mark) = self
            .marks
            .iter()
            .filter(|mark| mark.position <= position)
            .max_by_key(|mark| mark.position)
        {
            self.position = mark.position;
            self.kept_from = mark.position.saturating_sub(self.reach());
            let sliding = self.layers.iter_mut().filter(|(kind, _)| *kind == LayerKind::Sliding);
            for ((_, cache), entries) in sliding.zip(&mark.rings) {
                cache.write(self.kept_from, entries);
            }
        } else {
            self.clear();
        }
        let position = self.position;
        self.marks.retain(|mark| mark.position <= position);
        position
    }
}
