//! What chat templates expect from Python: `json.dumps`, `strftime`, and transformers' own
//! extension of Jinja.

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

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] =
    ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];

/// `seconds` after 1970 in UTC, by Python's `strftime` in the C locale.
///
/// # Errors
/// When a directive is not known; the message names it.
pub(crate) fn strftime(seconds: u64, format: &str) -> Result<String, String> {
    let days = seconds / 86_400;
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let (year, month, day, day_of_year) = civil(days);
    let month_name = MONTHS[month - 1];
    let weekday = WEEKDAYS[(days % 7) as usize];
    let mut out = String::new();
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            out.push(character);
            continue;
        }
        let mut directive = characters.next();
        let padded = directive != Some('-');
        if !padded {
            directive = characters.next();
        }
        let two = |n: u64| if padded { format!("{n:02}") } else { n.to_string() };
        out += &match directive {
            Some('Y') => year.to_string(),
            Some('y') => two(year % 100),
            Some('m') => two(month as u64),
            Some('d') => two(day),
            Some('H') => two(hour),
            Some('I') => two((hour + 11) % 12 + 1),
            Some('M') => two(minute),
            Some('S') => two(second),
            Some('j') if padded => format!("{day_of_year:03}"),
            Some('j') => day_of_year.to_string(),
            Some('B') => month_name.to_owned(),
            Some('b') => month_name[..3].to_owned(),
            Some('A') => weekday.to_owned(),
            Some('a') => weekday[..3].to_owned(),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            Some('%') => "%".to_owned(),
            Some(other) => return Err(format!("strftime directive %{other} is not supported")),
            None => return Err("a strftime format ends in %".to_owned()),
        };
    }
    Ok(out)
}

/// Year, month, day and day of the year, from 1, of a day counted from 1970-01-01.
fn civil(mut days: u64) -> (u64, usize, u64, u64) {
    // 400 years of the Gregorian calendar have 146097 days.
    let mut year = 1970 + days / 146_097 * 400;
    days %= 146_097;
    let leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let day_of_year = days + 1;
    let lengths = [31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 0;
    while month < 11 && days >= lengths[month] {
        days -= lengths[month];
        month += 1;
    }
    (year, month + 1, days + 1, day_of_year)
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
    fn dates() {
        let cases = [
            (0, "%Y-%m-%d %H:%M:%S %j %a", "1970-01-01 00:00:00 001 Thu"),
            (951_782_399, "%d %B %Y %I:%M %p", "28 February 2000 11:59 PM"),
            (951_782_400, "%-d %b %y %A 100%%", "29 Feb 00 Tuesday 100%"),
            (978_220_800, "%Y-%m-%d %-j", "2000-12-31 366"),
            (4_107_542_400, "%Y-%-m-%-d %I%p", "2100-3-1 12AM"),
            (16_725_225_600, "%Y-%m-%d", "2500-01-01"),
        ];
        for (seconds, format, expected) in cases {
            assert_eq!(strftime(seconds, format).unwrap(), expected);
        }
        assert_eq!(strftime(0, "%Q").unwrap_err(), "strftime directive %Q is not supported");
        assert!(strftime(0, "%").is_err());
    }

    #[test]
    fn generation_blocks_become_known_blocks() {
        let source = "{%- generation -%}a{% endgeneration %}{% if generation %}é{% endif %}";
        let expected = "{%- if true -%}a{% endif %}{% if generation %}é{% endif %}";
        assert_eq!(without_generation_blocks(source), expected);
        assert!(matches!(without_generation_blocks("{{ a }} {% open"), Cow::Borrowed(_)));
    }
}
