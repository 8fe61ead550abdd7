use crate::build::constant_bytes;
use crate::{CompileError, PartRole};
use firesteel_artifact::{Artifact, GraphEntry, GraphRole};
use firesteel_checkpoint::LayerKind;
use firesteel_graph::{Constant, Graph, GraphError, Op, ValueId};
use firesteel_step::{Encoding, Logits, PortEncoding, Role, StepSpec};
use firesteel_tensor::Tensor;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::PathBuf;

/// How a step is cut into parts of layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Split {
    /// Not at all while a graph's constants have at most [`PART_BYTES`]; else into as few parts as
    /// keep to that, with the head in a part of its own.
    #[default]
    Auto,
    /// Into this many parts, and the head; 1 leaves the artifact's graphs as they are.
    Parts(usize),
}

/// Bytes of constants in a part that is cut automatically. The compiler takes about four times as
/// much memory.
pub const PART_BYTES: u64 = 1 << 30;

/// A graph that becomes a context of its own.
pub(crate) struct Part {
    pub(crate) name: String,
    pub(crate) role: PartRole,
    /// Encodings of the ports that are integers.
    pub(crate) ports: Vec<PortEncoding>,
    /// What is meant.
    pub(crate) graph: Graph,
    /// Its file, where it is a graph of the artifact.
    pub(crate) model: Option<PathBuf>,
    /// What its content depends on besides the artifact's data files.
    pub(crate) identity: String,
}

impl Part {
    /// How to make it smaller.
    pub(crate) fn smaller(&self) -> &'static str {
        match &self.role {
            PartRole::Head { .. } => "export the head in shards (--head-shards)",
            PartRole::Layers { step } if step.layers.len() > 1 => {
                "compile fewer layers at once (--split)"
            }
            PartRole::Layers { .. } => "quantize it to fewer bits; one layer is not cut",
        }
    }
}

/// The parts of an artifact's step, named after `step`.
///
/// # Errors
/// When a graph cannot be read, or the step has fewer layers than parts are asked for.
pub(crate) fn parts(
    artifact: &Artifact,
    step: &str,
    split: Split,
) -> Result<Vec<Part>, CompileError> {
    let manifest = artifact.manifest();
    let mut parts = Vec::new();
    for entry in &manifest.graphs {
        let graph = artifact.read_graph(entry)?;
        match &entry.role {
            GraphRole::Step => parts.extend(slices(artifact, entry, graph, step, split)?),
            GraphRole::Head { rows } => {
                let number = parts
                    .iter()
                    .filter(|p: &&Part| matches!(p.role, PartRole::Head { .. }))
                    .count();
                parts.push(Part {
                    name: format!("{step}-head-{number}"),
                    role: PartRole::Head { rows: rows.clone() },
                    ports: manifest
                        .ports()
                        .iter()
                        .filter(|port| graph.find(&port.name).is_some())
                        .cloned()
                        .collect(),
                    graph,
                    model: Some(artifact.graph_path(entry)),
                    identity: entry.sha256.clone(),
                });
            }
        }
    }
    Ok(parts)
}

/// The step's own graph, whole or cut by layers.
fn slices(
    artifact: &Artifact,
    entry: &GraphEntry,
    graph: Graph,
    step: &str,
    split: Split,
) -> Result<Vec<Part>, CompileError> {
    let manifest = artifact.manifest();
    let spec = &manifest.step;
    let layers = spec.layers.len();
    let count = match split {
        Split::Auto if constant_bytes(&graph) <= PART_BYTES => 1,
        // Fewer cannot hold all constants.
        Split::Auto => {
            let whole = constant_bytes(&graph);
            let fewest = usize::try_from(whole.div_ceil(PART_BYTES)).unwrap_or(usize::MAX);
            let cutter = Cutter::new(&graph, artifact, entry);
            let mut count = fewest.saturating_sub(1).clamp(1, layers);
            while count < layers && cutter.largest(count)? > PART_BYTES {
                count += 1;
            }
            return cutter.parts(entry, step, count);
        }
        Split::Parts(count) if count <= layers => count,
        Split::Parts(count) => {
            let problem = format!("{count} parts of {layers} layers; at most {layers} is possible");
            return Err(CompileError::Option { option: "--split", problem });
        }
    };
    if count == 1 {
        return Ok(vec![Part {
            name: step.to_owned(),
            role: PartRole::Layers { step: Box::new(spec.clone()) },
            ports: manifest.ports().to_vec(),
            graph,
            model: Some(artifact.graph_path(entry)),
            identity: entry.sha256.clone(),
        }]);
    }
    Cutter::new(&graph, artifact, entry).parts(entry, step, count)
}

