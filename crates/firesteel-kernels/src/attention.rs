//! Attention of some query tokens over cached keys and values.

use std::cell::Cell;
use std::ops::Range;

use bytemuck::{Pod, Zeroable};
use half::f16;

use crate::float_tiles::{FloatTiles, widen};
use crate::isa::Isa;
use crate::math::exp;
use crate::ops::Exponentials;
use crate::pool::{Disjoint, Pool};
use crate::simd::{Element, Kernel, Simd, load_partial};
use crate::{KernelError, area, check_length};

/// Entries whose scores are taken together. Partial results of chunks are joined in their order, so
/// it is part of the definition of the result.
const CHUNK: usize = 256;
/// Query rows that pass over a chunk together, at least one token's.
const ROWS: usize = 64;
/// Elements of keys or values that are widened at once, so that they stay in the first-level cache.
const WIDE: usize = 8192;
/// Query rows for which values are read as they are, in one pass.
const FEW: usize = 4;

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
        out.scale = f16::from_f32((largest / 127.0).min(f16::MAX.to_f32()));
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

impl AttentionShape {
    /// Refuses heads that [`attention`] cannot compute.
    ///
    /// # Errors
    ///
    /// One of them is 0, or the query heads are no multiple of the key/value heads.
    pub fn check(self) -> Result<(), KernelError> {
        let Self { heads, kv_heads, head_dim, .. } = self;
        if kv_heads == 0 || heads == 0 || head_dim == 0 || !heads.is_multiple_of(kv_heads) {
            let reason = "heads must be a positive multiple of the key/value heads";
            return Err(KernelError::AttentionShape { heads, kv_heads, head_dim, reason });
        }
        Ok(())
    }
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
    let mut partials = PARTIALS.take();
    if split {
        partials.resize(area("partial results", rows.saturating_mul(parts), width)?, 0.0);
    }
    let shared = Disjoint::new(&mut partials);
    let whole = Disjoint::new(out);
    pool.run(units * parts, &|task| {
        let (unit, part) = (task / parts, task % parts);
        let (kv_head, tile_index) = (unit / tiles, unit % tiles);
        let first = tile_index * tile;
        isa.dispatch(Task {
            arguments,
            chunks: if split { &chunks[part..part + 1] } else { &chunks },
            kv_head,
            tokens: first..queries.min(first + tile),
            target: if split {
                Target::Part { partials: &shared, base: part * rows }
            } else {
                Target::Whole(&whole)
            },
        });
    })?;
    if split {
        isa.dispatch(JoinParts { partials: &partials, parts, head_dim, out });
    }
    PARTIALS.set(partials);
    Ok(())
}

thread_local! {
    /// Memory that is kept from one call to the next, because getting it anew costs page faults.
    static PARTIALS: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
    static SCRATCH: Cell<Scratch> = Cell::default();
}

/// What a task keeps for the next one of its thread.
#[derive(Default)]
struct Scratch {
    /// `[rows, head_dim]`, times the scale.
    queries: Vec<f32>,
    /// `[rows]`
    state: Vec<Partial>,
    /// Of a chunk.
    parts: Vec<Partial>,
    /// `[rows, head_dim]`
    values: Vec<f32>,
    /// Of a chunk.
    next_values: Vec<f32>,
    /// `[rows, entries of a chunk]`
    scores: Vec<f32>,
    /// `[tokens, entries of a chunk]`
    seen: Vec<bool>,
    wide: Vec<f32>,
}

fn filled<T: Clone>(vector: &mut Vec<T>, length: usize, value: T) -> &mut [T] {
    vector.clear();
    vector.resize(length, value);
    vector
}

/// Joins the partial results of every row, in the order of the parts.
struct JoinParts<'a> {
    /// `[parts, rows, head_dim + 2]`
    partials: &'a [f32],
    parts: usize,
    head_dim: usize,
    /// `[rows, head_dim]`
    out: &'a mut [f32],
}

