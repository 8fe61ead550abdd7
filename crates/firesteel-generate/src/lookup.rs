use crate::GenerateError;

/// Proposes how a sequence goes on from what it has in common with its own past, for speculative
/// decoding by prompt lookup (Saxena 2023).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PromptLookup {
    /// Fewest tokens at the end that have to occur before; 0 counts as 1.
    pub min_ngram: usize,
    /// Most tokens at the end that are compared.
    pub max_ngram: usize,
    /// Most tokens to propose.
    pub max_tokens: usize,
}

impl PromptLookup {
    /// The tokens that followed the longest earlier occurrence of the end of `ids`; nothing if
    /// there is none. Of equally long ones the one with the most tokens to propose counts, and of
    /// those the latest. Takes time in proportion to the ids, times `max_ngram` at worst.
    pub fn propose<'a>(&self, ids: &'a [u32]) -> &'a [u32] {
        let mut best = (self.min_ngram.max(1), 0);
        let mut proposal: &[u32] = &[];
        for end in (1..ids.len()).rev() {
            let (past, following) = ids.split_at(end);
            let pairs = past.iter().rev().zip(ids.iter().rev());
            let matched = pairs.take(self.max_ngram).take_while(|(a, b)| a == b).count();
            let tokens = following.len().min(self.max_tokens);
            if (matched, tokens) > best {
                best = (matched, tokens);
                proposal = &following[..tokens];
                if matched >= self.max_ngram && tokens == self.max_tokens {
                    break;
                }
            }
        }
        proposal
    }
}

impl Default for PromptLookup {
    /// Ten tokens after one to four that occur before.
    fn default() -> Self {
        Self { min_ngram: 1, max_ngram: 4, max_tokens: 10 }
    }
}

/// Most tokens that a step may be proposed: each needs a row of logits.
const MOST_TOKENS: usize = 64;

/// Tokens of the first proposal.
const FIRST_TOKENS: usize = 4;

/// Most steps without a proposal after those that were wrong.
const LONGEST_PAUSE: usize = 31;

/// Prompt lookup at a pace: proposals get longer while they are right, and rarer while they are
/// wrong, since a rejected token costs its share of a step.
///
/// A proposal that was right to the end doubles the next one, any other makes it as long as what
/// was right of it. After one of which nothing was right there is none for 1, 3, 7, … steps, 31 at
/// most.
pub(crate) struct Speculation {
    lookup: PromptLookup,
    /// Tokens of the next proposal.
    tokens: usize,
    /// Length of the last pause.
    pause: usize,
    /// Steps that are left of it.
    waiting: usize,
}

impl Speculation {
    pub(crate) fn new(lookup: PromptLookup) -> Result<Self, GenerateError> {
        if !(1..=MOST_TOKENS).contains(&lookup.max_tokens) {
            let accepted = format!("1 to {MOST_TOKENS} tokens are accepted");
            return Err(GenerateError::option("prompt_lookup", lookup.max_tokens, accepted));
        }
        let tokens = lookup.max_tokens.min(FIRST_TOKENS);
        Ok(Self { lookup, tokens, pause: 0, waiting: 0 })
    }

