"""Fine-tuning: models whose weights are read instead of made, trained, and written back."""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import data
import model
import sample
import train
from published import folders, hf_config, load_hf, reference, save_hf
from tests.common import (
    command,
    continued,
    ends,
    hosts,
    net,
    order,
    peer,
    published_model,
    refused,
    slow,
    train_here,
)
from tests.helpers import (
    config_of,
    learn,
    make,
    mesh_of,
    program_of,
    rows_in,
    tokens_of,
    without_times,
)
from zigzag.core.errors import ConfigError
from zigzag.core.flags import change
from zigzag.core.mesh import by_path
from zigzag.disk.tokenizers import tokenizer_of
from zigzag.parallel import low_rank
from zigzag.parallel.network import network_of
from zigzag.parallel.saved import load_run
from zigzag.run import source
from zigzag.run.continuing import record_of
from zigzag.run.loop import first_state

# 3 heads, 1 key head and 300 ids: what 2 devices do not divide, and rows of padding.
SHAPE = dict(layers=4, d_model=24, heads=3, kv_heads=1, head_dim=8, d_ff=40, seq_len=640)
STEPS = ("--seq_len", 16, "--batch", 8, "--steps", 4, "--save_every", 2, "--eval_every", 2)
GREEDY = ("--prompt", "7 and", "--temperature", 0, "--tokens", 9)


def make_published(folder, text, seed=5):
    """A folder with a tiny LLaMA, as published ones are."""
    return published_model(folder, text, seed=seed, **SHAPE)


@pytest.fixture(scope="module")
def published(tmp_path_factory, text):
    return make_published(tmp_path_factory.mktemp("hf") / "llama", text)


def fine_tune(*words, mesh="tensor=2"):
    """train.py in this process, on a mesh of the first devices."""
    config = train.parse([str(w) for w in words])
    train_here(config, mesh_of(mesh))
    return config


def export(run, to, *words):
    folders.export(["--run", str(run), "--export", str(to), *words])


def half_of(out, to):
    """A copy of a run without the checkpoints of its second half."""
    shutil.copytree(out, to)
    for step in (3, 4):
        shutil.rmtree(to / "checkpoints" / str(step), ignore_errors=True)
    return to


def losses_in(out):
    return [row["loss"] for row in rows_in(out / "metrics.jsonl") if "loss" in row]


def same(a, b):
    a, b = by_path(a), by_path(b)
    assert a.keys() == b.keys()
    for path in a:
        np.testing.assert_array_equal(a[path], b[path], path)


# -------------------------------------------------------------------------------------------
# First weights

@pytest.fixture(scope="module")
def tuned_alone(published):
    """Three updates on one device, and the loss of the first batch by net.loss."""
    params, config = load_hf(published, seq_len=16, dtype="float32")
    config = make(**{**dataclasses.asdict(config), "steps": 3})
    examples = tokens_of(config)
    batch = data.collate([examples[i] for i in order(64, config.seed, 0, 8)], 16)
    total, count = net.loss(params, batch, config)
    rows, _ = learn(config, first_weights=lambda places: jax.tree.map(
        lambda w, like: jax.device_put(w, like.sharding), params, places))
    return config, [row["loss"] for row in rows], float(total / count)


def test_a_published_model_is_loaded_in_the_dtype_that_is_asked(published):
    """sample.load(dtype=) that first reads 32 bits of each weight, or returns those."""
    exact, rounded = (sample.load(published, dtype=dtype)[0] for dtype in ("float32", "bfloat16"))
    for a, b in zip(*map(jax.tree.leaves, (exact, rounded)), strict=True):
        assert b.dtype == jnp.bfloat16 and (b == a.astype(b.dtype)).all()



@pytest.mark.full
@pytest.mark.parametrize("mesh, how", [
    ("tensor=2", {}), slow("fsdp=2,tensor=4", {}), slow("data=2,fsdp=2", dict(zero=1)),
    slow("pipe=2,tensor=2", dict(schedule="interleaved", chunks=2, microbatches=2))])
