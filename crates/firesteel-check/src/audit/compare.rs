use super::{Dump, QnnOp, Schematic};
use firesteel_graph::{Graph, Node, Op, ValueId};
use firesteel_tensor::DType;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt;

/// What the compiler must not do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Rule {
    /// A node stays on the CPU.
    Cpu,
    /// A node between quantized values is computed in float.
    Float,
    /// A value is converted to another type where the graph does not say so.
    Convert,
    /// An operator is not the one that the node stands for.
    Operator,
    /// A norm or an activation is several operators.
    Decomposed,
    /// A weight has other bits than the graph says.
    Weight,
    /// An operator was added.
    Inserted,
    /// A node is not among the operators, and none of them takes its place.
    Missing,
    /// The binary is for another chip.
    Target,
}

impl Rule {
    /// All rules.
    pub const ALL: [Self; 9] = [
        Self::Cpu,
        Self::Float,
        Self::Convert,
        Self::Operator,
        Self::Decomposed,
        Self::Weight,
        Self::Inserted,
        Self::Missing,
        Self::Target,
    ];

    /// The rule's name, as in reports and manifests.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Float => "float",
            Self::Convert => "convert",
            Self::Operator => "operator",
            Self::Decomposed => "decomposed",
            Self::Weight => "weight",
            Self::Inserted => "inserted",
            Self::Missing => "missing",
            Self::Target => "target",
        }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A violation of a rule.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Finding {
    /// The rule.
    pub rule: Rule,
    /// Name of the node, or of what was added.
    pub node: String,
    /// What happened, and the way out where it is known.
    pub detail: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}", self.rule, self.node, self.detail)
    }
}

/// Weights of one format.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FormatCount {
    /// Matrices.
    pub tensors: u64,
    /// Their elements.
    pub elements: u64,
}

/// The result of an audit.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Audit {
    /// Number of QNN operators of each type.
    pub qnn_ops: BTreeMap<String, usize>,
    /// Weight matrices by format, such as `int8 per channel`.
    pub weights: BTreeMap<String, FormatCount>,
    /// Transposes of the graph that ONNX Runtime moved past other nodes, which changes no value.
    pub moved: Vec<String>,
    /// What the compiler planned for the device; `None` without its schematic.
    pub schematic: Option<Schematic>,
    /// What breaks a rule, sorted.
    pub findings: Vec<Finding>,
}

/// Whether nodes could stay on the CPU while the list was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// All nodes are on the HTP: one that is not listed became part of another.
    Htp,
    /// A node that is not listed is on the CPU.
    Mixed,
}