/// Cuts a step's graph at the values after layers.
struct Cutter<'a> {
    graph: &'a Graph,
    spec: &'a StepSpec,
    ports: &'a [PortEncoding],
    /// Names of the values after each layer.
    hidden: &'a [String],
}

/// A value at which the graph is cut: [T, H] in floats, or in integers with their scale and zero
/// point, which then cross the cut as they are.
struct Seam {
    value: ValueId,
    encoding: Option<[ValueId; 2]>,
}

/// A graph in the making from parts of another.
struct Copy<'a> {
    from: &'a Graph,
    to: Graph,
    ids: HashMap<ValueId, ValueId>,
    /// New names of inputs and outputs.
    names: HashMap<&'a str, String>,
}

impl<'a> Cutter<'a> {
    fn new(graph: &'a Graph, artifact: &'a Artifact, entry: &'a GraphEntry) -> Self {
        let manifest = artifact.manifest();
        Self { graph, spec: &manifest.step, ports: manifest.ports(), hidden: &entry.layer_hidden }
    }

    /// The layers of part `part` of `count`.
    fn range(&self, part: usize, count: usize) -> Range<usize> {
        let layers = self.spec.layers.len();
        layers * part / count..layers * (part + 1) / count
    }

    /// Bytes of the constants in the largest of `count` parts.
    fn largest(&self, count: usize) -> Result<u64, CompileError> {
        let mut largest = 0;
        for part in 0..count {
            let range = self.range(part, count);
            let (cut, _) = self.layers("part", &self.spec(range.clone())?, range)?;
            largest = largest.max(constant_bytes(&cut));
        }
        Ok(largest)
    }

    /// `count` parts of layers, and the head.
    fn parts(
        &self,
        entry: &GraphEntry,
        step: &str,
        count: usize,
    ) -> Result<Vec<Part>, CompileError> {
        let mut parts = Vec::with_capacity(count + 1);
        for part in 0..count {
            let range = self.range(part, count);
            let name = format!("{step}-layers-{}-{}", range.start, range.end);
            let identity = format!("{} layers {range:?}", entry.sha256);
            let slice = self.spec(range.clone())?;
            let (cut, ports) = self.layers(&name, &slice, range)?;
            let role = PartRole::Layers { step: Box::new(slice) };
            parts.push(Part { name, role, ports, graph: cut, model: None, identity });
        }
        if self.spec.logits != Logits::Hidden {
            let name = format!("{step}-head-0");
            let identity = format!("{} head", entry.sha256);
            let (cut, ports) = self.head(&name)?;
            let role = PartRole::Head { rows: 0..self.spec.vocab_size };
            parts.push(Part { name, role, ports, graph: cut, model: None, identity });
        }
        Ok(parts)
    }

    /// The contract of a slice: the hidden state in and out, layers numbered within it.
    fn spec(&self, range: Range<usize>) -> Result<StepSpec, CompileError> {
        let layers = self.spec.layers.get(range.clone()).unwrap_or_default().to_vec();
        let uses = |kind| layers.iter().any(|layer| layer.kind == kind);
        let slice = StepSpec {
            first_layer: self.spec.first_layer + range.start,
            sliding_window: self.spec.sliding_window.filter(|_| uses(LayerKind::Sliding)),
            rope_sliding: self.spec.rope_sliding.filter(|_| uses(LayerKind::Sliding)),
            rope_full: self.spec.rope_full.filter(|_| uses(LayerKind::Full)),
            logits: Logits::Hidden,
            layers,
            ..self.spec.clone()
        };
        let slice = slice.with_tokens(self.spec.tokens)?;
        slice.validate()?;
        Ok(slice)
    }

    fn seam(&self, layer: usize) -> Result<Seam, CompileError> {
        let name = self.hidden.get(layer).map_or("", String::as_str);
        let id = self.graph.find(name).ok_or_else(|| GraphError::Value {
            name: name.to_owned(),
            problem: "is the value after a layer by the manifest, but not in the graph".into(),
        })?;
        let producer = self.graph.nodes().iter().find(|node| node.outputs.contains(&id));
        Ok(match producer.map(|node| (&node.op, &node.inputs[..])) {
            Some((Op::DequantizeLinear { axis: None }, &[value, scale, zero_point])) => {
                Seam { value, encoding: Some([scale, zero_point]) }
            }
            _ => Seam { value: id, encoding: None },
        })
    }

