//! Graphs and comparisons that several tests share.

use firesteel_graph::{Constant, ConstantSource, Graph, ValueId};
use firesteel_onnx::{ModelFile, RawFile, WritePlan, WriteReport};
use firesteel_tensor::{DType, Tensor};
use std::path::Path;
use std::sync::Arc;

/// A source of f32 elements `start`, `start + 1`, … that fails from an element on.
pub(crate) struct Counting {
    pub(crate) start: usize,
    pub(crate) key: Option<&'static str>,
    pub(crate) fails_from: usize,
}

impl ConstantSource for Counting {
    fn write(&self, first_element: usize, out: &mut [u8]) -> Result<(), String> {
        for (index, bytes) in out.chunks_exact_mut(4).enumerate() {
            let element = first_element + index;
            if element >= self.fails_from {
                return Err(format!("element {element} is lost"));
            }
            bytes.copy_from_slice(&((self.start + element) as f32).to_le_bytes());
        }
        Ok(())
    }

    fn key(&self) -> Option<String> {
        self.key.map(str::to_owned)
    }
}

pub(crate) fn counting(start: usize, key: Option<&'static str>) -> Constant {
    Constant::Source(Arc::new(Counting { start, key, fails_from: usize::MAX }))
}

/// Small values of either float type, different from each other.
pub(crate) fn tensor(dtype: DType, shape: &[usize]) -> Constant {
    let count: usize = shape.iter().product();
    let data = (0..count).map(|i| (i % 97) as f32 / 16.0 - 2.0).collect();
    Constant::Tensor(Tensor::from_f32_as(dtype, shape.to_vec(), data).unwrap())
}

pub(crate) fn bytes(graph: &Graph, id: ValueId) -> Vec<u8> {
    let value = graph.value(id);
    match graph.constant(id).unwrap() {
        Constant::Tensor(tensor) => tensor.bytes().to_vec(),
        Constant::Source(source) => {
            let mut bytes = vec![0; value.dtype.byte_count(&value.shape).unwrap()];
            source.write(0, &mut bytes).unwrap();
            bytes
        }
    }
}

/// Everything that makes a graph, by name, in order.
pub(crate) fn describe(graph: &Graph) -> Vec<String> {
    let names = |ids: &[ValueId]| -> Vec<String> {
        ids.iter().map(|id| format!("{:?}", graph.value(*id))).collect()
    };
    let mut lines = vec![graph.name().to_owned()];
    lines.push(format!("inputs {:?}", names(graph.inputs())));
    for (id, _) in graph.constants() {
        lines.push(format!("constant {:?} {:?}", graph.value(id), bytes(graph, id)));
    }
    for node in graph.nodes() {
        let (inputs, outputs) = (names(&node.inputs), names(&node.outputs));
        lines.push(format!("node {} {:?} {inputs:?} {outputs:?}", node.name, node.op));
    }
    lines.push(format!("outputs {:?}", names(graph.outputs())));
    lines
}

pub(crate) fn model<'a>(name: &str, graph: &'a Graph, opset: i64) -> ModelFile<'a> {
    ModelFile {
        name: name.into(),
        data_file: format!("{name}.data"),
        graph,
        opset,
        producer_version: "1.2.3".into(),
        metadata: vec![("b".into(), "1".into()), ("a".into(), "2".into())],
    }
}

pub(crate) fn write(folder: &Path, models: Vec<ModelFile<'_>>, raw: Vec<RawFile>) -> WriteReport {
    WritePlan::new(models, raw).unwrap().write(folder, 2, &|_| {}).unwrap()
}
