"""The command lines of the top-level files: flags, continuing a run, running text as data.

Read it to implement a new flag, or to see what `python train.py` does before `train.fit`. It stands
above the five files and imports them. They import it only inside functions of their command lines,
such as `main`, so a script that calls `train.fit` needs none of it.
"""
