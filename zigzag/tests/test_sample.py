"""Generation: with a cache, on any mesh, and what is refused."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import pytest

import model
import sample
from zigzag import passes
from zigzag.errors import ConfigError
from zigzag.mesh import shardings
from zigzag.tests.common import learn, make, mesh_of, slow

PROMPTS = [[1, 2, 3, 4], [10, 12, 14], [5], list(range(20, 31))]


@pytest.fixture(scope="module")
def trained():
    config = make(steps=60)
    return jax.tree.map(jnp.asarray, jax.device_get(learn(config)[1].params)), config


def test_greedy_is_the_argmax_without_a_cache(trained):
    """A cache read at the slot about to be filled gives other ids; so does padding that is seen."""
    params, config = trained
    got = sample.generate(params, PROMPTS, config, tokens=8, temperature=0)
    forward = jax.jit(lambda row: model.forward(params, row, config))
    for prompt, new in zip(PROMPTS, got):
        row = list(prompt)
        for _ in range(8):      # what lies after a token cannot change its logits
            logits = forward(jnp.asarray([row + [0] * (20 - len(row))]))
            row.append(int(jnp.argmax(logits[0, len(row) - 1])))
        assert new == row[len(prompt):]
    assert got[0][:4] == [5, 6, 7, 8], "it has learned to count"


# -------------------------------------------------------------------------------------------
# On a mesh

def in_all_ways(params, config):
    """Greedy, sampled, and the beams of two prompts."""
    return (sample.generate(params, PROMPTS, config, 8, 0),
            sample.generate(params, PROMPTS, config, 8, 0.8, seed=3),
            sample.beam_search(params, PROMPTS[:2], config, 3, 5, eos=7))


def placed(params, config, mesh):
    return jax.device_put(params, shardings(model.weight_specs(config, mesh), mesh))


def assert_generates_the_same(params, config, mesh, want):
    greedy, sampled, beams = in_all_ways(placed(params, config, mesh_of(mesh)), config)
    assert greedy == want[0]
    assert sampled == want[1]
    for got_beams, want_beams in zip(beams, want[2], strict=True):
        for (ids, score), (want_ids, want_score) in zip(got_beams, want_beams, strict=True):
            assert ids == want_ids and score == pytest.approx(want_score, abs=1e-4)


@pytest.fixture(scope="module")
def generated(trained):
    return in_all_ways(*trained)


@pytest.mark.parametrize("mesh", [
    "tensor=2", slow("tensor=4"), slow("tensor=8"), slow("data=2,fsdp=2,tensor=2"), slow("fsdp=8"),
    slow("pipe=2,seq=2")])
def test_generation_is_the_same_on_any_mesh(trained, generated, mesh):
    """Ids that devices choose from their own part of the vocabulary; a last position that is the
    last of a part; rows or keys of another device. (8 devices do not divide 4 heads nor 4 rows.)"""
    assert_generates_the_same(*trained, mesh, generated)


@pytest.mark.parametrize("mesh, changes", [
    slow("tensor=4", dict(heads=6, kv_heads=2, head_dim=8)),
    slow("tensor=2", dict(heads=6, kv_heads=3, head_dim=8, parallel=True)),
    slow("tensor=4", dict(heads=4, kv_heads=2)),
    slow("expert=2,tensor=2", dict(experts=4, shared_experts=1))])
def test_generation_of_other_models_is_the_same_on_a_mesh(mesh, changes):
    """A cache of other heads than the keys that come into it, where tensor does not divide them."""
    config = make(**changes)
    params = jax.jit(lambda key: model.init(config, key))(jax.random.key(0))
    params = jax.device_get(jax.tree.map(lambda w: 3 * w, params))      # (so that few ids are near)
    assert_generates_the_same(params, config, mesh, in_all_ways(params, config))


@pytest.mark.parametrize("mesh, changes, shape", [
    ("tensor=4", {}, (1, 32, 8)), ("tensor=4", dict(kv_heads=2), (2, 8, 8)),
    ("tensor=2", dict(kv_rank=8, rotary_dim=4, head_dim=8, v_head_dim=8), (1, 16, 12))])
def test_a_cache_has_each_devices_own_part(mesh, changes, shape):
    """Keys and values of all heads, or of all tokens, on every device: memory is what tensor is
    taken for."""
    config = make(**changes)
    params = placed(jax.jit(lambda key: model.init(config, key))(jax.random.key(0)), config,
                    mesh_of(mesh))
    with passes.mesh_of_weights(params):
        rows = sample._rows([[1], [2]], config, 16, None)
        cache = sample._new_cache(sample.for_decoding(params, config), rows, config, 32)
    for kept in jax.tree.leaves(cache):
        assert kept.addressable_shards[0].data.shape == (2, *shape)


# -------------------------------------------------------------------------------------------
# Choosing

def test_choices_are_limited_and_seeded(trained):
    """top_p that drops the id which crosses the share, top_k one too many; or a seed that is not
    used."""
    params, config = trained

    def draw(**options):
        return sample.generate(params, [[1, 2]], config, **{**dict(tokens=12), **options})

    assert draw(seed=1) == draw(seed=1) != draw(seed=2, temperature=3.0)
    assert draw(top_k=1) == draw(top_p=1e-6) == draw(temperature=0)


def test_a_full_beam_finds_the_best_of_all_continuations(trained):
    """A beam that goes on from another's past. With a beam per continuation nothing is pruned:
    compare with trying every one."""
    params, config = trained
    config = dataclasses.replace(config, vocab_size=8)      # the other ids can no longer be said
    prompt = [1, 2, 3]
    every = list(itertools.product(range(8), repeat=2))
    rows = jnp.asarray([prompt + list(n) for n in every])
    logp = jax.nn.log_softmax(jax.jit(lambda rows: model.forward(params, rows, config))(rows))
    scores = {n: sum(float(logp[k, 2 + i, n[i]]) for i in range(2)) for k, n in enumerate(every)}
    best = sorted(scores, key=scores.get, reverse=True)
    found = sample.beam_search(params, [prompt, [4]], config, 8, 2, length_penalty=0.0)[0]
    assert [tuple(ids) for ids, _ in found] == best[:8]
    for ids, score in found:        # each beam must go on from its own past
        assert score == pytest.approx(scores[tuple(ids)], abs=1e-4)


@pytest.mark.parametrize("prompts, word", [([[]], "empty"), ([[61]], "61"), ([[-1]], "-1"),
                                           ([], "empty")])
def test_a_bad_prompt_is_refused(trained, prompts, word):
    """An id that does not exist would look up the last row of the table."""
    params, config = trained
    with pytest.raises(ConfigError, match=word):
        sample.generate(params, prompts, config, tokens=1)
