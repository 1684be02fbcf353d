"""The files of a corpus while it is made.

    bin.part         tokens of all documents       docs.part    where each document begins
    learned.part     which of them are targets     order.part   the split of each document
    weights.part     or their weights
    progress.json    up to which task all of this is on disk

The .part files only grow, or are cut back to an earlier size after progress.json says so. `finish`
writes the files of both splits from them, and leaves them as they are, so that it can be
interrupted, too; `clean` removes them when data.json has been written.
"""

import contextlib
import json
import os
import re
import time
from pathlib import Path
from typing import Any, NamedTuple, Sequence

import numpy as np

from zigzag.core.errors import ConfigError
from zigzag.core.files import anyway, lock, write_json
from zigzag.disk.reading import Task, Trouble
from zigzag.disk.tokenizers import FILES, Tokenizer

# Of data.json and of what is beside it. Another one is refused.
FORMAT = 0
SPLITS = ("train", "held_out")
SAVE_SECONDS = 5.0
PART = 2**20        # tokens that are split at a time
# {file beside the tokens: what it has for each token}
MARKS = {"weights": np.dtype("float32"), "learned": np.dtype("uint8")}
# {file: what it has for each document}
OF_DOCUMENTS = {"docs": np.dtype("uint64"), "order": np.dtype("uint8")}


class Encoded(NamedTuple):
    """The documents of a task, or parts of them: their tokens one after the other, and for each the
    number of tokens and of bytes of text, whether it begins here (or in a task before), and whether
    it is held out."""
    tokens: np.ndarray
    counts: np.ndarray
    sizes: np.ndarray
    begins: np.ndarray
    held_out: np.ndarray
    problems: list[tuple[Trouble, bool]]    # (and whether its document begins here)
    marks: np.ndarray       # which tokens are targets; with --weight_field, their weights
    noted: list[int]        # how many documents have the weight 0, and how many have none


def dtype_of(tokenizer: Tokenizer) -> np.dtype:
    return np.dtype("uint16" if tokenizer.vocab_size <= 2**16 else "uint32")


