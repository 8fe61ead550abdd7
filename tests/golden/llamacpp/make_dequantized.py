#!/usr/bin/env python3
"""Values of GGUF blocks as the public package gguf (0.19.0) reads them.

  python make_dequantized.py FOLDER_OF_GGUF_FILES OUT.safetensors

FILE/TENSOR/ROW: rows of the files spark-tiny-FILE.gguf. blocks/TYPE: five random blocks of a type, values/TYPE: their values.
"""
import sys, gguf, numpy as np
from gguf import GGMLQuantizationType as T, GGML_QUANT_SIZES
from gguf.quants import dequantize
from safetensors.numpy import save_file
src, out = sys.argv[1:]
t = {}
picks = {"f16": ["token_embd.weight", "blk.0.attn_norm.weight", "blk.3.attn_qkv.weight"], "q8_0": ["token_embd.weight", "blk.1.attn_gate.weight", "blk.2.ffn_down.weight"],
         "q4_0": ["token_embd.weight", "blk.0.ffn_down.weight", "blk.3.attn_gate.weight"], "q4_k_m": ["token_embd.weight", "blk.0.attn_qkv.weight", "blk.3.ffn_down.weight"]}
for f, names in picks.items():
    r = gguf.GGUFReader(f"{src}/spark-tiny-{f}.gguf")
    for x in r.tensors:
        if x.name in names:
            v = np.atleast_2d(dequantize(x.data, x.tensor_type)).astype(np.float32); n = v.shape[0]
            rows = sorted({0, min(1, n - 1), n // 2, n - 1})
            for row in rows: t[f"{f}/{x.name}/{row}"] = np.ascontiguousarray(v[row])
rng = np.random.default_rng(7)
for q in (T.Q4_0, T.Q4_1, T.Q8_0, T.Q4_K, T.Q5_K, T.Q6_K):
    n, size = GGML_QUANT_SIZES[q]
    b = rng.integers(0, 256, (5, size), dtype=np.uint8)
    d = rng.normal(0, 0.1, (5, 2)).astype(np.float16).view(np.uint8)
    if q == T.Q6_K: b[:, -2:] = d[:, :2]
    else: b[:, :2] = d[:, :2]
    if q in (T.Q4_1, T.Q4_K, T.Q5_K): b[:, 2:4] = d[:, 2:]
    t[f"blocks/{q.name.lower()}"] = b; t[f"values/{q.name.lower()}"] = dequantize(b, q).astype(np.float32)
save_file(t, out)
print(len(t), sum(v.nbytes for v in t.values()))
