"""Every family of published decoders compared with transformers: a tiny model with random weights,
saved there and loaded here, has the same logits and gradients on any mesh, and transformers reads
our exports. test_published.py has the folders."""

import functools
import inspect
import json
import tempfile
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import published
from published import arrays_of_folder, gpt, llama
from tests.common import check_network, full, mean_loss, net, peer, slow, sums_and_gradients
from tests.helpers import mesh_of, own, run_of
from tests.parallel.test_rule import no_worse_than_by_hand
from tests.readme import block
from zigzag.core.errors import ConfigError
from zigzag.core.flags import change
from zigzag.core.mesh import by_path
from zigzag.parallel.network import network_of

# -------------------------------------------------------------------------------------------
# Tiny models, of numbers that differ from all defaults and divide by little

V, ROWS, T = 131, 4, 24


def new(heads=4, kv_heads=2, layers=2, **more):
    """A configuration for newer families, with heads of width 12."""
    return dict(hidden_size=12 * heads, num_hidden_layers=layers, num_attention_heads=heads,
                num_key_value_heads=kv_heads, intermediate_size=80, vocab_size=V,
                max_position_embeddings=64, rms_norm_eps=1e-3, rope_theta=500.0) | more


def old(heads=4, layers=2, **more):
    """A configuration for GPT-2 and its relatives."""
    return dict(n_layer=layers, n_embd=12 * heads, n_head=heads, vocab_size=V, n_positions=64,
                layer_norm_epsilon=1e-3) | more


def scaled(kind, **more):
    return {"rope_scaling": {"rope_type": kind, "factor": 4.0, **more}}


OPT = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, ffn_dim=80, vocab_size=V,
           max_position_embeddings=64)
FALCON = dict(hidden_size=72, num_hidden_layers=2, num_attention_heads=6, vocab_size=V,
              layer_norm_epsilon=1e-3)
NEOX = {k: v for k, v in new(6, rotary_emb_base=500, layer_norm_eps=1e-3).items()
        if k not in ("rms_norm_eps", "rope_theta", "num_key_value_heads")}
