//! What bounds a chat template, which is a program from a stranger.
//!
//! Instructions, bytes and items are paid for with fuel, so loops and growing texts end. A value
//! could still nest without end, and then exhaust the stack when it is written, compared or freed:
//! loops keep values only in namespaces, so what is put into one is copied to a plain tree of
//! bounded depth. Source text nests no deeper than it has tokens, whose number is bounded, and
//! everything runs on a stack that is large enough for that.

use minijinja::machinery::{Token, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Tuple, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, Value};
use std::borrow::Cow;
use std::io;

/// Most tokens of a template: every operator, name, text between blocks and so on.
const MAX_TOKENS: usize = 20_000;
/// Stack of the thread that parses and renders, in bytes. Only what is used is ever backed by
/// memory.
const STACK_BYTES: usize = 64 << 20;
/// Deepest nesting of a value that is kept or written as JSON. JSON that is read stops at 128.
const MAX_DEPTH: usize = 200;
/// Bytes that one unit of fuel pays for, as in the engine.
const BYTES_PER_FUEL: usize = 64;
/// Fuel of any rendering.
const BASE_FUEL: u64 = 2_000_000;
/// Further fuel for each byte of the conversation.
const FUEL_PER_BYTE: u64 = 8;
/// Name of the filter that [`bounded_source`] puts in; no template has it by chance.
const HELD: &str = "firesteel_held";

/// Fuel for rendering a conversation of `bytes` bytes of JSON. Real templates need a fraction of
/// it. The texts that a template makes of it take 128 MiB and 512 times the conversation at most.
pub(crate) fn fuel(bytes: usize) -> u64 {
    BASE_FUEL.saturating_add(FUEL_PER_BYTE.saturating_mul(bytes as u64))
}

/// `source` with every value that is put into a namespace passed through a filter that bounds it.
///
/// # Errors
/// When the source cannot be split into tokens or has too many.
pub(crate) fn bounded_source(source: &str, syntax: SyntaxConfig) -> Result<String, Error> {
    let mut out = String::with_capacity(source.len());
    let mut copied = 0;
    let mut statement: Option<Set> = None;
    let mut begins = false;
    for (count, token) in tokenize(source, false, syntax).enumerate() {
        let (token, span) = token?;
        if count >= MAX_TOKENS {
            let message = format!("the template has more than {MAX_TOKENS} tokens");
            return Err(Error::new(ErrorKind::SyntaxError, message));
        }
        if begins && matches!(token, Token::Ident("set")) {
            statement = Some(Set::default());
        } else if let Some(set) = &mut statement
            && let Some(insert) = set.next(&token)
        {
            let at = match insert {
                Insert::Open => span.end_offset,
                Insert::Close(_) => span.start_offset,
            } as usize;
            out.push_str(source.get(copied..at).unwrap_or_default());
            copied = at;
            match insert {
                Insert::Open => out.push_str(" ("),
                Insert::Close(bracket) => {
                    out.push_str(if bracket { ")|" } else { "|" });
                    out.push_str(HELD);
                    out.push(' ');
                }
            }
        }
        begins = matches!(token, Token::BlockStart);
        if matches!(token, Token::BlockEnd) {
            statement = None;
        }
    }
    out.push_str(source.get(copied..).unwrap_or_default());
    Ok(out)
}

/// How far a set statement is read.
#[derive(Default)]
struct Set {
    dotted: bool,
    /// Whether the target is over, and whether a value in brackets follows.
    value: Option<bool>,
}

enum Insert {
    /// Behind the token.
    Open,
    /// Before the token; closes the bracket where there is one.
    Close(bool),
}

impl Set {
    fn next(&mut self, token: &Token<'_>) -> Option<Insert> {
        match (self.value, token) {
            (None, Token::Dot) => self.dotted = true,
            (None, Token::Assign) => {
                self.value = Some(true);
                return self.dotted.then_some(Insert::Open);
            }
            (None, Token::Pipe) => self.value = Some(false),
            (Some(bracket), Token::BlockEnd) => {
                return self.dotted.then_some(Insert::Close(bracket));
            }
            _ => {}
        }
        None
    }
}

/// Adds the filter that [`bounded_source`] uses, and puts one in the place of the engine's `join`,
/// which does not pay for items before it copies them.
pub(crate) fn add_filters(environment: &mut Environment<'_>) {
    environment.add_filter("join", join);
    environment.add_filter(HELD, |state: &State, value: &Value| {
        Walk { state, indent: 0, keep: true }.plain(value, 0)
    });
}

/// Jinja's `join`, for templates without escaping: the texts of the items, or of one of their
/// attributes, with `joiner` between them.
fn join(
    state: &State,
    value: &Value,
    joiner: Option<Value>,
    attribute: Option<&str>,
    options: Kwargs,
) -> Result<String, Error> {
    let joiner = joiner.map_or_else(|| options.get("d"), |joiner| Ok(Some(joiner)))?;
    let joiner = joiner.filter(|joiner| !joiner.is_undefined() && !joiner.is_none());
    let joiner = joiner.map(|joiner| joiner.to_string()).unwrap_or_default();
    let attribute = attribute.map_or_else(|| options.get("attribute"), |name| Ok(Some(name)))?;
    options.assert_all_used()?;
    let mut joined = String::new();
    for (index, item) in value.try_iter()?.checked().enumerate() {
        let mut item = item?;
        for name in attribute.into_iter().flat_map(|path| path.split('.')) {
            item = item.get_attr(name)?;
        }
        let text = item.as_str().map_or_else(|| item.to_string().into(), Cow::Borrowed);
        pay_for(state, BYTES_PER_FUEL + joiner.len() + text.len())?;
        if index > 0 {
            joined.push_str(&joiner);
        }
        joined.push_str(&text);
    }
    Ok(joined)
}

