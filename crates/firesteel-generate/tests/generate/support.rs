//! The trained model on the kernels, for what is tested of requests and sessions.

use firesteel_checkpoint::Checkpoint;
use firesteel_engine::{CheckpointEmbedding, CpuModel};
use firesteel_generate::Tokenizer;
use firesteel_step::{CacheLayoutChoice, Logits, StepDecoder, StepOptions, StepSpec};
use firesteel_testing::spark_tiny_path;
use std::sync::Arc;

pub(crate) struct Model {
    pub(crate) checkpoint: Arc<Checkpoint>,
    pub(crate) cpu: Arc<CpuModel>,
    pub(crate) tokenizer: Tokenizer,
}

impl Model {
    pub(crate) fn open(threads: usize) -> Self {
        let folder = spark_tiny_path();
        let checkpoint = Arc::new(Checkpoint::open(&folder).unwrap());
        let cpu = CpuModel::new(Arc::clone(&checkpoint), Some(threads)).unwrap();
        Self { checkpoint, cpu, tokenizer: Tokenizer::open(&folder).unwrap() }
    }

    /// A sequence on steps of 1, 2, 3, 5, 9 and 32 tokens, as far as they fit; those of 32 give only the
    /// last logits.
    pub(crate) fn step_decoder(&self, context: usize) -> StepDecoder<'static> {
        let config = self.checkpoint.config();
        let options = StepOptions {
            cache_layout: CacheLayoutChoice::Ring,
            ..StepOptions::decode(config, context)
        };
        let spec = StepSpec::new(config, &options).unwrap();
        let embedding = Box::new(CheckpointEmbedding::new(Arc::clone(&self.checkpoint)));
        let first = Box::new(self.cpu.runner(spec.clone()).unwrap());
        let mut decoder = StepDecoder::new(config, first, embedding).unwrap();
        for tokens in [2, 3, 5, 9, 32].into_iter().filter(|tokens| *tokens <= context) {
            let logits = if tokens == 32 { Logits::Last } else { Logits::All };
            let spec = spec.with_tokens(tokens).unwrap().with_logits(logits).unwrap();
            decoder = decoder.with_runner(Box::new(self.cpu.runner(spec).unwrap())).unwrap();
        }
        decoder
    }
}
