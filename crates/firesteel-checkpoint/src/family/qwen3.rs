//! Qwen3 text models: queries, keys and values apart, a norm of each of their heads (QK-norm),
//! SwiGLU, no windows.

use super::Family;
use super::{
    Activation, AttentionBlock, Block, ConfigSpelling, Count, Description, FedBy, Feeds, Fixed,
    FixedValue, MlpBlock, Names, OuterNames, Preset, RopeSpelling, Size, Slot, SlotSpec,
};
use crate::{LayerKind, ModelConfig, Rope};
use firesteel_tensor::DType;

const fn names(hugging_face: &'static str, gguf: &'static str) -> Names {
    Names { hugging_face, gguf }
}

const HIDDEN: &[Size] = &[Size::Hidden];
const HEAD: &[Size] = &[Size::HeadDim];
const UP: &[Size] = &[Size::Intermediate, Size::Hidden];
const KEY_VALUE: &[Size] = &[Size::KeyValue, Size::Hidden];
const BEFORE_ATTENTION: FedBy = FedBy::Norm(Slot::InputNorm);
const BEFORE_MLP: FedBy = FedBy::Norm(Slot::PostAttentionNorm);

pub(super) static QWEN3: Description = Description {
    name: "Qwen3",
    model_type: "qwen3",
    class: "Qwen3ForCausalLM",
    architecture: "qwen3",
    outer: OuterNames {
        embedding: names("model.embed_tokens.weight", "token_embd.weight"),
        final_norm: names("model.norm.weight", "output_norm.weight"),
        head: names("lm_head.weight", "output.weight"),
    },
    slots: &[
        SlotSpec::norm(
            Slot::InputNorm,
            HIDDEN,
            Feeds::Matrices,
            names("input_layernorm", "attn_norm"),
        ),
        SlotSpec::matrix(
            Slot::Query,
            &[Size::Query, Size::Hidden],
            BEFORE_ATTENTION,
            Feeds::Attention,
            names("self_attn.q_proj", "attn_q"),
        ),
        SlotSpec::matrix(
            Slot::Key,
            KEY_VALUE,
            BEFORE_ATTENTION,
            Feeds::Attention,
            names("self_attn.k_proj", "attn_k"),
        ),
        SlotSpec::matrix(
            Slot::Value,
            KEY_VALUE,
            BEFORE_ATTENTION,
            Feeds::Attention,
            names("self_attn.v_proj", "attn_v"),
        ),
        SlotSpec::norm(
            Slot::QueryNorm,
            HEAD,
            Feeds::Attention,
            names("self_attn.q_norm", "attn_q_norm"),
        ),
        SlotSpec::norm(
            Slot::KeyNorm,
            HEAD,
            Feeds::Attention,
            names("self_attn.k_norm", "attn_k_norm"),
        ),
        SlotSpec::matrix(
            Slot::AttentionOut,
            &[Size::Hidden, Size::Query],
            FedBy::Attention,
            Feeds::Residual,
            names("self_attn.o_proj", "attn_output"),
        ),
        SlotSpec::norm(
            Slot::PostAttentionNorm,
            HIDDEN,
            Feeds::Matrices,
            names("post_attention_layernorm", "ffn_norm"),
        ),
        SlotSpec::matrix(
            Slot::MlpGate,
            UP,
            BEFORE_MLP,
            Feeds::Product,
            names("mlp.gate_proj", "ffn_gate"),
        ),
        SlotSpec::matrix(
            Slot::MlpUp,
            UP,
            BEFORE_MLP,
            Feeds::Product,
            names("mlp.up_proj", "ffn_up"),
        ),
        SlotSpec::matrix(
            Slot::MlpDown,
            &[Size::Hidden, Size::Intermediate],
            FedBy::Product(Slot::MlpUp),
            Feeds::Residual,
            names("mlp.down_proj", "ffn_down"),
        ),
    ],
    block: Block {
        attention: AttentionBlock { qk_norm: true, head_gate: false },
        mlp: MlpBlock { activation: Activation::Silu },
    },
    config: ConfigSpelling {
        activation: "silu",
        fixed: &[
            Fixed {
                key: "attention_bias",
                value: FixedValue::Flag(false),
                expected: false,
                why: ": models with biases are not read",
            },
            Fixed {
                key: "use_sliding_window",
                value: FixedValue::Flag(false),
                expected: false,
                why: ": models with sliding windows are not read",
            },
        ],
        // Says from which layer on windows would slide.
        ignored: &["max_window_layers"],
        assumed: &[(Count::HeadDim, 128), (Count::Positions, 32_768)],
        layer_types: full,
        layer_types_assumed: None,
        rope: RopeSpelling::Flat,
    },
    window_pattern: false,
    presets: &[
        Preset { name: "qwen3-0.6b", config: smallest },
        Preset { name: "qwen3-1.7b", config: small },
        Preset { name: "qwen3-4b", config: middle },
        Preset { name: "qwen3-8b", config: large },
    ],
};

fn full(layers: usize) -> Vec<LayerKind> {
    vec![LayerKind::Full; layers]
}

fn small() -> ModelConfig {
    ModelConfig {
        family: Family(&QWEN3),
        hidden_size: 2048,
        intermediate_size: 6144,
        num_attention_heads: 16,
        num_key_value_heads: 8,
        head_dim: 128,
        vocab_size: 151_936,
        sliding_window: None,
        max_position_embeddings: 40_960,
        rms_norm_eps: 1e-6,
        layer_types: full(28),
        rope_sliding: None,
        rope_full: Some(Rope::plain(1e6, 128)),
        tie_word_embeddings: true,
        dtype: Some(DType::BF16),
        eos_token_ids: vec![151_645],
        bos_token_id: Some(151_643),
        pad_token_id: None,
    }
}

fn smallest() -> ModelConfig {
    ModelConfig { hidden_size: 1024, intermediate_size: 3072, ..small() }
}

fn middle() -> ModelConfig {
    ModelConfig {
        hidden_size: 2560,
        intermediate_size: 9728,
        num_attention_heads: 32,
        layer_types: full(36),
        ..small()
    }
}

fn large() -> ModelConfig {
    ModelConfig {
        hidden_size: 4096,
        intermediate_size: 12_288,
        tie_word_embeddings: false,
        ..middle()
    }
}
