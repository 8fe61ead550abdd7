use crate::groups::Group;
use crate::{KvElement, ProfileError};
use firesteel_graph::{Graph, Node, Op, Part, Value, ValueId};
use serde::Serialize;
use std::collections::{HashMap, HashSet};

/// Bytes and operations of a part of a step, counted from its graph. None is measured.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Cost {
    /// Bytes of matrices, their scales included, and of norms. Each is read once a step.
    pub weight_bytes: u64,
    /// Bytes of the caches that the graph takes.
    pub cache_read_bytes: u64,
    /// Bytes of the new entries, or rolled windows, that the graph returns.
    pub cache_written_bytes: u64,
    /// Bytes of all other inputs and outputs of the graph.
    pub border_bytes: u64,
    /// Bytes of activations and cache entries that operators read and write, wherever they lie; a
    /// change of the shape alone moves nothing.
    pub moved_bytes: u64,
    /// Two for a multiply-add of a matrix product, one for an element that another operator
    /// computes, none for what only moves.
    pub operations: u64,
}

impl Cost {
    /// The bytes that have to cross the memory in a step: weights, caches, and the other inputs
    /// and outputs of the graph.
    pub fn memory_bytes(&self) -> u64 {
        [self.weight_bytes, self.cache_read_bytes, self.cache_written_bytes, self.border_bytes]
            .into_iter()
            .fold(0, u64::saturating_add)
    }

    /// The sum of both. `None` when it does not fit in 64 bits.
    pub(crate) fn plus(self, other: Self) -> Option<Self> {
        Some(Self {
            weight_bytes: self.weight_bytes.checked_add(other.weight_bytes)?,
            cache_read_bytes: self.cache_read_bytes.checked_add(other.cache_read_bytes)?,
            cache_written_bytes: self.cache_written_bytes.checked_add(other.cache_written_bytes)?,
            border_bytes: self.border_bytes.checked_add(other.border_bytes)?,
            moved_bytes: self.moved_bytes.checked_add(other.moved_bytes)?,
            operations: self.operations.checked_add(other.operations)?,
        })
    }
}

/// Bits of the elements of a step that is not written in integers yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct ElementBits {
    /// Matrices.
    pub weights: u64,
    /// Activations.
    pub activations: u64,
    /// Entries of the caches.
    pub cache: u64,
}

/// Bits of the scale that each row of an integer matrix of at most 8 bits has.
const SCALE_BITS: u64 = 32;

/// Bits of norms and of the matrix that gates the heads when the others are integers.
const SMALL_BITS: u64 = 16;

impl ElementBits {
    /// The bits of a precision: fp32, fp16, or w8a16 and the like. Caches have those of the
    /// activations unless `kv` says otherwise.
    ///
    /// # Errors
    /// When the name is of another form, or `kv` is a format that no graph has.
    pub fn named(precision: &str, kv: Option<KvElement>) -> Result<Self, ProfileError> {
        let integers = |name: &str| {
            let (weights, activations) = name.strip_prefix('w')?.split_once('a')?;
            let weights = [4, 8, 16].into_iter().find(|bits: &u64| weights == bits.to_string())?;
            let activations =
                [8, 16].into_iter().find(|bits: &u64| activations == bits.to_string())?;
            Some((weights, activations))
        };
        let (weights, activations) = match precision {
            "fp32" => (32, 32),
            "fp16" => (16, 16),
            name => integers(name).ok_or_else(|| ProfileError::Choice {
                what: "precision",
                value: format!("{:?}", name.chars().take(32).collect::<String>()),
                accepted: "fp32, fp16, or w4, w8 or w16 followed by a8 or a16".into(),
            })?,
        };
        // Caches of the width of the activations, and 8-bit ones under 16-bit integers.
        let float = !precision.starts_with('w');
        let accepted = [
            (KvElement::F32, 32, float && activations == 32),
            (KvElement::F16, 16, float && activations == 16),
            (KvElement::I16, 16, !float && activations == 16),
            (KvElement::I8, 8, !float),
        ];
        let mut cache = activations;
        if let Some(kv) = kv {
            let of_graphs = accepted.iter().filter(|(_, _, accepted)| *accepted);
            let known = of_graphs.clone().find(|(element, ..)| *element == kv);
            cache = known.map(|(_, bits, _)| *bits).ok_or_else(|| ProfileError::Choice {
                what: "key/value format",
                value: format!("{kv} with {precision}"),
                accepted: of_graphs.map(|(kv, ..)| kv.name()).collect::<Vec<_>>().join(", "),
            })?;
        }
        Ok(Self { weights, activations, cache })
    }

    /// Whether matrices are integers.
    fn integers(self) -> bool {
        self.weights < 16 || self.weights != self.activations
    }
}

