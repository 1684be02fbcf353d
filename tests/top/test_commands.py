"""Commands as a person gives them, each in a process of its own, and the page of their flags."""

import json
import os
import re
import subprocess
import sys

import jax
import pytest

import model
import train
from tests.common import SMALL, command, full, peer, succeeds
from tests.helpers import ROOT, mesh_of, needed, rows_in
from tests.parts import of_the_whole
from tests.readme import FLAGS, FLAGS_PAGE, block
from zigzag.core import mesh, start
from zigzag.core.chips import compiler_options
from zigzag.core.flags import flag_rows

transformer, dry_run = needed("published.transformer"), needed("forecast.dry_run")


def test_importing_takes_no_device():
    """A top-level jnp array or jax.devices() would fix the platform before flags are read."""
    library = [f"zigzag.{path.parent.name}.{path.stem}"
               for path in (ROOT / "zigzag").glob("*/*.py")]
    code = (f"import model, shard, train, data, sample, {', '.join(library)}\n"
            f"from jax._src import xla_bridge\nassert not xla_bridge._backends")
    done = command(file=["-W", "error::DeprecationWarning:__main__", "-c", code])
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("begin", ["from zigzag.core import start\nstart.begin()", "import train",
                                   full("import shard")])
def test_libtpu_is_quiet_where_there_is_no_tpu(begin):
    """Five lines of another program's errors before each line of ours, for whoever has installed
    the compiler for TPUs: in a command, or in a user's script that imports a file of ours."""
    peer("libtpu")
    # (Importing jax has set one of libtpu's variables for this process.)
    others = {name: value for name, value in os.environ.items() if "TPU" not in name}
    done = subprocess.run(
        [sys.executable, "-c", f"{begin}\nimport jax\nprint(jax.devices()[0].platform)"],
        cwd=ROOT, text=True, capture_output=True,
        env={**others, "JAX_PLATFORMS": "", "ZIGZAG_LARGE_PAGES": "0"})
    assert (done.stdout, done.stderr) == ("cpu\n", "")


@pytest.mark.full
@pytest.mark.skipif(start._glibc_version() < (2, 35), reason="another libc")
@pytest.mark.parametrize("file", [full("train.py"), "sample.py"])
def test_a_command_starts_with_large_pages(file):
    """The restart lost in an edit (the CPU step takes a quarter longer), after jax is imported (the
    first command takes seconds longer), again and again, or though it was switched off."""
    code = f"""
import os, runpy, sys
def execv(path, words):
    assert "jax" not in sys.modules and path == words[0] == sys.executable, words
    print("again with", os.environ["GLIBC_TUNABLES"], words[-1])
os.execv = execv
runpy.run_path({file!r}, run_name="__main__")"""

    def started(**variables):
        environment = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
        done = subprocess.run([sys.executable, "-c", code, "--help"], cwd=ROOT, text=True,
                              capture_output=True, env=environment | variables)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[0]

    assert started() == "again with glibc.malloc.hugetlb=1 --help"
    assert started(GLIBC_TUNABLES="glibc.malloc.hugetlb=1").startswith(f"python {file}")
    assert started(ZIGZAG_LARGE_PAGES="0").startswith(f"python {file}")


def test_what_is_asked_of_the_compiler_gives_way(monkeypatch):
    """A compiler flag of ours that a person cannot override with theirs."""
    one, level = mesh_of(""), "xla_backend_optimization_level"
    assert level not in compiler_options(one)      # tests ask for the least
    monkeypatch.setattr(jax.config, "read", lambda name: False)
    assert compiler_options(one)[level] == 1
    monkeypatch.setenv("XLA_FLAGS", f"--{level}=2")
    assert level not in compiler_options(one)
    monkeypatch.setenv("XLA_FLAGS", "--xla_disable_hlo_passes=dce")
    assert compiler_options(mesh_of("tensor=2"), auto_tensor=True)[
        "xla_disable_hlo_passes"] == "all-reduce-promotion"     # (it prevents an abort)
    peer("libtpu")
    exchange, gather = "xla_tpu_enable_async_all_to_all", (
        "xla_tpu_prefer_async_allgather_to_allreduce")
    few, many, other = (mesh.make_mesh(dry_run.topology_devices(name)) for name in (
        "v5e:4x4", "v5e:4x8", "v6e:4x4"))
    assert compiler_options(few) == {exchange: True, gather: True}
    # (libtpu cannot compile the first for more chips; for other kinds neither was measured.)
    assert compiler_options(many) == {gather: True} and not compiler_options(other)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--{exchange}=false")
    assert compiler_options(few) == {gather: True}


