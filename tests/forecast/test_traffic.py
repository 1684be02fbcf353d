"""The bytes that an update should send, compared with those of compiled programs."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shard
import train
from forecast.traffic import expected_traffic, is_complete
from tests.common import full, net
from tests.helpers import build, make, mesh_of, program_of
from zigzag.core.mesh import by_path
from zigzag.core.report import Reporter
from zigzag.parallel.hlo import Collective, collectives
from zigzag.run.plan import compiled
from zigzag.run.task import without_data


def sent_and_expected(program):
    """({(kind, axis): bytes} that the compiled update sends, and the expected ones)."""
    return ({(c.kind, c.axis): c for c in rows} for rows in (
        collectives(compiled(program)), expected_traffic(program.plan)))


ONE_F_ONE_B = dict(schedule="1f1b")
INTERLEAVED = dict(schedule="interleaved", chunks=2)
HEAD_NORMS = dict(qk_norm=True, qk_norm_wide=True)


@pytest.mark.parametrize("mesh, changes", [
    full("data=4", {}), full("fsdp=4", {}), full("tensor=4", {}), full("seq=4", {}),
    full("pipe=4", dict(microbatches=4)), full("expert=4", dict(experts=8)),
    ("data=2,fsdp=2,tensor=2", {}),
    ("expert=2,fsdp=2,tensor=2", dict(experts=4, shared_experts=1)),
    full("pipe=2,data=2", dict(microbatches=2, **INTERLEAVED)),
    full("pipe=2,data=2", dict(microbatches=2, **ONE_F_ONE_B)),
    full("pipe=2,data=2", dict(layers=8, microbatches=2, chunks=2, **ONE_F_ONE_B)),
    full("pipe=2,fsdp=2,tensor=2", dict(layers=8, microbatches=2, chunks=2, **ONE_F_ONE_B)),
    full("pipe=2,seq=2,fsdp=2", dict(microbatches=2)),
    full("data=4,seq=2", dict(remat="full", zero=1)),
    ("data=2,tensor=2", dict(zero=2)),
    full("data=2,fsdp=2,pipe=2", dict(zero=2, microbatches=2, batch=16)),
    full("seq=2,tensor=2", dict(kv_heads=2)),
    full("seq=2,pipe=2", ONE_F_ONE_B),
    full("fsdp=2,pipe=2", dict(microbatches=2, **ONE_F_ONE_B)),
    full("fsdp=2,pipe=2,tensor=2", dict(microbatches=2)),
    full("fsdp=4", dict(remat="full")),
    full("tensor=4", dict(remat="full", tied=True)), full("tensor=2", dict(remat="offload")),
    full("tensor=4", dict(kv_heads=2)),
    full("pipe=2,tensor=2", dict(microbatches=2, remat="full", **ONE_F_ONE_B)),
    full("tensor=2", dict(parallel_block=True, remat="selective")),
    full("pipe=2,seq=2,tensor=2", dict(microbatches=2)),
    full("expert=2,tensor=2", dict(experts=4, remat="full")),
    full("expert=2,pipe=2", dict(experts=4, microbatches=2, remat="full", **ONE_F_ONE_B)),
    full("expert=2,seq=2", dict(experts=4, parallel_block=True)),
    # Layers without experts.
    ("fsdp=2,expert=2,tensor=2", dict(experts=4, expert_every=2)),
    full("fsdp=2,expert=2,tensor=2", dict(experts=4, dense_layers=1)),
    full("pipe=2,expert=2,tensor=2", dict(experts=4, expert_every=2, layers=8, microbatches=2)),
    full("tensor=2", dict(experts=4, shared_experts=1, dense_layers=1, overlap=True)),
    full("tensor=2", dict(experts=4, parallel_block=True, shared_experts=1)),
    full("fsdp=2,pipe=2,expert=2", dict(experts=4, **INTERLEAVED)),
    # Key heads that neither divide tensor nor are divided by it; time that it does not divide.
    full("fsdp=2,tensor=4", dict(remat="selective", heads=12, kv_heads=3, head_dim=32)),
    full("tensor=4", dict(seq_len=18, remat="full")),
    full("pipe=2,tensor=4", dict(seq_len=12)),
    full("tensor=4", dict(experts=4, seq_len=18)),
    # Heads that tensor does not divide.
    full("tensor=4", dict(heads=9, kv_heads=3, head_dim=8)),
    full("fsdp=2,tensor=4", dict(heads=9, head_dim=32, remat="selective")),
    # A norm of all heads.
    full("tensor=4", dict(kv_heads=2, **HEAD_NORMS)),
    full("fsdp=2,tensor=2", dict(remat="full", **HEAD_NORMS)),
    full("tensor=4", dict(heads=9, kv_heads=3, head_dim=8, **HEAD_NORMS)),
    # What a CPU sends in 16 bits it sends in 32.
    ("fsdp=2,tensor=2", dict(dtype="bfloat16")),
    full("pipe=2,expert=2", dict(dtype="bfloat16", experts=4)),
    # Muon's own exchanges.
    ("fsdp=2,tensor=2", dict(optimizer="muon")),
    full("data=2,fsdp=2,tensor=2", dict(optimizer="muon", experts=4)),
    full("data=2,fsdp=2,tensor=2", dict(optimizer="muon", zero=1))])
def test_the_transformer_sends_what_is_expected(mesh, changes):
    """A collective that the compiler adds, or one of ours that runs in each part instead of
    once."""
    program = program_of(make(**{"layers": 4, **changes}, accumulate=2, vocab_size=128), mesh)
    sent, expected = sent_and_expected(program)
    for key in sent.keys() | expected.keys():
        if key not in expected:     # the sums of losses and counts, and of the norm's squares
            assert sent[key].bytes < 200
            continue
        assert sent[key].bytes == pytest.approx(expected[key].bytes, rel=0.02, abs=200), key
        # The compiler joins reductions; what a ring sends that no layer changes it sends once.
        if key[0] != "all-reduce" and key[1] != "seq":
            assert sent[key].count == expected[key].count, key


@pytest.mark.parametrize("changes", [
    dict(lora_rank=2), dict(override=("w_up=-,data",)),
    dict(mesh="pipe=2,data=2", layers=4, experts=4, expert_every=2, schedule="1f1b"),
    dict(remat="full:0.5"), dict(mesh="pipe=2,data=2", override=("wq=-,pipe",)),
    dict(encoder_layers=1, source_len=16)], ids=str)
def test_where_there_is_no_formula_none_is_expected(changes, capsys):
    """A wrong number beside the right one, where a part has no formula."""
    mesh = changes.pop("mesh", "data=2,fsdp=2")
    plan = program_of(make(vocab_size=128, **changes), mesh).plan
    assert not is_complete(plan)
    assert bool(expected_traffic(plan)) == ("encoder_layers" in changes)
    sent = [Collective("all-to-all", "fsdp", 1, 100)]
    Reporter(1, verbose=True).collectives(sent, expected_traffic(plan), is_complete(plan))
    assert "all-to-all over fsdp (there is no formula for it)\n" in capsys.readouterr().out


def test_of_what_a_loss_gathers_of_rows_nothing_is_expected():
    """The weights' two all-gathers expected, where a loss that compares rows has more."""
    def init(key):
        return {"up": jnp.ones((64, 128)), "down": jnp.ones((128, 64))}

    def loss(p, b):
        x = jax.nn.relu(b["x"] @ p["up"]) @ p["down"]
        every, _ = shard.all_rows(x, b["x"])
        return jax.nn.logsumexp(x @ every.T, -1).sum(), len(x)

    config = make(batch=16, fsdp_min=1)
    program = build(config, mesh_of("fsdp=8"), init, loss,
                    {"x": jax.ShapeDtypeStruct((16, 64), jnp.float32)})
    assert not is_complete(program.plan) and not expected_traffic(program.plan)


