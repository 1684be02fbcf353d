"""The rule decides how to split any function's weights, based on how the function uses them.

                 x [B, T, D]          unsplit: every device along tensor has all of it
                   |
       w_up   [D, F | F | F | F]      column: each device computes its own part of F, sends nothing
                   |
          h [B, T, F | F | F | F]     split
                   |
       w_down [F | F | F | F, D]      row: each device has a partial sum of all of y
                   |
                 y [B, T, D]          unsplit again, after one all-reduce

The rule chooses tensor splits in four steps (`_Choice.split`). Here is how they go for the two
matrices above, with a residual connection, x + y:

  1. Groups. trace.py determines which dimensions must be split together: D of x, w_up, w_down and y
     is one group, and F of w_up, h and w_down is another.
  2. Rejections (`refuse`), before any pricing. The rule rejects D because no weight has produced it
     when w_up first reads it. That is so in every residual stream that begins as data or as rows of
     a table. Slicing x along D is free, but each product that reads D would need a reduction. The
     rule also rejects dimensions whose length the axis doesn't divide, dimensions inside an
     attention head, dimensions that count experts (which have their own axis), and dimensions too
     small to be worth a reduction (`not_worth_it`), such as a low rank or a few labels.
  3. Prices (`price`) of the remaining groups, the candidates:

         (bytes + 256 KiB x reductions) / weight elements

     Bytes and reductions are what devices would send per step because the group is split. The
     elements are the total for all weights with a dimension in the group. The 256 KiB represents
     the startup cost of one more reduction. F costs a reduction of y, because w_down sums over F,
     plus one of x's gradient if x has one; here x is data. With B T = 64, D = 64 and F = 256 in
     float32, that comes to (16 KiB + 256 KiB) / 32,768 = 8.5. If D were a candidate, it would cost
     a reduction of h and one of h's gradient: (128 KiB + 512 KiB) / 32,768 = 20.
  4. Choice (`ranked`, `independent`). From the cheapest candidate up, take each one that shares no
     weight with a group already taken. Ties go to the group with more weight elements, then to the
     one used first. After that, a group at about the same price may replace the groups that exclude
     it, if it splits 25% more weight elements. Finally, `begun` and `arriving` drop groups whose
     split doesn't come from another split, or doesn't lead to one.

Taking F makes w_up a column and w_down a row. Columns and rows alternate automatically, because
tensor splits only one dimension per weight. The rule doesn't look at names.

The other axes need no prices: `pipe` splits the dimension that counts layers, `expert` the one that
counts experts, and `fsdp` the largest remaining dimension.

All of this is for functions without a weight table. If a network has a table, its rows determine
which dimension each axis splits, and the rule has nothing to choose.
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
    axis_sizes,
    devices_over,
    drop_trivial_axes,
    entry_axes,
    flatten,
    full_spec,
    is_spec,
    spec_axes,
    trimmed,
    with_shardings,
    within,
)
from zigzag.parallel.trace import reached, trace

# Not worth a reduction: a group NARROW times narrower than its columns' inputs (a low rank, a few
# labels); a table with SHORT times fewer rows than elements per row (token types); and weights that
# only read raw features or only produce final outputs, if they're less than ENDS of all weights.
NARROW, SHORT, ENDS = 4, 16, 1 / 8
# The startup cost of one more reduction, in bytes.
LATENCY = 2**18


@dataclasses.dataclass(frozen=True)
class Decision:
    """How a single leaf is split, and why."""
    spec: P
    reason: str
    is_matrix: bool = False     # multiplied with another value or looked up; False: scale or bias
    stacked: bool = False       # whether dimension 0 counts layers, so that `pipe` may split it
    # The dimensions contracted with an activation, and the dimensions left in the product.
    matmul_dims: tuple = ((), ())
    in_loss: P | None = None    # the spec that the loss uses, if it differs from `spec`
    is_trained: bool = True

    @property
    def spec_in_loss(self) -> P:
        """The leaf's spec as the loss receives it; `spec` is the stored leaf's."""
        return self.spec if self.in_loss is None else self.in_loss


def matrices_of_layers(decisions: Any) -> Any:
    """Return the matmul_dims of each layer matrix (or of every matrix, if there are no layers), and
    None for all other weights. Muon orthogonalizes the updates of these matrices."""
    has_layers = any(d.stacked for d in jax.tree.leaves(decisions))
    return jax.tree.map(lambda d: d.matmul_dims if all(d.matmul_dims) and (
        d.stacked or not has_layers) else None, decisions)


def infer_specs(fn: Callable, params: Any, *args: Any, mesh: Any,
                overrides: Sequence[tuple[str, P]] = (), fsdp_min: int = 4096) -> Any:
    """Infer a PartitionSpec for each leaf of `params` from how `fn(params, *args)` uses it.

    `params` and `args` may be arrays or jax.ShapeDtypeStruct; nothing runs on a device. Leaves
    that aren't arrays (an Equinox module's functions) get the spec P(). `overrides`, a list of
    (path regex, PartitionSpec), take precedence over the rule. fsdp doesn't split leaves with fewer
    than `fsdp_min` elements: gathering them would cost more time than the memory is worth."""
    return jax.tree.map(lambda d: d.spec, plan_sharding(
        fn, params, *args, mesh=mesh, overrides=overrides, fsdp_min=fsdp_min))


def plan_sharding(fn: Callable, params: Any, *args: Any, mesh: Any,
                  overrides: Sequence[tuple[str, P]] = (), fsdp_min: int = 4096,
                  mesh_axes: Any = None) -> Any:
    """Return a Decision for each leaf of `params`. The arguments are the same as in infer_specs.

    `mesh_axes` is for a model with a weight table, whose code accepts no other split: a tree like
    `params`, holding for each dimension the mesh axis that the leaf's row names, or ''. An axis
    splits that dimension or none at all: none if its size doesn't divide the dimension, or if the
    axis is fsdp and the leaf is small."""
    sizes = axis_sizes(mesh)
    _, leaves, tree = flatten(params)
    choice, places = _choice(fn, params, args, sizes["tensor"])
    rows = choice.rows() if mesh_axes is None else (
        ({axis: [d for d, name in enumerate(row) if name == axis] for axis in AXES},
         "as its row says") for row in tree.flatten_up_to(mesh_axes))
    decisions = [Decision(P(), "not an array")] * len(leaves)
    for leaf, (i, (dims, whole)) in enumerate(zip(places.values(), rows)):
        decisions[i] = _decide(choice.facts, leaf, dims, whole, mesh, fsdp_min)
    shapes = {path: leaves[i].shape for path, i in places.items()}
    for path, pattern, spec in apply_overrides(shapes, overrides, sizes):
        i, stored = places[path], drop_trivial_axes(spec, mesh)
        used = _spec_the_loss_gets(stored, decisions[i], mesh_axes is not None)
        decisions[i] = dataclasses.replace(decisions[i], spec=stored, in_loss=used,
                                           reason=f"override {pattern!r}")
    return jax.tree.unflatten(tree, decisions)


def _choice(fn, params, args, shards):
    """Return (the _Choice for a function, {path: index of the leaf} for all leaves that are
    arrays)."""
    paths, leaves, tree = flatten(params)
    places = {path: i for i, (path, x) in enumerate(zip(paths, leaves)) if hasattr(x, "shape")}

    def call(values, args):
        merged = list(leaves)
        for i, value in zip(places.values(), values):
            merged[i] = value
        return fn(jax.tree.unflatten(tree, merged), *args)

    with within(tensor=shards):
        closed = jax.make_jaxpr(call)([leaves[i] for i in places.values()], args)
    return _Choice(trace(closed, len(places), shards), shards), places


class Group(NamedTuple):
    """Dimensions that can only be split together, and the rule's verdict on them."""
    members: list[tuple[str, int, str]]     # (path of the weight, its dimension, the roles)
    elements: int           # the total elements of these weights
    reductions: int         # collectives per step if the group is split
    bytes: float            # the total bytes in these collectives
    price: float
    verdict: str            # split, or why not


