//! GGUF files: golden ones of llama.cpp, and malformed ones with the text of each refusal.

use crate::common::gguf::{
    GgufFile, array_value, bool_value, f32_value, gguf_name, string, string_value, strings_value,
    u32_value,
};
use crate::common::{Failures, Model, SPARK_TINY, all_values, bytes_as, values, weights};
use firesteel_checkpoint::{
    Checkpoint, Gguf, GgufTokenizer, GgufValue, Head, LayerKind, Slot, Weight, WeightFormat,
};
use firesteel_tensor::DType;
use half::f16;
use proptest::prelude::*;
use safetensors::SafeTensors;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/llamacpp");
const F32: WeightFormat = WeightFormat::Float(DType::F32);
const F16: WeightFormat = WeightFormat::Float(DType::F16);

fn golden(name: &str) -> PathBuf {
    Path::new(GOLDEN).join(format!("spark-tiny-{name}.gguf"))
}

fn open_bytes(bytes: &[u8]) -> Result<Checkpoint, String> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, bytes).unwrap();
    // The map outlives the file's name.
    Checkpoint::open(&path).map_err(|e| e.to_string())
}

fn open(file: &GgufFile) -> Result<Checkpoint, String> {
    open_bytes(&file.bytes())
}

fn open_with(edit: impl FnOnce(&mut GgufFile)) -> Result<Checkpoint, String> {
    let mut file = GgufFile::tiny();
    edit(&mut file);
    open(&file)
}

#[test]
fn golden_files_have_the_config_and_names_of_the_folder() {
    let folder = Checkpoint::open(Path::new(SPARK_TINY)).unwrap();
    for (name, dtype) in [("f16", Some(DType::F16)), ("q8_0", None), ("q4_0", None)] {
        let checkpoint = Checkpoint::open(&golden(name)).unwrap();
        let mut expected = folder.config().clone();
        expected.dtype = dtype;
        assert_eq!(checkpoint.config(), &expected, "{name}");
        assert_eq!(checkpoint.warnings(), [] as [&str; 0]);
        assert!(matches!(checkpoint.head(), Head::Tied));
        assert_eq!(checkpoint.tensor_count(), 34);
        let shown = |checkpoint: &Checkpoint| -> Vec<_> {
            let weights = weights(checkpoint);
            weights.iter().map(|w| (w.name().to_owned(), w.shape().to_vec())).collect()
        };
        assert_eq!(shown(&checkpoint), shown(&folder), "{name}");
        let [file] = checkpoint.files() else { panic!("one file") };
        assert_eq!(file.name, format!("spark-tiny-{name}.gguf"));
        assert_eq!(file.bytes.len() as u64, golden(name).metadata().unwrap().len());
        assert_eq!(checkpoint.path(), Some(&*golden(name)));
        assert_eq!(checkpoint.side_file("logits.safetensors").unwrap(), None);
    }
}

#[test]
fn golden_f16_holds_the_folder_rounded() {
    let folder = all_values(&Checkpoint::open(Path::new(SPARK_TINY)).unwrap());
    let checkpoint = Checkpoint::open(&golden("f16")).unwrap();
    for weight in weights(&checkpoint) {
        let exact = &folder[weight.name()];
        let expected: Vec<f32> = match weight.format() {
            F16 => exact.iter().map(|v| f16::from_f32(*v).to_f32()).collect(),
            F32 => exact.clone(),
            other => panic!("{other}"),
        };
        assert_eq!(values(&weight), expected, "{}", weight.name());
        assert!(weight.bytes().is_some() && weight.blocks().is_none());
    }
}

