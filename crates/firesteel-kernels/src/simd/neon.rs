//! NEON with the dot product instructions.
#![allow(unsafe_code, reason = "intrinsics")]

use std::arch::aarch64::*;
use std::arch::asm;

use half::{bf16, f16};

use crate::isa::Neon;
use crate::matrix::{Format, PackedBlock, PackedQ4, PackedQ4K, PackedQ6K, PackedQ8};
use crate::quantized_rows::{ActivationBlock, Panel};
use crate::simd::{Kernel, QuantizedTile, STRIP, Simd};

#[target_feature(enable = "neon,dotprod")]
fn run<K: Kernel>(simd: Neon, kernel: K) -> K::Output {
    kernel.run(simd)
}

impl Simd for Neon {
    type Vector = float32x4_t;
    const LANES: usize = 4;
    const STRIPS: usize = 1;

    #[inline(always)]
    fn vectorize<K: Kernel>(self, kernel: K) -> K::Output {
        // SAFETY: the token proves the features.
        unsafe { run(self, kernel) }
    }

    #[inline(always)]
    fn splat(self, value: f32) -> float32x4_t {
        // SAFETY: the token proves the features.
        unsafe { vdupq_n_f32(value) }
    }

    #[inline(always)]
    fn mul_add(self, a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        // SAFETY: the token proves the features.
        unsafe { vfmaq_f32(c, a, b) }
    }

    #[inline(always)]
    fn sum(self, vector: float32x4_t) -> f32 {
        // SAFETY: the token proves the features.
        unsafe { vaddvq_f32(vector) }
    }

    #[inline(always)]
    unsafe fn load_f32(self, pointer: *const f32) -> float32x4_t {
        // SAFETY: the token proves the features; the caller vouches for the elements.
        unsafe { vld1q_f32(pointer) }
    }

    #[inline(always)]
    unsafe fn load_f16(self, pointer: *const f16) -> float32x4_t {
        // SAFETY: the token proves the features; the caller vouches for the elements.
        unsafe {
            let half = vld1_u16(pointer.cast());
            let wide: float32x4_t;
            asm!("fcvtl {0:v}.4s, {1:v}.4h", out(vreg) wide, in(vreg) half,
                options(pure, nomem, nostack, preserves_flags));
            wide
        }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, pointer: *const bf16) -> float32x4_t {
        // SAFETY: the token proves the features; the caller vouches for the elements.
        unsafe { vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(pointer.cast()))) }
    }

    #[inline(always)]
    unsafe fn store(self, vector: float32x4_t, pointer: *mut f32) {
        // SAFETY: the token proves the features; the caller vouches for the elements.
        unsafe { vst1q_f32(pointer, vector) }
    }

    #[inline(always)]
    fn quantized_tile(self, tile: QuantizedTile<'_>) {
        let (sums, _) = tile.sums.as_chunks_mut::<STRIP>();
        // SAFETY: the token proves the features.
        unsafe {
            match tile.format {
                Format::Q8 => q8(tile.strips[0], tile.panel, sums),
                Format::Q4 => q4(tile.strips[0], tile.panel, sums),
                Format::Q4K => q4_k(tile.strips[0], tile.panel, sums),
                Format::Q6K => q6_k(tile.strips[0], tile.panel, sums),
                Format::F32 | Format::F16 | Format::BF16 => {}
            }
        }
    }
}

/// 8 rows × 4 columns.
type Rows = [int8x16_t; 2];

#[target_feature(enable = "neon")]
#[inline]
fn load<T: bytemuck::Pod>(rows: &[T; STRIP]) -> [uint8x16_t; 2] {
    const { assert!(size_of::<T>() == 4) };
    let bytes: *const u8 = rows.as_ptr().cast();
    // SAFETY: the array has 32 bytes.
    unsafe { [vld1q_u8(bytes), vld1q_u8(bytes.add(16))] }
}

