use firesteel_checkpoint::Checkpoint;
use firesteel_step::{CacheLayoutChoice, Logits, StepOptions, StepOutputs};
use firesteel_tensor::Tensor;
use firesteel_testing::{Golden, golden_path, spark_tiny_path};
use std::path::PathBuf;
use std::sync::Arc;

/// The golden steps in float64, made by make_steps_f64.py beside it.
pub(crate) const STEPS_F64: &str = "steps_f64.safetensors";

/// A file or folder of the vectors of the reference exporter and of a float64 forward.
pub(crate) fn vectors(name: &str) -> PathBuf {
    golden_path("spark").join(name)
}

pub(crate) fn golden(name: &str) -> Golden {
    Golden::open(&vectors(name))
}

pub(crate) fn checkpoint(name: &str) -> Arc<Checkpoint> {
    Arc::new(Checkpoint::open(&vectors(name)).unwrap())
}

/// The trained model of the repository.
pub(crate) fn spark_tiny() -> Arc<Checkpoint> {
    Arc::new(Checkpoint::open(&spark_tiny_path()).unwrap())
}

/// The same in a file that llama.cpp wrote.
pub(crate) fn golden_gguf(format: &str) -> Arc<Checkpoint> {
    let path = golden_path(&format!("llamacpp/spark-tiny-{format}.gguf"));
    Arc::new(Checkpoint::open(&path).unwrap())
}

/// The whole model in f32, with the logits of every token.
pub(crate) fn options(
    checkpoint: &Checkpoint,
    tokens: usize,
    context: usize,
    cache_layout: CacheLayoutChoice,
) -> StepOptions {
    let decode = StepOptions::decode(checkpoint.config(), context);
    StepOptions { tokens, cache_layout, logits: Logits::All, ..decode }
}

/// Bytes of all outputs.
pub(crate) fn all_bytes(outputs: &StepOutputs) -> Vec<u8> {
    outputs.tensors().iter().flat_map(Tensor::bytes).copied().collect()
}
