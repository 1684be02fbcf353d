"""Names of the hub: a real huggingface_hub against a small server of the hub's HTTP API."""

import contextlib
import json
import resource
import shutil
import sys
import time

import pytest

import data
import sample
import train
from published import folder_of, folders, hf_config, load_for_decoding, load_hf
from tests.common import (
    command,
    continued,
    json_lines,
    published_model,
    refused,
    train_here,
)
from tests.helpers import mesh_of
from tests.published.hub_server import TOKEN, repo, serving
from zigzag.core import hosts
from zigzag.core.errors import ConfigError
from zigzag.core.mesh import by_path
from zigzag.parallel.saved import load_run

huggingface_hub = pytest.importorskip("huggingface_hub", reason="pip install huggingface_hub")
constants, file_download = (pytest.importorskip(f"huggingface_hub.{name}")
                            for name in ("constants", "file_download"))
pytest.importorskip("safetensors", reason="pip install safetensors")

SHAPE = dict(layers=2, d_model=16, heads=2, kv_heads=1, head_dim=8, d_ff=24, seq_len=64)
STEPS = ("--seq_len", 16, "--batch", 4, "--steps", 1, "--save_every", 1, "--eval_every", 0)
TEXTS = "hf://datasets/acme/texts"
# What a repository has besides what we read.
BESIDE = {"pytorch_model.bin": b"\x80\x04cposix\nsystem\n", "modeling.py": b"raise SystemExit(9)",
          "README.md": b"# tiny", "onnx/model.onnx": b"x", "old/consolidated.safetensors": b"x"}


@pytest.fixture(scope="module")
def models(tmp_path_factory, text):
    """Two folders with the same tiny LLaMA, of different weights."""
    return [published_model(tmp_path_factory.mktemp("hf") / f"tiny{seed}", text, seed=seed, **SHAPE)
            for seed in (1, 2)]


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def hub(models, monkeypatch, tmp_path):
    """The server, with huggingface_hub's constants as its environment would set them."""
    old, new = ({**files_of(folder), **BESIDE} for folder in models)
    lines = b"".join(json.dumps({"text": f"{i} and {i}\n", "body": f"{i}\n" * i}).encode() + b"\n"
                     for i in range(40))
    repos = {
        "acme/tiny": repo(old, new, v1=0), "acme/closed": repo(new, access="private"),
        "acme/gated": repo(new, access="gated"),
        "acme/pickle": repo({"config.json": new["config.json"], **BESIDE}),
        "acme/empty": repo({"README.md": b""}),
        "datasets/acme/texts": repo({"a.jsonl": lines}, {
            "README.md": b"# texts", "a.jsonl": lines, "more/b.txt": b"one two\n" * 50,
            "more/c.txt": b"three\n" * 50, "other.parquet": b"x"}, v1=0)}
    with serving(repos) as server:
        for name, value in {
                "ENDPOINT": server.url, "HF_HUB_CACHE": str(tmp_path / "cache"),
                "HF_TOKEN_PATH": str(tmp_path / "token"), "HUGGINGFACE_CO_URL_TEMPLATE":
                server.url + "/{repo_id}/resolve/{revision}/{filename}"}.items():
            for module in (constants, file_download):
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, value)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield server


def commit_of(hub, name="acme/tiny", ref="main"):
    return hub.repos[name].refs[ref]


def files_in(hub, name, ref="main"):
    return hub.repos[name].commits[commit_of(hub, name, ref)]


