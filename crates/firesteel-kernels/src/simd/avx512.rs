//! AVX-512 with VNNI: two strips at a time, so that a vector is 16 rows × 4 columns.
#![allow(unsafe_code, reason = "intrinsics")]

use std::arch::x86_64::*;

use half::{bf16, f16};

use crate::isa::Avx512Vnni;
use crate::matrix::{Format, PackedBlock, PackedQ4, PackedQ4K, PackedQ6K, PackedQ8};
use crate::quantized_rows::{ActivationBlock, Panel};
use crate::simd::avx2::prefetch;
use crate::simd::{Kernel, QuantizedTile, STRIP, Simd};

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn run<K: Kernel>(simd: Avx512Vnni, kernel: K) -> K::Output {
    kernel.run(simd)
}

impl Simd for Avx512Vnni {
    type Vector = __m512;
    const LANES: usize = 16;
    const STRIPS: usize = 2;

    #[inline(always)]
    fn vectorize<K: Kernel>(self, kernel: K) -> K::Output {
        // SAFETY: the token proves the features.
        unsafe { run(self, kernel) }
    }

    #[inline(always)]
    fn splat(self, value: f32) -> __m512 {
        // SAFETY: the token proves the features.
        unsafe { _mm512_set1_ps(value) }
    }

    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: the token proves the features.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn sum(self, vector: __m512) -> f32 {
        // SAFETY: the token proves the features.
        unsafe {
            let eight =
                _mm256_add_ps(_mm512_castps512_ps256(vector), _mm512_extractf32x8_ps::<1>(vector));
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
    }

    #[inline(always)]
    unsafe fn load_f32(self, pointer: *const f32) -> __m512 {
        // SAFETY: the token proves the features; the caller vouches for the elements.
        unsafe { _mm512_loadu_ps(pointer) }
    }

    #[inline(always)]
    unsafe fn load_f16(self, pointer: *const f16) -> __m512 {
        // SAFETY: the token proves the features; the caller vouches for the elements.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(pointer.cast())) }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, pointer: *const bf16) -> __m512 {
        // SAFETY: the token proves the features; the caller vouches for the elements.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(pointer.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }

    #[inline(always)]
    unsafe fn store(self, vector: __m512, pointer: *mut f32) {
        // SAFETY: the token proves the features; the caller vouches for the elements.
        unsafe { _mm512_storeu_ps(pointer, vector) }
    }

    #[inline(always)]
    fn quantized_tile(self, tile: QuantizedTile<'_>) {
        let (sums, _) = tile.sums.as_chunks_mut::<{ 2 * STRIP }>();
        let strips = [tile.first, tile.second];
        // SAFETY: the token proves the features.
        unsafe {
            match tile.format {
                Format::Q8 => q8(strips, tile.panel, sums),
                Format::Q4 => q4(strips, tile.panel, sums),
                Format::Q4K => q4_k(strips, tile.panel, sums),
                Format::Q6K => q6_k(strips, tile.panel, sums),
                Format::F32 | Format::F16 | Format::BF16 => {}
            }
        }
    }
}

/// One vector of 16 rows × 4 columns.
#[target_feature(enable = "avx512f")]
#[inline]
fn load<T: bytemuck::Pod>(first: &[T; STRIP], second: &[T; STRIP]) -> __m512i {
    const { assert!(size_of::<T>() == 4) };
    // SAFETY: both arrays have 32 bytes.
    unsafe {
        let first = _mm256_loadu_si256(first.as_ptr().cast());
        let second = _mm256_loadu_si256(second.as_ptr().cast());
        _mm512_inserti64x4::<1>(_mm512_castsi256_si512(first), second)
    }
}

#[target_feature(enable = "avx512f")]
#[inline]
fn load_scales(first: &[f16; STRIP], second: &[f16; STRIP]) -> __m512 {
    // SAFETY: both arrays have 16 bytes.
    unsafe {
        let first = _mm_loadu_si128(first.as_ptr().cast());
        let second = _mm_loadu_si128(second.as_ptr().cast());
        _mm512_cvtph_ps(_mm256_set_m128i(second, first))
    }
}

#[target_feature(enable = "avx512f")]
#[inline]
fn sixteen<T: bytemuck::Pod>(first: &[T; STRIP], second: &[T; STRIP]) -> __m128i {
    const { assert!(size_of::<T>() == 1) };
    // SAFETY: both arrays have 8 bytes.
    unsafe {
        let first = _mm_loadl_epi64(first.as_ptr().cast());
        let second = _mm_loadl_epi64(second.as_ptr().cast());
        _mm_unpacklo_epi64(first, second)
    }
}

/// The 32 columns of 16 rows in groups, from nibbles.
#[target_feature(enable = "avx512f")]
#[inline]
fn nibbles(first: &[[[u8; 4]; STRIP]; 4], second: &[[[u8; 4]; STRIP]; 4]) -> [__m512i; 8] {
    let mask = _mm512_set1_epi32(0x0F0F_0F0F);
    let a = load(&first[0], &second[0]);
    let b = load(&first[1], &second[1]);
    let c = load(&first[2], &second[2]);
    let d = load(&first[3], &second[3]);
    [
        _mm512_and_si512(a, mask),
        _mm512_and_si512(b, mask),
        _mm512_and_si512(c, mask),
        _mm512_and_si512(d, mask),
        _mm512_and_si512(_mm512_srli_epi32::<4>(a), mask),
        _mm512_and_si512(_mm512_srli_epi32::<4>(b), mask),
        _mm512_and_si512(_mm512_srli_epi32::<4>(c), mask),
        _mm512_and_si512(_mm512_srli_epi32::<4>(d), mask),
    ]
}

/// `start` plus the product of four groups, from group `I`.
#[target_feature(enable = "avx512f,avx512vnni")]
#[inline]
fn dot_half<const I: usize>(start: __m512i, w: &[__m512i; 8], x: &ActivationBlock) -> __m512i {
    let dot = _mm512_dpbusd_epi32(start, w[I], _mm512_set1_epi32(x.groups[I]));
    let dot = _mm512_dpbusd_epi32(dot, w[I + 1], _mm512_set1_epi32(x.groups[I + 1]));
    let dot = _mm512_dpbusd_epi32(dot, w[I + 2], _mm512_set1_epi32(x.groups[I + 2]));
    _mm512_dpbusd_epi32(dot, w[I + 3], _mm512_set1_epi32(x.groups[I + 3]))
}

/// `start` plus the product of eight groups.
#[target_feature(enable = "avx512f,avx512vnni")]
#[inline]
fn dot(start: __m512i, w: &[__m512i; 8], x: &ActivationBlock) -> __m512i {
    dot_half::<4>(dot_half::<0>(start, w, x), w, x)
}

/// sums += dot · (scale · x).
#[target_feature(enable = "avx512f")]
#[inline]
fn accumulate(sums: &mut [f32; 2 * STRIP], dot: __m512i, scale: __m512, x: f32) {
    // SAFETY: the array has 64 bytes.
    unsafe {
        let scale = _mm512_mul_ps(scale, _mm512_set1_ps(x));
        let sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), scale, _mm512_loadu_ps(sums.as_ptr()));
        _mm512_storeu_ps(sums.as_mut_ptr(), sum);
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn q4(strips: [&[u8]; 2], panel: Panel<'_>, sums: &mut [[f32; 2 * STRIP]]) {
    let [first, second] = strips.map(PackedQ4::strip);
    for (k, (first, second)) in first.iter().zip(second).enumerate() {
        prefetch(first);
        prefetch(second);
        let weights = nibbles(&first.nibbles, &second.nibbles);
        let scales = load_scales(&first.scales, &second.scales);
        for (sums, x) in sums.iter_mut().zip(panel.block(k)) {
            let dot = dot(_mm512_set1_epi32(x.offset), &weights, x);
            accumulate(sums, dot, scales, x.scale);
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn q8(strips: [&[u8]; 2], panel: Panel<'_>, sums: &mut [[f32; 2 * STRIP]]) {
    let sign = _mm512_set1_epi8(-128);
    let [first, second] = strips.map(PackedQ8::strip);
    for (k, (first, second)) in first.iter().zip(second).enumerate() {
        prefetch(first);
        prefetch(second);
        // Weights plus 128.
        let load = |i: usize| _mm512_xor_si512(load(&first.values[i], &second.values[i]), sign);
        let weights = [load(0), load(1), load(2), load(3), load(4), load(5), load(6), load(7)];
        let scales = load_scales(&first.scales, &second.scales);
        for (sums, x) in sums.iter_mut().zip(panel.block(k)) {
            let start = _mm512_slli_epi32::<4>(_mm512_set1_epi32(x.offset));
            accumulate(sums, dot(start, &weights, x), scales, x.scale);
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn q4_k(strips: [&[u8]; 2], panel: Panel<'_>, sums: &mut [[f32; 2 * STRIP]]) {
    let [first, second] = strips.map(PackedQ4K::strip);
    for (k, (first, second)) in first.iter().zip(second).enumerate() {
        let scales = load_scales(&first.scales, &second.scales);
        let mins = load_scales(&first.mins, &second.mins);
        for sub in 0..8 {
            prefetch(&first.nibbles[sub]);
            prefetch(&second.nibbles[sub]);
            let weights = nibbles(&first.nibbles[sub], &second.nibbles[sub]);
            let low = _mm512_cvtepu8_epi32(sixteen(&first.low[sub], &second.low[sub]));
            let high = _mm512_cvtepu8_epi32(sixteen(&first.high[sub % 4], &second.high[sub % 4]));
            let high = if sub < 4 { high } else { _mm512_srli_epi32::<4>(high) };
            let (four, two) = (_mm512_set1_epi32(15), _mm512_set1_epi32(0x30));
            let scale = _mm512_or_si512(
                _mm512_and_si512(low, four),
                _mm512_and_si512(_mm512_slli_epi32::<4>(high), two),
            );
            let min = _mm512_or_si512(
                _mm512_srli_epi32::<4>(low),
                _mm512_and_si512(_mm512_slli_epi32::<2>(high), two),
            );
            let scale = _mm512_mul_ps(scales, _mm512_cvtepi32_ps(scale));
            let min = _mm512_mul_ps(mins, _mm512_cvtepi32_ps(min));
            for (sums, x) in sums.iter_mut().zip(panel.block(k * 8 + sub)) {
                accumulate(sums, dot(_mm512_setzero_si512(), &weights, x), scale, x.scale);
                // SAFETY: the array has 64 bytes.
                unsafe {
                    let sum = _mm512_loadu_ps(sums.as_ptr());
                    let sum = _mm512_fnmadd_ps(min, _mm512_set1_ps(x.scaled_sum), sum);
                    _mm512_storeu_ps(sums.as_mut_ptr(), sum);
                }
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn q6_k(strips: [&[u8]; 2], panel: Panel<'_>, sums: &mut [[f32; 2 * STRIP]]) {
    let three = _mm512_set1_epi32(0x3030_3030);
    let [first, second] = strips.map(PackedQ6K::strip);
    for (k, (first, second)) in first.iter().zip(second).enumerate() {
        let scales = load_scales(&first.scales, &second.scales);
        for sub in 0..8 {
            for block in [first, second] {
                prefetch(&block.low[sub]);
                prefetch(&block.high[sub]);
            }
            let low = nibbles(&first.low[sub], &second.low[sub]);
            let a = load(&first.high[sub][0], &second.high[sub][0]);
            let b = load(&first.high[sub][1], &second.high[sub][1]);
            let with = |low, high| _mm512_or_si512(low, _mm512_and_si512(high, three));
            let weights = [
                with(low[0], _mm512_slli_epi32::<4>(a)),
                with(low[1], _mm512_slli_epi32::<4>(b)),
                with(low[2], _mm512_slli_epi32::<2>(a)),
                with(low[3], _mm512_slli_epi32::<2>(b)),
                with(low[4], a),
                with(low[5], b),
                with(low[6], _mm512_srli_epi32::<2>(a)),
                with(low[7], _mm512_srli_epi32::<2>(b)),
            ];
            let sub_scale = |i: usize| {
                let bytes = sixteen(&first.sub_scales[i], &second.sub_scales[i]);
                _mm512_mul_ps(scales, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)))
            };
            let (scale_0, scale_1) = (sub_scale(sub * 2), sub_scale(sub * 2 + 1));
            for (sums, x) in sums.iter_mut().zip(panel.block(k * 8 + sub)) {
                let low = _mm512_set1_epi32(x.low_offset);
                let high = _mm512_sub_epi32(_mm512_set1_epi32(x.offset), low);
                let dot = dot_half::<0>(_mm512_slli_epi32::<2>(low), &weights, x);
                accumulate(sums, dot, scale_0, x.scale);
                let dot = dot_half::<4>(_mm512_slli_epi32::<2>(high), &weights, x);
                accumulate(sums, dot, scale_1, x.scale);
            }
        }
    }
}
