//! The layers and the head, for rows of any number of sequences.

use super::matrix::Matrix;
use super::{CpuModel, Layer};
use crate::EngineError;
use firesteel_checkpoint::{Activation, LayerKind};
use firesteel_kernels::{
    Attention, AttentionShape, KernelError, Pool, Product, QuantizedRows, Segment, attention,
    matmul_group, ops,
};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// Least rows of activations that are worth another thread between two products.
const MIN_ROWS: usize = 8;

/// The tokens of one sequence in a forward: their angles, and where their keys and values go and
/// what they attend to.
pub(super) trait Part {
    /// How many rows are this part's.
    fn tokens(&self) -> usize;

    /// The tokens whose rows are needed after the last layer.
    fn needed(&self) -> Range<usize> {
        0..self.tokens()
    }

    /// Cosines and sines of the tokens in layers of `kind`, `[tokens, dims]`; both halves of the
    /// dims are equal.
    fn rotary(&self, kind: LayerKind) -> (&[f32], &[f32]);

    /// Takes the keys, already rotated, and the values of one token: `[KV, head_dim]` each. They
    /// are part of what is attended to from then on.
    fn store(
        &mut self,
        layer: usize,
        token: usize,
        keys: &[f32],
        values: &[f32],
    ) -> Result<(), EngineError>;

    /// What there is to attend to in a layer.
    fn segments(&self, layer: usize) -> Result<Vec<Segment<'_>>, EngineError>;

    /// For each token, the positions that it sees in layers of `kind`.
    fn visible(&self, kind: LayerKind) -> &[Range<usize>];
}

/// Activations of a forward, kept from one to the next. Values that are never needed at the same
/// time share memory, because a prompt's activations are large.
#[derive(Default)]
pub(super) struct Scratch {
    /// `[rows, H]`: the residual stream.
    pub(super) hidden: Vec<f32>,
    /// `[rows, V]`, where they do not go to one sequence.
    pub(super) logits: Vec<f32>,
    /// `[rows, H]`: the normed stream, and what is added to the stream.
    normed: Vec<f32>,
    quantized: QuantizedRows,
    /// Queries, keys and values, or queries alone, then what the heads attended to, then the gate of
    /// the feed-forward part.
    first: Vec<f32>,
    /// Rotated queries, then the other half of the feed-forward part.
    second: Vec<f32>,
    /// `[rows, KV · head_dim]` each, where they do not come with the queries.
    keys: Vec<f32>,
    values: Vec<f32>,
    /// Heads of one token behind their norm.
    heads: Vec<f32>,
    /// `[rows, heads]`; empty without gates.
    gates: Vec<f32>,
}

/// A forward through the layers of a model.
pub(super) struct Forward<'a> {
    pub(super) model: &'a CpuModel,
    pub(super) scratch: &'a mut Scratch,
}

