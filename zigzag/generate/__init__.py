"""Generating text with a model. Read it for sampling.

    cache       the KV cache
    decoding    choosing an id, the decoding loop, beam search, decoding on a mesh
    prompts     sample.py's flags; prompts from files and standard input, as ids
    rows        prompts as padded rows; the context of each row
    reading     the row of a conversation, whose cache is kept between turns
    chat        chat templates
    terminal    printing answers and reading lines from a person
    choices     sample.py --choices: questions with several choices, and their accuracy
    writer      sample.py's command: prompts in, answers and scores out
    bench       sample.py --bench

Imports: every wing from core to hub. Imported by: run, and top-level files.
"""
