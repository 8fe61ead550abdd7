use std::ops::Range;

use firesteel_kernels::{
    Attention, AttentionShape, Isa, KvBlock, KvRows, Positions, Segment, attention, dequantize_kv,
    quantize_kv,
};
use firesteel_testing::Numbers;
use half::f16;

use crate::support::{bits, difference, pool};

/// A segment whose keys and values are kept in one of the cache types.
struct Cache {
    keys: Vec<f32>,
    values: Vec<f32>,
    half: [Vec<f16>; 2],
    blocks: [Vec<KvBlock>; 2],
    entries: usize,
    capacity: usize,
    positions: Option<Vec<usize>>,
    first: usize,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    F32,
    F16,
    Q8,
}

impl Cache {
    fn new(kind: Kind, shape: AttentionShape, entries: usize, capacity: usize, seed: u64) -> Self {
        let mut random = Numbers::new(seed);
        let count = shape.kv_heads * capacity * shape.head_dim;
        let mut sides = [random.units(count), random.units(count)];
        let (mut half, mut blocks) = ([vec![], vec![]], [vec![], vec![]]);
        for (i, side) in sides.iter_mut().enumerate() {
            match kind {
                Kind::F32 => {}
                Kind::F16 => {
                    half[i] = side.iter().map(|v| f16::from_f32(*v)).collect();
                    *side = half[i].iter().map(|v| v.to_f32()).collect();
                }
                Kind::Q8 => {
                    blocks[i] = vec![KvBlock { scale: f16::ZERO, values: [0; 32] }; count / 32];
                    quantize_kv(side, &mut blocks[i]).unwrap();
                    let original = side.clone();
                    dequantize_kv(&blocks[i], side).unwrap();
                    for (a, b) in original.iter().zip(&*side) {
                        assert!((a - b).abs() <= 0.51 / 127.0, "{a} {b}");
                    }
                }
            }
        }
        let [keys, values] = sides;
        Self { keys, values, half, blocks, entries, capacity, positions: None, first: 0 }
    }

    fn segment(&self, kind: Kind) -> Segment<'_> {
        let (keys, values) = match kind {
            Kind::F32 => (KvRows::F32(&self.keys), KvRows::F32(&self.values)),
            Kind::F16 => (KvRows::F16(&self.half[0]), KvRows::F16(&self.half[1])),
            Kind::Q8 => (KvRows::Q8(&self.blocks[0]), KvRows::Q8(&self.blocks[1])),
        };
        let positions = match &self.positions {
            Some(positions) => Positions::Each(positions),
            None => Positions::Consecutive(self.first),
        };
        Segment { keys, values, entries: self.entries, capacity: self.capacity, positions }
    }

    fn position(&self, entry: usize) -> usize {
        self.positions.as_ref().map_or(self.first + entry, |p| p[entry])
    }
}

fn reference(
    shape: AttentionShape,
    scale: f32,
    queries: &[f32],
    caches: &[Cache],
    visible: &[Range<usize>],
) -> Vec<f64> {
    let AttentionShape { heads, kv_heads, head_dim, .. } = shape;
    let mut out = vec![0.0; queries.len()];
    for (t, range) in visible.iter().enumerate() {
        for h in 0..heads {
            let q = &queries[(t * heads + h) * head_dim..][..head_dim];
            let mut seen = Vec::new();
            for cache in caches {
                for entry in (0..cache.entries).filter(|e| range.contains(&cache.position(*e))) {
                    let at = (h / (heads / kv_heads) * cache.capacity + entry) * head_dim;
                    let key = &cache.keys[at..at + head_dim];
                    let dot: f64 =
                        q.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
                    seen.push((dot * f64::from(scale), &cache.values[at..at + head_dim]));
                }
            }
            let max = seen.iter().fold(f64::NEG_INFINITY, |a, (s, _)| a.max(*s));
            let sum: f64 = seen.iter().map(|(s, _)| (s - max).exp()).sum();
            for (score, value) in &seen {
                let weight = (score - max).exp() / sum;
                for (d, v) in value.iter().enumerate() {
                    out[(t * heads + h) * head_dim + d] += weight * f64::from(*v);
                }
            }
        }
    }
    out
}

fn run(isa: Isa, threads: usize, arguments: &Attention<'_>) -> Vec<f32> {
    let mut out = vec![f32::NAN; arguments.queries.len()];
    attention(isa, pool(threads), arguments, &mut out).unwrap();
    out
}