STARCODER = {k: v for k, v in new(6, 3, norm_epsilon=1e-3).items() if k != "rms_norm_eps"}
GEMMA = dict(head_dim=16, sliding_window=7, query_pre_attn_scalar=12)
MIXED = dict(num_experts_per_tok=2, moe_intermediate_size=24)
DEEP = {**new(4, 4), **MIXED, "n_shared_experts": 1, "n_routed_experts": 8, "n_group": 4,
        "topk_group": 2, "first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
CASES = {
    "llama": ("Llama", new(9, 3)),
    "llama3": ("Llama", new(head_dim=16, attention_bias=True, mlp_bias=True, hidden_act="gelu",
                            tie_word_embeddings=True, **scaled(
                                "llama3", low_freq_factor=1.0, high_freq_factor=4.0,
                                original_max_position_embeddings=32))),
    "llama linear": ("Llama", new(**scaled("linear"))),
    "llama dynamic": ("Llama", new(max_position_embeddings=16, **scaled("dynamic"))),
    "llama yarn": ("Llama", new(**scaled("yarn", original_max_position_embeddings=16))),
    "mistral": ("Mistral", new(6, 3, sliding_window=7, head_dim=16)),
    "qwen2": ("Qwen2", new(6, 2, use_sliding_window=True, sliding_window=7, max_window_layers=1)),
    "qwen3": ("Qwen3", new(6, 3, head_dim=16)),
    "gemma2": ("Gemma2", new(**GEMMA)),
    "gemma3": ("Gemma3Text", new(6, 3, **GEMMA, layers=4, sliding_window_pattern=2,
                                 rope_local_base_freq=100.0, final_logit_softcapping=20.0,
                                 **scaled("linear"))),
    "olmo2": ("Olmo2", new(6, 3, pad_token_id=0)),
    "olmo2 bias": ("Olmo2", new(12, 4, pad_token_id=0, attention_bias=True, hidden_act="gelu",
                                tie_word_embeddings=True)),
    "granite": ("Granite", new(6, 3, embedding_multiplier=7.0, attention_multiplier=0.4,
                               residual_multiplier=0.7, logits_scaling=3.0, attention_bias=True)),
    "smollm3": ("SmolLM3", new(6, 3, layers=4, no_rope_layers=[1, 0, 0, 1], pad_token_id=0,
                               use_sliding_window=True, sliding_window=7, layer_types=[
                                   "full_attention", "sliding_attention"] * 2)),
    "smollm3 every 2": ("SmolLM3", new(pad_token_id=0, no_rope_layer_interval=2, sliding_window=7,
                                       use_sliding_window=True, **scaled("linear"))),
    "gemma3 full": ("Gemma3Text", new(**GEMMA, layer_types=["full_attention"] * 2,
                                      rope_local_base_freq=100.0)),
    "phi3": ("Phi3", new(pad_token_id=0, sliding_window=9, partial_rotary_factor=0.5)),
    "phi3 long": ("Phi3", new(
        pad_token_id=0, original_max_position_embeddings=16, rope_scaling=dict(
            type="longrope", short_factor=[1.1] * 6, long_factor=[2.0, 1.5, 1.2, 2.0, 3.0, 4.0]))),
    "gpt2": ("GPT2", old()),
    "gptj": ("GPTJ", old(rotary_dim=8)),
    "gpt_neo": ("GPTNeo", dict(num_layers=4, hidden_size=72, num_heads=6, vocab_size=V,
                               max_position_embeddings=64, window_size=5, layer_norm_epsilon=1e-3,
                               attention_types=[[["global", "local"], 2]])),
    "gpt_neox": ("GPTNeoX", {**NEOX, "rotary_pct": 0.5}),
    "gpt_neox serial": ("GPTNeoX", {**NEOX, "rotary_pct": 1.0, "use_parallel_residual": False,
                                    "attention_bias": False}),
    "opt": ("OPT", {**OPT, "word_embed_proj_dim": 48}),
    "opt 350m": ("OPT", {**OPT, "word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    "bloom": ("Bloom", dict(hidden_size=72, n_layer=2, n_head=6, vocab_size=V,
                            layer_norm_epsilon=1e-3)),
    "falcon 7b": ("Falcon", FALCON),
    "falcon 40b": ("Falcon", {**FALCON, "num_kv_heads": 3, "new_decoder_architecture": True}),
    "falcon 11b": ("Falcon", {**FALCON, "num_kv_heads": 2, "new_decoder_architecture": True,
                              "num_ln_in_parallel_attn": 1, "rope_theta": 500.0}),
    "falcon rw": ("Falcon", {**FALCON, "multi_query": False, "parallel_attn": False, "bias": True,
                             "alibi": True}),
    "starcoder2": ("Starcoder2", {**STARCODER, "sliding_window": 7}),
    "starcoder2 plain": ("Starcoder2", {**STARCODER, "use_bias": False, "hidden_act": "gelu",
                                        "tie_word_embeddings": False}),
    "glm": ("Glm", new(head_dim=12, pad_token_id=0)),
    "chatglm": ("Glm", new(head_dim=12, pad_token_id=0, rope_theta=10000.0)),
    "mixtral": ("Mixtral", new(num_local_experts=4, sliding_window=7)),
    "qwen3_moe": ("Qwen3Moe", new(6, 3, **MIXED, num_experts=4, head_dim=16)),
    "qwen3_moe dense": ("Qwen3Moe", new(**MIXED, num_experts=4, mlp_only_layers=[0],
                                        norm_topk_prob=True, layers=3)),
    "qwen3_moe every 2": ("Qwen3Moe", new(6, 3, **MIXED, num_experts=4, head_dim=16, layers=4,
                                          decoder_sparse_step=2)),
    "qwen3_moe late": ("Qwen3Moe", new(**MIXED, num_experts=4, layers=5, mlp_only_layers=[0, 1, 3],
                                       decoder_sparse_step=1)),
    "deepseek_v3": ("DeepseekV3", DEEP),
    "deepseek_v3 yarn": ("DeepseekV3", {
        **DEEP, "n_group": 1, "topk_group": 1, "q_lora_rank": None, "first_k_dense_replace": 0,
        "rope_interleave": False, "norm_topk_prob": False, "rope_scaling": dict(
            type="yarn", factor=4.0, mscale=1.0, mscale_all_dim=0.8, beta_fast=32, beta_slow=1,
            original_max_position_embeddings=16)}),
}
# These at each start; one of each other family in .ci/run, the rest in .ci/full.
QUICK = ("llama", "gpt2", "gemma3", "falcon 40b", "deepseek_v3")
# Those whose gradients are compared, too.
TRAINED = ("gpt2", "gemma3", "deepseek_v3", "qwen3_moe every 2")
SLOW = ("llama3", "mistral", "qwen2", "qwen3", "gemma2", "phi3 long", "gptj", "gpt_neo", "gpt_neox",
        "opt 350m", "bloom", "falcon rw", "chatglm", "mixtral", "qwen3_moe", "olmo2", "granite",
        "smollm3", "starcoder2")


def cases(quick=QUICK, slow=SLOW, names=CASES):
    return [pytest.param(name, id=name, marks=[] if name in quick else
                         pytest.mark.slow if name in slow else pytest.mark.full)
            for name in names]


class Reference(NamedTuple):
    folder: Path            # as transformers saved it
    batch: dict
    logits: np.ndarray
    gradients: dict         # of the mean loss, by the names of published arrays
    loss: float = 0.0       # that loss, where it is compared


def attention(name):
    # (transformers' eager attention adds ALiBi to falcon's scores twice, in 4.57.6.)
    return dict(attn_implementation="sdpa" if name == "falcon rw" else "eager")


@functools.cache
def reference(name):
    """A saved transformers model, its logits and gradients."""
    torch, transformers = peer("torch"), peer("transformers")
    kind, fields = CASES[name]
    torch.manual_seed(1)
    theirs = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, f"{kind}Config")(**fields), **attention(name))
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(2, V, (2, ROWS, T))     # (of padding torch learns nothing)
    folder, logits, gradients = numbers_of(theirs, targets, input_ids=torch.tensor(tokens))
    if name == "chatglm":
        rewrite(folder, as_chatglm, CHATGLM)
        gradients = as_chatglm(gradients)
    return Reference(folder, batch_of(tokens, targets), logits, gradients)


