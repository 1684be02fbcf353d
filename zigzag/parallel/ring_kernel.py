"""Ring attention (the seq section of shard.py) with jax's TPU kernel.

A device combines its results for different keys using the logsumexp of the scores, so the logsumexp
needs a gradient as well. jax's kernel returns the logsumexp, but it has no gradient. The two
kernels of its backward pass can compute it. For a score s with probability p, they compute

    ds = p (dp - d)     dp = dout . v, and, per query, d = dout . out

and a gradient g of the logsumexp adds p g. So `_backward` passes d - g instead of d.

These two kernels aren't public. tests/parallel/test_attention.py compares them with the formula.
"""

import functools
from typing import Any, Callable

import jax
import jax.numpy as jnp
from jax import Array

from zigzag.parallel.attention import (
    Pattern,
    by_row_or_head,
    join,
    look,
    splash_kernel,
    without_types,
)


def attend_to(pattern: Pattern) -> Callable:
    """Return attend_to(queries, keys, own) for a ring. Queries and keys come with their documents,
    or None. A query sees all keys, except that in causal attention it sees its `own` keys only up
    to its slot. The last of the `own` keys belongs to the last query."""
    def attend(queries: tuple, keys: tuple, own: bool = False) -> tuple[Array, Array]:
        def run(qkv, documents):
            seen = Pattern(pattern.causal and own, softcap=pattern.softcap, documents=documents[0])
            kernel = splash_kernel(qkv[0].shape, seen, save_residuals=True)
            values, logsum = by_row_or_head(with_logsum(kernel), *qkv, documents)
            return values.swapaxes(1, 2), logsum

        (q, of_queries), (k, v, of_keys) = queries, keys
        before = k.shape[1] - q.shape[1]
        if not before:
            return without_types(run)((q, k, v), (of_queries, of_keys))
        earlier = jax.tree.map(lambda x: x[:, :before], keys)
        latest = jax.tree.map(lambda x: x[:, before:], keys)
        return join(look(attend, queries, earlier), look(attend, queries, latest, own))

    return attend


def with_logsum(kernel: Any) -> Callable:
    """Wrap a kernel so that its values [H, T, N] and logsumexp [H, T] both have gradients."""
    # The kernel is a pytree, because its masks are arrays. Without this jit, `without_types` would
    # make jax trace the custom_vjp and its kernels again, with types.
    return jax.jit(functools.partial(_with_logsum, kernel))


@jax.custom_vjp
def _with_logsum(*args):
    return _forward(*args)[0]


def _forward(kernel, q, k, v, documents):
    values, (logsum,) = kernel(q, k, v, documents)
    return (values, logsum), (kernel, q, k, v, documents, values, logsum)


def _backward(saved, cotangents):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    (kernel, q, k, v, documents, values, logsum), (dvalues, dlogsum) = saved, cotangents
    d = (values.astype(jnp.float32) * dvalues.astype(jnp.float32)).sum(-1) - dlogsum
    sizes, options = kernel.kwargs["block_sizes"], {name: kernel.kwargs[name] for name in (
        "is_mqa", "mask_value", "attn_logits_soft_cap", "mask_function", "interpret")}
    options |= {f"{name}_layout": getattr(sizes, f"{name}_layout") for name in "qkv"}
    given = q, k, v, documents, None, logsum, dvalues, d        # (None: no sinks)
    dq = splash._splash_attention_bwd_dq(
        *given, bq=sizes.block_q_dq, bkv=sizes.block_kv_dq, mask_info=kernel.dq_mask_info,
        **options)
    _, dk, dv = splash._splash_attention_bwd_dkv(
        *given, bq=sizes.block_q_dkv, bkv=sizes.block_kv_dkv,
        bkv_compute=sizes.block_kv_dkv_compute, mask_info=kernel.dkv_mask_info,
        use_fused_bwd_kernel=False, **options)
    return None, dq, dk, dv, None


_with_logsum.defvjp(_forward, _backward)