def test_training_begins_with_the_weights_that_it_is_given(published, tuned_alone, mesh, how):
    """New weights that are not replaced, in part or on some mesh; another device's part of an
    array; layers that are not in the order of a pipeline's stages."""
    config, want, first = tuned_alone
    assert want[0] == pytest.approx(first, rel=1e-6)
    config = change(config, **how)
    rows, _ = learn(config, mesh, first_weights=functools.partial(
        folders.read_hf, network_of(config), published, config.network))
    assert rows[0]["loss"] == pytest.approx(first, rel=2e-6)
    assert [row["loss"] for row in rows] == pytest.approx(want, rel=5e-5)


def test_first_weights_are_in_memory_once():
    """A state that copies the given weights, or also makes random ones."""
    program = program_of(make(), "tensor=2")
    params = program.state["params"]
    memory = program.start.lower(jax.random.key(0), params).compile().memory_analysis()
    size = sum(4 * np.prod(w.sharding.shard_shape(w.shape)) for w in jax.tree.leaves(params))
    assert memory.alias_size_in_bytes == size and memory.temp_size_in_bytes < 0.1 * size


def test_a_short_row_keeps_the_table_of_positions(tmp_path):
    """A folder refused because only --seq_len rows of learned positions are expected; rows longer
    than the table, whose last tokens would all get its last position."""
    peer("safetensors")
    record = dict(model_type="gpt2", n_layer=1, n_embd=16, n_head=2, n_positions=64, vocab_size=128,
                  layer_norm_epsilon=1e-5, activation_function="gelu_new")
    (tmp_path / "config.json").write_text(json.dumps(record))
    config = hf_config(tmp_path)
    params = net.init(config, jax.random.key(0))
    save_hf(tmp_path / "gpt2", params, config)
    got, short = load_hf(tmp_path / "gpt2", seq_len=8)
    assert short.seq_len == 8
    same(got, params)
    with pytest.raises(ConfigError, match="--seq_len 80: .* learned positions for only 64"):
        train.parse(["--model", str(tmp_path / "gpt2"), "--seq_len", "80"])


# -------------------------------------------------------------------------------------------
# The command line

@pytest.fixture(scope="module")
def tuned(tmp_path_factory, published, text):
    """A run that began with the published weights: its folder, and the command's flags."""
    out = tmp_path_factory.mktemp("tuned") / "out"
    words = ("--model", published, "--data", text, *STEPS)
    fine_tune(*words, "--out", out)
    return out, words


@pytest.mark.full
def test_a_run_continues_from_its_own_checkpoint(tmp_path, published, text, tuned):
    """A continued run that starts again from the published weights. (Here these were replaced, and
    half of the run was deleted.)"""
    out, words = tuned
    half = half_of(out, tmp_path / "out")
    kept = published / "model.safetensors"
    raw = kept.read_bytes()
    kept.write_bytes((make_published(tmp_path / "other", text, 6) / kept.name).read_bytes())
    try:
        fine_tune(*words, "--out", half)
    finally:
        kept.write_bytes(raw)
    assert without_times(half / "metrics.jsonl") == without_times(out / "metrics.jsonl")


def test_a_run_of_a_folder_continues_by_its_own_folder(tmp_path, published):
    """A continued run with the folder's seq_len, or with a new model's learning rate, or refused
    because --model is not given; adapters that are no longer trained."""
    for more in ((), ("--lora_rank", "2")):
        config = train.parse(["--model", str(published), "--seq_len", "16", "--out", str(tmp_path),
                              "--batch", "4", *more])
        record = {**record_of(config), "tokenizer": "tokenizer.json"}
        (tmp_path / "config.json").write_text(json.dumps(record))
        rank = str(config.network.lora_rank)
        for words in ([], ["--model", f"{published}/"], ["--lora_rank", rank]):
            again = continued("--out", tmp_path, *words)
            assert again == config
        with pytest.raises(ConfigError, match="lora_rank"):
            continued("--out", tmp_path, "--lora_rank", 3)
        with pytest.raises(ConfigError, match="holds a run with .*init_from"):
            continued("--out", tmp_path, "--model", "tiny")


