use crate::files::{JsonFile, special_tokens};
use crate::gguf::{CHAT_TEMPLATE, GgufSource};
use crate::guard::Guard;
use crate::limits;
use crate::python::{JsonStyle, json_dumps, without_generation_blocks};
use crate::strftime::LONGEST;
use crate::{GenerateError, LocalTime, Tokenizer};
use firesteel_checkpoint::{GgufTokenizer, file_in};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde};
use minijinja::{Environment, Error, ErrorKind, State, Value as JinjaValue};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::path::Path;

/// A conversation and how to continue it, in the JSON of the OpenAI chat interface.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Conversation {
    /// The messages, oldest first.
    pub messages: Vec<Message>,
    /// The tools the model may call, each `{"type": "function", "function": {…}}`.
    #[serde(default)]
    pub tools: Vec<Value>,
    /// Whether the prompt ends with the beginning of an assistant turn.
    #[serde(default)]
    pub add_generation_prompt: bool,
    /// Whether the model should think; `None` leaves it to the template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enable_thinking: Option<bool>,
}

/// Who a message is from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MessageRole {
    /// Instructions.
    System,
    /// Instructions of the application, for templates that tell them apart.
    Developer,
    /// The user.
    User,
    /// The model.
    Assistant,
    /// The result of a tool call.
    Tool,
}

/// One message.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// Who it is from.
    pub role: MessageRole,
    /// The text; absent in assistant messages that only call tools, which templates see as empty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<Content>,
    /// What the model thought before the content.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// The calls of an assistant message.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<Vec<MessageToolCall>>,
    /// The call that a tool message answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// Name of the author or tool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

impl Message {
    /// A message of plain text.
    pub fn text(role: MessageRole, text: impl Into<String>) -> Self {
        Self {
            role,
            content: Some(Content::Text(text.into())),
            reasoning_content: None,
            tool_calls: None,
            tool_call_id: None,
            name: None,
        }
    }
}

/// Content of a message.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Content {
    /// One text.
    Text(String),
    /// Parts, which must all be text; templates see them joined.
    Parts(Vec<ContentPart>),
}

/// One part of a content.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ContentPart {
    /// `text`; anything else is refused when the message is rendered.
    #[serde(rename = "type")]
    pub kind: String,
    /// The text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
}

/// A call in an assistant message.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MessageToolCall {
    /// Id that the tool's answer refers to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// `function`.
    #[serde(rename = "type", default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// What is called.
    pub function: FunctionCall,
}

/// A function and its arguments.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FunctionCall {
    /// Name of the function.
    pub name: String,
    /// A JSON object, or a string that holds one.
    pub arguments: Value,
}

/// The chat template of a model, rendered as transformers renders it.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    origin: String,
    special_tokens: Map<String, Value>,
    time: Option<LocalTime>,
}

/// Name of the template that is used when there are no tools, or no other.
const DEFAULT: &str = "default";
/// Name of the template that is used with tools, if there is one.
const TOOL_USE: &str = "tool_use";

impl ChatTemplate {
    /// Opens the template of `folder`: chat_template.jinja, or else `chat_template` of
    /// tokenizer_config.json, which is a string or a list of named templates.
    ///
    /// # Errors
    /// When there is none, or it does not parse.
    pub fn open(folder: &Path) -> Result<Self, GenerateError> {
        let config = JsonFile::open_if_present(folder, "tokenizer_config.json")?;
        let special_tokens =
            special_tokens(&config).map(|(key, text)| (key.into(), text.into())).collect();
        let path = folder.join("chat_template.jinja");
        let (origin, templates) = match file_in(folder, "chat_template.jinja")? {
            Some(file) => {
                let source = fs_err::read_to_string(file)?;
                (path.display().to_string(), vec![(DEFAULT.to_owned(), source)])
            }
            None => (
                format!("{}: chat_template", config.path.display()),
                templates_of_config(&config)?.ok_or_else(|| GenerateError::NoTemplate {
                    path: folder.into(),
                    places: "neither chat_template.jinja nor a chat_template in \
                             tokenizer_config.json",
                })?,
            ),
        };
        Self::new(origin, templates, special_tokens)
    }

    /// The template in the metadata of the GGUF file `origin`, with the spellings of its tokens
    /// that begin and end a sequence as `bos_token` and `eos_token`.
    ///
    /// # Errors
    /// When there is none, it does not parse, or one of the two ids has no token.
    pub fn from_gguf(tokenizer: &GgufTokenizer, origin: &Path) -> Result<Self, GenerateError> {
        let source = GgufSource { tokenizer, origin };
        let template =
            tokenizer.chat_template.clone().ok_or_else(|| GenerateError::NoTemplate {
                path: origin.into(),
                places: "no tokenizer.chat_template in its metadata",
            })?;
        let tokens = [("bos_token", source.bos()?), ("eos_token", source.eos()?)];
        let special_tokens =
            tokens.into_iter().filter_map(|(key, token)| Some((key.into(), token?.1.into())));
        let name = format!("{}: {CHAT_TEMPLATE}", origin.display());
        Self::new(name, vec![(DEFAULT.into(), template)], special_tokens.collect())
    }

