"""--accuracy: how many targets are the likeliest id (or class), beside a loss.

`shard.token_loss` returns a loss alone. It notes its hits here, and `counted`, which calls the head
of a shard.pipelined_loss, finds them and adds them to the head's other sums. A target that ties
with another id counts as a hit.
"""

from typing import Any, Callable

import jax.extend
from jax import Array, lax

from zigzag.core.errors import ConfigError

_noted: list[tuple[Any, list[Array]]] = []      # (its trace, its hits) of each head being traced


def _trace() -> Any:
    return jax.extend.core.get_opaque_trace_state(convention="nnx")


def note(hits: Array) -> None:
    """Note the sum of the weights of targets that are the likeliest, if somebody asks."""
    if _noted:
        trace, found = _noted[-1]
        if trace != _trace():
            raise ConfigError("--accuracy true: the head of this loss calls shard.token_loss in "
                              "jax.jit, jax.checkpoint or a scan; call it in the head itself")
        found.append(hits)


def counted(head: Callable) -> Callable:
    """The head of a pipelined_loss with another sum, "accuracy"."""
    def head_with_hits(params: Any, x: Array, batch: Any) -> tuple:
        _noted.append((_trace(), []))
        try:
            total, count, *others = head(params, x, batch)
        finally:
            _, hits = _noted.pop()
        others = others[0] if others else {}
        if not hits or "accuracy" in others:
            raise ConfigError("--accuracy true: the head of this loss calls neither "
                              "shard.token_loss nor class_loss with several classes, or has an "
                              "accuracy of its own; leave it out")
        return total, count, {**others, "accuracy": lax.stop_gradient(sum(hits))}

    return head_with_hits
