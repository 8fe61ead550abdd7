//! The block formats of GGUF files: how a weight is stored, and what the stored bytes mean.
//!
//! A block holds 32 or 256 consecutive elements of a row, so a row is a whole number of blocks.
//! Every format is little-endian, and its scales are IEEE 754 binary16. The formulas are those of
//! the format, so a value is the same whoever reads it.

use bytemuck::{Pod, Zeroable};
use firesteel_tensor::{DType, TensorError};
use half::f16;
use std::fmt;

/// How the elements of a weight are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum WeightFormat {
    /// One number an element: f32, f16 or bf16.
    Float(DType),
    /// 18 bytes for 32 elements: scale d, then 16 bytes; byte j has element j in its low and
    /// element j + 16 in its high half. An element is `d × (q − 8)`, q from 0 to 15.
    Q4_0,
    /// 20 bytes for 32 elements: scale d, offset m, then nibbles as in Q4_0. An element is
    /// `d × q + m`, q from 0 to 15.
    Q4_1,
    /// 34 bytes for 32 elements: scale d, then 32 signed bytes. An element is `d × q`.
    Q8_0,
    /// 144 bytes for 256 elements: scales d and dmin, 8 pairs of 6-bit (s, m) in 12 bytes, then
    /// 128 bytes of nibbles. An element of sub-block i of 32 is `d × s_i × q − dmin × m_i`, q from
    /// 0 to 15.
    Q4K,
    /// 176 bytes for 256 elements: as Q4_K with a fifth bit of each q in 32 bytes before the
    /// nibbles.
    Q5K,
    /// 210 bytes for 256 elements: 128 bytes with four low bits and 64 with two high bits of each
    /// q, 16 signed scales s, then d. An element of sub-block i of 16 is `d × s_i × (q − 32)`, q
    /// from 0 to 63.
    Q6K,
}

impl WeightFormat {
    /// Elements of a block; 1 for numbers.
    pub const fn block_elements(self) -> usize {
        match self {
            WeightFormat::Float(_) => 1,
            WeightFormat::Q4_0 => BlockQ4_0::ELEMENTS,
            WeightFormat::Q4_1 => BlockQ4_1::ELEMENTS,
            WeightFormat::Q8_0 => BlockQ8_0::ELEMENTS,
            WeightFormat::Q4K => BlockQ4K::ELEMENTS,
            WeightFormat::Q5K => BlockQ5K::ELEMENTS,
            WeightFormat::Q6K => BlockQ6K::ELEMENTS,
        }
    }

    /// Bytes of a block; those of an element for numbers.
    pub const fn block_bytes(self) -> usize {
        match self {
            WeightFormat::Float(dtype) => dtype.size(),
            WeightFormat::Q4_0 => size_of::<BlockQ4_0>(),
            WeightFormat::Q4_1 => size_of::<BlockQ4_1>(),
            WeightFormat::Q8_0 => size_of::<BlockQ8_0>(),
            WeightFormat::Q4K => size_of::<BlockQ4K>(),
            WeightFormat::Q5K => size_of::<BlockQ5K>(),
            WeightFormat::Q6K => size_of::<BlockQ6K>(),
        }
    }

    /// Whether elements are stored in blocks and not as numbers.
    pub const fn is_quantized(self) -> bool {
        !matches!(self, WeightFormat::Float(_))
    }

    /// Bytes of `elements` elements, or `None` on overflow or when they are not whole blocks.
    ///
    /// ```
    /// use firesteel_checkpoint::WeightFormat;
    /// assert_eq!(WeightFormat::Q4_0.byte_count(64), Some(36));
    /// assert_eq!(WeightFormat::Q4_0.byte_count(65), None);
    /// ```
    pub const fn byte_count(self, elements: usize) -> Option<usize> {
        if !elements.is_multiple_of(self.block_elements()) {
            return None;
        }
        (elements / self.block_elements()).checked_mul(self.block_bytes())
    }

    /// The lower-case name, as in reports.
    pub const fn name(self) -> &'static str {
        match self {
            WeightFormat::Float(dtype) => dtype.name(),
            WeightFormat::Q4_0 => "q4_0",
            WeightFormat::Q4_1 => "q4_1",
            WeightFormat::Q8_0 => "q8_0",
            WeightFormat::Q4K => "q4_k",
            WeightFormat::Q5K => "q5_k",
            WeightFormat::Q6K => "q6_k",
        }
    }
}

impl fmt::Display for WeightFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// One block as it lies in a file.
pub trait BlockLayout: Pod {
    /// Elements of a block.
    const ELEMENTS: usize;
    /// Writes the values of the `ELEMENTS` elements.
    fn read(&self, values: &mut [f32]);
}

/// Most elements of a block.
pub(crate) const MAX_BLOCK_ELEMENTS: usize = 256;

