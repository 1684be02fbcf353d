"""Multiple-choice questions (--choices), scored the way lm_eval scores HellaSwag and ARC.

    {"question": "The sky is", "choices": ["green", "blue"], "answer": 1}

    The sky is | blue       what the model reads: the question, a space and the choice
                 ^^^^       its log-probability: the sum over the choice's tokens

    acc         fraction of questions whose answer has the highest log-probability
    acc_norm    the same, with log-probabilities divided by the choice's length in characters
"""

import json
import math
from typing import Iterable, NamedTuple, Sequence

import sample
from zigzag.commands.sampling import Model
from zigzag.core.errors import ConfigError
from zigzag.disk.tokenizers import Tokenizer
from zigzag.generate.prompts import Input

# A line's fields: our names first, then the names in published files.
QUESTION = ("question", "query", "ctx")
CHOICES = ("choices", "endings")
ANSWER = ("answer", "answerKey", "gold", "label")


class Item(NamedTuple):
    question: str
    choices: tuple[str, ...]
    answer: int                 # an index into choices


def read_items(lines: Iterable[tuple[str, str]]) -> list[Item]:
    """Parse a file's questions from pairs (the line's location, the line)."""
    items = []
    for where, line in lines:
        try:
            items.append(_item(json.loads(line)))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise ConfigError(
                f"{where}: {line.strip()[:60]!r}; expected " '{"question": "...", "choices": '
                '["...", "..."], "answer": 0}, with no empty text, and an answer that is an index '
                "from 0, its letter, or one of the labels of the choices") from None
    return items


def _item(record):
    """Parse a line's question. Any error means that the line has no valid question."""
    question, choices, answer = (
        record[[name for name in names if name in record][0]]
        for names in (QUESTION, CHOICES, ANSWER))
    if isinstance(choices, dict):       # ARC's format
        choices, labels = choices["text"], list(map(str, choices["label"]))
        answers = dict(zip(labels, range(len(choices)), strict=True))
    else:
        answers = {str(index): index for index in range(len(choices))}
        answers |= {chr(ord("A") + index): index for index in range(len(choices))}
    texts = [question, *choices]
    "".join(texts).encode()     # fails unless all are texts without lone surrogates
    if isinstance(choices, str) or len(choices) < 2 or not all(text.strip() for text in texts):
        raise ValueError("a text is missing")
    answer = str(answer)
    return Item(question, tuple(choices), answers[answer if answer in answers else answer.upper()])


def split_ids(tokenizer: Tokenizer, context: str, text: str) -> tuple[Sequence[int], int]:
    """Return (the ids of context + text, how many of them belong to the context). As in lm_eval, a
    single call encodes both, and spaces at the end of the context count as part of the text."""
    ids = tokenizer.prompt(context + text)
    return ids, min(len(tokenizer.prompt(context.rstrip())), len(ids) - 1)


def logprobs(model: Model, items: Sequence[Item]) -> list[list[float]]:
    """Return the log-probabilities of each question's choices."""
    ids, given = zip(*(split_ids(model.tokenizer, item.question, f" {choice}")
                       for item in items for choice in item.choices))
    totals = iter(sample.score(model.params, ids, model.c, batch=model.flags.batch, given=given))
    return [[next(totals)[0] for _ in item.choices] for item in items]


def run(model: Model, file: Input) -> None:
    """Run sample.py --choices: print the fraction of the file's questions that the model answers
    correctly. With --json, first print an object for each question."""
    items, flags, right, right_norm = read_items(file.lines), model.flags, [], []
    for at in range(0, len(items), 16 * flags.batch):
        some = items[at:at + 16 * flags.batch]
        for item, logs in zip(some, logprobs(model, some)):
            best = logs.index(max(logs))
            norms = [log / len(text) for log, text in zip(logs, item.choices)]
            best_norm = norms.index(max(norms))
            right.append(best == item.answer)
            right_norm.append(best_norm == item.answer)
            if flags.json:
                print(json.dumps({
                    "question": item.question, "answer": item.answer, "choice": best,
                    "choice_norm": best_norm, "logprobs": logs}), flush=True)
    (acc, error), (acc_norm, error_norm) = map(_mean_and_error, (right, right_norm))
    if flags.json:
        print(json.dumps({"questions": len(items), "acc": acc, "acc_stderr": error,
                          "acc_norm": acc_norm, "acc_norm_stderr": error_norm}))
    else:
        print(f"{f'{len(items):,} questions':20}  share  standard error\n"
              f"acc                  {acc:.4f}  {error:14.4f}\n"
              f"acc_norm             {acc_norm:.4f}  {error_norm:14.4f}")


def _mean_and_error(right):
    """Return the fraction of True values, and its standard error."""
    mean = sum(right) / len(right)
    return mean, math.sqrt(mean * (1 - mean) / max(1, len(right) - 1))
