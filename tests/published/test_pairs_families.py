"""Published encoder-decoders compared with transformers: T5, BART and Whisper, like decoders in
test_families.py; and the texts that they generate, with a cache and by beams."""

import functools
import json

import jax
import numpy as np
import pytest

import published
import sample
from published import llama, transformer
from published.record import as_config
from tests.common import check_network, full, net, peer
from tests.helpers import config_of, mesh_of, own, run_of
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
    assert_gradient,
    assert_not_supported,
    assert_step,
    assert_the_same_when_brief,
    batch_of,
    cases,
    export_trained,
    logits_of,
    numbers_of,
    read_by_theirs,
    ready,
    rewrite,
    sends_no_more,
)
from zigzag.core.errors import ConfigError
from zigzag.core.flags import change
from zigzag.core.mesh import shardings
from zigzag.generate.prompts import load_sources

# -------------------------------------------------------------------------------------------
# Tiny models, of numbers that differ from all defaults and divide by little

S = 17              # tokens of a source, of which some rows have fewer
FRAMES = 18         # what Whisper's encoder makes of twice as many


def t5(**more):
    return "T5", dict(d_model=48, d_kv=16, d_ff=80, num_layers=2, num_decoder_layers=4, num_heads=6,
                      vocab_size=V, relative_attention_num_buckets=8, layer_norm_epsilon=1e-3,
                      relative_attention_max_distance=12, decoder_start_token_id=0) | more


def coder(**more):
    """Sizes under the names that BART and Whisper have."""
    return dict(d_model=48, encoder_layers=4, decoder_layers=2, encoder_attention_heads=4,
                decoder_attention_heads=6, encoder_ffn_dim=72, decoder_ffn_dim=80, vocab_size=V,
                pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2) | more


