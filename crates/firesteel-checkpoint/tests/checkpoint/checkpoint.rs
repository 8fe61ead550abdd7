//! Golden checkpoints and variations of the tensors.

use crate::common::{
    Failures, GOLDEN, Model, SPARK_TINY, Stored, all_values, bytes_as, object, values, weights,
};
use firesteel_checkpoint::{Checkpoint, Head, Slot};
use firesteel_tensor::DType;
use half::{bf16, f16};
use safetensors::{Dtype, SafeTensors};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::Path;

fn open(dir: &Path) -> Result<Checkpoint, String> {
    Checkpoint::open(dir).map_err(|e| e.to_string())
}

/// Writes a changed tiny model and opens it.
fn open_with(edit: impl FnOnce(&mut Model)) -> Result<Checkpoint, String> {
    let dir = tempfile::tempdir().unwrap();
    let mut model = Model::tiny();
    edit(&mut model);
    model.write(dir.path());
    // The map outlives the folder's name.
    open(dir.path())
}

/// The stored values of every file of a folder, read through the reference implementation.
fn reference_values(dir: &Path) -> BTreeMap<String, Vec<f32>> {
    let mut all = BTreeMap::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "safetensors") {
            continue;
        }
        let bytes = std::fs::read(path).unwrap();
        for (name, view) in SafeTensors::deserialize(&bytes).unwrap().iter() {
            let pair = |b: &[u8]| [b[0], b[1]];
            let data = view.data();
            let values = match view.dtype() {
                Dtype::F32 => {
                    data.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
                }
                Dtype::F16 => {
                    data.chunks(2).map(|b| f16::from_le_bytes(pair(b)).to_f32()).collect()
                }
                Dtype::BF16 => {
                    data.chunks(2).map(|b| bf16::from_le_bytes(pair(b)).to_f32()).collect()
                }
                other => panic!("{other}"),
            };
            all.insert(name.to_owned(), values);
        }
    }
    all
}

#[test]
fn golden_checkpoints_hold_the_stored_values() {
    let cases = [
        ("mini", DType::F32, 66, 1),
        ("mini-bf16-sharded", DType::BF16, 66, 3),
        ("mini-f16", DType::F16, 66, 1),
        ("mini-untied", DType::F32, 67, 1),
    ];
    for (name, dtype, tensors, shards) in cases {
        let dir = Path::new(GOLDEN).join(name);
        let checkpoint = open(&dir).unwrap();
        assert_eq!(checkpoint.warnings(), [""; 0], "{name}");
        assert_eq!(checkpoint.tensor_count(), tensors, "{name}");
        assert_eq!(checkpoint.path(), Some(dir.as_path()));
        assert_eq!(checkpoint.layers().len(), 8);
        assert_eq!(checkpoint.layers()[0].weight(Slot::QueryKeyValue).unwrap().shape(), [128, 64]);
        assert_eq!(checkpoint.layers()[7].weight(Slot::HeadGate).unwrap().shape(), [4, 64]);
        let files: Vec<_> = checkpoint.files().iter().map(|file| file.name.as_str()).collect();
        assert_eq!(files.len(), shards + 1, "{files:?}");
        assert!(files.is_sorted() && files[0] == "config.json", "{files:?}");
        assert!(weights(&checkpoint).iter().all(|weight| weight.dtype() == dtype));
        assert_eq!(matches!(checkpoint.head(), Head::Stored(_)), name == "mini-untied");
        assert_eq!(all_values(&checkpoint), reference_values(&dir), "{name}");
    }
}

#[test]
fn spark_tiny_opens() {
    let checkpoint = open(Path::new(SPARK_TINY)).unwrap();
    assert!(matches!(checkpoint.head(), Head::Tied));
    assert_eq!(checkpoint.head_weight().key(), checkpoint.embedding().key());
    assert_eq!(checkpoint.head_weight().shape(), [2048, 256]);
    assert_eq!(all_values(&checkpoint), reference_values(Path::new(SPARK_TINY)));
}

