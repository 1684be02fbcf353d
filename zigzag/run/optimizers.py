"""Optimizers that need to know more of a weight than its shape."""

from typing import Any

import jax
import optax

from zigzag.rule.rule import matrices_of_layers


def muon(config: Any, decisions: Any) -> optax.GradientTransformation:
    """Muon, scaled to AdamW's rates, for the matrices of the layers (the rule knows which of their
    dimensions are contracted with activations), and Adam with Nesterov for the rest."""
    dims = jax.tree.map(lambda _, dims: dims and optax.contrib.MuonDimensionNumbers(*dims),
                        decisions, matrices_of_layers(decisions))
    return optax.contrib.muon(-1.0, consistent_rms=0.2, muon_weight_dimension_numbers=dims,
                              adam_b1=config.beta1, adam_b2=config.beta2)
