//! Weight matrices: formats, the packed layout, and views of both.
//!
//! # Packed layout
//!
//! Quantized rows are interleaved in strips of 8; the last strip is padded with zeros. A strip holds
//! its column blocks one after another, each a block of the 8 rows: 32 columns of Q8 and Q4, 256 of
//! Q4K and Q6K. Within 32 columns, values lie in groups of four columns: 8 rows × 4 columns × 8
//! groups. Where two values share a byte, groups g and g + 4 do, the first in the low half. Numbers
//! are those of the GGUF blocks, and so is the number of bytes a weight.

use bytemuck::{Pod, Zeroable};
use half::{bf16, f16};

use crate::simd::STRIP;
use crate::{KernelError, check_length};

/// Version of the packed layout. It changes whenever [`pack`] gives other bytes, so that bytes that
/// were kept are packed again.
pub const PACKED_LAYOUT: u32 = 1;

/// Rows that are interleaved. Whole strips of them are packed independently of each other and lie
/// one after the other.
pub const PACKED_ROWS: usize = STRIP;

/// How weights are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Format {
    /// Row-major f32.
    F32,
    /// Row-major f16.
    F16,
    /// Row-major bf16.
    BF16,
    /// Blocks of 32: an f16 scale and int8 values; the numbers of GGUF's Q8_0.
    Q8,
    /// Blocks of 32: an f16 scale and 4-bit values less 8; the numbers of GGUF's Q4_0.
    Q4,
    /// Blocks of 256: f16 scale and minimum, 6-bit scale and minimum for every 32, 4-bit values; the
    /// numbers of GGUF's Q4_K.
    Q4K,
    /// Blocks of 256: an f16 scale, an int8 scale for every 16, 6-bit values less 32; the numbers of
    /// GGUF's Q6_K.
    Q6K,
}

impl std::fmt::Display for Format {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::Q8 => "Q8",
            Self::Q4 => "Q4",
            Self::Q4K => "Q4K",
            Self::Q6K => "Q6K",
        })
    }
}

impl Format {
    /// All of them.
    pub const ALL: [Self; 7] =
        [Self::F32, Self::F16, Self::BF16, Self::Q8, Self::Q4, Self::Q4K, Self::Q6K];

    /// Whether weights of this format are packed and multiplied with quantized activations.
    #[must_use]
    pub fn is_quantized(self) -> bool {
        !matches!(self, Self::F32 | Self::F16 | Self::BF16)
    }

    /// Columns that share a block; 1 for floats.
    #[must_use]
    pub fn block_columns(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => 1,
            Self::Q8 | Self::Q4 => 32,
            Self::Q4K | Self::Q6K => 256,
        }
    }

    /// Bytes of one block of one row.
    #[must_use]
    pub fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::Q8 => 34,
            Self::Q4 => 18,
            Self::Q4K => 144,
            Self::Q6K => 210,
        }
    }

    /// What the start of a matrix must be a multiple of.
    #[must_use]
    pub fn alignment(self) -> usize {
        if self == Self::F32 { 4 } else { 2 }
    }

    /// Bytes of `rows × columns` in row-major order, quantized ones in GGUF's blocks.
    ///
    /// # Errors
    ///
    /// The columns do not fill blocks, or the size cannot be addressed.
    pub fn row_major_bytes(self, rows: usize, columns: usize) -> Result<usize, KernelError> {
        let block = self.block_columns();
        if !columns.is_multiple_of(block) {
            return Err(KernelError::Columns { format: self, block, columns });
        }
        (columns / block)
            .checked_mul(self.block_bytes())
            .and_then(|row| row.checked_mul(rows))
            .ok_or(KernelError::TooLarge { what: "a matrix", rows, columns })
    }

    /// Bytes of `rows × columns` in the layout that [`MatrixView`] takes: the same as row-major for
    /// floats, and with the rows padded to a multiple of 8 for quantized formats.
    ///
    /// # Errors
    ///
    /// As [`Format::row_major_bytes`].
    pub fn packed_bytes(self, rows: usize, columns: usize) -> Result<usize, KernelError> {
        let padded = if self.is_quantized() {
            rows.checked_next_multiple_of(STRIP).ok_or(KernelError::TooLarge {
                what: "a packed matrix",
                rows,
                columns,
            })?
        } else {
            rows
        };
        self.row_major_bytes(padded, columns)
    }
}