def test_a_stack_whose_loss_is_given_no_specs_is_gathered_at_once():
    """Three times the bytes, from weights gathered layer by layer in each part although the
    loss gets no specs."""
    def init(key):
        return {"embed": jnp.ones((256, 64)), "up": jnp.ones((4, 64, 256)),
                "down": jnp.ones((4, 256, 64))}

    def loss(p, b):
        def layer(x, w):
            return x + jax.nn.relu(x @ w[0]) @ w[1], None

        x, _ = jax.lax.scan(layer, p["embed"][b["tokens"]], (p["up"], p["down"]))
        return jnp.sum((x[:, :-1] - p["embed"][b["tokens"][:, 1:]]) ** 2), jnp.sum(b["weights"])

    config = make(accumulate=2, batch=16)
    sent, expected = sent_and_expected(build(config, mesh_of("fsdp=8"), init, loss,
                                             net.batch_shapes(config, 16)))
    for key in sent.keys() | expected.keys():
        sizes = [rows[key].bytes if key in rows else 0 for rows in (sent, expected)]
        assert sizes[0] == pytest.approx(sizes[1], rel=0.02, abs=200), key


def test_of_several_overrides_the_last_that_matches_wins():
    """The first override that wins over a later, narrower one."""
    config = make(override=("w_=-,fsdp", "w_up=-,-,data"))
    task, shapes = without_data(config)
    program = train.build(config, mesh_of("data=2,fsdp=2"), dataclasses.replace(
        task, overrides=[("norm", P("data"))]), shapes)
    specs = {path.split(".")[-1]: d.spec for path, d in by_path(program.plan.decisions).items()}
    assert specs["w_gate"] == P(None, "fsdp") and specs["w_up"] == P(None, None, "data")
    assert specs["norm"] == P("data")
