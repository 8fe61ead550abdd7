use crate::Dialect;
use firesteel_graph::{Graph, Op};
use firesteel_tensor::DType;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Something in a graph that its reader rejects or mistreats.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// Name of the rule.
    pub rule: String,
    /// Node or value.
    pub place: String,
    /// What is wrong there.
    pub problem: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {}: {}", self.rule, self.place, self.problem)
    }
}

/// Largest rank that Qualcomm's tools take.
const MAXIMUM_RANK: usize = 5;

/// Checks `graph` against what the readers of `dialect` accept. Empty when there is nothing to
/// say.
///
/// Rules: `opset` (operators newer than the dialect's opset), `dtype` (only float values at the
/// border and inside; no 64-bit integers), `rank` (at most 5), `empty` (no axis of length 0),
/// `spelling` (operators that the reader does not keep as one op or runs elsewhere), `constant`
/// (a linear layer's weight is a constant of rank 2), `name` (plain ASCII, so that no reader
/// renames it).
pub fn lint(graph: &Graph, dialect: Dialect) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut report = |rule: &str, place: &str, problem: String| {
        findings.push(Finding { rule: rule.into(), place: place.into(), problem });
    };
    for value in graph.values() {
        if !matches!(value.dtype, DType::F32 | DType::F16) {
            report("dtype", &value.name, format!("{} is not a float type", value.dtype));
        }
        if value.shape.len() > MAXIMUM_RANK {
            report("rank", &value.name, format!("rank {} is above 5", value.shape.len()));
        }
        if value.shape.contains(&0) {
            report("empty", &value.name, format!("shape {:?} has no elements", value.shape));
        }
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '/' | '-');
        if !value.name.chars().all(plain) {
            report("name", &value.name, "has characters that readers replace".into());
        }
    }
    for node in graph.nodes() {
        if node.op.since_opset() > dialect.opset() {
            let (since, opset) = (node.op.since_opset(), dialect.opset());
            report("opset", &node.name, format!("needs opset {since}, the dialect has {opset}"));
        }
        let refused = match (&node.op, dialect) {
            (Op::Erf, Dialect::Qnn) => Some("Erf stays on the CPU once quantized; use Gelu"),
            (Op::Cast { .. }, Dialect::Qnn) => Some("the processor has one float width"),
            _ => None,
        };
        if let Some(reason) = refused {
            report("spelling", &node.name, format!("{}: {reason}", node.op.name()));
        }
        if node.op == Op::Gemm && graph.constant(node.inputs[1]).is_none() {
            report("constant", &node.name, "the weight is not a constant".into());
        }
    }
    findings
}
