"""Training, from a plan to the last checkpoint. Read it when you change the loop.

    plan            the facts that a step needs, and the programs that are compiled
    modes           how a loss runs on a mesh: shard_map, with types or without; or jit
    task            what is learned, and from what: the Task that fit takes
    running         everything between a run's program and its first update, and after the last
    checks          errors we can detect before anything is compiled
    custom_loss     compares a custom loss on the mesh with the same loss on one device
    loop            what the loop in train.py carries, and does besides stepping
    schedules       the learning rate, and --epochs
    optimizers      Muon; fit(optimizer=...)
    averages        --ema
    loggers         what is given a run's numbers: fit's log, and those of --log (tools/)
    evaluation      held-out loss, predictions, metrics
    more_options    options of a run, besides those in train.Config
    continuing      config.json; what a run that continues must agree with, and --change
    source          what a run learns from, and the weights with which it begins

Imports: every other wing but commands. Imported by: train.py, and commands.
"""
