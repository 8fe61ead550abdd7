//! `<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value>…</tool_call>`: strings stand for
//! themselves, all other values are JSON.

use super::find::Finder;
use super::{CallFlag, CallReader, Description, Progress, RawCall, Spelling, Tags, is_name};

const CALL: Tags = Tags { open: "<tool_call>", close: "</tool_call>" };
const KEY: Tags = Tags { open: "<arg_key>", close: "</arg_key>" };
const VALUE: Tags = Tags { open: "<arg_value>", close: "</arg_value>" };

/// Longest name or key, in bytes.
const MAX_NAME: usize = 1024;

pub(super) static SPARK: Description = Description {
    families: &["spark2_5"],
    thought: Tags { open: "<think>", close: "</think>" },
    call: CALL,
    reader: || Box::new(Reader::new()),
};

/// The form has no escapes, so that a value may have tags in it: `</arg_value>` ends a value only
/// where a key or the end of the call follows. What cannot be right any more is no call: the end
/// or beginning of one behind such an `</arg_value>`, or both in a value.
struct Reader {
    call: RawCall,
    key: String,
    place: Place,
    /// Where reading goes on.
    at: usize,
    value_close: Finder,
    call_close: Finder,
    call_open: Finder,
}

#[derive(Clone, Copy)]
enum Place {
    Name,
    BehindName,
    Key,
    BehindKey,
    Value {
        /// Where it begins.
        from: usize,
        /// Whether it has an `</arg_value>` already that does not end it.
        doubtful: bool,
    },
    BehindValue {
        from: usize,
        end: usize,
    },
}

/// What is next, whitespace aside.
enum Next {
    Tag {
        tag: &'static str,
        end: usize,
    },
    /// The text ends before it is known; the rest could become one of the tags.
    Open,
    Other,
}

impl Reader {
    fn new() -> Self {
        Self {
            call: RawCall::default(),
            key: String::new(),
            place: Place::Name,
            at: 0,
            value_close: Finder::new(VALUE.close),
            call_close: Finder::new(CALL.close),
            call_open: Finder::new(CALL.open),
        }
    }

