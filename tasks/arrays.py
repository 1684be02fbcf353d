"""Arrays with a row per example: images, sound, classes. A batch is just these rows, which
tasks/examples.py reads."""

import contextlib
from pathlib import Path
from typing import Any, Callable, Iterator

from tasks import examples, metrics
from zigzag.core.errors import ConfigError
from zigzag.core.options import without
from zigzag.disk.tokenizers import Tokenizer
from zigzag.parallel.network import flops_of_update, network_of
from zigzag.run import schedules
from zigzag.run.task import OpenedData, Task, language


@contextlib.contextmanager
def opened(config: Any, tokenizer: Tokenizer | None, run: Path, ready: float = 0,
           fingerprint: str = "") -> Iterator[OpenedData]:
    """Open --data and, if given, --held_out; each is a .npz or a folder of .npy files."""
    network = network_of(config)
    shapes, limits = network.batch_shapes(config.network, 1), network.limits(config.network)
    for flag, paths in (("--data", config.data), ("--held_out", config.held_out)):
        if len(paths) != 1 and (paths or flag == "--data"):
            raise ConfigError(f"{flag} {' '.join(paths) or 'is not given'}: expected one .npz, or "
                              f"one folder of .npy files, with {', '.join(shapes)}: a row in each "
                              f"for each example")
    own, held_out, description, digest = examples.opened(
        config, lambda paths, whole: examples.Arrays(*paths, shapes, limits, whole))
    other = held_out.examples
    if other.arrays.keys() != own.arrays.keys():
        raise ConfigError(f"--held_out {config.held_out[0]}: has the arrays "
                          f"{', '.join(other.arrays)}; --data has {', '.join(own.arrays)}")
    config = schedules.with_steps(config, len(own.train))
    init, loss, _ = language(config)
    task = Task(init=init, loss=loss, collate=examples.collate_arrays, examples=own.train,
                held_out=held_out, flops=flops_of_update(config), **scored(config, network))
    yield OpenedData(config, lambda: task, {"fingerprint": digest}, description)


def scored(config: Any, network: Any) -> dict[str, Callable]:
    """With --metric, return predict and metric functions for a model with classes."""
    if not config.metric:
        return {}
    if network.gives(config.network) != "classes" or config.network.labels < 2:
        raise ConfigError(f"--metric {config.metric}: needs a model with classes (--head classes, "
                          f"--labels of at least 2); leave it out")
    if config.metric not in metrics.CLASS_METRICS:
        raise ConfigError(f"--metric {config.metric}: needs pairs of texts; expected "
                          f"{' or '.join(metrics.CLASS_METRICS)} for classes")

    def predict(params, batch):
        batch = dict(batch)
        first = batch.pop("source") if "source" in batch else batch.pop("tokens")
        more = without(batch, "labels", "seeds")
        return network.forward(params, first, config.network, **more).argmax(-1)

    def metric(outputs, rows):
        return metrics.CLASS_METRICS[config.metric](
            outputs.tolist(), [int(row["labels"]) for row in rows], config.network.labels)

    return dict(predict=predict, metric=metric)
