//! Writing GGUF files: what llama.cpp wrote is the measure.

use crate::common::gguf::{GgufFile, string_value, strings_value, u32_value};
use crate::common::{Failures, GOLDEN, Model, SPARK_TINY, Stored, all_values, values, weights};
use firesteel_checkpoint::{
    Checkpoint, Gguf, GgufTokenizer, GgufValue, Head, RandomWeights, Slot, WeightFormat, preset,
};
use firesteel_quantize::gguf::{GgufOptions, GgufReport, allocate, can_raise, quantize_gguf};
use firesteel_tensor::DType;
use half::f16;
use safetensors::Dtype;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

const LLAMA_CPP: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/llamacpp");
const F32: WeightFormat = WeightFormat::Float(DType::F32);
const F16: WeightFormat = WeightFormat::Float(DType::F16);
const BF16: WeightFormat = WeightFormat::Float(DType::BF16);
const BLOCKS: [WeightFormat; 4] =
    [WeightFormat::Q8_0, WeightFormat::Q4_0, WeightFormat::Q4K, WeightFormat::Q6K];

fn golden(name: &str) -> PathBuf {
    Path::new(LLAMA_CPP).join(format!("spark-tiny-{name}.gguf"))
}

fn spark_tiny() -> Checkpoint {
    Checkpoint::open(Path::new(SPARK_TINY)).unwrap()
}

/// Writes and opens a file; the folder keeps it.
fn written(checkpoint: &Checkpoint, options: GgufOptions<'_>) -> (TempDir, Checkpoint, GgufReport) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a/model.gguf");
    let report = quantize_gguf(checkpoint, options, &path, &|_, _| {}).unwrap();
    let opened = Checkpoint::open(&path).unwrap();
    (dir, opened, report)
}

fn error(checkpoint: &Checkpoint, options: GgufOptions<'_>) -> Result<(), String> {
    let dir = tempfile::tempdir().unwrap();
    let result = quantize_gguf(checkpoint, options, &dir.path().join("model.gguf"), &|_, _| {});
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), usize::from(result.is_ok()));
    result.map(drop).map_err(|e| e.to_string())
}

/// √(Σ(x − x̂)² / Σx²) of each tensor.
fn losses(exact: &Checkpoint, checkpoint: &Checkpoint) -> BTreeMap<String, f64> {
    let exact = all_values(exact);
    let loss = |name: &str, values: &[f32]| {
        let pairs = exact[name].iter().zip(values);
        let square = |v: f32| f64::from(v).powi(2);
        let (lost, all) =
            pairs.fold((0.0, 0.0), |(l, a), (x, y)| (l + square(x - y), a + square(*x)));
        (lost / all).sqrt()
    };
    all_values(checkpoint).iter().map(|(name, v)| (name.clone(), loss(name, v))).collect()
}

#[test]
fn f16_has_the_data_and_the_metadata_of_the_public_converter() {
    let options = GgufOptions { name: Some("spark-tiny"), ..GgufOptions::new(F16) };
    let (_dir, ours, report) = written(&spark_tiny(), options);
    let (ours, theirs) = (ours.gguf().unwrap(), Gguf::open(&golden("f16")).unwrap());
    assert_eq!(ours.tensors().len(), theirs.tensors().len());
    for tensor in theirs.tensors() {
        let own = ours.tensors().iter().find(|own| own.name == tensor.name).unwrap();
        assert_eq!((&own.shape, own.format), (&tensor.shape, tensor.format), "{}", tensor.name);
        assert_eq!(*own.bytes, *tensor.bytes, "{}", tensor.name);
    }
    for (key, value) in theirs.metadata() {
        assert_eq!(ours.get(key), Some(value), "{key}");
    }
    // The public converter of that file left the advice on sampling out.
    let advice = [
        ("general.sampling.temp", GgufValue::F32(1.0)),
        ("general.sampling.top_k", GgufValue::I32(0)),
        ("general.sampling.top_p", GgufValue::F32(0.95)),
        ("general.sampling.penalty_repeat", GgufValue::F32(1.0)),
    ];
    for (key, value) in &advice {
        assert_eq!(ours.get(key).as_ref(), Some(value), "{key}");
    }
    assert_eq!(ours.metadata().count(), theirs.metadata().count() + advice.len());
    assert_eq!(report.bytes, ours.bytes().len() as u64);
}

