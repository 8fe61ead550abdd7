//! How near the text of a model under test is to the reference's: next-token distributions over
//! a text, and greedy continuations of prompts.

use crate::logits::log_probability;
use crate::{CheckError, Snr, SnrMeter, compare_logits, greedy_choice};
use firesteel_step::{Decoder, RunnerError, StepError, Wanted};
use serde::{Deserialize, Serialize};

/// Agreement over a text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TextReport {
    /// Tokens whose logits were compared.
    pub tokens: usize,
    /// Sequences of the text, each from an empty cache.
    pub sequences: usize,
    /// Tokens of the longest of them.
    pub longest: usize,
    /// All logits.
    pub logits: Snr,
    /// Mean KL divergence of the test from the reference, in nats.
    pub kl_mean: f64,
    /// KL divergence that 99 % of the tokens do not exceed.
    pub kl_p99: f64,
    /// Largest KL divergence.
    pub kl_max: f64,
    /// Perplexity of the reference: e^(mean −ln p) of the tokens that follow in the text.
    pub reference_perplexity: f64,
    /// Perplexity of the test.
    pub test_perplexity: f64,
    /// Perplexity of the test by that of the reference, less 1.
    pub perplexity_change: f64,
    /// Share of tokens with the same most probable successor, ties counted like all others.
    pub top1: f64,
    /// Mean share of the five most probable successors in common.
    pub top5: f64,
    /// Tokens whose most probable successors differ.
    pub disagreements: usize,
    /// Of those, the ones where the reference's two best logits are closer than the tie margin.
    pub near_ties: usize,
}

/// Agreement of greedy continuations.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PromptsReport {
    /// Prompts that were continued.
    pub prompts: usize,
    /// Prompts whose whole continuations are equal.
    pub exact: usize,
    /// Prompts that first differ where the reference's two best logits are closer than the tie
    /// margin: neither exact nor in `exact_share` and `kept_prefix`.
    pub ties: usize,
    /// Share of prompts whose whole continuations are equal, ties left out; `None` when all are
    /// ties.
    pub exact_share: Option<f64>,
    /// Mean share of a continuation before it first differs, ties left out; `None` when all are
    /// ties.
    pub kept_prefix: Option<f64>,
    /// Tokens of the reference's continuations.
    pub tokens: usize,
}

/// How prompts are continued.
#[derive(Debug, Clone, PartialEq)]
pub struct PromptOptions<'a> {
    /// Most tokens of a continuation, from 1.
    pub tokens: usize,
    /// Gap between the reference's two best logits below which a choice is a tie.
    pub tie_margin: f64,
    /// Ids that end a continuation.
    pub ends: &'a [u32],
}

/// Runs the sequences of a text on both, each from an empty cache, and compares every token's
/// logits.
///
/// # Errors
/// When no sequence has two tokens or one does not fit a context, the vocabularies differ, or one
/// side fails or returns what is not finite.
pub fn compare_text(
    reference: &mut dyn Decoder,
    test: &mut dyn Decoder,
    sequences: &[&[u32]],
    tie_margin: f64,
) -> Result<TextReport, CheckError> {
    same_vocabulary(reference, test)?;
    let longest = sequences.iter().map(|ids| ids.len()).max().unwrap_or(0);
    if longest < 2 {
        let problem = "a sequence takes two at least".into();
        return Err(CheckError::Tokens { count: longest, problem });
    }
    let width = reference.vocab_size();
    let (mut left, mut right) = (Rows::default(), Rows::default());
    let mut meter = SnrMeter::default();
    let mut divergences = Vec::new();
    let mut likelihoods = [0f64; 2];
    let (mut predicted, mut top5, mut disagreements, mut near_ties) = (0usize, 0.0, 0, 0);
    for sequence in sequences {
        reference.clear();
        test.clear();
        let mut at = 0;
        while at < sequence.len() {
            let rest = sequence.len() - at;
            let tokens = reference.chunk(rest).min(test.chunk(rest)).clamp(1, rest);
            let part = &sequence[at..at + tokens];
            left.run(reference, part, Kept::All)?;
            right.run(test, part, Kept::All)?;
            meter.add(&left.logits, &right.logits);
            let rows = left.logits.chunks_exact(width).zip(right.logits.chunks_exact(width));
            for (index, (left, right)) in rows.enumerate() {
                let difference = compare_logits(left, right);
                divergences.push(difference.kl);
                top5 += difference.top5;
                if difference.reference_top != difference.test_top {
                    disagreements += 1;
                    near_ties += usize::from(difference.reference_gap < tie_margin);
                }
                let next = sequence.get(at + index + 1).map(|id| *id as usize);
                if let Some(next) = next.filter(|next| *next < width) {
                    predicted += 1;
                    likelihoods[0] += log_probability(left, next);
                    likelihoods[1] += log_probability(right, next);
                }
            }
            at += tokens;
        }
    }
    let tokens = divergences.len();
    let kl_mean = divergences.iter().sum::<f64>() / tokens.max(1) as f64;
    divergences.sort_by(f64::total_cmp);
    let rank = (tokens * 99).div_ceil(100).saturating_sub(1);
    let perplexity = likelihoods.map(|sum| (-sum / predicted.max(1) as f64).exp());
    Ok(TextReport {
        tokens,
        sequences: sequences.len(),
        longest,
        logits: meter.snr(),
        kl_mean,
        kl_p99: divergences.get(rank).copied().unwrap_or_default(),
        kl_max: divergences.last().copied().unwrap_or_default(),
        reference_perplexity: perplexity[0],
        test_perplexity: perplexity[1],
        perplexity_change: perplexity[1] / perplexity[0] - 1.0,
        top1: 1.0 - disagreements as f64 / tokens.max(1) as f64,
        top5: top5 / tokens.max(1) as f64,
        disagreements,
        near_ties,
    })
}

