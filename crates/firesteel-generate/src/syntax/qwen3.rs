//! `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

use super::{CallFlag, CallReader, Description, JsonScanner, Progress, Scan, Tags, json_call};

const CALL: Tags = Tags { open: "<tool_call>", close: "</tool_call>" };

pub(super) static QWEN3: Description = Description {
    families: &["qwen3"],
    thought: Tags { open: "<think>", close: "</think>" },
    call: CALL,
    reader: || Box::new(Reader { scanner: JsonScanner::new(), at: 0, object_end: None }),
};

struct Reader {
    scanner: JsonScanner,
    /// Where reading goes on.
    at: usize,
    /// Where the object ends, once it does.
    object_end: Option<usize>,
}

impl Reader {
    /// The call, which ends at `end`.
    fn finish(&mut self, end: usize, flag: Option<CallFlag>) -> Progress {
        let (json, repaired) = std::mem::replace(&mut self.scanner, JsonScanner::new()).finish();
        let Some(mut call) = json_call(&json) else { return Progress::Malformed };
        let repaired = repaired.then_some(CallFlag::Recovered);
        repaired.into_iter().chain(flag).for_each(|flag| call.flag(flag));
        Progress::Call { call: Box::new(call), end }
    }
}

impl CallReader for Reader {
    fn begin(&mut self, start: usize) {
        *self = Self { scanner: JsonScanner::new(), at: start, object_end: None };
    }

    fn read(&mut self, text: &str, ended: bool) -> Progress {
        let unfinished = if ended { Progress::Truncated } else { Progress::More };
        let object_end = match self.object_end {
            Some(end) => end,
            None => match self.scanner.read(text, self.at) {
                Scan::More => {
                    self.at = text.len();
                    return unfinished;
                }
                Scan::Done(end) => {
                    self.at = end;
                    *self.object_end.insert(end)
                }
                Scan::Wrong(at) => {
                    self.at = at;
                    let rest = text.get(at..).unwrap_or_default();
                    let closes = rest.starts_with(CALL.close);
                    return if !closes && CALL.close.starts_with(rest) {
                        unfinished
                    } else if closes && self.scanner.close() {
                        self.finish(at + CALL.close.len(), None)
                    } else {
                        Progress::Malformed
                    };
                }
            },
        };
        let rest = text.get(self.at..).unwrap_or_default();
        let trimmed = rest.trim_start();
        self.at += rest.len() - trimmed.len();
        if trimmed.starts_with(CALL.close) {
            self.finish(self.at + CALL.close.len(), None)
        } else if !CALL.close.starts_with(trimmed) {
            self.finish(object_end, Some(CallFlag::Unclosed))
        } else if ended {
            self.finish(text.len(), Some(CallFlag::Unclosed))
        } else {
            Progress::More
        }
    }
}
