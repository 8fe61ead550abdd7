use crate::RunnerError;

/// The logits that a [`Decoder::forward`] is to give.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Wanted {
    /// None: the tokens only fill the caches.
    Nothing,
    /// Those of the last token.
    Last,
    /// Those of every token.
    All,
}

/// Marks that a decoder keeps: those of one turn of a chat, where it begins, shortly before the end
/// of its prompt, and at that end.
pub const MARKS: usize = 3;

/// Something that runs one sequence and keeps its caches: the CPU engine with caches of its own, or
/// a [`Runner`](crate::Runner) with a [`KvState`](crate::KvState).
///
/// A forward leaves its tokens pending, and a commit keeps the first of them. So a proposal of several
/// tokens can be run at once and dropped from where it was wrong on, with any layout of the caches.
pub trait Decoder {
    /// Short name for reports, that of the runner.
    fn name(&self) -> &str;

    /// Settings that can change numbers, as [`Runner::settings`](crate::Runner::settings) has them.
    fn settings(&self) -> Vec<(String, String)> {
        Vec::new()
    }

    /// Width of a row of logits.
    fn vocab_size(&self) -> usize;

    /// Ids that have an embedding: those below this.
    fn embedding_rows(&self) -> usize;

    /// Tokens that fit.
    fn context(&self) -> usize;

    /// Tokens committed; the position of the next one.
    fn position(&self) -> usize;

    /// Bytes of the caches.
    fn cache_bytes(&self) -> usize;

    /// How many of `left` tokens, 1 or more, the next forward takes best; between 1 and `left`.
    fn chunk(&self, left: usize) -> usize;

    /// Whether a forward takes any number of tokens, and the logits of a token are the same bytes
    /// however the sequence is split into forwards. Where not, [`chunk`](Self::chunk) has to be
    /// followed for the same numbers to come again.
    fn splits_freely(&self) -> bool {
        false
    }

    /// Whether [`Wanted::All`] can be had of a forward of `tokens` tokens.
    fn gives_all_logits(&self, tokens: usize) -> bool;

    /// Runs `ids` after the committed tokens, and forgets what was pending. `logits` becomes the
    /// wanted rows of [`vocab_size`](Self::vocab_size), one after the other.
    ///
    /// # Errors
    /// When there are no ids or more than fit, an id has no embedding, the decoder takes no step of
    /// that many tokens or with those logits, or the execution fails. The sequence is as before then,
    /// and nothing is pending.
    fn forward(
        &mut self,
        ids: &[u32],
        wanted: Wanted,
        logits: &mut Vec<f32>,
    ) -> Result<(), RunnerError>;

    /// Keeps the first `tokens` of the pending ones, and forgets the others.
    ///
    /// # Errors
    /// When fewer are pending, or the caches can only keep all of them. The sequence is as before
    /// then.
    fn commit(&mut self, tokens: usize) -> Result<(), RunnerError>;

    /// Forgets the sequence, its marks and what is pending.
    fn clear(&mut self);

    /// Remembers this position for [`rewind`](Self::rewind). What a sliding layer will overwrite is
    /// copied. A decoder keeps [`MARKS`] of them, and drops the oldest for a new one.
    fn mark(&mut self) {}

    /// Goes back to the last position that can be had again and is at most `position`, and tells it.
    /// Position 0 can always be had, and the present one too. What is pending is forgotten.
    fn rewind(&mut self, position: usize) -> usize {
        if self.position() > position {
            self.clear();
        }
        self.position()
    }
}
