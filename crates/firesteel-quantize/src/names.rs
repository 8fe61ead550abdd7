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

#[cfg(test)]
mod tests {
    use super::*;
    use firesteel_checkpoint::{ModelConfig, preset};
    use firesteel_step::StepOptions;
    use firesteel_step::{CacheLayoutChoice, Logits};
    use firesteel_tensor::DType;

    #[test]
    fn values_have_the_same_key_in_every_graph() {
        let config: ModelConfig = preset("spark-x2.5-1.7b").unwrap();
        let spec = |layers| {
            let options = StepOptions {
                tokens: 1,
                context: 16,
                layers,
                cache_layout: CacheLayoutChoice::Auto,
                logits: Logits::Hidden,
                dtype: DType::F32,
            };
            StepSpec::new(&config, &options).unwrap()
        };
        let (whole, slice) = (spec(0..28), spec(4..8));
        for (value, in_whole, in_slice) in [
            ("x", "x", "layers.3.residual"),
            ("hidden", "layers.27.residual", "layers.7.residual"),
            ("k_new_2", "layers.2.attention.k_entry", "layers.6.attention.k_entry"),
            ("v_new_0", "layers.0.attention.v_entry", "layers.4.attention.v_entry"),
            ("layers.5.mlp.up", "layers.5.mlp.up", "layers.5.mlp.up"),
            ("logits.rows", "logits", "logits"),
            ("logits_7", "logits", "logits"),
            ("logits_7.rows", "logits", "logits"),
            ("head_2.head.norm", "head.norm", "head.norm"),
            ("head.norm", "head.norm", "head.norm"),
        ] {
            assert_eq!(range_key(value, &whole), in_whole);
            assert_eq!(range_key(value, &slice), in_slice);
        }
    }
}
