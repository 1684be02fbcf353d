"""The text of an answer while its ids arrive, up to a stop text.

An Answer holds back text that a later id may still change:

    ids     Wh | at | \xf0\x9f | \x98 | \x80 | # | ## | ...
    shown   Wh | What |        |      | What😀 |   |     ...     with --stop "###": # may be its
                                                                 beginning, and is held back
"""

import math
import sys
from typing import Any, Callable, Sequence

from zigzag.generate.prompts import Prompt


class Answer:
    """The text of at most `tokens` ids that follow a prompt, up to the first stop text. `room` is
    the number of ids that fit into the context, if the answer must end there. `more` are further
    fields of its JSON; `logprobs` among them has one number for each id."""

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Prompt, tokens: int,
                 stop: Sequence[str] = (), room: int = sys.maxsize, **more: Any):
        self.decode, self.prompt, self.tokens, self.stop, self.room, self.more = (
            decode, prompt, tokens, stop, room, more)
        self.ids, self.text = [], ""        # (the end of text may be the beginning of a stop)
        self.reason = ""        # why it has ended: stop, length or context
        # Only a window of the last ids is decoded each time. Some tokenizers drop a space at the
        # beginning of a text, so the window begins with ids whose text, `known` characters, is
        # already shown.
        self.window, self.mark = list(prompt.ids), len(prompt.ids)
        self.known = len(decode(self.window))

    def add(self, ids: Sequence[int] | None) -> None:
        """Add the next ids. No ids: the answer has ended. None: there are none yet."""
        if ids is None:
            return
        for i in ids:
            if not self.reason:
                self.ids.append(i)
                self.window.append(i)
                self._decode_window()
        count = len(self.ids)
        if not self.reason and (not len(ids) or count >= self.tokens):
            self._decode_window(is_end=True)
            self.reason = self.reason or ("length" if count >= self.tokens else
                                          "context" if count >= self.room else "stop")

    def _decode_window(self, is_end=False):
        """Decode the window, without a last character whose bytes are incomplete."""
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
        """Drop the ids before the mark, and move the mark to the end. Called between characters."""
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
        more = self.more
        if "logprobs" in more:
            logprobs = more["logprobs"][:len(self.ids)]
            more = {"ids": self.ids, "logprobs": logprobs, "logprob": math.fsum(logprobs)}
        return {"prompt": self.prompt.text, "text": self.text, "tokens": len(self.ids),
                "stopped": self.reason, **more}
