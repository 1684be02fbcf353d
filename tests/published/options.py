"""What becomes of published folders, option by option: option_cases.py's cases, each read by
transformers and by us.

    python -m tests.published.options [--family NAME] [--base NAME] [--every N] [--show KIND,...]

counts, for each family, what becomes of its cases, and prints those of the kinds that --show names:

    equal     the same logits, and what we export of it transformers reads with the same logits
    refused   by us, in one line
    rejected  by transformers itself: an error, or arrays missing or of another shape, which it
              would make at random
    theirs    transformers' own fault, or what its versions 4 and 5 read differently (their_doing)
    wrong     other logits, silently; or an export that transformers reads otherwise
    crashed   an error of ours that is no ConfigError of one line

The installed version of transformers is the reference. What it computes depends on it: a folder
that version 5 writes may say what version 4 does not know.
"""

import argparse
import collections
import functools
import json
import os
import shutil
import tempfile
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import published
from published import sam_masks
from tests.common import peer
from tests.published import test_masks
from tests.published.option_cases import bases, cases_of, changed, speaks_5
from tests.published.test_families import as_theirs, saved
from tests.published.test_two_towers import IMAGE
from zigzag.core.errors import ConfigError
from zigzag.parallel.network import network_of

KINDS = ("equal", "refused", "rejected", "theirs", "wrong", "crashed")
# Tolerances, as shares of the largest logit. Rounding in two float32 programs gives 1e-6 to 2e-5
# here; the smallest fault of an option that was found is 1e-2.
CLOSE = 1e-4
SAME = 1e-6     # between two runs of one program
MOST = 1200     # characters of a refusal


class Outcome(NamedTuple):
    kind: str
    text: str = ""


# -------------------------------------------------------------------------------------------
# Folders

def quiet(function):
    """`function` with the messages of transformers and torch silenced."""
    @functools.wraps(function)
    def call(*args, **kwargs):
        torch, transformers = peer("torch"), peer("transformers")
        torch.set_num_threads(1)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function(*args, **kwargs)

    return call


def _attention(base):
    # (transformers' eager attention adds ALiBi to falcon's scores twice, in 4.57.6 and 5.24.)
    return dict(attn_implementation="sdpa" if base.family == "falcon" else "eager",
                dtype=peer("torch").float32)


def _make(base, folder, edits):
    """Save a model that transformers makes from these fields, with all numbers random."""
    torch, transformers = peer("torch"), peer("transformers")
    config = base.config()
    fields, whole = dict(base.fields), config.to_dict()
    for path, _ in edits:
        first = path.split(".")[0]
        if "." in path and first not in fields and whole.get(first) is not None:
            fields[first] = whole[first]
    if any(path.startswith("rope_parameters") for path, _ in edits):
        fields = {k: v for k, v in fields.items() if k not in ("rope_theta", "rope_scaling")}
    fields = changed(fields, edits)
    config = base.config(**fields)
    names = dict(edits).get("architectures")
    name = names[0] if isinstance(names, list) and names else base.model
    torch.manual_seed(1)
    model = getattr(transformers, name)._from_config(config, **_attention(base))
    saved(test_masks.with_slow_waves(model) if base.kind == "masks" else model, folder)


HELD = []


@functools.cache
def home():
    """A folder for all folders of this process."""
    folder = tempfile.TemporaryDirectory(prefix="zigzag-options-")
    HELD.append(folder)     # (it is removed when this process ends)
    return Path(folder.name)


@functools.cache
def folder_of_base(name):
    folder = home() / name.replace(" ", "-")
    _make(bases()[name], folder, ())
    return folder


def make_folder(case):
    """The folder of a case, in the form in which models are published."""
    folder = home() / "case"
    shutil.rmtree(folder, ignore_errors=True)
    if case.way == "made":
        _make(bases()[case.base], folder, case.edits)
        return folder
    source = folder_of_base(case.base)
    folder.mkdir()
    os.link(source / "model.safetensors", folder / "model.safetensors")
    record = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(changed(record, case.edits)))
    return folder


# -------------------------------------------------------------------------------------------
# What both compute

def _ids(rng, shape, low=2):
    return rng.integers(low, 60, shape).astype(np.int32)    # (below half of the vocabularies)


