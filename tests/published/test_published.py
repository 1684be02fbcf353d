"""Folders of published models: the layouts of arrays, reading parts of them, and refusals.

test_families.py compares results with transformers; nothing here needs it."""

import dataclasses
import itertools
import json
import os
import pickle
import shutil
import struct
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import model
import published
from published import arrays_of_folder, folders, llama
from published.arrays_of_folder import layouts
from tests.common import net, peer
from tests.helpers import config_of, mesh_of
from zigzag.core.errors import ConfigError
from zigzag.core.mesh import by_path
from zigzag.parallel.network import network_of
from zigzag.parallel.table import Table

safetensors = pytest.importorskip("safetensors.numpy", reason="pip install safetensors")

# -------------------------------------------------------------------------------------------
# The layout of an array

SIZES = dict(D=6, H=6, K=3, g=2, N=4, M=2, F=5, R=3, U=2, Y=5)
OWN = dict(wq="D H N", wk="D K N", wv="D K M", wo="H M D", w_gate="D F", w_up="D F", k_down="D R",
           k_turn="D U", k_up="R H Y", v_up="R H M", q_bias="H N", k_bias="K N", v_bias="K M")
PATTERNS = ["(H N) D -> wq", "D (H M) -> wo", "(K M) D -> wv", "D F -> w_up", "F D -> w_up",
            "D (H N | K N | K M) -> wq wk wv", "(H N | K N | K M) -> q_bias k_bias v_bias",
            "(K [g N | N | M]) D -> wq wk wv", "(K [g N | N | M]) -> q_bias k_bias v_bias",
            "(F | F) D -> w_gate w_up", "(R | U) D -> k_down k_turn", "(H [Y | M]) R -> k_up v_up"]


def test_the_layout_of_an_array_without_one():
    """Outputs and inputs exchanged, in a row matrix whose first dimension tensor splits."""
    make = Table(L=2, D=6, H=6, N=4)
    for axes, layout in {"D H/tensor N": "(H N) (D)", "H/tensor N D": "(D) (H N)",
                         "L/pipe H/tensor N D": "(D) (H N)", "D N": "(N) (D)"}.items():
        assert arrays_of_folder._layout_there([make(axes)], False) == layout, axes


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_layout_is_written_and_read_back(pattern):
    """A weight that is written to another's part, transposed, or partly overwritten; another range
    than the one asked for; a copy of all of the array, where a view does."""
    rng = np.random.default_rng(0)
    layout, _, names = pattern.partition(" -> ")
    names = names.split()
    own = {name: tuple(OWN[name].split()) for name in names}
    found = layouts(layout, own, SIZES)
    weights = {n: rng.normal(size=[SIZES[a] for a in own[n]]) for n in names}
    array = np.full(found[names[0]].shape, np.nan)
    for name in names:
        found[name].write(array, weights[name])
        assert np.shares_memory(found[name].view(array), array)
    assert sorted(array.ravel()) == sorted(np.concatenate([w.ravel() for w in weights.values()]))
    for i, name in itertools.product(range(40), names):
        ranges = []
        for a in own[name]:
            first, last = sorted(rng.choice(SIZES[a] + 1, 2, replace=False))
            whole = i % 2 == 0 and a in "NMYU"
            ranges.append(slice(0, SIZES[a]) if whole else slice(int(first), int(last)))
        np.testing.assert_array_equal(found[name].read(array, ranges), weights[name][tuple(ranges)])


# -------------------------------------------------------------------------------------------
# A folder

LLAMA = dict(model_type="llama", architectures=["LlamaForCausalLM"], hidden_size=32,
             num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=131,
             intermediate_size=64, max_position_embeddings=32, rms_norm_eps=1e-5,
             rope_theta=10000.0, hidden_act="silu", tie_word_embeddings=False)
FALCON = dict(model_type="falcon", hidden_size=32, num_hidden_layers=2, num_attention_heads=8,
              num_kv_heads=4, new_decoder_architecture=True, vocab_size=131)


def save(folder, record, **how):
    """A folder of a new model."""
    config = config_of(**llama.fields_of(record))
    params = jax.jit(lambda key: net.init(config, key))(jax.random.key(0))
    ids = jnp.arange(params["embed"].shape[0]) < config.vocab_size      # zeros in the padding
    params["embed"] *= ids[:, None]
    if "head" in params:
        params["head"] *= ids
    published.save_hf(folder, params, config, **how)
    return params


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good") / "llama"
    save(folder, LLAMA)
    return folder


