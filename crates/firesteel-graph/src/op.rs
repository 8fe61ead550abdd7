use firesteel_tensor::DType;

/// Form of the GELU activation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GeluForm {
    /// x·Φ(x) through the error function.
    Exact,
    /// 0.5·x·(1 + tanh(√(2/π)·(x + 0.044715·x³))).
    Tanh,
}

/// An operator with its parameters. Axes are non-negative. Semantics are those of the ONNX
/// operator of the same name ([`Op::name`]).
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Op {
    /// a + b, broadcast.
    Add,
    /// a − b, broadcast.
    Sub,
    /// a · b, broadcast.
    Mul,
    /// a / b, broadcast.
    Div,
    /// Element-wise maximum of two inputs, broadcast.
    Max,
    /// −x.
    Neg,
    /// |x|.
    Abs,
    /// √x.
    Sqrt,
    /// Error function.
    Erf,
    /// Hyperbolic tangent.
    Tanh,
    /// 1 / (1 + e^−x).
    Sigmoid,
    /// GELU as one operator (opset 20).
    Gelu(GeluForm),
    /// Softmax along `axis`.
    Softmax {
        /// The axis that sums to one.
        axis: usize,
    },
    /// Mean along `axis`, which stays with length 1.
    ReduceMean {
        /// The axis.
        axis: usize,
    },
    /// Maximum along `axis`, which stays with length 1.
    ReduceMax {
        /// The axis.
        axis: usize,
    },
    /// x / √(mean(x²) + ε) · scale over the axes from `axis` on (opset 23), computed in f32
    /// inside. Inputs x, scale.
    RmsNormalization {
        /// First normalized axis.
        axis: usize,
        /// ε.
        epsilon: f32,
    },
    /// Matrix product of the last two axes, leading axes broadcast.
    MatMul,
    /// a · bᵀ for rank-2 inputs a [M, K] and b [N, K] (`Gemm` with transB = 1).
    Gemm,
    /// The same elements under another shape.
    Reshape {
        /// The new shape, without 0 or −1.
        shape: Vec<usize>,
    },
    /// Axes reordered: output axis i is input axis `permutation[i]`.
    Transpose {
        /// The order.
        permutation: Vec<usize>,
    },
    /// Elements `start..end` of `axis`.
    Slice {
        /// The axis.
        axis: usize,
        /// First element.
        start: usize,
        /// One past the last element.
        end: usize,
    },
    /// The input cut along `axis`, one output a size.
    Split {
        /// The axis.
        axis: usize,
        /// Lengths of the outputs; their sum is the axis' length.
        sizes: Vec<usize>,
    },
    /// Inputs joined along `axis`.
    Concat {
        /// The axis.
        axis: usize,
    },
    /// Conversion to another float type.
    Cast {
        /// The target type.
        to: DType,
    },
    /// round(x / scale) + zero point, saturated; halves round to even. Inputs x, scale, zero
    /// point; the output has the type of the zero point. One scale for the whole tensor, or one an
    /// index of an axis.
    QuantizeLinear {
        /// The axis of a vector of scales; `None` for one scale.
        axis: Option<usize>,
    },
    /// (x − zero point) · scale. Inputs x, scale, zero point, the latter of the type of x; the
    /// output has the type of the scale.
    DequantizeLinear {
        /// The axis of a vector of scales; `None` for one scale.
        axis: Option<usize>,
    },
}

impl Op {
    /// Name of the ONNX operator.
    pub const fn name(&self) -> &'static str {
        match self {
            Op::Add => "Add",
            Op::Sub => "Sub",
            Op::Mul => "Mul",
            Op::Div => "Div",
            Op::Max => "Max",
            Op::Neg => "Neg",
            Op::Abs => "Abs",
            Op::Sqrt => "Sqrt",
            Op::Erf => "Erf",
            Op::Tanh => "Tanh",
            Op::Sigmoid => "Sigmoid",
            Op::Gelu(_) => "Gelu",
            Op::Softmax { .. } => "Softmax",
            Op::ReduceMean { .. } => "ReduceMean",
            Op::ReduceMax { .. } => "ReduceMax",
            Op::RmsNormalization { .. } => "RMSNormalization",
            Op::MatMul => "MatMul",
            Op::Gemm => "Gemm",
            Op::Reshape { .. } => "Reshape",
            Op::Transpose { .. } => "Transpose",
            Op::Slice { .. } => "Slice",
            Op::Split { .. } => "Split",
            Op::Concat { .. } => "Concat",
            Op::Cast { .. } => "Cast",
            Op::QuantizeLinear { .. } => "QuantizeLinear",
            Op::DequantizeLinear { .. } => "DequantizeLinear",
        }
    }

    /// First ONNX opset that has the operator in this form.
    pub const fn since_opset(&self) -> i64 {
        match self {
            Op::RmsNormalization { .. } => 23,
            Op::Gelu(_) => 20,
            // 16-bit and 4-bit integers.
            Op::QuantizeLinear { .. } | Op::DequantizeLinear { .. } => 21,
            // Axes of ReduceMean and ReduceMax became an input, Split got num_outputs.
            _ => 18,
        }
    }
}
