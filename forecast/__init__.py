"""Forecasts: how fast a run will be and what it needs, here or on hardware that you don't have.

    estimate    a cost model from formulas, and the work of a compiled program
    arithmetic  the FLOPs of a compiled program, parsed from its text
    traffic     the bytes that each axis should send, to compare with a compiled program
    dry_run     --mesh auto finds the fastest mesh; --topology reports on a compiled program
    bench       train.py --bench and --minutes: a few steps, measured here
    depth       --depth: a model's sizes and training options, all from one number
    adds        the flags and the commands that forecast/ adds

learn/ needs this folder, which imports zigzag/ and the five files. Without it, a run prints only
the bytes that its program sends, and you choose the mesh by hand.
"""