#[test]
fn golden_files_hold_the_types_that_llama_cpp_chose() {
    use WeightFormat::{Q4_0, Q4K, Q6K, Q8_0};
    let cases: [(&str, &[(WeightFormat, usize)]); 4] = [
        ("f16", &[(F32, 9), (F16, 25)]),
        ("q8_0", &[(F32, 9), (Q8_0, 25)]),
        ("q4_0", &[(F32, 9), (Q4_0, 24), (Q6K, 1)]),
        ("q4_k_m", &[(F32, 9), (Q4K, 20), (Q6K, 5)]),
    ];
    for (name, expected) in cases {
        let mut counts: BTreeMap<WeightFormat, usize> = BTreeMap::new();
        for weight in weights(&Checkpoint::open(&golden(name)).unwrap()) {
            *counts.entry(weight.format()).or_default() += 1;
            let bytes = weight.format().byte_count(weight.element_count());
            assert_eq!(bytes, Some(weight.stored_bytes()));
            if weight.format().is_quantized() {
                assert_eq!(weight.dtype(), DType::F32);
                assert!(weight.bytes().is_none());
                assert_eq!(weight.blocks().unwrap().len(), weight.stored_bytes());
            }
        }
        assert_eq!(counts.into_iter().collect::<Vec<_>>(), expected, "{name}");
    }
}

fn dequantized() -> Vec<u8> {
    std::fs::read(Path::new(GOLDEN).join("dequantized.safetensors")).unwrap()
}

fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

#[test]
fn golden_rows_have_the_values_of_the_python_package() {
    let bytes = dequantized();
    let mut seen = 0;
    let files = ["f16", "q8_0", "q4_0", "q4_k_m"];
    let opened = files.map(|name| Checkpoint::open(&golden(name)).unwrap());
    for (name, view) in SafeTensors::deserialize(&bytes).unwrap().iter() {
        let [file, tensor, row] = *name.split('/').collect::<Vec<_>>() else { continue };
        let checkpoint = &opened[files.iter().position(|known| *known == file).unwrap()];
        let row: usize = row.parse().unwrap();
        let all = weights(checkpoint);
        let weight = all.iter().find(|weight| gguf_name(weight.name()) == tensor).unwrap();
        let expected = f32s(view.data());
        let columns = expected.len();
        let mut actual = vec![0.0; columns];
        weight.read_f32(row * columns, &mut actual).unwrap();
        assert_eq!(actual, expected, "{name}");
        seen += 1;
    }
    assert_eq!(seen, 45);
}

/// A checkpoint of one wide layer whose embedding is stored as five given blocks.
fn with_embedding(format: u32, bytes: &[u8], elements: u64) -> Weight {
    let mut file = GgufFile::tiny();
    let hidden = if elements.is_multiple_of(256) { 256 } else { 32 };
    file.set("spark2_5.block_count", u32_value(1));
    file.set("spark2_5.embedding_length", u32_value(hidden));
    file.set("spark2_5.vocab_size", u32_value(elements as u32 / hidden));
    file.set("spark2_5.attention.sliding_window_pattern", array_value(7, 1, &[1]));
    file.tensors.retain(|tensor| !tensor.name.starts_with("blk.") || tensor.name.contains(".0."));
    for tensor in &mut file.tensors {
        tensor.dims.iter_mut().filter(|dim| **dim == 64).for_each(|dim| *dim = hidden.into());
        if tensor.name.ends_with("attn_output.weight") {
            tensor.dims = vec![64, hidden.into()];
        }
        let count: u64 = tensor.dims.iter().product();
        tensor.bytes.resize(count as usize * 4, 0);
    }
    let embedding = file.tensor("token_embd.weight");
    embedding.dims = vec![hidden.into(), elements / u64::from(hidden)];
    (embedding.format, embedding.bytes) = (format, bytes.to_vec());
    open(&file).unwrap().embedding().clone()
}

