//! Compiling for the HTP and running on its emulator. Needs what `setup ort` and `setup qnn`
//! install.

use crate::made::{CALIBRATION, RANGES, made};
use crate::support::{
    argument, export_to, firesteel, golden_path, names, options, refusal, spark_tiny, stdout,
    write_graph,
};
use firesteel_check::audit::{Dump, Placement, Rule, audit};
use firesteel_checkpoint::Checkpoint;
use firesteel_compile::{Compiled, Measured};
use firesteel_export::{Dialect, ExportOptions, Precision};
use firesteel_graph::{Constant, Graph, Op, ValueId};
use firesteel_ort::OrtError;
use firesteel_ort::qnn::{
    CompileRequest, ContextModel, CpuNodes, HtpModel, HtpOptions, Limits, Soc, WorkerCommand,
    compile_contexts,
};
use firesteel_step::Logits;
use firesteel_tensor::{DType, Tensor};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The trained model in half precision, as the HTP wants it.
fn half(checkpoint: &Checkpoint) -> ExportOptions {
    ExportOptions { precision: Precision::Fp16, dialect: Dialect::Qnn, ..options(checkpoint) }
}

/// A slice of one layer, which compiles in no time.
fn slice(checkpoint: &Checkpoint) -> ExportOptions {
    ExportOptions { layers: 0..1, logits: Logits::Hidden, ..half(checkpoint) }
}

fn compile<'a>(artifact: &'a Path, out: &'a Path, more: &[&'a str]) -> Vec<&'a str> {
    let fixed = ["compile", argument(artifact), "--soc", "sm8750", "--out", argument(out)];
    fixed.iter().chain(more).copied().collect()
}

fn parsed(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

#[test]
fn the_trained_model_is_placed_and_right_on_the_emulator() {
    let folder = tempfile::tempdir().unwrap();
    let (artifact, out) = (folder.path().join("artifact"), folder.path().join("compiled"));
    let checkpoint = Checkpoint::open(&spark_tiny()).unwrap();
    export_to(&checkpoint, ExportOptions { context: 128, ..half(&checkpoint) }, &artifact);
    let manifest = parsed(&stdout(&compile(&artifact, &out, &["--json"])));
    assert_eq!(manifest["target"]["soc"], "sm8750");
    let part = &manifest["steps"][0]["parts"][0];
    assert_eq!(part["audit"]["findings"], json!([]));
    let ops = &part["audit"]["qnn_ops"];
    for (op, count) in [("RmsNorm", 9), ("Gelu", 4), ("FullyConnected", 25), ("Softmax", 4)] {
        assert_eq!(ops[op], count, "{op}");
    }
    // Two bytes a weight, and each is read once a step.
    let weights: u64 = 2 * part["audit"]["weights"]["f16"]["elements"].as_u64().unwrap();
    let read = part["audit"]["schematic"]["total"]["dram_read"].as_u64().unwrap();
    assert!(read >= weights && read < weights + weights / 4, "{read} of {weights}");

    let against = spark_tiny();
    let check =
        ["check", "step", argument(&out), "--against", argument(&against), "--runner", "htp"];
    let more = ["--steps", "24", "--tie-margin", "0.05", "--min-snr", "45", "--record"];
    let greedy = ["--greedy", "64", "--min-greedy", "1"];
    let talk = firesteel(&[&check[..], &more, &greedy].concat());
    let text = String::from_utf8(talk.stdout).unwrap();
    assert!(talk.status.success(), "{text}");
    for line in [
        "compiled: for sm8750, 1 part, ",
        "placed: all of 187 ops on the HTP",
        "numerically right: yes on the emulator: ",
        "speed: unknown here",
    ] {
        assert!(text.lines().any(|found| found.starts_with(line)), "{line}: {text}");
    }
    assert!(String::from_utf8(talk.stderr).unwrap().contains("emulating 104 steps takes about"));

    let shown = stdout(&["inspect", "--verify", argument(&out)]);
    for part in ["compiled for sm8750 (number 69, v79)", "measured on the emulator, 24 tokens"] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    // A phone's time is nobody's guess: no line speaks of cycles or of time on a device.
    assert!(!shown.contains("cycle") && !text.contains("cycle"));
}

#[test]
fn integers_are_placed_as_planned_and_the_emulator_is_the_evaluator() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let tiny = spark_tiny();
    let tiny = argument(&tiny);
    let quantize = ["quantize", "graph", tiny, "--scheme", "w8a16", "--ranges", RANGES.argument()];
    let artifact = made(&[&quantize[..], &["--context", "128", "--embedding"]].concat()).path;
    let out = at("compiled");
    let manifest = parsed(&stdout(&compile(&artifact, &out, &["--json"])));
    let audit = &manifest["steps"][0]["parts"][0]["audit"];
    assert_eq!(audit["findings"], json!([]));
    assert_eq!(audit["weights"]["int8 per channel"]["tensors"], 21);
    assert_eq!(audit["qnn_ops"]["RmsNorm"], 9);
    assert_eq!(audit["qnn_ops"]["Gelu"], 4);

    let check = |path: &Path, more: &[&str]| {
        let fixed =
            ["check", "step", argument(path), "--against", tiny, "--min-snr", "36", "--json"];
        let report = firesteel(&[&fixed[..], more].concat());
        let report = parsed(&String::from_utf8(report.stdout).unwrap());
        assert_eq!(report["passed"], true, "{report}");
        report["output"]["db"].as_f64().unwrap()
    };
    let greedy = ["--greedy", "32", "--min-greedy", "1", "--tie-margin", "0.05"];
    let [evaluator, emulator] =
        [&artifact, &out].map(|path| check(path, &[&["--steps", "16"][..], &greedy].concat()));
    assert!((evaluator - emulator).abs() < 2.0, "{emulator} {evaluator}");

    // Text, past the window, and conversations, each model by itself.
    for (name, tokens) in [("heldout.txt", "96"), ("heldout_chats.jsonl", "48")] {
        let file = golden_path("spark-tiny").join(name);
        let fixed =
            ["check", "fidelity", argument(&out), "--against", tiny, "--text", argument(&file)];
        let talk = firesteel(&[&fixed[..], &["--tokens", tokens, "--min-snr", "36"]].concat());
        let shown = String::from_utf8(talk.stdout).unwrap();
        let estimate = String::from_utf8(talk.stderr).unwrap();
        let emulating = format!("emulating {tokens} steps takes about");
        assert!(talk.status.success() && estimate.contains(&emulating), "{shown}{estimate}");
        for line in ["placed: all of ", "numerically right: yes on the emulator: logits "] {
            assert!(shown.lines().any(|found| found.starts_with(line)), "{line}: {shown}");
        }
    }
    let fixed =
        ["check", "fidelity", argument(&out), "--against", tiny, "--time-limit", "20", "--text"];
    let talk = refusal(&[&fixed[..], &[argument(&golden_path("spark-tiny/heldout.txt"))]].concat());
    assert!(talk.contains("the limit is 20 s; give fewer --tokens"), "{talk}");

    // What crosses from part to part are the integers themselves.
    let parts = at("parts");
    stdout(&compile(&artifact, &parts, &["--split", "2"]));
    let cut = check(&parts, &["--steps", "16", "--greedy", "0"]);
    assert!((cut - emulator).abs() < 0.5, "{cut} {emulator}");
}