@pytest.mark.slow
@pytest.mark.full
def test_a_run_is_whole_without_the_folder_that_it_began_with(tmp_path, capsys, text):
    """A run that still needs the published folder for its tokenizer or configuration; a sample or
    an export of other weights than the run's; an export without a tokenizer."""
    folder, out, mine = (tmp_path / name for name in ("theirs", "out", "mine"))
    config = fine_tune("--model", make_published(folder, text), "--data", text, *STEPS[:-4],
                       "--out", out)
    said = capsys.readouterr().out
    assert "on rows of 16 tokens (--seq_len) with a learning rate of up to 0.00208 (--lr)" in said
    shutil.rmtree(folder)
    record = json.loads((out / "config.json").read_text())
    assert record["lr"] == pytest.approx(0.05 / 24) and record["tokenizer"] == "tokenizer.json"

    def written(*words):
        sample.main([str(w) for w in (*words, *GREEDY)])
        return capsys.readouterr().out

    said = written("--run", out)
    assert said.startswith("7 and") and written("--run", out, "--shards", 1) == said
    export(out, mine)
    assert "tokenizer.json, tokenizer_config.json" in capsys.readouterr().out
    assert written("--model", mine) == said
    params, again = load_hf(mine)
    same(params, load_run(out)[0])
    assert again.seq_len == SHAPE["seq_len"] and config.network.seq_len == 16
    with pytest.raises(ConfigError, match="holds config.json"):
        export(out, mine)


@pytest.mark.full
def test_a_run_begins_with_the_weights_of_another(tmp_path, capsys, tuned, text):
    """--init_from with new weights, with the old run's optimizer, schedule and step count, or with
    text in other tokens."""
    out, _ = tuned
    flags = ("--init_from", out, "--data", text, "--batch", 8, "--steps", 1)
    config = train.parse([str(w) for w in (*flags, "--out", tmp_path / "new")])
    assert config.network.seq_len == 16 and config.lr == pytest.approx(0.05 / 24)
    weights, tokenizer, _ = source.first_weights(config)
    assert tokenizer.kind == "tokenizer.json"
    program = program_of(config, "fsdp=2")
    state = first_state(program, weights)
    same(state["params"], load_run(out)[0])
    assert state["step"] == 0 and not any(np.any(m) for m in jax.tree.leaves(state["opt"]))
    fine_tune(*flags, "--out", tmp_path / "new", mesh="fsdp=2")
    assert len(losses_in(tmp_path / "new")) == 1
    data.prepare([str(text)], tmp_path / "bytes")
    assert "not from the tokenizer" in refused(
        capsys, "--init_from", out, "--data", tmp_path / "bytes", "--out", tmp_path / "no")
    assert "holds a run with init_from" in refused(
        capsys, "--init_from", tmp_path / "new", *flags[2:], "--out", tmp_path / "new")
    assert not (tmp_path / "no").exists()


def test_a_model_of_bytes_is_exported_without_a_tokenizer(tmp_path, capsys, monkeypatch):
    """An exported folder that seems to be complete, without a tokenizer."""
    peer("safetensors")
    config, run = config_of(**SHAPE, vocab_size=300), tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps({
        **dataclasses.asdict(config), "format": 1, "network": network_of(config).name,
        "tokenizer": "bytes"}))
    params = net.init(config, jax.random.key(0))
    monkeypatch.setattr(folders, "load_run", lambda folder: (params, config))
    export(run, tmp_path / "mine", "--dtype", "float16")
    assert "in float16, without a tokenizer" in capsys.readouterr().out
    assert "has no tokenizer" in refused(capsys, "--model", tmp_path / "mine", "--out",
                                         tmp_path / "no")


