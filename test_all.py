"""Every test. The reference is always something independent: one device for many, optax for the
update, the formula without a cache for generation, a run that was never stopped for one that was.

    pytest test_all.py -n auto               the quick ones, a process on each core
    pytest test_all.py -n auto -m slow       the rest: real processes, real signals
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P

import data
import model
import sample
import shard
import train

HERE = Path(__file__).parent
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    jax.config.update("jax_num_cpu_devices", 8)
# The machine code is of the worst kind, which halves the time of tests (of jax 0.10). What programs send is the same, and
# commands that tests start are compiled as for anybody.
jax.config.update("jax_disable_most_optimizations", True)
with pytest.MonkeyPatch.context() as patch:
    if jax.__version_info__ < (0, 11):      # (later ones end at a flag that is gone)
        patch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " --xla_cpu_use_fusion_emitters=false")
    jax.devices()       # now, before a test makes another number of them

TINY = dict(layers=2, d_model=32, heads=4, vocab_size=61, seq_len=16, out="", steps=20, batch=8,
            dtype="float32", warmup=3, d_ff=64)


def make(**changes):
    return train.Config(**{**TINY, **changes})


def mesh_of(text):
    sizes = shard.mesh_sizes(text)
    sizes.setdefault("data", 1)
    return shard.make_mesh(devices=jax.devices()[:int(np.prod(list(sizes.values())))], **sizes)


def tokens_of(config, count=64, seed=0):
    """Examples with something to learn in them: each id is the one before plus a step."""
    rng = np.random.default_rng(seed)
    start, step = rng.integers(0, 50, (count, 1)), rng.integers(1, 4, (count, 1))
    ids = (start + step * np.arange(config.seq_len + 1)) % config.vocab_size
    return [row.astype(np.int32) for row in ids]


def learn(config, mesh="", said=None, **given):
    """The rows of metrics.jsonl of a run in this process, without a folder. What is said goes to `said`."""
    rows, said = [], [] if said is None else said

    class Keep(train._Say):
        def line(self, text): said.append(text)
        def header(self, program): pass
        def step(self, row, took): rows.append(row)
        def evaluation(self, row, text): rows.append(row)

    T = config.seq_len
    init, loss, _ = train.language(config)
    result = train.fit(config, **{**dict(
        init=init, collate=lambda e: data.collate(e, T), loss=loss,
        examples=tokens_of(config), mesh=mesh_of(mesh), say=Keep(config)), **given})
    return rows, result


def program_of(config, mesh):
    return train.build(config, mesh_of(mesh), *train.language(config))


def batch_of(config, seed=1, weights=None):
    rows = data.collate(tokens_of(config, config.batch, seed), config.seq_len)
    rows["seeds"] = np.arange(config.batch, dtype=np.uint32)
    if weights is not None:
        rows["weights"] = weights.astype(np.float32)
    return rows


def gradients_of(config, mesh, batch):
    """The gradient that a step applies, recovered from plain SGD: no optimizer in the way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "optimizer", lambda config, decisions: optax.identity())
        patch.setattr(train, "schedule", lambda config, step: jnp.float32(1.0))
        program = program_of(config, mesh)
        with jax.set_mesh(program.mesh):
            state = program.start(jax.random.key(0))
            before = jax.device_get(state["params"])
            placed = train._place(program, lambda a, b: {k: v[a:b] for k, v in batch.items()},
                                  config.batch)
            state, metrics = program.step(state, placed)
            after = jax.device_get(state["params"])
    return jax.tree.map(lambda a, b: a - b, before, after), float(metrics["loss"])


# ---- the command line in a process of its own

def command(*words, file="train.py", env=None, **more):
    return subprocess.run([sys.executable, str(HERE / file), *map(str, words)], text=True,
                          capture_output=True, timeout=600, cwd=more.pop("cwd", HERE),
                          env={**os.environ, "JAX_PLATFORMS": "cpu", **(env or {})}, **more)


def started(*words, file="train.py", cwd=HERE):
    """The same, and not waited for."""
    return subprocess.Popen([sys.executable, str(HERE / file), *map(str, words)], text=True, cwd=cwd,
                            env={**os.environ, "JAX_PLATFORMS": "cpu"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def until_step(at, out, *runs):
    """Wait until a run has written that many steps, or a process has ended."""
    while all(run.poll() is None for run in runs):
        with contextlib.suppress(OSError, ValueError, IndexError):
            if json.loads((Path(out) / "metrics.jsonl").read_text().splitlines()[-1])["step"] >= at:
                break
        time.sleep(0.02)


def hosts(count, *words, own=lambda i: (), cwd=lambda i: HERE, port=None, **more):
    """The same command in several processes; `own` is what only one of them is given, `cwd` where it runs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = port or free.getsockname()[1]
    return [started(*words, *own(i), "--coordinator", f"127.0.0.1:{port}", "--processes", count, "--process_id", i, cwd=cwd(i), **more)
            for i in range(count)]


def ends(runs, within=240):
    """What each process gave back and said, when all have ended by themselves."""
    begin, results = time.monotonic(), []
    try:
        for run in runs:
            out, error = run.communicate(timeout=max(1, within - (time.monotonic() - begin)))
            results.append((run.returncode, out, error))
    finally:
        for run in runs:
            run.kill()
    return results


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


SMALL = ("--layers", 2, "--d_model", 32, "--heads", 4, "--seq_len", 32, "--batch", 4)


WORDS = ("a".join(p) for p in itertools.product(("b", "ch", "d", "fr", "g"), ("l", "m", "nd", "p", "rk"),
                                                ("s", "t")))
WORDS = list(WORDS)


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for i in range(40):
        (folder / f"{i}.txt").write_text("".join(f"{WORDS[(i * j) % 50]} {i} and {WORDS[(i + j) % 50]} {j} are {i + j}\n" for j in range(60)))
    return folder


# -------------------------------------------------------------------------------------------
# Imports

def test_importing_takes_no_device():
    """A top-level jnp array or jax.devices() would fix the platform before flags are read."""
    code = ("import model, shard, train, data, sample, jax\n"
            "from jax._src import xla_bridge\nassert not xla_bridge._backends")
    done = subprocess.run([sys.executable, "-W", "error::DeprecationWarning:__main__", "-c", code],
                          cwd=HERE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# -------------------------------------------------------------------------------------------
# The mesh

@pytest.mark.parametrize("sizes, shape", [({}, (8, 1, 1, 1, 1, 1)), ({"tensor": 4}, (2, 1, 1, 1, 1, 4)),
                                          ({"data": 2, "fsdp": 2, "tensor": 2}, (2, 2, 1, 1, 1, 2))])
def test_data_takes_the_devices_that_are_left(sizes, shape):
    """Tensor innermost: its neighbours are the closest devices."""
    mesh = shard.make_mesh(**sizes)
    assert mesh.devices.shape == shape and mesh.axis_names == shard.AXES
    assert [d.id for d in mesh.devices.flat] == list(range(8))


@pytest.mark.parametrize("sizes, words", [({"tensor": 3}, ("tensor=3", "8", "1, 2, 4, 8")),
                                          ({"tensor": 16}, ("16", "8")),
                                          ({"tensr": 2}, ("tensr", "'tensor'"))])
def test_an_impossible_mesh_names_the_numbers(sizes, words):
    with pytest.raises(shard.Refused) as e:
        shard.make_mesh(**sizes)
    assert all(w in str(e.value) for w in words), e.value


# -------------------------------------------------------------------------------------------
# The rule

def specs_of(config, mesh):
    params = jax.eval_shape(lambda: model.init(config, jax.random.key(0)))
    return shard.infer_specs(lambda p, b: model.loss(p, b, config), params,
                             model.a_batch(config, 2), mesh=mesh_of(mesh))


@pytest.mark.parametrize("tied", [False, True])
def test_the_decoder_is_split_column_row(tied):
    """Megatron's table: heads and hidden out of the stream are columns, into it rows, the
    vocabulary by rows of its table. An inverted MLP costs more than no rule."""
    specs = specs_of(make(tied=tied), "tensor=4")
    layers = specs["layers"]
    assert specs["embed"] == P("tensor") and specs["norm"] == P()
    assert tied or specs["head"] == P(None, "tensor")
    for name in ("wq", "wk", "wv", "w_gate", "w_up"):
        assert layers[name] == P(None, None, "tensor"), name
    for name in ("wo", "w_down"):
        assert layers[name] == P(None, "tensor"), name
    assert layers["attn_norm"] == layers["mlp_norm"] == P()


def test_too_few_kv_heads_stay_whole_and_queries_split():
    """Splitting 2 key/value heads four ways would cut through a head."""
    layers = specs_of(make(kv_heads=2), "tensor=4")["layers"]
    assert layers["wk"] == layers["wv"] == P()
    assert layers["wq"] == P(None, None, "tensor") and layers["wo"] == P(None, "tensor")
    assert specs_of(make(kv_heads=2), "tensor=2")["layers"]["wk"] == P(None, None, "tensor")
    for kv_heads in (3, 6):     # as 10 of 40 on 4: three quarters of a group on each device
        layers = specs_of(make(heads=12, kv_heads=kv_heads, head_dim=8), "tensor=4")["layers"]
        assert layers["wk"] == P() and layers["wq"] == P(None, None, "tensor") and layers["wo"] == P(None, "tensor")
    # A loss that jax has traced before, for another mesh.
    config = make(heads=12, kv_heads=3, head_dim=8)
    params, fn = jax.eval_shape(lambda: model.init(config, jax.random.key(0))), jax.jit(lambda p, x: model.forward(p, x, config))
    for mesh, want in (("data=8", P()), ("tensor=4", P(None, None, "tensor")), ("data=8", P())):
        assert shard.infer_specs(fn, params, I(2, 16), mesh=mesh_of(mesh))["layers"]["wq"] == want


# ---- published architectures in a few lines each, written in the ways they are found: fused and
# not, (in, out) and (out, in), lists and dicts, learned and relative positions

SB, ST, SD, SH, SN, SF, SV, SL = 4, 16, 64, 8, 8, 256, 128, 2
COLUMN, ROW = P(None, "tensor"), P("tensor")
MEGATRON = [(r"\.[qkv]\.kernel|fc1\.kernel", COLUMN), (r"\.o\.kernel|fc2\.kernel", ROW), (r"(wte|shared)$", ROW)]


def _norm(p, x):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]


def _rms(p, x):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * p["scale"]


def _dense(p, x):
    return x @ p["kernel"] + p.get("bias", 0)


def _heads(x, heads=SH):
    return x.reshape(*x.shape[:-1], heads, -1)


def _attend(q, k, v, bias=0.0, causal=False):
    s = jnp.einsum("bthn,bshn->bhts", q, k) / SN**0.5 + bias
    if causal:
        s = jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -1e30)
    return jnp.einsum("bhts,bshn->bthn", jax.nn.softmax(s), v).reshape(*q.shape[:2], -1)


def _mha(p, x, y=None, **k):
    q, k_, v = (_heads(_dense(p[n], x if n == "q" or y is None else y)) for n in "qkv")
    return _dense(p["o"], _attend(q, k_, v, **k))


def _mlp(p, x, act=jax.nn.gelu):
    return _dense(p["fc2"], act(_dense(p["fc1"], x)))


def _nats(logits, targets):
    said = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - said)


def _conv(p, x, stride, numbers):
    return p["bias"] + jax.lax.conv_general_dilated(
        x, p["kernel"], stride, "VALID" if len(stride) == 2 else "SAME", dimension_numbers=numbers)


class Weights:
    """Random weights by their shapes."""
    def __init__(self, seed=0):
        self.rng = np.random.default_rng(seed)

    def __call__(self, *shape):
        return jnp.asarray(self.rng.normal(size=shape) * 0.1, jnp.float32)

    def lin(self, i, o, bias=True):
        return {"kernel": self(i, o), **({"bias": self(o)} if bias else {})}

    def ln(self):
        return {"scale": 1 + self(SD), "bias": self(SD)}

    def qkvo(self, without=""):
        return {n: self.lin(SD, SD, n not in without) for n in "qkvo"}

    def mlp(self, bias=True):
        return {"fc1": self.lin(SD, SF, bias), "fc2": self.lin(SF, SD, bias)}


def opt(w, ids):
    """Positions with an offset of 2, in a table of an odd length; every bias; tied."""
    p = {"wte": w(SV, SD), "wpe": w(66, SD), "final": w.ln(),
         "layers": [{"ln1": w.ln(), "attn": w.qkvo(), "ln2": w.ln(), "mlp": w.mlp()} for _ in range(SL)]}
    def fn(p, ids):
        x = p["wte"][ids] + p["wpe"][jnp.arange(ST) + 2]
        for q in p["layers"]:
            x = x + _mha(q["attn"], _norm(q["ln1"], x), causal=True)
            x = x + _mlp(q["mlp"], _norm(q["ln2"], x), jax.nn.relu)
        return _nats(_norm(p["final"], x) @ p["wte"].T, ids)
    return fn, p, (ids,), MEGATRON


def bloom(w, ids):
    """ALiBi; queries, keys and values interleaved per head [H, 3, N]; a norm after the embedding."""
    p = {"wte": w(SV, SD), "ln": w.ln(), "final": w.ln(),
         "layers": [{"ln1": w.ln(), "qkv": w.lin(SD, 3 * SD), "o": w.lin(SD, SD), "ln2": w.ln(), "mlp": w.mlp()}
                    for _ in range(SL)]}
    def fn(p, ids):
        x = _norm(p["ln"], p["wte"][ids])
        alibi = (2.0 ** -jnp.arange(1, SH + 1))[:, None, None] * jnp.arange(ST)
        for q in p["layers"]:
            f = _dense(q["qkv"], _norm(q["ln1"], x)).reshape(SB, ST, SH, 3, SN)
            x = x + _dense(q["o"], _attend(f[..., 0, :], f[..., 1, :], f[..., 2, :], alibi, True))
            x = x + _mlp(q["mlp"], _norm(q["ln2"], x))
        return _nats(_norm(p["final"], x) @ p["wte"].T, ids)
    return fn, p, (ids,), [("qkv.kernel", COLUMN), *MEGATRON]


def gpt2(w, ids, turn=False):
    """[Q|K|V] in one matrix, one after another."""
    t = jnp.transpose if turn else lambda a: a
    lin = lambda i, o: {"kernel": t(w(i, o)), "bias": w(o)}
    p = {"wte": w(SV, SD), "wpe": w(64, SD), "final": w.ln(),
         "h": [{"ln1": w.ln(), "c_attn": lin(SD, 3 * SD), "c_proj": lin(SD, SD), "ln2": w.ln(), "fc1": lin(SD, SF),
                "fc2": lin(SF, SD)} for _ in range(SL)]}
    d = lambda p, x: x @ t(p["kernel"]) + p["bias"]
    def fn(p, ids):
        x = p["wte"][ids] + p["wpe"][:ST]
        for q in p["h"]:
            a, b, c = jnp.split(d(q["c_attn"], _norm(q["ln1"], x)), 3, -1)
            x = x + d(q["c_proj"], _attend(_heads(a), _heads(b), _heads(c), 0.0, True))
            x = x + d(q["fc2"], jax.nn.gelu(d(q["fc1"], _norm(q["ln2"], x))))
        return _nats(_norm(p["final"], x) @ p["wte"].T, ids)
    column, row = (ROW, COLUMN) if turn else (COLUMN, ROW)
    return fn, p, (ids,), [("c_attn.kernel|fc1.kernel", column), ("c_proj.kernel|fc2.kernel", row), ("wte", ROW)]


def gpt2_out_in(w, ids):
    return gpt2(w, ids, turn=True)


def bert(w, ids, labels=0):
    """Post-norm; positions and types given and added; an output with a bias, or a classifier."""
    p = {"wte": w(SV, SD), "wpe": w(64, SD), "wtt": w(2, SD), "ln": w.ln(),
         "layer": [{"attn": w.qkvo(), "ln1": w.ln(), "mlp": w.mlp(), "ln2": w.ln()} for _ in range(SL)],
         **({"pooler": w.lin(SD, SD), "classifier": w.lin(SD, labels)} if labels else
            {"transform": w.lin(SD, SD), "tln": w.ln(), "decoder_bias": w(SV)})}
    def fn(p, ids, types, positions, mask):
        x = _norm(p["ln"], p["wte"][ids] + p["wpe"][positions] + p["wtt"][types])
        for q in p["layer"]:
            x = _norm(q["ln1"], x + _mha(q["attn"], x, bias=jnp.where(mask, 0.0, -1e9)[:, None, None]))
            x = _norm(q["ln2"], x + _mlp(q["mlp"], x))
        if labels:
            return _nats(_dense(p["classifier"], jnp.tanh(_dense(p["pooler"], x[:, 0]))), ids[:, 0] % labels)
        x = _norm(p["tln"], jax.nn.gelu(_dense(p["transform"], x)))
        return _nats(x @ p["wte"].T + p["decoder_bias"], ids)
    positions = jnp.broadcast_to(jnp.arange(ST), ids.shape)
    return fn, p, (ids, ids % 2, positions, jnp.ones(ids.shape, bool)), MEGATRON


def bert_classifier(w, ids):
    return bert(w, ids, labels=10)


def t5(w, ids):
    """Relative positions shared by the layers, no biases, cross-attention, one table for all."""
    layer = lambda *attn: {**{n: w.qkvo("qkvo") for n in attn}, "mlp": w.mlp(False),
                           **{n: {"scale": w(SD)} for n in ("n1", "n2", "n3")[:len(attn) + 1]}}
    p = {"shared": w(SV, SD), "rel": w(32, SH), "rel_dec": w(32, SH), "end": {"scale": w(SD)}, "end_dec": {"scale": w(SD)},
         "enc": [layer("attn") for _ in range(SL)], "dec": [layer("attn", "cross") for _ in range(SL)]}
    def fn(p, src, ids):
        bucket = jnp.abs(jnp.arange(ST)[:, None] - jnp.arange(ST))
        y, bias = p["shared"][src], p["rel"][bucket].transpose(2, 0, 1)[None]
        for q in p["enc"]:
            y = y + _mha(q["attn"], _rms(q["n1"], y), bias=bias)
            y = y + _mlp(q["mlp"], _rms(q["n2"], y), jax.nn.relu)
        y = _rms(p["end"], y)
        x, bias = p["shared"][ids], p["rel_dec"][bucket].transpose(2, 0, 1)[None]
        for q in p["dec"]:
            x = x + _mha(q["attn"], _rms(q["n1"], x), bias=bias, causal=True)
            x = x + _mha(q["cross"], _rms(q["n3"], x), y)
            x = x + _mlp(q["mlp"], _rms(q["n2"], x), jax.nn.relu)
        return _nats(_rms(p["end_dec"], x) * SD**-0.5 @ p["shared"].T, ids)
    return fn, p, (ids, ids), [(r"^rel", COLUMN), *MEGATRON]


def _coder(w, *attn, without=""):
    return {**{n: w.qkvo(without) for n in attn}, **{n: w.ln() for n in ("n1", "n2", "n3")[:len(attn) + 1]}, "mlp": w.mlp()}


def bart(w, ids):
    """Encoder and decoder, post-norm, biases everywhere, two tables of positions."""
    p = {"shared": w(SV, SD), "wpe": w(66, SD), "wpe_dec": w(66, SD), "ln": w.ln(), "ln_dec": w.ln(), "final_bias": w(1, SV),
         "enc": [_coder(w, "attn") for _ in range(SL)], "dec": [_coder(w, "attn", "cross") for _ in range(SL)]}
    def fn(p, src, ids):
        y = _norm(p["ln"], p["shared"][src] + p["wpe"][jnp.arange(ST) + 2])
        for q in p["enc"]:
            y = _norm(q["n1"], y + _mha(q["attn"], y))
            y = _norm(q["n2"], y + _mlp(q["mlp"], y))
        x = _norm(p["ln_dec"], p["shared"][ids] + p["wpe_dec"][jnp.arange(ST) + 2])
        for q in p["dec"]:
            x = _norm(q["n1"], x + _mha(q["attn"], x, causal=True))
            x = _norm(q["n2"], x + _mha(q["cross"], x, y))
            x = _norm(q["n3"], x + _mlp(q["mlp"], x))
        return _nats(x @ p["shared"].T + p["final_bias"], ids)
    return fn, p, (ids, ids), MEGATRON


def vit(w, ids, labels=10):
    """Patches by a convolution, a class token, learned positions that are no table, few labels."""
    p = {"patch": {"kernel": w(4, 4, 3, SD), "bias": w(SD)}, "cls": w(1, 1, SD), "pos": w(1, 17, SD), "ln": w.ln(),
         "classifier": w.lin(SD, labels), "layer": [_coder(w, "attn") for _ in range(SL)]}
    def fn(p, image, label):
        x = _conv(p["patch"], image, (4, 4), ("NHWC", "HWIO", "NHWC")).reshape(SB, -1, SD)
        x = jnp.concatenate([jnp.broadcast_to(p["cls"], (SB, 1, SD)), x], 1) + p["pos"]
        for q in p["layer"]:
            x = x + _mha(q["attn"], _norm(q["n1"], x))
            x = x + _mlp(q["mlp"], _norm(q["n2"], x))
        return _nats(_dense(p["classifier"], _norm(p["ln"], x)[:, 0]), label)
    return fn, p, (10 * w(SB, 16, 16, 3), ids[:, 0] % labels), MEGATRON


def whisper(w, ids):
    """Two convolutions before the encoder, whose positions are whole; keys without a bias."""
    conv = lambda i: {"kernel": w(3, i, SD), "bias": w(SD)}
    p = {"conv1": conv(80), "conv2": conv(SD), "wpe": w(ST, SD), "wpe_dec": w(448, SD), "shared": w(SV, SD),
         "ln": w.ln(), "ln_dec": w.ln(), "enc": [_coder(w, "attn", without="k") for _ in range(SL)],
         "dec": [_coder(w, "attn", "cross", without="k") for _ in range(SL)]}
    def fn(p, mel, ids):
        y = jax.nn.gelu(_conv(p["conv1"], mel, (1,), ("NWC", "WIO", "NWC")))
        y = jax.nn.gelu(_conv(p["conv2"], y, (2,), ("NWC", "WIO", "NWC"))) + p["wpe"]
        for q in p["enc"]:
            y = y + _mha(q["attn"], _norm(q["n1"], y))
            y = y + _mlp(q["mlp"], _norm(q["n2"], y))
        y = _norm(p["ln"], y)
        x = p["shared"][ids] + p["wpe_dec"][jnp.arange(ST)]
        for q in p["dec"]:
            x = x + _mha(q["attn"], _norm(q["n1"], x), causal=True)
            x = x + _mha(q["cross"], _norm(q["n2"], x), y)
            x = x + _mlp(q["mlp"], _norm(q["n3"], x))
        return _nats(_norm(p["ln_dec"], x) @ p["shared"].T, ids)
    return fn, p, (10 * w(SB, 2 * ST, 80), ids), MEGATRON


def falcon(w, ids, kv=1, grouped=False):
    """One norm for a parallel block; queries, one key head and one value head in one matrix, or
    grouped [G, queries + 2, N]."""
    lin = lambda i, o: w.lin(i, o, False)
    p = {"wte": w(SV, SD), "final": w.ln(),
         "h": [{"ln": w.ln(), "qkv": lin(SD, (SH + 2 * kv) * SN), "o": lin(SD, SD), "mlp": w.mlp(False)} for _ in range(SL)]}
    def fn(p, ids):
        x = p["wte"][ids]
        for q in p["h"]:
            h = _norm(q["ln"], x)
            f = _dense(q["qkv"], h)
            if grouped:
                f = f.reshape(SB, ST, kv, SH // kv + 2, SN)
                a, b, c = f[..., :-2, :].reshape(SB, ST, SH, SN), f[..., -2, :], f[..., -1, :]
            else:
                a, b, c = jnp.split(f.reshape(SB, ST, SH + 2 * kv, SN), [SH, SH + kv], 2)
            b, c = (jnp.repeat(y, SH // kv, axis=2) for y in (b, c))
            x = x + _dense(q["o"], _attend(a, b, c, 0.0, True)) + _mlp(q["mlp"], h)
        return _nats(_norm(p["final"], x) @ p["wte"].T, ids)
    return fn, p, (ids,), [("qkv.kernel", COLUMN), *MEGATRON]


def falcon_grouped(w, ids):
    return falcon(w, ids, 4, True)


def falcon_two_groups(w, ids):
    return falcon(w, ids, 2, True)


def llama(w, ids, kv=SH, regroup=False):
    """Rotary positions, gated MLP, an output of its own; keys and values of kv heads."""
    p = {"embed": w(SV, SD), "norm": {"scale": w(SD)}, "head": w(SD, SV),
         "layers": [{"n1": {"scale": w(SD)}, "wq": w(SD, SD), "wk": w(SD, kv * SN), "wv": w(SD, kv * SN), "wo": w(SD, SD),
                     "n2": {"scale": w(SD)}, "gate": w(SD, SF), "up": w(SD, SF), "down": w(SF, SD)} for _ in range(SL)]}
    def turn(x):
        t = jnp.arange(ST)[:, None, None] * 0.3 ** jnp.arange(SN // 2)
        a, b = x[..., :SN // 2], x[..., SN // 2:]
        return jnp.concatenate([a * jnp.cos(t) - b * jnp.sin(t), b * jnp.cos(t) + a * jnp.sin(t)], -1)
    def fn(p, ids):
        x = p["embed"][ids]
        for q in p["layers"]:
            h = _rms(q["n1"], x)
            a, k, v = turn(_heads(h @ q["wq"])), turn(_heads(h @ q["wk"], kv)), _heads(h @ q["wv"], kv)
            if regroup:
                s = jnp.einsum("btkgn,bskn->bkgts", a.reshape(SB, ST, kv, SH // kv, SN), k) / SN**0.5
                s = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((ST, ST), bool)), s, -1e30))
                o = jnp.einsum("bkgts,bskn->btkgn", s, v).reshape(SB, ST, -1)
            else:
                o = _attend(a, *(jnp.repeat(y, SH // kv, axis=2) for y in (k, v)), 0.0, True)
            x = x + o @ q["wo"]
            h = _rms(q["n2"], x)
            x = x + (jax.nn.silu(h @ q["gate"]) * (h @ q["up"])) @ q["down"]
        return _nats(_rms(p["norm"], x) @ p["head"], ids)
    return fn, p, (ids,), lambda shards: [("wq|gate|up|head" + "|wk|wv" * (kv % shards == 0), COLUMN),
                                          ("wo|down|embed", ROW)]


def llama_two_kv_heads(w, ids):
    return llama(w, ids, 2)


def llama_two_kv_heads_regrouped(w, ids):
    return llama(w, ids, 2, True)


def llama_one_kv_head(w, ids):
    return llama(w, ids, 1, True)


def gptj(w, ids):
    """A parallel block, biases in the MLP and in the output alone."""
    p = {"wte": w(SV, SD), "final": w.ln(), "head": w.lin(SD, SV),
         "h": [{"ln": w.ln(), "attn": w.qkvo("qkvo"), "mlp": w.mlp()} for _ in range(SL)]}
    def fn(p, ids):
        x = p["wte"][ids]
        for q in p["h"]:
            h = _norm(q["ln"], x)
            x = x + _mha(q["attn"], h, causal=True) + _mlp(q["mlp"], h)
        return _nats(_dense(p["head"], _norm(p["final"], x)), ids)
    return fn, p, (ids,), [("head.kernel", COLUMN), *MEGATRON]


STYLES = [opt, bloom, gpt2, gpt2_out_in, bert, bert_classifier, t5, bart, vit, whisper, falcon, falcon_grouped,
          falcon_two_groups, llama, llama_two_kv_heads, llama_two_kv_heads_regrouped, llama_one_kv_head, gptj]


def style(build):
    w = Weights()
    return build(w, jnp.asarray(w.rng.integers(0, SV, (SB, ST))))


def by_hand(params, rules, shards):
    """The specs of a person who knows the model: by name, whole where it does not divide."""
    paths, leaves, tree = shard.flatten(params)
    rules = rules(shards) if callable(rules) else rules
    found = [next((spec for pattern, spec in rules if re.search(pattern, path)), P()) for path in paths]
    return jax.tree.unflatten(tree, [
        spec if all(e is None or d % shards == 0 for d, e in zip(leaf.shape, spec)) else P()
        for spec, leaf in zip(found, leaves)])


def sent_by(fn, params, args, specs, mesh):
    """The compiled function with weights (and gradients, if it gives them) at the specs, and what
    it sends: how many collectives, how many bytes."""
    places, whole = shard.shardings(specs, mesh), jax.NamedSharding(mesh, P())
    outs = (whole, places) if isinstance(jax.eval_shape(fn, params, *args), tuple) else whole
    compiled = jax.jit(fn, in_shardings=(places, *[whole] * len(args)), out_shardings=outs).lower(params, *args).compile()
    rows = shard.collectives(compiled)
    return compiled, (sum(r.count for r in rows), sum(r.bytes for r in rows))


def no_worse_than_by_hand(fn, params, args, rules, shards):
    mesh = mesh_of(f"tensor={shards}")
    ours, hand = shard.infer_specs(fn, params, *args, mesh=mesh), by_hand(params, rules, shards)
    held, split = [], []
    for specs in (ours, hand):
        flat = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P))
        held.append(sum(w.size // (shards if "tensor" in s else 1) for w, s in zip(jax.tree.leaves(params), flat)))
        split.append({path for path, s in zip(shard.flatten(params)[0], flat) if "tensor" in s})
    assert held[0] <= held[1]
    assert split[1] <= split[0], "whatever is split by hand is split"
    line = f"{shards} shards, weights {held[0] / held[1]:.3f} of those by hand"
    for f in (fn, jax.value_and_grad(fn)):
        compiled, (count, size) = sent_by(f, params, args, ours, mesh)
        most_count, most_size = sent_by(f, params, args, hand, mesh)[1]
        line += f"; {count} collectives by the rule, {most_count} by hand, bytes {size / most_size:.3f}"
        assert count <= most_count and size <= most_size, line
    print(line)
    return ours, compiled


@pytest.mark.parametrize("shards, build", [
    (n, b) if n == 4 and b is gpt2 else slow(n, b) for n in (4, 2, 8) for b in STYLES])
def test_no_published_style_sends_more_than_by_hand(shards, build):
    """Redco's names and alphabetical order need 1.5 to 4.7 times the collectives on seven of ten."""
    fn, params, args, rules = style(build)
    computes_the_same(fn, params, args, *no_worse_than_by_hand(fn, params, args, rules, shards), shards)


def computes_the_same(fn, params, args, specs, compiled, shards):
    """Value and gradients of the sharded function, leaf by leaf, as of the unsharded one."""
    places = shard.shardings(specs, mesh_of(f"tensor={shards}"))
    value, grads = compiled(jax.device_put(params, places), *args)
    want_value, want = jax.jit(jax.value_and_grad(fn))(params, *args)
    assert float(value) == pytest.approx(float(want_value), rel=1e-6)
    total = float(optax.tree.norm(want))
    for path, a, b in zip(shard.flatten(params)[0], jax.tree.leaves(grads), jax.tree.leaves(want)):
        # Sums over devices in another order, in float32: relative to the leaf, or (a key's bias has
        # no gradient but rounding) to all of them.
        assert np.linalg.norm(a - b) < 2e-5 * np.linalg.norm(b) + 1e-6 * total, path


FLAX = {        # class, configuration, what it is given, and how Megatron's authors would split it
    "Llama": ("ForCausalLM", dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8),
              "tokens", [("[qkv]_proj|gate_proj|up_proj|lm_head", COLUMN), ("o_proj|down_proj|embed_tokens", ROW)]),
    "GPTJ": ("ForCausalLM", dict(n_embd=64, n_layer=2, n_head=8, rotary_dim=4, n_positions=32), "tokens",
             [("[qkv]_proj.k|fc_in.k|lm_head.k", COLUMN), ("out_proj.k|fc_out.k|wte", ROW)]),
    "GPT2": ("LMHeadModel", dict(n_embd=64, n_layer=2, n_head=8, n_positions=32), "tokens",
             [("c_attn.k|c_fc.k", ROW), ("c_proj.k", COLUMN), ("wte", ROW)]),
    "OPT": ("ForCausalLM", dict(hidden_size=64, word_embed_proj_dim=64, ffn_dim=128, num_hidden_layers=2, num_attention_heads=8,
                                max_position_embeddings=2048), "tokens",
            [("[qkv]_proj.k|fc1.k", COLUMN), ("out_proj.k|fc2.k|embed_tokens", ROW)]),
    "Bloom": ("ForCausalLM", dict(hidden_size=64, n_layer=2, n_head=8), "tokens",
              [("query_key_value.k|dense_h_to_4h.k", COLUMN), ("self_attention.dense.k|4h_to_h.k|word_embeddings.e", ROW)]),
    "Bert": ("ForMaskedLM", dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8), "tokens",
             [("(query|key|value|intermediate.dense).k", COLUMN), ("output.dense.k|word_embeddings", ROW)]),
    "T5": ("ForConditionalGeneration", dict(d_model=64, d_kv=8, d_ff=128, num_layers=2, num_heads=8), "pairs",
           [(r"\.(q|k|v|wi)\.k|relative_attention_bias", COLUMN), (r"\.(o|wo)\.k|shared", ROW)]),
    "Bart": ("ForConditionalGeneration", dict(
        d_model=64, encoder_ffn_dim=128, decoder_ffn_dim=128, encoder_layers=2, decoder_layers=2, encoder_attention_heads=8,
        decoder_attention_heads=8), "pairs", [("[qkv]_proj.k|fc1.k", COLUMN), ("out_proj.k|fc2.k|shared", ROW)]),
    "ViT": ("ForImageClassification", dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8,
                                           image_size=32, patch_size=8, num_labels=8), "images",
            [("(query|key|value|intermediate.dense).k", COLUMN), ("output.dense.k", ROW)]),
    "Whisper": ("ForConditionalGeneration", dict(
        d_model=64, encoder_ffn_dim=128, decoder_ffn_dim=128, encoder_layers=2, decoder_layers=2, encoder_attention_heads=8,
        decoder_attention_heads=8, max_source_positions=16, num_mel_bins=80, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1), "sounds", [("[qkv]_proj.k|fc1.k", COLUMN), ("out_proj.k|fc2.k|embed_tokens", ROW)]),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FLAX)
