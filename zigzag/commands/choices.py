"""Questions with several choices (--choices), scored as lm_eval scores HellaSwag and ARC.

    {"question": "The sky is", "choices": ["green", "blue"], "answer": 1}

    The sky is | blue       what the model reads: the question, a space and the choice
                 ^^^^       its log-probability: the sum over the tokens of the choice

    acc         share of the questions whose answer has the largest log-probability
    acc_norm    the same, with log-probabilities divided by the number of characters of the choice
"""

import itertools
import json
import math
import sys
from typing import Any, Iterable, Iterator, NamedTuple, Sequence

import sample
from zigzag.commands import terminal
from zigzag.core.errors import ConfigError
from zigzag.disk.tokenizers import Tokenizer

# The fields of a line: our names first, then those of published files.
QUESTION = ("question", "query", "ctx")
CHOICES = ("choices", "endings")
ANSWER = ("answer", "answerKey", "gold", "label")
EXPECTED = 'expected {"question": "...", "choices": ["...", "..."], "answer": 0}'


class Item(NamedTuple):
    question: str
    choices: tuple[str, ...]
    answer: int                 # an index into choices


def read_items(lines: Iterable[tuple[str, str]]) -> list[Item]:
    """The questions of a file, from pairs (where it is, the line)."""
    items = []
    for where, line in lines:
        try:
            items.append(_item(json.loads(line)))
        except RecursionError:
            raise ConfigError(f"{where}: not JSON; {EXPECTED}") from None
        except json.JSONDecodeError:
            raise ConfigError(f"{where}: not JSON ({line.strip()[:40]!r}); {EXPECTED}") from None
        except ValueError as e:
            raise ConfigError(f"{where}: {e}; {EXPECTED}") from None
    return items


def _item(record):
    """The question of a line; a ValueError says what is wrong."""
    if not isinstance(record, dict):
        raise ValueError(f"{repr(record)[:40]} is not an object")
    question, choices, answer = (_field(record, names) for names in (QUESTION, CHOICES, ANSWER))
    labels = None
    if isinstance(choices, dict):       # (ARC's)
        choices, labels = choices.get("text"), choices.get("label")
        if not isinstance(labels, list) or not isinstance(choices, list) or (
                len(labels) != len(choices)):
            raise ValueError("the choices need a 'text' and a 'label' each")
    if not isinstance(choices, list) or len(choices) < 2:
        raise ValueError(f"the choices are {repr(choices)[:40]}, not two texts or more")
    for text in (question, *choices):
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{repr(text)[:40]} is not a text, or empty")
        text.encode()       # (a lone surrogate is a ValueError, too)
    return Item(question, tuple(choices), _index(answer, len(choices), labels))


def _field(record, names):
    for name in names:
        if name in record:
            return record[name]
    there = ", ".join(map(repr, list(record)[:5])) or "nothing"
    raise ValueError(f"no field {names[0]!r} (or {', '.join(map(repr, names[1:]))}), it has "
                     f"{there[:80]}")


def _index(answer, count, labels):
    """The index of the answer, which is one of the labels if there are any, else an index from 0,
    as a number or as text, or a letter from A."""
    text = str(answer)
    if labels is not None:
        index = list(map(str, labels)).index(text) if text in map(str, labels) else -1
    elif isinstance(answer, str) and len(answer) == 1 and answer.isalpha() and answer.isascii():
        index = ord(answer.upper()) - ord("A")
    else:
        is_number = type(answer) is int or isinstance(answer, str) and answer.isdecimal()
        index = int(answer) if is_number and len(text) < 9 else -1
    if not 0 <= index < count:
        raise ValueError(f"the answer is {text[:40]!r}; expected " + (
            f"one of the labels {', '.join(map(str, labels))}" if labels is not None
            else f"an index from 0 to {count - 1}, or its letter"))
    return index


# -------------------------------------------------------------------------------------------

def split_ids(tokenizer: Tokenizer, context: str, text: str) -> tuple[Sequence[int], int]:
    """(the ids of context + text, how many of them belong to the context). As in lm_eval, they are
    encoded together, and spaces at the end of the context count as a part of the text."""
    ids = tokenizer.prompt(context + text)
    return ids, min(len(tokenizer.prompt(context.rstrip())), len(ids) - 1)


def logprobs(params: Any, config: Any, tokenizer: Tokenizer, items: Sequence[Item], batch: int
             ) -> Iterator[list[float]]:
    """Yield, for each question, the log-probabilities of its choices."""
    rows = (split_ids(tokenizer, item.question, f" {choice}")
            for item in items for choice in item.choices)

    def scored():
        while part := list(itertools.islice(rows, 16 * batch)):
            ids, given = zip(*part)
            yield from (total for total, _ in sample.score(params, ids, config, batch=batch,
                                                           given=given))

    totals = scored()
    for item in items:
        yield list(itertools.islice(totals, len(item.choices)))


def show(items: Sequence[Item], found: Iterable[Sequence[float]], as_json: bool) -> None:
    """Print the accuracies, and with as_json first an object for each question. On a terminal, the
    accuracy so far is shown meanwhile."""
    shows_progress = sys.stderr.isatty() and not as_json
    right, right_norm = [], []
    for item, logs in zip(items, found, strict=True):
        best = _largest(logs)
        best_norm = _largest([log / len(text) for log, text in zip(logs, item.choices)])
        right.append(best == item.answer)
        right_norm.append(best_norm == item.answer)
        if as_json:
            print(terminal.json_line({
                "question": item.question, "answer": item.answer, "choice": best,
                "choice_norm": best_norm, "logprobs": logs}), flush=True)
        elif shows_progress:
            print(f"\r{len(right):,} of {len(items):,} questions, acc "
                  f"{sum(right) / len(right):.4f}", end="\x1b[K", file=sys.stderr, flush=True)
    if shows_progress:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    numbers = {"acc": _mean_and_error(right), "acc_norm": _mean_and_error(right_norm)}
    if as_json:
        print(terminal.json_line({"questions": len(items)} | {
            f"{name}{end}": value for name, pair in numbers.items()
            for end, value in zip(("", "_stderr"), pair)}))
        return
    print(f"{f'{len(items):,} questions':20}  share  standard error")
    for name, (mean, error) in numbers.items():
        print(f"{name:20} {mean:.4f}  {'-' if error is None else f'{error:.4f}':>14}")


def _largest(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def _mean_and_error(right: Sequence[bool]) -> tuple[float, Any]:
    """The share of True, and its standard error (None for a single question)."""
    count, mean = len(right), sum(right) / len(right)
    return mean, math.sqrt(mean * (1 - mean) / (count - 1)) if count > 1 else None
