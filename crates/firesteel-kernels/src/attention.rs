//! Attention of some query tokens over cached keys and values.

use std::ops::Range;

use bytemuck::{Pod, Zeroable};
use half::f16;

use crate::isa::Isa;
use crate::math::exp;
use crate::matmul::float_tiles;
use crate::ops::Exponentials;
use crate::pool::{Disjoint, Pool};
use crate::simd::{Element, Kernel, Simd, load_partial};
use crate::{KernelError, area, check_length};

/// Entries whose scores are taken together. Partial results of chunks are joined in their order, so
/// it is part of the definition of the result.
const CHUNK: usize = 256;
/// Query rows that pass over a chunk together, at least one token's.
const ROWS: usize = 16;

/// 32 elements of a key or value in 8 bits: an f16 scale and int8 values.
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct KvBlock {
    /// The value of one unit.
    pub scale: f16,
    /// −127 to 127.
    pub values: [i8; 32],
}

/// Quantizes keys or values to 8 bits per block of 32, the scale rounded to f16 first.
///
/// # Errors
///
/// `values` is not 32 elements for every block.
pub fn quantize_kv(values: &[f32], out: &mut [KvBlock]) -> Result<(), KernelError> {
    check_length("8-bit keys or values", area("blocks", out.len(), 32)?, values.len())?;
    for (values, out) in values.as_chunks::<32>().0.iter().zip(out) {
        let largest = values.iter().fold(0.0_f32, |a, b| a.max(b.abs()));
        out.scale = f16::from_f32(largest / 127.0);
        let scale = out.scale.to_f32();
        let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
        for (to, value) in out.values.iter_mut().zip(values) {
            *to = (value * inverse).round_ties_even().clamp(-127.0, 127.0) as i8;
        }
    }
    Ok(())
}

/// The inverse of [`quantize_kv`], up to rounding.
///
/// # Errors
///
/// `out` is not 32 elements for every block.
pub fn dequantize_kv(blocks: &[KvBlock], out: &mut [f32]) -> Result<(), KernelError> {
    check_length("8-bit keys or values", area("blocks", blocks.len(), 32)?, out.len())?;
    expand(blocks, out);
    Ok(())
}

#[inline(always)]
fn expand(blocks: &[KvBlock], out: &mut [f32]) {
    for (block, out) in blocks.iter().zip(out.as_chunks_mut::<32>().0) {
        let scale = block.scale.to_f32();
        for (out, value) in out.iter_mut().zip(block.values) {
            *out = f32::from(value) * scale;
        }
    }
}

/// Keys or values of a segment: `[kv_heads, capacity, head_dim]`, of which each head's first entries
/// count.
#[derive(Debug, Clone, Copy)]
pub enum KvRows<'a> {
    /// f32 elements.
    F32(&'a [f32]),
    /// f16 elements.
    F16(&'a [f16]),
    /// Blocks of 32; head_dim must be a multiple of that.
    Q8(&'a [KvBlock]),
}

impl KvRows<'_> {
    /// How many elements there are.
    fn elements(&self) -> usize {
        match self {
            Self::F32(data) => data.len(),
            Self::F16(data) => data.len(),
            Self::Q8(data) => data.len() * 32,
        }
    }
}

/// The positions of a segment's entries.
#[derive(Debug, Clone, Copy)]
pub enum Positions<'a> {
    /// Entry i has position first + i: a growing cache, or the tokens of the step.
    Consecutive(usize),
    /// One position an entry, in any order: a ring. A position that no query sees, such as
    /// `usize::MAX`, marks an entry that is not in use.
    Each(&'a [usize]),
}

impl Positions<'_> {
    #[inline(always)]
    fn at(&self, entry: usize) -> usize {
        match self {
            Self::Consecutive(first) => first.saturating_add(entry),
            Self::Each(all) => all.get(entry).copied().unwrap_or(usize::MAX),
        }
    }
}

/// Keys and values that lie together. Entries that are not visible are multiplied by zero, so they
/// must hold finite numbers.
#[derive(Debug, Clone, Copy)]
pub struct Segment<'a> {
    /// `[kv_heads, capacity, head_dim]`
    pub keys: KvRows<'a>,
    /// `[kv_heads, capacity, head_dim]`
    pub values: KvRows<'a>,
    /// Entries of each head that count, at most `capacity`.
    pub entries: usize,
    /// Entries of each head that there is room for.
    pub capacity: usize,
    /// Where the entries are in the sequence.
    pub positions: Positions<'a>,
}

/// Heads and tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionShape {
    /// Query heads; each `heads / kv_heads` consecutive ones share a key/value head.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Query tokens.
    pub queries: usize,
}

