use crate::{DType, TensorError};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// What a conversion did to the values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ConvertReport {
    /// Finite source values that the target format can only hold as infinity.
    pub overflowed: u64,
    /// Source values that are NaN or infinite.
    pub non_finite: u64,
}

impl ConvertReport {
    /// Adds the counts of `other`.
    pub fn merge(&mut self, other: ConvertReport) {
        self.overflowed += other.overflowed;
        self.non_finite += other.non_finite;
    }
}

/// Values converted at once; keeps the f32 block in the first-level cache.
const BLOCK: usize = 1024;

/// Reads `bytes` of float type `dtype` as f32 into `out`. Widening is exact except from f64.
///
/// # Errors
/// When `dtype` is not a float type or the lengths disagree.
pub fn read_f32(dtype: DType, bytes: &[u8], out: &mut [f32]) -> Result<(), TensorError> {
    check_bytes(dtype, out.len(), bytes.len())?;
    match dtype {
        DType::F32 => bytemuck::cast_slice_mut::<f32, u8>(out).copy_from_slice(bytes),
        DType::BF16 => {
            for (value, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                *value = f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16);
            }
        }
        DType::F16 => {
            if let Ok(halves) = bytemuck::try_cast_slice::<u8, f16>(bytes) {
                halves.convert_to_f32_slice(out);
            } else {
                let mut block = [f16::ZERO; BLOCK];
                for (values, b) in out.chunks_mut(BLOCK).zip(bytes.chunks(2 * BLOCK)) {
                    let halves = &mut block[..values.len()];
                    bytemuck::cast_slice_mut::<f16, u8>(halves).copy_from_slice(b);
                    halves.convert_to_f32_slice(values);
                }
            }
        }
        DType::F64 => {
            for (value, b) in out.iter_mut().zip(bytes.chunks_exact(8)) {
                let word = [b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]];
                *value = f64::from_le_bytes(word) as f32;
            }
        }
        from => return Err(TensorError::NoConversion { from, to: DType::F32 }),
    }
    Ok(())
}

/// Reads `bytes` of an integer type of at most 16 bits into `out`.
///
/// # Errors
/// When `dtype` is another type or the lengths disagree.
pub fn read_i32(dtype: DType, bytes: &[u8], out: &mut [i32]) -> Result<(), TensorError> {
    check_bytes(dtype, out.len(), bytes.len())?;
    match dtype {
        DType::I16 => {
            for (value, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                *value = i16::from_le_bytes([b[0], b[1]]).into();
            }
        }
        DType::U16 => {
            for (value, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                *value = u16::from_le_bytes([b[0], b[1]]).into();
            }
        }
        DType::I8 => out.iter_mut().zip(bytes).for_each(|(v, b)| *v = b.cast_signed().into()),
        DType::U8 => out.iter_mut().zip(bytes).for_each(|(v, b)| *v = (*b).into()),
        DType::I4 => {
            for (values, b) in out.chunks_mut(2).zip(bytes) {
                // Shifting up first lets the sign come along on the way down.
                let halves = [(b << 4).cast_signed() >> 4, b.cast_signed() >> 4];
                values.iter_mut().zip(halves).for_each(|(value, half)| *value = half.into());
            }
        }
        from => return Err(TensorError::NoConversion { from, to: DType::I32 }),
    }
    Ok(())
}

/// Writes `values` as an integer type of at most 16 bits into `out`. Half a byte that is left over is
/// zero.
///
/// # Errors
/// When `dtype` is another type, a value is outside of its range or the lengths disagree.
pub fn write_i32(dtype: DType, values: &[i32], out: &mut [u8]) -> Result<(), TensorError> {
    check_bytes(dtype, values.len(), out.len())?;
    let Some((least, most)) = dtype.integer_range() else {
        return Err(TensorError::NoConversion { from: DType::I32, to: dtype });
    };
    if let Some(index) = values.iter().position(|value| !(least..=most).contains(value)) {
        return Err(TensorError::OutOfRange { index, value: values[index], dtype });
    }
    match dtype {
        DType::I16 | DType::U16 => {
            for (b, value) in out.chunks_exact_mut(2).zip(values) {
                b.copy_from_slice(&value.to_le_bytes()[..2]);
            }
        }
        DType::I4 => {
            for (b, values) in out.iter_mut().zip(values.chunks(2)) {
                let half = |index: usize| values.get(index).map_or(0, |v| v.to_le_bytes()[0] & 15);
                *b = half(0) | half(1) << 4;
            }
        }
        _ => out.iter_mut().zip(values).for_each(|(b, value)| *b = value.to_le_bytes()[0]),
    }
    Ok(())
}

