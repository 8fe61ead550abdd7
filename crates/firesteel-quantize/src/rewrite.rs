//! A step's graph in floats as one of integers between floats.
//!
//! Every operator stays what it is; its operands come from a `DequantizeLinear` and its result goes
//! into a `QuantizeLinear`, which a compiler for integers reads as one operation. Every reader has
//! a `DequantizeLinear` of its own. Where a reader wants another type than the value has, one
//! converts in between, so that no operator mixes types.

use crate::calibrate::moves;
use crate::names::range_key;
use crate::plan::{graphs, require_tags};
use crate::weights::{QuantizedMatrix, WeightBits};
use crate::{GraphKv, MatrixPlan, QuantizeError, Ranges, Rounding, ValueFormats, WeightWidth};
use firesteel_artifact::QuantizedWeight;
use firesteel_export::{Dialect, ExportError, HeadGraph, StepGraphs, WideTensors, lint};
use firesteel_graph::{Constant, Graph, Node, Op, Part, Tag, ValueId};
use firesteel_step::{Encoding, PortEncoding, Role, StepSpec};
use firesteel_tensor::{Buffer, DType, Tensor};
use rayon::prelude::*;
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};

/// Where ranges come from.
#[derive(Debug, Clone, Copy)]
pub enum RangeSource<'a> {
    /// From a text.
    Calibrated(&'a Ranges),
    /// Made up: the graph has the right operations and wrong numbers.
    Uncalibrated,
}

/// A quantized step.
#[derive(Debug)]
pub struct Quantized {
    /// The graphs. Their contract has floats for keys and values; see `ports`.
    pub graphs: StepGraphs,
    /// Inputs and outputs of the step's graph that are integers.
    pub ports: Vec<PortEncoding>,
    /// The matrices.
    pub weights: Vec<QuantizedWeight>,
    /// Bits for each weight of the matrices, scales included.
    pub bits_per_weight: f64,
}

/// Room above a range that was seen, for values that a text did not show: a quarter costs a 16-bit
/// number a third of a bit, and saturation costs everything.
const HEADROOM: f64 = 1.25;

/// Range of a value without calibration.
const MADE_UP: [f64; 2] = [-16.0, 16.0];

/// The mask that is surely enough for scores that are not extreme, and the range of masked scores.
const MASK: f64 = -50.0;
const MASKED_SCORES: [f64; 2] = [-60.0, 20.0];

/// What e^−x has no share in any more.
const NEGLIGIBLE: f64 = 16.0;

/// Quantizes the graphs of `step`, which are spelled for [`Dialect::Qnn`], as `plan` says.
///
/// # Errors
/// When a value has no range, a matrix cannot be rounded, or the graph has something that has no
/// spelling in integers.
pub fn quantize(
    step: &StepGraphs,
    plan: &[MatrixPlan],
    ranges: RangeSource<'_>,
    formats: ValueFormats,
    rounding: Rounding<'_>,
) -> Result<Quantized, QuantizeError> {
    let spec = StepSpec { dtype: DType::F32, ..step.spec.clone() }.with_tokens(step.spec.tokens)?;
    let matrices: HashMap<(usize, &str), Matrix> = plan
        .par_iter()
        .map(|matrix| {
            let graph = graphs(step).nth(matrix.graph).map(|(_, graph)| graph);
            let graph = graph.ok_or_else(|| missing(matrix))?;
            Ok(((matrix.graph, matrix.name.as_str()), Matrix::new(graph, matrix, rounding)?))
        })
        .collect::<Result<_, QuantizeError>>()?;
    let mut ports = Vec::new();
    let mut rewritten = Vec::new();
    for (index, graph) in graphs(step) {
        require_tags(graph)?;
        let rewriter = Rewriter {
            source: graph,
            index,
            spec: &spec,
            ranges,
            activations: formats.activations.dtype(),
            kv: formats.kv,
            matrices: &matrices,
            graph: Graph::new(graph.name()),
            states: HashMap::new(),
            converted: HashMap::new(),
            parameters: HashMap::new(),
            entries: HashMap::new(),
        };
        let (graph, found) = rewriter.run()?;
        graph.validate()?;
        let findings = lint(&graph, Dialect::Qnn);
        if let Some(first) = findings.first().cloned() {
            let (count, dialect) = (findings.len(), Dialect::Qnn);
            return Err(ExportError::Lint { count, dialect, first }.into());
        }
        ports.extend(found);
        rewritten.push(graph);
    }
    let mut rewritten = rewritten.into_iter();
    let graph = rewritten.next().unwrap_or_default();
    let heads = step.heads.iter().zip(rewritten);
    let heads = heads.map(|(head, graph)| HeadGraph { graph, rows: head.rows.clone() }).collect();
    let weights = plan.iter().map(|matrix| QuantizedWeight {
        name: matrix.name.clone(),
        dtype: matrix.width.dtype(),
        rows: matrix.rows,
        columns: matrix.columns,
    });
    let (bits, elements) = plan.iter().fold((0.0, 0.0), |(bits, elements), matrix| {
        let count = matrix.rows as f64 * matrix.columns as f64;
        (bits + matrix.width.bits(matrix.rows, matrix.columns), elements + count)
    });
    let wide = WideTensors {
        f32_values: Vec::new(),
        reason: "values are integers between operators; what is written as f32 around them is \
                 never in memory on the processor"
            .into(),
    };
    Ok(Quantized {
        graphs: StepGraphs {
            spec,
            graph,
            heads,
            layer_hidden: step.layer_hidden.clone(),
            wide,
            tensors_read: step.tensors_read,
        },
        ports,
        weights: weights.collect(),
        bits_per_weight: bits / f64::max(elements, 1.0),
    })
}

