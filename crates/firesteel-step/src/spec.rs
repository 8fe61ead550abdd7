use crate::StepError;
use firesteel_checkpoint::{LayerKind, ModelConfig, Rope};
use firesteel_tensor::{DType, TensorView};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// How a layer's cache is laid out and what the step returns for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CacheLayout {
    /// A sliding layer holds min(C, W−1) earlier entries in any order and returns only the new
    /// ones, which the host writes to slot position mod (W−1).
    Ring,
    /// A sliding layer holds the last min(C, W) entries oldest first, appends, drops the oldest
    /// and returns the whole window.
    Roll,
}

/// The layout asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CacheLayoutChoice {
    /// Ring for sliding layers, roll for full ones.
    #[default]
    Auto,
    /// Ring everywhere.
    Ring,
    /// Roll everywhere.
    Roll,
}

impl CacheLayoutChoice {
    /// The layout of a layer of `kind`. A full layer is the same under both: C entries in, the
    /// new ones out.
    pub fn layout(self, kind: LayerKind) -> CacheLayout {
        match (self, kind) {
            (Self::Ring, _) | (Self::Auto, LayerKind::Sliding) => CacheLayout::Ring,
            (Self::Roll, _) | (Self::Auto, LayerKind::Full) => CacheLayout::Roll,
        }
    }
}

/// What a step returns first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Logits {
    /// Logits of the last token, [1, V].
    #[default]
    Last,
    /// Logits of every token, [1, T, V].
    All,
    /// No head: the residual stream after the last layer of the slice, [1, T, H].
    Hidden,
}

/// What a tensor of the contract is. Layer numbers count within the exported slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "role", content = "of")]
pub enum Role {
    /// Token embeddings (or the hidden state that enters a slice), [1, T, H].
    Embedding,
    /// Cosines of one kind of layer, [1, 1, T, D].
    Cos(LayerKind),
    /// Sines of one kind of layer, [1, 1, T, D].
    Sin(LayerKind),
    /// Additive mask of one kind of layer, [1, 1, T, K].
    Mask(LayerKind),
    /// Keys of earlier tokens, [1, KV, len, head_dim].
    KeyCache(usize),
    /// Values of earlier tokens, [1, KV, len, head_dim].
    ValueCache(usize),
    /// Logits, [1, V] or [1, T, V].
    Logits,
    /// Residual stream after the last layer, [1, T, H].
    Hidden,
    /// New keys, or the rolled window, [1, KV, T or len, head_dim].
    KeyNew(usize),
    /// New values, or the rolled window, [1, KV, T or len, head_dim].
    ValueNew(usize),
    /// Residual stream after a layer, [T, H]; only on runners opened for checking.
    LayerHidden(usize),
}

/// One tensor of the contract.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorSpec {
    /// Name in the graph.
    pub name: String,
    /// Static shape.
    pub shape: Vec<usize>,
    /// Element type.
    pub dtype: DType,
    /// Meaning.
    #[serde(flatten)]
    pub role: Role,
}

/// One layer of the slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerSpec {
    /// Attention kind.
    pub kind: LayerKind,
    /// Cache layout.
    pub layout: CacheLayout,
    /// Entries in the cache input.
    pub cache_length: usize,
}

/// What to make a step of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepOptions {
    /// Tokens of a step.
    pub tokens: usize,
    /// Entries of a full layer's cache.
    pub context: usize,
    /// Layers, as a range over the model's layers.
    pub layers: Range<usize>,
    /// Cache layout.
    pub cache_layout: CacheLayoutChoice,
    /// First output.
    pub logits: Logits,
    /// Element type of every float input and output.
    pub dtype: DType,
}

