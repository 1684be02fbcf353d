"""The run from the UvA notebook on 3D parallelism: its transformer memorizes a single batch.

    example     one of 32 rows of 8 random tokens; every update uses the same 32
    loss        the network's usual loss, with dropout on and accuracy logged
    optimizer   the notebook's: Adam, warmed up to 2e-4 in ten steps, then decayed by 0.99 per step
    result      the loss and accuracy at step 22. The notebook printed 1.063429 and 0.855469

    python -m recipes.uva3d [--mesh data=2,pipe=2,tensor=2] [flags of train.py]
"""

import sys

import numpy as np
import optax

import train


def rows():
    """Yield each row's (inputs, targets). The inputs are a 0, then all targets but the last."""
    for targets in np.random.default_rng(42).integers(1, 100, (32, 8)):
        yield np.append(0, targets[:-1]), targets


def collate(examples):
    tokens, targets = (np.array(part, np.int32) for part in zip(*examples))
    return {"tokens": tokens, "targets": targets, "weights": np.ones(tokens.shape, np.float32)}


def main(argv=None):
    config = train.parse(["--model", "uva3d", "--out", "uva3d", "--steps", "22", "--batch", "32",
                          "--accuracy", "true", "--eval_every", "0", "--seed", "42",
                          *(sys.argv[1:] if argv is None else argv)])
    init, loss, _ = train.language(config)
    rate = optax.warmup_exponential_decay_schedule(0, 2e-4, 10, 1, 0.99)
    return train.fit(config, train.Task(init, collate, loss, examples=list(rows())),
                     optimizer=optax.adam(rate))


if __name__ == "__main__":
    train.run_main(main)
