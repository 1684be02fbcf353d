"""The KV cache: the keys and values of all tokens so far.

    [B, K, S, N]    a layer's keys and values. Token p of the padded row is in slot p mod S
    a window        S is the window plus one prompt chunk: new tokens overwrite tokens that have
                    left the window
    latent          a single vector for all heads, from which the layer computes keys and values
    on a mesh       tensor splits the heads K. If it doesn't divide them, it splits the slots S:
                    each device attends to its own slots with all heads, and `_join` combines the
                    results as in ring attention

Each layer has separate arrays, so the compiled loop over tokens updates them in place; a scan over
stacked layers would copy them. Slots come after heads because the matmuls read them in that order.
"""

from typing import Any, Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from zigzag.core.errors import ConfigError
from zigzag.core.mesh import axis_size, batch_spec, mark_varying, platform
from zigzag.generate.decoding import State
from zigzag.parallel.attention import Pattern, Token, both, in_blocks, self_attention
from zigzag.parallel.network import CacheLayer

# Prefill reads prompts in chunks of this many tokens.
CHUNK = 256

# Extra arrays of a layer with cross-attention: the encoder output's keys, values and documents.
CROSS = ("cross_k", "cross_v", "cross_document")


def layer_specs(layer: CacheLayer, specs: Any, mesh: Any) -> dict[str, P]:
    """Return the specs of a layer's cache on this mesh, given the specs of the layer's weights."""
    def are_tensor_split(names):
        leaves = jax.tree.leaves([specs[name] for name in names if name in specs])
        return mesh.shape["tensor"] > 1 and any("tensor" in spec for spec in leaves)

    rows, = batch_spec(mesh) or (None,)
    by_slots = P(rows, None, "tensor") if mesh.shape["tensor"] > 1 else P(rows)
    by_heads = layer.heads % mesh.shape["tensor"] == 0 and are_tensor_split(layer.weights)
    found = dict.fromkeys(layer.widths, P(rows, "tensor") if by_heads else by_slots)
    found |= dict.fromkeys(layer.source, P(rows))
    if "cross_k" in layer.source and are_tensor_split(["cross_wk"]):
        found |= dict.fromkeys(CROSS[:2], by_slots)
    return found


