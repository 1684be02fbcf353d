"""Metrics: numbers that compare predictions with references.

Each function takes two lists of the same length, predictions and references, whose items are texts
or lists of ids. It returns a dict of means over examples (accuracy: over tokens).
`Task(metric=...)` takes any function of outputs and examples, for example

    lambda outputs, examples: exact(texts_of(outputs), [target for _, target in examples])
"""

import collections
import functools
import re
from typing import Any, Callable, Iterable, Sequence

from zigzag.core.errors import ConfigError, optional_package


def exact(predictions: Sequence, references: Sequence) -> dict[str, float]:
    """Return the fraction of predictions equal to their references."""
    return {"exact": _mean(_items(p) == _items(r) for p, r in _pairs(predictions, references))}


def accuracy(predictions: Sequence, references: Sequence) -> dict[str, float]:
    """Return the fraction of reference tokens that the prediction has at the same index. A
    reference may be a single id, such as a class."""
    right = []
    for pair in _pairs(predictions, references):
        p, r = (x if isinstance(x, (str, list)) else [x] for x in map(_items, pair))
        right += [at < len(p) and p[at] == x for at, x in enumerate(r)]
    return {"accuracy": _mean(right)}


def f1(predictions: Sequence, references: Sequence) -> dict[str, float]:
    """Return the F1 score of the words (or ids), in any order. As in SQuAD's script, ignore case,
    punctuation and the articles a, an, the."""
    def score(p, r):
        p, r = _squad_words(p), _squad_words(r)
        if not p or not r:
            return float(p == r)
        common = collections.Counter(p) & collections.Counter(r)
        return _f_measure(common.total(), len(p), len(r))

    return {"f1": _mean(score(p, r) for p, r in _pairs(predictions, references))}


def rouge(predictions: Sequence, references: Sequence, stem: Callable = lambda word: word
          ) -> dict[str, float]:
    """Return ROUGE-1 (common words), ROUGE-2 (common bigrams) and ROUGE-L (the longest common
    subsequence), as F1 scores of stem(word). Words are runs of letters and digits, lowercased."""
    pairs = [[[stem(word) for word in _words(x)] for x in pair]
             for pair in _pairs(predictions, references)]

    def ngram_f1(p, r, n):
        p, r = (collections.Counter(zip(*(words[i:] for i in range(n)))) for words in (p, r))
        return _f_measure((p & r).total(), p.total(), r.total())

    return {"rouge1": _mean(ngram_f1(p, r, 1) for p, r in pairs),
            "rouge2": _mean(ngram_f1(p, r, 2) for p, r in pairs),
            "rougeL": _mean(_f_measure(_longest_common(p, r), len(p), len(r)) for p, r in pairs)}


def rouge_stemmed(predictions: Sequence, references: Sequence) -> dict[str, float]:
    """Return ROUGE over Porter stems, as the rouge_score package does with use_stemmer=True: nltk
    stems words of more than three letters."""
    stem = functools.cache(optional_package(
        "nltk.stem.porter", "--metric rouge_stemmed").PorterStemmer().stem)
    return rouge(predictions, references, lambda word: (
        stem(word) if isinstance(word, str) and len(word) > 3 else word))


def f1_of_classes(predictions: Sequence, references: Sequence, labels: int) -> dict[str, float]:
    """Return the F1 score of class 1 if there are two labels. Otherwise return the mean over all
    classes in the predictions or references, like scikit-learn's "macro"."""
    pairs = [(int(p), int(r)) for p, r in _pairs(predictions, references)]
    classes = [1] if labels == 2 else {c for pair in pairs for c in pair}

    def score(c):
        return _f_measure(sum(p == r == c for p, r in pairs), sum(p == c for p, _ in pairs),
                          sum(r == c for _, r in pairs))

    return {"f1": _mean(map(score, classes))}


# The choices for --metric, for text pairs and for classes. The latter also take the class count.
TEXT_METRICS: dict[str, Callable] = {"exact": exact, "rouge": rouge,
                                      "rouge_stemmed": rouge_stemmed, "f1": f1}
CLASS_METRICS: dict[str, Callable] = {"accuracy": lambda p, r, labels: accuracy(p, r),
                                       "f1": f1_of_classes}


def names(metric: str) -> tuple[str, ...]:
    """Return the names of the numbers that this choice of --metric computes."""
    return (metric,) if metric in CLASS_METRICS else tuple(TEXT_METRICS[metric]([], []))


# -------------------------------------------------------------------------------------------
# Helpers

def _pairs(predictions, references):
    if len(predictions) != len(references):
        raise ConfigError(f"a metric got {len(predictions)} predictions and {len(references)} "
                          f"references; expected one for each")
    return list(zip(predictions, references))


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values) if values else 0.0


def _items(x: Any) -> Any:
    """Convert arrays to lists, so == returns a single bool; leave texts and scalars unchanged."""
    return x if isinstance(x, str) or not hasattr(x, "__iter__") else list(x)


def _words(x):
    return re.findall(r"[^\W_]+", x.lower()) if isinstance(x, str) else list(x)


def _squad_words(x):
    if not isinstance(x, str):
        return list(x)
    without_punctuation = re.sub(r"[^\w\s]|_", "", x.lower())
    return re.sub(r"\b(a|an|the)\b", " ", without_punctuation).split()


def _f_measure(common, predicted, wanted):
    """Return the harmonic mean of common / predicted and common / wanted."""
    return 2 * common / (predicted + wanted) if common else 0.0


def _longest_common(a, b):
    """Return the length of the longest common subsequence."""
    row = [0] * (len(b) + 1)        # row[j]: the result for the items of a so far and b[:j]
    for x in a:
        diagonal = 0
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], diagonal + 1 if x == y else max(row[j], row[j - 1])
    return row[-1]
