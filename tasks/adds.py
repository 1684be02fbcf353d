"""The flags that tasks/ adds."""

import dataclasses

from tasks import metrics
from zigzag.core.errors import ConfigError
from zigzag.core.options import flag


def _check_fields(names):
    if len(names) != 2:
        raise ConfigError(f"--fields {' '.join(names)}: expected two names, of the source and of "
                          f"the target")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfTraining:
    """Flags of train.py."""
    # data (rare)
    fields: tuple[str, ...] = flag(("source", "target"), of=("pairs",), check=_check_fields)
                                    # field names of the two texts in a file of pairs

    # evaluation (rare)
    metric: str = flag("", one_of=("", *metrics.TEXT_METRICS, "accuracy"), of=("pairs", "arrays"))
                                    # score answers to held-out text pairs by exact, f1, rouge or
                                    # rouge_stemmed (needs the nltk package), or predicted classes
                                    # by accuracy or f1
    beams: int = flag(0, of=("pairs",))     # beam width for these answers; 0: greedy
