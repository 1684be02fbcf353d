"""SAM's image encoder: turns an image into a small grid of vectors.

    image -> patches, + their positions -> [ norm -> attention -> + -> norm -> MLP -> + ] x L
          -> neck: 1 x 1 convolution -> norm -> 3 x 3 convolution -> norm -> [B, O, h, w]

Most layers attend within windows of 14 x 14 tokens, and a few attend to the whole image.
Consecutive layers of the same kind form a run, with stacked weights; the two kinds have distance
tables of different sizes. Each score gets a bias that depends on the query and its distance to the
key in rows and columns: q . down[rows] + q . right[columns].

This is a SamVisionModel; sam_masks.py has the SamModel around it. Windows need the whole sequence,
and runs differ, so `check` rejects the axes pipe and seq.

B batch, T sequence, D model, H heads (K of keys), N per head (M of values), F feed-forward, L
layers of a run, J distances, C channels, y and x the sides of a patch, P and p rows and columns of
tokens, O width of the result (o the same), k and z the sides of a convolution.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import shard
from published import general, stems, transformer, windows
from published.family import Family, biased, keys, mlp, under
from published.general import Batch, Config, Shapes
from published.llama import record_of
from published.record import count, pictures, tower, wrong
from published.tables import layer_weights, norms
from published.transformer import norm
from zigzag.core.mesh import cast
from zigzag.parallel import attention
from zigzag.parallel.network import Network, Params, refuse_rows
from zigzag.parallel.products import matmul
from zigzag.parallel.table import Table

# The epsilon of the neck's norms, whatever config.json says for the layers' norms.
EPS = 1e-6


# -------------------------------------------------------------------------------------------
# The shape of a model

class Run(NamedTuple):
    """Consecutive layers with the same window size."""
    name: str       # the name of its weights
    numbers: list[int]
    window: int     # tokens on a side of a window; the image's side without windows


def runs(c: Config) -> list[Run]:
    known = record_of(c)

    def window(i):
        return 0 if i in known["global_attn_indexes"] else known["window_size"]

    groups = itertools.groupby(range(c.layers), window)
    return [Run(f"run{n}", list(numbers), size or c.side)
            for n, (size, numbers) in enumerate(groups)]


def table(c: Config) -> Params:
    """Return the table of all weights."""
    D, out = c.d_model, record_of(c)["output_channels"]
    make = Table(C=c.channels, y=c.patch_size, x=c.patch_size, D=D, P=c.side, p=c.side, O=out)
    weights = stems.patch_weights(c, make)
    if record_of(c)["use_abs_pos"]:
        weights["positions"] = make("1 P p D/fsdp", 0.02)
    weights |= {run.name: _layer_weights(c, run) for run in runs(c)}
    one, three = Table(k=1, z=1, D=D, O=out), Table(k=3, z=3, o=out, O=out)
    return weights | {"neck": one("k z D/fsdp O", D**-0.5),
                      "neck_out": three("k z o/fsdp O", (9 * out) ** -0.5),
                      **norms(c, make, "O", ["neck_norm", "norm"])}


def _layer_weights(c, run):
    weights = layer_weights(c, len(run.numbers))
    if record_of(c)["use_rel_pos"]:
        make = Table(L=len(run.numbers), J=2 * run.window - 1, N=c.head_dim)
        weights |= {name: make("L/pipe J N/fsdp", 0.02) for name in ("down", "right")}
    return weights


# -------------------------------------------------------------------------------------------
# The network

def _attend(w, q, k, v, _, window):
    """Attend within windows. If the layer has `down` and `right`, they bias the scores."""
    known = {"slot": jnp.broadcast_to(jnp.arange(window**2), q.shape[:2])}
    known = _distance_scores(w, q, window) if "down" in w else known

    def attend(q, k, v, query):
        seen = jnp.ones((1, 1, 1, 1), bool)
        return attention.softmax_attention(
            q, k, v, seen, (lambda s: s + _score_bias(query)) if "down" in w else None)

    return shard.attend(attend, q, k, v, lambda query, _: query, known, {})


def _distance_scores(w, q, window):
    """Compute two biases [B W, t, H, window] for queries q [B W, t, H, N]: the first per row of
    keys in the window, the second per column."""
    apart = np.arange(window)[:, None] - np.arange(window) + window - 1
    q = q.reshape(len(q), window, window, *q.shape[2:])
    scores = {name: jnp.einsum(f"bijhn,{side}kn->bijhk", q, w[name][apart],
                               preferred_element_type=jnp.float32)
              for name, side in (("down", "i"), ("right", "j"))}
    return jax.tree.map(lambda a: a.reshape(len(a), -1, *a.shape[3:]), scores)


def _score_bias(known):
    """Sum the two biases into the score bias [B W, H, t, keys]. Keys are in row-major order."""
    down, right = (known[name].swapaxes(1, 2) for name in ("down", "right"))
    scores = down[..., :, None] + right[..., None, :]
    return scores.reshape(*scores.shape[:3], -1)


def _neck(params, x, c):
    """x [B, T, D] -> [B, O, h, w]. The first convolution is 1 x 1, so it's a product per token."""
    x = norm(params, "neck_norm", matmul(x, params["neck"][0, 0]), c, eps=EPS)
    x = shard.whole_time(x).reshape(len(x), c.side, c.side, -1)
    x = lax.conv_general_dilated(x, params["neck_out"], (1, 1), [(1, 1), (1, 1)],
                                 dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return norm(params, "norm", x, c, eps=EPS).transpose(0, 3, 1, 2)


def forward(params: Params, pictures: Array, config: Config, specs: Params | None = None) -> Array:
    """Images [B, C, height, width] -> [B, O, h, w]. Both sides must be config.image_size."""
    c, size = config, (config.side,) * 2
    stems.check_source(pictures, c)
    params, kept = cast(params, c.dtype), c.side * c.patch_size
    x = windows.patches(params, pictures[:, :, :kept, :kept], c)
    x = x + params["positions"] if "positions" in params else x
    x = shard.residual_stream(x.reshape(len(x), -1, c.d_model))
    for run in runs(config):
        def layer(w, x, _, window=run.window):
            attend = functools.partial(_attend, window=window)
            return windows.block(w, x, size, window, c, attend), None

        x, _ = shard.layers(layer, params[run.name], x, None, specs and specs[run.name],
                            config)
    return _neck(params, x, config)


def loss(params: Params, batch: Batch, config: Config, specs: Params | None = None
         ) -> tuple:
    """Return (sum, count): the squared error of the output for images `source` against `targets`
    [B, O, h, w], and the element count. An encoder has no labels, so the targets can be another
    encoder's output, for example."""
    got = forward(params, batch["source"], config, specs)
    error = got.astype(jnp.float32) - batch["targets"].astype(jnp.float32)
    return jnp.sum(error**2), jnp.float32(error.size)


def batch_shapes(config: Config, rows: int) -> Shapes:
    """Return {name: shape} for a batch of `loss`."""
    shapes = transformer.batch_shapes(config, rows)
    there = rows, record_of(config)["output_channels"], config.side, config.side
    return shapes | {"targets": shapes["source"].update(shape=there)}


def check(c: Config, mesh: Any) -> None:
    """Reject options and meshes that this model doesn't support."""
    refuse_rows(c, [("dropout", c.dropout, "SAM has no dropout here; leave it out")])
    general.check_axes(mesh, "SAM's layers differ (some have windows, some see all), and windows "
                             "need the whole sequence")


# -------------------------------------------------------------------------------------------
# Published models

DEFAULTS = dict(hidden_size=768, output_channels=256, num_hidden_layers=12, num_attention_heads=12,
                num_channels=3, image_size=1024, patch_size=16, hidden_act="gelu",
                layer_norm_eps=1e-6, qkv_bias=True, mlp_ratio=4.0, mlp_dim=None, use_abs_pos=True,
                use_rel_pos=True, window_size=14, global_attn_indexes=[2, 5, 8, 11])


def _fields(r):
    globally = r["global_attn_indexes"]
    if not isinstance(globally, list) or not all(isinstance(i, int) for i in globally):
        raise wrong("global_attn_indexes", globally, ": expected a list of layer numbers")
    if r["window_size"]:
        count(r, "window_size")
    count(r, "output_channels")
    for name in ("use_abs_pos", "use_rel_pos"):     # `table` reads these
        r.plain(name)
    inner = r["mlp_dim"] or int(r["mlp_ratio"] * r["hidden_size"])
    return {**tower(r), **pictures(r), "d_ff": count({"mlp_dim": inner}, "mlp_dim"),
            "positions": "none", "head": "none",
            **biased(embed=True, qkv=r["qkv_bias"], out=True, mlp=True)}


ARRAYS = under("vision_encoder.", {
    "patch_embed.projection": "patch", "patch_embed.projection.weight": "D C y x -> patch",
    "pos_embed": "1 P p D -> positions"}, under("neck.", {
        "conv1.weight": "O D k z -> neck", "conv2.weight": "O o k z -> neck_out",
        "layer_norm1": "neck_norm", "layer_norm2": "norm"}), under("layers.{l}.", {
            "attn.qkv": "wq wk wv", "attn.proj": "wo", "attn.rel_pos_h": "-> down",
            "attn.rel_pos_w": "-> right", "layer_norm1": "attn_norm", "layer_norm2": "mlp_norm",
            **mlp("mlp.lin1", "mlp.lin2")}))


def stacks(c: Config, at: str = "") -> dict[str, list[tuple[str, list[int]]]]:
    """Name the layers' stacks for the arrays' names; `at` is the path to them in a larger model."""
    return {"l": [(at + run.name, run.numbers) for run in runs(c)]}


IN_VISION = "num_pos_feats scale mlp_ratio intermediate_size projection_dim tie_word_embeddings"
FAMILIES = {"sam_vision_model": Family(_fields, ARRAYS, DEFAULTS, stacks=stacks,
                                       neutral=keys(IN_VISION))}

NETWORK = Network("sam", Config, table, loss, batch_shapes, forward, FAMILIES, check,
                  gives=lambda c: "vectors", source_shape=transformer.source_shape)
