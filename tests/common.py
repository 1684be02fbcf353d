"""What several test files use in addition to helpers.py: peers, exact gradients, commands in
separate processes, killed runs.
"""

import contextlib
import functools
import importlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import data
import train
from tests.helpers import (
    ROOT,
    batch_of,
    config_of,
    make,
    mesh_of,
    own,
    placed,
    program_of,
    without_times,
)
from zigzag.commands import command_line, training
from zigzag.commands import continued as continuing_run
from zigzag.core import flags
from zigzag.core import mesh as mesh_tools
from zigzag.core.chips import compiler_options
from zigzag.core.errors import ConfigError
from zigzag.core.mesh import shardings
from zigzag.core.parts import part
from zigzag.disk.mixture import order_at
from zigzag.disk.output import SPLITS
from zigzag.generate import passes
from zigzag.parallel.experts import ROUNDS
from zigzag.parallel.network import network_of
from zigzag.run import checks, source
from zigzag.run.plan import compiled, resolve_dtype


def peer(name):
    """Import a package to compare with, or an optional one. Without the package, the test skips; in
    .ci/run it fails."""
    if os.environ.get("ZIGZAG_CI"):
        return importlib.import_module(name)
    return pytest.importorskip(name, reason="pip install -r requirements-peers.txt")


def mean_loss(loss, config):
    """The mean loss as a function of weights and a batch."""
    def mean(params, batch):
        total, count = loss(params, batch, config)
        return total / count

    return mean


def byte_level(files, special):
    """A tokenizer of 300 ids: these special ids, and byte-level subwords of the files."""
    package = peer("tokenizers")
    made = package.Tokenizer(package.models.BPE())
    made.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = package.decoders.ByteLevel()
    made.train([str(path) for path in files], package.trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, show_progress=False,
        initial_alphabet=package.pre_tokenizers.ByteLevel.alphabet()))
    return made


def published_files(folder, text):
    """A folder with a published model's kind of tokenizer: <s>, </s> and the files in `text`."""
    made = byte_level(sorted(text.iterdir()), ["<s>", "</s>"])
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return folder


def json_lines(path, *rows):
    """Write a file of JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rewrite(path, **fields):
    """Change fields of an object in a JSON file. Returns the original object."""
    was = json.loads(path.read_text())
    path.write_text(json.dumps({**was, **fields}))
    return was


def data_py(*words):
    """Run data.py in this process."""
    data.main([str(word) for word in words])


def prepared(path, out, *more, **given):
    """The corpus that data.py makes from a path."""
    return data.prepare([str(path)], out, *more, **given)


TOKENS = np.random.default_rng(0).integers(0, 300, 5000)


def token_shards(folder):
    """A folder with TOKENS in three files; the last is held out."""
    folder.mkdir()
    parts = np.split(TOKENS.astype(np.uint16), (2000, 4500))
    for name, piece in zip(("train_0", "train_1", "val"), parts):
        piece.tofile(folder / f"{name}.bin")
    return folder


def documents_of(corpus):
    """[(ids, their weights)] of all documents, with the training documents first."""
    found = []
    for split in SPLITS:
        documents = corpus.documents(split)
        bounds = [*documents.starts.tolist(), len(documents.tokens)]
        found += [tuple(array[a:b].tolist() for array in (documents.tokens, documents.weights))
                  for a, b in zip(bounds, bounds[1:])]
    return found


def published_model(folder, text, scale=2, seed=0, **options):
    """A folder with a small model of 300 ids and the tokenizer of published_files. `scale`
    multiplies the weights, so that the logits differ more."""
    peer("safetensors")
    published = part("published", "a published folder")
    config = config_of(vocab_size=300, **options)
    params = jax.tree.map(lambda w: scale * w, net.init(config, jax.random.key(seed)))
    published.save_hf(folder, params, config)
    return published_files(folder, text)


def digit_pairs(path, count, digits=8, seed=0):
    """A file of pairs that a model can learn: at most `digits` digits, and the same digits in
    reverse order."""
    rng = np.random.default_rng(seed)
    words = ["".join(map(str, rng.integers(0, 10, rng.integers(1, digits + 1))))
             for _ in range(count)]
    return json_lines(path, *({"source": w, "target": w[::-1]} for w in words))


def order(count, seed, first, size):
    """The numbers, below `count`, of the examples at places first ... first + size - 1."""
    return order_at(count, seed, np.arange(first, first + size))


def slow(*values):
    """Parameters that only .ci/full runs; if a test has no quick ones, .ci/run takes some."""
    return pytest.param(*values, marks=pytest.mark.slow)


def full(*values):
    """Parameters that only .ci/full runs."""
    return pytest.param(*values, marks=pytest.mark.full)


# -------------------------------------------------------------------------------------------
# Training in this process

class net:
    """The functions of a network, found by its configuration or by that of its run."""

    @staticmethod
    def loss(params, batch, config, specs=None, with_aux=False):
        result = network_of(config).loss(params, batch, own(config), specs)
        return result if with_aux else result[:2]

    @staticmethod
    def forward(params, tokens, config, **more):
        return network_of(config).forward(params, tokens, own(config), **more)

    @staticmethod
    def flops(config, tokens):
        return network_of(config).training_flops(own(config), tokens)

    def _named(name):
        return staticmethod(lambda config, *args, **more: getattr(
            network_of(config), name)(own(config), *args, **more))

    init, weight_specs, weight_shapes = map(_named, ("init", "weight_specs", "weight_shapes"))
    parameters, batch_shapes = _named("parameters"), _named("batch_shapes")
    plan_weights = _named("plan_weights")


def weights_on(params, config, mesh):
    """These weights, sharded on a mesh; unchanged if there is none."""
    if not mesh:
        return params
    mesh = mesh_of(mesh)
    return jax.device_put(params, shardings(net.weight_specs(config, mesh), mesh))


def far_apart(config, times=3, seed=0):
    """Initial weights times a factor, so that few ids are nearly equally likely."""
    params = jax.jit(functools.partial(net.init, config))(jax.random.key(seed))
    return jax.tree.map(lambda w: times * w, params)


@contextlib.contextmanager
def plain_sgd():
    """Updates that subtract the plain gradient, without an optimizer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "optimizer", lambda config, decisions: optax.identity())
        patch.setattr(train, "learning_rate", lambda config, step: jnp.float32(1.0))
        yield


