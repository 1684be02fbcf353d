"""Pipelines: the timetable, the memory of each schedule, and the order of layers."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import model
import shard
from tests.common import assert_same_on, full, slow, temporaries
from tests.helpers import batch_of, build, learn, make, mesh_of, program_of, tokens_of
from zigzag.core import flags
from zigzag.core.errors import ConfigError
from zigzag.core.mesh import by_path
from zigzag.disk.batches import place_batch
from zigzag.parallel.pipeline import ticks, timeline, turn_of, work_1f1b

INTERLEAVED = dict(schedule="interleaved", chunks=2)
BOTH = dict(schedule="1f1b", chunks=2)

# -------------------------------------------------------------------------------------------
# The timetable

def test_a_start_says_how_much_is_idle():
    """A number of ticks that is another schedule's."""
    assert timeline(2, 4, "interleaved", 2) == (
        "interleaved: 9 ticks for 4 microbatches of 2 chunks a stage, 11% idle; "
        "backward: the same")
    for S, M in ((2, 3), (4, 8)):
        assert f"{M + S - 1} ticks" in timeline(S, M)


@pytest.mark.parametrize("skips_idle", [True, False])
def test_the_idle_share_of_1f1b_counts_passes_as_the_other_schedules_do(skips_idle):
    """A tick of two passes counted as one of one: 43% idle where GPipe has 20%, in the same time.
    Counted here tick by tick: a tick lasts as long as the stage with most to do in it."""
    for S, M, V in ((2, 4, 1), (4, 8, 1), (3, 1, 1), (2, 4, 2), (4, 8, 3), (3, 4, 2)):
        took = 0
        for t in range(ticks(S, M, "1f1b", V)):
            work = [[0 <= m < M for m, _ in work_1f1b(t, stage, S, V)] for stage in range(S)]
            took += sum(any(passes) or not skips_idle for passes in zip(*work))
        said = timeline(S, M, "1f1b", V, skips_idle)
        assert f"{1 - 2 * M * V / took:.0%} of it idle" in said, said
        if skips_idle:
            usual = timeline(S, M, "interleaved" if V > 1 else "gpipe", V)
            assert re.search(r"(\d+)%", said)[1] == re.search(r"(\d+)%", usual)[1]


@pytest.mark.parametrize("S, M, V", [(2, 4, 1), (4, 2, 1), (2, 4, 2), (3, 6, 4), (4, 6, 2),
                                     (2, 1, 3)])
