use crate::attention::{Attention, Entries};
use crate::math::{GeluKind, NormGain, project, rms_norm, rotate, sigmoid, silu};
use crate::{EngineError, NAME, fit};
use firesteel_checkpoint::{Activation, Checkpoint, LayerWeights, Slot, Weight};
use firesteel_step::{
    LayerSpec, Logits, Role, Runner, RunnerError, StepInputs, StepOutputs, StepSpec,
};
use firesteel_tensor::Tensor;
use rayon::prelude::*;
use std::borrow::Cow;
use std::sync::Arc;

/// Is told what a step computes.
pub(crate) trait Observer {
    /// `output` `[T, N]` is `input` `[T, K]` times the transpose of `weight` `[N, K]`.
    fn product(&mut self, weight: &Weight, input: &[f64], output: &[f64]);

    /// `hidden` `[T, width]` is the residual stream after the output of `added_by` was added, or its
    /// beginning where that is the embedding.
    fn residual(&mut self, added_by: &Weight, hidden: &[f64], width: usize);
}

/// Watches nothing.
struct Unobserved;

impl Observer for Unobserved {
    fn product(&mut self, _: &Weight, _: &[f64], _: &[f64]) {}

    fn residual(&mut self, _: &Weight, _: &[f64], _: usize) {}
}

/// Elements of an activation that one task handles at least.
const MIN_ELEMENTS: usize = 1024;

/// How the engine computes where artifacts may differ from the checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EngineOptions {
    /// Form of the feed-forward activation.
    pub gelu: GeluKind,
}

/// A model on the CPU: a shared checkpoint and the way it is computed. Clones share the weights.
#[derive(Clone)]
pub struct Engine {
    checkpoint: Arc<Checkpoint>,
    options: EngineOptions,
}

impl Engine {
    /// The model in `checkpoint`.
    pub fn new(checkpoint: Arc<Checkpoint>, options: EngineOptions) -> Self {
        Self { checkpoint, options }
    }

    /// The checkpoint.
    pub fn checkpoint(&self) -> &Arc<Checkpoint> {
        &self.checkpoint
    }

    /// A runner of the steps of `spec`: any T, any slice of layers, f32 or f16 tensors.
    ///
    /// # Errors
    /// When `spec` is not a step of this model; the error names the difference.
    pub fn runner(&self, spec: StepSpec) -> Result<EngineRunner, EngineError> {
        fit::check(&self.checkpoint, &spec)?;
        Ok(EngineRunner { engine: self.clone(), spec })
    }

    /// Executes one step of `spec`, which fits this model.
    fn step(
        &self,
        spec: &StepSpec,
        inputs: &StepInputs<'_>,
        observer: &mut dyn Observer,
    ) -> Result<StepOutputs, EngineError> {
        let config = self.checkpoint.config();
        let mut outputs = Outputs::new(spec);
        let mut hidden: Vec<f64> =
            input(spec, inputs, Role::Embedding)?.iter().copied().map(f64::from).collect();
        observer.residual(self.checkpoint.embedding(), &hidden, spec.hidden_size);
        let weights = self.checkpoint.layers().iter().skip(spec.first_layer);
        for (index, (layer, weights)) in spec.layers.iter().zip(weights).enumerate() {
            let step = LayerStep { engine: self, spec, inputs, index, layer, weights };
            let (keys, values) = step.attention(&mut hidden, observer)?;
            step.feed_forward(&mut hidden, observer)?;
            let (heads, count) = (spec.num_key_value_heads, spec.returned_entries(layer));
            outputs.put(Role::KeyNew(index), || keys.last(heads, count))?;
            outputs.put(Role::ValueNew(index), || values.last(heads, count))?;
            outputs.put(Role::LayerHidden(index), || narrowed(&hidden))?;
        }
        let headed = match spec.logits {
            Logits::Hidden => {
                outputs.put(Role::Hidden, || narrowed(&hidden))?;
                return outputs.finish();
            }
            Logits::Last => &hidden[hidden.len() - spec.hidden_size..],
            Logits::All => &hidden[..],
        };
        let normed = rms_norm(self.checkpoint.final_norm(), config.rms_norm_eps, headed)?;
        let tokens = normed.len() / spec.hidden_size;
        let logits = observed(observer, self.checkpoint.head_weight(), &normed, tokens)?;
        outputs.put(Role::Logits, || narrowed(&logits))?;
        outputs.finish()
    }
}

/// Executes the steps of one [`StepSpec`] from the checkpoint.
pub struct EngineRunner {
    engine: Engine,
    spec: StepSpec,
}

impl EngineRunner {
    /// A runner of the steps of `spec` with default options; see [`Engine::runner`].
    ///
    /// # Errors
    /// When `spec` is not a step of this model; the error names the difference.
    pub fn new(checkpoint: Arc<Checkpoint>, spec: StepSpec) -> Result<Self, EngineError> {
        Engine::new(checkpoint, EngineOptions::default()).runner(spec)
    }

