"""README and docs/: the names they use, their commands, and their code."""

import functools
import importlib
import os
import re
import shlex
import subprocess
import sys
import types

import pytest

import data
import model
import published
import train
from published.folders import Export
from tasks.examples import Pairs
from tests.helpers import KeepRows, mesh_of
from tests.parts import PARTS, of_the_whole
from tests.readme import PAGES, README, ROOT, block, blocks
from tests.top.test_links import PAGE, without_code
from zigzag.commands.command_line import config_of_flags, read_flags
from zigzag.core.errors import ConfigError
from zigzag.core.flags import change, from_flags, parse_flags
from zigzag.disk.corpus import Corpus
from zigzag.disk.tokenizers import Bytes
from zigzag.generate.prompts import GROUPS, Flags
from zigzag.parallel.network import NETWORKS


def inline_code(page):
    """What a page has between single backticks."""
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", without_code(page))]


# -------------------------------------------------------------------------------------------
# Names

# Files that a reader makes.
NOT_HERE = {"published/alibi.py"}


@of_the_whole
@PAGE
def test_files_and_names_exist(page):
    """A file, function or class that was moved, and that a page still sends readers to."""
    for code in inline_code(page):
        for path in re.findall(rf"(?<![\w./-])(?:zigzag|docs|{'|'.join(PARTS)})/[\w./]*", code):
            assert path in NOT_HERE or (ROOT / path).exists(), f"{page.name}: `{path}`"
        for name in re.findall(r"(?<![\w./])(?:model|shard|train|data|sample|published|zigzag)"
                               r"(?:\.[a-zA-Z_]\w*)+", code):
            if not (ROOT / name).exists() and not re.search(r"\.(json|NAME)$", name):
                assert resolves(name), f"{page.name}: `{name}`"
    for names, path in re.findall(r"((?:`\w+`(?:, | and )?)+) in `([\w/]+\.py)`",
                                  re.sub(r"\s+", " ", without_code(page))):
        text = (ROOT / path).read_text()
        for name in re.findall(r"\w+", names.replace(" and ", " ")):
            assert re.search(rf"^ *(def |class )?{name}\b|\b{name} *=", text, re.M), (
                f"{page.name}: `{name}` in `{path}`")


def resolves(name):
    """Whether a dotted name is one of our modules, or something in one."""
    first, *rest = name.split(".")
    found = importlib.import_module(first)
    for i, part in enumerate(rest):
        if not hasattr(found, part):
            try:
                importlib.import_module(".".join([first, *rest[:i + 1]]))
            except ImportError:
                return False
        found = getattr(found, part)
    return True


# -------------------------------------------------------------------------------------------
# Commands

# The published models in the pages' commands, each with the options of such a model.
SMOLLM2 = model.Config(vocab_size=64, heads=9, d_model=576)
FOLDERS = {"smollm2": SMOLLM2, "HuggingFaceTB/SmolLM2-135M-Instruct": SMOLLM2,
           "t5-folder": published.PRESETS["t5-small"], "vit-folder": published.PRESETS["vit-base"]}
PARSERS = {
    "train": lambda words: config_of_flags(read_flags(words)), "shard": train.parse,
    "sample": lambda words: Flags(**parse_flags(Flags, words, groups=GROUPS)[0]),
    "data": lambda words: from_flags(data.Flags(), words, "PATH"),
    "model": lambda words: from_flags(Export(), words),
}


def commands(page):
    """The commands of a page, as (file, words): in its blocks, and between backticks."""
    text = page.read_text().replace("\\\n", " ")
    for file, rest in re.findall(r"python (\w+)\.py\b([^\n`]*)", text):
        rest = re.split(r" && | \| |  # |\.\.\.", rest)[0]
        if rest.count('"') % 2:         # the end of a quotation around the command
            rest = rest.rpartition('"')[0]
        if file in PARSERS:
            yield file, shlex.split(rest)


SCRIPTS = sorted((ROOT / "recipes").glob("*.sh"))


# The page whose commands belong to edited copies: test_changes.py runs them.
CHANGES = ROOT / "docs/changes.md"


@pytest.mark.parametrize("page", sorted({*PAGES, *SCRIPTS} - {CHANGES}),
                         ids=lambda page: page.name)
