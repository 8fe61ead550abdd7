//! The golden steps and sequences through the exported file, on the evaluator and on ONNX Runtime.

use crate::support::{Golden, advance, export_to, golden_path, options, ort, snr};
use firesteel_artifact::Artifact;
use firesteel_check::{compare_logits, greedy_choice};
use firesteel_checkpoint::Checkpoint;
use firesteel_engine::CheckpointEmbedding;
use firesteel_export::{ExportOptions, Gelu};
use firesteel_step::{CacheLayoutChoice, KvState, Logits, Role, Runner, StepInputs, StepOutputs};
use firesteel_tensor::Tensor;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// A case of cases.json.
struct Case {
    name: String,
    options: ExportOptions,
    kv_bytes: [u64; 3],
}

fn cases(checkpoint: &Checkpoint) -> Vec<Case> {
    let text = std::fs::read(golden_path("spark/cases.json")).unwrap();
    let json: Value = serde_json::from_slice(&text).unwrap();
    let number = |value: &Value| usize::try_from(value.as_u64().unwrap()).unwrap();
    let case = |case: &Value| Case {
        name: case["name"].as_str().unwrap().to_owned(),
        kv_bytes: ["hybrid", "uniform", "saved"].map(|key| case["kv_bytes"][key].as_u64().unwrap()),
        options: ExportOptions {
            context: number(&case["context"]),
            layers: number(&case["layers"][0])..number(&case["layers"][1]),
            cache_layout: match case["layout"].as_str().unwrap() {
                "auto" => CacheLayoutChoice::Auto,
                "ring" => CacheLayoutChoice::Ring,
                "roll" => CacheLayoutChoice::Roll,
                other => panic!("layout {other}"),
            },
            logits: if case["lm_head"].as_bool().unwrap() { Logits::Last } else { Logits::Hidden },
            gelu: match case["gelu"].as_str().unwrap() {
                "exact" => Gelu::Exact,
                "tanh" => Gelu::Tanh,
                "sigmoid" => Gelu::Sigmoid,
                other => panic!("gelu {other}"),
            },
            ..options(checkpoint)
        },
    };
    let cases: Vec<Case> = json["cases"].as_array().unwrap().iter().map(case).collect();
    assert_eq!(cases.len(), 11);
    cases
}

/// The evaluator and ONNX Runtime on an artifact.
fn runners(artifact: &Artifact) -> Vec<Box<dyn Runner>> {
    vec![artifact.evaluator(false).unwrap(), Box::new(ort(artifact))]
}

/// What the runners are held to, in dB: against the float64 result of the same step, and against
/// the file of the reference exporter.
///
/// The reference computes in float32, and its own rounding keeps it 114 to 146 dB away from the
/// float64 result; nothing that rounds elsewhere comes nearer to it. The evaluator computes in
/// f64 and must reach 130 dB against float64. ONNX Runtime rounds to float32 as the reference
/// does, so both of its distances are of that size.
fn bars(runner: &str) -> (f64, f64) {
    if runner == "evaluator" { (130.0, 114.0) } else { (111.0, 109.0) }
}

