"""Documents to tokens, on all cores.

    files -> pieces -> [ worker: read, encode ] x cores -> in order -> Output

A piece is about a megabyte of text. Workers are processes (`serve`), because an encoder holds
Python's lock while it makes lists. Results are written in the order of the pieces, so the files on
disk do not depend on the number of workers, and memory holds a few pieces at a time. `Output` notes
up to which piece everything is on disk: an encoding that was interrupted goes on from there.
"""

import collections
import concurrent.futures
import contextlib
import functools
import gc
import itertools
import os
import pickle
import queue
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Iterable, Iterator

import numpy as np

from zigzag.core.errors import ConfigError, RunError, one_line
from zigzag.disk.chats import (
    Template,
    encode_chat,
    encode_completion,
    encode_preference,
    has_template,
    split_preference,
)
from zigzag.disk.output import SPLITS, Encoded, Output, dtype_of
from zigzag.disk.reading import File, Options, Piece, Trouble, counted, pieces, read
from zigzag.disk.tokenizers import KINDS, Tokenizer, hashed, is_tenth
from zigzag.disk.weights import WrongWeight, as_weights

WHOSE_TEMPLATE = ("the chat template of a published model: data.py --tokenizer DIR, or train.py "
                  "--model DIR")
# Below this many bytes of text a second process does not pay.
FEW = 2**23
# A new tokenizer is trained on at most about this many bytes of text.
SAMPLE = 2**27
SAY_SECONDS = 10


# -------------------------------------------------------------------------------------------
# In a worker

def encode(piece: Piece, tokenizer: Tokenizer, options: Options) -> Encoded:
    """Read a piece and encode its documents."""
    texts, documents, troubles = [], [], []     # (documents: that of each text)
    for document in read(piece, options):
        if isinstance(document, Trouble):
            troubles.append(document)
            continue
        found = [document.content]
        if options.form != "text":
            try:
                with _at(document, options):
                    found = encode_record(document.content, tokenizer, options)
            except WrongWeight:
                raise
            except ConfigError as e:
                troubles.append(Trouble(f"{options.form} that cannot be encoded",
                                        f"{document.where}: {e}"))
                continue
        texts += found
        documents += [document] * len(found)
    begins = np.array([document.begins for document in documents], bool)
    held_out = np.array([is_tenth(document.name) for document in documents], bool)
    if options.form == "text":
        tokens, counts = tokenizer.encode_all(texts)
        tokens = np.insert(tokens.astype(dtype_of(tokenizer)),
                           (np.cumsum(counts) - counts)[begins], tokenizer.separator)
        counts, marks = counts + begins, np.ones(len(tokens), bool)
        size = sum(len(text.encode()) for text in texts)
    else:
        counts, size = np.array([len(ids) for ids, _ in texts], int), 0
        tokens = np.concatenate([np.zeros(0, int), *(ids for ids, _ in texts)])
        marks = np.concatenate([np.zeros(0, bool), *(marks for _, marks in texts)])
    if options.weight_field and documents:
        marks = marks * np.concatenate([_weights_of(document, options, count)
                                        for document, count in zip(documents, counts.tolist())])
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < tokenizer.vocab_size:
        raise ConfigError(f"{piece.file.path}: the tokenizer made an id outside 0 to "
                          f"{tokenizer.vocab_size - 1}")
    return Encoded(tokens.astype(dtype_of(tokenizer)), (np.cumsum(counts) - counts)[begins],
                   held_out[begins], marks, size, troubles)


@contextlib.contextmanager
def _at(document, options):
    """A context that adds the field and its place to what is wrong with a weight."""
    try:
        yield
    except WrongWeight as e:
        raise WrongWeight(f"{document.where}: {options.weight_field!r} {e}") from None


