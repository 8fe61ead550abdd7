pub(crate) mod gguf;

use firesteel_checkpoint::{Checkpoint, Head, ModelConfig, RandomWeights, Weight};
use firesteel_tensor::DType;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::Path;

pub(crate) const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/spark");
pub(crate) const SPARK_TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/spark-tiny");

/// A valid config of five small layers.
pub(crate) fn tiny_config() -> Value {
    json!({
        "architectures": ["Spark2_5ForCausalLM"],
        "model_type": "spark2_5",
        "dtype": "float32",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 320,
        "sliding_window": 8,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "hidden_act": "gelu",
        "gate_attn_act_mode": "sigmoid",
        "headwise_attn_output_gate": true,
        "attention_bias": false,
        "mlp_bias": false,
        "tie_word_embeddings": true,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "layer_types": [
            "sliding_attention", "sliding_attention", "sliding_attention", "full_attention",
            "sliding_attention"
        ],
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 5000000},
            "sliding_attention": {"partial_rotary_factor": 1.0, "rope_theta": 10000}
        }
    })
}

pub(crate) fn parse(config: &Value) -> Result<(ModelConfig, Vec<String>), String> {
    ModelConfig::from_json(Path::new("dir/config.json"), config.to_string().as_bytes())
        .map_err(|e| e.to_string())
}

pub(crate) fn object(value: &mut Value) -> &mut Map<String, Value> {
    value.as_object_mut().unwrap()
}

#[derive(Clone)]
pub(crate) struct Stored {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

/// A checkpoint in memory, to be changed and written.
#[derive(Clone)]
pub(crate) struct Model {
    pub(crate) config: Value,
    pub(crate) tensors: BTreeMap<String, Stored>,
}

impl Model {
    /// The tiny config with f32 weights of seed 0 and fused projections.
    pub(crate) fn tiny() -> Self {
        let config = tiny_config();
        let options = RandomWeights { dtype: DType::F32, seed: 0, outliers: false };
        let checkpoint = Checkpoint::random(parse(&config).unwrap().0, options);
        let mut tensors = BTreeMap::new();
        for weight in weights(&checkpoint) {
            let bytes = bytes_as(&weight, DType::F32);
            let shape = weight.shape().to_vec();
            let stored = Stored { dtype: Dtype::F32, shape, bytes };
            tensors.insert(weight.name().to_owned(), stored);
        }
        Self { config, tensors }
    }

    /// Replaces the fused projection of a layer by three tensors.
    pub(crate) fn separate(&mut self, layer: usize) {
        let prefix = format!("model.layers.{layer}.self_attn");
        let fused = self.tensors.remove(&format!("{prefix}.q_k_v_proj.weight")).unwrap();
        let row = fused.bytes.len() / fused.shape[0];
        for (part, rows) in [("q", 0..64), ("k", 64..96), ("v", 96..128)] {
            let stored = Stored {
                dtype: fused.dtype,
                shape: vec![rows.len(), 64],
                bytes: fused.bytes[rows.start * row..rows.end * row].to_vec(),
            };
            self.tensors.insert(format!("{prefix}.{part}_proj.weight"), stored);
        }
    }

    pub(crate) fn write(&self, dir: &Path) {
        self.write_config(dir);
        std::fs::write(dir.join("model.safetensors"), serialize(&self.tensors)).unwrap();
    }

    pub(crate) fn write_config(&self, dir: &Path) {
        std::fs::create_dir_all(dir).unwrap();
        std::fs::write(dir.join("config.json"), self.config.to_string()).unwrap();
    }

    /// Deals the tensors out to shards in turn. Returns the weight map.
    pub(crate) fn write_sharded(&self, dir: &Path, shards: usize) -> Map<String, Value> {
        self.write_config(dir);
        let mut weight_map = Map::new();
        for shard in 0..shards {
            let name = format!("model-{:05}-of-{shards:05}.safetensors", shard + 1);
            let part: BTreeMap<_, _> = self
                .tensors
                .iter()
                .enumerate()
                .filter(|(number, _)| number % shards == shard)
                .map(|(_, (name, stored))| (name.clone(), stored.clone()))
                .collect();
            std::fs::write(dir.join(&name), serialize(&part)).unwrap();
            weight_map.extend(part.into_keys().map(|tensor| (tensor, json!(name))));
        }
        write_index(dir, &weight_map);
        weight_map
    }

    pub(crate) fn set(&mut self, name: &str, shape: &[usize], dtype: Dtype) {
        let length = shape.iter().product::<usize>() * dtype.bitsize() / 8;
        let stored = Stored { dtype, shape: shape.to_vec(), bytes: vec![0; length] };
        self.tensors.insert(name.to_owned(), stored);
    }
}

pub(crate) fn write_index(dir: &Path, weight_map: &Map<String, Value>) {
    let index = json!({"metadata": {"total_size": 1}, "weight_map": weight_map});
    std::fs::write(dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

pub(crate) fn serialize(tensors: &BTreeMap<String, Stored>) -> Vec<u8> {
    let views = tensors.iter().map(|(name, stored)| {
        (name, TensorView::new(stored.dtype, stored.shape.clone(), &stored.bytes).unwrap())
    });
    safetensors::serialize(views, None).unwrap()
}

/// Every weight of a checkpoint, a stored head included.
pub(crate) fn weights(checkpoint: &Checkpoint) -> Vec<Weight> {
    let mut weights = vec![checkpoint.embedding().clone(), checkpoint.final_norm().clone()];
    if let Head::Stored(head) = checkpoint.head() {
        weights.push(head.clone());
    }
    for layer in checkpoint.layers() {
        weights.extend(layer.all().iter().cloned());
    }
    weights
}

pub(crate) fn bytes_as(weight: &Weight, dtype: DType) -> Vec<u8> {
    let mut bytes = vec![0; weight.element_count() * dtype.size()];
    weight.convert(0, dtype, &mut bytes).unwrap();
    bytes
}

pub(crate) fn values(weight: &Weight) -> Vec<f32> {
    let mut values = vec![0.0; weight.element_count()];
    weight.read_f32(0, &mut values).unwrap();
    values
}

/// Every weight of a checkpoint as f32, by name.
pub(crate) fn all_values(checkpoint: &Checkpoint) -> BTreeMap<String, Vec<f32>> {
    weights(checkpoint).iter().map(|w| (w.name().to_owned(), values(w))).collect()
}

/// Collects the failures of a table, so that one run shows all of them.
#[derive(Default)]
pub(crate) struct Failures(Vec<String>);

impl Failures {
    /// Notes a failure unless `result` is an error with every one of `parts` in its text.
    pub(crate) fn expect_error<T>(
        &mut self,
        case: &str,
        result: Result<T, String>,
        parts: &[&str],
    ) {
        match result {
            Ok(_) => self.0.push(format!("{case}: accepted")),
            Err(e) if parts.iter().all(|part| e.contains(part)) => {}
            Err(e) => self.0.push(format!("{case}: {parts:?} not in: {e}")),
        }
    }

    pub(crate) fn check(&mut self, case: &str, good: bool, detail: impl std::fmt::Debug) {
        if !good {
            self.0.push(format!("{case}: {detail:?}"));
        }
    }

    pub(crate) fn finish(self) {
        assert!(self.0.is_empty(), "{}", self.0.join("\n"));
    }
}
