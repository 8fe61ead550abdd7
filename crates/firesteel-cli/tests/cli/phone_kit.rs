//! `firesteel profile phone-kit`, and `check outputs` on what comes back.

use crate::support::{
    argument, copy_folder, export_to, firesteel, golden_path, names, options, refusal, spark_tiny,
    stdout,
};
use firesteel_checkpoint::Checkpoint;
use firesteel_export::{Dialect, ExportOptions, Precision};
use firesteel_ort::qnn::{HtpModel, HtpOptions, Limits, WorkerCommand};
use firesteel_ort::{OrtModel, OrtOptions};
use firesteel_tensor::{DType, SharedBytes, Tensor, TensorView, read_f32};
use insta::assert_snapshot;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

fn parse(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

fn read(path: &Path) -> Value {
    parse(&std::fs::read_to_string(path).unwrap())
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// What a device would write that computes what is expected.
fn ideal_outputs(kit: &Path, to: &Path) {
    let description = read(&kit.join("kit.json"));
    for part in description["parts"].as_array().unwrap() {
        let name = part["name"].as_str().unwrap();
        std::fs::create_dir_all(to.join(name)).unwrap();
        for step in 0..description["steps"].as_u64().unwrap() {
            let from = kit.join(name).join("expected").join(format!("step_{step:03}"));
            copy_folder(&from, &to.join(name).join(format!("Result_{step}")));
        }
    }
}

/// A kit of the trained model in floats, with the outputs of the engine.
fn kit_in(folder: &Path) -> (PathBuf, String) {
    let (artifact, kit) = (folder.join("artifact"), folder.join("kit"));
    let checkpoint = Checkpoint::open(&spark_tiny()).unwrap();
    export_to(&checkpoint, options(&checkpoint), &artifact);
    let tiny = spark_tiny();
    let write = ["profile", "phone-kit", argument(&artifact), "--out", argument(&kit)];
    let text = stdout(&[&write[..], &["--steps", "3", "--against", argument(&tiny)]].concat());
    let text = text.replace(argument(&kit), "KIT");
    (kit, text)
}

#[test]
fn what_is_in_a_kit() {
    let folder = tempfile::tempdir().unwrap();
    let (kit, text) = kit_in(folder.path());
    assert_snapshot!(text, @"
    wrote KIT
    3 steps of 1 tokens on model, 0.8 MiB of inputs and expected outputs; expected is what engine computes
    ");
    assert_eq!(names(&kit), ["README.md", "kit.json", "model", "models", "run.sh"]);
    assert_eq!(names(&kit.join("models")), ["model.onnx", "model.onnx.data"]);
    assert_eq!(names(&kit.join("model")), ["expected", "input_list.txt", "inputs"]);
    let list = std::fs::read_to_string(kit.join("model/input_list.txt")).unwrap();
    assert_eq!(list.lines().count(), 3);
    assert!(list.starts_with("x:=model/inputs/step_000/x.raw cos_sw:="), "{list}");
    for item in list.split_whitespace() {
        let (_, file) = item.split_once(":=").unwrap();
        assert!(kit.join(file).is_file(), "{file}");
    }
    // The first step has nothing in its caches, the second what the first returned.
    let keys = |step: &str| {
        std::fs::read(kit.join("model/inputs").join(step).join("k_cache_0.raw")).unwrap()
    };
    assert!(keys("step_000").iter().all(|byte| *byte == 0));
    let new = std::fs::read(kit.join("model/expected/step_000/k_new_0.raw")).unwrap();
    assert_eq!(keys("step_001")[..256], new[..256]);
    let readme = std::fs::read_to_string(kit.join("README.md")).unwrap();
    for part in
        ["3 steps of 1 tokens", "`engine`", "| model | models/model.onnx | 15 | 9 |", "https://"]
    {
        assert!(readme.contains(part), "{part}: {readme}");
    }
    let script = kit.join("run.sh");
    let bash = |arguments: &[&str]| Command::new("bash").args(arguments).output().unwrap();
    let checked = bash(&["-n", argument(&script)]);
    assert!(checked.status.success(), "{checked:?}");
    let text = std::fs::read_to_string(&script).unwrap();
    assert!(text.contains("set -euo pipefail"), "{text}");
    for placeholder in ["@PARTS@", "@MODELS@", "@BINARIES@", "@ARCH@", "@TARGET@", "@STEPS@"] {
        assert!(!text.contains(placeholder) && !readme.contains(placeholder), "{placeholder}");
    }
    for (verb, reason) in
        [("outputs", "set QNN_SDK_ROOT"), ("times", "set ORT_DIR"), ("x", "usage")]
    {
        let refused = bash(&[argument(&script), verb]);
        assert_eq!(refused.status.code(), Some(1), "{verb}");
        let talk = String::from_utf8(refused.stderr).unwrap();
        assert!(talk.contains(reason), "{talk}");
    }
}

/// The script with an adb that writes down what it is told, and for `pull` makes a folder.
#[test]
fn the_script_talks_to_adb() {
    let folder = tempfile::tempdir().unwrap();
    let (kit, _) = kit_in(folder.path());
    let tools = folder.path().join("tools");
    std::fs::create_dir(&tools).unwrap();
    let adb = tools.join("adb");
    let log = folder.path().join("log");
    std::fs::write(
        &adb,
        "#!/bin/sh\necho \"$*\" >> \"$LOG\"\n[ \"$1\" != pull ] || mkdir -p \"$3\"\n",
    )
    .unwrap();
    std::fs::set_permissions(&adb, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", argument(&tools), std::env::var("PATH").unwrap());
    for (verb, expected) in [
        ("times", "--plugin_eps QNN"),
        (
            "times-cpu",
            "./onnxruntime_perf_test -e cpu -I -m times -r 7 -p 'model-trace' 'models/model.onnx'",
        ),
    ] {
        let _ = std::fs::remove_file(&log);
        let mut script = Command::new("bash");
        script.arg(kit.join("run.sh")).arg(verb).env("PATH", &path).env("LOG", &log);
        let output = script.env("ORT_DIR", &tools).env("RUNS", "7").output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let told = std::fs::read_to_string(&log).unwrap();
        for part in [
            "push models /data/local/tmp/firesteel-kit/",
            "push model/inputs model/input_list.txt /data/local/tmp/firesteel-kit/model/",
            "pull /data/local/tmp/firesteel-kit/traces times/model",
            expected,
        ] {
            assert!(told.contains(part), "{verb}: {part}: {told}");
        }
        assert_eq!(names(&kit.join("times")), ["model"], "{verb}");
    }
}

#[test]
fn kits_are_refused_for_what_cannot_run() {
    let folder = tempfile::tempdir().unwrap();
    let artifact = folder.path().join("artifact");
    let (kit, _) = kit_in(folder.path());
    let tiny = spark_tiny();
    let new = folder.path().join("new");
    let write = ["profile", "phone-kit", argument(&artifact), "--out"];
    let fresh = [&write[..], &[argument(&new)]].concat();
    for (arguments, reason) in [
        ([&write[..], &[argument(&kit)]].concat(), "exists already"),
        (vec!["profile", "phone-kit", argument(&tiny), "--out", argument(&new)], "is a checkpoint"),
        ([&fresh[..], &["--steps", "65"]].concat(), "1 to 64 steps of 1 tokens"),
        ([&fresh[..], &["--steps", "0"]].concat(), "1 to 64 steps of 1 tokens"),
        (
            [&fresh[..], &["--ids", "1,2", "--against", argument(&tiny)]].concat(),
            "4 steps of 1 tokens take 4, and there are 2",
        ),
        ([&fresh[..], &["--graph", "decode"]].concat(), "--graph goes with"),
        ([&fresh[..], &["--expect", "checkpoint"]].concat(), "--against names the checkpoint"),
    ] {
        let talk = refusal(&arguments);
        assert!(talk.contains(reason), "{arguments:?}: {talk}");
    }
    assert_eq!(names(folder.path()), ["artifact", "kit"]);
}

#[test]
fn what_comes_back_is_compared() {
    let folder = tempfile::tempdir().unwrap();
    let (kit, back) = (kit_in(folder.path()).0, folder.path().join("back"));
    ideal_outputs(&kit, &back);
    let check = ["check", "outputs", argument(&kit), argument(&back)];
    assert_snapshot!(stdout(&check), @"
    a device against engine: 3 tokens in steps of 1
                               SNR  max difference
    new keys and values  identical         0.000e0
    logits               identical         0.000e0
    top-1 100.0 % (0 of 3 tokens are ties), top-5 100.0 %, KL 0.00e0 mean 0.00e0 max, top-20 log-probability difference 0.00e0
    passed: the bar over all steps is 100 dB
    ");
    let report = parse(&stdout(&[&check[..], &["--json"]].concat()));
    assert_eq!(json!([report["output"]["db"], report["output"]["identical"]]), json!([null, true]));

    // One percent more in the logits of one step is noise 40 dB below them.
    let logits = back.join("model/Result_1/logits.raw");
    let whole = std::fs::read(&logits).unwrap();
    let mut values = vec![0f32; whole.len() / 4];
    read_f32(DType::F32, &whole, &mut values).unwrap();
    values.iter_mut().for_each(|value| *value *= 1.01);
    std::fs::write(&logits, floats(&values)).unwrap();
    let failed = firesteel(&[&check[..], &["--json"]].concat());
    assert_eq!(failed.status.code(), Some(1));
    let report = parse(&String::from_utf8(failed.stdout).unwrap());
    let step = report["steps"][1]["output"]["db"].as_f64().unwrap();
    assert!((step - 40.0).abs() < 1e-3, "{step}");
    assert_eq!(json!([report["passed"], report["logits"]["top1"]]), json!([false, 1.0]));
    let tensors = report["tensors"].as_array().unwrap();
    let bad: Vec<&Value> = tensors.iter().filter(|t| !t["first_bad"].is_null()).collect();
    assert_eq!(bad.len(), 1);
    assert_eq!(json!([bad[0]["name"], bad[0]["first_bad"]]), json!(["logits", 1]));
    let text = String::from_utf8(firesteel(&check).stdout).unwrap();
    assert!(text.contains("model logits is first below the bar in step 1"), "{text}");
    assert!(text.contains("FAILED: the bar over all steps is 100 dB"), "{text}");
    stdout(&[&check[..], &["--min-snr", "39"]].concat());
    // What is not finite is wrong, not unreadable.
    std::fs::write(&logits, floats(&vec![f32::NAN; values.len()])).unwrap();
    let failed = firesteel(&[&check[..], &["--min-snr", "-900"]].concat());
    assert_eq!(failed.status.code(), Some(1));
    assert!(failed.stderr.is_empty(), "{failed:?}");
}

#[test]
fn files_that_are_not_a_kits_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (kit, back) = (kit_in(folder.path()).0, folder.path().join("back"));
    ideal_outputs(&kit, &back);
    // The folder of the only graph may be left out, and logs beside the results are not looked at.
    let inner = back.join("model");
    std::fs::write(inner.join("qnn-profiling-data_0.log"), "log").unwrap();
    let check = ["check", "outputs", argument(&kit), argument(&inner)];
    stdout(&check);
    let refused = |change: &dyn Fn(), undo: &dyn Fn(), reason: &str| {
        change();
        let talk = refusal(&check);
        assert!(talk.contains(reason), "{reason}: {talk}");
        undo();
        stdout(&check);
    };
    let file = |name: &str| inner.join("Result_2").join(name);
    let whole = std::fs::read(file("logits.raw")).unwrap();
    let put = |bytes: &[u8]| std::fs::write(file("logits.raw"), bytes).unwrap();
    for length in [0, 4096, 8188] {
        let reason = format!("has {length} bytes; [1, 2048] of f32 has 8192");
        refused(&|| put(&whole[..length]), &|| put(&whole), &reason);
    }
    let longer = [&whole[..], &[0; 4]].concat();
    refused(&|| put(&longer), &|| put(&whole), "has 8196 bytes; [1, 2048] has 8192");
    let rename = |from: &str, to: &str| std::fs::rename(file(from), file(to)).unwrap();
    refused(
        &|| rename("k_new_1.raw", "k.raw"),
        &|| rename("k.raw", "k_new_1.raw"),
        "k_new_1.raw or k_new_1_native.raw is missing",
    );
    let copy = |to: &str| {
        std::fs::copy(file("k_new_1.raw"), file(to)).unwrap();
    };
    let remove = |name: &str| std::fs::remove_file(file(name)).unwrap();
    let reason = "\"more.raw\" is no output of the graph";
    refused(&|| copy("more.raw"), &|| remove("more.raw"), reason);
    refused(&|| copy("k_new_1_native.raw"), &|| remove("k_new_1_native.raw"), "keep one");
    let results = |from: &str, to: &str| std::fs::rename(inner.join(from), inner.join(to)).unwrap();
    refused(
        &|| results("Result_1", "gone"),
        &|| results("gone", "Result_1"),
        "Result_1 is missing; the kit has 3 steps",
    );
    let more = inner.join("Result_3");
    refused(
        &|| std::fs::create_dir(&more).unwrap(),
        &|| std::fs::remove_dir(&more).unwrap(),
        "Result_3 is no step of the kit",
    );
    let artifact = folder.path().join("artifact");
    let talk = refusal(&["check", "outputs", argument(&artifact), argument(&back)]);
    assert!(talk.contains("is no kit"), "{talk}");
    let talk = refusal(&["check", "outputs", argument(&kit)]);
    assert!(talk.contains("<OUTPUTS>"), "{talk}");
    for nothing in ["--runner=ort", "--steps=3", "--greedy=0", "--no-layers", "--prompt=text"] {
        let talk = refusal(&[&check[..], &[nothing]].concat());
        assert!(talk.contains("unexpected argument"), "{nothing}: {talk}");
    }
    let text = std::fs::read_to_string(kit.join("kit.json")).unwrap();
    for (from, to, reason) in [
        ("\"steps\": 3", "\"steps\": 0", "0 steps of 1 tokens"),
        ("\"name\": \"logits\"", "\"name\": \"../logits\"", "is no plain name"),
        ("\"name\": \"model\"", "\"name\": \"/\"", "is no plain name"),
        ("\"name\": \"model\"", "\"name\": \"a'b\"", "is no plain name"),
        ("\"format_version\": 1", "\"format_version\": 2", "this program reads 1; make the kit"),
        ("\"min_snr\"", "\"max_snr\"", "unknown field"),
        ("\"vocab_size\": 2048", "\"vocab_size\": 2047", "do not make rows of 2047"),
    ] {
        assert!(text.contains(from), "{from}");
        std::fs::write(kit.join("kit.json"), text.replacen(from, to, 1)).unwrap();
        let talk = refusal(&check);
        assert!(talk.contains(reason), "{to}: {talk}");
    }
    let many = text.replace("\"all_logits\": false", "\"all_logits\": true");
    let many = many.replace("\"tokens\": 1,", "\"tokens\": 9000000000000,");
    std::fs::write(kit.join("kit.json"), many).unwrap();
    let talk = refusal(&check);
    assert!(talk.contains("are not those of 9000000000000 tokens"), "{talk}");
    std::fs::write(kit.join("kit.json"), &text[..text.len() / 2]).unwrap();
    refusal(&check);
}

/// Runs a graph: its file, its inputs, its outputs by name.
type RunGraph<'a> = dyn FnMut(&Path, &[(&str, TensorView<'_>)]) -> Vec<(String, Tensor)> + 'a;

/// Runs every graph of a kit from its raw files, and writes what it returns as `qnn-net-run` does.
fn run_kit(kit: &Path, to: &Path, run: &mut RunGraph<'_>) {
    let description = read(&kit.join("kit.json"));
    for part in description["parts"].as_array().unwrap() {
        let name = part["name"].as_str().unwrap();
        let model = kit.join("models").join(part["model"].as_str().unwrap());
        for step in 0..description["steps"].as_u64().unwrap() {
            let folder = kit.join(name).join("inputs").join(format!("step_{step:03}"));
            let inputs = part["inputs"].as_array().unwrap().iter().map(|input| {
                let name = input["name"].as_str().unwrap();
                let bytes = std::fs::read(folder.join(format!("{name}.raw"))).unwrap();
                let dtype: DType = serde_json::from_value(input["dtype"].clone()).unwrap();
                let shape: Vec<usize> = serde_json::from_value(input["shape"].clone()).unwrap();
                (name, Tensor::new(dtype, shape, SharedBytes::new(Arc::new(bytes))).unwrap())
            });
            let inputs: Vec<(&str, Tensor)> = inputs.collect();
            let views: Vec<_> = inputs.iter().map(|(name, t)| (*name, t.view())).collect();
            let result = to.join(name).join(format!("Result_{step}"));
            std::fs::create_dir_all(&result).unwrap();
            for (name, tensor) in run(&model, &views) {
                std::fs::write(result.join(format!("{name}_native.raw")), tensor.bytes()).unwrap();
            }
        }
    }
}

/// ONNX Runtime on this machine computes from the raw files what the kit expects: floats, halves
/// with the head in parts, and integers.
#[test]
fn the_graphs_of_a_kit_run_from_its_files() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let checkpoint = Checkpoint::open(&spark_tiny()).unwrap();
    let half = ExportOptions {
        precision: Precision::Fp16,
        head_shards: 2,
        tokens: 4,
        layers: 1..4,
        ..options(&checkpoint)
    };
    export_to(&checkpoint, options(&checkpoint), &at("single"));
    export_to(&checkpoint, half, &at("half"));
    let (tiny, text) = (spark_tiny(), golden_path("spark-tiny/calibration.txt"));
    let (tiny, ranges, integers) = (argument(&tiny), at("ranges.json"), at("integers"));
    let text = ["calibrate", tiny, "--text", argument(&text), "--samples", "4"];
    stdout(&[&text[..], &["--tokens", "64", "--out", argument(&ranges)]].concat());
    let quantize = ["quantize", "graph", tiny, "--scheme", "w8a16", "--ranges", argument(&ranges)];
    stdout(&[&quantize[..], &["--context", "64", "--out", argument(&integers)]].concat());
    for (name, bar, parts) in [("single", "100", 1), ("half", "40", 3), ("integers", "60", 1)] {
        let at = |suffix: &str| folder.path().join(format!("{name}{suffix}"));
        let (artifact, kit, back) = (at(""), at("-kit"), at("-back"));
        let write = ["profile", "phone-kit", argument(&artifact), "--out", argument(&kit)];
        // Integers are held against what their own graph writes down.
        let expect = if name == "integers" { "artifact" } else { "checkpoint" };
        let steps = ["--steps", "6", "--against", tiny, "--expect", expect];
        stdout(&[&write[..], &steps].concat());
        let mut open: Option<(PathBuf, OrtModel)> = None;
        run_kit(&kit, &back, &mut |path, inputs| {
            if open.as_ref().is_none_or(|(open, _)| open != path) {
                open = Some((path.into(), OrtModel::open(path, &OrtOptions::default()).unwrap()));
            }
            let (_, model) = open.as_mut().unwrap();
            let names: Vec<String> = model.outputs().iter().map(|port| port.name.clone()).collect();
            names.into_iter().zip(model.run(inputs).unwrap()).collect()
        });
        assert_eq!(names(&back).len(), parts, "{name}");
        let check = ["check", "outputs", argument(&kit), argument(&back), "--min-snr", bar];
        let report = firesteel(&[&check[..], &["--json"]].concat());
        let text = String::from_utf8(report.stdout).unwrap();
        let talk = String::from_utf8(report.stderr).unwrap();
        assert!(report.status.success(), "{name}: {text}{talk}");
        let report = parse(&text);
        assert_eq!(report["output"]["count"], 6 * 2048, "{name}");
        assert_eq!(report["entries"]["identical"], false, "{name}: nothing was computed");
    }
}