/// Author and licence stay with the model, and what was said of the old data does not.
#[test]
fn what_a_file_says_of_its_origin_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let mut file = GgufFile::tiny();
    let kept = [
        ("general.name", string_value("tiny")),
        ("general.license", string_value("apache-2.0")),
        ("general.tags", strings_value(&["text-generation", "", "on-device"])),
        ("general.base_model.count", u32_value(1)),
    ];
    let left = [
        ("general.alignment", u32_value(64)),
        ("general.quantization_version", u32_value(1)),
        ("quantize.imatrix.file", string_value("old")),
    ];
    for (key, value) in kept.iter().chain(&left) {
        file.set(key, value.clone());
    }
    file.alignment = 64;
    std::fs::write(&path, file.bytes()).unwrap();
    let source = Checkpoint::open(&path).unwrap();
    for name in [None, Some("another")] {
        let options = GgufOptions { name, ..GgufOptions::new(F16) };
        let (_dir, ours, _) = written(&source, options);
        let (ours, theirs) = (ours.gguf().unwrap(), source.gguf().unwrap());
        for (key, _) in &kept {
            let named = name.filter(|_| *key == "general.name").map(GgufValue::String);
            assert_eq!(ours.get(key), named.or_else(|| theirs.get(key)), "{key}");
        }
        for (key, _) in &left {
            assert_eq!(ours.get(key), None, "{key}");
        }
        assert_eq!(ours.get("general.file_type"), Some(GgufValue::U32(1)));
    }
}

#[test]
fn quantizing_loses_no_more_than_llama_cpp() {
    let exact = spark_tiny();
    let mut failures = Failures::default();
    for (name, format, head) in [
        ("q8_0", WeightFormat::Q8_0, None),
        ("q4_0", WeightFormat::Q4_0, Some(WeightFormat::Q6K)),
        ("q4_k_m", WeightFormat::Q4K, Some(WeightFormat::Q6K)),
    ] {
        let theirs = Checkpoint::open(&golden(name)).unwrap();
        let (_dir, ours, report) =
            written(&exact, GgufOptions { head, ..GgufOptions::new(format) });
        let (our_losses, their_losses) = (losses(&exact, &ours), losses(&exact, &theirs));
        for (weight, tensor) in weights(&theirs).iter().zip(weights(&ours)) {
            let case = format!("{name} {} {}", weight.name(), tensor.format());
            let (own, their) = (our_losses[weight.name()], their_losses[weight.name()]);
            // Where llama.cpp mixes a larger format in, the sizes differ.
            if weight.format() == tensor.format() || !tensor.format().is_quantized() {
                failures.check(&case, own <= their, (own, their));
            }
            let reported = report.tensors.iter().find(|t| t.name == weight.name()).unwrap();
            failures.check(&case, reported.format == tensor.format(), reported);
            failures.check(&case, (reported.relative_rms - own).abs() <= 1e-9, reported);
        }
    }
    failures.finish();
}

#[test]
fn what_is_kept_in_float_is_exact() {
    let exact = spark_tiny();
    for format in BLOCKS {
        let (_dir, ours, _) = written(&exact, GgufOptions::new(format));
        let losses = losses(&exact, &ours);
        for weight in weights(&ours) {
            let float = weight.shape().len() == 1 || weight.name().contains("g_proj");
            assert_eq!(weight.format(), if float { F32 } else { format }, "{}", weight.name());
            assert_eq!(losses[weight.name()] == 0.0, float, "{}", weight.name());
        }
    }
    for format in [F32, BF16] {
        let (_dir, ours, report) = written(&exact, GgufOptions::new(format));
        assert_eq!(all_values(&ours), all_values(&exact));
        assert!(report.tensors.iter().all(|tensor| tensor.relative_rms == 0.0));
        let mut config = exact.config().clone();
        config.dtype = Some(ours.embedding().dtype());
        assert_eq!(ours.config(), &config);
    }
}

