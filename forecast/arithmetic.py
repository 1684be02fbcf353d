"""The FLOPs of a compiled program's matmuls, parsed from its text (zigzag/parallel/hlo.py). Above
each pattern is an example of what it matches.
"""

import functools
import math
import re
from typing import Any

import numpy as np

from zigzag.parallel.hlo import NAME, SHAPE, executed, ints

#   %x.1 = f32[8,32]{1,0} multiply(...)    (a tuple has no single shape, so it does not match)
_RESULT = re.compile(r"^ *(?:ROOT )?%([\w.\-]+) = \w+\[([\d,]*)\]", re.M)
# %dot.1 = bf16[384,4096]{0,1} dot(%a.1, %b.2), lhs_contracting_dims={0}, rhs_contracting_dims={1}
# %convolution.1 = f32[512,4]{1,0} convolution(%a.1, %b.2), window={size=4 pad=3_3}, dim_labels=...
_PRODUCT = re.compile(r".* = \w+\[(?P<shape>[\d,]*)\]\S* (?P<kind>dot|convolution)"
                      r"\((?P<operands>.*?)\)(?P<options>.*)")
_CONTRACTED = re.compile(r"lhs_contracting_dims={([\d,]*)}")
# dim_labels=b01f_01io->b01f: the dimensions of the image, the kernel and the result
_DIM_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
# window={size=3x3 stride=2x2 pad=0_0x1_1 lhs_dilate=16x1}
_WINDOW = re.compile(r"window={(.*?)}")
_SETTING = re.compile(r"(\w+)=([\dx_\-]+)")
# %splash_mha_fwd_residuals.10 = (...) custom-call(...), custom_call_target="tpu_custom_call", ...
_SPLASH = re.compile(r"%splash_mha_(fwd|dq|dkv)")
# Matmuls per block of queries and keys in each splash attention kernel: two forward, then three and
# four backward. Two of the matmuls are the same in both backward kernels.
_SPLASH_PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}
# backend_config={..."sliding_window_length":256...}
_SLIDING = re.compile(r'"sliding_window_length":\s*"?(\d+)')
# operand_layout_constraints={bf16[8,512,1,128]{3,2,1,0}, bf16[8,512,1,128]{3,2,1,0}}, metadata=...
_INPUTS = re.compile(r"operand_layout_constraints={(.*?)}(?:, \w+=|$)")


def arithmetic(compiled: Any, ragged: float = 1.0) -> float:
    """Return the FLOPs per device of a compiled program's matmuls and convolutions: 2 for each
    multiply-add, with loops multiplied out (the compiler's own count includes a loop's body only
    once). If a line branches, only the branch with the most FLOPs counts. Ragged matmuls, whether
    in a TPU's kernel or our loop over blocks, skip rows outside all groups; `ragged` is the
    fraction of rows inside groups."""
    def work(lines):
        return sum(times * operations(line, computation, ragged)
                   for line, times, computation in lines)

    return work(executed(compiled.as_text(), ragged, work))


@functools.lru_cache(maxsize=64)
def _shapes(computation):
    """Return {name: shape} for the values that this computation defines."""
    return {name: ints(dims) for name, dims in _RESULT.findall(computation)}


def operations(line: str, computation: str, ragged: float = 1.0) -> float:
    """Return the FLOPs of a line with a matmul or a kernel, or 0 for any other line."""
    if 'custom_call_target="__cudnn$fmha' in line:
        return _cudnn_operations(line)
    if "tpu_custom_call" in line:
        if "ragged_dot_tiling" in line:
            return 2 * ragged * _ragged_products(line)
        if found := _SPLASH.search(line):
            return _splash_operations(found[1], line)
    if not (found := _PRODUCT.match(line)):
        return 0
    left, right = (_shapes(computation)[name] for name in NAME.findall(found["operands"]))
    result = ints(found["shape"])
    if found["kind"] == "convolution":
        return 2 * _convolution_products(result, left, right, found["options"])
    contracted = ints(_CONTRACTED.search(found["options"])[1])
    return 2 * math.prod(result) * math.prod(left[d] for d in contracted)


def _inputs(line):
    """List (type, shape) for each operand of a kernel."""
    return [(name, ints(dims)) for name, dims in SHAPE.findall(_INPUTS.search(line)[1])]


def _ragged_products(line):
    """Return the number of scalar multiplications in a TPU kernel for a ragged matmul. One of
    its operands and its result has a dimension of groups; each other dimension occurs in two."""
    *_, (_, left), (_, right) = _inputs(line)
    result = ints(SHAPE.search(line)[2])
    return math.isqrt(math.prod(math.prod(shape[-2:]) for shape in (result, left, right)))


def _cudnn_operations(line):
    """Return the FLOPs of cuDNN's attention for queries [B, T, H, N] and keys [B, S, K, N]: two
    matmuls forward, five backward, and half of that if causal. A window of W leaves W T - W W / 2
    of the T T scores."""
    (_, (B, T, H, N)), (_, (_, S, *_)), *_ = _inputs(line)
    products, window = 5 if "Backward" in line else 2, _SLIDING.search(line)
    met = T * S / 2 if '"CAUSAL"' in line else T * S
    if window and 0 < int(window[1]) < T:
        met = int(window[1]) * (T - int(window[1]) / 2)
    return products * 2 * B * met * H * N


def _splash_operations(kernel, line):
    """Return the FLOPs of a TPU's attention for queries [B H, T, N] or [B, H, T, N]. There are
    n x n blocks, and a query meets at most m blocks in its row (the first operand is [1, n, m]). If
    the operands include slots (an integer matrix), a query meets no later block."""
    inputs = _inputs(line)
    m, n = sorted(inputs[0][1][1:])
    blocks = n * m - m * (m - 1) / 2 if any(
        name == "s32" and len(shape) == 2 for name, shape in inputs) else n * n
    *rows, T, N = next(shape for name, shape in inputs if name == "bf16")
    return _SPLASH_PRODUCTS[kernel] * 2 * math.prod(rows) * T * T * N * blocks / n**2


def _convolution_products(result, image, kernel, options):
    """Return the number of scalar multiplications in a convolution, excluding products with padding
    or with the zeros that dilation inserts. TPU programs write batched matmuls as convolutions."""
    image, kernel, result = (dict(zip(labels, shape)) for labels, shape in zip(
        _DIM_LABELS.search(options).groups(), (image, kernel, result)))
    window = {name: values.split("x") for name, values in _SETTING.findall(
        "".join(_WINDOW.findall(options)))}
    products = result["b"] * result["f"] * kernel["i"]
    for k, label in enumerate(sorted(result.keys() - {"b", "f"})):
        stride, spacing, step = (int(window[name][k]) if name in window else 1
                                 for name in ("stride", "rhs_dilate", "lhs_dilate"))
        before = int(window["pad"][k].split("_")[0]) if "pad" in window else 0
        at = (np.arange(result[label])[:, None] * stride + np.arange(kernel[label]) * spacing
              - before)
        inside = (at >= 0) & (at % step == 0) & (at // step < image[label])
        products *= int(inside.sum())
    return products
