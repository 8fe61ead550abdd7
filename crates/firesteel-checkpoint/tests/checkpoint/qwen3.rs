//! Config.json and GGUF metadata of Qwen3 as they are published, and the text of each refusal.

use crate::common::gguf::{
    GgufFile, Raw, RawTensor, array_value, bool_value, f32_value, string_value, strings_value,
    u32_value,
};
use crate::common::{Failures, all_values, bytes_as, object, parse, weights};
use firesteel_checkpoint::{
    Checkpoint, Head, LayerKind, ModelConfig, RandomWeights, Rope, WeightFormat, Yarn,
};
use firesteel_quantize::gguf::{GgufOptions, quantize_gguf};
use firesteel_tensor::DType;
use serde_json::{Value, json};
use std::path::Path;

type Edit = fn(&mut Value);

/// A small config as the transformers library writes it.
fn config() -> Value {
    json!({
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": false,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 96,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_scaling": null,
        "rope_theta": 1000000,
        "sliding_window": null,
        "tie_word_embeddings": true,
        "torch_dtype": "float32",
        "transformers_version": "4.51.0",
        "use_cache": true,
        "use_sliding_window": false,
        "vocab_size": 320
    })
}

fn remove(config: &mut Value, key: &str) {
    object(config).shift_remove(key);
}

/// What the model card advises for long texts, with what follows from it.
fn card() -> Yarn {
    Yarn {
        factor: 4.0,
        original_positions: 32_768,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor: 0.1 * 4f64.ln() + 1.0,
    }
}

fn stretched(yarn: Yarn) -> Option<Rope> {
    Some(Rope { yarn: Some(yarn), ..Rope::plain(1e6, 32) })
}