/// Python's methods, paid for before they are called where their result can be much larger than
/// what it is made of.
///
/// # Errors
/// As the methods, and when the fuel does not suffice.
pub(crate) fn method(
    state: &mut State,
    value: &Value,
    name: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    if let Some(text) = value.as_str() {
        match (name, arguments) {
            ("join", [items]) => {
                return state.apply_filter("join", &[items.clone(), value.clone()]);
            }
            ("split" | "splitlines", _) => {
                let separator = arguments.first().and_then(Value::as_str);
                let pieces = match separator {
                    Some(separator) => text.matches(separator).count(),
                    None => text.split_whitespace().count(),
                };
                state.consume_fuel(pieces as u64)?;
            }
            ("format", _) => {
                let given = arguments.iter().filter_map(Value::as_str).map(str::len);
                let given = given.fold(0usize, usize::saturating_add);
                let fields = text.split('{').skip(1).map(|field| {
                    let spec = field.split('}').next().unwrap_or_default();
                    let numbers = spec.split(|c: char| !c.is_ascii_digit());
                    let numbers = numbers.filter(|digits| !digits.is_empty());
                    // Of a number that does not fit, only that it is huge matters.
                    let numbers = numbers.map(|digits| digits.parse().unwrap_or(usize::MAX));
                    numbers.fold(given, usize::saturating_add)
                });
                let bytes = fields.fold(0usize, usize::saturating_add);
                pay_for(state, bytes)?;
            }
            _ => {}
        }
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, name, arguments)
}

/// Pays for a text of `bytes` bytes.
///
/// # Errors
/// When the fuel does not suffice.
pub(crate) fn pay_for(state: &State, bytes: usize) -> Result<(), Error> {
    state.consume_fuel((bytes / BYTES_PER_FUEL) as u64)
}

/// A copy of `value` that JSON can be written from: a tree of bounded depth, whose text with
/// `indent` is paid for.
pub(crate) fn json_tree(state: &State, value: &Value, indent: usize) -> Result<Value, Error> {
    Walk { state, indent, keep: false }.plain(value, 0)
}

struct Walk<'a, 't, 'e> {
    state: &'a State<'t, 'e>,
    /// Bytes that a level of nesting adds to the text of a node.
    indent: usize,
    /// Whether the value is kept, which macros, loops and the like cannot be: they hold others.
    keep: bool,
}

impl Walk<'_, '_, '_> {
    fn plain(&self, value: &Value, depth: usize) -> Result<Value, Error> {
        let refused = |message: String| Err(Error::new(ErrorKind::InvalidOperation, message));
        if depth > MAX_DEPTH {
            return refused(format!("a value is nested more than {MAX_DEPTH} levels deep"));
        }
        // A character takes six bytes of JSON at most.
        let text = value.as_str().map_or(0, |text| text.len().saturating_mul(6));
        let bytes = self.indent.saturating_mul(depth).saturating_add(text) / BYTES_PER_FUEL;
        self.state.consume_fuel(1 + bytes as u64)?;
        match value.kind() {
            ValueKind::Map => {
                let Some(object) = value.as_object() else { return Ok(value.clone()) };
                let Some(pairs) = object.try_iter_pairs() else { return Ok(value.clone()) };
                let mut copy = Vec::new();
                for (key, value) in pairs {
                    copy.push((self.plain(&key, depth + 1)?, self.plain(&value, depth + 1)?));
                }
                Ok(Value::from_pairs(copy))
            }
            ValueKind::Seq | ValueKind::Iterable => {
                let mut copy = Vec::new();
                for item in value.try_iter()?.checked() {
                    copy.push(self.plain(&item?, depth + 1)?);
                }
                Ok(if value.is_tuple() { Tuple::from(copy).into() } else { copy.into() })
            }
            ValueKind::Plain if self.keep => {
                refused("a namespace holds texts, numbers, lists and dictionaries only".into())
            }
            _ => Ok(value.clone()),
        }
    }
}

/// Runs `work` on a stack that is large enough for every template that is accepted.
///
/// # Errors
/// When there is no memory for the thread, or the template engine panics.
pub(crate) fn on_large_stack<T: Send>(work: impl FnOnce() -> T + Send) -> io::Result<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("template".into()).stack_size(STACK_BYTES);
        let joined = thread.spawn_scoped(scope, work)?.join();
        joined.map_err(|_| io::Error::other("the template engine failed"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_values_for_namespaces_are_wrapped() {
        let cases = [
            ("{% set a = b.c %}{{ set.x = 1 }}", "{% set a = b.c %}{{ set.x = 1 }}"),
            ("{%- set n.a=b -%}x", "{%- set n.a= (b )|firesteel_held -%}x"),
            ("{% set n.a = 1, 'a %} = ' %}", "{% set n.a = ( 1, 'a %} = ' )|firesteel_held %}"),
            ("{% set (n.a, b) = c %}", "{% set (n.a, b) = ( c )|firesteel_held %}"),
            ("{% set n.a %}t{% endset %}", "{% set n.a %}t{% endset %}"),
            ("{% set n.a|trim %}t{% endset %}", "{% set n.a|trim |firesteel_held %}t{% endset %}"),
            ("{# {% set n.a = 1 %} #}é{{ '{% set n.a = 1 %}' }}", ""),
            ("{% raw %}{% set n.a = 1 %}{% endraw %}", ""),
        ];
        for (source, expected) in cases {
            let bounded = bounded_source(source, SyntaxConfig::default()).unwrap();
            assert_eq!(bounded, if expected.is_empty() { source } else { expected });
        }
    }
}
