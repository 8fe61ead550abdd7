//! `check` over texts and prompts: its bars, and the formats of keys and values.

use crate::support::{
    argument, changed_checkpoint, firesteel, golden_path, refusal, spark_tiny, stdout,
};
use firesteel_check::{PromptOptions, compare_prompts};
use firesteel_checkpoint::Checkpoint;
use firesteel_engine::{CpuModel, KvFormat, SequenceOptions};
use firesteel_generate::{AddedTokens, Tokenizer};
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;

const SPARK_TINY: &str = "models/spark-tiny";
const HELD_OUT: &str = "tests/golden/spark-tiny/heldout.txt";
const PROMPTS: &str = "tests/golden/spark-tiny/prompts.txt";

/// `check fidelity` of spark-tiny on the kernels against itself.
const ITSELF: [&str; 7] =
    ["check", "fidelity", SPARK_TINY, "--against", SPARK_TINY, "--runner", "cpu"];

fn report(arguments: &[&str]) -> Value {
    serde_json::from_str(&stdout(&[&ITSELF[..], arguments, &["--json"]].concat())).unwrap()
}

#[test]
fn half_precision_caches_continue_every_prompt_as_single_precision_does() {
    let continued = ["--kv", "f16", "--prompts", PROMPTS, "--greedy", "32", "--near-tie", "0"];
    let bars = ["--min-exact", "1", "--min-kept", "1"];
    for (against, kv) in [
        (&["--against-runner", "engine"][..], Value::Null),
        (&["--against-runner", "cpu", "--against-kv", "f32"], "f32".into()),
    ] {
        let report = report(&[&continued[..], &bars, against].concat());
        let prompts = &report["prompts"];
        assert_eq!((&report["passed"], &report["exceeded"]), (&true.into(), &Value::Array(vec![])));
        assert_eq!((&report["reference_kv"], &report["test_kv"]), (&kv, &"f16".into()));
        assert_eq!((&prompts["prompts"], &prompts["ties"]), (&24.into(), &0.into()));
        assert_eq!((&prompts["exact"], &prompts["exact_share"]), (&24.into(), &1.0.into()));
        assert_eq!(prompts["kept_prefix"], 1.0);
        // Most continuations end before that, with the sentence.
        assert!(prompts["tokens"].as_u64().unwrap() > 24 * 16, "{prompts}");
    }
    // All 32 tokens of every prompt, wherever the model would end.
    let checkpoint = Arc::new(Checkpoint::open(&spark_tiny()).unwrap());
    let model = CpuModel::new(checkpoint, Some(2)).unwrap();
    let sequence = |kv| model.sequence(SequenceOptions { context: 128, kv }).unwrap();
    let tokenizer = Tokenizer::open(&spark_tiny()).unwrap();
    let text = std::fs::read_to_string(golden_path("spark-tiny/prompts.txt")).unwrap();
    let prompts: Vec<Vec<u32>> =
        text.lines().map(|line| tokenizer.encode(line, AddedTokens::Parse).unwrap()).collect();
    let options = PromptOptions { tokens: 32, tie_margin: 0.0, ends: &[] };
    let (mut single, mut half) = (sequence(KvFormat::F32), sequence(KvFormat::F16));
    let report = compare_prompts(&mut single, &mut half, &prompts, &options).unwrap();
    assert_eq!((report.exact, report.ties, report.tokens), (24, 0, 24 * 32), "{report:?}");
}

#[test]
fn the_error_of_coarser_caches_is_in_the_report() {
    let text = ["--against-runner", "cpu", "--text", HELD_OUT, "--tokens", "1024"];
    let kl = |formats: &[&str]| {
        let report = report(&[&text[..], formats].concat());
        (report["text"]["kl_mean"].as_f64().unwrap(), report)
    };
    let (same, report) = kl(&["--kv", "f32"]);
    assert_eq!((same, &report["text"]["logits"]["identical"]), (0.0, &true.into()), "{report}");
    // What is right has single precision unless it is said otherwise.
    let (half, report) = kl(&[]);
    assert_eq!((&report["reference_kv"], &report["test_kv"]), (&"f32".into(), &"f16".into()));
    let (eight, _) = kl(&["--kv", "q8"]);
    assert!(half > 1e-10 && half < 1e-6 && eight > 4.0 * half && eight < 1e-3, "{half} {eight}");
    let (hidden, _) = kl(&["--kv", "q8", "--against-kv", "q8"]);
    assert_eq!(hidden, 0.0);

    let talk = stdout(&[&ITSELF[..], &text, &["--kv", "q8"]].concat());
    let first = talk.lines().next().unwrap();
    assert_eq!(first, "cpu with q8 keys and values against cpu with f32 keys and values");
}

