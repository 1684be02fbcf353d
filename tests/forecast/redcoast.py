"""A step of a GPT-J by RedCoast's own package and by zigzag, on four simulated devices: the bytes
that each sends, the memory of its temporaries, and its loss on the same weights and rows.

    pip install --no-deps redco==0.4.23         (beside requirements-peers.txt)
    python -m tests.forecast.redcoast           [--steps 35: also time as many steps of each]

Both are compiled for float32 and AdamW. --shards 4 and RedCoast's n_model_shards=4 mean the same.
The last line is JSON.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from types import SimpleNamespace

os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "")
                           + " --xla_force_host_platform_device_count=4")

import jax
import numpy as np
import optax

import published
import train
from tests.helpers import placed
from zigzag.commands import programs
from zigzag.parallel.hlo import collectives

BATCH, TIME, IDS = 8, 128, 2048


def rows_of(seed):
    """Rows of random tokens, and each token's next one (the last has none)."""
    tokens = np.random.default_rng(seed).integers(0, IDS, (BATCH, TIME), np.int32)
    return tokens, np.roll(tokens, -1, 1), np.broadcast_to(np.arange(TIME) < TIME - 1, tokens.shape)


def made(folder):
    """Save a small GPT-J, with random weights, to the folder."""
    import torch
    from transformers import GPTJConfig, GPTJForCausalLM

    torch.manual_seed(0)
    GPTJForCausalLM(GPTJConfig(vocab_size=IDS, n_positions=TIME, n_embd=256, n_layer=4, n_head=8,
                               rotary_dim=32)).save_pretrained(folder)


def by_redcoast(folder):
    """RedCoast's trainer on the folder's Flax model. Return (its compiled step, a function that
    makes a step on the rows of a seed and returns the loss)."""
    from redco import Deployer, Trainer
    from transformers import FlaxGPTJForCausalLM

    model = FlaxGPTJForCausalLM.from_pretrained(folder, from_pt=True)

    def loss_fn(rng, state, params, batch, is_training):
        logits = state.apply_fn(input_ids=batch["tokens"], params=params, train=is_training).logits
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return (losses * batch["weights"]).sum() / batch["weights"].sum()

    deployer = Deployer(jax_seed=0, n_model_shards=4, verbose=False)
    trainer = Trainer(
        deployer, collate_fn=None, apply_fn=model, loss_fn=loss_fn, params=model.params,
        optimizer=optax.adamw(1e-3),
        params_sharding_rules=deployer.get_sharding_rules(model.params))

    def batch_of(seed):         # its first dimension is its mesh's axis dp
        names = ("tokens", "targets", "weights")
        return {name: a[None] for name, a in zip(names, rows_of(seed))}

    trainer.setup_running_step(batch_of(0))
    with deployer.mesh:
        step = trainer._p_train_step.lower(jax.random.key(0), trainer._state, batch_of(0)).compile()
    held = SimpleNamespace(state=trainer._state)

    def update(seed):
        with deployer.mesh:
            held.state, metrics = step(jax.random.key(seed), held.state, batch_of(seed))
        return float(metrics["loss"])

    return step, update


def by_zigzag(folder, *words):
    """Return the same two for zigzag's step, with these flags besides."""
    config = train.parse(["--model", folder, "--shards", "4", "--dtype", "float32", "--batch",
                          str(BATCH), "--seq_len", str(TIME), "--optimizer", "adamw", *words])
    program, step = programs.ready_to_run(config)
    held = SimpleNamespace()
    with jax.set_mesh(program.mesh):
        weights, _ = published.load_hf(folder, program.mesh)
        held.state = jax.jit(program.start, out_shardings=jax.tree.map(
            lambda x: x.sharding, program.state))(jax.random.key(0), weights)

    def update(seed):
        batch = dict(zip(("tokens", "targets", "weights"), rows_of(seed)))
        batch |= {"weights": batch["weights"].astype(np.float32),
                  "seeds": np.zeros(BATCH, np.uint32)}
        with jax.set_mesh(program.mesh):
            held.state, metrics = step(held.state, placed(program.mesh, batch))
        return float(metrics["loss"])

    return step, update


def main():
    reads = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    reads.add_argument("--steps", type=int, default=0, help="time this many steps of each, in turn")
    steps = reads.parse_args().steps
    with tempfile.TemporaryDirectory() as folder:
        made(folder)
        sides = {"RedCoast": by_redcoast(folder), "zigzag": by_zigzag(folder, "--remat", "none"),
                 "zigzag, its default remat": by_zigzag(folder)}
    numbers = {}
    print(f"{'':26}{'sent per device':>20}{'temporaries':>14}{'loss':>10}")
    for name, (step, update) in sides.items():
        found, memory = collectives(step), step.memory_analysis().temp_size_in_bytes
        nbytes, count = sum(c.bytes for c in found), sum(c.count for c in found)
        numbers[name] = {"sent": nbytes, "collectives": count, "temporaries": memory,
                         "loss": update(0)}
        print(f"{name:26}{nbytes / 1e6:8.1f} MB in {count:3.0f}{memory / 1e6:11.1f} MB"
              f"{numbers[name]['loss']:10.5f}")
    took = {name: [] for name in sides}
    for at in range(steps):
        for name, (_, update) in sides.items():
            begin = time.perf_counter()
            update(at + 1)
            took[name].append(time.perf_counter() - begin)
    for name in sides if steps else ():
        ratio = statistics.median(a / b for a, b in zip(took["RedCoast"], took[name]))
        numbers[name]["speed"] = ratio
        print(f"{name:26}{BATCH * TIME / statistics.median(took[name]):8,.0f} tokens/s, "
              f"{ratio:.2f} times RedCoast's")
    print(json.dumps(numbers))


if __name__ == "__main__":
    main()
