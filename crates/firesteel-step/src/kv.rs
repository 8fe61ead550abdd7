use crate::{
    CacheLayout, LayerSpec, MARKS, Role, StepError, StepInputs, StepOutputs, StepSpec, rope_tables,
};
use firesteel_checkpoint::LayerKind;
use firesteel_tensor::{Buffer, DType, Tensor, TensorView};
use std::collections::VecDeque;
use std::ops::Range;

/// The KV caches of one sequence, between steps.
///
/// A step is prepared, run, and committed; a commit checks every output before it writes anything,
/// and each prepared step commits at most once. Steps of different T may follow each other as long
/// as their caches are laid out alike.
///
/// A sequence can go back. A full layer keeps every entry, so it only has to forget the later
/// ones; what a sliding layer has overwritten comes from a copy that [`mark`](Self::mark) took.
#[derive(Debug, Clone)]
pub struct KvState {
    geometry: Geometry,
    caches: Vec<LayerCache>,
    position: usize,
    epoch: u64,
    /// In order of their positions.
    marks: VecDeque<Mark>,
}

/// The sliding layers' caches at a position, one a layer; empty for full layers.
#[derive(Debug, Clone)]
struct Mark {
    position: usize,
    caches: Vec<LayerCache>,
}

/// What two steps must share to use the same caches.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Geometry {
    context: usize,
    key_value_heads: usize,
    head_dim: usize,
    window: Option<usize>,
    dtype: DType,
    layers: Vec<LayerSpec>,
}

#[derive(Debug, Clone)]
struct LayerCache {
    keys: Buffer,
    values: Buffer,
}

/// A step whose small inputs are made; see [`KvState::prepare`].
#[derive(Debug)]
pub struct PreparedStep {
    position: usize,
    tokens: usize,
    epoch: u64,
    /// One an input of the spec; `None` where the cache itself is the input.
    tensors: Vec<Option<Tensor>>,
}

impl PreparedStep {
    /// Position of the step's first token.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Tokens of the step.
    pub fn tokens(&self) -> usize {
        self.tokens
    }
}

impl Geometry {
    fn of(spec: &StepSpec) -> Self {
        Self {
            context: spec.context,
            key_value_heads: spec.num_key_value_heads,
            head_dim: spec.head_dim,
            window: spec.sliding_window,
            dtype: spec.dtype,
            layers: spec.layers.clone(),
        }
    }

    /// Bytes of one head's entry.
    fn row(&self) -> usize {
        self.head_dim * self.dtype.size()
    }

    /// Entries in the cache of a sliding layer, which is the same for all of them.
    fn sliding_length(&self) -> Option<usize> {
        let sliding = self.layers.iter().find(|layer| layer.kind == LayerKind::Sliding);
        sliding.map(|layer| layer.cache_length)
    }
}

impl KvState {
    /// Empty caches for steps laid out as `spec`.
    ///
    /// # Errors
    /// When a cache's size overflows.
    pub fn new(spec: &StepSpec) -> Result<Self, StepError> {
        let geometry = Geometry::of(spec);
        let mut caches = Vec::with_capacity(geometry.layers.len());
        for layer in &geometry.layers {
            let shape = vec![geometry.key_value_heads, layer.cache_length, geometry.head_dim];
            let bytes = geometry
                .dtype
                .byte_count(&shape)
                .ok_or(firesteel_tensor::TensorError::TooLarge { shape, dtype: geometry.dtype })?;
            caches.push(LayerCache { keys: Buffer::zeroed(bytes), values: Buffer::zeroed(bytes) });
        }
        Ok(Self { geometry, caches, position: 0, epoch: 0, marks: VecDeque::new() })
    }

    /// Tokens in the cache; the position of the next token.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Tokens that fit.
    pub fn context(&self) -> usize {
        self.geometry.context
    }

    /// Bytes of all caches.
    pub fn bytes(&self) -> usize {
        self.caches.iter().map(|cache| cache.keys.len() + cache.values.len()).sum()
    }

    /// Forgets the sequence and its marks. Steps prepared before cannot be committed any more.
    pub fn clear(&mut self) {
        for cache in &mut self.caches {
            cache.keys.bytes_mut().fill(0);
            cache.values.bytes_mut().fill(0);
        }
        self.marks.clear();
        self.position = 0;
        self.epoch += 1;
    }

