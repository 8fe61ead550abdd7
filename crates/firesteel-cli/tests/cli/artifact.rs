use crate::support::{
    all_outputs, argument, artifact_runners, changed_checkpoint, contents, copy_folder, export_to,
    firesteel, golden_path, names, options, refusal, spark_tiny, stdout,
};
use firesteel_artifact::{Artifact, ExportRequest, export};
use firesteel_checkpoint::Checkpoint;
use firesteel_engine::CheckpointEmbedding;
use firesteel_export::{Dialect, ExportOptions, Precision};
use firesteel_step::{CacheLayoutChoice, Embedding, Logits, Role, StepOutputs, StepSpec};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

fn mini(name: &str) -> Checkpoint {
    Checkpoint::open(&golden_path("spark").join(name)).unwrap()
}

fn mini_path() -> String {
    argument(&golden_path("spark/mini")).to_owned()
}

fn values(tensor: &firesteel_tensor::Tensor) -> Vec<f32> {
    tensor.view().to_f32().unwrap().into_owned()
}

/// Bytes of every output of every step.
fn bytes(outputs: &[StepOutputs]) -> Vec<Vec<u8>> {
    outputs
        .iter()
        .flat_map(|step| step.tensors().iter().map(|tensor| tensor.bytes().to_vec()))
        .collect()
}

/// Bytes of every output of both runners over some tokens, past the window.
fn run_bytes(artifact: &Artifact, embedding: &dyn Embedding) -> Vec<Vec<Vec<u8>>> {
    let ids: Vec<u32> = (0..12).map(|i| i * 7 % 97).collect();
    let mut runners = artifact_runners(artifact);
    runners.iter_mut().map(|runner| bytes(&all_outputs(runner.as_mut(), embedding, &ids))).collect()
}

#[test]
fn a_moved_artifact_computes_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = mini("mini");
    let here = folder.path().join("here");
    let sharded = ExportOptions { head_shards: 2, ..options(&checkpoint) };
    for (number, options) in [options(&checkpoint), sharded].into_iter().enumerate() {
        let here = here.join(number.to_string());
        let request = ExportRequest { embedding: true, ..request(&checkpoint, options, 2) };
        let artifact = export(&request, &here, &|_, _| {}).unwrap();
        let before = run_bytes(&artifact, &artifact.embedding().unwrap().unwrap());
        drop(artifact);
        let there = folder.path().join(format!("a b/ü/{number}"));
        std::fs::create_dir_all(there.parent().unwrap()).unwrap();
        std::fs::rename(&here, &there).unwrap();
        let moved = Artifact::open(&there).unwrap();
        let after = run_bytes(&moved, &moved.embedding().unwrap().unwrap());
        assert!(before == after, "{number}");
    }
    // No file knows where it was written.
    for (name, content) in contents(&folder.path().join("a b/ü/0")) {
        let place = argument(folder.path()).as_bytes();
        assert!(!content.windows(place.len()).any(|window| window == place), "{name}");
    }
}

fn request(checkpoint: &Checkpoint, options: ExportOptions, threads: usize) -> ExportRequest<'_> {
    ExportRequest {
        checkpoint,
        options,
        embedding: false,
        random_seed: None,
        force: false,
        threads,
    }
}

#[test]
fn equal_exports_have_equal_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(&spark_tiny()).unwrap();
    let half = ExportOptions {
        precision: Precision::Fp16,
        dialect: Dialect::Qnn,
        head_shards: 3,
        tokens: 5,
        ..options(&checkpoint)
    };
    for (kind, options) in [("f32", options(&checkpoint)), ("f16", half)] {
        let mut first: Option<Vec<(String, Vec<u8>)>> = None;
        for threads in [1, 2, 8, 1] {
            let request =
                ExportRequest { embedding: true, ..request(&checkpoint, options.clone(), threads) };
            let out = folder.path().join("out");
            export(&request, &out, &|_, _| {}).unwrap();
            let written = contents(&out);
            std::fs::remove_dir_all(&out).unwrap();
            let first = first.get_or_insert_with(|| written.clone());
            for ((name, content), (other_name, other)) in first.iter().zip(&written) {
                assert_eq!(name, other_name, "{kind}");
                assert!(content == other, "{kind}: {name} with {threads} threads");
            }
            assert_eq!(first.len(), written.len(), "{kind}");
        }
    }
}

#[test]
fn progress_reaches_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = mini("mini");
    let most = std::sync::Mutex::new((0, 0));
    let progress = |done: u64, total: u64| {
        let mut most = most.lock().unwrap();
        assert!(done <= total && (most.1 == 0 || most.1 == total), "{done} of {total}");
        *most = (most.0.max(done), total);
    };
    export(&request(&checkpoint, options(&checkpoint), 2), &folder.path().join("out"), &progress)
        .unwrap();
    let (done, total) = *most.lock().unwrap();
    assert!(total > 0 && done == total, "{done} of {total}");
}

/// Bytes on disk of the files of a folder.
fn disk_bytes(folder: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(folder) else { return 0 };
    // Files may vanish while they are counted.
    entries
        .flatten()
        .filter_map(|entry| entry.metadata().ok())
        .map(|data| data.blocks() * 512)
        .sum()
}

/// Starts an export of `checkpoint` to `out`. Returns it, and its hidden folder, while it writes.
fn while_writing(checkpoint: &Path, out: &Path, extra: &[&str]) -> (Child, PathBuf) {
    let before = out.exists();
    let mut export = Command::new(env!("CARGO_BIN_EXE_firesteel"))
        .args(["export", argument(checkpoint), "--precision", "fp16", "--out", argument(out)])
        .args(extra)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let parent = out.parent().unwrap();
    let prefix = format!(".{}.partial-", out.file_name().unwrap().to_str().unwrap());
    let partial = loop {
        let own = format!("{prefix}{}-", export.id());
        let found = names(parent).into_iter().find(|name| name.starts_with(&own));
        let found = found.map(|name| parent.join(name));
        // More than the model file and the copied ones: some of the weights.
        if let Some(partial) = found.filter(|folder| disk_bytes(folder) > 1 << 20) {
            break partial;
        }
        assert_eq!(export.try_wait().unwrap(), None, "the export ended before it could be killed");
        assert_eq!(out.exists(), before, "the target appeared too early");
    };
    (export, partial)
}

/// Kills an export while it writes. Returns the hidden folder that it leaves behind.
fn kill_while_writing(checkpoint: &Path, out: &Path, extra: &[&str]) -> PathBuf {
    let (mut export, partial) = while_writing(checkpoint, out, extra);
    export.kill().unwrap();
    assert_eq!(export.wait().unwrap().signal(), Some(9));
    assert!(partial.is_dir());
    partial
}

