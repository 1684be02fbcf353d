"""A run's folder: the saved state comes back, whatever happens to the process or the disk.

More of the random tests: FLIPS=500 KILLS=20 pytest tests -m "slow or not slow" -k "flipped
or kills".
"""

import contextlib
import dataclasses
import fcntl
import functools
import json
import os
import resource
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import data
import model
import sample
import train
from tests.common import SMALL, command, full, refused, rewrite, started, survives_kills
from tests.helpers import KeepRows, learn, losses_of, make, mesh_of, needed
from zigzag.core import flags
from zigzag.core.errors import ConfigError, RunError
from zigzag.core.mesh import cast
from zigzag.disk import checkpoint
from zigzag.parallel.network import NETWORKS
from zigzag.parallel.saved import load_run, read_run_weights
from zigzag.parallel.table import Weight
from zigzag.run.continuing import check_folder
from zigzag.run.plan import Program

transformer = needed("published.transformer")


def train_in(folder, steps, save_every=2, changes={}, **given):
    """Train up to a step in this folder, from where it is."""
    return learn(make(steps=steps, save_every=save_every, out=str(folder), **changes), **given)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a run with checkpoints 2, 4 and 6, and its rows."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    rows, _ = train_in(folder, 6)
    return folder, rows


@pytest.fixture
def run(saved, tmp_path):
    """A copy of that folder."""
    shutil.copytree(saved[0], tmp_path / "run")
    return tmp_path / "run"


def largest(folder):
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def flip(file, byte=None, bit=2):
    """Change one bit of a file, in the middle or at a byte."""
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2 if byte is None else byte] ^= 1 << bit
    file.write_bytes(raw)


# -------------------------------------------------------------------------------------------
# Continuing a run

@pytest.mark.parametrize("mesh, ema", [("", 0), full("fsdp=2,tensor=2", 0), full("pipe=2", 0.9)])
def test_weights_in_16_bits_are_those_of_the_run_rounded(tmp_path, monkeypatch, mesh, ema):
    """--save_dtype that rounds the optimizer's state, or what training goes on with; a reader that
    expects 32 bits; a run that resumes from anything but the rounded weights."""
    narrow, wide = tmp_path / "narrow", tmp_path / "wide"
    asked = dict(save_dtype="bfloat16", ema=ema)
    rows = train_in(narrow, 3, 3, asked, mesh=mesh)[0]
    assert losses_of(rows) == losses_of(train_in(wide, 3, 3, dict(ema=ema), mesh=mesh)[0])
    meta, meta_of_wide = (json.loads((folder / "checkpoints/3/meta/metadata").read_text())
                          for folder in (narrow, wide))
    for path, kind in meta["leaves"].items():
        is_weight = path.startswith("params")
        assert kind == meta_of_wide["leaves"][path].replace("float32", "bfloat16" if is_weight
                                                            else "float32")
        assert is_weight or meta["checksums"][path] == meta_of_wide["checksums"][path], path
    for a, b in zip(*(jax.tree.leaves(load_run(folder)[0]) for folder in (narrow, wide))):
        assert a.dtype == np.float32 and (a == b.astype("bfloat16").astype(np.float32)).all()
    network = NETWORKS["decoder"]       # as --init_from reads them
    places = network.places(load_run(narrow)[1])
    assert {w.dtype for w in jax.tree.leaves(read_run_weights(network, narrow, places))} == {
        np.dtype("float32")}

    def rounded(program, on_disk):
        params = cast(cast(on_disk["params"], "bfloat16"), "float32")
        return restored(program, {**on_disk, "params": params})

    found = train_in(narrow, 6, 3, asked, mesh="data=2")
    restored = Program.restored
    monkeypatch.setattr(Program, "restored", rounded)
    assert losses_of(found[0]) == pytest.approx(
        losses_of(train_in(wide, 6, 3, dict(ema=ema), mesh=mesh)[0]), rel=2e-6)


def test_a_model_is_loaded_in_the_dtype_that_is_asked(run):
    """sample.load(dtype=) that returns 32 bits, or rounds to 16 and back."""
    exact, rounded = (jax.tree.leaves(sample.load(run, dtype=dtype)[0])
                      for dtype in ("float32", "bfloat16"))
    for a, b in zip(exact, rounded, strict=True):
        assert b.dtype == jnp.bfloat16 and (b == a.astype(b.dtype)).all()


