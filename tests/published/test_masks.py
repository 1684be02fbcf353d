"""SAM whole compared with transformers: for points, boxes and rough masks, a tiny model with random
weights gives the same masks and scores, the same gradients on any mesh, and an export that
transformers reads."""

import functools
import json

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import published
import train
from published import folders, sam, sam_masks
from published.llama import fields_of, record_of
from tests.common import check_network, full, mean_loss, net, peer, slow, sums_and_gradients
from tests.helpers import losses_of, mesh_of, rows_of, run_of
from tests.parallel.test_rule import by_hand, sent_by
from tests.published.test_families import (
    ROWS,
    Reference,
    assert_close,
    assert_gradient,
    assert_step,
    export,
    read_by_theirs,
    ready,
    saved,
    their_gradients,
)
from tests.readme import block
from zigzag.core.errors import ConfigError
from zigzag.core.flags import change
from zigzag.core.mesh import by_path

# -------------------------------------------------------------------------------------------
# Tiny models. In the first, the parts count patches of another size, and 36 patches divide by 4; in
# the second, there are 25, three heads, and no layer in the middle of the MLP of the scores.

PROMPTS, POINTS = 3, 2
CASES = {
    "masks": dict(
        vision_config=dict(
            hidden_size=48, num_hidden_layers=3, num_attention_heads=4, image_size=97,
            patch_size=16, window_size=4, global_attn_indexes=[1], output_channels=32, mlp_dim=80,
            layer_norm_eps=1e-3, num_pos_feats=16),
        prompt_encoder_config=dict(
            hidden_size=32, image_size=76, patch_size=12, mask_input_channels=8,
            layer_norm_eps=1e-2),
        mask_decoder_config=dict(
            hidden_size=32, mlp_dim=40, num_attention_heads=4, iou_head_hidden_dim=24,
            iou_head_depth=4, num_multimask_outputs=2, layer_norm_eps=1e-3),
        initializer_range=0.2),
    "masks plain": dict(
        vision_config=dict(
            hidden_size=36, num_hidden_layers=1, num_attention_heads=3, image_size=40,
            patch_size=8, window_size=3, global_attn_indexes=[], output_channels=24, mlp_dim=48,
            num_channels=1, use_abs_pos=False, use_rel_pos=False, num_pos_feats=12),
        prompt_encoder_config=dict(hidden_size=24, image_size=40, patch_size=8,
                                   mask_input_channels=12, hidden_act="relu"),
        mask_decoder_config=dict(
            hidden_size=24, mlp_dim=40, num_attention_heads=3, iou_head_hidden_dim=20,
            iou_head_depth=2, attention_downsample_rate=1, num_hidden_layers=3, hidden_act="gelu"),
        initializer_range=0.2)}
each = pytest.mark.parametrize("name", ["masks", full("masks plain")])
WAVES = "shared_image_embedding.positional_embedding"


def theirs_of(name):
    transformers = peer("transformers")
    peer("torch").manual_seed(1)
    return with_slow_waves(transformers.SamModel._from_config(
        transformers.SamConfig(**CASES[name]), attn_implementation="eager"))


def with_slow_waves(theirs):
    """A model of transformers with frequencies of size 1, as published ones have. New models have
    half of the width, and then angles of hundreds, whose sines are mostly rounding."""
    waves = theirs.shared_image_embedding.positional_embedding.data
    waves /= waves.abs().mean()
    theirs.prompt_encoder.shared_embedding.positional_embedding.data = waves
    return theirs


