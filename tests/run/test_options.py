"""Every option acts, in every mode of train.py and on every kind of data, or it is refused; and 0
is 0, not "not given"."""

import ast
import json
import re

import numpy as np
import pytest

import train
from tests.common import SMALL, SMALL_PAIRS, continued, digit_pairs, refused, refuses
from tests.helpers import ROOT, learn, make, run_of, tokens_of
from tests.parts import of_the_whole
from tests.run.test_schedules import rates
from zigzag.commands import command_line
from zigzag.core.options import comments, options
from zigzag.disk import checkpoint
from zigzag.disk.checkpoint import FORMAT
from zigzag.parallel.saved import load_run
from zigzag.run import schedules
from zigzag.run.continuing import record_of

KNOWN = options(train.Config)
# A value for each option that is not its default, as words of a command line.
VALUES = {
    "data": "a", "held_out": "a", "mix": "1", "weight_field": "w", "pack": "stream",
    "field": "f", "fields": "a b",
    "steps": "7", "epochs": "1", "tokens": "9", "minutes": "1", "depth": "2", "lr": "0.5",
    "warmup": "2", "decay": "linear", "cooldown": "0.5",
    "decay_steps": "5", "first_share": "0.1", "final_share": "0.1", "weight_decay": "0.2",
    "clip": "2", "optimizer": "muon", "beta1": "0.8", "beta2": "0.8", "accumulate": "2",
    "seed": "1", "batch": "16", "max_skipped": "3", "model": "tiny", "init_from": "run",
    "shards": "1", "mesh": "data=8", "zero": "2", "override": "wq=-,-,-", "fsdp_min": "9",
    "collectives": "compiler", "check": "true", "out": "run", "change": "lr", "save_every": "3",
    "keep": "2",
    "log": "wandb", "verify": "off", "eval_every": "3", "eval_first": "true", "eval_tokens": "99",
    "metric": "f1", "beams": "2", "best": "smallest:eval_loss",
    "sample_temperature": "0.5", "bench": "true", "topology": "v5e:2x2", "slices": "2",
    "plot": "run",
    "profile": "2", "edited": "true", "ema": "0.9", "eval_batch": "16",
    "save": "a.png", "coordinator": "a:70", "processes": "2", "process_id": "0",
    "distributed": "true", "patience": "9", "verbose": "true",
    "find_nan": "true", "report": "run", "against": "HEAD", "accept": "0.01",
    "send_dtype": "float8", "initial_scale": "8"}
# {kind of data: the options that only some kinds use, and this one does}
MODES = {
    "text": {"tokens", "mix", "field", "weight_field", "pack", "eval_tokens",
             "sample_temperature"},
    "pairs": {"fields", "metric", "beams"},
    "arrays": {"metric"}}
OF_A_KIND = set().union(*MODES.values())
OF_A_RUN = {"change", "save_every", "keep", "log", "verify", "eval_every", "eval_first",
            "eval_batch", "eval_tokens", "held_out", "metric", "beams", "best",
            "sample_temperature", "check", "profile", "find_nan", "accept", "max_skipped",
            "minutes"}
NOT_USED = {"bench": OF_A_RUN | {"topology", "against"}, "topology": OF_A_RUN | {"bench"},
            "against": OF_A_RUN | {"bench"}}


@of_the_whole
def test_the_table_has_every_option():
    """A new option that no test has asked about."""
    assert VALUES.keys() == KNOWN.keys()


@pytest.mark.parametrize("kind", MODES)
@pytest.mark.parametrize("name", KNOWN)
def test_an_option_acts_on_a_kind_of_data_or_is_refused(kind, name):
    """--pack or --mix that a run on pairs lists among its options, and does not use."""
    given, config = {name: VALUES[name]}, make()
    if name in OF_A_KIND - MODES[kind]:
        with refuses(f"--{name} {VALUES[name]}: no effect on {kind}"):
            command_line.check_used(given, config, kind)
    else:
        command_line.check_used(given, config, kind)


@pytest.mark.parametrize("command", NOT_USED)
@pytest.mark.parametrize("name", KNOWN)
def test_an_option_acts_beside_a_command_or_is_refused(command, name):
    """--bench --save_every 5, of which nothing is saved."""
    words = [f"--{command}", VALUES[command], f"--{name}", *VALUES[name].split()]
    if name in ("plot", "report", command):     # (commands of their own; a flag given twice)
        return
    if name in NOT_USED[command]:
        with refuses("no effect"):
            command_line.read_flags(words)
    else:
        assert name in command_line.read_flags(words)


