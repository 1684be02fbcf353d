"""What a run learns, and how: `Task`, which train.fit takes, and what tasks/ make of --data."""

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
    """What is learned, from what, and what to show of it. The first six may be given by position.
    A comment a, b -> c says that a function of (a, b) returns c."""
    init: Callable                      # key -> the weights that a new run begins with
    collate: Callable                   # examples -> a batch: a dict of arrays [B, ...]
    loss: Callable                      # params, batch -> sum, count[, {name: other sum to log}]
    predict: Callable | None = None     # params, batch -> outputs for held-out examples, at each
                                        # evaluation: any tree of arrays with a row for each
                                        # example. All are put together in the examples' order
    examples: Any = ()                  # to learn from: anything with a length and an index; or a
                                        # function: seed, step, weights -> those of one update,
                                        # given the weights before it
    held_out: Sequence = ()             # to evaluate on

    _: dataclasses.KW_ONLY
    # what an evaluation says
    show: Callable | None = None        # the outputs of the first four held-out examples -> a text,
                                        # or a dict of texts by their labels
    metric: Callable | None = None      # outputs, examples -> a number, or a dict of numbers
    predicted: int | None = None        # how many held-out examples predict is given; None: all
    sources: dict[str, int] = dataclasses.field(default_factory=dict)   # {name: how many} of the
                                        # held-out examples, in turn: the loss of each is logged too
    bits_per_nat: float | None = None   # the held-out loss times this is bits per byte
    # the weights, and where they are stored
    weights: Callable | None = None     # shapes (with shardings) -> the weights that a new run
                                        # begins with, instead of init's
    overrides: Overrides = ()           # (path regex, PartitionSpec) pairs, in addition to
                                        # --override; the last match wins
    # the batch
    timed: dict[str, bool] = dataclasses.field(default_factory=dict)    # {name of an array of your
                                        # own: whether its second dimension is the sequence},
                                        # which seq and pipe ask
    # what the run's folder keeps
    tokenizer: Tokenizer | None = None  # so that sample.py can read and write text
    record: Values | None = None    # saved in config.json; must be the same when the run
                                        # continues
    flops: float | None = None          # the arithmetic of an update, for MFU

    @functools.cached_property
    def first_row(self) -> dict[str, np.ndarray]:
        """The batch of the first example alone, from which the shapes of all follow."""
        if not len(self.examples):
            raise ConfigError("there are no examples to train on")
        return batch_arrays(self.collate, [self.examples[0]])   # (a held-out one, if they are made)


def with_sequence(task: Task, config: Any) -> Task:
    """The task with a sequence of examples, if it has a function that makes them."""
    if not callable(task.examples) or hasattr(task.examples, "__getitem__"):
        return task
    return dataclasses.replace(task, examples=Made(task.examples, task.held_out, config))


class Made(Sequence):
    """The examples of a run in their order, as a sequence of which one update's are there at a
    time. They follow from the seed and the updates before, so a run that is stopped and continued
    makes the same ones. Until there are weights, while a loss is checked, held-out examples stand
    in for them."""

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


class Learned(NamedTuple):
    """The data of a run, opened: what a context manager of tasks/ yields."""
    config: Any                     # with the data's vocabulary, and the steps that --epochs take
    make_task: Callable[[], Task]   # makes the task, if there is anything left to train
    record: Values          # what config.json notes, and a run that continues must have
    description: str                # what is printed
    prompt_flags: str = ""          # the flags of sample.py with a prompt like these data


def language(config: Any) -> tuple[Callable, Callable, Any]:
    """The init and loss of the configuration's own network, and the shapes of a batch."""
    network = network_of(config)
    batch = {**network.batch_shapes(config.network, config.batch),
             "seeds": jax.ShapeDtypeStruct((config.batch,), jnp.uint32)}
    if config.pack == "documents":      # (chats are packed, too; but nothing here knows the data)
        batch |= dict.fromkeys(("segments", "positions"), batch["tokens"])
    return (functools.partial(network.init, config.network),
            functools.partial(network.loss, config=config.network), batch)


def without_data(config: Any) -> tuple[Task, Any]:
    """The task of the configuration's own network, to compile its step, and a batch's shapes."""
    init, loss, shapes = language(config)
    return Task(init, dict, loss), shapes