#[test]
fn a_killed_export_leaves_nothing_at_the_target() {
    // On the disk of the build, because some systems keep temporary files in memory.
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let checkpoint = folder.path().join("checkpoint");
    let path = argument(&checkpoint).to_owned();
    stdout(&["synth", "--preset", "spark-x2.5-1.7b", "--layers", "2", "--out", &path]);
    let outs = folder.path().join("outs");
    std::fs::create_dir(&outs).unwrap();
    let out = outs.join("artifact");

    kill_while_writing(&checkpoint, &out, &[]);
    assert!(!out.exists());
    assert!(!Artifact::is_artifact(&out));
    stdout(&["export", &path, "--precision", "fp16", "--out", argument(&out)]);
    assert_eq!(names(&outs), ["artifact"]);
    let artifact = Artifact::open(&out).unwrap();
    let data: u64 = artifact.manifest().data.iter().map(|data| data.bytes).sum();
    // Two layers and the tied embedding, without the small tensors that are in the model file.
    let matrices =
        131_072 * 2048 + 2 * (12 * 256 * 2048 + 8 * 2048 + 2048 * 2048 + 3 * 2048 * 6656);
    assert_eq!(data, 2 * (matrices + 5 * 2048));

    // An old artifact survives the death of its successor.
    let before = std::fs::read(out.join("manifest.json")).unwrap();
    let modified = std::fs::metadata(out.join("model.onnx.data")).unwrap().modified().unwrap();
    let partial = kill_while_writing(&checkpoint, &out, &["--force", "--layers", "0:1"]);
    assert_eq!(std::fs::read(out.join("manifest.json")).unwrap(), before);
    let data = std::fs::metadata(out.join("model.onnx.data")).unwrap();
    assert_eq!(data.modified().unwrap(), modified);
    Artifact::open(&out).unwrap();
    let small = ["export", &mini_path(), "--force", "--out", argument(&out)];
    stdout(&small);
    assert!(!partial.exists());
    assert_eq!(names(&outs), ["artifact"]);

    // A checkpoint that becomes shorter ends the export, with a reason and without a trace.
    let (export, partial) = while_writing(&checkpoint, &outs.join("other"), &[]);
    let weights = std::fs::File::options().write(true).open(checkpoint.join("model.safetensors"));
    weights.unwrap().set_len(1 << 16).unwrap();
    let output = export.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let talk = String::from_utf8(output.stderr).unwrap();
    assert_eq!(
        talk,
        "error: a model file became shorter while it was read, or its disk failed; nothing was \
         written, start again when the file is whole\n"
    );
    assert!(!partial.exists());
    assert_eq!(names(&outs), ["artifact"]);
}

#[test]
fn only_an_artifact_is_replaced_and_only_with_force() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let to = |name: &str, extra: &[&str]| {
        let out = at(name);
        refusal(&[&["export", &mini_path(), "--out", argument(&out)], extra].concat())
            .replace(argument(folder.path()), "FOLDER")
    };
    let export_at = |name: &str, extra: &[&str]| {
        stdout(&[&["export", &mini_path(), "--out", argument(&at(name))], extra].concat());
    };
    export_at("artifact", &["--context", "64"]);
    let old = contents(&at("artifact"));
    let talk = to("artifact", &["--context", "65"]);
    assert!(talk.contains("FOLDER/artifact exists already"), "{talk}");
    assert!(contents(&at("artifact")) == old);
    export_at("artifact", &["--context", "65", "--force"]);
    assert_eq!(Artifact::open(&at("artifact")).unwrap().manifest().step.context, 65);
    // Force is no reason to fail where nothing is, or an empty folder.
    export_at("fresh", &["--force"]);
    std::fs::create_dir(at("empty")).unwrap();
    export_at("empty", &["--force"]);

    std::fs::create_dir(at("other")).unwrap();
    std::fs::write(at("other").join("precious"), "x").unwrap();
    copy_folder(&golden_path("spark/mini"), &at("checkpoint"));
    // Notes of the user beside our files are not ours to remove.
    copy_folder(&at("artifact"), &at("annotated"));
    std::fs::write(at("annotated").join("notes.txt"), "precious").unwrap();
    std::fs::write(at("file"), "x").unwrap();
    std::os::unix::fs::symlink("artifact", at("link")).unwrap();
    std::os::unix::fs::symlink("nowhere", at("dangling")).unwrap();
    let cases = [
        ("other", "FOLDER/other exists and is no firesteel artifact; it is not replaced"),
        ("checkpoint", "FOLDER/checkpoint exists and is no firesteel artifact; it is not replaced"),
        (
            "annotated",
            "FOLDER/annotated exists and holds \"notes.txt\", which is no part of the artifact; it \
             is not replaced",
        ),
        ("file", "FOLDER/file exists and is no folder; it is not replaced"),
        ("link", "FOLDER/link exists and is no folder; it is not replaced"),
        ("dangling", "FOLDER/dangling exists and is no folder; it is not replaced"),
    ];
    for (name, expected) in cases {
        let talk = to(name, &["--force"]);
        assert!(talk.contains(expected), "{name}: {talk}");
    }
    // The source itself, or a folder around it, least of all.
    for out in [at("checkpoint"), folder.path().to_owned()] {
        let checkpoint = at("checkpoint");
        let arguments = ["export", argument(&checkpoint), "--force", "--out", argument(&out)];
        let talk = refusal(&arguments);
        assert!(talk.contains("holds the checkpoint; choose another folder"), "{talk}");
    }
    assert_eq!(names(&at("other")), ["precious"]);
    assert_eq!(names(&at("checkpoint")), ["config.json", "model.safetensors"]);
    assert!(at("annotated/notes.txt").is_file() && at("annotated/model.onnx").is_file());
    assert_eq!(std::fs::read_to_string(at("file")).unwrap(), "x");
    assert!(at("link").is_symlink());
    let hidden = names(folder.path()).into_iter().filter(|name| name.starts_with('.'));
    assert_eq!(hidden.count(), 0);
}

/// Many programs call a file manifest.json; only ours makes a folder an artifact.
#[test]
fn a_folder_with_another_manifest_is_not_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("web");
    std::fs::create_dir(&out).unwrap();
    std::fs::write(out.join("manifest.json"), r#"{"name": "a web application"}"#).unwrap();
    std::fs::write(out.join("index.html"), "precious").unwrap();
    let talk = refusal(&["export", &mini_path(), "--force", "--out", argument(&out)]);
    assert!(talk.contains("exists and is no firesteel artifact; it is not replaced"), "{talk}");
    assert_eq!(names(&out), ["index.html", "manifest.json"]);
}

