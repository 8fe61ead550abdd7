use crate::{Buffer, DType, TensorError, convert};
use bytemuck::{Pod, cast_slice};
use half::f16;
use std::borrow::Cow;
use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;

/// A range of immutable bytes with a shared owner: a vector, a [`Buffer`] or a mapped file.
#[derive(Clone)]
pub struct SharedBytes {
    owner: Arc<dyn AsRef<[u8]> + Send + Sync>,
    range: Range<usize>,
}

impl SharedBytes {
    /// All bytes of `owner`.
    pub fn new(owner: Arc<dyn AsRef<[u8]> + Send + Sync>) -> Self {
        let length = (*owner).as_ref().len();
        Self { owner, range: 0..length }
    }

    /// A part of these bytes, with the same owner; `None` when `range` is not inside.
    pub fn slice(&self, range: Range<usize>) -> Option<Self> {
        if range.start > range.end || range.end > self.range.len() {
            return None;
        }
        let start = self.range.start + range.start;
        Some(Self { owner: Arc::clone(&self.owner), range: start..start + range.len() })
    }
}

impl Deref for SharedBytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &(*self.owner).as_ref()[self.range.clone()]
    }
}

impl fmt::Debug for SharedBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedBytes({} bytes)", self.range.len())
    }
}

struct Typed<T>(Vec<T>);

impl<T: Pod> AsRef<[u8]> for Typed<T> {
    fn as_ref(&self) -> &[u8] {
        cast_slice(&self.0)
    }
}

/// An immutable tensor: element type, shape, row-major little-endian bytes. Clones share the bytes.
#[derive(Debug, Clone)]
pub struct Tensor {
    dtype: DType,
    shape: Vec<usize>,
    bytes: SharedBytes,
}

impl Tensor {
    /// A tensor over `bytes`.
    ///
    /// # Errors
    /// When the byte count is not what `dtype` and `shape` need, or overflows.
    pub fn new(dtype: DType, shape: Vec<usize>, bytes: SharedBytes) -> Result<Self, TensorError> {
        check_length(dtype, &shape, bytes.len())?;
        Ok(Self { dtype, shape, bytes })
    }

    fn typed<T: Pod + Send + Sync>(
        dtype: DType,
        shape: Vec<usize>,
        data: Vec<T>,
    ) -> Result<Self, TensorError> {
        Self::new(dtype, shape, SharedBytes::new(Arc::new(Typed(data))))
    }

    /// A tensor of f32 values.
    ///
    /// # Errors
    /// When the number of values is not the product of `shape`.
    pub fn from_f32(shape: Vec<usize>, data: Vec<f32>) -> Result<Self, TensorError> {
        Self::typed(DType::F32, shape, data)
    }

    /// A tensor of f16 values.
    ///
    /// # Errors
    /// When the number of values is not the product of `shape`.
    pub fn from_f16(shape: Vec<usize>, data: Vec<f16>) -> Result<Self, TensorError> {
        Self::typed(DType::F16, shape, data)
    }

    /// A tensor of i64 values.
    ///
    /// # Errors
    /// When the number of values is not the product of `shape`.
    pub fn from_i64(shape: Vec<usize>, data: Vec<i64>) -> Result<Self, TensorError> {
        Self::typed(DType::I64, shape, data)
    }

    /// A tensor over the bytes of `buffer`.
    ///
    /// # Errors
    /// When the byte count is not what `dtype` and `shape` need.
    pub fn from_buffer(
        dtype: DType,
        shape: Vec<usize>,
        buffer: Buffer,
    ) -> Result<Self, TensorError> {
        Self::new(dtype, shape, SharedBytes::new(Arc::new(buffer)))
    }

