"""Every family of published encoders compared with transformers, like decoders in test_families.py:
for text and for pictures, with each head."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import published
import train
from published import llama, transformer
from published.arrays_of_folder import Folder
from published.record import as_config
from tests.common import assert_same_on, check_network, full, net, peer, slow
from tests.helpers import mesh_of, run_of
from tests.published.test_families import (
    BY_HAND,
    COLUMNS,
    ROWS,
    ROWS_OF,
    Reference,
    T,
    V,
    as_theirs,
    assert_close,
    assert_defaults,
    assert_gradient,
    assert_not_supported,
    assert_step,
    cases,
    export,
    logits_of,
    read_by_theirs,
    ready,
    renamed,
    rewrite,
    saved,
    sends_no_more,
    their_gradients,
    weighted_loss,
)
from zigzag.core.errors import ConfigError
from zigzag.run import source

# -------------------------------------------------------------------------------------------
# Tiny models, of numbers that differ from all defaults and divide by little

LABELS = 5


def text(kind, head, heads=4, layers=2, **more):
    return f"{kind}{head}", dict(
        hidden_size=12 * heads, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=80, vocab_size=V, max_position_embeddings=64, layer_norm_eps=1e-3,
        num_labels=LABELS) | more


def picture(kind, head, heads=4, layers=2, **more):
    """The configuration of an encoder of pictures: 4 x 4 patches with some pixels left over, or
    5 x 5; with the class token, 17 or 26 tokens."""
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
    "ernie": text("Ernie", "ForMaskedLM", use_task_id=True, task_type_vocab_size=4),
    "ernie classes": text("Ernie", CLASSES, 3, use_task_id=True, type_vocab_size=3),
    "ernie bare": text("Ernie", "Model", 3),
    "roberta": text("Roberta", "ForMaskedLM", 6, layers=4, pad_token_id=1),
    "roberta classes": text("Roberta", CLASSES, pad_token_id=3, type_vocab_size=1,
                            hidden_act="relu"),
    "roberta bare": text("Roberta", "Model", 3),
    "albert": text("Albert", "ForMaskedLM", 6, **ALBERT),
    "albert classes": text("Albert", CLASSES, **ALBERT | dict(num_hidden_groups=1)),
    "albert equal": text("Albert", CLASSES, **ALBERT | dict(num_hidden_groups=4)),
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
SLOW = ("bert classes", "ernie", "roberta", "roberta classes", "albert", "albert classes", "beit",
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
    """A batch: rows of different lengths with padding on the right, in which some tokens have
    targets; or pictures."""
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
    if fields.get("use_task_id"):
        batch["task_types"] = rng.integers(0, config_of(name).task_type_vocab_size, (rows, T)
                                           ).astype(np.int32)
    if kind.endswith("MaskedLM"):
        asked = mask & (rng.random((rows, T)) < 0.4)
        batch |= {"targets": rng.integers(0, V, (rows, T)).astype(np.int32),
                  "weights": asked.astype(np.float32)}
    return batch


def inputs(batch):
    """The arrays of a batch that forward takes."""
    given = {k: batch[k] for k in ("mask", "token_types", "task_types") if k in batch}
    return batch.get("tokens", batch.get("source")), given


def their_output(theirs, batch):
    names = {"tokens": "input_ids", "mask": "attention_mask", "token_types": "token_type_ids",
             "task_types": "task_type_ids", "source": "pixel_values"}
    out = theirs(**as_theirs(batch, names))
    return out["logits"] if "logits" in out else out.last_hidden_state


def where_tokens_are(output, batch):
    """The output with zeros for tokens of padding, which nobody defines."""
    return output * batch["mask"][..., None] if "mask" in batch and output.ndim == 3 else output


def their_loss(logits, batch):
    torch = peer("torch")
    if "labels" in batch:
        return torch.nn.functional.cross_entropy(logits, torch.tensor(batch["labels"]).long())
    return weighted_loss(logits, batch)


@functools.cache
def reference(name):
    """A saved transformers model, its output, and its gradients if it has a head."""
    torch, transformers = peer("torch"), peer("transformers")
    torch.manual_seed(1)
    theirs = getattr(transformers, CASES[name][0])(config_of(name))
    folder, batch = saved(theirs), new_batch(name)
    for module in theirs.modules():     # (of padding torch learns nothing)
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None
    output, gradients = their_output(theirs, batch), {}
    if name in TRAINED:
        their_loss(output, batch).backward()
        gradients = {n: g for n, g in their_gradients(theirs).items()
                     if not n.endswith("mask_token")}
        if not theirs.config.tie_word_embeddings:   # (of the bias's two names, the one of 5)
            gradients = {n.replace("predictions.bias", "predictions.decoder.bias"): w
                         for n, w in gradients.items()}
    return Reference(folder, batch, where_tokens_are(output.detach().numpy(), batch), gradients)


def our_output(params, config, batch, mesh=None):
    tokens, given = inputs(batch)
    return where_tokens_are(logits_of(params, config, tokens, mesh, **given), batch)


def output_of_folder(name, folder):
    """The output of the transformers model that reads a folder of ours, which must lack nothing."""
    theirs = read_by_theirs(getattr(peer("transformers"), CASES[name][0]), folder)
    with peer("torch").no_grad():
        batch = reference(name).batch
        return where_tokens_are(their_output(theirs, batch).numpy(), batch)


# -------------------------------------------------------------------------------------------
# The same numbers

@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("name", of(names=CASES))
def test_logits_are_those_of_transformers(name, shards):
    """A convention that is not the published one; padding that tokens see; a class taken from
    another token than the first, or from a part of the time; heads that the shards do not
    divide."""
    want, mesh = reference(name), mesh_of(f"tensor={shards}")
    params, config = published.load_hf(want.folder, mesh)
    assert_close(our_output(params, config, want.batch, mesh), want.logits, 1e-5)


@functools.cache
def loaded(name):
    return ready(reference(name))


@pytest.mark.parametrize("name", of())
def test_gradients_are_those_of_torch(name):
    """Faults that the logits do not show: padding or a pooler that is trained, weights that layers
    share."""
    _, config, gradient, _ = loaded(name)
    assert_gradient(config, gradient, reference(name).gradients)


@pytest.mark.parametrize("name", of(names=CASES))
def test_what_we_train_transformers_reads(name, tmp_path):
    """An array that is written as it was read, without its training, or that is lost."""
    want = reference(name)
    params, config = published.load_hf(want.folder)
    params = jax.tree.map(lambda w: w + 0.1 * jnp.sin(jnp.arange(w.size)).reshape(w.shape), params)
    if "embed" in params:
        params["embed"] = params["embed"].at[V:].set(0)
    for path in ("head", "head_bias"):
        if path in params:
            params[path] = params[path].at[:, V:].set(0)
    ours = our_output(params, config, want.batch)
    export(tmp_path / "out", params, config, ours, want.logits)
    assert_close(output_of_folder(name, tmp_path / "out"), ours, 1e-5)


# -------------------------------------------------------------------------------------------
# On a mesh

MESHES = ["fsdp=2,tensor=2", "pipe=2,tensor=2", "pipe=4", "seq=2", "seq=4", "data=2,seq=2",
          "pipe=2,seq=2", "tensor=2,seq=2"]
SCHEDULES = [dict(schedule="1f1b", microbatches=2), dict(schedule="1f1b", microbatches=4),
             dict(schedule="interleaved", chunks=2, microbatches=2), dict(microbatches=4)]
PIPED = ["bert classes", "roberta", "albert equal", "vit", "beit"]


def assert_same_step(name, mesh, **changes):
    """The loss and torch's gradients on a mesh."""
    count = assert_step(loaded(name), reference(name), mesh, **changes)
    assert count == (reference(name).batch["weights"].sum() if "Masked" in CASES[name][0] else ROWS)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", of((), ("vit",), [*PIPED, "albert classes", "beit of 6 heads"]))
