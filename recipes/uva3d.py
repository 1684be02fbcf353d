"""The run of the UvA notebook on 3D parallelism: its transformer memorizes one batch.

    example     one of 32 rows of 8 random tokens, the same 32 in every update
    loss        the network's own (dropout is on), with its accuracy
    optimizer   the notebook's: Adam, ten steps of warmup to 2e-4, then 0.99 times that in each step
    result      loss and accuracy of the 22nd step. The notebook printed 1.063429 and 0.855469

    python -m recipes.uva3d [--mesh data=2,pipe=2,tensor=2] [flags of train.py]
"""

import sys

import numpy as np
import optax

import train


def rows():
    """Yield (inputs, targets) of each row. The inputs are a 0, then the targets but the last."""
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