/// The cost of one node.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct NodeCost {
    /// Name of the node.
    pub node: String,
    /// What it is there for.
    pub group: Group,
    /// The layer of the model that it belongs to; `None` outside of the layers.
    pub layer: Option<usize>,
    /// The part of the step, where the graph says so.
    #[serde(skip)]
    pub part: Option<Part>,
    /// What it costs.
    pub cost: Cost,
}

impl NodeCost {
    /// Whether it belongs to the last norm and the vocabulary projection.
    pub(crate) fn is_head(&self) -> bool {
        self.part.is_some_and(is_head)
    }
}

/// Whether a part belongs to the last norm and the vocabulary projection.
pub(crate) fn is_head(part: Part) -> bool {
    matches!(part, Part::LastToken | Part::FinalNorm | Part::Vocabulary)
}

/// The cost of every node of a graph that computes or moves something, in order of execution.
///
/// With `bits` the graph is one in floats and every element counts as that many bits, as if it were
/// written in that format; without, it counts as the graph has it. A conversion that stands between
/// an operator and the integers it reads or writes belongs to that operator, and floats of a graph
/// of integers count 16 bits, which they have on the processor.
///
/// # Errors
/// When a count does not fit in 64 bits.
pub fn count_graph(
    graph: &Graph,
    bits: Option<ElementBits>,
) -> Result<Vec<NodeCost>, ProfileError> {
    let counter = Counter::new(graph, bits);
    let mut costs = Vec::new();
    let mut read = HashSet::new();
    for node in graph.nodes() {
        let cost =
            counter.cost(node, &mut read).ok_or(ProfileError::Overflow { what: "a graph" })?;
        if cost != Cost::default() {
            costs.push(NodeCost {
                node: node.name.clone(),
                group: Group::of_node(node),
                layer: node.tag.and_then(|tag| tag.layer),
                part: node.tag.map(|tag| tag.part),
                cost,
            });
        }
    }
    Ok(costs)
}

/// The largest amount of activations and cache entries that one operator reads and writes, in
/// bytes, and its name; `None` for a graph in which nothing moves.
pub fn largest_working_set(costs: &[NodeCost]) -> Option<(&str, u64)> {
    let moved = costs.iter().map(|node| (node.node.as_str(), node.cost.moved_bytes));
    moved.max_by_key(|(_, bytes)| *bytes).filter(|(_, bytes)| *bytes > 0)
}

/// The most bytes of activations that are alive at the same time when the nodes run in their order:
/// inputs and outputs of the graph and what operators hand on, without the caches that the graph
/// takes and without weights. `bits` as in [`count_graph`].
///
/// # Errors
/// When a count does not fit in 64 bits.
pub fn peak_activations(graph: &Graph, bits: Option<ElementBits>) -> Result<u64, ProfileError> {
    Counter::new(graph, bits).peak().ok_or(ProfileError::Overflow { what: "activations" })
}

struct Counter<'a> {
    graph: &'a Graph,
    bits: Option<ElementBits>,
    /// Whether the graph has integers.
    integers: bool,
    /// Values that are entries of a cache, by index of the value's name in the graph.
    entries: HashSet<ValueId>,
    producers: HashMap<ValueId, &'a Node>,
    readers: HashMap<ValueId, Vec<&'a Node>>,
}

fn converts(op: &Op) -> bool {
    matches!(op, Op::QuantizeLinear { .. } | Op::DequantizeLinear { .. })
}

/// Whether an operator moves elements and computes none.
fn moves(op: &Op) -> bool {
    matches!(
        op,
        Op::Reshape { .. }
            | Op::Transpose { .. }
            | Op::Slice { .. }
            | Op::Split { .. }
            | Op::Concat { .. }
    )
}

impl<'a> Counter<'a> {
    fn new(graph: &'a Graph, bits: Option<ElementBits>) -> Self {
        let mut counter = Self {
            graph,
            bits,
            integers: graph.nodes().iter().any(|node| converts(&node.op)),
            entries: HashSet::new(),
            producers: HashMap::new(),
            readers: HashMap::new(),
        };
        for node in graph.nodes() {
            for id in &node.outputs {
                counter.producers.insert(*id, node);
            }
            for id in &node.inputs {
                counter.readers.entry(*id).or_default().push(node);
            }
        }
        let taken = graph.inputs().iter().copied().filter(|id| counter.is_cache(*id));
        let given = graph.outputs().iter().copied().filter(|id| counter.is_entry(*id));
        let border: Vec<ValueId> = taken.chain(given).collect();
        counter.entries.extend(border);
        for node in graph.nodes().iter().filter(|node| moves(&node.op)) {
            if node.inputs.iter().any(|id| counter.entries.contains(id)) {
                counter.entries.extend(node.inputs.iter().chain(&node.outputs));
            }
        }
        counter
    }

