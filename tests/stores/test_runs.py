"""A run in a bucket: it keeps what a run in a folder keeps, whatever happens to its processes, to
the store, or to what it holds.

More of the random test: KILLS=20 pytest tests/stores -m "full or not full" -k kills
"""

import dataclasses
import json
import os
import shutil

import jax
import numpy as np
import pytest

from stores import lease, shards, uploads
from tests.common import (
    SMALL,
    all_succeed,
    ends,
    full,
    hosts,
    refuses,
    started,
    survives_kills,
    until_step,
)
from tests.helpers import assert_same_bits, learn, losses_of, make, rows_in, without_times
from tests.stores.bucket import forget
from zigzag.core.errors import ConfigError, RunError
from zigzag.core.parts import mirrors, place


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    """Short waits for locks, and an upload whenever there is something to upload."""
    monkeypatch.setattr(lease, "LEASE", 0.5)
    monkeypatch.setattr(lease, "BEATS", 0.1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The rows and the last state of a run of 6 steps in a folder, and the folder."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return *train_in(str(folder), 6), folder


def train_in(out, steps, mesh="", **changes):
    """Train up to a step in a folder or at an address, as a new process would."""
    forget()
    return learn(make(steps=steps, save_every=2, out=out, **changes), mesh)


def same_rows(path, whole):
    return without_times(path) == without_times(whole[2] / "metrics.jsonl")


def test_a_run_moves_between_a_folder_and_a_bucket(bucket, whole, tmp_path):
    """A bucket that is no run folder when it is copied, or the other way round; a run that does not
    continue to the same bits there."""
    train_in(bucket.run(), 2)
    assert bucket.steps() == [2] and "lock" not in bucket.names()
    shutil.rmtree(bucket.scratch)       # another machine
    copy = bucket.save(tmp_path / "copy")
    train_in(str(copy), 4)
    train_in(bucket.load(copy, "again"), 6)
    assert bucket.steps("again") == [2, 4, 6]
    last = bucket.save(tmp_path / "last", "again")
    assert same_rows(last / "metrics.jsonl", whole)
    rows, result = train_in(str(last), 6)       # it has its steps: what was saved is restored
    assert_same_bits(result.params, whole[1].params)


def test_old_checkpoints_go_and_the_log_goes_on(bucket):
    """A bucket that fills up; a second start that overwrites the log of the first."""
    for steps in (4, 8):
        train_in(bucket.run(), steps, keep=2)
    assert bucket.steps() == [6, 8]
    assert not [name for name in bucket.names() if name.startswith(("checkpoints/2/", "damaged"))]
    log = bucket.store.read("run/log-0.txt")[0].decode()
    assert log.count("ready in") == 2, log


def test_two_runs_cannot_share_an_address(bucket, monkeypatch):
    """Two runs that both write checkpoints, and a bucket that cannot be read."""
    train_in(bucket.run(), 2)
    held = lease.Lease(uploads.Mirror(bucket.run()).store)
    held.take("another run")
    monkeypatch.setattr(lease.time, "sleep", lambda _: (held.renew()))
    monkeypatch.setattr(lease, "BEATS", -1)
    monkeypatch.setattr(lease, "_has_ended", lambda holder: False)
    with refuses("another run is writing there"):
        train_in(bucket.run(), 4)
    monkeypatch.undo()
    assert bucket.steps() == [2]


def test_a_lock_is_stale_when_nobody_writes_it(bucket, monkeypatch):
    """A killed run whose address nobody can use again; a run that was asleep, and goes on writing
    after another has taken its address."""
    train_in(bucket.run(), 2)
    held = lease.Lease(uploads.Mirror(bucket.run()).store)
    held.take("a run that was killed")
    monkeypatch.setattr(lease, "_has_ended", lambda holder: False)
    train_in(bucket.run(), 4)
    assert bucket.steps() == [2, 4]
    monkeypatch.setattr(lease, "BEATS", -1)
    with pytest.raises(RunError, match="another run has taken it"):
        held.renew()


def test_a_store_without_conditions_is_refused(behind, proxy):
    """A lock that both of two runs hold."""
    proxy.trouble = "unconditional"
    with refuses("no conditional writes"):
        train_in(behind.run(), 2)


def test_what_a_kill_left_of_a_save_does_not_count(bucket, whole):
    """A checkpoint without its last object that a run continues from, or whose chunks are mixed
    with those of the next save of that step."""
    train_in(bucket.run(), 4)
    names = [name for name in bucket.names() if name.startswith("checkpoints/4/")]
    bucket.store.delete([f"run/{name}" for name in names if name.endswith("_CHECKPOINT_METADATA")])
    bucket.store.put("run/checkpoints/4/params/embed/9.9", b"of another mesh")
    train_in(bucket.run(), 6, "data=2")
    assert bucket.steps() == [2, 4, 6]
    assert "checkpoints/4/params/embed/9.9" not in bucket.names()
    bucket.save(bucket.scratch / "copy")
    assert losses_of(rows_in(bucket.scratch / "copy/metrics.jsonl")) == pytest.approx(
        losses_of(whole[0]), rel=1e-4)


def test_a_flipped_byte_sets_a_checkpoint_aside(bucket, whole, tmp_path):
    """A damaged checkpoint that is restored, or that the next start finds again."""
    train_in(bucket.run(), 4)
    name = max((name for name in bucket.names() if name.startswith("checkpoints/4/params/")),
               key=lambda name: bucket.store.facts(f"run/{name}")["size"])
    content = bytearray(bucket.store.read(f"run/{name}")[0])
    content[len(content) // 2] ^= 4
    bucket.store.put(f"run/{name}", bytes(content))
    train_in(bucket.run(), 6)
    assert bucket.steps() == [2, 4, 6]
    assert f"damaged-4{name.removeprefix('checkpoints/4')}" in [
        name.removeprefix("checkpoints/") for name in bucket.names()]
    assert same_rows(bucket.save(tmp_path / "copy") / "metrics.jsonl", whole)


@pytest.mark.parametrize("trouble", ["503", "reset", full("slow")])
def test_a_store_that_fails_for_a_while_loses_nothing(behind, proxy, whole, tmp_path, capsys,
                                                      trouble):
    """A run that ends, or a save that is lost, because some requests failed; a line for each."""
    at = []

    class Failing(list):
        def append(self, row):
            at.append(row["step"])
            proxy.trouble = trouble if 2 <= len(at) <= 4 else ""

    from tests.helpers import KeepRows
    forget()
    learn(make(steps=6, save_every=2, out=behind.run()), say=KeepRows(Failing(), []))
    said = capsys.readouterr().err
    assert said.count(behind.address) == (trouble != "slow"), said
    proxy.trouble = ""
    assert same_rows(behind.save(tmp_path / "copy") / "metrics.jsonl", whole)
    assert behind.steps() == [2, 4, 6]


def test_a_store_that_stays_away_ends_the_run(behind, proxy, whole, tmp_path):
    """A run that trains for hours and saves nothing; one that cannot continue after that."""
    train_in(behind.run(), 2)
    proxy.trouble = "503"
    forget()
    with pytest.raises(RunError, match="has failed for 1 s .--patience.: the store answers 503"):
        proxy.trouble = ""
        place(behind.run())
        mirror, = mirrors.values()
        real, mirror.store.put = mirror.store.put, lambda *given: stop(proxy, real, *given)
        learn(make(steps=6, save_every=2, out=behind.run(), patience=1))
    proxy.trouble = ""
    train_in(behind.run(), 6)
    assert same_rows(behind.save(tmp_path / "copy") / "metrics.jsonl", whole)


def stop(proxy, put, name, content, *more):
    """Write an object; from the first checkpoint on, the store is away."""
    if name.startswith("checkpoints/4/"):
        proxy.trouble = "503"
    return put(name, content, *more)


def test_a_process_downloads_the_chunks_of_its_devices():
    """Each of 64 hosts downloads all of a checkpoint."""
    class Sharding:
        def addressable_devices_indices_map(self, shape):
            return {0: (slice(0, 2), slice(None)), 1: (slice(2, 4), slice(0, 3))}

    @dataclasses.dataclass
    class Shape:
        shape: tuple = (8, 6)
        sharding: Sharding = Sharding()

    record = {"chunks": [2, 2]}
    assert shards._chunks(record, Shape()) == {"0.0", "0.1", "0.2", "1.0", "1.1"}
    mesh = jax.make_mesh((1,), ("x",))
    one = jax.ShapeDtypeStruct((), np.int32, sharding=jax.NamedSharding(mesh, jax.P()))
    assert shards._chunks({"chunks": []}, one) == {"0"}


# -------------------------------------------------------------------------------------------
# Several processes, each with a disk of its own

def in_two(out, text, steps=20, *more):
    """Start a run in two processes. Each takes a scratch folder of its own."""
    return hosts(2, *SMALL, "--mesh", "data=2,tensor=2", "--steps", steps, "--save_every", 5,
                 "--eval_every", 10, "--dropout", 0.1, "--data", text, "--out", out, *more)


def test_processes_need_no_shared_disk(bucket, text, tmp_path):
    """Processes that wait for files that others wrote; a checkpoint that lacks the arrays of some;
    a run that continues on other processes with other bits."""
    all_succeed(in_two(bucket.run(), text, 10))
    assert bucket.steps() == [5, 10]
    assert {"log-0.txt", "log-1.txt", "data/train.bin"} <= {*bucket.names()}
    folders = sorted(path for path in bucket.scratch.glob("s3-*/*") if path.is_dir())
    chunks = [{path.relative_to(folder) for path in folder.glob("checkpoints/10/params/*/*.*")
               if path.name != ".zarray"} for folder in folders]
    assert len(folders) == 2 and all(chunks) and not set.intersection(*chunks)
    run = started("--out", bucket.run(), "--steps", 12)
    (_, said, _), = all_succeed([run])
    assert "continuing" in said and bucket.steps() == [5, 10, 12]


@pytest.mark.full
def test_kills_at_random_moments_change_nothing(bucket, text, tmp_path):
    """An address that cannot be continued, or is continued wrongly, after kill -9 of a process."""
    def start(folder):
        return in_two(bucket.run(folder.name), text, 40)

    class Here:
        """A folder in which survives_kills finds the runs' metrics."""
        def __truediv__(self, name):
            name, _, file = name.partition("/")
            if not file:
                return tmp_path / name
            bucket.store.download(f"{name}/{file}", tmp_path / name / file)
            return tmp_path / name / file

    survives_kills(0, int(os.environ.get("KILLS", 4)), Here(), start)


@pytest.mark.full
def test_a_killed_process_continues_on_other_machines(bucket, text, tmp_path):
    """Metrics that are lost with the disk of process 0."""
    all_succeed(in_two(bucket.run("whole"), text, 20))
    runs = in_two(bucket.run(), text, 20)
    folders = until_step_in_scratch(bucket, 12, runs)
    runs[1].kill()
    ends(runs)
    for folder in folders:
        shutil.rmtree(folder)
    all_succeed(in_two(bucket.run(), text, 20))
    assert [json.loads(line) for line in without_times(
        bucket.save(tmp_path / "a") / "metrics.jsonl")] == [json.loads(line) for line in (
            without_times(bucket.save(tmp_path / "b", "whole") / "metrics.jsonl"))]


def until_step_in_scratch(bucket, step, runs):
    """Wait until a run has made a step. Returns its processes' scratch folders."""
    pattern = f"s3-{bucket.name}-run-*/0"
    while not (found := [*bucket.scratch.glob(pattern)]) and all(run.poll() is None
                                                                  for run in runs):
        pass
    until_step(step, found[0], *runs)
    return [folder for folder in found[0].parent.glob("?") if folder.is_dir()]


def test_a_folder_of_other_objects_is_refused(bucket):
    with pytest.raises(ConfigError, match="holds a.txt"):
        bucket.store.put("other/a.txt", b"mine")
        train_in(bucket.run("other"), 2)
