//! What kernels need of an instruction set.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod scalar;

use half::{bf16, f16};

use crate::matrix::Format;
use crate::quantized_rows::{ActivationBlock, BLOCK, Panel, quantize_block};

/// Rows of a packed quantized matrix that are interleaved.
pub(crate) const STRIP: usize = 8;

/// Strips that an instruction set computes at once, at most.
pub(crate) const MAX_STRIPS: usize = 4;

/// Code that is compiled once for every instruction set. `run` must be `#[inline(always)]`, and so
/// must be what it calls, or that part is compiled for the baseline.
pub(crate) trait Kernel {
    type Output;
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// An instruction set, by its proof token. Methods are `#[inline(always)]` and are used below
/// [`Simd::vectorize`].
#[allow(unsafe_code, reason = "loads and stores by pointer")]
pub(crate) trait Simd: Copy {
    /// Some f32 lanes.
    type Vector: Copy;
    /// How many.
    const LANES: usize;
    /// Strips that [`Simd::quantized_tile`] computes at once, at most [`MAX_STRIPS`].
    const STRIPS: usize;

    /// Runs a kernel compiled with this instruction set enabled.
    fn vectorize<K: Kernel>(self, kernel: K) -> K::Output;

    fn splat(self, value: f32) -> Self::Vector;

    /// `a · b + c`.
    fn mul_add(self, a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector;

    /// The sum of the lanes, in an order that is fixed.
    fn sum(self, vector: Self::Vector) -> f32;

    /// The [`Simd::sum`] of each of eight vectors.
    #[inline(always)]
    fn sums(self, vectors: &[Self::Vector; 8]) -> [f32; 8] {
        vectors.map(|vector| self.sum(vector))
    }

    /// # Safety
    ///
    /// `LANES` elements can be read.
    unsafe fn load_f32(self, pointer: *const f32) -> Self::Vector;

    /// # Safety
    ///
    /// `LANES` elements can be read.
    unsafe fn load_f16(self, pointer: *const f16) -> Self::Vector;

    /// # Safety
    ///
    /// `LANES` elements can be read.
    unsafe fn load_bf16(self, pointer: *const bf16) -> Self::Vector;

    /// # Safety
    ///
    /// `LANES` elements can be written.
    unsafe fn store(self, vector: Self::Vector, pointer: *mut f32);

    /// Asks for the cache line at an address, which need not be one that can be read.
    #[inline(always)]
    fn prefetch<T>(self, address: *const T) {
        let _ = address;
    }

    /// Activations in int8, as [`crate::QuantizedRows::quantize`] defines them.
    #[inline(always)]
    fn quantize_block(self, values: &[f32; BLOCK]) -> ActivationBlock {
        quantize_block(values)
    }

    /// The products of `STRIPS` strips of packed weights with the rows of a panel, for all columns:
    /// `sums[row][strip row]`.
    ///
    /// For every block of 32 columns, in their order, the f32 sum s of an element becomes:
    /// - Q8, Q4: fma(dot, d·x, s);
    /// - Q4K: fma(−(dmin·m), x·Σq, fma(dot, (d·sc)·x, s));
    /// - Q6K: fma(sc·dot + sc'·dot', d·x, s), the sum over both halves of the block being an exact
    ///   integer below 2²⁴;
    ///
    /// where dot is the exact integer product and x the scale of the activations' block.
    fn quantized_tile(self, tile: QuantizedTile<'_>);
}

/// The arguments of [`Simd::quantized_tile`].
pub(crate) struct QuantizedTile<'a> {
    pub(crate) format: Format,
    /// The bytes of `STRIPS` strips; the last again in place of those beyond the end.
    pub(crate) strips: [&'a [u8]; MAX_STRIPS],
    pub(crate) panel: Panel<'a>,
    /// `STRIPS` × [`STRIP`] a row of the panel.
    pub(crate) sums: &'a mut [f32],
}

/// An element type of row-major weights or of a cache.
#[allow(unsafe_code, reason = "a load by pointer")]
pub(crate) trait Element: Copy + Send + Sync + 'static {
    const ZERO: Self;

    /// # Safety
    ///
    /// `S::LANES` elements can be read.
    unsafe fn load<S: Simd>(simd: S, pointer: *const Self) -> S::Vector;
}

macro_rules! element {
    ($type:ty, $load:ident, $zero:expr) => {
        impl Element for $type {
            const ZERO: Self = $zero;

            #[inline(always)]
            #[allow(unsafe_code, reason = "the contract is the caller's")]
            unsafe fn load<S: Simd>(simd: S, pointer: *const Self) -> S::Vector {
                // SAFETY: the same contract.
                unsafe { simd.$load(pointer) }
            }
        }
    };
}

element!(f32, load_f32, 0.0);
element!(f16, load_f16, f16::ZERO);
element!(bf16, load_bf16, bf16::ZERO);

/// The first `values.len()` lanes; the others are zero. `values` has at most `LANES` elements.
#[inline(always)]
#[allow(unsafe_code, reason = "a load from an array that is large enough")]
pub(crate) fn load_partial<S: Simd, E: Element>(simd: S, values: &[E]) -> S::Vector {
    let mut padded = [E::ZERO; 16];
    for (to, from) in padded.iter_mut().zip(values) {
        *to = *from;
    }
    // SAFETY: no instruction set has more than 16 lanes.
    unsafe { E::load(simd, padded.as_ptr()) }
}
