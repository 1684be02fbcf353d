"""A run in a bucket: it keeps what a run in a folder keeps, whatever happens to its processes, to
the store, or to what it holds.

More of the random test: KILLS=20 pytest tests/stores -m "full or not full" -k kills
"""

import dataclasses
import os
import re
import resource
import shutil
import time

import jax
import numpy as np
import pytest

from stores import lease, shards
from tests.common import (
    SMALL,
    all_succeed,
    ends,
    full,
    hosts,
    refuses,
    started,
    succeeds,
    survives_kills,
    until_step,
)
from tests.helpers import KeepRows, assert_same_bits, learn, make, without_times
from tests.stores.bucket import Bucket, forget
from zigzag.core.errors import RunError
from zigzag.parallel.saved import load_run


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    """Short waits for locks."""
    monkeypatch.setattr(lease, "LEASE", 0.5)
    monkeypatch.setattr(lease, "BEATS", 0.1)


def train_in(out, steps, mesh="", **changes):
    """Train up to a step in a folder or at an address, as a new process would."""
    forget()
    return learn(make(steps=steps, save_every=2, out=str(out), decay="constant", **changes), mesh)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run of 6 steps, and its result."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, train_in(folder, 6)[1]


@pytest.fixture(scope="module")
def saved(port, tmp_path_factory):
    """A copy of the bucket of a run that has made 4 steps of these."""
    folder = tmp_path_factory.mktemp("saved")
    with pytest.MonkeyPatch.context() as patch:
        bucket = Bucket(port, patch, folder / "scratch")
        train_in(bucket.run(), 4)
        assert bucket.steps() == [2, 4] and "lock" not in bucket.names()
        return bucket.save(folder / "copy")


@pytest.fixture(params=["s3", pytest.param("gs", marks=pytest.mark.full)])
def any_bucket(request):
    """A new bucket, reached in Amazon's or Google's protocol."""
    return request.getfixturevalue({"s3": "bucket", "gs": "google"}[request.param])


def same_rows(folder, whole):
    return without_times(folder / "metrics.jsonl") == without_times(whole[0] / "metrics.jsonl")


def test_a_run_moves_between_a_folder_and_a_bucket(any_bucket, saved, whole, tmp_path):
    """A bucket that is no run folder when it is copied, or the other way round; a run that does not
    continue to the same bits there."""
    folder = shutil.copytree(saved, tmp_path / "copy")
    _, result = train_in(folder, 6)
    assert same_rows(folder, whole)
    assert_same_bits(result.params, whole[1].params)
    shutil.copytree(whole[0], tmp_path / "begun")
    shutil.rmtree(tmp_path / "begun/checkpoints/6")
    _, result = train_in(any_bucket.load(tmp_path / "begun"), 6, keep=2)
    assert_same_bits(result.params, whole[1].params)
    assert any_bucket.steps() == [4, 6]                 # the oldest has gone
    assert not [name for name in any_bucket.names() if name.startswith("checkpoints/2/")]
    assert same_rows(any_bucket.save(tmp_path / "again"), whole)


def test_two_runs_cannot_share_an_address(any_bucket, monkeypatch):
    """Two runs that both write; a second run in the same process, which cannot begin."""
    store = any_bucket.of_run()
    first, second = lease.Lease(store), lease.Lease(store)
    first.take()
    monkeypatch.setattr(lease, "_has_ended", lambda holder: False)
    with refuses("another run is writing there"):
        second.take()
    first.check()
    first.release()
    second.take()
    second.release()
    first.take()
    first.check()
    first.release()


def test_a_lock_is_stale_when_nobody_writes_it(any_bucket, monkeypatch):
    """A killed run whose address nobody can use again; a run that was asleep, and goes on writing
    after another has taken its address."""
    store = any_bucket.of_run()
    first, second = lease.Lease(store), lease.Lease(store)
    first.take()
    first.ending.set()          # its process is killed, or asleep
    first.thread.join()
    monkeypatch.setattr(lease, "_has_ended", lambda holder: False)
    second.take()
    first.ending.clear()
    first._renew()
    with pytest.raises(RunError, match="another run has taken it"):
        first.check()
    first.release()
    assert lease.read(store)[0]["word"] == second.word
    second.release()


def test_a_store_without_conditions_is_refused(behind, proxy):
    """A lock that both of two runs hold."""
    proxy.trouble = "unconditional"
    with refuses("no conditional writes"):
        lease.Lease(behind.of_run()).take()


@pytest.mark.full
def test_what_a_kill_left_of_a_save_does_not_count(bucket, saved, whole, tmp_path):
    """A checkpoint without its last object that a run continues from, or whose chunks are mixed
    with those of the next save of that step; a lock that is left; a log that begins again."""
    bucket.load(saved)
    bucket.store.delete(["run/checkpoints/4/_CHECKPOINT_METADATA"])
    bucket.store.put("run/checkpoints/4/params/embed/9.9", b"of another mesh")
    bucket.store.put("run/lock", (b'{"host": "another", "word": "w", "beat": 1}'))
    train_in(bucket.run(), 6)
    assert bucket.steps() == [2, 4, 6]
    assert "checkpoints/4/params/embed/9.9" not in bucket.names()
    folder = bucket.save(tmp_path / "copy")
    assert same_rows(folder, whole)
    assert (folder / "log-0.txt").read_text().startswith((saved / "log-0.txt").read_text())