#[test]
fn published_forms_of_the_config_are_read() {
    let plain = || Some(Rope::plain(1e6, 32));
    type Expected = fn() -> Option<Rope>;
    let cases: &[(&str, Edit, Expected, &[&str])] = &[
        ("as it is", |_| {}, plain, &[]),
        ("no rope_scaling", |c| remove(c, "rope_scaling"), plain, &[]),
        ("default", |c| c["rope_scaling"] = json!({"rope_type": "default"}), plain, &[]),
        (
            "default, old key",
            |c| c["rope_scaling"] = json!({"type": "default", "factor": null}),
            plain,
            &[],
        ),
        ("nothing in rope_scaling", |c| c["rope_scaling"] = json!({}), plain, &[]),
        (
            "the model card's yarn",
            |c| {
                c["rope_scaling"] = json!({
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32768
                });
            },
            || stretched(card()),
            &[],
        ),
        (
            "yarn, old key",
            |c| {
                c["rope_scaling"] = json!({
                    "type": "yarn",
                    "factor": 4,
                    "original_max_position_embeddings": 32768
                });
            },
            || stretched(card()),
            &[],
        ),
        (
            "yarn, both keys",
            |c| {
                c["rope_scaling"] = json!({
                    "type": "yarn",
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32768,
                    "truncate": true
                });
            },
            || stretched(card()),
            &[],
        ),
        (
            "yarn of all positions",
            |c| c["rope_scaling"] = json!({"rope_type": "yarn", "factor": 4.0}),
            || stretched(Yarn { original_positions: 40_960, ..card() }),
            &[],
        ),
        (
            "yarn with everything given",
            |c| {
                c["rope_scaling"] = json!({
                    "rope_type": "yarn",
                    "factor": 2.0,
                    "original_max_position_embeddings": 1024,
                    "beta_fast": 16,
                    "beta_slow": 2,
                    "attention_factor": 1.25
                });
            },
            || {
                stretched(Yarn {
                    factor: 2.0,
                    original_positions: 1024,
                    beta_fast: 16.0,
                    beta_slow: 2.0,
                    attention_factor: 1.25,
                })
            },
            &[],
        ),
        (
            "newer form",
            |c| {
                remove(c, "rope_scaling");
                remove(c, "rope_theta");
                c["rope_parameters"] = json!({"rope_theta": 1000000, "rope_type": "default"});
            },
            plain,
            &[],
        ),
        (
            "newer form of yarn",
            |c| {
                remove(c, "rope_scaling");
                remove(c, "rope_theta");
                c["rope_parameters"] = json!({
                    "rope_theta": 1000000,
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32768,
                    "partial_rotary_factor": 1.0
                });
            },
            || stretched(card()),
            &[],
        ),
        (
            "newer form beside the older",
            |c| {
                c["rope_parameters"] = json!({"rope_theta": 500000.0, "rope_type": "default"});
                c["rope_scaling"] = json!({"type": "default"});
            },
            || Some(Rope::plain(5e5, 32)),
            &[
                "rope_theta is ignored; rope_parameters is read in its place",
                "rope_scaling is ignored; rope_parameters is read in its place",
            ],
        ),
        ("no sliding_window", |c| remove(c, "sliding_window"), plain, &[]),
        // Without layers that slide it says nothing.
        ("a window for no layer", |c| c["sliding_window"] = json!(4096), plain, &[]),
        (
            "layer types of transformers 4.53",
            |c| c["layer_types"] = json!(["full_attention", "full_attention", "full_attention"]),
            plain,
            &[],
        ),
        ("whole heads", |c| c["partial_rotary_factor"] = json!(1.0), plain, &[]),
        (
            "no head_dim",
            |c| {
                remove(c, "head_dim");
                c["hidden_size"] = json!(512);
            },
            || Some(Rope::plain(1e6, 128)),
            &["head_dim is missing; 128 is assumed"],
        ),
        (
            "no max_position_embeddings",
            |c| remove(c, "max_position_embeddings"),
            plain,
            &["max_position_embeddings is missing; 32768 is assumed"],
        ),
    ];
    let mut failures = Failures::default();
    for (name, edit, rope, warnings) in cases {
        let mut json = config();
        edit(&mut json);
        match parse(&json) {
            Err(e) => failures.check(name, false, e),
            Ok((config, told)) => {
                failures.check(name, config.rope_full == rope(), config.rope_full);
                let shape = config.rope_sliding.is_none()
                    && config.sliding_window.is_none()
                    && config.layer_types == [LayerKind::Full; 3];
                failures.check(name, shape, &config);
                let expected = told.len() == warnings.len()
                    && warnings.iter().zip(&told).all(|(part, told)| told.contains(part));
                failures.check(name, expected, &told);
                // What is written back says the same.
                let again = ModelConfig::from_json(Path::new("again"), config.to_json().as_bytes());
                let (again, told) = again.unwrap();
                failures.check(name, again == config && told.is_empty(), (again, told));
            }
        }
    }
    failures.finish();
}

/// The config with an object of `rope_scaling` that is yarn but for what is given here.
macro_rules! yarn_with {
    ($($json:tt)+) => {
        |c: &mut Value| {
            c["rope_scaling"] = json!({
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768
            });
            let more = json!({$($json)+});
            object(&mut c["rope_scaling"]).extend(more.as_object().unwrap().clone());
        }
    };
}

