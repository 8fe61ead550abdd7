//! Variations of config.json and the text of each refusal.

use crate::common::{Failures, GOLDEN, SPARK_TINY, object, parse, tiny_config};
use firesteel_checkpoint::{LayerKind, ModelConfig, Rope, preset, presets};
use firesteel_tensor::DType;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::path::Path;

type Edit = fn(&mut Value);

fn remove(config: &mut Value, key: &str) {
    object(config).shift_remove(key);
}

#[test]
fn refused_configs_say_file_key_value_and_what_is_accepted() {
    let cases: &[(&str, Edit, &[&str])] = &[
        (
            "unknown model_type",
            |c| c["model_type"] = json!("spark2_6"),
            &[
                "model_type is \"spark2_6\"",
                "firesteel 0.1.0 does not know",
                "it knows \"spark2_5\"",
                "update firesteel",
            ],
        ),
        ("no model_type", |c| remove(c, "model_type"), &["model_type is missing"]),
        (
            "model_type of another kind",
            |c| c["model_type"] = json!(["spark2_5"]),
            &["model_type is [\"spark2_5\"]"],
        ),
        (
            "surplus layer type",
            |c| c["layer_types"].as_array_mut().unwrap().push(json!("full_attention")),
            &["layer_types is a list of 6 entries", "5 entries, as num_hidden_layers says"],
        ),
        (
            "missing layer type",
            |c| c["layer_types"].as_array_mut().unwrap().truncate(4),
            &["layer_types is a list of 4 entries", "5 entries"],
        ),
        (
            "layer_types not a list",
            |c| c["layer_types"] = json!("full_attention"),
            &["layer_types is \"full_attention\"", "a list of"],
        ),
        (
            "unknown layer type",
            |c| c["layer_types"][2] = json!("linear_attention"),
            &["layer_types[2] is \"linear_attention\"", "\"sliding_attention\" or"],
        ),
        (
            "no layers",
            |c| {
                c["num_hidden_layers"] = json!(0);
                c["layer_types"] = json!([]);
            },
            &["num_hidden_layers is 0", "from 1 to 512"],
        ),
        (
            "too many layers",
            |c| c["num_hidden_layers"] = json!(4_000_000_000u64),
            &["num_hidden_layers is 4000000000", "from 1 to 512"],
        ),
        (
            "gate mode",
            |c| c["gate_attn_act_mode"] = json!("silu"),
            &["gate_attn_act_mode is \"silu\"", "accepted: \"sigmoid\""],
        ),
        (
            "no head-wise gate",
            |c| c["headwise_attn_output_gate"] = json!(false),
            &["headwise_attn_output_gate is false", "accepted: true"],
        ),
        (
            "gate flag of another kind",
            |c| c["headwise_attn_output_gate"] = json!("yes"),
            &["headwise_attn_output_gate is \"yes\"", "true or false"],
        ),
        (
            "element-wise gate",
            |c| c["elementwise_attn_output_gate"] = json!(true),
            &["elementwise_attn_output_gate is true", "absent or null"],
        ),
        (
            "activation",
            |c| c["hidden_act"] = json!("gelu_pytorch_tanh"),
            &["hidden_act is \"gelu_pytorch_tanh\"", "accepted: \"gelu\""],
        ),
        ("no activation", |c| remove(c, "hidden_act"), &["hidden_act is missing"]),
        (
            "heads that do not group",
            |c| c["num_key_value_heads"] = json!(3),
            &["num_attention_heads is 4", "a multiple of num_key_value_heads, which is 3"],
        ),
        ("no heads", |c| c["num_attention_heads"] = json!(0), &["num_attention_heads is 0"]),
        ("no kv heads", |c| c["num_key_value_heads"] = json!(0), &["num_key_value_heads is 0"]),
        (
            "negative size",
            |c| c["hidden_size"] = json!(-64),
            &["hidden_size is -64", "a whole number from 1 to 2147483648"],
        ),
        ("size as a fraction", |c| c["hidden_size"] = json!(64.5), &["hidden_size is 64.5"]),
        ("size as text", |c| c["vocab_size"] = json!("320"), &["vocab_size is \"320\""]),
        ("no size", |c| remove(c, "head_dim"), &["head_dim is missing"]),
        (
            "size above the limit",
            |c| c["intermediate_size"] = json!(2_147_483_649u64),
            &["intermediate_size is 2147483649"],
        ),
        (
            "product above the limit",
            |c| {
                c["hidden_size"] = json!(2_147_483_648u64);
                c["vocab_size"] = json!(2_147_483_648u64);
            },
            &["vocab_size is 2147483648", "whose product with hidden_size can be addressed"],
        ),
        (
            "projection above the limit",
            |c| {
                c["num_attention_heads"] = json!(2_147_483_648u64);
                c["head_dim"] = json!(2_147_483_648u64);
            },
            &["num_attention_heads is 2147483648", "product"],
        ),
        (
            "odd rotary dims",
            |c| c["rope_parameters"]["full_attention"]["partial_rotary_factor"] = json!(0.1875),
            &[
                "rope_parameters.full_attention.partial_rotary_factor is 0.1875",
                "even number of rotary dims from 2 to head_dim",
                "of head_dim 16 it makes 3",
            ],
        ),
        (
            "no rotary dims",
            |c| c["rope_parameters"]["full_attention"]["partial_rotary_factor"] = json!(0.0),
            &["partial_rotary_factor is 0.0", "an even number of rotary dims from 2"],
        ),
        (
            "rotary dims that round to none",
            |c| c["rope_parameters"]["full_attention"]["partial_rotary_factor"] = json!(1e-12),
            &["partial_rotary_factor is 1e-12", "even number"],
        ),
        (
            "too many rotary dims",
            |c| c["rope_parameters"]["sliding_attention"]["partial_rotary_factor"] = json!(1.5),
            &[
                "rope_parameters.sliding_attention.partial_rotary_factor is 1.5",
                "a number from 0.0 to 1.0",
            ],
        ),
        (
            "broken rotary dims",
            |c| c["rope_parameters"]["full_attention"]["partial_rotary_factor"] = json!(0.3),
            &["partial_rotary_factor is 0.3", "makes 4.8"],
        ),
        (
            "no rope entry of a layer type",
            |c| remove(&mut c["rope_parameters"], "full_attention"),
            &[
                "rope_parameters.full_attention is missing",
                "an object with rope_theta and partial_rotary_factor",
            ],
        ),
        (
            "flat theta only",
            |c| {
                remove(c, "rope_parameters");
                c["rope_theta"] = json!(10000);
            },
            &[
                "rope_parameters.sliding_attention is missing",
                "the flat rope_theta 10000 is not taken",
            ],
        ),
        (
            "flat rope_parameters",
            |c| c["rope_parameters"] = json!({"rope_theta": 10000, "rope_type": "default"}),
            &["rope_parameters.rope_theta is 10000", "both layer types at once are not taken"],
        ),
        (
            "rope entry of another type",
            |c| c["rope_parameters"]["linear_attention"] = json!({"rope_theta": 1}),
            &["rope_parameters.linear_attention is"],
        ),
        (
            "rope_parameters not an object",
            |c| c["rope_parameters"] = json!([1]),
            &["rope_parameters is [1]", "an object with one entry for each layer type"],
        ),
        (
            "rope entry not an object",
            |c| c["rope_parameters"]["full_attention"] = json!(5e6),
            &["rope_parameters.full_attention is 5000000.0"],
        ),
        (
            "no theta",
            |c| remove(&mut c["rope_parameters"]["full_attention"], "rope_theta"),
            &[
                "rope_parameters.full_attention.rope_theta is missing",
                "a number from 1.0 to 1000000000000.0",
            ],
        ),
        (
            "negative theta",
            |c| c["rope_parameters"]["full_attention"]["rope_theta"] = json!(-1),
            &[
                "rope_parameters.full_attention.rope_theta is -1",
                "a number from 1.0 to 1000000000000.0",
            ],
        ),
        (
            "scaled rope",
            |c| c["rope_parameters"]["full_attention"]["rope_type"] = json!("yarn"),
            &["rope_parameters.full_attention.rope_type is \"yarn\"", "\"default\""],
        ),
        (
            "scaled rope, old key",
            |c| c["rope_parameters"]["full_attention"]["type"] = json!("linear"),
            &["rope_parameters.full_attention.type is \"linear\""],
        ),
        (
            "rope factor",
            |c| c["rope_parameters"]["full_attention"]["factor"] = json!(4.0),
            &["rope_parameters.full_attention.factor is 4.0", "no scaling"],
        ),
        (
            "ambiguous rotary factor",
            |c| {
                remove(&mut c["rope_parameters"]["full_attention"], "partial_rotary_factor");
                c["partial_rotary_factor"] = json!(0.25);
            },
            &[
                "rope_parameters.full_attention.partial_rotary_factor is missing",
                "partial_rotary_factor 0.25 at the top level",
            ],
        ),
        (
            "attention bias",
            |c| c["attention_bias"] = json!(true),
            &["attention_bias is true", "accepted: false"],
        ),
        ("mlp bias", |c| c["mlp_bias"] = json!(true), &["mlp_bias is true", "accepted: false"]),
        (
            "quantized",
            |c| c["quantization_config"] = json!({"quant_method": "fp8"}),
            &["quantization_config is {\"quant_method\":\"fp8\"}", "use the float release"],
        ),
        (
            "no window",
            |c| c["sliding_window"] = Value::Null,
            &["sliding_window is null", "from 2", "there are sliding_attention layers"],
        ),
        ("window absent", |c| remove(c, "sliding_window"), &["sliding_window is missing"]),
        ("window of one", |c| c["sliding_window"] = json!(1), &["sliding_window is 1", "from 2"]),
        (
            "windows switched off",
            |c| c["use_sliding_window"] = json!(false),
            &["use_sliding_window is false"],
        ),
        (
            "zero epsilon",
            |c| c["rms_norm_eps"] = json!(0),
            &["rms_norm_eps is 0;", "a number from 1e-12 to 1.0"],
        ),
        (
            "epsilon beyond f32",
            |c| c["rms_norm_eps"] = json!(1e300),
            &["rms_norm_eps is 1e+300;", "a number from 1e-12 to 1.0"],
        ),
        (
            "subnormal epsilon",
            |c| c["rms_norm_eps"] = json!(1e-320),
            &["rms_norm_eps is 1e-320;", "a number from 1e-12"],
        ),
        (
            "negative epsilon",
            |c| c["rms_norm_eps"] = json!(-1e-5),
            &["rms_norm_eps is -0.00001;", "a number from 1e-12"],
        ),
        (
            "epsilon as text",
            |c| c["rms_norm_eps"] = json!("nan"),
            &["rms_norm_eps is \"nan\";", "a number from 1e-12"],
        ),
        (
            "theta beyond f32",
            |c| c["rope_parameters"]["full_attention"]["rope_theta"] = json!(1e300),
            &["full_attention.rope_theta is 1e+300;", "a number from 1.0 to 1000000000000.0"],
        ),
        (
            "theta of nothing",
            |c| c["rope_parameters"]["sliding_attention"]["rope_theta"] = json!(0.5),
            &["sliding_attention.rope_theta is 0.5;", "a number from 1.0"],
        ),
        (
            "factor beyond the head",
            |c| c["rope_parameters"]["full_attention"]["partial_rotary_factor"] = json!(1e300),
            &["partial_rotary_factor is 1e+300;", "a number from 0.0 to 1.0"],
        ),
        (
            "positions without end",
            |c| c["max_position_embeddings"] = json!(1e18),
            &["max_position_embeddings is 1e+18;", "a whole number from 1 to 2147483648"],
        ),
        (
            "head_dim without end",
            |c| c["head_dim"] = json!(u64::MAX),
            &["head_dim is 18446744073709551615;", "a whole number from 1 to 2147483648"],
        ),
        ("no epsilon", |c| remove(c, "rms_norm_eps"), &["rms_norm_eps is missing"]),
        (
            "unknown dtype",
            |c| c["dtype"] = json!("float8_e4m3fn"),
            &["dtype is \"float8_e4m3fn\"", "\"float32\", \"float16\" or \"bfloat16\""],
        ),
        (
            "unknown dtype, old key",
            |c| c["torch_dtype"] = json!("int8"),
            &["torch_dtype is \"int8\""],
        ),
        (
            "tie flag of another kind",
            |c| c["tie_word_embeddings"] = json!(1),
            &["tie_word_embeddings is 1", "true or false"],
        ),
        (
            "end id outside the vocabulary",
            |c| c["eos_token_id"] = json!([1, 320]),
            &["eos_token_id is [1,320]", "a token id below vocab_size 320, or a list of such"],
        ),
        ("negative id", |c| c["pad_token_id"] = json!(-1), &["pad_token_id is -1"]),
        ("list of begin ids", |c| c["bos_token_id"] = json!([0]), &["bos_token_id is [0]"]),
        (
            "rope_scaling",
            |c| c["rope_scaling"] = json!({"factor": 2.0}),
            &["rope_scaling is {\"factor\":2.0}", "maths that this architecture does not have"],
        ),
        (
            "rope_scaling of no kind",
            |c| c["rope_scaling"] = json!("default"),
            &["rope_scaling is \"default\"", "maths that this architecture does not have"],
        ),
        (
            "rope_scaling by yarn",
            |c| c["rope_scaling"] = json!({"rope_type": "yarn", "factor": 4.0}),
            &["rope_scaling is {\"rope_type\":\"yarn\"", "maths that this architecture does not"],
        ),
        (
            "default rope_scaling with a factor",
            |c| c["rope_scaling"] = json!({"rope_type": "default", "factor": 2.0}),
            &["rope_scaling is {\"rope_type\":\"default\"", "maths that this architecture does"],
        ),
        (
            "soft cap",
            |c| c["attn_logit_softcapping"] = json!(50.0),
            &["attn_logit_softcapping is 50.0", "maths"],
        ),
        (
            "logit soft cap",
            |c| c["final_logit_softcapping"] = json!(30.0),
            &["final_logit_softcapping is 30.0"],
        ),
        ("experts", |c| c["num_experts"] = json!(8), &["num_experts is 8"]),
        ("norm of queries", |c| c["use_qk_norm"] = json!(true), &["use_qk_norm is true"]),
        ("scaled logits", |c| c["logits_scaling"] = json!(8.0), &["logits_scaling is 8.0"]),
        (
            "long value",
            |c| c["hidden_act"] = json!("x".repeat(5000)),
            &["xxxx…; accepted: \"gelu\""],
        ),
    ];
    let mut failures = Failures::default();
    for (name, edit, parts) in cases {
        let mut config = tiny_config();
        edit(&mut config);
        let result = parse(&config);
        let in_file: Vec<&str> = [&["dir/config.json: "], *parts].concat();
        failures.expect_error(name, result, &in_file);
    }
    failures.finish();
}

