"""The row of a conversation and its cache: its answers equal generate's after the same ids."""

import itertools

import jax
import pytest

import sample
from tests.common import full, net
from tests.helpers import make, mesh_of
from zigzag.core.mesh import shardings
from zigzag.generate import cache, decoding, passes, reading, rows, scores

GREEDY = decoding.Sampling(temperature=0)


@pytest.fixture
def small(monkeypatch):
    """Chunks of 8 ids, and a cache that begins with 16 slots."""
    monkeypatch.setattr(reading, "READ", 8)
    monkeypatch.setattr(reading, "SLOTS", 16)
    for module in (cache, rows, passes, scores, reading):
        monkeypatch.setattr(module, "CHUNK", 8)
    monkeypatch.setattr(passes.prefill, "__defaults__", (8, 0, 0))
    passes.new_cache.clear_cache()
    yield
    passes.new_cache.clear_cache()


def begin(options, mesh="", sampling=GREEDY):
    """A reading, and the model."""
    config = make(**{"seq_len": 48, **options})
    params = jax.tree.map(lambda w: 3 * w, jax.jit(lambda key: net.init(config, key))(
        jax.random.key(1)))
    if mesh:
        mesh = mesh_of(mesh)
        params = jax.device_put(params, shardings(net.weight_specs(config, mesh), mesh))
    with decoding.mesh_of_weights(params):
        params = sample.for_decoding(params, config)
    return reading.Reading(sample.engine_of(config), params, sampling), params, config


@pytest.fixture
def seen(monkeypatch):
    """The slots of the chunks that are read."""
    slots, read_chunk = [], passes.read_chunk

    def read(engine, params, cached, chunk, length):
        slots.append(int(chunk["slot"]))
        return read_chunk(engine, params, cached, chunk, length)

    monkeypatch.setattr(passes, "read_chunk", read)
    return slots


def say(row, ids, tokens, seed=0, stop=()):
    pieces = row.stream(ids, tokens, seed, stop, sample.draw)
    return [new for piece in pieces if piece for new in piece[0]]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*context")
@pytest.mark.parametrize("options, mesh", [
    ({}, ""), full({"window": 8, "local_layers": "lg"}, ""), full({"kv_heads": 1}, "tensor=2"),
    full({"positions": "learned", "position_rows": 48}, "data=2")])
def test_turns_are_written_as_if_all_were_read_again(small, options, mesh):
    """A prompt read at the wrong slots, or after cached ids with which it does not begin; padding
    of a chunk that is seen; a window that has overwritten keys that a query needs; a context that
    overflows."""
    row, params, config = begin(options, mesh)

    def check(ids, tokens):
        want, = sample.generate(params, [ids], config, tokens, 0)
        assert say(row, ids, tokens) == want
        return ids + want

    list(row.compile(sample.draw))
    turn = check([5, 6, 7], 4)                          # 7 of 16 slots
    turn = check(turn + [9, 8, 3, 2, 1], 3)             # two chunks
    for _ in itertools.islice(row.stream(turn + [4], 9, 0, (), sample.draw), 2):
        pass                                            # (Ctrl-C, while it is written)
    turn = check(turn + [4, 11], 12)                    # 29: the cache doubles
    check(turn[:10] + [1, 2], 3)                        # another text from its middle on
    turn = check(turn + [1, 2, 3], 9)
    check(turn + [10], 40)                              # the context is full, twice
    check([30] * 60, 3)                                 # longer than the context


def test_a_turn_reads_only_what_is_new_and_compiles_nothing(small, seen, caplog):
    """The whole conversation read again in each turn; a program compiled for each length of a turn,
    or for another --tokens."""
    row, _, _ = begin({"seq_len": 64}, sampling=decoding.Sampling(0.7, top_k=9))
    row.slots = 64
    list(row.compile(sample.draw))
    assert row.is_ready
    seen.clear()
    caplog.clear()
    with jax.log_compiles():
        turn = [3, 4, 5] * 4
        turn += say(row, turn, 7) + [6]
        assert seen == [0, 8]
        turn += say(row, turn, 9, seed=3) + [1, 2]
        assert seen == [0, 8, 16]
        say(row, turn, 3, stop=[7])
    assert not [r.message for r in caplog.records if r.message.startswith("Finished XLA comp")]
    assert len(turn) == 31


@pytest.mark.filterwarnings("ignore:.*context")
def test_an_answer_that_fills_the_context_is_sampled_as_generate_does(small):
    """Ids that are forgotten, or random numbers that begin again, when the context is full."""
    sampling = decoding.Sampling(0.9, repetition_penalty=1.2)
    row, params, config = begin({}, sampling=sampling)
    want, = sample.generate(params, [[5, 6, 7] * 9], config, 60, 0.9, repetition_penalty=1.2,
                            seed=4)
    assert say(row, [5, 6, 7] * 9, 60, seed=4) == want and row.has_rolled


def test_an_end_ends_an_answer(small):
    """An end id that is returned, or that the next turn assumes to be in the cache."""
    row, params, config = begin({})
    want, = sample.generate(params, [[5, 6, 7]], config, 9, 0)
    assert say(row, [5, 6, 7], 9, stop=[want[3]]) == want[:want.index(want[3])]
    assert say(row, [5, 6, 7], 9) == want
    ids = list(range(45))
    given = ids, 9, 0, (), sample.draw, True
    assert list(row.stream(*given))[-1] is not None and len(
        [piece for piece in row.stream(*given) if piece]) == 4
