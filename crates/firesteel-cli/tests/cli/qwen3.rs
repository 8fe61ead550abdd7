//! A family with norms of queries and keys, SiLU, separate projections and no windows, through every
//! verb.

use crate::support::{
    Golden, ROOT, advance, argument, changed_checkpoint, export_to, golden_path, options, ort,
    refusal, snr, stdout,
};
use firesteel_artifact::Artifact;
use firesteel_check::greedy_choice;
use firesteel_checkpoint::Checkpoint;
use firesteel_engine::CheckpointEmbedding;
use firesteel_export::{Dialect, ExportOptions};
use firesteel_generate::{
    AddedTokens, Answer, AnswerOptions, ChatTemplate, Conversation, Syntax, Tokenizer, ToolCall,
};
use firesteel_step::{KvState, Logits, Role, Runner};
use serde_json::{Value, json as value};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const MODELS: [&str; 2] = ["tied", "untied"];
/// Tokens before the greedy ones.
const PROMPT: usize = 16;

fn folder(name: &str) -> PathBuf {
    golden_path("qwen3").join(name)
}

/// Against the float64 forward, in dB. The evaluator computes in f64; ONNX Runtime rounds to f32 after
/// every operator.
fn bar(runner: &str) -> f64 {
    if runner == "evaluator" { 130.0 } else { 110.0 }
}

