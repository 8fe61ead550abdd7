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
    assert_snapshot!(text, @"
    Samsung Galaxy S25, Snapdragon 8 Elite (SM8750), qnn-npu, w8a16: steps composed of single layers, ms
    context     sliding       full  layers  all full  speedup   head   step  tokens/s     basis
    1024     21 × 0.803  7 × 0.942   23.46     26.38     1.12  3.907  27.36      36.5  measured
    2048     21 × 0.803          -       -         -        -  3.907      -         -         -
    not known: full_attention was measured at 1024 only
    sliding layers pay at context 1024, the shortest that was measured
    times published: ms a layer of Spark-X2.5 1.7B on a Galaxy S25, QNN context binaries on the NPU unless the runtime says otherwise; whether they are medians, their spread and the number of runs were not published, and the dialect was not named
    ");
    let options = ["--precision", "w4a16", "--layout", "roll", "--context", "1024,3000,4096,9000"];
    assert_snapshot!(stdout(&[&base[..], &options].concat()), @"
    Samsung Galaxy S25, Snapdragon 8 Elite (SM8750), qnn-npu, w4a16: steps composed of single layers, ms
    timing only: these builds compute something else than the model
    context     sliding       full  layers  all full  speedup   head   step  tokens/s         basis
    1024     21 × 0.917  7 × 1.127   27.15     31.56     1.16  3.868  31.01      32.2      measured
    3000     21 × 0.917  7 × 1.471   29.55     41.19     1.39  3.868  33.42      29.9  interpolated
    4096     21 × 0.917  7 × 1.662   30.89     46.54     1.51  3.868  34.76      28.8      measured
    9000     21 × 0.917  7 × 2.516   36.87     70.45     1.91  3.868  40.74      24.5  extrapolated
    sliding layers pay at context 1024, the shortest that was measured
    times published: ms a layer of Spark-X2.5 1.7B on a Galaxy S25, QNN context binaries on the NPU unless the runtime says otherwise; whether they are medians, their spread and the number of runs were not published, and the dialect was not named
    ");
}

#[test]
fn compose_as_json_has_null_for_what_is_missing() {
    let options = ["--precision", "fp16", "--layout", "roll", "--context", "2048", "--json"];
    let text = stdout(&[&["profile", "compose", "--model", SHAPE][..], &options].concat());
    assert_snapshot!(text, @r#"
    {
      "device": "Samsung Galaxy S25",
      "soc": "Snapdragon 8 Elite (SM8750)",
      "selection": {
        "runtime": "qnn-npu",
        "precision": "fp16",
        "dialect": null,
        "layout": "roll"
      },
      "timing_only": false,
      "steps": [
        {
          "context": 2048,
          "sliding": {
            "count": 21,
            "ms": 1.689,
            "basis": "measured"
          },
          "full": {
            "count": 7,
            "ms": 2.0273333333333334,
            "basis": "interpolated"
          },
          "head": null,
          "layers_ms": 49.660333333333334,
          "all_full_ms": 56.76533333333334,
          "speedup": 1.1430719353474605,
          "step_ms": null,
          "tokens_per_second": null,
          "basis": "interpolated",
          "missing": [
            "head was not measured"
          ]
        }
      ],
      "break_even": {
        "is": "interpolated",
        "context": 1309
      },
      "sources": [
        {
          "id": "s25",
          "origin": "published",
          "text": "ms a layer of Spark-X2.5 1.7B on a Galaxy S25, QNN context binaries on the NPU unless the runtime says otherwise; whether they are medians, their spread and the number of runs were not published, and the dialect was not named"
        }
      ]
    }
    "#);
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
            "model_type": "spark2_5", "hidden_size": 128, "intermediate_size": 384,
            "num_attention_heads": 4,
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
    assert_snapshot!(stdout(&[&base[..], &options].concat()), @"
    desk, chip, ort-cpu, fp32: steps composed of single layers, ms
    context    sliding       full  layers  all full  speedup   head  step  tokens/s         basis
    128      3 × 0.500  1 × 0.250    1.75      1.00     0.57  2.000  3.75     266.7      measured
    192      3 × 0.500  1 × 0.625    2.12      2.50     1.18  2.000  4.12     242.4  interpolated
    256      3 × 0.500  1 × 1.000    2.50      4.00     1.60  2.000  4.50     222.2      measured
    sliding layers pay from context 171 on (interpolated)
    times measured: on the desk
    ");
    let talk = refusal(&[&base[..], &["--precision", "fp32"]].concat());
    assert!(talk.contains("runtime is qnn-npu; accepted: ort-cpu"), "{talk}");
}

#[test]
fn memory_of_a_shape() {
    let options = ["--context", "4096,32768,1048576", "--ram", "8GiB"];
    let text = stdout(&[&["profile", "memory", "--model", SHAPE][..], &options].concat());
    assert_snapshot!(text, @"
    spark-x2.5-1.7b: counted from shapes, nothing is measured
    context       KV f16  KV all full  activations  with f16 weights  graphs  with int8_per_row weights  graphs  with int4_per_row weights  graphs
    4096        77.0 MiB    224.0 MiB     12.0 MiB        3334.1 MiB       2                 1708.7 MiB       1                  894.7 MiB       1
    32768      469.0 MiB   1792.0 MiB     96.1 MiB        3726.1 MiB       2                 2100.7 MiB       2                 1286.7 MiB       1
    1048576  14357.0 MiB  57344.0 MiB   3074.0 MiB  over 17614.1 MiB       -           over 15988.7 MiB       -           over 15174.7 MiB       -
    context 4096, f16: 0:20 2015.8 MiB, 20:28 and head 1318.3 MiB
    context 32768, f16: 0:18 2034.7 MiB, 18:28 and head 1691.4 MiB
    context 32768, int8_per_row: 0:28 1844.2 MiB, head 256.5 MiB
    context 1048576, f16: no graphs, layer 3 alone has 102801408 bytes of weights and 2147483648 of cache, above the 2147483648 of a graph
    context 1048576, int8_per_row: no graphs, layer 3 alone has 51503104 bytes of weights and 2147483648 of cache, above the 2147483648 of a graph
    context 1048576, int4_per_row: no graphs, layer 3 alone has 25812992 bytes of weights and 2147483648 of cache, above the 2147483648 of a graph
    over: weights and caches alone are more than the 8192.0 MiB of the device
    with … weights: weights and caches; compiled graphs and what they spill are not counted, `profile estimate` of a compiled artifact tells them
    ");
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
                assert!(at["activation_bytes"].as_u64().unwrap() > 0, "{model}");
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
            for unknown in ["context_binary_bytes", "spill_bytes", "ram_bytes"] {
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
