//! Operators of the graph as nodes of the format, in both directions.
//!
//! The graph keeps an operator's parameters in the [`Op`]; the format wants some of them as int64
//! inputs, here called parameters, which follow the data inputs of a node.

use crate::proto::{self, AttributeProto, NodeProto, attribute_type};
use firesteel_graph::{GeluForm, Op};
use firesteel_tensor::Tensor;
use prost::bytes::Bytes;
use std::collections::HashMap;

/// Largest rank of a tensor. It bounds what inference over a hostile graph can allocate.
pub(crate) const MAX_RANK: usize = 8;

/// What the format stores of an operator besides its data inputs.
#[derive(Default)]
pub(crate) struct Spelling {
    pub(crate) attributes: Vec<AttributeProto>,
    pub(crate) parameters: Vec<Vec<i64>>,
}

/// Spells an operator. What Gemm, Reshape, Slice and the reductions do by default is left out; all
/// other attributes are written, because their defaults depend on the opset or on ranks.
///
/// # Errors
/// A sentence, when the format cannot say it.
pub(crate) fn spell(op: &Op) -> Result<Spelling, String> {
    let mut spelling = Spelling::default();
    let attributes = &mut spelling.attributes;
    let parameters = &mut spelling.parameters;
    match op {
        Op::Add | Op::Sub | Op::Mul | Op::Div | Op::Max | Op::MatMul => {}
        Op::Neg | Op::Abs | Op::Sqrt | Op::Erf | Op::Tanh | Op::Sigmoid => {}
        Op::Gelu(form) => {
            let form = match form {
                GeluForm::Exact => "none",
                GeluForm::Tanh => "tanh",
            };
            attributes.push(string("approximate", form));
        }
        Op::Softmax { axis } | Op::Concat { axis } => attributes.push(int("axis", *axis)?),
        Op::ReduceMean { axis } | Op::ReduceMax { axis } => {
            parameters.push(integers(&[*axis])?);
        }
        Op::RmsNormalization { axis, epsilon } => {
            attributes.push(int("axis", *axis)?);
            attributes.push(AttributeProto {
                name: "epsilon".into(),
                r#type: attribute_type::FLOAT,
                f: Some(*epsilon),
                ..Default::default()
            });
            attributes.push(int("stash_type", 1)?);
        }
        Op::Gemm => attributes.push(int("transB", 1)?),
        Op::Reshape { shape } => parameters.push(integers(shape)?),
        Op::Transpose { permutation } => attributes.push(AttributeProto {
            name: "perm".into(),
            r#type: attribute_type::INTS,
            ints: integers(permutation)?,
            ..Default::default()
        }),
        Op::Slice { axis, start, end } => {
            parameters.push(integers(&[*start])?);
            parameters.push(integers(&[*end])?);
            parameters.push(integers(&[*axis])?);
        }
        Op::Split { axis, sizes } => {
            attributes.push(int("axis", *axis)?);
            parameters.push(integers(sizes)?);
        }
        Op::Cast { to } => {
            let number = proto::data_type(*to).ok_or_else(|| format!("no ONNX type for {to}"))?;
            attributes.push(AttributeProto {
                name: "to".into(),
                r#type: attribute_type::INT,
                i: Some(i64::from(number)),
                ..Default::default()
            });
        }
        // The output's type is that of the zero point, which is always an input.
        Op::QuantizeLinear { axis } | Op::DequantizeLinear { axis } => {
            if let Some(axis) = axis {
                attributes.push(int("axis", *axis)?);
            }
        }
        other => return Err(format!("{} has no ONNX spelling", other.name())),
    }
    Ok(spelling)
}

fn integers(values: &[usize]) -> Result<Vec<i64>, String> {
    let convert = |&value| i64::try_from(value).map_err(|_| format!("{value} is too large"));
    values.iter().map(convert).collect()
}

fn int(name: &str, value: usize) -> Result<AttributeProto, String> {
    Ok(AttributeProto {
        name: name.into(),
        r#type: attribute_type::INT,
        i: Some(i64::try_from(value).map_err(|_| format!("{name} {value} is too large"))?),
        ..Default::default()
    })
}