/// A block of 8 rows.
pub(crate) trait PackedBlock: Pod {
    /// Columns of the block.
    const COLUMNS: usize;
    /// Bytes of one row of it in GGUF's layout.
    const ROW_BYTES: usize;

    /// Takes a row from GGUF's layout.
    fn set_row(&mut self, row: usize, bytes: &[u8]);

    /// Writes a row in GGUF's layout.
    fn get_row(&self, row: usize, bytes: &mut [u8]);

    /// The weights of a row.
    fn values(&self, row: usize, out: &mut [f32]);

    /// The blocks of whole strips, which a checked view has aligned. Other bytes panic like an
    /// index outside of a slice: no blocks in their place, which would be a sum of 0.
    #[inline(always)]
    fn strip(bytes: &[u8]) -> &[Self] {
        bytemuck::cast_slice(bytes)
    }
}

fn half_at(bytes: &[u8], at: usize) -> f16 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]])
}

/// 8 rows × 32 columns of Q8.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct PackedQ8 {
    pub(crate) values: [[[i8; 4]; STRIP]; 8],
    pub(crate) scales: [f16; STRIP],
}

impl PackedBlock for PackedQ8 {
    const COLUMNS: usize = 32;
    const ROW_BYTES: usize = 34;

    fn set_row(&mut self, row: usize, bytes: &[u8]) {
        self.scales[row] = half_at(bytes, 0);
        for (group, four) in bytes[2..34].as_chunks::<4>().0.iter().enumerate() {
            self.values[group][row] = four.map(u8::cast_signed);
        }
    }

    fn get_row(&self, row: usize, bytes: &mut [u8]) {
        bytes[..2].copy_from_slice(&self.scales[row].to_le_bytes());
        for (group, four) in bytes[2..34].as_chunks_mut::<4>().0.iter_mut().enumerate() {
            *four = self.values[group][row].map(i8::cast_unsigned);
        }
    }

    fn values(&self, row: usize, out: &mut [f32]) {
        let scale = self.scales[row].to_f32();
        for (k, out) in out.iter_mut().enumerate() {
            *out = f32::from(self.values[k / 4][row][k % 4]) * scale;
        }
    }
}

/// 32 columns of 8 rows in 4 bits: `[group % 4][row][column % 4]`, groups from 4 in the high half.
type Nibbles = [[[u8; 4]; STRIP]; 4];

fn nibble(nibbles: &Nibbles, row: usize, group: usize, i: usize) -> u8 {
    (nibbles[group % 4][row][i] >> (group / 4 * 4)) & 15
}

fn set_nibble(nibbles: &mut Nibbles, row: usize, k: usize, value: u8) {
    let (group, i) = (k / 4, k % 4);
    let byte = &mut nibbles[group % 4][row][i];
    let shift = group / 4 * 4;
    *byte = (*byte & !(15 << shift)) | (value & 15) << shift;
}

/// 8 rows × 32 columns of Q4.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct PackedQ4 {
    pub(crate) nibbles: Nibbles,
    pub(crate) scales: [f16; STRIP],
}

impl PackedQ4 {
    pub(crate) fn nibble(&self, row: usize, group: usize, i: usize) -> u8 {
        nibble(&self.nibbles, row, group, i)
    }
}

impl PackedBlock for PackedQ4 {
    const COLUMNS: usize = 32;
    const ROW_BYTES: usize = 18;

    fn set_row(&mut self, row: usize, bytes: &[u8]) {
        self.scales[row] = half_at(bytes, 0);
        // GGUF's byte k holds columns k and k + 16, which is groups g and g + 4.
        for (group, four) in bytes[2..18].as_chunks::<4>().0.iter().enumerate() {
            self.nibbles[group][row] = *four;
        }
    }

    fn get_row(&self, row: usize, bytes: &mut [u8]) {
        bytes[..2].copy_from_slice(&self.scales[row].to_le_bytes());
        for (group, four) in bytes[2..18].as_chunks_mut::<4>().0.iter_mut().enumerate() {
            *four = self.nibbles[group][row];
        }
    }

    fn values(&self, row: usize, out: &mut [f32]) {
        let scale = self.scales[row].to_f32();
        for (k, out) in out.iter_mut().enumerate() {
            *out = (f32::from(self.nibble(row, k / 4, k % 4)) - 8.0) * scale;
        }
    }
}

