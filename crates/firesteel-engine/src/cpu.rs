use crate::engine::{Outputs, input};
use crate::{EngineError, fit};
use firesteel_checkpoint::LayerKind;
use firesteel_checkpoint::{Checkpoint, LayerWeights, Weight, WeightFormat};
use firesteel_kernels::{
    Attention, AttentionShape, Format, Isa, KvRows, MatrixView, Pool, Positions, Product,
    QuantizedRows, Segment, attention, matmul_group, ops, pack,
};
use firesteel_step::{
    CacheLayout, LayerSpec, Logits, Role, Runner, RunnerError, StepInputs, StepOutputs, StepSpec,
};
use firesteel_tensor::{Buffer, DType, SharedBytes};
use std::ops::Range;
use std::sync::Arc;

/// Name of the runner in reports and errors.
const NAME: &str = "cpu";

/// Least rows of activations that are worth another thread between two products.
const MIN_ROWS: usize = 8;

/// A model ready for the CPU's kernels: float weights in the mapped files, quantized ones in the
/// kernels' layout. Shared by any number of runners.
pub struct CpuModel {
    checkpoint: Arc<Checkpoint>,
    isa: Isa,
    pool: Pool,
    layers: Vec<Layer>,
    final_norm: Vec<f32>,
    head: Matrix,
}

/// The weights of a layer, as the kernels take them.
struct Layer {
    input_norm: Vec<f32>,
    post_attention_norm: Vec<f32>,
    qkv: Matrix,
    head_gate: Matrix,
    attention_out: Matrix,
    mlp_gate: Matrix,
    mlp_up: Matrix,
    mlp_down: Matrix,
}

/// A weight matrix and where its bytes are.
struct Matrix {
    format: Format,
    rows: usize,
    columns: usize,
    bytes: SharedBytes,
}

impl Matrix {
    fn new(weight: &Weight) -> Result<Self, EngineError> {
        let (rows, columns) = match *weight.shape() {
            [rows, columns] => (rows, columns),
            _ => (1, weight.element_count()),
        };
        let matrix = |format, bytes: SharedBytes| {
            // The view proves length and alignment once for all uses.
            MatrixView::new(format, rows, columns, &bytes)?;
            Ok(Self { format, rows, columns, bytes })
        };
        if let (Some(format), Some(blocks)) = (packed_format(weight.format()), weight.blocks()) {
            let mut packed = Buffer::zeroed(format.packed_bytes(rows, columns)?);
            pack(format, blocks, rows, columns, packed.bytes_mut())?;
            return matrix(format, SharedBytes::new(Arc::new(packed)));
        }
        let float = match weight.dtype() {
            DType::F16 => Format::F16,
            DType::BF16 => Format::BF16,
            _ => Format::F32,
        };
        if let Some(bytes) = weight.bytes()
            && MatrixView::new(float, rows, columns, bytes).is_ok()
        {
            return matrix(float, bytes.clone());
        }
        // Separate projections, generated weights, odd offsets and block formats without a kernel.
        let dtype = weight.dtype();
        let mut copy = Buffer::zeroed(float.packed_bytes(rows, columns)?);
        weight.convert(0, dtype, copy.bytes_mut())?;
        matrix(float, SharedBytes::new(Arc::new(copy)))
    }

    fn view(&self) -> Result<MatrixView<'_>, EngineError> {
        Ok(MatrixView::new(self.format, self.rows, self.columns, &self.bytes)?)
    }
}

/// The kernels' name of a block format; `None` for numbers and for blocks without a kernel.
fn packed_format(format: WeightFormat) -> Option<Format> {
    match format {
        WeightFormat::Q8_0 => Some(Format::Q8),
        WeightFormat::Q4_0 => Some(Format::Q4),
        WeightFormat::Q4K => Some(Format::Q4K),
        WeightFormat::Q6K => Some(Format::Q6K),
        _ => None,
    }
}

fn vector(weight: &Weight) -> Result<Vec<f32>, EngineError> {
    let mut values = vec![0.0; weight.element_count()];
    weight.read_f32(0, &mut values)?;
    Ok(values)
}

impl Layer {
    fn new(weights: &LayerWeights) -> Result<Self, EngineError> {
        Ok(Self {
            input_norm: vector(&weights.input_norm)?,
            post_attention_norm: vector(&weights.post_attention_norm)?,
            qkv: Matrix::new(&weights.qkv)?,
            head_gate: Matrix::new(&weights.head_gate)?,
            attention_out: Matrix::new(&weights.attention_out)?,
            mlp_gate: Matrix::new(&weights.mlp_gate)?,
            mlp_up: Matrix::new(&weights.mlp_up)?,
            mlp_down: Matrix::new(&weights.mlp_down)?,
        })
    }
}

