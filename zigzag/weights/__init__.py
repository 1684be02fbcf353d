"""What follows from a table of weights. Seldom read: a network's own table is in its own file.

    table       one row of such a table; first values, parameter and FLOP counts
    positions   the rates of rotary positions, and their published scalings
    network     what the machinery may ask of a network
    presets     named sizes (--model NAME)
    lora        low-rank adapters

Imports: core, parallel, rule, disk. Imported by: hub, generate, measure, run, and top-level files.
"""
