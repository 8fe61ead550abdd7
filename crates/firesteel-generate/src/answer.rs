//! From the text of an answer to its thought, its content and its calls, as the text comes.

use crate::syntax::{
    CallFlag, CallReader, JsonScanner, Progress, RawCall, Scan, Spelling, Syntax, Tools,
    json_calls, object_entries,
};
use crate::{Content, FunctionCall, Message, MessageRole, MessageToolCall};
use serde_json::Value;
use std::fmt;

/// A call that the model wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolCall {
    /// Name of the tool.
    pub name: String,
    /// A JSON object: keys in the order written, numbers with the digits written, values of the
    /// types that the tool wants where they can be.
    pub arguments: String,
    /// What a reader should know of it.
    pub flags: Vec<CallFlag>,
}

/// What a reader of an answer should know of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AnswerFlag {
    /// What began as a call is none, and is text.
    Malformed,
    /// The answer ends within a call; what there is of it is text.
    Truncated,
    /// There is a tag where none can be. One of a thought is left out, one of a call is text.
    StrayTag,
}

impl AnswerFlag {
    /// Name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Malformed => "malformed_call",
            Self::Truncated => "truncated_call",
            Self::StrayTag => "stray_tag",
        }
    }
}

/// A part of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AnswerEvent {
    /// More of the thought.
    Reasoning(String),
    /// More of the content.
    Content(String),
    /// A call is complete.
    Call(ToolCall),
    /// Something to know; each comes once.
    Flag(AnswerFlag),
}

/// How an answer is to be read.
#[derive(Debug, Clone, Copy)]
pub struct AnswerOptions<'a> {
    /// The syntax of the model's family.
    pub syntax: Syntax,
    /// The tools of the conversation, each `{"type": "function", "function": {…}}`.
    pub tools: &'a [Value],
    /// Whether the prompt has begun a thought; see [`Syntax::prompt_opens_thought`].
    pub in_thought: bool,
}

/// Reads an answer as its text comes.
///
/// The joined pieces do not depend on how the text is split. Text is held back only as long as it
/// can be a tag, a call, or whitespace around one. A call comes as one event, for it is text when it
/// turns out to be none.
///
/// Tags in a fenced code block, and those behind a backtick, are text. Whitespace between the
/// thought, calls and the end of the answer alone is layout and left out when there are calls. With
/// tools, an answer that begins with a call in bare JSON, `{"name": …}`, a list of such or
/// `[name] {…}`, is that call if a tool has the name.
pub struct AnswerStream {
    tools: Tools,
    syntax: Syntax,
    text: String,
    /// What is before has been given out.
    given: usize,
    /// Where reading goes on; between there is whitespace that may be layout.
    at: usize,
    in_thought: bool,
    /// Whether there is only whitespace since the thought, a call or the beginning.
    is_gap: bool,
    pending: Pending,
    reader: Box<dyn CallReader>,
    code: Code,
    calls: usize,
    raised: Vec<AnswerFlag>,
    events: Vec<AnswerEvent>,
}

enum Pending {
    Nothing,
    /// A call whose opening tag begins at `at`.
    Call,
    /// Bare JSON that begins at `at`.
    Bare(Bare),
}

impl fmt::Debug for AnswerStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AnswerStream").field("bytes", &self.text.len()).finish_non_exhaustive()
    }
}

impl AnswerStream {
    /// A stream without text.
    pub fn new(options: &AnswerOptions<'_>) -> Self {
        let AnswerOptions { syntax, tools, in_thought } = *options;
        Self {
            tools: Tools::new(tools),
            syntax,
            text: String::new(),
            given: 0,
            at: 0,
            in_thought,
            is_gap: !in_thought,
            pending: Pending::Nothing,
            reader: syntax.reader(),
            code: Code::default(),
            calls: 0,
            raised: Vec::new(),
            events: Vec::new(),
        }
    }

    /// Takes more text and returns what is known now.
    pub fn push(&mut self, text: &str) -> Vec<AnswerEvent> {
        self.text.push_str(text);
        self.run(false);
        std::mem::take(&mut self.events)
    }