impl CpuModel {
    /// Prepares `checkpoint` for `threads` threads, by default one for each core.
    ///
    /// # Errors
    /// When a weight cannot be read, FIRESTEEL_ISA names what this CPU lacks, or a thread cannot
    /// be had.
    pub fn new(
        checkpoint: Arc<Checkpoint>,
        threads: Option<usize>,
    ) -> Result<Arc<Self>, EngineError> {
        let cores = || std::thread::available_parallelism().map_or(1, usize::from);
        let layers = checkpoint.layers().iter().map(Layer::new).collect::<Result<_, _>>()?;
        Ok(Arc::new(Self {
            isa: Isa::detect()?,
            pool: Pool::new(threads.unwrap_or_else(cores))?,
            layers,
            final_norm: vector(checkpoint.final_norm())?,
            head: Matrix::new(checkpoint.head_weight())?,
            checkpoint,
        }))
    }

    /// Bytes of weights that one token reads: all but an embedding that is not the head too.
    pub fn weight_bytes(&self) -> u64 {
        let layer = |layer: &Layer| {
            let matrices = [
                &layer.qkv,
                &layer.head_gate,
                &layer.attention_out,
                &layer.mlp_gate,
                &layer.mlp_up,
                &layer.mlp_down,
            ];
            let norms = layer.input_norm.len() + layer.post_attention_norm.len();
            matrices.iter().map(|matrix| matrix.bytes.len()).sum::<usize>() + 4 * norms
        };
        let layers: usize = self.layers.iter().map(layer).sum();
        (layers + 4 * self.final_norm.len() + self.head.bytes.len()) as u64
    }

    /// A runner of the steps of `spec`: any T, any slice of layers, f32 or f16 tensors.
    ///
    /// # Errors
    /// When `spec` is not a step of this model; the error names the difference.
    pub fn runner(self: &Arc<Self>, spec: StepSpec) -> Result<CpuRunner, EngineError> {
        fit::check(&self.checkpoint, &spec)?;
        Ok(CpuRunner { model: Arc::clone(self), spec, scratch: Scratch::default() })
    }
}

/// Executes the steps of one [`StepSpec`] on the CPU's kernels, in f32 with quantized products
/// where the weights are quantized.
pub struct CpuRunner {
    model: Arc<CpuModel>,
    spec: StepSpec,
    scratch: Scratch,
}

/// Activations of a step, kept from one step to the next.
#[derive(Default)]
struct Scratch {
    hidden: Vec<f32>,
    normed: Vec<f32>,
    quantized: QuantizedRows,
    qkv: Vec<f32>,
    gates: Vec<f32>,
    queries: Vec<f32>,
    attended: Vec<f32>,
    projected: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
}

/// What the tokens of a step see, as positions: cached entry i has `cached[i]`, the step's token j
/// has T + j, and token t sees `visible[t]`.
struct Sight {
    /// Up to the last entry that any token sees; usize::MAX for those that none sees.
    cached: Vec<usize>,
    visible: Vec<Range<usize>>,
}

impl Sight {
    /// Reads a mask of T rows, each over the kept cache entries and the T new ones.
    ///
    /// An entry is placed at the last token that sees it, and token t sees from t on: that is
    /// every mask in which tokens lose sight of the cache and never regain it, which a causal mask
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

impl Runner for CpuRunner {
    fn spec(&self) -> &StepSpec {
        &self.spec
    }

    fn name(&self) -> &str {
        NAME
    }

    fn settings(&self) -> Vec<(String, String)> {
        vec![
            ("isa".into(), self.model.isa.name().into()),
            ("threads".into(), self.model.pool.threads().to_string()),
        ]
    }