@pytest.mark.full
def test_the_table_of_a_big_model_needs_no_memory():
    """Weights, or a mesh, that are made to print where they would be."""
    done = command("--model", "llama-70b", "--shards", 8, file="shard.py")
    assert done.returncode == 0, done.stderr
    assert re.search(r"layers.w_down +\[80,28672,8192\] +\[-,tensor,-\] .* row", done.stdout)


@pytest.mark.full
def test_train_sample_and_read_with_none_of_our_code(tmp_path, text):
    """The commands of the first run, on a small model and a tokenizer of its own: a folder that one
    command leaves and the next cannot read; weights that only our code can open."""
    folder, out = tmp_path / "tokens", tmp_path / "out"
    done = command(text, "--out", folder, "--vocab_size", 400, file="data.py")
    assert done.returncode == 0, done.stderr
    done = command(*SMALL, "--shards", 2, "--steps", 4, "--data", folder, "--out", out)
    assert done.returncode == 0, done.stderr
    rows = rows_in(out / "metrics.jsonl")
    assert [r["step"] for r in rows if "loss" in r] == [1, 2, 3, 4]
    assert set(rows[0]) == {"step", "loss", "lr", "grad_norm", "tokens", "tokens_per_second", "mfu",
                            "skipped", "save_seconds"}
    assert set(rows[-1]) == {"step", "eval_loss", "train_loss", "bits_per_byte"}
    assert rows[0]["tokens"] == 4 * 32
    kept = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert kept == ["2", "3", "4"], "keeps three"
    config = json.loads((out / "config.json").read_text())
    assert config["vocab_size"] == 400 and config["tokenizer"] == "sentencepiece"
    done = command("--run", out, "--prompt", "3 and", "--shards", 4, "--tokens", 20,
                   file="sample.py")
    assert done.stdout.startswith("3 and"), done.stderr
    code = block("docs/running.md", "orbax").replace("/full/path/to/out/checkpoints/900/params",
                                                     str(out / "checkpoints/4/params"))
    code += "assert weights['layers']['wq'].shape == (2, 32, 4, 8), weights\nprint('read')"
    done = command(file=["-c", code], cwd=tmp_path)
    assert "read" in done.stdout, done.stderr


@of_the_whole
def test_the_page_of_flags_has_every_flag_and_its_default():
    """A table that names flags that are gone, or misses new ones. (python -m tests.readme
    flags writes it again.)"""
    table = FLAGS.search(FLAGS_PAGE.read_text())
    assert table, "docs/flags.md has no <!-- flags --> ... <!-- end of flags -->"
    rows = re.findall(r"^\| `--(\w+)` \| `?([^|`]*?)`? *\|", table[0], re.M)
    own = [row[:2] for row in flag_rows((model.Config, train.Config))]
    assert rows[:len(own)] == own
    assert set(rows[len(own):]) == {row[:2] for row in flag_rows(transformer.Config)
                                    if row[0] not in dict(own)}


@pytest.mark.full
def test_the_start_says_which_program_it_read(text, tmp_path):
    """A second start that compiles for an hour what the first has kept, and nobody knows."""
    env = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "kept")}
    ready = []
    for out in "a", "b":
        done = succeeds("--data", text, "--layers", 12, "--mesh", "fsdp=2,tensor=2", "--steps", 1,
                        "--eval_every", 0, "--out", tmp_path / out, env=env)
        ready += [line for line in done.stdout.splitlines() if line.startswith("ready in")]
    assert "read from" not in ready[0] and ready[1].endswith(f"; read from {tmp_path / 'kept'}")
