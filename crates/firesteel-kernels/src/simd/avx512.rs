//! AVX-512 with VNNI: a vector is 16 rows × 4 columns of two strips, and two pairs of strips share
//! the broadcasts of activations.
#![allow(unsafe_code, reason = "intrinsics")]

use std::arch::x86_64::*;

use half::{bf16, f16};

use crate::isa::Avx512Vnni;
use crate::matrix::{Format, PackedBlock, PackedQ4, PackedQ4K, PackedQ6K, PackedQ8};
use crate::quantized_rows::{ActivationBlock, BLOCK, Panel};
use crate::simd::avx2::{self, Ahead};
use crate::simd::{Kernel, QuantizedTile, STRIP, Simd};

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn run<K: Kernel>(simd: Avx512Vnni, kernel: K) -> K::Output {
    kernel.run(simd)
}

impl Simd for Avx512Vnni {
    type Vector = __m512;
    const LANES: usize = 16;
    const STRIPS: usize = 4;

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
    fn sums(self, vectors: &[__m512; 8]) -> [f32; 8] {
        // SAFETY: the token proves the features.
        unsafe { sums(vectors) }
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
    fn prefetch<T>(self, address: *const T) {
        // SAFETY: every x86-64 CPU has the instruction, which reads nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
    }

    #[inline(always)]
    fn quantize_block(self, values: &[f32; BLOCK]) -> ActivationBlock {
        // SAFETY: the token proves the features.
        unsafe { avx2::quantize_block(values) }
    }

    #[inline(always)]
    fn quantized_tile(self, tile: QuantizedTile<'_>) {
        // Few rows are bound by memory, which AVX2's tiles keep at least as busy.
        if tile.sums.len() < avx2::FEW * PAIRS * 2 * STRIP {
            return self.avx2().quantized_tile(tile);
        }
        let (sums, _) = tile.sums.as_chunks_mut::<{ 2 * STRIP }>();
        let (sums, _) = sums.as_chunks_mut::<PAIRS>();
        let [a, b, c, d] = tile.strips;
        // SAFETY: the token proves the features.
        unsafe { tiles(tile.format, [[a, b], [c, d]], tile.panel, sums) };
    }
}

/// Pairs of strips that are read side by side.
const PAIRS: usize = 2;

/// The sums of activation rows with all strips.
type Sums<'a> = &'a mut [[[f32; 2 * STRIP]; PAIRS]];

/// The products of all strips.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn tiles(format: Format, strips: [[&[u8]; 2]; PAIRS], panel: Panel<'_>, sums: Sums<'_>) {
    match format {
        Format::Q8 => q8(strips, panel, sums),
        Format::Q4 => q4(strips, panel, sums),
        Format::Q4K => q4_k(strips, panel, sums),
        Format::Q6K => q6_k(strips, panel, sums),
        Format::F32 | Format::F16 | Format::BF16 => {}
    }
}

/// Vectors of eight groups of columns.
type Groups = [__m512i; 8];

/// The blocks of all strips, column block by column block, with what to ask for meanwhile.
#[inline(always)]
fn blocks<B: PackedBlock>(
    strips: [[&[u8]; 2]; PAIRS],
) -> impl Iterator<Item = ([[&B; 2]; PAIRS], Ahead)> {
    let strips = strips.map(|pair| pair.map(B::strip));
    let count = strips.as_flattened().iter().map(|strip| strip.len()).min().unwrap_or(0);
    let ahead = Ahead::of_strips::<B>(count, 2 * PAIRS);
    (0..count).map(move |k| (strips.map(|[a, b]| [&a[k], &b[k]]), ahead(k)))
}

/// Adds the lanes of eight vectors, in the order of [`Simd::sum`]: lane distances 8, 4, 2, 1.
#[target_feature(enable = "avx512f")]
#[inline]
fn sums(v: &[__m512; 8]) -> [f32; 8] {
    let eights = |a, b| {
        let low = _mm512_shuffle_f32x4::<0b01_00_01_00>(a, b);
        _mm512_add_ps(low, _mm512_shuffle_f32x4::<0b11_10_11_10>(a, b))
    };
    let fours = |a, b| {
        let low = _mm512_shuffle_f32x4::<0b10_00_10_00>(a, b);
        _mm512_add_ps(low, _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b))
    };
    let a = fours(eights(v[0], v[1]), eights(v[2], v[3]));
    let b = fours(eights(v[4], v[5]), eights(v[6], v[7]));
    let low = _mm512_shuffle_ps::<0b01_00_01_00>(a, b);
    let twos = _mm512_add_ps(low, _mm512_shuffle_ps::<0b11_10_11_10>(a, b));
    let ones = _mm512_add_ps(twos, _mm512_permute_ps::<0b11_11_01_01>(twos));
    let order = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 4, 8, 12, 2, 6, 10, 14);
    let ones = _mm512_permutexvar_ps(order, ones);
    let mut out = [0.0; 8];
    // SAFETY: the array has 32 bytes.
    unsafe { _mm256_storeu_ps(out.as_mut_ptr(), _mm512_castps512_ps256(ones)) };
    out
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

