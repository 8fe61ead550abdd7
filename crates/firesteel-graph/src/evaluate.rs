use crate::{Constant, GeluForm, Graph, GraphError, Node, Op, ValueId, infer::broadcast};
use firesteel_tensor::{DType, Tensor, TensorView, read_f32, read_i32};
use half::f16;
use rayon::prelude::*;
use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

/// Executes a graph one node after the other, plainly.
///
/// Everything is computed in f64. f32 values are not rounded before they leave the graph, so an
/// f32 graph gives the function that it writes down, to the last bit of its outputs. f16 values
/// are rounded after every node, because their range and precision are what an f16 graph must
/// live with: it gives what a runtime gives that computes each operator wider and stores f16.
/// Quantization and the way back are computed in f32, as runtimes do. Weights that a `Gemm` reads,
/// quantized or not, stay where they are and are widened row by row.
#[derive(Debug)]
pub struct Evaluator {
    graph: Graph,
    /// For each node, the values that nobody reads after it.
    released: Vec<Vec<ValueId>>,
    /// Constants that are not the weight of a `Gemm`, widened.
    constants: HashMap<ValueId, Values>,
    /// Weights of a `Gemm` that a node makes from a constant: that node.
    dequantized: HashMap<ValueId, usize>,
}

type Values = Arc<Vec<f64>>;

/// Rows of a weight that one task multiplies; fixed, so that results do not depend on the number
/// of threads.
const ROWS: usize = 32;

/// Most elements of a value that is executed (8 GiB as f32).
const ELEMENT_LIMIT: usize = 1 << 31;

impl Evaluator {
    /// Checks `graph` and prepares it.
    ///
    /// # Errors
    /// When the graph is invalid or a constant cannot be produced.
    pub fn new(graph: Graph) -> Result<Self, GraphError> {
        graph.validate()?;
        for value in graph.values() {
            if value.shape.iter().product::<usize>() > ELEMENT_LIMIT {
                let problem = format!("{:?} has more than {ELEMENT_LIMIT} elements", value.shape);
                return Err(GraphError::Value { name: value.name.clone(), problem });
            }
        }
        // Values that are read other than as the weight of a Gemm.
        let mut whole: HashSet<ValueId> = graph.outputs().iter().copied().collect();
        let mut readers: HashMap<ValueId, usize> = HashMap::new();
        for node in graph.nodes() {
            node.inputs.iter().for_each(|id| *readers.entry(*id).or_default() += 1);
            let kept = |i: usize| i == 1 && node.op == Op::Gemm;
            let inputs = node.inputs.iter().enumerate();
            whole.extend(inputs.filter(|(i, _)| !kept(*i)).map(|(_, id)| *id));
        }
        let mut dequantized = HashMap::new();
        for (index, node) in graph.nodes().iter().enumerate() {
            let (output, from) = (node.outputs[0], node.inputs[0]);
            let by_row = matches!(node.op, Op::DequantizeLinear { axis: None | Some(0) });
            let alone = readers.get(&from) == Some(&1) && graph.constant(from).is_some();
            if by_row && alone && !whole.contains(&output) {
                dequantized.insert(output, index);
                whole.remove(&from);
            }
        }
        let mut constants = HashMap::new();
        for (id, _) in graph.constants() {
            if whole.contains(&id) {
                constants.insert(id, Arc::new(constant_range(&graph, id, None)?));
            }
        }
        let mut pinned: HashSet<ValueId> = graph.outputs().iter().copied().collect();
        pinned.extend(dequantized.values().flat_map(|index| &graph.nodes()[*index].inputs));
        let mut last_reader: HashMap<ValueId, usize> = HashMap::new();
        for (index, node) in graph.nodes().iter().enumerate() {
            for id in node.inputs.iter().chain(&node.outputs) {
                last_reader.insert(*id, index);
            }
        }
        let mut released = vec![Vec::new(); graph.nodes().len()];
        for (id, index) in last_reader {
            if !pinned.contains(&id) {
                released[index].push(id);
            }
        }
        Ok(Self { graph, released, constants, dequantized })
    }