/// Weights rounded to nearest; `benches/qnn/layers` rounds them for what they meet, and runs longer.
#[test]
fn a_layer_of_the_published_shape_is_placed_and_right() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let (model, ranges, artifact, out) = (at("m"), at("ranges"), at("artifact"), at("compiled"));
    let (model, ranges) = (argument(&model), argument(&ranges));
    // There is a layer after the first, so that the step of that one ends before the head.
    let synth = ["synth", "--preset", "spark-x2.5-1.7b", "--layers", "2", "--outliers"];
    stdout(&[&synth[..], &["--out", model]].concat());
    let calibrate = ["calibrate", model, "--layers", "0:1", "--spread", "32", "--out", ranges];
    stdout(&calibrate);
    let quantize =
        ["quantize", "graph", model, "--scheme", "w8a16", "--layers", "0:1", "--no-lm-head"];
    let options = ["--ranges", ranges, "--out", argument(&artifact)];
    stdout(&[&quantize[..], &options].concat());
    let manifest = parsed(&stdout(&compile(&artifact, &out, &["--json"])));
    let audit = &manifest["steps"][0]["parts"][0]["audit"];
    assert_eq!(audit["findings"], json!([]));
    assert_eq!(audit["weights"]["int8 per channel"]["tensors"], 5);
    let weights = audit["weights"]["int8 per channel"]["elements"].as_u64().unwrap();
    let read = audit["schematic"]["total"]["dram_read"].as_u64().unwrap();
    assert!(read >= weights && read < weights + weights / 10, "{read} of {weights}");
    let check =
        ["check", "step", argument(&out), "--against", model, "--greedy", "0", "--min-snr", "36"];
    let shown = stdout(&[&check[..], &["--steps", "4"]].concat());
    assert!(shown.contains("placed: all of 51 ops on the HTP"), "{shown}");
}