    /// Whether an input of the graph is a cache, to which new entries are joined.
    fn is_cache(&self, id: ValueId) -> bool {
        let readers = self.readers.get(&id).map_or(&[][..], Vec::as_slice);
        readers.iter().any(|node| match part(node) {
            Some(Part::Conversion) => node.outputs.iter().any(|id| self.is_cache(*id)),
            part => part == Some(Part::Cache),
        })
    }

    /// Whether an output of the graph is what a cache keeps.
    fn is_entry(&self, id: ValueId) -> bool {
        self.producers.get(&id).is_some_and(|node| match part(node) {
            Some(Part::Conversion) => node.inputs.first().is_some_and(|id| self.is_entry(*id)),
            part => matches!(part, Some(Part::Cache | Part::Entry)),
        })
    }

    /// Bytes of `elements` elements.
    fn bytes(&self, value: &Value, bits: u64) -> Option<u64> {
        let elements = elements_of(&value.shape)?;
        Some(elements.checked_mul(bits)?.div_ceil(8))
    }

    /// Bytes of an activation or a cache entry as it lies in memory.
    fn stored_bytes(&self, id: ValueId) -> Option<u64> {
        let value = self.graph.value(id);
        let bits = match self.bits {
            Some(bits) if self.entries.contains(&id) => bits.cache,
            Some(bits) => bits.activations,
            None if self.integers && value.dtype.is_float() => value.dtype.bits().min(16) as u64,
            None => value.dtype.bits() as u64,
        };
        self.bytes(value, bits)
    }

    /// Bytes of a constant, with its scales where it has one a row.
    fn weight_bytes(&self, id: ValueId, node: &Node) -> Option<u64> {
        let value = self.graph.value(id);
        let (rows, matrix) = match value.shape[..] {
            [rows, _] => (rows as u64, true),
            _ => (0, false),
        };
        let bits = match self.bits {
            None => return self.stored_bytes(id),
            Some(bits) if !bits.integers() => bits.weights,
            Some(_) if !matrix || part(node) == Some(Part::HeadGateProjection) => SMALL_BITS,
            Some(bits) => bits.weights,
        };
        let scales = if matrix && bits <= 8 { rows.checked_mul(SCALE_BITS / 8)? } else { 0 };
        self.bytes(value, bits)?.checked_add(scales)
    }

    /// What an operator reads when it reads `id`: the integers behind a conversion that it has for
    /// itself.
    fn source(&self, id: ValueId) -> ValueId {
        match self.producers.get(&id) {
            Some(node) if matches!(node.op, Op::DequantizeLinear { .. }) => {
                node.inputs.first().copied().unwrap_or(id)
            }
            _ => id,
        }
    }

    /// What an operator writes when it makes `id`: the integers, where nothing else reads it.
    fn target(&self, id: ValueId) -> ValueId {
        let readers = self.readers.get(&id).map_or(&[][..], Vec::as_slice);
        let quantizes = |node: &&Node| matches!(node.op, Op::QuantizeLinear { .. });
        let all = !self.graph.outputs().contains(&id) && readers.iter().all(quantizes);
        match readers.first() {
            Some(node) if all => node.outputs.first().copied().unwrap_or(id),
            _ => id,
        }
    }

    /// Whether a conversion stands between integers or at the border of the graph, so that it is
    /// work of its own.
    fn stands_alone(&self, node: &Node) -> bool {
        let Some(&input) = node.inputs.first() else { return false };
        match node.op {
            Op::QuantizeLinear { .. } => match self.producers.get(&input) {
                None => true,
                Some(producer) => converts(&producer.op) || self.target(input) == input,
            },
            _ => node.outputs.iter().any(|id| self.graph.outputs().contains(id)),
        }
    }

