//! Products of activation rows with weight matrices.

use crate::float_tiles::FloatTiles;
use crate::isa::Isa;
use crate::matrix::{Data, Format, MatrixView};
use crate::pool::{Disjoint, Pool};
use crate::quantized_rows::{BLOCK, QuantizedRows};
use crate::simd::{Element, Kernel, MAX_STRIPS, QuantizedTile, STRIP, Simd};
use crate::{KernelError, area, check_length};

/// Bytes of activations that should stay in the second-level cache while weights pass.
const PANEL_BYTES: usize = 1 << 20;
/// Activation rows of one tile of a quantized product, at most.
const MAX_PANEL: usize = 128;
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
        let unit = MAX_STRIPS * STRIP;
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
        let mut sums = [0.0_f32; MAX_PANEL * MAX_STRIPS * STRIP];
        let width = S::STRIPS * STRIP;

        for row in (0..quantized.rows()).step_by(panel_rows) {
            let count = panel_rows.min(quantized.rows() - row);
            for first in (0..target.count).step_by(width) {
                let last = (target.first + target.count - 1) / STRIP;
                let index = (target.first + first) / STRIP;
                let sums = &mut sums[..count * width];
                sums.fill(0.0);
                simd.quantized_tile(QuantizedTile {
                    format,
                    strips: std::array::from_fn(|i| strip(last.min(index + i))),
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
        let mut write = |m, n, values: &[f32]| {
            if m < rows {
                target.write(m, n, values);
            }
        };
        simd.vectorize(FloatTiles { w, x, columns, write: &mut write });
    }
}
