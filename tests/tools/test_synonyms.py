"""Flags of other codebases: the refusal names ours."""

import dataclasses

import pytest

import data
import model
import sample
import train
from tests.common import refused
from tools import synonyms
from zigzag.core.options import PARTS, has_part
from zigzag.generate import prompts

WORDS = {"block_size": "--seq_len", "num_attention_heads": "--heads", "hidden-size": "--d_model",
         "gradient_accumulation_steps": "--accumulate", "tp": "--shards"}


@pytest.mark.parametrize("main, words, says", [
    *((train.main, [f"--{word}", 1], f"did you mean {flag}?") for word, flag in WORDS.items()),
    (train.main, ["--resume"], "--out RUN alone"), (train.main, ["--max_epochs", 3], "--epochs"),
    (train.main, ["--wandb"], "metrics.jsonl"), (train.main, ["--device", "cpu"], "JAX_PLATFORMS"),
    (train.main, ["--fsdp", 2], "--mesh fsdp=N"), (train.main, ["--warmpu", 2], "--warmup"),
    (sample.main, ["--max_new_tokens", 9], "--tokens?"),
    (sample.main, ["--num_samples", 9], "--prompts"),
    (sample.main, ["--max_length", 9], "--tokens?"),
    (data.main, ["--data", "x"], "python data.py PATH"),
    (data.main, ["--dim", 1], "--help lists the options"),
    (data.main, ["nosuch", "--out", "d"], "error: nosuch: no such file"),
    (train.main, ["--data", "nosuch"], "--data nosuch: no such file")])
def test_words_of_other_codebases_lead_to_our_flags(capsys, tmp_path, monkeypatch, main, words,
                                                    says):
    """--block_size that leads to --vocab_size, --resume that leads to --remat; a message of data.py
    about a flag of train.py; a flag of another command."""
    monkeypatch.chdir(tmp_path)
    assert says in refused(capsys, *words, main=main)


def test_familiar_words_lead_to_flags_that_exist():
    """A table that a renamed flag makes wrong; a word that hides a flag of ours."""
    commands = [{f.name for c in classes for f in dataclasses.fields(c)} for classes in (
        (model.Config, train.Config), (prompts.Flags,), (data.Flags,))]
    targets = {*synonyms.WORDS, *(flag for flag, *_ in synonyms.SENTENCES)} - {"PATH"}
    assert targets <= set().union(*commands) or not all(map(has_part, PARTS))
    for flags_of_one in commands:
        words = [word for flag, words in synonyms.WORDS.items() if flag in flags_of_one
                 for word in words.split()]
        assert not flags_of_one.intersection(words)
        assert len(words) == len(set(words))
