use crate::support::{
    advance, argument, changed_checkpoint, firesteel, names, refusal, spark_tiny, stdout,
};
use firesteel_checkpoint::Checkpoint;
use firesteel_engine::{CheckpointEmbedding, Engine, EngineOptions};
use firesteel_generate::{Answer, AnswerOptions, Message, Syntax, ToolCall};
use firesteel_step::{KvState, Role, Runner, StepOptions, StepSpec};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;

const SPARK_TINY: &str = "models/spark-tiny";

/// Conversations with the reference's prompt and greedy answer.
const GOLDEN: &str = include_str!("../../../firesteel-generate/tests/data/chat_golden.json");

fn golden() -> Vec<Value> {
    let cases: Vec<Value> = serde_json::from_str(GOLDEN).unwrap();
    assert_eq!(cases.len(), 3);
    cases
}

/// Writes `value` into `folder` and returns the path.
fn write(folder: &Path, name: &str, value: &Value) -> String {
    let file = folder.join(name);
    std::fs::write(&file, value.to_string()).unwrap();
    argument(&file).to_owned()
}

fn artifact(folder: &Path, name: &str, extra: &[&str]) -> String {
    let out = folder.join(name);
    let export = ["export", SPARK_TINY, "--out", argument(&out)];
    stdout(&[&export[..], extra].concat());
    argument(&out).to_owned()
}

/// The JSON report of a run.
fn report(arguments: &[&str]) -> Value {
    serde_json::from_str(&stdout(&[&["generate"], arguments, &["--json"]].concat())).unwrap()
}