#[test]
fn wrong_tensors_are_refused_by_name() {
    type Edit = fn(&mut Model);
    let cases: &[(&str, Edit, &[&str])] = &[
        (
            "gate rows",
            |m| m.set("model.layers.2.self_attn.g_proj.weight", &[3, 64], Dtype::F32),
            &[
                "model.safetensors: layer 2: model.layers.2.self_attn.g_proj.weight has 3 rows",
                "num_attention_heads is 4",
            ],
        ),
        (
            "gate columns",
            |m| m.set("model.layers.2.self_attn.g_proj.weight", &[4, 63], Dtype::F32),
            &["g_proj.weight has shape [4, 63]; accepted: [4, 64] = [num_attention_heads, hidden"],
        ),
        (
            "transposed matrix",
            |m| m.set("model.layers.1.mlp.up_proj.weight", &[64, 128], Dtype::F32),
            &[
                "model.safetensors: model.layers.1.mlp.up_proj.weight has shape [64, 128]",
                "accepted: [128, 64] = [intermediate_size, hidden_size]",
            ],
        ),
        (
            "norm as a matrix",
            |m| m.set("model.norm.weight", &[1, 64], Dtype::F32),
            &["model.norm.weight has shape [1, 64]; accepted: [64] = [hidden_size]"],
        ),
        (
            "padded vocabulary",
            |m| m.set("model.embedding.weight", &[384, 64], Dtype::F32),
            &["model.embedding.weight has shape [384, 64]; accepted: [320, 64] = [vocab_size"],
        ),
        (
            "head of another vocabulary",
            |m| m.set("lm_head.weight", &[384, 64], Dtype::F32),
            &["lm_head.weight has shape [384, 64]; accepted: [320, 64]"],
        ),
        (
            "separate part of the wrong size",
            |m| {
                m.separate(0);
                m.set("model.layers.0.self_attn.k_proj.weight", &[64, 64], Dtype::F32);
            },
            &["k_proj.weight has shape [64, 64]; accepted: [32, 64] = [num_key_value_heads *"],
        ),
        (
            "missing matrix",
            |m| drop(m.tensors.remove("model.layers.4.mlp.down_proj.weight")),
            &["missing tensors (1): model.layers.4.mlp.down_proj.weight"],
        ),
        (
            "missing layer",
            |m| m.tensors.retain(|name, _| !name.starts_with("model.layers.3.")),
            &["missing tensors (8): model.layers.3.input_layernorm.weight, ", ", …"],
        ),
        (
            "missing part of three",
            |m| {
                m.separate(1);
                m.tensors.remove("model.layers.1.self_attn.v_proj.weight");
            },
            &["missing tensors (1): model.layers.1.self_attn.v_proj.weight"],
        ),
        (
            "renamed",
            |m| {
                let stored = m.tensors.remove("model.embedding.weight").unwrap();
                m.tensors.insert("model.embed_tokens.weight".into(), stored);
            },
            &["missing tensors (1): model.embedding.weight; unexpected (1): \
                 model.embed_tokens.weight"],
        ),
        ("nothing stored", |m| m.tensors.clear(), &["missing tensors (42): model.embedding.w"]),
        (
            "norm of queries",
            |m| m.set("model.layers.0.self_attn.q_norm.weight", &[16], Dtype::F32),
            &[
                "unexpected tensors (1): model.layers.0.self_attn.q_norm.weight",
                "it means another architecture than spark2_5",
            ],
        ),
        (
            "bias",
            |m| m.set("model.layers.0.mlp.up_proj.bias", &[128], Dtype::F32),
            &["model.layers.0.mlp.up_proj.bias; it means another architecture"],
        ),
        (
            "surplus layer",
            |m| m.set("model.layers.5.mlp.up_proj.weight", &[128, 64], Dtype::F32),
            &["layer 5 is beyond num_hidden_layers 5"],
        ),
        (
            "adapter",
            |m| m.set("model.layers.0.mlp.up_proj.lora_A.weight", &[4, 64], Dtype::F32),
            &["it means an adapter; accepted: a checkpoint with the adapter merged"],
        ),
        (
            "both forms of the projection",
            |m| {
                let name = "model.layers.1.self_attn.q_k_v_proj.weight";
                let fused = m.tensors[name].clone();
                m.separate(1);
                m.tensors.insert(name.into(), fused);
            },
            &["layer 1 has both self_attn.q_k_v_proj.weight and \
                 model.layers.1.self_attn.q_proj.weight"],
        ),
        (
            "one part beside the fused tensor",
            |m| m.set("model.layers.1.self_attn.v_proj.weight", &[32, 64], Dtype::F32),
            &["layer 1 has both self_attn.q_k_v_proj.weight and model.layers.1.self_attn.v_proj"],
        ),
        (
            "FP8 without a scale",
            |m| m.set("model.layers.0.mlp.up_proj.weight", &[128, 64], Dtype::F8_E4M3),
            &[
                "model.layers.0.mlp.up_proj.weight has dtype F8_E4M3; accepted: F32, F16, BF16",
                "use the float release",
            ],
        ),
        (
            "FP8 with a scale",
            |m| {
                m.set("model.layers.0.mlp.up_proj.weight", &[128, 64], Dtype::F8_E4M3);
                m.set("model.layers.0.mlp.up_proj.weight_scale", &[1], Dtype::F32);
            },
            &["model.layers.0.mlp.up_proj.weight has dtype F8_E4M3"],
        ),
        (
            "scale alone",
            |m| m.set("model.layers.0.mlp.up_proj.weight_scale_inv", &[1], Dtype::F32),
            &["weight_scale_inv; it means a quantized checkpoint; accepted: the float release"],
        ),
        (
            "integers",
            |m| m.set("model.norm.weight", &[64], Dtype::I8),
            &["model.norm.weight has dtype I8; accepted: F32, F16, BF16"],
        ),
        (
            "double",
            |m| m.set("model.norm.weight", &[64], Dtype::F64),
            &["model.norm.weight has dtype F64", "save the checkpoint in one of these"],
        ),
        (
            "no head, flag false",
            |m| m.config["tie_word_embeddings"] = json!(false),
            &["lm_head.weight is missing and tie_word_embeddings is not true"],
        ),
        (
            "no head, no flag",
            |m| drop(object(&mut m.config).shift_remove("tie_word_embeddings")),
            &["lm_head.weight is missing and tie_word_embeddings is not true"],
        ),
    ];
    let mut failures = Failures::default();
    for (name, edit, parts) in cases {
        failures.expect_error(name, open_with(edit), parts);
    }
    failures.finish();
}

