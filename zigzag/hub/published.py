"""Published models: from a Hugging Face folder to weights in their shards, and back.

    config.json          the family and its sizes                 (llama.py translates them)
    *.safetensors        arrays by name                           (llama.py has their patterns)

A family has a pattern for each published array: its layout, and the weights of ours in it.

    "self_attn.q_proj.weight": "(H N) D -> wq"                      one weight, its axes merged
    "attn.c_attn.weight":      "D (H N | K N | K M) -> wq wk wv"    three, one after the other
    "query_key_value.weight":  "(K [g N | N | M]) D -> wq wk wv"    three in every group of heads
    "lm_head.weight":          "V W = embed"                        a copy of another array
    "lm_head.bias":            "V ~ head_bias"                      a copy that is ignored

The letters are those of the network's table of weights; g is the number of query heads for each key
head. Brackets ( ) merge axes into one. A | B is the concatenation of A and B. K [A | B] repeats the
content of the brackets K times: in the third example, for each key head, its query heads, its key
and its value. A 1 is an axis of length 1, which our weight may lack. An array with = is not
written, and may be missing; if it is there, it must have the same numbers. One with ~ is written,
but read only if the other is missing. The pattern determines the expected shape, the part of the
array that a device reads (its shard's range of the first letter of each axis), and what is written.
"""

import dataclasses
import functools
import json
import math
import re
from pathlib import Path
from typing import Any, Sequence

import jax
import numpy as np

from zigzag.core.errors import ConfigError, one_line, optional_package
from zigzag.core.files import check_others, read_json, write_json
from zigzag.core.hosts import process_allgather
from zigzag.core.mesh import by_path, flatten
from zigzag.weights.table import layer_counts

# The most bytes of arrays in one file.
FILE_BYTES = 4 * 2**30
DTYPES = ("float32", "bfloat16", "float16")


# -------------------------------------------------------------------------------------------
# The layout of an array

@dataclasses.dataclass(frozen=True)
class Axis:
    """An axis of a published array, for one of our weights."""
    outer: tuple[str, ...]  # the letters before [, which number the repeats
    inner: tuple[str, ...]  # this weight's letters in the brackets; all, if nothing is repeated
    begin: int              # the index in a repeat at which this weight begins
    block: int              # the count of this weight's numbers in a repeat
    whole: int              # the length of a repeat

    @property
    def letters(self) -> tuple[str, ...]:
        """This weight's letters in the axis. (The g query heads of K key heads are its H heads.)"""
        return ("H", *self.inner[1:]) if "g" in self.inner else self.outer + self.inner


@dataclasses.dataclass(frozen=True)
class Layout:
    """The layout of a published array, for one of our weights, which has the axes `own`."""
    axes: tuple[Axis, ...]
    own: tuple[str, ...]
    sizes: dict[str, int]

    def _count(self, letters):
        return math.prod(self.sizes[x] for x in letters)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the published array."""
        return tuple(self._count(a.outer) * a.whole for a in self.axes)

    @property
    def letters(self) -> tuple[str, ...]:
        """This weight's letters, in the order of the published array."""
        return tuple(x for a in self.axes for x in a.letters)

    @property
    def order(self) -> list[int]:
        """The index in `letters` of each axis of this weight."""
        return [self.letters.index(x) for x in self.own]

    def read(self, array: Any, ranges: Sequence[slice]) -> np.ndarray:
        """The part of this weight in these ranges, from a published array (or anything that can be
        sliced)."""
        if not self.axes:           # (a single number)
            return np.asarray(array[()])
        wanted, places = dict(zip(self.own, ranges)), []
        for a in self.axes:         # where the numbers stand on each axis
            own = np.arange(self._count(a.outer) * a.whole).reshape(-1, a.whole)
            own = own[:, a.begin:a.begin + a.block].reshape([self.sizes[x] for x in a.letters])
            places.append(own[tuple(wanted.get(x, slice(None)) for x in a.letters)])
        shape = [size for own in places for size in own.shape]
        places = [own.ravel() for own in places]
        runs = [np.split(own, np.flatnonzero(np.diff(own) > 1) + 1) for own in places]
        at = max(range(len(runs)), key=lambda i: len(runs[i]))
        cuts, parts = [_from_first_to_last(own) for own in places], []
        for run in runs[at]:        # (of an axis with gaps, all is read but the gaps)
            cuts[at] = _from_first_to_last(run)
            parts.append(np.asarray(array[tuple(cuts)]))
        part = np.concatenate(parts, at) if len(parts) > 1 else parts[0]
        for i, own in enumerate(places):
            if i != at and len(runs[i]) > 1:
                part = np.take(part, own - own[0], i)
        return part.reshape(shape).transpose(self.order)

    def write(self, array: np.ndarray, weight: np.ndarray) -> None:
        """Write all of this weight into its part of a published array."""
        part = weight.transpose(np.argsort(self.order))
        # Views: the array with its outer letters as axes, the weight with its inner letters merged.
        apart, own, at = [], [], []
        for a in self.axes:
            apart += [self._count(a.outer), a.whole]
            own += [self._count(a.outer), a.block]
            at += [slice(None), slice(a.begin, a.begin + a.block)]
        array.reshape(apart)[tuple(at)] = part.reshape(own)


