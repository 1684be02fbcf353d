"""Classification: a small vision transformer learns scikit-learn's handwritten digits.

    example     an image of 8 x 8 pixels with values from 0 to 1, and its class
    loss        the network's usual loss, the cross-entropy of the class
    metric      the fraction of held-out images that the model classifies correctly

    python -m recipes.classify [flags of train.py]
"""

import sys

import numpy as np
from sklearn.datasets import load_digits

import train
from zigzag.parallel.network import network_of

VIT = ["--model", "transformer", "--stem", "patches", "--image_size", "8", "--patch_size", "2",
       "--channels", "1", "--causal", "false", "--positions", "learned", "--head", "classes",
       "--labels", "10", "--layers", "4", "--d_model", "64", "--heads", "4", "--dropout", "0.1"]


def pictures():
    """Return 1,437 training and 360 held-out examples: (an image [1, 8, 8], its class)."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    found = [(digits.images[i][None].astype(np.float32) / 16, digits.target[i]) for i in order]
    return found[360:], found[:360]


def collate(examples):
    source, labels = zip(*examples)
    return {"source": np.stack(source), "labels": np.array(labels, np.int32)}


def main(argv=None):
    config = train.parse(["--out", "classify", "--steps", "1500", "--batch", "64", "--lr", "0.002",
                          *VIT, *(sys.argv[1:] if argv is None else argv)])
    network = network_of(config)
    init, loss, _ = train.language(config)

    def predict(params, batch):
        return network.forward(params, batch["source"], config.network).argmax(-1)

    def metric(outputs, examples):
        return {"right": float(np.mean(outputs == [label for _, label in examples]))}

    examples, held_out = pictures()
    return train.fit(config, train.Task(init, collate, loss, predict, examples, held_out,
                                        metric=metric))


if __name__ == "__main__":
    train.run_main(main)
