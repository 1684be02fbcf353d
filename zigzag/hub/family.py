"""`Family`: a family of published models; and patterns of arrays that many families share.

llama.py and gpt.py have the families; published.py explains the patterns.
"""

import dataclasses
from typing import Any, Callable

import numpy as np

from zigzag.hub.published import Change, stacks_of
from zigzag.hub.published_config import Fields, Record


def keys(names: str) -> tuple[str, ...]:
    """The names in a text, separated by blanks."""
    return tuple(names.split())


# Why an array of a folder is not a weight: a function (Config, array) -> whether it is the constant
# that follows from the configuration, or a regex of the classes that do not have the array.
Ignored = Callable[[Any, np.ndarray], bool] | str


@dataclasses.dataclass(frozen=True)
class Family:
    fields: Callable[[Record], Fields]          # config.json -> fields of a Config
    arrays: Callable[[Any], dict[str, str]]     # a Config -> patterns of published arrays
    defaults: Fields                            # the class's defaults for missing keys
    prefix: str = ""                            # of names; a folder of the bare model lacks it
    ignored: dict[str, Ignored] = dataclasses.field(default_factory=dict)   # {regex of arrays that
                                                # are not weights: why}
    adjust: Callable[[Any], dict[str, Change]] = lambda c: {}   # weights that differ from ours
    aliases: dict[str, str] = dataclasses.field(default_factory=dict)   # {other name: usual name}
    optional: tuple[str, ...] = ()              # arrays that are zeros if they are missing
    stacks: Callable[[Any], dict[str, Any]] = stacks_of     # what letters in names number
    older: dict[str, str] = dataclasses.field(default_factory=dict)     # {part of a name: its name
                                                # in older or newer versions}
    fused: dict[str, str] = dataclasses.field(default_factory=dict)     # patterns of arrays that
                                                # have all experts, instead of one array for each
    seen: Callable[[Fields, Any], Fields] | None = None     # (fields, folder) -> further fields,
                                                # which depend on the arrays of the folder
    differs: Callable[[Any, Any, Any], str] | None = None   # (forward, params, a Config) -> how its
                                                # class computes something else; '': it does not
    shared: tuple[str, ...] = ()                # keys of its class that shared translators read
                                                # only for classes that have them
    neutral: tuple[str, ...] = ()               # keys that cannot change what its class computes,
                                                # if `fields` does not read them


# Arrays that are not weights: constants that older versions of transformers saved.
def _is_rates(c, array):
    dim = getattr(c, "rotary_dim", 0) or c.head_dim
    return array.shape == (dim // 2,) and np.allclose(
        array, c.rope_theta ** (-np.arange(0, dim, 2) / dim), rtol=0.05)    # (half precision)


def _is_causal(c, array):
    """Whether the array is a causal mask, perhaps with a window."""
    if array.ndim != 4:
        return False
    seen = np.tri(array.shape[-1], dtype=bool)
    last = seen & ~np.tri(len(seen), k=-c.window, dtype=bool) if c.window else seen
    return any(np.array_equal(array[0, 0] > 0, mask) for mask in (seen, last))


def is_range(c: Any, array: np.ndarray) -> bool:
    return np.array_equal(array.ravel(), np.arange(array.size))


def pair_index(side: int) -> np.ndarray:
    """The index of the relative position for each pair of side * side patches."""
    rows, columns = np.divmod(np.arange(side * side), side)
    down, right = (a[:, None] - a + side - 1 for a in (rows, columns))
    return down * (2 * side - 1) + right


INV_FREQ = {r".*rotary_(pos_)?emb\.inv_freq": _is_rates}
MASKS = {r"(.*\.)?(attn|attention)\.bias": _is_causal,
         r"(.*\.)?(attn|attention)\.masked_bias": lambda c, array: array.max() <= -1e4}


def biased(**has):
    return dict(biases=",".join(name for name, given in has.items() if given))


def under(prefix, *groups):
    return {prefix + name: pattern for group in groups for name, pattern in group.items()}


def head(c, name="lm_head.weight"):
    """The pattern of a decoder's head; in a tied model it repeats the embedding, if it is there."""
    if c.head == "classes":
        return {"score.weight": "A D -> classifier"}
    return {name: "V W = embed" if c.tied else "V W -> head"}


def layer_norm(name, ours, axis="D"):
    return {f"{name}.weight": f"{axis} -> {ours}", f"{name}.bias": f"{axis} -> {ours}_bias"}


def columns(name, axes, ours, bias=True):
    """A Linear of torch, [out, in], whose outputs shard.columns may split."""
    axes = f"({axes})" if " " in axes else axes
    biases = " ".join(f"{w}_bias" for w in ours.split())
    return {f"{name}.weight": f"{axes} D -> {ours}"} | (
        {f"{name}.bias": f"{axes} -> {biases}"} if bias else {})


def rows(name, axes, ours, bias=True):
    """A Linear of torch, [out, in], whose inputs shard.row may split."""
    axes = f"({axes})" if " " in axes else axes
    return {f"{name}.weight": f"D {axes} -> {ours}"} | (
        {f"{name}.bias": f"D -> {ours}_bias"} if bias else {})


def attention(name, parts="q k v o", bias=True, out_bias=True, ours="", key_bias=True):
    """The four Linears of attention. `name` has {} for each of the `parts`: of queries, keys and
    values, and of the output."""
    q, k, v, out = map(name.format, parts.split())
    return {**columns(q, "H N", f"{ours}wq", bias), **columns(k, "K N", f"{ours}wk",
                                                              bias and key_bias),
            **columns(v, "K M", f"{ours}wv", bias), **rows(out, "H M", f"{ours}wo", out_bias)}


def mlp(up, down, bias=True):
    """The two Linears of an MLP without a gate."""
    return columns(up, "F", "w_up", bias) | rows(down, "F", "w_down", bias)


def neighbours(rotary_dim: int, head_dim: int, begin: int = 0) -> np.ndarray:
    """The permutation of a head's numbers to our order. Some families have the two numbers of a
    rotary pair beside each other, from `begin` on; ours are rotary_dim / 2 apart, and come first in
    the head."""
    turned = np.arange(begin, begin + rotary_dim)
    rest = np.delete(np.arange(head_dim), turned)
    return np.concatenate([turned[::2], turned[1::2], rest])


def neighbours_apart(c):
    change = Change(neighbours(c.rotary_dim or c.head_dim, c.head_dim))
    return dict.fromkeys(("wq", "wk", "wq_bias", "wk_bias"), change)