def assert_same(got, want, rtol=0.0):
    for path, a in by_path(got).items():
        np.testing.assert_allclose(np.asarray(a), np.asarray(by_path(want)[path]), rtol, rtol / 10)


@pytest.mark.parametrize("record", [LLAMA, FALCON], ids=["llama", "falcon"])
@pytest.mark.parametrize("mesh", ["", "tensor=4", "fsdp=2,tensor=2", "pipe=2"])
def test_a_device_reads_its_own_part(tmp_path, monkeypatch, record, mesh):
    """A device that reads complete arrays, and needs the memory and the time of the whole model."""
    save(tmp_path / "m", record)
    mesh = mesh and mesh_of(mesh)
    read, owned = [], []
    read_part = arrays_of_folder.Layout.read
    monkeypatch.setattr(arrays_of_folder.Layout, "read",
                        lambda *given: read.append(read_part(*given)) or read[-1])

    def of_one_device(shape, sharding, part):
        at = sharding.addressable_devices_indices_map(shape)
        owned.append(part(at[min(at, key=lambda d: d.id)]))
        return owned[-1]

    monkeypatch.setattr(jax, "make_array_from_callback", of_one_device)
    _, config = published.load_hf(tmp_path / "m", mesh or None)
    # (The padding of tables is not read; none of these parts is only padding.)
    own = sum(w.size for w in owned)
    assert own - 2 * 125 * 32 <= sum(part.size for part in read) <= own
    total = net.parameters(config)[0]
    assert bool(mesh) == (sum(part.size for part in read) < 0.8 * total)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_in_half_precision(tmp_path, dtype):
    """bfloat16, which numpy lacks, read as the bits of another type."""
    params = save(tmp_path / "m", LLAMA, dtype=dtype)
    arrays = safetensors.load_file(tmp_path / "m/model.safetensors")
    assert {str(a.dtype) for a in arrays.values()} == {dtype}
    record = json.loads((tmp_path / "m/config.json").read_text())
    assert record["dtype"] == record["torch_dtype"] == dtype
    again, _ = published.load_hf(tmp_path / "m")
    assert_same(again, jax.tree.map(lambda w: w.astype(dtype).astype(jnp.float32), params))


def test_several_files(tmp_path):
    """An array of the second file, or of one that a device reads in part."""
    params = save(tmp_path / "m", LLAMA)
    arrays = safetensors.load_file(tmp_path / "m/model.safetensors")
    (tmp_path / "m/model.safetensors").unlink()
    files = {name: f"{n % 3}.safetensors" for n, name in enumerate(arrays)}
    for file in set(files.values()):
        safetensors.save_file({n: a for n, a in arrays.items() if files[n] == file},
                              tmp_path / "m" / file)
    (tmp_path / "m/model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    again, _ = published.load_hf(tmp_path / "m", mesh_of("fsdp=2,tensor=2"))
    assert_same(again, params)


@pytest.mark.parametrize("changes, words", [
    (dict(dtype="float64"), "expected one of float32"),
    (dict(dtype="float16"), "too large for float16"), (dict(dtype="float32"), "not finite")])
def test_what_is_not_saved(tmp_path, good, changes, words):
    """An exported folder that cannot be loaded, which is noticed only later."""
    params, config = published.load_hf(good)
    params["norm"] *= 1e6 if changes["dtype"] == "float16" else jnp.nan
    with pytest.raises(ConfigError, match=words):
        published.save_hf(tmp_path / "m", params, config, **changes)
    assert not (tmp_path / "m/config.json").exists()
    with pytest.raises(ConfigError, match="export .* holds config.json, model.safetensors"):
        published.save_hf(good, params, config)


def test_a_tied_head_may_be_there_once_more(tmp_path):
    """A refusal of tied models whose table is in the folder twice, as in many; two tables that
    differ, of which one is not the trained one."""
    save(tmp_path / "m", {**LLAMA, "tie_word_embeddings": True})
    file = tmp_path / "m/model.safetensors"
    arrays = safetensors.load_file(file)
    assert "lm_head.weight" not in arrays
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"].copy()
    safetensors.save_file(arrays, file)
    params, _ = published.load_hf(tmp_path / "m", mesh_of("tensor=2"))
    assert "head" not in params
    arrays["lm_head.weight"][7, 3] += 1
    safetensors.save_file(arrays, file)
    with pytest.raises(ConfigError, match="embed_tokens.weight and lm_head.weight differ"):
        published.load_hf(tmp_path / "m", mesh_of("tensor=2"))


def test_a_folder_of_the_bare_model(tmp_path, good):
    """A refusal of names without a prefix, as in the folder of a model without a head (GPT-2)."""
    save(tmp_path / "m", {**LLAMA, "tie_word_embeddings": True})
    want, _ = published.load_hf(tmp_path / "m")
    edit_arrays(tmp_path / "m", lambda arrays: {
        name.removeprefix("model."): a for name, a in arrays.items()})
    assert_same(published.load_hf(tmp_path / "m")[0], want)


# -------------------------------------------------------------------------------------------
# Damaged and hostile folders

def edit_arrays(folder, change):
    file = folder / "model.safetensors"
    arrays = safetensors.load_file(file)
    safetensors.save_file(change(arrays) or arrays, file)


def edit_config(folder, **changes):
    file = folder / "config.json"
    record = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in record.items() if v != "LEFT OUT"}))