    fn cost(&self, node: &Node, read: &mut HashSet<ValueId>) -> Option<Cost> {
        let mut cost = Cost::default();
        let alone = converts(&node.op) && self.stands_alone(node);
        if converts(&node.op) && !alone {
            return Some(cost);
        }
        let view = matches!(node.op, Op::Reshape { .. });
        // Scale and zero point of a conversion are parameters of it.
        let operands = if alone { node.inputs.get(..1)? } else { &node.inputs[..] };
        for &id in operands {
            let id = self.source(id);
            if self.graph.constant(id).is_some() {
                // Scalars are parameters, and a weight is read once.
                if !self.graph.value(id).shape.is_empty() && read.insert(id) {
                    cost.weight_bytes =
                        cost.weight_bytes.checked_add(self.weight_bytes(id, node)?)?;
                    cost.weight_bytes = cost.weight_bytes.checked_add(self.row_scales(node)?)?;
                }
                continue;
            }
            let bytes = self.stored_bytes(id)?;
            if self.graph.inputs().contains(&id) {
                let entry = self.is_cache(id);
                let sum = if entry { &mut cost.cache_read_bytes } else { &mut cost.border_bytes };
                *sum = sum.checked_add(bytes)?;
            }
            if !view {
                cost.moved_bytes = cost.moved_bytes.checked_add(bytes)?;
            }
        }
        for &id in &node.outputs {
            let id = self.target(id);
            let bytes = self.stored_bytes(id)?;
            if self.graph.outputs().contains(&id) {
                let entry = self.is_entry(id);
                let sum =
                    if entry { &mut cost.cache_written_bytes } else { &mut cost.border_bytes };
                *sum = sum.checked_add(bytes)?;
            }
            if !view {
                cost.moved_bytes = cost.moved_bytes.checked_add(bytes)?;
            }
        }
        cost.operations = self.operations(node)?;
        Some(cost)
    }

    /// Where a value lies: a change of the shape has the memory of its input, and what stands on
    /// the one side of a conversion has that of the integers on the other.
    fn place(&self, id: ValueId) -> ValueId {
        let mut at = self.target(id);
        while let Some(node) = self.producers.get(&at) {
            let same = match node.op {
                Op::Reshape { .. } => true,
                Op::DequantizeLinear { .. } => !self.stands_alone(node),
                _ => false,
            };
            match node.inputs.first() {
                Some(&input) if same => at = input,
                _ => break,
            }
        }
        at
    }

    /// See [`peak_activations`].
    fn peak(&self) -> Option<u64> {
        let nodes = self.graph.nodes();
        // First and last node that touches a place; what enters is there before the first.
        let mut spans: HashMap<ValueId, (usize, usize)> = HashMap::new();
        let mut touch = |id: ValueId, node: usize| {
            let (_, last) = spans.entry(self.place(id)).or_insert((node, node));
            *last = node.max(*last);
        };
        self.graph.inputs().iter().for_each(|id| touch(*id, 0));
        for (index, node) in nodes.iter().enumerate() {
            let values = node.inputs.iter().chain(&node.outputs);
            values
                .filter(|id| self.graph.constant(**id).is_none())
                .for_each(|id| touch(*id, index));
        }
        self.graph.outputs().iter().for_each(|id| touch(*id, nodes.len()));
        let mut changes = vec![(0u64, 0u64); nodes.len() + 2];
        for (place, (first, last)) in spans {
            let taken = self.graph.inputs().contains(&place) && self.is_cache(place);
            if taken || self.graph.constant(place).is_some() {
                continue;
            }
            let bytes = self.stored_bytes(place)?;
            let (born, _) = changes.get_mut(first)?;
            *born = born.checked_add(bytes)?;
            let (_, gone) = changes.get_mut(last + 1)?;
            *gone = gone.checked_add(bytes)?;
        }
        let (mut alive, mut peak) = (0u64, 0u64);
        for (born, gone) in changes {
            alive = alive.checked_sub(gone)?.checked_add(born)?;
            peak = peak.max(alive);
        }
        Some(peak)
    }

    /// Bytes of the scales that a matrix of integers has in the graph.
    fn row_scales(&self, node: &Node) -> Option<u64> {
        if self.bits.is_some() || node.op != Op::Gemm {
            return Some(0);
        }
        let scales =
            node.inputs.get(1).and_then(|id| self.producers.get(id)).and_then(|dequantize| {
                let scale = self.graph.value(*dequantize.inputs.get(1)?);
                (scale.shape.len() == 1).then_some(scale)
            });
        scales.map_or(Some(0), |scale| self.bytes(scale, SCALE_BITS))
    }

    fn operations(&self, node: &Node) -> Option<u64> {
        let elements = |id: &ValueId| elements_of(&self.graph.value(*id).shape);
        let made = node.outputs.first().map_or(Some(0), elements)?;
        match node.op {
            Op::Gemm | Op::MatMul => {
                let inner =
                    node.inputs.first().and_then(|id| self.graph.value(*id).shape.last())?;
                made.checked_mul(2)?.checked_mul(*inner as u64)
            }
            _ if moves(&node.op) => Some(0),
            _ => Some(made),
        }
    }
}

/// The part of the step that a node belongs to.
fn part(node: &Node) -> Option<Part> {
    node.tag.map(|tag| tag.part)
}

fn elements_of(shape: &[usize]) -> Option<u64> {
    shape.iter().try_fold(1u64, |count, length| count.checked_mul(*length as u64))
}
