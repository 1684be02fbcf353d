"""Generating text with a model. Read this package to learn how sampling works.

    cache       the KV cache
    engine      Engine: a model that generates, and how a mesh splits it
    passes      the compiled passes: read prompts into a cache, then generate ids in a loop
    decoding    Sampling, and how to choose an id
    batching    continuous batching: when a row is free, it takes the next prompt
    rows        padding prompts into rows; seeds; the context
    prompts     sample.py's flags; reading prompts from files and standard input as ids
    answers     an answer's text as its ids arrive, up to a stop text

sample.py's command is in zigzag/commands/; tools/ has beams, scores and chat.

Imports: core, disk, parallel. Imported by: run, and top-level files.
"""
