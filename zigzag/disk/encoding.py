"""Documents to tokens on disk, on all cores.

    files -> tasks -> [ worker: read, encode ] x cores -> in order -> train.bin, held_out.bin

A task is about a megabyte of text. Workers are processes (worker.py), because an encoder holds
Python's lock while it makes lists. Results are written in the order of the tasks, so the files on
disk do not depend on the number of workers, and memory holds a few tasks at a time. `progress.json`
says up to which task everything is on disk (output.py): a run that was interrupted goes on from
there.
"""

import collections
import concurrent.futures
import contextlib
import functools
import hashlib
import itertools
import json
import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Iterable, Iterator

import numpy as np

from zigzag.core.errors import ConfigError, RunError, human_bytes, one_line
from zigzag.core.files import sha256
from zigzag.disk.chats import (
    Template,
    encode_chat,
    encode_completion,
    encode_preference,
    has_template,
    split_preference,
)
from zigzag.disk.output import FORMAT, SPLITS, Encoded, Output, dtype_of
from zigzag.disk.reading import File, Options, Task, Trouble, counted, place_of, read, tasks
from zigzag.disk.tokenizers import (
    Pieces,
    Tokenizer,
    digest_of_files,
    hashed,
    is_tenth,
    train_pieces,
)
from zigzag.disk.weights import WrongWeight, as_weights

WHOSE_TEMPLATE = ("the chat template of a published model: data.py --tokenizer DIR, or train.py "
                  "--model DIR")
# Below this many bytes of text a second process does not pay.
FEW = 2**23
# A new tokenizer is trained on at most about this many bytes of text.
SAMPLE = 2**27


# -------------------------------------------------------------------------------------------
# In a worker

def encode(task: Task, tokenizer: Tokenizer, options: Options) -> Encoded:
    """Read a task and encode its documents."""
    texts, documents, problems = [], [], []     # (documents: that of each text)
    for document in read(task, options):
        text, problem = document.text, document.problem
        if isinstance(text, dict):
            try:
                with _at_its_place(task, document, options):
                    text = encode_record(text, tokenizer, options)
            except WrongWeight:
                raise
            except ConfigError as e:
                problem = Trouble(f"{options.form} that cannot be encoded",
                                  f"{task.file.path}: {e}")
        if problem:
            problems.append((problem, document.begins))
        else:
            texts += text if isinstance(text, list) else [text]
            documents += [document] * (len(texts) - len(documents))
    begins = np.array([document.begins for document in documents], bool)
    held_out = np.array([is_tenth(document.where) for document in documents], bool)
    if options.form == "text":
        tokens, counts = tokenizer.encode_all(texts)
        tokens = np.insert(tokens.astype(dtype_of(tokenizer)),
                           (np.cumsum(counts) - counts)[begins], tokenizer.separator)
        counts, marks = counts + begins, np.ones(len(tokens), bool)
        sizes = [len(text.encode()) for text in texts]
    else:
        counts = np.array([len(ids) for ids, _ in texts], int)
        tokens = np.concatenate([np.zeros(0, int), *(ids for ids, _ in texts)])
        marks = np.concatenate([np.zeros(0, bool), *(marks for _, marks in texts)])
        sizes = [0] * len(texts)
    noted = [0, 0]
    if options.weight_field and documents:
        weights = [_weights_of(task, document, options, count)
                   for document, count in zip(documents, counts.tolist())]
        marks = marks * np.concatenate(weights)
        noted = [sum(not part.any() for part in np.split(marks, np.cumsum(counts)[:-1])),
                 sum(document.weight is None for document in documents) * (
                     task.file.kind != "text")]
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < tokenizer.vocab_size:
        raise ConfigError(f"{task.file.path}: the tokenizer made an id outside 0 to "
                          f"{tokenizer.vocab_size - 1}")
    return Encoded(tokens.astype(dtype_of(tokenizer)), counts, np.array(sizes, np.int64), begins,
                   held_out, problems, marks, noted)


@contextlib.contextmanager
def _at_its_place(task, document, options):
    """A context that adds the field and its place to what is wrong with a weight."""
    try:
        yield
    except WrongWeight as e:
        place = place_of(task.file, options, document.at)
        raise WrongWeight(f"{place}: {options.weight_field!r} {e}") from None


def _weights_of(task, document, options, count):
    """The weights of a document's `count` tokens, by its line. (The separator before a text has the
    weight of the first token.)"""
    is_text = options.form == "text"
    with _at_its_place(task, document, options):
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


# -------------------------------------------------------------------------------------------
# The workers