def batch_of(base, config):
    """A model's inputs, under our names. Pictures have the size in its configuration."""
    rng, rows, time = np.random.default_rng(0), 2, 24
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", 0)
    channels = getattr(vision, "num_channels", 3)
    wide = size if isinstance(size, int) else max(size)
    pictures = rng.normal(size=(rows, channels, wide, wide)).astype(np.float32) if wide else None
    mask = (np.arange(time) < np.array([[time], [11]])).astype(np.float32)
    if base.kind in ("picture", "swin", "sam"):
        return {"source": pictures}
    if base.kind == "masks":
        batch = test_masks.batch_for(config.vision_config.to_dict(), rows=rows)
        return {name: a for name, a in batch.items() if name != "targets"}
    if base.kind == "decoder":
        return {"tokens": _ids(rng, (rows, time))}
    if base.kind == "encoder":
        tokens = _ids(rng, (rows, time), 4)
        padding = base.config().pad_token_id
        tokens[0, 2:9:3], tokens[0, 9:14] = padding, range(5)
        tokens = np.where(mask, tokens, padding).astype(np.int32)
        types = max(1, min(2, config.type_vocab_size))
        batch = {"tokens": tokens, "mask": mask, "token_types": _ids(rng, (rows, time)) % types}
        if getattr(config, "use_task_id", False):
            tasks = max(1, min(2, config.task_type_vocab_size))
            batch["task_types"] = _ids(rng, (rows, time)) % tasks
        return batch
    if base.kind == "pair":
        tokens = _ids(rng, (rows, time))
        if base.family == "whisper":
            frames = rng.normal(size=(rows, config.num_mel_bins, 2 * config.max_source_positions))
            return {"tokens": tokens, "source": frames.astype(np.float32)}
        return {"tokens": tokens, "source": _ids(rng, (rows, 17)),
                "source_mask": (np.arange(17) < np.array([[17], [12]])).astype(np.float32)}
    # (No id of an end, given or edited, stands in the padding, whose vectors are no one's.)
    tokens, time = _ids(rng, (rows, 16), 20), 16
    mask = mask[:, :time]
    if base.kind == "clip":
        end = base.fields["text_config"]["eos_token_id"]
        tokens[range(rows), [time - 1, 10]] = 130 if end == 2 else end
        tokens[0, -3] = tokens[0, -1]
    else:
        tokens[:, 1:1 + config.num_query_tokens] = getattr(
            config, "image_token_id", None) or getattr(config, "image_token_index", None) or IMAGE
        mask = np.ones_like(mask)
        if config.text_config.model_type == "t5":
            return {"tokens": tokens[:, ::-1] % 60, "source_tokens": tokens, "source_mask": mask,
                    "source": pictures}
    return {"tokens": tokens, "mask": mask, "source": pictures}


THEIR_NAMES = dict(tokens="input_ids", mask="attention_mask", token_types="token_type_ids",
                   task_types="task_type_ids", source="pixel_values",
                   source_mask="attention_mask")


def _their_inputs(base, batch):
    names = dict(THEIR_NAMES)
    if "source_tokens" in batch:
        names |= dict(tokens="decoder_input_ids", source_tokens="input_ids")
    if base.kind == "pair":
        names |= dict(tokens="decoder_input_ids", source="input_ids")
        if base.family == "whisper":
            names["source"] = "input_features"
    return as_theirs(batch, names)


def seen(base, output, batch):
    """The output with zeros for tokens of padding, which nobody defines."""
    if base.kind in ("encoder", "blip2") and output.ndim == 3 and "mask" in batch:
        return output * batch["mask"][..., None]
    return output


def _class_of(base, record):
    """The class that reads a folder: the one that it names, if that is of an encoder or a picture,
    or of a decoder with classes."""
    transformers = peer("transformers")
    names = record.get("architectures")
    name = names[0] if isinstance(names, list) and names else base.model
    if base.kind == "decoder":
        has_classes = str(name).endswith("ForSequenceClassification")
        return getattr(transformers, name) if has_classes else transformers.AutoModelForCausalLM
    name = name if base.kind in ("encoder", "picture", "swin", "sam", "masks") else base.model
    return getattr(transformers, name if hasattr(transformers, str(name)) else base.model)


