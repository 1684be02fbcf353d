"""Every option of every published family, varied one at a time: our results for the folder equal
transformers', or one line says why not. options.py explains and prints the outcomes of cases;
option_cases.py makes the cases."""

import collections
import json

import pytest

import published
from published import llama, record
from published.llama import FAMILIES
from tests.common import full
from tests.published import options
from tests.published.option_cases import (
    BASES,
    FOREIGN,
    REMOVED,
    Case,
    bases,
    changed,
    rope_specs,
    speaks_5,
    values_of,
)
from zigzag.core.errors import ConfigError

EVERY = 240     # (every 240th case, and all causes, take less than a minute on two cores)
PARTS = 3       # parts of a base's cases, so that workers have about equal work
# The least share of equal results among folders that transformers writes and reads. A lower share
# would mean that we refuse models that we could compute. (It is counted in a part of the cases of a
# base, some 50 of these folders, and its standard deviation there is 0.07. The lowest is 31 of 53,
# with transformers 5.24, whose rope_parameters take many values that mean nothing.)
LEAST_EQUAL = 0.55


# -------------------------------------------------------------------------------------------
# Faults that were once silent, by cause

NESTED = {"full_attention": dict(rope_type="default", rope_theta=700.0),
          "sliding_attention": dict(rope_type="default", rope_theta=70.0)}


def found():
    """The cases of each cause, beside those bases that are cases by themselves: T5 1.1, and BERT
    and others untied."""
    new = speaks_5()
    specs = rope_specs(6)
    long = [s for s in specs if s and s.get("rope_type") == "longrope" and len(s) > 4]
    yarn = next(s for s in specs if s and s.get("rope_type") == "yarn" and len(s) == 3)
    llama3 = next(s for s in specs if s and s.get("rope_type") == "llama3" and len(s) == 5)
    over = ("original_max_position_embeddings", 8)
    edits = [("llama", [("rope_scaling", spec)]) for spec in long]
    edits += [("llama", [("rope_scaling", spec), over]) for spec in (yarn, llama3)]
    edits += [("llama", [("rope_scaling", {**yarn, "attention_factor": 0.0})]),
              ("llama", [("rope_scaling", {**llama3, "low_freq_factor": 4.0,
                                           "high_freq_factor": 1.0})]),
              ("llama", [("rope_scaling", {**yarn, "short_factor": [1.0] * 6,
                                           "long_factor": [2.0] * 6})]),
              ("llama", [("rope_scaling", dict(rope_type="linear", type="dynamic", factor=4.0))]),
              ("mistral", [("sliding_window", 0)]), ("gpt_neo", [("window_size", 0)]),
              ("gpt_neox", [("rotary_pct", 0.0)]), ("deepseek_v3", [("head_dim", 1)]),
              ("gemma3", [("attn_logit_softcapping", 20.0)]),
              ("bloom", [("slow_but_exact", True), ("pretraining_tp", 2)]),
              ("gpt_neo", [("attention_layers", ["local"] * 4)]),
              ("t5", [("tie_word_embeddings", True), ("scale_decoder_outputs", False)])]
    if new:
        edits += [(name, [("rope_parameters", dict(
            rope_type="default", rope_theta=500.0, partial_rotary_factor=0.5))])
            for name in ("llama", "mistral", "qwen2", "qwen3", "gemma2", "falcon 7b", "mixtral",
                         "qwen3_moe")]
        edits += [("phi3", [("rope_parameters", {"rope_theta": 500.0, **spec})])
                  for spec in rope_specs(3) if spec and spec.get("rope_type") == "longrope"
                  and len(spec) > 4]
        edits += [("gemma3", [("rope_parameters.full_attention.partial_rotary_factor", 0.5)]),
                  ("llama", [("rope_parameters", NESTED)]),
                  ("gemma3", [("rope_parameters", dict(rope_type="default", rope_theta=500.0))]),
                  ("gemma3", [("rope_parameters", NESTED),
                              ("rope_scaling", dict(rope_type="linear", factor=4.0))])]
    # (What the compiled function looks up, not the fields.)
    edits += [(name, [("text_config.eos_token_id", REMOVED)]) for name in ("clip", "blip2")]
    return [Case(name, tuple(each), "edited") for name, each in edits]


# -------------------------------------------------------------------------------------------
# All cases

def assert_outcomes(cases):
    """Assert that no case is silently wrong or crashes, that an unedited model loads, and that
    enough others do."""
    kinds, written, bad = collections.Counter(), collections.Counter(), []
    for case in cases:
        got = options.run(case)
        kinds[got.kind] += 1
        written[got.kind] += case.way == "made"
        if got.kind in ("wrong", "crashed") or not case.edits and got.kind != "equal":
            bad.append(f"{got.kind}: {case}: {got.text}")
    read = written["equal"] + written["refused"]
    if read > 20 and written["equal"] < LEAST_EQUAL * read:
        bad.append(f"of {read} folders by transformers only {written['equal']} are equal")
    assert not bad, f"{len(bad)} of {len(cases)} cases ({dict(kinds)}):\n" + "\n".join(bad)


