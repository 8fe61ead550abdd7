//! GGUF files: ours through the program, llama.cpp's through the kernels.

use crate::support::{
    Golden, advance, argument, copy_folder, firesteel, golden_path, refusal, snr, spark_tiny,
    stdout,
};
use firesteel_check::compare_logits;
use firesteel_checkpoint::Checkpoint;
use firesteel_engine::{CheckpointEmbedding, CpuModel, Engine, EngineOptions};
use firesteel_step::{KvState, Role, Runner, StepOptions, StepSpec};
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;

fn logits(
    checkpoint: &Arc<Checkpoint>,
    make: &dyn Fn(StepSpec) -> Box<dyn Runner>,
    ids: &[u32],
) -> Vec<f32> {
    let options = StepOptions::decode(checkpoint.config(), ids.len());
    let spec = StepSpec::new(checkpoint.config(), &options).unwrap();
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

/// Held-out text and prompts from it, and a text that the model made for calibration.
const HELD_OUT: &str = "tests/golden/spark-tiny/heldout.txt";
const PROMPTS: &str = "tests/golden/spark-tiny/prompts.txt";
const CALIBRATION: &str = "tests/golden/spark-tiny/calibration.txt";

/// Writes a file with `quantize` and returns its report.
fn quantized(file: &str, arguments: &[&str]) -> Value {
    let tiny = spark_tiny();
    let command = ["quantize", "gguf", argument(&tiny), "--out", file, "--force", "--json"];
    serde_json::from_str(&stdout(&[&command[..], arguments].concat())).unwrap()
}

/// The report of `check` of a file on the kernels against the checkpoint in f32, on the beginning
/// of the held-out text; `benches/llamacpp/fidelity` has more of it.
fn fidelity(file: &str, arguments: &[&str]) -> Value {
    let tiny = spark_tiny();
    let command =
        ["check", "fidelity", file, "--against", argument(&tiny), "--runner", "cpu", "--json"];
    let text = ["--against-runner", "cpu", "--text", HELD_OUT, "--tokens", "2048"];
    serde_json::from_str(&stdout(&[&command[..], &text, arguments].concat())).unwrap()
}

fn number(report: &Value, path: &str) -> f64 {
    report.pointer(path).and_then(Value::as_f64).unwrap_or_else(|| panic!("{path} of {report}"))
}

#[test]
fn files_of_numbers_say_what_the_checkpoint_says() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.gguf");
    let mut failures = Vec::new();
    // The same numbers, and what half precision makes of them and of keys and values.
    for (format, kv, kl_bar) in [("f32", "f32", 1e-9), ("bf16", "f32", 1e-9), ("f16", "f16", 1e-6)]
    {
        quantized(argument(&file), &["--format", format]);
        let report = fidelity(argument(&file), &["--prompts", PROMPTS, "--kv", kv]);
        let prompts = &report["prompts"];
        let (all, exact) = (number(prompts, "/prompts"), number(prompts, "/exact"));
        if !(number(&report, "/text/kl_mean") <= kl_bar && exact == all && all >= 16.0) {
            failures.push(format!("{format}: {report}"));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn eight_bits_stay_within_a_thousandth() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.gguf");
    quantized(argument(&file), &["--format", "q8_0"]);
    let limits = ["--max-kl", "1e-3", "--max-perplexity-change", "0.005"];
    let report = fidelity(argument(&file), &limits);
    assert_eq!(report["passed"], true, "{report}");
    assert!(number(&report, "/text/kl_mean") > 1e-6, "{report}");

    // The same limits a hundredth as large are exceeded, and say so.
    let tiny = spark_tiny();
    let command =
        ["check", "fidelity", argument(&file), "--against", argument(&tiny), "--runner", "cpu"];
    let limits = ["--max-kl", "1e-5", "--max-perplexity-change", "1e-7", "--min-snr", "90"];
    let text = ["--text", HELD_OUT, "--tokens", "512"];
    let output = firesteel(&[&command[..], &text, &limits].concat());
    assert_eq!(output.status.code(), Some(1));
    let report = String::from_utf8(output.stdout).unwrap();
    assert_eq!(report.matches("FAILED: ").count(), 3, "{report}");
    for part in ["the mean KL divergence is", "the change of the perplexity is", "below 90 dB"] {
        assert!(report.contains(part), "{part}: {report}");
    }
}

/// What a file holds counts, and not its name.
#[test]
fn a_file_of_another_name_is_read_by_every_verb() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.bin");
    let named = golden_path("llamacpp/spark-tiny-q4_k_m.gguf");
    std::fs::copy(&named, &file).unwrap();
    let (named, other) = (argument(&named), argument(&file));
    let shown = |path| stdout(&["inspect", path]).replace(path, "PATH");
    assert_eq!(shown(named), shown(other));
    let said = |path| {
        let options = ["--prompt", "The Jargon File", "--max-tokens", "4", "--temperature", "0"];
        stdout(&[&["generate", path], &options[..]].concat())
    };
    assert_eq!(said(named), said(other));
    let memory = |path| stdout(&["profile", "memory", "--model", path]).replace(path, "PATH");
    assert_eq!(memory(named), memory(other));
    let step = ["--steps", "2", "--greedy", "0"];
    stdout(&[&["check", "step", other, "--against", named], &step[..]].concat());
}

#[test]
fn four_bits_lose_less_than_those_of_llama_cpp() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.gguf");
    let theirs = golden_path("llamacpp/spark-tiny-q4_k_m.gguf");
    let peer = fidelity(argument(&theirs), &[]);
    let peer_kl = number(&peer, "/text/kl_mean");
    let inspected: Value =
        serde_json::from_str(&stdout(&["inspect", argument(&theirs), "--json"])).unwrap();
    let peer_bits =
        8.0 * number(&inspected, "/weight_bytes/stored") / number(&inspected, "/parameters");
    // As a share of llama.cpp's Q4_K_M: the mean KL and the bits.
    let cases: [(&[&str], f64, f64); 3] = [
        (&["--format", "q4_k_m", "--calibrate", CALIBRATION], 0.72, 1.0),
        (&["--format", "q4_k_m"], 0.8, 1.0),
        (&["--format", "q4_k", "--head", "q6_k", "--calibrate", CALIBRATION], 1.05, 0.94),
    ];
    let mut failures = Vec::new();
    for (arguments, kl_bar, bits_bar) in cases {
        let written = quantized(argument(&file), arguments);
        let kl = number(&fidelity(argument(&file), &[]), "/text/kl_mean") / peer_kl;
        let bits = number(&written, "/bits_per_weight") / peer_bits;
        let line = format!("{arguments:?}: KL × {kl:.3}, bits × {bits:.3} of {peer_bits:.3}");
        println!("{line}");
        if !(kl <= kl_bar && bits <= bits_bar) {
            failures.push(line);
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn formats_by_name_and_budget_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.gguf");
    let down = ["--tensor", "*.mlp.down_proj.*=q6_k", "--tensor", "*.2.mlp.down_proj.*=q8_0"];
    let report = quantized(argument(&file), &[&["--format", "q4_0"], &down[..]].concat());
    for tensor in report["tensors"].as_array().unwrap() {
        let name = tensor["name"].as_str().unwrap();
        let expected = match name {
            "model.layers.2.mlp.down_proj.weight" => "q8_0",
            name if name.contains("down_proj") => "q6_k",
            name if name.contains("norm") || name.contains("g_proj") => "f32",
            _ => "q4_0",
        };
        assert_eq!(tensor["format"], expected, "{name}");
        assert!(tensor["weighted_rms"].is_null());
    }
    let calibrated = ["--calibrate", CALIBRATION, "--calibrate-tokens", "600", "--bits", "4.94"];
    let report = quantized(argument(&file), &[&["--format", "q4_k"], &calibrated[..]].concat());
    assert_eq!(report["calibration_tokens"], 600);
    // The head takes nearly all of it, which smaller matrices with more gain for a byte must not
    // keep it from.
    let raised = &report["raised"];
    assert!(raised[0].as_str().unwrap().starts_with("model.embedding.weight: q4_k to q6_k"));
    let bits = number(&report, "/bits_per_weight");
    assert!((4.9..=4.94).contains(&bits), "{bits}");
    let weighted = report["tensors"].as_array().unwrap().iter();
    assert_eq!(weighted.filter(|tensor| !tensor["weighted_rms"].is_null()).count(), 21);

    let refused = |arguments: &[&str]| {
        let tiny = spark_tiny();
        let command = ["quantize", "gguf", argument(&tiny), "--out", "no.gguf", "--format", "q4_0"];
        refusal(&[&command[..], arguments].concat())
    };
    let cases: [(&[&str], &str); 5] = [
        (&["--tensor", "*.nothing=q8_0"], "--tensor *.nothing: no matrix has such a name; some"),
        (&["--calibrate-tokens", "9"], "--calibrate <FILE>..."),
        (&["--bits", "3"], "3 bits for each weight are too few"),
        (&["--calibrate", "Cargo.toml", "--calibrate-tokens", "0"], "the texts have no tokens"),
        (&["--calibrate", "nowhere.txt"], "nowhere.txt"),
    ];
    for (arguments, part) in cases {
        let talk = refused(arguments);
        assert!(talk.contains(part), "{arguments:?}: {talk}");
    }
}

#[test]
fn what_would_do_nothing_with_a_format_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("model.gguf");
    let calibrate: &[&str] = &["--calibrate", CALIBRATION, "--calibrate-tokens", "64"];
    let (bits, head): (&[&str], &[&str]) = (&["--bits", "40"], &["--head", "q4_0"]);
    let by_name: &[&str] = &["--tensor", "*.down_proj.*=q4_0"];
    let numbers = "--calibrate does nothing with --format";
    let largest = "--bits 40 does nothing with --format";
    let cases = [
        ("f16", vec![calibrate], Some(numbers)),
        ("f32", vec![calibrate], Some(numbers)),
        ("bf16", vec![calibrate, &["--head", "f16"]], Some(numbers)),
        ("f16", vec![calibrate, head], None),
        ("f16", vec![calibrate, by_name], None),
        ("f16", vec![bits], Some(largest)),
        ("q8_0", vec![bits], Some(largest)),
        ("f16", vec![bits, by_name], Some(largest)),
        ("f16", vec![bits, head], None),
        ("q8_0", vec![bits, head], None),
    ];
    let mut wrong = Vec::new();
    for (format, arguments, expected) in cases {
        let command = ["quantize", "gguf", "models/spark-tiny", "--force", "--out", argument(&out)];
        let arguments = arguments.concat();
        let output = firesteel(&[&command[..], &["--format", format], &arguments].concat());
        let talk = String::from_utf8(output.stderr).unwrap();
        let right = match expected {
            None => output.status.success(),
            Some(part) => output.status.code() == Some(1) && talk.contains(part),
        };
        if !right {
            wrong.push(format!("{format} {arguments:?}: {:?} {talk}", output.status));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_tensor_is_printed_with_its_error() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.gguf");
    let report = quantized(argument(&file), &["--format", "q4_k_m"]);
    let command = ["quantize", "gguf", "models/spark-tiny", "--force", "--out", argument(&file)];
    let text = stdout(&[&command[..], &["--format", "q4_k_m"]].concat());
    let mut lines = text.lines().skip_while(|line| !line.starts_with("largest error first"));
    assert!(lines.next().unwrap().ends_with("relative rms"), "{text}");
    let rows: Vec<Vec<&str>> = lines.map(|line| line.split_whitespace().collect()).collect();
    let errors: Vec<f64> = rows.iter().map(|row| row[2].parse().unwrap()).collect();
    assert!(errors.is_sorted_by(|a, b| a >= b) && errors[0] > 0.0, "{errors:?}");
    let mut printed: Vec<[&str; 2]> = rows.iter().map(|row| [row[0], row[1]]).collect();
    let text = |tensor: &'_ Value, key: &str| tensor[key].as_str().unwrap().to_owned();
    let tensors = report["tensors"].as_array().unwrap().iter();
    let mut all: Vec<[String; 2]> =
        tensors.map(|tensor| [text(tensor, "name"), text(tensor, "format")]).collect();
    printed.sort();
    all.sort();
    assert_eq!(printed, all);
    // Four layers of eight, the embedding, which is the head too, and the last norm.
    assert_eq!(all.len(), 34);
    // The value of llama.h: MOSTLY_Q4_K_M.
    let written = Checkpoint::open(&file).unwrap();
    let kind = written.gguf().unwrap().get("general.file_type").unwrap().as_u64();
    assert_eq!(kind, Some(15));
}

#[test]
fn what_the_file_has_no_place_for_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    copy_folder(&spark_tiny(), &model);
    let config = r#"{"eos_token_id": [1, 7, 9, 42], "bad_words_ids": [[3]], "min_new_tokens": 2}"#;
    std::fs::write(model.join("generation_config.json"), config).unwrap();
    let out = folder.path().join("model.gguf");
    let command =
        ["quantize", "gguf", argument(&model), "--format", "f16", "--out", argument(&out)];
    let output = firesteel(&[&command[..], &["--json"]].concat());
    let talk = String::from_utf8(output.stderr).unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let warnings: Vec<&str> =
        report["warnings"].as_array().unwrap().iter().map(|w| w.as_str().unwrap()).collect();
    for (warning, part) in warnings.iter().zip([
        "eos_token_id 42 is not in the file",
        "bad_words_ids = [[3]] has no place",
        "min_new_tokens = 2 has no place",
    ]) {
        assert!(warning.contains(part), "{warnings:?}");
        assert!(talk.contains(&format!("warning: {warning}\n")), "{talk}");
    }
    assert_eq!(warnings.len(), 3);

    // Another pre-tokenizer would be another model in the file.
    let path = model.join("tokenizer.json");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace("{1,3}", "{1,2}")).unwrap();
    let talk = refusal(&[&command[..], &["--force"]].concat());
    assert!(talk.contains("tokenizer.json: pre_tokenizer is {"), "{talk}");
    assert!(talk.contains("move tokenizer.json away to write one without a tokenizer"), "{talk}");
}

#[test]
fn conversations_are_continued_without_their_last_answer() {
    let folder = tempfile::tempdir().unwrap();
    let chats = folder.path().join("chats.jsonl");
    let held_out = std::fs::read_to_string(golden_path("spark-tiny/heldout_chats.jsonl")).unwrap();
    let some: Vec<&str> = held_out.lines().take(8).collect();
    std::fs::write(&chats, some.join("\n")).unwrap();
    let tiny = spark_tiny();
    let check = |file: &Path, test: &Path| -> Value {
        let command = ["check", "fidelity", argument(test), "--against", argument(&tiny), "--json"];
        let runners = ["--runner", "cpu", "--against-runner", "cpu", "--prompts", argument(file)];
        serde_json::from_str(&stdout(&[&command[..], &runners].concat())).unwrap()
    };
    let same = check(&chats, &tiny);
    assert_eq!(same["prompts"]["exact"], 8, "{same}");
    assert_eq!(same["prompts"]["kept_prefix"], 1.0);
    assert!(same["text"].is_null() && number(&same, "/prompts/tokens") > 64.0);
    let coarse = check(&chats, &golden_path("llamacpp/spark-tiny-q4_0.gguf"));
    let kept = number(&coarse, "/prompts/kept_prefix");
    assert!(kept > 0.3 && kept <= 1.0, "{coarse}");

    std::fs::write(&chats, "{\"messages\": 1}\n").unwrap();
    let command = ["check", "fidelity", argument(&tiny), "--against", argument(&tiny), "--prompts"];
    let talk = refusal(&[&command[..], &[argument(&chats)]].concat());
    assert!(talk.contains("line 1 of ") && talk.contains("is no conversation"), "{talk}");
    std::fs::write(&chats, "\n").unwrap();
    let talk = refusal(&[&command[..], &[argument(&chats)]].concat());
    assert!(talk.contains("has no prompts"), "{talk}");
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
    let read = crate::generate::answer(&output, &chat["conversation"]["tools"]);
    assert_eq!(read.calls.len(), 1, "{output}");
    assert_eq!(output["ids"], chat["greedy_ids"]);
}