#[test]
fn a_failed_export_leaves_the_old_artifact() {
    let folder = tempfile::tempdir().unwrap();
    let large = folder.path().join("large");
    let name = "model.layers.2.mlp.up_proj.weight";
    changed_checkpoint(&golden_path("spark/mini"), &large, &|_| {}, &|tensor, _, values| {
        if tensor == name {
            values[5] = 1e5;
            values[700] = -1e6;
        }
    });
    let outs = folder.path().join("outs");
    let out = outs.join("artifact");
    let export = ["export", argument(&large), "--force", "--out", argument(&out)];
    stdout(&export);
    let old = contents(&out);
    let talk = refusal(&[&export[..], &["--precision", "fp16"]].concat());
    let expected =
        format!("{name} holds 2 values beyond the range of f16; export with --precision fp32");
    assert!(talk.contains(&expected), "{talk}");
    assert_eq!(names(&outs), ["artifact"]);
    assert!(contents(&out) == old);
    // The same weights in a slice without that layer fit.
    stdout(&[&export[..], &["--precision", "fp16", "--layers", "0:2", "--no-lm-head"]].concat());

    // Stored in 16 bits, as published.
    let brain = folder.path().join("brain");
    copy_folder(&spark_tiny(), &brain);
    let file = brain.join("model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let start = bytes.as_ptr().addr();
    let parsed = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let place = parsed.tensor(name).unwrap().data().as_ptr().addr() - start;
    // 99840 in bfloat16.
    bytes[place..place + 2].copy_from_slice(&0x47c3u16.to_le_bytes());
    std::fs::write(&file, bytes).unwrap();
    let arguments = ["export", argument(&brain), "--precision", "fp16", "--force", "--out"];
    let talk = refusal(&[&arguments[..], &[argument(&out)]].concat());
    let expected =
        format!("{name} holds 1 values beyond the range of f16; export with --precision fp32");
    assert!(talk.contains(&expected), "{talk}");

    for (value, shown) in [(f32::NAN, "NaN"), (f32::INFINITY, "infinity")] {
        let bad = folder.path().join(shown);
        changed_checkpoint(&golden_path("spark/mini"), &bad, &|_| {}, &|tensor, _, values| {
            if tensor == name {
                values[6143] = value;
            }
        });
        let fresh = outs.join(shown);
        let talk = refusal(&["export", argument(&bad), "--out", argument(&fresh)]);
        let expected = format!("{name} holds 1 values that are not finite");
        assert!(talk.contains(&expected), "{shown}: {talk}");
        assert_eq!(names(&outs), ["artifact"]);
    }
}

/// Several exports to one target: one wins, the others say so, and no hidden folder stays.
#[test]
fn exports_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("artifact");
    let run = |extra: &[&str]| {
        let start = |_| {
            Command::new(env!("CARGO_BIN_EXE_firesteel"))
                .args(["export", &mini_path(), "--out", argument(&out)])
                .args(extra)
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        };
        let children: Vec<_> = (0..4).map(start).collect();
        let outputs = children.into_iter().map(|child| child.wait_with_output().unwrap());
        let outputs: Vec<_> = outputs
            .map(|output| (output.status.code(), String::from_utf8(output.stderr).unwrap()))
            .collect();
        Artifact::open(&out).unwrap();
        assert_eq!(names(folder.path()), ["artifact"]);
        outputs
    };
    let outputs = run(&[]);
    let lost: Vec<_> = outputs.iter().filter(|(code, _)| *code != Some(0)).collect();
    assert_eq!(lost.len(), 3, "{outputs:?}");
    for (code, talk) in lost {
        assert!(*code == Some(1) && talk.contains("exists"), "{talk}");
    }
    let outputs = run(&["--force"]);
    assert!(outputs.iter().all(|(code, _)| *code == Some(0)), "{outputs:?}");
}

#[test]
fn shapes_of_the_target_path() {
    let folder = tempfile::tempdir().unwrap();
    let mini = mini_path();
    std::fs::write(folder.path().join("file"), "x").unwrap();
    let run = |out: &str| {
        Command::new(env!("CARGO_BIN_EXE_firesteel"))
            .args(["export", &mini, "--out", out])
            .current_dir(folder.path())
            .output()
            .unwrap()
    };
    for (out, place) in [
        ("plain", "plain"),
        ("slash/", "slash"),
        ("./dot", "dot"),
        ("nested/missing/parents", "nested/missing/parents"),
        ("nested/missing/../sibling", "nested/sibling"),
        (".hidden", ".hidden"),
        ("with space", "with space"),
        ("name.partial-", "name.partial-"),
    ] {
        let output = run(out);
        let talk = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{out}: {talk}");
        Artifact::open(&folder.path().join(place)).unwrap();
    }
    let before = names(folder.path());
    for (out, expected) in [
        (".", "exists already"),
        ("..", "is no name for something new"),
        ("nested/..", "is no name for something new"),
        ("/", "is no name for something new"),
        ("", "a value is required for '--out <DIR>'"),
        ("file", "exists already"),
        ("file/below", "Not a directory"),
        ("slash/", "exists already"),
    ] {
        let output = run(out);
        let talk = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{out}: {talk}");
        assert!(talk.contains(expected), "{out}: {talk}");
    }
    assert_eq!(names(folder.path()), before);
}

struct Tampering {
    about: &'static str,
    /// Changes the manifest, or files of the folder.
    change: fn(&Path, &mut Value),
    expected: &'static str,
}

fn append(folder: &Path, name: &str, bytes: &[u8]) {
    use std::io::Write;
    let mut file = std::fs::File::options().append(true).open(folder.join(name)).unwrap();
    file.write_all(bytes).unwrap();
}