fn check_bytes(dtype: DType, count: usize, actual: usize) -> Result<(), TensorError> {
    match dtype.byte_count(&[count]) {
        Some(expected) if expected == actual => Ok(()),
        expected => Err(TensorError::ByteLength {
            shape: vec![count],
            dtype,
            expected: expected.unwrap_or(usize::MAX),
            actual,
        }),
    }
}

/// Converts float `source` bytes of type `from` into `target` bytes of type `to`, rounding to
/// nearest even, and counts what does not survive. Equal types are copied unchanged.
///
/// # Errors
/// When a type is not a float type or the lengths disagree.
pub fn convert(
    from: DType,
    source: &[u8],
    to: DType,
    target: &mut [u8],
) -> Result<ConvertReport, TensorError> {
    let count = source.len() / from.size();
    for (dtype, length) in [(from, source.len()), (to, target.len())] {
        let expected = count.saturating_mul(dtype.size());
        if length != expected {
            return Err(TensorError::ByteLength {
                shape: vec![count],
                dtype,
                expected,
                actual: length,
            });
        }
    }
    if !from.is_float() || !matches!(to, DType::F32 | DType::F16 | DType::BF16) {
        return Err(TensorError::NoConversion { from, to });
    }
    let mut report = ConvertReport::default();
    let mut block = [0f32; BLOCK];
    let source_blocks = source.chunks(BLOCK * from.size());
    for (source, target) in source_blocks.zip(target.chunks_mut(BLOCK * to.size())) {
        let values = &mut block[..source.len() / from.size()];
        read_f32(from, source, values)?;
        match to {
            _ if from == to => target.copy_from_slice(source),
            DType::F16 => {
                narrow(values, target, f16::ZERO, |halves, values| {
                    halves.convert_from_f32_slice(values);
                });
            }
            DType::BF16 => {
                narrow(values, target, bf16::ZERO, |halves, values| {
                    halves.convert_from_f32_slice(values);
                });
            }
            _ => target.copy_from_slice(bytemuck::cast_slice(values)),
        }
        // Counting is for the rare block that has something to count.
        let suspicious = match to {
            DType::F16 => any_word(target, 0x7c00),
            DType::BF16 => any_word(target, 0x7f80),
            _ => values.iter().fold(false, |any, v| any | !v.is_finite()),
        };
        if suspicious {
            report.merge(losses(values, to, target));
        }
    }
    Ok(report)
}

/// Whether a 16-bit word has all bits of `mask`; without a branch in the loop, for the vectorizer.
fn any_word(bytes: &[u8], mask: u16) -> bool {
    bytes
        .chunks_exact(2)
        .fold(false, |any, b| any | (u16::from_le_bytes([b[0], b[1]]) & mask == mask))
}

/// Non-finite source values, and finite ones that are infinite in the target.
fn losses(values: &[f32], to: DType, target: &[u8]) -> ConvertReport {
    let infinite = |index: usize| match to {
        DType::F16 => target[2 * index + 1] & 0x7c == 0x7c,
        DType::BF16 => target[2 * index + 1] & 0x7f == 0x7f && target[2 * index] & 0x80 != 0,
        _ => false,
    };
    let mut report = ConvertReport::default();
    for (index, value) in values.iter().enumerate() {
        if !value.is_finite() {
            report.non_finite += 1;
        } else if infinite(index) {
            report.overflowed += 1;
        }
    }
    report
}