@pytest.mark.full
def test_kills_at_random_moments_change_nothing(tmp_path, text):
    """A folder that cannot be continued, or is continued wrongly, after kill -9 at some moment:
    rows of a mixture that depend on when the process began."""
    words = (*SMALL, "--mesh", "data=2,tensor=2", "--steps", 40, "--save_every", 5,
             "--eval_every", 15, "--dropout", 0.1, "--data", text / "1.txt", text / "2.txt",
             "--mix", 3, 1, "--pack", "documents")
    survives_kills(0, int(os.environ.get("KILLS", 4)), tmp_path,
                   lambda out: [started(*words, "--out", out)])


@pytest.mark.full
def test_a_save_is_there_whatever_comes_after_it(tmp_path):
    """A save in flight that is lost because orbax is not closed, after an exception too."""
    made = []

    def collate(examples):
        made.append(1)
        if len(made) == 5:      # the first is for its shape; then two steps, a save, one more step
            raise KeyError("ours")
        return data.collate(examples, 16)

    with pytest.raises(KeyError, match="ours"):
        train_in(tmp_path / "run", 20, collate=collate)
    lines = []
    rows, _ = train_in(tmp_path / "run", 4, lines=lines)
    assert rows[0]["step"] == 3 and f"continuing {tmp_path / 'run'} at step 2 of 4" in lines


@pytest.mark.parametrize("kept", [
    lambda: jnp.arange(5) % 2 == 0, full(lambda: jnp.bool_(True)),
    full(lambda: jnp.arange(4) * (1 - 2j)),
    full(lambda: jnp.arange(4, dtype="float8_e4m3fn"))],
    ids=["bools", "a bool", "complex", "float8"])
def test_a_state_keeps_what_is_no_float(tmp_path, kept):
    """45 lines of jax before the first update, for the bool of optax.apply_if_finite; a flipped bit
    in an imaginary part that restores silently."""
    keeps = optax.GradientTransformation(lambda params: kept(), lambda g, state, params=None: (
        jax.tree.map(lambda g: -0.1 * g, g), state))
    for steps in (2, 3):        # (the second continues the first)
        train_in(tmp_path / "run", steps, 1, optimizer=keeps)
    x = np.array(kept())
    one = x.reshape(-1)[-1:]        # (of a complex number, the sign of its imaginary part)
    one[:] = ~one if x.dtype == bool else one.conj() if np.iscomplexobj(x) else -one
    assert checkpoint.checksum(jnp.asarray(x)) != checkpoint.checksum(kept())


@pytest.mark.parametrize("kept, says", [
    (lambda: jax.random.key(1), "key_data"), (lambda: jnp.zeros((0, 3)), "nonempty"),
    (lambda: jnp.zeros(4, "int4"), "at least 8 bits")], ids=["key", "empty", "int4"])
def test_a_state_that_no_checkpoint_holds_is_one_line(tmp_path, kept, says):
    """A run that trains for an hour, and ends at its first save."""
    def loss(trees, b):
        return jnp.sum(trees["net"] * b["x"]), len(b["x"])

    def step(state, batch, gradients, update):
        grads, numbers = gradients(loss, {"net": state["params"]["net"]}, "net", batch)
        return update(state, "net", grads), numbers

    with pytest.raises(ConfigError, match=f"params.kept is .*{says}.*--out ''"):
        learn(make(steps=2, out=str(tmp_path / "run")), step=step, loss=loss,
              init=lambda key: {"net": jnp.ones(16), "kept": kept()},
              examples=[np.ones(16, "float32")] * 16, collate=lambda e: {"x": np.stack(e)})
    assert not (tmp_path / "run").exists()


def test_a_save_that_was_not_made_is_said(tmp_path, monkeypatch):
    """A save that orbax refuses by returning False, unnoticed."""
    monkeypatch.setattr(ocp.CheckpointManager, "save", lambda *_, **__: False)
    with pytest.raises(RunError, match="the checkpoint of step 2 was not saved"):
        train_in(tmp_path / "run", 4)