    /// The graph.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// Executes the graph on `inputs`, given in graph order, and returns the outputs in graph
    /// order.
    ///
    /// # Errors
    /// When an input has another type or shape than the graph declares.
    pub fn run(&self, inputs: &[TensorView<'_>]) -> Result<Vec<Tensor>, GraphError> {
        self.run_tapped(inputs, &mut |_, _| ())
    }

    /// As [`run`](Self::run), and tells `tap` the elements of every input and of every value that
    /// a node makes, in the order of execution. Only weights of a `Gemm` are not told.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn run_tapped(
        &self,
        inputs: &[TensorView<'_>],
        tap: &mut dyn FnMut(ValueId, &[f64]),
    ) -> Result<Vec<Tensor>, GraphError> {
        let graph = &self.graph;
        if inputs.len() != graph.inputs().len() {
            return Err(GraphError::InputCount {
                expected: graph.inputs().len(),
                actual: inputs.len(),
            });
        }
        let mut values: HashMap<ValueId, Values> = self.constants.clone();
        for (id, tensor) in graph.inputs().iter().zip(inputs) {
            let declared = graph.value(*id);
            if declared.dtype != tensor.dtype() || declared.shape != tensor.shape() {
                return Err(GraphError::Input {
                    name: declared.name.clone(),
                    expected_dtype: declared.dtype,
                    expected: declared.shape.clone(),
                    actual_dtype: tensor.dtype(),
                    actual: tensor.shape().to_vec(),
                });
            }
            let widened = match declared.dtype.integer_range() {
                Some(_) => tensor.to_i32()?.into_iter().map(f64::from).collect(),
                None => widen(&tensor.to_f32()?),
            };
            tap(*id, &widened);
            values.insert(*id, Arc::new(widened));
        }
        for (node, released) in graph.nodes().iter().zip(&self.released) {
            if self.dequantized.contains_key(&node.outputs[0]) {
                continue;
            }
            let results = self.execute(node, &values)?;
            for (id, mut data) in node.outputs.iter().zip(results) {
                if graph.value(*id).dtype == DType::F16 {
                    data.iter_mut().for_each(|v| *v = f16::from_f64(*v).to_f64());
                }
                tap(*id, &data);
                values.insert(*id, Arc::new(data));
            }
            for id in released {
                values.remove(id);
            }
        }
        let output = |id: &ValueId| {
            let value = graph.value(*id);
            let data = values.get(id).map_or(&[][..], |data| data.as_slice());
            let shape = value.shape.clone();
            match value.dtype.integer_range() {
                Some(_) => {
                    let integers: Vec<i32> = data.iter().map(|v| *v as i32).collect();
                    Tensor::from_i32_as(value.dtype, shape, &integers)
                }
                None => Tensor::from_f32_as(value.dtype, shape, narrow(data)),
            }
        };
        Ok(graph.outputs().iter().map(output).collect::<Result<_, _>>()?)
    }

    fn execute(
        &self,
        node: &Node,
        values: &HashMap<ValueId, Values>,
    ) -> Result<Vec<Vec<f64>>, GraphError> {
        let shape = |i: usize| self.graph.value(node.inputs[i]).shape.as_slice();
        let operand = |i: usize| -> &[f64] {
            values.get(&node.inputs[i]).map_or(&[][..], |data| data.as_slice())
        };
        let map = |f: &(dyn Fn(f64) -> f64 + Sync)| -> Vec<f64> {
            operand(0).par_iter().map(|v| f(*v)).collect()
        };
        let zip = |f: &dyn Fn(f64, f64) -> f64| {
            elementwise(operand(0), shape(0), operand(1), shape(1), f)
        };
        let single = match &node.op {
            Op::Add => zip(&|a, b| a + b),
            Op::Sub => zip(&|a, b| a - b),
            Op::Mul => zip(&|a, b| a * b),
            Op::Div => zip(&|a, b| a / b),
            Op::Max => zip(&|a, b| if a.is_nan() || a > b { a } else { b }),
            Op::Neg => map(&|v| -v),
            Op::Abs => map(&f64::abs),
            Op::Sqrt => map(&f64::sqrt),
            Op::Erf => map(&libm::erf),
            Op::Tanh => map(&f64::tanh),
            Op::Sigmoid => map(&|v| 1.0 / (1.0 + (-v).exp())),
            Op::Gelu(GeluForm::Exact) => {
                map(&|v| 0.5 * v * (1.0 + libm::erf(v * std::f64::consts::FRAC_1_SQRT_2)))
            }
            Op::Gelu(GeluForm::Tanh) => {
                let scale = (2.0 / std::f64::consts::PI).sqrt();
                map(&|v| 0.5 * v * (1.0 + (scale * (v + 0.044715 * v * v * v)).tanh()))
            }
            Op::Softmax { axis } => lanes(operand(0), shape(0), *axis, |lane| {
                let maximum = lane.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                lane.iter_mut().for_each(|v| *v = (*v - maximum).exp());
                let sum: f64 = lane.iter().sum();
                lane.iter_mut().for_each(|v| *v /= sum);
            }),
            Op::ReduceMean { axis } => reduce(operand(0), shape(0), *axis, |lane| {
                lane.iter().sum::<f64>() / lane.len() as f64
            }),
            Op::ReduceMax { axis } => reduce(operand(0), shape(0), *axis, |lane| {
                lane.iter().copied().fold(f64::NEG_INFINITY, f64::max)
            }),
            Op::RmsNormalization { axis, epsilon } => {
                let width: usize = shape(0)[*axis..].iter().product();
                let scale = operand(1);
                let mut result = Vec::with_capacity(operand(0).len());
                for row in operand(0).chunks(width.max(1)) {
                    let square: f64 = row.iter().map(|v| v * v).sum();
                    let root = (square / width as f64 + f64::from(*epsilon)).sqrt();
                    result.extend(row.iter().zip(scale).map(|(v, w)| v / root * w));
                }
                result
            }
            Op::MatMul => matmul(operand(0), shape(0), operand(1), shape(1))?,
            Op::Gemm => self.gemm(node, values)?,
            Op::Reshape { .. } | Op::Cast { .. } => operand(0).to_vec(),
            Op::QuantizeLinear { axis } => {
                let scales = Scales::new(shape(0), *axis, operand(1), operand(2));
                let (least, most) = self.range(node.outputs[0]);
                scales.map(operand(0), |x, scale, zero| {
                    let steps = (x as f32 / scale).round_ties_even();
                    // NaN becomes the least number.
                    (f64::from(steps) + zero).clamp(least, most).max(least)
                })
            }
            Op::DequantizeLinear { axis } => {
                Scales::new(shape(0), *axis, operand(1), operand(2)).map(operand(0), dequantize)
            }
            Op::Transpose { permutation } => transpose(operand(0), shape(0), permutation),
            Op::Slice { axis, start, end } => cut(operand(0), shape(0), *axis, *start, *end),
            Op::Split { axis, sizes } => {
                let mut start = 0;
                let mut parts = Vec::with_capacity(sizes.len());
                for size in sizes {
                    parts.push(cut(operand(0), shape(0), *axis, start, start + size));
                    start += size;
                }
                return Ok(parts);
            }
            Op::Concat { axis } => {
                let outer: usize = shape(0)[..*axis].iter().product();
                let mut result = Vec::new();
                for o in 0..outer {
                    for i in 0..node.inputs.len() {
                        let block: usize = shape(i)[*axis..].iter().product();
                        result.extend_from_slice(&operand(i)[o * block..(o + 1) * block]);
                    }
                }
                result
            }
        };
        Ok(vec![single])
    }

    /// Smallest and largest number that an integer value holds.
    fn range(&self, id: ValueId) -> (f64, f64) {
        let (least, most) = self.graph.value(id).dtype.integer_range().unwrap_or_default();
        (least.into(), most.into())
    }

    /// Whole rows of a Gemm's weight that is not kept widened.
    fn weight_rows(
        &self,
        id: ValueId,
        range: Range<usize>,
        values: &HashMap<ValueId, Values>,
    ) -> Result<Vec<f64>, GraphError> {
        let Some(node) = self.dequantized.get(&id).map(|index| &self.graph.nodes()[*index]) else {
            return constant_range(&self.graph, id, Some(range));
        };
        let shape = &self.graph.value(id).shape;
        let columns = shape[1].max(1);
        let rows = range.start / columns..range.end / columns;
        let stored = constant_range(&self.graph, node.inputs[0], Some(range))?;
        let axis = match node.op {
            Op::DequantizeLinear { axis } => axis,
            _ => None,
        };
        let parameter = |index: usize| {
            let data = values.get(&node.inputs[index]).map_or(&[][..], |data| data.as_slice());
            if axis.is_some() { data.get(rows.clone()).unwrap_or_default() } else { data }
        };
        let scales = Scales::new(shape, axis, parameter(1), parameter(2));
        let mut result = scales.map(&stored, dequantize);
        if self.graph.value(id).dtype == DType::F16 {
            result.iter_mut().for_each(|v| *v = f16::from_f64(*v).to_f64());
        }
        Ok(result)
    }

    /// a [M, K] · bᵀ for b [N, K], which may be a constant that is not kept widened.
    fn gemm(&self, node: &Node, values: &HashMap<ValueId, Values>) -> Result<Vec<f64>, GraphError> {
        let (a_id, b_id) = (node.inputs[0], node.inputs[1]);
        let a = values.get(&a_id).map_or(&[][..], |data| data.as_slice());
        let b_shape = &self.graph.value(b_id).shape;
        let (rows, inner) = (b_shape[0], b_shape[1]);
        let columns = self.graph.value(a_id).shape[0];
        let known = values.get(&b_id);
        let blocks: Vec<Vec<f64>> = (0..rows.div_ceil(ROWS))
            .into_par_iter()
            .map(|block| {
                let (start, end) = (block * ROWS, rows.min((block + 1) * ROWS));
                let range = start * inner..end * inner;
                let weights: Cow<'_, [f64]> = match known {
                    Some(data) => Cow::Borrowed(&data[range]),
                    None => Cow::Owned(self.weight_rows(b_id, range, values)?),
                };
                // One row of results a token, so that the blocks can be interleaved below.
                let mut result = Vec::with_capacity(columns * (end - start));
                for m in 0..columns {
                    let x = &a[m * inner..(m + 1) * inner];
                    result.extend(weights.chunks_exact(inner.max(1)).map(|w| dot(x, w)));
                }
                Ok(result)
            })
            .collect::<Result<_, GraphError>>()?;
        let mut result = Vec::with_capacity(rows * columns);
        for m in 0..columns {
            for block in &blocks {
                let width = block.len() / columns;
                result.extend_from_slice(&block[m * width..(m + 1) * width]);
            }
        }
        Ok(result)
    }
}