fn missing(matrix: &MatrixPlan) -> QuantizeError {
    QuantizeError::Plan { name: matrix.name.clone(), problem: "is not in the graph".into() }
}

/// A matrix as its graph will have it.
enum Matrix {
    Float(Tensor),
    /// Integers, scales (one, or one a row), and the axis of the scales.
    Integers {
        values: Tensor,
        scales: Tensor,
        axis: Option<usize>,
    },
}

impl Matrix {
    fn new(
        graph: &Graph,
        plan: &MatrixPlan,
        rounding: Rounding<'_>,
    ) -> Result<Self, QuantizeError> {
        let id = graph.find(&plan.name).ok_or_else(|| missing(plan))?;
        let values = constant_f32(graph, id)?;
        let shape = vec![plan.rows, plan.columns];
        let bits = match plan.width {
            WeightWidth::Float => {
                let values = Tensor::from_f32_as(DType::F16, shape, values)?;
                if values.view().first_non_finite().is_some() {
                    return Err(QuantizeError::NonFinite { name: plan.name.clone() });
                }
                return Ok(Self::Float(values));
            }
            WeightWidth::Sixteen => {
                let magnitude = values.iter().fold(0f32, |most, w| most.max(w.abs()));
                let encoding = symmetric(DType::I16, magnitude.into());
                let values = Tensor::from_f32(shape, values)?;
                if values.view().first_non_finite().is_some() {
                    return Err(QuantizeError::NonFinite { name: plan.name.clone() });
                }
                return Ok(Self::Integers {
                    values: encoding.quantize(values.view())?,
                    scales: Tensor::from_f32(vec![], vec![encoding.scale])?,
                    axis: None,
                });
            }
            WeightWidth::Four => WeightBits::Four,
            WeightWidth::Eight => WeightBits::Eight,
        };
        let matrix = rounding(plan, &values, bits).map_err(|source| QuantizeError::Weight {
            name: plan.name.clone(),
            source: Box::new(source),
        })?;
        let codes: Vec<i32> = matrix.codes.iter().copied().map(i32::from).collect();
        Ok(Self::Integers {
            values: Tensor::from_i32_as(plan.width.dtype(), shape, &codes)?,
            scales: Tensor::from_f32(vec![plan.rows], matrix.scales)?,
            axis: Some(0),
        })
    }
}

/// A constant in memory.
pub(crate) fn constant(graph: &Graph, id: ValueId) -> Result<Cow<'_, Tensor>, QuantizeError> {
    let value = graph.value(id);
    let problem = |problem: String| QuantizeError::Graph { node: value.name.clone(), problem };
    match graph.constant(id) {
        Some(Constant::Tensor(tensor)) => Ok(Cow::Borrowed(tensor)),
        Some(Constant::Source(source)) => {
            let length = value.dtype.byte_count(&value.shape).unwrap_or_default();
            let mut bytes = vec![0; length];
            source.write(0, &mut bytes).map_err(problem)?;
            let bytes = Buffer::from(&bytes[..]);
            Ok(Cow::Owned(Tensor::from_buffer(value.dtype, value.shape.clone(), bytes)?))
        }
        None => Err(problem("is not a constant".into())),
    }
}

/// All elements of a constant.
pub(crate) fn constant_f32(graph: &Graph, id: ValueId) -> Result<Vec<f32>, QuantizeError> {
    Ok(constant(graph, id)?.view().to_f32()?.into_owned())
}

