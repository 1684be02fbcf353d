"""The modules of ours that one traced loss, and one update of `fit`, enter.

    python -m tests.entered         print both counts, and the modules
"""

import sys
from pathlib import Path

import jax
import numpy as np

ROOT = Path(__file__).parents[1]


def entered(call):
    """The files of ours in which a function runs while call() does."""
    found = set()

    def see(frame, event, arg):
        if event == "call":
            found.add(frame.f_code.co_filename)

    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(None)
    return {str(Path(file).relative_to(ROOT)) for file in found
            if file.startswith(f"{ROOT}/") and "/tests/" not in file}


def loss_and_update():
    """(files entered by a traced model.loss, files entered by one update of `fit`): from its
    examples to the numbers that are logged."""
    import model
    import train

    config = model.Config(layers=2, d_model=32, heads=4, vocab_size=64, seq_len=16)
    ids = np.zeros((4, 16), np.int32)
    batch = {"tokens": ids, "targets": ids, "weights": np.ones((4, 16), np.float32)}
    shapes = jax.eval_shape(lambda: model.init(config, jax.random.key(0)))
    of_loss = entered(lambda: jax.make_jaxpr(
        lambda params: model.loss(params, batch, config)[:2])(shapes))
    return of_loss, _of_update(train, config, batch)


def _of_update(train, config, batch):
    """The files entered between the second update of a run and its third."""
    found, state = [], {"step": 0}

    def see(step, numbers):
        state["step"] = step
        if step == 2:
            sys.setprofile(lambda frame, event, arg: found.append(frame.f_code.co_filename)
                           if event == "call" else None)
        if step == 3:
            sys.setprofile(None)

    run = train.Config(network=config, batch=4, steps=5, out="", eval_every=0)
    init, loss, _ = train.language(run)
    rows = [{name: x[0] for name, x in batch.items()}] * 64
    task = train.Task(init, lambda rows: {name: np.stack([row[name] for row in rows])
                                          for name in batch}, loss, examples=rows)
    train.fit(run, task, log=see)
    return {str(Path(file).relative_to(ROOT)) for file in found
            if file.startswith(f"{ROOT}/") and "/tests/" not in file}


if __name__ == "__main__":
    for what, files in zip(("a traced loss", "an update"), loss_and_update()):
        print(f"{what}: {len(files)} files: {', '.join(sorted(files))}")
