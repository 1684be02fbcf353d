"""DP-SGD: a classifier that learns little about any single example (Abadi et al., 2016).

    example     a point on one of three interleaved spirals
    loss        the cross-entropy. It clips each row's gradient to a norm of CLIP before the sum
    optimizer   adds noise of NOISE times CLIP to that sum, then applies Adam
    metric      the fraction of held-out points classified correctly. `main` prints the privacy
                spent, an estimate for randomly sampled batches. It's no guarantee, because batches
                here are parts of a shuffle. Also, anyone who knows --seed can subtract the noise

    python -m recipes.dpsgd [flags of train.py]
"""

import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import train

CLIP, NOISE, DELTA, COUNT = 1.0, 1.0, 1e-5, 20_000


def points(count, seed):
    rng = np.random.default_rng(seed)
    label, turn = rng.integers(0, 3, count), rng.uniform(0.2, 1, count)
    angle = 2 * np.pi * (turn + label / 3)
    x = np.stack([np.cos(angle), np.sin(angle)], 1) * turn[:, None]
    return list(zip((x + rng.normal(size=x.shape) * 0.03).astype(np.float32), label))


def collate(examples):
    x, label = zip(*examples)
    return {"x": np.stack(x), "label": np.array(label, np.int32)}


def init(key):
    a, b = jax.random.split(key)
    return {"up": jax.random.normal(a, (2, 64)) * 3, "bias": jax.random.normal(b, (64,)),
            "down": jnp.zeros((64, 3))}


def logits(params, x):
    return jax.nn.relu(x @ params["up"] + params["bias"]) @ params["down"]


def of_row(params, row):
    return -jax.nn.log_softmax(logits(params, row["x"]))[row["label"]]


def loss(params, batch):
    """Return the sum of the row losses. Its gradient is the sum of the clipped row gradients."""
    start = jax.lax.stop_gradient(params)
    losses, grads = jax.vmap(jax.value_and_grad(of_row), (None, 0))(start, batch)
    norms = jax.vmap(optax.tree.norm)(grads)
    share = jnp.minimum(1, CLIP / jnp.maximum(norms, 1e-12))
    clipped = jax.tree.map(lambda g: jnp.tensordot(share, g, 1), grads)
    zero = optax.tree.vdot(optax.tree.sub(params, start), clipped)  # its gradient is `clipped`
    return losses.sum() + zero, len(losses)


def epsilon(steps, share):
    """Return epsilon, the privacy spent at DELTA by this many steps, each on this fraction of the
    examples. Use the sampled Gaussian's moments of orders 2 to 127 (Mironov et al., 2019)."""
    def moment(order):
        terms = [math.lgamma(order + 1) - math.lgamma(k + 1) - math.lgamma(order - k + 1)
                 + (order - k) * math.log1p(-share) + k * math.log(share)
                 + (k * k - k) / (2 * NOISE**2) for k in range(order + 1)]
        return np.logaddexp.reduce(terms) / (order - 1)

    return min(steps * moment(order) + math.log(1 / DELTA) / (order - 1) for order in range(2, 128))


def main(argv=None):
    config = train.parse(["--out", "dpsgd", "--steps", "600", "--batch", "256", "--dtype",
                          "float32", *(sys.argv[1:] if argv is None else argv)])
    noise = optax.add_noise((NOISE * CLIP / config.batch) ** 2, 0.0, config.seed)   # for the mean
    spent = epsilon(config.steps, min(config.batch / COUNT, 0.999))
    print(f"privacy  epsilon {spent:.2f} at delta {DELTA:g} (if batches were random samples)")
    task = train.Task(init, collate, loss,
                      predict=lambda params, batch: logits(params, batch["x"]).argmax(-1),
                      metric=lambda found, rows: {"right": np.mean(found == [y for _, y in rows])},
                      examples=points(COUNT, 0), held_out=points(1000, 1))
    return train.fit(config, task, optimizer=optax.chain(noise, optax.adam(0.01)))


if __name__ == "__main__":
    train.run_main(main)
