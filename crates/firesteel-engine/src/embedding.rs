use crate::NAME;
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
        let failed = |message| RunnerError::Failed { runner: NAME.into(), message };
        let table = self.checkpoint.embedding();
        let (rows, width) = (self.rows(), self.hidden_size());
        if ids.len().checked_mul(width) != Some(out.len()) {
            return Err(failed(format!(
                "{}: {} ids of width {width} do not fill {} values",
                table.name(),
                ids.len(),
                out.len()
            )));
        }
        for (&id, row) in ids.iter().zip(out.chunks_exact_mut(width)) {
            let Some(index) = usize::try_from(id).ok().filter(|&index| index < rows) else {
                return Err(failed(format!(
                    "{}: token id {id} has no row, 0 to {} are accepted",
                    table.name(),
                    rows.saturating_sub(1)
                )));
            };
            table.read_f32(index * width, row).map_err(|error| failed(error.to_string()))?;
        }
        Ok(())
    }
}
