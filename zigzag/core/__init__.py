"""The code that every other wing uses: flags, messages, processes, the mesh. Read it when a message
puzzles you.

    errors      the exceptions that end a command, and helpers that word messages
    flags       command lines from dataclasses, and exit statuses
    synonyms    flags of other codebases, and our flags for them
    parts       the one way to the folders that may be deleted
    start       what a command does before it imports jax
    options     what is declared of an option: default, help, values, whether it may change
    files       whole-file writes, JSON, hashes
    edited      on which files the tests have passed, and which were edited since
    chips       what accelerators can do; the chips of --topology
    hosts       several processes: meeting, exchanging values, the watchdog
    report      what a run prints while it trains
    compiler    XLA's options for our programs, on each platform
    mesh        the device mesh, specs, and the types that say over which axes values vary

Imports: none of our other code. Imported by: everything.
"""
