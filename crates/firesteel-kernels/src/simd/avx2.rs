//! AVX2 with FMA and F16C.
#![allow(unsafe_code, reason = "intrinsics")]

use std::arch::x86_64::*;

use half::{bf16, f16};

use crate::isa::Avx2;
use crate::matrix::{Format, PackedBlock, PackedQ4, PackedQ4K, PackedQ6K, PackedQ8};
use crate::quantized_rows::{ActivationBlock, BLOCK, Panel, unit};
use crate::simd::{Kernel, MAX_STRIPS, QuantizedTile, STRIP, Simd};

/// How many bytes a product runs ahead of itself.
const PREFETCH: usize = 2048;

#[target_feature(enable = "avx2,fma,f16c")]
fn run<K: Kernel>(simd: Avx2, kernel: K) -> K::Output {
    kernel.run(simd)
}

impl Simd for Avx2 {
    type Vector = __m256;
    const LANES: usize = 8;
    const STRIPS: usize = STREAMS;

    #[inline(always)]
    fn vectorize<K: Kernel>(self, kernel: K) -> K::Output {
        // SAFETY: the token proves the features.
        unsafe { run(self, kernel) }
    }

    #[inline(always)]
    fn splat(self, value: f32) -> __m256 {
        // SAFETY: the token proves the features.
        unsafe { _mm256_set1_ps(value) }
    }

    #[inline(always)]
    fn mul_add(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: the token proves the features.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn sum(self, vector: __m256) -> f32 {
        // SAFETY: the token proves the features.
        unsafe {
            let four =
                _mm_add_ps(_mm256_castps256_ps128(vector), _mm256_extractf128_ps::<1>(vector));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
        }
    }

    #[inline(always)]
    fn sums(self, vectors: &[__m256; 8]) -> [f32; 8] {
        // SAFETY: the token proves the features.
        unsafe { sums(vectors) }
    }

    #[inline(always)]
    unsafe fn load_f32(self, pointer: *const f32) -> __m256 {
        // SAFETY: the token proves the features; the caller vouches for the elements.
        unsafe { _mm256_loadu_ps(pointer) }
    }

    #[inline(always)]
    unsafe fn load_f16(self, pointer: *const f16) -> __m256 {
        // SAFETY: the token proves the features; the caller vouches for the elements.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(pointer.cast())) }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, pointer: *const bf16) -> __m256 {
        // SAFETY: the token proves the features; the caller vouches for the elements.
        unsafe {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(pointer.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        }
    }

    #[inline(always)]
    unsafe fn store(self, vector: __m256, pointer: *mut f32) {
        // SAFETY: the token proves the features; the caller vouches for the elements.
        unsafe { _mm256_storeu_ps(pointer, vector) }
    }

    #[inline(always)]
    fn prefetch<T>(self, address: *const T) {
        // SAFETY: every x86-64 CPU has the instruction, which reads nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
    }

    #[inline(always)]
    fn quantize_block(self, values: &[f32; BLOCK]) -> ActivationBlock {
        // SAFETY: the token proves the features.
        unsafe { quantize_block(values) }
    }

    #[inline(always)]
    fn quantized_tile(self, tile: QuantizedTile<'_>) {
        let (rows, _) = tile.sums.as_chunks_mut::<STRIP>();
        let (rows, _) = rows.as_chunks_mut::<STREAMS>();
        let (format, panel) = (tile.format, tile.panel);
        // SAFETY: the token proves the features.
        unsafe {
            if rows.len() < FEW {
                return tiles(format, tile.strips, panel, Sums { rows, first: 0 });
            }
            for (first, strip) in tile.strips.into_iter().enumerate() {
                tiles(format, [strip], panel, Sums { rows: &mut *rows, first });
            }
        }
    }
}

/// Strips that are read side by side. Each lies in pages of its own, so more of them are asked for
/// at the same time than of one that is read alone.
const STREAMS: usize = MAX_STRIPS;

/// Fewer activation rows than this are bound by memory; more keep a strip in registers.
pub(super) const FEW: usize = 4;

/// The products of S strips.
#[target_feature(enable = "avx2,fma,f16c")]
fn tiles<const S: usize>(format: Format, strips: [&[u8]; S], panel: Panel<'_>, sums: Sums<'_>) {
    match format {
        Format::Q8 => q8(strips, panel, sums),
        Format::Q4 => q4(strips, panel, sums),
        Format::Q4K => q4_k(strips, panel, sums),
        Format::Q6K => q6_k(strips, panel, sums),
        Format::F32 | Format::F16 | Format::BF16 => {}
    }
}

/// The sums of activation rows with some strips, from the `first` on.
struct Sums<'a> {
    rows: &'a mut [[[f32; STRIP]; STREAMS]],
    first: usize,
}

impl Sums<'_> {
    /// The sums of strip `index`.
    fn of(&mut self, index: usize) -> impl Iterator<Item = &mut [f32; STRIP]> {
        let index = self.first + index;
        self.rows.iter_mut().filter_map(move |row| row.get_mut(index))
    }
}

