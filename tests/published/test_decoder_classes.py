"""Classes and numbers of rows, by decoders too: the last token's, as transformers reads them."""


import jax
import jax.numpy as jnp
import numpy as np
import pytest

import published
import train
from tasks import metrics
from tests.common import full, peer
from tests.helpers import KeepRows, mesh_of, run_of
from zigzag.commands import training
from zigzag.core.errors import ConfigError
from zigzag.parallel.network import network_of

SIZES = dict(vocab_size=61, pad_token_id=0)
OLD = dict(n_embd=32, n_head=4, n_layer=2, n_positions=32)
NEW = dict(hidden_size=32, num_attention_heads=4, num_hidden_layers=2)
GROUPED = dict(NEW, num_key_value_heads=2, intermediate_size=64)
FAMILIES = {
    "GPT2": OLD, "Llama": GROUPED, "Qwen3": dict(GROUPED, head_dim=8),
    "OPT": dict(NEW, ffn_dim=64, word_embed_proj_dim=32, max_position_embeddings=32),
    "GPTJ": dict(OLD, rotary_dim=4), "Gemma2": dict(GROUPED, head_dim=8),
    "Bloom": dict(hidden_size=32, n_head=4, n_layer=2), "Falcon": NEW, "Starcoder2": GROUPED,
    "GPTNeoX": dict(NEW, intermediate_size=64), "Mistral": GROUPED, "Phi3": GROUPED}
TEXT = np.random.default_rng(0).integers(1, 61, (4, 16))
LENGTHS = np.array([16, 9, 3, 12])
MASK = (np.arange(16) < LENGTHS[:, None]).astype(np.float32)
IDS = np.where(MASK > 0, TEXT, 0)


