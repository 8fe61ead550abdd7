//! Generated weights, and folders written from them and from other checkpoints.

use crate::common::{Model, all_values, bytes_as, parse, tiny_config, values, weights};
use firesteel_checkpoint::{
    Checkpoint, Head, ModelConfig, RandomWeights, Slot, SyntheticOptions, Weight, WriteOptions,
    preset, write_checkpoint, write_synthetic,
};
use firesteel_tensor::DType;
use proptest::prelude::*;
use std::collections::{BTreeMap, HashSet};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

fn tiny() -> ModelConfig {
    parse(&tiny_config()).unwrap().0
}

fn folder(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| {
            let entry = entry.unwrap();
            let bytes = std::fs::read(entry.path()).unwrap();
            (entry.file_name().into_string().unwrap(), bytes)
        })
        .collect()
}

fn deviation(values: &[f32]) -> (f64, f64) {
    let count = values.len() as f64;
    let mean = values.iter().map(|&v| f64::from(v)).sum::<f64>() / count;
    let square = values.iter().map(|&v| (f64::from(v) - mean).powi(2)).sum::<f64>() / count;
    (mean, square.sqrt())
}

#[test]
fn equal_seeds_write_equal_bytes_on_any_number_of_threads() {
    // Large enough for several chunks a tensor.
    let mut config = tiny();
    config.vocab_size = 40_000;
    let parent = tempfile::tempdir().unwrap();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let mut written = Vec::new();
        for threads in [1, 2, 5] {
            let out = parent.path().join(format!("{dtype}-{threads}"));
            let weights = RandomWeights { dtype, seed: 7, outliers: true };
            let options = SyntheticOptions { config: config.clone(), weights };
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| write_synthetic(options, &out, &|_, _| ())).unwrap();
            written.push(folder(&out));
        }
        assert!(written.iter().all(|other| *other == written[0]), "{dtype}");
        assert_eq!(written[0].keys().collect::<Vec<_>>(), ["config.json", "model.safetensors"]);
    }
}

#[test]
fn a_seed_means_the_same_values_in_every_version() {
    let random = RandomWeights { dtype: DType::F32, seed: 1, outliers: false };
    let checkpoint = Checkpoint::random(tiny(), random);
    let mut first = [0f32; 4];
    checkpoint.embedding().read_f32(1022, &mut first).unwrap();
    assert_eq!(first, [0.08900963, -0.055200305, -0.19590178, -0.19984962]);
}

#[test]
fn written_folders_read_back_as_the_generated_weights() {
    let parent = tempfile::tempdir().unwrap();
    for (dtype, tied) in [(DType::BF16, true), (DType::F16, false), (DType::F32, false)] {
        let mut config = tiny();
        config.tie_word_embeddings = tied;
        let random = RandomWeights { dtype, seed: 3, outliers: false };
        let out = parent.path().join(dtype.name());
        let options = SyntheticOptions { config: config.clone(), weights: random };
        let (last, most) = (AtomicU64::new(0), AtomicU64::new(0));
        write_synthetic(options, &out, &|done, total| {
            last.fetch_max(done, Ordering::Relaxed);
            most.store(total, Ordering::Relaxed);
        })
        .unwrap();
        let stored = Checkpoint::open(&out).unwrap();
        let generated = Checkpoint::random(config, random);
        assert_eq!(stored.warnings(), [""; 0]);
        assert_eq!(stored.config().dtype, Some(dtype));
        assert_eq!(matches!(stored.head(), Head::Tied), tied);
        assert_eq!(stored.tensor_count(), generated.tensor_count());
        for (a, b) in weights(&stored).iter().zip(&weights(&generated)) {
            assert_eq!((a.name(), a.shape(), a.dtype()), (b.name(), b.shape(), b.dtype()));
            assert_eq!(bytes_as(a, DType::F32), bytes_as(b, DType::F32), "{}", a.name());
            assert_eq!(bytes_as(a, DType::F16), bytes_as(b, DType::F16), "{}", a.name());
        }
        let bytes: usize = weights(&stored).iter().map(|w| w.element_count() * dtype.size()).sum();
        assert_eq!(last.into_inner(), bytes as u64);
        assert_eq!(most.into_inner(), bytes as u64);
    }
}

