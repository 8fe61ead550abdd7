//! Times of kernels, and the read bandwidth that limits them.

use std::hint::black_box;
use std::ops::Range;
use std::time::Instant;

use half::f16;

use crate::attention::{
    Attention, AttentionShape, KvBlock, KvRows, Positions, Segment, attention, dequantize_kv,
    quantize_kv,
};
use crate::isa::Isa;
use crate::matmul::{Product, matmul_group};
use crate::matrix::{Format, MatrixView};
use crate::ops;
use crate::pool::{Disjoint, Pool};
use crate::quantized_rows::QuantizedRows;
use crate::simd::{Kernel, Simd};
use crate::{KernelError, area};

/// M activation rows, K columns, N weight rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Activation rows.
    pub m: usize,
    /// Columns.
    pub k: usize,
    /// Weight rows.
    pub n: usize,
}

/// A kernel that can be timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// What the weights are.
    pub format: Format,
    /// The instruction set.
    pub isa: Isa,
}

/// What was measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KernelMeasurement {
    /// The shortest time of one product, quantization of the activations included, or of one
    /// operation.
    pub seconds: f64,
    /// Bytes of weights or caches, inputs and outputs that it touches.
    pub bytes: usize,
    /// The largest difference from the first instruction set's result, over the largest magnitude.
    pub difference: f32,
}

/// Every kernel of this CPU, scalar first.
#[must_use]
pub fn kernels() -> Vec<Entry> {
    let all = Isa::available();
    Format::ALL
        .into_iter()
        .flat_map(|format| all.iter().map(move |isa| Entry { format, isa: *isa }))
        .collect()
}

/// Elements that a task of the bandwidth measurement reads.
const PART: usize = 1 << 17;
/// Bytes that lie between a read and the memory that is asked for ahead of it.
const AHEAD: usize = 4096;

/// Bytes a second at which all threads of the pool together read memory, over `bytes` bytes, which
/// should be several times the last cache: the best of three passes of each of some patterns, a
/// task reading one, two, four or eight streams at a time, because which is the fastest depends on
/// the CPU's prefetchers.
///
/// # Errors
///
/// A task panicked.
pub fn read_bandwidth(pool: &Pool, bytes: usize) -> Result<f64, KernelError> {
    // Written, so that the pages are not all the one page of zeros.
    let data: Vec<u64> = (0..bytes.div_ceil(8).max(1) as u64).collect();
    let isa = Isa::named(None)?;
    let mut sums = vec![0_u64; data.len().div_ceil(PART)];
    let mut best = f64::INFINITY;
    for streams in [1, 2, 4, 8].into_iter().cycle().take(12) {
        let shared = Disjoint::new(&mut sums);
        let start = Instant::now();
        pool.run(data.len().div_ceil(PART), &|task| {
            let part = &data[task * PART..data.len().min((task + 1) * PART)];
            store_sum(&shared, task, isa.dispatch(Read { part, streams }));
        })?;
        best = best.min(start.elapsed().as_secs_f64());
        black_box(&sums);
    }
    Ok(size_of_val(data.as_slice()) as f64 / best)
}

/// Reads everything with the widest loads and joins it, so that no load is left out.
struct Read<'a> {
    part: &'a [u64],
    streams: usize,
}

impl Kernel for Read<'_> {
    type Output = u64;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> u64 {
        let mut lanes = [0_u64; 32];
        let mut read = |chunk: &[u64; 32]| {
            for line in (0..size_of_val(chunk)).step_by(64) {
                simd.prefetch(chunk.as_ptr().wrapping_byte_add(AHEAD + line));
            }
            for (lane, value) in lanes.iter_mut().zip(chunk) {
                *lane ^= value;
            }
        };
        let (chunks, _) = self.part.as_chunks::<32>();
        let length = chunks.len() / self.streams;
        let (streams, rest) = chunks.split_at(length * self.streams);
        for i in 0..length {
            (0..self.streams).for_each(|stream| read(&streams[stream * length + i]));
        }
        rest.iter().for_each(read);
        lanes.iter().fold(0, |a, b| a ^ b)
    }
}

#[allow(unsafe_code, reason = "one element a task")]
fn store_sum(sums: &Disjoint<'_, u64>, task: usize, value: u64) {
    // SAFETY: every task has its own element.
    if let Some(sum) = unsafe { sums.part(task..task + 1) }.first_mut() {
        *sum = value;
    }
}