/// A layer with norms of queries and keys, SiLU and projections apart, in steps of one token and of
/// several: the norms of the heads stay one operator each, and nothing is in pieces but SiLU, which the
/// processor has no operator for.
#[test]
fn a_layer_with_norms_of_the_heads_is_placed_and_right() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let (model, ranges) = (golden_path("qwen3/untied"), at("ranges.json"));
    let (model, ranges) = (argument(&model), argument(&ranges));
    // Short sequences, because what a first token attends to is itself alone and larger than any mean.
    let ids = ["--spread", "512"];
    let calibrate = ["calibrate", model, "--layers", "0:1", "--tokens", "16", "--out", ranges];
    stdout(&[&calibrate[..], &ids].concat());
    let step = ["--layers", "0:1", "--no-lm-head", "--context", "64", "--tokens"];
    // The bars are 3 dB, twice the noise, below what was seen: 56 and 37 dB.
    for (precision, bar) in [("fp16", "53"), ("w8a16", "33")] {
        let half = precision == "fp16";
        for tokens in ["1", "8"] {
            let name = format!("{precision}-{tokens}");
            let (artifact, out) = (at(&name), at(&format!("{name}-compiled")));
            let make: &[&str] = match half {
                true => &["export", model, "--dialect", "qnn", "--precision", "fp16"],
                false => &[
                    "quantize", "graph", model, "--scheme", "w8a16", "--ranges", ranges, "--quick",
                ],
            };
            let more: &[&str] = if half { &[] } else { &ids };
            let to = [tokens, "--out", argument(&artifact)];
            stdout(&[make, &step, &to, more].concat());
            let manifest = parsed(&stdout(&compile(&artifact, &out, &["--json"])));
            let audit = &manifest["steps"][0]["parts"][0]["audit"];
            assert_eq!(audit["findings"], json!([]), "{name}");
            let activation = if half { "Tanh" } else { "Sigmoid" };
            for (op, count) in [("RmsNorm", 4), ("FullyConnected", 7), (activation, 1)] {
                assert_eq!(audit["qnn_ops"][op], count, "{name}: {op}");
            }
            let format = if half { "f16" } else { "int8 per channel" };
            assert_eq!(audit["weights"][format]["tensors"], 7, "{name}");
            let check = ["check", "step", argument(&out), "--against", model, "--greedy", "0"];
            let shown = stdout(&[&check[..], &["--steps", "24", "--min-snr", bar]].concat());
            assert!(shown.contains("numerically right: yes on the emulator"), "{name}: {shown}");
        }
    }
}

/// Ranges of the trained model's first layer.
fn layer_ranges() -> PathBuf {
    let tiny = spark_tiny();
    let command = ["calibrate", argument(&tiny), "--text", CALIBRATION, "--samples", "2"];
    made(&[&command[..], &["--tokens", "64", "--layers", "0:1"]].concat()).path
}

#[test]
fn steps_whose_caches_do_not_fit_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let (tiny, ranges, other, out) = (spark_tiny(), layer_ranges(), at("other"), at("out"));
    let (tiny, ranges, other, out) =
        (argument(&tiny), argument(&ranges), argument(&other), argument(&out));
    let text = std::fs::read_to_string(ranges).unwrap();
    std::fs::write(other, text.replace("\"tool_version\": \"", "\"tool_version\": \"0.")).unwrap();
    let quantize = |name: &str, more: &[&str]| {
        let path = at(name);
        let fixed =
            ["quantize", "graph", tiny, "--scheme", "w8a16", "--layers", "0:1", "--no-lm-head"];
        let context = ["--context", "64", "--out", argument(&path)];
        stdout(&[&fixed[..], &context, more].concat());
        path
    };
    let decode = quantize("decode", &["--ranges", ranges]);
    let mut cases = vec![
        (quantize("kv", &["--ranges", ranges, "--tokens", "8", "--kv", "u8"]), "format of keys"),
        (quantize("ranges8", &["--ranges", other, "--tokens", "8"]), "the hash of the ranges"),
        (
            quantize("roll", &["--ranges", ranges, "--tokens", "8", "--cache-layout", "roll"]),
            "the layouts of the caches",
        ),
    ];
    let checkpoint = Checkpoint::open(&spark_tiny()).unwrap();
    export_to(
        &checkpoint,
        ExportOptions { tokens: 8, context: 64, ..slice(&checkpoint) },
        &at("half"),
    );
    cases.push((at("half"), "the precision"));
    for (prefill, part) in &cases {
        let command = ["compile", argument(&decode), argument(prefill), "--soc", "sm8750"];
        let talk = refusal(&[&command[..], &["--out", out]].concat());
        assert!(talk.contains(part) && talk.contains("do not fit"), "{part}: {talk}");
    }
    // Nothing is compiled before it is clear that it can be shared.
    let talk = refusal(&compile(&decode, Path::new(out), &["--share-weights"]));
    assert!(talk.contains("two steps") && !talk.contains("compiling"), "{talk}");
}