@pytest.mark.full
def test_a_flipped_byte_sets_a_checkpoint_aside(any_bucket, saved, whole, tmp_path):
    """A damaged checkpoint that is restored, or that the next start finds again."""
    shutil.copytree(saved, tmp_path / "flipped")
    file = max((tmp_path / "flipped/checkpoints/4/params").rglob("*"),
               key=lambda path: path.is_file() and path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    any_bucket.load(tmp_path / "flipped")
    train_in(any_bucket.run(), 6)
    assert any_bucket.steps() == [2, 4, 6]
    folder = any_bucket.save(tmp_path / "copy")
    assert same_rows(folder, whole)
    aside = folder / "checkpoints/damaged-4/params" / file.parent.name / file.name
    assert aside.read_bytes() == content


def test_steps_do_not_wait_for_the_store(behind, proxy):
    """Training that stops at each save for as long as the upload takes."""
    class Rows(list):
        def append(self, row):
            if row["step"] == 2:
                proxy.trouble = "held"      # from before the first save
            if row["step"] == 5:            # of the next save
                assert behind_the_scenes.steps() == []
                proxy.gate.set()

    behind_the_scenes = behind.without_proxy(proxy)
    learn(make(steps=6, save_every=3, out=behind.run()), say=KeepRows(Rows(), []))
    assert proxy.gate.is_set() and behind.steps() == [3, 6]


@pytest.mark.parametrize("trouble", ["503", full("reset"), full("slow")])
def test_a_store_that_fails_for_a_while_loses_nothing(behind, proxy, whole, tmp_path, capsys,
                                                      trouble):
    """A run that ends, or a save that is lost, because some requests failed; a line for each."""
    class Rows(list):
        def append(self, row):
            if row["step"] == 2:
                # Some ten requests at a time, each of which obstore makes twice: one fails twice.
                proxy.trouble, proxy.times = trouble, 8 if trouble == "slow" else 24

    forget()
    learn(make(steps=6, save_every=2, out=behind.run(), decay="constant"), say=KeepRows(Rows(), []))
    said = capsys.readouterr().err
    assert said.count(behind.address) == (trouble != "slow"), said
    assert behind.steps() == [2, 4, 6]
    assert same_rows(behind.save(tmp_path / "copy"), whole)


@pytest.mark.full
def test_a_store_that_stays_away_ends_the_run(behind, proxy, saved, whole, tmp_path):
    """A run that trains for hours and saves nothing; one that cannot continue after that."""
    behind.load(saved)

    class Rows(list):
        def append(self, row):
            proxy.trouble = "503"

    forget()
    with pytest.raises(RunError, match=r"has failed for \d+ s .--patience.: the store answers 503"):
        learn(make(steps=10**6, save_every=10**6, out=behind.run(), decay="constant", patience=1),
              say=KeepRows(Rows(), []))
    proxy.trouble = ""
    assert behind.steps() == [2, 4]
    train_in(behind.run(), 6)
    assert same_rows(behind.save(tmp_path / "copy"), whole)


def test_a_folder_of_other_objects_is_refused(bucket):
    """A bucket with someone's photos that becomes a run's."""
    bucket.store.put("run/a.txt", b"mine")
    with refuses("holds a.txt"):
        train_in(bucket.run(), 2)
    assert bucket.names() == ["a.txt"]


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


@pytest.mark.full
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
    params, _ = load_run(bucket.run())      # it checks the checksums
    assert params["layers"]["w_up"].shape == (2, 32, 128)


@pytest.mark.full
def test_a_full_scratch_disk_is_one_line_and_the_bucket_stays_whole(bucket, text):
    """A traceback, or status 0; part of a checkpoint in the bucket; a bucket that cannot be
    continued. The disk fills while the run trains. (Each checkpoint has files above 10,000 B.)"""
    words = ("--data", text, "--out", bucket.run(), *SMALL, "--save_every", 20)
    run = started(*words, "--steps", 4000)
    until_step_in_scratch(bucket, 41, [run])
    while 40 not in bucket.steps() and run.poll() is None:      # on a busy machine, later
        time.sleep(0.02)
    resource.prlimit(run.pid, resource.RLIMIT_FSIZE, (10_000, 10_000))
    error = run.communicate(timeout=300)[1]
    assert run.returncode == 1 and "Traceback" not in error, error
    assert re.match("error: .*too large", error.strip().splitlines()[-1]), error
    at = bucket.steps()[-1]
    begun = {int(found[1]) for name in bucket.names() if (found := re.match(
        r"checkpoints/(\d+)/", name))}
    assert at >= 40 and max(begun) == at
    assert f" at step {at}" in succeeds(*words, "--steps", at + 20).stdout


@pytest.mark.full
def test_kills_at_random_moments_change_nothing(any_bucket, text, tmp_path):
    """An address that cannot be continued, or is continued wrongly, after kill -9 of a process."""
    def start(folder):
        return in_two(any_bucket.run(folder.name), text, 40)

    class Here:
        """A folder in which survives_kills finds the runs' metrics."""
        def __truediv__(self, name):
            name, _, file = name.partition("/")
            if not file:
                return tmp_path / name
            any_bucket.store.download(f"{name}/{file}", tmp_path / name / file)
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
    assert same_rows(bucket.save(tmp_path / "a"), [bucket.save(tmp_path / "b", "whole")])
    (_, said, _), = all_succeed([started("--out", bucket.run(), "--steps", 22)])
    assert "continuing" in said and bucket.steps()[-1] == 22


def until_step_in_scratch(bucket, step, runs):
    """Wait until a run has made a step. Returns its processes' scratch folders."""
    pattern = f"s3-{bucket.name}-run-*/*/metrics.jsonl"         # process 0 alone writes one
    while not (found := [*bucket.scratch.glob(pattern)]) and all(run.poll() is None
                                                                  for run in runs):
        time.sleep(0.02)
    until_step(step, found[0].parent, *runs)
    return [folder for folder in found[0].parents[1].glob("?") if folder.is_dir()]