/// 8 rows × 256 columns of Q4K.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct PackedQ4K {
    pub(crate) nibbles: [Nibbles; 8],
    /// `[sub-block][row]`: the low four bits of the scale, and of the minimum above them.
    pub(crate) low: [[u8; STRIP]; 8],
    /// `[sub-block % 4][row]`: the high two bits of the scale, and of the minimum above them, of
    /// sub-block s; those of sub-block s + 4 in the high half.
    pub(crate) high: [[u8; STRIP]; 4],
    pub(crate) scales: [f16; STRIP],
    pub(crate) mins: [f16; STRIP],
}

impl PackedQ4K {
    pub(crate) fn nibble(&self, row: usize, sub: usize, group: usize, i: usize) -> u8 {
        nibble(&self.nibbles[sub], row, group, i)
    }

    /// The 6-bit scale and minimum of a sub-block.
    pub(crate) fn scale_min(&self, row: usize, sub: usize) -> (u8, u8) {
        let low = self.low[sub][row];
        let high = self.high[sub % 4][row] >> (sub / 4 * 4);
        ((low & 15) | (high & 3) << 4, (low >> 4) | (high >> 2 & 3) << 4)
    }
}

impl PackedBlock for PackedQ4K {
    const COLUMNS: usize = 256;
    const ROW_BYTES: usize = 144;

    fn set_row(&mut self, row: usize, bytes: &[u8]) {
        self.scales[row] = half_at(bytes, 0);
        self.mins[row] = half_at(bytes, 2);
        let six = &bytes[4..16];
        for sub in 0..8 {
            let (scale, min) = if sub < 4 {
                (six[sub] & 63, six[sub + 4] & 63)
            } else {
                (
                    (six[sub + 4] & 15) | (six[sub - 4] >> 6) << 4,
                    (six[sub + 4] >> 4) | (six[sub] >> 6) << 4,
                )
            };
            self.low[sub][row] = (scale & 15) | (min & 15) << 4;
            let shift = sub / 4 * 4;
            let high = &mut self.high[sub % 4][row];
            *high = (*high & !(15 << shift)) | ((scale >> 4) | (min >> 4) << 2) << shift;
            let values = &bytes[16 + sub / 2 * 32..][..32];
            for (k, byte) in values.iter().enumerate() {
                set_nibble(&mut self.nibbles[sub], row, k, byte >> (sub % 2 * 4));
            }
        }
    }

    fn get_row(&self, row: usize, bytes: &mut [u8]) {
        bytes.fill(0);
        bytes[..2].copy_from_slice(&self.scales[row].to_le_bytes());
        bytes[2..4].copy_from_slice(&self.mins[row].to_le_bytes());
        for sub in 0..8 {
            let (scale, min) = self.scale_min(row, sub);
            let six = &mut bytes[4..16];
            if sub < 4 {
                six[sub] |= scale;
                six[sub + 4] |= min;
            } else {
                six[sub + 4] |= (scale & 15) | (min & 15) << 4;
                six[sub - 4] |= (scale >> 4) << 6;
                six[sub] |= (min >> 4) << 6;
            }
            for k in 0..32 {
                let value = self.nibble(row, sub, k / 4, k % 4);
                bytes[16 + sub / 2 * 32 + k] |= value << (sub % 2 * 4);
            }
        }
    }

    fn values(&self, row: usize, out: &mut [f32]) {
        let (scale, min) = (self.scales[row].to_f32(), self.mins[row].to_f32());
        for (k, out) in out.iter_mut().enumerate() {
            let (sub, k) = (k / 32, k % 32);
            let (sub_scale, sub_min) = self.scale_min(row, sub);
            let value = f32::from(self.nibble(row, sub, k / 4, k % 4));
            *out = scale * f32::from(sub_scale) * value - min * f32::from(sub_min);
        }
    }
}

/// 8 rows × 256 columns of Q6K.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct PackedQ6K {
    /// The low four bits.
    pub(crate) low: [Nibbles; 8],
    /// `[32 columns][group % 2][row][column % 4]`: the high two bits of groups g, g + 2, g + 4 and
    /// g + 6, from the lowest bits up.
    pub(crate) high: [[[[u8; 4]; STRIP]; 2]; 8],
    pub(crate) sub_scales: [[i8; STRIP]; 16],
    pub(crate) scales: [f16; STRIP],
}

/// Where GGUF keeps value k of a Q6_K block: byte and shift of the low bits, byte and shift of the
/// high bits, in bytes of the block.
fn q6_k_place(k: usize) -> (usize, usize, usize, usize) {
    let (half, k) = (k / 128, k % 128);
    (half * 64 + k % 64, k / 64 * 4, 128 + half * 32 + k % 32, k / 32 * 2)
}

