"""What a family of published decoders is, and how the arrays of most of them lie.

llama.py and gpt.py have the families; published.py explains the patterns.
"""

import dataclasses
from typing import Any, Callable

import numpy as np

from zigzag.hub.published import Change, stacks_of
from zigzag.hub.published_config import Fields, Record


def keys(names: str) -> tuple[str, ...]:
    """Names with blanks between them."""
    return tuple(names.split())


# Why an array of a folder is no weight: (a Config, its numbers) -> whether they are the constant
# that follows from the configuration; or a regex of the classes that lack it.
Ignored = Callable[[Any, np.ndarray], bool] | str


@dataclasses.dataclass(frozen=True)
class Family:
    fields: Callable[[Record], Fields]          # config.json -> fields of a Config
    arrays: Callable[[Any], dict[str, str]]     # a Config -> patterns of published arrays
    defaults: Fields                            # of what a config.json leaves out
    prefix: str = ""                            # of names, which a folder of the bare model lacks
    ignored: dict[str, Ignored] = dataclasses.field(default_factory=dict)   # arrays that are no
                                                # weights, as regexes, and why
    adjust: Callable[[Any], dict[str, Change]] = lambda c: {}   # weights that differ from ours
    aliases: dict[str, str] = dataclasses.field(default_factory=dict)   # other names, and the usual
    optional: tuple[str, ...] = ()              # arrays that are zeros where they are missing
    stacks: Callable[[Any], dict[str, Any]] = stacks_of     # what letters in names number
    older: dict[str, str] = dataclasses.field(default_factory=dict)     # parts of names, and what
                                                # older or newer versions call them
    fused: dict[str, str] = dataclasses.field(default_factory=dict)     # patterns of arrays that
                                                # have all experts, in place of one for each
    seen: Callable[[Fields, Any], Fields] | None = None     # fields that follow from these fields,
                                                # and from the arrays of a folder
    check: Callable[[Any, Any, Any], None] | None = None    # (forward, params, a Config): refuses
                                                # what its class would compute otherwise
    shared: tuple[str, ...] = ()                # keys that its class has, of those that shared
                                                # translators read for some classes
    neutral: tuple[str, ...] = ()               # keys that cannot change what its class computes
                                                # where `fields` does not read them


# Arrays that are no weights: constants that older versions of transformers saved.
def _is_rates(c, array):
    dim = getattr(c, "rotary_dim", 0) or c.head_dim
    return array.shape == (dim // 2,) and np.allclose(
        array, c.rope_theta ** (-np.arange(0, dim, 2) / dim), rtol=0.05)    # (of half precision)


def _is_causal(c, array):
    """Which keys a query sees: those before it, or of these the last ones."""
    if array.ndim != 4:
        return False
    seen = np.tri(array.shape[-1], dtype=bool)
    last = seen & ~np.tri(len(seen), k=-c.window, dtype=bool) if c.window else seen
    return any(np.array_equal(array[0, 0] > 0, mask) for mask in (seen, last))


def is_range(c: Any, array: np.ndarray) -> bool:
    return np.array_equal(array.ravel(), np.arange(array.size))


def pair_index(side: int) -> np.ndarray:
    """For each two of side * side patches how far apart they are, as one number."""
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
    """The loss head: of a tied model once more the embedding, if it is there."""
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


def neighbours(rotary_dim: int, head_dim: int, begin: int = 0) -> np.ndarray:
    """The order of a head's numbers in which those pairs that rotary positions turn, which some
    families have beside each other from `begin` on, lie half of them apart, at the beginning."""
    turned = np.arange(begin, begin + rotary_dim)
    rest = np.delete(np.arange(head_dim), turned)
    return np.concatenate([turned[::2], turned[1::2], rest])


def neighbours_apart(c):
    change = Change(neighbours(c.rotary_dim or c.head_dim, c.head_dim))
    return dict.fromkeys(("wq", "wk", "wq_bias", "wk_bias"), change)
