"""The engine behind the top-level files: what a plain run needs, in six wings, lowest first.

    core        errors, flags, reports, processes, the mesh; read it when a message puzzles you
    disk        tokenizers, examples, batches, checkpoints; read it to bring your own data
    parallel    the code behind shard.py: collectives, the rule, tables of weights; read it to learn
                how sharding works
    generate    the KV cache, decoding, prompts; read it for sampling
    run         the plan, the loop, evaluation; read it when you change the loop
    commands    the command lines of train.py, sample.py and shard.py; read it to add a flag

A wing imports only wings listed before it, and no top-level file. The exception is `commands`: it
sits above the top-level files, which import it only in their `main`. The folders next to this one
are parts, which can be deleted (see the README). Only core/parts.py can load a part; nothing here
imports one. The table at the top of tests/test_layout.py states these rules, and its test enforces
them.
"""
