"""Printing answers, and reading lines from a person.

    Answer          the text of an answer, from ids that arrive one at a time
    show            print several answers in order: live on a terminal, else complete, or as JSON
    show_scores     print a table of texts and their log-probabilities
    ctrl_c          the first Ctrl-C stops an answer, not the program
    in_background   an iterator that a thread runs, so that Ctrl-C works while jax compiles
    converse        read lines from a person and answer each
    ends_quietly    a closed pipe (| head -1) is not an error
"""

import contextlib
import importlib
import itertools
import json
import math
import os
import queue
import re
import signal
import sys
import threading
from typing import Any, Callable, Iterable, Iterator, Sequence

from zigzag.commands.answers import Answer
from zigzag.core.errors import CONTROL, ConfigError, RunError, printable
from zigzag.generate.prompts import TooLong

# -------------------------------------------------------------------------------------------
# Printing

def is_terminal() -> bool:
    """Whether a person reads what is printed."""
    return bool(sys.stdout) and sys.stdout.isatty()     # (None: it was closed)


def is_conversation() -> bool:
    """Whether a person also types."""
    return bool(sys.stdin) and sys.stdin.isatty() and is_terminal()


def show(pieces: Iterable[Sequence[Sequence[int]]], answers: Sequence[Answer],
         as_json: bool = False, pressed: Sequence[int] = ()) -> None:
    """Print answers in their order: on a terminal as they grow, else when they have ended. Each of
    `pieces` has the new ids of every answer (none if it has ended). Ctrl-C (`pressed`) stops it."""
    is_live, at, sent = is_terminal() and not as_json, 0, 0
    before, after = ([nothing] * len(answers) for nothing in (None, ()))
    for piece in itertools.chain(
            [before], itertools.takewhile(lambda _: not pressed, pieces), [after]):
        for answer, ids in zip(answers, piece, strict=True):
            answer.add(ids)
        while at < len(answers):        # (the next begins when this one has ended)
            answer, text = answers[at], answers[at].shown()
            if is_live:
                write(text[sent:], "\n" if answer.reason else "")
            elif answer.reason:
                print(json_line(answer.record()) if as_json else text, flush=True)
            sent = len(text)
            if not answer.reason:
                break
            at, sent = at + 1, 0
        if at == len(answers):
            return


def write(text: str, end: str = "\n") -> None:
    """Print to a terminal at once, without control characters."""
    print(printable(text), end=end, flush=True)


def json_line(record: dict[str, Any]) -> str:
    """The record as JSON that standard output can encode."""
    encoding = sys.stdout and sys.stdout.encoding or ""
    return json.dumps(record, ensure_ascii=not encoding.lower().startswith("utf"))


