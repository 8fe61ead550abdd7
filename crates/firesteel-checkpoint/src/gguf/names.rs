//! Names of the tensors in GGUF files.

/// Parts of a layer: in a Hugging Face folder and in a GGUF file.
const PARTS: &[(&str, &str)] = &[
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("self_attn.q_k_v_proj", "attn_qkv"),
    ("self_attn.g_proj", "attn_gate"),
    ("self_attn.out_proj", "attn_output"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

/// The name in a GGUF file of a tensor of the architecture; other names are returned unchanged.
pub(crate) fn stored_name(name: &str) -> String {
    let layer_part = || {
        let rest = name.strip_prefix("model.layers.")?.strip_suffix(".weight")?;
        let (layer, part) = rest.split_once('.')?;
        let (_, stored) = PARTS.iter().find(|(known, _)| *known == part)?;
        Some(format!("blk.{layer}.{stored}.weight"))
    };
    match name {
        "model.embedding.weight" => "token_embd.weight".into(),
        "model.norm.weight" => "output_norm.weight".into(),
        "lm_head.weight" => "output.weight".into(),
        _ => layer_part().unwrap_or_else(|| name.to_owned()),
    }
}