impl StepOptions {
    /// A step of one token through all layers to the logits of that token, in f32, with `context`
    /// entries in the cache of a full layer and the default layout.
    ///
    /// ```
    /// # use firesteel_step::{CacheLayoutChoice, StepOptions};
    /// # let config = firesteel_checkpoint::preset("spark-x2.5-1.7b").unwrap();
    /// let ring =
    ///     StepOptions { cache_layout: CacheLayoutChoice::Ring, ..StepOptions::decode(&config, 4096) };
    /// # assert_eq!((ring.tokens, ring.layers), (1, 0..config.num_layers()));
    /// ```
    pub fn decode(config: &ModelConfig, context: usize) -> Self {
        Self {
            tokens: 1,
            context,
            layers: 0..config.num_layers(),
            cache_layout: CacheLayoutChoice::default(),
            logits: Logits::Last,
            dtype: DType::F32,
        }
    }
}

/// The contract of one step: geometry, and every input and output in order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepSpec {
    /// Tokens of a step (T).
    pub tokens: usize,
    /// Entries of a full layer's cache (C).
    pub context: usize,
    /// Width of the residual stream (H).
    pub hidden_size: usize,
    /// Rows of the head (V).
    pub vocab_size: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads (KV).
    pub num_key_value_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Tokens a sliding layer sees, the current one included (W).
    pub sliding_window: Option<usize>,
    /// Rotary embedding of sliding layers.
    pub rope_sliding: Option<Rope>,
    /// Rotary embedding of full layers.
    pub rope_full: Option<Rope>,
    /// Number of the first layer in the model.
    pub first_layer: usize,
    /// The layers of the slice.
    pub layers: Vec<LayerSpec>,
    /// First output.
    pub logits: Logits,
    /// Element type of float inputs and outputs.
    pub dtype: DType,
    /// What the host writes into a mask where a key must not be seen; 0 elsewhere.
    pub mask_value: f32,
    /// Inputs, in graph order.
    pub inputs: Vec<TensorSpec>,
    /// Outputs, in graph order.
    pub outputs: Vec<TensorSpec>,
}

/// Largest magnitude a mask needs: `exp` of it is 0 in f32 for any score below 9000, and it is
/// finite in f16.
const MASK_VALUE: f32 = -10_000.0;

/// Largest number of tokens in a step or entries in a cache that is accepted (2^24).
const LENGTH_LIMIT: usize = 1 << 24;

/// Most bytes of all inputs or all outputs that are accepted (2^40).
const BYTES_LIMIT: usize = 1 << 40;

impl StepSpec {
    /// The step of `config` with `options`.
    ///
    /// # Errors
    /// When the layer range is empty or outside the model, or a length is 0 or above 2^24.
    pub fn new(config: &ModelConfig, options: &StepOptions) -> Result<Self, StepError> {
        let option = |what, value: String, accepted: String| {
            Err(StepError::Option { what, value, accepted })
        };
        let Range { start, end } = options.layers;
        if start >= end || end > config.num_layers() {
            return option(
                "layers",
                format!("{start}:{end}"),
                format!("a non-empty range within 0:{} is needed", config.num_layers()),
            );
        }
        for (what, value) in [("tokens", options.tokens), ("context", options.context)] {
            if value == 0 || value > LENGTH_LIMIT {
                return option(what, value.to_string(), format!("1 to {LENGTH_LIMIT} is accepted"));
            }
        }
        if !matches!(options.dtype, DType::F32 | DType::F16) {
            return option("dtype", options.dtype.to_string(), "f32 or f16 is accepted".into());
        }
        let kinds = &config.layer_types[options.layers.clone()];
        let uses = |kind| kinds.contains(&kind);
        let window = if uses(LayerKind::Sliding) { config.sliding_window } else { None };
        let layers: Vec<LayerSpec> = kinds
            .iter()
            .map(|&kind| {
                let layout = options.cache_layout.layout(kind);
                let cache_length = cache_length(kind, layout, options.context, window);
                LayerSpec { kind, layout, cache_length }
            })
            .collect();
        let mut spec = Self {
            tokens: options.tokens,
            context: options.context,
            hidden_size: config.hidden_size,
            vocab_size: config.vocab_size,
            num_attention_heads: config.num_attention_heads,
            num_key_value_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
            sliding_window: window,
            rope_sliding: config.rope_sliding.filter(|_| uses(LayerKind::Sliding)),
            rope_full: config.rope_full.filter(|_| uses(LayerKind::Full)),
            first_layer: start,
            layers,
            logits: options.logits,
            dtype: options.dtype,
            mask_value: MASK_VALUE,
            inputs: Vec::new(),
            outputs: Vec::new(),
        };
        spec.inputs = spec.input_tensors();
        spec.outputs = spec.output_tensors();
        spec.validate()?;
        Ok(spec)
    }