#[test]
fn accepted_variations_read_as_documented() {
    type Check = fn(&ModelConfig) -> bool;
    let cases: &[(&str, Edit, Check, &[&str])] = &[
        (
            "as it is",
            |_| {},
            |c| {
                c.rope_full == Some(Rope::plain(5e6, 4))
                    && c.rope_sliding == Some(Rope::plain(1e4, 16))
                    && c.eos_token_ids == [1]
                    && (c.bos_token_id, c.pad_token_id) == (Some(0), Some(2))
                    && c.dtype == Some(DType::F32)
            },
            &[],
        ),
        (
            "layer types derived",
            |c| remove(c, "layer_types"),
            |c| {
                use LayerKind::{Full as F, Sliding as S};
                c.layer_types == [S, S, S, F, S]
            },
            &["layer_types is missing; three sliding and one full"],
        ),
        (
            "rotary factor at both levels is applied once",
            |c| c["partial_rotary_factor"] = json!(0.25),
            |c| (c.rope_full.unwrap().dims, c.rope_sliding.unwrap().dims) == (4, 16),
            &["partial_rotary_factor is ignored; rope_parameters has it for each layer type"],
        ),
        (
            "theta at both levels",
            |c| c["rope_theta"] = json!(500_000),
            |c| c.rope_full.unwrap().theta == 5e6 && c.rope_sliding.unwrap().theta == 1e4,
            &["rope_theta is ignored; rope_parameters has it"],
        ),
        (
            "no scaling",
            |c| c["rope_scaling"] = Value::Null,
            |c| c.rope_full == Some(Rope::plain(5e6, 4)),
            &[],
        ),
        (
            "default scaling",
            |c| c["rope_scaling"] = json!({"rope_type": "default"}),
            |c| c.rope_full == Some(Rope::plain(5e6, 4)),
            &[],
        ),
        (
            "default scaling, old key",
            |c| c["rope_scaling"] = json!({"type": "default", "factor": null}),
            |c| c.rope_full == Some(Rope::plain(5e6, 4)),
            &[],
        ),
        (
            "nested rotary factor left out is 1",
            |c| remove(&mut c["rope_parameters"]["sliding_attention"], "partial_rotary_factor"),
            |c| c.rope_sliding == Some(Rope::plain(1e4, 16)),
            &[],
        ),
        (
            "explicit default rope",
            |c| c["rope_parameters"]["full_attention"]["rope_type"] = json!("default"),
            |c| c.rope_full.unwrap().dims == 4,
            &[],
        ),
        (
            "gate keys missing",
            |c| {
                remove(c, "gate_attn_act_mode");
                remove(c, "headwise_attn_output_gate");
            },
            |_| true,
            &[
                "gate_attn_act_mode is missing; \"sigmoid\" is assumed",
                "headwise_attn_output_gate is missing; true is assumed",
            ],
        ),
        (
            "torch_dtype",
            |c| {
                remove(c, "dtype");
                c["torch_dtype"] = json!("bfloat16");
            },
            |c| c.dtype == Some(DType::BF16),
            &[],
        ),
        (
            "both dtype keys",
            |c| c["torch_dtype"] = json!("bfloat16"),
            |c| c.dtype == Some(DType::F32),
            &["dtype f32 and torch_dtype bf16 disagree; f32 is used"],
        ),
        ("no dtype", |c| remove(c, "dtype"), |c| c.dtype.is_none(), &[]),
        (
            "list of end ids",
            |c| c["eos_token_id"] = json!([1, 7, 1]),
            |c| c.eos_token_ids == [1, 7],
            &[],
        ),
        (
            "no ids",
            |c| {
                c["eos_token_id"] = Value::Null;
                remove(c, "bos_token_id");
            },
            |c| c.eos_token_ids.is_empty() && c.bos_token_id.is_none(),
            &[],
        ),
        (
            "only full layers need no window",
            |c| {
                c["layer_types"] = json!(vec!["full_attention"; 5]);
                c["sliding_window"] = Value::Null;
                remove(&mut c["rope_parameters"], "sliding_attention");
            },
            |c| c.sliding_window.is_none() && c.rope_sliding.is_none() && c.rope_full.is_some(),
            &[],
        ),
        ("no tie flag", |c| remove(c, "tie_word_embeddings"), |c| !c.tie_word_embeddings, &[]),
        (
            "no maximum of positions",
            |c| remove(c, "max_position_embeddings"),
            |c| c.max_position_embeddings == 8192,
            &["max_position_embeddings is missing; 8192 is assumed"],
        ),
        (
            "features that are off",
            |c| {
                c["rope_scaling"] = Value::Null;
                c["use_qk_norm"] = json!(false);
                c["num_experts"] = json!(0);
                c["residual_multiplier"] = json!(1.0);
                c["use_sliding_window"] = json!(true);
            },
            |_| true,
            &[],
        ),
        (
            "unknown harmless key",
            |c| c["favourite_colour"] = json!("red"),
            |_| true,
            &["key \"favourite_colour\" is not known and is ignored"],
        ),
    ];
    let mut failures = Failures::default();
    for (name, edit, check, expected) in cases {
        let mut config = tiny_config();
        edit(&mut config);
        match parse(&config) {
            Err(e) => failures.check(name, false, e),
            Ok((config, warnings)) => {
                failures.check(name, check(&config), &config);
                let agree = warnings.len() == expected.len()
                    && warnings.iter().zip(*expected).all(|(warning, part)| {
                        warning.starts_with("dir/config.json: ") && warning.contains(part)
                    });
                failures.check(name, agree, warnings);
            }
        }
    }
    failures.finish();
}

