"""A run's less common options. train.Config has the options to know first."""

import dataclasses
import math

from zigzag.core.errors import derive
from zigzag.core.hosts import Processes
from zigzag.core.options import check_values, flag
from zigzag.core.parts import added
from zigzag.run import checks, schedules
from zigzag.run.evaluation import tokens_to_evaluate


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoreOptions(*added("OfTraining"), Processes):
    """A run's options that edits to train.py don't touch, plus options that this copy's parts add
    (adds.py in each). The headings are the groups in --help; only --help all shows the rare
    options."""
    # training
    epochs: float = flag(0.0, recorded=False)   # instead of steps: passes over all examples
    tokens: float = flag(0, recorded=False, of=("text",))   # instead of steps: tokens to train on

    # model
    model: str = "tiny"             # a model's name, for example 124m (other flags change its
                                    # sizes), a folder with its weights, or its
                                    # name on the hub (org/name)
    init_from: str = flag("", same=True)    # a run to take the model and first weights from

    # mesh
    zero: int = flag(0, one_of=(0, 1, 2))   # 1: split the optimizer's state over data; 2: also the
                                    # gradients, in each part of the batch

    # saving
    change: tuple[str, ...] = flag((), recorded=False)
                                    # what may change when a run resumes: lr, decay, weight_decay,
                                    # clip, data
    keep: int = flag(3, least=1)    # number of newest checkpoints to keep

    # evaluation
    best: tuple[str, ...] = ()      # smallest:NAME or largest:NAME, one or more: keep the
                                    # checkpoint whose evaluation has the best value of this number;
                                    # none: stop keeping it

    # data (rare)
    mix: tuple[str, ...] = flag((), same=True, of=("text",))
                                    # mixing weights for several --data, one per path (0.7 0.3)
    pack: str = flag("", one_of=("", "stream", "documents"), same=True, of=("text",))
                                    # stream: rows of running text; documents: whole documents,
                                    # which can't see each other; '': stream, except for chats
    field: str = flag("text", same=True, change="data", of=("text",))
                                    # field or column that holds the text (JSON lines, .parquet)
    weight_field: str = flag("", same=True, change="data", of=("text",))
                                    # field with loss weights in JSON lines: one number per line,
                                    # or a list with one per token

    # model (rare)
    edited: bool = flag(False, part="published")
                                    # load a published model into an edited model.py, even though it
                                    # computes something different

    # training (rare)
    cooldown: float | None = flag(None, same=True, change="decay")
                                    # with --decay wsd: updates or fraction of steps over which the
                                    # rate falls at the end; default: a fifth of the steps
    decay_steps: int | None = flag(None, least=1, change="decay")
                                    # updates until the decay ends, after which the rate stays
                                    # constant; default: steps
    first_share: float | None = flag(None, same=True, change="decay")
                                    # first rate, as a fraction of the peak; default: 1 / warmup
    final_share: float = flag(0.02, same=True, change="decay")
                                    # last rate, as a fraction of the peak
    beta1: float = flag(0.9, below=1, same=True)    # AdamW's decay rate for the mean gradient
    beta2: float = flag(0.95, below=1, same=True)   # AdamW's decay rate for the mean squared
                                    # gradient
    ema: float = flag(0.0, below=1, same=True)      # evaluate and save a running average of the
                                    # weights, with this decay rate (0.999); 0: none

    # while training (rare)
    max_skipped: int = flag(10, least=1)
                                    # end the run after this many updates in a row whose loss or
                                    # gradient isn't finite
    check: bool = flag(False, recorded=False)
                                    # before the first step, check the loss and its gradients on the
                                    # mesh against one device's, on a small batch

    # mesh (rare)
    override: tuple[str, ...] = ()  # REGEX=axis,-,axis: how to store weights; the last match wins
    fsdp_min: int = 4096            # fewest elements in a weight that fsdp or zero splits
    collectives: str = flag("explicit", one_of=("explicit", "compiler"))
                                    # who makes the collectives: explicit (shard.py writes them)
                                    # or compiler

    # saving (rare)
    save_dtype: str = flag("", one_of=("", "bfloat16"), same=True)
                                    # bfloat16: checkpoints hold the weights (not the optimizer's
                                    # state) in 16 bits, and a run resumes from these
    verify: str = flag("on", one_of=("on", "off"))
                                    # on or off: verify a checkpoint's checksums when reading it

    # evaluation (rare)
    held_out: tuple[str, ...] = flag((), same=True)
                                    # evaluation data, given like --data; empty: a tenth of --data
    eval_first: bool = False        # also evaluate and save before the first update
    eval_batch: int | None = flag(None, least=1)
                                    # held-out examples to compute at once; default: batch /
                                    # accumulate
    eval_tokens: int | None = flag(None, least=1, of=("text",))
                                    # held-out tokens of running text per evaluation; default: as
                                    # many as keep evaluations to a fifth of the run's time
    sample_temperature: float = flag(0.8, of=("text",))
                                    # temperature of the text that an evaluation prints; 0: greedy

    # measuring
    verbose: bool = flag(False, recorded=False)
                                    # print how and why each weight is split, and every collective

    def __post_init__(self) -> None:
        best = self.best.split() if isinstance(self.best, str) else self.best
        object.__setattr__(self, "best", tuple(name for name in best if name not in ("", "none")))
        checks.check_config(self)
        if self.tokens:
            steps = math.ceil(self.tokens / (self.batch * self.network.seq_len))
            object.__setattr__(self, "steps", steps)
            object.__setattr__(self, "tokens", 0)
            check_values(self)
        all_of_it = self.init_from and not self.network.lora_rank
        derive(self, lr=(0.05 if all_of_it else 0.5) / self.network.d_model)
        schedules.fill_in(self)
        if not self.epochs:         # with epochs, the number of steps depends on the data
            fifth = max(1, self.steps // 5)
            derive(self, save_every=fifth, eval_every=fifth)
            derive(self, eval_tokens=tokens_to_evaluate(self))
