"""The learning rate over a run, from its configuration: what train.learning_rate is made of.

    peak          ________
                 /   cosine, linear or exponential: falls to the end
    first share /    constant: stays; wsd: stays, and falls during the cooldown
                |----|---------------------------|------------
                0  warmup                    decay_steps, then the last rate stays

    warmup       the schedule of the first updates, up to the peak
    at_peak      the update that has the peak first
    decay        the schedule from the peak on
    with_steps   the configuration with the steps that follow from --epochs

A schedule is a function of the number of an update, from 0. It depends on nothing but the
configuration, so a run that is stopped and continued has the rates of one that was not.
"""

import dataclasses
import math
from typing import Any, Callable

import jax
import jax.numpy as jnp
import optax

from zigzag.core.errors import ConfigError, derive

DECAYS = ("cosine", "linear", "constant", "wsd", "exponential")


def check(c: Any) -> None:
    """Refuse values of a configuration that make no schedule."""
    for name in ("warmup", "cooldown"):
        if (value := getattr(c, name) or 0) > 1 and value != int(value):
            raise ConfigError(f"--{name} {value}: expected a whole number of updates, or a share "
                              f"of all updates below 1")
    for name in ("first_share", "final_share"):
        if (value := getattr(c, name) or 0) > 1:
            raise ConfigError(f"--{name} {value}: expected a share of --lr, from 0 to 1")
    if c.decay == "exponential" and not c.final_share:
        raise ConfigError("--final_share 0: an exponential decay never reaches 0; give a share "
                          "above 0, or --decay linear")
    for name in ("final_share", "cooldown", "decay_steps"):
        decays = {"wsd"} if name == "cooldown" else {*DECAYS} - {"constant"}
        if getattr(c, name) != getattr(type(c), name) and c.decay not in decays:
            raise ConfigError(f"--{name} {getattr(c, name)}: --decay {c.decay} has none; leave it "
                              f"out, or give another --decay ({', '.join(sorted(decays))})")


def fill_in(c: Any) -> None:
    """Set what was not given: the cooldown, and (once the steps are known) the updates of the
    warmup. They lie at the start, so they stay the same number when the run gets more steps; a
    cooldown that is a share moves with the steps."""
    if c.decay == "wsd":
        derive(c, cooldown=0.2)
    if not c.epochs:
        derive(c, warmup=max(1, c.steps // 20))
        object.__setattr__(c, "warmup", updates(c.warmup, c.steps))
        if c.first_share is not None and c.warmup < 2:
            raise ConfigError(f"--first_share {c.first_share}: there is no first rate below the "
                              f"peak, because the warmup is {c.warmup} update long (--warmup)")


def updates(value: float, steps: int) -> int:
    """A number of updates that is given as such, or (below 1) as a share of `steps`."""
    return int(value) if value >= 1 or value == 0 else max(1, int(value * steps + 1e-9))


def at_peak(c: Any) -> int:
    """The first update at the peak, which is the last one of the warmup."""
    return max(c.warmup, 1) - 1


def warmup(c: Any) -> Callable:
    """From the first rate up to the peak."""
    first = c.lr / (at_peak(c) + 1) if c.first_share is None else c.lr * c.first_share
    return optax.linear_schedule(first, c.lr, at_peak(c))


def decay(c: Any) -> Callable:
    """From the peak, at 0, down to --final_share of it at the last update."""
    last, length = c.lr * c.final_share, _length(c)
    if c.decay == "cosine":
        return optax.cosine_decay_schedule(c.lr, length, c.final_share)
    if c.decay == "exponential":
        return optax.exponential_decay(c.lr, length, c.final_share, end_value=last)
    if c.decay == "constant":
        return optax.constant_schedule(c.lr)
    # (A linear decay is a cooldown from the peak on.)
    falls = length if c.decay == "linear" else min(updates(c.cooldown, _end(c)), length)
    line = optax.linear_schedule(c.lr, last, falls)

    def cooldown(step):     # (rounding brings the last rates below 0, to -7.5e-11 for example)
        return line(step) if last else jnp.maximum(line(step), 0)

    return optax.join_schedules([optax.constant_schedule(c.lr), cooldown], [length - falls])


def _end(c):
    return c.steps if c.decay_steps is None else c.decay_steps


def _length(c):
    """Updates from the first one at the peak to the last one of the decay."""
    return max(_end(c) - 1, at_peak(c) + 1) - at_peak(c)


def fixed_from(c: Any) -> int:
    """The number of updates from which on another number of steps no longer stretches the decay:
    those of the whole run, or (wsd) those before the cooldown, and one more."""
    if c.decay != "wsd":
        return _end(c)
    return _end(c) - min(updates(c.cooldown, _end(c)), _length(c)) + 1


def steps_of_tokens(c: Any) -> int:
    """The steps that --tokens takes: the last one may learn a few more."""
    return math.ceil(c.tokens / (c.batch * c.network.seq_len))


def with_steps(c: Any, examples: int) -> Any:
    """The configuration with the steps that its --epochs over this many examples take."""
    if not c.epochs:
        return c
    steps = math.ceil(c.epochs * examples / c.batch - 1e-9)     # (1.1 * 50 is 55.00000000000001)
    return dataclasses.replace(c, epochs=0.0, steps=steps or 1)


def check_given(schedule: Callable) -> None:
    """Refuse a `schedule` of fit that does not return a number."""
    try:
        shape = jax.eval_shape(lambda step: jnp.asarray(schedule(step)),
                               jax.ShapeDtypeStruct((), "int32")).shape
    except jax.errors.ConcretizationTypeError:
        shape = None
    if shape != ():
        raise ConfigError("fit's schedule must be traceable and return a number, the learning rate "
                          "of an update: write it with jax.numpy (jnp.where in place of if), as "
                          "optax's schedules are")
