//! Answers of the families, whole and in pieces.

use firesteel_generate::{
    Answer, AnswerEvent, AnswerFlag, AnswerOptions, AnswerStream, CallFlag, Message, Syntax,
};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::sync::LazyLock;

/// Tools `f` and `set_alarm`, and one whose argument is named as the keys of a call are.
static TOOLS: LazyLock<Vec<Value>> = LazyLock::new(|| {
    let tool = |name: &str, properties: Value| {
        json!({"type": "function", "function": {
            "name": name, "parameters": {"type": "object", "properties": properties},
        }})
    };
    vec![
        tool("f", json!({})),
        tool("set_alarm", json!({"label": {"type": "string"}, "hour": {"type": "integer"}})),
        tool("odd", json!({"name": {"type": "string"}, "arguments": {"type": "array"}})),
        tool("my-tool.v2_é", json!({})),
    ]
});

fn options(family: &str) -> AnswerOptions<'static> {
    AnswerOptions { syntax: Syntax::of(family).unwrap(), tools: &TOOLS, in_thought: false }
}

/// The answer in pieces that end at `ends`.
fn in_pieces(text: &str, options: &AnswerOptions<'_>, ends: impl Iterator<Item = usize>) -> Answer {
    let mut stream = AnswerStream::new(options);
    let mut events: Vec<AnswerEvent> = Vec::new();
    let mut start = 0;
    for end in ends.filter(|end| text.is_char_boundary(*end)).chain([text.len()]) {
        events.extend(stream.push(&text[start..end]));
        start = end;
    }
    events.extend(stream.finish());
    events.into_iter().collect()
}

/// An answer as text: reasoning, content, calls with flags, and flags.
fn shown(answer: &Answer) -> String {
    let mut parts = Vec::new();
    if !answer.reasoning.is_empty() {
        parts.push(format!("reasoning {:?}", answer.reasoning));
    }
    if !answer.content.is_empty() {
        parts.push(format!("content {:?}", answer.content));
    }
    for call in &answer.calls {
        let flags: Vec<_> = call.flags.iter().map(|flag| format!(" +{}", flag.name())).collect();
        parts.push(format!("{}({}){}", call.name, call.arguments, flags.concat()));
    }
    parts.extend(answer.flags.iter().map(|flag| format!("!{}", flag.name())));
    parts.join("; ")
}