impl Forward<'_> {
    /// Runs layer `index` of the model over `scratch.hidden`, whose rows are those of `parts`.
    /// After the last layer only the needed rows are left.
    pub(super) fn layer<P: Part>(
        &mut self,
        index: usize,
        parts: &mut [P],
    ) -> Result<(), EngineError> {
        let model = self.model;
        let Some(layer) = model.layers.get(index) else { return Ok(()) };
        self.attention(index, layer, parts)?;
        if self.scratch.hidden.is_empty() {
            return Ok(());
        }
        self.feed_forward(layer)
    }

    /// Adds attention to the hidden state.
    fn attention<P: Part>(
        &mut self,
        index: usize,
        weights: &Layer,
        parts: &mut [P],
    ) -> Result<(), EngineError> {
        let Self { model, scratch } = self;
        let config = model.checkpoint.config();
        let (width, hidden_size) = (config.head_dim, config.hidden_size);
        let (heads, shared) = (config.num_attention_heads, config.num_key_value_heads);
        norm(model, &scratch.hidden, &weights.input_norm, &mut scratch.normed)?;
        let fused = weights.query_key_value.len() == 1;
        let outputs = [&mut scratch.first, &mut scratch.keys, &mut scratch.values];
        let matrices = weights.query_key_value.iter().zip(outputs);
        let gate = weights.head_gate.iter().zip([&mut scratch.gates]);
        let all = matrices.chain(gate).collect();
        products(model, &scratch.normed, &mut scratch.quantized, all)?;
        let last = index + 1 == model.layers.len();
        let needed = |part: &P| if last { part.needed() } else { 0..part.tokens() };
        scratch.second.clear();
        // Rows of the hidden state and of the gates that go on, moved together.
        let (mut first, mut kept) = (0, 0);
        let (of_queries, of_keys) = (heads * width, shared * width);
        for part in &mut *parts {
            let (tokens, needed) = (part.tokens(), needed(part));
            for token in 0..tokens {
                let row = first + token;
                let (queries, keys, values) = if fused {
                    let rows = of_queries + 2 * of_keys;
                    let row = &mut scratch.first[row * rows..(row + 1) * rows];
                    let (queries, rest) = row.split_at_mut(of_queries);
                    let (keys, values) = rest.split_at_mut(of_keys);
                    (queries, keys, &*values)
                } else {
                    let pair = row * of_keys..(row + 1) * of_keys;
                    (
                        &mut scratch.first[row * of_queries..(row + 1) * of_queries],
                        &mut scratch.keys[pair.clone()],
                        &scratch.values[pair],
                    )
                };
                if let Some(gains) = &weights.head_norms {
                    let epsilon = config.rms_norm_eps as f32;
                    for (heads, gains) in [&mut *queries, &mut *keys].into_iter().zip(gains) {
                        scratch.heads.resize(heads.len(), 0.0);
                        ops::rms_norm(heads, gains, epsilon, &mut scratch.heads)?;
                        heads.copy_from_slice(&scratch.heads);
                    }
                }
                let (cos, sin) = part.rotary(weights.kind);
                let rotary = cos.len() / tokens;
                // Both halves of the tables are equal.
                let half = token * rotary..token * rotary + rotary / 2;
                for heads in [&mut *queries, &mut *keys] {
                    ops::rope(heads, width, &cos[half.clone()], &sin[half.clone()])?;
                }
                part.store(index, token, keys, values)?;
                if needed.contains(&token) {
                    scratch.second.extend_from_slice(queries);
                }
            }
            let from = first + needed.start..first + needed.end;
            move_rows(&mut scratch.hidden, hidden_size, from.clone(), kept);
            if weights.head_gate.is_some() {
                move_rows(&mut scratch.gates, heads, from, kept);
            }
            first += tokens;
            kept += needed.len();
        }
        scratch.hidden.truncate(kept * hidden_size);
        scratch.gates.truncate(kept * heads);
        scratch.first.resize(kept * heads * width, 0.0);
        let mut rows = 0..0;
        for part in parts {
            let needed = needed(part);
            rows = rows.end..rows.end + needed.len();
            let elements = rows.start * heads * width..rows.end * heads * width;
            let arguments = Attention {
                shape: AttentionShape {
                    heads,
                    kv_heads: shared,
                    head_dim: width,
                    queries: needed.len(),
                },
                scale: 1.0 / (width as f32).sqrt(),
                queries: &scratch.second[elements.clone()],
                segments: &part.segments(index)?,
                visible: &part.visible(weights.kind)[needed],
            };
            attention(model.isa, &model.pool, &arguments, &mut scratch.first[elements])?;
        }
        if kept == 0 {
            return Ok(());
        }
        if weights.head_gate.is_some() {
            ops::sigmoid(model.isa, &mut scratch.gates);
            for (head, gate) in scratch.first.chunks_exact_mut(width).zip(&scratch.gates) {
                ops::scale(head, *gate);
            }
        }
        products(
            model,
            &scratch.first,
            &mut scratch.quantized,
            vec![(&weights.attention_out, &mut scratch.normed)],
        )?;
        Ok(ops::add(&mut scratch.hidden, &scratch.normed)?)
    }

    /// Adds the feed-forward part to the hidden state.
    fn feed_forward(&mut self, weights: &Layer) -> Result<(), EngineError> {
        let Self { model, scratch } = self;
        norm(model, &scratch.hidden, &weights.post_attention_norm, &mut scratch.normed)?;
        products(
            model,
            &scratch.normed,
            &mut scratch.quantized,
            vec![(&weights.mlp_gate, &mut scratch.first), (&weights.mlp_up, &mut scratch.second)],
        )?;
        let rows = MIN_ROWS * weights.mlp_gate.rows().max(1);
        let pieces = scratch.first.chunks_mut(rows).zip(scratch.second.chunks(rows));
        let activation = model.checkpoint.config().family.block().mlp.activation;
        spread(&model.pool, pieces, |(gate, up)| match activation {
            Activation::Gelu => ops::gated_gelu(model.isa, gate, up),
            Activation::Silu => ops::gated_silu(model.isa, gate, up),
        })?;
        products(
            model,
            &scratch.first,
            &mut scratch.quantized,
            vec![(&weights.mlp_down, &mut scratch.normed)],
        )?;
        Ok(ops::add(&mut scratch.hidden, &scratch.normed)?)
    }

    /// The logits of the rows `rows` of the hidden state, `[rows, V]`.
    pub(super) fn head(
        &mut self,
        rows: Range<usize>,
        logits: &mut Vec<f32>,
    ) -> Result<(), EngineError> {
        let Self { model, scratch } = self;
        let width = model.final_norm.len();
        let hidden = &scratch.hidden[rows.start * width..rows.end * width];
        norm(model, hidden, &model.final_norm, &mut scratch.normed)?;
        products(model, &scratch.normed, &mut scratch.quantized, vec![(&model.head, logits)])
    }
}

