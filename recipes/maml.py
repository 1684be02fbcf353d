"""MAML: learn weights that adapt to a new sinusoid in a single gradient step (Finn et al., 2017).

    example     a sinusoid: 10 points to learn from, and 10 more to test on
    loss        the error on the test points after a gradient step on the other points. Its gradient
                has second derivatives; --first_order drops them (FOMAML)
    metric      the error after 0, 1, 4 and 9 steps, on sinusoids not seen in training

    python -m recipes.maml [--first_order] [flags of train.py]
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import train

SHOTS, STEP = 10, 0.01      # points to learn from; the learning rate for that gradient step


def sinusoids(seed, count):
    """Draw `count` sinusoids as points (x, y): amplitudes 0.1 to 5, phases 0 to pi, x -5 to 5."""
    rng = np.random.default_rng(seed)
    amplitude, phase = rng.uniform(0.1, 5, (count, 1)), rng.uniform(0, np.pi, (count, 1))
    x = rng.uniform(-5, 5, (count, SHOTS + 10))
    return list(np.stack([x, amplitude * np.sin(x - phase)], 2).astype(np.float32))


def collate(examples):
    return {"points": np.stack(examples)}


def init(key):
    keys = jax.random.split(key, 3)
    return {f"{name}{i}": jax.random.normal(k, shape) * 0.1 if name == "w" else jnp.zeros(shape[1])
            for i, (k, shape) in enumerate(zip(keys, ((1, 40), (40, 40), (40, 1))))
            for name in ("w", "b")}


def error(w, points):
    """Return the mean squared error of the network w on points [N, 2]."""
    h = jax.nn.relu(points[:, :1] @ w["w0"] + w["b0"])
    h = jax.nn.relu(h @ w["w1"] + w["b1"])
    return jnp.mean((h @ w["w2"] + w["b2"] - points[:, 1:]) ** 2)


def learned(w, points, first_order=False):
    """Return the weights after a step of gradient descent on these points."""
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
        """Return errors [B, 10] after 0 to 9 steps."""
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
    return train.fit(config, train.Task(
        init, collate, loss, predict, metric=metric,
        examples=lambda seed, step, _: sinusoids((seed, step), config.batch),
        held_out=sinusoids(12345, 600), record={"first_order": first_order}))


if __name__ == "__main__":
    train.run_main(main)
