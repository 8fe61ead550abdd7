//! The reference: plain code for every CPU.
#![allow(unsafe_code, reason = "the trait's loads and stores are by pointer")]

use std::array;

use half::{bf16, f16};

use crate::isa::Scalar;
use crate::matrix::{Format, PackedBlock, PackedQ4, PackedQ4K, PackedQ6K, PackedQ8};
use crate::quantized_rows::{ActivationBlock, Panel};
use crate::simd::{Kernel, QuantizedTile, STRIP, Simd};

impl Simd for Scalar {
    type Vector = [f32; 8];
    const LANES: usize = 8;
    const STRIPS: usize = 1;

    #[inline(always)]
    fn vectorize<K: Kernel>(self, kernel: K) -> K::Output {
        kernel.run(self)
    }

    #[inline(always)]
    fn splat(self, value: f32) -> [f32; 8] {
        [value; 8]
    }

    #[inline(always)]
    fn mul_add(self, a: [f32; 8], b: [f32; 8], c: [f32; 8]) -> [f32; 8] {
        // Not fused: without the instruction, that would be a library call a lane.
        array::from_fn(|i| a[i] * b[i] + c[i])
    }

    #[inline(always)]
    fn sum(self, v: [f32; 8]) -> f32 {
        let [a, b, c, d]: [f32; 4] = array::from_fn(|i| v[i] + v[i + 4]);
        (a + c) + (b + d)
    }

    #[inline(always)]
    unsafe fn load_f32(self, pointer: *const f32) -> [f32; 8] {
        // SAFETY: the caller vouches for eight elements.
        unsafe { pointer.cast::<[f32; 8]>().read() }
    }

    #[inline(always)]
    unsafe fn load_f16(self, pointer: *const f16) -> [f32; 8] {
        // SAFETY: the caller vouches for eight elements.
        unsafe { pointer.cast::<[f16; 8]>().read() }.map(f16::to_f32)
    }

    #[inline(always)]
    unsafe fn load_bf16(self, pointer: *const bf16) -> [f32; 8] {
        // SAFETY: the caller vouches for eight elements.
        let bits = unsafe { pointer.cast::<[u16; 8]>().read() };
        bits.map(|bits| f32::from_bits(u32::from(bits) << 16))
    }

    #[inline(always)]
    unsafe fn store(self, vector: [f32; 8], pointer: *mut f32) {
        // SAFETY: the caller vouches for eight elements.
        unsafe { pointer.cast::<[f32; 8]>().write(vector) }
    }

    fn quantized_tile(self, tile: QuantizedTile<'_>) {
        let (sums, _) = tile.sums.as_chunks_mut::<STRIP>();
        match tile.format {
            Format::Q8 => q8(tile.strips[0], tile.panel, sums),
            Format::Q4 => q4(tile.strips[0], tile.panel, sums),
            Format::Q4K => q4_k(tile.strips[0], tile.panel, sums),
            Format::Q6K => q6_k(tile.strips[0], tile.panel, sums),
            Format::F32 | Format::F16 | Format::BF16 => {}
        }
    }
}

/// The exact product of one strip row with some groups of four activations.
fn dot(
    weight: impl Fn(usize, usize) -> i32,
    activations: &ActivationBlock,
    groups: std::ops::Range<usize>,
) -> i32 {
    let mut sum = 0;
    for group in groups {
        let four = activations.groups[group].to_le_bytes();
        for (i, value) in four.into_iter().enumerate() {
            sum += weight(group, i) * i32::from(value.cast_signed());
        }
    }
    sum
}

fn q8(strip: &[u8], panel: Panel<'_>, sums: &mut [[f32; STRIP]]) {
    for (k, block) in PackedQ8::strip(strip).iter().enumerate() {
        for (sums, x) in sums.iter_mut().zip(panel.block(k)) {
            for (row, sum) in sums.iter_mut().enumerate() {
                let weight = |group: usize, i| i32::from(block.values[group][row][i]);
                let scale = block.scales[row].to_f32() * x.scale;
                *sum = (dot(weight, x, 0..8) as f32).mul_add(scale, *sum);
            }
        }
    }
}

fn q4(strip: &[u8], panel: Panel<'_>, sums: &mut [[f32; STRIP]]) {
    for (k, block) in PackedQ4::strip(strip).iter().enumerate() {
        for (sums, x) in sums.iter_mut().zip(panel.block(k)) {
            for (row, sum) in sums.iter_mut().enumerate() {
                let weight = |group, i| i32::from(block.nibble(row, group, i)) - 8;
                let scale = block.scales[row].to_f32() * x.scale;
                *sum = (dot(weight, x, 0..8) as f32).mul_add(scale, *sum);
            }
        }
    }
}

fn q4_k(strip: &[u8], panel: Panel<'_>, sums: &mut [[f32; STRIP]]) {
    for (k, block) in PackedQ4K::strip(strip).iter().enumerate() {
        for sub in 0..8 {
            for (sums, x) in sums.iter_mut().zip(panel.block(k * 8 + sub)) {
                for (row, sum) in sums.iter_mut().enumerate() {
                    let weight = |group, i| i32::from(block.nibble(row, sub, group, i));
                    let (scale, min) = block.scale_min(row, sub);
                    let scale = block.scales[row].to_f32() * f32::from(scale);
                    let min = block.mins[row].to_f32() * f32::from(min);
                    *sum = (dot(weight, x, 0..8) as f32).mul_add(scale * x.scale, *sum);
                    *sum = (-min).mul_add(x.scaled_sum, *sum);
                }
            }
        }
    }
}

fn q6_k(strip: &[u8], panel: Panel<'_>, sums: &mut [[f32; STRIP]]) {
    for (k, block) in PackedQ6K::strip(strip).iter().enumerate() {
        for sub in 0..8 {
            for (sums, x) in sums.iter_mut().zip(panel.block(k * 8 + sub)) {
                for (row, sum) in sums.iter_mut().enumerate() {
                    let weight = |group, i| i32::from(block.value(row, sub, group, i)) - 32;
                    let mut scaled = 0;
                    for half in 0..2 {
                        let scale = i32::from(block.sub_scales[sub * 2 + half][row]);
                        scaled += scale * dot(weight, x, half * 4..half * 4 + 4);
                    }
                    let scale = block.scales[row].to_f32() * x.scale;
                    *sum = (scaled as f32).mul_add(scale, *sum);
                }
            }
        }
    }
}
