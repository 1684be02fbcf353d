"""Models in a notebook: sample.load, logits of one row, attention maps, and a run of `fit`."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import data
import model
import sample
from tests.common import command, full, net
from tests.helpers import learn, make, mesh_of, run_of
from tests.readme import block
from zigzag.commands.sampling import load_model
from zigzag.core.errors import ConfigError
from zigzag.generate.prompts import Flags


@pytest.fixture(scope="module")
def fitted(tmp_path_factory, text):
    """A run of model.py's decoder, trained through fit with a tokenizer of its own."""
    folder = tmp_path_factory.mktemp("fitted")
    corpus = data.prepare([str(text)], folder / "tokens", 300)
    config = run_of(model.Config(layers=1, d_model=16, heads=2, seq_len=16, vocab_size=300),
                    steps=2, batch=8, out=str(folder / "run"))
    learn(config, tokenizer=corpus.tokenizer, examples=data.Windows(corpus.train, 16))
    return folder / "run", corpus.tokenizer


@pytest.mark.full
def test_a_run_of_fit_is_sampled_and_exported(fitted, tmp_path, capsys):
    """A run that cannot be sampled since nothing says what its ids mean; an export that says its
    tokens were bytes."""
    run, tokenizer = fitted
    params, config, found = sample.load(run)
    assert config.seq_len == 16 and found.encode("bala 3").tolist() == tokenizer.encode(
        "bala 3").tolist()
    sample.main(["--run", str(run), "--prompt", "bala 3", "--tokens", "4", "--temperature", "0",
                 "--json"])
    record = json.loads(capsys.readouterr().out)
    ids, = sample.generate(params, [found.prompt("bala 3")], config, 4, 0)
    assert found.decode([*found.prompt("bala 3"), *ids]).endswith(record["text"])
    done = command("--run", run, "--export", tmp_path / "there", file="model.py")
    assert "with tokenizer.model" in done.stdout, done.stderr
    again, published, theirs = sample.load(tmp_path / "there")
    assert theirs.encode("bala 3").tolist() == tokenizer.encode("bala 3").tolist()
    np.testing.assert_allclose(model.forward(params, ids, config),
                               model.forward(again, ids, published), atol=1e-5)


@pytest.mark.full
def test_a_run_without_a_tokenizer(tmp_path, capsys):
    """A tokenizer of bytes, for a run whose ids are something else."""
    config = make(steps=1, out=str(tmp_path / "run"))
    learn(config)
    params, c, tokenizer = sample.load(tmp_path / "run", mesh_of("tensor=2"))
    assert tokenizer is None and c.layers == config.network.layers
    assert not params["layers"]["wq"].sharding.is_fully_replicated
    with pytest.raises(ConfigError, match="without a tokenizer .*tokenizer="):
        load_model(Flags(run=str(tmp_path / "run")))


@pytest.mark.parametrize("mesh", [full(None), "data=2,fsdp=2"])
def test_a_run_of_a_custom_task_is_loaded(tmp_path, mesh):
    """"vocab_size is 0", for a run whose weights are not the network's."""
    config = make(steps=2, out=str(tmp_path / "run"))
    _, result = learn(
        config, "data=2,fsdp=2", examples=[np.ones(4, np.float32)] * 16,
        init=lambda key: {"m": [{"w.1": jnp.ones((4, 3))}], "b": jnp.zeros(())},
        loss=lambda p, b: (jnp.sum((b["x"] @ p["m"][0]["w.1"] + p["b"])**2), len(b["x"])),
        collate=lambda rows: {"x": np.stack(rows)})
    found, _, tokenizer = sample.load(tmp_path / "run", mesh and mesh_of(mesh))
    assert tokenizer is None
    jax.tree.map(np.testing.assert_array_equal, found, result.params)


@pytest.mark.parametrize("forward", [model.forward, net.forward])
def test_forward_takes_one_row(forward):
    """A list of ids that is taken for a batch of numbers."""
    config, row, at = make().network, np.array([3, 4, 5, 6]), np.array([2, 3, 4, 5])
    params = net.init(config, jax.random.key(0))
    np.testing.assert_array_equal(
        forward(params, row.tolist(), config), forward(params, row[None], config)[0])
    np.testing.assert_array_equal(
        forward(params, row, config, positions=at),
        forward(params, row[None], config, positions=at[None])[0])


@pytest.mark.full
def test_the_pages_calls_from_python(fitted):
    """The calls in docs/generation.md that no longer run, or give answers of another form."""
    code, found = block("docs/generation.md", "sample.beam_search"), {}
    code = code.replace('"smollm2"', repr(str(fitted[0]))).replace("tokens=64", "tokens=4")
    exec(code.replace("The capital of France is", "bala 3").replace("def main(", "3 and"), found)
    assert all(len(ids) <= 4 for ids in found["ids"]) and len(found["texts"]) == 2
    assert all(len(rows) == 4 for rows in found["best"])
    assert all(total < 0 < count for total, count in found["scores"])


@pytest.mark.full
def test_the_pages_notebook(fitted):
    """The notebook in docs/generation.md that does not run; maps of another attention than the
    model's."""
    code, found = block("docs/generation.md", "maps.append"), {}
    exec(code.replace('"out"', repr(str(fitted[0]))).replace("The sea is", "bala 3"), found)
    params, config, ids = found["params"], found["config"], found["ids"]
    np.testing.assert_allclose(found["logits"], model.forward(params, ids, config), atol=1e-6)
    maps = found["maps"]
    assert len(maps) == config.layers and maps[0].shape == (1, 2, len(ids), len(ids))
    np.testing.assert_allclose(maps[0].sum(-1), 1, rtol=1e-5)
    out = model.head_logits(params, found["x"], config)[0]
    np.testing.assert_allclose(out, found["logits"], atol=1e-4)