    fn new(
        origin: String,
        templates: Vec<(String, String)>,
        special_tokens: Map<String, Value>,
    ) -> Result<Self, GenerateError> {
        let parsed = limits::on_large_stack(|| {
            let mut environment = environment()?;
            for (name, source) in templates {
                let source = without_generation_blocks(&source);
                let source = limits::bounded_source(&source, syntax()?)?;
                environment.add_template_owned(name, source)?;
            }
            Ok(environment)
        });
        let environment = parsed
            .map_err(|error| unusable(&origin, &error))?
            .map_err(|error| template_error(&origin, &error))?;
        Ok(Self { environment, origin, special_tokens, time: None })
    }

    /// The same template with a clock that stands still. Without it every prompt says the time when
    /// it is rendered, if the template asks for it.
    #[must_use]
    pub fn with_time(mut self, time: LocalTime) -> Self {
        self.time = Some(time);
        self
    }

    /// The text of the prompt, byte for byte as Jinja renders it.
    ///
    /// # Errors
    /// When a message has an image or another part that is no text, the arguments of a call are
    /// no JSON object, or the template raises.
    pub fn render(&self, conversation: &Conversation) -> Result<String, GenerateError> {
        let (messages, tools) = normalized(conversation)?;
        self.render_values(conversation, messages, tools)
    }

    /// The ids of the prompt. Only the template's own text is searched for added tokens: whatever
    /// messages and tools say, it is encoded as plain text, so a message `<|Bot|>` begins no
    /// turn. Ids are those of the rendered text when no message or tool spells an added token. A
    /// template that looks for such a spelling in a message (to cut old reasoning out of a
    /// content, for instance) does not find it: give reasoning as `reasoning_content`.
    ///
    /// # Errors
    /// As [`render`](Self::render), and when the tokenizer fails.
    pub fn encode(
        &self,
        conversation: &Conversation,
        tokenizer: &Tokenizer,
    ) -> Result<Vec<u32>, GenerateError> {
        let (messages, tools) = normalized(conversation)?;
        let plain = serde_json::to_string(&(&messages, &tools)).unwrap_or_default();
        let added = tokenizer.added_tokens().iter().map(String::as_str);
        let guard = Guard::new(added, |c| !plain.contains(*c)).ok_or(GenerateError::NoGuard)?;
        let guarded = messages.iter().map(|message| match guard.value(message) {
            Value::Object(mut map) => {
                // The role is one of ours, not the user's.
                map.insert("role".into(), message["role"].clone());
                Value::Object(map)
            }
            other => other,
        });
        let messages = guarded.collect();
        let tools = tools.iter().map(|tool| guard.value(tool)).collect();
        let text = self.render_values(conversation, messages, tools)?;
        tokenizer.encode_guarded(&text, guard.character)
    }

    fn render_values(
        &self,
        conversation: &Conversation,
        messages: Vec<Value>,
        tools: Vec<Value>,
    ) -> Result<String, GenerateError> {
        let failed = |error: Error| template_error(&self.origin, &error);
        let mut context = self.special_tokens.clone();
        let tool_use = !tools.is_empty() && self.environment.get_template(TOOL_USE).is_ok();
        let tools = if tools.is_empty() { Value::Null } else { Value::Array(tools) };
        context.insert("messages".into(), Value::Array(messages));
        context.insert("tools".into(), tools);
        context.insert("add_generation_prompt".into(), conversation.add_generation_prompt.into());
        if let Some(enable_thinking) = conversation.enable_thinking {
            context.insert("enable_thinking".into(), enable_thinking.into());
        }
        let name = if tool_use { TOOL_USE } else { DEFAULT };
        let bytes = serde_json::to_string(&context).map_or(0, |text| text.len());
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(limits::fuel(bytes)));
        let time = self.time.clone();
        environment.add_function("strftime_now", move |state: &State, format: &str| {
            limits::pay_for(state, format.len().saturating_mul(LONGEST))?;
            Ok(time.clone().unwrap_or_else(LocalTime::now).strftime(format))
        });
        let rendered = limits::on_large_stack(move || {
            environment.get_template(name)?.render(JinjaValue::from(Serde(context)))
        });
        rendered.map_err(|error| unusable(&self.origin, &error))?.map_err(failed)
    }
}