NOT_TRAINED = ("e_score_correction_bias", "final_logits_bias")      # by torch: they are buffers


def saved(theirs, folder=None):
    """The folder in which a transformers model was saved, whose weights are all made random."""
    torch = peer("torch")
    theirs = theirs.eval()
    with torch.no_grad():       # scales are no ones, biases no zeros
        biases = [b for n, b in theirs.named_buffers() if n.endswith(NOT_TRAINED)]
        for w in (*theirs.parameters(), *biases):
            w.add_(torch.randn_like(w) * 0.1)
    folder = folder or Path(tempfile.mkdtemp(prefix="zigzag-")) / "model"
    theirs.save_pretrained(folder)
    return folder


def their_gradients(theirs):
    """By the names of published arrays. (No token may choose an expert.)"""
    return {n: np.zeros(w.shape, np.float32) if w.grad is None else w.grad.numpy()
            for n, w in theirs.named_parameters()}


def numbers_of(theirs, targets, **given):
    """(the folder in which it was saved, its logits, gradients of its mean loss) for a transformers
    model whose weights are all made random."""
    torch, folder = peer("torch"), saved(theirs)
    logits = theirs(**given).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, -2), torch.tensor(targets.ravel())
                                      ).backward()
    return folder, logits.detach().numpy(), their_gradients(theirs)


def weighted_loss(logits, batch):
    """Torch's mean cross-entropy of a batch's targets."""
    torch = peer("torch")
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, -2), torch.tensor(batch["targets"].ravel()).long(), reduction="none")
    weights = torch.tensor(batch["weights"].ravel())
    return (losses * weights).sum() / weights.sum()


def as_theirs(batch, names):
    """The arrays of a batch as torch's, under transformers' names. (Ids and masks are whole.)"""
    torch = peer("torch")
    given = {theirs: torch.tensor(batch[ours]) for ours, theirs in names.items() if ours in batch}
    return {name: a.long() if name.endswith(("ids", "mask")) else a for name, a in given.items()}


def read_by_theirs(kind, folder, **how):
    """The transformers model that reads a folder of ours, which must lack nothing."""
    theirs, report = kind.from_pretrained(folder, output_loading_info=True,
                                          dtype=peer("torch").float32, **how)
    report = {what: [n for n in names if not str(n).endswith("relative_position_index")]
              for what, names in report.items()}    # (a constant of Swin's, which it makes)
    assert not any(report.values()), report
    return theirs.eval()


def batch_of(tokens, targets, **given):
    return {"tokens": tokens.astype(np.int32), "targets": targets.astype(np.int32),
            "weights": np.ones(tokens.shape, np.float32),
            "seeds": np.arange(len(tokens), dtype=np.uint32), **given}


def their_logits(name, folder):
    """The logits of the transformers model that reads a folder of ours."""
    torch, transformers = peer("torch"), peer("transformers")
    if name == "chatglm":
        rewrite(folder, as_glm, json.loads((reference("glm").folder / "config.json").read_text())
                | {"rope_theta": 10000.0})
    theirs = read_by_theirs(transformers.AutoModelForCausalLM, folder, **attention(name))
    with torch.no_grad():
        return theirs(torch.tensor(reference(name).batch["tokens"])).logits.numpy()


# ChatGLM has no class in transformers. GLM's computes the same; its arrays are renamed to ChatGLM
# 2's names.
CHATGLM = dict(
    model_type="chatglm", architectures=["ChatGLMModel"], add_bias_linear=False, add_qkv_bias=True,
    apply_query_key_layer_scaling=True, apply_residual_connection_post_layernorm=False,
    attention_softmax_in_fp32=True, ffn_hidden_size=80, hidden_size=48, kv_channels=12,
    layernorm_epsilon=1e-3, multi_query_attention=True, multi_query_group_num=2,
    num_attention_heads=4, num_layers=2, original_rope=True, padded_vocab_size=V,
    post_layer_norm=True, rmsnorm=True, seq_length=64, tie_word_embeddings=False)