    /// Ends the text and returns what was held back.
    pub fn finish(mut self) -> Vec<AnswerEvent> {
        self.run(true);
        self.events
    }

    fn run(&mut self, ended: bool) {
        while self.advance(ended) {}
    }

    /// Goes on to the next thing; false where it needs more text.
    fn advance(&mut self, ended: bool) -> bool {
        match &mut self.pending {
            Pending::Call => match self.reader.read(&self.text, ended) {
                Progress::More => return false,
                Progress::Call { call, end } => self.end_call(*call, end),
                Progress::Malformed => self.give_up(AnswerFlag::Malformed),
                Progress::Truncated => self.give_up(AnswerFlag::Truncated),
            },
            Pending::Bare(bare) => match bare.read(&self.text, &self.tools, ended) {
                BareProgress::More => return false,
                BareProgress::Calls { calls, end } => {
                    self.given = self.at;
                    for mut call in calls {
                        call.flag(CallFlag::Recovered);
                        self.end_call(call, end);
                    }
                }
                BareProgress::Nothing => {
                    self.pending = Pending::Nothing;
                    self.give(self.at);
                }
            },
            Pending::Nothing => return self.advance_in_text(ended),
        }
        true
    }

    fn advance_in_text(&mut self, ended: bool) -> bool {
        if self.is_gap {
            let rest = self.text.get(self.at..).unwrap_or_default();
            self.at += rest.len() - rest.trim_start().len();
            let rest = rest.trim_start();
            if rest.is_empty() {
                if ended && self.calls == 0 {
                    self.give(self.at);
                }
                return false;
            }
            if rest.starts_with(['{', '[']) && !self.tools.is_empty() {
                self.pending = Pending::Bare(Bare::new(self.at));
                return true;
            }
        }
        let rest = self.text.get(self.at..).unwrap_or_default();
        if !rest.starts_with('<') {
            let tag = rest.find('<');
            self.give(tag.map_or(self.text.len(), |tag| self.at + tag));
            return tag.is_some();
        }
        self.advance_at_tag(ended)
    }

    /// Goes on where a `<` is.
    fn advance_at_tag(&mut self, ended: bool) -> bool {
        let rest = self.text.get(self.at..).unwrap_or_default();
        let (thought, call) = (self.syntax.thought(), self.syntax.call());
        let is_code = self.code.quotes();
        let tags = [
            (thought.close, self.in_thought || !is_code),
            (thought.open, !is_code),
            (call.open, !is_code),
            (call.close, !is_code && !self.in_thought),
        ];
        let mut tags = tags.into_iter().filter(|(_, is_tag)| *is_tag).map(|(tag, _)| tag);
        let Some(tag) = tags.clone().find(|tag| rest.starts_with(tag)) else {
            if !ended && tags.any(|tag| tag.starts_with(rest)) {
                return false;
            }
            self.give(self.at + 1);
            return true;
        };
        let end = self.at + tag.len();
        if tag == call.open {
            self.pending = Pending::Call;
            self.reader.begin(end);
        } else if tag == call.close {
            self.raise(AnswerFlag::StrayTag);
            self.give(end);
        } else {
            if (tag == thought.open) == self.in_thought {
                self.raise(AnswerFlag::StrayTag);
            }
            self.give(self.at);
            self.given = end;
            self.at = end;
            // A closing tag that is alone ends no thought that would be apart from the text.
            let closes = tag == thought.close && self.in_thought;
            self.in_thought = tag == thought.open;
            self.is_gap = closes;
            self.code = Code::default();
        }
        true
    }

    /// Takes the call from `at` to `end`.
    fn end_call(&mut self, mut call: RawCall, end: usize) {
        self.pending = Pending::Nothing;
        if self.in_thought {
            call.flag(CallFlag::InThought);
            self.in_thought = false;
        }
        self.given = end;
        self.at = end;
        self.is_gap = true;
        self.code = Code::default();
        self.calls += 1;
        let call = self.tools.typed(call);
        self.events.push(AnswerEvent::Call(call));
    }

