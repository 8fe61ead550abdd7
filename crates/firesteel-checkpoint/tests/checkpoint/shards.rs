//! The index and the files it names, which may be hostile.

use crate::common::{Failures, Model, all_values, serialize, write_index};
use firesteel_checkpoint::Checkpoint;
use serde_json::{Map, Value, json};
use std::os::unix::fs::symlink;
use std::path::Path;

const NORM: &str = "model.norm.weight";
const HASH: &str = "0123456789abcdef0123456789abcdef01234567";

fn open(dir: &Path) -> Result<Checkpoint, String> {
    Checkpoint::open(dir).map_err(|e| e.to_string())
}

/// Writes a sharded model, changes the folder and the weight map, and opens it.
fn open_with(edit: impl FnOnce(&Path, &mut Map<String, Value>)) -> Result<Checkpoint, String> {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("model");
    let mut weight_map = Model::tiny().write_sharded(&dir, 3);
    edit(&dir, &mut weight_map);
    write_index(&dir, &weight_map);
    open(&dir)
}

#[test]
fn names_that_leave_the_folder_are_refused_and_not_opened() {
    // Each of these exists or can be reached, so that only the rule keeps it closed.
    let long = "x".repeat(5000);
    let too_long = format!("{}.safetensors", "x".repeat(250));
    let cases = [
        ("../x.safetensors", "a separator in the name"),
        ("/etc/hostname", "a separator in the name"),
        ("a/../../x.safetensors", "a separator in the name"),
        ("a\\..\\x.safetensors", "a separator in the name"),
        ("sub/x.safetensors", "a separator in the name"),
        ("C:x.safetensors", "a separator in the name"),
        ("x\0.safetensors", "a control character in the name"),
        ("", "an empty name"),
        (".", "not a file name"),
        ("..", "not a file name"),
        ("config.json", "not a .safetensors file"),
        (too_long.as_str(), "longer than 255 bytes"),
    ];
    let mut failures = Failures::default();
    for (shard, reason) in cases {
        let result = open_with(|dir, weight_map| {
            let outside = serialize(&Model::tiny().tensors);
            std::fs::create_dir(dir.join("sub")).unwrap();
            std::fs::create_dir(dir.join("a")).unwrap();
            std::fs::write(dir.join("sub/x.safetensors"), &outside).unwrap();
            std::fs::write(dir.parent().unwrap().join("x.safetensors"), &outside).unwrap();
            weight_map.insert(NORM.into(), json!(shard));
        });
        let entry = format!("model.safetensors.index.json: entry {NORM:?}: ");
        let mut quoted = format!("{shard:?}");
        quoted.truncate(80);
        failures.expect_error(shard, result, &[&entry, &quoted, " is refused: ", reason]);
    }
    let result = open_with(|_, weight_map| {
        weight_map.insert(NORM.into(), json!(long));
    });
    let parts =
        ["weight_map: \"model.norm.weight\": a name of 5000 bytes, \"xxxx", "1024 accepted"];
    failures.expect_error("long", result, &parts);
    failures.finish();
}

