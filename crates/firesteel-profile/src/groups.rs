use crate::{OperatorTimes, Provenance, Quantity};
use firesteel_check::audit::{NodeTraffic, Schematic};
use firesteel_graph::{Node, Part, Tag};
use serde::Serialize;
use std::fmt;

/// What an operator of a step is there for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Group {
    /// The three matrices of the feed-forward layer and the product of its halves.
    Mlp,
    /// The activation, in however many operators: GELU or another.
    Gelu,
    /// The matrices of attention: queries, keys and values, gate and output.
    Projections,
    /// Scores and the mix of the values.
    AttentionProducts,
    /// The rest of attention: rotation, scaling, mask, softmax, gates.
    Attention,
    /// RMSNorm, in however many operators.
    Norms,
    /// Joining, cutting and transposing caches.
    CacheMoves,
    /// Additions to the residual stream.
    Residual,
    /// The vocabulary projection.
    Head,
    /// Inputs and outputs of the graph.
    GraphInputOutput,
    /// Changes of the element type.
    Conversions,
    /// What bears no name of our graphs.
    Other,
}

impl Group {
    /// All of them, in the order of reports.
    pub const ALL: [Self; 12] = [
        Self::Mlp,
        Self::Gelu,
        Self::Projections,
        Self::AttentionProducts,
        Self::Attention,
        Self::Norms,
        Self::CacheMoves,
        Self::Residual,
        Self::Head,
        Self::GraphInputOutput,
        Self::Conversions,
        Self::Other,
    ];

    /// The name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Mlp => "MLP matmuls",
            Self::Gelu => "GELU",
            Self::Projections => "projections",
            Self::AttentionProducts => "attention matmuls",
            Self::Attention => "attention, the rest",
            Self::Norms => "norms",
            Self::CacheMoves => "cache moves",
            Self::Residual => "residual",
            Self::Head => "head",
            Self::GraphInputOutput => "graph input/output",
            Self::Conversions => "conversions",
            Self::Other => "other",
        }
    }

    /// The group of a node of a graph.
    pub fn of_node(node: &Node) -> Self {
        Self::of_tag(node.tag, node.op.name())
    }

    /// The group of an operator that is there for `tag`.
    pub fn of_tag(tag: Option<Tag>, operator: &str) -> Self {
        let operator = normalized(operator);
        if CONVERSIONS.contains(&operator.as_str()) {
            return Self::Conversions;
        }
        let moves = MOVES.contains(&operator.as_str());
        match tag.map(|tag| tag.part) {
            None => Self::Other,
            Some(Part::Border) => Self::GraphInputOutput,
            Some(Part::AttentionNorm | Part::HeadNorm | Part::MlpNorm | Part::FinalNorm) => {
                Self::Norms
            }
            Some(
                Part::QueryKeyValue
                | Part::Query
                | Part::Key
                | Part::Value
                | Part::HeadGateProjection
                | Part::AttentionOut,
            ) => Self::Projections,
            Some(Part::Entry) if moves => Self::CacheMoves,
            Some(Part::Rotation | Part::Entry | Part::Attention | Part::HeadGate) => {
                Self::Attention
            }
            Some(Part::Cache) => Self::CacheMoves,
            Some(Part::Scores | Part::Mix) => Self::AttentionProducts,
            Some(Part::AttentionResidual | Part::MlpResidual) => Self::Residual,
            Some(Part::MlpGate | Part::MlpUp | Part::MlpProduct | Part::MlpDown) => Self::Mlp,
            Some(Part::Activation) => Self::Gelu,
            Some(Part::LastToken | Part::Vocabulary) => Self::Head,
            Some(Part::Conversion) => Self::Conversions,
        }
    }

    /// The group of a node of a compiler's plan.
    fn of_traffic(node: &NodeTraffic) -> Self {
        Self::of_tag(node.tag, node.operator.as_deref().unwrap_or_default())
    }

    /// The group of an operator in another tool's report, which has names alone: that of one of our nodes,
    /// however the tool has spelled its
    /// punctuation and whatever it has added behind. `operator` is the operator's type where the
    /// source has it: conversions go by it, because they bear the name of what they convert.
    pub fn of(name: &str, operator: Option<&str>) -> Self {
        let kind = normalized(operator.unwrap_or_default());
        if CONVERSIONS.contains(&kind.as_str()) {
            return Self::Conversions;
        }
        let name = normalized(name);
        if CONVERSIONS.iter().any(|kind| has_word(&name, kind)) {
            return Self::Conversions;
        }
        // Parts of a sharded head put their own name before the node's.
        let own = numbered(&name, "layers_").or_else(|| numbered(&name, "head_")).unwrap_or(&name);
        let moves = |name: &str| MOVES.iter().any(|op| has_word(name, op));
        for entry in ["k_new_", "v_new_"] {
            if let Some(rest) = numbered_end(own, entry) {
                let moved = moves(rest) || moves(&kind);
                return if moved { Self::CacheMoves } else { Self::Attention };
            }
        }
        let table = PREFIXES.iter().find(|(prefix, _)| {
            own.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('_'))
        });
        table.map_or(Self::Other, |(_, group)| *group)
    }
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Types of operators that change the element type, normalized.
const CONVERSIONS: [&str; 6] =
    ["quantizelinear", "dequantizelinear", "quantize", "dequantize", "convert", "cast"];

/// Types of operators that join and cut, normalized.
const MOVES: [&str; 3] = ["concat", "slice", "stridedslice"];