    /// The same step with the residual stream after each layer as further outputs, named
    /// `hidden_0`, `hidden_1`, …
    #[must_use]
    pub fn with_layer_outputs(mut self) -> Self {
        let tapped = self.outputs.iter().any(|t| matches!(t.role, Role::LayerHidden(_)));
        if !tapped {
            let shape = vec![self.tokens, self.hidden_size];
            self.outputs.extend((0..self.layers.len()).map(|i| TensorSpec {
                name: format!("hidden_{i}"),
                shape: shape.clone(),
                dtype: self.dtype,
                role: Role::LayerHidden(i),
            }));
        }
        self
    }

    /// The same step for another number of tokens.
    ///
    /// # Errors
    /// When `tokens` is 0 or too large.
    pub fn with_tokens(&self, tokens: usize) -> Result<Self, StepError> {
        if tokens == 0 || tokens > LENGTH_LIMIT {
            return Err(StepError::Option {
                what: "tokens",
                value: tokens.to_string(),
                accepted: format!("1 to {LENGTH_LIMIT} is accepted"),
            });
        }
        let tapped = self.outputs.iter().any(|t| matches!(t.role, Role::LayerHidden(_)));
        let mut spec = Self { tokens, ..self.clone() };
        spec.inputs = spec.input_tensors();
        spec.outputs = spec.output_tensors();
        Ok(if tapped { spec.with_layer_outputs() } else { spec })
    }

    /// The same step with another first output.
    ///
    /// # Errors
    /// When the geometry is impossible.
    pub fn with_logits(&self, logits: Logits) -> Result<Self, StepError> {
        Self { logits, ..self.clone() }.with_tokens(self.tokens)
    }