@functools.cache
def compiled_forward(config):
    return jax.jit(functools.partial(net.forward, config=config))


def logits_of(params, config, texts, length, given=None):
    """The logits of forward, which has no cache, for texts padded to this length."""
    tokens = np.zeros((len(texts), length), np.int32)
    for row, ids in zip(tokens, texts):
        row[:len(ids)] = ids
    return np.asarray(compiled_forward(config)(params, tokens, **(given or {})))


def log_probabilities(params, config, texts, given=None):
    """For each text, the log-probabilities from forward of its ids after the first."""
    logits = logits_of(params, config, texts, max(map(len, texts)), given)
    logs = np.asarray(jax.nn.log_softmax(logits))
    return [logs[row, np.arange(len(ids) - 1), ids[1:]] for row, ids in enumerate(texts)]


def steps_of(monkeypatch):
    """A list that collects (rows, steps) for each call of the compiled loop from now on."""
    steps, decode = [], passes.decode

    def spy(*given):
        found = decode(*given)
        steps.append((len(found["ids"]), int(found["written"])))
        return found

    monkeypatch.setattr(passes, "decode", spy)
    return steps


def gradients_of(config, mesh, batch, weights=None):
    """The gradient that a step applies at `weights` (None: at init's weights), recovered from plain
    SGD."""
    with plain_sgd():
        program = program_of(config, mesh)
        with jax.set_mesh(program.mesh):
            state = program.start(jax.random.key(0), weights)
            before = jax.device_get(state["params"])
            state, metrics = program.step(state, placed(program.mesh, batch))
            after = jax.device_get(state["params"])
    return jax.tree.map(lambda a, b: a - b, before, after), float(metrics["loss"])


def temporaries(config, mesh):
    """The bytes that a compiled step needs in addition to its arguments and results."""
    return compiled(program_of(config, mesh)).memory_analysis().temp_size_in_bytes


def assert_same_update(got, want, rounding=1e-7):
    """Assert that gradients are equal up to rounding, leaf by leaf. Gradients of gradients_of are p
    - (p - g) in float32, so each element carries the rounding of p."""
    for (path, b), a in zip(mesh_tools.by_path(want).items(), jax.tree.leaves(got), strict=True):
        slack = 1e-5 * np.linalg.norm(b) + rounding * np.sqrt(b.size)
        assert np.linalg.norm(a - b) < slack, path


@contextlib.contextmanager
def in_float64():
    """Run our code in float64."""
    cast = mesh_tools.cast

    def as_it_is(tree, dtype):
        return tree

    with jax.enable_x64(True), pytest.MonkeyPatch.context() as patch:
        for module in list(sys.modules.values()):       # importers hold it under a name
            if getattr(module, "cast", None) is cast:
                patch.setattr(module, "cast", as_it_is)
        patch.setattr(jnp, "float32", jnp.float64)      # for code that computes "in float32"
        yield patch


