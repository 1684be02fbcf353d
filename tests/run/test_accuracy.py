"""--accuracy: the share of targets that are the likeliest id or class."""

import jax
import numpy as np
import pytest

import data
import train
from tests.common import full, net, refuses, slow
from tests.helpers import KeepRows, learn, make, mesh_of, needed, run_of, tokens_of
from zigzag.parallel import products

published = needed("published")


def share_of_hits(config, params, batch):
    """By the logits of the whole vocabulary."""
    logits = net.forward(params, batch["tokens"], config)
    hits = (np.argmax(logits, -1) == batch["targets"]) * batch["weights"]
    return float(hits.sum() / batch["weights"].sum())


MESHES = [full("", {}), ("fsdp=2,tensor=2", dict(accumulate=2)),
          slow("pipe=2,seq=2", dict(schedule="1f1b", microbatches=2)),
          *(full(*case) for case in (
              ("seq=2,tensor=2", {}), ("pipe=2,tensor=2", dict(microbatches=2)),
              ("expert=2,tensor=2", dict(experts=4)), ("tensor=2", dict(collectives="compiler"))))]


@pytest.mark.parametrize("mesh, changes", MESHES)
@pytest.mark.parametrize("chunked", [False, full(True)])
def test_the_hits_are_those_of_the_logits(mesh, changes, chunked, monkeypatch):
    """Hits of a part of the vocabulary, of one chunk of the time, or counted on each device."""
    if chunked:
        monkeypatch.setattr(products, "LOGITS", 2000)
    config = make(**{**dict(layers=4, accuracy=True, steps=8, batch=16, lr=0.02, eval_every=8,
                            dtype="float32"), **changes})
    held_out = tokens_of(config, 13, seed=5)
    rows, result = learn(config, mesh, held_out=held_out)
    task = train.Task(None, lambda e: data.collate(e, config.network.seq_len), None,
                      examples=tokens_of(config))
    first = jax.jit(lambda: net.init(config.network, jax.random.key(0)))()
    for at, params in ((0, first), (8, jax.device_get(result.params))):
        batch = (task.collate(held_out) if at else
                 train.training_batch(config, mesh_of(""), task, None, 0))
        found = rows[-1]["eval_accuracy"] if at else rows[0]["accuracy"]
        want = share_of_hits(config, params, jax.device_get(batch))
        assert found == pytest.approx(want, abs=1e-5), at
    assert rows[-1]["eval_accuracy"] > 0.05


@pytest.mark.full
def test_classes_are_counted_too():
    """The accuracy of a classifier, whose loss is of all time on every stage."""
    network = published.config_of(dict(head="classes", labels=3, causal=False, layers=2, d_model=32,
                                      heads=4, d_ff=64, vocab_size=61, seq_len=16))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 61, (24, 16)).astype(np.int32)
    examples = [dict(tokens=t, mask=np.ones(16, np.float32), labels=t[0] % 3) for t in tokens]
    config = run_of(network, steps=2, batch=8, out="", accuracy=True, eval_every=2, lr=0.01)
    init, loss, _ = train.language(config)
    found = []
    for mesh in ("", "pipe=2,tensor=2"):
        rows = []
        train.fit(config, train.Task(
            init, lambda rows: {k: np.stack([r[k] for r in rows]) for k in rows[0]}, loss,
            examples=examples[:16], held_out=examples[16:]), mesh=mesh_of(mesh),
            say=KeepRows(rows, []))
        found.append([row.get("accuracy", row.get("eval_accuracy")) for row in rows])
    assert found[0] == pytest.approx(found[1], abs=1e-6)
    assert 8 * found[0][0] == round(8 * found[0][0])


def test_a_loss_that_is_not_looked_into_is_refused():
    """A flag without an effect."""
    def loss(params, batch):
        return (params["w"] * batch["tokens"]).sum(), batch["tokens"].size

    with refuses("--accuracy true: this loss returns no sum"):
        learn(make(accuracy=True, steps=1), init=lambda key: {"w": jax.numpy.ones(())}, loss=loss)