impl Kernel for JoinParts<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let Self { partials, parts, head_dim, out } = self;
        let width = head_dim + 2;
        let rows = out.len() / head_dim;
        for (row, out) in out.chunks_exact_mut(head_dim).enumerate() {
            let mut joined = Partial::EMPTY;
            for part in 0..parts {
                let start = (part * rows + row) * width;
                let (values, ends) = partials[start..start + width].split_at(head_dim);
                joined.join(out, Partial { largest: ends[0], sum: ends[1] }, values);
            }
            joined.finish(out);
        }
    }
}

fn check(arguments: &Attention<'_>, out: usize) -> Result<AttentionShape, KernelError> {
    let shape = arguments.shape;
    let AttentionShape { heads, kv_heads, head_dim, queries } = shape;
    let wrong = |reason| KernelError::AttentionShape { heads, kv_heads, head_dim, reason };
    shape.check()?;
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

    /// Divides by the sum of the weights; zeros if nothing was seen.
    #[inline(always)]
    fn finish(self, values: &mut [f32]) {
        if self.sum == 0.0 {
            values.fill(0.0);
            return;
        }
        let factor = 1.0 / self.sum;
        values.iter_mut().for_each(|value| *value *= factor);
    }
}

/// Where a task writes.
#[derive(Clone, Copy)]
enum Target<'a> {
    /// Results: `[queries, heads, head_dim]`.
    Whole(&'a Disjoint<'a, f32>),
    /// Results to be joined: rows from `base` of `[parts, queries, heads, head_dim + 2]`.
    Part { partials: &'a Disjoint<'a, f32>, base: usize },
}

struct Task<'a> {
    arguments: &'a Attention<'a>,
    chunks: &'a [Chunk],
    kv_head: usize,
    tokens: Range<usize>,
    target: Target<'a>,
}