    /// What to run after the end of `history`, `room` tokens at most.
    pub(crate) fn propose<'h>(&mut self, history: &'h [u32], room: usize) -> &'h [u32] {
        if self.waiting > 0 {
            self.waiting -= 1;
            return &[];
        }
        PromptLookup { max_tokens: self.tokens.min(room), ..self.lookup }.propose(history)
    }

    /// Takes notice of how a proposal came out.
    pub(crate) fn record(&mut self, proposed: usize, accepted: usize) {
        let whole = accepted >= proposed;
        let tokens = if whole { self.tokens.max(proposed.saturating_mul(2)) } else { accepted };
        self.tokens = tokens.clamp(1, self.lookup.max_tokens);
        self.pause = if accepted == 0 { (2 * self.pause + 1).min(LONGEST_PAUSE) } else { 0 };
        self.waiting = self.pause;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_longest_match_with_the_most_to_propose_counts() {
        // (ids, min_ngram, max_ngram, max_tokens, proposal)
        type Case<'a> = (&'a [u32], usize, usize, usize, &'a [u32]);
        let cases: [Case<'_>; 13] = [
            (&[], 1, 3, 4, &[]),
            (&[1], 1, 3, 4, &[]),
            (&[1, 2, 3], 1, 3, 4, &[]),
            (&[1, 2, 3, 1, 2], 1, 3, 4, &[3, 1, 2]),
            (&[1, 2, 3, 1, 2], 1, 3, 1, &[3]),
            (&[1, 2, 3, 1, 2], 1, 3, 0, &[]),
            (&[1, 2, 3, 1, 2], 1, 0, 4, &[]),
            (&[1, 2, 3, 1, 2], 3, 3, 4, &[]),
            (&[5, 2, 3, 1, 2], 2, 3, 4, &[]),
            // The longer match, though the shorter one is later.
            (&[1, 2, 7, 9, 2, 8, 1, 2], 1, 3, 1, &[7]),
            // Of equal ones the latest.
            (&[1, 2, 7, 1, 2, 8, 1, 2], 1, 2, 1, &[8]),
            // Of equal ones the one that proposes more.
            (&[1, 2, 7, 1, 2, 8, 1, 2], 1, 2, 5, &[7, 1, 2, 8, 1]),
            (&[4, 4, 4, 4, 4], 1, 2, 3, &[4, 4, 4]),
        ];
        for (ids, min_ngram, max_ngram, max_tokens, expected) in cases {
            let lookup = PromptLookup { min_ngram, max_ngram, max_tokens };
            assert_eq!(lookup.propose(ids), expected, "{ids:?} {lookup:?}");
        }
    }

    #[test]
    fn right_proposals_get_longer_and_wrong_ones_rarer() {
        let mut speculation =
            Speculation::new(PromptLookup { max_tokens: 10, ..PromptLookup::default() }).unwrap();
        let history = [7; 50];
        // (tokens that were right, lengths of the proposals of the next steps)
        let cases: [(usize, &[usize]); 9] = [
            (4, &[8]),
            (8, &[10]),
            (10, &[10]),
            (3, &[3]),
            (1, &[1]),
            (0, &[0, 1]),
            (0, &[0, 0, 0, 1]),
            (1, &[2]),
            (0, &[0, 1]),
        ];
        let mut proposed = speculation.propose(&history, 50).len();
        assert_eq!(proposed, 4);
        for (accepted, lengths) in cases {
            speculation.record(proposed, accepted);
            for &length in lengths {
                proposed = speculation.propose(&history, 50).len();
                assert_eq!(proposed, length, "{accepted}");
            }
        }
        // At most 31 steps without one.
        for _ in 0..9 {
            speculation.record(1, 0);
        }
        let pause = (0..).find(|_| !speculation.propose(&history, 50).is_empty());
        assert_eq!(pause, Some(31));
        // Room that is short does not shorten what comes later.
        speculation.record(1, 1);
        assert_eq!(speculation.propose(&history, 0).len(), 0);
        assert_eq!(speculation.propose(&history, 1).len(), 1);
        assert_eq!(speculation.propose(&history, 50).len(), 2);
    }

    proptest! {
        #[test]
        fn a_proposal_follows_what_the_sequence_ends_in(
            ids in proptest::collection::vec(0u32..4, 0..60),
            min_ngram in 0usize..4,
            max_ngram in 0usize..6,
            max_tokens in 0usize..6,
        ) {
            let lookup = PromptLookup { min_ngram, max_ngram, max_tokens };
            let proposal = lookup.propose(&ids);
            prop_assert!(proposal.len() <= max_tokens);
            let fewest = min_ngram.max(1);
            let follows = |ngram: usize| (1..ids.len()).any(|end| {
                ngram <= end && ids[..end].ends_with(&ids[ids.len() - ngram..])
                    && ids[end..].starts_with(proposal)
            });
            let found = (fewest..=max_ngram).any(follows);
            prop_assert_eq!(!proposal.is_empty(), found && max_tokens > 0);
        }
    }
}