/// `start` plus the products of four groups from group `FIRST`, for all pairs of strips.
#[target_feature(enable = "avx512f,avx512vnni")]
#[inline]
fn half_dots<const FIRST: usize>(
    start: __m512i,
    weights: &[Groups; PAIRS],
    x: &ActivationBlock,
) -> [__m512i; PAIRS] {
    let mut dots = [start; PAIRS];
    for (i, group) in x.groups.iter().enumerate().skip(FIRST).take(4) {
        let group = _mm512_set1_epi32(*group);
        for (dot, weights) in dots.iter_mut().zip(weights) {
            *dot = _mm512_dpbusd_epi32(*dot, weights[i], group);
        }
    }
    dots
}

/// `start` plus the products of eight groups, for all pairs of strips. Two short chains keep the
/// units busier than a long one.
#[target_feature(enable = "avx512f,avx512vnni")]
#[inline]
fn dots(start: __m512i, weights: &[Groups; PAIRS], x: &ActivationBlock) -> [__m512; PAIRS] {
    let low = half_dots::<0>(start, weights, x);
    let mut high = half_dots::<4>(_mm512_setzero_si512(), weights, x);
    for (high, low) in high.iter_mut().zip(low) {
        *high = _mm512_add_epi32(*high, low);
    }
    high.map(|dot| _mm512_cvtepi32_ps(dot))
}