#[test]
fn entries_that_the_shards_do_not_keep_are_refused() {
    type Edit = fn(&Path, &mut Map<String, Value>);
    const SHARD: &str = "model-00001-of-00003.safetensors";
    let cases: &[(&str, Edit, &[&str])] = &[
        (
            "absent shard",
            |dir, _| std::fs::remove_file(dir.join(SHARD)).unwrap(),
            &["\"model-00001-of-00003.safetensors\" is refused: ", "No such file"],
        ),
        (
            "shard without the tensor",
            |_, map| {
                map.insert("model.layers.9.nowhere".into(), json!(SHARD));
            },
            &[
                "entry \"model.layers.9.nowhere\": \"model-00001-of-00003.safetensors\" is refused",
                "the shard lacks this tensor",
            ],
        ),
        (
            "tensor in two shards",
            |dir, map| {
                let mut tensors = Model::tiny().tensors;
                tensors.retain(|name, _| map.get(name) == Some(&json!(SHARD)) || name == NORM);
                assert_ne!(map[NORM], json!(SHARD));
                std::fs::write(dir.join(SHARD), serialize(&tensors)).unwrap();
            },
            &[
                "entry \"model.norm.weight\": ",
                "model-00001-of-00003.safetensors has a tensor of this name too",
            ],
        ),
        (
            "tensor that is not listed",
            |_, map| drop(map.shift_remove(NORM)),
            &[
                "entry \"model.norm.weight\": \"model-",
                "the shard holds this tensor, but the index does not list it",
            ],
        ),
        (
            "folder as a shard",
            |dir, _| {
                std::fs::remove_file(dir.join(SHARD)).unwrap();
                std::fs::create_dir(dir.join(SHARD)).unwrap();
            },
            &["\"model-00001-of-00003.safetensors\" is refused: not a regular file"],
        ),
        (
            "socket as a shard",
            |dir, _| {
                std::fs::remove_file(dir.join(SHARD)).unwrap();
                drop(std::os::unix::net::UnixListener::bind(dir.join(SHARD)).unwrap());
            },
            &["\"model-00001-of-00003.safetensors\" is refused: not a regular file"],
        ),
        (
            "broken shard",
            |dir, _| std::fs::write(dir.join(SHARD), "short").unwrap(),
            &["model-00001-of-00003.safetensors: not a valid safetensors file: the file has 5"],
        ),
        (
            "empty shard",
            |dir, _| std::fs::write(dir.join(SHARD), "").unwrap(),
            &["model-00001-of-00003.safetensors: not a valid safetensors file: the file is empty"],
        ),
        (
            "shard name of another kind",
            |_, map| {
                map.insert(NORM.into(), json!(3));
            },
            &["index.json: weight_map: \"model.norm.weight\": a value that must be a string"],
        ),
    ];
    let mut failures = Failures::default();
    for (name, edit, parts) in cases {
        failures.expect_error(name, open_with(edit), parts);
    }
    failures.finish();
}

