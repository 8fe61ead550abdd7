//! How the answers of a model family are written: what a thought is put between, and how calls of
//! tools look.
//!
//! A syntax is one file in this folder that fills a [`Description`], and a line in [`SYNTAXES`].
//! What is the same for all, in which order thoughts, text and calls may come and what becomes of
//! those that are not well-formed, is in `answer.rs`. No other source file names a family.

mod find;
mod json;
mod qwen3;
mod spark;
mod tools;

pub(crate) use json::{JsonScanner, Scan, json_call, json_calls, object_entries};
pub(crate) use tools::Tools;

use std::collections::HashMap;
use std::fmt;

/// All syntaxes.
static SYNTAXES: &[&Description] = &[&spark::SPARK, &qwen3::QWEN3];

/// The syntax of a family's answers.
#[derive(Clone, Copy)]
pub struct Syntax(&'static Description);

/// What one file of this folder says.
pub(crate) struct Description {
    /// The families that write so, by `model_type` of config.json and `general.architecture` of
    /// GGUF files.
    pub(crate) families: &'static [&'static str],
    /// What a thought is put between.
    pub(crate) thought: Tags,
    /// What a call is put between.
    pub(crate) call: Tags,
    /// Reads what is in a call.
    pub(crate) reader: fn() -> Box<dyn CallReader>,
}

/// What begins and what ends something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tags {
    /// Before it.
    pub open: &'static str,
    /// Behind it.
    pub close: &'static str,
}

impl Syntax {
    /// The syntax of a family by its `model_type` or `general.architecture`; `None` where no
    /// syntax is known.
    pub fn of(family: &str) -> Option<Self> {
        let known = SYNTAXES.iter().find(|syntax| syntax.families.contains(&family));
        known.map(|description| Self(description))
    }

    /// What a thought is put between.
    pub fn thought(self) -> Tags {
        self.0.thought
    }

    /// What a call is put between.
    pub fn call(self) -> Tags {
        self.0.call
    }

    /// Whether an answer to `prompt` goes on with a thought that the prompt has begun.
    pub fn prompt_opens_thought(self, prompt: &str) -> bool {
        prompt.trim_end().ends_with(self.0.thought.open)
    }

    pub(crate) fn reader(self) -> Box<dyn CallReader> {
        (self.0.reader)()
    }
}

/// The families that write so.
impl fmt::Debug for Syntax {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.families).finish()
    }
}

/// Reads the inside of calls as it comes, each byte once.
pub(crate) trait CallReader: Send {
    /// Begins a call whose opening tag ends at `start` of the answer's text.
    fn begin(&mut self, start: usize);

    /// Reads on. `text` is the answer up to now, which only grows, and `ended` says that it does
    /// no more.
    fn read(&mut self, text: &str, ended: bool) -> Progress;
}

/// How far a call is read.
pub(crate) enum Progress {
    /// What it is depends on text that is still to come.
    More,
    /// It is no call.
    Malformed,
    /// The answer ends within it.
    Truncated,
    /// The call, and where the text goes on behind its closing tag.
    Call { call: Box<RawCall>, end: usize },
}

/// A call as it is written, before the types of its tool are known.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct RawCall {
    pub(crate) name: String,
    arguments: Vec<(String, Spelling)>,
    /// Place in `arguments` by key.
    places: HashMap<String, usize>,
    pub(crate) flags: Vec<CallFlag>,
}

/// An argument as it is written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Spelling {
    /// A string stands for itself, anything else is JSON.
    Text(String),
    /// JSON.
    Json(String),
}

/// What a reader of a call should know of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CallFlag {
    /// It was not written as the syntax says, and was read all the same.
    Recovered,
    /// Its closing tag is missing.
    Unclosed,
    /// A key is there twice; the last one counts.
    DuplicateKey,
    /// No tool has the name.
    UnknownTool,
    /// It came within a thought, which it ends.
    InThought,
}

impl CallFlag {
    /// Name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Recovered => "recovered",
            Self::Unclosed => "unclosed",
            Self::DuplicateKey => "duplicate_key",
            Self::UnknownTool => "unknown_tool",
            Self::InThought => "in_thought",
        }
    }
}

impl RawCall {
    pub(crate) fn named(name: &str) -> Self {
        Self { name: name.into(), ..Self::default() }
    }

    /// Adds an argument, or replaces one with the same key.
    pub(crate) fn push(&mut self, key: String, value: Spelling) {
        if let Some(argument) = self.places.get(&key).and_then(|&at| self.arguments.get_mut(at)) {
            argument.1 = value;
            self.flag(CallFlag::DuplicateKey);
        } else {
            self.places.insert(key.clone(), self.arguments.len());
            self.arguments.push((key, value));
        }
    }

    pub(crate) fn flag(&mut self, flag: CallFlag) {
        if !self.flags.contains(&flag) {
            self.flags.push(flag);
        }
    }
}

/// Whether `name` can be that of a tool.
pub(crate) fn is_name(name: &str) -> bool {
    let wrong = |c: char| c.is_whitespace() || matches!(c, '<' | '>' | '{' | '}');
    !name.is_empty() && !name.contains(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;
    use firesteel_checkpoint::Family;

    #[test]
    fn every_family_has_a_syntax() {
        for family in Family::all() {
            for name in [family.model_type(), family.architecture()] {
                assert!(Syntax::of(name).is_some(), "{name}");
            }
        }
        assert!(Syntax::of("").is_none());
    }

    #[test]
    fn a_prompt_opens_a_thought_at_its_end_only() {
        for syntax in SYNTAXES.iter().map(|description| Syntax(description)) {
            let Tags { open, close } = syntax.thought();
            assert!(syntax.prompt_opens_thought(&format!("a{open}")));
            assert!(syntax.prompt_opens_thought(&format!("a{open}\n")));
            assert!(!syntax.prompt_opens_thought(&format!("a{open}\n\n{close}\n\n")));
            assert!(!syntax.prompt_opens_thought(&format!("a{open}b")));
        }
    }
}