    /// Remembers the present position for [`rewind`](Self::rewind): copies the caches of the
    /// sliding layers. [`MARKS`] are kept; the oldest makes room for a new one.
    pub fn mark(&mut self) {
        let known = self.marks.back().is_some_and(|mark| mark.position == self.position);
        if known || self.geometry.sliding_length().is_none() {
            return;
        }
        if self.marks.len() == MARKS {
            self.marks.pop_front();
        }
        let layers = self.geometry.layers.iter().zip(&self.caches);
        let caches = layers.map(|(layer, cache)| match layer.kind {
            LayerKind::Sliding => cache.clone(),
            LayerKind::Full => LayerCache { keys: Buffer::zeroed(0), values: Buffer::zeroed(0) },
        });
        self.marks.push_back(Mark { position: self.position, caches: caches.collect() });
    }

    /// Goes back to the last position that can be had again and is at most `position`, and tells
    /// it: any position without sliding layers; with them one whose window is in the caches and
    /// the marks together, among which are 0, the present one and the marks. Later marks are
    /// dropped, and steps prepared before cannot be committed any more.
    pub fn rewind(&mut self, position: usize) -> usize {
        let target = match self.geometry.sliding_length() {
            _ if position >= self.position => self.position,
            Some(length) => self.reachable(position, length),
            None => position,
        };
        if target == 0 {
            self.clear();
        } else if target < self.position {
            self.restore(target);
        }
        self.epoch += 1;
        self.position
    }

    /// The last position up to `position` before which the sliding layers' `length` entries, or
    /// all there are, can be had; at least 0.
    fn reachable(&self, position: usize, length: usize) -> usize {
        let mut best = 0;
        // Entries that are held without a gap.
        let mut held = 0..0;
        for end in self.marks.iter().map(|mark| mark.position).chain([self.position]) {
            let start = end.saturating_sub(length);
            held = if start <= held.end { held.start..end } else { start..end };
            let candidate = position.min(end);
            if held.start == 0 || candidate >= held.start + length {
                best = best.max(candidate);
            }
        }
        best
    }

    /// Makes the caches those of `position`, which is [reachable](Self::reachable).
    fn restore(&mut self, position: usize) {
        let marks = self.marks.iter().map(|mark| (mark.position, &mark.caches));
        let sources: Vec<(usize, &Vec<LayerCache>)> =
            marks.chain([(self.position, &self.caches)]).collect();
        let mut restored = Vec::new();
        for (i, &layer) in self.geometry.layers.iter().enumerate() {
            if layer.kind == LayerKind::Full {
                continue;
            }
            let mut to = LayerCache {
                keys: Buffer::zeroed(self.caches[i].keys.len()),
                values: Buffer::zeroed(self.caches[i].values.len()),
            };
            for p in position.saturating_sub(layer.cache_length)..position {
                let holds = |end: usize| p < end && end <= p + layer.cache_length;
                let Some((end, from)) = sources.iter().find(|(end, _)| holds(*end)) else {
                    continue;
                };
                let slots = (layer.slot(p, *end), layer.slot(p, position));
                self.geometry.copy_entry(layer, slots, &from[i].keys, &mut to.keys);
                self.geometry.copy_entry(layer, slots, &from[i].values, &mut to.values);
            }
            restored.push((i, to));
        }
        for (i, cache) in restored {
            self.caches[i] = cache;
        }
        self.marks.retain(|mark| mark.position <= position);
        self.position = position;
    }

    /// Makes the small inputs of the next step from `x`, the `[T, H]` embeddings of its tokens:
    /// embeddings, rotary tables and masks in the step's element type.
    ///
    /// # Errors
    /// When the spec is laid out otherwise, the step does not fit in the context, `x` has another
    /// length or a value that the element type cannot hold.
    pub fn prepare(&self, spec: &StepSpec, x: &[f32]) -> Result<PreparedStep, StepError> {
        self.check_layout(spec)?;
        let tokens = spec.tokens;
        match self.position.checked_add(tokens) {
            Some(end) if end <= self.geometry.context => {}
            _ => {
                return Err(StepError::ContextFull {
                    position: self.position,
                    tokens,
                    context: self.geometry.context,
                });
            }
        }
        let mut tensors = Vec::with_capacity(spec.inputs.len());
        for input in &spec.inputs {
            let values = match input.role {
                Role::Embedding => x.to_vec(),
                Role::Cos(kind) => self.rotary(spec, kind).0,
                Role::Sin(kind) => self.rotary(spec, kind).1,
                Role::Mask(kind) => self.mask(spec, kind),
                _ => {
                    tensors.push(None);
                    continue;
                }
            };
            let tensor = Tensor::from_f32_as(input.dtype, input.shape.clone(), values)?;
            if let Some(index) = tensor.view().first_non_finite() {
                return Err(StepError::NonFinite { name: input.name.clone(), index });
            }
            tensors.push(Some(tensor));
        }
        Ok(PreparedStep { position: self.position, tokens, epoch: self.epoch, tensors })
    }

