"""How the split of each weight is found, for any function. Read it to learn.

    jaxprs      walking through the equations of a traced function
    trace       facts: which dimensions a function ties together, and what splitting them sends
    rule        policy: which dimensions are split, and why; --override

Imports: core. Imported by: weights, hub, generate, measure, run, and top-level files.
"""