    /// Which of `tags` comes next.
    fn next(&mut self, text: &str, tags: &[&'static str]) -> Next {
        let rest = text.get(self.at..).unwrap_or_default();
        let trimmed = rest.trim_start();
        self.at += rest.len() - trimmed.len();
        match tags.iter().find(|tag| trimmed.starts_with(**tag)) {
            Some(tag) => Next::Tag { tag, end: self.at + tag.len() },
            None if tags.iter().any(|tag| tag.starts_with(trimmed)) => Next::Open,
            None => Next::Other,
        }
    }

    /// The name or key up to the next `<`, or what is to be said without one.
    fn word<'a>(&self, text: &'a str, ended: bool) -> Result<&'a str, Progress> {
        let rest = text.get(self.at..).unwrap_or_default();
        let end = rest.find('<');
        if end.unwrap_or(rest.len()) > MAX_NAME {
            return Err(Progress::Malformed);
        }
        end.map(|end| &rest[..end]).ok_or_else(|| unfinished(ended))
    }

    /// Reads on as long as something is found; an error is what it comes to.
    fn advance(&mut self, text: &str, ended: bool) -> Result<(), Progress> {
        match self.place {
            Place::Name => {
                // Prose is let go before a tag comes.
                let rest = text.get(self.at..).unwrap_or_default();
                let begun = rest.split('<').next().unwrap_or_default().trim();
                if !begun.is_empty() && !is_name(begun) {
                    return Err(Progress::Malformed);
                }
                let word = self.word(text, ended)?;
                if word.trim().is_empty() {
                    return Err(Progress::Malformed);
                }
                self.call.name = word.trim().into();
                self.at += word.len();
                self.place = Place::BehindName;
            }
            Place::BehindName => match self.next(text, &[KEY.open, CALL.close]) {
                Next::Tag { tag, end } if tag == CALL.close => return Err(self.finish(end)),
                Next::Tag { end, .. } => self.go(Place::Key, end),
                Next::Open => return Err(unfinished(ended)),
                Next::Other => return Err(Progress::Malformed),
            },
            Place::Key => {
                let word = self.word(text, ended)?;
                let end = self.at + word.len();
                let rest = text.get(end..).unwrap_or_default();
                if word.trim().is_empty() {
                    return Err(Progress::Malformed);
                } else if rest.starts_with(KEY.close) {
                    self.key = word.trim().into();
                    self.go(Place::BehindKey, end + KEY.close.len());
                } else if KEY.close.starts_with(rest) {
                    return Err(unfinished(ended));
                } else {
                    return Err(Progress::Malformed);
                }
            }
            Place::BehindKey => match self.next(text, &[VALUE.open]) {
                Next::Tag { end, .. } => {
                    self.go(Place::Value { from: end, doubtful: false }, end);
                }
                Next::Open => return Err(unfinished(ended)),
                Next::Other => return Err(Progress::Malformed),
            },
            Place::Value { from, doubtful } => {
                let end = self.value_close.find(text, self.at);
                let blocked = match doubtful {
                    true => self.is_blocked(text, end)?,
                    false => self.has_next_call(text, end, ended)?,
                };
                if blocked {
                    return Err(Progress::Malformed);
                }
                let end = end.ok_or_else(|| unfinished(ended))?;
                self.go(Place::BehindValue { from, end }, end + VALUE.close.len());
            }
            Place::BehindValue { from, end } => self.behind_value(text, from, end, ended)?,
        }
        Ok(())
    }

    fn behind_value(
        &mut self,
        text: &str,
        from: usize,
        end: usize,
        ended: bool,
    ) -> Result<(), Progress> {
        let next = self.next(text, &[KEY.open, CALL.close, CALL.open]);
        let rest = text.get(self.at..).unwrap_or_default();
        let only_end_is_missing = ended && CALL.close.starts_with(rest);
        let value = text.get(from..end).unwrap_or_default();
        match next {
            Next::Open if !only_end_is_missing => return Err(unfinished(ended)),
            Next::Other => {
                let at = end + VALUE.close.len();
                self.go(Place::Value { from, doubtful: true }, at);
                return Ok(());
            }
            _ => self.call.push(std::mem::take(&mut self.key), Spelling::Text(value.into())),
        }
        match next {
            Next::Tag { tag, end } if tag == KEY.open => {
                self.go(Place::Key, end);
                Ok(())
            }
            Next::Tag { tag, end } if tag == CALL.close => Err(self.finish(end)),
            // Another call begins, or the answer ends.
            _ => {
                self.call.flag(CallFlag::Unclosed);
                let behind = if only_end_is_missing { text.len() } else { self.at };
                Err(self.finish(behind))
            }
        }
    }

    /// Whether a call ends or begins before `end`.
    fn is_blocked(&mut self, text: &str, end: Option<usize>) -> Result<bool, Progress> {
        let end = end.unwrap_or(usize::MAX);
        let found = [self.call_close.find(text, self.at), self.call_open.find(text, self.at)];
        Ok(found.into_iter().flatten().any(|at| at < end))
    }

    /// Whether a call ends and another begins before `end`.
    fn has_next_call(
        &mut self,
        text: &str,
        end: Option<usize>,
        ended: bool,
    ) -> Result<bool, Progress> {
        let end = end.unwrap_or(usize::MAX);
        while let Some(at) = self.call_close.find(text, self.at).filter(|at| *at < end) {
            let behind = at + CALL.close.len();
            let before = std::mem::replace(&mut self.at, behind);
            match self.next(text, &[CALL.open]) {
                Next::Tag { .. } => return Ok(true),
                Next::Open if !ended => {
                    self.at = before;
                    return Err(Progress::More);
                }
                Next::Open | Next::Other => self.at = behind,
            }
        }
        Ok(false)
    }

    fn go(&mut self, place: Place, at: usize) {
        self.place = place;
        self.at = at;
    }

    fn finish(&mut self, end: usize) -> Progress {
        Progress::Call { call: Box::new(std::mem::take(&mut self.call)), end }
    }
}

fn unfinished(ended: bool) -> Progress {
    if ended { Progress::Truncated } else { Progress::More }
}

impl CallReader for Reader {
    fn begin(&mut self, start: usize) {
        self.call = RawCall::default();
        self.go(Place::Name, start);
    }

    fn read(&mut self, text: &str, ended: bool) -> Progress {
        loop {
            if let Err(progress) = self.advance(text, ended) {
                return progress;
            }
        }
    }
}