#[test]
fn importance_lowers_the_weighted_error() {
    let exact = spark_tiny();
    let weight = exact.layers()[1].weight(Slot::MlpDown).unwrap();
    let columns = weight.shape()[1];
    let importance: Vec<f32> =
        (0..columns).map(|c| ((c * 29 % 31) as f32 / 10.0).powi(3)).collect();
    let of = |name: &str| (name == weight.name()).then(|| importance.clone());
    let weighted = |checkpoint: &Checkpoint| -> f64 {
        let pairs = values(weight)
            .into_iter()
            .zip(values(checkpoint.layers()[1].weight(Slot::MlpDown).unwrap()));
        let terms = pairs.enumerate();
        terms.map(|(i, (x, y))| f64::from(importance[i % columns] * (x - y).powi(2))).sum()
    };
    for format in BLOCKS {
        let plain = GgufOptions::new(format);
        let (_a, without, _) = written(&exact, plain);
        let (_b, with, _) = written(&exact, GgufOptions { importance: Some(&of), ..plain });
        assert!(weighted(&with) < weighted(&without), "{format}");
        let up =
            |checkpoint: &Checkpoint| values(checkpoint.layers()[1].weight(Slot::MlpUp).unwrap());
        assert_eq!(up(&with), up(&without));
    }
}

#[test]
fn equal_inputs_give_equal_bytes_on_any_number_of_threads() {
    let exact = spark_tiny();
    let bytes = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let (_dir, ours, report) =
            pool.install(|| written(&exact, GgufOptions::new(WeightFormat::Q4K)));
        (ours.files()[0].bytes.to_vec(), report)
    };
    assert_eq!(bytes(1), bytes(3));
}

#[test]
fn a_gguf_file_is_written_anew_without_loss() {
    for name in ["f16", "q8_0", "q4_0", "q4_k_m"] {
        let theirs = Checkpoint::open(&golden(name)).unwrap();
        let format = theirs.layers()[0].weight(Slot::MlpGate).unwrap().format();
        let head = Some(theirs.embedding().format());
        let (_dir, ours, _) = written(&theirs, GgufOptions { head, ..GgufOptions::new(format) });
        assert_eq!(ours.gguf_tokenizer().unwrap(), theirs.gguf_tokenizer().unwrap());
        for (own, their) in weights(&ours).iter().zip(weights(&theirs)) {
            if own.format() == their.format() {
                assert_eq!(values(own), values(&their), "{name} {}", own.name());
            }
        }
    }
}

#[test]
fn rounding_to_halves_is_reported() {
    let (_dir, ours, report) = written(&spark_tiny(), GgufOptions::new(F16));
    let exact = all_values(&spark_tiny());
    let name = "model.embedding.weight";
    let rounded: Vec<f32> = exact[name].iter().map(|v| f16::from_f32(*v).to_f32()).collect();
    assert_eq!(all_values(&ours)[name], rounded);
    let tensor = report.tensors.iter().find(|tensor| tensor.name == name).unwrap();
    assert_eq!((tensor.elements, tensor.bytes), (2048 * 256, 2048 * 256 * 2));
    assert_eq!(tensor.relative_rms == 0.0, rounded == exact[name]);
}

