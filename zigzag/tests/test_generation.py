"""Generation of every family that writes text: with a cache as without one, on any mesh; beams and
greedy texts as transformers finds them."""

import dataclasses
import functools

import jax
import numpy as np

import model
import sample
from zigzag.families import start_id
from zigzag.mesh import shardings
from zigzag.positions import decoding_length
from zigzag.rows import room
from zigzag.tests import test_families, test_pairs_families
from zigzag.tests.common import mesh_of

PAIRS = ("t5", "bart", "whisper")
NEW, LENGTHS = 7, (3, 11, 1, 17)     # of prompts: all are padded to 32, the cache has 48 slots


@functools.cache
def loaded(name):
    """(params, config, what the encoder is given as generate takes it) of a tiny model."""
    if name not in PAIRS:
        return *model.load_hf(test_families.reference(name).folder), None
    params, config, *_ = test_pairs_families.loaded(name)
    return params, dataclasses.replace(config, seq_len=40), test_pairs_families.sources(name)


def prompts_of(config):
    rng = np.random.default_rng(2)
    rows = [rng.integers(3, config.vocab_size, min(n, config.seq_len)).tolist() for n in LENGTHS]
    return [[start_id(config), *row[1:]] for row in rows] if config.encoder_layers else rows


def placed(params, config, mesh):
    mesh = mesh_of(mesh)
    return jax.device_put(params, shardings(model.weight_specs(config, mesh), mesh))


@functools.cache
def compiled_forward(config):
    return jax.jit(functools.partial(model.forward, config=config))


def assert_teacher_forced(params, config, prompts, found, given=None, near=1e-5):
    """Each new id is what forward, which has no cache, thinks likeliest after those before it (or
    as likely but for rounding), and its log-probability is forward's."""
    P = room(max(map(len, prompts)))
    new = max(len(ids) for ids, _ in found)
    length = max(len(p) + len(ids) for p, (ids, _) in zip(prompts, found))
    if config.rope_scaling:     # some follow from the length
        length = decoding_length(config, P + new, P + room(new))
    rows = np.zeros((len(prompts), length), np.int32)
    for row, prompt, (ids, _) in zip(rows, prompts, found):
        row[:len(prompt) + len(ids)] = [*prompt, *ids]
    logits = np.asarray(compiled_forward(config)(params, rows, **(given or {})))
    for row, prompt, (ids, logs) in zip(logits, prompts, found):
        here = row[len(prompt) - 1:len(prompt) - 1 + len(ids)]
        chosen = np.take_along_axis(here, np.array(ids)[:, None], 1)[:, 0]
        worst = (here.max(-1) - chosen).max() / np.abs(here).max()
        assert worst <= near, (worst, ids, here.argmax(-1).tolist())
        want = np.take_along_axis(np.asarray(jax.nn.log_softmax(here)), np.array(ids)[:, None], 1)
        np.testing.assert_allclose(logs, want[:, 0], atol=10 * near * np.abs(here).max())


def assert_writes_as_forward(name, mesh=""):
    params, config, source = loaded(name)
    prompts = prompts_of(config)
    found = sample.generate(placed(params, config, mesh) if mesh else params, prompts, config, NEW,
                            temperature=0, logprobs=True, source=source)
    assert [len(ids) for ids, _ in found] == [NEW] * len(prompts)
    given = test_pairs_families.source_of(name) if source is not None else {}
    assert_teacher_forced(params, config, prompts, found, given)
