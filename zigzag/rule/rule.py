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

import dataclasses
import itertools
import math
import re
from collections import Counter, defaultdict
from typing import Any, Callable, NamedTuple, Sequence

import jax
from jax.sharding import PartitionSpec as P

from zigzag.core.errors import ConfigError, did_you_mean, human_bytes
from zigzag.core.mesh import (
    AXES,
    drop_trivial_axes,
    entry_axes,
    flatten,
    full_spec,
    is_spec,
    shardings,
    spec_axes,
    trimmed,
)
from zigzag.rule.trace import Cost, trace

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
    is_matrix: bool = False     # in a product with another value, or indexed; or a scale or bias
    stacked: bool = False       # its dimension `pipe` counts layers
    # Its dimensions that are contracted with an activation, and the others of that product.
    matmul_dims: tuple = ((), ())
    reductions: tuple[Cost, ...] = ()   # that its group costs, told by one leaf of the group
    used_as: P | None = None    # the spec that the loss uses, where it is another than `spec`
    is_trained: bool = True

    @property
    def used(self) -> P:
        """The spec of the leaf as the loss gets it; `spec` says how it is stored."""
        return self.spec if self.used_as is None else self.used_as


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
    sizes = _axis_sizes(mesh)
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
    decisions = [Decision(P(), "not an array")] * len(leaves)
    for leaf, split in enumerate(choice.splits([code_dims[i] for i in arrays])):
        decisions[arrays[leaf]] = _decide(choice, leaf, split, mesh, fsdp_min)
    shapes = {path: leaves[i].shape for path, i in places.items()}
    for path, pattern, spec in apply_overrides(shapes, overrides, sizes):
        i, stored = places[path], drop_trivial_axes(spec, mesh)
        used = _spec_the_loss_gets(stored, decisions[i], code_dims[i])
        decisions[i] = dataclasses.replace(decisions[i], spec=stored, used_as=used,
                                           reason=f"override {pattern!r}")
    return jax.tree.unflatten(tree, decisions)


def _axis_sizes(mesh):
    return {a: 1 for a in AXES} | dict(mesh.shape)


# -------------------------------------------------------------------------------------------
# Overrides

def parse_overrides(texts: Sequence[str]) -> list[tuple[str, P]]:
    """--override's 'REGEX=axis,-,axis' as plan_sharding takes them."""
    found = []
    for text in texts:
        pattern, _, spec = text.rpartition("=")
        if not pattern:
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


def _spec_the_loss_gets(stored, decision, code_dim):
    """How a loss is given a weight that an override stores otherwise. Layers go to their stages
    and experts to their devices as the rule has it. `tensor` is as the override says, unless the
    model's code splits another dimension; and so is `fsdp`, but on the dimension that counts
    layers or experts, of which each device uses all that are its own. What else the override
    splits is gathered before the loss sees it."""
    entries = []
    for d, (axis, rule) in enumerate(itertools.zip_longest(stored, decision.used)):
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


