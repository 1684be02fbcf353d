"""What every other wing uses, and what a person sees of a run. Read it when a message puzzles you.

    errors      the exceptions that end a command, and helpers that word them
    flags       command lines from dataclasses, and exit statuses
    familiar    words of other codebases, and our flags for them
    large_pages large pages of memory for a command, on Linux
    files       whole-file writes, JSON, hashes
    hosts       several processes: starting them, talking among them, the watchdog
    report      what a run prints while it goes on
    mesh        the device mesh, specs, and the types that say over which axes values vary

Imports: none of our other code. Imported by: everything.
"""