#[test]
fn tokenizers_come_from_the_folder() {
    let tokenizer = GgufTokenizer::of_checkpoint(&spark_tiny()).unwrap();
    let theirs = Checkpoint::open(&golden("f16")).unwrap().gguf_tokenizer().unwrap();
    assert_eq!(tokenizer, theirs);

    // Merges as text, a template in the config, ids that no token has.
    let dir = tempfile::tempdir().unwrap();
    Model::tiny().write(dir.path());
    let tokenizer = |path: &str, value: Value| {
        let mut json = small_tokenizer();
        if !path.is_empty() {
            let (parent, key) = path.rsplit_once('/').unwrap();
            json.pointer_mut(parent).unwrap()[key] = value;
        }
        std::fs::write(dir.path().join("tokenizer.json"), json.to_string()).unwrap();
        GgufTokenizer::of_checkpoint(&Checkpoint::open(dir.path()).unwrap())
            .map(Option::unwrap)
            .map_err(|e| e.to_string())
    };
    let config = dir.path().join("tokenizer_config.json");
    std::fs::write(&config, r#"{"chat_template":"{{x}}"}"#).unwrap();
    let read = tokenizer("", Value::Null).unwrap();
    assert_eq!(read.tokens[..5], ["a", "b", "ab", "<s>", "[PAD4]"]);
    assert_eq!((read.token_types[..5].to_vec(), read.tokens.len()), (vec![1, 1, 1, 3, 5], 320));
    assert_eq!(read.merges, ["a b"]);
    assert_eq!((read.chat_template.as_deref(), read.add_bos), (Some("{{x}}"), false));

    // A template with the token that begins a sequence, and what changes no token.
    let begin = |id: u32| {
        let (token, text) =
            (json!({"SpecialToken": {"id": "<s>"}}), json!({"Sequence": {"id": "A"}}));
        let special = json!({"<s>": {"id": "<s>", "ids": [id], "tokens": ["<s>"]}});
        json!({"type": "TemplateProcessing", "single": [token, text], "special_tokens": special})
    };
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false});
    let both = json!({"type": "Sequence", "processors": [bytes, begin(BOS)]});
    for (path, value, add_bos) in [
        ("/post_processor", Value::Null, false),
        ("/post_processor", bytes.clone(), false),
        ("/post_processor", begin(BOS), true),
        ("/post_processor", both, true),
        ("/normalizer", json!({"type": "Sequence", "normalizers": []}), false),
        ("/model/ignore_merges", json!(false), false),
        ("/model/continuing_subword_prefix", json!(""), false),
        ("/pre_tokenizer/pretokenizers/4/trim_offsets", json!(false), false),
    ] {
        assert_eq!(tokenizer(path, value.clone()).unwrap().add_bos, add_bos, "{path}: {value}");
    }

    let mut failures = Failures::default();
    let split = "the splits, digits and bytes of a pre-tokenizer with a name, which is what";
    for (path, value, part) in [
        ("/model/vocab/ab", json!(320), "token \"ab\" has id 320; accepted: below vocab_size"),
        ("/model/type", json!("Unigram"), "model.type is \"Unigram\"; accepted: \"BPE\""),
        ("/model/merges", json!([3]), "not the tokenizer.json of a byte-level BPE"),
        ("/model/ignore_merges", json!(true), "model.ignore_merges is true; accepted: none"),
        ("/model/end_of_word_suffix", json!("</w>"), "model.end_of_word_suffix is \"</w>\""),
        ("/model/dropout", json!(0.1), "model.dropout is 0.1; accepted: none"),
        ("/normalizer", json!({"type": "NFC"}), "normalizer is {\"type\":\"NFC\"}; accepted: none"),
        ("/pre_tokenizer", Value::Null, "pre_tokenizer is missing; accepted: the splits"),
        ("/pre_tokenizer/pretokenizers/0/pattern", json!({"Regex": "\\d"}), split),
        ("/pre_tokenizer/pretokenizers/1/behavior", json!("Removed"), split),
        ("/pre_tokenizer/pretokenizers/3/individual_digits", json!(false), split),
        ("/pre_tokenizer/pretokenizers/4/add_prefix_space", json!(true), split),
        (
            "/post_processor",
            begin(BOS + 1),
            "accepted: none, ByteLevel, or a template with no more",
        ),
        ("/post_processor", json!({"type": "BertProcessing"}), "post_processor is {\"type\":"),
    ] {
        let case = format!("{path}: {value}");
        failures.expect_error(&case, tokenizer(path, value), &["tokenizer.json: ", part]);
    }
    std::fs::write(&config, r#"{"chat_template":[{"name":"tools","template":"x"}]}"#).unwrap();
    let part = "tokenizer_config.json: chat_template is [{\"name\":\"tools\",\"template\":\"x\"}]; \
                accepted: a text, or a list with a template named default";
    failures.expect_error("templates", tokenizer("", Value::Null), &[part]);
    failures.finish();
}

