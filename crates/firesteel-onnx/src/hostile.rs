//! Models that must be refused, and random damage that must not do harm.

use crate::proto::{
    AttributeProto, DimensionProto, ModelProto, NodeProto, StringStringEntryProto, TensorProto,
    ValueInfoProto, attribute_type,
};
use crate::{ModelFile, WritePlan, model_with_outputs, read_model};
use firesteel_graph::{Constant, Graph, Op};
use firesteel_tensor::{DType, Tensor};
use proptest::prelude::*;
use prost::Message;
use prost::bytes::Bytes;
use std::path::Path;

/// A graph with an external and an inline constant, parameters, attributes and two outputs.
fn graph() -> Graph {
    let mut graph = Graph::new("g");
    let constant = |graph: &mut Graph, name: &str, shape: Vec<usize>| {
        let count = shape.iter().product();
        let tensor = Tensor::from_f32(shape.clone(), vec![0.5; count]).unwrap();
        graph.add_constant(name, DType::F32, shape, Constant::Tensor(tensor)).unwrap()
    };
    let x = graph.input("x", DType::F32, vec![1, 32]).unwrap();
    let w = constant(&mut graph, "w", vec![16, 32]);
    let b = constant(&mut graph, "b", vec![16]);
    let y = graph.add(Op::Gemm, &[x, w], "y").unwrap();
    let z = graph.add(Op::Add, &[y, b], "z").unwrap();
    let r = graph.add(Op::Reshape { shape: vec![4, 4] }, &[z], "r").unwrap();
    let t = graph.add(Op::Transpose { permutation: vec![1, 0] }, &[r], "t").unwrap();
    let s = graph.add(Op::Slice { axis: 1, start: 1, end: 4 }, &[t], "s").unwrap();
    let m = graph.add(Op::ReduceMean { axis: 1 }, &[s], "m").unwrap();
    let e = graph.add(Op::Softmax { axis: 0 }, &[m], "e").unwrap();
    let split = Op::Split { axis: 0, sizes: vec![1, 3] };
    let parts = graph.add_node("split", split, &[e], vec!["p".into(), "q".into()]).unwrap();
    graph.output(parts[0]).unwrap();
    graph.output(parts[1]).unwrap();
    graph
}

/// Writes the valid model as `m.onnx` and returns its message.
fn write(folder: &Path) -> ModelProto {
    let graph = graph();
    let model = ModelFile {
        name: "m.onnx".into(),
        data_file: "m.data".into(),
        graph: &graph,
        opset: 18,
        producer_version: "0".into(),
        metadata: vec![("key".into(), "value".into())],
    };
    let plan = WritePlan::new(vec![model], vec![]).unwrap();
    plan.write(folder, 1, &|_| {}).unwrap();
    let bytes = std::fs::read(folder.join("m.onnx")).unwrap();
    ModelProto::decode(&bytes[..]).unwrap()
}

fn node<'a>(model: &'a mut ModelProto, output: &str) -> &'a mut NodeProto {
    let nodes = &mut model.graph.as_mut().unwrap().node;
    nodes.iter_mut().find(|node| node.output[0] == output).unwrap()
}

fn initializer<'a>(model: &'a mut ModelProto, name: &str) -> &'a mut TensorProto {
    let tensors = &mut model.graph.as_mut().unwrap().initializer;
    tensors.iter_mut().find(|tensor| tensor.name == name).unwrap()
}

fn set_external(model: &mut ModelProto, key: &str, value: &str) {
    let entries = &mut initializer(model, "w").external_data;
    entries.retain(|entry| entry.key != key);
    entries.push(StringStringEntryProto { key: key.into(), value: value.into() });
}

fn int(name: &str, value: i64) -> AttributeProto {
    AttributeProto {
        name: name.into(),
        r#type: attribute_type::INT,
        i: Some(value),
        ..Default::default()
    }
}

