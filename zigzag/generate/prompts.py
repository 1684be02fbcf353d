"""sample.py's flags, and its input as ids: prompts or texts to score, from the command line, a file
or standard input.

    The sea is                      one text per line; blank lines are skipped
    {"prompt": "The sea is"}        one object per line, in a *.jsonl file or if the first line
                                    begins with {"

The file name - means standard input.
"""

import collections
import dataclasses
import sys
from pathlib import Path
from typing import Any, NamedTuple, Sequence

import numpy as np

from zigzag.core import hosts
from zigzag.core.errors import ConfigError, one_line
from zigzag.core.options import Values, check_values, comments, flag
from zigzag.core.parts import Unused, added, part
from zigzag.disk.checkpoint import best_step, tokenizer_of_run
from zigzag.disk.lines import texts_of
from zigzag.disk.tokenizers import Tokenizer
from zigzag.generate.decoding import Sampling
from zigzag.parallel.network import Network


@dataclasses.dataclass(frozen=True)
class Flags(*added("OfSampling"), hosts.Processes):
    """python sample.py --run DIR --prompt TEXT: continue a text with a trained model

    Without a prompt, it continues each line of standard input or, in a terminal, what you type."""
    # the model
    run: str = "out"            # the --out of a train.py run
    checkpoint: str = ""        # its checkpoint: a step, best, or smallest:NAME or largest:NAME (of
                                # an evaluation); empty: the newest
    model: str = flag("", part="published")     # or a Hugging Face folder with a published model,
                                                # or its name on the hub (org/name)
    edited: bool = flag(False, part="published")
                                # load a published model into an edited model.py, even though it
                                # computes something different
    shards: int = 0             # devices to split the model over, independent of training
    mesh: str = ""              # or axis=size,...; data takes the remaining devices
    # what to do
    prompt: str = ""            # text to continue, or the input of an encoder-decoder; empty: begin
                                # a document
    prompts: str = ""           # or a file with a prompt, or an object with "prompt", per line
    source: str = ""            # or a .npy file of images or sound, for a model that reads them
    # which ids
    tokens: int = flag(256, least=1)    # number of new ids
    temperature: float = 0.8    # 0: greedy
    top_k: int = 0              # sample from the k most likely ids; 0: all
    top_p: float = 1.0          # nucleus sampling: from the most likely ids, up to this total
                                # probability
    min_p: float = 0.0          # sample from ids with at least this fraction of the largest
                                # probability
    repetition_penalty: float = 1.0     # above 1: penalize ids that already occur in the text
    stop: tuple = ()            # end an answer before any of these texts
    stop_at_context: bool = False       # end when the context is full, instead of continuing from
                                        # its second half
    seed: int = 0               # random seed
    # output
    json: bool = False          # print a JSON object for each text
    logprobs: bool = False      # add each new id and its log-probability to --json
    batch: int = flag(8, least=1)       # number of prompts, texts or choices to compute together

    def __post_init__(self) -> None:
        check_values(self)
        hosts.check_processes(self)
        if "" in self.stop:
            raise ConfigError("--stop '': expected text")
        _ = self.sampling       # Sampling rejects invalid values

    @property
    def sampling(self) -> Sampling:
        return Sampling(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Sampling)})


# The groups of flags in --help, named by the headings above them.
GROUPS: dict[str, list[str]] = {}
for name, comment in comments(Flags).items():
    GROUPS.setdefault(comment.group, []).append(name)
# {flag: the groups of flags and the individual flags that have no effect with it}
NOT_USED = collections.ChainMap(*added("NOT_USED"), {
    "prompts": Unused((), ("prompt",)), "model": Unused((), ("checkpoint",))})
# {flag: another flag that it requires}
NEEDS = collections.ChainMap(*added("NEEDS"), {"logprobs": "json", "edited": "model FOLDER"})


def check_given(given: Values) -> None:
    """Reject command-line flags that have no effect with the other flags."""
    for one, (groups, names) in NOT_USED.items():
        for name in (*(name for group in groups for name in GROUPS[group]), *names):
            if given.get(one) and given.get(name):
                raise ConfigError(f"--{name}: no effect with --{one}; leave it out")
    for name, needed in NEEDS.items():
        if given.get(name) and not given.get(needed.split()[0]):
            raise ConfigError(f"--{name} has no effect alone: give --{needed} too")


def step_of(run: str, step: str) -> int | None:
    """Return the step that --checkpoint names: a number, the step of "best", or the best step by
    smallest:NAME or largest:NAME. Return None (the newest) if it's empty."""
    if not step:
        return None
    if step == "best" or step.startswith(("smallest:", "largest:")):
        return best_step(run, by=step.removeprefix("best"))
    if not step.isdecimal() or len(step) > 18:
        raise ConfigError(f"--checkpoint {step}: expected the number of a step, best, "
                          f"smallest:NAME or largest:NAME")
    return int(step)


