"""The transformer: its formulas, and that a step on a mesh computes the same."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import published
import shard
from tests.common import assert_same_on, full, gradients_of, net, peer, slow
from tests.helpers import batch_of, learn, make, mesh_of, needed, program_of
from zigzag.core.mesh import by_path, shardings
from zigzag.parallel import attention, hlo, remat
from zigzag.parallel.table import count
from zigzag.run.plan import compiled

arithmetic = needed("forecast.arithmetic")

# -------------------------------------------------------------------------------------------
# First values

def first_values(**changes):
    return by_path(jax.jit(functools.partial(net.init, make(**changes)))(jax.random.key(0)))


@pytest.mark.parametrize("changes", [dict(tied=True), dict(parallel_block=True),
                                     dict(experts=4, shared_experts=1)])
def test_a_weights_first_values_follow_from_its_path(changes):
    """Random keys dealt out in the order of the leaves: with one more weight (experts, an untied
    head, a second norm) all others would have other first values, and designs could not be
    compared."""
    usual, other = first_values(), first_values(**changes)
    both = usual.keys() & other.keys()
    assert len(both) >= 9 and usual.keys() != other.keys()
    for path in both:
        np.testing.assert_array_equal(usual[path], other[path], err_msg=path)


@pytest.mark.parametrize("changes", [{}, dict(parallel_block=True)])
def test_a_scale_of_what_layers_add(changes):
    """Attention or MLP that is not scaled, or both in a parallel block. (The scale must equal a
    scale of the weights out of the blocks.)"""
    config, other = make(**changes), make(residual_scale=0.25, **changes)
    params = net.init(config, jax.random.key(0))
    scaled = params | {"layers": {name: w / 4 if name in ("wo", "w_down") else w
                                  for name, w in params["layers"].items()}}
    tokens = batch_of(config)["tokens"]
    want, got, unscaled = (net.forward(w, tokens, c) for w, c in (
        (scaled, config), (params, other), (params, config)))
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert not np.allclose(got, unscaled, atol=1e-2)


def test_no_two_weights_begin_equal():
    """One key for all weights of a shape: a gate equal to the weight that it gates."""
    weights = [np.asarray(w).ravel()[:100] for path, w in first_values(vocab_size=128).items()
               if "norm" not in path]
    for i, a in enumerate(weights):
        for b in weights[i + 1:]:
            assert abs(np.corrcoef(a, b)[0, 1]) < 0.4
    assert not np.array_equal(*first_values()["layers.w_up"])


def test_weights_are_made_in_their_places():
    """Weights made on one device and then split: a large model could not be created."""
    config = make(d_model=128, d_ff=512, vocab_size=1000)
    program = program_of(config, "fsdp=4,tensor=2")
    with jax.set_mesh(program.mesh):
        memory = program.start.lower(jax.random.key(0)).compile().memory_analysis()
    whole = 12 * count(program.state["params"])
    assert memory.output_size_in_bytes < 0.14 * whole
    # Random bits and their counters, one leaf at a time, of this device's part alone.
    assert memory.temp_size_in_bytes < 0.14 * whole


# As transformers' models of the published shapes have, counted without memory for them. (DeepSeek's
# with the 256 numbers in each of 58 layers by which its experts are balanced.)
PUBLISHED = {
    "uva3d": 4_784_484 - 1_152,     # (without the scales that it has several times)
    "gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200, "opt-125m": 125_239_296, "opt-350m": 331_196_416,
    "opt-1.3b": 1_315_758_080, "opt-2.7b": 2_651_596_800, "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280, "opt-30b": 29_974_540_288, "opt-66b": 65_719_701_504,
    "gptj-6b": 6_050_882_784, "llama-7b": 6_738_415_616, "llama-13b": 13_015_864_320,
    "llama-33b": 32_528_943_616, "llama-65b": 65_285_660_672, "llama-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496, "llama3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704, "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360, "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264, "qwen3-30b-a3b": 30_532_122_624, "deepseek-v3": 671_026_419_200,
    # For masked tokens, without a pooler; of pictures, for 1,000 classes.
    "bert-base": 109_514_298, "bert-large": 335_174_458, "roberta-base": 124_697_433,
    "roberta-large": 355_412_057, "albert-base": 11_221_680, "albert-large": 16_795_824,
    "albert-xlarge": 54_821_040, "albert-xxlarge": 206_368_944, "vit-base": 86_567_656,
    "vit-large": 304_326_632, "vit-huge": 632_045_800, "beit-base": 86_530_984,
    "beit-large": 304_430_568,
    # (Of T5, BART and Whisper the parameters of ForConditionalGeneration on torch's meta device;
    # of BART with its final_logits_bias, which is a buffer there.)
    "t5-small": 60_506_624, "t5-base": 222_903_552, "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336, "t5-11b": 11_307_321_344, "t5-small-v1.1": 76_961_152,
    "t5-base-v1.1": 247_577_856, "t5-large-v1.1": 783_150_080, "t5-xl": 2_849_757_184,
    "t5-xxl": 11_135_332_352, "bart-base": 139_420_416 + 50_265,
    "bart-large": 406_291_456 + 50_265, "whisper-tiny": 37_760_640, "whisper-base": 72_593_920,
    "whisper-small": 241_734_912, "whisper-medium": 763_857_920, "whisper-large": 1_543_304_960,
    "whisper-large-v2": 1_543_304_960, "whisper-large-v3": 1_543_490_560,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name):
    """A preset with another width, or without its biases or the rows of its positions."""
    assert net.parameters(published.PRESETS[name])[0] == PUBLISHED[name]


def test_parameters_are_counted_without_padding_and_experts_by_their_visits():
    """951,424 parameters shown instead of 918,912."""
    tiny = dataclasses.replace(published.PRESETS["tiny"], vocab_size=257)
    assert net.parameters(tiny) == (918_912, 918_912)
    total, visited = net.parameters(published.PRESETS["mixtral-8x7b"])
    assert (round(total / 1e9, 1), round(visited / 1e9, 1)) == (46.7, 12.9)         # as published
    layer = 4 * 768**2 + 3 * 768 * 2048 + 2 * 768
    assert net.parameters(published.PRESETS["124m"])[0] == 50257 * 768 + 12 * layer + 768


# -------------------------------------------------------------------------------------------
# Formulas

@pytest.mark.slow
def test_the_decoder_is_transformers_llama():
    """Another convention (rotation, norms, grouping, the MLP's halves), which trains just as well
    but cannot load published weights."""
    torch, transformers = peer("torch"), peer("transformers")
    config = make(vocab_size=128, kv_heads=2)
    p = jax.tree.map(np.asarray, net.init(config, jax.random.key(3)))
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-6, rope_theta=10000.0,
        attention_bias=False, tie_word_embeddings=False, attn_implementation="eager"))
    w = {"model.embed_tokens.weight": p["embed"] * 32**0.5, "model.norm.weight": p["norm"],
         "lm_head.weight": p["head"].T}
    for i in range(2):
        layer, at = {k: v[i] for k, v in p["layers"].items()}, f"model.layers.{i}."
        w |= {at + "input_layernorm.weight": layer["attn_norm"],
              at + "post_attention_layernorm.weight": layer["mlp_norm"],
              at + "self_attn.o_proj.weight": layer["wo"].reshape(32, 32).T}
        w |= {at + f"self_attn.{n}_proj.weight": layer["w" + n].reshape(32, -1).T for n in "qkv"}
        w |= {at + f"mlp.{n}_proj.weight": layer["w_" + n].T for n in ("gate", "up", "down")}
    llama.load_state_dict({k: torch.tensor(np.array(v)) for k, v in w.items()})
    tokens = np.random.default_rng(0).integers(0, 128, (3, 16))
    with torch.no_grad():
        want = llama(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(net.forward(p, jnp.asarray(tokens), config), want, atol=2e-5)


def test_no_token_sees_a_later_one_or_another_document():
    """A mask that is off by one, or that has only half of the rule. (Tested by gradients.)"""
    config = make()
    params = net.init(config, jax.random.key(0))
    rows = {k: jnp.asarray(v)[:1] for k, v in batch_of(config).items()}
    rows["segments"] = jnp.asarray([[0] * 6 + [1] * 10])
    rows["positions"] = jnp.asarray([[*range(6), *range(10)]])

    def at(table, t):
        weights = jnp.zeros((1, 16)).at[0, t].set(1)
        batch = {**rows, "tokens": jnp.arange(16)[None], "weights": weights}
        return net.loss({**params, "embed": table}, batch, config)[0]

    gradient = jax.jit(jax.grad(at))
    for t in (3, 9):
        seen = np.abs(gradient(params["embed"], t)).sum(1)[:16] > 0
        assert seen.tolist() == [(i < 6) == (t < 6) and i <= t for i in range(16)]


def test_positions_are_relative():
    """Rates that differ between q and k: shifting all positions would then change the result."""
    config = make()
    params = net.init(config, jax.random.key(0))
    tokens = jnp.asarray(batch_of(config)["tokens"])
    where = jnp.broadcast_to(jnp.arange(16), tokens.shape)
    forward = jax.jit(lambda where: net.forward(params, tokens, config, positions=where))
    a, b, c = map(forward, (where, where + 1000, where * 2))
    np.testing.assert_allclose(a, b, atol=3e-4)     # float32 angles near 1000 carry 6e-5
    assert float(jnp.abs(a - c).max()) > 1e-2


def test_padded_ids_are_never_said_and_never_learn():
    """Logits of ids that do not exist, which take a share of every softmax."""
    config = make(tied=True)
    params = net.init(config, jax.random.key(0))
    assert params["embed"].shape == (128, 32)
    got, _ = gradients_of(config, "tensor=4", batch_of(config))
    assert (got["embed"][61:] == 0).all() and (got["embed"][:61] != 0).any(1).all()
    assert net.forward(params, jnp.zeros((1, 4), int), config).shape == (1, 4, 61)


def test_dropout_differs_between_rows_places_and_sites():
    """One dropout mask for all rows, or for all layers."""
    x, c = jnp.ones((2, 16, 64)), make(dropout=0.25).network
    seeds = jnp.asarray([1, 2], jnp.uint32)
    a, b = (np.asarray(shard.dropout(x, c.dropout, seeds, site)) for site in (0, 1))
    assert set(np.unique(a)) == {0, np.float32(1 / 0.75)} and abs((a == 0).mean() - 0.25) < 0.05
    for one, other in ((a[0], a[1]), (a[0, 0], a[0, 1]), (a, b)):
        assert 0.2 < (one != other).mean() < 0.55


def test_without_seeds_nothing_is_dropped():
    """Dropout in an evaluation, or in generation."""
    config, batch = make(dropout=0.5), batch_of(make())
    params = net.init(config, jax.random.key(0))
    del batch["seeds"]
    got, want = (float(net.loss(params, batch, c)[0]) for c in (config, make()))
    assert got == want


# -------------------------------------------------------------------------------------------
# On a mesh

@pytest.mark.parametrize("tied, mesh", [
    (False, ""), full(False, "tensor=4"), (False, "fsdp=4,tensor=2"),
    full(True, ""), full(True, "tensor=4"), (True, "fsdp=4,tensor=2")])
def test_gradients_equal_autodiff_of_the_plain_formula(mesh, tied):
    """A mean of means, which shows because masks differ between rows; any other wrong gradient,
    leaf by leaf."""
    assert_same_on(mesh, tied=tied, kv_heads=2, accumulate=1 if mesh else 2)


@pytest.fixture(scope="module")
def dropping():
    return learn(make(dropout=0.3, steps=3))[0]


@pytest.mark.full
@pytest.mark.parametrize("mesh, changes", [
    ("data=4,tensor=2", {}), full("fsdp=2", {}), full("", dict(accumulate=4)),
    full("pipe=2,seq=2", dict(microbatches=2)),
    full("pipe=2", dict(schedule="1f1b", microbatches=4))])
def test_dropout_masks_belong_to_the_example(mesh, changes, dropping, alone):
    """A dropout key for each device: other masks on every mesh, and on copies of one activation."""
    rows, _ = learn(make(dropout=0.3, steps=3, **changes), mesh)
    assert [r["loss"] for r in rows] == pytest.approx([r["loss"] for r in dropping], rel=5e-6)
    assert dropping[0]["loss"] != alone[0][0]["loss"]


# Per layer two gathers of the stream and two reductions of it; the embedding's reduction and the
# head's gather; of the loss a maximum, the sum of exponentials and the target's logit.
@pytest.mark.parametrize("changes", [{}, slow(dict(tied=True)), slow(dict(kv_heads=2))])
def test_the_forward_pass_reduces_twice_a_layer(changes):
    """A product whose parts are joined before the next one, or separate gathers for q, k and v."""
    program = program_of(make(**changes), "data=2,tensor=4")
    with jax.set_mesh(program.mesh):
        done = program.evaluate.lower(program.state["params"], program.batch).compile()
    tensor = {c.kind: c for c in hlo.collectives(done) if c.axis == "tensor"}
    x = 4 * 4 * 16 * 32                 # 4 rows a device of 16 x 32 float32
    assert tensor.keys() == {"all-gather", "reduce-scatter", "all-reduce"}
    for kind in ("all-gather", "reduce-scatter"):
        assert tensor[kind].count == 2 * 2 + 1
        assert tensor[kind].bytes == (2 * 2 + 1) * x * 3 // 4
    assert tensor["all-reduce"].bytes == pytest.approx(2 * 3 / 4 * 3 * 4 * 4 * 16, abs=64)


@pytest.mark.parametrize("changes", [{}, dict(tied=True), dict(kv_heads=2)])
def test_a_compiler_alone_reduces_twice_a_layer(changes):
    """Specs that do not fit together, which the compiler (--collectives compiler) would gather.
    There must be two reductions in a layer, one for the embedding, a maximum and a sum for the
    loss, and no gather."""
    config, mesh = make(**changes), mesh_of("data=2,tensor=4")
    params = jax.eval_shape(lambda: net.init(config, jax.random.key(0)))
    places = shardings(net.weight_specs(config, mesh), mesh)
    with jax.set_mesh(mesh):
        done = jax.jit(lambda p, b: net.loss(p, b, config), in_shardings=(
            places, NamedSharding(mesh, P("data")))).lower(
                params, net.batch_shapes(config, 4)).compile()
    tensor = [c for c in hlo.collectives(done) if c.axis == "tensor"]
    assert [(c.kind, c.count) for c in tensor] == [("all-reduce", 2 * 2 + 1 + 2)]
    # 2 rows a device of 16 float32: five of the width, one maximum, and the sum with the label's.
    assert tensor[0].bytes == 2 * 3 / 4 * 4 * 2 * 16 * (5 * 32 + 1 + 2)


# -------------------------------------------------------------------------------------------
# The stack of layers

@pytest.mark.full
def test_layers_are_no_loop_on_a_single_cpu(monkeypatch):
    """A loop over layers on a single CPU, although they are few and nothing is recomputed; other
    results without the loop."""
    config = make(layers=4)

    def loops(config, mesh=""):
        return compiled(program_of(config, mesh)).as_text().count(" while(")

    few, batch = loops(config), batch_of(config)
    want = gradients_of(config, "", batch)
    many = make(layers=remat.UNROLLED + 1)
    assert loops(make(layers=4, remat="full")) == loops(many) > few
    assert loops(config, "data=8") > few
    monkeypatch.setattr(remat, "UNROLLED", 3)
    assert loops(config) > few
    got = gradients_of(config, "", batch)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), got, want)


@pytest.mark.full
def test_scores_that_are_to_be_computed_again_are(monkeypatch):
    """Scores that are kept in memory although they should be recomputed: without a loop, a compiler
    merges the two equal computations."""
    long = make(layers=4, seq_len=512)
    done = [compiled(program_of(long, ""))]             # all scores are kept
    monkeypatch.setattr(attention, "SCORES", 2**22)     # half: without a loop it would be one part
    done.append(compiled(program_of(long, "")))
    monkeypatch.setattr(remat, "UNROLLED", 0)
    done.append(compiled(program_of(long, "")))
    assert arithmetic.arithmetic(done[1]) == pytest.approx(arithmetic.arithmetic(done[2]), rel=0.01)
    kept, again, loop = (d.memory_analysis().temp_size_in_bytes for d in done)
    assert again < 0.7 * kept and again < 1.2 * loop, (kept, again, loop)
