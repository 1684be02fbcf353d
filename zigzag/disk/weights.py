"""Loss weights, in the JSON-lines field or .parquet column that --weight_field names.

    a number    for a whole document; in a conversation, it multiplies the weights of the answers
    a list      a number per token of a text (not for conversations)
    nothing     1

A token's weight is the weight of predicting it. An invalid weight ends the command, because nobody
would notice a default used instead. This file needs numpy, not jax.
"""

from typing import Any

import numpy as np

from zigzag.core.errors import ConfigError
from zigzag.disk.lines import Record, numbers_below


class WrongWeight(ConfigError):
    """A weight that isn't a number >= 0, or a list without exactly one number per token."""


def as_weights(value: Any, count: int | None = None) -> np.ndarray:
    """Return a line's weight in float32: a single number for all of its tokens or, if `count` is
    given and the value is a list, an array of `count` numbers."""
    if value is None or count == 0 and value == []:
        return np.ones((), np.float32)
    numbers = value if isinstance(value, list) and count is not None else [value]
    # float32's maximum is 3.4e38. type() excludes booleans, which are ints to isinstance.
    are_right = all(type(x) in (int, float) and 0 <= x < 3.4e38 for x in numbers)
    if not are_right or numbers is value and len(value) != count:
        lists = f", or a list of {count}, one for each token" if count is not None else ""
        raise WrongWeight(f"is {value!r:.60}; expected a number of 0 or more{lists}")
    return np.array(value, np.float32)


def finite_weights(weights: Any, start: int, count: int) -> np.ndarray:
    """Read `count` weights from a file as float32, starting at token `start`."""
    return numbers_below(np.inf, weights, start, start + count, np.float32, "weight",
                         "expected numbers of 0 or more")


def weight_in(record: Record, field: str) -> Any:
    """Return a line's weight, 1 if only its messages have weights, or None if there are none."""
    messages = record.get("messages")
    is_inside = isinstance(messages, list) and any(
        field in message for message in messages if isinstance(message, dict))
    return record.get(field, 1 if is_inside else None) if field else None