/// Times one kernel: the best of `repeats` products, each with other weights of the same shape where
/// `copies` is above 1, so that caches do not serve what a model would read from memory.
///
/// # Errors
///
/// The shape does not suit the format, or a task panicked.
pub fn time(
    pool: &Pool,
    entry: Entry,
    shape: Shape,
    repeats: usize,
    copies: usize,
) -> Result<KernelMeasurement, KernelError> {
    let Entry { format, isa } = entry;
    let Shape { m, k, n } = shape;
    let bytes = format.packed_bytes(n, k)?;
    let weights: Vec<Vec<u16>> = (0..copies.max(1)).map(|_| pattern(format, bytes)).collect();
    let mut random = Random(1);
    let x: Vec<f32> = (0..m * k).map(|_| random.unit()).collect();
    let mut out = vec![0.0; m * n];
    let mut quantized = QuantizedRows::new();
    let mut run = |isa, weights: &[u16], out: &mut [f32]| {
        let view = MatrixView::new(format, n, k, &bytemuck::cast_slice(weights)[..bytes])?;
        let start = Instant::now();
        if format.is_quantized() {
            quantized.quantize(isa, pool, &x, m, k)?;
        }
        matmul_group(isa, pool, &x, &quantized, &mut [Product { weights: view, out }])?;
        Ok::<f64, KernelError>(start.elapsed().as_secs_f64())
    };
    let mut seconds = f64::INFINITY;
    for repeat in 0..repeats.max(1) {
        seconds = seconds.min(run(isa, &weights[repeat % weights.len()], &mut out)?);
    }
    run(isa, &weights[0], &mut out)?;
    let mut expected = vec![0.0; m * n];
    run(Isa::named(Some("scalar"))?, &weights[0], &mut expected)?;
    Ok(KernelMeasurement {
        seconds,
        bytes: bytes + size_of_val(x.as_slice()) + size_of_val(out.as_slice()),
        difference: difference(&expected, &out),
    })
}

/// A kernel other than a product that can be timed. Those that do not take an [`Isa`] are compiled
/// once, for every CPU of the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Operation {
    /// Attention over an f32 cache.
    AttentionF32,
    /// Attention over an f16 cache.
    AttentionF16,
    /// Attention over an 8-bit cache.
    AttentionQ8,
    /// [`quantize_kv`]
    QuantizeKv,
    /// [`dequantize_kv`]
    DequantizeKv,
    /// Activations to int8.
    Quantize,
    /// [`ops::rms_norm`]
    RmsNorm,
    /// [`ops::rope`], a head a row
    Rope,
    /// [`ops::gated_gelu`]
    GatedGelu,
    /// [`ops::gated_silu`]
    GatedSilu,
    /// [`ops::sigmoid`]
    Sigmoid,
    /// [`ops::softmax`]
    Softmax,
    /// [`ops::weigh`]
    Weigh,
    /// [`ops::add`]
    Add,
    /// [`ops::scale`]
    Scale,
}

impl Operation {
    /// All of them.
    pub const ALL: [Self; 15] = [
        Self::AttentionF32,
        Self::AttentionF16,
        Self::AttentionQ8,
        Self::QuantizeKv,
        Self::DequantizeKv,
        Self::Quantize,
        Self::RmsNorm,
        Self::Rope,
        Self::GatedGelu,
        Self::GatedSilu,
        Self::Sigmoid,
        Self::Softmax,
        Self::Weigh,
        Self::Add,
        Self::Scale,
    ];

    /// Whether it is attention, over one of the cache types.
    #[must_use]
    pub fn is_attention(self) -> bool {
        matches!(self, Self::AttentionF32 | Self::AttentionF16 | Self::AttentionQ8)
    }

    /// The instruction sets of this CPU that it has kernels for, scalar first; scalar alone for what
    /// is the same code on all of them.
    #[must_use]
    pub fn isas(self) -> Vec<Isa> {
        let mut isas = Isa::available();
        if matches!(
            self,
            Self::QuantizeKv
                | Self::DequantizeKv
                | Self::RmsNorm
                | Self::Rope
                | Self::Add
                | Self::Scale
        ) {
            isas.truncate(1);
        }
        isas
    }

    /// What its columns have to be a multiple of, or the elements of a head for attention.
    #[must_use]
    pub fn block_columns(self) -> usize {
        match self {
            Self::AttentionQ8 | Self::QuantizeKv | Self::DequantizeKv | Self::Quantize => 32,
            Self::Rope => 2,
            _ => 1,
        }
    }
}

