"""Names on the Hugging Face hub, and where their files are on this machine.

    --model org/name                the commit that the cache has, or else the hub's newest
    --model org/name@REVISION       a branch, a tag or a commit
    --data hf://datasets/org/name/texts/*.jsonl     a file, a folder or a pattern

    with_commit     org/name -> org/name@COMMIT, which a run records
    config_of  weights_of  tokenizer_of     that name -> its files in the cache
    files           an address in --data -> a path in the cache

The huggingface_hub package manages the cache and reads the environment (HF_HOME, HF_TOKEN,
HF_HUB_OFFLINE). We ask the hub only for named files that the cache lacks, and never for a pickle or
a program. Given a folder instead of a name, these functions return the folder itself.
"""

import difflib
import glob
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Callable, NamedTuple

from zigzag.core.errors import ConfigError, did_you_mean, note, one_line, optional_package
from zigzag.disk.tokenizers import BESIDE, FILE_OF, Tokenizer, published_tokenizer

NAME = re.compile(r"([\w-][\w.-]*/[\w.-]+)(?:@([\w./-]+))?", re.A)
ADDRESS = re.compile(r"hf://datasets/([\w-][\w.-]*/[\w.-]+)(?:@(refs/\w+/[\w.-]+|[\w.-]+))?/*(.*)",
                     re.A)
COMMIT = re.compile(r"[0-9a-f]{40}")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


class Silent(ConfigError):
    """The hub gives no answer, or no useful one."""


class Repository(NamedTuple):
    """A model or a dataset on the hub."""
    given: str                  # the words of the command line, for messages
    name: str
    revision: str
    kind: str = "model"

    @property
    def hub(self) -> Any:
        return optional_package("huggingface_hub", self.given)

    def ask(self, function: Callable, *words: Any, **options: Any) -> Any:
        """Call a huggingface_hub function on this repository. Return None if it says that the
        repository lacks the file."""
        errors = self.hub.errors
        try:
            return function(self.name, *words, revision=self.revision, repo_type=self.kind,
                            **options)
        except Exception as e:      # each version of the package raises different errors
            if isinstance(e, errors.EntryNotFoundError) and not isinstance(
                    e, errors.LocalEntryNotFoundError):
                return None
            raise self.refusal(e) from None

    def refusal(self, error: Exception) -> ConfigError:
        """Return the ConfigError for an exception from huggingface_hub."""
        errors = self.hub.errors
        login = "set HF_TOKEN or run `hf auth login`"
        if isinstance(error, errors.GatedRepoError):
            why = f"its owner decides who may download it; ask for that on its page, then {login}"
        elif isinstance(error, errors.RepositoryNotFoundError):
            why = f"the hub has no such {self.kind}, or it is private ({login}){self.nearest()}"
        elif isinstance(error, errors.RevisionNotFoundError):
            why = f"it has no revision {self.revision!r}; expected a branch, a tag or a commit"
        elif isinstance(error, errors.HFValidationError):
            why = one_line(error)
        elif isinstance(error, OSError) and error.errno:
            why = (f"{one_line(error)}; the cache is {self.hub.constants.HF_HUB_CACHE}, and "
                   f"HF_HOME names another place for it")
        else:
            return Silent(f"{self.given}: no answer from the hub ("
                          f"{one_line(error.__cause__ or error)})")
        return ConfigError(f"{self.given}: {why}")

    def nearest(self) -> str:
        """Return the end of a message: the nearest names in the cache, if it lacks this name."""
        known = [path.name.partition("--")[2].replace("--", "/") for path in Path(
            self.hub.constants.HF_HUB_CACHE).glob(f"{self.kind}s--*--*")]
        near = [] if self.name in known else difflib.get_close_matches(self.name, known, 3)
        return f"; the nearest names in the cache: {', '.join(near)}" if near else ""

    def fetched(self, *names: str, is_first: bool = False) -> list[Path]:
        """Return the paths of the named files that the repository has; with is_first, only the
        first. If the hub doesn't answer, use the cache; raise Silent if it has no such file."""
        found, silence, unknown = [], None, []
        for file in names:
            # This is a path, None if the cache doesn't know, or an object if there's no such file.
            path = self.ask(self.hub.try_to_load_from_cache, file)
            if path is None and not silence:
                try:
                    path = self.ask(self.hub.hf_hub_download, file)
                except Silent as e:
                    silence = e
            if path is None and silence:
                unknown.append(file)
            elif isinstance(path, str):
                found.append(Path(path))
                if is_first:
                    break
        without = f"{silence}, and the cache lacks {', '.join(unknown)}"
        if silence and not found:
            raise Silent(without + self.nearest())
        if silence:
            note(f"{without}; this goes on without them")
        return found

    def folder(self) -> Path:
        """Return the cache's folder for this revision of a model, with its config.json."""
        if found := self.fetched("config.json"):
            return found[0].parent
        raise ConfigError(f"{self.given}: no config.json in it; expected a published model")