def test_other_peoples_models_send_no_more_than_by_hand(family, monkeypatch):
    """Flax models of the transformers package, whose authors never heard of this rule."""
    transformers = peer("transformers")
    peer("flax")
    clip = jnp.clip         # T5 still calls it by names that jax has dropped
    monkeypatch.setattr(jnp, "clip", lambda x, a_min=None, a_max=None, **k: clip(x, a_min, a_max, **k))
    suffix, config, given, rules = FLAX[family]
    config = getattr(transformers, family + "Config")(**{"vocab_size": 512, **config})
    more = {"input_shape": (1, 80, 32)} if given == "sounds" else {}
    flax = getattr(transformers, f"Flax{family}{suffix}")(config, **more)
    w = Weights()
    ids = jnp.asarray(w.rng.integers(0, 512, (4, 16)))
    inputs = {"tokens": {"input_ids": ids}, "pairs": {"input_ids": ids, "decoder_input_ids": ids},
              "images": {"pixel_values": 10 * w(4, 3, 32, 32)},
              "sounds": {"input_features": 10 * w(4, 80, 32), "decoder_input_ids": ids}}[given]
    fn = lambda p, inputs: jnp.mean(flax(**inputs, params=p)[0] ** 2)
    found = no_worse_than_by_hand(fn, flax.params, (inputs,), rules, 4)
    computes_the_same(fn, flax.params, (inputs,), *found, 4)


@pytest.mark.parametrize("build", STYLES)
def test_names_and_their_order_change_no_spec(build):
    """JAX sorts dict keys: a rule that alternates over a listing inverts w_down and w_up."""
    fn, params, args, _ = style(build)
    mesh, rng = mesh_of("tensor=4"), np.random.default_rng(0)
    def renamed(tree, back):
        if isinstance(tree, list):
            return [renamed(x, back) for x in tree]
        if not isinstance(tree, dict):
            return tree
        names = {k: f"{rng.integers(10**9)}_{k}" for k in tree} if not back else {k: k.split("_", 1)[1] for k in tree}
        return {names[k]: renamed(tree[k], back) for k in rng.permutation(list(tree))}
    want = shard.infer_specs(fn, params, *args, mesh=mesh)
    other = shard.infer_specs(lambda p, *a: fn(renamed(p, True), *a), renamed(params, False), *args, mesh=mesh)
    assert renamed(other, True) == want


# ---- each form that a weight can take: a function, its weights, and the specs they must get

def S(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def I(*shape):
    return jax.ShapeDtypeStruct(shape, "int32")


MLP = {"up": S(64, 256), "down": S(256, 64)}
MLP_SPECS = {"up": COLUMN, "down": ROW}
X, IMAGE = S(4, 16, 64), S(4, 16, 16, 3)
T = "tensor"


def feed(p, x):
    return x + jax.nn.gelu(x @ p["up"]) @ p["down"]


def attention(p, x, q="btd,dhn->bthn", k="btd,dhn->bthn", o="bthn,hnd->btd"):
    q, k, v = jnp.einsum(q, x, p["q"]), *(jnp.einsum(k, x, p[n]) for n in "kv")
    if q.ndim == 5:
        s = jax.nn.softmax(jnp.einsum("btkgn,bskn->bkgts", q, k))
        return x + jnp.einsum(o, jnp.einsum("bkgts,bskn->btkgn", s, v), p["o"])
    if k.shape[2] < q.shape[2]:
        k, v = (jnp.tile(a, (1, 1, q.shape[2] // k.shape[2], 1)) for a in (k, v))
    s = jax.nn.softmax(jnp.einsum("bthn,bshn->bhts", q, k))
    return x + jnp.einsum(o, jnp.einsum("bhts,bshn->bthn", s, v), p["o"])


def latent_attention(p, x):
    """MLA: queries, and keys with values, through narrow latents; one key of positions for all."""
    latent, where = jnp.split(x @ p["kva"], [24], -1)
    q = _heads(x @ p["qa"] @ p["qb"])
    k, v = jnp.split(_heads(latent @ p["kvb"]), 2, -1)
    return x + _attend(q * jax.nn.sigmoid(where[:, :, None]), k, v) @ p["o"]


def repeated(shapes, times):
    return jax.tree.map(lambda s: S(times, *s.shape), shapes)


def one_by_one(p, x):
    return jax.lax.fori_loop(0, 4, lambda i, x: feed(jax.tree.map(lambda w: w[i], p), x), x)


def low_rank(p, x, merged=False):
    def lin(p, x):
        return x @ (p["w"] + p["a"] @ p["b"]) if merged else x @ p["w"] + x @ p["a"] @ p["b"]
    return x + lin(p["down"], jax.nn.gelu(lin(p["up"], x)))


LOW_RANK = {"up": dict(w=S(64, 256), a=S(64, 8), b=S(8, 256)), "down": dict(w=S(256, 64), a=S(256, 8), b=S(8, 64))}
LOW_RANK_SPECS = {"up": dict(w=COLUMN, a=P(), b=COLUMN), "down": dict(w=ROW, a=ROW, b=P())}
EXPERTS = {"router": S(64, 8), "w1": S(8, 64, 256), "w2": S(8, 256, 64)}
EXPERTS_SPECS = {"router": P(), "w1": P("expert", None, T), "w2": P("expert", T)}


def every_expert(p, x):
    g, h = jax.nn.softmax(x @ p["router"]), jax.nn.gelu(jnp.einsum("btd,edf->ebtf", x, p["w1"]))
    return x + jnp.einsum("bte,ebtd->btd", g, jnp.einsum("ebtf,efd->ebtd", h, p["w2"]))


def summed_experts(p, x):
    g = jnp.moveaxis(jax.nn.softmax(x @ p["router"]), -1, 0)
    h = jax.vmap(lambda u, d: jax.nn.gelu(x @ u) @ d)(p["w1"], p["w2"])
    return x + (g[..., None] * h).sum(0)


def ragged_experts(p, x):
    x = x.reshape(-1, 64)
    best = jnp.argmax(x @ p["router"], -1)
    order, count = jnp.argsort(best), jnp.bincount(best, length=8)
    h = jax.nn.gelu(jax.lax.ragged_dot(x[order], p["w1"], count))
    return x.at[order].add(jax.lax.ragged_dot(h, p["w2"], count))


def dispatched_experts(p, x):
    g = jax.nn.softmax(x @ p["router"])
    mine = jnp.einsum("bte,btd->ebtd", jax.nn.one_hot(jnp.argmax(g, -1), 8), x)
    h = jax.nn.gelu(jnp.einsum("ebtd,edf->ebtf", mine, p["w1"]))
    return x + jnp.einsum("ebtd,bte->btd", jnp.einsum("ebtf,efd->ebtd", h, p["w2"]), g)


def conv2d(k, x, **more):
    return jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), **more)


def pyramid(p, x):
    for k in p["convs"]:
        x = jax.nn.relu(conv2d(k, x))
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
    return jax.nn.relu(x.reshape(4, -1) @ p["f1"]) @ p["f2"]


def depthwise(p, x):
    u, z = jnp.split(x @ p["in"], 2, -1)
    u = jax.lax.conv_general_dilated(u, p["conv"], (1,), [(3, 0)], feature_group_count=128, dimension_numbers=("NWC", "WIO", "NWC"))
    return x + (jax.nn.silu(u) * jnp.exp(-p["a"]) * jax.nn.silu(z)) @ p["out"]


def guarded(p, x):
    return jax.lax.cond(x.sum() > 0, lambda x: feed(p, x), lambda x: x, x)


def until(p, x):
    return jax.lax.while_loop(lambda c: c[1].sum() > 0, lambda c: (c[0] + 1, feed(p, c[1])), (0, x))[1]


def own_derivative(p, x):
    f = jax.custom_vjp(feed)
    f.defvjp(lambda p, x: (feed(p, x), (p, x)), lambda r, g: jax.vjp(feed, *r)[1](g))
    return f(p, x)


def mapped(p, x):
    return jax.shard_map(feed, mesh=mesh_of("data=2"), in_specs=(P(), P("data")), out_specs=P("data"))(p, x)


def modulated(p, x, t):
    """DiT: 3 D of scales, shifts and gates from a condition, in one product; they meet the stream,
    which is whole."""
    scale, shift, gate = jnp.split(jax.nn.silu(t) @ p["ada"], 3, -1)
    return x + gate[:, None] * (feed(p["mlp"], x * (1 + scale[:, None]) + shift[:, None]))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    up: object
    down: object
    act: object = dataclasses.field(metadata=dict(static=True), default=jax.nn.gelu)

    def __call__(self, x):
        return x + self.act(x @ self.up) @ self.down


FORMS = {
    "tuples": (lambda p, x: x + jax.nn.gelu(x @ p[0]) @ p[1][0], (MLP["up"], [MLP["down"]]), (X,), (COLUMN, [ROW])),
    "a dataclass": (lambda p, x: p(x), Layer(MLP["up"], MLP["down"]), (X,), Layer(COLUMN, ROW)),
    "a leaf that is a function": (lambda p, x: x + p["act"](x @ p["up"]) @ p["down"], {**MLP, "act": jax.nn.relu}, (X,),
                                  {**MLP_SPECS, "act": P()}),
    "(out, in)": (lambda p, x: x + jax.nn.relu(x @ p["up"].T) @ p["down"].T, {"up": S(256, 64), "down": S(64, 256)}, (X,),
                  {"up": ROW, "down": COLUMN}),
    "gated in one": (lambda p, x: x + (lambda g, u: (jax.nn.silu(g) * u) @ p["down"])(*jnp.split(x @ p["both"], 2, -1)),
                     {"both": S(64, 512), "down": S(256, 64)}, (X,), {"both": COLUMN, "down": ROW}),
    "shared layers": (lambda p, x: feed(p, feed(p, x)), MLP, (X,), MLP_SPECS),
    "a scanned stack": (lambda p, x: jax.lax.scan(jax.checkpoint(lambda x, w: (feed(w, x), None)), x, p)[0], repeated(MLP, 4),
                        (X,), {"up": P("pipe", "fsdp", T), "down": P("pipe", T, "fsdp")}, "pipe=2,fsdp=2,tensor=2"),
    "a stack by index": (one_by_one, repeated(MLP, 4), (X,), {"up": P(None, None, T), "down": P(None, T)}),
    "cond": (guarded, MLP, (X,), MLP_SPECS), "while": (until, MLP, (X,), MLP_SPECS),
    "custom_vjp": (own_derivative, MLP, (X,), MLP_SPECS), "shard_map": (mapped, MLP, (X,), MLP_SPECS),
    "vmap": (lambda p, x: jax.vmap(lambda x: feed(p, x))(x), MLP, (X,), MLP_SPECS),
    "heads as a dimension": (attention, {**dict.fromkeys("qkv", S(64, 8, 8)), "o": S(8, 8, 64)}, (X,),
                             {**dict.fromkeys("qkv", P(None, T)), "o": P(T)}),
    "heads first": (lambda p, x: attention(p, x, "btd,hdn->bthn", "btd,hdn->bthn", "bthn,nhd->btd"),
                    {**dict.fromkeys("qkv", S(8, 64, 8)), "o": S(8, 8, 64)}, (X,),
                    {**dict.fromkeys("qkv", P(T)), "o": P(None, T)}),
    "six heads": (attention, {**dict.fromkeys("qkv", S(64, 6, 8)), "o": S(6, 8, 64)}, (X,), dict.fromkeys("qkvo", P())),
    "two key heads": (attention, {"q": S(64, 8, 8), **dict.fromkeys("kv", S(64, 2, 8)), "o": S(8, 8, 64)}, (X,),
                      {"q": P(None, T), "k": P(), "v": P(), "o": P(T)}),
    "groups of queries": (lambda p, x: attention(p, x, "btd,dkgn->btkgn", "btd,dkn->btkn", "btkgn,kgnd->btd"),
                          {"q": S(64, 2, 4, 8), **dict.fromkeys("kv", S(64, 2, 8)), "o": S(2, 4, 8, 64)}, (X,),
                          {"q": P(None, None, T), "k": P(), "v": P(), "o": P(None, T)}),
    "low rank": (low_rank, LOW_RANK, (X,), LOW_RANK_SPECS),
    "low rank, merged": (lambda p, x: low_rank(p, x, True), LOW_RANK, (X,), LOW_RANK_SPECS),
    "every expert": (every_expert, EXPERTS, (X,), EXPERTS_SPECS, "expert=2,tensor=2"),
    "every odd expert": (summed_experts, {"router": S(64, 8), "w1": S(8, 64, 31), "w2": S(8, 31, 64)}, (X,),
                         {"router": P(), "w1": P("expert"), "w2": P("expert")}, "expert=2,tensor=2"),
    "ragged experts": (ragged_experts, EXPERTS, (X,), EXPERTS_SPECS, "expert=2,tensor=2"),
    "dispatched experts": (dispatched_experts, EXPERTS, (X,), EXPERTS_SPECS, "expert=4,tensor=2"),
    "convolutions": (pyramid, {"convs": [S(3, 3, 3, 64), S(3, 3, 64, 64), S(3, 3, 64, 64)], "f1": S(256, 512), "f2": S(512, 10)},
                     (IMAGE,), {"convs": [P(), P(None, None, None, T), P(None, None, T)], "f1": COLUMN, "f2": ROW}),
    "a depthwise convolution": (depthwise, {"in": S(64, 256), "conv": S(4, 1, 128), "a": S(128), "out": S(128, 64)}, (X,),
                                {"in": COLUMN, "conv": P(None, None, T), "a": P(T), "out": ROW}),
    "patches by a product": (lambda p, x: feed(p["mlp"], x.reshape(4, 16, 48) @ p["patch"]), {"patch": S(48, 64), "mlp": MLP},
                             (IMAGE,), {"patch": P(), "mlp": MLP_SPECS}),
    "modulation": (modulated, {"ada": S(64, 192), "mlp": MLP}, (X, S(4, 64)), {"ada": P(), "mlp": MLP_SPECS}),
    "data that are closed over": (lambda p: feed(p["mlp"], p["table"][np.arange(64).reshape(4, 16)]),
                                  {"table": S(512, 64), "mlp": MLP}, (), {"table": ROW, "mlp": MLP_SPECS}),
    "noise for data": (lambda p: feed(p, jax.random.normal(jax.random.key(0), (4, 16, 64))), MLP, (), MLP_SPECS),
    "latent attention": (latent_attention, {"qa": S(64, 24), "qb": S(24, 64), "kva": S(64, 32), "kvb": S(24, 128), "o": S(64, 64)},
                         (X,), {"qa": P(), "qb": COLUMN, "kva": P(), "kvb": COLUMN, "o": ROW}),
    "learned queries": (lambda p, x: attention(p["att"], jnp.broadcast_to(p["ask"], (4, 12, 64))) + x[:, :12],
                        {"ask": S(12, 64), "att": {**dict.fromkeys("qkv", S(64, 8, 8)), "o": S(8, 8, 64)}}, (X,),
                        {"ask": P(), "att": {**dict.fromkeys("qkv", P(None, T)), "o": P(T)}}),
    "a mask on the weights": (lambda p, x, m: feed({k: p[k] * m[k] for k in p}, x), MLP, (X, MLP), MLP_SPECS),
    "matrices by index": (lambda p, x, i: x + jnp.einsum("bf,bfd->bd", jax.nn.gelu(jnp.einsum("bd,bdf->bf", x, p["up"][i])),
                                                         p["down"][i]), repeated(MLP, 8), (S(4, 64), I(4)),
                          {"up": P(None, None, T), "down": P(None, T)}),
    "a lookup of one": (lambda p, i: feed(p["mlp"], jax.vmap(lambda i: jax.lax.dynamic_index_in_dim(p["table"], i, keepdims=False))(i)),
                        {"table": S(512, 64), "mlp": MLP}, (I(16),), {"table": ROW, "mlp": MLP_SPECS}),
    "one token": (lambda p, i: feed(p["mlp"], p["table"][i]), {"table": S(512, 64), "mlp": MLP}, (I(),),
                  {"table": ROW, "mlp": MLP_SPECS}),
    "a chain": (lambda p, x: jax.nn.relu(jax.nn.relu(jax.nn.relu(x @ p[0]) @ p[1]) @ p[2]) @ p[3],
                [S(784, 128), S(128, 256), S(256, 256), S(256, 10)], (S(4, 784),), [COLUMN, ROW, COLUMN, ROW]),
    "a bottleneck": (lambda p, x: x + conv2d(p["c"], jax.nn.relu(conv2d(p["b"], jax.nn.relu(conv2d(p["a"], x))))),
                     {"a": S(1, 1, 128, 32), "b": S(3, 3, 32, 32), "c": S(1, 1, 32, 128)}, (S(4, 8, 8, 128),),
                     {"a": P(None, None, None, T), "b": P(None, None, T), "c": P()}),
    "an odd vocabulary": (lambda p, i: feed(p["mlp"], p["table"][i]) @ p["table"].T, {"table": S(50257, 64), "mlp": MLP},
                          (I(4, 16),), {"table": P(), "mlp": MLP_SPECS}),
    "a lookup by product": (lambda p, i: feed(p["mlp"], jax.nn.one_hot(i, 512) @ p["table"]), {"table": S(512, 64), "mlp": MLP},
                            (I(4, 16),), {"table": ROW, "mlp": MLP_SPECS}),
    "labels": (lambda p, x: feed(p["mlp"], x)[:, 0] @ p["head"], {"mlp": MLP, "head": S(64, 8)}, (X,), {"mlp": MLP_SPECS, "head": P()}),
    "an inner gradient": (lambda p, x: feed(jax.tree.map(lambda w, g: w - 0.1 * g, p, jax.grad(lambda p: feed(p, x).sum())(p)), x),
                          MLP, (X,), MLP_SPECS),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_weight_is_split_as_it_should(form):
    fn, params, args, want, *mesh = FORMS[form]
    assert shard.infer_specs(fn, params, *args, mesh=mesh_of(*mesh or ["tensor=4"])) == want


@pytest.mark.slow
@pytest.mark.parametrize("form", [f for f in FORMS if f not in ("while", "shard_map")])   # no derivative; its own mesh
def test_every_form_computes_the_same_when_it_is_split(form):
    """Values and gradients of the sharded function equal those of the unsharded one."""
    fn, params, args, specs, *mesh = FORMS[form]
    mesh = mesh_of(*mesh or ["tensor=4"])
    fake = lambda x: x if not hasattr(x, "shape") else (        # noqa: E731
        jnp.arange(np.prod(x.shape), dtype=x.dtype).reshape(x.shape) % 7 if x.dtype == jnp.int32
        else 0.1 * jax.random.normal(jax.random.key(np.prod(x.shape)), x.shape))
    arrays = [i for i, x in enumerate(jax.tree.leaves(params)) if hasattr(x, "shape")]
    leaves, tree = jax.tree.flatten(jax.tree.map(fake, params))
    def value(weights, *args):
        whole = list(leaves)
        for i, w in zip(arrays, weights):
            whole[i] = w
        return jnp.sum(fn(jax.tree.unflatten(tree, whole), *args) ** 2)
    both, weights, args = jax.value_and_grad(value), [leaves[i] for i in arrays], jax.tree.map(fake, list(args))
    places = [jax.NamedSharding(mesh, jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P))[i]) for i in arrays]
    got = jax.jit(both, in_shardings=(places, *[None] * len(args)), out_shardings=(None, places))(weights, *args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(jax.jit(both)(weights, *args))):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)


@pytest.mark.parametrize("build, table", [
    (llama, {r"gate|up$|w[qkv]|head": COLUMN, "down|wo|embed": ROW, "n1|n2|norm": P()}),
    (gptj, {r"fc1.kernel|\.[qkv]\.|head.kernel": COLUMN, r"fc2.kernel|\.o\.|wte": ROW, "fc2.bias|ln|final": P(),
            "fc1.bias|head.bias": P(T)})])
