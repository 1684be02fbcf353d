"""Tools around a run: what else you can do with a model besides training and plain sampling.

    beams  scores  choices  chat    sample.py --beams, --score, --choices, --chat
    generation_speed                sample.py --bench
    chats                           conversations, completions and preferences as --data
    plots  trackers                 train.py --plot, --log
    tiktoken                        vocabularies of token ranks, for --tokenizer
    synonyms                        what to use instead of other codebases' flags
    adds                            the flags that these files add

recipes/lm_eval.py needs tools/scores.py, recipes/dpo.py needs tools/chats.py, and --beams in
tasks/pairs.py needs tools/beams.py. The folder imports zigzag/ and the five files. If you delete
it, these flags are gone, and --data takes no conversations.
"""