/// The scales and zero points of a tensor.
struct Scales<'a> {
    scales: &'a [f64],
    zeros: &'a [f64],
    /// Consecutive elements with the same scale.
    inner: usize,
}

impl<'a> Scales<'a> {
    fn new(shape: &[usize], axis: Option<usize>, scales: &'a [f64], zeros: &'a [f64]) -> Self {
        let inner = axis.map_or(usize::MAX, |axis| shape[axis + 1..].iter().product());
        Self { scales, zeros, inner: inner.max(1) }
    }

    /// `f(element, scale, zero point)` for each element; scales are f32.
    fn map(&self, data: &[f64], f: impl Fn(f64, f32, f64) -> f64) -> Vec<f64> {
        let mut result = Vec::with_capacity(data.len());
        let parameters = self.scales.iter().zip(self.zeros).cycle();
        for (data, (scale, zero)) in data.chunks(self.inner).zip(parameters) {
            result.extend(data.iter().map(|x| f(*x, *scale as f32, *zero)));
        }
        result
    }
}

fn dequantize(x: f64, scale: f32, zero: f64) -> f64 {
    f64::from((x - zero) as f32 * scale)
}

/// Σ x·w in eight fixed lanes.
fn dot(x: &[f64], w: &[f64]) -> f64 {
    let mut lanes = [0f64; 8];
    let (x_blocks, w_blocks) = (x.chunks_exact(8), w.chunks_exact(8));
    let rest: f64 = x_blocks.remainder().iter().zip(w_blocks.remainder()).map(|(x, w)| x * w).sum();
    for (x, w) in x_blocks.zip(w_blocks) {
        for ((lane, x), w) in lanes.iter_mut().zip(x).zip(w) {
            *lane += x * w;
        }
    }
    lanes.iter().sum::<f64>() + rest
}

