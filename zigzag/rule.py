"""The rule: how the weights of any function should be split, derived from how it uses them.

                 x [B, T, D]  whole on every device of the tensor axis
                   |
       w_up   [D, F | F | F | F]      column: each device makes its own part of F, sends nothing
                   |
          h [B, T, F | F | F | F]     split
                   |
       w_down [F | F | F | F, D]      row: each device has a partial sum of the whole y
                   |
                 y [B, T, D]          whole again, after one all-reduce

trace.py finds the groups of dimensions that must be split together: here D and F. To split F costs
the reduction of y, where it is summed over (and of x's gradient, backward). To split D costs one of
h, which is larger, and D holds no more weights: so F is split, which makes w_up a column and w_down
a row. The two matrices alternate by themselves, since no two dimensions of one weight are split.
No names are read.

In general each group has a price, the bytes of its reductions for each of its weights' elements,
and the cheapest groups are split. Some are refused whatever their price (`_Choice.refuse`): what
does not divide; attention heads where they do not, and the inside of a head; what is read before a
weight has made it; experts, which have an axis of their own; and what is not worth a reduction:
low ranks, few labels, a stem. This is the tensor axis. `pipe` takes what counts layers, `expert`
what counts experts, and `fsdp` the largest dimension that is left.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any, Callable, NamedTuple, Sequence

import jax
from jax.sharding import PartitionSpec as P

from zigzag.errors import ConfigError, did_you_mean, human_bytes
from zigzag.mesh import (
    AXES,
    drop_trivial_axes,
    entry_axes,
    flatten,
    full_spec,
    is_spec,
    spec_axes,
    trimmed,
)
from zigzag.trace import Cost, trace

# Not worth a reduction: a group this many times narrower than what its columns read (low rank,
# few labels), a table with this many times fewer rows than each is long (token types), and what
# only reads raw features or only makes last outputs, below this share of all weights.
NARROW, SHORT, ENDS = 4, 16, 1 / 8
# The bytes that an interconnect carries while one more reduction begins.
LATENCY = 2**18
# The roles of a dimension of a matrix; other leaves are scales and biases.
MATRIX = {"free", "contracted", "indexed", "placed", "batch", "grouped", "inner"}

# The size of the tensor axis while the rule traces a function, which it does without a mesh.
# (jax's own kind of variable: what it has traced is cached by it, too.)
TENSOR_SIZE = jax.make_user_context(1)


@dataclasses.dataclass(frozen=True)
class Decision:
    """Where one leaf lives, and why."""
    spec: P
    reason: str
    is_matrix: bool     # met another value in a product or was indexed; else a scale or a bias
    stacked: bool       # its dimension `pipe` counts layers
    # Its dimensions that are contracted with an activation, and the others of that product.
    matmul_dims: tuple = ((), ())
    reductions: tuple[Cost, ...] = ()   # that its group costs, told by one leaf of the group
    used: P | None = None   # what the loss is given, where an override stores the leaf otherwise

    @property
    def given(self) -> P:
        """The spec that the loss is given the leaf with."""
        return self.spec if self.used is None else self.used


def infer_specs(fn: Callable, params: Any, *args: Any, mesh: Any,
                overrides: Sequence[tuple[str, P]] = (), fsdp_min: int = 4096) -> Any:
    """A PartitionSpec for each leaf of `params`, derived from how `fn(params, *args)` uses it.

    `params` and `args` may be arrays or jax.ShapeDtypeStruct; nothing runs on a device. Leaves
    that are not arrays (an Equinox module's functions) are left as they are, with the spec P().
    `overrides`, a list of (path regex, PartitionSpec), win over the rule. Leaves of fewer than
    `fsdp_min` elements stay whole over fsdp: to gather them costs more time than memory is won."""
    return jax.tree.map(lambda d: d.spec, plan_sharding(
        fn, params, *args, mesh=mesh, overrides=overrides, fsdp_min=fsdp_min))


def plan_sharding(fn: Callable, params: Any, *args: Any, mesh: Any,
                  overrides: Sequence[tuple[str, P]] = (), fsdp_min: int = 4096,
                  tensor_dims: Any = None) -> Any:
    """As infer_specs, with a Decision for each leaf.

    `tensor_dims` is for a model that splits over `tensor` in its own code: a tree like `params`
    of the one dimension of each leaf that this code can be given split, or -1."""
    sizes = {a: 1 for a in AXES} | dict(mesh.shape)
    paths, leaves, tree = flatten(params)
    places = {path: i for i, (path, x) in enumerate(zip(paths, leaves)) if hasattr(x, "shape")}
    arrays = list(places.values())
    code_dims = [None] * len(leaves) if tensor_dims is None else tree.flatten_up_to(tensor_dims)

    def call(values, args):
        merged = list(leaves)
        for i, value in zip(arrays, values):
            merged[i] = value
        return fn(jax.tree.unflatten(tree, merged), *args)

    with TENSOR_SIZE(sizes["tensor"]):
        closed = jax.make_jaxpr(call)([leaves[i] for i in arrays], args)
    choice = _Choice(trace(closed, len(arrays), sizes["tensor"]), sizes["tensor"])
    decisions = [Decision(P(), "not an array", False, False)] * len(leaves)
    for leaf, split in enumerate(choice.splits([code_dims[i] for i in arrays])):
        decisions[arrays[leaf]] = _decide(choice, leaf, split, mesh, fsdp_min)
    shapes = {path: leaves[i].shape for path, i in places.items()}
    for path, pattern, spec in apply_overrides(shapes, overrides, sizes):
        i, stored = places[path], drop_trivial_axes(spec, mesh)
        used = _spec_the_loss_gets(stored, decisions[i], len(leaves[i].shape), code_dims[i])
        decisions[i] = dataclasses.replace(decisions[i], spec=stored, used=used,
                                           reason=f"override {pattern!r}")
    return jax.tree.unflatten(tree, decisions)


# -------------------------------------------------------------------------------------------
# Overrides

def parse_overrides(texts: Sequence[str]) -> list[tuple[str, P]]:
    """--override's 'REGEX=axis,-,axis' as plan_sharding takes them."""
    found = []
    for text in texts:
        pattern, equals, spec = text.rpartition("=")
        if not equals or not pattern:
            raise ConfigError(f"--override {text}: expected REGEX=axis,-,axis: of the weights "
                              f"whose path it finds, the axis that splits each dimension, or -")
        names = [name.strip() for name in spec.split(",")] if spec else []
        for name in names:
            if name not in (*AXES, "-"):
                raise ConfigError(f"--override {text}: the axis {name!r}; expected one of "
                                  f"{', '.join(AXES)}, or -" + did_you_mean(name, AXES))
        found.append((pattern, P(*[None if name == "-" else name for name in names])))
    return found


def apply_overrides(shapes: dict[str, tuple[int, ...]], overrides: Sequence[tuple[str, P]],
                    sizes: dict[str, int]) -> list[tuple[str, str, P]]:
    """(path, pattern, spec) of each weight that an override matches; the last of a path wins."""
    found = []
    for pattern, spec in overrides:
        try:
            hits = [path for path in shapes if re.search(pattern, path)]
        except re.error as e:
            raise ConfigError(f"override {pattern!r} is not a regular expression: {e}") from None
        if not hits:
            raise ConfigError(f"override {pattern!r} matches no parameter"
                              + did_you_mean(pattern, shapes))
        for path in hits:
            _check_spec(path, shapes[path], spec, sizes)
            found.append((path, pattern, spec))
    return found


def _check_spec(path, shape, spec, sizes):
    if len(spec) > len(shape):
        raise ConfigError(f"{path}: {spec} has {len(spec)} dimensions, the weight has "
                          f"{len(shape)}")
    seen = set()
    for dim, entry in zip(shape, spec):
        names = entry_axes(entry)
        for name in names:
            if name not in AXES:
                raise ConfigError(f"{path}: {spec} names the axis {name!r}; the axes are "
                                  f"{', '.join(AXES)}" + did_you_mean(name, AXES))
            if name in seen:
                raise ConfigError(f"{path}: {spec} names the axis {name!r} twice")
            seen.add(name)
        if dim % (parts := math.prod(sizes[a] for a in names)):
            raise ConfigError(f"{path}: {spec} splits {dim} into {parts}, which does not divide")


def _spec_the_loss_gets(stored, decision, rank, code_dim):
    """How a loss is given a weight that an override stores otherwise. Layers go to their stages
    and experts to their devices as the rule has it. `tensor` is as the override says, unless the
    model's code splits another dimension; and so is `fsdp`, but on the dimension that counts
    layers or experts, of which each device uses all that are its own. What else the override
    splits is gathered before the loss sees it."""
    entries = []
    for d, (axis, rule) in enumerate(zip(full_spec(stored, rank), full_spec(decision.given, rank))):
        if rule in ("pipe", "expert"):
            axis = rule
        elif not (axis == "tensor" and code_dim in (None, d)
                  or axis == "fsdp" and not (decision.stacked and d == 0)):
            axis = None
        entries.append(axis)
    return trimmed(entries)


# -------------------------------------------------------------------------------------------
# The choice for the tensor axis

class _Split(NamedTuple):
    """Which dimension of a leaf `tensor` splits, and why."""
    dim: int | None
    reason: str
    reductions: tuple[Cost, ...] = ()


Dim = tuple[int, int]       # a leaf, and which dimension of it


class _Choice:
    """Which groups are split over `tensor`."""

    def __init__(self, facts, shards):
        self.facts, self.shards = facts, shards
        self.sizes = [math.prod(shape) for shape in facts.shapes]
        self.members: dict[int, list[Dim]] = {}     # of each group
        for leaf, groups in enumerate(facts.groups):
            for d, group in enumerate(groups):
                if "stacked" not in facts.roles[leaf].get(d, ()):
                    self.members.setdefault(group, []).append((leaf, d))
        self.read = facts.groups_with("contracted")
        self.raw = self.read - facts.groups_with("free", "batch", "grouped", "entry", "inner")
        # Experts: matched one to one with a dimension of what they meet, never contracted (heads
        # that meet a weight of their own are, by the output's).
        self.experts = facts.groups_with("batch") - self.read
        self.onward: dict[int, set[int]] = {}       # where alone the split of a group can go on
        for a, b, only_way in facts.reshards:
            if only_way:
                self.onward.setdefault(a, set()).add(b)
        self.forbidden = self.forbid_tables() | facts.forbidden
        # What is sent on only to where it cannot stay split is not split either.
        while new := {a: self.forbidden[min(bs)] for a, bs in self.onward.items()
                      if a not in self.forbidden and bs <= self.forbidden.keys()}:
            self.forbidden |= new
        # Groups of the same form (one a layer, say) count together.
        self.size_by_form = {}
        for members in self.members.values():
            form = self.form(members)
            self.size_by_form[form] = self.size_by_form.get(form, 0) + self.size(members)

    def size(self, members):
        return sum(self.sizes[leaf] for leaf, _ in members)

    def form(self, members):
        return tuple(sorted((self.facts.shapes[leaf], d) for leaf, d in members))

    def forbid_tables(self):
        """Of tables whose rows are added up one is split: the one that is an output too, or else
        the largest. A second would be a second reduction, for positions."""
        sums = []
        for tables in self.facts.added_tables:
            hit = [s for s in sums if s & tables]
            sums = [s for s in sums if not s & tables] + [set(tables).union(*hit)]
        why = "its rows are added to those of a larger table, whose reduction would be one more"
        facts, forbidden = self.facts, {}
        for tables in filter(None, sums):
            best = max(tables, key=lambda t: ("free" in facts.roles[t[0]][t[1]],
                                              facts.shapes[t[0]][t[1]], -facts.first_use[t[0]],
                                              t[1]))
            forbidden |= {facts.groups[leaf][d]: why for leaf, d in tables - {best}}
        return forbidden

    def splits(self, code_dims):
        """What is split of each leaf, at most one dimension; only the given one, where a model's
        code gives it."""
        if self.shards == 1:
            return [_Split(None, "")] * len(self.sizes)
        ranked, refused = [], {}
        for group, members in self.members.items():
            if why := self.refuse(group, members):
                refused[group] = why
                continue
            size = self.size(members)
            when = min((self.facts.first_use.get(leaf, math.inf), d) for leaf, d in members)
            price = sum(c.bytes + LATENCY * c.count for c in self.facts.costs.get(group, ()))
            ranked.append((price / size, -size, when, group))
        chosen = {}
        for group in self.arriving(self.independent(sorted(ranked)), refused):
            reductions = tuple(c for c in self.facts.costs.get(group, ()) if c.is_reduction)
            for leaf, d in self.members[group]:
                if code_dims[leaf] not in (None, d):
                    other = "another" if code_dims[leaf] >= 0 else "no"
                    chosen[leaf] = _Split(
                        None, f"whole: the model's code splits {other} dimension of it")
                else:
                    chosen[leaf] = _Split(d, self.why_split(leaf, d), reductions)
                    reductions = ()
        return [chosen.get(leaf) or _Split(None, self.why_whole(leaf, refused))
                for leaf in range(len(self.sizes))]

    def independent(self, ranked):
        """Groups of which no two share a weight: the cheapest first; then one of about the same
        price takes the place of those that it excludes where it splits a quarter more."""
        groups = {group: (ratio, -less) for ratio, less, _, group in ranked}
        owner = {}     # of each leaf
        for again in (False, True, True):
            for group, (ratio, size) in groups.items():
                out = {owner[leaf] for leaf, _ in self.members[group] if leaf in owner} - {group}
                lost = sum(groups[g][1] for g in out)
                paid = sum(groups[g][0] * groups[g][1] for g in out)
                if not out or again and size > 1.25 * lost and ratio * lost <= 1.25 * paid:
                    owner = {leaf: g for leaf, g in owner.items() if g not in out}
                    owner.update(dict.fromkeys((leaf for leaf, _ in self.members[group]), group))
        return set(owner.values())

    def arriving(self, groups, refused):
        """Without those that are only sliced into what weights read whole: the slices of a fused
        query, key and value stay split, by heads, those of a modulation would be gathered."""
        while True:
            reach = set(groups)
            while new := {a for a, bs in self.onward.items() if bs & reach} - reach:
                reach |= new
            lost = {g for g in groups if g in self.onward and not self.onward[g] & reach
                    and self.onward[g] & self.members.keys()}
            if not lost:
                return groups
            refused.update(dict.fromkeys(lost, "its slices would be gathered again"))
            groups = groups - lost

    # -- refusals
    def refuse(self, group, members):
        """Why a group is not split, whatever its price; or ''."""
        facts = self.facts
        if group not in facts.made or not any(facts.roles[w].get(d) for w, d in members):
            return "it reads what comes in whole"
        if group in self.experts:
            return "it counts experts, whose place is the expert axis"
        for leaf, d in members:
            if facts.shapes[leaf][d] % self.shards:
                return f"{facts.shapes[leaf][d]} does not divide by {self.shards}"
        if group in self.forbidden:
            return self.forbidden[group]
        if len({leaf for leaf, _ in members}) < len(members):
            return "it is two dimensions of one weight"
        return self.not_worth_it(members)

    def not_worth_it(self, members):
        columns, rows, tables = (
            [(w, d) for w, d in members if role in self.facts.roles[w].get(d, ())]
            for role in ("free", "contracted", "indexed"))
        widths = {w: [math.prod(self.facts.shapes[w][d] for d in self.dims(w, role))
                      for role in ("free", "contracted")] for w, _ in members}
        if (columns and all(NARROW * widths[w][0] <= widths[w][1] for w, _ in columns)
                and all(NARROW * widths[w][1] <= widths[w][0] for w, _ in rows)):
            return f"{widths[columns[0][0]][0]} is too narrow to be worth a reduction"
        lengths = [self.facts.shapes[w][d] for w, d in tables]
        if tables and not columns and all(
                SHORT * n <= self.sizes[w] // n for n, (w, _) in zip(lengths, tables)):
            return f"{lengths[0]} rows are not worth a reduction"
        if tables or self.size_by_form[self.form(members)] >= ENDS * sum(self.sizes):
            return ""
        if columns and all(self.groups(w, "contracted") <= self.raw for w, _ in columns):
            return "a small part of the model at its input"
        if rows and all(not self.groups(w, "free") & self.read for w, _ in rows):
            return "a small part of the model at its output"
        return ""

    def dims(self, leaf, role):
        return [d for d, names in self.facts.roles[leaf].items()
                if role in names and "stacked" not in names]

    def groups(self, leaf, role):
        return {self.facts.groups[leaf][d] for d in self.dims(leaf, role)}

    # -- reasons
    def why_split(self, leaf, dim):
        roles = self.facts.roles[leaf].get(dim, set())
        if "indexed" in roles:
            return "table: looked up by row" + (", and used again as a product's columns"
                                                if "free" in roles else "")
        if "contracted" in roles:
            return "row: meets an activation split the same way; its sum is one reduction"
        if "free" in roles:
            return "column: meets a whole activation"
        return "follows the split activation it meets"

    def why_whole(self, leaf, refused):
        groups, roles = self.facts.groups[leaf], self.facts.roles[leaf]
        for role in ("indexed", "free", "grouped", "contracted"):
            for d in sorted(self.dims(leaf, role)):
                if groups[d] in refused:
                    return "whole: " + refused[groups[d]]
        met = set().union(*roles.values()) & MATRIX
        if not met:
            return "whole: it scales, or is added to, what is whole"
        return "whole: " + ("its rows are the same ones each time" if met == {"placed"} else
                            "it meets weights alone" if met == {"inner"} else
                            "it reads and writes what is whole between the layers")

    def expert_dims(self, leaf):
        """The dimensions that count experts, of a leaf that has others: a router has not."""
        roles = self.facts.roles[leaf]
        mine = [d for d, group in enumerate(self.facts.groups[leaf]) if group in self.experts]
        others = [d for d in range(len(self.facts.shapes[leaf]))
                  if d not in mine and not roles.get(d, set()) & {"contracted", "stacked"}]
        return [d for d in mine if others or "batch" in roles.get(d, ())]


# -------------------------------------------------------------------------------------------
# The other axes

def _decide(choice, leaf, split, mesh, fsdp_min):
    sizes = {a: 1 for a in AXES} | dict(mesh.shape)
    shape, roles = choice.facts.shapes[leaf], choice.facts.roles[leaf]
    entries = [None] * len(shape)
    if split.dim is not None:
        entries[split.dim] = "tensor"
    why = [split.reason] if split.reason else []
    stacks = [d for d, names in roles.items() if "stacked" in names]
    for axis, dims, what in (("pipe", stacks, "layers"),
                             ("expert", choice.expert_dims(leaf), "experts")):
        free = [d for d in dims if entries[d] is None]
        if free and shape[free[0]] % sizes[axis] == 0:
            entries[free[0]] = axis
            why += [f"{axis}: it counts {what}"] * (sizes[axis] > 1)
        elif free:
            why.append(f"whole over {axis}: {shape[free[0]]} does not divide by {sizes[axis]}")
    put_on_largest(entries, shape, "fsdp", sizes["fsdp"], fsdp_min)
    if "fsdp" in entries:
        why.append("fsdp: its largest dimension left")
    elif sizes["fsdp"] > 1:
        why.append("whole over fsdp: " + (
            f"fewer than {fsdp_min:,} elements" if math.prod(shape) < fsdp_min
            else f"no other dimension divides by {sizes['fsdp']}"))
    contracted, free = (
        tuple(d for d, names in sorted(roles.items())
              if role in names and not names & {"stacked", "batch"})
        for role in ("contracted", "free"))
    used_as = set().union(*roles.values())
    if "indexed" in used_as or set(contracted) & set(free):
        contracted = free = ()
    return Decision(drop_trivial_axes(P(*entries), mesh),
                    "; ".join(why) or "whole: nothing to split it over",
                    bool(used_as & MATRIX), bool(stacks), (contracted, free), split.reductions)


def put_on_largest(entries: list[Any], shape: tuple[int, ...], axis: str, size: int,
                   fsdp_min: int = 4096) -> None:
    """Put the axis where the largest dimension left is that it divides, if there is one and the
    weight is worth it."""
    free = [d for d, length in enumerate(shape) if entries[d] is None and length % size == 0]
    if size > 1 and free and math.prod(shape) >= fsdp_min:
        entries[max(free, key=lambda d: shape[d])] = axis


# -------------------------------------------------------------------------------------------
# The optimizer's state

def zero1_specs(params: Any, specs: Any, mesh: Any, fsdp_min: int = 4096) -> Any:
    """The specs of an optimizer's state that is split over data too (ZeRO 1), each leaf along its
    largest dimension left."""
    def one(leaf, spec):
        entries = full_spec(spec, len(leaf.shape))
        if "data" not in entries:
            put_on_largest(entries, leaf.shape, "data", dict(mesh.shape)["data"], fsdp_min)
        return trimmed(entries)

    return jax.tree.map(one, params, specs)


def state_specs(optimizer: Any, params: Any, specs: Any) -> Any:
    """Specs for an optax optimizer's state, by tracing its update: a dimension of the state in one
    group with one of a weight's gradient is split with it (a moment's, and the rows of a factored
    one); what is in a group with none, or with several that differ, is whole."""
    state = jax.eval_shape(optimizer.init, params)
    closed = jax.make_jaxpr(lambda s, g: optimizer.update(g, s, g))(state, params)
    leaves, tree = jax.tree.flatten(state)
    groups = trace(closed, len(closed.jaxpr.invars), 1).groups
    home = {}       # of each group, the entries of specs
    for mine, spec in zip(groups[len(leaves):], jax.tree.leaves(specs, is_leaf=is_spec)):
        for group, entry in zip(mine, full_spec(spec, len(mine))):
            home.setdefault(group, set()).add(entry)

    def place(mine):
        entries = []
        for group in mine:
            known = home.get(group, set())
            entry = next(iter(known)) if len(known) == 1 else None
            entries.append(None if entry in entries else entry)
        return trimmed(entries)

    return jax.tree.unflatten(tree, [place(mine) for mine in groups[:len(leaves)]])


# -------------------------------------------------------------------------------------------
# The table

def explain(decisions: Any, params: Any, mesh: Any, zero: bool = False,
            fsdp_min: int = 4096) -> str:
    """The table of what is split where, and why, for a person: of what plan_sharding gives, or
    (then without reasons) infer_specs. Ends with what a device holds (of moments, with `zero`, its
    part over data), and what of it is copies."""
    paths, leaves, _ = flatten(params)
    sizes = {a: 1 for a in AXES} | dict(mesh.shape)
    table, total, moments = [("weight", "shape", "split", "per device", "why")], 0, 0
    copies = {a: {} for a in ("tensor", "fsdp", "pipe") if sizes[a] > 1}    # {why: sizes}
    for path, leaf, d in zip(paths, leaves, jax.tree.leaves(decisions, is_leaf=is_spec)):
        if not hasattr(leaf, "shape"):
            continue
        d = Decision(d, "as given", True, False) if is_spec(d) else d
        size = math.prod(leaf.shape) * leaf.dtype.itemsize
        here = size // math.prod(sizes[a] for a in spec_axes(d.spec))
        total += here
        kept = zero1_specs(leaf, d.spec, mesh, fsdp_min) if zero else d.spec
        moments += 2 * size // math.prod(sizes[a] for a in spec_axes(kept))
        for axis in copies.keys() - spec_axes(d.spec):
            copies[axis].setdefault(_why_copied(d.reason, axis), []).append(here)
        split = ["+".join(entry_axes(e)) or "-" for e in full_spec(d.spec, len(leaf.shape))]
        table.append((path, str(list(leaf.shape)).replace(" ", ""), f"[{','.join(split)}]",
                      human_bytes(here), d.reason))
    lines = _aligned(table)
    lines.append(f"a device holds {human_bytes(total)} of weights, {human_bytes(total)} of "
                 f"gradients and {human_bytes(moments)} of AdamW's two moments: "
                 f"{human_bytes(2 * total + moments)}")
    for axis, reasons in copies.items():
        if held := sum(map(sum, reasons.values())):
            lines.append(f"of the weights {human_bytes(held)} ({held / total:.2%}) are the same "
                         f"on all {sizes[axis]} devices of {axis}:")
        for why, held in sorted(reasons.items(), key=lambda r: -sum(r[1])):
            lines.append(f"{human_bytes(sum(held)):>9} in {len(held)}: {why}")
    return "\n".join(lines)


def _why_copied(reason, axis):
    """What the reason of a decision says of this axis, over which the leaf is whole."""
    parts = reason.split("; ")
    other = {"pipe": "no layer's own", "tensor": parts[0]}.get(axis, reason)
    why = next((part for part in parts if part.startswith(f"whole over {axis}")), other)
    return re.sub("^whole(.*?): ", "", why)


def _aligned(table):
    a, b, c, d = (max(map(len, column)) for column in list(zip(*table))[:4])
    return [f"{path:{a}}  {shape:{b}}  {split:{c}}  {size:>{d}}  {why}".rstrip()
            for path, shape, split, size, why in table]
