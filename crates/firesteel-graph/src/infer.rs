use crate::{Op, graph::Value};
use firesteel_tensor::{DType, element_count};

type Inferred = Vec<(DType, Vec<usize>)>;

/// Types and shapes of the outputs of `op` over `inputs`.
pub(crate) fn infer(op: &Op, inputs: &[&Value]) -> Result<Inferred, String> {
    let arity = match op {
        Op::Add | Op::Sub | Op::Mul | Op::Div | Op::Max => Some(2),
        Op::MatMul | Op::Gemm | Op::RmsNormalization { .. } => Some(2),
        Op::QuantizeLinear { .. } | Op::DequantizeLinear { .. } => Some(3),
        Op::Concat { .. } => None,
        _ => Some(1),
    };
    match arity {
        Some(n) if inputs.len() != n => {
            return Err(format!("needs {n} inputs, got {}", inputs.len()));
        }
        None if inputs.is_empty() => return Err("needs at least one input".into()),
        _ => {}
    }
    let first = inputs[0];
    let dtype = first.dtype;
    if !matches!(op, Op::QuantizeLinear { .. } | Op::DequantizeLinear { .. }) {
        if let Some(other) = inputs.iter().find(|v| v.dtype != dtype) {
            return Err(format!("element types differ: {dtype} and {}", other.dtype));
        }
        if !matches!(dtype, DType::F32 | DType::F16) {
            return Err(format!("{dtype} is not computed; f32 and f16 are"));
        }
    }
    let shape = &first.shape;
    let rank = shape.len();
    let on_axis = |axis: usize| {
        if axis < rank { Ok(axis) } else { Err(format!("axis {axis} of a rank-{rank} tensor")) }
    };
    let one = |dtype, shape| Ok(vec![(dtype, shape)]);
    match op {
        Op::Add | Op::Sub | Op::Mul | Op::Div | Op::Max => {
            one(dtype, broadcast(shape, &inputs[1].shape)?)
        }
        Op::Neg | Op::Abs | Op::Sqrt | Op::Erf | Op::Tanh | Op::Sigmoid | Op::Gelu(_) => {
            one(dtype, shape.clone())
        }
        Op::Softmax { axis } => {
            on_axis(*axis)?;
            one(dtype, shape.clone())
        }
        Op::ReduceMean { axis } | Op::ReduceMax { axis } => {
            let mut shape = shape.clone();
            if shape.get(on_axis(*axis)?) == Some(&0) {
                return Err("reduces an empty axis".into());
            }
            shape[*axis] = 1;
            one(dtype, shape)
        }
        Op::RmsNormalization { axis, .. } => {
            on_axis(*axis)?;
            if inputs[1].shape != shape[*axis..] {
                return Err("the scale's shape is not that of the normalized axes".into());
            }
            one(dtype, shape.clone())
        }
        Op::MatMul => {
            let other = &inputs[1].shape;
            let other_rank = other.len();
            if rank < 2 || other_rank < 2 {
                return Err("needs tensors of rank 2 or more".into());
            }
            if shape[rank - 1] != other[other_rank - 2] {
                return Err("inner dimensions differ".into());
            }
            let mut result = broadcast(&shape[..rank - 2], &other[..other_rank - 2])?;
            result.extend([shape[rank - 2], other[other_rank - 1]]);
            one(dtype, result)
        }
        Op::Gemm => {
            let other = &inputs[1].shape;
            if rank != 2 || other.len() != 2 {
                return Err("needs two tensors of rank 2".into());
            }
            if shape[1] != other[1] {
                return Err("inner dimensions differ".into());
            }
            one(dtype, vec![shape[0], other[0]])
        }
        Op::Reshape { shape: target } => {
            let count = element_count(target);
            if target.contains(&0) || count.is_none() || count != element_count(shape) {
                return Err(format!("cannot become {target:?}"));
            }
            one(dtype, target.clone())
        }
        Op::Transpose { permutation } => {
            let mut seen = vec![false; rank];
            let valid = permutation.len() == rank
                && permutation
                    .iter()
                    .all(|&axis| axis < rank && !std::mem::replace(&mut seen[axis], true));
            if !valid {
                return Err(format!("{permutation:?} is no order of {rank} axes"));
            }
            one(dtype, permutation.iter().map(|&axis| shape[axis]).collect())
        }
        Op::Slice { axis, start, end } => {
            let length = shape[on_axis(*axis)?];
            if start >= end || *end > length {
                return Err(format!("slice {start}..{end} of an axis of {length}"));
            }
            let mut shape = shape.clone();
            shape[*axis] = end - start;
            one(dtype, shape)
        }
        Op::Split { axis, sizes } => {
            let length = shape[on_axis(*axis)?];
            let sum = sizes.iter().try_fold(0usize, |sum, &size| sum.checked_add(size));
            if sizes.is_empty() || sizes.contains(&0) || sum != Some(length) {
                return Err(format!("sizes {sizes:?} of an axis of {length}"));
            }
            Ok(sizes
                .iter()
                .map(|&size| {
                    let mut shape = shape.clone();
                    shape[*axis] = size;
                    (dtype, shape)
                })
                .collect())
        }
        Op::Concat { axis } => {
            on_axis(*axis)?;
            let mut result = shape.clone();
            for other in &inputs[1..] {
                let alike = other.shape.len() == rank
                    && (0..rank).all(|a| a == *axis || other.shape[a] == shape[a]);
                if !alike {
                    return Err("shapes differ outside the joined axis".into());
                }
                result[*axis] = result[*axis]
                    .checked_add(other.shape[*axis])
                    .ok_or("the joined axis is too long")?;
            }
            one(dtype, result)
        }
        Op::QuantizeLinear { axis } => one(infer_qdq(true, *axis, inputs)?, shape.clone()),
        Op::DequantizeLinear { axis } => one(infer_qdq(false, *axis, inputs)?, shape.clone()),
        Op::Cast { to } => {
            if !matches!(to, DType::F32 | DType::F16) {
                return Err(format!("no cast to {to}"));
            }
            one(*to, shape.clone())
        }
    }
}

