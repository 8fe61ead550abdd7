//! GGUF files: ours through the program, llama.cpp's through the kernels.

use crate::support::{Golden, advance, golden_path, snr, spark_tiny, stdout};
use firesteel_check::compare_logits;
use firesteel_checkpoint::Checkpoint;
use firesteel_engine::{CheckpointEmbedding, CpuModel, Engine, EngineOptions};
use firesteel_step::{KvState, Logits, Role, Runner, StepOptions, StepSpec};
use firesteel_tensor::DType;
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;

fn logits(
    checkpoint: &Arc<Checkpoint>,
    make: &dyn Fn(StepSpec) -> Box<dyn Runner>,
    ids: &[u32],
) -> Vec<f32> {
    let spec = StepSpec::new(
        checkpoint.config(),
        &StepOptions {
            tokens: 1,
            context: ids.len(),
            layers: 0..checkpoint.config().num_layers(),
            cache_layout: Default::default(),
            logits: Logits::Last,
            dtype: DType::F32,
        },
    )
    .unwrap();
    let mut runner = make(spec.clone());
    let embedding = CheckpointEmbedding::new(Arc::clone(checkpoint));
    let mut state = KvState::new(&spec).unwrap();
    let mut all = Vec::new();
    for id in ids {
        let outputs = advance(runner.as_mut(), &embedding, &mut state, &[*id]);
        all.extend_from_slice(&outputs.get(&spec, Role::Logits).unwrap().view().to_f32().unwrap());
    }
    all
}

/// Tokens of the golden text that llama.cpp has run too.
const TOKENS: usize = 150;

#[test]
fn files_of_llama_cpp_give_its_logits_and_stay_near_the_trained_model() {
    let golden = Golden::open(&golden_path("spark-tiny.safetensors"));
    let peer = Golden::open(&golden_path("llamacpp/logits.safetensors"));
    let ids = &golden.ids("ids.0")[..TOKENS];
    // dB against llama.cpp's own logits, and mean KL against the float64 forward. llama.cpp takes
    // a tanh GELU and, for quantized weights, other activation blocks: what is left is of the size
    // of its own distance from the exact result.
    let cases =
        [("f16", 66.0, 1e-10), ("q8_0", 38.0, 1e-3), ("q4_0", 35.0, 3e-2), ("q4_k_m", 32.0, 2e-2)];
    let mut failures = Vec::new();
    for (name, bar, kl_bar) in cases {
        let path = golden_path(&format!("llamacpp/spark-tiny-{name}.gguf"));
        let checkpoint = Arc::new(Checkpoint::open(&path).unwrap());
        let model = CpuModel::new(Arc::clone(&checkpoint), Some(2)).unwrap();
        let cpu = |spec| Box::new(model.runner(spec).unwrap()) as Box<dyn Runner>;
        let test = logits(&checkpoint, &cpu, ids);
        let vocabulary = checkpoint.config().vocab_size;
        let theirs: Vec<f64> =
            peer.f32(&format!("logits.{name}")).into_iter().map(f64::from).collect();
        let db = snr(&theirs[..TOKENS * vocabulary], &test);
        let exact = golden.f32("logits.0");
        let kl = exact
            .chunks(vocabulary)
            .zip(test.chunks(vocabulary))
            .map(|(exact, test)| compare_logits(exact, test).kl)
            .sum::<f64>()
            / TOKENS as f64;
        // The kernels against the same quantized weights widened and computed in f64.
        let engine = Engine::new(Arc::clone(&checkpoint), EngineOptions::default());
        let reference = |spec| Box::new(engine.runner(spec).unwrap()) as Box<dyn Runner>;
        let wide: Vec<f64> =
            logits(&checkpoint, &reference, ids).into_iter().map(f64::from).collect();
        let own = snr(&wide, &test);
        let line = format!("{name}: {db:.1} dB, KL {kl:.2e}, {own:.1} dB to the widened weights");
        println!("{line}");
        if !(db >= bar && kl <= kl_bar && own >= if name == "f16" { 120.0 } else { 38.0 }) {
            failures.push(line);
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Mean KL and bits a weight of a file that `quantize` wrote.
fn quantized(folder: &Path, arguments: &[&str]) -> (f64, f64) {
    let file = folder.join(format!("{}.gguf", arguments.join("-").replace("--", "")));
    let file = file.to_str().unwrap();
    let tiny = spark_tiny();
    let tiny = tiny.to_str().unwrap();
    let mut command = vec!["quantize", tiny, "--out", file, "--json"];
    command.extend_from_slice(arguments);
    let report: Value = serde_json::from_str(&stdout(&command)).unwrap();
    let check = ["check", file, "--against", tiny, "--runner", "cpu", "--min-snr", "10", "--json"];
    let check: Value = serde_json::from_str(&stdout(&check)).unwrap();
    (check["logits"]["kl_mean"].as_f64().unwrap(), report["bits_per_weight"].as_f64().unwrap())
}

#[test]
fn quantized_files_stay_near_the_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let cases: [(&[&str], f64, f64); 4] = [
        (&["--format", "f16"], 1e-6, 16.1),
        (&["--format", "q8_0"], 1e-3, 8.7),
        (&["--format", "q4_0", "--head", "q6_k"], 2.5e-2, 5.2),
        (&["--format", "q4_k", "--head", "q6_k"], 2e-2, 5.2),
    ];
    for (arguments, kl_bar, bits_bar) in cases {
        let (kl, bits) = quantized(folder.path(), arguments);
        println!("{arguments:?}: KL {kl:.2e}, {bits:.2} bits");
        assert!(kl <= kl_bar && bits <= bits_bar, "{arguments:?}: KL {kl:.2e}, {bits:.2} bits");
    }
}

#[test]
fn a_gguf_file_alone_answers_with_the_golden_tool_call() {
    let chats = Path::new(crate::support::ROOT)
        .join("crates/firesteel-generate/tests/data/chat_golden.json");
    let chats: Value = serde_json::from_slice(&std::fs::read(chats).unwrap()).unwrap();
    let chat = &chats.as_array().unwrap()[0];
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("messages.json");
    std::fs::write(&file, chat["conversation"].to_string()).unwrap();
    let model = golden_path("llamacpp/spark-tiny-f16.gguf");
    let output = stdout(&[
        "generate",
        model.to_str().unwrap(),
        "--messages",
        file.to_str().unwrap(),
        "--temperature",
        "0",
        "--json",
    ]);
    let output: Value = serde_json::from_str(&output).unwrap();
    let calls = firesteel_generate::parse_tool_calls(output["text"].as_str().unwrap()).unwrap();
    assert_eq!(calls.len(), 1, "{output}");
    assert_eq!(output["ids"], chat["greedy_ids"]);
}
