"""Many prompts through a few rows: the ids of one batch, in fewer steps."""

import json

import numpy as np
import pytest

import sample
from tests.common import far_apart, full, steps_of, weights_on
from tests.generate.test_generation import assert_teacher_forced, loaded, small_chunks
from tests.helpers import make
from zigzag.core.flags import change
from zigzag.generate import batching as turns
from zigzag.generate import passes

assert small_chunks     # (a fixture)
ALL = 10**6         # as many rows as there are prompts


def made(**changes):
    config = make(**changes).network
    return far_apart(config, 2), config


def prompts_of(config, count=30, longest=40):
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, longest, count)
    return [rng.integers(0, config.vocab_size, n).tolist() for n in (*lengths[:-1], 1)]


def assert_the_same(params, config, prompts, batch=8, on=None, **options):
    """Assert that a few rows write what one batch of all does; its results."""
    options = {**dict(tokens=20, stop=[3, 5, 8], seed=4, logprobs=True), **options}
    want = sample.generate(params, prompts, config, batch=ALL, **options)
    got = sample.generate(params if on is None else on, prompts, config, batch=batch, **options)
    assert [ids for ids, _ in got] == [ids for ids, _ in want]
    # (With experts, one device's are up to 1.1e-4 from what forward gives in float64, on one of the
    # CPUs that ran this; a mesh's 3e-5.)
    for (_, logs), (_, of_want) in zip(got, want, strict=True):
        np.testing.assert_allclose(logs, of_want, atol=3e-4)
    return want


@pytest.mark.parametrize("options", [
    full(dict()), full(dict(temperature=0.0)), full(dict(batch=1)),
    dict(repetition_penalty=1.3, seed=range(30))])
def test_ids_are_those_of_one_batch(options):
    """A row that takes another's keys, seeds or number of ids; an answer under another's number."""
    params, config = made(seq_len=128)
    prompts = prompts_of(config)
    prompts[7] = prompts[3]     # (which have different answers)
    found = assert_the_same(params, config, prompts, **options)
    lengths = {len(ids) for ids, _ in found}
    assert min(lengths) < 3 and max(lengths) == 20


def test_full_contexts_go_on_from_their_last_half():
    """A context that is read again with the random numbers of its beginning, or without the ids
    that its penalty is for."""
    params, config = made(seq_len=24)
    prompts = prompts_of(config, 9, 30)
    options = dict(tokens=40, stop=[], say=lambda _: None, repetition_penalty=1.2)
    assert_the_same(params, config, prompts, 4, **options)
    found = assert_the_same(params, config, prompts, 4, stop_at_context=True, **options)
    assert {len(p[-24:]) + len(ids) for p, (ids, _) in zip(prompts, found)} == {25}


@pytest.mark.parametrize("name", ["gemma3", *map(full, (
    "mistral", "gpt_neo", "deepseek_v3", "gpt2", "bloom", "phi3"))])
def test_families_write_what_forward_says(small_chunks, name):
    """Windows, whose caches have fewer slots than the others; latents; positions from a table;
    ALiBi."""
    params, config, _ = loaded(name)
    config, rng = change(config, seq_len=64), np.random.default_rng(2)
    prompts = [rng.integers(3, config.vocab_size, n).tolist() for n in rng.integers(1, 40, 11)]
    found = sample.generate(params, prompts, config, 21, 0.0, logprobs=True, batch=3)
    assert_teacher_forced(params, config, prompts, found)


@pytest.mark.full
def test_scaled_positions_are_those_of_a_prompt_alone():
    """A long prompt whose length scales the positions of all that are answered beside it."""
    scaling = {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 32}
    params, config = made(seq_len=96, rope_scaling=json.dumps(scaling), rope_theta=10.0)
    prompts = prompts_of(config, 12, 60)
    options = dict(tokens=9, temperature=0.0, logprobs=True)
    got = sample.generate(params, prompts, config, batch=4, **options)
    for prompt, (ids, logs) in zip(prompts, got, strict=True):
        assert sample.generate(params, [prompt], config, **options) == [
            (ids, pytest.approx(logs, abs=1e-3))]


def test_an_answer_ends_when_it_is_asked_to():
    """`ended` that only counts in large batches, or for prompts that are in a row."""
    params, config = made(seq_len=64)
    for batch in (9, 3):
        ids = {}
        for piece in sample.stream(params, [[n] for n in range(6)], config, 30, 1.0, batch=batch,
                                   piece=4, ended=lambda n: n % 2 and len(ids.get(n, ())) > 5):
            for n, new in enumerate(piece):
                ids[n] = ids.get(n, []) + (new or [])
                assert new is None or len(new) <= 4
        assert all(len(ids[n]) == 30 if n % 2 == 0 else 5 < len(ids[n]) < 10 for n in ids)


@pytest.mark.parametrize("mesh, changes", [
    ("fsdp=2,tensor=2", {}), full("tensor=4", dict(heads=4, kv_heads=2)), full("data=4", {}),
    full("data=2,expert=2,tensor=2", dict(experts=4)), full("pipe=2,seq=2,tensor=2", {})])
def test_ids_are_the_same_on_a_mesh(mesh, changes):
    """New rows on another device than that of their places; slots that tensor splits."""
    params, config = made(seq_len=64, **changes)
    assert_the_same(params, config, prompts_of(config, 21), 6, weights_on(params, config, mesh))


def test_no_row_waits_for_the_longest(monkeypatch):
    """Rows that stay empty while prompts wait."""
    params, config = made(seq_len=128)
    prompts, steps = prompts_of(config, 64), steps_of(monkeypatch)
    found = sample.generate(params, prompts, config, 60, 1.0, stop=[3, 5, 8], batch=8)
    lengths = [len(ids) for ids in found]
    in_batches = sum(8 * max(lengths[at:at + 8]) for at in range(0, 64, 8))
    done = sum(rows * count for rows, count in steps)
    assert sum(lengths) < in_batches / 2 and done < 0.75 * in_batches


def test_few_programs_are_compiled(caplog):
    """A program for each length of a prompt, or for each number of free rows."""
    params, config = made(seq_len=128)
    passes.read_chunk.clear_cache()
    passes.decode.clear_cache()
    turns.put_rows.clear_cache()
    assert_the_same(params, config, prompts_of(config, 60, 90))
    # (Beside those of one batch: chunks of 16, 32, 64 and 128 ids for all rows, and for one of 8.)
    assert passes.read_chunk._cache_size() <= 1 + 8
    assert passes.decode._cache_size() <= 1 + 1 and turns.put_rows._cache_size() <= 1