    /// Executes one step while `observer` watches.
    pub(crate) fn observed_step(
        &self,
        inputs: &StepInputs<'_>,
        observer: &mut dyn Observer,
    ) -> Result<StepOutputs, EngineError> {
        // The inputs may have been checked against another spec.
        let inputs = StepInputs::new(&self.spec, inputs.tensors().to_vec())?;
        self.engine.step(&self.spec, &inputs, observer)
    }
}

impl Runner for EngineRunner {
    fn spec(&self) -> &StepSpec {
        &self.spec
    }

    fn name(&self) -> &str {
        NAME
    }

    fn settings(&self) -> Vec<(String, String)> {
        let activation = self.engine.checkpoint.config().family.block().mlp.activation;
        let activation = match activation {
            Activation::Gelu => ("gelu".into(), self.engine.options.gelu.name().into()),
            Activation::Silu => ("activation".into(), activation.name().into()),
        };
        vec![activation, ("arithmetic".into(), "f64".into())]
    }

    fn step(&mut self, inputs: &StepInputs<'_>) -> Result<StepOutputs, RunnerError> {
        Ok(self.observed_step(inputs, &mut Unobserved)?)
    }
}

/// One layer in one step.
struct LayerStep<'a> {
    engine: &'a Engine,
    spec: &'a StepSpec,
    inputs: &'a StepInputs<'a>,
    index: usize,
    layer: &'a LayerSpec,
    weights: &'a LayerWeights,
}

impl<'a> LayerStep<'a> {
    /// Adds attention to `hidden` and returns the layer's keys and values.
    fn attention(
        &self,
        hidden: &mut [f64],
        observer: &mut dyn Observer,
    ) -> Result<(Entries<'a>, Entries<'a>), EngineError> {
        let spec = self.spec;
        let (tokens, width) = (spec.tokens, spec.head_dim);
        let (heads, kv_heads) = (spec.num_attention_heads, spec.num_key_value_heads);
        let cos = self.input(Role::Cos(self.layer.kind))?;
        let sin = self.input(Role::Sin(self.layer.kind))?;
        let mask = self.input(Role::Mask(self.layer.kind))?;
        let maths = self.engine.checkpoint.config().family.block().attention;
        let normed = self.norm(self.weights.weight(Slot::InputNorm)?, hidden)?;
        let gates = match maths.head_gate {
            true => Some(project(self.weights.weight(Slot::HeadGate)?, &normed, tokens)?),
            false => None,
        };
        let mut qkv = self.query_key_value(&normed, observer)?;
        let rotary = cos.len() / tokens;
        let row = (heads + 2 * kv_heads) * width;
        if maths.qk_norm {
            let epsilon = self.engine.checkpoint.config().rms_norm_eps;
            let queries = NormGain::read(self.weights.weight(Slot::QueryNorm)?)?;
            let keys = NormGain::read(self.weights.weight(Slot::KeyNorm)?)?;
            for row in qkv.chunks_exact_mut(row) {
                let (of_queries, rest) = row.split_at_mut(heads * width);
                of_queries.chunks_exact_mut(width).for_each(|head| queries.apply(epsilon, head));
                let of_keys = rest.chunks_exact_mut(width).take(kv_heads);
                of_keys.for_each(|head| keys.apply(epsilon, head));
            }
        }
        for (t, row) in qkv.chunks_exact_mut(row).enumerate() {
            let range = t * rotary..(t + 1) * rotary;
            for head in row.chunks_exact_mut(width).take(heads + kv_heads) {
                rotate(head, &cos[range.clone()], &sin[range.clone()]);
            }
        }
        let entries = |role, first_head: usize| -> Result<Entries<'a>, EngineError> {
            let mut new = Vec::with_capacity(kv_heads * tokens * width);
            for head in first_head..first_head + kv_heads {
                for row in qkv.chunks_exact(row) {
                    new.extend_from_slice(&row[head * width..(head + 1) * width]);
                }
            }
            Ok(Entries {
                cached: self.input(role)?,
                new,
                cache_length: self.layer.cache_length,
                tokens,
                head_dim: width,
            })
        };
        let keys = entries(Role::KeyCache(self.index), heads)?;
        let values = entries(Role::ValueCache(self.index), heads + kv_heads)?;
        let dropped = spec.dropped_entries(self.layer);
        let attention = Attention { keys: &keys, values: &values, dropped };
        let scored = spec.scored_keys(self.layer);
        let group = heads / kv_heads;
        let mut attended = vec![0f64; tokens * heads * width];
        attended.par_chunks_exact_mut(width).enumerate().for_each_init(
            || Vec::with_capacity(scored),
            |scores, (i, out)| {
                let (t, head) = (i / heads, i % heads);
                let query = &qkv[t * row + head * width..][..width];
                let mask = &mask[t * scored..(t + 1) * scored];
                attention.attend(head / group, query, mask, scores, out);
                if let Some(gates) = &gates {
                    let gate = sigmoid(gates[i]);
                    for out in out {
                        *out *= gate;
                    }
                }
            },
        );
        let out = self.weights.weight(Slot::AttentionOut)?;
        add(hidden, &observed(observer, out, &attended, tokens)?);
        observer.residual(out, hidden, spec.hidden_size);
        Ok((keys, values))
    }

    /// Queries, keys and values of each token one after the other, `[T, (heads + 2·KV)·head_dim]`.
    fn query_key_value(
        &self,
        normed: &[f64],
        observer: &mut dyn Observer,
    ) -> Result<Vec<f64>, EngineError> {
        let tokens = self.spec.tokens;
        if let Some(fused) = self.weights.get(Slot::QueryKeyValue) {
            return observed(observer, fused, normed, tokens);
        }
        let mut parts = Vec::new();
        for slot in [Slot::Query, Slot::Key, Slot::Value] {
            parts.push(observed(observer, self.weights.weight(slot)?, normed, tokens)?);
        }
        let mut rows = Vec::with_capacity(parts.iter().map(Vec::len).sum());
        for token in 0..tokens {
            for part in &parts {
                let width = part.len() / tokens;
                rows.extend_from_slice(&part[token * width..(token + 1) * width]);
            }
        }
        Ok(rows)
    }

    /// Adds the feed-forward part to `hidden`.
    fn feed_forward(
        &self,
        hidden: &mut [f64],
        observer: &mut dyn Observer,
    ) -> Result<(), EngineError> {
        let tokens = self.spec.tokens;
        let activation = self.engine.checkpoint.config().family.block().mlp.activation;
        let gelu = self.engine.options.gelu;
        let normed = self.norm(self.weights.weight(Slot::PostAttentionNorm)?, hidden)?;
        let gate = self.weights.weight(Slot::MlpGate)?;
        let mut inner = observed(observer, gate, &normed, tokens)?;
        let up = observed(observer, self.weights.weight(Slot::MlpUp)?, &normed, tokens)?;
        let activate = |x: f64| match activation {
            Activation::Gelu => gelu.apply(x),
            Activation::Silu => silu(x),
        };
        inner
            .par_iter_mut()
            .zip(&up)
            .with_min_len(MIN_ELEMENTS)
            .for_each(|(gate, up)| *gate = activate(*gate) * up);
        let down = self.weights.weight(Slot::MlpDown)?;
        add(hidden, &observed(observer, down, &inner, tokens)?);
        observer.residual(down, hidden, self.spec.hidden_size);
        Ok(())
    }

    fn norm(&self, weight: &Weight, hidden: &[f64]) -> Result<Vec<f64>, EngineError> {
        let epsilon = self.engine.checkpoint.config().rms_norm_eps;
        Ok(rms_norm(weight, epsilon, hidden)?)
    }

    fn input(&self, role: Role) -> Result<Cow<'a, [f32]>, EngineError> {
        input(self.spec, self.inputs, role)
    }
}

