//! Where data goes, and how it gets there.

use crate::common::{Counting, counting, describe, model, write};
use firesteel_graph::{Constant, Graph, Op};
use firesteel_onnx::{
    DATA_ALIGNMENT, INLINE_LIMIT, ModelFile, OnnxError, RawFile, WritePlan, model_with_outputs,
    read_model,
};
use firesteel_tensor::{DType, Tensor};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// x · w for each constant, one after the other; every weight is square with `size` rows.
fn chain(name: &str, size: usize, weights: Vec<(&str, Constant)>) -> Graph {
    let mut graph = Graph::new(name);
    let mut x = graph.input("x", DType::F32, vec![1, size]).unwrap();
    for (name, data) in weights {
        let w = graph.add_constant(name, DType::F32, vec![size, size], data).unwrap();
        x = graph.add(Op::MatMul, &[x, w], format!("{name}/y")).unwrap();
    }
    graph.output(x).unwrap();
    graph
}

fn file(folder: &Path, name: &str) -> Vec<u8> {
    std::fs::read(folder.join(name)).unwrap()
}

fn floats(start: usize, count: usize) -> Vec<u8> {
    (start..start + count).flat_map(|value| (value as f32).to_le_bytes()).collect()
}

#[test]
fn large_constants_are_aligned_and_small_ones_inline() {
    let size = 20;
    let mut graph = chain("g", size, vec![("a", counting(5, None)), ("b", counting(9, None))]);
    let y = graph.outputs()[0];
    let bias = graph.add_constant("bias", DType::F32, vec![256], counting(1, None)).unwrap();
    let wide = graph.add(Op::ReduceMean { axis: 1 }, &[y], "mean").unwrap();
    let sum = graph.add(Op::Add, &[wide, bias], "sum").unwrap();
    graph.output(sum).unwrap();
    assert_eq!(256 * 4, INLINE_LIMIT);
    let folder = tempfile::tempdir().unwrap();
    let report = write(folder.path(), vec![model("m.onnx", &graph, 18)], vec![]);
    let bytes = size * size * 4;
    assert_eq!(report.data.len(), 1);
    assert_eq!(report.data[0].bytes, DATA_ALIGNMENT + bytes as u64);
    let data = file(folder.path(), "m.onnx.data");
    assert_eq!(&data[..bytes], floats(5, size * size));
    assert!(data[bytes..DATA_ALIGNMENT as usize].iter().all(|byte| *byte == 0));
    assert_eq!(&data[DATA_ALIGNMENT as usize..], floats(9, size * size));
    assert_eq!(report.models[0].file.bytes, file(folder.path(), "m.onnx").len() as u64);
    let read = read_model(&folder.path().join("m.onnx")).unwrap();
    assert_eq!(describe(&read.graph), describe(&graph));
}

#[test]
fn bytes_do_not_depend_on_the_run_or_the_threads() {
    // Each thread gets several chunks, and the last chunk of a part is not a full one.
    let size = 1500;
    let graph = chain("g", size, vec![("a", counting(0, None)), ("b", counting(7, None))]);
    let mut seen = Vec::new();
    for threads in [0, 1, 2, 7, 100] {
        let folder = tempfile::tempdir().unwrap();
        let plan = WritePlan::new(vec![model("m.onnx", &graph, 18)], vec![]).unwrap();
        let most = AtomicU64::new(0);
        let progress = |done| {
            most.fetch_max(done, Ordering::Relaxed);
        };
        plan.write(folder.path(), threads, &progress).unwrap();
        assert_eq!(most.into_inner(), plan.data_bytes());
        seen.push((file(folder.path(), "m.onnx"), file(folder.path(), "m.onnx.data")));
    }
    assert!(seen.iter().all(|bytes| *bytes == seen[0]));
    assert_eq!(&seen[0].1[..4 * size * size], floats(0, size * size));
}

