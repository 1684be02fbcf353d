"""Regression: gradient descent finds the least-squares fit to scikit-learn's diabetes data.

    example     a patient's ten measurements, and how far the disease has progressed a year later
    loss        the squared error
    metric      the fraction of variance explained (R2), next to R2 for numpy's solution

    python -m recipes.regress [flags of train.py]
"""

import sys

import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_diabetes

import train


def patients():
    """Return rows [442, 10] and targets [442], standardized to mean 0 and standard deviation 1."""
    x, y = load_diabetes(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    return [((a - a.mean(0)) / a.std(0))[order].astype(np.float32) for a in (x, y)]


def collate(examples):
    x, y = zip(*examples)
    return {"x": np.stack(x), "y": np.array(y, np.float32)}


def init(key):
    return {"slope": jnp.zeros(10), "bias": jnp.zeros(())}


def predict(params, batch):
    return batch["x"] @ params["slope"] + params["bias"]


def loss(params, batch):
    return ((predict(params, batch) - batch["y"]) ** 2).sum(), len(batch["y"])


def explained(found, y):
    return float(1 - ((found - y) ** 2).mean() / y.var())


def main(argv=None):
    x, y = patients()
    learned, held_out = slice(42, None), slice(42)
    solution, *_ = np.linalg.lstsq(np.c_[x, np.ones(len(x))][learned], y[learned])
    best = explained(x[held_out] @ solution[:-1] + solution[-1], y[held_out])
    config = train.parse(["--out", "regress", "--steps", "1000", "--batch", "400",
                          *(sys.argv[1:] if argv is None else argv)])
    task = train.Task(init, collate, loss, predict, list(zip(x[learned], y[learned])),
                      list(zip(x[held_out], y[held_out])), metric=lambda outputs, examples: {
                          "r2": explained(outputs, y[held_out]), "r2_of_least_squares": best})
    return train.fit(config, task, optimizer=optax.sgd(0.1, momentum=0.9))


if __name__ == "__main__":
    train.run_main(main)
