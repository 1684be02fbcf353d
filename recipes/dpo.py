"""DPO: a model learns which of two answers is preferred (Rafailov et al., 2023).

    example     two texts with the same beginning, the chosen one and the rejected one, with the
                log-probability of each under the reference: the weights as they are at first
    loss        -log sigmoid(BETA x margin), where margin = (log p - log p at first) of the chosen
                answer - the same of the rejected one
    logged      accuracy, the share of pairs whose margin is positive

    python -m recipes.dpo [--model FOLDER] [--data PAIRS.jsonl] [flags of train.py]

A line of PAIRS.jsonl has prompt, chosen and rejected (docs/data.md); without it, pairs are made.
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
    """Two numbers, of which the larger is preferred."""
    rng = np.random.default_rng(0)
    for a, b in rng.integers(100, 1000, (count, 2)).tolist():
        if a != b:
            yield {"prompt": f"{a} or {b}? ", "chosen": str(max(a, b)), "rejected": str(min(a, b))}


def encoded(paths, tokenizer, length):
    """Examples to learn from and held-out ones: pairs of documents, as data.py encodes the lines
    (those of made pairs, if there are no paths). Pairs with a longer text are left out."""
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
    """Arrays [B, 2, T]: ids, targets, and weights, which are 0 for what both have in common."""
    rows = data.collate([[part] for pair in pairs for part in pair[:2]], length)
    ids, targets, weights = (rows[name].reshape(len(pairs), 2, length)
                             for name in ("tokens", "targets", "weights"))
    return {"ids": ids, "targets": targets, "weights": weights}


def dpo_loss(logs, reference):
    """For log-probabilities [B, 2] of the two answers: the loss of each pair, and its margin."""
    moved = logs - reference
    margin = moved[:, 0] - moved[:, 1]
    return -jax.nn.log_sigmoid(BETA * margin), margin


def main(argv=None):
    argv = sys.argv[1:] if argv is None else list(argv)
    given = {word.partition("=")[0] for word in argv}
    own = [] if given & {"--model", "--init_from"} else ["--vocab_size", "257", "--lr", "0.001"]
    # (In float32, so that the reference is computed as the loss is, on any device.)
    config = train.parse(["--out", "dpo", "--steps", "600", "--batch", "32", "--seq_len", "32",
                          "--weight_decay", "0", "--dtype", "float32", *own, *argv])
    weights, tokenizer, record = source.first_weights(config)
    tokenizer = tokenizer or data.tokenizer_at("bytes")
    network, length = network_of(config), config.network.seq_len
    init, _, _ = train.language(config)

    def log_probabilities(params, batch):
        """The log-probabilities [B, 2] of the two answers of each pair."""
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
        """The pairs, with the log-probabilities that each has under these weights."""
        found = []
        for i in range(0, len(pairs), size):
            rows = (pairs[i:i + size] * size)[:size]    # (a whole batch, the last one too)
            found += list(np.asarray(of_batch(weights, collate(rows, length))))
        return [(*pair, logs) for pair, logs in zip(pairs, found)]

    def loss(params, batch):
        losses, margin = dpo_loss(log_probabilities(params, batch), batch["reference"])
        return losses.sum(), len(losses), {"accuracy": (margin > 0).sum(), "margin": margin.sum()}

    learned, held_out = map(functools.partial(with_reference, first),
                            encoded(config.data, tokenizer, length))
    del first           # (their memory is the run's now)
    return train.fit(config, train.Task(init, lambda examples: collate(examples, length) | {
        "reference": np.stack([logs for _, _, logs in examples])}, loss, examples=learned,
        held_out=held_out, weights=weights, tokenizer=tokenizer, record=record))


if __name__ == "__main__":
    train.run_main(main)