impl Kernel for Task<'_> {
    type Output = ();

    #[inline(always)]
    #[allow(unsafe_code, reason = "results of different tasks are disjoint")]
    fn run<S: Simd>(self, simd: S) {
        let Self { arguments, chunks, kv_head, tokens, target } = self;
        let AttentionShape { heads, kv_heads, head_dim, .. } = arguments.shape;
        let group = heads / kv_heads;
        let rows = tokens.len() * group;
        let mut scratch = SCRATCH.take();
        scratch.queries.clear();
        for token in tokens.clone() {
            let start = (token * heads + kv_head * group) * head_dim;
            let queries = &arguments.queries[start..start + group * head_dim];
            scratch.queries.extend(queries.iter().map(|value| value * arguments.scale));
        }
        let queries = &scratch.queries[..];
        let state = filled(&mut scratch.state, rows, Partial::EMPTY);
        let parts = filled(&mut scratch.parts, rows, Partial::EMPTY);
        let values = filled(&mut scratch.values, rows * head_dim, 0.0);
        let next_values = filled(&mut scratch.next_values, rows * head_dim, 0.0);
        let scores = filled(&mut scratch.scores, rows * CHUNK, 0.0);
        let seen = filled(&mut scratch.seen, tokens.len() * CHUNK, false);
        let wide = &mut scratch.wide;

        for chunk in chunks {
            let Some(segment) = arguments.segments.get(chunk.segment) else { continue };
            let visible = &arguments.visible[tokens.clone()];
            let seen = &mut seen[..tokens.len() * chunk.count];
            let Some(entries) = chunk.look(&segment.positions, visible, seen) else { continue };

            let at = kv_head * segment.capacity + chunk.first + entries.start;
            let range = at * head_dim..(at + entries.len()) * head_dim;
            // Scores keep their place in the chunk, so sums have the same order whatever is seen.
            let mut put = |row: usize, entry: usize, values: &[f32]| {
                let start = row * chunk.count + entries.start + entry;
                scores[start..start + values.len()].copy_from_slice(values);
            };
            let (x, columns) = (queries, head_dim);
            match segment.keys {
                KvRows::F32(keys) => {
                    let w = &keys[range.clone()];
                    simd.vectorize(FloatTiles { w, x, columns, write: &mut put });
                }
                KvRows::F16(keys) => {
                    let w = &keys[range.clone()];
                    simd.vectorize(FloatTiles { w, x, columns, write: &mut put });
                }
                KvRows::Q8(keys) => {
                    let keys = &keys[range.start / 32..range.end / 32];
                    let block = wide_rows(head_dim);
                    for (index, keys) in keys.chunks(block * head_dim / 32).enumerate() {
                        wide.resize(keys.len() * 32, 0.0);
                        expand(keys, wide);
                        let mut put = |row: usize, entry: usize, values: &[f32]| {
                            put(row, index * block + entry, values);
                        };
                        simd.vectorize(FloatTiles { w: wide, x, columns, write: &mut put });
                    }
                }
            }
            for (row, part) in parts.iter_mut().enumerate() {
                let scores = &mut scores[row * chunk.count..(row + 1) * chunk.count];
                let start = row / group * chunk.count;
                for (score, seen) in scores.iter_mut().zip(&seen[start..start + chunk.count]) {
                    *score = if *seen { *score } else { f32::NEG_INFINITY };
                }
                let (largest, sum) = Exponentials(scores).run(simd);
                *part = Partial { largest, sum };
            }

            let mut weights =
                Weights { scores, stride: chunk.count, first: entries.start, wide, head_dim };
            next_values.fill(0.0);
            match segment.values {
                KvRows::F32(v) => weights.mix(simd, &v[range], next_values),
                KvRows::F16(v) => weights.mix(simd, &v[range], next_values),
                KvRows::Q8(v) => {
                    weights.mix_blocks(simd, &v[range.start / 32..range.end / 32], next_values)
                }
            }
            let outputs = values.chunks_exact_mut(head_dim).zip(next_values.chunks_exact(head_dim));
            for ((state, part), (values, next)) in state.iter_mut().zip(&*parts).zip(outputs) {
                state.join(values, *part, next);
            }
        }

        for (row, (state, values)) in state.iter().zip(values.chunks_exact(head_dim)).enumerate() {
            let index = (tokens.start + row / group) * heads + kv_head * group + row % group;
            match target {
                Target::Whole(out) => {
                    let start = index * head_dim;
                    // SAFETY: a task has the rows of its head group and tokens to itself.
                    let out = unsafe { out.part(start..start + head_dim) };
                    out.copy_from_slice(values);
                    state.finish(out);
                }
                Target::Part { partials, base } => {
                    let start = (base + index) * (head_dim + 2);
                    // SAFETY: as above, and its part too.
                    let out = unsafe { partials.part(start..start + head_dim + 2) };
                    let (out, ends) = out.split_at_mut(head_dim);
                    out.copy_from_slice(values);
                    ends.copy_from_slice(&[state.largest, state.sum]);
                }
            }
        }
        SCRATCH.set(scratch);
    }
}

impl Chunk {
    /// Which entries each token sees, `[tokens, count]`, and the range from the first to the last
    /// that any sees; `None` if none does.
    #[inline(always)]
    fn look(
        &self,
        positions: &Positions<'_>,
        visible: &[Range<usize>],
        seen: &mut [bool],
    ) -> Option<Range<usize>> {
        let mut union = self.count..0;
        for (visible, seen) in visible.iter().zip(seen.chunks_exact_mut(self.count)) {
            match positions {
                Positions::Consecutive(first) => {
                    let first = first.saturating_add(self.first);
                    let start = visible.start.saturating_sub(first).min(self.count);
                    let end = visible.end.saturating_sub(first).clamp(start, self.count);
                    seen[..start].fill(false);
                    seen[start..end].fill(true);
                    seen[end..].fill(false);
                }
                Positions::Each(all) => {
                    let all = &all[self.first..self.first + self.count];
                    for (seen, position) in seen.iter_mut().zip(all) {
                        *seen = *position >= visible.start && *position < visible.end;
                    }
                }
            }
            if let Some(first) = seen.iter().position(|seen| *seen) {
                let last = seen.iter().rposition(|seen| *seen).unwrap_or(first);
                union = union.start.min(first)..union.end.max(last + 1);
            }
        }
        (union.start < union.end).then_some(union)
    }
}

