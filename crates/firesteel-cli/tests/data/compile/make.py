"""Graphs that the project's own writer cannot spell. Needs the packages onnx and numpy."""

import numpy as np
import onnx
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper as nh


def save(name, nodes, inputs, outputs, constants):
    info = h.make_tensor_value_info
    graph = h.make_graph(
        nodes, name, [info(*i) for i in inputs], [info(*o) for o in outputs], constants
    )
    opset = [h.make_opsetid("", 23)]
    onnx.save(h.make_model(graph, opset_imports=opset, ir_version=11), f"{name}.onnx")


def block_int4():
    rows, columns, block = 16, 64, 32
    q = np.random.default_rng(0).integers(0, 16, (rows * columns // 2, 2), np.uint8)
    packed = (q[:, 0] | q[:, 1] << 4).tobytes()
    scales = [rows, columns // block]
    save(
        "block_int4",
        [
            h.make_node(
                "DequantizeLinear", ["w", "s", "z"], ["wd"], name="wd", axis=1, block_size=block
            ),
            h.make_node("Gemm", ["x", "wd"], ["y"], name="linear", transB=1),
        ],
        [("x", T.FLOAT, [1, columns])],
        [("y", T.FLOAT, [1, rows])],
        [
            h.make_tensor("w", T.INT4, [rows, columns], packed, raw=True),
            nh.from_array(np.full(scales, 0.01, np.float32), "s"),
            h.make_tensor("z", T.INT4, scales, bytes(scales[0] * scales[1] // 2), raw=True),
        ],
    )


def resize():
    save(
        "resize",
        [h.make_node("Resize", ["x", "", "scales"], ["y"], name="larger")],
        [("x", T.FLOAT16, [1, 1, 4, 4])],
        [("y", T.FLOAT16, [1, 1, 8, 8])],
        [nh.from_array(np.array([1, 1, 2, 2], np.float32), "scales")],
    )


block_int4()
resize()
