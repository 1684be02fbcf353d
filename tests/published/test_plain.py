"""The plain decoder (model.py) compared with the general network, and edits of a fork."""

import ast
import dataclasses
import functools
import json
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import model
import published
import sample
import shard
from published import folders, reference, transformer
from published.llama import as_llama
from published.reference import code_difference, plain_attention
from tests.common import (
    assert_agree,
    full,
    gradients_of,
    in_float64,
    slow,
    sums_and_gradients,
)
from tests.helpers import ROOT, batch_of, make, run_of
from tests.parallel.test_attention import give_kernel, one_kernel
from zigzag.core import flags
from zigzag.core.errors import ConfigError
from zigzag.core.mesh import abstract_mesh, by_path, full_spec
from zigzag.parallel import attention
from zigzag.parallel.network import NETWORKS, network_of

# -------------------------------------------------------------------------------------------
# Two networks, one function

LLAMA = dict(kv_heads=2, layers=4, dropout=0.1)
MIXTRAL = dict(kv_heads=2, layers=2, experts=4, dropout=0.1, tied=True)
MESHES = ["data=2,fsdp=2,tensor=2", "pipe=2,tensor=2", "seq=2,fsdp=2", "expert=2,tensor=2",
          "pipe=2,seq=2,tensor=2"]


def in_general(config):
    """The same model as a configuration of the general network."""
    fields = dataclasses.asdict(config.network)
    return dataclasses.replace(config, network=transformer.Config(**fields))


@functools.cache
def on_one_device(changes):
    """The weights, a batch, and the general network's results for them without a mesh."""
    config = make(**dict(changes))
    params = jax.device_get(jax.jit(functools.partial(
        transformer.NETWORK.init, in_general(config).network))(jax.random.key(0)))
    rng = np.random.default_rng(0)
    if config.network.lora_rank:        # (an adapter that is zero hides the other's gradient)
        params = jax.tree.map_with_path(
            lambda path, w: w + 0.1 * rng.normal(size=w.shape).astype(w.dtype)
            if path[-1].key.endswith("_b") else w, params)
    batch = batch_of(config, weights=rng.random((config.batch, config.network.seq_len)) < 0.8)
    return params, batch, sums_and_gradients(in_general(config), "", params, batch)


@pytest.mark.parametrize("changes", [
    LLAMA, full({**LLAMA, "tied": True}), full(MIXTRAL), full({**LLAMA, "lora_rank": 4}),
    full({**MIXTRAL, "lora_rank": 4}),
    full(dict(rope_scaling='{"rope_type": "linear", "factor": 2}'))],
    ids=str)
def test_both_networks_have_the_same_values_and_gradients(changes):
    """A change in only one of the two blocks: a LLaMA would become another model when an option is
    added to it."""
    config = make(**changes)
    values = jax.jit(functools.partial(model.NETWORK.init, config.network))(jax.random.key(0))
    params, batch, want = on_one_device(tuple(changes.items()))
    fresh = jax.jit(functools.partial(transformer.NETWORK.init, in_general(config).network))(
        jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, values, fresh)
    assert_agree(sums_and_gradients(config, "", params, batch), want, 1e-6)
    tokens = jnp.asarray(batch["tokens"][:2])
    a, b = (np.asarray(jax.jit(functools.partial(
        network_of(c).forward, config=c.network))(params, tokens))
        for c in (config, in_general(config)))
    assert np.abs(a - b).max() <= 1e-6 * np.abs(b).max()