def test_a_step_on_a_mesh_is_that_of_one_device(name, mesh):
    """Two silent faults: on seq, a token that sees only earlier ones; on seq and pipe, a class
    taken from another token than the row's first, or from a part of the patches."""
    if "pipe" in mesh and loaded(name)[1].network.layer_groups:
        with pytest.raises(ConfigError, match=r"--layer_groups 1: several layers share weights"):
            check_network(loaded(name)[1], mesh_of(mesh))
    elif "pipe=4" in mesh and name == "beit of 6 heads":
        with pytest.raises(ConfigError, match="--layers 2 does not divide into 4"):
            check_network(loaded(name)[1], mesh_of(mesh))
    else:
        assert_same_step(name, mesh)


@pytest.mark.parametrize("mesh", [slow("data=2,tensor=2"), slow("seq=2"), full("pipe=2"),
                                  full("pipe=2,seq=2"), full("tensor=2,seq=2")])
def test_task_types_on_a_mesh(mesh):
    """Task types of other rows or tokens than this device's, or a table whose gradient is not
    summed."""
    assert_same_step("ernie", mesh)


@pytest.mark.parametrize("changes", SCHEDULES, ids=str)
@pytest.mark.parametrize("name", of((), (), PIPED))
def test_a_step_of_any_schedule_is_that_of_one_device(name, changes):
    """Labels of other rows than the microbatch's, or a class that each stage counts."""
    assert_same_step(name, "pipe=2", **changes)


