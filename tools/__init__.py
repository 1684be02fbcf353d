"""Tools around a run: things to do with a model besides training and plain sampling.

    beams  scores  choices  chat    sample.py --beams, --score, --choices, --chat
    bench  generation_speed         --bench of train.py, and of sample.py
    plots  trackers                 train.py --plot, --log
    adds                            the flags that these files add

Needed by recipes that score texts (grpo, distill, lm_eval) and by --beams of tasks/pairs.py.
Imports zigzag/ and the five files. Delete this folder, and these flags are gone.
"""
