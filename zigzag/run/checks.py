"""Rejects bad settings before anything compiles, naming the numbers and the nearest valid ones.

    check_config      config values, alone and in combination
    check_network     a network that the mesh or the options can't train
    check_batch       a batch that doesn't divide over the mesh
    check_time        batch arrays that may or may not have a sequence
    check_overrides   --override
"""

import re
from typing import Any, Mapping, Sequence

from jax.sharding import PartitionSpec as P

from zigzag.core import hosts
from zigzag.core.errors import (
    ConfigError,
    did_you_mean,
    nearest_divisor,
    nearest_multiple,
)
from zigzag.core.flags import change
from zigzag.core.mesh import (
    BATCH_AXES,
    axes_in_use,
    by_path,
    entry_axes,
    has_time,
    mesh_sizes,
    row_groups,
    unknown_time,
)
from zigzag.core.options import changes, check_values
from zigzag.disk.mixture import rounded
from zigzag.parallel.rule import apply_overrides, parse_overrides
from zigzag.run import schedules

# (regular expression for paths, spec) pairs that say how to store weights. The last match wins.
Overrides = Sequence[tuple[str, P]]


def check_config(c: Any) -> None:
    """Reject bad values in a train.Config. The network's config checks its own."""
    check_values(c)
    schedules.check(c)
    known = dict.fromkeys(changes(type(c)).values())
    for name in c.change:
        if name not in known:
            raise ConfigError(f"--change {name}: expected some of {', '.join(known)}"
                              + did_you_mean(name, known))
    if c.mix and len(c.mix) != len(c.data):
        raise ConfigError(f"--mix {' '.join(c.mix)}: {len(c.mix)} for {len(c.data)} "
                          f"paths of --data; expected one for each")
    try:
        rounded([float(w) for w in c.mix] or [1.0])
    except ValueError as e:
        raise e if isinstance(e, ConfigError) else ConfigError(
            f"--mix {' '.join(c.mix)}: expected numbers above 0") from None
    if c.batch % c.accumulate:
        raise ConfigError(f"--batch {c.batch} does not divide into --accumulate {c.accumulate} "
                          f"parts")
    if c.edited and (not c.init_from or c.init_from != c.model):
        raise ConfigError("--edited needs a published model: give --model FOLDER")
    for name in ("sum_dtype", "overlap"):
        if c.collectives == "compiler" and (value := getattr(c.network, name)):
            raise ConfigError(f"--{name} {value}: needs --collectives explicit")
    if c.collectives == "compiler" and c.zero == 2:
        raise ConfigError("--zero 2: needs --collectives explicit; give --zero 1")
    schedule, chunks = c.network.schedule, c.network.chunks
    if chunks > 1 and schedule == "gpipe" or chunks == 1 and schedule == "interleaved":
        raise ConfigError(f"--schedule {schedule} --chunks {chunks}: interleaved needs at least 2 "
                          f"--chunks, and gpipe needs 1")
    for best in c.best:
        if not re.fullmatch(r"(smallest|largest):\S+", best):
            raise ConfigError(f"--best {best}: expected smallest:NAME or largest:NAME, where NAME "
                              f"is a number in an evaluation, smallest:eval_loss for example")
    parse_overrides(c.override)
    if c.mesh != "auto":
        mesh_sizes(c.mesh, c.shards)
    hosts.check_processes(c)


def check_network(config: Any, network: Any, mesh: Any) -> None:
    """Reject a network that this mesh can't train, or that doesn't suit these options."""
    network.check(config.network, mesh)
    check_batch(config, mesh)
    check_rows(config, network)
    # If the data sets vocab_size later, use a multiple of every axis for now.
    some = change(config, vocab_size=config.network.vocab_size or 128 * mesh.size)
    check_overrides(config.override, network.weight_shapes(some.network), mesh)


def check_rows(config: Any, network: Any) -> None:
    """Refuse to split a batch into parts if the network's loss compares rows."""
    if network.couples_rows and config.accumulate > 1:
        raise ConfigError(f"--accumulate {config.accumulate}: the loss of {network.name} compares "
                          f"every row of a batch with all others, so it needs the whole batch; "
                          f"give a smaller --batch, or more devices of data or fsdp")


def check_batch(c: Any, mesh: Any) -> None:
    """Reject a batch that doesn't divide over the mesh, whatever the loss."""
    sizes, groups = mesh.shape, row_groups(mesh)
    parts = groups * c.accumulate
    if c.batch % parts:
        axes = " x ".join(a for a in BATCH_AXES if sizes[a] > 1) or "data"
        raise ConfigError(f"--batch {c.batch} does not divide among {groups} groups of devices "
                          f"({axes}) x {c.accumulate} accumulated parts = {parts}; the nearest "
                          f"that does is --batch {nearest_multiple(parts, c.batch)}")
    idle = axes_in_use(sizes, ("pipe", "seq"))
    if c.collectives == "compiler" and idle:
        raise ConfigError(f"mesh axis {' and '.join(idle)}: with --collectives compiler, the "
                          f"compiler splits no work over it, and every device would do all of it; "
                          f"give its devices to data, fsdp, expert or tensor")
    rows, microbatches = c.batch // parts, c.network.microbatches
    if rows % microbatches:
        raise ConfigError(f"--microbatches {microbatches} does not divide the {rows} rows that a "
                          f"device has at a time; the nearest that does is --microbatches "
                          f"{nearest_divisor(rows, microbatches)}")


def check_time(batch: Any, mesh: Any, said: Mapping[str, bool]) -> None:
    """Reject batch arrays if we can't tell whether seq and pipe should split them: the second
    dimension is as long as the tokens', and `said` doesn't say whether it's the sequence."""
    if unknown := said.keys() - batch.keys():
        raise ConfigError(f"timed={{{min(unknown)!r}: ...}}: collate makes no such array"
                          + did_you_mean(min(unknown), batch))
    tokens = batch.get("tokens")
    axis = next((a for a in ("seq", "pipe") if mesh.shape[a] > 1), "")
    if not axis or tokens is None or len(tokens.shape) != 2:
        return
    T = tokens.shape[1]
    for name, x in batch.items():
        is_long = x.shape[1:2] == (T,)
        if is_long and has_time(name, said) is None:
            raise unknown_time(name, T, axis, mesh.shape[axis])
        if said.get(name) and not is_long:
            raise ConfigError(f"timed={{{name!r}: True}}: collate makes it with rows of "
                              f"{list(x.shape[1:])}, but a row has {T} tokens")


def check_overrides(texts: Sequence[str], params: Any, mesh: Any,
                    others: Overrides = ()) -> list[tuple[str, P]]:
    """Return the overrides from --override (`texts`) and from code (`others`), for the rule."""
    overrides = [*parse_overrides(texts), *others]
    for pattern, spec in overrides:
        for entry in spec:
            if len(entry_axes(entry)) > 1:
                raise ConfigError(f"override {pattern!r}: {'+'.join(entry)} on one dimension; give "
                                  f"each dimension one axis")
    shapes = {path: leaf.shape for path, leaf in by_path(params).items()}
    apply_overrides(shapes, overrides, dict(mesh.shape))
    return overrides


def check_vocabulary(config: Any, ids: int) -> Any:
    """Set vocab_size to `ids`, unless the config already has one, which must be at least `ids`."""
    if config.network.vocab_size and config.network.vocab_size < ids:
        raise ConfigError(f"--vocab_size {config.network.vocab_size}: the data has {ids} ids")
    return change(config, vocab_size=config.network.vocab_size or ids)