    /// The inputs of a prepared step: its own tensors and the caches.
    ///
    /// # Errors
    /// When the step was prepared for another spec or another state of the cache.
    pub fn inputs<'a>(
        &'a self,
        spec: &'a StepSpec,
        step: &'a PreparedStep,
    ) -> Result<StepInputs<'a>, StepError> {
        self.check_layout(spec)?;
        self.check_fresh(step)?;
        if step.tensors.len() != spec.inputs.len() {
            return Err(StepError::Count {
                what: "inputs",
                expected: spec.inputs.len(),
                actual: step.tensors.len(),
            });
        }
        let mut views = Vec::with_capacity(spec.inputs.len());
        for (input, tensor) in spec.inputs.iter().zip(&step.tensors) {
            let cache = match (tensor, input.role) {
                (Some(tensor), _) => {
                    views.push(tensor.view());
                    continue;
                }
                (None, Role::KeyCache(i)) => self.caches.get(i).map(|cache| &cache.keys),
                (None, Role::ValueCache(i)) => self.caches.get(i).map(|cache| &cache.values),
                _ => None,
            };
            let bytes = cache.map_or(&[][..], Buffer::bytes);
            views.push(TensorView::new(input.dtype, &input.shape, bytes)?);
        }
        StepInputs::new(spec, views)
    }

    /// Writes the new entries of `outputs` and moves on by the step's tokens. Every output is
    /// checked first: on an error nothing was written and the same state can go on.
    ///
    /// # Errors
    /// When the step is stale, an output has the wrong shape or type, or a value is not finite.
    pub fn commit(
        &mut self,
        spec: &StepSpec,
        step: PreparedStep,
        outputs: &StepOutputs,
    ) -> Result<(), StepError> {
        let tokens = step.tokens;
        self.commit_first(spec, step, outputs, tokens)
    }

    /// As [`commit`](Self::commit), but keeps only the first `tokens` tokens of the step, as if the
    /// others had never been run.
    ///
    /// # Errors
    /// Those of a commit, and when the step has fewer tokens, or more than a rolled layer's window,
    /// which then has already dropped what it held before them.
    pub fn commit_first(
        &mut self,
        spec: &StepSpec,
        step: PreparedStep,
        outputs: &StepOutputs,
        tokens: usize,
    ) -> Result<(), StepError> {
        self.check(spec, &step, outputs)?;
        self.write(spec, step, outputs, tokens)
    }

    /// Checks what a commit of `outputs` needs.
    pub(crate) fn check(
        &self,
        spec: &StepSpec,
        step: &PreparedStep,
        outputs: &StepOutputs,
    ) -> Result<(), StepError> {
        self.check_layout(spec)?;
        self.check_fresh(step)?;
        if step.tokens != spec.tokens {
            return Err(incompatible("tokens", &spec.tokens, &step.tokens));
        }
        spec.check_tensors("outputs", &spec.outputs, outputs.tensors().iter().map(Tensor::view))?;
        for (declared, tensor) in spec.outputs.iter().zip(outputs.tensors()) {
            if let Some(index) = tensor.view().first_non_finite() {
                return Err(StepError::NonFinite { name: declared.name.clone(), index });
            }
        }
        Ok(())
    }

    /// The part of a [commit](Self::commit_first) that follows the [check](Self::check).
    ///
    /// # Errors
    /// When the step is stale, or so many tokens of it cannot be kept; nothing was written then.
    pub(crate) fn write(
        &mut self,
        spec: &StepSpec,
        step: PreparedStep,
        outputs: &StepOutputs,
        tokens: usize,
    ) -> Result<(), StepError> {
        self.check_fresh(&step)?;
        let outrun = |layer: &LayerSpec| layer.rolls() && layer.cache_length < step.tokens;
        let whole = tokens == step.tokens;
        if tokens > step.tokens || (!whole && self.geometry.layers.iter().any(outrun)) {
            return Err(StepError::PartOfStep { kept: tokens, tokens: step.tokens });
        }
        for (declared, tensor) in spec.outputs.iter().zip(outputs.tensors()) {
            let (layer, cache) = match declared.role {
                Role::KeyNew(i) => (i, self.caches.get_mut(i).map(|cache| &mut cache.keys)),
                Role::ValueNew(i) => (i, self.caches.get_mut(i).map(|cache| &mut cache.values)),
                _ => continue,
            };
            let Some(cache) = cache else { continue };
            let layer = self.geometry.layers[layer];
            let (entries, position) = (tensor.bytes(), self.position);
            if !layer.rolls() {
                let range = position..position + tokens;
                write_entries(&self.geometry, layer, cache, entries, range);
            } else if whole {
                cache.bytes_mut().copy_from_slice(entries);
            } else {
                self.geometry.roll(layer, cache, entries, (step.tokens, tokens));
            }
        }
        self.position += tokens;
        self.epoch += 1;
        Ok(())
    }

    /// Starts the sequence from the keys and values of a prefill: one pair a layer, each
    /// `[1, KV, P, head_dim]` for positions 0 to P−1, keys already rotated. What was in the cache
    /// is forgotten. Everything is checked before anything is written.
    ///
    /// # Errors
    /// When a tensor has the wrong shape or type or is not finite, or P exceeds the context.
    pub fn seed(&mut self, history: &[(TensorView<'_>, TensorView<'_>)]) -> Result<(), StepError> {
        let geometry = &self.geometry;
        if history.len() != geometry.layers.len() {
            return Err(StepError::Count {
                what: "layers of history",
                expected: geometry.layers.len(),
                actual: history.len(),
            });
        }
        let length = history.first().and_then(|(k, _)| k.shape().get(2).copied()).unwrap_or(0);
        if length > geometry.context {
            return Err(StepError::ContextFull {
                position: 0,
                tokens: length,
                context: geometry.context,
            });
        }
        let expected = [1, geometry.key_value_heads, length, geometry.head_dim];
        for (i, (keys, values)) in history.iter().enumerate() {
            for (name, tensor) in [("keys", keys), ("values", values)] {
                let name = format!("{name} of layer {i}");
                if tensor.shape() != expected || tensor.dtype() != geometry.dtype {
                    return Err(StepError::Shape {
                        name,
                        expected_dtype: geometry.dtype,
                        expected: expected.to_vec(),
                        actual_dtype: tensor.dtype(),
                        actual: tensor.shape().to_vec(),
                    });
                }
                if let Some(index) = tensor.first_non_finite() {
                    return Err(StepError::NonFinite { name, index });
                }
            }
        }
        self.clear();
        for ((layer, cache), (keys, values)) in
            self.geometry.layers.iter().zip(&mut self.caches).zip(history)
        {
            write_entries(&self.geometry, *layer, &mut cache.keys, keys.bytes(), 0..length);
            write_entries(&self.geometry, *layer, &mut cache.values, values.bytes(), 0..length);
        }
        self.position = length;
        Ok(())
    }

    fn check_layout(&self, spec: &StepSpec) -> Result<(), StepError> {
        let (step, cache) = (Geometry::of(spec), &self.geometry);
        if step == *cache {
            return Ok(());
        }
        let differing = [
            ("context", step.context.to_string(), cache.context.to_string()),
            (
                "key/value heads",
                step.key_value_heads.to_string(),
                cache.key_value_heads.to_string(),
            ),
            ("head_dim", step.head_dim.to_string(), cache.head_dim.to_string()),
            ("sliding window", format!("{:?}", step.window), format!("{:?}", cache.window)),
            ("element type", step.dtype.to_string(), cache.dtype.to_string()),
            ("layers", format!("{:?}", step.layers), format!("{:?}", cache.layers)),
        ];
        let first = differing.into_iter().find(|(_, step, cache)| step != cache);
        let (what, step, cache) = first.unwrap_or_default();
        Err(StepError::Incompatible { what, step, cache })
    }

    fn check_fresh(&self, step: &PreparedStep) -> Result<(), StepError> {
        if step.epoch != self.epoch || step.position != self.position {
            return Err(StepError::Stale { prepared: step.position, current: self.position });
        }
        Ok(())
    }

    fn rotary(&self, spec: &StepSpec, kind: LayerKind) -> (Vec<f32>, Vec<f32>) {
        spec.rope(kind)
            .map(|rope| rope_tables(rope, self.position, spec.tokens))
            .unwrap_or_default()
    }

    /// Row t of the mask is 0 for the keys that token t sees: written cache entries and the
    /// step's own keys up to t, both within the window of a sliding layer.
    fn mask(&self, spec: &StepSpec, kind: LayerKind) -> Vec<f32> {
        let Some(layer) = spec.first_of(kind) else { return Vec::new() };
        let cached = (spec.dropped_entries(layer)..layer.cache_length)
            .map(|slot| self.position_in_slot(layer, slot));
        let new = (0..spec.tokens).map(|t| Some(self.position + t));
        let keys: Vec<Option<usize>> = cached.chain(new).collect();
        let window = match kind {
            LayerKind::Sliding => self.geometry.window.unwrap_or(usize::MAX),
            LayerKind::Full => usize::MAX,
        };
        let mut mask = Vec::with_capacity(spec.tokens * keys.len());
        for query in self.position..self.position + spec.tokens {
            mask.extend(keys.iter().map(|key| match key {
                Some(key) if *key <= query && query - key < window => 0.0,
                _ => spec.mask_value,
            }));
        }
        mask
    }

    /// Position of the entry in a cache slot; `None` while it is unwritten.
    fn position_in_slot(&self, layer: &LayerSpec, slot: usize) -> Option<usize> {
        let length = layer.cache_length;
        match (layer.kind, layer.layout) {
            // The last position below the current one that falls on this slot.
            (LayerKind::Sliding, CacheLayout::Ring) => {
                let last = self.position.checked_sub(slot + 1)?;
                Some(slot + last / length * length)
            }
            // Oldest first, the newest at the end.
            (LayerKind::Sliding, CacheLayout::Roll) => (self.position + slot).checked_sub(length),
            (LayerKind::Full, _) => (slot < self.position).then_some(slot),
        }
    }
}