class _Choice:
    """Which groups are split over `tensor`."""

    def __init__(self, facts, shards):
        self.facts, self.shards = facts, shards
        self.sizes = [math.prod(shape) for shape in facts.shapes]
        self.members = defaultdict(list)    # of each group, its (leaf, dimension)s
        for leaf, groups in enumerate(facts.groups):
            for d, group in enumerate(groups):
                if "stacked" not in facts.roles[leaf][d]:
                    self.members[group].append((leaf, d))
        self.read = facts.groups_with("contracted")
        self.raw = self.read - facts.groups_with("free", "batch", "grouped", "entry", "inner")
        # Experts: matched one to one with a dimension of what they meet, never contracted (heads
        # that meet a weight of their own are, by the output's).
        self.experts = facts.groups_with("batch") - self.read
        self.onward = defaultdict(set)      # where alone the split of a group can go on
        for a, b, only_way in facts.reshards:
            if only_way:
                self.onward[a].add(b)
        self.forbidden = self.forbid_tables() | facts.forbidden
        # What is sent on only to where it cannot stay split is not split either.
        while new := {a: self.forbidden[min(bs)] for a, bs in self.onward.items()
                      if a not in self.forbidden and bs <= self.forbidden.keys()}:
            self.forbidden |= new
        # Groups of the same form (one a layer, say) count together.
        self.size_by_form = Counter()
        for group in self.members:
            self.size_by_form[self.form(group)] += self.size(group)

    def size(self, group):
        """How many elements its weights have."""
        return sum(self.sizes[leaf] for leaf, _ in self.members[group])

    def price(self, group):
        """What its reductions cost, for each of those elements."""
        paid = sum(c.bytes + LATENCY * c.count for c in self.facts.costs[group])
        return paid / self.size(group)

    def form(self, group):
        return tuple(sorted((self.facts.shapes[leaf], d) for leaf, d in self.members[group]))

    def forbid_tables(self):
        """Of tables whose rows are added up one is split: the one that is an output too, or else
        the largest. A second would be a second reduction, for positions."""
        facts, forbidden, added = self.facts, {}, {}    # added: of each table, all of its sum
        for tables in facts.added_tables:
            tables = tables.union(*[added[t] for t in tables if t in added])
            added.update(dict.fromkeys(tables, tables))
        why = "its rows are added to those of a larger table, whose reduction would be one more"

        def rank(table):
            leaf, d = table
            return "free" in facts.roles[leaf][d], facts.shapes[leaf][d], -facts.first_use[leaf], d

        for tables in added.values():
            others = tables - {max(tables, key=rank)}
            forbidden |= {facts.groups[leaf][d]: why for leaf, d in others}
        return forbidden

    def splits(self, code_dims):
        """What is split of each leaf, at most one dimension; only the given one, where a model's
        code gives it."""
        if self.shards == 1:
            return [_Split(None, "")] * len(self.sizes)
        refused = {group: why for group in self.members if (why := self.refuse(group))}
        # (What the code can be given nothing of must not take the place of what it can.)
        ranked = [group for group in self.ranked(refused)
                  if any(code_dims[leaf] in (None, d) for leaf, d in self.members[group])]
        chosen = {}
        for group in self.arriving(self.begun(self.independent(ranked), refused), refused):
            reductions = tuple(c for c in self.facts.costs[group] if c.is_reduction)
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

    def ranked(self, refused):
        """The other groups, the cheapest first; of equal ones the larger, then the one used
        first."""
        def rank(group):
            first_use = min((self.facts.first_use.get(leaf, math.inf), d)
                            for leaf, d in self.members[group])
            return self.price(group), -self.size(group), first_use, group

        return sorted(self.members.keys() - refused.keys(), key=rank)

    def independent(self, ranked):
        """Groups of which no two share a weight: the cheapest first; then one of about the same
        price takes the place of those that it excludes where it splits a quarter more."""
        owner = {}     # of each leaf
        for again in (False, True, True):
            for group in ranked:
                leaves = [leaf for leaf, _ in self.members[group]]
                out = {owner[leaf] for leaf in leaves if leaf in owner} - {group}
                lost = sum(self.size(g) for g in out)
                paid = sum(self.price(g) * self.size(g) for g in out)
                if not out or (again and self.size(group) > 1.25 * lost
                               and self.price(group) * lost <= 1.25 * paid):
                    owner = {leaf: g for leaf, g in owner.items() if g not in out}
                    owner |= dict.fromkeys(leaves, group)
        return set(owner.values())

    def begun(self, groups, refused):
        """Without those that weights only read, of slices or joined parts of what is not split:
        four neighbours of a residual stream side by side."""
        reach = groups & self.facts.groups_with("free", "indexed", "batch", "grouped")
        while new := {b for a, b, _ in self.facts.reshards if a in reach} - reach:
            reach |= new
        refused.update(dict.fromkeys(groups - reach, "it reads what comes in whole"))
        return groups & reach

    def arriving(self, groups, refused):
        """Without those that are only sliced into what weights read whole: the slices of a fused
        query, key and value stay split, by heads, those of a modulation would be gathered."""
        while True:
            reach = set(groups)
            while new := {a for a, bs in self.onward.items() if bs & reach} - reach:
                reach |= new
            lost = {g for g in groups
                    if self.onward[g] & self.members.keys() and not self.onward[g] & reach}
            if not lost:
                return groups
            refused.update(dict.fromkeys(lost, "its slices would be gathered again"))
            groups = groups - lost

    # -- refusals
    def refuse(self, group):
        """Why a group is not split, whatever its price; or ''."""
        facts, members = self.facts, self.members[group]
        if group not in facts.made or not any(facts.roles[w][d] for w, d in members):
            return "it reads what comes in whole"
        if group in self.experts:
            return "it counts experts, whose place is the expert axis"
        for leaf, d in members:
            if facts.shapes[leaf][d] % self.shards:
                return f"{facts.shapes[leaf][d]} does not divide by {self.shards}"
        if group in self.forbidden:
            return self.forbidden[group]
        if len(dict(members)) < len(members):
            return "it is two dimensions of one weight"
        return self.not_worth_it(group)

    def not_worth_it(self, group):
        dim = dict(self.members[group])     # of each of its weights
        columns, rows, tables = ([w for w, d in dim.items() if role in self.facts.roles[w][d]]
                                 for role in ("free", "contracted", "indexed"))
        makes, reads = ({w: math.prod(self.facts.shapes[w][d] for d in self.dims(w, role))
                         for w in columns + rows} for role in ("free", "contracted"))
        if (columns and all(NARROW * makes[w] <= reads[w] for w in columns)
                and all(NARROW * reads[w] <= makes[w] for w in rows)):
            return f"{makes[columns[0]]} is too narrow to be worth a reduction"
        lengths = [self.facts.shapes[w][dim[w]] for w in tables]
        if tables and not columns and all(
                SHORT * n <= self.sizes[w] // n for n, w in zip(lengths, tables)):
            return f"{lengths[0]} rows are not worth a reduction"
        has, sent = 4 * self.size(group), sum(c.bytes for c in self.facts.costs[group])
        if tables and not columns and has < LATENCY and sent > SHORT * has:
            return f"{lengths[0]} rows, each looked up often, are not worth a reduction"
        if tables or self.size_by_form[self.form(group)] >= ENDS * sum(self.sizes):
            return ""
        if columns and all(self.groups(w, "contracted") <= self.raw for w in columns):
            return "a small part of the model at its input"
        if rows and not any(self.groups(w, "free") & self.read for w in rows):
            return "a small part of the model at its output"
        return ""

    def dims(self, leaf, role):
        return [d for d, names in sorted(self.facts.roles[leaf].items())
                if role in names and "stacked" not in names]

    def groups(self, leaf, role):
        return {self.facts.groups[leaf][d] for d in self.dims(leaf, role)}

    # -- reasons
    def why_split(self, leaf, dim):
        roles = self.facts.roles[leaf][dim]
        if "indexed" in roles:
            return "table: looked up by row" + (", and used again as a product's columns"
                                                if "free" in roles else "")
        if "contracted" in roles:
            return "row: meets an activation split the same way; its sum is one reduction"
        if "free" in roles:
            return "column: meets a whole activation"
        return "follows the split activation it meets"

    def why_whole(self, leaf, refused):
        groups, met = self.facts.groups[leaf], self.matrix_roles(leaf)
        for role in ("indexed", "free", "grouped", "contracted"):
            for d in self.dims(leaf, role):
                if groups[d] in refused:
                    return "whole: " + refused[groups[d]]
        if not met:
            return "whole: it scales, or is added to, what is whole"
        return "whole: " + ("its rows are the same ones each time" if met == {"placed"} else
                            "it meets weights alone" if met == {"inner"} else
                            "it reads and writes what is whole between the layers")

    def matrix_roles(self, leaf):
        return set().union(*self.facts.roles[leaf].values()) & MATRIX

    def expert_dims(self, leaf):
        """The dimensions that count experts, of a leaf that has others: a router has not."""
        groups, roles = self.facts.groups[leaf], self.facts.roles[leaf]
        mine = [d for d, group in enumerate(groups) if group in self.experts]
        others = [d for d, group in enumerate(groups)
                  if group not in self.experts and not roles[d] & {"contracted", "stacked"}]
        return [d for d in mine if others or "batch" in roles[d]]


# -------------------------------------------------------------------------------------------
# The other axes

def _decide(choice, leaf, split, mesh, fsdp_min):
    sizes = _axis_sizes(mesh)
    shape, roles = choice.facts.shapes[leaf], choice.facts.roles[leaf]
    entries = ["tensor" if d == split.dim else None for d in range(len(shape))]
    why = [split.reason]
    stacks = [d for d, names in roles.items() if "stacked" in names]
    for axis, dims, what in (("pipe", stacks, "layers"),
                             ("expert", choice.expert_dims(leaf), "experts")):
        free = [d for d in dims if entries[d] is None]
        if free and shape[free[0]] % sizes[axis] == 0:
            entries[free[0]] = axis
            why += [f"{axis}: it counts {what}"] * (sizes[axis] > 1)
        elif free:
            why.append(f"whole over {axis}: {shape[free[0]]} does not divide by {sizes[axis]}")
    _put_on_largest(entries, shape, "fsdp", sizes["fsdp"], fsdp_min)
    if "fsdp" in entries:
        why.append("fsdp: its largest dimension left")
    elif sizes["fsdp"] > 1:
        why.append("whole over fsdp: " + (
            f"fewer than {fsdp_min:,} elements" if math.prod(shape) < fsdp_min
            else f"no other dimension divides by {sizes['fsdp']}"))
    contracted, free = (
        tuple(d for d in choice.dims(leaf, role) if "batch" not in roles[d])
        for role in ("contracted", "free"))
    matrix_roles = choice.matrix_roles(leaf)
    if "indexed" in matrix_roles or set(contracted) & set(free):
        contracted = free = ()
    return Decision(drop_trivial_axes(P(*entries), mesh),
                    "; ".join(filter(None, why)) or "whole: nothing to split it over",
                    bool(matrix_roles), bool(stacks), (contracted, free), split.reductions)


def _put_on_largest(entries, shape, axis, size, fsdp_min):
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
        entries = full_spec(spec, leaf.ndim)
        if "data" not in entries:
            _put_on_largest(entries, leaf.shape, "data", mesh.shape["data"], fsdp_min)
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
    home = defaultdict(set)     # of each group, the entries of specs
    for mine, spec in zip(groups[len(leaves):], jax.tree.leaves(specs)):
        for group, entry in zip(mine, full_spec(spec, len(mine))):
            home[group].add(entry)

    placed = []
    for mine in groups[:len(leaves)]:
        entries = []
        for group in mine:
            entry, *others = home[group] or [None]
            entries.append(None if others or entry in entries else entry)
        placed.append(trimmed(entries))
    return jax.tree.unflatten(tree, placed)


def state_shapes(optimizer: Any, params: Any, specs: Any, mesh: Any) -> Any:
    """Shapes of an optimizer's state, with their places on the mesh: that of weights `params` whose
    moments have these specs."""
    state = jax.eval_shape(optimizer.init, params)
    return jax.tree.map(lambda x, place: x.update(sharding=place), state,
                        shardings(state_specs(optimizer, params, specs), mesh))


# -------------------------------------------------------------------------------------------
# The table

def explain(decisions: Any, params: Any, mesh: Any, zero: bool = False,
            fsdp_min: int = 4096, state: Any = None, is_short: bool = False) -> str:
    """The table of what is split where, and why, for a person: of what plan_sharding gives, or
    (then without reasons) infer_specs. Ends with what a device holds and what of it is copies. The
    optimizer's state is `state` (shapes with shardings); without it AdamW's, with `zero` split over
    data. `is_short` puts all small weights that nothing splits into one line."""
    paths, leaves, _ = flatten(params)
    sizes = _axis_sizes(mesh)
    table, total = [], 0
    gradients = moments = 0     # of what is trained
    copies = {a: defaultdict(list)      # {why: sizes}
              for a in ("tensor", "fsdp", "pipe") if sizes[a] > 1}
    for path, leaf, d in zip(paths, leaves, jax.tree.leaves(decisions)):
        if not hasattr(leaf, "shape"):
            continue
        d = Decision(d, "as given") if is_spec(d) else d
        size = math.prod(leaf.shape) * leaf.dtype.itemsize
        here = size // math.prod(sizes[a] for a in spec_axes(d.spec))
        total += here
        kept = zero1_specs(leaf, d.spec, mesh, fsdp_min) if zero else d.spec
        gradients += here * d.is_trained
        moments += 2 * size // math.prod(sizes[a] for a in spec_axes(kept)) * d.is_trained
        for axis in copies.keys() - spec_axes(d.spec):
            copies[axis][_why_copied(d.reason, axis)].append(here)
        split = ["+".join(entry_axes(e)) or "-" for e in full_spec(d.spec, leaf.ndim)]
        is_small = not (spec_axes(d.spec) or d.is_matrix)
        table.append((path, str(list(leaf.shape)).replace(" ", ""), f"[{','.join(split)}]",
                      here, d.reason, is_small))
    lines = _aligned(table, total / 100 if is_short else 0)
    what = "AdamW's two moments" if state is None else "the optimizer's state"
    if state is not None:
        moments = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
                      for x in jax.tree.leaves(state))
    lines.append(f"a device holds {human_bytes(total)} of weights, {human_bytes(gradients)} of "
                 f"gradients and {human_bytes(moments)} of {what}: "
                 f"{human_bytes(total + gradients + moments)}")
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


def _aligned(rows, most):
    """Rows of (path, shape, split, bytes, why, whether it is a small whole weight) as lines. If
    there are several small ones of at most `most` bytes, they share the last line."""
    small = [row for row in rows if row[5] and row[3] <= most]
    small = small if len(small) > 1 else []
    table = [("weight", "shape", "split", "per device", "why"),
             *((*row[:3], human_bytes(row[3]), row[4]) for row in rows if row not in small)]
    if small:
        names = [*dict.fromkeys(path.split(".")[-1] for path, *_ in small)]
        more = f" and {len(names) - 6} more" if len(names) > 6 else ""
        table.append((f"{len(small)} small weights", "", "whole",
                      human_bytes(sum(row[3] for row in small)),
                      f"scales and biases: {', '.join(names[:6])}{more}"))
    a, b, c, d, _ = (max(map(len, column)) for column in zip(*table))
    return [f"{path:{a}}  {shape:{b}}  {split:{c}}  {size:>{d}}  {why}".rstrip()
            for path, shape, split, size, why in table]
