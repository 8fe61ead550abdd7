//! A model file as a graph.

use crate::error::{Fault, OnnxError};
use crate::op::{MAX_RANK, NodeReader};
use crate::plan::is_bare_name;
use crate::proto::{self, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto};
use crate::{MAX_MODEL_BYTES, MAX_OPSET, MIN_OPSET, wire};
use firesteel_checkpoint::MappedFile;
use firesteel_graph::{Constant, Graph, ValueId};
use firesteel_tensor::{DType, SharedBytes, Tensor};
use prost::Message;
use prost::bytes::Bytes;
use std::collections::{HashMap, HashSet};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Versions of the format whose meaning is known.
const IR_VERSIONS: std::ops::RangeInclusive<i64> = 8..=13;

/// A model that was read.
#[derive(Debug, Clone)]
pub struct OnnxModel {
    /// The graph; large constants are mapped from the data files.
    pub graph: Graph,
    /// Operator set.
    pub opset: i64,
    /// Version of the format.
    pub ir_version: i64,
    /// Name of the program that wrote it.
    pub producer_name: String,
    /// Version of that program.
    pub producer_version: String,
    /// Key-value pairs, in file order; keys are unique.
    pub metadata: Vec<(String, String)>,
}

/// Reads a model with its external data, which stays mapped.
///
/// The file is hostile input: whatever is not understood is refused, external data is only read
/// from plain files in the model's own folder, and memory is bounded by the file's size and a
/// limit on the number of its parts.
///
/// # Errors
/// When a file cannot be read, the model is malformed, or it has something that the graph cannot
/// express: other domains and opsets than 18 to 23, functions, subgraphs, sparse initializers,
/// dynamic shapes, strings, unknown operators and attributes, unused values.
pub fn read_model(path: &Path) -> Result<OnnxModel, OnnxError> {
    let bytes = read_bytes(path)?;
    let folder = path.parent().unwrap_or(Path::new("")).to_owned();
    decode(bytes).and_then(|proto| to_model(proto, folder)).map_err(|fault| fault.in_file(path))
}

/// The bytes of a regular file that is not larger than a model may be.
pub(crate) fn read_bytes(path: &Path) -> Result<Bytes, OnnxError> {
    // A pipe or device would block or never end.
    let metadata = fs_err::metadata(path)?;
    if !metadata.is_file() {
        return Err(Fault::new("file", "is not a regular file").in_file(path));
    }
    let mut bytes = Vec::new();
    // One byte more shows a file that grows beyond the limit while it is read.
    fs_err::File::open(path)?.take(MAX_MODEL_BYTES + 1).read_to_end(&mut bytes)?;
    let length = bytes.len() as u64;
    if length > MAX_MODEL_BYTES {
        let bytes = metadata.len().max(length);
        return Err(OnnxError::TooLarge { file: path.into(), bytes, limit: MAX_MODEL_BYTES });
    }
    Ok(Bytes::from(bytes))
}

/// The message of a model file; data inside it shares the memory of `bytes`.
pub(crate) fn decode(bytes: Bytes) -> Result<ModelProto, Fault> {
    wire::check(&bytes).map_err(|problem| Fault::new("file", problem))?;
    ModelProto::decode(bytes).map_err(|error| Fault::new("file", error))
}

/// The element type and shape that a value is declared with.
fn declared(info: &ValueInfoProto) -> Result<(DType, Vec<usize>), Fault> {
    let subject = || format!("value {}", info.name);
    let tensor = info.r#type.as_ref().and_then(|r#type| r#type.tensor_type.as_ref());
    let tensor = tensor.ok_or_else(|| Fault::new(subject(), "has no tensor type"))?;
    let dtype = proto::dtype(tensor.elem_type).ok_or_else(|| {
        Fault::new(subject(), format!("element type {} is not supported", tensor.elem_type))
    })?;
    let shape = tensor.shape.as_ref().ok_or_else(|| Fault::new(subject(), "has no shape"))?;
    let dims = shape.dim.iter().map(|dim| match (dim.dim_value, &dim.dim_param) {
        (Some(value), None) => Ok(value),
        (_, name) => Err(Fault::new(
            subject(),
            format!(
                "dimension {:?} is dynamic; static shapes are read",
                name.as_deref().unwrap_or("without value")
            ),
        )),
    });
    let dims = dims.collect::<Result<Vec<i64>, Fault>>()?;
    let shape = to_shape(&dims).map_err(|problem| Fault::new(subject(), problem))?;
    Ok((dtype, shape))
}

