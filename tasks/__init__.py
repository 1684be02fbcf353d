"""What a run learns from: a file for each kind of data that --data may hold.

    text    running text, conversations, completions: the next token           decoders
    pairs   sources (texts, pictures, sound) and target texts                  encoder-decoders
    arrays  a row in each array for each example: pictures, sound, classes     the others

Each has `opened`, a context manager that opens --data and yields a `Learned` (zigzag/run/task.py):
the configuration with what follows from the data, the task, what config.json notes, and what is
printed. What it puts into the run's folder is taken back if the run is refused. The
options that one kind alone uses are declared so (`of=` in zigzag/run/more_options.py), and refused
elsewhere.

To learn from something else, give train.fit functions of your own (docs/tasks.md). These files
import any other but train.py.
"""

from typing import Any, Callable

from tasks import arrays, pairs, text
from zigzag.disk import examples
from zigzag.disk.tokenizers import Tokenizer
from zigzag.run import init_from
from zigzag.weights.network import network_of

KINDS = {"text": text, "pairs": pairs, "arrays": arrays}


def kind_of(config: Any) -> str:
    """The kind of data that a configuration's network learns from, a name in KINDS."""
    network = network_of(config)
    shape = network.source_shape(config.network)
    if network.gives(config.network) != "text":
        return "arrays"
    reads_arrays = shape is not None and len(shape) > 1     # (a batch may be given as arrays, too)
    return "text" if shape is None else "arrays" if reads_arrays and all(
        map(examples.is_arrays, config.data)) else "pairs"


def needs(config: Any) -> tuple[str, ...]:
    """The facts that a run must have recorded, to continue with this configuration."""
    return () if kind_of(config) == "arrays" else ("tokenizer",)


def first_weights(config: Any) -> tuple[Callable | None, Tokenizer | None, dict[str, int]]:
    """For a model that has weights already: how fit reads them, its tokenizer, and what config.json
    notes about them. Else None, None and {}."""
    return init_from.first_weights(config, network_of(config),
                                   kind_of(config) != "arrays")
