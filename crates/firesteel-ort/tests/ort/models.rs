//! Models in real sessions. They need the library, which the project's test script installs.

use firesteel_ort::{Optimization, OrtError, OrtModel, OrtOptions, OrtRunner, load};
use firesteel_step::{Logits, Role, Runner, RunnerError, StepInputs, StepSpec, TensorSpec};
use firesteel_tensor::{DType, Tensor, TensorView};
use std::path::{Path, PathBuf};

fn data(name: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data")).join(name)
}

fn options() -> OrtOptions {
    load(None).unwrap_or_else(|error| {
        panic!("{error}\nThe test script of the project installs it before it runs the tests")
    });
    OrtOptions { threads: Some(1), ..OrtOptions::default() }
}

/// The contract of tests/data/step_f32 and step_f16, in another order than the graph's.
fn spec(dtype: DType) -> StepSpec {
    let tensor = |name: &str, shape: &[usize], role| TensorSpec {
        name: name.into(),
        shape: shape.to_vec(),
        dtype,
        role,
    };
    StepSpec {
        tokens: 1,
        context: 3,
        hidden_size: 4,
        vocab_size: 2,
        num_attention_heads: 1,
        num_key_value_heads: 1,
        head_dim: 4,
        sliding_window: None,
        rope_sliding: None,
        rope_full: None,
        first_layer: 0,
        layers: Vec::new(),
        logits: Logits::Hidden,
        dtype,
        mask_value: -10_000.0,
        inputs: vec![
            tensor("x", &[1, 1, 4], Role::Embedding),
            tensor("k_cache_0", &[1, 1, 3, 4], Role::KeyCache(0)),
        ],
        outputs: vec![
            tensor("hidden", &[1, 1, 2], Role::Hidden),
            tensor("k_new_0", &[1, 1, 1, 4], Role::KeyNew(0)),
        ],
    }
}

fn run_step(runner: &mut dyn Runner) -> (Vec<f32>, Vec<f32>) {
    let spec = runner.spec().clone();
    let x = Tensor::from_f32_as(spec.dtype, vec![1, 1, 4], vec![1.0, 2.0, 3.0, -4.0]).unwrap();
    let cache = (0..12).map(|i| i as f32).collect();
    let cache = Tensor::from_f32_as(spec.dtype, vec![1, 1, 3, 4], cache).unwrap();
    let inputs = StepInputs::new(&spec, vec![x.view(), cache.view()]).unwrap();
    let outputs = runner.step(&inputs).unwrap();
    let values = |role| outputs.get(&spec, role).unwrap().view().to_f32().unwrap().into_owned();
    (values(Role::Hidden), values(Role::KeyNew(0)))
}

/// Weights are (0..8)/4 − 1, so row i is [i/2 − 1, i/2 − 3/4].
const HIDDEN: [f32; 2] = [-4.0, -3.5];
const KEY: [f32; 4] = [9.0, 11.0, 13.0, 7.0];

#[test]
fn steps_run_in_f32_and_f16() {
    for (dtype, folder) in [(DType::F32, "step_f32"), (DType::F16, "step_f16")] {
        for optimization in [Optimization::Disabled, Optimization::All] {
            let options = OrtOptions { optimization, ..options() };
            let file = data(folder).join("model.onnx");
            let mut runner = OrtRunner::open(&file, spec(dtype), &options).unwrap();
            for _ in 0..2 {
                let (hidden, key) = run_step(&mut runner);
                assert_eq!((hidden, key), (HIDDEN.to_vec(), KEY.to_vec()), "{dtype}");
            }
        }
    }
}

#[test]
fn external_data_is_found_from_memory_and_after_a_move() {
    let original = data("step_f32");
    let bytes = fs_err::read(original.join("model.onnx")).unwrap();
    let open = |folder: &Path| OrtRunner::from_bytes(&bytes, folder, spec(DType::F32), &options());
    assert_eq!(run_step(&mut open(&original).unwrap()).0, HIDDEN);

    let moved = tempfile::tempdir().unwrap();
    let error = open(moved.path()).unwrap_err();
    assert!(matches!(error, OrtError::Session { .. }), "{error}");
    assert!(error.to_string().contains("model.data"), "{error}");
    assert!(matches!(open(&moved.path().join("no")).unwrap_err(), OrtError::Io(_)));

    for name in ["model.onnx", "model.data"] {
        fs_err::copy(original.join(name), moved.path().join(name)).unwrap();
    }
    assert_eq!(run_step(&mut open(moved.path()).unwrap()).0, HIDDEN);
    let file = moved.path().join("model.onnx");
    let mut runner = OrtRunner::open(&file, spec(DType::F32), &options()).unwrap();
    assert_eq!(run_step(&mut runner).0, HIDDEN);
}