    /// `data` rounded to `dtype`, which must be a float type.
    ///
    /// # Errors
    /// When the number of values is wrong or `dtype` is no float type.
    pub fn from_f32_as(
        dtype: DType,
        shape: Vec<usize>,
        data: Vec<f32>,
    ) -> Result<Self, TensorError> {
        if dtype == DType::F32 {
            return Self::from_f32(shape, data);
        }
        check_length(DType::F32, &shape, data.len().saturating_mul(4))?;
        let mut buffer = Buffer::zeroed(data.len().saturating_mul(dtype.size()));
        convert(DType::F32, cast_slice(&data), dtype, buffer.bytes_mut())?;
        Self::from_buffer(dtype, shape, buffer)
    }

    /// `data` as integers of `dtype`, one of at most 16 bits.
    ///
    /// # Errors
    /// When the number of values is wrong, one is outside of the type's range, or `dtype` is no
    /// such type.
    pub fn from_i32_as(dtype: DType, shape: Vec<usize>, data: &[i32]) -> Result<Self, TensorError> {
        check_length(DType::I32, &shape, data.len().saturating_mul(4))?;
        let bytes = dtype.byte_count(&shape).unwrap_or_default();
        let mut buffer = Buffer::zeroed(bytes);
        crate::write_i32(dtype, data, buffer.bytes_mut())?;
        Self::from_buffer(dtype, shape, buffer)
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Shape; empty for a scalar.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The bytes with their owner.
    pub fn shared_bytes(&self) -> &SharedBytes {
        &self.bytes
    }

    /// Number of elements.
    pub fn element_count(&self) -> usize {
        // Proved by every constructor not to overflow.
        self.shape.iter().product()
    }

    /// Borrows everything.
    pub fn view(&self) -> TensorView<'_> {
        TensorView { dtype: self.dtype, shape: &self.shape, bytes: &self.bytes }
    }

    /// The same bytes under another shape.
    ///
    /// # Errors
    /// When the new shape needs another number of bytes.
    pub fn reshape(&self, shape: Vec<usize>) -> Result<Self, TensorError> {
        Self::new(self.dtype, shape, self.bytes.clone())
    }

    /// Rows `range` of the first axis, sharing the bytes; `None` for a scalar, outside, or when elements share
    /// bytes.
    pub fn rows(&self, range: Range<usize>) -> Option<Self> {
        let (&rows, rest) = self.shape.split_first()?;
        if range.start > range.end || range.end > rows {
            return None;
        }
        if self.dtype.bits() < 8 {
            return None;
        }
        let row_bytes = self.dtype.byte_count(rest)?;
        let bytes = self.bytes.slice(range.start * row_bytes..range.end * row_bytes)?;
        let mut shape = self.shape.clone();
        shape[0] = range.len();
        Some(Self { dtype: self.dtype, shape, bytes })
    }
}

/// A borrowed tensor: element type, shape, row-major little-endian bytes.
#[derive(Debug, Clone, Copy)]
pub struct TensorView<'a> {
    dtype: DType,
    shape: &'a [usize],
    bytes: &'a [u8],
}

impl<'a> TensorView<'a> {
    /// A view of `bytes`.
    ///
    /// # Errors
    /// When the byte count is not what `dtype` and `shape` need, or overflows.
    pub fn new(dtype: DType, shape: &'a [usize], bytes: &'a [u8]) -> Result<Self, TensorError> {
        check_length(dtype, shape, bytes.len())?;
        Ok(Self { dtype, shape, bytes })
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Shape; empty for a scalar.
    pub fn shape(&self) -> &'a [usize] {
        self.shape
    }

    /// The bytes.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Number of elements.
    pub fn element_count(&self) -> usize {
        // Proved by every constructor not to overflow.
        self.shape.iter().product()
    }

