"""`Family`, the description of a model family, and the array names that many families share.

Families are in llama.py, gpt.py, encoders.py and others; arrays_of_folder.py explains the names.
"""

import re
from typing import Any, Callable, NamedTuple

import numpy as np

from published.arrays_of_folder import Change
from published.record import Fields, Names, Record
from zigzag.parallel.rotary import plain_rates


def keys(names: str) -> tuple[str, ...]:
    """Split a string of names at whitespace."""
    return tuple(names.split())


# Why an array in a folder isn't a weight: a function (Config, array) that tests whether it's the
# constant that the config implies, or a regex for the classes in which we ignore it.
Ignored = Callable[[Any, np.ndarray], bool] | str
Changes = dict[str, Change]     # {weight name: how it differs}


class Family(NamedTuple):
    """A family of published models."""
    fields: Callable[[Record], Fields]          # config.json -> fields of a Config
    arrays: Names | Callable[[Any], Names]      # {published module or array: our weights in it} for
                                                # all arrays, or a Config -> such a dict
    defaults: Fields                            # the class's defaults for missing keys
    prefix: str = ""                            # prefix of names, absent from a bare model's folder
    ignored: dict[str, Ignored] = {}            # {regex for arrays that aren't weights: why}
    adjust: Callable[[Any], Changes] = lambda c: {}     # how our weights differ from the arrays
    aliases: Names = {}                         # {alias: usual name}
    stacks: Callable[[Any], Fields] = lambda c: {}      # a Config -> more words for names, besides
                                                # the ones from arrays_of_folder.stacks_of
    older: Names = {}                           # {part of a name: the same part in older or newer
                                                # versions}
    seen: Callable[..., Fields] | None = None   # (config.json, fields, a function that returns the
                                                # folder's arrays) -> more fields, which depend on
                                                # the arrays
    shared: tuple[str, ...] = ()                # keys that shared translators read only for classes
                                                # that have them
    neutral: tuple[str, ...] = ()               # keys that can't change what the class computes if
                                                # `fields` doesn't read them


Families = dict[str, Family]


# Arrays that aren't weights: constants that older versions of transformers saved.
def _is_rates(c, array):
    rates = plain_rates(getattr(c, "rotary_dim", 0) or c.head_dim, c.rope_theta)
    return array.shape == rates.shape and np.allclose(array, rates, rtol=0.05)  # half precision


def _is_causal(c, array):
    """Return whether the array is a causal mask, with or without a window."""
    if array.ndim != 4:
        return False
    seen = np.tri(array.shape[-1], dtype=bool)
    last = seen & ~np.tri(len(seen), k=-c.window, dtype=bool) if c.window else seen
    return any(np.array_equal(array[0, 0] > 0, mask) for mask in (seen, last))


def is_range(c: Any, array: np.ndarray) -> bool:
    return np.array_equal(array.ravel(), np.arange(array.size))


INV_FREQ = {r".*rotary_(pos_)?emb\.inv_freq": _is_rates}
MASKS = {r"(.*\.)?(attn|attention)\.bias": _is_causal,
         r"(.*\.)?(attn|attention)\.masked_bias": lambda c, array: array.max() <= -1e4}


def biased(**has):
    return dict(biases=",".join(name for name, given in has.items() if given))


def under(prefix: str, *groups: Names) -> Names:
    return {prefix + name: ours for group in groups for name, ours in group.items()}


def inside(path: str, names: Names) -> Names:
    """Move a name table's weights to `path` in a larger model. The path of a layer's weight comes
    from its stack instead."""
    return {name: ours if "{" in name else re.sub(r"\b[a-z][\w.]+", rf"{path}.\g<0>", ours)
            for name, ours in names.items()}


def attention(name: str, parts: str = "q k v o", ours: str = "") -> Names:
    """Name the four attention modules: queries, keys, values and output. Each name in `parts`
    replaces the {} in `name`."""
    return {name.format(part): ours + w
            for part, w in zip(parts.split(), ("wq", "wk", "wv", "wo"))}


def attention_and_norm(name: str, norm: str, parts: str = "q k v o", ours: str = "") -> Names:
    """Name the four modules as `attention` does, and the norm of this attention."""
    return {**attention(name, parts, ours), norm: f"{ours or 'attn_'}norm"}


def mlp(up: str, down: str) -> Names:
    return {up: "w_up", down: "w_down"}


# A single module that holds each head group's queries, keys and values next to each other.
GROUPED = {".weight": "(K [g N | N | M]) D -> wq wk wv",
           ".bias": "(K [g N | N | M]) -> wq_bias wk_bias wv_bias"}


def neighbours(rotary_dim: int, head_dim: int, begin: int = 0) -> np.ndarray:
    """Return the permutation that puts a head's elements in our order. In some families the two
    elements of a rotary pair are adjacent, and the pairs start at `begin`. Ours are rotary_dim / 2
    apart and come first in the head."""
    turned = np.arange(begin, begin + rotary_dim)
    rest = np.delete(np.arange(head_dim), turned)
    return np.concatenate([turned[::2], turned[1::2], rest])


def neighbours_apart(c: Any) -> Changes:
    change = Change(neighbours(c.rotary_dim or c.head_dim, c.head_dim))
    return dict.fromkeys(("wq", "wk", "wq_bias", "wk_bias"), change)