@pytest.mark.full
def test_adapters_beside_published_weights(tmp_path, capsys, published, text):
    """Adapters for random weights; a checkpoint with all weights; a run that continues, is exported
    or starts another run without its frozen weights."""
    out, words = tmp_path / "out", ("--model", published, "--data", text, "--lora_rank", 2, *STEPS)
    config = fine_tune(*words, "--out", out)
    assert config.lr == pytest.approx(0.5 / 24)
    said = capsys.readouterr().out
    adapters = 4 * 2 * (2 * (24 + 24) + 2 * (24 + 8) + 3 * (24 + 40))
    assert f"of which {adapters:,} are trained" in said
    base, _ = load_hf(published)
    params, read = load_run(out)
    assert read.lora_rank == 0
    np.testing.assert_array_equal(params["embed"], base["embed"])
    assert np.abs(params["layers"]["wq"] - base["layers"]["wq"]).max() > 1e-4
    half = half_of(out, tmp_path / "half")
    fine_tune(*words, "--out", half, mesh="fsdp=2")
    assert losses_in(half) == pytest.approx(losses_in(out), rel=2e-6)
    export(out, tmp_path / "mine")
    same(load_hf(tmp_path / "mine")[0], params)
    # A run that begins with this one trains all weights, unless it is told otherwise.
    flags = ["--init_from", str(out), "--data", str(text), *map(str, STEPS)]
    for rank in (0, 3):
        config = train.parse([*flags, "--lora_rank", str(rank)])
        assert config.network.lora_rank == rank == train.parse(flags).network.lora_rank + rank
        weights, *_ = source.first_weights(config)
        program = program_of(config, "fsdp=2")
        first = program.weights(first_state(program, weights))
        same(low_rank.merged(first) if rank else first, params)


@pytest.mark.full
def test_adapters_of_a_run_that_goes_on(tmp_path, capsys, monkeypatch, text):
    """Adapters of a run combined with its newest weights, which have changed. (The folder has the
    name of a preset.)"""
    monkeypatch.chdir(tmp_path)
    shape = ("--layers", 1, "--d_model", 16, "--heads", 2, "--seq_len", 16, "--batch", 8,
             "--save_every", 1, "--eval_every", 9, "--data", text)
    fine_tune(*shape, "--steps", 1, "--out", "tiny")
    adapted = ("--init_from", "tiny", "--lora_rank", 2, *shape[6:], "--lr", 0.01, "--out", "b")
    fine_tune(*adapted, "--steps", 1)
    fine_tune(*shape, "--steps", 3, "--out", "tiny")
    before, _ = load_run("b")
    fine_tune(*adapted, "--steps", 2)
    after, _ = load_run("b")
    same({"embed": before["embed"]}, {"embed": after["embed"]})
    assert np.any(before["layers"]["wq"] != after["layers"]["wq"])
    shutil.rmtree("tiny/checkpoints/1")
    assert "no checkpoint of step 1; there are 3, 2" in refused(
        capsys, "--run", "b", main=sample.main)


@pytest.mark.full
def test_an_edited_model_begins_with_published_weights_only_if_it_is_told_to(
        tmp_path, capsys, monkeypatch, published, text):
    """Another activation, with which a published model is fine-tuned or sampled silently; a run of
    it that cannot continue; a flag without a meaning."""
    monkeypatch.setattr(model, "swiglu", lambda gate, up: jax.nn.gelu(gate) * up)
    monkeypatch.setattr(reference, "_difference", reference._difference.__wrapped__)
    says, out = "differs from this llama: its logits differ by", tmp_path / "out"
    words = ("--model", published, "--data", text, *STEPS, "--out", out)
    for main, flags in ((train.main, words), (train.main, (*words[:4], "--bench")),
                        (sample.main, ("--model", published, *GREEDY))):
        assert says in (line := refused(capsys, *flags, main=main)) and "--edited" in line
    assert not out.exists()
    sample.main([str(w) for w in ("--model", published, *GREEDY, "--edited")])
    assert capsys.readouterr().out.startswith("7 and")
    fine_tune(*words[:-4], "--edited", "--out", out, mesh="")
    assert json.loads((out / "config.json").read_text())["edited"]
    config = continued("--out", out, "--steps", 5)
    assert config.edited and source.first_weights(config)
    assert "give --model FOLDER" in refused(capsys, "--edited", "--run", out, main=sample.main)
    for named in ([], ["--init_from", str(out)]):
        with pytest.raises(ConfigError, match="--edited .* give --model FOLDER"):
            train.parse(["--edited", *named])


