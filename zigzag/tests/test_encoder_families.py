"""Every family of published encoders against transformers, as test_families.py has decoders: of text
and of pictures, with each head."""

import dataclasses
import functools
import json
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import model
import train
from zigzag import families
from zigzag.errors import ConfigError
from zigzag.mesh import by_path
from zigzag.tests.common import mesh_of, peer, sums_and_gradients
from zigzag.tests.test_families import (
    BY_HAND,
    COLUMNS,
    ROWS,
    Reference,
    T,
    V,
    as_published,
    assert_close,
    assert_gradient,
    cases,
    logits_of,
)
from zigzag.tests.test_rule import no_worse_than_by_hand

# -------------------------------------------------------------------------------------------
# Tiny models, of numbers that differ from all defaults and divide by little

LABELS = 5


def text(kind, head, heads=4, layers=2, **more):
    return f"{kind}{head}", dict(
        hidden_size=12 * heads, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=80, vocab_size=V, max_position_embeddings=64, layer_norm_eps=1e-3,
        num_labels=LABELS) | more


def picture(kind, head, heads=4, layers=2, **more):
    """Of 4 x 4 patches with some pixels to spare, or 5 x 5: with the class token 17 or 26."""
    return f"{kind}{head}", dict(
        hidden_size=12 * heads, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=80, image_size=14, patch_size=3, num_channels=2, layer_norm_eps=1e-3,
        num_labels=LABELS) | more


ALBERT = dict(embedding_size=20, layers=4, num_hidden_groups=2)
CLASSES, PICTURE = "ForSequenceClassification", "ForImageClassification"
CASES = {
    "bert": text("Bert", "ForMaskedLM"),
    "bert classes": text("Bert", CLASSES, layers=4, type_vocab_size=3),
    "bert classes of 6 heads": text("Bert", CLASSES, 6, hidden_act="gelu_new"),
    "bert untied": text("Bert", "ForMaskedLM", 3, tie_word_embeddings=False),
    "bert bare": text("Bert", "Model"),
    "roberta": text("Roberta", "ForMaskedLM", 6, layers=4, pad_token_id=1),
    "roberta classes": text("Roberta", CLASSES, pad_token_id=3, type_vocab_size=1,
                            hidden_act="relu"),
    "roberta bare": text("Roberta", "Model", 3),
    "albert": text("Albert", "ForMaskedLM", 6, **ALBERT),
    "albert classes": text("Albert", CLASSES, **ALBERT | dict(num_hidden_groups=1)),
    "albert alike": text("Albert", CLASSES, **ALBERT | dict(num_hidden_groups=4)),
    "albert bare": text("Albert", "Model", 3, **ALBERT),
    "vit": picture("ViT", PICTURE, layers=4),
    "vit of 6 heads": picture("ViT", PICTURE, 6, qkv_bias=False, image_size=15),
    "vit bare": picture("ViT", "Model", 3),
    "beit": picture("Beit", PICTURE, layers=4, use_relative_position_bias=True),
    "beit of 6 heads": picture("Beit", PICTURE, 6, use_shared_relative_position_bias=True,
                               use_mean_pooling=False, layer_scale_init_value=0.0, image_size=15,
                               use_absolute_position_embeddings=True),
    "beit hidden": picture("Beit", PICTURE, use_mask_token=True,
                           use_absolute_position_embeddings=True),
    "beit bare": picture("Beit", "Model", 3, use_relative_position_bias=True),
    "beit bare first": picture("Beit", "Model", use_mean_pooling=False),
}
QUICK = ("bert", "vit")
SLOW = ("bert classes", "roberta", "roberta classes", "albert", "albert classes", "beit",
        "beit of 6 heads", "beit bare")
TRAINED = [name for name in CASES if "bare" not in name]


def of(quick=QUICK, slow=SLOW, names=TRAINED):
    return cases(quick, slow, names)


def config_of(name):
    kind, fields = CASES[name]
    transformers = peer("transformers")
    return getattr(transformers, kind).config_class(**fields)


def is_picture(name):
    return name.startswith(("vit", "beit"))