    /// Takes the opening tag at `at` for text; what is behind it is read once more.
    fn give_up(&mut self, flag: AnswerFlag) {
        self.pending = Pending::Nothing;
        self.raise(flag);
        self.give(self.at + self.syntax.call().open.len());
    }

    /// Gives out the text up to `end`, with the whitespace before it.
    fn give(&mut self, end: usize) {
        let Some(piece) = self.text.get(self.given..end) else { return };
        if !piece.is_empty() {
            self.code.read(piece);
            match (self.events.last_mut(), self.in_thought) {
                (Some(AnswerEvent::Reasoning(text)), true)
                | (Some(AnswerEvent::Content(text)), false) => text.push_str(piece),
                (_, true) => self.events.push(AnswerEvent::Reasoning(piece.into())),
                (_, false) => self.events.push(AnswerEvent::Content(piece.into())),
            }
        }
        self.given = end;
        self.at = end;
        self.is_gap = false;
    }

    fn raise(&mut self, flag: AnswerFlag) {
        if !self.raised.contains(&flag) {
            self.raised.push(flag);
            self.events.push(AnswerEvent::Flag(flag));
        }
    }
}

/// Whether a place in a text of Markdown is in code, as far as that can be told from what is before
/// it: in a fenced block, or right behind a backtick.
#[derive(Default)]
struct Code {
    in_fence: bool,
    /// Whether the line has more than indentation and backticks.
    in_line: bool,
    indent: usize,
    backticks: usize,
    behind_backtick: bool,
}

/// Backticks that a fence begins with.
const FENCE: usize = 3;

impl Code {
    fn quotes(&self) -> bool {
        self.in_fence || self.behind_backtick
    }

    fn read(&mut self, text: &str) {
        for character in text.chars() {
            self.behind_backtick = character == '`';
            match character {
                '\n' => *self = Self { in_fence: self.in_fence, ..Self::default() },
                ' ' if !self.in_line && self.backticks == 0 && self.indent < FENCE => {
                    self.indent += 1;
                }
                '`' if !self.in_line => {
                    self.backticks += 1;
                    if self.backticks == FENCE {
                        self.in_fence = !self.in_fence;
                        self.in_line = true;
                    }
                }
                _ => self.in_line = true,
            }
        }
    }
}

/// Bytes, whitespace for the most part, after which JSON that may be a call is taken for none.
const MAX_BARE_BEGINNING: usize = 4096;

/// Calls in JSON without tags around them.
struct Bare {
    start: usize,
    at: usize,
    scanner: JsonScanner,
    form: BareForm,
}

enum BareForm {
    Unknown,
    /// An object or array of calls.
    Calls,
    /// The arguments of the tool.
    Named(String),
}

enum BareProgress {
    More,
    Nothing,
    Calls { calls: Vec<RawCall>, end: usize },
}

impl Bare {
    fn new(start: usize) -> Self {
        Self { start, at: start, scanner: JsonScanner::new(), form: BareForm::Unknown }
    }

    fn read(&mut self, text: &str, tools: &Tools, ended: bool) -> BareProgress {
        if matches!(self.form, BareForm::Unknown) {
            let rest = text.get(self.start..).unwrap_or_default();
            match self.form_of(rest, tools) {
                Some(form) => self.form = form,
                None if ended => return BareProgress::Nothing,
                None => return BareProgress::More,
            }
        }
        let end = match self.scanner.read(text, self.at) {
            Scan::More if ended => return BareProgress::Nothing,
            Scan::More => {
                self.at = text.len();
                return BareProgress::More;
            }
            Scan::Wrong(_) => return BareProgress::Nothing,
            Scan::Done(end) => end,
        };
        let scanner = std::mem::replace(&mut self.scanner, JsonScanner::new());
        let calls = match (&self.form, scanner.finish()) {
            (_, (_, true)) => None,
            (BareForm::Named(name), (json, _)) => named_call(name, &json).map(|call| vec![call]),
            (_, (json, _)) => json_calls(&json),
        };
        let is_known = |calls: &Vec<RawCall>| {
            !calls.is_empty() && calls.iter().all(|call| tools.is_known(&call.name))
        };
        match calls.filter(is_known) {
            Some(calls) => BareProgress::Calls { calls, end },
            None => BareProgress::Nothing,
        }
    }

