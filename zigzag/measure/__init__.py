"""The cost of a program, read from the compiled program or predicted. Read it to predict a run.

    chips       peak rates and memory of known devices, and topologies to compile for
    hlo         collectives and arithmetic of a compiled program
    traffic     the bytes that each collective of an update is expected to send
    forecast    --mesh auto, --topology, --bench

Imports: every wing from core to hub. Imported by: run, and top-level files except networks/.
"""
