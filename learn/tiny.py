"""A whole trainer on a mesh of data, fsdp and tensor, in one file.

    python learn/tiny.py        on eight simulated devices; half a minute of CPU time. It prints

    two matrices learn |x|: 9.774 -> 0.021
    a decoder learns to count: 4.743 -> 0.065
    on one device it has the same losses, up to 0.0000

This is FSDP: `layer` gathers its weights, and no device ever has two whole layers. The file imports
nothing from zigzag. `gather`, `columns` and `row` are short versions of three functions in
shard.py. `decoder` is a short version of model.loss, and `make_step` of train.make_step. On the
mesh data=2,fsdp=2,tensor=2, a device has

    a batch     [B/4, T/2]      data and fsdp leave a quarter of the rows, tensor half the sequence
    w_up        [D/2, F/2]      fsdp leaves half of D (a layer gathers it), tensor half of F
    w_down      [F/2, D/2]      the same
    a norm      [D]             all of it

and, between two blocks, the stream x [B/4, T/2, D]. Here tensor must divide T, H and F. The full
versions add more axes, losses and optimizers, a split vocabulary, sums in float32, and checkpoints.
A test checks that train.py gets the same losses with the same weights, batches and optimizer.

B batch, T sequence length, D model, H heads, N per head, F feed-forward, V vocabulary, L layers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

ROWS = ("data", "fsdp")             # devices along these axes have different rows
BATCH = P(ROWS, "tensor")           # a batch array [B, T, ...]: splits rows and sequence


# -------------------------------------------------------------------------------------------
# Collectives

def gather(w, spec):
    """Make a weight whole over fsdp. Autodiff adds the transpose, a reduce-scatter: each device
    gets its own part of the summed gradients."""
    return lax.all_gather(w, "fsdp", axis=list(spec).index("fsdp"),
                          tiled=True) if "fsdp" in spec else w


def columns(x, *weights):
    """Into a block: x [B, T/n, D] -> a product [B, T, F/n] for each weight [D, F/n]."""
    x = lax.all_gather(x, "tensor", axis=1, tiled=True)
    return [jnp.tensordot(x, w, 1) for w in weights]


def row(h, w):
    """Out of a block: h [B, T, F/n] times w [F/n, D]. Each device has a partial sum of the whole
    result. The devices add them up, and each keeps its part of the sequence: [B, T/n, D]."""
    return lax.psum_scatter(jnp.tensordot(h, w, h.ndim - 2), "tensor", scatter_dimension=1,
                            tiled=True)


# -------------------------------------------------------------------------------------------
# Two losses, as each device computes them: the sum over its tokens, and the token count

def two_matrices(params, batch):
    """The squared error of a network with one hidden layer."""
    hidden, = columns(batch["x"], params["w_up"])
    error = row(jax.nn.relu(hidden), params["w_down"]) - batch["y"]
    return jnp.sum(error**2), jnp.sum(batch["weights"])


TWO_MATRICES = {"w_up": P("fsdp", "tensor"), "w_down": P("tensor", "fsdp")}


def decoder(params, batch):
    """The cross-entropy of the next token."""
    x = params["embed"][batch["tokens"]] * params["embed"].shape[1]**0.5
    # A checkpoint keeps only x: the backward pass gathers a layer's weights again.
    x, _ = lax.scan(jax.checkpoint(layer), x, params["layers"])
    logits = norm(x, params["norm"]) @ params["head"]                           # [B, T/n, V]
    chosen = jnp.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
    losses = jax.nn.logsumexp(logits, -1) - chosen
    return jnp.sum(losses * batch["weights"]), jnp.sum(batch["weights"])


LAYER = {"attn_norm": P(), "wq": P("fsdp", "tensor"), "wk": P("fsdp", "tensor"),
         "wv": P("fsdp", "tensor"), "wo": P("tensor", None, "fsdp"), "mlp_norm": P(),
         "w_gate": P("fsdp", "tensor"), "w_up": P("fsdp", "tensor"), "w_down": P("tensor", "fsdp")}
# Each weight of the layers is one array [L, ...], stacked over all layers.
DECODER = {"embed": P(None, "fsdp"), "norm": P(), "head": P("fsdp"),
           "layers": {name: P(None, *spec) for name, spec in LAYER.items()}}


def layer(x, w):
    """x [B, T/n, D] after attention and an MLP. This makes the layer's weights whole over fsdp.
    Inside a block, a device has the whole sequence, and some of the heads and columns."""
    w = jax.tree.map(gather, w, LAYER)
    q, k, v = columns(norm(x, w["attn_norm"]), w["wq"], w["wk"], w["wv"])       # [B, T, H/n, N]
    heads = jax.nn.dot_product_attention(rotary(q), rotary(k), v, is_causal=True)
    x = x + row(heads, w["wo"])
    gate, up = columns(norm(x, w["mlp_norm"]), w["w_gate"], w["w_up"])          # [B, T, F/n]
    return x + row(jax.nn.silu(gate) * up, w["w_down"]), None


def norm(x, scale):
    return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale


def rotary(x):
    """Rotates each pair (x[i], x[i + N/2]) of a head by its token's position times a rate."""
    rates = 10000.0 ** -jnp.linspace(0, 1, x.shape[-1] // 2, endpoint=False)
    angle = jnp.arange(x.shape[1])[:, None, None] * rates                       # [T, 1, N/2]
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle),
                            b * jnp.cos(angle) + a * jnp.sin(angle)], -1)


# -------------------------------------------------------------------------------------------
# The step