impl std::fmt::Display for Operation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::AttentionF32 => "attention F32",
            Self::AttentionF16 => "attention F16",
            Self::AttentionQ8 => "attention Q8",
            Self::QuantizeKv => "quantize kv",
            Self::DequantizeKv => "dequantize kv",
            Self::Quantize => "quantize",
            Self::RmsNorm => "rms norm",
            Self::Rope => "rope",
            Self::GatedGelu => "gated gelu",
            Self::GatedSilu => "gated silu",
            Self::Sigmoid => "sigmoid",
            Self::Softmax => "softmax",
            Self::Weigh => "weigh",
            Self::Add => "add",
            Self::Scale => "scale",
        })
    }
}

/// What an operation is timed on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OperandSize {
    /// Heads and query tokens of attention.
    pub attention: AttentionShape,
    /// Cached entries that the last query sees; each query before it sees one less.
    pub entries: usize,
    /// Rows of the other operations.
    pub rows: usize,
    /// Columns of the other operations.
    pub columns: usize,
}

/// Times an operation: the best of `repeats`, attention with other caches each time where `copies` is
/// above 1.
///
/// # Errors
///
/// The size does not suit the operation, or a task panicked.
pub fn time_operation(
    pool: &Pool,
    (operation, isa): (Operation, Isa),
    size: OperandSize,
    repeats: usize,
    copies: usize,
) -> Result<KernelMeasurement, KernelError> {
    let mut subject = Subject::new(operation, size, copies.max(1))?;
    let mut seconds = f64::INFINITY;
    for repeat in 0..repeats.max(1) {
        seconds = seconds.min(subject.run(pool, isa, repeat)?);
    }
    subject.run(pool, isa, 0)?;
    let actual = subject.out.clone();
    subject.run(pool, Isa::named(Some("scalar"))?, 0)?;
    Ok(KernelMeasurement {
        seconds,
        bytes: subject.bytes(),
        difference: difference(&subject.out, &actual),
    })
}

/// An operation and what it reads and writes.
struct Subject {
    operation: Operation,
    size: OperandSize,
    values: Vec<f32>,
    out: Vec<f32>,
    quantized: QuantizedRows,
    /// The values as 8-bit keys or values.
    blocks: Vec<KvBlock>,
    visible: Vec<Range<usize>>,
    /// Keys and values, `[kv_heads, entries, head_dim]` each.
    caches: Vec<[Cache; 2]>,
}

const NO_BLOCK: KvBlock = KvBlock { scale: f16::ZERO, values: [0; 32] };
/// What is added to a mean square.
const EPSILON: f32 = 1e-6;

enum Cache {
    F32(Vec<f32>),
    F16(Vec<f16>),
    Q8(Vec<KvBlock>),
}

impl Cache {
    fn new(operation: Operation, values: &[f32]) -> Result<Self, KernelError> {
        Ok(match operation {
            Operation::AttentionF16 => {
                Self::F16(values.iter().map(|value| f16::from_f32(*value)).collect())
            }
            Operation::AttentionQ8 => {
                let mut blocks = vec![NO_BLOCK; values.len() / 32];
                quantize_kv(values, &mut blocks)?;
                Self::Q8(blocks)
            }
            _ => Self::F32(values.to_vec()),
        })
    }

    fn rows(&self) -> KvRows<'_> {
        match self {
            Self::F32(values) => KvRows::F32(values),
            Self::F16(values) => KvRows::F16(values),
            Self::Q8(blocks) => KvRows::Q8(blocks),
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::F32(values) => size_of_val(values.as_slice()),
            Self::F16(values) => size_of_val(values.as_slice()),
            Self::Q8(blocks) => size_of_val(blocks.as_slice()),
        }
    }
}

impl Subject {
    fn new(operation: Operation, size: OperandSize, copies: usize) -> Result<Self, KernelError> {
        let OperandSize { attention: shape, entries, rows, columns } = size;
        let mut random = Random(1);
        let mut units = |rows, columns| {
            let count = area("an operation", rows, columns)?;
            Ok::<Vec<f32>, KernelError>((0..count).map(|_| random.unit()).collect())
        };
        let mut caches = Vec::new();
        let mut visible = Vec::new();
        let values = match operation {
            operation if operation.is_attention() => {
                let row = area("heads", shape.kv_heads, shape.head_dim)?;
                let sides = [units(entries, row)?, units(entries, row)?];
                for _ in 0..copies {
                    let [keys, values] = &sides;
                    caches.push([Cache::new(operation, keys)?, Cache::new(operation, values)?]);
                }
                let behind = |query: usize| entries.saturating_sub(shape.queries - 1 - query);
                visible.extend((0..shape.queries).map(|query| 0..behind(query)));
                units(shape.queries, area("heads", shape.heads, shape.head_dim)?)?
            }
            _ => units(rows, columns)?,
        };
        let mut blocks = Vec::new();
        if matches!(operation, Operation::QuantizeKv | Operation::DequantizeKv) {
            blocks.resize(values.len() / 32, NO_BLOCK);
            quantize_kv(&values, &mut blocks)?;
        }
        let (out, quantized) = (values.clone(), QuantizedRows::new());
        Ok(Self { operation, size, values, out, quantized, blocks, visible, caches })
    }