    fn step(&mut self, inputs: &StepInputs<'_>) -> Result<StepOutputs, RunnerError> {
        let inputs = StepInputs::new(&self.spec, inputs.tensors().to_vec())?;
        self.run(&inputs).map_err(|error| match error {
            EngineError::Step(error) => RunnerError::Step(error),
            error => RunnerError::Failed { runner: NAME.into(), message: error.to_string() },
        })
    }
}

impl CpuRunner {
    fn run(&mut self, inputs: &StepInputs<'_>) -> Result<StepOutputs, EngineError> {
        let (spec, model) = (&self.spec, &*self.model);
        let scratch = &mut self.scratch;
        let mut outputs = Outputs::new(spec);
        scratch.hidden.clear();
        scratch.hidden.extend_from_slice(&input(spec, inputs, Role::Embedding)?);
        let sight = |kind: LayerKind| -> Result<Option<Sight>, EngineError> {
            let Some(layer) = spec.first_of(kind) else { return Ok(None) };
            let mask = input(spec, inputs, Role::Mask(kind))?;
            Sight::read(spec, layer, &mask).map(Some)
        };
        let sights = [sight(LayerKind::Sliding)?, sight(LayerKind::Full)?];
        let weights = model.layers.iter().skip(spec.first_layer);
        for (index, (layer, weights)) in spec.layers.iter().zip(weights).enumerate() {
            let sight = match layer.kind {
                LayerKind::Sliding => &sights[0],
                LayerKind::Full => &sights[1],
            };
            let sight =
                sight.as_ref().ok_or(EngineError::Missing { role: Role::Mask(layer.kind) })?;
            let step = LayerStep { model, spec, inputs, index, layer, weights, sight };
            step.attention(scratch, &mut outputs)?;
            step.feed_forward(scratch)?;
            outputs.put(Role::LayerHidden(index), || scratch.hidden.clone())?;
        }
        let headed = match spec.logits {
            Logits::Hidden => {
                outputs.put(Role::Hidden, || scratch.hidden.clone())?;
                return outputs.finish();
            }
            Logits::Last => scratch.hidden.len() - spec.hidden_size..scratch.hidden.len(),
            Logits::All => 0..scratch.hidden.len(),
        };
        let hidden = scratch.hidden[headed].to_vec();
        norm(model, &hidden, &model.final_norm, &mut scratch.normed)?;
        let rows = hidden.len() / spec.hidden_size;
        let mut logits = vec![0.0; rows * model.head.rows];
        products(model, &scratch.normed, &mut scratch.quantized, [(&model.head, &mut logits)])?;
        outputs.put(Role::Logits, || logits)?;
        outputs.finish()
    }
}

/// RMSNorm of rows of `weights.len()`.
fn norm(
    model: &CpuModel,
    x: &[f32],
    weights: &[f32],
    out: &mut Vec<f32>,
) -> Result<(), EngineError> {
    let epsilon = model.checkpoint.config().rms_norm_eps as f32;
    out.resize(x.len(), 0.0);
    Ok(ops::rms_norm(x, weights, epsilon, out)?)
}

/// Products of the same activations, in one pass over the threads. Each output is resized to fit.
fn products<const N: usize>(
    model: &CpuModel,
    x: &[f32],
    quantized: &mut QuantizedRows,
    list: [(&Matrix, &mut Vec<f32>); N],
) -> Result<(), EngineError> {
    let columns = list.first().map_or(1, |(matrix, _)| matrix.columns);
    let rows = x.len() / columns.max(1);
    if list.iter().any(|(matrix, _)| matrix.format.is_quantized()) {
        quantized.quantize(model.isa, &model.pool, x, rows, columns)?;
    }
    let mut group = Vec::with_capacity(N);
    for (matrix, out) in list {
        out.resize(rows * matrix.rows, 0.0);
        group.push(Product { weights: matrix.view()?, out });
    }
    Ok(matmul_group(model.isa, &model.pool, x, quantized, &mut group)?)
}

/// One layer in one step.
struct LayerStep<'a> {
    model: &'a CpuModel,
    spec: &'a StepSpec,
    inputs: &'a StepInputs<'a>,
    index: usize,
    layer: &'a LayerSpec,
    weights: &'a Layer,
    sight: &'a Sight,
}