fn string(name: &str, value: &'static str) -> AttributeProto {
    AttributeProto {
        name: name.into(),
        r#type: attribute_type::STRING,
        s: Some(Bytes::from_static(value.as_bytes())),
        ..Default::default()
    }
}

/// A node to read.
pub(crate) struct NodeReader<'a> {
    pub(crate) node: &'a NodeProto,
    /// Shape of the first input.
    pub(crate) shape: &'a [usize],
    /// Shape of the second input; empty if there is none.
    pub(crate) second_shape: &'a [usize],
    /// The int64 initializers of the model, by name.
    pub(crate) integers: &'a HashMap<String, Tensor>,
}

impl NodeReader<'_> {
    /// The operator and the number of data inputs; the inputs after them are parameters and
    /// already part of the operator.
    ///
    /// # Errors
    /// A sentence about an unknown operator or attribute, or an unsupported value of one.
    pub(crate) fn read(&self) -> Result<(Op, usize), String> {
        let mut attributes = Attributes::new(&self.node.attribute)?;
        let result = self.read_with(&mut attributes)?;
        attributes.finish()?;
        Ok(result)
    }

    fn read_with(&self, attributes: &mut Attributes<'_>) -> Result<(Op, usize), String> {
        let inputs = self.node.input.len();
        let op = match self.node.op_type.as_str() {
            "Add" => Op::Add,
            "Sub" => Op::Sub,
            "Mul" => Op::Mul,
            "Div" => Op::Div,
            "Max" => Op::Max,
            "Neg" => Op::Neg,
            "Abs" => Op::Abs,
            "Sqrt" => Op::Sqrt,
            "Erf" => Op::Erf,
            "Tanh" => Op::Tanh,
            "Sigmoid" => Op::Sigmoid,
            "MatMul" => Op::MatMul,
            "Gelu" => Op::Gelu(match attributes.string("approximate")?.unwrap_or("none") {
                "none" => GeluForm::Exact,
                "tanh" => GeluForm::Tanh,
                other => return Err(format!("approximate is {other:?}; none and tanh are known")),
            }),
            "Softmax" => Op::Softmax { axis: self.axis(attributes.int("axis")?.unwrap_or(-1))? },
            "Concat" => {
                let axis = attributes.int("axis")?.ok_or("has no axis")?;
                Op::Concat { axis: self.axis(axis)? }
            }
            name @ ("ReduceMean" | "ReduceMax") => {
                attributes.only_int("keepdims", 1, 1)?;
                attributes.only_int("noop_with_empty_axes", 0, 0)?;
                self.count(2..=2)?;
                let axis = self.axis(self.single(1, "axes")?)?;
                let op = match name {
                    "ReduceMean" => Op::ReduceMean { axis },
                    _ => Op::ReduceMax { axis },
                };
                return Ok((op, 1));
            }
            "RMSNormalization" => {
                attributes.only_int("stash_type", 1, 1)?;
                Op::RmsNormalization {
                    axis: self.axis(attributes.int("axis")?.unwrap_or(-1))?,
                    epsilon: attributes.float("epsilon")?.unwrap_or(1e-5),
                }
            }
            "Gemm" => {
                attributes.only_int("transB", 1, 0)?;
                attributes.only_int("transA", 0, 0)?;
                attributes.only_one("alpha")?;
                attributes.only_one("beta")?;
                if inputs != 2 {
                    return Err(format!("has {inputs} inputs; only a Gemm without bias is read"));
                }
                Op::Gemm
            }
            "Reshape" => {
                attributes.only_int("allowzero", 0, 0)?;
                self.count(2..=2)?;
                let shape = self.parameter(1, "shape", MAX_RANK)?;
                return Ok((Op::Reshape { shape: positive("shape", &shape)? }, 1));
            }
            "Transpose" => {
                let permutation = match attributes.ints("perm")? {
                    Some(perm) if perm.len() == self.shape.len() => {
                        perm.iter().map(|&axis| self.axis(axis)).collect::<Result<_, _>>()?
                    }
                    Some(perm) => {
                        let rank = self.shape.len();
                        return Err(format!("perm has {} axes, the input {rank}", perm.len()));
                    }
                    None => (0..self.shape.len()).rev().collect(),
                };
                Op::Transpose { permutation }
            }
            "Slice" => {
                self.count(3..=5)?;
                let start = self.single(1, "starts")?;
                let end = self.single(2, "ends")?;
                let axis = if inputs > 3 { self.single(3, "axes")? } else { 0 };
                if inputs > 4 && self.single(4, "steps")? != 1 {
                    return Err("steps is not 1".into());
                }
                let axis = self.axis(axis)?;
                let length = self.shape.get(axis).copied().unwrap_or(0);
                let [start, end] = [start, end].map(|position| clamp(position, length));
                return Ok((Op::Slice { axis, start, end }, 1));
            }
            "Split" => {
                if attributes.int("num_outputs")?.is_some() {
                    return Err(
                        "num_outputs is not read; give the sizes as the second input".into()
                    );
                }
                let axis = self.axis(attributes.int("axis")?.unwrap_or(0))?;
                self.count(2..=2)?;
                let sizes = self.parameter(1, "split", self.node.output.len())?;
                return Ok((Op::Split { axis, sizes: positive("split", &sizes)? }, 1));
            }
            "Cast" => {
                let to = attributes.int("to")?.ok_or("has no target type")?;
                let dtype = i32::try_from(to).ok().and_then(proto::dtype);
                Op::Cast { to: dtype.ok_or_else(|| format!("casts to unknown type {to}"))? }
            }
            name @ ("QuantizeLinear" | "DequantizeLinear") => {
                if let Some(size) = attributes.int("block_size")?.filter(|size| *size != 0) {
                    return Err(format!(
                        "block_size is {size}: with a scale for each block the HTP computes in \
                         float; one scale a row or a tensor is read"
                    ));
                }
                for (attribute, accepted) in
                    [("saturate", 1), ("output_dtype", 0), ("precision", 0)]
                {
                    attributes.only_int(attribute, accepted, accepted)?;
                }
                self.count(3..=3)?;
                let given = attributes.int("axis")?;
                let axis = match self.second_shape.len() {
                    0 => None,
                    1 => Some(self.axis(given.unwrap_or(1))?),
                    rank => return Err(format!("scales of rank {rank}; rank 0 and 1 are read")),
                };
                match name {
                    "QuantizeLinear" => Op::QuantizeLinear { axis },
                    _ => Op::DequantizeLinear { axis },
                }
            }
            _ => return Err("the operator is not supported".into()),
        };
        Ok((op, inputs))
    }

    fn count(&self, accepted: std::ops::RangeInclusive<usize>) -> Result<(), String> {
        let inputs = self.node.input.len();
        if accepted.contains(&inputs) {
            return Ok(());
        }
        Err(format!("has {inputs} inputs; accepted: {} to {}", accepted.start(), accepted.end()))
    }

    fn parameter(&self, index: usize, what: &str, limit: usize) -> Result<Vec<i64>, String> {
        let name = self.node.input.get(index).map_or("", String::as_str);
        if name.is_empty() {
            return Err(format!("has no {what}"));
        }
        match self.integers.get(name) {
            Some(tensor) => read_integers(tensor, limit),
            None => Err("is no int64 initializer; static ones are read".into()),
        }
        .map_err(|problem| format!("{what} {name}: {problem}"))
    }

    fn single(&self, index: usize, what: &str) -> Result<i64, String> {
        match self.parameter(index, what, 1)?[..] {
            [value] => Ok(value),
            _ => Err(format!("{what} is empty; one element is read")),
        }
    }

    fn axis(&self, axis: i64) -> Result<usize, String> {
        let rank = self.shape.len();
        let signed = i64::try_from(rank).ok();
        let axis_from_start =
            if axis < 0 { signed.and_then(|rank| axis.checked_add(rank)) } else { Some(axis) };
        axis_from_start
            .and_then(|axis| usize::try_from(axis).ok())
            .filter(|axis| *axis < rank)
            .ok_or_else(|| format!("axis {axis} of a rank-{rank} tensor"))
    }
}

