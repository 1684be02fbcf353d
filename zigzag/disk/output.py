"""The files of a corpus while it is made.

    train.bin.part   tokens              train.docs.part      where each document begins
    *.learned.part   which are targets   order.part           the split of each document
    *.weights.part   or their weights
    progress.json    up to which task all of this is on disk

The .part files only grow, or are cut back to an earlier size after progress.json says so. `finish`
makes the final files of them and leaves them as they are, so that it can be interrupted, too;
`clean` removes them when data.json has been written.
"""

import itertools
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any, Iterator, NamedTuple, Sequence

import numpy as np

from zigzag.core.errors import ConfigError
from zigzag.core.files import lock, write_json
from zigzag.disk.reading import Task, Trouble
from zigzag.disk.tokenizers import FILES, Tokenizer

# Of data.json and of what is beside it. Another one is refused.
FORMAT = 0
SPLITS = ("train", "held_out")
SAVE_SECONDS = 5.0
COUNTS = ("tokens", "bytes", "spelled", "documents", "learned")
# {file beside the tokens: what it has for each token}
MARKS = {"weights": np.dtype("float32"), "learned": np.dtype("uint8")}


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
        # (For each split a count. `open`: split, tokens and bytes of the document that goes on.)
        self.state = {"settings": settings, "tasks": 0, "problems": {}, "longest": [],
                      "open": None, "noted": [0, 0], **{name: [0, 0] for name in COUNTS}}
        self.kinds = {"bin": self.dtype, "docs": np.dtype("uint64")}
        self.is_text = settings["form"] == "text"
        # (The file of marks: weights, or which tokens are answers. Of text without weights: none.)
        self.marks = ("weights" if settings.get("weight_field") else
                      "" if self.is_text else "learned")
        if self.marks:
            self.kinds[self.marks] = MARKS[self.marks]
        self.files = {name: open(self.part(*name), "ab") for name in self._sizes()}
        self._lock()
        is_new = not self.path.exists()
        if not is_new:
            self.state = json.loads(self.path.read_text())
        self._cut()
        self.save(at_once=True)
        self.is_new = is_new        # nothing was saved but its beginning

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
            lock(self.files["order",])
        except BlockingIOError:
            raise ConfigError(f"--out {self.folder}: another process encodes into this "
                              f"folder") from None
        except OSError:             # (a disk without locks)
            pass

    def part(self, kind: str, split: int | None = None) -> Path:
        name = kind if split is None else f"{SPLITS[split]}.{kind}"
        return self.folder / f"{name}.part"

    def _sizes(self):
        """The size of each file, {(kind, split): bytes}."""
        sizes = {(kind, split): dtype.itemsize * self.state[
            "documents" if kind == "docs" else "tokens"][split]
                 for kind, dtype in self.kinds.items() for split in range(2)}
        return {**sizes, ("order",): sum(self.state["documents"])}

    def _cut(self):
        for name, size in self._sizes().items():
            self.files[name].flush()
            self.files[name].truncate(size)

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
            for split in range(2):
                if (is_here := found.held_out == split).any():
                    self._write(found, split, is_here)
            found.held_out[found.begins].astype(np.uint8).tofile(self.files["order",])
            self._note(task, found)
            state["noted"] = [a + int(b) for a, b in zip(state["noted"], found.noted)]
        state["tasks"] += 1
        if drops:       # (first the state: a file may be too long, and not too short)
            self.save(at_once=True)
            self._cut()

    def _write(self, found, split, is_here):
        """Write the documents of this split."""
        counts, begins = found.counts[is_here], found.begins[is_here]
        chosen = slice(None) if is_here.all() else np.repeat(is_here, found.counts)
        tokens, starts = found.tokens[chosen], np.cumsum(counts) - counts
        tokens.tofile(self.files["bin", split])
        (starts[begins] + self.state["tokens"][split]).astype(np.uint64).tofile(
            self.files["docs", split])
        new = {"tokens": len(tokens), "bytes": found.sizes[is_here].sum(),
               "spelled": self.lengths[tokens].sum(dtype=int), "documents": begins.sum()}
        if self.marks:
            marks = found.marks[chosen]
            marks.astype(MARKS[self.marks]).tofile(self.files[self.marks, split])
            new["learned"] = (marks > 0).sum()
        if not self.is_text:
            new["bytes"] = new["spelled"]
        for name, more in new.items():
            self.state[name][split] += int(more)

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
        going_on, self.state["open"] = self.state["open"], None
        if not (is_written and going_on):
            return
        split, length, size = going_on
        self.state["longest"] = [x for x in self.state["longest"] if x[1] != task.file.name]
        self.files["bin", split].flush()
        last = mapped(self.part("bin", split), self.dtype)[-length:]
        spelled = sum(int(self.lengths[part].sum()) for part in _parts(last))
        for name, less in (("tokens", length), ("bytes", size), ("documents", 1),
                           ("spelled", spelled), ("learned", length if self.marks else 0)):
            self.state[name][split] -= less     # (weights of a text file are 1)

    def save(self, at_once: bool = False) -> None:
        """Make what is written safe, if the last time was a while ago."""
        if at_once or time.monotonic() > self.saved + SAVE_SECONDS:
            for file in self.files.values():
                file.flush()
                os.fsync(file.fileno())
            write_json(self.path, self.state)
            self.saved, self.is_new = time.monotonic(), False

    def finish(self) -> dict[str, Any]:
        """Make the final files, and return what data.json says of them. If hashes hold out almost
        none of the tokens, or too many (there are few documents), the last tenth is held out."""
        self.save(at_once=True)
        counts = {name: list(self.state[name]) for name in COUNTS}
        if 0.03 < counts["tokens"][1] / max(sum(counts["tokens"]), 1) < 0.3:
            for kind, split in itertools.product(self.kinds, range(2)):
                _link(self.part(kind, split), self.folder / f"{SPLITS[split]}.{kind}")
        else:
            counts = self._hold_out_the_end()
        names, settings = COUNTS if self.marks else COUNTS[:-1], self.state["settings"]
        record = {**{split: {name: counts[name][i] for name in names}
                     for i, split in enumerate(SPLITS)},
                  "form": settings["form"], "documents": sum(self.state["documents"]),
                  **{name: self.state[name] for name in ("problems", "longest")}}
        if self.marks == "weights":
            record["weights"] = {"field": settings["weight_field"], "noted": self.state["noted"]}
        return record

    def _hold_out_the_end(self):
        """Write all documents in their order, and hold out the last tenth of their tokens (of
        conversations, those that begin there). Returns the counts."""
        arrays = {(kind, split): mapped(self.part(kind, split), dtype)
                  for kind, dtype in self.kinds.items() for split in range(2)}
        ranges, starts = self._in_order(arrays)
        total = sum(self.state["tokens"])
        keep = total - total // 10
        if not self.is_text and len(starts) > 1:
            # (The two documents of a preference stay together.)
            firsts = starts[::2 if self.state["settings"]["form"] == "preference" else 1]
            keep = int(firsts[min(np.searchsorted(firsts, keep), len(firsts) - 1)]) or total
        counts = {"tokens": [keep, total - keep], "spelled": [0, 0], "learned": [0, 0]}
        for kind in self.kinds.keys() - {"docs"}:
            name = "spelled" if kind == "bin" else "learned"
            with (open(self.folder / f"train.{kind}", "wb") as train,
                  open(self.folder / f"held_out.{kind}", "wb") as held_out):
                at = 0
                for split, begin, end in ranges:
                    cut = begin + min(max(keep - at, 0), end - begin)
                    at += end - begin
                    for i, (file, a, b) in enumerate(((train, begin, cut), (held_out, cut, end))):
                        for part in _parts(arrays[kind, split][a:b]):
                            part.tofile(file)
                            counts[name][i] += int((self.lengths[part] if kind == "bin" else
                                                    part > 0).sum())
        begun = int(np.searchsorted(starts, keep))          # documents that begin before the cut
        after = np.unique(np.append(0, starts[begun:] - keep)) if keep < total else starts[:0]
        starts[:begun].astype(np.uint64).tofile(self.folder / "train.docs")
        after.astype(np.uint64).tofile(self.folder / "held_out.docs")
        size = sum(self.state["bytes"])
        held_out = round(size * counts["spelled"][1] / max(sum(counts["spelled"]), 1))
        return {**counts, "bytes": [size - held_out, held_out], "documents": [begun, len(after)]}

    def _in_order(self, arrays):
        """(where the documents are, in their order: (split, first token, end); where each begins if
        they stand in that order)."""
        order = mapped(self.part("order"), np.dtype("uint8"))
        begins = [arrays["docs", split].astype(np.int64) for split in range(2)]
        ends = [np.append(b[1:], n) for b, n in zip(begins, self.state["tokens"])]
        at, ranges, starts, written = [0, 0], [], [np.zeros(0, np.int64)], 0
        for split, run in itertools.groupby(order.tolist()):
            first, at[split] = at[split], at[split] + len(list(run))
            begin, end = int(begins[split][first]), int(ends[split][at[split] - 1])
            ranges.append((split, begin, end))
            starts.append(begins[split][first:at[split]] - begin + written)
            written += end - begin
        return ranges, np.concatenate(starts)

    def clean(self, more: Sequence[str] = ()) -> None:
        """Remove the .part files and what else only an encoding that goes on needs; `more`: these
        files, too."""
        for name in self.files:
            self.part(*name).unlink(missing_ok=True)
        for name in ("progress.json", "stdin", *more):
            (self.folder / name).unlink(missing_ok=True)


def is_of_encoding(path: Path) -> bool:
    """Whether a file may be of an encoding that was interrupted. (Before order.part is there, a
    file that is not a .part is somebody's own.)"""
    name = path.name.removesuffix(".part")
    return name == "stdin" or (name.split(".")[0] in (*SPLITS, "order", "progress", "data")
                               or name in FILES) and (
        name != path.name or (path.parent / "order.part").exists())


def _parts(array: np.ndarray) -> Iterator[np.ndarray]:
    """An array in parts of up to a million."""
    for i in range(0, len(array), 2**20):
        yield array[i:i + 2**20]


def _link(source, target):
    """Give a file a second name; where disks cannot do that, copy it."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    """The array in a file, mapped into memory."""
    size = path.stat().st_size
    if size % dtype.itemsize:
        raise ConfigError(f"{path} has {size} bytes, which is not a whole number of {dtype} "
                          f"tokens")
    return np.memmap(path, dtype, "r") if size else np.zeros(0, dtype)
