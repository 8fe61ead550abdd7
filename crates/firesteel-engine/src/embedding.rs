use crate::EngineError;
use firesteel_checkpoint::Checkpoint;
use firesteel_step::{Embedding, RunnerError};
use std::sync::Arc;

/// The embedding table of a checkpoint, widened to f32 a row at a time.
#[derive(Clone)]
pub struct CheckpointEmbedding {
    checkpoint: Arc<Checkpoint>,
}

impl CheckpointEmbedding {
    /// The table of `checkpoint`.
    pub fn new(checkpoint: Arc<Checkpoint>) -> Self {
        Self { checkpoint }
    }
}

impl Embedding for CheckpointEmbedding {
    fn hidden_size(&self) -> usize {
        self.checkpoint.config().hidden_size
    }

    fn rows(&self) -> usize {
        self.checkpoint.config().vocab_size
    }

    fn lookup(&self, ids: &[u32], out: &mut [f32]) -> Result<(), RunnerError> {
        Ok(lookup(&self.checkpoint, ids, out)?)
    }
}

/// Writes the rows of `ids` to `out`. Of a quantized table only those rows are widened.
pub(crate) fn lookup(
    checkpoint: &Checkpoint,
    ids: &[u32],
    out: &mut [f32],
) -> Result<(), EngineError> {
    let table = checkpoint.embedding();
    let (rows, width) = (checkpoint.config().vocab_size, checkpoint.config().hidden_size);
    let name = || table.name().to_owned();
    if ids.len().checked_mul(width) != Some(out.len()) {
        return Err(EngineError::EmbeddingLength {
            tensor: name(),
            ids: ids.len(),
            width,
            values: out.len(),
        });
    }
    for (&id, row) in ids.iter().zip(out.chunks_exact_mut(width)) {
        let Some(index) = usize::try_from(id).ok().filter(|&index| index < rows) else {
            return Err(EngineError::TokenId { tensor: name(), id, last: rows.saturating_sub(1) });
        };
        table.read_f32(index * width, row)?;
    }
    Ok(())
}
