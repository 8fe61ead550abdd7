//! Reports of other tools: small samples of each format, and hostile and truncated ones.

use firesteel_checkpoint::preset;
use firesteel_profile::{
    ImportedReport, LayerShape, Measurement, OperatorTimes, Origin, PartKind, Provenance, Quantity,
    ReportFormat, RunTimes, Statistic, Table, import_report,
};
use firesteel_step::CacheLayout;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::path::Path;

const AI_HUB: &str = include_str!("../../../../tests/golden/profiles/ai-hub.json");
const ORT: &str = include_str!("../../../../tests/golden/profiles/ort.json");
const QNN: &str = include_str!("../../../../tests/golden/profiles/qnn.csv");
const EMULATOR: &str = include_str!("../../../../tests/golden/profiles/emulator.csv");

fn import(bytes: &[u8], warmup: usize) -> Result<ImportedReport, String> {
    import_report(Path::new("r/report"), bytes, None, warmup).map_err(|error| error.to_string())
}

fn rows(list: &OperatorTimes) -> Vec<(&str, Option<&str>, Option<&str>, f64)> {
    list.operators
        .iter()
        .map(|o| (o.name.as_str(), o.operator.as_deref(), o.unit.as_deref(), o.amount))
        .collect()
}

#[test]
fn quantiles_are_runs() {
    assert_eq!(RunTimes::of_runs(&[]), None);
    let times = RunTimes::of_runs(&[5.0, 1.0, 2.0, 4.0]).unwrap();
    assert_eq!((times.ms, times.low, times.high), (3.0, Some(1.0), Some(5.0)));
    assert_eq!((times.p10, times.p90, times.n), (Some(1.0), Some(5.0), Some(4)));
    // Distances from 3 are 2, 2, 1, 1.
    assert_eq!(times.median_deviation, Some(1.5));
    let ten: Vec<f64> = (1..=10).map(f64::from).collect();
    let times = RunTimes::of_runs(&ten).unwrap();
    assert_eq!((times.p10, times.ms, times.p90), (Some(1.0), 5.5, Some(9.0)));
}

#[test]
fn ai_hub_profile() {
    let report = import(AI_HUB.as_bytes(), 1).unwrap();
    assert_eq!(report.format, ReportFormat::AiHub);
    assert_eq!(report.timed.as_deref(), Some("all_inference_times"));
    // Sorted without the first: 812 812 814 815 816 818 820 829 831.
    let runs = report.runs.unwrap();
    assert_eq!((runs.ms, runs.low, runs.high, runs.n), (0.816, Some(0.812), Some(0.831), Some(9)));
    assert_eq!(runs.statistic, Statistic::Median);
    let [cycles, micros] = &report.operators[..] else { panic!("{:?}", report.operators) };
    assert_eq!((cycles.quantity, cycles.provenance), (Quantity::Cycles, Provenance::Imported));
    assert_eq!(cycles.source, "report");
    assert_eq!(rows(cycles)[5], ("/layers.0/gelu", Some("Gelu"), Some("NPU"), 120_500.0));
    assert_eq!((cycles.operators.len(), cycles.total()), (6, 318_631.0));
    assert_eq!(micros.quantity, Quantity::Microseconds);
    assert_eq!(rows(micros), [("/layers.0/mask/Cast", Some("CAST"), Some("CPU"), 23.0)]);
    assert_eq!(
        report.notes,
        [
            "estimated_inference_time is 812 microseconds",
            "2 of 8 operators have no cycles",
            "7 of 8 operators have no microseconds"
        ]
    );
}

/// What the package writes for older jobs: no single times, null for what is missing.
#[test]
fn ai_hub_profile_without_runs() {
    let text = json!({
        "execution_summary": {"estimated_inference_time": 1500, "warm_load_time": null},
        "execution_detail": [],
    });
    let report = import(text.to_string().as_bytes(), 0).unwrap();
    let runs = report.runs.unwrap();
    assert_eq!((runs.ms, runs.statistic, runs.n), (1.5, Statistic::Unstated, None));
    assert!(report.operators.is_empty());
    let error = import(text.to_string().as_bytes(), 1).unwrap_err();
    assert!(error.contains("no warm-up can be left out"), "{error}");
}

