"""Forecasts: the bytes, memory and time of a step on hardware that you do not have.

    estimate    a cost model by formula, and the work of a compiled program
    traffic     the bytes that each axis should send, to compare with those of a compiled program
    dry_run     --mesh auto, the fastest mesh; --topology, the report on a compiled program
    adds        the flags and the command that forecast/ adds

Needed by learn/. Imports zigzag/ and the five files. Without it a run prints only the bytes that
its program sends, and you choose the mesh by hand.
"""
