//! JSON in answers: found to its end as it comes, with its digits and the order of its keys.

use super::{CallFlag, RawCall, Spelling, is_name};
use serde::Deserializer as _;
use serde::de::{IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;
use std::fmt;

/// Deepest nesting, which is that of the reader of JSON that everything goes through later.
const MAX_DEPTH: usize = 120;

/// Reads one object or array as it comes.
///
/// It takes two things that JSON does not, and repairs them: a comma before a closing bracket, and
/// control characters in strings.
pub(crate) struct JsonScanner {
    /// The brackets that are open.
    stack: Vec<char>,
    state: State,
    /// What was read, repaired.
    text: String,
    repaired: bool,
    /// Where in `text` a comma is that has no value after it yet.
    comma: Option<usize>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Before the object or array.
    Start,
    Value,
    Key,
    Colon,
    /// Behind a value.
    Behind,
    String {
        key: bool,
    },
    Escape {
        key: bool,
    },
    Hex {
        key: bool,
        left: u8,
    },
    /// A number or a name such as `null`, from a place in the text.
    Word {
        from: usize,
    },
    Done,
}

/// What came of reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scan {
    /// The text ended before the value.
    More,
    /// The value ends here.
    Done(usize),
    /// What is here cannot be there. Reading can be tried again from here.
    Wrong(usize),
}

impl JsonScanner {
    pub(crate) fn new() -> Self {
        let (stack, text) = (Vec::new(), String::new());
        Self { stack, state: State::Start, text, repaired: false, comma: None }
    }

    /// Reads `text` from `from`, where the last reading ended.
    pub(crate) fn read(&mut self, text: &str, from: usize) -> Scan {
        for (at, character) in text.get(from..).unwrap_or_default().char_indices() {
            if !self.push(character) {
                return Scan::Wrong(from + at);
            }
            if self.state == State::Done {
                return Scan::Done(from + at + character.len_utf8());
            }
        }
        Scan::More
    }

    /// Closes what is open, where nothing but brackets is missing. Returns whether that is so.
    pub(crate) fn close(&mut self) -> bool {
        if !self.end_word() || self.state != State::Behind || self.stack.is_empty() {
            return false;
        }
        while let Some(open) = self.stack.pop() {
            self.text.push(closing(open));
        }
        self.state = State::Done;
        self.repaired = true;
        true
    }

    /// The JSON that was read, and whether it was repaired.
    pub(crate) fn finish(self) -> (String, bool) {
        (self.text, self.repaired)
    }

    /// Takes a character; false where it cannot be.
    fn push(&mut self, character: char) -> bool {
        match self.state {
            State::String { key } => return self.push_in_string(character, key),
            State::Escape { key } => {
                self.state = match character {
                    'u' => State::Hex { key, left: 4 },
                    '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't' => State::String { key },
                    _ => return false,
                };
            }
            State::Hex { key, left } => {
                if !character.is_ascii_hexdigit() {
                    return false;
                }
                self.state = match left {
                    1 => State::String { key },
                    _ => State::Hex { key, left: left - 1 },
                };
            }
            State::Word { .. } => {
                if !is_in_word(character) {
                    return self.end_word() && self.push(character);
                }
            }
            State::Done => return false,
            _ if matches!(character, ' ' | '\t' | '\n' | '\r') => {}
            State::Start => return self.open(character),
            State::Value => match character {
                ']' if self.stack.last() == Some(&'[') && self.may_close() => {
                    return self.shut(character);
                }
                '{' | '[' => return self.open(character),
                '"' => self.begin(State::String { key: false }),
                _ if is_in_word(character) => {
                    let from = self.text.len();
                    self.begin(State::Word { from });
                }
                _ => return false,
            },
            State::Key => match character {
                '}' if self.may_close() => return self.shut(character),
                '"' => self.begin(State::String { key: true }),
                _ => return false,
            },
            State::Colon => match character {
                ':' => self.state = State::Value,
                _ => return false,
            },
            State::Behind => match (character, self.stack.last()) {
                (',', Some(open)) => {
                    self.state = if *open == '{' { State::Key } else { State::Value };
                    self.comma = Some(self.text.len());
                }
                ('}', Some('{')) | (']', Some('[')) => return self.shut(character),
                _ => return false,
            },
        }
        self.text.push(character);
        true
    }

