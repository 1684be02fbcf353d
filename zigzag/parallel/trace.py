"""How a computation uses the dimensions of its parameters. This file has only facts, no policy.

`trace` walks a function's jaxpr with a union-find over dimensions. If an operation ties two
dimensions together (adds, multiplies, copies or contracts them with each other), they must be split
together or not at all: they form a *group*. For

    y = x + gelu(x @ w_up) @ w_down     x [B, T, D]    w_up [D, F]    w_down [F, D]

the groups are B, T, D and F. D is the long one: as the residual stream, it runs through the whole
network. F is short: it begins in w_up and ends in w_down. The walk records

    roles       how the function uses each dimension of a weight (listed below): here
                w_up: D contracted, F free       w_down: F contracted, D free
    costs       what splitting a group would send: for F, which w_down sums over, a reduction of
                the partial sums y (plus one of x's gradient, if it has one); for D, which w_up sums
                over, a reduction of x @ w_up, which is larger
    made        groups that a weight produces before a weight reads them: F, but not D
    forbidden   groups that can't be split: the inside of an attention head, the dimension that a
                convolution slides along
    reshards    pairs of groups (a, b): a split of a can continue as a split of b if devices send
                the value (slices of a fused weight's output)

The roles of a weight's dimension:
    contracted  a matmul with an activation sums over it;
    free        it remains in the result of such a matmul;
    batch       a batch dimension of such a matmul: experts;
    grouped     the channels of a grouped convolution;
    inner       in a matmul without a weight: of two activations, or of a gradient;
    indexed     the data index it;        placed   the indices are the same every time;
    entry       a lookup copies it whole; stacked  a scan runs over it, so it counts layers.
rule.py decides which groups are worth splitting.
"""

import dataclasses
import itertools
import math
import operator
from collections import Counter, defaultdict
from typing import Any, NamedTuple, Sequence

from jax.extend.core import Literal

from zigzag.parallel.jaxprs import REDUCTIONS, inner_call, interpret, scan_operands

ELEMENTWISE = set("""add add_any sub mul div rem max min pow integer_pow neg sign abs floor ceil
round exp exp2 expm1 log log1p log2 sqrt rsqrt cbrt square one_minus_square sin cos tan tanh asin
acos atan atan2 sinh cosh asinh acosh atanh logistic erf erfc erf_inv lgamma digamma polygamma zeta
igamma igammac regularized_incomplete_beta bessel_i0e bessel_i1e is_finite not and or xor eq ne lt
le gt ge nextafter select_n clamp convert_element_type bitcast_convert_type reduce_precision clz
stop_gradient copy real imag complex conj shift_left shift_right_logical shift_right_arithmetic
population_count mulhi sharding_constraint layout_constraint reshard relayout pvary psum pmax pmin
psum_invariant reduced_vary_cast vary_unreduced_cast optimization_barrier name device_put
with_memory_space_constraint zeros_like random_wrap random_unwrap""".split())
# These slice, join, reverse, sort or sum along a dimension, which becomes a new group.
ALONG_DIMENSIONS = set("""slice dynamic_slice dynamic_update_slice pad rev concatenate split tile
sort top_k approx_top_k cumsum cumprod cummax cummin cumlogsumexp fft reduce_window_sum
reduce_window_max reduce_window_min reduce_window""".split())

INSIDE_A_HEAD = "a split would fall inside a head"
# Roles that make a leaf a matrix; leaves without any of them are scales and biases.
MATRIX = {"free", "contracted", "indexed", "placed", "batch", "grouped", "inner"}


