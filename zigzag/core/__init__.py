"""What every other wing uses: flags, messages, processes, the mesh. Read it when a message puzzles
you.

    errors      the exceptions that end a command, and helpers that word messages
    flags       command lines from dataclasses, and exit statuses
    synonyms    flags of other codebases, and our flags for them
    parts       the only way to reach the folders that a fork may delete
    start       what a command does before it imports jax
    options     the declaration of an option: default, help, values, whether it may change
    files       whole-file writes, JSON, hashes
    edited      which files have passed the tests, and which were edited since
    chips       what accelerators can do; the chips of --topology
    hosts       several processes: joining them, exchanging values, the watchdog
    report      what a run prints while it trains
    compiler    XLA options for our programs, by platform
    mesh        the device mesh, specs, and the types that say over which axes values vary

Imports: none of our other code. Imported by: everything.
"""