fn to_shape(dims: &[i64]) -> Result<Vec<usize>, String> {
    if dims.len() > MAX_RANK {
        return Err(format!("has rank {}; up to {MAX_RANK} is supported", dims.len()));
    }
    let convert = |&dim| usize::try_from(dim).map_err(|_| format!("has dimension {dim}"));
    dims.iter().map(convert).collect()
}

fn to_model(proto: ModelProto, folder: PathBuf) -> Result<OnnxModel, Fault> {
    if !IR_VERSIONS.contains(&proto.ir_version) {
        let (first, last) = (IR_VERSIONS.start(), IR_VERSIONS.end());
        let problem = format!("{}; {first} to {last} are read", proto.ir_version);
        return Err(Fault::new("ir_version", problem));
    }
    let opset = match &proto.opset_import[..] {
        [set] if is_default(&set.domain) => set.version,
        sets => {
            let sets: Vec<String> =
                sets.iter().map(|set| format!("{:?} {}", set.domain, set.version)).collect();
            let problem = format!("[{}]; only one of the default domain is read", sets.join(", "));
            return Err(Fault::new("opset_import", problem));
        }
    };
    if !(MIN_OPSET..=MAX_OPSET).contains(&opset) {
        let problem = format!("{opset}; {MIN_OPSET} to {MAX_OPSET} are read");
        return Err(Fault::new("opset", problem));
    }
    let Some(graph_proto) = proto.graph else {
        return Err(Fault::new("model", "has no graph"));
    };
    for (what, present) in [
        ("training_info", !proto.training_info.is_empty()),
        ("functions", !proto.functions.is_empty()),
        ("quantization_annotation", !graph_proto.quantization_annotation.is_empty()),
        ("sparse_initializer", !graph_proto.sparse_initializer.is_empty()),
    ] {
        if present {
            return Err(Fault::new(what, "is not supported"));
        }
    }
    let mut metadata = Vec::with_capacity(proto.metadata_props.len());
    let mut keys = HashSet::new();
    for entry in proto.metadata_props {
        if !keys.insert(entry.key.clone()) {
            return Err(Fault::new("metadata_props", format!("has key {} twice", entry.key)));
        }
        metadata.push((entry.key, entry.value));
    }
    Ok(OnnxModel {
        graph: to_graph(graph_proto, opset, folder)?,
        opset,
        ir_version: proto.ir_version,
        producer_name: proto.producer_name,
        producer_version: proto.producer_version,
        metadata,
    })
}

fn is_default(domain: &str) -> bool {
    matches!(domain, "" | "ai.onnx")
}

