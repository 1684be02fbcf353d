"""Generating text with a model. Read it to learn how sampling works.

    cache       the KV cache
    engine      Engine: a model that generates; which device has which part of it
    passes      the compiled passes: prompts into a cache, and a loop that adds ids
    decoding    Sampling; how an id is chosen
    batching    prompts through the rows of a cache; a free row takes the next prompt
    rows        prompts as padded rows; seeds; the context
    prompts     sample.py's flags; prompts from files and standard input, as ids
    answers     the text of an answer while its ids arrive, up to a stop text

sample.py's command is in zigzag/commands/; tools/ has beams, scores and chat.

Imports: core, disk, parallel. Imported by: run, and top-level files.
"""