def test_no_save_waits_for_its_checksums_to_be_compiled(tmp_path, monkeypatch):
    """A first save that stops the devices while its checksums compile."""
    made, real = [], checkpoint.checksums
    monkeypatch.setattr(checkpoint, "checksums", lambda tree: made.append("sums") or real(tree))
    train_in(tmp_path / "run", 2,
             collate=lambda examples: made.append("batch") or data.collate(examples, 16))
    assert made == ["batch", "sums", "batch", "batch", "sums"]      # (the first for its shape)


@pytest.mark.full
def test_a_full_disk_is_one_line_and_earlier_checkpoints_are_complete(tmp_path, text):
    """Status 0 and no checkpoint, because the write fails in the background."""
    out = tmp_path / "run"
    words = ("--data", text, "--out", out, *SMALL, "--save_every", 2)
    assert command(*words, "--steps", 4).returncode == 0
    full = command(*words, "--steps", 8, preexec_fn=lambda: resource.setrlimit(
        resource.RLIMIT_FSIZE, (30_000, 30_000)))
    last = full.stderr.strip().splitlines()[-1]         # (tensorstore prints before it)
    assert full.returncode == 1, full.stderr[-2000:]
    assert last.startswith("error: ") and "too large" in last, full.stderr[-2000:]
    again = command(*words, "--steps", 8)
    assert again.returncode == 0 and "continuing" in again.stdout
    assert json.loads(open(out / "metrics.jsonl").readlines()[-1])["step"] == 8


@pytest.mark.parametrize("mesh", ["", full("fsdp=2,tensor=2"), full("data=4")])
def test_weights_that_are_not_finite_are_not_saved(tmp_path, mesh):
    """A newest checkpoint that no run can use: the gradient was finite, and the update was not. A
    weight that was infinite from the beginning is the task's own."""
    optimizer = optax.scale_by_schedule(lambda n: jnp.where(n == 2, jnp.inf, -0.1))
    config = make(steps=6, save_every=1, out=str(tmp_path / "run"))
    with pytest.raises(RunError, match="step 3: not saved, because .* became infinite or NaN"):
        learn(config, mesh, optimizer=optimizer)
    assert sorted(map(int, os.listdir(tmp_path / "run/checkpoints"))) == [1, 2]
    rows, found = learn(config, mesh, optimizer=optax.scale_by_schedule(lambda n: -0.1))
    assert found.step == 6 and np.isfinite(rows[-1]["loss"])

    init, loss, _ = train.language(config)
    _, found = learn(make(steps=2, save_every=1, out=str(tmp_path / "own")), mesh,
                     init=lambda key: {"net": init(key), "mask": jnp.array([0.0, -jnp.inf])},
                     loss=lambda params, batch: loss(params["net"], batch),
                     optimizer=optax.sgd(0.1))
    assert found.step == 2


@pytest.mark.full
def test_what_was_cut_short_is_cleared_away(run):
    """A killed save that keeps its space on the disk; a truncated line of metrics (perhaps only its
    newline is missing) that is joined to the next."""
    shutil.copytree(run / "checkpoints/6", run / "checkpoints/5.orbax-checkpoint-tmp")
    lines = (run / "metrics.jsonl").read_text()
    for cut in (1, 9):
        (run / "metrics.jsonl").write_text(lines[:-cut] + '\n{"step": 3, "loss": "y"}' * (cut > 1))
        train_in(run, 7, 9)
        shutil.rmtree(run / "checkpoints/7")
        steps = [json.loads(line)["step"] for line in open(run / "metrics.jsonl")]
        assert steps[-1] == 7 and sorted(set(steps)) == steps
        assert not list((run / "checkpoints").glob("*tmp*"))


def test_a_folder_that_is_moved_while_a_run_writes_there_ends_the_run(tmp_path):
    """Status 0, and checkpoints without a config.json in a new folder of the same name."""
    class Moves(KeepRows):
        def step(self, row, *given, **named):
            if row["step"] == 3:
                (tmp_path / "run").rename(tmp_path / "moved")

    with pytest.raises(RunError, match="step 8 was not saved, because this folder was moved"):
        learn(make(steps=8, save_every=8, out=str(tmp_path / "run")), say=Moves([], []))
    assert not (tmp_path / "run").exists()
    assert train_in(tmp_path / "moved", 8)[1].step == 8