#[test]
fn equal_keys_are_stored_once_for_all_models() {
    let size = 20;
    let shared = || counting(3, Some("shared"));
    let first = chain("first", size, vec![("a", shared()), ("b", counting(1, Some("own")))]);
    let second = chain("second", size, vec![("c", shared()), ("d", shared())]);
    let third = chain("third", size, vec![("e", shared()), ("f", counting(2, None))]);
    let folder = tempfile::tempdir().unwrap();
    let models = [("1.onnx", &first), ("2.onnx", &second), ("3.onnx", &third)];
    let models = models.map(|(name, graph)| model(name, graph, 18)).into();
    let report = write(folder.path(), models, vec![]);
    let bytes = (size * size * 4) as u64;
    let data: Vec<_> = report.data.iter().map(|file| (&file.name[..], file.bytes)).collect();
    assert_eq!(data, [("1.onnx.data", DATA_ALIGNMENT + bytes), ("3.onnx.data", bytes)]);
    assert!(!folder.path().join("2.onnx.data").exists());
    for (name, graph) in [("1.onnx", first), ("2.onnx", second), ("3.onnx", third)] {
        let read = read_model(&folder.path().join(name)).unwrap();
        assert_eq!(describe(&read.graph), describe(&graph));
    }
}

/// A table of 8 rows of 100 as a raw file, with its last 4 rows as a range.
fn table() -> RawFile {
    RawFile {
        name: "embedding.bin".into(),
        dtype: DType::F32,
        shape: vec![8, 100],
        data: counting(0, Some("table")),
        ranges: vec![("table/4..8".into(), 4 * 100 * 4)],
    }
}

fn head(name: &str, rows: usize, data: Constant) -> Graph {
    let mut graph = Graph::new(name);
    let x = graph.input("x", DType::F32, vec![1, 100]).unwrap();
    let w = graph.add_constant("head", DType::F32, vec![rows, 100], data).unwrap();
    let y = graph.add(Op::Gemm, &[x, w], "logits").unwrap();
    graph.output(y).unwrap();
    graph
}

#[test]
fn constants_refer_to_a_raw_file_and_to_ranges_of_it() {
    let whole = head("whole", 8, counting(0, Some("table")));
    let shard = head("shard", 4, counting(400, Some("table/4..8")));
    let folder = tempfile::tempdir().unwrap();
    let models = vec![model("a.onnx", &whole, 18), model("b.onnx", &shard, 18)];
    let report = write(folder.path(), models, vec![table()]);
    assert_eq!(report.data.len(), 1);
    assert_eq!(file(folder.path(), "embedding.bin"), floats(0, 800));
    for (name, graph) in [("a.onnx", whole), ("b.onnx", shard)] {
        let read = read_model(&folder.path().join(name)).unwrap();
        assert_eq!(describe(&read.graph), describe(&graph));
    }
}

#[test]
fn plans_that_cannot_be_written_are_refused_by_name() {
    let good = chain("g", 20, vec![("a", counting(0, None))]);
    let unnamed = chain("", 20, vec![("a", counting(0, None))]);
    let mut unused = good.clone();
    unused.input("spare", DType::F32, vec![1]).unwrap();
    let long = head("long", 5, counting(0, Some("table/4..8")));
    let twice = {
        let mut graph = chain("g", 20, vec![("a", counting(0, Some("k")))]);
        let y = graph.outputs()[0];
        let wide =
            graph.add_constant("wide", DType::F32, vec![20, 30], counting(0, Some("k"))).unwrap();
        let out = graph.add(Op::MatMul, &[y, wide], "out").unwrap();
        graph.output(out).unwrap();
        graph
    };
    let data = |name: &str, data_file: &str| ModelFile {
        data_file: data_file.into(),
        ..model(name, &good, 18)
    };
    let metadata = ModelFile {
        metadata: vec![("k".into(), "1".into()), ("k".into(), "2".into())],
        ..model("m", &good, 18)
    };
    let ranges = |ranges| RawFile { ranges, ..table() };
    let short = Constant::Tensor(Tensor::from_f32(vec![1], vec![0.0]).unwrap());
    let cases = [
        ("folder in a model's name", vec![data("a/m", "d")], vec![], "bare file name"),
        ("parent as data file", vec![data("m", "..")], vec![], "bare file name"),
        ("backslash", vec![data("m", "a\\b")], vec![], "bare file name"),
        ("empty name", vec![data("", "d")], vec![], "bare file name"),
        ("same model twice", vec![data("m", "d"), data("m", "e")], vec![], "two models"),
        ("data over model", vec![data("m", "m")], vec![], "a model and a data file"),
        ("data in a raw file", vec![data("m", "embedding.bin")], vec![table()], "one constant"),
        ("raw file twice", vec![], vec![table(), table()], "two raw files"),
        ("key twice", vec![], vec![ranges(vec![("table".into(), 4)])], "table is placed twice"),
        ("range outside", vec![], vec![ranges(vec![("r".into(), 3201)])], "starts at 3201"),
        ("raw data too short", vec![], vec![RawFile { data: short, ..table() }], "has 4"),
        ("range too long", vec![model("m", &long, 18)], vec![table()], "has 2000 bytes"),
        ("key with two lengths", vec![model("m", &twice, 18)], vec![], "constant wide: has 2400"),
        ("unnamed graph", vec![model("m", &unnamed, 18)], vec![], "has no name"),
        ("invalid graph", vec![model("m", &unused, 18)], vec![], "spare: is never used"),
        ("metadata twice", vec![metadata], vec![], "key k is given twice"),
    ];
    for (case, models, raw, expected) in cases {
        let error = WritePlan::new(models, raw).err().map(|error| error.to_string());
        assert!(error.as_ref().is_some_and(|e| e.contains(expected)), "{case}: {error:?}");
    }
}