/// The blocks of S strips, column block by column block, with what to ask for meanwhile.
#[inline(always)]
fn blocks<B: PackedBlock, const S: usize>(
    strips: [&[u8]; S],
) -> impl Iterator<Item = ([&B; S], Ahead)> {
    let strips = strips.map(B::strip);
    let count = strips.iter().map(|strip| strip.len()).min().unwrap_or(0);
    let ahead = Ahead::of_strips::<B>(count, S);
    (0..count).map(move |k| (strips.map(|strip| &strip[k]), ahead(k)))
}

/// Adds the lanes of eight vectors, in the order of [`Simd::sum`]: lane distances 4, 2, 1.
#[target_feature(enable = "avx2")]
#[inline]
fn sums(v: &[__m256; 8]) -> [f32; 8] {
    let fours = |a, b| {
        let low = _mm256_permute2f128_ps::<0x20>(a, b);
        _mm256_add_ps(low, _mm256_permute2f128_ps::<0x31>(a, b))
    };
    let twos = |a, b| {
        let low = _mm256_shuffle_ps::<0b01_00_01_00>(a, b);
        _mm256_add_ps(low, _mm256_shuffle_ps::<0b11_10_11_10>(a, b))
    };
    let a = twos(fours(v[0], v[1]), fours(v[2], v[3]));
    let b = twos(fours(v[4], v[5]), fours(v[6], v[7]));
    let low = _mm256_shuffle_ps::<0b10_00_10_00>(a, b);
    let ones = _mm256_add_ps(low, _mm256_shuffle_ps::<0b11_01_11_01>(a, b));
    let ones = _mm256_permutevar8x32_ps(ones, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    let mut out = [0.0; 8];
    // SAFETY: the array has 32 bytes.
    unsafe { _mm256_storeu_ps(out.as_mut_ptr(), ones) };
    out
}

/// Activations in int8. The conversion rounds ties to even, as the reference does.
#[target_feature(enable = "avx2")]
#[inline]
pub(super) fn quantize_block(values: &[f32; BLOCK]) -> ActivationBlock {
    let load = |i: usize| {
        let eight = &values[i * 8..i * 8 + 8];
        // SAFETY: the slice has 32 bytes.
        unsafe { _mm256_loadu_ps(eight.as_ptr()) }
    };
    let values = [load(0), load(1), load(2), load(3)];
    let magnitudes = values
        .map(|values| _mm256_and_si256(_mm256_castps_si256(values), _mm256_set1_epi32(i32::MAX)));
    // The bits of magnitudes are ordered like the magnitudes, with NaN above all of them.
    let eight = _mm256_max_epi32(
        _mm256_max_epi32(magnitudes[0], magnitudes[1]),
        _mm256_max_epi32(magnitudes[2], magnitudes[3]),
    );
    let four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256::<1>(eight));
    let two = _mm_max_epi32(four, _mm_shuffle_epi32::<0b01_00_11_10>(four));
    let one = _mm_max_epi32(two, _mm_shuffle_epi32::<0b10_11_00_01>(two));
    let (scale, inverse) = unit(f32::from_bits(_mm_cvtsi128_si32(one).cast_unsigned()));
    let inverse = _mm256_set1_ps(inverse);
    let [a, b, c, d] = values.map(|values| _mm256_cvtps_epi32(_mm256_mul_ps(values, inverse)));
    let bytes = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
    let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    let bytes = _mm256_permutevar8x32_epi32(bytes, order);
    let fours = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes);
    let fours = _mm256_madd_epi16(fours, _mm256_set1_epi16(1));
    let sixteens = _mm256_add_epi32(fours, _mm256_shuffle_epi32::<0b01_00_11_10>(fours));
    let sixteens = _mm256_add_epi32(sixteens, _mm256_shuffle_epi32::<0b10_11_00_01>(sixteens));
    let sums = [_mm256_extract_epi32::<0>(sixteens), _mm256_extract_epi32::<4>(sixteens)];
    let sum = sums[0] + sums[1];
    let mut block = ActivationBlock {
        scale,
        scaled_sum: scale * sum as f32,
        offset: -8 * sum,
        half_offsets: sums.map(|sum| (-8 * sum) as i16),
        ..ActivationBlock::default()
    };
    // SAFETY: the groups have 32 bytes.
    unsafe { _mm256_storeu_si256(block.groups.as_mut_ptr().cast(), bytes) };
    block
}

