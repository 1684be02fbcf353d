"""The flags that accounts/ adds, its commands, and what it does around a step."""

import dataclasses

from zigzag.core.options import flag
from zigzag.core.parts import Command


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfTraining:
    """Flags of train.py."""
    # measuring (rare)
    report: tuple[str, ...] = flag((), recorded=False)
                                    # say where the time of these runs went, then exit
    against: str = flag("", recorded=False)
                                    # compare the compiled step, and a token, with another git
                                    # revision's (HEAD~1): what an edit costs, and on which line

    # while training (rare)
    profile: int = flag(0, recorded=False)  # steps to trace for Perfetto, in out/profile
    find_nan: bool = flag(False, recorded=False)
                                    # if an update isn't finite, find the layer, function and weight
                                    # where that begins
    accept: float = flag(0.0, recorded=False)   # with --dtype bfloat16: compare the first 32
                                    # updates with float32; end the run if the loss differs by more
                                    # than this fraction (0.01)


COMMANDS = {"report": Command("accounts.spent", alone=True),
            "against": Command("accounts.against", unused=("bench",))}
# {flag: the module whose `watched(loop)` returns the step to run instead of loop.step}
STEPS = {name: f"accounts.{name}" for name in ("find_nan", "accept", "profile")}