#[test]
fn exported_steps_match_the_float64_forward_in_any_chunks() {
    let out = tempfile::tempdir().unwrap();
    let mut failures = Vec::new();
    for name in MODELS {
        let golden = Golden::open(&golden_path(&format!("qwen3/{name}.safetensors")));
        let (ids, reference, greedy) =
            (golden.ids("ids"), golden.f64("logits"), golden.ids("greedy"));
        let checkpoint = Arc::new(Checkpoint::open(&folder(name)).unwrap());
        let embedding = CheckpointEmbedding::new(Arc::clone(&checkpoint));
        for dialect in [Dialect::Portable, Dialect::Qnn] {
            let mut artifacts = BTreeMap::new();
            for tokens in [1, 3, 5, 12] {
                let options =
                    ExportOptions { tokens, dialect, logits: Logits::All, ..options(&checkpoint) };
                let place = out.path().join(format!("{name}-{dialect}-{tokens}"));
                artifacts.insert(tokens, export_to(&checkpoint, options, &place));
            }
            let evaluator = |artifact: &Artifact| artifact.evaluator(false).unwrap();
            let runtime = |artifact: &Artifact| Box::new(ort(artifact)) as Box<dyn Runner>;
            type Open<'a> = &'a dyn Fn(&Artifact) -> Box<dyn Runner>;
            for open in [&evaluator as Open<'_>, &runtime] {
                let mut runners: BTreeMap<usize, Box<dyn Runner>> =
                    artifacts.iter().map(|(tokens, artifact)| (*tokens, open(artifact))).collect();
                let mut step = |state: &mut KvState, ids: &[u32]| -> Vec<f32> {
                    let runner = runners.get_mut(&ids.len()).unwrap();
                    let spec = runner.spec().clone();
                    let outputs = advance(runner.as_mut(), &embedding, state, ids);
                    outputs.get(&spec, Role::Logits).unwrap().view().to_f32().unwrap().into_owned()
                };
                let runner = open(&artifacts[&1]);
                for pattern in [&[1][..], &[5, 12, 3]] {
                    let mut state = KvState::new(runner.spec()).unwrap();
                    let mut all = Vec::new();
                    let mut sizes = pattern.iter().cycle();
                    while state.position() < ids.len() {
                        let (start, left) = (state.position(), ids.len() - state.position());
                        let size = sizes.next().copied().filter(|size| *size <= left).unwrap_or(1);
                        all.extend(step(&mut state, &ids[start..start + size]));
                    }
                    let db = snr(&reference, &all);
                    let what = format!("{name} {dialect} {} {pattern:?}", runner.name());
                    if db.is_nan() || db < bar(runner.name()) {
                        failures.push(format!("{what}: {db:.1} dB"));
                    }
                }
                let mut state = KvState::new(runner.spec()).unwrap();
                let mut last = Vec::new();
                for id in &ids[..PROMPT] {
                    last = step(&mut state, &[*id]);
                }
                let mut chosen = Vec::new();
                while chosen.len() < greedy.len() {
                    let next = greedy_choice(&last).unwrap();
                    chosen.push(next);
                    last = step(&mut state, &[next]);
                }
                assert_eq!(chosen, greedy, "{name} {dialect} {}", runner.name());
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

fn json(arguments: &[&str]) -> Value {
    serde_json::from_str(&stdout(arguments)).unwrap()
}

/// Width of the tied model's caches, layers and vocabulary are known; what is counted by hand is
/// compared with what the verbs say.
#[test]
fn the_shapes_are_counted() {
    let report = json(&["inspect", argument(&folder("tied")), "--json"]);
    assert_eq!(report["model_type"], "qwen3");
    // Of a layer: two gains of 64, q, k, v and out of 4 and 2 heads of 32, two gains of 32, the
    // three matrices of 96; then the table and the last gain.
    let layer = 2 * 64 + 64 * (128 + 64 + 64) + 128 * 64 + 2 * 32 + 3 * 64 * 96;
    assert_eq!(report["parameters"], 3 * layer + 160 * 64 + 64);
    let memory = ["profile", "memory", "--model", "qwen3-1.7b", "--context", "4096"];
    let memory = json(&[&memory[..], &["--json"]].concat());
    // 28 layers × 4096 entries × 8 heads of 128 × keys and values × 2 bytes.
    assert_eq!(memory["contexts"][0]["kv_bytes"], 28 * 4096 * 8 * 128 * 2 * 2, "{memory}");
    let estimate = ["profile", "estimate", "--model", "qwen3-1.7b", "--precision", "w8a16"];
    let estimate = stdout(&estimate);
    assert!(estimate.contains("full_attention"), "{estimate}");
    let gelu = refusal(&[
        "export",
        argument(&folder("tied")),
        "--gelu",
        "tanh",
        "--out",
        "/nonexistent/out",
    ]);
    assert!(gelu.contains("--gelu tanh: layers of Qwen3 have silu instead"), "{gelu}");
}

/// Every format of weights, against the checkpoint in floats; what the files hold is read back and
/// computed with by the kernels and by the engine.
#[test]
fn gguf_files_hold_the_model() {
    let out = tempfile::tempdir().unwrap();
    for name in MODELS {
        let checkpoint = folder(name);
        let exact = Checkpoint::open(&checkpoint).unwrap();
        for (format, min_db) in [("f32", 110.0), ("f16", 50.0), ("q8_0", 25.0), ("q4_0", 4.0)] {
            let file = out.path().join(format!("{name}-{format}.gguf"));
            stdout(&[
                "quantize",
                "gguf",
                argument(&checkpoint),
                "--format",
                format,
                "--out",
                argument(&file),
            ]);
            let read = Checkpoint::open(&file).unwrap();
            // A file of floats has no type of its own but that of its matrices.
            let config = firesteel_checkpoint::ModelConfig {
                dtype: exact.config().dtype,
                ..read.config().clone()
            };
            assert_eq!(&config, exact.config(), "{name} {format}");
            let min_db = min_db.to_string();
            let report = json(&[
                "check",
                "step",
                argument(&file),
                "--against",
                argument(&checkpoint),
                "--min-snr",
                &min_db,
                "--json",
            ]);
            assert_eq!(report["passed"], true, "{name} {format}: {report}");
        }
        // And back to what it was.
        let again = Checkpoint::open(&out.path().join(format!("{name}-f32.gguf"))).unwrap();
        for (own, read) in exact.layers().iter().zip(again.layers()) {
            for (own, read) in own.all().iter().zip(read.all()) {
                let values = |weight: &firesteel_checkpoint::Weight| {
                    let mut values = vec![0f32; weight.element_count()];
                    weight.read_f32(0, &mut values).unwrap();
                    values
                };
                assert_eq!((own.name(), values(own)), (read.name(), values(read)));
            }
        }
    }
}

/// Integers for the phone's processor, calibrated with ids, on the evaluator.
#[test]
fn integers_are_near_the_floats() {
    let out = tempfile::tempdir().unwrap();
    let place = |name: &str| out.path().join(name);
    let model = folder("untied");
    let ranges = place("ranges.json");
    let spread = ["--spread", "512"];
    stdout(&[&["calibrate", argument(&model), "--out", argument(&ranges)], &spread[..]].concat());
    // Against floats over 64 steps; the bars are 3 dB below what was seen.
    for (scheme, bar) in SCHEMES {
        let artifact = place(scheme);
        let mut arguments =
            vec!["quantize", "graph", argument(&model), "--scheme", scheme, "--ranges"];
        arguments.extend([argument(&ranges), "--context", "64", "--out", argument(&artifact)]);
        // Sixteen bits are not rounded for a text.
        if scheme != "w16a16" {
            arguments.extend(spread);
        }
        if scheme == "mixed" {
            arguments.extend(["--bits", "6"]);
        }
        stdout(&arguments);
        let manifest = std::fs::read(artifact.join("manifest.json")).unwrap();
        let manifest: Value = serde_json::from_slice(&manifest).unwrap();
        let weights = manifest["quantization"]["weights"].as_array().unwrap();
        // The gate of the feed-forward part is a matrix as others are.
        let of_scheme = |weight: &Value| match scheme {
            "w16a16" => weight["dtype"] == "i16",
            "w8a16" => weight["dtype"] == "i8",
            "w4a16" => weight["dtype"] == "i4",
            _ => weight["dtype"] == "i4" || weight["dtype"] == "i8",
        };
        assert_eq!(weights.len(), 4 * 7 + 1);
        assert!(weights.iter().all(of_scheme), "{scheme}: {weights:?}");
        let logits = snr_of_logits(&artifact, &model);
        println!("{scheme}: {logits:.1} dB");
        assert!(logits >= bar, "{scheme}: {logits:.1} dB");
    }
}

const SCHEMES: [(&str, f64); 4] =
    [("w16a16", 39.0), ("w8a16", 29.0), ("mixed", 14.0), ("w4a16", 6.0)];

/// Signal to noise of the logits in dB that `check` reports on the evaluator.
fn snr_of_logits(artifact: &Path, model: &Path) -> f64 {
    let report = json(&[
        "check",
        "step",
        argument(artifact),
        "--against",
        argument(model),
        "--runner",
        "evaluator",
        "--min-snr",
        "0",
        "--json",
    ]);
    report["output"]["db"].as_f64().unwrap_or_else(|| panic!("{report}"))
}

/// Rows of the embedding of the model that talks, some more than its tokenizer has tokens.
const ROWS: usize = 304;
/// What it says to every prompt that ends in a line break.
const SPOKEN: [&str; 6] = [
    "<think>",
    "Hm.",
    "</think>",
    "<tool_call>",
    r#"{"name":Ġ"set_alarm",Ġ"arguments":Ġ{"hour":Ġ7}}"#,
    "</tool_call>",
];

/// A model with a tokenizer and a template of the family that says [`SPOKEN`].
///
/// Its layers add nothing, so the logits are products of the embedding of the last token with all
/// others. With the gains of the last norm at −1 in the second half, token k has the embedding
/// s_k · (e_k + e_{k−1}, e_k − e_{k−1}): its product with itself is zero, and with its neighbours in the
/// chain it is twice their sizes s, of which the next one is the larger.
fn talking(out: &Path) -> PathBuf {
    let to = out.join("talking");
    let data = Path::new(ROOT).join("crates/firesteel-generate/tests/data/qwen3");
    let tokenizer = Tokenizer::open(&data).unwrap();
    let chain = [&["Ċ"][..], &SPOKEN, &["<|im_end|>"]].concat();
    let chain: Vec<usize> =
        chain.iter().map(|token| tokenizer.token_id(token).unwrap() as usize).collect();
    changed_checkpoint(
        &folder("tied"),
        &to,
        &|config| {
            config["vocab_size"] = ROWS.into();
            config["bos_token_id"] = tokenizer.token_id("<|endoftext|>").into();
            config["eos_token_id"] = tokenizer.token_id("<|im_end|>").into();
        },
        &|name, shape, values| match name {
            "model.embed_tokens.weight" => {
                let width = shape[1];
                shape[0] = ROWS;
                *values = vec![0.0; ROWS * width];
                for (at, id) in chain.iter().enumerate() {
                    let (first, second) = values[id * width..][..width].split_at_mut(width / 2);
                    let size = (1u32 << at) as f32;
                    (first[at], first[at + 1], second[at], second[at + 1]) =
                        (size, size, -size, size);
                }
            }
            "model.norm.weight" => {
                let (first, second) = values.split_at_mut(shape[0] / 2);
                first.fill(1.0);
                second.fill(-1.0);
            }
            name if name.contains("o_proj") || name.contains("down_proj") => values.fill(0.0),
            _ => {}
        },
    );
    std::fs::remove_file(to.join("generation_config.json")).unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"] {
        std::fs::copy(data.join(name), to.join(name)).unwrap();
    }
    to
}

fn alarm_tool() -> Value {
    value!({"type": "function", "function": {"name": "set_alarm", "parameters": {
        "type": "object", "properties": {"hour": {"type": "integer"}}}}})
}

/// A chat with all that the template knows, and its prompt.
fn chat() -> (Value, String) {
    let conversation = value!({
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Wake me <|im_end|> é"},
            {"role": "assistant", "content": null, "reasoning_content": "\nAn alarm.\n", "tool_calls": [
                {"function": {"name": "set_alarm", "arguments": "{\"hour\":6,\"label\":\"a \\\"b\\\"\"}"}},
                {"function": {"name": "set_alarm", "arguments": {"hour": 7}}}]},
            {"role": "tool", "content": "done"},
            {"role": "tool", "content": ""},
        ],
        "tools": [alarm_tool()],
        "add_generation_prompt": true,
    });
    let prompt = [
        "<|im_start|>system\nBe brief.\n\n# Tools\n<tools>\n",
        r#"{"type": "function", "function": {"name": "set_alarm", "parameters": {"type": "object", "#,
        r#""properties": {"hour": {"type": "integer"}}}}}"#,
        "\n</tools>\nA call is JSON with name and arguments in <tool_call></tool_call>.<|im_end|>\n",
        "<|im_start|>user\nWake me <|im_end|> é<|im_end|>\n",
        "<|im_start|>assistant\n<think>\nAn alarm.\n</think>\n\n<tool_call>\n",
        r#"{"name": "set_alarm", "arguments": {"hour": 6, "label": "a \"b\""}}"#,
        "\n</tool_call>\n<tool_call>\n",
        r#"{"name": "set_alarm", "arguments": {"hour": 7}}"#,
        "\n</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\ndone\n</tool_response>\n",
        "<tool_response>\n\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    ];
    (conversation, prompt.concat())
}

/// The ids of a prompt in which the first end of a turn is what a user says.
fn prompt_ids(tokenizer: &Tokenizer, prompt: &str) -> Vec<u32> {
    let encode = |text: &str, added| tokenizer.encode(text, added).unwrap();
    let (before, after) = prompt.split_once("Wake me <|im_end|> é").unwrap();
    let ids = [
        encode(before, AddedTokens::Parse),
        encode("Wake me <|im_end|> é", AddedTokens::AsText),
        encode(after, AddedTokens::Parse),
    ]
    .concat();
    // The words of a message do not grow together with the line break before them.
    assert_eq!(tokenizer.decode(&ids).matches("<|im_end|>").count(), 1);
    ids
}

#[test]
fn tokenizer_and_template_go_through_a_gguf_file() {
    let out = tempfile::tempdir().unwrap();
    let (model, file) = (talking(out.path()), out.path().join("model.gguf"));
    let quantize = ["quantize", "gguf", argument(&model), "--format", "f32", "--out"];
    stdout(&[&quantize[..], &[argument(&file)]].concat());
    let metadata = Checkpoint::open(&file).unwrap().gguf_tokenizer().unwrap().unwrap();
    assert_eq!((metadata.model.as_str(), metadata.pre.as_deref()), ("gpt2", Some("qwen2")));
    let (own, read) =
        (Tokenizer::open(&model).unwrap(), Tokenizer::from_gguf(&metadata, &file).unwrap());
    let texts = [
        "",
        "The text I'LL they'Re 'S 'ſ 1234 x²½",
        "a<|im_start|>b <think></think>\n<tool_call> <|im_end<|endoftext|>",
        "e\u{301} \u{212b} \u{1112}\u{1161}\u{11ab} <\u{338} <think>\u{338}",
        " \t\r\n \n\n  x \u{a0}\u{3000}\0\u{7f}\u{10ffff}👩\u{200d}👧",
        "今日は नमस्ते สวัสดี مرحبا ١٢٣ !?...\n\n",
    ];
    for text in texts {
        for added in [AddedTokens::AsText, AddedTokens::Parse] {
            let ids = own.encode(text, added).unwrap();
            assert_eq!(read.encode(text, added).unwrap(), ids, "{text:?} {added:?}");
            assert_eq!(read.decode(&ids), own.decode(&ids), "{text:?} {added:?}");
        }
    }
    // What is not in NFC becomes what is, but for what stands behind a token.
    let ids = own.encode(texts[3], AddedTokens::Parse).unwrap();
    assert_eq!(own.decode(&ids), "é Å 한 ≮ <think>\u{338}");
    for id in 0..ROWS as u32 + 2 {
        assert_eq!(read.token_bytes(id), own.token_bytes(id), "{id}");
        assert_eq!((read.is_added(id), read.decode(&[id])), (own.is_added(id), own.decode(&[id])));
    }
    assert_eq!((own.has_token(296), own.has_token(297)), (true, false));
    let end = own.token_id("<|im_end|>");
    assert_eq!((read.eos_token_id(), own.eos_token_id()), (end, end));
    let (chat, prompt) = chat();
    let chat: Conversation = serde_json::from_value(chat).unwrap();
    let templates = [
        (ChatTemplate::open(&model).unwrap(), own),
        (ChatTemplate::from_gguf(&metadata, &file).unwrap(), read),
    ];
    for (template, tokenizer) in templates {
        assert_eq!(template.render(&chat).unwrap(), prompt);
        let ids = template.encode(&chat, &tokenizer).unwrap();
        assert_eq!(ids, prompt_ids(&tokenizer, &prompt));
    }
}

#[test]
fn a_chat_is_answered_with_a_thought_and_a_call() {
    let out = tempfile::tempdir().unwrap();
    let place = |name: &str| out.path().join(name);
    let (model, file, artifact) = (talking(out.path()), place("model.gguf"), place("artifact"));
    let quantize = ["quantize", "gguf", argument(&model), "--format", "q8_0", "--out"];
    stdout(&[&quantize[..], &[argument(&file)]].concat());
    stdout(&["export", argument(&model), "--context", "512", "--out", argument(&artifact)]);
    let (chat, prompt) = chat();
    let messages = place("chat.json");
    std::fs::write(&messages, chat.to_string()).unwrap();
    let tokenizer = Tokenizer::open(&model).unwrap();
    let length = prompt_ids(&tokenizer, &prompt).len();
    let said = SPOKEN.concat().replace('Ġ', " ");
    let generate = |path: &Path, options: &[&str]| {
        json(&[&["generate", argument(path), "--json"], options].concat())
    };
    let tools = [alarm_tool()];
    let runners: [(&Path, &[&str]); 5] = [
        (&model, &[]),
        (&model, &["--runner", "engine"]),
        (&file, &[]),
        (&artifact, &[]),
        (&artifact, &["--runner", "ort"]),
    ];
    for (path, options) in runners {
        let report = generate(path, &[&["--messages", argument(&messages)], options].concat());
        let about = format!("{} {options:?}: {report}", path.display());
        assert_eq!(report["stats"]["prompt_tokens"], length, "{about}");
        assert_eq!(report["text"], said, "{about}");
        assert_eq!(report["stop"], "end_of_sequence", "{about}");
        let syntax = Syntax::of("qwen3").unwrap();
        let options = AnswerOptions { syntax, tools: &tools, in_thought: false };
        let answer = Answer::read(report["text"].as_str().unwrap(), &options);
        let call = ToolCall {
            name: "set_alarm".into(),
            arguments: r#"{"hour": 7}"#.into(),
            flags: Vec::new(),
        };
        assert_eq!((answer.reasoning.as_str(), answer.content.as_str()), ("Hm.", ""), "{about}");
        assert_eq!((answer.calls, answer.flags), (vec![call], Vec::new()), "{about}");
    }
    // The options of the command line make the same prompts; without thinking the template answers
    // with an empty thought.
    let file = place("tools.json");
    std::fs::write(&file, value!(tools).to_string()).unwrap();
    let asked = ["--chat", "--system", "S", "--tools", argument(&file), "--prompt", "p"];
    let thinking = generate(&model, &asked);
    let not = generate(&model, &[&asked[..], &["--no-thinking"]].concat());
    let count = |report: &Value| report["stats"]["prompt_tokens"].as_u64().unwrap();
    let thought = tokenizer.encode("<think>\n\n</think>\n\n", AddedTokens::Parse).unwrap();
    assert_eq!(count(&not), count(&thinking) + thought.len() as u64);
    assert_eq!((&thinking["text"], &not["text"]), (&value!(said), &value!(said)));
}
