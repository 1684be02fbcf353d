"""What a family of published decoders is, and how the arrays of most of them lie.

llama.py and gpt.py have the families; published.py explains the patterns.
"""

import dataclasses
from typing import Any, Callable

import numpy as np

from zigzag.hub.published import Change, stacks_of
from zigzag.hub.published_config import Fields


@dataclasses.dataclass(frozen=True)
class Family:
    fields: Callable[[Fields], Fields]          # config.json -> fields of a Config
    arrays: Callable[[Any], dict[str, str]]     # a Config -> patterns of published arrays
    defaults: Fields                            # of what a config.json leaves out
    prefix: str = ""                            # of names, which a folder of the bare model lacks
    ignored: tuple[str, ...] = ()               # arrays that are no weights, as regexes
    adjust: Callable[[Any], dict[str, Change]] = lambda c: {}   # weights that differ from ours
    aliases: dict[str, str] = dataclasses.field(default_factory=dict)   # other names, and the usual
    optional: tuple[str, ...] = ()              # arrays that are zeros where they are missing
    stacks: Callable[[Any], dict[str, Any]] = stacks_of     # what letters in names number
    older: dict[str, str] = dataclasses.field(default_factory=dict)     # parts of names, and what
                                                # they may be called instead
    seen: Callable[[Fields, Any], Fields] | None = None     # fields that follow from these fields,
                                                # and from which arrays a folder has


# Arrays that are no weights: constants that older versions of transformers saved.
INV_FREQ = (r".*rotary_emb\.inv_freq",)


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
