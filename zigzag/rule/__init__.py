"""How the split of each weight is found, for any function. Read it to learn.

    jaxprs      walking through the equations of a traced function
    trace       facts: which dimensions a function ties together (groups), and what splitting a
                group would send
    rule        policy: refusals, prices and the choice, for each axis; --override

        fn, params --jax.make_jaxpr--> jaxpr --trace--> Facts --rule--> a Decision for each weight

Imports: core. Imported by: weights, hub, generate, measure, run, and top-level files.
"""
