"""Text from a model. Read it for sampling.

    cache       the KV cache
    decoding    choosing an id, the decoding loop, beam search, decoding on a mesh
    prompts     sample.py's flags; prompts from files and standard input, as ids
    rows        prompts as padded rows; what a row has in its context
    reading     the row of a conversation, whose cache stays
    chat        chat templates
    terminal    what sample.py prints, and what a person types
    writer      sample.py's command: prompts in, answers and scores out
    bench       sample.py --bench

Imports: every wing from core to hub. Imported by: run, and top-level files.
"""