def new_layer(layer: CacheLayer, rows: int, slots: int, dtype: Any, tensor: int = 1) -> State:
    """Return an empty layer cache, {name: [rows, K, slots, N]}, rounding slots up for `tensor`."""
    if layer.window:
        slots = min(slots, -(-layer.window // CHUNK) * CHUNK + CHUNK)
    slots = -(-slots // tensor) * tensor
    return {name: jnp.zeros((rows, layer.heads, slots, width), dtype)
            for name, width in layer.widths.items()}


def _slot_shards(cached, kv_heads):
    """Return how many devices share the slots over tensor: 1 unless each device has all heads."""
    return axis_size("tensor") if cached.shape[1] == kv_heads else 1


def update(cached: Array, new: Array, slot: Array, kv_heads: int) -> Array:
    """Write new keys, values or latent vectors [B, T, K, N] into `cached`, starting at `slot`."""
    new = mark_varying(new.swapaxes(1, 2).astype(cached.dtype), cached)
    shards, size = _slot_shards(cached, kv_heads), cached.shape[2]
    if shards == 1:
        def put(cached):
            return lax.dynamic_update_slice_in_dim(cached, new, slot % size, 2)

        on_cpu = (platform() or jax.default_backend()) == "cpu"
        if len(cached) > 1 or new.shape[2] > 1 or not on_cpu:
            return put(cached)
        # For a single row, the CPU compiler also fuses `put` into the matmuls that read its result,
        # which copies all slots. A branch prevents this, even if it's always taken (attention to
        # 2,048 slots: 42 -> 22 ms).
        return lax.cond(slot >= 0, put, lambda cached: cached, cached)
    here = (slot + jnp.arange(new.shape[2])) % (size * shards) - lax.axis_index("tensor") * size
    here = jnp.where((here >= 0) & (here < size), here, size)       # size: on another device
    return cached.at[:, :, here].set(new, mode="drop")


class Attend:
    """A drop-in shard.self_attend for decoding. Call it with q, k, v of new tokens [B, T] in slots
    slot ... slot + T - 1 of rows that begin at slots start [B]. It adds k and v to a layer's cache
    (the new cache is `.layer`) and attends to all keys in the cache."""

    def __init__(self, layer: State, slot: Array, start: Array, heads: int, kv_heads: int):
        self.layer, self.slot, self.start = layer, slot, start
        self.heads, self.kv_heads = heads, kv_heads

    def __call__(self, q: Array, k: Array, v: Array, mask: Callable | None = None,
                 scores: Callable | None = None, *, causal: bool = True, window: int = 0,
                 local: Array | None = None, softcap: float = 0.0, **others: Any) -> Array:
        if not causal or any(a is not None for a in others.values()):
            raise ConfigError(f"attention with {', '.join(others) or 'causal=False'} cannot "
                              f"generate: with a cache, attend takes only a window, a softcap, a "
                              f"mask or scores")
        self.layer = self.layer | {name: update(self.layer[name], a, self.slot, self.kv_heads)
                                   for name, a in (("k", k), ("v", v))}
        query = query_tokens(self.slot, self.start, q.shape[1])
        pattern = Pattern(True, window, local, softcap)
        return attend(self_attention(mask, scores, self.heads, pattern), q, self.layer["k"],
                      self.layer["v"], query, self.start, self.heads, self.kv_heads,
                      folds=scores is None)


def query_tokens(slot: Array, start: Array, count: int) -> Token:
    """Return the Token of `count` new tokens, the first in `slot`, for rows that begin at start."""
    slots = jnp.broadcast_to(slot + jnp.arange(count), (len(start), count))
    return Token(slots, jnp.maximum(slots - start[:, None], 0), jnp.zeros_like(slots))


def attend(attention: Callable, q: Array, k: Array, v: Array, query: Token, start: Array,
           heads: int, kv_heads: int, folds: bool = True) -> Array:
    """Compute attention [B, T, H, M] of queries q [B, T, H, N] to the cached k and v [B, K, S, N],
    which already include the queries' own keys. `attention` is a function(q, k, v, (query, key))
    from attention.self_attention. `folds` moves query heads that share a kv head into the T of q,
    so that we don't have to repeat keys."""
    shards, local_heads = _slot_shards(k, kv_heads), q.shape[2]
    if shards > 1 and local_heads < heads:
        q = lax.all_gather(q, "tensor", axis=2, tiled=True)
    (B, T, H, N), (_, K, size, _) = q.shape, k.shape
    local_slots = (lax.axis_index("tensor") * size if shards > 1 else 0) + jnp.arange(size)
    key = _key_tokens(query, start, local_slots, size * shards)
    folds = folds and K < H
    if folds:
        q = q.reshape(B, T, K, H // K, N).swapaxes(2, 3).reshape(B, -1, K, N)
        query = jax.tree.map(lambda a: jnp.repeat(a, H // K, 1), query)

    def attend_to(queries, keys):
        (q, query), (k, v, key) = queries, keys
        values, logsum = attention(q, k, v, both(query, key))
        if shards > 1:      # put both in a single array, because in_blocks returns only one
            logsum = logsum.swapaxes(1, 2)[..., None]
            values = jnp.concatenate([values.astype(jnp.float32), logsum], -1)
        return values, logsum

    out = in_blocks(attend_to, (q, query), (k.swapaxes(1, 2), v.swapaxes(1, 2), key), False)
    if folds:
        out = out.reshape(B, T, H // K, K, -1).swapaxes(2, 3).reshape(B, T, H, -1)
    return out if shards == 1 else _join(out, local_heads).astype(q.dtype)


def _key_tokens(query, start, slots, total):
    """Return the Token in each of these slots, in a cache with `total` slots: the newest of the
    row's tokens that map to the slot. Padding and empty slots get document -1."""
    last, start = query.slot[:, -1:], start[:, None]
    slots = last - (last - slots) % total
    return Token(slots, jnp.maximum(slots - start, 0), jnp.where(slots < start, -1, 0))


def _join(out, local_heads):
    """Combine all devices' `out`, where each device has attended only to its own slots, into
    attention to all slots for this device's `local_heads` heads. The last number in each vector of
    `out` is the logsumexp of its scores."""
    values, logsum = out[..., :-1], out[..., -1:]
    share = jnp.exp(logsum - lax.pmax(logsum, "tensor"))
    values = values * share / lax.psum(share, "tensor")
    if local_heads == values.shape[2]:
        return lax.psum(values, "tensor")
    return lax.psum_scatter(values, "tensor", scatter_dimension=2, tiled=True)