fn to_graph(proto: GraphProto, opset: i64, folder: PathBuf) -> Result<Graph, Fault> {
    let mut graph = Graph::new(proto.name);
    for info in &proto.input {
        let (dtype, shape) = declared(info)?;
        graph.input(info.name.clone(), dtype, shape)?;
    }
    // Operator parameters are int64 and become part of their node; no operator computes int64.
    let mut integers: HashMap<String, Tensor> = HashMap::new();
    let mut data = DataFiles { folder, open: HashMap::new() };
    for initializer in proto.initializer {
        let name = initializer.name.clone();
        let subject = format!("initializer {name}");
        let tensor = data.tensor(initializer).map_err(|problem| Fault::new(&subject, problem))?;
        if tensor.dtype() != DType::I64 {
            let (dtype, shape) = (tensor.dtype(), tensor.shape().to_vec());
            graph.add_constant(name, dtype, shape, Constant::Tensor(tensor))?;
        } else if name.is_empty() || graph.find(&name).is_some() || integers.contains_key(&name) {
            return Err(Fault::new(subject, "the name is empty or taken"));
        } else {
            integers.insert(name, tensor);
        }
    }
    let mut used = HashSet::new();
    for node in &proto.node {
        add_node(&mut graph, node, opset, &integers, &mut used)?;
    }
    if let Some(name) = integers.keys().filter(|name| !used.contains(name.as_str())).min() {
        return Err(Fault::new(format!("initializer {name}"), "is never used"));
    }
    if let Some(name) = integers.keys().filter(|name| graph.find(name).is_some()).min() {
        return Err(Fault::new(format!("initializer {name}"), "a value has the same name"));
    }
    for info in &proto.output {
        let id = check_declared(&graph, info)?;
        graph.output(id)?;
    }
    let mut seen = HashSet::new();
    for info in &proto.value_info {
        check_declared(&graph, info)?;
        if !seen.insert(&info.name) {
            return Err(Fault::new(format!("value {}", info.name), "is declared twice"));
        }
    }
    graph.validate()?;
    Ok(graph)
}

/// Proves that a value exists and has its declared type.
fn check_declared(graph: &Graph, info: &ValueInfoProto) -> Result<ValueId, Fault> {
    let subject = || format!("value {}", info.name);
    let (dtype, shape) = declared(info)?;
    let id = graph.find(&info.name).ok_or_else(|| Fault::new(subject(), "nothing makes it"))?;
    let value = graph.value(id);
    if value.dtype != dtype || value.shape != shape {
        let problem =
            format!("is declared {dtype} {shape:?}, but is {} {:?}", value.dtype, value.shape);
        return Err(Fault::new(subject(), problem));
    }
    Ok(id)
}

fn add_node<'a>(
    graph: &mut Graph,
    node: &'a NodeProto,
    opset: i64,
    integers: &HashMap<String, Tensor>,
    used: &mut HashSet<&'a str>,
) -> Result<(), Fault> {
    let first_output = node.output.first().map_or("", String::as_str);
    let name = if node.name.is_empty() {
        // The format lets nodes have no name.
        format!("{first_output}/{}", node.op_type)
    } else {
        node.name.clone()
    };
    let fail = |problem: String| Fault::new(format!("node {name} ({})", node.op_type), problem);
    if !is_default(&node.domain) || !node.overload.is_empty() {
        return Err(fail(format!("domain {:?} is not supported", node.domain)));
    }
    let shape_of = |index: usize| -> &[usize] {
        let id = node.input.get(index).and_then(|name| graph.find(name));
        id.map_or(&[], |id| &graph.value(id).shape)
    };
    let reader = NodeReader { node, shape: shape_of(0), second_shape: shape_of(1), integers };
    let (op, data_inputs) = reader.read().map_err(fail)?;
    if op.since_opset() > opset {
        let since = op.since_opset();
        return Err(fail(format!("the operator exists from opset {since} on, not in {opset}")));
    }
    let mut inputs = Vec::with_capacity(data_inputs);
    for (index, input) in node.input.iter().enumerate() {
        if index >= data_inputs {
            used.insert(input);
            continue;
        }
        inputs.push(match graph.find(input) {
            Some(id) => id,
            None if integers.contains_key(input) => {
                return Err(fail(format!("input {input} is int64, which is not computed")));
            }
            None => return Err(fail(format!("input {input:?} is not made by anything before it"))),
        });
    }
    graph.add_node(name, op, &inputs, node.output.clone())?;
    Ok(())
}

/// The data files of a model, each mapped at its first use.
struct DataFiles {
    folder: PathBuf,
    open: HashMap<String, SharedBytes>,
}

