"""DPO: a model learns which of two answers is preferred (Rafailov et al., 2023).

    example     two texts with the same beginning, the chosen one and the rejected one, with the
                log-probability of each under the reference: the weights as they are at first
    loss        -log sigmoid(BETA x margin): margin is how much likelier the chosen answer has
                become since then, less the same of the rejected one (as logarithms)
    logged      accuracy, the share of pairs whose margin is positive

    python -m recipes.dpo [--model FOLDER] [--data PAIRS.jsonl] [flags of train.py]

A line of PAIRS.jsonl has prompt, chosen and rejected (docs/data.md); without it, pairs are made.
"""

import json
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

import data
import networks
import sample
import tasks
import train

BETA = 0.1


def made_pairs(count=3000):
    """Two numbers, of which the larger is preferred."""
    rng = np.random.default_rng(0)
    for a, b in rng.integers(100, 1000, (count, 2)).tolist():
        if a != b:
            yield {"prompt": f"{a} or {b}? ", "chosen": str(max(a, b)), "rejected": str(min(a, b))}


def encoded(paths, tokenizer, length):
    """Examples to learn from and held-out ones: pairs of documents, as data.py encodes the lines
    (those of made pairs, if there are no paths)."""
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
            sizes = np.minimum(documents.lengths(np.arange(len(documents))), length)
            parts = [documents.part(i, 0, size) for i, size in enumerate(sizes.tolist())]
            yield list(zip(parts[::2], parts[1::2]))


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
    own = ["--vocab_size", "257", "--lr", "0.001"]
    own = [] if {"--model", "--init_from"} & set(argv) else own
    config = train.parse(["--out", "dpo", "--steps", "600", "--batch", "32", "--seq_len", "32",
                          "--weight_decay", "0", *own, *argv])
    weights, tokenizer, record = tasks.first_weights(config)
    tokenizer = tokenizer or data.tokenizer_at("bytes")
    network, length = networks.network_of(config), config.seq_len
    init, _, _ = train.language(config)

    def log_probabilities(params, batch):
        """The log-probabilities [B, 2] of the two answers of each pair."""
        ids, targets, counted = (batch[name].reshape(-1, length)
                                 for name in ("ids", "targets", "weights"))
        logits = jax.nn.log_softmax(network.forward(params, ids, config.network))
        logs = jnp.take_along_axis(logits, targets[..., None], 2)[..., 0]
        return (logs * counted).sum(1).reshape(-1, 2)

    first = (sample.load(config.init_from)[0] if config.init_from else
             jax.jit(init)(jax.random.key(config.seed)))
    of_batch = jax.jit(log_probabilities)

    def with_reference(pairs):
        """The pairs, with the log-probabilities that each has at first."""
        found = []
        for i in range(0, len(pairs), 64):
            rows = (pairs[i:i + 64] * 64)[:64]      # (64 in the last batch, too: one program)
            found += list(np.asarray(of_batch(first, collate(rows, length))))
        return [(*pair, logs) for pair, logs in zip(pairs, found)]

    def loss(params, batch):
        losses, margin = dpo_loss(log_probabilities(params, batch), batch["reference"])
        return losses.sum(), len(losses), {"accuracy": (margin > 0).sum(), "margin": margin.sum()}

    learned, held_out = map(with_reference, encoded(config.data, tokenizer, length))
    return train.fit(config, init, lambda examples: collate(examples, length) | {
        "reference": np.stack([logs for _, _, logs in examples])}, loss, examples=learned,
        held_out=held_out, weights=weights, tokenizer=tokenizer, record=record)


if __name__ == "__main__":
    train.run_main(main)
