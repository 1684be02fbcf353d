"""GRPO: a model learns to add from rewards alone, on answers it samples itself (after Shao et al.,
2024). It never sees a correct answer.

    example     a sum, such as 37+45=; an answer that the model sampled before this update (280:
                units first); and the advantage of each digit: its reward compared with the mean
                over all answers to the same sum
    loss        minus the advantage times the ratio of a digit's current probability to its
                probability when sampled, minus a little entropy (otherwise, all answers soon agree)
    logged      reward, the fraction of correct digits
    metric      exact, the fraction of correct greedy answers to held-out sums, which training never
                asks for in either order

The paper rewards whole answers and, instead of the entropy, uses a KL penalty to keep the model
near its initial weights. Here the model learns from each answer only once, so no ratio is clipped.

    python -m recipes.grpo [--model FOLDER] [flags of train.py]
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import data
import sample
import train
from zigzag.parallel.network import network_of
from zigzag.run import source

GROUP, LENGTH = 8, 3        # answers per sum; ids per answer, one per digit
CLIP, ENTROPY = 0.2, 0.07   # how far from 1 the ratio counts; the entropy's weight


def pairs(held_out):
    """Return pairs of numbers below 100: the training pairs, or the held-out twentieth. A pair and
    its swap are always in the same set."""
    hidden = np.triu(np.random.default_rng(0).random((100, 100)) < 0.05)
    return np.argwhere((hidden | hidden.T) == held_out).tolist()


def question(a, b):
    return f"{a:02}+{b:02}="


def answer(a, b):
    return f"{a + b:03}"[::-1]


def advantages(rewards):
    """Normalize rewards [groups, GROUP, digits] by each group's mean and standard deviation."""
    mean, deviation = rewards.mean(1, keepdims=True), rewards.std(1, keepdims=True)
    return (rewards - mean) / (deviation + 1e-4)


def grpo_loss(logits, answer, drawn, advantage):
    """From logits [B, T, V], return the answers' losses [B] and log-probabilities [B, T]."""
    every = jax.nn.log_softmax(logits)
    logs = jnp.take_along_axis(every, answer[..., None], 2)[..., 0]
    ratio = jnp.exp(logs - drawn)
    gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage)
    entropy = -(jnp.exp(every) * every).sum(-1)
    return -(gain + ENTROPY * entropy).mean(1), logs


def main(argv=None):
    argv = sys.argv[1:] if argv is None else list(argv)
    given = {word.partition("=")[0] for word in argv}
    own = [] if given & {"--model", "--init_from"} else [
        "--vocab_size", "257", "--layers", "2", "--d_model", "96", "--heads", "4", "--lr", "0.001"]
    # In float32, sampling and the loss agree on probabilities on any device.
    c = train.parse(["--out", "grpo", "--steps", "1500", "--batch", "512", "--seq_len", "16",
                     "--weight_decay", "0", "--dtype", "float32", *own, *argv])
    weights, tokenizer, record = source.first_weights(c)
    tokenizer = tokenizer or data.tokenizer_at("bytes")
    network, choices = network_of(c), pairs(held_out=False)

    def ids(a, b):
        """Return the ids of (the question, the correct answer)."""
        prompt = tokenizer.prompt(question(a, b))
        right = tokenizer.prompt(question(a, b) + answer(a, b))[len(prompt):]
        if len(right) != LENGTH:
            sys.exit(f"error: {c.init_from}: its tokenizer has no separate id for each digit")
        return prompt, right

    equal = 0           # updates in a row in which no answer beat another

    def drawn(seed, step, weights):
        """Sample an update's examples."""
        nonlocal equal
        rng = np.random.default_rng((seed, step))
        asked = [ids(*choices[i]) for i in rng.integers(len(choices), size=c.batch // GROUP)]
        asked = [one for one in asked for _ in range(GROUP)]
        written = sample.generate(weights, [prompt for prompt, _ in asked], c.network, LENGTH,
                                  seed=rng.integers(2**31, size=len(asked)), logprobs=True,
                                  batch=c.batch)
        rewards = np.array([np.equal(new, right) for (new, _), (_, right) in zip(written, asked)])
        found = advantages(rewards.reshape(-1, GROUP, LENGTH)).reshape(-1, LENGTH)
        equal = 0 if found.any() else equal + 1
        if equal and equal % 20 == 0 and jax.process_index() == 0:
            print(f"\nstep {step + 1}: in the last {equal} updates all answers to a sum had the "
                  f"same reward (now {rewards.mean():.2g}), so nothing is learned",
                  flush=True)
        return [(prompt, new, logs, advantage, right.mean())
                for (prompt, _), (new, logs), advantage, right in zip(
                    asked, written, found, rewards)]

    def collate(examples):
        prompts, new, logs, advantage, rewards = zip(*examples)
        return {"prompt": np.array(prompts, np.int32), "answer": np.array(new, np.int32),
                "drawn": np.array(logs, np.float32), "advantage": np.array(advantage, np.float32),
                "reward": np.array(rewards, np.float32)}

    def loss(params, batch):
        both = jnp.concatenate([batch["prompt"], batch["answer"]], 1)
        logits = network.forward(params, both, c.network)[:, -LENGTH - 1:-1]
        losses, logs = grpo_loss(logits, batch["answer"], batch["drawn"], batch["advantage"])
        if "seeds" not in batch:        # held out: only the metric is meaningful
            return losses.sum(), len(losses)
        return (losses.sum(), len(losses), {
            "reward": batch["reward"].sum(),
            "shift_since_drawn": jnp.abs(logs - batch["drawn"]).mean(1).sum()})

    def predict(params, batch):
        return sample.generate_ids(params, {"tokens": batch["prompt"]}, c.network, LENGTH, 0.0)

    def metric(outputs, examples):
        return {"exact": float(np.mean((outputs == [one[1] for one in examples]).all(1)))}

    # Held-out examples hold the correct answer.
    held_out = [(*ids(a, b), [0] * LENGTH, [1] * LENGTH, 1) for a, b in pairs(held_out=True)]
    init, _, _ = train.language(c)
    return train.fit(c, train.Task(init, collate, loss, predict, drawn, held_out, metric=metric,
                                   first_weights=weights, tokenizer=tokenizer, record=record))


if __name__ == "__main__":
    train.run_main(main)