/// Reads `out.len()` elements from `first` on of the whole blocks `bytes`.
///
/// # Errors
/// When `bytes` are no whole blocks or have not all of the elements.
pub fn dequantize(
    format: WeightFormat,
    bytes: &[u8],
    first: usize,
    out: &mut [f32],
) -> Result<(), TensorError> {
    match format {
        WeightFormat::Float(dtype) => {
            let (start, length) = (first.saturating_mul(dtype.size()), size_of_val(out));
            let end = start.saturating_add(length / size_of::<f32>() * dtype.size());
            // Where there are fewer, the lengths disagree.
            firesteel_tensor::read_f32(dtype, bytes.get(start..end).unwrap_or_default(), out)
        }
        WeightFormat::Q4_0 => dequantize_as::<BlockQ4_0>(bytes, first, out),
        WeightFormat::Q4_1 => dequantize_as::<BlockQ4_1>(bytes, first, out),
        WeightFormat::Q8_0 => dequantize_as::<BlockQ8_0>(bytes, first, out),
        WeightFormat::Q4K => dequantize_as::<BlockQ4K>(bytes, first, out),
        WeightFormat::Q5K => dequantize_as::<BlockQ5K>(bytes, first, out),
        WeightFormat::Q6K => dequantize_as::<BlockQ6K>(bytes, first, out),
    }
}

fn dequantize_as<B: BlockLayout>(
    bytes: &[u8],
    first: usize,
    mut out: &mut [f32],
) -> Result<(), TensorError> {
    let needed = first.saturating_add(out.len()).div_ceil(B::ELEMENTS);
    let blocks = match bytemuck::try_cast_slice::<u8, B>(bytes) {
        Ok(blocks) if blocks.len() >= needed => blocks,
        _ => {
            let expected = needed.saturating_mul(size_of::<B>());
            let (shape, dtype, actual) = (vec![expected], DType::U8, bytes.len());
            return Err(TensorError::ByteLength { shape, dtype, expected, actual });
        }
    };
    let mut skip = first % B::ELEMENTS;
    for block in blocks.iter().skip(first / B::ELEMENTS) {
        if out.is_empty() {
            break;
        }
        let (part, rest) = out.split_at_mut(out.len().min(B::ELEMENTS - skip));
        if part.len() == B::ELEMENTS {
            block.read(part);
        } else {
            let mut values = [0f32; MAX_BLOCK_ELEMENTS];
            block.read(&mut values[..B::ELEMENTS]);
            part.copy_from_slice(&values[skip..skip + part.len()]);
        }
        out = rest;
        skip = 0;
    }
    Ok(())
}

fn half(bytes: [u8; 2]) -> f32 {
    f16::from_le_bytes(bytes).to_f32()
}

/// A block of [`WeightFormat::Q4_0`].
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ4_0 {
    /// Scale, in half precision.
    pub d: [u8; 2],
    /// Codes of four bits.
    pub nibbles: [u8; 16],
}

impl BlockLayout for BlockQ4_0 {
    const ELEMENTS: usize = 32;

    fn read(&self, values: &mut [f32]) {
        let d = half(self.d);
        let (low, high) = values.split_at_mut(16);
        for ((low, high), byte) in low.iter_mut().zip(high).zip(self.nibbles) {
            *low = d * f32::from((byte & 15) as i8 - 8);
            *high = d * f32::from((byte >> 4) as i8 - 8);
        }
    }
}

#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct BlockQ4_1 {
    d: [u8; 2],
    m: [u8; 2],
    nibbles: [u8; 16],
}

impl BlockLayout for BlockQ4_1 {
    const ELEMENTS: usize = 32;

    fn read(&self, values: &mut [f32]) {
        let (d, m) = (half(self.d), half(self.m));
        let (low, high) = values.split_at_mut(16);
        for ((low, high), byte) in low.iter_mut().zip(high).zip(self.nibbles) {
            *low = d * f32::from(byte & 15) + m;
            *high = d * f32::from(byte >> 4) + m;
        }
    }
}

/// A block of [`WeightFormat::Q8_0`].
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ8_0 {
    /// Scale, in half precision.
    pub d: [u8; 2],
    /// Codes.
    pub codes: [i8; 32],
}

impl BlockLayout for BlockQ8_0 {
    const ELEMENTS: usize = 32;

    fn read(&self, values: &mut [f32]) {
        let d = half(self.d);
        for (value, code) in values.iter_mut().zip(self.codes) {
            *value = d * f32::from(code);
        }
    }
}

/// A block of [`WeightFormat::Q4K`].
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ4K {
    /// Scale, in half precision.
    pub d: [u8; 2],
    /// Scale of the offsets, in half precision.
    pub dmin: [u8; 2],
    /// Scales and offsets of the sub-blocks.
    pub scales: [u8; 12],
    /// Codes of four bits.
    pub nibbles: [u8; 128],
}

impl BlockLayout for BlockQ4K {
    const ELEMENTS: usize = 256;

