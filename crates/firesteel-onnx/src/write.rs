//! A graph as a model message.

use crate::error::Fault;
use crate::op::spell;
use crate::plan::Location;
use crate::proto::{
    self, DimensionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto,
    StringStringEntryProto, TensorProto, TensorShapeProto, TensorTypeProto, TypeProto,
    ValueInfoProto,
};
use crate::{MAX_OPSET, MIN_OPSET, ModelFile};
use firesteel_graph::{Constant, Graph, Value, ValueId};
use firesteel_tensor::DType;
use prost::bytes::Bytes;
use std::collections::HashMap;

/// Builds the message of a model. `locate` tells where a constant's data is, as (file, place), or
/// `None` for data inside the message.
pub(crate) fn model_proto<'p>(
    model: &ModelFile<'_>,
    locate: impl Fn(ValueId) -> Option<(&'p str, Location)>,
) -> Result<ModelProto, Fault> {
    let graph = model.graph;
    let ir_version = ir_version(model.opset)?;
    let entry = |(key, value): &(String, String)| StringStringEntryProto {
        key: key.clone(),
        value: value.clone(),
    };
    let mut parameters = Parameters::new(graph);
    let mut proto = GraphProto { name: graph.name().into(), ..Default::default() };
    for node in graph.nodes() {
        let name = |id: &ValueId| graph.value(*id).name.clone();
        let subject = || format!("node {} ({})", node.name, node.op.name());
        let since = node.op.since_opset();
        if since > model.opset {
            let problem = format!(
                "the operator exists from opset {since} on, the model is written for opset {}",
                model.opset
            );
            return Err(Fault::new(subject(), problem));
        }
        let spelling = spell(&node.op).map_err(|problem| Fault::new(subject(), problem))?;
        let mut input: Vec<String> = node.inputs.iter().map(name).collect();
        input.extend(spelling.parameters.into_iter().map(|values| parameters.name(values)));
        proto.node.push(NodeProto {
            input,
            output: node.outputs.iter().map(name).collect(),
            name: node.name.clone(),
            op_type: node.op.name().into(),
            attribute: spelling.attributes,
            ..Default::default()
        });
    }
    for (id, constant) in graph.constants() {
        let value = graph.value(id);
        proto.initializer.push(initializer(value, constant, locate(id))?);
    }
    proto.initializer.extend(parameters.tensors);
    let infos = |ids: &[ValueId]| -> Result<Vec<ValueInfoProto>, Fault> {
        ids.iter().map(|id| value_info(graph.value(*id))).collect()
    };
    proto.input = infos(graph.inputs())?;
    proto.output = infos(graph.outputs())?;
    let made = graph.nodes().iter().flat_map(|node| &node.outputs);
    let between: Vec<ValueId> = made.filter(|id| !graph.outputs().contains(id)).copied().collect();
    proto.value_info = infos(&between)?;
    Ok(ModelProto {
        ir_version,
        producer_name: "firesteel".into(),
        producer_version: model.producer_version.clone(),
        graph: Some(proto),
        opset_import: vec![OperatorSetIdProto { domain: String::new(), version: model.opset }],
        metadata_props: model.metadata.iter().map(entry).collect(),
        ..Default::default()
    })
}

/// The oldest version of the format that goes with an opset.
fn ir_version(opset: i64) -> Result<i64, Fault> {
    match opset {
        18 => Ok(8),
        19 | 20 => Ok(9),
        21 | 22 => Ok(10),
        23 => Ok(11),
        _ => {
            let problem = format!("{opset}; {MIN_OPSET} to {MAX_OPSET} are written");
            Err(Fault::new("opset", problem))
        }
    }
}

/// All bytes of a small constant.
fn constant_bytes(value: &Value, constant: &Constant) -> Result<Vec<u8>, String> {
    match constant {
        Constant::Tensor(tensor) => Ok(tensor.bytes().to_vec()),
        Constant::Source(source) => {
            let length = value.dtype.byte_count(&value.shape).ok_or("the shape is too large")?;
            let mut bytes = vec![0; length];
            source.write(0, &mut bytes)?;
            Ok(bytes)
        }
    }
}

fn initializer(
    value: &Value,
    constant: &Constant,
    place: Option<(&str, Location)>,
) -> Result<TensorProto, Fault> {
    let fail = |problem: String| Fault::new(format!("constant {}", value.name), problem);
    let mut tensor = TensorProto {
        dims: dims(&value.shape).map_err(fail)?,
        data_type: data_type(value.dtype).map_err(fail)?,
        name: value.name.clone(),
        ..Default::default()
    };
    match place {
        None => {
            let bytes = constant_bytes(value, constant).map_err(fail)?;
            tensor.raw_data = Some(Bytes::from(bytes));
        }
        Some((file, location)) => {
            let entries = [
                ("location", file.to_owned()),
                ("offset", location.offset.to_string()),
                ("length", location.length.to_string()),
            ];
            let entry =
                |(key, value): (&str, String)| StringStringEntryProto { key: key.into(), value };
            tensor.external_data = entries.map(entry).into();
            tensor.data_location = proto::EXTERNAL;
        }
    }
    Ok(tensor)
}

fn value_info(value: &Value) -> Result<ValueInfoProto, Fault> {
    let fail = |problem: String| Fault::new(format!("value {}", value.name), problem);
    let dim = dims(&value.shape).map_err(fail)?;
    let dim = dim.into_iter().map(|dim| DimensionProto { dim_value: Some(dim), dim_param: None });
    let tensor_type = TensorTypeProto {
        elem_type: data_type(value.dtype).map_err(fail)?,
        shape: Some(TensorShapeProto { dim: dim.collect() }),
    };
    Ok(ValueInfoProto {
        name: value.name.clone(),
        r#type: Some(TypeProto { tensor_type: Some(tensor_type) }),
    })
}

fn dims(shape: &[usize]) -> Result<Vec<i64>, String> {
    let convert = |&dim| i64::try_from(dim).map_err(|_| format!("dimension {dim} is too large"));
    shape.iter().map(convert).collect()
}

fn data_type(dtype: DType) -> Result<i32, String> {
    proto::data_type(dtype).ok_or_else(|| format!("no ONNX type for {dtype}"))
}

/// The int64 initializers of a model, each content once, in the order of their first use.
struct Parameters<'a> {
    graph: &'a Graph,
    names: HashMap<Vec<i64>, String>,
    tensors: Vec<TensorProto>,
}

impl<'a> Parameters<'a> {
    fn new(graph: &'a Graph) -> Self {
        Self { graph, names: HashMap::new(), tensors: Vec::new() }
    }

    /// Name of the initializer with these values: `int64_1_2` for [1, 2], with as many
    /// underscores at the end as it takes to differ from the values of the graph.
    fn name(&mut self, values: Vec<i64>) -> String {
        if let Some(name) = self.names.get(&values) {
            return name.clone();
        }
        let mut name = "int64".to_owned();
        for value in &values {
            name.push_str(&format!("_{value}"));
        }
        while self.graph.find(&name).is_some() {
            name.push('_');
        }
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.tensors.push(TensorProto {
            // A vector in memory is never longer than i64::MAX.
            dims: vec![values.len() as i64],
            data_type: proto::INT64,
            name: name.clone(),
            raw_data: Some(Bytes::from(bytes)),
            ..Default::default()
        });
        self.names.insert(values, name.clone());
        name
    }
}
