use crate::{
    CacheLayout, LayerSpec, Role, StepError, StepInputs, StepOutputs, StepSpec, rope_tables,
};
use firesteel_checkpoint::LayerKind;
use firesteel_tensor::{Buffer, DType, Tensor, TensorView};

/// The KV caches of one sequence, between steps.
///
/// A step is prepared, run, and committed; a commit checks every output before it writes anything,
/// and each prepared step commits at most once. Steps of different T may follow each other as long
/// as their caches are laid out alike.
#[derive(Debug, Clone)]
pub struct KvState {
    geometry: Geometry,
    caches: Vec<LayerCache>,
    position: usize,
    epoch: u64,
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
        Ok(Self { geometry, caches, position: 0, epoch: 0 })
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

    /// Forgets the sequence. Steps prepared before cannot be committed any more.
    pub fn clear(&mut self) {
        for cache in &mut self.caches {
            cache.keys.bytes_mut().fill(0);
            cache.values.bytes_mut().fill(0);
        }
        self.position = 0;
        self.epoch += 1;
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
        self.check_layout(spec)?;
        self.check_fresh(&step)?;
        if step.tokens != spec.tokens {
            return Err(incompatible("tokens", &spec.tokens, &step.tokens));
        }
        spec.check_tensors("outputs", &spec.outputs, outputs.tensors().iter().map(Tensor::view))?;
        for (declared, tensor) in spec.outputs.iter().zip(outputs.tensors()) {
            if let Some(index) = tensor.view().first_non_finite() {
                return Err(StepError::NonFinite { name: declared.name.clone(), index });
            }
        }
        for (declared, tensor) in spec.outputs.iter().zip(outputs.tensors()) {
            let (layer, cache) = match declared.role {
                Role::KeyNew(i) => (i, self.caches.get_mut(i).map(|cache| &mut cache.keys)),
                Role::ValueNew(i) => (i, self.caches.get_mut(i).map(|cache| &mut cache.values)),
                _ => continue,
            };
            let Some(cache) = cache else { continue };
            let layer = self.geometry.layers[layer];
            if layer.kind == LayerKind::Sliding && layer.layout == CacheLayout::Roll {
                cache.bytes_mut().copy_from_slice(tensor.bytes());
            } else {
                write_entries(&self.geometry, layer, cache, tensor.bytes(), self.position);
            }
        }
        self.position += step.tokens;
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
            write_entries(&self.geometry, *layer, &mut cache.keys, keys.bytes(), 0);
            write_entries(&self.geometry, *layer, &mut cache.values, values.bytes(), 0);
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

/// Writes entries `[KV, n, head_dim]` for positions `first`, `first + 1`, … where the layout wants
/// them; of more entries than the cache holds only the last ones.
fn write_entries(
    geometry: &Geometry,
    layer: LayerSpec,
    cache: &mut Buffer,
    entries: &[u8],
    first: usize,
) {
    let row = geometry.row();
    let length = layer.cache_length;
    let count = entries.len() / (geometry.key_value_heads * row);
    let end = first + count;
    for head in 0..geometry.key_value_heads {
        for i in count.saturating_sub(length)..count {
            let position = first + i;
            let slot = match (layer.kind, layer.layout) {
                (LayerKind::Sliding, CacheLayout::Ring) => position % length,
                (LayerKind::Sliding, CacheLayout::Roll) => position + length - end,
                (LayerKind::Full, _) => position,
            };
            let source = (head * count + i) * row;
            let target = (head * length + slot) * row;
            cache.bytes_mut()[target..target + row].copy_from_slice(&entries[source..source + row]);
        }
    }
}

fn incompatible(what: &'static str, step: &usize, cache: &usize) -> StepError {
    StepError::Incompatible { what, step: step.to_string(), cache: cache.to_string() }
}
