use crate::{LayerKind, ModelConfig, Rope};
use firesteel_tensor::DType;

/// Names of the model shapes that [`preset`] knows.
pub fn presets() -> &'static [&'static str] {
    &["spark-x2.5-1.7b", "spark-x2.5-4b"]
}

/// The config of a published model.
///
/// ```
/// let config = firesteel_checkpoint::preset("spark-x2.5-1.7b").unwrap();
/// assert_eq!((config.num_layers(), config.hidden_size), (28, 2048));
/// assert!(firesteel_checkpoint::preset("spark-x2.5-7b").is_none());
/// ```
pub fn preset(name: &str) -> Option<ModelConfig> {
    let (hidden_size, intermediate_size, layers, num_attention_heads, num_key_value_heads) =
        match name {
            "spark-x2.5-1.7b" => (2048, 6656, 28, 8, 2),
            "spark-x2.5-4b" => (2560, 10240, 36, 16, 4),
            _ => return None,
        };
    Some(ModelConfig {
        model_type: crate::config::MODEL_TYPE.to_owned(),
        hidden_size,
        intermediate_size,
        num_attention_heads,
        num_key_value_heads,
        head_dim: 256,
        vocab_size: 131_072,
        sliding_window: Some(512),
        max_position_embeddings: 1_048_576,
        rms_norm_eps: 1e-6,
        layer_types: LayerKind::pattern(layers),
        rope_sliding: Some(Rope { theta: 1e4, dims: 256 }),
        rope_full: Some(Rope { theta: 5e6, dims: 64 }),
        tie_word_embeddings: true,
        dtype: Some(DType::BF16),
        eos_token_ids: vec![1],
        bos_token_id: Some(0),
        pad_token_id: Some(2),
    })
}