def test_an_empty_folder_among_the_checkpoints_is_no_step(run):
    """A run that is at step 77 already, because of a folder of that name."""
    (run / "checkpoints/77").mkdir()
    assert checkpoint.newest_step(run) == 6
    assert train_in(run, 8)[1].step == 8


def test_two_runs_do_not_write_in_one_folder(run):
    """Two runs that both write, which orbax allows, and leave a folder that cannot be read."""
    with open(run / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another run is writing there"):
            train_in(run, 8)
    train_in(run, 8)


def test_a_run_says_what_it_is_before_its_first_step(tmp_path):
    """A run without config.json that was killed before its first checkpoint."""
    there = []

    class Looks(KeepRows):
        def step(self, *given, **named):
            there.append(json.loads((tmp_path / "run/config.json").read_text())["steps"])

    learn(make(steps=2, save_every=0, out=str(tmp_path / "run")), say=Looks([], []))
    assert there == [2, 2]


def test_a_run_of_another_task_is_refused(capsys, tmp_path):
    """Weights of another task read as a transformer's, or its folder written to."""
    task = dict(init=lambda key: {"w": jnp.ones(4)}, examples=[np.zeros(1)] * 8,
                collate=lambda e: {"x": np.stack(e)}, loss=lambda p, b: (jnp.sum(p["w"]), 1))
    learn(make(steps=1, out=str(tmp_path / "o")), **task)
    before = sorted(tmp_path.rglob("*"))
    assert "a different task" in refused(capsys, "--out", tmp_path / "o")
    assert "a different task" in refused(capsys, "--run", tmp_path / "o", main=sample.main)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("record, says", [
    (b"", "no run there"), (b"{", "cannot read"), (b"[1]", "cannot read"),
    (b"null", "cannot read"), (b"\xff", "cannot read"), (None, "cannot read"),
    (b'{"name": 1}', "no configuration"),
    (b'{"layers": 2, "published": "{}"}', "with its model_type"),
    (b'{"layers": 2, "published": "[3"}', "with its model_type"),
    (b'{"layers": 2, "published": "{\\"model_type\\": []}"}', "with its model_type")])
def test_a_record_that_cannot_be_read_is_one_line(tmp_path, record, says):
    """A traceback for a damaged config.json, or for a folder that is not a run's."""
    if record is not None:
        (tmp_path / "config.json").write_bytes(record.replace(b"{", b'{"format": 1, ', 1))
    with pytest.raises(ConfigError, match=says):
        checkpoint.run_config(tmp_path, transformer.Config)


def test_a_field_that_is_newer_than_a_run_had_its_default(tmp_path):
    """A run that is continued with another value of a field that was added since."""
    (tmp_path / "config.json").write_text(json.dumps(
        {"format": 1, "network": "decoder", "layers": 2, "d_model": 64, "data": ["a"]}))
    check = functools.partial(check_folder, train.Config, str(tmp_path))
    # (head_dim followed from the width.)
    check({"layers": 2, "experts": 0, "head_dim": 8, "data": ("a",)})
    with pytest.raises(ConfigError, match="head_dim 8, not 9; experts 0, not 2"):
        check({"layers": 2, "head_dim": 9, "experts": 2})


# -------------------------------------------------------------------------------------------
# Damage

def test_a_checksum_is_of_every_bit_and_of_no_mesh():
    """Checksums that do not change when two elements are exchanged, or for some bits."""
    x = np.random.default_rng(0).normal(size=(8, 6, 4)).astype(np.float32)
    mesh = mesh_of("data=2,tensor=4")
    specs = [jax.P(), jax.P("data"), jax.P(None, None, "tensor"), jax.P("tensor", None, "data")]
    sums = {int(jax.jit(checkpoint.checksum)(jax.device_put(x, jax.NamedSharding(mesh, spec))))
            for spec in specs}
    assert len(sums) == 1

    def seen(y):
        return int(checkpoint.checksum(jnp.asarray(y))) in sums

    for bit in np.random.default_rng(1).integers(0, x.size * 32, 200):
        y = x.copy().reshape(-1).view(np.uint32)
        y[bit // 32] ^= np.uint32(1) << np.uint32(bit % 32)
        assert not seen(y.view(np.float32).reshape(x.shape))
    y = x.copy()
    y[0, 1, 0], y[1, 0, 0] = x[1, 0, 0], x[0, 1, 0]
    assert seen(x) and not seen(x[::-1]) and not seen(y)
    for kind in (jnp.bfloat16, jnp.int32):
        assert not seen(jnp.asarray(x).astype(kind))


@pytest.mark.parametrize("harm", ["flip", *map(full, ("meta", "empty", "renamed", "foreign"))])
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_it_used(saved, harm, run):
    """A flipped byte that orbax restores silently; an empty folder that counts as a checkpoint."""
    rows = saved[1]
    newest = run / "checkpoints/6"
    if harm == "flip":
        flip(largest(newest / "params"))
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
        real = checkpoint.RunFolder.restore
        patch.setattr(checkpoint.RunFolder, "restore", lambda self, say: real(self, said.append))
        again, _ = train_in(run, 8, mesh="tensor=2")
    assert len(said) == 1 and f"checkpoint {newest.name} is damaged" in said[0]
    assert (run / f"checkpoints/damaged-{newest.name}").is_dir()
    assert again[0]["step"] == (7 if harm == "foreign" else 5)
    if harm != "foreign":
        assert again[0]["loss"] == pytest.approx(rows[4]["loss"], rel=1e-5)


@pytest.mark.full
def test_a_change_is_noted_at_the_step_from_which_it_holds(run):
    """A change recorded at the step of a damaged checkpoint, which was not used."""
    largest(run / "checkpoints/6/params").unlink()
    train_in(run, 7, 9, dict(lr=0.001, change=("lr",)))
    train_in(run, 7, 9, dict(lr=0.001))
    record = json.loads((run / "config.json").read_text())
    assert record["changes"] == [{"step": 4, "lr": [0.015625, 0.001]}]


@pytest.mark.full
def test_without_a_checkpoint_that_can_be_read_a_run_does_not_begin_anew_by_itself(run):
    """A new run that overwrites the metrics of one whose checkpoints are all damaged."""
    for step in (2, 4, 6):
        largest(run / f"checkpoints/{step}/opt").write_bytes(b"")
    lines = (run / "metrics.jsonl").read_text()
    with pytest.raises(RunError, match="none of the 3 checkpoints"):
        train_in(run, 8)
    assert (run / "metrics.jsonl").read_text() == lines


@pytest.mark.full
def test_a_flipped_byte_passes_only_where_nobody_looks(run):
    """Arrays of another dtype, which orbax casts silently; --verify off that verifies."""
    meta = largest(run / "checkpoints/6/meta")
    was = json.loads(meta.read_text())
    rewrite(meta, leaves={**was["leaves"], "params.embed": "bfloat16[128, 32]"})
    with pytest.raises(ConfigError, match="embed was bfloat16.* and is float32"):
        train_in(run, 9, 9)
    rewrite(meta, leaves=was["leaves"], checksums={**was["checksums"], "params.embed": 1})
    rows, _ = train_in(run, 7, 9, dict(verify="off"))
    assert rows[0]["step"] == 7


def edit_weights(monkeypatch, change):
    """model.py with another table of weights."""
    def weight_table(c):
        table = usual(c)
        change(table["layers"], lambda *size: Weight(("L", "D", "F")[:len(size)], size, 0.1,
                                                      ("pipe", "", "")[:len(size)]))
        return table

    usual = model.weight_table
    network = dataclasses.replace(model.NETWORK, weight_table=weight_table)
    monkeypatch.setattr(model, "NETWORK", network)
    monkeypatch.setitem(NETWORKS, "decoder", network)


def of_any_weights(params, batch):
    return sum(jnp.sum(w) for w in jax.tree.leaves(params)), jnp.float32(1)


EDITS = {
    "a new weight": (lambda w, make: w.update(extra=make(2, 32)),
                     "layers.extra was not there and is float32[2, 32]"),
    "no gate": (lambda w, make: w.pop("w_gate"),
                "layers.w_gate was float32[2, 32, 64] and is gone"),
    "a wider one": (lambda w, make: w.update(w_up=make(2, 32, 96)),
                    "layers.w_up was float32[2, 32, 64] and is float32[2, 32, 96]"),
    "many": (lambda w, make: w.update({f"more_{i}": make(2) for i in range(9)}), "; and 3 more)")}


@pytest.mark.parametrize("name", EDITS)
def test_weights_that_were_edited_are_named(run, capsys, monkeypatch, name):
    """A run of a model.py whose weights have changed since: a checkpoint called damaged, or set
    aside, or two hashes of all shapes."""
    change, says = EDITS[name]
    before = sorted(run.rglob("*"))
    edit_weights(monkeypatch, change)
    with pytest.raises(ConfigError) as e:
        load_run(run)
    assert says in str(e.value) and "--run" in str(e.value) and "checkpoint 6" in str(e.value)
    with pytest.raises(ConfigError) as e:
        train_in(run, 8, loss=of_any_weights)
    assert says in str(e.value) and "holds a run with different weights (layers." in str(e.value)
    assert flags.exit_line(e.value)[0] == 2 and "\n" not in str(e.value)
    assert sorted(run.rglob("*")) == before and "damaged" not in capsys.readouterr().err


def test_weights_of_which_no_checkpoint_is_left(run, monkeypatch):
    """A traceback, or a hash, where no description of the old weights can be read."""
    for step in (2, 4, 6):
        largest(run / f"checkpoints/{step}/meta").write_text("{")
    edit_weights(monkeypatch, EDITS["no gate"][0])
    with pytest.raises(ConfigError, match="with different weights .no checkpoint lists them.: co"):
        train_in(run, 8, loss=of_any_weights)


@pytest.mark.full
def test_trouble_of_this_machine_sets_nothing_aside(run, monkeypatch):
    """All checkpoints renamed because the disk could not be reached for a moment."""
    def fail(*_):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(ocp.StandardCheckpointer, "restore", fail)
        with pytest.raises(RunError, match="on this machine right now.*nothing was set aside"):
            train_in(run, 8)
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["2", "4", "6"]
    assert train_in(run, 7, 9)[0][0]["step"] == 7


@pytest.mark.full
def test_what_reads_a_run_looks_at_what_it_reads(run, capsys):
    """Damaged weights in sample.py and load_run: they must be skipped, with a message."""
    want, _ = load_run(run, step=4)
    for step, says in {6: "checkpoint 6 is damaged", 4: "checkpoint 4 is damaged"}.items():
        flip(largest(run / f"checkpoints/{step}/params"))
        got, _ = load_run(run)
        assert says in capsys.readouterr().err
        if step == 6:
            jax.tree.map(np.testing.assert_array_equal, got, want)
    flip(largest(run / "checkpoints/2/params"))
    with pytest.raises(RunError, match="can be read"):
        load_run(run)


class Restored(Exception):
    """Ends a run with the state that was restored."""


@pytest.mark.full
@pytest.mark.parametrize("item", ["params", *map(full, ("opt", "meta", ""))])
def test_any_byte_that_is_flipped_is_found_or_changes_nothing(run, item, monkeypatch):
    """A file, or a byte of one, that no checksum covers: either the previous checkpoint is used, or
    the state is the saved one."""
    real = checkpoint.RunFolder.restore

    def restore(self, say):
        raise Restored(jax.device_get(real(self, lambda _: None)))

    def read():
        with pytest.raises(Restored) as e:
            train_in(run, 8)
        return e.value.args[0]

    monkeypatch.setattr(checkpoint.RunFolder, "restore", restore)
    rng, newest, found = np.random.default_rng(len(item)), run / "checkpoints/6", 0
    want, before = read(), int(read()["step"])
    files = sorted(p for p in (newest / item).rglob("*") if p.is_file() and p.stat().st_size)
    for _ in range(int(os.environ.get("FLIPS", 12)) // 4):
        path = files[rng.integers(len(files))]
        was, got = path.read_bytes(), None
        flip(path, rng.integers(len(was)), int(rng.integers(8)))
        with contextlib.suppress(ConfigError):      # it says that it holds other arrays
            got = read()
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