def mark(w):
    """Make a weight's type vary over data and fsdp. The values are the same on all these devices,
    but the gradients will differ, because each device has different rows."""
    missing = tuple(axis for axis in ROWS if axis not in jax.typeof(w).mat.varying)
    return lax.pcast(w, missing, to="varying") if missing else w


def gather_the_rest(params, specs):
    """Make the weights outside the layers whole over fsdp; leave the layers' weights unchanged."""
    return {name: w if name == "layers" else jax.tree.map(gather, w, specs[name])
            for name, w in params.items()}


def make_step(loss, specs, optimizer, mesh, accumulate=1):
    """step(params, opt, batch) -> params, opt, the mean loss. It cuts the batch into `accumulate`
    parts, so only one part's activations are in memory."""
    def on_device(params, batch):
        # Cast the weights here, outside value_and_grad. Inside, jax would cast them where they meet
        # the batch. A cast's transpose is a psum, so every part would send the gradients. Over
        # tensor, jax does exactly that, for example for norms, whose gradients need that sum.
        params = jax.tree.map(mark, params)
        whole, scatter = jax.vjp(lambda params: gather_the_rest(params, specs), params)

        def add_part(total, part):
            (value, count), grads = jax.value_and_grad(loss, has_aux=True)(whole, part)
            grads, = scatter(grads)                 # (the layers' gradients are scattered already)
            return jax.tree.map(jnp.add, total, (grads, value, count)), None

        parts = jax.tree.map(lambda a: a.reshape(accumulate, -1, *a.shape[1:]), batch)
        # The initial totals, made from arrays that vary over the same axes as the parts' results.
        zero = 0 * jnp.sum(batch["weights"])
        total = jax.tree.map(lambda w: 0 * w, params), zero, zero
        (grads, value, count), _ = lax.scan(add_part, total, parts)

        # Once for all parts: sum over the axes that no gather's transpose has summed over yet.
        grads = jax.tree.map(
            lambda g, spec: lax.psum(g, "data" if "fsdp" in spec else ROWS), grads, specs)
        return grads, *lax.psum((value, count), (*ROWS, "tensor"))

    gradients = jax.shard_map(on_device, mesh=mesh, in_specs=(specs, BATCH),
                              out_specs=(specs, P(), P()))

    def step(params, opt, batch):
        grads, value, count = gradients(params, batch)
        grads = jax.tree.map(lambda g: g / count, grads)
        # Outside shard_map. This is elementwise, so each device updates only the parts it holds.
        updates, opt = optimizer.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, value / count

    return jax.jit(step, donate_argnums=(0, 1))


def train(loss, params, specs, batches, optimizer, mesh, accumulate=1):
    """Train `params` on the batches and return each batch's loss."""
    params, batches = jax.device_put(
        (params, batches), (jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs),
                            NamedSharding(mesh, BATCH)))
    step, losses = make_step(loss, specs, optimizer, mesh, accumulate), []
    opt = jax.jit(optimizer.init)(params)
    for batch in batches:
        params, opt, value = step(params, opt, batch)
        losses.append(float(value))
    return losses


# -------------------------------------------------------------------------------------------

def normal(rng, *shape):
    """A random weight [in, ...] that keeps the size of the numbers it multiplies."""
    return rng.normal(size=shape).astype(np.float32) * shape[0]**-0.5


def make_decoder(rng, L=2, D=64, H=4, F=128, V=64):
    def stack(*shape):
        return np.stack([normal(rng, *shape) for _ in range(L)])

    return {"embed": normal(rng, V, D),
            "layers": {"attn_norm": np.ones((L, D)), "wq": stack(D, H, D // H),
                       "wk": stack(D, H, D // H), "wv": stack(D, H, D // H),
                       "wo": stack(D, D).reshape(L, H, D // H, D), "mlp_norm": np.ones((L, D)),
                       "w_gate": stack(D, F), "w_up": stack(D, F), "w_down": stack(F, D)},
            "norm": np.ones(D), "head": normal(rng, D, V)}


def mesh_of(data, fsdp, tensor):
    return jax.make_mesh((data, fsdp, tensor), ("data", "fsdp", "tensor"),
                         devices=jax.devices()[:data * fsdp * tensor],
                         axis_types=(AxisType.Auto,) * 3)


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    rng, ones = np.random.default_rng(0), np.ones((16, 32), np.float32)

    x = rng.normal(size=(16, 32, 8)).astype(np.float32)
    params = {"w_up": normal(rng, 8, 64), "w_down": normal(rng, 64, 8)}
    losses = train(two_matrices, params, TWO_MATRICES, [{"x": x, "y": np.abs(x), "weights": ones}]
                   * 200, optax.adam(0.01), mesh_of(2, 2, 2))
    print(f"two matrices learn |x|: {losses[0]:.3f} -> {losses[-1]:.3f}")

    start, by = rng.integers(0, 64, (100, 16, 1)), rng.integers(1, 4, (100, 16, 1))
    ids = ((start + by * np.arange(33)) % 64).astype(np.int32)      # rows that count by 1, 2 or 3
    batches = [{"tokens": i[:, :-1], "targets": i[:, 1:], "weights": ones} for i in ids]
    params = make_decoder(rng)
    losses, alone = (train(decoder, params, DECODER, batches, optax.adamw(0.003), mesh, accumulate)
                     for mesh, accumulate in ((mesh_of(2, 2, 2), 2), (mesh_of(1, 1, 1), 1)))
    print(f"a decoder learns to count: {losses[0]:.3f} -> {losses[-1]:.3f}")
    difference = max(abs(a - b) for a, b in zip(losses, alone))
    print(f"on one device it has the same losses, up to {difference:.4f}")


if __name__ == "__main__":
    main()
