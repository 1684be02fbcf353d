"""Encodes documents as tokens, on all cores.

    files -> pieces -> [ worker: read, encode ] x cores -> in order -> Output

A piece is about a megabyte of text. Workers are processes (`serve`), because an encoder holds the
GIL while it builds lists. `Output` writes results in the order of the pieces, so the files on disk
don't depend on the number of workers, and memory holds only a few pieces at a time. It records how
many pieces are on disk, and an interrupted encoding resumes from there.
"""

import collections
import concurrent.futures
import contextlib
import gc
import itertools
import os
import pickle
import queue
import subprocess
import sys
import time
from pathlib import Path
from typing import Iterable, Iterator

import numpy as np

from zigzag.core.errors import ConfigError, RunError, one_line
from zigzag.core.parts import part
from zigzag.disk.lines import Marked, Record
from zigzag.disk.output import SPLITS, EncodedPiece, Output, dtype_of
from zigzag.disk.reading import Document, File, Options, Piece, Trouble, counted, pieces, read
from zigzag.disk.tokenizers import Tokenizer, hashed, is_tenth, tokenizer_at
from zigzag.disk.weights import WrongWeight, as_weights

# Below this many bytes of text, a second process doesn't pay off.
FEW = 2**23
# A new tokenizer trains on at most about this many bytes of text.
SAMPLE = 2**27
SAY_SECONDS = 10


# -------------------------------------------------------------------------------------------
# In a worker

def encode(piece: Piece, tokenizer: Tokenizer, options: Options) -> EncodedPiece:
    """Read a piece and encode its documents."""
    ids, marks, starts, held_out = [np.zeros(0, int)], [np.zeros(0, bool)], [], []
    troubles, size, count = [], 0, 0
    for document in read(piece, options):
        if isinstance(document, Trouble):
            troubles.append(document)
            continue
        try:
            found = encode_document(document, tokenizer, options)
        except WrongWeight as e:        # fail, because nobody would notice a default weight
            raise WrongWeight(f"{document.where}: {options.weight_field!r} {e}") from None
        except ConfigError as e:
            troubles.append(Trouble(f"{options.form} that cannot be encoded",
                                    f"{document.where}: {e}"))
            continue
        if options.form == "text":
            size += len(document.content.encode())
        for tokens, learned in found:
            if document.begins:
                starts.append(count)
                held_out.append(is_tenth(document.name))
            ids.append(tokens)
            marks.append(learned)
            count += len(tokens)
    ids = np.concatenate(ids)
    if count and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
        raise ConfigError(f"{piece.file.path}: the tokenizer made an id outside 0 to "
                          f"{tokenizer.vocab_size - 1}")
    return EncodedPiece(ids.astype(dtype_of(tokenizer)), np.array(starts, int),
                   np.array(held_out, bool), np.concatenate(marks), size, troubles)


def encode_document(document: Document, tokenizer: Tokenizer, options: Options) -> list[Marked]:
    """Return a document's pairs (ids, their weights as targets): one, or two for a preference."""
    if options.form != "text":
        return part("tools.chats", options.form).encode_record(document, tokenizer, options)
    ids = tokenizer.encode(document.content)
    weights = as_weights(document.weight, len(ids))
    if document.begins:     # a text's separator gets the weight of its first token
        ids = np.append(tokenizer.separator, ids)
        weights = np.append(weights[:1], weights) if weights.ndim else weights
    return [(ids, np.broadcast_to(weights, len(ids)))]


def serve() -> None:
    """Read pieces from stdin and write each one's result, or the exception it raised."""
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)               # send what libraries print to stderr, not into the results
    path, options = pickle.load(source)
    gc.disable()                # it would rescan every list of ids for nothing
    tokenizer = tokenizer_at(path)
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

def on_cores(count: int, work: Iterable[Piece], tokenizer: Tokenizer, options: Options
             ) -> Iterator[tuple[Piece, EncodedPiece]]:
    """Encode pieces in `count` processes. Yield each piece with its result, in order."""
    env = {**os.environ, "TOKENIZERS_PARALLELISM": "false",
           "PYTHONPATH": str(Path(__file__).parents[2])}
    processes = [subprocess.Popen(
        [sys.executable, "-m", "zigzag.disk.encoding"], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, start_new_session=True, env=env) for _ in range(count)]
    idle, waiting = queue.SimpleQueue(), collections.deque()
    pool = concurrent.futures.ThreadPoolExecutor(count)
    try:
        for process in processes:
            pickle.dump((tokenizer.path, options), process.stdin)
            idle.put(process)
        for piece in work:
            waiting.append((piece, pool.submit(_result, piece, idle)))
            if len(waiting) > 2 * count + 1:
                piece, future = waiting.popleft()
                yield piece, future.result()
        for piece, future in waiting:
            yield piece, future.result()
    finally:
        for process in processes:
            process.kill()
        pool.shutdown(cancel_futures=True)
        for process in processes:
            process.wait()


