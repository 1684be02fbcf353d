"""Precisions that the five files don't know about.

    send      --send_dtype float8: fsdp, tensor and pipe send 8 bits per number instead of 16
    adds      the flags that these files add

The folder rewrites the compiled step, so no collective in shard.py changes. It imports zigzag/.
Without it, runs train as before, and these flags are gone.
"""
