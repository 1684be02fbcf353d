"""Tools around a run: what one does with a model besides training it and sampling from it.

    beams  scores  choices  chat    sample.py --beams, --score, --choices, --chat
    bench                           --bench, of train.py and of sample.py
    plots  trackers                 train.py --plot, --log
    adds                            what they add to command lines

Needed by recipes that score texts (grpo, distill, lm_eval) and by --beams of tasks/pairs.py.
Imports zigzag/, and the five files. Delete it, and these flags are gone.
"""
