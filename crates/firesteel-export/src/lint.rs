use crate::Dialect;
use firesteel_graph::{Constant, Graph, Node, Op, ValueId};
use firesteel_tensor::DType;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fmt;

/// Something in a graph that its reader rejects or mistreats.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LintFinding {
    /// Name of the rule.
    pub rule: String,
    /// Node or value.
    pub place: String,
    /// What is wrong there.
    pub problem: String,
}

impl fmt::Display for LintFinding {
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
/// border and inside, and in the qnn dialect integers of at most 16 bits that are quantized floats;
/// no 64-bit integers), `rank` (at most 5), `empty` (no axis of length 0), `spelling` (operators
/// that the reader does not keep as one op or runs elsewhere), `constant` (a linear layer's weight
/// is a constant of rank 2, quantized or not, and so are scales and zero points), `name` (plain
/// ASCII, so that no reader renames it). For quantized operators also `unquantized`, `mixed`,
/// `operands` and `weight`: what would run in floats without a word.
pub fn lint(graph: &Graph, dialect: Dialect) -> Vec<LintFinding> {
    let mut findings = Vec::new();
    let mut report = |rule: &str, place: &str, problem: String| {
        findings.push(LintFinding { rule: rule.into(), place: place.into(), problem });
    };
    for value in graph.values() {
        let integer = dialect == Dialect::Qnn && value.dtype.integer_range().is_some();
        if !integer && !matches!(value.dtype, DType::F32 | DType::F16) {
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
            (Op::Cast { .. }, Dialect::Qnn) if !beside_integers(graph) => {
                Some("the processor has one float width")
            }
            _ => None,
        };
        if let Some(reason) = refused {
            report("spelling", &node.name, format!("{}: {reason}", node.op.name()));
        }
        if node.op == Op::Gemm && linear_weight(graph, node).is_none() {
            report("constant", &node.name, "the weight is not a constant".into());
        }
        if is_border(&node.op)
            && node.inputs[1..].iter().any(|parameter| graph.constant(*parameter).is_none())
        {
            report("constant", &node.name, "a scale or zero point is not a constant".into());
        }
    }
    quantized(graph, &mut report);
    findings
}

fn is_border(op: &Op) -> bool {
    matches!(op, Op::QuantizeLinear { .. } | Op::DequantizeLinear { .. })
}

/// The node that makes a value.
fn maker(graph: &Graph, id: ValueId) -> Option<&Node> {
    graph.nodes().iter().find(|node| node.outputs.contains(&id))
}

/// The constant that a linear layer (`Gemm`) multiplies with, which may be dequantized in between;
/// `None` for other nodes.
pub fn linear_weight(graph: &Graph, node: &Node) -> Option<ValueId> {
    let id = *node.inputs.get(1).filter(|_| node.op == Op::Gemm)?;
    if graph.constant(id).is_some() {
        return Some(id);
    }
    let from = maker(graph, id).filter(|m| matches!(m.op, Op::DequantizeLinear { .. }))?.inputs[0];
    graph.constant(from).map(|_| from)
}

/// Checks operators between a `DequantizeLinear` and a `QuantizeLinear`. A compiler for integers
/// makes one operation of each, or silently computes it in floats where it has none:
/// - `unquantized`: every operand that is no constant is dequantized, or none is; and then every
///   result is quantized and read by nothing else. Only the products of attention may have float
///   operands (keys and values that stay floats), and a Cast may stand between integers and a
///   linear layer in half precision.
/// - `mixed`: operands and results that vary have one type. The second operand of a product may be
///   a signed 16-bit number of zero point 0 under 16-bit activations, or one of 8 bits.
/// - `operands`: the products that do not exist: u16 by u16, 8 bits by 16 bits.
/// - `weight`: a weight has symmetric integers, 4 or 8 bits wide with a scale a row or one for all,
///   or 16 bits wide with one for all. A weight in floats directly between integers is turned into
///   integers with one scale for all by ONNX Runtime's QNN provider, without a word.
fn quantized(graph: &Graph, report: &mut dyn FnMut(&str, &str, String)) {
    let mut makers: HashMap<ValueId, &Node> = HashMap::new();
    let mut readers: HashMap<ValueId, Vec<&Node>> = HashMap::new();
    for node in graph.nodes() {
        makers.extend(node.outputs.iter().map(|id| (*id, node)));
        node.inputs.iter().for_each(|id| readers.entry(*id).or_default().push(node));
    }
    let dequantizer = |id: ValueId| {
        makers.get(&id).copied().filter(|m| matches!(m.op, Op::DequantizeLinear { .. }))
    };
    for node in graph.nodes().iter().filter(|node| !is_border(&node.op)) {
        let varying: Vec<ValueId> = node
            .inputs
            .iter()
            .copied()
            .filter(|id| {
                let from = dequantizer(*id).map_or(*id, |maker| maker.inputs[0]);
                graph.constant(from).is_none()
            })
            .collect();
        let sources: Vec<Option<DType>> = varying
            .iter()
            .map(|id| dequantizer(*id).map(|maker| graph.value(maker.inputs[0]).dtype))
            .collect();
        let results: Vec<Option<DType>> = node
            .outputs
            .iter()
            .map(|id| match readers.get(id).map(|list| &list[..]) {
                Some([only]) if matches!(only.op, Op::QuantizeLinear { .. }) => {
                    Some(graph.value(only.outputs[0]).dtype)
                }
                _ => None,
            })
            .collect();
        let any = sources.iter().chain(&results).any(Option::is_some);
        if !any {
            continue;
        }
        if node.op == Op::Gemm {
            weight_format(graph, node, report);
        }
        let types: Vec<DType> = sources.iter().chain(&results).flatten().copied().collect();
        let complete = types.len() == sources.len() + results.len();
        // Keys and values in floats: their products and what is joined to the caches.
        let attention = matches!(node.op, Op::MatMul | Op::Concat { .. });
        let seam = matches!(node.op, Op::Cast { .. });
        if !complete && !attention && !seam {
            let problem = "some operands or results are quantized and others are not, so the \
                           operator runs in floats";
            report("unquantized", &node.name, format!("{}: {problem}", node.op.name()));
        } else if complete && node.op == Op::MatMul {
            let (a, b, y) = (types[0], types[1], types[2]);
            let zero = dequantizer(varying[1]).and_then(|m| graph.constant(m.inputs[2]));
            let symmetric = zero.is_some_and(is_zero);
            let known = match (a, b) {
                (DType::U16, DType::I16) => symmetric,
                (DType::U16, DType::U8 | DType::I8) | (DType::U8, DType::U8 | DType::I8) => true,
                _ => false,
            };
            if !known {
                let problem = "u16 by symmetric i16, and u16 or u8 by u8 or i8 are computed";
                report("operands", &node.name, format!("MatMul of {a} by {b}: {problem}"));
            } else if y != a {
                report("mixed", &node.name, format!("MatMul of {a} gives {y}"));
            }
        } else if complete && types.windows(2).any(|pair| pair[0] != pair[1]) {
            let list: Vec<String> = types.iter().map(DType::to_string).collect();
            let problem = format!("{} of the types {}", node.op.name(), list.join(", "));
            report("mixed", &node.name, format!("{problem}; convert before or after it"));
        }
    }
}

/// Whether every element of a constant is 0.
fn is_zero(constant: &Constant) -> bool {
    matches!(constant, Constant::Tensor(tensor) if tensor.bytes().iter().all(|byte| *byte == 0))
}

/// Whether a graph has integers.
fn beside_integers(graph: &Graph) -> bool {
    graph.nodes().iter().any(|node| matches!(node.op, Op::QuantizeLinear { .. }))
}

/// Checks the quantized weight of a linear layer.
fn weight_format(graph: &Graph, node: &Node, report: &mut dyn FnMut(&str, &str, String)) {
    let Some(maker) = maker(graph, node.inputs[1]) else {
        let problem = "floats between integers become integers with one scale for all";
        return report("weight", &node.name, problem.into());
    };
    let dtype = graph.value(maker.inputs[0]).dtype;
    let by_row = match maker.op {
        Op::DequantizeLinear { axis: Some(0) } => true,
        Op::DequantizeLinear { axis: None } => false,
        _ => {
            report("weight", &node.name, "the scales are not one a row".into());
            return;
        }
    };
    match dtype {
        DType::I4 | DType::I8 => {}
        DType::I16 if !by_row => {}
        _ => report(
            "weight",
            &node.name,
            format!("{dtype}; i4 and i8, or i16 with one scale, are multiplied with"),
        ),
    }
    if !graph.constant(maker.inputs[2]).is_some_and(is_zero) {
        report("weight", &node.name, "the zero points are not 0".into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use firesteel_tensor::Tensor;

    /// A graph that is quantized by hand.
    struct Hand {
        graph: Graph,
        count: usize,
    }

    impl Hand {
        fn constant(&mut self, tensor: Tensor) -> ValueId {
            self.count += 1;
            let (name, dtype) = (format!("c{}", self.count), tensor.dtype());
            let shape = tensor.shape().to_vec();
            self.graph.add_constant(name, dtype, shape, Constant::Tensor(tensor)).unwrap()
        }

        fn border(&mut self, quantizes: bool, x: ValueId, dtype: DType, zero: i32) -> ValueId {
            let scale = self.constant(Tensor::from_f32(vec![], vec![0.5]).unwrap());
            let zero = self.constant(Tensor::from_i32_as(dtype, vec![], &[zero]).unwrap());
            let op = match quantizes {
                true => Op::QuantizeLinear { axis: None },
                false => Op::DequantizeLinear { axis: None },
            };
            self.count += 1;
            self.graph.add(op, &[x, scale, zero], format!("v{}", self.count)).unwrap()
        }

        /// A float input, quantized and read.
        fn operand(&mut self, dtype: DType, zero: i32) -> ValueId {
            self.count += 1;
            let name = format!("i{}", self.count);
            let input = self.graph.input(name, DType::F32, vec![2, 2]).unwrap();
            let q = self.border(true, input, dtype, zero);
            self.border(false, q, dtype, zero)
        }
    }

    /// The rules that a graph of one operator breaks: `a` and `b` quantized like this, the result
    /// like that; `None` for floats.
    fn broken(
        op: Op,
        operands: &[Option<(DType, i32)>],
        result: Option<DType>,
        dialect: Dialect,
    ) -> Vec<String> {
        let mut hand = Hand { graph: Graph::new("one"), count: 0 };
        let inputs: Vec<ValueId> = operands
            .iter()
            .enumerate()
            .map(|(i, operand)| match operand {
                Some((dtype, zero)) => hand.operand(*dtype, *zero),
                None => hand.graph.input(format!("f{i}"), DType::F32, vec![2, 2]).unwrap(),
            })
            .collect();
        let mut y = hand.graph.add(op, &inputs, "y").unwrap();
        if let Some(dtype) = result {
            y = hand.border(true, y, dtype, 0);
        }
        hand.graph.output(y).unwrap();
        hand.graph.validate().unwrap();
        lint(&hand.graph, dialect).into_iter().map(|finding| finding.rule).collect()
    }

    #[test]
    fn operators_that_would_run_in_floats_are_found() {
        use DType::{I8, I16, U8, U16};
        type Case = (Op, Vec<Option<(DType, i32)>>, Option<DType>, &'static [&'static str]);
        let u16 = Some((U16, 7));
        let cases: Vec<Case> = vec![
            (Op::Add, vec![u16, u16], Some(U16), &[]),
            (Op::Add, vec![None, None], None, &[]),
            (Op::Add, vec![u16, u16], Some(U8), &["mixed"]),
            (Op::Add, vec![u16, Some((U8, 0))], Some(U16), &["mixed"]),
            (Op::Add, vec![u16, u16], None, &["unquantized"]),
            (Op::Add, vec![u16, None], Some(U16), &["unquantized"]),
            (Op::Sigmoid, vec![None], Some(U16), &["unquantized"]),
            (Op::MatMul, vec![u16, Some((I16, 0))], Some(U16), &[]),
            (Op::MatMul, vec![u16, Some((I16, 1))], Some(U16), &["operands"]),
            (Op::MatMul, vec![u16, u16], Some(U16), &["operands"]),
            (Op::MatMul, vec![u16, Some((U8, 3))], Some(U16), &[]),
            (Op::MatMul, vec![u16, Some((I8, 0))], Some(U16), &[]),
            (Op::MatMul, vec![Some((U8, 1)), u16], Some(U16), &["operands"]),
            (Op::MatMul, vec![Some((I16, 0)), Some((I16, 0))], Some(U16), &["operands"]),
            (Op::MatMul, vec![Some((U8, 1)), Some((U8, 1))], Some(U8), &[]),
            (Op::MatMul, vec![Some((U8, 1)), Some((U8, 1))], Some(U16), &["mixed"]),
            (Op::MatMul, vec![u16, None], Some(U16), &[]),
        ];
        let mut failures = Vec::new();
        for (op, operands, result, expected) in cases {
            let rules = broken(op.clone(), &operands, result, Dialect::Qnn);
            if rules != expected {
                failures.push(format!("{op:?} {operands:?} {result:?}: {rules:?}"));
            }
        }
        assert!(failures.is_empty(), "{}", failures.join("\n"));
        let portable = broken(Op::Add, &[u16, u16], Some(U16), Dialect::Portable);
        assert!(portable.iter().any(|rule| rule == "dtype"), "{portable:?}");
    }

    #[test]
    fn weights_that_are_not_multiplied_with_as_integers_are_found() {
        // Type, whether a scale a row, axis, zero point.
        let cases = [
            (DType::I8, Some(0), 0, &[][..]),
            (DType::I4, Some(0), 0, &[]),
            (DType::I16, None, 0, &[]),
            (DType::I16, Some(0), 0, &["weight"]),
            (DType::I8, Some(1), 0, &["weight"]),
            (DType::I8, Some(0), 1, &["weight"]),
            (DType::U8, None, 0, &["weight"]),
        ];
        for (dtype, axis, zero, expected) in cases {
            let mut hand = Hand { graph: Graph::new("linear"), count: 0 };
            let x = hand.operand(DType::U16, 3);
            let shape: Vec<usize> = axis.map(|_: usize| 2).into_iter().collect();
            let count = shape.iter().product::<usize>();
            let w = hand.constant(Tensor::from_i32_as(dtype, vec![2, 2], &[1; 4]).unwrap());
            let scale = Tensor::from_f32(shape.clone(), vec![0.5; count]).unwrap();
            let scale = hand.constant(scale);
            let zero = Tensor::from_i32_as(dtype, shape, &vec![zero; count]).unwrap();
            let zero = hand.constant(zero);
            let w = hand.graph.add(Op::DequantizeLinear { axis }, &[w, scale, zero], "w").unwrap();
            let y = hand.graph.add(Op::Gemm, &[x, w], "y").unwrap();
            let y = hand.border(true, y, DType::U16, 9);
            hand.graph.output(y).unwrap();
            let rules: Vec<String> =
                lint(&hand.graph, Dialect::Qnn).into_iter().map(|finding| finding.rule).collect();
            assert_eq!(rules, expected, "{dtype} {axis:?}");
        }
    }

    #[test]
    fn weights_in_floats_stand_apart_from_integers() {
        for (apart, expected) in [(true, &[][..]), (false, &["weight"])] {
            let mut hand = Hand { graph: Graph::new("linear"), count: 0 };
            let mut x = hand.operand(DType::U16, 3);
            let dtype = if apart { DType::F16 } else { DType::F32 };
            let w = hand.constant(Tensor::from_f32_as(dtype, vec![2, 2], vec![1.0; 4]).unwrap());
            if apart {
                x = hand.graph.add(Op::Cast { to: dtype }, &[x], "before").unwrap();
            }
            let mut y = hand.graph.add(Op::Gemm, &[x, w], "y").unwrap();
            if apart {
                y = hand.graph.add(Op::Cast { to: DType::F32 }, &[y], "after").unwrap();
            }
            let y = hand.border(true, y, DType::U16, 9);
            hand.graph.output(y).unwrap();
            let rules: Vec<String> =
                lint(&hand.graph, Dialect::Qnn).into_iter().map(|finding| finding.rule).collect();
            assert_eq!(rules, expected, "{apart}");
        }
    }
}
