"""python train.py --depth 6: a decoder's sizes and its training options from a single number.
docs/running.md explains the rules and cites the papers they come from.

    chosen      choose the options
    about       describe them and their cost
"""

import math
from pathlib import Path
from typing import Any

import train
from zigzag.core.errors import ConfigError
from zigzag.core.flags import flat
from zigzag.core.options import Values, only, options
from zigzag.disk.reading import is_prepared
from zigzag.disk.tokenizers import Bytes, read_record

WIDTH = 32          # of the stream, per layer
TOKENS = 20         # to train on, per parameter
RATE = 2 * 0.3118   # DeepSeek's constant is half of the best one in our runs: docs/running.md
MEMORY = 0.2        # the fraction of a run after which weight decay has shrunk old updates by 1/e


def chosen(given: Values) -> Values:
    """Return the options that --depth chooses. Flags in `given` replace some of them, and options
    that depend on a replaced one use its given value."""
    depth, network = given["depth"], train.model.NETWORK
    for name in ("layers", "model", "init_from"):
        if name in given:
            raise ConfigError(f"--depth {depth} --{name} {given[name]}: both choose the model; "
                              f"give only one")
    if given.get("epochs"):
        raise ConfigError(f"--depth {depth} --epochs {given['epochs']:g}: both choose the steps; "
                          f"give --steps or --tokens")
    head = 32 if depth < 8 else 64
    width = given.get("d_model") or -(-depth * WIDTH // head) * head
    sizes = {"layers": depth, "d_model": width, "heads": max(1, width // head)}
    own = only(given, *options(network.config))
    c = network.config(**{**sizes, "vocab_size": vocabulary(given), **own})

    tokens = max(1, given.get("tokens") or TOKENS * network.parameters(c)[1])
    flops = network.training_flops(c, tokens)
    rows = 0.2920 * flops**0.3271 / c.seq_len
    batch = 2 ** max(0, round(math.log2(rows)))     # a power of two, which meshes divide
    steps = math.ceil(tokens / ((given.get("batch") or batch) * c.seq_len))
    lr = rounded(RATE * flops**-0.1250)
    # Each update shrinks weights by lr * weight_decay. In a short run, weight_decay is at most 1.
    updates = MEMORY * given.get("steps", steps)
    weight_decay = rounded(1 / max(1, given.get("lr", lr) * updates))
    return {**sizes, "batch": batch, "steps": steps, "lr": lr, "weight_decay": weight_decay,
            "warmup": 0.05}


def vocabulary(given: Values) -> int:
    """Return the size of the data's vocabulary, without opening the data."""
    made = [Path(path) for path in given.get("data", ()) if is_prepared(Path(path))]
    record = read_record(made[0] / "data.json") if made else {}
    return record.get("vocab_size", Bytes.vocab_size)


def rounded(value: float) -> float:
    return float(f"{value:.3g}")


def about(config: Any, flops: float, seconds: float) -> str:
    """Describe the options of a run with --depth, and its cost, given a step's FLOPs and time."""
    values, steps = flat(config), config.steps
    names = "d_model", "heads", "batch", "steps", "lr", "warmup", "weight_decay"
    what = ", ".join(f"{name} {values[name]:,}" for name in names)
    return (f"depth    {config.depth}: {what}; {flops * steps:.2g} FLOPs, "
            f"{steps * seconds / 60:,.1f} minutes at {seconds * 1e3:,.0f} ms a step")