@pytest.mark.parametrize("name", ["positions", "segments", "mask"])
def test_both_networks_obey_what_is_known_of_tokens(name):
    """Documents that see each other, padding that is seen, positions that are not the given
    ones."""
    config, rng = make(kv_heads=2), np.random.default_rng(0)
    params = model.init(config.network, jax.random.key(0))
    tokens = jnp.asarray(batch_of(config)["tokens"][:2])
    known = {"positions": np.arange(16) * 3, "segments": np.sort(rng.integers(0, 3, 16)),
             "mask": np.arange(16) >= 5}
    given = {name: jnp.broadcast_to(known[name], tokens.shape)}
    a, b = (np.asarray(network_of(c).forward(params, tokens, c.network, **given))
            for c in (config, in_general(config)))
    np.testing.assert_allclose(a[:, 5:], b[:, 5:], rtol=1e-5, atol=1e-6)
    usual = np.asarray(model.forward(params, tokens, config.network))
    assert np.abs(a - usual)[:, 5:].max() > 1e-3
    row = model.forward(params, tokens[0], config.network, **{name: known[name]})
    np.testing.assert_allclose(row, a[0], rtol=1e-5, atol=1e-6)
    with pytest.raises(ConfigError, match="no encoder"):
        model.NETWORK.forward(params, tokens, config.network, source=tokens)


@pytest.mark.parametrize("mesh, changes", [
    *((mesh, LLAMA) if mesh == MESHES[0] else full(mesh, LLAMA) for mesh in MESHES
      if "expert" not in mesh), full("expert=2,tensor=2", MIXTRAL),
    slow("data=2,fsdp=2,tensor=2", {**LLAMA, "lora_rank": 4}),
    *(full(mesh, MIXTRAL) for mesh in MESHES if "expert" not in mesh)])
def test_both_networks_agree_on_a_mesh(mesh, changes):
    """A collective that only one of the two blocks has."""
    more = dict(schedule="1f1b", microbatches=2) if "pipe=2,seq=2" in mesh else {}
    params, batch, want = on_one_device(tuple(changes.items()))
    assert_agree(sums_and_gradients(make(**changes, **more), mesh, params, batch), want, 2e-6)


# -------------------------------------------------------------------------------------------
# Edits of model.py

ATTEND, NORMED = "shard.row((attend(q, k, v), ", 'h = norm(x, w["attn_norm"], c)\n'
TURNED = '    q, k = (rotary(a, batch["positions"], c) for a in (q, k))\n'
WEIGHT = 'layers = {"attn_norm": make("L/pipe D"),'


def with_attend(more):
    return ATTEND, f"shard.row((attend(q, k, v, {more}), "


EDITS = {
    "a window": [with_attend("lambda query, key: query.slot - key.slot < 5")],
    "a window by name": [with_attend("window=5")],
    "a window in every second layer": [with_attend("window=5, local=i % 2 == 1")],
    "a mask by document": [with_attend(
        "lambda query, key: query.position // 6 == key.position // 6")],
    "a soft cap": [with_attend("scores=lambda s, *_: jnp.tanh(s / 0.5) * 0.5")],
    "ALiBi": [(TURNED, ""), with_attend("scores=alibi"), (
        "def swiglu(", """def alibi(s, query, key, heads):
    slopes = 2.0 ** -(1.0 + heads)
    return s - slopes[:, None, None] * (query.position - key.position)[:, None]


def swiglu(""")],
    "a soft cap by name": [with_attend("softcap=0.5")],
    "q-k norm": [(WEIGHT, WEIGHT + ' "q_norm": make("L/pipe N"), "k_norm": make("L/pipe N"),'), (
        TURNED, '    q, k = norm(q, w["q_norm"], c), norm(k, w["k_norm"], c)\n' + TURNED)],
    "a second norm scale": [(WEIGHT, WEIGHT + ' "attn_scale": make("L/pipe D"),'), (
        NORMED, NORMED + '    h = h * w["attn_scale"]\n')]}
LEAVES_THE_KERNEL = {"a window", "a mask by document", "a soft cap", "ALiBi"}


