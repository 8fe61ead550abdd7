//! Products of activation rows with weight matrices.

use crate::isa::Isa;
use crate::matrix::{Data, Format, MatrixView};
use crate::pool::{Disjoint, Pool};
use crate::quantized_rows::{BLOCK, QuantizedRows};
use crate::simd::{Element, Kernel, QuantizedTile, STRIP, Simd, load_partial};
use crate::{KernelError, area, check_length};

/// Bytes of activations that should stay in the second-level cache while weights pass.
const PANEL_BYTES: usize = 256 << 10;
/// Activation rows of one tile of a quantized product, at most.
const MAX_PANEL: usize = 64;
/// Weight rows of one task, at most.
const MAX_TASK_ROWS: usize = 128;

/// One product of a group: `out[m][n] = Σ_k weights[n][k] · x[m][k]`.
#[derive(Debug)]
pub struct Product<'a> {
    /// `[N, K]`
    pub weights: MatrixView<'a>,
    /// `[M, N]`
    pub out: &'a mut [f32],
}

/// `out[m][n] = Σ_k weights[n][k] · x[m][k]` for x `[M, K]` and out `[M, N]`. Activations are quantized per block of 32 if the weights are quantized.
///
/// # Errors
///
/// `x` or `out` has the wrong length, or a task panicked.
pub fn matmul(
    isa: Isa,
    pool: &Pool,
    weights: MatrixView<'_>,
    x: &[f32],
    out: &mut [f32],
) -> Result<(), KernelError> {
    let mut quantized = QuantizedRows::new();
    let rows = x.len().checked_div(weights.columns).unwrap_or(0);
    if weights.format.is_quantized() {
        quantized.quantize(isa, pool, x, rows, weights.columns)?;
    }
    matmul_group(isa, pool, x, &quantized, &mut [Product { weights, out }])
}

/// Several products with the same activations in one pass of the pool, so with one barrier.
///
/// `x` is `[M, K]` and `quantized` the same rows; float weights read the first and quantized weights
/// the second. A side that no product reads may be empty.
///
/// # Errors
///
/// A length does not agree with the others, or a task panicked.
pub fn matmul_group(
    isa: Isa,
    pool: &Pool,
    x: &[f32],
    quantized: &QuantizedRows,
    products: &mut [Product<'_>],
) -> Result<(), KernelError> {
    let mut parts = Vec::with_capacity(products.len());
    let mut tasks = 0;
    for Product { weights, out } in products {
        let (weights, columns) = (*weights, weights.columns);
        let rows = if weights.format.is_quantized() {
            check_length("columns of quantized activations", columns, quantized.columns())?;
            quantized.rows()
        } else {
            let rows = x.len().checked_div(columns).unwrap_or(0);
            check_length("activations", rows * columns, x.len())?;
            rows
        };
        check_length("the outputs of a product", area("outputs", rows, weights.rows)?, out.len())?;
        if out.is_empty() {
            continue;
        }
        let unit = 2 * STRIP;
        let per_task = weights.rows.div_ceil(pool.threads() * 8).next_multiple_of(unit);
        let per_task = per_task.min(MAX_TASK_ROWS);
        let first_task = tasks;
        tasks += weights.rows.div_ceil(per_task);
        parts.push(Part { weights, rows, per_task, first_task, out: Disjoint::new(out) });
    }
    pool.run(tasks, &|task| {
        let Some(part) = parts.iter().rev().find(|part| part.first_task <= task) else { return };
        let start = (task - part.first_task) * part.per_task;
        let range = start..part.weights.rows.min(start + part.per_task);
        let (first, count, rows, columns) =
            (range.start, range.len(), part.rows, part.weights.columns);
        let range = first * columns..(first + count) * columns;
        let target = Target { out: &part.out, columns: part.weights.rows, first, count };
        match part.weights.data {
            Data::F32(w) => isa.dispatch(FloatTask { w: &w[range], x, rows, columns, target }),
            Data::F16(w) => isa.dispatch(FloatTask { w: &w[range], x, rows, columns, target }),
            Data::BF16(w) => isa.dispatch(FloatTask { w: &w[range], x, rows, columns, target }),
            Data::Strips(strips) => {
                let format = part.weights.format;
                isa.dispatch(QuantizedTask { format, strips, quantized, target });
            }
        }
    })
}

/// A product with its share of the tasks.
struct Part<'a> {
    weights: MatrixView<'a>,
    rows: usize,
    per_task: usize,
    first_task: usize,
    out: Disjoint<'a, f32>,
}

/// The output columns of one task.
struct Target<'a> {
    out: &'a Disjoint<'a, f32>,
    /// Of the whole output.
    columns: usize,
    first: usize,
    count: usize,
}

impl Target<'_> {
    /// Writes columns `first ..` of the task's to an output row; those beyond the task are dropped.
    #[inline(always)]
    #[allow(unsafe_code, reason = "output columns of different tasks are disjoint")]
    fn write(&self, row: usize, first: usize, values: &[f32]) {
        let count = values.len().min(self.count - first);
        let start = row * self.columns + self.first + first;
        // SAFETY: the range lies in the columns of this task, which no other task writes, and this
        // part is dropped before the task makes another.
        let out = unsafe { self.out.part(start..start + count) };
        out.copy_from_slice(&values[..count]);
    }
}

struct QuantizedTask<'a> {
    format: Format,
    /// Of the whole matrix.
    strips: &'a [u8],
    quantized: &'a QuantizedRows,
    target: Target<'a>,
}