/// Continues each prompt greedily on `reference` and finds where `test`, left to itself, would
/// first choose another token. Up to there both have the same tokens, so `test` is not run
/// beyond it.
///
/// # Errors
/// When there are no prompts or continuations are to have no tokens, a prompt is empty or does not
/// fit a context with its continuation, the vocabularies differ, or one side fails or returns what
/// is not finite.
pub fn compare_prompts(
    reference: &mut dyn Decoder,
    test: &mut dyn Decoder,
    prompts: &[Vec<u32>],
    options: &PromptOptions<'_>,
) -> Result<PromptsReport, CheckError> {
    same_vocabulary(reference, test)?;
    let refuse = |count: usize, problem: String| Err(CheckError::Tokens { count, problem });
    if prompts.is_empty() || options.tokens == 0 {
        let problem = "a comparison takes a prompt and a token after it at least";
        return refuse(prompts.len().min(options.tokens), problem.into());
    }
    let context = reference.context().min(test.context());
    for prompt in prompts {
        let length = prompt.len();
        if length == 0 {
            return refuse(0, "a prompt takes one at least".into());
        }
        let fits = length.checked_add(options.tokens).is_some_and(|all| all <= context);
        if !fits {
            let tokens = options.tokens;
            return refuse(
                length,
                format!("with {tokens} more they exceed the context of {context}"),
            );
        }
    }
    let width = reference.vocab_size();
    let (mut left, mut right) = (Rows::default(), Rows::default());
    let (mut exact, mut ties, mut tokens, mut kept) = (0usize, 0usize, 0usize, 0.0);
    for prompt in prompts {
        reference.clear();
        test.clear();
        left.run(reference, prompt, Kept::Last)?;
        right.run(test, prompt, Kept::Last)?;
        let (mut count, mut same, mut differs) = (0usize, 0usize, None);
        while count < options.tokens {
            let Some(row) = left.last(width) else { break };
            let Some(choice) = greedy_choice(row) else { break };
            count += 1;
            if let (None, Some(other)) = (differs, right.last(width)) {
                let difference = compare_logits(row, other);
                match difference.test_top == choice {
                    true => same += 1,
                    false => differs = Some(difference.reference_gap),
                }
            }
            if options.ends.contains(&choice) || count == options.tokens {
                break;
            }
            left.run(reference, &[choice], Kept::Last)?;
            if differs.is_none() {
                right.run(test, &[choice], Kept::Last)?;
            }
        }
        tokens += count;
        match differs {
            Some(gap) if gap < options.tie_margin => ties += 1,
            differs => {
                exact += usize::from(differs.is_none());
                kept += same as f64 / count.max(1) as f64;
            }
        }
    }
    let counted = prompts.len() - ties;
    let share = |sum: f64| (counted > 0).then(|| sum / counted as f64);
    Ok(PromptsReport {
        prompts: prompts.len(),
        exact,
        ties,
        exact_share: share(exact as f64),
        kept_prefix: share(kept),
        tokens,
    })
}

fn same_vocabulary(reference: &dyn Decoder, test: &dyn Decoder) -> Result<(), CheckError> {
    let (left, right) = (reference.vocab_size(), test.vocab_size());
    if left == right && left > 0 {
        return Ok(());
    }
    Err(CheckError::Contract {
        what: "vocabulary",
        reference: reference.name().into(),
        test: test.name().into(),
        reference_value: left.to_string(),
        test_value: right.to_string(),
    })
}

/// The tokens of a run whose logits are kept.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kept {
    All,
    Last,
}

/// Logits of the tokens run last, and room to make them.
#[derive(Default)]
struct Rows {
    logits: Vec<f32>,
    part: Vec<f32>,
}

