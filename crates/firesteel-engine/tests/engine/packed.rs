//! Weights in the kernels' layout, kept in files.

use crate::support::{checkpoint, golden_gguf, spark_tiny};
use firesteel_checkpoint::{Checkpoint, Slot, WriteOptions, write_checkpoint};
use firesteel_engine::{
    CpuModel, CpuOptions, KvFormat, PackedCache, PackedWeights, SequenceOptions,
};
use firesteel_step::{Decoder, Wanted};
use firesteel_testing::golden_path;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

fn load(checkpoint: &Arc<Checkpoint>, packed: PackedCache) -> Arc<CpuModel> {
    let options = CpuOptions { threads: Some(2), packed, ..CpuOptions::default() };
    CpuModel::with_options(Arc::clone(checkpoint), &options).unwrap()
}

fn logits(model: &Arc<CpuModel>) -> Vec<f32> {
    let options = SequenceOptions { context: 8, kv: KvFormat::F16 };
    let mut logits = Vec::new();
    let ids = [14, 900, 31, 7];
    model.sequence(options).unwrap().forward(&ids, Wanted::Last, &mut logits).unwrap();
    logits
}

/// Files with an extension, sorted.
fn files(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> =
        entries.filter(|path| path.extension().is_some_and(|e| e == extension)).collect();
    files.sort();
    files
}

#[test]
fn weights_are_packed_once_and_give_the_same_numbers() {
    for format in ["q8_0", "q4_0", "q4_k_m"] {
        let checkpoint = golden_gguf(format);
        let folder = tempfile::tempdir().unwrap();
        let cache = PackedCache::Folder(folder.path().join("a/packed"));
        let memory = load(&checkpoint, PackedCache::Disabled);
        assert_eq!(memory.packed_weights(), PackedWeights::Memory);
        for expected in [PackedWeights::Written, PackedWeights::Found, PackedWeights::Found] {
            let model = load(&checkpoint, cache.clone());
            assert_eq!(model.packed_weights(), expected, "{format}");
            assert_eq!(logits(&model), logits(&memory), "{format}");
            assert!(model.warnings().is_empty());
        }
        // A copy of the model has the same weights; another model has its own.
        let copy = folder.path().join("copy.gguf");
        let path = golden_path(&format!("llamacpp/spark-tiny-{format}.gguf"));
        std::fs::copy(&path, &copy).unwrap();
        let model = load(&Arc::new(Checkpoint::open(&copy).unwrap()), cache.clone());
        assert_eq!(model.packed_weights(), PackedWeights::Found);
        let other = golden_gguf(if format == "q8_0" { "q4_0" } else { "q8_0" });
        assert_eq!(load(&other, cache.clone()).packed_weights(), PackedWeights::Written);
        assert_eq!(files(&folder.path().join("a/packed"), "packed").len(), 2);
    }
}

#[test]
fn weights_that_lie_ready_need_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let cache = PackedCache::Folder(folder.path().join("packed"));
    for (checkpoint, expected) in [
        (golden_gguf("f16"), PackedWeights::None),
        (checkpoint("mini"), PackedWeights::None),
        (
            Arc::new(Checkpoint::random(golden_gguf("f16").config().clone(), RANDOM)),
            PackedWeights::Memory,
        ),
    ] {
        let model = load(&checkpoint, cache.clone());
        assert_eq!(model.packed_weights(), expected, "{:?}", checkpoint.path());
        assert!(!folder.path().join("packed").exists());
    }
    // So small a model is not worth a file in the common folder.
    let model = load(&golden_gguf("q4_0"), PackedCache::Default);
    assert_eq!(model.packed_weights(), PackedWeights::Memory);
}

const RANDOM: firesteel_checkpoint::RandomWeights = firesteel_checkpoint::RandomWeights {
    dtype: firesteel_tensor::DType::BF16,
    seed: 1,
    outliers: false,
};

