//! `firesteel profile import` and `measure`.

use crate::support::{ROOT, argument, export_to, options, refusal, spark_tiny, stdout};
use firesteel_checkpoint::Checkpoint;
use firesteel_export::{ExportOptions, Precision};
use firesteel_step::Logits;
use insta::assert_snapshot;
use serde_json::{Value, json};
use std::path::Path;

const QNN: &str = "tests/golden/profiles/qnn.csv";

fn parse(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

fn read(path: &Path) -> Value {
    parse(&std::fs::read_to_string(path).unwrap())
}

#[test]
fn import_prints_what_a_report_says() {
    let text = stdout(&["profile", "import", QNN, "--warmup", "1", "--top", "3"]);
    assert_snapshot!(text, @"
    tests/golden/profiles/qnn.csv: qnn-csv
    QNN (execute) time: median 1.010 ms, shortest 1.000, p10 1.000, p90 1.030, longest 1.030, median deviation 0.010, 3 runs
    6 operators, 215204 cycles in all, imported
    operator                  type  unit  cycles   share
    /layers.0/gelu               -     -  120002  55.8 %
    /layers.0/q_k_v_proj         -     -   92200  42.8 %
    /layers.0/concat, axis 2     -     -    1500   0.7 %
    and 3 more
    ");
    let text = stdout(&["profile", "import", "tests/golden/profiles/ai-hub.json"]);
    assert_snapshot!(text, @"
    tests/golden/profiles/ai-hub.json: ai-hub
    all_inference_times: median 0.817 ms, shortest 0.812, p10 0.812, p90 0.831, longest 2.104, median deviation 0.004, 10 runs
    6 operators, 318631 cycles in all, imported
    operator                             type  unit  cycles   share
    /layers.0/gelu                       Gelu   NPU  120500  37.8 %
    /layers.0/q_k_v_proj       FullyConnected   NPU   92000  28.9 %
    /layers.0/scores                   MatMul   NPU   51000  16.0 %
    /layers.0/softmax                 Softmax   NPU   33000  10.4 %
    /layers.0/input_layernorm         RmsNorm   NPU   18031   5.7 %
    x                                   Input   NPU    4100   1.3 %
    1 operator, 23.0 microseconds in all, imported
    operator             type  unit  microseconds    share
    /layers.0/mask/Cast  CAST   CPU          23.0  100.0 %
    note: estimated_inference_time is 812 microseconds
    note: 2 of 8 operators have no cycles
    note: 7 of 8 operators have no microseconds
    ");
    let text = stdout(&["profile", "import", "tests/golden/profiles/ort.json", "--json"]);
    let report = parse(&text);
    assert_eq!(report["format"], "ort");
    assert_eq!(report["operators"][0]["operators"][1]["operator"], "Softmax");
    assert_eq!(report["operators"][0]["provenance"], "imported");
    assert_eq!(report["row"], Value::Null);
}

/// Two layers and a head from reports make a table that a step is composed of.
#[test]
fn imports_become_a_table() {
    let folder = tempfile::tempdir().unwrap();
    let table = folder.path().join("phone.json");
    let base = [
        "profile",
        "import",
        QNN,
        "--warmup",
        "1",
        "--out",
        argument(&table),
        "--model",
        "spark-x2.5-1.7b",
        "--device",
        "a phone",
        "--soc",
        "its chip",
        "--runtime",
        "qnn-npu",
        "--precision",
        "w8a16",
        "--dialect",
        "qnn",
        "--json",
    ];
    let full = ["--layer-kind", "full", "--layout", "roll", "--context", "1024"];
    let report = parse(&stdout(&[&base[..], &full].concat()));
    assert_eq!(
        report["row"],
        json!({
            "runtime": "qnn-npu", "precision": "w8a16", "dialect": "qnn", "kind": "full_attention",
            "layout": "roll", "context": 1024, "tokens": 1, "variant": null, "ms": 1.01,
            "statistic": "median", "low": 1.0, "high": 1.03, "n": 3, "snr_db": null,
            "timing_only": false, "source": "imported-1", "note": null,
        })
    );
    for options in [&["--layer-kind", "sliding", "--layout", "ring"][..], &["--layer-kind", "head"]]
    {
        stdout(&[&base[..], options].concat());
    }
    let written = read(&table);
    assert_eq!(written["measurements"].as_array().unwrap().len(), 3);
    assert_eq!(
        written["sources"],
        json!([{
            "id": "imported-1", "origin": "imported",
            "text": "QNN (execute) time of qnn.csv, profiling events of QNN, after a warm-up of 1",
        }])
    );
    let compose = ["profile", "compose", "--model", "spark-x2.5-1.7b", "--precision", "w8a16"];
    let options = ["--context", "1024", "--table", argument(&table)];
    assert_snapshot!(stdout(&[&compose[..], &options].concat()), @"
    a phone, its chip, qnn-npu, w8a16: steps composed of single layers, ms
    context     sliding       full  layers  all full  speedup   head   step  tokens/s     basis
    1024     21 × 1.010  7 × 1.010   28.28     28.28     1.00  1.010  29.29      34.1  measured
    sliding layers pay at context 1024, the shortest that was measured
    times imported: QNN (execute) time of qnn.csv, profiling events of QNN, after a warm-up of 1
    ");
    // The same part again, another device, another model.
    let talk = refusal(&[&base[..], &full].concat());
    assert!(talk.contains("each part of a step once"), "{talk}");
    let mut other =
        [&base[..], &["--layer-kind", "full", "--layout", "ring", "--context", "9"]].concat();
    other[10] = "another phone";
    let talk = refusal(&other);
    assert!(talk.contains("a table of the device \"a phone\""), "{talk}");
    other[10] = "a phone";
    other[8] = "spark-x2.5-4b";
    let talk = refusal(&other);
    assert!(talk.contains("hidden_size 2048, and this model's"), "{talk}");
    assert_eq!(read(&table), written, "a refused row leaves the table as it was");
}

/// Layers that were measured with a chunk's tokens make a prompt; without them there is none.
#[test]
fn chunks_become_a_prompt() {
    let folder = tempfile::tempdir().unwrap();
    let table = folder.path().join("phone.json");
    let import = |more: &[&str]| {
        let base = ["profile", "import", QNN, "--warmup", "1", "--out", argument(&table)];
        let model = ["--model", "spark-x2.5-1.7b", "--device", "a phone", "--soc", "its chip"];
        let build = ["--runtime", "qnn-npu", "--precision", "w8a16"];
        stdout(&[&base[..], &model, &build, more].concat());
    };
    let sliding = ["--layer-kind", "sliding", "--layout", "ring"];
    let full = ["--layer-kind", "full", "--layout", "roll", "--context", "1024"];
    let head = ["--layer-kind", "head"];
    for part in [&sliding[..], &full, &head] {
        import(part);
    }
    let compose = ["profile", "compose", "--model", "spark-x2.5-1.7b", "--precision", "w8a16"];
    let own = ["--table", argument(&table), "--prompt", "300", "--chunk", "128"];
    let context = ["--context", "256,1024"];
    let text = stdout(&[&compose[..], &own, &context].concat());
    let (_, text) = text.split_once("a prompt of").unwrap();
    assert_snapshot!(text, @"
     300 in 3 chunks of 128, the last with 44 of them; ms, first token with the head
    context  sliding  full  chunk  prompt  tokens/s  first token  rest in steps  basis
    256            -     -      -       -         -            -              -      -
    1024           -     -      -       -         -            -              -      -
    not known: a prompt of 300 does not fit in a context of 256
    not known: full_attention was not measured with 128 tokens
    not known: sliding_attention was not measured with 128 tokens
    times imported: QNN (execute) time of qnn.csv, profiling events of QNN, after a warm-up of 1
    ");
    for part in [&sliding[..], &full] {
        import(&[part, &["--tokens", "128"]].concat());
    }
    let text = stdout(&[&compose[..], &own, &context].concat());
    let (_, text) = text.split_once("a prompt of").unwrap();
    assert_snapshot!(text, @"
     300 in 3 chunks of 128, the last with 44 of them; ms, first token with the head
    context     sliding       full  chunk  prompt  tokens/s  first token  rest in steps     basis
    256      21 × 1.010          -      -       -         -            -              -         -
    1024     21 × 1.010  7 × 1.010  28.28   84.84    3536.1        85.85        1301.89  measured
    not known: a prompt of 300 does not fit in a context of 256
    times imported: QNN (execute) time of qnn.csv, profiling events of QNN, after a warm-up of 1
    ");
    // The published table has single tokens only.
    let published = ["--prompt", "300", "--chunk", "128", "--context", "1024", "--json"];
    let report = parse(&stdout(&[&compose[..], &published].concat()));
    let prompt = &report["prompts"][0];
    assert_eq!(json!([prompt["prompt_ms"], prompt["time_to_first_token_ms"]]), json!([null, null]));
    assert_eq!(
        prompt["missing"],
        json!([
            "sliding_attention was not measured with 128 tokens",
            "full_attention was not measured with 128 tokens"
        ])
    );
    for (more, reason) in [
        (&["--prompt", "300"][..], "--chunk"),
        (&["--prompt", "0", "--chunk", "128"], "prompt is 0; accepted: 1 to 16777216"),
        (&["--prompt", "1", "--chunk", "0"], "chunk is 0; accepted: 1 to 16777216"),
    ] {
        let talk = refusal(&[&compose[..], more].concat());
        assert!(talk.contains(reason), "{talk}");
    }
}

#[test]
fn import_refusals() {
    let folder = tempfile::tempdir().unwrap();
    let table = folder.path().join("table.json");
    let cut = folder.path().join("cut.csv");
    let whole = std::fs::read_to_string(Path::new(ROOT).join(QNN)).unwrap();
    let lines: Vec<&str> = whole.lines().take(18).collect();
    std::fs::write(&cut, lines.join("\n")).unwrap();
    let out = ["profile", "import", QNN, "--out", argument(&table)];
    let model = ["--model", "spark-x2.5-1.7b"];
    let device = ["--device", "d", "--soc", "s", "--runtime", "r"];
    let emulator = "tests/golden/profiles/emulator.csv";
    let cases: Vec<(Vec<&str>, &str)> = vec![
        (vec!["profile", "import", "none.csv"], "none.csv"),
        (vec!["profile", "import", emulator], "those of the host and say nothing about a device"),
        (vec!["profile", "import", argument(&cut)], "it is cut off"),
        (vec!["profile", "import", QNN, "--format", "ort"], "qnn.csv: ort: "),
        (vec!["profile", "import", QNN, "--warmup", "4"], "the warm-up of 4 leaves out"),
        (vec!["profile", "import", QNN, "--device", "d"], "--out"),
        (out.to_vec(), "needs --device"),
        ([&out[..], &device].concat(), "needs --model, which is not known otherwise"),
        ([&out[..], &device, &model].concat(), "needs --layer-kind"),
        ([&out[..], &device, &model, &["--layer-kind", "head"]].concat(), "needs --precision"),
        (
            [&out[..], &device, &model, &["--precision", "p", "--layer-kind", "full"]].concat(),
            "layout is null; accepted: a value for full_attention",
        ),
    ];
    for (arguments, reason) in cases {
        let talk = refusal(&arguments);
        assert!(talk.contains(reason), "{arguments:?}: {talk}");
    }
    assert!(!table.exists());
}

/// A layer on every runner: the row says what was measured, and a table composes from rows.
#[test]
fn measure_writes_rows() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let checkpoint = Checkpoint::open(&spark_tiny()).unwrap();
    let table = at("table.json");
    let quick = ["--warmup", "1", "--runs", "4", "--device", "desk", "--json"];
    let out = ["--out", argument(&table)];
    let layer = |layers| ExportOptions {
        layers,
        context: 128,
        logits: Logits::Hidden,
        precision: Precision::Fp16,
        ..options(&checkpoint)
    };
    for (name, layers) in [("sliding", 0..1), ("full", 3..4), ("block", 2..4)] {
        let artifact = at(name);
        export_to(&checkpoint, layer(layers), &artifact);
        let base = ["profile", "measure", argument(&artifact), "--runner", "ort"];
        let report = parse(&stdout(&[&base[..], &quick, &out].concat()));
        let row = &report["row"];
        let expected = match name {
            "sliding" => json!(["sliding_attention", "ring", null, null]),
            "full" => json!(["full_attention", "roll", 128, null]),
            _ => json!(["block", "ring", 128, "1 sliding_attention, 1 full_attention"]),
        };
        assert_eq!(json!([row["kind"], row["layout"], row["context"], row["variant"]]), expected);
        assert_eq!(
            json!([row["runtime"], row["precision"], row["dialect"], row["tokens"], row["n"]]),
            json!(["ort-cpu", "fp16", "portable", 1, 4])
        );
        assert_eq!((&row["statistic"], &row["timing_only"]), (&json!("median"), &json!(false)));
        assert_eq!(report["context_fill"], 127);
        let times = ["low", "p10", "ms", "p90", "high"].map(|key| report["times"][key].as_f64());
        assert!(times.windows(2).all(|pair| pair[0].is_some() && pair[0] <= pair[1]), "{times:?}");
        assert!(times[0] > Some(0.0));
    }
    let tiny = spark_tiny();
    for (runner, precision) in [("engine", None), ("cpu", Some("bf16"))] {
        let base = ["profile", "measure", argument(&tiny), "--runner", runner, "--layers", "full"];
        let step = ["--no-lm-head", "--context", "96", "--tokens", "8", "--context-fill", "40"];
        let more: Vec<&str> = precision.iter().flat_map(|name| ["--precision", name]).collect();
        let report = parse(&stdout(&[&base[..], &step, &quick, &out, &more].concat()));
        let row = &report["row"];
        assert_eq!(
            json!([
                row["runtime"],
                row["precision"],
                row["dialect"],
                row["tokens"],
                row["context"]
            ]),
            json!([format!("firesteel-{runner}"), precision.unwrap_or("fp64"), null, 8, 96])
        );
        assert_eq!((&report["first_layer"], &report["context_fill"]), (&json!(3), &json!(40)));
    }
    let written = read(&table);
    assert_eq!(written["device"], "desk");
    assert!(written["sources"].as_array().unwrap().iter().all(|s| s["origin"] == "measured"));
    let compose = ["profile", "compose", "--model", argument(&tiny), "--precision", "fp16"];
    let more = ["--runtime", "ort-cpu", "--context", "128", "--table", argument(&table), "--json"];
    let step = &parse(&stdout(&[&compose[..], &more].concat()))["steps"][0];
    assert_eq!((&step["sliding"]["count"], &step["full"]["count"]), (&json!(3), &json!(1)));
    assert_eq!(step["missing"], json!(["head was not measured"]));
}

#[test]
fn measure_refusals() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let checkpoint = Checkpoint::open(&spark_tiny()).unwrap();
    let (artifact, table, tiny) = (at("artifact"), at("table.json"), spark_tiny());
    export_to(&checkpoint, options(&checkpoint), &artifact);
    let (artifact, tiny, out) = (argument(&artifact), argument(&tiny), argument(&table));
    fn measure<'a>(path: &'a str, runner: &'a str, more: &[&'a str]) -> Vec<&'a str> {
        [&["profile", "measure", path, "--runner", runner][..], more].concat()
    }
    let once = ["--runs", "1", "--warmup", "0", "--out", out];
    let sliding = ["--layers", "sliding", "--no-lm-head", "--context", "128"];
    let partly = [&sliding[..], &once, &["--context-fill", "62"]].concat();
    let cases: Vec<(Vec<&str>, &str)> = vec![
        (measure(artifact, "evaluator", &[]), "its time is no device's"),
        (measure(artifact, "htp", &[]), "says nothing about a device"),
        (measure(artifact, "cpu", &[]), "cpu and engine run checkpoints"),
        (measure(tiny, "ort", &[]), "a checkpoint has no graph"),
        (measure(artifact, "ort", &["--context", "9"]), "are for checkpoints"),
        (measure(artifact, "ort", &["--runs", "0"]), "--runs 0: 1 to"),
        (measure(artifact, "ort", &["--context-fill", "64"]), "has to fit in the context of 64"),
        (measure(tiny, "engine", &once), "this step has the head too"),
        (measure(tiny, "cpu", &[&sliding[..], &once].concat()), "needs --precision"),
        (measure(tiny, "engine", &partly), "leaves it partly empty"),
    ];
    for (arguments, reason) in cases {
        let talk = refusal(&arguments);
        assert!(talk.contains(reason), "{arguments:?}: {talk}");
    }
    assert!(!table.exists());
}
