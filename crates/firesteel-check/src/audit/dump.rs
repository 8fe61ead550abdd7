use super::AuditError;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fmt;

/// Element type of a QNN tensor, by QNN's number: the kind in the upper byte, the bits in binary
/// coded decimal below it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Deserialize)]
#[serde(transparent)]
pub struct QnnDataType(pub u32);

impl QnnDataType {
    /// Whether it is a floating-point type.
    pub fn is_float(self) -> bool {
        self.0 >> 8 == 2
    }

    /// Whether it is an integer type with a scale.
    pub fn is_quantized(self) -> bool {
        matches!(self.0 >> 8, 3 | 4)
    }
}

/// A short name, such as `u16` for an unsigned quantized type and `f16`.
impl fmt::Display for QnnDataType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.0 >> 8 {
            0 => "int",
            1 => "uint",
            2 => "f",
            3 => "s",
            4 => "u",
            5 => "bool",
            _ => "type 0x",
        };
        write!(f, "{kind}{:x}", self.0 & 0xff)
    }
}

/// A tensor of the graph that QNN got.
#[derive(Debug, Clone, Deserialize)]
pub struct QnnTensor {
    /// Element type.
    pub data_type: QnnDataType,
    /// Shape.
    pub dims: Vec<u64>,
    /// Role: 0 graph input, 1 graph output, 3 between operators, 4 constant.
    #[serde(rename = "type")]
    pub role: u32,
    quant_params: QuantParams,
}

#[derive(Debug, Clone, Deserialize)]
struct QuantParams {
    encoding: u32,
}

impl QnnTensor {
    /// Whether the tensor is a constant.
    pub fn is_constant(&self) -> bool {
        self.role == 4
    }

    /// Bits of an element and how scales are spread, such as `int8 per channel`; for float types
    /// the type alone. Integers of fewer bits than their type says have an encoding of their own.
    pub fn format(&self) -> String {
        if !self.data_type.is_quantized() {
            return self.data_type.to_string();
        }
        let wide = format!("int{:x}", self.data_type.0 & 0xff);
        match self.quant_params.encoding {
            0 => format!("{wide} per tensor"),
            1 => format!("{wide} per channel"),
            2 => "int4 per tensor".to_owned(),
            3 => "int4 per channel".to_owned(),
            other => format!("{wide} in blocks (encoding {other})"),
        }
    }
}

/// An operator of the graph that QNN got.
#[derive(Debug, Clone, Deserialize)]
pub struct QnnOp {
    /// QNN's operator.
    #[serde(rename = "type")]
    pub kind: String,
    /// Names of the input tensors.
    #[serde(rename = "input_names")]
    pub inputs: Vec<String>,
    /// Names of the output tensors.
    #[serde(rename = "output_names")]
    pub outputs: Vec<String>,
}

/// The graph that QNN got, from the provider's JSON.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct Dump {
    /// Operators by name.
    pub nodes: BTreeMap<String, QnnOp>,
    /// Tensors by name.
    pub tensors: BTreeMap<String, QnnTensor>,
}

impl Dump {
    /// Reads the JSON of one graph.
    ///
    /// # Errors
    /// When it is not of the known form.
    pub fn parse(json: &[u8]) -> Result<Self, AuditError> {
        #[derive(Deserialize)]
        struct File {
            graph: Dump,
        }
        let file: File = serde_json::from_slice(json)
            .map_err(|error| AuditError::Dump { problem: error.to_string() })?;
        Ok(file.graph)
    }

    /// Adds the operators of another part of the same model.
    pub fn extend(&mut self, other: Self) {
        self.nodes.extend(other.nodes);
        self.tensors.extend(other.tensors);
    }

    /// Number of operators of each type.
    pub fn op_counts(&self) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        for op in self.nodes.values() {
            *counts.entry(op.kind.clone()).or_insert(0) += 1;
        }
        counts
    }
}
