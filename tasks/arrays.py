"""Arrays, a row in each for each example: pictures, sound, classes. The batch is the rows
themselves; tasks/examples.py reads them."""

import contextlib
from pathlib import Path
from typing import Any, Callable, Iterator

from tasks import examples, metrics
from zigzag.core.errors import ConfigError
from zigzag.disk.tokenizers import Tokenizer
from zigzag.parallel.network import flops_of_update, network_of
from zigzag.run import schedules
from zigzag.run.task import Learned, Task, language


@contextlib.contextmanager
def opened(config: Any, tokenizer: Tokenizer | None, run: Path, ready: float = 0,
           fingerprint: str = "") -> Iterator[Learned]:
    """The .npz or folder of .npy files of --data, and of --held_out."""
    network = network_of(config)
    shapes, limits = network.batch_shapes(config.network, 1), network.limits(config.network)
    own = examples.open_arrays(config.data, shapes, limits, whole=bool(config.held_out))
    other = examples.open_arrays(config.held_out, shapes, limits, "--held_out",
                                 whole=True) if config.held_out else None
    if other and other.arrays.keys() != own.arrays.keys():
        raise ConfigError(f"--held_out {config.held_out[0]}: has the arrays "
                          f"{', '.join(other.arrays)}; --data has {', '.join(own.arrays)}")
    held_out, description, digest = examples.beside(own, other)
    config = schedules.with_steps(config, len(own.train))
    init, loss, _ = language(config)
    task = Task(init=init, loss=loss, collate=examples.collate_arrays, examples=own.train,
                held_out=held_out, flops=flops_of_update(config), **scored(config, network))
    yield Learned(config, lambda: task, {"fingerprint": digest}, description)


def scored(config: Any, network: Any) -> dict[str, Callable]:
    """With --metric, the functions predict and metric of a model with classes."""
    if not config.metric:
        return {}
    if network.gives(config.network) != "classes" or config.network.labels < 2:
        raise ConfigError(f"--metric {config.metric}: is for a model with classes (--head classes, "
                          f"--labels of at least 2); leave it out")
    if config.metric not in metrics.CLASS_METRICS:
        raise ConfigError(f"--metric {config.metric}: is for pairs of texts; expected "
                          f"{' or '.join(metrics.CLASS_METRICS)} for classes")

    def predict(params, batch):
        batch = dict(batch)
        first = batch.pop("source") if "source" in batch else batch.pop("tokens")
        more = {name: x for name, x in batch.items() if name not in ("labels", "seeds")}
        return network.forward(params, first, config.network, **more).argmax(-1)

    def metric(outputs, rows):
        return metrics.CLASS_METRICS[config.metric](
            outputs.tolist(), [int(row["labels"]) for row in rows], config.network.labels)

    return dict(predict=predict, metric=metric)