/// The named templates of tokenizer_config.json, with one called `default`.
fn templates_of_config(config: &JsonFile) -> Result<Option<Vec<(String, String)>>, GenerateError> {
    let key = "chat_template";
    let Some(value) = config.get(key) else { return Ok(None) };
    if let Some(source) = value.as_str() {
        return Ok(Some(vec![(DEFAULT.into(), source.into())]));
    }
    let named = |entry: &Value| {
        Some((entry.get("name")?.as_str()?.into(), entry.get("template")?.as_str()?.into()))
    };
    let templates: Option<Vec<(String, String)>> =
        value.as_array().and_then(|entries| entries.iter().map(named).collect());
    match templates {
        Some(templates) if templates.iter().any(|(name, _)| name == DEFAULT) => Ok(Some(templates)),
        Some(templates) => {
            let names: Vec<_> = templates.iter().map(|(name, _)| name.as_str()).collect();
            Err(config.error(key, &json!(names), "a list with a template named default is needed"))
        }
        None => Err(config.error(
            key,
            value,
            "a string or a list of objects with name and template is accepted",
        )),
    }
}

/// Messages and tools as templates see them: contents are strings, empty where there is none, and
/// arguments are objects.
fn normalized(conversation: &Conversation) -> Result<(Vec<Value>, Vec<Value>), GenerateError> {
    let mut messages = Vec::with_capacity(conversation.messages.len());
    for (index, message) in conversation.messages.iter().enumerate() {
        let failed = |message| GenerateError::Message { index, message };
        let mut message = message.clone();
        let text = match message.content.take() {
            None => String::new(),
            Some(Content::Text(text)) => text,
            Some(Content::Parts(parts)) => joined(&parts).map_err(failed)?,
        };
        message.content = Some(Content::Text(text));
        for call in message.tool_calls.iter_mut().flatten() {
            let function = &mut call.function;
            function.arguments =
                argument_object(&function.name, &function.arguments).map_err(failed)?;
        }
        messages.push(serde_json::to_value(message).map_err(|error| failed(error.to_string()))?);
    }
    Ok((messages, conversation.tools.clone()))
}

fn joined(parts: &[ContentPart]) -> Result<String, String> {
    let mut joined = String::new();
    for (index, part) in parts.iter().enumerate() {
        match (part.kind.as_str(), &part.text) {
            ("text", Some(text)) => joined.push_str(text),
            ("text", None) => return Err(format!("content[{index}] has no text")),
            (kind, _) => {
                return Err(format!(
                    "content[{index}] is of type {kind}, but only text parts are accepted"
                ));
            }
        }
    }
    Ok(joined)
}

fn argument_object(name: &str, arguments: &Value) -> Result<Value, String> {
    let parsed = match arguments {
        Value::String(text) => serde_json::from_str(text)
            .map_err(|error| format!("the arguments of {name} are not valid JSON: {error}"))?,
        other => other.clone(),
    };
    if parsed.is_object() {
        Ok(parsed)
    } else {
        Err(format!("the arguments of {name} are {parsed}, but a JSON object is needed"))
    }
}

fn template_error(origin: &str, error: &Error) -> GenerateError {
    let detail = match error.kind() {
        ErrorKind::OutOfFuel => "takes more instructions or memory than any chat needs".into(),
        kind => error.detail().map_or_else(|| kind.to_string(), str::to_owned),
    };
    let place = error.line().map(|line| format!("line {line}: ")).unwrap_or_default();
    GenerateError::Template { origin: origin.into(), message: format!("{place}{detail}") }
}

fn unusable(origin: &str, error: &std::io::Error) -> GenerateError {
    GenerateError::Template { origin: origin.into(), message: error.to_string() }
}

fn syntax() -> Result<SyntaxConfig, Error> {
    SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()
}

/// An environment set up as transformers sets up Jinja for chat templates.
fn environment() -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_syntax(syntax()?);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_unknown_method_callback(limits::method);
    limits::add_filters(&mut environment);
    environment.add_filter("tojson", tojson);
    environment.add_function("raise_exception", |message: String| -> Result<(), Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    Ok(environment)
}

fn tojson(state: &State, value: &JinjaValue, options: Kwargs) -> Result<String, Error> {
    let refused = |message: &str| Err(Error::new(ErrorKind::InvalidOperation, message.to_owned()));
    if value.is_undefined() {
        return refused("an undefined value has no JSON");
    }
    if options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false) {
        return refused("tojson with ensure_ascii is not supported");
    }
    let style = JsonStyle {
        indent: options.get("indent")?,
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    options.assert_all_used()?;
    let value = limits::json_tree(state, value, style.indent.unwrap_or(0))?;
    let value = serde_json::to_value(value)
        .map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))?;
    Ok(json_dumps(&value, style))
}