@dataclasses.dataclass(frozen=True)
class Facts:
    """How the computation uses the dimensions of its parameters (leaves 0, 1, ...). A group is an
    integer."""
    shapes: list[tuple[int, ...]]           # each leaf's shape
    groups: list[list[int]]                 # the group of each dimension, per leaf
    roles: list[defaultdict[int, set[str]]]     # {dimension: its roles}, per leaf
    first_use: dict[int, int]               # {leaf: its first use, as an index of uses}
    made: set[int]                          # groups a weight produces before a weight reads them
    reductions: Counter[int]                # {group: the collectives per step if it is split}
    bytes: Counter[int]                     # {group: the total bytes in these collectives}
    forbidden: dict[int, str]               # {group: why it can't be split}
    reshards: set[tuple[int, int]]          # (from group, to group)
    onward: defaultdict[int, set[int]]      # {group: the groups to reshard to, if its split can't
                                            # continue any other way}
    added_tables: list[frozenset]           # (leaf, dimension)s of tables whose rows are added

    def groups_with(self, *roles: str) -> set[int]:
        """Return the groups of all dimensions with at least one of these roles."""
        return {self.groups[leaf][d] for leaf, dims in enumerate(self.roles)
                for d, names in dims.items() if names & set(roles)}

    def dims(self, leaf: int, role: str) -> list[int]:
        """Return the leaf's dimensions with this role. Dimensions of layers have no other role."""
        return [d for d, names in sorted(self.roles[leaf].items())
                if role in names and ("stacked" not in names or role == "stacked")]

    def is_matrix(self, leaf: int) -> bool:
        return any(names & MATRIX for names in self.roles[leaf].values())


def reached(groups: set[int], steps: set[tuple[int, int]]) -> set[int]:
    """Return the groups plus every group reachable from them by the steps (from, to)."""
    while new := {b for a, b in steps if a in groups} - groups:
        groups = groups | new
    return groups


def trace(closed: Any, count: int, shards: int) -> Facts:
    """Collect the facts about a closed jaxpr's parameters, its first `count` arguments, for a split
    into `shards`. All other arguments are data, as is everything computed from them. If there are
    no other arguments, the constants that the function closes over and the random numbers it draws
    count as data."""
    params, others = closed.jaxpr.invars[:count], closed.jaxpr.invars[count:]
    walk = _Walk([v.aval.shape for v in params], shards, draws_data=not others)
    leaves = [walk.value(v.aval, from_params=True) for v in params]
    for i, leaf in enumerate(leaves):
        leaf.origins = [frozenset([(i, d)]) for d in leaf.dims_without()]
    data = [walk.value(v.aval, from_data=True) for v in others]
    walk.run(closed.jaxpr, leaves + data, from_data=walk.draws_data)
    return walk.facts(leaves)


@dataclasses.dataclass
class _Value:
    """A value in the computation."""
    shape: tuple[int, ...]
    dtype: Any
    groups: list[int]                   # the group of each dimension
    origins: list[frozenset]            # per dimension, the (leaf, dimension)s it is a view of
    from_data: bool = False
    from_params: bool = False           # computed from parameters, so it has a gradient
    is_view: bool = False               # computed from a single array
    is_mask: bool = False               # zeros and ones, so a matmul with it is a lookup
    after_matmul: bool = False
    tables: frozenset = frozenset()     # tables whose rows it adds up, as (leaf, dimension)s

    @property
    def rank(self):
        return len(self.groups)

    @property
    def is_weight(self):
        """Whether it is computed from parameters alone."""
        return self.from_params and not self.from_data

    def dims_without(self, *gone):
        """Return all dimensions except those in the lists `gone`."""
        return [d for d in range(self.rank) if not any(d in dims for dims in gone)]


class _Side(NamedTuple):
    """An operand of a matmul: its contracted, batch and free dimensions."""
    value: _Value
    contracted: Sequence[int]
    batch: Sequence[int]
    free: Sequence[int]


