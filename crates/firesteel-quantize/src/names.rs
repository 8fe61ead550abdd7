//! The names under which values have ranges: the same for every slice, number of tokens, cache
//! layout and number of head graphs, so that one calibration of a model serves all its graphs.

use firesteel_step::StepSpec;

/// The name of `value` of a graph of `spec` in the ranges.
pub(crate) fn range_key(value: &str, spec: &StepSpec) -> String {
    let first = spec.first_layer;
    let after = first + spec.layers.len();
    let entry = |prefix: &str, kind: &str| {
        let layer: usize = value.strip_prefix(prefix)?.parse().ok()?;
        Some(format!("layers.{}.attention.{kind}_entry", first + layer))
    };
    if let Some(key) = entry("k_new_", "k").or_else(|| entry("v_new_", "v")) {
        return key;
    }
    match value {
        "x" if first > 0 => return format!("layers.{}.residual", first - 1),
        "hidden" => return format!("layers.{}.residual", after - 1),
        _ => {}
    }
    let name = value.strip_suffix(".rows").unwrap_or(value);
    let part = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if name == "logits" || name.strip_prefix("logits_").is_some_and(part) {
        return "logits".into();
    }
    // Values of a head graph bear its name before their own.
    match value.strip_prefix("head_").and_then(|rest| rest.split_once('.')) {
        Some((number, rest)) if part(number) => rest.to_owned(),
        _ => value.to_owned(),
    }
}