    /// What the text can be from its beginning; `None` where that is open. What can be none is
    /// taken for calls, as which it fails at once.
    fn form_of(&mut self, rest: &str, tools: &Tools) -> Option<BareForm> {
        let named = rest.strip_prefix('[').and_then(|rest| {
            let known = tools
                .names()
                .find(|name| rest.strip_prefix(name).is_some_and(|behind| behind.starts_with(']')));
            known.map(str::to_owned)
        });
        if let Some(name) = named {
            self.at = self.start + name.len() + 2;
            return Some(BareForm::Named(name));
        }
        let keys = ["name", "arguments", "parameters"];
        let objects = keys.iter().flat_map(|key| [format!("{{\"{key}\""), format!("[{{\"{key}\"")]);
        let begins = |pattern: &String| begins_with(rest, pattern);
        let mut is_open = tools.names().any(|name| {
            let pattern = format!("[{name}]");
            pattern.starts_with(rest)
        });
        for begins in objects.map(|pattern| begins(&pattern)) {
            match begins {
                Some(true) => return Some(BareForm::Calls),
                Some(false) => {}
                None => is_open = true,
            }
        }
        // No tool has an empty name.
        (!is_open || rest.len() > MAX_BARE_BEGINNING).then(|| BareForm::Named(String::new()))
    }
}

/// Whether `text` begins with `pattern`, whitespace in the text aside; `None` while it may.
fn begins_with(text: &str, pattern: &str) -> Option<bool> {
    let mut wanted = pattern.chars();
    let mut next = wanted.next();
    for character in text.chars().filter(|c| !c.is_whitespace()) {
        match next {
            None => return Some(true),
            Some(expected) if expected != character => return Some(false),
            Some(_) => next = wanted.next(),
        }
    }
    next.is_none().then_some(true)
}

fn named_call(name: &str, arguments: &str) -> Option<RawCall> {
    let mut call = RawCall::named(name);
    for (key, value) in object_entries(arguments)? {
        call.push(key, Spelling::Json(value.into()));
    }
    Some(call)
}

/// A whole answer in parts.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Answer {
    /// What the model thought.
    pub reasoning: String,
    /// What it said, without its calls.
    pub content: String,
    /// Its calls, in order.
    pub calls: Vec<ToolCall>,
    /// What a reader should know of it.
    pub flags: Vec<AnswerFlag>,
}

impl Answer {
    /// Reads the text of an answer.
    pub fn read(text: &str, options: &AnswerOptions<'_>) -> Self {
        let mut stream = AnswerStream::new(options);
        let events = stream.push(text);
        events.into_iter().chain(stream.finish()).collect()
    }
}

impl FromIterator<AnswerEvent> for Answer {
    fn from_iter<I: IntoIterator<Item = AnswerEvent>>(events: I) -> Self {
        let mut answer = Self::default();
        for event in events {
            match event {
                AnswerEvent::Reasoning(text) => answer.reasoning.push_str(&text),
                AnswerEvent::Content(text) => answer.content.push_str(&text),
                AnswerEvent::Call(call) => answer.calls.push(call),
                AnswerEvent::Flag(flag) => answer.flags.push(flag),
            }
        }
        answer
    }
}

/// The message of the assistant; its calls are numbered from `call_0`.
impl From<Answer> for Message {
    fn from(answer: Answer) -> Self {
        let calls = answer.calls.into_iter().enumerate().map(|(index, call)| MessageToolCall {
            id: Some(format!("call_{index}")),
            kind: Some("function".into()),
            function: FunctionCall { name: call.name, arguments: Value::String(call.arguments) },
        });
        let calls: Vec<MessageToolCall> = calls.collect();
        let has_content = calls.is_empty() || !answer.content.is_empty();
        Self {
            role: MessageRole::Assistant,
            content: has_content.then_some(Content::Text(answer.content)),
            reasoning_content: Some(answer.reasoning).filter(|text| !text.is_empty()),
            tool_calls: Some(calls).filter(|calls| !calls.is_empty()),
            tool_call_id: None,
            name: None,
        }
    }
}
