#!/usr/bin/env python3
"""Float64 outputs of the golden steps.

The golden steps hold what the reference exporter computes in float32; its rounding alone keeps
them 114 to 146 dB away from the exact result. This computes the same inputs in float64 and
writes steps_f64.safetensors with one tensor `case.output` an output. Needs NumPy and safetensors.

  python make_steps_f64.py GOLDEN_DIR OUT_FILE
"""
import json
import math
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

golden = Path(sys.argv[1])
cases = json.loads((golden / "cases.json").read_text())
config = cases["config"]
heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
width = config["head_dim"]
weights = {
    name: value.astype(np.float64)
    for name, value in load_file(golden / "mini" / "model.safetensors").items()
}
erf = np.vectorize(math.erf)


def rms_norm(x, weight):
    return weight * x / np.sqrt((x * x).mean() + config["rms_norm_eps"])


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gelu(x, form):
    if form == "exact":
        return 0.5 * x * (1 + erf(x / math.sqrt(2)))
    if form == "tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x * sigmoid(1.702 * x)


def rotate(x, cos, sin):
    dims, half = len(cos), len(cos) // 2
    low, high, rest = x[:, :half], x[:, half:dims], x[:, dims:]
    low, high = low * cos[:half] - high * sin[:half], high * cos[half:] + low * sin[half:]
    return np.concatenate([low, high, rest], axis=1)


def step(case, inputs):
    x, outputs = inputs["x"][0, 0], {}
    for i, layer in enumerate(range(*case["layers"])):
        w = lambda name: weights[f"model.layers.{layer}.{name}.weight"]
        sliding = config["layer_types"][layer] == "sliding_attention"
        kind = "sw" if sliding else "full"
        cos, sin = (inputs[f"{name}_{kind}"][0, 0, 0] for name in ("cos", "sin"))
        h = rms_norm(x, w("input_layernorm"))
        qkv = (w("self_attn.q_k_v_proj") @ h).reshape(heads + 2 * kv, width)
        q, k, v = np.split(qkv, [heads, heads + kv])
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        keys = np.concatenate([inputs[f"k_cache_{i}"][0], k[:, None]], axis=1)
        values = np.concatenate([inputs[f"v_cache_{i}"][0], v[:, None]], axis=1)
        returned = slice(-1, None)
        if sliding and case["layout"] == "roll":
            keys, values = keys[:, 1:], values[:, 1:]
            returned = slice(None)
        outputs[f"k_new_{i}"], outputs[f"v_new_{i}"] = keys[:, returned], values[:, returned]
        grouped = q.reshape(kv, heads // kv, width)
        scores = np.einsum("kgd,kld->kgl", grouped, keys) / math.sqrt(width)
        scores = scores + inputs[f"mask_{kind}"][0, 0, 0]
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares = shares / shares.sum(-1, keepdims=True)
        attended = np.einsum("kgl,kld->kgd", shares, values).reshape(heads, width)
        attended = attended * sigmoid(w("self_attn.g_proj") @ h)[:, None]
        x = x + w("self_attn.out_proj") @ attended.reshape(-1)
        h = rms_norm(x, w("post_attention_layernorm"))
        inner = gelu(w("mlp.gate_proj") @ h, case["gelu"]) * (w("mlp.up_proj") @ h)
        x = x + w("mlp.down_proj") @ inner
    if case["lm_head"]:
        normed = rms_norm(x, weights["model.norm.weight"])
        outputs["logits"] = weights["model.embedding.weight"] @ normed
    else:
        outputs["hidden"] = x
    return outputs


results = {}
for case in cases["cases"]:
    tensors = load_file(golden / f"step_{case['name']}.safetensors")
    inputs = {
        name.removeprefix("in."): value.astype(np.float64)
        for name, value in tensors.items()
        if name.startswith("in.")
    }
    for name, value in step(case, inputs).items():
        shape = tensors[f"out.{name}"].shape
        results[f"{case['name']}.{name}"] = np.ascontiguousarray(value).reshape(shape)
save_file(results, sys.argv[2])