#[test]
fn ort_trace() {
    let value: Value = serde_json::from_str(ORT).unwrap();
    let durations = |name: &str| -> Vec<f64> {
        let events = value.as_array().unwrap().iter();
        events.filter(|e| e["name"] == name).map(|e| e["dur"].as_f64().unwrap()).collect()
    };
    let runs = durations("model_run");
    assert_eq!(runs.len(), 3);
    let report = import(ORT.as_bytes(), 1).unwrap();
    assert_eq!((report.format, report.timed.as_deref()), (ReportFormat::Ort, Some("model_run")));
    assert_eq!(report.runs.unwrap().ms, (runs[1] + runs[2]) / 2.0 / 1000.0);
    let [list] = &report.operators[..] else { panic!("{:?}", report.operators) };
    assert_eq!(list.quantity, Quantity::Microseconds);
    let expected: Vec<_> =
        [("/proj/MatMul", "MatMul"), ("/softmax", "Softmax"), ("/residual", "Add")]
            .into_iter()
            .map(|(name, operator)| {
                let all = durations(&format!("{name}_kernel_time"));
                (name, Some(operator), Some("CPUExecutionProvider"), (all[1] + all[2]) / 2.0)
            })
            .collect();
    assert_eq!(rows(list), expected);
}

#[test]
fn qnn_csv() {
    let report = import(QNN.as_bytes(), 1).unwrap();
    assert_eq!(report.format, ReportFormat::QnnCsv);
    assert_eq!(report.timed.as_deref(), Some("QNN (execute) time"));
    let runs = report.runs.unwrap();
    assert_eq!((runs.ms, runs.low, runs.high, runs.n), (1.01, Some(1.0), Some(1.03), Some(3)));
    let [list] = &report.operators[..] else { panic!("{:?}", report.operators) };
    assert_eq!(list.quantity, Quantity::Cycles);
    assert_eq!(
        rows(list),
        [
            ("Input", None, None, 302.0),
            ("/layers.0/q_k_v_proj", None, None, 92_200.0),
            ("/layers.0/concat, axis 2", None, None, 1500.0),
            ("/layers.0/gelu", None, None, 120_002.0),
            ("/layers.0/gelu", None, None, 500.0),
            ("Output", None, None, 700.0),
        ]
    );
}

/// Other writers have spaces around the cells, quotes, or a further column.
#[test]
fn qnn_csv_of_other_writers() {
    let expected = import(QNN.as_bytes(), 0).unwrap();
    let spaced: String = QNN.lines().map(|line| line.replacen(',', " , ", 6) + " \r\n").collect();
    assert_eq!(import(spaced.as_bytes(), 0).unwrap(), expected);
    let quoted: String = QNN
        .lines()
        .map(|line| {
            let cells: Vec<&str> = line.splitn(7, ',').collect();
            format!("{},\"{}\"\n", cells[..6].join(","), cells[6])
        })
        .collect();
    assert_eq!(import(quoted.as_bytes(), 0).unwrap(), expected);
    let further: String = QNN
        .lines()
        .enumerate()
        .map(
            |(i, line)| {
                if i == 0 { format!("{line},ONNX Source Ops\n") } else { format!("{line},\n") }
            },
        )
        .collect();
    assert_eq!(import(further.as_bytes(), 0).unwrap(), expected);
}

#[test]
fn emulated_cycles_are_refused() {
    let error = import(EMULATOR.as_bytes(), 0).unwrap_err();
    assert_eq!(
        error,
        "r/report: qnn-csv: line 11: an execution used 0 HVX threads, so it is from the emulator on \
         a host; its cycles and times are those of the host and say nothing about a device"
    );
    // A compilation alone is no execution.
    let compiled: String = EMULATOR.lines().take(10).map(|line| format!("{line}\n")).collect();
    let error = import(compiled.as_bytes(), 0).unwrap_err();
    assert!(error.contains("has no execution"), "{error}");
}

