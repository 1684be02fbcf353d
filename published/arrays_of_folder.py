"""Read a Hugging Face folder into sharded weights, and write such a folder.

    config.json          the model's family and sizes             (llama.py translates them)
    *.safetensors        arrays by name                           (llama.py has the names)

Each family has a name table, which maps published modules and arrays to the weights they hold.

    "self_attn.q_proj": "wq"                    a module: q_proj.weight, and q_proj.bias if our
                                                table of weights has a wq_bias
    "mlp.gate_up_proj": "w_gate w_up"           two concatenated weights
    "lm_head": "head = embed"                   in a tied model, a copy of another array
    "lambda_1": "-> attn_out_scale"             an array
    "attn.c_proj.weight": "(H M) D -> wo"       an array with a custom layout
    "query_key_value.weight": "(K [g N | N | M]) D -> wq wk wv"     all three per group of heads
    "encoder.embed.weight": "== embed"          a copy of another array
    "lm_head.bias": "~ head_bias"               a copy that we read only as a fallback

We skip rows whose weights aren't in the network's table. By default a matrix has torch's layout,
outputs before inputs. Layouts use the table's letters; g is the number of query heads per key head.
Parentheses ( ) merge axes into one. A | B concatenates A and B. K [A | B] repeats the part in
brackets K times: for each key head, its query heads, its key and its value. A 1 is an axis of
length 1, which our weight may lack. We don't write an array marked ==. It may be missing from a
folder; if present, it must hold the same numbers. We write an array marked ~, but read it only if
no other array has the weight. If no array has it, the weight is zeros.

A Layout describes a weight as a view of part of an array. Each device reads its own range of that
view from the file. To write, we assign to the same view of a new array.
"""

import functools
import json
import math
import os
import re
from pathlib import Path
from typing import Any, Iterator, NamedTuple, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from published.hub_names import config_of, weights_of
from published.record import Fields
from zigzag.core.errors import ConfigError, listed, one_line, optional_package
from zigzag.core.files import check_others, read_json, write_json
from zigzag.core.hosts import process_allgather
from zigzag.core.mesh import by_path, flatten
from zigzag.generate.rows import on_host
from zigzag.parallel.table import layer_counts

# {dtype that we can write: its name in a file}
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


# -------------------------------------------------------------------------------------------
# The layout of an array

class Layout(NamedTuple):
    """The part of a published array that holds one of our weights, whose axes are `own`."""
    own: tuple[str, ...]
    sizes: dict[str, int]
    letters: list[str]      # this weight's letters, in the order of the published array
    apart: list[int]        # the array's shape: the repeats per axis, and the length of each repeat
    at: tuple[slice, ...]   # this weight's part of that shape

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the published array."""
        return tuple(map(math.prod, zip(self.apart[::2], self.apart[1::2])))

    def view(self, array: np.ndarray) -> np.ndarray:
        """View this weight in a published array, with its axes in our order. Grouped query heads
        have two axes, K and g."""
        part = array.reshape(self.apart)[(*self.at, ...)]       # ... keeps a single number an array
        part = part.reshape([self.sizes[x] for x in self.letters])
        own = " ".join(self.own)
        own = own.replace("H", "K g") if "g" in self.letters else own
        return part.transpose([self.letters.index(x) for x in own.split()])

    def read(self, array: np.ndarray, ranges: Sequence[slice], order: np.ndarray | None = None
             ) -> np.ndarray:
        """Read these ranges of the weight from a published array, whose last axis may have a
        different order. Skip indices past the end of an axis, which are padding."""
        at = []
        for letter, r in zip(self.own, ranges):
            in_groups = letter == "H" and "g" in self.letters
            at += np.divmod(np.arange(r.start, r.stop), self.sizes["g"]) if in_groups else [r]
        if order is not None:
            at[-1] = order[at[-1]]
        return self.view(array)[tuple(at)]

    def write(self, array: np.ndarray, weight: np.ndarray) -> None:
        """Write the whole weight into its part of a published array."""
        part = self.view(array)
        part[...] = weight.reshape(part.shape)


def layouts(pattern: str, own: dict[str, tuple[str, ...]], sizes: dict[str, int]
            ) -> dict[str, Layout]:
    """Parse a pattern into {weight: its Layout}. `own` has the weights in order and their axes."""
    found, sizes = {}, {"1": 1, **sizes}

    def count(letters):
        return math.prod(sizes[x] for x in letters)

    for i, (name, axes) in enumerate(own.items()):
        letters, apart, at = [], [], []
        for word in re.findall(r"\([^)]*\)|\S+", pattern):
            repeats, _, blocks = word.strip("()").rpartition("[")
            blocks = [block.split() for block in blocks.strip("] ").split("|")]
            mine = i if len(blocks) > 1 else 0
            begin = sum(map(count, blocks[:mine]))
            apart += [count(repeats.split()), sum(map(count, blocks))]
            at += [slice(None), slice(begin, begin + count(blocks[mine]))]
            letters += [*repeats.split(), *blocks[mine]]
        letters = [x for x in letters if x != "1" or x in axes]
        found[name] = Layout(axes, sizes, letters, apart, tuple(at))
    return found


# -------------------------------------------------------------------------------------------
# The folder

def _listed(names):
    """List the first ten of these names as text, and shorten long names."""
    return listed([n if n.isprintable() and len(n) < 200 else f"{n!r:.80}" for n in sorted(names)],
                  10)


def read_config(path: str | Path) -> Fields:
    """Read a folder's config.json."""
    file = config_of(path) / "config.json"
    config = read_json(file)
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ConfigError(f"{file}: no model_type in it; expected the config.json of a published "
                          f"model (give a run as --run, or to train.py as --init_from)")
    return config