#[test]
fn every_layout_holds_the_same_values() {
    let parent = tempfile::tempdir().unwrap();
    let source = parent.path().join("source");
    Model::tiny().write(&source);
    let source = Checkpoint::open(&source).unwrap();
    let expected = all_values(&source);
    let cases = [
        (u64::MAX, false, 1..=1),
        (u64::MAX, true, 1..=1),
        (100_000, false, 8..=16),
        (100_000, true, 8..=16),
        (0, false, 42..=42),
    ];
    for (shard_bytes, separate_qkv, shards) in cases {
        let out = parent.path().join(format!("{shard_bytes}-{separate_qkv}"));
        let options = WriteOptions { shard_bytes, separate_qkv };
        write_checkpoint(&source, options, &out, &|_, _| ()).unwrap();
        let written = Checkpoint::open(&out).unwrap();
        assert_eq!(all_values(&written), expected);
        let files: Vec<_> =
            written.files().iter().filter(|file| file.name != "config.json").collect();
        assert!(shards.contains(&files.len()), "{shard_bytes} {separate_qkv} {}", files.len());
        assert_eq!(out.join("model.safetensors.index.json").exists(), files.len() > 1);
        if shard_bytes == 100_000 {
            assert!(files.iter().all(|file| file.bytes.len() < 102_000));
        }
        assert_eq!(written.tensor_count(), if separate_qkv { 52 } else { 42 });
    }
}

#[test]
fn an_existing_folder_is_refused_and_errors_leave_nothing() {
    let parent = tempfile::tempdir().unwrap();
    let out = parent.path().join("out");
    let write = |dtype| {
        let weights = RandomWeights { dtype, ..Default::default() };
        let options = SyntheticOptions { config: tiny(), weights };
        write_synthetic(options, &out, &|_, _| ()).map_err(|e| e.to_string())
    };
    let error = write(DType::I8).unwrap_err();
    assert!(
        error.contains("model.embedding.weight: dtype i8; accepted: f32, f16, bf16"),
        "{error}"
    );
    assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 0);
    write(DType::F16).unwrap();
    let before = folder(&out);
    let error = write(DType::F32).unwrap_err();
    assert!(error.contains("out exists already"), "{error}");
    assert_eq!(folder(&out), before);
    assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 1);
}

fn sample(weight: &Weight) -> Vec<f32> {
    let mut sample = vec![0f32; weight.element_count().min(1 << 20)];
    weight.read_f32(0, &mut sample).unwrap();
    sample
}

#[test]
fn values_look_normal_and_do_not_repeat() {
    let config = preset("spark-x2.5-1.7b").unwrap().with_layers(2).unwrap();
    let options = RandomWeights { dtype: DType::F32, seed: 0, outliers: false };
    let checkpoint = Checkpoint::random(config, options);
    for weight in weights(&checkpoint) {
        let sample = sample(&weight);
        let (mean, deviation) = deviation(&sample);
        let columns = *weight.shape().last().unwrap();
        let (expected_mean, expected) = match weight.shape() {
            [_] => (1.0, 0.05),
            _ => (0.0, 1.0 / (columns as f64).sqrt()),
        };
        let name = weight.name();
        let tolerance = 5.0 / (sample.len() as f64).sqrt();
        assert!((mean - expected_mean).abs() < expected * tolerance, "{name} {mean}");
        assert!((deviation / expected - 1.0).abs() < tolerance, "{name} {deviation}");
        let most = sample.iter().fold(0f64, |most, &v| most.max((f64::from(v) - mean).abs()));
        assert!(most < 3.5 * expected, "{name} {most}");
    }

    // No two stretches of a tensor are equal, nor are two tensors, nor two seeds.
    let other = RandomWeights { seed: 1, ..options };
    let other = Checkpoint::random(checkpoint.config().clone(), other);
    let mut seen = HashSet::new();
    let mut stretches = 0;
    for weight in weights(&checkpoint).iter().chain(&weights(&other)) {
        for stretch in sample(weight).chunks_exact(256) {
            seen.insert(stretch.iter().map(|v| v.to_bits()).collect::<Vec<_>>());
            stretches += 1;
        }
    }
    assert_eq!(seen.len(), stretches);

    // Neither neighbours nor the four values of a word are correlated.
    let values = sample(checkpoint.embedding());
    for lag in [1, 2, 255, 256, 512, 768, 1024, 2048] {
        let count = values.len() - lag;
        let product: f64 =
            (0..count).map(|i| f64::from(values[i]) * f64::from(values[i + lag])).sum();
        let correlation = product / count as f64 * 2048.0;
        assert!(correlation.abs() < 6.0 / (count as f64).sqrt(), "{lag} {correlation}");
    }
}

