"""Addresses in place of paths: data, runs to read, and what is printed if they cannot be used."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from stores.mirror import Mirror
from stores.store import Store
from tests.common import SMALL, command, continued, peer, refused, refuses
from tests.helpers import ROOT, learn, make, needed, rows_of
from tests.stores.bucket import forget
from zigzag.core.errors import RunError
from zigzag.core.parts import here, place
from zigzag.disk.corpus import prepare
from zigzag.parallel.saved import load_run

plots = needed("tools.plots")


def put(bucket, **files):
    for name, content in files.items():
        bucket.store.put(name.replace("__", "/").replace("_", "."), content)


def test_data_are_downloaded_once(bucket, tmp_path, monkeypatch):
    """A pattern that matches nothing on this machine; files that were deleted from the bucket, or
    that have changed, and are read as they were; a whole bucket for one file."""
    packed = peer("zstandard").compress(b'{"text": "of a line"}\n' * 30)
    put(bucket, texts__a_txt=b"first " * 40, texts__b_txt=b"second " * 40,
        texts__c_jsonl_zst=packed, texts__deep__d_txt=b"third " * 40)
    texts = f"{bucket.address}/texts"
    corpus = prepare([f"{texts}/*.jsonl.zst", f"{texts}/a.txt"], tmp_path / "one")
    assert corpus.record["files"] == 2
    assert prepare([texts], tmp_path / "all").record["files"] == 4
    assert prepare([f"{texts}/**/*.txt"], tmp_path / "deep").record["files"] == 3
    assert prepare([f"{texts}/*.txt"], tmp_path / "flat").record["files"] == 2

    bucket.store.delete(["texts/a.txt"])
    put(bucket, texts__b_txt=b"changed " * 40)
    forget()
    taken, real = [], Store.download
    monkeypatch.setattr(Store, "download", lambda self, name, path: (
        taken.append(name), real(self, name, path)))
    flat = prepare([f"{texts}/*.txt"], tmp_path / "again")
    assert flat.record["files"] == 1 and taken == ["texts/b.txt"]
    assert b"changed" in bytes(flat.train.astype("uint8"))
    with refuses("no object there"):
        here([f"{texts}/*.parquet"])


def test_a_run_is_read_at_its_address(bucket, tmp_path):
    """--run, --init_from and --plot, which find no folder called s3:; a run whose --init_from is
    another path on each machine."""
    learn(make(steps=2, save_every=2, out=str(tmp_path / "run")))
    address = bucket.load(tmp_path / "run")
    bucket.store.delete(["run/checkpoints/2/opt/manifest.ocdbt"])       # what weights do not need
    params, config = load_run(address)
    assert params["embed"].shape == (128, 32) and config.layers == 2
    assert [*plots.curves_of(address)["loss"][:, 0]] == [1, 2]
    assert not (place(address) / "checkpoints/2/opt/manifest.ocdbt").exists()
    assert continued("--init_from", address, "--out", tmp_path / "new").init_from == address


@pytest.mark.parametrize("words, says", [
    (["--out", "s3://none-of-that-name/run"], "there is no bucket none-of-that-name"),
    (["--out", "gs://none-of-that-name/run"], "there is no bucket none-of-that-name"),
    (["--out", "ftp://bucket/run"], "ftp://bucket/run: expected a path, or an address such as"),
    (["--init_from", "s3://{bucket}/none"], "--init_from s3://.*: no run there"),
    (["--plot", "s3://{bucket}/none"], "--plot s3://.*: no run there")])
def test_what_is_not_there_is_one_line(bucket, google, capsys, words, says):
    """A traceback of obstore's, or a run in a folder called s3:."""
    error = refused(capsys, *(word.format(bucket=bucket.name) for word in words))
    assert re.search(says, error), error


def test_without_credentials_or_obstore_is_one_line(bucket, capsys, monkeypatch):
    """Half a minute of waiting for the machines of a cloud that this is none of."""
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert "no credentials were found; set AWS_ACCESS_KEY_ID" in refused(
        capsys, "--out", bucket.run("a"))
    monkeypatch.setitem(sys.modules, "obstore", None)
    assert "needs the package obstore: pip install obstore" in refused(
        capsys, "--out", bucket.run("b"))


def test_scratch_that_cannot_be_written_is_one_line(bucket, monkeypatch, tmp_path):
    """A full disk, or one that cannot be written, that ends in a page."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ZIGZAG_SCRATCH", str(tmp_path / "file/scratch"))
    with pytest.raises(RunError, match="cannot be written.*set ZIGZAG_SCRATCH"):
        place(bucket.run())


def test_two_processes_have_scratch_of_their_own(bucket):
    """A sample that changes the folder of a running run."""
    one = place(bucket.run())
    forget()
    other = place(bucket.run())
    assert one != other and one.parent == other.parent


def test_a_folder_may_go_while_it_is_looked_at(bucket, monkeypatch):
    """A run that ends because orbax renamed the folder of a save, or deleted an old checkpoint."""
    mirror, real = Mirror(bucket.run()), os.scandir
    (mirror.folder / "checkpoints/5").mkdir(parents=True)
    (mirror.folder / "metrics.jsonl").write_text("")

    def scandir(path):
        if str(path).endswith("/5"):
            raise FileNotFoundError(path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert mirror.files() == ["metrics.jsonl"]


def test_obstore_is_imported_only_for_an_address():
    """Every command, a tenth of a second slower."""
    code = ("import sys, train; from zigzag.commands import command_line\n"
            "print(any(name.split('.')[0] in ('obstore', 'stores') for name in sys.modules))")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True,
                          env={**os.environ, "JAX_PLATFORMS": "cpu"})
    assert done.stdout == "False\n", done


@pytest.mark.full
def test_whole_commands_in_a_bucket(bucket, text, tmp_path):
    """Commands that README and docs/running.md promise, from text in a bucket to a sample."""
    data = bucket.load(text, "texts")
    words = (*SMALL, "--steps", 6, "--save_every", 3, "--data", f"{data}/*.txt")
    in_folder = command(*words, "--out", tmp_path / "run")
    in_bucket = command(*words, "--out", bucket.run())
    assert in_folder.returncode == in_bucket.returncode == 0, in_bucket.stderr
    assert f"saved in {bucket.run()}" in in_bucket.stdout
    copy = bucket.save(tmp_path / "copy")
    assert [row.get("loss") for row in rows_of(copy)] == [
        row.get("loss") for row in rows_of(tmp_path / "run")]
    assert json.loads((copy / "config.json").read_text())["data"] == [f"{data}/*.txt"]
    shutil.rmtree(bucket.scratch)
    samples = [command("--run", run, "--prompt", "ba", "--tokens", 8, file="sample.py").stdout
               for run in (bucket.run(), tmp_path / "run")]
    assert samples[0] == samples[1] != ""
    more = command("--out", bucket.run(), "--steps", 8)
    assert more.returncode == 0 and "continuing" in more.stdout, more.stderr
    last = command("--init_from", bucket.run(), "--data", f"{data}/1.txt", "--held_out",
                   f"{data}/2.txt", "--steps", 2, "--out", bucket.run("tuned"), "--batch", 4)
    assert last.returncode == 0, last.stderr
    again = command("--steps", 3, "--out", bucket.run("tuned"))
    assert again.returncode == 0, again.stderr
