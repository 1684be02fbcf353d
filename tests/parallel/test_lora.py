"""Low-rank adapters: they are zero at first, only they are trained, by the formula, and an export
merges them."""

import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sample
import shard
import train
from tests.common import (
    exact_inputs,
    full,
    in_float64,
    net,
    refused,
    rewrite,
    slow,
    sums_and_gradients,
)
from tests.helpers import (
    batch_of,
    learn,
    make,
    mesh_of,
    needed,
    program_of,
    without_times,
)
from zigzag.commands import programs
from zigzag.core.errors import ConfigError
from zigzag.core.flags import change
from zigzag.core.mesh import abstract_mesh, by_path, full_spec
from zigzag.parallel import hlo, low_rank
from zigzag.parallel.saved import load_run
from zigzag.parallel.table import count as count_of
from zigzag.run.plan import compiled

published, arithmetic = needed("published"), needed("forecast.arithmetic")

RANK = 4
EXPERTS = dict(experts=4, shared_experts=1, kv_heads=2)
BIASES = dict(biases="qkv,out,mlp", norm="layer", gated=False, activation="gelu", kv_heads=2)
LATENT = dict(head_dim=12, rotary_dim=4, kv_rank=16, q_rank=16, v_head_dim=8)


def adapted(**changes):
    return make(**{**dict(lora_rank=RANK, vocab_size=64), **changes})


def moved(params):
    """Weights whose adapters are no longer zeros."""
    def move(path, w):
        size = 0.3 if path[-1].key.endswith("_b") else 0.0
        return w + size * np.random.default_rng(w.size).normal(size=w.shape).astype(w.dtype)

    return jax.tree.map_with_path(move, params)


def plain(config):
    return change(config, lora_rank=0)


# A frozen part of it is large.
WIDE = dict(d_model=64, d_ff=256, layers=4, seq_len=32, vocab_size=128)

# The matrices that lead into a block, and those that lead out of it.
COLUMNS = ("wq", "wk", "wv", "w_gate", "w_up", "e_gate", "e_up", "cross_wq", "cross_wk", "cross_wv")
ROWS = ("wo", "w_down", "e_down", "cross_wo")


# -------------------------------------------------------------------------------------------
# The model

@pytest.mark.parametrize("changes", [{}, *map(full, (EXPERTS, BIASES, LATENT))])
def test_a_run_begins_as_the_model_without_adapters(changes):
    """Adapters that are not zero at first, or that change the first values of other weights: the
    model is another one before the first step."""
    config = adapted(**changes)
    batch, key = exact_inputs(config)[1], jax.random.key(0)
    params, usual = (jax.jit(functools.partial(net.init, c))(key)
                     for c in (config, plain(config)))
    for path, w in by_path(usual).items():
        np.testing.assert_array_equal(by_path(params)[path], w)
    a, b = (jax.jit(functools.partial(net.loss, config=c))(p, batch)[0]
            for c, p in ((config, params), (plain(config), usual)))
    assert float(a) == float(b)
    adapters = by_path(low_rank.split(params)[0])
    matrices = usual["layers"].keys() & {*COLUMNS, *ROWS}
    assert {p[7:] for p in adapters} == {f"{m}_{x}" for m in matrices for x in "ab"}
    for path, w in adapters.items():    # of unit size goes in, of unit size comes out of a
        fan_in = np.prod(w.shape[1:-1]) / (4 if ".e_" in path else 1)
        assert np.std(w) == pytest.approx(fan_in**-0.5 if path.endswith("_a") else 0, rel=0.2)


@functools.lru_cache(maxsize=None)
def of_the_formula(config):
    """Weights, and the float64 gradients of adapters by autodiff of the model of weights w + a b:
    dW b^T for a, and a^T dW for b."""
    params, batch = exact_inputs(config)
    params = moved(params)

    def loss(adapters):
        whole = low_rank.merged(low_rank.join(adapters, low_rank.split(params)[1]))
        return net.loss(whole, batch, plain(config), with_aux=True)[0]

    return params, jax.device_get(jax.jit(jax.value_and_grad(loss))(low_rank.split(params)[0]))