/// Id that begins a sequence of the small model.
const BOS: u32 = 0;

/// A tokenizer of four tokens that splits texts as the trained one does.
fn small_tokenizer() -> Value {
    let trained = std::fs::read(Path::new(SPARK_TINY).join("tokenizer.json")).unwrap();
    let trained: Value = serde_json::from_slice(&trained).unwrap();
    json!({
        "added_tokens": [{"id": 3, "content": "<s>", "special": true}],
        "pre_tokenizer": trained["pre_tokenizer"],
        "model": {
            "type": "BPE",
            "vocab": {"a": 0, "b": 1, "ab": 2, "<s>": 3},
            "merges": ["a b"],
        },
    })
}

#[test]
fn what_has_no_place_in_the_file_is_told() {
    let dir = tempfile::tempdir().unwrap();
    Model::tiny().write(dir.path());
    let write = |name: &str, json: &Value| {
        std::fs::write(dir.path().join(name), json.to_string()).unwrap();
    };
    let told = || written(&Checkpoint::open(dir.path()).unwrap(), GgufOptions::new(F32)).2.warnings;
    write("tokenizer.json", &small_tokenizer());
    assert_eq!(told(), Vec::<String>::new());
    // Neutral values, and keys that say nothing of the text.
    let neutral = json!({
        "eos_token_id": [1, 2, 3], "do_sample": true, "temperature": 0.5, "top_k": 3, "top_p": 0.5,
        "min_p": 0.1, "repetition_penalty": 1.1, "num_beams": 1, "bad_words_ids": [],
        "min_new_tokens": 0, "typical_p": null, "transformers_version": "4.57.1",
    });
    write("generation_config.json", &neutral);
    assert_eq!(told(), Vec::<String>::new());
    let config = json!({
        "eos_token_id": [1, 2, 3, 42, 43], "bad_words_ids": [[3], [4, 5]], "min_new_tokens": 2,
        "typical_p": 0.5, "num_beams": 4,
    });
    write("generation_config.json", &config);
    let mut tokenizer = small_tokenizer();
    tokenizer["added_tokens"][0]["lstrip"] = json!(true);
    write("tokenizer.json", &tokenizer);
    let [first, second] = ["default", "tools"].map(|name| json!({"name": name, "template": "x"}));
    write("tokenizer_config.json", &json!({"chat_template": [second, first]}));
    let place = "has no place in a GGUF file";
    let expected = [
        "eos_token_id 42, 43 is not in the file, which has places for 3 ids; a text does not end \
         there"
            .to_owned(),
        format!("generation_config.json: bad_words_ids = [[3],[4,5]] {place}"),
        format!("generation_config.json: min_new_tokens = 2 {place}"),
        format!("generation_config.json: typical_p = 0.5 {place}"),
        format!("generation_config.json: num_beams = 4 {place}"),
        format!("tokenizer.json: lstrip = true of the added token \"<s>\" {place}"),
        "tokenizer_config.json: the chat template \"tools\" is not in the file".to_owned(),
    ];
    assert_eq!(told(), expected);
    // A file of llama.cpp has all that a file of ours has.
    let theirs = Checkpoint::open(&golden("q8_0")).unwrap();
    assert_eq!(written(&theirs, GgufOptions::new(F16)).2.warnings, Vec::<String>::new());
}