/// Reads every text whole, character by character and in halves.
fn check(options: AnswerOptions<'_>, cases: &[(&str, &str)]) {
    let mut failures = Vec::new();
    for (text, expected) in cases {
        let whole = Answer::read(text, &options);
        let got = shown(&whole);
        if got != *expected {
            failures.push(format!("{text:?}\n     got {got}\n  wanted {expected}"));
        }
        if in_pieces(text, &options, 1..text.len()) != whole {
            failures.push(format!("{text:?} is another answer character by character"));
        }
        for half in 0..text.len() {
            if in_pieces(text, &options, std::iter::once(half)) != whole {
                failures.push(format!("{text:?} is another answer split at {half}"));
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn thoughts_are_apart_from_the_answer_in_every_syntax() {
    for family in ["spark2_5", "qwen3"] {
        check(
            options(family),
            &[
                ("", ""),
                ("Yes.", "content \"Yes.\""),
                ("<think>is it?\n</think>\nYes.", "reasoning \"is it?\\n\"; content \"\\nYes.\""),
                ("<think></think>Yes.", "content \"Yes.\""),
                ("<think>\n\n</think>\n\n", "reasoning \"\\n\\n\"; content \"\\n\\n\""),
                ("<think>a</think>x<think>b</think>y", "reasoning \"ab\"; content \"xy\""),
                ("Hi <think>a</think>x", "reasoning \"a\"; content \"Hi x\""),
                ("<think>a <think>b</think>x", "reasoning \"a b\"; content \"x\"; !stray_tag"),
                ("<think>a < b <thin </thin", "reasoning \"a < b <thin </thin\""),
                ("a</think>b", "content \"ab\"; !stray_tag"),
                ("a < b, <tool, <tool_callx> <", "content \"a < b, <tool, <tool_callx> <\""),
                (" \n", "content \" \\n\""),
                ("`<tool_call>` and `<think>`", "content \"`<tool_call>` and `<think>`\""),
                (
                    "```\n<tool_call>f</tool_call>\n<think>\n```\nx",
                    "content \"```\\n<tool_call>f</tool_call>\\n<think>\\n```\\nx\"",
                ),
                ("{\"a\": 1}", "content \"{\\\"a\\\": 1}\""),
                ("[1, 2]", "content \"[1, 2]\""),
                ("[nobody] {}", "content \"[nobody] {}\""),
                ("{\"name\": \"nobody\"}", "content \"{\\\"name\\\": \\\"nobody\\\"}\""),
                ("{\"name\": \"f\"", "content \"{\\\"name\\\": \\\"f\\\"\""),
                (
                    "{\"name\": \"f\", \"arguments\": {\"a\": 1}} x",
                    "content \" x\"; f({\"a\": 1}) +recovered",
                ),
                (
                    "<think>a</think>\n[ {\"arguments\": {}, \"name\": \"f\"}, {\"name\": \"odd\"}]\n",
                    "reasoning \"a\"; f({}) +recovered; odd({}) +recovered",
                ),
                ("[f] {\"a\": [1]}", "f({\"a\": [1]}) +recovered"),
                ("<tool_call>", "content \"<tool_call>\"; !truncated_call"),
                ("a</tool_call>", "content \"a</tool_call>\"; !stray_tag"),
                (
                    "<tool_call></tool_call>",
                    "content \"<tool_call></tool_call>\"; !malformed_call; !stray_tag",
                ),
                (
                    "<think>the <tool_call> tag</think>x",
                    "reasoning \"the <tool_call> tag\"; content \"x\"; !malformed_call",
                ),
            ],
        );
        check(
            AnswerOptions { in_thought: true, ..options(family) },
            &[
                ("is it?</think>Yes.", "reasoning \"is it?\"; content \"Yes.\""),
                ("</think>Yes.", "content \"Yes.\""),
                ("a</think>b</think>", "reasoning \"a\"; content \"b\"; !stray_tag"),
                ("never ends", "reasoning \"never ends\""),
                ("<think>a</think>b", "reasoning \"a\"; content \"b\"; !stray_tag"),
                ("a</thi", "reasoning \"a</thi\""),
            ],
        );
    }
}

#[test]
fn calls_with_raw_strings() {
    let one = "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>";
    let spread =
        "\n<tool_call>\nf\n<arg_key> a </arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n";
    let long = "<tool_call>set_alarm<arg_key>label</arg_key><arg_value>null</arg_value>\
         <arg_key>hour</arg_key><arg_value>007</arg_value><arg_key>hour</arg_key>\
         <arg_value>9007199254740993</arg_value><arg_key>x</arg_key><arg_value> <b>\n\"\\🦀\
         </arg_value></tool_call>";
    check(
        options("spark2_5"),
        &[
            (one, "f({\"a\": 1})"),
            (spread, "f({\"a\": 1})"),
            (&one.repeat(2), "f({\"a\": 1}); f({\"a\": 1})"),
            (
                &format!("<think>t</think>\n\nNow:\n{one}\n{one} and {one}!"),
                "reasoning \"t\"; content \"\\n\\nNow:\\n and !\"; f({\"a\": 1}); f({\"a\": 1}); \
                 f({\"a\": 1})",
            ),
            (
                long,
                "set_alarm({\"label\": \"null\", \"hour\": 9007199254740993, \
                 \"x\": \" <b>\\n\\\"\\\\🦀\"}) +duplicate_key",
            ),
            ("<tool_call>f</tool_call>", "f({})"),
            ("<tool_call>my-tool.v2_é</tool_call>", "my-tool.v2_é({})"),
            ("<tool_call>g</tool_call>", "g({}) +unknown_tool"),
            (
                "<tool_call>odd<arg_key>name</arg_key><arg_value>1</arg_value><arg_key>arguments\
                 </arg_key><arg_value>[1, -0, 1000000000000000000000000000000]</arg_value></tool_call>",
                "odd({\"name\": \"1\", \"arguments\": [1, -0, 1000000000000000000000000000000]})",
            ),
            (
                "<tool_call>f<arg_key>a</arg_key><arg_value>x = '</arg_value>' + '</tool_cal>'\
                 </arg_value></tool_call>",
                "f({\"a\": \"x = '</arg_value>' + '</tool_cal>'\"})",
            ),
            (
                "<tool_call>f<arg_key>a</arg_key><arg_value>see </tool_call> there</arg_value></tool_call>",
                "f({\"a\": \"see </tool_call> there\"})",
            ),
            // Truncated.
            ("<tool_call>set_al", "content \"<tool_call>set_al\"; !truncated_call"),
            ("<tool_call>f<arg_k", "content \"<tool_call>f<arg_k\"; !truncated_call"),
            ("<tool_call>f<arg_key>a", "content \"<tool_call>f<arg_key>a\"; !truncated_call"),
            (
                &format!("{one}<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_v"),
                "content \"<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_v\"; f({\"a\": 1}); \
                 !truncated_call",
            ),
            ("<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>", "f({\"a\": 1}) +unclosed"),
            (
                "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>\n</tool",
                "f({\"a\": 1}) +unclosed",
            ),
            (
                "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value><arg_k",
                "content \"<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value><arg_k\"; \
                 !truncated_call",
            ),
            // Malformed.
            (
                &format!("<tool_call>f<tool_call>{one}"),
                "content \"<tool_call>f<tool_call>\"; f({\"a\": 1}); !malformed_call",
            ),
            (
                &format!("<tool_call>f<arg_key>a</arg_key><arg_value>1</tool_call>\n{one}"),
                "content \"<tool_call>f<arg_key>a</arg_key><arg_value>1</tool_call>\\n\"; \
                 f({\"a\": 1}); !malformed_call; !stray_tag",
            ),
            (
                &format!(
                    "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>x</tool_call>{one}"
                ),
                "content \"<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>x</tool_call>\"; \
                 f({\"a\": 1}); !malformed_call; !stray_tag",
            ),
            (
                &format!("{}{one}", one.strip_suffix("</tool_call>").unwrap()),
                "f({\"a\": 1}) +unclosed; f({\"a\": 1})",
            ),
            (&format!("{one}</tool_call>"), "content \"</tool_call>\"; f({\"a\": 1}); !stray_tag"),
            (
                "<tool_call>f<arg_key>k</arg_key>v</tool_call>",
                "content \"<tool_call>f<arg_key>k</arg_key>v</tool_call>\"; !malformed_call; !stray_tag",
            ),
            (
                "<tool_call>f<arg_key> </arg_key><arg_value>v</arg_value></tool_call>",
                "content \"<tool_call>f<arg_key> </arg_key><arg_value>v</arg_value></tool_call>\"; \
                 !malformed_call; !stray_tag",
            ),
            (
                &format!("<think>so {one}</think>x"),
                "reasoning \"so \"; content \"x\"; f({\"a\": 1}) +in_thought; !stray_tag",
            ),
        ],
    );
}

#[test]
fn calls_in_json() {
    let call = |inside: &str| format!("<tool_call>\n{inside}\n</tool_call>");
    let one = &call(r#"{"name": "f", "arguments": {"a": 1}}"#);
    let case = |inside: &str, expected: &str| (call(inside), expected.to_owned());
    let mut cases = vec![
        case(r#"{"name": "f", "arguments": {}}"#, "f({})"),
        case(r#"{"name": "f"}"#, "f({})"),
        case(r#"{"name": "f", "arguments": null}"#, "f({})"),
        case(r#"{"name": "f", "arguments": ""}"#, "f({})"),
        case(r#"{"arguments": {"b": 1, "a": 2}, "name": "f"}"#, r#"f({"b": 1, "a": 2})"#),
        case(r#"{"name": "f", "parameters": {"a": 1}}"#, r#"f({"a": 1})"#),
        case(r#"{"name": "f", "arguments": "{\"a\": [1]}"}"#, r#"f({"a": [1]})"#),
        case("{\n  \"name\": \"f\",\n  \"arguments\": {\n    \"a\": 1\n  }\n}", r#"f({"a": 1})"#),
        case(
            r#"{"name": "f", "arguments": {"a": [true, null, 1.0, -0, {"x": 9007199254740993}],
                "b": 1000000000000000000000000000000, "c": "🦀\n\"\\ </tool_call><tool_call> \u00e9"}}"#,
            "f({\"a\": [true, null, 1.0, -0, {\"x\": 9007199254740993}], \
             \"b\": 1000000000000000000000000000000, \
             \"c\": \"🦀\\n\\\"\\\\ </tool_call><tool_call> \\u00e9\"})",
        ),
        case(
            r#"{"name": "set_alarm", "arguments": {"label": "007", "hour": "7"}}"#,
            r#"set_alarm({"label": "007", "hour": 7})"#,
        ),
        case(
            r#"{"name": "odd", "arguments": {"name": "true", "arguments": []}}"#,
            r#"odd({"name": "true", "arguments": []})"#,
        ),
        case(r#"{"name": "g", "arguments": {}}"#, "g({}) +unknown_tool"),
        case(
            r#"{"name": "f", "arguments": {"a": 1, "b": 2, "a": 3}}"#,
            r#"f({"a": 3, "b": 2}) +duplicate_key"#,
        ),
        case(r#"{"name": "f", "name": "odd"}"#, "odd({}) +duplicate_key"),
        case(r#"{"name": "f", "id": 7}"#, "f({}) +recovered"),
        case(r#"{"name": "f", "arguments": {"a": 1,},}"#, r#"f({"a": 1}) +recovered"#),
        case(r#"{"name": "f", "arguments": {"a": [1]"#, r#"f({"a": [1]}) +recovered"#),
        case(
            "{\"name\": \"f\", \"arguments\": {\"a\": \"x\ny\"}}",
            r#"f({"a": "x\u000ay"}) +recovered"#,
        ),
        (one.replace('\n', ""), r#"f({"a": 1})"#.into()),
        (format!("{one}\n{one}"), r#"f({"a": 1}); f({"a": 1})"#.into()),
        (
            format!("<think>\nt\n</think>\n\n{one}\nand\n{one} "),
            "reasoning \"\\nt\\n\"; content \"\\nand\\n\"; f({\"a\": 1}); f({\"a\": 1})".into(),
        ),
        (
            format!("<think>so {one}</think>x"),
            "reasoning \"so \"; content \"x\"; f({\"a\": 1}) +in_thought; !stray_tag".into(),
        ),
        (
            format!("{}{one}", one.strip_suffix("\n</tool_call>").unwrap()),
            "f({\"a\": 1}) +unclosed; f({\"a\": 1})".into(),
        ),
        (one.strip_suffix("l>").unwrap().into(), "f({\"a\": 1}) +unclosed".into()),
        (one.strip_suffix("</tool_call>").unwrap().into(), "f({\"a\": 1}) +unclosed".into()),
    ];
    let text = [
        r#"{"name": "f", "argum"#,
        r#"{"name": "f", "arguments": {"a": "x"#,
        r#"{"name": "f", "arguments": {}"#,
        "{",
    ];
    cases.extend(text.map(|inside| {
        let text = format!("{one}<tool_call>\n{inside}");
        let content = format!("<tool_call>\n{inside}");
        let expected = format!("content {content:?}; f({{\"a\": 1}}); !truncated_call");
        (text, expected)
    }));
    let malformed = [
        r#"{"name": "f, "arguments": {}}"#,
        r#"{"name": "f", "arguments": [1]}"#,
        r#"{"name": "", "arguments": {}}"#,
        r#"{"name": 1}"#,
        r#"{"arguments": {}}"#,
        r#"[]"#,
        "f",
        r#"{"name": "f", "arguments": {"a": }}"#,
    ];
    cases.extend(malformed.map(|inside| {
        let first = call(inside);
        let expected = format!("content {first:?}; f({{\"a\": 1}}); !malformed_call; !stray_tag");
        (format!("{first}{one}"), expected)
    }));
    let inner = format!("<tool_call>{one}");
    cases.push((inner, "content \"<tool_call>\"; f({\"a\": 1}); !malformed_call".into()));
    let cases: Vec<_> = cases.iter().map(|(text, expected)| (&**text, &**expected)).collect();
    check(options("qwen3"), &cases);
}

#[test]
fn text_is_released_when_it_can_be_no_tag() {
    let mut stream = AnswerStream::new(&options("qwen3"));
    let content = |text: &str| vec![AnswerEvent::Content(text.into())];
    assert_eq!(stream.push("a <tool"), content("a "));
    assert_eq!(stream.push("_call"), []);
    assert_eq!(stream.push("x"), content("<tool_callx"));
    let events = stream.push("<tool_call>no");
    assert_eq!(events[0], AnswerEvent::Flag(AnswerFlag::Malformed));
    assert_eq!(events[1..], content("<tool_call>no"));
    assert_eq!(stream.push("<tool_call>{\"name\": \"f\"}</tool_call"), []);
    let events = stream.push(">");
    assert!(matches!(&events[..], [AnswerEvent::Call(call)] if call.name == "f"), "{events:?}");
    assert_eq!(stream.push("\n<"), []);
    assert_eq!(stream.finish(), content("\n<"));
}

#[test]
fn a_message_is_made_of_an_answer() {
    let text = "<think>t</think><tool_call>{\"name\": \"f\"}</tool_call>\n\
                <tool_call>{\"name\": \"f\"}</tool_call>";
    let message = Message::from(Answer::read(text, &options("qwen3")));
    let call = |id: &str| json!({"id": id, "type": "function", "function": {"name": "f", "arguments": "{}"}});
    let expected = json!({
        "role": "assistant", "reasoning_content": "t", "tool_calls": [call("call_0"), call("call_1")],
    });
    assert_eq!(serde_json::to_value(message).unwrap(), expected);
    let message = Message::from(Answer::read("", &options("qwen3")));
    assert_eq!(serde_json::to_value(message).unwrap(), json!({"role": "assistant", "content": ""}));
}

/// Long answers take as many steps as they have bytes: with the square of it, this would not end.
#[test]
fn long_answers_are_read_in_one_go() {
    let value = "</tool_call>".repeat(90_000);
    let array = "[1],".repeat(250_000);
    let cases = [
        (
            "qwen3",
            format!(
                "<tool_call>{{\"name\": \"f\", \"arguments\": {{\"a\": \"{value}\"}}}}</tool_call>"
            ),
        ),
        (
            "qwen3",
            format!(
                "<tool_call>{{\"name\": \"f\", \"arguments\": {{\"a\": [{array}1]}}}}</tool_call>"
            ),
        ),
        (
            "spark2_5",
            format!("<tool_call>f<arg_key>a</arg_key><arg_value>{value}</arg_value></tool_call>"),
        ),
        (
            "spark2_5",
            format!(
                "<tool_call>f<arg_key>a</arg_key><arg_value>[{array}1]</arg_value></tool_call>"
            ),
        ),
    ];
    for (family, text) in cases {
        let options = options(family);
        let whole = Answer::read(&text, &options);
        assert_eq!(whole.calls.len(), 1, "{family}");
        assert!(whole.calls[0].arguments.len() > 1_000_000, "{family}");
        assert!(in_pieces(&text, &options, (1..text.len()).step_by(7)) == whole, "{family}");
    }
    let call = "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>";
    assert_eq!(Answer::read(&call.repeat(1000), &options("spark2_5")).calls.len(), 1000);
    let call = "<tool_call>{\"name\": \"f\"}</tool_call>";
    assert_eq!(Answer::read(&call.repeat(1000), &options("qwen3")).calls.len(), 1000);
    // Nothing of these is a call, and each begins another.
    let hostile = [
        ("spark2_5", "<tool_call>f<arg_key>a</arg_key><arg_value>"),
        ("spark2_5", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>x"),
        ("spark2_5", "<tool_call>"),
        ("spark2_5", "<tool_call>f<arg_key>"),
        ("qwen3", "<tool_call>{\"name\": \""),
        ("qwen3", "<tool_call>{\"a\": [\"<tool_call>{\", 1, "),
        ("qwen3", "<tool_call>"),
        ("qwen3", "{\"name\": "),
        ("qwen3", "{   "),
        ("qwen3", "<"),
        ("qwen3", " "),
    ];
    for (family, unit) in hostile {
        let text = unit.repeat(100_000 / unit.len());
        for text in [format!("{text}</arg_value>x"), text] {
            let answer = in_pieces(&text, &options(family), 1..text.len());
            assert_eq!(answer.content, text, "{family} {unit}");
        }
    }
}

const FRAGMENTS: [&str; 38] = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "f",
    "g",
    "a",
    "é",
    "🦀",
    " ",
    "\n",
    "<",
    ">",
    "/",
    "`",
    "```",
    "\n```\n",
    "{",
    "}",
    "[",
    "]",
    "\"",
    ":",
    ",",
    "1",
    "-0",
    "\\",
    "\"name\"",
    "\"arguments\"",
    "{\"name\": \"f\", \"arguments\": {\"a\": 1}}",
    "[f] {\"a\": 1}",
    "<tool_call>f</tool_call>",
    "<arg_key>a</arg_key><arg_value>1</arg_value>",
    "</tool",
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn no_split_changes_an_answer(
        parts in prop::collection::vec(0..FRAGMENTS.len(), 0..24),
        ends in prop::collection::btree_set(0usize..200, 0..20),
        in_thought: bool,
        family in prop::sample::select(vec!["spark2_5", "qwen3"]),
    ) {
        let text: String = parts.into_iter().map(|part| FRAGMENTS[part]).collect();
        let options = AnswerOptions { in_thought, ..options(family) };
        let whole = Answer::read(&text, &options);
        let ends: Vec<usize> = ends.into_iter().filter(|end| *end < text.len()).collect();
        prop_assert_eq!(&in_pieces(&text, &options, ends.into_iter()), &whole);
        prop_assert_eq!(&in_pieces(&text, &options, 1..text.len()), &whole);
        // Without calls, nothing but the tags of thoughts is left out.
        if whole.calls.is_empty() {
            let given = [whole.reasoning, whole.content].concat();
            let without = |text: &str| text.replace("<think>", "").replace("</think>", "").len();
            prop_assert_eq!(without(&given), without(&text));
        } else {
            for call in whole.calls {
                let arguments: Value = serde_json::from_str(&call.arguments).unwrap();
                prop_assert!(arguments.is_object());
                let is_unknown = call.flags.contains(&CallFlag::UnknownTool);
                prop_assert_eq!(call.name == "f", !is_unknown);
            }
        }
    }
}
