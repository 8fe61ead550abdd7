use super::forward::{Forward, Part, Scratch};
use super::{CpuModel, NAME, failed};
use crate::EngineError;
use crate::engine::{Outputs, input};
use firesteel_checkpoint::LayerKind;
use firesteel_kernels::{KvRows, Positions, Segment};
use firesteel_step::{
    CacheLayout, LayerSpec, Logits, Role, Runner, RunnerError, StepInputs, StepOutputs, StepSpec,
};
use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

/// Executes the steps of one [`StepSpec`] on the CPU's kernels, in f32 with quantized products
/// where the weights are quantized.
pub struct CpuRunner {
    model: Arc<CpuModel>,
    spec: StepSpec,
    scratch: Scratch,
}

impl CpuRunner {
    /// `spec` is a step of `model`.
    pub(super) fn new(model: Arc<CpuModel>, spec: StepSpec) -> Self {
        Self { model, spec, scratch: Scratch::default() }
    }

    fn run(&mut self, inputs: &StepInputs<'_>) -> Result<StepOutputs, EngineError> {
        let spec = &self.spec;
        let mut outputs = Outputs::new(spec);
        let mut forward = Forward { model: &self.model, scratch: &mut self.scratch };
        forward.scratch.hidden.clear();
        forward.scratch.hidden.extend_from_slice(&input(spec, inputs, Role::Embedding)?);
        let mut part = Step {
            spec,
            sliding: Kind::read(spec, inputs, LayerKind::Sliding)?,
            full: Kind::read(spec, inputs, LayerKind::Full)?,
            layer: None,
        };
        for (index, layer) in spec.layers.iter().enumerate() {
            part.layer = Some(StepLayer::new(spec, inputs, index, *layer)?);
            forward.layer(spec.first_layer + index, std::slice::from_mut(&mut part))?;
            if let Some(layer) = part.layer.take() {
                let width = spec.head_dim;
                outputs.put(Role::KeyNew(index), || {
                    returned(layer.spec, width, &layer.cached_keys, layer.keys)
                })?;
                outputs.put(Role::ValueNew(index), || {
                    returned(layer.spec, width, &layer.cached_values, layer.values)
                })?;
            }
            outputs.put(Role::LayerHidden(index), || forward.scratch.hidden.clone())?;
        }
        let tokens = spec.tokens;
        let rows = match spec.logits {
            Logits::Hidden => {
                outputs.put(Role::Hidden, || forward.scratch.hidden.clone())?;
                return outputs.finish();
            }
            Logits::Last => tokens - 1..tokens,
            Logits::All => 0..tokens,
        };
        let mut logits = Vec::new();
        forward.head(rows, &mut logits)?;
        outputs.put(Role::Logits, || logits)?;
        outputs.finish()
    }
}

impl Runner for CpuRunner {
    fn spec(&self) -> &StepSpec {
        &self.spec
    }

    fn name(&self) -> &str {
        NAME
    }

    fn settings(&self) -> Vec<(String, String)> {
        self.model.settings()
    }

    fn step(&mut self, inputs: &StepInputs<'_>) -> Result<StepOutputs, RunnerError> {
        let inputs = StepInputs::new(&self.spec, inputs.tensors().to_vec())?;
        self.run(&inputs).map_err(failed)
    }
}

/// The tokens of a step and the inputs of the contract.
struct Step<'a> {
    spec: &'a StepSpec,
    sliding: Option<Kind<'a>>,
    full: Option<Kind<'a>>,
    /// The layer that runs.
    layer: Option<StepLayer<'a>>,
}

/// What layers of one kind share.
struct Kind<'a> {
    cos: Cow<'a, [f32]>,
    sin: Cow<'a, [f32]>,
    ranges: VisibleRanges,
}

impl<'a> Kind<'a> {
    /// `None` when the slice has no layer of `kind`.
    fn read(
        spec: &StepSpec,
        inputs: &StepInputs<'a>,
        kind: LayerKind,
    ) -> Result<Option<Self>, EngineError> {
        let Some(layer) = spec.first_of(kind) else { return Ok(None) };
        let mask = input(spec, inputs, Role::Mask(kind))?;
        Ok(Some(Self {
            cos: input(spec, inputs, Role::Cos(kind))?,
            sin: input(spec, inputs, Role::Sin(kind))?,
            ranges: VisibleRanges::read(spec, layer, &mask)?,
        }))
    }
}

/// The caches of the layer that runs, and the new keys and values, `[KV, T, head_dim]`.
struct StepLayer<'a> {
    spec: LayerSpec,
    cached_keys: Cow<'a, [f32]>,
    cached_values: Cow<'a, [f32]>,
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl<'a> StepLayer<'a> {
    fn new(
        spec: &StepSpec,
        inputs: &StepInputs<'a>,
        index: usize,
        layer: LayerSpec,
    ) -> Result<Self, EngineError> {
        let new = spec.num_key_value_heads * spec.tokens * spec.head_dim;
        Ok(Self {
            spec: layer,
            cached_keys: input(spec, inputs, Role::KeyCache(index))?,
            cached_values: input(spec, inputs, Role::ValueCache(index))?,
            keys: vec![0.0; new],
            values: vec![0.0; new],
        })
    }
}

