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
