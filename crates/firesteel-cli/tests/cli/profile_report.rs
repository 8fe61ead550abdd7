//! `firesteel profile estimate` and `firesteel profile report`.

use crate::support::{
    argument, export_to, firesteel, golden_path, options, refusal, spark_tiny, stdout,
};
use firesteel_checkpoint::Checkpoint;
use firesteel_export::{Dialect, ExportOptions, Precision};
use insta::assert_snapshot;
use serde_json::Value;
use std::path::Path;

const SHAPE: &str = "spark-x2.5-1.7b";

fn parse(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

fn estimate(options: &[&str]) -> String {
    stdout(&[&["profile", "estimate", "--model"], options].concat())
}

#[test]
fn estimate_prints_the_fit_and_its_error() {
    let options = [SHAPE, "--precision", "w8a16", "--context", "1024,4096", "--what-if"];
    assert_snapshot!(estimate(&options), @"
    spark-x2.5-1.7b: estimated, nothing here is measured
    context                    part  memory MB  moved MB    Mop  planned MB     ms           outside of the rows
    1024     21 × sliding_attention       52.6       4.5  107.0           -  0.831
    1024         7 × full_attention       53.6       8.8  111.2           -  0.922
    1024                   1 × head      269.2       0.3  536.9           -  3.845
    4096     21 × sliding_attention       52.6       4.5  107.0           -  0.831
    4096         7 × full_attention       59.9      34.2  136.4           -  1.470  moved 3.91 × the largest row
    4096                   1 × head      269.2       0.3  536.9           -  3.845
    context 1024: estimated 27.75 ms, 36.0 tokens/s; composed of the table's layers 27.36 (measured)
    context 1024: estimated by group: MLP matmuls 59.1 %, projections 15.2 %, head 13.9 %, cache moves 9.0 %, attention matmuls 2.4 %, attention, the rest 0.2 %
    context 4096: estimated 31.59 ms, 31.7 tokens/s
    context 4096: estimated by group: MLP matmuls 51.9 %, cache moves 17.4 %, projections 13.4 %, head 12.2 %, attention matmuls 4.7 %, attention, the rest 0.3 %
    context 1024: step addresses 1747.7 MB, within the limit of 2147.5; largest working set 2.1 MB (layers.3.attention.keys_transposed/Transpose), within VTCM of 8.4
    context 4096: step addresses 1791.7 MB, within the limit of 2147.5; largest working set 8.4 MB (layers.3.attention.keys_transposed/Transpose), ABOVE VTCM of 8.4
    cache moves in a sliding layer: 3.1 MB as a ring (69.5 % of what it moves), 5.2 MB rolled (79.2 %)
    fitted on 3 rows of Samsung Galaxy S25, Snapdragon 8 Elite (SM8750), qnn-npu, w8a16: memory 70.107 GB/s, moved 55.627 GB/s, operations left out (too few rows), overhead left out (too few rows)
    row                layout  context  measured  fitted  error %  left out %
    sliding_attention    ring        -     0.803   0.831     +3.5        +5.5
    full_attention       roll     1024     0.942   0.922     -2.1        -9.1
    head                    -        -     3.907   3.845     -1.6       -12.2
    error of the fit: at most 3.5 %, RMS 2.5 %, RMS of rows left out 9.3 %
    what if           memory MB  moved MB  estimated ms  difference       %  outside
    base                 1748.3     156.6         27.75       +0.00   +0.00       no
    layout roll          1770.4     200.8         28.86       +1.11   +3.99       no
    context 4096         1792.4     334.9         31.59       +3.83  +13.81      yes
    precision fp16       3452.6     156.6         48.28      +20.53  +73.96      yes
    precision w4a16       894.8     156.6         29.11       +1.36   +4.90       no
    precision w16a16     3452.6     156.6         55.05      +27.30  +98.35      yes
    precision w8a8       1729.7      78.3         24.90       -2.86  -10.29      yes
    gelu tanh            1748.3     156.6         27.75       +0.00   +0.00       no
    gelu sigmoid         1748.3     158.5         27.79       +0.03   +0.12       no
    head in 8            1748.4     156.7         27.76       +0.00   +0.01      yes
    kv i8                1730.0      83.2         26.17       -1.58   -5.70       no
    forms of GELU that are one operator each count the same; what a device makes of them is in measured rows only
    ");
    assert_snapshot!(estimate(&[SHAPE, "--precision", "w16a16", "--head-shards", "8"]), @"
    spark-x2.5-1.7b: estimated, nothing here is measured
    context                    part  memory MB  moved MB    Mop  planned MB     ms             outside of the rows
    1024     21 × sliding_attention      103.9       4.5  107.0           -  1.656
    1024         7 × full_attention      104.9       8.8  111.2           -  1.673
    1024                   8 × head       67.1       0.0   67.1           -  1.071  memory 0.65 × the smallest row
    context 1024: estimated 55.05 ms, 18.2 tokens/s
    context 1024: estimated by group: MLP matmuls 66.3 %, projections 17.0 %, head 15.6 %, cache moves 1.1 %
    context 1024: step addresses 2915.1 MB, ABOVE the limit of 2147.5; largest working set 2.1 MB (layers.3.attention.keys_transposed/Transpose), within VTCM of 8.4
    context 1024: each of 8 heads addresses 67.1 MB, within the limit of 2147.5
    cache moves in a sliding layer: 3.1 MB as a ring (69.5 % of what it moves), 5.2 MB rolled (79.2 %)
    fitted on 1 row of Samsung Galaxy S25, Snapdragon 8 Elite (SM8750), qnn-npu, w16a16: memory 62.718 GB/s, moved left out (too few rows), operations left out (too few rows), overhead left out (too few rows)
    row                layout  context  measured  fitted  error %  left out %
    sliding_attention    ring        -     1.656   1.656     +0.0           -
    error of the fit: at most 0.0 %, RMS not known, RMS of rows left out not known
    ");
}

#[test]
fn an_estimate_without_rows_is_null() {
    let report = parse(&estimate(&[SHAPE, "--precision", "w4a8", "--json"]));
    assert_eq!(report["fit"], Value::Null);
    let reason = report["fit_missing"].as_str().unwrap();
    assert!(reason.contains("precision is w4a8") && reason.contains("accepted: fp16"), "{reason}");
    let step = &report["steps"][0];
    assert_eq!((&step["time"], &step["composed"]), (&Value::Null, &Value::Null));
    assert!(step["cost"]["total"]["weight_bytes"].as_u64().unwrap() > 0);
    let graph = &step["graphs"][0];
    for unknown in ["vtcm_used_bytes", "memory_values_bytes", "spilled_bytes"] {
        assert_eq!(graph.get(unknown), Some(&Value::Null), "{unknown}");
    }
    assert_eq!(graph["context_binary_bytes"], Value::Null);
    assert_eq!(
        (&graph["addressable"], &graph["largest_operator_fits"]),
        (&true.into(), &true.into())
    );
    assert_eq!((&report["compiled"], &report["what_if"]), (&Value::Null, &Value::Null));
    let report = parse(&estimate(&[SHAPE, "--precision", "fp16", "--json"]));
    assert_eq!(report["steps"][0]["time"]["basis"], "estimated");
}

/// The costs of an artifact's graphs are those of the choice it was exported with.
#[test]
fn an_artifact_is_counted_from_its_graphs() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let checkpoint = Checkpoint::open(&spark_tiny()).unwrap();
    let half = ExportOptions {
        precision: Precision::Fp16,
        dialect: Dialect::Qnn,
        context: 256,
        ..options(&checkpoint)
    };
    export_to(&checkpoint, half, &at("half"));
    let integers = at("integers");
    let quantize =
        ["quantize", "graph", "models/spark-tiny", "--scheme", "w8a16", "--uncalibrated"];
    stdout(&[&quantize[..], &["--context", "256", "--out", argument(&integers)]].concat());
    for (artifact, precision) in [(at("half"), "fp16"), (integers, "w8a16")] {
        let counted = parse(&estimate(&[argument(&artifact), "--json"]));
        let chosen = ["models/spark-tiny", "--precision", precision, "--context", "256", "--json"];
        let chosen = parse(&estimate(&chosen));
        for (report, name) in [(&counted, "graphs"), (&chosen, "choice")] {
            assert_eq!(report["steps"][0]["choice"]["precision"], precision, "{name}");
        }
        let parts =
            |report: &Value| report["steps"][0]["cost"]["parts"].as_array().unwrap().clone();
        assert_eq!(parts(&counted).len(), 3);
        for (own, other) in parts(&counted).iter().zip(&parts(&chosen)) {
            for key in ["kind", "count", "cache_moves_bytes"] {
                assert_eq!(own[key], other[key], "{precision} {key}");
            }
            for key in ["weight_bytes", "cache_read_bytes", "cache_written_bytes"] {
                assert_eq!(own["cost"][key], other["cost"][key], "{precision} {key}");
            }
        }
        // A graph of integers also converts at its border.
        let moved =
            |report: &Value| report["steps"][0]["cost"]["total"]["moved_bytes"].as_f64().unwrap();
        let ratio = moved(&counted) / moved(&chosen);
        assert!((1.0..1.02).contains(&ratio), "{precision} {ratio}");
    }
}

/// What the compiler planned stands beside what is counted, and is near it.
#[test]
fn a_compiled_artifact_has_its_plan() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let (artifact, out, page) = (at("artifact"), at("compiled"), at("report.html"));
    let checkpoint = Checkpoint::open(&spark_tiny()).unwrap();
    let half =
        ExportOptions { precision: Precision::Fp16, dialect: Dialect::Qnn, ..options(&checkpoint) };
    export_to(&checkpoint, half, &artifact);
    stdout(&["compile", argument(&artifact), "--soc", "sm8750", "--out", argument(&out)]);
    let report = parse(&estimate(&[argument(&out), "--json"]));
    let step = &report["steps"][0];
    for part in step["cost"]["parts"].as_array().unwrap() {
        let planned = part["compiled_memory_bytes"].as_f64().unwrap();
        let counted = part["cost"]["weight_bytes"].as_f64().unwrap();
        assert!((1.0..1.6).contains(&(planned / counted)), "{part}");
    }
    assert!(step["time"]["compiled_step_ms"].as_f64().unwrap() > 0.0);
    let graph = &step["graphs"][0];
    let vtcm = graph["vtcm_used_bytes"].as_u64().unwrap();
    assert!(vtcm > 0 && vtcm <= 8 << 20, "{vtcm}");
    let binary = graph["context_binary_bytes"].as_u64().unwrap();
    assert!(binary > graph["addressed_bytes"].as_u64().unwrap() / 2, "{graph}");
    // Nothing but the rounding of outputs to tiles.
    assert!(graph["spilled_bytes"].as_u64().unwrap() < 16 << 10, "{graph}");
    assert!(graph["memory_values_bytes"].is_u64());
    let groups = report["compiled"]["memory_by_group"]["groups"].as_array().unwrap();
    assert_eq!(groups[0]["group"], "mlp");
    assert!(groups.iter().all(|group| group["group"] != "other"), "{groups:?}");

    let written = ["profile", "report", "--model", argument(&out), "--out", argument(&page)];
    let document = parse(&stdout(&[&written[..], &["--json"]].concat()));
    let plans = document["figures"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|figure| figure["series"][0]["basis"] == "planned by the compiler");
    assert_eq!(plans.count(), 2);
}

/// A figure a line, a series a line: name, basis, and what is plotted.
fn plotted(document: &Value) -> String {
    let mut text = String::new();
    for figure in document["figures"].as_array().unwrap() {
        text.push_str(&format!("{}\n", figure["id"].as_str().unwrap()));
        for series in figure["series"].as_array().unwrap() {
            let points = series["points"].as_array().unwrap().iter().map(|point| {
                let x = match (point["label"].as_str(), point["x"].as_f64()) {
                    (Some(label), Some(x)) => format!("{label} {x}"),
                    (Some(label), None) => label.to_owned(),
                    (None, x) => format!("{}", x.unwrap()),
                };
                format!(
                    "{x}={:.3} ({})",
                    point["y"].as_f64().unwrap(),
                    point["basis"].as_str().unwrap()
                )
            });
            let points: Vec<String> = points.collect();
            text.push_str(&format!(
                "  {}, {}: {}\n",
                series["name"].as_str().unwrap(),
                series["basis"].as_str().unwrap(),
                points.join(", ")
            ));
        }
    }
    text
}

/// Walks a page: every element is closed, in order, and no text has a bare `<` or `>`. Gives the
/// names of the elements.
fn elements(page: &str) -> Vec<String> {
    let body = page.strip_prefix("<!doctype html>\n").unwrap();
    let (mut open, mut names): (Vec<String>, Vec<String>) = (Vec::new(), Vec::new());
    for part in body.split('<').skip(1) {
        let (tag, text) = part.split_once('>').unwrap();
        assert!(!text.contains('>') || open.last().is_some_and(|name| name == "style"), "{part}");
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop().as_deref(), Some(name), "{part}");
            continue;
        }
        let name = tag.split([' ', '/']).next().unwrap().to_owned();
        assert!(tag.matches('"').count().is_multiple_of(2), "{tag}");
        names.push(name.clone());
        if name != "meta" && !tag.ends_with('/') {
            open.push(name);
        }
    }
    assert!(open.is_empty(), "{open:?}");
    names
}