/// Elements of a constant, all of them or a range, widened.
fn constant_range(
    graph: &Graph,
    id: ValueId,
    range: Option<Range<usize>>,
) -> Result<Vec<f64>, GraphError> {
    let value = graph.value(id);
    let range = range.unwrap_or_else(|| 0..value.shape.iter().product());
    let problem = |problem: String| GraphError::Constant { name: value.name.clone(), problem };
    // Elements that share a byte are read from the byte's first one on.
    let per_byte = (8 / value.dtype.bits()).max(1);
    let skipped = range.start % per_byte;
    let (first, count) = (range.start - skipped, range.len() + skipped);
    let bytes_of = |count: usize| value.dtype.byte_count(&[count]).unwrap_or(usize::MAX);
    let read = |bytes: &[u8]| -> Result<Vec<f64>, GraphError> {
        let mut values: Vec<f64> = if value.dtype.integer_range().is_some() {
            let mut integers = vec![0; count];
            read_i32(value.dtype, bytes, &mut integers)?;
            integers.into_iter().map(f64::from).collect()
        } else {
            let mut floats = vec![0f32; count];
            read_f32(value.dtype, bytes, &mut floats)?;
            widen(&floats)
        };
        values.drain(..skipped);
        Ok(values)
    };
    match graph.constant(id) {
        Some(Constant::Tensor(tensor)) => {
            let start = bytes_of(first);
            let bytes = tensor.bytes().get(start..start.saturating_add(bytes_of(count)));
            read(bytes.ok_or_else(|| problem("is shorter than its shape".into()))?)
        }
        Some(Constant::Source(source)) => {
            let mut bytes = vec![0u8; bytes_of(count)];
            source.write(first, &mut bytes).map_err(problem)?;
            read(&bytes)
        }
        None => Err(problem("is not a constant".into())),
    }
}

