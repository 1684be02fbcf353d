"""Training, from the plan to the last checkpoint. Read this package when you change the loop.

    plan            the facts that a step needs, and the programs to compile
    modes           how a loss runs on a mesh: shard_map, with types or without; or jit
    task            the Task that fit takes: a loss, weights, examples
    running         everything between a run's program and its first update, and after its last
    checks          errors we can detect before compiling anything
    custom_loss     checks a custom loss on the mesh against a single device
    loop            the state that train.py's loop carries, and its work besides stepping
    schedules       the learning rate, and --epochs
    optimizers      fit(optimizer=...)
    muon            --optimizer muon, which computes each matrix on one device
    averages        --ema
    loggers         send a run's numbers to fit's log and to the --log loggers (tools/)
    evaluation      held-out loss, predictions, metrics
    more_options    a run's options, besides those in train.Config
    continuing      config.json, what must match when a run resumes, and --change
    source          the data that a run learns from, and its first weights

Imports: every other wing but commands. Imported by: train.py, and commands.
"""
