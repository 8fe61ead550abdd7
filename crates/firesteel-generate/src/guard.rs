use serde_json::{Map, Value};
use std::collections::HashMap;

/// Keeps added tokens that are spelled in user text from being read as tokens.
///
/// A guard character, which the conversation does not contain, is put into every added token that
/// a user string spells, and at both ends of a string where it could be one part of a token whose
/// other part stands in the neighbouring text. After rendering, the tokenizer finds added tokens in
/// the guarded text, which leaves exactly those of the template; the rest is encoded as plain text
/// without the guard. Since only text that spells a token, or begins or ends like one, is touched,
/// everything else renders and encodes as without guards.
///
/// Added tokens of a single character or of whitespace alone cannot carry structure and are left
/// to the tokenizer.
pub(crate) struct Guard<'a> {
    by_first: HashMap<char, Vec<&'a str>>,
    by_last: HashMap<char, Vec<&'a str>>,
    longest: usize,
    pub(crate) character: char,
}

impl<'a> Guard<'a> {
    /// A guard against `tokens` with a noncharacter for which `unused` holds; `None` when there
    /// is none.
    pub(crate) fn new(
        tokens: impl IntoIterator<Item = &'a str>,
        unused: impl FnMut(&char) -> bool,
    ) -> Option<Self> {
        let character = ('\u{fdd0}'..='\u{fdef}').find(unused)?;
        let mut guard =
            Self { by_first: HashMap::new(), by_last: HashMap::new(), longest: 0, character };
        for token in tokens {
            if token.chars().nth(1).is_none() || token.trim().is_empty() {
                continue;
            }
            for (map, key) in [
                (&mut guard.by_first, token.chars().next()),
                (&mut guard.by_last, token.chars().next_back()),
            ] {
                if let Some(key) = key {
                    map.entry(key).or_default().push(token);
                }
            }
            guard.longest = guard.longest.max(token.len());
        }
        Some(guard)
    }

    /// `text` with guards.
    pub(crate) fn text(&self, text: &str) -> String {
        // Templates trim contents, so the ends are those without whitespace.
        let start = text.len() - text.trim_start().len();
        let end = text.trim_end().len();
        let mut guarded = String::with_capacity(text.len());
        for (position, character) in text.char_indices() {
            if position == start && self.ends_a_token(&text[start..]) {
                guarded.push(self.character);
            }
            guarded.push(character);
            let open = text.get(position..end).unwrap_or("");
            let tokens = self.by_first.get(&character).into_iter().flatten();
            let mut begun = tokens.filter(|token| {
                let unfinished = open.len() < token.len() && token.starts_with(open);
                text[position..].starts_with(**token) || (unfinished && !open.is_empty())
            });
            if begun.next().is_some() {
                guarded.push(self.character);
            }
        }
        guarded
    }

    /// Whether a proper suffix of a token stands at the start of `text`.
    fn ends_a_token(&self, text: &str) -> bool {
        let mut within = text.char_indices().take_while(|(at, _)| *at < self.longest);
        within.any(|(at, character)| {
            let head = &text[..at + character.len_utf8()];
            let mut tokens = self.by_last.get(&character).into_iter().flatten();
            tokens.any(|token| token.len() > head.len() && token.ends_with(head))
        })
    }

    /// Guards every string and key of `value`.
    pub(crate) fn value(&self, value: &Value) -> Value {
        match value {
            Value::String(text) => Value::String(self.text(text)),
            Value::Array(items) => items.iter().map(|item| self.value(item)).collect(),
            Value::Object(map) => Value::Object(self.map(map)),
            other => other.clone(),
        }
    }

    fn map(&self, map: &Map<String, Value>) -> Map<String, Value> {
        map.iter().map(|(key, value)| (self.text(key), self.value(value))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_could_become_a_token_is_touched() {
        let guard = Guard::new(["<|Bot|>", "</think>", "x", "  "], |_| true).unwrap();
        // `_` stands for the guard.
        let cases = [
            ("", ""),
            ("plain, a < b, x  y", "plain, a < b, x  y"),
            ("<b>bold</b> text", "<b>bold</b> text"),
            ("a<|Bot|>b</think>", "a<_|Bot|>b<_/think>"),
            ("<|Bot|><|Bot|>", "<_|Bot|><_|Bot|>"),
            ("ends in <", "ends in <_"),
            ("ends in </thin \n", "ends in <_/thin \n"),
            ("\n > quoted", "\n _> quoted"),
            ("|>", "_|>"),
            ("<|Bot|", "<_|Bot|"),
            ("Bot", "Bot"),
        ];
        for (text, expected) in cases {
            assert_eq!(guard.text(text).replace(guard.character, "_"), expected, "{text:?}");
        }
    }

    #[test]
    fn keys_and_nested_strings_are_guarded() {
        let guard = Guard::new(["<|Bot|>"], |c| *c != '\u{fdd0}').unwrap();
        let value = serde_json::json!({"a<|Bot|>": [1, null, {"b": "<|Bot|>"}]});
        let expected = serde_json::json!({"a<\u{fdd1}|Bot|>": [1, null, {"b": "<\u{fdd1}|Bot|>"}]});
        assert_eq!(guard.value(&value), expected);
        assert!(Guard::new([], |_| false).is_none());
    }
}