#[test]
fn broken_indices_are_refused() {
    let cases = [
        (
            "duplicate tensor",
            r#"{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}"#,
            "weight_map: key \"a\" appears twice",
        ),
        ("two maps", r#"{"weight_map": {}, "weight_map": {}}"#, "\"weight_map\" appears twice"),
        ("no map", r#"{"metadata": {}}"#, "weight_map is missing"),
        ("unknown key", r#"{"weight_map": {}, "shards": 3}"#, "key \"shards\" is not known"),
        ("list", "[]", "it must be a JSON object"),
        ("map as a list", r#"{"weight_map": []}"#, "weight_map: it must be a JSON object"),
        ("cut", r#"{"weight_map": {"a""#, "EOF while parsing"),
        ("empty", "", "the file is empty; download it again"),
    ];
    let mut failures = Failures::default();
    for (name, text, part) in cases {
        let dir = tempfile::tempdir().unwrap();
        Model::tiny().write_config(dir.path());
        std::fs::write(dir.path().join("model.safetensors.index.json"), text).unwrap();
        failures.expect_error(name, open(dir.path()), &["model.safetensors.index.json: ", part]);
    }
    failures.finish();
}

#[test]
fn links_are_refused_outside_the_cache_layout() {
    let mut failures = Failures::default();
    for name in ["model-00001-of-00003.safetensors", "model.safetensors.index.json", "config.json"]
    {
        for target in ["../elsewhere", "/etc/hostname", "kept", "../../blobs/nothash"] {
            let result = {
                let parent = tempfile::tempdir().unwrap();
                let dir = parent.path().join("model");
                Model::tiny().write_sharded(&dir, 3);
                std::fs::copy(dir.join(name), parent.path().join("elsewhere")).unwrap();
                std::fs::rename(dir.join(name), dir.join("kept")).unwrap();
                symlink(target, dir.join(name)).unwrap();
                open(&dir)
            };
            let case = format!("{name} -> {target}");
            let link = format!("a symbolic link to {target}; links are followed only in");
            failures.expect_error(&case, result, &[name, &link]);
        }
    }
    failures.finish();
}

#[test]
fn the_cache_layout_is_followed() {
    let cache = tempfile::tempdir().unwrap();
    let snapshot = cache.path().join("models--x--y/snapshots/main");
    let blobs = cache.path().join("models--x--y/blobs");
    std::fs::create_dir_all(&blobs).unwrap();
    Model::tiny().write_sharded(&snapshot, 3);
    let direct = all_values(&open(&snapshot).unwrap());
    let link = |name: &str, hash: &str| {
        std::fs::rename(snapshot.join(name), blobs.join(hash)).unwrap();
        symlink(format!("../../blobs/{hash}"), snapshot.join(name)).unwrap();
    };
    link("config.json", HASH);
    link("model.safetensors.index.json", &HASH.replace('0', "1"));
    let shard = format!("{HASH}{}", &HASH[..24]);
    link("model-00002-of-00003.safetensors", &shard);
    assert_eq!(all_values(&open(&snapshot).unwrap()), direct);

    // A folder that is reached by a link of the user's own is still a snapshot.
    let shortcut = cache.path().join("shortcut");
    symlink(&snapshot, &shortcut).unwrap();
    assert_eq!(all_values(&open(&shortcut).unwrap()), direct);

    // A blob that is a link itself could lead anywhere.
    let elsewhere = cache.path().join("elsewhere");
    std::fs::rename(blobs.join(&shard), &elsewhere).unwrap();
    symlink(&elsewhere, blobs.join(&shard)).unwrap();
    let error = open(&snapshot).unwrap_err();
    assert!(error.contains("\"model-00002-of-00003.safetensors\" is refused"), "{error}");
}

#[test]
fn a_single_file_wins_over_an_index_with_a_warning() {
    let dir = tempfile::tempdir().unwrap();
    let model = Model::tiny();
    model.write_sharded(dir.path(), 3);
    model.write(dir.path());
    let checkpoint = open(dir.path()).unwrap();
    let files: Vec<_> = checkpoint.files().iter().map(|file| file.name.as_str()).collect();
    assert_eq!(files, ["config.json", "model.safetensors"]);
    let [warning] = checkpoint.warnings() else { panic!("{:?}", checkpoint.warnings()) };
    assert!(
        warning.ends_with(
            "model.safetensors.index.json: ignored, because model.safetensors is present beside it"
        ),
        "{warning}"
    );
}

#[test]
fn folders_without_weights_say_what_they_hold() {
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n";
    type Edit<'a> = &'a dyn Fn(&Path);
    let write = |dir: &Path, name: &str, bytes: &[u8]| {
        let path = dir.join(name);
        fs_err::create_dir_all(path.parent().unwrap()).unwrap();
        fs_err::write(path, bytes).unwrap();
    };
    let remove = |dir: &Path| fs_err::remove_file(dir.join("model.safetensors")).unwrap();
    let cases: &[(&str, Edit<'_>, &str)] = &[
        ("nothing", &|dir| remove(dir), "a Hugging Face folder with safetensors weights"),
        (
            "PyTorch",
            &|dir| {
                remove(dir);
                write(dir, "pytorch_model.bin", b"PK");
            },
            "; pytorch_model.bin is a PyTorch file, which is not read: download the safetensors",
        ),
        (
            "GGUF",
            &|dir| {
                remove(dir);
                write(dir, "a-Q4_0.gguf", b"GGUF");
            },
            "; give a-Q4_0.gguf itself to use that file",
        ),
        (
            "unfinished",
            &|dir| {
                remove(dir);
                write(dir, "model.safetensors.part", b"");
            },
            "; model.safetensors.part is a download that did not finish, start it again",
        ),
        (
            "unfinished by the client",
            &|dir| {
                remove(dir);
                write(dir, ".cache/huggingface/download/abc.incomplete", b"");
            },
            "; abc.incomplete is a download that did not finish",
        ),
        (
            "pointer",
            &|dir| write(dir, "model.safetensors", pointer),
            "model.safetensors: not a valid safetensors file: it is a Git LFS pointer, not the \
             file itself; run git lfs pull in its repository, or download the file",
        ),
        ("empty", &|dir| write(dir, "model.safetensors", b""), "the file is empty; download it"),
        ("page", &|dir| write(dir, "config.json", b"<html>"), "config.json: it is a web page"),
        ("config pointer", &|dir| write(dir, "config.json", pointer), "it is a Git LFS pointer"),
    ];
    let mut failures = Failures::default();
    for (name, edit, part) in cases {
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("model");
        Model::tiny().write(&dir);
        edit(&dir);
        failures.expect_error(name, open(&dir), &[part]);
    }
    let shard = open_with(|dir, _| {
        let shards = fs_err::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
        let shard = shards.filter(|path| path.to_str().unwrap().contains("-of-")).min().unwrap();
        fs_err::rename(&shard, shard.with_extension("incomplete")).unwrap();
    });
    failures.expect_error("shard", shard, &["is a download that did not finish, start it again"]);
    let file = tempfile::NamedTempFile::new().unwrap();
    fs_err::write(file.path(), pointer).unwrap();
    failures.expect_error("GGUF", open(file.path()), &["it is a Git LFS pointer"]);
    failures.finish();
}
