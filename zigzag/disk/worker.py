"""A process that encodes for encoding.py: tasks in, results out, until the input ends."""

import gc
import os
import pickle
import sys

from zigzag.disk.encoding import encode
from zigzag.disk.tokenizers import KINDS, Bytes


def serve() -> None:
    """Answer each task with its result, or with the exception that it ended with."""
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)               # (what a library prints must not get among the results)
    kind, path, options = pickle.load(source)
    gc.disable()                # (it looks at all lists of ids, again and again, for nothing)
    tokenizer = KINDS[kind](path) if path else Bytes()
    while True:
        try:
            task = pickle.load(source)
        except EOFError:
            return
        try:
            result = encode(task, tokenizer, options)
        except Exception as e:
            result = e
        pickle.dump(result, sink, pickle.HIGHEST_PROTOCOL)
        sink.flush()


if __name__ == "__main__":
    serve()
