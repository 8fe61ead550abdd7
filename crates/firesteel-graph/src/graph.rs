use crate::{GraphError, Op, Tag, infer::infer};
use firesteel_tensor::{DType, Tensor};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::sync::Arc;

/// Index of a value in its graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ValueId(pub(crate) usize);

/// A value: a graph input, a constant or the output of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Value {
    /// Unique name.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Static shape.
    pub shape: Vec<usize>,
}

/// An operator applied to values.
#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    /// Unique name.
    pub name: String,
    /// Operator with its parameters.
    pub op: Op,
    /// Inputs, in the operator's order.
    pub inputs: Vec<ValueId>,
    /// Outputs, in the operator's order.
    pub outputs: Vec<ValueId>,
    /// What it is there for, where whoever made the graph said so.
    pub tag: Option<Tag>,
}

/// Constant data made on demand, so that weights stream from their source to a file without a
/// second copy in memory.
pub trait ConstantSource: Send + Sync {
    /// Writes the elements from `first_element` on into `out`, little-endian in the element type
    /// of the constant's value. `out` is a whole number of elements and stays inside the constant.
    ///
    /// # Errors
    /// A sentence that names the source tensor and the problem.
    fn write(&self, first_element: usize, out: &mut [u8]) -> Result<(), String>;

    /// Identity of the data: two constants with equal keys have equal bytes and are stored once.
    fn key(&self) -> Option<String> {
        None
    }
}

/// Data of a constant value.
#[derive(Clone)]
pub enum Constant {
    /// Bytes at hand (owned or mapped).
    Tensor(Tensor),
    /// Bytes made on demand.
    Source(Arc<dyn ConstantSource>),
}

impl fmt::Debug for Constant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Constant::Tensor(tensor) => tensor.fmt(f),
            Constant::Source(source) => write!(f, "Source({:?})", source.key()),
        }
    }
}

/// A graph in execution order.
#[derive(Debug, Clone, Default)]
pub struct Graph {
    name: String,
    values: Vec<Value>,
    nodes: Vec<Node>,
    inputs: Vec<ValueId>,
    outputs: Vec<ValueId>,
    constants: BTreeMap<ValueId, Constant>,
    by_name: HashMap<String, ValueId>,
    node_names: HashSet<String>,
    /// The node that makes each value.
    producers: Vec<Option<usize>>,
    /// Of the nodes that are added next.
    tag: Option<Tag>,
}

