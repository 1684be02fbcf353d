"""Generating text with a model. Read it for sampling.

    cache       the KV cache
    passes      the compiled passes: prompts into a cache, and a loop that adds ids
    decoding    Sampling; the state of the loop; which device has which part of it
    search      beam search
    scores      log-probabilities of given ids
    answers     the text of an answer while its ids arrive; stop texts
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
