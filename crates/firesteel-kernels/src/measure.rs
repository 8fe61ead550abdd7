//! Times of kernels, and the read bandwidth that limits them.

use std::hint::black_box;
use std::time::Instant;

use crate::KernelError;
use crate::isa::Isa;
use crate::matmul::{Product, matmul_group};
use crate::matrix::{Format, MatrixView};
use crate::pool::{Disjoint, Pool};
use crate::quantized_rows::QuantizedRows;
use crate::simd::{Kernel, Simd};

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
pub struct Measurement {
    /// The shortest time of one product, quantization of the activations included.
    pub seconds: f64,
    /// Bytes of weights, inputs and outputs that one product touches.
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
) -> Result<Measurement, KernelError> {
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
    let largest = expected.iter().fold(f32::MIN_POSITIVE, |a, b| a.max(b.abs()));
    let difference = expected.iter().zip(&out).fold(0.0_f32, |a, (b, c)| a.max((b - c).abs()));
    Ok(Measurement {
        seconds,
        bytes: bytes + size_of_val(x.as_slice()) + size_of_val(out.as_slice()),
        difference: difference / largest,
    })
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
