//! GGUF files written byte by byte, so that every field can be wrong.

use super::Model;
use serde_json::Value;

/// A value of the metadata: its type's code and its bytes.
#[derive(Clone)]
pub(crate) struct Raw(pub(crate) u32, pub(crate) Vec<u8>);

pub(crate) fn u32_value(value: u32) -> Raw {
    Raw(4, value.to_le_bytes().to_vec())
}

pub(crate) fn f32_value(value: f32) -> Raw {
    Raw(6, value.to_le_bytes().to_vec())
}

pub(crate) fn bool_value(value: bool) -> Raw {
    Raw(7, vec![value.into()])
}

pub(crate) fn string(text: &[u8]) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text].concat()
}

pub(crate) fn string_value(text: &str) -> Raw {
    Raw(8, string(text.as_bytes()))
}

pub(crate) fn array_value(element: u32, count: u64, bytes: &[u8]) -> Raw {
    Raw(9, [&element.to_le_bytes()[..], &count.to_le_bytes(), bytes].concat())
}

pub(crate) fn strings_value(texts: &[&str]) -> Raw {
    let bytes: Vec<u8> = texts.iter().flat_map(|text| string(text.as_bytes())).collect();
    array_value(8, texts.len() as u64, &bytes)
}

#[derive(Clone)]
pub(crate) struct RawTensor {
    pub(crate) name: String,
    /// As in the file: the length of a row first.
    pub(crate) dims: Vec<u64>,
    pub(crate) format: u32,
    /// Offset instead of the next free one.
    pub(crate) offset: Option<u64>,
    pub(crate) bytes: Vec<u8>,
}

/// A file in memory, to be changed and written.
#[derive(Clone)]
pub(crate) struct GgufFile {
    pub(crate) magic: [u8; 4],
    pub(crate) version: u32,
    pub(crate) tensor_count: Option<u64>,
    pub(crate) key_count: Option<u64>,
    pub(crate) alignment: usize,
    pub(crate) keys: Vec<(String, Raw)>,
    pub(crate) tensors: Vec<RawTensor>,
}

impl GgufFile {
    pub(crate) fn empty() -> Self {
        Self {
            magic: *b"GGUF",
            version: 3,
            tensor_count: None,
            key_count: None,
            alignment: 32,
            keys: Vec::new(),
            tensors: Vec::new(),
        }
    }

    /// The tiny model, tied, f32.
    pub(crate) fn tiny() -> Self {
        let model = Model::tiny();
        let config = |key: &str| model.config[key].as_u64().unwrap() as u32;
        let pattern: Vec<u8> = model.config["layer_types"]
            .as_array()
            .unwrap()
            .iter()
            .map(|kind: &Value| u8::from(kind == "sliding_attention"))
            .collect();
        let mut file = Self::empty();
        file.set("general.architecture", string_value("spark2_5"));
        for (key, value) in [
            ("block_count", "num_hidden_layers"),
            ("context_length", "max_position_embeddings"),
            ("embedding_length", "hidden_size"),
            ("feed_forward_length", "intermediate_size"),
            ("vocab_size", "vocab_size"),
            ("attention.head_count", "num_attention_heads"),
            ("attention.head_count_kv", "num_key_value_heads"),
            ("attention.key_length", "head_dim"),
            ("attention.value_length", "head_dim"),
            ("attention.sliding_window", "sliding_window"),
        ] {
            file.set(&format!("spark2_5.{key}"), u32_value(config(value)));
        }
        file.set("spark2_5.attention.layer_norm_rms_epsilon", f32_value(1e-6));
        file.set("spark2_5.attention.sliding_window_pattern", array_value(7, 5, &pattern));
        file.set("spark2_5.rope.freq_base", f32_value(5e6));
        file.set("spark2_5.rope.freq_base_swa", f32_value(1e4));
        file.set("spark2_5.rope.dimension_count", u32_value(4));
        file.set("spark2_5.rope.dimension_count_swa", u32_value(16));
        file.set("tokenizer.ggml.bos_token_id", u32_value(0));
        file.set("tokenizer.ggml.eos_token_id", u32_value(1));
        file.set("tokenizer.ggml.padding_token_id", u32_value(2));
        for (name, stored) in model.tensors {
            file.tensors.push(RawTensor {
                name: gguf_name(&name),
                dims: stored.shape.iter().rev().map(|dim| *dim as u64).collect(),
                format: 0,
                offset: None,
                bytes: stored.bytes,
            });
        }
        file
    }

    pub(crate) fn set(&mut self, key: &str, value: Raw) {
        match self.keys.iter_mut().find(|(known, _)| known == key) {
            Some((_, old)) => *old = value,
            None => self.keys.push((key.to_owned(), value)),
        }
    }

    pub(crate) fn remove(&mut self, key: &str) {
        self.keys.retain(|(known, _)| known != key);
    }

    pub(crate) fn tensor(&mut self, name: &str) -> &mut RawTensor {
        self.tensors.iter_mut().find(|tensor| tensor.name == name).unwrap()
    }

    /// Adds an empty-handed tensor of two f32.
    pub(crate) fn push(&mut self, name: &str) -> &mut RawTensor {
        self.tensors.push(RawTensor {
            name: name.to_owned(),
            dims: vec![2],
            format: 0,
            offset: None,
            bytes: vec![0; 8],
        });
        self.tensors.last_mut().unwrap()
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.magic.to_vec();
        bytes.extend(self.version.to_le_bytes());
        bytes.extend(self.tensor_count.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        bytes.extend(self.key_count.unwrap_or(self.keys.len() as u64).to_le_bytes());
        for (key, Raw(code, value)) in &self.keys {
            bytes.extend(string(key.as_bytes()));
            bytes.extend(code.to_le_bytes());
            bytes.extend(value);
        }
        let mut next = 0;
        for tensor in &self.tensors {
            bytes.extend(string(tensor.name.as_bytes()));
            bytes.extend((tensor.dims.len() as u32).to_le_bytes());
            tensor.dims.iter().for_each(|dim| bytes.extend(dim.to_le_bytes()));
            bytes.extend(tensor.format.to_le_bytes());
            bytes.extend(tensor.offset.unwrap_or(next as u64).to_le_bytes());
            next = (next + tensor.bytes.len()).next_multiple_of(self.alignment);
        }
        for tensor in &self.tensors {
            bytes.resize(bytes.len().next_multiple_of(self.alignment), 0);
            bytes.extend(&tensor.bytes);
        }
        bytes
    }
}

/// The name in a GGUF file, written out once more as the public converter has it.
pub(crate) fn gguf_name(name: &str) -> String {
    match name {
        "model.embedding.weight" => return "token_embd.weight".into(),
        "model.norm.weight" => return "output_norm.weight".into(),
        "lm_head.weight" => return "output.weight".into(),
        _ => {}
    }
    let (layer, part) = name.strip_prefix("model.layers.").unwrap().split_once('.').unwrap();
    let stored = match part.strip_suffix(".weight").unwrap() {
        "input_layernorm" => "attn_norm",
        "post_attention_layernorm" => "ffn_norm",
        "self_attn.q_k_v_proj" => "attn_qkv",
        "self_attn.g_proj" => "attn_gate",
        "self_attn.out_proj" => "attn_output",
        "mlp.gate_proj" => "ffn_gate",
        "mlp.up_proj" => "ffn_up",
        "mlp.down_proj" => "ffn_down",
        other => panic!("{other}"),
    };
    format!("blk.{layer}.{stored}.weight")
}