const TAMPERINGS: &[Tampering] = &[
    Tampering {
        about: "another format",
        change: |_, json| json["format"] = json!("onnx-folder"),
        expected: "FOLDER/manifest.json: is not the manifest of a firesteel artifact",
    },
    Tampering {
        about: "a later version",
        change: |_, json| json["format_version"] = json!(3),
        expected: "this program reads 2; export the artifact again",
    },
    Tampering {
        about: "no version",
        change: |_, json| drop(json.as_object_mut().unwrap().shift_remove("format_version")),
        expected: "this program reads 2; export the artifact again",
    },
    Tampering {
        about: "a missing key",
        change: |_, json| drop(json.as_object_mut().unwrap().shift_remove("step")),
        expected: "FOLDER/manifest.json: missing field `step`",
    },
    Tampering {
        about: "a key of another type",
        change: |_, json| json["step"]["context"] = json!("64"),
        expected: "FOLDER/manifest.json: invalid type: string \"64\", expected usize",
    },
    Tampering {
        about: "a longer data file",
        change: |folder, _| append(folder, "model.onnx.data", &[0]),
        expected: "FOLDER/model.onnx.data: has 1007873 bytes, the manifest has 1007872",
    },
    Tampering {
        about: "another length of the data",
        change: |_, json| json["data"][0]["bytes"] = json!(7),
        expected: "FOLDER/model.onnx.data: has 1007872 bytes, the manifest has 7",
    },
    Tampering {
        about: "no data file",
        change: |folder, _| std::fs::remove_file(folder.join("model.onnx.data")).unwrap(),
        expected: "FOLDER/model.onnx.data",
    },
    Tampering {
        about: "a longer model",
        change: |folder, _| append(folder, "model.onnx", &[0]),
        expected: "FOLDER/model.onnx: has ",
    },
    Tampering {
        about: "a changed byte in the model",
        change: |folder, _| {
            let file = folder.join("model.onnx");
            let mut bytes = std::fs::read(&file).unwrap();
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
            std::fs::write(file, bytes).unwrap();
        },
        expected: "FOLDER/model.onnx: SHA-256 is ",
    },
    Tampering {
        about: "no model",
        change: |folder, _| std::fs::remove_file(folder.join("model.onnx")).unwrap(),
        expected: "FOLDER/model.onnx",
    },
    Tampering {
        about: "a model in another folder",
        change: |_, json| json["graphs"][0]["file"] = json!("../model.onnx"),
        expected: "FOLDER/manifest.json: \"../model.onnx\" is not a bare file name",
    },
    Tampering {
        about: "a model at an absolute path",
        change: |_, json| json["graphs"][0]["file"] = json!("/etc/passwd"),
        expected: "FOLDER/manifest.json: \"/etc/passwd\" is not a bare file name",
    },
    Tampering {
        about: "data in another folder",
        change: |_, json| json["data"][0]["file"] = json!("sub/data"),
        expected: "FOLDER/manifest.json: \"sub/data\" is not a bare file name",
    },
    Tampering {
        about: "data that is the parent",
        change: |_, json| json["data"][0]["file"] = json!(".."),
        expected: "FOLDER/manifest.json: \"..\" is not a bare file name",
    },
    Tampering {
        about: "a copied file in another folder",
        change: |_, json| json["copied"][0]["name"] = json!("../config.json"),
        expected: "FOLDER/manifest.json: \"../config.json\" is not a bare file name",
    },
    Tampering {
        about: "another config",
        change: |folder, _| append(folder, "config.json", b" "),
        expected: "FOLDER/config.json: has 965 bytes, the manifest has 964",
    },
    Tampering {
        about: "another config of the same length",
        change: |folder, _| {
            let file = folder.join("config.json");
            let text = std::fs::read_to_string(&file).unwrap();
            std::fs::write(file, text.replace("10000", "20000")).unwrap();
        },
        expected: "FOLDER/config.json: SHA-256 is ",
    },
    Tampering {
        about: "an embedding in another folder",
        change: |_, json| {
            json["embedding"] =
                json!({"kind": "file", "file": "../e", "dtype": "f32", "shape": [97, 64]});
        },
        expected: "FOLDER/manifest.json: \"../e\" is not a bare file name",
    },
    Tampering {
        about: "an initializer that is not there",
        change: |_, json| json["embedding"]["name"] = json!("nothing"),
        expected: "FOLDER/model.onnx: has no initializer nothing of f32 [97, 64]",
    },
    Tampering {
        about: "an embedding of another shape",
        change: |_, json| json["embedding"]["shape"] = json!([64, 97]),
        expected: "has no initializer model.embedding.weight of f32 [64, 97]",
    },
    Tampering {
        about: "no graph",
        change: |_, json| json["graphs"] = json!([]),
        expected: "FOLDER/manifest.json: the first graph is not the step",
    },
    Tampering {
        about: "a step that is called a head",
        change: |_, json| {
            json["graphs"][0]["role"] = json!({"head": {"rows": {"start": 0, "end": 97}}})
        },
        expected: "FOLDER/manifest.json: the first graph is not the step",
    },
    Tampering {
        about: "two steps",
        change: |_, json| {
            let step = json["graphs"][0].clone();
            json["graphs"].as_array_mut().unwrap().push(step);
        },
        expected: "FOLDER/manifest.json: model.onnx: rows are missing or repeated",
    },
    Tampering {
        about: "a layer without a name",
        change: |_, json| drop(json["graphs"][0]["layer_hidden"].as_array_mut().unwrap().pop()),
        expected: "FOLDER/manifest.json: layer_hidden does not name every layer",
    },
    Tampering {
        about: "a layer of another name",
        change: |_, json| json["graphs"][0]["layer_hidden"][3] = json!("nothing"),
        expected: "FOLDER/model.onnx: value nothing: is not in the graph",
    },
    Tampering {
        about: "another context",
        change: |_, json| json["step"]["context"] = json!(65),
        expected: "cache_length is 64, but this layer and context make it 65",
    },
    Tampering {
        about: "another number of tokens",
        change: |_, json| json["step"]["tokens"] = json!(2),
        expected: "the geometry makes",
    },
    Tampering {
        about: "no tokens",
        change: |_, json| json["step"]["tokens"] = json!(0),
        expected: "tokens is 0, but 1 to 2^24 is accepted",
    },
    Tampering {
        about: "a huge context",
        change: |_, json| json["step"]["context"] = json!(u64::MAX),
        expected: "context is 18446744073709551615, but 1 to 2^24 is accepted",
    },
    Tampering {
        about: "huge heads",
        change: |_, json| json["step"]["head_dim"] = json!(1 << 25),
        expected: "head_dim is 33554432, but 1 to 2^24 is accepted",
    },
    Tampering {
        about: "no window",
        change: |_, json| json["step"]["sliding_window"] = Value::Null,
        expected: "sliding_window is None, but 2 or more is",
    },
    Tampering {
        about: "no rotary embedding",
        change: |_, json| json["step"]["rope_full"] = Value::Null,
        expected: "rope is full_attention, but each kind in use has one",
    },
    Tampering {
        about: "an odd rotary embedding",
        change: |_, json| json["step"]["rope_full"]["dims"] = json!(3),
        expected: "rotary dims is 3, but an even part of head_dim is",
    },
    Tampering {
        about: "heads that do not group",
        change: |_, json| json["step"]["num_attention_heads"] = json!(3),
        expected: "num_attention_heads is 3, but a multiple of the key/value heads is",
    },
    Tampering {
        about: "another shape of an input",
        change: |_, json| json["step"]["inputs"][0]["shape"] = json!([1, 1, 65]),
        expected: "the geometry makes",
    },
    Tampering {
        about: "an input too few",
        change: |_, json| drop(json["step"]["inputs"].as_array_mut().unwrap().pop()),
        expected: "expected 23 inputs, got 22",
    },
    Tampering {
        about: "an output of another name",
        change: |_, json| json["step"]["outputs"][1]["name"] = json!("k_new_1"),
        expected: "the geometry makes",
    },
    Tampering {
        about: "another type",
        change: |_, json| json["step"]["dtype"] = json!("f16"),
        expected: "the geometry makes",
    },
    Tampering {
        about: "a mask that is no number",
        change: |_, json| json["step"]["mask_value"] = Value::Null,
        expected: "FOLDER/manifest.json: invalid type: null, expected f32",
    },
    Tampering {
        about: "a contract of another model",
        change: |folder, json| {
            // The graph of another context, with its right length and hash.
            let checkpoint = mini("mini");
            let options = ExportOptions { context: 32, ..options(&checkpoint) };
            let other = export_to(&checkpoint, options, &folder.with_extension("other"));
            let graph = &other.manifest().graphs[0];
            std::fs::copy(other.graph_path(graph), folder.join("model.onnx")).unwrap();
            json["graphs"][0]["bytes"] = json!(graph.bytes);
            json["graphs"][0]["sha256"] = json!(graph.sha256);
        },
        expected: "FOLDER/model.onnx: value mask_full: input is f32 [1, 1, 1, 33], the contract has \
                   mask_full f32 [1, 1, 1, 65]",
    },
];

