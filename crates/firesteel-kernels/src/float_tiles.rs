//! Inner products of float rows: products with float weights, and the scores of attention.
//!
//! Every inner product is one chain of fused multiply-adds a lane, over the whole vectors of its
//! length and then over the rest, padded with zeros; the lanes are then added in the fixed order of
//! [`Simd::sum`]. Neither the tiles nor the number of rows change that.

use crate::simd::{Element, Kernel, Simd, load_partial};

/// Rows of `w` in a tile.
pub(crate) const TILE: usize = 8;
/// Rows of `x` that pass over a tile before the next one.
const PANEL: usize = 64;
/// Columns of a tile that are widened at once, so that they stay in the first-level cache; a
/// multiple of every number of lanes.
const COLUMNS: usize = 512;
/// Fewer rows of `x` than this read `w` as it is.
const FEW: usize = 12;

/// `write(m, n, values)` gets `Σ_k w[n + i][k] · x[m][k]` as value i, at most [`TILE`] of them, for all
/// rows of both, which have `columns` columns.
///
/// It is a kernel of its own, so that all callers share its code.
pub(crate) struct FloatTiles<'a, 'w, E> {
    pub(crate) w: &'a [E],
    pub(crate) x: &'a [f32],
    pub(crate) columns: usize,
    pub(crate) write: &'a mut (dyn FnMut(usize, usize, &[f32]) + 'w),
}

impl<E: Element> Kernel for FloatTiles<'_, '_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { w, x, columns, write } = self;
        float_tiles(simd, w, x, columns, write);
    }
}

#[inline(always)]
fn float_tiles<S: Simd, E: Element>(
    simd: S,
    w: &[E],
    x: &[f32],
    columns: usize,
    write: &mut dyn FnMut(usize, usize, &[f32]),
) {
    if x.len() < FEW * columns {
        for (n, w) in w.chunks(TILE * columns).enumerate() {
            let mut put = |m, values: &[f32]| write(m, n * TILE, values);
            let mut m = 0;
            while m < x.len() / columns {
                let rows = (x.len() / columns - m).min(4);
                let x = &x[m * columns..];
                let mut put = |j, values: &[f32]| put(m + j, values);
                match rows {
                    1 => few_rows::<S, E, 1>(simd, w, x, columns, &mut put),
                    2 => few_rows::<S, E, 2>(simd, w, x, columns, &mut put),
                    3 => few_rows::<S, E, 3>(simd, w, x, columns, &mut put),
                    _ => few_rows::<S, E, 4>(simd, w, x, columns, &mut put),
                }
                m += rows;
            }
        }
        return;
    }
    let mut tile = [0.0; TILE * COLUMNS];
    let mut sums = [[simd.splat(0.0); TILE]; PANEL];
    for (panel, x) in x.chunks(PANEL * columns).enumerate() {
        let sums = &mut sums[..x.len() / columns];
        for (n, w) in w.chunks(TILE * columns).enumerate() {
            sums.fill([simd.splat(0.0); TILE]);
            for first in (0..columns).step_by(COLUMNS) {
                let width = COLUMNS.min(columns - first);
                for (tile, w) in tile.chunks_exact_mut(COLUMNS).zip(w.chunks_exact(columns)) {
                    widen(simd, &w[first..first + width], tile);
                }
                let x = Columns { x, columns, first, width };
                // What is widened next: further columns of these rows, or the next rows.
                let next = if first + width < columns { first + width } else { TILE * columns };
                let next = w.as_ptr().wrapping_add(next);
                let ask = |line: usize| {
                    let row = line % TILE * columns;
                    let from = next.wrapping_add(row).wrapping_byte_add(line / TILE * 64);
                    if line / TILE * 64 < width * size_of::<E>() {
                        simd.prefetch(from);
                    }
                };
                if S::LANES == 16 {
                    x.add_products::<S, 4>(simd, &tile, sums, ask);
                } else {
                    x.add_products::<S, 3>(simd, &tile, sums, ask);
                }
            }
            for (m, sums) in sums.iter().enumerate() {
                write(panel * PANEL + m, n * TILE, &simd.sums(sums)[..w.len() / columns]);
            }
        }
    }
}

/// Writes `values` as f32, padded with zeros to whole vectors. `out` has room for them.
#[inline(always)]
#[allow(unsafe_code, reason = "vector loads and stores")]
pub(crate) fn widen<S: Simd, E: Element>(simd: S, values: &[E], out: &mut [f32]) {
    for (values, out) in values.chunks(S::LANES).zip(out.chunks_exact_mut(S::LANES)) {
        let vector = if values.len() == S::LANES {
            // SAFETY: there are LANES elements.
            unsafe { E::load(simd, values.as_ptr()) }
        } else {
            load_partial(simd, values)
        };
        // SAFETY: the chunk has LANES elements.
        unsafe { simd.store(vector, out.as_mut_ptr()) };
    }
}

/// Some columns of some rows.
struct Columns<'a> {
    x: &'a [f32],
    /// Of a row.
    columns: usize,
    first: usize,
    width: usize,
}