def copied(folder, files):
    """A folder with a repository's files."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def taken(hub):
    """The names of the files that the server sent since the last call."""
    names = {line.rpartition("/")[2] for line in hub.log if line.startswith("GET")}
    hub.log.clear()
    return names


def same(a, b):
    a, b = by_path(a), by_path(b)
    return a.keys() == b.keys() and all((a[path] == b[path]).all() for path in a)


def fine_tune(*words):
    config = continued(*words)
    train_here(config, mesh_of("data=1"))
    return config


# -------------------------------------------------------------------------------------------
# What is downloaded

def test_only_what_is_read_is_downloaded_and_only_once(hub, models):
    """A pickle, code, or another format's weights on the disk; weights for a look at shapes; a
    request to the hub for what the cache has."""
    assert hf_config("acme/tiny").layers == 2
    assert taken(hub) == {"config.json"}
    params, _ = load_hf("acme/tiny")
    assert taken(hub) == {"model.safetensors"} and same(params, load_hf(models[1])[0])
    *_, tokenizer = load_for_decoding("acme/tiny", mesh_of("data=1"))
    assert taken(hub) == {"tokenizer.json", "tokenizer_config.json"}
    assert tokenizer.decode(tokenizer.encode("7 and")) == "7 and"
    load_for_decoding("acme/tiny", mesh_of("data=1"))
    assert not hub.log


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub, models):
    """The newest weights instead of the revision's; a revision that is silently main."""
    first = f"acme/tiny@{commit_of(hub, ref='v1')}"
    assert folder_of("acme/tiny@v1") == folder_of(first) == first
    for name in ("acme/tiny@v1", first):
        assert same(load_hf(name)[0], load_hf(models[0])[0])
    for wrong in ("acme/tiny@v9", f"acme/tiny@{'0' * 40}"):
        with pytest.raises(ConfigError, match="has no revision '.*'; expected a branch"):
            load_hf(wrong)


def test_weights_in_several_files(hub, models):
    """Parts that the index doesn't name; a path out of the cache, or a pickle, that it does."""
    whole = files_of(models[0])
    arrays = list(by_path(load_hf(models[0])[0]))
    index = {"weight_map": {name: "model-1.safetensors" for name in arrays} | {
        "x": "../../up.safetensors", "y": "pytorch_model.bin", "z": 3}}
    hub.repos["acme/parts"] = repo({
        "config.json": whole["config.json"], **BESIDE, "model-1.safetensors": whole[
            "model.safetensors"], "model-2.safetensors": b"x",
        "model.safetensors.index.json": json.dumps(index).encode()})
    with pytest.raises(ConfigError, match="not a file of this folder"):
        load_hf("acme/parts")
    assert taken(hub) == {"config.json", "model.safetensors.index.json", "model-1.safetensors"}
    assert not [line for line in hub.log if "up.safetensors" in line or ".bin" in line]


def test_a_pickle_alone_is_refused_and_never_downloaded(hub):
    with pytest.raises(ConfigError, match="a .bin is a pickle, which can run code"):
        load_hf("acme/pickle")
    assert taken(hub) == {"config.json"} and not any(".bin" in line for line in hub.log)


# -------------------------------------------------------------------------------------------
# A run

@pytest.mark.full
def test_a_run_records_the_commit_and_continues_without_the_hub(hub, models, capsys, tmp_path):
    """A run that continues from, or is sampled with, what the name means by now, or that needs the
    hub for data that it has encoded; --field that reads another field."""
    out, wanted = tmp_path / "run", f"acme/tiny@{commit_of(hub)}"
    words = ("--model", "acme/tiny", "--data", f"{TEXTS}/*.jsonl", "--field", "body", "--held_out",
             f"{TEXTS}/more", "--out", out, *STEPS)
    fine_tune(*words, "--lora_rank", 2)
    record = json.loads((out / "config.json").read_text())
    assert record["model"] == record["init_from"] == wanted
    assert (record["data"], record["field"]) == ([f"{TEXTS}/*.jsonl"], "body")
    copy = copied(tmp_path / "copy", files_in(hub, "datasets/acme/texts"))
    data.main([str(copy / "a.jsonl"), "--out", str(tmp_path / "a"), "--field", "body",
               "--tokenizer", str(models[1]), "--vocab_size", "8192"])
    assert (tmp_path / "a/train.bin").read_bytes() == (out / "data/train.bin").read_bytes()

    # The hub and the cache have a newer commit by now; then the hub is gone.
    first = load_run(out)[0]
    hub.repos["acme/tiny"].refs["main"] = commit_of(hub, ref="v1")
    (tmp_path / "cache/models--acme--tiny/refs/main").unlink()
    assert folder_of("acme/tiny") != wanted
    hub.is_silent = True
    hub.log.clear()
    config = fine_tune(*words, "--steps", 2)
    assert config.model == wanted and config.steps == 2
    assert continued("--out", out).init_from == wanted
    sample.load(out)
    folders.export(["--run", str(out), "--export", str(tmp_path / "to")])
    assert f"upload it: hf upload ORG/NAME {tmp_path}/to" in capsys.readouterr().out
    assert same(load_run(out, step=1)[0], first) and not hub.log


