"""Downloads the checkpoint files that this process needs.

A run in a bucket saves an array as chunks, one per device, named by their position in the array:
params/layers.w_up/0.0.3 (orbax with use_ocdbt=False). A process needs chunks that overlap its
devices' parts. In a copied run folder a file holds many arrays, so it needs a whole checkpoint.
"""

import itertools
import json
import re
from typing import Any

from stores.mirror import Mirror
from zigzag.core.errors import CorruptCheckpoint, one_line
from zigzag.core.mesh import by_path


def fetch(mirror: Mirror, step: int, wanted: dict[str, Any]) -> None:
    """Download this process's part of `wanted`, {item: a tree of shapes with shardings}."""
    try:
        for item, tree in wanted.items():
            folder = f"checkpoints/{step}/{item}/"
            names = {name.removeprefix(folder) for name in mirror.there if name.startswith(folder)}
            arrays = {path: x for path, x in by_path(tree).items() if f"{path}/.zarray" in names}
            is_chunked = any(name.endswith("/.zarray") for name in names)
            mirror.fetch(folder + name for name in names
                         if not (is_chunked and re.search(r"/[\d.]+$", name)))
            for path, x in arrays.items():
                record = json.loads((mirror.folder / folder / path / ".zarray").read_text())
                needed = {f"{path}/{chunk}" for chunk in _chunks(record, x)}
                mirror.fetch(folder + name for name in needed)
    except (FileNotFoundError, KeyError) as e:
        raise CorruptCheckpoint(f"not all of it is in the store ({one_line(e)})") from None


def _chunks(record, x):
    """Return the names of the chunks of an array that this process's devices need."""
    found = set()
    for index in x.sharding.addressable_devices_indices_map(x.shape).values():
        edges = [one.indices(length) for one, length in zip(index, x.shape)]
        spans = [range(first // size, -(-last // size))
                 for (first, last, _), size in zip(edges, record["chunks"])]
        found |= {".".join(map(str, place)) or "0" for place in itertools.product(*spans)}
    return found
