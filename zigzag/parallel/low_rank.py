"""LoRA adapters: --lora_rank r trains two small matrices alongside each weight matrix of a layer.

    x [B, T, D] --> w [D, F] -------------> + --> y [B, T, F]     w   unchanged, never trained
          |                                 |                     a   [D, r], random
          +-------> a [D, r] --> b [r, F] --+                     b   [r, F], zeros at first

The model computes with w + a b, which initially equals w. Adapters are leaves next to their weight
(wq, wq_a, wq_b), and are split the same way. All other weights are frozen: they're stored in the
compute dtype and have no gradient or optimizer state. Checkpoints contain only the adapters. To
read such a checkpoint, `read_run_weights` (saved.py) loads the frozen weights from their original
source and checks their fingerprint.

There is no alpha, the usual factor on a b. The initial a has a standard deviation of 1 / sqrt(D).
That is close to the usual alpha = 2 r with an a drawn uniformly from -1 / sqrt(D) to 1 / sqrt(D).
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from zigzag.core.errors import ConfigError
from zigzag.core.files import digest
from zigzag.core.mesh import cast
from zigzag.disk import checkpoint
from zigzag.parallel.products import LoraWeight
from zigzag.parallel.table import Weight


def with_adapters(table: Any, rank: int) -> Any:
    """Add adapters of this rank (0: none) to the weight table, next to each layer matrix that leads
    into or out of a block: every matrix that tensor may split, except pure lookup tables.

    A column matrix contracts its first dimension after the layer and expert dimensions. A row
    matrix has tensor on that dimension, and contracts all dimensions but its last."""
    if not rank:
        return table
    made = {}
    for name, w in table.items():
        if isinstance(w, dict):
            made[name] = with_adapters(w, rank)
        elif "L" in w.axes and w.tensor >= 0 and not w.is_table and "1" not in w.axes:
            made |= _adapters(name, w, rank)
    return table | made


def _adapters(name, w, rank):
    first = sum(letter in "LE" for letter in w.axes)
    is_row = w.tensor == first
    last = len(w.axes) - 1 if is_row else first + 1
    a = Weight((*w.axes[:last], "r"), (*w.shape[:last], rank),
               math.prod(w.shape[first:last])**-0.5, (*w.mesh_axes[:last], ""))
    b = Weight((*w.axes[:first], "r", *w.axes[last:]), (*w.shape[:first], rank, *w.shape[last:]),
               0.0, (*w.mesh_axes[:first], "", *w.mesh_axes[last:]))
    return {f"{name}_{end}": _over_fsdp(x) if "fsdp" in w.mesh_axes else x
            for end, x in (("a", a), ("b", b))}


def _over_fsdp(w):
    """Put fsdp on the adapter's longest free dimension, unless fsdp already splits a dimension that
    the adapter shares with its weight."""
    if "fsdp" in w.mesh_axes:
        return w
    free = [d for d, axis in enumerate(w.mesh_axes) if not axis]
    longest = max(free, key=w.shape.__getitem__)
    return dataclasses.replace(w, mesh_axes=tuple(
        "fsdp" if d == longest else axis for d, axis in enumerate(w.mesh_axes)))


def adapted(w: dict[str, Any]) -> dict[str, Any]:
    """Return a layer's weights, with each weight and its adapters combined into an Adapted."""
    pairs = {name: LoraWeight(w[name], w[f"{name}_a"], w[f"{name}_b"])
             for name in w if f"{name}_a" in w and f"{name}_b" in w}
    return {name: x for name, x in w.items() if not _is_adapter(name, w)} | pairs


def merged(params: dict[str, Any]) -> dict[str, Any]:
    """Return the model's float32 weights with adapters merged in: any weight with adapters becomes
    w + a b."""
    def merge(w, a, b):
        if a.ndim + b.ndim - w.ndim > 2:        # over layers, then over experts
            return jax.vmap(merge)(w, a, b)
        return w.astype(jnp.float32) + jnp.tensordot(a, b, 1, precision="highest")

    new = {}
    for name, w in params.items():
        if isinstance(w, dict):
            new[name] = merged(w)
        elif f"{name}_a" in params:
            new[name] = merge(w, params[f"{name}_a"], params[f"{name}_b"])
        elif not _is_adapter(name, params):
            new[name] = cast(w, "float32")
    return new


# -------------------------------------------------------------------------------------------
# Trained and frozen weights

def _is_adapter(name, beside):
    return name[-2:] in ("_a", "_b") and name[:-2] in beside


def split(tree: Any) -> tuple[Any, Any]:
    """Split a tree shaped like the weights: return the adapters' entries, and all others."""
    adapters, others = {}, {}
    for name, x in tree.items() if isinstance(tree, dict) else ():
        if isinstance(x, dict):
            parts = split(x)
        else:
            parts = (x, {}) if _is_adapter(name, tree) else ({}, x)
        for side, part in zip((adapters, others), parts):
            if not isinstance(part, dict) or part:
                side[name] = part
    return adapters, others


def join(adapters: Any, others: Any) -> Any:
    """Undo `split`: rebuild the tree from its two halves."""
    if not isinstance(others, dict) or not others:
        return adapters
    return {**others, **{name: join(x, others.get(name)) for name, x in adapters.items()}}


def as_stored(params: Any, dtype: str) -> Any:
    """Return the weights, with frozen weights cast to this dtype."""
    adapters, frozen = split(params)
    if not adapters:
        raise ConfigError("--lora_rank needs a network of this codebase, because these weights "
                          "have no adapters; leave it out to train all of them")
    return join(adapters, cast(frozen, dtype))


def mark_frozen(decisions: Any) -> Any:
    """Return the rule's decisions, with is_trained=False for frozen weights."""
    adapters, frozen = split(decisions)
    return join(adapters, jax.tree.map(
        lambda d: dataclasses.replace(d, is_trained=False), frozen))


def fingerprint(frozen: Any) -> str:
    """Return 16 hex digits that identify the frozen weights under a run's adapters."""
    sums = sorted(checkpoint.checksums(frozen).items())
    return digest(str(sums).encode())[:16]