/// How many bytes beyond a block those lie that will be needed soon.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ahead(usize);

impl Ahead {
    /// For the blocks of strips that are read side by side, of `count` blocks each, by their index
    /// in the strip. Towards the end of a strip, what follows is that many strips away.
    #[inline(always)]
    pub(super) fn of_strips<B>(count: usize, streams: usize) -> impl Fn(usize) -> Self {
        let others = (count * size_of::<B>()).wrapping_mul(streams.wrapping_sub(1));
        let inside = count.saturating_sub(PREFETCH / size_of::<B>());
        move |k| Self(if k < inside { PREFETCH } else { PREFETCH.wrapping_add(others) })
    }

    /// Asks for what will be needed when a part of a block is done. It may lie beyond the end of
    /// the weights, where it is only an address.
    #[inline(always)]
    pub(super) fn prefetch<T>(self, part: &T) {
        let ahead = std::ptr::from_ref(part).cast::<i8>().wrapping_add(self.0);
        for line in (0..size_of::<T>()).step_by(64) {
            // SAFETY: every x86-64 CPU has the instruction, which reads nothing.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(ahead.wrapping_add(line)) };
        }
    }
}

/// One vector of 8 rows × 4 columns.
#[target_feature(enable = "avx2")]
#[inline]
fn load<T: bytemuck::Pod>(rows: &[T; STRIP]) -> __m256i {
    const { assert!(size_of::<T>() == 4) };
    // SAFETY: the array has 32 bytes.
    unsafe { _mm256_loadu_si256(rows.as_ptr().cast()) }
}

#[target_feature(enable = "avx2,f16c")]
#[inline]
fn load_scales(scales: &[f16; STRIP]) -> __m256 {
    // SAFETY: the array has 16 bytes.
    unsafe { _mm256_cvtph_ps(_mm_loadu_si128(scales.as_ptr().cast())) }
}

/// Eight bytes as int32.
#[target_feature(enable = "avx2")]
#[inline]
fn load_bytes(bytes: &[u8; STRIP]) -> __m256i {
    _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(i64::from_le_bytes(*bytes)))
}

/// Eight int8 as int32.
#[target_feature(enable = "avx2")]
#[inline]
fn load_signed(bytes: &[i8; STRIP]) -> __m256i {
    let bytes = _mm_cvtsi64_si128(i64::from_le_bytes(bytes.map(i8::cast_unsigned)));
    _mm256_cvtepi8_epi32(bytes)
}

/// Two int16 in the low and the high half of every lane.
#[target_feature(enable = "avx2")]
#[inline]
fn both(low: __m256i, high: __m256i) -> __m256i {
    _mm256_blend_epi16::<0b1010_1010>(low, _mm256_slli_epi32::<16>(high))
}

/// The 32 columns of 8 rows in groups, from nibbles.
#[target_feature(enable = "avx2")]
#[inline]
fn nibbles(packed: &[[[u8; 4]; STRIP]; 4]) -> [__m256i; 8] {
    let mask = _mm256_set1_epi8(15);
    let [a, b, c, d] = [load(&packed[0]), load(&packed[1]), load(&packed[2]), load(&packed[3])];
    [
        _mm256_and_si256(a, mask),
        _mm256_and_si256(b, mask),
        _mm256_and_si256(c, mask),
        _mm256_and_si256(d, mask),
        _mm256_and_si256(_mm256_srli_epi16::<4>(a), mask),
        _mm256_and_si256(_mm256_srli_epi16::<4>(b), mask),
        _mm256_and_si256(_mm256_srli_epi16::<4>(c), mask),
        _mm256_and_si256(_mm256_srli_epi16::<4>(d), mask),
    ]
}

/// Unsigned weights with a group of activations, in pairs of int16.
#[target_feature(enable = "avx2")]
#[inline]
fn pairs(weights: __m256i, group: i32) -> __m256i {
    _mm256_maddubs_epi16(weights, _mm256_set1_epi32(group))
}

