//! Element types, shapes, shared and borrowed tensors, and conversions between number formats.
//!
//! A [`Tensor`] is an immutable, cheaply cloned block of little-endian bytes with a type and a
//! shape; its bytes may belong to a vector or to a mapped file. A [`TensorView`] borrows the same
//! from anywhere. A [`Buffer`] is the mutable, aligned storage behind caches.

mod buffer;
mod convert;
mod dtype;
mod tensor;

pub use buffer::Buffer;
pub use convert::{ConvertReport, convert, read_f32, read_i32, write_i32};
pub use dtype::DType;
pub use tensor::{SharedBytes, Tensor, TensorView};

#[cfg(target_endian = "big")]
compile_error!("tensors are little-endian byte blocks; big-endian hosts are not supported");

/// What can be wrong with a tensor.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum TensorError {
    /// The product of a shape does not fit in memory arithmetic.
    #[error("shape {shape:?} of {dtype} has more bytes than can be addressed")]
    TooLarge {
        /// The shape in question.
        shape: Vec<usize>,
        /// Its element type.
        dtype: DType,
    },
    /// The bytes at hand are not what the shape needs.
    #[error("shape {shape:?} of {dtype} needs {expected} bytes, got {actual}")]
    ByteLength {
        /// The shape in question.
        shape: Vec<usize>,
        /// Its element type.
        dtype: DType,
        /// Bytes the shape needs.
        expected: usize,
        /// Bytes given.
        actual: usize,
    },
    /// Another element type was needed.
    #[error("expected {expected}, got {actual}")]
    DType {
        /// The type needed.
        expected: DType,
        /// The type found.
        actual: DType,
    },
    /// An integer does not fit its type.
    #[error("value {value} at {index} is outside of {dtype}")]
    OutOfRange {
        /// Flat index of the value.
        index: usize,
        /// The value.
        value: i32,
        /// The type.
        dtype: DType,
    },
    /// The conversion is not defined.
    #[error("no conversion from {from} to {to}")]
    NoConversion {
        /// Source type.
        from: DType,
        /// Target type.
        to: DType,
    },
}

/// Number of elements of `shape`, or `None` on overflow.
///
/// ```
/// assert_eq!(firesteel_tensor::element_count(&[2, 3]), Some(6));
/// assert_eq!(firesteel_tensor::element_count(&[]), Some(1));
/// assert_eq!(firesteel_tensor::element_count(&[usize::MAX, 2]), None);
/// ```
pub fn element_count(shape: &[usize]) -> Option<usize> {
    // A zero anywhere makes the product zero, whatever the other factors are, but the format's
    // readers treat an overflowing factor as an error all the same; so do we.
    shape.iter().try_fold(1usize, |product, &dim| product.checked_mul(dim))
}