def groups(fn: Callable, params: Any, *args: Any, shards: int) -> list[Group]:
    """List the groups of a function's dimensions for learn/prices.py: split groups first, then the
    others, each sorted by price (step 3 of the rule)."""
    (choice, places), found = _choice(fn, params, args, shards), []
    paths, facts = list(places), choice.facts
    _, verdicts = choice.split()
    for group, members in choice.members.items():
        named = [(paths[leaf], d, " ".join(sorted(facts.roles[leaf][d]))) for leaf, d in members]
        found.append(Group(named, choice.size(group), facts.reductions[group], facts.bytes[group],
                           choice.price(group), verdicts[group]))
    return sorted(found, key=lambda g: (g.verdict != "split", g.price, g.members))


# -------------------------------------------------------------------------------------------
# The choice for the tensor axis

class _Choice:
    """Chooses the groups to split over `tensor`, based on the facts about a function."""

    def __init__(self, facts, shards):
        self.facts, self.shards = facts, shards
        self.sizes = [math.prod(shape) for shape in facts.shapes]
        self.members = defaultdict(list)    # {group: its (leaf, dimension) pairs}
        for leaf, groups in enumerate(facts.groups):
            for d, group in enumerate(groups):
                if "stacked" not in facts.roles[leaf][d]:
                    self.members[group].append((leaf, d))
        self.read = facts.groups_with("contracted")
        self.raw = self.read - facts.groups_with("free", "batch", "grouped", "entry", "inner")
        # Groups that count experts: batch dimensions of matmuls that are never contracted. Heads
        # with one weight each are also a batch dimension, but the output weight contracts them.
        self.experts = facts.groups_with("batch") - self.read
        self.forbidden = self.forbid_tables() | facts.forbidden
        # If a group's split could only continue as a forbidden group, forbid it too.
        while new := {a: self.forbidden[min(bs)] for a, bs in facts.onward.items()
                      if a not in self.forbidden and bs <= self.forbidden.keys()}:
            self.forbidden |= new
        # Groups of the same form (equal shapes and dimensions, for example one group per layer)
        # share a single count of weight elements.
        self.size_by_form = Counter()
        for group in self.members:
            self.size_by_form[self.form(group)] += self.size(group)

    def size(self, group):
        """Return the total elements of all weights with a dimension in the group."""
        return sum(self.sizes[leaf] for leaf, _ in self.members[group])

    def price(self, group):
        """Return (bytes + 256 KiB x reductions) / weight elements. The costs include reshards,
        which send a value so that it can be split along a different dimension."""
        paid = self.facts.bytes[group] + LATENCY * self.facts.reductions[group]
        return paid / self.size(group)

    def form(self, group):
        return tuple(sorted((self.facts.shapes[leaf], d) for leaf, d in self.members[group]))

    def forbid_tables(self):
        """Return {group: reason} for tables that must stay whole because a different table is
        split. If a function adds rows of several tables (tokens, positions), the rule splits only
        one: the table that is also the output head, otherwise the one with the most rows. Splitting
        a second table would cost a second reduction."""
        facts, forbidden, added = self.facts, {}, {}    # added: {table: all tables of its sum}
        for tables in facts.added_tables:
            tables = tables.union(*[added[t] for t in tables if t in added])
            added.update(dict.fromkeys(tables, tables))
        why = "it is added to a larger table, and splitting both would cost two reductions"

        def rank(table):
            leaf, d = table
            return "free" in facts.roles[leaf][d], facts.shapes[leaf][d], -facts.first_use[leaf], d

        for tables in added.values():
            others = tables - {max(tables, key=rank)}
            forbidden |= {facts.groups[leaf][d]: why for leaf, d in others}
        return forbidden

    def split(self):
        """Return ({leaf: the dimension that tensor splits}, {group: "split", or why not})."""
        refused = {group: why for group in self.members if (why := self.refuse(group))}
        begun = self.begun(self.independent(self.ranked(refused)), refused)
        groups = self.arriving(begun, refused)
        verdicts = dict.fromkeys(self.members, "a cheaper group splits a weight in it") | refused
        verdicts |= dict.fromkeys(groups, "split")
        return {leaf: d for group in groups for leaf, d in self.members[group]}, verdicts

    def ranked(self, refused):
        """Return all groups that aren't in `refused`, cheapest first. Ties go to the group with
        more weight elements, then to the one used first."""
        def rank(group):
            first_use = min((self.facts.first_use.get(leaf, math.inf), d)
                            for leaf, d in self.members[group])
            return self.price(group), -self.size(group), first_use, group

        return sorted(self.members.keys() - refused.keys(), key=rank)

    def independent(self, ranked):
        """Choose groups so that no two share a weight. The first round picks greedily, cheapest
        first. In two more rounds, a group may replace the groups it shares a weight with (`out`) if
        it covers more than 1.25 times as many weight elements and its price is at most 1.25 times
        their average price."""
        owner = {}     # {leaf: the chosen group that splits it}
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
        """Drop groups that no weight produces, unless a reshard reaches them from a group that a
        weight produces. For example, suppose a matrix reads four neighboring positions of a
        residual stream side by side. Its input would be split, although nothing before it is."""
        reach = reached(groups & self.facts.groups_with("free", "indexed", "batch", "grouped"),
                        self.facts.reshards)
        refused.update(dict.fromkeys(groups - reach, "its input is not split"))
        return groups & reach

    def arriving(self, groups, refused):
        """Drop groups whose slices would all have to be gathered because none of the groups they
        lead to is split. Slices of a fused query, key and value stay split, by heads; slices of a
        modulation (the scale and shift of an unsplit stream) would not."""
        onward = self.facts.onward
        back = {(b, a) for a, bs in onward.items() for b in bs}
        while lost := {g for g in groups if onward[g] & self.members.keys()
                       and not onward[g] & reached(groups, back)}:
            refused.update(dict.fromkeys(lost, "its slices would be gathered again"))
            groups = groups - lost
        return groups

    def rows(self):
        """List ({axis: its candidate dimensions}, why tensor splits none) for each leaf."""
        (chosen, verdicts), rows = self.split() if self.shards > 1 else ({}, {}), []
        for leaf, groups in enumerate(self.facts.groups):
            dims = {"tensor": [chosen[leaf]] if leaf in chosen else [],
                    "pipe": self.facts.dims(leaf, "stacked"), "expert": self.expert_dims(leaf),
                    "fsdp": range(len(groups))}
            rows.append((dims, self.why_whole(leaf, verdicts)))
        return rows

    # -- refusals
    def refuse(self, group):
        """Return the reason not to split a group at any price, or '' if it's a candidate."""
        facts, members = self.facts, self.members[group]
        if group not in facts.made or not any(facts.roles[w][d] for w, d in members):
            return "its input is not split"
        if group in self.experts:
            return "it counts experts, which only the expert axis splits"
        for leaf, d in members:
            if facts.shapes[leaf][d] % self.shards:
                return f"{facts.shapes[leaf][d]} does not divide by {self.shards}"
        if group in self.forbidden:
            return self.forbidden[group]
        if len(dict(members)) < len(members):
            return "it is two dimensions of one weight"
        return self.not_worth_it(group)

    def not_worth_it(self, group):
        """If the group is too small to be worth a reduction, return the reason; otherwise ''. A
        group's weights are its columns (which produce it), its rows (which sum over it) and its
        tables (which tokens look up along it)."""
        dim = dict(self.members[group])     # {weight: its dimension in the group}
        columns, rows, tables = ([w for w, d in dim.items() if role in self.facts.roles[w][d]]
                                 for role in ("free", "contracted", "indexed"))
        makes, reads = ({w: math.prod(self.facts.shapes[w][d] for d in self.facts.dims(w, role))
                         for w in columns + rows} for role in ("free", "contracted"))
        if (columns and all(NARROW * makes[w] <= reads[w] for w in columns)
                and all(NARROW * reads[w] <= makes[w] for w in rows)):
            return f"{makes[columns[0]]} is too narrow to be worth a reduction"
        lengths = [self.facts.shapes[w][dim[w]] for w in tables]
        if tables and not columns and all(
                SHORT * n <= self.sizes[w] // n for n, w in zip(lengths, tables)):
            return f"{lengths[0]} rows are not worth a reduction"
        has = 4 * self.size(group)
        if tables and not columns and has < LATENCY and self.facts.bytes[group] > SHORT * has:
            return f"{lengths[0]} rows, each looked up often, are not worth a reduction"
        if tables or self.size_by_form[self.form(group)] >= ENDS * sum(self.sizes):
            return ""
        if columns and all(self.groups(w, "contracted") <= self.raw for w in columns):
            return "a small part of the model at its input"
        if rows and not any(self.groups(w, "free") & self.read for w in rows):
            return "a small part of the model at its output"
        return ""

    def groups(self, leaf, role):
        return {self.facts.groups[leaf][d] for d in self.facts.dims(leaf, role)}

    def why_whole(self, leaf, verdicts):
        """Return the verdict on a dimension of the leaf that a lookup or a matmul uses."""
        for role in ("indexed", "free", "grouped", "contracted"):
            for d in self.facts.dims(leaf, role):
                return verdicts.get(self.facts.groups[leaf][d], "")
        return "it meets nothing that is split" if self.facts.is_matrix(leaf) else (
            "it scales or shifts a whole activation")

    def expert_dims(self, leaf):
        """Return the leaf's dimensions that count experts. A router has none: its only dimensions
        are its experts and the one it contracts."""
        groups, roles = self.facts.groups[leaf], self.facts.roles[leaf]
        mine = [d for d, group in enumerate(groups) if group in self.experts]
        others = [d for d, group in enumerate(groups)
                  if group not in self.experts and not roles[d] & {"contracted", "stacked"}]
        return [d for d in mine if others or "batch" in roles[d]]


# -------------------------------------------------------------------------------------------
# All axes

def _decide(facts, leaf, dims, whole, mesh, fsdp_min):
    """Return the Decision for a leaf. tensor, pipe and expert each split the first available
    dimension in `dims`, and fsdp splits the largest one left. `whole` says why tensor has none."""
    sizes, shape, roles = axis_sizes(mesh), facts.shapes[leaf], facts.roles[leaf]
    entries, why = [None] * len(shape), []
    reasons = {"tensor": _why_split(facts, leaf, dims, whole), "pipe": "pipe: it counts layers",
               "expert": "expert: it counts experts"}
    for axis, reason in reasons.items():
        free = [d for d in dims[axis] if entries[d] is None]
        if free and shape[free[0]] % sizes[axis]:
            reason = f"whole over {axis}: {shape[free[0]]} does not divide by {sizes[axis]}"
        elif free:
            entries[free[0]] = axis
        if sizes[axis] > 1 and (free or axis == "tensor"):
            why.append(reason)
    _put_on_largest(entries, shape, "fsdp", sizes["fsdp"], fsdp_min, dims["fsdp"])
    if "fsdp" in entries:
        why.append("fsdp: gathered where it is used")
    elif sizes["fsdp"] > 1:
        why.append("whole over fsdp: " + (
            f"fewer than {fsdp_min:,} elements" if math.prod(shape) < fsdp_min
            else f"no free dimension divides by {sizes['fsdp']}"))
    contracted, free = (
        tuple(d for d in facts.dims(leaf, role) if "batch" not in roles[d])
        for role in ("contracted", "free"))
    if facts.dims(leaf, "indexed") or set(contracted) & set(free):
        contracted = free = ()
    return Decision(drop_trivial_axes(P(*entries), mesh), "; ".join(why), facts.is_matrix(leaf),
                    bool(facts.dims(leaf, "stacked")), (contracted, free))


def _why_split(facts, leaf, dims, whole):
    """Return the reason why `tensor` splits a dimension of the leaf, or why it splits none."""
    roles = set().union(*[facts.roles[leaf][d] for d in dims["tensor"]])
    if not dims["tensor"]:
        return f"whole: {whole}"
    if "indexed" in roles:
        return "table: looked up by row" + (", and reused as a product's columns"
                                            if "free" in roles else "")
    if "contracted" in roles:
        return "row: meets an activation split the same way; its sum is one reduction"
    if "free" in roles:
        return "column: meets a whole activation"
    return "follows the split activation it meets"


def _put_on_largest(entries, shape, axis, size, fsdp_min, places):
    """Write `axis` into `entries` at the largest unsplit dimension in `places` that `size` divides,
    if there is one and the weight has at least `fsdp_min` elements."""
    free = [d for d in places if entries[d] is None and shape[d] % size == 0]
    if size > 1 and free and math.prod(shape) >= fsdp_min:
        entries[max(free, key=lambda d: shape[d])] = axis


# -------------------------------------------------------------------------------------------
# Overrides

def parse_overrides(texts: Sequence[str]) -> list[tuple[str, P]]:
    """Parse --override values, 'REGEX=axis,-,axis', into (regex, spec) for plan_sharding."""
    found = []
    for text in texts:
        pattern, _, spec = text.rpartition("=")
        if not pattern:
            raise ConfigError(f"--override {text}: expected REGEX=axis,-,axis: a regular "
                              f"expression for paths of weights, and for each dimension the axis "
                              f"that splits it, or -")
        names = [name.strip() for name in spec.split(",")] if spec else []
        found.append((pattern, P(*[None if name == "-" else name for name in names])))
    return found


def apply_overrides(shapes: dict[str, tuple[int, ...]], overrides: Sequence[tuple[str, P]],
                    sizes: dict[str, int]) -> list[tuple[str, str, P]]:
    """List (path, pattern, spec) for each weight that matches an override. If several overrides
    match a path, the last one wins."""
    found = []
    for pattern, spec in overrides:
        try:
            hits = [path for path in shapes if re.search(pattern, path)]
        except re.error as e:
            raise ConfigError(f"override {pattern!r} is not a regular expression: {e}") from None
        if not hits:
            raise ConfigError(f"override {pattern!r} matches no weight"
                              + did_you_mean(pattern, shapes, near=0.5))
        for path in hits:
            if why := _why_refused(shapes[path], spec, sizes):
                raise ConfigError(f"{path}: {spec} {why}")
            found.append((path, pattern, spec))
    return found


def _why_refused(shape, spec, sizes):
    names = [name for entry in spec for name in entry_axes(entry)]
    if len(spec) > len(shape):
        return f"has {len(spec)} dimensions, the weight has {len(shape)}"
    for name in names:
        if name not in AXES:
            return (f"names the axis {name!r}; the axes are {', '.join(AXES)}"
                    + did_you_mean(name, AXES))
    if len(set(names)) < len(names):
        return "names an axis twice"
    for dim, entry in zip(shape, spec):
        if dim % (parts := devices_over(entry_axes(entry), sizes)):
            return f"splits {dim} into {parts}, which does not divide"
    return ""


def _spec_the_loss_gets(stored, decision, has_table):
    """Return the spec that the loss receives for a weight that an override stores as `stored`.
    `pipe`, `expert` and, with a table, `tensor` stay where they'd be without the override. `fsdp`
    stays where the override puts it, except on the dimension that counts layers, because a device
    uses all of its own layers. The weight is gathered over any other axis."""
    entries = []
    for d, (axis, rule) in enumerate(itertools.zip_longest(stored, decision.spec_in_loss)):
        if rule in ("pipe", "expert") or has_table and rule == "tensor":
            axis = rule
        elif not (axis == "tensor" and not has_table
                  or axis == "fsdp" and not (decision.stacked and d == 0)):
            axis = None
        entries.append(axis)
    return trimmed(entries)


# -------------------------------------------------------------------------------------------
# The optimizer's state

def zero1_specs(params: Any, specs: Any, mesh: Any, fsdp_min: int = 4096) -> Any:
    """Return specs for the optimizer state under ZeRO 1: each leaf's spec, plus data on its largest
    unsplit dimension."""
    def one(leaf, spec):
        entries = full_spec(spec, leaf.ndim)
        if "data" not in entries:
            _put_on_largest(entries, leaf.shape, "data", axis_sizes(mesh)["data"], fsdp_min,
                            range(leaf.ndim))
        return trimmed(entries)

    return jax.tree.map(one, params, specs)


def moment_specs(params: Any, decisions: Any, mesh: Any, config: Any) -> Any:
    """Return the specs of an optimizer's moments for trained weights: the weights' own, unless
    --zero 1 splits moments over data."""
    specs = jax.tree.map(lambda d: d.spec, decisions)
    return zero1_specs(params, specs, mesh, config.fsdp_min) if config.zero else specs


def state_specs(optimizer: Any, params: Any, specs: Any) -> Any:
    """Return specs for an optax optimizer's state, inferred by tracing its update. A dimension of
    the state gets the same split as any gradient dimension in its group: for example, the
    dimensions of a moment, and the rows of a factored moment. A dimension stays whole if its group
    contains no gradient, or gradients with different splits."""
    state = jax.eval_shape(optimizer.init, params)
    closed = jax.make_jaxpr(lambda s, g: optimizer.update(g, s, g))(state, params)
    leaves, tree = jax.tree.flatten(state)
    groups = trace(closed, len(closed.jaxpr.invars), 1).groups
    home = defaultdict(set)     # {group: the entries of specs in it}
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
    """Return the shapes of the optimizer's state for weights `params`, each with its sharding on
    the mesh. `specs` are the moments' specs."""
    state = jax.eval_shape(optimizer.init, params)
    return with_shardings(state, state_specs(optimizer, params, specs), mesh)


# -------------------------------------------------------------------------------------------
# The table

def explain(decisions: Any, params: Any, mesh: Any, state: Any = None) -> str:
    """Return a text table of how each weight is split and why, with the bytes per device.
    `decisions` come from plan_sharding, or from infer_specs (then the table has no reasons)."""
    table = [("weight", "shape", "split", "per device", "why")]
    for path, leaf, d, here in _held(decisions, params, mesh):
        split = ["+".join(entry_axes(e)) or "-" for e in full_spec(d.spec, leaf.ndim)]
        table.append((path, str(list(leaf.shape)).replace(" ", ""), f"[{','.join(split)}]",
                      human_bytes(here), d.reason))
    a, b, c, e, _ = (max(map(len, column)) for column in zip(*table))
    return "\n".join([*(f"{path:{a}}  {shape:{b}}  {split:{c}}  {size:>{e}}  {why}".rstrip()
                        for path, shape, split, size, why in table),
                      *held_lines(decisions, params, mesh, state)])


def held_lines(decisions: Any, params: Any, mesh: Any, state: Any = None) -> list[str]:
    """Return lines of text with the bytes per device, and the bytes duplicated on other devices.
    `state` is the optimizer state (shapes with shardings); None counts AdamW's two moments, split
    like their weights."""
    sizes = axis_sizes(mesh)
    total = gradients = 0               # bytes; only trained weights have gradients
    copied = {axis: 0 for axis in ("tensor", "fsdp", "pipe") if sizes[axis] > 1}    # bytes
    for _, _, d, here in _held(decisions, params, mesh):
        total += here
        gradients += here * d.is_trained
        for axis in copied.keys() - spec_axes(d.spec):
            copied[axis] += here
    moments, what = 2 * gradients, "AdamW's two moments"
    if state is not None:
        what = "the optimizer's state"
        moments = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
                      for x in jax.tree.leaves(state))
    return [f"a device holds {human_bytes(total)} of weights, {human_bytes(gradients)} of "
            f"gradients and {human_bytes(moments)} of {what}: "
            f"{human_bytes(total + gradients + moments)}",
            *(f"{human_bytes(held)} of the weights ({held / total:.2%}) are the same on all "
              f"{sizes[axis]} devices of {axis}" for axis, held in copied.items() if held)]


def _held(decisions, params, mesh):
    """Yield (path, weight, its decision, its bytes per device) for each weight."""
    sizes = axis_sizes(mesh)
    paths, leaves, _ = flatten(params)
    for path, leaf, d in zip(paths, leaves, jax.tree.leaves(decisions)):
        if hasattr(leaf, "shape"):
            d = Decision(d, "") if is_spec(d) else d
            size = math.prod(leaf.shape) * leaf.dtype.itemsize
            yield path, leaf, d, size // devices_over(spec_axes(d.spec), sizes)