#[test]
fn every_golden_step_is_what_the_file_computes() {
    let checkpoint = Checkpoint::open(&golden_path("spark/mini")).unwrap();
    let exact = Golden::open(&golden_path("spark/steps_f64.safetensors"));
    let folder = tempfile::tempdir().unwrap();
    let mut failures = Vec::new();
    for Case { name, options, kv_bytes } in cases(&checkpoint) {
        let artifact = export_to(&checkpoint, options, &folder.path().join(&name));
        let memory = &artifact.manifest().kv_bytes;
        assert_eq!([memory.hybrid, memory.uniform, memory.saved], kv_bytes, "{name}");
        let golden = Golden::open(&golden_path(&format!("spark/step_{name}.safetensors")));
        let spec = artifact.manifest().step.clone();
        let tensors: Vec<Tensor> = spec
            .inputs
            .iter()
            .map(|input| {
                let values = golden.f32(&format!("in.{}", input.name));
                Tensor::from_f32(input.shape.clone(), values).unwrap()
            })
            .collect();
        for mut runner in runners(&artifact) {
            let inputs =
                StepInputs::new(&spec, tensors.iter().map(Tensor::view).collect()).unwrap();
            let outputs = runner.step(&inputs).unwrap();
            for (output, tensor) in spec.outputs.iter().zip(outputs.tensors()) {
                let values = tensor.view().to_f32().unwrap();
                let reference: Vec<f64> = golden
                    .f32(&format!("out.{}", output.name))
                    .into_iter()
                    .map(f64::from)
                    .collect();
                let to_exact = snr(&exact.f64(&format!("{name}.{}", output.name)), &values);
                let to_golden = snr(&reference, &values);
                let (exact_bar, golden_bar) = bars(runner.name());
                if !(to_exact >= exact_bar && to_golden >= golden_bar) {
                    failures.push(format!(
                        "{name} {} {}: {to_exact:.1} dB, {to_golden:.1} dB",
                        runner.name(),
                        output.name
                    ));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Exports of one checkpoint for several numbers of tokens, opened on one kind of runner.
struct Chunks {
    runners: BTreeMap<usize, Box<dyn Runner>>,
    embedding: CheckpointEmbedding,
}

impl Chunks {
    fn new(
        checkpoint: &Arc<Checkpoint>,
        layout: CacheLayoutChoice,
        sizes: &[usize],
        folder: &Path,
        open: &dyn Fn(&Artifact) -> Box<dyn Runner>,
    ) -> Self {
        let runner = |&tokens: &usize| {
            let options = ExportOptions {
                tokens,
                context: 80,
                cache_layout: layout,
                logits: Logits::All,
                ..options(checkpoint)
            };
            let out = folder.join(format!("{layout:?}-{tokens}"));
            let artifact = match Artifact::open(&out) {
                Ok(artifact) => artifact,
                Err(_) => export_to(checkpoint, options, &out),
            };
            (tokens, open(&artifact))
        };
        Self {
            runners: sizes.iter().map(runner).collect(),
            embedding: CheckpointEmbedding::new(Arc::clone(checkpoint)),
        }
    }

    fn state(&self) -> KvState {
        KvState::new(self.runners.values().next().unwrap().spec()).unwrap()
    }

    fn step(&mut self, state: &mut KvState, ids: &[u32]) -> Vec<f32> {
        let runner = self.runners.get_mut(&ids.len()).unwrap();
        let spec = runner.spec().clone();
        let outputs: StepOutputs = advance(runner.as_mut(), &self.embedding, state, ids);
        outputs.get(&spec, Role::Logits).unwrap().view().to_f32().unwrap().into_owned()
    }
}

/// Largest difference of log-probabilities over the reference's twenty best, over all tokens.
fn worst_top20(reference: &[f64], test: &[f32], vocabulary: usize) -> f64 {
    assert_eq!(reference.len(), test.len());
    let narrowed: Vec<f32> = reference.iter().map(|v| *v as f32).collect();
    narrowed
        .chunks(vocabulary)
        .zip(test.chunks(vocabulary))
        .map(|(reference, test)| compare_logits(reference, test).top20_logprob)
        .fold(0.0, f64::max)
}

#[test]
fn sequences_match_the_float64_forward_in_any_chunks() {
    let golden = Golden::open(&golden_path("spark/sequence.safetensors"));
    let ids = golden.ids("input_ids");
    let greedy = golden.ids("greedy_from_first_10");
    let evaluator = |artifact: &Artifact| artifact.evaluator(false).unwrap();
    let runtime = |artifact: &Artifact| Box::new(ort(artifact)) as Box<dyn Runner>;
    // The evaluator has no rounding of its own inside an f32 graph.
    type Open<'a> = &'a dyn Fn(&Artifact) -> Box<dyn Runner>;
    let kinds: [(Open<'_>, f64); 2] = [(&evaluator, 4e-6), (&runtime, 2.2e-5)];
    for (name, logits) in [
        ("mini", "logits_f64"),
        ("mini-untied", "logits_untied_f64"),
        ("mini-bf16-sharded", "logits_bf16_weights_f64"),
    ] {
        let path = golden_path("spark").join(name);
        let checkpoint = Arc::new(Checkpoint::open(&path).unwrap());
        let folder = tempfile::tempdir().unwrap();
        let reference = golden.f64(logits);
        for layout in [CacheLayoutChoice::Ring, CacheLayoutChoice::Roll, CacheLayoutChoice::Auto] {
            for (open, bar) in kinds {
                let sizes = [1, 3, 5, 12];
                let mut chunks = Chunks::new(&checkpoint, layout, &sizes, folder.path(), open);
                for pattern in [&[1][..], &[5, 12, 3]] {
                    let mut state = chunks.state();
                    let mut all = Vec::new();
                    let mut sizes = pattern.iter().cycle();
                    while state.position() < ids.len() {
                        let left = ids.len() - state.position();
                        let size = sizes.next().copied().filter(|size| *size <= left).unwrap_or(1);
                        let start = state.position();
                        all.extend(chunks.step(&mut state, &ids[start..start + size]));
                    }
                    let worst = worst_top20(&reference, &all, checkpoint.config().vocab_size);
                    assert!(worst <= bar, "{name} {layout:?} {pattern:?}: {worst:.2e}");
                }
                if name == "mini" {
                    let mut state = chunks.state();
                    chunks.step(&mut state, &ids[..5]);
                    let mut last = chunks.step(&mut state, &ids[5..10]);
                    let mut chosen = Vec::new();
                    while chosen.len() < greedy.len() {
                        let row = last.len() - checkpoint.config().vocab_size;
                        let next = greedy_choice(&last[row..]).unwrap();
                        chosen.push(next);
                        last = chunks.step(&mut state, &[next]);
                    }
                    assert_eq!(chosen, greedy, "{layout:?}");
                }
            }
        }
    }
}
