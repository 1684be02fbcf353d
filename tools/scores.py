"""Log-probabilities of given ids, summed per row, for sample.score and sample.py --score.

The model reads a row longer than the context in windows that overlap by half:

    a b c d e f g       a context of 4 tokens
    a b c d             b c d are scored
        c d e f         e f
            e f g       g
"""

import json
import math
from typing import Any, Iterator, Sequence

import numpy as np

import sample
from zigzag.commands.sampling import Model
from zigzag.core.errors import ConfigError, printable
from zigzag.generate.cache import CHUNK
from zigzag.generate.engine import Engine, mesh_of_weights
from zigzag.generate.passes import prefill, room_for
from zigzag.generate.prompts import Flags, Input
from zigzag.generate.rows import on_host, pad_rows, prompt_arrays
from zigzag.parallel.products import LOGITS


def logprobs_of(engine: Engine, params: Any, rows: Sequence[Sequence[int]], sources: Any,
                batch: int, given: Sequence[int] | None = None) -> list[tuple[float, int, int]]:
    """For each row, return the sum of its ids' log-probabilities, the number of ids in the sum, and
    how many of those are the model's argmax. All ids count except the first, or the first
    given[row] ids. The model reads a row longer than the context in windows that overlap by half,
    dropping given ids that don't fit into a single window with the rest."""
    length = engine.config.seq_len - len(engine.network.source_ids(engine.config))
    # Batch rows of similar length, to keep padding small.
    windows = sorted(overlapping_windows(rows, length, given), key=lambda one: len(one[1]))
    totals = np.zeros((len(rows), 3))
    with mesh_of_weights(params):
        params = engine.for_decoding(params)
        for at in range(0, len(windows), batch):
            some = windows[at:at + batch]
            for (number, ids, context), (total, best) in zip(
                    some, _sums(engine, params, some, sources)):
                totals[number] += total, max(0, len(ids) - context), best
    return [(float(total), int(count), int(best)) for total, count, best in totals]


def overlapping_windows(rows: Sequence[Sequence[int]], length: int,
                        given: Sequence[int] | None = None) -> Iterator[tuple[int, Any, int]]:
    """Split the rows into windows that overlap by half. Yield (the row's number, the window's ids,
    how many of them are unscored context). The first given[row] ids of a row (default: 1) are never
    scored. If the row is longer than a window, drop as many of these as needed."""
    if length < 2:
        raise ConfigError(f"seq_len {length}: to score a token, the context must be at least 2")
    half = length // 2
    for number, (ids, context) in enumerate(zip(rows, given or [1] * len(rows), strict=True)):
        left_out = max(0, min(context - 1, len(ids) - length))
        ids, context, begin = ids[left_out:], context - left_out, 0
        while begin == 0 or begin + length - half < len(ids):
            yield number, ids[begin:begin + length], context
            begin, context = begin + half, length - half


def _sums(engine, params, windows, sources):
    """Return read_chunk's sums [B, 2] over these windows' scored ids."""
    rows = prompt_arrays(engine.network, [ids for _, ids, _ in windows], engine.config, 0,
                         None if sources is None else [sources[n] for n, *_ in windows])
    scored = pad_rows(np.array([len(ids) - context for _, ids, context in windows]))
    (B, size), chunk = rows["tokens"].shape, CHUNK
    while chunk > 16 and B * chunk * engine.config.vocab_size > LOGITS:     # must fit in memory
        chunk //= 2
    # Rolling makes the first token the last target, with weight 0.
    weights = np.arange(size) >= size - scored[:, None]
    rows |= {"targets": np.roll(rows["tokens"], -1, 1), "weights": np.roll(weights, -1, 1)}
    return on_host(prefill(engine, params, rows, *room_for(engine, rows, 0), chunk)["sums"])


# -------------------------------------------------------------------------------------------
# The command

def run(model: Model, file: Input) -> None:
    """Run sample.py --score: print the log-probability, scored token count and perplexity of each
    text in the file, and of all texts together."""
    flags, texts = model.flags, [file.text]     # running text is a single document
    if flags.by == "line" or file.has_objects:
        texts = file.texts("text")
    # The first id, which is the tokenizer's start id or else the text's first id, has no score.
    rows, found = [model.tokenizer.prompt(text) for text in texts], []
    if not flags.json:
        print("log-probability    tokens  perplexity  text")
    for at in range(0, len(rows), flags.batch):
        part = slice(at, at + flags.batch)
        for text, pair in zip(texts[part], sample.score(
                model.params, rows[part], model.c, batch=flags.batch)):
            found.append(pair)
            print(score_line(flags, "text", text, *pair), flush=True)
    logprobs, counts = zip(*found)
    if flags.json or len(texts) > 1:
        total = len(texts) if flags.json else f"all {len(texts):,} texts"
        print(score_line(flags, "texts", total, math.fsum(logprobs), sum(counts)))


def score_line(flags: Flags, name: str, text: Any, logprob: float, tokens: int) -> str:
    """Format a line of the score table or, with --json, a JSON object."""
    perplexity = math.exp(min(-logprob / tokens, 700)) if tokens else None
    if flags.json:
        return json.dumps({name: text, "logprob": logprob, "tokens": tokens,
                           "perplexity": perplexity})
    text = printable(" ".join(text.split()))
    return f"{logprob:15.3f}  {tokens:8,}  {perplexity or math.nan:10,.3f}  {text:.57}"