#[test]
fn a_model_that_is_not_the_step_is_refused() {
    let change = |edit: &dyn Fn(&mut StepSpec)| {
        let mut spec = spec(DType::F32);
        edit(&mut spec);
        spec
    };
    let cases = [
        (
            change(&|s| s.inputs[0].name = "X".into()),
            "input X: expected f32 [1, 1, 4] by the step contract, found only k_cache_0, x",
        ),
        (
            change(&|s| s.inputs[1].shape[2] = 4),
            "input k_cache_0: expected f32 [1, 1, 4, 4] by the step contract, found \
             f32 [1, 1, 3, 4] in the model",
        ),
        (spec(DType::F16), "input x: expected f16 [1, 1, 4] by the step contract, found f32"),
        (
            change(&|s| s.inputs.truncate(1)),
            "input k_cache_0: expected no input of that name by the step contract, found f32",
        ),
        (
            change(&|s| s.outputs[1].shape = vec![1, 1, 4]),
            "output k_new_0: expected f32 [1, 1, 4] by the step contract, found f32 [1, 1, 1, 4]",
        ),
        (
            change(&|s| s.outputs.truncate(1)),
            "output k_new_0: expected no output of that name by the step contract",
        ),
    ];
    let file = data("step_f32/model.onnx");
    for (spec, expected) in cases {
        let text = OrtRunner::open(&file, spec, &options()).unwrap_err().to_string();
        assert!(text.contains(expected), "{text}");
        assert!(text.contains("step_f32/model.onnx"), "{text}");
    }
    // A free length is not what a static step promises.
    let mut free = spec(DType::F32);
    free.inputs = vec![TensorSpec { name: "f64".into(), shape: vec![1], ..free.inputs[0].clone() }];
    free.inputs[0].dtype = DType::F64;
    let text = OrtRunner::open(&data("types.onnx"), free, &options()).unwrap_err().to_string();
    assert!(text.contains("found f64 [?] in the model"), "{text}");
}

#[test]
fn inputs_of_another_contract_are_refused() {
    let file = data("step_f32/model.onnx");
    let mut runner = OrtRunner::open(&file, spec(DType::F32), &options()).unwrap();
    let other = spec(DType::F16);
    let x = Tensor::from_f32_as(DType::F16, vec![1, 1, 4], vec![0.0; 4]).unwrap();
    let cache = Tensor::from_f32_as(DType::F16, vec![1, 1, 3, 4], vec![0.0; 12]).unwrap();
    let inputs = StepInputs::new(&other, vec![x.view(), cache.view()]).unwrap();
    let error = runner.step(&inputs).unwrap_err();
    assert!(matches!(error, RunnerError::Step(_)), "{error}");
}

#[test]
fn reports_show_the_settings() {
    let settings = |optimization| {
        let options = OrtOptions { optimization, ..options() };
        let file = data("step_f32/model.onnx");
        OrtRunner::open(&file, spec(DType::F32), &options).unwrap().settings()
    };
    let value = |settings: &[(String, String)], key: &str| {
        settings.iter().find(|(k, _)| k == key).map(|(_, value)| value.clone()).unwrap()
    };
    let checking = settings(Optimization::Disabled);
    for (key, expected) in [
        ("graph_optimization", "disabled"),
        ("qdq_matmulnbits_accuracy_level", "1"),
        ("deterministic_compute", "on"),
        ("threads", "1"),
    ] {
        assert_eq!(value(&checking, key), expected);
    }
    assert!(value(&checking, "library").starts_with("libonnxruntime"));
    assert_eq!(value(&checking, "onnxruntime"), load(None).unwrap().version().unwrap());
    assert_eq!(value(&settings(Optimization::All), "graph_optimization"), "all");
}

#[test]
fn every_element_type_passes_through_aligned_or_not() {
    let mut model = OrtModel::open(&data("types.onnx"), &options()).unwrap();
    let ports = model.inputs().to_vec();
    assert_eq!(ports.len(), 11);
    assert_eq!(model.outputs()[1].name, "f32_out");
    for shift in 0..2 {
        // Bytes that are valid bools as well.
        let bytes: Vec<Vec<u8>> = ports
            .iter()
            .map(|port| (0..shift + 3 * port.dtype.size()).map(|i| (i % 2) as u8).collect())
            .collect();
        let inputs: Vec<_> = ports
            .iter()
            .zip(&bytes)
            .map(|(port, bytes)| {
                let view = TensorView::new(port.dtype, &[3], &bytes[shift..]).unwrap();
                (port.name.as_str(), view)
            })
            .collect();
        let outputs = model.run(&inputs).unwrap();
        for ((name, input), output) in inputs.iter().zip(&outputs) {
            assert_eq!(output.dtype(), input.dtype());
            assert_eq!((output.shape(), output.bytes()), (input.shape(), input.bytes()), "{name}");
        }
    }
}

