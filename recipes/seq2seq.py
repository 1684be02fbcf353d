"""Text from text: an encoder and a decoder learn to write words backwards.

    example     (ids of a text, ids of the reversed text)
    loss        the network's usual loss, the cross-entropy of the target
    metric      exact, the fraction of held-out texts that greedy decoding reverses without errors

    python -m recipes.seq2seq [flags of train.py]
"""

import dataclasses
import sys

import numpy as np

import data
import train
from zigzag.core.parts import part

T5 = ["--model", "transformer", "--encoder_layers", "2", "--layers", "2", "--d_model", "128",
      "--heads", "4", "--positions", "learned", "--source_len", "16", "--seq_len", "16",
      "--vocab_size", "257"]


def texts(count, seed):
    """Draw random texts of 4 to 12 letters."""
    rng = np.random.default_rng(seed)
    return ["".join(rng.choice(list("abcdefghij"), n)) for n in rng.integers(4, 13, count)]


def main(argv=None):
    config = train.parse(["--out", "seq2seq", "--steps", "2000", "--batch", "64", "--lr", "0.001",
                          "--metric", "exact", *T5, *(sys.argv[1:] if argv is None else argv)])
    tokenizer = data.tokenizer_at("bytes")
    learned = texts(20_000, 0)
    new = [text for text in texts(300, 1) if text not in learned][:200]
    examples, held_out = ([(np.array(tokenizer.with_ends(text)),
                            np.array(tokenizer.with_ends(text[::-1]))) for text in some]
                          for some in (learned, new))
    pairs = part("tasks.pairs", "recipes.seq2seq")
    task = pairs.task_of(config, tokenizer, examples, held_out)
    return train.fit(config, dataclasses.replace(task, tokenizer=tokenizer))


if __name__ == "__main__":
    train.run_main(main)