    /// Checks a spec that was read from a file: its lengths are sane and its tensors are those
    /// that its geometry makes.
    ///
    /// # Errors
    /// The first contradiction, by name.
    pub fn validate(&self) -> Result<(), StepError> {
        let option = |what, value: String, accepted: &str| {
            Err(StepError::Option { what, value, accepted: accepted.into() })
        };
        let counts = [
            ("tokens", self.tokens),
            ("context", self.context),
            ("hidden_size", self.hidden_size),
            ("vocab_size", self.vocab_size),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
            ("head_dim", self.head_dim),
            ("layers", self.layers.len()),
        ];
        for (what, value) in counts {
            if value == 0 || value > LENGTH_LIMIT {
                return option(what, value.to_string(), "1 to 2^24 is accepted");
            }
        }
        if self.tokens > self.context {
            return option(
                "tokens",
                self.tokens.to_string(),
                "a step of more tokens than the context can hold never runs",
            );
        }
        if self.first_layer > LENGTH_LIMIT {
            return option("first_layer", self.first_layer.to_string(), "at most 2^24 is accepted");
        }
        if !self.num_attention_heads.is_multiple_of(self.num_key_value_heads) {
            let heads = self.num_attention_heads.to_string();
            return option("num_attention_heads", heads, "a multiple of the key/value heads is");
        }
        for kind in LayerKind::ALL {
            let used = self.layers.iter().any(|layer| layer.kind == kind);
            match self.rope(kind) {
                Some(rope)
                    if !used
                        || rope.dims == 0
                        || rope.dims % 2 != 0
                        || rope.dims > self.head_dim =>
                {
                    return option(
                        "rotary dims",
                        rope.dims.to_string(),
                        "an even part of head_dim is",
                    );
                }
                None if used => {
                    return option("rope", kind.to_string(), "each kind in use has one");
                }
                _ => {}
            }
        }
        let sliding = self.layers.iter().any(|layer| layer.kind == LayerKind::Sliding);
        if sliding && self.sliding_window.is_none_or(|window| window < 2) {
            return option("sliding_window", format!("{:?}", self.sliding_window), "2 or more is");
        }
        if !matches!(self.dtype, DType::F32 | DType::F16) || !self.mask_value.is_finite() {
            return option("dtype", self.dtype.to_string(), "f32 or f16 is accepted");
        }
        for layer in &self.layers {
            let expected =
                cache_length(layer.kind, layer.layout, self.context, self.sliding_window);
            if layer.cache_length != expected {
                return option(
                    "cache_length",
                    layer.cache_length.to_string(),
                    &format!("this layer and context make it {expected}"),
                );
            }
        }
        let fresh = self.with_tokens(self.tokens)?;
        for (what, ours, made) in
            [("inputs", &self.inputs, fresh.inputs), ("outputs", &self.outputs, fresh.outputs)]
        {
            let differing = ours.iter().zip(&made).find(|(ours, made)| ours != made);
            if let Some((ours, made)) = differing {
                return option(what, format!("{ours:?}"), &format!("the geometry makes {made:?}"));
            }
            if ours.len() != made.len() {
                return Err(StepError::Count { what, expected: made.len(), actual: ours.len() });
            }
            let sizes = ours.iter().map(|tensor| tensor.dtype.byte_count(&tensor.shape));
            let total = sizes.into_iter().try_fold(0usize, |sum, size| sum.checked_add(size?));
            if total.is_none_or(|total| total > BYTES_LIMIT) {
                let size = total.map_or("beyond 64 bits".into(), |total| format!("{total} bytes"));
                return option(what, size, "at most 1 TiB together is accepted");
            }
        }
        Ok(())
    }

    /// Rotary embedding of layers of `kind`, if the slice has such layers.
    pub fn rope(&self, kind: LayerKind) -> Option<Rope> {
        match kind {
            LayerKind::Sliding => self.rope_sliding,
            LayerKind::Full => self.rope_full,
        }
    }

    /// Cache entries dropped before scoring. One token: a rolled sliding layer drops its oldest
    /// entry. More: only what no token of the step can see.
    pub fn dropped_entries(&self, layer: &LayerSpec) -> usize {
        match (layer.kind, layer.layout, self.sliding_window) {
            (LayerKind::Sliding, CacheLayout::Roll, Some(window)) => {
                if self.tokens == 1 {
                    1
                } else {
                    layer.cache_length.saturating_sub(window - 1)
                }
            }
            _ => 0,
        }
    }

    /// Keys that `layer` scores: cached ones that were kept, then the step's own.
    pub fn scored_keys(&self, layer: &LayerSpec) -> usize {
        layer.cache_length - self.dropped_entries(layer) + self.tokens
    }

    /// Entries of `layer`'s new keys and values: T, or the whole window of a rolled layer.
    pub fn returned_entries(&self, layer: &LayerSpec) -> usize {
        match (layer.kind, layer.layout) {
            (LayerKind::Sliding, CacheLayout::Roll) => layer.cache_length,
            _ => self.tokens,
        }
    }

    /// The first layer of `kind` in the slice.
    pub fn first_of(&self, kind: LayerKind) -> Option<&LayerSpec> {
        self.layers.iter().find(|layer| layer.kind == kind)
    }

    /// Bytes of all cache inputs.
    pub fn cache_bytes(&self) -> usize {
        let caches = self
            .inputs
            .iter()
            .filter(|t| matches!(t.role, Role::KeyCache(_) | Role::ValueCache(_)));
        caches.map(|t| t.dtype.byte_count(&t.shape).unwrap_or(usize::MAX)).sum()
    }