def test_a_folder_of_that_name_wins(hub, models, monkeypatch, tmp_path):
    """The hub's model instead of one's own; when that folder is gone, the hub's model instead of
    an error."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(models[0], "acme/tiny")
    assert folder_of("acme/tiny/") == folder_of("acme/tiny") == "acme/tiny"
    config = train.parse(["--model", "acme/tiny"])
    assert (config.model, config.init_from) == ("acme/tiny", "acme/tiny") and not hub.log
    shutil.rmtree("acme/tiny")
    with pytest.raises(ConfigError, match="expected a folder with a published model"):
        folders.read_hf(None, config.init_from, config.network)
    assert not hub.log


def test_processes_with_different_commits_are_refused(hub, monkeypatch):
    """Hosts whose caches have different commits, each with its part of other weights. (train.py
    compares all of the config.)"""
    monkeypatch.setattr(hosts, "process_allgather", lambda facts: [facts, {"model": "acme/tiny@1"}])
    with pytest.raises(ConfigError, match="process 1 has model 'acme/tiny@1'"):
        load_for_decoding("acme/tiny", mesh_of("data=1"))


def test_offline_mode_is_the_librarys(hub, tmp_path):
    """An endpoint or a cache that isn't the environment's; a request in offline mode."""
    env = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    wanted = folder_of("acme/tiny")
    hub.log.clear()
    script = ("from published import folder_of\nprint(folder_of('acme/tiny'))\n"
              "folder_of('acme/tinny')")
    done = command("-c", script, file=[], env=env)
    assert done.stdout.strip() == wanted, done.stderr
    assert "no answer from the hub (" in done.stderr and "ffline mode" in done.stderr
    assert "lacks config.json; the nearest names in the cache: acme/tiny" in done.stderr
    assert not hub.log


# -------------------------------------------------------------------------------------------
# What is refused

def test_a_private_or_gated_model_needs_a_token(hub, monkeypatch, capsys):
    assert "the hub has no such model, or it is private (set HF_TOKEN or run" in refused(
        capsys, "--model", "acme/closed")
    assert "its owner decides who may download it" in refused(capsys, "--model", "acme/gated")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert folder_of("acme/closed").startswith("acme/closed@")
    assert folder_of("acme/gated").startswith("acme/gated@")


def test_a_typing_error_gets_the_nearest_names(hub, monkeypatch, capsys):
    """A traceback; names without a hint. A typing error in a preset's name asks nobody."""
    assert "nearest names" not in refused(capsys, "--model", "acme/tinny")
    hf_config("acme/tiny")
    said = refused(capsys, "--model", "acme/tinny")
    assert "--model acme/tinny (no folder, so a name of the hub): the hub has no such model" in said
    assert said.endswith("; the nearest names in the cache: acme/tiny\n")
    assert "no config.json in it" in refused(capsys, "--model", "acme/empty")
    hub.log.clear()
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for name in ("gpt22", "./acme/tiny", "/acme/tiny", "a/b/c"):
        assert "the nearest of" in refused(capsys, "--model", name)
    assert "needs the package huggingface_hub: pip install huggingface_hub" in refused(
        capsys, "--model", "acme/tiny")
    assert not hub.log