impl LayerSpec {
    /// Whether the layer returns its whole window.
    fn rolls(&self) -> bool {
        self.kind == LayerKind::Sliding && self.layout == CacheLayout::Roll
    }

    /// Where a cache that is filled up to position `end` holds the entry of `position`.
    fn slot(&self, position: usize, end: usize) -> usize {
        match (self.kind, self.layout) {
            (LayerKind::Sliding, CacheLayout::Ring) => position % self.cache_length,
            (LayerKind::Sliding, CacheLayout::Roll) => position + self.cache_length - end,
            (LayerKind::Full, _) => position,
        }
    }
}

impl Geometry {
    /// Copies the entry in a slot of `from`, all heads of it, to a slot of `to`.
    fn copy_entry(
        &self,
        layer: LayerSpec,
        (source, target): (usize, usize),
        from: &Buffer,
        to: &mut Buffer,
    ) {
        let row = self.row();
        for head in 0..self.key_value_heads {
            let [source, target] = [source, target].map(|s| (head * layer.cache_length + s) * row);
            to.bytes_mut()[target..target + row]
                .copy_from_slice(&from.bytes()[source..source + row]);
        }
    }

    /// Appends to a rolled cache the first `kept` of the `tokens` that end `window`, which is no
    /// shorter than `tokens` entries.
    fn roll(
        &self,
        layer: LayerSpec,
        cache: &mut Buffer,
        window: &[u8],
        (tokens, kept): (usize, usize),
    ) {
        let row = self.row();
        let [all, tokens, kept] = [layer.cache_length, tokens, kept].map(|entries| entries * row);
        for (cache, window) in cache.bytes_mut().chunks_mut(all).zip(window.chunks(all)) {
            cache.copy_within(kept.., 0);
            let first = all - tokens;
            cache[all - kept..].copy_from_slice(&window[first..first + kept]);
        }
    }
}

/// Writes the first of the entries `[KV, n, head_dim]`, those for `positions`, where the layout
/// wants them; of more entries than the cache holds only the last ones.
fn write_entries(
    geometry: &Geometry,
    layer: LayerSpec,
    cache: &mut Buffer,
    entries: &[u8],
    positions: Range<usize>,
) {
    let row = geometry.row();
    let length = layer.cache_length;
    let count = entries.len() / (geometry.key_value_heads * row);
    let first = positions.start.max(positions.end.saturating_sub(length));
    for head in 0..geometry.key_value_heads {
        for position in first..positions.end {
            let slot = layer.slot(position, positions.end);
            let source = (head * count + position - positions.start) * row;
            let target = (head * length + slot) * row;
            cache.bytes_mut()[target..target + row].copy_from_slice(&entries[source..source + row]);
        }
    }
}

fn incompatible(what: &'static str, step: &usize, cache: &usize) -> StepError {
    StepError::Incompatible { what, step: step.to_string(), cache: cache.to_string() }
}
