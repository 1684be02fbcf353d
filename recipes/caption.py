"""Captions: an image encoder and a text decoder learn to describe an image.

    example     (an image [3, 16, 16] of a shape, ids of a text such as: a red ring, top left)
    loss        the network's usual loss, the caption's cross-entropy
    metric      exact, the fraction of held-out images whose caption matches letter for letter

    python -m recipes.caption [flags of train.py]
"""

import dataclasses
import sys

import numpy as np

import data
import train
from zigzag.core.parts import part

MODEL = ["--model", "transformer", "--stem", "patches", "--image_size", "16", "--patch_size", "4",
         "--encoder_layers", "2", "--layers", "2", "--d_model", "128", "--heads", "4",
         "--positions", "learned", "--seq_len", "32", "--vocab_size", "257"]
COLORS = {"red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1), "yellow": (1, 1, 0)}
SHAPES = ("square", "disc", "cross", "ring")
Y, X = np.mgrid[:16, :16]


def drawn(rng):
    """Draw an image with some noise, and return it with its caption. Without the noise, there are
    only 512 different images, all of which are in the training set."""
    color, shape = list(COLORS)[rng.integers(4)], SHAPES[rng.integers(4)]
    row, column, size = *rng.choice([4, 5, 10, 11], 2), rng.integers(3, 5)
    y, x = abs(Y - row), abs(X - column)
    far = np.hypot(y, x)
    square, disc = (y < size) & (x < size), far < size - 0.5     # far < 3 would be a square
    inside = {"square": square, "disc": disc, "cross": square & ((y < 1) | (x < 1)),
              "ring": disc & (far >= size - 2)}[shape]
    picture = np.array(COLORS[color])[:, None, None] * inside + rng.normal(0, 0.1, (3, 16, 16))
    place = f"{'top' if row < 8 else 'bottom'} {'left' if column < 8 else 'right'}"
    return picture.astype(np.float32), f"a {color} {shape}, {place}"


def main(argv=None):
    config = train.parse(["--out", "caption", "--steps", "1000", "--batch", "64", "--lr", "0.001",
                          "--metric", "exact", *MODEL, *(sys.argv[1:] if argv is None else argv)])
    tokenizer = data.tokenizer_at("bytes")
    examples, held_out = ([(picture, np.array(tokenizer.with_ends(text))) for picture, text in (
        drawn(rng) for _ in range(count))] for rng, count in (
            (np.random.default_rng(0), 10_000), (np.random.default_rng(1), 200)))
    pairs = part("tasks.pairs", "recipes.caption")
    task = pairs.task_of(config, tokenizer, examples, held_out)
    return train.fit(config, dataclasses.replace(task, tokenizer=tokenizer))


if __name__ == "__main__":
    train.run_main(main)