def edit_header(folder, change):
    """Another header before the same arrays."""
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    size, = struct.unpack("<Q", raw[:8])
    header = change(json.loads(raw[8:8 + size]))
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + raw[8 + size:])


NORM = "model.norm.weight"


def set_norm(**changes):
    return lambda f: edit_header(f, lambda h: {**h, NORM: {**h[NORM], **changes}})


def cut(part):
    def change(folder):
        raw = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(raw[:int(len(raw) * part)])

    return change


def with_index(change):
    """Its arrays in one file that an index names, after a change of the index."""
    def damage(folder):
        (folder / "model.safetensors").rename(folder / "a.safetensors")
        names = safetensors.load_file(folder / "a.safetensors")
        index = {"weight_map": dict.fromkeys(names, "a.safetensors")}
        (folder / "model.safetensors.index.json").write_text(
            json.dumps(change(index["weight_map"]) or index))

    return damage


class Bomb:
    def __reduce__(self):
        return sys.exit, (9,)


def pickled(folder):
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))


def only_pickled(folder):
    pickled(folder)
    (folder / "model.safetensors").unlink()


def with_array(**more):
    return lambda f: edit_arrays(f, lambda arrays: {**arrays, **more})


def with_norm(value):
    return with_array(**{NORM: value})


def written(name, text):
    return lambda f: (f / name).write_text(text)


HOSTILE = {
    "no folder": (shutil.rmtree, "expected a folder with a published model"),
    "no config.json": (lambda f: (f / "config.json").unlink(), "expected a folder"),
    "config.json is a folder": (lambda f: [(f / "config.json").unlink(), (
        f / "config.json").mkdir()], "Is a directory"),
    "config.json is no JSON": (written("config.json", "{"), "not JSON"),
    "config.json is no text": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00"), "not J"),
    "config.json is deep": (written("config.json", "[" * 100_000), "not JSON"),
    "config.json is a list": (written("config.json", "[1]"), "no model_type"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "neither model.safetensors nor"),
    "a pickle alone": (only_pickled, "zigzag reads no other format"),
    "truncated": (cut(0.7), "cannot be read"), "truncated header": (cut(0.002), "cannot be read"),
    "empty": (cut(0), "cannot be read"),
    "a header that is too long": (lambda f: (f / "model.safetensors").write_bytes(
        struct.pack("<Q", 2**62) + b"{}"), "cannot be read"),
    "a header that is no JSON": (lambda f: edit_header(f, lambda h: b"{" * 64), "cannot be read"),
    "a larger shape": (set_norm(shape=[64]), "cannot be read"),
    "no such numbers": (set_norm(dtype="F31"), "cannot be read"),
    "two in one place": (set_norm(data_offsets=[0, 128]), "cannot be read"),
    "far beyond the end": (set_norm(data_offsets=[2**40, 2**40 + 128]), "cannot be read"),
    "whole numbers": (with_norm(np.ones(32, np.int8)), "of type I8; expected F32, F16 or"),
    "true or false": (with_norm(np.ones(32, bool)), r"\(bool\) .* of floats"),
    "NaN": (with_norm(np.full(32, np.nan, np.float32)), "norm.weight has numbers that are not fin"),
    "inf": (with_norm(np.array([np.inf] * 32, np.float16)), "norm.weight has numbers that are not"),
    "a wrong shape": (with_norm(np.ones(16, np.float32)), r"the shape \[16\].* says \[32\]"),
    "left over": (with_array(**{f"x{i}": np.ones(2, np.float32) for i in range(12)}),
                  "not part of its model: x0, x1, x10, x11, x2, x3, x4, x5, x6, x7 and 2 more$"),
    "a name of two lines": (with_array(**{"a\nb\x1b": np.ones(2, np.float32)}), r"'a\\nb\\x1b'$"),
    "missing": (lambda f: edit_arrays(f, lambda a: a.pop(NORM) is None), "lacks model.norm.weight"),
    "an index that is no JSON": (lambda f: [with_index(lambda m: None)(f), written(
        "model.safetensors.index.json", "x")(f)], "index.json is damaged"),
    "an index without a map": (with_index(lambda m: {"weight_map": [1]}), "no weight_map"),
    "an index of a missing file": (with_index(lambda m: m.update({NORM: "b.safetensors"})),
                                   "not a file of this folder"),
    "an array that its file lacks": (with_index(lambda m: m.update(y="a.safetensors")),
                                     "y not in the file that the index names"),
    "an array that no index has": (with_index(lambda m: m.pop(NORM) and None),
                                   "norm.weight not in the file that the index names"),
    "a map to a number": (with_index(lambda m: m.update({NORM: 3})), "not a file of this folder"),
}
for _path in ("../x/model.safetensors", "/etc/passwd", "sub/a.safetensors", "..", ".", "",
              "a" * 300, "a\x1b[31m.safetensors"):
    HOSTILE[f"a path {_path!r:.40}"] = with_index(
        lambda m, path=_path: m.update({NORM: path})), "not a file of this folder"