def test_1f1b_takes_each_chunk_when_its_input_has_come(S, M, V):
    """A microbatch taken twice, too early, or never; an input that another has overwritten."""
    when, last = {}, ticks(S, M, "1f1b", V)
    for t, stage in itertools.product(range(last), range(S)):
        for way, (m, chunk) in zip("fb", work_1f1b(t, stage, S, V)):
            if 0 <= m < M:
                assert when.setdefault((way, m, chunk * S + stage), t) == t
    assert len(when) == 2 * M * S * V and max(when.values()) == last - 1
    for m, place in itertools.product(range(M), range(S * V)):      # place: chunk, then stage
        first, back = when["f", m, place], when["b", m, place]
        assert place == 0 or first == when["f", m, place - 1] + 1
        assert back == (when["b", m, place + 1] if place < S * V - 1 else first) + 1
        assert first - place % S == turn_of(m, place // S, S, V) and back - first < 2 * S * V


# -------------------------------------------------------------------------------------------
# The same function

@pytest.mark.parametrize("mesh, changes", [
    ("pipe=2", dict(microbatches=2)),
    slow("pipe=4", dict(microbatches=4, schedule="1f1b", tied=True)),
    slow("pipe=2,data=2", dict(microbatches=2, accumulate=2, **INTERLEAVED)),
    full("pipe=4", dict(layers=8, microbatches=8, **INTERLEAVED)),
    slow("pipe=2,fsdp=2", dict(microbatches=4, schedule="1f1b", remat="selective")),
    slow("pipe=2,seq=2", dict(microbatches=1, remat="full", **INTERLEAVED)),
    # (Each device has 3 tokens between blocks, which two stages do not share out evenly.)
    slow("pipe=2,seq=2,tensor=2", dict(seq_len=12, microbatches=2)),
    slow("pipe=2,seq=2,tensor=2", dict(seq_len=12, microbatches=2, schedule="1f1b")),
    ("pipe=2", dict(microbatches=4, dropout=0.1, **BOTH)),
    slow("pipe=4", dict(layers=8, microbatches=8, tied=True, **BOTH)),
    slow("pipe=2", dict(layers=8, microbatches=4, schedule="1f1b", chunks=4)),
    slow("pipe=4", dict(layers=8, microbatches=2, remat="selective", **BOTH)),
    slow("pipe=2,data=2", dict(microbatches=2, accumulate=2, zero=1, **BOTH)),
    slow("pipe=2,fsdp=2", dict(layers=8, microbatches=4, remat="full", **BOTH)),
    slow("pipe=2,tensor=2", dict(microbatches=4, kv_heads=2, **BOTH)),
    slow("pipe=2,tensor=2", dict(microbatches=2, overlap=True, **BOTH)),
    slow("pipe=2,seq=2", dict(microbatches=2, remat="full", **BOTH)),
    slow("pipe=2,seq=2,tensor=2", dict(seq_len=12, microbatches=4, **BOTH)),
    slow("pipe=2,expert=2", dict(microbatches=2, experts=4, **BOTH)),
    slow("pipe=2,fsdp=2,tensor=2", dict(microbatches=2, experts=4, shared_experts=1, **BOTH))])
def test_a_pipelines_gradients_are_the_formulas(mesh, changes):
    """A microbatch added twice, or one that comes to a chunk before it has left the one before it,
    or never; a stage's share of the head left out."""
    assert_same_on(mesh, **{"layers": 4, **changes})


@pytest.mark.parametrize("changes", [BOTH, slow(INTERLEAVED), slow(dict(schedule="1f1b"))], ids=str)
def test_an_evaluation_runs_the_layers_in_their_own_order(changes):
    """Layers in the order in which stages store them: nothing but a held-out loss would show it."""
    found = []
    for mesh, how in (("", {}), ("pipe=2", changes)):
        config = make(layers=4, steps=2, batch=8, microbatches=4, lr=0.3, **how)
        found.append(learn(config, mesh, held_out=tokens_of(config, 8, 1))[1].held_out)
    assert found[0] == pytest.approx(found[1], rel=5e-6)


# -------------------------------------------------------------------------------------------
# Memory

def kept(count, **changes):
    """The temporaries of a step with so many microbatches."""
    return temporaries(make(batch=2 * count, microbatches=count, seq_len=32, d_model=64,
                            **changes), "pipe=4")


@pytest.mark.full
def test_one_forward_one_backward_keeps_no_more_for_more_microbatches():
    """A schedule that is 1F1B only by name, and keeps every microbatch until the last has gone
    forward, as GPipe does. (Read from the compiled programs.)"""
    for how in (dict(schedule="1f1b"), BOTH):
        few, many = (kept(n, layers=8, **how) for n in (8, 32))
        assert many < 1.02 * few            # the ids of 48 rows more
        assert kept(32, layers=8, schedule="gpipe") > 2 * many


@pytest.mark.parametrize("schedule", [slow(dict(schedule="gpipe")), slow(INTERLEAVED)])
@pytest.mark.full
def test_a_pipeline_keeps_of_a_layer_what_remat_says(schedule):
    """A copy of the stage's weights saved in every tick, whatever --remat says: an outer checkpoint
    policy overrides inner ones, and a branch saves all of its inputs."""
    layers = 2 * 2 * 32 * 64 * 4        # the inputs of a stage's layers, for one microbatch
    full, selective, none = (kept(8, layers=8, remat=remat, **schedule)
                             for remat in ("full", "selective", "none"))
    more = (kept(32, layers=8, remat="full", **schedule) - full) / 24
    assert more < 4 * layers * schedule.get("chunks", 1)
    assert full < selective / 1.5 < none / 3


# -------------------------------------------------------------------------------------------
# Layers on disk

@pytest.mark.full
def test_a_pipeline_saves_its_layers_in_their_own_order(tmp_path):
    """A checkpoint in the order of the stages (0, 2 and 1, 3 if interleaved), which fits only one
    mesh."""
    ends = []
    for name, mesh, changes in (("a", "pipe=2,data=2", INTERLEAVED), ("b", "data=2", {}),
                                ("c", "pipe=2,data=2", BOTH)):
        learn(make(layers=4, steps=3, out=str(tmp_path / name), **changes), mesh)
        ends.append(learn(make(layers=4, steps=6, out=str(tmp_path / name)), "data=2")[0])
    for a, b, c in zip(*ends, strict=True):
        assert a["step"] == b["step"] == c["step"] >= 4
        assert a["loss"] == pytest.approx(b["loss"], rel=5e-6) == pytest.approx(c["loss"], rel=5e-6)


# -------------------------------------------------------------------------------------------
# A custom loss

def own_pipelined(params, batch, specs=None, **how):
    """A loss that calls shard.pipelined_loss and nothing else of this project's."""
    def embed(params, batch):
        return params["embed"][batch["tokens"]]

    def block(w, x, i, batch):
        return x + jnp.tanh(x @ w["wq"][:, 0] @ w["wo"][0]), None

    def head(params, x, batch):
        logp = jax.nn.log_softmax(x @ params["head"])
        picked = jnp.take_along_axis(logp, batch["targets"][..., None], -1)
        return -picked.sum(), batch["targets"].size

    return shard.pipelined_loss(embed, block, head, {k: params[k] for k in ("embed", "head")},
                                params["layers"], batch, specs and specs["layers"],
                                shard.Options(**how))


@pytest.mark.full
@pytest.mark.parametrize("schedule", [full("gpipe"), "1f1b"])
def test_a_count_of_the_part_that_head_is_given_is_a_part(schedule):
    """A count of one stage's part of the time taken for the whole count: a loss that is too large
    by a factor of the number of stages."""
    def loss(params, batch, specs=None):
        return own_pipelined(params, batch, specs, microbatches=2, schedule=schedule)

    rows = [learn(make(layers=4, steps=2), mesh, loss=loss)[0] for mesh in ("", "pipe=2")]
    for a, b in zip(*rows, strict=True):
        assert a["tokens"] == b["tokens"] == 128 and a["loss"] == pytest.approx(b["loss"], rel=5e-6)


@pytest.mark.parametrize("mesh, ways", [("pipe=2", 2), ("pipe=4", 4),
                                        ("pipe=2,fsdp=2,tensor=2", 8), ("pipe=2,data=2", 2)])
def test_a_stage_stores_its_part_of_the_embedding_and_the_head(mesh, ways):
    """Weights outside the layers, or the optimizer's moments of them, that every stage stores
    whole. (That they are gathered and scattered once stands in tests/forecast/test_traffic.py.)"""
    program = program_of(make(layers=4), mesh)
    adam = program.state["opt"][1]
    for tree in program.state["params"], adam.mu, adam.nu:
        for name in "embed", "head":
            w = tree[name]
            assert np.prod(w.sharding.shard_shape(w.shape)) * ways == w.size, name
    norm = program.state["params"]["norm"]      # below --fsdp_min
    assert norm.sharding.shard_shape(norm.shape) == norm.shape


def test_an_interleaved_pipeline_permutes_nothing_but_layers():
    """A dimension 0 that pipe splits, in Adafactor's state for the head, taken for layers."""
    config = make(layers=4, schedule="interleaved", chunks=2, microbatches=2, fsdp_min=16)
    plan = program_of(config, "pipe=2").plan
    for path, spec in by_path(plan.specs_at_rest).items():
        assert ("pipe" in spec) == path.startswith("layers"), path


def test_layers_without_their_specs_are_refused():
    """Without specs, every stage would run all layers."""
    with pytest.raises(ConfigError, match="specs"):
        learn(make(steps=1), "pipe=2", loss=lambda p, b: own_pipelined(p, b))


def test_layers_that_do_not_divide_into_stages_are_refused():
    """Two stages of two chunks for six layers."""
    with pytest.raises(ConfigError, match="6 layers do not divide into 4"):
        program = program_of(make(layers=6, **INTERLEAVED), "pipe=2")
        with jax.set_mesh(program.mesh):
            program.step.trace(program.state, program.batch)


# -------------------------------------------------------------------------------------------
# What a head is given of the time

PIPED = make(layers=4, batch=16)
NET = PIPED.network


def attends(p, x, batch):
    q, k, v = shard.columns(model.norm(x, p["norm"], NET), *(p["head_of"][n] for n in "qkv"))
    return x + shard.row((shard.self_attend(q, k, v, heads=4), p["head_of"]["o"]))


def numbers_slots(p, x, batch):
    slots = jnp.broadcast_to(shard.slots_of(batch["tokens"]), batch["tokens"].shape)
    return x * (1 + 0.01 * shard.my_time_slice(slots, x)[..., None])


def drops(p, x, batch):
    return shard.dropout(x, 0.3, batch.get("seeds"), 5)


def sums_over_time(p, x, batch):
    total = shard.sum_over_time(model.norm(x, p["norm"], NET).sum(1))
    return x * (1 + 0.1 * jnp.tanh(total / 16))[:, None]


def pools(p, x, batch):
    mean = shard.whole_time(model.norm(x, p["norm"], NET)).mean(1)
    return x * (1 + 0.3 * jnp.tanh(mean))[:, None]


HEADS = {"self_attend": attends, "slots_of": numbers_slots, "dropout without slots": drops,
         "sum_over_time": sums_over_time, "whole_time": pools}


def first_update(change, mesh, all_time=False, timed={}, extra={}, **how):
    """(loss, norm of the gradient) of the plain decoder with `change` at the end of its head."""
    config = flags.change(PIPED, **how)

    def head(p, x, batch):
        given = change(p, x, batch)
        x, weights = given if isinstance(given, tuple) else (given, batch["weights"])
        total, _ = shard.token_loss(*model.norm_and_head(p, x, NET), batch["targets"], weights,
                                    NET.vocab_size)
        return total, jnp.sum(batch["weights"])

    def loss(p, batch, specs=None):
        others = {name: w for name, w in p.items() if name != "layers"}
        return shard.pipelined_loss(
            lambda p, batch: model.embed(p, batch["tokens"], NET),
            functools.partial(model.layer, c=NET), head, others, p["layers"], batch,
            specs and specs["layers"], config.network, all_time=all_time)

    def init(key):
        own = {n: jax.random.normal(jax.random.fold_in(key, i), (32, 4, 8)) / 5
               for i, n in enumerate("qkv")}
        return {**model.init(NET, key), "head_of": {
            **own, "o": jax.random.normal(key, (4, 8, 32)) / 5}}

    made = batch_of(PIPED) | extra
    mesh, shapes = mesh_of(mesh), jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
                                               made)
    program = build(config, mesh, init, loss, shapes, timed=timed)
    with jax.set_mesh(mesh):
        state = program.permute(program.start(jax.random.key(0), None))
        batch = place_batch(mesh, lambda a, b: {k: x[a:b] for k, x in made.items()}, 16)
        numbers = jax.device_get(program.step(state, batch)[1])
    return float(numbers["loss"]), float(numbers["grad_norm"])