def test_commands_parse(page, tmp_path, monkeypatch):
    """A flag that is no longer there, or a value that is refused by now."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(published, "hf_config", FOLDERS.get)
    for name in FOLDERS:
        (tmp_path / name).mkdir(parents=True)
    for file, words in commands(page):
        if any(re.fullmatch("[A-Z]+", word) for word in words):     # RUN, DIR: to fill in
            continue
        words = ["7" if word.startswith("$") else word for word in words]   # (in a script)
        try:
            PARSERS[file](words)
        except ConfigError as e:
            pytest.fail(f"{page.name}: python {file}.py {shlex.join(words)}\n{e}")
        except SystemExit as e:
            assert e.code == 0 and "--help" in words, words


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_recipes_are_scripts(script):
    """A recorded command that cannot be started, or goes on after one that failed."""
    assert os.access(script, os.X_OK) and "set -euo pipefail" in script.read_text()
    subprocess.run(["bash", "-n", script], check=True)


@functools.cache
def known_flags():
    configs = *(n.config for n in NETWORKS.values()), *(
        train.Config, Flags, data.Flags, Export)
    return {f for c in configs for f in c.__dataclass_fields__} | {"help"}


@of_the_whole
@PAGE
def test_flags_exist(page):
    """A flag between backticks that was removed."""
    for code in inline_code(page):
        if code.startswith(("python -m", "pytest")):
            continue
        for flag in re.findall(r"(?<![\w-])--(\w+)", code):
            assert flag in known_flags(), f"{page.name}: `{code}`"


# -------------------------------------------------------------------------------------------
# Code

# Each block of Python in a page by a text in it: the test that runs it.
RUN_BY = {
    "infer_specs(": "test_the_specs_of_the_rule",
    "def main():\n    config": "test_all.py",
    "shard.whole_time(y)": "test_the_task_by_hand",
    "shard.all_rows(texts": "run/test_custom_loss.py",
    "generator_loss": "tasks/test_custom_step.py",
    'GPT["phi"]': "published/test_families.py",
    "sam_masks.predict": "published/test_masks.py",
    "NETWORK = Network(": "test_a_network_of_your_own",
    "import data, train": "test_a_network_of_your_own",
    "digits.jsonl": "test_the_pairs_of_digits",
    "scored.jsonl": "test_the_weights_of_the_page",
    "sample.beam_search": "generate/test_load.py",
    "maps.append": "generate/test_load.py",
    "orbax": "top/test_commands.py",
}


@PAGE
def test_every_block_of_code_is_run(page):
    """An example that nothing runs, and that is wrong after some change."""
    for code in blocks(page):
        tests = [test for text, test in RUN_BY.items() if text in code]
        assert len(tests) == 1, f"{page.name}: {len(tests)} tests of\n{code}"


def run(code, name="example", **there):
    """The names that a block of code defines."""
    module = types.ModuleType(name)
    module.__dict__.update(there)
    exec(compile(code, name, "exec"), module.__dict__)
    return module


def test_the_specs_of_the_rule(capsys):
    """Specs that a page promises and the rule no longer finds."""
    code = block("docs/parallelism.md", "infer_specs(")
    wanted = code.rpartition("# ")[2]
    run(re.sub(r"jax.config.update.*", "", code))
    assert capsys.readouterr().out == wanted


def test_the_task_by_hand():
    """Logits of docs/tasks.md that are others than README's."""
    script = block("README.md", "train.fit")
    ours, by_hand = run(script), run(script + "import shard\n" + block(
        "docs/tasks.md", "shard.whole_time(y)"))
    config = train.parse(["--steps", "3", "--batch", "8", "--lr", "0.03", "--out", ""])

    def rows(task, mesh):
        kept = KeepRows([], [])
        train.fit(config, train.Task(task.init, task.collate, task.loss,
                                     examples=task.points(64, 0)), mesh=mesh_of(mesh), say=kept)
        return [row["loss"] for row in kept.rows if "loss" in row]

    assert rows(by_hand, "tensor=2") == pytest.approx(rows(ours, ""), rel=1e-5)


@pytest.mark.full
def test_a_network_of_your_own(tmp_path, monkeypatch):
    """The network of docs/networks.md, which is refused, or computes something else on a mesh."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text(README.read_text())
    alibi = types.ModuleType("published.alibi")
    monkeypatch.setitem(sys.modules, "published.alibi", alibi)
    monkeypatch.setattr(published, "alibi", alibi, raising=False)
    exec(block("docs/networks.md", "NETWORK = Network("), alibi.__dict__)
    monkeypatch.setitem(NETWORKS, "alibi", alibi.NETWORK)
    script, fit, found = run(block("docs/networks.md", "import data, train")), train.fit, []

    def on_meshes(config, task):
        for mesh in (config.mesh, ""):
            kept = KeepRows([], [])
            fit(change(config, steps=2, out="", mesh=mesh), task, say=kept, mesh=mesh_of(mesh))
            found.append([row["loss"] for row in kept.rows if "loss" in row])

    monkeypatch.setattr(train, "fit", on_meshes)
    script.main()
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_the_pairs_of_digits(tmp_path, monkeypatch):
    """Pairs in a form that --data does not read."""
    monkeypatch.chdir(tmp_path)
    run(block("docs/published.md", "digits.jsonl").replace("20000", "20"))
    pairs = Pairs("digits.jsonl", Bytes())
    assert len(pairs.train) + len(pairs.held_out) == 20


def test_the_weights_of_the_page(tmp_path, monkeypatch):
    """Lists of weights in a form that data.py refuses."""
    monkeypatch.chdir(tmp_path)
    run(block("docs/data.md", "scored.jsonl"))
    data.main("scored.jsonl --out tokens --vocab_size 0 --weight_field weight".split())
    corpus = Corpus("tokens")
    assert corpus.weights["train"][:13].tolist() == [0.5] * 5 + [1.0] * 7 + [0.5]


def test_the_recipes_are_in_their_table():
    """A recipe that the page does not name, or whose length it no longer has."""
    page = (ROOT / "docs/tasks.md").read_text()
    for path in (ROOT / "recipes").glob("*.py"):
        if path.stem != "lm_eval":
            assert f"| `recipes.{path.stem}` | {len(path.read_text().splitlines())} |" in page