/// Fills `target` through a block of halves, so that unaligned targets work too.
fn narrow<H: bytemuck::Pod>(
    values: &[f32],
    target: &mut [u8],
    zero: H,
    round: impl Fn(&mut [H], &[f32]),
) {
    if let Ok(halves) = bytemuck::try_cast_slice_mut::<u8, H>(target) {
        return round(halves, values);
    }
    let mut block = [zero; BLOCK];
    let halves = &mut block[..values.len()];
    round(halves, values);
    target.copy_from_slice(bytemuck::cast_slice(halves));
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn bf16_to_f16_counts_overflow_and_keeps_exact_values() {
        let source: Vec<u8> = [1.0f32, -2.5, 1e5, f32::INFINITY, 0.0]
            .iter()
            .flat_map(|v| bf16::from_f32(*v).to_le_bytes())
            .collect();
        let mut target = vec![0u8; 10];
        let report = convert(DType::BF16, &source, DType::F16, &mut target).unwrap();
        assert_eq!(report, ConvertReport { overflowed: 1, non_finite: 1 });
        assert_eq!(f16::from_le_bytes([target[2], target[3]]), f16::from_f32(-2.5));
    }

    #[test]
    fn integers_have_no_float_conversion() {
        assert!(convert(DType::I8, &[1], DType::F32, &mut [0; 4]).is_err());
        assert!(read_f32(DType::U16, &[1, 0], &mut [0.0]).is_err());
    }

    #[test]
    fn integers_survive_their_range_and_nothing_beyond() {
        for dtype in [DType::I16, DType::U16, DType::I8, DType::U8, DType::I4] {
            let (least, most) = dtype.integer_range().unwrap();
            let values = [least, most, 0, 1, most - 1];
            let mut bytes = vec![0xff; dtype.byte_count(&[5]).unwrap()];
            write_i32(dtype, &values, &mut bytes).unwrap();
            let mut back = [77; 5];
            read_i32(dtype, &bytes, &mut back).unwrap();
            assert_eq!(back, values, "{dtype}");
            for bad in [least - 1, most + 1] {
                let error = write_i32(dtype, &[0, bad, 0, 0, 0], &mut bytes).unwrap_err();
                assert!(matches!(error, TensorError::OutOfRange { index: 1, .. }), "{error}");
            }
            assert!(read_i32(dtype, &bytes[1..], &mut back).is_err());
        }
        assert!(write_i32(DType::F16, &[1], &mut [0; 2]).is_err());
        assert!(read_i32(DType::I64, &[0; 8], &mut [0]).is_err());
    }

    #[test]
    fn four_bit_integers_share_bytes_low_half_first() {
        let mut bytes = [0; 2];
        write_i32(DType::I4, &[1, -2, 7], &mut bytes).unwrap();
        assert_eq!(bytes, [0xe1, 0x07]);
    }

    proptest! {
        #[test]
        fn every_f32_rounds_as_the_scalar_conversion_does(
            values in prop::collection::vec(any::<f32>(), 0..3000), shift in 0usize..2
        ) {
            let mut source = vec![0u8; shift];
            source.extend(values.iter().flat_map(|v| v.to_le_bytes()));
            for to in [DType::F16, DType::BF16] {
                let mut target = vec![0u8; values.len() * 2];
                convert(DType::F32, &source[shift..], to, &mut target).unwrap();
                for (value, b) in values.iter().zip(target.chunks_exact(2)) {
                    let bits = u16::from_le_bytes([b[0], b[1]]);
                    let expected = match to {
                        DType::F16 => f16::from_f32(*value).to_f32(),
                        _ => bf16::from_f32(*value).to_f32(),
                    };
                    let actual = match to {
                        DType::F16 => f16::from_bits(bits).to_f32(),
                        _ => bf16::from_bits(bits).to_f32(),
                    };
                    prop_assert!(actual == expected || (actual.is_nan() && expected.is_nan()));
                }
            }
        }
    }
}