/// Entries that are widened at once.
#[inline(always)]
fn wide_rows(head_dim: usize) -> usize {
    (WIDE / head_dim).max(1)
}

/// exp(score − maximum) of some rows over the entries of a chunk, from `first`.
struct Weights<'a> {
    scores: &'a [f32],
    stride: usize,
    first: usize,
    wide: &'a mut Vec<f32>,
    head_dim: usize,
}

impl Weights<'_> {
    /// `out[row] += Σ_e weight[row][e] · v[e]`, one chain of fused multiply-adds an element.
    #[inline(always)]
    fn mix<S: Simd, E: Element>(&mut self, simd: S, v: &[E], out: &mut [f32]) {
        let block = wide_rows(self.head_dim);
        let direct = out.len() <= FEW * self.head_dim;
        for (index, v) in v.chunks(block * self.head_dim).enumerate() {
            if direct {
                self.mix_entries(simd, Entries { v, first: index * block, direct }, out);
                continue;
            }
            // Whole vectors are written.
            self.wide.resize(v.len().next_multiple_of(S::LANES), 0.0);
            widen(simd, v, self.wide);
            let v = &self.wide[..v.len()];
            self.mix_entries(simd, Entries { v, first: index * block, direct }, out);
        }
    }

    /// The same for values in 8 bits.
    #[inline(always)]
    fn mix_blocks<S: Simd>(&mut self, simd: S, v: &[KvBlock], out: &mut [f32]) {
        let block = wide_rows(self.head_dim);
        for (index, v) in v.chunks(block * self.head_dim / 32).enumerate() {
            self.wide.resize(v.len() * 32, 0.0);
            expand(v, self.wide);
            let v = &self.wide[..];
            self.mix_entries(simd, Entries { v, first: index * block, direct: false }, out);
        }
    }

    /// The same for some entries.
    #[inline(always)]
    fn mix_entries<S: Simd, E: Element>(&self, simd: S, entries: Entries<'_, E>, out: &mut [f32]) {
        simd.vectorize(Mix { weights: self, entries, out });
    }

    /// The same for rows `row .. row + R`.
    #[inline(always)]
    fn mix_some<S: Simd, E: Element, const R: usize>(
        &self,
        simd: S,
        entries: Entries<'_, E>,
        row: usize,
        out: &mut [f32],
    ) {
        let head_dim = self.head_dim;
        let start = row * self.stride + self.first + entries.first;
        let length = (R - 1) * self.stride + entries.v.len() / head_dim;
        let rows = Rows {
            entries,
            weights: &self.scores[start..start + length],
            stride: self.stride,
            head_dim,
            out: &mut out[row * head_dim..(row + R) * head_dim],
        };
        rows.mix::<S, R>(simd);
    }
}

/// Some entries mixed into all rows; a kernel of its own, so that all callers share its code.
struct Mix<'a, 'w, E> {
    weights: &'a Weights<'w>,
    entries: Entries<'a, E>,
    out: &'a mut [f32],
}

impl<E: Element> Kernel for Mix<'_, '_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { weights, entries, out } = self;
        let rows = out.len() / weights.head_dim;
        let mut row = 0;
        while row < rows {
            if row + 4 <= rows {
                weights.mix_some::<S, E, 4>(simd, entries, row, out);
                row += 4;
            } else {
                weights.mix_some::<S, E, 1>(simd, entries, row, out);
                row += 1;
            }
        }
    }
}

/// Some values of a chunk.
#[derive(Clone, Copy)]
struct Entries<'a, E> {
    v: &'a [E],
    /// Where they start among the chunk's weights.
    first: usize,
    /// Whether they are read where they are cached, the next ones behind them.
    direct: bool,
}

/// Some rows over some entries.
struct Rows<'a, E> {
    entries: Entries<'a, E>,
    /// Weight e of row i is at `i · stride + e`.
    weights: &'a [f32],
    stride: usize,
    head_dim: usize,
    /// `[rows, head_dim]`
    out: &'a mut [f32],
}

