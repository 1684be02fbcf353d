"""Federated averaging: each client trains on its own private images, and then every client gets
the mean of all clients' weights (McMahan et al., 2017).

    example     a client: its 28 handwritten digits, from one to three classes
    loss        the loss at the current weights. A client's "gradient" is how far LOCAL steps of
                gradient descent on its images move the weights
    optimizer   subtracts the mean over a batch of clients, which yields their mean weights
    metric      the fraction of held-out digits classified correctly

    python -m recipes.fedavg [flags of train.py]
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import train

LOCAL, RATE, SIZE = 5, 0.3, 28      # steps per client, their learning rate, images per client


def clients():
    """Return 51 training clients with few classes each, and 12 held-out clients with any class."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))[:63 * SIZE]
    held_out, rest = order[:12 * SIZE], order[12 * SIZE:]
    shards = rest[np.argsort(digits.target[rest], kind="stable")].reshape(-1, SIZE // 2)
    shards = shards[np.random.default_rng(1).permutation(len(shards))].reshape(-1, SIZE)
    x = digits.data.astype(np.float32) / 16
    return [[(x[own], digits.target[own]) for own in some.reshape(-1, SIZE)]
            for some in (shards, held_out)]


def collate(examples):
    x, labels = zip(*examples)
    return {"x": np.stack(x), "labels": np.stack(labels).astype(np.int32)}


def init(key):
    a, b = jax.random.split(key)
    return {"up": jax.random.normal(a, (64, 64)) / 8, "bias": jnp.zeros(64),
            "down": jax.random.normal(b, (64, 10)) / 8}


def logits(params, x):
    return jax.nn.relu(x @ params["up"] + params["bias"]) @ params["down"]


def of_client(params, client):
    """Return the mean cross-entropy on a client's images."""
    logs = jax.nn.log_softmax(logits(params, client["x"]))
    return -jnp.take_along_axis(logs, client["labels"][:, None], 1).mean()


def learned(params, client):
    """Return the weights after LOCAL steps of gradient descent on a client's images."""
    def step(params, _):
        grads = jax.grad(of_client)(params, client)
        return jax.tree.map(lambda w, g: w - RATE * g, params, grads), None

    return jax.lax.scan(step, params, None, length=LOCAL)[0]


def loss(params, batch):
    """Return the sum of the clients' losses. Its gradient is the sum of the clients' moves."""
    start = jax.lax.stop_gradient(params)
    ends = jax.vmap(learned, (None, 0))(start, batch)
    moved = jax.tree.map(lambda w, ends: (w - ends).sum(0), start, ends)
    losses = jax.vmap(of_client, (None, 0))(start, batch)
    zero = optax.tree.vdot(optax.tree.sub(params, start), moved)    # its gradient is `moved`
    return losses.sum() + zero, len(losses)


def main(argv=None):
    examples, held_out = clients()
    config = train.parse(["--out", "fedavg", "--steps", "300", "--batch", "16", "--dtype",
                          "float32", *(sys.argv[1:] if argv is None else argv)])
    task = train.Task(init, collate, loss, examples=examples, held_out=held_out,
                      predict=lambda params, batch: logits(params, batch["x"]).argmax(-1),
                      metric=lambda outputs, rows: {"right": float(np.mean(
                          outputs == np.stack([labels for _, labels in rows])))})
    return train.fit(config, task, optimizer=optax.sgd(1.0))


if __name__ == "__main__":
    train.run_main(main)