@of_the_whole
@pytest.mark.parametrize("kind", MODES)
def test_what_a_kind_of_data_reads_is_what_is_declared(kind):
    """An option that is declared for a kind whose file does not read it, or read without being
    declared."""
    file = "zigzag/commands/text.py" if kind == "text" else f"tasks/{kind}.py"
    nodes = ast.walk(ast.parse((ROOT / file).read_text()))
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name) and node.value.id == "config"}
    declared = {name for name, option in KNOWN.items() if kind in option.of}
    # (--tokens becomes steps as soon as it is read.)
    assert read & OF_A_KIND == declared - {"tokens"} and declared == MODES[kind]


def test_options_without_effect_are_one_line(tmp_path, capsys):
    """A run that lists an option, finishes, and has not used it."""
    pairs = digit_pairs(tmp_path / "pairs.jsonl", 40, digits=3)
    before = sorted(tmp_path.iterdir())
    for words, says in (
            ((*SMALL_PAIRS, "--data", pairs, "--held_out", tmp_path / "nosuchfile.jsonl"),
             "nosuchfile.jsonl: no such file"),
            ((*SMALL, "--eval_every", 0, "--eval_tokens", 9), "--eval_tokens 9: no effect"),
            ((*SMALL, "--eval_every", 0, "--best", "smallest:eval_loss"), "--best smallest:"),
            ((*SMALL, "--first_share", 0.1, "--warmup", 1), "warmup is 1 update"),
            ((*SMALL, "--decay_steps", 9, "--decay", "constant"), "--decay_steps 9: --decay"),
            ((*SMALL, "--plot", tmp_path, "--steps", 3), "--steps 3 and --out")):
        assert says in refused(capsys, *words, "--out", tmp_path / "out")
        assert sorted(tmp_path.iterdir()) == before


# -------------------------------------------------------------------------------------------
# Zero

def test_no_warmup_is_no_warmup():
    """--warmup 0 that is taken for a twentieth of the steps; a rate that starts below its peak."""
    config = make(warmup=0, steps=20, lr=0.01)
    assert config.warmup == 0 and rates(config)[0] == np.float32(0.01)
    assert np.array_equal(rates(config), rates(make(warmup=1, steps=20, lr=0.01)))
    assert make(warmup=0.0, steps=20).warmup == 0
    # (Longer, as if it had begun so.)
    assert schedules.fixed_from(config) == 20
    zero = make(warmup=4, steps=20, lr=0.01, first_share=0.0)
    assert rates(zero)[0] == 0 and rates(zero)[3] == np.float32(0.01)
    flat = make(warmup=0, steps=20, lr=0.01, decay="wsd", cooldown=0)
    assert set(rates(flat)) == {np.float32(0.01)}
    assert not rates(make(lr=0.0, steps=20)).any() and make(lr=0.0).lr == 0


@pytest.mark.full
def test_zero_evaluations_and_saves_are_none(tmp_path):
    """--eval_every 0 that evaluates at every fifth of the steps, or at the end; --save_every 0 that
    does not save at the end."""
    run = tmp_path / "run"
    config = make(steps=6, eval_every=0, save_every=0, out=str(run), layers=1)
    rows, result = learn(config, held_out=tokens_of(config, 4, 5))
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6] and result.held_out is None
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["6"]
    rows, result = learn(config, held_out=tokens_of(config, 4, 5))      # asked for again
    assert not rows and result.step == 6 and result.held_out is None
    with refuses("--eval_tokens 0: must be a number of at least 1"):
        make(eval_tokens=0)


def test_sizes_keep_zero_for_derived():
    """A head of width 0."""
    config = train.parse(["--kv_heads", "0", "--head_dim", "0", "--d_ff", "0"])
    assert (config.network.kv_heads, config.network.head_dim, config.network.d_ff) == (8, 16, 384)


@pytest.mark.parametrize("found", [None, "1", FORMAT + 1])
def test_a_run_folder_of_another_format_is_refused(tmp_path, found):
    """A run of other code whose values are read as if they were ours."""
    record = record_of(run_of(steps=40)) | {"tokenizer": "bytes"}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(record))
    assert continued("--out", tmp_path).steps == 40
    if found is None:
        del record["format"]
    path.write_text(json.dumps(record if found is None else record | {"format": found}))
    for read in (lambda: continued("--out", tmp_path), lambda: load_run(tmp_path),
                 lambda: checkpoint.best_step(tmp_path)):
        with refuses("format .*reads and writes only format 1"):
            read()


def test_an_option_of_a_fork_needs_one_line():
    """An option that also has to stand in tables elsewhere, before it is recorded, compared,
    refused, shown, or may be changed."""
    source = (ROOT / "train.py").read_text()
    assert len(re.findall(r"\bclip\b", source)) <= 5       # (its declaration, and where it is used)
    others = [path for path in (ROOT / "zigzag").glob("[!t]*/*.py")
              if path.name != "more_options.py"
              and re.search(r"[\"']weight_decay[\"']|[\"']max_skipped[\"']", path.read_text())]
    assert not others
    assert all(comment.help and comment.group for comment in comments(train.Config).values())
