//! SIMD kernels with scalar references and run-time dispatch, and the thread pool they run on.
//!
//! An [`Isa`] is chosen once ([`Isa::detect`]) and given to every kernel; FIRESTEEL_ISA forces one.
//! Weights are [`MatrixView`]s: row-major floats borrowed from anywhere, or quantized blocks in one
//! packed layout, rows interleaved by eight, that serves every instruction set ([`pack`]).
//! Activations stay f32 rows; products with quantized weights read them as [`QuantizedRows`], int8
//! per block of 32. [`attention`] goes over segments of keys and values with their positions.
//! [`measure`] times every kernel, and the read bandwidth that limits them.
//!
//! # What is the same everywhere
//!
//! - No result depends on the number of threads.
//! - No product and no attention depends on how many activation rows are computed together, because
//!   every element is one chain of operations whatever the tiles are.
//! - Products with quantized weights, and every kernel of [`ops`], give the same bytes on every
//!   instruction set. Products with float weights and [`attention`] do not: they are rounded in the
//!   order of the lanes.

mod attention;
mod float_tiles;
mod isa;
mod math;
mod matmul;
mod matrix;
pub mod measure;
pub mod ops;
mod pool;
mod quantized_rows;
mod simd;

pub use attention::{
    Attention, AttentionShape, KvBlock, KvRows, Positions, Segment, attention, dequantize_kv,
    quantize_kv,
};
#[cfg(target_arch = "aarch64")]
pub use isa::Neon;
#[cfg(target_arch = "x86_64")]
pub use isa::{Avx2, Avx512Vnni};
pub use isa::{Isa, Scalar};
pub use matmul::{Product, matmul, matmul_group};
pub use matrix::{Format, MatrixView, PACKED_LAYOUT, PACKED_ROWS, pack, unpack};
pub use pool::Pool;
pub use quantized_rows::QuantizedRows;

#[cfg(target_endian = "big")]
compile_error!("packed weights are little-endian byte blocks; big-endian hosts are not supported");

/// What can be wrong with a kernel call.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum KernelError {
    /// FIRESTEEL_ISA names an instruction set that is unknown or that this CPU lacks.
    #[error("FIRESTEEL_ISA is {value:?}, but this CPU has: {available}; unset it to use the best")]
    Isa {
        /// What the variable says.
        value: String,
        /// The names that are accepted here.
        available: String,
    },
    /// A thread of the pool could not be started.
    #[error("cannot start worker thread {index}: {reason}; use fewer threads")]
    Thread {
        /// Which worker.
        index: usize,
        /// What the operating system says.
        reason: String,
    },
    /// A task panicked; what it was to write is unspecified.
    #[error("a task of the thread pool panicked: {message}")]
    TaskPanicked {
        /// The message of the first panic.
        message: String,
    },
    /// A slice has the wrong length.
    #[error("{what} needs {expected} elements, got {actual}")]
    Length {
        /// What the slice is.
        what: &'static str,
        /// Elements needed.
        expected: usize,
        /// Elements given.
        actual: usize,
    },
    /// The columns of a quantized matrix do not fill its blocks.
    #[error("a {format} matrix needs a multiple of {block} columns, got {columns}")]
    Columns {
        /// The format.
        format: Format,
        /// Columns of one block.
        block: usize,
        /// Columns given.
        columns: usize,
    },
    /// Float weights do not start at a multiple of their size.
    #[error("the bytes of a {format} matrix are not aligned to {alignment} bytes; copy them first")]
    Misaligned {
        /// The format.
        format: Format,
        /// The alignment needed.
        alignment: usize,
    },
    /// A shape whose size does not fit in memory arithmetic.
    #[error("{what} of {rows} × {columns} has more bytes than can be addressed")]
    TooLarge {
        /// What has that shape.
        what: &'static str,
        /// Its rows.
        rows: usize,
        /// Its columns.
        columns: usize,
    },
    /// A matrix in a format for which the operation is not defined.
    #[error("{operation} is not defined for {format}; it takes {accepted}")]
    Format {
        /// The operation.
        operation: &'static str,
        /// The format given.
        format: Format,
        /// The formats it takes.
        accepted: &'static str,
    },
    /// A row that does not exist.
    #[error("row {row} of a matrix of {rows} rows")]
    Row {
        /// The row asked for.
        row: usize,
        /// Rows there are.
        rows: usize,
    },
    /// An attention shape that cannot be computed.
    #[error("attention of {heads} heads over {kv_heads} key/value heads of {head_dim}: {reason}")]
    AttentionShape {
        /// Query heads.
        heads: usize,
        /// Key/value heads.
        kv_heads: usize,
        /// Elements of one head.
        head_dim: usize,
        /// What is wrong.
        reason: &'static str,
    },
    /// Rotary dimensions that are odd or more than a head has.
    #[error("{rotary} rotary dimensions of a head of {head_dim}; they must be even and fit in it")]
    Rotary {
        /// Rotary dimensions.
        rotary: usize,
        /// Elements of one head.
        head_dim: usize,
    },
}

/// `Ok` if `actual` is `expected`.
pub(crate) fn check_length(
    what: &'static str,
    expected: usize,
    actual: usize,
) -> Result<(), KernelError> {
    if expected == actual { Ok(()) } else { Err(KernelError::Length { what, expected, actual }) }
}

/// The product of two dimensions.
pub(crate) fn area(what: &'static str, rows: usize, columns: usize) -> Result<usize, KernelError> {
    rows.checked_mul(columns).ok_or(KernelError::TooLarge { what, rows, columns })
}