class Folder:
    """A folder's arrays by name, memory-mapped so that we only read the parts in use."""

    def __init__(self, path: str | Path):
        self.config = read_config(path)
        self.path, self.arrays = weights_of(path), {}
        index, files = self._index(), {}
        for file in sorted({*index.values()}) or ["model.safetensors"]:
            arrays = _mapped(self.path / file)
            self.arrays |= arrays
            files |= dict.fromkeys(arrays, file)
        if index and index != files:
            wrong = {name for name, _ in index.items() ^ files.items()}
            raise ConfigError(f"{self.path}: {_listed(wrong)} not in the file that the index names")

    def _index(self):
        """Read {array: its file} from the index; {} if there's no index."""
        if (self.path / "model.safetensors").is_file():
            return {}
        index = self.path / "model.safetensors.index.json"
        if not index.exists():
            raise ConfigError(f"{self.path}: neither model.safetensors nor its index is there "
                              f"(zigzag reads no other format: a .bin is a pickle, which can run "
                              f"code)")
        record = read_json(index)
        files = record.get("weight_map") if isinstance(record, dict) else None
        if not isinstance(files, dict) or not files:
            raise ConfigError(f"{index}: no weight_map in it")
        there = os.listdir(self.path)
        for name, file in files.items():
            if file not in there:
                raise ConfigError(f"{index}: it lists {_listed([name])} in {file!r:.80}, which is "
                                  f"not a file of this folder")
        return files


# {dtype in a file: numpy's dtype}. Integers occur only in constants, which we only compare.
KINDS = {kind: jnp.dtype(name) for kind, name in dict(
    F32="float32", F16="float16", BF16="bfloat16", I64="int64", U8="uint8", BOOL="bool").items()}


def _mapped(path):
    """Memory-map a file as {name: array}."""
    package = optional_package("safetensors", "a published model")
    try:
        with package.safe_open(path, framework="numpy"):        # checks the whole header
            raw = np.asarray(np.memmap(path, np.uint8, "r"))
    except (OSError, package.SafetensorError) as e:
        raise ConfigError(f"{path} cannot be read: {one_line(e)}") from None
    begin = 8 + int.from_bytes(raw[:8].tobytes(), "little")
    header, arrays = json.loads(raw[8:begin].tobytes()), {}
    header.pop("__metadata__", None)
    for name, about in header.items():
        if (kind := about["dtype"]) not in KINDS:
            raise ConfigError(f"{path}: {name} has numbers of type {kind}; expected F32, F16 or "
                              f"BF16")
        first, last = about["data_offsets"]
        arrays[name] = raw[begin + first:begin + last].view(KINDS[kind]).reshape(about["shape"])
    return arrays


# -------------------------------------------------------------------------------------------
# A family's arrays, and reading weights

# An array to read, a copy that must match, a fallback to read if there's no other array.
SIGNS = ("->", "==", "~")


class Change(NamedTuple):
    """How one of our weights differs from the published one: the order of its last axis, and a
    number added to it."""
    order: np.ndarray | None = None
    offset: float = 0.0


class Part(NamedTuple):
    """One of our weights in a published array."""
    path: str
    layer: int | None       # its layer and its expert; None if it has none
    expert: int | None
    layout: Layout
    sign: str               # one of SIGNS
    change: Change