#[test]
fn opsets_without_support_are_refused() {
    let graph = chain("g", 20, vec![("a", counting(0, None))]);
    for opset in [17, 24] {
        let folder = tempfile::tempdir().unwrap();
        let plan = WritePlan::new(vec![model("m.onnx", &graph, opset)], vec![]).unwrap();
        let error = plan.write(folder.path(), 1, &|_| {}).unwrap_err().to_string();
        assert!(error.contains("opset"), "{error}");
        assert!(error.contains("18 to 23"), "{error}");
    }
}

#[test]
fn a_failing_source_stops_the_write_and_is_named() {
    let failing = Arc::new(Counting { start: 0, key: None, fails_from: 3_000_000 });
    let weights = vec![("good", counting(0, None)), ("bad", Constant::Source(failing))];
    let graph = chain("g", 2000, weights);
    for threads in [1, 4] {
        let folder = tempfile::tempdir().unwrap();
        let plan = WritePlan::new(vec![model("m.onnx", &graph, 18)], vec![]).unwrap();
        let error = plan.write(folder.path(), threads, &|_| {}).unwrap_err();
        assert!(matches!(error, OnnxError::Data { .. }));
        let error = error.to_string();
        assert!(error.contains("constant bad for"), "{error}");
        assert!(error.contains("m.onnx.data"), "{error}");
        assert!(error.contains("is lost"), "{error}");
    }
}

#[test]
fn files_are_never_overwritten() {
    let graph = chain("g", 20, vec![("a", counting(0, None))]);
    for taken in ["m.onnx", "m.onnx.data"] {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(taken), "mine").unwrap();
        let plan = WritePlan::new(vec![model("m.onnx", &graph, 18)], vec![]).unwrap();
        let error = plan.write(folder.path(), 1, &|_| {}).unwrap_err().to_string();
        assert!(error.contains(taken), "{error}");
        assert_eq!(file(folder.path(), taken), b"mine");
    }
}

#[test]
fn values_become_outputs_and_nothing_else_changes() {
    let weights = vec![("a", counting(0, None)), ("b", counting(1, None))];
    let mut graph = chain("g", 20, weights);
    // The files stay, so that other ONNX tools can be pointed at them.
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("onnx-with-outputs");
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir(&folder).unwrap();
    write(&folder, vec![model("m.onnx", &graph, 18)], vec![]);
    let path = folder.join("m.onnx");
    let bytes = model_with_outputs(&path, &["b/y", "a/y", "a/y"]).unwrap();
    let changed = folder.join("changed.onnx");
    std::fs::write(&changed, bytes).unwrap();
    let inner = graph.find("a/y").unwrap();
    graph.output(inner).unwrap();
    assert_eq!(describe(&read_model(&changed).unwrap().graph), describe(&graph));
    for unknown in ["x", "a", "nothing"] {
        let error = model_with_outputs(&path, &[unknown]).unwrap_err().to_string();
        assert!(error.contains(&format!("value {unknown}: is no intermediate")), "{error}");
    }
}