    fn bytes(&self) -> usize {
        let cache = self.caches.first().map_or(0, |[keys, values]| keys.bytes() + values.bytes());
        let (values, blocks) =
            (size_of_val(self.values.as_slice()), size_of_val(self.blocks.as_slice()));
        let second = match self.operation {
            Operation::Quantize => self.quantized.bytes(),
            Operation::QuantizeKv | Operation::DequantizeKv => blocks,
            _ => values,
        };
        cache + values + second
    }

    fn run(&mut self, pool: &Pool, isa: Isa, repeat: usize) -> Result<f64, KernelError> {
        let OperandSize { attention: shape, entries, rows, columns } = self.size;
        let (values, out) = (&self.values, &mut self.out);
        // What works in place starts from the same values.
        out.copy_from_slice(values);
        let start = Instant::now();
        match self.operation {
            Operation::AttentionF32 | Operation::AttentionF16 | Operation::AttentionQ8 => {
                let Some([keys, cached]) = self.caches.get(repeat % self.caches.len()) else {
                    return Ok(0.0);
                };
                let segment = Segment {
                    keys: keys.rows(),
                    values: cached.rows(),
                    entries,
                    capacity: entries,
                    positions: Positions::Consecutive(0),
                };
                let arguments = Attention {
                    shape,
                    scale: 1.0 / (shape.head_dim as f32).sqrt(),
                    queries: values,
                    segments: &[segment],
                    visible: &self.visible,
                };
                attention(isa, pool, &arguments, out)?;
            }
            Operation::QuantizeKv => quantize_kv(values, &mut self.blocks)?,
            Operation::DequantizeKv => dequantize_kv(&self.blocks, out)?,
            Operation::Quantize => self.quantized.quantize(isa, pool, values, rows, columns)?,
            Operation::RmsNorm => {
                let weights = values.get(..columns).unwrap_or_default();
                ops::rms_norm(values, weights, EPSILON, out)?;
            }
            Operation::Rope => {
                let cos = values.get(..columns / 2).unwrap_or_default();
                let sin = values.get(columns / 2..columns).unwrap_or_default();
                ops::rope(out, columns, cos, sin)?;
            }
            Operation::GatedGelu => ops::gated_gelu(isa, out, values)?,
            Operation::GatedSilu => ops::gated_silu(isa, out, values)?,
            Operation::Sigmoid => ops::sigmoid(isa, out),
            Operation::Softmax => ops::softmax(isa, out, columns)?,
            Operation::Weigh => {
                black_box(ops::weigh(isa, values, 1.0, 1.0, out));
            }
            Operation::Add => ops::add(out, values)?,
            Operation::Scale => ops::scale(out, 0.5),
        }
        let seconds = start.elapsed().as_secs_f64();
        match self.operation {
            Operation::Quantize => self.quantized.values(out),
            Operation::QuantizeKv => dequantize_kv(&self.blocks, out)?,
            _ => {}
        }
        Ok(seconds)
    }
}

/// The largest difference, over the largest magnitude of the expected values.
fn difference(expected: &[f32], actual: &[f32]) -> f32 {
    let largest = expected.iter().fold(f32::MIN_POSITIVE, |a, b| a.max(b.abs()));
    let difference = expected.iter().zip(actual).fold(0.0_f32, |a, (b, c)| a.max((b - c).abs()));
    difference / largest
}

/// Bytes that are finite weights of any format: every 16 bits are a small f16 and a small bf16.
fn pattern(format: Format, bytes: usize) -> Vec<u16> {
    let mut random = Random(7);
    if format == Format::F32 {
        let values: Vec<f32> = (0..bytes / 4).map(|_| random.unit()).collect();
        return bytemuck::cast_slice(&values).to_vec();
    }
    (0..bytes.div_ceil(2)).map(|_| (random.next() >> 48) as u16 & 0x9FFF | 0x1000).collect()
}

/// A generator of Marsaglia's xorshift kind.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// −1 to 1.
    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
    }
}