impl LayerStep<'_> {
    /// Adds gated attention to the hidden state and makes the layer's outputs.
    fn attention(
        &self,
        scratch: &mut Scratch,
        outputs: &mut Outputs<'_>,
    ) -> Result<(), EngineError> {
        let (spec, model) = (self.spec, self.model);
        let (tokens, width) = (spec.tokens, spec.head_dim);
        let (heads, shared) = (spec.num_attention_heads, spec.num_key_value_heads);
        norm(model, &scratch.hidden, &self.weights.input_norm, &mut scratch.normed)?;
        products(
            model,
            &scratch.normed,
            &mut scratch.quantized,
            [(&self.weights.qkv, &mut scratch.qkv), (&self.weights.head_gate, &mut scratch.gates)],
        )?;
        let cos = input(spec, self.inputs, Role::Cos(self.layer.kind))?;
        let sin = input(spec, self.inputs, Role::Sin(self.layer.kind))?;
        let (row, rotary) = ((heads + 2 * shared) * width, cos.len() / tokens);
        scratch.queries.clear();
        let mut keys = vec![0.0; shared * tokens * width];
        let mut values = vec![0.0; shared * tokens * width];
        for (t, row) in scratch.qkv.chunks_exact_mut(row).enumerate() {
            // Both halves of the tables are equal.
            let half = t * rotary..t * rotary + rotary / 2;
            let (turning, fixed) = row.split_at_mut((heads + shared) * width);
            ops::rope(turning, width, &cos[half.clone()], &sin[half])?;
            let (queries, new_keys) = turning.split_at(heads * width);
            scratch.queries.extend_from_slice(queries);
            for head in 0..shared {
                let target = (head * tokens + t) * width..(head * tokens + t + 1) * width;
                let source = head * width..(head + 1) * width;
                keys[target.clone()].copy_from_slice(&new_keys[source.clone()]);
                values[target].copy_from_slice(&fixed[source]);
            }
        }
        let cached_keys = input(spec, self.inputs, Role::KeyCache(self.index))?;
        let cached_values = input(spec, self.inputs, Role::ValueCache(self.index))?;
        let segments = [
            Segment {
                keys: KvRows::F32(&cached_keys),
                values: KvRows::F32(&cached_values),
                entries: self.sight.cached.len(),
                capacity: self.layer.cache_length,
                positions: Positions::Each(&self.sight.cached),
            },
            Segment {
                keys: KvRows::F32(&keys),
                values: KvRows::F32(&values),
                entries: tokens,
                capacity: tokens,
                positions: Positions::Consecutive(tokens),
            },
        ];
        let arguments = Attention {
            shape: AttentionShape { heads, kv_heads: shared, head_dim: width, queries: tokens },
            scale: 1.0 / (width as f32).sqrt(),
            queries: &scratch.queries,
            segments: &segments,
            visible: &self.sight.visible,
        };
        scratch.attended.resize(tokens * heads * width, 0.0);
        attention(model.isa, &model.pool, &arguments, &mut scratch.attended)?;
        ops::sigmoid(model.isa, &mut scratch.gates);
        for (head, gate) in scratch.attended.chunks_exact_mut(width).zip(&scratch.gates) {
            ops::scale(head, *gate);
        }
        products(
            model,
            &scratch.attended,
            &mut scratch.quantized,
            [(&self.weights.attention_out, &mut scratch.projected)],
        )?;
        ops::add(&mut scratch.hidden, &scratch.projected)?;
        let window = |cached: &[f32], new: Vec<f32>| self.returned(cached, new);
        outputs.put(Role::KeyNew(self.index), || window(&cached_keys, keys))?;
        outputs.put(Role::ValueNew(self.index), || window(&cached_values, values))
    }

    /// The new entries, or the last of cached and new ones where the window rolls.
    fn returned(&self, cached: &[f32], new: Vec<f32>) -> Vec<f32> {
        let rolls = self.layer.kind == LayerKind::Sliding && self.layer.layout == CacheLayout::Roll;
        if !rolls {
            return new;
        }
        let (length, width) = (self.layer.cache_length * self.spec.head_dim, self.spec.head_dim);
        let step = self.spec.tokens * width;
        let mut window = Vec::with_capacity(cached.len());
        for (old, new) in cached.chunks_exact(length).zip(new.chunks_exact(step)) {
            let kept = &old[length.min(step)..];
            window.extend_from_slice(kept);
            window.extend_from_slice(&new[step - (length - kept.len())..]);
        }
        window
    }

    /// Adds the feed-forward part to the hidden state.
    fn feed_forward(&self, scratch: &mut Scratch) -> Result<(), EngineError> {
        let model = self.model;
        norm(model, &scratch.hidden, &self.weights.post_attention_norm, &mut scratch.normed)?;
        products(
            model,
            &scratch.normed,
            &mut scratch.quantized,
            [(&self.weights.mlp_gate, &mut scratch.gate), (&self.weights.mlp_up, &mut scratch.up)],
        )?;
        let rows = MIN_ROWS * self.weights.mlp_gate.rows;
        if scratch.gate.len() > rows {
            use rayon::prelude::*;
            scratch
                .gate
                .par_chunks_mut(rows)
                .zip(scratch.up.par_chunks(rows))
                .try_for_each(|(gate, up)| ops::gated_gelu(model.isa, gate, up))?;
        } else {
            ops::gated_gelu(model.isa, &mut scratch.gate, &scratch.up)?;
        }
        products(
            model,
            &scratch.gate,
            &mut scratch.quantized,
            [(&self.weights.mlp_down, &mut scratch.projected)],
        )?;
        Ok(ops::add(&mut scratch.hidden, &scratch.projected)?)
    }
}