#[test]
fn refused_configs_say_file_key_value_and_what_is_accepted() {
    let other = "null, or an object whose rope_type is \"default\" or \"yarn\"";
    let cases: &[(&str, Edit, &[&str])] = &[
        (
            "linear",
            yarn_with!("rope_type": "linear"),
            &["rope_scaling.rope_type is \"linear\"", other],
        ),
        (
            "dynamic",
            yarn_with!("rope_type": "dynamic"),
            &["rope_scaling.rope_type is \"dynamic\"", other],
        ),
        (
            "longrope",
            yarn_with!("rope_type": "longrope", "long_factor": [1.0]),
            &["rope_scaling.rope_type is \"longrope\"", other],
        ),
        (
            "llama3",
            yarn_with!("rope_type": "llama3", "low_freq_factor": 1.0),
            &["rope_scaling.rope_type is \"llama3\"", other],
        ),
        (
            "linear, old key",
            |c| c["rope_scaling"] = json!({"type": "linear", "factor": 2.0}),
            &["rope_scaling.type is \"linear\"", other],
        ),
        (
            "two types",
            yarn_with!("type": "default"),
            &["rope_scaling.type is \"default\"", "\"yarn\", as rope_type is"],
        ),
        (
            "a factor of no type",
            |c| c["rope_scaling"] = json!({"factor": 2.0}),
            &["rope_scaling.rope_type is missing", other],
        ),
        (
            "a factor of the default",
            |c| c["rope_scaling"] = json!({"rope_type": "default", "factor": 2.0}),
            &["rope_scaling.factor is 2.0", "absent, since rope_type is \"default\""],
        ),
        (
            "rope_scaling as text",
            |c| c["rope_scaling"] = json!("yarn"),
            &["rope_scaling is \"yarn\"", other],
        ),
        ("mscale", yarn_with!("mscale": 1.0), &["rope_scaling.mscale is 1.0", "yarn is known"]),
        (
            "mscale_all_dim",
            yarn_with!("mscale_all_dim": 0.707),
            &["rope_scaling.mscale_all_dim is 0.707", "yarn is known"],
        ),
        (
            "not truncated",
            yarn_with!("truncate": false),
            &["rope_scaling.truncate is false", "yarn is known"],
        ),
        (
            "no factor",
            |c| {
                c["rope_scaling"] =
                    json!({"rope_type": "yarn", "original_max_position_embeddings": 32768});
            },
            &["rope_scaling.factor is missing", "a number from 1.0 to 1024.0"],
        ),
        (
            "a shorter context",
            yarn_with!("factor": 0.5),
            &["rope_scaling.factor is 0.5", "a number from 1.0 to 1024.0"],
        ),
        ("factor as text", yarn_with!("factor": "4"), &["rope_scaling.factor is \"4\""]),
        (
            "no original positions",
            yarn_with!("original_max_position_embeddings": 0),
            &["rope_scaling.original_max_position_embeddings is 0", "a whole number from 1"],
        ),
        (
            "a ramp that falls",
            yarn_with!("beta_fast": 1, "beta_slow": 32),
            &["rope_scaling.beta_slow is 32", "a number below beta_fast, which is 1"],
        ),
        (
            "no ramp",
            yarn_with!("beta_slow": 32),
            &["rope_scaling.beta_slow is 32", "a number below beta_fast, which is 32"],
        ),
        (
            "no rotations",
            yarn_with!("beta_slow": 0),
            &["rope_scaling.beta_slow is 0", "a number from 0.001"],
        ),
        (
            "no magnitude",
            yarn_with!("attention_factor": 0.0),
            &["rope_scaling.attention_factor is 0.0", "a number from 0.1 to 10.0"],
        ),
        (
            "a base without a logarithm to divide by",
            |c| {
                yarn_with!("factor": 4.0)(c);
                c["rope_theta"] = json!(1.0);
            },
            &["rope_theta is 1.0", "a number from 2.0"],
        ),
        (
            "newer form, linear",
            |c| c["rope_parameters"] = json!({"rope_theta": 1e6, "rope_type": "linear"}),
            &["rope_parameters.rope_type is \"linear\"", other],
        ),
        (
            "newer form by layer type",
            |c| c["rope_parameters"] = json!({"full_attention": {"rope_theta": 1e6}}),
            &["rope_parameters.rope_theta is missing"],
        ),
        (
            "newer form without theta",
            |c| c["rope_parameters"] = json!({"rope_type": "default"}),
            &["rope_parameters.rope_theta is missing", "a number from 1.0"],
        ),
        ("no theta", |c| remove(c, "rope_theta"), &["rope_theta is missing", "a number from 1.0"]),
        (
            "parts of heads",
            |c| c["partial_rotary_factor"] = json!(0.5),
            &["partial_rotary_factor is 0.5", "1 or absent, since whole heads rotate"],
        ),
        (
            "parts of heads, newer form",
            |c| {
                c["rope_parameters"] = json!({
                    "rope_theta": 1e6, "rope_type": "default", "partial_rotary_factor": 0.5
                });
            },
            &["partial_rotary_factor is 0.5", "1 or absent, since whole heads rotate"],
        ),
        (
            "sliding windows",
            |c| {
                c["use_sliding_window"] = json!(true);
                c["sliding_window"] = json!(4096);
            },
            &["use_sliding_window is true", "models with sliding windows are not read"],
        ),
        (
            "biases",
            |c| c["attention_bias"] = json!(true),
            &["attention_bias is true", "models with biases are not read"],
        ),
        (
            "layers that slide",
            |c| {
                c["layer_types"] = json!(["full_attention", "sliding_attention", "full_attention"]);
            },
            &[
                "layer_types[1] is \"sliding_attention\"",
                "\"full_attention\": models with other layers are not read",
            ],
        ),
        (
            "activation",
            |c| c["hidden_act"] = json!("gelu"),
            &["hidden_act is \"gelu\"", "accepted: \"silu\""],
        ),
        ("odd heads", |c| c["head_dim"] = json!(33), &["head_dim is 33", "an even number"]),
        (
            "experts",
            |c| c["num_experts"] = json!(128),
            &["num_experts is 128", "maths that this architecture does not have"],
        ),
        (
            "the model with experts",
            |c| c["model_type"] = json!("qwen3_moe"),
            &["model_type is \"qwen3_moe\"", "it knows \"spark2_5\" and \"qwen3\""],
        ),
    ];
    let mut failures = Failures::default();
    for (name, edit, parts) in cases {
        let mut config = config();
        edit(&mut config);
        let in_file: Vec<&str> = [&["dir/config.json: "], *parts].concat();
        failures.expect_error(name, parse(&config), &in_file);
    }
    failures.finish();
}

