"""DPO: a model learns to prefer one of two answers (Rafailov et al., 2023).

    example     a chosen and a rejected text with the same beginning, and each one's log-probability
                under the reference, which is the initial weights
    loss        -log sigmoid(BETA x margin). With d = log p - log p under the reference, the margin
                is d of the chosen answer minus d of the rejected answer
    logged      accuracy, the fraction of pairs with a positive margin

    python -m recipes.dpo [--model FOLDER] [--data PAIRS.jsonl] [flags of train.py]

Lines of PAIRS.jsonl have prompt, chosen and rejected (docs/data.md). The default is made_pairs.
"""

import functools
import json
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

import data
import sample
import train
from zigzag.parallel.network import network_of
from zigzag.run import source

BETA = 0.1


def made_pairs(count=3000):
    """Yield pairs of numbers as answers. The larger number is the chosen answer."""
    rng = np.random.default_rng(0)
    for a, b in rng.integers(100, 1000, (count, 2)).tolist():
        if a != b:
            yield {"prompt": f"{a} or {b}? ", "chosen": str(max(a, b)), "rejected": str(min(a, b))}


def encoded(paths, tokenizer, length):
    """Yield the training, then the held-out examples. An example is a pair of documents that
    data.py encodes from the paths (default: made_pairs). Skip pairs with a text over `length`."""
    with tempfile.TemporaryDirectory() as folder:
        if not paths:
            paths = [f"{folder}/made.jsonl"]
            with open(paths[0], "w") as file:
                file.writelines(json.dumps(pair) + "\n" for pair in made_pairs())
        corpus = data.prepare(paths, f"{folder}/pairs", tokenizer=tokenizer)
        if corpus.record["form"] != "preference":
            raise ValueError(f"{paths[0]}: expected lines with chosen and rejected")
        for split in "train", "held_out":
            documents = corpus.documents(split)
            sizes = documents.lengths(np.arange(len(documents))).reshape(-1, 2).tolist()
            pairs = [(documents.part(2 * i, 0, chosen), documents.part(2 * i + 1, 0, rejected))
                     for i, (chosen, rejected) in enumerate(sizes)
                     if max(chosen, rejected) <= length]
            if len(pairs) < len(sizes):
                print(f"data     {len(sizes) - len(pairs):,} of {len(sizes):,} pairs are left out: "
                      f"one of their texts is longer than {length} tokens (--seq_len)")
            yield pairs


def collate(pairs, length):
    """Return arrays [B, 2, T]: ids, targets, and weights (0 for the common beginning)."""
    rows = data.collate([[part] for pair in pairs for part in pair[:2]], length)
    ids, targets, weights = (rows[name].reshape(len(pairs), 2, length)
                             for name in ("tokens", "targets", "weights"))
    return {"ids": ids, "targets": targets, "weights": weights}


def dpo_loss(logs, reference):
    """Return each pair's loss and margin, from the log-probabilities [B, 2] of its answers."""
    moved = logs - reference
    margin = moved[:, 0] - moved[:, 1]
    return -jax.nn.log_sigmoid(BETA * margin), margin


def main(argv=None):
    argv = sys.argv[1:] if argv is None else list(argv)
    given = {word.partition("=")[0] for word in argv}
    own = [] if given & {"--model", "--init_from"} else ["--vocab_size", "257", "--lr", "0.001"]
    # In float32, the reference and the loss compute the same log-probabilities on any device.
    config = train.parse(["--out", "dpo", "--steps", "600", "--batch", "32", "--seq_len", "32",
                          "--weight_decay", "0", "--dtype", "float32", *own, *argv])
    weights, tokenizer, record = source.first_weights(config)
    tokenizer = tokenizer or data.tokenizer_at("bytes")
    network, length = network_of(config), config.network.seq_len
    init, _, _ = train.language(config)

    def log_probabilities(params, batch):
        """Return the log-probabilities [B, 2] of each pair's two answers."""
        ids, targets, counted = (batch[name].reshape(-1, length)
                                 for name in ("ids", "targets", "weights"))
        logits = jax.nn.log_softmax(network.forward(params, ids, config.network))
        logs = jnp.take_along_axis(logits, targets[..., None], 2)[..., 0]
        return (logs * counted).sum(1).reshape(-1, 2)

    if config.init_from:
        first, _, _ = sample.load(config.init_from, checkpoint=record.get("base_step"),
                                  edited=config.edited)
    else:
        first = jax.jit(init)(jax.random.key(config.seed))
    of_batch, size = jax.jit(log_probabilities), config.batch

    def with_reference(weights, pairs):
        """Add to each pair the log-probabilities of its answers under these weights."""
        found = []
        for i in range(0, len(pairs), size):
            rows = (pairs[i:i + size] * size)[:size]    # fill up the last batch
            found += list(np.asarray(of_batch(weights, collate(rows, length))))
        return [(*pair, logs) for pair, logs in zip(pairs, found)]

    def loss(params, batch):
        losses, margin = dpo_loss(log_probabilities(params, batch), batch["reference"])
        return losses.sum(), len(losses), {"accuracy": (margin > 0).sum(), "margin": margin.sum()}

    learned, held_out = map(functools.partial(with_reference, first),
                            encoded(config.data, tokenizer, length))
    del first           # free its memory for the run
    return train.fit(config, train.Task(init, lambda examples: collate(examples, length) | {
        "reference": np.stack([logs for _, _, logs in examples])}, loss, examples=learned,
        held_out=held_out, first_weights=weights, tokenizer=tokenizer, record=record))


if __name__ == "__main__":
    train.run_main(main)
