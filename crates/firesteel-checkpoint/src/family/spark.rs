//! Spark-X2.5: fused queries, keys and values, a gate a head, GELU, three sliding layers and a full
//! one in turn.

use super::Family;
use super::{
    Activation, AttentionBlock, Block, ConfigSpelling, Count, Description, FedBy, Feeds, Fixed,
    FixedValue, MlpBlock, Names, OuterNames, PieceName, Preset, RopeSpelling, Size, Slot, SlotKind,
    SlotSpec,
};
use crate::{LayerKind, ModelConfig, Rope};
use firesteel_tensor::DType;

const fn names(hugging_face: &'static str, gguf: &'static str) -> Names {
    Names { hugging_face, gguf }
}

const HIDDEN: &[Size] = &[Size::Hidden];
const UP: &[Size] = &[Size::Intermediate, Size::Hidden];

pub(super) static SPARK: Description = Description {
    name: "Spark-X2.5",
    model_type: "spark2_5",
    class: "Spark2_5ForCausalLM",
    architecture: "spark2_5",
    outer: OuterNames {
        embedding: names("model.embedding.weight", "token_embd.weight"),
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
        SlotSpec {
            pieces: &[
                PieceName { hugging_face: "self_attn.q_proj", rows: Size::Query },
                PieceName { hugging_face: "self_attn.k_proj", rows: Size::KeyValue },
                PieceName { hugging_face: "self_attn.v_proj", rows: Size::KeyValue },
            ],
            ..SlotSpec::matrix(
                Slot::QueryKeyValue,
                &[Size::QueryKeyValue, Size::Hidden],
                FedBy::Norm(Slot::InputNorm),
                Feeds::Attention,
                names("self_attn.q_k_v_proj", "attn_qkv"),
            )
        },
        // It is small, and its inputs must not be rounded to 8 bits.
        SlotSpec {
            kind: SlotKind::SmallMatrix,
            ..SlotSpec::matrix(
                Slot::HeadGate,
                &[Size::Heads, Size::Hidden],
                FedBy::Norm(Slot::InputNorm),
                Feeds::Attention,
                names("self_attn.g_proj", "attn_gate"),
            )
        },
        SlotSpec::matrix(
            Slot::AttentionOut,
            &[Size::Hidden, Size::Query],
            FedBy::Attention,
            Feeds::Residual,
            names("self_attn.out_proj", "attn_output"),
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
            FedBy::Norm(Slot::PostAttentionNorm),
            Feeds::Product,
            names("mlp.gate_proj", "ffn_gate"),
        ),
        SlotSpec::matrix(
            Slot::MlpUp,
            UP,
            FedBy::Norm(Slot::PostAttentionNorm),
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
        attention: AttentionBlock { qk_norm: false, head_gate: true },
        mlp: MlpBlock { activation: Activation::Gelu },
    },
    config: ConfigSpelling {
        activation: "gelu",
        fixed: &[
            Fixed {
                key: "gate_attn_act_mode",
                value: FixedValue::Text("sigmoid"),
                expected: true,
                why: "",
            },
            Fixed {
                key: "headwise_attn_output_gate",
                value: FixedValue::Flag(true),
                expected: true,
                why: "",
            },
            Fixed {
                key: "attention_bias",
                value: FixedValue::Flag(false),
                expected: false,
                why: ": the architecture has no biases",
            },
            Fixed {
                key: "mlp_bias",
                value: FixedValue::Flag(false),
                expected: false,
                why: ": the architecture has no biases",
            },
        ],
        ignored: &[],
        assumed: &[(Count::Positions, 8192)],
        layer_types: pattern,
        layer_types_assumed: Some("three sliding and one full layer in turn"),
        rope: RopeSpelling::ByLayerType,
    },
    window_pattern: true,
    presets: &[
        Preset { name: "spark-x2.5-1.7b", config: small },
        Preset { name: "spark-x2.5-4b", config: large },
    ],
};

/// Three sliding layers, one full layer, and so on.
fn pattern(layers: usize) -> Vec<LayerKind> {
    let kind = |layer: usize| match layer % 4 {
        3 => LayerKind::Full,
        _ => LayerKind::Sliding,
    };
    (0..layers).map(kind).collect()
}

fn small() -> ModelConfig {
    ModelConfig {
        family: Family(&SPARK),
        hidden_size: 2048,
        intermediate_size: 6656,
        num_attention_heads: 8,
        num_key_value_heads: 2,
        head_dim: 256,
        vocab_size: 131_072,
        sliding_window: Some(512),
        max_position_embeddings: 1_048_576,
        rms_norm_eps: 1e-6,
        layer_types: pattern(28),
        rope_sliding: Some(Rope::plain(1e4, 256)),
        rope_full: Some(Rope::plain(5e6, 64)),
        tie_word_embeddings: true,
        dtype: Some(DType::BF16),
        eos_token_ids: vec![1],
        bos_token_id: Some(0),
        pad_token_id: Some(2),
    }
}

fn large() -> ModelConfig {
    ModelConfig {
        hidden_size: 2560,
        intermediate_size: 10240,
        num_attention_heads: 16,
        num_key_value_heads: 4,
        layer_types: pattern(36),
        ..small()
    }
}
