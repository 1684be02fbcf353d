r"""An answer's text as its ids arrive, up to a stop text.

An Answer holds back text that a later id might still change:

    ids     Wh | at | \xf0\x9f | \x98 | \x80 | # | ## | ...
    shown   Wh | What |        |      | What😀 |   |     ...     with stop text "###": # may be the
                                                                 start of it, so hold it back
"""

import sys
from typing import Callable, Sequence


class Answer:
    """The ids that follow a prompt's ids, and their text, up to the first stop text. It holds at
    most `tokens` ids, of which `room` fit in the context. Without `decode` (ids -> text), it has no
    text."""

    def __init__(self, decode: Callable[[Sequence[int]], str] | None, prompt: Sequence[int],
                 stop: Sequence[str] = (), tokens: int = sys.maxsize, room: int = sys.maxsize):
        self.decode, self.stop, self.tokens, self.room = decode, stop, tokens, room
        self.ids, self.logprobs, self.text = [], [], ""
        self.reason = ""        # why it ended: stop, length or context
        self.before, self.decoded = prompt, 0       # ids already decoded; how many are from `ids`

    def add(self, pair: tuple[Sequence[int], Sequence[float]] | None) -> None:
        """Add the next ids and their log-probabilities. Empty lists mean that the answer ended, and
        None that no ids are ready yet."""
        if pair is None:
            return
        for i, log in zip(*pair):
            if not self.reason:
                self.ids.append(i)
                self.logprobs.append(log)
                self._decode()
        count = len(self.ids)
        if not self.reason and (not pair[0] or count >= self.tokens):
            self._decode(is_end=True)
            self.reason = self.reason or ("length" if count >= self.tokens else
                                          "context" if count >= self.room else "stop")

    def _decode(self, is_end: bool = False) -> None:
        """Decode the newest ids and add their text, unless its last character is incomplete."""
        if not self.decode:
            return
        # Decode a few earlier ids as well, because some tokenizers drop a leading space.
        before = [*self.before[-8:]]
        row = [*before, *self.ids[self.decoded:]]
        new = self.decode(row)[len(self.decode(before)):]
        if new.endswith("\ufffd") and not is_end:
            return
        self.text += new
        self.before, self.decoded = row, len(self.ids)
        for stop in self.stop:
            if (at := self.text.find(stop)) >= 0:
                self.text, self.reason = self.text[:at], "stop"

    def shown(self) -> str:
        """Return the text that later ids can't change."""
        held = 0 if self.reason else max(
            (n for stop in self.stop for n in range(1, len(stop)) if self.text.endswith(stop[:n])),
            default=0)
        return self.text[:len(self.text) - held]
