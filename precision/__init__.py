"""Precisions that the five files don't know about.

    loss_scale  --dtype float16: a loss scale that follows from the gradients
    send        --send_dtype float8: fsdp, tensor and pipe send 8 bits per number instead of 16
    adds        the flags that these files add

send rewrites the traced step, so no collective in shard.py changes. The folder imports zigzag/.
Without it, runs train as before, and these flags and float16 are gone.
"""