#[test]
fn continuations_have_bars_that_fail() {
    let (tiny, coarse) = (spark_tiny(), golden_path("llamacpp/spark-tiny-q4_0.gguf"));
    let check = |model: &Path, options: &[&str]| {
        let command = ["check", "fidelity", argument(model), "--against", argument(&tiny)];
        let runners = ["--runner", "cpu", "--against-runner", "cpu"];
        let prompts = ["--prompts", PROMPTS, "--greedy", "16"];
        let output = firesteel(&[&command[..], &runners, &prompts, options].concat());
        (output.status.code(), String::from_utf8(output.stdout).unwrap())
    };
    let failed = |model: &Path, options: &[&str]| {
        let (code, talk) = check(model, options);
        let failed = talk.lines().filter_map(|line| line.strip_prefix("FAILED: "));
        (code, failed.map(str::to_owned).collect::<Vec<_>>())
    };
    let (code, report) = check(&coarse, &["--json"]);
    let report: Value = serde_json::from_str(&report).unwrap();
    let share = |key: &str| report["prompts"][key].as_f64().unwrap();
    let (exact, kept) = (share("exact_share"), share("kept_prefix"));
    assert!(code == Some(0) && exact > 0.05 && exact < 0.9 && kept > 0.1 && kept < 0.99);
    // What it has it reaches.
    let bars = ["--min-exact", &exact.to_string(), "--min-kept", &kept.to_string()];
    assert_eq!(failed(&coarse, &bars), (Some(0), vec![]));
    let expected = [
        format!("the share of prompts continued exactly is {exact:.4}, below 0.999"),
        format!("the mean kept prefix is {kept:.4}, below 0.999"),
    ];
    let bars = ["--min-exact", "0.999", "--min-kept", "0.999"];
    assert_eq!(failed(&coarse, &bars), (Some(1), expected.to_vec()));

    // Where all are near ties nothing is known, and that reaches no bar.
    let folder = tempfile::tempdir().unwrap();
    let opposite = folder.path().join("opposite");
    changed_checkpoint(&tiny, &opposite, &|_| (), &|name, _, values| {
        if name == "model.norm.weight" {
            values.iter_mut().for_each(|value| *value = -*value);
        }
    });
    let bars = ["--min-exact", "0", "--min-kept", "0", "--near-tie", "1e9"];
    let expected = ["the share of prompts continued exactly", "the mean kept prefix"]
        .map(|what| format!("{what} is not known: all prompts are near ties"));
    assert_eq!(failed(&opposite, &bars), (Some(1), expected.to_vec()));
}

#[test]
fn options_that_would_do_nothing_are_refused() {
    let tiny = ["check", "fidelity", SPARK_TINY, "--against", SPARK_TINY];
    let prompts = ["--prompts", PROMPTS];
    let text = ["--text", HELD_OUT];
    let cases: [(&[&str], &[&str], &str); 22] = [
        (&prompts, &["--greedy", "0"], "--greedy 0: --prompts compares continuations; 1 or more"),
        (&prompts, &["--greedy", "18446744073709551615"], "they exceed the context of 4096"),
        (&prompts, &["--min-exact", "1.5"], "--min-exact 1.5: a share from 0 to 1 is accepted"),
        (&prompts, &["--min-kept", "NaN"], "--min-kept NaN: a share from 0 to 1 is accepted"),
        (&prompts, &["--min-snr", "40"], "--text <FILE>"),
        (&prompts, &["--sequence", "40"], "--text <FILE>"),
        (&text, &["--sequence", "0"], "--sequence <N>"),
        (&text, &["--sequence", "5000"], "--sequence 5000: the step has a context of 4096"),
        (&text, &["--greedy", "9"], "--prompts <FILE>"),
        (&text, &["--min-greedy", "1"], "unexpected argument '--min-greedy'"),
        (&text, &["--min-exact", "1"], "--prompts <FILE>"),
        (&text, &["--kv", "q8"], "--kv q8 does nothing on the engine"),
        (&text, &["--against-kv", "f16"], "--against-kv f16 does nothing on the engine"),
        (&text, &["--kv", "f8"], "f8"),
        (&text, &["--min-snr", "nan"], "--min-snr: a finite number is accepted"),
        (&text, &["--steps", "9"], "unexpected argument '--steps'"),
        (&text, &["--tie-margin", "1"], "unexpected argument '--tie-margin'"),
        (&text, &["--no-layers"], "unexpected argument '--no-layers'"),
        (&prompts, &["--greedy-prompt", "3"], "unexpected argument '--greedy-prompt'"),
        (&[], &["--kv", "f32"], "--text <FILE>|--prompts <FILE>"),
        (&[], &["--near-tie", "1"], "--text <FILE>|--prompts <FILE>"),
        (&[], &["--min-kept", "1"], "--prompts <FILE>"),
    ];
    let mut wrong = Vec::new();
    for (of, arguments, expected) in cases {
        let talk = refusal(&[&tiny[..], of, arguments].concat());
        if !talk.contains(expected) {
            wrong.push(format!("{of:?} {arguments:?}: {expected:?} not in {talk}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Figures over sequences of other lengths are not comparable.
#[test]
fn a_text_is_cut_by_a_shorter_context_only_with_a_word() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("artifact");
    stdout(&["export", SPARK_TINY, "--context", "48", "--embedding", "--out", argument(&out)]);
    let check = ["check", "fidelity", argument(&out), "--against", SPARK_TINY, "--text", HELD_OUT];
    let with = |options: &[&str]| {
        let output = firesteel(&[&check[..], options].concat());
        assert!(output.status.success(), "{output:?}");
        (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let warned = "sequences of 48 tokens, the context of the step, not of 512";
    let (report, talk) = with(&["--tokens", "100"]);
    assert!(report.contains("text of 100 tokens in 3 sequences of up to 48\n"), "{report}");
    assert!(talk.contains(warned), "{talk}");
    for options in [&["--tokens", "48"][..], &["--tokens", "60", "--sequence", "40"]] {
        let (_, talk) = with(options);
        assert!(!talk.contains("sequences of"), "{options:?}: {talk}");
    }
    let talk = refusal(&[&check[..], &["--tokens", "60", "--sequence", "49"]].concat());
    assert!(talk.contains("--sequence 49: the step has a context of 48; up to that"), "{talk}");
}
