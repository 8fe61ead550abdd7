//! `firesteel profile`.

use crate::support::{argument, refusal, stdout};
use insta::assert_snapshot;
use serde_json::{Value, json};

const SHAPE: &str = "spark-x2.5-1.7b";

fn parse(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

#[test]
fn compose_prints_the_published_steps() {
    let base = ["profile", "compose", "--model", SHAPE];
    let text = stdout(&[&base[..], &["--precision", "w8a16", "--context", "1024,2048"]].concat());
    assert_snapshot!(text, @"");
    let options = ["--precision", "w4a16", "--layout", "roll", "--context", "1024,3000,4096,9000"];
    assert_snapshot!(stdout(&[&base[..], &options].concat()), @"");
}

#[test]
fn compose_as_json_has_null_for_what_is_missing() {
    let options = ["--precision", "fp16", "--layout", "roll", "--context", "2048", "--json"];
    let text = stdout(&[&["profile", "compose", "--model", SHAPE][..], &options].concat());
    assert_snapshot!(text, @"");
}

/// A table of one's own, for any model of the shape.
#[test]
fn compose_reads_a_table() {
    let folder = tempfile::tempdir().unwrap();
    let row = |kind: &str, layout: Value, context: Value, ms: f64| {
        json!({
            "runtime": "ort-cpu", "precision": "fp32", "dialect": "portable", "kind": kind,
            "layout": layout, "context": context, "tokens": 1, "ms": ms, "statistic": "median",
            "low": ms / 2.0, "high": 2.0 * ms, "n": 9, "timing_only": false, "source": "mine",
        })
    };
    let table = json!({
        "format": "firesteel-layer-times", "version": 1, "device": "desk", "soc": "chip",
        "model": {
            "hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 8192, "sliding_window": 64,
            "rotary_dims_sliding": 64, "rotary_dims_full": 16,
        },
        "sources": [{"id": "mine", "origin": "measured", "text": "on the desk"}],
        "measurements": [
            row("sliding_attention", json!("ring"), Value::Null, 0.5),
            row("full_attention", json!("roll"), json!(128), 0.25),
            row("full_attention", json!("roll"), json!(256), 1.0),
            row("head", Value::Null, Value::Null, 2.0),
        ],
    });
    let model = parse(&stdout(&["inspect", "models/spark-tiny", "--json"]));
    let mut table = table;
    for (key, value) in table["model"].as_object_mut().unwrap() {
        if let Some(found) = model.get(key) {
            *value = found.clone();
        }
    }
    let kind = |index: usize| &model["layer_kinds"][index];
    table["model"]["sliding_window"] = kind(0)["window"].clone();
    table["model"]["rotary_dims_sliding"] = kind(0)["rotary_dims"].clone();
    table["model"]["rotary_dims_full"] = kind(1)["rotary_dims"].clone();
    let path = folder.path().join("table.json");
    std::fs::write(&path, table.to_string()).unwrap();
    let base = ["profile", "compose", "--model", "models/spark-tiny", "--table", argument(&path)];
    let options = ["--precision", "fp32", "--runtime", "ort-cpu", "--context", "128,192,256"];
    assert_snapshot!(stdout(&[&base[..], &options].concat()), @"");
    let talk = refusal(&[&base[..], &["--precision", "fp32"]].concat());
    assert!(talk.contains("runtime is qnn-npu; accepted: ort-cpu"), "{talk}");
}

#[test]
fn memory_of_a_shape() {
    let options = ["--context", "4096,32768,1048576", "--ram", "8GiB"];
    let text = stdout(&[&["profile", "memory", "--model", SHAPE][..], &options].concat());
    assert_snapshot!(text, @"");
}

/// One truth: caches and weights are what `inspect` says.
#[test]
fn memory_agrees_with_inspect() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("config.json");
    std::fs::write(&config, firesteel_checkpoint::preset("spark-x2.5-4b").unwrap().to_json())
        .unwrap();
    for model in ["models/spark-tiny", argument(&config)] {
        let inspected = parse(&stdout(&["inspect", model, "--json"]));
        for layout in ["ring", "roll"] {
            let options = ["--layout", layout, "--json"];
            let text = stdout(&[&["profile", "memory", "--model", model][..], &options].concat());
            let memory = parse(&text);
            for (at, kv) in memory["contexts"]
                .as_array()
                .unwrap()
                .iter()
                .zip(inspected["kv"].as_array().unwrap())
            {
                assert_eq!(at["context"], kv["context"], "{model}");
                assert_eq!(at["kv_bytes"], kv[layout]["bytes"], "{model} {layout}");
                assert_eq!(at["kv_all_full_bytes"], kv["all_full"]["bytes"], "{model}");
                let plans = at["plans"].as_array().unwrap();
                assert_eq!(plans.len(), if inspected["head"].is_null() { 3 } else { 4 }, "{model}");
                for plan in plans {
                    let format = plan["weights"].as_str().unwrap();
                    let bytes = &inspected["weight_bytes"][format];
                    assert!(bytes.is_u64(), "{model} {format}");
                    assert_eq!(&plan["weight_bytes"], bytes, "{model} {format}");
                    assert_eq!(plan["weights_and_kv_fit"], Value::Null);
                }
            }
            for unknown in ["activation_bytes", "context_binary_bytes", "spill_bytes", "ram_bytes"]
            {
                assert_eq!(memory.get(unknown), Some(&Value::Null), "{unknown}");
            }
        }
    }
}

#[test]
fn refusals() {
    let folder = tempfile::tempdir().unwrap();
    let table = folder.path().join("table.json");
    std::fs::write(&table, "{}").unwrap();
    let table = argument(&table);
    let compose = |model: &'static str| ["profile", "compose", "--model", model, "--precision"];
    let memory = ["profile", "memory", "--model", SHAPE];
    let cases: Vec<(Vec<&str>, &str)> = vec![
        (vec!["profile"], "Usage: firesteel profile <COMMAND>"),
        ([&compose("spark-x2.5-7b")[..], &["fp16"]].concat(), "nor a known shape (spark-x2.5-1.7b"),
        ([&compose(SHAPE)[..], &["fp8"]].concat(), "precision is fp8; accepted: fp16, w16a16"),
        ([&compose("spark-x2.5-4b")[..], &["fp16"]].concat(), "hidden_size 2048, and this model's"),
        ([&compose(SHAPE)[..], &["fp16", "--context", "0"]].concat(), "context is 0"),
        ([&compose(SHAPE)[..], &["fp16", "--table", table]].concat(), "missing field `format`"),
        ([&compose(SHAPE)[..], &["fp16", "--table", "none.json"]].concat(), "none.json"),
        ([&memory[..], &["--kv", "f8"]].concat(), "accepted: f32, f16, i16, i8, q8"),
        ([&memory[..], &["--ram", "8G"]].concat(), "a positive whole number, as 8GiB"),
        ([&memory[..], &["--ram", "99999999999GiB"]].concat(), "a positive whole number"),
        ([&memory[..], &["--context", "99999999"]].concat(), "context is 99999999"),
    ];
    for (arguments, reason) in cases {
        let talk = refusal(&arguments);
        assert!(talk.contains(reason), "{arguments:?}: {talk}");
    }
}