/// The element type that a quantization (or the way back) makes.
fn infer_qdq(quantizes: bool, axis: Option<usize>, inputs: &[&Value]) -> Result<DType, String> {
    let (x, scale, zero) = (inputs[0], inputs[1], inputs[2]);
    let (real, integer) = if quantizes { (x.dtype, zero.dtype) } else { (scale.dtype, x.dtype) };
    if !matches!(real, DType::F32 | DType::F16) || scale.dtype != real {
        return Err(format!("{} scales for {real}; f32 or f16 for both", scale.dtype));
    }
    if integer.integer_range().is_none() || zero.dtype != integer {
        let accepted = "integers of at most 16 bits for both";
        return Err(format!("zero points in {} for {integer}; {accepted}", zero.dtype));
    }
    let expected = match axis {
        None => Vec::new(),
        Some(axis) => match x.shape.get(axis) {
            Some(length) => vec![*length],
            None => return Err(format!("axis {axis} of a rank-{} tensor", x.shape.len())),
        },
    };
    if scale.shape != expected || zero.shape != expected {
        return Err(format!("scales and zero points must have shape {expected:?}"));
    }
    Ok(if quantizes { integer } else { real })
}

/// The common shape of two tensors under NumPy's rules.
pub(crate) fn broadcast(a: &[usize], b: &[usize]) -> Result<Vec<usize>, String> {
    let rank = a.len().max(b.len());
    let dim = |shape: &[usize], axis: usize| {
        (axis + shape.len()).checked_sub(rank).map_or(1, |i| shape[i])
    };
    (0..rank)
        .map(|axis| match (dim(a, axis), dim(b, axis)) {
            (x, y) if x == y => Ok(x),
            (1, y) => Ok(y),
            (x, 1) => Ok(x),
            _ => Err(format!("shapes {a:?} and {b:?} do not broadcast")),
        })
        .collect()
}
