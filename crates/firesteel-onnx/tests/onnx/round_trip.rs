//! Every operator is written and read back as it was.
//!
//! The models stay in the target directory, in `tmp/onnx-every-op`, so that other ONNX tools can
//! be pointed at them.

use crate::common::{describe, model, tensor, write};
use firesteel_graph::{Constant, Evaluator, GeluForm, Graph, Op};
use firesteel_onnx::read_model;
use firesteel_tensor::{DType, Tensor};
use std::path::Path;

struct Case {
    name: &'static str,
    op: Op,
    /// Shapes of the inputs.
    inputs: &'static [&'static [usize]],
    /// Shape of a constant as the last input.
    constant: Option<&'static [usize]>,
    outputs: usize,
}

fn case(name: &'static str, op: Op, inputs: &'static [&'static [usize]]) -> Case {
    Case { name, op, inputs, constant: None, outputs: 1 }
}

fn cases() -> Vec<Case> {
    let x: &'static [&'static [usize]] = &[&[1, 4, 6]];
    let pair: &'static [&'static [usize]] = &[&[2, 1, 6], &[4, 1]];
    let weight = |case: Case, shape| Case { constant: Some(shape), ..case };
    vec![
        case("add", Op::Add, pair),
        case("sub", Op::Sub, pair),
        case("mul", Op::Mul, pair),
        case("div", Op::Div, pair),
        case("max", Op::Max, pair),
        weight(case("add_scalar", Op::Add, x), &[]),
        case("neg", Op::Neg, x),
        case("abs", Op::Abs, x),
        case("sqrt", Op::Sqrt, x),
        case("erf", Op::Erf, x),
        case("tanh", Op::Tanh, x),
        case("sigmoid", Op::Sigmoid, x),
        case("gelu_exact", Op::Gelu(GeluForm::Exact), x),
        case("gelu_tanh", Op::Gelu(GeluForm::Tanh), x),
        case("softmax", Op::Softmax { axis: 1 }, x),
        case("reduce_mean", Op::ReduceMean { axis: 2 }, x),
        case("reduce_max", Op::ReduceMax { axis: 0 }, x),
        weight(case("rms_norm", Op::RmsNormalization { axis: 2, epsilon: 1e-6 }, x), &[6]),
        case("matmul", Op::MatMul, &[&[2, 3, 4, 5], &[1, 5, 2]]),
        weight(case("matmul_weight", Op::MatMul, &[&[1, 2, 32]]), &[32, 48]),
        weight(case("gemm", Op::Gemm, &[&[2, 32]]), &[48, 32]),
        case("reshape", Op::Reshape { shape: vec![2, 2, 3, 2] }, x),
        case("reshape_to_scalar", Op::Reshape { shape: vec![] }, &[&[1, 1]]),
        case("transpose", Op::Transpose { permutation: vec![2, 0, 1] }, x),
        case("slice", Op::Slice { axis: 2, start: 1, end: 5 }, x),
        Case { outputs: 3, ..case("split", Op::Split { axis: 2, sizes: vec![1, 2, 3] }, x) },
        case("concat", Op::Concat { axis: 1 }, &[&[1, 2, 3], &[1, 1, 3], &[1, 5, 3]]),
        case("cast_f16", Op::Cast { to: DType::F16 }, x),
        case("cast_f32", Op::Cast { to: DType::F32 }, x),
    ]
}

fn graph(case: &Case, dtype: DType) -> Graph {
    let mut graph = Graph::new(case.name);
    let mut inputs = Vec::new();
    for (index, shape) in case.inputs.iter().enumerate() {
        inputs.push(graph.input(format!("x{index}"), dtype, shape.to_vec()).unwrap());
    }
    if let Some(shape) = case.constant {
        let data = tensor(dtype, shape);
        inputs.push(graph.add_constant("weight", dtype, shape.to_vec(), data).unwrap());
    }
    let names = (0..case.outputs).map(|index| format!("y{index}")).collect();
    let made = graph.add_node("the/node", case.op.clone(), &inputs, names).unwrap();
    for id in made {
        // A node behind it makes the output an intermediate value.
        let name = format!("out/{}", graph.value(id).name);
        let last = graph.add(Op::Neg, &[id], name).unwrap();
        graph.output(last).unwrap();
    }
    graph
}

#[test]
fn every_operator_survives_in_both_opsets_and_types() {
    let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join("onnx-every-op");
    let _ = std::fs::remove_dir_all(&root);
    for opset in [18, 23] {
        for dtype in [DType::F32, DType::F16] {
            let folder = root.join(format!("opset{opset}-{dtype}"));
            std::fs::create_dir_all(&folder).unwrap();
            for case in cases().iter().filter(|case| case.op.since_opset() <= opset) {
                let graph = graph(case, dtype);
                let name = format!("{}.onnx", case.name);
                write(&folder, vec![model(&name, &graph, opset)], vec![]);
                let read = read_model(&folder.join(&name)).unwrap();
                assert_eq!(describe(&read.graph), describe(&graph), "{name} {opset} {dtype}");
                assert_eq!(read.opset, opset);
                assert_eq!(read.ir_version, if opset == 18 { 8 } else { 11 });
                assert_eq!(read.producer_name, "firesteel");
                assert_eq!(read.producer_version, "1.2.3");
                let pairs: Vec<_> = read.metadata.iter().map(|(k, v)| [&k[..], &v[..]]).collect();
                assert_eq!(pairs, [["b", "1"], ["a", "2"]]);
            }
        }
    }
}