    /// All values as f32: borrowed where the bytes are aligned f32, converted from other floats.
    ///
    /// # Errors
    /// When the element type is not a float type.
    pub fn to_f32(&self) -> Result<Cow<'a, [f32]>, TensorError> {
        if self.dtype == DType::F32
            && let Ok(values) = bytemuck::try_cast_slice(self.bytes)
        {
            return Ok(Cow::Borrowed(values));
        }
        let mut values = vec![0f32; self.element_count()];
        crate::read_f32(self.dtype, self.bytes, &mut values)?;
        Ok(Cow::Owned(values))
    }

    /// All values of an integer type of at most 16 bits.
    ///
    /// # Errors
    /// When the element type is another.
    pub fn to_i32(&self) -> Result<Vec<i32>, TensorError> {
        let mut values = vec![0; self.element_count()];
        crate::read_i32(self.dtype, self.bytes, &mut values)?;
        Ok(values)
    }

    /// A tensor with a copy of the bytes.
    pub fn to_tensor(&self) -> Tensor {
        Tensor {
            dtype: self.dtype,
            shape: self.shape.to_vec(),
            bytes: SharedBytes::new(Arc::new(Buffer::from(self.bytes))),
        }
    }

    /// Flat index of the first value that is NaN or infinite; `None` if all are finite or the
    /// type is an integer type.
    pub fn first_non_finite(&self) -> Option<usize> {
        // The exponent is all ones exactly in infinities and NaNs.
        let find = |width: usize, test: &dyn Fn(&[u8]) -> bool| {
            self.bytes.chunks_exact(width).position(test)
        };
        match self.dtype {
            DType::F32 => find(4, &|b| b[3] & 0x7f == 0x7f && b[2] & 0x80 != 0),
            DType::F16 => find(2, &|b| b[1] & 0x7c == 0x7c),
            DType::BF16 => find(2, &|b| b[1] & 0x7f == 0x7f && b[0] & 0x80 != 0),
            DType::F64 => find(8, &|b| b[7] & 0x7f == 0x7f && b[6] & 0xf0 == 0xf0),
            _ => None,
        }
    }
}

fn check_length(dtype: DType, shape: &[usize], actual: usize) -> Result<(), TensorError> {
    let expected = dtype
        .byte_count(shape)
        .ok_or_else(|| TensorError::TooLarge { shape: shape.to_vec(), dtype })?;
    if expected == actual {
        Ok(())
    } else {
        Err(TensorError::ByteLength { shape: shape.to_vec(), dtype, expected, actual })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_share_bytes_and_keep_the_rest_of_the_shape() {
        let t = Tensor::from_f32(vec![3, 2], vec![0., 1., 2., 3., 4., 5.]).unwrap();
        let r = t.rows(1..3).unwrap();
        assert_eq!(r.shape(), &[2, 2]);
        assert_eq!(&*r.view().to_f32().unwrap(), &[2., 3., 4., 5.]);
        assert!(t.rows(1..4).is_none());
    }

    #[test]
    fn wrong_lengths_and_overflow_are_errors() {
        assert!(Tensor::from_f32(vec![2], vec![1.0]).is_err());
        let huge = [1usize << 62, 4];
        assert!(matches!(
            TensorView::new(DType::F32, &huge, &[]),
            Err(TensorError::TooLarge { .. })
        ));
    }

    #[test]
    fn non_finite_values_are_found_in_every_float_type() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let t = Tensor::from_f32_as(dtype, vec![3], vec![1.0, -6e4, bad]).unwrap();
                assert_eq!(t.view().first_non_finite(), Some(2), "{dtype} {bad}");
            }
            let t = Tensor::from_f32_as(dtype, vec![2], vec![6.5e4, -0.0]).unwrap();
            assert_eq!(t.view().first_non_finite(), None);
        }
    }

    #[test]
    fn unaligned_f32_bytes_are_converted() {
        let mut bytes = [0u8; 9];
        bytes[1..5].copy_from_slice(&1.5f32.to_le_bytes());
        bytes[5..9].copy_from_slice(&(-2f32).to_le_bytes());
        let view = TensorView::new(DType::F32, &[2], &bytes[1..]).unwrap();
        assert_eq!(&*view.to_f32().unwrap(), &[1.5, -2.0]);
    }
}