impl<E: Element> Rows<'_, E> {
    /// All columns of R rows.
    #[inline(always)]
    fn mix<S: Simd, const R: usize>(mut self, simd: S) {
        let mut d = 0;
        if S::LANES == 16 {
            // Twice the registers.
            while d + 4 * S::LANES <= self.head_dim {
                self.columns::<S, R, 4>(simd, d);
                d += 4 * S::LANES;
            }
        }
        while d + 2 * S::LANES <= self.head_dim {
            self.columns::<S, R, 2>(simd, d);
            d += 2 * S::LANES;
        }
        if d < self.head_dim {
            self.rest::<S, R>(simd, d);
        }
    }

    /// Columns `d .. d + V · LANES`.
    #[inline(always)]
    #[allow(unsafe_code, reason = "vector loads and stores")]
    fn columns<S: Simd, const R: usize, const V: usize>(&mut self, simd: S, d: usize) {
        let Entries { v, direct, .. } = self.entries;
        let entries = v.len() / self.head_dim;
        let fits = d + V * S::LANES <= self.head_dim
            && self.out.len() >= R * self.head_dim
            && self.weights.len() >= (R - 1) * self.stride + entries;
        assert!(fits, "columns {d} of {R} rows");
        // SAFETY: columns up to d + V · LANES are in every entry of `v` and row of `out`, and every
        // row has a weight for every entry.
        unsafe {
            let out = self.out.as_mut_ptr().add(d);
            let at = |i: usize, j: usize| out.add(i * self.head_dim + j * S::LANES);
            let mut sums: [[S::Vector; V]; R] =
                std::array::from_fn(|i| std::array::from_fn(|j| simd.load_f32(at(i, j))));
            let mut entry = v.as_ptr().wrapping_add(d);
            let mut weights = self.weights.as_ptr();
            // A line of the entries that follow for every entry here.
            let offset = d / (V * S::LANES) * entries * 64;
            let ask = direct && offset < size_of_val(v);
            let mut ahead = v.as_ptr().wrapping_add(v.len()).wrapping_byte_add(offset);
            for _ in 0..entries {
                if ask {
                    simd.prefetch(ahead);
                    ahead = ahead.wrapping_byte_add(64);
                }
                let values: [S::Vector; V] =
                    std::array::from_fn(|j| E::load(simd, entry.add(j * S::LANES)));
                for (i, sums) in sums.iter_mut().enumerate() {
                    let weight = simd.splat(*weights.add(i * self.stride));
                    for (sum, value) in sums.iter_mut().zip(values) {
                        *sum = simd.mul_add(weight, value, *sum);
                    }
                }
                entry = entry.wrapping_add(self.head_dim);
                weights = weights.wrapping_add(1);
            }
            for (i, sums) in sums.into_iter().enumerate() {
                for (j, sum) in sums.into_iter().enumerate() {
                    simd.store(sum, at(i, j));
                }
            }
        }
    }

    /// Columns from `start`, in vectors that may be partial.
    #[inline(always)]
    #[allow(unsafe_code, reason = "a store to an array that is large enough")]
    fn rest<S: Simd, const R: usize>(&mut self, simd: S, start: usize) {
        for d in (start..self.head_dim).step_by(S::LANES) {
            let width = S::LANES.min(self.head_dim - d);
            for i in 0..R {
                let out = &mut self.out[i * self.head_dim + d..][..width];
                let mut sum = load_partial(simd, out);
                let weights = &self.weights[i * self.stride..];
                for (v, weight) in self.entries.v.chunks_exact(self.head_dim).zip(weights) {
                    let v = load_partial(simd, &v[d..d + width]);
                    sum = simd.mul_add(simd.splat(*weight), v, sum);
                }
                let mut lanes = [0.0_f32; 16];
                // SAFETY: no instruction set has more than 16 lanes.
                unsafe { simd.store(sum, lanes.as_mut_ptr()) };
                out.copy_from_slice(&lanes[..width]);
            }
        }
    }
}
