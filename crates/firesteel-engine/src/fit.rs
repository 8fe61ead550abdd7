use crate::EngineError;
use firesteel_checkpoint::{Checkpoint, LayerKind, ModelConfig};
use firesteel_step::{CacheLayout, CacheLayoutChoice, Role, StepOptions, StepSpec, TensorSpec};
use firesteel_tensor::{DType, TensorError};
use std::fmt::Debug;

/// Checks that `spec` is the step that its options make of the model in `checkpoint`; names of
/// tensors and the mask value may be others.
pub(crate) fn check(checkpoint: &Checkpoint, spec: &StepSpec) -> Result<(), EngineError> {
    let config = checkpoint.config();
    let model =
        checkpoint.path().map_or_else(|| "the model".to_owned(), |path| path.display().to_string());
    let expected = expected(checkpoint, spec)?;
    let mut differences = Differences { model, first: None };
    differences.compare("hidden_size", &spec.hidden_size, &expected.hidden_size);
    differences.compare("vocab_size", &spec.vocab_size, &expected.vocab_size);
    differences.compare(
        "num_attention_heads",
        &spec.num_attention_heads,
        &expected.num_attention_heads,
    );
    differences.compare(
        "num_key_value_heads",
        &spec.num_key_value_heads,
        &expected.num_key_value_heads,
    );
    differences.compare("head_dim", &spec.head_dim, &expected.head_dim);
    for (i, (layer, expected)) in spec.layers.iter().zip(&expected.layers).enumerate() {
        differences.compare(&format!("kind of layer {i}"), &layer.kind, &expected.kind);
    }
    differences.compare("sliding_window", &spec.sliding_window, &expected.sliding_window);
    differences.compare("rope_sliding", &spec.rope_sliding, &expected.rope_sliding);
    differences.compare("rope_full", &spec.rope_full, &expected.rope_full);
    for (i, (layer, expected)) in spec.layers.iter().zip(&expected.layers).enumerate() {
        differences.compare(&format!("cache of layer {i}"), layer, expected);
    }
    for (what, tensors, expected) in
        [("input", &spec.inputs, &expected.inputs), ("output", &spec.outputs, &expected.outputs)]
    {
        differences.compare(&format!("number of {what}s"), &tensors.len(), &expected.len());
        for (tensor, expected) in tensors.iter().zip(expected) {
            differences.compare(
                &format!("{what} {}", tensor.name),
                &(tensor.role, tensor.dtype, &tensor.shape),
                &(expected.role, expected.dtype, &expected.shape),
            );
        }
    }
    if let Some(difference) = differences.first {
        return Err(difference);
    }
    check_activations(config, spec.tokens)
}

/// Whether the activations of `rows` tokens can be addressed.
pub(crate) fn check_activations(config: &ModelConfig, rows: usize) -> Result<(), EngineError> {
    let qkv = config.query_size().saturating_add(config.key_value_size().saturating_mul(2));
    let widest = config.intermediate_size.max(config.vocab_size).max(config.hidden_size).max(qkv);
    // The margin of two keeps the byte count of every activation within an allocation's limit.
    let shape = [2, rows, widest];
    if DType::F64.byte_count(&shape).is_none() {
        return Err(TensorError::TooLarge { shape: shape.to_vec(), dtype: DType::F64 }.into());
    }
    Ok(())
}

/// The step that the options of `spec` make of the checkpoint's model.
fn expected(checkpoint: &Checkpoint, spec: &StepSpec) -> Result<StepSpec, EngineError> {
    let layout = |kind, otherwise| spec.first_of(kind).map_or(otherwise, |layer| layer.layout);
    let cache_layout = match (
        layout(LayerKind::Sliding, CacheLayout::Ring),
        layout(LayerKind::Full, CacheLayout::Roll),
    ) {
        (CacheLayout::Ring, CacheLayout::Ring) => CacheLayoutChoice::Ring,
        (CacheLayout::Ring, CacheLayout::Roll) => CacheLayoutChoice::Auto,
        (CacheLayout::Roll, _) => CacheLayoutChoice::Roll,
    };
    let options = StepOptions {
        tokens: spec.tokens,
        context: spec.context,
        layers: spec.first_layer..spec.first_layer.saturating_add(spec.layers.len()),
        cache_layout,
        logits: spec.logits,
        dtype: spec.dtype,
    };
    let step = StepSpec::new(checkpoint.config(), &options)?;
    let tapped = |tensor: &TensorSpec| matches!(tensor.role, Role::LayerHidden(_));
    Ok(if spec.outputs.iter().any(tapped) { step.with_layer_outputs() } else { step })
}

/// Remembers the first difference.
struct Differences {
    model: String,
    first: Option<EngineError>,
}

impl Differences {
    fn compare<T: PartialEq + Debug>(&mut self, what: &str, step: &T, expected: &T) {
        if self.first.is_none() && step != expected {
            self.first = Some(EngineError::Mismatch {
                what: what.into(),
                step: format!("{step:?}"),
                model: self.model.clone(),
                expected: format!("{expected:?}"),
            });
        }
    }
}