def _from_first_to_last(places):
    return slice(int(places[0]), int(places[-1]) + 1)


def _sides(pattern):
    left, right = re.split("->|=|~", pattern)
    return left, right.split()


def layouts(pattern: str, own: dict[str, tuple[str, ...]], sizes: dict[str, int]
            ) -> dict[str, Layout]:
    """{weight: its Layout} of a pattern. `own` has the axes of the weights."""
    left, names = _sides(pattern)
    axes = {name: [] for name in names}
    for word in re.findall(r"\([^)]*\)|\S+", left):
        before, _, blocks = word.strip("()").partition("[")
        if not blocks:
            before, blocks = "", before
        inners = [[x for x in block.split() if x != "1" or x in sizes]
                  for block in blocks.strip("] ").split("|")]
        inners = inners if len(inners) > 1 else inners * len(names)
        lengths = [math.prod(sizes[x] for x in inner) for inner in inners]
        whole = sum(lengths) if "|" in blocks else lengths[0]
        for i, name in enumerate(names):
            begin = sum(lengths[:i]) if "|" in blocks else 0
            axes[name].append(Axis(tuple(before.split()), tuple(inners[i]), begin, lengths[i],
                                   whole))
    return {name: Layout(tuple(axes[name]), own[name], sizes) for name in names}


# -------------------------------------------------------------------------------------------
# The folder

def _listed(names):
    """The first ten of these names as text, shortened if they are long."""
    first = [n if n.isprintable() and len(n) < 200 else f"{n!r:.80}" for n in sorted(names)[:10]]
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return ", ".join(first) + more


def read_config(path: str | Path) -> dict[str, Any]:
    """The content of a folder's config.json."""
    config = read_json(Path(path) / "config.json")
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ConfigError(f"{Path(path) / 'config.json'}: no model_type in it; expected the "
                          f"config.json of a published model (a run is given as --run, or to "
                          f"train.py as --init_from)")
    return config