#[test]
fn what_a_folder_needs_packed_is_packed_once() {
    let tiny = spark_tiny();
    let expected = logits(&load(&tiny, PackedCache::Disabled));
    let folder = tempfile::tempdir().unwrap();
    let (separate, odd) = (folder.path().join("separate"), folder.path().join("odd"));
    let options = WriteOptions { separate_qkv: true, ..WriteOptions::default() };
    write_checkpoint(&tiny, options, &separate, &|_, _| {}).unwrap();
    // One more space in the header, and every tensor begins at an odd offset.
    write_checkpoint(&tiny, WriteOptions::default(), &odd, &|_, _| {}).unwrap();
    let file = odd.join("model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    bytes.insert(8 + header as usize, b' ');
    bytes[..8].copy_from_slice(&(header + 1).to_le_bytes());
    std::fs::write(&file, bytes).unwrap();
    for model in [&separate, &odd] {
        let packed = model.with_extension("packed");
        let cache = PackedCache::Folder(packed.clone());
        for found in [PackedWeights::Written, PackedWeights::Found] {
            let opened = Arc::new(Checkpoint::open(model).unwrap());
            let loaded = load(&opened, cache.clone());
            assert_eq!(loaded.packed_weights(), found, "{model:?}");
            assert_eq!(logits(&loaded), expected, "{model:?}");
        }
        assert_eq!(std::fs::read_dir(&packed).unwrap().count(), 1, "{model:?}");
        // Another number in a tensor that is packed in both.
        let file = model.join("model.safetensors");
        let mut bytes = std::fs::read(&file).unwrap();
        let opened = Checkpoint::open(model).unwrap();
        let (_, weight) = opened.layers()[0]
            .weight(Slot::QueryKeyValue)
            .unwrap()
            .stored_parts()
            .unwrap()
            .next()
            .unwrap();
        let place = bytes.windows(weight.len()).position(|part| part == &weight[..]).unwrap();
        bytes[place] ^= 64;
        std::fs::remove_file(&file).unwrap();
        std::fs::write(&file, bytes).unwrap();
        let changed = load(&Arc::new(Checkpoint::open(model).unwrap()), cache);
        assert_eq!(changed.packed_weights(), PackedWeights::Written, "{model:?}");
        assert_ne!(logits(&changed), expected, "{model:?}");
    }
}

#[test]
fn a_file_that_does_not_fit_is_written_anew() {
    let checkpoint = golden_gguf("q4_0");
    let expected = logits(&load(&checkpoint, PackedCache::Disabled));
    let folder = tempfile::tempdir().unwrap();
    let cache = PackedCache::Folder(folder.path().into());
    assert_eq!(load(&checkpoint, cache.clone()).packed_weights(), PackedWeights::Written);
    let [file] = &files(folder.path(), "packed")[..] else { panic!("one file") };
    let good = std::fs::read(file).unwrap();
    let other = std::fs::read(golden_path("llamacpp/spark-tiny-q8_0.gguf")).unwrap();
    type Change<'a> = &'a dyn Fn(&mut Vec<u8>);
    let changes: [(&str, Change<'_>); 9] = [
        ("empty", &|bytes| bytes.clear()),
        ("cut off in the header", &|bytes| bytes.truncate(30)),
        ("cut off in the data", &|bytes| bytes.truncate(bytes.len() - 1)),
        ("longer", &|bytes| bytes.push(0)),
        ("another magic", &|bytes| bytes[0] ^= 1),
        ("another key", &|bytes| bytes[16] ^= 1),
        ("another offset", &|bytes| bytes[100..3000].iter_mut().for_each(|byte| *byte ^= 8)),
        ("other weights", &|bytes| bytes[4096..8192].fill(0)),
        ("another file", &|bytes| bytes.clone_from(&other)),
    ];
    for (name, change) in changes {
        let mut bytes = good.clone();
        change(&mut bytes);
        std::fs::remove_file(file).unwrap();
        std::fs::write(file, bytes).unwrap();
        let model = load(&checkpoint, cache.clone());
        assert_eq!(model.packed_weights(), PackedWeights::Written, "{name}");
        assert_eq!(logits(&model), expected, "{name}");
        assert!(std::fs::read(file).unwrap() == good, "{name}");
    }
    // The last strip of the last tensor.
    let mut bytes = good.clone();
    let last = bytes.iter().rposition(|byte| *byte != 0).unwrap();
    bytes[last] ^= 1;
    std::fs::remove_file(file).unwrap();
    std::fs::write(file, bytes).unwrap();
    assert_eq!(load(&checkpoint, cache).packed_weights(), PackedWeights::Written);
}

#[test]
fn an_index_entry_counts_for_its_file_alone() {
    let folder = tempfile::tempdir().unwrap();
    let cache = PackedCache::Folder(folder.path().join("packed"));
    // The golden files are older than a clock tick, so they get an entry each.
    let (four, eight) = (golden_gguf("q4_0"), golden_gguf("q8_0"));
    for checkpoint in [&four, &eight] {
        load(checkpoint, cache.clone());
    }
    let entries = files(&folder.path().join("packed"), "index");
    assert_eq!(entries.len(), 2);
    let texts: Vec<String> =
        entries.iter().map(|path| std::fs::read_to_string(path).unwrap()).collect();
    let expected =
        [logits(&load(&four, PackedCache::Disabled)), logits(&load(&eight, PackedCache::Disabled))];
    let key = |text: &str| text.rsplit_once(' ').unwrap().1.to_owned();
    let swapped = [
        texts[0].replace(&key(&texts[0]), &key(&texts[1])),
        texts[1].replace(&key(&texts[1]), &key(&texts[0])),
    ];
    let broken = [String::new(), texts[0].replace("packed 1", "packed 2")];
    for written in [[&texts[1], &texts[0]], [&swapped[0], &swapped[1]], [&broken[0], &broken[1]]] {
        for (path, text) in entries.iter().zip(written) {
            std::fs::write(path, text).unwrap();
        }
        for (checkpoint, expected) in [&four, &eight].into_iter().zip(&expected) {
            let model = load(checkpoint, cache.clone());
            assert_eq!(model.packed_weights(), PackedWeights::Found);
            assert_eq!(&logits(&model), expected);
        }
        for (path, text) in entries.iter().zip(&texts) {
            assert_eq!(&std::fs::read_to_string(path).unwrap(), text, "the entry is made again");
        }
    }
}

#[test]
fn a_folder_that_cannot_be_written_costs_memory_and_a_warning() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    let checkpoint = golden_gguf("q4_0");
    let expected = logits(&load(&checkpoint, PackedCache::Disabled));
    let model = load(&checkpoint, PackedCache::Folder(file.join("packed")));
    assert_eq!(model.packed_weights(), PackedWeights::Memory);
    assert_eq!(logits(&model), expected);
    let [warning] = model.warnings() else { panic!("one warning") };
    for part in ["packed into memory", "set FIRESTEEL_CACHE", &*file.to_string_lossy()] {
        assert!(warning.contains(part), "{warning}");
    }
}

#[test]
fn several_at_once_find_whole_files() {
    let checkpoint = golden_gguf("q8_0");
    let expected = logits(&load(&checkpoint, PackedCache::Disabled));
    let folder = tempfile::tempdir().unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let model = load(&checkpoint, PackedCache::Folder(folder.path().into()));
                assert_ne!(model.packed_weights(), PackedWeights::Memory);
                assert_eq!(logits(&model), expected);
            });
        }
    });
    let left = std::fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(left, 2, "the weights and an index entry");
}

#[test]
fn what_nobody_uses_is_removed() {
    let folder = tempfile::tempdir().unwrap();
    let cache = PackedCache::Folder(folder.path().into());
    let age = |path: &Path, days: u64| {
        let time = SystemTime::now() - Duration::from_secs(24 * 60 * 60 * days);
        std::fs::File::open(path).unwrap().set_modified(time).unwrap();
    };
    load(&golden_gguf("q4_0"), cache.clone());
    let (used, unused) =
        (files(folder.path(), "packed").remove(0), folder.path().join("0-1.packed"));
    let foreign = folder.path().join("letter.txt");
    for path in [&unused, &foreign] {
        std::fs::write(path, "").unwrap();
        age(path, 31);
    }
    age(&used, 29);
    assert_eq!(load(&golden_gguf("q4_0"), cache.clone()).packed_weights(), PackedWeights::Found);
    let age_now = std::fs::metadata(&used).unwrap().modified().unwrap().elapsed().unwrap();
    assert!(age_now < Duration::from_secs(24 * 60 * 60), "the use was noted");
    load(&golden_gguf("q8_0"), cache);
    assert!(used.exists() && foreign.exists() && !unused.exists());
}