def new_batch(name, rows=ROWS):
    """Rows of different lengths, with padding on the right, in which some tokens are asked for; or
    pictures."""
    rng, (kind, fields) = np.random.default_rng(0), CASES[name]
    batch = {"seeds": np.arange(rows, dtype=np.uint32)}
    if kind.endswith("Classification"):
        batch["labels"] = rng.integers(0, LABELS, rows).astype(np.int32)
    if is_picture(name):
        size = fields["image_size"]
        pictures = rng.normal(size=(rows, fields["num_channels"], size, size))
        return batch | {"source": pictures.astype(np.float32)}
    padding = config_of(name).pad_token_id
    length = np.linspace(T // 3, T, rows).astype(int)[::-1, None]
    mask = np.arange(T) < length
    tokens = rng.integers(4, V, (rows, T))
    tokens[0, 2:9:3] = padding          # (RoBERTa counts others alone)
    tokens = np.where(mask, tokens, padding)
    batch |= {"tokens": tokens.astype(np.int32), "mask": mask.astype(np.float32),
              "token_types": rng.integers(0, config_of(name).type_vocab_size, (rows, T)).astype(
                  np.int32)}
    if kind.endswith("MaskedLM"):
        asked = mask & (rng.random((rows, T)) < 0.4)
        batch |= {"targets": rng.integers(0, V, (rows, T)).astype(np.int32),
                  "weights": asked.astype(np.float32)}
    return batch


def inputs(batch):
    """What forward is given of a batch."""
    given = {k: batch[k] for k in ("mask", "token_types") if k in batch}
    return batch.get("tokens", batch.get("source")), given


def their_output(theirs, batch):
    torch = peer("torch")
    names = {"tokens": "input_ids", "mask": "attention_mask", "token_types": "token_type_ids",
             "source": "pixel_values"}
    out = theirs(**{names[k]: torch.tensor(a).long() if a.dtype == np.int32 else torch.tensor(a)
                    for k, a in batch.items() if k in names})
    return out["logits"] if "logits" in out else out.last_hidden_state


def where_tokens_are(output, batch):
    """Of an output of tokens that of padding is no one's."""
    return output * batch["mask"][..., None] if "mask" in batch and output.ndim == 3 else output


def their_loss(logits, batch):
    """The mean over what is asked; of a model without a head, of numbers that differ."""
    torch = peer("torch")
    if "labels" in batch:
        return torch.nn.functional.cross_entropy(logits, torch.tensor(batch["labels"]).long())
    losses = torch.nn.functional.cross_entropy(
        logits.reshape(-1, V), torch.tensor(batch["targets"].ravel()).long(), reduction="none")
    weights = torch.tensor(batch["weights"].ravel())
    return (losses * weights).sum() / weights.sum()


@functools.cache
def reference(name):
    """A model of transformers, saved; its output and, of one with a head, its gradients."""
    torch, transformers = peer("torch"), peer("transformers")
    torch.manual_seed(1)
    theirs = getattr(transformers, CASES[name][0])(config_of(name)).eval()
    with torch.no_grad():       # scales are no ones, biases no zeros
        for w in theirs.parameters():
            w.add_(torch.randn_like(w) * 0.1)
    for module in theirs.modules():     # (of padding torch learns nothing)
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None
    folder = Path(tempfile.mkdtemp(prefix="zigzag-")) / "model"
    theirs.save_pretrained(folder)
    batch = new_batch(name)
    output, gradients = their_output(theirs, batch), {}
    if name in TRAINED:
        their_loss(output, batch).backward()
        gradients = {n: np.zeros(w.shape, np.float32) if w.grad is None else w.grad.numpy()
                     for n, w in theirs.named_parameters() if not n.endswith("mask_token")}
    return Reference(folder, batch, where_tokens_are(output.detach().numpy(), batch), gradients)


def our_output(params, config, batch, mesh=None):
    tokens, given = inputs(batch)
    return where_tokens_are(logits_of(params, config, tokens, mesh, **given), batch)


def output_of_folder(name, folder):
    """What transformers makes of a folder of ours, in which it misses nothing."""
    torch, transformers = peer("torch"), peer("transformers")
    theirs, report = getattr(transformers, CASES[name][0]).from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32)
    assert not any(report.values()), report
    with torch.no_grad():
        batch = reference(name).batch
        return where_tokens_are(their_output(theirs.eval(), batch).numpy(), batch)


# -------------------------------------------------------------------------------------------
# The same numbers