impl DataFiles {
    /// An initializer's tensor.
    fn tensor(&mut self, proto: TensorProto) -> Result<Tensor, String> {
        let shape = to_shape(&proto.dims)?;
        let number = proto.data_type;
        let dtype = proto::dtype(number)
            .ok_or_else(|| format!("element type {number} is not supported"))?;
        let length = dtype
            .byte_count(&shape)
            .ok_or_else(|| format!("shape {shape:?} has more bytes than can be addressed"))?;
        if proto.segment.is_some() {
            return Err("is stored in segments, which is not supported".into());
        }
        let external = proto.data_location == proto::EXTERNAL;
        if !external && (proto.data_location != 0 || !proto.external_data.is_empty()) {
            let problem = format!("data_location is {} next to external data", proto.data_location);
            return Err(problem);
        }
        let stored = [
            external,
            proto.raw_data.is_some(),
            !proto.float_data.is_empty(),
            !proto.int64_data.is_empty(),
        ];
        if stored.iter().filter(|stored| **stored).count() > 1 {
            return Err("has its data in more than one place".into());
        }
        let bytes = if external {
            self.external(&proto, length)?
        } else if let Some(raw) = proto.raw_data {
            SharedBytes::new(Arc::new(raw))
        } else if dtype == DType::F32 {
            Tensor::from_f32(vec![proto.float_data.len()], proto.float_data)
                .map_err(|error| error.to_string())?
                .shared_bytes()
                .clone()
        } else if dtype == DType::I64 {
            Tensor::from_i64(vec![proto.int64_data.len()], proto.int64_data)
                .map_err(|error| error.to_string())?
                .shared_bytes()
                .clone()
        } else {
            let problem =
                format!("{dtype} data is read from raw_data or external data, and has neither");
            return Err(problem);
        };
        Tensor::new(dtype, shape, bytes).map_err(|error| error.to_string())
    }

    fn external(&mut self, proto: &TensorProto, expected: usize) -> Result<SharedBytes, String> {
        let (mut location, mut offset, mut length) = (None, None, None);
        for entry in &proto.external_data {
            let slot = match entry.key.as_str() {
                "location" => &mut location,
                "offset" => &mut offset,
                "length" => &mut length,
                other => return Err(format!("external data has unknown key {other:?}")),
            };
            if slot.replace(entry.value.as_str()).is_some() {
                return Err(format!("external data has key {:?} twice", entry.key));
            }
        }
        let location = location.ok_or("external data has no location")?;
        if !is_bare_name(location) {
            let problem = format!("external data is in {location:?}; a bare file name is accepted");
            return Err(problem);
        }
        let number = |what: &str, text: &str| {
            // `parse` would accept a sign.
            let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            let value = if digits { text.parse::<usize>().ok() } else { None };
            value.ok_or_else(|| format!("external data has {what} {text:?}; a number is needed"))
        };
        let offset = offset.map_or(Ok(0), |text| number("offset", text))?;
        let length = length.map(|text| number("length", text)).transpose()?;
        let file = self.map(location)?;
        let length = length.unwrap_or(file.len().saturating_sub(offset));
        if length != expected {
            let problem = format!("external data has {length} bytes, the shape needs {expected}");
            return Err(problem);
        }
        let range = offset.checked_add(length).and_then(|end| file.slice(offset..end));
        range.ok_or_else(|| {
            let size = file.len();
            format!("external data {location} has {size} bytes; {length} at {offset} are outside")
        })
    }

    fn map(&mut self, name: &str) -> Result<SharedBytes, String> {
        if let Some(bytes) = self.open.get(name) {
            return Ok(bytes.clone());
        }
        // Opening refuses what is not a regular file.
        let file = MappedFile::open(&self.folder.join(name));
        let bytes = file.map_err(|error| format!("external data: {error}"))?.bytes();
        self.open.insert(name.to_owned(), bytes.clone());
        Ok(bytes)
    }
}