def test_the_published_tables(build, table):
    """Figures 7 and 8 of the RedCoast paper; biases follow their activations."""
    fn, params, args, _ = style(build)
    specs = shard.infer_specs(fn, params, *args, mesh=mesh_of("tensor=4"))
    for path, spec in zip(shard.flatten(params)[0], jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P))):
        assert [spec] == [s for pattern, s in table.items() if re.search(pattern, path)], path


def test_seventy_billion_weights_in_a_loop_of_eighty():
    """Every layer alike, nothing allocated; a search over combinations would not come back."""
    config = model.PRESETS["llama-70b"]
    one = jax.tree.map(lambda s: s.shape[1:], jax.eval_shape(lambda: model.init(config, jax.random.key(0)))["layers"])
    D, V = config.d_model, config.vocab_size
    params = {"embed": S(V, D), "head": S(D, V), "layers": [jax.tree.map(lambda s: S(*s), one, is_leaf=lambda x: isinstance(x, tuple))] * 80}
    rows = model._known(jnp.zeros((1, 64), jnp.int32), {})
    def fn(p, ids):
        x = p["embed"][ids]
        for i, w in enumerate(p["layers"]):
            x = model._block(w, x, i, config, rows)[0]
        return x @ p["head"]
    specs = shard.infer_specs(fn, params, I(1, 64), mesh=mesh_of("tensor=8"))
    assert specs["layers"] == [specs["layers"][0]] * 80 and specs["embed"] == ROW and specs["head"] == COLUMN
    assert specs["layers"][0] == {k: P(*s[1:]) for k, s in specs_of(config, "tensor=8")["layers"].items()}


@pytest.mark.parametrize("optimizer", [
    optax.adamw(1e-3), optax.adafactor(1e-3, min_dim_size_to_factor=8), optax.contrib.muon(1e-3), optax.sm3(1e-3),
    optax.MultiSteps(optax.lion(1e-3), 2), optax.contrib.schedule_free_adamw(1e-3)], ids=lambda o: "")
def test_optimizer_state_follows_its_weight(optimizer):
    """Redco crashes on Adafactor. Square weights: by shape alone a row's moments could be a
    column's; by the end of the path alone x.w would take w's place."""
    rng = np.random.default_rng(0)
    make_one = lambda: {"w": jnp.asarray(rng.normal(size=(16, 16)), jnp.float32),
                        "x": {"w": jnp.asarray(rng.normal(size=(16, 16)), jnp.float32)},
                        "l": [jnp.asarray(rng.normal(size=(4, 16, 32)), jnp.float32), jnp.asarray(rng.normal(size=16), jnp.float32)]}
    params, grads = make_one(), make_one()
    specs = {"w": P("tensor", "fsdp"), "x": {"w": P(None, "tensor")}, "l": [P(None, "fsdp", "tensor"), P("tensor")]}
    found = shard.state_specs(optimizer, params, specs)
    state = optimizer.init(params)
    after = lambda grads: jax.tree.leaves(optimizer.update(grads, state, params)[1])
    entry = lambda spec, d: spec[d] if d < len(spec) else None
    is_spec = lambda x: isinstance(x, P)
    # The reference: what of the state moves when one slice of one gradient does. If that is one
    # slice too, its dimension is the gradient's.
    flat, tree = jax.tree.flatten(grads)
    base, places, seen = after(grads), jax.tree.leaves(found, is_leaf=is_spec), 0
    for k, (leaf, spec) in enumerate(zip(flat, jax.tree.leaves(specs, is_leaf=is_spec))):
        for d in range(leaf.ndim):
            other = leaf.at[(slice(None),) * d + (3,)].multiply(9)
            for a, b, place in zip(base, after(jax.tree.unflatten(tree, flat[:k] + [other] + flat[k + 1:])), places):
                for e in range(np.ndim(a)):
                    if set(np.nonzero(np.asarray(a != b))[e]) == {3} and a.shape[e] == leaf.shape[d]:
                        assert entry(place, e) == entry(spec, d)
                        seen += 1
    assert seen >= 7


def test_overrides_that_cannot_be_are_refused():
    """A regex that matches nothing is a typing error, not a wish."""
    def infer(*overrides):
        return shard.infer_specs(feed, MLP, X, mesh=mesh_of("tensor=4"), overrides=overrides)
    assert infer(("up", P("tensor")))["up"] == P("tensor")
    for bad, words in [(("upp", P()), "'upp' matches no parameter; did you mean 'up'"), (("up", P("tensr")), "up: .*'tensr'.*'tensor'"),
                       (("up", P(None, None, "tensor")), "up: .*3 dimensions, the weight has 2"),
                       (("up", P("tensor", "tensor")), "up: .*twice"), (("[", P()), "not a regular expression")]:
        with pytest.raises(shard.Refused, match=words):
            infer(bad)
    with pytest.raises(shard.Refused, match="up: .* splits 63 into 4"):
        shard.infer_specs(lambda p, x: x @ p["up"], {"up": S(64, 63)}, X, mesh=mesh_of("tensor=4"), overrides=[("up", P(None, "tensor"))])


def test_the_table_tells_what_a_device_holds_and_why():
    """A weight that is left whole costs its bytes on every device: said, with the reason."""
    params, mesh = {"table": S(50257, 64), "norm": S(64), "mlp": MLP}, mesh_of("tensor=4")
    fn = lambda p, i: feed(p["mlp"], p["table"][i] * p["norm"]) @ p["table"].T
    text = shard.explain(shard.decide(fn, params, I(4, 16), mesh=mesh), params, mesh)
    row = next(line for line in text.splitlines() if line.startswith("table"))
    assert "[50257,64]" in row and "[-,-]" in row and "12.9 MB" in row and "50257 does not divide by 4" in row
    held = 4 * (50257 * 64 + 64 + 2 * 64 * 256 // 4)
    assert f"a device holds {shard.human(held)} of weights, {shard.human(held)} of gradients and {shard.human(2 * held)}" in text
    assert f"of the weights {shard.human(4 * (50257 * 64 + 64))} (99.75%) are the same on all 4 devices of tensor" in text
    assert "12.9 MB in 1: 50257 does not divide by 4" in text and "256 B in 1: it scales, or is added to, what is whole" in text
    text = shard.explain(*(lambda m: (shard.decide(fn, params, I(4, 16), mesh=m), params, m, True))(mesh_of("data=2,fsdp=2")))
    held = 4 * (50257 * 64 // 2 + 64 + 2 * 64 * 256 // 2)
    moments = 8 * (50257 * 64 // 2 + 64 + 2 * 64 * 256 // 4)      # data can split those of the MLP alone
    assert f"{shard.human(held)} of weights" in text and f"{shard.human(moments)} of AdamW's" in text
    assert "fsdp: its largest dimension left" in text and "256 B in 1: fewer than 4,096 elements" in text


@pytest.mark.parametrize("mesh, changes", [
    ("data=4", {}), ("fsdp=4", {}), ("tensor=4", {}), ("seq=4", {}), ("pipe=4", dict(microbatches=4)), ("expert=4", dict(experts=8)),
    ("data=2,fsdp=2,tensor=2", {}), ("expert=2,fsdp=2,tensor=2", dict(experts=4, shared_experts=1)),
    slow("pipe=2,data=2", dict(schedule="interleaved", chunks=2, microbatches=2)), slow("pipe=2,data=2", dict(schedule="1f1b", microbatches=2)),
    slow("pipe=2,seq=2,fsdp=2", dict(microbatches=2)), slow("data=4,seq=2", dict(remat="full", zero=1)), slow("seq=2,pipe=2", dict(schedule="1f1b")),
    slow("seq=2,tensor=2", dict(kv_heads=2)), slow("fsdp=2,pipe=2", dict(schedule="1f1b", microbatches=2)),
    slow("fsdp=2,pipe=2,tensor=2", dict(microbatches=2)), slow("fsdp=4", dict(remat="full")), slow("tensor=4", dict(remat="full", tied=True)),
    slow("tensor=4", dict(kv_heads=2)), slow("tensor=4", dict(kv_heads=1, remat="full")),
    slow("pipe=2,tensor=2", dict(schedule="1f1b", microbatches=2, remat="full")), slow("tensor=2", dict(parallel=True, remat="selective")),
    slow("pipe=2,seq=2,tensor=2", dict(microbatches=2)), slow("expert=2,tensor=2", dict(experts=4, remat="full")),
    slow("expert=2,pipe=2", dict(experts=4, schedule="1f1b", microbatches=2)),
    slow("expert=2,pipe=2", dict(experts=4, schedule="1f1b", microbatches=2, remat="full")), slow("expert=2,seq=2", dict(experts=4, parallel=True)),
    slow("tensor=2", dict(experts=4, parallel=True, shared_experts=1)), slow("fsdp=2,pipe=2,expert=2", dict(experts=4, schedule="interleaved", chunks=2)),
    # A layer a stage: nothing is computed again. Key heads that neither divide tensor nor are divided by it.
    slow("pipe=4,tensor=2", dict(schedule="1f1b", microbatches=2, remat="full")), slow("pipe=4,fsdp=2", dict(schedule="1f1b", remat="selective")),
    slow("pipe=4,expert=2", dict(experts=4, schedule="1f1b", remat="selective")), slow("pipe=4,seq=2", dict(schedule="1f1b", remat="selective")),
    ("tensor=4", dict(heads=12, kv_heads=3, head_dim=8)), slow("fsdp=2,tensor=4", dict(heads=12, kv_heads=3, head_dim=32)),
    slow("fsdp=2,tensor=4", dict(heads=12, kv_heads=3, head_dim=32, remat="selective")),
    # What a CPU sends in 16 bits it sends in 32. Weights that lie elsewhere than they are used.
    ("fsdp=2,tensor=2", dict(dtype="bfloat16")), slow("pipe=2,expert=2", dict(dtype="bfloat16", experts=4)),
    ("data=2,fsdp=2", dict(override=("w_up=-,data", "wo=fsdp,data"))), slow("pipe=2,data=2", dict(override=("w_up=-,pipe", "embed=pipe"))),
    slow("expert=2,fsdp=2", dict(experts=4, override=("e_up=-,-,expert", "wo=expert")))])
def test_the_formula_predicts_what_is_sent(mesh, changes):
    """Said beside the compiled program's figures: a gap is the compiler's, or a bug of ours."""
    program = program_of(make(layers=4, accumulate=2, vocab_size=128, **changes), mesh)
    sent = {(c.kind, c.axis): c for c in shard.collectives(train.compiled(program))}
    said = {(c.kind, c.axis): c for c in train.formula(program)}
    for key in sent.keys() | said.keys():
        if key not in said:         # the sums of losses and counts, and of the norm's squares
            assert sent[key].bytes < 200
            continue
        assert sent[key].bytes == pytest.approx(said[key].bytes, rel=0.02, abs=200), key
        # The compiler joins reductions; what a ring sends that no layer changes it sends once.
        if key[0] != "all-reduce" and key[1] != "seq":
            assert sent[key].count == said[key].count, key


@pytest.mark.parametrize("names", list(itertools.permutations("abc")))
def test_equal_prices_are_settled_by_the_order_of_use(names):
    """Three alike in a chain: (1, 2) and (2, 3) cost the same, and a dict's order would choose."""
    params = {"t": S(512, 64), **{n: S(64, 64) for n in names}}
    def chain(p, i):
        x = p["t"][i]
        for n in names:
            x = jax.nn.relu(x @ p[n])
        return x
    specs = shard.infer_specs(chain, params, I(4, 16), mesh=mesh_of("tensor=4"))
    assert [specs[n] for n in names] == [COLUMN, ROW, COLUMN]


def test_fsdp_takes_the_largest_dimension_left():
    specs = specs_of(make(d_ff=256), "fsdp=2,tensor=2")
    assert specs["layers"]["w_up"] == P(None, "fsdp", "tensor")
    assert specs["norm"] == P(), "small leaves stay whole"


def test_an_unknown_primitive_is_a_stop_not_a_crash():
    params = {"w": jax.ShapeDtypeStruct((32, 32), "float32"), "up": jax.ShapeDtypeStruct((32, 64), "float32")}
    specs = shard.infer_specs(lambda p, x: jnp.sum(x @ jnp.linalg.qr(p["w"])[0] @ p["up"]), params,
                              jax.ShapeDtypeStruct((4, 32), "float32"), mesh=mesh_of("tensor=4"))
    assert specs["w"] == P() and specs["up"] == P(None, "tensor")


def test_a_weight_that_is_scaled_or_turned_is_still_a_matrix():
    """Else it has no weight decay."""
    params = {"a": jax.ShapeDtypeStruct((64, 32), "float32"), "b": jax.ShapeDtypeStruct((64,), "float32")}
    found = shard.decide(lambda p, x: jnp.sum(x @ (0.5 * p["a"]).T + p["b"]), params,
                         jax.ShapeDtypeStruct((4, 32), "float32"), mesh=mesh_of("tensor=4"))
    assert found["a"].matrix and found["a"].spec == P("tensor")
    assert not found["b"].matrix and found["b"].spec == P("tensor")


# -------------------------------------------------------------------------------------------
# The same loss on every mesh

MESHES = ["tensor=4", "data=2,tensor=2", "data=4", "data=2,fsdp=2,tensor=2", slow("tensor=2"), slow("fsdp=4"),
          slow("fsdp=2,tensor=2")]


@pytest.fixture(scope="module")
def alone():
    return learn(make())


@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_trains_the_same_model(mesh, alone):
    """Gradients scaled by a mesh's size hide behind Adam; norms clipped on each device differ."""
    rows, result = learn(make(), mesh)
    first, last = alone[0][0], alone[0][-1]
    assert rows[0]["loss"] == pytest.approx(first["loss"], rel=2e-6)
    assert rows[0]["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-5)
    for a, b in zip(rows, alone[0], strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=5e-5), a["step"]
    assert last["loss"] < 0.8 * first["loss"], "it learns"


INTERLEAVED = dict(schedule="interleaved", chunks=2)


# Every factorisation of 8 devices over the six axes, and every way of going through the layers.
SHAPES = [dict(zip(shard.AXES, sizes)) for sizes in itertools.product((1, 2, 4, 8), repeat=6) if np.prod(sizes) == 8]
MODELS = [dict(), dict(tied=True, parallel=True, kv_heads=2), dict(experts=8, shared_experts=1), dict(dropout=0.1, experts=4, parallel=True)]


def draws(count, seed=0):
    """Meshes with what else a run may choose, at random: (mesh, model, the rest)."""
    rng, found = np.random.default_rng(seed), []
    while len(found) < count:
        mesh = SHAPES[rng.integers(len(SHAPES))]
        what = dict(MODELS[rng.integers(len(MODELS))], layers=8 if mesh["pipe"] == 8 else 4)
        rest = dict(remat=rng.choice(["none", "selective", "full"]).item(), accumulate=int(rng.choice([1, 2])),
                    zero=int(rng.choice([0, 1])))
        if mesh["pipe"] > 1:
            rest |= dict(microbatches=int(rng.choice([1, 2])), schedule=rng.choice(["gpipe", "interleaved", "1f1b"]).item())
            rest |= dict(chunks=2) if rest["schedule"] == "interleaved" else {}
        text = ",".join(f"{a}={n}" for a, n in mesh.items() if n > 1)
        try:
            config = everything(**what, **rest)
            for test in train.check, train.check_model:
                test(config, shard.make_mesh(**mesh))
        except shard.Refused:
            continue
        found.append((text, what, rest))
    return found


def everything(**changes):
    """Odd vocabulary, more than one document's worth of masks, no clipping (that Adam's first moment is
    the gradient)."""
    return make(**{**dict(heads=8, head_dim=4, batch=16, clip=1e9), **changes})


def twenty_steps(config, mesh, times=1):
    """Losses of 20 steps, each with what every expert had to do (of each time that they are made), the
    gradient of the first, and the weights after the last."""
    weights = np.random.default_rng(0).random((16, 16)) < np.linspace(0.1, 1, 16)[:, None]
    program, runs = program_of(config, mesh), []
    with jax.set_mesh(program.mesh):
        for _ in range(times):
            state, losses = shard.turned(program.start(jax.random.key(0)), config.chunks), []
            for i in range(20):
                batch = batch_of(config, i, weights)
                state, metrics = program.step(state, train._place(program, lambda a, b: {k: v[a:b] for k, v in batch.items()}, 16))
                losses.append((float(metrics["loss"]), (np.asarray(metrics.get("expert_load", 0)) * float(metrics["tokens"])).tolist()))
                if i == 0:
                    moment = shard.turned(state["opt"][1].mu, config.chunks, back=True)
                    gradient = jax.tree.map(lambda m: np.asarray(m) / np.float32(0.1), moment)
            runs.append(losses)
    return runs, gradient, state["params"]


def same_losses(run, want):
    """To the rounding that Adam magnifies. Two experts that a token likes equally, to seven digits, are a
    discontinuity: where one choice falls differently, seen in the loads, it is another run from there on."""
    for i, ((loss, load), (wanted, usual)) in enumerate(zip(run, want, strict=True)):
        moved = np.abs(np.subtract(load, usual)).sum() / 2
        if moved > 0.1:
            assert i > 2 and moved <= 2, (i, moved)
            return
        assert loss == pytest.approx(wanted, rel=5e-5 if i else 2e-6), i


@functools.cache
def on_one_device(what):
    return twenty_steps(everything(**dict(what)), "")[:2]


ROWS = re.findall(r"^\| (one device|`(--.*?)`) \| ([\d.]+) \| ([\d.]+) \|$", (HERE / "README.md").read_text(), re.M)


@pytest.mark.parametrize("flags, first, last", [pytest.param(*row[1:], id=row[0], marks=[] if i in (0, 5, 7) else pytest.mark.slow)
                                                for i, row in enumerate(ROWS)])
def test_the_readmes_table_of_loss_by_layout(flags, first, last):
    given = train._read(train.Config, flags.split(), "")[0]
    mesh = given.pop("mesh", "")
    (run,), *_ = twenty_steps(everything(layers=8, **given), mesh)
    assert run[0][0] == pytest.approx(float(first), rel=2e-6)
    if "experts" in given:
        same_losses(run, on_one_device((("layers", 8), ("experts", 8)))[0][0])
    else:
        assert run[-1][0] == pytest.approx(float(last), rel=5e-5)


DRAWN = draws(44)


@pytest.mark.parametrize("mesh, what, rest", [pytest.param(*d, id=" ".join([d[0], *(f"{k}={v}" for k, v in {**d[1], **d[2]}.items())]),
                                                           marks=[] if i < 6 else pytest.mark.slow) for i, d in enumerate(DRAWN)])
def test_any_mesh_trains_the_same_model(mesh, what, rest):
    """Gradients scaled by a mesh's size hide behind Adam; copies whose gradients were not summed drift
    apart; a collective that is not entered by all gives other numbers each time."""
    (losses, again), gradient, params = twenty_steps(everything(**what, **rest), mesh, 2)
    (want_losses,), want = on_one_device(tuple(what.items()))
    same_losses(losses, want_losses)
    total = float(optax.tree.norm(want))
    for path, a, b in zip(shard.flatten(gradient)[0], jax.tree.leaves(gradient), jax.tree.leaves(want), strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b) + 1e-7 * total, path
    for leaf in jax.tree.leaves(params):
        copies = {}
        for piece in leaf.addressable_shards:
            copies.setdefault(str(piece.index), []).append(np.asarray(piece.data))
        assert all((c == same[0]).all() for same in copies.values() for c in same)
    assert again == losses


def test_every_axis_and_choice_is_drawn():
    assert len({m for m, *_ in DRAWN}) >= 25
    for axis in shard.AXES:
        assert sum(axis in m for m, *_ in DRAWN) >= 10
        for what in MODELS:
            assert any(axis in m and what.items() <= w.items() for m, w, _ in DRAWN), (axis, what)
    for choice in (dict(schedule="1f1b"), dict(schedule="interleaved"), dict(schedule="gpipe"), dict(remat="full"), dict(zero=1),
                   dict(remat="selective"), dict(accumulate=2)):
        assert sum(choice.items() <= r.items() for *_, r in DRAWN) >= 3


@pytest.mark.parametrize("mesh", ["", "data=2,tensor=2", "fsdp=2,tensor=2"])
@pytest.mark.parametrize("changes", [dict(accumulate=4), dict(step="jit", accumulate=2)])
def test_accumulation_and_the_compilers_step_change_nothing(mesh, changes, alone):
    for a, b in zip(learn(make(**changes), mesh)[0], alone[0], strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=5e-5), a["step"]


@pytest.mark.parametrize("mesh", ["", "tensor=4", "fsdp=4,tensor=2"])
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_equal_autodiff_of_the_plain_formula(mesh, tied):
    """Leaf by leaf, with masks that differ per row: a mean of means would show here."""
    config = make(tied=tied, kv_heads=2, accumulate=1 if mesh else 2)
    weights = np.random.default_rng(0).random((8, 16)) < np.linspace(0.1, 1, 8)[:, None]
    batch = batch_of(config, weights=weights)
    got, value = gradients_of(config, mesh, batch)
    params = model.init(config, jax.random.key(0))
    plain = {k: jnp.asarray(v) for k, v in batch.items()}
    mean = lambda p: (lambda s, n: s / n)(*model.loss(p, plain, config))
    want_value, want = jax.value_and_grad(mean)(params)
    assert value == pytest.approx(float(want_value), rel=2e-6)
    total = float(optax.tree.norm(want))
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want)):
        # Both sides are p - (p - g) in float32, so each element carries the rounding of p.
        slack = 1e-5 * np.linalg.norm(b) + 1e-7 * total + 1e-7 * np.sqrt(b.size)
        assert np.linalg.norm(a - b) < slack, jax.tree_util.keystr(path)


def test_one_forward_one_backward_keeps_no_more_for_more_microbatches():
    """Read off the compiled programs: GPipe keeps every microbatch until the last has gone forward."""
    def temporaries(schedule, count):
        config = make(layers=4, batch=2 * count, microbatches=count, schedule=schedule, seq_len=32, d_model=64)
        return train.compiled(program_of(config, "pipe=4")).memory_analysis().temp_size_in_bytes
    few, many = temporaries("1f1b", 8), temporaries("1f1b", 32)
    assert many < 1.02 * few            # the ids of 48 rows more
    assert temporaries("gpipe", 32) > 2 * many


@pytest.mark.parametrize("schedule", [dict(schedule="gpipe"), slow(dict(schedule="interleaved", chunks=2))])
def test_a_pipeline_keeps_of_a_layer_what_remat_says(schedule):
    """What is decided inside is overruled outside, and a branch keeps all that it is given: this kept
    the stage's weights of every tick, whatever was asked for."""
    def temporaries(count, remat):
        config = make(layers=8, batch=2 * count, microbatches=count, seq_len=32, d_model=64, remat=remat, **schedule)
        return train.compiled(program_of(config, "pipe=4")).memory_analysis().temp_size_in_bytes
    layers = 2 * 2 * 32 * 64 * 4                # what comes into a stage's layers, of one microbatch
    more = (temporaries(32, "full") - temporaries(8, "full")) / 24
    assert more < 4 * layers * schedule.get("chunks", 1)
    assert temporaries(8, "full") < temporaries(8, "selective") / 1.5 < temporaries(8, "none") / 3


@pytest.mark.parametrize("mesh, seam", [("pipe=2", "shard.through"), ("seq=2", "shard.attend"), ("expert=2", "shard.experts")])
def test_a_loss_that_these_axes_cannot_split_is_refused(mesh, seam):
    """Each stage would take its layers for all of them, each device its time for all of it, its experts
    for all that there are."""
    def loss(params, batch, specs=None):
        x = params["embed"][batch["tokens"]]
        layer = jax.tree.map(lambda w: w[0], params["layers"])
        h = jnp.einsum("btd,edf->ebtf", x, layer["e_up"])
        x += jnp.einsum("ebtf,efd->ebtd", h, layer["e_down"]).sum(0)
        x, _ = jax.lax.scan(lambda x, w: (x + jax.nn.silu(x @ w), None), x, params["layers"]["w_up"][:, :, :32])
        return jnp.sum(x ** 2), jnp.sum(batch["weights"])
    with pytest.raises(shard.Refused, match=seam):
        learn(make(steps=1, experts=4, shared_experts=1), mesh, loss=loss)


def through_of_its_own(params, batch, specs=None, count=lambda rows: rows["targets"].size, each=True):
    """A loss that calls shard.through and nothing else of this project's."""
    def leave(params, x, rows):
        logp = jax.nn.log_softmax(x @ params["head"])
        return -jnp.take_along_axis(logp, rows["targets"][..., None], -1).sum(), count(rows)

    return shard.through(lambda p, rows: p["embed"][rows["tokens"]], lambda w, x, e, rows: (x + jnp.tanh(x @ w["wq"][:, 0] @ w["wo"][0]), None),
                         leave, {k: params[k] for k in ("embed", "head")}, params["layers"], None, batch, specs and specs["layers"])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_count_of_the_part_that_leave_is_given_is_a_part(schedule):
    def loss(params, batch, specs=None):
        with pytest.MonkeyPatch.context() as patch:
            real = shard.through
            patch.setattr(shard, "through", lambda *args: real(*args[:8], "none", 2, schedule))
            return through_of_its_own(params, batch, specs)
    rows = [learn(make(layers=4, steps=2), mesh, loss=loss)[0] for mesh in ("", "pipe=2")]
    for a, b in zip(*rows, strict=True):
        assert a["tokens"] == b["tokens"] == 128 and a["loss"] == pytest.approx(b["loss"], rel=5e-6)


@pytest.mark.parametrize("mesh, loss, says", [
    ("seq=2", lambda p, b: (model.loss(p, b, make())[0], b["targets"].size), "sum of its weights"),
    ("pipe=2", lambda p, b: through_of_its_own(p, b), "specs"),
    ("data=2", lambda p, b: (*model.loss(p, b, make()), {"tokens": jnp.ones(())}), "'tokens' is taken")])
def test_a_loss_that_would_be_silently_wrong_is_refused(mesh, loss, says):
    """A constant count of one device's part of the time; layers of which every stage takes all; a sum
    logged in the place of another."""
    with pytest.raises(shard.Refused, match=says):
        learn(make(steps=1), mesh, loss=loss)


def test_a_loss_that_was_compiled_before_and_brings_a_mask_trains_on_a_ring():
    """What a function calls shows in its computation, not in whether Python runs; what of a batch has the
    tokens' time is split with it, whatever its name."""
    config = make(steps=3)
    collate = lambda e: (lambda b: {**b, "mask": (b["tokens"] % 2 == 0).astype(np.float32)})(data.collate(e, 16))
    loss = jax.jit(lambda p, b: model.loss(p, {**b, "weights": b["weights"] * b["mask"]}, config))
    first, *rest = [learn(config, mesh, loss=loss, collate=collate)[0] for mesh in ("", "seq=2", "seq=2")]
    for rows in rest:
        assert [r["tokens"] for r in rows] == [r["tokens"] for r in first] and rows[0]["tokens"] < 128
        assert [r["loss"] for r in rows] == pytest.approx([r["loss"] for r in first], rel=5e-5)


def as_on_a_tpu(monkeypatch):
    """What is traced takes a TPU's ways; what is said of a mesh, and to its compiler, stays."""
    platform = shard.platform
    monkeypatch.setattr(shard, "platform", lambda *mesh: platform(*mesh) if mesh else "tpu")


@pytest.mark.parametrize("mesh", ["fsdp=2", "fsdp=2,tensor=2"])
def test_a_tpu_makes_a_layers_alike_matrices_one_product_where_it_keeps_none(mesh, monkeypatch):
    """Forward, forward again, and two backward. (That they are the same products, test_exchanges says.)"""
    def products(**changes):
        program = program_of(make(**changes), mesh)
        with jax.set_mesh(program.mesh):
            return program.step.lower(program.state, program.batch).as_text().count("stablehlo.dot_general")

    cases = [dict(remat="full"), dict(remat="selective"), dict(), dict(remat="full", parallel=True)]
    usual = [products(**changes) for changes in cases]
    as_on_a_tpu(monkeypatch)
    assert [a - products(**changes) for a, changes in zip(usual, cases)] == [4, 0, 0, 0]


def test_rows_in_no_group_of_a_ragged_product_may_hold_anything(monkeypatch):
    """A TPU's kernel leaves there what was there. Forward and backward, on devices that are none."""
    real = jax.lax.ragged_dot

    def anything(x, w, counts):
        dirty = lambda y, counts: jnp.where((jnp.arange(len(y)) < counts.sum())[:, None], y, jnp.nan)
        @jax.custom_vjp
        def product(x, w, counts):
            return dirty(real(x, w, counts), counts)
        def back(kept, change):
            x, w, counts = kept
            dx, dw = jax.vjp(lambda x, w: real(x, w, counts), x, w)[1](jnp.where(jnp.isnan(change), 0, change))
            return dirty(dx, counts), dw, None
        product.defvjp(lambda *args: (product(*args), args), back)
        return product(x, w, counts)

    c = make(experts=4, steps=3)
    want = learn(c)[0]
    as_on_a_tpu(monkeypatch)
    monkeypatch.setattr(shard, "_by_blocks", None)
    for mesh in ("expert=2", "expert=4", "expert=2,tensor=2"):
        # (A map over tensor holds one operation, which this is not.)
        monkeypatch.setattr(jax.lax, "ragged_dot", real if "tensor" in mesh else anything)
        assert [r["loss"] for r in learn(c, mesh)[0]] == pytest.approx([r["loss"] for r in want], rel=5e-5)


@pytest.mark.parametrize("n, R, E", [(1, 100, 4), (2, 7, 4), (1, 600, 3), (2, 64, 1)])
@pytest.mark.parametrize("share", [0, 0.5, 1])
def test_a_ragged_product_by_blocks(n, R, E, share):
    """Groups of all lengths, none of them too; what is in none is zero, whatever it holds."""
    rng = np.random.default_rng(0)
    x, w, dy = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((n, R, 8), (n, E, 8, 24), (n, R, 24)))
    for many in (np.eye(1, E, E - 1)[0], np.ones(E) / E, rng.dirichlet(np.ones(E) / 2)):
        counts = jnp.asarray(np.floor(many * share * R), jnp.int32)
        own = (jnp.arange(R) < counts.sum())[:, None]
        both = lambda f: (lambda y, pull: (y, *pull(dy)))(*jax.vjp(f, jnp.where(own, x, 1e9), w))       # noqa: E731
        plain = lambda x, w: jnp.where(own, jnp.stack([jax.lax.ragged_dot(*one, counts) for one in zip(x, w)]), 0)      # noqa: E731
        for a, b in zip(both(lambda x, w: shard._by_blocks(x, w, counts, R)), both(plain)):
            np.testing.assert_allclose(a, b, atol=1e-4)


def test_the_formula_of_another_model_is_the_rules():
    """Not the transformer's, of which the configuration would speak."""
    def init(key):
        return {"embed": jnp.ones((64, 32)), "up": jnp.ones((32, 128)), "down": jnp.ones((128, 32))}
    def loss(p, b):
        return jnp.sum((jax.nn.relu(p["embed"][b["tokens"]] @ p["up"]) @ p["down"]) ** 2), jnp.sum(b["weights"])
    program = train.build(make(), mesh_of("tensor=2"), init, loss, model.a_batch(make(), 8))
    assert {c.kind for c in train.formula(program)} == {"all-reduce"}


@pytest.mark.parametrize("mesh", ["fsdp=8", "fsdp=4,tensor=2"])
def test_the_formula_of_a_stack_whose_loss_gathers_all_at_once(mesh):
    """It is not given the specs: each weight comes once, for all micro-batches, and not layer by layer."""
    def init(key):
        return {"embed": jnp.ones((256, 64)), "up": jnp.ones((4, 64, 256)), "down": jnp.ones((4, 256, 64))}
    def loss(p, b):
        x, _ = jax.lax.scan(lambda x, w: (x + jax.nn.relu(x @ w[0]) @ w[1], None), p["embed"][b["tokens"]], (p["up"], p["down"]))
        return jnp.sum((x[:, :-1] - p["embed"][b["tokens"][:, 1:]]) ** 2), jnp.sum(b["weights"])
    config = make(accumulate=2, batch=16)
    program = train.build(config, mesh_of(mesh), init, loss, model.a_batch(config, 16))
    sent, said = ({(c.kind, c.axis): c.bytes for c in rows} for rows in (shard.collectives(train.compiled(program)), train.formula(program)))
    for key in sent.keys() | said.keys():
        assert sent.get(key, 0) == pytest.approx(said.get(key, 0), rel=0.02, abs=200), key


def test_the_timeline_is_what_the_stages_do():
    assert shard.timeline(2, 4, "interleaved", 2) == (
        "stage 0  |0|1|0|1|2|3|2|3|.|\nstage 1  |.|0|1|0|1|2|3|2|3|\n"
        "interleaved: 9 ticks for 4 microbatches of 2 chunks a stage, 11% of them idle")
    for S, M in ((2, 3), (4, 8)):
        assert f"{M + S - 1} ticks" in shard.timeline(S, M)
    assert "stage 1  |. . |0 . |1 0'|2 1'" in shard.timeline(2, 3, "1f1b")


def test_the_optimizers_state_is_split_over_data():
    """ZeRO 1: half the moments on each of two devices; the gradients scattered, the weights
    gathered, and nothing more."""
    program = program_of(make(zero=1), "data=2,tensor=2")
    moments, params = program.state["opt"][1].mu, program.state["params"]
    for m, p in zip(jax.tree.leaves(moments), jax.tree.leaves(params)):
        if p.size >= shard.FSDP_MINIMUM:
            assert np.prod(m.sharding.shard_shape(m.shape)) * 2 == np.prod(p.sharding.shard_shape(p.shape))
    sent = {(c.kind, c.axis): c.bytes for c in shard.collectives(train.compiled(program))}
    said = {(c.kind, c.axis): c.bytes for c in shard.predict(program.decisions, params, program.mesh, zero=True)}
    for kind in ("reduce-scatter", "all-gather"):
        assert sent[kind, "data"] == said[kind, "data"] > 0
    assert sent["all-reduce", "data"] == pytest.approx(said["all-reduce", "data"], abs=64)


@pytest.mark.parametrize("mesh, changes", [("fsdp=8", {}), ("data=4,tensor=2", dict(zero=1)), slow("data=2,fsdp=4", dict(zero=1, accumulate=2, batch=16)),
                                           slow("fsdp=4,tensor=2", dict(remat="full")), slow("data=2,fsdp=2,pipe=2", dict(schedule="1f1b")),
                                           ("fsdp=2", dict(remat="full")), slow("data=2,tensor=2", dict(remat="full", step="jit")),
                                           slow("pipe=2,fsdp=2", dict(remat="full", microbatches=2))])
def test_exchanges_add_up_what_a_reduce_scatter_does(mesh, changes, monkeypatch):
    """What stands for it on a TPU, on devices that are none; and that it does."""
    config = make(d_model=64, d_ff=256, seq_len=64, **changes)
    want, loss = gradients_of(config, "", batch_of(config))
    as_on_a_tpu(monkeypatch)
    found, same = gradients_of(config, mesh, batch_of(config))
    assert same == pytest.approx(loss, rel=1e-6)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want)):
        assert np.linalg.norm(a - b) < 1e-5 * np.linalg.norm(b) + 1e-7 * np.sqrt(b.size)
    kinds = {(c.kind, c.axis) for c in shard.collectives(train.compiled(program_of(config, mesh)))}
    for axis in {"fsdp"} & set(mesh.replace("=", ",").split(",")) | ({"data"} if config.zero else set()):
        assert ("all-to-all", axis) in kinds and ("reduce-scatter", axis) not in kinds