# The plain formula knows nothing about sums over devices or about splits.
NOT_IN_THE_FORMULA = ("accumulate", "microbatches", "schedule", "chunks", "override", "remat",
                      "zero", "fsdp_min", "sum_dtype", "overlap", "expert_room")


@functools.lru_cache(maxsize=None)
def _of_the_formula(config):
    """(gradients, (sum, count, aux)): autodiff of net.loss without a mesh, in float64."""
    def loss(params, batch):
        sums = net.loss(params, batch, config, with_aux=True)
        return sums[0], sums

    params, batch = exact_inputs(config)
    (_, sums), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, batch)
    return jax.device_get((gradients, sums))


@functools.lru_cache(maxsize=None)
def exact_inputs(config):
    """Initial weights, and a batch whose rows have different numbers of targets."""
    params = jax.jit(functools.partial(net.init, config))(jax.random.key(0))
    rng = np.random.default_rng(0)
    c, rows = config.network, config.batch
    masks = rng.random((rows, c.seq_len)) < np.linspace(0.2, 1, rows)[:, None]
    if getattr(c, "head", "tokens") != "classes":
        return jax.device_get(params), batch_of(config, weights=masks)
    shapes = net.batch_shapes(config, rows) | {
        "seeds": jax.ShapeDtypeStruct((rows,), jnp.uint32)}
    limits = {"tokens": c.vocab_size, "labels": c.labels, "seeds": 2**31}
    batch = {name: rng.normal(size=x.shape) if name == "source" else masks.astype(x.dtype)
             if name == "mask" else rng.integers(0, limits[name], x.shape).astype(x.dtype)
             for name, x in shapes.items()}
    return jax.device_get(params), batch


def sums_and_gradients(config, mesh, params, batch):
    """What the training step computes before its update, over the whole batch: (gradients, (sum,
    count, aux))."""
    program = program_of(config, mesh)
    gradients = train.make_gradients(program.plan)
    with jax.set_mesh(program.mesh):
        weights = jax.tree.map(lambda w, like: jax.device_put(w, like.sharding), params,
                               program.weights(program.state))
        options = compiler_options(program.mesh)
        trained, frozen = program.plan.in_two(program.permute(weights))
        found, sums = jax.jit(gradients, compiler_options=options)(
            trained, placed(program.mesh, batch), frozen)
        return jax.device_get((program.permute(found, back=True), sums))


def assert_same_on(mesh, rtol=1e-9, **changes):
    """Assert that the step on this mesh finds the same sum, count, other sums and gradients as
    autodiff of the plain formula without a mesh. Both compute in float64, so rounding cannot
    explain a difference. Returns the mean number of rounds of tokens to experts."""
    config = make(**changes)
    with in_float64():
        plain = make(**{k: v for k, v in changes.items() if k not in NOT_IN_THE_FORMULA})
        want = _of_the_formula(plain)
        got = sums_and_gradients(config, mesh, *exact_inputs(plain))
    total, count, others = (*want[1], {})[:3]
    others = {name: x for name, x in others.items() if name != ROUNDS}
    rounds = got[1][2].pop(ROUNDS, 0) / count
    assert_agree(got, (want[0], (total, count, others)), rtol, beside=want[0])
    return rounds


def assert_agree(got, want, rtol, beside=None):
    """Assert that each leaf's error is at most `rtol` times its norm, plus a thousandth of `rtol`
    times the norm of the whole tree, or of `beside`."""
    size = float(optax.tree.norm(want if beside is None else beside))
    for (path, b), a in zip(mesh_tools.by_path(want).items(), jax.tree.leaves(got), strict=True):
        error = np.linalg.norm(np.asarray(a) - b)
        assert error <= rtol * (np.linalg.norm(b) + 1e-3 * size), (path, error, np.linalg.norm(b))


def refused(capsys, *words, main=None):
    """Assert that a command line ends with exit status 2 and one line. Returns that error."""
    with pytest.raises(SystemExit) as e:
        flags.run_main(lambda: (main or train.main)([str(w) for w in words]))
    error = capsys.readouterr().err
    assert e.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1, error
    return error


def refuses(says):
    """A block that must end in a ConfigError whose text matches this pattern."""
    return pytest.raises(ConfigError, match=says)


# -------------------------------------------------------------------------------------------
# Commands, in this process or each in a separate one

SMALL = ("--layers", 2, "--d_model", 32, "--heads", 4, "--seq_len", 32, "--batch", 4)

SMALL_PAIRS = ("--model", "transformer", "--encoder_layers", 1, "--layers", 1, "--d_model", 16,
               "--heads", 2, "--source_len", 8, "--seq_len", 8)