/// Beginnings of normalized names within a layer or outside of all, longer ones first.
const PREFIXES: [(&str, Group); 37] = [
    ("attention_norm", Group::Norms),
    ("mlp_norm", Group::Norms),
    ("head_norm", Group::Norms),
    ("mlp_gelu", Group::Gelu),
    ("mlp_silu", Group::Gelu),
    ("mlp_gate", Group::Mlp),
    ("mlp_up", Group::Mlp),
    ("mlp_down", Group::Mlp),
    ("mlp_product", Group::Mlp),
    ("attention_qkv", Group::Projections),
    ("attention_q_rows", Group::Projections),
    ("attention_k_rows", Group::Projections),
    ("attention_v_rows", Group::Projections),
    ("attention_q_norm", Group::Norms),
    ("attention_k_norm", Group::Norms),
    ("attention_parts", Group::Projections),
    ("attention_gate_rows", Group::Projections),
    ("attention_out_rows", Group::Attention),
    ("attention_out", Group::Projections),
    ("attention_scores", Group::AttentionProducts),
    ("attention_mixed", Group::AttentionProducts),
    ("attention_keys", Group::CacheMoves),
    ("attention_values", Group::CacheMoves),
    ("attention_residual", Group::Residual),
    ("residual", Group::Residual),
    ("attention", Group::Attention),
    ("logits", Group::Head),
    ("head_last", Group::Head),
    ("x_rows", Group::GraphInputOutput),
    ("hidden", Group::GraphInputOutput),
    ("border", Group::GraphInputOutput),
    ("input", Group::GraphInputOutput),
    ("output", Group::GraphInputOutput),
    ("inputs", Group::GraphInputOutput),
    ("outputs", Group::GraphInputOutput),
    ("k_cache", Group::GraphInputOutput),
    ("v_cache", Group::GraphInputOutput),
];

/// A name in lower case with `_` for everything that is neither a letter nor a digit, and none at
/// its ends.
fn normalized(name: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '_' };
    let text: String = name.chars().map(plain).collect();
    text.trim_matches('_').to_owned()
}

/// What follows `prefix`, a number and `_`.
fn numbered<'a>(name: &'a str, prefix: &str) -> Option<&'a str> {
    numbered_end(name, prefix)?.strip_prefix('_')
}

/// What follows `prefix` and a number.
fn numbered_end<'a>(name: &'a str, prefix: &str) -> Option<&'a str> {
    let rest = name.strip_prefix(prefix)?;
    let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
    if digits == 0 { None } else { rest.get(digits..) }
}

/// Whether a name has a word, words being what stands between `_`.
fn has_word(name: &str, word: &str) -> bool {
    name.split('_').any(|part| part == word)
}

/// The share of a group.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct GroupShare {
    /// The group.
    pub group: Group,
    /// Operators in it.
    pub operators: usize,
    /// The sum of their amounts.
    pub amount: f64,
    /// That sum divided by the one over all operators; 0 when nothing has an amount.
    pub share: f64,
}

/// Amounts by group. Nothing is left out: what bears no known name is in [`Group::Other`].
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Grouped {
    /// What the amounts count.
    pub quantity: Quantity,
    /// How they came about.
    pub provenance: Provenance,
    /// What they are from.
    pub source: String,
    /// The sum of all amounts.
    pub total: f64,
    /// Groups that have operators, the largest first.
    pub groups: Vec<GroupShare>,
}

impl Grouped {
    /// The groups of a list of operators.
    pub fn of(times: &OperatorTimes) -> Self {
        let operators = times.operators.iter().map(|operator| {
            (Group::of(&operator.name, operator.operator.as_deref()), operator.amount)
        });
        Self::from_amounts(times.quantity, times.provenance, times.source.clone(), operators)
    }

    /// The bytes that the compiler plans to read from memory and write to it, by group. What it
    /// fuses counts with one of the nodes: the matrix before an activation may count as [`Group::Gelu`].
    pub fn of_memory_traffic(schematic: &Schematic, source: String) -> Self {
        let nodes = schematic.nodes.iter().map(|node| {
            let bytes = node.traffic.dram_read.saturating_add(node.traffic.dram_write);
            (Group::of_traffic(node), bytes as f64)
        });
        Self::from_amounts(Quantity::Bytes, Provenance::Compiled, source, nodes)
    }

    /// The bytes that the compiler plans to move within the tightly coupled memory, by group.
    pub fn of_vtcm_traffic(schematic: &Schematic, source: String) -> Self {
        let nodes = schematic.nodes.iter().map(|node| {
            let bytes = node.traffic.vtcm_read.saturating_add(node.traffic.vtcm_write);
            (Group::of_traffic(node), bytes as f64)
        });
        Self::from_amounts(Quantity::Bytes, Provenance::Compiled, source, nodes)
    }

    pub(crate) fn from_amounts(
        quantity: Quantity,
        provenance: Provenance,
        source: String,
        amounts: impl Iterator<Item = (Group, f64)>,
    ) -> Self {
        let mut groups: Vec<GroupShare> = Group::ALL
            .into_iter()
            .map(|group| GroupShare { group, operators: 0, amount: 0.0, share: 0.0 })
            .collect();
        for (group, amount) in amounts {
            if let Some(sum) = groups.iter_mut().find(|sum| sum.group == group) {
                sum.operators += 1;
                sum.amount += amount;
            }
        }
        let total: f64 = groups.iter().map(|group| group.amount).sum();
        groups.retain(|group| group.operators > 0);
        for group in &mut groups {
            group.share = if total > 0.0 { group.amount / total } else { 0.0 };
        }
        // Stable: equal amounts stay in the order of reports.
        groups.sort_by(|a, b| b.amount.total_cmp(&a.amount));
        Self { quantity, provenance, source, total, groups }
    }

    /// The share of a group; 0 when it has no operators.
    pub fn share(&self, group: Group) -> f64 {
        self.groups.iter().find(|found| found.group == group).map_or(0.0, |found| found.share)
    }
}