@pytest.mark.parametrize("mesh", ["seq=2", slow("seq=4,tensor=2"), slow("pipe=2,seq=2")])
def test_documents_stay_apart_around_the_ring(mesh):
    """In zigzag order a key's number is not its place: neither masks nor positions may use it."""
    config, rng = make(kv_heads=2), np.random.default_rng(0)
    batch = batch_of(config)
    batch["segments"] = np.sort(rng.integers(0, 3, (8, 16)), 1).astype(np.int32)
    starts = [[np.flatnonzero(row == s)[0] for s in row] for row in batch["segments"]]
    batch["positions"] = (np.arange(16) - np.array(starts)).astype(np.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "a_batch", lambda c, rows: {k: jax.ShapeDtypeStruct((rows, *v.shape[1:]), v.dtype)
                                                         for k, v in batch.items() if k != "seeds"})
        got, value = gradients_of(config, mesh, batch)
    plain = {k: jnp.asarray(v) for k, v in batch.items() if k != "seeds"}
    mean = lambda p: (lambda s, n: s / n)(*model.loss(p, plain, config))
    want_value, want = jax.value_and_grad(mean)(model.init(config, jax.random.key(0)))
    assert value == pytest.approx(float(want_value), rel=2e-6)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        assert np.linalg.norm(a - b) < 1e-5 * np.linalg.norm(b) + 1e-7 * np.sqrt(b.size)


def one_by_one_through_all(w, h, c, tokens):
    """The definition: every expert on every token, each by its share."""
    probs = jax.nn.softmax(h @ w["router"])
    chosen = jax.lax.stop_gradient((probs >= jnp.sort(probs, -1)[..., -c.experts_per_token, None]) * 1.0)
    shares = probs * chosen / (probs * chosen).sum(-1, keepdims=True)
    make = lambda g, u, d: (jax.nn.silu(h @ g) * (h @ u)) @ d
    out = sum(shares[..., i, None] * make(w["e_gate"][i], w["e_up"][i], w["e_down"][i]) for i in range(c.experts))
    added = 0
    for row, p, z in zip(range(len(h)), probs, jax.nn.logsumexp(h @ w["router"], -1)):
        n = tokens[row].sum()
        f = (chosen[row] * tokens[row][:, None]).sum(0) / (c.experts_per_token * max(n, 1))
        added += c.balance * c.experts * n * (f * (p * tokens[row][:, None]).sum(0) / max(n, 1)).sum() + c.router_z * (z ** 2 * tokens[row]).sum()
    return out + make(w["w_gate"], w["w_up"], w["w_down"]), added


def test_experts_equal_a_loop_over_all_of_them():
    """And what they add to the loss, for each row, with a row of which nothing is asked; with gradients."""
    c = make(experts=6, experts_per_token=3, shared_experts=2)
    w = jax.tree.map(lambda x: 3 * x[0], model.init(c, jax.random.key(0))["layers"])
    rng = np.random.default_rng(0)
    h, tokens = jnp.asarray(rng.normal(size=(4, 16, 32)), jnp.float32), (rng.random((4, 16)) < [[0], [0.3], [0.7], [1]]).astype(np.float32)
    way = jnp.asarray(rng.normal(size=h.shape), jnp.float32)

    def ours(w, h):
        gate, up = shard.columns(h, w["w_gate"], w["w_up"])
        out, (added, more) = model._experts(w, h, c, 0, {"seeds": 1, "weights": tokens}, [(model._mlp(gate, up), w["w_down"])])
        return jnp.sum(out * way) + added, (out, added, more)

    def plain(w, h):
        out, added = one_by_one_through_all(w, h, c, tokens)
        return jnp.sum(out * way) + added, (out, added, None)

    with jax.default_matmul_precision("highest"):
        (_, (out, added, more)), grads = jax.value_and_grad(ours, (0, 1), has_aux=True)(w, h)
        (_, (want, also, _)), wanted = jax.value_and_grad(plain, (0, 1), has_aux=True)(w, h)
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-5)
    assert float(added) == pytest.approx(float(also), rel=1e-5) and float(more["router_loss"]) == float(added)
    assert more["expert_load"][0].sum() == pytest.approx(tokens.sum()) and not more["expert_load"][1].any()
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * float(jnp.abs(b).max()) + 1e-6)


@pytest.mark.parametrize("mesh", ["expert=4", slow("expert=2,tensor=2"), slow("pipe=2,expert=2")])
def test_no_token_is_dropped_when_all_want_the_same_expert(mesh):
    """A router of zeros: every token chooses the first two, which are on one device."""
    c, real = make(experts=4, balance=0.0), model.init
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "init", lambda c, key: (lambda p: {**p, "layers": {**p["layers"], "router": 0 * p["layers"]["router"]}})(real(c, key)))
        got, value = gradients_of(c, mesh, batch_of(c))
        want, alone = gradients_of(c, "", batch_of(c))
    assert value == pytest.approx(alone, rel=2e-6)
    assert not want["layers"]["e_up"][:, 2:].any() and want["layers"]["e_up"][:, :2].any((0, 2, 3)).all()
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        assert np.linalg.norm(a - b) < 1e-5 * np.linalg.norm(b) + 2e-7 * np.sqrt(b.size)


def test_the_metrics_have_each_experts_load_and_any_other_sum():
    rows, _ = learn(make(experts=4, steps=2, layers=2), "expert=2,data=2")
    load = np.array(rows[0]["expert_load"])
    assert load.shape == (2, 4) and np.allclose(load.sum(1), 1, atol=1e-4) and rows[0]["router_loss"] > 0
    def loss(params, batch):
        s, c = model.loss(params, batch, make())
        return s, c, {"right": jnp.sum(batch["weights"])}
    rows, _ = learn(make(steps=2, accumulate=2), "data=2", loss=loss)
    assert rows[-1]["right"] == 1


@pytest.mark.parametrize("mesh", ["", "data=2,tensor=2"])
def test_the_loss_in_pieces_is_the_loss(mesh, monkeypatch):
    """And no array has all the logits: 8 rows of 16 tokens and 128 ids."""
    config, batch = make(), batch_of(make())
    want, value = gradients_of(config, "", batch)
    monkeypatch.setattr(model, "LOGITS", 8 * 16 * 128 // 4)
    got, again = gradients_of(config, mesh, batch)
    assert again == pytest.approx(value, rel=1e-6)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        assert np.linalg.norm(a - b) < 1e-5 * np.linalg.norm(b) + 1e-7 * np.sqrt(b.size)
    text = train.compiled(program_of(config, "")).as_text()
    assert "f32[8,4,128]" in text and "f32[8,16,128]" not in text


def test_a_pipeline_saves_its_layers_in_their_own_order(tmp_path):
    """Interleaved stages hold layers 0, 2 and 1, 3: a checkpoint of that order fits one mesh."""
    eight = jax.device_put(jnp.arange(8), jax.NamedSharding(mesh_of("pipe=4"), P("pipe")))
    held = shard.turned(eight, 2)
    assert held.tolist() == [0, 4, 1, 5, 2, 6, 3, 7] and shard.turned(held, 2, back=True).tolist() == list(range(8))
    ends = []
    for name, mesh, changes in (("a", "pipe=2,data=2", INTERLEAVED), ("b", "data=2", {})):
        learn(make(layers=4, steps=3, out=str(tmp_path / name), **changes), mesh)
        ends.append(learn(make(layers=4, steps=6, out=str(tmp_path / name)), "data=2")[0])
    for a, b in zip(*ends, strict=True):
        assert a["step"] == b["step"] >= 4 and a["loss"] == pytest.approx(b["loss"], rel=5e-6)


@contextlib.contextmanager
def in_float64():
    """Our code with twice the digits."""
    with jax.enable_x64(True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard, "cast", lambda tree, dtype: tree)
        patch.setattr(jnp, "float32", jnp.float64)      # every "in float32"
        yield patch


@pytest.mark.parametrize("mesh, changes", [
    ("", {}), ("fsdp=2,expert=2,tensor=2", dict(experts=4, shared_experts=1, dropout=0.1)), slow("pipe=2,seq=2,tensor=2", dict(microbatches=2)),
    slow("data=2,pipe=2,expert=2", dict(experts=4, schedule="1f1b", microbatches=2)), slow("tensor=4", dict(parallel=True, tied=True, remat="full")),
    slow("seq=2,expert=2,tensor=2", dict(experts=4))])
def test_gradients_equal_finite_differences(mesh, changes):
    """In float64, leaf by leaf: the derivative of the loss that a step prints, on the mesh."""
    with in_float64() as patch:
        patch.setattr(train, "optimizer", lambda config, decisions: optax.identity())
        patch.setattr(train, "schedule", lambda config, step: jnp.float64(1.0))
        config = make(d_model=16, d_ff=32, **changes)
        program, batch = program_of(config, mesh), batch_of(config, weights=np.random.default_rng(0).random((8, 16)) < 0.5)
        with jax.set_mesh(program.mesh):
            placed = train._place(program, lambda a, b: {k: v[a:b] for k, v in batch.items()}, config.batch)
            params = jax.device_get(program.start(jax.random.key(0))["params"])
            leaves, tree = jax.tree.flatten(params)

            def step(leaves):
                state = {**jax.tree.map(jnp.zeros_like, program.start(jax.random.key(0))), "params": jax.tree.unflatten(tree, leaves)}
                return program.step(jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), state, program.state), placed)

            moved = jax.tree.leaves(jax.device_get(step(leaves)[0]["params"]))
            for i, leaf in enumerate(leaves):
                way = np.random.default_rng(i).normal(size=leaf.shape)
                at = lambda h: float(step(leaves[:i] + [leaf + h * way] + leaves[i + 1:])[1]["loss"])
                slope = (at(1e-5) - at(-1e-5)) / 2e-5
                assert leaf.dtype == np.float64
                assert np.vdot(leaf - moved[i], way) == pytest.approx(slope, rel=1e-4, abs=1e-9), shard.flatten(params)[0][i]


@pytest.mark.parametrize("mesh, changes", [
    ("data=8", {}), ("tensor=8", {}), ("seq=8", {}), slow("fsdp=8", {}), slow("pipe=8", dict(microbatches=8)), slow("expert=8", {}),
    slow("expert=8", dict(experts=8)), slow("tensor=8", dict(experts=8)), slow("data=2,fsdp=2,tensor=2", {}),
    slow("pipe=2,seq=2,tensor=2", dict(microbatches=8)), slow("data=2,expert=2,tensor=2", dict(experts=4, shared_experts=1)),
    slow("pipe=4,tensor=2", dict(microbatches=8, schedule="interleaved", chunks=2))])