impl PackedQ6K {
    /// The 6-bit value, 0 to 63.
    pub(crate) fn value(&self, row: usize, sub: usize, group: usize, i: usize) -> u8 {
        let high = self.high[sub][group % 2][row][i] >> (group / 2 * 2);
        nibble(&self.low[sub], row, group, i) | (high & 3) << 4
    }
}

impl PackedBlock for PackedQ6K {
    const COLUMNS: usize = 256;
    const ROW_BYTES: usize = 210;

    fn set_row(&mut self, row: usize, bytes: &[u8]) {
        for (scales, byte) in self.sub_scales.iter_mut().zip(&bytes[192..208]) {
            scales[row] = byte.cast_signed();
        }
        self.scales[row] = half_at(bytes, 208);
        for k in 0..256 {
            let (low, low_shift, high, high_shift) = q6_k_place(k);
            let (sub, k) = (k / 32, k % 32);
            set_nibble(&mut self.low[sub], row, k, bytes[low] >> low_shift);
            let group = k / 4;
            let shift = group / 2 * 2;
            let to = &mut self.high[sub][group % 2][row][k % 4];
            *to = (*to & !(3 << shift)) | (bytes[high] >> high_shift & 3) << shift;
        }
    }

    fn get_row(&self, row: usize, bytes: &mut [u8]) {
        bytes.fill(0);
        for (scales, byte) in self.sub_scales.iter().zip(&mut bytes[192..208]) {
            *byte = scales[row].cast_unsigned();
        }
        bytes[208..210].copy_from_slice(&self.scales[row].to_le_bytes());
        for k in 0..256 {
            let (low, low_shift, high, high_shift) = q6_k_place(k);
            let value = self.value(row, k / 32, k % 32 / 4, k % 4);
            bytes[low] |= (value & 15) << low_shift;
            bytes[high] |= (value >> 4) << high_shift;
        }
    }

    fn values(&self, row: usize, out: &mut [f32]) {
        let scale = self.scales[row].to_f32();
        for (k, out) in out.iter_mut().enumerate() {
            let value = f32::from(self.value(row, k / 32, k % 32 / 4, k % 4)) - 32.0;
            *out = scale * f32::from(self.sub_scales[k / 16][row]) * value;
        }
    }
}

/// The same expression for the block type of a quantized format.
macro_rules! with_block {
    ($format:expr, $operation:literal, |$block:ident| $body:expr) => {
        match $format {
            Format::Q8 => {
                type $block = PackedQ8;
                $body
            }
            Format::Q4 => {
                type $block = PackedQ4;
                $body
            }
            Format::Q4K => {
                type $block = PackedQ4K;
                $body
            }
            Format::Q6K => {
                type $block = PackedQ6K;
                $body
            }
            format => Err(KernelError::Format {
                operation: $operation,
                format,
                accepted: "Q8, Q4, Q4K, Q6K",
            }),
        }
    };
}

/// Packs the GGUF blocks of a row-major `rows × columns` matrix into `out`.
///
/// # Errors
///
/// `format` is not quantized, the columns do not fill its blocks, `blocks` or `out` has not the
/// length ([`Format::row_major_bytes`], [`Format::packed_bytes`]), or `out` starts at an odd address.
pub fn pack(
    format: Format,
    blocks: &[u8],
    rows: usize,
    columns: usize,
    out: &mut [u8],
) -> Result<(), KernelError> {
    check_length("GGUF blocks (bytes)", format.row_major_bytes(rows, columns)?, blocks.len())?;
    check_length("packed weights (bytes)", format.packed_bytes(rows, columns)?, out.len())?;
    with_block!(format, "packing", |Block| {
        let packed: &mut [Block] = bytemuck::try_cast_slice_mut(out)
            .map_err(|_| KernelError::Misaligned { format, alignment: format.alignment() })?;
        let per_row = columns / Block::COLUMNS;
        if per_row == 0 {
            return Ok(());
        }
        for (strip, packed) in packed.chunks_exact_mut(per_row).enumerate() {
            packed.fill(Block::zeroed());
            for row in 0..STRIP.min(rows - strip * STRIP) {
                let start = (strip * STRIP + row) * per_row * Block::ROW_BYTES;
                let blocks = blocks[start..].chunks_exact(Block::ROW_BYTES);
                for (packed, block) in packed.iter_mut().zip(blocks) {
                    packed.set_row(row, block);
                }
            }
        }
        Ok(())
    })
}