def batch_for(vision, prompts=PROMPTS, points=POINTS, rows=ROWS):
    """Images with prompts of every kind: points inside, outside, nowhere and missing, of which some
    lie beyond the image, boxes and rough masks."""
    rng = np.random.default_rng(0)
    size, side = vision["image_size"], 4 * (vision["image_size"] // vision["patch_size"])
    shape = rows, prompts, points
    batch = {
        "source": rng.normal(size=(rows, vision.get("num_channels", 3), size, size)),
        "points": rng.uniform(-5, size + 5, (*shape, 2)),
        "labels": rng.permutation(np.resize([1, 0, -1, -10], shape).ravel()).reshape(shape),
        "boxes": rng.uniform(0, size, (rows, prompts, 4)),
        "masks": 3 * rng.normal(size=(rows, side, side)),
        "targets": rng.integers(0, 2, (rows, prompts, side, side))}
    kinds = {"labels": np.int32}
    return {k: a.astype(kinds.get(k, np.float32)) for k, a in batch.items()}


NAMES = dict(source="pixel_values", points="input_points", labels="input_labels",
             boxes="input_boxes", masks="input_masks")


def their_outputs(theirs, batch, **more):
    """(masks, scores) of transformers."""
    torch = peer("torch")
    given = {NAMES[name]: torch.tensor(a) for name, a in batch.items() if name in NAMES}
    if "masks" in batch:
        given["input_masks"] = given["input_masks"][:, None]
    out = theirs(**given, **more)
    return out.pred_masks, out.iou_scores


def all_of_theirs(theirs, batch):
    """(all masks, all scores): that of a clear prompt, then the others."""
    torch = peer("torch")
    outputs = (their_outputs(theirs, batch, multimask_output=several) for several in (False, True))
    return [torch.cat(pair, 2) for pair in zip(*outputs)]


def their_loss(masks, scores, targets):
    """The mean loss in torch: cross-entropy and dice of mask 0 and of the best of the others, and
    the squared errors of the guessed overlap."""
    torch = peer("torch")
    targets = targets[:, :, None].expand(masks.shape)
    each = torch.nn.functional.binary_cross_entropy_with_logits(
        masks, targets, reduction="none").mean((-2, -1))
    inside = torch.sigmoid(masks)
    each = each + 1 - (2 * (inside * targets).sum((-2, -1)) + 1) / (
        inside.sum((-2, -1)) + targets.sum((-2, -1)) + 1)
    drawn, there = masks > 0, targets > 0.5
    overlap = (drawn & there).sum((-2, -1)) / (drawn | there).sum((-2, -1)).clamp(min=1)
    return (each[..., 0] + each[..., 1:].amin(-1) + ((scores - overlap)**2).sum(-1)).mean()


@functools.cache
def reference(name):
    """A saved transformers model, its masks, and the gradients of the mean loss."""
    torch, theirs = peer("torch"), theirs_of(name)
    folder, batch = saved(theirs), batch_for(CASES[name]["vision_config"])
    masks, scores = all_of_theirs(theirs, batch)
    loss = their_loss(masks, scores, torch.tensor(batch["targets"]))
    loss.backward()
    batch["seeds"] = np.arange(ROWS, dtype=np.uint32)
    gradients = {WAVES: theirs.shared_image_embedding.positional_embedding.numpy() * 0}
    return Reference(folder, batch, masks.detach().numpy(),
                     their_gradients(theirs) | gradients, loss.item())


@functools.cache
def theirs_at(name):
    """The model that reads the folder of `reference`."""
    return read_by_theirs(peer("transformers").SamModel, reference(name).folder,
                          attn_implementation="eager")


@functools.cache
def loaded(name):
    return ready(reference(name), fsdp_min=64, prompts=PROMPTS, points=POINTS)


def outputs(params, config, batch, mesh=None):
    """Our (masks, scores)."""
    def run(params, batch):
        return sam_masks.segment(params, batch, config)

    batch = {k: a for k, a in batch.items() if k in NAMES}
    if mesh is not None:
        run = jax.shard_map(run, mesh=mesh, out_specs=P(), in_specs=(
            jax.tree.map(lambda w: w.sharding.spec, params), P()))
    return jax.device_get(jax.jit(run)(params, batch))


def assert_equal(got, want):
    """Assert that (masks, scores) are those of transformers, and that they depend on the prompt."""
    for ours, theirs in zip(got, want):
        theirs = theirs.detach().numpy()
        assert_close(ours, theirs, 1e-5)
        if theirs.shape[1] > 1:
            assert np.linalg.norm(theirs[:, 0] - theirs[:, 1]) > 1e-3 * np.linalg.norm(theirs)


# -------------------------------------------------------------------------------------------
# The same numbers

GIVEN = [("points", "labels"), ("boxes",), ("points", "labels", "boxes", "masks"),
         full(("points", "labels", "boxes")), full(("points",)), full(("masks",)), full(()),
         full(("boxes", "masks")), full(("points", "labels", "masks"))]


@each
@pytest.mark.parametrize("given", GIVEN, ids="+".join)
def test_masks_and_scores_are_those_of_transformers(name, given):
    """A point in another pixel or with its row first, a corner of a box that is another kind of
    point, a place without a point that is forgotten or doubled, a rough mask that is turned."""
    params, config = published.load_hf(reference(name).folder)
    batch = {k: a for k, a in reference(name).batch.items() if k in ("source", *given)}
    with peer("torch").no_grad():
        assert_equal(outputs(params, config, batch), all_of_theirs(theirs_at(name), batch))


@each
@pytest.mark.parametrize("shards", [2, slow(4)])
def test_masks_on_a_mesh_are_those_of_transformers(name, shards):
    """A part of the tokens or of the image's rows that a device takes for the whole; heads or
    tokens that the shards do not divide."""
    mesh, batch = mesh_of(f"tensor={shards}"), reference(name).batch
    params, config = published.load_hf(reference(name).folder, mesh)
    with peer("torch").no_grad():
        assert_equal(outputs(params, config, batch, mesh), all_of_theirs(theirs_at(name), batch))


@pytest.mark.slow
def test_the_last_norm_has_the_epsilon_of_its_class(tmp_path):
    """The epsilon of config.json, or another, where the last norm's input is small."""
    torch, batch = peer("torch"), reference("masks").batch
    theirs = peer("transformers").SamModel.from_pretrained(
        reference("masks").folder, attn_implementation="eager").eval()
    layers = theirs.mask_decoder.transformer
    with torch.no_grad():
        for module in (layers.layers[-1].layer_norm3, layers.final_attn_token_to_image.out_proj):
            module.weight *= 3e-3
            module.bias *= 3e-3
        theirs.save_pretrained(tmp_path)
        params, config = published.load_hf(tmp_path)
        for ours, want in zip(outputs(params, config, batch), all_of_theirs(theirs, batch)):
            assert_close(ours, want.numpy(), 1e-5)


@pytest.mark.parametrize("prompt", [
    dict(points=[[[50.0, 20.0]], [[9.0, 80.0]]], labels=[[1], [0]]),
    slow(dict(points=[[[50, 20], [0, 0]]], labels=[[1, -10]], boxes=[[10, 10, 90, 60]])),
    slow(dict(points=[[[50.0, 20.0]]])), slow({})], ids=str)
def test_predict_answers_for_one_picture(prompt):
    """Answers of another prompt or for the whole batch; mask 0 among the several, or the first of
    several for mask 0; labels that are not those of points inside if none are given."""
    torch, name = peer("torch"), "masks"
    params, config = published.load_hf(reference(name).folder)
    picture = reference(name).batch["source"][1]
    given = {k: torch.tensor([a], dtype=torch.float32) for k, a in prompt.items()}
    for several in (True, False):
        got = sam_masks.predict(params, picture, config, **prompt, several=several)
        with torch.no_grad():
            want = theirs_at(name)(
                torch.tensor(picture)[None], multimask_output=several,
                **{NAMES[k]: a for k, a in given.items()})
        for ours, theirs in zip(got, (want.pred_masks, want.iou_scores)):
            assert_close(np.asarray(ours), theirs[0].numpy(), 1e-5)
        rough = sam_masks.predict(params, picture, config, **prompt, mask=got[0][0, 0])
        assert np.linalg.norm(rough[1]) != pytest.approx(np.linalg.norm(got[1]), rel=1e-4)


@each
def test_gradients_are_those_of_torch(name):
    """Faults that masks do not show: in a vector that is used twice, in the choice of the best
    mask, in the frequencies (which nobody trains), or in the loss itself."""
    _, config, gradient, loss = loaded(name)
    assert loss == pytest.approx(reference(name).loss, rel=2e-6)
    assert_gradient(config, gradient, reference(name).gradients)


@each
def test_what_we_train_transformers_reads(name, tmp_path):
    """An array that is written as it was read, without its axis of 1, or with its axes swapped; an
    image encoder or a whole model that is written as the other."""
    params, config, gradient, _ = loaded(name)
    config, batch, transformers = config.network, reference(name).batch, peer("transformers")
    params = jax.tree.map(lambda w, g: w - 0.5 * g / max(np.linalg.norm(g), 1e-9), params, gradient)
    ours = outputs(params, config, batch)
    export(tmp_path / "out", params, config, ours[0], reference(name).logits)
    theirs = read_by_theirs(transformers.SamModel, tmp_path / "out", attn_implementation="eager")
    with peer("torch").no_grad():
        assert_equal(ours, all_of_theirs(theirs, batch))
    vision = sam_masks.configs(record_of(config), config)[0]
    published.save_hf(tmp_path / "encoder", params["vision"], vision)
    encoder = read_by_theirs(transformers.SamVisionModel, tmp_path / "encoder")
    assert published.network_of_folder(tmp_path / "encoder") is sam.NETWORK
    with peer("torch").no_grad():
        want = encoder(peer("torch").tensor(batch["source"])).last_hidden_state.numpy()
    got = jax.jit(functools.partial(sam.forward, config=vision))(params["vision"], batch["source"])
    assert_close(np.asarray(got), want, 1e-5)


def test_what_is_loaded_is_exported_to_the_same_bits(tmp_path):
    """Arrays that reading or writing rounds, or that are written twice."""
    package, want = peer("safetensors.numpy"), reference("masks")
    params, config = published.load_hf(want.folder)
    published.save_hf(tmp_path / "out", params, config)
    mine, theirs = (package.load_file(folder / "model.safetensors")
                    for folder in (tmp_path / "out", want.folder))
    assert mine.keys() == theirs.keys()
    for name, array in theirs.items():
        np.testing.assert_array_equal(mine[name], array, err_msg=name)
    copied = "prompt_encoder.shared_embedding.positional_embedding"     # as older folders have it
    package.save_file({**theirs, copied: theirs[WAVES]}, tmp_path / "out/model.safetensors")
    published.load_hf(tmp_path / "out")
    package.save_file({**theirs, copied: theirs[WAVES] + 1}, tmp_path / "out/model.safetensors")
    with pytest.raises(ConfigError, match="positional_embedding differ"):
        published.load_hf(tmp_path / "out")


# -------------------------------------------------------------------------------------------
# Training

@pytest.mark.parametrize("name, mesh", [
    ("masks", "data=2,tensor=2"), slow("masks", "fsdp=2,tensor=2"), slow("masks", "tensor=4"),
    full("masks plain", "fsdp=2,tensor=2"), full("masks plain", "data=2,tensor=2"),
    full("masks", "expert=2,fsdp=2"), full("masks plain", "data=4")])
def test_a_step_on_a_mesh_is_that_of_one_device(name, mesh):
    """Tokens or rows of the image of only one device, a gradient that is not summed, a layer's
    weights that fsdp does not gather. (The loss, and torch's gradients.)"""
    count = assert_step(loaded(name), reference(name), mesh)
    assert count == ROWS * PROMPTS


@pytest.mark.full
def test_in_bfloat16():
    """A product that works only in float32; places whose frequencies are rounded."""
    params, config, _, loss = loaded("masks")
    config, batch = change(config, dtype="bfloat16"), reference("masks").batch
    _, (total, count, *_) = sums_and_gradients(config, "tensor=2", params, batch)
    assert total / count == pytest.approx(loss, rel=0.05)


# Megatron's table: heads and hidden out of the stream are columns, into it rows.
BY_HAND = [(r"\.(cross_|back_)?w([qkv]|_up)(_bias)?$", P(None, None, "tensor")),
           (r"\.(cross_|back_)?(wo|w_down)$", P(None, "tensor"))]


@pytest.mark.parametrize("name, shards", [("masks", 2), full("masks", 4), full("masks plain", 2)])
def test_no_more_is_sent_than_by_hand(name, shards):
    """A part of the decoder that the rule prices wrongly: more collectives or bytes than by hand; a
    weight that is split by hand and not by us. (The image encoder's is in test_pictures.py.)"""
    params, config, *_ = loaded(name)
    batch = {k: v for k, v in reference(name).batch.items() if k != "seeds"}
    params, mesh = jax.device_get(params), mesh_of(f"tensor={shards}")
    ours, hand = net.weight_specs(config, mesh), by_hand(params, BY_HAND, shards)
    split = [{path for path, spec in by_path(specs).items() if "tensor" in spec}
             for specs in (ours, hand)]
    assert split[0] == split[1] and len(split[0]) > (20 if name == "masks" else 5)
    mean = mean_loss(net.loss, config)
    for fn in (mean, jax.value_and_grad(mean)):
        sent, most = (sent_by(fn, params, (batch,), specs, mesh)[1] for specs in (ours, hand))
        assert sent[0] <= most[0] and sent[1] <= most[1], (sent, most)


@pytest.mark.full
def test_a_run_of_arrays_learns_and_is_exported(tmp_path):
    """A flag, an array or an export that the command line loses between data and folder: the same
    losses on a mesh, and frequencies that neither an update nor weight decay changes."""
    batch = batch_for(CASES["masks"]["vision_config"], rows=20)
    np.savez(tmp_path / "masks.npz", **batch)
    words = ["--model", reference("masks").folder, "--data", tmp_path / "masks.npz", "--prompts",
             PROMPTS, "--points", POINTS, "--batch", 8, "--steps", 3, "--warmup", 1, "--dtype",
             "float32", "--lr", 0.003]
    losses = []
    for n, mesh in enumerate(("data=8", "data=2,fsdp=2,tensor=2")):
        train.main([str(word) for word in (
            *words, "--out", tmp_path / f"out{n}", "--mesh", mesh)])
        losses.append(losses_of(rows_of(tmp_path / f"out{n}")))
    assert losses[0][0] == pytest.approx(losses[1][0], rel=2e-6) and len({*losses[0]}) == 3
    # (AdamW's first update enlarges the rounding in gradients that are almost 0.)
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    folders.export(["--run", str(tmp_path / "out1"), "--export", str(tmp_path / "hf")])
    theirs = read_by_theirs(peer("transformers").SamModel, tmp_path / "hf")
    before = theirs_at("masks").state_dict()
    changed = {name for name, w in theirs.state_dict().items() if (w != before[name]).any()}
    assert "mask_decoder.iou_token.weight" in changed
    assert not any(name.endswith("positional_embedding") for name in changed)


@pytest.mark.full
def test_boxes_alone_are_enough_to_train():
    """A batch that must have points although --points is 0."""
    params, config = published.load_hf(reference("masks").folder, prompts=2, points=0)
    shapes = sam_masks.batch_shapes(config, 3)
    assert shapes.keys() == {"source", "boxes", "targets"}
    total, count = jax.eval_shape(functools.partial(sam_masks.loss, config=config), params, shapes)
    assert total.shape == count.shape == ()


# -------------------------------------------------------------------------------------------
# The page

def test_the_example_of_the_page_runs(tmp_path, monkeypatch):
    """An example of docs/networks.md with a name that changed, or another shape."""
    code = block("docs/networks.md", "sam_masks.predict")
    (tmp_path / "sam-folder").symlink_to(reference("masks").folder)
    np.save(tmp_path / "cat.npy", reference("masks").batch["source"][0])
    monkeypatch.chdir(tmp_path)
    there = {}
    exec(code, there)
    assert there["masks"].shape == (1, 2, 24, 24) and there["scores"].shape == (1, 2)
    assert there["cut"].shape == (97, 97) and there["cut"].dtype == bool


# -------------------------------------------------------------------------------------------
# What is refused, in a line

def record_for(part="", **changes):
    config = peer("transformers").SamConfig(**CASES["masks"])
    record = {**json.loads(config.to_json_string()), "architectures": ["SamModel"]}
    (record[part] if part else record).update(changes)
    return record


@pytest.mark.parametrize("part, changes, message", [
    ("", dict(tie_word_embeddings=False), "tie_word_embeddings False is not supported"),
    ("", dict(architectures=["SamHQModel"]), "SamHQModel.* is not supported"),
    ("", dict(vision_config=[1]), "wrong type"), ("", dict(mask_decoder_config="x"), "wrong type"),
    ("", dict(prompt_encoder_config=3), "wrong type"),
    ("vision_config", dict(num_pos_feats=15), "output_channels 32 .*only 30"),
    ("vision_config", dict(num_pos_feats=0.5), "num_pos_feats 0.5"),
    ("vision_config", dict(hidden_size=1.5), "hidden_size 1.5"),
    ("vision_config", dict(image_size=[97, 97]), "image_size .97, 97.: expected a number"),
    ("prompt_encoder_config", dict(hidden_size=30), "prompt_encoder_config.hidden_size 30 .*32"),
    ("prompt_encoder_config", dict(image_size=97), "image_size 97: 8 patches; expected 6"),
    ("prompt_encoder_config", dict(patch_size=0), "patch_size 0"),
    ("prompt_encoder_config", dict(image_embedding_size=7), "image_embedding_size 7 .*only 6"),
    ("prompt_encoder_config", dict(num_point_embeddings=5), "num_point_embeddings 5 .*only 4"),
    ("prompt_encoder_config", dict(mask_input_channels=10), "mask_input_channels 10 .*only 8"),
    ("prompt_encoder_config", dict(mask_input_channels=3), "mask_input_channels 3 .*only 4"),
    ("prompt_encoder_config", dict(hidden_act="tanh"), "the activation 'tanh'"),
    ("mask_decoder_config", dict(hidden_size=36), "mask_decoder_config.hidden_size 36 .*only 32"),
    ("mask_decoder_config", dict(num_attention_heads=5), "does not divide by --heads 5"),
    ("mask_decoder_config", dict(attention_downsample_rate=16), "does not divide by --heads 4"),
    ("mask_decoder_config", dict(attention_downsample_rate=0), "attention_downsample_rate 0"),
    ("mask_decoder_config", dict(num_multimask_outputs=0), "num_multimask_outputs 0"),
    ("mask_decoder_config", dict(iou_head_depth=31), "iou_head_depth 31: .* from 1 to 30"),
    ("mask_decoder_config", dict(iou_head_hidden_dim="x"), "iou_head_hidden_dim 'x'"),
    ("mask_decoder_config", dict(dropout_of_masks=1), "not known .*dropout_of_masks"),
    ("mask_decoder_config", dict(mlp_dim=-1), "mlp_dim -1")], ids=str)
def test_a_config_that_we_do_not_compute_is_refused_in_one_line(part, changes, message):
    """A foreign config.json that ends in a traceback, or is read as another model."""
    fields_of(record_for(), sam_masks.FAMILIES)
    with pytest.raises(ConfigError, match=message) as e:
        fields_of(record_for(part, **changes), sam_masks.FAMILIES)
    assert "\n" not in str(e.value)


def test_a_model_too_narrow_to_draw_is_refused():
    """Vectors of width 0, with which each mask is empty."""
    record = record_for("vision_config", num_pos_feats=3, output_channels=6)
    record["mask_decoder_config"]["num_attention_heads"] = 1
    for part in ("prompt_encoder_config", "mask_decoder_config"):
        record[part]["hidden_size"] = 6
    with pytest.raises(ConfigError, match="hidden_size / 8 0: expected an integer from 1"):
        fields_of(record, sam_masks.FAMILIES)


def test_what_a_config_leaves_out_is_its_default():
    """A default that differs from the class's, in a part of config.json with few keys."""
    whole = json.loads(peer("transformers").SamConfig().to_json_string())
    ours = dict(vision_config=sam.DEFAULTS | {"num_pos_feats": 128},
                prompt_encoder_config=sam_masks.PROMPT, mask_decoder_config=sam_masks.DECODER)
    for part, defaults in ours.items():
        assert defaults.items() <= {**whole[part], "mlp_dim": defaults.get("mlp_dim")}.items()
    record = {"model_type": "sam", "architectures": ["SamModel"]}
    assert fields_of(record, sam_masks.FAMILIES).items() >= dict(
        layers=12, d_model=768, image_size=1024).items()


@pytest.mark.parametrize("prompt, message", [
    (dict(points=[[50.0, 20.0]]), r"points of the shape \[1, 1, 2\]"),
    (dict(points=[[[50.0, 20.0]]], labels=[1]), r"labels of the shape \[1, 1\]"),
    (dict(points=[[[50.0, 20.0]]], labels=[[2]]), "labels: expected 1"),
    (dict(boxes=[1, 2, 3, 4]), r"boxes of the shape \[1, 4\]"),
    (dict(boxes=[[1, 2, 3, 4]], points=[[[1, 2]], [[3, 4]]]), r"boxes of the shape \[1, 1, 4\]"),
    (dict(labels=[[1]], boxes=[[1, 2, 3, 4]]), "labels of the shape"),
    (dict(mask=[[0] * 8] * 8), r"masks of the shape \[1, 8, 8\]; expected \[1, 24, 24\]")],
    ids=str)
def test_prompts_that_do_not_fit_are_one_line(prompt, message):
    """A traceback of a product, or a box for each point that is read as one for all."""
    params, config = published.load_hf(reference("masks").folder)
    with pytest.raises(ConfigError, match=message) as e:
        sam_masks.predict(params, reference("masks").batch["source"][0], config, **prompt)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("mesh", ["pipe=2", "seq=2"])
def test_meshes_that_would_compute_nonsense(mesh):
    """Stages of layers that differ; windows of half of the time."""
    config = run_of(published.hf_config(reference("masks").folder))
    with pytest.raises(ConfigError, match=f"mesh axis {mesh}"):
        check_network(config, mesh_of(mesh))