def test_the_work_is_divided(mesh, changes):
    """Products in the compiled step of one of 8 devices: an eighth of the whole, and a pipeline's idle ticks."""
    config = make(layers=8, d_model=64, heads=8, d_ff=128, batch=64, seq_len=32, vocab_size=256, **changes)
    one = shard.arithmetic(train.compiled(program_of(config, "")))
    # Experts' blocks are as many as there could be. Of an expert's device the rows that are in no group are skipped.
    assert (1 <= one / model.flops(config, 64 * 32) < 1.2) if config.experts else one == model.flops(config, 64 * 32)
    e = dict(mesh_of(mesh).shape)["expert"] if config.experts else 1
    each = shard.arithmetic(train.compiled(program_of(config, mesh)), 2 / e / min(2, config.experts // e) if e > 1 else 1)
    S, M = dict(mesh_of(mesh).shape)["pipe"], config.microbatches
    ticks, chunks = shard.ticks(S, M, config.schedule, config.chunks) if S > 1 else (M, 1)
    assert each <= 1.05 * one / 8 * ticks / (M * chunks)


@pytest.mark.parametrize("mesh", ["data=2,tensor=2", "fsdp=2,tensor=2", "tensor=2", "fsdp=4"])
def test_bfloat16_on_cpu(mesh, alone):
    """Done naively the compiler aborts the process on a bfloat16 sum."""
    rows, _ = learn(make(dtype="bfloat16", accumulate=2), mesh)
    exact = alone[0]
    assert rows[0]["loss"] == pytest.approx(exact[0]["loss"], rel=1e-2)
    assert rows[-1]["loss"] == pytest.approx(exact[-1]["loss"], rel=0.1)


def test_softmax_loss_and_sums_are_float32_under_bfloat16():
    """A log-softmax or a sum of micro-batch gradients in bfloat16 loses the last digits."""
    config = make(dtype="bfloat16", accumulate=2)
    program = program_of(config, "")
    with jax.set_mesh(program.mesh):
        text = str(program.step.trace(program.state, program.batch).jaxpr)
    assert re.search(r"bf16\[\d+,32,4,8\]|bf16\[32,4,8\]", text), "products are in bfloat16"
    assert not re.search(r":bf16\S* = (exp|log|logsumexp|reduce_max|rsqrt)\b", text)
    assert all(w.dtype == jnp.float32 for w in jax.tree.leaves((program.state["params"], program.state["opt"][1].mu)))


@pytest.fixture(scope="module")
def dropping():
    return learn(make(dropout=0.3, steps=3))[0]


@pytest.mark.parametrize("mesh, changes", [("data=4,tensor=2", {}), ("fsdp=2", {}), ("", dict(accumulate=4)),
                                           slow("pipe=2,seq=2", dict(microbatches=2)), slow("pipe=2", dict(schedule="1f1b", microbatches=4))])
def test_dropout_masks_belong_to_the_example(mesh, changes, dropping, alone):
    """A key per device would drop differently on every mesh, and on copies of one activation."""
    rows, _ = learn(make(dropout=0.3, steps=3, **changes), mesh)
    assert [r["loss"] for r in rows] == pytest.approx([r["loss"] for r in dropping], rel=5e-6)
    assert dropping[0]["loss"] != alone[0][0]["loss"]


def test_one_gradient_reduction_per_update_however_many_parts():
    """Autodiff left alone puts the sum over devices into every micro-batch."""
    rows = {}
    for parts in (1, 4):
        program = program_of(make(batch=32, accumulate=parts), "data=8")
        rows[parts] = shard.collectives(train.compiled(program))
    size = 4 * model.count(program.state["params"]) + 2 * 4       # the loss and the count too
    assert {r.kind for r in rows[4]} == {"all-reduce"}
    for r in rows.values():
        assert sum(c.bytes for c in r) == pytest.approx(size * 2 * 7 / 8, abs=4)
    assert [c.count for c in rows[1]] == [c.count for c in rows[4]]


@pytest.mark.parametrize("changes", [{}, dict(tied=True), dict(kv_heads=2)])
def test_the_forward_pass_reduces_twice_a_layer(changes):
    """And once for the embedding, a maximum and a sum for the loss; nothing is gathered."""
    config, mesh = make(**changes), mesh_of("data=2,tensor=4")
    params = jax.eval_shape(lambda: model.init(config, jax.random.key(0)))
    places = shard.shardings(specs_of(config, "data=2,tensor=4"), mesh)
    with jax.set_mesh(mesh):
        compiled = jax.jit(lambda p, b: model.loss(p, b, config), in_shardings=(
            places, jax.NamedSharding(mesh, P("data")))).lower(params, model.a_batch(config, 4)).compile()
    tensor = [c for c in shard.collectives(compiled) if c.axis == "tensor"]
    assert [(c.kind, c.count) for c in tensor] == [("all-reduce", 2 * 2 + 1 + 2)]
    # 2 rows a device of 16 float32: five of the width, one maximum, and the sum with the label's.
    assert tensor[0].bytes == 2 * 3 / 4 * 4 * 2 * 16 * (5 * 32 + 1 + 2)


def test_collectives_are_counted_by_hand():
    """Loops times their trips, groups in any spelling, bytes of the shortest ring."""
    mesh = mesh_of("data=2,fsdp=2,tensor=2")
    place = lambda *s: jax.NamedSharding(mesh, P(*s))

    def body(x, w):
        x = jax.lax.pcast(jax.lax.psum(x, "data"), ("data",), to="varying")
        x = x @ jax.lax.all_gather(w, "fsdp", axis=0, tiled=True)
        x = jax.lax.ppermute(x, "tensor", [(0, 1), (1, 0)])
        x = jax.lax.psum_scatter(x, ("data", "fsdp"), scatter_dimension=0, tiled=True)
        return jax.lax.all_gather(x, ("data", "fsdp"), axis=0, tiled=True)

    def loop(x, ws):
        x = jax.lax.pcast(x, ("data", "fsdp", "tensor"), to="varying")
        return jax.lax.scan(lambda x, w: (body(x, w), None), x, ws)[0][None]

    f = jax.shard_map(loop, mesh=mesh, in_specs=(P(), P(None, "fsdp")), out_specs=P(("data", "fsdp", "tensor")))
    compiled = jax.jit(f, in_shardings=(place(), place(None, "fsdp"))).lower(
        jnp.zeros((8, 16)), jnp.zeros((5, 16, 16))).compile()
    x = 4 * 8 * 16
    assert {(c.kind, c.axis): (c.count, c.bytes) for c in shard.collectives(compiled)} == {
        ("all-reduce", "data"): (5, 5 * x), ("all-gather", "fsdp"): (5, 5 * 4 * 16 * 16 // 2),
        ("collective-permute", "tensor"): (5, 5 * x), ("reduce-scatter", "data+fsdp"): (5, 5 * x * 3 // 4),
        ("all-gather", "data+fsdp"): (5, 5 * x * 3 // 4)}
    for groups, axis in (("{{0,1},{2,3},{4,5},{6,7}}", "tensor"), ("[4,2]<=[8]", "tensor"), ("{}", "data+fsdp+tensor"),
                         ("[4,2]<=[2,4]T(1,0)", "data"), ("[4,2]<=[2,2,2]T(0,2,1)", "fsdp"),
                         ("mesh['data'=2,'fsdp'=2,'tensor'=2] {'fsdp'}", "fsdp"),
                         ("mesh['a'=1,'b'=2,'c'=2,'d'=2], device_ids=([2,2,2]T(2,1,0)) {'d','c'}", "data+fsdp")):
        n = 8 if axis.count("+") == 2 else 4 if "+" in axis else 2
        assert shard._axis_of(f"replica_groups={groups}, use_global_device_ids=true", mesh) == (axis, n)


def test_arithmetic_is_counted_by_hand():
    """Products in a loop, with batch dimensions; convolutions with padding, strides and dilation; and a
    product of 16 batches as a TPU program writes it, a convolution of a dilated side."""
    def body(x, w):
        return jnp.tanh(x @ w), None
    count = lambda fn, *args: shard.arithmetic(jax.jit(fn).lower(*args).compile())
    assert count(lambda x, ws: jax.lax.scan(body, x, ws)[0], S(8, 32), S(5, 32, 32)) == 5 * 2 * 8 * 32 * 32
    assert count(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), S(3, 4, 5), S(3, 5, 6)) == 2 * 3 * 4 * 5 * 6
    def conv(stride, pad, dilated):
        fn = lambda x, k: jax.lax.conv_general_dilated(x, k, (stride,), [(pad, pad)], lhs_dilation=(dilated,))
        image = {i * dilated for i in range(10)}        # where there are numbers; the rest is nothing
        places = range(0, 9 * dilated + 1 + 2 * pad - 2, stride)
        taps = sum(o + k - pad in image for o in places for k in range(3))
        assert count(fn, S(2, 4, 10), S(6, 4, 3)) == 2 * 2 * 6 * 4 * taps, (stride, pad, dilated)
    conv(1, 0, 1), conv(2, 1, 1), conv(1, 2, 2)
    text = ", window={size=16 stride=15 pad=0_0 lhs_dilate=16}, dim_labels=0bf_0io->0bf"
    assert shard._taps([16, 8, 4], [16, 8, 32], [16, 32, 4], text) == 16 * 8 * 4 * 32


def test_weights_are_made_in_their_places():
    """Made on one device and then spread, a model that fits only split could never begin."""
    config = make(d_model=128, d_ff=512, vocab_size=1000)
    program = program_of(config, "fsdp=4,tensor=2")
    with jax.set_mesh(program.mesh):
        memory = program.start.lower(jax.random.key(0)).compile().memory_analysis()
    whole = 12 * model.count(program.state["params"])
    assert memory.output_size_in_bytes < 0.14 * whole
    # Random bits and their counters, one leaf at a time, of this device's part alone.
    assert memory.temp_size_in_bytes < 0.14 * whole


# -------------------------------------------------------------------------------------------
# The update

@in_float64()
def test_adamw_schedule_and_clipping_equal_optax():
    """And the rate in the metrics is the one that was applied. In float64: where a gradient is
    rounding alone, Adam, which divides by its size, makes a step of it."""
    config = make(clip=0.5, steps=12, warmup=4)
    rows, result = learn(config)
    rate = optax.warmup_cosine_decay_schedule(config.lr / 4, config.lr, 3, 11, config.lr / 50)
    matrices = lambda p: jax.tree_util.tree_map_with_path(
        lambda path, _: "norm" not in jax.tree_util.keystr(path), p)
    rule = optax.chain(optax.clip_by_global_norm(0.5),
                       optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.1, mask=matrices))
    params = model.init(config, jax.random.key(0))
    state, examples = rule.init(params), tokens_of(config)

    @jax.jit
    def update(params, state, batch):
        mean = lambda p: (lambda s, n: s / n)(*model.loss(p, batch, config))
        grads = jax.grad(mean)(params)
        updates, state = rule.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for at in range(12):
        chosen = data.order(64, 0, at * 8, 8)
        params, state = update(params, state, data.collate([examples[i] for i in chosen], 16))
        assert rows[at]["lr"] == pytest.approx(float(rate(at)), rel=1e-6)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(result.params)):
        assert a.dtype == b.dtype == np.float64
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)
    assert rows[-1]["lr"] == pytest.approx(config.lr / 50)
    assert max(r["lr"] for r in rows) == pytest.approx(config.lr)


@pytest.mark.parametrize("mesh", ["", "data=2,tensor=2", slow("fsdp=2,expert=2,tensor=2")])
def test_muon_makes_every_matrix_of_the_layers_orthogonal(mesh):
    """As it acts on the activations, each layer's and each expert's by itself; for the rest, Nesterov's Adam."""
    config = make(optimizer="muon", steps=1, warmup=1, weight_decay=0.0, experts=4, shared_experts=1)
    init = train.language(config)[0]
    before = init(jax.random.key(0))
    _, result = learn(config, mesh)
    sides = {"wq": 1, "wk": 1, "wv": 1, "wo": 2, "w_gate": 1, "w_up": 1, "w_down": 1, "router": 1, "e_gate": 1, "e_up": 1, "e_down": 1}
    for path, a, b in zip(shard.flatten(before)[0], jax.tree.leaves(before), jax.tree.leaves(result.params), strict=True):
        change, name = (np.asarray(a) - np.asarray(b)) / config.lr, path.split(".")[-1]
        if not path.startswith("layers") or "norm" in path:
            # A first step of Adam's is a sign; Nesterov looks ahead by another b1 (1 - b1) / (1 - b1^2).
            assert np.abs(change).max() == pytest.approx(1 + 0.09 / 0.19, abs=0.01), path
            continue
        lead = 1 + name.startswith("e_")
        inside = math.prod(a.shape[lead:lead + sides[name]])
        for one in change.reshape(-1, inside, math.prod(a.shape[lead:]) // inside):
            size = np.linalg.svd(one / (0.2 * max(one.shape) ** 0.5), compute_uv=False)
            assert np.quantile(size, 0.1) > 0.6 and size.max() < 1.3, (path, size)      # (five steps lift no nought)


# -------------------------------------------------------------------------------------------
# The model

def test_no_token_sees_a_later_one_or_another_document():
    """By gradient, not by eye."""
    config = make()
    params = model.init(config, jax.random.key(0))
    rows = {k: jnp.asarray(v)[:1] for k, v in batch_of(config).items()}
    rows["segments"] = jnp.asarray([[0] * 6 + [1] * 10])
    rows["positions"] = jnp.asarray([[*range(6), *range(10)]])

    def at(table, t):
        weights = jnp.zeros((1, 16)).at[0, t].set(1)
        return model.loss({**params, "embed": table}, {**rows, "tokens": jnp.arange(16)[None],
                                                       "weights": weights}, config)[0]

    for t in (3, 9):
        seen = np.abs(jax.grad(at)(params["embed"], t)).sum(1)[:16] > 0
        assert seen.tolist() == [(i < 6) == (t < 6) and i <= t for i in range(16)]


@pytest.mark.parametrize("time, scores, block", [(64, 2**25, 16), (64, 2**11, 16), (96, 2**10, 16), (60, 2**9, 10**9), (128, 2**12, 16),
                                                 (128, 2**25, 4)])
@in_float64()
def test_attention_in_blocks_is_attention(monkeypatch, time, scores, block):
    """Some queries at a time, with the keys that they can see: values and gradients, with documents and
    fewer key heads. It is less arithmetic, and memory that does not grow with the square of the time."""
    config = make(seq_len=time, kv_heads=2)
    batch, params = batch_of(config), model.init(config, jax.random.key(0))
    batch["segments"] = np.sort(np.random.default_rng(0).integers(0, 3, (8, time)), 1)
    both = lambda p: jax.value_and_grad(lambda p: model.loss(p, batch, config)[0])(p)     # noqa: E731
    monkeypatch.setattr(shard, "BLOCK", 10**9)
    want = both(params)
    monkeypatch.setattr(shard, "BLOCK", block)
    monkeypatch.setattr(shard, "SCORES", scores)
    ends, parts = shard.blocks(8 * 4 * time**2, time)
    longest = max(b - a for a, b in zip([0, *ends], ends))
    assert ends[-1] == time and len(ends) * parts > 1 and (8 * 4 * time * longest <= scores * parts or parts in (longest, longest // 2))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11), both(params), want)


def test_blocks_save_arithmetic_and_memory(monkeypatch):
    def of(time, ordered=True):
        shape = jax.ShapeDtypeStruct((1, time, 1, 16), jnp.float32)
        known = jax.ShapeDtypeStruct((1, time), jnp.int32)
        known = {"place": known, "document": known}
        loss = lambda q, k, v, a, b: jnp.sum(shard.attend(model._attention, q, k, v, model._seen, a, b, ordered))     # noqa: E731
        done = jax.jit(jax.grad(loss, (0, 1, 2))).lower(shape, shape, shape, known, known).compile()
        return shard.arithmetic(done), done.memory_analysis().temp_size_in_bytes

    assert of(1024)[0] <= 0.62 * of(1024, False)[0]         # 39 of 64 eighths: the last quarter alone is halved
    assert of(4096)[0] <= 0.57 * of(4096, False)[0]         # 36
    monkeypatch.setattr(shard, "SCORES", 2**16)
    assert of(4096)[1] < 2.5 * of(2048)[1] < 2.5 * 2048 * 2048


def one_operation(fn):
    """fn as one operation, which nothing looks into."""
    operation = jax.extend.core.Primitive(fn.__name__)
    operation.multiple_results = True
    operation.def_abstract_eval(lambda *args: jax.make_jaxpr(fn)(*args).out_avals)
    mlir.register_lowering(operation, mlir.lower_fun(fn, multiple_results=True))
    return operation.bind


def causal(q, k, v):
    """Causal attention that keeps for its backward pass what a GPU's kernel does, and does with it what that does."""
    seen, group = np.tril(np.ones((q.shape[1], q.shape[1]), bool)), q.shape[2] // k.shape[2]
    scores = jnp.einsum("btkgn,bskn->bkgts", q.reshape(*q.shape[:2], -1, group, q.shape[-1]), k) * q.shape[-1] ** -0.5
    scores = jnp.where(seen, scores, -jnp.inf)
    sums = jax.nn.logsumexp(scores, -1)
    found = jnp.einsum("bkgts,bskn->btkgn", jnp.exp(scores - sums[..., None]), v).reshape(q.shape)
    return found, sums.reshape(q.shape[0], q.shape[2], -1)


def causal_backward(q, k, v, found, sums, change):
    cut = lambda x: x.reshape(*x.shape[:2], k.shape[2], -1, x.shape[-1])        # noqa: E731
    scores = jnp.einsum("btkgn,bskn->bkgts", cut(q), k) * q.shape[-1] ** -0.5
    probs = jnp.exp(scores - sums.reshape(scores.shape[:-1])[..., None]) * np.tril(np.ones(scores.shape[-2:]))
    less = jnp.einsum("btkgn,btkgn->bkgt", cut(change), cut(found))[..., None]
    turned = probs * (jnp.einsum("btkgn,bskn->bkgts", cut(change), v) - less) * q.shape[-1] ** -0.5
    return (jnp.einsum("bkgts,bskn->btkgn", turned, k).reshape(q.shape), jnp.einsum("bkgts,btkgn->bskn", turned, cut(q)),
            jnp.einsum("bkgts,btkgn->bskn", probs, cut(change)))


FORWARD, BACKWARD = one_operation(causal), one_operation(causal_backward)
one_kernel = jax.custom_vjp(lambda q, k, v: FORWARD(q, k, v)[0])
one_kernel.defvjp(lambda *qkv: ((found := FORWARD(*qkv))[0], (*qkv, *found, jnp.zeros(0, qkv[0].dtype))),
                         lambda kept, change: tuple(BACKWARD(*kept[:5], change)))


@pytest.mark.parametrize("mesh, changes", [
    ("", {}), ("fsdp=2,tensor=2", dict(kv_heads=2)), ("data=2,tensor=4", dict(kv_heads=2, remat="full", accumulate=2)),
    slow("data=2,tensor=4", dict(kv_heads=1, step="jit")), slow("pipe=2,tensor=2", dict(microbatches=2, kv_heads=2, remat="selective")),
    slow("expert=2,tensor=2", dict(experts=4, step="jit"))])
@in_float64()
def test_a_kernel_is_given_each_devices_rows_and_heads(monkeypatch, mesh, changes):
    """As the device's own would be. Not where documents are told apart: of those it is not told."""
    config = make(**changes)
    want, batch, calls = gradients_of(make(**{**changes, "step": "shard_map"}), "", batch_of(config)), batch_of(config), []

    def kernel(q, k, v):
        n = dict(mesh_of(mesh).shape)["tensor"]
        assert q.shape[2] == config.heads // n and k.shape[2] == v.shape[2] == math.lcm(config.kv_heads, n) // n
        calls.append(q.shape)
        return one_kernel(q, k, v)

    monkeypatch.setattr(model, "_kernel", kernel)
    monkeypatch.setattr(shard, "fused", lambda *known: bool((known[3:] or [jax.sharding.get_abstract_mesh()])[0].shape))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-9), gradients_of(config, mesh, batch), want)
    assert calls and "kernel" in train.attends(config, mesh_of(mesh))
    rows, cache = batch["tokens"], model.new_cache(config, config.batch, 2 * config.seq_len, jnp.float32)
    for run, times in ((lambda p: model.loss(p, batch, config), 1), (lambda p: model.loss(p, {**batch, "segments": rows}, config), 0),
                       (lambda p: model.extend(p, cache, rows, 0, rows[:, 0], config), 0)):
        calls.clear()
        with jax.set_mesh(mesh_of(mesh)):
            jax.eval_shape(run, model.init(config, jax.random.key(0)))
        assert len(calls) == times


@pytest.mark.parametrize("mesh, changes", [
    ("", {}), ("data=2,tensor=4", dict(kv_heads=2, remat="full", accumulate=2)), slow("fsdp=4,tensor=2", dict(remat="full", step="jit")),
    slow("pipe=2,tensor=2", dict(kv_heads=2, microbatches=2, remat="selective")), slow("pipe=2,fsdp=2", dict(schedule="1f1b", microbatches=2))])
def test_a_tpus_kernel_finds_what_the_formula_does(monkeypatch, mesh, changes):
    """Interpreted; in the whole step, with blocks that are skipped, and the map over every axis around it."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    config, calls, make_one = make(seq_len=384, batch=4, **changes), [], splash.make_splash_mha_single_device
    batch = batch_of(config)
    want = gradients_of(dataclasses.replace(config, step="shard_map"), "", batch)

    def interpreted(*args, **options):
        calls.append(options)
        return make_one(*args, **options, interpret=True)

    monkeypatch.setattr(splash, "make_splash_mha_single_device", interpreted)
    monkeypatch.setattr(shard, "fused", lambda *known: "splash" * bool((known[3:] or [jax.sharding.get_abstract_mesh()])[0].shape))
    got = gradients_of(config, mesh, batch)
    assert calls and "splash" in train.attends(config, mesh_of(mesh))
    # Of sums of thousands in float32, in another order.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5 * np.abs(b).max()), got, want)


def test_a_kernel_is_asked_for_what_it_can():
    of = lambda kind: SimpleNamespace(abstract_mesh=SimpleNamespace(abstract_device=SimpleNamespace(device_kind=kind)))     # noqa: E731
    assert shard.fused("bfloat16", 1024, 128, of("NVIDIA H100 80GB HBM3")) and shard.fused(jnp.float16, 2, 8, of("NVIDIA A100"))
    assert shard.fused("bfloat16", 1024, 256, of("TPU v5 lite")) and shard.fused("bfloat16", 384, 64, of("TPU7x"))
    for dtype, length, width, kind in (("float32", 64, 64, "NVIDIA H100"), ("bfloat16", 63, 64, "NVIDIA H100"), ("bfloat16", 64, 20, "NVIDIA H100"),
                                     ("bfloat16", 64, 256, "NVIDIA H100"), ("bfloat16", 64, 64, "AMD Instinct MI300X"), ("bfloat16", 64, 64, "TPU v5 lite"),
                                     ("bfloat16", 128, 80, "TPU v4"), ("float32", 128, 64, "TPU v4"), ("bfloat16", 128, 64, "TPU v3")):
        assert not shard.fused(dtype, length, width, of(kind))
    assert not shard.fused("bfloat16", 64, 64), "no mesh"


@pytest.mark.parametrize("heads, kv_heads", [(6, 2), (6, 1), (2, 2)])
def test_heads_that_tensor_does_not_divide(heads, kv_heads):
    """No training step has them; a model that is called by itself may."""
    config = make(heads=heads, kv_heads=kv_heads, head_dim=8)
    params, rows = model.init(config, jax.random.key(0)), batch_of(config)["tokens"]
    want = model.forward(params, rows, config)
    with jax.set_mesh(mesh_of("data=2,tensor=4")):
        np.testing.assert_allclose(jax.jit(lambda p: model.forward(p, rows, config))(params), want, atol=1e-5)


def test_layers_are_no_loop_on_a_lone_cpu(monkeypatch):
    """Where nothing is computed again and they are few; and nothing else changes."""
    config = make(layers=4)
    loops = lambda config, mesh="": train.compiled(program_of(config, mesh)).as_text().count(" while(")     # noqa: E731
    few, batch = loops(config), batch_of(config)
    want = gradients_of(config, "", batch)
    assert loops(make(layers=4, remat="full")) == loops(make(layers=shard.UNROLLED + 1)) > few
    assert loops(config, "data=8") > few
    # Scores that are to be computed again are: the compiler would make one of both.
    with monkeypatch.context() as patch:
        patch.setattr(shard, "SCORES", 2**22)       # half of them: without a loop a block would be one part
        long = make(layers=4, seq_len=512)
        done = [train.compiled(program_of(long, ""))]
        patch.setattr(shard, "UNROLLED", 0)
        done.append(train.compiled(program_of(long, "")))
        assert shard.arithmetic(done[0]) == pytest.approx(shard.arithmetic(done[1]), rel=0.01)
        assert done[0].memory_analysis().temp_size_in_bytes < 1.2 * done[1].memory_analysis().temp_size_in_bytes
    monkeypatch.setattr(shard, "UNROLLED", 3)
    assert loops(config) > few
    got = gradients_of(config, "", batch)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), got, want)


def test_positions_are_relative():
    """Shifting every position must change nothing: rates that differ between q and k would."""
    config = make()
    params = model.init(config, jax.random.key(0))
    tokens = jnp.asarray(batch_of(config)["tokens"])
    where = jnp.broadcast_to(jnp.arange(16), tokens.shape)
    a = model.forward(params, tokens, config, positions=where)
    b = model.forward(params, tokens, config, positions=where + 1000)
    np.testing.assert_allclose(a, b, atol=3e-4)     # float32 angles near 1000 carry 6e-5
    c = model.forward(params, tokens, config, positions=where * 2)
    assert float(jnp.abs(a - c).max()) > 1e-2


def test_padded_ids_are_never_said_and_never_learn():
    config = make(tied=True)
    params = model.init(config, jax.random.key(0))
    assert params["embed"].shape == (128, 32)
    got, _ = gradients_of(config, "tensor=4", batch_of(config))
    assert (got["embed"][61:] == 0).all() and (got["embed"][:61] != 0).any(1).all()
    assert model.forward(params, jnp.zeros((1, 4), int), config).shape == (1, 4, 61)


def peer(name):
    """A reference to compare with: where it is missing the test skips; in .ci/run it fails."""
    if os.environ.get("ZIGZAG_CI"):
        return __import__(name)
    return pytest.importorskip(name, reason="pip install -r requirements-peers.txt")


def test_the_decoder_is_transformers_llama():
    """Rotation, norms, grouping and the MLP's halves: a convention that is not the published
    one trains just as well and loads nothing."""
    torch, transformers = peer("torch"), peer("transformers")
    config = make(vocab_size=128, kv_heads=2)
    p = jax.tree.map(np.asarray, model.init(config, jax.random.key(3)))
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, rms_norm_eps=1e-6, rope_theta=10000.0, attention_bias=False,
        tie_word_embeddings=False, attn_implementation="eager"))
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
    np.testing.assert_allclose(model.forward(p, jnp.asarray(tokens), config), want, atol=2e-5)


def test_parameter_counts_are_the_published_ones():
    """LLaMA-7B has 6,738,415,616 parameters; the head and the table are 32000 x 4096 each."""
    shapes = jax.eval_shape(lambda: model.init(model.PRESETS["llama-7b"], jax.random.key(0)))
    assert model.count(shapes) == 6_738_415_616


# -------------------------------------------------------------------------------------------
# Data

@pytest.mark.parametrize("count", [1, 2, 3, 63, 64, 65, 1000, 4097])
def test_each_epoch_is_a_shuffle_without_repeats(count):
    everything = data.order(count, 7, 0, 3 * count)
    epochs = everything.reshape(3, count)
    assert all(sorted(e) == list(range(count)) for e in epochs)
    pieces = [data.order(count, 7, a, 1)[0] for a in range(min(3 * count, 200))]
    assert pieces == everything[:len(pieces)].tolist(), "whatever is asked for at a time"
    if count > 60:
        assert (epochs[0] != epochs[1]).any() and (epochs[0] != data.order(count, 8, 0, count)).any()
        assert abs(np.corrcoef(epochs[0], np.arange(count))[0, 1]) < 5 / count**0.5     # five sigma


def test_order_takes_no_memory():
    assert (data.order(10**15, 0, 10**14, 4) < 10**15).all()


def test_bytes_and_pieces_give_the_text_back(tmp_path, text):
    """Newlines, runs of spaces, tabs, other scripts, and bytes that are no text."""
    corpus = data.prepare([str(text)], tmp_path / "p", 400)
    assert corpus.tokenizer.vocab_size == 400 and corpus.train.dtype == np.uint16
    for tokenizer in (corpus.tokenizer, data.Bytes()):
        for words in ("7 and 8 are 15\n", "  two  spaces\n\n\ttab", "naïve 日本語 🙂", "", " x"):
            ids = tokenizer.encode(words)
            assert tokenizer.decode(ids) == words
            assert tokenizer.lengths()[ids].sum() == len(words.encode())
        assert tokenizer.decode(tokenizer.encode(b"\xff\xfe")) is not None
        with pytest.raises(UnicodeEncodeError):
            tokenizer.encode("\udcff")
    assert len(corpus.tokenizer.encode("7 and 8 are 15\n")) < 12, "it has learned pieces"


def test_prepared_tokens_are_the_files(tmp_path, text):
    corpus = data.prepare([str(text)], tmp_path / "d")
    for split in data.SPLITS:
        parts = "".join(chr(i) if i < 256 else "\0" for i in getattr(corpus, split)).split("\0")[1:]
        names = [n for n, _ in data.documents([str(text)]) if data._held_out(n) == (split == "held_out")]
        assert parts == [(text / n).read_text() for n in names] and names
    assert corpus.record["train"]["bytes"] == len(corpus.train) - corpus.record["train"]["documents"]
    os.truncate(tmp_path / "d" / "train.bin", 100)
    with pytest.raises(shard.Refused, match="data.json says"):
        data.Corpus(tmp_path / "d")


def test_data_that_was_changed_is_refused(tmp_path, text):
    """On disk since it was made, in place too; of another type; or with another tokenizer."""
    folder = tmp_path / "d"
    data.prepare([str(text)], folder, 400)
    record = json.loads((folder / "data.json").read_text())

    def says(file, change):
        was = (folder / file).read_bytes()
        (folder / file).write_bytes(change(was))
        with pytest.raises(shard.Refused) as e:
            data.Corpus(folder)
        (folder / file).write_bytes(was)
        return str(e.value)

    flip = lambda raw: raw[:500] + bytes([raw[500] ^ 1]) + raw[501:]    # noqa: E731
    assert "not what data.json says" in says("train.bin", flip)
    assert "not what data.json says" in says("held_out.bin", flip)
    assert "not a whole number" in says("train.bin", lambda raw: raw[:-1])
    assert "data.json" in says("train.bin", lambda raw: raw + raw[:20]) and "data.json" in says("train.bin", lambda raw: b"")
    assert re.search("tokens; data.json says|whole number of uint32", says("data.json", lambda raw: raw.replace(b"uint16", b"uint32")))
    assert "was changed, or is damaged" in says("tokenizer.model", flip)
    for raw in (b"", b"{", b"[]", b"null"):
        assert "not a folder made by data.py" in says("data.json", lambda _, raw=raw: raw)
    (folder / "train.bin").rename(folder / "other")
    with pytest.raises(shard.Refused, match="train.bin"):
        data.Corpus(folder)
    (folder / "other").rename(folder / "train.bin")
    assert data.Corpus(folder).record == record


def test_an_id_that_does_not_exist_is_refused_with_its_place(tmp_path, text):
    """On a device it would be another one, in silence."""
    folder, out = tmp_path / "d", tmp_path / "run"
    data.prepare([str(text)], folder)
    tokens = np.memmap(folder / "train.bin", np.uint16, "r+")
    tokens[100:-100:40] = 300
    tokens.flush()
    record = json.loads((folder / "data.json").read_text())
    record["train"]["digest"] = data._sha256(folder / "train.bin")
    (folder / "data.json").write_text(json.dumps(record))
    done = command(*SMALL, "--data", folder, "--out", out, "--steps", 5)
    assert done.returncode == 2 and re.search(r"error: .*train.bin: id 300 at position \d+; the vocabulary has 257", done.stderr), done.stderr
    with pytest.raises(shard.Refused, match="id -1 at position 3"):
        data.Windows(np.array([0, 1, 2, -1, 4]), 4)[0]


def test_any_bytes_are_text(tmp_path):
    """Of which nothing is left out: empty files, what is no UTF-8, one very long line; and ids need room."""
    folder = tmp_path / "t"
    folder.mkdir()
    for name, raw in dict(a=b"", b=b"\xff\xfe\xc3(", c=b"x" * 300_000, d=(words := " ".join(a + b for a in WORDS for b in WORDS))).items():
        (folder / name).write_bytes(raw if isinstance(raw, bytes) else raw.encode())
    corpus = data.prepare([str(folder)], tmp_path / "bytes")
    assert len(corpus.train) + len(corpus.held_out) == 4 + 4 + 300_000 + len(words)
    pieces = data.prepare([str(folder)], tmp_path / "pieces", 300)
    assert "\ufffd" in pieces.tokenizer.decode(pieces.train) and len(pieces.train) > 100
    for count, kind in ((2**16, "uint16"), (2**16 + 1, "uint32")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(data.Bytes, "vocab_size", count)
            patch.setattr(data.Bytes, "lengths", lambda self: np.ones(2**17))
            assert data.prepare([str(folder)], tmp_path / kind).record["dtype"] == kind


def test_a_few_examples_go_round_for_ever():
    config = make(steps=9, batch=4)
    few = tokens_of(config, count=3)
    rows, _ = learn(config, examples=few)
    assert len(rows) == 9 and np.isfinite([r["loss"] for r in rows]).all()
    assert [r["loss"] for r in rows] == [r["loss"] for r in learn(config, examples=few)[0]]


def test_one_file_still_has_a_held_out_end(tmp_path):
    (tmp_path / "a.txt").write_text("abcdefghij" * 100)
    corpus = data.prepare([str(tmp_path / "a.txt")], tmp_path / "d")
    assert len(corpus.held_out) == 100 and len(corpus.train) == 901


def test_without_library_sources_the_way_out_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(data.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(shard.Refused, match="--data"):
        data.documents([])


def test_windows_cover_everything_once():
    rows = data.Windows(np.arange(101), 10)
    assert len(rows) == 10 and [r[0] for r in rows] == list(range(0, 100, 10))
    assert all(len(r) == 11 for r in rows)
    few = data.Windows(np.arange(101), 10, 3)
    assert [few[i][0] for i in range(3)] == [0, 30, 60]


@pytest.mark.parametrize("mesh", ["", "data=8", "fsdp=8", "data=2,fsdp=2,tensor=2"])
def test_evaluation_is_exact_for_any_number_of_examples(mesh):
    """Dropping the remainder, or a mean of batch means, depends on how many devices there are."""
    config = make(steps=1, batch=8)
    held_out = [e[:5 + i] for i, e in enumerate(tokens_of(config, 13, 5))]      # 13, uneven
    held_out[-1] = tokens_of(config, 1, 6)[0]           # the odd one out weighs as the others do
    rows, result = learn(config, mesh, held_out=held_out)
    params = jax.device_get(result.params)
    s, n = model.loss(params, data.collate(held_out, 16), config)
    assert rows[-1]["eval_loss"] == pytest.approx(float(s / n), rel=2e-6)


# -------------------------------------------------------------------------------------------
# Right or refused: losses and overrides of somebody else's

def pairs(count=64, seed=0):
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=16).astype(np.float32), rng.normal(size=16).astype(np.float32)) for _ in range(count)]


def perceptron(key):
    a, b = jax.random.split(key)
    return {"up": jax.random.normal(a, (16, 320)) / 4, "bias": jnp.zeros(320), "scale": jnp.ones(320),
            "down": jax.random.normal(b, (320, 16)) / 16}


def through_perceptron(p, x):
    return (jnp.tanh(x @ p["up"] + p["bias"]) * p["scale"]) @ p["down"]


def errors(p, b):
    return ((through_perceptron(p, b["x"]) - b["y"]) ** 2).sum(-1)


def in_batch_softmax(p, b):
    logits = through_perceptron(p, b["x"]) @ b["y"].T
    return -jnp.trace(jax.nn.log_softmax(logits)), len(b["x"])


def batch_statistics(p, b):
    h = b["x"] @ p["up"]
    return jnp.sum((jnp.tanh((h - h.mean(0)) / (h.std(0) + 0.1)) @ p["down"] - b["y"]) ** 2), len(b["x"])


def a_step_of_learning(p, b):
    def of_one(x, y):
        error = lambda p: jnp.mean((through_perceptron(p, x) - y) ** 2)
        return error(jax.tree.map(lambda w, g: w - 0.1 * g, p, jax.grad(error)(p)))
    return jax.vmap(of_one)(b["x"], b["y"]).sum(), len(b["x"])


def recurrent(p, b):
    """A loop that begins with zeros, which no types on a mesh allow, a search and a target that does not learn."""
    h, _ = jax.lax.scan(lambda h, x: (jnp.tanh(0.5 * h + x @ p["up"][:4]), None), jnp.zeros((len(b["x"]), 320)),
                        b["x"].reshape(-1, 4, 4).swapaxes(0, 1))
    weight = 1 + 0.1 * jnp.searchsorted(jnp.linspace(-1, 1, 8), jax.lax.stop_gradient(h[:, 0]))
    return jnp.sum(((h @ p["down"] - b["y"]) ** 2).sum(-1) * weight), len(b["x"])


def two_stacks(p, b):
    layer = lambda x, w: (x + jnp.tanh(x @ w), None)
    (x, _), (y, _) = jax.lax.scan(layer, b["x"], p["a"]), jax.lax.scan(layer, b["y"], p["b"])
    return jnp.sum((x - y) ** 2), len(b["x"])


def norms(p):
    return sum(jnp.sum(w ** 2) for w in jax.tree.leaves(p))


def statistics_beside_a_metric(p, b):
    """Where a metric is not a number the whole check was off."""
    return *batch_statistics(p, b), {"errors": errors(p, b)[:1].sum(), "of_none": jnp.sum(b["x"] > 99) / jnp.sum(b["x"] > 99)}


def branches(p, b):
    """Those that some groups of devices take: an exchange over tensor inside waited for the others for ever."""
    def of_one(row):
        x, y = row
        taken = jax.lax.cond(x[0] > 0, lambda h: h, lambda h: jnp.roll(h, 3), jnp.tanh(x @ p["up"]))
        tried, _ = jax.lax.while_loop(lambda s: s[1] < 3 * jnp.abs(y[0]), lambda s: (s[0] * 0.9, s[1] + 1), (y, 0.0))
        return jnp.sum((taken @ p["down"] - tried) ** 2)
    return jax.lax.map(of_one, (b["x"], b["y"])).sum(), len(b["x"])


OWN = make(layers=4, eval_every=10)         # (tests of this section train it in parts: 16 rows, --accumulate 2)


def own_block(ordered, seen, leave, schedule="gpipe"):
    """A loss with the transformer's weights and attention of its own, through shard.through."""
    def layer(w, x, i, rows):
        q, k, v = shard.columns(model._norm(x, w["attn_norm"]), w["wq"], w["wk"], w["wv"])
        a = shard.attend(model._attention, q, k, v, seen, rows["asking"], rows["asked"], ordered)
        x = shard.stream(x + shard.row((a, w["wo"])))
        up, = shard.columns(model._norm(x, w["mlp_norm"]), w["w_up"])
        return shard.stream(x + shard.row((jax.nn.gelu(up), w["w_down"]))), None

    def loss(p, b, specs=None):
        others = {k: w for k, w in p.items() if k != "layers"}
        return shard.through(lambda p, rows: model._enter(p, rows["tokens"], OWN), layer, leave, others, p["layers"],
                             jnp.arange(OWN.layers), model._known(b["tokens"], b), specs and specs["layers"], "none", 2, schedule)

    return loss


def everywhere(asking, asked):
    return jnp.ones((len(asking["place"]), 1, asking["place"].shape[1], asked["place"].shape[1]), bool)


def each_token(p, x, rows):
    logp = jax.nn.log_softmax(model._logits(p, model._norm(x, p["norm"]), OWN))
    return -jnp.sum(jnp.where(jnp.arange(logp.shape[-1]) == rows["targets"][..., None], logp, 0)), jnp.sum(rows["weights"])


def pooled(p, x, rows):
    logp = jax.nn.log_softmax(model._norm(x, p["norm"]).mean(1) @ p["head"][:, :8])
    return -jnp.sum(jnp.take_along_axis(logp, rows["label"][:, None], 1)), jnp.sum(rows["one"])


def a_step_of_the_transformers(p, b, specs=None):
    def of_one(row):
        row = jax.tree.map(lambda x: x[None], row)
        mean = lambda p: (lambda s, c: s / c)(*model.loss(p, row, OWN, specs))
        return mean(jax.tree.map(lambda w, g: w - 0.1 * g, p, jax.grad(mean)(p)))
    return jax.vmap(of_one)({k: b[k] for k in ("tokens", "targets", "weights")}).sum(), len(b["tokens"])


def own_masks(p, b, specs=None):
    return model.loss(p, {**b, "weights": b["weights"] * b["mask"]}, OWN, specs)


def penalised(p, b, specs=None):
    s, c = model.loss(p, b, OWN, specs)
    return s + 1e-2 * c * norms(p), c


VECTORS = dict(init=perceptron, collate=lambda e: dict(zip("xy", map(np.stack, zip(*e)))), examples=pairs(),
               held_out=pairs(13, 9))
TOKENS = dict(init=lambda key: model.init(OWN, key), examples=tokens_of(OWN), held_out=tokens_of(OWN, 13, 5),
              collate=lambda e: {**data.collate(e, 16), "label": np.array([x[0] % 8 for x in e]), "one": np.ones(len(e), "float32"),
                                 "mask": (np.stack(e)[:, :-1] % 3 == 0).astype("float32")})
SUM, INSIDE, POOLS = "no sum over the rows", "takes a gradient inside itself", "picks or pools"
# Each loss with what it is given, and of each axis that it cannot have, why ("": however its rows are split).
THEIRS = {
    "a sum": (lambda p, b: (errors(p, b).sum(), len(b["x"])), VECTORS, {"pipe": "shard.through", "seq": "shard.attend"}),
    "coupled rows": (in_batch_softmax, VECTORS, {"": SUM}),
    "batch statistics": (batch_statistics, VECTORS, {"": SUM}),
    "a gentle coupling": (lambda p, b: (errors(p, b).sum() * (1 + 1e-3 * jnp.tanh(b["x"].sum())), len(b["x"])), VECTORS, {"": SUM}),
    "the hardest of a batch": (lambda p, b: (jax.lax.top_k(errors(p, b), min(6, len(b["x"])))[0].sum(), 6), VECTORS, {"": SUM}),
    "statistics beside a metric": (statistics_beside_a_metric, VECTORS, {"": SUM}),
    "branches": (branches, VECTORS, {}),
    "a mean": (lambda p, b: (errors(p, b).mean(), 1), VECTORS, {"": SUM}),
    "a constant count": (lambda p, b: (errors(p, b).sum(), 1), VECTORS, {"": SUM}),
    "a penalty": (lambda p, b: (errors(p, b).sum() + norms(p), len(b["x"])), VECTORS, {"": SUM}),
    "one scalar": (lambda p, b: errors(p, b).mean(), VECTORS, {"": "two scalars"}),
    "a count of zero": (lambda p, b: (0 * errors(p, b).sum(), 0 * b["x"].sum()), VECTORS, {}),
    "a step of learning": (a_step_of_learning, VECTORS, {}),
    "a loop, a search, a stop": (recurrent, VECTORS, {}),
    "two stacks": (two_stacks, {**VECTORS, "init": lambda key: {"a": jax.random.normal(key, (4, 16, 16)) / 8,
                                                              "b": jax.random.normal(key, (2, 16, 16)) / 8}}, {}),
    "attention both ways": (own_block(False, everywhere, each_token), TOKENS, {}),
    "attention both ways, 1F1B": (own_block(False, everywhere, each_token, "1f1b"), TOKENS, {}),
    "a pooled loss": (own_block(True, model._seen, pooled), TOKENS, {"pipe": POOLS, "seq": "as a pooled one does"}),
    "a step of the transformer's": (a_step_of_the_transformers, TOKENS, {"pipe": INSIDE, "seq": INSIDE}),
    "masks of its own": (own_masks, TOKENS, {}),
    "a penalty by its count": (penalised, TOKENS, {"pipe": "adds up layers' weights"}),
    "a count of places": (lambda p, b, specs=None: (model.loss(p, b, OWN, specs)[0], b["tokens"].size), TOKENS,
                          {"seq": "divides by a constant or by its rows"}),
}
COUPLED = [name for name, (*_, cannot) in THEIRS.items() if cannot.get("") == SUM]


@functools.cache
def theirs(name, mesh="", **changes):
    """Of a loss of somebody else's the losses of 20 steps, and of two evaluations."""
    loss, given, _ = THEIRS[name]
    rows, _ = learn(dataclasses.replace(OWN, batch=16, **changes), mesh, loss=loss, **given)
    return [row.get("loss", row.get("eval_loss")) for row in rows]


@pytest.mark.parametrize("name, mesh", [
    ("a sum", "pipe=2"), ("a sum", "data=2,seq=2"), ("coupled rows", "data=2"), ("batch statistics", "tensor=2"),
    ("a gentle coupling", "fsdp=2"), ("the hardest of a batch", "data=2"), ("statistics beside a metric", "data=2"),
    ("branches", "data=2,tensor=2"), ("a mean", "data=4"), ("a constant count", "expert=2"), ("a penalty", "fsdp=2,tensor=2"),
    ("one scalar", "data=2"), ("a count of zero", "data=2"), ("a step of learning", "data=2,fsdp=2,tensor=2"),
    ("a loop, a search, a stop", "fsdp=4,tensor=2"), ("two stacks", "data=2,fsdp=2"), ("attention both ways", "seq=2"),
    ("a pooled loss", "pipe=2"), ("a step of the transformer's", "pipe=2"), ("a count of places", "seq=2"),
    slow("a loop, a search, a stop", "expert=2,data=2"), slow("attention both ways", "seq=4,tensor=2"),
    slow("attention both ways, 1F1B", "pipe=2,seq=2"), slow("a pooled loss", "seq=2"),
    slow("a step of the transformer's", "fsdp=2,tensor=2"), slow("a step of the transformer's", "seq=2"),
    slow("masks of its own", "pipe=2,seq=2"), slow("a penalty by its count", "fsdp=2,tensor=2"),
    slow("a penalty by its count", "pipe=2"), slow("a count of places", "pipe=2")])
def test_a_loss_of_anybodys_is_right_or_refused(name, mesh):
    """Losses that no test had were other numbers on other meshes, without a word, or ended inside jax: rows
    that are coupled, a pooled loss in a pipeline, an inner gradient under fsdp and in its evaluation, a
    bidirectional encoder on a ring."""
    sizes = shard.mesh_sizes(mesh)
    says = next((why for axis, why in THEIRS[name][2].items() if axis == "" or sizes.get(axis, 1) > 1), None)
    if says:
        with pytest.raises(shard.Refused, match=says) as e:
            theirs(name, mesh, accumulate=2)
        assert "\n" not in str(e.value) and re.search("--step jit --accumulate 1|or give --accumulate 1|any loss can have data, "
                                                      "fsdp and tensor|of a mean, give the sum and the count", str(e.value))
        return
    got, want = theirs(name, mesh, accumulate=2), theirs(name)
    assert np.isfinite(got).all() and len(got) == 22
    assert got == pytest.approx(want, rel=5e-5)
    assert got[0] == pytest.approx(want[0], rel=2e-6)


@pytest.mark.parametrize("name", ["coupled rows", slow("a penalty"), slow("a mean")])
def test_where_a_loss_is_refused_the_step_that_is_named_trains_it(name):
    """Its evaluation, too: batches of held-out examples are those of one device there."""
    assert theirs(name, "data=2,tensor=2", step="jit") == pytest.approx(theirs(name), rel=5e-5)
    assert theirs(name, "tensor=2") == pytest.approx(theirs(name), rel=5e-5)


def test_a_refused_loss_leaves_nothing_behind(tmp_path):
    loss, given, _ = THEIRS["coupled rows"]
    with pytest.raises(shard.Refused, match="--mesh data=2 cut the batch.*--step jit --accumulate 1"):
        learn(make(batch=16, out=str(tmp_path / "run")), "data=2", loss=loss, **given)
    assert not list(tmp_path.iterdir())


def test_what_else_a_task_may_bring(capfd):
    """Weights of 16 bits, or none at all; a print inside the loss; what an earlier run gave back, off its mesh; other sums
    that are arrays. Each ended inside jax."""
    sums = lambda p, b: (errors(p, b).sum(), len(b["x"]))
    def run(loss, mesh, **given):
        rows, result = learn(make(steps=3, batch=16), mesh, loss=loss, **{**VECTORS, "held_out": (), **given})
        return [r["loss"] for r in rows], result.params, rows

    of_16 = lambda key: jax.tree.map(lambda w: w.astype("bfloat16"), perceptron(key))
    assert run(sums, "data=2,tensor=2", init=of_16)[0] == pytest.approx(run(sums, "", init=of_16)[0], rel=2e-2)
    empty = lambda key: {**perceptron(key), "none": jnp.zeros((4, 0))}
    want, params, _ = run(sums, "fsdp=2", init=empty)
    def prints(p, b):
        jax.debug.print("one is {}", jnp.float32(1))
        return sums(p, b)
    assert run(prints, "data=2,tensor=2")[0] == pytest.approx(want) == run(prints, "")[0]
    assert "one is 1.0" in capfd.readouterr().out
    def distils(p, b, teacher):
        return jnp.sum((through_perceptron(p, b["x"]) - through_perceptron(teacher, b["x"])) ** 2), len(b["x"])
    with pytest.raises(shard.Refused, match="jax.device_get takes it off.*--step jit"):
        run(lambda p, b: distils(p, b, params), "data=2")
    of = jax.device_get(params)
    assert run(lambda p, b: distils(p, b, of), "data=2")[0] == pytest.approx(run(lambda p, b: distils(p, b, of), "")[0])
    each = lambda p, b: (*sums(p, b), {"by_place": ((through_perceptron(p, b["x"]) - b["y"]) ** 2).sum(0)})
    (one, *_), (other, *_) = (run(each, mesh)[2] for mesh in ("", "data=2"))
    assert len(one["by_place"]) == 16 and other["by_place"] == pytest.approx(one["by_place"], rel=1e-5)
    with pytest.raises(shard.Refused, match="what adds up over rows"):
        run(lambda p, b: (*sums(p, b), {"rows": errors(p, b)}), "data=2")


def test_the_check_is_as_fine_as_rounding_lets_it_be(capfd):
    """A large table that nothing depends on, or one cast to 16 bits, hid sums that were wrong by a sixth; a leaf whose
    gradient is small learns as fast as others; what wraps the transformer's loss is another; what cannot be seen is said."""
    def run(loss, mesh, **given):
        return [r["loss"] for r in learn(make(steps=2, batch=8), mesh, loss=loss, **{**VECTORS, "held_out": (), **given})[0]]

    table = lambda key: {**perceptron(key), "table": jax.random.normal(key, (20000, 64)), "q": jnp.eye(16)}
    def rounded(p, b):
        made = through_perceptron(p, b["x"]).astype("bfloat16").astype("float32")
        return ((made - b["y"]) ** 2).sum(), len(b["x"])
    aside = lambda p, b: (errors(p, b).sum() - 3e-6 * jnp.trace(jax.nn.log_softmax(b["x"] @ p["q"] @ b["y"].T)), len(b["x"]))
    for wrong in (lambda p, b: (errors(p, b).sum() + 0.12, len(b["x"])), aside, lambda p, b: (rounded(p, b)[0] + 12, len(b["x"]))):
        with pytest.raises(shard.Refused, match=SUM):
            run(wrong, "data=4", init=table)
    assert run(rounded, "data=2,tensor=2", init=table) == pytest.approx(run(rounded, "", init=table), rel=1e-2)
    ours = train.language(make())[1]
    @functools.wraps(ours)
    def wraps(p, b, specs=None):
        s, c, *_ = ours(p, b, specs)
        return s + norms(p), c
    with pytest.raises(shard.Refused, match=SUM):
        learn(make(), "data=4", loss=wraps)
    said = []
    learn(make(steps=1), "data=2", said, loss=lambda p, b: (jnp.log(-1 - jnp.sum(p["up"] ** 2)) + errors(p, b).sum(), 8), **VECTORS)
    assert any("not checked" in line for line in said)


def test_a_collate_whose_shapes_change_is_refused(tmp_path):
    pad = lambda e: {"x": np.stack([np.pad(x, (0, max(map(len, e)) - len(x))) for x in e])}
    with pytest.raises(shard.Refused, match="pad every batch to the same shape"):
        learn(make(out=str(tmp_path / "run")), "", loss=lambda p, b: (jnp.sum(b["x"] * p["w"]), len(b["x"])), collate=pad,
              init=lambda key: {"w": jnp.ones(())}, examples=[np.ones(n, "float32") for n in range(3, 20)])
    assert not list(tmp_path.iterdir())


def test_the_transformers_own_loss_is_not_checked_at_each_start(monkeypatch):
    """Its commands would compile twice."""
    monkeypatch.setattr(train, "check_loss", None)
    learn(make(steps=1), "data=2")
    with pytest.raises(TypeError):
        learn(make(steps=1), "data=2", loss=lambda p, b: model.loss(p, b, make()))


def test_a_count_of_zero_changes_nothing():
    """Weights decayed, and moments faded."""
    loss, given, _ = THEIRS["a sum"]
    masked = lambda p, b: (jnp.sum(errors(p, b) * b["mask"]), jnp.sum(b["mask"]))
    collate = lambda e: {**given["collate"](e), "mask": np.array([float(x[0] > 9) for x, _ in e], "float32")}
    program = train.build(make(batch=8), mesh_of("data=2"), perceptron, masked, train._shapes(make(), collate, given["examples"]))
    with jax.set_mesh(program.mesh):
        state = program.start(jax.random.key(0))
        before = jax.device_get(state)
        after, metrics = program.step(state, train._batch(program, collate, given["examples"], 0))
    assert float(metrics["tokens"]) == 0 and not float(metrics["skipped"]) and int(after["step"]) == 1
    for a, b in zip(jax.tree.leaves((before["params"], before["opt"])), jax.tree.leaves((after["params"], after["opt"]))):
        assert (a == np.asarray(b)).all()


def test_what_is_decayed_does_not_follow_from_the_rows_of_a_device():
    """x * s with one row is as large as s: on eight devices the scale decayed, on one it did not."""
    loss, given, _ = THEIRS["a sum"]
    shapes = train._shapes(make(), given["collate"], given["examples"])
    init = lambda key: {**perceptron(key), "scale": jnp.ones((1, 320))}
    for mesh in ("", "fsdp=8", "tensor=8", "data=4,tensor=2"):
        program = train.build(make(), mesh_of(mesh), init, loss, shapes)
        assert {k for k, d in program.decisions.items() if d.matrix} == {"up", "down"}, mesh


def test_experts_are_evaluated_where_held_out_rows_do_not_divide():
    """Weights that were gathered differ in type from those that lie whole: a TypeError at the first evaluation."""
    config = make(experts=4, layers=2, steps=1)
    held = tokens_of(config, 13, 5)
    one, other = (learn(config, mesh, held_out=held)[0][-1]["eval_loss"] for mesh in ("", "fsdp=2,expert=2"))
    assert other == pytest.approx(one, rel=5e-6)


def test_a_gradient_inside_a_loss_is_seen():
    """Under jit, too, and through a vmap; a stop_gradient is none."""
    config = make()
    params, batch = model.init(config, jax.random.key(0)), data.collate(tokens_of(config, 2), 16)
    plain = lambda p, b: model.loss(p, b, config)[0]
    inside = lambda p, b: optax.tree.norm(jax.grad(jax.jit(plain))(p, b))
    assert shard.DIFFERENTIATED in shard.seams(inside, params, batch) >= {"through", "attend"}
    stopped = lambda p, b: plain(jax.lax.stop_gradient(p), b)
    assert shard.DIFFERENTIATED not in shard.seams(stopped, params, batch) >= {"through", "attend", "row"}


FSDP_SUMS = {"": 2, "float32": 4}


@pytest.mark.parametrize("dtype", FSDP_SUMS)
def test_the_precision_of_sums_over_fsdp_is_the_one_that_is_said(dtype):
    """The text said float32, and gradients were added up in bfloat16. (What jax is asked for: a CPU's compiler adds
    16 bits up in 32.)"""
    program = program_of(make(dtype="bfloat16", sum_dtype=dtype, d_ff=128), "fsdp=4")
    with jax.set_mesh(program.mesh):
        text = program.step.lower(program.state, program.batch).as_text()
    kinds = set(re.findall(r'"stablehlo.reduce_scatter".*?\}\) : \(tensor<[\dx]*(\w+)>\)', text, re.S))
    assert kinds == {"bf16" if FSDP_SUMS[dtype] == 2 else "f32"}


def drawn_overrides(count, seed=0):
    """Meshes, models and overrides at random: of any leaf, one or two axes on any dimensions, some in a tuple."""
    rng, found = np.random.default_rng(seed), []
    choices = [("data=2,fsdp=2,tensor=2", {}), ("pipe=2,fsdp=2,data=2", dict(microbatches=2)), ("data=4,tensor=2", dict(zero=1)),
               ("pipe=2,tensor=2,fsdp=2", dict(schedule="interleaved", chunks=2, microbatches=2)),
               ("seq=2,tensor=2,pipe=2", dict(schedule="1f1b", microbatches=2)), ("fsdp=4,seq=2", dict(remat="full")),
               ("expert=2,fsdp=2,tensor=2", dict(experts=4)), ("expert=2,pipe=2,data=2", dict(experts=4, zero=1))]
    for _ in range(count):
        mesh, what = choices[rng.integers(len(choices))]
        paths, leaves, _ = shard.flatten(jax.eval_shape(lambda: model.init(make(layers=4, **what), jax.random.key(0))))
        leaf, axes = rng.integers(len(leaves)), list(shard.mesh_sizes(mesh))
        entries = [None] * leaves[leaf].ndim
        for axis in rng.permutation(axes)[:rng.integers(1, 3)]:
            entries[rng.integers(len(entries))] = str(axis)
        if rng.random() < 0.25:
            entries[rng.integers(len(entries))] = tuple(map(str, rng.permutation(axes)[:2]))
        found.append((mesh, tuple(what.items()), paths[leaf], leaves[leaf].shape, tuple(entries)))
    return found


@functools.cache
def without_overrides(experts):
    return [r["loss"] for r in learn(make(layers=4, experts=experts, steps=6, batch=16))[0]]


@pytest.mark.parametrize("mesh, what, path, shape, entries", [
    pytest.param(*d, id=f"{d[0]} {d[2]} {d[4]}", marks=[] if i in (0, 2) else pytest.mark.slow)
    for i, d in enumerate(drawn_overrides(12))])
def test_any_override_trains_to_the_same_loss_or_is_refused(mesh, what, path, shape, entries):
    """Of twelve that were tried five passed validation and ended inside jax: `data`, tuples, `pipe` off the stack,
    `fsdp` on the layers."""
    sizes, config = shard.mesh_sizes(mesh), make(layers=4, steps=6, batch=16, accumulate=2, **dict(what))
    flat = [a for e in entries for a in (e if isinstance(e, tuple) else (e,)) if a]
    if len(set(flat)) < len(flat) or any(isinstance(e, tuple) or e and n % sizes[e] for e, n in zip(entries, shape)):
        with pytest.raises(shard.Refused, match="give one axis a dimension|which does not divide"):
            program = train.build(config, mesh_of(mesh), *train.language(config), overrides=[(path, P(*entries))])
            program.step.lower(program.state, program.batch)
        return
    flag = f"^{re.escape(path)}$=" + ",".join(e or "-" for e in entries)
    rows, _ = learn(dataclasses.replace(config, override=("embed=-", flag)), mesh)
    assert [r["loss"] for r in rows] == pytest.approx(without_overrides(config.experts), rel=5e-5)


def test_of_several_overrides_the_last_that_matches_wins():
    config = make(override=("w_=-,fsdp", "w_up=-,-,data"))
    program = train.build(config, mesh_of("data=2,fsdp=2"), *train.language(config), overrides=[("norm", P("data"))])
    specs = {path.split(".")[-1]: d.spec for path, d in train._by_path(program.decisions).items()}
    assert specs["w_gate"] == P(None, "fsdp") and specs["w_up"] == P(None, None, "data") and specs["norm"] == P("data")
    sent, said = ({(c.kind, c.axis): c.bytes for c in rows} for rows in (shard.collectives(train.compiled(program)), train.formula(program)))
    for key in sent.keys() | said.keys():
        assert sent.get(key, 0) == pytest.approx(said.get(key, 0), rel=0.02, abs=200), key


def test_parameters_are_counted_without_padding_and_experts_by_their_visits():
    """951,424 were said where 918,912 are."""
    tiny = dataclasses.replace(model.PRESETS["tiny"], vocab_size=257)
    assert model.parameters(tiny) == (918_912, 918_912)
    total, visited = model.parameters(model.PRESETS["mixtral-8x7b"])
    assert (round(total / 1e9, 1), round(visited / 1e9, 1)) == (46.7, 12.9)         # as published
    assert model.parameters(model.PRESETS["124m"])[0] == 50257 * 768 + 12 * (4 * 768**2 + 3 * 768 * 2048 + 2 * 768) + 768


# -------------------------------------------------------------------------------------------
# Generation

@pytest.fixture(scope="module")
def trained():
    config = make(steps=60)
    return learn(config)[1].params, config


PROMPTS = [[1, 2, 3, 4], [10, 12, 14], [5], list(range(20, 31))]


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


@pytest.mark.parametrize("shards", [2, 4, 8])
def test_generation_is_the_same_on_any_shards(trained, shards):
    params, config = trained
    mesh = mesh_of(f"tensor={shards}")
    specs = specs_of(config, f"tensor={shards}")
    split = jax.device_put(params, shard.shardings(specs, mesh))
    for temperature in (0, 0.8):
        assert (sample.generate(split, PROMPTS, config, 8, temperature)
                == sample.generate(params, PROMPTS, config, 8, temperature))


def test_choices_are_limited_and_seeded(trained):
    params, config = trained
    draw = lambda **k: sample.generate(params, [[1, 2]], config, **{**dict(tokens=12), **k})
    assert draw(seed=1) == draw(seed=1) != draw(seed=2, temperature=3.0)
    assert draw(top_k=1) == draw(top_p=1e-6) == draw(temperature=0)
    logits = jnp.log(jnp.asarray([[0.5, 0.3, 0.15, 0.05]]))
    keys = jax.random.split(jax.random.key(0), 400)
    ids = {int(i) for i in sample._draw(jnp.repeat(logits, 400, 0), keys, 1.0, 0, 0.7)}
    assert ids == {0, 1}, "the likeliest that together have the share"
    assert {int(i) for i in sample._draw(jnp.repeat(logits, 400, 0), keys, 1.0, 3, 1.0)} == {0, 1, 2}


def test_a_full_beam_finds_the_best_of_all_continuations(trained):
    """With a beam per continuation nothing is pruned: compare with trying every one."""
    params, config = trained
    config = dataclasses.replace(config, vocab_size=5)      # the other ids can no longer be said
    prompt = [1, 2, 3]
    every = list(itertools.product(range(5), repeat=3))
    logp = jax.nn.log_softmax(model.forward(params, jnp.asarray([prompt + list(n) for n in every]), config))
    scores = {n: sum(float(logp[k, 2 + i, n[i]]) for i in range(3)) for k, n in enumerate(every)}
    best = sorted(scores, key=scores.get, reverse=True)
    found = sample.beam_search(params, [prompt, [4]], config, beams=25, tokens=3)[0]
    assert [tuple(ids) for ids, _ in found[:5]] == best[:5]
    for ids, score in found:        # each beam must go on from its own past
        assert score == pytest.approx(scores[tuple(ids)], abs=1e-4)


def test_a_bad_prompt_is_refused(trained):
    params, config = trained
    for prompts, word in (([[]], "empty"), ([[61]], "61"), ([[-1]], "-1"), ([], "empty")):
        with pytest.raises(shard.Refused, match=word):
            sample.generate(params, prompts, config, tokens=1)


# -------------------------------------------------------------------------------------------
# The command line

def refused(capsys, *words, main=train.main):
    """Exit status 2 and one line."""
    with pytest.raises(SystemExit) as e:
        train.run(lambda: main([str(w) for w in words]))
    error = capsys.readouterr().err
    assert e.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1, error
    return error


@pytest.mark.parametrize("words, says", [
    (["--layer", 3], "--layers"), (["--layers", "three"], "whole number"), (["--lr", "nan"], "finite"),
    (["--lr", "-1"], "at least 0"), (["--shards", 3], "8"), (["--layers"], "needs a value"),
    (["layers=3"], "alone"), (["--heads", 5], "divide"), (["--batch", 3, "--mesh", "data=2,tensor=4"], "--batch 4"),
    (["--heads", 4, "--kv_heads", 3], "kv_heads"), (["--mesh", "tensr=2"], "'tensor'"),
    (["--mesh", "tensor=0"], "at least 1"), (["--mesh", "tensor=2", "--shards", 4], "disagree"),
    (["--mesh", "expert=8", "--experts", 4], "expert=4"), (["--mesh", "pipe=8"], "--layers 8"),
    (["--mesh", "seq=8", "--seq_len", 60], "--seq_len 64"), (["--mesh", "tensor=8", "--microbatches", 3], "--microbatches 2"),
    (["--mesh", "pipe=2,tensor=4", "--seq_len", 63], "--seq_len 64"), (["--chunks", 2], "interleaved"), (["--zero", 2], "fsdp"),
    (["--schedule", "interleaved"], "--chunks"), (["--schedule", "1f1"], "'1f1b'"), (["--model", "tinny"], "'tiny'"), (["--dtype", "float16"], "bfloat16"),
    (["--step", "pjit"], "jit"), (["--dropout", 1], "below 1"), (["--vocab_size", 10], "257"),
    (["--data", "no/such/file"], "no such file"), (["--batch", 5, "--accumulate", 2], "accumulate"),
    (["--heads", 4, "--shards", 8], "--shards 4"), (["--tied", "maybe"], "true or false"),
    (["--experts", 2, "--experts_per_token", 3], "--experts 2"), (["--shared_experts", 1], "--experts"), (["--optimizer", "sgd"], "adamw or muon"),
    (["--processes", 2], "need all of --coordinator"), (["--coordinator", "here", "--processes", 2, "--process_id", 0], "HOST:PORT"),
    (["--coordinator", "a:70000", "--processes", 2, "--process_id", 0], "HOST:PORT"),
    (["--coordinator", "a:7000", "--processes", 2, "--process_id", 2], "0 to 1"),
    (["--coordinator", "a:7000", "--processes", 2, "--process_id", 0, "--distributed"], "one of them"),
    (["--shards", 0], "at least 1"), (["--out", "gs://bucket/run"], "a folder that every process sees"), (["--sum_dtype", "float23"], "'float32'"),
    (["--step", "jit", "--mesh", "pipe=2,seq=2"], "pipe=2 and seq=2"), (["--override", "w_up"], "REGEX=axis"),
    (["--override", "w_up=-,tensr"], "'tensor'"), (["--override", "w_upp=-"], "'layers.w_up'"), (["--override", "w_up=-,-,-,fsdp"], "4 dimensions"),
    (["--override", "_norm=-,data", "w_up=data", "--mesh", "data=8"], "splits 4 into 8"),
    (["--steps", 0], "at least 1"), (["--steps", 10**11], "2**31"), (["--seq_len", "1e3"], "whole number")])
def test_bad_input_is_one_line_and_nothing_is_touched(capsys, tmp_path, monkeypatch, words, says):
    monkeypatch.chdir(tmp_path)
    assert says in refused(capsys, "--out", tmp_path / "out", *words)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_the_command_begins_again_with_large_pages(tmp_path, monkeypatch):
    """Once, as the same process, and with what else was asked of glibc; what is no plain command goes on as it began."""
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    monkeypatch.delenv("ZIGZAG_AGAIN", raising=False)

    def asked(run, what):
        found = b""
        while run.poll() is None and what not in found:
            with contextlib.suppress(OSError):
                found = Path(f"/proc/{run.pid}/environ").read_bytes()
        assert run.communicate()[1].count("\n") == 1 and run.returncode == 2
        return found

    assert b"\0GLIBC_TUNABLES=glibc.malloc.hugetlb=1\0" in asked(started("--data", tmp_path / "nowhere"), b"hugetlb")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.tcache_count=3")     # (glibc itself cuts it off in there where it has read it)
    assert b"\0GLIBC_TUNABLES=glibc.malloc.tcache_count=3" in asked(started("--data", tmp_path / "nowhere"), b"ZIGZAG_AGAIN")
    monkeypatch.setenv("ZIGZAG_AGAIN", "1")
    again = []
    monkeypatch.setattr(os, "execve", lambda *_: again.append(1))
    for words, argv, times in ((["-u", "train.py", "x"], ["train.py", "x"], 1), (["-m", "pdb", "train.py"], ["train.py"], 0), (["-mpdb", "train.py"], ["train.py"], 0),
                               (["ipython"], ["train.py", "x"], 0)):
        monkeypatch.delenv("ZIGZAG_AGAIN", raising=False)
        monkeypatch.setattr(sys, "orig_argv", ["python", *words])
        monkeypatch.setattr(sys, "argv", argv)
        train._begin_again()
        assert len(again) == times, words
        again.clear()
        monkeypatch.setenv("ZIGZAG_AGAIN", "1")
        train._begin_again()
        assert not again


def test_what_is_asked_of_the_compiler_gives_way(monkeypatch):
    mesh, level = mesh_of(""), "xla_backend_optimization_level"
    assert level not in shard.compiler_options(mesh)        # tests ask for the least
    monkeypatch.setattr(jax.config, "read", lambda name: False)
    assert shard.compiler_options(mesh)[level] == 1
    monkeypatch.setenv("XLA_FLAGS", f"--{level}=2")
    assert level not in shard.compiler_options(mesh)


def test_bad_data_is_one_line(capsys, tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "none").mkdir()
    (tmp_path / "file").touch()
    out = tmp_path / "out"
    assert "no text" in refused(capsys, "--data", tmp_path / "empty.txt", "--out", out)
    assert "no text" in refused(capsys, "--data", tmp_path / "none", "--out", out)
    assert not out.exists()
    assert "--seq_len 128" in refused(capsys, "--data", tmp_path / "short.txt", "--out", out)
    assert not out.exists(), "what was prepared for a run that was refused is gone"
    assert "empty path" in refused(capsys, "--data", "", "--out", out)
    assert "is a file" in refused(capsys, "--out", tmp_path / "file")
    assert "no run" in refused(capsys, "--run", tmp_path / "none", main=sample.main)
    assert "no PATH" in refused(capsys, "--out", out, main=data.main)
    assert "at least 300" in refused(capsys, tmp_path / "short.txt", "--vocab_size", 50, main=data.main)


def test_dashes_equals_and_presets():
    a = train.parse(["--d-model=64", "--heads", "4", "--data", "a", "b", "--tied", "--mesh=tensor=2"])
    assert (a.d_model, a.head_dim, a.data, a.tied, a.mesh) == (64, 16, ("a", "b"), True, "tensor=2")
    b = train.parse(["--model", "llama-7b", "--layers", "2"])
    assert (b.d_model, b.d_ff, b.layers, b.lr) == (4096, 11008, 2, 0.5 / 4096)
    assert train.parse(["--tied", "false"]).tied is False


def test_every_field_is_in_the_help(capsys):
    with pytest.raises(SystemExit) as e:
        train.parse(["--help"])
    text = capsys.readouterr().out
    assert e.value.code == 0
    for f in dataclasses.fields(train.Config):
        assert re.search(rf"--{f.name} +\S", text), f.name


def test_the_table_of_a_big_model_needs_no_memory():
    done = command("--model", "llama-70b", "--shards", 8, file="shard.py")
    assert done.returncode == 0, done.stderr
    assert re.search(r"layers.w_down +\[80,28672,8192\] +\[-,tensor,-\] .* row", done.stdout)


def test_the_users_flags_are_kept(tmp_path, text):
    """Overwriting XLA_FLAGS would lose the 8 devices that were asked for."""
    done = command(*SMALL, "--shards", 4, "--steps", 2, "--data", text, "--out", tmp_path / "o", "--heads=4",
                   env={"XLA_FLAGS": "--xla_force_host_platform_device_count=8"})
    assert done.returncode == 0 and "data=2" in done.stdout and "tensor=4" in done.stdout, done.stderr


def test_train_sample_and_read_with_none_of_our_code(tmp_path, text):
    """The commands of the README, on a small model and a tokenizer of its own."""
    folder, out = tmp_path / "tokens", tmp_path / "out"
    done = command(text, "--out", folder, "--vocab_size", 400, file="data.py")
    assert done.returncode == 0, done.stderr
    done = command(*SMALL, "--shards", 2, "--steps", 4, "--data", folder, "--out", out)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in open(out / "metrics.jsonl")]
    assert [r["step"] for r in rows if "loss" in r] == [1, 2, 3, 4]
    assert set(rows[0]) == {"step", "loss", "lr", "grad_norm", "tokens", "tokens_per_second", "mfu", "skipped", "save_seconds"}
    assert set(rows[-1]) == {"step", "eval_loss", "bits_per_byte"} and rows[0]["tokens"] == 4 * 32
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["2", "3", "4"], "keeps three"
    config = json.loads((out / "config.json").read_text())
    assert config["vocab_size"] == 400 and config["tokenizer"] == "sentencepiece"
    said = {command("--run", out, "--prompt", "3 and", "--shards", n, "--tokens", 20,
                    file="sample.py").stdout for n in (1, 4)}
    assert len(said) == 1 and said.pop().startswith("3 and")
    code = (f"import orbax.checkpoint as ocp, numpy as np\n"
            f"p = ocp.StandardCheckpointer().restore({str(out / 'checkpoints' / '4' / 'params')!r})\n"
            f"assert np.asarray(p['layers']['wq']).shape == (2, 32, 4, 8), p\nprint('read')")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True,
                          env={**os.environ, "JAX_PLATFORMS": "cpu"})
    assert "read" in done.stdout, done.stderr
    other = command(*SMALL, "--data", folder, "--out", out, "--layers", 3)
    assert other.returncode == 2 and "layers 2" in other.stderr and other.stderr.count("\n") == 1


def times_aside(path):
    rows = [json.loads(line) for line in open(path)]
    return [json.dumps({k: v for k, v in r.items() if k not in ("tokens_per_second", "mfu", "save_seconds")}) for r in rows]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tensor=2", "data=2,tensor=2"])
def test_a_run_that_was_stopped_equals_one_that_was_not(tmp_path, text, mesh):
    """Weights, optimizer, randomness (dropout is on) and the position in the data all come back;
    each step is in the metrics once. Stopped by SIGTERM, by Ctrl-C, and by kill -9."""
    words = (*SMALL, "--mesh", mesh, "--steps", 150, "--save_every", 20, "--eval_every", 35,
             "--dropout", 0.1, "--data", text)
    assert command(*words, "--out", tmp_path / "whole").returncode == 0
    out = tmp_path / "stopped"
    for number, at in ((signal.SIGTERM, 8), (signal.SIGINT, 48), (signal.SIGKILL, 75), (None, 0)):
        run = started(*words, "--out", out)
        if number:
            until_step(at, out, run)
            run.send_signal(number)
        text_out, error = run.communicate(timeout=300)
        assert run.returncode == (-9 if number == signal.SIGKILL else 0), error
        if number in (signal.SIGTERM, signal.SIGINT):
            assert "to continue" in text_out and number.name in text_out
            assert (out / "checkpoints" / re.search(r"stopped at step (\d+) by", text_out)[1]).is_dir()
    assert times_aside(out / "metrics.jsonl") == times_aside(tmp_path / "whole" / "metrics.jsonl")


def readme_blocks(kind):
    return re.findall(rf"```{kind}\n(.*?)```", (HERE / "README.md").read_text(), re.S)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=1", "data=2,tensor=2", "fsdp=2,tensor=2", "fsdp=2"])
def test_the_readers_own_ten_lines_train_on_every_mesh(tmp_path, mesh):
    """The README's script: another task, three functions, no code of our model."""
    script = next(b for b in readme_blocks("python") if "train.fit" in b)
    (tmp_path / "mine.py").write_text(script)
    done = subprocess.run([sys.executable, "mine.py", "--mesh", mesh], cwd=tmp_path, text=True,
                          capture_output=True, env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(HERE)})
    assert done.returncode == 0, done.stderr
    losses = re.findall(r"held-out loss ([\d.]+)", done.stdout)
    assert float(losses[-1]) < 0.1, done.stdout


