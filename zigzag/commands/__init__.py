"""The command lines of the top-level files: flags, resuming a run, running text as data.

Read this package to add a new flag, or to see what `python train.py` does before `train.fit`. It
sits above the five files and imports them. They import it only inside command-line functions such
as `main`, so a script that calls `train.fit` never loads it.
"""