fn ids(report: &Value) -> Vec<u64> {
    report["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect()
}

/// The answer of a report of spark-tiny, which was asked to think.
pub(crate) fn answer(report: &Value, tools: &Value) -> Answer {
    read_answer(report["text"].as_str().unwrap(), tools)
}

fn read_answer(text: &str, tools: &Value) -> Answer {
    let family = Checkpoint::open(&spark_tiny()).unwrap().config().family;
    let syntax = Syntax::of(family.model_type()).unwrap();
    let tools = tools.as_array().unwrap();
    Answer::read(text, &AnswerOptions { syntax, tools, in_thought: true })
}

/// The calls that the trained model makes in the golden conversations.
fn golden_calls() -> [ToolCall; 3] {
    [
        ("add_item", r#"{"item": "kobi", "count": 3}"#),
        ("send_message", r#"{"to": "Grace", "text": "I am late"}"#),
        ("set_alarm", r#"{"hour": 16, "minute": 45}"#),
    ]
    .map(|(name, arguments)| ToolCall {
        name: name.into(),
        arguments: arguments.into(),
        flags: Vec::new(),
    })
}

#[test]
fn a_chat_with_tools_is_answered_by_a_call() {
    let folder = tempfile::tempdir().unwrap();
    for (number, (case, expected)) in golden().iter().zip(golden_calls()).enumerate() {
        let conversation = &case["conversation"];
        let tools = write(folder.path(), "tools.json", &conversation["tools"]);
        let prompt = conversation["messages"][0]["content"].as_str().unwrap();
        let arguments = [
            "generate",
            SPARK_TINY,
            "--chat",
            "--tools",
            &tools,
            "--prompt",
            prompt,
            "--temperature",
            "0",
        ];
        let text = stdout(&arguments);
        let read = read_answer(&text, &conversation["tools"]);
        assert_eq!(read.calls, [expected], "{number}: {text}");
        // A prompt from a file is the same prompt.
        let file = folder.path().join("prompt");
        std::fs::write(&file, prompt).unwrap();
        let arguments = [
            "generate",
            SPARK_TINY,
            "--chat",
            "--tools",
            &tools,
            "--prompt-file",
            argument(&file),
            "--temperature",
            "0",
        ];
        assert_eq!(stdout(&arguments), text, "{number}");
    }
}

#[test]
fn every_runner_has_the_golden_answers() {
    let folder = tempfile::tempdir().unwrap();
    let portable = artifact(folder.path(), "portable", &["--context", "300"]);
    let sharded = artifact(folder.path(), "sharded", &["--head-shards", "3", "--embedding"]);
    let qnn = artifact(folder.path(), "qnn", &["--dialect", "qnn", "--cache-layout", "roll"]);
    let runners: [(&str, &[&str]); 7] = [
        (SPARK_TINY, &[]),
        (SPARK_TINY, &["--context", "300"]),
        (&portable, &[]),
        (&portable, &["--runner", "ort"]),
        (&sharded, &[]),
        (&sharded, &["--runner", "ort"]),
        (&qnn, &["--runner", "ort"]),
    ];
    for (number, case) in golden().iter().enumerate() {
        let messages = write(folder.path(), "messages.json", &case["conversation"]);
        for (path, options) in runners {
            let about = format!("conversation {number}, {path} {options:?}");
            let arguments =
                [&[path, "--messages", &messages, "--temperature", "0"], options].concat();
            let report = report(&arguments);
            assert_eq!(report["ids"], case["greedy_ids"], "{about}");
            assert_eq!(report["stop"], "end_of_sequence", "{about}");
            let stats = &report["stats"];
            let prompt = case["prompt_ids"].as_array().unwrap().len();
            assert_eq!(stats["prompt_tokens"], prompt, "{about}");
            assert_eq!(stats["generated_tokens"], ids(&report).len(), "{about}");
            let read = answer(&report, &case["conversation"]["tools"]);
            assert_eq!(read.calls, [golden_calls()[number].clone()], "{about}");
        }
    }
}

#[test]
fn equal_seeds_make_equal_text_on_every_runner() {
    let folder = tempfile::tempdir().unwrap();
    let artifact = artifact(folder.path(), "artifact", &[]);
    let runners: [(&str, &[&str]); 3] =
        [(SPARK_TINY, &[]), (&artifact, &[]), (&artifact, &["--runner", "ort"])];
    let mut texts = Vec::new();
    for seed in ["1", "2"] {
        let sample = |path: &str, options: &[&str]| {
            let fixed = [
                path,
                "--prompt",
                "One night",
                "--seed",
                seed,
                "--temperature",
                "1",
                "--top-p",
                "1",
                "--top-k",
                "0",
                "--max-tokens",
                "100",
            ];
            report(&[&fixed[..], options].concat())
        };
        let first = sample(SPARK_TINY, &[]);
        for (path, options) in runners {
            let other = sample(path, options);
            assert_eq!(ids(&other), ids(&first), "seed {seed}, {path} {options:?}");
            assert_eq!(other["text"], first["text"], "seed {seed}, {path} {options:?}");
        }
        texts.push(first["text"].clone());
    }
    assert_ne!(texts[0], texts[1]);
}

/// What is streamed is what is reported, and is UTF-8 however wild the sampling.
#[test]
fn streamed_text_is_the_reported_text() {
    for seed in 0..6 {
        let seed = seed.to_string();
        let arguments = [
            SPARK_TINY,
            "--prompt",
            "é漢",
            "--seed",
            &seed,
            "--temperature",
            "4",
            "--top-p",
            "1",
            "--max-tokens",
            "60",
        ];
        let output = firesteel(&[&["generate"], &arguments[..]].concat());
        assert!(output.status.success());
        let text = String::from_utf8(output.stdout).unwrap();
        assert_eq!(text, format!("{}\n", report(&arguments)["text"].as_str().unwrap()));
    }
}

#[test]
fn times_go_to_stderr() {
    let output = firesteel(&[
        "generate",
        SPARK_TINY,
        "--prompt",
        "One",
        "--max-tokens",
        "3",
        "--temperature",
        "0",
    ]);
    let talk = String::from_utf8(output.stderr).unwrap();
    let mut settings = insta::Settings::clone_current();
    settings.add_filter(r"\d+\.\d+", "[N]");
    settings.bind(|| insta::assert_snapshot!(talk, @"2 prompt tokens at [N] tokens/s, first token after [N] s; 3 tokens at [N] tokens/s; stopped at --max-tokens"));
}

/// Generates eight tokens in an empty `folder`, with the variable for step statistics if it is given,
/// and returns the report and what was said.
fn in_folder(folder: &Path, arguments: &[&str], variable: Option<&str>) -> (Value, String) {
    std::fs::create_dir(folder).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_firesteel"));
    command.arg("generate").arg(spark_tiny()).args(["--prompt", "One night a young programmer"]);
    command.args(["--temperature", "0", "--max-tokens", "8", "--min-tokens", "8"]);
    command.args(["--context", "128", "--json"]);
    command.args(arguments).current_dir(folder).env_remove("FIRESTEEL_STEP_STATS_DIR");
    if let Some(directory) = variable {
        command.env("FIRESTEEL_STEP_STATS_DIR", directory);
    }
    let output = command.output().unwrap();
    let talk = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{arguments:?} {variable:?}: {talk}");
    (serde_json::from_slice(&output.stdout).unwrap(), talk)
}

#[test]
fn step_statistics_are_a_line_a_step_and_a_summary() {
    const TIMES: [&str; 2] = ["model.forward_ms", "model.sample_ms"];
    let folder = tempfile::tempdir().unwrap();
    let inspected = stdout(&["inspect", SPARK_TINY, "--context", "128", "--json"]);
    let inspected: Value = serde_json::from_str(&inspected).unwrap();
    let cpu = inspected["kv"].as_array().unwrap().iter().find_map(|kv| kv.get("cpu"));
    let cache_bytes = &cpu.unwrap()["f16"]["caches"];
    let cases: [(&[&str], Option<&str>); 3] = [
        (&["--step-stats", "stats"], None),
        (&[], Some("stats")),
        // The command line wins.
        (&["--step-stats", "stats"], Some("elsewhere")),
    ];
    for (number, (arguments, variable)) in cases.into_iter().enumerate() {
        let here = folder.path().join(number.to_string());
        let (report, talk) = in_folder(&here, arguments, variable);
        assert_eq!(names(&here), ["stats"]);
        let files = names(&here.join("stats"));
        assert_eq!(files.len(), 1);
        assert!(talk.contains(&format!("steps: stats/{}\n", files[0])), "{talk}");
        let text = std::fs::read_to_string(here.join("stats").join(&files[0])).unwrap();
        let mut lines: Vec<Value> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let summary = lines.pop().unwrap()["summary"].take();

        // The prompt in one step, and each token but the last, which no step follows.
        let prompt = report["stats"]["prompt_tokens"].as_u64().unwrap();
        assert_eq!((ids(&report).len(), lines.len()), (8, 8));
        let mut position = 0;
        for (index, line) in lines.iter().enumerate() {
            let keys: Vec<&str> = line.as_object().unwrap().keys().map(String::as_str).collect();
            assert_eq!(keys, [&TIMES[..], &["tokens", "position", "cache_bytes"]].concat());
            assert_eq!(line["tokens"], if index == 0 { prompt } else { 1 });
            assert_eq!(line["position"], position);
            assert_eq!(&line["cache_bytes"], cache_bytes);
            position += line["tokens"].as_u64().unwrap();
        }
        assert_eq!((&summary["steps"], &summary["tokens"]), (&8.into(), &position.into()));
        for key in TIMES {
            let mut times: Vec<f64> = lines.iter().map(|l| l[key].as_f64().unwrap()).collect();
            assert!(times.iter().all(|time| time.is_finite() && *time > 0.0), "{times:?}");
            times.sort_by(f64::total_cmp);
            let (found, mean) = (&summary[key], times.iter().sum::<f64>() / 8.0);
            assert_eq!(found["count"], 8);
            assert!((found["mean"].as_f64().unwrap() / mean - 1.0).abs() < 1e-12, "{found}");
            // The smallest time that this share of eight does not exceed.
            for (name, rank) in [("p50", 4), ("p90", 8), ("p99", 8), ("max", 8)] {
                assert_eq!(found[name], times[rank - 1], "{name}");
            }
        }
    }
    let off: [(&[&str], Option<&str>); 4] = [
        (&[], None),
        (&[], Some("")),
        (&["--step-stats", ""], None),
        (&["--step-stats="], Some("elsewhere")),
    ];
    for (number, (arguments, variable)) in off.into_iter().enumerate() {
        let here = folder.path().join(format!("off-{number}"));
        let (_, talk) = in_folder(&here, arguments, variable);
        assert!(names(&here).is_empty() && !talk.contains("steps: "), "{arguments:?}: {talk}");
    }
}

#[test]
fn generation_stops_where_it_must() {
    let folder = tempfile::tempdir().unwrap();
    let artifact = artifact(folder.path(), "artifact", &["--context", "12"]);
    let text = ["--prompt", "hi", "--temperature", "0"];
    let run = |path: &str, options: &[&str]| report(&[&[path], &text[..], options].concat());
    for runner in ["engine", "evaluator", "ort"] {
        let (path, context): (&str, &[&str]) = match runner {
            "engine" => (SPARK_TINY, &["--context", "12"]),
            _ => (&artifact, &["--runner", runner]),
        };
        // One token of the prompt; the last token that is picked is not run.
        let full = run(path, context);
        assert_eq!(full["stop"], "context_full", "{runner}");
        assert_eq!(full["stats"]["prompt_tokens"], 1, "{runner}");
        assert_eq!(ids(&full).len(), 12, "{runner}");
        assert_eq!(full["stats"]["decode_steps"], 11, "{runner}");
        for most in [0, 1, 11, 12] {
            let some = run(path, &[context, &["--max-tokens", &most.to_string()]].concat());
            assert_eq!(some["stop"], "max_tokens", "{runner}");
            assert_eq!(ids(&some), ids(&full)[..most], "{runner}");
        }
        // The prompt fills the context: one token can still be picked.
        let whole = "hi".repeat(12);
        let arguments = [&[path, "--prompt", &whole, "--temperature", "0"], context].concat();
        let last = report(&arguments);
        assert_eq!(last["stats"]["prompt_tokens"], 12, "{runner}");
        assert_eq!((ids(&last).len(), &last["stop"]), (1, &json!("context_full")), "{runner}");
        let over = "hi".repeat(13);
        let arguments = [&["generate", path, "--prompt", &over], context].concat();
        assert_eq!(
            refusal(&arguments),
            "error: the prompt has 13 tokens, but the context holds 12; shorten the prompt or use \
             a larger context\n",
            "{runner}"
        );
    }
}

#[test]
fn artifacts_that_cannot_generate_say_why() {
    let folder = tempfile::tempdir().unwrap();
    let cases: [(&[&str], &str); 6] = [
        (
            &["--no-lm-head"],
            "the artifact has no vocabulary projection; export without --no-lm-head",
        ),
        (
            &["--no-lm-head", "--embedding"],
            "the artifact has no vocabulary projection; export without --no-lm-head",
        ),
        (&["--head-shards", "2"], "the artifact has no embedding table; export with --embedding"),
        (&["--tokens", "4"], "the artifact takes 4 tokens a step; one for decoding has --tokens 1"),
        (&["--layers", "0:2"], "the range of layers is 0..2, but generation needs 0..4"),
        (&["--random-weights"], "tokenizer.json"),
    ];
    for (number, (options, expected)) in cases.into_iter().enumerate() {
        let path = artifact(folder.path(), &number.to_string(), options);
        for runner in ["evaluator", "ort"] {
            let talk = refusal(&["generate", &path, "--prompt", "hi", "--runner", runner]);
            assert!(talk.contains(expected), "{options:?}: {talk}");
        }
    }
    let path = artifact(folder.path(), "good", &[]);
    let talk = refusal(&["generate", &path, "--prompt", "hi", "--runner", "engine"]);
    assert!(talk.contains("use --runner evaluator or --runner ort"), "{talk}");
    for runner in ["evaluator", "ort"] {
        let talk = refusal(&["generate", SPARK_TINY, "--prompt", "hi", "--runner", runner]);
        assert!(talk.contains("export it first, or use --runner engine"), "{talk}");
    }
}

/// A reader that has seen enough ends the generation, and that is no error.
#[test]
fn a_reader_may_leave() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_firesteel"))
        .args(["generate", SPARK_TINY, "--prompt", "hi", "--temperature", "0"])
        .args(["--max-tokens", "3000", "--min-tokens", "3000"])
        .current_dir(crate::support::ROOT)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdout = child.stdout.take().unwrap();
    let mut first = [0];
    stdout.read_exact(&mut first).unwrap();
    drop(stdout);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "");
}

/// Ids that the tokenizer of spark-tiny has.
const TOKENS: usize = 2048;

/// A copy of spark-tiny with 16 more rows of embedding than the tokenizer has tokens. Their logits
/// are far larger than any other, half of them for any hidden state.
fn padded(folder: &Path) -> PathBuf {
    let to = folder.join("padded");
    changed_checkpoint(
        &spark_tiny(),
        &to,
        &|config| config["vocab_size"] = json!(TOKENS + 16),
        &|name, shape, values| {
            if name == "model.embedding.weight" {
                shape[0] += 16;
                for row in 0..16 {
                    let sign = if row % 2 == 0 { 1.0 } else { -1.0 };
                    values.extend(std::iter::repeat_n(300.0 * sign, shape[1]));
                }
            }
        },
    );
    to
}

#[test]
fn ids_without_a_token_are_never_sampled() {
    let folder = tempfile::tempdir().unwrap();
    let path = padded(folder.path());

    // The model itself would pick one of them.
    let checkpoint = Arc::new(Checkpoint::open(&path).unwrap());
    let options = StepOptions::decode(checkpoint.config(), 8);
    let spec = StepSpec::new(checkpoint.config(), &options).unwrap();
    let engine = Engine::new(Arc::clone(&checkpoint), EngineOptions::default());
    let mut runner = engine.runner(spec.clone()).unwrap();
    let embedding = CheckpointEmbedding::new(checkpoint);
    let mut state = KvState::new(runner.spec()).unwrap();
    let outputs = advance(&mut runner, &embedding, &mut state, &[100]);
    let logits = outputs.get(&spec, Role::Logits).unwrap().view().to_f32().unwrap().into_owned();
    let largest = |logits: &[f32]| logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    assert_eq!(logits.len(), TOKENS + 16);
    assert!(largest(&logits[TOKENS..]) > largest(&logits[..TOKENS]) + 20.0);

    let out = folder.path().join("artifact");
    stdout(&["export", argument(&path), "--context", "128", "--out", argument(&out)]);
    let runners: [(&Path, &[&str]); 3] = [(&path, &[]), (&out, &[]), (&out, &["--runner", "ort"])];
    for (path, options) in runners {
        for sampling in [
            &["--temperature", "0"][..],
            &["--temperature", "1"],
            &["--temperature", "8", "--top-p", "1"],
            &["--temperature", "1", "--top-k", "3", "--seed", "5"],
        ] {
            let fixed = [argument(path), "--prompt", "One night", "--max-tokens", "40"];
            let padded = report(&[&fixed[..], options, sampling].concat());
            let ids = ids(&padded);
            assert!(!ids.is_empty());
            assert!(ids.iter().all(|&id| id < TOKENS as u64), "{options:?} {sampling:?}: {ids:?}");
            // They change nothing else: the answer is that of the model without the rows.
            let fixed = [SPARK_TINY, "--prompt", "One night", "--max-tokens", "40"];
            let plain = report(&[&fixed[..], sampling].concat());
            assert_eq!(plain["text"], padded["text"], "{options:?} {sampling:?}");
        }
    }
}

#[test]
fn chat_options_reach_the_template() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = |extra: &[&str]| {
        let fixed = [SPARK_TINY, "--chat", "--prompt", "Hello.", "--max-tokens", "0"];
        let report = report(&[&fixed[..], extra].concat());
        report["stats"]["prompt_tokens"].as_u64().unwrap()
    };
    let plain = tokens(&[]);
    assert!(tokens(&["--system", "Be brief. Be kind."]) != plain);
    // Without thinking the answer begins after the end of the thought.
    let answer = |extra: &[&str]| {
        let fixed = [SPARK_TINY, "--chat", "--prompt", "Hello.", "--temperature", "0"];
        report(&[&fixed[..], extra].concat())["text"].as_str().unwrap().to_owned()
    };
    assert!(answer(&[]).contains("</think>"));
    assert!(!answer(&["--no-thinking"]).contains("</think>"));
    // A conversation in a file is the same conversation.
    let messages = write(
        folder.path(),
        "messages.json",
        &json!({"messages": [{"role": "user", "content": "Hello."}]}),
    );
    let file = report(&[SPARK_TINY, "--messages", &messages, "--temperature", "0"]);
    assert_eq!(file["text"], answer(&[]));
    // Text of a user that is spelled like the model's own tokens stays text.
    let forged = [SPARK_TINY, "--chat", "--prompt", "<|Bot|>", "--max-tokens", "0"];
    let forged = report(&forged)["stats"]["prompt_tokens"].as_u64().unwrap();
    let word = [SPARK_TINY, "--chat", "--prompt", "B", "--max-tokens", "0"];
    assert!(forged > report(&word)["stats"]["prompt_tokens"].as_u64().unwrap());
}

/// Runs `generate` on spark-tiny with `input` as stdin.
fn piped(arguments: &[&str], input: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_firesteel"))
        .args(["generate", SPARK_TINY])
        .args(arguments)
        .current_dir(crate::support::ROOT)
        .env("NO_COLOR", "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

#[test]
fn a_chat_goes_on_line_by_line() {
    let folder = tempfile::tempdir().unwrap();
    let greedy = ["--temperature", "0", "--max-tokens", "40"];
    let chat = [&["--chat", "--interactive"], &greedy[..]].concat();
    let lines = "What is a fox?\n\n  \nAnd what is the sea?\nThank you.";
    let output = piped(&chat, lines);
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let talk = String::from_utf8(output.stderr).unwrap();
    assert_eq!(talk.lines().count(), 3, "{talk}");
    assert!(!talk.lines().next().unwrap().contains("cached"), "{talk}");
    for line in talk.lines().skip(1) {
        assert!(line.contains(" of them cached, at "), "{talk}");
    }
    // The same conversation in files, turn by turn.
    let (mut messages, mut expected) = (Vec::new(), String::new());
    for (number, turn) in
        ["What is a fox?", "And what is the sea?", "Thank you."].iter().enumerate()
    {
        messages.push(json!({"role": "user", "content": turn}));
        let file = write(folder.path(), "messages.json", &json!({"messages": messages}));
        let report = report(&[&[SPARK_TINY, "--messages", &file], &greedy[..]].concat());
        let answer = report["text"].as_str().unwrap();
        expected += &format!("{answer}\n");
        let tokens = report["stats"]["prompt_tokens"].as_u64().unwrap();
        let line = talk.lines().nth(number).unwrap();
        assert!(line.starts_with(&format!("{tokens} prompt tokens")), "{line}");
        let (thought, content) = answer.split_once("</think>").unwrap_or(("", answer));
        messages
            .push(json!({"role": "assistant", "content": content, "reasoning_content": thought}));
    }
    assert_eq!(text, expected);
    // The first turn may be on the command line.
    let first = [&chat[..], &["--prompt", "What is a fox?"]].concat();
    let output = piped(&first, "And what is the sea?\nThank you.\n");
    assert_eq!(String::from_utf8(output.stdout).unwrap(), expected);
    let output = piped(&chat, "");
    assert!(output.status.success() && output.stdout.is_empty(), "{output:?}");
    let output = piped(&[&chat[..], &["--context", "20"]].concat(), "What is a fox?\n");
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8(output.stderr).unwrap().contains("but the context holds 20"));
}

/// A chat that outgrows its context forgets its oldest turns and says so, and a message that does not
/// fit at all is left out; what is answered is the rest of the chat, and the system's message is in it.
#[test]
fn a_chat_that_outgrows_its_context_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let context = 220;
    let fixed = ["--temperature", "0", "--max-tokens", "40", "--context", "220"];
    let system = "Be brief.";
    let long = "Tell me of the fox and the sea. ".repeat(40);
    let turns = [
        "What is a fox?",
        "And what is the sea, and who lives in it, and why do they not come out of it?",
        &long,
        "Tell me a story about a fox who lived by the sea and had many friends, please.",
        "Thank you. What was her name?",
        &long,
        "And where did she sleep?",
        "What did she eat in the evening?",
        "Good night.",
    ];
    let chat = [&["--chat", "--interactive", "--system", system, "--json"], &fixed[..]].concat();
    let output = piped(&chat, &turns.join("\n"));
    let talk = String::from_utf8(output.stderr).unwrap();
    // Two messages have no answer, which whoever feeds the chat from a file should know.
    assert_eq!(output.status.code(), Some(1), "{talk}");
    let left_out: Vec<&str> = talk.lines().filter(|line| line.contains("left out")).collect();
    assert_eq!(left_out.len(), 3, "{talk}");
    for line in &left_out[..2] {
        assert!(line.starts_with("warning: the prompt has "), "{line}");
        assert!(line.contains("but the context holds 220; shorten the prompt"), "{line}");
        assert!(line.ends_with("the message is left out, and the chat goes on"), "{line}");
    }
    assert_eq!(left_out[2], "error: 2 messages of the chat were left out and have no answers");
    let mut answers = serde_json::Deserializer::from_slice(&output.stdout).into_iter::<Value>();
    let mut messages = vec![json!({"role": "system", "content": system})];
    let mut dropped = 0;
    let mut lines = talk.lines();
    for turn in turns {
        messages.push(json!({"role": "user", "content": turn}));
        let mut line = lines.next().unwrap();
        if line.ends_with("the chat goes on") {
            assert_eq!(turn, long);
            messages.pop();
            continue;
        }
        if let Some((_, list)) = line.split_once(" dropped from it: ") {
            assert!(line.starts_with("warning: the chat has outgrown the context of 220 tokens; "));
            for shown in list.split(", \"") {
                // The oldest: what the user said, of which 40 characters are shown, and the answer.
                let said = messages[1]["content"].as_str().unwrap();
                let beginning: String = said.chars().take(40).collect();
                assert!(shown.trim_matches('"').trim_end_matches('…') == beginning, "{line}");
                messages.drain(1..3);
                dropped += 1;
            }
            line = lines.next().unwrap();
        }
        assert!(line.contains(" prompt tokens"), "{line}");
        let answer = answers.next().unwrap().unwrap();
        let file = write(folder.path(), "messages.json", &json!({"messages": messages}));
        let expected = report(&[&[SPARK_TINY, "--messages", &file], &fixed[..]].concat());
        assert_eq!(answer["ids"], expected["ids"], "{turn}");
        let prompt = answer["stats"]["prompt_tokens"].as_u64().unwrap();
        assert_eq!(expected["stats"]["prompt_tokens"], prompt, "{turn}");
        // Some room is left for the answer.
        assert!(prompt + 40 <= context, "{turn}: {prompt}");
        assert_ne!(answer["stop"], "context_full", "{turn}");
        // What the answer says and what it thinks, of which a thought that does not end is all thought.
        let read = read_answer(answer["text"].as_str().unwrap(), &json!([]));
        messages.push(serde_json::to_value(Message::from(read)).unwrap());
    }
    assert!(answers.next().is_none());
    assert!(dropped >= 3, "{talk}");
    // A message on the command line is one like the others.
    let first = [&chat[..], &["--prompt", &long]].concat();
    let output = piped(&first, "What is a fox?");
    assert_eq!(output.status.code(), Some(1));
    let mut answers = serde_json::Deserializer::from_slice(&output.stdout).into_iter::<Value>();
    assert!(answers.next().is_some() && answers.next().is_none());
}

#[test]
fn prompt_lookup_is_the_same_text_in_fewer_steps() {
    let folder = tempfile::tempdir().unwrap();
    for runner in ["cpu", "engine"] {
        let mut accepted = 0;
        for (number, case) in golden().iter().enumerate() {
            let messages = write(folder.path(), "messages.json", &case["conversation"]);
            let fixed = [SPARK_TINY, "--messages", &messages, "--temperature", "0"];
            let arguments = [&fixed[..], &["--runner", runner, "--prompt-lookup"]].concat();
            let found = report(&arguments);
            assert_eq!(found["ids"], case["greedy_ids"], "{number} {runner}");
            let count = |key: &str| found["stats"][key].as_u64().unwrap();
            accepted += count("accepted_tokens");
            assert!(count("proposed_tokens") >= count("accepted_tokens"));
            let tokens = count("decode_steps") + count("accepted_tokens") + 1;
            assert_eq!(tokens, count("generated_tokens"));
        }
        assert!(accepted > 0, "{runner}");
    }
    let messages = write(folder.path(), "messages.json", &golden()[0]["conversation"]);
    let fixed = ["generate", SPARK_TINY, "--messages", &messages, "--temperature", "0"];
    let talk = firesteel(&[&fixed[..], &["--prompt-lookup", "3"]].concat()).stderr;
    let talk = String::from_utf8(talk).unwrap();
    assert!(talk.contains(" proposed tokens accepted; stopped at"), "{talk}");
}

#[test]
fn numbers_below_zero_are_understood_or_refused_with_a_reason() {
    let ids = |top_k: &str| {
        ids(&report(&[
            SPARK_TINY,
            "--prompt",
            "One",
            "--max-tokens",
            "5",
            "--temperature",
            "1",
            "--top-k",
            top_k,
        ]))
    };
    assert_eq!(ids("-1"), ids("0"));
    let cases = [
        ("--top-k", "-2", "a whole number from -1 is accepted"),
        ("--temperature", "-1", "temperature is -1, but a finite number from 0 is accepted"),
        ("--top-p", "-1", "top_p is -1, but a number above 0 and at most 1 is accepted"),
        ("--min-p", "-0.5", "min_p is -0.5, but a number from 0 to 1 is accepted"),
        ("--repetition-penalty", "-1", "but a finite number above 0 is accepted"),
        ("--max-tokens", "-1", "a whole number from 0 is accepted"),
        ("--min-tokens", "-1", "a whole number from 0 is accepted"),
        ("--seed", "-1", "a whole number from 0 is accepted"),
        ("--context", "-1", "a whole number from 0 is accepted"),
        ("--stop-id", "-1", "a whole number from 0 is accepted"),
        ("--prompt-lookup", "-1", "a whole number from 0 is accepted"),
        ("--prompt-lookup", "0", "prompt_lookup is 0, but 1 to 64 tokens are accepted"),
        ("--prompt-lookup", "99", "prompt_lookup is 99, but 1 to 64 tokens are accepted"),
    ];
    for (option, value, expected) in cases {
        let talk = refusal(&["generate", SPARK_TINY, "--prompt", "One", option, value]);
        assert!(talk.contains(expected), "{option} {value}: {talk}");
    }
}

#[test]
fn the_sampler_is_measured() {
    let small = ["bench", "sampler", "--vocabulary", "500", "--history", "90", "--runs", "3"];
    let timings: Value =
        serde_json::from_str(&stdout(&[&small[..], &["--json"]].concat())).unwrap();
    let timings = timings.as_array().unwrap();
    assert!(timings.iter().all(|timing| timing["milliseconds"].as_f64().unwrap() > 0.0));
    let text = stdout(&small);
    assert_eq!(text.lines().count(), timings.len() + 1);
    for (option, value) in [("--vocabulary", "0"), ("--step-ms", "0"), ("--runs", "0")] {
        let talk = refusal(&["bench", "sampler", option, value]);
        assert!(talk.contains(option), "{talk}");
    }
}

/// Every verb that reads a file of a model follows the same links: none but those of the Hugging Face
/// cache.
#[test]
fn a_link_is_refused_by_every_verb_or_by_none() {
    let cache = tempfile::tempdir().unwrap();
    let (snapshots, blobs) = (cache.path().join("snapshots"), cache.path().join("blobs"));
    std::fs::create_dir_all(&blobs).unwrap();
    let hash = "0123456789abcdef0123456789abcdef01234567";
    let (model, out) = (snapshots.join("main"), cache.path().join("out"));
    let names = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"];
    for name in names.into_iter().chain(["chat_template.jinja", "generation_config.json"]) {
        let source = Path::new(SPARK_TINY).join(name);
        if !source.is_file() {
            continue;
        }
        for target in [format!("../../blobs/{hash}"), "../../elsewhere".to_owned()] {
            let _ = std::fs::remove_dir_all(&model);
            std::fs::create_dir_all(&model).unwrap();
            for entry in std::fs::read_dir(SPARK_TINY).unwrap() {
                let path = entry.unwrap().path();
                std::fs::copy(&path, model.join(path.file_name().unwrap())).unwrap();
            }
            std::fs::rename(model.join(name), model.join(&target)).unwrap();
            std::os::unix::fs::symlink(&target, model.join(name)).unwrap();
            let path = argument(&model);
            let write = ["--force", "--out", argument(&out)];
            let verbs: [&[&str]; 3] = [
                &["generate", path, "--chat", "--prompt", "a", "--max-tokens", "1"],
                &["export", path, "--context", "8"],
                &["quantize", "gguf", path, "--format", "f16"],
            ];
            for verb in verbs {
                let _ = std::fs::remove_dir_all(&out).or_else(|_| std::fs::remove_file(&out));
                let writes: &[&str] = if verb[0] == "generate" { &[] } else { &write };
                let output = firesteel(&[verb, writes].concat());
                let talk = String::from_utf8(output.stderr).unwrap();
                if target.contains("blobs") {
                    assert!(output.status.success(), "{name} {verb:?}: {talk}");
                } else {
                    assert_eq!(output.status.code(), Some(1), "{name} {verb:?}: {talk}");
                    let said = talk.contains(name) && talk.contains("a symbolic link to");
                    assert!(said, "{name} {verb:?}: {talk}");
                }
            }
        }
    }
}
