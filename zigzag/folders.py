"""A published model's folder as model.py uses it: the body of load_hf and save_hf, and of

    python model.py --run RUN --export DIR      a run's weights, for transformers and others
"""

import dataclasses
import json
from pathlib import Path
from typing import Any, Callable, Sequence

from zigzag.checkpoint import read_run
from zigzag.errors import ConfigError
from zigzag.families import as_llama, family_of, fields_of
from zigzag.flags import from_flags
from zigzag.published import DTYPES, Folder, read_config, read_weights, write_folder
from zigzag.published_config import as_config
from zigzag.tokenizers import copy_files


def hf_config(path: str | Path, config: type, families: Any, **fields: Any) -> Any:
    """The dataclass `config` of a folder's config.json, but for these fields."""
    record = read_config(path)
    found, seen = fields_of(record, families), family_of(record, families).seen
    if seen:
        found |= seen(found, Folder(path).arrays)
    return as_config(config, Path(path) / "config.json", found | fields)


def read(path: str | Path, config: Any, families: Any, table: Any, places: Any = None) -> Any:
    """The weights in these places (shapes with shardings). With none, only a look at the folder."""
    folder = Folder(path)
    return read_weights(folder, family_of(folder.config, families), config, table, places)


def write(path: str | Path, params: Any, config: Any, families: Any, table_of: Callable,
          dtype: str) -> None:
    if not config.published:
        params, config = as_llama(params, config)
    write_folder(path, family_of(json.loads(config.published), families), config,
                 table_of(config), params, dtype)


@dataclasses.dataclass(frozen=True)
class Export:
    """python model.py --run RUN --export DIR: a trained model as a Hugging Face folder"""
    run: str = "out"            # the --out of a train.py
    export: str = ""            # folder to make
    dtype: str = "float32"      # or bfloat16, float16: precision of what is written

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype {self.dtype}: expected one of {', '.join(DTYPES)}")


def export(load_run: Callable, save_hf: Callable, tokenizer_of: Callable,
           argv: Sequence[str] | None = None) -> None:
    """The command line. The functions are model.py's and data.py's."""
    options = from_flags(Export(), argv)
    if not options.export:
        raise ConfigError("--export '': expected a new folder")
    params, config = load_run(options.run)
    record, out = read_run(options.run, type(config)), Path(options.export)
    save_hf(out, params, config, options.dtype)
    files = []
    if "tokenizer" in record:       # (a run of another task has none)
        files = copy_files(tokenizer_of(Path(options.run), record), out)
    print(f"{out}: the weights of {options.run} in {options.dtype}, "
          + (f"with {', '.join(files)}" if files else
             "without a tokenizer: that of the run is not a file (its tokens are bytes)"))
