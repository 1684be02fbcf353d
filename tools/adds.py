"""The flags that tools/ adds, and its commands."""

import dataclasses
import math

from zigzag.core.errors import ConfigError
from zigzag.core.options import flag
from zigzag.core.parts import Command, Unused


def _check_save(picture):
    if picture:         # with --plot, zigzag/core/flags.py runs the command without this check
        raise ConfigError(f"--save {picture}: names the picture of --plot RUN, which was not given")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfTraining:
    """Flags of train.py."""
    # saving
    log: tuple[str, ...] = ()       # also log to tensorboard, wandb, trackio; none: stop logging

    # measuring
    plot: tuple[str, ...] = flag((), recorded=False)
                                    # plot loss, rate and speed of these runs as text, then exit

    # measuring (rare)
    save: str = flag("", recorded=False, check=_check_save)
                                    # with --plot: write an image instead (.png, .pdf, .svg)


COMMANDS = {"plot": Command("tools.plots", alone=True, beside=("save",))}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfSampling:
    """Flags of sample.py."""
    # what to do
    chat: bool = False          # answer each prompt as a message, using the model's chat template.
                                # In a terminal without a prompt, such a model chats anyway
    system: str = ""            # system message of a conversation
    score: str = ""             # print the log-probability of this file's text, or of each text in
                                # a file of JSON objects with "text"
    by: str = flag("", one_of=("", "line"))     # with --score: line, to score each line of a text
                                                # separately
    choices: str = ""           # answer each question in this .jsonl file by the log-probabilities
                                # of its choices, and print the accuracy
    bench: bool = False         # measure how fast the model generates here
    # which ids
    beams: int = 0              # print this many continuations from beam search (no temperature)
    length_penalty: float = flag(1.0, least=-math.inf)
                                        # beam search divides scores by length to this power


# Flags of sample.py about prompts, which the commands below don't use.
OF_PROMPTS = ("prompt", "prompts", "chat", "logprobs")
SAMPLING = {"bench": "tools.generation_speed", "score": "tools.scores", "choices": "tools.choices"}
NOT_USED = {"bench": Unused(("which ids",), (*OF_PROMPTS, "score", "choices", "source", "system",
                                             "json", "batch")),
            "score": Unused(("which ids",), (*OF_PROMPTS, "choices")),
            "choices": Unused(("which ids",), OF_PROMPTS),
            "beams": Unused((), ("temperature", "top_k", "top_p", "min_p", "repetition_penalty",
                                 "seed", "logprobs")),
            "chat": Unused((), ("source",))}
NEEDS = {"by": "score FILE", "length_penalty": "beams"}