#[test]
fn a_tampered_artifact_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = mini("mini");
    let original = folder.path().join("original");
    drop(export_to(&checkpoint, options(&checkpoint), &original));
    let mut wrong = Vec::new();
    for (number, Tampering { about, change, expected }) in TAMPERINGS.iter().enumerate() {
        let copy = folder.path().join(number.to_string());
        copy_folder(&original, &copy);
        let file = copy.join("manifest.json");
        let mut json: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        change(&copy, &mut json);
        std::fs::write(&file, json.to_string()).unwrap();
        let opened = Artifact::open(&copy).and_then(|artifact| {
            artifact.evaluator(true)?;
            artifact.embedding().map(drop)
        });
        let error = opened.map_or_else(|error| error.to_string(), |()| "nothing".into());
        let error = error.replace(argument(&copy), "FOLDER");
        if !error.contains(expected) {
            wrong.push(format!("{about}: {expected:?} in {error}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Opening does not read the weights; who asks for it, and every check, does.
#[test]
fn damaged_weights_are_found() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = mini("mini");
    let out = folder.path().join("out");
    let artifact = with_table(&checkpoint, &options(&checkpoint), &out);
    artifact.verify().unwrap();
    stdout(&["inspect", argument(&out), "--verify"]);
    let talk = refusal(&["inspect", &mini_path(), "--verify"]);
    assert!(talk.contains("--verify goes with an artifact"), "{talk}");
    for name in ["model.onnx.data", "embedding.bin"] {
        let file = out.join(name);
        let original = std::fs::read(&file).unwrap();
        for place in [0, original.len() / 2, original.len() - 1] {
            let mut bytes = original.clone();
            bytes[place] ^= 0x10;
            std::fs::write(&file, bytes).unwrap();
            let expected = format!("{}: is damaged: XXH3 is ", file.display());
            let error = Artifact::open(&out).unwrap().verify().unwrap_err().to_string();
            assert!(error.contains(&expected), "{name} at {place}: {error}");
        }
        let expected = format!("{}: is damaged", file.display());
        let mini = mini_path();
        let (tiny, text) = ("models/spark-tiny", "tests/golden/spark-tiny/heldout.txt");
        for arguments in [
            &["inspect", argument(&out), "--verify"][..],
            &["check", "step", argument(&out), "--against", &mini, "--min-snr=-100"],
            &["check", "fidelity", argument(&out), "--against", tiny, "--text", text],
        ] {
            let talk = refusal(arguments);
            assert!(talk.contains(&expected), "{arguments:?}: {talk}");
        }
        std::fs::write(&file, original).unwrap();
    }
}

#[test]
fn a_broken_manifest_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("manifest.json");
    for (text, expected) in [
        ("", "EOF while parsing"),
        ("{", "EOF while parsing"),
        ("[]", "expected struct"),
        ("{}", "is not the manifest of a firesteel artifact"),
        (r#"{"format": "firesteel-artifact", "format": "x"}"#, "duplicate field `format`"),
    ] {
        std::fs::write(&file, text).unwrap();
        let error = Artifact::open(folder.path()).unwrap_err().to_string();
        assert!(error.contains(argument(&file)) && error.contains(expected), "{text}: {error}");
    }
    // 64 MiB of spaces are no manifest, and are not read to the end.
    std::fs::File::create(&file).unwrap().set_len((64 << 20) + 1).unwrap();
    let error = Artifact::open(folder.path()).unwrap_err().to_string();
    assert!(error.contains("is larger than 67108864 bytes"), "{error}");
    std::fs::remove_file(&file).unwrap();
    let error = Artifact::open(folder.path()).unwrap_err().to_string();
    assert!(error.contains(argument(&file)), "{error}");
}

/// The parts of a sharded head make the vocabulary, in order.
#[test]
fn tampered_head_parts_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = mini("mini");
    let out = folder.path().join("out");
    let options = ExportOptions { head_shards: 3, ..options(&checkpoint) };
    drop(export_to(&checkpoint, options, &out));
    let file = out.join("manifest.json");
    let original: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    type Change = fn(&mut Value);
    let cases: [(Change, &str); 4] = [
        (
            |json| json["graphs"].as_array_mut().unwrap().swap(1, 2),
            "head_1.onnx: rows are missing or repeated",
        ),
        (
            |json| drop(json["graphs"].as_array_mut().unwrap().pop()),
            "the parts of the head do not make the vocabulary",
        ),
        (
            |json| json["graphs"][2]["role"]["head"]["rows"]["start"] = json!(31),
            "head_1.onnx: rows are missing or repeated",
        ),
        (
            |json| json["graphs"][3]["role"]["head"]["rows"]["end"] = json!(96),
            "the parts of the head do not make the vocabulary",
        ),
    ];
    for (change, expected) in cases {
        let mut json = original.clone();
        change(&mut json);
        std::fs::write(&file, json.to_string()).unwrap();
        let error = Artifact::open(&out).unwrap_err().to_string();
        assert!(error.ends_with(expected), "{expected}: {error}");
    }
}

/// Bytes of the data files of an artifact, which must be those that the manifest lists.
fn data_files(artifact: &Artifact) -> Vec<(String, u64)> {
    let listed = artifact.manifest().data.iter().map(|data| (data.file.clone(), data.bytes));
    let listed: Vec<_> = listed.collect();
    for (name, bytes) in &listed {
        assert_eq!(
            std::fs::metadata(artifact.folder().join(name)).unwrap().len(),
            *bytes,
            "{name}"
        );
    }
    let on_disk: BTreeSet<String> = names(artifact.folder()).into_iter().collect();
    let mut known: BTreeSet<String> = listed.iter().map(|(name, _)| name.clone()).collect();
    known.insert("manifest.json".into());
    known.extend(artifact.manifest().graphs.iter().map(|graph| graph.file.clone()));
    known.extend(artifact.manifest().copied.iter().map(|file| file.name.clone()));
    assert_eq!(on_disk, known);
    listed
}

/// Exports with and without a file for the embedding.
fn with_table(checkpoint: &Checkpoint, options: &ExportOptions, out: &Path) -> Artifact {
    let request = ExportRequest { embedding: true, ..request(checkpoint, options.clone(), 2) };
    export(&request, out, &|_, _| {}).unwrap()
}

#[test]
fn tied_weights_are_on_disk_once() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(&spark_tiny()).unwrap();
    // All parameters but the nine norms of 256, which are small enough for the model file.
    const PARAMETERS: u64 = 2_889_984 - 9 * 256;
    const EMBEDDING: u64 = 2048 * 256;
    for (precision, size) in [(Precision::Fp32, 4), (Precision::Fp16, 2)] {
        let at = |name: &str| folder.path().join(format!("{name}{size}"));
        let options = ExportOptions { precision, ..options(&checkpoint) };
        // A tensor starts at a multiple of 4096 bytes; the four gates are the only shorter ones.
        let gaps = 4 * (4096 - size * 4 * 256);
        let plain = export_to(&checkpoint, options.clone(), &at("plain"));
        assert_eq!(data_files(&plain), [("model.onnx.data".into(), size * PARAMETERS + gaps)]);
        let separate = with_table(&checkpoint, &options, &at("separate"));
        let rest = size * (PARAMETERS - EMBEDDING) + gaps;
        let expected =
            [("embedding.bin".to_owned(), size * EMBEDDING), ("model.onnx.data".to_owned(), rest)];
        assert_eq!(data_files(&separate), expected);
        // Sharding cuts the same table; its parts are places in the file.
        let sharded = ExportOptions { head_shards: 3, ..options.clone() };
        let sharded = with_table(&checkpoint, &sharded, &at("sharded"));
        assert_eq!(data_files(&sharded), expected);
        // Without the file each part has its own rows and its own copy of the small norm.
        let sharded = ExportOptions { head_shards: 3, ..options.clone() };
        let sharded = export_to(&checkpoint, sharded, &at("parts"));
        let files = data_files(&sharded);
        let expected = [
            ("model.onnx.data", rest),
            ("head_0.onnx.data", size * 682 * 256),
            ("head_1.onnx.data", size * 683 * 256),
            ("head_2.onnx.data", size * 683 * 256),
        ];
        assert_eq!(files, expected.map(|(name, bytes)| (name.to_owned(), bytes)));
        // Without the head the table is needed for nothing, unless it is asked for.
        let headless = ExportOptions { logits: Logits::Hidden, ..options };
        let plain = export_to(&checkpoint, headless.clone(), &at("headless"));
        assert_eq!(data_files(&plain), [("model.onnx.data".into(), rest)]);
        assert!(plain.embedding().unwrap().is_none());
        let separate = with_table(&checkpoint, &headless, &at("headless-table"));
        assert_eq!(data_files(&separate).len(), 2);
        assert!(separate.embedding().unwrap().is_some());
    }
}

#[test]
fn an_untied_head_has_its_own_weights() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = mini("mini-untied");
    let options = options(&checkpoint);
    // All parameters but the 17 norms and 8 gates, and one of the two tables.
    const PARAMETERS: u64 = 261_312 - 17 * 64 - 8 * 4 * 64;
    let plain = export_to(&checkpoint, options.clone(), &folder.path().join("plain"));
    assert_eq!(data_files(&plain), [("model.onnx.data".into(), 4 * (PARAMETERS - 97 * 64))]);
    assert_eq!(plain.manifest().embedding, None);
    let table = with_table(&checkpoint, &options, &folder.path().join("table"));
    let expected = [
        ("embedding.bin".to_owned(), 4 * 97 * 64),
        ("model.onnx.data".to_owned(), 4 * (PARAMETERS - 97 * 64)),
    ];
    assert_eq!(data_files(&table), expected);
    let report = stdout(&["inspect", argument(table.folder())]);
    assert!(report.contains("1 token a step, head stored\n"), "{report}");
    // The runners read the head, not the embedding.
    let embedding = CheckpointEmbedding::new(Arc::new(mini("mini-untied")));
    let tied = export_to(&mini("mini"), options, &folder.path().join("tied"));
    let [untied, tied] = [&plain, &tied].map(|artifact| run_bytes(artifact, &embedding));
    assert!(untied[0][0] != tied[0][0] && untied[1][0] != tied[1][0]);
    // All but the logits are the same.
    assert!(untied[0][1..17] == tied[0][1..17] && untied[1][1..17] == tied[1][1..17]);
}

