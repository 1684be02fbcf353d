"""Generation with a cache, on any mesh, and refusals."""

import itertools
import json
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sample
from tests.common import ends, far_apart, full, hosts, net, slow, steps_of, weights_on
from tests.helpers import learn, make
from zigzag.core.errors import ConfigError
from zigzag.core.flags import change
from zigzag.generate import decoding, passes
from zigzag.generate.engine import mesh_of_weights
from zigzag.generate.rows import cut_at_end, prompt_arrays, seeds_of
from zigzag.parallel.network import network_of

PROMPTS = [[1, 2, 3, 4], [10, 12, 14], [5], list(range(20, 31))]


class Model(NamedTuple):
    params: Any
    config: Any

    def generate(self, prompts, *given, **options):
        return sample.generate(self.params, prompts, self.config, *given, **options)

    def beams(self, prompts, *given, **options):
        return sample.beam_search(self.params, prompts, self.config, *given, **options)


@pytest.fixture(scope="module")
def trained():
    run = make(steps=60)
    return Model(jax.tree.map(jnp.asarray, jax.device_get(learn(run)[1].params)), run.network)


@pytest.mark.full
def test_greedy_and_drawn_ids_are_those_of_the_short_loops(trained):
    """A cache read at the slot that is about to be filled; padding that is seen."""
    params, config = trained
    got = trained.generate(PROMPTS, tokens=8, temperature=0)
    drawn = trained.generate(PROMPTS, tokens=8, temperature=1.5, seed=7)
    for prompt, new, other in zip(PROMPTS, got, drawn):
        for generate in sample.generate_slowly, sample.generate_simply:
            assert new == generate(params, prompt, config, 8, 0)
            if len(prompt) + 8 <= config.seq_len:   # (where it is full, generate drops its half)
                assert other == generate(params, prompt, config, 8, 1.5, seed=7)
    assert got[0][:4] == [5, 6, 7, 8], "it has learned to count"


# -------------------------------------------------------------------------------------------
# On a mesh

def in_all_ways(params, config):
    """Greedy, sampled, and the beams of two prompts."""
    return (sample.generate(params, PROMPTS, config, 8, 0),
            sample.generate(params, PROMPTS, config, 8, 0.8, seed=3),
            sample.beam_search(params, PROMPTS[:2], config, 3, 5, eos=7))


@pytest.fixture(scope="module")
def generated(trained):
    return in_all_ways(*trained)


@pytest.mark.parametrize("mesh", [
    "tensor=2", slow("tensor=4"), slow("tensor=8"), slow("data=2,fsdp=2,tensor=2"), slow("fsdp=8"),
    slow("pipe=2,seq=2")])
def test_generation_is_the_same_on_any_mesh(trained, generated, mesh):
    """Ids chosen from only a device's own part of the vocabulary; the last position of a part taken
    for the last one; another device's rows or keys; one row on each device, whose update of the
    cache a shard_map refuses. (8 devices divide neither 4 heads nor 4 rows.)"""
    greedy, drawn, beams = in_all_ways(weights_on(*trained, mesh), trained.config)
    assert greedy == generated[0]
    assert drawn == generated[1]
    for got, want in zip(beams, generated[2], strict=True):
        assert got == [(ids, pytest.approx(score, abs=1e-4)) for ids, score in want]


@pytest.mark.parametrize("mesh, changes, shape", [
    ("tensor=4", {}, (1, 32, 8)), ("tensor=4", dict(kv_heads=2), (2, 8, 8)),
    ("tensor=2", dict(kv_rank=8, rotary_dim=4, head_dim=8, v_head_dim=8), (1, 16, 12))])
def test_a_cache_has_each_devices_own_part(mesh, changes, shape):
    """A cache with all heads, or all tokens, on every device: tensor would save no memory."""
    config = make(**changes).network
    params = weights_on(net.init(config, jax.random.key(0)), config, mesh)
    with mesh_of_weights(params):
        rows = prompt_arrays(network_of(config), [[1], [2]], config, 16, None)
        cache = passes.new_cache(sample.engine_of(config), sample.for_decoding(params, config),
                                 rows, 32)
    for kept in jax.tree.leaves(cache):
        assert kept.addressable_shards[0].data.shape == (2, *shape)