@functools.cache
def edited(name):
    """model.py with an edit, as a module of its own."""
    text = (ROOT / "model.py").read_text()
    for old, new in EDITS[name]:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    module = types.ModuleType("model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "model", module)
        exec(compile(text, "model.py", "exec"), module.__dict__)
    return module


@pytest.fixture
def edit(monkeypatch):
    def make_edit(name):
        module = edited(name)
        monkeypatch.setitem(NETWORKS, "edited", module.NETWORK)
        config = module.Config(**dataclasses.asdict(make(kv_heads=2).network))
        return module, run_of(config, batch=8, out="", steps=20, warmup=3, microbatches=2)

    return make_edit


@functools.cache
def on_no_mesh(config):
    return gradients_of(config, "", batch_of(config))


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["fsdp=2,tensor=2", "pipe=2,seq=2", *(
    axis + "=2" for axis in ("tensor", "seq", "pipe", "fsdp"))])
@pytest.mark.parametrize("name", EDITS)
@in_float64()
def test_an_edit_is_obeyed_where_there_is_a_kernel(edit, monkeypatch, name, mesh):
    """An edited mask or scores that a CPU obeys and a device with a kernel ignores."""
    _, config = edit(name)
    calls, want = [], on_no_mesh(config)
    usual = on_no_mesh(make(kv_heads=2, microbatches=2))[1]
    assert name == "a second norm scale" or abs(want[1] - usual) > 1e-6     # (it is an edit)

    def kernel(q, k, v, pattern):
        calls.append(name)
        return one_kernel(q, k, v, pattern)

    monkeypatch.setattr(attention, "_splash", kernel)
    give_kernel(monkeypatch, "splash")
    got = gradients_of(config, mesh, batch_of(config))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-9), got, want)
    assert bool(calls) == (name not in LEAVES_THE_KERNEL and "seq" not in mesh)


@pytest.mark.parametrize("name", EDITS)
def test_decoding_obeys_an_edit(edit, name):
    """A cache that attends like the model before the edit: generation is worse than the loss."""
    module, config = edit(name)
    params = jax.tree.map(lambda w: 2 * w, module.init(config.network, jax.random.key(0)))
    forward = jax.jit(lambda row: module.forward(params, row, config.network)[0])
    prompts = [[1, 2, 3, 4], [10, 12, 14], [5], list(range(20, 29))]
    got = sample.generate(params, prompts, config.network, tokens=6, temperature=0)
    for prompt, new in zip(prompts, got, strict=True):
        row = list(prompt)
        for _ in range(6):
            logits = forward(jnp.asarray([row + [0] * (16 - len(row))]))
            row.append(int(jnp.argmax(logits[len(row) - 1])))
        assert new == row[len(prompt):], prompt


def test_decoding_refuses_what_a_cache_cannot_do(edit, monkeypatch):
    """Attention to later tokens, or documents, that a cache silently ignores."""
    for change in ("causal=False", "documents=batch['positions'] // 4"):
        monkeypatch.setitem(EDITS, change, [with_attend(change)])
        module, config = edit(change)
        params = module.init(config.network, jax.random.key(0))
        with pytest.raises(ConfigError, match="cannot generate"):
            sample.generate(params, [[1, 2]], config.network, tokens=2)


def test_a_forks_option_is_not_the_one_of_that_name_elsewhere(edit, monkeypatch, tmp_path):
    """A published Mistral, with a window in all layers, that goes to a fork's decoder whose
    `window` is in every other layer; an export of that fork that says all layers."""
    monkeypatch.setitem(EDITS, "an option", [
        ("    experts: int = 0 ", "    window: int = 0              # of every other layer\n"
                                  "    experts: int = 0 ")])
    module, config = edit("an option")
    monkeypatch.setattr(published, "model", module)
    assert published.lacking({"window": 8}) == ["window"]
    assert published.network_of_fields({"layers": 2, "window": 8}) is transformer.NETWORK
    for experts in (0, 4):
        mine = dataclasses.replace(config.network, window=8, experts=experts)
        with pytest.raises(ConfigError, match="window is 8|--window would be 8"):
            published.save_hf(tmp_path / "a", module.init(mine, jax.random.key(0)), mine)


