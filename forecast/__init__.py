"""Forecasts: what a step will send, hold and take on hardware that is not here.

    estimate    a cost model by formula, and what a compiled program does
    traffic     the bytes that each axis is expected to send, beside those of a compiled program
    dry_run     --mesh auto, which mesh is best; --topology, the report on a compiled program
    adds        what they add to command lines

Needed by learn/. Imports zigzag/ and the five files. Without it a run prints what its program sends
alone, and a mesh is chosen by hand.
"""
