//! How many bits each matrix gets.

use crate::QuantizeError;
use crate::names::range_key;
use crate::weights::{QuantizedMatrix, ScoreRows, WeightBits, WeightError};
use firesteel_export::{StepGraphs, weight_of_shard};
use firesteel_graph::{Graph, Node, Op, Part};
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
pub enum GraphKv {
    /// Signed 16-bit integers with zero point 0.
    S16,
    /// Signed 8-bit integers with zero point 0.
    S8,
    /// Unsigned 8-bit integers.
    U8,
    /// Floats, half precision on the processor: the caches and the products of attention.
    F16,
}

impl fmt::Display for GraphKv {
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
    pub const fn kv(self) -> GraphKv {
        match self {
            Self::W8A8 => GraphKv::U8,
            _ => GraphKv::S16,
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

/// Number formats of the values between matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ValueFormats {
    /// That of most activations.
    pub activations: Activations,
    /// That of keys and values.
    pub kv: GraphKv,
}

/// What is asked for.
pub struct SchemeOptions<'a> {
    /// The scheme.
    pub scheme: Scheme,
    /// Number format of keys and values; that of the scheme by default.
    pub kv: Option<GraphKv>,
    /// The width of a matrix where it is not to be the scheme's.
    pub width: &'a dyn Fn(MatrixName<'_>) -> Option<WeightWidth>,
}

/// What a matrix of a graph is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MatrixName<'a> {
    /// Name of the initializer.
    pub name: &'a str,
    /// Name of the weight, of which it may be a part.
    pub weight: &'a str,
    /// Whether it makes logits.
    pub head: bool,
}

impl SchemeOptions<'_> {
    /// The values of the graph.
    ///
    /// # Errors
    /// When the processor has no product of such operands.
    pub fn formats(&self) -> Result<ValueFormats, QuantizeError> {
        let kv = self.kv.unwrap_or(self.scheme.kv());
        if self.scheme.activations() == Activations::Eight && kv == GraphKv::S16 {
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
        Ok(ValueFormats { activations: self.scheme.activations(), kv })
    }
}

/// A matrix and its width.
#[derive(Debug, Clone, PartialEq)]
pub struct MatrixPlan {
    /// Graph that has it: 0 for the step, then the parts of the head.
    pub graph: usize,
    /// Name of the initializer.
    pub name: String,
    /// Name of the weight, of which it may be a part in a graph of its own.
    pub weight: String,
    /// Whether it makes logits.
    pub head: bool,
    /// Name of the value that it is multiplied with, in the ranges.
    pub input_key: String,
    /// How its rows meet in scores, where it makes queries and keys that they come from.
    pub scores: Option<ScoreRows>,
    /// Output channels.
    pub rows: usize,
    /// Input channels.
    pub columns: usize,
    /// Width.
    pub width: WeightWidth,
}

impl MatrixPlan {
    /// What it is called.
    pub fn matrix_name(&self) -> MatrixName<'_> {
        MatrixName { name: &self.name, weight: &self.weight, head: self.head }
    }
}

/// How a matrix becomes integers. Called from several threads.
pub type Rounding<'a> =
    &'a (dyn Fn(&MatrixPlan, &[f32], WeightBits) -> Result<QuantizedMatrix, WeightError> + Sync);

/// The graphs of a step, with their indices.
pub(crate) fn graphs(step: &StepGraphs) -> impl Iterator<Item = (usize, &Graph)> {
    std::iter::once(&step.graph).chain(step.heads.iter().map(|head| &head.graph)).enumerate()
}

/// Whether `node` is the small matrix of the gates of the heads.
fn is_small(node: &Node) -> bool {
    node.tag.is_some_and(|tag| tag.part == Part::HeadGateProjection)
}

/// The matrices of `step` with their widths, in the order of the graphs.
///
/// # Errors
/// When the graphs do not say what their nodes are there for.
pub fn plan(
    step: &StepGraphs,
    options: &SchemeOptions<'_>,
) -> Result<Vec<MatrixPlan>, QuantizeError> {
    let mut matrices = Vec::new();
    for (index, graph) in graphs(step) {
        require_tags(graph)?;
        for node in graph.nodes().iter().filter(|node| node.op == Op::Gemm) {
            let value = graph.value(node.inputs[1]);
            let &[rows, columns] = &value.shape[..] else { continue };
            // The graphs behind the step have parts of the head.
            let weight = match index.checked_sub(1) {
                Some(shard) => weight_of_shard(&value.name, shard),
                None => &value.name,
            };
            let head = node.tag.is_some_and(|tag| tag.part == Part::Vocabulary);
            let name = MatrixName { name: &value.name, weight, head };
            let own = if is_small(node) { WeightWidth::Sixteen } else { options.scheme.weights() };
            matrices.push(MatrixPlan {
                graph: index,
                name: value.name.clone(),
                weight: weight.to_owned(),
                head,
                input_key: range_key(graph, node.inputs[0], &step.spec),
                scores: node.tag.and_then(|tag| ScoreRows::of_node(tag, &step.spec)),
                rows,
                columns,
                width: (options.width)(name).unwrap_or(own),
            });
        }
    }
    Ok(matrices)
}