/// The arguments of [`attention`].
#[derive(Debug, Clone, Copy)]
pub struct Attention<'a> {
    /// Heads and tokens.
    pub shape: AttentionShape,
    /// What scores are multiplied by: 1/√head_dim.
    pub scale: f32,
    /// `[queries, heads, head_dim]`
    pub queries: &'a [f32],
    /// Keys and values, for example a ring and the tokens of the step.
    pub segments: &'a [Segment<'a>],
    /// For each query, the positions it sees.
    pub visible: &'a [Range<usize>],
}

/// `out[t][h] = Σ_e softmax_e(scale · q[t][h] · k[e]) · v[e]` over the visible entries, `[queries, heads,
/// head_dim]`; zeros for a query that sees none.
///
/// Scores are taken in chunks of 256 entries of a segment, each with its own maximum, and joined in
/// the order of the segments: the result depends neither on the number of threads nor on how many
/// queries are computed together.
///
/// # Errors
///
/// A length does not agree with the shape, or a task panicked.
pub fn attention(
    isa: Isa,
    pool: &Pool,
    arguments: &Attention<'_>,
    out: &mut [f32],
) -> Result<(), KernelError> {
    let shape = check(arguments, out.len())?;
    if out.is_empty() {
        return Ok(());
    }
    let AttentionShape { heads, kv_heads, head_dim, queries } = shape;
    let group = heads / kv_heads;
    let tile = (ROWS / group).max(1);
    let tiles = queries.div_ceil(tile);
    let chunks: Vec<Chunk> = arguments
        .segments
        .iter()
        .enumerate()
        .flat_map(|(segment, Segment { entries, .. })| {
            (0..*entries).step_by(CHUNK).map(move |first| Chunk {
                segment,
                first,
                count: CHUNK.min(entries - first),
            })
        })
        .collect();

    // Long caches of few queries: tasks share the entries too, and the partial results are joined at
    // the end, in the order in which one task would have joined them.
    let units = kv_heads * tiles;
    let split = units < pool.threads() * 2 && chunks.len() > 1;
    let parts = if split { chunks.len() } else { 1 };
    let width = head_dim + 2;
    let rows = queries * heads;
    let length = area("partial results", rows.saturating_mul(parts), width)?;
    let mut partials = vec![0.0_f32; length];
    let shared = Disjoint::new(&mut partials);
    pool.run(units * parts, &|task| {
        let (unit, part) = (task / parts, task % parts);
        let (kv_head, tile_index) = (unit / tiles, unit % tiles);
        let first = tile_index * tile;
        isa.dispatch(Task {
            arguments,
            chunks: if split { &chunks[part..part + 1] } else { &chunks },
            kv_head,
            tokens: first..queries.min(first + tile),
            partials: &shared,
            base: part * rows,
        });
    })?;
    for (row, out) in out.chunks_exact_mut(head_dim).enumerate() {
        let mut joined: Option<Partial> = None;
        let mut first = vec![];
        for part in 0..parts {
            let start = (part * rows + row) * width;
            let (values, ends) = partials[start..start + width].split_at(head_dim);
            let next = Partial { largest: ends[0], sum: ends[1] };
            match &mut joined {
                None => {
                    first.extend_from_slice(values);
                    joined = Some(next);
                }
                Some(joined) => joined.join(&mut first, next, values),
            }
        }
        let sum = joined.map_or(0.0, |joined| joined.sum);
        let factor = if sum == 0.0 { 0.0 } else { 1.0 / sum };
        out.iter_mut().zip(&first).for_each(|(out, value)| *out = value * factor);
    }
    Ok(())
}

fn check(arguments: &Attention<'_>, out: usize) -> Result<AttentionShape, KernelError> {
    let shape = arguments.shape;
    let AttentionShape { heads, kv_heads, head_dim, queries } = shape;
    let wrong = |reason| KernelError::AttentionShape { heads, kv_heads, head_dim, reason };
    if kv_heads == 0 || heads == 0 || head_dim == 0 || !heads.is_multiple_of(kv_heads) {
        return Err(wrong("heads must be a positive multiple of the key/value heads"));
    }
    let row = area("heads", heads, head_dim)?;
    let length = area("queries", queries, row)?;
    check_length("queries", length, arguments.queries.len())?;
    check_length("the output of attention", length, out)?;
    check_length("visible ranges", queries, arguments.visible.len())?;
    for segment in arguments.segments {
        let entries = area("a cache", segment.capacity, head_dim)?;
        let elements = area("a cache", entries, kv_heads)?;
        check_length("the keys of a segment", elements, segment.keys.elements())?;
        check_length("the values of a segment", elements, segment.values.elements())?;
        if segment.entries > segment.capacity {
            return Err(wrong("a segment has more entries than capacity"));
        }
        if let Positions::Each(positions) = segment.positions {
            check_length("the positions of a segment", segment.entries, positions.len())?;
        }
        let blocks =
            matches!(segment.keys, KvRows::Q8(_)) || matches!(segment.values, KvRows::Q8(_));
        if blocks && !head_dim.is_multiple_of(32) {
            return Err(wrong("8-bit keys and values need a multiple of 32"));
        }
    }
    Ok(shape)
}

