"""The code that every other wing uses: flags, messages, processes, the mesh. Read it when a message
puzzles you.

    errors      the exceptions that end a command, and helpers for writing messages
    flags       builds command lines from dataclasses; sets exit statuses
    parts       the only way to reach the folders that a fork may delete
    start       runs before a command imports jax
    options     declares an option: default, help, values, whether it may change
    files       whole-file writes, JSON, hashes
    edited      tracks which files have passed the tests, and which were edited since
    hosts       multiple processes: joining them, exchanging values, the watchdog
    report      prints a run's progress
    chips       accelerators' published numbers, the memory in use, XLA options by platform
    mesh        the device mesh, specs, and the types that track which axes a value varies over

Imports: none of our other code. Imported by: everything.
"""