MESHES = [
    slow("", {}, {}), slow("", BIASES, {}), slow("", LATENT, {}), slow("", EXPERTS, {}),
    ("fsdp=2,tensor=2", {}, dict(accumulate=2)),
    slow("tensor=2", dict(seq_len=15), {}), slow("tensor=4", {}, dict(overlap=True)),
    slow("pipe=2,tensor=2", {}, dict(microbatches=2)),
    slow("pipe=2,tensor=2", {}, dict(microbatches=2, schedule="1f1b", remat="selective")),
    full("pipe=2,data=2", dict(layers=4), dict(schedule="interleaved", chunks=2, microbatches=2)),
    slow("seq=2,tensor=2", dict(kv_heads=2), dict(remat="full")),
    slow("data=2,fsdp=2", {}, dict(zero=1, fsdp_min=1)),
    slow("tensor=2", dict(parallel_block=True), {}),
    # Heads that tensor does not divide, whole beside what is split; key heads that are repeated.
    slow("tensor=4", dict(heads=6, head_dim=8, kv_heads=3), {}),
    full("tensor=4", dict(heads=12, head_dim=8, kv_heads=6), {}),
    full("tensor=4", dict(parallel_block=True, **BIASES), {}),
    full("tensor=2", LATENT, {}), slow("expert=2,tensor=2", EXPERTS, {}),
    full("fsdp=2,expert=2", EXPERTS, dict(remat="selective")),
    # Overrides of only some of a matrix and its adapters.
    slow("tensor=2", {}, dict(override=("wo_a=-", "w_up$=-,tensor", "wq_b=-", "w_down$=-"))),
    full("fsdp=2,tensor=2", {}, dict(override=("w[qkvo]$=-", "_a=-,fsdp"), fsdp_min=1)),
    full("data=2,tensor=2", {}, dict(collectives="compiler"))]


@pytest.mark.parametrize("mesh, what, rest", MESHES)
def test_gradients_are_those_of_the_sum(mesh, what, rest):
    """x w + (x a) b on a mesh that differs from w + a b on one device: a rank that is split, a part
    of a row multiplied with another part, a gradient that is summed over tensor twice or not at
    all."""
    config = adapted(batch=16, **{**(dict(heads=4) if "heads" not in what else {}), **what})
    with in_float64():
        params, (want, wanted) = of_the_formula(config)
        on_mesh = change(config, **rest)
        got, sums = sums_and_gradients(on_mesh, mesh, params, exact_inputs(config)[1])
    assert float(sums[0]) == pytest.approx(float(want), rel=1e-10)
    size = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(wanted)))
    assert by_path(got).keys() == by_path(wanted).keys()
    for (path, a), b in zip(by_path(got).items(), jax.tree.leaves(wanted)):
        assert np.linalg.norm(a - b) <= 1e-9 * (np.linalg.norm(b) + 1e-3 * size), path


# -------------------------------------------------------------------------------------------
# What is trained

@pytest.mark.full
def test_only_adapters_are_trained():
    """Gradients of all weights, computed and thrown away: a third of the arithmetic, and moments
    and reductions a hundred times as large."""
    config = adapted(**WIDE)
    program, usual = (program_of(c, "data=2") for c in (config, plain(config)))
    count = sum(w.size for p, w in by_path(program.plan.params).items() if p[-2:] in ("_a", "_b"))
    moments = sum(x.size for x in jax.tree.leaves(program.state["opt"]))
    assert 2 * count <= moments <= 2 * count + 8
    step, whole = compiled(program), compiled(usual)
    sent = {(c.kind, c.axis): c.bytes for c in hlo.collectives(step)}
    assert sent.keys() == {("all-reduce", "data")}      # of float32, over 2 devices
    assert sent["all-reduce", "data"] == pytest.approx(4 * count, abs=200)
    done, usually = (arithmetic.arithmetic(s) for s in (step, whole))
    assert done == pytest.approx(net.flops(config, 8 * 32) / 2, rel=0.01)
    assert done < 0.8 * usually
    frozen = sum(x.size for x in jax.tree.leaves(low_rank.split(program.plan.params)[1]))
    alias = step.memory_analysis().alias_size_in_bytes      # frozen weights are not copied
    assert alias >= 4 * (frozen + 3 * count)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.full
def test_a_pipeline_makes_no_gradient_of_what_is_frozen(schedule):
    """1F1B, which computes its own gradients, carrying those of frozen weights from tick to
    tick."""
    config = adapted(**WIDE, batch=16, microbatches=2, schedule=schedule)
    done, usually = (arithmetic.arithmetic(compiled(program_of(c, "pipe=2")))
                     for c in (config, plain(config)))
    assert done < 0.85 * usually        # (1F1B goes forward twice)


