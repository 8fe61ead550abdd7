/// A call that the model wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolCall {
    /// Name of the tool.
    pub name: String,
    /// Keys and values in the order written, values as raw text: a string stands for itself,
    /// anything else is JSON; only the tool's schema can tell.
    pub arguments: Vec<(String, String)>,
}

/// Why a call is not well-formed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ToolCallError {
    /// The text ends, or another tag comes, before a tag that must come.
    #[error("tool call {index}: {expected} is missing after {after:?}")]
    Missing {
        /// Number of the call, from 0.
        index: usize,
        /// The tag.
        expected: &'static str,
        /// The last characters before the place.
        after: String,
    },
    /// The call names no tool, or a key is empty.
    #[error("tool call {index}: the {what} is {text:?}, which is no name")]
    Name {
        /// Number of the call, from 0.
        index: usize,
        /// Tool or key.
        what: &'static str,
        /// The text found.
        text: String,
    },
}

/// Reads the calls of a model's answer, in the form
/// `<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value>…</tool_call>`, with or without
/// whitespace between the tags. Text outside of calls is skipped; values are kept as written up to
/// the first `</arg_value>`, which the form cannot escape.
///
/// # Errors
/// When a call is not well-formed, unterminated ones included.
pub fn parse_tool_calls(text: &str) -> Result<Vec<ToolCall>, ToolCallError> {
    let mut calls = Vec::new();
    let mut cursor = Cursor { text, position: 0, index: 0 };
    while let Some(start) = cursor.rest().find(CALL) {
        cursor.position += start + CALL.len();
        let name_end = cursor.rest().find('<').unwrap_or(cursor.rest().len());
        let name = cursor.take(name_end).trim();
        cursor.check_name("tool", name)?;
        let mut call = ToolCall { name: name.into(), arguments: Vec::new() };
        while cursor.skip(KEY) {
            let key = cursor.until(KEY_END)?;
            cursor.check_name("key", key.trim())?;
            if !cursor.skip(VALUE) {
                return Err(cursor.missing(VALUE));
            }
            let value = cursor.until(VALUE_END)?;
            call.arguments.push((key.trim().into(), value.into()));
        }
        if !cursor.skip(CALL_END) {
            return Err(cursor.missing(CALL_END));
        }
        calls.push(call);
        cursor.index += 1;
    }
    Ok(calls)
}

const CALL: &str = "<tool_call>";
const CALL_END: &str = "</tool_call>";
const KEY: &str = "<arg_key>";
const KEY_END: &str = "</arg_key>";
const VALUE: &str = "<arg_value>";
const VALUE_END: &str = "</arg_value>";

struct Cursor<'a> {
    text: &'a str,
    position: usize,
    index: usize,
}

impl<'a> Cursor<'a> {
    fn rest(&self) -> &'a str {
        &self.text[self.position..]
    }

    fn take(&mut self, length: usize) -> &'a str {
        let taken = &self.rest()[..length];
        self.position += length;
        taken
    }

    /// Whether `tag` comes next, whitespace aside; moves behind it if so.
    fn skip(&mut self, tag: &str) -> bool {
        let trimmed = self.rest().trim_start();
        let found = trimmed.starts_with(tag);
        if found {
            self.position = self.text.len() - trimmed.len() + tag.len();
        }
        found
    }

    fn until(&mut self, tag: &'static str) -> Result<&'a str, ToolCallError> {
        let length = self.rest().find(tag).ok_or_else(|| self.missing(tag))?;
        let taken = self.take(length);
        self.position += tag.len();
        Ok(taken)
    }

    fn check_name(&self, what: &'static str, name: &str) -> Result<(), ToolCallError> {
        if name.is_empty() || name.contains(['<', '>', '{', '}']) {
            return Err(ToolCallError::Name { index: self.index, what, text: name.into() });
        }
        Ok(())
    }

    fn missing(&self, expected: &'static str) -> ToolCallError {
        let before = &self.text[..self.position];
        let start = before.char_indices().rev().nth(19).map_or(0, |(at, _)| at);
        ToolCallError::Missing { index: self.index, expected, after: before[start..].into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(name: &str, arguments: &[(&str, &str)]) -> ToolCall {
        let arguments = arguments.iter().map(|&(k, v)| (k.into(), v.into())).collect();
        ToolCall { name: name.into(), arguments }
    }

    #[test]
    fn well_formed_calls() {
        let expected = vec![
            call(
                "set_alarm",
                &[("label", "null"), ("code", "007"), ("repeat", "3"), ("big", "9007199254740993")],
            ),
            call("ping", &[]),
        ];
        let text = "<think>need two</think><tool_call>set_alarm<arg_key>label</arg_key>\
            <arg_value>null</arg_value><arg_key>code</arg_key><arg_value>007</arg_value>\
            <arg_key>repeat</arg_key><arg_value>3</arg_value><arg_key>big</arg_key>\
            <arg_value>9007199254740993</arg_value></tool_call><tool_call>ping</tool_call>";
        assert_eq!(parse_tool_calls(text).unwrap(), expected);
        let spread = text.replace("><", ">\n<").replace("set_alarm<", "\nset_alarm\n<");
        assert_eq!(parse_tool_calls(&spread).unwrap(), expected);
        assert_eq!(parse_tool_calls("no call").unwrap(), vec![]);
        let value = "<tool_call>f<arg_key>a</arg_key><arg_value> <b>\n</arg_value></tool_call>";
        assert_eq!(parse_tool_calls(value).unwrap(), vec![call("f", &[("a", " <b>\n")])]);
    }

    #[test]
    fn malformed_calls() {
        let cases = [
            ("<tool_call>f", "tool call 0: </tool_call> is missing after \"<tool_call>f\""),
            ("<tool_call>", "tool call 0: the tool is \"\", which is no name"),
            (
                "<tool_call>{\"a\"}</tool_call>",
                "tool call 0: the tool is \"{\\\"a\\\"}\", which is no name",
            ),
            (
                "<tool_call>f</tool_call><tool_call>g<arg_key>k</arg_key><arg_value>00",
                "tool call 1: </arg_value> is missing after \"/arg_key><arg_value>\"",
            ),
            (
                "<tool_call>f<arg_key>k</arg_key>v</tool_call>",
                "tool call 0: <arg_value> is missing after \"<arg_key>k</arg_key>\"",
            ),
            (
                "<tool_call>f<arg_key></arg_key><arg_value>v</arg_value></tool_call>",
                "tool call 0: the key is \"\", which is no name",
            ),
            (
                "é<tool_call>f<x></tool_call>",
                "tool call 0: </tool_call> is missing after \"é<tool_call>f\"",
            ),
        ];
        for (text, expected) in cases {
            assert_eq!(parse_tool_calls(text).unwrap_err().to_string(), expected, "{text}");
        }
    }
}