def test_a_full_beam_finds_the_best_of_all_continuations(trained):
    """A beam that continues another's past. (With a beam for each continuation nothing is pruned,
    so the result must equal an exhaustive search.)"""
    params, config = trained
    config = change(config, vocab_size=8)      # the other ids can no longer be said
    prompt = [1, 2, 3]
    every = list(itertools.product(range(8), repeat=2))
    rows = jnp.asarray([prompt + list(n) for n in every])
    logp = jax.nn.log_softmax(jax.jit(lambda rows: net.forward(params, rows, config))(rows))
    scores = {n: sum(float(logp[k, 2 + i, n[i]]) for i in range(2)) for k, n in enumerate(every)}
    best = sorted(scores, key=scores.get, reverse=True)
    found = sample.beam_search(params, [prompt, [4]], config, 8, 2, length_penalty=0.0)[0]
    assert [tuple(ids) for ids, _ in found] == best[:8]
    for ids, score in found:        # each beam must go on from its own past
        assert score == pytest.approx(scores[tuple(ids)], abs=1e-4)


def filtered(logits, sampling, seen=()):
    """The distribution from which an id is drawn: one rule after the other."""
    logits = np.array(logits, np.float64)
    for i in seen:
        logits[i] *= (1 / sampling.repetition_penalty if logits[i] > 0 else
                      sampling.repetition_penalty)
    share = np.exp(logits / sampling.temperature)
    order = np.argsort(-share)
    if sampling.top_k:
        share[order[sampling.top_k:]] = 0
    share /= share.sum()
    share[order[1:][np.cumsum(share[order])[:-1] >= sampling.top_p]] = 0
    share[share < sampling.min_p * share.max()] = 0
    return share / share.sum()


def assert_drawn_from(share, ids):
    """Chi-square, at one in ten thousand. (Wilson and Hilferty's limit.)"""
    found = np.bincount(ids, minlength=len(share))
    assert not found[share == 0].any(), "an id that a filter drops"
    want = share[share > 0] * len(ids)
    df = len(want) - 1
    limit = df * (1 - 2 / (9 * df) + 3.72 * (2 / (9 * df)) ** 0.5) ** 3
    assert np.sum((found[share > 0] - want) ** 2 / want) < limit


@pytest.mark.parametrize("options", [
    {}, dict(temperature=0.5), dict(temperature=2.0), dict(top_k=3), dict(top_p=0.7),
    dict(min_p=0.2), dict(repetition_penalty=1.7),
    dict(temperature=1.5, top_k=8, top_p=0.9, min_p=0.05, repetition_penalty=1.2)], ids=str)
def test_draws_are_from_the_distribution_that_is_left(options):
    """top_p that drops the id which crosses the share, top_k one too many; a filter that ignores
    the previous one."""
    sampling, seen = decoding.Sampling(**options), [0, 2, 9]
    logits = np.random.default_rng(0).normal(size=12).astype(np.float32) * 1.5
    is_seen = jnp.zeros((1, 12), bool).at[0, jnp.array(seen)].set(True)
    rows = jnp.asarray(logits)[None]
    if sampling.repetition_penalty != 1:
        rows = decoding.penalised(rows, is_seen, sampling.repetition_penalty)
    keys = jax.random.split(jax.random.key(1), 20000)
    ids = jax.jit(sample.draw, static_argnums=2)(jnp.repeat(rows, 20000, 0), keys, sampling)
    assert_drawn_from(filtered(logits, sampling, seen), np.asarray(ids))


@pytest.mark.parametrize("options", [
    dict(top_p=1e-40), dict(temperature=1e-39), dict(temperature=1e-30, top_p=0.5, min_p=0.9)])
