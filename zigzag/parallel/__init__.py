"""The code behind the sections of shard.py. Read it to learn how each parallelism is made fast, how
the rule finds the split of each weight, and what a table of weights determines.

    collectives     collectives that a platform needs in a different form than jax's own
    products        products with weights, split or not, and losses summed over chunks
    overlap         products in parts, each multiplied while the next is sent (--overlap)
    remat           what to recompute in the backward pass
    layer_strips    a layer's rows in strips, so that one is sent while another is multiplied
    attention       attention in blocks and by a device's kernel; the order of tokens over seq
    ring_kernel     the kernel of TPUs, in a ring over seq
    experts         sorting tokens by expert, and grouped products
    pipeline        the schedules other than gpipe (interleaved, 1f1b), and all timetables
    storage         weights that are stored differently from how a loss uses them
    hlo             the collectives and the arithmetic of a compiled program, read from its text

    rule            the policy: how to split each weight
    trace           the facts about a loss that the rule decides on; jaxprs reads a jaxpr
    table           a table of weights: first values, counts, FLOPs
    network         Network: a kind of model as the machinery sees it
    rotary          rotary positions
    low_rank        adapters
    saved           reading the weights of a run

Imports: core, disk. Imported by: generate, run, and top-level files.
"""