#[test]
fn the_embedding_file_is_the_table() {
    let folder = tempfile::tempdir().unwrap();
    for (name, precision) in [
        ("mini", Precision::Fp32),
        ("mini", Precision::Fp16),
        ("mini-bf16-sharded", Precision::Fp32),
        ("mini-f16", Precision::Fp16),
        ("mini-untied", Precision::Fp16),
    ] {
        let checkpoint = mini(name);
        let options = ExportOptions { precision, ..options(&checkpoint) };
        let out = folder.path().join(format!("{name}-{precision:?}"));
        let artifact = with_table(&checkpoint, &options, &out);
        let weight = checkpoint.embedding();
        let mut expected = vec![0u8; weight.element_count() * precision.dtype().size()];
        weight.convert(0, precision.dtype(), &mut expected).unwrap();
        assert!(std::fs::read(out.join("embedding.bin")).unwrap() == expected, "{name}");
        // The host's lookup and the file agree, and so does the tied initializer.
        let ids = [0, 96, 41];
        let mut rows = vec![0f32; 3 * 64];
        artifact.embedding().unwrap().unwrap().lookup(&ids, &mut rows).unwrap();
        let mut table = vec![0f32; 97 * 64];
        firesteel_tensor::read_f32(precision.dtype(), &expected, &mut table).unwrap();
        let picked: Vec<f32> =
            ids.iter().flat_map(|&id| table[id as usize * 64..][..64].to_vec()).collect();
        assert_eq!(rows, picked, "{name}");
        if name != "mini-untied" {
            let plain = export_to(&checkpoint, options, &out.with_extension("plain"));
            let mut same = vec![0f32; 3 * 64];
            plain.embedding().unwrap().unwrap().lookup(&ids, &mut same).unwrap();
            assert_eq!(rows, same, "{name}");
        }
    }
}

#[test]
fn a_sharded_head_makes_the_same_logits() {
    let folder = tempfile::tempdir().unwrap();
    let ids: Vec<u32> = (0..12).map(|i| i * 11 % 97).collect();
    for (name, tokens, logits) in [
        ("mini", 1, Logits::Last),
        ("mini-untied", 1, Logits::Last),
        ("mini", 3, Logits::Last),
        ("mini", 3, Logits::All),
    ] {
        let about = format!("{name}, {tokens} tokens, {logits:?}");
        let checkpoint = Arc::new(mini(name));
        let whole = ExportOptions { tokens, logits, ..options(&checkpoint) };
        let parts = ExportOptions { head_shards: 3, ..whole.clone() };
        let at = |name: &str| folder.path().join(format!("{about} {name}"));
        let parts = with_table(&checkpoint, &parts, &at("parts"));
        let whole = export_to(&checkpoint, whole, &at("whole"));
        let embedding = CheckpointEmbedding::new(Arc::clone(&checkpoint));

        // Rows and names of the parts.
        let graphs = &parts.manifest().graphs;
        let files: Vec<&str> = graphs.iter().map(|graph| graph.file.as_str()).collect();
        assert_eq!(files, ["model.onnx", "head_0.onnx", "head_1.onnx", "head_2.onnx"], "{about}");
        assert_eq!(parts.manifest().step.logits, Logits::Hidden, "{about}");
        assert_eq!(parts.manifest().contract().unwrap(), whole.manifest().step, "{about}");
        let mut nodes = BTreeSet::new();
        let mut count = 0;
        for graph in graphs {
            for node in parts.read_graph(graph).unwrap().nodes() {
                nodes.insert(node.name.clone());
                count += 1;
            }
        }
        assert_eq!(nodes.len(), count, "{about}: node names repeat");

        let mut pairs: Vec<_> =
            artifact_runners(&whole).into_iter().zip(artifact_runners(&parts)).collect();
        for (whole, parts) in &mut pairs {
            let runner = whole.name().to_owned();
            let whole = all_outputs(whole.as_mut(), &embedding, &ids);
            let parts = all_outputs(parts.as_mut(), &embedding, &ids);
            assert_eq!(whole.len(), 12 / tokens, "{about}");
            for (whole, parts) in whole.iter().zip(&parts) {
                let pairs = whole.tensors().iter().zip(parts.tensors());
                for (number, (whole, parts)) in pairs.enumerate() {
                    if number > 0 {
                        assert!(whole.bytes() == parts.bytes(), "{about}: {runner}");
                        continue;
                    }
                    // The order of a sum may depend on the number of rows.
                    let whole: Vec<f64> = values(whole).into_iter().map(f64::from).collect();
                    let snr = crate::support::snr(&whole, &values(parts));
                    assert!(snr > 120.0, "{about}: {runner}, {snr} dB");
                }
            }
        }
    }
}

fn spec_lines(spec: &StepSpec) -> Vec<String> {
    let line = |t: &firesteel_step::TensorSpec| format!("{} {:?}", t.name, t.shape);
    spec.inputs.iter().chain(&spec.outputs).map(line).collect()
}