/// The parts of a compiled step, each run alone on the emulator from the raw files.
#[test]
fn a_compiled_kit_runs_on_the_emulator() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let checkpoint = Checkpoint::open(&spark_tiny()).unwrap();
    let half =
        ExportOptions { precision: Precision::Fp16, dialect: Dialect::Qnn, ..options(&checkpoint) };
    let (artifact, compiled, kit, back) = (at("artifact"), at("compiled"), at("kit"), at("back"));
    export_to(&checkpoint, half, &artifact);
    let compile = ["compile", argument(&artifact), "--soc", "sm8750", "--out", argument(&compiled)];
    stdout(&[&compile[..], &["--split", "2"]].concat());
    let tiny = spark_tiny();
    let write = ["profile", "phone-kit", argument(&compiled), "--out", argument(&kit)];
    let steps = ["--steps", "3", "--against", argument(&tiny)];
    stdout(&[&write[..], &steps].concat());
    let description = read(&kit.join("kit.json"));
    assert_eq!(description["soc"], "sm8750");
    let parts = description["parts"].as_array().unwrap().iter();
    let parts: Vec<&str> = parts.map(|part| part["name"].as_str().unwrap()).collect();
    assert_eq!(parts, ["decode-layers-0-2", "decode-layers-2-4", "decode-head-0"]);
    let script = std::fs::read_to_string(kit.join("run.sh")).unwrap();
    for line in ["arch='79'", "binaries=('decode-layers-0-2_qnn.bin' "] {
        assert!(script.contains(line), "{script}");
    }
    let worker = WorkerCommand {
        program: env!("CARGO_BIN_EXE_firesteel").into(),
        arguments: vec!["worker".into()],
    };
    let limits = Limits { memory: None, time: Duration::from_secs(300) };
    let options = HtpOptions { library: None, worker, limits };
    let mut open: Option<(PathBuf, HtpModel)> = None;
    run_kit(&kit, &back, &mut |path, inputs| {
        if open.as_ref().is_none_or(|(open, _)| open != path) {
            open = Some((path.into(), HtpModel::open(path, &options).unwrap()));
        }
        let (_, model) = open.as_mut().unwrap();
        let names: Vec<String> = model.outputs().iter().map(|port| port.name.clone()).collect();
        names.into_iter().zip(model.run(inputs).unwrap()).collect()
    });
    let check = ["check", "outputs", argument(&kit), argument(&back), "--min-snr", "40"];
    let text = stdout(&check);
    assert!(text.starts_with("a device (sm8750) against engine: 3 tokens"), "{text}");
}