def theirs(name, labels):
    torch, transformers = peer("torch"), peer("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**FAMILIES[name], **SIZES, num_labels=labels)
    return getattr(transformers, f"{name}ForSequenceClassification")(config).eval()


def logits_of(model):
    torch = peer("torch")
    with torch.no_grad():
        return model(torch.tensor(IDS), attention_mask=torch.tensor(MASK)).logits.numpy()


@pytest.mark.parametrize("name, labels", [
    ("GPT2", 3), ("Llama", 1), *(full(name, 3) for name in FAMILIES if name not in
                                 ("GPT2", "Llama"))])
def test_a_published_decoder_with_classes_loads_and_leaves(tmp_path, name, labels):
    """The last place of a row, that is padding; a bias that the published head has not; a head that
    is lost in an export."""
    model = theirs(name, labels)
    model.save_pretrained(tmp_path / "in")
    params, config = published.load_hf(tmp_path / "in")
    network = network_of(config)
    assert (config.head, config.pool, config.labels) == ("classes", "last", labels)
    got = network.forward(params, jnp.asarray(IDS), config, mask=jnp.asarray(MASK))
    want = logits_of(model)
    np.testing.assert_allclose(got, want, atol=1e-6)
    alone = network.forward(params, jnp.asarray(IDS[2:3, :3]), config)
    np.testing.assert_allclose(alone, want[2:3], atol=1e-6)
    published.save_hf(tmp_path / "out", params, config)
    assert (logits_of(type(model).from_pretrained(tmp_path / "out")) == want).all()


# -------------------------------------------------------------------------------------------
# Training from the command line

def rows_of_classes(path, kind, count=120):
    """Rows whose class is that of their last token (or whose number is), of several lengths."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 61, (count, 16))
    lengths = rng.integers(3, 17, count)
    mask = np.arange(16) < lengths[:, None]
    last = tokens[np.arange(count), lengths - 1]
    labels = last % 3 if kind == "classes" else last.astype(np.float32) / 60
    np.savez(path, tokens=tokens * mask, mask=mask.astype(np.float32), labels=labels)
    return str(path)


def learned(tmp_path, mesh, labels, causal, **flags):
    tmp_path.mkdir(parents=True, exist_ok=True)
    kind = "classes" if labels > 1 else "numbers"
    path = rows_of_classes(tmp_path / f"{kind}.npz", kind)
    rows, network = [], dict(
        head="classes", labels=labels, causal=causal, pool="last", layers=2, d_model=32, heads=4,
        d_ff=64, vocab_size=61, seq_len=16, dropout=0.1)
    config = run_of(published.config_of(network), **{**dict(
        data=(path,), out=str(tmp_path / f"run {mesh} {labels} {causal}"), steps=12, batch=8,
        lr=0.01, dtype="float32", eval_every=6, fsdp_min=1), **flags})
    with training.opened(config) as (config, task, _):
        result = train.fit(config, task, mesh=mesh_of(mesh), say=KeepRows(rows, []))
    return rows, result


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["data=2,pipe=2", full("seq=2,tensor=2"), full("fsdp=2,tensor=2"),
                                  full("pipe=2,seq=2")])
@pytest.mark.parametrize("causal", [True, full(False)])
def test_accuracy_and_f1_are_those_of_one_device(tmp_path, mesh, causal):
    """The last token of a device's part of the time, or of the layers; a class of a padded row."""
    for metric, flags in (("accuracy", {}), ("f1", dict(microbatches=2 if "pipe" in mesh else 1))):
        (rows, one), (others, other) = (
            learned(tmp_path / metric / (text or "one"), text and mesh, 3, causal, metric=metric,
                    **(flags if text else {})) for text in ("", "mesh"))
        losses, others = ([r.get("loss", r.get("eval_loss")) for r in x] for x in (rows, others))
        assert others == pytest.approx(losses, rel=2e-5)
        assert other.evaluation[metric] == one.evaluation[metric] > 0.2
        assert (np.asarray(one.outputs) == np.asarray(other.outputs)).all()


@pytest.mark.parametrize("mesh", ["tensor=2", full("data=2,pipe=2"), full("seq=2")])
@pytest.mark.full
def test_one_label_is_a_number(tmp_path, mesh):
    """A cross-entropy of one class, which is always 0."""
    (rows, one), (others, other) = (learned(tmp_path / (text or "one"), text, 1, True)
                                    for text in ("", mesh))
    losses, others = ([r.get("loss", r.get("eval_loss")) for r in x] for x in (rows, others))
    assert others == pytest.approx(losses, rel=2e-5) and losses[-1] < losses[0]
    network = published.network_of_fields(dict(head="classes", pool="last"))
    config = published.config_of(dict(head="classes", labels=1, pool="last", layers=1, d_model=16,
                                     heads=2, vocab_size=61, seq_len=16))
    params = network.init(config, jax.random.key(0))
    batch = dict(tokens=jnp.asarray(IDS), mask=jnp.asarray(MASK), labels=jnp.arange(4.0))
    total, count = network.loss(params, batch, config)
    found = network.forward(params, batch["tokens"], config, mask=batch["mask"])[:, 0]
    assert float(total) == pytest.approx(float(((found - jnp.arange(4)) ** 2).sum()), rel=1e-5)
    assert float(count) == 4


def test_what_is_refused(tmp_path):
    """A class read off a token that sees only itself; a metric of texts for classes."""
    for fields, says in [(dict(head="classes", labels=2), "give --pool last or --causal false"),
                         (dict(pool="last"), "--pool last: needs --head classes")]:
        with pytest.raises(ConfigError, match=says):
            published.config_of(dict(layers=1, d_model=16, heads=2, vocab_size=9, **fields))
    with pytest.raises(ConfigError, match="rouge: needs pairs of texts; expected accuracy or f1"):
        learned(tmp_path, "", 3, True, metric="rouge")
    with pytest.raises(ConfigError, match="--labels of at least 2"):
        learned(tmp_path, "", 1, True, metric="accuracy")


def test_f1_of_classes_is_that_of_its_definition():
    """The mean of classes' F1 without those that nobody predicted; the F1 of class 0."""
    rng = np.random.default_rng(0)
    for count in (2, 4):
        a, b = rng.integers(0, count, (2, 50))
        each = [2 * ((a == c) & (b == c)).sum() / ((a == c).sum() + (b == c).sum())
                for c in range(count)]
        want = each[1] if count == 2 else np.mean(each)
        assert metrics.f1_of_classes(a, b, count)["f1"] == pytest.approx(want)
    assert metrics.f1_of_classes([3, 3], [3, 5], 6)["f1"] == pytest.approx((2 / 3 + 0) / 2)
    assert metrics.f1_of_classes([0, 1], [0, 1], 3)["f1"] == 1
