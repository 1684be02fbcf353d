"""Accounts of a run: questions that come up once a run or an edit looks wrong.

    spent         where a run's time went: --report RUN
    profile       a trace of some steps: --profile 5
    find_nan      where a number first became infinite or NaN: --find_nan
    accept        whether a precision is good enough: --accept 0.01
    against       what an edit costs: --against REVISION compares two compiled steps
    compile_once  compiles one of them, in a process of its own
    work          what a compiled program does, by the lines that asked for it
    adds          the flags that these files add

against needs git and forecast/. The folder imports zigzag/ and the five files. Without it, runs
train as before, and these flags are gone.
"""
