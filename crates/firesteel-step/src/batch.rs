use crate::{Decoder, RunnerError, Wanted};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// The name of a sequence in a [`BatchDecoder`]. No two sequences of one decoder ever share one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(u64);

impl fmt::Display for SequenceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sequence {}", self.0)
    }
}

/// The next tokens of one sequence in a pass.
#[derive(Debug)]
pub struct BatchPart<'a> {
    /// The sequence; each comes once at most in a pass.
    pub sequence: SequenceId,
    /// Its next tokens, at least one.
    pub ids: &'a [u32],
    /// The logits that are wanted.
    pub wanted: Wanted,
    /// Becomes the wanted rows of logits, one after the other.
    pub logits: &'a mut Vec<f32>,
}

/// Something that runs many sequences of one model: the CPU engine in one pass over its weights, or
/// any [`Decoder`]s in turn ([`TurnTaking`]).
///
/// Each sequence has a context and caches of its own and is a [`Decoder`] itself, by which its
/// tokens are kept, marked and gone back over. Only what is to run in the same pass goes through
/// [`forward`](Self::forward).
pub trait BatchDecoder {
    /// Adds an empty sequence with room for `context` tokens or more.
    ///
    /// # Errors
    /// When no further sequence can be had, or none of that context.
    fn add(&mut self, context: usize) -> Result<SequenceId, RunnerError>;

    /// Drops a sequence and its caches, and tells whether there was one.
    fn remove(&mut self, sequence: SequenceId) -> bool;

    /// A sequence, if it is there.
    fn sequence(&self, sequence: SequenceId) -> Option<&dyn Decoder>;

    /// A sequence to be changed, if it is there.
    fn sequence_mut(&mut self, sequence: SequenceId) -> Option<&mut dyn Decoder>;

    /// Runs the next tokens of several sequences, each as [`Decoder::forward`] does: they are
    /// pending afterwards, and a sequence that fails is as before. Returns how each of `parts` came
    /// out, in their order; one that fails changes nothing for the others.
    fn forward(&mut self, parts: &mut [BatchPart<'_>]) -> Vec<Result<(), RunnerError>>;
}

/// Sequences by their names, for whoever implements [`BatchDecoder`].
#[derive(Debug)]
pub struct Sequences<D> {
    all: BTreeMap<SequenceId, D>,
    next: u64,
}

impl<D> Default for Sequences<D> {
    fn default() -> Self {
        Self { all: BTreeMap::new(), next: 0 }
    }
}

impl<D> Sequences<D> {
    /// Adds a sequence and names it.
    pub fn add(&mut self, sequence: D) -> SequenceId {
        let id = SequenceId(self.next);
        self.next += 1;
        self.all.insert(id, sequence);
        id
    }

    /// Takes a sequence out.
    pub fn remove(&mut self, sequence: SequenceId) -> Option<D> {
        self.all.remove(&sequence)
    }

    /// A sequence, if it is there.
    pub fn get(&self, sequence: SequenceId) -> Option<&D> {
        self.all.get(&sequence)
    }

    /// A sequence to be changed, if it is there.
    pub fn get_mut(&mut self, sequence: SequenceId) -> Option<&mut D> {
        self.all.get_mut(&sequence)
    }

    /// For each of `parts` its sequence.
    ///
    /// # Errors
    /// In the place of one that is not there, or that an earlier part has.
    pub fn of(&mut self, parts: &[BatchPart<'_>]) -> Vec<Result<&mut D, RunnerError>> {
        let wanted: BTreeSet<SequenceId> = parts.iter().map(|part| part.sequence).collect();
        let all = self.all.iter_mut().filter(|(id, _)| wanted.contains(id));
        let mut found: BTreeMap<SequenceId, &mut D> =
            all.map(|(id, sequence)| (*id, sequence)).collect();
        let each = parts.iter().map(|part| {
            let sequence = part.sequence;
            found.remove(&sequence).ok_or(RunnerError::NoSequence { sequence })
        });
        each.collect()
    }
}

/// Makes a decoder with room for a number of tokens.
type Open<'a> = dyn FnMut(usize) -> Result<Box<dyn Decoder + 'a>, RunnerError> + 'a;

/// Decoders of one model that take turns: a pass runs one sequence after the other.
pub struct TurnTaking<'a> {
    sequences: Sequences<Box<dyn Decoder + 'a>>,
    open: Box<Open<'a>>,
}

impl<'a> TurnTaking<'a> {
    /// No sequence yet; `open` makes the decoder of each with room for a number of tokens or more.
    pub fn new(open: impl FnMut(usize) -> Result<Box<dyn Decoder + 'a>, RunnerError> + 'a) -> Self {
        Self { sequences: Sequences::default(), open: Box::new(open) }
    }

    /// The sequence of `decoder`, and no further one.
    pub fn of_one(decoder: Box<dyn Decoder + 'a>) -> (Self, SequenceId) {
        let runner = decoder.name().to_owned();
        let mut turns = Self::new(move |_| {
            let message = "there is one sequence, and no decoder for another".to_owned();
            Err(RunnerError::Failed { runner: runner.clone(), message })
        });
        let sequence = turns.sequences.add(decoder);
        (turns, sequence)
    }
}

impl BatchDecoder for TurnTaking<'_> {
    fn add(&mut self, context: usize) -> Result<SequenceId, RunnerError> {
        let decoder = (self.open)(context)?;
        if decoder.context() < context {
            return Err(RunnerError::Unusable {
                runner: decoder.name().into(),
                what: "the context",
                actual: decoder.context().to_string(),
                expected: format!("{context} or more"),
            });
        }
        Ok(self.sequences.add(decoder))
    }

    fn remove(&mut self, sequence: SequenceId) -> bool {
        self.sequences.remove(sequence).is_some()
    }

    fn sequence(&self, sequence: SequenceId) -> Option<&dyn Decoder> {
        match self.sequences.get(sequence) {
            Some(decoder) => Some(&**decoder),
            None => None,
        }
    }

    fn sequence_mut(&mut self, sequence: SequenceId) -> Option<&mut dyn Decoder> {
        match self.sequences.get_mut(sequence) {
            Some(decoder) => Some(&mut **decoder),
            None => None,
        }
    }

    fn forward(&mut self, parts: &mut [BatchPart<'_>]) -> Vec<Result<(), RunnerError>> {
        let sequences = self.sequences.of(parts);
        let turns = parts.iter_mut().zip(sequences).map(|(part, decoder)| {
            part.logits.clear();
            decoder?.forward(part.ids, part.wanted, part.logits)
        });
        turns.collect()
    }
}
