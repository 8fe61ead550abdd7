use firesteel_checkpoint::Checkpoint;
use firesteel_step::{
    CacheLayoutChoice, Embedding, KvState, Logits, Role, Runner, StepOptions, StepOutputs, StepSpec,
};
use firesteel_tensor::{DType, Tensor};
use safetensors::SafeTensors;
use std::path::PathBuf;
use std::sync::Arc;

/// Vectors of the reference exporter and of a float64 whole-sequence forward.
pub(crate) const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/spark");

/// The golden steps in float64, made by make_steps_f64.py beside it.
pub(crate) const STEPS_F64: &str = "steps_f64.safetensors";

pub(crate) fn checkpoint(name: &str) -> Arc<Checkpoint> {
    Arc::new(Checkpoint::open(&PathBuf::from(FOLDER).join(name)).unwrap())
}

/// The trained model of the repository.
pub(crate) fn spark_tiny() -> Arc<Checkpoint> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/spark-tiny");
    Arc::new(Checkpoint::open(path.as_ref()).unwrap())
}

/// The same in a file that llama.cpp wrote.
pub(crate) fn golden_gguf(format: &str) -> Arc<Checkpoint> {
    let name = format!("../llamacpp/spark-tiny-{format}.gguf");
    Arc::new(Checkpoint::open(&PathBuf::from(FOLDER).join(name)).unwrap())
}

/// A file of golden tensors.
pub(crate) struct Golden(Vec<u8>);

impl Golden {
    /// `path` is absolute or inside the golden folder.
    pub(crate) fn open(path: &str) -> Self {
        Self(std::fs::read(PathBuf::from(FOLDER).join(path)).unwrap())
    }

    fn bytes(&self, name: &str) -> Vec<u8> {
        SafeTensors::deserialize(&self.0).unwrap().tensor(name).unwrap().data().to_vec()
    }

    pub(crate) fn f32(&self, name: &str) -> Vec<f32> {
        self.bytes(name)
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
            .collect()
    }

    pub(crate) fn f64(&self, name: &str) -> Vec<f64> {
        self.bytes(name)
            .chunks_exact(8)
            .map(|b| f64::from_le_bytes(b.try_into().unwrap()))
            .collect()
    }

    pub(crate) fn ids(&self, name: &str) -> Vec<u32> {
        self.bytes(name)
            .chunks_exact(4)
            .map(|b| u32::from_le_bytes(b.try_into().unwrap()))
            .collect()
    }
}

/// The whole model in f32, with the logits of every token.
pub(crate) fn options(
    checkpoint: &Checkpoint,
    tokens: usize,
    context: usize,
    cache_layout: CacheLayoutChoice,
) -> StepOptions {
    StepOptions {
        tokens,
        context,
        layers: 0..checkpoint.config().num_layers(),
        cache_layout,
        logits: Logits::All,
        dtype: DType::F32,
    }
}

/// Embeds `ids`, runs one step and commits it.
pub(crate) fn advance(
    runner: &mut dyn Runner,
    embedding: &dyn Embedding,
    cache: &mut KvState,
    ids: &[u32],
) -> StepOutputs {
    let spec = runner.spec().clone();
    let mut x = vec![0f32; ids.len() * embedding.hidden_size()];
    embedding.lookup(ids, &mut x).unwrap();
    let step = cache.prepare(&spec, &x).unwrap();
    let outputs = runner.step(&cache.inputs(&spec, &step).unwrap()).unwrap();
    cache.commit(&spec, step, &outputs).unwrap();
    outputs
}

/// Values of the output with `role`.
pub(crate) fn values(outputs: &StepOutputs, spec: &StepSpec, role: Role) -> Vec<f32> {
    outputs.get(spec, role).unwrap().view().to_f32().unwrap().into_owned()
}

/// 10 · log10(Σ reference² / Σ (reference − test)²), infinite for equal values.
pub(crate) fn snr(reference: &[f64], test: &[f32]) -> f64 {
    assert_eq!(reference.len(), test.len());
    let pairs = reference.iter().zip(test).map(|(&r, &t)| (r, f64::from(t)));
    let (signal, noise) =
        pairs.fold((0.0, 0.0), |(s, n), (r, t)| (s + r * r, n + (r - t) * (r - t)));
    10.0 * (signal / noise).log10()
}

/// `values` in f64.
pub(crate) fn widened(values: &[f32]) -> Vec<f64> {
    values.iter().copied().map(f64::from).collect()
}

/// Bytes of all outputs.
pub(crate) fn all_bytes(outputs: &StepOutputs) -> Vec<u8> {
    outputs.tensors().iter().flat_map(Tensor::bytes).copied().collect()
}
