//! Step graphs in integers: from a text to an artifact, on the evaluator and on ONNX Runtime.

use crate::made::{CALIBRATION, RANGES, calibrated};
use crate::support::{
    Golden, ROOT, advance, argument, artifact_runners, golden_path, refusal, spark_tiny, stdout,
    write_graph,
};
use firesteel_artifact::Artifact;
use firesteel_check::{SnrMeter, compare_logits};
use firesteel_checkpoint::Checkpoint;
use firesteel_engine::CheckpointEmbedding;
use firesteel_graph::{Evaluator, Graph, Op, ValueId};
use firesteel_ort::{OrtModel, OrtOptions};
use firesteel_step::{Embedding, KvState, TensorSpec};
use firesteel_tensor::{DType, Tensor, TensorView};
use serde_json::Value;
use std::collections::HashMap;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

const CALIBRATION_CHATS: &str = "tests/golden/spark-tiny/calibration_chats.jsonl";
const HELD_OUT: &str = "tests/golden/spark-tiny/heldout.txt";
const CHATS: &str = "tests/golden/spark-tiny/heldout_chats.jsonl";

fn number(report: &Value, pointer: &str) -> f64 {
    report.pointer(pointer).and_then(Value::as_f64).unwrap_or(f64::NAN)
}

fn json(arguments: &[&str]) -> Value {
    serde_json::from_str(&stdout(&[arguments, &["--json"]].concat())).unwrap()
}

/// Prose and conversations.
const BOTH: [&str; 2] = ["--chat", CALIBRATION_CHATS];

fn quantize(out: &Path, options: &[&str]) -> Value {
    quantize_with(&RANGES.path, out, options)
}

fn quantize_with(ranges: &Path, out: &Path, options: &[&str]) -> Value {
    let (tiny, ranges) = (spark_tiny(), argument(ranges));
    let command =
        ["quantize", "graph", argument(&tiny), "--ranges", ranges, "--out", argument(out)];
    json(&[&command[..], options].concat())
}

/// `benches/qnn/tiny` has more of both texts.
#[test]
fn calibrated_eight_bit_weights_hold_their_bars_on_onnx_runtime() {
    let folder = tempfile::tempdir().unwrap();
    let ranges = calibrated(&BOTH).path;
    let mut results = Vec::new();
    for kv in ["s16", "u8"] {
        let out = folder.path().join(kv);
        let options = ["--scheme", "w8a16", "--kv", kv, "--context", "256", "--embedding"];
        let checked = ["--check-text", HELD_OUT, "--check-tokens", "80"];
        let report = quantize_with(&ranges, &out, &[&options[..], &checked].concat());
        assert_eq!(report["matrices"], serde_json::json!({"i16": 4, "i8": 21}));
        // Eight bits, and a scale for every 256 or 512 of them.
        let bits = number(&report, "/bits_per_weight");
        assert!(bits > 8.0 && bits < 8.2, "{bits}");
        assert_eq!(report["compared_tokens"], 80);
        let values = report["values"].as_array().unwrap();
        let of = |index: usize| number(&values[index], "/snr/db");
        assert!(values.len() > 100 && of(0) > 28.0, "{}", values[0]);
        let sorted = |i: usize| of(i - 1) <= of(i) || of(i).is_nan();
        assert!((1..values.len()).all(sorted), "not sorted");
        for layer in report["layers"].as_array().unwrap() {
            assert!(number(layer, "/snr/db") > 36.0, "{layer}");
        }
        let texts = [(HELD_OUT, "1024"), (CHATS, "512")];
        results.push(texts.map(|(text, tokens)| compared(&out, "ort", text, tokens)));
    }
    let [wide, narrow] = &results[..] else { panic!("{results:?}") };
    for (wide, narrow) in wide.iter().zip(narrow) {
        assert!(wide.decibels >= 36.0 && wide.top1 >= 0.975, "{results:?}");
        assert!(narrow.top1 >= wide.top1 - 0.005, "{results:?}");
    }
    assert!(narrow[0].decibels >= 36.0, "{results:?}");
}

/// How near the logits over a text are to those in floats.
#[derive(Debug)]
struct Agreement {
    decibels: f64,
    top1: f64,
    kl: f64,
}