#[test]
fn what_is_kept_in_floats_and_what_is_made_up_are_told() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let (tiny, ranges) = (spark_tiny(), layer_ranges());
    let (tiny, ranges) = (argument(&tiny), argument(&ranges));
    let (kept, made_up) = (at("kept"), at("made-up"));
    let fixed = ["quantize", "graph", tiny, "--scheme", "w8a16", "--layers", "0:1", "--no-lm-head"];
    let options = ["--context", "64", "--ranges", ranges, "--keep", "*down_proj*=fp16", "--out"];
    stdout(&[&fixed[..], &options, &[argument(&kept)]].concat());
    let out = at("compiled");
    let manifest = parsed(&stdout(&compile(&kept, &out, &["--json"])));
    let part = &manifest["steps"][0]["parts"][0];
    assert_eq!(part["audit"]["findings"], json!([]));
    assert_eq!(part["audit"]["weights"]["f16"]["tensors"], 1);
    assert_eq!(manifest["settings"]["soc_model"], "69");
    let check = ["check", "step", argument(&out), "--against", tiny, "--steps", "8"];
    stdout(&[&check[..], &["--min-snr", "36"]].concat());

    // Keys and values in floats are asked for, so there is nothing to find.
    let (halves, out) = (at("halves"), at("halves-compiled"));
    let options = ["--context", "66", "--ranges", ranges, "--kv", "f16", "--out"];
    stdout(&[&fixed[..], &options, &[argument(&halves)]].concat());
    let manifest = parsed(&stdout(&compile(&halves, &out, &["--json"])));
    assert_eq!(manifest["steps"][0]["parts"][0]["audit"]["findings"], json!([]));

    let options = ["--context", "65", "--uncalibrated", "--out", argument(&made_up)];
    stdout(&[&fixed[..], &options].concat());
    let out = at("uncalibrated");
    let shown = stdout(&compile(&made_up, &out, &[]));
    assert!(shown.contains("UNCALIBRATED: its numbers are wrong"), "{shown}");
    let found = names(&out);
    for name in ["decode-uncalibrated.onnx", "decode-uncalibrated_qnn.bin"] {
        assert!(found.iter().any(|found| found == name), "{found:?}");
    }
    let check =
        ["check", "step", argument(&out), "--against", tiny, "--steps", "1", "--min-snr", "-99"];
    let talk = String::from_utf8(firesteel(&check).stderr).unwrap();
    assert!(talk.contains("the compiled artifact is uncalibrated"), "{talk}");
}

#[test]
fn parts_and_shared_weights() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let checkpoint = Checkpoint::open(&spark_tiny()).unwrap();
    export_to(&checkpoint, half(&checkpoint), &at("decode"));
    stdout(&compile(&at("decode"), &at("parts"), &["--split", "2"]));
    let manifest = parsed(&stdout(&["inspect", "--json", argument(&at("parts"))]));
    let parts = manifest["steps"][0]["parts"].as_array().unwrap();
    let named: Vec<&str> = parts.iter().map(|part| part["name"].as_str().unwrap()).collect();
    assert_eq!(named, ["decode-layers-0-2", "decode-layers-2-4", "decode-head-0"]);
    let against = spark_tiny();
    let check = ["check", "step", argument(&at("parts")), "--against", argument(&against)]
        .map(str::to_owned);
    let check: Vec<&str> = check.iter().map(String::as_str).collect();
    let text =
        stdout(&[&check[..], &["--steps", "8", "--greedy", "0", "--min-snr", "45"]].concat());
    assert!(text.contains("parts 2, head graphs 1"), "{text}");

    let prefill = ExportOptions { tokens: 16, ..half(&checkpoint) };
    export_to(&checkpoint, prefill, &at("prefill"));
    let (decode, prefill, shared) = (at("decode"), at("prefill"), at("shared"));
    let two = |more: &[&'static str]| {
        let mut arguments = compile(&decode, &shared, &[argument(&prefill), "--share-weights"]);
        arguments.extend(more);
        arguments.into_iter().map(str::to_owned).collect::<Vec<String>>()
    };
    let wrong = two(&["--graphs", "decode,prefill-128"]);
    let wrong: Vec<&str> = wrong.iter().map(String::as_str).collect();
    assert!(refusal(&wrong).contains("the artifacts are decode,prefill-16"));
    let right = two(&["--graphs", "decode,prefill-16", "--json"]);
    let right: Vec<&str> = right.iter().map(String::as_str).collect();
    let manifest = parsed(&stdout(&right));
    let alone: Vec<u64> = manifest["steps"]
        .as_array()
        .unwrap()
        .iter()
        .map(|step| step["parts"][0]["binary_bytes"].as_u64().unwrap())
        .collect();
    let together = manifest["shared"]["bytes"].as_u64().unwrap();
    assert!(together * 100 < 115 * alone[0], "{together} against {alone:?}");
    let text = stdout(&[
        "check",
        "step",
        argument(&shared),
        "--graph",
        "prefill-16",
        "--against",
        argument(&against),
        "--steps",
        "32",
        "--greedy",
        "0",
    ]);
    assert!(text.contains("32 tokens in steps of 16"), "{text}");

    // What two processes measure of two steps at the same time is kept, but nothing of a step that
    // was compiled anew meanwhile.
    let [mut one, mut other, mut late] = [(); 3].map(|()| Compiled::open(&shared).unwrap());
    let measured = |tokens| Measured {
        reference: "engine".into(),
        tokens,
        output_db: Some(54.5),
        entries_db: None,
        top1: Some(0.75),
        kl_mean: Some(0.125),
        greedy: Some((63, 64)),
    };
    for (compiled, name, tokens) in [(&mut one, "decode", 8), (&mut other, "prefill-16", 32)] {
        compiled.record(name, measured(tokens)).unwrap();
    }
    let kept = Compiled::open(&shared).unwrap();
    for (name, tokens) in [("decode", 8), ("prefill-16", 32)] {
        assert_eq!(kept.step(Some(name)).unwrap().measured, Some(measured(tokens)), "{name}");
    }
    assert_eq!(kept.manifest(), other.manifest());
    let file = shared.join("manifest.json");
    let text = std::fs::read_to_string(&file).unwrap();
    let hash = kept.manifest().files[0].xxh3.clone();
    std::fs::write(&file, text.replace(&hash, &"0".repeat(hash.len()))).unwrap();
    let error = late.record("decode", measured(9)).unwrap_err().to_string();
    assert!(error.contains("manifest.json: is of another artifact"), "{error}");
}