/// Unsigned 4-bit or 6-bit values less an offset.
#[target_feature(enable = "neon")]
#[inline]
fn signed(values: uint8x16_t, offset: i8) -> int8x16_t {
    vsubq_s8(vreinterpretq_s8_u8(values), vdupq_n_s8(offset))
}

/// The values of eight groups from nibbles.
#[target_feature(enable = "neon")]
#[inline]
fn nibbles(packed: &[[[u8; 4]; STRIP]; 4]) -> [[uint8x16_t; 2]; 8] {
    let mask = vdupq_n_u8(15);
    let mut groups = [[mask; 2]; 8];
    for (i, packed) in packed.iter().enumerate() {
        let [a, b] = load(packed);
        groups[i] = [vandq_u8(a, mask), vandq_u8(b, mask)];
        groups[i + 4] = [vshrq_n_u8::<4>(a), vshrq_n_u8::<4>(b)];
    }
    groups
}

/// `sum` plus, in each lane, the product of four int8 pairs.
#[target_feature(enable = "neon,dotprod")]
#[inline]
fn dot_4(mut sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: the function has the feature of the instruction, which touches registers only.
    unsafe {
        asm!("sdot {0:v}.4s, {1:v}.16b, {2:v}.16b", inout(vreg) sum, in(vreg) a, in(vreg) b,
            options(pure, nomem, nostack, preserves_flags));
    }
    sum
}

/// The products of 8 rows with some groups of activations.
#[target_feature(enable = "neon,dotprod")]
#[inline]
fn dot(weights: &[Rows], groups: &[i32]) -> [int32x4_t; 2] {
    let mut sums = [vdupq_n_s32(0); 2];
    for (weights, group) in weights.iter().zip(groups) {
        let group = vreinterpretq_s8_s32(vdupq_n_s32(*group));
        sums[0] = dot_4(sums[0], weights[0], group);
        sums[1] = dot_4(sums[1], weights[1], group);
    }
    sums
}

/// sums += value · factor, fused.
#[target_feature(enable = "neon")]
#[inline]
fn accumulate(sums: &mut [f32; STRIP], values: [float32x4_t; 2], factors: [float32x4_t; 2]) {
    let pointer = sums.as_mut_ptr();
    // SAFETY: the array has two vectors.
    unsafe {
        vst1q_f32(pointer, vfmaq_f32(vld1q_f32(pointer), values[0], factors[0]));
        let pointer = pointer.add(4);
        vst1q_f32(pointer, vfmaq_f32(vld1q_f32(pointer), values[1], factors[1]));
    }
}

#[target_feature(enable = "neon")]
#[inline]
fn scaled(values: &[f32; STRIP], factor: f32) -> [float32x4_t; 2] {
    // SAFETY: the array has two vectors.
    unsafe {
        let pointer = values.as_ptr();
        let factor = vdupq_n_f32(factor);
        [vmulq_f32(vld1q_f32(pointer), factor), vmulq_f32(vld1q_f32(pointer.add(4)), factor)]
    }
}

#[target_feature(enable = "neon")]
#[inline]
fn to_f32(values: [int32x4_t; 2]) -> [float32x4_t; 2] {
    [vcvtq_f32_s32(values[0]), vcvtq_f32_s32(values[1])]
}

/// One block of 32 columns with one scale a row.
#[target_feature(enable = "neon,dotprod")]
#[inline]
fn block_32(
    weights: &[Rows; 8],
    scales: &[f32; STRIP],
    xs: &[ActivationBlock],
    sums: &mut [[f32; STRIP]],
) {
    for (sums, x) in sums.iter_mut().zip(xs) {
        accumulate(sums, to_f32(dot(weights, &x.groups)), scaled(scales, x.scale));
    }
}

#[target_feature(enable = "neon,dotprod")]
fn q8(strip: &[u8], panel: Panel<'_>, sums: &mut [[f32; STRIP]]) {
    for (k, block) in PackedQ8::strip(strip).iter().enumerate() {
        let mut weights = [[vdupq_n_s8(0); 2]; 8];
        for (weights, values) in weights.iter_mut().zip(&block.values) {
            let [a, b] = load(values);
            *weights = [vreinterpretq_s8_u8(a), vreinterpretq_s8_u8(b)];
        }
        block_32(&weights, &block.scales.map(f16::to_f32), panel.block(k), sums);
    }
}