/// Runs a model and the trained one over held-out text or conversations.
fn compared(model: &Path, runner: &str, text: &str, tokens: &str) -> Agreement {
    let tiny = spark_tiny();
    let command =
        ["check", "fidelity", argument(model), "--against", argument(&tiny), "--runner", runner];
    let options = ["--text", text, "--tokens", tokens, "--sequence", "256"];
    let report = json(&[&command[..], &options].concat());
    let counted = |key: &str| report.pointer(key).and_then(Value::as_u64).unwrap();
    // A conversation is a sequence, and ends where it ends.
    let all = counted("/text/tokens");
    let sequences = counted("/text/sequences");
    assert!(all.to_string() == tokens && sequences >= all.div_ceil(256), "{report}");
    let [decibels, top1, kl] =
        ["/text/logits/db", "/text/top1", "/text/kl_mean"].map(|key| number(&report, key));
    Agreement { decibels, top1, kl }
}

#[test]
fn what_is_clipped_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let (ranges, out) = (folder.path().join("ranges.json"), folder.path().join("out"));
    std::fs::copy(calibrated(&BOTH).path, &ranges).unwrap();
    let options = ["--scheme", "w8a16", "--context", "96", "--check-tokens", "160"];
    let check = |more: &[&str]| {
        quantize_with(&ranges, &out, &[&options[..], &["--check-text", CHATS], more].concat())
    };
    // A conversation after the other, each from empty caches and no longer than they are.
    let report = check(&[]);
    assert_eq!(report["compared_tokens"], 160);
    let value = |report: &Value, name: &str| {
        let values = report["values"].as_array().unwrap();
        values.iter().find(|value| value["name"] == name).unwrap().clone()
    };
    let narrow = "layers.1.mlp.up";
    assert_eq!(number(&value(&report, narrow), "/clipped"), 0.0, "{report}");
    assert_eq!(number(&value(&report, narrow), "/beyond"), 0.0);
    // An eighth of what was seen, and a quarter more: numbers lie beyond it by several times of it.
    let mut known: Value = serde_json::from_slice(&std::fs::read(&ranges).unwrap()).unwrap();
    for name in [narrow, "layers.1.attention.k_entry"] {
        for end in known["tensors"][name]["range16"].as_array_mut().unwrap() {
            *end = (end.as_f64().unwrap() / 8.0).into();
        }
    }
    std::fs::write(&ranges, known.to_string()).unwrap();
    let report = check(&["--force"]);
    let found = value(&report, narrow);
    let [clipped, beyond] = ["/clipped", "/beyond"].map(|key| number(&found, key));
    assert!(clipped > 0.001 && clipped < 0.5 && beyond > 0.5 && beyond < 7.0, "{found}");
    // New keys leave as integers, and their range is known too.
    let keys = value(&report, "k_new_1");
    assert!(number(&keys, "/clipped") > 0.001 && number(&keys, "/beyond") > 0.5, "{keys}");
}

/// `benches/qnn/tiny` holds them to it behind a head of 8 bits too, which takes more text.
#[test]
fn four_bits_are_far_from_plain_rounding() {
    let folder = tempfile::tempdir().unwrap();
    let plain = calibrated(&["--samples", "8", "--plain"]).path;
    let (worst, best) = (folder.path().join("plain"), folder.path().join("rounded"));
    let options = ["--scheme", "w4a16", "--keep", "lm_head*=w4", "--context", "256", "--embedding"];
    quantize_with(&plain, &worst, &options);
    let text = ["--text", CALIBRATION, "--text-tokens", "1024"];
    let report = quantize(&best, &[&options[..], &text].concat());
    assert_eq!(report["matrices"]["i4"], 21, "{report}");
    let [worst, best] = [worst, best].map(|model| compared(&model, "ort", HELD_OUT, "512"));
    assert!(best.decibels >= worst.decibels + 4.0, "{best:?} {worst:?}");
}