def test_a_weight_that_an_edit_took_away_is_one_line_at_export(edit, monkeypatch, tmp_path):
    """A KeyError when an MLP without a gate is exported as a LLaMA."""
    monkeypatch.setitem(EDITS, "no gate", [
        ('layers |= {"w_gate": make("L/pipe D/fsdp F/tensor", into),\n                   "w_up"',
         'layers |= {"w_up"')])
    module, config = edit("no gate")
    params = module.init(config.network, jax.random.key(0))
    with pytest.raises(ConfigError, match="it lacks the weight layers.w_gate"):
        published.save_hf(tmp_path / "a", params, config.network)


def test_a_weight_that_an_edit_gave_other_axes_is_one_line_at_export(edit, monkeypatch, tmp_path):
    """A KeyError when a table names the axes of a weight otherwise."""
    monkeypatch.setitem(EDITS, "axes", [('"w_gate": make("L/pipe D/fsdp F/tensor", into)',
                                         '"w_gate": make("L/pipe D/fsdp D/tensor", into)')])
    module, config = edit("axes")
    params = module.init(config.network, jax.random.key(0))
    with pytest.raises(ConfigError, match=r"layers.w_gate has the shape .* 32, 32\], not .* 64"):
        published.save_hf(tmp_path / "a", params, config.network)


# {edit that keeps the options: what an export says of it}. (100 tokens are more than reference.py
# compares.)
MASK, SCORES = "its attention has a mask", "its attention has custom scores"
NO_LLAMA = {"a window of 100": MASK, "a window": MASK, "a mask by document": MASK,
            "a mask of long texts": MASK, "a soft cap": SCORES, "ALiBi": SCORES,
            "documents of 100": "its attention has documents",
            "pieces of 100": "its attention has parts, from 99 tokens to 99, in a row of 199",
            "attention by hand": "its attention does not call attend",
            "an activation": "its logits differ by", "a norm": "its logits differ by",
            "a window by name": "its attention has a window",
            "a window in every second layer": "its attention has a window",
            "a soft cap by name": "its attention has a softcap",
            "a wider MLP": r"layers.w_down has the shape \[2, 128, 32\], not \[2, 64, 32\]"}


@pytest.fixture
def edits_of_the_code(monkeypatch):
    text = (ROOT / "model.py").read_text()
    line = next(each for each in text.splitlines() if "jax.nn.silu(" in each)
    window = "lambda query, key: query.slot - key.slot < 100"
    for name, changes in {
            "an activation": [(line, line.replace("silu", "gelu"))],
            "a norm": [("+ c.norm_eps", "+ 0.1")],
            "a window of 100": [with_attend(window)],
            "a mask of long texts": [with_attend(f"({window}) if x.shape[1] > 100 else None")],
            "documents of 100": [("documents=documents(batch)",
                                  "documents=batch['positions'] // 100")],
            "pieces of 100": [(ATTEND, "shard.row((in_pieces(attend, q, k, v), "), (
                "def swiglu(", """def in_pieces(attend, q, k, v):
    size = min(q.shape[1], 100)
    parts = [shard.self_attend(*(a[:, i:i + size] for a in (q, k, v)), heads=q.shape[2])
             for i in range(0, q.shape[1], size)]
    return jnp.concatenate(parts, 1)


def swiglu(""")],
            "attention by hand": [(ATTEND, "shard.row((jax.nn.dot_product_attention("
                                           "q, k, v, is_causal=True), ")],
            "a wider MLP": [("F=c.d_ff", "F=2 * c.d_ff")]}.items():
        monkeypatch.setitem(EDITS, name, changes)


@pytest.mark.parametrize("name", NO_LLAMA)
def test_an_edit_that_keeps_the_options_is_not_exported_as_a_llama(edit, edits_of_the_code,
                                                                   tmp_path, name):
    """Edited code with the options of a LLaMA, exported as a LLaMA: transformers would compute
    another model than the trained one. A window that is longer than the text that is compared."""
    module, config = edit(name)
    config = dataclasses.replace(config.network, seq_len=200)
    params = module.init(config, jax.random.key(0))
    with pytest.raises(ConfigError, match=f"differs from the published one: {NO_LLAMA[name]}") as e:
        published.save_hf(tmp_path / "a", params, config)
    assert not (tmp_path / "a").exists() and flags.exit_line(e.value)[0] == 2


