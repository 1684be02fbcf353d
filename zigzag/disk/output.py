"""The files of a corpus that data.py is still making, in its folder `unfinished`.

    bin.part        tokens of all documents        docs.part     where each document begins
    learned.part    which tokens are targets       order.part    the split of each document
    weights.part    or the weight of each token
    progress.json   how many pieces are on disk, and the size of each file at that point

The .part files only grow. When encoding resumes, it drops whatever was written after the last
progress.json. `finish` writes both splits without changing these files, so it can be interrupted.
"""

import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zigzag.core.files import record_in, write_json
from zigzag.disk.lines import Record
from zigzag.disk.reading import Trouble
from zigzag.disk.tokenizers import Tokenizer

# The format of data.json and the files next to it. `Corpus` rejects any other.
FORMAT = 1
SPLITS = ("train", "held_out")
SAVE_SECONDS = 5.0
PART = 2**20        # tokens per write
# {file next to the tokens: the dtype of its per-token numbers}
MARKS = {"weights": np.dtype("float32"), "learned": np.dtype("uint8")}


class EncodedPiece(NamedTuple):
    """A piece's documents, or parts of them."""
    tokens: np.ndarray      # all documents, concatenated
    starts: np.ndarray      # where documents begin in `tokens`
    held_out: np.ndarray    # which documents are held out
    marks: np.ndarray       # which tokens are targets; with --weight_field, their weights
    size: int               # bytes of text
    troubles: list[Trouble]


def dtype_of(tokenizer: Tokenizer) -> np.dtype:
    return np.dtype("uint16" if tokenizer.vocab_size <= 2**16 else "uint32")


class Output:
    """The files of an encoding in progress, in the folder `part`. If an encoding was interrupted
    there, `settings` must equal its settings. `marks` is a file of MARKS, or ''."""

    def __init__(self, part: Path, tokenizer: Tokenizer, settings: str, marks: str):
        self.part, self.marks = part, marks
        self.dtype, self.lengths = dtype_of(tokenizer), tokenizer.lengths().astype(np.int32)
        self.dtypes = {"bin": self.dtype, "docs": np.dtype("uint64"), "order": np.dtype("uint8")}
        if marks:
            self.dtypes[marks] = MARKS[marks]
        self.state = saved_state(part) or {
            "settings": settings, "pieces": 0, "bytes": 0, "troubles": {},
            "sizes": dict.fromkeys(self.dtypes, 0)}
        self.files = {kind: open(part / f"{kind}.part", "ab") for kind in self.dtypes}
        for kind, file in self.files.items():
            file.truncate(self.state["sizes"][kind])
            file.seek(0, os.SEEK_END)
        self.save(at_once=True)

    def __enter__(self) -> "Output":
        return self

    def __exit__(self, *_: Any) -> None:
        for file in self.files.values():
            file.close()

    def count(self, kind: str = "bin") -> int:
        """Return how many numbers are in a file so far."""
        return self.files[kind].tell() // self.dtypes[kind].itemsize

    def add(self, found: EncodedPiece) -> None:
        """Write a piece's documents."""
        starts = found.starts + self.count()
        for kind, values in (("bin", found.tokens), ("docs", starts), ("order", found.held_out),
                             (self.marks, found.marks)):
            if kind in self.files:
                self.files[kind].write(values.astype(self.dtypes[kind]).tobytes())
        for kind, message in found.troubles:
            count, first = self.state["troubles"].get(kind, (0, message))
            self.state["troubles"][kind] = count + 1, first
        self.state["bytes"] += found.size
        self.state["pieces"] += 1

    def save(self, at_once: bool = False) -> None:
        """Flush everything to disk, unless the last save was less than SAVE_SECONDS ago."""
        if at_once or time.monotonic() > self.saved + SAVE_SECONDS:
            for kind, file in self.files.items():
                file.flush()
                os.fsync(file.fileno())
                self.state["sizes"][kind] = file.tell()
            write_json(self.part / "progress.json", self.state)
            self.saved = time.monotonic()

    def finish(self, out: Path, form: str) -> Record:
        """Write the files of both splits into `out`, and return their entries for data.json. Hashes
        choose the held-out documents. If there are so few documents that the hashes pick too few or
        too many tokens, hold out the last tenth instead."""
        self.save(at_once=True)
        arrays = {kind: mapped(self.part / f"{kind}.part", dtype)
                  for kind, dtype in self.dtypes.items()}
        bounds = np.append(arrays["docs"].astype(np.int64), len(arrays["bin"]))
        bounds, is_held_out = _split(bounds, arrays["order"] == 1, form)
        counted = {}
        for i, split in enumerate(SPLITS):
            here = is_held_out == i
            lengths = np.diff(bounds)[here]
            (np.cumsum(lengths) - lengths).astype(np.uint64).tofile(out / f"{split}.docs")
            # Where each run of adjacent documents in this split begins and ends.
            parts = bounds[np.flatnonzero(np.diff(np.pad(here, 1)))].reshape(-1, 2).tolist()
            record = counted[split] = {"tokens": int(lengths.sum()), "documents": len(lengths)}
            record["spelled"] = sum(int(self.lengths[ids].sum()) for ids in _copied(
                out / f"{split}.bin", arrays["bin"], parts))
            if self.marks:
                record["learned"] = sum(map(np.count_nonzero, _copied(
                    out / f"{split}.{self.marks}", arrays[self.marks], parts)))
        # Divide the bytes that the tokenizer drops or changes between the splits, in proportion.
        spelled = sum(record["spelled"] for record in counted.values())
        for record in counted.values():
            record["bytes"] = record["spelled"] if form != "text" else round(
                self.state["bytes"] * record["spelled"] / max(spelled, 1))
        return {**counted, "form": form, "documents": len(arrays["docs"]),
                "problems": self.state["troubles"]}


def saved_state(part: Path) -> Record:
    """Return the content of progress.json, or {} if it can't be read."""
    return record_in(part / "progress.json")


def _split(bounds, is_held_out, form):
    """Return where documents begin (and where the last one ends), and which are held out. Holding
    out the last tenth may cut a document in two."""
    total, held_out = int(bounds[-1]), np.diff(bounds)[is_held_out].sum()
    if 0.03 < held_out / max(total, 1) < 0.3:
        return bounds, is_held_out
    keep = total - total // 10
    if form != "text" and len(bounds) > 2:          # keep conversations whole
        # The two documents of a preference stay together.
        firsts = bounds[:-1:2 if form == "preference" else 1]
        keep = int(firsts[min(np.searchsorted(firsts, keep), len(firsts) - 1)]) or total
    bounds = np.unique(np.append(bounds, keep))
    return bounds, bounds[:-1] >= keep


def _copied(path, values, parts):
    """Write these parts of an array to a file, yielding each chunk written."""
    values = np.asarray(values)         # slices of a memmap are slow
    with open(path, "wb") as file:
        for first, last in parts:
            for begin in range(first, last, PART):
                part = values[begin:min(begin + PART, last)]
                file.write(part)
                yield part


def mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    """Memory-map the array in a file."""
    count = path.stat().st_size // dtype.itemsize
    return np.memmap(path, dtype, "r", shape=(count,)) if count else np.zeros(0, dtype)
