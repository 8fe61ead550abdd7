//! Hostile chat templates must end with an error, whatever memory and stack they ask for. The
//! system holds the limit: a process that exceeds it is aborted.

use firesteel_generate::{ChatTemplate, Conversation, Message, MessageRole};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::path::Path;
use std::process::Command;

const FOLDER: &str = "FIRESTEEL_TEST_FOLDER";
/// What a template may take besides the stack of its thread.
const LIMIT: u64 = 512 << 20;

/// The body of the child process; nothing when run as a test of its own.
#[test]
fn child_renders_under_a_limit() {
    let Some(folder) = std::env::var_os(FOLDER) else { return };
    let hard = getrlimit(Resource::Data).maximum;
    setrlimit(Resource::Data, Rlimit { current: Some(LIMIT), maximum: hard }).unwrap();
    let conversation = Conversation {
        messages: vec![Message::text(MessageRole::User, "hello")],
        ..Conversation::default()
    };
    let rendered = ChatTemplate::open(Path::new(&folder)).and_then(|t| t.render(&conversation));
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let peak = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    match rendered {
        Ok(text) => println!("rendered {} bytes; {peak}", text.len()),
        Err(error) => println!("error: {error}; {peak}"),
    }
}

fn hostile_templates() -> Vec<(&'static str, String, &'static str)> {
    let fuel = "takes more instructions or memory than any chat needs";
    let double = |body: &str| {
        format!(
            "{{% set n = namespace(s='0123456789abcdef') %}}{{% for i in range(64) %}}\
             {{% set n.s = {body} %}}{{% endfor %}}{{{{ n.s|length }}}}"
        )
    };
    let grow = |body: &str| {
        format!(
            "{{% set n = namespace(v=[]) %}}{{% for i in range(99999) %}}\
             {{% set n.v = {body} %}}{{% endfor %}}{{{{ n.v }}}}"
        )
    };
    let nested = "a value is nested more than 200 levels deep";
    let long = "the template has more than 20000 tokens";
    let run = |text: &str, count: usize| format!("{{{{ {}1 }}}}", text.repeat(count));
    let brackets =
        |open: &str, close: &str| format!("{{{{ {}{} }}}}", open.repeat(9000), close.repeat(9000));
    let chain = |text: &str| format!("{{{{ messages{} }}}}", text.repeat(6000));
    vec![
        ("tilde", double("n.s ~ n.s"), fuel),
        ("plus", double("n.s + n.s"), fuel),
        ("times", double("n.s * 4"), fuel),
        ("replace", double("n.s|replace('0', n.s)"), fuel),
        ("method replace", double("n.s.replace('0', n.s)"), fuel),
        ("empty replace", double("n.s.replace('', n.s)"), fuel),
        ("join", double("[n.s, n.s, n.s]|join(n.s)"), fuel),
        ("method join", double("n.s.join([n.s, n.s, n.s])"), fuel),
        ("text of lists", double("[n.s, n.s]|string"), fuel),
        ("list of lists", double("[n.s, n.s]"), fuel),
        ("list sum", double("(n.s|list) + (n.s|list)"), fuel),
        ("lines", double("(n.s ~ '\n' ~ n.s).splitlines() ~ ''"), fuel),
        (
            "capture",
            "{% set n = namespace(s='abc') %}{% for i in range(64) %}{% set n.s %}\
          {{ n.s }}{{ n.s }}{% endset %}{% endfor %}{{ n.s }}"
                .into(),
            fuel,
        ),
        ("output", "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}".into(), fuel),
        ("indent", "{{ ('a\n' * 9999)|indent(999999) }}".into(), fuel),
        ("json indent", "{{ [[1,2,3]]|tojson(indent=9999999999) }}".into(), fuel),
        (
            "json of shared lists",
            "{% set a = [1, 1, 1, 1, 1, 1, 1, 1, 1, 1] %}".to_owned()
                + &"{% set a = [a, a, a, a, a, a, a, a, a, a] %}".repeat(12)
                + "{{ a|tojson }}",
            fuel,
        ),
        ("format width", "{{ '%999999999d'|format(1) }}".into(), ""),
        ("format precision", "{{ '%.999999999f'|format(1.5) }}".into(), ""),
        ("method format", "{{ '{:>999999999}'.format(1) }}".into(), ""),
        ("repeat", "{{ 'x' * 999999999999 }}".into(), ""),
        ("repeat a list", "{{ ([1] * 99999999)|list|length }}".into(), fuel),
        (
            "keep a lazy list",
            "{% set n = namespace() %}{% set n.a = [1] * 99999999 %}".into(),
            fuel,
        ),
        ("batch", "{{ [1]|batch(999999999, 0)|list|length }}".into(), fuel),
        ("slice", "{{ [1]|slice(999999999)|list|length }}".into(), fuel),
        ("range", "{{ range(99999999999)|list|length }}".into(), ""),
        ("strftime", "{{ strftime_now('%B' * 9999999)|length }}".into(), fuel),
        ("nested lists", grow("[n.v]"), nested),
        ("nested dictionaries", grow("{'a': n.v}"), nested),
        ("nested slices", grow("[n.v[0:]]"), nested),
        ("nested items", grow("[n.v, {'a': 1}.items()]"), nested),
        ("nested namespaces", grow("namespace(v=n.v)"), nested),
        ("a namespace in itself", grow("[n]"), nested),
        (
            "a function kept",
            "{% set n = namespace(f=1) %}{% set n.f = range %}".into(),
            "a namespace holds texts, numbers, lists and dictionaries only",
        ),
        ("method format of a long text", "{{ ('{0}' * 9999).format('x' * 999999) }}".into(), fuel),
        ("join of a long list", "{{ (['x' * 999999] * 9999)|join }}".into(), fuel),
        (
            "join of an attribute",
            "{{ ([{'a': {'b': 'x' * 999999}}] * 9999)|join(',', attribute='a.b') }}".into(),
            fuel,
        ),
        ("method join of a long list", "{{ ''.join(['x' * 999999] * 9999) }}".into(), fuel),
        ("method split", "{{ ('x' * 99999999).split('')|length }}".into(), fuel),
        ("method splitlines", "{{ ('\n' * 99999999).splitlines()|length }}".into(), fuel),
        (
            "macros that hold macros",
            "{% set n = namespace(f=1) %}{% for i in range(99999) %}\
          {% set g = n.f %}{% macro f() %}{{ g }}{% endmacro %}{% set n.f = f %}{% endfor %}"
                .into(),
            fuel,
        ),
        (
            "filtered capture",
            "{% set n = namespace(v=[1]) %}{% for i in range(99999) %}\
          {% set n.v|length|default(1)|batch(1, [n.v])|list %}a{% endset %}{% endfor %}"
                .into(),
            "",
        ),
        ("recursive macro", "{% macro f(x) %}{{ f([x]) }}{% endmacro %}{{ f(1) }}".into(), ""),
        ("recursive include", "{% include 'default' %}".into(), ""),
        ("recursive loop", "{% for a in [1] recursive %}{{ loop([a]) }}{% endfor %}".into(), ""),
        ("many nots", run("not ", 19000), ""),
        ("many minuses", run("- ", 19000), ""),
        ("too many minuses", run("- ", 90000), long),
        ("too many nots", run("not ", 90000), long),
        ("parentheses", brackets("(", ")"), ""),
        ("too many parentheses", format!("{{{{ {}", "(".repeat(90000)), long),
        ("lists", brackets("[", "]"), ""),
        ("dictionaries", brackets("{1:", "}"), ""),
        ("calls", brackets("f(", ")"), ""),
        ("subscripts", brackets("a[", "]"), ""),
        ("filters", chain("|list"), ""),
        ("methods", chain(".a"), ""),
        ("sums", chain("~1"), ""),
        ("powers", chain("**1"), ""),
        ("comparisons", chain("==1"), ""),
        ("ands", chain(" and 1"), ""),
        ("tests", chain(" is defined"), ""),
        ("choices", chain(" if 1 else 2"), ""),
        ("blocks", "{% if 1 %}".repeat(6000), ""),
        ("elifs", format!("{{% if 0 %}}{}{{% endif %}}", "{% elif 0 %}".repeat(5000)), ""),
        ("unrolled lists", "{% set a = [a] %}".repeat(2400) + "{{ a }}{{ a|string|length }}", ""),
    ]
}

#[test]
fn memory_and_stack_stay_within_limits() {
    let mut failures = Vec::new();
    for (name, source, expected) in hostile_templates() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("chat_template.jinja"), source).unwrap();
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "template_limits::child_renders_under_a_limit", "--nocapture"])
            .env(FOLDER, folder.path())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&child.stdout).into_owned();
        let line = said.lines().find(|line| line.contains("VmHWM")).unwrap_or("nothing");
        if !child.status.success() || !line.contains(expected) {
            let said: String = line.chars().take(300).collect();
            failures.push(format!("{name}: {}: {said}", child.status));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