/// Compares the operators that QNN got with the graph that was compiled.
///
/// Every node must be one operator of its own kind under its own name; between quantized values it
/// must be quantized; only the conversions that the graph spells (at its border, and a
/// `DequantizeLinear` into a `QuantizeLinear`) may appear; a constant matrix keeps its bits and the
/// spread of its scales. Where ONNX Runtime moved a transpose past other nodes, transposes beside
/// these stand for it.
pub fn audit(
    meant: &Graph,
    dump: &Dump,
    schematic: Option<Schematic>,
    placement: Placement,
) -> Audit {
    let plan = Plan::new(meant);
    let mut findings = BTreeSet::new();
    let mut floats: HashSet<&str> = HashSet::new();
    let mut listed: HashSet<&str> = HashSet::new();
    let mut unplanned: Vec<(&String, &QnnOp)> = Vec::new();
    for (name, op) in &dump.nodes {
        let Some(node) = plan.by_name.get(name.as_str()) else {
            let nodes = plan.conversion(op);
            if nodes.is_empty() && !plan.repeats(op, dump) {
                unplanned.push((name, op));
            }
            listed.extend(nodes);
            continue;
        };
        listed.insert(name);
        if is_conversion(&node.op) {
            if !plan.border(node) {
                unplanned.push((name, op));
            }
            continue;
        }
        let kinds = operators(&node.op);
        if !kinds.contains(&op.kind.as_str()) {
            let detail = format!("is {} instead of {}", op.kind, kinds.join(" or "));
            findings.insert(Finding { rule: Rule::Operator, node: name.clone(), detail });
        }
        if let Some(detail) = plan.decomposed(node) {
            findings.insert(Finding {
                rule: Rule::Decomposed,
                node: name.clone(),
                detail: detail.into(),
            });
        }
        if plan.quantized(node) {
            let float = op.outputs.iter().find_map(|output| {
                let dtype = dump.tensors.get(output)?.data_type;
                dtype.is_float().then_some(dtype)
            });
            if let Some(dtype) = float {
                floats.extend(op.inputs.iter().chain(&op.outputs).map(String::as_str));
                let reason = plan.why_float(node);
                let detail = format!("{} is computed in {dtype}; {reason}", node.op.name());
                findings.insert(Finding { rule: Rule::Float, node: name.clone(), detail });
                continue;
            }
        }
        findings.extend(weight(&plan, node, name, op, dump));
    }
    let missing = |node: &&Node| !listed.contains(node.name.as_str());
    let transposes = meant.nodes().iter().filter(|n| matches!(n.op, Op::Transpose { .. }));
    let moved: Vec<String> = match placement {
        Placement::Htp => transposes.filter(missing).map(|node| node.name.clone()).collect(),
        Placement::Mixed => Vec::new(),
    };
    let near = plan.near(&moved);
    for (name, op) in unplanned {
        if op.kind == "Transpose" && plan.beside(op, dump, &near) {
            continue;
        }
        // What stands beside a node that became float follows from that.
        if op.inputs.iter().chain(&op.outputs).any(|tensor| floats.contains(tensor.as_str())) {
            continue;
        }
        findings.insert(inserted(&plan, name, op, dump));
    }
    for node in meant.nodes() {
        if is_conversion(&node.op) || !missing(&node) || moved.contains(&node.name) {
            continue;
        }
        findings.insert(absent(&plan, node, placement));
    }
    Audit {
        qnn_ops: dump.op_counts(),
        weights: weights(dump),
        moved,
        schematic: schematic.map(|schematic| schematic.tagged(meant, dump)),
        findings: findings.into_iter().collect(),
    }
}

fn is_conversion(op: &Op) -> bool {
    matches!(op, Op::QuantizeLinear { .. } | Op::DequantizeLinear { .. })
}

/// QNN's names for an operator.
fn operators(op: &Op) -> &'static [&'static str] {
    match op {
        Op::Add => &["ElementWiseAdd"],
        Op::Sub => &["ElementWiseSubtract"],
        Op::Mul => &["ElementWiseMultiply"],
        Op::Div => &["ElementWiseDivide"],
        Op::Max => &["ElementWiseMaximum"],
        Op::Neg => &["ElementWiseNeg"],
        Op::Abs => &["ElementWiseAbs"],
        Op::Sqrt => &["ElementWiseSquareRoot"],
        Op::Erf => &["ElementWiseErf"],
        Op::Tanh => &["Tanh"],
        Op::Sigmoid => &["Sigmoid"],
        Op::Gelu(_) => &["Gelu"],
        Op::Softmax { .. } => &["Softmax"],
        Op::ReduceMean { .. } => &["ReduceMean"],
        Op::ReduceMax { .. } => &["ReduceMax"],
        Op::RmsNormalization { .. } => &["RmsNorm"],
        Op::MatMul => &["MatMul", "FullyConnected"],
        Op::Gemm => &["FullyConnected"],
        Op::Reshape { .. } => &["Reshape"],
        Op::Transpose { .. } => &["Transpose"],
        Op::Slice { .. } => &["StridedSlice"],
        Op::Split { .. } => &["Split"],
        Op::Concat { .. } => &["Concat"],
        Op::Cast { .. } => &["Cast", "Convert"],
        _ => &[],
    }
}

const GELU: &str = "a GELU in pieces; export with --dialect qnn, which keeps it one operator";
const NORM: &str = "a norm in pieces; export with --dialect qnn, which keeps it one operator";

/// The graph, seen as the compiler's input.
struct Plan<'a> {
    graph: &'a Graph,
    by_name: HashMap<&'a str, &'a Node>,
    producer: HashMap<ValueId, &'a Node>,
    consumers: HashMap<ValueId, Vec<&'a Node>>,
}

impl<'a> Plan<'a> {
    fn new(graph: &'a Graph) -> Self {
        let mut plan = Self {
            graph,
            by_name: HashMap::new(),
            producer: HashMap::new(),
            consumers: HashMap::new(),
        };
        for node in graph.nodes() {
            plan.by_name.insert(&node.name, node);
            for id in &node.outputs {
                plan.producer.insert(*id, node);
            }
            for id in &node.inputs {
                plan.consumers.entry(*id).or_default().push(node);
            }
        }
        plan
    }

