"""The flags and the command that forecast/ adds."""

import dataclasses

from zigzag.core.options import flag
from zigzag.core.parts import Command, Unused


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfTraining:
    """Flags of train.py."""
    # measuring
    topology: str = flag("", recorded=False)
                                    # compile for absent hardware (v5e:4x4, h100:1x2x8) and report;
                                    # --mesh auto chooses the fastest mesh, there or here


COMMANDS = {"topology": Command("forecast.dry_run", Unused(
    ("saving", "evaluation"), ("check", "profile", "max_skipped", "bench", "minutes")))}