def needed_tokenizer(run: str) -> Tokenizer:
    """Return a run's tokenizer. Reject a run without one."""
    if tokenizer := tokenizer_of_run(run):
        return tokenizer
    raise ConfigError(f"--run {run}: a run of a different task, or without a tokenizer "
                      f"(fit(tokenizer=...) saves one; sample.load and sample.generate work with "
                      f"ids)")


class Input(NamedTuple):
    """The text of a file or of standard input (-)."""
    name: str               # for messages
    text: str

    @property
    def lines(self) -> list[tuple[str, str]]:
        """List a pair for each nonblank line: (its location, for messages; the line itself)."""
        return [(f"{self.name} line {number}", line.rstrip("\r"))   # only \n ends a line
                for number, line in enumerate(self.text.split("\n"), 1) if line.strip()]

    @property
    def has_objects(self) -> bool:
        """Whether each line is a JSON object."""
        return self.name.endswith(".jsonl") or self.text.lstrip().startswith('{"')

    def texts(self, field: str) -> list[str]:
        """Return each line's text: this field of its object, or the line if it isn't an object."""
        if self.has_objects:
            return [texts_of(line.encode(), where, (field,))[0] for where, line in self.lines]
        return [line for _, line in self.lines]


def read_input(path: str, flag: str) -> Input:
    """Read a file or standard input. If `flag` is empty, the text may be empty."""
    name = f"{flag} {path}" if path != "-" else "standard input"
    try:
        raw = Path(path).read_bytes() if path != "-" else sys.stdin.buffer.read()
        text = raw.decode("utf-8-sig")
    except OSError as e:
        raise ConfigError(f"{name}: {e.strerror}; expected a file of text") from None
    except UnicodeDecodeError as e:
        raise ConfigError(f"{name}: not UTF-8 ({e}); expected text in UTF-8") from None
    if flag and not text.strip():
        raise ConfigError(f"{name}: no text in it; expected at least one line")
    return Input(name, text)


# -------------------------------------------------------------------------------------------
# Texts as ids

class Prompt(NamedTuple):
    """A prompt, as text and as ids."""
    text: str               # the text from the user or the file
    ids: Sequence[int]      # the ids that the model continues
    source: Any = None      # an encoder's input
    begin: str = ""         # the text to show before the answer
    score: float | None = None      # a beam's score


def make_prompts(network: Network, c: Any, tokenizer: Tokenizer, texts: Sequence[str],
                 source: str = "") -> list[Prompt]:
    """Turn texts into prompts for this model. `source` is a .npy file for an encoder that doesn't
    read text. A single text is the prompt for all arrays in the file; several texts have one array
    each, or share a single array."""
    shape = network.source_shape(c)
    if source and reads_text(network, c):
        raise ConfigError(f"--source {source}: this model reads text; give it as --prompt")
    if shape is None:
        sources = [None] * len(texts)
    elif reads_text(network, c):
        if not all(map(str.strip, texts)):
            raise ConfigError("a prompt is empty: this model has an encoder, which needs text")
        sources = list(map(tokenizer.with_ends, texts))
    else:
        sources = load_sources(source, shape)
        if len(texts) == 1 or len(sources) == 1:
            texts, sources = [*texts] * len(sources), [*sources] * len(texts)
        if len(texts) != len(sources):
            raise ConfigError(f"--source {source}: {len(sources)} arrays for {len(texts)} prompts")
    if shape is None or network.source_ids(c):      # a decoder reads the text
        return [Prompt(text, tokenizer.prompt(text), one, text)
                for text, one in zip(texts, sources)]
    start = special_ids(c, tokenizer)[:1]
    return [Prompt(text, start, one) for text, one in zip(texts, sources)]


def special_ids(c: Any, tokenizer: Tokenizer) -> tuple[int, int, int]:
    """Return an encoder-decoder's (id that begins a text, id that ends a text, padding id)."""
    if not c.published:
        return tokenizer.ends[0], tokenizer.ends[0], 0
    return part("published.llama", "the ids of a published model").special_ids(c, tokenizer)


def reads_text(network: Network, c: Any) -> bool:
    """Return whether a model has no encoder, or one that reads text."""
    shape = network.source_shape(c)
    return shape is None or len(shape) == 1


def load_sources(path: str, shape: tuple[int, ...]) -> Sequence[np.ndarray]:
    """Load arrays of this shape from a .npy file (one, or several stacked as [n, ...]), for an
    encoder that doesn't read text."""
    try:
        arrays = np.load(path, mmap_mode="r", allow_pickle=False)
        found = arrays[None] if arrays.shape == shape else arrays
        if found.shape[1:] != shape or not len(found) or found.dtype.kind not in "biuf":
            raise ValueError(f"it has {arrays.dtype} {list(arrays.shape)}")
    except (OSError, ValueError, TypeError, EOFError, AttributeError) as e:
        raise ConfigError(f"--source {path!r}: expected a .npy file with an array of "
                          f"{list(shape)}, or several ({one_line(e)})") from None
    return found