def test_a_folder_may_be_called_as_a_preset_is(tmp_path, monkeypatch, published):
    """New weights instead of the folder's, because the folder has the name of a preset."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(published, "gpt2")
    config = train.parse(["--model", "gpt2/"])
    assert (config.network.layers, config.init_from, config.model) == (4, "gpt2", "gpt2")
    assert train.parse(["--model", "gpt2"]).network.layers == 12


def test_what_its_weights_were_not_made_for_is_refused(capsys, published, tmp_path):
    """Flags that are silently ignored; weights read into another shape; a run's folder left
    behind."""
    out = tmp_path / "out"

    def says(*words):
        return refused(capsys, *words, "--out", out)

    assert "--layers 3: the weights of" in (line := says("--model", published, "--layers", 3))
    assert "need 4" in line and "--seq_len" in line
    assert "give only one" in says("--model", published, "--init_from", "run")
    assert "--init_from nowhere: no run there" in says("--init_from", "nowhere")
    assert "give it as --model" in says("--init_from", published)
    assert "no folder with a published model and no preset" in says("--model", "nowhere")
    assert "pip install" not in says("--model", tmp_path)
    (published / "model.safetensors").rename(tmp_path / "model.safetensors")
    try:
        assert "model.safetensors" in says("--model", published)
    finally:
        (tmp_path / "model.safetensors").rename(published / "model.safetensors")
    assert not out.exists()
    config = train.parse(["--model", str(published), "--layers", "4", "--remat", "full"])
    assert (config.network.seq_len, config.network.remat, config.lr) == (
        512, "full", pytest.approx(0.05 / 24))
    assert train.parse(["--model", str(published), "--seq_len", "640"]).network.seq_len == 640


@pytest.mark.full
def test_commands_take_a_folder(published, tmp_path):
    """The table, the sample or the export, which work in this process but not as commands."""
    done = command("--model", published, "--shards", 3, file="shard.py")
    assert done.returncode == 0 and "layers.wq" in done.stdout, done.stderr
    texts = [command("--model", published, "--shards", n, *GREEDY, file="sample.py").stdout
             for n in (1, 3)]
    assert texts[0] == texts[1] and texts[0].startswith("7 and")
    done = command("--run", tmp_path, "--export", tmp_path / "x", file="model.py")
    assert done.returncode == 2 and "no run there" in done.stderr


@pytest.mark.full
def test_several_processes_fine_tune_one_folder(tmp_path, published, text, tuned):
    """Weights or a tokenizer that only one process reads; other numbers than with one process."""
    out, words = tuned
    runs = ends(hosts(2, *words, "--mesh", "tensor=2", "--out", tmp_path / "out"))
    assert [status for status, *_ in runs] == [0, 0], runs
    assert losses_in(tmp_path / "out") == pytest.approx(losses_in(out), rel=2e-6)


@pytest.mark.full
@pytest.mark.slow
def test_transformers_reads_what_a_run_exports(tmp_path, tuned):
    """An export that only our own code can read, or with other logits, ids or ends of text."""
    torch, transformers = peer("torch"), peer("transformers")
    export(tuned[0], tmp_path / "mine")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "mine")
    reader = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path /
                                                                     "mine/tokenizer.json"))
    ids = reader("7 and 8").input_ids
    params, config = load_hf(tmp_path / "mine")
    assert ids == tokenizer_of(tuned[0], {"tokenizer": "tokenizer.json"}).prompt("7 and 8")
    with torch.no_grad():
        want = theirs.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False,
                               eos_token_id=None)[0, len(ids):].tolist()
    assert sample.generate(params, [ids], config, 12, 0)[0] == want
