"""The machinery behind the top-level files, in ten wings, listed from the lowest to the highest.

    core        errors, flags, reports, processes, the mesh; read it when a message puzzles you
    parallel    what stands behind the sections of shard.py; read it to learn
    rule        how the split of each weight is found; read it to learn
    disk        tokenizers, examples, batches, checkpoints; read it to bring your own data
    weights     what follows from a table of weights: first values, counts, adapters; seldom read
    hub         Hugging Face folders in and out; read it to add a family
    generate    the KV cache, decoding, prompts; read it for sampling
    measure     chips, compiled programs, expected traffic, forecasts; read it to predict a run
    run         the plan, the loop, evaluation, metrics; read it when you change the loop
    commands    the command lines of train.py, sample.py and shard.py; read it to add a flag

A wing imports only wings listed before it, and no top-level file, except commands: it stands above
the top-level files, which import it in their `main` alone. The table at the top of
tests/test_layout.py says which, and the test holds every file to it.
"""
