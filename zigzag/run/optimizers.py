"""Optimizers that need to know more of a weight than its shape, and those that fit is given."""

import re
from typing import Any, Callable

import jax
import optax

from zigzag.core.errors import ConfigError
from zigzag.core.mesh import flatten
from zigzag.rule.rule import matrices_of_layers


def muon(config: Any, decisions: Any) -> optax.GradientTransformation:
    """Muon, scaled to AdamW's rates, for the matrices of the layers (the rule knows which of their
    dimensions are contracted with activations), and Adam with Nesterov for the rest."""
    dims = jax.tree.map(lambda _, dims: dims and optax.contrib.MuonDimensionNumbers(*dims),
                        decisions, matrices_of_layers(decisions))
    return optax.contrib.muon(-1.0, consistent_rms=0.2, muon_weight_dimension_numbers=dims,
                              adam_b1=config.beta1, adam_b2=config.beta2)


# -------------------------------------------------------------------------------------------
# fit(optimizer=...)

def chosen(given: Any, default: Callable) -> Callable:
    """(config, decisions, name) -> the optimizer of these weights, in the tree `name` of a step of
    one's own. It is default(config, decisions) unless fit was given one: an optax transformation,
    or several, {regular expression for paths: transformation, or None: these weights stay as they
    are}, of which the first match counts; "*" matches all."""
    if given is None:
        return lambda config, decisions, name="": default(config, decisions)
    if not isinstance(given, dict):
        return lambda config, decisions, name="": _without_rate(_checked("fit", given))
    each = {pattern: optax.set_to_zero() if one is None else _checked(repr(pattern), one)
            for pattern, one in given.items()}

    def by_path(config, decisions, name=""):
        paths, _, tree = flatten(decisions)
        labels = [_label(f"{name}.{path}" if name else path, each) for path in paths]
        return _without_rate(optax.multi_transform(each, jax.tree.unflatten(tree, labels)))

    return by_path


def as_it_is(step: Any) -> float:
    """The schedule where fit was given an optimizer: its updates are added as they are."""
    return 1.0


def _checked(what, one):
    if not isinstance(one, optax.GradientTransformation):
        raise ConfigError(f"optimizer: {what} was given a {type(one).__name__}; expected an optax "
                          f"transformation, optax.adam(1e-3) for example")
    return one


def _label(path, each):
    for pattern in each:
        try:
            if pattern == "*" or re.search(pattern, path):
                return pattern
        except re.error as e:
            raise ConfigError(f"optimizer: {pattern!r} is not a regular expression: {e}") from None
    raise ConfigError(f"optimizer: nothing for {path}; add \"*\" for all other weights")


def _without_rate(optimizer):
    """For a step that subtracts rate * updates: optax's own updates are added."""
    def update(grads, state, params=None):
        updates, state = optimizer.update(grads, state, params)
        return jax.tree.map(lambda u: -u, updates), state

    return optax.GradientTransformation(optimizer.init, update)