#[test]
fn hostile_reports() {
    let event = |dur: &str, name: &str| {
        format!(
            r#"[{{"cat":"Node","name":"{name}_kernel_time","dur":{dur}}},
                {{"cat":"Session","name":"model_run","dur":1}}]"#
        )
    };
    let hub = |times: &str, detail: &str| {
        format!(
            r#"{{"execution_summary":{{"estimated_inference_time":1,"all_inference_times":{times}}},
                "execution_detail":{detail}}}"#
        )
    };
    let header = QNN.lines().next().unwrap();
    let csv = |line: &str| format!("{header}\n{line}\n");
    let layer = r#"[{"name":"a","type":"b","compute_unit":"NPU","execution_cycles":-1}]"#;
    let deep = "[".repeat(10_000);
    let long = "n".repeat(1001);
    let cases = [
        (String::new(), "empty"),
        ("<html>".into(), "web page"),
        ("hello".into(), "no known report"),
        (format!("[{{\"x\":{deep}"), "EOF while parsing"),
        (deep, "invalid type: sequence"),
        ("[]".into(), "has no model_run"),
        ("{}".into(), "missing field `execution_summary`"),
        ("[1]".into(), "invalid type"),
        (event("-1", "a"), "a dur is -1"),
        (event("1e400", "a"), "number out of range"),
        (event("1e300", "a"), "accepted: 0 to 1000000000000"),
        (event("null", "a"), "invalid type: null"),
        (event("1", "a\\u001b"), "without control characters"),
        (event("1", &long), "accepted: 1 to 1000 bytes"),
        (hub("[1, -2]", "[]"), "a value of all_inference_times is -2"),
        (hub("[1, \"a\"]", "[]"), "invalid type: string"),
        (hub("[1]", layer), "a is -1"),
        (hub("[1]", "[{}]"), "missing field `name`"),
        ("Msg Timestamp,Message\n".into(), "line 1 is no header"),
        (csv("0,NODE"), "line 2: has fewer than 7 columns"),
        (csv("0,NODE,x,US,BACKEND,ROOT,a"), "line 2: the value \"x\" is no number"),
        (csv("0,NODE,NaN,US,BACKEND,ROOT,a"), "line 2: the value is NaN"),
        (csv("0,NODE,inf,US,BACKEND,ROOT,a"), "line 2: the value is inf"),
        (csv("0,NODE,1,US,BACKEND,LEAF,a"), "the level is \"LEAF\""),
        (
            csv("0,BACKEND,1,CYCLES,BACKEND,ROOT,Accelerator (execute) time (cycles)\n\
              0,NODE,1,CYCLES,BACKEND,SUB-EVENT,\u{202e}a"),
            "without control characters",
        ),
        (csv("0,BACKEND,4,COUNT,BACKEND,ROOT,Number of HVX threads used"), "has no execution"),
    ];
    for (text, reason) in cases {
        let error = import(text.as_bytes(), 0).unwrap_err();
        assert!(error.starts_with("r/report: "), "{error}");
        assert!(error.contains(reason), "{:?}: {error}", &text[..text.len().min(80)]);
        assert!(error.len() < 400, "{error}");
    }
    let error = import(&[0xff; 9], 0).unwrap_err();
    assert!(error.contains("no known report"), "{error}");
    let format = Some(ReportFormat::QnnCsv);
    let error = import_report(Path::new("r"), &[0xff; 9], format, 0).unwrap_err().to_string();
    assert!(error.contains("invalid utf-8"), "{error}");
    for text in [AI_HUB, ORT, QNN] {
        let error = import(text.as_bytes(), 1000).unwrap_err();
        assert!(error.contains("the warm-up of 1000 leaves out"), "{error}");
    }
}

