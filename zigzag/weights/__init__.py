"""Tables of weights: first values, counts, adapters. Seldom read: a network's own table is in the
network's file.

    table       a row of a table of weights; first values, parameter and FLOP counts
    positions   the rates of rotary positions, and their published scalings
    network     `Network`: the functions that the machinery calls
    presets     named sizes (--model NAME)
    lora        low-rank adapters

Imports: core, parallel, rule, disk. Imported by: hub, generate, measure, run, and top-level files.
"""
