//! Many sequences of a model, in one pass over its weights.

use super::{BatchEntry, CpuModel, CpuSequence, KvFormat, SequenceOptions, failed};
use crate::EngineError;
use firesteel_step::{BatchDecoder, BatchPart, Decoder, RunnerError, SequenceId, Sequences};
use std::sync::Arc;

/// Sequences of one [`CpuModel`] that run together. They may differ in context and in how keys and
/// values are stored; what one gets does not depend on the others.
pub struct CpuBatch {
    model: Arc<CpuModel>,
    kv: KvFormat,
    sequences: Sequences<CpuSequence>,
}

impl CpuBatch {
    /// No sequence yet; those that [`add`](BatchDecoder::add) makes store keys and values in `kv`.
    pub fn new(model: Arc<CpuModel>, kv: KvFormat) -> Self {
        Self { model, kv, sequences: Sequences::default() }
    }

    /// Adds an empty sequence of its own kind.
    ///
    /// # Errors
    /// As [`CpuModel::sequence`].
    pub fn add_with(&mut self, options: SequenceOptions) -> Result<SequenceId, EngineError> {
        Ok(self.sequences.add(self.model.sequence(options)?))
    }
}

impl BatchDecoder for CpuBatch {
    fn add(&mut self, context: usize) -> Result<SequenceId, RunnerError> {
        self.add_with(SequenceOptions { context, kv: self.kv }).map_err(failed)
    }

    fn remove(&mut self, sequence: SequenceId) -> bool {
        self.sequences.remove(sequence).is_some()
    }

    fn sequence(&self, sequence: SequenceId) -> Option<&dyn Decoder> {
        self.sequences.get(sequence).map(|sequence| sequence as &dyn Decoder)
    }

    fn sequence_mut(&mut self, sequence: SequenceId) -> Option<&mut dyn Decoder> {
        self.sequences.get_mut(sequence).map(|sequence| sequence as &mut dyn Decoder)
    }

    /// Runs all parts in one forward. If that fails, nobody knows for whom, so each part then runs
    /// by itself, which gives the same bytes.
    fn forward(&mut self, parts: &mut [BatchPart<'_>]) -> Vec<Result<(), RunnerError>> {
        let mut sequences = self.sequences.of(parts);
        let mut entries = Vec::with_capacity(parts.len());
        for (part, sequence) in parts.iter_mut().zip(&mut sequences) {
            part.logits.clear();
            if let Ok(sequence) = sequence {
                let BatchPart { ids, wanted, logits, .. } = part;
                entries.push(BatchEntry { sequence, ids, wanted: *wanted, logits });
            }
        }
        let together =
            if entries.is_empty() { Ok(()) } else { self.model.forward_batch(&mut entries) };
        let apart = together.is_err();
        let each = parts.iter_mut().zip(sequences).map(|(part, sequence)| match sequence {
            Ok(sequence) if apart => sequence.forward(part.ids, part.wanted, part.logits),
            Ok(_) => Ok(()),
            Err(error) => Err(error),
        });
        each.collect()
    }
}