CONFIGS = [
    (dict(model_type="nonsense"), "model_type 'nonsense': expected one of .*llama"),
    (dict(model_type="lama"), "did you mean 'llama'"), (dict(model_type=3), "no model_type in it"),
    (dict(num_hidden_layers="LEFT OUT"), "lacks 'num_hidden_layers'"),
    (dict(num_hidden_layers="2"), "num_hidden_layers '2': expected an integer from 1"),
    (dict(num_hidden_layers=10**9), "num_hidden_layers 1000000000: expected an integer from"),
    (dict(num_hidden_layers=9999), "21 arrays; its config.json says 9999 layers"),
    (dict(num_hidden_layers=-2), "from 1 to"), (dict(num_hidden_layers=2.5), "from 1 to"),
    (dict(num_hidden_layers=True), "from 1 to"), (dict(num_hidden_layers=None), "from 1 to"),
    (dict(hidden_size=-32), "hidden_size -32: expected an"), (dict(hidden_size=[32]), "an int"),
    (dict(hidden_size=2**40), "hidden_size"), (dict(hidden_size=64), "has the shape"),
    (dict(head_dim=2**40), "head_dim"), (dict(head_dim=2**30), "head_dim"),
    (dict(vocab_size="131"), "vocab_size '131': expected an integer"),
    (dict(num_attention_heads=0), "attention_heads 0: expected an integer"),
    (dict(num_attention_heads={}), "attention_heads {}: expected an integer"),
    (dict(num_attention_heads=3), "--heads 3"),
    (dict(num_key_value_heads=3), "--kv_heads 3"),
    (dict(num_key_value_heads=-2), "--kv_heads -2"),
    (dict(num_key_value_heads=10**400), "--kv_heads 1000"),
    (dict(intermediate_size=None), "intermediate_size"),
    (dict(intermediate_size=96), "has the shape"),
    (dict(rms_norm_eps="1e-5"), "rms_norm_eps '1e-5': expected a number"),
    (dict(rms_norm_eps=float("nan")), "rms_norm_eps nan: expected a number"),
    (dict(rope_theta=-1), "rope_theta -1"), (dict(rope_theta=[1]), "rope_theta"),
    (dict(hidden_act="swoosh"), "activation 'swoosh' is not known"),
    (dict(hidden_act=["silu"]), "hidden_act"),
    (dict(tie_word_embeddings="false"), "tie_word_embeddings 'false': expected true or false"),
    (dict(rope_scaling={"rope_type": "spiral"}), "'spiral' is not known"),
    (dict(rope_scaling={"rope_type": [1]}), "rope_scaling"),
    (dict(rope_scaling="no"), "wrong type"),
    (dict(rope_scaling={"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0,
                        "high_freq_factor": 1.0}), "low_freq_factor must be below high"),
    (dict(model_type="mistral", sliding_window=2**40), "sliding_window 1099511627776: expected"),
    (dict(model_type="mistral", sliding_window=0), "sliding_window 0: expected an integer"),
    (dict(rope_scaling={"rope_type": "linear"}), "rope_scaling"),
    (dict(rope_scaling={"rope_type": "linear", "factor": 0}), "rope_scaling"),
    (dict(rope_scaling={"rope_type": "linear", "factor": "2"}), "rope_scaling"),
    (dict(rope_scaling={"rope_type": "longrope", "short_factor": [1], "long_factor": [1]}),
     "1 numbers for 4 pairs"),
    (dict(rope_parameters=3), "wrong type"),
    (dict(rope_parameters={"full_attention": 3}), "not known .*'rope_scaling.full_attention' 3"),
    (dict(quantization_config={"quant_method": "fp8"}), "quantization_config .* not supported"),
    (dict(is_causal=False), "is_causal False is not supported"),
    (dict(model_type="mixtral", num_local_experts=10**8), "2 layers with 100000000 experts each"),
    (dict(model_type="mixtral", num_local_experts="8"), "num_local_experts '8'"),
    (dict(model_type="mixtral", num_local_experts=0), "num_local_experts 0: expected an int"),
    (dict(model_type="qwen2", use_sliding_window=True, layer_types=["x", "y"]), "layer_types"),
    (dict(model_type="qwen2", use_sliding_window=True, layer_types=["full_attention"]),
     "for each of 2 layers"),
    (dict(model_type="gpt_neo", num_layers=2, num_heads=4, attention_types=[[["local"], 10**12]]),
     "attention_types"),
]