    fn tensor(&self, name: String, shape: Vec<usize>, role: Role) -> TensorSpec {
        TensorSpec { name, shape, dtype: self.dtype, role }
    }

    fn input_tensors(&self) -> Vec<TensorSpec> {
        let tokens = self.tokens;
        let mut tensors =
            vec![self.tensor("x".into(), vec![1, tokens, self.hidden_size], Role::Embedding)];
        for kind in LayerKind::ALL {
            if let Some(rope) = self.rope(kind) {
                let shape = vec![1, 1, tokens, rope.dims];
                let suffix = suffix(kind);
                tensors.push(self.tensor(format!("cos_{suffix}"), shape.clone(), Role::Cos(kind)));
                tensors.push(self.tensor(format!("sin_{suffix}"), shape, Role::Sin(kind)));
            }
        }
        for kind in LayerKind::ALL {
            if let Some(layer) = self.first_of(kind) {
                let shape = vec![1, 1, tokens, self.scored_keys(layer)];
                tensors.push(self.tensor(
                    format!("mask_{}", suffix(kind)),
                    shape,
                    Role::Mask(kind),
                ));
            }
        }
        for (i, layer) in self.layers.iter().enumerate() {
            let shape = vec![1, self.num_key_value_heads, layer.cache_length, self.head_dim];
            tensors.push(self.tensor(format!("k_cache_{i}"), shape.clone(), Role::KeyCache(i)));
            tensors.push(self.tensor(format!("v_cache_{i}"), shape, Role::ValueCache(i)));
        }
        tensors
    }

    fn output_tensors(&self) -> Vec<TensorSpec> {
        let first = match self.logits {
            Logits::Last => self.tensor("logits".into(), vec![1, self.vocab_size], Role::Logits),
            Logits::All => {
                self.tensor("logits".into(), vec![1, self.tokens, self.vocab_size], Role::Logits)
            }
            Logits::Hidden => {
                self.tensor("hidden".into(), vec![1, self.tokens, self.hidden_size], Role::Hidden)
            }
        };
        let mut tensors = vec![first];
        for (i, layer) in self.layers.iter().enumerate() {
            let shape =
                vec![1, self.num_key_value_heads, self.returned_entries(layer), self.head_dim];
            tensors.push(self.tensor(format!("k_new_{i}"), shape.clone(), Role::KeyNew(i)));
            tensors.push(self.tensor(format!("v_new_{i}"), shape, Role::ValueNew(i)));
        }
        tensors
    }

    pub(crate) fn check_tensors<'a>(
        &self,
        what: &'static str,
        expected: &[TensorSpec],
        tensors: impl ExactSizeIterator<Item = TensorView<'a>>,
    ) -> Result<(), StepError> {
        if tensors.len() != expected.len() {
            return Err(StepError::Count { what, expected: expected.len(), actual: tensors.len() });
        }
        for (expected, tensor) in expected.iter().zip(tensors) {
            if expected.dtype != tensor.dtype() || expected.shape != tensor.shape() {
                return Err(StepError::Shape {
                    name: expected.name.clone(),
                    expected_dtype: expected.dtype,
                    expected: expected.shape.clone(),
                    actual_dtype: tensor.dtype(),
                    actual: tensor.shape().to_vec(),
                });
            }
        }
        Ok(())
    }
}

/// Entries of the cache input of a layer.
pub(crate) fn cache_length(
    kind: LayerKind,
    layout: CacheLayout,
    context: usize,
    window: Option<usize>,
) -> usize {
    match (kind, layout, window) {
        (LayerKind::Sliding, CacheLayout::Ring, Some(window)) => context.min(window - 1),
        (LayerKind::Sliding, CacheLayout::Roll, Some(window)) => context.min(window),
        _ => context,
    }
}

fn suffix(kind: LayerKind) -> &'static str {
    match kind {
        LayerKind::Sliding => "sw",
        LayerKind::Full => "full",
    }
}