    fn consumers(&self, id: ValueId) -> &[&'a Node] {
        self.consumers.get(&id).map_or(&[], Vec::as_slice)
    }

    fn name(&self, id: ValueId) -> &'a str {
        &self.graph.value(id).name
    }

    /// The nodes past which the transposes `moved` can have been moved, those themselves included.
    fn near(&self, moved: &[String]) -> HashSet<&'a str> {
        let passes = |op: &Op| {
            is_conversion(op)
                || matches!(
                    op,
                    Op::Add
                        | Op::Sub
                        | Op::Mul
                        | Op::Neg
                        | Op::Concat { .. }
                        | Op::Split { .. }
                        | Op::Slice { .. }
                        | Op::Reshape { .. }
                        | Op::Transpose { .. }
                )
        };
        let mut near: HashSet<&str> = HashSet::new();
        let mut open: Vec<&Node> =
            moved.iter().filter_map(|name| self.by_name.get(name.as_str()).copied()).collect();
        while let Some(node) = open.pop() {
            if !near.insert(&node.name) {
                continue;
            }
            let before = node.inputs.iter().filter_map(|id| self.producer.get(id).copied());
            let after = node.outputs.iter().flat_map(|id| self.consumers(*id)).copied();
            open.extend(before.chain(after).filter(|node| passes(&node.op)));
        }
        near
    }

    /// Whether an added operator stands beside one of the nodes `near`.
    fn beside(&self, op: &QnnOp, dump: &Dump, near: &HashSet<&str>) -> bool {
        let mut others = dump.nodes.iter().filter(|(_, other)| {
            other.inputs.iter().any(|input| op.outputs.contains(input))
                || other.outputs.iter().any(|output| op.inputs.contains(output))
        });
        others.any(|(name, _)| near.contains(name.as_str()))
    }

    /// Why a node is a piece of a norm or an activation, if it is.
    fn decomposed(&self, node: &Node) -> Option<&'static str> {
        match node.op {
            Op::Erf => Some(GELU),
            Op::Tanh if self.weighs(node) && !self.reads_multiple(node) => Some(GELU),
            Op::ReduceMean { .. } | Op::ReduceMax { .. } | Op::Sqrt => Some(NORM),
            _ => None,
        }
    }

    /// Whether what a node makes is multiplied in the end with a value that it was made from, as
    /// x · (1 + tanh(…x…)) is; a gate is multiplied with something else.
    fn weighs(&self, node: &Node) -> bool {
        let inner =
            |op: &Op| matches!(op, Op::Add | Op::Mul | Op::Sub | Op::Div) || is_conversion(op);
        let mut sources: HashSet<ValueId> = HashSet::new();
        let mut open: Vec<ValueId> = node.inputs.clone();
        while let Some(id) = open.pop() {
            if self.graph.constant(id).is_none() && sources.insert(id) {
                let producer = self.producer.get(&id).filter(|producer| inner(&producer.op));
                open.extend(producer.into_iter().flat_map(|producer| &producer.inputs));
            }
        }
        let mut made: HashSet<ValueId> = HashSet::new();
        let mut open: Vec<ValueId> = node.outputs.clone();
        while let Some(id) = open.pop() {
            if !made.insert(id) {
                continue;
            }
            for consumer in self.consumers(id).iter().filter(|consumer| inner(&consumer.op)) {
                if consumer.op == Op::Mul && consumer.inputs.iter().any(|id| sources.contains(id)) {
                    return true;
                }
                open.extend(&consumer.outputs);
            }
        }
        false
    }

    /// Whether a node reads a value times a constant, as the tanh in x/2 · (1 + tanh(x/2)) does: that
    /// is SiLU, which is no operator of the processor. The tanh in GELU reads a cubic polynomial.
    fn reads_multiple(&self, node: &Node) -> bool {
        let made_by = |id: &ValueId| self.producer.get(id).map(|producer| &producer.op);
        let polynomial = |op: &Op| matches!(op, Op::Add | Op::Mul | Op::Sub | Op::Div);
        let scaling = |product: &&Node| {
            let mut varying =
                product.inputs.iter().filter(|id| self.graph.constant(**id).is_none());
            product.op == Op::Mul
                && matches!((varying.next(), varying.next()), (Some(x), None)
                    if !made_by(x).is_some_and(polynomial))
        };
        node.inputs
            .iter()
            .filter_map(|id| self.producer.get(id).copied())
            .any(|made| scaling(&made))
    }

    /// The node that dequantizes a value, if one does.
    fn dequantized(&self, id: ValueId) -> Option<&'a Node> {
        self.producer.get(&id).copied().filter(|n| matches!(n.op, Op::DequantizeLinear { .. }))
    }

    /// The nodes that quantize a value, if nothing else reads it.
    fn requantized(&self, id: ValueId) -> Option<&'a Node> {
        let consumers = self.consumers(id);
        let quantizes = |node: &&Node| matches!(node.op, Op::QuantizeLinear { .. });
        let all = !self.graph.outputs().contains(&id) && consumers.iter().all(quantizes);
        consumers.first().copied().filter(|_| all)
    }

    /// Whether a node stands between quantized values: all that it reads are dequantized or
    /// constant, and all that it makes is quantized. A product with a matrix in floats is meant to
    /// be one of floats.
    fn quantized(&self, node: &Node) -> bool {
        let product = matches!(node.op, Op::MatMul | Op::Gemm);
        let constant = |id: &ValueId| !product && self.graph.constant(*id).is_some();
        let reads = |id: &ValueId| constant(id) || self.dequantized(*id).is_some();
        !is_conversion(&node.op)
            && node.inputs.iter().all(reads)
            && node.inputs.iter().any(|id| self.dequantized(*id).is_some())
            && node.outputs.iter().all(|id| self.requantized(*id).is_some())
    }

    /// Whether a conversion belongs to the graph: at its border, or beside a node in float.
    fn border(&self, node: &Node) -> bool {
        match node.op {
            Op::QuantizeLinear { .. } => {
                node.inputs.first().is_some_and(|id| match self.producer.get(id) {
                    None => true,
                    Some(producer) if is_conversion(&producer.op) => true,
                    Some(producer) => !self.quantized(producer),
                })
            }
            Op::DequantizeLinear { .. } => node.outputs.iter().any(|id| {
                self.graph.outputs().contains(id)
                    || self
                        .consumers(*id)
                        .iter()
                        .any(|consumer| !is_conversion(&consumer.op) && !self.quantized(consumer))
            }),
            _ => false,
        }
    }

    /// The nodes of a conversion that the graph spells, if `op` is one: from integers to others, or
    /// between integers and half precision, which takes a cast. None if it is not.
    fn conversion(&self, op: &QnnOp) -> Vec<&'a str> {
        let ([input], [output]) = (&op.inputs[..], &op.outputs[..]) else { return Vec::new() };
        let last = self.graph.find(output).and_then(|id| self.producer.get(&id).copied());
        let before =
            |node: &'a Node| node.inputs.first().and_then(|id| self.producer.get(id).copied());
        let (Some(last), Some(first)) = (last, last.and_then(before)) else { return Vec::new() };
        let spelled = matches!(
            (&first.op, &last.op),
            (Op::DequantizeLinear { .. } | Op::Cast { .. }, Op::QuantizeLinear { .. })
                | (Op::DequantizeLinear { .. }, Op::Cast { .. })
        );
        match first.inputs.first() {
            Some(source) if spelled && self.name(*source) == input => vec![&last.name, &first.name],
            _ => Vec::new(),
        }
    }

    /// Whether `op` makes the floats of integers that a `DequantizeLinear` makes too, for one of its
    /// readers in floats: ONNX Runtime gives each its own.
    fn repeats(&self, op: &QnnOp, dump: &Dump) -> bool {
        let ([input], [output]) = (&op.inputs[..], &op.outputs[..]) else { return false };
        let float = dump.tensors.get(output).is_some_and(|tensor| tensor.data_type.is_float());
        let reads = |node: &Node| {
            let listed = dump.nodes.get(&node.name);
            listed.is_some_and(|listed| listed.inputs.contains(output)) && !self.quantized(node)
        };
        let same = |node: &&Node| {
            matches!(node.op, Op::DequantizeLinear { .. })
                && node.inputs.first().is_some_and(|id| self.name(*id) == input)
                && node.outputs.iter().any(|id| self.consumers(*id).iter().any(|n| reads(n)))
        };
        float && self.graph.nodes().iter().any(|node| same(&node))
    }

    /// The integer type that a value has in the compiled graph.
    fn integer(&self, id: ValueId) -> Option<DType> {
        let source = match self.dequantized(id) {
            Some(node) => *node.inputs.first()?,
            None => *self.requantized(id)?.outputs.first()?,
        };
        Some(self.graph.value(source).dtype)
    }

    /// The likely reason that a node which stands between quantized values became float.
    fn why_float(&self, node: &Node) -> String {
        let activations: BTreeSet<DType> = node
            .inputs
            .iter()
            .filter(|id| !self.is_weight(**id))
            .filter_map(|id| self.integer(*id))
            .collect();
        let output = node.outputs.first().and_then(|id| self.integer(*id));
        if let (Some(output), true) = (output, activations.len() == 1)
            && !activations.contains(&output)
            && !matches!(node.op, Op::MatMul | Op::Gemm)
        {
            let inputs: Vec<&str> = activations.iter().map(|dtype| dtype.name()).collect();
            return format!(
                "it reads {} and makes {output}: keep the type and convert explicitly, by \
                 DequantizeLinear into QuantizeLinear",
                inputs.join(", ")
            );
        }
        "the HTP has no such operator in these types; use a spelling or types that it has, or keep \
         the values around it in float"
            .into()
    }

    /// The format of a weight, in the words of [`QnnTensor::format`](super::QnnTensor::format). The
    /// compiler computes floats in half precision, whatever they were.
    fn weight_format(&self, id: ValueId) -> String {
        let Some(node) = self.dequantized(id) else {
            let dtype = self.graph.value(id).dtype;
            return if dtype.is_float() { DType::F16.name() } else { dtype.name() }.to_owned();
        };
        let stored = node.inputs.first().map_or(id, |stored| *stored);
        let bits = match self.graph.value(stored).dtype {
            DType::I4 => "int4",
            DType::I8 | DType::U8 => "int8",
            DType::I16 | DType::U16 => "int16",
            other => other.name(),
        };
        let spread = match node.op {
            Op::DequantizeLinear { axis: Some(_) } => "channel",
            _ => "tensor",
        };
        format!("{bits} per {spread}")
    }

    fn is_weight(&self, id: ValueId) -> bool {
        let constant = |id: &ValueId| self.graph.constant(*id).is_some();
        constant(&id)
            || self.dequantized(id).is_some_and(|node| node.inputs.first().is_some_and(constant))
    }
}

