//! How a text is cut into words before the merges: the steps of a tokenizer's pre-tokenizer.

use fancy_regex::Regex;
use tokenizers::pattern::Pattern;
use tokenizers::pre_tokenizers::split::SplitPattern;
use tokenizers::{
    Offsets, PreTokenizedString, PreTokenizer, PreTokenizerWrapper, SplitDelimiterBehavior,
};

/// The pattern that ByteLevel has of its own.
const BYTE_LEVEL: &str =
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// The steps of a pre-tokenizer. Patterns that look ahead go back on a stack that has an end, for
/// instance in a million spaces. The library takes what is left of a text for one word then, which
/// makes other tokens of it, so the steps with patterns are done here, where it is an error.
pub(crate) struct Words {
    steps: Vec<Step>,
}

enum Step {
    Split(Split),
    /// Finds out whether a pattern of the next step comes to the end of a text.
    Check(Regex),
    Other(PreTokenizerWrapper),
}

struct Split {
    regex: Regex,
    behavior: SplitDelimiterBehavior,
    inverts: bool,
}

impl Words {
    /// The steps of `pre_tokenizer`, none without one.
    ///
    /// # Errors
    /// When a pattern is none; the message tells why.
    pub(crate) fn new(pre_tokenizer: Option<&PreTokenizerWrapper>) -> Result<Self, String> {
        let mut steps = Vec::new();
        let mut left: Vec<&PreTokenizerWrapper> = pre_tokenizer.into_iter().collect();
        while let Some(step) = left.pop() {
            match step {
                PreTokenizerWrapper::Sequence(sequence) => {
                    left.extend(sequence.as_ref().iter().rev());
                }
                PreTokenizerWrapper::Split(split) => {
                    let SplitPattern::Regex(pattern) = &split.pattern else {
                        steps.push(Step::Other(step.clone()));
                        continue;
                    };
                    let (behavior, inverts) = (split.behavior, split.invert);
                    steps.push(Step::Split(Split { regex: regex(pattern)?, behavior, inverts }));
                }
                PreTokenizerWrapper::ByteLevel(bytes) if bytes.use_regex => {
                    steps.push(Step::Check(regex(BYTE_LEVEL)?));
                    steps.push(Step::Other(step.clone()));
                }
                other => steps.push(Step::Other(other.clone())),
            }
        }
        Ok(Self { steps })
    }

    /// Cuts what is no token yet into words.
    ///
    /// # Errors
    /// When a pattern does not come to the end of a text.
    pub(crate) fn cut(&self, pieces: &mut PreTokenizedString) -> tokenizers::Result<()> {
        for step in &self.steps {
            match step {
                Step::Split(split) => {
                    pieces.split(|_, piece| piece.split(split, split.behavior))?;
                }
                Step::Check(regex) => pieces.split(|_, piece| {
                    for found in regex.find_iter(piece.get()) {
                        found.map_err(too_long)?;
                    }
                    Ok([piece])
                })?,
                Step::Other(step) => step.pre_tokenize(pieces)?,
            }
        }
        Ok(())
    }
}

/// Where the pattern matches, and what is between.
impl Pattern for &Split {
    fn find_matches(&self, inside: &str) -> tokenizers::Result<Vec<(Offsets, bool)>> {
        let mut found = Vec::new();
        let mut end = 0;
        for piece in self.regex.find_iter(inside) {
            let piece = piece.map_err(too_long)?;
            if end < piece.start() {
                found.push(((end, piece.start()), self.inverts));
            }
            found.push(((piece.start(), piece.end()), !self.inverts));
            end = piece.end();
        }
        if end < inside.len() || found.is_empty() {
            found.push(((end, inside.len()), self.inverts));
        }
        Ok(found)
    }
}

fn regex(pattern: &str) -> Result<Regex, String> {
    Regex::new(pattern).map_err(|error| format!("pre_tokenizer: {pattern:?}: {error}"))
}

fn too_long(error: fancy_regex::Error) -> tokenizers::Error {
    format!(
        "{error}: a run of spaces or the like is too long for the tokenizer's pattern; break it up"
    )
    .into()
}