#[test]
fn the_data_decide_about_the_head() {
    let negated = |m: &mut Model| {
        let mut head = m.tensors["model.embedding.weight"].clone();
        head.bytes.chunks_mut(4).for_each(|value| value[3] ^= 0x80);
        m.tensors.insert("lm_head.weight".into(), head);
    };
    let copied = |m: &mut Model| {
        let head = m.tensors["model.embedding.weight"].clone();
        m.tensors.insert("lm_head.weight".into(), head);
    };

    let checkpoint = open_with(negated).unwrap();
    assert!(matches!(checkpoint.head(), Head::Stored(_)));
    let negative: Vec<f32> = values(checkpoint.embedding()).iter().map(|v| -v).collect();
    assert_eq!(values(checkpoint.head_weight()), negative);
    let [warning] = checkpoint.warnings() else { panic!("{:?}", checkpoint.warnings()) };
    assert!(
        warning.contains("config.json: tie_word_embeddings is true, but a lm_head.weight"),
        "{warning}"
    );

    for flag in [true, false] {
        let checkpoint = open_with(|m| {
            copied(m);
            m.config["tie_word_embeddings"] = json!(flag);
        })
        .unwrap();
        assert!(matches!(checkpoint.head(), Head::Tied), "{flag}");
        assert_eq!(checkpoint.head_weight().key(), checkpoint.embedding().key());
        assert_eq!(checkpoint.tensor_count(), 43);
        assert_eq!(checkpoint.warnings(), [""; 0]);
    }

    let checkpoint = open_with(|m| {
        negated(m);
        m.config["tie_word_embeddings"] = json!(false);
    })
    .unwrap();
    assert!(matches!(checkpoint.head(), Head::Stored(_)));
    assert_eq!(checkpoint.warnings(), [""; 0]);

    // Types differ, values are equal: the embedding is made of values that f16 holds.
    for (change, tied) in [(0u8, true), (1, false)] {
        let checkpoint = open_with(|m| {
            let embedding = m.tensors.get_mut("model.embedding.weight").unwrap();
            let halves: Vec<f16> =
                (0..320 * 64u32).map(|i| f16::from_f32(i as f32 / 8.0)).collect();
            embedding.bytes = halves.iter().flat_map(|v| v.to_f32().to_le_bytes()).collect();
            let mut bytes: Vec<u8> = halves.iter().flat_map(|v| v.to_le_bytes()).collect();
            *bytes.iter_mut().rev().nth(1).unwrap() ^= change;
            let head = Stored { dtype: Dtype::F16, shape: vec![320, 64], bytes };
            m.tensors.insert("lm_head.weight".into(), head);
        })
        .unwrap();
        assert_eq!(matches!(checkpoint.head(), Head::Tied), tied);
    }
}