def test_a_mesh_is_chosen_that_fits(capsys, monkeypatch):
    """By figures that are near what the formula says of each; one that does not fit is none."""
    config = make(mesh="auto", batch=16, layers=4, d_model=128, d_ff=512, seq_len=64)
    chosen, (program, step) = train.choose(config)
    assert dict(program.mesh.shape) == dict(train.machine(shard.mesh_sizes(chosen.mesh)).shape) and train._peak(step) > 0
    assert math.prod(shard.mesh_sizes(chosen.mesh).values()) == 8
    said = capsys.readouterr().out
    assert chosen.mesh in said.splitlines()[1] and "compiled" in said and "meshes of 8 devices" in said
    assert shard.mesh_sizes(train.choose(dataclasses.replace(config, shards=4))[0].mesh)["tensor"] == 4
    unsaid = dataclasses.replace(config, vocab_size=0, dtype="")        # these still follow from the data and the devices
    assert train.choose(unsaid)[0] == dataclasses.replace(unsaid, mesh=chosen.mesh)
    params = jax.eval_shape(lambda: model.init(config, jax.random.key(0)))
    chip = train.Chip(1e12, 1e9, 1e11, 1.0)
    for mesh in ("data=8", "fsdp=8", "tensor=4", "data=2,fsdp=2,tensor=2", "seq=4", "pipe=4", "fsdp=4,tensor=2"):
        one = make(**{**dataclasses.asdict(config), "mesh": mesh, "microbatches": 2 if "pipe" in mesh else 1, "out": ""})
        exact = sum(c.bytes for c in train.formula(program_of(one, mesh)))
        guess = train._guess(one, params, {a: shard.mesh_sizes(mesh).get(a, 1) for a in shard.AXES}, chip)[1]
        assert 0.5 < guess / exact < 2, (mesh, guess, exact)
    monkeypatch.setattr(train, "_peak", lambda step: 2**60)
    with pytest.raises(shard.Refused, match="none of the three best has room"):
        train.choose(config)
    with pytest.raises(shard.Refused, match="no mesh of 8 devices divides"):
        train.choose(dataclasses.replace(config, batch=1, heads=1, kv_heads=1, head_dim=128, layers=1, seq_len=1, d_ff=7))


