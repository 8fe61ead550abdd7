//! The names under which values have ranges: the same for every slice, number of tokens, cache
//! layout and number of head graphs, so that one calibration of a model serves all its graphs.

use firesteel_graph::{Graph, Part, ValueId};
use firesteel_step::{Role, StepSpec};

/// The name of a value of a graph of `spec` in the ranges.
///
/// What the contract takes and returns has the name of what it is within the model; a value within the
/// graph has its own name, without the graph's where the vocabulary projection is a graph of its own.
pub(crate) fn range_key(graph: &Graph, id: ValueId, spec: &StepSpec) -> String {
    let name = graph.value(id).name.as_str();
    let first = spec.first_layer;
    let residual = |layer: usize| format!("layers.{layer}.residual");
    let entry =
        |layer: usize, kind: &str| format!("layers.{}.attention.{kind}_entry", first + layer);
    let contract = spec.inputs.iter().chain(&spec.outputs).find(|tensor| tensor.name == name);
    match contract.map(|tensor| tensor.role) {
        Some(Role::KeyNew(layer)) => return entry(layer, "k"),
        Some(Role::ValueNew(layer)) => return entry(layer, "v"),
        Some(Role::Embedding) if first > 0 => return residual(first - 1),
        // The input of the graphs behind a step is its output.
        Some(Role::Hidden) => return residual(first + spec.layers.len() - 1),
        _ => {}
    }
    let part = graph.producer(id).and_then(|node| node.tag).map(|tag| tag.part);
    if part == Some(Part::Vocabulary) {
        return LOGITS.into();
    }
    let own = name.strip_prefix(graph.name()).and_then(|rest| rest.strip_prefix('.'));
    own.unwrap_or(name).to_owned()
}

/// The key of logits.
pub(crate) const LOGITS: &str = "logits";

#[cfg(test)]
mod tests {
    use super::*;
    use firesteel_checkpoint::{Checkpoint, RandomWeights, preset};
    use firesteel_export::{Dialect, ExportOptions, Gelu, Precision, build};
    use firesteel_step::{CacheLayoutChoice, Logits};

    #[test]
    fn values_have_the_same_key_in_every_graph() {
        let config = preset("spark-x2.5-1.7b").unwrap();
        let checkpoint = Checkpoint::random(config, RandomWeights::default());
        let options = ExportOptions {
            tokens: 2,
            context: 16,
            layers: 0..28,
            cache_layout: CacheLayoutChoice::Auto,
            logits: Logits::All,
            gelu: Gelu::Exact,
            precision: Precision::Fp32,
            dialect: Dialect::Qnn,
            head_shards: 1,
        };
        let whole = build(&checkpoint, &options).unwrap();
        let sharded =
            build(&checkpoint, &ExportOptions { head_shards: 8, ..options.clone() }).unwrap();
        let part = ExportOptions { layers: 4..8, logits: Logits::Hidden, ..options };
        let slice = build(&checkpoint, &part).unwrap();
        let head = &sharded.heads[7].graph;
        for (graph, spec, value, expected) in [
            (&whole.graph, &whole.spec, "x", "x"),
            (&slice.graph, &slice.spec, "x", "layers.3.residual"),
            (&sharded.graph, &sharded.spec, "hidden", "layers.27.residual"),
            (&slice.graph, &slice.spec, "hidden", "layers.7.residual"),
            (head, &sharded.spec, "hidden", "layers.27.residual"),
            (&whole.graph, &whole.spec, "k_new_2", "layers.2.attention.k_entry"),
            (&slice.graph, &slice.spec, "k_new_2", "layers.6.attention.k_entry"),
            (&slice.graph, &slice.spec, "v_new_0", "layers.4.attention.v_entry"),
            (&slice.graph, &slice.spec, "layers.5.mlp.up", "layers.5.mlp.up"),
            (&whole.graph, &whole.spec, "logits", "logits"),
            (&whole.graph, &whole.spec, "logits.rows", "logits"),
            (head, &sharded.spec, "logits_7", "logits"),
            (head, &sharded.spec, "logits_7.rows", "logits"),
            (head, &sharded.spec, "head_7.head.norm", "head.norm"),
            (&whole.graph, &whole.spec, "head.norm", "head.norm"),
        ] {
            let id = graph.find(value).unwrap_or_else(|| panic!("no {value}"));
            assert_eq!(range_key(graph, id, spec), expected, "{value} of {}", graph.name());
        }
    }
}