#[test]
fn inputs_are_checked_before_they_reach_the_runtime() {
    let mut model = OrtModel::open(&data("step_f32/model.onnx"), &options()).unwrap();
    let x = Tensor::from_f32(vec![1, 1, 4], vec![0.0; 4]).unwrap();
    let flat = Tensor::from_f32(vec![4], vec![0.0; 4]).unwrap();
    let cache = Tensor::from_f32(vec![1, 1, 3, 4], vec![0.0; 12]).unwrap();
    let (x, flat, cache) = (x.view(), flat.view(), cache.view());
    let cases: [(&[(&str, TensorView<'_>)], &str); 4] = [
        (&[("x", x)], "input k_cache_0: expected f32 [1, 1, 3, 4], found nothing"),
        (&[("k_cache_0", cache), ("x", flat)], "input x: expected f32 [1, 1, 4], found f32 [4]"),
        (&[("k_cache_0", cache), ("x", x), ("x", x)], "found more than one tensor"),
        (&[("k_cache_0", cache), ("x", x), ("y", x)], "input y: expected no input of that name"),
    ];
    for (inputs, expected) in cases {
        let text = model.run(inputs).unwrap_err().to_string();
        assert!(text.contains(expected), "{text}");
    }
    assert!(model.run(&[("x", x), ("k_cache_0", cache)]).is_ok());

    let mut model = OrtModel::open(&data("types.onnx"), &options()).unwrap();
    let ports = model.inputs().to_vec();
    let bytes = [2u8; 8];
    let inputs: Vec<_> = ports
        .iter()
        .map(|p| {
            let view = TensorView::new(p.dtype, &[1], &bytes[..p.dtype.size()]).unwrap();
            (p.name.as_str(), view)
        })
        .collect();
    let text = model.run(&inputs).unwrap_err().to_string();
    assert!(text.contains("input bool: a bool is neither 0 nor 1"), "{text}");
}

#[test]
fn the_number_of_threads_is_bounded() {
    for (threads, good) in [(0, false), (2, true), (257, false), (usize::MAX, false)] {
        let options = OrtOptions { threads: Some(threads), ..options() };
        let result = OrtModel::open(&data("types.onnx"), &options);
        assert_eq!(result.is_ok(), good, "{threads}");
        if let Err(error) = result {
            assert!(matches!(error, OrtError::Threads { .. }), "{error}");
        }
    }
}

#[test]
fn empty_tensors_pass() {
    let mut model = OrtModel::open(&data("types.onnx"), &options()).unwrap();
    let ports = model.inputs().to_vec();
    let inputs: Vec<_> = ports
        .iter()
        .map(|port| (port.name.as_str(), TensorView::new(port.dtype, &[0], &[]).unwrap()))
        .collect();
    assert!(model.run(&inputs).unwrap().iter().all(|tensor| tensor.shape() == [0]));
}

#[test]
fn what_is_no_model_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let valid = fs_err::read(data("step_f32/model.onnx")).unwrap();
    let mut flipped = valid.clone();
    flipped[40] ^= 0xff;
    let cases = [
        ("empty", Vec::new()),
        ("text", b"this is not a model".to_vec()),
        ("bytes", (0..=255).collect()),
        ("cut", valid[..valid.len() / 2].to_vec()),
        ("flipped", flipped),
    ];
    for (name, bytes) in cases {
        let file = folder.path().join(name);
        fs_err::write(&file, &bytes).unwrap();
        for error in [
            OrtModel::open(&file, &options()).map(|_| ()).unwrap_err(),
            OrtModel::from_bytes(&bytes, folder.path(), &options()).map(|_| ()).unwrap_err(),
        ] {
            assert!(matches!(error, OrtError::Session { .. }), "{name}: {error}");
            assert!(error.to_string().contains(&*folder.path().to_string_lossy()), "{error}");
        }
    }
    let missing = OrtModel::open(&folder.path().join("missing.onnx"), &options()).unwrap_err();
    assert!(missing.to_string().contains("missing.onnx"), "{missing}");
    let no_file = OrtModel::open(folder.path(), &options()).unwrap_err();
    assert!(no_file.to_string().ends_with("not a file"), "{no_file}");

    let sequence = OrtModel::open(&data("sequence.onnx"), &options()).unwrap_err().to_string();
    assert!(sequence.contains("input s: expected a tensor"), "{sequence}");
}

#[test]
fn a_failing_node_is_named() {
    let mut model = OrtModel::open(&data("fails.onnx"), &options()).unwrap();
    let x = Tensor::from_f32(vec![4], vec![0.0; 4]).unwrap();
    let shape = Tensor::from_i64(vec![1], vec![3]).unwrap();
    let text = model.run(&[("x", x.view()), ("shape", shape.view())]).unwrap_err().to_string();
    assert!(text.contains("could not run the graph"), "{text}");
    assert!(text.contains("Reshape"), "{text}");
    let shape = Tensor::from_i64(vec![1], vec![4]).unwrap();
    assert!(model.run(&[("x", x.view()), ("shape", shape.view())]).is_ok());
}

/// The types of a real contract: 1 token, and a runner behind the trait object on a thread.
#[test]
fn a_runner_can_move_to_another_thread() {
    let file = data("step_f32/model.onnx");
    let runner = OrtRunner::open(&file, spec(DType::F32), &options()).unwrap();
    let mut runner: Box<dyn Runner + Send> = Box::new(runner);
    let hidden = std::thread::spawn(move || run_step(&mut *runner).0).join().unwrap();
    assert_eq!(hidden, HIDDEN);
}