/// `benches/qnn/tiny` has more of both texts.
#[test]
fn mixed_widths_lose_no_more_than_those_of_llama_cpp() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let (tiny, ranges, out) = (spark_tiny(), calibrated(&BOTH).path, at("out"));
    let options = ["--scheme", "mixed", "--bits", "5.27", "--context", "256", "--embedding"];
    let text = ["--text", CALIBRATION, CALIBRATION_CHATS, "--text-tokens", "32768"];
    let report = quantize_with(&ranges, &out, &[&options[..], &text].concat());
    assert!(number(&report, "/rounding_tokens") > 24e3 && report["measured_db"].is_null());
    assert!(report["predicted_db"].is_null(), "{report}");
    let bits = number(&report, "/bits_per_weight");
    assert!((5.0..=5.27).contains(&bits), "{bits}");

    // The tokens that llama.cpp has run, and what it made of them.
    let golden = Golden::open(&golden_path("spark-tiny.safetensors"));
    let theirs = Golden::open(&golden_path("llamacpp/logits.safetensors")).f32("logits.q4_k_m");
    let exact = golden.f32("logits.0");
    let tokens = theirs.len() / 2048;
    let ids = &golden.ids("ids.0")[..tokens];
    let mut meter = SnrMeter::default();
    meter.add(&exact[..theirs.len()], &theirs);
    let (mut top1, mut kl) = (0.0, 0.0);
    for (exact, test) in exact.chunks(2048).zip(theirs.chunks(2048)) {
        let difference = compare_logits(exact, test);
        top1 += f64::from(difference.reference_top == difference.test_top);
        kl += difference.kl / tokens as f64;
    }
    let peer = Agreement { decibels: meter.snr().db.unwrap(), top1: top1 / tokens as f64, kl };
    let ids: Vec<String> = ids.iter().map(u32::to_string).collect();
    let (ids, steps) = (ids.join(","), tokens.to_string());
    let command =
        ["check", "step", argument(&out), "--against", argument(&tiny), "--runner", "ort"];
    let options = ["--ids", &ids, "--steps", &steps, "--greedy", "0", "--tie-margin", "0"];
    let check = json(&[&command[..], &options].concat());
    let [decibels, top1, kl] =
        ["/output/db", "/logits/top1", "/logits/kl_mean"].map(|key| number(&check, key));
    let own = Agreement { decibels, top1, kl };

    let file = golden_path("llamacpp/spark-tiny-q4_k_m.gguf");
    let both = |text| [compared(&out, "ort", text, "1024"), compared(&file, "cpu", text, "1024")];
    for [own, peer] in [[own, peer], both(HELD_OUT)] {
        assert!(own.decibels >= peer.decibels && own.kl <= peer.kl, "{own:?} {peer:?}");
        assert!(own.top1 >= peer.top1, "{own:?} {peer:?}");
    }
    // Of conversations hardly a token in a hundred has another successor, nearly all of them near ties.
    let [own, peer] = both(CHATS);
    assert!(own.decibels >= peer.decibels && own.kl <= peer.kl, "{own:?} {peer:?}");
}

#[test]
fn texts_and_conversations_give_the_same_ranges_again() {
    let folder = tempfile::tempdir().unwrap();
    let tiny = spark_tiny();
    let calibrate = |name: &str, threads: &str| {
        let file = folder.path().join(name);
        let output = Command::new(env!("CARGO_BIN_EXE_firesteel"))
            .args(["calibrate", argument(&tiny), "--text", CALIBRATION, "--chat", CHATS])
            .args(["--samples", "9", "--json", "--out", argument(&file)])
            .current_dir(ROOT)
            .env("RAYON_NUM_THREADS", threads)
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        (std::fs::read(file).unwrap(), report)
    };
    let (ranges, report) = calibrate("first", "2");
    assert!(calibrate("again", "1").0 == ranges, "other bytes");
    assert_eq!(report["sequences"], 9);
    // What overflows where a norm squares it, and nothing that no norm squares.
    let listed = |key: &str| -> Vec<Value> { report[key].as_array().unwrap().clone() };
    let names: Vec<Value> = listed("overflow").iter().map(|entry| entry["name"].clone()).collect();
    assert_eq!(names, ["layers.3.residual"]);
    let ranges: Value = serde_json::from_slice(&ranges).unwrap();
    let texts = ranges["texts"].as_array().unwrap();
    let texts: Vec<&Value> = texts.iter().map(|text| &text["name"]).collect();
    assert_eq!(texts, ["calibration.txt", "heldout_chats.jsonl"]);
    // Two heads of 64 dimensions, each with channels of its own.
    let channels = |name: &str| -> Vec<u64> {
        let peaks = ranges["tensors"][name]["channels"].as_array().unwrap();
        peaks.iter().map(|peak| peak["channel"].as_u64().unwrap()).collect()
    };
    let keys: Vec<u64> =
        (0..4).flat_map(|layer| channels(&format!("layers.{layer}.attention.k_entry"))).collect();
    assert_eq!(keys.len(), 32);
    assert!(keys.iter().any(|key| *key >= 64) && keys.iter().all(|key| *key < 128), "{keys:?}");
}