    fn push_in_string(&mut self, character: char, key: bool) -> bool {
        match character {
            '"' => self.state = if key { State::Colon } else { State::Behind },
            '\\' => self.state = State::Escape { key },
            '\0'..='\u{1f}' => {
                self.repaired = true;
                self.text.push_str(&format!("\\u{:04x}", u32::from(character)));
                return true;
            }
            _ => {}
        }
        self.text.push(character);
        true
    }

    /// Begins a value or key.
    fn begin(&mut self, state: State) {
        self.comma = None;
        self.state = state;
    }

    fn open(&mut self, bracket: char) -> bool {
        if !matches!(bracket, '{' | '[') || self.stack.len() >= MAX_DEPTH {
            return false;
        }
        self.begin(if bracket == '{' { State::Key } else { State::Value });
        self.stack.push(bracket);
        self.text.push(bracket);
        true
    }

    /// Whether a bracket may close here, behind one that opens or a comma: not behind a colon.
    fn may_close(&self) -> bool {
        self.comma.is_some() || self.text.trim_end().ends_with(['{', '['])
    }

    fn shut(&mut self, bracket: char) -> bool {
        if let Some(comma) = self.comma.take() {
            self.text.remove(comma);
            self.repaired = true;
        }
        self.stack.pop();
        self.text.push(bracket);
        self.state = if self.stack.is_empty() { State::Done } else { State::Behind };
        true
    }

    /// Ends a number or name, if there is one; false where it is none.
    fn end_word(&mut self) -> bool {
        let State::Word { from } = self.state else { return true };
        let is_word = self.text.get(from..).is_some_and(is_json);
        if is_word {
            self.state = State::Behind;
        }
        is_word
    }
}

fn is_in_word(character: char) -> bool {
    character.is_ascii_alphanumeric() || matches!(character, '+' | '-' | '.')
}

fn closing(bracket: char) -> char {
    if bracket == '{' { '}' } else { ']' }
}

/// Whether `text` is one value in JSON.
pub(crate) fn is_json(text: &str) -> bool {
    serde_json::from_str::<IgnoredAny>(text).is_ok()
}

/// Keys and values of an object in the order written, values as written; `None` when `text` is no
/// object.
pub(crate) fn object_entries(text: &str) -> Option<Vec<(String, &str)>> {
    struct Entries;
    impl<'de> Visitor<'de> for Entries {
        type Value = Vec<(String, &'de str)>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut entries = Vec::new();
            while let Some((key, value)) = map.next_entry::<String, &'de RawValue>()? {
                entries.push((key, value.get()));
            }
            Ok(entries)
        }
    }
    let mut reader = serde_json::Deserializer::from_str(text);
    let entries = reader.deserialize_map(Entries).ok()?;
    reader.end().ok().map(|()| entries)
}

/// The call that an object with `name` and `arguments` (or `parameters`) is; `None` when it is
/// none.
pub(crate) fn json_call(text: &str) -> Option<RawCall> {
    let mut call = RawCall::default();
    let mut arguments = None;
    let mut seen = Vec::new();
    for (key, value) in object_entries(text)? {
        match key.as_str() {
            "name" => call.name = serde_json::from_str(value).ok()?,
            "arguments" | "parameters" => arguments = Some(value),
            _ => call.flag(CallFlag::Recovered),
        }
        let place = if key == "parameters" { "arguments".into() } else { key };
        if seen.contains(&place) {
            call.flag(CallFlag::DuplicateKey);
        } else if call.flags.is_empty() {
            seen.push(place);
        }
    }
    if !is_name(&call.name) {
        return None;
    }
    let arguments = arguments.unwrap_or("null");
    let text: String;
    let object = match arguments.starts_with('"') {
        true => {
            text = serde_json::from_str(arguments).ok()?;
            text.trim()
        }
        false => arguments,
    };
    if !matches!(object, "" | "null") {
        for (key, value) in object_entries(object)? {
            call.push(key, Spelling::Json(value.into()));
        }
    }
    Some(call)
}