SMALL = dict(layers=4, causal=False, norm="layer", gated=False, biases="qkv,out,mlp,head,embed",
             positions="learned", activation="gelu", embed_scale=1.0)
CLASSES_OF = dict(head="classes", labels=LABELS, pool_dense=True)
EXACT = {
    "masked": dict(SMALL, head="masked", norm_place="post", embed_norm=True, tied=True),
    "text": dict(SMALL, **CLASSES_OF, norm_place="post", embed_norm=True, token_types=2),
    "shared": dict(SMALL, **CLASSES_OF, layer_groups=2, embed_dim=20, norm_place="post",
                   embed_norm=True),
    "first": dict(SMALL, **CLASSES_OF, stem="patches", image_size=14, patch_size=3, channels=2),
    "mean": dict(SMALL, head="classes", labels=LABELS, pool="mean", stem="patches", image_size=15,
                 patch_size=3, channels=2, layer_scale=True, relative="grid"),
}


@pytest.mark.parametrize("name, mesh", [
    (name, mesh) if (name, mesh) == ("mean", "seq=4")
    else (slow if name == "mean" and mesh != "pipe=2" else full)(name, mesh)
    for name in EXACT for mesh in ["pipe=2", *MESHES] if name != "shared" or "pipe" not in mesh])
def test_an_encoder_on_a_mesh_is_the_plain_formula(name, mesh):
    """A first token that is counted once for each device, or a mean over only a part. (In
    float64.)"""
    assert_same_on(mesh, **EXACT[name])


@pytest.mark.parametrize("changes", SCHEDULES, ids=str)
@pytest.mark.parametrize("name", ["masked", "text", "first", "mean"])
@pytest.mark.full
def test_an_encoder_of_any_schedule_is_the_plain_formula(name, changes):
    """The same faults, with stages that take rows in another order."""
    assert_same_on("pipe=2", **EXACT[name], **changes)


@pytest.mark.full
@pytest.mark.parametrize("changes", SCHEDULES[::2], ids=str)
@pytest.mark.parametrize("name", ["text", full("mean")])
@pytest.mark.slow
def test_a_class_is_counted_once_on_pipe_and_seq(name, changes):
    """A sum and a count that are both twice as large on pipe=2,seq=2: right after the division, and
    wrong when experts add their terms."""
    assert_same_on("pipe=2,seq=2", **EXACT[name], **changes)


# -------------------------------------------------------------------------------------------
# What is sent

MEGATRON = [*BY_HAND, (r"\.relative$", COLUMNS), ("^relative$", ROWS_OF)]


@pytest.mark.parametrize("shards", [2, 4])
@pytest.mark.parametrize("name", of((), ("vit",)))
def test_no_encoder_sends_more_than_by_hand(name, shards):
    """A part of a family that the rule prices wrongly: more collectives, or more bytes in them."""
    specs = net.weight_specs(loaded(name)[1], mesh_of(f"tensor={shards}"))
    sends_no_more(loaded(name), reference(name), MEGATRON, shards, specs)


# -------------------------------------------------------------------------------------------
# Folders, and config.json

def record_of(name, **changes):
    config = config_of(name)
    config.architectures = [CASES[name][0]]
    return json.loads(config.to_json_string(use_diff=False)) | changes


@pytest.mark.parametrize("name", CASES)
def test_what_a_config_leaves_out_is_its_default(name):
    """Each option of a tiny model, given or left out where it is the class's default."""
    config = config_of(name)
    config.architectures = [CASES[name][0]]
    assert_defaults(config)