class Random(Exception):
    """Raised for arrays that a folder lacks, which transformers makes at random."""


# (A constant, which transformers makes where it is missing.)
MADE = ("relative_position_index",)


def theirs(base, folder, batch=None, strict=False):
    """(transformers' output for a folder, the batch). With `strict`, no array may be left over."""
    torch = peer("torch")
    record = json.loads((folder / "config.json").read_text())
    model, report = _class_of(base, record).from_pretrained(
        folder, output_loading_info=True, **_attention(base))
    report = {k: [n for n in names if not str(n).endswith(MADE)] for k, names in report.items()}
    if not strict:
        report["unexpected_keys"] = []
    if any(report.values()):
        raise Random(f"{ {k: sorted(map(str, v))[:3] for k, v in report.items() if v} }")
    if batch is None:
        batch = batch_of(base, model.config)
    with torch.no_grad():
        if base.kind == "masks":
            masks, scores = test_masks.all_of_theirs(model.eval(), batch)
            return _with_scores(masks.numpy(), scores.numpy()), batch
        elif base.kind == "decoder":
            # (Row by row: one with classes takes several only if its config names a padding.)
            rows = _their_inputs(base, batch)["input_ids"]
            return torch.cat([model.eval()(row[None]).logits for row in rows]).numpy(), batch
        else:
            out = model.eval()(**_their_inputs(base, batch))
    for name in ("logits", "prediction_logits", "logits_per_image", "last_hidden_state"):
        if getattr(out, name, None) is not None:
            return seen(base, getattr(out, name).numpy(), batch), batch
    return seen(base, out[0].numpy(), batch), batch


def _with_scores(masks, scores):
    """Masks [B, P, A, ...] and scores [B, P, A] in one array, at scales that a model has."""
    join = np if isinstance(masks, np.ndarray) else jnp
    return join.concatenate([masks.reshape(*scores.shape[:2], -1), scores], -1)


PROGRAMS = {}


def ours(base, params, config, batch):
    """Our logits."""
    first = "tokens" if "tokens" in batch else "source"
    rest = {k: a for k, a in batch.items() if k != first}
    program = _program(config, params, batch[first], rest)
    return seen(base, np.asarray(program(params, batch[first], rest)), batch)


def _program(config, *args):
    """The compiled program, made once for all configurations that compute the same: compiling is
    most of the time. (The networks of KINDS look into config.json as they compute; of those the
    lowered program is compared.)"""
    network, key = network_of(config), key_of(config)
    if network not in published.KINDS.values() and key in PROGRAMS:
        return PROGRAMS[key]
    def run(params, x, rest):
        if network is sam_masks.NETWORK:
            return _with_scores(*sam_masks.segment(params, {"source": x, **rest}, config))
        return network.forward(params, x, config, **rest)

    lowered = jax.jit(run).lower(*args)
    text = lowered.as_text()
    if text not in PROGRAMS:
        PROGRAMS[text] = lowered.compile()
    PROGRAMS[key] = PROGRAMS[text]
    return PROGRAMS[text]


def key_of(config):
    """A configuration as text, without the config.json in it."""
    fields = {k: repr(v) for k, v in vars(config).items() if k != "published"}
    return json.dumps([network_of(config).name, fields,
                       json.loads(config.published or "{}").get("model_type")], sort_keys=True)


def far(got, want):
    """The largest difference, as a share of the largest number."""
    if got.shape != want.shape:
        return float("inf")
    return float(np.abs(got - want).max() / max(np.abs(want).max(), 1e-9))


# -------------------------------------------------------------------------------------------
# The outcome of a case

def their_doing(case):
    """Why a different result is transformers' fault: keys that its version 5 writes and obeys, as
    we do, and that its version 4 ignores."""
    if not speaks_5() and any(name.endswith("scale_decoder_outputs") for name, _ in case.edits):
        return "version 4 does not know whether T5 scales its outputs: it does where it is tied"
    return ""


