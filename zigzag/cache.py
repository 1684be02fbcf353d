"""The cache of decoding: what attention keeps of all tokens so far.

    [B, S, K, N]    keys and values of a layer. A token stands in slot (its place in the padded row)
                    mod S
    a window        has as many slots as its queries see, and those of one chunk of a prompt: new
                    tokens take the slots of those that nobody sees any more
    latent          one vector for all heads, of which keys and values are made
    on a mesh       tensor splits the heads K. Where it does not divide them it splits the slots:
                    each device attends, with all heads, to the tokens that it has, and the parts
                    are joined as those of a ring are

Each layer has arrays of its own, which a compiled loop over tokens updates in place: a loop over
layers would copy them. (They are kept as [B, K, S, N], as products read them.)
"""

from typing import Any, Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from zigzag.attention import in_blocks
from zigzag.mesh import ambient, mark_varying
from zigzag.positions import layer_slots

# A prompt is read in chunks of so many tokens.
CHUNK = 256


def _splits_heads(c, specs, tensor):
    """Whether tensor splits the heads of a layer's keys, by the specs of its weights."""
    return c.kv_rank == 0 and c.kv_heads % tensor == 0 and any(
        "tensor" in specs[name] for name in ("wq", "wk", "wv"))


def layer_specs(c: Any, specs: Any, batch: P, tensor: int) -> dict[str, P]:
    """How a layer's cache is split, by the specs of its weights and of a batch."""
    rows, = batch or (None,)
    kept = cross = P(rows)
    if tensor > 1:
        kept = P(rows, "tensor") if _splits_heads(c, specs, tensor) else P(rows, None, "tensor")
    if tensor > 1 and c.encoder_layers and "tensor" in specs["cross_wk"]:
        cross = P(rows, None, "tensor")
    names = ["latent"] if c.kv_rank else ["k", "v"]
    names += ["cross_k", "cross_v", "cross_document"] if c.encoder_layers else []
    return {name: P(rows) if name == "cross_document" else cross if name.startswith("cross")
            else kept for name in names}


def new_layer(c: Any, i: int, rows: int, slots: int, dtype: Any, specs: Any = None,
              tensor: int = 1) -> dict[str, Array]:
    """The empty cache of layer i for rows of so many slots, of all devices together."""
    if seen := layer_slots(c, i):
        slots = min(slots, -(-seen // CHUNK) * CHUNK + CHUNK)
    if tensor > 1 and not _splits_heads(c, specs, tensor):
        slots = -(-slots // tensor) * tensor
    if c.kv_rank:
        return {"latent": jnp.zeros((rows, 1, slots, c.rotary_dim + c.kv_rank), dtype)}
    return {name: jnp.zeros((rows, c.kv_heads, slots, width), dtype)
            for name, width in (("k", c.head_dim), ("v", c.v_head_dim or c.head_dim))}


def _parts(kept, kv_heads):
    """Into how many parts tensor splits the slots: those of an array that has all heads here."""
    sizes, manual = ambient()
    return sizes["tensor"] if "tensor" in manual and kept.shape[1] == kv_heads else 1


def _own_slots(kept, parts):
    """The numbers of the slots that this device has."""
    first = lax.axis_index("tensor") * kept.shape[2] if parts > 1 else 0
    return first + jnp.arange(kept.shape[2])


def put(kept: Array, new: Array, slot: Array, kv_heads: int) -> Array:
    """What is kept, with new keys, values or latent vectors [B, T, K, N] from this slot on."""
    new, parts = mark_varying(new.swapaxes(1, 2).astype(kept.dtype), kept), _parts(kept, kv_heads)
    if parts == 1:
        return lax.dynamic_update_slice_in_dim(kept, new, slot % kept.shape[2], 2)
    own = kept.shape[2]
    at = (slot + jnp.arange(new.shape[2])) % (own * parts) - lax.axis_index("tensor") * own
    return kept.at[:, :, jnp.where((at >= 0) & (at < own), at, own)].set(new, mode="drop")


def attend(attention: Callable, q: Array, k: Array, v: Array, mask: Callable,
           batch: dict[str, Any], heads: int, kv_heads: int, folds: bool = True) -> Array:
    """q [B, T, H, N] of the batch's tokens to what is kept, k and v [B, K, S, N], with theirs in
    it: [B, T, H, M]. attention(q, k, v, mask) and mask(query, key) are as shard.attend takes them.
    Queries of heads that share a key head count as more time (`folds`), so that no key is
    repeated."""
    parts, own, query = _parts(k, kv_heads), q.shape[2], batch["query"]
    if parts > 1 and own < heads:
        q = lax.all_gather(q, "tensor", axis=2, tiled=True)
    (B, T, H, N), K = q.shape, k.shape[1]
    key = _key_info(batch, _own_slots(k, parts), k.shape[2] * parts)
    folds = folds and K < H
    if folds:
        q = q.reshape(B, T, K, H // K, N).swapaxes(2, 3).reshape(B, -1, K, N)
        query = jax.tree.map(lambda a: jnp.repeat(a, H // K, 1), query)

    def attend_to(queries, keys):
        (q, query), (k, v, key) = queries, keys
        values, logsum = attention(q, k, v, mask(query, key))
        if parts > 1:       # in one array, as in_blocks joins its blocks
            logsum = logsum.swapaxes(1, 2)[..., None]
            values = jnp.concatenate([values.astype(jnp.float32), logsum], -1)
        return values, logsum

    out = in_blocks(attend_to, (q, query), (k.swapaxes(1, 2), v.swapaxes(1, 2), key), False)
    if folds:
        out = out.reshape(B, T, H // K, K, -1).swapaxes(2, 3).reshape(B, T, H, -1)
    return out if parts == 1 else _join(out, own).astype(q.dtype)


def _key_info(batch, slots, total):
    """What is known of the token in each of these slots, of so many: the newest of those whose
    place belongs there. Before the row's start, or where none is yet, it is in no document."""
    last, start = batch["query"]["place"][:, -1:], batch["start"][:, None]
    place = last - (last - slots) % total
    info = {"place": place, "document": jnp.where(place < start, -1, 0)}
    if "position" in batch["query"]:
        info["position"] = jnp.maximum(place - start, 0)
    return info


def _join(out, own):
    """Attention to the tokens of all devices of tensor, of so many own heads: `out` has, last, the
    logarithm of what each device's weights were divided by."""
    values, logsum = out[..., :-1], out[..., -1:]
    share = jnp.exp(logsum - lax.pmax(logsum, "tensor"))
    values = values * share / lax.psum(share, "tensor")
    if own == values.shape[2]:
        return lax.psum(values, "tensor")
    return lax.psum_scatter(values, "tensor", scatter_dimension=2, tiled=True)