#[test]
fn the_file_type_tells_a_mix_from_one_format() {
    let exact = spark_tiny();
    let down = |name: &str, format| name.contains("down_proj").then_some(format);
    let q6_k = |name: &str| down(name, WeightFormat::Q6K);
    let q4_0 = |name: &str| down(name, WeightFormat::Q4_0);
    let q4_k = GgufOptions::new(WeightFormat::Q4K);
    // The values of llama.h: MOSTLY_Q4_K_S is 14, MOSTLY_Q4_K_M is 15.
    for (options, expected) in [
        (GgufOptions::new(F32), 0),
        (GgufOptions::new(F16), 1),
        (GgufOptions::new(BF16), 32),
        (GgufOptions::new(WeightFormat::Q4_0), 2),
        (GgufOptions::new(WeightFormat::Q8_0), 7),
        (GgufOptions::new(WeightFormat::Q6K), 18),
        (q4_k, 14),
        (GgufOptions { head: Some(WeightFormat::Q6K), ..q4_k }, 14),
        (GgufOptions { formats: Some(&q4_0), ..q4_k }, 14),
        (GgufOptions { formats: Some(&q6_k), ..q4_k }, 15),
    ] {
        let (_dir, ours, _) = written(&exact, options);
        let found = ours.gguf().unwrap().get("general.file_type").unwrap().as_u64();
        assert_eq!(found, Some(expected), "{options:?}");
    }
}

#[test]
fn untied_heads_and_models_without_tokenizer_are_written() {
    let untied = Checkpoint::open(&Path::new(GOLDEN).join("mini-untied")).unwrap();
    let (_dir, ours, _) = written(&untied, GgufOptions::new(F32));
    assert!(matches!(ours.head(), Head::Stored(_)));
    assert_eq!(all_values(&ours), all_values(&untied));
    assert_eq!(ours.gguf_tokenizer().unwrap(), None);
    assert_eq!(ours.gguf().unwrap().get("tokenizer.ggml.model").unwrap().as_str(), Some("none"));

    let mut config = preset("spark-x2.5-1.7b").unwrap().with_layers(4).unwrap();
    (config.vocab_size, config.hidden_size, config.intermediate_size) = (512, 256, 768);
    config.eos_token_ids = vec![1, 7, 9];
    let random = Checkpoint::random(config.clone(), RandomWeights::default());
    let (_dir, ours, _) = written(&random, GgufOptions::new(WeightFormat::Q4_0));
    config.dtype = None;
    assert_eq!(ours.config(), &config);
}

