//! How many bits each matrix gets.

use crate::QuantizeError;
use crate::weights::{QuantizedMatrix, WeightBits, WeightError};
use firesteel_export::StepGraphs;
use firesteel_graph::{Graph, Node, Op};
use firesteel_tensor::DType;
use std::fmt;

/// Number formats of a graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Scheme {
    /// 8-bit weights, 16-bit activations.
    W8A16,
    /// 4-bit weights, 16-bit activations.
    W4A16,
    /// 8-bit weights and activations.
    W8A8,
    /// 16-bit weights and activations.
    W16A16,
    /// 4-bit weights, 8-bit ones where they are worth it, 16-bit activations.
    Mixed,
}

/// Width of most activations. Norms, the gate of the heads and the residual stream always have 16
/// bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Activations {
    /// u8.
    Eight,
    /// u16.
    Sixteen,
}

impl Activations {
    /// Their element type.
    pub const fn dtype(self) -> DType {
        match self {
            Self::Eight => DType::U8,
            Self::Sixteen => DType::U16,
        }
    }
}

/// Number format of keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum KvFormat {
    /// Signed 16-bit integers with zero point 0.
    S16,
    /// Signed 8-bit integers with zero point 0.
    S8,
    /// Unsigned 8-bit integers.
    U8,
    /// Floats, half precision on the processor: the caches and the products of attention.
    F16,
}

impl fmt::Display for KvFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::S16 => "s16",
            Self::S8 => "s8",
            Self::U8 => "u8",
            Self::F16 => "f16",
        })
    }
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::W8A16 => "w8a16",
            Self::W4A16 => "w4a16",
            Self::W8A8 => "w8a8",
            Self::W16A16 => "w16a16",
            Self::Mixed => "mixed",
        })
    }
}

impl Scheme {
    /// Width of the weights that nothing else is said about.
    pub const fn weights(self) -> WeightWidth {
        match self {
            Self::W8A16 | Self::W8A8 => WeightWidth::Eight,
            Self::W4A16 | Self::Mixed => WeightWidth::Four,
            Self::W16A16 => WeightWidth::Sixteen,
        }
    }

    /// Width of the activations.
    pub const fn activations(self) -> Activations {
        match self {
            Self::W8A8 => Activations::Eight,
            _ => Activations::Sixteen,
        }
    }

    /// The keys and values that go with the activations.
    pub const fn kv(self) -> KvFormat {
        match self {
            Self::W8A8 => KvFormat::U8,
            _ => KvFormat::S16,
        }
    }
}

/// Width of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum WeightWidth {
    /// −8 to 7, a scale a row.
    Four,
    /// −127 to 127, a scale a row.
    Eight,
    /// −32767 to 32767, one scale.
    Sixteen,
    /// Not quantized; half precision on the processor.
    Float,
}

impl WeightWidth {
    /// Element type of the initializer.
    pub const fn dtype(self) -> DType {
        match self {
            Self::Four => DType::I4,
            Self::Eight => DType::I8,
            Self::Sixteen => DType::I16,
            Self::Float => DType::F16,
        }
    }

    /// Bits that a matrix of `rows` × `columns` takes, its scales of 32 bits included. What stays a
    /// float counts as 16 bits, which it has on the processor.
    pub const fn bits(self, rows: usize, columns: usize) -> f64 {
        let elements = rows as f64 * columns as f64;
        match self {
            Self::Four => 4.0 * elements + 32.0 * rows as f64,
            Self::Eight => 8.0 * elements + 32.0 * rows as f64,
            Self::Sixteen => 16.0 * elements + 32.0,
            Self::Float => 16.0 * elements,
        }
    }
}

/// What is asked for.
pub struct SchemeOptions<'a> {
    /// The scheme.
    pub scheme: Scheme,
    /// Number format of keys and values; that of the scheme by default.
    pub kv: Option<KvFormat>,
    /// The width of a matrix, by name, where it is not to be the scheme's.
    pub width: &'a dyn Fn(&str) -> Option<WeightWidth>,
}

impl SchemeOptions<'_> {
    /// The keys and values of the graph.
    ///
    /// # Errors
    /// When the processor has no product of such operands.
    pub fn kv(&self) -> Result<KvFormat, QuantizeError> {
        let kv = self.kv.unwrap_or(self.scheme.kv());
        if self.scheme.activations() == Activations::Eight && kv == KvFormat::S16 {
            return Err(QuantizeError::Option {
                option: "--kv",
                value: kv.to_string(),
                problem: format!(
                    "there is no product of 8-bit activations and 16-bit keys; {} takes u8, s8 or \
                     f16",
                    self.scheme
                ),
            });
        }
        Ok(kv)
    }
}

/// A matrix and its width.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MatrixPlan {
    /// Graph that has it: 0 for the step, then the parts of the head.
    pub graph: usize,
    /// Name of the initializer.
    pub name: String,
    /// Name of the value that it is multiplied with, in that graph.
    pub input: String,
    /// Name of what the product makes.
    pub output: String,
    /// Output channels.
    pub rows: usize,
    /// Input channels.
    pub columns: usize,
    /// Width.
    pub width: WeightWidth,
}

/// How a matrix becomes integers. Called from several threads.
pub type Rounding<'a> =
    &'a (dyn Fn(&MatrixPlan, &[f32], WeightBits) -> Result<QuantizedMatrix, WeightError> + Sync);

/// The graphs of a step, with their indices.
pub(crate) fn graphs(step: &StepGraphs) -> impl Iterator<Item = (usize, &Graph)> {
    std::iter::once(&step.graph).chain(step.heads.iter().map(|head| &head.graph)).enumerate()
}

/// Whether `node` is the linear layer that gates the heads: its result goes into a Sigmoid.
pub(crate) fn is_gate(graph: &Graph, node: &Node) -> bool {
    let mut readers = graph.nodes().iter().filter(|n| n.inputs.contains(&node.outputs[0]));
    node.op == Op::Gemm && readers.next().is_some_and(|reader| reader.op == Op::Sigmoid)
}

/// The matrices of `step` with their widths, in the order of the graphs.
pub fn plan(step: &StepGraphs, options: &SchemeOptions<'_>) -> Vec<MatrixPlan> {
    let mut matrices = Vec::new();
    for (index, graph) in graphs(step) {
        for node in graph.nodes().iter().filter(|node| node.op == Op::Gemm) {
            let weight = graph.value(node.inputs[1]);
            let &[rows, columns] = &weight.shape[..] else { continue };
            let own =
                if is_gate(graph, node) { WeightWidth::Sixteen } else { options.scheme.weights() };
            matrices.push(MatrixPlan {
                graph: index,
                name: weight.name.clone(),
                input: graph.value(node.inputs[0]).name.clone(),
                output: graph.value(node.outputs[0]).name.clone(),
                rows,
                columns,
                width: (options.width)(&weight.name).unwrap_or(own),
            });
        }
    }
    matrices
}