#[test]
fn every_block_format_has_the_values_of_the_python_package() {
    let bytes = dequantized();
    let golden = SafeTensors::deserialize(&bytes).unwrap();
    let cases = [
        ("q4_0", 2, WeightFormat::Q4_0),
        ("q4_1", 3, WeightFormat::Q4_1),
        ("q8_0", 8, WeightFormat::Q8_0),
        ("q4_k", 12, WeightFormat::Q4K),
        ("q5_k", 13, WeightFormat::Q5K),
        ("q6_k", 14, WeightFormat::Q6K),
    ];
    for (name, code, format) in cases {
        let blocks = golden.tensor(&format!("blocks/{name}")).unwrap();
        let expected = f32s(golden.tensor(&format!("values/{name}")).unwrap().data());
        let weight = with_embedding(code, blocks.data(), expected.len() as u64);
        assert_eq!((weight.format(), format.name()), (format, name));
        assert_eq!(&**weight.blocks().unwrap(), blocks.data());
        // Every start and length, so that blocks are cut at both ends.
        for first in [0, 1, 15, 31, 32, 33, 70] {
            for count in [0, 1, 16, 31, 32, 33, expected.len() - first] {
                let mut actual = vec![0.0; count];
                weight.read_f32(first, &mut actual).unwrap();
                assert_eq!(actual, expected[first..first + count], "{name} {first}+{count}");
                let mut halves = vec![0; 2 * count];
                weight.convert(first, DType::F16, &mut halves).unwrap();
                let rounded: Vec<u8> =
                    actual.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect();
                assert_eq!(halves, rounded, "{name} {first}+{count}");
            }
        }
        let columns = weight.shape()[1];
        let rows = weight.rows(2..4).unwrap();
        assert_eq!(values(&rows), expected[2 * columns..4 * columns], "{name}");
        let row_bytes = format.byte_count(columns).unwrap();
        assert_eq!(&**rows.blocks().unwrap(), &blocks.data()[2 * row_bytes..4 * row_bytes]);
        assert_ne!(rows.key(), weight.key());
        let mut one_too_many = [0.0];
        assert!(weight.read_f32(expected.len(), &mut one_too_many).is_err());
    }
}

#[test]
fn golden_metadata_and_tokenizer() {
    let checkpoint = Checkpoint::open(&golden("q8_0")).unwrap();
    let gguf = checkpoint.gguf().unwrap();
    assert_eq!((gguf.version(), gguf.alignment()), (3, 32));
    assert_eq!(gguf.get("general.file_type"), Some(GgufValue::U32(7)));
    assert_eq!(gguf.get("general.name").unwrap().as_str(), Some("spark-tiny"));
    assert_eq!(gguf.metadata().count(), 30);
    assert_eq!(gguf.get("nothing"), None);

    let tokenizer = checkpoint.gguf_tokenizer().unwrap().unwrap();
    assert_eq!((&*tokenizer.model, tokenizer.pre.as_deref()), ("gpt2", Some("spark2_5")));
    assert_eq!((tokenizer.tokens.len(), tokenizer.merges.len()), (2048, 1765));
    assert_eq!(tokenizer.tokens[..2], ["<｜start▁of▁sentence｜>", "<｜end▁of▁sentence｜>"]);
    assert_eq!(tokenizer.merges[..2], ["Ġ \"", "\" :"]);
    assert_eq!(tokenizer.token_types[0], GgufTokenizer::CONTROL);
    assert_eq!(tokenizer.token_types[3], GgufTokenizer::USER_DEFINED);
    assert_eq!(tokenizer.token_types[100], GgufTokenizer::NORMAL);
    let ids = (tokenizer.bos, tokenizer.eos, tokenizer.pad, tokenizer.add_bos);
    assert_eq!(ids, (Some(0), Some(1), Some(2), false));
    let template = std::fs::read_to_string(Path::new(SPARK_TINY).join("chat_template.jinja"));
    assert_eq!(tokenizer.chat_template, template.ok());

    let folder = Checkpoint::open(Path::new(SPARK_TINY)).unwrap();
    assert!(folder.gguf().is_none() && folder.gguf_tokenizer().unwrap().is_none());
}