    /// The graph of the layers `range`, whose contract is `slice`, and its integer ports.
    fn layers(
        &self,
        name: &str,
        slice: &StepSpec,
        range: Range<usize>,
    ) -> Result<(Graph, Vec<PortEncoding>), CompileError> {
        let renamed = |role: Role| match role {
            Role::KeyCache(i) => Role::KeyCache(i + range.start),
            Role::ValueCache(i) => Role::ValueCache(i + range.start),
            Role::KeyNew(i) => Role::KeyNew(i + range.start),
            Role::ValueNew(i) => Role::ValueNew(i + range.start),
            other => other,
        };
        // The name in the whole graph of every port of the slice that has one.
        let mut names = HashMap::new();
        for tensor in slice.inputs.iter().chain(&slice.outputs) {
            let mut whole = self.spec.inputs.iter().chain(&self.spec.outputs);
            if let Some(source) = whole.find(|source| source.role == renamed(tensor.role)) {
                names.insert(source.name.as_str(), tensor.name.clone());
            }
        }
        let mut ports: Vec<PortEncoding> = self
            .ports
            .iter()
            .filter_map(|port| {
                let name = names.get(port.name.as_str())?.clone();
                Some(PortEncoding { name, encoding: port.encoding })
            })
            .collect();
        if range.start > 0 {
            ports.retain(|port| port.name != "x");
        }
        let mut copy = Copy::new(self.graph, name, names);
        for tensor in &slice.inputs {
            if tensor.role == Role::Embedding && range.start > 0 {
                let seam = self.seam(range.start - 1)?;
                ports.extend(copy.enter(&seam, &tensor.name, &tensor.shape)?);
                continue;
            }
            let source = self.spec.inputs.iter().find(|source| source.role == renamed(tensor.role));
            let id = source.and_then(|source| self.graph.find(&source.name));
            copy.input(id.ok_or_else(|| absent(&tensor.name))?)?;
        }
        let mut outputs = Vec::new();
        for tensor in slice.outputs.iter().filter(|tensor| tensor.role != Role::Hidden) {
            let source =
                self.spec.outputs.iter().find(|source| source.role == renamed(tensor.role));
            let id = source.and_then(|source| self.graph.find(&source.name));
            outputs.push(id.ok_or_else(|| absent(&tensor.name))?);
        }
        let seam = self.seam(range.end - 1)?;
        let needed: Vec<ValueId> = outputs.iter().copied().chain([seam.value]).collect();
        copy.nodes(&needed)?;
        for tensor in &slice.outputs {
            if tensor.role == Role::Hidden {
                ports.extend(copy.leave(&seam, &tensor.name, &tensor.shape)?);
            }
        }
        copy.outputs(&outputs)?;
        Ok((copy.to, ports))
    }

    /// The graph from the last layer's value to the logits.
    fn head(&self, name: &str) -> Result<(Graph, Vec<PortEncoding>), CompileError> {
        let logits = self.spec.outputs.iter().find(|tensor| tensor.role == Role::Logits);
        let logits = logits.and_then(|tensor| self.graph.find(&tensor.name));
        let logits = logits.ok_or_else(|| absent("logits"))?;
        let mut copy = Copy::new(self.graph, name, HashMap::new());
        let seam = self.seam(self.spec.layers.len().saturating_sub(1))?;
        let shape = [1, self.spec.tokens, self.spec.hidden_size];
        let mut ports = Vec::from_iter(copy.enter(&seam, "hidden", &shape)?);
        copy.nodes(&[logits])?;
        copy.outputs(&[logits])?;
        ports.extend(self.ports.iter().filter(|port| port.name == "logits").cloned());
        Ok((copy.to, ports))
    }
}

fn absent(name: &str) -> GraphError {
    let problem = "is a port of the step, but not in the graph".into();
    GraphError::Value { name: name.to_owned(), problem }
}

impl<'a> Copy<'a> {
    fn new(from: &'a Graph, name: &str, names: HashMap<&'a str, String>) -> Self {
        Self { from, to: Graph::new(name), ids: HashMap::new(), names }
    }

    fn name(&self, id: ValueId) -> String {
        let name = self.from.value(id).name.as_str();
        self.names.get(name).cloned().unwrap_or_else(|| name.to_owned())
    }

    fn input(&mut self, id: ValueId) -> Result<(), GraphError> {
        let value = self.from.value(id);
        let new = self.to.input(self.name(id), value.dtype, value.shape.clone())?;
        self.ids.insert(id, new);
        Ok(())
    }

