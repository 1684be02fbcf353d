"""The command line of sample.py: its flags, and what generation is asked and what is scored, texts
of the command line, of a file or of standard input, as ids.

    The sea is                      a text on each line; blank lines are left out
    {"prompt": "The sea is"}        an object on each line: in a file *.jsonl, or where the first
                                    line is an object with these fields

As a file's name, - stands for standard input.
"""

import collections
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple, Sequence

import numpy as np

from zigzag import stems
from zigzag.checkpoint import best_step
from zigzag.decoding import Choice
from zigzag.errors import ConfigError, check_at_least, one_line
from zigzag.examples import texts_of
from zigzag.families import fields_of, special_ids
from zigzag.tokenizers import Tokenizer


@dataclasses.dataclass(frozen=True)
class Config:
    """python sample.py --run DIR --prompt TEXT: let a trained model go on writing

    With no prompt it continues each line of standard input. On a terminal it talks: a conversation
    where the model has a chat template, else it continues what you type."""
    run: str = "out"            # the --out of a train.py
    step: str = ""              # its checkpoint of this step, or best; empty: the newest
    model: str = ""             # or a Hugging Face folder with a published model
    prompt: str = ""            # text to go on from; empty: the beginning of a document. An
                                # encoder-decoder reads it
    prompts: str = ""           # or a file with a prompt on each line, or objects with "prompt"
    source: str = ""            # or what an encoder reads that reads no text: a .npy file
    system: str = ""            # what the model is told before a conversation
    score: str = ""             # instead, how likely each text of this file is: lines, or objects
                                # with "text" (for an encoder-decoder: "source" and "target")
    bench: bool = False         # instead, how fast it generates here
    json: bool = False          # print a JSON object for each text
    logprobs: bool = False      # and in it each new id with its log-probability
    batch: int = 8              # so many prompts or texts are computed together
    tokens: int = 256           # how many new ids
    stop: tuple = ()            # texts before which an answer ends
    temperature: float = 0.8    # 0: always the likeliest
    top_k: int = 0              # choose among this many of the likeliest; 0: all
    top_p: float = 1.0          # choose among the likeliest that have this share together
    min_p: float = 0.0          # choose among those with this share of the likeliest one's
    repetition_penalty: float = 1.0     # above 1: what is there already is chosen less
    beams: int = 0              # show that many of the likeliest continuations instead
    length_penalty: float = 1.0         # their score is divided by their length to this power
    seed: int = 0               # of the choices
    shards: int = 0             # devices to split the model over, whatever it was trained on
    mesh: str = ""              # or axis=size,...; data takes the devices that are left

    def __post_init__(self) -> None:
        _check_flags(self)


# Of these, how an id is chosen.
CHOICES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class TooLong(ConfigError):
    """A prompt that is longer than the model's context."""


def _check_flags(config):
    """Refuse flags that are wrong, or do not go together."""
    check_at_least(config, tokens=1, beams=0, shards=0, batch=1)
    try:
        Choice(**{name: getattr(config, name) for name in CHOICES})
    except ConfigError as e:
        raise ConfigError(f"--{e}") from None
    given = [f"--{name}" for name in ("prompt", "prompts", "score") if getattr(config, name)]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)}: give one of them")
    if config.logprobs and (not config.json or config.beams):
        raise ConfigError("--logprobs adds to what --json prints, without --beams: give --json too")
    if "" in config.stop:
        raise ConfigError("--stop '': expected a text")
    if config.step and config.model:
        raise ConfigError("--step is of a run: give --run, not --model")
    for name in ("prompt", "system", "stop"):
        try:
            "".join(getattr(config, name)).encode()
        except UnicodeEncodeError as e:
            raise ConfigError(f"--{name} cannot be encoded: {e.reason} at character {e.start}; "
                              f"expected text in UTF-8") from None


def step_of(run: str, step: str) -> int | None:
    """The step that --step names: a number, the best one or, where it is empty, the newest."""
    if not step:
        return None
    if step == "best":
        return best_step(run)
    if not step.isdecimal():
        raise ConfigError(f"--step {step}: expected the number of a step, or best")
    return int(step)