#[test]
fn unusual_but_valid_files_are_accepted() {
    let tiny = all_values(&open(&GgufFile::tiny()).unwrap());
    let folder = tempfile::tempdir().unwrap();
    Model::tiny().write(folder.path());
    assert_eq!(tiny, all_values(&Checkpoint::open(folder.path()).unwrap()));

    type Edit = fn(&mut GgufFile);
    let cases: [(&str, Edit); 9] = [
        ("version 2", |file| file.version = 2),
        ("alignment", |file| {
            file.alignment = 4096;
            file.set("general.alignment", u32_value(4096));
        }),
        ("order", |file| file.tensors.reverse()),
        ("tail", |file| file.push("rest").name = "output_norm.weight.".into()),
        ("pattern by number", |file| {
            file.set("spark2_5.attention.sliding_window_pattern", u32_value(4));
        }),
        ("sizes by layer", |file| {
            let counts: Vec<u8> = [4u32; 5].iter().flat_map(|n| n.to_le_bytes()).collect();
            file.set("spark2_5.attention.head_count", array_value(5, 5, &counts));
        }),
        ("neutral keys", |file| {
            file.set("spark2_5.expert_count", u32_value(0));
            file.set("spark2_5.rope.scaling.type", string_value("none"));
            file.set("spark2_5.logit_scale", f32_value(1.0));
            file.set("split.count", u32_value(1));
        }),
        ("no value length", |file| file.remove("spark2_5.attention.value_length")),
        ("unknown key", |file| file.set("spark2_5.colour", string_value("red"))),
    ];
    for (name, edit) in cases {
        let opened = open_with(edit);
        if name == "tail" {
            assert!(opened.unwrap_err().contains("unexpected tensors (1): output_norm.weight.;"));
            continue;
        }
        let opened = opened.unwrap();
        assert_eq!(all_values(&opened), tiny, "{name}");
        assert_eq!(opened.config().layer_types[3], LayerKind::Full);
        assert_eq!(opened.warnings().len(), usize::from(name == "unknown key"), "{name}");
    }
}

#[test]
fn a_head_is_used_when_it_is_stored() {
    let head = |edit: fn(&mut Vec<u8>)| {
        open_with(|file| {
            let mut tensor = file.tensor("token_embd.weight").clone();
            tensor.name = "output.weight".into();
            edit(&mut tensor.bytes);
            file.tensors.push(tensor);
        })
        .unwrap()
    };
    let same = head(|_| {});
    assert!(matches!(same.head(), Head::Tied) && !same.config().tie_word_embeddings);
    let other = head(|bytes| bytes[0] ^= 1);
    assert!(matches!(other.head(), Head::Stored(w) if w.name() == "lm_head.weight"));
}

#[test]
fn ends_of_turns_end_sequences_too() {
    let checkpoint = open_with(|file| {
        file.set("tokenizer.ggml.eot_token_id", u32_value(9));
        file.set("tokenizer.ggml.eom_token_id", u32_value(1));
    });
    assert_eq!(checkpoint.unwrap().config().eos_token_ids, [1, 9]);
}

#[test]
fn one_head_may_have_a_gate_of_one_dimension() {
    let checkpoint = open_with(|file| {
        file.set("spark2_5.attention.head_count", u32_value(1));
        file.set("spark2_5.attention.head_count_kv", u32_value(1));
        for tensor in &mut file.tensors {
            match tensor.name.rsplit('.').nth(1).unwrap() {
                "attn_gate" => tensor.dims = vec![64],
                "attn_qkv" => tensor.dims[1] = 48,
                "attn_output" => tensor.dims[0] = 16,
                _ => {}
            }
            let count: u64 = tensor.dims.iter().product();
            tensor.bytes.truncate(count as usize * 4);
        }
    });
    assert_eq!(checkpoint.unwrap().layers()[0].weight(Slot::HeadGate).unwrap().shape(), [1, 64]);
}

