//! A family with norms of queries and keys, SiLU, separate projections and no windows, through every
//! verb.

use crate::support::{
    Golden, advance, argument, export_to, golden_path, options, ort, refusal, snr, stdout,
};
use firesteel_artifact::Artifact;
use firesteel_check::greedy_choice;
use firesteel_checkpoint::Checkpoint;
use firesteel_engine::CheckpointEmbedding;
use firesteel_export::{Dialect, ExportOptions};
use firesteel_step::{KvState, Logits, Role, Runner};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

const MODELS: [&str; 2] = ["tied", "untied"];
/// Tokens before the greedy ones.
const PROMPT: usize = 16;

fn folder(name: &str) -> std::path::PathBuf {
    golden_path("qwen3").join(name)
}

/// Against the float64 forward, in dB. The evaluator computes in f64; ONNX Runtime rounds to f32 after
/// every operator.
fn bar(runner: &str) -> f64 {
    if runner == "evaluator" { 130.0 } else { 110.0 }
}

#[test]
fn exported_steps_match_the_float64_forward_in_any_chunks() {
    let out = tempfile::tempdir().unwrap();
    let mut failures = Vec::new();
    for name in MODELS {
        let golden = Golden::open(&golden_path(&format!("qwen3/{name}.safetensors")));
        let (ids, reference, greedy) =
            (golden.ids("ids"), golden.f64("logits"), golden.ids("greedy"));
        let checkpoint = Arc::new(Checkpoint::open(&folder(name)).unwrap());
        let embedding = CheckpointEmbedding::new(Arc::clone(&checkpoint));
        for dialect in [Dialect::Portable, Dialect::Qnn] {
            let mut artifacts = BTreeMap::new();
            for tokens in [1, 3, 5, 12] {
                let options =
                    ExportOptions { tokens, dialect, logits: Logits::All, ..options(&checkpoint) };
                let place = out.path().join(format!("{name}-{dialect}-{tokens}"));
                artifacts.insert(tokens, export_to(&checkpoint, options, &place));
            }
            let evaluator = |artifact: &Artifact| artifact.evaluator(false).unwrap();
            let runtime = |artifact: &Artifact| Box::new(ort(artifact)) as Box<dyn Runner>;
            type Open<'a> = &'a dyn Fn(&Artifact) -> Box<dyn Runner>;
            for open in [&evaluator as Open<'_>, &runtime] {
                let mut runners: BTreeMap<usize, Box<dyn Runner>> =
                    artifacts.iter().map(|(tokens, artifact)| (*tokens, open(artifact))).collect();
                let mut step = |state: &mut KvState, ids: &[u32]| -> Vec<f32> {
                    let runner = runners.get_mut(&ids.len()).unwrap();
                    let spec = runner.spec().clone();
                    let outputs = advance(runner.as_mut(), &embedding, state, ids);
                    outputs.get(&spec, Role::Logits).unwrap().view().to_f32().unwrap().into_owned()
                };
                let runner = open(&artifacts[&1]);
                for pattern in [&[1][..], &[5, 12, 3]] {
                    let mut state = KvState::new(runner.spec()).unwrap();
                    let mut all = Vec::new();
                    let mut sizes = pattern.iter().cycle();
                    while state.position() < ids.len() {
                        let (start, left) = (state.position(), ids.len() - state.position());
                        let size = sizes.next().copied().filter(|size| *size <= left).unwrap_or(1);
                        all.extend(step(&mut state, &ids[start..start + size]));
                    }
                    let db = snr(&reference, &all);
                    let what = format!("{name} {dialect} {} {pattern:?}", runner.name());
                    if db.is_nan() || db < bar(runner.name()) {
                        failures.push(format!("{what}: {db:.1} dB"));
                    }
                }
                let mut state = KvState::new(runner.spec()).unwrap();
                let mut last = Vec::new();
                for id in &ids[..PROMPT] {
                    last = step(&mut state, &[*id]);
                }
                let mut chosen = Vec::new();
                while chosen.len() < greedy.len() {
                    let next = greedy_choice(&last).unwrap();
                    chosen.push(next);
                    last = step(&mut state, &[next]);
                }
                assert_eq!(chosen, greedy, "{name} {dialect} {}", runner.name());
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

fn json(arguments: &[&str]) -> Value {
    serde_json::from_str(&stdout(arguments)).unwrap()
}

/// Width of the tied model's caches, layers and vocabulary are known; what is counted by hand is
/// compared with what the verbs say.
#[test]
fn the_shapes_are_counted() {
    let report = json(&["inspect", argument(&folder("tied")), "--json"]);
    assert_eq!(report["model_type"], "qwen3");
    // Of a layer: two gains of 64, q, k, v and out of 4 and 2 heads of 32, two gains of 32, the
    // three matrices of 96; then the table and the last gain.
    let layer = 2 * 64 + 64 * (128 + 64 + 64) + 128 * 64 + 2 * 32 + 3 * 64 * 96;
    assert_eq!(report["parameters"], 3 * layer + 160 * 64 + 64);
    let memory = ["profile", "memory", "--model", "qwen3-1.7b", "--context", "4096"];
    let memory = json(&[&memory[..], &["--json"]].concat());
    // 28 layers × 4096 entries × 8 heads of 128 × keys and values × 2 bytes.
    assert_eq!(memory["contexts"][0]["kv_bytes"], 28 * 4096 * 8 * 128 * 2 * 2, "{memory}");
    let estimate = ["profile", "estimate", "--model", "qwen3-1.7b", "--precision", "w8a16"];
    let estimate = stdout(&estimate);
    assert!(estimate.contains("full_attention"), "{estimate}");
    let gelu = refusal(&[
        "export",
        argument(&folder("tied")),
        "--gelu",
        "tanh",
        "--out",
        "/nonexistent/out",
    ]);
    assert!(gelu.contains("--gelu tanh: layers of Qwen3 have silu instead"), "{gelu}");
}

/// Every format of weights, against the checkpoint in floats; what the files hold is read back and
/// computed with by the kernels and by the engine.
#[test]
fn gguf_files_hold_the_model() {
    let out = tempfile::tempdir().unwrap();
    for name in MODELS {
        let checkpoint = folder(name);
        let exact = Checkpoint::open(&checkpoint).unwrap();
        for (format, min_db) in [("f32", 110.0), ("f16", 50.0), ("q8_0", 25.0), ("q4_0", 4.0)] {
            let file = out.path().join(format!("{name}-{format}.gguf"));
            stdout(&[
                "quantize",
                "gguf",
                argument(&checkpoint),
                "--format",
                format,
                "--out",
                argument(&file),
            ]);
            let read = Checkpoint::open(&file).unwrap();
            // A file of floats has no type of its own but that of its matrices.
            let config = firesteel_checkpoint::ModelConfig {
                dtype: exact.config().dtype,
                ..read.config().clone()
            };
            assert_eq!(&config, exact.config(), "{name} {format}");
            let min_db = min_db.to_string();
            let report = json(&[
                "check",
                "step",
                argument(&file),
                "--against",
                argument(&checkpoint),
                "--min-snr",
                &min_db,
                "--json",
            ]);
            assert_eq!(report["passed"], true, "{name} {format}: {report}");
        }
        // And back to what it was.
        let again = Checkpoint::open(&out.path().join(format!("{name}-f32.gguf"))).unwrap();
        for (own, read) in exact.layers().iter().zip(again.layers()) {
            for (own, read) in own.all().iter().zip(read.all()) {
                let values = |weight: &firesteel_checkpoint::Weight| {
                    let mut values = vec![0f32; weight.element_count()];
                    weight.read_f32(0, &mut values).unwrap();
                    values
                };
                assert_eq!((own.name(), values(own)), (read.name(), values(read)));
            }
        }
    }
}

/// Integers for the phone's processor, calibrated with ids, on the evaluator.
#[test]
fn integers_are_near_the_floats() {
    let out = tempfile::tempdir().unwrap();
    let place = |name: &str| out.path().join(name);
    let model = folder("untied");
    let ranges = place("ranges.json");
    let spread = ["--spread", "512"];
    stdout(&[&["calibrate", argument(&model), "--out", argument(&ranges)], &spread[..]].concat());
    // Against floats over 64 steps; the bars are 3 dB below what was seen.
    for (scheme, bar) in SCHEMES {
        let artifact = place(scheme);
        let mut arguments =
            vec!["quantize", "graph", argument(&model), "--scheme", scheme, "--ranges"];
        arguments.extend([argument(&ranges), "--context", "64", "--out", argument(&artifact)]);
        // Sixteen bits are not rounded for a text.
        if scheme != "w16a16" {
            arguments.extend(spread);
        }
        if scheme == "mixed" {
            arguments.extend(["--bits", "6"]);
        }
        stdout(&arguments);
        let manifest = std::fs::read(artifact.join("manifest.json")).unwrap();
        let manifest: Value = serde_json::from_slice(&manifest).unwrap();
        let weights = manifest["quantization"]["weights"].as_array().unwrap();
        // The gate of the feed-forward part is a matrix as others are.
        let of_scheme = |weight: &Value| match scheme {
            "w16a16" => weight["dtype"] == "i16",
            "w8a16" => weight["dtype"] == "i8",
            "w4a16" => weight["dtype"] == "i4",
            _ => weight["dtype"] == "i4" || weight["dtype"] == "i8",
        };
        assert_eq!(weights.len(), 4 * 7 + 1);
        assert!(weights.iter().all(of_scheme), "{scheme}: {weights:?}");
        let logits = snr_of_logits(&artifact, &model);
        println!("{scheme}: {logits:.1} dB");
        assert!(logits >= bar, "{scheme}: {logits:.1} dB");
    }
}

const SCHEMES: [(&str, f64); 4] =
    [("w16a16", 39.0), ("w8a16", 29.0), ("mixed", 14.0), ("w4a16", 6.0)];

/// Signal to noise of the logits in dB that `check` reports on the evaluator.
fn snr_of_logits(artifact: &Path, model: &Path) -> f64 {
    let report = json(&[
        "check",
        "step",
        argument(artifact),
        "--against",
        argument(model),
        "--runner",
        "evaluator",
        "--min-snr",
        "0",
        "--json",
    ]);
    report["output"]["db"].as_f64().unwrap_or_else(|| panic!("{report}"))
}
