"""The KV cache: what attention keeps of all tokens so far.

    [B, K, S, N]    keys and values of a layer. The token at place p of the padded row is in slot
                    p mod S
    a window        S is the window and one chunk of a prompt: new tokens overwrite those that have
                    left the window
    latent          one vector for all heads, from which keys and values are made
    on a mesh       tensor splits the heads K. Where it does not divide them it splits the slots S:
                    each device attends with all heads to its own slots, and the results are joined
                    as those of ring attention are

Each layer has its own arrays, so that the compiled loop over tokens updates them in place (a scan
over stacked layers would copy them). Slots come after heads because the matrix products read them
in that order.
"""

from typing import Any, Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from zigzag.attention import in_blocks
from zigzag.mesh import ambient, mark_varying
from zigzag.positions import layer_slots

# A prompt is prefilled in chunks of so many tokens.
CHUNK = 256


def _splits_heads(c, specs, tensor):
    """Whether tensor splits the kv heads of a layer's cache: its weights' specs say so."""
    return c.kv_rank == 0 and c.kv_heads % tensor == 0 and any(
        "tensor" in specs[name] for name in ("wq", "wk", "wv"))


def layer_specs(c: Any, specs: Any, batch: P, tensor: int) -> dict[str, P]:
    """The specs of a layer's cache, from those of its weights and of a batch."""
    rows, = batch or (None,)
    own = cross = P(rows)
    if tensor > 1:
        own = P(rows, "tensor") if _splits_heads(c, specs, tensor) else P(rows, None, "tensor")
    if tensor > 1 and c.encoder_layers and "tensor" in specs["cross_wk"]:
        cross = P(rows, None, "tensor")
    names = ["latent"] if c.kv_rank else ["k", "v"]
    names += ["cross_k", "cross_v", "cross_document"] if c.encoder_layers else []
    return {name: P(rows) if name == "cross_document" else cross if name.startswith("cross")
            else own for name in names}


def new_layer(c: Any, i: int, rows: int, slots: int, dtype: Any, specs: Any = None,
              tensor: int = 1) -> dict[str, Array]:
    """The empty cache of layer i: so many rows and slots, over all devices together."""
    if window := layer_slots(c, i):
        slots = min(slots, -(-window // CHUNK) * CHUNK + CHUNK)
    if tensor > 1 and not _splits_heads(c, specs, tensor):
        slots = -(-slots // tensor) * tensor
    if c.kv_rank:
        return {"latent": jnp.zeros((rows, 1, slots, c.rotary_dim + c.kv_rank), dtype)}
    return {name: jnp.zeros((rows, c.kv_heads, slots, width), dtype)
            for name, width in (("k", c.head_dim), ("v", c.v_head_dim or c.head_dim))}


def _slot_shards(cached, kv_heads):
    """Over how many devices tensor splits the slots (it does where a device has all heads)."""
    sizes, manual = ambient()
    return sizes["tensor"] if "tensor" in manual and cached.shape[1] == kv_heads else 1


def _own_slots(cached, shards):
    """The numbers of this device's slots."""
    first = lax.axis_index("tensor") * cached.shape[2] if shards > 1 else 0
    return first + jnp.arange(cached.shape[2])


def update(cached: Array, new: Array, slot: Array, kv_heads: int) -> Array:
    """The cached array with new keys, values or latent vectors [B, T, K, N] from `slot` on."""
    new = mark_varying(new.swapaxes(1, 2).astype(cached.dtype), cached)
    shards, size = _slot_shards(cached, kv_heads), cached.shape[2]
    if shards == 1:
        return lax.dynamic_update_slice_in_dim(cached, new, slot % size, 2)
    here = (slot + jnp.arange(new.shape[2])) % (size * shards) - lax.axis_index("tensor") * size
    here = jnp.where((here >= 0) & (here < size), here, size)       # size: on another device
    return cached.at[:, :, here].set(new, mode="drop")


def attend(attention: Callable, q: Array, k: Array, v: Array, mask: Callable,
           batch: dict[str, Any], heads: int, kv_heads: int, folds: bool = True) -> Array:
    """Attention of the batch's queries q [B, T, H, N] to the cached k and v [B, K, S, N], which
    have the batch's own keys already: [B, T, H, M]. attention(q, k, v, mask) and mask(query, key)
    are as in shard.attend. With `folds`, query heads that share a kv head are folded into the time
    of q, so that keys need not be repeated."""
    shards, own_heads, query = _slot_shards(k, kv_heads), q.shape[2], batch["query"]
    if shards > 1 and own_heads < heads:
        q = lax.all_gather(q, "tensor", axis=2, tiled=True)
    (B, T, H, N), K = q.shape, k.shape[1]
    key = _key_info(batch, _own_slots(k, shards), k.shape[2] * shards)
    folds = folds and K < H
    if folds:
        q = q.reshape(B, T, K, H // K, N).swapaxes(2, 3).reshape(B, -1, K, N)
        query = jax.tree.map(lambda a: jnp.repeat(a, H // K, 1), query)

    def attend_to(queries, keys):
        (q, query), (k, v, key) = queries, keys
        values, logsum = attention(q, k, v, mask(query, key))
        if shards > 1:      # in one array, since in_blocks concatenates only values
            logsum = logsum.swapaxes(1, 2)[..., None]
            values = jnp.concatenate([values.astype(jnp.float32), logsum], -1)
        return values, logsum

    out = in_blocks(attend_to, (q, query), (k.swapaxes(1, 2), v.swapaxes(1, 2), key), False)
    if folds:
        out = out.reshape(B, T, H // K, K, -1).swapaxes(2, 3).reshape(B, T, H, -1)
    return out if shards == 1 else _join(out, own_heads).astype(q.dtype)


def _key_info(batch, slots, total):
    """The key info of these slots, of `total` in all. Each slot has the newest token whose place
    belongs there. Padding and slots that are still empty are in no document (-1)."""
    last, start = batch["query"]["place"][:, -1:], batch["start"][:, None]
    place = last - (last - slots) % total
    info = {"place": place, "document": jnp.where(place < start, -1, 0)}
    if "position" in batch["query"]:
        info["position"] = jnp.maximum(place - start, 0)
    return info


def _join(out, own_heads):
    """Attention to the slots of all devices, from each device's attention to its own slots. The
    last number of `out` is the log-sum-exp of its scores. Gives this device's `own_heads` heads."""
    values, logsum = out[..., :-1], out[..., -1:]
    share = jnp.exp(logsum - lax.pmax(logsum, "tensor"))
    values = values * share / lax.psum(share, "tensor")
    if own_heads == values.shape[2]:
        return lax.psum(values, "tensor")
    return lax.psum_scatter(values, "tensor", scatter_dimension=2, tiled=True)