/// The matrices of 4 and 8 bits with a scale a row in a quantized graph, by name.
///
/// # Errors
/// When a constant cannot be read.
pub fn stored_matrices(graph: &Graph) -> Result<BTreeMap<String, QuantizedMatrix>, QuantizeError> {
    let mut matrices = BTreeMap::new();
    for node in graph.nodes().iter().filter(|n| n.op == Op::DequantizeLinear { axis: Some(0) }) {
        let &[codes, scales, ..] = &node.inputs[..] else { continue };
        let value = graph.value(codes);
        let (&[rows, columns], Some(_)) = (&value.shape[..], graph.constant(codes)) else {
            continue;
        };
        let bits = match value.dtype {
            DType::I4 => WeightBits::Four,
            DType::I8 => WeightBits::Eight,
            _ => continue,
        };
        let [least, largest] = bits.codes().map(i32::from);
        let code = |code: &i32| (*code).clamp(least, largest) as i8;
        let codes = constant(graph, codes)?.view().to_i32()?.iter().map(code).collect();
        let scales = constant_f32(graph, scales)?;
        let matrix = QuantizedMatrix { bits, rows, columns, codes, scales };
        matrices.insert(value.name.clone(), matrix);
    }
    Ok(matrices)
}

/// Zero point 0, for magnitudes up to `magnitude`.
fn symmetric(dtype: DType, magnitude: f64) -> Encoding {
    let most = dtype.integer_range().unwrap_or_default().1;
    Encoding { dtype, scale: scale(magnitude / f64::from(most)), zero_point: 0 }
}

/// All integers for a range, which is widened to contain 0.
fn asymmetric(dtype: DType, [low, high]: [f64; 2]) -> Encoding {
    let (least, most) = dtype.integer_range().unwrap_or_default();
    let (low, high) = (low.min(0.0), high.max(0.0));
    let scale = scale((high - low) / f64::from(most - least));
    let zero = (f64::from(least) - low / f64::from(scale)).round_ties_even();
    let zero_point = (zero as i32).clamp(least, most);
    Encoding { dtype, scale, zero_point }
}

/// A scale that is a normal number.
fn scale(scale: f64) -> f32 {
    (scale as f32).clamp(1e-30, 1e30)
}

/// The range that an encoding holds.
pub(crate) fn range_of(encoding: Encoding) -> [f64; 2] {
    let (least, most) = encoding.dtype.integer_range().unwrap_or_default();
    [least, most].map(|q| f64::from(q - encoding.zero_point) * f64::from(encoding.scale))
}

/// A value in the new graph.
#[derive(Clone, Copy)]
enum State {
    /// Integers.
    Integers(ValueId, Encoding),
    /// Floats that no `QuantizeLinear` follows.
    Floats(ValueId),
}

type Built<T> = Result<T, QuantizeError>;

/// What makes two encodings the same.
type EncodingKey = (DType, u32, i32);

fn key(encoding: Encoding) -> EncodingKey {
    (encoding.dtype, encoding.scale.to_bits(), encoding.zero_point)
}

struct Rewriter<'a> {
    source: &'a Graph,
    index: usize,
    spec: &'a StepSpec,
    ranges: RangeSource<'a>,
    activations: DType,
    kv: GraphKv,
    matrices: &'a HashMap<(usize, &'a str), Matrix>,
    graph: Graph,
    states: HashMap<ValueId, State>,
    converted: HashMap<(ValueId, EncodingKey), ValueId>,
    /// Scale and zero point of each encoding.
    parameters: HashMap<EncodingKey, (ValueId, ValueId)>,
    /// New entries of a cache, as floats, with the encoding of the cache.
    entries: HashMap<ValueId, Encoding>,
}