fn random(config: &Value) -> Checkpoint {
    let options = RandomWeights { dtype: DType::F32, seed: 0, outliers: false };
    Checkpoint::random(parse(config).unwrap().0, options)
}

/// The name in a GGUF file, as the public converter has it.
fn gguf_name(name: &str) -> String {
    match name {
        "model.embed_tokens.weight" => return "token_embd.weight".into(),
        "model.norm.weight" => return "output_norm.weight".into(),
        "lm_head.weight" => return "output.weight".into(),
        _ => {}
    }
    let (layer, part) = name.strip_prefix("model.layers.").unwrap().split_once('.').unwrap();
    let stored = match part.strip_suffix(".weight").unwrap() {
        "input_layernorm" => "attn_norm",
        "post_attention_layernorm" => "ffn_norm",
        "self_attn.q_proj" => "attn_q",
        "self_attn.k_proj" => "attn_k",
        "self_attn.v_proj" => "attn_v",
        "self_attn.q_norm" => "attn_q_norm",
        "self_attn.k_norm" => "attn_k_norm",
        "self_attn.o_proj" => "attn_output",
        "mlp.gate_proj" => "ffn_gate",
        "mlp.up_proj" => "ffn_up",
        "mlp.down_proj" => "ffn_down",
        other => panic!("{other}"),
    };
    format!("blk.{layer}.{stored}.weight")
}

/// A file with the keys that the public converter writes, without a tokenizer.
fn converted(checkpoint: &Checkpoint) -> GgufFile {
    let mut file = GgufFile::empty();
    file.set("general.architecture", string_value("qwen3"));
    file.set("general.type", string_value("model"));
    file.set("general.name", string_value("Tiny"));
    file.set("general.size_label", string_value("100K"));
    file.set("general.license", string_value("apache-2.0"));
    file.set("general.tags", strings_value(&["text-generation"]));
    file.set("general.base_model.count", u32_value(1));
    file.set("general.base_model.0.name", string_value("Tiny Base"));
    file.set("general.quantization_version", u32_value(2));
    file.set("general.file_type", u32_value(0));
    for (key, value) in [
        ("block_count", 3),
        ("context_length", 40_960),
        ("embedding_length", 64),
        ("feed_forward_length", 96),
        ("vocab_size", 320),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("attention.key_length", 32),
        ("attention.value_length", 32),
    ] {
        file.set(&format!("qwen3.{key}"), u32_value(value));
    }
    file.set("qwen3.rope.freq_base", f32_value(1e6));
    file.set("qwen3.attention.layer_norm_rms_epsilon", f32_value(1e-6));
    file.set("tokenizer.ggml.model", string_value("none"));
    file.set("tokenizer.ggml.bos_token_id", u32_value(0));
    file.set("tokenizer.ggml.eos_token_id", u32_value(1));
    for weight in weights(checkpoint) {
        file.tensors.push(RawTensor {
            name: gguf_name(weight.name()),
            dims: weight.shape().iter().rev().map(|dim| *dim as u64).collect(),
            format: 0,
            offset: None,
            bytes: bytes_as(&weight, DType::F32),
        });
    }
    file
}