/// sums += value · (scale · x).
#[target_feature(enable = "avx512f")]
#[inline]
fn accumulate(sums: &mut [f32; 2 * STRIP], value: __m512, scale: __m512, x: f32) {
    // SAFETY: the array has 64 bytes.
    unsafe {
        let scale = _mm512_mul_ps(scale, _mm512_set1_ps(x));
        let sum = _mm512_fmadd_ps(value, scale, _mm512_loadu_ps(sums.as_ptr()));
        _mm512_storeu_ps(sums.as_mut_ptr(), sum);
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn q4(strips: [[&[u8]; 2]; PAIRS], panel: Panel<'_>, sums: Sums<'_>) {
    for (k, (blocks, ahead)) in blocks::<PackedQ4>(strips).enumerate() {
        blocks.as_flattened().iter().for_each(|block| ahead.prefetch(*block));
        let weights = blocks.map(|[a, b]| nibbles(&a.nibbles, &b.nibbles));
        let scales = blocks.map(|[a, b]| load_scales(&a.scales, &b.scales));
        for (sums, x) in sums.iter_mut().zip(panel.block(k)) {
            let dots = dots(_mm512_set1_epi32(x.offset), &weights, x);
            for i in 0..PAIRS {
                accumulate(&mut sums[i], dots[i], scales[i], x.scale);
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn q8(strips: [[&[u8]; 2]; PAIRS], panel: Panel<'_>, sums: Sums<'_>) {
    let sign = _mm512_set1_epi8(-128);
    for (k, (blocks, ahead)) in blocks::<PackedQ8>(strips).enumerate() {
        blocks.as_flattened().iter().for_each(|block| ahead.prefetch(*block));
        // Weights plus 128.
        let weights = blocks.map(|[a, b]| {
            let load = |i: usize| _mm512_xor_si512(load(&a.values[i], &b.values[i]), sign);
            [load(0), load(1), load(2), load(3), load(4), load(5), load(6), load(7)]
        });
        let scales = blocks.map(|[a, b]| load_scales(&a.scales, &b.scales));
        for (sums, x) in sums.iter_mut().zip(panel.block(k)) {
            let start = _mm512_slli_epi32::<4>(_mm512_set1_epi32(x.offset));
            let dots = dots(start, &weights, x);
            for i in 0..PAIRS {
                accumulate(&mut sums[i], dots[i], scales[i], x.scale);
            }
        }
    }
}

/// The scales and minima of a sub-block, from those of the block.
#[target_feature(enable = "avx512f")]
#[inline]
fn q4_k_scales([a, b]: [&PackedQ4K; 2], sub: usize, [scales, mins]: [__m512; 2]) -> [__m512; 2] {
    let low = _mm512_cvtepu8_epi32(sixteen(&a.low[sub], &b.low[sub]));
    let high = _mm512_cvtepu8_epi32(sixteen(&a.high[sub % 4], &b.high[sub % 4]));
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
    [_mm512_mul_ps(scales, _mm512_cvtepi32_ps(scale)), _mm512_mul_ps(mins, _mm512_cvtepi32_ps(min))]
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn q4_k(strips: [[&[u8]; 2]; PAIRS], panel: Panel<'_>, sums: Sums<'_>) {
    for (k, (blocks, ahead)) in blocks::<PackedQ4K>(strips).enumerate() {
        let of_block =
            blocks.map(|[a, b]| [load_scales(&a.scales, &b.scales), load_scales(&a.mins, &b.mins)]);
        for sub in 0..8 {
            blocks.as_flattened().iter().for_each(|block| ahead.prefetch(&block.nibbles[sub]));
            let weights = blocks.map(|[a, b]| nibbles(&a.nibbles[sub], &b.nibbles[sub]));
            let scales: [_; PAIRS] =
                std::array::from_fn(|i| q4_k_scales(blocks[i], sub, of_block[i]));
            for (sums, x) in sums.iter_mut().zip(panel.block(k * 8 + sub)) {
                let dots = dots(_mm512_setzero_si512(), &weights, x);
                for i in 0..PAIRS {
                    let [scale, min] = scales[i];
                    accumulate(&mut sums[i], dots[i], scale, x.scale);
                    // SAFETY: the array has 64 bytes.
                    unsafe {
                        let sum = _mm512_loadu_ps(sums[i].as_ptr());
                        let sum = _mm512_fnmadd_ps(min, _mm512_set1_ps(x.scaled_sum), sum);
                        _mm512_storeu_ps(sums[i].as_mut_ptr(), sum);
                    }
                }
            }
        }
    }
}

/// The 6-bit values of a sub-block.
#[target_feature(enable = "avx512f")]
#[inline]
fn q6_k_values([first, second]: [&PackedQ6K; 2], sub: usize) -> Groups {
    let three = _mm512_set1_epi32(0x3030_3030);
    let low = nibbles(&first.low[sub], &second.low[sub]);
    let a = load(&first.high[sub][0], &second.high[sub][0]);
    let b = load(&first.high[sub][1], &second.high[sub][1]);
    let with = |low, high| _mm512_or_si512(low, _mm512_and_si512(high, three));
    [
        with(low[0], _mm512_slli_epi32::<4>(a)),
        with(low[1], _mm512_slli_epi32::<4>(b)),
        with(low[2], _mm512_slli_epi32::<2>(a)),
        with(low[3], _mm512_slli_epi32::<2>(b)),
        with(low[4], a),
        with(low[5], b),
        with(low[6], _mm512_srli_epi32::<2>(a)),
        with(low[7], _mm512_srli_epi32::<2>(b)),
    ]
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn q6_k(strips: [[&[u8]; 2]; PAIRS], panel: Panel<'_>, sums: Sums<'_>) {
    for (k, (blocks, ahead)) in blocks::<PackedQ6K>(strips).enumerate() {
        let scales = blocks.map(|[a, b]| load_scales(&a.scales, &b.scales));
        for sub in 0..8 {
            for block in blocks.as_flattened() {
                ahead.prefetch(&block.low[sub]);
                ahead.prefetch(&block.high[sub]);
            }
            let weights = blocks.map(|pair| q6_k_values(pair, sub));
            let sub_scales = blocks.map(|[a, b]| {
                let load = |i: usize| {
                    let bytes = sixteen(&a.sub_scales[i], &b.sub_scales[i]);
                    _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))
                };
                [load(sub * 2), load(sub * 2 + 1)]
            });
            // Four times the one or the other of a pair of int16.
            let (first, second) = (_mm512_set1_epi32(4), _mm512_set1_epi32(4 << 16));
            for (sums, x) in sums.iter_mut().zip(panel.block(k * 8 + sub)) {
                let offsets = _mm512_set1_epi32(bytemuck::cast(x.half_offsets));
                let first = half_dots::<0>(_mm512_madd_epi16(offsets, first), &weights, x);
                let second = half_dots::<4>(_mm512_madd_epi16(offsets, second), &weights, x);
                for i in 0..PAIRS {
                    // Exact: both terms and their sum are integers below 2²⁴.
                    let dot = _mm512_mul_ps(_mm512_cvtepi32_ps(first[i]), sub_scales[i][0]);
                    let second = _mm512_cvtepi32_ps(second[i]);
                    let dot = _mm512_fmadd_ps(second, sub_scales[i][1], dot);
                    accumulate(&mut sums[i], dot, scales[i], x.scale);
                }
            }
        }
    }
}