/// Moves rows `from` of `width` to the row `to`, which is not behind them.
fn move_rows(values: &mut [f32], width: usize, from: Range<usize>, to: usize) {
    if from.start != to {
        values.copy_within(from.start * width..from.end * width, to * width);
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
fn products(
    model: &CpuModel,
    x: &[f32],
    quantized: &mut QuantizedRows,
    list: Vec<(&Matrix, &mut Vec<f32>)>,
) -> Result<(), EngineError> {
    let columns = list.first().map_or(1, |(matrix, _)| matrix.columns());
    let rows = x.len() / columns.max(1);
    if list.iter().any(|(matrix, _)| matrix.is_quantized()) {
        quantized.quantize(model.isa, &model.pool, x, rows, columns)?;
    }
    let mut group = Vec::with_capacity(list.len());
    for (matrix, out) in list {
        out.resize(rows * matrix.rows(), 0.0);
        group.push(Product { weights: matrix.view()?, out });
    }
    Ok(matmul_group(model.isa, &model.pool, x, quantized, &mut group)?)
}

/// Does the work for each of some items, on the threads of the pool.
fn spread<T: Send>(
    pool: &Pool,
    items: impl Iterator<Item = T>,
    work: impl Fn(T) -> Result<(), KernelError> + Sync,
) -> Result<(), KernelError> {
    let items: Vec<Mutex<Option<T>>> = items.map(|item| Mutex::new(Some(item))).collect();
    let first = Mutex::new(Ok(()));
    pool.run(items.len(), &|index| {
        let item = items
            .get(index)
            .and_then(|item| item.lock().unwrap_or_else(PoisonError::into_inner).take());
        if let Some(Err(error)) = item.map(&work) {
            *first.lock().unwrap_or_else(PoisonError::into_inner) = Err(error);
        }
    })?;
    first.into_inner().unwrap_or_else(PoisonError::into_inner)
}