/// The product of 32 columns of 4-bit weights. A sum of eight pairs is at most 8 · 2 · 15 · 127, which
/// an int16 holds.
#[target_feature(enable = "avx2")]
#[inline]
fn dot_4(w: &[__m256i; 8], x: &ActivationBlock) -> __m256i {
    let g = &x.groups;
    let a = _mm256_add_epi16(pairs(w[0], g[0]), pairs(w[1], g[1]));
    let b = _mm256_add_epi16(pairs(w[2], g[2]), pairs(w[3], g[3]));
    let c = _mm256_add_epi16(pairs(w[4], g[4]), pairs(w[5], g[5]));
    let d = _mm256_add_epi16(pairs(w[6], g[6]), pairs(w[7], g[7]));
    let sum = _mm256_add_epi16(_mm256_add_epi16(a, b), _mm256_add_epi16(c, d));
    _mm256_madd_epi16(sum, _mm256_set1_epi16(1))
}

/// sums += dot · (scale · x).
#[target_feature(enable = "avx2,fma")]
#[inline]
fn accumulate(sums: &mut [f32; STRIP], dot: __m256i, scale: __m256, x: f32) {
    // SAFETY: the array has 32 bytes.
    unsafe {
        let scale = _mm256_mul_ps(scale, _mm256_set1_ps(x));
        let sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), scale, _mm256_loadu_ps(sums.as_ptr()));
        _mm256_storeu_ps(sums.as_mut_ptr(), sum);
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn q4<const S: usize>(strips: [&[u8]; S], panel: Panel<'_>, mut sums: Sums<'_>) {
    for (k, (blocks, ahead)) in blocks::<PackedQ4, S>(strips).enumerate() {
        let activations = panel.block(k);
        for (strip, block) in blocks.into_iter().enumerate() {
            ahead.prefetch(block);
            let weights = nibbles(&block.nibbles);
            let scales = load_scales(&block.scales);
            for (sums, x) in sums.of(strip).zip(activations) {
                let dot = _mm256_add_epi32(dot_4(&weights, x), _mm256_set1_epi32(x.offset));
                accumulate(sums, dot, scales, x.scale);
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn q4_k<const S: usize>(strips: [&[u8]; S], panel: Panel<'_>, mut sums: Sums<'_>) {
    for (k, (blocks, ahead)) in blocks::<PackedQ4K, S>(strips).enumerate() {
        let of_block = blocks.map(|block| [load_scales(&block.scales), load_scales(&block.mins)]);
        for sub in 0..8 {
            let activations = panel.block(k * 8 + sub);
            for (strip, block) in blocks.into_iter().enumerate() {
                ahead.prefetch(&block.nibbles[sub]);
                let weights = nibbles(&block.nibbles[sub]);
                let [scale, min] = q4_k_scales(block, sub, of_block[strip]);
                for (sums, x) in sums.of(strip).zip(activations) {
                    accumulate(sums, dot_4(&weights, x), scale, x.scale);
                    // SAFETY: the array has 32 bytes.
                    unsafe {
                        let sum = _mm256_loadu_ps(sums.as_ptr());
                        let sum = _mm256_fnmadd_ps(min, _mm256_set1_ps(x.scaled_sum), sum);
                        _mm256_storeu_ps(sums.as_mut_ptr(), sum);
                    }
                }
            }
        }
    }
}

/// The scales and minima of a sub-block, from those of the block.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn q4_k_scales(block: &PackedQ4K, sub: usize, [scales, mins]: [__m256; 2]) -> [__m256; 2] {
    let low = load_bytes(&block.low[sub]);
    let high = load_bytes(&block.high[sub % 4]);
    let high = if sub < 4 { high } else { _mm256_srli_epi32::<4>(high) };
    let (four, two) = (_mm256_set1_epi32(15), _mm256_set1_epi32(0x30));
    let scale = _mm256_or_si256(
        _mm256_and_si256(low, four),
        _mm256_and_si256(_mm256_slli_epi32::<4>(high), two),
    );
    let min = _mm256_or_si256(
        _mm256_srli_epi32::<4>(low),
        _mm256_and_si256(_mm256_slli_epi32::<2>(high), two),
    );
    [_mm256_mul_ps(scales, _mm256_cvtepi32_ps(scale)), _mm256_mul_ps(mins, _mm256_cvtepi32_ps(min))]
}

#[target_feature(enable = "avx2,fma,f16c")]
fn q6_k<const S: usize>(strips: [&[u8]; S], panel: Panel<'_>, mut sums: Sums<'_>) {
    let three = _mm256_set1_epi8(0x30);
    for (k, (blocks, ahead)) in blocks::<PackedQ6K, S>(strips).enumerate() {
        for (sub, strip) in (0..8).flat_map(|sub| (0..S).map(move |strip| (sub, strip))) {
            let block = blocks[strip];
            let scales = load_scales(&block.scales);
            ahead.prefetch(&block.low[sub]);
            ahead.prefetch(&block.high[sub]);
            let low = nibbles(&block.low[sub]);
            let [a, b] = [load(&block.high[sub][0]), load(&block.high[sub][1])];
            let w = [
                _mm256_or_si256(low[0], _mm256_and_si256(_mm256_slli_epi16::<4>(a), three)),
                _mm256_or_si256(low[1], _mm256_and_si256(_mm256_slli_epi16::<4>(b), three)),
                _mm256_or_si256(low[2], _mm256_and_si256(_mm256_slli_epi16::<2>(a), three)),
                _mm256_or_si256(low[3], _mm256_and_si256(_mm256_slli_epi16::<2>(b), three)),
                _mm256_or_si256(low[4], _mm256_and_si256(a, three)),
                _mm256_or_si256(low[5], _mm256_and_si256(b, three)),
                _mm256_or_si256(low[6], _mm256_and_si256(_mm256_srli_epi16::<2>(a), three)),
                _mm256_or_si256(low[7], _mm256_and_si256(_mm256_srli_epi16::<2>(b), three)),
            ];
            let first = load_signed(&block.sub_scales[sub * 2]);
            let second = load_signed(&block.sub_scales[sub * 2 + 1]);
            let (offsets, first, second) = (
                _mm256_slli_epi16::<2>(both(first, second)),
                both(first, first),
                both(second, second),
            );
            for (sums, x) in sums.of(strip).zip(panel.block(k * 8 + sub)) {
                let g = &x.groups;
                // A sum of two pairs is at most 2 · 2 · 63 · 127, which an int16 holds; more is not.
                let quarter =
                    |i: usize| _mm256_add_epi16(pairs(w[i], g[i]), pairs(w[i + 1], g[i + 1]));
                let half = |i: usize, scale| {
                    let a = _mm256_madd_epi16(quarter(i), scale);
                    _mm256_add_epi32(a, _mm256_madd_epi16(quarter(i + 2), scale))
                };
                let offset = _mm256_set1_epi32(bytemuck::cast(x.half_offsets));
                let dot = _mm256_add_epi32(half(0, first), half(4, second));
                let dot = _mm256_add_epi32(dot, _mm256_madd_epi16(offset, offsets));
                accumulate(sums, dot, scales, x.scale);
            }
        }
    }
}

/// The magnitudes of the weights take the unsigned side, their signs go to the activations: a pair is
/// then at most 2 · 128 · 127, which an int16 holds. Activations are never −128, so their negatives
/// exist.
#[target_feature(enable = "avx2,fma,f16c")]
fn q8<const S: usize>(strips: [&[u8]; S], panel: Panel<'_>, mut sums: Sums<'_>) {
    let ones = _mm256_set1_epi16(1);
    for (k, (blocks, ahead)) in blocks::<PackedQ8, S>(strips).enumerate() {
        let activations = panel.block(k);
        for (strip, block) in blocks.into_iter().enumerate() {
            ahead.prefetch(block);
            let scales = load_scales(&block.scales);
            let v = &block.values;
            let magnitudes = [
                _mm256_abs_epi8(load(&v[0])),
                _mm256_abs_epi8(load(&v[1])),
                _mm256_abs_epi8(load(&v[2])),
                _mm256_abs_epi8(load(&v[3])),
                _mm256_abs_epi8(load(&v[4])),
                _mm256_abs_epi8(load(&v[5])),
                _mm256_abs_epi8(load(&v[6])),
                _mm256_abs_epi8(load(&v[7])),
            ];
            for (sums, x) in sums.of(strip).zip(activations) {
                let product = |i: usize| {
                    let signed = _mm256_sign_epi8(_mm256_set1_epi32(x.groups[i]), load(&v[i]));
                    _mm256_madd_epi16(_mm256_maddubs_epi16(magnitudes[i], signed), ones)
                };
                let a = _mm256_add_epi32(product(0), product(1));
                let b = _mm256_add_epi32(product(2), product(3));
                let c = _mm256_add_epi32(product(4), product(5));
                let d = _mm256_add_epi32(product(6), product(7));
                let dot = _mm256_add_epi32(_mm256_add_epi32(a, b), _mm256_add_epi32(c, d));
                accumulate(sums, dot, scales, x.scale);
            }
        }
    }
}
