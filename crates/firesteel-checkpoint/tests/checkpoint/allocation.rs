//! Hostile files must not make the reader allocate much more than their own size. The system
//! holds the limit: a process that exceeds it is aborted.

use crate::common::gguf::{GgufFile, Raw, array_value, string_value, strings_value, u32_value};
use crate::common::{Failures, Model};
use firesteel_checkpoint::Checkpoint;
use rustix::process::{Resource, Rlimit, setrlimit};
use std::path::Path;
use std::process::Command;

const FOLDER: &str = "FIRESTEEL_TEST_FOLDER";
const SIZE: usize = 8 << 20;

fn data_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmData:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

/// The body of the child process; nothing when run as a test of its own.
#[test]
fn child_opens_the_folder_under_a_limit() {
    let Some(folder) = std::env::var_os(FOLDER) else { return };
    let limit = data_bytes() + (SIZE + (1 << 20)) as u64;
    let limit = Rlimit { current: Some(limit), maximum: Some(limit) };
    setrlimit(Resource::Data, limit).unwrap();
    let opened = Checkpoint::open(Path::new(&folder));
    let error = opened.and_then(|checkpoint| checkpoint.gguf_tokenizer()).unwrap_err().to_string();
    println!("error of {} bytes: {error}", error.len());
}

fn file(header: &str) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes
}

fn hostile_gguf_files() -> [(&'static str, Vec<u8>, &'static str); 7] {
    let empty_strings = array_value(8, SIZE as u64 / 8, &vec![0; SIZE]);
    let with = |key: &str, value: &Raw| {
        let mut file = GgufFile::tiny();
        file.set(key, value.clone());
        file
    };
    let mut merges = with("tokenizer.ggml.merges", &empty_strings);
    let tokens: Vec<String> = (0..320).map(|id| id.to_string()).collect();
    let tokens: Vec<&str> = tokens.iter().map(String::as_str).collect();
    merges.set("tokenizer.ggml.tokens", strings_value(&tokens));
    merges.set("tokenizer.ggml.model", string_value("gpt2"));
    let mut keys = GgufFile::empty();
    keys.keys = (0..5000).map(|i| (format!("{i:01000}"), u32_value(0))).collect();
    keys.key_count = Some(4096);
    let mut tensors = GgufFile::empty();
    (0..8192).for_each(|i| tensors.push(&format!("{i:0900}")).bytes.clear());
    let mut crowd = GgufFile::empty();
    (0..8193).for_each(|i| crowd.push(&format!("{i:0900}")).bytes.clear());
    let mut nested = GgufFile::empty();
    nested.set("x", array_value(9, SIZE as u64 / 16, &vec![9; SIZE]));
    let mut long = with("x", &array_value(0, SIZE as u64, &vec![0; SIZE]));
    long.set("spark2_5.vocab_size", string_value(&"v".repeat(1 << 20)));
    [
        ("tokens", with("tokenizer.ggml.tokens", &empty_strings).bytes(), "vocab_size is 320"),
        ("merges", merges.bytes(), "merges is an array of 1048576 strings"),
        ("keys", keys.bytes(), "general.architecture is missing"),
        ("tensors", tensors.bytes(), "end outside the"),
        ("crowd", crowd.bytes(), "said to have 8193 tensors"),
        ("nested", nested.bytes(), "arrays of arrays are not read"),
        ("long value", long.bytes(), "vocab_size is \"vvv"),
    ]
}

#[test]
fn hostile_files_cost_no_more_memory_than_their_size() {
    let entry = r#"{"dtype":"F32","shape":[0],"data_offsets":[0,0]}"#;
    let long = "x".repeat(SIZE);
    let escaped = "\\n".repeat(SIZE / 2);
    let zeros = "0,".repeat(SIZE / 2);
    let many = |member: &dyn Fn(usize) -> String, length: usize| {
        (0..SIZE / length).map(member).collect::<Vec<_>>().join(",")
    };
    let empty_tensors = many(&|i| format!("\"{i}\":{entry}"), entry.len() + 10);
    let strings = many(&|i| format!("\"{i}\":\"\""), 12);
    let shards = many(&|i| format!("\"{i}\":\"a.safetensors\""), 26);
    let safetensors = [
        ("length beyond everything", vec![0xff; 8], "the header is said to have"),
        ("length beyond the file", (99_000_000u64).to_le_bytes().to_vec(), "but only 0 follow"),
        ("long name", file(&format!("{{\"{long}\":{entry}}}")), "a name of 8388608 bytes"),
        ("escaped name", file(&format!("{{\"{escaped}\":{entry}}}")), "a name of 8388608 bytes"),
        ("long dtype", file(&format!("{{\"a\":{{\"dtype\":\"{escaped}\"}}}}")), "accepted: 1024"),
        ("long shape", file(&format!("{{\"a\":{{\"shape\":[{zeros}0]}}}}")), "accepted: 1024"),
        ("text for a tensor", file(&format!("{{\"a\":\"{escaped}\"}}")), "accepted: 1024"),
        ("text for a header", file(&format!("\"{escaped}\"")), "it must be a JSON object"),
        ("many tensors", file(&format!("{{{empty_tensors}}}")), "more than 8193 entries"),
        (
            "many metadata",
            file(&format!("{{\"__metadata__\":{{{strings}}}}}")),
            "__metadata__: more than 8192 entries",
        ),
        (
            "long metadata",
            file(&format!("{{\"__metadata__\":{{\"a\":\"{escaped}\"}}}}")),
            "missing tensors (42)",
        ),
        ("deep", file(&format!("{{\"a\":{}", "[".repeat(SIZE))), "header: EOF"),
    ];
    let index = [
        ("many entries", format!("{{\"weight_map\":{{{shards}}}}}"), "more than 8192 entries"),
        ("long tensor", format!("{{\"weight_map\":{{\"{escaped}\":\"\"}}}}"), "a name of 8388608"),
        ("long shard", format!("{{\"weight_map\":{{\"a\":\"{escaped}\"}}}}"), "a name of 8388608"),
    ];
    let safetensors =
        safetensors.map(|(name, bytes, part)| (name, "model.safetensors", bytes, part));
    let index = index
        .map(|(name, text, part)| (name, "model.safetensors.index.json", text.into_bytes(), part));

    let gguf = hostile_gguf_files().map(|(name, bytes, part)| (name, "model.gguf", bytes, part));

    let mut failures = Failures::default();
    for (name, file, bytes, part) in safetensors.into_iter().chain(index).chain(gguf) {
        let dir = tempfile::tempdir().unwrap();
        Model::tiny().write_config(dir.path());
        std::fs::write(dir.path().join(file), bytes).unwrap();
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "allocation::child_opens_the_folder_under_a_limit", "--nocapture"])
            .args(["--test-threads", "1"])
            .env(
                FOLDER,
                if file.ends_with(".gguf") { dir.path().join(file) } else { dir.path().into() },
            )
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        failures.check(name, output.status.success(), (output.status, &output.stderr.len()));
        failures.check(name, text.contains(part) && text.contains("error of "), &text);
        failures.check(name, text.len() < 1000, text.len());
    }
    failures.finish();
}