/// The elements of a vector of at most `limit` elements.
fn read_integers(tensor: &Tensor, limit: usize) -> Result<Vec<i64>, String> {
    let [length] = *tensor.shape() else {
        return Err(format!("has shape {:?}; rank 1 is read", tensor.shape()));
    };
    if length > limit {
        return Err(format!("has {length} elements; at most {limit} fit here"));
    }
    let words = tensor.bytes().chunks_exact(8);
    let read = |b: &[u8]| i64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]);
    Ok(words.map(read).collect())
}

/// A start or end of a slice as a position from the start, under the format's rules.
fn clamp(position: i64, length: usize) -> usize {
    let magnitude = usize::try_from(position.unsigned_abs()).unwrap_or(usize::MAX);
    if position < 0 { length.saturating_sub(magnitude) } else { magnitude.min(length) }
}

fn positive(what: &str, values: &[i64]) -> Result<Vec<usize>, String> {
    let convert = |&value| match usize::try_from(value) {
        Ok(value) if value > 0 => Ok(value),
        _ => Err(format!("{what} {values:?} must be static: positive numbers, no 0 or -1")),
    };
    values.iter().map(convert).collect()
}

/// The attributes of a node that nothing has asked for yet.
struct Attributes<'a> {
    rest: Vec<&'a AttributeProto>,
}