impl Kernel for QuantizedTask<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { format, strips, quantized, target } = self;
        let columns = quantized.columns();
        let strip_bytes = columns / format.block_columns() * format.block_bytes() * STRIP;
        let strip = |index: usize| &strips[index * strip_bytes..(index + 1) * strip_bytes];
        let row_bytes = columns / BLOCK * size_of::<crate::quantized_rows::ActivationBlock>();
        let panel_rows = (PANEL_BYTES / row_bytes.max(1)).clamp(8, MAX_PANEL);
        let mut sums = [0.0_f32; MAX_PANEL * 2 * STRIP];
        let width = S::STRIPS * STRIP;

        for row in (0..quantized.rows()).step_by(panel_rows) {
            let count = panel_rows.min(quantized.rows() - row);
            for first in (0..target.count).step_by(width) {
                let index = (target.first + first) / STRIP;
                let second = if first + STRIP < target.count { index + 1 } else { index };
                let sums = &mut sums[..count * width];
                sums.fill(0.0);
                simd.quantized_tile(QuantizedTile {
                    format,
                    first: strip(index),
                    second: strip(second),
                    panel: quantized.panel(row, count),
                    sums,
                });
                for (m, values) in sums.chunks_exact(width).enumerate() {
                    target.write(row + m, first, values);
                }
            }
        }
    }
}

struct FloatTask<'a, E> {
    /// Of the task.
    w: &'a [E],
    x: &'a [f32],
    rows: usize,
    columns: usize,
    target: Target<'a>,
}

impl<E: Element> Kernel for FloatTask<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { w, x, rows, columns, target } = self;
        // Some rows of weights stay in the first-level cache while all activations pass.
        float_tiles(simd, w, x, columns, |m, n, value| {
            if m < rows {
                target.write(m, n, &[value]);
            }
        });
    }
}

/// `write(m, n, Σ_k w[n][k] · x[m][k])` for all rows of both, which have `columns` columns.
#[inline(always)]
pub(crate) fn float_tiles<S: Simd, E: Element>(
    simd: S,
    w: &[E],
    x: &[f32],
    columns: usize,
    mut write: impl FnMut(usize, usize, f32),
) {
    let panel = (PANEL_BYTES / size_of::<f32>() / columns).max(6) * columns;
    for (index, x) in x.chunks(panel).enumerate() {
        let first = index * (panel / columns);
        for (n, w) in w.chunks(8 * columns).enumerate() {
            let mut put = |i, j, value| write(first + j, n * 8 + i, value);
            if S::LANES == 16 && w.len() == 8 * columns {
                // Twice the registers.
                float_strip::<S, E, 8>(simd, w, x, columns, &mut put);
                continue;
            }
            let fours = w.len() / columns / 4 * 4;
            for n in (0..fours).step_by(4) {
                let mut put = |i, j, value| put(n + i, j, value);
                float_strip::<S, E, 4>(simd, &w[n * columns..], x, columns, &mut put);
            }
            for n in fours..w.len() / columns {
                let mut put = |i, j, value| put(n + i, j, value);
                float_strip::<S, E, 1>(simd, &w[n * columns..], x, columns, &mut put);
            }
        }
    }
}

/// The first N rows of `w` with all rows of `x`.
#[inline(always)]
fn float_strip<S: Simd, E: Element, const N: usize>(
    simd: S,
    w: &[E],
    x: &[f32],
    columns: usize,
    put: &mut impl FnMut(usize, usize, f32),
) {
    const M: usize = 3;
    let w: [&[E]; N] = std::array::from_fn(|i| &w[i * columns..(i + 1) * columns]);
    let rows = x.len() / columns;
    let x = |m: usize| &x[m * columns..(m + 1) * columns];
    let threes = rows / M * M;
    for m in (0..threes).step_by(M) {
        let x = [x(m), x(m + 1), x(m + 2)];
        dots::<S, E, N, M>(simd, w, x, &mut |i, j, value| put(i, m + j, value));
    }
    for m in threes..rows {
        dots::<S, E, N, 1>(simd, w, [x(m)], &mut |i, j, value| put(i, m + j, value));
    }
}

/// The inner products of N rows with M rows of the same length. Each is one chain of fused
/// multiply-adds a lane, whatever N and M are.
#[inline(always)]
#[allow(unsafe_code, reason = "vector loads")]
fn dots<S: Simd, E: Element, const N: usize, const M: usize>(
    simd: S,
    w: [&[E]; N],
    x: [&[f32]; M],
    put: &mut impl FnMut(usize, usize, f32),
) {
    let length = w.iter().map(|row| row.len()).chain(x.iter().map(|row| row.len())).min();
    let length = length.unwrap_or(0);
    let mut sums = [[simd.splat(0.0); M]; N];
    let whole = length / S::LANES * S::LANES;
    let mut k = 0;
    while k < whole {
        let mut xs = [simd.splat(0.0); M];
        for j in 0..M {
            // SAFETY: k + LANES ≤ whole ≤ the length of every row.
            xs[j] = unsafe { simd.load_f32(x[j].as_ptr().add(k)) };
        }
        for i in 0..N {
            // SAFETY: as above.
            let w = unsafe { E::load(simd, w[i].as_ptr().add(k)) };
            for j in 0..M {
                sums[i][j] = simd.mul_add(w, xs[j], sums[i][j]);
            }
        }
        k += S::LANES;
    }
    for i in 0..N {
        for j in 0..M {
            if whole < length {
                let w = load_partial(simd, &w[i][whole..length]);
                let x = load_partial(simd, &x[j][whole..length]);
                sums[i][j] = simd.mul_add(w, x, sums[i][j]);
            }
            put(i, j, simd.sum(sums[i][j]));
        }
    }
}