class _Walk:
    """A walk through a jaxpr. Each dimension of each value starts as a separate group. Each kind of
    operation has a method that takes the equation, its operands and its results, merges groups, and
    records costs and uses."""

    def __init__(self, shapes, shards, draws_data):
        self.shapes, self.shards, self.draws_data = shapes, shards, draws_data
        self.parent = []                # the union-find: the parent of each group
        self.repeat = 1                 # the total iterations of the scans around this equation
        self.uses = []                  # (leaf, dimension, role), in execution order
        self.costs = []                 # (group, key, collectives per step, their total bytes);
                                        # a group's costs with the same key count once
        self.forbidden = []             # (group, why)
        self.reshards = []              # (from group, to group, whether there's no other way)
        self.heads = []                 # groups that count attention heads
        self.lengths = []               # (group, length) of dimensions in matmuls
        self.outer = []                 # (group, size of the merged dimensions outside it)
        self.added_tables = []

    # -- groups
    def value(self, aval, **known):
        rank = len(aval.shape)
        return _Value(aval.shape, aval.dtype, self.new_groups(rank), [frozenset()] * rank, **known)

    def new_groups(self, count):
        first = len(self.parent)
        self.parent += range(first, first + count)
        return self.parent[first:]

    def find(self, group):
        while self.parent[group] != group:
            self.parent[group] = self.parent[self.parent[group]]
            group = self.parent[group]
        return group

    def union(self, a, b):
        a, b = self.find(a), self.find(b)
        self.parent[max(a, b)] = min(a, b)

    # -- notes
    def cost(self, group, value, key=None):
        """Record that splitting the group costs a reduction of `value` (or a reshard) in every
        iteration of the loops around it. A group's costs with the same key count once."""
        size = math.prod(value.shape) * value.dtype.itemsize
        self.costs.append((group, key or len(self.costs), self.repeat, size * self.repeat))

    def reshard(self, a, b, value, only_way=True):
        """Record that sending `value` lets a split of group `a` continue as a split of `b`."""
        self.reshards.append((a, b, only_way))
        for group in (a, b):
            self.cost(group, value)

    def forbid(self, group, why):
        self.forbidden.append((group, why))

    def role(self, value, dims, role):
        """Record a role for dimensions of the weights that `value` is a view of."""
        self.uses += [(leaf, d, role) for dim in dims for leaf, d in sorted(value.origins[dim])]

    def same(self, x, dim, out, out_dim):
        """Record that dimension `dim` of x is dimension `out_dim` of the result."""
        self.union(x.groups[dim], out.groups[out_dim])
        self.inherit(x, dim, out, out_dim)

    def keep(self, x, dims, out, first=0):
        """Record that x's dimensions `dims` become the result's dimensions, in this order, starting
        at `first`."""
        for o, d in enumerate(dims, first):
            self.same(x, d, out, o)

    def inherit(self, x, dim, out, out_dim):
        if out.is_weight or out.is_view:
            out.origins[out_dim] |= x.origins[dim]

    # -- the walk
    def run(self, jaxpr, args, **known):
        """Return the _Values of a jaxpr's results. `known` (from_data ...) describes constants."""
        def constant(v):
            return self.value(v.aval) if isinstance(v, Literal) else self.value(v.aval, **known)

        return interpret(jaxpr, args, constant, self.equation)

    def equation(self, eqn, ins):
        """Return the _Values of an equation's results."""
        name = eqn.primitive.name
        if name in _CONTROL_FLOW:
            return _CONTROL_FLOW[name](self, eqn, ins)
        if call := inner_call(eqn, ins):
            return self.run(*call)
        known = {what: any(getattr(x, what) for x in ins)
                 for what in ("from_data", "from_params", "after_matmul")}
        known["from_data"] |= self.draws_data and name.startswith("random_")
        known["is_view"] = sum(x.rank > 0 for x in ins) == 1
        outs = [self.value(v.aval, **known) for v in eqn.outvars]
        learned = [x for x in ins if x.from_params]
        if len(learned) == 1 and outs:
            outs[0].tables = learned[0].tables      # this may cast, transpose or scale a lookup
        method = _METHODS.get("scatter" if name.startswith("scatter") else name)
        (method if method and outs else _Walk.unknown)(self, eqn, ins, outs)
        return outs

    def unknown(self, eqn, ins, outs):
        """Forbid splits of operands computed from parameters, because the operation is unknown."""
        why = f"it meets {eqn.primitive.name}, which the rule does not know"
        for x in ins:
            for group in x.groups if x.from_params else ():
                self.forbid(group, why)

    # -- operations that keep dimensions
    def elementwise(self, eqn, ins, outs):
        name, out = eqn.primitive.name, outs[0]
        for o in outs:
            for x in ins:
                if x.rank == o.rank:
                    self.keep(x, x.dims_without(), o)
        if name in ("add", "add_any", "sub"):
            out.tables = frozenset().union(*[x.tables for x in ins])
            self.added_tables.append(out.tables)
        # A weight is still the same weight after masking, or after an inner training loop updates
        # it with its gradient.
        for x in ins:
            if x.is_weight and not out.is_weight and x.rank == out.rank > 1:
                sizes = [math.prod(self.shapes[leaf]) for origin in x.origins for leaf, _ in origin]
                if math.prod(out.shape) == max(sizes, default=0):
                    out.origins = x.origins
        if name == "convert_element_type":
            out.is_mask = ins[0].is_mask or ins[0].dtype == bool

    def drop(self, eqn, ins, outs):
        """Drop the dimensions that reductions, squeeze and unstack remove."""
        x, params = ins[0], eqn.params
        gone = params.get("axes", params.get("dimensions", [params.get("axis")]))
        for out in outs:
            self.keep(x, x.dims_without(gone), out)
        for d in gone if eqn.primitive.name in REDUCTIONS else ():
            self.cost(x.groups[d], outs[0])

    def arrange(self, eqn, ins, outs):
        """Track dimensions through transposes, broadcasts and stacks."""
        out, params = outs[0], eqn.params
        places = params.get("broadcast_dimensions", out.dims_without([params.get("axis")]))
        for x in ins:
            for d, o in zip(params.get("permutation", x.dims_without()), places):
                if x.shape[d] == out.shape[o]:
                    self.same(x, d, out, o)

    def reshape(self, eqn, ins, outs):
        """Merge the groups of the dimensions that carry a split before and after a reshape. A split
        survives a reshape if each shard has whole entries of the outermost dimension (whole heads).
        If that dimension is shorter than the number of shards and divides it, whole entries of the
        next one also work (2 groups of 4 query heads over 4 shards)."""
        x, out = ins[0], outs[0]
        old, new = x.shape, out.shape
        for olds, news in _merged_or_divided(old, new):
            m, k = self.carrier(old, olds), self.carrier(new, news)
            self.union(x.groups[m], out.groups[k])
            self.outer += [(out.groups[k], math.prod(new[news[0]:k])),
                           (x.groups[m], math.prod(old[olds[0]:m]))]
            for d in olds:
                for e in news:
                    self.inherit(x, d, out, e)
                if d > m and x.is_weight:
                    self.reshard(x.groups[d], out.groups[k], out)
                elif d > m:
                    self.forbid(x.groups[d], INSIDE_A_HEAD)
            for e in news:
                if e > k:
                    self.reshard(x.groups[m], out.groups[e], out, only_way=False)

    def carrier(self, shape, dims):
        """Given the dimensions `dims` that a reshape merges or divides, return the one that carries
        a split of all of them into shards."""
        left = self.shards
        for d in dims:
            if shape[d] % left == 0:
                return d
            if left % shape[d]:
                break
            left //= shape[d]
        return dims[0]

    # -- products
    def dot(self, eqn, ins, outs):
        (left, right), out, groups = ins[:2], outs[0], []
        numbers = eqn.params.get("dimension_numbers")
        if numbers is None:             # ragged: rows sorted by expert, and a count per expert
            ragged = eqn.params["ragged_dot_dimension_numbers"]
            numbers = ragged.dot_dimension_numbers
            groups = list(ragged.rhs_group_dimensions)
            self.role(right, groups, "inner" if left.is_weight else "batch")
            for d in groups:
                self.forbid(right.groups[d], "it counts groups of rows")
            for d in ragged.lhs_ragged_dimensions:
                if d in numbers[0][0]:      # rows summed by group: a gradient, not a layer
                    self.forbid(left.groups[d], "it is summed in groups of rows")
        (lc, rc), (lb, rb) = numbers
        lfree, rfree = left.dims_without(lc, lb), right.dims_without(rc, rb, groups)
        self.keep(left, [*lb, *lfree], out)
        self.keep(right, rb, out)
        self.keep(right, rfree, out, len(lb) + len(lfree))
        self.product(out, _Side(left, lc, lb, lfree), _Side(right, rc, rb, rfree))

    def convolution(self, eqn, ins, outs):
        numbers, groups = eqn.params["dimension_numbers"], eqn.params["feature_group_count"]
        (image, kernel), out = ins, outs[0]
        (batch, feature, *space), (made, read, *_) = numbers.lhs_spec, numbers.rhs_spec
        self.same(image, batch, out, numbers.out_spec[0])
        self.same(kernel, made, out, numbers.out_spec[1])
        for d in space:
            self.forbid(image.groups[d], "a convolution slides along it")
        if groups == 1 and eqn.params["batch_group_count"] == 1:
            self.product(out, _Side(image, [feature], [], [batch]),
                         _Side(kernel, [read], [], [made]))
        elif groups % self.shards == 0 and groups > 1:     # each shard has whole groups
            self.union(image.groups[feature], kernel.groups[made])
            self.role(kernel, [made], "grouped")
        else:
            for group in (image.groups[feature], kernel.groups[made]):
                self.forbid(group, f"a convolution in {groups} groups mixes it")

    def product(self, out, *sides):
        left, right = sides
        for a, b in zip((*left.contracted, *left.batch), (*right.contracted, *right.batch)):
            self.union(left.value.groups[a], right.value.groups[b])
        for d in left.contracted:       # if split, each device has a partial sum of the result
            self.cost(left.value.groups[d], out)
        if self.is_attention(left, right):
            # Scores must not be partial sums, because softmax is next. Allow only splits by heads.
            weight = None
            self.heads += [left.value.groups[d] for d in left.batch]
            for d in left.contracted:
                self.forbid(left.value.groups[d], INSIDE_A_HEAD)
        else:
            weight = self.weight_of(sides)
        for side, other in (sides, sides[::-1]):
            x = side.value
            self.lengths += zip(x.groups, x.shape)
            if side is weight:
                self.role(x, side.contracted, "indexed" if other.value.is_mask else "contracted")
                self.role(x, side.batch, "batch")
                self.role(x, side.free, "free")
                continue
            self.role(x, x.dims_without(), "inner")
            # The gradient of x sums over the free dimensions of the other side. Matmuls with the
            # same input (q, k and v; gate and up) share one reduction of its gradient, and one key.
            for d in other.free if x.from_params else ():
                self.cost(other.value.groups[d], x, ("gradient", *x.groups))
        out.after_matmul = True

    def is_attention(self, left, right):
        """Return whether this multiplies two activations produced by weights, as attention does."""
        a, b = left.value, right.value
        is_changed_weight = not (a.is_weight or b.is_weight) and any(a.origins + b.origins)
        return (all(x.from_params and x.after_matmul for x in (a, b)) and not is_changed_weight
                and (left.free or right.free) and (left.batch or a.from_data and b.from_data))

    def weight_of(self, sides):
        """Return the side of a matmul that is the weight, or None. This is the side computed from
        parameters alone, otherwise a parameter that an inner training loop updated with its
        gradient. If both are weights, the one already used in a matmul counts as the activation,
        otherwise the one with more dimensions, otherwise the left one (learned queries; the first
        factor of a low-rank product)."""
        if weights := [side for side in sides if side.value.is_weight]:
            return min(reversed(weights),
                       key=lambda side: (side.value.after_matmul, side.value.rank))
        changed = [side for side in sides if any(side.value.origins)]
        return changed[0] if len(changed) == 1 else None

    # -- slices, lookups and writes
    def along_dimension(self, eqn, ins, outs):
        name, params, rank = eqn.primitive.name, eqn.params, ins[0].rank
        mixed = {params.get("dimension"), params.get("axis"), *params.get("dimensions", ())}
        mixed |= {d for d, n in enumerate(params.get("window_dimensions", ())) if n > 1}
        mixed |= set(range(rank - len(params.get("fft_lengths", ())), rank))
        for out in outs:
            for x in ins:
                if x.rank != out.rank:
                    continue
                for d, (a, b) in enumerate(zip(x.shape, out.shape)):
                    if a == b and d not in mixed:
                        self.union(x.groups[d], out.groups[d])
                        if name == "dynamic_slice":
                            self.role(x, [d], "entry")
                    elif name == "dynamic_slice" and b == 1:
                        self.row(x, d, ins[1 + d], out)
                        continue
                    elif a > 1:
                        self.reshard(x.groups[d], out.groups[d], out)
                    self.inherit(x, d, out, d)

    def gather(self, eqn, ins, outs):
        """Record a lookup. If the table's rows are split, each device looks up the rows it holds,
        with zeros for the rest, and a single reduction sums the results. Batching dimensions, and
        dimensions that the lookup copies whole, keep their groups."""
        (table, index), out = ins, outs[0]
        numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
        window = table.dims_without(numbers.collapsed_slice_dims, numbers.operand_batching_dims)
        rows = {d for d in numbers.start_index_map if sizes[d] == 1 < table.shape[d]}
        for o, d in zip(numbers.offset_dims, window):
            if sizes[d] == table.shape[d]:
                self.same(table, d, out, o)
                self.role(table, [d], "entry")
                if table.is_weight and sum(sizes[w] > 1 for w in window) > 1:
                    out.origins[o] = table.origins[d]       # a looked-up matrix is still a weight
            elif d not in rows:
                self.reshard(table.groups[d], out.groups[o], out)
        for o, group in zip(out.dims_without(numbers.offset_dims), index.groups):
            self.union(out.groups[o], group)
        for a, b in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims):
            self.union(table.groups[a], index.groups[b])
        for d in rows | set(numbers.collapsed_slice_dims):
            self.row(table, d, index, out)

    def row(self, table, dim, index, out):
        """Record that an operation picks a single entry of a dimension, either at an index that
        depends on the data or at a fixed one (positions, the layers of a stack)."""
        self.role(table, [dim], "indexed" if index.from_data else "placed")
        self.cost(table.groups[dim], out)
        if index.from_data:
            out.tables |= table.origins[dim]

    def scatter(self, eqn, ins, outs):
        """Record that rows are written into x, whose unindexed dimensions keep their groups."""
        numbers, (x, _, update), out = eqn.params["dimension_numbers"], ins, outs[0]
        for d, (a, b) in enumerate(zip(x.groups, out.groups)):
            if d in numbers.scatter_dims_to_operand_dims:
                self.reshard(a, b, out)
            else:
                self.union(a, b)
        window = out.dims_without(numbers.inserted_window_dims, numbers.operand_batching_dims)
        for u, d in zip(numbers.update_window_dims, window):
            if update.shape[u] == out.shape[d]:
                self.union(update.groups[u], out.groups[d])

    # -- loops and branches
    def scan(self, eqn, ins):
        length = eqn.params["length"]
        fixed, carry, stacks = scan_operands(eqn, ins)
        if not length and len(carry) == len(eqn.outvars):
            return carry            # the body never runs
        for x in stacks:
            self.role(x, [0], "stacked")
        scanned = [dataclasses.replace(x, shape=x.shape[1:], groups=x.groups[1:],
                                       origins=x.origins[1:]) for x in stacks]
        before, self.repeat = self.repeat, self.repeat * length
        outs = self.loop(eqn.params["jaxpr"].jaxpr, fixed, carry, scanned)
        self.repeat = before
        return outs[:len(carry)] + [
            dataclasses.replace(o, shape=(length, *o.shape), groups=self.new_groups(1) + o.groups,
                                origins=[frozenset(), *o.origins]) for o in outs[len(carry):]]

    def while_loop(self, eqn, ins):
        params = eqn.params
        n, m = params["cond_nconsts"], params["body_nconsts"]
        self.run(params["cond_jaxpr"].jaxpr, ins[:n] + ins[n + m:])
        return self.loop(params["body_jaxpr"].jaxpr, ins[n:n + m], ins[n + m:])

    def loop(self, body, fixed, carry, scanned=()):
        """Return the _Values of a loop's results. Walk the body once, and merge the groups of the
        carry before and after it. A carried value may depend on any of the body's inputs."""
        seen = [*fixed, *carry, *scanned]
        learned = any(x.from_params for x in seen)
        carried = [dataclasses.replace(x, tables=frozenset(), from_params=learned,
                                       from_data=any(x.from_data for x in seen),
                                       after_matmul=learned) for x in carry]
        outs = self.run(body, [*fixed, *carried, *scanned])
        for x, o in zip(carry, outs):
            for a, b in zip(x.groups, o.groups):
                self.union(a, b)
        return outs

    def cond(self, eqn, ins):
        branches = [self.run(b.jaxpr, ins[1:]) for b in eqn.params["branches"]]
        outs = []
        for values in zip(*branches):
            out = dataclasses.replace(values[0], origins=[frozenset()] * values[0].rank,
                                      from_data=any(x.from_data for x in (ins[0], *values)),
                                      from_params=any(x.from_params for x in values),
                                      is_view=True)
            for x in values:
                self.keep(x, x.dims_without(), out)
            outs.append(out)
        return outs

    # -- the facts that need the whole walk
    def facts(self, leaves):
        """Return the Facts, with each group replaced by the root of its union-find tree."""
        roles = [defaultdict(set) for _ in leaves]
        reductions, sent = Counter(), Counter()
        first_use, is_generated = {}, {}
        groups = [[self.find(group) for group in leaf.groups] for leaf in leaves]
        for when, (leaf, d, role) in enumerate(self.uses):
            roles[leaf][d].add(role)
            first_use.setdefault(leaf, when)
            if role in ("free", "indexed", "batch", "grouped", "contracted"):
                is_generated.setdefault(groups[leaf][d], role != "contracted")
        reshards, onward = set(), defaultdict(set)
        for a, b, only_way in self.reshards:
            a, b = self.find(a), self.find(b)
            reshards.add((a, b))
            if only_way:
                onward[a].add(b)
        made = reached({group for group, first in is_generated.items() if first}, reshards)
        counted_once = {(self.find(group), key): cost for group, key, *cost in self.costs}
        for (group, _), (count, size) in counted_once.items():
            reductions[group] += count
            sent[group] += size
        self.forbid_inside_heads(groups, roles)
        self.forbid_indivisible()
        forbidden = {self.find(group): why for group, why in reversed(self.forbidden)}
        return Facts(self.shapes, groups, roles, first_use, made, reductions, sent, forbidden,
                     reshards, onward, self.added_tables)

    def forbid_inside_heads(self, groups, roles):
        """Forbid splits inside heads. If a weight produces or reads heads, the inside is the last
        other dimension that it produces or reads (N in [D, H, N])."""
        heads = {self.find(group) for group in self.heads}
        for shape, mine, dims in zip(self.shapes, groups, roles):
            for role in ("free", "contracted"):
                used = [d for d, names in dims.items() if role in names]
                beside = [d for d in used if mine[d] not in heads]
                if beside and any(shape[d] > 1 for d in used if mine[d] in heads):
                    self.forbid(mine[max(beside)], INSIDE_A_HEAD)

    def forbid_indivisible(self):
        """Forbid groups whose length in a matmul isn't divisible by the shards, even if multiplied
        by the size of the merged dimensions outside it."""
        outer = defaultdict(lambda: {1})
        for group, count in self.outer:
            outer[self.find(group)].add(count)
        for group, length in self.lengths:
            if all(k * length % self.shards for k in outer[self.find(group)]):
                self.forbid(group, f"{length} does not divide by {self.shards}")


