//! Measurements: that they measure, and what they say of memory. No test asserts a time.

use crate::support::{argument, firesteel, golden_path, spark_tiny, stdout};
use firesteel_checkpoint::{Checkpoint, RandomWeights, WeightFormat};
use firesteel_kernels::measure::{Operation, kernels};
use firesteel_quantize::gguf::{GgufOptions, quantize_gguf};
use serde_json::Value;
use std::path::Path;
use std::process::Command;

/// A report of `bench decode`, packed weights being kept in `cache`.
fn decode(file: &Path, cache: &Path, arguments: &[&str]) -> Value {
    let output = Command::new(env!("CARGO_BIN_EXE_firesteel"))
        .args(["bench", "decode", argument(file), "--json", "--threads", "2"])
        .args(arguments)
        .env("FIRESTEEL_CACHE", cache)
        // Each thread that packs has a buffer.
        .env("RAYON_NUM_THREADS", "2")
        .output()
        .unwrap();
    let talk = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && talk.is_empty(), "{talk}");
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn decoding_is_measured() {
    let file = golden_path("llamacpp/spark-tiny-q4_0.gguf");
    let cache = tempfile::tempdir().unwrap();
    let small = ["--prompt", "70", "--tokens", "3", "--position", "90", "--runs", "2"];
    let report = decode(&file, cache.path(), &small);
    let number = |name: &str| report[name].as_f64().unwrap_or_else(|| panic!("{name}: {report}"));
    for (name, expected) in [
        ("threads", 2.0),
        ("context", 160.0),
        ("position", 90.0),
        ("prompt_tokens", 70.0),
        ("prompt_chunk", 64.0),
        ("decode_tokens", 3.0),
        ("runs", 2.0),
    ] {
        assert_eq!(number(name), expected, "{name}");
    }
    assert_eq!((&report["kv"], &report["packed_weights"]), (&"f16".into(), &"memory".into()));
    for name in [
        "open_seconds",
        "prepare_seconds",
        "load_seconds",
        "prompt_tokens_per_second",
        "decode_tokens_per_second",
        "read_bandwidth_bytes_per_second",
        "of_bandwidth",
    ] {
        assert!(number(name) > 0.0, "{name}: {report}");
    }
    for name in ["prompt_runs", "decode_runs"] {
        let runs = report[name].as_array().unwrap();
        assert_eq!(runs.len(), 2, "{name}");
        assert!(runs.iter().all(|run| run.as_f64().unwrap() > 0.0), "{name}: {report}");
    }
    assert_eq!(report["first_token"]["prompt_tokens"], 16);
    assert!(report["first_token"]["compute_seconds"].as_f64().unwrap() > 0.0);

    // What a token reads: the matrices as they are stored, the gates and norms in f32, and at
    // position 91 the 64 entries of three windows and 92 of the full layer, 512 bytes each.
    let checkpoint = Checkpoint::open(&file).unwrap();
    let matrices = checkpoint.layers().iter().flat_map(|layer| layer.all());
    let bytes = matrices.chain([checkpoint.embedding(), checkpoint.final_norm()]).map(|weight| {
        if weight.name().contains("g_proj") {
            4 * weight.element_count()
        } else {
            weight.stored_bytes()
        }
    });
    let weights = bytes.sum::<usize>() as f64;
    assert_eq!(number("weight_bytes"), weights);
    assert_eq!(number("bytes_per_token"), weights + 512.0 * (3.0 * 64.0 + 92.0));
    let inspect = ["inspect", argument(&file), "--context", "160", "--json"];
    let said: Value = serde_json::from_str(&stdout(&inspect)).unwrap();
    assert_eq!(report["kv_bytes"], said["kv"][0]["cpu"]["f16"]["caches"]);
    assert_eq!(number("kv_bytes"), 512.0 * (3.0 * 128.0 + 160.0));

    let text =
        stdout(&[&["bench", "decode", argument(&file), "--runs", "1"], &small[..4]].concat());
    for part in ["decode ", "prompt ", "first token of 16", "keys and values of 70 tokens in f16"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

/// Packing goes through small buffers into a file: what a process has of anonymous memory while it
/// loads is not more than what it needs to run.
#[cfg(target_os = "linux")]
#[test]
fn weights_are_packed_without_memory_for_them() {
    let mut config = Checkpoint::open(&spark_tiny()).unwrap().config().clone();
    (config.hidden_size, config.intermediate_size) = (1024, 2048);
    let weights = RandomWeights { seed: 1, ..RandomWeights::default() };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.gguf");
    let options = GgufOptions::new(WeightFormat::Q8_0);
    quantize_gguf(&Checkpoint::random(config, weights), options, &file, &|_, _| {}).unwrap();
    for expected in ["written", "found"] {
        let report = decode(&file, folder.path(), &["--tokens", "8", "--runs", "1"]);
        assert_eq!(report["packed_weights"], expected);
        let bytes = |name: &str| report[name].as_f64().unwrap();
        let steady = bytes("rss_anon_bytes");
        for peak in ["peak_load_rss_anon_bytes", "peak_rss_anon_bytes"] {
            assert!(bytes(peak) <= 1.1 * steady, "{expected}: {peak} {report}");
        }
        assert!(bytes("weight_bytes") > 28e6, "{report}");
        assert!(steady < 0.5 * bytes("weight_bytes"), "{expected}: {report}");
    }
}

#[test]
fn every_kernel_is_measured() {
    let small = ["bench", "kernels", "--shape", "2,256,16", "--entries", "9", "--repeats", "1"];
    let arguments = [&small[..], &["--heads", "4,2,32", "--threads", "2", "--json"]].concat();
    let output = firesteel(&arguments);
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (&report["shape"], &report["threads"]),
        (&[2, 256, 16].as_slice().into(), &2.into())
    );
    assert!(report["read_bandwidth_bytes_per_second"].as_f64().unwrap() > 0.0);
    let products = kernels().into_iter().map(|entry| (entry.format.to_string(), entry.isa));
    let operations = Operation::ALL.into_iter().flat_map(|operation| {
        operation.isas().into_iter().map(move |isa| (operation.to_string(), isa))
    });
    let expected: Vec<[String; 2]> =
        products.chain(operations).map(|(name, isa)| [name, isa.name().to_owned()]).collect();
    let rows = report["kernels"].as_array().unwrap();
    let text = |row: &Value, name: &str| row[name].as_str().unwrap().to_owned();
    let found: Vec<[String; 2]> =
        rows.iter().map(|row| [text(row, "format"), text(row, "isa")]).collect();
    assert_eq!(found, expected);
    for name in ["Q4", "attention F16", "rms norm", "rope", "add", "weigh", "scale", "quantize kv"]
    {
        assert!(found.contains(&[name.into(), "scalar".into()]), "{name}");
    }
    for row in rows {
        let number = |name: &str| row[name].as_f64().unwrap();
        assert!(number("seconds") > 0.0 && number("of_bandwidth") > 0.0, "{row}");
        assert!(row["isa"] != "scalar" || number("against_scalar") == 1.0, "{row}");
        assert!(number("difference") < 1e-5, "{row}");
    }

    // Heads that are no whole blocks of 8 bits: the rest is measured.
    let output = firesteel(&[&small[..], &["--heads", "8,2,100"]].concat());
    let talk = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{talk}");
    let left_out = "attention Q8 needs a multiple of 32 elements of a head and is left out";
    assert!(talk.contains(left_out), "{talk}");
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("attention F16") && !text.contains("attention Q8"), "{text}");
}

#[test]
fn the_plan_shows_what_a_ring_and_fused_norms_save() {
    let report: Value = serde_json::from_str(&stdout(&["bench", "qnn", "--json"])).unwrap();
    assert_eq!(report["cases"].as_array().unwrap().len(), 8);
    let gain = |what: &str, figure: &str| {
        let gains = report["gains"].as_array().unwrap();
        let gain = gains.iter().find(|gain| gain["what"] == what).unwrap();
        gain[figure].as_f64().unwrap()
    };
    // A ring writes no cache; one operator a norm in the place of six; bytes of keys and values.
    assert!(gain("ring / roll", "dram") < 0.9 && gain("ring / roll", "htp_ops") < 0.95, "{report}");
    assert!(gain("norms fused / decomposed", "qnn_ops") < 0.8, "{report}");
    assert!(gain("norms fused / decomposed", "htp_ops") < 0.97, "{report}");
    assert!(gain("s16 / f16 keys and values", "dram") < 0.9, "{report}");
    assert!(gain("s8 / s16 keys and values", "dram") < 0.9, "{report}");
}
