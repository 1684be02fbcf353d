"""The flags that forecast/ adds, and its commands."""

import dataclasses

from zigzag.core.options import flag
from zigzag.core.parts import Command


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfTraining:
    """Flags of train.py."""
    # model
    depth: int | None = flag(None, least=1, same=True)
                                    # layers of a model whose width, heads, batch, steps, lr, warmup
                                    # and weight_decay follow by scaling rules, unless given

    # measuring
    bench: bool = flag(False, recorded=False)
                                    # measure the training speed here; keeps nothing on disk
    topology: str = flag("", recorded=False)
                                    # compile for absent hardware (v5e:4x4, h100:1x2x8) and report;
                                    # --mesh auto chooses the fastest mesh, there or here

    # while training (rare)
    minutes: float = flag(0.0, recorded=False)  # train for this long instead of --steps, based on
                                    # the speed of a few trial steps
    # mesh (rare)
    slices: int = flag(1, least=1, beside="topology", recorded=False)
                                    # how many TPU slices --topology has; data splits over them


COMMANDS = {"bench": Command("forecast.bench", unused=("topology",)),
            "topology": Command("forecast.dry_run")}