def _weights_of(document, options, count):
    """The weights of a document's `count` tokens, by its line. (The separator before a text has the
    weight of the first token.)"""
    is_text = options.form == "text"
    with _at(document, options):
        found = as_weights(document.weight, count - document.begins if is_text else None)
    if found.ndim:
        found = np.append(found[:1] if document.begins else found[:0], found)
    return np.broadcast_to(found, count)


def encode_record(record: dict[str, Any], tokenizer: Tokenizer, options: Options
                  ) -> list[tuple[np.ndarray, np.ndarray]]:
    """(ids, which of them are learned) of the documents in a line of JSON: one or, for a
    preference, two, the chosen one first."""
    if options.form == "completion":
        return [encode_completion(record, tokenizer)]
    if options.form == "messages":
        return [encode_chat(record, template_of(tokenizer.folder), tokenizer,
                            weight_field=options.weight_field)]
    if isinstance(record["chosen"], str):
        prompt, chosen, rejected = split_preference(record)
        return [encode_completion({"prompt": prompt, "completion": text}, tokenizer)
                for text in (chosen, rejected)]
    if not has_template(tokenizer.folder):
        raise ConfigError(f"conversations need {WHOSE_TEMPLATE}")
    return encode_preference(record, template_of(tokenizer.folder), tokenizer)


@functools.cache
def template_of(folder: Path) -> Template:
    return Template(folder)


def serve() -> None:
    """Answer each piece of the input with its result, or with the exception that it ended with."""
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)               # (what a library prints must not get among the results)
    kind, path, options = pickle.load(source)
    gc.disable()                # (it looks at all lists of ids, again and again, for nothing)
    tokenizer = KINDS[kind](path)
    while True:
        try:
            piece = pickle.load(source)
        except EOFError:
            return
        try:
            result = encode(piece, tokenizer, options)
        except Exception as e:
            result = e
        pickle.dump(result, sink, pickle.HIGHEST_PROTOCOL)
        sink.flush()


# -------------------------------------------------------------------------------------------
# On all cores

class Workers:
    """Processes that encode pieces."""

    def __init__(self, count: int, tokenizer: Tokenizer, options: Options):
        env = {**os.environ, "TOKENIZERS_PARALLELISM": "false",
               "PYTHONPATH": str(Path(__file__).parents[2])}
        self.processes = [subprocess.Popen(
            [sys.executable, "-m", "zigzag.disk.encoding"], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, start_new_session=True, env=env) for _ in range(count)]
        self.idle = queue.SimpleQueue()
        for process in self.processes:
            pickle.dump((tokenizer.kind, tokenizer.path, options), process.stdin)
            self.idle.put(process)
        self.pool = concurrent.futures.ThreadPoolExecutor(count)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: Any) -> None:
        for process in self.processes:
            process.kill()
        self.pool.shutdown(cancel_futures=True)
        for process in self.processes:
            process.wait()

    def results(self, work: Iterable[Piece]) -> Iterator[tuple[Piece, Encoded]]:
        """Yield each piece with its result, in the order of the pieces."""
        waiting = collections.deque()
        for piece in work:
            waiting.append((piece, self.pool.submit(self._encode, piece)))
            if len(waiting) > 2 * len(self.processes) + 1:
                piece, future = waiting.popleft()
                yield piece, future.result()
        for piece, future in waiting:
            yield piece, future.result()

    def _encode(self, piece):
        """The result of a piece, from a process that has nothing else to do."""
        process = self.idle.get()
        try:
            pickle.dump(piece, process.stdin, pickle.HIGHEST_PROTOCOL)
            process.stdin.flush()
            result = pickle.load(process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError):
            raise RunError(f"a process that encodes text ended ({piece.file.path}, exit status "
                           f"{process.poll()}); run the same command again to go on") from None
        finally:
            self.idle.put(process)
        if isinstance(result, Exception):
            raise result
        return result


