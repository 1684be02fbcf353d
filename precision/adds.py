"""The flags that precision/ adds, and what it does to a step before it compiles."""

import dataclasses

from zigzag.core.options import flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfTraining:
    """Flags of train.py."""
    # training (rare)
    initial_scale: float = flag(32768.0, least=1e-6, same=True)
                                    # --dtype float16: the first loss scale, halved after each
                                    # overflow, doubled after 2,000 updates without one
    # mesh (rare)
    send_dtype: str = flag("", one_of=("", "float8"), same=True)
                                    # float8: with --dtype bfloat16, fsdp, tensor and pipe send 8
                                    # bits per number, with a scale for each row


# {flag: the module whose `rewritten(step, plan)` returns the step to compile}
PROGRAMS = {"send_dtype": "precision.send"}