#[test]
fn agrees_with_the_definition() {
    // heads, kv_heads, head_dim
    let shapes = [(1, 1, 1), (4, 2, 7), (8, 2, 64), (3, 3, 17), (24, 1, 32)];
    for (heads, kv_heads, head_dim) in shapes {
        for kind in [Kind::F32, Kind::F16, Kind::Q8] {
            if kind == Kind::Q8 && head_dim % 32 != 0 {
                continue;
            }
            for entries in [0, 1, 2, 255, 256, 257, 600] {
                for queries in [1, 2, 17] {
                    let shape = AttentionShape { heads, kv_heads, head_dim, queries };
                    // A ring in scrambled order with an unused slot, and the tokens of the step.
                    let mut ring = Cache::new(kind, shape, entries, entries + 3, 1);
                    let mut positions: Vec<usize> =
                        (0..entries).map(|i| (i * 7 + 3) % entries.max(1)).collect();
                    if entries > 5 {
                        positions[4] = usize::MAX;
                    }
                    ring.positions = Some(positions);
                    let mut step = Cache::new(kind, shape, queries, queries, 2);
                    step.first = entries;
                    let caches = [ring, step];
                    let visible: Vec<Range<usize>> = (0..queries)
                        .map(|t| (entries + t).saturating_sub(300)..entries + t + 1)
                        .collect();
                    let q: Vec<f32> = Numbers::new(3)
                        .units(queries * heads * head_dim)
                        .iter()
                        .map(|v| v * 4.0)
                        .collect();
                    let segments = [caches[0].segment(kind), caches[1].segment(kind)];
                    let arguments = Attention {
                        shape,
                        scale: 0.5,
                        queries: &q,
                        segments: &segments,
                        visible: &visible,
                    };
                    let expected = reference(shape, 0.5, &q, &caches, &visible);
                    for isa in Isa::available() {
                        let out = run(isa, 1, &arguments);
                        let context = format!("{} {kind:?} {shape:?} {entries}", isa.name());
                        // Values are below 1; a score of about 10 is rounded to about 1e-6, which is
                        // the relative error of its weight.
                        for (e, v) in expected.iter().zip(&out) {
                            assert!((e - f64::from(*v)).abs() < 3e-6, "{context}: {e} {v}");
                        }
                        for threads in [2, 3, 64] {
                            let again = run(isa, threads, &arguments);
                            assert!(bits(&again) == bits(&out), "{context} {threads}");
                        }
                        // One query alone gives the same bytes.
                        let t = queries - 1;
                        let row = heads * head_dim;
                        let alone = Attention {
                            shape: AttentionShape { queries: 1, ..shape },
                            queries: &q[t * row..],
                            visible: &visible[t..],
                            ..arguments
                        };
                        assert!(bits(&run(isa, 2, &alone)) == bits(&out[t * row..]), "{context}");
                    }
                }
            }
        }
    }
}

#[test]
fn keys_of_any_size_stay_finite_in_8_bits() {
    for largest in [0.0, 1e-12, 1.0, 8e6, 1e9, f32::MAX] {
        let values: Vec<f32> = (0..32).map(|i| if i == 7 { -largest } else { 0.0 }).collect();
        let mut blocks = [KvBlock { scale: f16::ZERO, values: [0; 32] }];
        let mut back = [0f32; 32];
        quantize_kv(&values, &mut blocks).unwrap();
        dequantize_kv(&blocks, &mut back).unwrap();
        assert!(back.iter().all(|value| value.is_finite()), "{largest}: {back:?}");
        // The scale of the largest block is the largest of half precision.
        let held = largest.min(127.0 * f16::MAX.to_f32());
        assert!((back[7] + held).abs() <= 1e-3 * held + 1e-7, "{largest}: {}", back[7]);
    }
}

#[test]
fn large_scores_and_unseen_entries() {
    let shape = AttentionShape { heads: 2, kv_heads: 1, head_dim: 16, queries: 2 };
    let mut cache = Cache::new(Kind::F32, shape, 700, 700, 5);
    cache.keys.iter_mut().for_each(|k| *k *= 1e18);
    let q: Vec<f32> = Numbers::new(6).units(64).iter().map(|v| v * 1e18).collect();
    let (segments, visible) = ([cache.segment(Kind::F32)], [0..700, 0..0]);
    let arguments =
        Attention { shape, scale: 0.25, queries: &q, segments: &segments, visible: &visible };
    let expected = reference(shape, 0.25, &q, std::slice::from_ref(&cache), &visible);
    for isa in Isa::available() {
        let out = run(isa, 2, &arguments);
        assert!(difference(&expected[..32], &out[..32]) < 1e-6, "{}", isa.name());
        assert_eq!(out[32..], [0.0; 32], "{}", isa.name());
    }
}

#[test]
fn wrong_arguments_are_refused() {
    let shape = AttentionShape { heads: 2, kv_heads: 1, head_dim: 4, queries: 1 };
    let cache = Cache::new(Kind::F32, shape, 3, 5, 1);
    let good = cache.segment(Kind::F32);
    let positions = [0, 1];
    let q = [0.0; 8];
    let shapes = [
        AttentionShape { heads: 3, kv_heads: 2, ..shape },
        AttentionShape { kv_heads: 0, ..shape },
        AttentionShape { heads: 0, ..shape },
        AttentionShape { head_dim: 0, ..shape },
        AttentionShape { queries: 2, ..shape },
        AttentionShape { queries: usize::MAX, ..shape },
    ];
    let blocks = [KvBlock { scale: f16::ZERO, values: [0; 32] }; 1];
    let segments = [
        Segment { entries: 6, ..good },
        Segment { capacity: 6, ..good },
        Segment { capacity: usize::MAX, ..good },
        Segment { positions: Positions::Each(&positions), ..good },
        Segment { keys: KvRows::F32(&[]), ..good },
        Segment { keys: KvRows::Q8(&blocks), ..good },
    ];
    let isa = Isa::detect().unwrap();
    let pool = pool(1);
    let visible = std::slice::from_ref(&(0..9));
    let arguments = Attention { shape, scale: 1.0, queries: &q, segments: &[good], visible };
    attention(isa, pool, &arguments, &mut [0.0; 8]).unwrap();
    assert!(attention(isa, pool, &arguments, &mut [0.0; 7]).is_err());
    for shape in shapes {
        let arguments = Attention { shape, ..arguments };
        assert!(attention(isa, pool, &arguments, &mut [0.0; 8]).is_err(), "{shape:?}");
    }
    for segment in segments {
        let segments = [segment];
        let arguments = Attention { segments: &segments, ..arguments };
        assert!(attention(isa, pool, &arguments, &mut [0.0; 8]).is_err(), "{segment:?}");
    }
}