#[test]
fn what_was_compiled_before_a_failure_is_not_compiled_again() {
    let folder = tempfile::tempdir().unwrap();
    let (artifact, out) = (folder.path().join("artifact"), folder.path().join("compiled"));
    let checkpoint = Checkpoint::open(&spark_tiny()).unwrap();
    let pieces = ExportOptions { dialect: Dialect::Portable, context: 33, ..slice(&checkpoint) };
    export_to(&checkpoint, pieces, &artifact);
    let talk = refusal(&compile(&artifact, &out, &[]));
    for part in ["decomposed: layers.0.", "--dialect qnn", "--allow RULE"] {
        assert!(talk.contains(part), "{part}: {talk}");
    }
    assert_eq!(names(folder.path()), ["artifact"]);
    let allowed = compile(&artifact, &out, &["--allow", "decomposed,missing,operator,inserted"]);
    let output = firesteel(&allowed);
    let talk = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && talk.contains("decode was compiled before"), "{talk}");
    assert!(String::from_utf8(output.stdout).unwrap().contains("  allowed: decomposed: "));
    // Its parts are gone from the cache, so this is compiled anew.
    let talk = firesteel(&[&allowed[..], &["--force"]].concat());
    assert!(talk.status.success());
    assert!(!String::from_utf8(talk.stderr).unwrap().contains("compiled before"));
}

/// A mode is what a host asks for when it opens a session: no part of a context, so none of what
/// finished parts in the cache are known by.
#[test]
fn a_performance_mode_changes_the_manifest_and_no_byte_of_a_context() {
    let folder = tempfile::tempdir().unwrap();
    let artifact = folder.path().join("artifact");
    let checkpoint = Checkpoint::open(&spark_tiny()).unwrap();
    export_to(&checkpoint, ExportOptions { context: 34, ..slice(&checkpoint) }, &artifact);
    let compiled = ["burst", "power_saver"].map(|mode| {
        let out = folder.path().join(mode);
        let manifest = parsed(&stdout(&compile(&artifact, &out, &["--perf", mode, "--json"])));
        assert_eq!(manifest["target"]["performance"], mode);
        assert_eq!(manifest["settings"].get("htp_performance_mode"), None);
        let binary = manifest["steps"][0]["parts"][0]["binary"].as_str().unwrap();
        std::fs::read(out.join(binary)).unwrap()
    });
    assert!(compiled[0] == compiled[1]);
}

/// A graph in which every value is quantized.
struct Quantized {
    graph: Graph,
}

impl Quantized {
    fn new() -> Self {
        Self { graph: Graph::new("step") }
    }

    fn constant(&mut self, name: String, tensor: Tensor) -> ValueId {
        let (dtype, shape) = (tensor.dtype(), tensor.shape().to_vec());
        self.graph.add_constant(name, dtype, shape, Constant::Tensor(tensor)).unwrap()
    }

    /// `x` to integers of `dtype` and back.
    fn through(&mut self, x: ValueId, name: &str, dtype: DType) -> ValueId {
        let zero = if dtype == DType::U16 { 32768 } else { 0 };
        let scale = Tensor::from_f32(vec![], vec![1e-3]).unwrap();
        let scale = self.constant(format!("{name}.scale"), scale);
        let zero = Tensor::from_i32_as(dtype, vec![], &[zero]).unwrap();
        let zero = self.constant(format!("{name}.zero"), zero);
        let op = Op::QuantizeLinear { axis: None };
        let q = self.graph.add(op, &[x, scale, zero], format!("{name}.q")).unwrap();
        let op = Op::DequantizeLinear { axis: None };
        self.graph.add(op, &[q, scale, zero], format!("{name}.real")).unwrap()
    }