#[test]
fn malformed_files_are_refused_with_the_rule() {
    type Edit = Box<dyn Fn(&mut GgufFile)>;
    fn edit(edit: impl Fn(&mut GgufFile) + 'static) -> Edit {
        Box::new(edit)
    }
    fn key(key: &'static str, value: impl Fn() -> crate::common::gguf::Raw + 'static) -> Edit {
        Box::new(move |file| file.set(key, value()))
    }
    fn tensor(change: impl Fn(&mut crate::common::gguf::RawTensor) + 'static) -> Edit {
        Box::new(move |file| change(file.tensor("token_embd.weight")))
    }
    let cases: Vec<(&str, Edit, &str)> = vec![
        ("version 1", edit(|f| f.version = 1), "its version is 1; accepted: 2 and 3"),
        ("version 4", edit(|f| f.version = 4), "its version is 4"),
        ("big-endian", edit(|f| f.version = 3 << 24), "it is big-endian; accepted: little-endian"),
        (
            "tensors",
            edit(|f| f.tensor_count = Some(u64::MAX)),
            "it is said to have 18446744073709551615 tensors; accepted: at most 8192",
        ),
        (
            "keys",
            edit(|f| f.key_count = Some(4097)),
            "said to have 4097 keys; accepted: at most 4096",
        ),
        ("more keys than there are", edit(|f| f.key_count = Some(40)), "key 21: its name"),
        ("more tensors", edit(|f| f.tensor_count = Some(8192)), "tensor 42: "),
        (
            "long key",
            edit(|f| f.keys.push(("k".repeat(1025), u32_value(1)))),
            "its name is said to have 1025 bytes; accepted: 1024",
        ),
        (
            "type",
            key("x", || crate::common::gguf::Raw(13, vec![])),
            "key \"x\": type 13 is not known",
        ),
        (
            "bool",
            key("x", || crate::common::gguf::Raw(7, vec![2])),
            "key \"x\": a bool of 2; accepted",
        ),
        (
            "string beyond the file",
            key("x", || crate::common::gguf::Raw(8, (1u64 << 20).to_le_bytes().to_vec())),
            "key \"x\": its value needs 1048576 bytes, but only",
        ),
        (
            "long string",
            key("x", || crate::common::gguf::Raw(8, (1u64 << 62).to_le_bytes().to_vec())),
            "its value is said to have 4611686018427387904 bytes; accepted: 1048576",
        ),
        (
            "not UTF-8",
            key("x", || crate::common::gguf::Raw(8, string(&[0xff]))),
            "key \"x\": its value: invalid utf-8",
        ),
        (
            "array count",
            key("x", || array_value(4, u64::MAX, &[])),
            "key \"x\": an array of 18446744073709551615 uint32 does not fit in the",
        ),
        (
            "array of strings",
            key("x", || array_value(8, 1 << 40, &[])),
            "an array of 1099511627776 strings does not fit in the",
        ),
        (
            "string in an array",
            key("x", || array_value(8, 2, &[string(b"a"), vec![0xff; 8]].concat())),
            "key \"x\": element 1: its value is said to have 18446744073709551615 bytes",
        ),
        ("nested", key("x", || array_value(9, 1, &[0; 16])), "arrays of arrays are not read"),
        (
            "key twice",
            edit(|f| f.keys.push(("general.architecture".into(), u32_value(1)))),
            "key \"general.architecture\" appears twice",
        ),
        (
            "alignment 0",
            key("general.alignment", || u32_value(0)),
            "general.alignment is 0; accepted: a power of two up to 1048576",
        ),
        ("alignment 48", key("general.alignment", || u32_value(48)), "general.alignment is 48"),
        ("alignment 2^21", key("general.alignment", || u32_value(1 << 21)), "is 2097152"),
        ("alignment text", key("general.alignment", || string_value("32")), "is \"32\"; accepted"),
        (
            "tensor twice",
            edit(|f| f.push("output_norm.weight").bytes.clear()),
            "tensor \"output_norm.weight\" appears twice",
        ),
        ("no dims", tensor(|t| t.dims.clear()), "it has 0 dimensions; accepted: 1 to 4"),
        ("five dims", tensor(|t| t.dims = vec![1; 5]), "it has 5 dimensions; accepted: 1 to 4"),
        ("dim 0", tensor(|t| t.dims[1] = 0), "tensor \"token_embd.weight\": a dimension of 0"),
        (
            "size that wraps",
            tensor(|t| t.dims = vec![1 << 32, 1 << 32]),
            "the size of shape [4294967296, 4294967296] of f32 overflows",
        ),
        ("bytes that wrap", tensor(|t| t.dims = vec![1 << 62, 1]), "of f32 overflows"),
        (
            "beyond the file",
            tensor(|t| t.dims[1] = 1 << 40),
            "its 281474976710656 bytes at offset 0 end outside the",
        ),
        (
            "offset",
            tensor(|t| t.offset = Some(1 << 63)),
            "its 81920 bytes at offset 9223372036854775808 end outside the",
        ),
        (
            "unaligned",
            tensor(|t| t.offset = Some(16)),
            "tensor \"token_embd.weight\": its offset 16 is no multiple of 32",
        ),
        (
            "overlap",
            edit(|f| f.tensor("output_norm.weight").offset = Some(64)),
            "tensor \"output_norm.weight\": its data overlap those of \"token_embd.weight\"",
        ),
        (
            "type Q2_K",
            tensor(|t| t.format = 10),
            "token_embd.weight has dtype Q2_K; accepted: F32, F16, BF16, Q4_0, Q4_1, Q8_0, Q4_K, \
             Q5_K, Q6_K; get or make a file in one of these",
        ),
        ("type IQ4_XS", tensor(|t| t.format = 23), "token_embd.weight has dtype IQ4_XS"),
        ("type 99", tensor(|t| t.format = 99), "token_embd.weight has dtype 99; accepted"),
        (
            "rows of no blocks",
            tensor(|t| t.format = 12),
            "rows of 64 are not whole blocks of 256, as q4_k needs",
        ),
        // The architecture.
        (
            "other architecture",
            key("general.architecture", || string_value("llama")),
            "general.architecture is \"llama\", which firesteel",
        ),
        (
            "none",
            edit(|f| f.remove("general.architecture")),
            "general.architecture is missing; accepted: \"spark2_5\"",
        ),
        ("split", key("split.count", || u32_value(3)), "split.count is 3; accepted: 1 or absent"),
        (
            "missing key",
            edit(|f| f.remove("spark2_5.embedding_length")),
            "spark2_5.embedding_length is missing; accepted: a whole number from 1 to 2147483648",
        ),
        (
            "layers",
            key("spark2_5.block_count", || u32_value(513)),
            "spark2_5.block_count is 513; accepted: a whole number from 1 to 512",
        ),
        (
            "heads",
            key("spark2_5.attention.head_count", || u32_value(5)),
            "spark2_5.attention.head_count is 5; accepted: a multiple of \
             spark2_5.attention.head_count_kv, which is 2",
        ),
        (
            "heads by layer",
            key("spark2_5.attention.head_count", || array_value(0, 2, &[4, 8])),
            "head_count is an array of 2 uint8; accepted: a whole number from 1 to 2147483648, \
             equal in all layers",
        ),
        (
            "value length",
            key("spark2_5.attention.value_length", || u32_value(32)),
            "spark2_5.attention.value_length is 32; accepted: 16, as",
        ),
        (
            "epsilon",
            key("spark2_5.attention.layer_norm_rms_epsilon", || f32_value(f32::NAN)),
            "spark2_5.attention.layer_norm_rms_epsilon is NaN; accepted: a number from 1e-12 to 1.0",
        ),
        (
            "window",
            key("spark2_5.attention.sliding_window", || u32_value(1)),
            "spark2_5.attention.sliding_window is 1; accepted: a whole number from 2",
        ),
        (
            "short pattern",
            key("spark2_5.attention.sliding_window_pattern", || array_value(7, 1, &[1])),
            "sliding_window_pattern is an array of 1 bool; accepted: an array of 5 bools",
        ),
        (
            "no pattern",
            edit(|f| f.remove("spark2_5.attention.sliding_window_pattern")),
            "spark2_5.attention.sliding_window_pattern is missing",
        ),
        (
            "base",
            edit(|f| f.remove("spark2_5.rope.freq_base_swa")),
            "spark2_5.rope.freq_base_swa is missing; accepted: a number from 1.0 to 1000000000000.0",
        ),
        (
            "base beyond f32",
            key("spark2_5.rope.freq_base", || f32_value(f32::INFINITY)),
            "spark2_5.rope.freq_base is inf; accepted: a number from 1.0 to 1000000000000.0",
        ),
        (
            "base of nothing",
            key("spark2_5.rope.freq_base", || f32_value(0.0)),
            "spark2_5.rope.freq_base is 0; accepted: a number from 1.0",
        ),
        (
            "epsilon without end",
            key("spark2_5.attention.layer_norm_rms_epsilon", || f32_value(1e30)),
            "accepted: a number from 1e-12 to 1.0",
        ),
        (
            "rotary dims",
            key("spark2_5.rope.dimension_count", || u32_value(18)),
            "spark2_5.rope.dimension_count is 18; accepted: an even number from 2 to \
             spark2_5.attention.key_length 16",
        ),
        (
            "scaling",
            key("spark2_5.rope.scaling.type", || string_value("yarn")),
            "spark2_5.rope.scaling.type is \"yarn\"; accepted: absent: the key is not known",
        ),
        (
            "eos",
            key("tokenizer.ggml.eos_token_id", || u32_value(320)),
            "tokenizer.ggml.eos_token_id is 320; accepted: a token id below 320",
        ),
        (
            "vocabulary",
            key("tokenizer.ggml.tokens", || strings_value(&["a"])),
            "spark2_5.vocab_size is 320; accepted: 1, the length of tokenizer.ggml.tokens",
        ),
        (
            "huge",
            key("spark2_5.embedding_length", || u32_value(1 << 31)),
            "token_embd.weight has shape [320, 64]; accepted: [320, 2147483648]",
        ),
        (
            "missing tensor",
            edit(|f| f.tensors.retain(|t| t.name != "blk.4.ffn_up.weight")),
            "model.gguf: missing tensors (1): blk.4.ffn_up.weight",
        ),
        (
            "unexpected tensor",
            edit(|f| f.push("blk.5.attn_norm.weight").format = 0),
            "unexpected tensors (1): blk.5.attn_norm.weight; layer 5 is beyond",
        ),
        (
            "name of a folder",
            edit(|f| f.tensor("output_norm.weight").name = "model.norm.weight".into()),
            "missing tensors (1): output_norm.weight; unexpected (1): model.norm.weight",
        ),
        (
            "gate",
            edit(|f| {
                let gate = f.tensor("blk.1.attn_gate.weight");
                gate.dims[1] = 2;
                gate.bytes.truncate(512);
            }),
            "model.gguf: layer 1: blk.1.attn_gate.weight has 2 rows, but num_attention_heads is 4",
        ),
        (
            "transposed",
            edit(|f| f.tensor("blk.0.ffn_down.weight").dims.reverse()),
            "blk.0.ffn_down.weight has shape [128, 64]; accepted: [64, 128]",
        ),
    ];
    let mut failures = Failures::default();
    for (name, edit, part) in cases {
        failures.expect_error(name, open_with(|file| edit(file)), &["model.gguf: ", part]);
    }
    for length in 0..4 {
        let result = open_bytes(&b"GGUF"[..length]);
        let part = if length == 0 { "the file is empty" } else { "neither a folder nor a GGUF" };
        failures.expect_error("short magic", result, &[part]);
    }
    let bytes = GgufFile::tiny().bytes();
    for length in (4..2000).step_by(7) {
        failures.expect_error(&length.to_string(), open_bytes(&bytes[..length]), &["model.gguf: "]);
    }
    failures.expect_error("one byte less", open_bytes(&bytes[..bytes.len() - 1]), &["end outside"]);
    failures.finish();
}