def encode_files(files: list[File], tokenizer: Tokenizer, options: Options, out: Output,
                 cores: int = 0) -> None:
    """Encode the documents of the files into `out`, on so many cores (0: all)."""
    if not cores:
        cores = (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else
                 os.cpu_count() or 1)
    work = itertools.islice((piece for file in files for piece in pieces(file, options)),
                            out.state["pieces"], None)
    said = time.monotonic()
    with contextlib.ExitStack() as stack:
        if cores < 2 or tokenizer.kind == "bytes" or sum(file.size for file in files) < FEW:
            results = ((piece, encode(piece, tokenizer, options)) for piece in work)
        else:
            results = stack.enter_context(Workers(cores, tokenizer, options)).results(work)
        for piece, found in results:
            if found.troubles and options.strict:
                raise ConfigError(f"{found.troubles[0].message} (--strict)")
            try:
                out.add(found)
                out.save()
            except OSError as e:
                raise RunError(f"{out.part}: {e.strerror or one_line(e)}; make room, and give "
                               f"the same command again") from None
            if time.monotonic() > said + SAY_SECONDS:
                said = time.monotonic()
                print(f"encoding {piece.file.path}: {out.count():,} tokens so far",
                      file=sys.stderr, flush=True)


def sampled_lines(files: list[File], options: Options) -> Iterator[str]:
    """Yield the lines of all documents that are not held out or, of much text, of some pieces
    spread over all of it: what a new tokenizer is trained on."""
    total, seen, held_out, troubles = sum(file.size for file in files), 0, [], []
    for number, piece in enumerate(piece for file in files for piece in pieces(file, options)):
        if total > SAMPLE and hashed(str(number)) * total > SAMPLE * 2**64:
            continue
        for document in read(piece, options):
            if isinstance(document, Trouble):
                troubles = troubles or [document.message]
                continue
            text = "\n".join(_texts_in(document.content))
            if not is_tenth(document.name):
                seen += 1
                yield from text.split("\n")
            elif not seen:
                held_out.append(text)
    if troubles and not (seen or held_out):
        raise ConfigError(f"no text that can be read; {troubles[0]}")
    if not seen:        # (a single document, say)
        for text in held_out:
            yield from text.split("\n")


def _texts_in(content):
    """All texts in what a line has."""
    if isinstance(content, str):
        return [content]
    values = content.values() if isinstance(content, dict) else content
    return [text for value in values if isinstance(value, (str, dict, list))
            for text in _texts_in(value)]


# -------------------------------------------------------------------------------------------
# What was made

def what_was_skipped(record: dict[str, Any]) -> list[str]:
    """From data.json: the kinds of files that were skipped ('': none), and a line for each kind of
    problem within files."""
    files = record.get("skipped", {})
    return [f"{sum(files.values()):,}: {counted(files)}" if files else "",
            *(f"{count:,} {kind}; the first is {first}"
              for kind, (count, first) in record.get("problems", {}).items())]


def about_learned(record: dict[str, Any]) -> list[str]:
    """From data.json: a line on how many tokens are learned, if it is not all of them."""
    if "learned" not in record.get("train", {}):      # (token files have no counts)
        return []
    tokens, learned = (sum(record[split][name] for split in SPLITS)
                       for name in ("tokens", "learned"))
    what = f"have a weight above 0, by {record['weights']['field']!r}" if (
        "weights" in record) else "are answers"
    return [f"{learned:,} of {tokens:,} tokens {what}"]


def summary(record: dict[str, Any]) -> str:
    """What a prepared folder was made of, from its data.json: lines to print."""
    tokens, size = (sum(record[split][name] for split in SPLITS) for name in ("tokens", "bytes"))
    files, *lines = what_was_skipped(record)
    return "\n".join([
        f"read     {record['files']:,} files" + (files and f"; skipped {files}"),
        *(f"skipped  {line}" for line in lines),
        *(f"learned  {line}" for line in about_learned(record)),
        f"made     {record['documents']:,} documents, {tokens:,} tokens, "
        f"{size / max(tokens, 1):.2f} bytes per token"])


if __name__ == "__main__":
    serve()