impl Rows {
    /// The logits of the last token.
    fn last(&self, width: usize) -> Option<&[f32]> {
        self.logits.rchunks_exact(width).next()
    }

    /// Runs `ids` and commits them; the logits become those of `kept`, and no others are asked for.
    fn run(
        &mut self,
        decoder: &mut dyn Decoder,
        mut ids: &[u32],
        kept: Kept,
    ) -> Result<(), CheckError> {
        self.logits.clear();
        while !ids.is_empty() {
            let position = decoder.position();
            let mut chunk = decoder.chunk(ids.len()).clamp(1, ids.len());
            if kept == Kept::All && !decoder.gives_all_logits(chunk) {
                chunk = 1;
            }
            let (now, later) = ids.split_at(chunk);
            let wanted = match kept {
                Kept::Last if !later.is_empty() => Wanted::Nothing,
                Kept::All if chunk > 1 => Wanted::All,
                Kept::All | Kept::Last => Wanted::Last,
            };
            let mut step = || -> Result<(), RunnerError> {
                decoder.forward(now, wanted, &mut self.part)?;
                if let Some(index) = self.part.iter().position(|logit| !logit.is_finite()) {
                    let name = "logits".to_owned();
                    return Err(StepError::NonFinite { name, index }.into());
                }
                decoder.commit(chunk)
            };
            let result = step();
            let runner = || decoder.name().to_owned();
            result.map_err(|source| CheckError::Runner { runner: runner(), position, source })?;
            self.logits.extend_from_slice(&self.part);
            ids = later;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use firesteel_testing::ScriptedDecoder;

    /// The logits after a token depend on that token alone; takes two tokens at most at once.
    fn table(name: &'static str, rows: &[&[f32]]) -> ScriptedDecoder<'static> {
        let rows: Vec<Vec<f32>> = rows.iter().map(|row| row.to_vec()).collect();
        let (tokens, vocabulary) = (rows.len(), rows[0].len());
        let script = move |ids: &[u32]| rows[ids[ids.len() - 1] as usize].clone();
        let mut decoder = ScriptedDecoder::new(vocabulary, 16, script);
        (decoder.name, decoder.embedding_rows, decoder.chunk) = (name, tokens, 2);
        decoder
    }

    const LN_2: f32 = std::f32::consts::LN_2;

    #[test]
    fn a_text_has_its_known_divergence_and_perplexity() {
        // After token 0 p = (2/3, 1/3) and q = (1/3, 2/3): KL = ln 2 / 3. After token 1 both are
        // even.
        let mut reference = table("a", &[&[LN_2, 0.0], &[0.0, 0.0]]);
        let mut test = table("b", &[&[0.0, LN_2], &[0.0, 0.0]]);
        let sequences: [&[u32]; 2] = [&[0, 0, 1], &[0, 0]];
        let report = compare_text(&mut reference, &mut test, &sequences, 1.0).unwrap();
        assert_eq!((report.tokens, report.sequences), (5, 2));
        let divergence = f64::from(LN_2) / 3.0;
        assert!((report.kl_mean - divergence * 4.0 / 5.0).abs() < 1e-7, "{report:?}");
        assert!((report.kl_max - divergence).abs() < 1e-7);
        assert_eq!(report.kl_p99, report.kl_max);
        // Predicted are 0 0 in the first sequence, 0 1 in it, and 0 0 in the second.
        let mean = (2.0 * 1.5f64.ln() + 3f64.ln()) / 3.0;
        assert!((report.reference_perplexity - mean.exp()).abs() < 1e-6, "{report:?}");
        let mean = (2.0 * 3f64.ln() + 1.5f64.ln()) / 3.0;
        assert!((report.test_perplexity - mean.exp()).abs() < 1e-6);
        let change = report.test_perplexity / report.reference_perplexity - 1.0;
        assert_eq!(report.perplexity_change, change);
        assert_eq!((report.disagreements, report.near_ties), (4, 4));
        assert!((report.top1 - 0.2).abs() < 1e-12 && report.top5 == 1.0);
        let zeros: [&[u32]; 1] = [&[0, 0]];
        let same = compare_text(&mut table("a", &[&[LN_2, 0.0]]), &mut reference, &zeros, 1.0);
        let same = same.unwrap();
        assert!(same.logits.identical && same.kl_max == 0.0 && same.perplexity_change == 0.0);
    }

    #[test]
    fn prompts_are_exact_kept_in_part_or_tied() {
        // The reference goes 0 → 1 → 2 → 3 → 4. The test leaves it after 2, where the reference
        // is nearly tied, or after 1, where it is not.
        let row = |best: usize, second: (usize, f32)| {
            let mut row = [0f32; 5];
            row[best] = 3.0;
            row[second.0] = second.1;
            row
        };
        let chain = [row(1, (0, 0.0)), row(2, (0, 0.0)), row(3, (0, 2.99)), row(4, (0, 0.0))];
        let end = row(4, (0, 0.0));
        let mut rows: Vec<&[f32]> = chain.iter().map(|row| &row[..]).collect();
        rows.push(&end);
        let mut reference = table("a", &rows);
        let (early, late) = (row(0, (4, 0.0)), row(0, (3, 2.0)));
        let options = PromptOptions { tokens: 8, tie_margin: 0.05, ends: &[4] };
        let prompts = [vec![0], vec![0, 3]];
        let mut check = |at: usize, with: &[f32]| {
            let mut changed: Vec<&[f32]> = rows.clone();
            changed[at] = with;
            compare_prompts(&mut reference, &mut table("b", &changed), &prompts, &options).unwrap()
        };
        let exact = check(0, &chain[0]);
        assert_eq!((exact.prompts, exact.exact, exact.ties, exact.tokens), (2, 2, 0, 5));
        assert_eq!((exact.exact_share, exact.kept_prefix), (Some(1.0), Some(1.0)));
        let parted = check(1, &early);
        assert_eq!((parted.exact, parted.ties), (1, 0));
        assert_eq!((parted.exact_share, parted.kept_prefix), (Some(0.5), Some(0.625)));
        let tied = check(2, &late);
        assert_eq!((tied.exact, tied.ties), (1, 1));
        assert_eq!((tied.exact_share, tied.kept_prefix), (Some(1.0), Some(1.0)));
        let mut changed = rows.clone();
        changed[2] = &late;
        let mut test = table("b", &changed);
        let all = compare_prompts(&mut reference, &mut test, &[vec![0]], &options).unwrap();
        assert_eq!((all.ties, all.exact_share, all.kept_prefix), (1, None, None));
    }

    #[test]
    fn of_a_prompt_only_the_last_logits_are_asked_for() {
        let rows: [&[f32]; 2] = [&[0.0, 1.0], &[1.0, 0.0]];
        let (mut reference, mut test) = (table("a", &rows), table("b", &rows));
        let options = PromptOptions { tokens: 2, tie_margin: 0.05, ends: &[] };
        let prompts = [vec![0; 7]];
        compare_prompts(&mut reference, &mut test, &prompts, &options).unwrap();
        // Seven tokens in chunks of two, and the first token of the continuation.
        let (nothing, last) = (Wanted::Nothing, Wanted::Last);
        let asked = [nothing, nothing, nothing, last, last];
        assert_eq!((&reference.asked[..], &test.asked[..]), (&asked[..], &asked[..]));
    }

    #[test]
    fn what_cannot_be_compared_is_refused() {
        let mut two = table("a", &[&[0.0, 0.0], &[0.0, 0.0]]);
        let mut three = table("b", &[&[0.0, 0.0, 0.0]]);
        let mut broken = table("c", &[&[0.0, f32::NAN]]);
        let options = PromptOptions { tokens: 8, tie_margin: 0.05, ends: &[] };
        let mut text = |test: &mut ScriptedDecoder<'_>, ids: &[u32]| {
            compare_text(&mut two, test, &[ids], 0.05).unwrap_err().to_string()
        };
        let vocabulary = "the vocabulary of a and b differ: 2 against 3";
        assert_eq!(text(&mut three, &[0, 0]), vocabulary);
        assert_eq!(text(&mut broken, &[0]), "1 tokens given, but a sequence takes two at least");
        let broken = text(&mut broken, &[0, 0]);
        assert!(
            broken.starts_with("c at position 0: logits is not finite at element 1"),
            "{broken}"
        );
        let mut other = table("b", &[&[0.0, 0.0], &[0.0, 0.0]]);
        let mut prompt = |ids: Vec<u32>| {
            let result = compare_prompts(&mut two, &mut other, &[ids], &options);
            result.unwrap_err().to_string()
        };
        assert_eq!(prompt(vec![]), "0 tokens given, but a prompt takes one at least");
        let long = "9 tokens given, but with 8 more they exceed the context of 16";
        assert_eq!(prompt(vec![0; 9]), long);
        let mut tokens = |tokens: usize, prompts: &[Vec<u32>]| {
            let options = PromptOptions { tokens, ..options.clone() };
            compare_prompts(&mut two, &mut other, prompts, &options).unwrap_err().to_string()
        };
        let none = "0 tokens given, but a comparison takes a prompt and a token after it at least";
        assert_eq!(tokens(0, &[vec![0]]), none);
        assert_eq!(tokens(8, &[]), none);
        let most = format!("1 tokens given, but with {} more they exceed", usize::MAX);
        assert!(tokens(usize::MAX, &[vec![0]]).starts_with(&most));
    }
}
