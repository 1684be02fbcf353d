"""The learning rate over a run, computed from its config: the pieces of train.learning_rate.

    peak          ________
                 /   cosine, linear or exponential: falls until the end
    first share /    constant: stays at the peak; wsd: stays, then falls during the cooldown
                |----|---------------------------|------------
                0  warmup                    decay_steps, then the last rate stays

    warmup       return the schedule for the first updates, up to the peak
    at_peak      return the first update at the peak
    decay        return the schedule after the peak
    with_steps   set the config's steps from --epochs

A schedule is a function of the update number, from 0. It depends only on the config, so a run that
stops and resumes has the same rates as a run that never stopped.
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
    """Reject config values that don't define a valid schedule."""
    for name in ("warmup", "cooldown"):
        if (value := getattr(c, name) or 0) > 1 and (value != int(value) or value >= 2**31):
            raise ConfigError(f"--{name} {value}: expected an integer number of updates below "
                              f"2**31, or a share of them below 1")
    for name in ("first_share", "final_share"):
        if (value := getattr(c, name) or 0) > 1:
            raise ConfigError(f"--{name} {value}: expected a share of --lr, from 0 to 1")
    if c.decay == "exponential" and not c.final_share:
        raise ConfigError("--final_share 0: an exponential decay never reaches 0; give a share "
                          "above 0, or --decay linear")
    for name in ("final_share", "cooldown", "decay_steps"):
        decays = {"wsd"} if name == "cooldown" else {*DECAYS} - {"constant"}
        if getattr(c, name) != getattr(type(c), name) and c.decay not in decays:
            raise ConfigError(f"--{name} {getattr(c, name)}: --decay {c.decay} does not use it; "
                              f"leave it out, or give another --decay "
                              f"({', '.join(sorted(decays))})")


def fill_in(c: Any) -> None:
    """Set the cooldown unless given, and, once the steps are known, the number of warmup updates.
    The warmup comes first, so its length stays the same when the run gets more steps; a cooldown
    given as a fraction of the steps scales with them."""
    if c.decay == "wsd":
        derive(c, cooldown=0.2)
    if not c.epochs:
        derive(c, warmup=max(1, c.steps // 20))
        object.__setattr__(c, "warmup", updates(c.warmup, c.steps))
        if c.first_share is not None and c.warmup < 2:
            raise ConfigError(f"--first_share {c.first_share}: there is no first rate below the "
                              f"peak, because the warmup is {c.warmup} update long (--warmup)")


def updates(value: float, steps: int) -> int:
    """Return the number of updates that a value means. Below 1, it is a fraction of `steps`."""
    return int(value) if value >= 1 or value == 0 else max(1, int(value * steps + 1e-9))


def at_peak(c: Any) -> int:
    """Return the first update at the peak, which is the last update of the warmup."""
    return max(c.warmup, 1) - 1


def warmup(c: Any) -> Callable:
    """Return the schedule from the first rate up to the peak."""
    first = c.lr / (at_peak(c) + 1) if c.first_share is None else c.lr * c.first_share
    return optax.linear_schedule(first, c.lr, at_peak(c))


def decay(c: Any) -> Callable:
    """Return the schedule from the peak, at 0, to the decay's end, at --final_share of the peak."""
    last, length = c.lr * c.final_share, _length(c)
    if c.decay == "cosine":
        return optax.cosine_decay_schedule(c.lr, length, c.final_share)
    if c.decay == "exponential":
        return optax.exponential_decay(c.lr, length, c.final_share, end_value=last)
    if c.decay == "constant":
        return optax.constant_schedule(c.lr)
    # A linear decay is a cooldown that starts at the peak.
    falls = length if c.decay == "linear" else min(updates(c.cooldown, _end(c)), length)
    line = optax.linear_schedule(c.lr, last, falls)

    def cooldown(step):     # rounding can push the last rates below 0, for example to -7.5e-11
        return line(step) if last else jnp.maximum(line(step), 0)

    return optax.join_schedules([optax.constant_schedule(c.lr), cooldown], [length - falls])


def _end(c):
    return c.steps if c.decay_steps is None else c.decay_steps


def _length(c):
    """Return the number of updates from the first at the peak to the last of the decay."""
    return max(_end(c) - 1, at_peak(c) + 1) - at_peak(c)


def fixed_from(c: Any) -> int:
    """Return the number of updates after which adding steps no longer stretches the decay: all
    updates of the decay or, for wsd, one more than there are before the cooldown."""
    if c.decay != "wsd":
        return _end(c)
    return _end(c) - min(updates(c.cooldown, _end(c)), _length(c)) + 1


def with_steps(c: Any, examples: int) -> Any:
    """Set the config's steps from its --epochs over this many examples."""
    if not c.epochs:
        return c
    steps = math.ceil(c.epochs * examples / c.batch - 1e-9)     # 1.1 * 50 is 55.00000000000001
    return dataclasses.replace(c, epochs=0.0, steps=steps or 1)


def check_given(schedule: Callable) -> None:
    """Reject a `schedule` for fit that jax can't trace, or that doesn't return a number."""
    try:
        shape = jax.eval_shape(lambda step: jnp.asarray(schedule(step)),
                               jax.ShapeDtypeStruct((), "int32")).shape
    except jax.errors.ConcretizationTypeError:
        shape = None
    if shape != ():
        raise ConfigError("fit's schedule must be traceable and return a number, the learning rate "
                          "of an update: write it with jax.numpy (jnp.where in place of if), as "
                          "optax's schedules are")
