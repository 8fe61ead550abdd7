//! What the tests share: golden files, checkpoints, exports and the binary itself.

use firesteel_artifact::{Artifact, ExportRequest, HeadRunner, export};
use firesteel_checkpoint::Checkpoint;
use firesteel_export::{Dialect, ExportOptions, Gelu, Precision};
use firesteel_graph::Graph;
use firesteel_onnx::{ModelFile, WritePlan};
use firesteel_ort::{OrtModel, OrtOptions, OrtRunner};
use firesteel_step::{CacheLayoutChoice, Embedding, KvState, Logits, Runner, StepOutputs};
use firesteel_tensor::{DType, TensorView};
pub(crate) use firesteel_testing::{
    Golden, advance, contents, copy_folder, golden_path, names, snr, spark_tiny_path as spark_tiny,
    widened,
};
use safetensors::SafeTensors;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The root of the project.
pub(crate) const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// A whole model in f32, one token a step.
pub(crate) fn options(checkpoint: &Checkpoint) -> ExportOptions {
    ExportOptions {
        tokens: 1,
        context: 64,
        layers: 0..checkpoint.config().num_layers(),
        cache_layout: CacheLayoutChoice::Auto,
        logits: Logits::Last,
        gelu: Gelu::Exact,
        precision: Precision::Fp32,
        dialect: Dialect::Portable,
        head_shards: 1,
    }
}

/// Exports into `out`.
pub(crate) fn export_to(checkpoint: &Checkpoint, options: ExportOptions, out: &Path) -> Artifact {
    let request = ExportRequest {
        checkpoint,
        options,
        embedding: false,
        random_seed: None,
        force: false,
        threads: 2,
    };
    export(&request, out, &|_, _| {}).unwrap()
}

/// The step of an artifact on ONNX Runtime.
pub(crate) fn ort(artifact: &Artifact) -> OrtRunner {
    let graph = &artifact.manifest().graphs[0];
    let spec = artifact.graph_spec(false);
    OrtRunner::open(&artifact.graph_path(graph), spec, &OrtOptions::default()).unwrap()
}

/// Writes a graph as a model into a folder, and tells its file.
pub(crate) fn write_graph(graph: &Graph, folder: &Path) -> PathBuf {
    let model = ModelFile {
        name: "graph.onnx".into(),
        data_file: "graph.data".into(),
        graph,
        opset: 23,
        producer_version: "0".into(),
        metadata: Vec::new(),
    };
    WritePlan::new(vec![model], Vec::new()).unwrap().write(folder, 1, &|_| {}).unwrap();
    folder.join("graph.onnx")
}

/// Runs the binary in the root of the project.
pub(crate) fn firesteel(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_firesteel"))
        .args(arguments)
        .current_dir(ROOT)
        .env("NO_COLOR", "1")
        .output()
        .unwrap()
}

/// Standard output of a run that must succeed.
pub(crate) fn stdout(arguments: &[&str]) -> String {
    let output = firesteel(arguments);
    let talk = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {:?}\n{talk}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

/// Standard error of a run that must fail because of its input.
pub(crate) fn refusal(arguments: &[&str]) -> String {
    let output = firesteel(arguments);
    let talk = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{arguments:?}: {talk}");
    talk
}

/// A path as an argument.
pub(crate) fn argument(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// An artifact on the evaluator and on ONNX Runtime, the parts of a sharded head joined.
pub(crate) fn artifact_runners(artifact: &Artifact) -> Vec<Box<dyn Runner>> {
    let heads = artifact.manifest().graphs[1..].iter().map(|part| {
        let path = artifact.graph_path(part);
        let mut model = OrtModel::open(&path, &OrtOptions::default()).unwrap();
        Box::new(move |hidden: TensorView<'_>| {
            Ok(model.run(&[("hidden", hidden)]).unwrap().remove(0))
        }) as HeadRunner
    });
    let joined = artifact.join(Box::new(ort(artifact)), heads.collect()).unwrap();
    vec![artifact.evaluator(false).unwrap(), joined]
}

/// Every output of a runner over `ids`, in steps of its own size.
pub(crate) fn all_outputs(
    runner: &mut dyn Runner,
    embedding: &dyn Embedding,
    ids: &[u32],
) -> Vec<StepOutputs> {
    let mut state = KvState::new(runner.spec()).unwrap();
    let tokens = runner.spec().tokens;
    ids.chunks_exact(tokens).map(|ids| advance(runner, embedding, &mut state, ids)).collect()
}

/// Changes the shape and the values of the tensor of that name.
type ChangeTensor<'a> = dyn Fn(&str, &mut Vec<usize>, &mut Vec<f32>) + 'a;

/// Changes a checkpoint of one f32 or bf16 file: writes config.json with `config` applied and the
/// tensors, as f32, with `change` applied to name, shape and values.
pub(crate) fn changed_checkpoint(
    from: &Path,
    to: &Path,
    config: &dyn Fn(&mut Value),
    change: &ChangeTensor<'_>,
) {
    copy_folder(from, to);
    let file = to.join("config.json");
    let mut json: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    config(&mut json);
    std::fs::write(&file, json.to_string()).unwrap();
    let file = to.join("model.safetensors");
    let bytes = std::fs::read(&file).unwrap();
    let source = SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors = Vec::new();
    for (name, tensor) in source.iter() {
        let dtype = match tensor.dtype() {
            safetensors::Dtype::F32 => DType::F32,
            safetensors::Dtype::BF16 => DType::BF16,
            other => panic!("{name} is {other}"),
        };
        let mut shape = tensor.shape().to_vec();
        let mut values = vec![0f32; shape.iter().product()];
        firesteel_tensor::read_f32(dtype, tensor.data(), &mut values).unwrap();
        change(name, &mut shape, &mut values);
        let data: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        tensors.push((name.to_owned(), shape, data));
    }
    let views = tensors.iter().map(|(name, shape, data)| {
        (
            name,
            safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape.clone(), data)
                .unwrap(),
        )
    });
    safetensors::serialize_to_file(views, None, &file).unwrap();
}