    fn input(&mut self, name: &str, shape: &[usize], dtype: DType) -> ValueId {
        let x = self.graph.input(name, DType::F32, shape.to_vec()).unwrap();
        self.through(x, name, dtype)
    }

    fn node(&mut self, op: Op, inputs: &[ValueId], name: &str, dtype: DType) -> ValueId {
        let y = self.graph.add(op, inputs, name).unwrap();
        self.through(y, name, dtype)
    }

    fn finish(mut self, output: ValueId) -> Graph {
        self.graph.output(output).unwrap();
        self.graph
    }
}

/// q · k in 16 bits with keys of `keys`.
fn scores(keys: DType) -> Graph {
    let mut graph = Quantized::new();
    let q = graph.input("q", &[1, 2, 1, 64], DType::U16);
    let k = graph.input("k", &[1, 2, 64, 32], keys);
    let y = graph.node(Op::MatMul, &[q, k], "scores", DType::U16);
    graph.finish(y)
}

/// x · erf(x), quantized after each operator.
fn erf() -> Graph {
    let mut graph = Quantized::new();
    let x = graph.input("x", &[1, 256], DType::U16);
    let erf = graph.node(Op::Erf, &[x], "erf", DType::U16);
    let y = graph.node(Op::Mul, &[x, erf], "product", DType::U16);
    graph.finish(y)
}

/// a + b into another type, at once or by an explicit conversion.
fn sum(explicit: bool) -> Graph {
    let mut graph = Quantized::new();
    let a = graph.input("a", &[1, 256], DType::U16);
    let b = graph.input("b", &[1, 256], DType::U16);
    let y = graph.node(Op::Add, &[a, b], "sum", if explicit { DType::U16 } else { DType::U8 });
    let y = if explicit { graph.through(y, "narrow", DType::U8) } else { y };
    graph.finish(y)
}

/// An artifact whose step is another graph.
fn artifact_of(graph: &Path, from: &Path, to: &Path) {
    crate::support::copy_folder(from, to);
    std::fs::copy(graph, to.join("model.onnx")).unwrap();
    let bytes = std::fs::read(graph).unwrap();
    let digest = Sha256::digest(&bytes);
    let hash: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    let file = to.join("manifest.json");
    let mut manifest = parsed(&std::fs::read_to_string(&file).unwrap());
    manifest["graphs"][0]["bytes"] = json!(bytes.len());
    manifest["graphs"][0]["sha256"] = json!(hash);
    std::fs::write(&file, manifest.to_string()).unwrap();
}

