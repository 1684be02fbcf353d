"""Text that a person or a program reads while it is written.

    ids     Wh | at | \xf0\x9f | \x98 | \x80 | # | ## | ...
    shown   Wh | What |        |      | What😀 |   |     ...     with --stop "###": # may be its
                                                                 beginning, and is held back

    Answer          the text of ids that come one after the other
    show            several answers, one after the other: to a person, a program, as JSON
    show_scores     how likely texts are
    ctrl_c          a first Ctrl-C stops an answer, not the program
    converse        lines of a person, each with its answer
    ends_quietly    a reader that has gone (| head -1) is no error
"""

import contextlib
import importlib
import itertools
import json
import math
import os
import re
import signal
import sys
from typing import Any, Callable, Iterable, Iterator, Sequence

from zigzag.asked import Asked, TooLong

# Control characters but for tab and newline: a text must not move the cursor or retitle a window.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def is_terminal() -> bool:
    """Whether a person reads what is printed."""
    return sys.stdout.isatty()


def is_conversation() -> bool:
    """Whether a person also types."""
    return bool(sys.stdin) and sys.stdin.isatty() and is_terminal()


class Answer:
    """The text of at most `tokens` ids that answer a prompt. It ends before the first of the texts
    `stop`. `more` belongs to its JSON; a list has something for each id."""

    def __init__(self, decode: Callable[[Sequence[int]], str], asked: Asked, tokens: int,
                 stop: Sequence[str] = (), **more: Any):
        self.decode, self.asked, self.tokens, self.stop, self.more = (
            decode, asked, tokens, stop, more)
        self.ids, self.text = [], ""        # (its end may still be the beginning of a stop)
        self.reason = ""        # why it has ended: stop, length
        # Only the last ids are decoded again; some tokenizers drop a space where a text begins, so
        # the window holds some that are shown already: so many characters.
        self.window, self.mark = list(asked.ids), len(asked.ids)
        self.known = len(decode(self.window))

    def add(self, ids: Sequence[int]) -> None:
        """More ids. None: it has ended."""
        for i in ids:
            if not self.reason:
                self.ids.append(i)
                self.window.append(i)
                self._read()
        if not self.reason and (not len(ids) or len(self.ids) >= self.tokens):
            self._read(is_end=True)
            self.reason = self.reason or ("length" if len(self.ids) >= self.tokens else "stop")

    def _read(self, is_end=False):
        """Decode the window, but for a character that is not complete."""
        whole = self.decode(self.window)
        sure = whole if is_end else whole.rstrip("\ufffd")
        begin = len(self.text)
        self.text += sure[self.known:]
        self.known = max(self.known, len(sure))
        for stop in self.stop:
            if (at := self.text.find(stop, max(0, begin - len(stop) + 1))) >= 0:
                self.text, self.reason = self.text[:at], "stop"
        if sure == whole:
            self._move_window()

    def _move_window(self):
        """From one place between characters to the next."""
        if len(self.window) - self.mark >= 8:
            if rest := self.decode(self.window[self.mark:]):
                self.window, self.known = self.window[self.mark:], len(rest)
            self.mark = len(self.window)

    def shown(self) -> str:
        """What no later id changes."""
        held = 0 if self.reason else max(
            (n for stop in self.stop for n in range(1, len(stop)) if self.text.endswith(stop[:n])),
            default=0)
        return self.asked.begin + self.text[:len(self.text) - held]

    def record(self) -> dict[str, Any]:
        """As JSON has it."""
        more = {name: x[:len(self.ids)] if isinstance(x, list) else x
                for name, x in self.more.items()}
        if "logprobs" in more:
            more["logprob"] = math.fsum(more["logprobs"])
        return {"prompt": self.asked.text, "text": self.text, "tokens": len(self.ids),
                "stopped": self.reason, **more}


