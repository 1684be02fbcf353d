"""Folders written by transformers 5, beyond config.json: arrays under new names, all experts in one
array, tokenizers without special_tokens_map.json. Run with transformers 5 too (.ci/run does); with
4, the tests that need it are skipped."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

import published
from published.arrays_of_folder import check_arrays
from published.llama import families_of
from tests.common import byte_level, full, peer
from tests.published import options
from tests.published.option_cases import BASES, bases, speaks_5
from tests.published.test_published import edit_arrays
from zigzag.core.errors import ConfigError
from zigzag.disk.tokenizers import published_tokenizer
from zigzag.parallel.network import network_of

RENAMED = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_neox", "vit", "vit bare", "beit",
           "beit of 6 heads", "swin", "swin bare")


def needs_5():
    if not speaks_5():
        pytest.skip("transformers 5 writes these")


@pytest.mark.parametrize("name", [name if name in RENAMED else full(name) for name in BASES])
def test_what_is_not_saved_in_the_original_format_is_read(name, tmp_path):
    """A refusal of a folder saved with save_original_format=False, in which arrays have the names
    of transformers 5's classes, and experts are in two arrays."""
    needs_5()
    base, folder = bases()[name], options.folder_of_base(name)
    want, batch = options.theirs(base, folder)
    model = options._class_of(base, {"architectures": [base.model]}).from_pretrained(folder)
    model.save_pretrained(tmp_path / "m", save_original_format=False)
    if name in RENAMED:
        assert load_file(tmp_path / "m/model.safetensors").keys() != load_file(
            folder / "model.safetensors").keys()
    options.assert_equal(base, tmp_path / "m", want, batch, tmp_path / "out")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_folder_in_half_precision(dtype, tmp_path):
    """A refusal of `dtype` in config.json, which was torch_dtype in version 4."""
    torch, transformers = peer("torch"), peer("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        options.folder_of_base("llama"), dtype=getattr(torch, dtype))
    model.save_pretrained(tmp_path / "m")
    params, config = published.load_hf(tmp_path / "m")
    want = model.state_dict()["model.norm.weight"].float().numpy()
    np.testing.assert_array_equal(params["norm"], want)
    published.save_hf(tmp_path / "out", params, config, dtype=dtype)
    record = json.loads((tmp_path / "out/config.json").read_text())
    assert record["dtype"] == record["torch_dtype"] == dtype
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert again.dtype == getattr(torch, dtype)


def test_a_tokenizer_that_transformers_saves(tmp_path):
    """An end that is not found, special tokens that are encoded as text, or another id for a text,
    since version 5 writes no special_tokens_map.json and names another class."""
    transformers = peer("transformers")
    (tmp_path / "text").write_text("hello world, how are you? " * 50 + "the quick brown fox " * 20)
    made = byte_level([tmp_path / "text"], ["<s>", "</s>", "<pad>", "<|im_start|>"])
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        additional_special_tokens=["<|im_start|>"])
    theirs.chat_template = "{% for m in messages %}<|im_start|>{{m.content}}{% endfor %}"
    theirs.save_pretrained(tmp_path)
    ours = published_tokenizer(tmp_path, 400)
    assert (tmp_path / "special_tokens_map.json").exists() != speaks_5()
    assert ours.separator == 0 and 1 in ours.ends
    for text in ("hello <|im_start|>quick?", "Grüße \n\n 🦊</s>", ""):
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text).tolist() == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


SECOND = "swinv2.encoder.layers.0.blocks.0.attention.self"


def far_apart(window, trained):
    """Swin V2's table of distances in windows of this side, by its formula."""
    apart = 8 * (np.arange(2 * window - 1) - window + 1) / (trained - 1)
    apart = np.sign(apart) * np.log2(np.abs(apart) + 1) / np.log2(8)
    return np.stack(np.meshgrid(apart, apart, indexing="ij"), -1)[None]


@pytest.mark.parametrize("name, array, value, words", [
    ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq", lambda: 500.0 ** (
        -np.arange(0, 12, 2) / 12), None),
    ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq", lambda: np.ones(6), "not the const"),
    ("gpt2", "transformer.h.0.attn.bias", lambda: np.tri(64)[None, None], None),
    ("gpt2", "transformer.h.0.attn.bias", lambda: np.ones((1, 1, 64, 64)), "is not the constant"),
    ("gpt2", "transformer.h.0.attn.masked_bias", lambda: np.array(-1e4), None),
    ("gpt2", "transformer.h.0.attn.masked_bias", lambda: np.array(0.0), "is not the constant"),
    ("bert", "bert.embeddings.position_ids", lambda: np.arange(64)[None], None),
    ("bert", "bert.embeddings.position_ids", lambda: np.arange(64)[None] + 2, "not the constant"),
    ("bert", "bert.pooler.dense.bias", lambda: np.ones(48), None),
    ("bert", "cls.seq_relationship.bias", lambda: np.ones(2), None),
    ("roberta classes", "roberta.pooler.dense.bias", lambda: np.ones(48), None),
    ("bert", "cls.other.bias", lambda: np.ones(2), "arrays that are not part of its model: cls"),
    ("swin v2", f"{SECOND}.relative_coords_table", lambda: far_apart(5, 6), None),
    ("swin v2", f"{SECOND}.relative_coords_table", lambda: far_apart(5, 4), "not the constant"),
    ("vit bare", "pooler.bias", lambda: np.ones(36), "is not part of a model of architectures"),
])
def test_an_ignored_array_has_a_reason(name, array, value, words):
    """A buffer that is ignored by its name alone: a mask with other values, positions that begin
    elsewhere."""
    folder = options.folder_of_base(name)
    edit = {**load_file(folder / "model.safetensors"), array: value().astype(np.float32)}
    _, config = published.load_hf(folder)
    network = network_of(config)
    family = families_of(network)[bases()[name].family]

    class Edited:       # (a folder with that array, without the work of writing one)
        path, arrays = folder, edit
        config = {"architectures": [bases()[name].model], "model_type": bases()[name].family}

    if words is None:
        check_arrays(Edited(), family, config, network.table(config))
    else:
        with pytest.raises(ConfigError, match=words):
            check_arrays(Edited(), family, config, network.table(config))


def test_t5_that_is_untied_while_its_config_says_tied(tmp_path):
    """A T5 1.1 or Flan read as tied: version 5 saves all of them with `tie_word_embeddings`
    true."""
    needs_5()
    transformers, torch = peer("transformers"), peer("torch")
    base = bases()["t5 1.1"]
    config = base.config()
    model = transformers.T5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    model.save_pretrained(tmp_path / "m")
    arrays = load_file(tmp_path / "m/model.safetensors")
    assert (arrays["lm_head.weight"] != arrays["shared.weight"]).any()
    want, batch = options.theirs(base, tmp_path / "m")
    ours = options.assert_equal(base, tmp_path / "m", want, batch, tmp_path / "out")
    assert not ours.tied and not ours.head_scale
    record = json.loads((tmp_path / "out/config.json").read_text())     # (which version 4 obeys)
    assert not record["tie_word_embeddings"] and "scale_decoder_outputs" not in record
    edit_arrays(tmp_path / "m", lambda arrays: arrays | {
        "lm_head.weight": arrays["shared.weight"].copy()})
    assert published.load_hf(tmp_path / "m")[1].tied