@quiet
def outcome_of(case):
    """The outcome of a case."""
    base = bases()[case.base]
    try:
        folder = make_folder(case)
        want, batch = theirs(base, folder)
    except Exception as e:      # (of any kind: torch's, json's, huggingface_hub's)
        return _not_read(base, case, f"{type(e).__name__}: {e}")
    if not np.isfinite(want).all():
        return Outcome("theirs", "its logits are not finite")
    found = _judge(base, folder, want, batch)
    if found.kind == "wrong":
        if why := their_doing(case):
            return found._replace(kind="theirs", text=why)
    return found


def _not_read(base, case, text):
    """A folder that transformers does not read may be refused, or read. It must not crash."""
    folder = home() / "case"
    if (folder / "config.json").exists() and (folder / "model.safetensors").exists():
        try:
            published.load_hf(folder)
        except ConfigError as e:
            if fault := not_one_line(e):
                return Outcome("crashed", fault)
        except Exception as e:
            return Outcome("crashed", f"{type(e).__name__}: {e} (and transformers: {text[:200]})")
    return Outcome("rejected", text)


def not_one_line(error):
    if "\n" in str(error) or len(str(error)) >= MOST:
        return f"a refusal that is not one short line: {error!r}"
    return ""


@quiet
def theirs_of(case):
    """The logits of transformers alone."""
    base = bases()[case.base]
    return theirs(base, make_folder(case))[0]


def _judge(base, folder, want, batch):
    out = home() / "export"
    shutil.rmtree(out, ignore_errors=True)
    try:
        params, config = published.load_hf(folder)
        error = far(ours(base, params, config, batch), want)
        if not error <= CLOSE:
            return Outcome("wrong", f"logits differ: {error:.2g} of the largest")
        published.save_hf(out, params, config)
    except ConfigError as e:
        fault = not_one_line(e)
        return Outcome("crashed" if fault else "refused", fault or str(e).replace(
            f"{home()}/case", "FOLDER"))
    except Exception as e:
        return Outcome("crashed", f"{type(e).__name__}: {e}")
    try:
        error = far(theirs(base, out, batch, strict=True)[0], want)
    except Exception as e:
        return Outcome("wrong", f"export: {type(e).__name__}: {e}")
    if not error <= CLOSE:
        return Outcome("wrong", f"export: logits differ: {error:.2g} of the largest")
    return Outcome("equal")


def run(case):
    """outcome_of, with room for more."""
    if len(PROGRAMS) > 200:
        PROGRAMS.clear()
        jax.clear_caches()
    return outcome_of(case)


def assert_equal(base, folder, want, batch, out):
    """Assert that a folder gives the same logits here, and there when it is exported. Returns our
    configuration."""
    params, config = published.load_hf(folder)
    assert far(ours(base, params, config, batch), want) < CLOSE
    published.save_hf(out, params, config)
    again, _ = theirs(base, out, batch, strict=True)
    assert far(again, want) < CLOSE
    return config


# -------------------------------------------------------------------------------------------
# Which cases

def chosen(name, every=1, part=0):
    """A base itself, and every `every`-th of its cases."""
    return [case for case in cases_of(name) if not case.edits or case.number % every == part]


# -------------------------------------------------------------------------------------------
# For a person

def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m tests.published.options")
    parser.add_argument("--family", default="", help="a model_type; all, if none is given")
    parser.add_argument("--base", default="", help="one of a family's tiny models")
    parser.add_argument("--every", type=int, default=1, help="one case in so many")
    parser.add_argument("--show", default="wrong,crashed", help=f"of {', '.join(KINDS)}")
    options = parser.parse_args(argv)
    counts, begin = collections.defaultdict(collections.Counter), time.time()
    for name, base in bases().items():
        if options.family in ("", base.family) and options.base in ("", name):
            for case in chosen(name, options.every):
                found = run(case)
                counts[base.family][found.kind] += 1
                if found.kind in options.show.split(","):
                    print(f"{found.kind:8} {case}\n         {found.text}"[:MOST], flush=True)
    print(f"{'':18}" + "".join(f"{kind:>10}" for kind in KINDS))
    for family, count in [*counts.items(), ("all", sum(counts.values(), collections.Counter()))]:
        print(f"{family:18}" + "".join(f"{count[kind]:10}" for kind in KINDS))
    print(f"{sum(map(sum, (c.values() for c in counts.values())))} cases in "
          f"{time.time() - begin:.0f} s")


if __name__ == "__main__":
    main()