# (The options of the pinned transformers do not change: in .ci/run only the newest is asked.)
def a_third_of(names):
    """In .ci/run every third, beside transformers 5; in .ci/full all, beside both."""
    return [name if speaks_5() and n % 3 == 0 else full(name) for n, name in enumerate(names)]


@pytest.mark.parametrize("name", a_third_of(BASES))
def test_a_sample_of_all_options(name):
    """A key of config.json that changes what transformers computes and that we do not read, or read
    otherwise; a key that a new version of transformers writes into each config.json (the model as
    it is then fails)."""
    wanted = {str(case): case for case in options.chosen(name, EVERY)}
    wanted |= {str(case): case for case in found() if case.base == name}
    assert_outcomes([*wanted.values()])


@pytest.mark.parametrize("name, part", [full(name, part) for name in BASES
                                        for part in range(PARTS)])
def test_all_options(name, part):
    """The faults of the sample test, in cases that nobody thought of."""
    assert_outcomes(options.chosen(name, PARTS, part))


# -------------------------------------------------------------------------------------------
# Keys that are not read

WITHIN = ("rope_parameters", "rope_scaling", "text_config", "vision_config", "qformer_config")


def record_of(base):
    """config.json of a base, as transformers writes it."""
    config = base.config()
    config.architectures = [base.model]
    return json.loads(config.to_json_string())


@pytest.mark.parametrize("value", [1, None, {"a": 1}], ids=str)
@pytest.mark.parametrize("name", BASES)
def test_a_key_that_nobody_reads_is_refused(name, value):
    """A fork's option in a config.json, at the top or in a part: the model would load, and compute
    something else."""
    base = bases()[name]
    record, families = record_of(base), {base.family: EACH_FAMILY[base.family]}
    llama.fields_of(record, families)
    for path in ["zz", *(f"{part}.zz" for part in record if part in WITHIN and record[part])]:
        if path.startswith("rope") and record.get("alibi"):
            continue        # (of a Falcon without rotary positions)
        there = path.replace("parameters", "scaling")       # (the form in which it is read)
        with pytest.raises(ConfigError, match=f"not known for model_type .*'{there}' ") as e:
            llama.fields_of(changed(record, [(path, value)]), families)
        assert "\n" not in str(e.value)


# -------------------------------------------------------------------------------------------
# Neutral keys

EACH_FAMILY = {name: family for names in (FAMILIES, *(n.families for n in published.KINDS.values()))
               for name, family in names.items() if name != "chatglm"}


def neutral_keys(name):
    """The keys of a family's config.json that are listed as neutral: they change no result."""
    return sorted({*getattr(EACH_FAMILY[name], "neutral", ()),
                   *getattr(record, "NEUTRAL", ())})


def is_unread(case, name):
    """Whether our code accepts the key of a case without reading it. (Some families read a key only
    in some models.)"""
    record = json.loads((options.make_folder(case) / "config.json").read_text())
    try:
        _, r = llama.read_record(record, EACH_FAMILY[name])
        r.refuse_unread(EACH_FAMILY[name].neutral)
    except (TypeError, ValueError, AttributeError, ArithmeticError, IndexError):
        return False        # (refused, as in llama.fields_of)
    paths = [owner.at + key for owner, key in r.unread()]
    return any(path == case.key or path.startswith(f"{case.key}.") for path in paths)


def changes_of(base, keys):
    """Cases of these keys: of what the configuration says now other values, and of others some."""
    config = base.config().to_dict()
    parts = [name for name in config if name.endswith("_config") and config[name]]
    for key in [*keys, *(f"{part}.{key}" for part in parts for key in keys if "." not in key)]:
        inside = config
        for part in key.split("."):
            inside = inside.get(part) if isinstance(inside, dict) else None
        for value in [*values_of(key, inside), *FOREIGN.get(key, ())]:
            yield Case(base.name, ((key, value),), "edited")


def assert_neutral(name, every):
    """These keys change no logits of transformers."""
    bad, rejected = [], collections.Counter()
    for base in bases().values():
        if base.family != name:
            continue
        whole = options.theirs_of(Case(base.name, (), "made"))
        for case in changes_of(base, neutral_keys(name)):
            if case.number % every or not is_unread(case, base.family):
                continue
            try:
                got = options.theirs_of(case)
            except Exception as e:      # (of any kind: what transformers rejects)
                rejected[case.key] += 1
                print(f"rejected: {case}: {type(e).__name__}: {e}"[:200])
                continue
            error = options.far(got, whole)
            if error > options.SAME:
                bad.append(f"{case}: logits differ: {error:.2g} of the largest")
    print(f"{name}: rejected by transformers: {dict(rejected)}")
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("name", a_third_of(EACH_FAMILY))
def test_some_neutral_keys_are_neutral(name):
    """A key on the list of those that we need not read, which changes what transformers computes.
    """
    assert_neutral(name, 96)


@pytest.mark.parametrize("name", [full(name) for name in EACH_FAMILY])
def test_neutral_keys_are_neutral(name):
    """A key on the list of neutral ones that changes what transformers computes."""
    assert_neutral(name, 1)
