"""The flags that accounts/ adds, its commands, and what it does around a step."""

import dataclasses

from zigzag.core.options import flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfTraining:
    """Flags of train.py."""
    # training (rare)
    find_nan: bool = flag(False, recorded=False)
                                    # if an update isn't finite, find the layer, function and weight
                                    # where that begins
    accept: float = flag(0.0, recorded=False)   # with --dtype bfloat16: compare the first 32
                                    # updates with float32; end the run if the loss differs by more
                                    # than this fraction (0.01)


# {flag: the module whose `watched(loop)` returns the step to run instead of loop.step}
STEPS = {"find_nan": "accounts.find_nan", "accept": "accounts.accept"}
