"""Forecasts: a step's bytes, memory and time on hardware that you don't have.

    estimate    a cost model from formulas, and the work of a compiled program
    traffic     the bytes that each axis should send, to compare with a compiled program
    dry_run     --mesh auto finds the fastest mesh; --topology reports on a compiled program
    adds        the flags and the command that forecast/ adds

Needed by learn/. Imports zigzag/ and the five files. Without it, a run prints only the bytes that
its program sends, and you choose the mesh by hand.
"""
