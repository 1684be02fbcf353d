"""The engine behind the top-level files: what a plain run needs, in six wings, from the lowest up.

    core        errors, flags, reports, processes, the mesh; read it when a message puzzles you
    disk        tokenizers, examples, batches, checkpoints; read it to bring your own data
    parallel    what stands behind shard.py: collectives, the rule, tables of weights; read it to
                learn
    generate    the KV cache, decoding, prompts; read it for sampling
    run         the plan, the loop, evaluation; read it when you change the loop
    commands    the command lines of train.py, sample.py and shard.py; read it to add a flag

A wing imports only wings listed before it, and no top-level file, except commands: it stands above
the top-level files, which import it in their `main` alone. Folders beside this one are parts, which
can be deleted (README): nothing here imports one, and core/parts.py is the one way to them. The
table at the top of tests/test_layout.py has the law, and the test holds every file to it.
"""