impl Rewriter<'_> {
    fn run(mut self) -> Built<(Graph, Vec<PortEncoding>)> {
        let mut ports = self.inputs()?;
        let source = self.source;
        for node in source.nodes() {
            self.node(node)?;
        }
        for id in source.outputs() {
            let name = &source.value(*id).name;
            let state = self.state(*id)?;
            let new = self.spec.outputs.iter().find(|output| output.name == *name);
            let is_entry =
                new.is_some_and(|t| matches!(t.role, Role::KeyNew(_) | Role::ValueNew(_)));
            let output = match state {
                State::Integers(_, own) if is_entry && self.kv != GraphKv::F16 => {
                    let encoding = self.entries.get(id).copied().unwrap_or(own);
                    ports.push(PortEncoding { name: name.clone(), encoding });
                    self.integers(*id, encoding)?
                }
                State::Integers(..) => match self.graph.find(name) {
                    Some(read) => read,
                    None => self.read(*id, None)?,
                },
                State::Floats(value) => value,
            };
            self.graph.output(output)?;
        }
        Ok((self.graph, ports))
    }

    /// The inputs of the graph; returns those that are integers.
    fn inputs(&mut self) -> Built<Vec<PortEncoding>> {
        let source = self.source;
        let mut ports = Vec::new();
        for id in source.inputs() {
            let value = source.value(*id);
            let known = self.spec.inputs.iter().find(|input| input.name == value.name);
            let role = known.map(|input| input.role);
            if let Some(Role::KeyCache(_) | Role::ValueCache(_)) = role {
                let entry = self.entry_of(*id)?;
                let Some(encoding) = self.cache_encoding(entry)? else {
                    let input = self.graph.input(&value.name, DType::F32, value.shape.clone())?;
                    self.states.insert(*id, State::Floats(input));
                    continue;
                };
                let input = self.graph.input(&value.name, encoding.dtype, value.shape.clone())?;
                self.states.insert(*id, State::Integers(input, encoding));
                self.entries.insert(entry, encoding);
                ports.push(PortEncoding { name: value.name.clone(), encoding });
                continue;
            }
            let input = self.graph.input(&value.name, DType::F32, value.shape.clone())?;
            let encoding = match role {
                Some(Role::Cos(kind) | Role::Sin(kind)) => {
                    let magnitude = self.spec.rope(kind).map_or(1.0, |rope| rope.magnitude());
                    asymmetric(self.activations, [-magnitude, magnitude])
                }
                Some(Role::Mask(_)) => asymmetric(self.activations, [self.mask_floor(*id)?, 0.0]),
                _ => asymmetric(DType::U16, self.range(*id, DType::U16)?),
            };
            let q = self.quantize(input, encoding, &format!("{}.q", value.name))?;
            self.states.insert(*id, State::Integers(q, encoding));
        }
        Ok(ports)
    }

    /// What is joined to a cache.
    fn entry_of(&self, cache: ValueId) -> Built<ValueId> {
        let joins = |node: &&Node| matches!(node.op, Op::Concat { .. }) && node.inputs[0] == cache;
        let node = self.source.nodes().iter().find(joins);
        node.and_then(|node| node.inputs.get(1).copied()).ok_or_else(|| QuantizeError::Graph {
            node: self.source.value(cache).name.clone(),
            problem: "no new entry is joined to this cache".into(),
        })
    }

    /// The encoding of a cache whose new entries are `entry`; `None` for floats.
    fn cache_encoding(&self, entry: ValueId) -> Built<Option<Encoding>> {
        let of = |dtype| self.range(entry, dtype);
        let magnitude = |[low, high]: [f64; 2]| high.max(-low);
        Ok(Some(match self.kv {
            GraphKv::S16 => symmetric(DType::I16, magnitude(of(DType::I16)?)),
            GraphKv::S8 => symmetric(DType::I8, magnitude(of(DType::I8)?)),
            GraphKv::U8 => asymmetric(DType::U8, of(DType::U8)?),
            GraphKv::F16 => return Ok(None),
        }))
    }

    /// The range of a value of the source, for integers of type `dtype`.
    fn range(&self, id: ValueId, dtype: DType) -> Built<[f64; 2]> {
        let RangeSource::Calibrated(ranges) = self.ranges else { return Ok(MADE_UP) };
        let key = range_key(self.source, id, self.spec);
        let value = || self.source.value(id).name.clone();
        let range = ranges.tensors.get(&key);
        let range = range.ok_or_else(|| QuantizeError::NoRange { key, value: value() })?;
        Ok(if dtype.bits() > 8 { range.range16.map(|side| side * HEADROOM) } else { range.range8 })
    }

    /// Ranges of the scores that `mask` is added to, masked ones left out.
    fn scores(&self, mask: ValueId) -> Built<Vec<[f64; 2]>> {
        let adds = |node: &&Node| node.op == Op::Add && node.inputs.contains(&mask);
        let nodes = self.source.nodes().iter().filter(adds);
        nodes.map(|node| self.range(node.outputs[0], DType::U16)).collect()
    }

    /// The smallest number of a mask: a masked score is then so far below every other one of any
    /// row that it has no share.
    fn mask_floor(&self, mask: ValueId) -> Built<f64> {
        let spread = |[low, high]: [f64; 2]| low.min(0.0) - high.max(0.0) - NEGLIGIBLE;
        let floors = self.scores(mask)?.into_iter().map(spread);
        Ok(floors.fold(MASK, f64::min))
    }

    fn state(&self, id: ValueId) -> Built<State> {
        self.states.get(&id).copied().ok_or_else(|| QuantizeError::Graph {
            node: self.source.value(id).name.clone(),
            problem: "is read before it is made".into(),
        })
    }

    /// `base`, or the first of `base.2`, `base.3` and so on that is free.
    fn free_name(&self, base: &str) -> String {
        if self.graph.find(base).is_none() {
            return base.to_owned();
        }
        let numbered = (2usize..).map(|number| format!("{base}.{number}"));
        numbered.into_iter().find(|name| self.graph.find(name).is_none()).unwrap_or_default()
    }

    /// Scale and zero point of an encoding, named after the first value that has it.
    fn parameters(&mut self, encoding: Encoding, name: &str) -> Built<[ValueId; 2]> {
        if let Some(&(scale, zero)) = self.parameters.get(&key(encoding)) {
            return Ok([scale, zero]);
        }
        let tensor = Constant::Tensor(Tensor::from_f32(vec![], vec![encoding.scale])?);
        let scale_name = self.free_name(&format!("{name}.scale"));
        let scale = self.graph.add_constant(scale_name, DType::F32, vec![], tensor)?;
        let tensor = Tensor::from_i32_as(encoding.dtype, vec![], &[encoding.zero_point])?;
        let tensor = Constant::Tensor(tensor);
        let zero_name = self.free_name(&format!("{name}.zero_point"));
        let zero = self.graph.add_constant(zero_name, encoding.dtype, vec![], tensor)?;
        self.parameters.insert(key(encoding), (scale, zero));
        Ok([scale, zero])
    }

    fn quantize(&mut self, x: ValueId, encoding: Encoding, output: &str) -> Built<ValueId> {
        let [scale, zero] = self.parameters(encoding, output)?;
        self.convert(Op::QuantizeLinear { axis: None }, &[x, scale, zero], output)
    }

    fn dequantize(&mut self, q: ValueId, encoding: Encoding, output: &str) -> Built<ValueId> {
        let [scale, zero] = self.parameters(encoding, output)?;
        self.convert(Op::DequantizeLinear { axis: None }, &[q, scale, zero], output)
    }

    /// Adds a change of the element type, which belongs to the layer that it is for.
    fn convert(&mut self, op: Op, inputs: &[ValueId], output: &str) -> Built<ValueId> {
        let around = self.graph.tag();
        let layer = around.and_then(|tag| tag.layer);
        self.graph.set_tag(Some(Tag { layer, part: Part::Conversion }));
        let made = self.graph.add(op, inputs, output);
        self.graph.set_tag(around);
        Ok(made?)
    }

    /// Whether the graph gives `id`'s integers back as new entries, under its name.
    fn leaves_as_integers(&self, id: ValueId) -> bool {
        let name = &self.source.value(id).name;
        let port = self.spec.outputs.iter().find(|output| output.name == *name);
        self.kv != GraphKv::F16
            && self.source.outputs().contains(&id)
            && port.is_some_and(|t| matches!(t.role, Role::KeyNew(_) | Role::ValueNew(_)))
    }

    /// The integers of a value in `encoding`.
    fn integers(&mut self, id: ValueId, encoding: Encoding) -> Built<ValueId> {
        let name = self.source.value(id).name.clone();
        let real = match self.state(id)? {
            State::Integers(q, own) if own == encoding => return Ok(q),
            State::Integers(q, own) => {
                if let Some(known) = self.converted.get(&(id, key(encoding))) {
                    return Ok(*known);
                }
                let read = self.read_name(id, own, own);
                self.dequantize(q, own, &read)?
            }
            State::Floats(value) => value,
        };
        let leaves = self.leaves_as_integers(id) && self.entries.get(&id) == Some(&encoding);
        let q_name =
            if leaves { name } else { self.free_name(&format!("{name}.{}", encoding.dtype)) };
        let converted = self.quantize(real, encoding, &q_name)?;
        self.converted.insert((id, key(encoding)), converted);
        Ok(converted)
    }

    /// A value as floats, for one reader, in the encoding that it has or in another.
    fn read(&mut self, id: ValueId, encoding: Option<Encoding>) -> Built<ValueId> {
        let own = match self.state(id)? {
            State::Floats(value) => return Ok(value),
            State::Integers(_, own) => own,
        };
        let encoding = encoding.unwrap_or(own);
        let q = self.integers(id, encoding)?;
        let name = self.read_name(id, own, encoding);
        self.dequantize(q, encoding, &name)
    }

    /// A free name for a value as floats: its own for the first reader, unless it is that of an
    /// input or output with integers.
    fn read_name(&self, id: ValueId, own: Encoding, encoding: Encoding) -> String {
        let name = &self.source.value(id).name;
        let taken = self.leaves_as_integers(id) || self.source.inputs().contains(&id);
        self.free_name(&match (own == encoding, taken) {
            (true, false) => name.clone(),
            (true, true) => format!("{name}.real"),
            (false, _) => format!("{name}.{}.real", encoding.dtype),
        })
    }

    /// The encoding of a value in the type `dtype`, over the range that it has.
    fn in_type(&self, id: ValueId, dtype: DType) -> Built<Option<Encoding>> {
        Ok(match self.state(id)? {
            State::Floats(_) => None,
            State::Integers(_, own) if own.dtype == dtype => Some(own),
            State::Integers(_, own) => Some(asymmetric(dtype, range_of(own))),
        })
    }

    /// A node whose result has the encoding of its first input.
    fn moved(&mut self, node: &Node) -> Built<()> {
        let x = self.read(node.inputs[0], None)?;
        let state = self.state(node.inputs[0])?;
        self.finish(
            node,
            &[x],
            match state {
                State::Integers(_, encoding) => Some(encoding),
                State::Floats(_) => None,
            },
        )
    }

    /// Adds `node` over `inputs` and quantizes its results.
    fn finish(&mut self, node: &Node, inputs: &[ValueId], encoding: Option<Encoding>) -> Built<()> {
        let names: Vec<&String> =
            node.outputs.iter().map(|id| &self.source.value(*id).name).collect();
        let real = |name: &String| match encoding {
            Some(_) => format!("{name}.raw"),
            None => name.clone(),
        };
        let outputs = names.iter().map(|name| real(name)).collect();
        let made = self.graph.add_node(&node.name, node.op.clone(), inputs, outputs)?;
        for ((id, made), name) in node.outputs.iter().zip(made).zip(names) {
            let state = match encoding {
                None => State::Floats(made),
                Some(encoding) => {
                    // What leaves in this encoding has its own name already.
                    let entry = self.entries.get(id);
                    let leaves =
                        self.leaves_as_integers(*id) && entry.is_none_or(|e| *e == encoding);
                    let q_name = if leaves { name.clone() } else { format!("{name}.q") };
                    State::Integers(self.quantize(made, encoding, &q_name)?, encoding)
                }
            };
            self.states.insert(*id, state);
        }
        Ok(())
    }

    fn node(&mut self, node: &Node) -> Built<()> {
        self.graph.set_tag(node.tag);
        match &node.op {
            op if moves(op) => self.moved(node),
            Op::Concat { .. } => self.concat(node),
            Op::Gemm => self.gemm(node),
            Op::MatMul => {
                let (a, b) = (node.inputs[0], node.inputs[1]);
                let a_encoding = self.in_type(a, self.activations)?;
                // Keys and values stay as they are cached.
                let inputs = [self.read(a, a_encoding)?, self.read(b, None)?];
                let encoding =
                    asymmetric(self.activations, self.range(node.outputs[0], self.activations)?);
                self.finish(node, &inputs, Some(encoding))
            }
            Op::RmsNormalization { .. }
            | Op::Softmax { .. }
            | Op::Sigmoid
            | Op::Neg
            | Op::Add
            | Op::Sub
            | Op::Mul
            | Op::Gelu(_) => self.elementwise(node),
            other => Err(QuantizeError::Graph {
                node: node.name.clone(),
                problem: format!(
                    "{} has no spelling in integers; export with --dialect qnn",
                    other.name()
                ),
            }),
        }
    }

    /// Type of the operands and the result of a node.
    fn type_of(&self, node: &Node) -> DType {
        let part = node.tag.map(|tag| tag.part);
        let wide = match node.op {
            Op::RmsNormalization { .. } => true,
            Op::Gemm => part == Some(Part::HeadGateProjection),
            Op::Sigmoid => part == Some(Part::HeadGate),
            Op::Add => part.is_some_and(Part::is_residual),
            _ => false,
        };
        if wide { DType::U16 } else { self.activations }
    }

    fn elementwise(&mut self, node: &Node) -> Built<()> {
        let dtype = self.type_of(node);
        let mut inputs = Vec::with_capacity(node.inputs.len());
        for id in &node.inputs {
            inputs.push(match self.source.constant(*id) {
                Some(_) => self.constant(*id, dtype)?,
                None => {
                    let encoding = self.in_type(*id, dtype)?;
                    self.read(*id, encoding)?
                }
            });
        }
        let mask = node.inputs.iter().find(|id| {
            let name = &self.source.value(**id).name;
            let input = self.spec.inputs.iter().find(|input| input.name == *name);
            input.is_some_and(|input| matches!(input.role, Role::Mask(_)))
        });
        let encoding = match (&node.op, mask) {
            (Op::Softmax { .. } | Op::Sigmoid, _) => asymmetric(dtype, [0.0, 1.0]),
            (Op::Add, Some(_)) => {
                let [low, high] = self.range(node.outputs[0], DType::U16)?;
                let [least, most] = MASKED_SCORES;
                asymmetric(dtype, [least.min(low - NEGLIGIBLE), most.max(high)])
            }
            (Op::Neg, _) => match self.in_type(node.inputs[0], dtype)? {
                // The integers are mirrored, so nothing is rounded.
                Some(own) => {
                    let (least, most) = dtype.integer_range().unwrap_or_default();
                    Encoding { zero_point: least + most - own.zero_point, ..own }
                }
                None => asymmetric(dtype, self.range(node.outputs[0], dtype)?),
            },
            _ => asymmetric(dtype, self.range(node.outputs[0], dtype)?),
        };
        self.finish(node, &inputs, Some(encoding))
    }

    /// A constant of floats as integers.
    fn constant(&mut self, id: ValueId, dtype: DType) -> Built<ValueId> {
        let value = self.source.value(id);
        let base = format!("{}.{dtype}", value.name);
        let values = Tensor::from_f32(value.shape.clone(), constant_f32(self.source, id)?)?;
        if values.view().first_non_finite().is_some() {
            return Err(QuantizeError::NonFinite { name: value.name.clone() });
        }
        let floats = values.view().to_f32()?;
        let range = floats.iter().fold([0f32; 2], |[low, high], x| [low.min(*x), high.max(*x)]);
        let encoding = asymmetric(dtype, range.map(f64::from));
        let q = match self.graph.find(&base) {
            Some(known) => known,
            None => {
                let tensor = encoding.quantize(values.view())?;
                let shape = value.shape.clone();
                self.graph.add_constant(&base, dtype, shape, Constant::Tensor(tensor))?
            }
        };
        let name = self.free_name(&value.name);
        self.dequantize(q, encoding, &name)
    }

    fn concat(&mut self, node: &Node) -> Built<()> {
        let states: Vec<State> =
            node.inputs.iter().map(|id| self.state(*id)).collect::<Built<_>>()?;
        if states.iter().any(|state| matches!(state, State::Floats(_))) {
            let inputs: Vec<ValueId> =
                node.inputs.iter().map(|id| self.read(*id, None)).collect::<Built<_>>()?;
            return self.finish(node, &inputs, None);
        }
        let own: Vec<Encoding> = states
            .iter()
            .filter_map(|state| match state {
                State::Integers(_, encoding) => Some(*encoding),
                State::Floats(_) => None,
            })
            .collect();
        // The cache and its new entries have one encoding.
        let cached = node.inputs.iter().any(|id| self.entries.contains_key(id));
        let encoding = if cached || own.windows(2).all(|pair| pair[0] == pair[1]) {
            own[0]
        } else {
            let dtype = self.activations;
            let ranges = own.iter().map(|encoding| range_of(*encoding));
            let join = |a: [f64; 2], b: [f64; 2]| [a[0].min(b[0]), a[1].max(b[1])];
            asymmetric(dtype, ranges.fold([0.0; 2], join))
        };
        let mut inputs = Vec::with_capacity(node.inputs.len());
        for id in &node.inputs {
            // Entries are read as they are cached; other parts keep their encoding, unless it is of
            // another type: norms are wider than what is made of them.
            let wanted = if cached { Some(encoding) } else { self.in_type(*id, encoding.dtype)? };
            inputs.push(self.read(*id, wanted)?);
        }
        self.finish(node, &inputs, Some(encoding))
    }

    fn gemm(&mut self, node: &Node) -> Built<()> {
        let dtype = self.type_of(node);
        let (x, weight) = (node.inputs[0], node.inputs[1]);
        let encoding = self.in_type(x, dtype)?;
        let x = self.read(x, encoding)?;
        let name = self.source.value(weight).name.clone();
        let matrix = self.matrices.get(&(self.index, name.as_str()));
        let matrix = matrix.ok_or_else(|| QuantizeError::Plan {
            name: name.clone(),
            problem: "has no width in the plan".into(),
        })?;
        let mut add = |name: &str, tensor: &Tensor| {
            let (dtype, shape) = (tensor.dtype(), tensor.shape().to_vec());
            self.graph.add_constant(name, dtype, shape, Constant::Tensor(tensor.clone()))
        };
        let w = match matrix {
            Matrix::Float(values) => {
                let w = add(&name, values)?;
                return self.float_gemm(node, [x, w]);
            }
            Matrix::Integers { values, scales, axis } => {
                let zeros = vec![0; scales.element_count()];
                let zeros = Tensor::from_i32_as(values.dtype(), scales.shape().to_vec(), &zeros)?;
                let inputs = [
                    add(&name, values)?,
                    add(&format!("{name}.scale"), scales)?,
                    add(&format!("{name}.zero_point"), &zeros)?,
                ];
                let real = format!("{name}.real");
                self.convert(Op::DequantizeLinear { axis: *axis }, &inputs, &real)?
            }
        };
        let encoding = asymmetric(dtype, self.range(node.outputs[0], dtype)?);
        self.finish(node, &[x, w], Some(encoding))
    }

    /// A product in half precision between integers. Without the casts ONNX Runtime's QNN provider
    /// takes it for one of integers and makes the matrix one of 8 bits with one scale.
    fn float_gemm(&mut self, node: &Node, [x, w]: [ValueId; 2]) -> Built<()> {
        let name = self.source.value(node.outputs[0]).name.clone();
        let before = self.free_name(&format!("{name}.float_input"));
        let x = self.convert(Op::Cast { to: DType::F16 }, &[x], &before)?;
        let made = self.graph.add_node(
            &node.name,
            node.op.clone(),
            &[x, w],
            vec![format!("{name}.float_output")],
        )?;
        let raw = self.convert(Op::Cast { to: DType::F32 }, &made[..1], &format!("{name}.raw"))?;
        let dtype = self.type_of(node);
        let encoding = asymmetric(dtype, self.range(node.outputs[0], dtype)?);
        let q = self.quantize(raw, encoding, &format!("{name}.q"))?;
        self.states.insert(node.outputs[0], State::Integers(q, encoding));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weights::round_nearest;
    use crate::{Scheme, SchemeOptions, plan};
    use firesteel_checkpoint::{Checkpoint, RandomWeights, Rope, Yarn, preset};
    use firesteel_export::{ExportOptions, Gelu, Precision, build};
    use firesteel_step::{CacheLayoutChoice, Logits, rope_tables};

    /// The encoding of a quantized input.
    fn encoding_of(graph: &Graph, input: &str) -> Encoding {
        let id = graph.find(input).unwrap();
        let reads = |node: &&Node| node.inputs[0] == id;
        let node = graph.nodes().iter().find(reads).unwrap();
        assert_eq!(node.op, Op::QuantizeLinear { axis: None });
        let zero = constant(graph, node.inputs[2]).unwrap();
        Encoding {
            dtype: zero.dtype(),
            scale: constant_f32(graph, node.inputs[1]).unwrap()[0],
            zero_point: zero.view().to_i32().unwrap()[0],
        }
    }

    #[test]
    fn rotary_tables_that_are_stretched_are_not_clipped() {
        // ln 4 / 10 + 1, as YaRN has it for a context that is four times as long.
        let attention_factor = 1.138_629_436_111_989;
        let yarn = Yarn {
            factor: 4.0,
            original_positions: 32_768,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor,
        };
        for (yarn, magnitude) in [(None, 1.0), (Some(yarn), attention_factor)] {
            let mut config = preset("qwen3-0.6b").unwrap().with_layers(1).unwrap();
            (config.hidden_size, config.intermediate_size, config.head_dim) = (64, 96, 32);
            (config.num_attention_heads, config.num_key_value_heads) = (4, 2);
            config.vocab_size = 64;
            let rope = Rope { yarn, ..Rope::plain(1e6, 32) };
            config.rope_full = Some(rope);
            let checkpoint = Checkpoint::random(config, RandomWeights::default());
            let options = ExportOptions {
                tokens: 1,
                context: 16,
                layers: 0..1,
                cache_layout: CacheLayoutChoice::Auto,
                logits: Logits::Hidden,
                gelu: Gelu::Exact,
                precision: Precision::Fp32,
                dialect: Dialect::Qnn,
                head_shards: 1,
            };
            let step = build(&checkpoint, &options).unwrap();
            for (scheme, steps) in [(Scheme::W8A16, 65_535.0), (Scheme::W8A8, 255.0)] {
                let choice = SchemeOptions { scheme, kv: None, width: &|_| None };
                let matrices = plan(&step, &choice).unwrap();
                let formats = ValueFormats { activations: scheme.activations(), kv: scheme.kv() };
                let rounding: Rounding<'_> = &|matrix, values, bits| {
                    round_nearest(values, matrix.rows, matrix.columns, bits)
                };
                let quantized =
                    quantize(&step, &matrices, RangeSource::Uncalibrated, formats, rounding)
                        .unwrap();
                let (cos, sin) = rope_tables(rope, 0, 64);
                for (input, table) in [("cos_full", cos), ("sin_full", sin)] {
                    let encoding = encoding_of(&quantized.graphs.graph, input);
                    let scale = 2.0 * magnitude / steps;
                    assert!((f64::from(encoding.scale) / scale - 1.0).abs() < 1e-6, "{encoding:?}");
                    // Every number of a table is within half a step of what its integer holds.
                    let [low, high] = range_of(encoding);
                    for value in table.into_iter().map(f64::from) {
                        let clipped = value.clamp(low, high);
                        assert!(
                            (value - clipped).abs() <= scale / 2.0 + 1e-6,
                            "{value} {encoding:?}"
                        );
                    }
                }
            }
        }
    }
}