WORDS = ["a".join(parts) for parts in itertools.product(
    ("b", "ch", "d", "fr", "g"), ("l", "m", "nd", "p", "rk"), ("s", "t"))]


def continued(*words):
    """The configuration that a command line of train.py asks for."""
    return continuing_run.continued(command_line.read_flags([str(w) for w in words]))


def check_network(config, mesh):
    """Refuse, as train.py does, a network that this mesh cannot train."""
    checks.check_network(config, network_of(config), mesh)


def opened(config, run, tokenizer=None, ready=0, fingerprint=""):
    """Open the --data of a configuration for the run in this folder; gives an OpenedData."""
    return training.opener(source.kind_of(config))(config, tokenizer, run, ready, fingerprint)


def train_here(config, mesh):
    """Train on --data on this mesh, as train.py does."""
    with training.opened(resolve_dtype(config, mesh)) as (config, task, say):
        return train.fit(config, task, mesh=mesh, say=say)


def go(*words):
    """Run train.py in this process, on one device."""
    config = continued(*words)
    train_here(config, mesh_of(""))
    return config


def _words(file, words):
    """The command that runs a file of ours, "-m MODULE", or python with a list of arguments."""
    at = file if isinstance(file, list) else (
        str(file).split() if str(file).startswith("-m ") else [str(ROOT / file)])
    return [sys.executable, *at, *map(str, words)]


def command(*words, file="train.py", env=None, **more):
    """Run a command in a separate process, and wait for its end."""
    return subprocess.run(
        _words(file, words), text=True, capture_output=True,
        timeout=600, cwd=more.pop("cwd", ROOT),
        env={**os.environ, "JAX_PLATFORMS": "cpu", **(env or {})}, **more)


def succeeds(*words, **more):
    """Run a command that must end with status 0."""
    done = command(*words, **more)
    assert done.returncode == 0, done.stderr
    return done


def started(*words, file="train.py", cwd=ROOT):
    """Start a command without waiting for it."""
    return subprocess.Popen(
        _words(file, words), text=True, cwd=cwd,
        env={**os.environ, "JAX_PLATFORMS": "cpu"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def until_step(at, out, *runs):
    """Wait until a run has logged step `at`, or until a process has ended."""
    while all(run.poll() is None for run in runs):
        with contextlib.suppress(OSError, ValueError, IndexError):
            if json.loads((Path(out) / "metrics.jsonl").read_text().splitlines()[-1])["step"] >= at:
                break
        time.sleep(0.02)


def hosts(count, *words, own=lambda i: (), cwd=lambda i: ROOT, port=None, **more):
    """Start the same command in several processes. own(i) has the additional words for process i,
    and cwd(i) is its working directory."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = port or free.getsockname()[1]
    return [started(*words, *own(i), "--coordinator", f"127.0.0.1:{port}", "--processes", count,
                    "--process_id", i, cwd=cwd(i), **more) for i in range(count)]


def ends(runs, within=240):
    """Wait until all processes end by themselves. Returns (status, stdout, stderr) of each."""
    begin, results = time.monotonic(), []
    try:
        for run in runs:
            out, error = run.communicate(timeout=max(1, within - (time.monotonic() - begin)))
            results.append((run.returncode, out, error))
    finally:
        for run in runs:
            run.kill()
    return results


def all_succeed(runs):
    """ends(), for processes that must all end with status 0."""
    results = ends(runs)
    assert all(status == 0 for status, *_ in results), results
    return results


def survives_kills(seed, kills, folder, start):
    """Run a command to its end. Then run it again, killed `kills` times (-9 or SIGTERM) at any
    moment: while it starts, compiles, steps, saves or restores. Assert that both have the same
    metrics. start(folder) returns its processes."""
    rng, begin = np.random.default_rng(seed), time.monotonic()
    assert all(status == 0 for status, *_ in ends(start(folder / "whole")))
    length = time.monotonic() - begin
    for _ in range(kills):
        runs, begin = start(folder / "run"), time.monotonic()
        wait = rng.uniform(0, length)
        while time.monotonic() - begin < wait and all(run.poll() is None for run in runs):
            time.sleep(0.01)
        if any(run.poll() is not None for run in runs):     # the rest takes less time
            length = time.monotonic() - begin
        runs[rng.integers(len(runs))].send_signal(rng.choice([signal.SIGKILL, signal.SIGTERM]))
        for status, _, error in ends(runs):
            assert "Traceback" not in error, error
    for status, _, error in ends(start(folder / "run")):
        assert status == 0, error
    assert without_times(folder / "run/metrics.jsonl") == without_times(
        folder / "whole/metrics.jsonl")