/// The finding about a node that is not among the operators.
fn absent(plan: &Plan<'_>, node: &Node, placement: Placement) -> Finding {
    let kind = node.op.name();
    let (rule, detail) = match placement {
        Placement::Mixed => {
            let way = match &node.op {
                Op::Erf => "export with --dialect qnn, which keeps GELU one operator",
                _ if plan.quantized(node) => "use types or a spelling that it has",
                _ => "use a spelling that it has, or f16 values",
            };
            (Rule::Cpu, format!("{kind} stays on the CPU: the HTP does not take it; {way}"))
        }
        Placement::Htp => {
            (Rule::Missing, format!("{kind} is not among the operators: it was merged or dropped"))
        }
    };
    Finding { rule, node: node.name.clone(), detail }
}

/// The finding about an operator that the graph does not have.
fn inserted(plan: &Plan<'_>, name: &str, op: &QnnOp, dump: &Dump) -> Finding {
    let dtype = |names: &[String]| {
        let tensor = names.first().and_then(|name| dump.tensors.get(name));
        tensor.map_or("?".into(), |tensor| tensor.data_type.to_string())
    };
    let (from, to) = (dtype(&op.inputs), dtype(&op.outputs));
    let reader = op.outputs.first().and_then(|output| {
        let mut readers = dump.nodes.iter().filter(|(_, node)| node.inputs.contains(output));
        readers.next().map(|(name, _)| name.as_str())
    });
    let converts = matches!(&*op.kind, "Convert" | "Cast" | "Quantize" | "Dequantize");
    if !converts {
        let detail = format!("{} was added before {}", op.kind, reader.unwrap_or("the output"));
        return Finding { rule: Rule::Inserted, node: name.to_owned(), detail };
    }
    let node = reader.unwrap_or(name).to_owned();
    let value = op.inputs.first().map_or("?", String::as_str);
    let matmul = plan.by_name.get(node.as_str()).is_some_and(|node| node.op == Op::MatMul);
    let way = if matmul && from == "u16" {
        "; keys and values under 16-bit activations must be s16 with zero point 0"
    } else {
        "; spell the conversion in the graph, or avoid it"
    };
    let detail =
        format!("its operand {value} is converted from {from} to {to} without being asked{way}");
    Finding { rule: Rule::Convert, node, detail }
}