#[test]
fn tokenizers_that_cannot_be_used_are_refused() {
    let names: Vec<String> = (0..320).map(|id| format!("t{id}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let with = |edit: &dyn Fn(&mut GgufFile)| {
        let checkpoint = open_with(|file| {
            file.set("tokenizer.ggml.model", string_value("gpt2"));
            file.set("tokenizer.ggml.tokens", strings_value(&names));
            file.set("tokenizer.ggml.merges", strings_value(&["t 1"]));
            edit(file);
        });
        checkpoint?.gguf_tokenizer().map_err(|e| e.to_string())
    };
    let plain = with(&|_| {}).unwrap().unwrap();
    assert_eq!((plain.tokens.len(), plain.token_types[0]), (320, GgufTokenizer::NORMAL));
    assert_eq!(with(&|f| f.set("tokenizer.ggml.model", string_value("none"))), Ok(None));
    assert_eq!(with(&|f| f.remove("tokenizer.ggml.model")), Ok(None));

    let many = strings_value(&vec![""; 320 * 16 + 1]);
    let mut failures = Failures::default();
    let mut refused = |key: &str, value: crate::common::gguf::Raw, part: &str| {
        let result = with(&|f| f.set(key, value.clone()));
        failures.expect_error(key, result, &["model.gguf: ", key, part]);
    };
    refused("tokenizer.ggml.model", string_value("llama"), "is \"llama\"; accepted: \"gpt2\"");
    refused("tokenizer.ggml.merges", many, "is an array of 5121 strings; accepted: an array of at");
    refused("tokenizer.ggml.merges", u32_value(1), "is 1; accepted: an array of at most 5120");
    refused("tokenizer.ggml.token_type", array_value(5, 1, &[0; 4]), "accepted: an array of 320");
    refused("tokenizer.ggml.add_bos_token", u32_value(1), "is 1; accepted: true or false");
    refused("tokenizer.chat_template", bool_value(true), "is true; accepted: a string");
    let no_merges = with(&|f| f.remove("tokenizer.ggml.merges"));
    failures.expect_error("merges", no_merges, &["tokenizer.ggml.merges is missing"]);
    failures.finish();
}

#[test]
fn what_is_neither_folder_nor_gguf_is_refused() {
    let config = Path::new(SPARK_TINY).join("config.json");
    let error = Checkpoint::open(&config).unwrap_err().to_string();
    assert!(error.ends_with(
        "config.json: neither a folder nor a GGUF file; accepted: the folder that holds \
         config.json, or a GGUF file"
    ));
    assert!(!Gguf::is_gguf(Path::new(SPARK_TINY)).unwrap());
    assert!(Gguf::is_gguf(&golden("f16")).unwrap());
    assert!(Gguf::is_gguf(Path::new("/nowhere/model.gguf")).is_err());
}

/// The bytes before the data of the tiny file, which are where mutations matter.
fn header_length(bytes: &[u8]) -> usize {
    bytes.len()
        - open_bytes(bytes)
            .unwrap()
            .gguf()
            .unwrap()
            .tensors()
            .iter()
            .map(|t| t.bytes.len())
            .sum::<usize>()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn mutated_files_never_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in prop::option::weighted(0.2, any::<prop::sample::Index>()),
    ) {
        let mut bytes = GgufFile::tiny().bytes();
        let header = header_length(&bytes);
        for (position, byte) in changes {
            bytes[position.index(header)] = byte;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        if let Ok(checkpoint) = open_bytes(&bytes) {
            for weight in weights(&checkpoint) {
                bytes_as(&weight, DType::BF16);
            }
            let _ = checkpoint.gguf_tokenizer();
        }
    }
}