class Output:
    """The files of an encoding that goes on."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, settings: dict[str, Any]):
        self.folder, self.path = folder, folder / "progress.json"
        self.dtype, self.lengths = dtype_of(tokenizer), tokenizer.lengths().astype(np.int32)
        # (`bytes`: of each split. `open`: split, tokens and bytes of the document that goes on.)
        self.state = {"settings": settings, "tasks": 0, "tokens": 0, "documents": 0,
                      "bytes": [0, 0], "problems": {}, "longest": [], "open": None,
                      "noted": [0, 0]}
        self.is_text = settings["form"] == "text"
        # (The file of marks: weights, or which tokens are answers. Of text without weights: none.)
        self.marks = ("weights" if settings.get("weight_field") else
                      "" if self.is_text else "learned")
        self.of_tokens = {"bin": self.dtype} | (
            {self.marks: MARKS[self.marks]} if self.marks else {})
        self.files = {kind: open(self.part(kind), "ab") for kind in self.of_tokens | OF_DOCUMENTS}
        self._lock()
        self.is_new = not self.path.exists()        # nothing was saved but its beginning
        is_new = self.is_new
        if not is_new:
            self.state = json.loads(self.path.read_text())
        self._cut()
        self.save(at_once=True)
        self.is_new = is_new

    def __enter__(self) -> "Output":
        return self

    def __exit__(self, kind: type | None, *_: Any) -> None:
        for file in self.files.values():
            file.close()
        if self.is_new and kind and issubclass(kind, ConfigError):
            self.clean(FILES)       # refused at once: other flags are welcome

    def _lock(self):
        """Refuse a folder into which another process encodes."""
        try:
            lock(self.files["order"])
        except BlockingIOError:
            raise ConfigError(f"--out {self.folder}: another process encodes into this "
                              f"folder") from None
        except OSError:             # (a disk without locks)
            pass

    def part(self, kind: str) -> Path:
        return self.folder / f"{kind}.part"

    def _cut(self):
        """Cut the files back to what the state counts."""
        for kinds, count in ((self.of_tokens, "tokens"), (OF_DOCUMENTS, "documents")):
            for kind, dtype in kinds.items():
                self.files[kind].flush()
                self.files[kind].truncate(self.state[count] * dtype.itemsize)

    def add(self, task: Task, found: Encoded) -> None:
        """Write the documents of a task."""
        state, drops = self.state, False
        for problem, begins in found.problems:
            if problem.drops and not begins and not state["open"]:
                continue        # (the document was dropped before)
            if problem.drops:       # (a task of a text file has nothing else)
                self._drop(task, is_written=not begins)
                drops = True
            count, first = state["problems"].get(problem.kind, (0, problem.message))
            state["problems"][problem.kind] = count + 1, first
        # (What goes on here may be the rest of a document that was dropped.)
        if len(found.counts) and (found.begins[0] or state["open"]):
            self._write(found)
            self._note(task, found)
            state["noted"] = [a + int(b) for a, b in zip(state["noted"], found.noted)]
        state["tasks"] += 1
        if drops:       # (first the state: a file may be too long, and not too short)
            self.save(at_once=True)
            self._cut()

    def _write(self, found):
        starts = np.cumsum(found.counts) - found.counts + self.state["tokens"]
        for kind, values in (("bin", found.tokens), ("docs", starts[found.begins]),
                             ("order", found.held_out[found.begins]), (self.marks, found.marks)):
            if kind:
                dtype = (self.of_tokens | OF_DOCUMENTS)[kind]
                values.astype(dtype, copy=False).tofile(self.files[kind])
        self.state["tokens"] += len(found.tokens)
        self.state["documents"] += int(found.begins.sum())
        for split in range(2):
            self.state["bytes"][split] += int(found.sizes[found.held_out == split].sum())

    def _note(self, task, found):
        """Remember the last document, which may go on, and the longest ones."""
        lengths, sizes, state = found.counts.tolist(), found.sizes.tolist(), self.state
        if not found.begins[0]:
            lengths[0] += state["open"][1]
            sizes[0] += state["open"][2]
            state["longest"] = [x for x in state["longest"] if x[1] != task.file.name]
        state["open"] = int(found.held_out[-1]), lengths[-1], sizes[-1]
        longest = sorted(lengths, reverse=True)[:3]
        state["longest"] += [[length, task.file.name] for length in longest]
        state["longest"] = sorted(state["longest"], reverse=True)[:3]

    def _drop(self, task, is_written):
        """Leave out a document: no longer count what is written of it, and skip the rest."""
        state, going_on = self.state, self.state["open"]
        state["open"] = None
        if is_written and going_on:
            split, length, size = going_on
            state["longest"] = [x for x in state["longest"] if x[1] != task.file.name]
            state["tokens"] -= length
            state["documents"] -= 1
            state["bytes"][split] -= size

    def save(self, at_once: bool = False) -> None:
        """Make what is written safe, if the last time was a while ago."""
        if at_once or time.monotonic() > self.saved + SAVE_SECONDS:
            for file in self.files.values():
                file.flush()
                os.fsync(file.fileno())
            write_json(self.path, self.state)
            self.saved, self.is_new = time.monotonic(), False

    def finish(self) -> dict[str, Any]:
        """Write the files of the splits, and return what data.json says of them. If hashes hold out
        almost none of the tokens, or too many (there are few documents), the last tenth is held
        out."""
        self.save(at_once=True)
        state, size = self.state, self.state["bytes"]
        starts, is_held_out, is_by_hash = self._split()
        counts = self._write_splits(starts, is_held_out)
        spelled = counts["spelled"]
        if not self.is_text:
            size = spelled
        elif not is_by_hash:
            held_out = round(sum(size) * spelled[1] / max(sum(spelled), 1))
            size = [sum(size) - held_out, held_out]
        names = ("tokens", "bytes", "spelled", "documents", *(["learned"] if self.marks else []))
        counts["bytes"] = size
        record = {**{split: {name: counts[name][i] for name in names}
                     for i, split in enumerate(SPLITS)},
                  "form": state["settings"]["form"], "documents": state["documents"],
                  "problems": state["problems"], "longest": state["longest"]}
        if self.marks == "weights":
            record["weights"] = {"field": state["settings"]["weight_field"],
                                 "noted": state["noted"]}
        return record

    def _split(self):
        """(where documents begin, which of them are held out, whether by hashes). If the end is
        held out, a document of which only a part is held out is two."""
        total, form = self.state["tokens"], self.state["settings"]["form"]
        starts, order = (mapped(self.part(kind), dtype) for kind, dtype in OF_DOCUMENTS.items())
        starts = starts.astype(np.int64)
        held_out = np.diff(np.append(starts, total))[order == 1].sum()
        if 0.03 < held_out / max(total, 1) < 0.3:
            return starts, order == 1, True
        keep = total - total // 10
        if not self.is_text and len(starts) > 1:        # (whole conversations)
            # (The two documents of a preference stay together.)
            firsts = starts[::2 if form == "preference" else 1]
            keep = int(firsts[min(np.searchsorted(firsts, keep), len(firsts) - 1)]) or total
        if keep < total:
            starts = np.unique(np.append(starts, keep))
        return starts, starts >= keep, False

    def _write_splits(self, starts, is_held_out):
        """Write the files of the splits. Returns the counts, {name: [of train, of held_out]}."""
        total = self.state["tokens"]
        counts = {name: [0, 0] for name in ("tokens", "documents", "spelled", "learned")}
        lengths = np.diff(np.append(starts, total))
        for i, split in enumerate(SPLITS):
            own = lengths[is_held_out == i]
            (np.cumsum(own) - own).astype(np.uint64).tofile(self.folder / f"{split}.docs")
            counts["tokens"][i], counts["documents"][i] = int(own.sum()), len(own)
        for kind, dtype in self.of_tokens.items():
            array, name = mapped(self.part(kind), dtype), "spelled" if kind == "bin" else "learned"
            with contextlib.ExitStack() as stack:
                files = [stack.enter_context(open(self.folder / f"{split}.{kind}", "wb"))
                         for split in SPLITS]
                for begin in range(0, total, PART):
                    part = array[begin:begin + PART]
                    end = begin + len(part)
                    first, last = np.searchsorted(starts, begin, "right") - 1, np.searchsorted(
                        starts, end)
                    bounds = np.append(np.maximum(starts[first:last], begin), end)
                    is_of = np.repeat(is_held_out[first:last], np.diff(bounds))
                    for i, file in enumerate(files):
                        own = part[is_of == i]
                        own.tofile(file)
                        counts[name][i] += int((self.lengths[own] if kind == "bin" else
                                                own > 0).sum(dtype=int))
        return counts

    def clean(self, more: Sequence[str] = ()) -> None:
        """Remove the .part files and what else only an encoding that goes on needs; `more`: these
        files, too."""
        for kind in self.files:
            self.part(kind).unlink(missing_ok=True)
        for name in ("progress.json", "stdin", *more):
            (self.folder / name).unlink(missing_ok=True)


# {files of an encoding that was interrupted: on which condition}. (Before order.part is there, a
# file that is not a .part is somebody's own.)
_OWN = "|".join([r"(train|held_out|progress|data)\..*", *map(re.escape, FILES)])
OF_ENCODING = {rf"stdin(\.part)?|({'|'.join(['bin', *MARKS, *OF_DOCUMENTS])}|{_OWN})\.part": anyway,
               _OWN: lambda path: (path.parent / "order.part").exists()}


def mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    """The array in a file, mapped into memory."""
    size = path.stat().st_size
    if size % dtype.itemsize:
        raise ConfigError(f"{path} has {size} bytes, which is not a whole number of {dtype} "
                          f"tokens")
    return np.memmap(path, dtype, "r") if size else np.zeros(0, dtype)