/// The finding about a weight whose bits are not those of the graph.
fn weight(plan: &Plan<'_>, node: &Node, name: &str, op: &QnnOp, dump: &Dump) -> Option<Finding> {
    if !matches!(node.op, Op::MatMul | Op::Gemm) {
        return None;
    }
    let id = *node.inputs.get(1)?;
    if !plan.is_weight(id) {
        return None;
    }
    let finding = |detail| Some(Finding { rule: Rule::Weight, node: name.to_owned(), detail });
    let planned = plan.weight_format(id);
    let listed = op.inputs.get(1).and_then(|input| dump.tensors.get(input));
    let Some(tensor) = listed else {
        return finding(format!("its weight is not listed, the graph says {planned}"));
    };
    let actual = tensor.format();
    if actual == planned {
        return None;
    }
    finding(format!("its weight is {actual}, the graph says {planned}"))
}

/// Constant matrices by format.
fn weights(dump: &Dump) -> BTreeMap<String, FormatCount> {
    let mut counts: BTreeMap<String, FormatCount> = BTreeMap::new();
    let mut counted = HashSet::new();
    for op in dump.nodes.values() {
        if !matches!(&*op.kind, "FullyConnected" | "MatMul" | "Conv2d") {
            continue;
        }
        let Some(name) = op.inputs.get(1) else { continue };
        let Some(tensor) = dump.tensors.get(name).filter(|tensor| tensor.is_constant()) else {
            continue;
        };
        if counted.insert(name) {
            let count = counts.entry(tensor.format()).or_default();
            count.tensors += 1;
            let elements = tensor.dims.iter().fold(1u64, |all, dim| all.saturating_mul(*dim));
            count.elements = count.elements.saturating_add(elements);
        }
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;
    use firesteel_graph::Constant;
    use firesteel_tensor::Tensor;

    /// x · wᵀ with a norm before it.
    fn graph() -> Graph {
        let mut graph = Graph::new("g");
        let x = graph.input("x", DType::F16, vec![1, 4]).unwrap();
        let constant = |shape: Vec<usize>| {
            let count = shape.iter().product();
            Constant::Tensor(Tensor::from_f32_as(DType::F16, shape, vec![1.0; count]).unwrap())
        };
        let scale = graph.add_constant("s", DType::F16, vec![4], constant(vec![4])).unwrap();
        let w = graph.add_constant("w", DType::F16, vec![2, 4], constant(vec![2, 4])).unwrap();
        let op = Op::RmsNormalization { axis: 1, epsilon: 1e-6 };
        let normed = graph.add(op, &[x, scale], "n").unwrap();
        let y = graph.add(Op::Gemm, &[normed, w], "y").unwrap();
        graph.output(y).unwrap();
        graph
    }

    fn tensor(data_type: u32, role: u32, encoding: u32) -> serde_json::Value {
        serde_json::json!({
            "data_type": data_type, "dims": [2, 4], "type": role,
            "quant_params": { "encoding": encoding },
        })
    }

    /// The list for [`graph`], changed.
    fn listed(change: impl Fn(&mut serde_json::Value)) -> Audit {
        let (f16, unset) = (0x216, 0x7fff_ffff);
        let mut json = serde_json::json!({ "graph": {
            "nodes": {
                "n/RMSNormalization": {
                    "type": "RmsNorm", "input_names": ["x", "s"], "output_names": ["n"],
                },
                "y/Gemm": {
                    "type": "FullyConnected", "input_names": ["n", "w"], "output_names": ["y"],
                },
            },
            "tensors": {
                "x": tensor(f16, 0, unset), "n": tensor(f16, 3, unset),
                "w": tensor(f16, 4, unset), "y": tensor(f16, 1, unset),
            },
        }});
        change(&mut json["graph"]);
        let dump = Dump::parse(json.to_string().as_bytes()).unwrap();
        audit(&graph(), &dump, None, Placement::Htp)
    }

    /// The nodes of an activation that are found to be pieces of a GELU.
    fn pieces(activation: impl Fn(&mut Graph, ValueId) -> ValueId) -> Vec<String> {
        let mut graph = Graph::new("g");
        let x = graph.input("x", DType::F16, vec![1, 4]).unwrap();
        let y = activation(&mut graph, x);
        graph.output(y).unwrap();
        let plan = Plan::new(&graph);
        let found = graph.nodes().iter().filter(|node| plan.decomposed(node) == Some(GELU));
        found.map(|node| node.name.clone()).collect()
    }

    #[test]
    fn a_silu_in_pieces_is_none_of_a_gelu() {
        let constant = |graph: &mut Graph, name: &str| {
            let tensor = Tensor::from_f32_as(DType::F16, vec![], vec![0.5]).unwrap();
            graph.add_constant(name, DType::F16, vec![], Constant::Tensor(tensor)).unwrap()
        };
        let weighed = |graph: &mut Graph, x: ValueId, argument: ValueId| {
            let one = constant(graph, "one");
            let tanh = graph.add(Op::Tanh, &[argument], "tanh").unwrap();
            let weight = graph.add(Op::Add, &[tanh, one], "weight").unwrap();
            graph.add(Op::Mul, &[x, weight], "y").unwrap()
        };
        let silu = pieces(|graph, x| {
            let half = constant(graph, "half");
            let halved = graph.add(Op::Mul, &[x, half], "halved").unwrap();
            weighed(graph, halved, halved)
        });
        assert_eq!(silu, [""; 0]);
        let factored = pieces(|graph, x| {
            let factor = constant(graph, "factor");
            let square = graph.add(Op::Mul, &[x, x], "square").unwrap();
            let sum = graph.add(Op::Add, &[square, factor], "sum").unwrap();
            let argument = graph.add(Op::Mul, &[sum, x], "argument").unwrap();
            weighed(graph, x, argument)
        });
        assert_eq!(factored, ["tanh/Tanh"]);
        let scaled_last = pieces(|graph, x| {
            let factor = constant(graph, "factor");
            let square = graph.add(Op::Mul, &[x, x], "square").unwrap();
            let cube = graph.add(Op::Mul, &[square, x], "cube").unwrap();
            let sum = graph.add(Op::Add, &[cube, x], "sum").unwrap();
            let argument = graph.add(Op::Mul, &[sum, factor], "argument").unwrap();
            weighed(graph, x, argument)
        });
        assert_eq!(scaled_last, ["tanh/Tanh"]);
    }

    #[test]
    fn every_departure_is_found() {
        let good = listed(|_| {});
        assert_eq!((good.findings.len(), good.moved.len()), (0, 0));
        assert_eq!(good.weights["f16"], FormatCount { tensors: 1, elements: 8 });

        let found = |change: &dyn Fn(&mut serde_json::Value)| {
            let findings = listed(change).findings;
            findings.into_iter().map(|f| (f.rule, f.node)).collect::<Vec<_>>()
        };
        let op = |kind: &str, from: &str, to: &str| serde_json::json!({ "type": kind, "input_names": [from], "output_names": [to] });
        type Change<'a> = &'a dyn Fn(&mut serde_json::Value);
        let cases: [(&str, Rule, &str, Change<'_>); 5] = [
            ("another operator", Rule::Operator, "y/Gemm", &|graph| {
                graph["nodes"]["y/Gemm"]["type"] = "Conv2d".into();
            }),
            ("bits of the weight", Rule::Weight, "y/Gemm", &|graph| {
                graph["tensors"]["w"] = tensor(0x308, 4, 1);
            }),
            ("a cast", Rule::Convert, "y/Gemm", &|graph| {
                graph["nodes"]["c"] = op("Cast", "n", "c");
                graph["tensors"]["c"] = tensor(0x232, 3, 0);
                graph["nodes"]["y/Gemm"]["input_names"] = serde_json::json!(["c", "w"]);
            }),
            ("a transpose", Rule::Inserted, "t", &|graph| {
                graph["nodes"]["t"] = op("Transpose", "n", "t");
                graph["tensors"]["t"] = tensor(0x216, 3, 0);
            }),
            ("a missing norm", Rule::Missing, "n/RMSNormalization", &|graph| {
                graph["nodes"].as_object_mut().unwrap().remove("n/RMSNormalization");
            }),
        ];
        for (name, rule, node, change) in cases {
            assert_eq!(found(change), [(rule, node.to_owned())], "{name}");
        }
    }
}
