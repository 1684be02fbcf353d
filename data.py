"""Turns text into tokens, and tokens into batches.

    files --prepare--> train.bin, held_out.bin, data.json --Windows--> examples --collate--> batch
          zigzag/disk/reading.py finds and reads files, encoding.py encodes them on all cores
          packing.py fills rows with whole documents, mixture.py mixes several sources

On disk, tokens are plain arrays of uint16 (uint32 above 65,536 ids) next to a small JSON file. They
are memory-mapped, never loaded whole. The examples in a step's batch are a pure function of (seed,
step), so there is no position to save, and any number of processes agree. This file needs numpy,
not jax.

    python data.py PATH ... --out DIR --vocab_size 8192     train a tokenizer and encode with it
"""

import dataclasses
from typing import Any, Sequence

import numpy as np

from zigzag.core.errors import ConfigError
from zigzag.core.files import read_at_random
from zigzag.core.flags import from_flags, run_main
from zigzag.disk.corpus import prepare
from zigzag.disk.encoding import summary
from zigzag.disk.packing import Packed, Part, ids_of, parts_of
from zigzag.disk.reading import Options
from zigzag.disk.tokenizers import tokenizer_at
from zigzag.disk.weights import finite_weights

# -------------------------------------------------------------------------------------------
# Examples, and their order
#
# Examples are numbered from 0. An endless sequence visits each example once in a shuffled order,
# then once again in a different order, and so on (zigzag/disk/mixture.py). Update `at` takes
# indices at * B ... at * B + B - 1, so the seed and `at` alone determine its batch. With 5
# examples, a batch of 2 and seed 0:
#
#     index      0 1 | 2 3 | 4 5 | 6 7 | 8 9
#     example    1 3 | 0 2 | 4 3 | 2 1 | 0 4
#     update     0     1     2     3     4

class Windows:
    """Running text cut into examples of T + 1 tokens: T inputs, and the T targets one token later.
    Leftover tokens are dropped; a text of at most T tokens makes a single short example. With
    weights, an example is a Part: inputs, targets and the targets' weights."""

    def __init__(self, tokens: np.ndarray, length: int, vocab_size: int = 2**31,
                 weights: np.ndarray | None = None):
        read_at_random(tokens)
        read_at_random(weights)
        self.tokens, self.length, self.vocab_size = tokens, length, vocab_size
        self.weights = weights      # of each token as a target
        self.count = max(len(tokens) - 1, 0) // length or int(len(tokens) > 1)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> np.ndarray | Part:
        if not 0 <= i < self.count:
            raise IndexError(i)
        start = i * self.length
        ids = ids_of(self.tokens, start, start + self.length + 1, self.vocab_size)
        if self.weights is None:
            return ids
        return Part(ids[:-1], ids[1:], finite_weights(self.weights, start + 1, len(ids) - 1))


def rows_of(corpus: Any, split: str, length: int, pack: str, seed: int = 0) -> Sequence:
    """Return a corpus's examples, each with `length` targets: windows of running text
    (pack="stream"), or rows of whole documents ("documents")."""
    if pack == "documents":
        return Packed(corpus.documents(split), length, seed, cut=not corpus.is_learned_in_part)
    return Windows(getattr(corpus, split), length, vocab_size=corpus.tokenizer.vocab_size,
                   weights=corpus.weights[split])


def collate(examples: Sequence[np.ndarray | Part | list[Part]], length: int
            ) -> dict[str, np.ndarray]:
    """Make a batch from examples of any kind: tokens, targets and weights [B, T]. A weight is 0
    where there is no target. For rows of documents or conversations (lists), the batch also has
    segments and positions, so that attention stays within each document."""
    is_packed = isinstance(examples[0], list)
    names = ("tokens", "targets", "segments", "positions")[:4 if is_packed else 2]
    batch = {name: np.zeros((len(examples), length), np.int32) for name in names}
    batch["weights"] = np.zeros((len(examples), length), np.float32)
    for row, example in enumerate(examples):
        at = 0
        for number, part in enumerate(parts_of(example), 1):
            here = row, slice(at, at := at + len(part.tokens))
            batch["tokens"][here], batch["targets"][here] = part.tokens, part.targets
            batch["weights"][here] = part.weights
            if is_packed:
                batch["segments"][here] = number
                batch["positions"][here] = np.arange(len(part.tokens))
    return batch


# -------------------------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Flags:
    """python data.py PATH ... --out DIR [--vocab_size N]: encode text for train.py --data DIR

    PATH is a text file, JSON lines (.jsonl), .parquet, any of these compressed (.gz .bz2 .xz .zst),
    a folder of such files, a pattern such as 'texts/*.txt', or - for standard input."""
    out: str = "data"           # folder to create
    vocab_size: int = 8192      # subwords in the new tokenizer; 0: bytes, without a tokenizer
    tokenizer: str = ""         # existing tokenizer to use: a sentencepiece .model, a
                                # tokenizer.json, a folder with one, or bytes
    field: str = "text"         # field or column that holds the text (JSON lines, .parquet)
    weight_field: str = ""      # field or column that holds loss weights (JSON lines, .parquet):
                                # one number per text, or a list with one per token
    strict: bool = False        # stop at the first unreadable text instead of skipping it
    cores: int = 0              # encoding processes; 0: one per core


def main(argv: Sequence[str] | None = None) -> None:
    paths, flags = from_flags(Flags(), argv, "PATH")
    if not paths:
        raise ConfigError("no PATH given: python data.py PATH ... --out DIR, with text files or "
                          "folders of them")
    if flags.tokenizer and flags.vocab_size != Flags.vocab_size:
        raise ConfigError(f"--vocab_size {flags.vocab_size}: --tokenizer {flags.tokenizer} has its "
                          f"own; give only one")
    tokenizer = tokenizer_at(flags.tokenizer) if flags.tokenizer else None
    vocab_size = 0 if tokenizer else flags.vocab_size
    if vocab_size and vocab_size < 300:
        raise ConfigError(f"--vocab_size {vocab_size}: expected at least 300 (256 bytes plus "
                          f"subwords), or 0 for bytes only")
    options = Options(flags.field, flags.strict, weight_field=flags.weight_field)
    corpus = prepare(paths, flags.out, vocab_size, tokenizer, "", options, flags.cores)
    print(summary(corpus.record), corpus, sep="\n")


if __name__ == "__main__":
    run_main(main)