impl<'a> Attributes<'a> {
    fn new(attributes: &'a [AttributeProto]) -> Result<Self, String> {
        let mut rest: Vec<&AttributeProto> = attributes.iter().collect();
        rest.sort_by(|a, b| a.name.cmp(&b.name));
        match rest.windows(2).find(|pair| pair[0].name == pair[1].name) {
            Some(pair) => Err(format!("has attribute {} twice", pair[0].name)),
            None => Ok(Self { rest }),
        }
    }

    fn take(&mut self, name: &str, expected: i32) -> Result<Option<&'a AttributeProto>, String> {
        let Some(index) = self.rest.iter().position(|attribute| attribute.name == name) else {
            return Ok(None);
        };
        let attribute = self.rest.remove(index);
        if !attribute.ref_attr_name.is_empty() {
            return Err(format!("attribute {name} refers to one of a function"));
        }
        if attribute.r#type != expected {
            let actual = attribute.r#type;
            return Err(format!("attribute {name} has type {actual} instead of {expected}"));
        }
        Ok(Some(attribute))
    }

    fn int(&mut self, name: &str) -> Result<Option<i64>, String> {
        let attribute = self.take(name, attribute_type::INT)?;
        Ok(attribute.map(|attribute| attribute.i.unwrap_or(0)))
    }

    fn float(&mut self, name: &str) -> Result<Option<f32>, String> {
        let attribute = self.take(name, attribute_type::FLOAT)?;
        Ok(attribute.map(|attribute| attribute.f.unwrap_or(0.0)))
    }

    fn ints(&mut self, name: &str) -> Result<Option<&'a [i64]>, String> {
        let attribute = self.take(name, attribute_type::INTS)?;
        Ok(attribute.map(|attribute| &attribute.ints[..]))
    }

    fn string(&mut self, name: &str) -> Result<Option<&'a str>, String> {
        let Some(attribute) = self.take(name, attribute_type::STRING)? else {
            return Ok(None);
        };
        let bytes = attribute.s.as_deref().unwrap_or_default();
        let text = std::str::from_utf8(bytes);
        text.map(Some).map_err(|_| format!("attribute {name} is not UTF-8"))
    }

    fn only_int(&mut self, name: &str, accepted: i64, default: i64) -> Result<(), String> {
        let value = self.int(name)?.unwrap_or(default);
        if value == accepted {
            return Ok(());
        }
        Err(format!("{name} is {value}; only {accepted} is read"))
    }

    fn only_one(&mut self, name: &str) -> Result<(), String> {
        let value = self.float(name)?.unwrap_or(1.0);
        if value == 1.0 {
            return Ok(());
        }
        Err(format!("{name} is {value}; only 1 is read"))
    }

    fn finish(self) -> Result<(), String> {
        match self.rest.first() {
            None => Ok(()),
            Some(attribute) => Err(format!("attribute {} is not supported", attribute.name)),
        }
    }
}