/// The calls that an object, or an array of some, is; `None` when one of them is none.
pub(crate) fn json_calls(text: &str) -> Option<Vec<RawCall>> {
    if text.starts_with('{') {
        return Some(vec![json_call(text)?]);
    }
    let items: Vec<&RawValue> = serde_json::from_str(text).ok()?;
    items.into_iter().map(|item| json_call(item.get())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The repaired text, whether it was repaired, and what is behind it; or what was wrong.
    fn scan(text: &str) -> Result<(String, bool, &str), &str> {
        let mut whole = JsonScanner::new();
        let result = whole.read(text, 0);
        let mut split = JsonScanner::new();
        let mut at = 0;
        let mut last = Scan::More;
        for end in (1..=text.len()).filter(|end| text.is_char_boundary(*end)) {
            last = split.read(&text[..end], at);
            match last {
                Scan::More => at = end,
                _ => break,
            }
        }
        assert_eq!(last, result, "{text}");
        match result {
            Scan::More => Err(""),
            Scan::Wrong(at) => Err(&text[at..]),
            Scan::Done(end) => {
                let (json, repaired) = whole.finish();
                assert!(is_json(&json), "{json}");
                Ok((json, repaired, &text[end..]))
            }
        }
    }

    #[test]
    fn values_are_read_to_their_end() {
        let exact = [
            r#"{}"#,
            r#"[]"#,
            r#"{"a": [1, -0, 1.50e+30, {"b": null}], "é\n\"\u00e9}": "]}"}"#,
            "{\n  \"a\" : true\n}",
            r#"[[], {}, "", "\\"]"#,
        ];
        for text in exact {
            assert_eq!(scan(text), Ok((text.into(), false, "")), "{text}");
            let more = format!("{text} x");
            assert_eq!(scan(&more), Ok((text.into(), false, " x")), "{text}");
        }
        let repaired = [
            (r#"{"a": 1, }"#, r#"{"a": 1 }"#),
            (r#"[1,{"b":2,},]"#, r#"[1,{"b":2}]"#),
            ("[\"a\nb\"]", r#"["a\u000ab"]"#),
        ];
        for (text, expected) in repaired {
            assert_eq!(scan(text), Ok((expected.into(), true, "")), "{text}");
        }
        let wrong = [
            ("1", "1"),
            ("{1", "1"),
            ("{,", ","),
            ("[,", ","),
            ("[1,,", ","),
            ("{\"a\":}", "}"),
            ("[1 2", "2"),
            ("[007]", "]"),
            ("[True]", "]"),
            ("{\"a\" \"b\"", "\"b\""),
            ("[1}", "}"),
            ("[\"\\x", "x"),
            ("[\"\\u00g", "g"),
            ("{\"a\": <", "<"),
            ("{\"a\": 1,", ""),
        ];
        for (text, expected) in wrong {
            assert_eq!(scan(text), Err(expected), "{text}");
        }
        assert_eq!(scan(&"[".repeat(MAX_DEPTH + 1)), Err("["));
    }

    #[test]
    fn brackets_are_closed() {
        let cases = [
            (r#"{"a": {"b": [1"#, Some(r#"{"a": {"b": [1]}}"#)),
            (r#"{"a": "b""#, Some(r#"{"a": "b"}"#)),
            (r#"{"a": "b"#, None),
            (r#"{"a":"#, None),
            (r#"{"a": tru"#, None),
        ];
        for (text, expected) in cases {
            let mut scanner = JsonScanner::new();
            assert_eq!(scanner.read(text, 0), Scan::More, "{text}");
            let closed = scanner.close().then(|| scanner.finish().0);
            assert_eq!(closed.as_deref(), expected, "{text}");
        }
    }
}