fn widen(values: &[f32]) -> Vec<f64> {
    values.iter().copied().map(f64::from).collect()
}

fn narrow(values: &[f64]) -> Vec<f32> {
    values.iter().map(|value| *value as f32).collect()
}

/// Strides of `shape` seen as part of the broadcast shape `to`: 0 along repeated axes.
fn broadcast_strides(shape: &[usize], to: &[usize]) -> Vec<usize> {
    let mut strides = vec![0; to.len()];
    let mut stride = 1;
    for axis in (0..shape.len()).rev() {
        let target = axis + to.len() - shape.len();
        if shape[axis] != 1 {
            strides[target] = stride;
        }
        stride *= shape[axis];
    }
    strides
}

/// Calls `visit` with the offsets of every element of `shape` under each set of strides, in
/// row-major order.
fn walk<const N: usize>(
    shape: &[usize],
    strides: [&[usize]; N],
    mut visit: impl FnMut([usize; N]),
) {
    if shape.contains(&0) {
        return;
    }
    let mut index = vec![0usize; shape.len()];
    let mut offsets = [0usize; N];
    loop {
        visit(offsets);
        let mut axis = shape.len();
        loop {
            if axis == 0 {
                return;
            }
            axis -= 1;
            index[axis] += 1;
            for (offset, strides) in offsets.iter_mut().zip(strides) {
                *offset += strides[axis];
            }
            if index[axis] < shape[axis] {
                break;
            }
            for (offset, strides) in offsets.iter_mut().zip(strides) {
                *offset -= strides[axis] * shape[axis];
            }
            index[axis] = 0;
        }
    }
}

fn elementwise(
    a: &[f64],
    a_shape: &[usize],
    b: &[f64],
    b_shape: &[usize],
    f: &dyn Fn(f64, f64) -> f64,
) -> Vec<f64> {
    if a_shape == b_shape {
        return a.iter().zip(b).map(|(a, b)| f(*a, *b)).collect();
    }
    let Ok(shape) = broadcast(a_shape, b_shape) else { return Vec::new() };
    let (a_strides, b_strides) =
        (broadcast_strides(a_shape, &shape), broadcast_strides(b_shape, &shape));
    let mut result = Vec::with_capacity(shape.iter().product());
    walk(&shape, [&a_strides, &b_strides], |[i, j]| result.push(f(a[i], b[j])));
    result
}

fn transpose(data: &[f64], shape: &[usize], permutation: &[usize]) -> Vec<f64> {
    let strides = row_major(shape);
    let out_shape: Vec<usize> = permutation.iter().map(|&axis| shape[axis]).collect();
    let out_strides: Vec<usize> = permutation.iter().map(|&axis| strides[axis]).collect();
    let mut result = Vec::with_capacity(data.len());
    walk(&out_shape, [&out_strides], |[i]| result.push(data[i]));
    result
}

fn row_major(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for axis in (0..shape.len().saturating_sub(1)).rev() {
        strides[axis] = strides[axis + 1] * shape[axis + 1];
    }
    strides
}

/// Elements `start..end` of `axis`.
fn cut(data: &[f64], shape: &[usize], axis: usize, start: usize, end: usize) -> Vec<f64> {
    let inner: usize = shape[axis + 1..].iter().product();
    let block = shape[axis] * inner;
    let mut result = Vec::new();
    for chunk in data.chunks(block.max(1)) {
        result.extend_from_slice(&chunk[start * inner..end * inner]);
    }
    result
}