@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("name", of(names=CASES))
def test_logits_are_those_of_transformers(name, shards):
    """A convention that is not the published one; padding that tokens see; a class of another
    token than the first, or of a part of the time; heads that the shards do not divide."""
    want, mesh = reference(name), mesh_of(f"tensor={shards}")
    params, config = model.load_hf(want.folder, mesh)
    assert_close(our_output(params, config, want.batch, mesh), want.logits, 1e-5)


@functools.cache
def loaded(name):
    """A model on one device, ready to train on the reference's batch; with our gradient of the
    mean loss there, and that loss."""
    want = reference(name)
    fields = {} if is_picture(name) else {"seq_len": T}
    params, config = model.load_hf(want.folder, **fields)
    config = train.Config(**dataclasses.asdict(config) | dict(batch=ROWS, dtype="float32", out=""))

    def mean(params):
        total, count = model.loss(params, want.batch, config)
        return total / count

    loss, gradient = jax.jit(jax.value_and_grad(mean))(params)
    return params, config, gradient, float(loss)


@pytest.mark.parametrize("name", of())
def test_gradients_are_those_of_torch(name):
    """What the logits do not show: padding or a pooler that is trained, weights that layers
    share."""
    _, config, gradient, _ = loaded(name)
    assert_gradient(config, gradient, reference(name).gradients)


@pytest.mark.parametrize("name", of(names=CASES))
def test_what_we_train_transformers_reads(name, tmp_path):
    """An array that is written as it was read and not as it is now, or that gets lost."""
    want = reference(name)
    params, config = model.load_hf(want.folder)
    params = jax.tree.map(lambda w: w + 0.1 * jnp.sin(jnp.arange(w.size)).reshape(w.shape), params)
    if "embed" in params:
        params["embed"] = params["embed"].at[V:].set(0)
    for path in ("head", "head_bias"):
        if path in params:
            params[path] = params[path].at[:, V:].set(0)
    ours = our_output(params, config, want.batch)
    assert np.linalg.norm(ours - want.logits) > 1e-2 * np.linalg.norm(ours)
    model.save_hf(tmp_path / "out", params, config)
    again, _ = model.load_hf(tmp_path / "out")
    for path, w in by_path(again).items():
        assert_close(w, by_path(params)[path], 1e-6, path)
    assert_close(output_of_folder(name, tmp_path / "out"), ours, 1e-5)


# -------------------------------------------------------------------------------------------
# On a mesh

MESHES = ["fsdp=2,tensor=2", "pipe=2,tensor=2", "pipe=4", "seq=2", "seq=4", "data=2,seq=2",
          "pipe=2,seq=2", "tensor=2,seq=2"]
SCHEDULES = [dict(schedule="1f1b", microbatches=2), dict(schedule="1f1b", microbatches=4),
             dict(schedule="interleaved", chunks=2, microbatches=2), dict(microbatches=4)]
PIPED = ["bert classes", "roberta", "albert alike", "vit", "beit"]


def assert_step(name, mesh, **changes):
    """The loss and torch's gradients on a mesh."""
    params, config, _, loss = loaded(name)
    config = dataclasses.replace(config, **changes)
    gradient, (total, count, *_) = sums_and_gradients(config, mesh, params, reference(name).batch)
    assert total / count == pytest.approx(loss, rel=2e-6)
    assert_gradient(config, jax.tree.map(lambda g: g / count, gradient), reference(name).gradients)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", of((), (), [*PIPED, "albert classes", "beit of 6 heads"]))
def test_a_step_on_a_mesh_is_that_of_one_device(name, mesh):
    """The two silent wrongs: a token that sees only those before it, on seq; and the class of a
    token that is not the row's first, or of a part of the patches, on seq and pipe."""
    if "pipe" in mesh and loaded(name)[1].layer_groups:
        with pytest.raises(ConfigError, match=r"--layer_groups 1 have several layers with the sa"):
            train.check_transformer(loaded(name)[1], mesh_of(mesh))
    elif "pipe=4" in mesh and name == "beit of 6 heads":
        with pytest.raises(ConfigError, match="--layers 2 does not divide into 4"):
            train.check_transformer(loaded(name)[1], mesh_of(mesh))
    else:
        assert_step(name, mesh)


@pytest.mark.parametrize("changes", SCHEDULES, ids=str)
@pytest.mark.parametrize("name", of((), (), PIPED))
def test_a_step_of_any_schedule_is_that_of_one_device(name, changes):
    """Labels of other rows than those of the microbatch, or a class that each stage counts."""
    assert_step(name, "pipe=2", **changes)
