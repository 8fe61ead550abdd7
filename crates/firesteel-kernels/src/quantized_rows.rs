//! Activations in int8, per block of 32.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::isa::Isa;
use crate::pool::{Disjoint, Pool};
use crate::simd::{Kernel, Simd};
use crate::{KernelError, area, check_length};

/// Columns of one block.
pub(crate) const BLOCK: usize = 32;

/// 32 activations of one row.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[repr(C)]
pub(crate) struct ActivationBlock {
    /// Four int8 values each, the first in the lowest byte; −127 to 127.
    pub(crate) groups: [i32; 8],
    /// The value of one unit: the largest magnitude / 127.
    pub(crate) scale: f32,
    /// scale · Σ values.
    pub(crate) scaled_sum: f32,
    /// −8 · Σ values: takes the offset of unsigned weights off a product.
    pub(crate) offset: i32,
    /// −8 · Σ of the first and of the last 16 values.
    pub(crate) half_offsets: [i16; 2],
}

/// Activation rows quantized to int8 with one scale per block of 32 columns; keeps its storage from
/// one use to the next.
#[derive(Debug, Default, Clone)]
pub struct QuantizedRows {
    /// `[columns / 32, rows]`.
    blocks: Vec<ActivationBlock>,
    rows: usize,
    columns: usize,
}

impl QuantizedRows {
    /// No rows yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// How many rows were quantized.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// How many columns they have.
    #[must_use]
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Bytes of what they hold.
    pub(crate) fn bytes(&self) -> usize {
        size_of_val(self.blocks.as_slice())
    }

    /// The values that they stand for, `[rows, columns]`.
    pub(crate) fn values(&self, out: &mut [f32]) {
        for (row, out) in out.chunks_exact_mut(self.columns.max(1)).enumerate() {
            for (k, out) in out.as_chunks_mut::<BLOCK>().0.iter_mut().enumerate() {
                let Some(block) = self.blocks.get(k * self.rows + row) else { continue };
                let bytes = block.groups.iter().flat_map(|group| group.to_le_bytes());
                for (out, byte) in out.iter_mut().zip(bytes) {
                    *out = f32::from(byte.cast_signed()) * block.scale;
                }
            }
        }
    }

    /// Replaces the contents by `values`, `[rows, columns]`: v becomes round(v · 127 / max),
    /// ties to even, in units of max / 127, where max is the largest magnitude of the block.
    ///
    /// A value that is not finite makes every product with its row NaN. A block whose magnitudes are
    /// all below 127 / f32::MAX becomes zero.
    ///
    /// # Errors
    ///
    /// `columns` is not a multiple of 32, `values` has not the length, or a task panicked.
    pub fn quantize(
        &mut self,
        isa: Isa,
        pool: &Pool,
        values: &[f32],
        rows: usize,
        columns: usize,
    ) -> Result<(), KernelError> {
        if !columns.is_multiple_of(BLOCK) {
            return Err(KernelError::Length {
                what: "a quantized activation row (a multiple of 32)",
                expected: columns.next_multiple_of(BLOCK),
                actual: columns,
            });
        }
        check_length("activations", area("activations", rows, columns)?, values.len())?;
        self.rows = rows;
        self.columns = columns;
        self.blocks.resize(values.len() / BLOCK, ActivationBlock::default());
        if values.is_empty() {
            return Ok(());
        }
        // Few rows are not worth a barrier.
        let tasks = if rows < 8 { 1 } else { pool.threads().min(rows) };
        let next = AtomicUsize::new(0);
        let blocks = Disjoint::new(&mut self.blocks);
        pool.run(tasks, &|_| {
            loop {
                let row = next.fetch_add(1, Ordering::Relaxed);
                if row >= rows {
                    return;
                }
                let values = &values[row * columns..(row + 1) * columns];
                isa.dispatch(QuantizeRow { values, blocks: &blocks, row, rows });
            }
        })
    }

    /// Rows `first .. first + count`.
    pub(crate) fn panel(&self, first: usize, count: usize) -> Panel<'_> {
        Panel { rows: self, first, count }
    }
}

/// Some rows of the activations.
#[derive(Clone, Copy)]
pub(crate) struct Panel<'a> {
    rows: &'a QuantizedRows,
    first: usize,
    count: usize,
}

impl<'a> Panel<'a> {
    /// Block `k` of each row.
    #[inline(always)]
    pub(crate) fn block(&self, k: usize) -> &'a [ActivationBlock] {
        let start = k * self.rows.rows + self.first;
        &self.rows.blocks[start..start + self.count]
    }
}

struct QuantizeRow<'a> {
    values: &'a [f32],
    blocks: &'a Disjoint<'a, ActivationBlock>,
    row: usize,
    rows: usize,
}

impl Kernel for QuantizeRow<'_> {
    type Output = ();

    #[inline(always)]
    #[allow(unsafe_code, reason = "blocks of different rows are disjoint")]
    fn run<S: Simd>(self, simd: S) {
        for (k, values) in self.values.as_chunks::<BLOCK>().0.iter().enumerate() {
            let index = k * self.rows + self.row;
            // SAFETY: the counter gives a row to one task, and a block belongs to one row.
            let to = unsafe { self.blocks.part(index..index + 1) };
            if let Some(to) = to.first_mut() {
                *to = simd.quantize_block(values);
            }
        }
    }
}

/// Adding and subtracting it rounds magnitudes below 2²² to integers, ties to even.
const ROUND: f32 = 12_582_912.0;

/// The value of one unit and what values are multiplied by, for a block's largest magnitude.
#[inline(always)]
pub(crate) fn unit(largest: f32) -> (f32, f32) {
    // The inverse of a subnormal may be infinite; such a block is zero for all purposes.
    let inverse = 127.0 / largest;
    if !largest.is_finite() {
        (f32::NAN, 0.0)
    } else if inverse.is_finite() {
        (largest / 127.0, inverse)
    } else {
        (0.0, 0.0)
    }
}

/// The reference of [`Simd::quantize_block`].
#[inline(always)]
pub(crate) fn quantize_block(values: &[f32; BLOCK]) -> ActivationBlock {
    // The bits of magnitudes are ordered like the magnitudes, with NaN above all of them.
    let mut lanes = [0_i32; 8];
    for chunk in values.as_chunks::<8>().0 {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane = (*lane).max(value.abs().to_bits().cast_signed());
        }
    }
    let largest = lanes.iter().fold(0, |a, b| a.max(*b));
    let (scale, inverse) = unit(f32::from_bits(largest.cast_unsigned()));
    let mut integers = [0_i32; BLOCK];
    for (to, value) in integers.iter_mut().zip(values) {
        // The low bits of the sum are the integer.
        let bits = (value * inverse + ROUND).to_bits().wrapping_sub(ROUND.to_bits());
        *to = bits.cast_signed();
    }
    let mut block = ActivationBlock { scale, ..ActivationBlock::default() };
    let mut sums = [0_i32; 2];
    for (half, integers) in integers.as_chunks::<16>().0.iter().enumerate() {
        let mut sum = 0;
        for integer in integers {
            sum += i32::from(*integer as i8);
        }
        sums[half] = sum;
    }
    for (group, four) in block.groups.iter_mut().zip(integers.as_chunks::<4>().0) {
        *group = i32::from_le_bytes(four.map(|integer| integer as u8));
    }
    block.scaled_sum = scale * (sums[0] + sums[1]) as f32;
    block.offset = -8 * (sums[0] + sums[1]);
    block.half_offsets = sums.map(|sum| (-8 * sum) as i16);
    block
}