#[test]
fn outliers_are_the_same_channels_everywhere() {
    let config = preset("spark-x2.5-1.7b").unwrap().with_layers(1).unwrap();
    let options = RandomWeights { dtype: DType::F32, seed: 5, outliers: true };
    let checkpoint = Checkpoint::random(config.clone(), options);
    let layer = &checkpoint.layers()[0];
    let massive = |by_channel: Vec<f32>, limit: f32| -> Vec<usize> {
        (0..2048).filter(|&channel| by_channel[channel] > limit).collect()
    };
    let channels = massive(values(layer.weight(Slot::InputNorm).unwrap()), 2.0);
    assert_eq!(channels.len(), 6);
    assert_eq!(massive(values(layer.weight(Slot::PostAttentionNorm).unwrap()), 2.0), channels);
    let mut rows = vec![0f32; 2048 * 64];
    checkpoint.embedding().read_f32(2048 * 1000, &mut rows).unwrap();
    let columns: Vec<f32> = (0..2048)
        .map(|c| rows.iter().skip(c).step_by(2048).map(|v| v.abs()).sum::<f32>() / 64.0)
        .collect();
    assert_eq!(massive(columns, 0.1), channels);
    for weight in [layer.weight(Slot::AttentionOut).unwrap(), layer.weight(Slot::MlpDown).unwrap()]
    {
        let width = weight.shape()[1];
        let all = values(weight);
        let means: Vec<f32> = all
            .chunks(width)
            .map(|row| row.iter().map(|v| v.abs()).sum::<f32>() / width as f32)
            .collect();
        assert_eq!(massive(means, 3.0 / (width as f32).sqrt()), channels);
    }
    let plain = Checkpoint::random(config, RandomWeights { outliers: false, ..options });
    assert!(values(plain.layers()[0].weight(Slot::InputNorm).unwrap()).iter().all(|v| *v < 1.3));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn any_part_of_a_generated_weight_is_that_part_of_the_whole(
        rows in 0usize..320, count in 0usize..320, first in 0usize..4000, length in 0usize..4000,
        outliers: bool, dtype in prop::sample::select(vec![DType::F32, DType::F16, DType::BF16]),
    ) {
        let random = RandomWeights { dtype, seed: 11, outliers };
        let checkpoint = Checkpoint::random(tiny(), random);
        let embedding = checkpoint.embedding();
        let whole = values(embedding);
        let end = (rows + count).min(320);
        let part = embedding.rows(rows..end).unwrap();
        prop_assert_eq!(&values(&part), &whole[rows * 64..end * 64]);
        prop_assert_eq!(part.shape(), &[end - rows, 64]);
        let mut stretch = vec![0f32; length];
        embedding.read_f32(first, &mut stretch).unwrap();
        prop_assert_eq!(&stretch, &whole[first..first + length]);
        let mut bytes = vec![0u8; length * dtype.size()];
        embedding.convert(first, dtype, &mut bytes).unwrap();
        let mut widened = vec![0f32; length];
        firesteel_tensor::read_f32(dtype, &bytes, &mut widened).unwrap();
        prop_assert_eq!(&widened, &stretch);
    }

    #[test]
    fn random_small_models_survive_the_disk(
        kv in 1usize..3, group in 1usize..3, layers in 1usize..5, seed: u64, tied: bool,
        separate_qkv: bool, shard_bytes in 1u64..200_000,
    ) {
        let mut config = tiny().with_layers(layers).unwrap();
        config.num_key_value_heads = kv;
        config.num_attention_heads = kv * group;
        config.tie_word_embeddings = tied;
        let random = RandomWeights { dtype: DType::BF16, seed, outliers: seed % 2 == 0 };
        let checkpoint = Checkpoint::random(config, random);
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out");
        write_checkpoint(&checkpoint, WriteOptions { shard_bytes, separate_qkv }, &out, &|_, _| ())
            .unwrap();
        prop_assert_eq!(all_values(&Checkpoint::open(&out).unwrap()), all_values(&checkpoint));
    }
}