def test_what_is_nearly_greedy_is_greedy(options):
    """A top_p or temperature that is 0 in float32: all logits become infinite, and every id 0."""
    logits = jnp.array([[-3e3, 5.0, 5.1, -2.0], [9.0, 1.0, 2.0, 3.0]])
    keys = jax.random.split(jax.random.key(0), 2)
    assert sample.draw(logits, keys, decoding.Sampling(**options)).tolist() == [2, 0]


def test_ids_inside_a_compiled_function_are_penalised_too(trained):
    """A repetition_penalty that generate_ids ignores; padding that counts as text."""
    params, config = trained
    rows = {"tokens": jnp.array([[0, 0, 7, 3, 5], [9, 5, 6, 7, 8]]), "start": jnp.array([2, 0])}
    prompts, options = [[7, 3, 5], [9, 5, 6, 7, 8]], dict(temperature=0, repetition_penalty=9)
    want = trained.generate(prompts, 6, **options)
    found = sample.generate_ids(params, rows, config, 6, decoding.Sampling(**options))
    assert found.tolist() == want != trained.generate(prompts, 6, temperature=0)


def test_a_text_follows_from_its_prompt_and_its_seed(trained):
    """Random numbers that depend on the index in the batch; the same text for equal prompts."""
    options = dict(tokens=10, temperature=2.0)
    whole = trained.generate([*PROMPTS, PROMPTS[0]], **options, seed=5)
    for prompt, want in zip(PROMPTS, whole):
        assert trained.generate([prompt], **options, seed=5) == [want]
    assert whole[4] != whole[0]
    assert trained.generate(PROMPTS[::-1], **options, seed=5) == whole[3::-1]
    seeds = trained.generate(PROMPTS[:3], **options, seed=[5, 6, 5])
    assert [a == b for a, b in zip(seeds, whole)] == [True, False, True]


# -------------------------------------------------------------------------------------------
# Compiled programs

def test_prompts_up_to_a_length_share_a_program(trained, caplog):
    """A program compiled for each length of a prompt, or for each call."""
    def compiled(prompts, seed=0):
        caplog.clear()
        with jax.log_compiles():
            trained.generate(prompts, tokens=9, stop=[4], seed=seed)
        return [r.message for r in caplog.records if r.message.startswith("Finished XLA comp")]

    jax.clear_caches()      # (what other tests have compiled)
    assert compiled(PROMPTS)
    assert not compiled(PROMPTS, seed=1)
    assert not compiled([[1] * 13, [2], [3, 4], [5] * 16], seed=2)


@pytest.mark.full
def test_an_edited_draw_is_in_every_generator(trained, monkeypatch):
    """A way to generate that keeps the `draw` it was compiled with, or has another one: a fork's
    edit of sample.draw would change some texts and not others."""
    params, config = trained
    rows = {"tokens": np.array([[1, 2, 3]])}

    def texts():
        return [*trained.generate([[1, 2, 3]], 4, 0),
                sample.generate_ids(params, rows, config, 4, 0)[0].tolist(),
                sample.generate_slowly(params, [1, 2, 3], config, 4, 0),
                sample.generate_simply(params, [1, 2, 3], config, 4, 0)]

    first = texts()
    assert all(text == first[0] for text in first) and first[0] != [7, 7, 7, 7]
    monkeypatch.setattr(sample, "draw", lambda logits, keys, sampling: jnp.full(
        len(logits), 7, jnp.int32))
    assert texts() == [[7, 7, 7, 7]] * 4


def test_a_sampling_and_its_fields_by_name_are_the_same(trained):
    """A field by name that is dropped, or silently beats another; a misspelt one that is taken for
    an option of something else."""
    given = [[1, 2]], 12
    by_name = trained.generate(*given, temperature=0.7, top_k=5, seed=3)
    for sampling, options in ((decoding.Sampling(0.7, top_k=5), {}), (0.7, dict(top_k=5)),
                              (decoding.Sampling(0.7), dict(top_k=5))):
        assert by_name == trained.generate(*given, sampling, **options, seed=3)
    with pytest.raises(TypeError, match="multiple values for .*'temperature'"):
        trained.generate(*given, 0.7, temperature=0.9)
    with pytest.raises(TypeError, match="unexpected keyword argument 'top'"):
        trained.generate(*given, top=5)