class Folder:
    """The arrays of a folder by name, memory-mapped: only the parts that are used are read."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.config = read_config(path)
        self.arrays = {}
        files = self._files()
        package = optional_package("safetensors", "a published model")
        for file, names in files.items():
            try:
                opened = package.safe_open(self.path / file, framework="numpy")
                found = set(opened.keys())
            except (OSError, package.SafetensorError) as e:
                raise ConfigError(f"{self.path / file} cannot be read: {one_line(e)}") from None
            if names is not None and names != found:
                raise ConfigError(f"{self.path / file} is not as the index says: "
                                  + (f"it lacks {_listed(names - found)}" if names - found else
                                     f"it has {_listed(found - names)} too"))
            self.arrays |= dict.fromkeys(found, opened)

    def _files(self):
        """{file: the arrays that the index lists for it (None: there is no index)}."""
        if (self.path / "model.safetensors").is_file():
            return {"model.safetensors": None}
        index = self.path / "model.safetensors.index.json"
        if not index.exists():
            raise ConfigError(f"{self.path}: neither model.safetensors nor its index is there "
                              f"(weights in other formats are not read)")
        files, weight_map = {}, read_json(index)
        weight_map = weight_map.get("weight_map") if isinstance(weight_map, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            raise ConfigError(f"{index}: no weight_map in it")
        for name, file in weight_map.items():
            if (not isinstance(file, str) or not file or file != Path(file).name
                    or file.startswith(".") or len(file.encode()) > 255 or not file.isprintable()):
                raise ConfigError(f"{index}: it lists {_listed([name])} in {file!r:.80}, which is "
                                  f"not a file of this folder")
            if not (self.path / file).is_file():
                raise ConfigError(f"{self.path / file} is missing: {index.name} says that "
                                  f"{_listed([name])} is in it")
            files.setdefault(file, set()).add(name)
        return files

    def kind(self, name: str) -> tuple[tuple[int, ...], str]:
        """(shape, dtype) of an array; the dtype is F32, BF16, ..."""
        array = self.arrays[name].get_slice(name)
        return tuple(array.get_shape()), array.get_dtype()

    def __getitem__(self, name: str) -> "_Array":
        return _Array(self, name)


class _Array:
    """An array of a folder. Slices of it are read from the file; their numbers must be finite."""

    def __init__(self, folder, name):
        self.folder, self.name = folder, name

    def __getitem__(self, cuts):
        try:
            part = self.folder.arrays[self.name].get_slice(self.name)[cuts]
        except Exception as e:      # (a Rust library, which raises plain Exceptions)
            raise ConfigError(f"{self.folder.path}: {self.name} cannot be read: {one_line(e)}"
                              ) from None
        part = np.asarray(part, np.float32)
        if not np.isfinite(part).all():
            raise ConfigError(f"{self.folder.path}: {self.name} has numbers that are not finite")
        return part


# -------------------------------------------------------------------------------------------
# The arrays of a family, and reading weights

@dataclasses.dataclass(frozen=True)
class Part:
    """One of our weights in a published array: its path, its Layout, the layer and the expert that
    it belongs to (None: the weight has none), whether another array has it too (`again`), and
    whether its numbers are then ignored."""
    path: str
    layout: Layout
    layer: int | None
    expert: int | None
    again: bool
    unused: bool


def stacks_of(c: Any) -> dict[str, list[tuple[str, range]]]:
    """What a letter in a name numbers: stacks of layers, and the numbers of their layers there.

    {l} any layer, {d} one of dense_layers, {m} one of the others, {s} one of the encoder (of the
    source)."""
    dense = ("dense_layers", range(c.dense_layers))
    others = ("layers", range(c.dense_layers, c.layer_groups or c.layers))
    return {"l": [dense, others], "d": [dense], "m": [others],
            "s": [("encoder.layers", range(c.encoder_layers))]}


def one_stack(c: Any) -> dict[str, list[tuple[str, range]]]:
    """stacks_of for a network with one stack of equal layers."""
    return {"l": [("layers", range(c.layers))]}


def published_arrays(family: Any, config: Any, table: Any, is_fused: bool = False
                     ) -> dict[str, list[Part]]:
    """{name: its Parts} of every array that a model of this configuration has. In patterns of names
    {e} is the number of an expert, and any other letter the number of a layer (the family's
    `stacks`). `is_fused` says that one array has all experts."""
    stacks, own, found = family.stacks(config), by_path(table), {}
    arrays = family.arrays(config)
    if is_fused:
        arrays = {name: p for name, p in arrays.items() if "{e}" not in name} | family.fused
    for template, pattern in arrays.items():
        letter = next((x for x in re.findall(r"{(\w)}", template) if x != "e"), "")
        for stack, numbers in stacks[letter] if letter else [("", [None])]:
            if len(numbers) == 0:
                continue
            experts = range(config.experts) if "{e}" in template else [None]
            parts = _layouts_of(pattern, own, stack and f"{stack}.", config,
                                {"L", "1", *("E" if experts[0] == 0 else "")})
            for at, number in enumerate(numbers):
                for e in experts:
                    name = template.format(**{letter or "l": number, "e": e})
                    found[name] = [Part(path, layout, at if stack else None, e,
                                        "->" not in pattern, "~" in pattern)
                                   for path, layout in parts.items()]
    return found


def _layouts_of(pattern, own, prefix, config, stacked):
    """{path: Layout} of the weights of a pattern, without the axes that are stacked."""
    left, names = _sides(pattern)
    if lost := [prefix + n for n in names if prefix + n not in own]:
        raise ConfigError(f"a folder of this model_type has the weight {lost[0]}, which this "
                          f"network lacks")
    weights = {n: own[prefix + n] for n in names}
    sizes = {a: size for w in weights.values() for a, size in zip(w.axes, w.shape)}
    sizes = {"g": config.heads // config.kv_heads, "K": config.kv_heads, **sizes}
    if "V" in sizes:
        sizes["V"] = config.vocab_size
    if set(re.findall("[A-Za-z]", left)) - sizes.keys():
        raise ConfigError(f"the weight {prefix}{names[0]} has the axes "
                          f"{' '.join(weights[names[0]].axes)}, and a folder of this model_type "
                          f"has those of {pattern!r}")
    if "1" in left.split():
        stacked = stacked - {"1"}
    found = layouts(pattern, {n: tuple(a for a in w.axes if a not in stacked)
                              for n, w in weights.items()}, sizes)
    return {prefix + n: layout for n, layout in found.items()}


def check_arrays(folder: Folder, family: Any, config: Any, table: Any
                 ) -> dict[str, list[Part]]:
    """{name: its Parts} of the arrays of this folder. Refuses a folder in which an array is missing
    or unknown, or has another shape or a dtype that we do not read."""
    spare = _ignored(folder, family, config)
    found = folder.arrays.keys() - spare.keys()
    is_fused = bool(family.fused) and any(name.endswith(FUSED) for name in found)
    # (First, because a wrong number of layers would make the list below too long.)
    counts = layer_counts(table)
    least = (sum(counts.values()) or config.layers) + (
        0 if is_fused else counts.get("layers", 0) * config.experts)
    if least > len(found):
        experts = f" with {config.experts} experts each" if config.experts else ""
        raise ConfigError(f"{folder.path} has {len(found)} arrays; its config.json says "
                          f"{config.layers} layers{experts}")
    # (The folder of a bare model, without a head, has names without the prefix.)
    bare = family.prefix and not any(name.startswith(family.prefix) for name in found)

    def name_there(name):
        name = other = name.removeprefix(family.prefix) if bare else name
        for part, older in family.older.items():
            other = other.replace(part, older)
        return other if other in found else name

    expected = {name_there(name): parts for name, parts in published_arrays(
        family, config, table, is_fused).items()}
    # If several arrays are copies, one is enough, under any of their names.
    first = {parts[0].path: name for name, parts in expected.items() if not parts[0].again}
    for name, parts in list(expected.items()):
        if parts[0].again and name in found and first[parts[0].path] not in found:
            expected[name] = [dataclasses.replace(part, again=False, unused=False)
                              for part in parts]
            del expected[first[parts[0].path]]
            first[parts[0].path] = name
    found |= spare.keys() & expected.keys()     # (ignored only if it is not a part of the model)
    expected = {name: parts for name, parts in expected.items()
                if name in found or not (parts[0].again or name in family.optional)}
    for what, those in (("lacks", expected.keys() - found),
                        ("has what is no part of its model:", found - expected.keys())):
        if those:
            raise ConfigError(f"{folder.path} {what} {_listed(those)}")
    for name in spare.keys() - expected.keys():
        _check_ignored(folder, config, name, spare[name])
    for name, parts in expected.items():
        shape, dtype = folder.kind(name)
        if shape != parts[0].layout.shape:
            raise ConfigError(f"{folder.path}: {name} has the shape {list(shape)}; its config.json "
                              f"says {list(parts[0].layout.shape)}")
        if dtype not in ("F32", "F16", "BF16"):
            raise ConfigError(f"{folder.path}: {name} has numbers of the kind {dtype}; expected "
                              f"F32, F16 or BF16")
    return expected


# The ends of names of arrays with all experts, in folders of transformers 5.
FUSED = ("experts.gate_up_proj", "experts.down_proj")


def _ignored(folder, family, config):
    """{array: why} of the arrays of a folder that may not be weights."""
    patterns = {p.replace("{layers}", str(config.layers)): why
                for p, why in family.ignored.items()}
    return {name: why for name in folder.arrays for p, why in patterns.items()
            if re.fullmatch(p, name)}


def _check_ignored(folder, config, name, why):
    """Refuse an ignored array if the reason does not hold: it must be the constant that follows
    from the configuration, or belong to other classes than `architectures` names."""
    if callable(why):
        if not why(config, folder[name][:] if folder.kind(name)[0] else folder[name][()]):
            raise ConfigError(f"{folder.path}: {name} is not the constant that it is in a model of "
                              f"model_type {folder.config['model_type']}")
        return
    kinds = folder.config.get("architectures") or [""]
    if not re.search(why, str(kinds[0])):
        raise ConfigError(f"{folder.path}: {name} is not a part of a model of architectures "
                          f"{kinds}")


def read_weights(folder: Folder, family: Any, config: Any, table: Any, places: Any) -> Any:
    """The weights of a folder, sharded as `places` (shapes with shardings; layers stacked or
    apart). A device reads only its own part of each array. With `places` None, only names and
    shapes are checked."""
    expected = check_arrays(folder, family, config, table)
    if places is None:
        return None
    # {our path: [{(layer, expert): (array, layout)} of the weight, and of each of its copies]}
    pieces = {}
    for name, parts in expected.items():
        for part in parts:
            one, found = {(part.layer, part.expert): (name, part.layout)}, pieces.setdefault(
                part.path, [{}])
            if part.again and not part.unused:
                found.append(one)
            elif not part.again:
                found[0] |= one
    axes, adjust = by_path(table), family.adjust(config)

    def make(path, shape):
        path, number = (path, None) if path in axes else _of_stack(path, layer_counts(table))
        change = adjust.get(path.rsplit(".", 1)[-1])
        parts, *copies = pieces.get(path, [{}])     # ({}: an optional array, which is zeros)

        @functools.cache
        def read(*bounds):
            ranges = [slice(*one) for one in bounds]
            ranges = ranges if number is None else [slice(number, number + 1), *ranges]
            found = _read_part(folder, axes[path].axes, parts, ranges, change)
            for copy in copies:
                if (found != _read_part(folder, axes[path].axes, copy, ranges, change)).any():
                    (name, _), (other, _) = (*parts.values(), *copy.values())
                    raise ConfigError(f"{folder.path}: {name} and {other} differ; its config.json "
                                      f"says that they are tied")
            return (found if number is None else found[0]).astype(shape.dtype, copy=False)

        return jax.make_array_from_callback(shape.shape, shape.sharding, lambda index: read(
            *(r.indices(size)[:2] for r, size in zip(index, shape.shape))))

    paths, shapes, structure = flatten(places)
    return structure.unflatten([make(path, shape) for path, shape in zip(paths, shapes)])


def _of_stack(path, counts):
    """(the path of the stack, the index in it) of a weight whose layers are apart."""
    _, layer, name = path.split(".", 2)
    at = int(layer) - counts.get("dense_layers", 0)
    return (f"layers.{name}", at) if at >= 0 else (f"dense_layers.{name}", int(layer))


def _read_part(folder, own, parts, ranges, change):
    """The part of one of our weights in these ranges."""
    out = np.zeros([r.stop - r.start for r in ranges], np.float32)
    for (layer, expert), (name, layout) in parts.items():
        numbers, at, wanted = {"L": layer, "E": expert}, [], []
        for letter, r in zip(own, ranges):
            if letter in layout.own:        # (rows of padding of a vocabulary stay zeros)
                begin, stop = (min(x, layout.sizes[letter]) for x in (r.start, r.stop))
                at.append(slice(0, stop - begin))
                wanted.append(slice(begin, stop))
            else:
                at.append((numbers.get(letter) or 0) - r.start)
        if not all(0 <= x < size if isinstance(x, int) else x.stop
                   for x, size in zip(at, out.shape)):      # not of this device, or only padding
            continue
        if change is None:
            out[tuple(at)] = layout.read(folder[name], wanted)
        else:           # all of the last axis, which may be in another order
            whole = [*wanted[:-1], slice(0, layout.sizes[layout.own[-1]])]
            out[tuple(at)] = change.read(layout.read(folder[name], whole))[..., wanted[-1]]
    return out


@dataclasses.dataclass(frozen=True)
class Change:
    """The difference of one of our weights from the published one: the order of its last axis, and
    a number added to it."""
    order: np.ndarray | None = None
    offset: float = 0.0

    def read(self, w: np.ndarray) -> np.ndarray:
        return (w if self.order is None else w[..., self.order]) + np.float32(self.offset)

    def write(self, w: np.ndarray) -> np.ndarray:
        w = w - np.float32(self.offset)
        return w if self.order is None else w[..., np.argsort(self.order)]


def write_folder(path: str | Path, family: Any, config: Any, table: Any, params: Any,
                 dtype: str = "float32", forward: Any = None) -> None:
    """Write a folder that transformers reads: weights in this dtype, in files of FILE_BYTES. Every
    process must call this; process 0 writes. `forward` is the network's, for family.differs."""
    path, package = Path(path), optional_package("safetensors.numpy", "a published model")
    refusal = ""                # (process 0 looks before it writes)
    if jax.process_index() == 0:
        try:
            check_others(path, "export", "this export")
        except ConfigError as e:
            refusal = str(e)
    if refusal := process_allgather(refusal)[0]:
        raise ConfigError(refusal)
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
    expected, weights = published_arrays(family, config, table), by_path(params)
    placed = {part.path for parts in expected.values() for part in parts}
    if lost := weights.keys() - placed:
        raise ConfigError(f"a folder of model_type {json.loads(config.published)['model_type']} "
                          f"has no array for the weights {_listed(lost)}")
    if family.differs and (differs := family.differs(forward, params, config)):
        raise ConfigError(
            f"a model of our own is saved as a LLaMA or Mixtral, and this one computes something "
            f"else: {differs}; undo the edit of its code, or add a family for it (docs: "
            f"zigzag/hub/llama.py)")
    expected = {name: parts for name, parts in expected.items()
                if not parts[0].again or parts[0].unused}
    adjust, itemsize = family.adjust(config), np.dtype(jax.numpy.dtype(dtype)).itemsize
    files, size = [[]], 0
    for name, parts in expected.items():
        more = math.prod(parts[0].layout.shape) * itemsize
        if files[-1] and size + more > FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(name)
        size += more
    is_writer = jax.process_index() == 0
    if is_writer:
        path.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for number, names in enumerate(files, 1):
        file = ("model.safetensors" if len(files) == 1 else
                f"model-{number:05}-of-{len(files):05}.safetensors")
        arrays = {name: _published_array(name, expected[name], weights, adjust, dtype)
                  for name in names}
        weight_map |= dict.fromkeys(names, file)
        if is_writer:
            (path / file).touch()       # (save_file alone would leave it to its owner only)
            mode = (path / file).stat().st_mode
            package.save_file(arrays, path / file, metadata={"format": "pt"})
            (path / file).chmod(mode)
    if is_writer:
        if len(files) > 1:
            write_json(path / "model.safetensors.index.json",
                       {"metadata": {}, "weight_map": weight_map})
        write_json(path / "config.json", {**json.loads(config.published), "dtype": dtype,
                                          "torch_dtype": dtype})


def _published_array(name, parts, weights, adjust, dtype):
    """A published array, made from all of our weights in it."""
    array = np.zeros(parts[0].layout.shape, np.float32)
    for part in parts:
        w = weights[part.path]
        if part.layer is not None:
            w = w[part.layer]
        if part.expert is not None:
            w = w[part.expert]
        layout, change = part.layout, adjust.get(part.path.rsplit(".", 1)[-1])
        w = whole(w).reshape([-1 if a == "V" else layout.sizes[a] for a in layout.own])
        w = w[tuple(slice(layout.sizes[a]) for a in layout.own)]        # (without padding)
        layout.write(array, w if change is None else change.write(w))
    with np.errstate(over="ignore"):
        array = array.astype(jax.numpy.dtype(dtype))
    if not np.isfinite(array.astype(np.float32)).all():
        raise ConfigError(f"{name} has numbers that are not finite, or too large for {dtype}")
    return array


def whole(x: Any) -> np.ndarray:
    """An array of a mesh as numpy, with the parts of other processes."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        x = jax.jit(lambda x: x, out_shardings=jax.NamedSharding(x.sharding.mesh, jax.P()))(x)
    return np.asarray(x, np.float32)