#[test]
fn bad_graphs_are_caught_each_with_its_own_words() {
    let folder = tempfile::tempdir().unwrap();
    let good = folder.path().join("good");
    let checkpoint = Checkpoint::open(&spark_tiny()).unwrap();
    export_to(&checkpoint, slice(&checkpoint), &good);
    let data =
        |name: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/compile").join(name);
    let written = |name: &str, graph: Graph| {
        let folder = folder.path().join(name);
        std::fs::create_dir(&folder).unwrap();
        write_graph(&graph, &folder)
    };
    let cases: [(&str, PathBuf, &[&str]); 5] = [
        (
            "u16 keys",
            written("keys", scores(DType::U16)),
            &["convert: scores/MatMul", "from u16 to u8", "keys and values", "must be s16"],
        ),
        (
            "Erf in integers",
            written("erf", erf()),
            &["cpu: erf/Erf: Erf stays on the CPU", "--dialect qnn"],
        ),
        (
            "mixed-type Add",
            written("sum", sum(false)),
            &["float: sum/Add: Add is computed in f32", "reads u16 and makes u8", "explicitly"],
        ),
        ("block int4", data("block_int4.onnx"), &["block_size is 32", "one scale a row"]),
        ("unsupported op", data("resize.onnx"), &["larger", "Resize", "not supported"]),
    ];
    let mut failures = Vec::new();
    for (number, (name, graph, parts)) in cases.into_iter().enumerate() {
        let artifact = folder.path().join(format!("artifact-{number}"));
        artifact_of(&graph, &good, &artifact);
        let out = folder.path().join("out");
        let talk = refusal(&compile(&artifact, &out, &[]));
        failures.extend(
            parts
                .iter()
                .filter(|part| !talk.contains(**part))
                .map(|part| format!("{name}: {part:?} is not in {talk}")),
        );
        assert!(!out.exists(), "{name}");
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

fn worker() -> WorkerCommand {
    WorkerCommand {
        program: env!("CARGO_BIN_EXE_firesteel").into(),
        arguments: vec!["worker".into()],
    }
}

const LIMITS: Limits = Limits { memory: None, time: Duration::from_secs(300) };

fn request<'a>(models: &'a [ContextModel], worker: &'a WorkerCommand) -> CompileRequest<'a> {
    CompileRequest {
        models,
        soc: Soc::find("sm8750").unwrap(),
        account: true,
        cpu_nodes: CpuNodes::Refused,
        library: None,
        worker,
        limits: LIMITS,
    }
}

#[test]
fn what_the_graph_spells_passes_the_audit() {
    for (name, graph) in [("s16 keys", scores(DType::I16)), ("explicit", sum(true))] {
        let folder = tempfile::tempdir().unwrap();
        let source = tempfile::tempdir().unwrap();
        let model = write_graph(&graph, source.path());
        let models = [ContextModel { model, context: "c.onnx".into() }];
        let worker = worker();
        let request = request(&models, &worker);
        let outcome = compile_contexts(&request, folder.path(), &mut |_, _| {}).unwrap();
        let [dump] = &outcome.graphs[..] else { panic!("{name}: {:?}", outcome.graphs) };
        let json = std::fs::read(folder.path().join(dump)).unwrap();
        let dump = Dump::parse(&json).unwrap();
        let result = audit(&graph, &dump, None, Placement::Htp);
        assert_eq!(result.findings, [], "{name}");
        // The same list against another graph has something to say.
        let other = audit(&erf(), &dump, None, Placement::Htp);
        assert!(other.findings.iter().any(|finding| finding.rule == Rule::Missing), "{name}");
    }
}

/// The error of a child, with code and advice.
fn child_error(result: Result<impl Sized, OrtError>) -> (Vec<&'static str>, String) {
    match result.err().unwrap() {
        error @ OrtError::Child { .. } => {
            let text = error.to_string();
            let OrtError::Child { diagnoses, .. } = error else { unreachable!() };
            (diagnoses.iter().map(|diagnosis| diagnosis.code).collect(), text)
        }
        other => panic!("{other}"),
    }
}

#[test]
fn failures_of_the_child_say_why_and_what_next() {
    let folder = tempfile::tempdir().unwrap();
    let model = write_graph(&scores(DType::I16), folder.path());
    let models = [ContextModel { model, context: "c.onnx".into() }];
    let ours = worker();
    let fresh = || tempfile::tempdir().unwrap();
    let run = |request: &CompileRequest<'_>, folder: &Path| {
        compile_contexts(request, folder, &mut |_, _| {})
    };

    // A chip that the compiler does not know, past our own table.
    let unknown = Soc { number: 9999, ..Soc::find("sm8750").unwrap() };
    let odd = CompileRequest { soc: unknown, ..request(&models, &ours) };
    let (codes, text) = child_error(run(&odd, fresh().path()));
    assert_eq!(codes.first(), Some(&"INVALID_CONFIG"), "{text}");

    let once = fresh();
    run(&request(&models, &ours), once.path()).unwrap();
    let (codes, text) = child_error(run(&request(&models, &ours), once.path()));
    assert_eq!(codes.first(), Some(&"context file exists"), "{text}");

    let binary = once.path().join("c_qnn.bin");
    let whole = std::fs::read(&binary).unwrap();
    let options = HtpOptions { library: None, worker: worker(), limits: LIMITS };
    let context = once.path().join("c.onnx");
    for length in [whole.len() / 2, 100] {
        std::fs::write(&binary, &whole[..length]).unwrap();
        let (codes, text) = child_error(HtpModel::open(&context, &options));
        assert!(!codes.is_empty(), "{text}");
        assert!(text.contains("inspect --verify"), "{text}");
    }

    for (limits, part) in [
        (Limits { memory: Some(1 << 20), ..LIMITS }, "the limit is 1 MiB; raise --memory-limit"),
        (Limits { time: Duration::ZERO, ..LIMITS }, "the limit is 0 s; raise --time-limit"),
    ] {
        let small = CompileRequest { limits, ..request(&models, &ours) };
        let (_, text) = child_error(run(&small, fresh().path()));
        assert!(text.contains(part), "{text}");
    }

    for (script, part) in [
        ("kill -SEGV $$", "crashed (signal 11) inside Qualcomm's libraries"),
        ("kill -KILL $$", "was killed; if nobody did it, the machine ran out of memory"),
        ("echo spoke; exit 3", "ended with exit code 3\nits last lines:\nspoke"),
        ("exit 0", "gave no answer"),
    ] {
        let worker =
            WorkerCommand { program: "sh".into(), arguments: vec!["-c".into(), script.into()] };
        let (_, text) = child_error(run(&request(&models, &worker), fresh().path()));
        assert!(text.contains(part), "{script}: {text}");
        let options = HtpOptions { worker, ..options.clone() };
        child_error(HtpModel::open(&context, &options));
    }
}

#[test]
fn options_are_refused_before_anything_starts() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let checkpoint = Checkpoint::open(&spark_tiny()).unwrap();
    export_to(&checkpoint, slice(&checkpoint), &at("half"));
    let wide = ExportOptions { precision: Precision::Fp32, ..slice(&checkpoint) };
    export_to(&checkpoint, wide, &at("wide"));
    std::fs::create_dir(at("mine")).unwrap();
    std::fs::write(at("mine/notes"), "").unwrap();
    let (half, wide, out, mine) = (at("half"), at("wide"), at("out"), at("mine"));
    let (half, wide, out, mine) =
        (argument(&half), argument(&wide), argument(&out), argument(&mine));
    let tiny = spark_tiny();
    let cases: [(&[&str], &[&str]); 10] = [
        (
            &["compile", half, "--soc", "sm9999", "--out", out],
            &["soc sm9999 is not known", "sm8750 (number 69, v79, Snapdragon 8 Elite"],
        ),
        (&["compile", wide, "--soc", "sm8750", "--out", out], &["f32", "--precision fp16"]),
        (&["compile", half, "--soc", "sm8750", "--out", out, "--split", "0"], &["--split"]),
        (
            &["compile", half, "--soc", "sm8750", "--out", out, "--split", "2"],
            &["2 parts of 1 layers"],
        ),
        (&["compile", half, "--soc", "sm8750", "--out", out, "--perf", "fast"], &["burst"]),
        (&["compile", half, "--soc", "sm8750", "--out", out, "--allow", "all"], &["float"]),
        (&["compile", half, "--soc", "sm8750", "--out", out, "--allow", "cpu"], &["float"]),
        (&["compile", half, "--soc", "sm8750", "--out", out, "--share-weights"], &["two steps"]),
        (
            &["compile", half, "--soc", "sm8750", "--out", mine, "--force"],
            &["is no compiled firesteel artifact"],
        ),
        (
            &["check", "step", half, "--against", argument(&tiny), "--runner", "htp"],
            &["compile this one first"],
        ),
    ];
    for (arguments, parts) in cases {
        let talk = refusal(arguments);
        for part in parts {
            assert!(talk.contains(part), "{arguments:?}: {part:?} is not in {talk}");
        }
    }
    assert_eq!(names(&at("mine")), ["notes"]);
}

