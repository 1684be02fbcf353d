"""Forecasts: what a step will send, hold and take on hardware that is not here.

    estimate    a cost model by formula, --mesh auto, the report of --topology
    traffic     the bytes that each axis is expected to send, beside those of a compiled program
    dry_run     the commands: --topology, --mesh auto
    adds        what they add to command lines

Needed by learn/. Imports zigzag/ and the five files. Without it a run prints what its program sends
alone, and a mesh is chosen by hand.
"""
