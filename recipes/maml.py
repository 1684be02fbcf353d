"""MAML: weights from which one step of gradient descent learns a new sinusoid (Finn et al., 2017).

    example     a sinusoid: 10 points to learn it from, and 10 more to judge by
    loss        the error on the latter, after a step of gradient descent on the former: its
                gradient has second derivatives (FOMAML, with --first_order, leaves them out)
    metric      the error after 0, 1, 4 and 9 steps, on sinusoids that were never seen

    python -m recipes.maml [--first_order] [flags of train.py]
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import train

SHOTS, STEP = 10, 0.01      # points to learn from; the rate of the step that learns from them


def sinusoid(number):
    """Points (x, y) of one sinusoid: amplitude 0.1 to 5, phase 0 to pi, x from -5 to 5."""
    rng = np.random.default_rng(number)
    amplitude, phase = rng.uniform(0.1, 5), rng.uniform(0, np.pi)
    x = rng.uniform(-5, 5, SHOTS + 10)
    return np.stack([x, amplitude * np.sin(x - phase)], 1).astype(np.float32)


class Sinusoids:
    """So many sinusoids, from this number on, each made when it is asked for."""

    def __init__(self, first, count):
        self.numbers = range(first, first + count)

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, i):
        return sinusoid(self.numbers[i])


def collate(examples):
    return {"points": np.stack(examples)}


def init(key):
    keys = jax.random.split(key, 3)
    return {f"{name}{i}": jax.random.normal(k, shape) * 0.1 if name == "w" else jnp.zeros(shape[1])
            for i, (k, shape) in enumerate(zip(keys, ((1, 40), (40, 40), (40, 1))))
            for name in ("w", "b")}


def error(w, points):
    """The mean squared error of the network w on points [N, 2]."""
    x, y = points[:, :1], points[:, 1:]
    for i in range(3):
        x = jax.nn.relu(x) if i else x
        x = x @ w[f"w{i}"] + w[f"b{i}"]
    return jnp.mean((x - y) ** 2)


def learned(w, points, first_order=False):
    """The weights after one step of gradient descent on these points."""
    gradient = jax.grad(error)(w, points)
    gradient = jax.lax.stop_gradient(gradient) if first_order else gradient
    return jax.tree.map(lambda w, g: w - STEP * g, w, gradient)


def main(argv=None):
    argv = sys.argv[1:] if argv is None else list(argv)
    first_order = "--first_order" in argv
    argv = [word for word in argv if word != "--first_order"]

    def loss(params, batch):
        def of_one(points):
            return error(learned(params, points[:SHOTS], first_order), points[SHOTS:])

        errors = jax.vmap(of_one)(batch["points"])
        return errors.sum(), len(errors)

    def predict(params, batch):
        """Errors [B, 10] after 0 to 9 steps."""
        def of_one(points):
            def step(w, _):
                return learned(w, points[:SHOTS]), error(w, points[SHOTS:])

            return jax.lax.scan(step, params, None, length=10)[1]

        return jax.vmap(of_one)(batch["points"])

    def metric(errors, examples):
        return {f"error_{n}": float(errors[:, n].mean()) for n in (0, 1, 4, 9)}

    config = train.parse(["--out", "maml", "--steps", "20000", "--batch", "100", "--lr", "0.001",
                          "--weight_decay", "0", "--decay", "constant", "--dtype", "float32",
                          *argv])
    return train.fit(config, init, collate, loss, predict, metric=metric,
                     record={"first_order": first_order},
                     examples=Sinusoids(1000, 4_000_000), held_out=Sinusoids(0, 600))


if __name__ == "__main__":
    train.run_main(main)