    fn read(&self, values: &mut [f32]) {
        let (d, dmin) = (half(self.d), half(self.dmin));
        let pairs = unpack_scales(&self.scales);
        let groups = values.chunks_exact_mut(64).zip(self.nibbles.chunks_exact(32));
        for ((values, bytes), pairs) in groups.zip(pairs.chunks_exact(2)) {
            let [(s0, m0), (s1, m1)] =
                [pairs[0], pairs[1]].map(|(s, m)| (d * f32::from(s), dmin * f32::from(m)));
            let (low, high) = values.split_at_mut(32);
            for ((low, high), byte) in low.iter_mut().zip(high).zip(bytes) {
                *low = s0 * f32::from(byte & 15) - m0;
                *high = s1 * f32::from(byte >> 4) - m1;
            }
        }
    }
}

#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct BlockQ5K {
    d: [u8; 2],
    dmin: [u8; 2],
    scales: [u8; 12],
    /// Bit i of byte j is the fifth bit of element j of sub-block i.
    high: [u8; 32],
    nibbles: [u8; 128],
}

impl BlockLayout for BlockQ5K {
    const ELEMENTS: usize = 256;

    fn read(&self, values: &mut [f32]) {
        let (d, dmin) = (half(self.d), half(self.dmin));
        let pairs = unpack_scales(&self.scales);
        for (i, (values, (s, m))) in values.chunks_exact_mut(32).zip(pairs).enumerate() {
            let (s, m) = (d * f32::from(s), dmin * f32::from(m));
            let nibbles = self.nibbles.iter().skip(i / 2 * 32);
            for ((value, byte), high) in values.iter_mut().zip(nibbles).zip(self.high) {
                let low = byte >> (4 * (i % 2)) & 15;
                *value = s * f32::from(low | (high >> i & 1) << 4) - m;
            }
        }
    }
}

/// The eight 6-bit pairs (s, m) of Q4_K and Q5_K. Bytes 0 to 3 and 4 to 7 have the first four s
/// and m in their low six bits. Bytes 8 to 11 have the low four bits of the last four s (low
/// half) and m (high half), whose high two bits are the top of bytes 0 to 3 and 4 to 7.
fn unpack_scales(bytes: &[u8; 12]) -> [(u8, u8); 8] {
    std::array::from_fn(|i| match i {
        0..4 => (bytes[i] & 63, bytes[i + 4] & 63),
        _ => {
            let (s, m, both) = (bytes[i - 4], bytes[i], bytes[i + 4]);
            (both & 15 | s >> 6 << 4, both >> 4 | m >> 6 << 4)
        }
    })
}

/// A block of [`WeightFormat::Q6K`].
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct BlockQ6K {
    /// The four low bits of the codes.
    pub low: [u8; 128],
    /// The two high bits of the codes.
    pub high: [u8; 64],
    /// Scales of the sub-blocks.
    pub scales: [i8; 16],
    /// Scale, in half precision.
    pub d: [u8; 2],
}

impl BlockLayout for BlockQ6K {
    const ELEMENTS: usize = 256;

    fn read(&self, values: &mut [f32]) {
        let d = half(self.d);
        let scales = self.scales.map(|s| d * f32::from(s));
        // Of each half of 128, quarter k of 32 has its low bits in nibble k / 2 of 32 bytes at
        // 32 × (k mod 2), and its high bits in bits 2k and 2k + 1 of 32 bytes.
        for (i, values) in values.chunks_exact_mut(32).enumerate() {
            let (half, k) = (i / 4, i % 4);
            let low = &self.low[64 * half + 32 * (k % 2)..][..32];
            let high = &self.high[32 * half..][..32];
            for (j, value) in values.iter_mut().enumerate() {
                let q = low[j] >> (4 * (k / 2)) & 15 | (high[j] >> (2 * k) & 3) << 4;
                *value = scales[2 * i + j / 16] * f32::from(q as i8 - 32);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_that_are_not_there_are_an_error() {
        let formats = [
            WeightFormat::Float(DType::F16),
            WeightFormat::Q4_0,
            WeightFormat::Q4_1,
            WeightFormat::Q8_0,
            WeightFormat::Q4K,
            WeightFormat::Q5K,
            WeightFormat::Q6K,
        ];
        for format in formats {
            let (count, size) = (2 * format.block_elements(), 2 * format.block_bytes());
            let bytes = vec![0; size];
            let mut out = vec![7.0; count];
            let mut read = |bytes: &[u8], first| dequantize(format, bytes, first, &mut out);
            assert!(read(&bytes, 0).is_ok(), "{format}");
            assert!(read(&bytes, 1).is_err(), "{format}: one element beyond the end");
            assert!(read(&bytes[..size - 1], 0).is_err(), "{format}: a block is cut");
            assert!(read(&bytes[..size / 2], 0).is_err(), "{format}: a block is missing");
            assert!(read(&[], 0).is_err(), "{format}: nothing");
            assert!(read(&bytes, usize::MAX).is_err(), "{format}: beyond everything");
        }
    }
}