#[test]
fn every_observer_gives_ranges_that_hold() {
    let folder = tempfile::tempdir().unwrap();
    let tiny = spark_tiny();
    let read =
        |file: &Path| -> Value { serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap() };
    // 8-bit activations, where a range that is too wide or too narrow costs most.
    let decibels = |ranges: &Path, name: &str| {
        let out = folder.path().join(name);
        let command = [
            "quantize",
            "graph",
            argument(&tiny),
            "--ranges",
            argument(ranges),
            "--scheme",
            "w8a8",
        ];
        let options = ["--context", "128", "--embedding", "--out", argument(&out)];
        stdout(&[&command[..], &options].concat());
        let command =
            ["check", "fidelity", argument(&out), "--against", argument(&tiny), "--text", HELD_OUT];
        let report = json(&[&command[..], &["--runner", "ort", "--tokens", "256"]].concat());
        number(&report, "/text/logits/db")
    };
    let observed = |observer: &str| calibrated(&["--samples", "8", "--observer", observer]).path;
    let widest = observed("minmax");
    let least = decibels(&widest, "widest");
    let known = read(&widest);
    for observer in ["percentile", "mse", "auto"] {
        let file = observed(observer);
        let other = read(&file);
        assert_eq!(other["observer"], observer);
        let mut narrower = 0;
        for (name, range) in other["tensors"].as_object().unwrap() {
            let width = |of: &Value| number(of, "/range8/1") - number(of, "/range8/0");
            let (own, full) = (width(range), width(&known["tensors"][name]));
            assert!(own > 0.0 && own <= full, "{observer} {name}: {own} {full}");
            narrower += usize::from(own < full);
            if observer == "auto" {
                assert_eq!(range["range16"], known["tensors"][name]["range16"], "{name}");
            }
        }
        assert!(narrower > 20, "{observer}: {narrower}");
        let found = decibels(&file, observer);
        assert!(found > least, "{observer}: {found} {least}");
    }
}