GLM_NAMES = {
    "model.embed_tokens.": "transformer.embedding.word_embeddings.",
    "model.norm.": "transformer.encoder.final_layernorm.",
    "lm_head.": "transformer.output_layer.", "model.layers.": "transformer.encoder.layers.",
    "self_attn.o_proj.": "self_attention.dense.", "mlp.gate_up_proj.": "mlp.dense_h_to_4h.",
    "mlp.down_proj.": "mlp.dense_4h_to_h."}
HEADS = [(f"model.layers.{i}.", kind) for i in range(2) for kind in ("weight", "bias")]
FUSED = "self_attention.query_key_value."


def renamed(arrays, names):
    def new_name(name):
        for old_part, new_part in names.items():
            name = name.replace(old_part, new_part)
        return name

    return {new_name(name): array for name, array in arrays.items()}


def as_chatglm(arrays):
    arrays = dict(arrays)
    for layer, kind in HEADS:
        arrays[f"{layer}{FUSED}{kind}"] = np.concatenate(
            [arrays.pop(f"{layer}self_attn.{x}_proj.{kind}") for x in "qkv"])
    return renamed(arrays, GLM_NAMES)


def as_glm(arrays):
    arrays = renamed(arrays, {ours: theirs for theirs, ours in GLM_NAMES.items()})
    for layer, kind in HEADS:
        parts = np.split(arrays.pop(f"{layer}{FUSED}{kind}"), [48, 72])
        arrays |= {f"{layer}self_attn.{x}_proj.{kind}": part for x, part in zip("qkv", parts)}
    return arrays