CASES = {
    "t5": t5(),
    "t5 1.1": t5(num_heads=5, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "t5 deep": t5(num_layers=4, num_decoder_layers=8, feed_forward_proj="gated-silu"),
    "bart": ("Bart", coder(max_position_embeddings=40, forced_eos_token_id=None)),
    "bart scaled": ("Bart", coder(max_position_embeddings=24, scale_embedding=True,
                                  activation_function="relu", encoder_attention_heads=3)),
    "whisper": ("Whisper", coder(max_source_positions=FRAMES, max_target_positions=40,
                                 num_mel_bins=10, suppress_tokens=[], begin_suppress_tokens=[])),
}
QUICK, SLOW = ("t5",), ("t5 1.1", "bart", "whisper")
EACH = ("t5", "bart", "whisper")
each = functools.partial(cases, quick=QUICK, slow=SLOW, names=CASES)


def their_class(name):
    return getattr(peer("transformers"), f"{CASES[name][0]}ForConditionalGeneration")


def source_of(name):
    """The encoder's inputs, under our names."""
    rng = np.random.default_rng(1)
    if name == "whisper":
        return {"source": rng.normal(size=(ROWS, 10, 2 * FRAMES)).astype(np.float32)}
    mask = np.ones((ROWS, S), np.float32)
    mask[1, 12:] = mask[2, 5:] = 0
    return {"source": rng.integers(3, V, (ROWS, S)).astype(np.int32), "source_mask": mask}


def given_to_theirs(name):
    """The encoder's inputs, under transformers' names."""
    names = {"source": "input_features" if name == "whisper" else "input_ids",
             "source_mask": "attention_mask"}
    return as_theirs(source_of(name), names)


@functools.cache
def reference(name):
    """A saved transformers model, its logits and gradients."""
    torch = peer("torch")
    kind, fields = CASES[name]
    torch.manual_seed(1)
    theirs = their_class(name)(getattr(peer("transformers"), f"{kind}Config")(**fields))
    tokens, targets = np.random.default_rng(0).integers(3, V, (2, ROWS, T))
    found = numbers_of(theirs, targets, decoder_input_ids=torch.tensor(tokens),
                       **given_to_theirs(name))
    return Reference(found[0], batch_of(tokens, targets, **source_of(name)), *found[1:])


def their_model(name, folder):
    """The transformers model that reads a folder of ours."""
    return read_by_theirs(their_class(name), folder)


# -------------------------------------------------------------------------------------------
# The same numbers

@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("name", each())
def test_logits_are_those_of_transformers(name, shards):
    """Attention, MLP or head with another norm, scale or distances than the published ones; a
    device that attends to another part of a source than its own; heads that the shards do not
    divide."""
    want = reference(name)
    mesh = mesh_of(f"tensor={shards}")
    params, config = published.load_hf(want.folder, mesh)
    got = logits_of(params, config, want.batch["tokens"], mesh, **source_of(name))
    assert_close(got, want.logits, 1e-5)


@functools.cache
def loaded(name):
    fields = {} if name == "whisper" else {"source_len": S}     # (its frames are counted)
    return ready(reference(name), **fields)


@pytest.mark.parametrize("name", each())
def test_gradients_are_those_of_torch(name):
    """Faults that the logits do not show: in an embedding that both stacks share, in a table of
    distances that all layers share, in positions of sound, which are not trained."""
    _, config, gradient, _ = loaded(name)
    if name == "whisper":
        assert not gradient["encoder"]["positions"].any()
    assert_gradient(config, gradient, reference(name).gradients)


@pytest.mark.parametrize("name", each())
def test_what_we_train_transformers_reads(name, tmp_path):
    """An array of one stack that is written as the other's."""
    tokens = reference(name).batch["tokens"]
    ours = export_trained(tmp_path / "out", loaded(name), reference(name), functools.partial(
        logits_of, tokens=tokens, **source_of(name)))
    torch = peer("torch")
    with torch.no_grad():
        theirs = their_model(name, tmp_path / "out")(
            decoder_input_ids=torch.tensor(tokens.astype(np.int64)), **given_to_theirs(name)).logits
    assert_close(theirs.numpy(), ours, 1e-5)


# -------------------------------------------------------------------------------------------
# On a mesh

def assert_same_step(name, mesh, **changes):
    check_network(change(loaded(name)[1], **changes), mesh_of(mesh))
    assert_step(loaded(name), reference(name), mesh, **changes)


@pytest.mark.parametrize("mesh", ["fsdp=2,tensor=2", "pipe=2,tensor=2", "seq=2", "data=2,seq=2",
                                  "pipe=2,seq=2"])
@pytest.mark.parametrize("name", each(quick=(), slow=EACH))
def test_a_step_on_a_mesh_is_that_of_one_device(name, mesh):
    """A source whose time is split in zigzag order, like the tokens'; a gradient from only one
    stage; attention to the padded end of a source."""
    assert_same_step(name, mesh)


@pytest.mark.parametrize("name, mesh, changes", [
    full("t5", "pipe=2", dict(microbatches=2, remat="selective")),
    full("t5 deep", "pipe=2", dict(schedule="interleaved", chunks=2, microbatches=2)),
    full("t5 deep", "pipe=2,tensor=2", dict(schedule="interleaved", chunks=2, remat="full")),
    full("bart", "fsdp=2", dict(remat="full", accumulate=2)),
    full("whisper", "tensor=2", dict(remat="selective")),
    full("bart", "data=2,tensor=2", dict(seq_len=15)), full("t5", "tensor=4", {})])
def test_a_step_in_other_ways_is_that_of_one_device(name, mesh, changes):
    """A wrong recomputation of an encoder, or of its parts in a pipeline, in the backward pass."""
    assert_same_step(name, mesh, **changes)


def test_a_schedule_that_goes_back_at_once_is_refused():
    """1F1B with an encoder-decoder: it would go backward before all stages have begun the
    decoder."""
    config = run_of(encoder_layers=2, vocab_size=V, schedule="1f1b", batch=4)
    with pytest.raises(ConfigError, match="1f1b: an encoder-decoder runs through the stages twice"):
        check_network(config, mesh_of("pipe=2"))
    with pytest.raises(ConfigError, match="--encoder_layers 3 does not divide into 2"):
        check_network(change(config, schedule="gpipe", encoder_layers=3),
                                mesh_of("pipe=2"))


@pytest.mark.slow
@pytest.mark.parametrize("name", EACH)
def test_bfloat16_runs(name):
    """A weight, or a table, in another dtype than the activations that it meets."""
    params, config, _, loss = loaded(name)
    config = change(config, dtype="bfloat16")
    total, count = jax.jit(functools.partial(net.loss, config=config))(
        params, reference(name).batch)
    assert total / count == pytest.approx(loss, rel=2e-2)


BOTH_BY_HAND = [(r"cross_w[qkv](_bias)?$", COLUMNS), (r"cross_wo$", ROWS_OF), *BY_HAND]


@pytest.mark.full
@pytest.mark.parametrize("shards", [2, 4])
@pytest.mark.parametrize("name", each(quick=(), slow=EACH))
def test_no_family_sends_more_than_by_hand(name, shards):
    """A part of a family that the rule prices wrongly: more collectives, or more bytes in them."""
    sends_no_more(loaded(name), reference(name), BOTH_BY_HAND, shards)


# -------------------------------------------------------------------------------------------
# What they write

def placed(name, mesh):
    params, config = loaded(name)[0], own(loaded(name)[1])
    if not mesh:
        return params, config
    mesh = mesh_of(mesh)
    return jax.device_put(params, shardings(net.weight_specs(config, mesh), mesh)), config


def sources(name):
    """The sources in the form of sample.generate."""
    source = source_of(name)
    if name == "whisper":
        return source["source"]
    return [row[:int(length)].tolist() for row, length in zip(
        source["source"], source["source_mask"].sum(1))]


def written_by_theirs(name, count, **options):
    """(Their cache has as many layers as the encoder, in 4.57.6: none.)"""
    torch, transformers = peer("torch"), peer("transformers")
    theirs = their_model(name, reference(name).folder)
    theirs.generation_config = transformers.GenerationConfig(
        decoder_start_token_id=llama.start_id(own(loaded(name)[1])), pad_token_id=1,
        eos_token_id=None, max_new_tokens=count, do_sample=False, use_cache=False, **options)
    with torch.no_grad():
        ids = transformers.GenerationMixin.generate(theirs, **given_to_theirs(name)).numpy()
    return ids[:, 1:].tolist()


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["", "tensor=2"])
@pytest.mark.parametrize("name", each(quick=(), slow=EACH, names=("t5 1.1", *EACH)))
def test_what_they_write_is_what_transformers_writes(name, mesh):
    """A source, or its mask, that beams of other rows see; a prompt that begins at another slot."""
    params, config = placed(name, mesh)
    start = [[llama.start_id(config)]] * ROWS
    got = sample.generate(params, start, config, 8, temperature=0, source=sources(name))
    assert got == written_by_theirs(name, 8)
    beams = sample.beam_search(params, start, config, 4, 6, source=sources(name))
    assert [ids for row in beams for ids, _ in row] == written_by_theirs(
        name, 6, num_beams=4, num_return_sequences=4, length_penalty=0.0)