# -------------------------------------------------------------------------------------------
# Models

def repository(name: str | Path) -> Repository | None:
    """Return the repository that a name refers to; None for a folder, a Path, or a preset."""
    match = NAME.fullmatch(name) if isinstance(name, str) else None
    if not match or Path(name).is_dir():
        return None
    return Repository(f"--model {name} (no folder, so a name of the hub)", match[1],
                      match[2] or "main")


def with_commit(name: str | Path) -> str | Path:
    """Return a name on the hub with the commit that it refers to now."""
    repo = repository(name)
    return f"{repo.name}@{repo.folder().name}" if repo else name


def at_commit(name: str | Path) -> Repository | None:
    """Return the repository in a name that includes a commit, or None. A name without a commit is a
    path: if somebody moved the folder that a run began with, no model on the hub may replace it."""
    repo = repository(name)
    return repo if repo and COMMIT.fullmatch(repo.revision) else None


def config_of(name: str | Path) -> Path:
    """Return a model's folder, with its config.json."""
    repo = at_commit(name)
    return repo.folder() if repo else Path(name)


def weights_of(name: str | Path) -> Path:
    """Return a model's folder, with its weights too if they are safetensors."""
    repo = at_commit(name)
    for file in repo.fetched(WEIGHTS, INDEX, is_first=True) if repo else ():
        if file.name == INDEX:      # the folder's reader checks that its parts are there
            text = file.read_text(errors="replace")
            repo.fetched(*sorted(set(re.findall(r'"([\w-][\w.-]*\.safetensors)"', text, re.A))))
    return config_of(name)


def tokenizer_of(name: str | Path, rows: int) -> Tokenizer:
    """Return a model's tokenizer; `rows` is the number of rows in its embedding."""
    if repo := at_commit(name):
        repo.fetched(*FILE_OF.values(), is_first=True)
        repo.fetched("config.json", *BESIDE)
    return published_tokenizer(config_of(name), rows)


# -------------------------------------------------------------------------------------------
# Data

def files(address: str) -> str:
    """Return the cache path for a file, a folder or a pattern in a dataset. A single file
    comes from the cache if it's there; for a folder or a pattern, the hub lists the files."""
    match = ADDRESS.fullmatch(address)
    if not match or ".." in address.split("/"):
        raise ConfigError(f"--data {address}: expected hf://datasets/ORG/NAME/PATH; after NAME, "
                          f"@REVISION names one that isn't main")
    repo = Repository(f"--data {address}", match[1], match[2] or "main", "dataset")
    path = match[3].rstrip("/")
    if path and isinstance(found := repo.ask(repo.hub.try_to_load_from_cache, path), str):
        return found
    wanted, there, silence = [path, f"{path}/*"] if path else ["*"], [], None
    try:
        there = repo.ask(repo.hub.HfApi().list_repo_files)
    except Silent as e:
        silence = e
    if path in there:
        return str(*repo.fetched(path))
    names = [name for name in there if any(fnmatch(name, pattern) for pattern in wanted)]
    if not names and not silence:
        raise ConfigError(f"{repo.given}: no such file{did_you_mean(path, there)}")
    try:
        folder = Path(repo.ask(repo.hub.snapshot_download, allow_patterns=wanted,
                               local_files_only=bool(silence)))
    except Silent as e:
        raise silence or e
    if silence:
        note(f"{silence}; this reads the files that its cache has")
    elif not all((folder / name).exists() for name in names):
        raise Silent(f"{repo.given}: the hub stopped answering")
    return f"{glob.escape(str(folder))}/{path}" if glob.has_magic(path) else str(folder / path)