#[test]
fn texts_that_are_no_config_are_refused() {
    let deep = "[".repeat(100_000);
    let long = format!("{{\"a\": \"{}\"}}", "x".repeat(1 << 20));
    let cases: &[(&str, &[u8], &str)] = &[
        (
            "duplicate key",
            br#"{"hidden_size": 1, "hidden_size": 2}"#,
            "\"hidden_size\" appears twice",
        ),
        ("nested duplicate", br#"{"a": [{"b": 1, "b": 1}]}"#, "key \"b\" appears twice"),
        ("escaped duplicate", br#"{"ab": 1, "a\u0062": 2}"#, "key \"ab\" appears twice"),
        ("no object", b"[1]", "must hold one JSON object"),
        ("empty", b"", "the file is empty; download it again"),
        ("cut", br#"{"a": "#, "not valid JSON"),
        ("trailing", b"{} {}", "not valid JSON"),
        ("not UTF-8", b"{\"a\": \"\xff\"}", "not valid JSON"),
        ("infinite", br#"{"rms_norm_eps": Infinity}"#, "not valid JSON"),
        ("overflowing", br#"{"rms_norm_eps": 1e999}"#, "number out of range"),
        ("deep", deep.as_bytes(), "recursion limit exceeded"),
        ("long", long.as_bytes(), "1048585 bytes long; accepted: at most 1048576"),
    ];
    let mut failures = Failures::default();
    for (name, text, part) in cases {
        let result = ModelConfig::from_json(Path::new("c.json"), text).map_err(|e| e.to_string());
        failures.expect_error(name, result, &["c.json: ", part]);
    }
    failures.finish();
}

#[test]
fn a_byte_order_mark_is_skipped() {
    let text = format!("\u{feff}{}", tiny_config());
    assert!(ModelConfig::from_json(Path::new("c.json"), text.as_bytes()).is_ok());
}

#[test]
fn folders_and_files_open_with_their_generation_config() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("config.json");
    let generation = dir.path().join("generation_config.json");
    std::fs::write(&config, tiny_config().to_string()).unwrap();
    let eos = |path: &Path| ModelConfig::open(path).map(|(c, _)| c.eos_token_ids);

    assert_eq!(eos(dir.path()).unwrap(), [1]);
    std::fs::write(&generation, r#"{"eos_token_id": [7, 1], "temperature": 1.0}"#).unwrap();
    assert_eq!(eos(dir.path()).unwrap(), [7, 1]);
    assert_eq!(eos(&config).unwrap(), [7, 1]);
    std::fs::write(&generation, r#"{"temperature": 1.0}"#).unwrap();
    assert_eq!(eos(dir.path()).unwrap(), [1]);
    std::fs::write(&generation, r#"{"eos_token_id": 320}"#).unwrap();
    let error = eos(dir.path()).unwrap_err().to_string();
    assert!(error.contains("generation_config.json: eos_token_id is 320"), "{error}");

    std::fs::remove_file(&config).unwrap();
    let error = eos(dir.path()).unwrap_err().to_string();
    assert!(error.contains("no config.json is here"), "{error}");
}

#[test]
fn published_configs_are_accepted_without_warnings() {
    let golden =
        ["mini", "mini-bf16-sharded", "mini-f16", "mini-untied"].map(|n| format!("{GOLDEN}/{n}"));
    for folder in golden.iter().map(String::as_str).chain([SPARK_TINY]) {
        let (config, warnings) = ModelConfig::open(Path::new(folder)).unwrap();
        assert_eq!(warnings, [""; 0], "{folder}");
        assert_eq!(config.eos_token_ids, [1]);
    }
}

#[test]
fn presets_have_the_published_number_of_parameters() {
    // The smaller one is published as about 1.7 billion only.
    let published = [1_650_000_000..1_750_000_000u64, 4_112_079_360..4_112_079_361];
    for (name, expected) in presets().iter().zip(published) {
        let c = preset(name).unwrap();
        let qkv = c.query_size() + 2 * c.key_value_size();
        let layer = c.hidden_size * (2 + qkv + c.num_attention_heads + c.query_size())
            + 3 * c.hidden_size * c.intermediate_size;
        let total = c.num_layers() * layer + c.hidden_size * (c.vocab_size + 1);
        assert!(expected.contains(&(total as u64)), "{name}: {total}");
        let read = ModelConfig::from_json(Path::new("c"), c.to_json().as_bytes()).unwrap();
        assert_eq!(read, (c, Vec::new()));
    }
}

#[test]
fn a_model_is_cut_to_its_first_layers() {
    let config = preset("spark-x2.5-1.7b").unwrap();
    let cut = config.clone().with_layers(4).unwrap();
    assert_eq!(cut.layer_types, config.layer_types[..4]);
    for layers in [0, 29] {
        let error = config.clone().with_layers(layers).unwrap_err().to_string();
        assert_eq!(error, format!("cannot cut the model to {layers} layers; accepted: 1 to 28"));
    }
}

proptest! {
    #[test]
    fn any_bytes_give_a_result(text in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = ModelConfig::from_json(Path::new("c"), &text);
    }

    #[test]
    fn any_change_of_one_byte_gives_a_result(position in any::<prop::sample::Index>(), byte: u8) {
        let mut text = tiny_config().to_string().into_bytes();
        let position = position.index(text.len());
        text[position] = byte;
        let _ = ModelConfig::from_json(Path::new("c"), &text);
    }

    #[test]
    fn written_configs_read_back(
        heads in 1usize..4, group in 1usize..4, half in 1usize..20, rotary in 1usize..20,
        layers in 1usize..9, theta in 1f64..1e9, tied: bool,
    ) {
        let mut config = parse(&tiny_config()).unwrap().0;
        config.num_key_value_heads = heads;
        config.num_attention_heads = heads * group;
        config.head_dim = 2 * half.max(rotary);
        config.rope_full = Some(Rope::plain(theta, 2 * rotary));
        config.rope_sliding = Some(Rope::plain(theta, config.head_dim));
        config.tie_word_embeddings = tied;
        config.layer_types = (0..layers).map(|i| LayerKind::ALL[i % 3 % 2]).collect();
        let read = ModelConfig::from_json(Path::new("c"), config.to_json().as_bytes()).unwrap();
        prop_assert_eq!(read, (config, Vec::new()));
    }
}