#[test]
fn weights_are_replaced_and_scaled_when_they_are_read() {
    let random = RandomWeights { dtype: DType::BF16, seed: 3, outliers: false };
    let model = Checkpoint::random(tiny(), random);
    let (norm, table) = (model.final_norm(), model.embedding());
    let columns = norm.element_count();
    let factors: Vec<f32> = (0..columns).map(|column| 0.5 + column as f32 / 7.0).collect();
    let head = table.with_scaled_columns(Checkpoint::HEAD, &factors).unwrap();
    let gains = Weight::from_f32(norm.name(), vec![columns], factors.clone()).unwrap();
    let changed = model.with_weights(vec![gains, head.clone()]).unwrap();
    assert_eq!(values(changed.final_norm()), factors);
    assert_eq!(values(changed.embedding()), values(table));
    assert!(matches!(changed.head(), Head::Stored(_)) && !changed.config().tie_word_embeddings);
    assert_eq!(changed.tensor_count(), model.tensor_count() + 1);

    let scaled: Vec<f32> = values(table)
        .iter()
        .zip(factors.iter().cycle())
        .map(|(value, factor)| value * factor)
        .collect();
    assert_eq!(values(&head), scaled);
    let rows = head.rows(3..5).unwrap();
    assert_eq!(values(&rows), scaled[3 * columns..5 * columns]);
    let mut part = [0f32; 3];
    head.read_f32(columns - 1, &mut part).unwrap();
    assert_eq!(part, scaled[columns - 1..columns + 2]);
    let whole = Weight::from_f32("whole", table.shape().to_vec(), scaled).unwrap();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        assert_eq!(bytes_as(&head, dtype), bytes_as(&whole, dtype), "{dtype}");
    }
    assert!(head.convert(0, DType::F16, &mut [0; 3]).is_err());
    assert!(head.read_f32(head.element_count(), &mut part).is_err());
    let keys = [head.key(), rows.key(), table.key(), whole.key()];
    assert_eq!(keys.iter().collect::<HashSet<_>>().len(), keys.len());
    assert!(table.with_scaled_columns("x", &factors[1..]).is_none());

    // What is written is what was read.
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("changed");
    write_checkpoint(&changed, WriteOptions::default(), &out, &|_, _| ()).unwrap();
    assert_eq!(all_values(&Checkpoint::open(&out).unwrap()), all_values(&changed));

    let error = |name: &str, shape: Vec<usize>, count| {
        let weight = Weight::from_f32(name, shape, vec![0.0; count]);
        weight.and_then(|weight| model.with_weights(vec![weight])).unwrap_err().to_string()
    };
    let nowhere = error("model.bias", vec![2], 2);
    assert!(nowhere.starts_with("model.bias of shape [2] has no place in the model"), "{nowhere}");
    assert!(error(norm.name(), vec![columns + 1], columns + 1).contains("has no place"));
    assert!(error(Checkpoint::HEAD, vec![1, columns], columns).contains("has no place"));
    assert!(error(norm.name(), vec![columns], 1).starts_with(norm.name()));
}