@pytest.mark.parametrize("changes", [LLAMA, MIXTRAL, dict(seq_len=1), dict(kernel=False)], ids=str)
def test_a_model_that_is_not_edited_is_exported(tmp_path, changes):
    """A refusal of the attention of the unedited model.py: of grouped queries, beside experts, for
    a single token or without the kernel."""
    config = make(**changes).network
    published.save_hf(tmp_path / "a", model.init(config, jax.random.key(0)), config)
    assert (tmp_path / "a/model.safetensors").exists()


LOADED = {**NO_LLAMA, "q-k norm": "its logits .*fills its layers.k_norm, layers.q_norm [(]zeros",
          "no reading of the norm's scale": "its logits differ by",
          "a reshape": "it does not run on a few tokens at small sizes"}
LOADED.pop("a wider MLP")       # (the folder has other shapes)


@pytest.mark.parametrize("name", LOADED)
def test_a_published_model_is_not_read_into_other_code(edit, edits_of_the_code, monkeypatch,
                                                       tmp_path, name):
    """A published LLaMA that is fine-tuned or sampled as another model, without a word."""
    monkeypatch.setitem(EDITS, "no reading of the norm's scale", [
        ("return x32.astype(x.dtype) * scale", "return x32.astype(x.dtype)")])
    monkeypatch.setitem(EDITS, "a reshape", [(NORMED, NORMED + "    h = h.reshape(-1, 16, 32)\n")])
    usual = dataclasses.replace(make(kv_heads=2).network, seq_len=200)
    published.save_hf(tmp_path / "m", model.init(usual, jax.random.key(0)), usual)
    module, _ = edit(name)
    monkeypatch.setattr(published, "model", module)
    monkeypatch.setitem(NETWORKS, "decoder", module.NETWORK)
    says = f"differs from this llama: {LOADED[name]}.*--edited"
    own = functools.partial(folders.load_hf, module.NETWORK)
    for load in (published.load_hf, own, sample.load):
        with pytest.raises(ConfigError, match=says) as e:
            load(tmp_path / "m")
        assert flags.exit_line(e.value)[0] == 2
        params, *_ = load(tmp_path / "m", edited=True)
        np.testing.assert_array_equal(params["norm"], 1)


def test_a_new_weight_that_begins_with_zeros_does_not_matter(edit, monkeypatch, tmp_path):
    """A refusal of a fork that adds to a LLaMA what changes nothing at first: weights that the
    folder lacks are zeros."""
    monkeypatch.setitem(EDITS, "a gate", [(WEIGHT, WEIGHT + ' "gate": make("L/pipe D", 0.1),'), (
        NORMED, NORMED + '    h = h * (1 + w["gate"])\n')])
    usual = make(kv_heads=2).network
    published.save_hf(tmp_path / "m", model.init(usual, jax.random.key(0)), usual)
    module, _ = edit("a gate")
    assert not np.any(folders.load_hf(module.NETWORK, tmp_path / "m")[0]["layers"]["gate"])


@pytest.mark.parametrize("changes", [
    LLAMA, MIXTRAL, dict(layers=1, tied=True), dict(kv_heads=1, head_dim=64),
    dict(MIXTRAL, experts_per_token=1), dict(LLAMA, norm_eps=0.1, rope_theta=5e5, seq_len=1),
    dict(rope_scaling=json.dumps(dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0,
                                      high_freq_factor=4.0, original_max_position_embeddings=32)))],
    ids=str)
def test_code_that_is_not_edited_reads_every_llama(changes):
    """A refusal of a published folder whose options the plain decoder has."""
    config = make(**changes).network
    there, _ = as_llama(config)
    assert code_difference(model.NETWORK, dataclasses.replace(there, tied=config.tied)) == ""


