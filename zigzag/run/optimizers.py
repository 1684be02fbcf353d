"""Optimizers that need to know more about a weight than its shape, and optimizers passed to fit."""

import re
from typing import Any, Callable, Iterable, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zigzag.core.errors import ConfigError, did_you_mean
from zigzag.core.flags import is_derived
from zigzag.core.mesh import flatten
from zigzag.core.options import changes
from zigzag.run.muon import muon as muon


def adam(config: Any, decisions: Any) -> optax.GradientTransformation:
    return optax.scale_by_adam(config.beta1, config.beta2)


# -------------------------------------------------------------------------------------------
# fit(optimizer=...)

class OptimizersByPath:
    """Each weight's optimizer: default(config, decisions), or the one passed to fit. fit takes an
    optax transformation, or several as {regular expression for paths: transformation}. The first
    match wins, "*" matches all paths, and None in place of a transformation freezes the weights."""

    def __init__(self, given: Any, default: Callable):
        self.default, self.each, self.matched = default, None, set()
        if given is not None:
            each = given if isinstance(given, dict) else {"*": given}
            for pattern, one in each.items():
                if not isinstance(one, optax.GradientTransformation | None):
                    raise ConfigError(f"optimizer: {pattern!r} was given a {type(one).__name__}; "
                                      f"expected an optax transformation, optax.adam(1e-3) for "
                                      f"example")
            self.each = {pattern: one or optax.set_to_zero() for pattern, one in each.items()}

    def __call__(self, config: Any, decisions: Any, name: str = "") -> optax.GradientTransformation:
        """Return the optimizer for these weights, which form the tree `name` in a custom step."""
        if self.each is None:
            return self.default(config, decisions)
        paths, _, tree = flatten(decisions)
        labels = [_label(".".join(filter(None, (name, path))), self.each) for path in paths]
        self.matched |= {*labels}
        if not name:
            self.check(paths)
        return _without_rate(optax.multi_transform(self.each, jax.tree.unflatten(tree, labels)))

    def check(self, paths: Iterable[str]) -> None:
        """Reject a pattern that has matched no weight. Call this after making all optimizers."""
        for pattern in self.each or ():
            if pattern not in self.matched and pattern != "*":
                raise ConfigError(f"optimizer: {pattern!r} is not the first match of any weight"
                                  + did_you_mean(pattern, paths, near=0.5))


class Factor(NamedTuple):
    """The schedule when fit is given an optimizer: a factor that scales its updates. None: leave
    them unscaled."""
    schedule: Callable | None

    def __call__(self, step: Any) -> Any:
        return 1.0 if self.schedule is None else self.schedule(step)


def check_unused(config: Any) -> None:
    """Reject options that have no effect if fit has an optimizer. Allow options that only shape the
    rate over a run, such as --decay, because a script may set them for all of its runs."""
    replaced = ["optimizer", "beta1", "beta2", *(
        name for name, word in changes(type(config)).items() if word not in ("data", "decay"))]
    if given := [name for name in replaced if not is_derived(config, name)]:
        flags = " and ".join(f"--{name} {getattr(config, name)}" for name in given)
        raise ConfigError(f"{flags}: no effect, because fit got a custom optimizer; leave it out, "
                          f"or give the script its own flags")


def _label(path, each):
    for pattern in each:
        if pattern == "*" or re.search(pattern, path):
            return pattern
    raise ConfigError(f"optimizer: nothing for {path}; add \"*\" for all other weights")


def _without_rate(optimizer):
    """Adapt the optimizer to a step that subtracts rate * updates, whereas optax adds updates. Keep
    random keys in its state as numbers, because a checkpoint can hold only numbers."""
    def init(params):
        return _with_numbers(optimizer.init(params))

    def update(grads, state, params=None):
        # A new state shows which leaves are keys. Ignore its values.
        state = jax.tree.map(_as_key, optimizer.init(grads), state)
        try:
            updates, state = optimizer.update(grads, state, params)
        except TypeError as e:
            if "required keyword-only" not in str(e):
                raise
            needs = re.findall(r"'(\w+)'", str(e))
            raise ConfigError(f"optimizer: it needs {', '.join(needs)} (a line search, for "
                              f"example), but train.fit gives it only gradients and weights; "
                              f"choose another, or write the loop yourself (train.make_step has "
                              f"the gradient)") from None
        if jax.tree.map(jnp.shape, updates) != jax.tree.map(jnp.shape, grads):
            raise ConfigError("optimizer: its updates and the gradients differ in shape "
                              "(optax.contrib.dpsgd needs a gradient for each row, but gets their "
                              "mean)")
        return jax.tree.map(lambda u: -u, updates), _with_numbers(state)

    return optax.GradientTransformation(init, update)


def _with_numbers(state):
    return jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, state)


def _as_key(like, x):
    return jax.random.wrap_key_data(x, impl=jax.random.key_impl(like)) if _is_key(like) else x


def _is_key(x):
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