fn open(file: &GgufFile) -> Result<Checkpoint, String> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, file.bytes()).unwrap();
    Checkpoint::open(&path).map_err(|e| e.to_string())
}

fn yarn_keys(file: &mut GgufFile) {
    file.set("qwen3.rope.scaling.type", string_value("yarn"));
    file.set("qwen3.rope.scaling.factor", f32_value(4.0));
    file.set("qwen3.rope.scaling.original_context_length", u32_value(32_768));
}

#[test]
fn converted_files_are_read() {
    for tied in [true, false] {
        let mut json = config();
        json["tie_word_embeddings"] = json!(tied);
        let exact = random(&json);
        let read = open(&converted(&exact)).unwrap();
        assert_eq!(matches!(read.head(), Head::Stored(_)), !tied);
        assert_eq!(read.config(), exact.config());
        assert_eq!(all_values(&read), all_values(&exact));
        assert!(read.warnings().is_empty(), "{:?}", read.warnings());
    }
    type Change = fn(&mut GgufFile);
    let plain = || Some(Rope::plain(1e6, 32));
    let usual = card().attention_factor;
    type Expected = fn() -> Option<Rope>;
    let cases: &[(&str, Change, Expected, &[&str])] = &[
        ("yarn of the model card", yarn_keys, || stretched(card()), &[]),
        (
            "yarn with all keys of the converter",
            |f| {
                yarn_keys(f);
                f.set("qwen3.rope.scaling.yarn_ext_factor", f32_value(1.0));
                f.set("qwen3.rope.scaling.yarn_attn_factor", f32_value(1.138_629_4));
                f.set("qwen3.rope.scaling.yarn_beta_fast", f32_value(16.0));
                f.set("qwen3.rope.scaling.yarn_beta_slow", f32_value(2.0));
                f.set("qwen3.rope.scaling.finetuned", bool_value(true));
            },
            || stretched(Yarn { beta_fast: 16.0, beta_slow: 2.0, ..card() }),
            &[],
        ),
        (
            "a magnitude as llama.cpp reads it",
            |f| {
                yarn_keys(f);
                f.set("qwen3.rope.scaling.attn_factor", f32_value(0.5));
            },
            // As many digits as an f32 has.
            || stretched(Yarn { attention_factor: 0.569_314_7, ..card() }),
            &[],
        ),
        (
            "yarn of all positions",
            |f| {
                yarn_keys(f);
                f.remove("qwen3.rope.scaling.original_context_length");
            },
            || stretched(Yarn { original_positions: 40_960, ..card() }),
            &[],
        ),
        (
            "no scaling",
            |f| {
                f.set("qwen3.rope.scaling.type", string_value("none"));
                f.set("qwen3.rope.scaling.factor", f32_value(0.0));
                f.set("qwen3.rope.scaling.attn_factor", f32_value(1.0));
            },
            plain,
            &[],
        ),
        ("whole heads said", |f| f.set("qwen3.rope.dimension_count", u32_value(32)), plain, &[]),
        (
            "heads of each layer",
            |f| {
                let heads = [4u32, 4, 4].map(u32::to_le_bytes).concat();
                f.set("qwen3.attention.head_count", array_value(4, 3, &heads));
            },
            plain,
            &[],
        ),
        (
            "neutral values",
            |f| {
                f.set("qwen3.expert_count", u32_value(0));
                f.set("qwen3.attention.sliding_window", u32_value(0));
                f.set("qwen3.attention.causal", bool_value(true));
            },
            plain,
            &[],
        ),
        (
            "how an embedding is pooled",
            |f| f.set("qwen3.pooling_type", u32_value(3)),
            plain,
            &["\"qwen3.pooling_type\" is not known and is ignored"],
        ),
    ];
    let exact = converted(&random(&config()));
    let mut failures = Failures::default();
    failures.check("f32", (1.138_629_4 / usual - 1.0).abs() < 1e-6, usual);
    for (name, change, rope, warnings) in cases {
        let mut file = exact.clone();
        change(&mut file);
        match open(&file) {
            Err(e) => failures.check(name, false, e),
            Ok(read) => {
                failures.check(name, read.config().rope_full == rope(), read.config().rope_full);
                let told = read.warnings();
                let expected = told.len() == warnings.len()
                    && warnings.iter().zip(told).all(|(part, told)| told.contains(part));
                failures.check(name, expected, told);
            }
        }
    }
    failures.finish();
}