def _merged_or_divided(old, new):
    """Yield the parts of a reshape: pairs (before, after) of runs of dimensions with equal total
    size, as short as possible, skipping dimensions of size 1. [B, T, H N] -> [B T, H, N] has two
    parts: ([0, 1], [0]) and ([2], [1, 2])."""
    # `ends` are cumulative products of the lengths; a run ends at each product found in both.
    ends = [list(itertools.accumulate(shape, operator.mul)) for shape in (old, new)]
    start = 1
    for end in sorted(set(ends[0]).intersection(ends[1]) - {0, 1}):
        yield [[d for d, n in enumerate(shape) if n > 1 and start < products[d] <= end]
               for shape, products in zip((old, new), ends)]
        start = end


_CONTROL_FLOW = {"scan": _Walk.scan, "while": _Walk.while_loop, "cond": _Walk.cond}
_METHODS = {
    **dict.fromkeys(ELEMENTWISE, _Walk.elementwise),
    **dict.fromkeys(ALONG_DIMENSIONS, _Walk.along_dimension),
    **dict.fromkeys(REDUCTIONS | {"squeeze", "unstack"}, _Walk.drop),
    **dict.fromkeys(("dot_general", "ragged_dot_general"), _Walk.dot),
    "conv_general_dilated": _Walk.convolution,
    **dict.fromkeys(("broadcast_in_dim", "transpose", "stack"), _Walk.arrange),
    "reshape": _Walk.reshape,
    "gather": _Walk.gather,
    "scatter": _Walk.scatter,
}