@pytest.mark.parametrize("function", [
    name if name in ("self_attend", "dropout without slots") else full(name) for name in HEADS])
@pytest.mark.parametrize("mesh, how", [
    ("pipe=2", {}), full("pipe=2,seq=2", dict(schedule="1f1b", microbatches=2)),
    full("pipe=2", INTERLEAVED), full("pipe=2,tensor=2", {}),
    full("data=2,pipe=2", dict(schedule="1f1b", microbatches=2))])
def test_a_head_that_needs_all_of_the_time_is_right_or_refused(function, mesh, how):
    """Attention, slots or dropout of a stage's part of the time, as if that were all of it: the
    loss on a pipeline differed in the fifth digit, which no check of values found."""
    with pytest.raises(ConfigError, match=f"calls shard.{function}, .* all_time=True"):
        first_update(HEADS[function], mesh, **how)
    alone = first_update(HEADS[function], "")
    assert first_update(HEADS[function], mesh, True, **how) == pytest.approx(alone, rel=1e-5)


def scaled(p, x, batch):
    return x, batch["weights"] * batch["scale"] * batch["table"].sum(1, keepdims=True)


@pytest.mark.parametrize("mesh", ["seq=2", full("pipe=2"), full("pipe=2,seq=2")])
def test_an_array_as_long_as_the_time_is_cut_only_if_the_task_says_so(mesh):
    """A table of 16 numbers for each row, cut and permuted over seq because a row has 16 tokens,
    too: a wrong loss without a word."""
    rng = np.random.default_rng(3)
    extra = {name: rng.uniform(0.5, 2, (16, 16)).astype("float32") for name in ("scale", "table")}
    extra["table"][:, ::2] *= 9         # (a half of it has not half of its sum)
    extra["nothing"] = np.zeros((16, 0), "float32")     # (which ended in a division by zero)
    alone = first_update(scaled, "", extra=extra)
    assert first_update(scaled, "data=2", extra=extra) == pytest.approx(alone, rel=1e-5)
    said = {"scale": True, "table": False}
    assert first_update(scaled, mesh, extra=extra, timed=said) == pytest.approx(alone, rel=1e-5)
    for missing in said:
        with pytest.raises(ConfigError, match=f"batch's '{missing}' has 16 .*timed="):
            first_update(scaled, mesh, extra=extra, timed={k: v for k, v in said.items()
                                                           if k != missing})


def test_a_time_that_an_array_does_not_have_is_refused():
    """timed={"scale": True} for an array of another length, which would stay whole."""
    with pytest.raises(ConfigError, match="'scale': True}: .*rows of .3., but a row has 16"):
        first_update(scaled, "seq=2", timed={"scale": True},
                     extra={"scale": np.ones((16, 3), "float32")})
