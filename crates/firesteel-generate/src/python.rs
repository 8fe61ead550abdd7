//! What chat templates expect from Python: `json.dumps`, and transformers' own extension of Jinja.

use serde_json::Value;
use std::borrow::Cow;
use std::fmt::Write;

/// Layout of [`json_dumps`].
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct JsonStyle {
    pub(crate) indent: Option<usize>,
    pub(crate) sort_keys: bool,
}

/// `value` as `json.dumps(value, ensure_ascii=False, …)` writes it.
pub(crate) fn json_dumps(value: &Value, style: JsonStyle) -> String {
    let mut text = String::new();
    dump(value, style, 0, &mut text);
    text
}

fn dump(value: &Value, style: JsonStyle, depth: usize, out: &mut String) {
    match value {
        Value::Number(number) if number.is_f64() => {
            out.push_str(&float_repr(number.as_f64().unwrap_or(f64::NAN)));
        }
        Value::Array(items) if !items.is_empty() => {
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                separate(style, i, depth + 1, out);
                dump(item, style, depth + 1, out);
            }
            close(style, depth, ']', out);
        }
        Value::Object(map) if !map.is_empty() => {
            let mut entries: Vec<_> = map.iter().collect();
            if style.sort_keys {
                // Python compares strings by code points, which is the order of UTF-8.
                entries.sort_by_key(|(key, _)| *key);
            }
            out.push('{');
            for (i, (key, value)) in entries.into_iter().enumerate() {
                separate(style, i, depth + 1, out);
                json_string(key, out);
                out.push_str(": ");
                dump(value, style, depth + 1, out);
            }
            close(style, depth, '}', out);
        }
        Value::String(text) => json_string(text, out),
        // null, booleans, integers, [] and {} are written alike.
        other => out.push_str(&other.to_string()),
    }
}

fn separate(style: JsonStyle, index: usize, depth: usize, out: &mut String) {
    match style.indent {
        Some(indent) => {
            out.push_str(if index == 0 { "\n" } else { ",\n" });
            out.extend(std::iter::repeat_n(' ', indent.saturating_mul(depth)));
        }
        None if index > 0 => out.push_str(", "),
        None => {}
    }
}

fn close(style: JsonStyle, depth: usize, bracket: char, out: &mut String) {
    if let Some(indent) = style.indent {
        out.push('\n');
        out.extend(std::iter::repeat_n(' ', indent.saturating_mul(depth)));
    }
    out.push(bracket);
}

/// Appends `text` as a string of JSON.
pub(crate) fn json_string(text: &str, out: &mut String) {
    out.push('"');
    for character in text.chars() {
        match character {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            control @ '\0'..='\u{1f}' => {
                // Writing to a string cannot fail.
                let _ = write!(out, "\\u{:04x}", u32::from(control));
            }
            other => out.push(other),
        }
    }
    out.push('"');
}

/// `repr` of a Python float. Rust's `Debug` has the same digits and the same bounds for
/// exponents, but writes `1e16` for `1e+16`.
fn float_repr(value: f64) -> String {
    let text = format!("{value:?}");
    match text.split_once('e') {
        Some((mantissa, exponent)) => {
            let (sign, digits) = match exponent.strip_prefix('-') {
                Some(digits) => ('-', digits),
                None => ('+', exponent),
            };
            format!("{mantissa}e{sign}{digits:0>2}")
        }
        None => text,
    }
}

/// A template with transformers' `{% generation %}` blocks, which only mark text for training,
/// written as blocks that Jinja knows.
pub(crate) fn without_generation_blocks(source: &str) -> Cow<'_, str> {
    let mut out = String::new();
    let mut copied = 0;
    for (start, _) in source.match_indices("{%") {
        let inner = start + 2;
        let Some(length) = source[inner..].find("%}") else { break };
        let tag = &source[inner..inner + length];
        let word = tag.trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+');
        let block = match word {
            "generation" => "if true",
            "endgeneration" => "endif",
            _ => continue,
        };
        out.push_str(&source[copied..inner]);
        out.push_str(&tag.replace(word, block));
        copied = inner + length;
    }
    if copied == 0 {
        return Cow::Borrowed(source);
    }
    out.push_str(&source[copied..]);
    Cow::Owned(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_is_written_as_python_writes_it() {
        let source = r#"{"z": [1, -2.0, 1e16, 1e-5, 0.0001, 123456789012345680.0, 1.5e300],
            "a": {"é": "<a> & 'b' \"q\" \\ \n\t\u0001\u007f\u2028", "n": null, "t": true},
            "e": [[], {}], "i": 9007199254740993, "u": 18446744073709551615}"#;
        let value: Value = serde_json::from_str(source).unwrap();
        let cases = [
            (
                JsonStyle::default(),
                "{\"z\": [1, -2.0, 1e+16, 1e-05, 0.0001, 1.2345678901234568e+17, 1.5e+300], \
                 \"a\": {\"é\": \"<a> & 'b' \\\"q\\\" \\\\ \\n\\t\\u0001\u{7f}\u{2028}\", \
                 \"n\": null, \"t\": true}, \"e\": [[], {}], \"i\": 9007199254740993, \
                 \"u\": 18446744073709551615}",
            ),
            (
                JsonStyle { indent: Some(1), sort_keys: true },
                "{\n \"a\": {\n  \"n\": null,\n  \"t\": true,\n  \
                 \"é\": \"<a> & 'b' \\\"q\\\" \\\\ \\n\\t\\u0001\u{7f}\u{2028}\"\n },\n \
                 \"e\": [\n  [],\n  {}\n ],\n \"i\": 9007199254740993,\n \
                 \"u\": 18446744073709551615,\n \"z\": [\n  1,\n  -2.0,\n  1e+16,\n  1e-05,\n  \
                 0.0001,\n  1.2345678901234568e+17,\n  1.5e+300\n ]\n}",
            ),
        ];
        for (style, expected) in cases {
            assert_eq!(json_dumps(&value, style), expected);
        }
    }

    #[test]
    fn generation_blocks_become_known_blocks() {
        let source = "{%- generation -%}a{% endgeneration %}{% if generation %}é{% endif %}";
        let expected = "{%- if true -%}a{% endif %}{% if generation %}é{% endif %}";
        assert_eq!(without_generation_blocks(source), expected);
        assert!(matches!(without_generation_blocks("{{ a }} {% open"), Cow::Borrowed(_)));
    }
}