class Workers:
    """Processes that encode tasks."""

    def __init__(self, count: int, tokenizer: Tokenizer, options: Options):
        self.setup = tokenizer.kind, tokenizer.path, options
        self.mine, self.processes = threading.local(), []
        self.lock, self.is_closing = threading.Lock(), False
        self.pool = concurrent.futures.ThreadPoolExecutor(count)
        self.count = count

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: Any) -> None:
        with self.lock:
            self.is_closing = True
        for process in self.processes:
            process.kill()
        self.pool.shutdown(cancel_futures=True)
        for process in self.processes:
            process.wait()

    def results(self, work: Iterable[Task]) -> Iterator[tuple[Task, Encoded]]:
        """Yield each task with its result, in the order of the tasks."""
        waiting = collections.deque()
        for task in work:
            waiting.append((task, self.pool.submit(self._encode, task)))
            if len(waiting) > 2 * self.count + 1:
                task, future = waiting.popleft()
                yield task, future.result()
        for task, future in waiting:
            yield task, future.result()

    def _encode(self, task):
        """The result of a task, from the process that belongs to this thread."""
        if not hasattr(self.mine, "process"):
            root = str(Path(__file__).parents[2])
            with self.lock:
                if self.is_closing:
                    raise RunError("the encoding has ended")
                self.mine.process = subprocess.Popen(
                    [sys.executable, "-m", "zigzag.disk.worker"], stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE, start_new_session=True,
                    env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": root})
                self.processes.append(self.mine.process)
            pickle.dump(self.setup, self.mine.process.stdin)
        process = self.mine.process
        try:
            pickle.dump(task, process.stdin, pickle.HIGHEST_PROTOCOL)
            process.stdin.flush()
            result = pickle.load(process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError):
            raise RunError(f"a process that encodes text ended ({task.file.path}, exit status "
                           f"{process.poll()}); run the same command again to go on") from None
        if isinstance(result, Exception):
            raise result
        return result


# -------------------------------------------------------------------------------------------
# A whole encoding

class InterruptedOther(ConfigError):
    """A folder has the beginning of another encoding."""


def begin_folder(out: Path, files: list[File], options: Options, vocab_size: int,
                 tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Make the folder `out`, unless it holds something else. Returns what an encoding that goes on
    there must have in common with the one that was interrupted."""
    folder = tokenizer.folder if tokenizer else None
    if options.form == "messages" and not has_template(folder):
        none = f" (no chat_template in {folder})" if folder else ""
        raise ConfigError(f"{files[0].path} has conversations, which need {WHOSE_TEMPLATE}{none}")
    # (The standard input is a new file each time.)
    names = [[file.name, file.size, sha256(Path(file.path)) if file.name == "stdin" else
              os.stat(file.path).st_mtime_ns] for file in files]
    settings = {"format": FORMAT, "files": hashlib.sha256(json.dumps(names).encode()).hexdigest(),
                "vocab_size": vocab_size, "tokenizer": tokenizer.kind if tokenizer else "",
                "files of the tokenizer": digest_of_files(tokenizer) if tokenizer else "",
                **{name: x for name, x in vars(options).items() if name != "strict"}}
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"--out {out}: {e.strerror}") from None
    if (out / "progress.json").exists():
        try:
            old = dict(json.loads((out / "progress.json").read_text())["settings"])
        except (ValueError, KeyError, TypeError):
            old = {}
        if other := [name for name in settings if old.get(name) != settings[name]]:
            raise InterruptedOther(f"--out {out} holds an encoding that was interrupted, and that "
                                   f"had other {', '.join(other)}; give another --out or remove it")
    return settings


def new_pieces(out: Path, vocab_size: int, files: list[File], options: Options) -> Pieces:
    """A new tokenizer for the documents of the files that are not held out, or the one that an
    interrupted encoding has made."""
    if (out / "progress.json").exists():
        return Pieces(out / Pieces.file)
    return train_pieces(_sampled_lines(files, options), out / Pieces.file, vocab_size)


def _sampled_lines(files, options):
    """Yield the lines of all documents that are not held out or, of much text, of some tasks spread
    over all of it."""
    total, seen, held_out, problems = sum(file.size for file in files), 0, [], []
    for number, task in enumerate(task for file in files for task in tasks(file, options)):
        if total > SAMPLE and hashed(str(number)) * total > SAMPLE * 2**64:
            continue
        for document in read(task, options):
            if document.problem:
                problems = problems or [document.problem.message]
                continue
            text = document.text
            if isinstance(text, dict):
                text = "\n".join(_texts_in(text))
            if not is_tenth(document.where):
                seen += 1
                yield from text.split("\n")
            elif not seen:
                held_out.append(text)
    if problems and not (seen or held_out):
        raise ConfigError(f"no text that can be read; {problems[0]}")
    if not seen:        # (a single document, say)
        for text in held_out:
            yield from text.split("\n")


def _texts_in(record):
    """All texts in a line of JSON."""
    if isinstance(record, str):
        return [record]
    values = record.values() if isinstance(record, dict) else record
    return [text for value in values if isinstance(value, (str, dict, list))
            for text in _texts_in(value)]


def encode_files(files: list[File], tokenizer: Tokenizer, options: Options, out: Output,
                 cores: int = 0) -> None:
    """Encode the documents of the files into `out`, on so many cores (0: all)."""
    if not cores:
        cores = (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else
                 os.cpu_count() or 1)
    say = Progress(sum(file.size for file in files), len(files))
    work = (task for file in files for task in tasks(file, options))
    starts = dict(zip((file.path for file in files),
                      itertools.accumulate((file.size for file in files), initial=0)))
    work = itertools.islice(work, out.state["tasks"], None)
    is_small = sum(file.size for file in files) < FEW or tokenizer.kind == "bytes"
    with contextlib.ExitStack() as stack:
        if is_small or cores < 2:
            results = ((task, encode(task, tokenizer, options)) for task in work)
        else:
            results = stack.enter_context(Workers(cores, tokenizer, options)).results(work)
        for task, found in results:
            if found.problems and options.strict:
                raise ConfigError(f"{found.problems[0][0].message} (--strict)")
            try:
                out.add(task, found)
                out.save()
            except OSError as e:
                raise RunError(f"{out.folder}: {e.strerror or one_line(e)}; make room, and give "
                               f"the same command again") from None
            say(starts[task.file.path] + task.position)
    say.end()


class Progress:
    """Says on the standard error how far the reading is: on one line of a terminal, or, if the
    output goes to a file, on a line every ten seconds."""

    def __init__(self, total: int, files: int):
        self.total, self.files, self.begin = total, files, time.monotonic()
        self.is_terminal = sys.stderr.isatty()
        self.every = 0.2 if self.is_terminal else 10.0
        self.last, self.first = self.begin, None

    def __call__(self, done: int) -> None:
        now = time.monotonic()
        self.first = done if self.first is None else self.first
        if now < self.last + self.every:
            return
        self.last, speed = now, (done - self.first) / (now - self.begin)
        left = f", {clock((self.total - done) / speed)} left" if speed else ""
        line = (f"encoding {human_bytes(done)} of {human_bytes(self.total)} in {self.files:,} "
                f"files, {human_bytes(speed)} a second{left}")
        print(f"\r{line}\x1b[K" if self.is_terminal else line,
              end="" if self.is_terminal else "\n", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self.is_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def clock(seconds: float) -> str:
    """A duration as text: 0:07, 12:30, 3:05:00."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def some(count: int, what: str) -> str:
    """A count as text: 1 file, 2,000 files."""
    return f"{count:,} {what}" + "s" * (count != 1)


def what_was_skipped(record: dict[str, Any]) -> list[str]:
    """From data.json: the kinds of files that were skipped ('': none), and a line for each kind of
    problem within files."""
    files = record.get("skipped", {})
    return [f"{sum(files.values()):,}: {counted(files)}" if files else "",
            *(f"{count:,} {kind}; the first is {first}"
              for kind, (count, first) in record.get("problems", {}).items())]


def about_weights(record: dict[str, Any]) -> list[str]:
    """From data.json: a line on the weights of --weight_field, if there are any."""
    if "weights" not in record:
        return []
    zero, lacking = record["weights"]["noted"]
    tokens, learned = (sum(record[split][name] for split in SPLITS)
                       for name in ("tokens", "learned"))
    return [f"by {record['weights']['field']!r}: {zero:,} of {record['documents']:,} documents "
            f"have weight 0, {lacking:,} without it have weight 1; {learned:,} of {tokens:,} "
            f"tokens have a weight above 0"]


def summary(record: dict[str, Any]) -> str:
    """What a prepared folder was made of, from its data.json: lines to print."""
    tokens, size = (sum(record[split][name] for split in SPLITS) for name in ("tokens", "bytes"))
    files, *lines = what_was_skipped(record)
    lines = [f"read     {some(record['files'], 'file')}" + (files and f"; skipped {files}"),
             *(f"skipped  {line}" for line in lines)]
    lines += [f"weights  {line}" for line in about_weights(record)]
    if "learned" in record["train"] and record["form"] != "text":
        count = sum(record[split]["learned"] for split in SPLITS)
        lines.append(f"learned  {count:,} of {tokens:,} tokens are answers")
    longest = ", ".join(f"{length:,} ({name})" for length, name in record["longest"])
    lines.append(f"made     {some(record['documents'], 'document')}, {tokens:,} tokens, "
                 f"{size / max(tokens, 1):.2f} bytes per token, in {clock(record['seconds'])}; "
                 f"longest: {longest}")
    return "\n".join(lines)

