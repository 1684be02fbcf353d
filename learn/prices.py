"""How the rule sees a function: its groups of dimensions, their prices, and which ones it splits.

    python -m learn.prices mine.py:loss --shards 4
    python -m learn.prices --shards 4 [flags of train.py]

The first command reads a custom function loss(params, *args). In mine.py, also define example(),
which returns (params, *args) as arrays or jax.ShapeDtypeStructs. The second command uses the
network that the flags select.
"""

import runpy
import sys
from typing import Any, Callable

import shard
import train
from zigzag.core.errors import human_bytes
from zigzag.core.mesh import mesh_sizes
from zigzag.parallel.network import network_of
from zigzag.parallel.rule import Group, groups


def table(fn: Callable, params: Any, *args: Any, shards: int) -> str:
    """The groups of fn(params, *args) as text: first the ones the rule splits, then the ones
    it could split, then the ones it rejects."""
    return "\n\n".join(_text(group) for group in groups(fn, params, *args, shards=shards))


def _text(group: Group) -> str:
    members = [f"    {path}, dimension {d}{f': {roles}' if roles else ''}"
               for path, d, roles in group.members]
    priced = (f"({human_bytes(group.bytes)} + 256 KiB x {group.reductions}) / "
              f"{group.elements:,} elements = {group.price:.3g}")
    return "\n".join([f"{group.verdict.upper()}, {priced}" if group.verdict == "split" else
                      f"not split: {group.verdict}; {priced}", *members])


def of_file(where: str) -> tuple[Callable, tuple]:
    """(the function FILE.py:NAME, the result of the file's example())."""
    file, _, name = where.partition(":")
    try:
        found = runpy.run_path(file)
    except OSError as e:
        raise shard.ConfigError(f"{file}: {e.strerror}; expected FILE.py:FUNCTION") from None
    for needed in (name, "example"):
        if needed not in found:
            raise shard.ConfigError(f"{file}: no function {needed} in it; expected loss(params, "
                                    f"*args), and example() that returns (params, *args)")
    return found[name], found["example"]()


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else list(argv)
    if "-h" in argv or "--help" in argv:
        return print(__doc__)
    where = argv.pop(0) if argv and ".py:" in argv[0] else ""
    config = train.parse(["--vocab_size", "257", *argv])
    shards = config.shards or mesh_sizes(config.mesh, 0).get("tensor", 1)
    if shards < 2:
        raise shard.ConfigError("expected --shards N or --mesh tensor=N with 2 devices or more")
    if where:
        fn, given = of_file(where)
    else:
        network, c = network_of(config.network), config.network
        given = network.weight_shapes(c), network.batch_shapes(c, config.batch)

        def fn(params, batch):
            return network.loss(params, batch, c)[0]
    print(table(fn, *given, shards=shards))


if __name__ == "__main__":
    train.run_main(main)