OPENED = []


@pytest.fixture(scope="module", autouse=True)
def opened():
    """Keeps in OPENED what Python opens, and what safetensors is told to."""
    package = pytest.importorskip("safetensors")
    real, is_on = package.safe_open, [True]
    sys.addaudithook(lambda event, args: OPENED.append(str(args[0]))
                     if is_on and event == "open" else None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(package, "safe_open", lambda path, **how: (
            OPENED.append(str(path)), real(path, **how))[1])
        yield
    is_on.clear()       # (a hook stays for good)


def assert_refused(folder, words):
    """Assert that a folder is refused in one line, and that only its own weights were opened."""
    OPENED.clear()
    with pytest.raises(ConfigError, match=words) as e:
        published.load_hf(folder)
    assert "\n" not in str(e.value) and len(str(e.value)) < 1200
    names = {"config.json", "model.safetensors", "model.safetensors.index.json", "a.safetensors"}
    ours = ".py", ".pyc", "-cache"          # (the last: programs that an earlier test compiled)
    opened = {path for path in OPENED if not path.endswith(ours)}
    assert opened <= {str(folder / name) for name in names}, opened


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_folder_is_refused(tmp_path, good, name):
    """A traceback, garbage in some weights, a file elsewhere that is opened."""
    damage, words = HOSTILE[name]
    folder = shutil.copytree(good, tmp_path / "m")
    damage(folder)
    assert_refused(folder, words)


@pytest.mark.parametrize("changes, words", CONFIGS, ids=lambda value: str(value)[:60])
def test_a_wrong_config_is_refused(tmp_path, good, changes, words):
    """A traceback, all memory taken by a list of the file's number of layers, a text that counts as
    true."""
    folder = shutil.copytree(good, tmp_path / "m")
    edit_config(folder, **changes)
    assert_refused(folder, words)


def test_a_pickle_beside_is_not_opened(tmp_path, good):
    folder = shutil.copytree(good, tmp_path / "m")
    pickled(folder)
    edit_config(folder, vocab_size=7)
    assert_refused(folder, "has the shape")
    edit_config(folder, vocab_size=131)
    published.load_hf(folder)


@pytest.mark.parametrize("umask", [0o022, 0o007])
def test_others_may_read_what_is_exported(tmp_path, umask):
    """A model.safetensors that only its owner may read, beside a config.json for everybody."""
    before = os.umask(umask)
    try:
        save(tmp_path / "m", LLAMA)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "m").iterdir()}
    assert modes == dict.fromkeys(("config.json", "model.safetensors"), 0o666 & ~umask)