#[test]
fn the_evaluator_gives_what_onnx_runtime_gives_on_every_kind_of_graph() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = Arc::new(Checkpoint::open(&spark_tiny()).unwrap());
    let embedding = CheckpointEmbedding::new(Arc::clone(&checkpoint));
    let ids: Vec<u32> = (0..76u32).map(|i| (i * 131 + 7) % 2048).collect();
    let cases: [(&str, f64); 8] = [
        ("--scheme w8a16", 60.0),
        ("--scheme w8a16 --kv s8", 45.0),
        ("--scheme w8a16 --kv u8 --cache-layout roll --tokens 4", 45.0),
        ("--scheme w8a16 --kv f16 --tokens 4 --logits all", 60.0),
        ("--scheme w4a16 --cache-layout roll", 60.0),
        ("--scheme w8a8 --no-lm-head", 38.0),
        ("--scheme w16a16 --head-shards 3 --tokens 4", 60.0),
        ("--scheme w4a16 --keep *down_proj*=fp16 --keep *head*=w8 --gelu sigmoid", 60.0),
    ];
    let mut failures = Vec::new();
    for (index, (options, bar)) in cases.into_iter().enumerate() {
        let out = folder.path().join(index.to_string());
        let options: Vec<&str> = options.split(' ').collect();
        // Another GELU has other values, and so other ranges.
        let gelu = options.contains(&"--gelu");
        if gelu {
            let file = folder.path().join("gelu.json");
            let tiny = spark_tiny();
            let command = ["calibrate", argument(&tiny), "--text", CALIBRATION, "--samples", "1"];
            json(&[&command[..], &["--gelu", "sigmoid", "--out", argument(&file)]].concat());
            let command =
                ["quantize", "graph", argument(&tiny), "--ranges", argument(&file), "--out"];
            json(&[&command[..], &[argument(&out), "--context", "96"], &options].concat());
        } else {
            quantize(&out, &[&["--context", "96"], &options[..]].concat());
        }
        let artifact = Artifact::open(&out).unwrap();
        artifact.verify().unwrap();
        let [mut evaluator, mut ort] =
            <[_; 2]>::try_from(artifact_runners(&artifact)).ok().unwrap();
        let spec = evaluator.spec().clone();
        // Both get the evaluator's caches, so that a step shows its own error alone.
        let mut state = KvState::new(&spec).unwrap();
        let mut meters = vec![SnrMeter::default(); spec.outputs.len()];
        for ids in ids.chunks_exact(spec.tokens) {
            let mut x = vec![0f32; ids.len() * embedding.hidden_size()];
            embedding.lookup(ids, &mut x).unwrap();
            let step = state.prepare(&spec, &x).unwrap();
            let inputs = state.inputs(&spec, &step).unwrap();
            let [left, right] =
                [&mut evaluator, &mut ort].map(|runner| runner.step(&inputs).unwrap());
            for (port, meter) in meters.iter_mut().enumerate() {
                let [left, right] = [&left, &right].map(|step| &step.tensors()[port]);
                meter.add(&left.view().to_f32().unwrap(), &right.view().to_f32().unwrap());
            }
            state.commit(&spec, step, &left).unwrap();
        }
        for (output, meter) in spec.outputs.iter().zip(&meters) {
            if !meter.snr().reaches(bar) {
                failures.push(format!("{options:?} {}: {:?}", output.name, meter.snr().db));
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// The share of the integers of two runs of a graph that differ, and the largest difference.
fn differing(runs: [&[Tensor]; 2]) -> (f64, i32) {
    let (mut all, mut other, mut most) = (0usize, 0usize, 0);
    for (left, right) in runs[0].iter().zip(runs[1]) {
        if left.dtype() == DType::F32 {
            continue;
        }
        let [left, right] = [left, right].map(|tensor| tensor.view().to_i32().unwrap());
        for (a, b) in left.iter().zip(&right) {
            other += usize::from(a != b);
            most = most.max((a - b).abs());
        }
        all += left.len();
    }
    (other as f64 / all as f64, most)
}

/// The same graph, in which integers are not read where they are made but from further inputs, and
/// the numbers of the outputs that those are.
fn taken_apart(graph: &Graph) -> (Graph, Vec<usize>) {
    let mut apart = Graph::new(graph.name());
    let (mut ids, mut made, mut given) = (HashMap::new(), HashMap::new(), Vec::new());
    let shape = |id: ValueId| {
        let value = graph.value(id);
        (value.name.clone(), value.dtype, value.shape.clone())
    };
    for id in graph.inputs() {
        let (name, dtype, shape) = shape(*id);
        ids.insert(*id, apart.input(name, dtype, shape).unwrap());
    }
    for (id, constant) in graph.constants() {
        let (name, dtype, shape) = shape(id);
        ids.insert(id, apart.add_constant(name, dtype, shape, constant.clone()).unwrap());
    }
    for node in graph.nodes() {
        let inputs: Vec<ValueId> = node.inputs.iter().map(|id| ids[id]).collect();
        let names = node.outputs.iter().map(|id| shape(*id).0).collect();
        let outputs = apart.add_node(&node.name, node.op.clone(), &inputs, names).unwrap();
        made.extend(node.outputs.iter().copied().zip(outputs.iter().copied()));
        ids.extend(node.outputs.iter().copied().zip(outputs));
        if matches!(node.op, Op::QuantizeLinear { .. }) {
            let (name, dtype, shape) = shape(node.outputs[0]);
            ids.insert(
                node.outputs[0],
                apart.input(format!("{name}.given"), dtype, shape).unwrap(),
            );
            given.push(graph.outputs().iter().position(|id| *id == node.outputs[0]).unwrap());
        }
    }
    graph.outputs().iter().for_each(|id| apart.output(made[id]).unwrap());
    (apart, given)
}

#[test]
fn the_integers_of_every_operator_are_those_of_onnx_runtime() {
    let checkpoint = Arc::new(Checkpoint::open(&spark_tiny()).unwrap());
    let embedding = CheckpointEmbedding::new(Arc::clone(&checkpoint));
    let ids: Vec<u32> = (0..70u32).map(|i| (i * 131 + 7) % 2048).collect();
    // The runtime computes in f32 and the evaluator in f64, so a number that lies between two
    // integers now and then becomes the other one. What that does to all that is behind it is no
    // matter of the operators: each is given what the runtime gave it.
    for scheme in ["w8a16", "w4a16", "w8a8"] {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("out");
        quantize(&out, &["--scheme", scheme, "--context", "96"]);
        let artifact = Artifact::open(&out).unwrap();
        let mut graph = artifact.read_graph(&artifact.manifest().graphs[0]).unwrap();
        let rounded: Vec<_> = graph
            .nodes()
            .iter()
            .filter(|node| matches!(node.op, Op::QuantizeLinear { .. }))
            .map(|node| node.outputs[0])
            .filter(|id| !graph.outputs().contains(id))
            .collect();
        rounded.into_iter().for_each(|id| graph.output(id).unwrap());
        let model = write_graph(&graph, folder.path());
        let mut ort = OrtModel::open(&model, &OrtOptions::default()).unwrap();
        let mut runner = artifact.evaluator(false).unwrap();
        let spec = runner.spec().clone();
        let mut state = KvState::new(&spec).unwrap();
        // Past the window.
        for id in &ids {
            advance(runner.as_mut(), &embedding, &mut state, &[*id]);
        }
        let mut x = vec![0f32; embedding.hidden_size()];
        embedding.lookup(&[1234], &mut x).unwrap();
        let step = state.prepare(&spec, &x).unwrap();
        let inputs = state.inputs(&spec, &step).unwrap();
        let ports = artifact.manifest().ports();
        let encode = |(input, tensor): (&TensorSpec, &TensorView<'_>)| {
            let port = ports.iter().find(|port| port.name == input.name);
            let encoded = port.map(|port| port.encoding.quantize(*tensor).unwrap());
            encoded.unwrap_or_else(|| tensor.to_tensor())
        };
        let encoded: Vec<Tensor> = spec.inputs.iter().zip(inputs.tensors()).map(encode).collect();
        let views: Vec<TensorView<'_>> = encoded.iter().map(Tensor::view).collect();
        let named = spec.inputs.iter().zip(&views);
        let named: Vec<_> = named.map(|(port, view)| (port.name.as_str(), *view)).collect();
        let theirs = ort.run(&named).unwrap();
        let (graph, given) = taken_apart(&graph);
        assert!(given.len() > 100, "{}", given.len());
        let given = given.iter().map(|index| theirs[*index].view());
        let views: Vec<TensorView<'_>> = views.into_iter().chain(given).collect();
        let ours = Evaluator::new(graph).unwrap().run(&views).unwrap();
        let (share, most) = differing([&ours, &theirs]);
        assert!(share <= 0.001 && most <= 1, "{scheme}: {share} {most}");
    }
}

#[test]
fn an_artifact_in_floats_becomes_the_same_integers() {
    let folder = tempfile::tempdir().unwrap();
    let (tiny, float) = (spark_tiny(), folder.path().join("float"));
    let step = ["--context", "80", "--cache-layout", "ring"];
    let command = ["export", argument(&tiny), "--dialect", "qnn", "--embedding", "--out"];
    stdout(&[&command[..], &[argument(&float)], &step].concat());
    let ranges = folder.path().join("ranges.json");
    let command = ["calibrate", argument(&float), "--text", CALIBRATION, "--tokens", "80"];
    let options = ["--samples", "2", "--out", argument(&ranges)];
    json(&[&command[..], &options].concat());
    let mut models = Vec::new();
    for (source, name, options) in [(&float, "a", &[][..]), (&tiny, "b", &step)] {
        let out = folder.path().join(name);
        let command = ["quantize", "graph", argument(source), "--scheme", "w8a16", "--embedding"];
        let ranges = ["--ranges", argument(&ranges), "--out", argument(&out)];
        json(&[&command[..], &ranges, options].concat());
        let read = |name: &str| std::fs::read(out.join(name)).unwrap();
        models.push((read("model.onnx"), read("model.onnx.data"), read("report.json")));
        let artifact = Artifact::open(&out).unwrap();
        assert!(artifact.embedding().unwrap().is_some());
        assert_eq!(artifact.manifest().quantization.as_ref().unwrap().ports.len(), 16);
    }
    assert!(models[0] == models[1], "other bytes");
}

#[test]
fn mixed_widths_keep_their_budget_and_are_listed() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let options = ["--scheme", "mixed", "--bits", "5.27", "--context", "96", "--head-shards", "2"];
    let text = ["--text", CALIBRATION, "--text-tokens", "256", "--quick"];
    let report = quantize(&out, &[&options[..], &text].concat());
    let bits = number(&report, "/bits_per_weight");
    assert!((5.0..=5.27).contains(&bits), "{bits}");
    assert_eq!(report["rounding_tokens"], 256);
    let raised = report["raised"].as_array().unwrap().len();
    let artifact = Artifact::open(&out).unwrap();
    let weights = &artifact.manifest().quantization.as_ref().unwrap().weights;
    let count = |dtype| weights.iter().filter(|weight| weight.dtype == dtype).count();
    // 20 matrices of the layers, two halves of the head, and four gates.
    assert!(raised > 0 && count(DType::I8) >= raised, "{report}");
    assert_eq!(count(DType::I4) + count(DType::I8), 22);
    assert_eq!(count(DType::I16), 4);
    assert_eq!(weights.len(), 26);
}

#[test]
fn a_budget_of_decibels_is_measured_until_it_holds() {
    let folder = tempfile::tempdir().unwrap();
    let mut raised = Vec::new();
    for (asked, name) in [("22", "low"), ("27", "high")] {
        let out = folder.path().join(name);
        let options = ["--scheme", "mixed", "--budget-db", asked, "--context", "96"];
        let text = ["--text", CALIBRATION, "--text-tokens", "512"];
        let report = quantize(&out, &[&options[..], &text].concat());
        let measured = number(&report, "/measured_db");
        assert!(measured >= asked.parse().unwrap(), "{report}");
        assert!((number(&report, "/predicted_db") - measured).abs() < 8.0, "{report}");
        raised.push(report["raised"].as_array().unwrap().len());
    }
    assert!(raised[0] < raised[1] && raised[1] < 21, "{raised:?}");
    let (tiny, out) = (spark_tiny(), folder.path().join("none"));
    let command = ["quantize", "graph", argument(&tiny), "--ranges", RANGES.argument(), "--scheme"];
    let options = ["mixed", "--text", CALIBRATION, "--text-tokens", "96", "--quick"];
    let talk = refusal(
        &[&command[..], &options, &["--budget-db", "90", "--out", argument(&out)]].concat(),
    );
    assert!(talk.contains("90 dB cannot be met: with 8 bits everywhere it is"), "{talk}");
}

#[test]
fn integers_are_taken_over_by_another_step() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let (first, again, prefill) = (at("first"), at("again"), at("prefill"));
    let step = ["--scheme", "w4a16", "--context", "96"];
    let rounded = quantize(&first, &[&step[..], &["--spread", "96", "--quick"]].concat());
    assert_eq!(rounded["rounding_tokens"], 96);
    let weights = ["--weights", argument(&first)];
    quantize(&again, &[&step[..], &weights].concat());
    quantize(&prefill, &[&step[..], &weights, &["--tokens", "4"]].concat());
    let data = |folder: &Path| std::fs::read(folder.join("model.onnx.data")).unwrap();
    assert!(data(&first) == data(&again), "other bytes");
    let matrices = |folder: &Path| {
        let artifact = Artifact::open(folder).unwrap();
        let graph = artifact.read_graph(&artifact.manifest().graphs[0]).unwrap();
        firesteel_quantize::stored_matrices(&graph).unwrap()
    };
    let stored = matrices(&first);
    assert_eq!(stored.len(), 21);
    assert!(stored == matrices(&prefill), "other integers");
    let ranges = RANGES.argument();
    let tiny = spark_tiny();
    let out = at("none");
    let command =
        ["quantize", "graph", argument(&tiny), "--ranges", ranges, "--out", argument(&out)];
    for (options, expected) in [
        ("--scheme w8a16", "is of scheme w4a16 with the same ranges"),
        ("--scheme w4a16 --head-shards 2 --text x", "cannot be used with"),
    ] {
        let options: Vec<&str> = options.split(' ').collect();
        let talk = refusal(&[&command[..], &options, &weights].concat());
        assert!(talk.contains(expected), "{talk}");
    }
}

#[test]
fn ranges_made_up_say_so_everywhere() {
    let folder = tempfile::tempdir().unwrap();
    let (tiny, out) = (spark_tiny(), folder.path().join("out"));
    let command =
        ["quantize", "graph", argument(&tiny), "--scheme", "w4a16", "--uncalibrated", "--out"];
    let text = stdout(&[&command[..], &[argument(&out)]].concat());
    assert!(text.contains("w4a16 with s16 keys and values, UNCALIBRATED"), "{text}");
    assert!(out.join("model-uncalibrated.onnx").is_file());
    let read = |name: &str| -> Value {
        serde_json::from_slice(&std::fs::read(out.join(name)).unwrap()).unwrap()
    };
    let shown = stdout(&["inspect", argument(&out)]);
    assert!(shown.contains("quantized: w4a16 with s16 keys and values"), "{shown}");
    assert!(shown.contains("UNCALIBRATED: its numbers are wrong"), "{shown}");
    assert!(shown.contains("v_new_3 in the graph: i16, scale "), "{shown}");
    assert_eq!(read("manifest.json")["quantization"]["calibrated"], false);
    assert_eq!(read("report.json")["calibrated"], false);
}

#[test]
fn what_cannot_be_quantized_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let tiny = spark_tiny();
    let mini = golden_path("spark/mini");
    let (tiny, mini) = (argument(&tiny), argument(&mini));
    let nowhere = folder.path().join("out");
    let portable = folder.path().join("portable");
    stdout(&["export", tiny, "--out", argument(&portable)]);
    let float = folder.path().join("float");
    stdout(&["export", tiny, "--dialect", "qnn", "--out", argument(&float)]);
    let known = RANGES.argument();
    let broken = folder.path().join("broken.json");
    std::fs::write(&broken, std::fs::read_to_string(known).unwrap().replace("range8", "r8"))
        .unwrap();
    let partial = folder.path().join("partial.json");
    let text = std::fs::read_to_string(known).unwrap();
    std::fs::write(&partial, text.replace("\"layers.2.mlp.up\"", "\"other\"")).unwrap();
    let [broken, partial] = [argument(&broken), argument(&partial)];
    let w8 = ["--scheme", "w8a16"];
    let short = ["--check-tokens", "32", "--tokens", "64"];
    let cases: Vec<(Vec<&str>, &str)> = vec![
        (vec![tiny, "--scheme", "w8a16"], "needs the ranges of the activations: give --ranges"),
        (vec![tiny], "--scheme <SCHEME>"),
        (vec![tiny, "--scheme", "w8a16", "--format", "q8_0"], "unexpected argument '--format'"),
        ([&[tiny, "--ranges", "none.json"][..], &w8].concat(), "none.json"),
        ([&[mini, "--ranges", known][..], &w8].concat(), "were learned from other weights"),
        ([&[tiny, "--ranges", broken][..], &w8].concat(), "range8 is missing"),
        ([&[tiny, "--ranges", partial][..], &w8].concat(), "the ranges have no layers.2.mlp.up"),
        (
            vec![tiny, "--ranges", known, "--scheme", "w8a8", "--kv", "s16"],
            "--kv s16: there is no product of 8-bit activations and 16-bit keys",
        ),
        (
            [&[tiny, "--ranges", known, "--keep", "*nothing*=w8"][..], &w8].concat(),
            "--keep *nothing*: no matrix has such a name; some are model.layers.0",
        ),
        ([&[tiny, "--keep", "a=w3"][..], &w8].concat(), "\"w3\" is no width"),
        (
            [&[tiny, "--ranges", known, "--check-text", CALIBRATION][..], &w8].concat(),
            "the model was calibrated with this text",
        ),
        (
            [&[tiny, "--ranges", known, "--check-text", HELD_OUT][..], &w8, &short].concat(),
            "a step takes 64 tokens, and there are not so many one after the other among the first 32",
        ),
        (
            [&[tiny, "--ranges", known, "--gelu", "tanh"][..], &w8].concat(),
            "another form of --gelu",
        ),
        (vec![tiny, "--ranges", known, "--scheme", "w8a16", "--quick"], "--quick goes with --text"),
        ([&[tiny, "--ranges", known, "--spread", "2000000"][..], &w8].concat(), "are too many"),
        (
            [&[argument(&portable), "--ranges", known][..], &w8].concat(),
            "in the portable dialect; one in f32 in the qnn dialect is quantized",
        ),
        (
            [&[argument(&float), "--ranges", known, "--context", "9"][..], &w8].concat(),
            "the step is that of the artifact",
        ),
        (
            [&[argument(&float), "--ranges", known][..], &w8].concat(),
            "the ranges are of the checkpoint; calibrate the artifact",
        ),
        (
            vec![tiny, "--ranges", known, "--scheme", "mixed", "--text", CALIBRATION],
            "--scheme mixed needs --bits or --budget-db",
        ),
        (
            vec![tiny, "--ranges", known, "--scheme", "mixed", "--bits", "5"],
            "--scheme mixed needs --text",
        ),
        (
            [&[tiny, "--ranges", known, "--bits", "5"][..], &w8].concat(),
            "--bits and --budget-db go with --scheme mixed, not with w8a16",
        ),
    ];
    let mut failures = Vec::new();
    for (arguments, expected) in cases {
        let command =
            [&["quantize", "graph"], &arguments[..], &["--out", argument(&nowhere)]].concat();
        let talk = refusal(&command);
        if !talk.contains(expected) || nowhere.exists() {
            failures.push(format!("{arguments:?}: {talk}"));
        }
    }
    let cases: Vec<(Vec<&str>, &str)> = vec![
        (vec![tiny], "there is nothing to read; give --text or --chat"),
        (vec![mini, "--text", CALIBRATION], "a text needs the model's tokenizer; see --spread"),
        (vec![tiny, "--text", CALIBRATION, "--tokens", "0"], "1 or more is accepted"),
        (vec![tiny, "--text", CALIBRATION, "--context", "9"], "sequences have up to"),
        (vec![tiny, "--text", CALIBRATION, "--layers", "1:2"], "a text enters at layer 0"),
        (vec![argument(&portable), "--text", CALIBRATION], "in the portable dialect"),
        (vec![tiny, "--text", CALIBRATION, "--out", known], "exists already"),
    ];
    for (arguments, expected) in cases {
        let out: &[&str] =
            if arguments.contains(&"--out") { &[] } else { &["--out", argument(&nowhere)] };
        let talk = refusal(&[&["calibrate"], &arguments[..], out].concat());
        if !talk.contains(expected) || nowhere.exists() {
            failures.push(format!("calibrate {arguments:?}: {talk}"));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