struct Slice<'a> {
    layers: &'a str,
    layout: &'a str,
    first: usize,
    unused: &'a [&'a str],
    lines: &'a [&'a str],
}

/// Names, order and shapes of the slices, as the Python exporter has them.
#[test]
fn slices_have_the_contract_of_their_layers() {
    let folder = tempfile::tempdir().unwrap();
    let mini = mini_path();
    let full = ["cos_full", "sin_full", "mask_full"];
    let sliding = ["cos_sw", "sin_sw", "mask_sw"];
    let cases = [
        Slice {
            layers: "sliding",
            layout: "auto",
            first: 0,
            unused: &full,
            lines: &[
                "x [1, 1, 64]",
                "cos_sw [1, 1, 1, 16]",
                "sin_sw [1, 1, 1, 16]",
                "mask_sw [1, 1, 1, 8]",
                "k_cache_0 [1, 2, 7, 16]",
                "v_cache_0 [1, 2, 7, 16]",
                "hidden [1, 1, 64]",
                "k_new_0 [1, 2, 1, 16]",
                "v_new_0 [1, 2, 1, 16]",
            ],
        },
        Slice {
            layers: "sliding",
            layout: "roll",
            first: 0,
            unused: &full,
            lines: &[
                "x [1, 1, 64]",
                "cos_sw [1, 1, 1, 16]",
                "sin_sw [1, 1, 1, 16]",
                "mask_sw [1, 1, 1, 8]",
                "k_cache_0 [1, 2, 8, 16]",
                "v_cache_0 [1, 2, 8, 16]",
                "hidden [1, 1, 64]",
                "k_new_0 [1, 2, 8, 16]",
                "v_new_0 [1, 2, 8, 16]",
            ],
        },
        Slice {
            layers: "full",
            layout: "auto",
            first: 3,
            unused: &sliding,
            lines: &[
                "x [1, 1, 64]",
                "cos_full [1, 1, 1, 4]",
                "sin_full [1, 1, 1, 4]",
                "mask_full [1, 1, 1, 21]",
                "k_cache_0 [1, 2, 20, 16]",
                "v_cache_0 [1, 2, 20, 16]",
                "hidden [1, 1, 64]",
                "k_new_0 [1, 2, 1, 16]",
                "v_new_0 [1, 2, 1, 16]",
            ],
        },
        Slice {
            layers: "1:3",
            layout: "auto",
            first: 1,
            unused: &full,
            lines: &[
                "x [1, 1, 64]",
                "cos_sw [1, 1, 1, 16]",
                "sin_sw [1, 1, 1, 16]",
                "mask_sw [1, 1, 1, 8]",
                "k_cache_0 [1, 2, 7, 16]",
                "v_cache_0 [1, 2, 7, 16]",
                "k_cache_1 [1, 2, 7, 16]",
                "v_cache_1 [1, 2, 7, 16]",
                "hidden [1, 1, 64]",
                "k_new_0 [1, 2, 1, 16]",
                "v_new_0 [1, 2, 1, 16]",
                "k_new_1 [1, 2, 1, 16]",
                "v_new_1 [1, 2, 1, 16]",
            ],
        },
        Slice {
            layers: "2:4",
            layout: "ring",
            first: 2,
            unused: &[],
            lines: &[
                "x [1, 1, 64]",
                "cos_sw [1, 1, 1, 16]",
                "sin_sw [1, 1, 1, 16]",
                "cos_full [1, 1, 1, 4]",
                "sin_full [1, 1, 1, 4]",
                "mask_sw [1, 1, 1, 8]",
                "mask_full [1, 1, 1, 21]",
                "k_cache_0 [1, 2, 7, 16]",
                "v_cache_0 [1, 2, 7, 16]",
                "k_cache_1 [1, 2, 20, 16]",
                "v_cache_1 [1, 2, 20, 16]",
                "hidden [1, 1, 64]",
                "k_new_0 [1, 2, 1, 16]",
                "v_new_0 [1, 2, 1, 16]",
                "k_new_1 [1, 2, 1, 16]",
                "v_new_1 [1, 2, 1, 16]",
            ],
        },
    ];
    for Slice { layers, layout, first, unused, lines } in cases {
        let about = format!("{layers} {layout}");
        let out = folder.path().join(about.replace(':', "-"));
        let report = stdout(&[
            "export",
            &mini,
            "--out",
            argument(&out),
            "--layers",
            layers,
            "--cache-layout",
            layout,
            "--context",
            "20",
            "--no-lm-head",
            "--check",
            "--json",
        ]);
        let report: Value = serde_json::from_str(&report).unwrap();
        assert_eq!(report["unused_inputs"], json!(unused), "{about}");
        assert_eq!(report["first_layer"], first, "{about}");
        assert_eq!(report["include_lm_head"], false, "{about}");
        assert_eq!(report["head"], Value::Null, "{about}");
        assert_eq!(report["check"]["passed"], true, "{about}");
        let artifact = Artifact::open(&out).unwrap();
        assert_eq!(spec_lines(&artifact.manifest().step), lines, "{about}");
        // The graph on disk says the same as the manifest.
        let graph = artifact.read_graph(&artifact.manifest().graphs[0]).unwrap();
        let on_disk: Vec<String> = (graph.inputs().iter().chain(graph.outputs()))
            .map(|id| format!("{} {:?}", graph.value(*id).name, graph.value(*id).shape))
            .collect();
        assert_eq!(on_disk, lines, "{about}");
    }
}

/// A warning says that the logits of a slice are not the model's.
#[test]
fn logits_of_a_slice_are_warned_about() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let output =
        firesteel(&["export", &mini_path(), "--layers", "0:4", "--out", argument(&out), "--json"]);
    assert!(output.status.success());
    assert_eq!(
        String::from_utf8(output.stderr).unwrap(),
        "warning: the logits of layers 0:4 alone are not the model's; --no-lm-head leaves them \
         out\n"
    );
    serde_json::from_slice::<Value>(&output.stdout).unwrap();
}

/// Steps of many tokens compute what steps of one compute, whatever the layout.
#[test]
fn chunks_larger_than_the_window() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = Arc::new(mini("mini"));
    let embedding = CheckpointEmbedding::new(Arc::clone(&checkpoint));
    let ids: Vec<u32> = (0..48).map(|i| i * 13 % 97).collect();
    let single = export_to(&checkpoint, options(&checkpoint), &folder.path().join("single"));
    let mut single = single.evaluator(false).unwrap();
    let expected = all_outputs(single.as_mut(), &embedding, &ids);
    let row = |step: usize| {
        let logits = expected[step].get(single.spec(), Role::Logits).unwrap();
        values(logits).into_iter().map(f64::from).collect::<Vec<_>>()
    };
    for (tokens, layout, logits) in [
        (8, CacheLayoutChoice::Auto, Logits::Last),
        (12, CacheLayoutChoice::Roll, Logits::All),
        (12, CacheLayoutChoice::Ring, Logits::All),
        (48, CacheLayoutChoice::Roll, Logits::Last),
        (48, CacheLayoutChoice::Auto, Logits::All),
    ] {
        let about = format!("{tokens} tokens, {layout:?}, {logits:?}");
        let options =
            ExportOptions { tokens, cache_layout: layout, logits, ..options(&checkpoint) };
        let artifact = export_to(&checkpoint, options, &folder.path().join(&about));
        let shape = match logits {
            Logits::All => vec![1, tokens, 97],
            _ => vec![1, 97],
        };
        assert_eq!(artifact.manifest().step.outputs[0].shape, shape, "{about}");
        for runner in &mut artifact_runners(&artifact) {
            let outputs = all_outputs(runner.as_mut(), &embedding, &ids);
            let rows = shape.iter().product::<usize>() / 97;
            for (chunk, outputs) in outputs.iter().enumerate() {
                let found = values(outputs.get(runner.spec(), Role::Logits).unwrap());
                for (i, found) in found.chunks_exact(97).enumerate() {
                    let step = (chunk + 1) * tokens - rows + i;
                    let snr = crate::support::snr(&row(step), found);
                    let about = format!("{about}, {}, position {step}", runner.name());
                    assert!(snr > 110.0, "{about}: {snr} dB");
                }
            }
        }
    }
}