impl Step<'_> {
    fn kind(&self, kind: LayerKind) -> Option<&Kind<'_>> {
        match kind {
            LayerKind::Sliding => self.sliding.as_ref(),
            LayerKind::Full => self.full.as_ref(),
        }
    }
}

impl Part for Step<'_> {
    fn tokens(&self) -> usize {
        self.spec.tokens
    }

    fn rotary(&self, kind: LayerKind) -> (&[f32], &[f32]) {
        self.kind(kind).map_or((&[], &[]), |kind| (&kind.cos, &kind.sin))
    }

    fn store(
        &mut self,
        _: usize,
        token: usize,
        keys: &[f32],
        values: &[f32],
    ) -> Result<(), EngineError> {
        let Some(layer) = &mut self.layer else { return Ok(()) };
        let (tokens, width) = (self.spec.tokens, self.spec.head_dim);
        for (new, all) in [(keys, &mut layer.keys), (values, &mut layer.values)] {
            for (head, new) in new.chunks_exact(width).enumerate() {
                let start = (head * tokens + token) * width;
                all[start..start + width].copy_from_slice(new);
            }
        }
        Ok(())
    }

    fn segments(&self, _: usize) -> Result<Vec<Segment<'_>>, EngineError> {
        let Some(layer) = &self.layer else { return Ok(Vec::new()) };
        let kind = layer.spec.kind;
        let Kind { ranges, .. } =
            self.kind(kind).ok_or(EngineError::Missing { role: Role::Mask(kind) })?;
        let tokens = self.spec.tokens;
        Ok(vec![
            Segment {
                keys: KvRows::F32(&layer.cached_keys),
                values: KvRows::F32(&layer.cached_values),
                entries: ranges.cached.len(),
                capacity: layer.spec.cache_length,
                positions: Positions::Each(&ranges.cached),
            },
            Segment {
                keys: KvRows::F32(&layer.keys),
                values: KvRows::F32(&layer.values),
                entries: tokens,
                capacity: tokens,
                positions: Positions::Consecutive(tokens),
            },
        ])
    }

    fn visible(&self, kind: LayerKind) -> &[Range<usize>] {
        self.kind(kind).map_or(&[], |kind| &kind.ranges.visible)
    }
}

/// The new entries of a layer, or the last of cached and new ones where the window rolls. `width`
/// is that of a head.
fn returned(layer: LayerSpec, width: usize, cached: &[f32], new: Vec<f32>) -> Vec<f32> {
    let length = layer.cache_length * width;
    if layer.kind != LayerKind::Sliding || layer.layout != CacheLayout::Roll || length == 0 {
        return new;
    }
    let step = new.len() / (cached.len() / length).max(1);
    let mut window = Vec::with_capacity(cached.len());
    for (old, new) in cached.chunks_exact(length).zip(new.chunks_exact(step)) {
        let kept = &old[length.min(step)..];
        window.extend_from_slice(kept);
        window.extend_from_slice(&new[step - (length - kept.len())..]);
    }
    window
}

/// What the tokens of a step see, as positions: cached entry i has `cached[i]`, the step's token j
/// has T + j, and token t sees `visible[t]`.
struct VisibleRanges {
    /// Up to the last entry that any token sees; usize::MAX for those that none sees.
    cached: Vec<usize>,
    visible: Vec<Range<usize>>,
}

impl VisibleRanges {
    /// Reads a mask of T rows, each over the kept cache entries and the T new ones.
    ///
    /// An entry is placed at the last token that sees it, and token t sees from t on: that is
    /// every mask in which tokens lose ranges of the cache and never regain it, which a causal mask
    /// with or without a window is.
    fn read(spec: &StepSpec, layer: &LayerSpec, mask: &[f32]) -> Result<Self, EngineError> {
        let (tokens, dropped) = (spec.tokens, spec.dropped_entries(layer));
        let kept = layer.cache_length - dropped;
        let unreadable = |token: usize| EngineError::Mask { kind: layer.kind, token };
        let mut cached = vec![usize::MAX; layer.cache_length];
        let mut visible = Vec::with_capacity(tokens);
        for (token, row) in mask.chunks_exact(kept + tokens).enumerate() {
            let (old, new) = row.split_at(kept);
            if row.iter().any(|value| *value != 0.0 && *value > VISIBLE_ABOVE) {
                return Err(unreadable(token));
            }
            let mut any_old = false;
            for (place, value) in cached[dropped..].iter_mut().zip(old) {
                if *value == 0.0 {
                    // Seen before and not by the token before this one, or not from the start.
                    if token > 0 && *place != token - 1 {
                        return Err(unreadable(token));
                    }
                    *place = token;
                    any_old = true;
                }
            }
            let first = new.iter().position(|value| *value == 0.0).unwrap_or(token + 1);
            let all_new = (0..tokens).all(|j| (new[j] == 0.0) == (j >= first && j <= token));
            if !all_new || (any_old && first > 0) {
                return Err(unreadable(token));
            }
            let start = if first == 0 { token } else { tokens + first };
            visible.push(start..tokens + token + 1);
        }
        let seen = cached.iter().rposition(|place| *place != usize::MAX);
        cached.truncate(seen.map_or(0, |last| last + 1));
        Ok(Self { cached, visible })
    }
}

/// A mask value above this and below 0 would only dampen a key, which the kernels do not do.
const VISIBLE_ABOVE: f32 = -1000.0;