def _result(piece, idle):
    """Send a piece to an idle process and return its result."""
    process = idle.get()
    try:
        pickle.dump(piece, process.stdin, pickle.HIGHEST_PROTOCOL)
        process.stdin.flush()
        result = pickle.load(process.stdout)
    except (EOFError, OSError, pickle.UnpicklingError):
        raise RunError(f"a process that encodes text ended ({piece.file.path}, exit status "
                       f"{process.poll()}); run the same command again to continue") from None
    finally:
        idle.put(process)
    if isinstance(result, Exception):
        raise result
    return result


def encode_files(files: list[File], tokenizer: Tokenizer, options: Options, out: Output,
                 cores: int = 0) -> None:
    """Encode the files' documents into `out`, on `cores` cores (0: all of them)."""
    if not cores:
        cores = (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else
                 os.cpu_count() or 1)
    work = itertools.islice((piece for file in files for piece in pieces(file, options)),
                            out.state["pieces"], None)
    if cores < 2 or tokenizer.kind == "bytes" or sum(file.size for file in files) < FEW:
        results = ((piece, encode(piece, tokenizer, options)) for piece in work)
    else:
        results = on_cores(cores, work, tokenizer, options)
    said = time.monotonic()
    with contextlib.closing(results):       # closing ends the processes
        for piece, found in results:
            if found.troubles and options.strict:
                raise ConfigError(f"{found.troubles[0].message} (--strict)")
            try:
                out.add(found)
                out.save()
            except OSError as e:
                raise RunError(f"{out.part}: {e.strerror or one_line(e)}; free some space and run "
                               f"the same command again") from None
            if time.monotonic() > said + SAY_SECONDS:
                said = time.monotonic()
                print(f"encoding {piece.file.path}: {out.count():,} tokens so far",
                      file=sys.stderr, flush=True)


def sampled_lines(files: list[File], options: Options) -> Iterator[str]:
    """Yield the lines for training a new tokenizer: every document that isn't held out. For more
    than SAMPLE bytes of text, use only some pieces, spread over the whole text."""
    total, seen, held_out, trouble = sum(file.size for file in files), False, [], ""
    for number, piece in enumerate(piece for file in files for piece in pieces(file, options)):
        if total > SAMPLE and hashed(str(number)) * total > SAMPLE * 2**64:
            continue
        for document in read(piece, options):
            if isinstance(document, Trouble):
                trouble = trouble or document.message
                continue
            lines = "\n".join(_texts_in(document.content)).split("\n")
            if not is_tenth(document.name):
                seen = True
                yield from lines
            elif not seen:
                held_out += lines
    if not seen:        # for example a single document
        if trouble and not held_out:
            raise ConfigError(f"no readable text; {trouble}")
        yield from held_out


def _texts_in(content):
    """Return every text in a document's content, including nested texts."""
    if isinstance(content, str):
        return [content]
    values = content.values() if isinstance(content, dict) else content
    return [text for value in values if isinstance(value, (str, dict, list))
            for text in _texts_in(value)]


# -------------------------------------------------------------------------------------------
# What was made

def what_was_skipped(record: Record) -> list[str]:
    """Summarize data.json: a line about skipped files ('' if none), then a line for each kind of
    problem within files."""
    files = record.get("skipped", {})
    return [f"{sum(files.values()):,}: {counted(files)}" if files else "",
            *(f"{count:,} {kind}; the first is {first}"
              for kind, (count, first) in record.get("problems", {}).items())]


def about_learned(record: Record) -> list[str]:
    """Return [a line on how many tokens are learned], or [] if data.json doesn't record that."""
    if "learned" not in record.get("train", {}):      # token files have no counts
        return []
    tokens, learned = (sum(record[split][name] for split in SPLITS)
                       for name in ("tokens", "learned"))
    what = f"have a weight above 0, by {record['weights']['field']!r}" if (
        "weights" in record) else "are answers"
    return [f"{learned:,} of {tokens:,} tokens {what}"]


def summary(record: Record) -> str:
    """Return a printable description of a prepared folder, from its data.json."""
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