@pytest.mark.parametrize("changes", [
    LLAMA, MIXTRAL, dict(LLAMA, tied=True), dict(LLAMA, rope_scaling=json.dumps(dict(
        rope_type="linear", factor=2.0)))], ids=str)
def test_the_reference_of_an_export_is_the_model(changes, monkeypatch):
    """A reference that refuses a correct model, or accepts any: attention that shard.py computes
    otherwise is found, since the reference has its own."""
    config = make(**changes).network
    params = model.init(config, jax.random.key(0))
    config, weights = as_llama(config)
    params = weights(params)
    ids = np.arange(20)[None] % config.vocab_size
    general = in_general(run_of(config)).network

    def assert_same():
        got = transformer.NETWORK.forward(params, ids, general, attend=plain_attention)
        np.testing.assert_allclose(got, model.forward(params, ids, config), rtol=1e-4, atol=1e-5)

    assert_same()
    if config.experts:      # (equal shares: the first ones are chosen)
        params["layers"]["router"] *= 0
        assert_same()
    real = shard.self_attend
    monkeypatch.setattr(shard, "self_attend", lambda q, *args, **how: real(1.1 * q, *args, **how))
    assert "its logits differ by" in reference._difference.__wrapped__(model.NETWORK, config)


# -------------------------------------------------------------------------------------------
# Options that the machinery may read

def test_the_machinery_reads_no_option_that_the_plain_decoder_lacks():
    """A field of the general network that a wing reads directly, and that a fork's Config lacks. A
    wing must call a function of the Network instead."""
    own = {f.name for f in dataclasses.fields(model.Config)}
    run = {f.name for f in dataclasses.fields(run_of())}
    foreign = {f.name for f in dataclasses.fields(transformer.Config)} - own - run
    found = []
    for path in sorted((ROOT / "zigzag").rglob("*.py")):
        if "hub" in path.parts:         # (which translates these options)
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in foreign and (
                    ast.unparse(node.value).split(".")[-1] in ("c", "config", "network")):
                found.append(f"{path}:{node.lineno}: {ast.unparse(node)}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("changes", [{}, dict(experts=4)], ids=["dense", "experts"])
def test_where_a_weight_lives_follows_from_its_row(changes):
    """What the docstring of model.weight_table says, and the rule does otherwise."""
    config = model.Config(d_model=256, vocab_size=512, **changes)
    mesh = abstract_mesh(dict(pipe=2, fsdp=2, expert=2, tensor=2))
    decisions = by_path(model.NETWORK.plan_weights(config, mesh))
    for path, row in by_path(model.weight_table(config)).items():
        if row.tensor < 0:
            continue
        axes = [{"L": "pipe", "E": "expert"}.get(letter) for letter in row.axes]
        axes[row.tensor] = "tensor"
        others = [n for n, axis in enumerate(axes) if not axis]
        axes[max(others, key=row.shape.__getitem__)] = "fsdp"
        assert full_spec(decisions[path].spec, len(axes)) == axes, path


@pytest.mark.parametrize("name", ["norm", "rotary", "swiglu", "mixture_of_experts"])
def test_an_edit_of_model_py_changes_no_published_network(name, monkeypatch):
    """A fork's norm that also changes the general network, whose own the published models have."""
    fields = dict(layers=1, d_model=32, heads=4, vocab_size=61, seq_len=16,
                  experts=4 if name == "mixture_of_experts" else 0)
    config, batch = transformer.Config(**fields), batch_of(make(**fields), seed=3)

    def losses():
        return [float(network.loss(network.init(c, jax.random.key(0)), batch, c)[0])
                for network, c in ((transformer.NETWORK, config),
                                   (model.NETWORK, model.Config(**fields)))]

    before, own = losses(), getattr(model, name)

    def edited(*given):
        return jax.tree.map(lambda x: 1.5 * x, own(*given))

    monkeypatch.setattr(model, name, edited)
    after = losses()
    assert after[0] == before[0] and after[1] != pytest.approx(before[1], rel=1e-6)