impl Columns<'_> {
    /// Adds the products with a tile to the sums of all rows, and asks for the memory that is needed
    /// next, a line at a time in between.
    #[inline(always)]
    fn add_products<S: Simd, const M: usize>(
        &self,
        simd: S,
        tile: &[f32; TILE * COLUMNS],
        sums: &mut [[S::Vector; TILE]],
        ask: impl Fn(usize),
    ) {
        let mut m = 0;
        let per_row = (TILE * COLUMNS * size_of::<f32>() / 64).div_ceil(sums.len());
        while m < sums.len() {
            let left = sums.len() - m;
            let first = m;
            // Two pairs are faster than three rows and one.
            if left >= M && left != M + 1 {
                self.rows::<S, M>(simd, tile, m, sums);
                m += M;
            } else if left >= 2 {
                self.rows::<S, 2>(simd, tile, m, sums);
                m += 2;
            } else {
                self.rows::<S, 1>(simd, tile, m, sums);
                m += 1;
            }
            (first * per_row..m * per_row).for_each(&ask);
        }
    }

    /// The same for rows `m .. m + M`.
    #[inline(always)]
    #[allow(unsafe_code, reason = "vector loads")]
    fn rows<S: Simd, const M: usize>(
        &self,
        simd: S,
        tile: &[f32; TILE * COLUMNS],
        m: usize,
        sums: &mut [[S::Vector; TILE]],
    ) {
        /// Rows of the tile whose sums are in registers together.
        const N: usize = 4;
        let x: [&[f32]; M] = std::array::from_fn(|j| {
            let start = (m + j) * self.columns + self.first;
            &self.x[start..start + self.width]
        });
        let whole = self.width / S::LANES * S::LANES;
        let Some(sums) = sums.get_mut(m..m + M) else { return };
        for n in (0..TILE).step_by(N) {
            let mut part: [[S::Vector; M]; N] =
                std::array::from_fn(|i| std::array::from_fn(|j| sums[j][n + i]));
            let w = &tile[n * COLUMNS..(n + N) * COLUMNS];
            let mut k = 0;
            while k < whole {
                // SAFETY: k + LANES ≤ whole ≤ the width of the rows and of the tile.
                unsafe {
                    let x: [S::Vector; M] =
                        std::array::from_fn(|j| simd.load_f32(x[j].as_ptr().add(k)));
                    for (i, part) in part.iter_mut().enumerate() {
                        let w = simd.load_f32(w.as_ptr().add(i * COLUMNS + k));
                        for (part, x) in part.iter_mut().zip(x) {
                            *part = simd.mul_add(w, x, *part);
                        }
                    }
                }
                k += S::LANES;
            }
            if whole < self.width {
                let x: [S::Vector; M] =
                    std::array::from_fn(|j| load_partial(simd, &x[j][whole..self.width]));
                for (i, part) in part.iter_mut().enumerate() {
                    // SAFETY: rows of the tile are padded to whole vectors.
                    let w = unsafe { simd.load_f32(w.as_ptr().add(i * COLUMNS + whole)) };
                    for (part, x) in part.iter_mut().zip(x) {
                        *part = simd.mul_add(w, x, *part);
                    }
                }
            }
            for (i, part) in part.into_iter().enumerate() {
                for (sums, part) in sums.iter_mut().zip(part) {
                    sums[n + i] = part;
                }
            }
        }
    }
}

/// Up to [`TILE`] rows of `w` with M rows of `x`.
#[inline(always)]
fn few_rows<S: Simd, E: Element, const M: usize>(
    simd: S,
    w: &[E],
    x: &[f32],
    columns: usize,
    put: &mut impl FnMut(usize, &[f32]),
) {
    let x: [&[f32]; M] = std::array::from_fn(|m| &x[m * columns..(m + 1) * columns]);
    let count = w.len() / columns;
    let mut sums = [[simd.splat(0.0); TILE]; M];
    let mut n = 0;
    while n < count {
        // As many rows as there are registers for.
        let left = count - n;
        if left == TILE && S::LANES == 16 && M < 4 {
            dots::<S, E, 8, M>(simd, &w[n * columns..], x, &mut sums, n);
            n += 8;
        } else if left >= 4 && (S::LANES == 16 || M < 4) {
            dots::<S, E, 4, M>(simd, &w[n * columns..], x, &mut sums, n);
            n += 4;
        } else if left >= 2 {
            dots::<S, E, 2, M>(simd, &w[n * columns..], x, &mut sums, n);
            n += 2;
        } else {
            dots::<S, E, 1, M>(simd, &w[n * columns..], x, &mut sums, n);
            n += 1;
        }
    }
    for (m, sums) in sums.iter().enumerate() {
        put(m, &simd.sums(sums)[..count]);
    }
}

/// The lanes of the inner products of N rows with M rows, as sums `n .. n + N` of each of the M.
#[inline(always)]
#[allow(unsafe_code, reason = "vector loads")]
fn dots<S: Simd, E: Element, const N: usize, const M: usize>(
    simd: S,
    w: &[E],
    x: [&[f32]; M],
    sums: &mut [[S::Vector; TILE]; M],
    n: usize,
) {
    let length = x.iter().map(|row| row.len()).min().unwrap_or(0);
    let w: [&[E]; N] = std::array::from_fn(|i| &w[i * length..(i + 1) * length]);
    let mut part = [[simd.splat(0.0); M]; N];
    let whole = length / S::LANES * S::LANES;
    let mut k = 0;
    while k < whole {
        // SAFETY: k + LANES ≤ whole ≤ the length of every row.
        unsafe {
            let x: [S::Vector; M] = std::array::from_fn(|j| simd.load_f32(x[j].as_ptr().add(k)));
            for i in 0..N {
                let w = E::load(simd, w[i].as_ptr().add(k));
                for j in 0..M {
                    part[i][j] = simd.mul_add(w, x[j], part[i][j]);
                }
            }
        }
        k += S::LANES;
    }
    for i in 0..N {
        for j in 0..M {
            if whole < length {
                let w = load_partial(simd, &w[i][whole..length]);
                let x = load_partial(simd, &x[j][whole..length]);
                part[i][j] = simd.mul_add(w, x, part[i][j]);
            }
            sums[j][n + i] = part[i][j];
        }
    }
}
