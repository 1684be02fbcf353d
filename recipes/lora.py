"""LoRA: a model that can add learns to subtract, and only small adapters change (Hu et al., 2022).

    example     the ids of a sum, such as 37+45=, and of its answer (280: units first); with
                adapters, a difference (37-45= is 80-)
    loss        the network's usual loss, the cross-entropy of the answer
    metric      exact, the fraction of correct greedy answers to held-out questions

    python -m recipes.lora --out sums
    python -m recipes.lora --init_from sums --lora_rank 16 --lr 0.01 --out both     # differences
"""

import sys

import numpy as np

import data
import sample
import train
from zigzag.run import source

LENGTH = 3          # ids in an answer


def asked(sign, held_out):
    """Yield (question, answer) for pairs of numbers below 100: the training pairs, or the held-out
    twentieth. A pair and its swap are always in the same set."""
    hidden = np.triu(np.random.default_rng(0).random((100, 100)) < 0.05)
    for a, b in np.argwhere((hidden | hidden.T) == held_out).tolist():
        answer = f"{a + b:03}" if sign == "+" else f"{a - b:+03}"
        yield f"{a:02}{sign}{b:02}=", answer[::-1]


def collate(examples):
    """Make a batch whose loss counts only the answers."""
    rows = np.array([[*question, *answer] for question, answer in examples], np.int32)
    weights = np.ones((len(rows), rows.shape[1] - 1), np.float32)
    weights[:, :-LENGTH] = 0
    return {"tokens": rows[:, :-1], "targets": rows[:, 1:], "weights": weights}


def main(argv=None):
    argv = sys.argv[1:] if argv is None else list(argv)
    given = {word.partition("=")[0] for word in argv}
    own = [] if given & {"--model", "--init_from"} else [
        "--vocab_size", "257", "--layers", "2", "--d_model", "96", "--heads", "4"]
    c = train.parse(["--out", "lora", "--steps", "1000", "--batch", "256", "--lr", "0.003",
                     "--seq_len", "16", *own, *argv])
    weights, tokenizer, record = source.first_weights(c)
    tokenizer = tokenizer or data.tokenizer_at("bytes")

    def encoded(is_held_out):
        for question, answer in asked("-" if c.network.lora_rank else "+", is_held_out):
            asked_ids, ids = tokenizer.prompt(question), tokenizer.prompt(question + answer)
            if len(ids) != len(asked_ids) + LENGTH:
                sys.exit(f"error: {c.init_from}: its tokenizer has no separate id for each digit")
            yield asked_ids, ids[-LENGTH:]

    def predict(params, batch):
        questions = {"tokens": batch["tokens"][:, :1 - LENGTH]}
        return sample.generate_ids(params, questions, c.network, LENGTH, 0.0)

    def metric(outputs, examples):
        return {"exact": float(np.mean((outputs == [answer for _, answer in examples]).all(1)))}

    init, loss, _ = train.language(c)
    return train.fit(c, train.Task(
        init, collate, loss, predict, list(encoded(False)), list(encoded(True)), metric=metric,
        first_weights=weights, tokenizer=tokenizer, record=record))


if __name__ == "__main__":
    train.run_main(main)