def test_the_loop_ends_when_all_have_ended(trained, monkeypatch):
    """A loop that runs for all --tokens although all rows have ended, or that ends with the first
    row."""
    greedy, steps = trained.generate(PROMPTS, 40, 0), steps_of(monkeypatch)
    stop = [greedy[0][2], greedy[1][5], greedy[2][4], greedy[3][3]]
    got = trained.generate(PROMPTS, 40, 0, stop=stop)
    assert got == [list(cut_at_end(stop, ids)) for ids in greedy]
    assert [count for _, count in steps] == [1 + max(map(len, got))], "with its end"


def decode_program(params, config, prompts):
    """The compiled passes.decode after these prompts, and the state before it."""
    with mesh_of_weights(params):
        params = sample.for_decoding(params, config)
        rows = prompt_arrays(network_of(config), prompts, config, 8, None)
        sampling = decoding.Sampling()
        state = decoding.before_ids(seeds_of(rows, 0), ())
        engine = sample.engine_of(config)
        slots, length = passes.room_for(engine, rows, 8)
        state |= passes.prefill(engine, params, rows, slots, length)
        cache = state.pop("cache")
        return passes.decode.lower(engine, params, cache, state, np.int32(8), 16, length, sampling,
                                   sample.draw).compile(), cache


@pytest.mark.parametrize("mesh", ["", slow("tensor=2")])
def test_the_cache_is_donated(trained, mesh):
    """A cache that is copied in each call: twice the memory."""
    compiled, cache = decode_program(weights_on(*trained, mesh), trained.config, PROMPTS)
    assert "input_output_alias" in compiled.as_text()
    kept = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(cache))
    assert compiled.memory_analysis().alias_size_in_bytes >= kept


@pytest.mark.parametrize("rows", [1, 4])
def test_a_cpus_loop_does_not_copy_the_cache(trained, rows):
    """On a CPU: a cache of one row that is copied for each token, because its update is fused with
    what reads it."""
    compiled, cache = decode_program(*trained, PROMPTS[:rows])
    text, shape = compiled.as_text(), ",".join(map(str, cache[0]["k"].shape))
    assert not re.search(rf"f32\[{shape}\]\S* copy\(", text)


def test_a_text_ends_an_answer(trained):
    """A stop text that is missed because several ids spell it; a row that continues because another
    does."""

    class Letters:      # an id is a letter
        @staticmethod
        def decode(ids):
            return "".join(chr(65 + i) for i in ids)

    whole = trained.generate(PROMPTS, 24, 0, logprobs=True)
    spelled = Letters.decode(whole[0][0][3:5])
    got = trained.generate(PROMPTS, 24, 0, stop=[spelled], logprobs=True, tokenizer=Letters)
    for (ids, logs), (all_ids, all_logs) in zip(got, whole, strict=True):
        at = Letters.decode(all_ids).find(spelled)
        count = len(all_ids) if at < 0 else at + len(spelled)
        assert ids == all_ids[:count]
        # (The text that goes on from its last half is padded to the longest row that has not
        # ended: some CPUs add up in another order for another number of columns.)
        assert logs == pytest.approx(all_logs[:count], abs=1e-5)
    assert len(got[0][0]) <= 5


# -------------------------------------------------------------------------------------------
# Many prompts

THIRTEEN = [list(range(n, n + 1 + n % 5)) for n in range(13)]