def stacks_of(table: Any) -> dict[str, list[tuple[str, range]]]:
    """Return {word: [(layer stack, its layers' numbers)]} for the words in braces in names. A word
    is the path of a stack, for example {encoder.layers}. {l} is any layer of the main stacks: in
    dense_layers, then in layers.between and in `layers` in turns (tables.py)."""
    counts = layer_counts(table)
    dense, main = counts.get("dense_layers", 0), counts.get("layers", 0)
    every = 1 + len(table["layers"].get("between", ())) if main else 1
    own = {"dense_layers": range(dense)} | {
        "layers" if i == every - 1 else f"layers.between.{i}": range(
            dense + i, dense + main * every, every) for i in range(every)}
    found = {path.rpartition(".")[0]: range(w.shape[0]) for path, w in by_path(table).items()
             if "L" in w.axes}
    return {word: [(word, numbers)] for word, numbers in (found | own).items()} | {
        "l": [*own.items()]}


# Arrays that hold all experts, in folders written by transformers 5.
FUSED = {"model.layers.{l}.mlp.experts.gate_up_proj": "-> e_gate e_up",
         "model.layers.{l}.mlp.experts.down_proj": "-> e_down"}


def published_arrays(family: Any, config: Any, table: Any, is_fused: bool = False
                     ) -> Iterator[tuple[str, list[Part]]]:
    """Yield (name, its Parts) for every array of a model with this config. If a name repeats, the
    later one wins. In names, {e} is an expert's number, and any other word is a layer's number (see
    stacks_of). With `is_fused`, the arrays in FUSED replace those of a single expert."""
    names, own, adjust = family.arrays, by_path(table), family.adjust(config)
    names = names(config) if callable(names) else names
    stacks = stacks_of(table) | family.stacks(config)
    if is_fused:
        names = {name: ours for name, ours in names.items() if "{e}" not in name} | FUSED
    for template, ours in names.items():
        word = "".join(re.findall(r"{(?!e})(.*?)}", template))      # at most one
        experts = range(config.experts) if "{e}" in template else [None]
        for stack, numbers in stacks.get(word, []) if word else [("", [None])]:
            for end, pattern, sign, paths in _rows(ours, stack and f"{stack}.", own):
                weights = {path: own[path] for path in paths}
                parts = _layouts_of(pattern, weights, config, "{e}" in template)
                for at, number in enumerate(numbers):
                    for e in experts:
                        name = template.replace(f"{{{word}}}", str(number)) + end
                        name = name.replace("{e}", str(e))
                        yield name, [Part(path, at if stack else None, e, layout, sign,
                                          adjust.get(path.rsplit(".", 1)[-1], Change()))
                                     for path, layout in parts.items()]


def _rows(ours, prefix, own):
    """Find the arrays that a row of a name table stands for, if `own` has their weights. Return
    [(name suffix, layout or "" for torch's, sign, weight paths)]."""
    if sign := re.search("|".join(SIGNS), ours):
        rows = [("", ours[:sign.start()].strip(), sign[0], ours[sign.end():].split())]
    else:
        names, _, copied = (part.split() for part in ours.partition("="))
        rows = [(".weight", "", "->", names), (".bias", "", "->", [f"{x}_bias" for x in names])]
        if not all(prefix + name in own for name in names):
            rows[0] = (".weight", "", "==", copied)
    rows = [(*row, [prefix + name for name in names]) for *row, names in rows]
    return [row for row in rows if row[-1] and all(path in own for path in row[-1])]


