"""The code behind the sections of shard.py. Read it to learn how each parallelism is made fast, how
the rule splits each weight, and what a weight table determines.

    collectives     collectives that some platform needs in a different form than jax's own
    products        matmuls with weights, split or not, and losses summed over chunks
    overlap         matmuls in parts, each multiplied while the next is sent (--overlap)
    remat           what to recompute in the backward pass
    layer_strips    a layer's rows in strips, so that one is sent while another is multiplied
    attention       attention in blocks or by a device's kernel; the token order over seq
    ring_kernel     the TPU kernel, in a ring over seq
    experts         sorting tokens by expert, and grouped matmuls
    pipeline        the schedules besides gpipe (interleaved, 1f1b), and all timetables
    storage         weights stored differently from how a loss uses them
    hlo             the collectives of a compiled program, parsed from its text

    rule            the policy: how to split each weight
    trace           the facts about a loss that the rule relies on; jaxprs helps to read a jaxpr
    table           a weight table: initial values, counts, FLOPs
    network         Network: what the machinery needs to know about a kind of model
    rotary          rotary positions
    low_rank        LoRA adapters
    saved           reading a run's weights

Imports: core, disk. Imported by: generate, run, and top-level files.
"""