/// A file that ends early is never read as a shorter one: JSON has no end, and CSV misses the time
/// of its last execution.
#[test]
fn truncated_reports() {
    for text in [AI_HUB, ORT] {
        let text = text.trim_end();
        for length in (0..text.len()).step_by(7) {
            assert!(import(&text.as_bytes()[..length], 0).is_err(), "{length}");
        }
    }
    let whole = import(QNN.as_bytes(), 0).unwrap();
    let lines: Vec<&str> = QNN.lines().collect();
    let mut read = 0;
    for count in 0..lines.len() {
        // What ends behind a whole execution cannot be told from a shorter run.
        if let Ok(report) = import(lines[..count].join("\n").as_bytes(), 0) {
            read += 1;
            assert!(report.runs.unwrap().n < whole.runs.unwrap().n, "{count}");
            assert_eq!(report.operators[0].operators.len(), 6, "{count}");
        }
    }
    // Behind each of three executions and behind the first two lines of the next one, and without
    // the caller's time of the first.
    assert_eq!(read, 3 * 3 + 1);
}

#[test]
fn an_import_becomes_a_row() {
    let report = import(QNN.as_bytes(), 1).unwrap();
    let row = report.runs.unwrap().fill(Measurement {
        runtime: "qnn-npu".into(),
        precision: "w8a16".into(),
        dialect: Some("qnn".into()),
        kind: PartKind::Full,
        layout: Some(CacheLayout::Roll),
        context: Some(1024),
        tokens: 1,
        variant: None,
        ms: 0.0,
        statistic: Statistic::Unstated,
        low: None,
        high: None,
        n: None,
        snr_db: None,
        timing_only: false,
        source: String::new(),
        note: None,
    });
    let file = Path::new("t.json");
    let shape = LayerShape::of(&preset("spark-x2.5-1.7b").unwrap());
    let source = || (Origin::Imported, "from report".to_owned());
    let table = Table::new("a phone".into(), "its chip".into(), shape);
    let table = table.add(file, source(), row.clone()).unwrap();
    let longer = Measurement { context: Some(4096), ..row.clone() };
    let table = table.add(file, source(), longer).unwrap();
    let other = (Origin::Measured, "by hand".to_owned());
    let head = Measurement { kind: PartKind::Head, layout: None, context: None, ..row.clone() };
    let table = table.add(file, other, head).unwrap();
    let ids: Vec<&str> = table.measurements.iter().map(|row| row.source.as_str()).collect();
    assert_eq!(ids, ["imported-1", "imported-1", "measured-1"]);
    assert_eq!((table.measurements[0].ms, table.measurements[0].n), (1.01, Some(3)));
    let text = table.to_json().unwrap();
    assert_eq!(Table::from_json(file, text.as_bytes()).unwrap(), table);
    let error = table.add(file, source(), row).unwrap_err().to_string();
    assert!(error.contains("each part of a step once"), "{error}");
}

proptest! {
    #[test]
    fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300), warmup in 0usize..3) {
        for format in [None, Some(ReportFormat::AiHub), Some(ReportFormat::Ort), Some(ReportFormat::QnnCsv)] {
            let _ = import_report(Path::new("r"), &bytes, format, warmup);
        }
    }

    /// Samples with some bytes changed, or something inserted in the place of something else.
    #[test]
    fn no_change_panics(
        which in 0usize..4,
        at in any::<proptest::sample::Index>(),
        length in 0usize..40,
        with in "[\"{}\\[\\],:0-9eE.+\\- \na-zA-Z\\\\()]{0,12}",
        warmup in 0usize..3,
    ) {
        let sample = [AI_HUB, ORT, QNN, EMULATOR][which].as_bytes();
        let at = at.index(sample.len());
        let end = (at + length).min(sample.len());
        let changed = [&sample[..at], with.as_bytes(), &sample[end..]].concat();
        if let Ok(report) = import_report(Path::new("r"), &changed, None, warmup) {
            for list in &report.operators {
                prop_assert!(list.operators.iter().all(|o| o.amount.is_finite() && o.amount >= 0.0));
            }
            prop_assert!(report.runs.is_none_or(|runs| runs.ms.is_finite()));
        }
    }
}