fn float(name: &str, value: f32) -> AttributeProto {
    AttributeProto {
        name: name.into(),
        r#type: attribute_type::FLOAT,
        f: Some(value),
        ..Default::default()
    }
}

fn add_int64(model: &mut ModelProto, name: &str, values: &[i64]) {
    model.graph.as_mut().unwrap().initializer.push(TensorProto {
        name: name.into(),
        dims: vec![values.len() as i64],
        data_type: 7,
        int64_data: values.to_vec(),
        ..Default::default()
    });
}

/// Lets the node that makes `output` read a new parameter. Errors about the node come before the
/// one about the old parameter, which may now be without a reader.
fn set_parameter(model: &mut ModelProto, output: &str, index: usize, values: &[i64]) {
    add_int64(model, "parameter", values);
    node(model, output).input[index] = "parameter".into();
}

fn shape_of(info: &mut ValueInfoProto) -> &mut Vec<DimensionProto> {
    let tensor = info.r#type.as_mut().unwrap().tensor_type.as_mut().unwrap();
    &mut tensor.shape.as_mut().unwrap().dim
}

type Change = fn(&mut ModelProto);

/// A name for the case, the change, and a part of the expected message.
const REFUSED: &[(&str, Change, &str)] = &[
    (
        "parent folder",
        |m| set_external(m, "location", "../m.data"),
        "w: external data is in \"../m",
    ),
    ("absolute path", |m| set_external(m, "location", "/etc/passwd"), "a bare file name"),
    ("subfolder", |m| set_external(m, "location", "a/m.data"), "a bare file name"),
    ("backslash", |m| set_external(m, "location", "a\\m.data"), "a bare file name"),
    ("drive", |m| set_external(m, "location", "c:m.data"), "a bare file name"),
    ("empty location", |m| set_external(m, "location", ""), "a bare file name"),
    ("folder as file", |m| set_external(m, "location", ".."), "a bare file name"),
    ("missing file", |m| set_external(m, "location", "none"), "initializer w: external data:"),
    ("model as data", |m| set_external(m, "location", "m.onnx"), "are outside"),
    ("offset outside", |m| set_external(m, "offset", "1"), "2048 at 1 are outside"),
    ("offset overflow", |m| set_external(m, "offset", "18446744073709551615"), "are outside"),
    ("offset beyond u64", |m| set_external(m, "offset", "99999999999999999999"), "a number"),
    ("negative offset", |m| set_external(m, "offset", "-1"), "a number is needed"),
    ("signed offset", |m| set_external(m, "offset", "+0"), "a number is needed"),
    ("short length", |m| set_external(m, "length", "2044"), "has 2044 bytes, the shape needs 2048"),
    ("unknown key", |m| set_external(m, "checksum", "0"), "unknown key \"checksum\""),
    (
        "key twice",
        |m| {
            let entries = &mut initializer(m, "w").external_data;
            entries.push(entries[0].clone());
        },
        "\"location\" twice",
    ),
    ("no location", |m| initializer(m, "w").external_data.clear(), "no location"),
    ("external but not said", |m| initializer(m, "w").data_location = 0, "data_location is 0"),
    ("unknown place", |m| initializer(m, "w").data_location = 2, "data_location is 2"),
    ("two places", |m| initializer(m, "w").raw_data = Some(Bytes::new()), "more than one place"),
    (
        "raw data of another length",
        |m| {
            initializer(m, "b").raw_data = Some(Bytes::from_static(&[0; 60]));
        },
        "initializer b: shape [16] of f32 needs 64 bytes, got 60",
    ),
    ("huge shape", |m| initializer(m, "w").dims = vec![i64::MAX, 4], "more bytes"),
    ("negative dimension", |m| initializer(m, "w").dims[0] = -16, "has dimension -16"),
    ("rank", |m| initializer(m, "w").dims = vec![1; 9], "has rank 9"),
    ("string tensor", |m| initializer(m, "b").data_type = 8, "element type 8"),
    ("unsigned 4-bit tensor", |m| initializer(m, "b").data_type = 21, "element type 21"),
    (
        "4-bit tensor of another length",
        |m| initializer(m, "b").data_type = 22,
        "initializer b: shape [16] of i4 needs 8 bytes, got 64",
    ),
    (
        "f16 in int32_data",
        |m| {
            let b = initializer(m, "b");
            (b.data_type, b.raw_data) = (10, None);
        },
        "f16 data is read from raw_data",
    ),
    ("segment", |m| initializer(m, "b").segment = Some(Bytes::new()), "stored in segments"),
    (
        "initializer twice",
        |m| {
            let b = initializer(m, "b").clone();
            m.graph.as_mut().unwrap().initializer.push(b);
        },
        "value b: the name is empty or taken",
    ),
    ("initializer named as an input", |m| initializer(m, "b").name = "x".into(), "value x"),
    (
        "parameter twice",
        |m| {
            add_int64(m, "spare", &[1]);
            add_int64(m, "spare", &[1]);
        },
        "initializer spare: the name is empty or taken",
    ),
    ("parameter without reader", |m| add_int64(m, "spare", &[1]), "spare: is never used"),
    (
        "parameter named as a value",
        |m| {
            initializer(m, "int64_4_4").name = "q".into();
            node(m, "r").input[1] = "q".into();
        },
        "initializer q: a value has the same name",
    ),
    ("int64 as data", |m| node(m, "z").input[1] = "int64_4_4".into(), "int64_4_4 is int64"),
    ("constant without reader", |m| node(m, "z").input[1] = "y".into(), "value b: is never used"),
    ("unknown operator", |m| node(m, "z").op_type = "Mod".into(), "node z/Add (Mod): the operator"),
    ("operator of a newer opset", |m| node(m, "e").op_type = "Gelu".into(), "attribute axis"),
    (
        "newer operator",
        |m| {
            node(m, "e").op_type = "Gelu".into();
            node(m, "e").attribute.clear();
        },
        "exists from opset 20",
    ),
    ("other domain", |m| node(m, "z").domain = "com.microsoft".into(), "\"com.microsoft\""),
    ("overload", |m| node(m, "z").overload = "o".into(), "node z/Add"),
    ("unknown attribute", |m| node(m, "z").attribute.push(int("axis", 0)), "attribute axis is not"),
    ("attribute twice", |m| node(m, "e").attribute.push(int("axis", 0)), "axis twice"),
    ("attribute of another type", |m| node(m, "e").attribute[0].r#type = 5, "type 5 instead of 2"),
    (
        "reference to an attribute",
        |m| {
            node(m, "e").attribute[0].ref_attr_name = "a".into();
        },
        "of a function",
    ),
    ("allowzero", |m| node(m, "r").attribute.push(int("allowzero", 1)), "allowzero is 1"),
    ("derived dimension", |m| set_parameter(m, "r", 1, &[-1, 4]), "shape [-1, 4] must be static"),
    ("copied dimension", |m| set_parameter(m, "r", 1, &[0, 4]), "must be static"),
    ("rank of a reshape", |m| set_parameter(m, "r", 1, &[1; 9]), "9 elements; at most 8"),
    ("computed shape", |m| node(m, "r").input[1] = "y".into(), "y: is no int64 initializer"),
    ("missing shape", |m| node(m, "r").input.truncate(1), "has 1 inputs"),
    ("shape as matrix", |m| initializer(m, "int64_4_4").dims = vec![1, 2], "rank 1 is read"),
    ("transposed a", |m| node(m, "y").attribute.push(int("transA", 1)), "transA is 1"),
    ("not transposed b", |m| node(m, "y").attribute.clear(), "transB is 0; only 1"),
    ("alpha", |m| node(m, "y").attribute.push(float("alpha", 2.0)), "alpha is 2"),
    ("beta", |m| node(m, "y").attribute.push(float("beta", f32::NAN)), "beta is NaN"),
    ("bias", |m| node(m, "y").input.push("b".into()), "node y/Gemm (Gemm): has 3 inputs"),
    (
        "steps",
        |m| {
            add_int64(m, "steps", &[-1]);
            node(m, "s").input.push("steps".into());
        },
        "steps is not 1",
    ),
    ("two sliced axes", |m| set_parameter(m, "s", 1, &[1, 1]), "2 elements; at most 1"),
    ("no sliced axis", |m| set_parameter(m, "s", 1, &[]), "starts is empty"),
    ("empty slice", |m| set_parameter(m, "s", 1, &[i64::MAX]), "slice 4..4"),
    ("keepdims", |m| node(m, "m").attribute.push(int("keepdims", 0)), "keepdims is 0"),
    ("reduction of all axes", |m| node(m, "m").input.truncate(1), "has 1 inputs"),
    ("axis", |m| set_parameter(m, "m", 1, &[i64::MIN]), "axis -9223372036854775808 of a rank-2"),
    ("permutation", |m| node(m, "t").attribute[0].ints = vec![0, 0], "no order of 2 axes"),
    ("short permutation", |m| node(m, "t").attribute[0].ints = vec![0], "perm has 1 axes"),
    ("split sum", |m| set_parameter(m, "p", 1, &[1, 4]), "sizes [1, 4] of an axis of 4"),
    ("split count", |m| set_parameter(m, "p", 1, &[1, 1, 2]), "3 elements; at most 2"),
    ("num_outputs", |m| node(m, "p").attribute.push(int("num_outputs", 2)), "num_outputs"),
    ("missing value", |m| node(m, "z").input[0] = "none".into(), "input \"none\" is not made"),
    ("left out input", |m| node(m, "z").input[0].clear(), "input \"\" is not made"),
    ("no inputs", |m| node(m, "e").input.clear(), "of a rank-0 tensor"),
    ("no outputs", |m| node(m, "z").output.clear(), "node z/Add (Add): 1 outputs, 0 names"),
    ("node twice", |m| node(m, "z").name = "y/Gemm".into(), "empty or taken"),
    ("value twice", |m| node(m, "z").output[0] = "x".into(), "value x"),
    ("wrong order", |m| m.graph.as_mut().unwrap().node.swap(0, 1), "input \"y\" is not made"),
    (
        "dynamic dimension",
        |m| {
            let dim = &mut shape_of(&mut m.graph.as_mut().unwrap().input[0])[0];
            *dim = DimensionProto { dim_value: None, dim_param: Some("batch".into()) };
        },
        "value x: dimension \"batch\" is dynamic",
    ),
    (
        "unknown dimension",
        |m| {
            shape_of(&mut m.graph.as_mut().unwrap().input[0])[0].dim_value = None;
        },
        "is dynamic",
    ),
    ("no type", |m| m.graph.as_mut().unwrap().input[0].r#type = None, "x: has no tensor type"),
    (
        "no shape",
        |m| {
            let input = &mut m.graph.as_mut().unwrap().input[0];
            let tensor = input.r#type.as_mut().unwrap().tensor_type.as_mut().unwrap();
            tensor.shape = None;
        },
        "value x: has no shape",
    ),
    (
        "other output shape",
        |m| {
            shape_of(&mut m.graph.as_mut().unwrap().output[0])[0].dim_value = Some(2);
        },
        "value p: is declared f32 [2, 1], but is f32 [1, 1]",
    ),
    (
        "other value shape",
        |m| {
            shape_of(&mut m.graph.as_mut().unwrap().value_info[0])[0].dim_value = Some(2);
        },
        "value y: is declared",
    ),
    (
        "value without producer",
        |m| {
            m.graph.as_mut().unwrap().value_info[0].name = "none".into();
        },
        "value none: nothing makes it",
    ),
    (
        "value declared twice",
        |m| {
            let infos = &mut m.graph.as_mut().unwrap().value_info;
            infos.push(infos[0].clone());
        },
        "value y: is declared twice",
    ),
    (
        "output twice",
        |m| {
            let outputs = &mut m.graph.as_mut().unwrap().output;
            outputs.push(outputs[0].clone());
        },
        "value p: is an output already",
    ),
    ("no outputs at all", |m| m.graph.as_mut().unwrap().output.clear(), "is never used"),
    ("no graph", |m| m.graph = None, "has no graph"),
    ("functions", |m| m.functions.push(Bytes::new()), "functions: is not supported"),
    ("training", |m| m.training_info.push(Bytes::new()), "training_info"),
    (
        "sparse",
        |m| {
            m.graph.as_mut().unwrap().sparse_initializer.push(Bytes::new());
        },
        "sparse_initializer",
    ),
    (
        "quantization annotation",
        |m| {
            m.graph.as_mut().unwrap().quantization_annotation.push(Bytes::new());
        },
        "quantization_annotation",
    ),
    (
        "metadata twice",
        |m| {
            m.metadata_props.push(m.metadata_props[0].clone());
        },
        "has key key twice",
    ),
    ("old opset", |m| m.opset_import[0].version = 17, "opset: 17; 18 to 23"),
    ("no opset", |m| m.opset_import.clear(), "opset_import"),
    (
        "second domain",
        |m| {
            let mut other = m.opset_import[0].clone();
            other.domain = "com.microsoft".into();
            m.opset_import.push(other);
        },
        "\"com.microsoft\" 18",
    ),
    ("unknown version", |m| m.ir_version = 99, "ir_version: 99"),
];

/// Other spellings of the same graph.
const ACCEPTED: &[(&str, Change)] = &[
    ("named default domain", |m| {
        m.opset_import[0].domain = "ai.onnx".into();
        node(m, "z").domain = "ai.onnx".into();
    }),
    ("nodes without names", |m| node(m, "z").name.clear()),
    ("no value types", |m| m.graph.as_mut().unwrap().value_info.clear()),
    ("explicit defaults", |m| {
        node(m, "y").attribute.extend([int("transA", 0), float("alpha", 1.0), float("beta", 1.0)]);
        node(m, "r").attribute.push(int("allowzero", 0));
        node(m, "m").attribute.extend([int("keepdims", 1), int("noop_with_empty_axes", 0)]);
        add_int64(m, "steps", &[1]);
        node(m, "s").input.push("steps".into());
    }),
    ("negative axes", |m| {
        node(m, "e").attribute[0].i = Some(-2);
        node(m, "t").attribute[0].ints = vec![-1, -2];
        node(m, "p").attribute[0].i = Some(-2);
        set_parameter(m, "m", 1, &[-1]);
    }),
    ("default permutation", |m| node(m, "t").attribute.clear()),
    ("slice from the end to beyond the end", |m| {
        add_int64(m, "start", &[-3]);
        add_int64(m, "end", &[i64::MAX]);
        node(m, "s").input[1] = "start".into();
        node(m, "s").input[2] = "end".into();
    }),
    ("data as a list of floats", |m| {
        let b = initializer(m, "b");
        (b.raw_data, b.float_data) = (None, vec![0.5; 16]);
    }),
    ("range to the end of the file", |m| {
        initializer(m, "w").external_data.truncate(1);
    }),
];

/// Drops int64 initializers that a change left without a reader.
fn drop_unused(model: &mut ModelProto) {
    if let Some(graph) = &mut model.graph {
        let nodes = &graph.node;
        let read = |name: &String| nodes.iter().any(|node| node.input.contains(name));
        graph.initializer.retain(|tensor| tensor.data_type != 7 || read(&tensor.name));
    }
}

fn describe(graph: &Graph) -> Vec<String> {
    let constants = graph.constants().map(|(id, constant)| {
        let Constant::Tensor(tensor) = constant else { panic!("a read constant is a tensor") };
        format!("{:?} {:?}", graph.value(id), tensor.bytes())
    });
    let names = |ids: &[firesteel_graph::ValueId]| -> Vec<String> {
        ids.iter().map(|id| format!("{:?}", graph.value(*id))).collect()
    };
    let nodes = graph.nodes().iter().map(|node| {
        format!("{} {:?} {:?} {:?}", node.name, node.op, names(&node.inputs), names(&node.outputs))
    });
    let ends = [graph.inputs(), graph.outputs()].into_iter().flat_map(names);
    constants.chain(nodes).chain(ends).collect()
}

#[test]
fn what_the_graph_cannot_express_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("changed.onnx");
    let valid = write(folder.path());
    let mut failures = Vec::new();
    for (case, change, expected) in REFUSED {
        let mut model = valid.clone();
        change(&mut model);
        std::fs::write(&path, model.encode_to_vec()).unwrap();
        match read_model(&path) {
            Ok(_) => failures.push(format!("{case}: read")),
            Err(error) => {
                let text = error.to_string();
                if !text.contains(expected) || !text.contains("changed.onnx") {
                    failures.push(format!("{case}: {text}"));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn other_spellings_of_the_same_graph_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("changed.onnx");
    let valid = write(folder.path());
    let expected = describe(&graph());
    for (case, change) in ACCEPTED {
        let mut model = valid.clone();
        change(&mut model);
        drop_unused(&mut model);
        std::fs::write(&path, model.encode_to_vec()).unwrap();
        let read = read_model(&path).unwrap_or_else(|error| panic!("{case}: {error}"));
        assert_eq!(describe(&read.graph), expected, "{case}");
    }
}

#[test]
fn files_that_are_no_models_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let error = |name: &str| read_model(&folder.path().join(name)).unwrap_err().to_string();
    assert!(error("absent").contains("absent"));
    assert!(error("").contains("is not a regular file"));
    std::fs::write(folder.path().join("empty"), "").unwrap();
    assert!(error("empty").contains("ir_version: 0"));
    std::fs::write(folder.path().join("text"), "not a model").unwrap();
    assert!(error("text").contains("not an ONNX protobuf"));
    let huge = std::fs::File::create(folder.path().join("huge")).unwrap();
    huge.set_len(crate::MAX_MODEL_BYTES + 1).unwrap();
    assert!(error("huge").contains("1073741825 bytes of protobuf"));
}

#[test]
fn a_model_cut_anywhere_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = write(folder.path()).encode_to_vec();
    let path = folder.path().join("cut.onnx");
    for length in 0..bytes.len() {
        std::fs::write(&path, &bytes[..length]).unwrap();
        // Only the pairs and the opset come after the graph; without the latter nothing is read.
        let read = read_model(&path);
        let metadata_only = read.as_ref().is_ok_and(|model| model.metadata.is_empty());
        assert!(read.is_err() || metadata_only, "{length}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, ..ProptestConfig::default() })]
    #[test]
    fn damage_never_panics(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        cut in prop::option::weighted(0.2, any::<prop::sample::Index>()),
    ) {
        thread_local! {
            static MODEL: (tempfile::TempDir, Vec<u8>) = {
                let folder = tempfile::tempdir().unwrap();
                let bytes = write(folder.path()).encode_to_vec();
                (folder, bytes)
            };
        }
        MODEL.with(|(folder, bytes)| {
            let mut bytes = bytes.clone();
            for (index, value) in changes {
                let index = index.index(bytes.len());
                bytes[index] = value;
            }
            if let Some(cut) = cut {
                bytes.truncate(cut.index(bytes.len()));
            }
            let path = folder.path().join("damaged.onnx");
            std::fs::write(&path, bytes).unwrap();
            if let Ok(model) = read_model(&path) {
                model.graph.validate().unwrap();
            }
            let _ = model_with_outputs(&path, &["y", "z"]);
        });
    }
}