#[test]
fn a_damaged_compiled_artifact_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let checkpoint = Checkpoint::open(&spark_tiny()).unwrap();
    let options = ExportOptions { context: 65, ..slice(&checkpoint) };
    export_to(&checkpoint, options, &at("artifact"));
    stdout(&compile(&at("artifact"), &at("good"), &[]));
    let file = at("good/manifest.json");
    let manifest = parsed(&std::fs::read_to_string(&file).unwrap());
    let show = |manifest: &Value| {
        std::fs::write(&file, manifest.to_string()).unwrap();
        refusal(&["inspect", argument(&at("good"))])
    };
    let changed = |pointer: &str, value: Value| {
        let mut changed = manifest.clone();
        *changed.pointer_mut(pointer).unwrap() = value;
        changed
    };
    for (pointer, value, part) in [
        ("/format_version", json!(9), "compile the artifact again"),
        ("/files/0/name", json!("../config.json"), "is not a bare file name"),
        ("/steps", json!([]), "names no step"),
        ("/steps/0/parts/0/binary", json!("other.bin"), "is not among the files"),
        ("/steps/0/parts", json!([]), "0 of 1 layers"),
        ("/files/0/bytes", json!(1), "the manifest has 1"),
        (
            "/steps/0/source/embedding",
            json!({"kind": "file", "file": "../config.json", "dtype": "f16", "shape": [256, 256]}),
            "\"../config.json\" is not among the files",
        ),
    ] {
        let talk = show(&changed(pointer, value));
        assert!(talk.contains(part), "{pointer}: {talk}");
    }
    std::fs::write(&file, changed("/libraries/qnn_sdk", json!("2.40.0")).to_string()).unwrap();
    let tiny = spark_tiny();
    let check =
        ["check", "step", argument(&at("good")), "--against", argument(&tiny)].map(str::to_owned);
    let check: Vec<&str> = check.iter().map(String::as_str).collect();
    let talk = refusal(&check);
    assert!(talk.contains("the QNN SDK was 2.40.0 and is 2.51.0; compile it again"), "{talk}");

    std::fs::write(&file, manifest.to_string()).unwrap();
    let binary = at("good/decode_qnn.bin");
    let mut bytes = std::fs::read(&binary).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&binary, bytes).unwrap();
    assert!(stdout(&["inspect", argument(&at("good"))]).contains("compiled for sm8750"));
    assert!(refusal(&["inspect", "--verify", argument(&at("good"))]).contains("is damaged"));
    assert!(refusal(&check).contains("is damaged"));
}