def test_hardware_that_is_not_known_or_has_no_compiler_here_is_one_line(monkeypatch):
    monkeypatch.setattr(shard.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(shard.Refused, match="pip install libtpu"):
        shard.topology("v5e:4x4")
    with pytest.raises(shard.Refused, match="pip install jax-cuda12-plugin=="):
        shard.topology("h100:1x2x8")
    peer("libtpu")
    nothing = command("--topology", "v9z:4x4", file=HERE / "train.py")
    assert nothing.returncode == 2 and nothing.stderr.strip().splitlines()[-1].startswith("error: --topology v9z:4x4: not known")


@pytest.mark.slow
@pytest.mark.parametrize("chips, mesh, changes, arithmetic", [
    ("v5e:4x4", "fsdp=16", ("--remat", "full"), (1.25, 1.35)), ("v5e:4x4", "fsdp=4,tensor=4", ("--remat", "selective", "--experts", 4), (1.0, 1.1)),
    ("v5e:4x4", "data=2,pipe=2,tensor=4", ("--schedule", "1f1b", "--microbatches", 2, "--zero", 1), (3.2, 3.6)),
    ("v5e:4x4", "fsdp=4,expert=4", ("--experts", 8), (1.0, 1.1)), ("h100:1x2x8", "fsdp=4,tensor=4", (), (0.9, 1.0)),
    ("h100:1x1x8", "data=2,tensor=4", ("--kv_heads", 2, "--dtype", "bfloat16"), (0.98, 1.05)),
    ("h100:1x1x8", "data=2,fsdp=4", ("--accumulate", 2, "--remat", "full"), (1.0, 1.3)),
    ("v5e:2x4", "pipe=2,tensor=4", ("--microbatches", 4, "--remat", "selective", "--accumulate", 2), (1.2, 1.4)),
    ("v5e:2x4", "expert=2,tensor=4", ("--experts", 8, "--kv_heads", 2), (1.05, 1.15))])
def test_a_program_for_chips_that_are_not_here_sends_what_the_formula_says(tmp_path, chips, mesh, changes, arithmetic):
    """To 2%, and the digits that are printed, of each kind over each axis, but for scalars. Nothing is written. (The arithmetic is of
    pipelines with their idle ticks, of experts that have as much to do, of two key heads on four devices, a twelfth of it
    the kernel's; a TPU's kernel looks at blocks of 512, here one, and makes two of its five products backward twice.)"""
    if chips.startswith("v"):
        peer("libtpu")      # machine code of the worst kind; the programs are the same
        small = "" if "--experts" in changes else " --xla_tpu_scoped_vmem_limit_kib=4096"
        more = {"LIBTPU_INIT_ARGS": "--xla_msa_enable=false" + small}
    elif "ZIGZAG_GPU" in os.environ:
        more = {"PYTHONPATH": os.environ["ZIGZAG_GPU"]}
    else:
        peer("jax_cuda12_plugin")
        more = {}
    done = command("--topology", chips, "--mesh", mesh, "--layers", 4, "--d_model", 512, "--heads", 4, "--vocab_size", 2048,
                   "--seq_len", 512, "--batch", 16, *changes, file=HERE / "train.py", cwd=tmp_path, env=more)
    assert done.returncode == 0, done.stderr[-2000:]
    assert not list(tmp_path.iterdir())
    size = lambda text: float(text.split()[0]) * {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[text.split()[1]]      # noqa: E731
    rows = [(size(a), size(b) if b else 0.0) for a, b in re.findall(
        r"^sends +([\d.]+ \w+) a device.*formula: (?:([\d.]+ \w+) in|none)", done.stdout, re.M)]
    rows += [(0.0, size(b)) for b in re.findall(r"^sends +nothing.*formula: ([\d.]+ \w+) in", done.stdout, re.M)]
    assert len(rows) >= 3
    for sent, said in rows:
        assert abs(sent - said) <= max(0.02 * said, 0.01 * sum(a for a, _ in rows)), done.stdout
        assert abs(sent - said) <= 0.03 * said + 200, done.stdout
    assert "it fits" in done.stdout and "mfu at most" in done.stdout
    assert arithmetic[0] < float(re.search(r"([\d.]+) of 6 a weight", done.stdout)[1]) < arithmetic[1], done.stdout


def test_an_axis_may_be_a_part_of_a_side_of_a_torus():
    peer("libtpu")
    for sizes in (dict(fsdp=32, tensor=2), dict(data=2, fsdp=2, pipe=2, tensor=8)):
        mesh = shard.make_mesh(shard.topology("v4:4x4x4"), **sizes)
        assert {a: n for a, n in mesh.shape.items() if n > 1} == sizes and len(set(mesh.devices.flat)) == 64


@pytest.mark.slow
def test_bench_trains_and_keeps_nothing(tmp_path, text):
    done = command(*SMALL, "--bench", "--mesh", "data=2", "--data", text, file=HERE / "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == {"tokens_per_second", "step_seconds", "model_flops_per_second", "matmul_flops_per_second", "peak_bytes",
                          "first_step_seconds"} and all(v > 0 for v in found.values())
    assert found["tokens_per_second"] * found["step_seconds"] == pytest.approx(4 * 32, rel=1e-3)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_trace_of_some_steps(tmp_path, text):
    import gzip
    done = command(*SMALL, "--steps", 8, "--profile", 3, "--data", text, "--out", tmp_path / "run")
    assert done.returncode == 0 and "a trace of 3 steps" in done.stdout, done.stderr
    trace, = (tmp_path / "run/profile").rglob("perfetto_trace.json.gz")
    assert json.load(gzip.open(trace))["traceEvents"]


def test_own_functions_reach_the_update():
    """A custom loss gives params - lr * grad of that loss, whatever the mesh."""
    target = np.arange(64, dtype=np.float32).reshape(8, 8) / 64
    init = lambda key: {"w": jnp.zeros((8, 8)), "b": jnp.zeros((8,))}
    collate = lambda examples: {"x": np.stack(examples)}
    def loss(params, batch):
        error = batch["x"] @ params["w"] + params["b"] - batch["x"] @ target
        return jnp.sum(error ** 2), len(batch["x"])
    rng = np.random.default_rng(0)
    examples = [rng.normal(size=8).astype(np.float32) for _ in range(32)]
    results = []
    for mesh in ("", "data=2", "fsdp=2,tensor=2", "tensor=4"):
        rows, result = learn(make(steps=5, batch=8), mesh, init=init, collate=collate, loss=loss,
                             examples=examples, held_out=examples[:5], predict=lambda p, b: b["x"] @ p["w"])
        assert np.asarray(result.outputs).shape[1] == 8
        results.append([r["loss"] for r in rows if "loss" in r] + [result.held_out])
    for other in results[1:]:
        assert other == pytest.approx(results[0], rel=1e-5)


def test_counts_may_be_fractions_and_integers_are_no_weights():
    """Divided by max(count, 1), a batch of small weights would learn too slowly."""
    one = dict(init=lambda key: {"w": jnp.ones(4)}, examples=[np.zeros(1)] * 8,
               collate=lambda e: {"x": np.stack(e)})
    loss = lambda p, b: (jnp.sum(p["w"]) * 0.25, jnp.float32(1 / 32) * len(b["x"]))
    assert learn(make(steps=1), loss=loss, **one)[0][0]["loss"] == pytest.approx(4)
    nothing = learn(make(steps=2), loss=lambda p, b: (0 * jnp.sum(p["w"]), 0), **one)[1]
    assert np.isfinite(nothing.params["w"]).all(), "a batch in which nothing is asked"
    with pytest.raises(shard.Refused, match="n is int32"):
        learn(make(), loss=loss, **{**one, "init": lambda key: {"n": jnp.zeros((), "int32")}})


# -------------------------------------------------------------------------------------------
# Faults

@pytest.mark.parametrize("mesh", ["", slow("data=2,pipe=2"), slow("fsdp=2,tensor=2")])
def test_a_gradient_that_is_not_finite_changes_nothing(mesh, tmp_path):
    """Clipping would spread it to every weight. The run goes on, and ends when it comes again and again."""
    poison = {3, 4, 10, 11, 12, 13}             # updates

    def collate(e):
        batch = data.collate(e, 16)
        return {**batch, "weights": batch["weights"] * np.float32(np.nan if e[0][0] == -1 else 1)}

    def examples(config, real=tokens_of):
        rows = real(config, 160)
        for at in poison:
            for i in data.order(160, 0, (at - 1) * 8, 8):
                rows[i] = np.full_like(rows[i], -1)
        return rows

    config = make(layers=4, max_skipped=4, out=str(tmp_path / "run"), save_every=2)
    with pytest.raises(train.Fault, match="step 13: the gradient was not finite, 4 times in a row"):
        learn(config, mesh, examples=examples(config), collate=collate)
    rows = [json.loads(line, parse_constant=lambda s: pytest.fail(s)) for line in open(tmp_path / "run/metrics.jsonl")]
    assert [r["step"] for r in rows] == list(range(1, 14)) and {r["step"] for r in rows if r["skipped"]} == poison
    assert [r["skipped"] for r in rows[9:]] == [1, 2, 3, 4] and rows[2]["loss"] is None and rows[2]["grad_norm"] is None
    saved = {p.name: model.load_run(tmp_path / "run", step=int(p.name))[0] for p in (tmp_path / "run/checkpoints").iterdir()}
    assert set(saved) == {"8", "10", "12"} and all(np.isfinite(w).all() for tree in saved.values() for w in jax.tree.leaves(tree))
    for a, b in zip(jax.tree.leaves(saved["10"]), jax.tree.leaves(saved["12"])):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(train.Fault, match="step 13: the gradient was not finite, 4 times in a row"):      # three of them are remembered
        learn(config, mesh, examples=examples(config), collate=collate)


def test_a_gradient_that_is_too_large_to_be_measured_changes_nothing():
    """Its numbers are finite, their squares are not: to clip by that would be to learn nothing, with a moment of 1e30."""
    given = dict(init=lambda key: {"w": jnp.ones(4)}, examples=[np.full(1, 1 + 1e30 * (i == 2), np.float32) for i in range(6)],
                 collate=lambda e: {"x": np.stack(e)}, loss=lambda p, b: (jnp.sum(p["w"]) * jnp.sum(b["x"]), 1))
    rows, result = learn(make(steps=6, batch=1), **given)
    seen = [row["skipped"] for row in rows if "skipped" in row]
    assert sorted(seen) == [0, 0, 0, 0, 0, 1] and np.isfinite(result.params["w"]).all() and (result.params["w"] < 1).all()


def test_a_checksum_is_of_every_bit_and_of_no_mesh():
    x = np.random.default_rng(0).normal(size=(8, 6, 4)).astype(np.float32)
    places = [P(), P("data"), P(None, None, "tensor"), P("tensor", None, "data")]
    sums = {int(jax.jit(train.checksum)(jax.device_put(x, jax.NamedSharding(mesh_of("data=2,tensor=4"), p)))) for p in places}
    assert len(sums) == 1
    for bit in np.random.default_rng(1).integers(0, x.size * 32, 200):
        y = x.copy().reshape(-1).view(np.uint32)
        y[bit // 32] ^= np.uint32(1) << np.uint32(bit % 32)
        assert int(train.checksum(jnp.asarray(y.view(np.float32).reshape(x.shape)))) not in sums
    y = x.copy()
    y[0, 1, 0], y[1, 0, 0] = x[1, 0, 0], x[0, 1, 0]
    assert int(train.checksum(jnp.asarray(x[::-1]))) not in sums and int(train.checksum(jnp.asarray(y))) not in sums
    for kind in (jnp.bfloat16, jnp.int32):
        assert int(train.checksum(jnp.asarray(x).astype(kind))) not in sums


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "run"
    rows, _ = learn(make(steps=6, save_every=2, out=str(folder)))
    return folder, rows


def largest(folder):
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


@pytest.mark.parametrize("harm", ["flip", "truncate", "delete", "meta", "empty", "renamed", "foreign"])
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_it_used(saved, harm, tmp_path):
    """A flipped byte is restored silently by orbax; an empty folder counts as a checkpoint."""
    run, rows = tmp_path / "run", saved[1]
    shutil.copytree(saved[0], run)
    newest = run / "checkpoints/6"
    file = largest(newest / "params")
    if harm == "flip":
        raw = bytearray(file.read_bytes())
        raw[len(raw) // 2] ^= 4
        file.write_bytes(raw)
    elif harm == "truncate":
        file.write_bytes(file.read_bytes()[:100])
    elif harm == "delete":
        file.unlink()
    elif harm == "meta":
        largest(newest / "meta").write_text("{")
    elif harm == "empty":
        shutil.rmtree(newest)
        newest.mkdir()
    elif harm == "renamed":
        newest = newest.rename(run / "checkpoints/7")
    else:
        newest = run / "checkpoints/7"
        newest.mkdir()
        (newest / "notes.txt").write_text("mine")
    said = []
    with pytest.MonkeyPatch.context() as patch:
        real = train.Run.restore
        patch.setattr(train.Run, "restore", lambda self, say: real(self, said.append))
        again, _ = learn(make(steps=8, save_every=2, out=str(run)), "tensor=2")
    assert len(said) == 1 and f"checkpoint {newest.name} is damaged" in said[0] and (run / f"checkpoints/damaged-{newest.name}").is_dir()
    assert again[0]["step"] == (7 if harm == "foreign" else 5)
    if harm != "foreign":
        assert again[0]["loss"] == pytest.approx(rows[4]["loss"], rel=1e-5)


def test_without_a_checkpoint_that_can_be_read_a_run_does_not_begin_anew_by_itself(saved, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(saved[0], run)
    for step in (2, 4, 6):
        largest(run / f"checkpoints/{step}/opt").write_bytes(b"")
    lines = (run / "metrics.jsonl").read_text()
    with pytest.raises(train.Fault, match="none of the 3 checkpoints"):
        learn(make(steps=8, save_every=2, out=str(run)))
    assert (run / "metrics.jsonl").read_text() == lines


def test_a_flipped_byte_passes_only_where_nobody_looks(saved, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(saved[0], run)
    meta = largest(run / "checkpoints/6/meta")
    was = json.loads(meta.read_text())
    meta.write_text(json.dumps({**was, "leaves": {**was["leaves"], "params.embed": "bfloat16[128, 32]"}}))
    with pytest.raises(shard.Refused, match="params.embed as bfloat16.* float32"):
        learn(make(steps=9, save_every=9, out=str(run)))
    meta.write_text(json.dumps({**was, "checksums": {**was["checksums"], "params.embed": 1}}))
    assert learn(make(steps=7, save_every=9, verify="off", out=str(run)))[0][0]["step"] == 7


def test_trouble_of_this_machine_sets_nothing_aside(saved, tmp_path, monkeypatch):
    run = tmp_path / "run"
    shutil.copytree(saved[0], run)
    import orbax.checkpoint as ocp
    with monkeypatch.context() as patch:
        patch.setattr(ocp.StandardCheckpointer, "restore", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(train.Fault, match="on this machine now.*nothing was set aside"):
            learn(make(steps=8, save_every=2, out=str(run)))
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["2", "4", "6"]
    assert learn(make(steps=7, save_every=9, out=str(run)))[0][0]["step"] == 7


def test_what_was_cut_short_is_cleared_away(saved, tmp_path):
    """A save that was killed, and a line of metrics, also one that lacks its end alone."""
    run = tmp_path / "run"
    shutil.copytree(saved[0], run)
    shutil.copytree(run / "checkpoints/6", run / "checkpoints/5.orbax-checkpoint-tmp")
    lines = (run / "metrics.jsonl").read_text()
    for cut in (1, 9):
        (run / "metrics.jsonl").write_text(lines[:-cut])
        learn(make(steps=7, save_every=9, out=str(run)))
        shutil.rmtree(run / "checkpoints/7")
        steps = [json.loads(line)["step"] for line in open(run / "metrics.jsonl")]
        assert steps[-1] == 7 and sorted(set(steps)) == steps and not list((run / "checkpoints").glob("*tmp*"))


def test_two_runs_do_not_write_in_one_folder(saved, tmp_path):
    import fcntl
    run = tmp_path / "run"
    shutil.copytree(saved[0], run)
    with open(run / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(shard.Refused, match="another run is writing there"):
            learn(make(steps=8, save_every=2, out=str(run)))
    learn(make(steps=8, save_every=2, out=str(run)))


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_earlier_checkpoints_are_whole(tmp_path, text):
    """The write fails in the background, after the loop has gone on."""
    import resource
    out = tmp_path / "run"
    go = ("--data", text, "--out", out, *SMALL, "--steps", 4, "--save_every", 2)
    assert command(*go).returncode == 0
    full = command(*go[:-4], "--steps", 8, "--save_every", 2, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000)))
    last = full.stderr.strip().splitlines()[-1]         # (tensorstore prints before it)
    assert full.returncode == 1 and last.startswith("error: ") and "too large" in last, full.stderr[-2000:]
    again = command(*go[:-4], "--steps", 8, "--save_every", 2)
    assert again.returncode == 0 and "continuing" in again.stdout and json.loads(open(out / "metrics.jsonl").readlines()[-1])["step"] == 8


def test_a_save_is_there_whatever_comes_after_it(tmp_path):
    made = []

    def collate(examples):
        made.append(1)
        if len(made) == 5:          # the first is asked for its shape; two steps, a save, one more step
            raise KeyError("ours")
        return data.collate(examples, 16)

    with pytest.raises(KeyError, match="ours"):
        learn(make(save_every=2, out=str(tmp_path / "run")), collate=collate)
    said = []
    assert learn(make(steps=4, save_every=2, out=str(tmp_path / "run")), said=said)[0][0]["step"] == 3
    assert f"continuing {tmp_path / 'run'} at step 2" in said


def test_a_save_that_was_not_made_is_said(tmp_path, monkeypatch):
    import orbax.checkpoint as ocp
    monkeypatch.setattr(ocp.CheckpointManager, "save", lambda *_, **__: False)
    with pytest.raises(train.Fault, match="the checkpoint of step 2 was not saved"):
        learn(make(steps=4, save_every=2, out=str(tmp_path / "run")))


def test_no_save_waits_for_its_checksums_to_be_compiled(tmp_path, monkeypatch):
    made, real = [], train.checksums
    monkeypatch.setattr(train, "checksums", lambda tree: made.append("sums") or real(tree))
    learn(make(steps=2, save_every=2, out=str(tmp_path / "run")), collate=lambda e: made.append("batch") or data.collate(e, 16))
    assert made == ["batch", "sums", "batch", "batch", "sums"]      # (the first for its shape)


def test_a_loss_that_jumps_is_said():
    said, made = [], []

    def collate(examples):
        made.append(1)
        batch = data.collate(examples, 16)
        return {**batch, "targets": np.full_like(batch["targets"], 60)} if len(made) == 52 else batch

    learn(make(steps=60), said=said, collate=collate)
    assert [line for line in said if "far above" in line] == [line for line in said if line.startswith("step 51: the loss")] != []


def test_what_reads_a_run_looks_at_what_it_reads(saved, tmp_path, capsys):
    """sample.py and load_run: what is damaged is passed over, and it is said."""
    run = tmp_path / "run"
    shutil.copytree(saved[0], run)
    want, _ = model.load_run(run, step=4)
    for step, (status, words) in {6: (0, "checkpoint 6 is damaged"), 4: (0, "checkpoint 4 is damaged"), 2: (1, "can be read")}.items():
        file = largest(run / f"checkpoints/{step}/params")
        raw = bytearray(file.read_bytes())
        raw[len(raw) // 2] ^= 4
        file.write_bytes(raw)
        with contextlib.nullcontext() if not status else pytest.raises(train.Fault, match=words):
            got, _ = model.load_run(run)
            assert words in capsys.readouterr().err
        if step == 6:
            jax.tree.map(np.testing.assert_array_equal, got, want)


def survives_kills(seed, kills, folder, start):
    """A command runs to its end, and once more with kill -9 and SIGTERM, so often, at any moment of its time: while it
    starts, compiles, steps, saves or restores. Both have the same metrics. start(folder) gives its processes."""
    rng, begin = np.random.default_rng(seed), time.monotonic()
    assert all(status == 0 for status, *_ in ends(start(folder / "whole")))
    length = time.monotonic() - begin
    for _ in range(kills):
        runs, begin = start(folder / "run"), time.monotonic()
        wait = rng.uniform(0, length)
        while time.monotonic() - begin < wait and all(run.poll() is None for run in runs):
            time.sleep(0.01)
        if any(run.poll() is not None for run in runs):     # what went on has less to do
            length = time.monotonic() - begin
        runs[rng.integers(len(runs))].send_signal(rng.choice([signal.SIGKILL, signal.SIGTERM]))
        for status, _, error in ends(runs):
            assert "Traceback" not in error, error
    for status, _, error in ends(start(folder / "run")):
        assert status == 0, error
    assert times_aside(folder / "run/metrics.jsonl") == times_aside(folder / "whole/metrics.jsonl")


KILLED = (*SMALL, "--mesh", "data=2,tensor=2", "--steps", 40, "--save_every", 5, "--eval_every", 15, "--dropout", 0.1)


@pytest.mark.slow
def test_kills_at_random_moments_change_nothing(tmp_path, text):
    start = lambda out: [started(*KILLED, "--data", text, "--out", out)]       # noqa: E731
    survives_kills(0, int(os.environ.get("KILLS", 4)), tmp_path, start)


@pytest.mark.parametrize("item", ["params", "opt", "meta", ""])
def test_any_byte_that_is_flipped_is_found_or_changes_nothing(saved, tmp_path, item):
    """In any file of the newest checkpoint: the one before is used, or the state is the one that was saved. (More
    of them, and of the kills above: FLIPS=500 KILLS=20 pytest test_all.py -m "slow or not slow" -k "flipped or kills".)"""
    run, rng = tmp_path / "run", np.random.default_rng(len(item))
    shutil.copytree(saved[0], run)
    newest, found = run / "checkpoints/6", 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "_loop", lambda program, run, *_: jax.device_get(run.restore(lambda _: None)))
        read = lambda: learn(make(steps=8, save_every=2, out=str(run)))[1]     # noqa: E731
        want, before = read(), int(read()["step"])
        files = sorted(p for p in (newest / item).rglob("*") if p.is_file() and p.stat().st_size)
        for _ in range(int(os.environ.get("FLIPS", 12)) // 4):
            path = files[rng.integers(len(files))]
            was = path.read_bytes()
            raw = bytearray(was)
            raw[rng.integers(len(raw))] ^= 1 << rng.integers(8)
            path.write_bytes(raw)
            try:
                got = read()
            except shard.Refused:       # it says that it holds other arrays
                got = None
            aside = newest.with_name("damaged-6")
            assert aside.is_dir() == (got is not None and int(got["step"]) == 4), path
            if aside.is_dir():
                aside.rename(newest)
            elif got is not None:
                jax.tree.map(np.testing.assert_array_equal, got, want)
            found += got is None or int(got["step"]) == 4
            path.write_bytes(was)
    print(f"{item or 'anywhere'}: {found} of the flips were found, the others changed nothing")
    assert before == 6


# -------------------------------------------------------------------------------------------
# Many hosts: real processes, and gloo between them

TWO = (*SMALL, "--mesh", "data=2,tensor=2", "--eval_every", 1000)

# A command of our own: train.py, in which one process does something when it is to make a batch, its 12th if not
# another. (The first is not of a step: its shape is looked at, before a checkpoint is.)
AWRY = """
import os, signal, sys, time
sys.path.insert(0, os.getcwd())
import train, data, jax
collate, made = data.collate, []
def other(examples, length):
    made.append(1)
    if len(made) == {} and jax.process_index() == 1:
        {}
    return collate(examples, length)
data.collate = other
train.run(train.main)
"""


def awry(folder, what, batch=12):
    file = folder / "awry.py"
    file.write_text(AWRY.format(batch, what))
    return file


# After its restore: every array as it is on the devices of all processes, to a file.
STATE = """
import os, sys
sys.path.insert(0, os.getcwd())
import numpy as np
import train, shard, jax
from jax.experimental import multihost_utils
restore = train.Run.restore
def other(self, say):
    state = restore(self, say)
    paths, leaves, _ = shard.flatten(state)
    leaves = multihost_utils.process_allgather(leaves, tiled=True)
    if jax.process_index() == 0:
        np.savez(self.folder / "state.npz", **dict(zip(paths, leaves)))
    return state
train.Run.restore = other
train.run(train.main)
"""


@pytest.mark.slow
def test_one_run_on_any_number_of_processes(tmp_path, text):
    """Two processes with two devices each; SIGTERM to one ends both after the same step. Four processes go on with
    one device each, and one with four: from the same bits, with the same losses."""
    words = (*TWO, "--steps", 40, "--save_every", 15, "--dropout", 0.1, "--data", text)
    assert all(status == 0 for status, *_ in ends(hosts(2, *words, "--out", tmp_path / "whole")))
    whole = [json.loads(line) for line in open(tmp_path / "whole/metrics.jsonl")]
    alone = command(*words, "--out", tmp_path / "alone")
    assert alone.returncode == 0 and " in 2 processes" not in alone.stdout
    for a, b in zip(whole, map(json.loads, open(tmp_path / "alone/metrics.jsonl")), strict=True):
        assert a.get("loss", a.get("eval_loss")) == pytest.approx(b.get("loss", b.get("eval_loss")), rel=1e-5)

    file = awry(tmp_path, "os.kill(os.getpid(), signal.SIGTERM)")
    (a, said, _), (b, nothing, _) = ends(hosts(2, *words, "--out", tmp_path / "run", file=file))
    assert a == b == 0 and "stopped at step" in said and " in 2 processes" in said
    assert not re.search("step|loss|mesh|weights|data ", nothing), nothing      # (gloo itself speaks)
    step = json.loads(open(tmp_path / "run/metrics.jsonl").readlines()[-1])["step"]
    assert 11 <= step < 40 and (tmp_path / f"run/checkpoints/{step}").is_dir()

    # A signal before the first step of a run that goes on is none the less for it.
    shutil.copytree(tmp_path / "run", tmp_path / "early")
    early = ends(hosts(2, *words, "--out", tmp_path / "early", file=awry(tmp_path, "os.kill(os.getpid(), signal.SIGTERM)", 1)))
    assert [status for status, *_ in early] == [0, 0] and re.search(rf"stopped at step ({step}|{step + 1}|{step + 2}|{step + 3}) ", early[0][1])

    file, states = tmp_path / "state.py", []
    file.write_text(STATE)
    for count in 4, 1:
        out = tmp_path / f"by-{count}"
        shutil.copytree(tmp_path / "run", out)
        go = (*words, "--out", out)
        for status, _, error in ends(hosts(count, *go, file=file) if count > 1 else [started(*go, file=file)]):
            assert status == 0, error
        states.append(dict(np.load(out / "state.npz")))
        for got, want in zip(map(json.loads, open(out / "metrics.jsonl")), whole, strict=True):
            assert got["step"] == want["step"]
            assert got.get("loss", 0) == pytest.approx(want.get("loss", 0), rel=1e-5)
    for path, leaf in states[0].items():
        np.testing.assert_array_equal(leaf, states[1][path], path)
    import orbax.checkpoint as ocp
    with ocp.StandardCheckpointer() as reader:
        params = reader.restore(tmp_path / f"run/checkpoints/{step}/params")
    for path, leaf in zip(*shard.flatten(params)[:2]):
        np.testing.assert_array_equal(leaf, states[0]["params." + path])


@pytest.mark.slow
def test_what_one_process_cannot_read_is_damaged_for_all(tmp_path, text):
    words = (*SMALL, "--mesh", "fsdp=2,tensor=2", "--eval_every", 1000, "--save_every", 3, "--data", text, "--out", tmp_path / "run")
    assert all(status == 0 for status, *_ in ends(hosts(2, *words, "--steps", 6)))
    file = tmp_path / "one.py"
    file.write_text("""
import os, sys
sys.path.insert(0, os.getcwd())
import train, jax
read = train._read_part
def other(folder, *rest):
    if folder.name == "6" and jax.process_index() == 1:
        raise train.Damaged("for one")
    return read(folder, *rest)
train._read_part = other
train.run(train.main)
""")
    (first, said, error), (second, _, other) = ends(hosts(2, *words, "--steps", 8, "--patience", 5, file=file), 60)
    assert first == second == 0, (error, other)
    assert "checkpoint 6 is damaged (for one)" in said and "at step 3" in said and (tmp_path / "run/checkpoints/damaged-6").is_dir()


@pytest.mark.slow
def test_two_processes_survive_kills_at_random_moments(tmp_path, text):
    start = lambda out: hosts(2, *KILLED, "--data", text, "--out", out)        # noqa: E731
    survives_kills(1, int(os.environ.get("KILLS", 2)), tmp_path, start)


@pytest.mark.slow
@pytest.mark.parametrize("what, says", [
    ("os.kill(os.getpid(), signal.SIGKILL)", "another process has ended"),
    ("os.kill(os.getpid(), signal.SIGSTOP)", "another process has ended, or cannot be reached"),
    ("raise KeyError('broken')", "another process has ended"),
    ("raise train.shard.Refused('a bad row')", "another process has ended"),
    ("time.sleep(600)", "a step took more than")])
def test_when_one_process_fails_all_end_and_say_so(tmp_path, text, what, says):
    """In 15 seconds, and a stalled one 15 after the limit, which follows from the steps before."""
    file = awry(tmp_path, what)
    words = (*TWO, "--steps", 500, "--save_every", 5, "--data", text, "--out", tmp_path / "run", "--patience", 10)
    runs = hosts(2, *words, file=file)
    until_step(9, tmp_path / "run", *runs)
    begin = time.monotonic()
    with contextlib.suppress(subprocess.TimeoutExpired):
        runs[0].wait(timeout=60)
    took, stalled = time.monotonic() - begin, "sleep" in what
    if "SIGSTOP" in what:
        runs[1].kill()
    (first, _, error), (second, _, broken) = ends(runs, 15)
    assert first not in (0, None) and second != 0 and took < (60 if stalled else 15), (took, error)
    if stalled and "a step took" in broken:         # the one that sleeps may be the first to notice
        error = broken
    assert says in error and "the same command in each goes on from the last checkpoint" in error
    assert ("_loop" in error) == stalled            # a stack only where it is known where
    assert "KeyError" not in what or "KeyError: 'broken'" in broken
    assert "Refused" not in what or (second == 2 and broken.splitlines()[-1] == "error: a bad row")
    if stalled:
        assert ends(hosts(2, *words[:-6], "--out", tmp_path / "run", "--steps", 14, "--data", text))[0][0] == 0


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_in_one_process_ends_all_with_what_was_saved(tmp_path, text):
    """On a slow disk: the save is still under way."""
    file = awry(tmp_path, "batch = collate(examples, length); batch['weights'] *= float('nan'); return batch")
    slow = "rename = os.rename\nos.rename = lambda *a, **k: (time.sleep(3), rename(*a, **k))\n"
    file.write_text(file.read_text().replace("train.run(", slow + "train.run("))
    words = (*TWO, "--steps", 40, "--save_every", 10, "--max_skipped", 1, "--data", text, "--out", tmp_path / "run")
    results = ends(hosts(2, *words, file=file))
    at = int(re.search(r"error: step (\d+): the gradient was not finite, 1 times in a row", results[0][2])[1])
    assert [status for status, *_ in results] == [1, 1] and 10 < at < 13 and model.load_run(tmp_path / "run", step=10)


@pytest.mark.slow
@pytest.mark.parametrize("case, says", [
    ("port", "is in use"), ("missing", "waiting for 2 processes at"), ("lr", "process 1 has lr 0.25 and process 0 has 0.5"),
    ("data", "process 1 has fingerprint"), ("out", "does not see what process 0 wrote"), ("run", "does not see what process 0 writes")])
def test_processes_that_do_not_fit_do_not_begin(tmp_path, text, case, says):
    own, more, words = (lambda i: ()), {}, [*TWO, "--steps", 4, "--lr", 0.5, "--out", tmp_path / "run", "--patience", 5]
    with socket.socket() as taken:
        if case == "port":
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            more["port"] = taken.getsockname()[1]
        elif case == "lr":
            own = lambda i: ("--lr", 0.5 / (i + 1))     # noqa: E731
        elif case == "out":
            own = lambda i: ("--out", tmp_path / f"run{i}")     # noqa: E731
        elif case == "run":         # of the same name, on another machine
            data.prepare([str(text)], tmp_path / "made")
            text = tmp_path / "made"
            for i in range(2):
                (tmp_path / str(i)).mkdir()
            own, more["cwd"] = lambda i: ("--out", "run"), lambda i: tmp_path / str(i)
        elif case == "data":
            for i in range(2):
                data.prepare([str(text / f"{j}.txt") for j in range(3 + i)], tmp_path / f"{i}/made")
            own, more["cwd"] = lambda i: ("--data", "made"), lambda i: tmp_path / f"{i}"
        runs = hosts(2, *words, *(() if case == "data" else ("--data", text)), own=own, **more)
        if case == "missing":
            runs.pop().kill()
        results = ends(runs, 60)
    # (One that waits for another that has ended is aborted by jax, after our line: -6.)
    assert all(status in (1, 2, -6) for status, *_ in results) and {1, 2} & {status for status, *_ in results}, results
    assert any(line.startswith("error: ") and says in line for _, _, error in results for line in error.splitlines()), results
    assert not (tmp_path / "run/metrics.jsonl").exists()


@pytest.mark.slow
def test_processes_are_found_where_a_scheduler_knows_them(tmp_path, text):
    """By jax, from SLURM's variables, if --distributed asks for it: a laptop's run never looks."""
    def one(i):
        env = {"SLURM_JOB_ID": str(20000 + os.getpid() % 20000), "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NTASKS": "2", "SLURM_PROCID": str(i),
               "SLURM_LOCALID": str(i), "SLURM_STEP_NUM_NODES": "1"}
        with pytest.MonkeyPatch.context() as patch:
            for k, v in env.items():
                patch.setenv(k, v)
            return started(*SMALL, "--mesh", "data=2", "--steps", 4, "--data", text, "--out", tmp_path / "run", "--distributed")
    results = ends([one(0), one(1)])
    assert [status for status, *_ in results] == [0, 0], results
    assert " in 2 processes" in results[0][1]


def test_a_run_of_another_task_is_refused(capsys, tmp_path):
    one = dict(init=lambda key: {"w": jnp.ones(4)}, examples=[np.zeros(1)] * 8,
               collate=lambda e: {"x": np.stack(e)}, loss=lambda p, b: (jnp.sum(p["w"]), 1))
    learn(make(steps=1, out=str(tmp_path / "o")), **one)
    before = sorted(tmp_path.rglob("*"))
    assert "another task" in refused(capsys, "--out", tmp_path / "o")
    assert "another task" in refused(capsys, "--run", tmp_path / "o", main=sample.main)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_compute_precision_is_the_one_that_is_said():
    """Resolved in one copy of the configuration and not in another, bfloat16 weights would be
    cast back and every product made in float32."""
    config = make(dtype="")
    params = shard.cast(model.init(config, jax.random.key(0)), "bfloat16")
    text = str(jax.make_jaxpr(lambda p: model.loss(p, batch_of(config), config))(params))
    assert re.search(r"bf16\[8,16,4,8\] = dot_general", text)
    text = str(jax.make_jaxpr(lambda p: model.loss(p, batch_of(config), make(dtype="bfloat16")))(
        model.init(config, jax.random.key(0))))
    assert re.search(r"bf16\[8,16,4,8\] = dot_general", text)


def test_dropout_differs_between_rows_places_and_sites():
    x, seeds = jnp.ones((2, 16, 64)), jnp.asarray([1, 2], jnp.uint32)
    where = jnp.broadcast_to(jnp.arange(16), (2, 16))
    a, b = (np.asarray(model._drop(x, 0.25, site, seeds, where)) for site in (0, 1))
    assert set(np.unique(a)) == {0, np.float32(1 / 0.75)} and abs((a == 0).mean() - 0.25) < 0.05
    for one, other in ((a[0], a[1]), (a[0, 0], a[0, 1]), (a, b)):
        assert 0.2 < (one != other).mean() < 0.55


def test_a_mean_for_a_loss_is_a_clear_error():
    with pytest.raises(shard.Refused, match=r"two scalars.*it returned float32\[\]: of a mean"):
        learn(make(), loss=lambda p, b: jnp.float32(0) * p["norm"].sum())


def test_a_bug_stays_a_traceback(monkeypatch):
    """Only what is refused is one line."""
    def main():
        raise ValueError("a bug")
    with pytest.raises(ValueError):
        train.run(main)