# The same in several processes, each of which writes its results to a file.
IN_PROCESSES = """
import json, os, sys
sys.path.insert(0, os.getcwd())
import sample, train
from zigzag.parallel.saved import load_run
from zigzag.run.running import machine
THIRTEEN = [list(range(n, n + 1 + n % 5)) for n in range(13)]
config = train.parse(sys.argv[1:])
params, c = load_run(config.out, machine(config))
found = [sample.generate(params, THIRTEEN, c, 8, **options)
         for options in (dict(temperature=0), dict(temperature=1.5, seed=list(range(13))))]
scores = sample.score(params, THIRTEEN, c)
with open(f"{config.out}/by-{config.process_id}.json", "w") as file:
    json.dump([found, scores], file)
"""


@pytest.mark.full
def test_thirteen_prompts_are_the_same_in_two_processes(tmp_path):
    """A process with the texts of only its own rows, or that waits for ever for the other's."""
    run = make(steps=60, out=str(tmp_path / "run"), save_every=60)
    params, config = jax.device_get(learn(run)[1].params), run.network
    file = tmp_path / "two.py"
    file.write_text(IN_PROCESSES)
    results = ends(hosts(2, "--mesh", "data=2,tensor=2", "--out", run.out, file=file))
    assert [status for status, *_ in results] == [0, 0], results
    want = [sample.generate(params, THIRTEEN, config, 8, **options)
            for options in (dict(temperature=0), dict(temperature=1.5, seed=list(range(13))))]
    for i in range(2):
        found, scores = json.loads((tmp_path / f"run/by-{i}.json").read_text())
        assert found == want
        np.testing.assert_allclose(scores, sample.score(params, THIRTEEN, config), rtol=1e-4)


# -------------------------------------------------------------------------------------------
# Refusals

@pytest.mark.parametrize("options, words", [
    (dict(tokens=-1), "tokens -1, batch 64: must be at least 0"), (dict(batch=0), "batch 0: must"),
    (dict(seed=[1]), "2 prompts and 1 seeds"), (dict(seed=[1, 2, 3]), "2 prompts and 3 seeds"),
    (dict(stop=["a"]), "needs the tokenizer"),
    (dict(temperature=-1), "temperature=-1"), (dict(top_p=0), "top_p=0"),
    (dict(min_p=2), "min_p=2"), (dict(top_k=-1), "top_k=-1"),
    (dict(repetition_penalty=0), "repetition_penalty=0.*must be 0 or more")], ids=str)
def test_bad_options_are_refused(trained, options, words):
    """One seed silently used for all prompts; a stop text that is never found."""
    with pytest.raises(ConfigError, match=words):
        trained.generate([[1], [2]], **{"tokens": 1, **options})


def test_what_is_too_much_is_refused(trained):
    """A beam without a first id; a prompt that is silently cut for a beam search."""
    params, config = trained
    assert trained.generate([[1], [2]], tokens=0) == [[], []]
    for prompt, options, words in (
            ([1], dict(beams=0), "beams 0, .* expected 1 to 61 beams"),
            ([1], dict(beams=62), "beams 62, .* expected 1 to 61 beams"),
            ([1] * 17, {}, "a prompt of 17 tokens .* the model's context has 16"),
            ([1], dict(tokens=0), "tokens 0"), ([1], dict(length_penalty=np.nan), "nan"),
            ([1], dict(early_stop="x"), "'never'")):
        with pytest.raises(ConfigError, match=words):
            trained.beams([prompt], **options)
    with pytest.raises(ConfigError, match="at least 2"):
        sample.score(params, [[1, 2]], change(config, seq_len=1))
    with pytest.raises(ValueError, match="shorter"):        # rows without a score
        sample.score(params, [[1, 2], [1, 2, 3]], config, given=[1])


def test_ends_that_are_no_ids_of_the_model_end_nothing(trained):
    """An end id of 2**31 or more, which a tokenizer may have, and which does not fit into 32
    bits."""
    want = trained.generate(PROMPTS, 6, 0)
    assert trained.generate(PROMPTS, 6, 0, stop=[2**32, -1, 61]) == want
    assert trained.generate(PROMPTS, 6, 0, stop=want[0][2])[0] == want[0][:2]
    best, = trained.beams(PROMPTS[:1], 2, 6, eos=2**40)[0][:1]
    assert len(best[0]) == 6