def _in_order(pieces: Iterable[Sequence[Sequence[int]]], answers: Sequence[Answer]
             ) -> Iterator[tuple[Answer, str]]:
    """Each answer with its new text, once all before it have ended. Where it has a reason it has
    ended."""
    at = sent = 0
    pieces = iter(pieces)
    while True:
        while at < len(answers):
            answer, text = answers[at], answers[at].shown()
            yield answer, text[sent:]
            sent = len(text)
            if not answer.reason:
                break
            at, sent = at + 1, 0
        if at == len(answers):
            return
        for answer, ids in zip(answers, next(pieces, [()] * len(answers)), strict=True):
            answer.add(ids)


def show(pieces: Iterable[Sequence[Sequence[int]]], answers: Sequence[Answer],
         as_json: bool = False, pressed: Sequence[int] = ()) -> None:
    """Print answers in their order: to a person as they grow, else as they end. `pieces` are new
    ids of each, none of one that has ended. Where Ctrl-C was pressed, there are no more."""
    is_live = is_terminal() and not as_json
    for answer, text in _in_order(itertools.takewhile(lambda _: not pressed, pieces), answers):
        if is_live:
            write(text, "\n" if answer.reason else "")
        elif answer.reason:
            print(_json(answer.record()) if as_json else answer.shown(), flush=True)


def write(text: str, end: str = "\n") -> None:
    """To a person, at once."""
    print(CONTROL.sub("\ufffd", text), end=end, flush=True)


def _json(record):
    return json.dumps(record, ensure_ascii=False)


def show_scores(texts: Sequence[str], found: Iterable[tuple[float, int]], as_json: bool) -> None:
    """Print of each text its log-probability, how many tokens that is of, and its perplexity; and
    of all together."""
    def line(name, text, logprob, tokens):
        perplexity = math.exp(min(-logprob / tokens, 700)) if tokens else None
        if as_json:
            return _json({name: text, "logprob": logprob, "tokens": tokens,
                          "perplexity": perplexity})
        number = "-"
        if tokens:
            number = f"{perplexity:,.3f}" if perplexity < 1e6 else f"{perplexity:.3g}"
        text = CONTROL.sub(" ", " ".join(text.split()))
        return f"{logprob:15.3f}  {tokens:8,}  {number:>10}  {text:.57}"

    if not as_json:
        print("log-probability    tokens  perplexity  text")
    logprobs, counts = [], []
    for text, (logprob, count) in zip(texts, found, strict=True):
        logprobs.append(float(logprob))
        counts.append(int(count))
        print(line("text", text, logprobs[-1], counts[-1]), flush=True)
    total = len(texts) if as_json else f"all {len(texts):,} texts"
    print(line("texts", total, math.fsum(logprobs), sum(counts)))


# -------------------------------------------------------------------------------------------
# A person at a terminal

@contextlib.contextmanager
def ctrl_c() -> Iterator[list[int]]:
    """The first Ctrl-C is added to the list that this gives; a second one is as usual."""
    pressed, usual = [], signal.getsignal(signal.SIGINT)

    def on_signal(number, _):
        pressed.append(number)
        signal.signal(signal.SIGINT, usual)

    signal.signal(signal.SIGINT, on_signal)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, usual)


def converse(greeting: str, answer: Callable[[str, list[int]], None]) -> None:
    """Give each line that a person types to answer(line, pressed), which returns soon after Ctrl-C
    was pressed."""
    with contextlib.suppress(ImportError):      # (not every Python has it)
        importlib.import_module("readline")     # so that a line can be edited
    write(f"{greeting}: Ctrl-C stops an answer or clears the line, Ctrl-D ends")
    while True:
        try:
            line = input("> ")
            line.encode()
        except EOFError:
            return write("")
        except KeyboardInterrupt:
            write("")
            continue
        except UnicodeError:
            write("error: that line is not UTF-8")
            continue
        if not line.strip():
            continue
        try:
            with ctrl_c() as pressed:
                answer(line, pressed)
        except TooLong as e:
            write(f"error: {e}")
        except KeyboardInterrupt:       # pressed twice: while something was compiled
            write("")


@contextlib.contextmanager
def ends_quietly() -> Iterator[None]:
    """A command that ends where its reader has gone, with status 0, or where Ctrl-C is pressed."""
    try:
        try:
            yield
        finally:
            if sys.stdout:
                sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())      # (Python flushes too)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        sys.exit(130)
