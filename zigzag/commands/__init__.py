"""The command lines of the top-level files: flags, continuing a run, running text as data.

Read it to add a flag's effect, or to see what `python train.py` does before `train.fit`. It stands
above the five files and imports them; they import it in nothing but their `main` and the like, so
a script that calls `train.fit` needs none of it.
"""
