"""The machinery behind the top-level files, in wings, listed from the lowest to the highest.

    core        errors, flags, reports, processes, the mesh; read it when a message puzzles you
    parallel    what stands behind the sections of shard.py; read it to learn
    rule        how the split of each weight is found; read it to learn
    disk        tokenizers, examples, batches, checkpoints; read it to bring your own data
    weights     what follows from a table of weights: first values, counts, adapters; seldom read
    hub         Hugging Face folders in and out; read it to add a family
    generate    the KV cache, decoding, prompts; read it for sampling
    measure     chips, compiled programs, expected traffic, forecasts; read it to predict a run
    run         the plan, the loop, evaluation, metrics; read it when you change the loop
    commands    the command lines of the top-level files, above them; read it to change one

A wing imports only wings listed before it and, except for commands, no top-level file. The table at
the top of tests/test_layout.py says which, and the test holds every file to it.
"""