#[target_feature(enable = "neon,dotprod")]
fn q4(strip: &[u8], panel: Panel<'_>, sums: &mut [[f32; STRIP]]) {
    for (k, block) in PackedQ4::strip(strip).iter().enumerate() {
        let mut weights = [[vdupq_n_s8(0); 2]; 8];
        for (weights, [a, b]) in weights.iter_mut().zip(nibbles(&block.nibbles)) {
            *weights = [signed(a, 8), signed(b, 8)];
        }
        block_32(&weights, &block.scales.map(f16::to_f32), panel.block(k), sums);
    }
}

#[target_feature(enable = "neon,dotprod")]
fn q4_k(strip: &[u8], panel: Panel<'_>, sums: &mut [[f32; STRIP]]) {
    for (k, block) in PackedQ4K::strip(strip).iter().enumerate() {
        for (sub, packed) in block.nibbles.iter().enumerate() {
            let mut weights = [[vdupq_n_s8(0); 2]; 8];
            for (weights, [a, b]) in weights.iter_mut().zip(nibbles(packed)) {
                *weights = [signed(a, 0), signed(b, 0)];
            }
            let (mut scales, mut mins) = ([0.0; STRIP], [0.0; STRIP]);
            for row in 0..STRIP {
                let (scale, min) = block.scale_min(row, sub);
                scales[row] = block.scales[row].to_f32() * f32::from(scale);
                mins[row] = block.mins[row].to_f32() * f32::from(min);
            }
            let xs = panel.block(k * 8 + sub);
            for (sums, x) in sums.iter_mut().zip(xs) {
                accumulate(sums, to_f32(dot(&weights, &x.groups)), scaled(&scales, x.scale));
                accumulate(sums, scaled(&mins, -1.0), [vdupq_n_f32(x.scaled_sum); 2]);
            }
        }
    }
}

#[target_feature(enable = "neon,dotprod")]
fn q6_k(strip: &[u8], panel: Panel<'_>, sums: &mut [[f32; STRIP]]) {
    let three = vdupq_n_u8(0x30);
    for (k, block) in PackedQ6K::strip(strip).iter().enumerate() {
        let scales = block.scales.map(f16::to_f32);
        for sub in 0..8 {
            let low = nibbles(&block.low[sub]);
            let mut weights = [[vdupq_n_s8(0); 2]; 8];
            for (group, low) in low.iter().enumerate() {
                let high = load(&block.high[sub][group % 2]);
                for part in 0..2 {
                    let high = match group / 2 {
                        0 => vshlq_n_u8::<4>(high[part]),
                        1 => vshlq_n_u8::<2>(high[part]),
                        2 => high[part],
                        _ => vshrq_n_u8::<2>(high[part]),
                    };
                    weights[group][part] = signed(vorrq_u8(low[part], vandq_u8(high, three)), 32);
                }
            }
            let mut halves = [[0; STRIP]; 2];
            for (half, to) in halves.iter_mut().enumerate() {
                *to = block.sub_scales[sub * 2 + half].map(i32::from);
            }
            for (sums, x) in sums.iter_mut().zip(panel.block(k * 8 + sub)) {
                let first = dot(&weights[..4], &x.groups[..4]);
                let second = dot(&weights[4..], &x.groups[4..]);
                let mut scaled = [vdupq_n_s32(0); 2];
                for (part, scaled) in scaled.iter_mut().enumerate() {
                    // SAFETY: the arrays have two vectors.
                    let [a, b] = unsafe {
                        halves.each_ref().map(|half| vld1q_s32(half.as_ptr().add(part * 4)))
                    };
                    *scaled = vmlaq_s32(vmulq_s32(first[part], a), second[part], b);
                }
                accumulate(sums, to_f32(scaled), self::scaled(&scales, x.scale));
            }
        }
    }
}