@pytest.mark.parametrize("kind", ["Bert", slow("Albert")])
def test_a_model_for_pretraining_is_a_masked_language_model(kind, tmp_path):
    """A refusal of BERT's own folder, because of its pooler, its next-sentence head, its buffers,
    or the old names of scales and biases of norms."""
    torch, transformers = peer("torch"), peer("transformers")
    name = kind.lower()
    theirs = getattr(transformers, f"{kind}ForPreTraining")(config_of(name)).eval()
    theirs.save_pretrained(tmp_path / "in")

    def older(arrays):
        arrays = renamed(arrays, {"LayerNorm.weight": "LayerNorm.gamma",
                                  "LayerNorm.bias": "LayerNorm.beta"})
        return arrays | {f"{name}.embeddings.position_ids": np.arange(64)[None]}

    rewrite(tmp_path / "in", older, json.loads((tmp_path / "in/config.json").read_text()))
    batch = new_batch(name)
    params, config = published.load_hf(tmp_path / "in")
    with torch.no_grad():
        want = where_tokens_are(theirs(*(torch.tensor(batch[k]).long() for k in (
            "tokens", "mask", "token_types")))[0].numpy(), batch)
    assert_close(our_output(params, config, batch), want, 1e-5)
    published.save_hf(tmp_path / "out", params, config)
    again = read_by_theirs(transformers.AutoModelForMaskedLM, tmp_path / "out")
    assert again.config.architectures == [f"{kind}ForMaskedLM"]


@pytest.mark.parametrize("name", [
    "bert bare", slow("roberta bare"), slow("albert bare"), slow("vit bare")])
def test_a_model_may_have_no_pooler(name, tmp_path):
    """A refusal of a model without a pooler, or with one, which no config.json says."""
    transformers = peer("transformers")
    theirs = getattr(transformers, CASES[name][0])(config_of(name), add_pooling_layer=False)
    theirs.save_pretrained(tmp_path / "in")
    params, config = published.load_hf(tmp_path / "in")
    assert "pool" not in params and "pool" in published.load_hf(reference(name).folder)[0]
    published.save_hf(tmp_path / "out", params, config)
    written = Folder(tmp_path / "out").arrays
    assert len(written) == len(theirs.state_dict()) and not any("pool" in n for n in written)


REFUSED = [
    ("ernie", dict(position_embedding_type="relative_key")), ("ernie", dict(is_decoder=True)),
    ("bert", dict(position_embedding_type="relative_key")), ("bert", dict(is_decoder=True)),
    ("roberta", dict(add_cross_attention=True)), ("roberta", dict(hidden_act="relu")),
    ("bert", dict(architectures=["BertForTokenClassification"])),
    ("bert", dict(architectures=None)),
    ("bert classes", dict(problem_type="regression")),
    ("vit", dict(problem_type="multi_label_classification")), ("albert", dict(inner_group_num=2)),
    ("albert", dict(embedding_size=72)), ("vit bare", dict(pooler_act="relu")),
    ("vit bare", dict(pooler_output_size=7)),
    ("vit", dict(architectures=["ViTForMaskedImageModeling"])),
    ("beit", dict(architectures=["BeitForMaskedImageModeling"])),
    ("beit", dict(use_shared_relative_position_bias=True))]


@pytest.mark.parametrize("name, changes", REFUSED, ids=str)
def test_options_that_we_do_not_compute_are_refused(name, changes):
    """An option that changes no shape and that we do not compute: the model would load, and write
    nonsense."""
    assert_not_supported(record_of(name), changes)


HOSTILE = [
    ("ernie", dict(task_type_vocab_size=0)), ("ernie", dict(use_task_id="yes")),
    ("bert classes", dict(id2label=["a"], num_labels="two")), ("vit", dict(id2label={})),
    ("vit", dict(id2label=None, num_labels=-1)), ("bert", dict(architectures=3)),
    ("bert", dict(architectures=[["BertModel"]])), ("bert", dict(type_vocab_size=0)),
    ("bert", dict(layer_norm_eps="small")), ("bert", dict(num_hidden_layers=10**9)),
    ("roberta", dict(pad_token_id=None)), ("roberta", dict(pad_token_id=-1)),
    ("roberta", dict(pad_token_id=63)), ("roberta", dict(pad_token_id=0.5)),
    ("albert", dict(num_hidden_groups=3)), ("albert", dict(num_hidden_groups=0)),
    ("albert", dict(embedding_size=-4)), ("vit", dict(image_size=[14, 14])),
    ("vit", dict(patch_size=15)), ("vit", dict(patch_size=0)), ("vit", dict(num_channels=True)),
    ("vit", dict(hidden_size=50)), ("beit", dict(layer_scale_init_value=None)),
    ("beit", dict(layer_scale_init_value="much")), ("beit", dict(intermediate_size=0))]


