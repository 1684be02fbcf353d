"""Training, from a plan to the last checkpoint. Read it when you change the loop.

    plan            the facts that a step needs, and the programs to compile
    modes           how a loss runs on a mesh: shard_map, with types or without; or jit
    task            the Task that fit takes: a loss, weights, examples
    running         everything between a run's program and its first update, and after the last
    checks          errors we can detect before compiling anything
    custom_loss     compares a custom loss on the mesh with the same loss on one device
    loop            what the loop in train.py carries, and does besides stepping
    schedules       the learning rate, and --epochs
    optimizers      Muon; fit(optimizer=...)
    averages        --ema
    loggers         where a run's numbers go: fit's log, and the loggers of --log (tools/)
    evaluation      held-out loss, predictions, metrics
    more_options    options of a run, besides those in train.Config
    continuing      config.json; what must match when a run continues, and --change
    source          the data that a run learns from, and its first weights

Imports: every other wing but commands. Imported by: train.py, and commands.
"""