def _layouts_of(pattern, weights, config, has_expert):
    """Return {path: Layout} for these weights in an array, without the stacked axes."""
    pattern = pattern or _layout_there(weights.values(), has_expert)
    stacked = {"L", *"E" * has_expert, *("" if "1" in pattern.split() else "1")}
    sizes = {a: size for w in weights.values() for a, size in zip(w.axes, w.shape)}
    sizes = {"K": config.kv_heads, "g": config.heads // config.kv_heads, **sizes}
    if "V" in sizes:
        sizes["V"] = config.vocab_size
    return layouts(pattern, {path: tuple(a for a in w.axes if a not in stacked)
                             for path, w in weights.items()}, sizes)


def _layout_there(rows, has_expert):
    """Return torch's layout for an array that concatenates these weights. Outputs come before
    inputs, a vector's axes merge into one, and a table keeps its axes."""
    outputs, others = [], ""
    for w in rows:
        letters = [x for x in w.axes if x not in ("L1E" if w.is_of_experts else "L1")]
        experts = w.is_of_experts and not has_expert
        if w.is_table or not letters:
            return " ".join(letters)
        if "1" in w.axes or len(letters) == 1:      # a vector
            cut = 0
        else:       # a row matrix (tensor splits its first dimension) or a column matrix
            cut = -1 if w.tensor >= 0 and w.axes[w.tensor] == letters[0] else 1
        outputs.append(" ".join(letters[cut:]))
        others = f" ({' '.join(letters[:cut])})" if cut else ""
    return "E " * experts + f"({' | '.join(outputs)})" + others


def check_arrays(folder: Folder, family: Any, config: Any, table: Any
                 ) -> dict[str, list[Part]]:
    """Return {name: its Parts} for this folder's arrays. Reject the folder if an array is missing
    or unknown, has the wrong shape, or has a dtype that we don't read."""
    there, spare = folder.arrays.keys(), {}     # {array that might not be a weight: why}
    for pattern, why in family.ignored.items():
        pattern = pattern.replace("{layers}", str(config.layers))
        spare |= {name: why for name in there if re.fullmatch(pattern, name)}
    is_fused = any(re.search(r"experts\.(gate_up|down)_proj$", name) for name in there)
    # A bare model (without a head) has no prefix in its names.
    named = there - spare.keys()
    bare = family.prefix and not any(name.startswith(family.prefix) for name in named)
    expected = {}
    for name, parts in published_arrays(family, config, table, is_fused):
        if len(expected) > 2 * len(there) + 99:     # stop before a wrong count fills memory
            experts = f" with {config.experts} experts each" if config.experts else ""
            raise ConfigError(f"{folder.path} has {len(there)} arrays; its config.json says "
                              f"{config.layers} layers{experts}")
        name = other = name.removeprefix(family.prefix) if bare else name
        for part, older in family.older.items():
            other = other.replace(part, older)
        expected[other if other in there else name] = parts
    # If a weight has several copies, any one of them is enough.
    found = {part[:3] for name in expected.keys() & there for part in expected[name]}
    lost = {name for name, parts in expected.items() if parts[0].sign == "->" and name not in there
            and parts[0][:3] not in found}
    for what, those in (("lacks", lost),
                        ("has arrays that are not part of its model:", named - expected.keys())):
        if those:
            raise ConfigError(f"{folder.path} {what} {_listed(those)}")
    for name in spare.keys() - expected.keys():
        _check_ignored(folder, config, name, spare[name])
    expected = {name: parts for name, parts in expected.items() if name in there}
    for name, parts in expected.items():
        array, shape = folder.arrays[name], parts[0].layout.shape
        if array.shape != shape or not jnp.issubdtype(array.dtype, jnp.floating):
            raise ConfigError(f"{folder.path}: {name} ({array.dtype}) has the shape "
                              f"{list(array.shape)}; its config.json says {list(shape)}, of floats")
    return expected


def _check_ignored(folder, config, name, why):
    """Reject an array if we have no valid reason to ignore it: either it must be the constant that
    the config implies, or the class in `architectures` must match the regex in `why`."""
    kinds = folder.config.get("architectures") or [""]
    if callable(why) and not why(config, folder.arrays[name].astype(np.float32)):
        raise ConfigError(f"{folder.path}: {name} is not the constant of model_type "
                          f"{folder.config['model_type']}")
    if not callable(why) and not re.search(why, str(kinds[0])):
        raise ConfigError(f"{folder.path}: {name} is not part of a model of architectures {kinds}")


def read_weights(folder: Folder, family: Any, config: Any, table: Any, places: Any) -> Any:
    """Read a folder's weights, sharded like `places` (shapes with shardings; layers stacked or
    separate). Each device reads only its own part of each array. If `places` is None, only check
    names, shapes and dtypes."""
    expected = check_arrays(folder, family, config, table)
    if places is None:
        return None
    pieces, axes = {}, by_path(table)
    of_layer = {str(number): (stack, at) for stack, numbers in stacks_of(table)["l"]
                for at, number in enumerate(numbers)}   # {layer: its stack and index there}
    for name, parts in expected.items():        # {our path: its Parts, each with its array's name}
        for part in parts:
            pieces.setdefault(part.path, []).append((name, part))

    def make(path, shape):
        number = None
        if path not in axes:        # a weight of a separate layer
            _, layer, name = path.split(".", 2)
            stack, number = of_layer[layer]
            path = f"{stack}.{name}"

        @functools.cache
        def read(*bounds):
            ranges = [slice(*one) for one in bounds]
            ranges = ranges if number is None else [slice(number, number + 1), *ranges]
            found = _read_part(folder, axes[path].axes, pieces.get(path, []), ranges)
            return (found if number is None else found[0]).astype(shape.dtype, copy=False)

        return jax.make_array_from_callback(shape.shape, shape.sharding, lambda index: read(
            *(r.indices(size)[:2] for r, size in zip(index, shape.shape))))

    paths, shapes, structure = flatten(places)
    return structure.unflatten([make(path, shape) for path, shape in zip(paths, shapes)])


def _read_part(folder, axes, pieces, ranges):
    """Read these ranges of one of our weights; use zeros where no array has it."""
    out, done = np.zeros([r.stop - r.start for r in ranges], np.float32), {}
    for name, part in sorted(pieces, key=lambda piece: SIGNS.index(piece[1].sign)):
        stacked = len(axes) - len(part.layout.own)      # leading axes that the array lacks
        numbers = {"L": part.layer or 0, "E": part.expert or 0, "1": 0}
        places = [(numbers[letter], r) for letter, r in zip(axes[:stacked], ranges)]
        if not all(r.start <= number < r.stop for number, r in places):
            continue                                    # another device's part
        first = done.setdefault(part[:3], name)
        if first != name and part.sign == "~":
            continue
        found = part.layout.read(folder.arrays[name], ranges[stacked:], part.change.order)
        found = np.asarray(found, np.float32) + np.float32(part.change.offset)
        if not np.isfinite(found).all():
            raise ConfigError(f"{folder.path}: {name} has numbers that are not finite")
        at = (*(number - r.start for number, r in places), *map(slice, found.shape))
        if first != name and (found != out[at]).any():
            raise ConfigError(f"{folder.path}: {first} and {name} differ; its config.json says "
                              f"that they are tied")
        out[at] = found
    return out


def write_folder(path: str | Path, family: Any, config: Any, table: Any, params: Any,
                 dtype: str = "float32") -> None:
    """Write a folder that transformers can read: config.json, plus a single file with the weights
    in this dtype. Every process must call this; process 0 writes."""
    path, is_writer, refusal = Path(path), jax.process_index() == 0, ""
    try:
        if is_writer:
            check_others(path, "export", "this export")
    except ConfigError as e:
        refusal = str(e)
    if refusal := process_allgather(refusal)[0]:
        raise ConfigError(refusal)
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
    expected, weights = dict(published_arrays(family, config, table)), by_path(params)
    record = json.loads(config.published)
    if lost := weights.keys() - {part.path for parts in expected.values() for part in parts}:
        raise ConfigError(f"a folder of model_type {record['model_type']} "
                          f"has no array for the weights {_listed(lost)}")
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, parts in expected.items():
        if parts[0].sign != "==":
            shape, begin = parts[0].layout.shape, end
            end += math.prod(shape) * jnp.dtype(dtype).itemsize
            header[name] = dict(dtype=DTYPES[dtype], shape=shape, data_offsets=(begin, end))
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    if is_writer:
        path.mkdir(parents=True, exist_ok=True)
    with open(path / "model.safetensors" if is_writer else os.devnull, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in [*header][1:]:
            file.write(published_array(name, expected[name], weights, dtype).tobytes())
    if is_writer:
        write_json(path / "config.json", {**record, "dtype": dtype, "torch_dtype": dtype})


def published_array(name: str, parts: list[Part], weights: Fields, dtype: str = "float32"
                    ) -> np.ndarray:
    """Build a published array from the weights it holds. `weights` is {path: weight}."""
    array = np.zeros(parts[0].layout.shape, np.float32)
    for part in parts:
        w, layout = weights[part.path], part.layout
        for number in (part.layer, part.expert):
            w = w if number is None else w[number]
        w = np.asarray(on_host(w), np.float32).reshape(
            [-1 if a == "V" else layout.sizes[a] for a in layout.own])
        w = w[tuple(slice(layout.sizes[a]) for a in layout.own)]        # drop the padding
        w, order = w - np.float32(part.change.offset), part.change.order
        layout.write(array, w if order is None else w[..., np.argsort(order)])
    with np.errstate(over="ignore"):
        array = array.astype(jnp.dtype(dtype))
    if not np.isfinite(array.astype(np.float32)).all():
        raise ConfigError(f"{name} has numbers that are not finite, or too large for {dtype}")
    return array