/// The product that [`project`] makes, shown to `observer`.
fn observed(
    observer: &mut dyn Observer,
    weight: &Weight,
    input: &[f64],
    tokens: usize,
) -> Result<Vec<f64>, EngineError> {
    let output = project(weight, input, tokens)?;
    observer.product(weight, input, &output);
    Ok(output)
}

/// The values of the input with `role`, as f32.
pub(crate) fn input<'a>(
    spec: &StepSpec,
    inputs: &StepInputs<'a>,
    role: Role,
) -> Result<Cow<'a, [f32]>, EngineError> {
    Ok(inputs.get(spec, role).ok_or(EngineError::Missing { role })?.to_f32()?)
}

/// `values` rounded to f32.
fn narrowed(values: &[f64]) -> Vec<f32> {
    values.iter().map(|&value| value as f32).collect()
}

/// Adds `change` to `values`.
fn add(values: &mut [f64], change: &[f64]) {
    for (value, change) in values.iter_mut().zip(change) {
        *value += change;
    }
}

/// The outputs of a step while they are made.
pub(crate) struct Outputs<'a> {
    spec: &'a StepSpec,
    tensors: Vec<Option<Tensor>>,
}

impl<'a> Outputs<'a> {
    pub(crate) fn new(spec: &'a StepSpec) -> Self {
        Self { spec, tensors: vec![None; spec.outputs.len()] }
    }

    /// Makes the output with `role`, if the step has one.
    pub(crate) fn put(
        &mut self,
        role: Role,
        values: impl FnOnce() -> Vec<f32>,
    ) -> Result<(), EngineError> {
        for (declared, tensor) in self.spec.outputs.iter().zip(&mut self.tensors) {
            if declared.role == role {
                let shape = declared.shape.clone();
                *tensor = Some(Tensor::from_f32_as(declared.dtype, shape, values())?);
                break;
            }
        }
        Ok(())
    }

    pub(crate) fn finish(self) -> Result<StepOutputs, EngineError> {
        let mut tensors = Vec::with_capacity(self.tensors.len());
        for (declared, tensor) in self.spec.outputs.iter().zip(self.tensors) {
            tensors.push(tensor.ok_or(EngineError::Missing { role: declared.role })?);
        }
        Ok(StepOutputs::new(self.spec, tensors)?)
    }
}
