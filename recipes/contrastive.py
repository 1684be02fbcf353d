"""Contrastive learning: match the left and right halves of images, the way CLIP matches images
and texts (Radford et al., 2021).

    example     the left half and the right half of a handwritten digit of 8 x 8 pixels
    loss        the cross-entropy of the correct partner among all rows of the batch, from left to
                right and from right to left. `shard.all_rows` collects the rows from all devices
    metric      the fraction of held-out left halves whose own right half is the nearest of all 360

    python -m recipes.contrastive [flags of train.py]
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import shard
import train


def halves():
    images = load_digits().images.astype(np.float32) / 16
    images = images[np.random.default_rng(0).permutation(len(images))]
    pairs = list(zip(images[:, :, :4].reshape(-1, 32), images[:, :, 4:].reshape(-1, 32)))
    return pairs[360:], pairs[:360]


def collate(examples):
    left, right = zip(*examples)
    return {"left": np.stack(left), "right": np.stack(right)}


def init(key):
    keys = jax.random.split(key, 4)

    def tower(a, b):
        return {"up": jax.random.normal(a, (32, 256)) / 4, "bias": jnp.zeros(256),
                "down": jax.random.normal(b, (256, 64)) / 16}

    return {"left": tower(*keys[:2]), "right": tower(*keys[2:]), "scale": jnp.log(10.0)}


def vectors(params, batch):
    """Yield unit vectors [B, 64] for the left halves, then for the right halves."""
    for side in "left", "right":
        w = params[side]
        x = jax.nn.gelu(batch[side] @ w["up"] + w["bias"]) @ w["down"]
        yield x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def loss(params, batch):
    left, right = vectors(params, batch)

    def to_partner(x, others):
        every, first = shard.all_rows(others, batch["left"])
        logs = jax.nn.log_softmax(jnp.exp(params["scale"]) * x @ every.T)
        return -jnp.take_along_axis(logs, (first + jnp.arange(len(x)))[:, None], 1).sum()

    return (to_partner(left, right) + to_partner(right, left)) / 2, len(left)


def metric(outputs, examples):
    left, right = outputs
    return {"found": float(np.mean((left @ right.T).argmax(1) == np.arange(len(left))))}


def main(argv=None):
    config = train.parse(["--out", "contrastive", "--steps", "400", "--batch", "256", "--lr",
                          "0.001", "--eval_batch", "360",
                          *(sys.argv[1:] if argv is None else argv)])
    examples, held_out = halves()
    return train.fit(config, train.Task(
        init, collate, loss, lambda params, batch: tuple(vectors(params, batch)), examples,
        held_out, metric=metric))


if __name__ == "__main__":
    train.run_main(main)
