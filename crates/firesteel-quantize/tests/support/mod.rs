//! The models, texts and figures of the tests and of the example.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use firesteel_check::{SnrMeter, TextReport, compare_text};
use firesteel_checkpoint::{Checkpoint, LayerWeights, ModelConfig, RandomWeights, Weight};
use firesteel_engine::{
    Calibration, CheckpointEmbedding, CpuModel, CpuSequence, KvFormat, SequenceOptions,
};
use firesteel_generate::{AddedTokens, Tokenizer};
use firesteel_quantize::weights::{WeightBits, round_nearest};
use firesteel_step::Embedding;
use firesteel_tensor::DType;
use firesteel_testing::{Golden, golden_path, spark_tiny_path};
use std::sync::Arc;

/// Tokens of a sequence.
pub(crate) const SEQUENCE: usize = 512;

/// The trained model.
pub(crate) fn spark_tiny() -> Checkpoint {
    Checkpoint::open(&spark_tiny_path()).unwrap()
}

/// The first tokens of a text of the trained model.
pub(crate) fn tokens(file: &str, count: usize) -> Vec<u32> {
    let tokenizer = Tokenizer::open(&spark_tiny_path()).unwrap();
    let text = std::fs::read_to_string(golden_path("spark-tiny").join(file)).unwrap();
    let mut ids = tokenizer.encode(&text, AddedTokens::Parse).unwrap();
    ids.truncate(count);
    ids
}

/// The tokens that llama.cpp has run too.
#[allow(dead_code, reason = "the example compares with llama.cpp, the tests do not")]
pub(crate) fn golden_tokens() -> Vec<u32> {
    Golden::open(&golden_path("llamacpp/logits.safetensors")).ids("ids")
}

fn sequence(model: &Checkpoint) -> CpuSequence {
    let model = CpuModel::new(Arc::new(model.with_weights(Vec::new()).unwrap()), Some(2)).unwrap();
    model.sequence(SequenceOptions { context: SEQUENCE, kv: KvFormat::F32 }).unwrap()
}

/// A text cut into sequences.
pub(crate) fn sequences(ids: &[u32]) -> Vec<&[u32]> {
    ids.chunks(SEQUENCE).collect()
}

/// How near `test` is to `reference` over `ids`.
pub(crate) fn fidelity(reference: &Checkpoint, test: &Checkpoint, ids: &[u32]) -> TextReport {
    let texts = sequences(ids);
    compare_text(&mut sequence(reference), &mut sequence(test), &texts, 0.05).unwrap()
}

/// Signal to noise of all logits.
pub(crate) fn decibels(report: &TextReport) -> f64 {
    report.logits.db.unwrap_or(f64::INFINITY)
}

/// All matrices rounded to nearest, in the same layout: `head` bits for the head.
pub(crate) fn plainly_rounded(
    model: &Checkpoint,
    bits: WeightBits,
    head: WeightBits,
) -> Checkpoint {
    let weights = model.layers().iter().flat_map(LayerWeights::matrices);
    let weights = weights.map(|weight| (weight.name(), weight, bits));
    let rounded = weights.chain([(Checkpoint::HEAD, model.head_weight(), head)]).map(
        |(name, weight, bits)| {
            let mut values = vec![0.0; weight.element_count()];
            weight.read_f32(0, &mut values).unwrap();
            let (rows, columns) = (weight.shape()[0], weight.shape()[1]);
            let matrix = round_nearest(&values, rows, columns, bits).unwrap();
            Weight::from_f32(name, vec![rows, columns], matrix.values()).unwrap()
        },
    );
    model.with_weights(rounded.collect()).unwrap()
}

/// A layer of `config`'s shape with random weights and massive channels, and a small vocabulary.
pub(crate) fn outliers(config: &ModelConfig) -> Checkpoint {
    let mut config = config.clone().with_layers(1).unwrap();
    config.vocab_size = config.vocab_size.min(2048);
    let weights = RandomWeights { dtype: DType::F32, seed: 1, outliers: true };
    Checkpoint::random(config, weights)
}

/// What the first layer adds to the residual stream over `ids`: signal to noise of `test` in dB.
pub(crate) fn layer_decibels(reference: &Checkpoint, test: &Checkpoint, ids: &[u32]) -> f64 {
    let added = |model: &Checkpoint| -> Vec<f32> {
        let model = Arc::new(model.with_weights(Vec::new()).unwrap());
        let embedding = CheckpointEmbedding::new(Arc::clone(&model));
        let mut before = vec![0.0; ids.len() * embedding.hidden_size()];
        embedding.lookup(ids, &mut before).unwrap();
        let after =
            Calibration::run_layer(&model, 0, &before, &[ids.len()], &mut |_, _| {}).unwrap();
        after.iter().zip(&before).map(|(after, before)| after - before).collect()
    };
    let mut meter = SnrMeter::default();
    meter.add(&added(reference), &added(test));
    meter.snr().db.unwrap()
}