#[test]
fn refused_files_say_key_and_value() {
    type Change = fn(&mut GgufFile);
    fn set(file: &mut GgufFile, key: &str, value: Raw) {
        file.set(&format!("qwen3.{key}"), value);
    }
    let cases: &[(&str, Change, &[&str])] = &[
        (
            "linear",
            |f| {
                yarn_keys(f);
                set(f, "rope.scaling.type", string_value("linear"));
            },
            &["qwen3.rope.scaling.type is \"linear\"", "no other scaling is known"],
        ),
        (
            "longrope",
            |f| set(f, "rope.scaling.type", string_value("longrope")),
            &["qwen3.rope.scaling.type is \"longrope\""],
        ),
        (
            "a factor of no type, which is linear",
            |f| set(f, "rope.scaling.factor", f32_value(4.0)),
            &["qwen3.rope.scaling.factor is 4", "absent without qwen3.rope.scaling.type"],
        ),
        (
            "a factor of no type, older key",
            |f| set(f, "rope.scale_linear", f32_value(4.0)),
            &["qwen3.rope.scale_linear is 4"],
        ),
        (
            "a magnitude of no type",
            |f| set(f, "rope.scaling.attn_factor", f32_value(1.5)),
            &["qwen3.rope.scaling.attn_factor is 1.5", "absent without"],
        ),
        (
            "a magnitude that llama.cpp does not read",
            |f| {
                yarn_keys(f);
                set(f, "rope.scaling.yarn_attn_factor", f32_value(1.25));
            },
            &["qwen3.rope.scaling.yarn_attn_factor is 1.25", "accepted: 1, 1.13862943"],
        ),
        (
            "no ramp between frequencies",
            |f| {
                yarn_keys(f);
                set(f, "rope.scaling.yarn_ext_factor", f32_value(0.5));
            },
            &["qwen3.rope.scaling.yarn_ext_factor is 0.5"],
        ),
        (
            "another magnitude",
            |f| {
                yarn_keys(f);
                set(f, "rope.scaling.yarn_log_multiplier", f32_value(0.1));
            },
            &["qwen3.rope.scaling.yarn_log_multiplier is 0.1"],
        ),
        (
            "no factor",
            |f| set(f, "rope.scaling.type", string_value("yarn")),
            &["qwen3.rope.scaling.factor is missing", "a number from 1.0 to 1024.0"],
        ),
        (
            "sections",
            |f| {
                let sections = [24u32, 20, 20, 0].map(u32::to_le_bytes).concat();
                set(f, "rope.dimension_sections", array_value(4, 4, &sections));
            },
            &["qwen3.rope.dimension_sections is"],
        ),
        (
            "parts of heads",
            |f| set(f, "rope.dimension_count", u32_value(16)),
            &["qwen3.rope.dimension_count is 16", "32"],
        ),
        (
            "windows",
            |f| set(f, "attention.sliding_window", u32_value(4096)),
            &["qwen3.attention.sliding_window is 4096"],
        ),
        ("experts", |f| set(f, "expert_count", u32_value(128)), &["qwen3.expert_count is 128"]),
        (
            "later tokens are seen",
            |f| set(f, "attention.causal", bool_value(false)),
            &["qwen3.attention.causal is false", "see later ones are not read"],
        ),
        (
            "other heads for values",
            |f| set(f, "attention.value_length", u32_value(64)),
            &["qwen3.attention.value_length is 64", "32, as qwen3.attention.key_length is"],
        ),
        (
            "heads that differ between layers",
            |f| {
                let heads = [4u32, 2, 4].map(u32::to_le_bytes).concat();
                set(f, "attention.head_count", array_value(4, 3, &heads));
            },
            &["qwen3.attention.head_count is", "equal in all layers"],
        ),
        (
            "no width of heads",
            |f| f.remove("qwen3.attention.key_length"),
            &["qwen3.attention.key_length is missing"],
        ),
        ("no theta", |f| f.remove("qwen3.rope.freq_base"), &["qwen3.rope.freq_base is missing"]),
        (
            "the model with experts",
            |f| f.set("general.architecture", string_value("qwen3moe")),
            &["general.architecture is \"qwen3moe\"", "\"qwen3\""],
        ),
        (
            "no norm of queries",
            |f| f.tensors.retain(|tensor| tensor.name != "blk.1.attn_q_norm.weight"),
            &["blk.1.attn_q_norm.weight"],
        ),
        (
            "a bias",
            |f| {
                f.push("blk.0.attn_q.bias");
            },
            &["blk.0.attn_q.bias"],
        ),
        (
            "a head that ranks",
            |f| {
                f.push("cls.output.weight");
            },
            &["cls.output.weight"],
        ),
    ];
    let exact = converted(&random(&config()));
    let mut failures = Failures::default();
    for (name, change, parts) in cases {
        let mut file = exact.clone();
        change(&mut file);
        let result = open(&file).map(|read| read.warnings().to_vec());
        let result = match result {
            Ok(warnings) => Err(format!("accepted with {warnings:?}")),
            other => other,
        };
        failures.expect_error(name, result, parts);
    }
    failures.finish();
}