def test_an_option_without_a_name_there_is_not_exported(tmp_path):
    """A fork's own option, or its own weight, that a LLaMA folder silently lacks."""
    peer("safetensors")

    @dataclasses.dataclass(frozen=True)
    class Config(model.Config):
        sharpen: float = 0.0        # what no published model has

    def weight_table(c):
        extra = {"extra": Table(D=c.d_model)("D")} if c.sharpen > 1 else {}
        return {**model.weight_table(c), **extra}

    network = dataclasses.replace(model.NETWORK, config=Config, weight_table=weight_table)
    for sharpen, says in ((0.0, None), (0.5, "sharpen is 0.5, but"), (2.0, "sharpen is 2.0")):
        config = Config(layers=1, d_model=16, heads=2, vocab_size=11, sharpen=sharpen)
        params = network.init(config, jax.random.key(0))
        if says is None:
            folders.save_hf(network, tmp_path / "a", params, config)
            lost = {**params, "extra": jnp.ones(3)}
            with pytest.raises(ConfigError, match="has no array for the weights extra"):
                folders.save_hf(network, tmp_path / "b", lost, config)
            continue
        with pytest.raises(ConfigError, match=says):
            folders.save_hf(network, tmp_path / "b", params, config)


def test_only_how_a_model_is_trained_may_be_given(tmp_path):
    """rope_theta=3.0 accepted for a published model: another model, exported with the original's
    config."""
    peer("safetensors")
    config = config_of(layers=1, d_model=16, heads=2, vocab_size=11)
    published.save_hf(tmp_path / "a", net.init(config, jax.random.key(0)), config)
    assert published.load_hf(tmp_path / "a", seq_len=7, dropout=0.1)[1].seq_len == 7
    for name in ("rope_theta", "layers", "published"):
        with pytest.raises(ConfigError, match=f"{name} follows from its config.json"):
            published.load_hf(tmp_path / "a", **{name: 3})


def test_a_folder_made_from_a_gguf_file(tmp_path):
    """A refusal of the key with a file's name that transformers adds to config.json."""
    save(tmp_path / "m", {**LLAMA, "_model_name_or_path": "Smollm2 135M"})
    published.load_hf(tmp_path / "m")


@pytest.mark.parametrize("model_type, option", [
    ("llama", "rope_theta"), ("llama", "norm_eps"), ("qwen2", "rope_theta"),
    ("qwen2", "attn_scale")])
def test_an_option_that_was_changed_is_not_exported(tmp_path, model_type, option):
    """Another rope_theta set after loading, and an export with the old one."""
    save(tmp_path / "m", {**LLAMA, "model_type": model_type})
    params, config = published.load_hf(tmp_path / "m")
    config = dataclasses.replace(config, seq_len=9, dropout=0.1)
    published.save_hf(tmp_path / "a", params, config)
    with pytest.raises(ConfigError, match=f"{option} is 3.0, but the config.json to write"):
        published.save_hf(tmp_path / "b", params, dataclasses.replace(config, **{option: 3.0}))


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_ids_that_are_not_in_the_vocabulary(tmp_path, model_type):
    """An id outside the vocabulary, for which a lookup returns padding or the last row."""
    save(tmp_path / "m", {**LLAMA, "model_type": model_type})
    params, config = published.load_hf(tmp_path / "m")
    network = network_of(config)
    for wrong in (131, 135, 10**6, -1):
        for array in (np.array, jnp.array):
            with pytest.raises(ConfigError, match=f"the id {wrong} is not in the vocabulary: exp"):
                network.forward(params, array([[1, wrong]]), config)
    assert network.forward(params, np.array([[0, 130]]), config).shape == (1, 2, 131)


@pytest.mark.parametrize("changes, network", [
    ({}, "decoder"), (dict(model_type="mistral", sliding_window=None), "decoder"),
    (dict(model_type="mistral", sliding_window=8), "transformer"),
    (dict(attention_bias=True), "transformer"), (dict(hidden_act="gelu"), "transformer"),
    (dict(model_type="mixtral", num_local_experts=4), "decoder"),
    (dict(model_type="qwen2"), "transformer"),
    (dict(rope_scaling=dict(rope_type="linear", factor=2.0)), "decoder"),
    (dict(rope_scaling=dict(rope_type="dynamic", factor=2.0)), "transformer")])
def test_a_folder_goes_to_the_network_that_has_its_options(tmp_path, changes, network):
    """An option that the plain decoder lacks, silently dropped."""
    record = dict(model_type="llama", hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                  num_key_value_heads=2, intermediate_size=32, vocab_size=11) | changes
    (tmp_path / "config.json").write_text(json.dumps(record))
    assert published.network_of_folder(tmp_path).name == network
    assert network_of(published.hf_config(tmp_path)).name == network
    if network != "decoder":
        with pytest.raises(ConfigError):
            folders.hf_config(model.NETWORK, tmp_path)