#[test]
fn advice_on_sampling_is_that_of_the_folder() {
    let dir = tempfile::tempdir().unwrap();
    Model::tiny().write(dir.path());
    let write = |text: &str| {
        std::fs::write(dir.path().join("generation_config.json"), text).unwrap();
        let file = dir.path().join("model.gguf");
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        let options = GgufOptions { replace: true, ..GgufOptions::new(F32) };
        quantize_gguf(&checkpoint, options, &file, &|_, _| {}).map_err(|e| e.to_string())?;
        Ok::<_, String>(Checkpoint::open(&file).unwrap())
    };
    let advice = |checkpoint: &Checkpoint| -> Vec<(String, String)> {
        let all = checkpoint.gguf().unwrap().metadata();
        let own = all.filter_map(|(key, value)| {
            Some((key.strip_prefix("general.sampling.")?.to_owned(), value.to_string()))
        });
        own.collect()
    };
    let cases = [
        ("{}", vec![("temp", "0")]),
        (r#"{"temperature": 0.5, "top_k": null}"#, vec![("temp", "0")]),
        (
            r#"{"do_sample": true, "temperature": 0.5, "top_k": -1, "min_p": 0.25,
                "repetition_penalty": 1.5}"#,
            vec![
                ("temp", "0.5"),
                ("top_k", "0"),
                ("min_p", "0.25"),
                ("penalty_repeat", "1.5"),
                ("penalty_last_n", "-1"),
            ],
        ),
    ];
    for (text, expected) in cases {
        let checkpoint = write(text).unwrap();
        let expected: Vec<(String, String)> =
            expected.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect();
        assert_eq!(advice(&checkpoint), expected, "{text}");
        // A file made of the file keeps it.
        let (_dir, again, _) = written(&checkpoint, GgufOptions::new(F32));
        let (mut kept, mut given) = (advice(&again), expected);
        kept.sort();
        given.sort();
        assert_eq!(kept, given, "{text}");
    }
    let error = write(r#"{"top_p": "1"}"#).unwrap_err();
    assert!(error.contains("top_p is \"1\"; a number is accepted"), "{error}");
}

#[test]
fn bits_go_where_they_remove_most_harm() {
    let exact = spark_tiny();
    let plain = GgufOptions::new(WeightFormat::Q4K);
    let head = exact.head_weight().name();
    let down = exact.layers()[2].weight(Slot::MlpDown).unwrap().name();
    let harmful = |name: &str| Some(if name == down { 1e6 } else { 1.0 });
    let (_a, _, before) = written(&exact, plain);
    let bits = |report: &GgufReport| {
        let (bytes, elements) = report
            .tensors
            .iter()
            .fold((0, 0), |(b, e), tensor| (b + tensor.bytes, e + tensor.elements));
        8.0 * bytes as f64 / elements as f64
    };
    let budget = bits(&before) + 0.25;
    let raised = allocate(&exact, &plain, budget, &harmful).unwrap();
    let format = |name: &str| raised.iter().find(|r| r.name == name).map(|raised| raised.to);
    assert!(raised.iter().all(|raised| raised.from == WeightFormat::Q4K));
    // The one whose harm is largest gets all there is before another gets anything.
    assert_eq!(format(down), Some(WeightFormat::Q8_0));
    let formats = |name: &str| format(name);
    let (_b, _, after) = written(&exact, GgufOptions { formats: Some(&formats), ..plain });
    assert!(bits(&after) <= budget && bits(&after) > budget - 0.1, "{}", bits(&after));

    // What has a format of its own keeps it, and a budget that is all there is raises nothing.
    let own = |name: &str| (name == down).then_some(WeightFormat::Q4_0);
    let options = GgufOptions { formats: Some(&own), ..plain };
    let raised = allocate(&exact, &options, 9.0, &harmful).unwrap();
    assert!(raised.iter().all(|raised| raised.name != down && raised.to == WeightFormat::Q8_0));
    assert!(raised.iter().any(|raised| raised.name == head));
    assert_eq!(allocate(&exact, &plain, bits(&before), &harmful).unwrap(), []);
    let raisable: Vec<WeightFormat> =
        [F32, F16, BF16].into_iter().chain(BLOCKS).filter(|format| can_raise(*format)).collect();
    assert_eq!(raisable, [WeightFormat::Q4_0, WeightFormat::Q4K, WeightFormat::Q6K]);
    let error = allocate(&exact, &plain, 4.0, &harmful).unwrap_err().to_string();
    assert!(error.starts_with("4 bits for each weight are too few: the formats asked"), "{error}");
    for bits in [f64::NAN, -1.0] {
        assert!(allocate(&exact, &plain, bits, &harmful).is_err());
    }
}

#[test]
fn formats_of_single_matrices_are_used() {
    let exact = spark_tiny();
    let formats = |name: &str| match name {
        "model.layers.1.self_attn.q_k_v_proj.weight" => Some(WeightFormat::Q6K),
        "model.layers.3.self_attn.g_proj.weight" => Some(WeightFormat::Q8_0),
        "model.layers.3.input_layernorm.weight" => Some(F16),
        "model.embedding.weight" => Some(BF16),
        _ => None,
    };
    let options = GgufOptions { formats: Some(&formats), ..GgufOptions::new(WeightFormat::Q4_0) };
    let (_dir, ours, _) = written(&exact, options);
    assert_eq!(ours.embedding().format(), BF16);
    assert_eq!(ours.layers()[1].weight(Slot::QueryKeyValue).unwrap().format(), WeightFormat::Q6K);
    assert_eq!(ours.layers()[0].weight(Slot::QueryKeyValue).unwrap().format(), WeightFormat::Q4_0);
    assert_eq!(ours.layers()[3].weight(Slot::HeadGate).unwrap().format(), WeightFormat::Q8_0);
    assert_eq!(ours.layers()[3].weight(Slot::InputNorm).unwrap().format(), F32);
}

#[test]
fn existing_files_are_replaced_only_when_asked_and_of_the_kind() {
    let (dir, _, _) = written(&spark_tiny(), GgufOptions::new(WeightFormat::Q4_0));
    let path = dir.path().join("a/model.gguf");
    let again = |replace| {
        let options = GgufOptions { replace, ..GgufOptions::new(WeightFormat::Q8_0) };
        quantize_gguf(&spark_tiny(), options, &path, &|_, _| {}).map_err(|e| e.to_string())
    };
    assert!(again(false).unwrap_err().ends_with("exists already; choose another name"));
    let report = again(true).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().len(), report.bytes);
    std::fs::write(&path, "something else").unwrap();
    assert!(again(true).unwrap_err().ends_with("is another kind of file; not replaced"));
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "something else");
}

