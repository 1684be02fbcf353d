"""The `Task` that a run learns, for train.fit, and `OpenedData`, which tasks/ makes from --data."""

import dataclasses
import functools
from typing import Any, Callable, NamedTuple, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from zigzag.core.errors import ConfigError
from zigzag.core.options import Values
from zigzag.disk.batches import batch_arrays
from zigzag.disk.tokenizers import Tokenizer
from zigzag.parallel.network import network_of
from zigzag.run.checks import Overrides


@dataclasses.dataclass(frozen=True)
class Task:
    """A training task: the loss, the weights, the examples, and what to print. The first six may be
    positional arguments. The comment a, b -> c means that a function of (a, b) returns c."""
    init: Callable                      # key -> the first weights of a new run
    collate: Callable                   # examples -> a batch: a dict of arrays [B, ...]
    loss: Callable                      # params, batch -> sum, count[, {name: other sum to log}]
    predict: Callable | None = None     # params, batch -> outputs for held-out examples, at each
                                        # evaluation: any tree of arrays with a row for each
                                        # example. fit joins them in the examples' order
    examples: Any = ()                  # to learn from: anything with a length and an index, or a
                                        # function: seed, step, weights -> one update's examples,
                                        # made from the weights before that update
    held_out: Sequence = ()             # to evaluate on

    _: dataclasses.KW_ONLY
    # what an evaluation prints
    show: Callable | None = None        # the outputs of the first four held-out examples -> a text,
                                        # or a dict {label: text}
    metric: Callable | None = None      # outputs, examples -> a number, or a dict of numbers
    predicted: int | None = None        # how many held-out examples predict gets; None: all
    sources: dict[str, int] = dataclasses.field(default_factory=dict)   # {name: count} of held-out
                                        # examples, in order; a run also logs each source's loss
    bits_per_nat: float | None = None   # the held-out loss times this gives bits per byte
    # the weights, and where they are stored
    first_weights: Callable | None = None   # shapes (with shardings) -> the first weights of a new
                                        # run, instead of init's
    overrides: Overrides = ()           # (path regex, PartitionSpec) pairs, in addition to
                                        # --override; the last match wins
    # the batch
    timed: dict[str, bool] = dataclasses.field(default_factory=dict)    # {name of a custom array:
                                        # whether its second dimension is the sequence}, for seq
                                        # and pipe
    # what the run's folder keeps
    tokenizer: Tokenizer | None = None  # so that sample.py can read and write text
    record: Values | None = None    # saved in config.json; must stay the same when the run
                                        # resumes
    flops: float | None = None          # an update's FLOPs, for MFU

    @functools.cached_property
    def first_row(self) -> dict[str, np.ndarray]:
        """Return a batch with only the first example, which gives the shapes of all batches."""
        if not len(self.examples):
            raise ConfigError("there are no examples to train on")
        return batch_arrays(self.collate, [self.examples[0]])   # a held-out one if generated


def with_sequence(task: Task, config: Any) -> Task:
    """If a function makes the task's examples, replace it with a sequence of them."""
    if not callable(task.examples) or hasattr(task.examples, "__getitem__"):
        return task
    return dataclasses.replace(
        task, examples=GeneratedExamples(task.examples, task.held_out, config))


class GeneratedExamples(Sequence):
    """A run's examples in order, as a sequence that holds one update's examples at a time. They
    depend on the seed and the earlier updates, so a run that stops and resumes makes the same
    examples. Before there are weights, while fit checks the loss, held-out examples stand in."""

    def __init__(self, make: Callable, held_out: Sequence, config: Any):
        if not len(held_out):
            raise ConfigError("fit got a function that makes examples, but no held-out examples: "
                              "give at least one, for the shapes of a batch")
        if config.epochs:
            raise ConfigError("--epochs: a function makes the examples, without end; give --steps")
        self.make, self.held_out, self.seed = make, held_out, config.seed
        self.batch, self.steps = config.batch, config.steps
        self.weights: Callable | None = None    # () -> the current weights
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


class OpenedData(NamedTuple):
    """A run's opened data, which a context manager in tasks/ yields."""
    config: Any                     # with the data's vocabulary, and the steps for --epochs
    make_task: Callable[[], Task]   # makes the task
    record: Values          # facts for config.json, which must match when a run resumes
    description: str                # the run prints it
    prompt_flags: str = ""          # flags for sample.py, with a prompt that resembles the data


def language(config: Any) -> tuple[Callable, Callable, Any]:
    """Return the init and loss of the config's own network, and the shapes of a batch."""
    network = network_of(config)
    batch = {**network.batch_shapes(config.network, config.batch),
             "seeds": jax.ShapeDtypeStruct((config.batch,), jnp.uint32)}
    if config.pack == "documents":      # chats are packed too, but this function has no data
        batch |= dict.fromkeys(("segments", "positions"), batch["tokens"])
    return (functools.partial(network.init, config.network),
            functools.partial(network.loss, config=config.network), batch)


def without_data(config: Any) -> tuple[Task, Any]:
    """Return (a task of the config's own network, to compile its step; the shapes of a batch)."""
    init, loss, shapes = language(config)
    return Task(init, dict, loss), shapes