impl Graph {
    /// An empty graph.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), ..Self::default() }
    }

    /// Name of the graph.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Nodes in execution order.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Inputs in order.
    pub fn inputs(&self) -> &[ValueId] {
        &self.inputs
    }

    /// Outputs in order.
    pub fn outputs(&self) -> &[ValueId] {
        &self.outputs
    }

    /// Constants in the order they were added.
    pub fn constants(&self) -> impl ExactSizeIterator<Item = (ValueId, &Constant)> {
        self.constants.iter().map(|(id, constant)| (*id, constant))
    }

    /// Data of a constant value.
    pub fn constant(&self, id: ValueId) -> Option<&Constant> {
        self.constants.get(&id)
    }

    /// A value of this graph.
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.0]
    }

    /// All values, in the order of creation.
    pub fn values(&self) -> &[Value] {
        &self.values
    }

    /// The value of that name.
    pub fn find(&self, name: &str) -> Option<ValueId> {
        self.by_name.get(name).copied()
    }

    /// The node that makes a value; `None` for inputs and constants.
    pub fn producer(&self, id: ValueId) -> Option<&Node> {
        self.nodes.get(self.producers.get(id.0).copied().flatten()?)
    }

    /// What the nodes that are added from now on are there for.
    pub fn set_tag(&mut self, tag: Option<Tag>) {
        self.tag = tag;
    }

    /// What the nodes that are added now are there for.
    pub fn tag(&self) -> Option<Tag> {
        self.tag
    }

    /// Says of every node what it is there for, by its name.
    pub fn tag_nodes(&mut self, tag: impl Fn(&str) -> Option<Tag>) {
        for node in &mut self.nodes {
            node.tag = tag(&node.name);
        }
    }

    /// Adds a graph input.
    ///
    /// # Errors
    /// When the name is taken or empty.
    pub fn input(
        &mut self,
        name: impl Into<String>,
        dtype: DType,
        shape: Vec<usize>,
    ) -> Result<ValueId, GraphError> {
        let id = self.add_value(Value { name: name.into(), dtype, shape })?;
        self.inputs.push(id);
        Ok(id)
    }

    /// Adds a constant.
    ///
    /// # Errors
    /// When the name is taken or empty, or a tensor's type or shape is another.
    pub fn add_constant(
        &mut self,
        name: impl Into<String>,
        dtype: DType,
        shape: Vec<usize>,
        constant: Constant,
    ) -> Result<ValueId, GraphError> {
        let name = name.into();
        if let Constant::Tensor(tensor) = &constant
            && (tensor.dtype() != dtype || tensor.shape() != shape)
        {
            let problem =
                format!("declared {dtype} {shape:?}, data {} {:?}", tensor.dtype(), tensor.shape());
            return Err(GraphError::Value { name, problem });
        }
        let id = self.add_value(Value { name, dtype, shape })?;
        self.constants.insert(id, constant);
        Ok(id)
    }

    /// Adds a node with one output of the given name; the node is named after it.
    ///
    /// # Errors
    /// When the inputs do not fit the operator or the name is taken.
    pub fn add(
        &mut self,
        op: Op,
        inputs: &[ValueId],
        output: impl Into<String>,
    ) -> Result<ValueId, GraphError> {
        let output = output.into();
        let node = format!("{output}/{}", op.name());
        let ids = self.add_node(node, op, inputs, vec![output])?;
        Ok(ids[0])
    }

    /// Adds a node with named outputs; their types and shapes are inferred.
    ///
    /// # Errors
    /// When the inputs do not fit the operator, the number of outputs is wrong or a name is taken.
    pub fn add_node(
        &mut self,
        name: impl Into<String>,
        op: Op,
        inputs: &[ValueId],
        outputs: Vec<String>,
    ) -> Result<Vec<ValueId>, GraphError> {
        let name = name.into();
        let described = || {
            let list: Vec<String> = inputs
                .iter()
                .map(|id| match self.values.get(id.0) {
                    Some(v) => format!("{} {} {:?}", v.name, v.dtype, v.shape),
                    None => "(no such value)".into(),
                })
                .collect();
            list.join(", ")
        };
        let fail = |problem: String| GraphError::Node {
            node: name.clone(),
            op: op.name(),
            problem,
            inputs: described(),
        };
        let types: Vec<&Value> = inputs.iter().filter_map(|id| self.values.get(id.0)).collect();
        if types.len() != inputs.len() {
            return Err(fail("an input does not exist".into()));
        }
        let inferred = infer(&op, &types).map_err(&fail)?;
        if inferred.len() != outputs.len() {
            return Err(fail(format!("{} outputs, {} names", inferred.len(), outputs.len())));
        }
        if name.is_empty() || self.node_names.contains(&name) {
            return Err(fail("the node's name is empty or taken".into()));
        }
        let mut ids = Vec::with_capacity(outputs.len());
        for ((dtype, shape), output) in inferred.into_iter().zip(outputs) {
            ids.push(self.add_value(Value { name: output, dtype, shape })?);
        }
        self.node_names.insert(name.clone());
        for id in &ids {
            if let Some(producer) = self.producers.get_mut(id.0) {
                *producer = Some(self.nodes.len());
            }
        }
        let (inputs, outputs, tag) = (inputs.to_vec(), ids.clone(), self.tag);
        self.nodes.push(Node { name, op, inputs, outputs, tag });
        Ok(ids)
    }

    /// Declares a value to be a graph output.
    ///
    /// # Errors
    /// When it is an output already.
    pub fn output(&mut self, id: ValueId) -> Result<(), GraphError> {
        if self.outputs.contains(&id) {
            let name = self.value(id).name.clone();
            return Err(GraphError::Value { name, problem: "is an output already".into() });
        }
        self.outputs.push(id);
        Ok(())
    }

    /// Number of nodes of each operator, by ONNX name.
    pub fn op_counts(&self) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        for node in &self.nodes {
            *counts.entry(node.op.name().to_owned()).or_insert(0) += 1;
        }
        counts
    }

    /// Proves the invariants: every node reads only inputs, constants and outputs of earlier
    /// nodes, its output types follow from its inputs, every value has one producer, and every
    /// node, input and constant is needed for some output.
    ///
    /// # Errors
    /// The first violation, by name.
    pub fn validate(&self) -> Result<(), GraphError> {
        let problem = |id: ValueId, problem: &str| GraphError::Value {
            name: self.value(id).name.clone(),
            problem: problem.into(),
        };
        let mut defined = vec![false; self.values.len()];
        for id in self.inputs.iter().chain(self.constants.keys()) {
            if std::mem::replace(&mut defined[id.0], true) {
                return Err(problem(*id, "has two producers"));
            }
        }
        for node in &self.nodes {
            for id in &node.inputs {
                if !defined[id.0] {
                    return Err(problem(
                        *id,
                        &format!("is read by {} before it exists", node.name),
                    ));
                }
            }
            let types: Vec<&Value> = node.inputs.iter().map(|id| self.value(*id)).collect();
            let inferred = infer(&node.op, &types).map_err(|text| GraphError::Node {
                node: node.name.clone(),
                op: node.op.name(),
                problem: text,
                inputs: format!("{types:?}"),
            })?;
            for (id, (dtype, shape)) in node.outputs.iter().zip(inferred) {
                let value = self.value(*id);
                if value.dtype != dtype || value.shape != shape {
                    return Err(problem(*id, "has another type than its node makes"));
                }
                if std::mem::replace(&mut defined[id.0], true) {
                    return Err(problem(*id, "has two producers"));
                }
            }
        }
        let mut needed = vec![false; self.values.len()];
        for id in &self.outputs {
            if !defined[id.0] {
                return Err(problem(*id, "is an output that nothing makes"));
            }
            needed[id.0] = true;
        }
        for node in self.nodes.iter().rev() {
            if !node.outputs.iter().any(|id| needed[id.0]) {
                return Err(problem(node.outputs[0], "is never used"));
            }
            for id in &node.inputs {
                needed[id.0] = true;
            }
        }
        for id in self.inputs.iter().chain(self.constants.keys()) {
            if !needed[id.0] {
                return Err(problem(*id, "is never used"));
            }
        }
        Ok(())
    }

    fn add_value(&mut self, value: Value) -> Result<ValueId, GraphError> {
        if value.name.is_empty() || self.by_name.contains_key(&value.name) {
            let problem = "the name is empty or taken".into();
            return Err(GraphError::Value { name: value.name, problem });
        }
        if value.dtype.byte_count(&value.shape).is_none() {
            let problem = format!("shape {:?} is too large", value.shape);
            return Err(GraphError::Value { name: value.name, problem });
        }
        let id = ValueId(self.values.len());
        self.by_name.insert(value.name.clone(), id);
        self.values.push(value);
        self.producers.push(None);
        Ok(id)
    }
}