def rewrite(folder, edit, config):
    """Edit the arrays of a folder, and give it another config.json."""
    package = pytest.importorskip("safetensors.numpy")
    arrays = edit(package.load_file(folder / "model.safetensors"))
    package.save_file({name: np.ascontiguousarray(a) for name, a in arrays.items()},
                      folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


# -------------------------------------------------------------------------------------------
# The same numbers

def assert_close(got, want, rtol, what="", beside=0.0):
    """Assert equality up to a share of the norm, plus that share of `beside`."""
    assert got.shape == want.shape, what
    error, size = np.linalg.norm(got - want), np.linalg.norm(want)
    assert error <= rtol * (size + 1e-3 * beside), (what, error, size, beside)


def logits_of(params, config, tokens, mesh=None, **given):
    def forward(params, tokens, given):
        return net.forward(params, tokens, config, **given)

    if mesh is not None:
        forward = jax.shard_map(forward, mesh=mesh, out_specs=P(), in_specs=(
            jax.tree.map(lambda w: w.sharding.spec, params), P(), P()))
    return np.asarray(jax.jit(forward)(params, tokens, given))


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("name", cases())
def test_logits_are_those_of_transformers(name, shards):
    """A convention that is not the published one; a device that reads another part of an array than
    its own; heads, key heads or a vocabulary that the shards do not divide."""
    want = reference(name)
    mesh = mesh_of(f"tensor={shards}")
    params, config = published.load_hf(want.folder, mesh)
    assert_close(logits_of(params, config, want.batch["tokens"], mesh), want.logits, 1e-5)


@functools.cache
def loaded(name):
    return ready(reference(name))


def ready(want, fsdp_min=4096, **fields):
    """A model on one device, ready to train on the reference's batch; with our gradient of the
    mean loss there, and that loss."""
    if "tokens" in want.batch:
        fields["seq_len"] = want.batch["tokens"].shape[1]
    params, config = published.load_hf(want.folder, **fields)
    of_experts = dict(balance=0.0, router_z=0.0) if getattr(config, "experts", 0) else {}
    config = run_of(config, batch=ROWS, dtype="float32", out="", fsdp_min=fsdp_min, **of_experts)
    loss, gradient = jax.jit(jax.value_and_grad(mean_loss(net.loss, config)))(params, want.batch)
    return params, config, gradient, float(loss)


def as_published(config, tree):
    """A tree like the weights as published arrays, without the numbers that a family adds to
    some."""
    config = own(config)
    family = llama.family_of(json.loads(config.published), llama.families_of(network_of(config)))
    table, weights = network_of(config).table(config), by_path(tree)
    return {name: arrays_of_folder.published_array(
                name, [p._replace(change=p.change._replace(offset=0.0)) for p in parts], weights)
            for name, parts in dict(
                arrays_of_folder.published_arrays(family, config, table)).items()
            if parts[0].sign == "->"}


def assert_gradient(config, gradient, want):
    """Assert that gradients equal torch's, array by array. (The gradient of a bias of keys without
    rotary positions is only rounding.)"""
    got = as_published(config, gradient)
    assert want.keys() <= got.keys()
    total = float(optax.tree.norm(want))
    for name, array in got.items():
        if name in want:
            assert_close(array, want[name], 1e-4, name, total)
        else:       # (of logits' bias we have one)
            assert name.endswith(NOT_TRAINED)
            assert array.any() == name.endswith("logits_bias")


@pytest.mark.parametrize("name", cases(TRAINED))
def test_gradients_are_those_of_torch(name):
    """Faults that the logits do not show: in a weight that is used twice or tied, or in a router's
    choice."""
    _, config, gradient, _ = loaded(name)
    assert_gradient(config, gradient, reference(name).gradients)


def export(folder, params, config, ours, before):
    """Write weights that compute `ours`, and no longer `before`: they are read as they were."""
    assert np.linalg.norm(ours - before) > 1e-2 * np.linalg.norm(ours)
    published.save_hf(folder, params, config)
    again, _ = published.load_hf(folder)
    for path, w in by_path(again).items():
        assert_close(w, by_path(params)[path], 1e-6, path)


def export_trained(folder, model, want, output):
    """Export a model after a step against its gradient. Returns what output(params, config) is
    then."""
    params, config, gradient, _ = model
    params = jax.tree.map(lambda w, g: w - 0.5 * g / jnp.maximum(jnp.linalg.norm(g), 1e-9), params,
                          gradient)
    ours = output(params, config)
    export(folder, params, config, ours, want.logits)
    return ours


@pytest.mark.parametrize("name", cases(TRAINED))
def test_what_we_train_transformers_reads(name, tmp_path):
    """An array that is written as it was read, without its training, in another order, or without
    the number that its family subtracts."""
    ours = export_trained(tmp_path / "out", loaded(name), reference(name), functools.partial(
        logits_of, tokens=reference(name).batch["tokens"]))
    assert_close(their_logits(name, tmp_path / "out"), ours, 1e-5)


def assert_step(model, want, mesh, **changes):
    """Assert that the loss on a mesh is that of one device, and the gradients torch's. Returns what
    the loss is divided by."""
    params, config, _, loss = model
    config = change(config, **changes)
    gradient, (total, count, *_) = sums_and_gradients(config, mesh, params, want.batch)
    assert total / count == pytest.approx(loss, rel=2e-6)
    assert_gradient(config, jax.tree.map(lambda g: g / count, gradient), want.gradients)
    return count


@pytest.mark.parametrize("mesh", ["fsdp=2,tensor=2", slow("pipe=2,tensor=2"), slow("seq=2")])
@pytest.mark.parametrize("name", cases(TRAINED, slow=()))
def test_a_step_on_a_mesh_is_that_of_one_device(name, mesh):
    """A family's own part that a mesh splits wrongly: its loss, and torch's gradients."""
    _, config, *_ = loaded(name)
    if getattr(config, "dense_layers", 0) and "pipe" in mesh:
        with pytest.raises(ConfigError, match="--dense_layers 1 differ from the others"):
            check_network(config, mesh_of(mesh))
        return
    assert_step(loaded(name), reference(name), mesh)


@pytest.mark.slow
def test_another_family_is_as_short_as_the_page_says(monkeypatch):
    """The example of docs/networks.md, which no code of ours runs: it computes what transformers
    computes, in under 25 lines."""
    code = block("docs/networks.md", 'GPT["phi"]')
    assert len([line for line in code.splitlines() if line.strip()]) < 25
    there = {**vars(gpt), "GPT": {}}
    exec(code, there)
    monkeypatch.setitem(llama.FAMILIES, "phi", there["GPT"]["phi"])
    monkeypatch.setitem(CASES, "phi", ("Phi", {
        **{k: v for k, v in new(6, 3).items() if k != "rms_norm_eps"}, "layer_norm_eps": 1e-3,
        "partial_rotary_factor": 1 / 3}))
    params, config = published.load_hf(reference("phi").folder)
    assert_close(logits_of(params, config, reference("phi").batch["tokens"]),
                 reference("phi").logits, 1e-5)
    test_defaults_are_those_of_the_class("phi")


@pytest.mark.parametrize("name", ["opt", slow("gpt2"), *map(full, ("llama", "bloom", "falcon rw"))])
@pytest.mark.parametrize("mesh", [full(""), "tensor=2"])
def test_a_mask_at_the_left_is_as_in_transformers(name, mesh):
    """Wrong logits of OPT for a row with padding at the left, because OPT counts positions along
    the mask, and other families along the row. (The loss on seq is one device's.)"""
    torch, transformers = peer("torch"), peer("transformers")
    folder, tokens = reference(name).folder, reference(name).batch["tokens"]
    mask = (np.arange(T) >= np.array([[0], [5], [9], [1]])).astype(np.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, **attention(name)).eval()
    with torch.no_grad():
        want = theirs(torch.tensor(tokens).long(), attention_mask=torch.tensor(mask).long())
    mesh = mesh_of(mesh) if mesh else None
    params, config = published.load_hf(folder, mesh)
    got = logits_of(params, config, tokens, mesh, mask=mask)
    assert_close(got * mask[..., None], want.logits.numpy() * mask[..., None], 1e-5)
    if name == "opt" and mesh is None:
        params, config, _, _ = loaded(name)
        batch = {**reference(name).batch, "mask": mask, "weights": mask}
        sums = [sums_and_gradients(config, axes, params, batch)[1][:2] for axes in ("", "seq=2")]
        np.testing.assert_allclose(*sums, rtol=2e-6)


# Megatron's table: heads, hidden and the vocabulary out of the stream are columns, into it rows.
COLUMNS, ROWS_OF = P(None, None, "tensor"), P(None, "tensor")
BY_HAND = [(r"\.w([qkv]|_gate|_up)(_bias)?$|\.e_down$", COLUMNS),
           (r"\.e_(gate|up)$", P(None, None, None, "tensor")),
           (r"\.(wo|w_down)$|^head", ROWS_OF), ("^embed$", P("tensor"))]
WIDE_NORMS = [(r"\.[qk]_norm$", COLUMNS)]       # of all heads: a scale lies where its head does


def sends_no_more(model, want, rules, shards, specs=None):
    """no_worse_than_by_hand, for the mean loss of a model that is ready to train."""
    params, config, *_ = model
    batch = {k: v for k, v in want.batch.items() if k != "seeds"}
    return no_worse_than_by_hand(mean_loss(net.loss, config), jax.device_get(params), (batch,),
                                 rules, shards, specs)


@pytest.mark.parametrize("shards", [2, 4])
@pytest.mark.parametrize("name", cases((), ("opt 350m", "gemma3", "deepseek_v3")))
def test_no_family_sends_more_than_by_hand(name, shards):
    """A part of a family that the rule prices wrongly: more collectives, or more bytes in them."""
    wide = WIDE_NORMS if getattr(loaded(name)[1], "qk_norm_wide", False) else []
    sends_no_more(loaded(name), reference(name), BY_HAND + wide, shards)


# -------------------------------------------------------------------------------------------
# config.json

@functools.cache
def config_class(kind):
    return peer("transformers").models.auto.configuration_auto.CONFIG_MAPPING[kind]


@pytest.mark.parametrize("kind", sorted({*llama.FAMILIES} - {"chatglm"}))
def test_defaults_are_those_of_the_class(kind):
    """A default that differs from the class's: a published config.json leaves out default values,
    and no shape would show the difference."""
    parameters = inspect.signature(config_class(kind).__init__).parameters
    theirs = {name: p.default for name, p in parameters.items()}
    theirs |= {"tie_word_embeddings": theirs.get("tie_word_embeddings", True)}
    theirs |= {"sliding_window_pattern": 6} if kind == "gemma3_text" else {}
    ours = dict(llama.FAMILIES[kind].defaults)
    if kind.startswith("gemma"):
        del ours["hidden_act"]      # (theirs is hidden_activation)
    assert ours == {name: theirs[name] for name in ours}


@pytest.mark.parametrize("name", [name for name in CASES if name != "chatglm"])
def test_what_a_config_leaves_out_is_its_default(name):
    """Each option of a tiny model, given or left out where it is the class's default."""
    assert_the_same_when_brief(*CASES[name])


def assert_the_same_when_brief(kind, fields):
    assert_defaults(getattr(peer("transformers"), f"{kind}Config")(**fields))


def assert_defaults(config):
    whole = json.loads(config.to_json_string(use_diff=False))
    default = json.loads(config_class(whole["model_type"])().to_json_string(use_diff=False))
    sizes = ("hidden", "layer", "head", "intermediate", "vocab", "embd", "ffn", "lora", "model")
    brief = {k: v for k, v in whole.items()
             if v != default.get(k, None) or any(size in k for size in sizes)}
    assert len(brief) < len(whole) / 2
    got, want = (llama.fields_of(record) for record in (brief, whole))
    assert {**got, "published": ""} == {**want, "published": ""}


# (what transformers 4 writes, what 5 writes) for the same model.
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
NEWER = [
    ("llama", dict(rope_theta=500.0, rope_scaling=YARN),
     dict(rope_parameters={**YARN, "rope_theta": 500.0})),
    ("llama", dict(rope_theta=500.0, rope_scaling=None),
     dict(rope_parameters={"rope_theta": 500.0, "rope_type": "default"})),
    ("gemma3_text", dict(rope_theta=500.0, rope_scaling={"rope_type": "linear", "factor": 8.0},
                         rope_local_base_freq=100.0),
     dict(rope_parameters={
         "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0},
         "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}})),
    ("gpt_neox", dict(rotary_emb_base=500.0, rotary_pct=0.5, rope_scaling=None),
     dict(rope_parameters={"rope_type": "default", "rope_theta": 500.0,
                           "partial_rotary_factor": 0.5})),
    ("phi3", dict(rope_theta=500.0, partial_rotary_factor=0.5, original_max_position_embeddings=16,
                  rope_scaling={"type": "longrope", "short_factor": [1.0] * 3,
                                "long_factor": [2.0] * 3}),
     dict(original_max_position_embeddings=16, rope_parameters={
         "rope_type": "longrope", "type": "longrope", "short_factor": [1.0] * 3,
         "long_factor": [2.0] * 3, "original_max_position_embeddings": 16, "rope_theta": 500.0,
         "partial_rotary_factor": 0.5})),
    ("smollm3", dict(rope_theta=500.0, rope_scaling=YARN),
     dict(rope_parameters={**YARN, "rope_theta": 500.0})),
    ("qwen3_moe", dict(num_experts=4), dict(num_local_experts=4)),
]


@pytest.mark.parametrize("kind, older, newer", NEWER, ids=lambda value: str(value)[:20])
def test_a_config_of_transformers_5_is_read_and_written_as_of_4(kind, older, newer):
    """A folder with rope_parameters, which version 4 ignores: it would silently use its defaults.
    (5 reads the form of 4.)"""
    sizes = {k: v for k, v in new().items() if not k.startswith("r")} | {"model_type": kind}
    if kind == "gpt_neox":
        del sizes["num_key_value_heads"]
    sizes |= {"moe_intermediate_size": 24} if kind == "qwen3_moe" else {}
    older, newer = {**sizes, **older}, {**sizes, **newer}
    assert llama.fields_of(newer) == llama.fields_of(older)


@pytest.mark.parametrize("kind, changes", [
    ("gpt2", dict(n_embd="hidden_size", n_head="num_attention_heads", n_layer="num_hidden_layers",
                  n_positions="max_position_embeddings")),
    ("bloom", dict(hidden_size="n_embed", n_head="num_attention_heads",
                   n_layer="num_hidden_layers")),
    ("gpt_neo", dict(num_heads="num_attention_heads", num_layers="num_hidden_layers")),
    ("falcon 7b", dict(hidden_size="n_embed"))])
def test_other_names_of_the_same(kind, changes):
    """A refusal of other names for the same key, as in BLOOM's own config.json."""
    _, fields = CASES[kind]
    fields = {**fields, "model_type": kind.split()[0]}
    renamed = {changes.get(name, name): value for name, value in fields.items()}
    assert llama.fields_of(renamed) == llama.fields_of(fields)


REFUSED = [
    ("gpt2", dict(scale_attn_by_inverse_layer_idx=True)), ("gpt2", dict(scale_attn_weights=False)),
    ("gpt2", dict(add_cross_attention=True)), ("opt", dict(_remove_final_layer_norm=True)),
    ("opt", dict(enable_bias=False)), ("opt", dict(layer_norm_elementwise_affine=False)),
    ("bloom", dict(apply_residual_connection_post_layernorm=True)),
    ("falcon 40b", dict(parallel_attn=False)), ("gemma3", dict(use_bidirectional_attention=True)),
    ("qwen3_moe", dict(decoder_sparse_step=3)), ("qwen3_moe", dict(mlp_only_layers=[1])),
    ("deepseek_v3", dict(attention_bias=True)), ("deepseek_v3", dict(scoring_func="softmax")),
    ("deepseek_v3", dict(topk_method="greedy")), ("starcoder2", dict(norm_type="rms_norm")),
    ("starcoder2", dict(mlp_type="gated")), ("smollm3", dict(use_sliding_window=False)),
    ("llama", dict(is_causal=False)), ("falcon rw", dict(output_attentions=True)),
    ("falcon rw", dict(_attn_implementation="eager")),
    ("gemma2", dict(_attn_implementation="sdpa"))]


def assert_not_supported(record, changes):
    """Assert that a config.json with these changes is refused in one line."""
    with pytest.raises(ConfigError, match=f"{next(iter(changes))} .*not supported") as e:
        llama.fields_of(record | changes)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("name, changes", REFUSED, ids=str)
def test_options_that_we_do_not_compute_are_refused(name, changes):
    """An option that changes no shape and that we do not compute: the model would load, and write
    nonsense."""
    kind, fields = CASES[name]
    config = getattr(peer("transformers"), f"{kind}Config")(**fields)
    assert_not_supported(json.loads(config.to_json_string(use_diff=False)), changes)


@pytest.mark.parametrize("layers, step, dense, want", [
    (6, 1, None, (0, 1)), (6, 1, [1, 0], (2, 1)), (6, 2, None, (0, 2)), (6, 3, [], (0, 3)),
    (6, 2, [0, 2], (0, 2)), (6, 2, [1], (2, 2)), (7, 1, [0, 1, 3, 5], (1, 2)), (6, 6, [], (5, 1)),
    (4, 1, [0, 2, 99], (0, 2)),
    (5, 2, None, "decoder_sparse_step 2 "), (6, 1, [5], r"mlp_only_layers \[5\] "),
    (6, 1, [1], r"mlp_only_layers \[1\] "), (2, 3, None, "decoder_sparse_step 3 "),
    (6, 1, [0, 3], r"mlp_only_layers \[0, 3\] "), (6, 0, None, "decoder_sparse_step 0: expected"),
    (6, 1, "0", "mlp_only_layers '0': expected a list"),
    (6, 1, ["0"], r"mlp_only_layers \['0'\]: expected a list")], ids=str)
def test_which_layers_have_experts(layers, step, dense, want):
    """Experts in other layers than in transformers, where config.json says it in two ways."""
    record = {**new(layers=layers, **MIXED), "model_type": "qwen3_moe", "num_experts": 4,
              "decoder_sparse_step": step, "mlp_only_layers": dense}
    if isinstance(want, str):
        with pytest.raises(ConfigError, match=want):
            llama.fields_of(record)
        return
    fields = llama.fields_of(record)
    assert (fields["dense_layers"], fields["expert_every"]) == want
    first, every = want     # as in Qwen3MoeDecoderLayer
    assert [i for i in range(layers) if i >= first and (i - first) % every == every - 1] == [
        i for i in range(layers) if i not in (dense or []) and (i + 1) % step == 0]


def test_windows_are_of_the_families_that_have_them():
    """A window in a Qwen 2 whose config.json has a sliding_window but does not use it. (A LLaMA's
    class ignores it, but its cache does not, in transformers 5.)"""
    record = {**new(layers=4), "model_type": "llama", "sliding_window": 7}
    with pytest.raises(ConfigError, match="sliding_window 7 is not supported.* only null"):
        llama.fields_of(record)
    record |= {"model_type": "qwen2", "max_window_layers": 3}
    assert not llama.fields_of(record).get("window")
    record |= {"use_sliding_window": True}
    got = llama.fields_of(record)
    assert (got["window"], got["local_layers"]) == (7, "gggl")
    record = {**new(layers=4), "model_type": "mistral", "sliding_window": 7}
    assert llama.fields_of(record)["local_layers"] == ""


def test_layers_without_rotary_positions():
    """SmolLM3's layers misread: a 1 in no_rope_layers means rotary positions, or every n-th layer
    has none; layers without them have the window, if config.json does not say which."""
    record = {**new(layers=4), "model_type": "smollm3", "use_sliding_window": True,
              "sliding_window": 7, "no_rope_layer_interval": 2}
    got = llama.fields_of(record)
    assert (got["rotary_layers"], got["local_layers"], got["window"]) == ("rnrn", "glgl", 7)
    got = llama.fields_of({**record, "no_rope_layers": [1, 0, 0, 1], "sliding_window": None})
    assert got["rotary_layers"] == "rnnr" and "window" not in got
    assert llama.fields_of({**record, "no_rope_layers": [1] * 4})["rotary_layers"] == ""
    for wrong in ([1, 0], [], [1, 0, 2, 1]):
        with pytest.raises(ConfigError, match="expected one of 0, 1 for each of 4 layers"):
            llama.fields_of({**record, "no_rope_layers": wrong})


def test_a_factor_of_0_is_refused():
    """A factor of 0 read as a derived one."""
    record = {**new(), "model_type": "granite"}
    for name in ("embedding_multiplier", "attention_multiplier", "logits_scaling"):
        with pytest.raises(ConfigError, match=f"{name} 0: expected a number above 0"):
            llama.fields_of({**record, name: 0})


def test_chatglm_of_long_texts():
    """rope_ratio misread: it divides positions in ChatGLM 2 and multiplies the base in GLM 4. In a
    ChatGLM of 65024 ids, which 2 and 3 have, config.json does not say which, so it is refused."""
    record = {**CHATGLM, "rope_ratio": 500}
    assert llama.fields_of(record)["rope_theta"] == 5e6
    with pytest.raises(ConfigError, match="rope_ratio 500 is not supported"):
        llama.fields_of({**record, "padded_vocab_size": 65024})
