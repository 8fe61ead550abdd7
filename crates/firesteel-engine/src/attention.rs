use crate::math::dot;
use std::borrow::Cow;
use std::slice::ChunksExact;

/// The keys or the values of one layer during a step: those of the cache, then the step's own.
pub(crate) struct Entries<'a> {
    /// `[KV, cache_length, head_dim]`.
    pub(crate) cached: Cow<'a, [f32]>,
    /// `[KV, tokens, head_dim]`, not rounded: what leaves the step is.
    pub(crate) new: Vec<f64>,
    /// Entries of the cache.
    pub(crate) cache_length: usize,
    /// Tokens of the step.
    pub(crate) tokens: usize,
    /// Width of an entry.
    pub(crate) head_dim: usize,
}

impl Entries<'_> {
    /// Cached entries of one key/value head, oldest first, without the first `skipped`.
    fn cached_of(&self, head: usize, skipped: usize) -> impl Iterator<Item = &[f32]> {
        rows(&self.cached, head, self.cache_length, self.head_dim).skip(skipped)
    }

    /// The step's entries of one key/value head.
    fn new_of(&self, head: usize) -> impl Iterator<Item = &[f64]> {
        rows(&self.new, head, self.tokens, self.head_dim)
    }

    /// The last `count` entries of each of `heads` heads, `[heads, count, head_dim]`.
    pub(crate) fn last(&self, heads: usize, count: usize) -> Vec<f32> {
        let skipped = self.cache_length + self.tokens - count;
        let mut values = Vec::with_capacity(heads * count * self.head_dim);
        for head in 0..heads {
            values.extend(self.cached_of(head, skipped).flatten());
            let skipped = skipped.saturating_sub(self.cache_length);
            let new = self.new_of(head).skip(skipped);
            values.extend(new.flatten().map(|&value| value as f32));
        }
        values
    }
}

/// The `length` rows of `width` values that belong to `head`.
fn rows<T>(values: &[T], head: usize, length: usize, width: usize) -> ChunksExact<'_, T> {
    let size = length * width;
    values[head * size..(head + 1) * size].chunks_exact(width)
}

/// What every query of a layer attends to.
pub(crate) struct Attention<'a> {
    /// Keys, already rotated.
    pub(crate) keys: &'a Entries<'a>,
    /// Values.
    pub(crate) values: &'a Entries<'a>,
    /// Cache entries that are not scored, counted from the first.
    pub(crate) dropped: usize,
}

impl Attention<'_> {
    /// Writes softmax(query · keys / √head_dim + mask) · values of one key/value head into `out`.
    /// `mask` has one value a scored key; `scores` is scratch.
    ///
    /// A query that sees no key, because the mask is −∞ everywhere, gives zeros. A NaN anywhere in
    /// the scores gives NaN.
    pub(crate) fn attend(
        &self,
        head: usize,
        query: &[f64],
        mask: &[f32],
        scores: &mut Vec<f64>,
        out: &mut [f64],
    ) {
        out.fill(0.0);
        let divisor = (query.len() as f64).sqrt();
        scores.clear();
        let cached = self.keys.cached_of(head, self.dropped).map(|key| dot(key, query));
        let products = cached.chain(self.keys.new_of(head).map(|key| dot(key, query)));
        let masked = products.zip(mask).map(|(dot, mask)| dot / divisor + f64::from(*mask));
        scores.extend(masked);
        let largest = scores.iter().fold(f64::NEG_INFINITY, |largest, &score| {
            if score > largest || score.is_nan() { score } else { largest }
        });
        if largest == f64::NEG_INFINITY {
            return;
        }
        let mut total = 0.0;
        for score in scores.iter_mut() {
            *score = libm::exp(*score - largest);
            total += *score;
        }
        let mut weights = scores.iter();
        for (value, weight) in self.values.cached_of(head, self.dropped).zip(&mut weights) {
            add_scaled(out, *weight, value);
        }
        for (value, weight) in self.values.new_of(head).zip(weights) {
            add_scaled(out, *weight, value);
        }
        for out in out {
            *out /= total;
        }
    }
}

/// out += weight · values.
fn add_scaled<T: Copy + Into<f64>>(out: &mut [f64], weight: f64, values: &[T]) {
    for (out, value) in out.iter_mut().zip(values) {
        *out += weight * (*value).into();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One head of width 2: two cached entries, then one of the step.
    fn entries(values: [f32; 6]) -> Entries<'static> {
        Entries {
            cached: Cow::Owned(values[..4].to_vec()),
            new: values[4..].iter().copied().map(f64::from).collect(),
            cache_length: 2,
            tokens: 1,
            head_dim: 2,
        }
    }

    #[test]
    fn masked_rows_are_finite() {
        let keys = entries([1.0, 0.0, 0.0, 1.0, 2.0, 2.0]);
        let values = entries([1.0, 2.0, 3.0, 4.0, 50.0, 60.0]);
        let attention = Attention { keys: &keys, values: &values, dropped: 0 };
        let hidden = f32::NEG_INFINITY;
        let cases: [(&str, [f32; 3], [f64; 2]); 4] = [
            ("two keys", [0.0, 0.0, hidden], [2.0, 3.0]),
            ("two keys, finite mask", [0.0, 0.0, -10_000.0], [2.0, 3.0]),
            ("no key", [hidden; 3], [0.0, 0.0]),
            ("one key", [hidden, hidden, 0.0], [50.0, 60.0]),
        ];
        for (name, mask, expected) in cases {
            let mut out = [f64::NAN; 2];
            attention.attend(0, &[3.0, 3.0], &mask, &mut Vec::new(), &mut out);
            let near = out.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-12);
            assert!(near, "{name}: {out:?}");
        }
        let mut out = [0.0; 2];
        attention.attend(0, &[3.0, 3.0], &[-10_000.0; 3], &mut Vec::new(), &mut out);
        assert!(out.iter().all(|v| v.is_finite()), "every key far below: {out:?}");
        attention.attend(0, &[f64::NAN, 0.0], &[0.0; 3], &mut Vec::new(), &mut out);
        assert!(out.iter().all(|v| v.is_nan()), "a broken query shows: {out:?}");
    }

    #[test]
    fn the_last_entries_cross_from_the_cache_to_the_step() {
        let entries = entries([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        assert_eq!(entries.last(1, 1), [5.0, 6.0]);
        assert_eq!(entries.last(1, 2), [3.0, 4.0, 5.0, 6.0]);
        assert_eq!(entries.last(1, 3), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    }
}