@pytest.mark.parametrize("mesh", [dict(tensor=4), dict(pipe=2, fsdp=2, tensor=2),
                                  dict(expert=2, fsdp=2, tensor=2)], ids=str)
def test_the_rule_splits_adapters_with_their_weights(mesh):
    """A low rank that the rule takes for the narrow side of an MLP; a weight that is split
    differently because it has adapters."""
    mesh = abstract_mesh(mesh)
    for changes, rank in (({}, 4), (EXPERTS, 4), (dict(heads=6, head_dim=32), 16), (BIASES, 16),
                          (LATENT, 16)):
        config = make(**{**dict(layers=4, d_model=256, d_ff=1024), **changes})
        usual = by_path(net.plan_weights(config, mesh))
        config = change(config, lora_rank=rank)
        shapes, found = map(by_path, (net.weight_shapes(config),
                                      net.plan_weights(config, mesh)))
        assert {p: found[p].spec for p in usual} == {p: d.spec for p, d in usual.items()}
        for path in found.keys() - usual.keys():
            shape, matrix = shapes[path].shape, path.split(".")[1][:-2]
            spec, own = (full_spec(d.spec, 4) for d in (found[path], usual[path[:-2]]))
            leading = 1 + matrix.startswith("e_")
            assert spec[:leading] == own[:leading], path        # pipe and expert
            has_it = path.endswith("_a") == (matrix in ROWS)
            assert ("tensor" in spec) == ("tensor" in own and has_it), path
            assert "tensor" not in spec or spec.index("tensor") == own.index("tensor"), path
            assert "fsdp" in spec or mesh.shape["fsdp"] == 1 or np.prod(shape) < 4096, path


@pytest.mark.parametrize("mesh, changes", [
    ("fsdp=2,tensor=2", {}), slow("data=4", {}), slow("tensor=4", dict(remat="full")),
    slow("seq=2,tensor=2", {}), slow("pipe=2,data=2", dict(schedule="1f1b", microbatches=2)),
    slow("expert=2,tensor=2", EXPERTS),
    slow("tensor=4", dict(heads=12, kv_heads=3, head_dim=8))])
def test_no_gradient_of_a_frozen_weight_is_sent(mesh, changes):
    """Gradients of frozen weights that are summed, or scattered over fsdp."""
    config = adapted(**dict(layers=4, accumulate=2, vocab_size=128) | changes)
    own, usual = (sum(sent.bytes for sent in hlo.collectives(compiled(program_of(c, mesh)))
                      if sent.kind in ("all-reduce", "reduce-scatter")
                      and "tensor" not in sent.axis) for c in (config, plain(config)))
    assert own < usual / 2 + 200


def test_frozen_weights_are_kept_in_the_precision_of_the_computation():
    """Float32 copies of weights that are never updated: twice the memory, and a cast in each
    step."""
    program = program_of(adapted(dtype="bfloat16"), "fsdp=2")
    for path, w in by_path(program.weights(program.state)).items():
        assert w.dtype == ("float32" if path[-2:] in ("_a", "_b") else "bfloat16"), path
    table = shard.explain(program.plan.decisions, program.plan.params, program.mesh)
    adapters = 4 * count_of(low_rank.split(program.plan.params)[0])
    assert f"{adapters / 1000:.1f} kB of gradients and {adapters / 500:.1f} kB of AdamW" in table


@pytest.mark.full
def test_selective_remat_keeps_one_product_not_two():
    """x w and (x a) b both saved for every matrix, although only their sum is needed."""
    config = adapted(**WIDE | dict(layers=8, seq_len=64, vocab_size=64, remat="selective"))
    took = [compiled(program_of(c, "tensor=2")).memory_analysis().temp_size_in_bytes
            for c in (config, plain(config))]
    assert took[0] < 1.1 * took[1], took


# -------------------------------------------------------------------------------------------
# Runs

