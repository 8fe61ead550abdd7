use serde::{Deserialize, Serialize};
use std::fmt;

/// Element type of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum DType {
    /// IEEE 754 binary64.
    F64,
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// Upper half of a binary32.
    BF16,
    /// Signed 64-bit integer.
    I64,
    /// Signed 32-bit integer.
    I32,
    /// Signed 16-bit integer.
    I16,
    /// Unsigned 16-bit integer.
    U16,
    /// Signed byte.
    I8,
    /// Unsigned byte.
    U8,
    /// Signed 4-bit integer, two to a byte, the first one in the low half.
    I4,
    /// One byte, 0 or 1.
    Bool,
}

impl DType {
    /// Bytes that hold one element; elements of 4 bits share a byte, so their tensors need
    /// [`byte_count`](Self::byte_count).
    pub const fn size(self) -> usize {
        self.bits().div_ceil(8)
    }

    /// Bits of one element.
    pub const fn bits(self) -> usize {
        match self {
            DType::F64 | DType::I64 => 64,
            DType::F32 | DType::I32 => 32,
            DType::F16 | DType::BF16 | DType::I16 | DType::U16 => 16,
            DType::I8 | DType::U8 | DType::Bool => 8,
            DType::I4 => 4,
        }
    }

    /// Bytes of a tensor of this type and `shape`, or `None` on overflow.
    pub fn byte_count(self, shape: &[usize]) -> Option<usize> {
        let count = crate::element_count(shape)?;
        if self.bits() < 8 {
            return Some(count.div_ceil(8 / self.bits()));
        }
        count.checked_mul(self.size())
    }

    /// Smallest and largest value of an integer type of at most 16 bits; `None` for the others.
    pub const fn integer_range(self) -> Option<(i32, i32)> {
        match self {
            DType::I16 => Some((-32768, 32767)),
            DType::U16 => Some((0, 65535)),
            DType::I8 => Some((-128, 127)),
            DType::U8 => Some((0, 255)),
            DType::I4 => Some((-8, 7)),
            _ => None,
        }
    }

    /// Whether the type is a floating-point format.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F64 | DType::F32 | DType::F16 | DType::BF16)
    }

    /// The lower-case name, as in reports and manifests.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F64 => "f64",
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::I64 => "i64",
            DType::I32 => "i32",
            DType::I16 => "i16",
            DType::U16 => "u16",
            DType::I8 => "i8",
            DType::U8 => "u8",
            DType::I4 => "i4",
            DType::Bool => "bool",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