#[derive(Debug, Clone, Copy)]
struct Chunk {
    segment: usize,
    first: usize,
    count: usize,
}

/// The maximum of some scores and the sum of exp(score − maximum).
#[derive(Debug, Clone, Copy)]
struct Partial {
    largest: f32,
    sum: f32,
}

impl Partial {
    /// Nothing seen yet.
    const EMPTY: Self = Self { largest: f32::NEG_INFINITY, sum: 0.0 };

    /// Joins the result of later entries; `values` and `next_values` are Σ exp(score − maximum) · v.
    #[inline(always)]
    fn join(&mut self, values: &mut [f32], next: Self, next_values: &[f32]) {
        if next.largest == f32::NEG_INFINITY {
            return;
        }
        if self.largest == f32::NEG_INFINITY {
            values.copy_from_slice(next_values);
            *self = next;
            return;
        }
        let largest = if next.largest > self.largest { next.largest } else { self.largest };
        let (old, new) = (exp(self.largest - largest), exp(next.largest - largest));
        for (value, next) in values.iter_mut().zip(next_values) {
            *value = *value * old + next * new;
        }
        *self = Self { largest, sum: self.sum * old + next.sum * new };
    }
}

struct Task<'a> {
    arguments: &'a Attention<'a>,
    chunks: &'a [Chunk],
    kv_head: usize,
    tokens: Range<usize>,
    /// `[part, queries, heads, head_dim + 2]`
    partials: &'a Disjoint<'a, f32>,
    /// The first row of the part.
    base: usize,
}

impl Kernel for Task<'_> {
    type Output = ();

    #[inline(always)]
    #[allow(unsafe_code, reason = "partial results of different tasks are disjoint")]
    fn run<S: Simd>(self, simd: S) {
        let Self { arguments, chunks, kv_head, tokens, partials, base } = self;
        let AttentionShape { heads, kv_heads, head_dim, .. } = arguments.shape;
        let group = heads / kv_heads;
        let rows = tokens.len() * group;
        let queries: Vec<f32> = tokens
            .clone()
            .flat_map(|token| {
                let start = (token * heads + kv_head * group) * head_dim;
                &arguments.queries[start..start + group * head_dim]
            })
            .map(|value| value * arguments.scale)
            .collect();
        let mut state = vec![Partial::EMPTY; rows];
        let mut values = vec![0.0; rows * head_dim];
        let mut next_values = vec![0.0; rows * head_dim];
        let mut scores = vec![0.0; rows * CHUNK];
        let mut expanded = Vec::new();

        for chunk in chunks {
            let Some(segment) = arguments.segments.get(chunk.segment) else { continue };
            let visible = &arguments.visible[tokens.clone()];
            let sees = |range: &Range<usize>, entry| range.contains(&segment.positions.at(entry));
            let end = chunk.first + chunk.count;
            let seen = |entry: &usize| visible.iter().any(|range| sees(range, *entry));
            let Some(first) = (chunk.first..end).find(seen) else { continue };
            let last = (chunk.first..end).rev().find(seen).unwrap_or(first);
            let count = last + 1 - first;

            let at = (kv_head * segment.capacity + first) * head_dim;
            let range = at..at + count * head_dim;
            // Scores keep their place in the chunk, so sums have the same order whatever is seen.
            let skip = first - chunk.first;
            scores[..rows * chunk.count].fill(f32::NEG_INFINITY);
            let mut put =
                |row: usize, entry: usize, score| scores[row * chunk.count + skip + entry] = score;
            match segment.keys {
                KvRows::F32(keys) => float_tiles(simd, &keys[range], &queries, head_dim, &mut put),
                KvRows::F16(keys) => float_tiles(simd, &keys[range], &queries, head_dim, &mut put),
                KvRows::Q8(keys) => {
                    expanded.resize(count * head_dim, 0.0);
                    expand(&keys[range.start / 32..range.end / 32], &mut expanded);
                    float_tiles(simd, &expanded, &queries, head_dim, &mut put);
                }
            }
            let mut parts = [Partial::EMPTY; ROWS];
            let mut parts_spilled = Vec::new();
            let parts = if rows <= ROWS {
                &mut parts[..rows]
            } else {
                parts_spilled.resize(rows, Partial::EMPTY);
                &mut parts_spilled[..]
            };
            for (row, part) in parts.iter_mut().enumerate() {
                let scores = &mut scores[row * chunk.count..(row + 1) * chunk.count];
                for entry in first..=last {
                    if !sees(&visible[row / group], entry) {
                        scores[entry - chunk.first] = f32::NEG_INFINITY;
                    }
                }
                let (largest, sum) = Exponentials(scores).run(simd);
                *part = Partial { largest, sum };
            }

            let weights = Weights { scores: &scores, stride: chunk.count, skip, count };
            let at = (kv_head * segment.capacity + first) * head_dim;
            let range = at..at + count * head_dim;
            match segment.values {
                KvRows::F32(v) => weights.mix(simd, &v[range], &mut next_values, head_dim),
                KvRows::F16(v) => weights.mix(simd, &v[range], &mut next_values, head_dim),
                KvRows::Q8(v) => {
                    expanded.resize(count * head_dim, 0.0);
                    expand(&v[range.start / 32..range.end / 32], &mut expanded);
                    weights.mix(simd, &expanded, &mut next_values, head_dim);
                }
            }
            let outputs = values.chunks_exact_mut(head_dim).zip(next_values.chunks_exact(head_dim));
            for ((state, part), (values, next)) in state.iter_mut().zip(parts).zip(outputs) {
                state.join(values, *part, next);
            }
        }

        for (row, (state, values)) in state.iter().zip(values.chunks_exact(head_dim)).enumerate() {
            let token = tokens.start + row / group;
            let index = base + token * heads + kv_head * group + row % group;
            let start = index * (head_dim + 2);
            // SAFETY: a task has the rows of its part, head group and tokens to itself.
            let out = unsafe { partials.part(start..start + head_dim + 2) };
            let (out, ends) = out.split_at_mut(head_dim);
            out.copy_from_slice(values);
            ends.copy_from_slice(&[state.largest, state.sum]);
        }
    }
}