/// Applies `f` to every lane along `axis`.
fn lanes(data: &[f64], shape: &[usize], axis: usize, f: impl Fn(&mut [f64])) -> Vec<f64> {
    let (length, inner) = (shape[axis], shape[axis + 1..].iter().product::<usize>());
    let mut result = vec![0f64; data.len()];
    let mut lane = vec![0f64; length];
    for block in (0..data.len()).step_by((length * inner).max(1)) {
        for i in 0..inner {
            for (k, v) in lane.iter_mut().enumerate() {
                *v = data[block + k * inner + i];
            }
            f(&mut lane);
            for (k, v) in lane.iter().enumerate() {
                result[block + k * inner + i] = *v;
            }
        }
    }
    result
}

/// One value for every lane along `axis`.
fn reduce(data: &[f64], shape: &[usize], axis: usize, f: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    let broadcasted = lanes(data, shape, axis, |lane| {
        let value = f(lane);
        lane[0] = value;
    });
    cut(&broadcasted, shape, axis, 0, 1)
}

/// Batched a [.., M, K] · b [.., K, N].
fn matmul(
    a: &[f64],
    a_shape: &[usize],
    b: &[f64],
    b_shape: &[usize],
) -> Result<Vec<f64>, GraphError> {
    let (a_batch, a_matrix) = a_shape.split_at(a_shape.len() - 2);
    let (b_batch, b_matrix) = b_shape.split_at(b_shape.len() - 2);
    let (m, k, n) = (a_matrix[0], a_matrix[1], b_matrix[1]);
    let batch = broadcast(a_batch, b_batch).unwrap_or_default();
    let mut pairs = Vec::new();
    let strides = [broadcast_strides(a_batch, &batch), broadcast_strides(b_batch, &batch)];
    walk(&batch, [&strides[0], &strides[1]], |pair| pairs.push(pair));
    let products: Vec<Vec<f64>> = pairs
        .into_par_iter()
        .map(|[i, j]| {
            let (a, b) = (&a[i * m * k..(i + 1) * m * k], &b[j * k * n..(j + 1) * k * n]);
            let mut result = Vec::with_capacity(m * n);
            let mut sums = vec![0f64; n];
            for row in 0..m {
                sums.fill(0.0);
                for (x, b_row) in a[row * k..(row + 1) * k].iter().zip(b.chunks_exact(n.max(1))) {
                    for (sum, y) in sums.iter_mut().zip(b_row) {
                        *sum += x * y;
                    }
                }
                result.extend_from_slice(&sums);
            }
            result
        })
        .collect();
    Ok(products.concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Shape and values.
    type Input = (Vec<usize>, Vec<f32>);

    /// Runs one operator over constant-free inputs.
    fn run(op: Op, inputs: &[Input]) -> Vec<Vec<f32>> {
        let mut graph = Graph::new("one");
        let ids: Vec<ValueId> = inputs
            .iter()
            .enumerate()
            .map(|(i, (shape, _))| graph.input(format!("i{i}"), DType::F32, shape.clone()).unwrap())
            .collect();
        let outputs = match &op {
            Op::Split { sizes, .. } => (0..sizes.len()).map(|i| format!("o{i}")).collect(),
            _ => vec!["o".to_owned()],
        };
        for id in graph.add_node("node", op, &ids, outputs).unwrap() {
            graph.output(id).unwrap();
        }
        let tensors: Vec<Tensor> = inputs
            .iter()
            .map(|(shape, data)| Tensor::from_f32(shape.clone(), data.clone()).unwrap())
            .collect();
        let views: Vec<TensorView<'_>> = tensors.iter().map(Tensor::view).collect();
        let outputs = Evaluator::new(graph).unwrap().run(&views).unwrap();
        outputs.iter().map(|t| t.view().to_f32().unwrap().into_owned()).collect()
    }

    #[test]
    fn operators_compute_what_their_definition_says() {
        let x = (vec![2, 3], vec![1., 2., 3., 4., 5., 6.]);
        let cases: Vec<(Op, Vec<Input>, Vec<Vec<f32>>)> = vec![
            (
                Op::Add,
                vec![x.clone(), (vec![3], vec![10., 20., 30.])],
                vec![vec![11., 22., 33., 14., 25., 36.]],
            ),
            (
                Op::Sub,
                vec![x.clone(), (vec![2, 1], vec![1., 4.])],
                vec![vec![0., 1., 2., 0., 1., 2.]],
            ),
            (Op::Max, vec![x.clone(), (vec![], vec![3.5])], vec![vec![3.5, 3.5, 3.5, 4., 5., 6.]]),
            (
                Op::MatMul,
                vec![x.clone(), (vec![3, 2], vec![1., 0., 0., 1., 1., 1.])],
                vec![vec![4., 5., 10., 11.]],
            ),
            (
                Op::Gemm,
                vec![x.clone(), (vec![2, 3], vec![1., 0., 1., 0., 1., 1.])],
                vec![vec![4., 5., 10., 11.]],
            ),
            (
                Op::Transpose { permutation: vec![1, 0] },
                vec![x.clone()],
                vec![vec![1., 4., 2., 5., 3., 6.]],
            ),
            (Op::Slice { axis: 1, start: 1, end: 3 }, vec![x.clone()], vec![vec![2., 3., 5., 6.]]),
            (
                Op::Split { axis: 1, sizes: vec![1, 2] },
                vec![x.clone()],
                vec![vec![1., 4.], vec![2., 3., 5., 6.]],
            ),
            (
                Op::Concat { axis: 1 },
                vec![x.clone(), (vec![2, 1], vec![7., 8.])],
                vec![vec![1., 2., 3., 7., 4., 5., 6., 8.]],
            ),
            (Op::ReduceMean { axis: 1 }, vec![x.clone()], vec![vec![2., 5.]]),
            (Op::ReduceMax { axis: 0 }, vec![x.clone()], vec![vec![4., 5., 6.]]),
            (Op::Softmax { axis: 1 }, vec![(vec![1, 2], vec![0., -1e4])], vec![vec![1., 0.]]),
            (
                Op::Gelu(GeluForm::Exact),
                vec![(vec![3], vec![0., 1., -1.])],
                vec![vec![0., 0.841_344_7, -0.158_655_26]],
            ),
            (Op::Gelu(GeluForm::Tanh), vec![(vec![1], vec![1.])], vec![vec![0.841_192]]),
            (
                Op::RmsNormalization { axis: 1, epsilon: 0.0 },
                vec![(vec![1, 2], vec![3., 4.]), (vec![2], vec![1., 2.])],
                vec![vec![0.848_528_15, 2.262_741_7]],
            ),
        ];
        let mut failures = Vec::new();
        for (op, inputs, expected) in cases {
            let actual = run(op.clone(), &inputs);
            let close = actual.len() == expected.len()
                && actual.iter().zip(&expected).all(|(a, e)| {
                    a.len() == e.len() && a.iter().zip(e).all(|(a, e)| (a - e).abs() <= 1e-6)
                });
            if !close {
                failures.push(format!("{op:?}: {actual:?}, expected {expected:?}"));
            }
        }
        assert!(failures.is_empty(), "{}", failures.join("\n"));
    }

    #[test]
    fn batches_broadcast_in_matmul() {
        let a = (vec![2, 1, 2], vec![1., 2., 3., 4.]);
        let b = (vec![1, 2, 1], vec![10., 1.]);
        assert_eq!(run(Op::MatMul, &[a, b]), vec![vec![12., 34.]]);
    }

    #[test]
    fn quantization_rounds_half_to_even_and_saturates() {
        let x = vec![-9.0f32, -0.75, -0.25, 0.25, 0.75, 1.25, 1e9, f32::NEG_INFINITY];
        let cases: [(DType, i32, [i32; 8]); 5] = [
            (DType::I8, 0, [-18, -2, 0, 0, 2, 2, 127, -128]),
            (DType::U8, 10, [0, 8, 10, 10, 12, 12, 255, 0]),
            (DType::I16, 0, [-18, -2, 0, 0, 2, 2, 32767, -32768]),
            (DType::U16, 40000, [39982, 39998, 40000, 40000, 40002, 40002, 65535, 0]),
            (DType::I4, 0, [-8, -2, 0, 0, 2, 2, 7, -8]),
        ];
        for (dtype, zero, expected) in cases {
            let mut graph = Graph::new("quantize");
            let input = graph.input("x", DType::F32, vec![8]).unwrap();
            let scale = Tensor::from_f32(vec![], vec![0.5]).unwrap();
            let zero = Tensor::from_i32_as(dtype, vec![], &[zero]).unwrap();
            let constant = |tensor: Tensor| Constant::Tensor(tensor);
            let scale = graph.add_constant("scale", DType::F32, vec![], constant(scale)).unwrap();
            let zero = graph.add_constant("zero", dtype, vec![], constant(zero)).unwrap();
            let quantize = Op::QuantizeLinear { axis: None };
            let q = graph.add(quantize, &[input, scale, zero], "q").unwrap();
            let back = Op::DequantizeLinear { axis: None };
            let y = graph.add(back, &[q, scale, zero], "y").unwrap();
            graph.output(q).unwrap();
            graph.output(y).unwrap();
            let x = Tensor::from_f32(vec![8], x.clone()).unwrap();
            let outputs = Evaluator::new(graph).unwrap().run(&[x.view()]).unwrap();
            assert_eq!(outputs[0].view().to_i32().unwrap(), expected, "{dtype}");
            let zero = expected[2] as f32;
            let real: Vec<f32> = expected.iter().map(|q| (*q as f32 - zero) * 0.5).collect();
            assert_eq!(&*outputs[1].view().to_f32().unwrap(), real, "{dtype}");
        }
    }

    #[test]
    fn quantized_weights_of_a_gemm_are_read_by_row() {
        // Odd rows, so that a row of 4-bit numbers starts within a byte.
        let (rows, columns) = (70, 3);
        let values: Vec<i32> = (0..rows * columns).map(|i| (i as i32 * 7) % 16 - 8).collect();
        let scales: Vec<f32> = (0..rows).map(|row| 0.5 + row as f32).collect();
        for dtype in [DType::I4, DType::I8] {
            for per_row in [true, false] {
                let axis = per_row.then_some(0);
                let shape = if per_row { vec![rows] } else { vec![] };
                let scales = if per_row { scales.clone() } else { vec![0.25] };
                let mut graph = Graph::new("linear");
                let x = graph.input("x", DType::F32, vec![1, columns]).unwrap();
                let mut add = |name: &str, dtype, shape: &[usize], tensor: Tensor| {
                    let tensor = Constant::Tensor(tensor);
                    graph.add_constant(name, dtype, shape.to_vec(), tensor).unwrap()
                };
                let weight = Tensor::from_i32_as(dtype, vec![rows, columns], &values).unwrap();
                let w = add("w", dtype, &[rows, columns], weight);
                let scale = Tensor::from_f32(shape.clone(), scales.clone()).unwrap();
                let s = add("s", DType::F32, &shape, scale);
                let zeros = vec![0; scales.len()];
                let zero = Tensor::from_i32_as(dtype, shape.clone(), &zeros).unwrap();
                let z = add("z", dtype, &shape, zero);
                let w = graph.add(Op::DequantizeLinear { axis }, &[w, s, z], "w_real").unwrap();
                let y = graph.add(Op::Gemm, &[x, w], "y").unwrap();
                graph.output(y).unwrap();
                let x = [1.0f32, -2.0, 4.0];
                let input = Tensor::from_f32(vec![1, 3], x.to_vec()).unwrap();
                let evaluator = Evaluator::new(graph).unwrap();
                let outputs = evaluator.run(&[input.view()]).unwrap();
                let expected: Vec<f32> = values
                    .chunks(columns)
                    .enumerate()
                    .map(|(row, w)| {
                        let scale = scales[if per_row { row } else { 0 }];
                        w.iter().zip(x).map(|(w, x)| *w as f32 * scale * x).sum()
                    })
                    .collect();
                assert_eq!(&*outputs[0].view().to_f32().unwrap(), expected, "{dtype} {axis:?}");
            }
        }
    }

    #[test]
    fn f16_values_are_rounded_after_every_node() {
        let mut graph = Graph::new("half");
        let x = graph.input("x", DType::F16, vec![1]).unwrap();
        let square = graph.add(Op::Mul, &[x, x], "square").unwrap();
        graph.output(square).unwrap();
        let evaluator = Evaluator::new(graph).unwrap();
        let x = Tensor::from_f32_as(DType::F16, vec![1], vec![300.0]).unwrap();
        let y = evaluator.run(&[x.view()]).unwrap();
        assert_eq!(y[0].view().to_f32().unwrap()[0], f32::INFINITY);
    }

    #[test]
    fn wrong_inputs_are_named() {
        let mut graph = Graph::new("g");
        let x = graph.input("x", DType::F32, vec![2]).unwrap();
        let y = graph.add(Op::Neg, &[x], "y").unwrap();
        graph.output(y).unwrap();
        let evaluator = Evaluator::new(graph).unwrap();
        let bad = Tensor::from_f32(vec![3], vec![0.0; 3]).unwrap();
        let error = evaluator.run(&[bad.view()]).unwrap_err().to_string();
        assert_eq!(error, "input x: expected f32 [2], got f32 [3]");
        assert!(matches!(evaluator.run(&[]), Err(GraphError::InputCount { .. })));
    }
}