@pytest.mark.parametrize("source, words", [
    (None, "this model has an encoder: give it a source"), ([[5]], "2 prompts and 1 sources"),
    ([[5], []], r"source 1 has \[\]: expected a list of ids"), ([[5], [V]], f"source 1 has {V}")])
def test_a_bad_source_is_refused(source, words):
    """An id that does not exist, which would look up the last row of the table."""
    config = config_of(encoder_layers=2, vocab_size=V)
    with pytest.raises(ConfigError, match=words):
        sample.generate({}, [[1], [2]], config, source=source)
    with pytest.raises(ConfigError, match="has no encoder: give it no source"):
        sample.generate({}, [[1]], config_of(vocab_size=V), source=[[1]])
    config = change(config, stem="frames", channels=10, source_len=FRAMES)
    with pytest.raises(ConfigError, match=r"have the shape \[2, 10, 30\]; expected \[2, 10, 36\]"):
        sample.generate({}, [[1], [2]], config, source=np.zeros((2, 10, 30)))


@pytest.mark.parametrize("save", [
    lambda file: np.savez(file, x=np.ones((4, 16))), lambda file: np.save(file, np.array(["a"])),
    lambda file: file.write(b"RIFF")], ids=["npz", "text", "sound"])
def test_a_source_that_is_no_array_is_one_line(tmp_path, save):
    """A traceback for a .npz, or for a text file."""
    with open(tmp_path / "a.npy", "wb") as file:
        save(file)
    with pytest.raises(ConfigError, match=r"expected a .npy file with an array of \[4, 16\]"):
        load_sources(str(tmp_path / "a.npy"), (4, 16))


@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
def test_a_source_for_which_there_are_no_positions(positions):
    """Tokens beyond the table of positions, which would all get the last one."""
    config = config_of(layers=1, encoder_layers=1, d_model=16, heads=2, vocab_size=32,
                          seq_len=8, positions=positions)
    params, tokens = net.init(config, jax.random.key(0)), np.ones((1, 4), int)
    forward = jax.jit(functools.partial(net.forward, params, tokens, config))
    if positions == "learned":
        with pytest.raises(ConfigError, match="--source_len 12: .* only 8"):
            forward(source=np.arange(12)[None])
        return
    longer = change(config, source_len=12)
    np.testing.assert_allclose(forward(source=np.arange(12)[None]), net.forward(
        params, tokens, longer, source=np.arange(12)[None]), atol=1e-5)


# -------------------------------------------------------------------------------------------
# Folders

@pytest.mark.parametrize("name", CASES)
def test_what_a_config_leaves_out_is_its_default(name):
    """Each option of a tiny model, given or left out where it is the class's default."""
    assert_the_same_when_brief(*CASES[name])


def record_of(name, **changes):
    kind, fields = CASES[name]
    return {**fields, "model_type": kind.lower(), **changes}