/// exp(score − maximum) of some rows over the entries `skip .. skip + count` of a chunk.
struct Weights<'a> {
    scores: &'a [f32],
    stride: usize,
    skip: usize,
    count: usize,
}

impl Weights<'_> {
    /// `out[row] = Σ_e weight[row][e] · v[e]`, one chain of fused multiply-adds an element.
    #[inline(always)]
    fn mix<S: Simd, E: Element>(&self, simd: S, v: &[E], out: &mut [f32], head_dim: usize) {
        let rows = out.len() / head_dim;
        let mut row = 0;
        while row < rows {
            if row + 4 <= rows {
                self.mix_rows::<S, E, 4>(simd, v, out, row, head_dim);
                row += 4;
            } else {
                self.mix_rows::<S, E, 1>(simd, v, out, row, head_dim);
                row += 1;
            }
        }
    }

    #[inline(always)]
    #[allow(unsafe_code, reason = "vector loads and stores")]
    fn mix_rows<S: Simd, E: Element, const R: usize>(
        &self,
        simd: S,
        v: &[E],
        out: &mut [f32],
        row: usize,
        head_dim: usize,
    ) {
        let weights: [&[f32]; R] = std::array::from_fn(|i| {
            let start = (row + i) * self.stride + self.skip;
            &self.scores[start..start + self.count]
        });
        let pair = 2 * S::LANES;
        let mut d = 0;
        while d + pair <= head_dim {
            let mut sums = [[simd.splat(0.0); 2]; R];
            for (e, v) in v.chunks_exact(head_dim).enumerate() {
                // SAFETY: d + 2 · LANES ≤ head_dim, the length of v.
                let pair = unsafe {
                    let at = v.as_ptr().add(d);
                    [E::load(simd, at), E::load(simd, at.add(S::LANES))]
                };
                for i in 0..R {
                    let weight = simd.splat(weights[i][e]);
                    sums[i][0] = simd.mul_add(weight, pair[0], sums[i][0]);
                    sums[i][1] = simd.mul_add(weight, pair[1], sums[i][1]);
                }
            }
            for i in 0..R {
                let out = &mut out[(row + i) * head_dim + d..][..pair];
                // SAFETY: `out` has 2 · LANES elements.
                unsafe {
                    simd.store(sums[i][0], out.as_mut_ptr());
                    simd.store(sums[i][1], out.as_mut_ptr().add(S::LANES));
                }
            }
            d += pair;
        }
        while d < head_dim {
            let width = S::LANES.min(head_dim - d);
            let mut sums = [simd.splat(0.0); R];
            for (e, v) in v.chunks_exact(head_dim).enumerate() {
                let v = load_partial(simd, &v[d..d + width]);
                for i in 0..R {
                    sums[i] = simd.mul_add(simd.splat(weights[i][e]), v, sums[i]);
                }
            }
            for (i, sum) in sums.into_iter().enumerate() {
                let mut lanes = [0.0_f32; 16];
                // SAFETY: no instruction set has more than 16 lanes.
                unsafe { simd.store(sum, lanes.as_mut_ptr()) };
                let start = (row + i) * head_dim + d;
                out[start..start + width].copy_from_slice(&lanes[..width]);
            }
            d += width;
        }
    }
}
