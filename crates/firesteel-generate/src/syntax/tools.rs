//! The tools of a conversation, for reading calls of them.

use super::json::is_json;
use super::{CallFlag, RawCall, Spelling};
use crate::answer::ToolCall;
use crate::python::json_string;
use serde_json::Value;
use std::collections::HashMap;

/// The tools by name.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tools {
    parameters: HashMap<String, HashMap<String, Types>>,
}

/// The types of JSON that a value may have; none where the schema does not say.
#[derive(Debug, Clone, Default)]
struct Types(Vec<String>);

impl Tools {
    /// The tools as a conversation has them: each `{"type": "function", "function": {…}}`, or the
    /// function alone.
    pub(crate) fn new(tools: &[Value]) -> Self {
        let parameters = tools.iter().filter_map(|tool| {
            let function = tool.get("function").unwrap_or(tool);
            let name = function.get("name")?.as_str()?.to_owned();
            let properties = function.pointer("/parameters/properties").and_then(Value::as_object);
            let types = properties.into_iter().flatten();
            Some((name, types.map(|(key, schema)| (key.clone(), Types::of(schema))).collect()))
        });
        Self { parameters: parameters.collect() }
    }

    pub(crate) fn is_known(&self, name: &str) -> bool {
        self.parameters.contains_key(name)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.parameters.is_empty()
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.parameters.keys().map(String::as_str)
    }

    /// The call with arguments of the types that its tool wants, as far as they can be.
    pub(crate) fn typed(&self, mut call: RawCall) -> ToolCall {
        let types = self.parameters.get(&call.name);
        if types.is_none() {
            call.flag(CallFlag::UnknownTool);
        }
        let unknown = Types::default();
        let mut arguments = String::from("{");
        for (key, value) in call.arguments {
            let types = types.and_then(|types| types.get(&key)).unwrap_or(&unknown);
            if arguments.len() > 1 {
                arguments.push_str(", ");
            }
            json_string(&key, &mut arguments);
            arguments.push_str(": ");
            match value {
                Spelling::Text(text) => types.push_text(&text, &mut arguments),
                Spelling::Json(json) => types.push_json(&json, &mut arguments),
            }
        }
        arguments.push('}');
        ToolCall { name: call.name, arguments, flags: call.flags }
    }
}

impl Types {
    fn of(schema: &Value) -> Self {
        let mut types = Vec::new();
        collect(schema, &mut types);
        Self(types)
    }

    fn has(&self, name: &str) -> bool {
        self.0.iter().any(|kind| kind == name || (kind == "number" && name == "integer"))
    }

    /// Whether a value of JSON may be what is meant where it could be a string too.
    fn takes(&self, json: &str) -> bool {
        match json.bytes().next() {
            // Strings are written without quotes.
            Some(b'"') | None => false,
            Some(_) if self.0.is_empty() => true,
            Some(b'{') => self.has("object"),
            Some(b'[') => self.has("array"),
            Some(b't' | b'f') => self.has("boolean"),
            Some(b'n') => self.has("null"),
            Some(_) => self.has("number") || self.has("integer"),
        }
    }

    /// A value that is written as itself if it is a string, else as JSON.
    fn push_text(&self, text: &str, out: &mut String) {
        let trimmed = text.trim();
        match self.takes(trimmed) && is_json(trimmed) {
            true => out.push_str(trimmed),
            false => json_string(text, out),
        }
    }

    /// A value in JSON: a string where the tool wants anything but a string is read once more.
    fn push_json(&self, json: &str, out: &mut String) {
        if json.starts_with('"') && !self.0.is_empty() && !self.has("string") {
            let inner: Option<String> = serde_json::from_str(json).ok();
            let inner = inner.as_deref().map(str::trim);
            if let Some(inner) = inner.filter(|inner| self.takes(inner) && is_json(inner)) {
                out.push_str(inner);
                return;
            }
        }
        out.push_str(json);
    }
}

/// Collects the types that a schema names itself, or those of its values and choices.
fn collect(schema: &Value, types: &mut Vec<String>) {
    match schema.get("type") {
        Some(Value::String(kind)) => types.push(kind.clone()),
        Some(Value::Array(kinds)) => {
            types.extend(kinds.iter().filter_map(|kind| Some(kind.as_str()?.to_owned())));
        }
        _ => {
            let values = schema.get("enum").and_then(Value::as_array).into_iter().flatten();
            types.extend(values.chain(schema.get("const")).map(|value| kind(value).to_owned()));
            for key in ["anyOf", "oneOf"] {
                let schemas = schema.get(key).and_then(Value::as_array).into_iter().flatten();
                schemas.for_each(|schema| collect(schema, types));
            }
        }
    }
    if schema.get("nullable") == Some(&Value::Bool(true)) {
        types.push("null".into());
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn arguments_have_the_types_of_their_tool() {
        // (schema, as text, as JSON)
        let cases = [
            (json!({"type": "string"}), "007", "\"007\"", "\"007\""),
            (json!({"type": "string"}), "null", "\"null\"", "\"null\""),
            (json!({"type": "string"}), "{\"a\": 1}", "\"{\\\"a\\\": 1}\"", ""),
            (json!({"type": "string"}), " a\n", "\" a\\n\"", ""),
            (
                json!({"type": "integer"}),
                "9007199254740993",
                "9007199254740993",
                "\"9007199254740993\"",
            ),
            (json!({"type": "integer"}), "-0", "-0", "-0"),
            (json!({"type": "integer"}), " 3\n", "3", "\" 3 \""),
            (json!({"type": "integer"}), "007", "\"007\"", "\"007\""),
            (json!({"type": "integer"}), "three", "\"three\"", "\"three\""),
            (json!({"type": "number"}), "1.50", "1.50", "1.50"),
            (json!({"type": "number"}), "true", "\"true\"", "\"true\""),
            (json!({"type": "boolean"}), "true", "true", "\"true\""),
            (json!({"type": "array"}), "[1,  2]", "[1,  2]", "\"[1,  2]\""),
            (json!({"type": ["string", "null"]}), "null", "null", "null"),
            (json!({"type": ["string", "null"]}), "7", "\"7\"", "\"7\""),
            (json!({"enum": ["1", "2"]}), "1", "\"1\"", "\"1\""),
            (json!({"anyOf": [{"type": "integer"}, {"type": "null"}]}), "4", "4", "\"4\""),
            (json!({"type": "integer", "nullable": true}), "null", "null", "null"),
            (json!({}), "4", "4", "4"),
            (json!({}), "\"4\"", "\"\\\"4\\\"\"", "\"4\""),
            (json!({}), "", "\"\"", "\"\""),
        ];
        for (schema, text, expected, as_json) in cases {
            let tools = json!([{"type": "function", "function": {
                "name": "f", "parameters": {"type": "object", "properties": {"k": schema}},
            }}]);
            let tools = Tools::new(tools.as_array().unwrap());
            let typed = |value: Spelling| {
                let mut call = RawCall::named("f");
                call.push("k".into(), value);
                tools.typed(call).arguments
            };
            let object = |value: &str| format!("{{\"k\": {value}}}");
            assert_eq!(typed(Spelling::Text(text.into())), object(expected), "{schema} {text}");
            if !as_json.is_empty() {
                let got = typed(Spelling::Json(as_json.into()));
                // What JSON says to be a string is none where the tool wants none.
                assert_eq!(
                    got,
                    object(expected).replace("\"\\\"4\\\"\"", "\"4\""),
                    "{schema} {as_json}"
                );
            }
        }
    }
}