@pytest.mark.parametrize("proj, gated, activation", [
    ("relu", False, "relu"), ("gated-gelu", True, "gelu_tanh"), ("gelu", False, "gelu"),
    ("gated-silu", True, "silu"), ("gelu_new", False, "gelu_tanh")])
def test_feed_forward_proj_is_parsed_as_transformers_does(proj, gated, activation):
    """gated-gelu read as exact gelu (it means the tanh approximation, and gelu does not)."""
    theirs = peer("transformers").T5Config(feed_forward_proj=proj)
    assert theirs.is_gated_act == gated
    ours = llama.fields_of(record_of("t5", feed_forward_proj=proj))
    assert (ours["gated"], ours["activation"]) == (gated, activation)
    saved = json.loads(theirs.to_json_string(use_diff=False))
    assert llama.fields_of(saved)["activation"] == activation


@pytest.mark.parametrize("name, changes", [
    ("t5", dict(is_encoder_decoder=False)), ("bart", dict(normalize_before=True)),
    ("bart", dict(add_final_layer_norm=True)), ("bart", dict(static_position_embeddings=True)),
    ("bart", dict(tie_word_embeddings=False)), ("whisper", dict(tie_word_embeddings=False)),
    ("bart", dict(normalize_embedding=False))], ids=str)
def test_options_that_we_do_not_compute_are_refused(name, changes):
    """An option that changes no shape and that we do not compute: the model would load, and write
    nonsense."""
    assert_not_supported(record_of(name), changes)


@pytest.mark.parametrize("name, field", [
    ("t5", "feed_forward_proj"), ("t5", "d_kv"), ("t5", "num_layers"), ("t5", "num_decoder_layers"),
    ("t5", "relative_attention_num_buckets"), ("t5", "relative_attention_max_distance"),
    ("t5", "layer_norm_epsilon"), ("bart", "encoder_layers"),
    ("bart", "encoder_attention_heads"),
    ("bart", "decoder_ffn_dim"), ("bart", "max_position_embeddings"),
    ("whisper", "max_source_positions"), ("whisper", "num_mel_bins"),
    ("whisper", "scale_embedding"), ("whisper", "activation_function")])
def test_hostile_values_end_in_one_line(name, field):
    """A traceback, or memory for a model of 10^30 layers."""
    for value in ("x", "gated-x", "gated-gelu-x", -1, 0, 7, 2.5, 10**30, [1], {}, True, 1e300):
        try:
            fields = llama.fields_of(record_of(name, **{field: value}))
            net.parameters(as_config(transformer.Config, "config.json", fields))
        except ConfigError as e:
            assert "\n" not in str(e) and len(str(e)) < 400


def test_ids_with_a_meaning():
    """A decoder that begins with a wrong id, if config.json does not say which."""
    def start(**record):
        return llama.start_id(config_of(published=json.dumps(record)))

    assert start(model_type="bart") == 2 and start(model_type="whisper") == 50257
    assert start(model_type="t5") == 0 and start(model_type="t5", pad_token_id=3) == 3
    assert start(model_type="t5", decoder_start_token_id=5, pad_token_id=3) == 5
    assert llama.token_id(config_of(published='{"model_type": "bart"}'), "eos_token_id") == 2
    for wrong in ("x", [0], -1, 9):
        record = {"model_type": "t5", "decoder_start_token_id": wrong}
        with pytest.raises(ConfigError, match="decoder_start_token_id .*: expected an id"):
            llama.start_id(config_of(vocab_size=9, published=json.dumps(record)))


@pytest.mark.slow
def test_other_names_of_the_same_arrays(tmp_path):
    """bart-large-cnn, whose embedding has only the decoder's name, or bart-base, which has no bias
    of logits and no model. before names, refused because something seems to be missing."""
    folder, want = tmp_path / "bart", reference("bart")
    folder.mkdir()
    for file in want.folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    record = json.loads((folder / "config.json").read_text())

    def changed(arrays):
        embed = arrays.pop("model.shared.weight")
        del arrays["final_logits_bias"]
        return {name.removeprefix("model."): a for name, a in arrays.items()} | {
            "decoder.embed_tokens.weight": embed}

    rewrite(folder, changed, record)
    params, config = published.load_hf(folder)
    whole, _ = published.load_hf(want.folder)
    assert not params.pop("head_bias").any() and whole.pop("head_bias").any()
    jax.tree.map(np.testing.assert_array_equal, params, whole)
    rewrite(folder, lambda arrays: arrays | {"encoder.embed_tokens.weight": 2 * arrays[
        "decoder.embed_tokens.weight"]}, record)
    with pytest.raises(ConfigError, match="embed_tokens.weight differ; .*tied"):
        published.load_hf(folder)
