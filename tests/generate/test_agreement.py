"""The log-probabilities of generated ids against the training loss: one function in two programs.
Reinforcement learning rewards what one program wrote and trains the other."""


import jax
import numpy as np
import pytest

import sample
import train
from test_all import DENSE, EXPERTS, MESHES
from tests.common import full, refuses
from tests.helpers import make, placed, program_of
from zigzag.core.parts import has_part
from zigzag.parallel.network import network_of

PROMPTS = [[1, 2, 3, 4], [10, 12, 14], [5], list(range(20, 26))] * 2
NEW = 6
MORE = [("", DENSE, {}), ("", EXPERTS, {}), ("data=2,tensor=4", DENSE, {}), ("fsdp=8", DENSE, {}),
        ("seq=4,tensor=2", DENSE, {})]
CASES = [(mesh, what, more | dict(dtype=dtype), bound) for dtype, bound in (
    # Measured with these tiny random models: 1.2e-6 at most; and, with bfloat16's 8 bits, 0.025
    # (0.14 with experts: a token whose two best experts are about equal goes to another).
    ("float32", 1e-5), ("bfloat16", 0.06)) for mesh, what, more in MESHES + MORE
    if dtype == "float32" or what is DENSE]


def gap(mesh, what, exact=False, **choices):
    """Return the largest difference between the log-probabilities that generate returns and those
    of the run's compiled loss on held-out rows, one token at a time."""
    config = make(**{**what, **choices})
    program, T = program_of(config, mesh), config.network.seq_len
    with jax.set_mesh(program.mesh):
        state = program.permute(program.start(jax.random.key(0)))
        written = sample.generate(
            program.permute(program.weights(state), back=True), PROMPTS,
            program.config.network, NEW, 1.0, seed=3, logprobs=True, exact=exact)
        rows = np.zeros((len(PROMPTS), T + 1), np.int32)
        for row, prompt, (ids, _) in zip(rows, PROMPTS, written):
            row[:len(prompt) + NEW] = prompt + ids
        evaluate, found = jax.jit(train.make_evaluate(program.plan)), np.zeros((len(PROMPTS), NEW))
        for row, i in np.ndindex(found.shape):
            weights = np.zeros((len(PROMPTS), T), np.float32)
            weights[row, len(PROMPTS[row]) - 1 + i] = 1
            total, count, *_ = evaluate(state["params"], placed(program.mesh, {
                "tokens": rows[:, :-1], "targets": rows[:, 1:], "weights": weights}))
            assert count == 1
            found[row, i] = -total
    return abs(np.array([logs for _, logs in written]) - found).max()


@pytest.mark.parametrize("mesh, what, choices, bound", [
    CASES[3], *(full(*case) for case in CASES[:3] + CASES[4:])])
def test_what_is_generated_is_what_the_loss_says(mesh, what, choices, bound):
    """A cache with other positions, masks, scales or experts than the loss; dropout that stays on;
    probabilities after the temperature; those of the next token."""
    assert gap(mesh, what, **choices) < bound


@pytest.mark.skipif(not has_part("accounts"), reason="accounts/ is gone")
@pytest.mark.parametrize("mesh, what, choices", [
    CASES[3][:3], *(full(mesh, what, {**more, "dtype": dtype}) for dtype in ("float32", "bfloat16")
                    for mesh, what, more in MESHES + MORE
                    if dtype == "float32" or "collectives" not in more)])
def test_exact_ones_are_those_of_the_training_pass(mesh, what, choices):
    """generate(exact=True) that reports another token's, or those of another program."""
    assert gap(mesh, what, exact=True, **choices) < 1e-5


@pytest.mark.skipif(not has_part("accounts"), reason="accounts/ is gone")
def test_what_exact_cannot_do_is_one_line():
    """Log-probabilities of a window of the row, of weights in another form, or a traceback."""
    config = make().network
    params = network_of(config).init(config, jax.random.key(0))
    with refuses("exact=True: a prompt and its answer have 20 tokens, more .* 16 and one more"):
        sample.generate(params, [[1] * 10], config, 10, exact=True)
    with refuses("exact=True: needs a decoder's weights as sample.load returns them"):
        sample.generate(sample.for_decoding(params, config), [[1, 2]], config, 2, exact=True)
    (ids, logs), = sample.generate(params, [[1, 2]], config, 15, exact=True)
    assert (len(ids), len(logs)) == (15, 15)