@pytest.mark.parametrize("name, changes", HOSTILE, ids=str)
def test_a_value_that_none_can_have_is_one_line(name, changes):
    """A traceback, or memory for a list of billions of layers."""
    with pytest.raises(ConfigError) as e:
        as_config(transformer.Config, "config.json", llama.fields_of(record_of(name, **changes)))
    assert "\n" not in str(e.value) and len(str(e.value)) < 400


@pytest.mark.parametrize("labels", [3, 2])
def test_labels_are_counted_as_transformers_does(labels):
    """A wrong number of labels: a config.json with two labels names none."""
    _, fields = CASES["vit"]
    config = peer("transformers").ViTConfig(**fields | {"num_labels": labels})
    record = json.loads(config.to_json_string()) | {"architectures": ["ViTForImageClassification"]}
    assert ("id2label" in record) == (labels != 2)
    assert llama.fields_of(record)["labels"] == labels


# -------------------------------------------------------------------------------------------
# Encoders of our own

def test_layers_that_share_weights_count_each_time():
    """Weights counted once, although each layer multiplies by them: a sixth of ALBERT's work."""
    def flops(groups):
        return net.flops(transformer.Config(causal=False, head="masked", layers=12,
                                            layer_groups=groups), 1000)

    assert flops(1) == flops(4) == flops(0)


@pytest.mark.parametrize("fields, words", [
    (dict(head="classes", labels=3, pool="mean"), "--pool mean needs --stem patches"),
    (dict(head="classes", labels=3, experts=4), "works without --experts"),
    (dict(stem="frames", source_len=8), "--stem frames: .* --head classes"),
    (dict(stem="patches", head="none", image_size=8, patch_size=9), "--patch_size 9: .* 8"),
    (dict(causal=True, layer_groups=1), "--layer_groups 1: must divide"),
    (dict(layer_groups=1, experts=4), "--layer_groups 1: .* without --experts"),
], ids=str)
def test_an_encoder_that_none_can_be_is_refused(fields, words):
    """Tracebacks in the middle of a step, or NaN: the mean of no patches, experts that look for
    weights of tokens, a loss that looks for targets; a decoder whose cache has a layer for each
    group. Shared layers whose router's loss was lost."""
    with pytest.raises(ConfigError, match=words):
        transformer.Config(**{"causal": False, **fields})


@pytest.mark.parametrize("fields", [
    dict(causal=False), dict(encoder_layers=1), dict(relative="buckets"), dict(token_types=2),
    dict(head_scale=0.5), dict(causal=False, stem="patches", head="none", image_size=32),
    dict(causal=False, head="classes", labels=3), dict(pad_id=1)], ids=str)
def test_no_encoder_is_saved_as_a_llama(tmp_path, fields):
    """A folder from which transformers makes another model, with other logits."""
    config = transformer.Config(layers=1, d_model=16, heads=2, vocab_size=32, **fields)
    params = net.weight_shapes(config)
    with pytest.raises(ConfigError, match="but the config.json to write says"):
        published.save_hf(tmp_path / "out", params, config)


def test_positions_that_are_given_are_taken():
    """Given positions that RoBERTa replaces by its own count."""
    config = transformer.Config(layers=1, d_model=16, heads=2, vocab_size=32, seq_len=4,
                                causal=False,
                          positions="learned", pad_id=1, position_offset=2)
    params, tokens = net.init(config, jax.random.key(0)), np.array([[5, 6, 1, 7]])
    own = net.forward(params, tokens, config)
    same = net.forward(params, tokens, config, positions=np.array([[0, 1, -1, 2]]))
    np.testing.assert_array_equal(own, same)
    assert np.abs(own - net.forward(params, tokens, config,
                                      positions=np.array([[2, 2, 2, 2]]))).max() > 1e-3


def test_a_picture_of_another_size_is_refused():
    """A larger picture that is silently cut."""
    config = transformer.Config(layers=1, d_model=16, heads=2, causal=False, stem="patches",
                                head="none",
                          image_size=8, patch_size=4)
    with pytest.raises(ConfigError, match=r"\[1, 3, 12, 12\]; this model reads \[1, 3, 8, 8\]"):
        net.forward(net.init(config, jax.random.key(0)), np.ones((1, 3, 12, 12)), config)


def test_an_encoder_of_tokens_reads_no_running_text():
    """An encoder that trains on running text to a loss of 0, because a token sees the next one."""
    assert source.kind_of(train.Config()) == "text"
    assert source.kind_of(run_of(causal=False)) == "arrays"