/// Writes a packed matrix as row-major GGUF blocks: the inverse of [`pack`].
///
/// # Errors
///
/// The matrix is not quantized, or `out` has not the length ([`Format::row_major_bytes`]).
pub fn unpack(matrix: MatrixView<'_>, out: &mut [u8]) -> Result<(), KernelError> {
    let MatrixView { format, rows, columns, data } = matrix;
    check_length("GGUF blocks (bytes)", format.row_major_bytes(rows, columns)?, out.len())?;
    with_block!(format, "unpacking", |Block| {
        let Data::Strips(bytes) = data else {
            return Err(KernelError::Format {
                operation: "unpacking",
                format,
                accepted: "Q8, Q4, Q4K, Q6K",
            });
        };
        let per_row = columns / Block::COLUMNS;
        for (index, block) in out.chunks_exact_mut(Block::ROW_BYTES).enumerate() {
            let (row, k) = (index / per_row, index % per_row);
            let packed = &Block::strip(bytes)[row / STRIP * per_row + k];
            packed.get_row(row % STRIP, block);
        }
        Ok(())
    })
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Data<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    BF16(&'a [bf16]),
    Strips(&'a [u8]),
}

/// A borrowed weight matrix, `[rows, columns]`: a product maps `columns` inputs to `rows` outputs.
#[derive(Debug, Clone, Copy)]
pub struct MatrixView<'a> {
    pub(crate) format: Format,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) data: Data<'a>,
}

impl<'a> MatrixView<'a> {
    /// A view of little-endian bytes: row-major floats, or what [`pack`] wrote.
    ///
    /// # Errors
    ///
    /// The length is not [`Format::packed_bytes`], the columns do not fill blocks, or the bytes are
    /// not aligned to [`Format::alignment`].
    pub fn new(
        format: Format,
        rows: usize,
        columns: usize,
        bytes: &'a [u8],
    ) -> Result<Self, KernelError> {
        check_length("weights (bytes)", format.packed_bytes(rows, columns)?, bytes.len())?;
        let alignment = format.alignment();
        let misaligned = |_| KernelError::Misaligned { format, alignment };
        let data = match format {
            Format::F32 => Data::F32(bytemuck::try_cast_slice(bytes).map_err(misaligned)?),
            Format::F16 => Data::F16(bytemuck::try_cast_slice(bytes).map_err(misaligned)?),
            Format::BF16 => Data::BF16(bytemuck::try_cast_slice(bytes).map_err(misaligned)?),
            _ if !bytes.as_ptr().addr().is_multiple_of(alignment) => {
                return Err(KernelError::Misaligned { format, alignment });
            }
            _ => Data::Strips(bytes),
        };
        Ok(Self { format, rows, columns, data })
    }

    /// How the weights are stored.
    #[must_use]
    pub fn format(&self) -> Format {
        self.format
    }

    /// Outputs of a product.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs of a product.
    #[must_use]
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// The bytes that a product reads.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match self.data {
            Data::F32(data) => size_of_val(data),
            Data::F16(data) => size_of_val(data),
            Data::BF16(data) => size_of_val(data),
            Data::Strips(data) => data.len(),
        }
    }

    /// The weights of one row as f32, as for an embedding table.
    ///
    /// # Errors
    ///
    /// There is no such row, or `out` has not `columns` elements.
    pub fn row(&self, row: usize, out: &mut [f32]) -> Result<(), KernelError> {
        if row >= self.rows {
            return Err(KernelError::Row { row, rows: self.rows });
        }
        check_length("a row of weights", self.columns, out.len())?;
        let range = row * self.columns..(row + 1) * self.columns;
        let strips = match self.data {
            Data::F32(data) => {
                out.copy_from_slice(&data[range]);
                return Ok(());
            }
            Data::F16(data) => {
                out.iter_mut().zip(&data[range]).for_each(|(out, value)| *out = value.to_f32());
                return Ok(());
            }
            Data::BF16(data) => {
                out.iter_mut().zip(&data[range]).for_each(|(out, value)| *out = value.to_f32());
                return Ok(());
            }
            Data::Strips(strips) => strips,
        };
        with_block!(self.format, "reading a packed row", |Block| {
            let start = row / STRIP * (self.columns / Block::COLUMNS);
            let blocks = &Block::strip(strips)[start..];
            for (block, out) in blocks.iter().zip(out.chunks_exact_mut(Block::COLUMNS)) {
                block.values(row % STRIP, out);
            }
            Ok(())
        })
    }
}
