"""Examples that a run makes while it runs: Task(examples=function).

    examples(seed, step, weights) -> the examples of update `step` (the first is 0)

For instance prompts with answers sampled from the weights as they are, on the mesh that trains. The
weights follow from the seed and the updates before, so a run that is stopped and continued makes
the same examples.
"""

import dataclasses
from typing import Any, Callable, Sequence

from zigzag.core.errors import ConfigError
from zigzag.run.task import Task


def with_sequence(task: Task, config: Any) -> Task:
    """The task with a sequence of examples, if it has a function that makes them."""
    if not callable(task.examples) or hasattr(task.examples, "__getitem__"):
        return task
    return dataclasses.replace(task, examples=Made(task.examples, task.held_out, config))


class Made(Sequence):
    """The examples of a run in their order, as a sequence of which one update's are there at a
    time. Until there are weights, while a loss is checked, held-out examples stand in for them."""

    def __init__(self, make: Callable, held_out: Sequence, config: Any):
        if not len(held_out):
            raise ConfigError("fit was given a function that makes examples, and no held-out "
                              "examples: at least one is needed, for the shapes of a batch")
        if config.epochs:
            raise ConfigError("--epochs: the examples are made as the run goes, so there is no end "
                              "of them; give --steps")
        self.make, self.held_out, self.seed = make, held_out, config.seed
        self.batch, self.steps = config.batch, config.steps
        self.weights: Callable | None = None    # () -> the weights as they are
        self.step, self.examples = -1, ()

    def __len__(self) -> int:
        return self.batch * self.steps

    def order_at(self, seed: int, places: Any) -> Any:
        return places

    def __getitem__(self, i: int) -> Any:
        if self.weights is None:
            return self.held_out[i % len(self.held_out)]
        step, number = divmod(i, self.batch)
        if step != self.step:
            made: Any = self.make(self.seed, step, self.weights())
            if len(made) != self.batch:
                raise ConfigError(f"the function that makes examples made {len(made)} for update "
                                  f"{step}; expected --batch {self.batch}")
            self.step, self.examples = step, made
        return self.examples[number]