#[test]
fn folders_without_norms_of_heads_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let exact = random(&config());
    for absent in ["self_attn.q_norm", "self_attn.k_norm"] {
        let name = format!("model.layers.2.{absent}.weight");
        let tensors = weights(&exact)
            .iter()
            .filter(|weight| weight.name() != name)
            .map(|weight| {
                let stored = crate::common::Stored {
                    dtype: safetensors::Dtype::F32,
                    shape: weight.shape().to_vec(),
                    bytes: bytes_as(weight, DType::F32),
                };
                (weight.name().to_owned(), stored)
            })
            .collect();
        let folder = dir.path().join(absent);
        crate::common::Model { config: config(), tensors }.write(&folder);
        let error = Checkpoint::open(&folder).unwrap_err().to_string();
        assert!(error.contains(&name), "{error}");
    }
}

#[test]
fn yarn_goes_through_a_gguf_file() {
    let mut json = config();
    json["rope_scaling"] = json!({
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768
    });
    let dir = tempfile::tempdir().unwrap();
    let write = |json: &Value, name: &str| {
        let (checkpoint, path) = (random(json), dir.path().join(name));
        let options = GgufOptions::new(WeightFormat::Float(DType::F32));
        let report = quantize_gguf(&checkpoint, options, &path, &|_, _| {}).unwrap();
        (checkpoint, Checkpoint::open(&path).unwrap(), report.warnings)
    };
    let (exact, read, warnings) = write(&json, "card.gguf");
    assert_eq!(read.config(), exact.config());
    assert_eq!(read.config().rope_full, stretched(card()));
    assert!(warnings.is_empty(), "{warnings:?}");
    // What is not usual is written too.
    object(&mut json["rope_scaling"]).extend([
        ("attention_factor".to_owned(), json!(1.25)),
        ("beta_fast".to_owned(), json!(16)),
    ]);
    let (exact, read, warnings) = write(&json, "all.gguf");
    let yarn = exact.config().rope_full.unwrap().yarn.unwrap();
    assert_eq!((yarn.attention_factor, yarn.beta_fast), (1.25, 16.0));
    assert_eq!(read.config(), exact.config());
    let expected = "qwen3.rope.scaling.yarn_beta_fast 16 is in the file, but llama.cpp takes 32";
    assert_eq!(warnings, [expected]);
}