@pytest.mark.parametrize("length_penalty", [-100.0, 100.0])
def test_beams_of_any_length_penalty_are_there(trained, length_penalty):
    """Beams that are lost because their scores are below that of a beam that does not exist."""
    found, = trained.beams(PROMPTS[:1], 3, 30, eos=7, length_penalty=length_penalty)
    assert len(found) == 3 and all(np.isfinite(score) for _, score in found)
    assert len({tuple(ids) for ids, _ in found}) == 3


# -------------------------------------------------------------------------------------------
# Texts that are longer than the context

def written_without_a_cache(params, config, prompt, tokens):
    """The greedy ids of a loop that runs forward on the last half of each full context."""
    forward, C = jax.jit(lambda row: net.forward(params, row, config)), config.seq_len
    row, new = list(prompt[-C:]), []
    for _ in range(tokens):
        row = row if len(row) <= C else row[-(C // 2):]
        logits = forward(jnp.asarray([row + [0] * (C - len(row))]))
        new.append(int(jnp.argmax(logits[0, len(row) - 1])))
        row.append(new[-1])
    return new


@pytest.fixture(scope="module", params=[{}, {"positions": "learned", "position_rows": 16}],
                ids=["rotary", "learned"])
def moved(request):
    """Weights that never write the same id for long, with a context of 16."""
    config = make(seq_len=16, **request.param).network
    return Model(far_apart(config, seed=1), config)


LONG = [[3, 4, 5], list(range(20, 36)), [7], list(range(30, 55))]


def test_a_full_context_goes_on_from_its_last_half(moved):
    """Positions beyond the trained ones, where text turns to gibberish; a row that is cut when
    another is full; the beginning of a long prompt read instead of its end."""
    params, config = moved
    with pytest.warns(UserWarning) as said:
        got = moved.generate(LONG, 4 * 16, 0)
    assert [str(w.message).split(":")[0] for w in said] == [
        "a prompt has 25 tokens, but this model's context is 16",
        "this model's context is 16 tokens"]
    for prompt, new in zip(LONG, got):
        assert new == written_without_a_cache(params, config, prompt, 64)
    assert len({tuple(new[-16:]) for new in got}) > 1 and len(set(got[0])) > 8


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*context")
@pytest.mark.parametrize("mesh", [full("tensor=2"), slow("data=2,fsdp=2"), full("seq=2,pipe=2")])
def test_a_full_context_goes_on_so_on_any_mesh(moved, mesh):
    """Rows of padding that count as full; random numbers in another order."""
    on = Model(weights_on(*moved, mesh), moved.config)
    for options in (dict(temperature=0), dict(temperature=0.8, seed=3, repetition_penalty=1.2)):
        want = moved.generate(LONG, 40, **options)
        assert on.generate(LONG, 40, **options) == want
        alone, = moved.generate(LONG[:1], 40, **options)
        assert alone == want[0]


@pytest.mark.filterwarnings("ignore:.*context")
def test_a_text_may_end_with_the_context(moved):
    """Rows that all end when the first one is full, or only when the last one is."""
    got = moved.generate(LONG, 40, 0, stop_at_context=True)
    assert [len(new) for new in got] == [14, 1, 16, 1]
    assert got == [new[:len(short)] for new, short in zip(
        moved.generate(LONG, 40, 0), got)]


@pytest.mark.parametrize("prompts, word", [
    (["a"], "prompt 0 has 'a': expected a list of ids"), ([1, 2], "expected a list of ids"),
    ("a", "expected a list of ids"), ([[]], "expected a list of ids"),
    ([[0, 61]], "has 61: .* ids from 0 to 60"), ([[-1]], "-1"), ([], "at least one list")])
def test_a_bad_prompt_is_refused(trained, prompts, word):
    """An id that does not exist, which would look up the last row of the table."""
    with pytest.raises(ConfigError, match=word):
        trained.generate(prompts, tokens=1)