#[test]
fn fused_separate_and_sharded_weights_are_equal_bit_for_bit() {
    let dir = tempfile::tempdir().unwrap();
    let fused = Model::tiny();
    let mut separate = fused.clone();
    (0..5).for_each(|layer| separate.separate(layer));
    let mut mixed = fused.clone();
    [0, 1, 3, 4].into_iter().for_each(|layer| mixed.separate(layer));

    fused.write(&dir.path().join("fused"));
    separate.write(&dir.path().join("separate"));
    mixed.write(&dir.path().join("mixed"));
    separate.write_sharded(&dir.path().join("sharded"), 3);

    let fused = open(&dir.path().join("fused")).unwrap();
    for name in ["separate", "mixed", "sharded"] {
        let other = open(&dir.path().join(name)).unwrap();
        for (a, b) in weights(&fused).iter().zip(&weights(&other)) {
            assert_eq!((a.name(), a.shape(), a.dtype()), (b.name(), b.shape(), b.dtype()));
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                assert!(bytes_as(a, dtype) == bytes_as(b, dtype), "{name} {}", a.name());
            }
        }
        // Stretches that start and end inside of parts.
        let (a, b) = (
            fused.layers()[0].weight(Slot::QueryKeyValue).unwrap(),
            other.layers()[0].weight(Slot::QueryKeyValue).unwrap(),
        );
        for (first, count) in [(0, 0), (4095, 2), (63 * 64, 40 * 64), (128 * 64, 0)] {
            let (mut x, mut y) = (vec![0f32; count], vec![0f32; count]);
            a.read_f32(first, &mut x).unwrap();
            b.read_f32(first, &mut y).unwrap();
            assert_eq!(x, y);
        }
        for range in [0..128, 60..100, 64..96, 5..5] {
            let (a, b) = (a.rows(range.clone()).unwrap(), b.rows(range.clone()).unwrap());
            assert_eq!((a.shape(), values(&a)), (b.shape(), values(&b)), "{range:?}");
        }
    }
}