@contextlib.contextmanager
def files_of_at_most(size):
    """Let the system refuse to write larger files."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_disk_full_of_cache(hub, models, tmp_path):
    """A traceback, or half a file that is read later."""
    hf_config("acme/tiny")
    with files_of_at_most(4096), pytest.raises(ConfigError, match=(
            f"file too large; the cache is {tmp_path}/cache, and HF_HOME names another")):
        load_hf("acme/tiny")
    assert same(load_hf("acme/tiny")[0], load_hf(models[1])[0])


def test_a_silent_hub(hub, models, monkeypatch, capsys):
    """What the cache has is enough if nothing that we need is missing: another program may have
    filled it. What it lacks is one line."""
    monkeypatch.setattr(time, "sleep", lambda _: None)
    huggingface_hub.snapshot_download("acme/tiny", allow_patterns=["*.json", "*.safetensors"])
    hub.is_silent = True
    *_, tokenizer = load_for_decoding("acme/tiny", mesh_of("data=1"))
    assert tokenizer.kind == "tokenizer.json"
    said = capsys.readouterr().err
    assert "no answer from the hub" in said and (
        "lacks special_tokens_map.json, generation_config.json, chat_template.jinja; this" in said)
    with pytest.raises(ConfigError, match="no answer from the hub .* cache lacks config.json$"):
        load_hf("acme/tiny@v1")


# -------------------------------------------------------------------------------------------
# Data

@pytest.mark.parametrize("path, files", [
    ("/a.jsonl", {"a.jsonl"}), ("/more", {"b.txt", "c.txt"}), ("/more/*.txt", {"b.txt", "c.txt"}),
    ("@v1", {"a.jsonl"})])
def test_data_of_the_hub_is_the_same_as_a_copy_of_it(hub, path, files, tmp_path):
    """Other files, or others' names, which decide what is held out; requests for what the cache
    has."""
    copy = copied(tmp_path / "copy", files_in(hub, "datasets/acme/texts",
                                              "v1" if "@" in path else "main"))
    data.main([f"{TEXTS}{path}", "--out", str(tmp_path / "a"), "--vocab_size", "0"])
    assert {name for name in taken(hub) if "." in name} == files
    data.main([f"{copy}{path.removeprefix('@v1')}", "--out", str(tmp_path / "b"),
               "--vocab_size", "0"])
    data.main([f"{TEXTS}{path}", "--out", str(tmp_path / "c"), "--vocab_size", "0"])
    assert not any("resolve" in line for line in hub.log)
    assert ((tmp_path / "a/train.bin").read_bytes() == (tmp_path / "b/train.bin").read_bytes()
            == (tmp_path / "c/train.bin").read_bytes())


def test_what_data_cannot_be(hub, capsys, tmp_path):
    def says(path, *words):
        return refused(capsys, "--data", path, "--out", tmp_path / "run", *words)

    assert "no such file; did you mean 'a.jsonl'?" in says(f"{TEXTS}/b.jsonl")
    assert "no such file" in says(f"{TEXTS}/*.csv")
    assert "no revision 'v9'" in says(f"{TEXTS}@v9/a.jsonl")
    assert "no field 'texts', it has 'text', 'body'" in says(f"{TEXTS}/a.jsonl", "--field", "texts")
    assert "the hub has no such dataset" in (said := says("hf://datasets/acme/text/a.jsonl"))
    assert said.endswith("the nearest names in the cache: acme/texts\n")
    assert "expected hf://datasets/ORG/NAME/PATH" in says("hf://acme/texts")
    json_lines(tmp_path / "x.jsonl", {"text": "a b c\n" * 20}, {"text": "c d\n" * 20})
    data.main([str(tmp_path / "x.jsonl"), "--out", str(tmp_path / "x"), "--vocab_size", "0"])
    assert "--field body: has no effect on" in says(tmp_path / "x", "--field", "body")
