//! Values inside a model as outputs.

use crate::error::{Fault, OnnxError};
use crate::proto::{GraphProto, ModelProto, ValueInfoProto};
use crate::read::{decode, read_bytes};
use prost::Message;
use std::collections::{HashMap, HashSet};
use std::path::Path;

/// The bytes of the model at `path` with `values`, results of its nodes, as further outputs in
/// that order. Values that are outputs already stay where they are. Nothing else changes, so that
/// external data is found from the same folder.
///
/// # Errors
/// When the file cannot be read or decoded, or it declares no type for one of the values.
pub fn model_with_outputs(path: &Path, values: &[&str]) -> Result<Vec<u8>, OnnxError> {
    let bytes = read_bytes(path)?;
    let proto = decode(bytes.clone()).map_err(|fault| fault.in_file(path))?;
    let graph = proto.graph.unwrap_or_default();
    let known: HashMap<&str, &ValueInfoProto> =
        graph.value_info.iter().map(|info| (info.name.as_str(), info)).collect();
    let mut outputs: HashSet<&str> = graph.output.iter().map(|info| info.name.as_str()).collect();
    let mut more = GraphProto::default();
    for value in values {
        if !outputs.insert(value) {
            continue;
        }
        let info = known.get(value).ok_or_else(|| {
            let problem = "is no intermediate value with a declared type";
            Fault::new(format!("value {value}"), problem).in_file(path)
        })?;
        more.output.push((*info).clone());
    }
    // Concatenated messages merge: the lists of the second graph are appended to the first.
    let more = ModelProto { graph: Some(more), ..Default::default() };
    let mut bytes = Vec::from(bytes);
    bytes.extend(more.encode_to_vec());
    Ok(bytes)
}