def read_lines(path: str, flag: str) -> list[tuple[str, str]]:
    """(where it stands, the line) of each line that is not blank."""
    name = f"{flag} {path}" if path != "-" else "standard input"
    try:
        raw = Path(path).read_bytes() if path != "-" else _standard_input()
    except OSError as e:
        raise ConfigError(f"{name}: {e.strerror or e}; expected a file with a text on each line"
                          ) from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        line = raw.count(b"\n", 0, e.start) + 1
        raise ConfigError(f"{name} line {line}: not UTF-8 ({e.reason}); expected text in UTF-8"
                          ) from None
    lines = [(f"{name} line {number}", line.rstrip("\r"))   # (only \n ends a line)
             for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if flag and not lines:
        raise ConfigError(f"{name}: no text in it; expected one on each line")
    return lines


def _standard_input():
    return sys.stdin.buffer.read() if sys.stdin else b""    # (None: it was closed)


def parse_lines(lines: Sequence[tuple[str, str]], fields: Sequence[str], path: str
                ) -> list[tuple[str, ...]]:
    """The texts of each line: it itself, or of an object these fields. Two fields need an
    object."""
    if len(fields) == 1 and not path.endswith((".jsonl", ".json")) and not (
            lines and _is_object(lines[0][1], fields[0])):
        return [(line,) for _, line in lines]
    return [texts_of(line.encode(), where, fields) for where, line in lines]


def given_lines(config: Any) -> list[tuple[str, str]]:
    """The lines of the file that the command line names, if it names one."""
    if config.score:
        return read_lines(config.score, "--score")
    return read_lines(config.prompts, "--prompts") if config.prompts else []


def prompt_texts(config: Any, lines: Sequence[tuple[str, str]], is_asked: bool) -> list[str]:
    """The prompts: of a file, of the command line, or of standard input; with nothing in that, the
    beginning of a document."""
    if is_asked and not config.prompts:
        return [config.prompt]
    lines = lines or read_lines("-", "")
    return [text for text, in parse_lines(lines, ["prompt"], config.prompts)] or [""]


def file_prompts(path: str, flag: str) -> list[str]:
    """The prompts of a file."""
    return [text for text, in parse_lines(read_lines(path, flag), ["prompt"], path)]


def _is_object(line, field):
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(record, dict) and field in record


# -------------------------------------------------------------------------------------------
# As ids

class Asked(NamedTuple):
    """A prompt."""
    text: str               # as it was given
    ids: Sequence[int]      # what generation goes on from
    source: Any = None      # what an encoder reads
    begin: str = ""         # what is shown before the answer
    repeat: int = 0         # how often the same came before


def prompts_of(c: Any, tokenizer: Tokenizer, texts: Sequence[str], source: str = "") -> list[Asked]:
    """Prompts of this model. `source` is a file with what an encoder reads that reads no text."""
    known, asked = collections.Counter(), []
    for text in texts:
        asked.append(_prompt_of(c, tokenizer, text, source)._replace(repeat=known[text]))
        known[text] += 1
    return asked


def _prompt_of(c, tokenizer, text, source):
    if not c.encoder_layers:
        return Asked(text, check_length(tokenizer.prompt(text), c, "the prompt"), begin=text)
    if c.stem == "tokens" and not text.strip():
        raise ConfigError("the prompt is empty: this model has an encoder, which needs a text to "
                          "read")
    read = tokenizer.with_ends(text) if c.stem == "tokens" else source_array(source, c)
    return Asked(text, [special_ids(c, tokenizer)[0]], read)


def source_array(path: str, c: Any) -> np.ndarray:
    """The numbers of a file, for an encoder that reads no text."""
    try:
        return np.asarray(np.load(path, allow_pickle=False), np.float32)
    except (OSError, ValueError, TypeError, EOFError) as e:
        raise ConfigError(f"--source {path!r}: expected a .npy file with an array of "
                          f"{list(stems.source_shape(c, 1)[1:])} ({one_line(e)})") from None


def scored_texts(c: Any, tokenizer: Tokenizer, lines: Sequence[tuple[str, str]], path: str
           ) -> tuple[list[str], list[Sequence[int]], list[Sequence[int]] | None]:
    """Of each text that is scored the text, its ids, and what an encoder reads before it. The first
    id is given: what begins a text, or its own first one where nothing does."""
    if not c.encoder_layers:
        texts = [text for text, in parse_lines(lines, ["text"], path)]
        return texts, [tokenizer.prompt(text) for text in texts], None
    if c.stem != "tokens":
        raise ConfigError(f"--score {path}: this model's encoder reads {c.stem}, not a text")
    pairs, start = parse_lines(lines, ["source", "target"], path), special_ids(c, tokenizer)[0]
    targets = [tokenizer.with_ends(target) for _, target in pairs]
    # (As data.collate_pairs: BART's targets begin with another id, those of others perhaps not.)
    rows = [ids if len(ids) > 1 and ids[0] == start else [start, *ids] for ids in targets]
    return ([target for _, target in pairs], rows,
            [tokenizer.with_ends(source) for source, _ in pairs])


def whole_context(c: Any) -> Any:
    """A run's configuration with the context of the published model that it came from: it may have
    learned from shorter rows."""
    record = json.loads(c.published or "{}")
    known = fields_of(record)["seq_len"] if record else 0
    return dataclasses.replace(c, seq_len=max(c.seq_len, known))


def check_length(ids: Sequence[int], c: Any, what: str) -> Sequence[int]:
    """The ids of a prompt, unless there are too many of them."""
    known = c.seq_len
    if c.positions == "learned":        # (a new token needs a position too)
        known = min(known, c.position_rows - c.position_offset - 1)
    if len(ids) > known:
        raise TooLong(f"{what} has {len(ids):,} tokens; the model's context has room for {known:,}")
    return ids


def room_for(c: Any, prompts: Sequence[Sequence[int]], tokens: int) -> int:
    """How many new tokens these prompts can have: where positions are a table, it ends."""
    if c.positions != "learned":
        return tokens
    return min(tokens, c.position_rows - c.position_offset - max(map(len, prompts)))