    /// The copy of a constant.
    fn constant(&mut self, id: ValueId) -> Result<ValueId, GraphError> {
        if let Some(known) = self.ids.get(&id) {
            return Ok(*known);
        }
        let value = self.from.value(id);
        let constant = self.from.constant(id).cloned().ok_or_else(|| GraphError::Value {
            name: value.name.clone(),
            problem: "crosses a cut between layers, and is no constant".into(),
        })?;
        let name = self.name(id);
        let new = self.to.add_constant(name, value.dtype, value.shape.clone(), constant)?;
        self.ids.insert(id, new);
        Ok(new)
    }

    /// Makes the value of a seam from an input `name` of `shape`.
    fn enter(
        &mut self,
        seam: &Seam,
        name: &str,
        shape: &[usize],
    ) -> Result<Option<PortEncoding>, GraphError> {
        let value = self.from.value(seam.value);
        let input = self.to.input(name, value.dtype, shape.to_vec())?;
        let rows = self.reshape(seam, input, &format!("{name}.rows"), value.shape.clone())?;
        self.ids.insert(seam.value, rows);
        Ok(self.port(seam, name))
    }

    /// Makes an output `name` of `shape` from the value of a seam.
    fn leave(
        &mut self,
        seam: &Seam,
        name: &str,
        shape: &[usize],
    ) -> Result<Option<PortEncoding>, GraphError> {
        let id = self.ids.get(&seam.value).copied().ok_or_else(|| absent(name))?;
        let output = self.reshape(seam, id, name, shape.to_vec())?;
        self.to.output(output)?;
        Ok(self.port(seam, name))
    }

    /// The same elements as `name` under another shape; between integers as the compiler wants it.
    fn reshape(
        &mut self,
        seam: &Seam,
        id: ValueId,
        name: &str,
        shape: Vec<usize>,
    ) -> Result<ValueId, GraphError> {
        let op = Op::Reshape { shape };
        let Some([scale, zero_point]) = seam.encoding else {
            return self.to.add(op, &[id], name);
        };
        let (scale, zero_point) = (self.constant(scale)?, self.constant(zero_point)?);
        let (dequantize, quantize) =
            (Op::DequantizeLinear { axis: None }, Op::QuantizeLinear { axis: None });
        let real = self.to.add(dequantize, &[id, scale, zero_point], format!("{name}.real"))?;
        let shaped = self.to.add(op, &[real], format!("{name}.shaped"))?;
        self.to.add(quantize, &[shaped, scale, zero_point], name)
    }

    fn port(&self, seam: &Seam, name: &str) -> Option<PortEncoding> {
        let [scale, zero_point] = seam.encoding?;
        let tensor = |id| match self.from.constant(id) {
            Some(Constant::Tensor(tensor)) => Some(tensor),
            _ => None,
        };
        let first = |tensor: &Tensor| tensor.view().to_f32().ok()?.first().copied();
        let zero = tensor(zero_point)?.view().to_i32().ok()?.first().copied()?;
        let dtype = self.from.value(seam.value).dtype;
        let encoding = Encoding { dtype, scale: first(tensor(scale)?)?, zero_point: zero };
        Some(PortEncoding { name: name.to_owned(), encoding })
    }

    /// Copies every node that `outputs` need and that is not made yet.
    fn nodes(&mut self, outputs: &[ValueId]) -> Result<(), GraphError> {
        let mut needed: HashSet<ValueId> = outputs.iter().copied().collect();
        let mut wanted = Vec::new();
        for node in self.from.nodes().iter().rev() {
            let made = node.outputs.iter().any(|id| self.ids.contains_key(id));
            if !made && node.outputs.iter().any(|id| needed.contains(id)) {
                needed.extend(&node.inputs);
                wanted.push(node);
            }
        }
        for node in wanted.into_iter().rev() {
            let mut inputs = Vec::with_capacity(node.inputs.len());
            for id in &node.inputs {
                inputs.push(self.constant(*id)?);
            }
            let names = node.outputs.iter().map(|id| self.name(*id)).collect();
            self.to.set_tag(node.tag);
            let made = self.to.add_node(&node.name, node.op.clone(), &inputs, names)?;
            self.ids.extend(node.outputs.iter().copied().zip(made));
        }
        Ok(())
    }

    fn outputs(&mut self, outputs: &[ValueId]) -> Result<(), GraphError> {
        for id in outputs {
            let new = self.ids.get(id).copied().ok_or_else(|| absent(&self.name(*id)))?;
            self.to.output(new)?;
        }
        Ok(())
    }
}