/// What a page would load, or run.
fn assert_alone(page: &str) {
    for part in ["http:", "https:", "src=", "href=", "url(", "@import", "<script", "<link", "on"] {
        let found = match part {
            // Handlers of events are attributes.
            "on" => page.contains(" onload=") || page.contains(" onclick="),
            _ => page.contains(part),
        };
        assert!(!found, "the page has {part}");
    }
}

#[test]
fn a_report_shows_what_its_json_says() {
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("report.html");
    let base = ["profile", "report", "--model", SHAPE, "--precision", "w8a16", "--json"];
    let data = stdout(&[&base[..], &["--out", argument(&page)]].concat());
    let document = parse(&data);
    assert_snapshot!(plotted(&document), @"
    kv-memory
      hybrid, counted: 1024=36657152.000 (counted), 2048=51337216.000 (counted), 4096=80697344.000 (counted), 8192=139417600.000 (counted), 16384=256858112.000 (counted), 32768=491739136.000 (counted), 65536=961501184.000 (counted), 131072=1901025280.000 (counted), 262144=3780073472.000 (counted), 524288=7538169856.000 (counted), 1048576=15054362624.000 (counted)
      all layers full, counted: 1024=58720256.000 (counted), 2048=117440512.000 (counted), 4096=234881024.000 (counted), 8192=469762048.000 (counted), 16384=939524096.000 (counted), 32768=1879048192.000 (counted), 65536=3758096384.000 (counted), 131072=7516192768.000 (counted), 262144=15032385536.000 (counted), 524288=30064771072.000 (counted), 1048576=60129542144.000 (counted)
    step-time
      hybrid, estimated, estimated: 1024=27.754 (estimated), 2048=29.032 (estimated, outside of the rows), 4096=31.587 (estimated, outside of the rows), 8192=36.699 (estimated, outside of the rows), 16384=46.921 (estimated, outside of the rows), 32768=67.366 (estimated, outside of the rows)
      all layers full, estimated, estimated: 1024=29.663 (estimated), 2048=34.775 (estimated, outside of the rows), 4096=44.997 (estimated, outside of the rows), 8192=65.443 (estimated, outside of the rows), 16384=106.333 (estimated, outside of the rows), 32768=188.114 (estimated, outside of the rows)
      hybrid, composed, composed of measured layers: 1024=27.364 (measured)
      all layers full, composed, composed of measured layers: 1024=30.283 (measured)
    estimated-groups
      estimated, estimated: MLP matmuls=16.404 (estimated), projections=4.227 (estimated), head=3.845 (estimated), cache moves=2.503 (estimated), attention matmuls=0.674 (estimated), attention, the rest=0.060 (estimated), GELU=0.013 (estimated), residual=0.012 (estimated), norms=0.012 (estimated), graph input/output=0.003 (estimated)
    measured-estimated
      sliding_attention, measured, and estimated by the fit: sliding_attention ring 0.803=0.831 (published; error +3.5 %)
      full_attention, measured, and estimated by the fit: full_attention roll 1024 0.942=0.922 (published; error -2.1 %)
      head, measured, and estimated by the fit: head 3.907=3.845 (published; error -1.6 %)
    what-if
      estimated, estimated: base=27.754 (estimated; +0.0 %), layout roll=28.862 (estimated; +4.0 %), context 4096=31.587 (estimated, outside of the rows; +13.8 %), precision fp16=48.281 (estimated, outside of the rows; +74.0 %), precision w4a16=29.115 (estimated; +4.9 %), precision w16a16=55.050 (estimated, outside of the rows; +98.4 %), precision w8a8=24.898 (estimated, outside of the rows; -10.3 %), gelu tanh=27.754 (estimated; +0.0 %), gelu sigmoid=27.787 (estimated; +0.1 %), head in 8=27.756 (estimated, outside of the rows; +0.0 %), kv i8=26.172 (estimated; -5.7 %)
    ");
    // With or without a page, the data are the same.
    assert_eq!(stdout(&base), data);
    let page = std::fs::read_to_string(&page).unwrap();
    assert_alone(&page);
    let names = elements(&page);
    let count = |name: &str| names.iter().filter(|found| *found == name).count();
    let figures = document["figures"].as_array().unwrap();
    assert_eq!((count("figure"), count("table"), count("desc")), (5, 5, 5));
    // Every value is in a table, in order.
    let shown: Vec<&str> = page
        .split("<td class=\"number\">")
        .skip(1)
        .map(|rest| rest.split_once('<').unwrap().0)
        .collect();
    let mut meant = Vec::new();
    for figure in figures {
        let digits = if figure["y"]["unit"] == "bytes" { 0 } else { 3 };
        for series in figure["series"].as_array().unwrap() {
            for point in series["points"].as_array().unwrap() {
                meant.push(format!("{:.digits$}", point["y"].as_f64().unwrap()));
            }
        }
    }
    assert_eq!(shown, meant);
}

#[test]
fn a_report_has_the_operators_of_others() {
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("<b>&\"'.html");
    let operators = golden_path("profiles/qnn.csv");
    let base = ["profile", "report", "--model", SHAPE, "--precision", "w4a16", "--layout", "roll"];
    let more = ["--operators", argument(&operators), "--out", argument(&page)];
    let text = stdout(&[&base[..], &more].concat());
    assert!(text.contains("timing only") && text.contains("By group of operators: "), "{text}");
    let written = std::fs::read_to_string(&page).unwrap();
    assert_alone(&written);
    elements(&written);
    assert!(written.contains("imported"));
    // What is there stays, unless it is to go and is a page.
    let again = [&base[..], &more].concat();
    assert!(refusal(&again).contains("--force replaces a page"));
    stdout(&[&again[..], &["--force"]].concat());
    std::fs::write(&page, "a letter").unwrap();
    refusal(&[&again[..], &["--force"]].concat());
    assert_eq!(std::fs::read_to_string(&page).unwrap(), "a letter");
}

#[test]
fn a_report_of_what_nobody_measured() {
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("report.html");
    // A model whose path is markup.
    let model = folder.path().join("<script>alert(1)</script>");
    std::fs::create_dir_all(&model).unwrap();
    let config = model.join("config.json");
    std::fs::copy(Path::new(&spark_tiny()).join("config.json"), &config).unwrap();
    let base = ["profile", "report", "--model", argument(&config), "--precision", "w4a8"];
    let text = stdout(&[&base[..], &["--out", argument(&page)]].concat());
    for part in ["There is nothing to show of the time of a step", "Not known: precision is w4a8"] {
        assert!(text.contains(part), "{text}");
    }
    let page = std::fs::read_to_string(&page).unwrap();
    assert_alone(&page);
    assert_eq!(elements(&page).iter().filter(|name| *name == "figure").count(), 1);
    assert!(page.contains("&lt;script&gt;alert(1)&lt;/script&gt;"));
}

#[test]
fn refusals() {
    let folder = tempfile::tempdir().unwrap();
    let artifact = folder.path().join("artifact");
    let checkpoint = Checkpoint::open(&spark_tiny()).unwrap();
    export_to(&checkpoint, options(&checkpoint), &artifact);
    let artifact = argument(&artifact);
    let table = folder.path().join("table.json");
    std::fs::write(&table, "{}").unwrap();
    let table = argument(&table);
    let estimate = ["profile", "estimate", "--model", SHAPE];
    let report = ["profile", "report", "--model", SHAPE, "--precision", "w8a16"];
    let cases: Vec<(Vec<&str>, &str)> = vec![
        (estimate.to_vec(), "--precision is missing"),
        ([&estimate[..], &["--precision", "w8"]].concat(), "w4, w8 or w16 followed by a8 or a16"),
        ([&estimate[..], &["--precision", "fp16", "--kv", "i8"]].concat(), "accepted: f16"),
        ([&estimate[..], &["--precision", "fp16", "--context", "0"]].concat(), "context is 0"),
        ([&estimate[..], &["--precision", "fp16", "--head-shards", "0"]].concat(), "0 is not in"),
        ([&estimate[..], &["--precision", "fp16", "--table", table]].concat(), "missing field"),
        ([&estimate[..], &["--precision", "fp16", "--device", "a"]].concat(), "galaxy-s25"),
        (
            ["profile", "estimate", "--model", artifact, "--context", "64"].to_vec(),
            "--context is for a step that is not exported yet",
        ),
        (
            ["profile", "estimate", "--model", artifact, "--gelu", "tanh"].to_vec(),
            "--gelu is for a step that is not exported yet",
        ),
        (report.to_vec(), "--out <FILE>"),
        ([&report[..], &["--json", "--operators", table]].concat(), "table.json"),
        ([&report[..], &["--json", "--operators", "none.csv"]].concat(), "none.csv"),
    ];
    for (arguments, reason) in cases {
        let talk = refusal(&arguments);
        assert!(talk.contains(reason), "{arguments:?}: {talk}");
    }
    // An artifact in a format that the table does not have is counted without a time.
    let output = firesteel(&["profile", "estimate", "--model", artifact]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && text.contains("no time: precision is fp32"), "{text}");
}