#[test]
fn an_operator_newer_than_the_opset_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let newer = ["gelu_exact", "rms_norm"];
    for case in cases().iter().filter(|case| newer.contains(&case.name)) {
        let graph = graph(case, DType::F32);
        let model = model("m.onnx", &graph, 18);
        let plan = firesteel_onnx::WritePlan::new(vec![model], vec![]).unwrap();
        let error = plan.write(folder.path(), 1, &|_| {}).unwrap_err().to_string();
        assert!(error.contains("node the/node"), "{error}");
        assert!(error.contains("written for opset 18"), "{error}");
    }
}

#[test]
fn parameters_are_shared_and_never_take_a_name_of_the_graph() {
    let mut graph = Graph::new("g");
    let x = graph.input("int64_2_3", DType::F32, vec![6]).unwrap();
    let a = graph.add(Op::Reshape { shape: vec![2, 3] }, &[x], "a").unwrap();
    let b = graph.add(Op::Transpose { permutation: vec![1, 0] }, &[a], "b").unwrap();
    let c = graph.add(Op::Reshape { shape: vec![2, 3] }, &[b], "c").unwrap();
    let d = graph.add(Op::Slice { axis: 1, start: 0, end: 1 }, &[c], "d").unwrap();
    graph.output(d).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let report = write(folder.path(), vec![model("m.onnx", &graph, 18)], vec![]);
    // [2, 3], [0] and [1], the last one both as end and as axis.
    assert_eq!(report.models[0].initializers, 3);
    assert_eq!(report.data, []);
    let read = read_model(&folder.path().join("m.onnx")).unwrap();
    assert_eq!(describe(&read.graph), describe(&graph));
}

/// x and a cache in integers, a linear layer with weights of `weights`, and y in integers.
fn quantized(weights: DType, axis: Option<usize>) -> Graph {
    let mut graph = Graph::new("quantized");
    let (rows, columns) = (65, 129);
    let x = graph.input("x", DType::U16, vec![2, columns]).unwrap();
    let mut constant = |name: &str, tensor: Tensor| {
        let (dtype, shape) = (tensor.dtype(), tensor.shape().to_vec());
        graph.add_constant(name, dtype, shape, Constant::Tensor(tensor)).unwrap()
    };
    let scale = constant("scale", Tensor::from_f32(vec![], vec![0.01]).unwrap());
    let zero = constant("zero", Tensor::from_i32_as(DType::U16, vec![], &[30000]).unwrap());
    let count = rows * columns;
    let values: Vec<i32> = (0..count).map(|i| (i as i32 * 5) % 16 - 8).collect();
    let weight = constant("w", Tensor::from_i32_as(weights, vec![rows, columns], &values).unwrap());
    let shape = axis.map_or(vec![], |_| vec![rows]);
    let scales: Vec<f32> = (0..shape.iter().product()).map(|i| 0.5 + i as f32).collect();
    let zeros = vec![0; scales.len()];
    let scales = constant("w_scale", Tensor::from_f32(shape.clone(), scales).unwrap());
    let zeros = constant("w_zero", Tensor::from_i32_as(weights, shape, &zeros).unwrap());
    let back = Op::DequantizeLinear { axis: None };
    let x = graph.add(back, &[x, scale, zero], "x_real").unwrap();
    let w = graph.add(Op::DequantizeLinear { axis }, &[weight, scales, zeros], "w_real").unwrap();
    let y = graph.add(Op::Gemm, &[x, w], "y_real").unwrap();
    let y = graph.add(Op::QuantizeLinear { axis: None }, &[y, scale, zero], "y").unwrap();
    graph.output(y).unwrap();
    graph
}

#[test]
fn quantized_values_survive_with_their_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let x: Vec<i32> = (0..2 * 129).map(|i| 29000 + 17 * i).collect();
    let x = Tensor::from_i32_as(DType::U16, vec![2, 129], &x).unwrap();
    for (index, (dtype, axis)) in
        [(DType::I4, Some(0)), (DType::I4, None), (DType::I8, Some(0)), (DType::I16, None)]
            .into_iter()
            .enumerate()
    {
        let graph = quantized(dtype, axis);
        let name = format!("m{index}.onnx");
        write(folder.path(), vec![model(&name, &graph, 21)], vec![]);
        let read = read_model(&folder.path().join(&name)).unwrap();
        assert_eq!(describe(&read.graph), describe(&graph), "{dtype} {axis:?}");
        let run = |graph| Evaluator::new(graph).unwrap().run(&[x.view()]).unwrap();
        let (expected, actual) = (run(graph), run(read.graph));
        assert_eq!(actual[0].view().to_i32().unwrap(), expected[0].view().to_i32().unwrap());
    }
}

#[test]
fn quantization_is_refused_below_opset_21() {
    let graph = quantized(DType::I8, None);
    let plan = firesteel_onnx::WritePlan::new(vec![model("m.onnx", &graph, 20)], vec![]).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let error = plan.write(folder.path(), 1, &|_| {}).unwrap_err().to_string();
    assert!(error.contains("DequantizeLinear") && error.contains("from opset 21"), "{error}");
}