/// Refuses a graph of which nobody has said what its nodes are there for: widths follow from that.
pub(crate) fn require_tags(graph: &Graph) -> Result<(), QuantizeError> {
    match graph.nodes().iter().find(|node| node.tag.is_none()) {
        None => Ok(()),
        Some(node) => Err(QuantizeError::Graph {
            node: node.name.clone(),
            problem: "the graph does not say what it is there for; export the model again".into(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::weights::round_nearest;
    use crate::{RangeSource, quantize};
    use firesteel_checkpoint::{Checkpoint, ModelConfig, RandomWeights, preset};
    use firesteel_export::{Dialect, ExportOptions, Gelu, Precision, build};
    use firesteel_graph::{Constant, ValueId};
    use firesteel_step::{CacheLayoutChoice, Logits};
    use std::collections::HashMap;

    /// A step of two layers of a small model with the maths of a published one.
    fn step(name: &str) -> StepGraphs {
        let config = ModelConfig {
            hidden_size: 32,
            intermediate_size: 64,
            num_attention_heads: 4,
            num_key_value_heads: 2,
            head_dim: 16,
            vocab_size: 96,
            ..preset(name).unwrap().with_layers(4).unwrap()
        };
        let rope = |rope: Option<firesteel_checkpoint::Rope>| {
            rope.map(|rope| firesteel_checkpoint::Rope { dims: 16, ..rope })
        };
        let config = ModelConfig {
            rope_sliding: rope(config.rope_sliding),
            rope_full: rope(config.rope_full),
            sliding_window: config.sliding_window.map(|_| 8),
            ..config
        };
        let options = ExportOptions {
            tokens: 1,
            context: 16,
            layers: 0..4,
            cache_layout: CacheLayoutChoice::Auto,
            logits: Logits::Last,
            gelu: Gelu::Exact,
            precision: Precision::Fp32,
            dialect: Dialect::Qnn,
            head_shards: 1,
        };
        build(&Checkpoint::random(config, RandomWeights::default()), &options).unwrap()
    }

    /// The same graph with other names for all that the contract does not name.
    fn renamed(graph: &Graph) -> Graph {
        let mut other = Graph::new(graph.name());
        let border: Vec<ValueId> = graph.inputs().iter().chain(graph.outputs()).copied().collect();
        let name = |id: ValueId| match border.contains(&id) {
            true => graph.value(id).name.clone(),
            false => {
                let index = graph.values().iter().position(|v| v.name == graph.value(id).name);
                format!("value.{}", index.unwrap())
            }
        };
        let mut ids = HashMap::new();
        for id in graph.inputs() {
            let value = graph.value(*id);
            ids.insert(*id, other.input(name(*id), value.dtype, value.shape.clone()).unwrap());
        }
        for (id, constant) in graph.constants() {
            let value = graph.value(id);
            let (dtype, shape) = (value.dtype, value.shape.clone());
            let constant: Constant = constant.clone();
            ids.insert(id, other.add_constant(name(id), dtype, shape, constant).unwrap());
        }
        for (index, node) in graph.nodes().iter().enumerate() {
            let inputs: Vec<ValueId> = node.inputs.iter().map(|id| ids[id]).collect();
            let names = node.outputs.iter().map(|id| name(*id)).collect();
            other.set_tag(node.tag);
            let made =
                other.add_node(format!("node.{index}"), node.op.clone(), &inputs, names).unwrap();
            ids.extend(node.outputs.iter().copied().zip(made));
        }
        for id in graph.outputs() {
            other.output(ids[id]).unwrap();
        }
        other
    }

    #[test]
    fn widths_follow_from_what_nodes_are_there_for() {
        for (name, sixteen) in [("spark-x2.5-1.7b", 4), ("qwen3-1.7b", 0)] {
            let named = step(name);
            let other = StepGraphs { graph: renamed(&named.graph), ..step(name) };
            let options = SchemeOptions { scheme: Scheme::W8A8, kv: None, width: &|_| None };
            let plans = [&named, &other].map(|step| plan(step, &options).unwrap());
            let widths = |plan: &[MatrixPlan]| -> Vec<_> {
                plan.iter()
                    .map(|matrix| (matrix.rows, matrix.columns, matrix.width, matrix.scores))
                    .collect()
            };
            assert_eq!(widths(&plans[0]), widths(&plans[1]), "{name}");
            let wide = plans[0].iter().filter(|matrix| matrix.width == WeightWidth::Sixteen);
            assert_eq!(wide.clone().count(), sixteen, "{name}");
            assert!(wide.clone().all(|matrix| matrix.rows == 4), "{name}: the gates of four heads");
            let scored = plans[0].iter().filter(|matrix| matrix.scores.is_some()).count();
            assert_eq!(scored, sixteen, "{name}: one norm-free matrix of queries and keys a layer");
            // Element types of all operators, which depend on the residual stream and the gates.
            let types = [(&named, &plans[0]), (&other, &plans[1])].map(|(step, plan)| {
                let formats = options.formats().unwrap();
                let round = |matrix: &MatrixPlan, values: &[f32], bits| {
                    round_nearest(values, matrix.rows, matrix.columns, bits)
                };
                let made =
                    quantize(step, plan, RangeSource::Uncalibrated, formats, &round).unwrap();
                let graph = &made.graphs.graph;
                assert!(graph.nodes().iter().all(|node| node.tag.is_some()), "{name}");
                let of_node = |node: &Node| {
                    let outputs = node.outputs.iter().map(|id| graph.value(*id).dtype);
                    (node.op.clone(), node.tag, outputs.collect::<Vec<_>>())
                };
                graph.nodes().iter().map(of_node).collect::<Vec<_>>()
            });
            assert!(types[0] == types[1], "{name}");
        }
        let mut bare = step("qwen3-1.7b");
        bare.graph.tag_nodes(|_| None);
        let options = SchemeOptions { scheme: Scheme::W8A16, kv: None, width: &|_| None };
        let error = plan(&bare, &options).unwrap_err().to_string();
        assert!(error.contains("export the model again"), "{error}");
    }
}