def show_scores(texts: Sequence[str], found: Iterable[tuple[float, int]], as_json: bool) -> None:
    """Print the log-probability, the number of scored tokens and the perplexity of each text, and
    of all texts together."""
    def line(name, text, logprob, tokens):
        perplexity = math.exp(min(-logprob / tokens, 700)) if tokens else None
        if as_json:
            return json_line({name: text, "logprob": logprob, "tokens": tokens,
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
    if as_json or len(texts) > 1:
        print(line("texts", total, math.fsum(logprobs), sum(counts)))


# -------------------------------------------------------------------------------------------
# A person at a terminal

@contextlib.contextmanager
def ctrl_c() -> Iterator[list[int]]:
    """The first Ctrl-C is appended to the list that this yields. A second interrupts, as usual."""
    pressed, usual = [], signal.getsignal(signal.SIGINT)

    def on_signal(number, _):
        pressed.append(number)
        signal.signal(signal.SIGINT, usual)

    signal.signal(signal.SIGINT, on_signal)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, usual)


# Held by the thread that uses the model.
_at_work = threading.Lock()


def in_background(items: Iterable[Any], pressed: Sequence[int] = (),
                  status: Callable[[], str] = str) -> Iterator[Any]:
    """Yield the items of an iterator, except None. A thread runs it, once the threads of earlier
    iterators have ended. On Ctrl-C (`pressed`) the items end at once, and the thread ends after its
    current item. Until the first item arrives, the line shows the status."""
    found, shown = _start(items, pressed), ""
    while not pressed:
        try:
            kind, item = found.get(timeout=0.2)
        except queue.Empty:
            if not shown and (shown := status()):
                write(shown, end="")
            continue
        if kind != "item":
            break
        if item is not None:
            status = str
            shown = _erase(shown)
            yield item
    _erase(shown)
    if not pressed and kind == "error":
        raise item


def _start(items, pressed=()):
    """The queue into which a thread puts the items."""
    found = queue.SimpleQueue()
    threading.Thread(target=_run, args=(items, pressed, found), daemon=True).start()
    return found


def _run(items, pressed, found):
    with _at_work:
        try:
            for item in items:
                found.put(("item", item))
                if pressed:
                    return
            found.put(("end", None))
        except BaseException as e:
            found.put(("error", e))


def _erase(shown):
    if shown:
        print("\r\x1b[K", end="", flush=True)
    return ""


def leave() -> None:
    """End the program even if a thread is still compiling, which cannot be stopped."""
    if _at_work.locked():
        sys.stdout.flush()
        os._exit(0)


def run_command(line: str, commands: dict[str, tuple[str, Callable[[str], Any]]]) -> None:
    """Run the command of a line /NAME TEXT, and print its result."""
    name, _, text = line.strip()[1:].partition(" ")
    if name == "help":
        for known, (about, _) in {**commands, "help": ("this list", None),
                                  "exit": ("end, as Ctrl-D does", None)}.items():
            write(f"  /{known:8} {about}")
    elif name in commands:
        try:
            write(commands[name][1](text.strip()))
        except ConfigError as e:
            write(f"error: {e}")
    else:
        write(f"error: no command /{name}: /help lists them (begin the line with a space to say it "
              f"to the model)")


def converse(greeting: str, answer: Callable[[str, list[int]], None],
             commands: dict[str, tuple[str, Callable[[str], Any]]],
             preparing: Iterable[Any] | None = None) -> None:
    """Call answer(line, pressed) for each line that a person types. It must return soon after
    `pressed` is no longer empty (Ctrl-C). A line /NAME TEXT calls that command with the text and
    prints its result; `commands` is {name: (help, function)}. `preparing` runs while the first line
    is typed."""
    with contextlib.suppress(ImportError):      # (not every Python has readline)
        importlib.import_module("readline")     # makes lines editable
    if preparing is not None:
        _start(preparing)
    write(f"{greeting}: Ctrl-C stops an answer or clears the line, Ctrl-D or /exit ends, /help")
    while True:
        try:
            line = input("> ")
            line.encode()
        except EOFError:
            write("")
            return leave()
        except KeyboardInterrupt:
            write("")
            continue
        except UnicodeError:
            write("error: that line is not UTF-8")
            continue
        if line.strip() == "/exit":
            return leave()
        if re.match(r"/\w+(\s|$)", line):
            run_command(line, commands)
        elif line.strip():
            try:
                with ctrl_c() as pressed:
                    answer(line, pressed)
            except TooLong as e:
                write(f"error: {e}")
            except KeyboardInterrupt:       # (Ctrl-C twice)
                write("")


@contextlib.contextmanager
def ends_quietly() -> Iterator[None]:
    """A context that ends the program with status 0 if the reader of stdout has closed it, with 130
    on Ctrl-C, and with one line if stdout cannot be written."""
    try:
        try:
            yield
        finally:
            if sys.stdout:
                sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())      # (flushed at exit)
    except OSError as e:
        if sys.stdout is None or e.filename is not None:        # (an error of another file)
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise RunError(f"the output cannot be written: {e.strerror or e}") from None
    except KeyboardInterrupt:
        print(file=sys.stderr)
        sys.exit(130)