#[test]
fn random_weights_need_only_a_config() {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("config.json");
    std::fs::copy(golden_path("spark/mini").join("config.json"), &config).unwrap();
    let run = |source: &Path, name: &str, seed: &str| {
        let out = folder.path().join(name);
        let report = stdout(&[
            "export",
            argument(source),
            "--random-weights",
            "--seed",
            seed,
            "--out",
            argument(&out),
            "--check",
            "--json",
        ]);
        let report: Value = serde_json::from_str(&report).unwrap();
        assert_eq!(report["check"]["passed"], true, "{name}");
        assert_eq!(report["check"]["tokens"], 96, "{name}");
        contents(&out)
    };
    let first = run(&config, "file", "7");
    assert!(run(folder.path(), "folder", "7") == first);
    let other = run(&config, "other", "8");
    let data = |files: &[(String, Vec<u8>)]| {
        files.iter().find(|(name, _)| name == "model.onnx.data").unwrap().1.clone()
    };
    assert!(data(&other) != data(&first));
    // Weights that lie beside the config are not read.
    assert!(run(&golden_path("spark/mini"), "checkpoint", "7") == first);
    let artifact = Artifact::open(&folder.path().join("file")).unwrap();
    let model = &artifact.manifest().model;
    assert_eq!(model.random_seed, Some(7));
    assert!(model.checkpoint.is_empty());
    let text = stdout(&["inspect", argument(artifact.folder())]);
    assert!(text.contains("random weights (seed 7): for profiling only\n"), "{text}");
    // A preset needs no file at all.
    let out = folder.path().join("preset");
    stdout(&[
        "export",
        "spark-x2.5-1.7b",
        "--random-weights",
        "--layers",
        "full",
        "--no-lm-head",
        "--precision",
        "fp16",
        "--out",
        argument(&out),
    ]);
    assert_eq!(Artifact::open(&out).unwrap().manifest().step.hidden_size, 2048);
}

fn op_counts(extra: &[&str]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let report = stdout(
        &[&["export", &mini_path(), "--context", "64", "--json", "--out", argument(&out)], extra]
            .concat(),
    );
    let report: Value = serde_json::from_str(&report).unwrap();
    let counts = report["op_counts"]["model.onnx"].as_object().unwrap();
    let counts: Vec<String> = counts.iter().map(|(op, count)| format!("{count} {op}")).collect();
    let shown = ["opset", "dtype"].map(|key| report[key].to_string().replace('"', ""));
    // What is on disk passes the dialect's rules.
    let artifact = Artifact::open(&out).unwrap();
    for graph in &artifact.manifest().graphs {
        let findings = firesteel_export::lint(
            &artifact.read_graph(graph).unwrap(),
            artifact.manifest().options.dialect,
        );
        assert_eq!(findings, []);
    }
    format!("opset {}, {}\n{}\n{}", shown[0], shown[1], counts.join(", "), report["wide"])
}

#[test]
fn operators_of_each_dialect() {
    insta::assert_snapshot!(op_counts(&[]), @r#"
    opset 18, f32
    65 Add, 36 Concat, 17 Div, 8 Erf, 49 Gemm, 16 MatMul, 114 Mul, 16 Neg, 17 ReduceMean, 57 Reshape, 8 Sigmoid, 8 Softmax, 28 Split, 17 Sqrt, 8 Transpose
    "every tensor is f32"
    "#);
    insta::assert_snapshot!(op_counts(&["--precision", "fp16"]), @r#"
    opset 18, f16
    17 Abs, 65 Add, 36 Concat, 51 Div, 8 Erf, 49 Gemm, 16 MatMul, 17 Max, 148 Mul, 16 Neg, 17 ReduceMax, 17 ReduceMean, 57 Reshape, 8 Sigmoid, 8 Softmax, 28 Split, 17 Sqrt, 8 Transpose
    "every tensor is f16; RMSNorm divides by the row's largest magnitude before it squares, so the sum of squares cannot overflow in any reader's arithmetic"
    "#);
    insta::assert_snapshot!(op_counts(&["--dialect", "qnn"]), @r#"
    opset 23, f32
    40 Add, 36 Concat, 8 Gelu, 49 Gemm, 16 MatMul, 56 Mul, 16 Neg, 17 RMSNormalization, 57 Reshape, 8 Sigmoid, 8 Softmax, 28 Split, 8 Transpose
    "every tensor is f32"
    "#);
    insta::assert_snapshot!(op_counts(&["--dialect", "qnn", "--precision", "fp16"]), @r#"
    opset 23, f16
    48 Add, 36 Concat, 8 Gelu, 49 Gemm, 16 MatMul, 72 Mul, 16 Neg, 17 RMSNormalization, 57 Reshape, 8 Softmax, 28 Split, 8 Tanh, 8 Transpose
    "every tensor is f16; RMSNormalization accumulates in f32 inside the op (stash_type 1)"
    "#);
    insta::assert_snapshot!(op_counts(&["--dialect", "qnn", "--gelu", "tanh"]), @r#"
    opset 23, f32
    40 Add, 36 Concat, 8 Gelu, 49 Gemm, 16 MatMul, 56 Mul, 16 Neg, 17 RMSNormalization, 57 Reshape, 8 Sigmoid, 8 Softmax, 28 Split, 8 Transpose
    "every tensor is f32"
    "#);
    insta::assert_snapshot!(op_counts(&["--gelu", "sigmoid"]), @r#"
    opset 18, f32
    57 Add, 36 Concat, 17 Div, 49 Gemm, 16 MatMul, 106 Mul, 16 Neg, 17 ReduceMean, 57 Reshape, 16 Sigmoid, 8 Softmax, 28 Split, 17 Sqrt, 8 Transpose
    "every tensor is f32"
    "#);
    insta::assert_snapshot!(op_counts(&["--tokens", "12", "--cache-layout", "roll"]), @r#"
    opset 18, f32
    65 Add, 36 Concat, 17 Div, 8 Erf, 49 Gemm, 16 MatMul, 114 Mul, 16 Neg, 17 ReduceMean, 73 Reshape, 8 Sigmoid, 25 Slice, 8 Softmax, 28 Split, 17 Sqrt, 48 Transpose
    "every tensor is f32"
    "#);
}