#[test]
fn progress_ends_at_the_size_of_the_tensors() {
    let dir = tempfile::tempdir().unwrap();
    let seen = std::sync::Mutex::new(Vec::new());
    let report = quantize_gguf(
        &spark_tiny(),
        GgufOptions::new(WeightFormat::Q8_0),
        &dir.path().join("model.gguf"),
        &|done, total| seen.lock().unwrap().push((done, total)),
    )
    .unwrap();
    let seen = seen.into_inner().unwrap();
    let tensors: u64 = report.tensors.iter().map(|tensor| tensor.bytes).sum();
    assert_eq!(seen.iter().map(|(done, _)| *done).max(), Some(tensors));
    assert!(seen.iter().all(|(_, total)| *total == tensors));
}

#[test]
fn what_cannot_be_written_is_refused_by_name() {
    let tiny = |edit: &dyn Fn(&mut Model)| {
        let dir = tempfile::tempdir().unwrap();
        let mut model = Model::tiny();
        edit(&mut model);
        model.write(dir.path());
        Checkpoint::open(dir.path()).unwrap()
    };
    let plain = tiny(&|_| {});
    let with = |value: f32| {
        tiny(&|model| {
            let stored = model.tensors.get_mut("model.layers.2.mlp.up_proj.weight").unwrap();
            let Stored { dtype: Dtype::F32, bytes, .. } = stored else { panic!() };
            bytes[400..404].copy_from_slice(&value.to_le_bytes());
        })
    };
    let q4_0 = GgufOptions::new(WeightFormat::Q4_0);
    let short = |_: &str| Some(vec![1.0; 3]);
    let negative = |name: &str| Some(vec![-1.0; if name.contains("down") { 128 } else { 64 }]);
    let mut failures = Failures::default();
    for (case, result, part) in [
        (
            "rows",
            error(&plain, GgufOptions::new(WeightFormat::Q4K)),
            "model.embedding.weight: cannot be written as q4_k: its rows of 64 are not whole blocks \
             of 256; accepted: a format whose blocks divide them",
        ),
        (
            "format",
            error(&plain, GgufOptions::new(WeightFormat::Q5K)),
            "this format is not written; accepted: f32, f16, bf16, q8_0, q4_0, q4_k, q6_k",
        ),
        (
            "not finite",
            error(&with(f32::NAN), q4_0),
            "model.layers.2.mlp.up_proj.weight: cannot be written as q4_0: element 100 is NaN",
        ),
        (
            "too large",
            error(&with(1e6), GgufOptions::new(F16)),
            "model.layers.2.mlp.up_proj.weight: cannot be written as f16: 1 values are too large",
        ),
        (
            "short importance",
            error(&plain, GgufOptions { importance: Some(&short), ..q4_0 }),
            "its importance has 3 entries; accepted: 64, its columns",
        ),
        (
            "negative importance",
            error(&plain, GgufOptions { importance: Some(&negative), ..q4_0 }),
            "its importance has an entry -1; accepted: numbers from 0",
        ),
    ] {
        failures.expect_error(case, result, &[part]);
    }
    assert_eq!(error(&with(1e6), q4_0), Ok(()));
    failures.finish();
}
