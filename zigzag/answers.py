"""The text of an answer, from ids that arrive one after the other.

    ids     Wh | at | \xf0\x9f | \x98 | \x80 | # | ## | ...
    shown   Wh | What |        |      | What😀 |   |     ...     with --stop "###": # may be its
                                                                 beginning, and is held back
"""

import math
from typing import Any, Callable, Sequence

from zigzag.prompts import Prompt


class Answer:
    """The text of at most `tokens` ids that follow a prompt. It ends before the first stop text.
    `more` are further fields of its JSON; a list has one item for each id."""

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Prompt, tokens: int,
                 stop: Sequence[str] = (), **more: Any):
        self.decode, self.prompt, self.tokens, self.stop, self.more = (
            decode, prompt, tokens, stop, more)
        self.ids, self.text = [], ""        # (its end may still be the beginning of a stop)
        self.reason = ""        # why it has ended: stop, length
        # Only a window of the last ids is decoded again. Some tokenizers drop a space where a text
        # begins, so the window begins with ids whose text, `known` characters, is shown already.
        self.window, self.mark = list(prompt.ids), len(prompt.ids)
        self.known = len(decode(self.window))

    def add(self, ids: Sequence[int]) -> None:
        """Add the next ids. No ids: the answer has ended."""
        for i in ids:
            if not self.reason:
                self.ids.append(i)
                self.window.append(i)
                self._decode_window()
        if not self.reason and (not len(ids) or len(self.ids) >= self.tokens):
            self._decode_window(is_end=True)
            self.reason = self.reason or ("length" if len(self.ids) >= self.tokens else "stop")

    def _decode_window(self, is_end=False):
        """Decode the window, without a last character whose bytes are not complete."""
        decoded = self.decode(self.window)
        complete = decoded if is_end else decoded.rstrip("\ufffd")
        begin = len(self.text)
        self.text += complete[self.known:]
        self.known = max(self.known, len(complete))
        for stop in self.stop:
            if (at := self.text.find(stop, max(0, begin - len(stop) + 1))) >= 0:
                self.text, self.reason = self.text[:at], "stop"
        if complete == decoded:
            self._move_window()

    def _move_window(self):
        """Drop the ids before the mark. It is moved only between characters."""
        if len(self.window) - self.mark >= 8:
            if rest := self.decode(self.window[self.mark:]):
                self.window, self.known = self.window[self.mark:], len(rest)
            self.mark = len(self.window)

    def shown(self) -> str:
        """The text that no later id can change."""
        held = 0 if self.reason else max(
            (n for stop in self.stop for n in range(1, len(stop)) if self.text.endswith(stop[:n])),
            default=0)
        return self.prompt.begin + self.text[:len(self.text) - held]

    def record(self) -> dict[str, Any]:
        """The answer as a JSON object."""
        more = {name: x[:len(self.ids)] if isinstance(x, list) else x
                for name, x in self.more.items()}
        if "logprobs" in more:
            more["logprob"] = math.fsum(more["logprobs"])
        return {"prompt": self.prompt.text, "text": self.text, "tokens": len(self.ids),
                "stopped": self.reason, **more}