def language_run(folder, **changes):
    """A run of the command's own kind, with a tokenizer in its record."""
    return make(**{**dict(lora_rank=RANK, vocab_size=257, steps=4, save_every=2, out=str(folder)),
                   **changes})


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run with checkpoints 2 and 4, and what fit gave."""
    folder = tmp_path_factory.mktemp("lora") / "run"
    _, fit = learn(language_run(folder), "tensor=2", record=dict(tokenizer="bytes"))
    return folder, fit


@pytest.mark.full
def test_a_checkpoint_has_adapters_alone(trained):
    """The weights of a large model in each of a hundred checkpoints of a few numbers."""
    folder, fit = trained
    meta = json.loads((folder / "checkpoints/4/meta/metadata").read_text())
    adapters = by_path(low_rank.split(fit.params)[0])
    for kinds in (meta["leaves"], meta["checksums"]):
        saved = {p for p in kinds if p.startswith("params.")}
        assert saved == {f"params.{p}" for p in adapters}
        others = {p.split(".", 3)[-1] for p in kinds if p.startswith("opt.opt") and "layers" in p}
        assert others and all(p.endswith(("_a", "_b")) for p in others), others
    size = sum(p.stat().st_size for p in (folder / "checkpoints/4/params").rglob("*"))
    assert size < 4 * count_of(low_rank.split(fit.params)[1])


@pytest.mark.parametrize("mesh, changes", [
    full("fsdp=2", {}),
    full("pipe=2,data=2", dict(layers=4, microbatches=2, schedule="interleaved", chunks=2)),
    full("data=2,tensor=2", dict(dtype="bfloat16", zero=1, fsdp_min=1))])
def test_a_run_that_goes_on_is_the_run(tmp_path, mesh, changes):
    """A continued run with adapters in another order of layers, or with new frozen weights."""
    for folder, stops in (("whole", [4]), ("stopped", [2, 4])):
        for steps in stops:
            config = language_run(tmp_path / folder, **changes)
            with pytest.MonkeyPatch.context() as patch:     # (the rates are those of 4 steps)
                patch.setattr(train, "learning_rate", lambda config, step: jnp.float32(0.01))
                _, fit = learn(change(config, steps=steps), mesh)
        if folder == "whole":
            want = jax.device_get(fit.params)
    assert fit.step == 4
    for path, w in by_path(jax.device_get(fit.params)).items():
        np.testing.assert_array_equal(w, by_path(want)[path], err_msg=path)
    whole, stopped = (without_times(tmp_path / f / "metrics.jsonl") for f in ("whole", "stopped"))
    assert whole == stopped


@pytest.mark.full
def test_a_run_goes_on_beside_its_own_weights_alone(trained):
    """Adapters that are silently combined with other weights than those of their run."""
    folder, _ = trained
    init = functools.partial(net.init, language_run(folder))

    def other(key):
        params = init(key)
        return params | {"norm": params["norm"].at[3].add(1e-6)}

    for changes, given, word in (({}, dict(init=other), "base_weights"),
                                 (dict(lora_rank=RANK + 1), {}, f"lora_rank {RANK}"),
                                 (dict(lora_rank=0), {}, f"lora_rank {RANK}")):
        with pytest.raises(ConfigError, match=word):
            learn(language_run(folder, steps=6, **changes), "tensor=2", **given)
    assert json.loads((folder / "config.json").read_text())["steps"] == 4


@pytest.mark.full
def test_a_run_is_read_merged(trained, capsys):
    """sample.py with only the frozen weights, or with adapters added twice."""
    folder, fit = trained
    config, prompts = language_run(folder).network, [[1, 2, 3], [7]]
    want = sample.generate(fit.params, prompts, config, tokens=8, temperature=0)
    for mesh in (None, mesh_of("tensor=2")):
        params, read = load_run(folder, mesh)
        assert read.lora_rank == 0 and by_path(params).keys() == by_path(
            net.weight_shapes(read)).keys()
        assert sample.generate(params, prompts, read, tokens=8, temperature=0) == want
    first, _ = load_run(folder, step=2)
    first, params = jax.device_get((first, params))
    assert np.any(first["layers"]["wq"] != params["layers"]["wq"])
    assert (first["embed"] == params["embed"]).all()
    sample.main(["--run", str(folder), "--prompt", "ab", "--tokens", "3"])
    assert capsys.readouterr().out.startswith("ab")


def rewritten(folder, to, **changes):
    """A copy of a run whose config.json says something else."""
    rewrite(shutil.copytree(folder, to) / "config.json", **changes)
    return to


@pytest.mark.slow
@pytest.mark.full
def test_what_adapters_belong_to_is_got_again_or_refused(trained, tmp_path, capsys):
    """Adapters for a run or a published model that was moved, or trained further, since."""
    folder, _ = trained
    base = dict(seed=3, lora_rank=0, steps=2, save_every=1)
    _, usual = learn(language_run(tmp_path / "base", **base))
    usual, config = jax.device_get(usual.params), language_run(tmp_path / "tuned")

    def init(key):
        return low_rank.join(low_rank.split(net.init(config, key))[0], usual)

    _, tuned = learn(config, init=init, record=dict(tokenizer="bytes"))
    run = rewritten(tmp_path / "tuned", tmp_path / "own", init_from=str(tmp_path / "base"))
    params, _ = load_run(run)
    want = low_rank.merged(jax.device_get(tuned.params))
    for path, w in by_path(params).items():
        np.testing.assert_allclose(w, by_path(want)[path], rtol=1e-6, atol=1e-7)
    assert np.any(params["layers"]["wq"] != usual["layers"]["wq"])
    cases = dict(init_from=str(tmp_path / "gone")), dict.fromkeys(
        ("model", "init_from"), str(tmp_path / "gone")), dict(seed=4), dict(init_from=str(folder))
    for i, (changes, word) in enumerate(zip(cases, ("not there", "not there", "have changed",
                                                    "have changed"))):
        run = rewritten(tmp_path / "tuned", tmp_path / f"{i}", **changes)
        error = refused(capsys, "--run", run, main=sample.main)
        assert word in error and f"only adapters (--lora_rank {RANK})" in error


# -------------------------------------------------------------------------------------------
# Export

@pytest.mark.parametrize("changes", [{}, slow(EXPERTS)])
def test_adapters_are_merged_on_export(tmp_path, changes):
    """A folder that transformers reads as the model before fine-tuning."""
    pytest.importorskip("safetensors", reason="pip install -r requirements-peers.txt")
    changes = {k: v for k, v in changes.items() if k != "shared_experts"}
    config = adapted(dtype="float32", **changes)
    params = moved(net.init(config, jax.random.key(0)))
    published.save_hf(tmp_path / "hf", params, config)
    back, read = published.load_hf(tmp_path / "hf")
    assert read.lora_rank == 0
    tokens = jnp.asarray(batch_of(config)["tokens"][:2])
    a, b = (jax.jit(functools.partial(net.forward, config=c))(p, tokens)
            for p, c in ((params, config), (back, read)))
    assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(a)
    unmoved = net.init(config, jax.random.key(0))
    assert not np.allclose(a, net.forward(unmoved, tokens, config), atol=1e-2)


# -------------------------------------------------------------------------------------------
# Around it

@pytest.mark.full
def test_a_loss_of_ones_own_has_adapters_too():
    """A check of a loss that wraps the transformer's, which compares gradients of adapters with
    gradients of all weights; frozen weights that a step decays, clips, masks or rounds."""
    config, lines = adapted(steps=4), []

    def loss(params, batch):
        total, count = net.loss(params, batch, config)
        return 2 * total, count

    rows, fit = learn(config, "data=2", lines, loss=loss)
    assert rows[-1]["loss"] < rows[0]["loss"] and not any("not checked" in x for x in lines)
    program = program_of(config, "data=2")
    first = by_path(program.weights(program.start(jax.random.key(0))))
    for path, w in by_path(fit.params).items():
        assert (np.asarray(w) == np.asarray(first[path])).all() == (path[-2:] not in ("_a", "_b"))
    with pytest.raises(ConfigError, match="these weights have no adapters"):
        learn(config, init=functools.partial(net.init, plain(config)))


def test_the_table_of_weights_has_adapters(capsys):
    """A table of the weights before adapters are added. (tests/published/test_finetune.py has
    the start of a run.)"""
    programs.show_sharding(["--lora_rank", "4", "--shards", "2"])
    assert "layers.wq_b" in capsys.readouterr().out


def test_a_rank_below_zero_is_refused(capsys):
    """Shapes with a negative dimension."""
    assert "--lora_rank -1: must be" in refused(capsys, "--lora_rank", -1)


def test_attention_to_an_encoder_has_adapters_too():
    """Cross-attention without adapters, although README says "each matrix of attention"."""
    config = make(encoder_layers=2, lora_rank=4)
    adapters = by_path(low_rank.split(net.weight_shapes(config))[0])
    for name in ("wq", "wk", "wv", "wo"):
        for stack in ("layers.", "layers.cross_", "encoder.layers."):
            assert {f"{stack}{name}_a", f"{stack}{name}_b"} <= adapters.keys()
    assert not any("router" in path or "embed" in path for path in adapters)