#[test]
fn parts_of_different_types_are_one_f32_weight() {
    let checkpoint = open_with(|m| {
        m.separate(0);
        let k = m.tensors.get_mut("model.layers.0.self_attn.k_proj.weight").unwrap();
        let bits = |b: &[u8]| f32::from_le_bytes(b.try_into().unwrap());
        k.bytes = k.bytes.chunks(4).flat_map(|b| bf16::from_f32(bits(b)).to_le_bytes()).collect();
        k.dtype = Dtype::BF16;
    })
    .unwrap();
    let qkv = checkpoint.layers()[0].weight(Slot::QueryKeyValue).unwrap();
    assert_eq!((qkv.dtype(), qkv.bytes().is_none()), (DType::F32, true));
    let whole = open_with(|_| ()).unwrap();
    let (read, exact) =
        (values(qkv), values(whole.layers()[0].weight(Slot::QueryKeyValue).unwrap()));
    for (index, (&read, &exact)) in read.iter().zip(&exact).enumerate() {
        let rounded = bf16::from_f32(exact).to_f32();
        let expected = if (64 * 64..96 * 64).contains(&index) { rounded } else { exact };
        assert_eq!(read, expected, "{index}");
    }
    let k = qkv.rows(64..96).unwrap();
    assert_eq!((k.dtype(), k.bytes().is_none()), (DType::F32, true));
}

#[test]
fn keys_are_equal_exactly_for_equal_parts() {
    let checkpoint = open(&Path::new(GOLDEN).join("mini")).unwrap();
    let weight = checkpoint.layers()[0].weight(Slot::QueryKeyValue).unwrap();
    assert_eq!(weight.key(), weight.clone().key());
    assert_eq!(weight.rows(0..128).unwrap().key(), weight.key());
    assert_eq!(
        weight.rows(10..20).unwrap().rows(2..4).unwrap().key(),
        weight.rows(12..14).unwrap().key()
    );
    assert_ne!(weight.rows(0..64).unwrap().key(), weight.rows(64..128).unwrap().key());
    let keys: std::collections::HashSet<_> = weights(&checkpoint).iter().map(|w| w.key()).collect();
    assert_eq!(keys.len(), 66);
}

#[test]
fn elements_outside_a_weight_are_refused() {
    let checkpoint = open(&Path::new(GOLDEN).join("mini")).unwrap();
    let norm = checkpoint.final_norm();
    let error = norm.read_f32(60, &mut [0.0; 5]).unwrap_err().to_string();
    assert_eq!(error, "model.norm.weight: elements 60..60+5 are not inside its 64");
    assert!(norm.read_f32(usize::MAX, &mut [0.0; 5]).is_err());
    assert!(norm.convert(63, DType::F16, &mut [0; 4]).is_err());
    let error = norm.convert(0, DType::F16, &mut [0; 3]).unwrap_err().to_string();
    assert!(error.starts_with("model.norm.weight: shape"), "{error}");
    assert!(norm.convert(0, DType::I8, &mut [0; 3]).is_err());
    for range in [0..65, 65..65] {
        assert!(norm.rows(range).is_none());
    }
    #[expect(clippy::reversed_empty_ranges, reason = "a caller may pass one")]
    let reversed = norm.rows(4..2);
    assert!(reversed.is_none());
}

#[test]
fn conversion_counts_what_does_not_survive() {
    let checkpoint = open_with(|m| {
        let norm = m.tensors.get_mut("model.norm.weight").unwrap();
        norm.bytes[..4].copy_from_slice(&1e6f32.to_le_bytes());
        norm.bytes[4..8].copy_from_slice(&f32::NAN.to_le_bytes());
    })
    .unwrap();
    let report = checkpoint.final_norm().convert(0, DType::F16, &mut [0; 128]).unwrap();
    assert_eq!((report.overflowed, report.non_finite), (1, 1));
}

#[test]
fn folders_that_are_none_say_so() {
    let dir = tempfile::tempdir().unwrap();
    let mut failures = Failures::default();
    failures.expect_error("absent", open(&dir.path().join("no")), &["no"]);
    failures.expect_error("empty", open(dir.path()), &["no config.json is here"]);
    Model::tiny().write_config(dir.path());
    failures.expect_error(
        "no weights",
        open(dir.path()),
        &["neither model.safetensors nor model.safetensors.index.json is here"],
    );
    let file = dir.path().join("config.json");
    failures.expect_error("file", open(&file), &["config.json: neither a folder nor a GGUF file"]);
    failures.finish();
}
