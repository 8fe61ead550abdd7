"""Writes the ONNX files of the tests. Needs the PyPI packages onnx and numpy."""

import os

import numpy as np
import onnx
from onnx import TensorProto as T
from onnx import helper as h

HERE = os.path.dirname(os.path.abspath(__file__))


def save(path, nodes, inputs, outputs, initializers=()):
    graph = h.make_graph(nodes, "test", inputs, outputs, initializers)
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", 18)], ir_version=9)
    with open(os.path.join(HERE, path), "wb") as file:
        file.write(model.SerializeToString(deterministic=True))


def external(name, dtype, shape, location, offset, length):
    tensor = onnx.TensorProto(name=name, data_type=dtype, dims=shape)
    tensor.data_location = T.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor


# hidden = x · w with w in the data file; k_new_0 = the last entry of k_cache_0, plus x.
def step(folder, dtype, array_type):
    os.makedirs(os.path.join(HERE, folder), exist_ok=True)
    weight = (np.arange(8) / 4 - 1).astype(array_type).reshape(4, 2)
    with open(os.path.join(HERE, folder, "model.data"), "wb") as file:
        file.write(bytes(64) + weight.tobytes())
    value = h.make_tensor_value_info
    ints = lambda name, values: h.make_tensor(name, T.INT64, [len(values)], values)
    save(
        os.path.join(folder, "model.onnx"),
        [
            h.make_node("MatMul", ["x", "w"], ["hidden"]),
            h.make_node("Slice", ["k_cache_0", "two", "three", "two"], ["last"]),
            h.make_node("Reshape", ["x", "shape"], ["x4"]),
            h.make_node("Add", ["last", "x4"], ["k_new_0"]),
        ],
        [value("k_cache_0", dtype, [1, 1, 3, 4]), value("x", dtype, [1, 1, 4])],
        [value("k_new_0", dtype, [1, 1, 1, 4]), value("hidden", dtype, [1, 1, 2])],
        [
            external("w", dtype, [4, 2], "model.data", 64, weight.nbytes),
            ints("two", [2]),
            ints("three", [3]),
            ints("shape", [1, 1, 1, 4]),
        ],
    )


step("step_f32", T.FLOAT, np.float32)
step("step_f16", T.FLOAT16, np.float16)

# Every element type, passed through; lengths are free.
types = {
    "f64": T.DOUBLE, "f32": T.FLOAT, "f16": T.FLOAT16, "bf16": T.BFLOAT16, "i64": T.INT64,
    "i32": T.INT32, "i16": T.INT16, "u16": T.UINT16, "i8": T.INT8, "u8": T.UINT8, "bool": T.BOOL,
}
save(
    "types.onnx",
    [h.make_node("Identity", [name], [name + "_out"]) for name in types],
    [h.make_tensor_value_info(name, dtype, ["n"]) for name, dtype in types.items()],
    [h.make_tensor_value_info(name + "_out", dtype, ["n"]) for name, dtype in types.items()],
)

# An input that is no tensor.
sequence = h.make_sequence_type_proto(h.make_tensor_type_proto(T.FLOAT, [1]))
save(
    "sequence.onnx",
    [h.make_node("SequenceLength", ["s"], ["length"])],
    [h.make_value_info("s", sequence)],
    [h.make_tensor_value_info("length", T.INT64, [])],
)

# Fails only when it runs: the shape of the second step does not divide.
save(
    "fails.onnx",
    [h.make_node("Reshape", ["x", "shape"], ["y"])],
    [h.make_tensor_value_info("x", T.FLOAT, [4]), h.make_tensor_value_info("shape", T.INT64, [1])],
    [h.make_tensor_value_info("y", T.FLOAT, ["n"])],
)
